"""User-defined links in the kernels: how a function is recorded, and its sums against the dense engine in float64."""

import logging
import math
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

triton = pytest.importorskip("triton", minversion="3.5")

import triton.language as tl  # noqa: E402
from fused_cases import DEVICE, agree, batch, views  # noqa: E402
from started import Chunked, Dense, Fused  # noqa: E402

from weince import LinkLoss  # noqa: E402
from weince.engines.kernels import elementwise, translate, write  # noqa: E402
from weince.engines.kernels.tape import Tape, Traced  # noqa: E402
from weince.layouts import problems  # noqa: E402
from weince.links import FunctionLink, SoftmaxLink  # noqa: E402
from weince.sums import Part  # noqa: E402


@pytest.fixture
def no_loop(monkeypatch):
    """Fail if the fused engine falls back to the chunked one."""
    monkeypatch.setattr("weince.engines.fused.chunked.ENGINE", None)  # nothing is left to it


# Recording a function

ONE = torch.tensor(1.0)


@triton.jit
def apply_kernel(
    d, columns, slope_columns, numbers, slope_numbers, weights, out,
    COUNT: tl.constexpr, ANCHORS: tl.constexpr, PAIRS: tl.constexpr, SLOPE_ANCHORS: tl.constexpr,
    SLOPE_PAIRS: tl.constexpr,
):  # fmt: skip
    """Each anchor with one candidate: logit in bits, slope, and derivatives by the parameters."""
    at = tl.arange(0, COUNT)
    apart = tl.load(d + at)[:, None]
    nothing = tl.zeros((COUNT, 1), tl.float32)  # some results are one number for all
    anchor = ANCHORS(columns, numbers, 0, 0, at, COUNT)
    found = PAIRS(apart, anchor, anchor, False)
    for slot in tl.static_range(len(found)):
        tl.store(out + slot * COUNT + at, tl.reshape(nothing + found[slot], (COUNT,)))
    anchor = SLOPE_ANCHORS(slope_columns, slope_numbers, weights, weights, at, COUNT)
    slope = SLOPE_PAIRS(apart, apart, anchor, at, COUNT, anchor, at, COUNT, 0, False)
    tl.store(out + len(found) * COUNT + at, tl.reshape(nothing + slope[0], (COUNT,)))


def exact(function, inputs):
    """Value and derivatives ``(4, n)`` by autograd."""

    def total(*inputs):
        value = function(*(one.clone() for one in inputs))  # the function may work in place
        return value.sum(), value

    slopes, value = torch.func.grad(total, (0, 1, 2), has_aux=True)(*inputs)
    return torch.stack([value, *slopes])


def recorded(link, each=True):
    """What the kernels get of a link, as the only sum of a pass that learns its parameters."""
    code = translate.code_of(link)
    assert code is not None
    parameters = tuple((name, name, each, True) for name in link.tensors())
    return translate.recorded((translate.REQUEST, (("sum", code, parameters, ()),), ((), ()), True, False))


def on_tape(function, inputs):
    """The same as :func:`exact`, by the tape and its derivatives."""
    tape = Tape([])
    parameters = {name: translate.column(tape, name, True) for name in "km"}
    logit, shortfall = translate.record_link(FunctionLink(function, k=ONE, m=ONE), tape, parameters)
    by = [shortfall, *(one.at for one in parameters.values())]
    places = [logit, *(translate.derivative(tape, logit, at) for at in by)]
    values = translate.evaluate(tape, places, dict(zip(by, (1 - inputs[0], *inputs[1:]), strict=True)))
    value, by_shortfall, *others = (one.expand_as(inputs[0]) for one in values)
    return torch.stack([value, -by_shortfall, *others])


