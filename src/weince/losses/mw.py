"""MW: the mean of ``softplus((s - s+) / t)`` over the negatives, a pairwise comparison of each with the positive.

arXiv 2510.00137.
"""

from typing import Unpack

from torch import Tensor

from weince.links import AffineLink
from weince.losses.functional import functional
from weince.losses.temperature import TemperatureLoss, TemperatureOptions, temperatures
from weince.parameters import Scalar
from weince.sums import Batch, Count, SoftplusSum, Sum


class MWLoss(TemperatureLoss):
    """MW: how often a negative beats the positive (the Mann-Whitney statistic), made smooth.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        **options: ``max_scale`` and ``learn_temperature`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import MWLoss
        >>> MWLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    several_positives = takes_offset = takes_hardness = False
    search_space = temperatures(0.02, 0.05, 0.01)

    def __init__(self, temperature: Scalar = 0.02, **options: Unpack[TemperatureOptions]) -> None:
        super().__init__(temperature, **options)

    def sums(self, batch: Batch) -> list[Sum]:
        scale = 1 / self.temperature_now()
        return [SoftplusSum(AffineLink(scale, -batch.positive_scores() * scale)), Count()]

    def combine(self, total: Tensor, count: Tensor) -> Tensor:
        return total / count.clamp_min(1)


mw_loss = functional(MWLoss, "mw_loss")
