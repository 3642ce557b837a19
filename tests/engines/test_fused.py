"""The fused kernels against the dense engine in float64. Without a GPU they run in Triton's interpreter."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

triton = pytest.importorskip("triton", minversion="3.5")

import reference  # noqa: E402
import triton.language as tl  # noqa: E402
from fused_cases import DEVICE, Numbers, agree, batch, evaluate, named, views  # noqa: E402
from started import Dense, Fused  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from weince import InfoNCELoss, WeinceLoss  # noqa: E402
from weince.distributed import share  # noqa: E402
from weince.engines.fused import why_not  # noqa: E402
from weince.engines.kernels import hardest, launch, ops, search, shapes, translate  # noqa: E402
from weince.engines.kernels.fit import lines, log64  # noqa: E402
from weince.engines.kernels.tape import Tape  # noqa: E402
from weince.layouts import Layout, problems  # noqa: E402
from weince.links import (  # noqa: E402
    AffineLink,
    AtanhLink,
    BlendLink,
    FunctionLink,
    PowerLink,
    ShortfallLink,
    SoftmaxLink,
)
from weince.losses.kl_ball import MomentLink, scales_at  # noqa: E402
from weince.scores import shortfalls  # noqa: E402
from weince.sums import Need, Part  # noqa: E402
from weince.tail import TailConfig, TailFit, fit_tail, gated  # noqa: E402

TAIL = TailConfig()
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _poison():
    """Fill uninitialized CPU memory with NaN and the largest integers, so that reading it makes a test fail."""
    torch.use_deterministic_algorithms(DEVICE == "cpu")
    yield
    torch.use_deterministic_algorithms(False)


def one(link, kind="lse", *rest):
    return lambda engine, numbers: [Part(link, kind, *rest)]


def several(engine, numbers):
    """Parts of every kind and most links, with learned parameters: shared, and one per anchor."""
    n = len(engine.problem.anchors)
    found = [
        Part(SoftmaxLink(numbers(0.3)), "lse"),
        Part(ShortfallLink(numbers(2.5)), "lse", "negatives", 5),
        Part(AffineLink(numbers(-4.0), numbers(-2.0)), "softplus"),
        Part(BlendLink(numbers(0.4, n), numbers(1.5), numbers(0.5, n), soft_cap=False), "lse"),
        Part(SoftmaxLink(0.2), "lse", "negatives", 2),
    ]
    if "view" in engine.problem.of_anchor:
        found.append(Part(PowerLink(numbers(2.0)), "lse", "same view"))
    if engine.problem.positives is not None:
        found += [
            Part(SoftmaxLink(numbers(0.6)), "lse", "positives"),
            Part(ShortfallLink(numbers(1.5)), "sum", "positives"),
            Part(AffineLink(numbers(3.0), 1.0), "softplus", "positives"),
        ]
    return found


LAYOUTS = [
    "views",
    "views, ids",
    "views, ignore, same",
    "cross, negatives",
    "clip, ignore",
    "labels",
    "labels, ids, ignore",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_sums_on_every_layout(layout):
    rows, name, options = batch(layout)
    agree(several, rows, name, **options)


@pytest.mark.parametrize(
    ("layout", "n", "block"),
    [("views", 47, 16), ("views", 64, 64), ("cross, negatives", 47, 16), ("cross, negatives", 56, 16),
     ("labels, ids", 47, 16)],
)  # fmt: skip
def test_one_sum(monkeypatch, layout, n, block):
    """In several tiles: some hold one positive only, in their first or last column, some hold no positive but the
    anchors themselves. With 56 anchors the last tile has one column too many."""
    monkeypatch.setattr(launch, "blocks", lambda *_: {"BM": block, "BN": 32})
    rows, name, options = batch(layout, n=n, d=20)
    agree(lambda engine, numbers: [Part(SoftmaxLink(numbers(0.5)), "lse")], rows, name, **options)


@pytest.mark.parametrize(
    "link",
    [
        lambda make, n: SoftmaxLink(make(0.05)),
        lambda make, n: AffineLink(make(-5.0, n), make(0.3, n)),
        lambda make, n: ShortfallLink(make(2.5), endpoint=1.1),
        lambda make, n: ShortfallLink(make(1.5, n)),
        lambda make, n: BlendLink(make(0.4, n), make(2.0), make(0.3), endpoint=1.2),
        lambda make, n: PowerLink(make(3.0, n)),
        lambda make, n: AtanhLink(),
        lambda make, n: MomentLink(make(4.0, n), 2),
    ],
    ids=["softmax", "affine", "endpoint", "shortfall", "blend", "power", "atanh", "moment"],
)
def test_links(monkeypatch, link):
    """In several tiles, in which the largest logit so far grows."""
    monkeypatch.setattr(launch, "blocks", lambda *_: {"BM": 16, "BN": 32})
    agree(
        lambda engine, numbers: [Part(link(numbers, len(engine.problem.anchors)), "lse")],
        views(20, 24),
        gradient=2e-4,
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: overflow where a pair takes no part
@pytest.mark.parametrize("need", [Need(), Need(TailConfig(k=4))], ids=["no tail", "tail"])
@pytest.mark.parametrize(
    "link",
    [
        lambda make: AffineLink(make(-150.0), make(-1000.0)),
        lambda make: AffineLink(make(150.0), make(-1000.0)),
        lambda make: ShortfallLink(make(60.0)),
        lambda make: PowerLink(make(300.0)),
    ],
    ids=["affine, falls", "affine, rises", "shortfall", "power"],
)
def test_logits_far_from_0(monkeypatch, link, need):
    """Float32 holds no exponential of them, or of a part of them. With a tail, the nearest negative is known; it
    has the largest logit of links that rise with the score."""
    monkeypatch.setattr(launch, "blocks", lambda *_: {"BM": 16, "BN": 32})
    agree(lambda engine, numbers: [Part(link(numbers), "lse")], views(20, 24), need=need, gradient=1e-3)


@pytest.mark.parametrize(
    "link",
    [SoftmaxLink(0.3), AffineLink(-2.0, 0.5), ShortfallLink(1.2, endpoint=1.3), ShortfallLink(2.0), PowerLink(1.5),
     BlendLink(0.3, 2.0, 0.4), BlendLink(1.0, 1.0, soft_cap=False), BlendLink(0.5, 1.0, endpoint=1.2), AtanhLink(),
     MomentLink(3.0), MomentLink(3.0, 2, 0.5)],
)  # fmt: skip
def test_what_is_recorded_of_a_link(link):
    """The operations on the tape are those of the link, at shortfalls from 1e-9 to 2."""
    tape, d = Tape([]), torch.logspace(-9, 0.301, 200, dtype=torch.float64)
    logit, shortfall = translate.record_link(translate.code_of(link), tape, {})
    (ours,) = translate.evaluate(tape, [logit], {shortfall: d})
    torch.testing.assert_close(ours, link.logit(d))
    (slope,) = translate.evaluate(tape, [translate.derivative(tape, logit, shortfall)], {shortfall: d})
    torch.testing.assert_close(-slope.expand_as(d), link.slope(d))
    assert not link.falls or (ours.diff() <= 1e-12).all()


@pytest.mark.parametrize("make", [SoftmaxLink, PowerLink, lambda value: BlendLink(0.3, value, value)])
def test_a_parameter_in_half_precision(make):
    """The kernels compute with it in float32: its inverse is not rounded to bfloat16."""
    half = torch.tensor(0.023, dtype=torch.bfloat16, device=DEVICE)
    (problem,) = problems("views", *views(9, 16))
    ours, exact = (Fused(problem).evaluate([Part(make(value), "lse")]) for value in (half, half.float()))
    torch.testing.assert_close(ours, exact, rtol=0, atol=0)


def test_the_one_positive_of_several_is_refused():
    [problem] = problems("labels", z_i=views(4, 16)[0], labels=torch.tensor([0, 0, 1, 1], device=DEVICE))
    with pytest.raises(ValueError, match="got labels, so several positives"):
        Fused(problem, Need()).positive_scores()


def test_whole_numbers_are_passed_as_floats(monkeypatch):
    """A kernel compiled for an int cannot be launched with a float, and both have the same key: 2 == 2.0."""

    def kinds(number):
        found = []

        def launched(kernel, grid, arguments, constants):
            found.append(
                (kernel.__name__, *(type(value) for value in arguments if not isinstance(value, tuple)))
            )
            kernel[grid](*arguments, **constants)

        for module in (launch, search):
            monkeypatch.setattr(module, "launch", launched)
        config = TailConfig(k=4, margin=number(2), kappa_rho=number(3), kappa_aic=number(2), eps=number(1))
        (problem,) = problems("views", *views(8, 16))
        Fused(problem, Need(config)).evaluate(
            [
                Part(ShortfallLink(number(2), number(3), number(1)), "lse"),
                Part(PowerLink(number(2), number(1)), "lse"),
            ]
        )
        return found

    assert kinds(int) == kinds(float)


def test_under_activation_checkpointing():
    """Checkpointing lets a backward pass unpack each saved tensor only once."""

    def total(z_i, z_j):
        [problem] = problems("views", z_i=z_i, z_j=z_j)
        return Fused(problem, Need()).evaluate([Part(SoftmaxLink(0.2), "lse")])[0].sum()

    rows = [row.requires_grad_() for row in views(12, 16)]
    kept = torch.autograd.grad(total(*rows), rows)
    again = torch.autograd.grad(checkpoint(total, *rows, use_reentrant=False), rows)
    torch.testing.assert_close(again, kept)


def test_more_sums_than_fit_into_a_pass():
    """More sums than one pass holds, and links whose eps differ, which cannot share a pass."""

    def parts(engine, numbers):
        links = [SoftmaxLink(0.1 + 0.1 * k) for k in range(9)]
        links += [ShortfallLink(2.0, eps=1e-3), ShortfallLink(2.0), AtanhLink(1e-3)]
        return [Part(link, "lse") for link in links]

    agree(parts, views(9, 16))


def test_the_moments_of_a_softmax_share_a_pass(monkeypatch):
    passes = []
    monkeypatch.setattr(launch, "summed", lambda *rest, real=launch.summed: passes.append(0) or real(*rest))
    scale = torch.linspace(1, 8, 18, device=DEVICE)
    links = [MomentLink(scale, power, 1 / scale) for power in range(3)]
    agree(lambda engine, _: [Part(link, "lse") for link in links], views(9, 16))
    assert len(passes) == 1


@pytest.mark.parametrize("spread", [1.0, 0.05])
def test_the_scales_of_the_kl_ball(spread):
    """Also where all scores are near the cap: there the logits differ in their last digits."""
    z, found = torch.randn(1, 16) + spread * torch.randn(2, 24, 16), []
    for engine, dtype in ((Fused, torch.float32), (Dense, torch.float64)):
        [problem] = problems("views", *z.to(DEVICE, dtype))
        found.append(scales_at(engine(problem), 0.8, 1e5).double())
    # A shortfall has an error of 1e-6, and those of the near scores differ by 1e-3.
    torch.testing.assert_close(*found, rtol=1e-4 if spread == 1 else 5e-3, atol=0)


def test_a_link_of_ones_own_beside_others():
    def parts(engine, numbers):
        cubic = FunctionLink(lambda s, k: k * s**3, k=numbers(2.0))
        return [
            Part(SoftmaxLink(0.3), "lse"),
            Part(cubic, "lse", "negatives", 4),
            Part(ShortfallLink(2.0), "lse"),
        ]

    agree(parts, views(9, 16))


@pytest.mark.parametrize(
    ("layout", "d"), [("views", 20), ("cross, negatives", 20), ("clip", 20), ("views", 140), ("cross", 140)]
)
def test_the_positive(layout, d):
    """Shortfalls of positives and their gradients, with a zero row and with a pair of equal rows."""
    rows, name, options = batch(layout, n=19, d=d)
    rows[0][3], rows[1][5] = 0.0, rows[0][5]
    found = []

    def positives(one, engine):
        if engine is Dense:
            return 1 - engine(one).positive_scores()
        return ops.apart(one.anchors, one.candidates, one.of_anchor["positive"], one.symmetric)

    for engine, dtype in ((Fused, torch.float32), (Dense, torch.float64)):
        leaves = [row.detach().to(dtype).requires_grad_() for row in rows]
        values = [positives(one, engine) for one in problems(name, **named(leaves), **options)]
        total = sum(
            (value * torch.linspace(1, 2, 38 if name == "views" else 19, device=DEVICE)).sum()
            for value in values
        )
        found.append([*values, *torch.autograd.grad(total, leaves[:2])])
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6)


def test_no_gradient_is_computed_that_nobody_wants():
    (queries, keys), extra = views(12, 16), torch.randn(9, 16, device=DEVICE)
    (problem,) = problems("cross", queries.clone().requires_grad_(), keys, negatives=extra)
    (value,) = Fused(problem).evaluate([Part(SoftmaxLink(0.3), "lse")])
    (exact,) = Dense(problem).evaluate([Part(SoftmaxLink(0.3), "lse")])
    ours, theirs = (torch.autograd.grad(v.sum(), problem.anchors)[0] for v in (value, exact))
    assert float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm())
    with torch.no_grad():
        (value,) = Fused(problem).evaluate([Part(SoftmaxLink(0.3), "lse")])
    assert not value.requires_grad


def test_a_second_derivative_is_refused():
    z_i, z_j = (rows.requires_grad_() for rows in views(6, 8))
    (problem,) = problems("views", z_i, z_j)
    (value,) = Fused(problem).evaluate([Part(SoftmaxLink(0.3), "lse")])
    (first,) = torch.autograd.grad(value.sum(), z_i, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        torch.autograd.grad(first.sum(), z_i)


def test_anchors_without_negatives():
    """Their log-sum-exp is -inf, as in the other engines, and they add nothing to the gradient."""
    z_i, z_j = views(8, 16)
    ids = torch.zeros(8, dtype=torch.long, device=DEVICE)
    ids[:2] = torch.tensor([1, 2], device=DEVICE)
    ignore = torch.zeros(8, 8, dtype=torch.bool, device=DEVICE)
    ignore[3, :2] = True
    (engine,) = agree(several, (z_i, z_j), "cross", ids=ids, ignore=ignore)
    assert int(engine.negatives()[3]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("need", [Need(), Need(TAIL, (3,))], ids=["plain", "tail"])
def test_nan_embeddings(need, dtype):
    """A NaN candidate makes the sums of all its anchors NaN, but for the one whose positive it is."""
    z_i, z_j = views(12, 16, dtype=dtype)
    z_j[3, 2] = torch.nan
    (problem,) = problems(Layout("cross", check_finite=False), z_i, z_j)
    parts = [
        Part(SoftmaxLink(0.3), "lse"),
        Part(SoftmaxLink(0.3), "lse", "negatives", 3),
        Part(AffineLink(2.0, 1.0), "softplus"),
        Part(ShortfallLink(2.0), "sum"),
        Part(FunctionLink(lambda s: 2 * s), "lse"),
    ]
    for value in Fused(problem, need).evaluate(parts):
        assert value.isnan().tolist() == [row != 3 for row in range(12)]


def test_number_of_negatives_and_smallest_of_all():
    rows, name, options = batch("labels, ids, ignore")
    (problem,) = problems(name, *rows, **options)
    for need in (Need(), Need(TAIL)):
        assert torch.equal(Fused(problem, need).negatives(), Dense(problem, need).negatives())
    torch.testing.assert_close(Fused(problem).smallest(30), Dense(problem).smallest(30), rtol=1e-5, atol=1e-7)


# Tail statistics


class Spy:
    """Replaces the launcher, and stores the shortfalls that each launch of the fit kernel used."""

    def __init__(self):
        self.tails, self.sizes = [], []

    def __call__(self, kernel, grid, arguments, constants):
        self.launch(kernel, grid, arguments, constants)
        if kernel is not search.fit.fit_kernel or not constants["FIT"]:
            return
        (halves, kept, _, sizes), near_d = arguments[:4], arguments[11]
        start, anchors, count, _, k, _, width = arguments[14:21]
        keys = halves.view(torch.int64).view(-1, width)[: anchors - start]
        tails = (keys >> 32).int().view(torch.float32)
        have = count if constants["ALL"] else kept[: len(keys), None]
        tails = tails.where(torch.arange(width, device=keys.device) < have, torch.inf).sort(1).values[:, :k]
        own = sizes[: len(keys)] if constants["VARIES"] else torch.full((len(keys),), k, device=keys.device)
        tails = tails.where(torch.arange(k, device=keys.device) < own[:, None], torch.inf)
        exact = near_d[start : start + len(keys), :k].sort(1).values
        self.tails.append(torch.cat([exact, tails[:, exact.shape[1] :]], 1))
        self.sizes.append(own)

    def stats(self, config, counted):
        """Statistics of Algorithm 1 in float64, from the stored shortfalls."""
        tails, sizes = torch.cat(self.tails).double(), torch.cat(self.sizes)
        return gated(tails[:, 0].clamp_min(config.eps), fit_tail(tails, sizes, config), config, counted)


def survey(config, rows, layout="views", hardest=(), **options):
    """Fused and float64 Dense engines for the first problem, and the expected statistics: rho of Dense, the rest
    fitted in float64 to the fused engine's own shortfalls."""
    spy = Spy()
    spy.launch = search.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "launch", spy)
        ours = Fused(problems(layout, **named(rows), **options)[0], Need(config, hardest))
    theirs = Dense(problems(layout, **named(z.double() for z in rows), **options)[0], Need(config, hardest))
    counted = None if ours.problem.positives is None else ours.problem.count_positives() > 0
    return ours, theirs, spy.stats(config, counted)._replace(rho=theirs.stats.rho)


