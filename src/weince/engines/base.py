"""The contract of all engines: sums over the candidates of every anchor, exact, with their gradient.

An engine is made for one contest. First it surveys the negatives, if a loss asks for their tail; then it computes any
number of sums in one pass. How it walks through the matrix of scores is its own business.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from weince.candidates import Contest
from weince.engines.tile import Part
from weince.links import Link
from weince.scores import no_autocast, pair_shortfall
from weince.sums import Count, SoftplusSum, Sum, Summed, log1pexp
from weince.tail import TailConfig, TailStats


class Need(NamedTuple):
    """What a loss needs before its sums: tail statistics, and the scores of its hardest negatives.

    Examples:
        >>> from weince import TailConfig
        >>> from weince.engines import Need
        >>> Need(tail=TailConfig(k=50), hardest=(10,)).hardest
        (10,)
    """

    tail: TailConfig | None = None
    hardest: tuple[int, ...] = ()


NOTHING = Need()


class Engine(ABC):
    """The sums of one contest: anchors, their candidates and roles. ``ContrastiveLoss.sums`` gets it as ``batch``.

    Args:
        contest: Anchors, candidates and their roles.
        need: What is asked of the survey.

    Examples:
        >>> import torch
        >>> from weince import ContrastiveLoss, LogSumExp, SoftmaxLink
        >>> class Loss(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         print(batch.name, batch.negatives())
        ...         return LogSumExp(SoftmaxLink(0.1))
        ...     def combine(self, lse):
        ...         return lse.value - lse.positive
        >>> value = Loss()(torch.randn(4, 8), torch.randn(4, 8))
        dense tensor([6])
    """

    name: ClassVar[str]
    stats: TailStats | None = None
    """Tail statistics of every anchor, where the loss asked for them."""

    # None and not NOTHING: torch 2.6 cannot compile a default that is an object.
    def __init__(self, contest: Contest, need: Need | None = None) -> None:
        self.contest, self.need = contest, NOTHING if need is None else need
        self.counted: Tensor | None = None  # (anchors,) has a positive; None: all have
        self.alone: Tensor | None = None  # (anchors,) has no negative; None: all have one
        with torch.no_grad(), no_autocast(contest.anchors.device):
            self.survey()

    @abstractmethod
    def survey(self) -> None:
        """Take the tail statistics, if the loss asked for them."""

    @abstractmethod
    def evaluate(self, parts: Sequence[Part]) -> list[Tensor]:
        """The value ``(anchors,)`` of each part, with its gradient."""

    @abstractmethod
    def negatives(self) -> Tensor:
        """Number of negatives: ``(anchors,)``, or ``(1,)`` where all anchors have as many."""

    @abstractmethod
    def smallest(self, count: int) -> Tensor:
        """``(count,)`` smallest shortfalls of all pairs of an anchor and a negative, sorted upwards."""

    def sample(self, most: int) -> "Engine":
        """An engine for evenly spaced anchors with about ``most`` pairs with negatives; this one if that is all."""
        if self.most_pairs <= most:
            return self
        return self._for(self.contest.every(-(-self.most_pairs // most)))

    def _for(self, contest: Contest) -> "Engine":
        """An engine for a part of the contest."""
        return type(self)(contest)

    @property
    def most_pairs(self) -> int:
        """How many pairs of an anchor and a negative there can be at the most."""
        ranks = self.contest.ranks
        anchors = len(self.contest.anchors) if ranks is None else sum(ranks.anchors)
        return anchors * self.contest.most_negatives

    def pairs(self) -> Tensor:
        """How many there are, 0-dimensional."""
        numbers, ranks = self.negatives(), self.contest.ranks
        here = numbers.sum() if len(numbers) > 1 else numbers[0] * len(self.contest.anchors)
        return here if ranks is None else ranks.sum(here)

    def log_sums_exp(self, links: Sequence[Link]) -> list[Tensor]:
        """Log-sum-exp ``(anchors,)`` of all negatives' logits under each link, without gradient."""
        with torch.no_grad():
            return self.evaluate([Part(link, "lse") for link in links])

    def positive_scores(self) -> Tensor:
        """``(anchors,)`` score of each anchor's one positive, without gradient."""
        return 1 - self._positive_shortfall().detach()

    def sums(self, sums: Sequence[Sum]) -> list[Summed | Tensor]:
        """What a loss asked for, in its order; sums that stand for themselves as tensors ``(anchors,)``."""
        with no_autocast(self.contest.anchors.device):
            several = self.contest.labels is not None
            shortfall = None if several else self._positive_shortfall()
            positives = self.contest.count_positives() if several else None
            self.counted = None if positives is None else positives > 0
            parts: list[Part] = []
            for one in sums:
                parts += _parts(one, several)
            for part in parts:
                part.link.check_anchors(len(self.contest.anchors))
            values = self.evaluate(parts)
            found: list[Summed | Tensor] = []
            for one in sums:
                own, values = values[: len(_parts(one, several))], values[len(_parts(one, several)) :]
                found.append(self._found(one, own, shortfall, positives))
        return found

    def _found(
        self, one: Sum, values: Sequence[Tensor], shortfall: Tensor | None, positives: Tensor | None
    ) -> Summed | Tensor:
        if isinstance(one, Count):
            return self.negatives().to(self.contest.anchors.dtype).expand(len(self.contest.anchors))
        if isinstance(one, SoftplusSum):
            if one.among == "positives" and shortfall is not None:
                own = log1pexp(one.link.logit(shortfall))
            else:
                own = values[0]
            return own
        value = values[0]
        alone = None if self.contest.uniform else value == -torch.inf
        if alone is not None:
            self.alone, value = alone, torch.where(alone, 0.0, value)
        if shortfall is not None:
            return Summed(value, one.positive.logit(shortfall), None, one.link, alone)
        assert positives is not None
        _, together, total = values
        mean = total / positives.clamp_min(1)
        return Summed(value, mean, torch.where(positives > 0, together, mean) - mean, one.link, alone)

    def _positive_shortfall(self) -> Tensor:
        """``(anchors,)`` exact shortfall of each anchor's one positive."""
        assert self.contest.positive is not None
        return pair_shortfall(self.contest.anchors, self.contest.candidates[self.contest.positive])


def _parts(one: Sum, several: bool) -> list[Part]:
    """What an engine must go through the candidates for; a single positive is not worth a pass."""
    if isinstance(one, Count):
        return []
    if isinstance(one, SoftplusSum):
        return [Part(one.link, "softplus", one.among)] if several or one.among == "negatives" else []
    among = [Part(one.link, "lse", "same view" if one.same_view else "negatives", one.hardest)]
    if several:
        among += [Part(one.positive, "lse", "positives"), Part(one.positive, "sum", "positives")]
    return among


def sum_slopes(
    slopes: Sequence[Tensor], columns: Sequence[Tensor | None], weights: Sequence[Tensor], candidates: int
) -> Tensor:
    """Derivatives of sums by the scores, weighed by what each sum of an anchor is worth, in one ``(a, c)``.

    Args:
        slopes: Of each sum, ``(a, c)``, or ``(a, m)`` of some candidates alone.
        columns: Which those are, ``(a, m)``; None for all.
        weights: What each sum is worth, ``(a,)``.
        candidates: How many there are.
    """
    total: Tensor | None = None
    for slope, column, weight in zip(slopes, columns, weights, strict=True):
        if column is None:
            each = weight.unsqueeze(1)
            total = slope * each if total is None else total.addcmul_(slope, each)
    if total is None:
        # Zeros of the weights: under vmap those have a dimension that the slopes do not have.
        total = sum(weights[1:], weights[0]).new_zeros(len(slopes[0]), candidates)
    for slope, column, weight in zip(slopes, columns, weights, strict=True):
        if column is not None:
            total.scatter_add_(1, column, slope * weight.unsqueeze(1))
    return total


def learned_of(parts: Sequence[Part]) -> list[tuple[int, str, Tensor]]:
    """The learned parameters of all links: number of the part, name, tensor."""
    return [
        (index, name, value)
        for index, part in enumerate(parts)
        for name, value in part.link.learned().items()
    ]


def to_parameter(by_anchor: Tensor, parameter: Tensor) -> Tensor:
    """The gradient of a parameter from what each anchor ``(a,)`` adds to it."""
    return by_anchor.sum_to_size(parameter.shape).to(parameter.dtype)
