# ruff: noqa: E501 - the tables of messages read better unbroken
"""What people need of a loss, against float64 loops: own hard negatives, negatives above the positive left out,
offsets, weights, labels of two towers, the own side as negatives, dot products."""

from typing import Any, NamedTuple

import cases
import pytest
import reference
import torch
from bands import small_bands
from cases import CASES, IDS, Case, embeddings, fixed, learned
from reference import Anchor
from torch import Tensor
from torch.testing import assert_close

from weince import (
    DCLLoss,
    FocalLoss,
    HCLLoss,
    InfoNCELoss,
    LinkLoss,
    MWLoss,
    PowerLink,
    SumMargLHLoss,
    SupConLoss,
    WeinceLoss,
)

N, K, M, D = 9, 3, 4, 7
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 3, 4])
OF_DOCUMENTS = torch.tensor([0, 2, 2, 1, 1, 0, 0, 3, 5])  # 4 has no document, 5 no query


class Side(NamedTuple):
    """Documents of a direction: rows, and for each pair whether it is a positive, a negative, or neither."""

    rows: Tensor
    roles: list[list[str]]


def score(a: Tensor, b: Tensor, kind: str) -> Tensor:
    return a @ b if kind == "dot" else a @ b / (a.norm() * b.norm())


def loops(
    anchors: Tensor, side: Side, *, kind: str = "cosine", hard: Tensor | None = None, above: Any = None,
    exempt: int | None = None, no_hard: Any = (), half: int | None = None,
) -> list[Anchor]:  # fmt: skip
    """Anchors with their scores.

    Args:
        anchors: ``(a, d)``.
        side: Candidates of all anchors.
        kind: Of the score.
        hard: ``(a, k, d)``, negatives of one anchor each.
        above: From the positive's score to the largest of a negative.
        exempt: From this candidate on, candidates are exempt from ``above``; and the hard ones, unless it is None.
        no_hard: Pairs of an anchor and one of its hard negatives that take no part.
        half: Number of pairs of views: the anchors' own view.
    """
    found = []
    for i, anchor in enumerate(anchors):
        scores = [score(anchor, row, kind) for row in side.rows]
        positives = [j for j, role in enumerate(side.roles[i]) if role == "positive"]
        ceiling = float("inf") if above is None else float(above(scores[positives[0]]).detach())
        negatives = [
            j for j, role in enumerate(side.roles[i])
            if role == "negative" and (float(scores[j].detach()) <= ceiling or (exempt is not None and j >= exempt))
        ]  # fmt: skip
        of_hard = [] if hard is None else [score(anchor, row, kind) for row in hard[i]]
        of_hard = [
            s for k, s in enumerate(of_hard)
            if (i, k) not in no_hard and (exempt is not None or float(s.detach()) <= ceiling)
        ]  # fmt: skip
        own_view = [scores[j] for j in negatives if half is not None and (j < half) == (i < half)]
        together = [scores[j] for j in negatives] + of_hard
        found.append(Anchor(stack([scores[j] for j in positives]), stack(together), stack(own_view)))
    return found


def stack(scores: list[Tensor]) -> Tensor:
    return torch.stack(scores) if scores else torch.zeros(0, dtype=torch.float64)


def diagonal(n: int, further: int = 0, own: int = 0, ids: list[int] | None = None) -> list[list[str]]:
    """Roles of queries: the document of the same row is the positive; ``own`` rows of the own side come last."""
    table = []
    for i in range(n):
        row = ["positive" if j == i else "negative" for j in range(n + further)]
        row += ["none" if j == i else "negative" for j in range(own)]
        if ids is not None:
            places = [*range(n), *[None] * further, *range(own)]
            row = [
                "none" if role == "negative" and j is not None and ids[i] == ids[j] else role
                for role, j in zip(row, places, strict=True)
            ]
        table.append(row)
    return table


def by_label(of_anchors: list[int], of_others: list[int], own: bool = False) -> list[list[str]]:
    table = []
    for i, label in enumerate(of_anchors):
        row = ["positive" if other == label else "negative" for other in of_others]
        if own:
            row += ["none" if j == i or other == label else "negative" for j, other in enumerate(of_anchors)]
        table.append(row)
    return table