def check_stats(config, rows, layout="views", hardest=(), **options):
    ours, theirs, stats = survey(config, rows, layout, hardest, **options)
    torch.testing.assert_close(ours.stats.rho.double(), stats.rho, rtol=1e-4, atol=0)
    for field in ("beta", "daic", "lam"):
        mine, exact = getattr(ours.stats, field).double(), getattr(stats, field)
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)
    for number in hardest:
        exact = theirs.thresholds[number]
        torch.testing.assert_close(ours.thresholds[number].double(), exact, rtol=1e-5, atol=1e-6)
    return ours


@pytest.mark.parametrize("layout", ["views", "views, ids", "cross, negatives", "labels, ignore"])
def test_statistics(layout):
    rows, name, options = batch(layout)
    config = TailConfig(k=0.5, k_min=4)
    engine = check_stats(config, rows, name, (3, 50), **options)
    assert float(engine.stats.lam.max()) > 0.01, "a case in which the gate is shut tests nothing"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log(0) without negatives
@pytest.mark.parametrize("who", ["negatives", "positives"])
def test_who_has_none_does_not_move_the_pivot(who):
    """Of 24 anchors the last 8 have no negatives, or no positives."""
    z = views(24, 16)[0]
    labels, ignore = torch.arange(24, device=DEVICE) % 4, torch.zeros(24, 24, dtype=torch.bool, device=DEVICE)
    if who == "negatives":
        ignore[16:] = True
    else:
        labels[16:] = torch.arange(100, 108, device=DEVICE)
        z[16:] = z[:8] + 0.1 * z[8:16]  # with negatives that are near
    config = TailConfig(k=0.5, k_min=4, gate="rho", rho0_quantile=0.5)
    check_stats(config, (z,), "labels", labels=labels, ignore=ignore)


