"""The two extra terms of the authors' released code: cross-entropies over the positive and the hardest negatives."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weince.engines.base import Engine
from weince.links import Scalar, ShortfallLink, SoftmaxLink
from weince.losses.base import remember
from weince.scores import wide
from weince.sums import LogSumExp, Summed
from weince.tail import TailConfig, fit_tail

HARDEST = 50

MOST_PAIRS = 1 << 24
"""Pairs that a slope is fitted to the smallest of: all of up to 2,048 pairs of views. Of larger batches evenly spaced
anchors are taken, or memory would grow with the square of the batch."""


class HardestTerms(nn.Module):
    """Cross-entropies over the positive and the hardest negatives, added to a loss.

    Args:
        softmax: Weight of the one with softmax logits.
        shortfall: Weight of the one with a shortfall link whose slope follows the batch.
    """

    def __init__(self, softmax: float = 0.0, shortfall: float = 0.0) -> None:
        super().__init__()
        for name, weight in (("softmax_term", softmax), ("shortfall_term", shortfall)):
            if not 0 <= weight < float("inf"):
                raise ValueError(f"{name} must be a weight of at least 0; got {weight}")
        self.weights = tuple(weight for weight in (softmax, shortfall) if weight)
        self.softmax = softmax
        self.slope = RunningSlope() if shortfall else None
        self.hardest = (HARDEST,) if self.weights else ()

    def sums(self, batch: Engine, temperature: Scalar) -> list[LogSumExp]:
        """What the terms ask for."""
        links = [SoftmaxLink(temperature)] if self.softmax else []
        own = [] if self.slope is None else [self.slope.link(batch)]
        return [LogSumExp(link, hardest=HARDEST) for link in (*links, *own)]

    def add(self, losses: Tensor, terms: Sequence[Summed]) -> Tensor:
        """Losses ``(anchors,)`` with the terms added."""
        for weight, term in zip(self.weights, terms, strict=True):
            losses = losses + weight * term.cross_entropy()
        return losses


class RunningSlope(nn.Module):
    """The slope of a shortfall link that follows the tail of the whole batch, as in the authors' released code.

    In training, each call fits the slope to the smallest ``share`` of all the batch's negative shortfalls (at
    least ``fewest`` points, the smallest 5 % of them dropped), or of those of evenly spaced anchors if a batch has
    more than 2,048 pairs of views. A fit with a positive slope and R² of at least
    ``least_r2`` is clamped to ``[0.5, 16]`` and moves the running slope; any other leaves it as it stands. (With
    ``candidates="clip"`` each of the two directions is a call.)
    """

    slope_now: Tensor

    def __init__(
        self,
        *,
        share: float = 0.05,
        fewest: int = 1024,
        least_r2: float = 0.85,
        momentum: float = 0.9,
        initial: float = 4.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.share, self.fewest, self.least_r2 = share, fewest, least_r2
        self.momentum, self.eps = momentum, eps
        # One element, not a scalar: torch.compile loses what is written to a float64 scalar on the CPU. In float32,
        # since not every device has float64; a module in float64 (``loss.double()``) keeps all its digits.
        self.register_buffer("slope_now", torch.tensor([initial], dtype=torch.float32))

    @torch.no_grad()
    def link(self, batch: Engine) -> ShortfallLink:
        """The shortfall link for a batch; in training the batch moves the slope first."""
        device = batch.contest.anchors.device
        if self.slope_now.device != device:  # nobody moved the loss: without this slope nobody would have to
            self.slope_now = self.slope_now.to(device)
        slope = self._moved(batch) if self.training else self.slope_now.clone()
        if self.training:
            remember(self.slope_now, slope)
        return ShortfallLink(slope.squeeze(0), eps=self.eps)

    def _moved(self, batch: Engine) -> Tensor:
        """The running slope after this batch, without waiting for the device."""
        batch = batch.sample(MOST_PAIRS)
        most, pairs = batch.most_pairs, batch.pairs()
        count = min(max(self.fewest, int(self.share * most)), most)
        size = (self.share * wide(pairs)).long().clamp_min(self.fewest).minimum(pairs)
        fit = fit_tail(
            batch.smallest(count).unsqueeze(0), size.unsqueeze(0), TailConfig(drop=0.05, eps=self.eps)
        )
        kept = (fit.r2 >= self.least_r2) & (fit.beta > 0)  # which is 0 where no fit can be made
        fitted, before = fit.beta.clamp(0.5, 16.0), self.slope_now.to(fit.beta.dtype)
        return torch.where(kept, self.momentum * before + (1 - self.momentum) * fitted, before)
