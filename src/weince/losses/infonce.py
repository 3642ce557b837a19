"""InfoNCE (NT-Xent): ``-s+/t + log(exp(s+/t) + sum exp(s/t))``.

van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding"; Chen et al. 2020, "A Simple
Framework for Contrastive Learning of Visual Representations".
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from weince.links import AffineLink
from weince.losses.functional import functional
from weince.losses.temperature import TemperatureLoss, TemperatureOptions
from weince.parameters import Scalar
from weince.sums import Batch, SoftplusSum, Sum, Summed


class InfoNCELoss(TemperatureLoss):
    """InfoNCE (NT-Xent): softmax of ``s / temperature``.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        other_positives: With labels, whether the denominator of a positive holds the anchor's other positives, as
            SupCon's does. False: only the positive and the negatives, as NT-Xent in pytorch-metric-learning.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import InfoNCELoss
        >>> InfoNCELoss(0.2)(torch.eye(4), torch.eye(4)).shape
        torch.Size([])
    """

    ours = True
    needs_negatives = False

    def __init__(
        self,
        temperature: Scalar = 0.2,
        *,
        other_positives: bool = True,
        **options: Unpack[TemperatureOptions],
    ) -> None:
        super().__init__(temperature, **options)
        if not isinstance(other_positives, bool):
            raise ValueError(f"other_positives must be True or False; got {other_positives!r}")
        self.other_positives = other_positives

    def sums(self, batch: Batch) -> Sequence[Sum]:
        request = self.softmax_sum()
        if self.other_positives or batch.positives is None:
            return (request,)
        if "offset" in batch.problem.of_candidate:
            raise ValueError("other_positives=False has no meaning for logits with an offset; got offset=")
        # With the sum over the negatives known, log(1 + exp(lse - s+/t)) of each positive is one more sum.
        (lse,) = batch.sums((request,))
        assert isinstance(lse, Summed)
        each = AffineLink(-1 / self.temperature_now(), self.eased(lse).value)
        return request, SoftplusSum(each, among="positives")

    def combine(self, lse: Summed, each: Tensor | None = None, *_: Any) -> Tensor:
        if each is None:
            return (self.eased(lse) if self.hardness else lse).cross_entropy()
        assert lse.positives is not None
        mean = each / lse.positives.clamp_min(1)
        return mean if lse.alone is None else torch.where(lse.alone, 0.0, mean)


info_nce_loss = functional(InfoNCELoss, "info_nce_loss")
