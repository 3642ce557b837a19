"""The fused kernels against the dense engine in float64: in Triton's interpreter without a GPU, for real with one."""

import os
from dataclasses import replace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

triton = pytest.importorskip("triton", minversion="3.5")

import triton.language as tl  # noqa: E402
from weince.terms import Term, WeinceLink  # noqa: E402

from weince.candidates import contests  # noqa: E402
from weince.engines.dense import dense  # noqa: E402
from weince.engines.fused import cap, fused, why_not  # noqa: E402
from weince.engines.kernels import launch  # noqa: E402
from weince.engines.kernels.fit import log64  # noqa: E402
from weince.links import BlendLink, PowerLink, ShortfallLink, SoftmaxLink  # noqa: E402
from weince.tail import TailConfig, fit_tail, gated  # noqa: E402

TAIL = TailConfig()
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poison():
    """Memory that nobody wrote holds NaN and the largest integers."""
    torch.use_deterministic_algorithms(DEVICE == "cpu")
    yield
    torch.use_deterministic_algorithms(False)


needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def views(n, d, *, clusters=3, noise=0.5, seed=0, dtype=torch.float32):
    """Two noisy views of clustered rows, of varying length."""
    torch.manual_seed(seed)
    centres = torch.randn(clusters, d, device=DEVICE)
    rows = centres[torch.randint(clusters, (n,), device=DEVICE)] + noise * torch.randn(n, d, device=DEVICE)
    other = rows + 0.5 * noise * torch.randn(n, d, device=DEVICE)
    length = torch.rand(n, 1, device=DEVICE) + 0.2
    return (rows * length).to(dtype), other.to(dtype)


class Spy:
    """Takes the place of the kernel that fits, and keeps the shortfalls that every anchor's fit was made of."""

    def __init__(self, kernel):
        self.kernel, self.tails, self.sizes = kernel, [], []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.kernel[grid](*arguments, **options)
            halves, kept, sizes, *_, near_d, _, start, anchors, _, k, _, width = arguments[:20]
            keys = halves.view(torch.int64).view(-1, width)[: anchors - start]
            tails = (keys >> 32).int().view(torch.float32)
            have = width if options["ALL"] else kept[: len(keys), None]
            tails = (
                tails.where(torch.arange(width, device=keys.device) < have, torch.inf).sort(1).values[:, :k]
            )
            own = (
                sizes[: len(keys)] if options["HAS_IDS"] else torch.full((len(keys),), k, device=keys.device)
            )
            tails = tails.where(torch.arange(k, device=keys.device) < own[:, None], torch.inf)
            exact = near_d[start : start + len(keys), :k].sort(1).values
            self.tails.append(torch.cat([exact, tails[:, exact.shape[1] :]], 1))
            self.sizes.append(own)

        return run

    def stats(self, config, anchors):
        """Those of Algorithm 1 in float64, from the shortfalls of the first anchors."""
        tails, sizes = torch.cat(self.tails)[:anchors].double(), torch.cat(self.sizes)[:anchors]
        return gated(tails[:, 0].clamp_min(config.eps), fit_tail(tails, sizes, config), config, None)


def both(link, tail, layout, leaves, **options):
    """Loss, gradients and statistics of the fused engine, and those of the dense one in float64.

    Of the statistics of the first contest, all but rho are not the dense engine's but what float64 makes of the
    fused engine's own shortfalls.
    """
    found = []
    spy = Spy(launch.fit.fit_kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.fit, "fit_kernel", spy)
        found = _both(link, tail, layout, leaves, options)
    stats = found[1][2]
    if stats is not None:
        own = spy.stats(tail, len(stats.rho))
        found[1] = (*found[1][:2], own._replace(rho=stats.rho))
    return found


