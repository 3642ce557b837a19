"""Rival laws of a tail, thresholds, goodness of fit and curves, against scipy and closed forms."""

import numpy as np
import pytest
from scipy.integrate import trapezoid
from scipy.stats import chi2, expon, genpareto, kstest, ttest_1samp

from weince.evt import fit_gpd
from weince.evt.gpd import gpd_loglik
from weince.lab.paper.pot import (
    _fit_statistics,
    fit_capped,
    fit_exponential,
    goodness_of_fit,
    mean_residual_life,
    sample_gpd,
    tail_curves,
    threshold_stability,
)


def draw(xi: float, n: int, seed: int = 0, sigma: float = 1.0) -> np.ndarray:
    return genpareto.rvs(xi, scale=sigma, size=n, random_state=np.random.default_rng(seed))


class TestOtherLaws:
    def test_exponential(self) -> None:
        y = draw(-0.4, 800, sigma=2.0)
        fit = fit_exponential(y)
        assert fit.sigma == pytest.approx(expon.fit(y, floc=0.0)[1])
        assert fit.loglik == pytest.approx(expon.logpdf(y, scale=fit.sigma).sum())
        assert fit.lr == pytest.approx(2.0 * (fit_gpd(y).loglik - fit.loglik))
        near = fit_exponential(draw(-0.1, 100))  # the p-value is not tiny
        assert near.p_value > 0.01
        assert near.p_value == pytest.approx(chi2.sf(near.lr, 1))
        # Twice the sum, divided by sigma, is chi-square with 2 n degrees of freedom.
        ends = 2.0 * y.sum() / chi2.ppf([0.95, 0.05], 1600)
        assert fit_exponential(y, level=0.9).sigma_interval == pytest.approx(ends)

    def test_exponential_interval_and_test_size(self) -> None:
        fits = [fit_exponential(draw(0.0, 300, seed=s)) for s in range(200)]
        assert 180 <= sum(f.sigma_interval[0] <= 1.0 <= f.sigma_interval[1] for f in fits) < 200
        assert 2 <= sum(f.p_value < 0.05 for f in fits) <= 22

    def test_capped(self) -> None:
        """With the endpoint known, -log(1 - y / room) is exponential with mean -xi."""
        x = 1.0 - np.random.default_rng(0).random(20000) ** 0.4
        fit = fit_capped(x, 0.6)
        hidden = -np.log((1.0 - x[x > 0.6]) / 0.4)
        assert fit.xi == pytest.approx(-hidden.mean())
        assert fit.loglik == pytest.approx(genpareto.logpdf(x[x > 0.6] - 0.6, fit.xi, scale=fit.sigma).sum())
        assert fit.sigma == pytest.approx(-fit.xi * 0.4)
        assert fit.p_value > 0.01
        # Twice the sum of `hidden`, divided by -xi, is chi-square with 2 n degrees of freedom.
        ends = -2.0 * hidden.sum() / chi2.ppf([0.05, 0.95], 2 * hidden.size)
        assert fit_capped(x, 0.6, level=0.9).xi_interval == pytest.approx(ends)

    def test_capped_interval_is_exact(self) -> None:
        fits = [fit_capped(1.0 - np.random.default_rng(s).random(20) ** 0.5) for s in range(300)]
        assert 272 <= sum(f.xi_interval[0] <= -0.5 <= f.xi_interval[1] for f in fits) <= 298

    def test_capped_is_rejected_when_the_tail_ends_elsewhere(self) -> None:
        assert fit_capped(0.5 * (1.0 - np.random.default_rng(0).random(2000) ** 0.4)).p_value < 1e-6

    @pytest.mark.parametrize("end", [0.99, 0.999])
    def test_capped_is_not_judged_by_free_fits_that_do_not_reach_it(self, end: float) -> None:
        fit = fit_capped(end - 0.3 * np.random.default_rng(0).random(2000) ** 4, end - 0.3)
        assert fit.xi < -1.0
        assert np.isnan([fit.lr, fit.p_value]).all()  # NaN instead of 0 and 1: the tail ends below the cap

    def test_capped_refuses_scores_at_the_cap(self) -> None:
        with pytest.raises(ValueError, match="below the cap"):
            fit_capped([*np.linspace(0.1, 0.9, 20), 1.0])


