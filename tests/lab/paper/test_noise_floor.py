"""The noise floor against its theory, and the theory against naive references."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from weince.lab.paper.noise_floor import coordinate_mismatch, fit_slope, link_theory, noise_floor

SCORES = np.array([0.15, 0.45, 0.70, 0.90])
LAW = (1 - SCORES) ** -0.8 / ((1 - SCORES) ** -0.8).sum()


def loglik(slope: float, feature: np.ndarray, weight: np.ndarray) -> float:
    logits = slope * feature
    return float(weight @ (logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()))


class TestSlope:
    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.floats(-3, 3), min_size=2, max_size=8, unique=True), st.integers(0, 999))
    def test_maximises_the_likelihood(self, feature: list[float], seed: int) -> None:
        g = np.array(feature)
        if np.ptp(g) < 0.1:
            return
        weight = np.random.default_rng(seed).dirichlet(np.full(g.size, 2.0))
        slope = float(fit_slope(g, np.asarray(weight @ g)))
        best = loglik(slope, g, weight)
        for other in (slope - 1e-3, slope + 1e-3, slope - 1.0, slope + 1.0):
            assert best >= loglik(other, g, weight) - 1e-12

    def test_vectorised_and_infinite_at_the_extremes(self) -> None:
        g = np.array([0.0, 1.0])
        odds = fit_slope(g, np.array([[0.0, 0.25], [0.5, 1.0]]))
        assert odds[0, 0] == -np.inf
        assert odds[1, 1] == np.inf
        assert odds[0, 1] == pytest.approx(-math.log(3.0))  # two candidates: the slope is the log-odds
        assert odds[1, 0] == pytest.approx(0.0, abs=1e-12)


class TestTheory:
    def test_right_link_has_no_bias_and_the_cramer_rao_variance(self) -> None:
        g = -np.log(1 - SCORES)
        theory = link_theory(g, LAW)
        information = LAW @ g**2 - (LAW @ g) ** 2
        assert theory.parameter == pytest.approx(0.8)
        assert theory.bias == pytest.approx(0.0, abs=1e-12)
        assert theory.variance == pytest.approx(math.log(0.85 / 0.10) ** 2 / information)

    def test_softmax_floor(self) -> None:
        """Compare with the pseudo-true slope by direct search, and a sandwich from numerical derivatives."""
        search = minimize_scalar(lambda b: -loglik(b, SCORES, LAW), bounds=(0, 20), method="bounded")
        theory = link_theory(SCORES, LAW)
        assert theory.parameter == pytest.approx(search.x, abs=1e-4)
        assert theory.bias == pytest.approx(search.x * 0.75 - 0.8 * math.log(8.5), abs=1e-4)
        h = 1e-4
        each = np.eye(4)
        up, mid, down = (
            np.array([loglik(theory.parameter + k * h, SCORES, e) for e in each]) for k in (1, 0, -1)
        )
        hessian = -LAW @ (up - 2 * mid + down) / h**2
        spread = LAW @ ((up - down) / (2 * h)) ** 2
        assert theory.variance == pytest.approx(0.75**2 * spread / hessian**2, rel=1e-5)

    def test_numbers_in_the_docs(self) -> None:
        right, wrong = link_theory(-np.log(1 - SCORES), LAW), link_theory(SCORES, LAW)
        assert right.variance == pytest.approx(7.136, abs=5e-4)
        assert right.drift == pytest.approx(0.724, abs=5e-4)
        assert wrong.parameter == pytest.approx(2.566, abs=5e-4)
        assert wrong.bias == pytest.approx(0.2125, abs=5e-5)
        assert wrong.bias**2 == pytest.approx(0.04515, abs=5e-6)
        assert wrong.variance == pytest.approx(13.34, abs=5e-3)
        assert wrong.drift == pytest.approx(2.362, abs=5e-4)

    def test_bad_input(self) -> None:
        with pytest.raises(ValueError, match="sum to 1"):
            link_theory(SCORES, [0.5, 0.5, 0.5, 0.5])
        with pytest.raises(ValueError, match="one shape"):
            link_theory(SCORES, [0.5, 0.5])


class TestSimulation:
    def test_agrees_with_theory_within_five_percent_from_500_on(self) -> None:
        """With 40,000 replicates, the mean squared error has a Monte Carlo standard error of 0.7 %."""
        result = noise_floor(sizes=(500, 1000, 4000, 16000), replicates=40_000)
        assert result.log_odds == pytest.approx(0.8 * math.log(8.5))
        assert result.shortfall_error == pytest.approx(result.shortfall_line, rel=0.05)
        assert result.softmax_error == pytest.approx(result.softmax_line, rel=0.05)
        assert result.undefined.max() == 0.0

    def test_first_order_drift_explains_what_is_left_at_small_n(self) -> None:
        result = noise_floor(sizes=(200,), replicates=100_000)
        theory = result.softmax
        refined = result.softmax_line + 2 * theory.bias * theory.drift / 200
        assert (
            abs(result.softmax_error - refined)[0] < 0.5 * abs(result.softmax_error - result.softmax_line)[0]
        )

    def test_one_replicate_by_hand(self) -> None:
        counts = np.random.default_rng(5).multinomial(300, LAW, size=2)
        result = noise_floor(sizes=(300,), replicates=2, seed=5)
        squares = []
        for row in counts:
            search = minimize_scalar(
                lambda b, row=row: -loglik(b, SCORES, row),
                bounds=(0, 20),
                method="bounded",
                options={"xatol": 1e-10},
            )
            squares.append((search.x * 0.75 - result.log_odds) ** 2)
        assert result.softmax_error[0] == pytest.approx(np.mean(squares), rel=1e-4)

    def test_floor_stays_and_the_right_link_goes_on(self) -> None:
        result = noise_floor(sizes=(1_000_000,), replicates=2000)
        assert result.softmax_error[0] == pytest.approx(result.softmax.bias**2, rel=0.01)
        assert result.shortfall_error[0] < 1e-5

    def test_tiny_samples_leave_out_what_has_no_estimate(self) -> None:
        result = noise_floor(sizes=(3,), replicates=2000)
        assert 0.1 < result.undefined[0] < 0.3  # P(all positives at one end) is about 0.54^3 + 0.10^3
        assert np.isfinite(result.softmax_error[0])
        counts = np.random.default_rng(0).multinomial(3, LAW, size=2000)
        known = counts[(counts[:, 0] < 3) & (counts[:, -1] < 3)]
        odds = fit_slope(SCORES, known / 3 @ SCORES) * 0.75
        squares = (odds - result.log_odds) ** 2
        assert result.softmax_se[0] == pytest.approx(np.std(squares, ddof=1) / math.sqrt(len(known)))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"scores": [0.5, 1.0]}, "below 1"),
            ({"scores": [0.5, 0.5]}, "not be all equal; got 2 from 0.5 to 0.5"),
            ({"scores": [0.1, float("nan")]}, "scores must be finite; got 1 NaN"),
            (
                {"scores": np.zeros((9, 9))},
                r"scores must be a non-empty array of shape \(n,\); got shape \(9, 9\)",
            ),
            ({"beta": -1.0}, "beta"),
            ({"sizes": []}, "sizes"),
            ({"replicates": 1}, "replicates"),
        ],
    )
    def test_bad_input(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            noise_floor(**options)


class TestCoordinateMismatch:
    def test_the_example(self) -> None:
        got = coordinate_mismatch()
        assert got.translation_ratio == pytest.approx(5 / 9)
        assert got.endpoint_ratio == pytest.approx(math.log(2) / math.log(10))

    def test_no_temperature_does_better(self) -> None:
        got = coordinate_mismatch()
        p = (1 - got.scores) ** -1.0 / ((1 - got.scores) ** -1.0).sum()

        def divergence(temperature: float) -> float:
            q = np.exp(got.scores / temperature)
            return float(p @ np.log(p / (q / q.sum())))

        assert got.divergence == pytest.approx(divergence(got.temperature))
        assert got.divergence == pytest.approx(
            min(divergence(t) for t in np.geomspace(0.05, 5, 2001)), rel=1e-4
        )
        assert got.divergence > 0.01

    def test_equal_scores_are_refused(self) -> None:
        with pytest.raises(ValueError, match="three different"):
            coordinate_mismatch([0.1, 0.5, 0.5])
