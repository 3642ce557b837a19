"""The layouts of a contrastive problem: which rows are anchors, candidates, positives and negatives.

A :class:`Contest` is one direction of a layout. Every anchor has candidates, among them its positive or positives.
The other candidates are its negatives, except

- the anchor itself,
- rows with the anchor's id (``ids`` mark duplicates, crops of one image, photos of one product),
- pairs marked in ``ignore``.

Ids and ``ignore`` remove negatives only: a positive stays a positive.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from weince.scores import free_to_look, no_autocast, unit_rows

if TYPE_CHECKING:
    from weince.distributed import Ranks

Candidates = Literal["views", "cross", "clip", "labels"]
LAYOUTS = get_args(Candidates)  # a constant, since torch 2.6 cannot compile the call

NO_ID = torch.iinfo(torch.int64).min  # an id that matches no anchor


SHORT_BATCH = "(a DataLoader leaves out a short last batch with drop_last=True)"
"""What to do if a batch has too few negatives."""


@dataclass(frozen=True, eq=False)
class Contest:
    """Unit rows of anchors and candidates, and the data that gives the role of every pair.

    Args:
        anchors: ``(a, d)`` unit rows.
        candidates: ``(c, d)`` unit rows.
        positive: ``(a,)`` column of each anchor's one positive; None if labels define the positives.
        itself: ``(a,)`` column of each anchor among the candidates; None if anchors are not candidates.
        labels: Labels of anchors ``(a,)`` and of candidates ``(c,)``.
        ids: Ids of anchors ``(a,)`` and of candidates ``(c,)``.
        ignore: ``(a, c)``, True for pairs that are not negatives.
        ranks: The ranks over which anchors and candidates are spread; None for one process.
        raw: Anchors and candidates before normalisation if they are bfloat16, whose products are exact; else None.
        symmetric: Whether anchors and candidates are the same rows.
        views: View of anchors ``(a,)`` and of candidates ``(c,)``, False or True, if a loss needs it.
    """

    anchors: Tensor
    candidates: Tensor
    positive: Tensor | None = None
    itself: Tensor | None = None
    labels: tuple[Tensor, Tensor] | None = None
    ids: tuple[Tensor, Tensor] | None = None
    ignore: Tensor | None = None
    ranks: "Ranks | None" = None
    raw: tuple[Tensor, Tensor] | None = None
    symmetric: bool = False
    views: tuple[Tensor, Tensor] | None = None

    @property
    def most_negatives(self) -> int:
        """The most negatives that an anchor can have among the candidates of all ranks."""
        candidates = len(self.candidates) if self.ranks is None else sum(self.ranks.candidates)
        # int, since torch 2.6 cannot subtract a bool from a dynamic size in a compiled graph.
        return candidates - int(self.itself is not None) - int(self.positive is not None)

    @property
    def uniform(self) -> bool:
        """Whether all anchors have the same number of negatives, since there are no labels, ids or ``ignore``."""
        return self.labels is None and self.ids is None and self.ignore is None

    def rows(self, start: int, stop: int) -> "Contest":
        """The contest of the anchors from ``start`` to ``stop`` against all candidates."""
        return self._of(start, stop, 1, self.ranks)

    def every(self, step: int) -> "Contest":
        """The contest of every ``step``-th anchor of each rank against all candidates."""
        ranks = self.ranks
        if ranks is not None:
            ranks = replace(ranks, anchors=tuple(-(-count // step) for count in ranks.anchors))
        return self._of(0, len(self.anchors), step, ranks)

    def _of(self, start: int, stop: int, step: int, ranks: "Ranks | None") -> "Contest":
        # Three numbers, not a slice: torch.compile takes a slice for a constant, which fixes the batch size.
        # Inner functions quote their annotations, since torch 2.6 cannot compile them.
        def cut(values: "Tensor | None") -> "Tensor | None":
            return None if values is None else values[start:stop:step]

        def cut_first(values: "tuple[Tensor, Tensor] | None") -> "tuple[Tensor, Tensor] | None":
            return None if values is None else (values[0][start:stop:step], values[1])

        return Contest(
            self.anchors[start:stop:step],
            self.candidates,
            cut(self.positive),
            cut(self.itself),
            cut_first(self.labels),
            cut_first(self.ids),
            cut(self.ignore),
            ranks,
            cut_first(self.raw),
            views=cut_first(self.views),
        )

    def same_label(self) -> Tensor | None:
        """``(a, c)`` mask of the positives that labels define; None if each anchor has one positive."""
        if self.labels is None:
            return None
        mask = self.labels[0].unsqueeze(1) == self.labels[1]
        return mask if self.itself is None else mask.scatter_(1, self.itself.unsqueeze(1), False)

    def count_positives(self) -> Tensor:
        """``(a,)`` number of positives of each anchor among the candidates of all ranks; needs labels."""
        assert self.labels is not None
        own, others = self.labels
        if self.ranks is not None and len(others) < sum(self.ranks.candidates):
            others = self.ranks.gather_candidates(others)
        ordered = others.sort().values
        found = torch.searchsorted(ordered, own, right=True) - torch.searchsorted(ordered, own)
        return found if self.itself is None else found - 1

    def hide(self, matrix: Tensor, value: float) -> Tensor:
        """Overwrite all entries of an ``(a, c)`` matrix that are not negatives."""
        for column in (self.itself, self.positive):
            if column is None:
                continue
            if torch.compiler.is_compiling():  # the compiler fuses a comparison, but not a scatter
                every = torch.arange(matrix.shape[1], device=matrix.device)
                matrix.masked_fill_(column.unsqueeze(1) == every, value)
            else:
                matrix.scatter_(1, column.unsqueeze(1), value)
        if self.ids is not None:
            matrix.masked_fill_(self.ids[0].unsqueeze(1) == self.ids[1], value)
        if self.ignore is not None:
            matrix.masked_fill_(self.ignore, value)
        same = self.same_label()
        return matrix if same is None else matrix.masked_fill_(same, value)

    def hide_other_view(self, matrix: Tensor, value: float) -> Tensor:
        """Overwrite the entries of an ``(a, c)`` matrix whose candidate is not in the anchor's view."""
        assert self.views is not None
        # Not "!=", for which torch's default compiler cannot write code for a CPU here.
        return matrix.masked_fill_(torch.logical_xor(self.views[0].unsqueeze(1), self.views[1]), value)

    def count_negatives(self, hidden: Tensor) -> Tensor:
        """``(a,)`` number of negatives of each anchor, or ``(1,)`` if all have the same number.

        Args:
            hidden: ``(a, c)``, finite only for negatives.
        """
        if self.uniform:
            return torch.full((1,), self.most_negatives, device=hidden.device)
        return hidden.isfinite().sum(1)


