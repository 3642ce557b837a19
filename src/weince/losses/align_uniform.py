"""Alignment and uniformity: ``mean d+² + w log mean exp(-u d²)`` with squared distances ``d² = 2 - 2 s``.

Wang and Isola 2020, "Understanding Contrastive Representation Learning through Alignment and Uniformity on the
Hypersphere". The second mean is over all pairs of an anchor and a negative in the batch.
"""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from weince.links import AffineLink
from weince.losses.base import ContrastiveLoss
from weince.losses.functional import functional
from weince.losses.options import Options
from weince.parameters import check_positive
from weince.sums import Batch, Count, LogSumExp, Sum, Summed


class AlignUniformLoss(ContrastiveLoss):
    """Alignment and uniformity: it pulls positives together and spreads all rows over the sphere.

    Args:
        weight: ``w``: weight of the uniformity term.
        spread: ``u``: how fast the repulsion falls off with the squared distance.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import AlignUniformLoss
        >>> AlignUniformLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    per_anchor = needs_negatives = takes_offset = takes_dot = False
    search_space = ({"weight": 1.0}, {"weight": 2.0}, {"weight": 0.5})

    def __init__(self, *, weight: float = 1.0, spread: float = 2.0, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        check_positive("weight", weight)
        check_positive("spread", spread)
        self.weight, self.spread = weight, spread

    def sums(self, batch: Batch) -> list[Sum]:
        kernel = AffineLink(2 * self.spread, -2 * self.spread)  # -u d²
        return [LogSumExp(kernel, positive=AffineLink(-2.0, 2.0)), Count()]

    def combine(self, lse: Summed, count: Tensor, *, gather: Callable[[Tensor], Tensor]) -> Tensor:
        counts = gather(count)
        every = torch.where(counts > 0, gather(lse.value), torch.finfo(counts.dtype).min)
        uniformity = torch.logsumexp(every, 0) - counts.sum().clamp_min(1).log()
        return lse.positive + self.weight * torch.where(counts.any(), uniformity, 0.0)


align_uniform_loss = functional(AlignUniformLoss, "align_uniform_loss")
