import math

import pytest
import torch

from weince import AffineLink, AtanhLink, BlendLink, FunctionLink, Link, PowerLink, ShortfallLink, SoftmaxLink
from weince.losses.kl_ball import MomentLink
from weince.parameters import check_positive

SCORES = torch.tensor([[-1.0, -0.3, 0.0, 0.4], [0.99, 0.99999, 1 - 5e-7, 1.0]], dtype=torch.float64)
PER_ANCHOR = {"lam": torch.tensor([0.3, 0.8]).double(), "beta": torch.tensor([2.0, 5.0]).double()}
LINKS = [
    SoftmaxLink(0.2),
    ShortfallLink(3.0),
    ShortfallLink(3.0, endpoint=1.2),
    PowerLink(2.0),
    AffineLink(3.0, -1.0),
    AtanhLink(),
    FunctionLink(lambda s, k: k * s.exp(), k=torch.tensor(2.0).double()),
    BlendLink(0.4, 3.0, 0.2),
    BlendLink(0.4, 3.0, 0.2, endpoint=1.3),
    BlendLink(0.4, 3.0, 0.2, soft_cap=False),
    BlendLink(temperature=0.2, **PER_ANCHOR),
    BlendLink(0.0, 0.0),
    BlendLink(1, 2.0),
]


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_slope_is_the_derivative_of_the_logit_by_the_score(link):
    shortfall = 1 - SCORES
    torch.testing.assert_close(link.slope(shortfall), Link.slope(link, shortfall), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("link", "formula"),
    [
        (SoftmaxLink(0.2), lambda s: s / 0.2),
        (ShortfallLink(3.0), lambda s: -3 * math.log(max(1 - s, 1e-6))),
        (ShortfallLink(3.0, endpoint=1.2), lambda s: -3 * math.log(1.2 - s)),
        (PowerLink(2.0), lambda s: 2 * math.log(max((1 + s) / 2, 1e-6))),
        (AffineLink(3.0, -1.0), lambda s: 3 * s - 1),
        (AtanhLink(), lambda s: math.log(max(1 + s, 1e-6)) - math.log(max(1 - s, 1e-6))),
        (MomentLink(3.0), lambda s: -3 * (1 - s)),
        (MomentLink(3.0, 2, 0.5), lambda s: 2 * math.log(max(1 - s, 1e-30)) - 3 * (1 - s - 0.5)),
        (FunctionLink(lambda s: 2 * s**3), lambda s: 2 * s**3),
        (
            BlendLink(0.4, 3.0, 0.2),
            lambda s: 0.6 * s / 0.2 - 0.4 * 3 * math.log(1e-6 + 1 - min(s, 1 - 1e-6)),
        ),
        (
            BlendLink(0.4, 3.0, 0.2, soft_cap=False),
            lambda s: 0.6 * s / 0.2 - 0.4 * 3 * math.log(1 - min(s, 1 - 1e-6)),
        ),
    ],
    ids=[
        "softmax",
        "shortfall",
        "endpoint",
        "power",
        "affine",
        "atanh",
        "moment of power 0",
        "moment of power 2",
        "function",
        "blend",
        "blend without eps",
    ],
)
def test_logit_follows_its_formula(link, formula):
    wanted = torch.tensor([[formula(float(s)) for s in row] for row in SCORES], dtype=torch.float64)
    torch.testing.assert_close(link.logit(1 - SCORES), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_a_higher_score_never_lowers_the_logit(link):
    assert (link.slope(1 - SCORES) >= 0).all()


def test_per_anchor_parameters_apply_by_row():
    both = BlendLink(temperature=0.2, **PER_ANCHOR)
    for row in range(2):
        alone = BlendLink(float(PER_ANCHOR["lam"][row]), float(PER_ANCHOR["beta"][row]), 0.2)
        torch.testing.assert_close(both.logit(1 - SCORES)[row], alone.logit(1 - SCORES[row]))
        torch.testing.assert_close(
            both.rows(row, row + 1).logit(1 - SCORES[row : row + 1])[0], both.logit(1 - SCORES)[row]
        )


def test_a_link_of_ones_own_needs_only_a_logit():
    class Cubic(Link):
        def logit(self, shortfall):
            return (1 - shortfall) ** 3

    torch.testing.assert_close(Cubic().slope(1 - SCORES), 3 * SCORES**2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftmaxLink(0.0), "temperature must be positive and finite; got 0.0"),
        (lambda: SoftmaxLink(math.nan), "temperature must be positive and finite; got nan"),
        (lambda: SoftmaxLink(torch.tensor(math.inf)), "temperature must be positive and finite; got inf"),
        (lambda: ShortfallLink(-1.0), "beta must be positive"),
        (lambda: ShortfallLink(1.0, endpoint=0.9), "endpoint must be at least 1"),
        (lambda: PowerLink(math.inf), "alpha must be positive"),
        (lambda: BlendLink(1.5, 1.0), r"lam must lie in \[0, 1\]; got 1.5"),
        (lambda: BlendLink(0.5, -1.0), "beta must be 0 or more, and finite; got -1.0"),
        (lambda: BlendLink(0.5, math.inf), "beta must be 0 or more, and finite; got inf"),
        (lambda: AffineLink(math.nan), "scale must be a finite number or a tensor; got nan"),
        (lambda: AffineLink(1.0, "0"), "bias must be a finite number or a tensor; got '0'"),
    ],
)
def test_bad_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_number_as_parameter_of_a_function_is_refused():
    with pytest.raises(TypeError, match=r"k must be a tensor, like .*; got float"):
        FunctionLink(lambda s, k: k * s, k=2.0)