def contests(
    candidates: Candidates,
    z_i: Tensor,
    z_j: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    negatives: Tensor | None = None,
    ids: Tensor | None = None,
    ignore: Tensor | None = None,
    check_finite: bool | None = None,
    alone: bool = True,
    views: bool = False,
) -> list[Contest]:
    """The contest or contests of a batch.

    Args:
        candidates: The layout.

            - ``"views"`` (SimCLR): the ``2 n`` rows of both views are anchors; the other view of the same row is
              the positive, the remaining ``2 n - 2`` rows are negatives.
            - ``"cross"`` (query and key, SimCSE): row i of ``z_i`` looks for row i of ``z_j`` among all rows of
              ``z_j`` and of ``negatives``.
            - ``"clip"``: ``"cross"`` in both directions, two contests.
            - ``"labels"`` (SupCon, outside the logarithm): every row is an anchor, all other rows with its label
              are positives. The denominator of each positive holds every row except the anchor itself and ignored
              ones; it includes the other positives. Anchors without a positive are left out.
        z_i: ``(n, d)`` embeddings; they need not be normalised.
        z_j: ``(n, d)``, positives row by row. Optional with ``"labels"``, where it adds rows with the same labels.
        labels: ``(n,)`` integers, for ``"labels"`` only.
        negatives: ``(m, d)`` further negatives of every anchor, for ``"cross"`` only.
        ids: ``(n,)`` integers: rows with equal ids are never negatives of each other. With ``negatives`` also
            ``(n + m,)``.
        ignore: ``(anchors, candidates)`` booleans, True for pairs that are not negatives.
        check_finite: Raise on NaN or inf. By default only on the CPU, where the check needs no device sync.
        alone: False if candidates of other ranks are added later, so that a single pair is enough.
        views: Store the view of each row in the contest.
    """
    check_choice("candidates", candidates, LAYOUTS)
    _check_use(candidates, labels=labels, negatives=negatives)  # first: labels may stand in the place of z_j
    _check_embeddings(z_i, z_j, negatives, check_finite)
    if z_j is None and candidates != "labels":
        raise TypeError(
            f'candidates="{candidates}" wants two tensors of positives row by row; got z_i alone: '
            "z.chunk(2) splits views that were concatenated"
        )
    n = len(z_i)
    _check_integers("ids", ids, (n,) if negatives is None else (n, n + len(negatives)))
    _check_integers("labels", labels, (n,))
    _check_device(z_i.device, ids=ids, labels=labels, ignore=ignore)
    ids = None if ids is None else ids.long()
    labels = None if labels is None else labels.long()

    # Under autocast, torch.cat refuses rows in half precision other than its own.
    with no_autocast(z_i.device):
        if candidates == "views" or candidates == "labels":
            found = [_within(candidates, z_i, z_j, labels, ids, ignore, views)]
        else:
            found = _across(candidates, z_i, z_j, negatives, ids, ignore)
    if alone:
        for contest in found:
            _check_enough(contest)
    return found


