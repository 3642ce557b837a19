"""Scores and products; what needs a GPU is in ``test_gpu.py``."""

import pytest
import torch

from weince import scores


@pytest.fixture
def tf32_switch():
    """Switch TensorFloat-32 on or off. torch 2.9 has a newer setting and forbids mixing the two."""
    matmul = torch.backends.cuda.matmul
    name, values = (
        ("fp32_precision", ("ieee", "tf32"))
        if hasattr(matmul, "fp32_precision")
        else ("allow_tf32", (False, True))
    )
    before = getattr(matmul, name)
    yield lambda on: setattr(matmul, name, values[on])
    setattr(matmul, name, before)


@pytest.mark.parametrize("on", [True, False])
def test_the_tf32_switch_is_read(tf32_switch, on):
    tf32_switch(on)
    assert scores._tf32_may_be_on() == on


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_graph_splits_numbers_the_same_way():
    x = torch.randn(1000)
    assert torch.equal(torch.compile(scores._leading_bits, fullgraph=True)(x), scores._leading_bits(x))
    seen = torch.compile(lambda x: x + scores._tf32_may_be_on(), fullgraph=True)(torch.zeros(1))
    assert seen == 1


def test_leading_and_trailing_bits_give_back_the_number():
    x = torch.randn(1000)
    high = scores._leading_bits(x)
    assert ((x - high).abs() <= 2**-10 * x.abs()).all()
    assert torch.equal(high + (x - high), x)
    assert torch.equal(scores._leading_bits(high), high)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unit_rows_have_length_1_whatever_their_norm(dtype):
    exponent = {torch.float16: 3, torch.float64: 300}.get(dtype, 37)
    rows = torch.randn(50, 7, dtype=torch.float64)
    powers = 10.0 ** torch.linspace(-exponent, exponent, 50, dtype=torch.float64)
    rows = (rows / rows.norm(dim=1, keepdim=True) * powers[:, None]).to(dtype)
    torch.testing.assert_close(
        scores.unit_rows(rows).norm(dim=1).double(), torch.ones(50).double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("into", [None, torch.full((200, 400), torch.nan)], ids=["new", "into"])
def test_a_shortfall_is_never_below_0_nor_above_2(into):
    """A user-defined link may take the root or the logarithm of a shortfall."""
    rows = scores.unit_rows(torch.randn(200, 30))
    assert (rows @ rows.T).max() > 1
    found = scores.shortfalls(rows, torch.cat([rows, -rows]), into)
    assert into is None or found is into
    assert (found.min(), found.max()) == (0, 2)


def test_a_short_float16_row_does_not_shrink_the_gradient_of_another():
    rows = torch.tensor([[1e-6, 0.0], [1.0, 0.0]], dtype=torch.float16, requires_grad=True)
    scores.unit_rows(rows).backward(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    assert rows.grad.tolist() == [[0, 65504], [0, 1]]
