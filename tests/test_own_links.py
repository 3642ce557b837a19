"""User-defined links and losses: what they may compute, and which ones are refused because they would be wrong."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from weince import (
    ContrastiveLoss,
    Count,
    FunctionLink,
    InfoNCELoss,
    Link,
    LinkLoss,
    LogSumExp,
    SigLIPLoss,
    SoftmaxLink,
)
from weince.candidates import contests
from weince.engines.chunked import Chunked
from weince.engines.dense import Dense

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
    (contest,) = contests("cross", z, -z)
    assert engine(contest).positive_scores().min() >= -1


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
