"""Risk in closed form against enumeration and sampling; gradients against finite differences."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from weince.evt.link_test import link_bank
from weince.lab.paper.risk import risk_gradient


def bank(pairs=40, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((pairs, 4))
    return link_bank(z, z + 0.7 * rng.standard_normal(z.shape), batch_size=pairs, batches=1)


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.integers(-9, 9), min_size=1, max_size=8), positive=st.integers(-9, 9), data=st.data()
)
def test_risk_by_enumeration(scores, positive, data):
    k = data.draw(st.integers(1, len(scores)))
    s = np.array(scores) / 10
    expected = np.zeros(len(s))
    subsets = list(combinations(range(len(s)), k))
    for subset in subsets:
        top = [j for j in subset if s[j] == s[list(subset)].max()]
        if s[top[0]] > positive / 10:
            expected[top] += 1 / len(top) / len(subsets)
    edges = (np.arange(-9, 11) - 0.5) / 10  # one bin per score
    found = risk_gradient(np.r_[positive / 10, s][None], [0], ks=[k], bins=edges, draws=1)[0]
    assert found.failure_rate == pytest.approx(expected.sum(), abs=1e-12)
    if found.failure_rate:
        binned = np.histogram(s, edges, weights=expected)[0]
        np.testing.assert_allclose(found.risk * found.failure_rate, binned, atol=1e-12)


def test_a_large_pool_always_fails_where_all_beat_the_positive():
    s = np.random.default_rng(0).uniform(-0.9, 1, 5000)
    edges = [-1.0, np.sort(s)[-2:].mean(), 1.0]
    results = risk_gradient(np.r_[-1.0, s][None], [0], ks=[1, 64, 4999, 5000], bins=edges, draws=1)
    assert [r.failure_rate for r in results] == pytest.approx([1.0] * 4, rel=1e-9)
    assert results[-1].risk[-1] == pytest.approx(1.0)  # k is the whole pool, so its best always wins


def test_risk_by_sampling():
    b = bank()
    k, edges = 10, np.linspace(-1, 1, 9)
    exact = risk_gradient(b.scores, b.positives, ks=[k], bins=edges, draws=1)[0]
    rng = np.random.default_rng(1)
    culprits, tries = [], 0
    for row, positive in zip(b.scores, b.positives, strict=True):
        negatives = np.delete(row, positive)
        for _ in range(200):
            best = rng.choice(negatives, k, replace=False).max()
            tries += 1
            if best > row[positive]:
                culprits.append(best)
    assert exact.failure_rate == pytest.approx(len(culprits) / tries, abs=0.012)
    np.testing.assert_allclose(exact.risk, np.histogram(culprits, edges)[0] / len(culprits), atol=0.02)


def loss(s, logit):
    """Cross-entropy of the first candidate."""
    return special.logsumexp(logit(s)) - logit(s)[0]


def test_gradients_by_differences():
    """If the subset holds all negatives, there is only one subset, so the shares are exact."""
    b = bank(6)
    tau, beta, lam, h = 0.4, 1.7, 0.3, 1e-6
    links = {
        "softmax": lambda s: s / tau,
        "shortfall": lambda s: -beta * np.log(1 - s),
        "blend": lambda s: (1 - lam) * s / tau - lam * beta * np.log(1 - s),
    }
    edges = np.linspace(-1, 1, 7)
    k = b.scores.shape[1] - 1
    result = risk_gradient(b.scores, b.positives, ks=[k], tau=tau, beta=beta, lam=lam, bins=edges, draws=2)[0]
    for name, logit in links.items():
        mass = np.zeros(6)
        for row, positive in zip(b.scores, b.positives, strict=True):
            s = np.r_[row[positive], np.delete(row, positive)]
            for j in range(1, len(s)):
                step = np.zeros(len(s))
                step[j] = h
                slope = (loss(s + step, logit) - loss(s - step, logit)) / (2 * h)
                mass[np.searchsorted(edges, s[j]) - 1] += slope
        np.testing.assert_allclose(getattr(result, name), mass / mass.sum(), rtol=1e-5)


def test_gradients_by_independent_subsets():
    b = bank(20)
    k, edges = 7, np.linspace(-1, 1, 6)
    result = risk_gradient(b.scores, b.positives, ks=[k], tau=0.2, bins=edges, draws=60)[0]
    rng = np.random.default_rng(2)
    mass = np.zeros(5)
    for row, positive in zip(b.scores, b.positives, strict=True):
        negatives = np.delete(row, positive)
        for _ in range(300):
            s = rng.choice(negatives, k, replace=False)
            p = special.softmax(np.r_[row[positive], s] / 0.2)[1:]
            mass += np.histogram(s, edges, weights=p)[0]
    np.testing.assert_allclose(result.softmax, mass / mass.sum(), atol=0.012)


def test_ends_of_the_blend_and_per_anchor_values():
    b = bank()
    common = {"ks": [16], "tau": 0.3, "beta": 2.0}
    soft = risk_gradient(b.scores, b.positives, lam=0.0, **common)[0]
    np.testing.assert_allclose(soft.blend, soft.softmax, atol=1e-12)
    hard = risk_gradient(b.scores, b.positives, lam=1.0, **common)[0]
    np.testing.assert_allclose(hard.blend, hard.shortfall, atol=1e-12)
    each = risk_gradient(b.scores, b.positives, lam=np.ones(len(b.scores)), **common)[0]
    np.testing.assert_allclose(each.blend, hard.blend, atol=1e-12)
    # The slope of the shortfall link grows towards the cap; that of softmax is constant.
    assert hard.shortfall[-1] > hard.softmax[-1]


def test_shares_sum_to_one_and_sizes_agree_with_gaps():
    b = bank()
    wide = np.insert(b.scores, 0, np.nan, axis=1)
    wide[3, 1 if b.positives[3] != 0 else 2] = -np.inf
    results = risk_gradient(wide, b.positives + 1, ks=[1, 5, 77], draws=3)
    for r in results:
        for share in (r.risk, r.softmax, r.shortfall, r.blend, r.negatives):
            assert share.sum() == pytest.approx(1.0)
    assert results[0].failure_rate < results[1].failure_rate < results[2].failure_rate


def test_no_failure_is_no_share():
    scores = np.array([[0.9, 0.1, 0.2], [0.8, 0.3, 0.0]])
    result = risk_gradient(scores, [0, 0], ks=[2], bins=2)[0]
    assert result.failure_rate == 0.0
    assert np.isnan(result.risk).all()
    assert result.softmax.sum() == pytest.approx(1.0)


def test_a_tie_is_no_failure_and_the_floor_of_the_shortfall_is_flat():
    scores = np.array([[0.5, 0.5, 1.0], [0.5, 0.5, 0.0]])
    result = risk_gradient(scores, [0, 0], ks=[1], bins=[-0.1, 0.7, 1.1])[0]
    assert result.failure_rate == 0.25  # only the negative at 1.0 beats its positive
    assert result.risk.tolist() == [0.0, 1.0]
    assert result.shortfall.tolist() == [1.0, 0.0]  # the logit is constant above 1 - EPS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ks": [79]}, "between 1 and 78"),
        ({"ks": [0]}, "between 1 and 78"),
        ({"tau": 0.0}, "tau > 0"),
        ({"lam": 1.5}, "lam must be"),
        ({"beta": [1.0, 2.0]}, "beta must be"),
        ({"bins": 0}, "bins must be at least 1"),
        ({"bins": [0.0, 0.1]}, "cover"),
        ({"bins": [1.0, -1.0]}, "ascending"),
        ({"draws": 0}, "draws"),
    ],
)
def test_bad_input_is_named(change, words):
    b = bank()
    with pytest.raises(ValueError, match=words):
        risk_gradient(b.scores, b.positives, **({"ks": [4]} | change))