def _check_enough(contest: Contest) -> None:
    """Raise if there are no negatives, as in a short last batch."""
    candidates = len(contest.candidates)
    if contest.itself is not None and contest.positive is not None and candidates < 4:
        raise ValueError(
            f"wanted at least 2 pairs, so that there are negatives; got {candidates // 2} {SHORT_BATCH}"
        )
    if candidates < 2 or len(contest.anchors) < 1:  # not "not len": torch 2.6 would compile for each size
        anchors, others = tuple(contest.anchors.shape), tuple(contest.candidates.shape)
        raise ValueError(
            f"wanted at least 1 anchor and 2 candidates; got anchors {anchors}, candidates {others} {SHORT_BATCH}"
        )


def _within(
    candidates: Candidates,
    z_i: Tensor,
    z_j: Tensor | None,
    labels: Tensor | None,
    ids: Tensor | None,
    ignore: Tensor | None,
    keep_views: bool,
) -> Contest:
    """All rows against all rows."""
    given = z_i if z_j is None else torch.cat([z_i, z_j])
    rows = unit_rows(given)
    views = 1 if z_j is None else 2
    itself = torch.arange(len(rows), device=rows.device)
    _check_mask(ignore, (len(rows), len(rows)))
    every_id = None if ids is None else ids.repeat(views)
    every_label = None if labels is None else labels.repeat(views)
    return Contest(
        rows,
        rows.view_as(rows),  # torch.compile needs two tensors, not one twice
        positive=itself.roll(len(z_i)) if candidates == "views" else None,
        itself=itself,
        labels=None if every_label is None else (every_label, every_label),
        ids=None if every_id is None else (every_id, every_id),
        ignore=ignore,
        raw=_raw(given, given),
        symmetric=True,
        views=(itself >= len(z_i), itself >= len(z_i)) if keep_views else None,
    )


def _across(
    candidates: Candidates,
    queries: Tensor,
    keys: Tensor | None,
    negatives: Tensor | None,
    ids: Tensor | None,
    ignore: Tensor | None,
) -> list[Contest]:
    """Queries against keys; for ``"clip"`` also keys against queries."""
    assert keys is not None
    query, key = unit_rows(queries), unit_rows(keys)
    targets = key if negatives is None else torch.cat([key, unit_rows(negatives)])
    common = torch.promote_types(query.dtype, targets.dtype)
    query, key, targets = query.to(common), key.to(common), targets.to(common)
    _check_mask(ignore, (len(query), len(targets)))
    diagonal = torch.arange(len(query), device=query.device)
    both_ids = None
    if ids is not None:
        unknown = ids.new_full((len(targets) - len(ids),), NO_ID, dtype=torch.int64)
        both_ids = (ids[: len(query)], torch.cat([ids, unknown]))
    raw = None
    if _raw(queries, keys if negatives is None else negatives) is not None:
        raw = _raw(queries, keys if negatives is None else torch.cat([keys, negatives]))
    forward = Contest(query, targets, positive=diagonal, ids=both_ids, ignore=ignore, raw=raw)
    if candidates == "cross":
        return [forward]
    back = Contest(
        key,
        query,
        positive=diagonal,
        ids=both_ids,
        ignore=None if ignore is None else ignore.T,
        raw=None if raw is None else (raw[1], raw[0]),
    )
    return [forward, back]


