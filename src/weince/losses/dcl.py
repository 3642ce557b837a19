"""DCL: InfoNCE without the positive in the denominator, ``-s+/t + log sum exp(s/t)``.

Yeh et al. 2022, "Decoupled Contrastive Learning".
"""

from typing import Unpack

import torch
from torch import Tensor

from weince.links import AffineLink
from weince.losses.functional import functional
from weince.losses.temperature import TemperatureLoss, TemperatureOptions
from weince.parameters import Scalar, check_positive
from weince.sums import Batch, LogSumExp, Summed


class DCLLoss(TemperatureLoss):
    """DCL: the denominator leaves out the positive, so that easy pairs keep their gradient.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import DCLLoss
        >>> DCLLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True

    def sums(self, batch: Batch) -> LogSumExp:
        return self.softmax_sum()

    def combine(self, lse: Summed) -> Tensor:
        return self.eased(lse).value - lse.positive


class DCLWLoss(DCLLoss):
    """DCLW: DCL with positives weighted by ``2 - n softmax(s+ / sigma)`` over the batch: distant ones count more.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        sigma: Temperature of the weights.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import DCLWLoss
        >>> DCLWLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    several_positives = False

    def __init__(
        self,
        temperature: Scalar = 0.1,
        *,
        sigma: float = 0.5,
        **options: Unpack[TemperatureOptions],
    ) -> None:
        super().__init__(temperature, **options)
        check_positive("sigma", sigma)
        self.sigma = sigma

    def sums(self, batch: Batch) -> LogSumExp:
        temperature = self.temperature_now()
        scores = batch.positive_scores().detach() / self.sigma
        every = batch.gather(scores)
        weight = 2 - len(every) * (scores - torch.logsumexp(every, 0)).exp()
        request = self.softmax_sum(temperature)
        request.positive = AffineLink(weight / temperature)
        return request


dcl_loss = functional(DCLLoss, "dcl_loss")
dclw_loss = functional(DCLWLoss, "dclw_loss")
