"""The ablations against plain refits and against banks simulated from known links."""

import numpy as np
import pytest
from scipy import optimize, special

from weince.evt.link_fit import fit_link
from weince.evt.link_test import link_bank, link_test
from weince.lab.paper.ablations import frechet_ablation, hard_negative_ablation, pool_ablation
from weince.lab.paper.draws import draw_positives


def simulated(lam, tau, *, batches=8, batch_size=16, dim=4, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((batches * batch_size, dim))
    bank = link_bank(
        z, z + 0.5 * rng.standard_normal(z.shape), batch_size=batch_size, batches=batches, rng=rng
    )
    return bank._replace(positives=draw_positives(bank.scores, lam, tau, rng=rng))


def power_positives(scores, alpha, seed):
    """Positives under the heavy-tail link, with probability proportional to ((1 + s) / 2) ** alpha."""
    noise = np.random.default_rng(seed).gumbel(size=scores.shape)
    return np.argmax(alpha * np.log((1 + scores) / 2) + noise, axis=1)


def features(scores):
    return np.stack(
        [scores, -np.log(np.maximum(1 - scores, 1e-6)), np.log(np.maximum((1 + scores) / 2, 1e-6))]
    )


def logliks(theta, scores, positives):
    logit = np.tensordot(theta, features(scores), axes=1)
    return logit[np.arange(len(logit)), positives] - special.logsumexp(logit, axis=1)


def test_joint_fit_is_the_constrained_maximum():
    bank = simulated(0.4, 0.3)
    result = frechet_ablation(*bank, bootstraps=50, rng=3)
    split = link_test(*bank, null_draws=1, bootstraps=1, rng=3)
    inside, outside = (np.isin(bank.batches, b) for b in (split.held_in, split.held_out))
    best = {}
    for name, free in {"0": (0,), "w": (0, 1), "f": (0, 2), "wf": (0, 1, 2)}.items():
        bounds = [(0, None if j in free else 0) for j in range(3)]
        found = optimize.minimize(
            lambda t: -logliks(t, bank.scores[inside], bank.positives[inside]).sum(),
            [1.0 if j in free else 0.0 for j in range(3)],
            bounds=bounds,
            method="L-BFGS-B",
            options={"ftol": 1e-14, "gtol": 1e-7},
        )
        best[name] = found.x
    assert result.lam_w == pytest.approx(split.lam, rel=1e-6)
    assert result.lam_w == pytest.approx(best["w"][1] / best["w"].sum(), abs=1e-3)
    assert result.lam_f == pytest.approx(best["f"][2] / best["f"].sum(), abs=1e-3)
    assert result.lam_w_full == pytest.approx(best["wf"][1] / best["wf"].sum(), abs=1e-3)
    assert result.lam_f_full == pytest.approx(best["wf"][2] / best["wf"].sum(), abs=1e-3)
    assert result.tau_full == pytest.approx(1 / best["wf"].sum(), rel=1e-2)
    held = {k: logliks(t, bank.scores[outside], bank.positives[outside]).mean() for k, t in best.items()}
    assert result.w_over_0.gain == pytest.approx(held["w"] - held["0"], abs=1e-4)
    assert result.w_over_0.gain == pytest.approx(split.gain, abs=1e-12)
    assert result.f_over_0.gain == pytest.approx(held["f"] - held["0"], abs=1e-4)
    assert result.wf_over_w.gain == pytest.approx(held["wf"] - held["w"], abs=1e-4)


def test_shortfall_truth_leaves_nothing_to_the_heavy_tail():
    result = frechet_ablation(*simulated(0.5, 0.2, batches=16, batch_size=32), bootstraps=50)
    assert result.w_over_0.interval[0] > 0.03
    assert result.w_over_0.t_p_value < 0.01
    assert result.lam_f == 0.0
    assert result.f_over_0.gain == 0.0
    assert result.f_over_0.t_p_value == 1.0
    assert abs(result.wf_over_w.gain) < 0.005


def test_heavy_tail_truth_is_found():
    bank = simulated(0.0, 0.2, batches=16, batch_size=32)
    bank = bank._replace(positives=power_positives(bank.scores, 4.0, 1))
    result = frechet_ablation(*bank, bootstraps=50)
    assert result.f_over_0.gain > 0.01
    assert result.f_over_0.t_p_value < 1e-3
    assert result.lam_f > 0.7
    assert result.lam_f_full > 0.7
    assert result.w_over_0.gain == 0.0
    assert result.wf_over_w.gain == pytest.approx(result.f_over_0.gain, abs=2e-3)


def test_separation_is_said():
    bank = simulated(0.0, 0.2)
    top = bank.scores.argmax(axis=1)
    result = frechet_ablation(bank.scores, top, bank.batches, bootstraps=5)
    assert result.separated
    assert np.isnan([result.lam_w, result.tau_full, result.w_over_0.gain, result.w_over_0.t_p_value]).all()
    assert all(p.separated for p in hard_negative_ablation(bank.scores, top, bank.batches, kept=(4, 8)))


def halves(bank):
    """Fits to each half of a bank of four batches, with the gain on the other half; the ablation uses one of them."""
    for i in range(4):
        for j in range(i):
            inside = np.isin(bank.batches, (i, j))
            fit = fit_link(*(x[inside] for x in bank))
            rest = bank.scores[~inside], bank.positives[~inside]
            blend = np.array([1 - fit.lam, fit.lam, 0.0]) / fit.tau
            yield fit, (logliks(blend, *rest) - logliks(np.array([1 / fit.tau0, 0.0, 0.0]), *rest)).mean()


@pytest.mark.parametrize("kept", [5, 30])
def test_hard_sets_are_the_hardest_of_the_pool(kept):
    bank = simulated(0.3, 0.2, batches=4)
    point = hard_negative_ablation(*bank, kept=(kept,), bootstraps=50)[0]
    assert (point.kept, point.pool) == (kept, 30)
    rows = []
    for row, positive in zip(bank.scores, bank.positives, strict=True):
        hardest = np.sort(np.delete(row, positive))[::-1][:kept]
        rows.append(np.r_[row[positive], hardest])
    naive = bank._replace(scores=np.array(rows), positives=np.zeros(len(rows), dtype=int))
    gaps = [
        abs(point.lam - f.lam)
        + abs(point.tau - f.tau)
        + abs(point.tau0 - f.tau0)
        + abs(point.gain.gain - gain)
        for f, gain in halves(naive)
    ]
    assert min(gaps) < 1e-8


def test_a_point_does_not_depend_on_its_company():
    bank = simulated(0.3, 0.2)
    alone = hard_negative_ablation(*bank, kept=(30,), bootstraps=50, rng=2)[0]
    assert hard_negative_ablation(*bank, kept=(5, 30), bootstraps=50, rng=2)[1] == alone


def test_pools_grow_harder():
    bank = simulated(0.3, 0.2, batches=8, batch_size=32)
    points = pool_ablation(*bank, pools=(8, 16, 10_000), kept=8, bootstraps=50)
    assert [(p.kept, p.pool) for p in points] == [(8, 8), (8, 16), (8, 62)]
    everything = hard_negative_ablation(*bank, kept=(8,), bootstraps=50)[0]
    assert points[2].lam == pytest.approx(everything.lam, rel=1e-9)


def test_a_pool_is_drawn_at_random():
    """A conditional logit stays valid for randomly chosen candidates, so the fit to a whole pool finds the truth."""
    bank = simulated(0.3, 0.2, batches=16, batch_size=64)
    order = np.argsort(-bank.scores, axis=1)  # hardest first, so the first columns are not a random pool
    sorted_bank = bank._replace(
        scores=np.take_along_axis(bank.scores, order, axis=1),
        positives=np.argmax(order == bank.positives[:, None], axis=1),
    )
    (point,) = pool_ablation(*sorted_bank, pools=(16,), kept=16, bootstraps=9)
    assert point.lam == pytest.approx(0.3, abs=0.1)
    assert point.tau == pytest.approx(0.2, rel=0.2)
    (hard,) = pool_ablation(*sorted_bank, pools=(126,), kept=16, bootstraps=9)
    assert hard.lam > point.lam + 0.1


def test_gaps_are_not_negatives():
    bank = simulated(0.3, 0.2)
    wide = np.hstack([np.full((len(bank.scores), 3), np.nan), bank.scores])
    ragged = wide.copy()
    ragged[:5, 10] = np.where(bank.positives[:5] + 3 == 10, ragged[:5, 10], -np.inf)
    moved = bank.positives + 3
    assert pool_ablation(wide, moved, bank.batches, pools=(99,), kept=30, bootstraps=9)[0].pool == 30
    assert pool_ablation(ragged, moved, bank.batches, pools=(99,), kept=20, bootstraps=9)[0].pool == 29
    with pytest.raises(ValueError, match="pool of 29"):
        pool_ablation(ragged, moved, bank.batches, pools=(99,), kept=30)


def test_hard_negatives_raise_lam_where_one_link_holds_for_all():
    """The trend appears although one link holds for all scores, so the ablation needs a control."""
    bank = simulated(0.3, 0.2, batches=16, batch_size=64)
    few, all_of_them = hard_negative_ablation(*bank, kept=(4, 126), bootstraps=9)
    assert all_of_them.lam == pytest.approx(0.3, abs=0.1)
    assert few.lam > all_of_them.lam + 0.2
