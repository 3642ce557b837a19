"""The contract of all engines: exact sums over the candidates of every anchor, with their gradient.

An engine is created for one problem. First it surveys the negatives, if the loss asks for their tail; then it
computes all sums of the loss. The engine decides how to go through the matrix of scores.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from weince.engines.tile import Part
from weince.links import Link
from weince.own_links import check_elementwise, check_learned
from weince.pairs import Problem, positive_shortfall
from weince.scores import no_autocast
from weince.sums import Count, SoftplusSum, Sum, Summed, log1pexp
from weince.tail import TailConfig, TailStats


class Need(NamedTuple):
    """What a loss needs before its sums: tail statistics, and thresholds for these numbers of hardest negatives.

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
    """Computes the sums of one problem. ``ContrastiveLoss.sums`` receives the engine as ``batch``.

    Args:
        problem: Anchors, candidates and their roles.
        need: What the loss needs from the survey.

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
    surveyed: TailStats | None = None  # what the survey found; None if the loss did not ask for it

    # The default is None, not NOTHING: torch 2.6 cannot compile a default that is an object.
    def __init__(self, problem: Problem, need: Need | None = None) -> None:
        self.problem, self.need = problem, NOTHING if need is None else need
        self.counted: Tensor | None = None  # (anchors,) True if the anchor has a positive; None: all have one
        self.alone: Tensor | None = None  # (anchors,) True if a sum of the anchor is empty; None: not checked
        with torch.no_grad(), no_autocast(problem.anchors.device):
            self.survey()

    @abstractmethod
    def survey(self) -> None:
        """Compute the tail statistics, if the loss asked for them."""

    @abstractmethod
    def evaluate(self, parts: Sequence[Part]) -> list[Tensor]:
        """The value ``(anchors,)`` of each part, with its gradient."""

    @property
    def stats(self) -> TailStats:
        """Tail statistics of every anchor. The loss must ask for them: ``tail = TailConfig()`` in its class."""
        if self.surveyed is None:
            raise ValueError(
                "batch.stats wants tail = TailConfig() in the class of the loss; got a loss with none"
            )
        return self.surveyed

    def negatives(self) -> Tensor:
        """Number of negatives of each anchor, ``(anchors,)``, or ``(1,)`` if it is the same for all."""
        problem = self.problem
        if problem.uniform:
            return torch.full((1,), problem.most_negatives, device=problem.anchors.device)
        return self.count_negatives()

    @abstractmethod
    def count_negatives(self) -> Tensor:
        """Number of negatives of each anchor, ``(anchors,)``."""

    @abstractmethod
    def smallest(self, count: int) -> Tensor:
        """The ``(count,)`` smallest shortfalls over all pairs of an anchor and a negative, ascending; no gradient."""

    def sample(self, most: int) -> "Engine":
        """An engine for evenly spaced anchors, with about ``most`` pairs in all; this one if it has no more."""
        if self.most_pairs <= most:
            return self
        return self._for(self.problem.every(-(-self.most_pairs // most)))

    def _for(self, problem: Problem) -> "Engine":
        """A new engine for some of the problem's anchors."""
        return type(self)(problem)

    @property
    def most_pairs(self) -> int:
        """Upper bound on the number of pairs of an anchor and a negative, over all ranks."""
        ranks = self.problem.ranks
        anchors = len(self.problem.anchors) if ranks is None else sum(ranks.anchors)
        return anchors * self.problem.most_negatives

    def pairs(self) -> Tensor:
        """Number of pairs of an anchor and a negative, over all ranks; 0-dimensional."""
        numbers, ranks = self.negatives(), self.problem.ranks
        here = numbers.sum() if len(numbers) > 1 else numbers[0] * len(self.problem.anchors)
        return here if ranks is None else ranks.sum(here)

    def log_sums_exp(self, links: Sequence[Link]) -> list[Tensor]:
        """Log-sum-exp ``(anchors,)`` of all negatives' logits under each link, without gradient."""
        with torch.no_grad():
            return self.evaluate([Part(link, "lse") for link in links])

    def positive_scores(self) -> Tensor:
        """``(anchors,)`` score of each anchor's one positive, with its gradient."""
        return 1 - self._positive_shortfall()

    def sums(self, sums: Sequence[Sum]) -> list[Summed | Tensor]:
        """Results of the sums, in order: ``Summed`` for a log-sum-exp, a tensor ``(anchors,)`` for others."""
        with no_autocast(self.problem.anchors.device):
            several = self.problem.positives is not None
            shortfall = None if several else self._positive_shortfall()
            positives = self.problem.count_positives() if several else None
            self.counted = None if positives is None else positives > 0
            own = [_parts(one, several) for one in sums]
            parts = [part for each in own for part in each]
            for part in parts:
                part.link.check_anchors(len(self.problem.anchors))
                check_elementwise(part.link, self.problem.anchors)
                check_learned(part.link, self.problem.anchors)
            values = self.evaluate(parts)
            found: list[Summed | Tensor] = []
            for one, each in zip(sums, own, strict=True):
                found.append(self._found(one, values[: len(each)], shortfall, positives))
                values = values[len(each) :]
        return found

    def _found(
        self, one: Sum, values: Sequence[Tensor], shortfall: Tensor | None, positives: Tensor | None
    ) -> Summed | Tensor:
        if isinstance(one, Count):
            # A copy, which a user's loss may change in place.
            return self.negatives().to(self.problem.anchors.dtype).expand(len(self.problem.anchors)).clone()
        if isinstance(one, SoftplusSum):
            if one.among == "positives" and shortfall is not None:
                return log1pexp(one.link.logit(shortfall).to(shortfall.dtype))
            return values[0]
        value = values[0]
        alone = None if self.problem.uniform else value == -torch.inf
        if alone is not None:
            self.alone = alone if self.alone is None else self.alone | alone
            value = torch.where(alone, 0.0, value)
        if shortfall is not None:
            positive = one.positive.logit(shortfall).to(shortfall.dtype)
            return Summed(value, positive, None, one.link, alone)
        assert positives is not None
        _, together, total = values
        mean = total / positives.clamp_min(1)
        return Summed(value, mean, torch.where(positives > 0, together, mean) - mean, one.link, alone)

    def _positive_shortfall(self) -> Tensor:
        """``(anchors,)`` exact shortfall of each anchor's one positive."""
        return positive_shortfall(self.problem)