def others_of(n: int) -> list[list[str]]:
    return [["none" if j == i else "negative" for j in range(n)] for i in range(n)]


class Where(NamedTuple):
    """A batch: arguments of the call, options of the loss, and what the loops find in it."""

    arguments: dict[str, Any]
    options: dict[str, Any]
    directions: list[list[Anchor]]


def margin(m: float) -> Any:
    return lambda s: s + m


def where(name: str) -> Where:
    a, b, shared = embeddings(N, 1, D), embeddings(N, 2, D), embeddings(M, 3, D)
    if "dot" in name:  # shorter rows: the loops would overflow
        a, b = (0.4 * rows.detach() for rows in (a, b))
        a, b = a.requires_grad_(), b.requires_grad_()
    hard = embeddings(N * K, 4, D).detach().view(N, K, D).requires_grad_()
    ids, of_hard = IDS[:N], torch.arange(100, 100 + N * K)
    of_hard[[0, 4, 5]] = ids[[0, 1, 1]]  # of anchor 0 the first, of anchor 1 the second and third
    pairs, both, more = {"z_i": a, "z_j": b}, torch.cat([a, b]), torch.cat([b, shared])
    cross, clip = {"candidates": "cross"}, {"candidates": "clip"}
    views = [["none" if i == j else "positive" if abs(i - j) == N else "negative" for j in range(2 * N)]
             for i in range(2 * N)]  # fmt: skip
    square, wide, all_of = Side(b, diagonal(N)), Side(more, diagonal(N, M)), Side(both, views)
    back = Side(a, diagonal(N))
    ignore = torch.rand(N, N + M, generator=torch.Generator().manual_seed(5)) < 0.3
    ignored = [
        ["none" if role == "negative" and ignore[i, j] else role for j, role in enumerate(row)]
        for i, row in enumerate(diagonal(N, M))
    ]
    own = {"negatives": hard}
    labels = (LABELS, OF_DOCUMENTS)
    forward, backward = by_label(*map(list, labels)), by_label(OF_DOCUMENTS.tolist(), LABELS.tolist())
    made = {
        "own": lambda: (own, cross, [loops(a, square, hard=hard)]),
        "own, ids": lambda: (
            {**own, "ids": torch.cat([ids, of_hard])},
            cross,
            [loops(a, Side(b, diagonal(N, ids=ids.tolist())), hard=hard, no_hard={(0, 0), (1, 1), (1, 2)})],
        ),
        "own, clip": lambda: (own, clip, [loops(a, square, hard=hard), loops(b, back)]),
        "shared, clip": lambda: ({"negatives": shared}, clip, [loops(a, wide), loops(b, back)]),
        "above": lambda: (
            {"negatives": shared},
            cross | {"ignore_above": 0.05},
            [loops(a, wide, above=margin(0.05), exempt=N)],
        ),
        "above, none exempt": lambda: (
            {"negatives": shared},
            cross | {"ignore_above": 0.05, "exempt_hard": False},
            [loops(a, wide, above=margin(0.05))],
        ),
        "above, a function, own": lambda: (
            own,
            cross | {"ignore_above": lambda s: 0.95 * s},
            [loops(a, square, hard=hard, above=lambda s: 0.95 * s, exempt=N)],
        ),
        "above, own, none exempt": lambda: (
            own,
            cross | {"ignore_above": -0.05, "exempt_hard": False},
            [loops(a, square, hard=hard, above=margin(-0.05))],
        ),
        "above, clip": lambda: (
            {},
            clip | {"ignore_above": 0.0},
            [loops(a, square, above=margin(0.0)), loops(b, back, above=margin(0.0))],
        ),
        "above, views": lambda: (
            {},
            {"candidates": "views", "ignore_above": 0.1},
            [loops(both, all_of, above=margin(0.1), half=N)],
        ),
        "labels": lambda: ({"labels": labels}, cross, [loops(a, Side(b, forward))]),
        "labels, clip": lambda: (
            {"labels": labels},
            clip,
            [loops(a, Side(b, forward)), loops(b, Side(a, backward))],
        ),
        "labels, own": lambda: ({"labels": labels, **own}, cross, [loops(a, Side(b, forward), hard=hard)]),
        "labels of shared": lambda: (
            {"labels": (LABELS, torch.cat([OF_DOCUMENTS, LABELS[:M]])), "negatives": shared},
            cross,
            [loops(a, Side(more, by_label(LABELS.tolist(), [*OF_DOCUMENTS.tolist(), *LABELS[:M].tolist()])))],
        ),
        "labels, within": lambda: (
            {"labels": labels},
            cross | {"within": True},
            [loops(a, Side(torch.cat([b, a]), by_label(LABELS.tolist(), OF_DOCUMENTS.tolist(), own=True)))],
        ),
        "within": lambda: (
            {},
            cross | {"within": True},
            [loops(a, Side(torch.cat([b, a]), diagonal(N, own=N)))],
        ),
        "within, clip": lambda: (
            {},
            clip | {"within": True},
            [
                loops(a, Side(torch.cat([b, a]), diagonal(N, own=N))),
                loops(b, Side(torch.cat([a, b]), diagonal(N, own=N))),
            ],
        ),
        "within, shared, ids": lambda: (
            {"negatives": shared, "ids": ids},
            cross | {"within": True},
            [loops(a, Side(torch.cat([more, a]), diagonal(N, M, N, ids.tolist())))],
        ),
        "within, ignore": lambda: (
            {"negatives": shared, "ignore": ignore},
            cross | {"within": True},
            [
                loops(
                    a,
                    Side(
                        torch.cat([more, a]),
                        [
                            [*row, *("none" if j == i else "negative" for j in range(N))]
                            for i, row in enumerate(ignored)
                        ],
                    ),
                )
            ],
        ),
        "dot": lambda: ({}, cross | {"score": "dot"}, [loops(a, square, kind="dot")]),
        "dot, views": lambda: (
            {},
            {"candidates": "views", "score": "dot"},
            [loops(both, all_of, kind="dot", half=N)],
        ),
        "dot, own, above": lambda: (
            own,
            cross | {"score": "dot", "ignore_above": 0.2},
            [loops(a, square, kind="dot", hard=hard, above=margin(0.2), exempt=N)],
        ),
        "dot, clip, labels": lambda: (
            {"labels": labels},
            clip | {"score": "dot"},
            [loops(a, Side(b, forward), kind="dot"), loops(b, Side(a, backward), kind="dot")],
        ),
    }
    arguments, options, directions = made[name]()
    return Where(pairs | arguments, options, directions)