@pytest.mark.parametrize("n", [12, 48])
def test_the_tail_of_a_small_batch_with_small_tiles(monkeypatch, n):
    """With tiles of 32 columns, as on a GPU with little shared memory, the last columns of the buffer stay unwritten.
    Here they hold zeros, which would be the smallest shortfalls."""
    monkeypatch.setattr(search, "blocks", lambda *_: {"BM": 64, "BN": 32})
    monkeypatch.setattr(torch, "empty", torch.zeros)
    check_stats(TailConfig(k=0.5, k_min=4), views(n, 16), "views", (3,))


def test_the_hardest_of_hundreds():
    z_i, z_j = views(4, 16)
    check_stats(TailConfig(k=4), (z_i, z_j, torch.randn(300, 16, device=DEVICE)), "cross", (260, 7))


@pytest.mark.parametrize(
    ("layout", "drop"), [("views", 0.05), ("views, ignore", 0.05), ("views, ignore", 0.3)]
)
def test_the_released_tail(layout, drop):
    """With ignored pairs, anchors differ in how many negatives the fit leaves out."""
    config = TailConfig(k=0.5, k_min=4, eps=0.3, beta=1.0, drop=drop, soft_cap=False, gate="rho", rho0=0.3)
    rows, name, options = batch(layout, n=10, d=24)
    check_stats(config, rows, name, **options)


def blended(engine, numbers):
    return [
        Part(
            BlendLink(engine.stats.lam.to(numbers.dtype), engine.stats.beta.to(numbers.dtype), numbers(0.3)),
            "lse",
        ),
        Part(SoftmaxLink(numbers(0.4)), "lse", "negatives", 5),
    ]


@pytest.mark.parametrize("layout", ["views", "views, ids", "cross, negatives", "clip"])
def test_weince_on_every_layout(layout):
    rows, name, options = batch(layout)
    agree(blended, rows, name, Need(TAIL, (5,)), **options)


def test_rows_wider_than_a_tile():
    agree(blended, views(10, 300), need=Need(TAIL, (5,)))


def test_bfloat16_to_the_error_of_rounding_the_inputs():
    exact = views(20, 24)
    rounded = [rows.bfloat16() for rows in exact]
    need = Need(TAIL, (5,))
    ours, our_gradients, engines = evaluate(Fused, torch.float32, rounded, "views", blended, need, {})

    def same(engine, numbers):
        engine.surveyed = type(engine.stats)(*(line.double() for line in engines[0].stats))
        return blended(engine, numbers)

    theirs, gradients, _ = evaluate(Dense, torch.float64, rounded, "views", same, need, {})
    _, free, _ = evaluate(Dense, torch.float64, exact, "views", same, need, {})
    assert float((ours - theirs).abs().max()) < 1e-4
    for mine, own, other in zip(our_gradients[:2], gradients[:2], free[:2], strict=True):
        assert float((mine - own).norm()) <= float((own - other).norm())


