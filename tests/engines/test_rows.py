"""The kernels for unit rows against the definition in float64. Without a GPU they run in Triton's interpreter."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

pytest.importorskip("triton", minversion="3.5")

from weince import scores  # noqa: E402
from weince.engines.kernels import launch, ops  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def _by_kernels(monkeypatch):
    """Use the kernels for unit rows on a CPU too, through the interpreter."""
    kernels = scores.RowKernels(
        lambda source: source.dtype != torch.float64, launch.unit_rows, launch.unit_gradient
    )
    monkeypatch.setattr(scores, "row_kernels", kernels)


def wanted(source, grad):
    """Unit rows and the gradient of the rows, in float64."""
    wide = source.double().requires_grad_()
    scale = wide.detach().abs().amax(1, keepdim=True)
    scaled = wide / torch.where(scale > 0, scale, 1)
    length = scaled.square().sum(1, keepdim=True).sqrt()
    unit = scaled / torch.where(length > 0, length, 1)
    (by_row,) = torch.autograd.grad(unit, wide, grad.double())
    return unit.detach(), torch.where(scale > 0, by_row, 0)


def check(source, grad):
    leaf = source.detach().requires_grad_()  # a clone would be contiguous
    unit = scores.unit_rows(leaf)
    assert unit.dtype == torch.float32
    unit.backward(grad)
    expected, by_row = wanted(source, grad)
    torch.testing.assert_close(unit.double(), expected, rtol=1e-6, atol=1e-7)
    # The gradient is a difference of two numbers as large as `peak`, each rounded to float32; 0 for a zero row.
    peak = (grad.double().norm(dim=1, keepdim=True) / source.double().norm(dim=1, keepdim=True)).nan_to_num(
        0, posinf=0
    )
    rounding = max(torch.finfo(source.dtype).eps, torch.finfo(torch.float32).eps) * 4
    assert leaf.grad.dtype == source.dtype
    assert bool(((leaf.grad.double() - by_row).abs() <= rounding * peak + 1e-37).all())


@pytest.mark.usefixtures("_by_kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "d"), [(1, 1), (5, 3), (33, 17), (40, 128), (3, 700)])
def test_unit_rows_and_their_gradient(dtype, n, d):
    generator = torch.Generator().manual_seed(n + d)
    source = torch.randn(n, d, generator=generator).to(DEVICE, dtype)
    check(source, torch.randn(n, d, generator=generator).to(DEVICE))


@pytest.mark.usefixtures("_by_kernels")
@settings(max_examples=40)
@given(
    exponents=st.lists(st.integers(-37, 37), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    zero=st.booleans(),
)
def test_rows_of_any_length(exponents, seed, zero):
    generator = torch.Generator().manual_seed(seed)
    lengths = 10.0 ** torch.tensor(exponents).double()
    source = (torch.randn(len(exponents), 5, generator=generator) * lengths.unsqueeze(1)).float()
    grad = torch.randn(len(exponents), 5, generator=generator) * lengths.float().clamp(max=1).unsqueeze(1)
    if zero:
        source[0] = 0
    check(source.to(DEVICE), grad.to(DEVICE))


@pytest.mark.usefixtures("_by_kernels")
def test_rows_that_are_not_contiguous():
    whole = torch.randn(12, 40, device=DEVICE)
    for source in (whole[:, ::2], whole[::2, :20], whole[:20].T):
        n, d = source.shape
        check(source, torch.randn(d, n, device=DEVICE).T)
        check(source, torch.randn(n, d + 3, device=DEVICE)[:, :d])


@pytest.mark.usefixtures("_by_kernels")
def test_the_gradient_of_short_float16_rows_keeps_its_direction():
    """A row of the gradient beyond the range of float16 is scaled down as a whole, as without kernels."""
    rows = [[6e-8, 0.0], [0.0, 1.0], [6e-8, 0.0]]
    source = torch.tensor(rows, dtype=torch.float16, device=DEVICE).requires_grad_()
    scores.unit_rows(source).backward(torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0]], device=DEVICE))
    assert source.grad.tolist() == [[0.0, 65504.0], [1.0, 0.0], [0.0, -65504.0]]


@pytest.mark.usefixtures("_by_kernels")
def test_a_second_derivative_is_refused():
    source = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(scores.unit_rows(source).square().sum(), source, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        grad.sum().backward()


def test_what_the_kernels_serve():
    there = torch.randn(2, 3, device=DEVICE)
    assert ops.rows_served(there) == (DEVICE == "cuda")
    assert not ops.rows_served(there.double())
    assert not ops.rows_served(torch.empty(1, launch.WIDEST + 1, device=DEVICE))
