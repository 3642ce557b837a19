"""The chunked engine agrees with the dense one in float64, and never allocates the whole matrix."""

import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import reference
import torch
from cases import CASES, LAYOUTS, fixed, layout, learned
from engines.test_dense import CONFIGS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Largest, batch_slope, twins
from started import Chunked, Dense
from test_properties import batches, smooth_batches

from weince import ContrastiveLoss, InfoNCELoss, LogSumExp, SoftmaxLink, TailConfig, WeibitLoss, WeinceLoss
from weince.engines import chunked as module
from weince.engines import survey
from weince.layouts import problems
from weince.links import FunctionLink
from weince.losses.weince import RELEASED_TAIL, RunningSlope
from weince.scores import unit_rows
from weince.sums import Need, Part

LOSSES = {
    **{name: lambda c=case, **o: c.make(fixed, **o) for name, case in CASES.items() if not case.views_only},
    **{name: lambda c=config, **o: WeinceLoss.paper(0.3, tail=c, **o) for name, config in CONFIGS.items()},
}


@pytest.fixture(autouse=True)
def small_bands(monkeypatch):
    """Make bands and blocks so small that test batches need several of each, the last one smaller."""
    monkeypatch.setattr(module, "CPU_BAND", 160)
    monkeypatch.setattr(module, "BLOCK", 50)


@contextmanager
def bands_of(scores, blocks):
    """Temporarily use bands of this many scores, each split into this many blocks."""
    before = module.CPU_BAND, module.BLOCK
    module.CPU_BAND, module.BLOCK = scores, max(1, scores // blocks)
    try:
        yield
    finally:
        module.CPU_BAND, module.BLOCK = before


def leaves_of(arguments):
    return [value for key, value in arguments.items() if key in ("z_i", "z_j", "negatives")]


def run(loss, arguments, weights=None):
    """Loss, gradients and statistics."""
    output = loss(**arguments, return_stats=True)
    total = output.loss if weights is None else (output.loss * weights(len(output.loss))).sum()
    return output.loss.detach(), torch.autograd.grad(total, leaves_of(arguments)), tuple(output.stats)


def uneven(length):
    return torch.linspace(-1, 2, length, dtype=torch.float64)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("where", LAYOUTS)
def test_equals_dense_in_float64(where, config):
    """Loss, gradients and statistics; ``test_engines.py`` compares the losses with their formulas."""
    arguments, candidates, _ = layout(where)
    wanted, got = (
        run(LOSSES[config](candidates=candidates, engine=engine), arguments)
        for engine in ("dense", "chunked")
    )
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


def as_leaves(arguments, dtype):
    return {
        key: value.detach().to(dtype).requires_grad_() if value.is_floating_point() else value
        for key, value in arguments.items()
    }


def relative(got, wanted):
    got, wanted = (torch.cat([grad.double().flatten() for grad in grads]) for grads in (got, wanted))
    return float((got - wanted).norm() / wanted.norm())


def near_the_cap():
    """Pairs in float32 with negatives at shortfalls from 1e-5 to 1e-2, and with duplicate rows."""
    generator = torch.Generator().manual_seed(5)
    z_i = unit_rows(torch.randn(60, 32, generator=generator, dtype=torch.float64))
    step = unit_rows(torch.randn(60, 32, generator=generator, dtype=torch.float64))
    z_j = z_i + 0.5 * step
    for row, shortfall in enumerate([1.05e-5, 3e-5, 1e-4, 1e-3, 1e-2]):
        z_j[row] = z_i[row + 10] + (2 * shortfall) ** 0.5 * step[row]
    z_i[40:44] = z_i[40]  # four duplicates
    z_j[50:60] = z_j[50]  # ten
    return z_i.float(), z_j.float()


@pytest.mark.parametrize(
    "config", [TailConfig(), RELEASED_TAIL, TailConfig(k=12)], ids=["paper", "released", "k=12"]
)
def test_statistics_near_the_cap_in_float32(monkeypatch, config):
    """rho agrees with float64; lam, beta and dAIC agree with a float64 fit to the engine's own shortfalls."""
    z_i, z_j = near_the_cap()
    own = []
    spied = survey.fit_tail

    def spy(tail, sizes, config):
        own.append(tail)
        return spied(tail, sizes, config)

    with monkeypatch.context() as patch:
        patch.setattr(survey, "fit_tail", spy)
        got = WeinceLoss.paper(tail=config, engine="chunked")(z_i, z_j, return_stats=True).stats
    exact = WeinceLoss.paper(tail=config, engine="dense")(z_i.double(), z_j.double(), return_stats=True).stats
    known = exact.rho >= 1e-5
    assert int((exact.rho < 1.1e-5).sum() - (~known).sum()) > 0
    torch.testing.assert_close(got.rho[known].double(), exact.rho[known], rtol=1e-4, atol=0)

    tails = torch.cat(own).double()
    assert tails.shape[0] == 120
    k, n = tails.shape[1], 118
    assert k == reference.tail_size(n, config)
    # The reference wants all negatives; values beyond the tail do not matter, so pad with 2.
    rows = [row.tolist() + [2.0] * (n - k) for row in tails]
    wanted = reference.tail_statistics(rows, [True] * 120, config)
    for field in ("lam", "beta", "daic"):
        numbers = torch.tensor([anchor[field] for anchor in wanted], dtype=torch.float64)
        torch.testing.assert_close(getattr(got, field).double(), numbers, rtol=1e-4, atol=1e-4)
    assert float(got.lam.max()) > 0.5


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shortfall", [1e-3, 1e-4, 1e-5])
def test_near_the_cap_the_gradient_too_knows_the_shortfall(shortfall, reduction):
    """The slope at a near negative is 1 / shortfall, so the backward sweep must recompute exact shortfalls too."""
    generator = torch.Generator().manual_seed(5)
    z_i = unit_rows(torch.randn(24, 64, generator=generator, dtype=torch.float64))
    step = unit_rows(torch.randn(24, 64, generator=generator, dtype=torch.float64))
    z_j = z_i + 0.5 * step
    z_j[::3] = z_i[1::3] + (2 * shortfall) ** 0.5 * step[::3]
    arguments = {"z_i": z_i.float(), "z_j": z_j.float()}
    weights = uneven if reduction == "none" else None
    options = {"beta": 1.0, "reduction": reduction}
    wanted = run(WeibitLoss(engine="dense", **options), as_leaves(arguments, torch.float64), weights)
    got = run(WeibitLoss(engine="chunked", **options), as_leaves(arguments, torch.float32), weights)
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-5, atol=1e-5)
    assert relative(got[1], wanted[1]) <= 1e-3