def _both(link, tail, layout, leaves, options):
    found = []
    for engine, exact in ((fused, False), (dense, True)):
        rows = [leaf.detach().double() if exact else leaf.detach().clone() for leaf in leaves]
        rows = [row.requires_grad_() for row in rows]
        named = dict(zip(("z_i", "z_j", "negatives"), rows, strict=False))
        outputs = [engine(contest, [Term(link)], tail) for contest in contests(layout, **named, **options)]
        loss = torch.cat([output.loss for output in outputs])
        gradients = torch.autograd.grad(loss.mean(), rows)
        found.append((loss.detach(), [g.double() for g in gradients], outputs[0].stats))
    return found


def agree(got, wanted, *, gradient=1e-4, loss=1e-5):
    (ours, our_gradients, our_stats), (exact, gradients, stats) = got, wanted
    mean = float(exact.mean())
    assert abs(float(ours.double().mean()) - mean) <= loss * max(1, mean)
    for mine, theirs in zip(our_gradients, gradients, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) <= gradient
    if stats is not None:
        torch.testing.assert_close(our_stats.rho.double(), stats.rho, rtol=1e-4, atol=0)
        for field in ("beta", "daic", "lam"):
            torch.testing.assert_close(
                getattr(our_stats, field).double(), getattr(stats, field), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("layout", ["views", "views, ids", "cross, negatives", "clip"])
def test_algorithm_1_on_every_layout(layout):
    rows = views(12, 40)
    options = {}
    if "negatives" in layout:
        rows = (*rows, torch.randn(7, 40, device=DEVICE))
    if "ids" in layout:
        options["ids"] = torch.arange(12, device=DEVICE) % 9
    got, wanted = both(WeinceLink(0.3), TAIL, layout.split(",")[0], rows, **options)
    agree(got, wanted)
    assert float(wanted[2].lam.max()) > 0.01, "a case in which the blend does nothing tests nothing"


def test_the_released_tail():
    config = TailConfig(beta=1.0, drop=0.05, soft_cap=False, gate="rho", rho0=0.3)
    agree(*both(WeinceLink(0.3, config), config, "views", views(10, 24)))


@pytest.mark.parametrize(
    "link",
    [
        SoftmaxLink(0.05),
        ShortfallLink(2.5, endpoint=1.1),
        ShortfallLink(1.5),
        BlendLink(torch.linspace(0, 1, 32, device=DEVICE), 2.0, 0.3),
    ],
    ids=["softmax", "endpoint", "shortfall", "blend"],
)
def test_links_without_statistics(link):
    agree(*both(link, None, "views", views(16, 24)))


def test_statistics_beside_another_link():
    agree(*both(SoftmaxLink(0.3), TAIL, "cross", views(40, 24)))


def test_rows_wider_than_a_tile():
    agree(*both(WeinceLink(0.3), TAIL, "views", views(10, 300)))


def test_bfloat16_to_the_error_of_rounding_the_inputs():
    exact = views(20, 24)
    got, rounded = both(WeinceLink(0.3), TAIL, "views", [rows.bfloat16() for rows in exact])
    _, unrounded = both(WeinceLink(0.3), TAIL, "views", exact)
    assert float((got[0].double() - rounded[0]).abs().max()) < 1e-4
    for mine, theirs, free in zip(got[1], rounded[1], unrounded[1], strict=True):
        assert float((mine - theirs).norm()) <= float((theirs - free).norm())


@pytest.mark.parametrize("case", ["one pass", "two passes", "too few", "too many"])
def test_the_search_with_good_and_bad_thresholds(monkeypatch, case):
    """Thresholds from a sample, tightened on the way; too low or too high, the exact search steps in."""
    plans = {
        "one pass": launch.TailPlan(26, 0, 0, 64),
        "two passes": launch.TailPlan(30, 2, 22, 128),
        "too few": launch.TailPlan(1, 0, 0, 64),
        "too many": launch.TailPlan(32, 0, 0, 64),
    }
    monkeypatch.setattr(launch, "ALL_KEPT", 16)
    monkeypatch.setattr(launch, "SAMPLE", 32)
    monkeypatch.setattr(launch, "plan", lambda count, k: plans[case])
    agree(*both(WeinceLink(0.3), TAIL, "views", views(50 if case == "two passes" else 33, 24, noise=1.0)))


def test_ties_and_duplicates():
    """Many equal rows: the K-th shortfall is shared by more than there is room for."""
    z_i, z_j = views(24, 16)
    z_i[4:] = z_i[:4].repeat(5, 1)
    z_j[4:] = z_j[:4].repeat(5, 1)
    got, _ = both(WeinceLink(0.3), TAIL, "views", (z_i, z_j))
    assert got[0].isfinite().all()
    assert all(gradient.isfinite().all() for gradient in got[1])
    torch.testing.assert_close(got[2].rho, torch.full_like(got[2].rho, TAIL.eps), rtol=1e-4, atol=0)


@pytest.mark.parametrize("shortfall", [1e-2, 1e-4, 1e-5])
def test_near_the_cap(shortfall):
    z_i, z_j = views(14, 32, noise=1.0)
    step = torch.nn.functional.normalize(torch.randn(32, device=DEVICE), dim=0)
    z_j[0] = torch.nn.functional.normalize(z_i[1], dim=0) + (2 * shortfall) ** 0.5 * step
    got, wanted = both(WeinceLink(0.3), TAIL, "views", (z_i, z_j))
    assert float(wanted[2].rho.min()) < 2 * shortfall
    torch.testing.assert_close(got[2].rho.double(), wanted[2].rho, rtol=1e-4, atol=0)
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-3, atol=1e-4)


