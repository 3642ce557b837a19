"""The pairs of a contrastive problem: which rows are anchors and candidates, and which pairs are negatives.

A :class:`Problem` is one direction of a batch. Anchors and candidates bring columns along: one value per row, such as
an id or a label. A :class:`Rule` is a function of a pair's shortfall and of these columns; it says whether the pair
takes part. A pair is a negative if all rules in ``Problem.negatives`` hold, so ids and ``ignore`` remove negatives
only: a positive stays a positive.

Columns of anchors: ``position`` (the anchor's own row among the candidates), ``positive`` (row of its one positive),
``id``, ``label``, ``view``, ``limit`` (smallest shortfall of a negative, for ``ignore_above``), and two with a value
for each candidate, ``(a, c)``: ``ignore``, and ``chosen`` (the positives, where no label says them). Columns of
candidates: ``position``, ``id``, ``label``, ``view``, ``exempt`` (whether ``ignore_above`` leaves it alone),
``across`` (whether it is of the other side) and ``offset`` (added to its logits).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from weince.scores import dot, pair_shortfall

if TYPE_CHECKING:
    from weince.distributed import Ranks

Score = Literal["cosine", "dot"]

NO_ID = torch.iinfo(torch.int64).min  # an id or label that equals that of no anchor


class Rule(NamedTuple):
    """Whether a pair takes part, as a function of its shortfall and of the columns of both sides.

    Args:
        name: What the rule demands of the candidate.
        takes_part: Gets a shortfall, the anchor's columns and the candidate's columns, each by attribute; broadcasts.
        row: If the rule excludes a single candidate of each anchor: the anchor's column with that candidate's row.
    """

    name: str
    takes_part: Callable[[Any, Any, Any], Any]
    row: str | None = None


NOT_ITSELF = Rule("not the anchor itself", lambda d, a, c: c.position != a.position, "position")
NOT_POSITIVE = Rule("not the positive", lambda d, a, c: c.position != a.positive, "positive")
OTHER_ID = Rule("another id", lambda d, a, c: c.id != a.id)
OTHER_LABEL = Rule("another label", lambda d, a, c: c.label != a.label)
SAME_LABEL = Rule("the same label", lambda d, a, c: c.label == a.label)
CHOSEN = Rule("chosen as positive", lambda d, a, c: a.chosen)
ACROSS = Rule("of the other side", lambda d, a, c: c.across)
NOT_IGNORED = Rule("not marked in ignore", lambda d, a, c: ~a.ignore)
SAME_VIEW = Rule("the same view", lambda d, a, c: c.view == a.view)
# Written so that NaN takes part, and shows in the loss.
WITHIN_LIMIT = Rule("not too far above the positive", lambda d, a, c: ~(d < a.limit) | c.exempt)
AMONG_HARDEST = Rule("among the hardest", lambda d, a, c: ~(d > a.threshold))


class Columns:
    """Columns by attribute, as a :class:`Rule` reads them.

    Args:
        values: Columns by name.
        upright: Whether a value stands for a row of the matrix of pairs, so that ``(a,)`` becomes ``(a, 1)``.
    """

    def __init__(self, values: Mapping[str, Tensor], *, upright: bool = False) -> None:
        self._values, self._upright = values, upright

    def __getattr__(self, name: str) -> Tensor:
        value = self._values[name]
        return value.unsqueeze(1) if self._upright and value.ndim == 1 else value


@dataclass(frozen=True, eq=False)
class Problem:
    """Anchors, candidates, and all that tells which pairs are negatives and positives.

    Args:
        anchors: ``(a, d)`` rows: of length 1, or as they are with ``score="dot"``.
        candidates: ``(c, d)`` rows.
        of_anchor: Columns ``(a,)`` of the anchors by name; ``ignore`` is ``(a, c)``.
        of_candidate: Columns ``(c,)`` of the candidates by name.
        negatives: A pair is a negative if all these rules hold.
        positives: A pair is a positive if all these rules hold; None: each anchor has one, in column ``positive``.
        hard: ``(a, k, d)`` rows: negatives of this anchor alone, which are no candidates.
        of_hard: Columns ``(a, k)`` of these, with the names of candidates' columns.
        ranks: The ranks over which anchors and candidates are spread; None for one process.
        raw: Anchors and candidates before normalisation if they are bfloat16, whose products are exact; else None.
        symmetric: Whether anchors and candidates are the same rows.
        score: Whether a score is a cosine or the product of rows as they are.
    """

    anchors: Tensor
    candidates: Tensor
    of_anchor: Mapping[str, Tensor]
    of_candidate: Mapping[str, Tensor]
    negatives: tuple[Rule, ...]
    positives: tuple[Rule, ...] | None = None
    hard: Tensor | None = None
    of_hard: Mapping[str, Tensor] | None = None
    ranks: "Ranks | None" = None
    raw: tuple[Tensor, Tensor] | None = None
    symmetric: bool = False
    score: Score = "cosine"

    @property
    def most_negatives(self) -> int:
        """The most negatives that an anchor can have among the candidates of all ranks."""
        candidates = len(self.candidates) if self.ranks is None else sum(self.ranks.candidates)
        single = sum(rule.row is not None for rule in self.negatives)
        return candidates - single + (0 if self.hard is None else self.hard.shape[1])

    @property
    def most_pairs(self) -> int:
        """The most pairs of an anchor and a negative, over all ranks."""
        anchors = len(self.anchors) if self.ranks is None else sum(self.ranks.anchors)
        return anchors * self.most_negatives

    @property
    def uniform(self) -> bool:
        """Whether all anchors have the same number of negatives."""
        return all(rule.row is not None for rule in self.negatives)

    def rows(self, start: int, stop: int) -> "Problem":
        """The problem of the anchors from ``start`` to ``stop`` against all candidates."""
        return self._of(start, stop, 1, self.ranks)

    def every(self, step: int) -> "Problem":
        """The problem of every ``step``-th anchor of each rank against all candidates."""
        ranks = self.ranks
        if ranks is not None:
            ranks = replace(ranks, anchors=tuple(-(-count // step) for count in ranks.anchors))
        return self._of(0, len(self.anchors), step, ranks)

    def _of(self, start: int, stop: int, step: int, ranks: "Ranks | None") -> "Problem":
        # Three numbers, not a slice: torch.compile takes a slice for a constant, which fixes the batch size.
        def cut(columns: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
            return {name: values[start:stop:step] for name, values in (columns or {}).items()}

        return replace(
            self,
            anchors=self.anchors[start:stop:step],
            of_anchor=cut(self.of_anchor),
            hard=None if self.hard is None else self.hard[start:stop:step],
            of_hard=None if self.of_hard is None else cut(self.of_hard),
            ranks=ranks,
            raw=None if self.raw is None else (self.raw[0][start:stop:step], self.raw[1]),
            symmetric=False,
        )

    def count_positives(self) -> Tensor:
        """``(a,)`` number of positives of each anchor among all candidates, by label or as ``chosen``."""
        if "chosen" in self.of_anchor:
            return self.of_anchor["chosen"].sum(1)
        labels, others = self.of_anchor["label"], self.of_candidate["label"]
        if "across" in self.of_candidate:
            others = others.where(self.of_candidate["across"], NO_ID)
        if self.ranks is not None and len(others) < sum(self.ranks.candidates):
            others = self.ranks.gather_candidates(others)
        ordered = others.sort().values
        count = torch.searchsorted(ordered, labels, right=True) - torch.searchsorted(ordered, labels)
        assert self.positives is not None
        return count - 1 if NOT_ITSELF in self.positives else count

    def mask(self, rules: tuple[Rule, ...], shortfall: Tensor) -> Tensor:
        """``(a, c)``, True for pairs for which all these rules hold."""
        mask = torch.ones_like(shortfall, dtype=torch.bool)
        return self.leave_out(mask, rules, False, shortfall)

    def leave_out(
        self, matrix: Tensor, rules: tuple[Rule, ...], value: float, shortfall: Tensor | None = None
    ) -> Tensor:
        """Overwrite the entries of an ``(a, c)`` matrix for which a rule does not hold.

        Args:
            matrix: ``(a, c)``.
            rules: The rules; those of a single row and of columns alone need no shortfalls.
            value: What to write.
            shortfall: ``(a, c)``; by default ``matrix``.
        """
        anchor = candidate = None
        for rule in rules:
            # The compiler fuses a comparison, but not a scatter.
            if rule.row is not None and not torch.compiler.is_compiling():
                matrix.scatter_(1, self.of_anchor[rule.row].unsqueeze(1), value)
                continue
            if anchor is None:
                anchor, candidate = Columns(self.of_anchor, upright=True), Columns(self.of_candidate)
            takes_part = rule.takes_part(matrix if shortfall is None else shortfall, anchor, candidate)
            matrix.masked_fill_(~takes_part, value)
        return matrix

    def hard_negatives(self) -> tuple[Tensor, Tensor]:
        """Shortfalls ``(a, k)`` of each anchor's own hard negatives, and which of them take part."""
        assert self.hard is not None
        shortfall = matching_shortfall(self, self.anchors.unsqueeze(1), self.hard)
        mask = torch.ones_like(shortfall, dtype=torch.bool)
        anchor, hard = Columns(self.of_anchor, upright=True), Columns(self.of_hard or {})
        for rule in self.negatives:
            if rule.row is None and rule is not NOT_IGNORED:  # those are about candidates
                mask = mask & rule.takes_part(shortfall.detach(), anchor, hard)
        return shortfall, mask


def matching_shortfall(problem: Problem, anchors: Tensor, others: Tensor) -> Tensor:
    """Shortfalls of matching rows ``(..., d)``, exact near the cap; ``1 - a.c`` with ``score="dot"``."""
    return pair_shortfall(anchors, others) if problem.score == "cosine" else 1 - dot(anchors, others)
