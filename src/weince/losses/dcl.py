"""DCL: InfoNCE without the positive in the denominator, ``-s+/t + log sum exp(s/t)``.

Yeh et al. 2022, "Decoupled Contrastive Learning".
"""

from typing import Unpack

import torch
from torch import Tensor

from weince.engines.base import Engine
from weince.links import AffineLink, SoftmaxLink
from weince.losses.base import Options, functional
from weince.losses.temperature import TemperatureLoss
from weince.parameters import Scalar, check_positive
from weince.sums import LogSumExp, Summed


class DCLLoss(TemperatureLoss):
    """DCL: the denominator leaves out the positive, so that easy pairs keep their gradient.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        max_scale: Largest inverse of a learned temperature.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import DCLLoss
        >>> DCLLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    def sums(self, batch: Engine) -> LogSumExp:
        return LogSumExp(SoftmaxLink(self.bounded_temperature()))

    def combine(self, lse: Summed) -> Tensor:
        return lse.value - lse.positive


class DCLWLoss(DCLLoss):
    """DCLW: DCL with positives weighted by ``2 - n softmax(s+ / sigma)`` over the batch: distant ones count more.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        sigma: Temperature of the weights.
        max_scale: Largest inverse of a learned temperature.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import DCLWLoss
        >>> DCLWLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    several_positives = False

    def __init__(
        self,
        temperature: Scalar = 0.1,
        *,
        sigma: float = 0.5,
        max_scale: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(temperature, max_scale=max_scale, **options)
        check_positive("sigma", sigma)
        self.sigma = sigma

    def sums(self, batch: Engine) -> LogSumExp:
        temperature = self.bounded_temperature()
        own = batch.positive_scores().detach() / self.sigma
        ranks = batch.problem.ranks
        every = own if ranks is None else ranks.gather(own)
        weight = 2 - len(every) * (own - torch.logsumexp(every, 0)).exp()
        return LogSumExp(SoftmaxLink(temperature), positive=AffineLink(weight / temperature))


dcl_loss = functional(DCLLoss, "dcl_loss")
dclw_loss = functional(DCLWLoss, "dclw_loss")