def _raw(anchors: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both, detached, if both are bfloat16; else None."""
    if anchors.dtype != torch.bfloat16 or candidates.dtype != torch.bfloat16:
        return None
    return anchors.detach(), candidates.detach()


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise if an option is not one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _check_use(candidates: Candidates, *, labels: Tensor | None, negatives: Tensor | None) -> None:
    if (labels is None) == (candidates == "labels"):
        wants, got = ("wants labels=", "none") if labels is None else ("takes no labels", "some")
        raise TypeError(f'candidates="{candidates}" {wants}; got {got}')
    if negatives is not None and candidates != "cross":
        raise TypeError(f'negatives= goes with candidates="cross"; got candidates="{candidates}"')


def _check_embeddings(
    z_i: Tensor, z_j: Tensor | None, negatives: Tensor | None, check_finite: bool | None
) -> None:
    for name, rows in (("z_i", z_i), ("z_j", z_j), ("negatives", negatives)):
        if rows is None and name != "z_i":
            continue
        if not isinstance(rows, Tensor):
            columns = isinstance(rows, list) and isinstance(next(iter(rows), None), Mapping)
            hint = ": give SentenceTransformerTrainer LossAdapter(model, loss)" if columns else ""
            raise TypeError(f"{name} must be a torch.Tensor; got {type(rows).__name__}{hint}")
        if rows.ndim != 2 or rows.shape[1] == 0:
            raise ValueError(f"{name} must have shape (rows, d) with d >= 1; got {tuple(rows.shape)}")
        if not rows.is_floating_point():
            raise TypeError(f"{name} must be a floating point tensor; got {rows.dtype}")
        if rows.shape[1] != z_i.shape[1] or rows.device != z_i.device:
            raise ValueError(
                f"{name} must match z_i of shape {tuple(z_i.shape)} on {z_i.device} in width and device; "
                f"got {tuple(rows.shape)} on {rows.device}"
            )
        if check_finite or (check_finite is None and free_to_look(rows)):
            _check_finite(name, rows)
    if z_j is not None and z_j.shape != z_i.shape:
        remedy = ': candidates="cross" takes further candidates as negatives=' if len(z_j) > len(z_i) else ""
        raise ValueError(
            f"z_i and z_j must have the same shape, positives row by row; "
            f"got {tuple(z_i.shape)} and {tuple(z_j.shape)}{remedy}"
        )


def _check_finite(name: str, rows: Tensor) -> None:
    finite = rows.isfinite().all(1)
    if not finite.all():
        bad = (~finite).nonzero().flatten()
        raise ValueError(
            f"{name} must be finite; got NaN or inf in {len(bad)} of {len(rows)} rows, first in row {int(bad[0])}"
        )


def _check_integers(name: str, values: Tensor | None, lengths: tuple[int, ...]) -> None:
    """Raise if these are not integers, one for each row. Lengths stay dynamic in a compiled graph."""
    if values is None:
        return
    if not isinstance(values, Tensor) or values.is_floating_point() or values.is_complex():
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be an integer tensor of shape {_shapes(lengths)}; got {got}")
    if values.ndim != 1 or all(len(values) != length for length in lengths):
        raise ValueError(f"{name} must have shape {_shapes(lengths)}; got {tuple(values.shape)}")


def _check_device(device: torch.device, **given: Tensor | None) -> None:
    for name, values in given.items():
        if isinstance(values, Tensor) and values.device != device:
            raise ValueError(f"{name} must be on {device}, like the embeddings; got {values.device}")


def _shapes(lengths: tuple[int, ...]) -> str:
    return " or ".join(f"({length},)" for length in lengths)


def _check_mask(ignore: Tensor | None, shape: tuple[int, int]) -> None:
    if ignore is None:
        return
    if not isinstance(ignore, Tensor) or ignore.dtype != torch.bool:
        got = ignore.dtype if isinstance(ignore, Tensor) else type(ignore).__name__
        raise TypeError(f"ignore must be a boolean tensor of shape {shape}; got {got}")
    if tuple(ignore.shape) != shape:
        raise ValueError(f"ignore must have shape {shape}, anchors by candidates; got {tuple(ignore.shape)}")
