"""What every engine in plain torch does with some rows of the score matrix: survey its tail, then contrast.

Nothing here records a gradient; the derivatives are written out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold

from weince.candidates import Contest
from weince.engines.smallest import smallest
from weince.links import Link
from weince.scores import free_to_look, pair_shortfall
from weince.tail import TailConfig, TailFit, TailStats, fit_tail, gated
from weince.terms import Survey, Term

EXACT = 4
"""How many of an anchor's hardest negatives have their shortfall computed as ``|a - c|² / 2``.

``1 - s`` has an absolute error of about 1e-7 in float32, so it is good to 1e-4 for shortfalls above 1e-3. More
than a few negatives nearer than that are duplicates, or a collapsed encoder.
"""

NEAR = 0.01
"""Shortfalls above this are good to 1e-5 as they come."""


class EngineOutput(NamedTuple):
    """Loss of each anchor, ``(anchors,)``; which of them count (None: all); statistics where asked for."""

    loss: Tensor
    counted: Tensor | None
    stats: TailStats | None


class Need(NamedTuple):
    """What the terms and the statistics want of the survey.

    ``tail``: how many of each anchor's smallest shortfalls. ``columns``: of how many hardest negatives the
    columns. ``near_cap``: whether small shortfalls must be exact.
    """

    tail: int
    columns: int
    near_cap: bool

    @classmethod
    def of(cls, contest: Contest, terms: Sequence[Term], tail: TailConfig | None) -> "Need":
        most = contest.most_negatives
        columns = min(max(term.hardest or 0 for term in terms), most)
        near_cap = tail is not None or any(term.link.near_cap for term in terms)
        return cls(tail.tail_size(most) if tail else 0, columns, near_cap)


class Rows:
    """Some anchors against all candidates.

    Args:
        contest: Of these anchors.
        shortfall: ``(a, c)``; :meth:`look` makes it exact near the cap.
    """

    def __init__(self, contest: Contest, shortfall: Tensor) -> None:
        self.contest, self.shortfall = contest, shortfall
        self.positives = contest.same_label()
        self.counted = None if self.positives is None else self.positives.any(1)

    def hidden(self) -> Tensor:
        """``(a, c)`` shortfalls of negatives, ``inf`` elsewhere."""
        return self.contest.hide(self.shortfall.clone(), torch.inf)

    def look(self, need: Need) -> "Look":
        """Find the hardest negatives, and make the smallest shortfalls exact."""
        hidden = self.sharpen() if need.near_cap else self.hidden()
        columns = hidden.topk(need.columns, dim=1, largest=False).indices if need.columns else None
        tail = smallest(hidden, need.tail) if need.tail else None
        return Look(tail, columns, self.contest.count_negatives(hidden))

    def sharpen(self) -> Tensor:
        """Make the smallest shortfalls exact; returns what :meth:`hidden` then does."""
        hidden = self.hidden()
        positives = self._nearest_positives()
        if positives is not None:
            self._exact_at(positives)
        if _any_near(hidden):
            near = hidden.topk(min(EXACT, hidden.shape[1]), dim=1, largest=False)
            exact = self._exact_at(near.indices)
            # An anchor with fewer negatives found others too, at inf: those stay hidden.
            hidden.scatter_(1, near.indices, exact.masked_fill_(near.values.isinf(), torch.inf))
        return hidden

    def _nearest_positives(self) -> Tensor | None:
        """Their columns; None where there are none, among the candidates of another rank."""
        if self.positives is None:
            return None if self.contest.positive is None else self._positive_column()
        nearest = self.shortfall.masked_fill(~self.positives, torch.inf)
        return nearest.topk(min(EXACT, nearest.shape[1]), dim=1, largest=False).indices

    def _positive_column(self) -> Tensor:
        assert self.contest.positive is not None
        return self.contest.positive.unsqueeze(1)

    def _exact_at(self, columns: Tensor) -> Tensor:
        """Exact shortfalls of some candidates of each anchor, ``(a, m)``, put into the matrix and returned."""
        exact = pair_shortfall(self.contest.anchors.unsqueeze(1), self.contest.candidates[columns])
        self.shortfall.scatter_(1, columns, exact)
        return exact

    def contrast(self, link: Link, rivals: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cross-entropy of every anchor, and its derivative with respect to the logits.

        The loss is ``log(1 + sum over rivals of exp(l_j - l_ref))``, where ``ref`` is the positive: nothing
        cancels, however small it is. With several positives ``ref`` is the one with the largest logit, the
        others are rivals like the negatives, and ``l_ref`` less the mean logit of the positives is added.

        Args:
            link: A bound link.
            rivals: ``(a, m)`` columns of the negatives that take part; None for all.
        """
        logits = link.logit(self.shortfall)
        if self.positives is None:
            reference, spread, share = self._positive_column(), None, None
        else:
            reference = logits.masked_fill(~self.positives, -torch.inf).argmax(1, keepdim=True)
            share = self.positives.to(logits.dtype) / self.positives.sum(1, keepdim=True).clamp_min(1)
            spread = ((logits.gather(1, reference) - logits) * share).sum(1)
        ours = logits.gather(1, reference)

        odds = logits if rivals is None else self._keep(logits, rivals)
        odds = self.contest.hide(odds, -torch.inf, positives=False).scatter_(1, reference, -torch.inf)
        largest = odds.amax(1, keepdim=True).clamp_min(torch.finfo(odds.dtype).min)  # finite without rivals
        # Rivals that add nothing to the sum are dropped: subnormal weights would slow the products badly.
        odds = threshold(odds.sub_(largest).exp_(), torch.finfo(odds.dtype).eps ** 3, 0, inplace=True)
        total = odds.sum(1, keepdim=True)
        behind = largest + total.log() - ours  # log-sum-exp of the rivals, less the logit of the positive
        loss = torch.logaddexp(behind, torch.zeros_like(behind)).squeeze(1)
        risk = behind.sigmoid()
        weight = odds.mul_(risk / total.clamp_min(torch.finfo(odds.dtype).tiny)).scatter_(1, reference, -risk)
        if self.counted is None or share is None or spread is None:
            return loss, weight

        weight -= share.scatter_add(1, reference, -torch.ones_like(risk))
        alone = ~self.counted
        return (loss + spread).masked_fill_(alone, 0), weight.masked_fill_(alone.unsqueeze(1), 0)

    def _keep(self, logits: Tensor, rivals: Tensor) -> Tensor:
        """Only these columns of each row, and its positives."""
        kept = torch.full_like(logits, -torch.inf).scatter_(1, rivals, logits.gather(1, rivals))
        return kept if self.positives is None else torch.where(self.positives, logits, kept)