OPERATIONS = {
    "numbers": lambda s, k, m: (3 - s) * k / (2 + m) - 2 / (s + 3) + (-s) * 1e-3,
    "whole powers": lambda s, k, m: s**2 - 3 * s**3 + (s + 2) ** -2 + torch.pow(s, 7) + s.square() * s**0,
    "powers": lambda s, k, m: (s + 1.1) ** 0.5 + (s + 2) ** 1.7 + (s + 2) ** -0.3 + 2**s,
    "learned powers": lambda s, k, m: (s + 1.5) ** k - (k + 1).pow(s),
    "exponentials": lambda s, k, m: s.exp() + torch.exp2(s * k) + torch.expm1(1e-3 * s) * 1e3,
    "logarithms": lambda s, k, m: (s + 2).log() + torch.log2(k + 2) * s + torch.log1p(1e-3 * s) * 1e3,
    "roots": lambda s, k, m: (s + 1.5).sqrt() + torch.rsqrt(s + k + 1) + torch.reciprocal(s + 2),
    "hyperbolic": lambda s, k, m: torch.tanh(k * s) + torch.sinh(2 * s) - torch.cosh(s) + torch.atanh(s / 2),
    "small hyperbolic": lambda s, k, m: 1e3 * ((1e-3 * s).tanh() + (1e-3 * s).sinh() + torch.atanh(1e-3 * s)),
    "waves": lambda s, k, m: torch.sin(3 * s) * torch.cos(k * s) + torch.erf(s),
    "sigmoids": lambda s, k, m: (4 * s).sigmoid() + F.softplus(k * s, beta=2.0) + F.logsigmoid(s) + F.tanh(s),
    "two softplus": lambda s, k, m: torch.logaddexp(3 * s, k) + F.softplus(30 * s),
    "kinks": lambda s, k, m: s.abs() + (s - 0.1).relu() * k + F.relu(m - s) - s.sign(),
    "extremes": lambda s, k, m: torch.maximum(s, m) * torch.minimum(s, 0.2 * k) + s.clamp(-0.3, 0.4),
    "limits": lambda s, k, m: (
        torch.clamp(s, max=0.25) + s.clamp(min=0.5 * m) + (s + 1.1).clamp_min(0.3).log()
    ),
    "choices": lambda s, k, m: torch.where((s > 0.1) & ~(s >= 0.6) | (s < -0.5), k * s, m) + (s <= 0.3) * s,
    "masks": lambda s, k, m: (s > k - 0.8).float() * s + torch.where(s == 0.5, 1.0, 2.0) * s,
    "tensors by name": lambda s, k, m: (
        k * s.clamp(min=torch.tensor(-0.3)) + torch.clamp(s, min=torch.tensor(-0.6), max=torch.tensor(0.4))
    ),
    "in place": lambda s, k, m: F.relu(s - 0.1, inplace=True) + F.relu(s, inplace=True) * k,
    "in place, by name": lambda s, k, m: s.mul_(2).add_(k).clamp_(-1.5, 1.5) + (s - m).exp_(),
    "tensors": lambda s, k, m: torch.tensor(2.0) * s - torch.tensor(0.5) ** s + torch.tensor(3.0) / (s + 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation(name):
    """Compare value and derivatives in Triton with torch in float64, to a few units in the last place of float32."""
    function, count = OPERATIONS[name], 256
    places = torch.linspace(0, 1, count, dtype=torch.float64)
    inputs = [1.995 - 1.99 * places, 0.6 + 0.7 * places.roll(31), 0.9 - 0.5 * places.roll(77)]
    d, *parameters = (value.float().to(DEVICE) for value in inputs)
    sums = recorded(FunctionLink(function, k=ONE, m=ONE))
    ours, slope = write.functions_of_sums(sums), write.functions_of_gradient(sums)
    out = torch.empty(4, count, device=DEVICE)
    named = dict(zip("km", parameters, strict=True))
    columns = (tuple(named[name] for name in one.columns) or (d,) for one in (ours, slope))
    apply_kernel[(1,)](
        d, *columns, ours.numbers, slope.numbers, torch.ones_like(d), out, COUNT=count, ANCHORS=ours.anchors,
        PAIRS=ours.pairs, SLOPE_ANCHORS=slope.anchors, SLOPE_PAIRS=slope.pairs,
    )  # fmt: skip
    value, by_k, by_m, by_s = out.double().cpu()
    wanted = exact(function, [1 - d.double().cpu(), *(value.double().cpu() for value in parameters)])
    found = torch.stack([value * math.log(2), by_s, by_k, by_m])
    torch.testing.assert_close(found, wanted, rtol=3e-6, atol=3e-6)


@triton.jit
def one_kernel(x, out, COUNT: tl.constexpr, FUNCTION: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, FUNCTION(tl.load(x + at)))


@triton.jit
def two_kernel(x, y, out, COUNT: tl.constexpr, FUNCTION: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, FUNCTION(tl.load(x + at), tl.load(y + at)))


def both_signs(largest):
    """Small and large numbers, 1024 of each sign."""
    small = torch.logspace(-20, math.log10(largest), 512, dtype=torch.float64)
    sizes = torch.cat([small, torch.linspace(0, largest, 512, dtype=torch.float64)])
    return torch.cat([sizes, -sizes]).float().to(DEVICE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: overflow in a branch that is not taken
@pytest.mark.parametrize(
    ("name", "largest"),
    [("log1p", 0.9999), ("expm1", 88.7), ("softplus", 19.0), ("tanh", 20.0), ("sinh", 89.41), ("cosh", 89.41),
     ("atanh", 0.99999)],
)  # fmt: skip
def test_functions_that_triton_does_not_have(name, largest):
    """Error at most 4 units in the last place, plus one for each unit of ``|x|``: GPU exponentials lose that much."""
    x = both_signs(largest)
    out = torch.empty_like(x)
    one_kernel[(1,)](x, out, COUNT=len(x), FUNCTION=getattr(elementwise, name))
    wanted = (getattr(torch, name, None) or getattr(F, name))(x.double())
    units = 4 + x.double().abs()
    assert bool(((out.double() - wanted).abs() <= units * 2.0**-23 * wanted.abs()).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "x"),
    [("sinh", 90.0), ("sinh", math.inf), ("cosh", 90.0), ("atanh", 1.0), ("atanh", 1.01), ("expm1", 110.0),
     ("expm1", math.inf), ("tanh", 60.0), ("sign", 0.5), ("softplus", 120.0), ("softplus", math.inf)],
)  # fmt: skip
def test_functions_beyond_their_range(name, x):
    x = torch.tensor([x, -x, math.nan, 0.0], device=DEVICE)
    out = torch.empty_like(x)
    one_kernel[(1,)](x, out, COUNT=4, FUNCTION=getattr(elementwise, name))
    wanted = (getattr(torch, name, None) or getattr(F, name))(x)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


def test_powers_are_as_accurate_as_they_say():
    generator = torch.Generator().manual_seed(0)
    x = torch.logspace(-30, 30, 1024)
    y = 4 * torch.rand(1024, generator=generator) - 2
    y = y.where((x.log2() * y).abs() < 120, 0.5).to(DEVICE)
    x, out = x.to(DEVICE), torch.empty(1024, device=DEVICE)
    two_kernel[(1,)](x, y, out, COUNT=1024, FUNCTION=elementwise.power)
    wanted = x.double() ** y.double()
    units = (out.double() - wanted).abs() / wanted * 2.0**23
    assert bool((units <= 4 + 1.5 * (y.double() * x.double().log2()).abs()).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log2(0)
def test_powers_of_any_base():
    """Negative bases, where whole exponents keep or drop the sign, zero, infinity, and NaN."""
    x, y = torch.cartesian_prod(
        torch.tensor([-4.0, -0.5, 0.0, 0.5, 4.0, math.inf, math.nan]),
        torch.tensor([-3.0, -2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0]),
    ).T.contiguous()
    out = torch.empty(64, device=DEVICE)
    x, y = (torch.cat([one, torch.ones(8)]).to(DEVICE) for one in (x, y))
    two_kernel[(1,)](x, y, out, COUNT=64, FUNCTION=elementwise.power)
    torch.testing.assert_close(out, x**y, rtol=2e-6, atol=0, equal_nan=True)


def trees():
    """Random functions of a score and two parameters, as Python source."""
    leaves = st.sampled_from(["s", "k", "m", "0.7", "2", "(s + 1.5)"])
    shapes = [
        "({} + {})", "({} - {})", "({} * {})", "torch.maximum(s * {}, s + {})", "torch.where(s > {}, s * {}, k)",
        "torch.tanh(s * {})", "torch.exp(-(s * {}).abs())", "torch.log(1 + (s - {}) ** 2)", "F.softplus(s * {})",
        "(s + {}).clamp(-0.45, 0.61)", "(s / (2 + (m * {}).sigmoid()))", "(1 + (s * {}).square()).sqrt()",
    ]  # fmt: skip

    def grown(inner):
        return st.sampled_from(shapes).flatmap(
            lambda shape: st.tuples(*[inner] * shape.count("{}")).map(lambda parts: shape.format(*parts))
        )

    return st.recursive(leaves, grown, max_leaves=12).map(lambda text: f"s * 1.01 + 0 * (k + m) + {text}")


@given(trees())
def test_derivatives_of_whatever_is_recorded(text):
    function = eval(f"lambda s, k, m: {text}")
    score = torch.linspace(-0.987, 0.991, 23, dtype=torch.float64)
    inputs = [score, 0.83 + 0.1 * score, 1.21 - 0.2 * score]
    torch.testing.assert_close(on_tape(function, inputs), exact(function, inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, k, m: s.relu() + s.abs(),
        lambda s, k, m: F.softplus(s) * 2,
        lambda s, k, m: s.clamp(0.0, 0.5) + s.clamp_max(-0.5),
        lambda s, k, m: torch.maximum(s, 0 * k) - torch.minimum(0.5 * k, s),
        lambda s, k, m: (s + 0.5) ** 2 + (s.abs() + 1) ** k,
    ],
)
def test_derivatives_at_kinks_are_those_of_torch(function):
    score = torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64)
    inputs = [score, torch.ones_like(score), torch.ones_like(score)]
    torch.testing.assert_close(on_tape(function, inputs), exact(function, inputs), rtol=0, atol=1e-15)


def test_what_is_not_chosen_need_not_be_finite():
    """The branch of ``where`` that is not taken may be infinite; autograd would return NaN (inf * 0) there."""
    score = torch.tensor([-1.0, 0.0, 0.25])
    slope = on_tape(lambda s, k, m: torch.where(s > 0, s.sqrt(), s), [score, FAR, FAR])[1]
    assert slope.tolist() == [1.0, 1.0, 1.0]


FAR = torch.ones(3)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda s: s.softmax(1), "no softmax"),
        (lambda s: torch.lgamma(s + 2), "no lgamma"),
        (lambda s: s * FAR, "no number"),
        (lambda s: s if s > 0 else 2 * s, "decides by the value"),
        (lambda s: s * s.shape[0], "no shape"),
        (lambda s: s.uniform_(), "no uniform_"),
        (lambda s: torch.add(s, s, alpha=2), "alpha"),
        (lambda s: torch.tensor(2.0), "returns no tensor"),
        (lambda s: s > 0, "returns no tensor"),
        (lambda s: s if isinstance(s, Traced) else 2 * s, "not what it computes"),
        (lambda s: F.relu(s, inplace=True) + s, "not what it computes"),  # also changes s
        (lambda s: s**65, "power of 65"),
        (lambda s: torch.where(s, s, 2 * s), "no comparison"),
        (lambda s: math.sin(s), "real number"),
        (lambda s: {}["missing"], "missing"),
    ],
)  # fmt: skip
def test_what_is_left_to_the_chunked_engine(function, why, caplog):
    with caplog.at_level(logging.DEBUG, "weince"):
        assert translate.code_of(FunctionLink(function)) is None
    assert why in caplog.text


