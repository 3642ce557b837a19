"""RINCE: InfoNCE that tolerates wrong positives, ``-exp(q s+/t) / q + (l (exp(s+/t) + sum exp(s/t)))^q / q``.

Chuang et al. 2022, "Robust Contrastive Learning against Noisy Views".
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from weince.engines.base import Engine
from weince.links import Scalar, SoftmaxLink, check_positive
from weince.losses.base import Options, functional
from weince.losses.temperature import TemperatureLoss, temperatures
from weince.sums import LogSumExp, Summed


class RINCELoss(TemperatureLoss):
    """RINCE: between InfoNCE (``q`` to 0) and a symmetric loss that noisy views hurt less (``q = 1``).

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        q: Robustness, in (0, 1].
        weight: ``l``: weight of the denominator.
        max_scale: Largest inverse of a learned temperature.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import RINCELoss
        >>> RINCELoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    several_positives = False
    search_space = (*temperatures(0.5, 0.2, 0.1), {"temperature": 0.5, "q": 0.5})

    def __init__(
        self,
        temperature: Scalar = 0.5,
        *,
        q: float = 0.1,
        weight: float = 0.01,
        max_scale: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(temperature, max_scale=max_scale, **options)
        if not 0 < q <= 1:
            raise ValueError(f"q must lie in (0, 1]; got {q}")
        check_positive("weight", weight)
        self.q, self.weight = q, weight

    def sums(self, batch: Engine) -> LogSumExp:
        return LogSumExp(SoftmaxLink(self.bounded_temperature()))

    def combine(self, lse: Summed) -> Tensor:
        everyone = torch.logaddexp(lse.positive, lse.value) + math.log(self.weight)
        # Both powers less 1: for small q they are near 1, and their difference would have few digits.
        return (torch.expm1(self.q * everyone) - torch.expm1(self.q * lse.positive)) / self.q


rince_loss = functional(RINCELoss, "rince_loss")
