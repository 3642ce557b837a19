"""InfoNCE (NT-Xent): ``-s+/t + log(exp(s+/t) + sum exp(s/t))``.

van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding"; Chen et al. 2020, "A Simple
Framework for Contrastive Learning of Visual Representations".
"""

from typing import Unpack

from torch import Tensor

from weince.engines.base import Engine
from weince.links import SoftmaxLink
from weince.losses.base import Options, functional
from weince.losses.temperature import TemperatureLoss
from weince.losses.terms import HardestTerms
from weince.parameters import Scalar
from weince.sums import LogSumExp, Sum, Summed


class InfoNCELoss(TemperatureLoss):
    """InfoNCE (NT-Xent): softmax of ``s / temperature``.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        softmax_term: Weight of an extra cross-entropy over the positive and the 50 hardest negatives.
        shortfall_term: Weight of another such cross-entropy with a shortfall link; its slope is fitted to the
            batches. With both weights at 0.5 the loss is :class:`weince.WeinceLoss` without its blended logit.
        max_scale: Largest inverse of a learned temperature.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import InfoNCELoss
        >>> InfoNCELoss(0.2)(torch.eye(4), torch.eye(4)).shape
        torch.Size([])
    """

    needs_negatives = False

    def __init__(
        self,
        temperature: Scalar = 0.2,
        *,
        softmax_term: float = 0.0,
        shortfall_term: float = 0.0,
        max_scale: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(temperature, max_scale=max_scale, **options)
        self.terms = HardestTerms(softmax_term, shortfall_term)
        self.softmax_term, self.shortfall_term = softmax_term, shortfall_term
        self.hardest = self.terms.hardest

    def sums(self, batch: Engine) -> list[Sum]:
        temperature = self.bounded_temperature()
        return [LogSumExp(SoftmaxLink(temperature)), *self.terms.sums(batch, temperature)]

    def combine(self, lse: Summed, *terms: Summed) -> Tensor:
        return self.terms.add(lse.cross_entropy(), terms)


info_nce_loss = functional(InfoNCELoss, "info_nce_loss")