def test_bfloat16_rows_of_any_length_and_stride():
    """Lengths whose squares overflow or underflow float32, and rows that are part of wider ones."""
    rows = views(12, 16, dtype=torch.bfloat16)
    scale = torch.linspace(-100, 100, 12, device=DEVICE).round().exp2().bfloat16()
    wide = [torch.cat([scale[:, None] * row, row], 1)[:, :16] for row in rows]
    turned = [row.T.contiguous().T for row in rows]
    values, *others = (
        Fused(problems("cross", *each)[0]).evaluate([Part(SoftmaxLink(0.3), "lse")])
        for each in (rows, wide, turned)
    )
    for other in others:
        torch.testing.assert_close(other, values)


@pytest.mark.parametrize("case", ["one pass", "two passes", "too few", "too many"])
def test_the_search_with_good_and_bad_thresholds(monkeypatch, case):
    """Thresholds come from a sample and are tightened later; if too few or too many survive, the search is exact."""
    plans = {
        "one pass": shapes.TailPlan(26, 0, 0, 64),
        "two passes": shapes.TailPlan(30, 2, 22, 128),
        "too few": shapes.TailPlan(1, 0, 0, 64),
        "too many": shapes.TailPlan(32, 0, 0, 64),
    }
    monkeypatch.setattr(search, "ALL_KEPT", 16)
    monkeypatch.setattr(shapes, "SAMPLE", 32)
    monkeypatch.setattr(search, "plan", lambda count, k: plans[case])
    check_stats(TAIL, views(40 if case == "two passes" else 33, 24, noise=1.0), hardest=(10, 32))


def test_ties_at_the_last_place_of_an_exact_search(monkeypatch):
    """Many first candidates tie for it, and the harder ones come last: ties must not take their places, nor, since
    they are more than the buffer holds, those of the next anchor. The ties are opposite to the first anchor: a
    shortfall of 2, the largest."""
    monkeypatch.setattr(search, "ALL_KEPT", 16)
    monkeypatch.setattr(shapes, "SAMPLE", 32)
    monkeypatch.setattr(search, "plan", lambda count, k: shapes.TailPlan(1, 0, 0, 32))  # too few survive
    z_i, z_j = views(8, 16, clusters=1, noise=1.0)
    ties = -z_i[:1].expand(40, -1)
    harder = z_j + 0.1 * torch.randn_like(z_j)
    check_stats(TAIL, (z_i, -z_j, torch.cat([ties, harder])), "cross", hardest=(3, 7))


@triton.jit
def cut_kernel(bits_ptr, out, k, slack, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row, at = tl.arange(0, ROWS), tl.arange(0, SIZE)
    bits = tl.load(bits_ptr + row[:, None] * SIZE + at[None, :])
    tl.store(out + row, hardest.cut(bits, tl.full((ROWS,), 1, tl.int32) * k, slack))


@pytest.mark.parametrize(("k", "slack"), [(1, 0), (9, 0), (9, 3), (63, 0), (70, 1)])
def test_a_cut_has_enough_numbers_below_it_and_few_more(k, slack):
    """Distinct numbers, ties, all equal, zeros, one outlier (slow by interpolation alone), few or none finite."""
    infinite = hardest.INFINITE.value
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 1 << 30, (8, 64), generator=generator)
    bits[1] %= 7
    bits[2] = 5
    bits[3, :20] = 0
    bits[4] = torch.arange(64)
    bits[4, -1] = 1 << 30
    bits[5, 4:], bits[6, :], bits[7, ::2] = infinite, infinite, infinite
    out = torch.empty(8, dtype=torch.int32, device=DEVICE)
    cut_kernel[(1,)](bits.int().to(DEVICE), out, k, slack, ROWS=8, SIZE=64)
    for row, found in zip(bits, out.cpu(), strict=True):
        finite = row[row < infinite]
        if len(finite) < max(k, 1):
            assert found == (finite.max() if len(finite) else infinite)
            continue
        number = int((row <= found).sum())
        assert k <= number <= k + slack or (number > k and int((row < found).sum()) < k)


class Sampled:
    """Searches 40 anchors and 150 candidates as in a large batch: in chunks of 32 anchors, by this plan, with tiles
    of this many columns, ``span`` of them per program. It replaces the launcher, and stores what the
    exact search got."""

    def __init__(self, monkeypatch, plan, columns, span):
        self.plan, self.chunks, self.launch = plan, [], search.launch
        monkeypatch.setattr(search, "launch", self)
        monkeypatch.setattr(search, "ALL_KEPT", 16)
        monkeypatch.setattr(search, "BUFFER", 0)
        monkeypatch.setattr(search, "PAD", 32)
        monkeypatch.setattr(shapes, "SAMPLE", 32)
        monkeypatch.setattr(search, "plan", lambda count, k: plan)
        monkeypatch.setattr(search, "blocks", lambda *_: {"BM": 32, "BN": columns})
        monkeypatch.setattr(search, "splits", lambda programs, tiles: (shapes.parts_of(tiles, span), span))

    def __call__(self, kernel, grid, arguments, constants):
        if kernel is hardest.survivors_kernel:
            self.threshold = arguments[8]
        if kernel is hardest.exact_kernel:
            self.chunks.append([one.clone() for one in (self.threshold, *arguments[8:12])])
        self.launch(kernel, grid, arguments, constants)

    def check(self, problem):
        """All survivors are negatives up to the threshold, and each is there once. Returns for each anchor how many
        are at or below the threshold, how many survived, and the number of negatives."""
        exact = problem.leave_out(
            shortfalls(problem.anchors.double(), problem.candidates.double()), problem.negatives, torch.inf
        )
        *state, keys = (torch.cat(lines) for lines in zip(*self.chunks, strict=True))
        threshold, kept, loose, seen = (one[:40] for one in state)
        limit, width = threshold.view(torch.float32)[:, None], self.plan.width
        whole = kept <= width  # the others lost some
        there = torch.arange(width, device=DEVICE) < kept[:, None]
        own = keys.view(-1, width)[:40].where(there, 0)
        value, column = (own >> 32).int().view(torch.float32), own & 0x7FFFFFFF
        assert torch.equal(loose[whole], ((value > limit) & there).sum(1).int()[whole])
        times = torch.zeros(exact.shape, dtype=torch.int32, device=DEVICE).scatter_add_(
            1, column, there.int()
        )
        assert int(times.max()) == 1
        assert int(times[(exact < limit - 2**-20) & whole[:, None]].min()) == 1
        assert float((value - exact.gather(1, column))[there].abs().max()) < 2**-20
        return kept - loose, kept, seen


def noise(seed):
    """Rows of 40 anchors and 150 candidates, the same on every device. Products of bfloat16 are exact."""
    rows = torch.randn(190, 16, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)
    return rows[:40], rows[40:80], rows[80:]


def opposite():
    """Rows with shortfalls above 1, 40 of them in ties."""
    z_i, z_j, negatives = noise(0)
    negatives[60:100] = negatives[60]
    return z_i - 1, z_j + 1, negatives + 1


@pytest.mark.parametrize(
    ("ids", "plan", "columns", "span"),
    [
        (False, shapes.TailPlan(14, 0, 0, 128), 64, 1),
        (True, shapes.TailPlan(16, 3, 16, 128), 32, 9),
        (True, shapes.TailPlan(16, 3, 16, 128), 32, 1),
    ],
    ids=["one phase, shared", "two phases", "two phases, shared"],
)
def test_survivors(monkeypatch, ids, plan, columns, span):
    """In two chunks of anchors, by one or several programs, with ties at the threshold and a last tile that is not
    full. There are enough of them, so that the exact search cannot hide an error."""
    sampled = Sampled(monkeypatch, plan, columns, span)
    options = {"ids": torch.arange(150, device=DEVICE) % 50} if ids else {}
    engine = check_stats(TailConfig(k=9), opposite(), "cross", (7, 10), **options)
    enough, kept, seen = sampled.check(engine.problem)
    assert len(sampled.chunks) == 2
    assert int(enough.min()) >= 11
    assert int(kept.max()) <= 128
    if ids:
        assert torch.equal(seen.long(), Dense(engine.problem).negatives())
        assert torch.equal(engine.negatives(), seen.long())


