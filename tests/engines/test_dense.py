"""The dense engine against the loops of ``reference.py``: value and gradient on every layout."""

import pytest
import reference
import torch
from reference import blend

from weince import (
    BlendLink,
    InfoNCELoss,
    LinkLoss,
    PowerLink,
    ShortfallLink,
    SoftmaxLink,
    TailConfig,
    Term,
    WeinceLoss,
)
from weince.engines.rows import whole
from weince.functional import link_loss
from weince.scores import pair_shortfall, unit_rows

CONFIGS = {
    "paper": TailConfig(),
    "released": TailConfig(beta=1.0, drop=0.05, soft_cap=False),
    "small tail": TailConfig(k=6, kappa_rho=3.0),
    "share": TailConfig(k=0.4, k_min=3),
    "rho alone": TailConfig(gate="rho"),
    "aic alone": TailConfig(gate="aic", k=12),
    "fixed pivot": TailConfig(rho0=0.4),
}


def embeddings(rows, seed, d=7):
    """Clustered, so that shortfalls spread over orders of magnitude; lengths vary too."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, d, generator=generator, dtype=torch.float64)
    pick = torch.randint(3, (rows,), generator=generator)
    noise = 0.3 * torch.randn(rows, d, generator=generator, dtype=torch.float64)
    length = torch.rand(rows, 1, generator=generator, dtype=torch.float64) + 0.1
    return ((centres[pick] + noise) * length).requires_grad_()


def layout(name):
    """Arguments of the loss, and per contest the anchors, candidates and roles of the reference."""
    n = 11
    a, b, extra = embeddings(n, 1), embeddings(n, 2), embeddings(5, 3)
    ids = torch.tensor([-1, 1, 2, 3, 4, 5, 6, 7, 8, 1, -1])
    both = torch.cat([a, b])
    ignore = torch.rand(2 * n, 2 * n, generator=torch.Generator().manual_seed(4)) < 0.3
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 1])  # label 3 stands alone
    twice = labels.tolist() * 2
    return {
        "views": ({"z_i": a, "z_j": b}, "views", [(both, both, reference.roles_views(n))]),
        "views, ids": (
            {"z_i": a, "z_j": b, "ids": ids},
            "views",
            [(both, both, reference.roles_views(n, ids.tolist()))],
        ),
        "views, ignore": (
            {"z_i": a, "z_j": b, "ignore": ignore},
            "views",
            [(both, both, reference.ignoring(reference.roles_views(n), ignore))],
        ),
        "cross": ({"z_i": a, "z_j": b}, "cross", [(a, b, reference.roles_cross(n, 0))]),
        "cross, negatives": (
            {"z_i": a, "z_j": b, "negatives": extra},
            "cross",
            [(a, torch.cat([b, extra]), reference.roles_cross(n, 5))],
        ),
        "cross, negatives, ids": (
            {"z_i": a, "z_j": b, "negatives": extra, "ids": ids},
            "cross",
            [(a, torch.cat([b, extra]), reference.roles_cross(n, 5, ids.tolist()))],
        ),
        "cross, ids of negatives": (
            {"z_i": a, "z_j": b, "negatives": extra, "ids": torch.cat([ids, ids[:5]])},
            "cross",
            [(a, torch.cat([b, extra]), reference.roles_cross(n, 5, ids.tolist() + ids[:5].tolist()))],
        ),
        "clip": (
            {"z_i": a, "z_j": b, "ignore": ignore[:n, :n]},
            "clip",
            [
                (a, b, reference.ignoring(reference.roles_cross(n, 0), ignore[:n, :n])),
                (b, a, reference.ignoring(reference.roles_cross(n, 0), ignore[:n, :n].T)),
            ],
        ),
        "clip, ids": (
            {"z_i": a, "z_j": b, "ids": ids},
            "clip",
            [(x, y, reference.roles_cross(n, 0, ids.tolist())) for x, y in ((a, b), (b, a))],
        ),
        "cross, negatives, ignore": (
            {"z_i": a, "z_j": b, "negatives": extra, "ignore": ignore[:n, : n + 5]},
            "cross",
            [
                (
                    a,
                    torch.cat([b, extra]),
                    reference.ignoring(reference.roles_cross(n, 5), ignore[:n, : n + 5]),
                )
            ],
        ),
        "labels, ignore": (
            {"z_i": a, "labels": labels, "ignore": ignore[:n, :n]},
            "labels",
            [(a, a, reference.ignoring(reference.roles_labels(labels.tolist()), ignore[:n, :n]))],
        ),
        "labels": (
            {"z_i": a, "labels": labels},
            "labels",
            [(a, a, reference.roles_labels(labels.tolist()))],
        ),
        "labels, two views, ids": (
            {"z_i": a, "z_j": b, "labels": labels, "ids": ids},
            "labels",
            [(both, both, reference.roles_labels(twice, ids.tolist() * 2))],
        ),
    }[name]


LAYOUTS = [
    "views",
    "views, ids",
    "views, ignore",
    "cross",
    "cross, negatives",
    "cross, negatives, ids",
    "cross, ids of negatives",
    "clip",
    "clip, ids",
    "cross, negatives, ignore",
    "labels",
    "labels, ignore",
    "labels, two views, ids",
]


def same(got, wanted, leaves):
    """Value and gradients to 1e-10."""
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_algorithm_1(name, config):
    arguments, candidates, contests = layout(name)
    loss = WeinceLoss(0.3, tail=CONFIGS[config], candidates=candidates)
    got = loss(**arguments, return_stats=True)
    wanted = [reference.weince(*contest, temperature=0.3, config=CONFIGS[config]) for contest in contests]
    leaves = [value for key, value in arguments.items() if key in ("z_i", "z_j", "negatives")]
    same(got.loss, torch.stack([value for value, _ in wanted]).mean(), leaves)
    expected = [anchor for _, statistics in wanted for anchor in statistics]
    for field in got.stats._fields:
        numbers = torch.tensor([anchor[field] for anchor in expected], dtype=torch.float64)
        torch.testing.assert_close(getattr(got.stats, field), numbers, rtol=1e-9, atol=1e-9)
    assert float(got.stats.lam.max()) > 0.01, "a case in which the blend does nothing tests nothing"


def test_eps_counts_in_the_fit_and_in_the_logit():
    arguments, candidates, (contest,) = layout("views")
    config = TailConfig(k=12, eps=0.1, gate="aic", margin=-5.0)
    got = WeinceLoss(0.3, tail=config, candidates=candidates)(**arguments)
    wanted, _ = reference.weince(*contest, temperature=0.3, config=config)
    same(got, wanted, [arguments["z_i"], arguments["z_j"]])


@pytest.mark.parametrize(
    ("link", "logit"),
    [
        (SoftmaxLink(0.3), lambda s: s / 0.3),
        (ShortfallLink(2.5), lambda s: -2.5 * torch.log(1 - s)),
        (ShortfallLink(2.5, endpoint=1.1), lambda s: -2.5 * torch.log(1.1 - s)),
        (PowerLink(4.0), lambda s: 4 * torch.log((1 + s) / 2)),
        (BlendLink(0.7, 2.0, 0.3), lambda s: blend(s, 0.7, 2.0, 0.3, TailConfig())),
    ],
    ids=["softmax", "shortfall", "endpoint", "power", "blend"],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_links(name, link, logit):
    arguments, candidates, contests = layout(name)
    got = link_loss(**arguments, link=link, candidates=candidates)
    wanted = torch.stack([reference.with_link(*contest, logit) for contest in contests]).mean()
    same(got, wanted, [value for key, value in arguments.items() if key in ("z_i", "z_j", "negatives")])


@pytest.mark.parametrize("hardest", [1, 3, 50])
@pytest.mark.parametrize("name", LAYOUTS)
def test_hardest_negatives_alone(name, hardest):
    """An extra term: what it adds is the same loss with all but the hardest negatives taken away."""
    arguments, candidates, contests = layout(name)
    options = {"link": SoftmaxLink(0.3), "candidates": candidates}
    with_term = link_loss(
        **arguments, **options, extra=[Term(ShortfallLink(2.0), weight=0.7, hardest=hardest)]
    )
    added = with_term - link_loss(**arguments, **options)
    parts = []
    for anchors, candidate_rows, roles in contests:
        scores = unit_rows(anchors).detach() @ unit_rows(candidate_rows).detach().T
        kept = []
        for row, kinds in zip(scores.tolist(), roles, strict=True):
            negatives = sorted((-s, j) for j, s in enumerate(row) if kinds[j] == "negative")
            chosen = {j for _, j in negatives[:hardest]}
            kept.append([k if k == "positive" or j in chosen else "none" for j, k in enumerate(kinds)])
        parts.append(reference.with_link(anchors, candidate_rows, kept, lambda s: -2 * torch.log(1 - s)))
    wanted = 0.7 * torch.stack(parts).mean()
    same(added, wanted, [value for key, value in arguments.items() if key in ("z_i", "z_j", "negatives")])


@pytest.mark.parametrize("name", ["views", "cross, negatives", "clip", "labels"])
def test_gradcheck_with_frozen_statistics(name):
    arguments, candidates, _ = layout(name)
    keys = [key for key in ("z_i", "z_j", "negatives") if key in arguments]
    stats = WeinceLoss(candidates=candidates)(**arguments, return_stats=True).stats
    half = len(arguments["z_i"])
    lam, beta = (stats.lam[:half], stats.beta[:half]) if candidates == "clip" else (stats.lam, stats.beta)
    fixed = {key: value for key, value in arguments.items() if key not in keys}

    def frozen(*leaves):
        rows = dict(zip(keys, leaves, strict=True))
        return link_loss(**rows, **fixed, link=BlendLink(lam, beta), candidates=candidates, reduction="none")

    assert torch.autograd.gradcheck(frozen, [arguments[key] for key in keys], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("block", [1, 7])
def test_blocks_of_rows_make_no_difference(monkeypatch, block):
    z_i, z_j = embeddings(40, 1), embeddings(40, 2)
    ids = torch.arange(40) % 37
    whole = WeinceLoss.released()(z_i, z_j, ids=ids, return_stats=True)
    monkeypatch.setattr("weince.engines.dense.BLOCK", 80 * block)
    blocks = WeinceLoss.released()(z_i, z_j, ids=ids, return_stats=True)
    same(blocks.loss, whole.loss, [z_i, z_j])
    for ours, theirs in zip(blocks.stats, whole.stats, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_tiny_loss_keeps_its_digits():
    """Positives on top of each other, negatives opposite: softmax in float32 would round the loss to 0."""
    z = torch.tensor([[1.0, 0.02], [-1.0, 0.01]])
    exact = InfoNCELoss(0.05)(z.double(), z.double())
    leaf = z.clone().requires_grad_()
    loss = InfoNCELoss(0.05)(leaf, z)
    assert 1e-18 < float(exact) < 1e-14
    torch.testing.assert_close(loss.double(), exact, rtol=1e-4, atol=0)
    (grad,) = torch.autograd.grad(loss, leaf)
    double = z.double().requires_grad_()
    (wanted,) = torch.autograd.grad(InfoNCELoss(0.05)(double, z.double()), double)
    assert float((grad.double() - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize("shortfall", [1e-2, 1e-4, 1e-5])
def test_near_the_cap_float32_knows_the_shortfall(shortfall):
    """rho and the loss come from |a - c|²/2: 1 - s would be wrong in the second digit at 1e-5."""
    generator = torch.Generator().manual_seed(5)
    z_i = unit_rows(torch.randn(24, 64, generator=generator, dtype=torch.float64))
    step = unit_rows(torch.randn(24, 64, generator=generator, dtype=torch.float64))
    z_j = z_i + 0.5 * step
    z_j[0] = z_i[1] + (2 * shortfall) ** 0.5 * step[0]  # a negative this near to row 1
    z_i, z_j = z_i.float(), z_j.float()
    double = WeinceLoss()(z_i.double(), z_j.double(), return_stats=True)
    single = WeinceLoss()(z_i, z_j, return_stats=True)
    assert float(double.stats.rho.min()) < 2 * shortfall
    torch.testing.assert_close(single.stats.rho.double(), double.stats.rho, rtol=1e-4, atol=0)
    torch.testing.assert_close(single.loss.double(), double.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_anchors_without_a_positive_do_not_move_the_pivot(engine):
    """The lone rows lie near each other, so that their rho would be the quantile if they counted."""
    z = embeddings(30, 7).detach()
    z[20:] = z[20] + 0.01 * z[20:]
    labels = torch.cat([torch.arange(20) % 4, torch.arange(10, 20)])
    got = WeinceLoss(candidates="labels", engine=engine)(z, labels=labels, return_stats=True)
    wanted, statistics = reference.weince(z, z, reference.roles_labels(labels.tolist()))
    torch.testing.assert_close(got.loss, wanted, rtol=1e-9, atol=1e-9)
    lam = torch.tensor([anchor["lam"] for anchor in statistics], dtype=torch.float64)
    torch.testing.assert_close(got.stats.lam, lam, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("who", ["negatives", "positives"])
@pytest.mark.parametrize("d", [1e-3, 1e-4, 1e-5])
def test_near_the_cap_the_gradient_is_right_in_float32(who, d):
    """Three negatives this near to one anchor, or all positives: from 1 - s the error would be 1e-7 / d."""
    generator = torch.Generator().manual_seed(6)
    z_i = unit_rows(torch.randn(24, 64, generator=generator, dtype=torch.float64))
    step = unit_rows(torch.randn(24, 64, generator=generator, dtype=torch.float64))
    z_j = z_i + (2 * d) ** 0.5 * step if who == "positives" else z_i + 0.5 * step
    if who == "negatives":
        for row in (2, 3, 4):
            z_i[row] = z_i[1] + (2 * d) ** 0.5 * step[row]
    single = [z.float().requires_grad_() for z in (z_i, z_j)]
    double = [z.detach().double().requires_grad_() for z in single]
    loss = LinkLoss(ShortfallLink(2.0))  # with 1.0 the shortfall of a positive cancels in its gradient
    for got, wanted in zip(
        torch.autograd.grad(loss(*single), single), torch.autograd.grad(loss(*double), double), strict=True
    ):
        assert float((got.double() - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("d", [1e-4, 1e-5])
def test_near_the_cap_positives_of_one_label_are_right_in_float32(engine, d):
    """Five rows of each label this near to each other: four positives each, and no negative near."""
    generator = torch.Generator().manual_seed(7)
    z = unit_rows(torch.randn(6, 64, generator=generator, dtype=torch.float64)).repeat(5, 1)
    z += d**0.5 * unit_rows(torch.randn(30, 64, generator=generator, dtype=torch.float64))
    single = z.float().requires_grad_()
    double = single.detach().double().requires_grad_()
    loss, labels = LinkLoss(ShortfallLink(2.0), candidates="labels", engine=engine), torch.arange(6).repeat(5)
    got, wanted = loss(single, labels=labels), loss(double, labels=labels)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=0)
    (grad,), (exact,) = torch.autograd.grad(got, single), torch.autograd.grad(wanted, double)
    assert float((grad.double() - exact).norm() / exact.norm()) < 1e-4


def test_an_anchor_with_few_negatives_near_the_cap_has_no_others():
    rows = torch.randn(8) + 0.01 * torch.randn(6, 8)
    rho = WeinceLoss()(rows[:3], rows[3:], ids=torch.tensor([0, 0, 1]), return_stats=True).stats.rho
    unit, ids = unit_rows(rows.double()), torch.tensor([0, 0, 1, 0, 0, 1])
    wanted = (1 - unit @ unit.T).masked_fill(ids == ids.unsqueeze(1), torch.inf).amin(1)
    torch.testing.assert_close(rho.double(), wanted, rtol=1e-3, atol=0)


@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_duplicates_stand_at_the_cap(engine):
    """Exact duplicates have shortfall eps, not 0: rho and the fit are floored."""
    z_i, z_j = embeddings(20, 1).detach(), embeddings(20, 2).detach()
    z_i[5] = 3 * z_i[4]
    both = torch.cat([z_i, z_j])
    got = WeinceLoss(tail=TailConfig(k=8), engine=engine)(z_i, z_j, return_stats=True)
    wanted, statistics = reference.weince(both, both, reference.roles_views(20), config=TailConfig(k=8))
    torch.testing.assert_close(got.loss, wanted, rtol=1e-9, atol=1e-9)
    assert got.stats.rho[4] == got.stats.rho[5] == 1e-6
    for field in got.stats._fields:
        numbers = torch.tensor([anchor[field] for anchor in statistics], dtype=torch.float64)
        torch.testing.assert_close(getattr(got.stats, field), numbers, rtol=1e-8, atol=1e-9)


def test_pair_shortfall_of_zero_rows_is_that_of_score_0():
    rows = torch.tensor([[0.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
    got = pair_shortfall(rows.unsqueeze(1), rows.unsqueeze(0))
    torch.testing.assert_close(got, 1 - rows @ rows.T)


def test_a_single_part_is_not_copied():
    part = torch.arange(3)
    assert whole([part]) is part
    assert whole([part, part]).tolist() == [0, 1, 2, 0, 1, 2]
