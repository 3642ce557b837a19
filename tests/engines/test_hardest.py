"""Sums over the hardest negatives on the fused engine. Without a GPU it runs in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

pytest.importorskip("triton", minversion="3.5")

from fused_cases import DEVICE, agree, views
from started import Chunked, Dense, Fused

from weince.layouts import problems
from weince.links import BlendLink, SoftmaxLink
from weince.sums import Need, Part
from weince.tail import TailConfig


def at(rows, shortfall):
    """Unit rows at this shortfall from unit rows."""
    step = torch.randn_like(rows)
    step -= (step * rows).sum(1, keepdim=True) * rows
    return rows + (2 * shortfall) ** 0.5 * torch.nn.functional.normalize(step)


@pytest.mark.parametrize("engine", [Dense, Chunked, Fused])
@pytest.mark.parametrize("number", [1, 3, 4])
@pytest.mark.parametrize("copies", [1, 6])
def test_the_hardest_near_the_cap(copies, number, engine):
    """Engines have exact shortfalls of four negatives, which tell them apart. Of six copies of one negative they have
    rounded ones too, and all take part."""
    z_i, z_j = torch.randn(2, 40, 16, device=DEVICE)
    z_i = torch.nn.functional.normalize(z_i)
    near = [at(z_i, d) for d in (1e-5, 1.03e-5, 1.2e-5, 1.4e-5)] if copies == 1 else [at(z_i, 1e-5)] * copies
    negatives = torch.cat(near).requires_grad_()
    (problem,) = problems("cross", z_i, z_j, negatives=negatives)
    need = Need() if engine is Fused else Need(TailConfig(k=1), (number,))  # with a tail, all have exact ones
    (value,) = engine(problem, need).evaluate([Part(SoftmaxLink(1.0), "lse", "negatives", number)])
    taken = (value - 1).exp()  # each adds exp(1)
    wanted = number if copies == 1 else copies
    torch.testing.assert_close(taken, torch.full_like(taken, wanted), rtol=1e-3, atol=0)
    (by_negative,) = torch.autograd.grad(value.sum(), negatives)
    assert int(by_negative.any(1).sum()) == 40 * wanted


def test_the_gradient_has_the_hardest_of_the_sum():
    """Every row occurs twice, so the last of the hardest is tied with its copy. The kernels have rounded shortfalls
    of both, and the exact one of a pair that is among the four nearest of its other row. The gradient must compare
    the threshold with the rounded ones, as the sum does, or it loses negatives of the sum."""
    rows = [row.repeat(2, 1) for row in views(24, 16)]
    agree(lambda engine, numbers: [Part(SoftmaxLink(1.0), "lse", "negatives", 5)], rows)


def test_a_thousand_hardest():
    """A tail of 1,024, the largest that the kernels fit; a sum over the hardest 1,023, the most that they find; one
    over 1,024, which the chunked engine computes. With more than 1,024 candidates, the search begins with a sample.
    """
    rows = (*views(3, 16), torch.randn(1200, 16, device=DEVICE))
    need = Need(TailConfig(k=1024), (1023,))

    def parts(engine, numbers):
        link = SoftmaxLink(numbers(0.4))
        blend = BlendLink(engine.stats.lam.to(numbers.dtype), engine.stats.beta.to(numbers.dtype), 0.3)
        return [Part(blend, "lse"), *(Part(link, "lse", "negatives", number) for number in (1023, 1024))]

    (engine,) = agree(parts, rows, "cross", need)
    (problem,) = problems("cross", *(row.double() for row in rows[:2]), negatives=rows[2].double())
    for mine, exact in zip(engine.stats, Dense(problem, need).stats, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)