class Look(NamedTuple):
    """The hardest negatives of some anchors.

    ``tail``: ``(a, k)`` smallest shortfalls, sorted upwards. ``columns``: ``(a, m)`` where the hardest stand.
    ``negatives``: their number, ``(a,)`` or ``(1,)``.
    """

    tail: Tensor | None
    columns: Tensor | None
    negatives: Tensor


def _any_near(hidden: Tensor) -> bool:
    """Whether a negative is so near to the cap that its shortfall must be computed exactly.

    Where looking would wait for a device or break a compiled graph, the answer is yes.
    """
    return not free_to_look(hidden) or bool(hidden.amin() < NEAR)


@dataclass(eq=False)
class BatchSurvey:
    """What was found in all rows, see :class:`weince.terms.Survey`."""

    contest: Contest
    blocks: Callable[[], Iterable[Rows]]
    looks: list[Look]
    stats: TailStats | None

    @property
    def negatives(self) -> Tensor:
        """``(anchors,)`` or ``(1,)`` number of negatives of each anchor."""
        numbers = [look.negatives for look in self.looks]
        if not numbers:  # no look was needed before
            numbers = [rows.contest.count_negatives(rows.hidden()) for rows in self.blocks()]
        return numbers[0] if self.contest.uniform else torch.cat(numbers)

    @property
    def most_pairs(self) -> int:
        ranks = self.contest.ranks
        anchors = len(self.contest.anchors) if ranks is None else sum(ranks.anchors)
        return anchors * self.contest.most_negatives

    def pairs(self) -> Tensor:
        numbers, ranks = self.negatives, self.contest.ranks
        here = numbers.sum() if len(numbers) > 1 else numbers[0] * len(self.contest.anchors)
        return here if ranks is None else ranks.sum(here)

    def smallest(self, count: int) -> Tensor:
        kept = self.contest.anchors.new_empty(0)
        pending: list[Tensor] = []
        for rows in self.blocks():
            pending.append(rows.hidden().flatten())
            if sum(map(len, pending)) >= 4 * count:  # rarely, since each cut reads everything kept
                kept, pending = least(torch.cat([kept, *pending]), count), []
        here, ranks = least(torch.cat([kept, *pending]), count), self.contest.ranks
        return here if ranks is None else ranks.smallest(here, count)


def least(values: Tensor, count: int) -> Tensor:
    """The smallest values, at most ``count`` of them, sorted upwards."""
    return values.topk(min(count, len(values)), largest=False).values


def survey(
    contest: Contest,
    first: Iterable[Rows],
    blocks: Callable[[], Iterable[Rows]],
    terms: Sequence[Term],
    tail: TailConfig | None,
) -> BatchSurvey:
    """Look at all rows, if anything is to be found, and take the statistics that are asked for.

    A block's tails are fitted and let go, so that memory stays linear in the batch.

    Args:
        contest: Of all rows.
        first: The rows to look at.
        blocks: The same rows again, with shortfalls as exact near the cap as looking has made them.
        terms: What the links are of.
        tail: How to take the statistics.
    """
    need = Need.of(contest, terms, tail)
    looks: list[Look] = []
    nearest: list[Tensor] = []
    fits: list[TailFit] = []
    counted: list[Tensor] = []
    for rows in first if any(need) else ():
        look = rows.look(need)
        looks.append(Look(None, look.columns, look.negatives))  # torch 2.6 cannot compile `_replace`
        if rows.counted is not None:
            counted.append(rows.counted)
        if tail is not None and look.tail is not None:
            nearest.append(look.tail[:, 0])
            fits.append(fit_tail(look.tail, tail.tail_sizes(look.negatives), tail))
    stats = None
    if tail is not None:
        fit = TailFit(*(whole(values) for values in zip(*fits, strict=True)))
        gather = None if contest.ranks is None else contest.ranks.gather
        stats = gated(whole(nearest), fit, tail, joined(counted), gather)
    return BatchSurvey(contest, blocks, looks, stats)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """All parts in one. A single one, as on a GPU, is not copied: each copy would be a launch."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """All parts in one; None of none."""
    return whole(parts) if parts else None


def bind(terms: Sequence[Term], found: Survey) -> list[Link]:
    """The links of the terms, with their parameters settled for this batch."""
    links = [term.link.bind(found) for term in terms]
    for link in links:
        link.check_anchors(len(found.contest.anchors))
    return links
