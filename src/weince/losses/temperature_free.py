"""Temperature-free: InfoNCE on ``log((1 + s) / (1 - s))``, twice the inverse hyperbolic tangent of the score.

Kim and Kim 2025, "Temperature-Free Loss Function for Contrastive Learning".
"""

from torch import Tensor

from weince.links import AtanhLink
from weince.losses.base import ContrastiveLoss
from weince.losses.functional import functional
from weince.sums import Batch, LogSumExp, Summed


class TemperatureFreeLoss(ContrastiveLoss):
    """Temperature-free: softmax of ``log((1 + s) / (1 - s))``, without a parameter to tune.

    Args:
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import TemperatureFreeLoss
        >>> TemperatureFreeLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    needs_negatives = takes_dot = False

    def sums(self, batch: Batch) -> LogSumExp:
        return LogSumExp(AtanhLink())

    def combine(self, lse: Summed) -> Tensor:
        return lse.cross_entropy()


temperature_free_loss = functional(TemperatureFreeLoss, "temperature_free_loss")
