"""What every engine in plain torch does with some rows of the score matrix: find the hardest negatives, and sum.

Nothing here records a gradient; the derivatives are written out.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold as cut_below

from weince.candidates import Contest
from weince.links import FunctionLink, Link
from weince.scores import free_to_look, pair_shortfall

EXACT = 4
"""How many of an anchor's hardest negatives have their shortfall computed as ``|a - c|² / 2``.

``1 - s`` has an absolute error of about 1e-7 in float32, so it is good to 1e-4 for shortfalls above 1e-3. More
than a few negatives nearer than that are duplicates, or a collapsed encoder.
"""

NEAR = 0.01
"""Shortfalls above this are good to 1e-5 as they come."""


class Part(NamedTuple):
    """One sum over the candidates, as engines see it.

    ``lse``: log-sum-exp of logits. ``sum``: their sum. ``softplus``: sum of their softplus.
    """

    link: Link
    kind: Literal["lse", "sum", "softplus"]
    among: Literal["negatives", "same view", "positives"] = "negatives"
    hardest: int | None = None

    def rows(self, start: int, stop: int) -> "Part":
        """The same for some of the anchors. (Torch 2.6 cannot compile ``_replace``.)"""
        return Part(self.link.rows(start, stop), self.kind, self.among, self.hardest)


class PartSum(NamedTuple):
    """A sum of some anchors: ``value`` ``(a,)``, its derivatives ``slopes`` by the scores ``(a, c)``, and ``effects``
    ``(a,)`` by each learned parameter of the link. With ``columns`` ``(a, m)`` the slopes are of those candidates
    alone, and those of all others are 0.
    """

    value: Tensor
    slopes: Tensor | None
    effects: dict[str, Tensor]
    columns: Tensor | None = None


class Tile:
    """Some anchors against all candidates at hand.

    Args:
        contest: Contest of these anchors.
        shortfall: ``(a, c)``; :meth:`sharpen` makes it exact near the cap.
    """

    def __init__(self, contest: Contest, shortfall: Tensor) -> None:
        self.contest, self.shortfall = contest, shortfall
        self._few: dict[tuple[int | None, str], Few] = {}

    def hidden(self) -> Tensor:
        """``(a, c)`` shortfalls of negatives, ``inf`` elsewhere."""
        return self.contest.hide(self.shortfall.clone(), torch.inf)

    def sharpen(self) -> Tensor:
        """Make the smallest shortfalls exact; returns what :meth:`hidden` then does."""
        hidden = self.hidden()
        positives = self.contest.same_label()
        if positives is not None:
            nearest = self.shortfall.masked_fill(~positives, torch.inf)
            self._exact_at(nearest.topk(min(EXACT, nearest.shape[1]), dim=1, largest=False).indices)
        if _any_near(hidden):
            near = hidden.topk(min(EXACT, hidden.shape[1]), dim=1, largest=False)
            exact = self._exact_at(near.indices)
            # An anchor with fewer negatives found others too, at inf: those stay hidden.
            hidden.scatter_(1, near.indices, exact.masked_fill_(near.values.isinf(), torch.inf))
        return hidden

    def put(self, columns: Tensor, exact: Tensor) -> None:
        """Overwrite shortfalls of some candidates of each anchor, ``(a, m)`` columns; -1 stands for none."""
        for column, value in zip(columns.long().unbind(1), exact.unbind(1), strict=True):
            at = column.clamp_min(0).unsqueeze(1)
            now = self.shortfall.gather(1, at)
            self.shortfall.scatter_(1, at, torch.where(column.unsqueeze(1) < 0, now, value.unsqueeze(1)))

    def _exact_at(self, columns: Tensor) -> Tensor:
        """Exact shortfalls of some candidates of each anchor, ``(a, m)``, put into the matrix and returned."""
        exact = pair_shortfall(self.contest.anchors.unsqueeze(1), self.contest.candidates[columns])
        self.shortfall.scatter_(1, columns, exact)
        return exact

    def sum(self, part: Part, threshold: Tensor | None, *, slopes: bool) -> PartSum:
        """One sum of these anchors.

        Args:
            part: Which; its link is that of these anchors.
            threshold: ``(a,)`` largest shortfall of the hardest negatives, where only those take part.
            slopes: Whether the derivatives are wanted.
        """
        if few_take_part(part, self.shortfall):
            assert threshold is not None
            return self._among(part, threshold).sum(part, None, slopes=slopes)
        return self._sum(part, threshold, slopes=slopes)

    def _sum(self, part: Part, threshold: Tensor | None, *, slopes: bool) -> PartSum:
        any_function = isinstance(part.link, FunctionLink)
        shortfall = self._taking_part(part, threshold) if any_function else self.shortfall
        logits = part.link.logit(shortfall)
        if part.kind == "lse":
            value, weight = self._log_sum_exp(logits, part, threshold)
        elif part.kind == "softplus":
            value = self._keep(torch.logaddexp(logits, torch.zeros_like(logits)), part, 0.0, threshold).sum(1)
            weight = self._keep(logits.sigmoid(), part, 0.0, threshold)
        else:
            weight = self._keep(torch.ones_like(logits), part, 0.0, threshold)
            value = self._keep(logits, part, 0.0, threshold).sum(1)
        if not slopes:
            return PartSum(value, None, {})
        effects = _effects(part.link, shortfall, weight)
        weight.mul_(part.link.slope(shortfall))
        if any_function:  # 0 times an infinite slope is NaN
            self._keep(weight, part, 0.0, threshold)
        return PartSum(value, weight, effects)

    def _taking_part(self, part: Part, threshold: Tensor | None) -> Tensor:
        """Shortfalls, with the anchor's smallest one in place of all pairs that take no part.

        A user's function and its derivatives need not be finite anywhere else: by a parameter, 0 times an infinite
        derivative is NaN. An anchor without candidates gets the smallest shortfall of all anchors.
        """
        kept = self._keep(self.shortfall.clone(), part, torch.inf, threshold)
        nearest = kept.amin(1, keepdim=True)
        nearest = torch.where(nearest.isinf(), nearest.amin().nan_to_num(posinf=1.0), nearest)
        return torch.maximum(self._keep(kept, part, -torch.inf, threshold), nearest)

    def _among(self, part: Part, threshold: Tensor) -> "Few":
        """The candidates of a sum over the hardest; sums over the same ones share them."""
        key = part.hardest, part.among
        if key not in self._few:
            taking = (self.shortfall > threshold.unsqueeze(1)).logical_not_()
            self._few[key] = Few(self, self._keep(taking, part, False, None))
        return self._few[key]

    def _log_sum_exp(self, logits: Tensor, part: Part, threshold: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-sum-exp ``(a,)`` and its derivatives by the logits, the softmax weights ``(a, c)``; in place."""
        odds = self._keep(logits, part, -torch.inf, threshold)
        largest = odds.amax(1, keepdim=True).clamp_min(
            torch.finfo(odds.dtype).min
        )  # finite where none takes part
        # What adds nothing to the sum is dropped: subnormal weights would slow the products badly.
        odds = cut_below(odds.sub_(largest).exp_(), torch.finfo(odds.dtype).eps ** 3, 0, inplace=True)
        total = odds.sum(1, keepdim=True)
        value = (largest + total.log()).squeeze(1)
        return value, odds.div_(total.clamp_min(torch.finfo(odds.dtype).tiny))

    def _keep(self, matrix: Tensor, part: Part, value: float, threshold: Tensor | None) -> Tensor:
        """Overwrite what takes no part in a sum."""
        if part.among == "positives":
            positives = self.contest.same_label()
            assert positives is not None
            return matrix.masked_fill_(~positives, value)
        if threshold is not None:
            matrix.masked_fill_(self.shortfall > threshold.unsqueeze(1), value)
        if part.among == "same view":
            self.contest.hide_other_view(matrix, value)
        return self.contest.hide(matrix, value)


