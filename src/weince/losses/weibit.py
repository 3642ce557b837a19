"""Weibit: InfoNCE with the shortfall link, ``-beta log(endpoint - s)``."""

from typing import Unpack

from torch import Tensor

from weince.links import ShortfallLink
from weince.losses.base import ContrastiveLoss
from weince.losses.functional import functional
from weince.losses.options import Options
from weince.parameters import Scalar, unrounded
from weince.sums import Batch, LogSumExp, Summed


class WeibitLoss(ContrastiveLoss):
    """Weibit: softmax of ``-beta * log(endpoint - s)``. An endpoint above 1 gives a Student-t kernel (t-SimCNE).

    Args:
        beta: Slope; a number, or an ``nn.Parameter`` to learn it.
        endpoint: At least 1, the largest cosine.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import WeibitLoss
        >>> WeibitLoss(beta=3.0)(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    needs_negatives = takes_dot = False
    search_space = ({"beta": 2.0}, {"beta": 4.0}, {"beta": 1.0}, {"beta": 8.0})

    def __init__(self, beta: Scalar = 1.0, endpoint: float = 1.0, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        ShortfallLink(beta, endpoint)  # checks both
        self.beta, self.endpoint = beta, endpoint

    def sums(self, batch: Batch) -> LogSumExp:
        return LogSumExp(ShortfallLink(unrounded(self.beta), self.endpoint))

    def combine(self, lse: Summed) -> Tensor:
        return lse.cross_entropy()


weibit_loss = functional(WeibitLoss, "weibit_loss")