def test_a_link_that_does_not_depend_on_the_score(caplog):
    with caplog.at_level(logging.DEBUG, "weince"):
        assert translate.code_of(FunctionLink(lambda s, k: k * 2, k=ONE)) is None
    assert "does not depend on the score" in caplog.text


def functions(function, **parameters):
    return write.functions_of_sums(recorded(FunctionLink(function, **parameters)))


def test_functions_with_the_same_operations_share_kernels():
    """Whatever the names and values of their parameters, and whatever their numbers."""
    first, second, other = (
        functions(one) for one in (lambda s: s * 2.5, lambda t: t * 2.5, lambda s: s * -7.25)
    )
    assert first == second
    assert first[3:] == other[3:]
    assert (first.numbers, other.numbers) == ((2.5,), (-7.25,))
    third, fourth = functions(lambda s, k: s * k, k=ONE), functions(lambda s, t: s * t, t=2 * ONE)
    assert third[3:] == fourth[3:]
    assert first[3:] != third[3:]


def test_numbers_that_change():
    """A number that follows a schedule takes effect with every batch, and needs no new kernel."""
    at = [0.0]
    link = FunctionLink(lambda s: at[0] * s.sin())
    found = []
    for step in range(20):
        at[0] = 10.5 + step
        found.append(write.functions_of_sums(recorded(link)))
    assert len({one.pairs for one in found}) == 1
    assert [one.numbers for one in found] == [(10.5 + step,) for step in range(20)]