def test_flags_of_later_chunks(monkeypatch):
    """One anchor, in the third chunk, has a negative near the cap; its flag is the second."""
    Sampled(monkeypatch, shapes.TailPlan(16, 0, 0, 128), 64, 9)
    z_i, z_j = torch.randn(2, 70, 16, device=DEVICE)
    z_j[2] = beside(z_i[66], 1e-4)
    _, _, flags = Fused(problems("cross", z_i, z_j)[0], Need(TailConfig(k=9))).near
    assert flags.tolist() == [0, 1, 0]


def test_the_exact_search_of_some_anchors(monkeypatch):
    """Some anchors have enough survivors; others in the same tile have too few, too many, or few negatives at all."""
    sampled = Sampled(monkeypatch, shapes.TailPlan(4, 0, 0, 32), 64, 9)
    ignore = torch.zeros(40, 150, dtype=torch.bool, device=DEVICE)
    ignore[33:35, 6:] = ignore[36, 1:] = True
    engine = check_stats(TailConfig(k=9, gate="aic"), noise(5), "cross", (7, 10), ignore=ignore)
    enough, kept, seen = sampled.check(engine.problem)
    assert 0 < int((enough < seen.clamp(max=11)).sum()) < 10
    assert 0 < int((kept > 32).sum()) < 10


def test_the_exact_search_after_a_threshold_that_is_lowered_too_far(monkeypatch):
    """The second phase drops negatives that are harder than survivors of the first. Most shortfalls exceed 1."""
    sampled = Sampled(monkeypatch, shapes.TailPlan(16, 3, 4, 128), 32, 9)
    engine = check_stats(TailConfig(k=9), opposite(), "cross", (7, 10))
    enough, kept, _ = sampled.check(engine.problem)
    assert int(((enough < 11) & (kept >= 11)).sum()) > 0


def test_the_sample_has_one_candidate_per_stratum(monkeypatch):
    """150 candidates lie on an arc in order, 32 anchors at its end, where they ignore half of the arc, and 8 anchors
    at its beginning. Each threshold separates the 5th of the anchor's strata from the 6th."""
    sampled = Sampled(monkeypatch, shapes.TailPlan(5, 0, 0, 128), 64, 9)
    angle = torch.linspace(0, 1.5, 150, device=DEVICE)
    arc = torch.stack([angle.cos(), angle.sin()], 1)
    anchors = torch.cat([arc[-1:].expand(32, 2), arc[:1].expand(8, 2)])
    ignore = torch.zeros(40, 150, dtype=torch.bool, device=DEVICE)
    ignore[:32, 75:] = True
    check_stats(TailConfig(k=9), (anchors, arc[:40], arc[40:]), "cross", ignore=ignore)
    thresholds = [1 - float(chunk[0][0].view(torch.float32)) for chunk in sampled.chunks]
    ends = [149 * (1.5 - math.acos(thresholds[0])) / 1.5, 149 * math.acos(thresholds[1]) / 1.5]
    assert 150 * 10 / 32 - 1 <= ends[0] <= 150 * 12 / 32
    assert 150 * 4 / 32 - 1 <= ends[1] <= 150 * 6 / 32


