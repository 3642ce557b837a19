"""Splits, intervals and paired tests against hand-computed cases, scipy and their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from weince.intervals import t_interval
from weince.lab.tasks.images.evaluation.protocol import budget, paired_test, pooled_spread, split


def test_split_of_a_case_by_hand():
    labels = np.array([0] * 10 + [1] * 9 + [2] * 4 + [7] * 5)
    train, validation = split(labels, seed=1)
    # floor(.2 * 10) = 2, floor(1.8) = 1, floor(.8) = 0, floor(1.0) = 1
    assert np.bincount(labels[validation], minlength=8).tolist() == [2, 1, 0, 0, 0, 0, 0, 1]
    assert np.bincount(labels[train], minlength=8).tolist() == [8, 8, 4, 0, 0, 0, 0, 4]


@given(st.lists(st.integers(0, 4), min_size=21, max_size=120), st.integers(0, 2**31))
def test_split_follows_its_definition(labels, seed):
    labels = np.array(labels)
    found = split(labels, seed=seed)
    assert sorted([*found.train, *found.validation]) == list(range(len(labels)))
    rng, wanted = np.random.default_rng(seed), []
    for label in sorted(set(labels.tolist())):
        rows = rng.permutation([i for i, other in enumerate(labels) if other == label])
        wanted += rows[: math.floor(0.2 * len(rows))].tolist()
    assert found.validation.tolist() == sorted(wanted)


def test_split_depends_on_the_seed_alone():
    labels = np.zeros(100, dtype=np.int64)
    first, again, other = (split(labels, seed=seed).validation.tolist() for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros((4, 2), dtype=int), r"got int64 of shape \(4, 2\)"),
        (np.zeros(9), "got float64"),
        (np.arange(9), "no class of these 9 rows has 5 or more"),
        (np.zeros(0, dtype=int), "no class of these 0 rows"),
    ],
)
def test_split_says_what_is_wrong(labels, message):
    with pytest.raises(ValueError, match=message):
        split(labels, seed=0)


def test_t_interval_by_hand_and_against_scipy():
    # mean 2, sd 1, t(2 degrees, .975) = 4.302653
    mean, half, n = t_interval([1.0, 2.0, 3.0])
    assert (mean, n) == (2.0, 3)
    assert half == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)
    values = np.random.default_rng(0).normal(50, 1, 4)
    found = t_interval(values)
    low, high = stats.t.interval(0.95, 3, loc=values.mean(), scale=stats.sem(values))
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))


def test_a_pooled_spread_is_that_of_a_two_sample_t_test_and_of_an_analysis_of_variance():
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(50, 1, 4), rng.normal(53, 2, 4), rng.normal(51, 3, 2)
    low, high = stats.ttest_ind(a, b).confidence_interval(0.95)
    found = pooled_spread([t_interval(a), t_interval(b)])
    assert math.sqrt(2) * found.half(4) == pytest.approx((high - low) / 2, rel=1e-9)
    within = sum(((x - x.mean()) ** 2).sum() for x in (a, b, c)) / (10 - 3)
    found = pooled_spread([t_interval(a), t_interval([7.0]), t_interval(b), t_interval(c)])
    assert found.deviation == pytest.approx(math.sqrt(within), rel=1e-9)
    assert found.degrees == 7
    assert pooled_spread([t_interval([1.0]), t_interval([2.0])]) is None


def test_t_interval_at_its_edges():
    assert t_interval([5.0]).mean == 5.0
    assert math.isnan(t_interval([5.0]).half)
    assert t_interval([5.0, 5.0]).half == 0.0
    for values in ([], [1.0, math.nan], [math.inf]):
        with pytest.raises(ValueError, match="needs finite values"):
            t_interval(values)


@given(st.integers(2, 8), st.integers(0, 1000))
def test_paired_test_is_scipys(n, seed):
    a, b = np.random.default_rng(seed).normal(50, 2, (2, n))
    found = paired_test(a, b)
    wanted = stats.ttest_rel(a, b)
    interval = wanted.confidence_interval()
    assert found.difference == pytest.approx(float((a - b).mean()))
    assert found.p_value == pytest.approx(wanted.pvalue)
    assert (found.difference - found.half, found.difference + found.half) == pytest.approx(tuple(interval))


def test_paired_test_at_its_edges():
    assert paired_test([1.0, 2.0], [1.0, 2.0]).p_value == 1.0
    assert math.isnan(paired_test([2.0, 3.0], [1.0, 2.0]).p_value)  # the differences have no spread
    for scale in (1.0, 1e-6, 1e6):  # differences equal up to rounding
        assert math.isnan(paired_test([0.3 * scale, 0.6 * scale], [0.1 * scale, 0.4 * scale]).p_value)
        assert paired_test([(0.1 + 0.2) * scale, 0.5 * scale], [0.3 * scale, 0.5 * scale]).p_value == 1.0
    for value in (2.0, 1.0):  # one pair allows no test, even if both values are equal
        one = paired_test([value], [1.0])
        assert one.difference == value - 1.0
        assert math.isnan(one.p_value)
        assert math.isnan(one.half)
    with pytest.raises(ValueError, match="as many a as b; got 2 and 1"):
        paired_test([1.0, 2.0], [1.0])


def test_the_tuning_budget_is_told():
    assert budget({"infonce": 3, "paper": 3}) == "3 tries of each loss"
    assert budget({"infonce": 1}) == "1 try of each loss"
    assert budget({"infonce": 3, "paper": 1}) == "unequal numbers of tries: infonce 3, paper 1"