def test_a_kernel_reads_the_number_of_the_batch():
    at = [3.0]
    agree_link = FunctionLink(lambda s: at[0] * s)
    (problem,) = problems("views", *views(6, 8))
    for number in (3.75, 5.25):
        at[0] = number
        (value,), (exact_,) = (
            engine(problem).evaluate([Part(agree_link, "lse")]) for engine in (Fused, Dense)
        )
        torch.testing.assert_close(value, exact_, rtol=1e-5, atol=1e-5)


# The sums


def steep(s, k, m, a, b):
    """Value and derivatives are infinite at a score of 1, an anchor's score with itself."""
    return -k * torch.log(1 - s) + m.exp() * s + a * torch.tanh(s) + b


def links(numbers, anchors):
    return [
        FunctionLink(lambda s, k: k * s + 2 * s**3, k=numbers(3.0)),
        FunctionLink(steep, k=numbers(0.8, anchors), m=numbers(0.5), a=numbers(0.7), b=numbers(2.0, anchors)),
    ]


def parts(engine, numbers):
    """Parts of every kind, with two functions and one built-in link."""
    first, second = links(numbers, len(engine.problem.anchors))
    found = [
        Part(first, "lse"),
        Part(second, "lse"),
        Part(SoftmaxLink(numbers(0.3)), "lse"),
        Part(second, "lse", "negatives", 5),
        Part(first, "softplus"),
        Part(second, "sum"),
    ]
    if "view" in engine.problem.of_anchor:
        found.append(Part(second, "lse", "same view"))
    if engine.problem.positives is not None:
        found += [Part(second, kind, "positives") for kind in ("lse", "sum", "softplus")]
    return found