def test_shortfalls_below_the_eps_of_the_tail_are_exact():
    """``rho`` is at least the tail's ``eps``, so it does not tell whether a negative is near the cap. The loss has a
    term with a smaller ``eps``, whose logits are as steep as 4 / shortfall."""
    arguments = dict(zip(("z_i", "z_j"), near_the_cap(), strict=True))
    options = {"tail": TailConfig(eps=0.02), "candidates": "cross", "reduction": "none"}
    wanted = run(WeinceLoss(engine="dense", **options).eval(), as_leaves(arguments, torch.float64), uneven)
    got = run(WeinceLoss(engine="chunked", **options).eval(), as_leaves(arguments, torch.float32), uneven)
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-3, atol=1e-3)
    assert relative(got[1], wanted[1]) <= 1e-3


@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_the_slope_of_a_batch_is_fitted_to_exact_shortfalls(engine):
    wanted = batch_slope(*(z.double() for z in twins()), engine="dense")
    torch.testing.assert_close(batch_slope(*twins(), engine=engine), wanted, rtol=1e-5, atol=0)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches(), rows=st.integers(1, 30), blocks=st.integers(1, 4), name=st.sampled_from(list(LOSSES)))
def test_any_batch_in_any_bands_is_finite(batch, rows, blocks, name):
    z_i, z_j = (z.clone().requires_grad_() for z in batch)
    with bands_of(rows * 2 * len(z_i), blocks):
        loss = LOSSES[name](engine="chunked", candidates="views")(z_i, z_j)
        gradients = torch.autograd.grad(loss, [z_i, z_j])
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in gradients)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=smooth_batches(),
    rows=st.integers(1, 30),
    blocks=st.integers(1, 4),
    name=st.sampled_from(list(LOSSES)),
    candidates=st.sampled_from(["views", "cross", "clip"]),
)
def test_bands_make_no_difference(batch, rows, blocks, name, candidates):
    arguments = {"z_i": batch[0].requires_grad_(), "z_j": batch[1].requires_grad_()}
    wanted = run(LOSSES[name](engine="dense", candidates=candidates), arguments)
    with bands_of(rows * 2 * len(batch[0]), blocks):
        got = run(LOSSES[name](engine="chunked", candidates=candidates), arguments)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        *(
            (name, "views") for name in CASES if "terms" not in name and name != "released"
        ),  # these fit a batch slope, tested below
        *(
            (name, other)
            for name in ("InfoNCE", "paper", "one's own")
            for other in ("cross", "clip", "labels")
        ),
    ],
)
def test_no_tensor_as_large_as_the_matrix(monkeypatch, name, candidates):
    """Bands hold 8,000 of 40,000 scores; the largest tensor may be a band, a tail or the rows, never the matrix."""
    monkeypatch.setattr(module, "CPU_BAND", 8000)
    monkeypatch.setattr(module, "BLOCK", 4000)
    rows = 200 if candidates in ("cross", "clip") else 100
    z_i, z_j = torch.randn(2, rows, 10).unbind()
    z_i.requires_grad_()
    labels = {"labels": torch.arange(rows) % 9} if candidates == "labels" else {}
    loss = CASES[name].make(learned, candidates=candidates, engine="chunked")
    with Largest() as largest:
        loss(z_i, z_j, **labels).backward()
    assert z_i.grad.abs().max() > 0
    assert 2000 <= largest.numel <= 8000


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_statistics_and_single_losses_take_no_more(monkeypatch, reduction):
    monkeypatch.setattr(module, "CPU_BAND", 8000)
    monkeypatch.setattr(module, "BLOCK", 2000)
    z_i, z_j = torch.randn(2, 200, 10).unbind()
    with Largest() as largest:
        output = InfoNCELoss(reduction=reduction, engine="chunked")(
            z_i.requires_grad_(), z_j, return_stats=True
        )
        output.loss.sum().backward()
    assert 2000 <= largest.numel <= 8000


