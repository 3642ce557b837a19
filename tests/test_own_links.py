"""User-defined links and losses: what they may compute, and which ones are refused because they would be wrong."""

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial

import pytest
import torch
from started import Chunked, Dense
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from weince import (
    AffineLink,
    AtanhLink,
    ContrastiveLoss,
    Count,
    FunctionLink,
    HCLLoss,
    InfoNCELoss,
    Link,
    LinkLoss,
    LogSumExp,
    SigLIPLoss,
    SoftmaxLink,
    SoftplusSum,
)
from weince.layouts import problems
from weince.links import column
from weince.sums import Summed

ENGINES = ["dense", "chunked"]


def pairs(n=8, d=6):
    z_i = torch.randn(n, d, dtype=torch.float64)
    return z_i.requires_grad_(), (z_i.detach() + torch.randn(n, d, dtype=torch.float64)).requires_grad_()


def gradients(loss, rows):
    return torch.autograd.grad(loss, rows)


@dataclass(frozen=True)
class Logarithm(Link):
    """Infinite at a shortfall of 0, the shortfall of every row with itself."""

    def logit(self, shortfall):
        return -torch.log(shortfall)


@dataclass(frozen=True)
class Root(Link):
    """Finite at a shortfall of 0, with an infinite slope."""

    def logit(self, shortfall):
        return -2 * torch.sqrt(shortfall)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("link", "function"),
    [(Logarithm(), lambda s: -torch.log(1 - s)), (Root(), lambda s: -2 * torch.sqrt(1 - s))],
    ids=["logarithm", "root"],
)
def test_a_link_that_is_infinite_where_nobody_takes_part(link, function, engine):
    rows = pairs()
    found = LinkLoss(link, engine=engine)(*rows)
    wanted = LinkLoss(function, engine=engine)(*rows)
    torch.testing.assert_close(found, wanted)
    got = gradients(found, rows)
    assert all(gradient.isfinite().all() for gradient in got)
    torch.testing.assert_close(got, gradients(wanted, rows))


@dataclass(frozen=True)
class Elsewhere(Link):
    def logit(self, shortfall):
        return LEARNED * (1 - shortfall)


LEARNED = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("link", [lambda s: LEARNED * s, Elsewhere()], ids=["function", "subclass"])
def test_a_learned_tensor_that_is_no_parameter_is_refused(link, engine):
    """Its gradient through the sums would be missing."""
    rows = pairs()
    loss = LinkLoss(link, engine=engine)
    with pytest.raises(ValueError, match=r"must get a learned tensor as a parameter.* got .*from elsewhere"):
        loss(*rows)
    with torch.no_grad():
        value = loss(*rows)
    named = LinkLoss(FunctionLink(lambda s, k: k * s, k=LEARNED), engine=engine)(*rows)
    torch.testing.assert_close(value, named)
    assert gradients(named, [LEARNED])[0] != 0


def test_a_learned_tensor_may_be_read_for_the_positive():
    """The logit of the positive is plain torch code, so autograd differentiates it."""

    class Mine(ContrastiveLoss):
        def sums(self, batch):
            return LogSumExp(SoftmaxLink(0.5), positive=lambda s: LEARNED * s)

        def combine(self, lse):
            return lse.value - lse.positive

    z_i, z_j = pairs()
    scores = torch.cosine_similarity(z_i, z_j)
    (got,) = gradients(Mine(candidates="cross")(z_i, z_j), [LEARNED])
    torch.testing.assert_close(got, -scores.mean())


