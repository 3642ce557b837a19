"""RINCE: InfoNCE that tolerates wrong positives, ``-exp(q s+/t) / q + (w (exp(s+/t) + sum exp(s/t)))^q / q``.

Chuang et al. 2022, "Robust Contrastive Learning against Noisy Views".
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from weince.losses.functional import functional
from weince.losses.temperature import TemperatureLoss, TemperatureOptions, temperatures
from weince.parameters import Scalar, check_fixed, is_number
from weince.scores import free_to_look, log1pexp
from weince.sums import Batch, LogSumExp, Summed


class RINCELoss(TemperatureLoss):
    """RINCE: between InfoNCE (``q`` to 0) and a symmetric loss that noisy views hurt less (``q = 1``).

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it. At least ``q / 60``, for float64 embeddings
            ``q / 600``: the loss grows as ``exp(q / temperature)``.
        q: Robustness, in (0, 1].
        weight: ``w``: factor of the denominator.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import RINCELoss
        >>> RINCELoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    several_positives = False
    search_space = (*temperatures(0.5, 0.2, 0.1), {"temperature": 0.5, "q": 0.5})

    def __init__(
        self,
        temperature: Scalar = 0.5,
        *,
        q: float = 0.1,
        weight: float = 0.01,
        **options: Unpack[TemperatureOptions],
    ) -> None:
        super().__init__(temperature, **options)
        if not is_number(q) or not 0 < q <= 1:
            raise ValueError(f"q must lie in (0, 1]; got {q!r}")
        check_fixed("weight", weight)
        self.q, self.weight = q, weight

    def sums(self, batch: Batch) -> LogSumExp:
        temperature, dtype = self.temperature_now(), batch.problem.anchors.dtype
        lowest = self.q / (600 if dtype == torch.float64 else 60)  # gradients are larger than the loss
        if isinstance(temperature, Tensor):
            overflows = free_to_look(temperature) and bool((temperature < lowest).any())
        else:
            overflows = temperature < lowest
        if overflows:
            raise ValueError(
                f"temperature must be at least {lowest:.3g} for q={self.q} in {dtype}, or the loss overflows; "
                f"got {temperature}"
            )
        return self.softmax_sum(temperature)

    def combine(self, lse: Summed) -> Tensor:
        # The powers are exp(own) and exp(own + more). Their difference, with the larger one taken out, neither
        # cancels nor overflows. At more = 0 only one of the two clamped terms passes a gradient.
        own = self.q * lse.positive
        more = self.q * (log1pexp(self.eased(lse).value - lse.positive) + math.log(self.weight))
        above, below = torch.relu(more), more.clamp_max(0)
        return torch.exp(own + above) * (torch.expm1(below) - torch.expm1(-above)) / self.q


rince_loss = functional(RINCELoss, "rince_loss")
