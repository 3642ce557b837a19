"""The dense engine against the loops of ``reference.py``: tail fits, links, hardest negatives, the cap."""

import pytest
import reference
import torch
from cases import LAYOUTS, embeddings, layout
from reference import blend
from started import Chunked, Dense

from weince import (
    AtanhLink,
    BlendLink,
    ContrastiveLoss,
    InfoNCELoss,
    LinkLoss,
    LogSumExp,
    PowerLink,
    ShortfallLink,
    SoftmaxLink,
    TailConfig,
    WeinceLoss,
    link_loss,
)
from weince.engines.survey import whole
from weince.layouts import problems
from weince.links import FunctionLink
from weince.losses.weince import RELEASED_TAIL
from weince.scores import pair_shortfall, unit_rows
from weince.sums import Need, Part

CONFIGS = {
    "paper": TailConfig(),
    "released": RELEASED_TAIL,
    "small tail": TailConfig(k=6, kappa_rho=3.0),
    "share": TailConfig(k=0.4, k_min=3),
    "rho alone": TailConfig(gate="rho"),
    "aic alone": TailConfig(gate="aic", k=12),
    "fixed pivot": TailConfig(rho0=0.4),
}


def same(got, wanted, leaves):
    """Check that value and gradients agree to 1e-10."""
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_algorithm_1(name, config):
    arguments, candidates, problems = layout(name)
    loss = WeinceLoss.paper(0.3, tail=CONFIGS[config], candidates=candidates)
    got = loss(**arguments, return_stats=True)
    wanted = [reference.weince(*problem, temperature=0.3, config=CONFIGS[config]) for problem in problems]
    leaves = [value for key, value in arguments.items() if key in ("z_i", "z_j", "negatives")]
    same(got.loss, torch.stack([value for value, _ in wanted]).mean(), leaves)
    expected = [anchor for _, statistics in wanted for anchor in statistics]
    for field in got.stats._fields:
        numbers = torch.tensor([anchor[field] for anchor in expected], dtype=torch.float64)
        torch.testing.assert_close(getattr(got.stats, field), numbers, rtol=1e-9, atol=1e-9)
    assert float(got.stats.lam.max()) > 0.01, "a case in which the blend does nothing tests nothing"


def test_eps_counts_in_the_fit_and_in_the_logit():
    arguments, candidates, (problem,) = layout("views")
    config = TailConfig(k=12, eps=0.1, gate="aic", margin=-5.0)
    got = WeinceLoss.paper(0.3, tail=config, candidates=candidates)(**arguments)
    wanted, _ = reference.weince(*problem, temperature=0.3, config=config)
    same(got, wanted, [arguments["z_i"], arguments["z_j"]])


