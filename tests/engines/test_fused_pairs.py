"""What two-tower trainers need, on the fused engine: offsets, limits, products, labels of two towers, the own side.

The kernels are compared with the definition in float64. Without a GPU they run in Triton's interpreter.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

pytest.importorskip("triton", minversion="3.5")

from fused_cases import DEVICE, Numbers, named, views
from started import Dense, Fused

from weince.engines import Need
from weince.engines.kernels import launch
from weince.layouts import Layout, problems
from weince.links import AffineLink, FunctionLink, ShortfallLink, SoftmaxLink
from weince.sums import Part
from weince.tail import TailConfig, fit_tail


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several tiles, in spans of two; uninitialized memory holds NaN and the largest integers."""
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "blocks", lambda *_: {"BM": 16, "BN": 32})
    torch.use_deterministic_algorithms(DEVICE == "cpu")
    yield
    torch.use_deterministic_algorithms(False)


def rows(n=40, d=24, extra=True):
    z_i, z_j = views(n, d)
    return (z_i, z_j, torch.randn(13, d, device=DEVICE)) if extra else (z_i, z_j)


def sums(problem, numbers):
    """Sums of every kind with learned parameters; among the positives, if there are several."""
    n = len(problem.anchors)
    parts = [
        Part(SoftmaxLink(numbers(0.3)), "lse"),
        Part(AffineLink(numbers(-4.0), numbers(-2.0, n)), "softplus"),
        Part(FunctionLink(lambda s, k: k * s + s**2, k=numbers(1.5, n)), "sum"),
    ]
    if problem.score == "cosine":
        parts.append(Part(ShortfallLink(numbers(1.5)), "lse"))
    if problem.positives is not None:
        parts += [Part(SoftmaxLink(numbers(0.6)), kind, "positives") for kind in ("lse", "sum", "softplus")]
    return parts


def labels(n=40, documents=40):
    at = torch.arange(documents, device=DEVICE)
    return (at[:n] * 7 % 9, at * 7 % 9)


CASES = {
    "offset": (Layout("cross"), True, lambda: {"offset": torch.linspace(-2, 1, 53, device=DEVICE)}),
    "offset, both ways": (Layout("clip"), False, lambda: {"offset": torch.rand(40, device=DEVICE)}),
    "limit": (Layout("cross", ignore_above=-0.05), True, dict),
    "limit, hard ones too": (Layout("cross", ignore_above=-0.05, exempt_hard=False), True, dict),
    "limit, both ways": (Layout("clip", ignore_above=lambda s: 0.95 * s), False, dict),
    "limit, views": (Layout("views", ignore_above=-0.1), False, dict),
    "labels": (Layout("cross"), False, lambda: {"labels": labels()}),
    "labels of further documents": (Layout("cross"), True, lambda: {"labels": labels(documents=53)}),
    "labels, both ways": (Layout("clip"), False, lambda: {"labels": labels()}),
    "own side": (Layout("cross", within=True), True, dict),
    "own side, both ways": (Layout("clip", within=True), False, dict),
    "own side, labels": (Layout("clip", within=True), False, lambda: {"labels": labels()}),
    "all": (
        Layout("cross", within=True, ignore_above=-0.05), True,
        lambda: {"offset": torch.rand(53, device=DEVICE), "ids": torch.arange(53, device=DEVICE) % 50},
    ),
}  # fmt: skip


def defined(problem, part, rows, threshold=None):
    """A sum of every anchor by its definition, with the whole matrix."""
    anchors, candidates = rows
    d = 1 - anchors @ candidates.T
    rules = problem.positives if part.among == "positives" else problem.negatives
    with torch.no_grad():
        takes_part = problem.mask(rules, d)
        if threshold is not None:
            takes_part &= d <= threshold
    z = part.link.logit(d)
    if "offset" in problem.of_candidate:
        z = z + problem.of_candidate["offset"]
    if part.kind == "lse":
        return z.masked_fill(~takes_part, -torch.inf).logsumexp(1)
    return torch.where(
        takes_part, torch.nn.functional.softplus(z, threshold=40) if part.kind == "softplus" else z, 0
    ).sum(1)


def found(dtype, rows, layout, options, parts):
    """Sums of all problems, and their gradients by rows and parameters."""
    leaves, numbers, values = [row.detach().to(dtype).requires_grad_() for row in rows], Numbers(dtype), []
    for problem in problems(layout, **named(leaves), **options):
        own = parts(problem, numbers)
        if dtype == torch.float64:
            values += [defined(problem, part, (problem.anchors, problem.candidates)) for part in own]
        else:
            values += Fused(problem).evaluate(own)
    weights = 0.5 + torch.rand(len(values), len(values[0]), generator=torch.Generator().manual_seed(1))
    values = torch.stack(values)
    total = (values.masked_fill(values == -torch.inf, 0) * weights.to(values)).sum()
    return values.detach().double(), torch.autograd.grad(total, [*leaves, *numbers.made])


