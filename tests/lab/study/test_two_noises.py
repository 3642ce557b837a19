"""A loss is better only if neither seeds nor queries explain the difference."""

import math

import numpy as np
import pytest
from programs import script

from weince.lab.study.two_noises import bootstrap_errors, judge_both, noises_of

size = script("benchmarks/two_noises_size.py")
SEEDS = (7, 21, 63, 84)


def simulated(rng, *, gain=0.0, seed_noise=0.0, query_noise=0.0, rest=1.0, queries=500, losses=3):
    base = rng.normal(50, 20, queries)
    each = {}
    for number in range(losses):
        own = rng.normal(0, query_noise, queries) if query_noise else 0.0
        up = gain * (number == losses - 1)
        each[f"l{number}"] = {
            s: base + own + up + rng.normal(0, seed_noise) + rng.normal(0, rest, queries) for s in SEEDS
        }
    return {"ndcg": each}


def word(figures, **options):
    return judge_both(figures, baseline="l0", level_within=0.05, **options).judged["ndcg"]["l2"]


def test_a_gain_that_both_confirm_is_better():
    judged = word(simulated(np.random.default_rng(0), gain=1.0, seed_noise=0.05, query_noise=2.0))
    assert judged.word == "better"
    assert judged.mean == pytest.approx(1.0, abs=0.4)
    assert judged.half > 0
    assert word(simulated(np.random.default_rng(0), gain=-1.0, seed_noise=0.05)).word == "worse"


def test_a_gain_that_only_the_seeds_confirm_is_not_better():
    """All seeds agree, since all see the same few queries."""
    options = {"query_noise": 15.0, "queries": 60, "seed_noise": 0.01, "rest": 0.1}
    figures = simulated(np.random.default_rng(1), gain=1.0, **options)
    judged = word(figures)
    assert noises_of(figures, baseline="l0")["ndcg", "l2"].p_values[0] < 0.001
    assert (judged.word, judged.why) == ("cannot tell", "too few queries")


def test_a_gain_that_only_the_queries_confirm_is_not_better():
    figures = simulated(np.random.default_rng(1), gain=1.0, seed_noise=3.0, queries=20_000)
    judged = word(figures)
    assert noises_of(figures, baseline="l0")["ndcg", "l2"].p_values[1] < 0.001
    assert (judged.word, judged.why) == ("cannot tell", "too few seeds")


def test_level_and_cannot_tell():
    figures = simulated(np.random.default_rng(2), seed_noise=0.001, rest=0.1, queries=5000)
    assert word(figures).word == "level"
    one = {"ndcg": {loss: {7: of[7]} for loss, of in figures["ndcg"].items()}}
    assert (word(one).word, word(one).why) == ("cannot tell", "one seed")
    apart = {"ndcg": {**figures["ndcg"], "l2": {5: figures["ndcg"]["l2"][7]}}}
    assert word(apart).why == "no seed in common"
    alike = {"ndcg": {name: figures["ndcg"]["l0"] for name in ("l0", "l1", "l2")}}
    assert (word(alike).word, word(alike).mean) == ("level", 0)


def test_queries_of_a_group_are_drawn_together():
    rng = np.random.default_rng(0)
    groups = np.arange(1000) // 10
    shared = rng.normal(0, 1, 100)[groups]
    sizes = np.bincount(groups).astype(float)
    alone = bootstrap_errors(shared[:, None], np.ones(1000))[0]
    together = bootstrap_errors(np.bincount(groups, shared)[:, None], sizes)[0]
    assert alone == pytest.approx(shared.std() / math.sqrt(1000), rel=0.08)
    assert together == pytest.approx(shared.std() / math.sqrt(100), rel=0.08)


def test_unequal_groups_follow_the_formula_of_a_ratio():
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 20, 400).astype(float)
    sums = rng.normal(3, 1, 400) * sizes
    mean = sums.sum() / sizes.sum()
    wanted = math.sqrt(((sums - mean * sizes) ** 2).sum()) / sizes.sum()
    assert bootstrap_errors(sums[:, None], sizes)[0] == pytest.approx(wanted, rel=0.08)


def test_the_interval_covers_the_truth():
    """Over new seeds and new queries: 95 % of 300 intervals, within three standard errors."""
    covered = 0
    for number in range(300):
        rng = np.random.default_rng([5, number])
        judged = word(
            simulated(rng, gain=0.5, seed_noise=0.3, query_noise=4.0, rest=2.0, queries=300), draws=300
        )
        covered += abs(judged.mean - 0.5) <= judged.half
    assert 0.95 - 3 * math.sqrt(0.95 * 0.05 / 300) <= covered / 300 <= 0.95 + 3 * math.sqrt(0.95 * 0.05 / 300)


@pytest.mark.parametrize("world", size.WORLDS)
def test_level_losses_rarely_get_a_wrong_word(world):
    wrong, _ = size.shares(size.WORLDS[world], tables=150, queries=400, draws=200)
    assert wrong <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 150)


def test_a_gain_is_seen_where_it_should():
    _, seen = size.shares(size.World(0.05, 1.0, 3.0, 3.0), tables=20, queries=4000, gain=0.5, draws=200)
    assert seen >= 0.9
