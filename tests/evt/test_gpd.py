"""Generalised Pareto fits against scipy, closed forms and naive references. xi < 0 means a bounded tail."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize
from scipy.stats import chi2, expon, genpareto, norm, t

from weince.evt import fit_gpd, xi_over_batches
from weince.evt.gpd import excesses_over, gpd_loglik, maximise_rows
from weince.lab.paper.pot import sample_gpd

SHAPES = (-0.8, -0.6, -0.4, -0.2, 0.0, 0.2, 1.0)


def draw(xi: float, n: int, seed: int = 0, sigma: float = 1.0) -> np.ndarray:
    return genpareto.rvs(xi, scale=sigma, size=n, random_state=np.random.default_rng(seed))


def profile_over_sigma(y: np.ndarray, xi: float) -> float:
    """Naive profile: Nelder-Mead over log sigma on scipy's own log-density."""
    low = max(0.0, -xi * y.max())

    def negative(log_gap: np.ndarray) -> float:
        return -genpareto.logpdf(y, xi, scale=low + np.exp(log_gap[0])).sum()

    starts = [np.log(y.mean()), np.log(0.01 * y.mean())]
    return -min(minimize(negative, [s], method="Nelder-Mead", options={"xatol": 1e-8}).fun for s in starts)


class TestFit:
    @pytest.mark.parametrize("xi", SHAPES)
    @pytest.mark.parametrize("n", [100, 3000])
    def test_agrees_with_scipy_and_has_no_less_likelihood(self, xi: float, n: int) -> None:
        y = draw(xi, n, seed=3)
        fit = fit_gpd(y)
        c, _, scale = genpareto.fit(y, floc=0.0)
        theirs = genpareto.logpdf(y, c, scale=scale).sum()
        assert fit.loglik == pytest.approx(genpareto.logpdf(y, fit.xi, scale=fit.sigma).sum(), abs=1e-6)
        assert fit.loglik >= theirs - 1e-6
        assert fit.xi == pytest.approx(c, abs=2e-3)
        assert fit.sigma == pytest.approx(scale, rel=2e-3)

    @pytest.mark.parametrize("xi", SHAPES)
    def test_score_equations_hold(self, xi: float) -> None:
        """Both derivatives of the log-likelihood vanish at the estimate."""
        y = draw(xi, 2000, seed=1)
        fit = fit_gpd(y)
        z = 1.0 + fit.xi * y / fit.sigma
        d_sigma = ((1.0 + fit.xi) * (y / fit.sigma) / z - 1.0).mean()
        d_xi = (np.log(z) / fit.xi**2 - (1.0 + 1.0 / fit.xi) * (y / fit.sigma) / z).mean()
        assert abs(d_sigma) < 1e-5
        assert abs(d_xi) < 1e-5

    @pytest.mark.parametrize("xi", [-0.6, -0.2, 0.0, 0.2])
    def test_ends_of_the_xi_interval_sit_at_the_chi_square_drop(self, xi: float) -> None:
        y = draw(xi, 400, seed=5)
        fit = fit_gpd(y, level=0.9)
        for end in fit.xi_interval:
            assert 2.0 * (fit.loglik - profile_over_sigma(y, end)) == pytest.approx(
                chi2.ppf(0.9, 1), abs=1e-3
            )

    @pytest.mark.parametrize("xi", [-0.6, -0.4])
    def test_ends_of_the_endpoint_interval_sit_at_the_chi_square_drop(self, xi: float) -> None:
        y = draw(xi, 400, seed=5)
        fit = fit_gpd(y)
        for end in fit.endpoint_interval:
            # With a fixed endpoint, a grid over xi finds the maximum.
            naive = max(gpd_loglik(y, x, -x * end) for x in np.linspace(-1.0, -0.01, 20001))
            assert 2.0 * (fit.loglik - naive) == pytest.approx(chi2.ppf(0.95, 1), abs=1e-3)

    def test_small_coverage(self) -> None:
        """With 95 % coverage, fewer than 105 hits or all of 120 have a probability below 0.3 %."""
        for xi in (-0.6, -0.2, 0.2):
            fits = [fit_gpd(draw(xi, 1000, seed=s)) for s in range(120)]
            hits = sum(f.xi_interval[0] <= xi <= f.xi_interval[1] for f in fits)
            assert 105 <= hits < 120
            if xi < 0:
                ends = sum(f.endpoint_interval[0] <= -1.0 / xi <= f.endpoint_interval[1] for f in fits)
                assert 105 <= ends < 120

    def test_threshold_shift_and_scale(self) -> None:
        y = draw(-0.3, 500)
        base, moved = fit_gpd(y), fit_gpd(7.0 + 4.0 * y, threshold=7.0)
        assert moved.xi == pytest.approx(base.xi, abs=1e-6)
        assert moved.sigma == pytest.approx(4.0 * base.sigma, rel=1e-6)
        assert moved.endpoint == pytest.approx(7.0 + 4.0 * base.endpoint, rel=1e-6)
        assert moved.endpoint_interval == pytest.approx(
            [7.0 + 4.0 * e for e in base.endpoint_interval], rel=1e-6
        )

    def test_scores_below_the_threshold_do_not_count(self) -> None:
        x = np.random.default_rng(0).normal(size=2000)
        assert fit_gpd(x, 1.0).n == (x > 1.0).sum()
        assert fit_gpd(x, 1.0).xi == fit_gpd(x[x > 1.0], 1.0).xi

    def test_heavy_tail_has_no_endpoint(self) -> None:
        fit = fit_gpd(draw(0.5, 2000))
        assert fit.endpoint == np.inf
        assert fit.endpoint_interval[1] == np.inf

    def test_uniform_sample_may_reach_the_edge(self) -> None:
        """Below xi = -1 the likelihood is unbounded, so the uniform distribution on (0, max) is reported."""
        y = np.linspace(0.01, 1.0, 100) ** 0.5  # the density rises towards the endpoint
        fit = fit_gpd(y)
        assert fit.boundary
        assert (fit.xi, fit.sigma, fit.endpoint) == (-1.0, 1.0, 1.0)
        assert fit.xi_interval[0] == -1.0
        assert fit.xi_interval[1] < -0.8

    def test_very_heavy_sample_is_not_mistaken_for_the_edge(self) -> None:
        y = np.exp(8.0 * np.random.default_rng(0).normal(size=50))
        fit = fit_gpd(y)
        assert not fit.boundary
        assert fit.xi > 5.0

    def test_rows_are_fitted_as_if_alone(self) -> None:
        y = np.stack([draw(xi, 60, seed=9) for xi in (-0.7, -0.3, 0.0, 0.8)])
        together = maximise_rows(y)
        for i, row in enumerate(y):
            alone = maximise_rows(row[None])
            assert [a[i] for a in together[:3]] == pytest.approx([a[0] for a in alone[:3]], abs=1e-6)

    @settings(max_examples=60, deadline=None)
    @given(arrays(np.float64, st.integers(10, 60), elements=st.floats(1e-6, 1e6)))
    def test_ugly_samples(self, y: np.ndarray) -> None:
        if y.max() <= y.min() * (1.0 + 1e-9):
            return
        fit = fit_gpd(y)
        assert fit.xi >= -1.0
        assert fit.sigma > 0.0
        assert fit.endpoint >= y.max() * (1.0 - 1e-12)
        assert fit.xi_interval[0] <= fit.xi <= fit.xi_interval[1]
        assert fit.endpoint_interval[0] <= fit.endpoint * (1.0 + 1e-9)
        assert fit.endpoint <= fit.endpoint_interval[1] * (1.0 + 1e-9)
        assert fit.loglik >= expon.logpdf(y, scale=y.mean()).sum() - 1e-6

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (np.ones((3, 3)), r"shape \(3, 3\)"),
            ([], "non-empty"),
            ([1.0, np.nan] * 20, "20 NaN"),
            (np.arange(5.0), "at least 10"),
            (np.ones(50), "are equal"),
        ],
    )
    def test_bad_scores(self, x: object, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            fit_gpd(x)

    @pytest.mark.parametrize("level", [0.0, 1.0, 95.0, np.nan])
    def test_bad_level(self, level: float) -> None:
        with pytest.raises(ValueError, match="level"):
            fit_gpd(draw(0.0, 50), level=level)


class TestBatches:
    def test_independent_scores_keep_their_interval(self) -> None:
        labels = np.repeat(np.arange(40), 100)
        x = sample_gpd(np.random.default_rng(0), -0.3, 1.0, (4000,))
        result = xi_over_batches(x, labels, quantile=0.01, bootstraps=200)
        assert 0.5 < result.design_effect < 1.8
        assert np.ptp(result.xi_interval) == pytest.approx(np.ptp(result.fit.xi_interval), rel=0.4)

    @pytest.mark.long
    def test_intervals_cover_when_scores_repeat_within_batches(self) -> None:
        """Each score occurs eight times in its batch: 8 times the variance, which plain intervals miss.

        With 95 % coverage, fewer than 33 hits of 40 have a probability of 0.03 %.
        """
        labels = np.repeat(np.arange(30), 80)
        xi_hits = end_hits = plain_hits = 0
        effects = []
        for seed in range(40):
            x = np.repeat(sample_gpd(np.random.default_rng(seed), -0.3, 1.0, (300,)), 8)
            result = xi_over_batches(x, labels, quantile=0.01, bootstraps=30, seed=seed)
            xi_hits += result.xi_interval[0] <= -0.3 <= result.xi_interval[1]
            end_hits += result.endpoint_interval[0] <= 1 / 0.3 <= result.endpoint_interval[1]
            plain_hits += result.fit.xi_interval[0] <= -0.3 <= result.fit.xi_interval[1]
            effects.append(result.design_effect)
        assert np.mean(effects) == pytest.approx(8.0, rel=0.25)
        assert xi_hits >= 33
        assert end_hits >= 33
        assert plain_hits < 30

    def test_resampling_is_naive_resampling(self) -> None:
        rng = np.random.default_rng(1)
        x, labels = rng.normal(size=3000), rng.integers(5, 9, size=3000)
        result = xi_over_batches(x, labels, quantile=0.9, bootstraps=3, seed=4)
        u, check = np.quantile(x, 0.9), np.random.default_rng(4)
        for xi in result.xi_resampled:
            pick = check.integers(4, size=4) + 5
            y = np.concatenate([x[labels == b] for b in pick])
            assert xi == pytest.approx(fit_gpd(y, u).xi, abs=1e-7)
        assert result.n_batches == 4

    @pytest.mark.parametrize("alike", [True, False])
    def test_the_interval_is_widened_by_the_design_effect(self, alike: bool) -> None:
        """It ends where the profile has fallen by t^2 / 2 times the design effect, which counts as at least 1."""
        labels = np.repeat(np.arange(4), 150)
        x = sample_gpd(np.random.default_rng(2), 0.1, 1.0, (150,) if alike else (75,))
        x = np.tile(x, 4) if alike else np.repeat(x, 8)
        result = xi_over_batches(x, labels, quantile=0.1, bootstraps=20, level=0.9)
        fit = result.fit
        error = np.ptp(fit.xi_interval) / 2 / norm.ppf(0.95)
        assert result.design_effect == pytest.approx(np.var(result.xi_resampled, ddof=1) / error**2)
        assert (result.design_effect < 1.0) is alike
        allowed = max(result.design_effect, 1.0) * t.ppf(0.95, 3) ** 2 / 2
        y = x[x > fit.threshold] - fit.threshold
        for xi in result.xi_interval:
            assert fit.loglik - profile_over_sigma(y, xi) == pytest.approx(allowed, abs=1e-4)

    def test_one_batch_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 2"):
            xi_over_batches(norm.rvs(size=1000, random_state=0), np.zeros(1000, dtype=int))

    def test_bad_batches_are_named(self) -> None:
        x = norm.rvs(size=100, random_state=0)
        with pytest.raises(TypeError, match="batches must be integers; got float64"):
            xi_over_batches(x, np.zeros(100))
        with pytest.raises(ValueError, match=r"shape \(100,\), one per score; got \(99,\)"):
            xi_over_batches(x, np.zeros(99, dtype=int))


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_ties_with_the_threshold_do_not_exceed_it(scale):
    """Equal cosines of binary codes differ by rounding."""
    rng = np.random.default_rng(0)
    levels = rng.integers(-8, 9, 5000) / 16
    x = scale * (levels + 1e-17 * rng.standard_normal(5000))
    threshold = float(scale * 6 / 16)
    assert (excesses_over(x, threshold) > 0.01 * scale).all()
    assert fit_gpd(x, threshold).xi < 0