MAKERS = {
    "learned temperature": lambda **options: InfoNCELoss(nn.Parameter(torch.tensor(0.2)), **options),
    "siglip": SigLIPLoss,
    "function": lambda **options: LinkLoss(lambda s: 5 * s + s**3, **options),
    "subclass": lambda **options: LinkLoss(Root(), **options),
    "function that learns": lambda **options: LinkLoss(
        FunctionLink(lambda s, k: torch.exp(k * s), k=nn.Parameter(torch.tensor(1.5))), **options
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MAKERS)
def test_under_activation_checkpointing_and_offloading(name, engine):
    """Both set hooks on saved tensors, and torch.func raises an error under such hooks."""
    loss, rows = MAKERS[name](engine=engine).double(), pairs()
    leaves = [*rows, *loss.parameters()]
    wanted = gradients(loss(*rows), leaves)
    torch.testing.assert_close(gradients(checkpoint(loss, *rows, use_reentrant=False), leaves), wanted)
    with save_on_cpu():
        torch.testing.assert_close(gradients(loss(*rows), leaves), wanted)


def test_a_constant_link_has_no_slope():
    rows = pairs()
    for engine in ENGINES:
        found = LinkLoss(lambda s: torch.zeros_like(s), engine=engine)(*rows)
        torch.testing.assert_close(found, torch.tensor(15.0, dtype=torch.float64).log())
        assert not any(gradient.any() for gradient in gradients(found, rows))


def test_the_hardest_of_one_view_are_refused():
    with pytest.raises(ValueError, match="hardest counts the negatives of both views; got hardest=5"):
        LogSumExp(SoftmaxLink(0.1), hardest=5, same_view=True)


def test_a_count_may_be_changed_in_place():
    class Mine(ContrastiveLoss):
        def sums(self, batch):
            return [LogSumExp(SoftmaxLink(0.5)), Count()]

        def combine(self, lse, count):
            return lse.value - count.clamp_(min=1).log_()

    rows = pairs()
    plain, masked = Mine()(*rows), Mine()(*rows, ids=torch.arange(8))
    torch.testing.assert_close(plain, masked)


@pytest.mark.parametrize("engine", [Dense, Chunked])
def test_scores_of_opposite_rows_stay_within_their_range(engine):
    z = torch.randn(50, 3)
    (problem,) = problems("cross", z, -z)
    assert engine(problem).positive_scores().min() >= -1


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int32], ids=str)
def test_labels_and_ids_of_any_integer_dtype(dtype):
    z_i, z_j = pairs()
    labels = torch.arange(8) % 2
    loss = InfoNCELoss(0.2, candidates="labels")
    torch.testing.assert_close(loss(z_i, labels=labels.to(dtype)), loss(z_i, labels=labels))
    loss, queue = InfoNCELoss(0.2, candidates="cross"), torch.randn(3, 6, dtype=torch.float64)
    found = loss(z_i, z_j, negatives=queue, ids=labels.to(dtype))
    torch.testing.assert_close(found, loss(z_i, z_j, negatives=queue, ids=labels))


def test_no_anchor_at_all_is_said():
    nothing = torch.zeros(0, 4)
    with pytest.raises(ValueError, match=r"at least 1 anchor and 2 candidates; got anchors \(0, 4\)"):
        InfoNCELoss(candidates="cross")(nothing, nothing, negatives=torch.randn(5, 4))


@dataclass(frozen=True)
class Twice(SoftmaxLink):
    """Inherits the slope of another logit, which is not its own."""

    def logit(self, shortfall):
        return 2 * super().logit(shortfall)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_overridden_logit_does_not_keep_the_slope_of_its_parent(engine):
    rows = pairs()
    ours = gradients(LinkLoss(Twice(0.5), engine=engine)(*rows), rows)
    for own, right in zip(ours, gradients(InfoNCELoss(0.25)(*rows), rows), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-10, atol=1e-12)
    assert Twice.near_cap  # nor what the parent knows about its logit


@dataclass(frozen=True)
class WithSlope(Link):
    k: torch.Tensor

    def logit(self, shortfall):
        return column(self.k, shortfall) * (1 - shortfall) ** 3

    def slope(self, shortfall):
        return 3 * column(self.k, shortfall) * (1 - shortfall) ** 2


class SlopeByShortfall(WithSlope):
    def slope(self, shortfall):
        return -super().slope(shortfall)


class SlopeByCandidate(WithSlope):
    """Its slope takes one value per anchor for one per candidate by broadcasting."""

    def slope(self, shortfall):
        return 3 * self.k * (1 - shortfall) ** 2


class SlopeInPlace(WithSlope):
    def slope(self, shortfall):
        return shortfall.sub_(1).square_().mul_(3 * column(self.k, shortfall))


