"""Hypothesis: loss and gradient are finite for any shape, dtype and extreme value; in float64, symmetries hold."""

import pytest
import torch
from cases import CASES, Case, fixed, learned
from hypothesis import given, settings
from hypothesis import strategies as st

from weince import BlendLink, DCLLoss, InfoNCELoss, LinkLoss, RINCELoss, SigLIPLoss, WeibitLoss, WeinceLoss

pytestmark = pytest.mark.filterwarnings("ignore:weince")  # batches without contrast warn

LOSSES = {
    **CASES,
    "low temperature": Case(lambda p, **o: InfoNCELoss(p(0.01), **o), None),
    "DCL, low temperature": Case(lambda p, **o: DCLLoss(p(0.01), **o), None),
    "RINCE, q = 1": Case(lambda p, **o: RINCELoss(p(0.1), q=1.0, **o), None, labels=False),
    "SigLIP, steep": Case(lambda p, **o: SigLIPLoss(scale=1000.0, **o), None),
    "steep weibit": Case(lambda p, **o: WeibitLoss(p(20.0), **o), None),
    "blend": Case(lambda p, **o: LinkLoss(BlendLink(p(0.6), p(5.0)), **o), None),
    "paper as it is": Case(lambda p, **o: WeinceLoss.paper(p(0.5), **o), None),
}
MAY_BE_NEGATIVE = {
    "DCL", "DCLW", "DHEL", "RINCE", "AlignUniform", "KLBall", "one's own", "DCL, low temperature", "RINCE, q = 1",
}  # fmt: skip
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = 65  # times 31 losses: 2,015 cases

SPOILERS = ["zero rows", "duplicates", "constant", "opposite", "nearly equal", "same as positive"]


@st.composite
def batches(draw, dtypes=DTYPES):
    """Two tensors (n, d), possibly with degenerate rows and extreme lengths."""
    n, d = draw(st.integers(2, 20)), draw(st.integers(1, 16))
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    z_i = torch.randn(n, d, generator=generator, dtype=torch.float64)
    z_j = z_i + draw(st.sampled_from([0.0, 1e-6, 0.1, 2.0])) * torch.randn(
        n, d, generator=generator, dtype=torch.float64
    )
    for spoiler in draw(st.lists(st.sampled_from(SPOILERS), max_size=3, unique=True)):
        z_i, z_j = spoil(spoiler, z_i, z_j, draw(st.integers(0, n - 1)))
    largest = 3 if dtype == torch.float16 else 20
    exponent = torch.empty(2, n, 1, dtype=torch.float64).uniform_(-largest, largest, generator=generator)
    sign = draw(st.sampled_from([1.0, -1.0]))
    z_i, z_j = sign * unit(z_i) * 10 ** exponent[0], unit(z_j) * 10 ** exponent[1]
    z_i, z_j = z_i.to(dtype), z_j.to(dtype)
    if draw(st.booleans()):  # not contiguous
        z_i, z_j = z_i.T.contiguous().T, torch.stack([z_j, z_j], 2)[..., 0]
    return z_i, z_j


def unit(z):
    return z / z.norm(dim=1, keepdim=True).clamp_min(1e-300)


def spoil(how, z_i, z_j, row):
    z_i, z_j = z_i.clone(), z_j.clone()
    if how == "zero rows":
        z_i[row], z_j[-1] = 0, 0
    elif how == "duplicates":
        z_i[:], z_j[:] = z_i[torch.arange(len(z_i)) % (row + 1)], z_j[torch.arange(len(z_j)) % (row + 1)]
    elif how == "constant":
        z_i[:], z_j[:] = z_i[row], z_i[row]
    elif how == "opposite":
        z_j = -z_i
    elif how == "nearly equal":
        z_i = z_i[row] + 1e-4 * z_i
    else:
        z_j[row] = z_i[row]
    return z_i, z_j


