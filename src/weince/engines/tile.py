"""What the engines in plain torch do with some rows of the score matrix: make small shortfalls exact, and sum.

Autograd records nothing here; the derivatives are written out.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold as cut_below

from weince.links import Link
from weince.pairs import Problem
from weince.scores import derivatives, free_to_look, pair_shortfall
from weince.sums import Part, rules_of

EXACT = 4
"""How many of an anchor's hardest negatives have their shortfall computed as ``|a - c|² / 2``.

``1 - s`` has an absolute error of about 1e-7 in float32, so its relative error is below 1e-4 for shortfalls above
1e-3. If more than a few negatives are nearer than that, they are duplicates, or the encoder has collapsed.
"""

NEAR = 0.01
"""Shortfalls above this have a relative error below 1e-5 without correction."""


class PartSum(NamedTuple):
    """A sum of some anchors: ``value`` ``(a,)``, its derivatives ``slopes`` ``(a, c)`` by the scores, and
    ``effects`` ``(a,)`` by each learned parameter of the link. With ``columns`` ``(a, m)``, ``slopes`` is
    ``(a, m)`` and belongs to those candidates; the slopes of all others are 0."""

    value: Tensor
    slopes: Tensor | None
    effects: dict[str, Tensor]
    columns: Tensor | None = None


class Tile:
    """Some anchors against all candidates of their problem.

    Args:
        problem: Problem of these anchors.
        shortfall: ``(a, c)``; :meth:`sharpen` makes it exact near the cap.
    """

    def __init__(self, problem: Problem, shortfall: Tensor) -> None:
        self.problem, self.shortfall = problem, shortfall
        self._few: dict[tuple[int | None, str], Few] = {}

    def hidden(self) -> Tensor:
        """``(a, c)`` shortfalls of negatives, ``inf`` elsewhere."""
        return self.problem.leave_out(self.shortfall.clone(), self.problem.negatives, torch.inf)

    def sharpen(self) -> Tensor:
        """Make the smallest shortfalls exact, in place; return what :meth:`hidden` returns after that."""
        hidden = self.hidden()
        if self.problem.score == "dot":  # without a cap to be near to
            return hidden
        if self.problem.positives is not None:
            nearest = self.problem.leave_out(self.shortfall.clone(), self.problem.positives, torch.inf)
            self._exact_at(nearest.topk(min(EXACT, nearest.shape[1]), dim=1, largest=False).indices)
        if _any_near(hidden):
            near = hidden.topk(min(EXACT, hidden.shape[1]), dim=1, largest=False)
            exact = self._exact_at(near.indices)
            # For an anchor with fewer negatives, near also holds pairs at inf: those stay hidden.
            hidden.scatter_(1, near.indices, exact.masked_fill_(near.values.isinf(), torch.inf))
        return hidden

    def put(self, columns: Tensor, exact: Tensor) -> None:
        """Overwrite the shortfalls of each anchor's candidates at columns ``(a, m)``; column -1 is skipped."""
        for column, value in zip(columns.long().unbind(1), exact.unbind(1), strict=True):
            at = column.clamp_min(0).unsqueeze(1)
            now = self.shortfall.gather(1, at)
            self.shortfall.scatter_(1, at, torch.where(column.unsqueeze(1) < 0, now, value.unsqueeze(1)))

    def _exact_at(self, columns: Tensor) -> Tensor:
        """Write exact shortfalls of each anchor's candidates at ``(a, m)`` columns into the matrix; return them."""
        exact = pair_shortfall(self.problem.anchors.unsqueeze(1), self.problem.candidates[columns])
        self.shortfall.scatter_(1, columns, exact)
        return exact

    def sum(self, part: Part, threshold: Tensor | None, *, slopes: bool) -> PartSum:
        """One sum of these anchors.

        Args:
            part: The sum, with the link of these anchors.
            threshold: ``(a,)`` shortfall up to which negatives take part; None for all negatives.
            slopes: Whether to compute the derivatives.
        """
        if few_take_part(part, self.shortfall):
            assert threshold is not None
            return self._among(part, threshold).sum(part, None, slopes=slopes)
        return self._sum(part, threshold, slopes=slopes)

    def _sum(self, part: Part, threshold: Tensor | None, *, slopes: bool) -> PartSum:
        custom = part.link.custom
        shortfall = self._taking_part(part, threshold) if custom else self.shortfall
        logits = part.link.logit(shortfall).to(shortfall.dtype)  # a user's may read float64 constants
        offset = self._offset()
        if offset is not None:
            logits = logits + offset
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
        if custom:  # 0 times an infinite slope is NaN
            self._keep(weight, part, 0.0, threshold)
        return PartSum(value, weight, effects)

    def _offset(self) -> Tensor | None:
        """What is added to the logits of each candidate."""
        return self.problem.of_candidate.get("offset")

    def _taking_part(self, part: Part, threshold: Tensor | None) -> Tensor:
        """Shortfalls, where each pair that takes no part gets the smallest shortfall of its anchor's pairs that do.

        A user's function and its derivatives need not be finite at the other pairs, and 0 times an infinite
        derivative by a parameter is NaN. An anchor without candidates gets the smallest shortfall of all anchors.
        """
        kept = self._keep(self.shortfall.clone(), part, torch.inf, threshold)
        nearest = kept.amin(1, keepdim=True)
        nearest = torch.where(nearest.isinf(), nearest.amin().nan_to_num(posinf=1.0), nearest)
        return torch.maximum(self._keep(kept, part, -torch.inf, threshold), nearest)

    def _among(self, part: Part, threshold: Tensor) -> "Few":
        """The candidates of a sum over the hardest; sums over the same candidates share them."""
        key = part.hardest, part.among
        if key not in self._few:
            taking = (self.shortfall > threshold.unsqueeze(1)).logical_not_()
            self._few[key] = Few(self, self._keep(taking, part, False, None))
        return self._few[key]

    def _log_sum_exp(self, logits: Tensor, part: Part, threshold: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-sum-exp ``(a,)`` and softmax weights ``(a, c)``, its derivatives by the logits; overwrites these."""
        odds = self._keep(logits, part, -torch.inf, threshold)
        largest = odds.amax(1, keepdim=True).clamp_min(
            torch.finfo(odds.dtype).min
        )  # finite if no pair takes part
        # Drop weights that add nothing to the sum: subnormal numbers would make the products much slower.
        odds = cut_below(odds.sub_(largest).exp_(), torch.finfo(odds.dtype).eps ** 3, 0, inplace=True)
        total = odds.sum(1, keepdim=True)
        value = (largest + total.log()).squeeze(1)
        return value, odds.div_(total.clamp_min(torch.finfo(odds.dtype).tiny))

    def _keep(self, matrix: Tensor, part: Part, value: float, threshold: Tensor | None) -> Tensor:
        """Overwrite the entries of pairs that take no part in a sum."""
        if threshold is not None:
            matrix.masked_fill_(self.shortfall > threshold.unsqueeze(1), value)
        return self.problem.leave_out(matrix, rules_of(self.problem, part), value, self.shortfall)


def few_take_part(part: Part, matrix: Tensor) -> bool:
    """Whether a sum gathers its few candidates first. This reads their number, so it is not done at the cost of a
    device sync or in a compiled graph."""
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
        # Ties at the last place all take part, so their number can differ between anchors.
        self.columns = flat.new_zeros(anchors, max(1, int(counts.max())))
        self.columns[row, place] = flat % candidates
        self.absent = torch.arange(self.columns.shape[1], device=flat.device) >= counts.unsqueeze(1)
        shortfall = tile.shortfall.gather(1, self.columns).masked_fill_(self.absent, 1.0)
        super().__init__(tile.problem, shortfall)

    def sum(self, part: Part, threshold: Tensor | None, *, slopes: bool) -> PartSum:
        return self._sum(part, threshold, slopes=slopes)._replace(columns=self.columns)

    def _keep(self, matrix: Tensor, part: Part, value: float, threshold: Tensor | None) -> Tensor:
        return matrix.masked_fill_(self.absent, value)

    def _offset(self) -> Tensor | None:
        offset = self.problem.of_candidate.get("offset")
        return None if offset is None else offset[self.columns]


def _effects(link: Link, shortfall: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Derivatives of each anchor's sum by each learned parameter; ``weight``: the derivatives by the logits."""
    learned = link.learned()
    if not learned:
        return {}
    spread = {name: value.detach().expand(len(shortfall)) for name, value in learned.items()}

    def weighted(parameters: dict[str, Tensor]) -> Tensor:
        return (weight * link.replace(parameters).logit(shortfall)).sum()

    return derivatives(weighted, spread)


def _any_near(hidden: Tensor) -> bool:
    """Whether a negative is so near to the cap that its shortfall must be computed exactly.

    If checking would cost a device sync or break a compiled graph, the answer is True.
    """
    return not free_to_look(hidden) or bool(hidden.amin() < NEAR)