def agree(parts, rows, layout, options, value=2e-5, gradient=1e-4):
    (ours, mine), (exact, gradients) = (
        found(dtype, rows, layout, options, parts) for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(ours, exact, rtol=value, atol=value)
    for one, wanted in zip(mine, gradients, strict=True):
        assert float((one.double() - wanted).norm()) <= gradient * max(float(wanted.norm()), 1e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log(0) of anchors without candidates in a sum
@pytest.mark.parametrize("score", ["cosine", "dot"])
@pytest.mark.parametrize("case", CASES)
def test_sums_and_gradients(case, score):
    layout, extra, options = CASES[case]
    # Rows in two bfloat16 parts have 16 bits: products as large as 5 are off by 1e-4 at most.
    # A sum of 53 logits as large as 3, each rounded a few times, is off by 53 * 3 * 4 * 2^-24 = 4e-5.
    tolerance = {"value": 1e-4} if score == "cosine" else {"value": 2e-4, "gradient": 2e-4}
    given = [part * (1 if score == "cosine" else 0.3) for part in rows(extra=extra)]
    agree(sums, given, layout._replace(score=score), options(), **tolerance)


@pytest.mark.parametrize("case", ["offset", "limit", "labels of further documents", "own side", "all"])
def test_a_tail(case):
    """The survey finds the nearest of the negatives that the sums have; an offset moves logits, not the tail."""
    layout, extra, options = CASES[case]
    [ours] = (
        Fused(one, Need(TailConfig(k=6), (5,)))
        for one in problems(layout, **named(rows(extra=extra)), **options())
    )
    [exact] = problems(layout, **named(row.double() for row in rows(extra=extra)), **options())
    d = 1 - exact.anchors @ exact.candidates.T
    negatives = exact.mask(exact.negatives, d)
    hidden = d.masked_fill(~negatives, torch.inf).sort(1).values
    torch.testing.assert_close(ours.stats.rho.double(), hidden[:, 0].clamp_min(1e-6), rtol=1e-4, atol=1e-6)
    assert torch.equal(ours.negatives().expand(40), negatives.sum(1))
    fit = fit_tail(hidden[:, :6], negatives.sum(1).clamp_max(6), TailConfig(k=6))
    torch.testing.assert_close(ours.stats.beta.double(), fit.beta, rtol=1e-3, atol=1e-3)
    parts = [Part(SoftmaxLink(0.4), "lse", "negatives", number) for number in (None, 5)]
    threshold = (hidden[:, 4:5] + hidden[:, 5:6]) / 2
    for part, value, limit in zip(parts, ours.evaluate(parts), (None, threshold), strict=True):
        wanted = defined(exact, part, (exact.anchors, exact.candidates), limit)
        torch.testing.assert_close(value.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: overflow where a pair takes no part
def test_products_far_from_0():
    """Logits of large products, which have no cap: float32 holds no exponential of them."""
    z_i, z_j = rows(extra=False)
    given = [10 * z_i, 5 * z_j]
    parts = [Part(SoftmaxLink(1.0), "lse"), Part(AffineLink(0.5, -3.0), "softplus")]
    # The products are as large as 2,000, with errors of 2^-16 of the lengths' product.
    agree(lambda problem, numbers: parts, given, Layout("cross", score="dot"), {}, value=1e-3, gradient=2e-2)


def test_products_of_zero_rows():
    z_i, z_j = rows(extra=False)
    z_i, z_j = 0.3 * z_i, 0.3 * z_j
    z_i[3], z_j[5] = 0.0, 0.0
    agree(sums, [z_i, z_j], Layout("clip", score="dot"), {}, value=2e-4, gradient=2e-4)


@pytest.mark.parametrize("negatives", ["hard", "products"])
def test_what_the_kernels_do_not_search(negatives):
    """The hardest of products, and of each anchor's own negatives: another engine finds them, the kernels sum."""
    z_i, z_j = rows(extra=False)
    score, extra = "dot", {}
    if negatives == "hard":
        score, extra = "cosine", {"negatives": torch.randn(40, 3, 24, device=DEVICE)}
    layout, parts = Layout("cross", score=score), [Part(SoftmaxLink(0.5), "lse", "negatives", 5)]
    found = []
    for engine, dtype in ((Fused, torch.float32), (Dense, torch.float64)):
        given = {name: value.to(dtype) for name, value in {"z_i": z_i, "z_j": z_j, **extra}.items()}
        (problem,) = problems(layout, **given)
        found.append(engine(problem, Need(TailConfig(k=6), (5,)) if negatives == "hard" else Need()))
    (ours,), (exact,) = (engine.evaluate(parts) for engine in found)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)
    if negatives == "hard":
        for mine, theirs in zip(found[0].stats, found[1].stats, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("score", ["cosine", "dot"])
@pytest.mark.parametrize("case", ["offset", "limit", "labels, both ways", "own side, both ways"])
def test_large_batches(case, score):
    layout, _, options = CASES[case]
    n = 3000
    given = [part * (1 if score == "cosine" else 0.3) for part in views(n, 64, clusters=40)]
    roles = {name: torch.rand(n, device=DEVICE) if name == "offset" else labels(n, n) for name in options()}
    agree(sums, given, layout._replace(score=score), roles, value=3e-4, gradient=3e-4)