class TestThresholds:
    def test_stability_of_a_true_gpd(self) -> None:
        """For a GPD, xi and sigma - xi * u do not depend on the threshold u."""
        x = 0.2 + draw(-0.3, 20000, sigma=0.3)
        result = threshold_stability(x, [0.2, 0.4, 0.6])
        truth = 0.3 + 0.3 * 0.2
        assert ((result.xi_interval[:, 0] < -0.3) & (result.xi_interval[:, 1] > -0.3)).all()
        low, high = result.modified_scale_interval.T
        assert ((low < truth) & (truth < high)).all()
        assert ((low < result.modified_scale) & (result.modified_scale < high)).all()
        assert result.n.tolist() == [(x > u).sum() for u in (0.2, 0.4, 0.6)]

    def test_modified_scale_interval_against_a_grid(self) -> None:
        x = 0.5 + draw(-0.2, 300, sigma=0.3)
        result = threshold_stability(x, [0.5])
        best = fit_gpd(x, 0.5).loglik
        for end in result.modified_scale_interval[0]:
            naive = max(gpd_loglik(x - 0.5, xi, end + 0.5 * xi) for xi in np.linspace(-0.9, 0.9, 20001))
            assert 2.0 * (best - naive) == pytest.approx(chi2.ppf(0.95, 1), abs=1e-3)

    def test_negative_thresholds(self) -> None:
        result = threshold_stability(np.random.default_rng(0).normal(size=3000) - 5.0, [-5.0, -4.0])
        low, high = result.modified_scale_interval.T
        assert ((low < result.modified_scale) & (result.modified_scale < high)).all()

    def test_default_thresholds(self) -> None:
        result = threshold_stability(np.random.default_rng(0).random(4000))
        assert result.thresholds.shape == (20,)

    def test_mean_residual_life(self) -> None:
        x = draw(0.0, 5000)
        life = mean_residual_life(x, [0.0, 1.0, 2.0])
        for u, mean in zip(life.thresholds, life.mean_excess, strict=True):
            assert mean == pytest.approx((x[x > u] - u).mean())
        assert ((life.interval[:, 0] < 1.0) & (life.interval[:, 1] > 1.0)).all()  # memoryless
        few = mean_residual_life(x[:40], [1.0], level=0.9)
        interval = ttest_1samp(x[:40][x[:40] > 1.0] - 1.0, 0.0).confidence_interval(0.9)
        assert few.interval[0] == pytest.approx([interval.low, interval.high])


class TestGoodnessOfFit:
    def test_statistics_against_scipy(self) -> None:
        y = draw(0.0, 200)
        ks, ad = _fit_statistics(y[None], np.array([0.0]), np.array([y.mean()]))
        assert ks[0] == pytest.approx(kstest(y, expon(scale=y.mean()).cdf).statistic)
        below, above = (np.log(f(np.sort(y), scale=y.mean())) for f in (expon.cdf, expon.sf))
        odd = 2 * np.arange(200) + 1
        assert ad[0] == pytest.approx(
            -200 - (odd * (below + above[::-1])).mean()
        )  # Anderson and Darling's A²
        law = genpareto(-0.3, scale=4.0)
        assert _fit_statistics(y[None], np.array([-0.3]), np.array([4.0]))[0][0] == pytest.approx(
            kstest(y, law.cdf).statistic
        )

    def test_p_values_of_the_right_law_are_uniform(self) -> None:
        p = np.array(
            [
                (g.ks_p_value, g.ad_p_value)
                for g in (goodness_of_fit(draw(-0.3, 60, seed=s), bootstraps=99, seed=s) for s in range(100))
            ]
        )
        for column in p.T:
            assert kstest(column, "uniform").pvalue > 0.001

    def test_wrong_law_is_found(self) -> None:
        x = np.abs(np.random.default_rng(0).normal(3.0, 0.3, size=500))  # a bump instead of a tail
        result = goodness_of_fit(x, bootstraps=99)
        assert result.ks_p_value == 0.01
        assert result.ad_p_value == 0.01

    def test_seed(self) -> None:
        y = draw(-0.3, 100)
        assert goodness_of_fit(y, bootstraps=50, seed=1) == goodness_of_fit(y, bootstraps=50, seed=1)

    def test_sampler(self) -> None:
        rng = np.random.default_rng(0)
        for xi in (-0.5, 0.0, 0.5):
            assert kstest(sample_gpd(rng, xi, 2.0, (3000,)), genpareto(xi, scale=2.0).cdf).pvalue > 0.001


class TestCurves:
    def test_points(self) -> None:
        x = 1.0 - np.random.default_rng(0).random(50000) ** 0.4
        curves = tail_curves(x, 0.8, cap=1.0)
        top = np.sort(x[x > 0.8])
        assert curves.observed[-1] == pytest.approx(top[-1])
        ranks = np.round(curves.probability * top.size + 0.5).astype(int)  # probability (rank - 1/2) / n
        np.testing.assert_allclose(curves.observed, top[ranks - 1])
        np.testing.assert_allclose(curves.probability, (ranks - 0.5) / top.size)
        assert (np.diff(curves.observed) >= 0).all()
        assert np.abs(curves.gpd - curves.observed).max() < 0.01
        assert np.abs(curves.capped - curves.observed).max() < 0.01
        assert curves.exponential[-1] > 1.0  # the exponential fit predicts scores beyond the cap
        assert curves.exponential_density[0] == pytest.approx(1.0 / (x[x > 0.8] - 0.8).mean())
        assert (curves.bin_density * np.diff(curves.bin_edges)).sum() == pytest.approx(1.0)
        for density in (curves.gpd_density, curves.capped_density):
            assert trapezoid(density, curves.grid) == pytest.approx(1.0, abs=0.01)
            assert density[-1] == 0.0

    def test_without_cap(self) -> None:
        curves = tail_curves(draw(0.2, 300))
        assert curves.capped is None
        assert curves.capped_density is None
