"""HCL and Debiased: negatives weighted by hardness, minus the expected contribution of false negatives.

With ``N`` negatives, the loss is ``-log(exp(s+/t) / (exp(s+/t) + g))``, where ``g`` is
``(N * sum exp((1 + b) s/t) / sum exp(b s/t) - p N exp(s+/t)) / (1 - p)``, but at least ``N exp(-1/t)``.
Robinson et al. 2021, "Contrastive Learning with Hard Negative Samples"; ``b = 0`` is Chuang et al. 2020, "Debiased
Contrastive Learning".
"""

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from weince.links import AffineLink, SoftmaxLink
from weince.losses.functional import functional
from weince.losses.temperature import LearnedOptions, TemperatureLoss, temperatures
from weince.parameters import Scalar, is_number
from weince.scores import log1pexp
from weince.sums import Batch, Count, LogSumExp, Sum, Summed


class HCLLoss(TemperatureLoss):
    """HCL: InfoNCE that gives hard negatives more weight and subtracts the expected false negatives.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        hardness: ``b``: how strongly the weight of a negative grows with its score; 0 is Debiased.
        false_negatives: ``p``: expected share of negatives with the class of the anchor.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import HCLLoss
        >>> HCLLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    options: ClassVar[type] = LearnedOptions
    several_positives = takes_offset = takes_dot = takes_hardness = False
    search_space = (
        *temperatures(0.5, 0.2, 0.1),
        {"temperature": 0.5, "hardness": 0.5},
        {"temperature": 0.5, "hardness": 2.0},
    )

    def __init__(
        self,
        temperature: Scalar = 0.5,
        *,
        hardness: float = 1.0,
        false_negatives: float = 0.1,
        **options: Unpack[LearnedOptions],
    ) -> None:
        super().__init__(temperature, **options)
        if not is_number(hardness) or not 0 <= hardness < float("inf"):
            raise ValueError(f"hardness must be a number of at least 0; got {hardness!r}")
        if not is_number(false_negatives) or not 0 <= false_negatives < 1:
            raise ValueError(f"false_negatives must be a share in [0, 1); got {false_negatives!r}")
        self.hardness, self.false_negatives = hardness, false_negatives

    def sums(self, batch: Batch) -> list[Sum]:
        temperature = self.temperature_now()
        scale = 1 / temperature
        harder = LogSumExp(AffineLink((1 + self.hardness) * scale), positive=SoftmaxLink(temperature))
        if not self.hardness:
            return [harder, Count()]
        return [harder, Count(), LogSumExp(AffineLink(self.hardness * scale))]

    def combine(self, harder: Summed, count: Tensor, weights: Summed | None = None) -> Tensor:
        share, log_count = self.false_negatives, count.clamp_min(1).log()
        # All values are logarithms. Without hardness the weights are 1, and their sum is the count.
        seen = harder.value if weights is None else harder.value - weights.value + log_count
        negatives = seen
        lowest = (log_count - 1 / self.temperature_now()).to(seen.dtype)
        if share:
            false = harder.positive + log_count + torch.log(torch.full_like(count, share))
            # Negatives are left only if the difference exceeds rounding: closer to 0, log1p(-1) has no gradient.
            some = ~(false - seen >= -torch.finfo(seen.dtype).eps)  # NaN stays NaN
            left = torch.where(some, false - seen, -torch.inf)
            negatives = seen + torch.log1p(-left.exp())
            negatives = torch.where(some, negatives, -torch.inf) - torch.log1p(torch.full_like(count, -share))
        return log1pexp(torch.maximum(negatives, lowest) - harder.positive)


class DebiasedLoss(HCLLoss):
    """Debiased: InfoNCE that subtracts the expected false negatives; HCL without hardness.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        false_negatives: Expected share of negatives with the class of the anchor.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import DebiasedLoss
        >>> DebiasedLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    search_space = temperatures(0.5, 0.2, 0.1)

    def __init__(
        self,
        temperature: Scalar = 0.5,
        *,
        false_negatives: float = 0.1,
        **options: Unpack[LearnedOptions],
    ) -> None:
        hardness = options.pop("hardness", None)  # type: ignore[typeddict-item]
        super().__init__(temperature, hardness=0.0, false_negatives=false_negatives, **options)
        if hardness is not None:
            raise TypeError("DebiasedLoss has no option 'hardness': use HCLLoss")


hcl_loss = functional(HCLLoss, "hcl_loss")
debiased_loss = functional(DebiasedLoss, "debiased_loss")