class LogitInPlace(WithSlope):
    def logit(self, shortfall):
        return shortfall.neg_().add_(1).pow_(3).mul_(column(self.k, shortfall))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slope_of_ones_own_must_be_the_derivative_by_the_score(engine):
    rows, k = pairs(), torch.linspace(2, 6, 8, dtype=torch.float64)
    options = {"candidates": "cross", "engine": engine}
    wanted = gradients(LinkLoss(FunctionLink(lambda s, k: k * s**3, k=k), **options)(*rows), rows)
    for right in (WithSlope(k), SlopeInPlace(k)):
        found = gradients(LinkLoss(right, **options)(*rows), rows)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match=r"must leave the shortfalls that it gets .*; got LogitInPlace"):
        LinkLoss(LogitInPlace(k), **options)(*rows)
    for wrong in (SlopeByShortfall(k), SlopeByCandidate(k)):
        with pytest.raises(ValueError, match="derivative of the logit by the score, which is minus that by"):
            LinkLoss(wrong, **options)(*rows)


@dataclass(frozen=True)
class ByCandidate(Link):
    """One value per anchor, taken for one per candidate by broadcasting."""

    k: torch.Tensor

    def logit(self, shortfall):
        return self.k * (1 - shortfall)


@dataclass(frozen=True)
class ByAnchor(Link):
    k: torch.Tensor

    def logit(self, shortfall):
        return column(self.k, shortfall) * (1 - shortfall)


@pytest.mark.parametrize("engine", ENGINES)
def test_values_of_anchors_are_not_taken_for_values_of_candidates(engine):
    rows, k = pairs(), torch.linspace(2, 6, 8, dtype=torch.float64)
    options = {"candidates": "cross", "engine": engine}
    with pytest.raises(
        ValueError, match=r"as column\(self.name, shortfall\), from weince.links; got ByCandidate"
    ):
        LinkLoss(ByCandidate(k), **options)(*rows)
    same = LinkLoss(FunctionLink(lambda s, k: k * s, k=k), **options)(*rows)
    torch.testing.assert_close(LinkLoss(ByAnchor(k), **options)(*rows), same)
    torch.testing.assert_close(
        LinkLoss(ByCandidate(k[:1]), **options)(*rows), InfoNCELoss(0.5, **options)(*rows)
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "function",
    [lambda s: s - s.mean(-1, keepdim=True), lambda s: s / s.norm(), lambda s: s.cumsum(-1)],
    ids=["less its mean", "over its norm", "cumulated"],
)
def test_a_link_that_mixes_scores_is_refused(function, engine):
    with pytest.raises(ValueError, match="map each score alone to its logit"):
        LinkLoss(function, engine=engine)(*pairs())


def times(factor, s):
    return factor * s


def cumulated(factor, s):
    return factor * s.cumsum(-1)


@dataclass
class Called:
    """An object without a hash."""

    function: Callable

    def __call__(self, s):
        return self.function(s)


@pytest.mark.parametrize(
    "wrap",
    [lambda function: partial(function, 5.0), lambda function: Called(partial(function, 5.0))],
    ids=["partial", "object"],
)
def test_a_link_is_not_taken_for_another_of_its_class(wrap):
    LinkLoss(wrap(times))(*pairs())
    with pytest.raises(ValueError, match="map each score alone to its logit"):
        LinkLoss(wrap(cumulated))(*pairs())


class Offset:
    """Has a method that mixes scores if asked to."""

    def __init__(self, mixes):
        self.mixes = mixes

    def link(self, s):
        return s - s.mean(-1, keepdim=True) if self.mixes else 5 * s


@dataclass(frozen=True)
class Applied(Link):
    function: Callable

    def logit(self, shortfall):
        return self.function(1 - shortfall)


def softmax_of(s):
    return s.log_softmax(-1)


