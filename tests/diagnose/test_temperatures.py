"""The temperature of two towers: known answers, batch sizes, and what has no answer."""

import numpy as np
import pytest
import torch
from programs import script
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

import weince
from diagnose.synthetic import views
from weince.diagnose.reading import make_pairs
from weince.diagnose.temperatures import fit_temperature, temperature_at, temperature_curve

softmax = script("benchmarks/known_answers.py").softmax


def test_the_temperature_lies_in_its_interval():
    """Positives are drawn from a softmax with a known temperature; benchmarks/known_answers.py has more of them."""
    for seed in range(20):
        tau = (0.03, 0.05, 0.1, 0.2)[seed % 4]
        fit = fit_temperature(*softmax(tau, seed=seed, pairs=1024), batch_size=128)
        wide = np.log(fit.interval[1] / fit.interval[0])
        assert abs(np.log(fit.temperature / tau)) < wide  # twice the half width: 1 in 10,000 by chance
        assert wide < 0.5


@pytest.mark.parametrize("candidates", ["cross", "views"])
def test_the_temperature_is_the_maximum_of_the_likelihood(candidates):
    q, d = views(pairs=64, dim=4)
    fit = temperature_at(make_pairs("x", q, d), 64, candidates=candidates)
    u, v = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (q, d))
    rows, positives = (
        (u, np.arange(64)) if candidates == "cross" else (np.concatenate([u, v]), np.r_[64:128, :64])
    )
    s = rows @ (v if candidates == "cross" else rows).T
    if candidates == "views":
        np.fill_diagonal(s, -np.inf)

    def loss(log_tau):
        logits = s / np.exp(log_tau)
        return (logsumexp(logits, axis=1) - logits[np.arange(len(s)), positives]).mean()

    best = minimize_scalar(loss, bounds=(-5, 1), method="bounded", options={"xatol": 1e-9})
    assert np.log(fit.temperature) == pytest.approx(best.x, abs=1e-5)
    assert (fit.anchors, fit.batch_size) == (len(s), 64)
    top = np.where(np.isfinite(s), s, -2).max(axis=1)
    assert fit.beaten == int((top > s[np.arange(len(s)), positives]).sum())


def test_tensors_are_taken_and_pairs_with_equal_ids_never_compete():
    q, d = (torch.tensor(z, dtype=torch.bfloat16, requires_grad=True) for z in views(pairs=256, dim=4))
    assert weince.fit_temperature(q, d).temperature > 0.0
    q, d = views(pairs=256, dim=4)
    twice = np.concatenate([q, q + 1e-3]), np.concatenate([d, d + 1e-3])
    ids = np.tile(np.arange(256), 2)
    told = fit_temperature(*twice, ids=ids, batch_size=512)
    assert told.temperature == pytest.approx(fit_temperature(q, d, batch_size=256).temperature, rel=0.05)
    assert fit_temperature(*twice, batch_size=512).beaten > told.beaten


def test_exact_twins_do_not_compete():
    q, d = views(pairs=256, dim=4)
    noisy = q + 0.5 * np.random.default_rng(5).standard_normal(q.shape)
    twice = np.concatenate([q, noisy]), np.concatenate([d, d])
    ids = np.tile(np.arange(256), 2)
    assert fit_temperature(*twice) == fit_temperature(*twice, ids=ids)


def test_larger_batches_are_tried_and_pairs_that_all_win_are_refused():
    q, d = views(pairs=400, dim=12, noise=0.5)
    fit = fit_temperature(q, d, batch_size=32)
    assert fit.batch_size > 32
    assert fit.beaten >= 10
    with pytest.raises(
        ValueError, match=r"no temperature fits: 0 of 400 positives are beaten, in batches of 400"
    ):
        fit_temperature(q, q + 1e-3 * d)
    with pytest.raises(ValueError, match="higher scores do not win more often"):
        fit_temperature(q, -q + 0.1 * d)
    with pytest.raises(ValueError, match=r"queries has NaN or infinite values in 400 of 400 rows"):
        fit_temperature(np.nan * q, d)
    with pytest.raises(ValueError, match=r"want 32 pairs and a batch_size of 2 or more; got 8 pairs and 256"):
        fit_temperature(q[:8], d[:8])


def test_the_curve_ends_with_all_pairs():
    curve = temperature_curve(make_pairs("x", *softmax(0.1, pairs=600)), "cross", 0)
    assert [fit.batch_size for fit in curve] == [32, 64, 128, 256, 600]
    assert all(fit.interval[0] < fit.temperature < fit.interval[1] for fit in curve)
    assert [fit.beaten / fit.anchors for fit in curve] == sorted(fit.beaten / fit.anchors for fit in curve)