def run(loss, z_i, z_j, **arguments):
    z_i, z_j = z_i.clone().requires_grad_(), z_j.clone().requires_grad_()
    value = loss(z_i, z_j, **arguments)
    return value.detach(), *torch.autograd.grad(
        value.sum(), [z_i, z_j, *(p for p in loss.parameters() if p.requires_grad)]
    )


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=EXAMPLES)
@given(
    batch=batches(),
    candidates=st.sampled_from(["views", "cross", "clip", "labels"]),
    roles=st.sets(st.sampled_from(["ids", "ignore"])),
    groups=st.integers(1, 12),
    engine=st.sampled_from(["dense", "chunked"]),
)
def test_finite(name, batch, candidates, roles, groups, engine):
    """The loss and its gradients by rows and learned parameters are finite."""
    (z_i, z_j), case = batch, LOSSES[name]
    if case.views_only or (candidates == "labels" and not case.labels):
        candidates = "views"
    arguments = {}
    if candidates == "labels":
        arguments["labels"] = torch.arange(len(z_i)) % groups
    if "ids" in roles:
        arguments["ids"] = torch.arange(len(z_i)) % max(1, len(z_i) // 2)
    if "ignore" in roles:
        rows = len(z_i) if candidates in ("cross", "clip") else 2 * len(z_i)
        arguments["ignore"] = torch.arange(rows).unsqueeze(1) % groups == torch.arange(rows) % 3
    loss, grad_i, grad_j, *others = run(
        case.make(learned, candidates=candidates, engine=engine), z_i, z_j, **arguments
    )
    assert loss.isfinite()
    assert name in MAY_BE_NEGATIVE or loss >= 0
    assert loss.dtype == (torch.float64 if z_i.dtype == torch.float64 else torch.float32)
    assert all(grad.isfinite().all() for grad in others)
    for rows, grad in ((z_i, grad_i), (z_j, grad_j)):
        assert grad.dtype == rows.dtype
        assert grad.isfinite().all()
        assert grad[(rows == 0).all(1)].abs().sum() == 0, "a zero row has no direction to improve"


@st.composite
def smooth_batches(draw):
    """Float64 batches away from the cap, where rounding changes nothing by more than 1e-9."""
    n, d = draw(st.integers(3, 20)), draw(st.integers(2, 16))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    z_i = torch.randn(n, d, generator=generator, dtype=torch.float64)
    z_j = z_i + torch.randn(n, d, generator=generator, dtype=torch.float64)
    scale = 10 ** torch.empty(2, n, 1, dtype=torch.float64).uniform_(-15, 15, generator=generator)
    order = torch.randperm(n, generator=generator)
    return z_i, z_j, scale, order


def made(name, candidates):
    case = LOSSES[name]
    return case.make(fixed, candidates="views" if case.views_only else candidates)


def close(got, wanted):
    largest = float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9 * largest)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8)
@given(smooth_batches())
def test_the_length_of_a_row_does_not_matter(name, batch):
    z_i, z_j, scale, _ = batch
    loss, grad_i, grad_j = run(made(name, "views"), z_i, z_j)[:3]
    scaled, scaled_i, scaled_j = run(made(name, "views"), z_i * scale[0], z_j * scale[1])[:3]
    close(scaled, loss)
    close(scaled_i * scale[0], grad_i)
    close(scaled_j * scale[1], grad_j)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("candidates", ["views", "cross"])
@settings(max_examples=6)
@given(batch=smooth_batches())
def test_the_order_of_the_batch_does_not_matter(name, candidates, batch):
    z_i, z_j, _, order = batch
    loss, grad_i, grad_j = run(made(name, candidates), z_i, z_j)[:3]
    moved, moved_i, moved_j = run(made(name, candidates), z_i[order], z_j[order])[:3]
    close(moved, loss)
    close(moved_i, grad_i[order])
    close(moved_j, grad_j[order])