FACTORIES = {
    "function in a closure": lambda mixes: (lambda function: lambda s: function(s))(
        softmax_of if mixes else torch.sigmoid
    ),
    "flag in a closure": lambda mixes: lambda s: s.cumsum(-1) if mixes else s,
    "default": lambda mixes: lambda s, mixes=mixes: s.cumsum(-1) if mixes else s,
    "argument of a partial": lambda mixes: partial(
        lambda function, s: function(s), softmax_of if mixes else torch.sigmoid
    ),
    "method": lambda mixes: Offset(mixes).link,
    "field": lambda mixes: Applied(softmax_of if mixes else torch.sigmoid),
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_functions_of_one_factory_are_links_of_their_own(factory):
    LinkLoss(factory(False))(*pairs())
    with pytest.raises(ValueError, match="map each score alone to its logit"):
        LinkLoss(factory(True))(*pairs())


def test_a_closure_made_for_each_batch_is_tried_once():
    """Trying it reads a value of the device. A schedule may change the number that it captures."""
    tried = []

    def closure(factor, owner):
        def link(s):
            tried.append(tuple(s.shape))
            return factor * s if owner else s

        return link

    owner, rows = Offset(False), [z.detach() for z in pairs()]
    for step in range(5):
        LinkLoss(closure(1.0 + step, owner))(*rows)
    assert tried.count((2, 2)) == 1
    LinkLoss(closure(1.0, Offset(False)))(*rows)
    assert tried.count((2, 2)) == 2


def test_objects_of_one_class_are_links_of_their_own():
    LinkLoss(nn.Sequential(nn.Tanh()))(*pairs())
    with pytest.raises(ValueError, match="map each score alone to its logit"):
        LinkLoss(nn.Sequential(nn.LogSoftmax(-1)))(*pairs())


class Own(ContrastiveLoss):
    """A loss whose sums and combination are given as functions."""

    def __init__(self, asked, combined, **options):
        super().__init__(**options)
        self.asked, self.combined = asked, combined

    def sums(self, batch):
        return self.asked()

    def combine(self, lse):
        return self.combined(lse)


def softmax():
    return LogSumExp(SoftmaxLink(0.1))


@pytest.mark.parametrize(
    ("combined", "got"),
    [
        (lambda lse: lse.cross_entropy().mean(), r"\(\)"),
        (lambda lse: lse.cross_entropy().unsqueeze(1), r"\(16, 1\)"),
        (lambda lse: 1.0, "float"),
    ],
    ids=["mean", "column", "number"],
)
def test_combine_must_return_one_loss_per_anchor(combined, got):
    with pytest.raises(ValueError, match=rf"one loss per anchor, \(16,\).*; got {got}"):
        Own(softmax, combined)(*pairs())


def test_combine_must_pass_the_gradient_on():
    rows = pairs()
    loss = Own(softmax, lambda lse: lse.cross_entropy().detach())
    with pytest.raises(
        ValueError, match=r"combine of Own must return losses with a gradient; got detached ones"
    ):
        loss(*rows)
    with torch.no_grad():
        value = loss(*rows)
    torch.testing.assert_close(loss(*(row.detach() for row in rows)), value)


def test_what_sums_may_return():
    def cross_entropy(lse):
        return lse.cross_entropy()

    with pytest.raises(TypeError, match=r"sums must return a LogSumExp.*; got generator"):
        Own(lambda: (softmax() for _ in range(1)), cross_entropy)(*pairs())
    with pytest.raises(TypeError, match=r"sums must return a LogSumExp.*; got SoftmaxLink"):
        Own(lambda: SoftmaxLink(0.1), cross_entropy)(*pairs())
    with pytest.raises(
        ValueError, match="wants same_view = True in the class of the loss; got Own without it"
    ):
        Own(lambda: LogSumExp(SoftmaxLink(0.1), same_view=True), cross_entropy)(*pairs())
    with pytest.raises(ValueError, match="among must be one of negatives, positives; got 'positive'"):
        SoftplusSum(AffineLink(1.0), among="positive")


@pytest.mark.parametrize("made", [SoftmaxLink, AtanhLink])
def test_a_link_without_its_parentheses_is_refused(made):
    """Called with scores, the class would take them for its first field."""
    with pytest.raises(TypeError, match=f"a link must be a Link, like .*; got <class .*{made.__name__}"):
        LinkLoss(made)


def test_a_wrong_option_names_the_right_ones_however_a_loss_calls_the_rest():
    class Mine(ContrastiveLoss):
        def __init__(self, steepness=1.0, **kwargs):
            super().__init__(**kwargs)

    with pytest.raises(TypeError, match="Mine has no option 'steep'; it takes steepness, candidates, red"):
        Mine(steep=1.0)


class SoftTriplet(ContrastiveLoss):
    """``sum log(1 + exp(10 (s - s+)))``: the positive's score is in the logit of each negative."""

    def sums(self, batch):
        return SoftplusSum(AffineLink(10.0, -10 * batch.positive_scores()))

    def combine(self, total):
        return total


@pytest.mark.parametrize("engine", ENGINES)
def test_the_score_of_the_positive_in_a_link_has_a_gradient(engine):
    rows = pairs()
    scores = nn.functional.normalize(rows[0]) @ nn.functional.normalize(rows[1]).T
    wanted = nn.functional.softplus(10 * (scores - scores.diag().unsqueeze(1)))
    wanted = wanted.masked_fill(torch.eye(8, dtype=torch.bool), 0).sum(1).mean()
    found = SoftTriplet(candidates="cross", engine=engine)(*rows)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, rows), gradients(wanted, rows))


