"""The two extra terms of the authors' released code: cross-entropies with the hardest negatives only."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weince.engines.base import Engine
from weince.links import ShortfallLink, SoftmaxLink
from weince.losses.temperature import remember
from weince.parameters import Scalar, is_number
from weince.scores import wide
from weince.sums import LogSumExp, Summed
from weince.tail import TailConfig, fit_tail

HARDEST = 50

MOST_PAIRS = 1 << 24
"""Most pairs of an anchor and a negative to search for the smallest shortfalls: all pairs up to 2,048 pairs of views.
Larger batches use evenly spaced anchors, or memory would grow with the square of the batch."""


class HardestTerms(nn.Module):
    """Cross-entropies of the positive against the hardest negatives, added to a loss.

    Args:
        softmax: Weight of the cross-entropy with softmax logits.
        shortfall: Weight of the cross-entropy with a shortfall link whose slope is fitted to the batches.
    """

    def __init__(self, softmax: float = 0.0, shortfall: float = 0.0) -> None:
        super().__init__()
        for name, weight in (("softmax_term", softmax), ("shortfall_term", shortfall)):
            if not is_number(weight) or not 0 <= weight < float("inf"):
                raise ValueError(f"{name} must be a weight of at least 0; got {weight!r}")
        self.weights = tuple(weight for weight in (softmax, shortfall) if weight)
        self.softmax = softmax
        self.slope = RunningSlope() if shortfall else None
        self.hardest = (HARDEST,) if self.weights else ()

    def sums(self, batch: Engine, temperature: Scalar) -> list[LogSumExp]:
        """The sums that the terms need."""
        links = [SoftmaxLink(temperature)] if self.softmax else []
        own = [] if self.slope is None else [self.slope.link(batch)]
        return [LogSumExp(link, hardest=HARDEST) for link in (*links, *own)]

    def add(self, losses: Tensor, terms: Sequence[Summed]) -> Tensor:
        """Losses ``(anchors,)`` with the terms added."""
        for weight, term in zip(self.weights, terms, strict=True):
            losses = losses + weight * term.cross_entropy()
        return losses


class RunningSlope(nn.Module):
    """The slope of a shortfall link as a running average of fits to whole batches, as in the authors' released code.

    In training, each call fits the slope to the smallest ``share`` of the shortfalls of all negatives in the batch
    (at least ``fewest`` of them; the smallest 5 % of these are dropped). Above 2,048 pairs of views, only evenly
    spaced anchors are used. A fit with a positive slope and an R² of at least ``least_r2`` is clamped to
    ``[0.5, 16]`` and enters the average; any other is ignored. (``candidates="clip"`` makes a call per direction.)
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
        # One element, not a scalar: torch.compile loses writes to a float64 scalar on the CPU. It is float32,
        # since not every device has float64; ``loss.double()`` makes it float64.
        self.register_buffer("slope_now", torch.tensor([initial], dtype=torch.float32))

    @torch.no_grad()
    def link(self, batch: Engine) -> ShortfallLink:
        """The shortfall link for a batch; in training, the slope is updated first."""
        device = batch.problem.anchors.device
        if self.slope_now.device != device:  # move it here: without this buffer, losses need no .to()
            with torch.inference_mode(False):  # or training could not update what a validation step has moved
                self.slope_now = self.slope_now.to(device)
        slope = self._moved(batch) if self.training else self.slope_now.clone()
        if self.training:
            remember(self.slope_now, slope)
        return ShortfallLink(slope.squeeze(0), eps=self.eps)

    def _moved(self, batch: Engine) -> Tensor:
        """The running slope after this batch, without a device sync."""
        batch = batch.sample(MOST_PAIRS)
        most, pairs = batch.most_pairs, batch.pairs()
        count = min(max(self.fewest, int(self.share * most)), most)
        size = (self.share * wide(pairs)).long().clamp_min(self.fewest).minimum(pairs)
        fit = fit_tail(
            batch.smallest(count).unsqueeze(0), size.unsqueeze(0), TailConfig(drop=0.05, eps=self.eps)
        )
        kept = (fit.r2 >= self.least_r2) & (fit.beta > 0)  # beta is 0 if no fit could be made
        fitted, before = fit.beta.clamp(0.5, 16.0), self.slope_now.to(fit.beta.dtype)
        return torch.where(kept, self.momentum * before + (1 - self.momentum) * fitted, before)
