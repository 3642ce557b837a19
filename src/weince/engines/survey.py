"""What a survey of the negatives finds: each anchor's tail, and how hard its hardest negatives are."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weince.candidates import Contest
from weince.engines.smallest import smallest
from weince.tail import TailConfig, TailFit, TailStats, fit_tail, gated


class Hardest:
    """Gathers, block by block, what is asked of every anchor's hardest negatives.

    A block's tails are fitted and let go, so that memory stays linear in the batch.

    Args:
        contest: Of all anchors.
        tail: How to take the tail statistics; None for none.
        numbers: How many hardest negatives to find thresholds for.
    """

    def __init__(self, contest: Contest, tail: TailConfig | None, numbers: tuple[int, ...]) -> None:
        self.contest, self.tail, self.numbers = contest, tail, numbers
        most = contest.most_negatives
        self.size = 0 if tail is None else tail.tail_size(most)
        self.depth = min(max((self.size, *(number + 1 for number in numbers))), most)
        self._nearest: list[Tensor] = []
        self._fits: list[TailFit] = []
        self._counted: list[Tensor] = []
        self._negatives: list[Tensor] = []
        self._thresholds: dict[int, list[Tensor]] = {number: [] for number in numbers}

    def add(self, contest: Contest, hidden: Tensor) -> None:
        """Take in some anchors, from the shortfalls of their negatives ``(a, c)``, ``inf`` elsewhere."""
        positives = contest.same_label()
        has_positive = None if positives is None else positives.any(1)
        found = (
            smallest(hidden, self.depth) if self.depth else hidden[:, :0]
        )  # where only their number is asked for
        self.add_sorted(found, contest.count_negatives(hidden), has_positive)

    def add_sorted(self, found: Tensor, negatives: Tensor, has_positive: Tensor | None) -> None:
        """The same from their smallest shortfalls, sorted ``(a, depth)``."""
        self._negatives.append(negatives)
        if has_positive is not None:
            self._counted.append(has_positive)
        for number in self.numbers:
            self._thresholds[number].append(between(found, number))
        if self.tail is not None:
            self._nearest.append(found[:, 0])
            self._fits.append(fit_tail(found[:, : self.size], self.tail.tail_sizes(negatives), self.tail))

    def negatives(self) -> Tensor:
        """Number of negatives, ``(anchors,)`` or ``(1,)``."""
        return self._negatives[0] if self.contest.uniform else whole(self._negatives)

    def thresholds(self) -> dict[int, Tensor]:
        """For each number, the shortfall ``(anchors,)`` up to which a negative is one of so many hardest."""
        return {number: whole(parts) for number, parts in self._thresholds.items()}

    def stats(self) -> TailStats | None:
        """Tail statistics of all anchors, where they were asked for."""
        if self.tail is None:
            return None
        fit = TailFit(*(whole(values) for values in zip(*self._fits, strict=True)))
        counted = whole(self._counted) if self._counted else None
        gather: Callable[[Tensor], Tensor] | None = None
        if self.contest.ranks is not None:
            gather = self.contest.ranks.gather
        return gated(whole(self._nearest), fit, self.tail, counted, gather)


def between(ordered: Tensor, number: int) -> Tensor:
    """Between the ``number``-th and the next of shortfalls sorted upwards ``(a, k)``, so that rounding moves neither
    across.
    """
    if number >= ordered.shape[1]:
        return ordered.new_full((len(ordered),), torch.inf)
    last, after = ordered[:, number - 1], ordered[:, number]
    return torch.where(after.isfinite(), (last + after) / 2, torch.inf)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """All parts in one. A single one, as on a GPU, is not copied: each copy would be a launch."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