NAMES = (
    "own", "own, ids", "own, clip", "shared, clip", "above", "above, none exempt", "above, a function, own",
    "above, own, none exempt", "above, clip", "above, views", "labels", "labels, clip", "labels, own",
    "labels of shared", "labels, within", "within", "within, clip", "within, shared, ids", "within, ignore", "dot",
    "dot, views", "dot, own, above", "dot, clip, labels",
)  # fmt: skip


def served(case: Case, name: str) -> bool:
    options = {"candidates": "views"} if case.views_only else {}
    loss = case.make(fixed, **options)
    return (
        (case.labels or "labels" not in name)
        and (not case.views_only or "views" in name)
        and (loss.takes_dot or "dot" not in name)
        and not ("dot" in name and getattr(getattr(loss, "link", None), "needs_cap", False))
    )


SERVED = [(case, name) for case in CASES for name in NAMES if served(CASES[case], name)]


@pytest.mark.parametrize(("name", "need"), SERVED)
def test_value_and_gradient_are_those_of_loops(name, need):
    case, batch = CASES[name], where(need)
    parameters = {key: learned(value) for key, value in case.parameters.items()}
    options: dict[str, Any] = dict(parameters)
    if case.formula in (cases._released, cases._with_terms):
        options["remembers"] = reference.Released()
    each = torch.stack([loss for anchors in batch.directions for loss in case.formula(anchors, **options)])
    counted = sum(len(anchor.positives) > 0 for anchors in batch.directions for anchor in anchors)
    weights = torch.linspace(-1, 2, len(each), dtype=torch.float64)
    leaves = [value for key, value in batch.arguments.items() if key in ("z_i", "z_j", "negatives")]
    wanted = torch.autograd.grad((each * weights).sum(), [*leaves, *parameters.values()], retain_graph=True)
    mean = torch.autograd.grad(each.sum() / counted, leaves)
    for engine in ("dense", "chunked"):
        with small_bands():
            loss = case.make(learned, reduction="none", engine=engine, **batch.options).double()
            of_loss = dict(loss.named_parameters())
            got = loss(**batch.arguments)
            assert_close(got, each.detach(), rtol=1e-9, atol=1e-9, check_dtype=True)
            found = torch.autograd.grad(
                (got * weights).sum(), [*leaves, *(of_loss[key] for key in parameters)]
            )
            assert_close(found, wanted, rtol=1e-9, atol=1e-9)
            got = case.make(fixed, engine=engine, **batch.options).double()(**batch.arguments)
            assert_close(got, each.sum() / counted, rtol=1e-9, atol=1e-9)
            assert_close(torch.autograd.grad(got, leaves), mean, rtol=1e-9, atol=1e-9)


