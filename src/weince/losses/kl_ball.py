"""KL ball: each anchor has the temperature that puts its softmax at KL divergence ``r`` from uniform.

``-s+ + t_i log sum exp(s/t_i)`` with ``KL(softmax(s/t_i) | uniform) = r``, but ``t_i`` at least 0.05, and no gradient
through ``t_i``. This is the batch form of iSogCLR: Qiu et al. 2023, "Not All Semantics are Created Equal: Contrastive
Self-supervised Learning with Automatic Temperature Individualization". Its authors bound the temperature, too. If all
embeddings are alike, as at the start of training, it would go to 0. Then only the nearest negatives push, and they
push less than the positive pulls: the embeddings stay alike.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from weince.engines.choose import warn_once
from weince.links import Link, SoftmaxLink, column
from weince.losses.base import ContrastiveLoss
from weince.losses.functional import functional
from weince.losses.options import Options
from weince.pairs import Problem
from weince.parameters import Scalar, check_fixed
from weince.scores import free_to_look, may_take, unseen
from weince.sums import Batch, LogSumExp, Need, Summed
from weince.tail import TailConfig

STEPS = 8
"""Most Newton steps, kept within a shrinking bracket; the cases of the tests need at most seven, most need three."""

LEAST_SCALE = 1e-2
"""Smallest inverse temperature of the search; the largest is that of the smallest temperature."""


SMALLEST = 1e-30
"""Smallest shortfall in the logarithm of a :class:`MomentLink`."""


@dataclass(frozen=True)
class MomentLink(Link):
    """``power * log(1 - s) - scale * (1 - s - origin)``: logits whose sums give the moments of shortfalls.

    The mean of ``(1 - s) ** power`` under the softmax of ``scale * s`` is the exponential of this link's
    log-sum-exp minus that of power 0. Moments of shortfalls are accurate where all negatives are near the cap: there
    the variance of scores would cancel. An ``origin`` near that mean keeps the sums small, whose difference counts.
    """

    custom: ClassVar[bool] = False
    needs_cap: ClassVar[bool] = True

    scale: Scalar
    power: int = 0
    origin: Scalar = 0.0

    def logit(self, shortfall: Tensor) -> Tensor:
        softmax = (column(self.origin, shortfall) - shortfall) * column(self.scale, shortfall)
        if not self.power:
            return softmax
        log = shortfall.clamp_min(SMALLEST).log()
        return log.mul_(self.power).add_(softmax) if may_take(log, softmax) else self.power * log + softmax


class KLBallLoss(ContrastiveLoss):
    """KL ball: a temperature for each anchor, such that all anchors concentrate equally on their hardest negatives.

    Args:
        radius: ``r`` in nats. Near 0 all ``N`` negatives weigh the same, near ``log N`` only the hardest counts.
        min_temperature: Smallest temperature of an anchor, and that of an anchor with so few negatives that ``log N``
            is below ``r``. Without such a bound, training starts with a collapse.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import KLBallLoss
        >>> KLBallLoss(radius=0.4)(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    takes_offset = takes_dot = False
    search_space = ({"radius": 1.2}, {"radius": 0.8}, {"radius": 0.4}, {"radius": 1.8})

    def __init__(
        self, radius: float = 1.2, *, min_temperature: float = 0.05, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        check_fixed("radius", radius)
        check_fixed("min_temperature", min_temperature)
        self.radius, self.min_temperature = radius, min_temperature

    def need(self, problem: Problem, tail: TailConfig | None) -> Need:
        return super().need(problem, tail)._replace(again=True)  # each step of Newton's method asks for sums

    def sums(self, batch: Batch) -> LogSumExp:
        most = batch.problem.most_negatives
        if not torch.compiler.is_compiling() and self.radius >= math.log(most):
            warn_once(
                f"weince: a softmax over {most} negatives is at most log({most}) = {math.log(most):.3g} nats from "
                f"uniform, and radius is {self.radius:g}: all anchors of such a batch have temperature "
                f"{self.min_temperature:g}"
            )
        scales = scales_at(batch, self.radius, 1 / self.min_temperature)
        return LogSumExp(SoftmaxLink((1 / scales).clamp_min(self.min_temperature)))  # against rounding

    def combine(self, lse: Summed) -> Tensor:
        assert isinstance(lse.link, SoftmaxLink)
        return lse.link.temperature * (lse.value - lse.positive)


@torch.no_grad()
def scales_at(batch: Batch, radius: float, largest: float) -> Tensor:
    """``(anchors,)`` inverse temperatures, at most ``largest``, with the softmax at ``radius`` from uniform.

    Newton's method for ``log KL`` as a function of ``log scale``, a straight line if scores are normal. A step down
    is at most a factor of ``e``: where the softmax has left the bulk of the negatives for a few of them, ``log KL``
    is flat, and a full step would overshoot. A KL that is lost in rounding is half of the logits' variance.
    """
    like = batch.problem.anchors
    tiny, small = torch.finfo(like.dtype).tiny, 1e3 * torch.finfo(like.dtype).eps
    end = math.log(largest)
    low, high, at = (
        like.new_full((len(like),), value) for value in (math.log(LEAST_SCALE), end, min(math.log(10.0), end))
    )
    log_count = batch.negatives().to(like.dtype).log()
    # Ranks that pass candidates on must take the same number of steps.
    may_stop = free_to_look(like) and unseen() and batch.problem.ranks is None
    # Where looking would cost a device sync, all steps are made, but passes after the last one needed stop at once.
    done = None if free_to_look(like) else torch.zeros((), dtype=torch.bool, device=like.device)
    origin: Scalar = 0.0  # the mean of the last step, so that sums of large logits do not cancel
    close = math.sqrt(torch.finfo(like.dtype).eps)  # a step so short leaves about its square
    for _ in range(STEPS):
        scale = at.exp()
        links = [MomentLink(scale, power, origin) for power in range(3)]
        total, first, second = batch.log_sums_exp(links, done)
        mean, square = (first - total).exp(), (second - total).exp()  # moments of 1 - s under the softmax
        variance = scale.square() * (square - mean.square())  # of the logits
        distance = log_count - total - scale * (mean - origin)
        origin = mean.nan_to_num()  # an anchor without negatives has none
        distance = torch.where(distance < small, variance / 2, distance).clamp_min(tiny)
        # One number moves the bracket and the step: with two, rounding puts a step at the root outside.
        short = math.log(radius) - distance.log()
        low, high = torch.where(short > 0, at, low), torch.where(short > 0, high, at)
        slope = (variance / distance).clamp_min(tiny)
        step = at + (short / slope).clamp_min(-1.0)
        step = step.clamp_max(end)
        inside = (step >= low) & (step <= high)  # at the root, the step stays on an end of the bracket
        before, at = at, torch.where(inside, step, (low + high) / 2)
        if done is not None:
            at = torch.where(done, before, at)
            done = done | ((at - before).abs().amax() < close)
        elif may_stop and bool((at - before).abs().amax() < close):
            break
    return at.masked_fill(log_count <= radius, end).exp()  # no softmax over so few reaches the radius


kl_ball_loss = functional(KLBallLoss, "kl_ball_loss")