def test_the_batch_slope_takes_a_share_of_the_matrix(monkeypatch):
    """The fit of the batch slope needs 5 % of all pairs in a few copies, still far less than the matrix."""
    monkeypatch.setattr(module, "CPU_BAND", 8000)
    monkeypatch.setattr(module, "BLOCK", 2000)
    z_i, z_j = torch.randn(2, 200, 10).unbind()
    z_i.requires_grad_()
    with Largest() as largest:
        WeinceLoss(engine="chunked")(z_i, z_j).backward()
    assert largest.numel < 160_000 / 3


class Asks(ContrastiveLoss):
    """InfoNCE that stores what the engine reports about all pairs, and may fit a running slope to them."""

    def __init__(self, slope=None, **options):
        super().__init__(**options)
        self.slope = slope

    def sums(self, batch):
        self.told = batch.problem.most_pairs, int(batch.pairs()), batch.smallest(50)
        return LogSumExp(SoftmaxLink(0.5) if self.slope is None else self.slope.link(batch))

    def combine(self, lse):
        return lse.cross_entropy()


def test_the_batch_slope_of_many_blocks():
    z, slopes = torch.randn(2, 20, 8), []
    for engine in ("dense", "chunked"):
        slope = RunningSlope(fewest=16)
        Asks(slope, engine=engine)(*z, ids=torch.arange(20) % 17)
        slopes.append(float(slope.slope_now))
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-6)
    assert slopes[0] != 4