OFFSETS = {
    "InfoNCE": (InfoNCELoss, lambda p, n: torch.logsumexp(torch.cat([p, n]), 0) - p.mean()),
    "DCL": (DCLLoss, lambda p, n: torch.logsumexp(n, 0) - p.mean()),
    "SumMargLH": (
        SumMargLHLoss,
        lambda p, n: torch.log1p((torch.logsumexp(n, 0) - torch.logsumexp(p, 0)).exp()),
    ),
    "Focal": (
        lambda t, **o: FocalLoss(t, gamma=2.0, **o),
        lambda p, n: (
            (1 - torch.softmax(torch.cat([p, n]), 0)[0]) ** 2 * (torch.logsumexp(torch.cat([p, n]), 0) - p[0])
        ),
    ),
}


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("which", ["none", "shared", "own"])
@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_are_added_to_the_logits(name, which, engine):
    """Of documents and negatives, the positive's included, as logQ of a sampled softmax wants it."""
    make, formula = OFFSETS[name]
    z_i, z_j, shared = embeddings(N, 1), embeddings(N, 2), embeddings(M, 3)
    own = embeddings(N * K, 4).detach().view(N, K, D).requires_grad_()
    negatives = {"none": None, "shared": shared, "own": own}[which]
    further = {"none": 0, "shared": M, "own": N * K}[which]
    offset = torch.randn(N + further, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [z_i, z_j] if negatives is None else [z_i, z_j, negatives]
    losses = []
    for i in range(N):

        def logit(row, o, i=i):
            return score(z_i[i], row, "cosine") / 0.3 + o

        others = [logit(z_j[j], offset[j]) for j in range(N) if j != i]
        if which == "shared":
            others += [logit(row, o) for row, o in zip(shared, offset[N:], strict=True)]
        if which == "own":
            others += [logit(row, o) for row, o in zip(own[i], offset[N:].view(N, K)[i], strict=True)]
        losses.append(formula(logit(z_j[i], offset[i])[None], torch.stack(others)))
    wanted = torch.stack(losses)
    with small_bands():
        loss = make(0.3, candidates="cross", engine=engine, reduction="none")
        got = loss(z_i, z_j, negatives=negatives, offset=offset)
        weights = torch.linspace(-1, 2, N, dtype=torch.float64)
        assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        assert_close(
            torch.autograd.grad((got * weights).sum(), leaves), torch.autograd.grad((wanted * weights).sum(), leaves),
            rtol=1e-9, atol=1e-9,
        )  # fmt: skip


def test_offsets_of_a_clip_are_those_of_the_documents():
    z_i, z_j, offset = embeddings(N, 1), embeddings(N, 2), torch.linspace(-1, 1, N, dtype=torch.float64)
    both = InfoNCELoss(0.3, candidates="clip", reduction="none")(z_i, z_j, offset=offset)
    forward = InfoNCELoss(0.3, candidates="cross", reduction="none")(z_i, z_j, offset=offset)
    back = InfoNCELoss(0.3, candidates="cross", reduction="none")(z_j, z_i)
    assert_close(both, torch.cat([forward, back]))


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("candidates", ["views", "cross", "clip", "labels"])
def test_weights_are_those_of_the_mean(candidates, engine):
    z_i, z_j, labels = (
        embeddings(N, 1),
        embeddings(N, 2),
        {"labels": LABELS} if candidates == "labels" else {},
    )
    weights = torch.linspace(0, 2, N, dtype=torch.float64)
    options = {"candidates": candidates, "engine": engine}
    each = InfoNCELoss(0.3, reduction="none", **options)(z_i, z_j, **labels)
    every = weights.repeat(len(each) // N)
    counted = torch.ones_like(every)
    got = {
        reduction: InfoNCELoss(0.3, reduction=reduction, **options)(z_i, z_j, weights=weights, **labels)
        for reduction in ("mean", "sum", "none")
    }
    assert_close(got["none"], each * every)
    assert_close(got["sum"], (each * every).sum())
    assert_close(got["mean"], (each * every).sum() / (every * counted).sum())
    assert_close(
        *(torch.autograd.grad(value, z_i) for value in (got["mean"], (each * every).sum() / every.sum()))
    )


def test_anchors_without_a_positive_have_no_weight():
    z, weights = embeddings(4, 1), torch.tensor([1.0, 2.0, 3.0, 4.0])
    labels = torch.tensor([0, 0, 1, 2])
    each = SupConLoss(reduction="none")(z, labels=labels)
    assert_close(SupConLoss()(z, labels=labels, weights=weights), (each[0] + 2 * each[1]) / 3)
    assert SupConLoss()(z, labels=labels, weights=torch.zeros(4)) == 0


def test_own_negatives_of_every_anchor_are_many_shared_ones_with_ignored_pairs():
    z_i, z_j = embeddings(N, 1), embeddings(N, 2)
    own = embeddings(N * K, 4).detach().view(N, K, D)
    rows = torch.arange(N * K) // K
    ignore = torch.cat([torch.zeros(N, N, dtype=torch.bool), rows != torch.arange(N).unsqueeze(1)], 1)
    loss = InfoNCELoss(0.1, candidates="cross")
    shared = loss(z_i, z_j, negatives=own.flatten(0, 1), ignore=ignore)
    got = loss(z_i, z_j, negatives=own)
    assert_close(got, shared)
    assert_close(*(torch.autograd.grad(value, (z_i, z_j)) for value in (got, shared)))


def test_a_copy_of_the_positive_is_not_above_it():
    """It scores the same, however both are rounded."""
    z = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    z_j = z + 0.3 * torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    loss = InfoNCELoss(0.1, candidates="cross", ignore_above=0.0, exempt_hard=False, reduction="none")
    plain = DCLLoss(0.1, candidates="cross", ignore_above=0.0, exempt_hard=False, reduction="none")
    assert_close(plain(z, z_j, negatives=z_j.clone()).isfinite(), torch.ones(20, dtype=torch.bool))
    copies = loss(z, z_j, negatives=z_j.clone())
    assert (copies > 0.6).all(), "log 2, since each positive has a copy among the negatives"


REFUSED = [
    (
        lambda: InfoNCELoss(scale=20),
        TypeError,
        r"temperature = 1 / scale, so a scale of 20 is a temperature of 0.05",
    ),
    (
        lambda: InfoNCELoss(20.0),
        ValueError,
        "at most 2 for cosines; got 20.0: a scale of 20 is a temperature of 1 / 20",
    ),
    (
        lambda: InfoNCELoss(within=True),
        ValueError,
        'within=True goes with candidates="cross" or "clip"; got \'views\'',
    ),
    (lambda: InfoNCELoss(score="l2"), ValueError, "score must be one of cosine, dot; got 'l2'"),
    (lambda: InfoNCELoss(ignore_above="0.1"), TypeError, "ignore_above must be a number or a function"),
    (
        lambda: SupConLoss(ignore_above=0.1),
        ValueError,
        'ignore_above compares with one positive; got candidates="lab',
    ),
    (lambda: InfoNCELoss(hardness=-1), ValueError, "hardness must be a number of at least 0; got -1"),
    (
        lambda: LinkLoss(PowerLink(2.0), score="dot"),
        ValueError,
        'PowerLink wants cosines, .*; got score="dot"',
    ),
    (lambda: WeinceLoss(score="dot"), ValueError, 'WeinceLoss wants cosines, .*; got score="dot"'),
    (
        lambda: MWLoss(hardness=1.0),
        ValueError,
        "MWLoss has no softmax of negatives alone; got hardness=1.0",
    ),
    (
        lambda: InfoNCELoss(torch.tensor(0.1), learn_temperature=True),
        TypeError,
        "wants a number as temperature; got T",
    ),
    (lambda: InfoNCELoss(exempt_hard=1), ValueError, "exempt_hard must be True or False; got 1"),
]


@pytest.mark.parametrize(("make", "error", "said"), REFUSED)
def test_an_option_without_meaning_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


Z = torch.randn(4, 3)
CROSS = {"candidates": "cross"}
CALLS = [
    (InfoNCELoss(), {"negatives": Z}, TypeError, 'negatives= goes with candidates="cross" or "clip"; got .*"views"'),
    (InfoNCELoss(**CROSS), {"negatives": Z.expand(3, 4, 3)}, ValueError, r"shape \(4, k, 3\), .*\(m, 3\); got \(3, 4, 3\)"),
    (InfoNCELoss(**CROSS), {"negatives": Z[None, None]}, ValueError, r"shape \(m, d\) or \(n, k, d\) .*; got \(1, 1, 4, 3\)"),
    (InfoNCELoss(), {"offset": Z[:, 0]}, TypeError, 'offset= goes with candidates="cross" or "clip"'),
    (InfoNCELoss(**CROSS), {"offset": Z}, ValueError, r"offset must be a tensor of shape \(4,\), .*; got \(4, 3\)"),
    (HCLLoss(**CROSS), {"offset": Z[:, 0]}, ValueError, "HCLLoss is no softmax of its logits; got offset="),
    (InfoNCELoss(), {"weights": Z}, ValueError, r"weights must be floating point numbers of shape \(4,\); got .*\(4, 3\)"),
    (InfoNCELoss(), {"weight": Z}, TypeError, "takes labels, negatives, ids, ignore, offset, weights; got 'weight'"),
    (InfoNCELoss(**CROSS), {"labels": torch.arange(4)}, TypeError, r"wants labels=\(of_queries, of_documents\); got Tensor"),
    (HCLLoss(**CROSS), {"labels": (torch.arange(4),) * 2}, ValueError, "HCLLoss wants one positive per anchor; got lab"),
    (InfoNCELoss(**CROSS), {"ignore": torch.zeros(4, 5) > 0}, ValueError, r"\(4, 4\), .*: \(n, n \+ m\) .*; got \(4, 5\)"),
    (InfoNCELoss(**CROSS, ignore_above=0.1), {"labels": (torch.arange(4),) * 2}, ValueError, "one positive; got labels="),
    (InfoNCELoss(score="dot"), {"return_stats": True}, ValueError, 'tail statistics want cosines, .*; got score="dot"'),
    (InfoNCELoss(torch.nn.Parameter(torch.tensor(0.1, device="meta"))), {}, ValueError, "temperature must be on cpu, like .*; got meta"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "given", "error", "said"), CALLS)
def test_a_call_without_meaning_is_refused(loss, given, error, said):
    with pytest.raises(error, match=said):
        loss(Z, Z, **given)


@pytest.mark.parametrize("small", [0.0, 1e-42, 1e-39])
def test_rows_below_the_smallest_normal_number_are_rows_of_length_0(small):
    z_i, z_j = torch.randn(2, 6, 4)
    z_i[0] = small
    value = InfoNCELoss(0.1)(z_i.requires_grad_(), z_j)
    (grad,) = torch.autograd.grad(value, z_i)
    assert value.isfinite()
    assert grad.isfinite().all()
    assert (grad[0] == 0).all()