@pytest.mark.usefixtures("no_loop")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: infinite logits
@pytest.mark.parametrize("layout", ["views, ignore, same", "cross, negatives", "labels, ids, ignore"])
def test_sums_on_layouts(layout):
    rows, name, options = batch(layout)
    agree(parts, rows, name, **options)


@pytest.mark.usefixtures("no_loop")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_function_alone(dtype):
    tolerance = {} if dtype == torch.float32 else {"value": 1e-4, "gradient": 4e-3}
    agree(
        lambda engine, numbers: [Part(FunctionLink(lambda s: 5 * s + s.exp()), "lse")],
        views(35, 20, dtype=dtype),
        **tolerance,
    )


@pytest.mark.usefixtures("no_loop")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: logarithms of negative numbers
@pytest.mark.parametrize("kind", ["lse", "sum", "softplus"])
def test_nan_is_seen(kind):
    """A NaN logit makes its anchor's sum and derivatives NaN. Other anchors keep their values, and an anchor
    without candidates has an empty sum."""
    z = torch.randn(40, 8, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    z[:, 0] = z[:, 0].abs() + 4  # all scores are above 0,
    z[30] = -z[30]  # except those with row 30
    ignore = torch.zeros(40, 40, dtype=torch.bool, device=DEVICE)
    ignore[:10, 30] = True  # anchors 0 to 9 ignore row 30, and it is the positive of anchor 10
    ignore[8] = True
    found = []
    for engine, dtype in ((Fused, torch.float32), (Dense, torch.float64)):
        leaves = [half.to(dtype).requires_grad_() for half in z.split(20)]
        k = torch.full((40,), 0.8, dtype=dtype, device=DEVICE, requires_grad=True)
        (problem,) = problems("views", *leaves, ignore=ignore)
        link = FunctionLink(lambda s, k: k * s.log(), k=k)
        (value,) = engine(problem).evaluate([Part(link, kind)])
        *by_rows, by_k = torch.autograd.grad(value.sum(), [*leaves, k])
        assert value.isnan().tolist() == by_k.isnan().tolist() == [False] * 11 + [True] * 29
        assert float(value[8].detach()) == (-math.inf if kind == "lse" else 0)
        found.append([one.double() for one in (value.detach(), by_k, *by_rows)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: infinite slopes
@pytest.mark.parametrize("engine", [Fused, Chunked])
def test_infinite_slopes_of_who_takes_no_part(engine):
    """The slope is infinite at a score of 0, which engines assign to candidates outside the sum."""

    def roots(engine, numbers):
        link = FunctionLink(lambda s, k: 5 * k * s.abs().sqrt(), k=numbers(0.9))
        return [Part(link, kind, "negatives", few) for kind in ("lse", "softplus") for few in (None, 5)]

    _, name, options = batch("views, ignore", n=9)
    rows = views(9, 40, clusters=1)  # no score near 0, where rounding changes the slope
    agree(roots, rows, name, engine=engine, **options)


def test_what_the_kernels_lack_beside_what_they_have():
    def mixed(engine, numbers):
        lacking = FunctionLink(lambda s, k: k * torch.special.i0(s), k=numbers(1.5))
        had = FunctionLink(lambda s, k: k * s**3, k=numbers(3.0))
        return [Part(lacking, "lse"), Part(had, "lse"), Part(SoftmaxLink(0.4), "lse")]

    agree(mixed, views(9, 16))


def loss_of(z_i, z_j, k, engine=Fused):
    (problem,) = problems("views", z_i, z_j)
    (value,) = engine(problem).evaluate([Part(FunctionLink(lambda s, k: k * s + s**3, k=k), "lse")])
    return value.mean()


@pytest.mark.usefixtures("no_loop")
def test_in_a_transform_and_without_gradient():
    (z_i, z_j), k = views(6, 8), torch.tensor(2.0, device=DEVICE)
    wanted = torch.func.grad(loss_of, (0, 2))(z_i, z_j, k, Dense)
    torch.testing.assert_close(torch.func.grad(loss_of, (0, 2))(z_i, z_j, k), wanted, rtol=1e-4, atol=1e-6)
    with torch.inference_mode():
        value = loss_of(z_i, z_j, k)
    torch.testing.assert_close(value.clone(), loss_of(z_i, z_j, k, Dense), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("fresh_compiler")
def test_in_a_compiled_graph_it_takes_the_loop():
    (z_i, z_j), k = views(6, 8), torch.tensor(2.0, device=DEVICE, requires_grad=True)
    wanted = torch.autograd.grad(loss_of(z_i, z_j, k), k)
    traced = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(traced(z_i, z_j, k), k), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("no_loop")
def test_a_loss_with_such_a_link():
    loss, found = LinkLoss(lambda s: 5 * s + s**3), []
    z_i, z_j = views(7, 12)
    for engine, dtype in ((Fused, torch.float32), (Dense, torch.float64)):
        leaves = [z.to(dtype).requires_grad_() for z in (z_i, z_j)]
        (problem,) = problems("views", *leaves)
        value = loss._losses(engine(problem)).losses.mean()
        gradient = torch.cat(torch.autograd.grad(value, leaves)).double()
        found.append((float(value.detach()), gradient))
    (ours, mine), (theirs, gradient) = found
    assert abs(ours - theirs) < 2e-5
    assert float((mine - gradient).norm()) <= 2e-4 * float(gradient.norm())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.usefixtures("no_loop")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["views", "cross", "labels"])
def test_large_batches(layout, dtype):
    options = {"labels": torch.arange(3000, device=DEVICE) % 700} if layout == "labels" else {}
    agree(
        parts,
        views(3000, 128, clusters=40, dtype=dtype),
        layout,
        value=3e-5 if dtype == torch.float32 else 1e-4,
        gradient=1e-4 if dtype == torch.float32 else 4e-3,
        **options,
    )


@pytest.mark.usefixtures("no_loop")
def test_no_score_exceeds_1():
    """A function sees scores of equal rows, too many to be made exact, that are at most 1."""
    (z_i, _), link = views(12, 16), FunctionLink(lambda s: -(1e-12 + (1 - s)).sqrt())
    (problem,) = problems("cross", z_i, z_i.roll(1, 0), negatives=z_i.repeat(6, 1))
    (value,), (exact,) = (engine(problem).evaluate([Part(link, "lse")]) for engine in (Fused, Dense))
    torch.testing.assert_close(value, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("no_loop")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: log2(0)
def test_no_score_is_below_minus_1():
    """A function sees scores of opposite rows, whose rounding may exceed 1, that are at least -1, also of a positive.
    Below -1 this one would be NaN."""
    (z_i, z_j), link = views(20, 7, clusters=20), FunctionLink(lambda s: (1 + s) ** 1.5)
    rows = z_i, -z_i, torch.cat([-z_j, -1.7 * z_i.roll(1, 0)])
    # A score near -1 has an error of 2e-7, its slope one of 1.5 times the root of that.
    agree(lambda engine, numbers: [Part(link, "lse")], rows, "cross", gradient=1e-3)
    (problem,) = problems("cross", *rows[:2], negatives=rows[2])
    positive, exact = (link.logit(1 - engine(problem).positive_scores()) for engine in (Fused, Dense))
    torch.testing.assert_close(positive, exact, rtol=0, atol=1e-6)