@pytest.mark.parametrize("block", [1, 60, 10**6])
@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_a_loss_is_told_all_pairs_and_the_smallest_shortfalls(monkeypatch, engine, block):
    monkeypatch.setattr(f"weince.engines.{engine}.BLOCK", block)
    z, ids = torch.randn(2, 20, 8, dtype=torch.float64), torch.tensor([0] * 5 + [1] * 2 + list(range(2, 15)))
    loss = Asks(engine=engine)
    loss(*z, ids=ids)
    most, pairs, smallest = loss.told
    rows, every = unit_rows(z.flatten(0, 1)), ids.repeat(2)
    wanted = (1 - rows @ rows.T)[every.unsqueeze(1) != every].sort().values
    assert most == 40 * 38
    assert pairs == len(wanted)
    torch.testing.assert_close(smallest, wanted[:50])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction):
    z_i, z_j = torch.randn(2, 20, 8).unbind()
    loss = InfoNCELoss(engine="chunked", reduction=reduction)(z_i.requires_grad_(), z_j).sum()
    (grad,) = torch.autograd.grad(loss, z_i, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        grad.square().sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", CASES)
def test_works_in_torch_func_grad(name, reduction):
    z_i, z_j = torch.randn(2, 20, 8, dtype=torch.float64).unbind()

    def by(engine):
        loss = CASES[name].make(fixed, engine=engine, reduction=reduction, candidates="views")
        return torch.func.grad(lambda z: (loss(z, z_j) * (1 if reduction == "mean" else uneven(40))).sum())(
            z_i
        )

    torch.testing.assert_close(by("chunked"), by("dense"), rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "reduction"),
    [("InfoNCE", "none"), ("HCL", "mean"), ("a function", "mean"), ("released", "mean")],
)
def test_compiled_without_a_graph_break(monkeypatch, name, reduction):
    monkeypatch.setattr(module, "CPU_BAND", 40 * 23)  # two bands
    z_i, z_j = torch.randn(2, 20, 8).unbind()
    leaf = z_i.clone().requires_grad_()
    plain, compiled = (LOSSES[name](engine="chunked", reduction=reduction) for _ in range(2))
    compiled = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    results = []
    for loss in (plain, compiled):
        value = loss(leaf, z_j)
        weight = 1 if reduction == "mean" else uneven(40).float()
        results.append((value.detach(), *torch.autograd.grad((value * weight).sum(), leaf)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_compiled_without_gradient(context):
    """In a validation step nothing is differentiated."""
    z_i, z_j = torch.randn(2, 20, 8).unbind()
    loss = InfoNCELoss(engine="chunked")
    with context():
        found = torch.compile(loss, fullgraph=True, backend="aot_eager")(z_i, z_j)
    assert not found.requires_grad
    torch.testing.assert_close(found, loss(z_i, z_j), rtol=1e-5, atol=1e-6)


def test_without_gradient():
    z_i, z_j = torch.randn(2, 20, 8).unbind()
    assert not WeinceLoss(engine="chunked")(z_i, z_j).requires_grad
    with torch.no_grad():
        assert not WeinceLoss(engine="chunked")(z_i.requires_grad_(), z_j).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_touch_the_scores(dtype):
    z_i, z_j = torch.randn(2, 40, 16).unbind()

    def gradient():
        leaf = z_i.clone().requires_grad_()
        loss = WeinceLoss(engine="chunked", reduction="none")(leaf, z_j)
        return loss.detach(), *torch.autograd.grad((loss * uneven(80)).sum(), leaf)

    plain = gradient()
    with torch.autocast("cpu", dtype=dtype):
        cast = gradient()
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


class NegativesAlone(ContrastiveLoss):
    """Nothing but the engine reads its temperature."""

    def __init__(self, temperature, **options):
        super().__init__(**options)
        self.temperature = temperature

    def sums(self, batch):
        return LogSumExp(SoftmaxLink(self.temperature))

    def combine(self, lse):
        return lse.value


@pytest.mark.parametrize("what", ["ids", "ignore", "temperature"])
def test_what_the_backward_pass_reads_again_must_not_change(what):
    """Refilling such a buffer before the backward pass must be an error, since the gradient would be wrong."""
    z_i, z_j = torch.randn(2, 12, 6).unbind()
    tensors = {
        "ids": torch.arange(12) // 2,
        "ignore": torch.eye(12, dtype=torch.bool).roll(1, 0),
        "temperature": torch.tensor(0.5),
    }
    loss = NegativesAlone(tensors["temperature"], candidates="cross", engine="chunked", reduction="none")
    losses = loss(z_i.requires_grad_(), z_j, ids=tensors["ids"], ignore=tensors["ignore"])
    tensors[what].fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_thresholds_of_the_survey_are_kept():
    (problem,) = problems("cross", *torch.randn(2, 12, 6, dtype=torch.float64))
    parts = [Part(SoftmaxLink(0.5), "lse", "negatives", number) for number in (3, 5)]
    found = Chunked(problem, Need(None, (3,))), Dense(problem)
    found[0].evaluate(parts[:1])
    torch.testing.assert_close(*(engine.evaluate(parts) for engine in found))


def test_a_mask_made_in_inference_mode():
    z_i, z_j = torch.randn(2, 12, 6).unbind()
    with torch.inference_mode():
        ignore = z_i @ z_j.T > 2
    losses = InfoNCELoss(candidates="cross", engine="chunked", reduction="none")(
        z_i.requires_grad_(), z_j, ignore=ignore
    )
    losses.sum().backward()
    assert z_i.grad.isfinite().all()


def own_loss(engine, parameter):
    """A loss whose link is a function of the score with a learned parameter."""

    class Own(ContrastiveLoss):
        def sums(self, batch):
            return LogSumExp(FunctionLink(lambda s, k: k * s + s**3, k=parameter))

        def combine(self, lse):
            return lse.cross_entropy()

    return Own(engine=engine)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "fails"])
