"""The layouts of a batch: how embeddings, labels, ids and the like become problems, and what is wrong with them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from weince.pairs import (
    ACROSS,
    NO_ID,
    NOT_IGNORED,
    NOT_ITSELF,
    NOT_POSITIVE,
    OTHER_ID,
    OTHER_LABEL,
    SAME_LABEL,
    WITHIN_LIMIT,
    Problem,
    Rule,
    Score,
)
from weince.parameters import check_choice, check_device, check_integers, check_mask
from weince.scores import no_autocast, unit_rows, wide_enough
from weince.sums import positive_shortfall

Candidates = Literal["views", "cross", "clip", "labels"]
LAYOUTS = get_args(Candidates)
SCORES = get_args(Score)
Limit = float | Callable[[Tensor], Tensor]
"""``ignore_above``: how much more than the positive a negative may score, or a function from one to the other."""

TOWERS = ("cross", "clip")
"""The layouts of two towers: queries in ``z_i``, documents in ``z_j``."""

NOWHERE = -2  # the position of a negative that is no candidate of other anchors

SHORT_BATCH = "(a DataLoader leaves out a short last batch with drop_last=True)"
"""What to do if a batch has too few negatives."""


class Layout(NamedTuple):
    """How the rows of a batch become problems; see :func:`problems`."""

    candidates: Candidates = "views"
    within: bool = False
    score: Score = "cosine"
    ignore_above: Limit | None = None
    exempt_hard: bool = True
    check_finite: bool | None = None
    views: bool = False


class Roles(NamedTuple):
    """What a batch brings along beside its embeddings; see :func:`problems`."""

    labels: Any = None
    negatives: Tensor | None = None
    ids: Tensor | None = None
    ignore: Tensor | None = None
    offset: Tensor | None = None


def problems(
    layout: Layout | Candidates, z_i: Tensor, z_j: Tensor | None = None, *, alone: bool = True, **roles: Any
) -> list[Problem]:
    """The problem or problems of a batch.

    Args:
        layout: How rows become anchors and candidates, as its name or with further options.

            - ``"views"`` (SimCLR): the ``2 n`` rows of both views are anchors; the other view of the same row is
              the positive, the remaining ``2 n - 2`` rows are negatives.
            - ``"cross"`` (query and key, SimCSE): row i of ``z_i`` looks for row i of ``z_j`` among all rows of
              ``z_j`` and of ``negatives``. With ``within`` the other rows of ``z_i`` are negatives, too.
            - ``"clip"``: ``"cross"`` in both directions, two problems.
            - ``"labels"`` (SupCon, outside the logarithm): every row is an anchor, all other rows with its label
              are positives. The denominator of each positive holds every row except the anchor itself and ignored
              ones; it includes the other positives. Anchors without a positive are left out.
        z_i: ``(n, d)`` embeddings; they need not be normalised.
        z_j: ``(n, d)``, positives row by row. Optional with ``"labels"``, where it adds rows with the same labels.
        alone: False if candidates of other ranks are added later, so that a single pair is enough.
        **roles: The fields of :class:`Roles`.

            - ``labels``: ``(n,)`` integers for ``"labels"``. For two towers a pair, ``(n,)`` of the queries and
              ``(n,)`` or ``(n + m,)`` of the documents: all documents with the query's label are its positives.
            - ``negatives``: ``(m, d)`` further negatives of every query, or ``(n, k, d)``: ``k`` negatives for each
              query, which no other query sees.
            - ``ids``: ``(n,)`` integers: rows with equal ids are never negatives of each other. With ``negatives``
              also ``(n + m,)``, or ``(n + n k,)``.
            - ``ignore``: ``(anchors, candidates)`` booleans, True for pairs that are not negatives.
            - ``offset``: ``(n,)``, or ``(n + m,)`` with ``negatives``: added to the logits of the documents.
    """
    if isinstance(layout, str):
        layout = Layout(layout)
    given = Roles(**roles)
    if layout.candidates not in LAYOUTS:
        check_choice("candidates", layout.candidates, LAYOUTS)
    if layout.score not in SCORES:
        check_choice("score", layout.score, SCORES)
    _check_use(layout, given)  # first: labels may stand in the place of z_j
    _check_embeddings(z_i, z_j, given.negatives, layout.check_finite)
    if z_j is None and layout.candidates != "labels":
        raise TypeError(
            f'candidates="{layout.candidates}" wants two tensors of positives row by row; got z_i alone: '
            "z.chunk(2) splits views that were concatenated"
        )
    if given != NO_ROLES:
        given = _checked(given, z_i)
    # Under autocast, torch.cat refuses rows in half precision other than its own.
    with no_autocast(z_i.device):
        if layout.candidates in TOWERS:
            assert z_j is not None
            directions = _across(layout, z_i, z_j, given, alone)
        else:
            directions = [_among(layout, z_i, z_j, given, alone)]
        if layout.ignore_above is not None:
            directions = [_limited(problem, layout.ignore_above) for problem in directions]
    for problem in directions:
        if alone and (len(problem.candidates) < 4 or len(problem.anchors) < 1):
            _check_enough(problem)
    return directions


NO_ROLES = Roles()


def _checked(roles: Roles, z_i: Tensor) -> Roles:
    """The roles of the right types, with int64 ids and labels."""
    n, ids, labels, offset = len(z_i), roles.ids, roles.labels, roles.offset
    further = 0 if roles.negatives is None else roles.negatives.shape[:-1].numel()
    check_integers("ids", ids, (n, n + further))
    if isinstance(labels, tuple | list):
        if len(labels) != 2:
            raise TypeError(f"labels must be (of_queries, of_documents); got {len(labels)} tensors")
        shared = roles.negatives is not None and roles.negatives.ndim == 2
        check_integers("labels of queries", labels[0], (n,))
        check_integers("labels of documents", labels[1], (n, n + further) if shared else (n,))
        check_device(z_i.device, labels=labels[0], labels_of_documents=labels[1])
        labels = tuple(values.long() for values in labels)
    else:
        check_integers("labels", labels, (n,))
        check_device(z_i.device, labels=labels)
        labels = None if labels is None else labels.long()
    if offset is not None:
        if not isinstance(offset, Tensor) or offset.shape != (n + further,):
            got = tuple(offset.shape) if isinstance(offset, Tensor) else type(offset).__name__
            raise ValueError(
                f"offset must be a tensor of shape ({n + further},), one number for each document; got {got}"
            )
        offset = offset.to(wide_enough(z_i.dtype))
    check_device(z_i.device, ids=ids, ignore=roles.ignore, offset=offset)
    return roles._replace(labels=labels, ids=None if ids is None else ids.long(), offset=offset)


def _check_enough(problem: Problem) -> None:
    """Raise if there are no negatives, as in a short last batch."""
    candidates = len(problem.candidates)
    if problem.symmetric and problem.positives is None and candidates < 4:
        raise ValueError(
            f"wanted at least 2 pairs, so that there are negatives; got {candidates // 2} {SHORT_BATCH}"
        )
    if (candidates < 2 and problem.hard is None) or len(problem.anchors) < 1:
        anchors, others = tuple(problem.anchors.shape), tuple(problem.candidates.shape)
        raise ValueError(
            f"wanted at least 1 anchor and 2 candidates; got anchors {anchors}, candidates {others} {SHORT_BATCH}"
        )


def _among(layout: Layout, z_i: Tensor, z_j: Tensor | None, roles: Roles, alone: bool) -> Problem:
    """All rows against all rows."""
    source = z_i if z_j is None else torch.cat([z_i, z_j])
    rows = unit_rows(source) if layout.score == "cosine" else _as_they_are(source)
    views = 1 if z_j is None else 2
    itself = torch.arange(len(rows), device=rows.device)
    of_both: dict[str, Tensor] = {"position": itself}
    of_anchor: dict[str, Tensor] = {}
    negatives: list[Rule] = [NOT_ITSELF]
    if layout.candidates == "views":
        of_anchor["positive"] = itself.roll(len(z_i))
        negatives.append(NOT_POSITIVE)
    else:
        of_both["label"] = roles.labels.repeat(views)
        negatives.append(OTHER_LABEL)
    if roles.ids is not None:
        of_both["id"] = roles.ids.repeat(views)
        negatives.append(OTHER_ID)
    if roles.ignore is not None:
        check_mask(roles.ignore, (len(rows), len(rows)), alone)
        of_anchor["ignore"] = roles.ignore
        negatives.append(NOT_IGNORED)
    if layout.views:
        of_both["view"] = (itself >= len(z_i)).long()
    return Problem(
        rows,
        rows.view_as(rows),  # torch.compile needs two tensors, not one twice
        {**of_both, **of_anchor},
        of_both,
        tuple(negatives),
        positives=(SAME_LABEL, NOT_ITSELF) if layout.candidates == "labels" else None,
        raw=_raw(source, source) if source.dtype == torch.bfloat16 and layout.score == "cosine" else None,
        symmetric=True,
        score=layout.score,
    )


def _across(layout: Layout, queries: Tensor, keys: Tensor, roles: Roles, alone: bool) -> list[Problem]:
    """Queries against keys; for ``"clip"`` also keys against queries."""
    n, negatives = len(queries), roles.negatives
    shared = negatives if negatives is not None and negatives.ndim == 2 else None
    hard = negatives if shared is None else None
    query, documents = _side(queries, layout), [_side(keys, layout)]
    if shared is not None:
        documents.append(_side(shared, layout))
    if roles.ignore is not None:
        # In both directions, a rank knows only the pairs of its own rows.
        check_mask(
            roles.ignore, (n, sum(len(side.rows) for side in documents)), alone or layout.candidates == "clip"
        )
    labels = roles.labels if isinstance(roles.labels, tuple) else (roles.labels, roles.labels)
    forward = _direction(layout, query, documents, labels, roles)
    if hard is not None:
        forward = _with_hard(forward, hard, layout, roles)
    if layout.candidates == "cross":
        return [forward]
    back = roles._replace(
        offset=None,
        ids=None if roles.ids is None else roles.ids[:n],
        ignore=None if roles.ignore is None else roles.ignore[:, :n].T,
    )
    turned = (None if labels[1] is None else labels[1][:n], labels[0])
    return [forward, _direction(layout, documents[0], [query], turned, back)]


class _Side(NamedTuple):
    """Embeddings of one side as they came, and the rows that are scored."""

    source: Tensor
    rows: Tensor


def _side(source: Tensor, layout: Layout) -> _Side:
    return _Side(source, _rows(source, layout.score))


def _direction(layout: Layout, anchors: _Side, others: list[_Side], labels: Any, roles: Roles) -> Problem:
    """The rows of one side against those of the other; with ``within`` also against those of their own side.

    Args:
        layout: How rows become anchors and candidates.
        anchors: ``(n, d)``.
        others: ``(n, d)`` positives row by row, and further negatives.
        labels: Labels of the anchors, and of the others or the first of them; None if there are none.
        roles: Ids, offset, and ignored pairs.
    """
    rows, n, across = anchors.rows, len(anchors.rows), sum(len(side.rows) for side in others)
    sides = [*others, anchors] if layout.within else others
    common = rows.dtype
    for side in sides:
        common = torch.promote_types(common, side.rows.dtype)
    targets = torch.cat([side.rows.to(common) for side in sides]) if len(sides) > 1 else sides[0].rows
    diagonal, place = torch.arange(n, device=rows.device), torch.arange(len(targets), device=rows.device)
    of_anchor: dict[str, Tensor] = {}
    of_candidate: dict[str, Tensor] = {"position": place}
    negatives: list[Rule] = []
    if layout.within:
        of_anchor["position"] = diagonal + across
        of_candidate["across"] = place < across
        negatives.append(NOT_ITSELF)
    if labels[0] is None:
        of_anchor["positive"] = diagonal
        negatives.append(NOT_POSITIVE)
    else:
        of_anchor["label"] = labels[0]
        of_candidate["label"] = _filled(labels[1], across, labels[0] if layout.within else None, NO_ID)
        negatives.append(OTHER_LABEL)
    if roles.ids is not None:
        of_anchor["id"] = roles.ids[:n]
        ids = roles.ids[:across]
        of_candidate["id"] = _filled(ids, across, ids[:n] if layout.within else None, NO_ID)
        negatives.append(OTHER_ID)
    if roles.ignore is not None:
        ignore = roles.ignore
        of_anchor["ignore"] = torch.cat([ignore, ignore.new_zeros(n, n)], 1) if layout.within else ignore
        negatives.append(NOT_IGNORED)
    if roles.offset is not None:
        own = roles.offset.new_zeros(n) if layout.within else None
        of_candidate["offset"] = _filled(roles.offset[:across], across, own, 0.0)
    if layout.ignore_above is not None:
        further = (place >= n) & (place < across)
        of_candidate["exempt"] = further if layout.exempt_hard else torch.zeros_like(further)
    positives = None if labels[0] is None else (SAME_LABEL, ACROSS) if layout.within else (SAME_LABEL,)
    return Problem(
        rows.to(common), targets.to(common), of_anchor, of_candidate, tuple(negatives), positives,
        raw=_raw(anchors.source, *(side.source for side in sides)) if layout.score == "cosine" else None,
        score=layout.score,
    )  # fmt: skip


def _with_hard(problem: Problem, hard: Tensor, layout: Layout, roles: Roles) -> Problem:
    """The problem with negatives ``(n, k, d)`` of each anchor alone."""
    n, k, d = hard.shape
    rows = _rows(hard.reshape(n * k, d), layout.score).view(n, k, d)
    common = torch.promote_types(problem.anchors.dtype, rows.dtype)
    place = torch.full((n, k), NOWHERE, device=hard.device)
    of_hard = {"position": place}
    for name in ("id", "label"):
        if name in problem.of_candidate:
            of_hard[name] = torch.full_like(place, NO_ID)
    if roles.ids is not None and len(roles.ids) > n:
        of_hard["id"] = roles.ids[n:].view(n, k)
    if roles.offset is not None:
        of_hard["offset"] = roles.offset[n:].view(n, k)
    if layout.ignore_above is not None:
        of_hard["exempt"] = torch.full_like(place, layout.exempt_hard, dtype=torch.bool)
    return replace(
        problem,
        anchors=problem.anchors.to(common),
        candidates=problem.candidates.to(common),
        hard=rows.to(common),
        of_hard=of_hard,
    )


def _limited(problem: Problem, ignore_above: Limit) -> Problem:
    """The problem without the negatives that score too far above the positive."""
    with torch.no_grad():
        shortfall = positive_shortfall(problem)
        score = 1 - shortfall
        above = ignore_above(score) if callable(ignore_above) else score + ignore_above
        # A copy of the positive scores no more than the positive, but it may round otherwise.
        rounding = 4 * torch.finfo(shortfall.dtype).eps * score.abs().clamp_min(1)
        exact = shortfall - ignore_above if not callable(ignore_above) else 1 - above
        limit = (exact - rounding).to(shortfall.dtype)
    of_candidate = dict(problem.of_candidate)
    of_candidate.setdefault("exempt", torch.zeros_like(of_candidate["position"], dtype=torch.bool))
    return replace(
        problem,
        of_anchor={**problem.of_anchor, "limit": limit},
        of_candidate=of_candidate,
        negatives=(*problem.negatives, WITHIN_LIMIT),
    )


def _rows(rows: Tensor, score: Score) -> Tensor:
    return unit_rows(rows) if score == "cosine" else _as_they_are(rows)


def _as_they_are(rows: Tensor) -> Tensor:
    return rows.to(wide_enough(rows.dtype))


def _filled(values: Tensor, across: int, own: Tensor | None, missing: float) -> Tensor:
    """A column of the other side, filled up to its length, and then of the own side, if that takes part."""
    parts = [values]
    if len(values) < across:
        parts.append(values.new_full((across - len(values),), missing))
    if own is not None:
        parts.append(own)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _raw(anchors: Tensor, *candidates: Tensor) -> tuple[Tensor, Tensor] | None:
    """Anchors and candidates, detached, if all are bfloat16; else None."""
    if any(rows.dtype != torch.bfloat16 for rows in (anchors, *candidates)):
        return None
    together = candidates[0] if len(candidates) == 1 else torch.cat(candidates)
    return anchors.detach(), together.detach()


def _check_use(layout: Layout, roles: Roles) -> None:
    """Raise if something has no meaning in this layout."""
    candidates, labels = layout.candidates, roles.labels
    if labels is None and candidates == "labels":
        raise TypeError('candidates="labels" wants labels=')
    if labels is not None and candidates != "labels":
        if candidates == "views":
            raise TypeError('candidates="views" takes no labels: leave labels= out')
        if not isinstance(labels, tuple | list):
            raise TypeError(
                f'candidates="{candidates}" wants labels=(of_queries, of_documents); got {type(labels).__name__}'
            )
    if candidates == "labels" and not isinstance(labels, Tensor):
        raise TypeError(f'candidates="labels" wants one tensor of labels; got {type(labels).__name__}')
    if candidates in TOWERS:
        if layout.ignore_above is not None and labels is not None:
            raise ValueError("ignore_above compares with one positive; got labels=, so several positives")
        return
    if roles.negatives is not None:
        raise TypeError(f'negatives= goes with candidates="cross" or "clip"; got candidates="{candidates}"')
    if roles.offset is not None:
        raise TypeError(f'offset= goes with candidates="cross" or "clip"; got candidates="{candidates}"')


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
        if rows.shape[-1:] == (0,) or (rows.ndim != 2 and (rows.ndim != 3 or name != "negatives")):
            wanted = "(m, d) or (n, k, d)" if name == "negatives" else "(rows, d)"
            raise ValueError(f"{name} must have shape {wanted} with d >= 1; got {tuple(rows.shape)}")
        if not rows.is_floating_point():
            raise TypeError(f"{name} must be a floating point tensor; got {rows.dtype}")
        if rows.shape[-1] != z_i.shape[-1] or rows.device != z_i.device:
            raise ValueError(
                f"{name} must match z_i of shape {tuple(z_i.shape)} on {z_i.device} in width and device; "
                f"got {tuple(rows.shape)} on {rows.device}"
            )
        # The sum is NaN or infinite if a value is, and only then each value is looked at.
        free = rows.device.type == "cpu" and not torch.compiler.is_compiling()
        if (free if check_finite is None else check_finite) and not isfinite(rows.detach().sum()):
            _check_finite(name, rows)
    if z_j is not None and z_j.shape != z_i.shape:
        remedy = ': candidates="cross" takes further candidates as negatives=' if len(z_j) > len(z_i) else ""
        raise ValueError(
            f"z_i and z_j must have the same shape, positives row by row; "
            f"got {tuple(z_i.shape)} and {tuple(z_j.shape)}{remedy}"
        )
    if negatives is not None and negatives.ndim == 3 and len(negatives) != len(z_i):
        raise ValueError(
            f"negatives of each query alone must have shape ({len(z_i)}, k, {z_i.shape[1]}), and those of all "
            f"queries (m, {z_i.shape[1]}); got {tuple(negatives.shape)}"
        )


def _check_finite(name: str, rows: Tensor) -> None:
    finite = rows.isfinite().flatten(1).all(1)
    if not finite.all():
        bad = (~finite).nonzero().flatten()
        raise ValueError(
            f"{name} must be finite; got NaN or inf in {len(bad)} of {len(rows)} rows, first in row {int(bad[0])}"
        )