def few_take_part(part: Part, matrix: Tensor) -> bool:
    """Whether a sum gathers its few candidates first. Their number is read, so not where that would wait."""
    return part.hardest is not None and free_to_look(matrix)


class Few(Tile):
    """Some anchors against a few candidates of each, gathered from a tile.

    Args:
        tile: Anchors against all candidates.
        taking: ``(a, c)``, True for the candidates that take part.
    """

    def __init__(self, tile: Tile, taking: Tensor) -> None:
        anchors, candidates = taking.shape
        flat = taking.flatten().nonzero().squeeze(1)
        ends = torch.searchsorted(flat, torch.arange(anchors + 1, device=flat.device) * candidates)
        counts = ends.diff()
        row = flat // candidates
        place = torch.arange(len(flat), device=flat.device) - ends[row]
        # Ties at the last place all take part, so that anchors can differ in their number.
        self.columns = flat.new_zeros(anchors, max(1, int(counts.max())))
        self.columns[row, place] = flat % candidates
        self.absent = torch.arange(self.columns.shape[1], device=flat.device) >= counts.unsqueeze(1)
        shortfall = tile.shortfall.gather(1, self.columns).masked_fill_(self.absent, 1.0)
        super().__init__(tile.contest, shortfall)

    def sum(self, part: Part, threshold: Tensor | None, *, slopes: bool) -> PartSum:
        return self._sum(part, threshold, slopes=slopes)._replace(columns=self.columns)

    def _keep(self, matrix: Tensor, part: Part, value: float, threshold: Tensor | None) -> Tensor:
        return matrix.masked_fill_(self.absent, value)


def _effects(link: Link, shortfall: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Derivative of each anchor's sum by each learned parameter, given those by its logits."""
    learned = link.learned()
    if not learned:
        return {}
    spread = {name: value.detach().expand(len(shortfall)) for name, value in learned.items()}

    def weighted(parameters: "dict[str, Tensor]") -> "Tensor":  # in quotes for torch 2.6
        return (weight * link.replace(parameters).logit(shortfall)).sum()

    effects: dict[str, Tensor] = torch.func.grad(weighted)(spread)
    return effects


def _any_near(hidden: Tensor) -> bool:
    """Whether a negative is so near to the cap that its shortfall must be computed exactly.

    Where looking would wait for a device or break a compiled graph, the answer is yes.
    """
    return not free_to_look(hidden) or bool(hidden.amin() < NEAR)
