"""The verdict: the pooled spread, the correction for several tests, and the word."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from weince.lab.study.differences import (
    holm,
    paired,
    paired_spread,
    power,
    reach,
    seeds_to_show,
    smallest_difference,
)
from weince.lab.study.differences import (
    judge as judge_compared,
)
from weince.lab.tasks.images.evaluation.protocol import Spread, paired_test

SEEDS = (7, 21, 63, 84)


def judge(figures, *, baseline, level_within):
    compared = {figure: paired(values, baseline) for figure, values in figures.items()}
    return judge_compared(compared, level_within=level_within)


def table(*rows):
    """Losses a, b, c, ... with their values by seed."""
    return {chr(97 + place): dict(zip(SEEDS, row, strict=False)) for place, row in enumerate(rows)}


def numbers(losses, seeds=4):
    row = st.lists(st.floats(40, 60), min_size=seeds, max_size=seeds)
    return st.lists(row, min_size=losses, max_size=losses)


@given(numbers(2))
def test_of_two_losses_it_is_the_paired_t_test(rows):
    values = table(*rows)
    one = judge({"linear": values}, baseline="a", level_within=1e-9).judged["linear"]["b"]
    wanted = paired_test(rows[1], rows[0])
    assert one.mean == pytest.approx(wanted.difference, abs=1e-9)
    if np.std(np.subtract(rows[1], rows[0])) > 1e-6:
        assert one.half == pytest.approx(wanted.half, rel=1e-6)
        assert one.p_value == pytest.approx(wanted.p_value, rel=1e-5, abs=1e-12)


@given(numbers(4))
def test_the_spread_is_pooled_over_all_pairs_of_losses(rows):
    squares = [
        np.var(np.subtract(one, other), ddof=1) for k, one in enumerate(rows) for other in rows[k + 1 :]
    ]
    found = paired_spread(table(*rows))
    assert found.degrees == 3 * 3
    assert found.deviation == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-6, abs=1e-9)


@given(numbers(3), st.floats(-5, 5), st.floats(-5, 5))
def test_what_losses_and_seeds_have_in_common_is_no_spread(rows, of_loss, of_seed):
    moved = [[v + k * of_loss + n * of_seed for n, v in enumerate(row)] for k, row in enumerate(rows)]
    assert paired_spread(table(*moved)).deviation == pytest.approx(
        paired_spread(table(*rows)).deviation, rel=1e-6, abs=1e-9
    )


def test_a_loss_with_fewer_seeds_counts_with_those_it_has():
    values = table([50.0, 51.0, 52.0, 53.0], [50.5, 51.4, 52.6, 53.5], [49.0, 50.3])
    assert paired_spread(values).degrees == (4 + 4 + 2) - (3 + 4 - 1)
    judged = judge({"linear": values}, baseline="a", level_within=0.5).judged["linear"]
    assert (judged["b"].n, judged["c"].n) == (4, 2)
    assert judged["c"].mean == pytest.approx(-0.85)
    assert judged["c"].half == pytest.approx(judged["b"].half * math.sqrt(2))


def test_a_loss_with_one_seed_is_no_comparison():
    values = table([50.0, 51.0, 52.0], [50.5, 51.4, 52.6], [49.0])
    found = judge({"linear": values}, baseline="a", level_within=0.5)
    one = found.judged["linear"]["c"]
    assert (one.word, one.why, one.mean) == ("cannot tell", "one seed", -1.0)
    assert math.isnan(one.half)
    assert math.isnan(one.p_value)
    assert found.comparisons == 1
    assert reach(found) == {"linear": smallest_difference(found.spreads["linear"], 3, 1)}
    found = judge({"linear": values}, baseline="c", level_within=0.5)  # the other losses have a spread
    assert (found.comparisons, reach(found)) == (0, {})


def test_losses_without_a_common_seed_have_a_spread_of_their_own():
    values = {
        "a": {7: 50.0, 21: 51.0},
        "b": {7: 50.2, 21: 51.6},
        "c": {63: 9.0, 84: 8.0},
        "d": {63: 7.0, 84: 6.4},
    }
    assert paired_spread(values).degrees == 1 + 1


@given(st.dictionaries(st.tuples(st.sampled_from("xyz"), st.text(max_size=3)), st.floats(0, 1), min_size=1))
def test_holm(p_values):
    found, m = holm(p_values), len(p_values)
    order = sorted(p_values, key=p_values.get)
    assert found[order[0]] == min(1.0, m * p_values[order[0]])
    assert [found[key] for key in order] == sorted(found.values())
    assert all(found[key] >= p_values[key] for key in order)
    # Holm's procedure: reject in order of p, while the p of rank k (from 0) is below alpha / (m - k).
    rejected = set()
    for rank, key in enumerate(order):
        if p_values[key] * (m - rank) >= 0.05:
            break
        rejected.add(key)
    assert {key for key in order if found[key] < 0.05} == rejected


NOISE = np.array([[0.1, -0.1, 0.05, -0.05], [-0.1, 0.05, 0.1, -0.05], [0.05, 0.1, -0.1, -0.05]])


def words(*shifts, scale=1.0, seeds=4):
    rows = [(50 + shift + scale * noise)[:seeds] for shift, noise in zip((0, *shifts), NOISE, strict=True)]
    judged = judge({"linear": table(*rows)}, baseline="a", level_within=0.5).judged["linear"]
    return [judged[loss].word for loss in "bc"], [judged[loss].why for loss in "bc"]


def test_the_words():
    assert words(3.0, -3.0)[0] == ["better", "worse"]
    assert words(0.1, -0.1)[0] == ["level", "level"]
    assert words(0.1, 3.0, scale=20)[0] == ["cannot tell", "cannot tell"]
    assert words(0.1, 3.0, scale=20)[1] == ["too few seeds"] * 2
    assert words(3.0, -3.0, seeds=1) == (["cannot tell"] * 2, ["one seed"] * 2)


def test_a_difference_that_does_not_matter_is_level_even_if_it_is_certain():
    """The difference is significant, and within half a point."""
    rows = [50 + NOISE[0] / 10, 50.2 + NOISE[1] / 10]
    one = judge({"linear": table(*rows)}, baseline="a", level_within=0.5).judged["linear"]["b"]
    assert one.holm < 0.01
    assert one.word == "level"


@pytest.mark.parametrize("shift", [0.4, -0.4])
def test_level_means_that_the_whole_interval_lies_within_the_limit(shift):
    def judged(within):
        rows = [50 + NOISE[0], 50 + shift + NOISE[1]]
        return judge({"linear": table(*rows)}, baseline="a", level_within=within).judged["linear"]["b"]

    one = judged(0.5)
    limit = abs(one.mean) + one.half
    assert limit > 0.5 > max(abs(one.mean), one.half)
    assert judged(limit).word == "level"
    assert judged(limit - 1e-9).word == one.word == ("better" if shift > 0 else "worse")


def test_with_one_seed_there_is_no_p():
    found = judge({"linear": table([50.0], [53.0])}, baseline="a", level_within=0.5)
    one = found.judged["linear"]["b"]
    assert math.isnan(one.p_value)
    assert math.isnan(one.holm)
    assert (found.spreads, reach(found), found.comparisons) == ({}, {}, 0)


def test_seeds_that_nobody_shares():
    values = {"a": {7: 50.0, 21: 51.0}, "b": {63: 50.0, 84: 51.0}}
    found = judge({"linear": values}, baseline="a", level_within=0.5)
    one = found.judged["linear"]["b"]
    assert (one.word, one.why, one.n) == ("cannot tell", "no seed in common", 0)
    assert found.spreads == {}
    only = judge({"r1": {"b": {7: 50.0, 21: 51.0}}}, baseline="a", level_within=0.5)  # the baseline lacks r1
    assert only.judged["r1"]["b"].why == "no seed in common"


def test_equal_figures_are_level():
    one = judge({"linear": table([50.0, 51.0], [50.0, 51.0])}, baseline="a", level_within=0.5)
    assert one.judged["linear"]["b"].word == "level"
    assert one.judged["linear"]["b"].p_value == 1.0


def test_differences_that_are_equal_up_to_rounding_have_no_spread_and_no_p():
    row = [50.1, 51.3, 52.7]
    found = judge({"linear": table(row, [value + 3.3 for value in row])}, baseline="a", level_within=0.5)
    assert found.spreads["linear"] == Spread(0.0, 2)
    one = found.judged["linear"]["b"]
    assert (one.word, one.why, one.half) == ("cannot tell", "no spread between seeds", 0.0)
    assert math.isnan(one.p_value)
    assert (reach(found), found.comparisons) == ({}, 0)
    small = paired_spread(table(*(50 + 1e-6 * NOISE))).deviation  # small, but no rounding
    assert small == pytest.approx(1e-6 * paired_spread(table(*NOISE)).deviation, rel=1e-6)


def test_all_figures_are_corrected_together():
    values = table(50 + NOISE[0], 50.3 + NOISE[1])
    alone = judge({"linear": values}, baseline="a", level_within=0.1)
    both = judge({"linear": values, "r1": values}, baseline="a", level_within=0.1)
    assert (alone.comparisons, both.comparisons) == (1, 2)
    assert both.judged["linear"]["b"].holm == 2 * alone.judged["linear"]["b"].holm
    # The p-value is 0.027: enough for one comparison, not for two.
    assert (alone.judged["linear"]["b"].word, both.judged["linear"]["b"].word) == ("better", "cannot tell")


def test_every_figure_has_its_own_spread():
    values = {"linear": table(*(50 + NOISE)), "r1": table(*(50 + 2 * NOISE))}
    found = judge(values, baseline="a", level_within=0.1)
    for loss in "bc":
        assert found.judged["r1"][loss].half == pytest.approx(2 * found.judged["linear"][loss].half)


@pytest.mark.parametrize("degrees", [1, 4, 24])
@pytest.mark.parametrize("comparisons", [1, 12])
@pytest.mark.parametrize("shift", [0.5, 2.0, 5.0])
def test_power_is_that_of_the_noncentral_t(degrees, comparisons, shift):
    threshold = stats.t.ppf(1 - 0.025 / comparisons, degrees)
    wanted = stats.nct.sf(threshold, degrees, shift) + stats.nct.cdf(-threshold, degrees, shift)
    assert power(shift / 2, Spread(1.0, degrees), 4, comparisons) == pytest.approx(wanted, abs=2e-3)


def test_the_smallest_difference_has_the_power():
    spread = Spread(0.4, 24)
    smallest = smallest_difference(spread, 4, 32)
    assert power(smallest, spread, 4, 32) == pytest.approx(0.8, abs=1e-4)
    assert smallest_difference(spread, 8, 32) < smallest < smallest_difference(spread, 4, 64)


@pytest.mark.parametrize(("difference", "losses", "comparisons"), [(0.5, 9, 32), (0.8, 2, 2)])
def test_seeds_to_show_a_difference(difference, losses, comparisons):
    needed = seeds_to_show(difference, Spread(0.4, 24), losses, comparisons)

    def power_of(n):
        return power(difference, Spread(0.4, (losses - 1) * (n - 1)), n, comparisons)

    assert power_of(needed) >= 0.8 > power_of(needed - 1)


def test_a_difference_that_no_number_of_seeds_shows():
    assert seeds_to_show(1e-6, Spread(0.4, 24), 9, 32) is None
