"""Focal: InfoNCE whose easy anchors count less, ``(1 - p)^g`` times ``-log p`` of the positive's probability ``p``.

arXiv 2506.20923; Lin et al. 2017, "Focal Loss for Dense Object Detection".
"""

from typing import Unpack

import torch
from torch import Tensor

from weince.losses.functional import functional
from weince.losses.temperature import TemperatureLoss, TemperatureOptions
from weince.parameters import Scalar, check_fixed
from weince.sums import Batch, LogSumExp, Summed


class FocalLoss(TemperatureLoss):
    """Focal: InfoNCE times ``(1 - p)^gamma``.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        gamma: ``g``: how fast the weight falls as the positive's probability rises.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import FocalLoss
        >>> FocalLoss(0.05, gamma=1.0)(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    several_positives = needs_negatives = False
    search_space = ({"gamma": 0.5}, {"gamma": 1.0}, {"gamma": 2.0})

    def __init__(
        self, temperature: Scalar = 0.1, *, gamma: float = 0.5, **options: Unpack[TemperatureOptions]
    ) -> None:
        super().__init__(temperature, **options)
        check_fixed("gamma", gamma)
        self.gamma = gamma

    def sums(self, batch: Batch) -> LogSumExp:
        return self.softmax_sum()

    def combine(self, lse: Summed) -> Tensor:
        nats = self.eased(lse).cross_entropy()
        # 1 - p without cancellation; at 0 the power would have an infinite slope.
        others = -torch.expm1(-nats)
        return others.clamp_min(torch.finfo(nats.dtype).tiny) ** self.gamma * nats


focal_loss = functional(FocalLoss, "focal_loss")
