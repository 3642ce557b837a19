"""Survey of the negatives: each anchor's tail statistics, and thresholds of its hardest negatives."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weince.engines.smallest import least, smallest
from weince.engines.tile import EXACT
from weince.pairs import Problem
from weince.sums import Survey
from weince.tail import TailConfig, TailFit, TailStats, fit_tail, gated


class Column:
    """One value per anchor, collected block by block.

    The values are written into one tensor: many small tensors that outlive their blocks would fragment the memory
    that the next block needs. A single block, as on a GPU, is not copied, since each copy is a kernel launch.
    """

    def __init__(self, length: int) -> None:
        self.length, self.taken = length, 0
        self.values: Tensor | None = None

    def add(self, block: Tensor) -> None:
        if self.values is None and len(block) == self.length:
            self.values = block
            return
        if self.values is None:
            self.values = block.new_empty(self.length)
        self.values[self.taken : self.taken + len(block)] = block
        self.taken += len(block)

    def whole(self) -> Tensor:
        assert self.values is not None
        return self.values


class Hardest:
    """Collects tail statistics and thresholds of every anchor's hardest negatives, block by block.

    The tails of a block are fitted and then discarded, so that memory stays linear in the batch.

    Args:
        problem: Problem of all anchors.
        tail: How to compute the tail statistics; None for none.
        numbers: Numbers of hardest negatives; each gets a threshold.
    """

    def __init__(self, problem: Problem, tail: TailConfig | None, numbers: tuple[int, ...]) -> None:
        self.problem, self.tail, self.numbers = problem, tail, numbers
        most = problem.most_negatives
        self.size = 0 if tail is None else tail.tail_size(most)
        self.depth = min(max((self.size, *(max(number + 1, EXACT) for number in numbers))), most)
        anchors = len(problem.anchors)
        self._nearest, self._counted = Column(anchors), Column(anchors)
        self._negatives = Column(1 if problem.uniform else anchors)
        self._fit = [Column(anchors) for _ in TailFit._fields]
        self._thresholds = {number: Column(anchors) for number in numbers}

    def add(self, problem: Problem, hidden: Tensor) -> None:
        """Add some anchors, given the shortfalls of their negatives ``(a, c)``, ``inf`` elsewhere."""
        rules = problem.positives
        has_positive = None if rules is None else problem.mask(rules, hidden).any(1)
        # With depth 0, only the number of negatives is wanted.
        depth = min(self.depth, hidden.shape[1])
        found = smallest(hidden, depth) if depth else hidden[:, :0]
        self.add_sorted(problem, found, count_candidates(problem, hidden), has_positive)

    def add_sorted(
        self, problem: Problem, found: Tensor, negatives: Tensor, has_positive: Tensor | None
    ) -> None:
        """Add some anchors, given the smallest shortfalls of their negatives ``(a, depth)`` in ascending order and
        the number of negatives among the candidates."""
        if problem.hard is not None:
            shortfall, mask = problem.hard_negatives()
            negatives = negatives if self.problem.uniform else negatives + mask.sum(1)
            both = torch.cat([found, shortfall.masked_fill(~mask, torch.inf)], 1)
            found = both.sort(dim=1).values[:, : self.depth]
        self._negatives.add(negatives[:1] if self.problem.uniform else negatives)
        if has_positive is not None:
            self._counted.add(has_positive)
        for number, column in self._thresholds.items():
            column.add(between(found, number))
        if self.tail is not None:
            self._nearest.add(found[:, 0].clone())  # a view would keep all of found in memory
            fit = fit_tail(found[:, : self.size], self.tail.tail_sizes(negatives), self.tail)
            for column, values in zip(self._fit, fit, strict=True):
                column.add(values.expand(len(found)))

    def survey(self) -> Survey:
        """What has been collected."""
        thresholds = {number: column.whole() for number, column in self._thresholds.items()}
        return Survey(self.stats(), thresholds, self._negatives.whole())

    def nearest(self) -> Tensor:
        """``(anchors,)`` smallest shortfall of the negatives, not raised to the tail's ``eps``; needs a tail."""
        return self._nearest.whole()

    def stats(self) -> TailStats | None:
        """Tail statistics of all anchors; None if they were not asked for."""
        if self.tail is None:
            return None
        fit = TailFit(*(column.whole() for column in self._fit))
        gather: Callable[[Tensor], Tensor] | None = None
        if self.problem.ranks is not None:
            gather = self.problem.ranks.gather
        return gated(self.nearest(), fit, self.tail, self._counted.values, gather)


def count_candidates(problem: Problem, hidden: Tensor) -> Tensor:
    """``(a,)`` number of negatives of each anchor among the candidates, or ``(1,)`` number of all negatives if it is
    the same for all; ``hidden`` ``(a, c)`` is finite only for negatives."""
    if problem.uniform:
        return torch.full((1,), problem.most_negatives, device=hidden.device)
    return hidden.isfinite().sum(1)


def between(ordered: Tensor, number: int) -> Tensor:
    """Midpoint between the ``number``-th shortfall and the next, of ``(a, k)`` in ascending order, so that
    rounding moves neither across it; ``inf`` if there is no next one."""
    if number >= ordered.shape[1]:
        return ordered.new_full((len(ordered),), torch.inf)
    last, after = ordered[:, number - 1], ordered[:, number]
    middle = (last + after) / 2
    # All copies of a negative take part, but EXACT of them have exact shortfalls, and the others rounded ones.
    rounded = last + 4 * torch.finfo(last.dtype).eps
    copied = ordered[:, min(max(number, EXACT), ordered.shape[1]) - 1] <= rounded
    return torch.where(after.isfinite(), torch.where(copied, middle.maximum(rounded), middle), torch.inf)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the parts. A single part, as on a GPU, is not copied, since each copy is a kernel launch."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def least_of(problem: Problem, hidden: Tensor, count: int) -> Tensor:
    """``(count,)`` smallest shortfalls of all pairs of an anchor and a negative, of all ranks, ascending.

    Args:
        problem: Problem of all anchors.
        hidden: Shortfalls of candidates, ``inf`` for those that are no negatives; the smallest suffice.
        count: How many.
    """
    if problem.hard is not None:
        shortfall, mask = problem.hard_negatives()
        hidden = torch.cat([hidden, shortfall.masked_fill(~mask, torch.inf).flatten()])
    here = least(hidden, count)
    return here if problem.ranks is None else problem.ranks.smallest(here, count)