def test_the_fit_is_float64s_on_the_same_shortfalls():
    """Products of bfloat16 are exact, so the shortfalls are those of float64, and the fit has to be too."""
    got, wanted = both(WeinceLink(0.3), TAIL, "cross", views(40, 16, dtype=torch.bfloat16))
    for ours, theirs in zip(got[2], wanted[2], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "weince", "shortfall"])
def test_learned_parameters(kind):
    z_i, z_j = views(12, 16)
    gradients = []
    for engine, dtype in ((fused, torch.float32), (dense, torch.float64)):
        value = torch.tensor(0.4, device=DEVICE, dtype=dtype, requires_grad=True)
        link = {"softmax": SoftmaxLink, "weince": WeinceLink, "shortfall": ShortfallLink}[kind](value)
        (contest,) = contests("views", z_i.to(dtype), z_j.to(dtype))
        loss = engine(contest, [Term(link, weight=2.0)], TAIL if kind == "weince" else None).loss.mean()
        gradients.append(torch.autograd.grad(loss, value)[0].double())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_what_it_does_not_serve():
    (contest,) = contests("views", *views(8, 4))
    term = Term(SoftmaxLink())
    where = why_not(contest, [term], None)
    assert where is None if DEVICE == "cuda" else "CUDA" in where
    on = replace(contest, ignore=torch.zeros(16, 16, dtype=torch.bool, device=DEVICE))
    for bad, terms, tail, word in [
        (on, [term], None, "ignore"),
        (contest, [term, term], None, "one term"),
        (contest, [Term(SoftmaxLink(), hardest=3)], None, "one term"),
        (contest, [Term(PowerLink())], None, "PowerLink"),
        (contest, [Term(WeinceLink(0.5, TailConfig(positive="softmax")))], TAIL, "softmax on positives"),
        (contests("views", *(z.double() for z in views(8, 4)))[0], [term], None, "float32"),
        (
            contests("labels", views(8, 4)[0], labels=torch.arange(8, device=DEVICE) % 2)[0],
            [term],
            None,
            "labels",
        ),
    ]:
        with pytest.raises(ValueError, match=word):
            fused(bad, terms, tail)


