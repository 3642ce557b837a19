"""The ``released`` preset against what the authors' released code computes, in float64."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from weince import InfoNCELoss, WeibitLoss, WeinceLoss
from weince.losses.weince import RELEASED_TAIL
from weince.scores import shortfalls, unit_rows
from weince.tail import fit_tail, nearest_rank

DATA = Path(__file__).parent / "data"
CASES = ["0_random", "1_clustered", "2_nearcap", "3_clustered"]
LOSSES = {
    "pl": lambda: InfoNCELoss(0.5),
    "weibit_beta4": lambda: WeibitLoss(4.0),
    "tlambda": lambda: WeinceLoss.paper(0.5, tail=RELEASED_TAIL),
    "tlambda_rho": lambda: WeinceLoss.paper(0.5, tail=replace(RELEASED_TAIL, gate="rho")),
    "tlambda_aic": lambda: WeinceLoss.paper(0.5, tail=replace(RELEASED_TAIL, gate="aic")),
    "released": lambda: WeinceLoss(0.5),
}


@pytest.fixture(params=CASES)
def case(request):
    with np.load(DATA / f"release_{request.param}.npz", allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def close(got, wanted):
    """Within 1e-9 of the largest entry."""
    torch.testing.assert_close(
        got, wanted.to(got.dtype), rtol=1e-9, atol=1e-9 * float(wanted.abs().max()), check_dtype=False
    )


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient(case, name, engine):
    z_i, z_j = case["z_i"].requires_grad_(), case["z_j"].requires_grad_()
    loss = LOSSES[name]()
    loss.engine = engine
    loss = loss(z_i, z_j)
    grad_i, grad_j = torch.autograd.grad(loss, [z_i, z_j])
    close(loss.detach(), case[f"loss_{name}"])
    close(grad_i, case[f"grad_i_{name}"])
    close(grad_j, case[f"grad_j_{name}"])


def test_statistics(case):
    stats = WeinceLoss()(case["z_i"], case["z_j"], return_stats=True).stats
    for name in ("rho", "beta", "daic", "lam"):
        close(getattr(stats, name), case[name])
    close(nearest_rank(stats.rho, torch.ones_like(stats.rho, dtype=torch.bool), 0.2), case["rho0"])


def test_quality_and_size_of_the_fit(case):
    rows = unit_rows(torch.cat([case["z_i"], case["z_j"]]))
    count, n = len(rows), len(case["z_i"])
    shortfall = shortfalls(rows, rows)
    anchor = torch.arange(count)
    shortfall[anchor, anchor] = shortfall[anchor, anchor.roll(n)] = torch.inf
    k = RELEASED_TAIL.tail_size(count - 2)
    fit = fit_tail(shortfall.sort(1).values[:, :k], torch.tensor([k]), RELEASED_TAIL)
    close(fit.r2, case["r2"])
    assert set(fit.points.tolist()) == {int(case["n_eff"])}


def test_batch_slope(case):
    loss = WeinceLoss().double()
    loss(case["z_i"], case["z_j"])
    close(loss.terms.slope.slope_now.squeeze(), case["released_batch_beta"])
