"""KL ball: each anchor has the temperature that puts its softmax at KL divergence ``r`` from uniform.

``-s+ + t_i log sum exp(s/t_i)`` with ``KL(softmax(s/t_i) | uniform) = r``, but ``t_i`` at least 0.05, and no gradient
through ``t_i``. This is the batch form of iSogCLR: Qiu et al. 2023, "Not All Semantics are Created Equal: Contrastive
Self-supervised Learning with Automatic Temperature Individualization". Its authors bound the temperature, too. If all
embeddings are alike, as at the start of training, it would go to 0. Then only the nearest negatives push, and they
push less than the positive pulls: the embeddings stay alike.
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from weince.engines.base import Engine
from weince.links import FunctionLink, SoftmaxLink, check_positive
from weince.losses.base import ContrastiveLoss, Options, functional
from weince.sums import LogSumExp, Summed

STEPS = 12
"""Newton steps, kept within a shrinking bracket; seven or eight suffice in float64."""

SCALES = (1e-2, 1e4)
"""Range of the search for the inverse temperature."""


class KLBallLoss(ContrastiveLoss):
    """KL ball: a temperature for each anchor, such that all anchors concentrate equally on their hardest negatives.

    Args:
        radius: ``r`` in nats. Near 0 all ``N`` negatives weigh the same, near ``log N`` only the hardest counts.
        min_temperature: Smallest temperature of an anchor. Without such a bound, training starts with a collapse.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import KLBallLoss
        >>> KLBallLoss(radius=0.4)(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    search_space = ({"radius": 1.2}, {"radius": 0.8}, {"radius": 0.4}, {"radius": 1.8})

    def __init__(
        self, radius: float = 1.2, *, min_temperature: float = 0.05, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        check_positive("radius", radius)
        check_positive("min_temperature", min_temperature)
        self.radius, self.min_temperature = radius, min_temperature

    def sums(self, batch: Engine) -> LogSumExp:
        most = batch.contest.most_negatives
        if self.radius >= math.log(most):
            raise ValueError(
                f"radius must be less than log(number of negatives) = {math.log(most):.3g}; got {self.radius}"
            )
        return LogSumExp(SoftmaxLink((1 / scales_at(batch, self.radius)).clamp_min(self.min_temperature)))

    def combine(self, lse: Summed) -> Tensor:
        assert isinstance(lse.link, SoftmaxLink)
        return lse.link.temperature * (lse.value - lse.positive)


@torch.no_grad()
def scales_at(batch: Engine, radius: float) -> Tensor:
    """``(anchors,)`` inverse temperatures at which the negatives' softmax is ``radius`` from uniform."""
    like = batch.contest.anchors
    low, high = (like.new_full((len(like),), math.log(scale)) for scale in SCALES)
    log_count = batch.negatives().to(like.dtype).log()
    at = torch.full_like(low, math.log(10.0))
    for _ in range(STEPS):
        scale = at.exp()
        total, first, second = batch.log_sums_exp(
            [FunctionLink(function, k=scale) for function in (_logit, _tilted, _tilted_twice)]
        )
        mean, square = (first - total).exp(), (second - total).exp()  # moments of 1 - s under the softmax
        distance = log_count - total - scale * mean
        low, high = torch.where(distance < radius, at, low), torch.where(distance < radius, high, at)
        slope = scale.square() * (square - mean.square()).clamp_min(torch.finfo(like.dtype).tiny)
        step = at - (distance - radius) / slope
        inside = (step >= low) & (step <= high)  # at the root, the step stays on an end of the bracket
        at = torch.where(inside, step, (low + high) / 2)
    return at.exp()


# In shortfalls, which are small if all negatives are near the cap: there the variance of scores would cancel.


def _logit(s: Tensor, k: Tensor) -> Tensor:
    return -k * (1 - s)


def _tilted(s: Tensor, k: Tensor) -> Tensor:
    return (1 - s).clamp_min(1e-30).log() - k * (1 - s)


def _tilted_twice(s: Tensor, k: Tensor) -> Tensor:
    return 2 * (1 - s).clamp_min(1e-30).log() - k * (1 - s)


kl_ball_loss = functional(KLBallLoss, "kl_ball_loss")