@pytest.mark.parametrize(
    "link",
    [
        ShortfallLink(1.0, endpoint=1.3),
        ShortfallLink(1.0),
        BlendLink(1.0, 1.0, soft_cap=False),
        BlendLink(1.0, 1.0, endpoint=1.2),
    ],
)
def test_what_the_logarithm_is_taken_of(link):
    """With the blend all on the logarithm, the logit is minus that of what :func:`cap` describes."""
    d = torch.logspace(-9, 0.3, 50, dtype=torch.float64)
    offset, lowest, soft = cap(link)
    assert not soft
    torch.testing.assert_close(link.logit(d), -(offset + d.clamp_min(lowest)).log())


@pytest.mark.parametrize("count", [1025, 5000, 12288, 12289, 65536, 1 << 20])
def test_plans_leave_room(count):
    """The thresholds' expected survivors lie between K and the room, five standard deviations from both."""
    k = TAIL.tail_size(count - 2)
    plan = launch.plan(count, k)
    share = launch.SAMPLE / count
    assert plan.wanted >= share * k + 5 * (share * k * (1 - k / count)) ** 0.5
    first = plan.wanted / share / (plan.every or 1)
    last = plan.again * (plan.every - 1) if plan.every else 0
    assert k < first + last < plan.width <= count
    assert plan.width * 8 * launch.PAD < 1 << 28


def test_traced_whole(fresh_compiler):
    """The kernels are one operator in a compiled graph, in the forward and in the backward pass."""
    z_i, z_j = (rows.requires_grad_() for rows in views(8, 16))
    terms = [Term(WeinceLink(0.5))]

    def step(z_i, z_j):
        (contest,) = contests("views", z_i, z_j)
        return fused(contest, terms, TAIL).loss.mean()

    wanted = torch.autograd.grad(step(z_i, z_j), [z_i, z_j])
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(torch.autograd.grad(traced(z_i, z_j), [z_i, z_j]), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "d"), [(300, 64), (2048, 128), (4096, 256), (8500, 300), (16384, 128)])
def test_large_batches(n, d, dtype):
    rows = views(n, d, clusters=40, dtype=dtype)
    agree(*both(WeinceLink(0.5), TAIL, "views", rows), gradient=1e-4 if dtype == torch.float32 else 4e-3)


@gpu
@needs_gpu
@pytest.mark.parametrize("d", [20, 300])
@pytest.mark.parametrize("layout", ["cross", "clip"])
def test_large_cross_batches(layout, d):
    rows = views(3000, d, clusters=40)
    ids = torch.arange(3000, device=DEVICE) % 2900
    agree(*both(WeinceLink(0.5), TAIL, layout, rows, ids=ids))


@gpu
@needs_gpu
def test_large_duplicates():
    z_i, z_j = views(3000, 64, clusters=40)
    z_i[1000:2000] = z_i[:1000]
    z_i[2000:] = z_i[0]
    got, wanted = both(WeinceLink(0.5), TAIL, "views", (z_i, z_j))
    torch.testing.assert_close(got[2].rho.double(), wanted[2].rho, rtol=1e-4, atol=1e-9)
    assert got[0].isfinite().all()


@gpu
@needs_gpu
def test_compiled_whole_and_in_a_graph():
    z_i, z_j = (rows.requires_grad_() for rows in views(256, 64))
    terms = [Term(WeinceLink(0.5))]

    def step(z_i, z_j):
        (contest,) = contests("views", z_i, z_j)
        return fused(contest, terms, TAIL).loss.mean()

    wanted = torch.autograd.grad(step(z_i, z_j), [z_i, z_j])
    compiled = torch.compile(step, fullgraph=True)
    for ours, theirs in zip(torch.autograd.grad(compiled(z_i, z_j), [z_i, z_j]), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = torch.autograd.grad(step(z_i, z_j), [z_i, z_j])
    graph.replay()
    for ours, theirs in zip(recorded, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@gpu
@needs_gpu
def test_no_wait_for_the_device():
    z_i, z_j = (rows.requires_grad_() for rows in views(2048, 64))

    def step():
        (contest,) = contests("views", z_i, z_j)
        fused(contest, [Term(WeinceLink(0.5))], TAIL).loss.mean().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
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