def test_the_one_positive_of_several_is_refused():
    class Scores(ContrastiveLoss):
        def sums(self, batch):
            return LogSumExp(SoftmaxLink(batch.positive_scores().clamp_min(0.1)))

        def combine(self, lse):
            return lse.cross_entropy()

    assert Scores()(*pairs()).isfinite()
    with pytest.raises(ValueError, match="score of the one positive was asked for; got labels, so several"):
        Scores(candidates="labels")(pairs()[0], labels=torch.arange(8) // 2)


def test_a_second_derivative_of_the_positive_alone_raises():
    z_i, z_j = pairs()
    loss = Own(softmax, lambda lse: -lse.positive, candidates="cross")
    [first] = torch.autograd.grad(loss(z_i, z_j), z_i, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        first.square().sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_of_anchors_in_another_dtype(engine):
    z_i, z_j = (z.detach().float().requires_grad_() for z in pairs())
    every = torch.full((16,), 0.1, dtype=torch.float64)
    loss = InfoNCELoss(every, engine=engine)(z_i, z_j)
    assert loss.dtype == torch.float32
    ours, right = (
        gradients(value, (z_i, z_j)) for value in (loss, InfoNCELoss(0.1, engine=engine)(z_i, z_j))
    )
    torch.testing.assert_close(ours, right)


KNOTS = torch.linspace(-1, 1, 5, dtype=torch.float64)  # as torch.from_numpy gives them
HEIGHTS = 5 * KNOTS + KNOTS**3


def spline(s):
    right = torch.bucketize(s, KNOTS).clamp(1, 4)
    left = right - 1
    along = (s - KNOTS[left]) / (KNOTS[right] - KNOTS[left])
    return torch.lerp(HEIGHTS[left], HEIGHTS[right], along)


class Splines(ContrastiveLoss):
    def sums(self, batch):
        return [
            LogSumExp(spline),
            LogSumExp(spline, hardest=3),
            SoftplusSum(spline),
            SoftplusSum(spline, among="positives"),
        ]

    def combine(self, every, hardest, negatives, positives):
        return every.cross_entropy() + hardest.cross_entropy() + negatives + positives


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("candidates", ["views", "labels"])
def test_a_link_that_reads_constants_in_another_dtype(engine, candidates):
    """A user's table of knots in float64 makes float64 logits of float32 scores."""
    exact = pairs()
    rows = [z.detach().float().requires_grad_() for z in exact]
    labels = {"labels": torch.arange(8) % 3} if candidates == "labels" else {}
    loss = Splines(candidates=candidates, engine=engine)
    found, wanted = loss(*rows, **labels), loss(*exact, **labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted.float())
    for got, right in zip(gradients(found, rows), gradients(wanted, exact), strict=True):
        torch.testing.assert_close(got, right.float(), rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Cached(Link):
    """Computes a field from another one, which is learned."""

    k: torch.Tensor
    square: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "square", self.k**2)

    def logit(self, shortfall):
        return column(self.square, shortfall) * (1 - shortfall)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(), (16,)], ids=["one", "of every anchor"])