@pytest.mark.parametrize(
    ("link", "logit"),
    [
        (SoftmaxLink(0.3), lambda s: s / 0.3),
        (ShortfallLink(2.5), lambda s: -2.5 * torch.log(1 - s)),
        (ShortfallLink(2.5, endpoint=1.1), lambda s: -2.5 * torch.log(1.1 - s)),
        (PowerLink(4.0), lambda s: 4 * torch.log((1 + s) / 2)),
        (AtanhLink(), lambda s: torch.log((1 + s) / (1 - s))),
        (BlendLink(0.7, 2.0, 0.3), lambda s: blend(s, 0.7, 2.0, 0.3, TailConfig())),
    ],
    ids=["softmax", "shortfall", "endpoint", "power", "atanh", "blend"],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_links(name, link, logit):
    arguments, candidates, problems = layout(name)
    got = link_loss(**arguments, link=link, candidates=candidates)
    wanted = torch.stack([reference.with_link(*problem, logit) for problem in problems]).mean()
    same(got, wanted, [value for key, value in arguments.items() if key in ("z_i", "z_j", "negatives")])


class OverHardest(ContrastiveLoss):
    """Cross-entropy over the positive and the hardest negatives, summed over several numbers of them."""

    needs_negatives = False

    def __init__(self, *numbers, **options):
        super().__init__(**options)
        self.numbers = numbers

    def sums(self, batch):
        return [LogSumExp(ShortfallLink(2.0), hardest=number) for number in self.numbers]

    def combine(self, *sums):
        return sum(one.cross_entropy() for one in sums)


@pytest.mark.parametrize("numbers", [(1,), (3,), (50,), (5, 1)], ids=str)
@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_hardest_negatives_alone(name, engine, numbers):
    where = layout(name)
    got = OverHardest(*numbers, candidates=where.candidates, engine=engine, reduction="none")(
        **where.arguments
    )
    batches = [reference.scored(*problem) for problem in where.problems]
    wanted = sum(
        torch.stack(
            [
                loss
                for batch in batches
                for loss in reference.over_hardest(batch, lambda s: -2 * torch.log(1 - s), number)
            ]
        )
        for number in numbers
    )
    weights = torch.linspace(-1, 2, len(got), dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    same((got * weights).sum(), (wanted * weights).sum(), where.leaves)


@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_of_equally_hard_negatives_all_take_part(engine):
    """If negatives tie at the last place asked for, all of them enter the sum. Two pairs of negatives tie here."""
    angles = torch.tensor([0.7, 0.5, 0.5, 0.9, -0.9, 2.0], dtype=torch.float64)
    keys = torch.stack([angles.cos(), angles.sin()], 1)
    queries = torch.zeros_like(keys)
    queries[:, 0] = 1  # all queries are equal
    logits = -2 * torch.log(1 - angles.cos())
    for number, taking_part in ((1, 2), (2, 2), (3, 4), (4, 4), (5, 5)):
        loss = OverHardest(number, candidates="cross", engine=engine, reduction="none")
        wanted = torch.logsumexp(logits[: 1 + taking_part], 0) - logits[0]
        torch.testing.assert_close(loss(queries, keys)[0], wanted)


@pytest.mark.parametrize("name", ["views", "cross, negatives", "clip", "labels"])
def test_gradcheck_with_frozen_statistics(name):
    arguments, candidates, _ = layout(name)
    keys = [key for key in ("z_i", "z_j", "negatives") if key in arguments]
    stats = WeinceLoss.paper(candidates=candidates)(**arguments, return_stats=True).stats
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
    """Positives coincide and negatives are opposite: softmax in float32 would round the loss to 0."""
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
    """rho and the loss use |a - c|²/2; at 1e-5, 1 - s in float32 would be wrong in the second digit."""
    generator = torch.Generator().manual_seed(5)
    z_i = unit_rows(torch.randn(24, 64, generator=generator, dtype=torch.float64))
    step = unit_rows(torch.randn(24, 64, generator=generator, dtype=torch.float64))
    z_j = z_i + 0.5 * step
    z_j[0] = z_i[1] + (2 * shortfall) ** 0.5 * step[0]  # a negative of row 1 at this shortfall
    z_i, z_j = z_i.float(), z_j.float()
    double = WeinceLoss.paper()(z_i.double(), z_j.double(), return_stats=True)
    single = WeinceLoss.paper()(z_i, z_j, return_stats=True)
    assert float(double.stats.rho.min()) < 2 * shortfall
    torch.testing.assert_close(single.stats.rho.double(), double.stats.rho, rtol=1e-4, atol=0)
    torch.testing.assert_close(single.loss.double(), double.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_anchors_without_a_positive_do_not_move_the_pivot(engine):
    """Rows without a positive lie close together, so counting them would change the quantile of rho."""
    z = embeddings(30, 7).detach()
    z[20:] = z[20] + 0.01 * z[20:]
    labels = torch.cat([torch.arange(20) % 4, torch.arange(10, 20)])
    got = WeinceLoss.paper(candidates="labels", engine=engine)(z, labels=labels, return_stats=True)
    wanted, statistics = reference.weince(z, z, reference.roles_labels(labels.tolist()))
    torch.testing.assert_close(got.loss, wanted, rtol=1e-9, atol=1e-9)
    lam = torch.tensor([anchor["lam"] for anchor in statistics], dtype=torch.float64)
    torch.testing.assert_close(got.stats.lam, lam, rtol=1e-9, atol=1e-9)


class SoftmaxAndShortfall(ContrastiveLoss):
    """Two sums, of which the second alone needs exact shortfalls."""

    def sums(self, batch):
        return [LogSumExp(SoftmaxLink(0.5)), LogSumExp(ShortfallLink(2.0))]

    def combine(self, softmax, shortfall):
        return softmax.value + shortfall.value


@pytest.mark.parametrize(
    "loss",
    [
        LinkLoss(ShortfallLink(2.0)),  # beta 1 would cancel a positive's shortfall in its gradient
        SoftmaxAndShortfall(engine="dense"),
        SoftmaxAndShortfall(engine="chunked"),
    ],
    ids=["one sum", "two sums", "two sums, chunked"],
)
@pytest.mark.parametrize("who", ["negatives", "positives"])
@pytest.mark.parametrize("d", [1e-3, 1e-4, 1e-5])
def test_near_the_cap_the_gradient_is_right_in_float32(who, d, loss):
    """Some negatives, or all positives, have shortfall d; computing it as 1 - s would give an error of 1e-7 / d."""
    generator = torch.Generator().manual_seed(6)
    z_i = unit_rows(torch.randn(24, 64, generator=generator, dtype=torch.float64))
    step = unit_rows(torch.randn(24, 64, generator=generator, dtype=torch.float64))
    z_j = z_i + (2 * d) ** 0.5 * step if who == "positives" else z_i + 0.5 * step
    if who == "negatives":
        for row in (2, 3, 4):
            z_i[row] = z_i[1] + (2 * d) ** 0.5 * step[row]
    single = [z.float().requires_grad_() for z in (z_i, z_j)]
    double = [z.detach().double().requires_grad_() for z in single]
    for got, wanted in zip(
        torch.autograd.grad(loss(*single), single), torch.autograd.grad(loss(*double), double), strict=True
    ):
        assert float((got.double() - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("d", [1e-4, 1e-5])
def test_near_the_cap_positives_of_one_label_are_right_in_float32(engine, d, stats):
    """Five rows of each label have shortfalls of about d: four near positives each, and no near negative, which a
    survey for statistics would have found."""
    generator = torch.Generator().manual_seed(7)
    z = unit_rows(torch.randn(6, 64, generator=generator, dtype=torch.float64)).repeat(5, 1)
    z += d**0.5 * unit_rows(torch.randn(30, 64, generator=generator, dtype=torch.float64))
    single = z.float().requires_grad_()
    double = single.detach().double().requires_grad_()
    loss, labels = LinkLoss(ShortfallLink(2.0), candidates="labels", engine=engine), torch.arange(6).repeat(5)
    got, wanted = loss(single, labels=labels, return_stats=stats), loss(double, labels=labels)
    got = got.loss if stats else got
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=0)
    (grad,), (exact,) = torch.autograd.grad(got, single), torch.autograd.grad(wanted, double)
    assert float((grad.double() - exact).norm() / exact.norm()) < 1e-4


@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_fewer_candidates_than_are_made_exact(engine):
    z, labels = embeddings(3, 1), torch.tensor([0, 0, 1])
    got = LinkLoss(ShortfallLink(2.0), candidates="labels", engine=engine)(z, labels=labels)
    wanted = reference.with_link(
        z, z, reference.roles_labels(labels.tolist()), lambda s: -2 * torch.log(1 - s)
    )
    same(got, wanted, [z])


def test_an_anchor_with_few_negatives_near_the_cap_has_no_others():
    rows = torch.randn(8) + 0.01 * torch.randn(6, 8)
    rho = WeinceLoss.paper()(rows[:3], rows[3:], ids=torch.tensor([0, 0, 1]), return_stats=True).stats.rho
    unit, ids = unit_rows(rows.double()), torch.tensor([0, 0, 1, 0, 0, 1])
    wanted = (1 - unit @ unit.T).masked_fill(ids == ids.unsqueeze(1), torch.inf).amin(1)
    torch.testing.assert_close(rho.double(), wanted, rtol=1e-3, atol=0)


@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_duplicates_stand_at_the_cap(engine):
    """Exact duplicates count with shortfall eps instead of 0, in rho and in the fit."""
    z_i, z_j = embeddings(20, 1).detach(), embeddings(20, 2).detach()
    z_i[5] = 3 * z_i[4]
    both = torch.cat([z_i, z_j])
    got = WeinceLoss.paper(tail=TailConfig(k=8), engine=engine)(z_i, z_j, return_stats=True)
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


@pytest.mark.parametrize(
    "need", [Need(), Need(hardest=(6,)), Need(TailConfig(k=4))], ids=["none", "hardest", "tail"]
)
@pytest.mark.parametrize("engine", [Dense, Chunked])
def test_a_second_call_gives_the_same(engine, need):
    z_i, z_j = embeddings(4, 1), embeddings(4, 2)
    (problem,) = problems("views", z_i, z_j)
    started = engine(problem, need)
    parts = [
        Part(ShortfallLink(2.0), "lse"),
        Part(SoftmaxLink(0.3), "lse", "negatives", 6),  # all six negatives
        Part(SoftmaxLink(0.3), "softplus"),
    ]
    first = started.evaluate(parts)
    again = started.evaluate(parts)
    for ours, theirs in zip(first, again, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        grads = [torch.autograd.grad(value.sum(), (z_i, z_j), retain_graph=True) for value in (ours, theirs)]
        torch.testing.assert_close(*grads, rtol=0, atol=0)
    (every,) = started.evaluate([Part(SoftmaxLink(0.3), "lse")])
    torch.testing.assert_close(every, first[1])


@pytest.mark.parametrize("engine", [Dense, Chunked])
def test_the_smallest_shortfalls_with_gradients_on(engine):
    """Two rows coincide: their exact shortfall of 0 replaces the one from the matrix product."""
    z_i = embeddings(6, 1)
    z_i.data[1] = z_i.data[0]
    (problem,) = problems("views", z_i, embeddings(6, 2))
    found = engine(problem).smallest(4)
    assert not found.requires_grad
    assert (found[:2] == 0).all()
    assert (found[2:] > 0).all()


@pytest.mark.parametrize("engine", [Dense, Chunked])
def test_the_number_of_negatives_after_an_infinite_derivative(engine):
    """The slope of this link is infinite at the score of two rows that coincide."""
    z_i = embeddings(6, 1)
    z_i.data[1] = z_i.data[0]
    (problem,) = problems("views", z_i, embeddings(6, 2), ids=torch.tensor([0, 1, 2, 3, 3, 3]))
    own = engine(problem)
    own.evaluate([Part(FunctionLink(lambda s: -(1 - s).clamp_min(0).sqrt()), "lse")])
    assert own.negatives().tolist() == 2 * [10, 10, 10, 6, 6, 6]


def test_a_single_part_is_not_copied():
    part = torch.arange(3)
    assert whole([part]) is part
    assert whole([part, part]).tolist() == [0, 1, 2, 0, 1, 2]