def test_a_link_of_ones_own_compiled(monkeypatch, backend):
    """Sums of such a link are compiled on a GPU. If that fails, they run uncompiled, with a warning."""
    calls = []

    def failing(module, inputs):
        raise RuntimeError("no compiler")

    compiled = torch.compile(module.Tile.sum, backend=failing if backend == "fails" else backend)
    monkeypatch.setattr(module, "_uncompiled", [])
    monkeypatch.setattr(module, "_compiled", lambda: calls.append(1) or compiled)
    monkeypatch.setattr(module, "worth_compiling", lambda link, matrix: isinstance(link, FunctionLink))
    found = {}
    for engine in ("chunked", "dense"):
        torch.manual_seed(0)
        z_i, z_j = (torch.randn(9, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
        k = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss = own_loss(engine, k)(z_i, z_j, ids=torch.arange(9) // 2)
            loss.backward()
        found[engine] = [loss.detach(), z_i.grad, z_j.grad, k.grad]
        slower = [one for one in said if "runs uncompiled, and slower" in str(one.message)]
        assert len(slower) == (engine == "chunked" and backend == "fails")
    assert calls
    torch.testing.assert_close(found["chunked"], found["dense"], rtol=1e-12, atol=1e-12)


def test_what_is_worth_compiling():
    own, on_gpu = FunctionLink(lambda s: s), SimpleNamespace(device=torch.device("cuda"))
    assert module.worth_compiling(own, on_gpu)
    assert not module.worth_compiling(SoftmaxLink(0.1), on_gpu)
    assert not module.worth_compiling(own, torch.empty(1, 1))


def test_exact_shortfalls_that_another_engine_found():
    """Column -1 means no entry, and must not overwrite column 0."""
    matrix = torch.full((2, 3), 0.5)
    tile = module.Tile(None, matrix)
    tile.put(
        torch.tensor([[2, 0, -1], [-1, -1, -1]], dtype=torch.int32), torch.tensor([[0.1, 0.2, torch.inf]] * 2)
    )
    torch.testing.assert_close(matrix, torch.tensor([[0.2, 0.5, 0.1], [0.5, 0.5, 0.5]]))