def _parts(one: Sum, several: bool) -> list[Part]:
    """The parts of a sum that need a pass over the candidates. A single positive needs none."""
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
    """Weighted total ``(a, c)`` of the derivatives of several sums with respect to the scores.

    Args:
        slopes: Derivatives of each sum, ``(a, c)``, or ``(a, m)`` for some of the candidates.
        columns: Columns ``(a, m)`` of those candidates, for each sum; None for all candidates.
        weights: Weight ``(a,)`` of each sum, such as its upstream gradient.
        candidates: Number of candidates.
    """
    total: Tensor | None = None
    for slope, column, weight in zip(slopes, columns, weights, strict=True):
        if column is None:
            each = weight.unsqueeze(1)
            total = slope * each if total is None else total.addcmul_(slope, each)
    if total is None:
        # Created from the weights: under vmap they have a batch dimension that the slopes lack.
        total = sum(weights[1:], weights[0]).new_zeros(len(slopes[0]), candidates)
    for slope, column, weight in zip(slopes, columns, weights, strict=True):
        if column is not None:
            total.scatter_add_(1, column, slope * weight.unsqueeze(1))
    return total


def learned_of(parts: Sequence[Part]) -> list[tuple[int, str, Tensor]]:
    """Learned parameters of all links, each as index of its part, name, and tensor."""
    # In a compiled graph each is a view of its own: links may share a temperature, and torch cannot compile an
    # autograd function that takes one tensor twice.
    compiling = torch.compiler.is_compiling()
    return [
        (index, name, value.view_as(value) if compiling else value)
        for index, part in enumerate(parts)
        for name, value in part.link.learned().items()
    ]


def to_parameter(by_anchor: Tensor, parameter: Tensor) -> Tensor:
    """Gradient of a parameter: the sum of the anchors' contributions ``(a,)``, in the parameter's shape and dtype."""
    return by_anchor.sum_to_size(parameter.shape).to(parameter.dtype)