def test_a_field_that_a_link_computes_itself(shape, engine):
    rows, k = pairs(), torch.full(shape, 1.5, dtype=torch.float64, requires_grad=True)
    link = FunctionLink(lambda s, k: k**2 * s, k=k)
    found, wanted = (LinkLoss(own, engine=engine)(*rows) for own in (Cached(k), link))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, [*rows, k]), gradients(wanted, [*rows, k]))


@dataclass(frozen=True)
class Changed(Link):
    """Changes a field from which copies are made, so that a copy changes it once more."""

    k: torch.Tensor

    def __post_init__(self):
        object.__setattr__(self, "k", self.k.exp())

    def logit(self, shortfall):
        return column(self.k, shortfall) * (1 - shortfall)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(), (16,)], ids=["one", "of every anchor"])
def test_a_field_that_a_link_changes_is_refused(shape, engine):
    """Its gradient would be wrong."""
    k = torch.full(shape, 0.7, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match=r"computes into a field\(init=False\); got Changed"):
        LinkLoss(Changed(k), engine=engine)(*pairs())


@dataclass(frozen=True)
class Scaled(Link):
    """Takes a number that is no field."""

    factor: InitVar[float]
    k: float | torch.Tensor = 2.0
    scale: torch.Tensor = field(init=False)

    def __post_init__(self, factor):
        object.__setattr__(self, "scale", self.k * factor)

    def logit(self, shortfall):
        return self.scale * (1 - shortfall)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_link_that_takes_what_is_no_field(engine):
    rows = pairs()
    torch.testing.assert_close(LinkLoss(Scaled(5.0), engine=engine)(*rows), InfoNCELoss(0.1)(*rows))
    with pytest.raises(ValueError, match=r"(?s)must be determined by its fields.* got .*argument: 'factor'"):
        LinkLoss(Scaled(5.0, nn.Parameter(torch.tensor(2.0))), engine=engine)
    with pytest.raises(ValueError, match=r"(?s)must be determined by its fields.* got .*argument: 'factor'"):
        LinkLoss(Scaled(5.0, torch.tensor(2.0)), engine=engine)(*rows)


@dataclass(frozen=True)
class Named(Link):
    """Takes its fields by name only."""

    _: KW_ONLY
    k: torch.Tensor

    def logit(self, shortfall):
        return self.k * (1 - shortfall)


def test_a_link_that_takes_its_fields_by_name_only():
    rows, loss = pairs(), LinkLoss(Named(k=nn.Parameter(torch.tensor(3.0))))
    torch.testing.assert_close(loss(*rows), InfoNCELoss(1 / 3)(*rows))
    assert [name for name, _ in loss.named_parameters()] == ["k"]


@pytest.mark.parametrize("name", ["tail", "hardest", "link"])
def test_a_parameter_that_bears_the_name_of_an_attribute(name):
    link = FunctionLink(lambda s, **own: own[name] * s, **{name: nn.Parameter(torch.tensor(3.0))})
    with pytest.raises(ValueError, match=f"a name that LinkLoss does not use; got '{name}'"):
        LinkLoss(link)
    with pytest.raises(ValueError, match=r"q must hold one value, .* 16 anchors; got shape \(1, 1\)"):
        LinkLoss(FunctionLink(lambda s, q: q * s, q=nn.Parameter(torch.ones(1, 1))))(*pairs())


def test_hcl_has_a_gradient_where_all_negatives_are_expected_to_be_false():
    """There ``log1p(-exp(x))`` is infinite: ``x`` is so near to 0 that its exponential rounds to 1."""
    loss = HCLLoss(0.5, false_negatives=0.1)
    positive = torch.zeros(1000, requires_grad=True)
    seen = (torch.log(torch.tensor(0.1)) + torch.linspace(-1e-7, 1e-7, 1000)).requires_grad_()
    link, count = SoftmaxLink(0.5), torch.ones(1000)
    harder = Summed(seen, positive, None, link)
    weights = Summed(torch.zeros(1000), positive, None, link)
    loss.combine(harder, count, weights).sum().backward()
    assert seen.grad.isfinite().all()
    assert positive.grad.isfinite().all()