def test_the_fit_is_float64s_on_the_same_shortfalls():
    """Products of bfloat16 are exact, so the shortfalls equal those of float64, and the fit must agree too."""
    rows = views(40, 16, dtype=torch.bfloat16)
    ours, theirs, _ = survey(TAIL, rows, "cross")
    for mine, exact in zip(ours.stats, theirs.stats, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


def test_ties_and_duplicates():
    """More rows tie at the K-th shortfall than the buffer holds; all ties must enter the sum."""
    z_i, z_j = views(24, 16)
    z_i[4:] = z_i[:4].repeat(5, 1)
    z_j[4:] = z_j[:4].repeat(5, 1)
    (engine,) = agree(
        lambda engine, numbers: [Part(SoftmaxLink(numbers(0.4)), "lse", "negatives", 7)], (z_i, z_j), "views",
        Need(TAIL, (7,)),
    )  # fmt: skip
    torch.testing.assert_close(
        engine.stats.rho, torch.full_like(engine.stats.rho, TAIL.eps), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("number", [1, 3, 5])
def test_copies_of_an_anchors_hardest_negative(number, close):
    """All copies take part. The search makes the shortfalls of four of them exact; a pass does not, unless another
    anchor has a negative near the cap."""
    (z_i, z_j), others = torch.randn(2, 40, 16, device=DEVICE), torch.randn(40, 16, device=DEVICE)
    if close:
        z_j[3] = beside(z_i[0], 1e-4)
    found = []
    for dtype in (torch.float32, torch.float64):
        left, right = (rows.to(dtype).requires_grad_() for rows in (z_i, z_i + 0.3 * others))
        if dtype == torch.float32:
            (problem,) = problems("cross", left, z_j, negatives=right.repeat(number + 1, 1))
            (value,) = Fused(problem).evaluate([Part(SoftmaxLink(0.3), "lse", "negatives", number)])
        else:
            value = torch.cosine_similarity(left, right) / 0.3 + math.log(number + 1)
        found.append([value[1:], *torch.autograd.grad(value[1:].sum(), [left, right])])
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


def test_copies_of_the_hardest_negative_and_a_link_that_the_kernels_lack():
    """The chunked engine sums them, and its shortfalls are rounded in another way than those of the kernels."""
    z_i, z_j, others = torch.randn(3, 64, 128, device=DEVICE)
    link = FunctionLink(lambda s: 3 * torch.special.i0(s))
    assert translate.code_of(link) is None
    (problem,) = problems("cross", z_i, z_j, negatives=(z_i + 0.3 * others).repeat(21, 1))
    (value,) = Fused(problem).evaluate([Part(link, "lse", "negatives", 20)])
    taken = (value - link.function(torch.cosine_similarity(z_i, z_i + 0.3 * others))).exp()
    assert float(taken.min()) > 19.9, "copies that take part, at least 20 of 21"


def check_nearest(engine, exact):
    """Compare the nearest negatives that an engine found with ``exact`` shortfalls, infinite for other pairs."""
    columns, values, _ = engine.near
    wanted = exact.sort(1).values[:, :4]
    torch.testing.assert_close(values.sort(1).values.double(), wanted, rtol=1e-5, atol=0)
    found = exact.gather(1, columns.clamp_min(0).long()).where(columns >= 0, torch.inf)
    torch.testing.assert_close(found, values.double(), rtol=1e-5, atol=0)
    for row in columns.tolist():
        real = [column for column in row if column >= 0]
        assert len(set(real)) == len(real)


def test_nearest_negatives_of_every_anchor():
    """Columns and exact shortfalls, also if the last program of the fit has rows to spare, and -1 and infinity after
    them if an anchor has fewer than four negatives."""
    z_i, z_j = views(35, 16, noise=1.0)
    ignore = torch.zeros(35, 35, dtype=torch.bool, device=DEVICE)
    ignore[4, 2:] = ignore[34, 1:] = True
    (problem,) = problems("cross", z_i, z_j, ignore=ignore)
    exact = problem.leave_out(
        shortfalls(problem.anchors.double(), problem.candidates.double()), problem.negatives, torch.inf
    )
    check_nearest(Fused(problem, Need(TailConfig(k=4))), exact)


def test_nearest_negatives_that_tie():
    """The kernel reads 64 candidates at a time: of the first anchor three tie in either half, of the second two."""
    z_i, z_j = views(4, 16, noise=1.0, dtype=torch.bfloat16)  # exact products, so that equal rows tie
    others = torch.randn(96, 16, device=DEVICE).bfloat16()
    others[[10, 20, 30, 70, 80, 90]] = z_i[0] + 0.2 * others[0]
    others[[12, 22, 72, 82]] = z_i[1] + 0.2 * others[0]
    (problem,) = problems("cross", z_i, z_j, negatives=others)
    exact = problem.leave_out(
        shortfalls(problem.anchors.double(), problem.candidates.double()), problem.negatives, torch.inf
    )
    check_nearest(Fused(problem, Need(TailConfig(k=4))), exact)


@pytest.mark.parametrize("known", ["tail", "no tail", "labels"])
@pytest.mark.parametrize("shortfall", [1e-2, 6e-4, 1e-5])
def test_near_the_cap(shortfall, known):
    """Shortfalls of near negatives and of near positives by label are exact, with or without a tail."""
    z_i, z_j = views(14, 32, noise=1.0)
    step = torch.nn.functional.normalize(torch.randn(32, device=DEVICE), dim=0)
    z_j[0] = torch.nn.functional.normalize(z_i[1], dim=0) + (2 * shortfall) ** 0.5 * step
    for row in (5, 7, 9):  # four in all
        z_j[row] = beside(z_i[1], shortfall)
    options = {}
    if known == "labels":
        options["labels"] = torch.arange(14, device=DEVICE) // 2
    parts = [Part(ShortfallLink(2.0), "lse")]
    parts += [Part(ShortfallLink(2.0), "sum", "positives")] if options else []
    need = Need(TAIL) if known == "tail" else Need()
    # The product for the gradient has 16 bits; its part along the sphere is only sqrt(2 * shortfall) of it.
    gradient = max(1e-3, 2**-16 / (2 * shortfall) ** 0.5)
    engines = agree(
        lambda engine, numbers: parts, (z_i, z_j), "labels" if options else "views", need, value=1e-4,
        gradient=gradient, **options,
    )  # fmt: skip
    assert (float(engines[0].near[1].min()) < 2 * shortfall) or shortfall > launch.CLOSE


def test_a_negative_at_the_cap():
    """Equal rows: their shortfall is below the smallest that the links tell apart."""
    z_i, z_j = views(9, 16)
    z_j[0] = z_i[1]
    agree(
        lambda engine, numbers: [Part(BlendLink(0.4, 2.0, 0.3), "lse"), Part(ShortfallLink(2.0), "lse")],
        (z_i, z_j),
    )


def test_negatives_opposite_to_their_anchors():
    """Their scores are closer to -1 than the links tell apart, or below -1 by rounding: the slope there is 0."""
    z_i, _ = views(9, 16)
    z_j = -z_i.roll(1, 0)
    z_j[0] = beside(-z_i[1], 2e-5)
    links = PowerLink(2.0, eps=1e-4), AtanhLink(1e-4)
    agree(lambda engine, numbers: [Part(link, kind) for link in links for kind in ("lse", "sum")], (z_i, z_j))


def test_an_anchor_whose_nearest_negative_is_opposite():
    """A log-sum-exp is relative to the logit of the nearest negative, here that of the lowest score."""
    z_i, _ = views(9, 16)
    z_i[0] = torch.eye(16, device=DEVICE)[0]  # a score of exactly -1
    z_j = -z_i[:1].expand(9, 16)
    parts = [Part(PowerLink(2.0, eps=1e-4), "lse"), Part(AtanhLink(1e-4), "lse")]
    agree(lambda engine, numbers: parts, (z_i, z_j), "cross", Need(TailConfig(k=4)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: overflow where a pair takes no part
def test_far_negatives_of_anchors_with_near_positives():
    """A log-sum-exp is relative to the logit of the nearest negative. Relative to that of a positive by label, whose
    exact shortfall is known too, all exponentials would underflow."""
    labels = torch.arange(8, device=DEVICE).repeat(3)
    rows = torch.stack([beside(row, 1e-4) for row in torch.eye(8, 16, device=DEVICE)[labels]])
    parts = [Part(SoftmaxLink(0.005), "lse"), Part(ShortfallLink(2.0), "sum", "positives")]
    agree(
        lambda engine, numbers: parts, (rows,), "labels", Need(TailConfig(k=4)), value=1e-4,
        gradient=2**-16 / (2e-4) ** 0.5, labels=labels,
    )  # fmt: skip


def beside(row, shortfall):
    """A unit row at about this shortfall from a row."""
    step = torch.nn.functional.normalize(torch.randn_like(row), dim=0)
    return torch.nn.functional.normalize(row, dim=0) + (2 * shortfall) ** 0.5 * step


def steep(engine, numbers):
    """A sum that needs exact shortfalls near the cap, and nothing else of a search."""
    return [Part(ShortfallLink(numbers(2.0)), "lse")]


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("views, ignore, same", several),
        ("cross, negatives", several),
        ("cross, negatives", steep),
        ("labels, ids", several),
    ],
)
def test_sums_and_gradients_in_pieces(monkeypatch, layout, parts):
    """As in a large batch: sums and gradients of several spans of columns, and tiles of 32 columns and 128 rows,
    which have two flags. In "cross", only one anchor has a negative near the cap, and its flag is the second."""
    monkeypatch.setattr(launch, "SPAN", 64)
    monkeypatch.setattr(launch, "splits", lambda programs, tiles: (shapes.parts_of(tiles, 2), 2))
    monkeypatch.setattr(launch, "blocks", lambda *_: {"BM": 128, "BN": 32})
    rows, name, options = batch(layout, n=135 if "cross" in layout else 70, d=16)
    if name == "cross":
        rows[0][100] = beside(rows[1][5], 1e-4)
    else:
        rows[1][30] = beside(rows[0][5], 1e-4)
        rows[1][31] = beside(rows[0][7], 1e-4)  # has its label
    # Tolerances as in test_near_the_cap.
    agree(parts, rows, name, value=1e-4, gradient=2**-16 / (2e-4) ** 0.5, **options)


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("layout", ["cross", "labels"])
def test_the_flags_of_each_tile(monkeypatch, layout, block):
    """Tiles share a flag, or have two. The last anchor has a negative near the cap. With labels, positives by
    label need exact shortfalls too, but none is near."""
    monkeypatch.setattr(launch, "blocks", lambda *_: {"BM": block, "BN": 64})
    rows, options = torch.randn(2, 135, 16, device=DEVICE), {}
    rows[0, 134] = beside(rows[1, 5], 1e-4)
    if layout == "labels":
        rows = rows.flatten(0, 1)[[*range(130), 140, 134]].unsqueeze(0)
        options["labels"] = torch.arange(132, device=DEVICE) % 60
    parts = [Part(ShortfallLink(2.0), "lse")]
    parts += [Part(ShortfallLink(2.0), "sum", "positives")] if options else []
    need = Need(TailConfig(k=4)) if options else Need()
    agree(
        lambda engine, numbers: parts,
        rows,
        layout,
        need,
        value=1e-4,
        gradient=2**-16 / (2e-4) ** 0.5,
        **options,
    )


# The engine as a whole


def test_the_losses_are_those_of_the_loops():
    z_i, z_j = views(9, 12)
    for loss, wanted in (
        (InfoNCELoss(0.5), lambda z: reference.with_link(z, z, reference.roles_views(9), lambda s: s / 0.5)),
        (WeinceLoss.paper(), lambda z: reference.weince(z, z, reference.roles_views(9))[0]),
    ):
        rows = torch.cat([z_i, z_j]).double().cpu().requires_grad_()
        exact = wanted(rows)
        (gradient,) = torch.autograd.grad(exact, rows)
        leaves = [z.clone().requires_grad_() for z in (z_i, z_j)]
        (problem,) = problems("views", *leaves)
        ours = loss._losses(Fused(problem, Need(loss.tail))).losses.mean()
        mine = torch.cat(torch.autograd.grad(ours, leaves)).double().cpu()
        assert abs(float(ours.detach()) - float(exact.detach())) < 1e-5
        assert float((mine - gradient).norm()) <= 1e-4 * float(gradient.norm())


def test_anchors_that_are_some_of_the_candidates(tmp_path):
    """As with several ranks, where the anchors of one rank meet the candidates of all ranks."""
    z_i, z_j = views(12, 16)
    (problem,) = problems("views", z_i, z_j)
    some = replace(problem.rows(5, 19), symmetric=False)
    ours, exact = (
        torch.stack(engine(some, Need(TAIL)).evaluate(several(engine(some), Numbers(torch.float32))))
        for engine in (Fused, Dense)
    )
    torch.testing.assert_close(ours, exact, rtol=2e-5, atol=2e-5)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        spread = Fused(share(problem, ""), Need(TAIL))
    finally:
        dist.destroy_process_group()
    for mine, exact in zip(spread.stats, Fused(problem, Need(TAIL)).stats, strict=True):
        torch.testing.assert_close(mine, exact)


def test_the_gradient_of_anchors_that_are_some_of_the_candidates():
    """The views of the anchors are not those of the first candidates."""
    found = []
    for engine, dtype in ((Fused, torch.float32), (Dense, torch.float64)):
        leaves = [rows.to(dtype).requires_grad_() for rows in views(12, 16)]
        (problem,) = problems(Layout("views", views=True), *leaves)
        some = replace(problem.rows(8, 16), symmetric=False)
        (value,) = engine(some).evaluate([Part(SoftmaxLink(0.3), "lse", "same view")])
        found.append([value, *torch.autograd.grad(value.sum(), leaves)])
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("begin", [17, 31])
def test_an_anchor_in_the_first_or_last_column_of_a_tile(monkeypatch, begin):
    """That tile holds neither another anchor nor a positive of these 16."""
    monkeypatch.setattr(launch, "blocks", lambda *_: {"BM": 16, "BN": 32})
    (problem,) = problems("views", *views(60, 16))
    some = replace(problem.rows(begin, begin + 16), symmetric=False)
    ours, exact = (engine(some).evaluate([Part(SoftmaxLink(0.3), "lse")])[0] for engine in (Fused, Dense))
    torch.testing.assert_close(ours, exact, rtol=2e-5, atol=2e-5)


def test_what_it_does_not_serve():
    (problem,) = problems("views", *views(8, 4))
    where = why_not(problem, Need())
    assert where is None if DEVICE == "cuda" else "CUDA" in where
    on_gpu = replace(problem, anchors=problem.anchors.to("meta"))  # neither CPU nor CUDA; nothing is computed
    assert why_not(on_gpu, Need()) is not None


LIMITS = [99 << 10, 163 << 10, 227 << 10]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("use", ["tail", "sum", "gradient"])
def test_tiles_fit_the_shared_memory_of_the_device(limit, use):
    for rows in (100, 8192, 40000):
        for d, parts in ((16, 1), (64, 2), (128, 1), (128, 2), (256, 1), (256, 2), (1000, 2)):
            shape = shapes.operand_shape(d, parts)
            room = shape["DB"] * shape["PARTS"]
            tuned = shapes.tuned_tile(rows, shape, use)
            in_pieces = shape["DP"] > shape["DB"]
            tile = tuned.within(room, limit, in_pieces)
            assert tile.takes(room, in_pieces) <= limit
            assert tile.rows >= 16
            assert tile.columns in (32, 64)
            if limit == LIMITS[-1]:
                assert tile == tuned


def test_compiled_for_a_small_gpu():
    """Compile without a GPU: no kernel of a batch needs more shared memory than an RTX 4090 has."""
    program = Path(__file__).with_name("offline.py")
    command = [sys.executable, program, "89", str(LIMITS[0]), "8192x256", "--plain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@gpu
@needs_gpu
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forced_limits(monkeypatch, limit, dtype):
    """Pretend that the GPU has less shared memory: no compiled kernel of a batch needs more than the limit."""
    taken = []

    def direct(kernel, grid, arguments, constants):
        taken.append((kernel[grid](*arguments, **constants).metadata.shared, kernel.__name__))

    monkeypatch.setattr(shapes, "SHARED", limit)
    for module in (launch, search):
        monkeypatch.setattr(module, "launch", direct)
    exact = dtype == torch.float32
    for n, d in ((700, 256), (3000, 256), (3000, 300)):
        rows = views(n, d, clusters=40, dtype=dtype)
        agree(
            blended,
            rows,
            need=Need(TAIL, (5,)),
            value=5e-5 if exact else 1e-4,
            gradient=1e-4 if exact else 4e-3,
        )
    assert max(taken)[0] <= limit, max(taken)


@pytest.mark.parametrize("count", [1025, 5000, 12288, 12289, 65536, 1 << 20])
def test_plans_leave_room(count):
    """By five standard deviations, the sampled threshold keeps at least K; the expected survivors fit the buffer."""
    k = TAIL.tail_size(count - 2)
    plan = shapes.plan(count, k)
    share = shapes.SAMPLE / count
    assert plan.wanted >= share * k + 5 * (share * k * (1 - k / count)) ** 0.5
    first = plan.wanted / share / (plan.every or 1)
    last = plan.again * (plan.every - 1) if plan.every else 0
    assert k < first + last < plan.width <= count
    assert plan.width * 8 * launch.PAD < 1 << 28


def loss_of(z_i, z_j):
    """One number from a blend that uses the tail statistics and a sum over the hardest negatives."""
    (problem,) = problems("views", z_i, z_j)
    engine = Fused(problem, Need(TAIL, (5,)))
    blend = BlendLink(engine.stats.lam, engine.stats.beta, 0.5)
    values = engine.evaluate([Part(blend, "lse"), Part(SoftmaxLink(0.3), "lse", "negatives", 5)])
    return torch.stack(values).mean()


def test_traced_whole(fresh_compiler):
    """The kernels are operators of a compiled graph, in the forward and the backward pass, and stay so when a second
    batch with other numbers of rows and columns makes the compiler trace both as symbols."""
    traced = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for n, d in [(8, 16), (9, 24)]:
        z_i, z_j = (rows.requires_grad_() for rows in views(n, d))
        wanted = torch.autograd.grad(loss_of(z_i, z_j), [z_i, z_j])
        for ours, theirs in zip(torch.autograd.grad(traced(z_i, z_j), [z_i, z_j]), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_in_a_transform():
    z_i, z_j = views(6, 8)
    wanted = torch.autograd.grad(loss_of(z_i.requires_grad_(), z_j), z_i)[0]
    torch.testing.assert_close(torch.func.grad(loss_of)(z_i.detach(), z_j), wanted, rtol=1e-5, atol=1e-7)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "d"), [(300, 64), (2048, 128), (4096, 256), (8500, 300), (16384, 128)])
def test_large_batches(n, d, dtype):
    rows, exact = views(n, d, clusters=40, dtype=dtype), dtype == torch.float32
    agree(
        blended, rows, need=Need(TAIL, (5,)), value=3e-5 if exact else 1e-4, gradient=1e-4 if exact else 4e-3
    )


@gpu
@needs_gpu
@pytest.mark.parametrize("d", [20, 300])
@pytest.mark.parametrize("layout", ["cross", "clip"])
def test_large_cross_batches(layout, d):
    ids = torch.arange(3000, device=DEVICE) % 2900
    rows = views(3000, d, clusters=40)
    # Tolerance as in test_near_the_cap: rows of few dimensions lie close together, where the logit is steep.
    nearest = min(float(engine.stats.rho.min()) for engine in survey_of(rows, layout, ids))
    gradient = max(1e-4, 2**-16 / (2 * nearest) ** 0.5)
    agree(blended, rows, layout, Need(TAIL, (5,)), value=3e-5, gradient=gradient, ids=ids)


def survey_of(rows, layout, ids):
    return [Fused(problem, Need(TAIL)) for problem in problems(layout, **named(rows), ids=ids)]


@gpu
@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_batches_of_every_layout(layout):
    rows, name, options = batch(layout, n=1500, d=64)
    agree(several, rows, name, value=5e-5, **options)


@gpu
@needs_gpu
def test_large_statistics():
    check_stats(TAIL, views(3000, 64, clusters=40), hardest=(50,))


@gpu
@needs_gpu
def test_large_duplicates():
    z_i, z_j = views(3000, 64, clusters=40)
    z_i[1000:2000] = z_i[:1000]
    z_i[2000:] = z_i[0]
    ours, theirs, _ = survey(TAIL, (z_i, z_j))
    torch.testing.assert_close(ours.stats.rho.double(), theirs.stats.rho, rtol=1e-4, atol=1e-9)
    (value,) = ours.evaluate([Part(BlendLink(ours.stats.lam, ours.stats.beta), "lse")])
    assert value.isfinite().all()


@gpu
@needs_gpu
def test_compiled_whole_and_in_a_graph():
    z_i, z_j = (rows.requires_grad_() for rows in views(256, 64))
    wanted = torch.autograd.grad(loss_of(z_i, z_j), [z_i, z_j])
    compiled = torch.compile(loss_of, fullgraph=True)
    for ours, theirs in zip(torch.autograd.grad(compiled(z_i, z_j), [z_i, z_j]), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = torch.autograd.grad(loss_of(z_i, z_j), [z_i, z_j])
    graph.replay()
    for ours, theirs in zip(recorded, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@gpu
@needs_gpu
def test_no_wait_for_the_device():
    z_i, z_j = (rows.requires_grad_() for rows in views(2048, 64))
    loss_of(z_i, z_j).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_of(z_i, z_j).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@triton.jit
def logarithms(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, log64(tl.load(x + at)))


def test_the_logarithm_of_the_fit_is_float64s():
    x = torch.logspace(-9, 1, 4096, device=DEVICE)
    y = torch.empty(4096, dtype=torch.float64, device=DEVICE)
    logarithms[(1,)](x, y, SIZE=4096)
    torch.testing.assert_close(y, x.double().log(), rtol=0, atol=1e-14)


@triton.jit
def lines_kernel(
    values, sizes, drops, table, out, k, drop, eps, ROWS: tl.constexpr, KP: tl.constexpr, VARIES: tl.constexpr
):
    row = tl.arange(0, ROWS)
    place = tl.zeros((ROWS, 1), tl.int32) + tl.arange(0, KP)[None, :]
    rank = place % 32 * (KP // 32) + place // 32
    size, dropped = tl.full((ROWS,), 1, tl.int32) * k, tl.full((ROWS,), 1, tl.int32) * drop
    if VARIES:
        size, dropped = tl.load(sizes + row), tl.load(drops + row)
    found = tl.load(values + row[:, None] * KP + rank)
    rho = tl.load(values + row * KP)
    fits, slope, difference = lines(found, rank, place, rho, size, dropped, table, eps, KP, VARIES)
    tl.store(out + row, fits.to(tl.float32))
    tl.store(out + ROWS + row, slope)
    tl.store(out + 2 * ROWS + row, difference)


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_two_lines_through_any_tail(drop, varies):
    """Any shortfalls, some below eps, equal ones, nearly equal ones, those on either line, and few of them."""
    share = torch.arange(1, 65, dtype=torch.float64) / 65
    values = torch.rand(8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).sort(1).values
    values[1, :10] = 0
    values[2] = 0.3
    values[3] = 0.3 + 1e-5 * share
    values[4] = 0.5 * share
    values[5] = 0.02 / -share.log()
    sizes = torch.full((8,), 64)
    if varies:
        sizes[4:] = torch.tensor([4, 3, 2, 0])
        values[4:].masked_fill_(torch.arange(64) >= sizes[4:, None], torch.inf)
    config = TailConfig(drop=drop)
    dropped = (sizes * drop).floor().clamp_min(1 if drop else 0).int()
    values, out, first = values.float().to(DEVICE), torch.empty(3, 8, device=DEVICE), int(dropped[0])
    table = search.fit_table(64, first, 64, torch.device(DEVICE))
    lines_kernel[(1,)](values, sizes.int().to(DEVICE), dropped.to(DEVICE), table, out, 64, first, config.eps,
                       ROWS=8, KP=64, VARIES=varies)  # fmt: skip
    wanted = fit_tail(values.double(), sizes.to(DEVICE), config)
    exact = torch.stack([wanted.made.double(), wanted.beta, wanted.daic])
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate", ["both", "rho", "aic"])
@pytest.mark.parametrize("given", [False, True])
def test_the_gate_of_many_anchors(gate, given):
    """More than the gate's kernel does at once if the pivot is given."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rho, daic, made = torch.rand(3, 1030, generator=generator, device=DEVICE)
    rho, daic, made = rho + 0.01, 9 * daic - 4, made < 0.8
    config = TailConfig(gate=gate, rho0=0.3 if given else None, kappa_rho=7.0, kappa_aic=0.6, margin=1.5)
    pivot = torch.full((1,), 0.3, device=DEVICE) if given else None
    lam = search.gated(rho, daic, made.int(), pivot, config)
    wanted = gated(rho.double(), TailFit(daic, daic.double(), daic, daic, made), config).lam
    torch.testing.assert_close(lam.double(), wanted, rtol=1e-5, atol=1e-7)


def test_a_pass_that_nobody_needs_stops():
    """Its sums are empty; otherwise they are what they are without the condition."""
    (problem,) = problems("views", *views(20, 16))
    link = MomentLink(torch.linspace(1, 8, 40, device=DEVICE), 1)
    batch_ = Fused(problem)
    (wanted,) = batch_.log_sums_exp([link])
    for condition in (False, True):
        (value,) = batch_.log_sums_exp([link], torch.tensor(condition, device=DEVICE))
        torch.testing.assert_close(
            value, torch.full_like(wanted, -torch.inf) if condition else wanted, rtol=0, atol=0
        )


def test_the_scales_of_the_kl_ball_without_a_look(monkeypatch):
    """As on a GPU, where the search cannot see that it is done: its later passes stop, and the scales stay."""
    monkeypatch.setattr("weince.losses.kl_ball.free_to_look", lambda values: False)
    asked = []
    monkeypatch.setattr(launch, "summed", lambda matrix, *rest, real=launch.summed: (
        asked.append(bool(matrix.of_anchor["unless"])) or real(matrix, *rest)))  # fmt: skip
    (problem,) = problems("views", *views(24, 16, noise=1.0))
    scales = scales_at(Fused(problem), 0.8, 20.0)
    (exact,) = problems("views", *(z.double() for z in views(24, 16, noise=1.0)))
    torch.testing.assert_close(scales.double(), scales_at(Dense(exact), 0.8, 20.0), rtol=1e-4, atol=0)
    assert len(asked) == 8
    assert asked == sorted(asked)
    assert 2 <= asked.index(True) <= 6
