"""Sums over the hardest negatives on the fused engine. Without a GPU it runs in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

pytest.importorskip("triton", minversion="3.5")

from fused_cases import DEVICE

from weince.candidates import contests
from weince.engines.fused import Fused
from weince.engines.tile import Part
from weince.links import SoftmaxLink


def at(rows, shortfall):
    """Unit rows at this shortfall from unit rows."""
    step = torch.randn_like(rows)
    step -= (step * rows).sum(1, keepdim=True) * rows
    return rows + (2 * shortfall) ** 0.5 * torch.nn.functional.normalize(step)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("copies", [1, 6])
def test_the_hardest_near_the_cap(number, copies):
    """A pass has exact shortfalls of four negatives, which tell them apart. Of six copies of one negative it has
    rounded ones too, and all take part."""
    z_i, z_j = torch.randn(2, 40, 16, device=DEVICE)
    z_i = torch.nn.functional.normalize(z_i)
    near = [at(z_i, 1e-5 + 2e-6 * k) for k in range(4)] if copies == 1 else [at(z_i, 1e-5)] * copies
    (contest,) = contests("cross", z_i, z_j, negatives=torch.cat(near))
    (value,) = Fused(contest).evaluate([Part(SoftmaxLink(1.0), "lse", "negatives", number)])
    taken = (value - 1).exp()  # each adds exp(1)
    wanted = number if copies == 1 else copies
    torch.testing.assert_close(taken, torch.full_like(taken, wanted), rtol=1e-3, atol=0)