def test_parameters_of_a_function_apply_by_row():
    each = torch.tensor([2.0, 5.0]).double()
    link = FunctionLink(lambda s, k: k * s, k=each)
    torch.testing.assert_close(link.logit(1 - SCORES), each.unsqueeze(1) * SCORES)
    torch.testing.assert_close(link.logit(1 - SCORES[:, 0]), each * SCORES[:, 0])  # one score per anchor
    torch.testing.assert_close(link.rows(1, 2).logit(1 - SCORES[1:]), 5 * SCORES[1:])
    torch.testing.assert_close(link.slope(1 - SCORES), each.unsqueeze(1).expand_as(SCORES))


def test_a_link_is_a_value():
    assert SoftmaxLink(0.2) == SoftmaxLink(0.2) != SoftmaxLink(0.3)
    with pytest.raises(AttributeError):
        SoftmaxLink(0.2).temperature = 0.3
    assert BlendLink(0.5, 1.0).replace({"beta": torch.tensor(2.0)}).tensors() == {"beta": torch.tensor(2.0)}


def test_a_tensor_is_not_read():
    check_positive("temperature", torch.tensor(-1.0, device="meta"))


CURVES = [
    SoftmaxLink(torch.tensor([0.1, 0.2, 0.5])),
    ShortfallLink(torch.tensor([1.0, 2.0, 4.0])),
    BlendLink(torch.tensor([0.1, 0.5, 0.9]), torch.tensor([1.0, 2.0, 4.0]), 0.2),
]


@pytest.mark.parametrize("link", CURVES, ids=lambda link: type(link).__name__)
@pytest.mark.parametrize("what", ["logit", "slope"])
def test_the_same_whether_gradients_are_recorded_or_not(link, what):
    """The result is the same, also if one row of shortfalls is broadcast to several anchors, or dtypes differ."""
    double = link.replace({name: value.double() for name, value in link.tensors().items()})
    constant = isinstance(link, SoftmaxLink) and what == "slope"  # it keeps the shape of the shortfalls
    for rows in (3,) if constant else (1, 3):
        shortfall = torch.linspace(0.01, 1.9, 5).repeat(rows, 1)
        for one in (link, double):
            wanted = getattr(one, what)(shortfall)
            with torch.no_grad():
                found = getattr(one, what)(shortfall)
            assert found.shape == (3, 5)
            torch.testing.assert_close(found, wanted.detach())


@pytest.mark.parametrize("link", CURVES[1:], ids=lambda link: type(link).__name__)
def test_a_slope_can_be_differentiated(link):
    shortfall = torch.linspace(0.1, 1.9, 5, dtype=torch.float64).repeat(3, 1).requires_grad_()
    (found,) = torch.autograd.grad(link.slope(shortfall).sum(), shortfall)
    step = 1e-6
    with torch.no_grad():
        wanted = (link.slope(shortfall + step) - link.slope(shortfall - step)) / (2 * step)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_function_link_has_no_subclass():
    with pytest.raises(TypeError, match="Mine must be a subclass of Link; got FunctionLink"):
        type("Mine", (FunctionLink,), {})
