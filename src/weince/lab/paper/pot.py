"""Checks of a generalised Pareto fit: rival laws, choice of the threshold, goodness of fit, and curves to draw.

Sign convention: ``xi < 0`` is a bounded (Weibull) tail; scipy's ``genpareto`` has ``c = xi``; the endpoint is
``threshold - sigma / xi``. The fits themselves are in `weince.evt.gpd`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.stats import chi2, gamma, genpareto, t

from weince.evt.arrays import Bounds, Floats, Integers, as_scores, check_fraction, check_least
from weince.evt.gpd import (
    GPDFit,
    crossing,
    excesses_over,
    fit_gpd,
    gpd_loglik,
    maximise_rows,
)

_POINTS = 200  # of the curves to draw
_BINS = 40
_BLOCK = 4_000_000  # 64 times the number of float64 values simulated at once


@dataclass(frozen=True)
class ExponentialFit:
    """The exponential law refitted to the same excesses, and the likelihood ratio of the GPD against it."""

    sigma: float
    sigma_interval: Bounds
    loglik: float
    n: int
    lr: float  # 2 * (GPD loglik - this loglik)
    p_value: float  # chi-square with 1 degree of freedom


@dataclass(frozen=True)
class CappedFit:
    """A GPD whose endpoint is a known cap; xi < 0 always, and the tail index of the cap is -1 / xi."""

    xi: float
    sigma: float
    endpoint: float
    xi_interval: Bounds  # exact: the estimate is a gamma variable
    loglik: float
    n: int
    lr: float  # 2 * (free GPD loglik - this loglik), not below 0; NaN for xi <= -1, which free fits exclude
    p_value: float  # chi-square, 1 degree of freedom: small if the tail does not end at the cap; NaN if lr is


@dataclass(frozen=True)
class ThresholdStability:
    """Fits over a range of thresholds, each array of shape (thresholds,) or (thresholds, 2) for intervals.

    Above a threshold where the GPD holds, xi and the modified scale ``sigma - xi * threshold`` stay constant.
    xi < 0 means a bounded tail.
    """

    thresholds: Floats
    n: Integers
    xi: Floats
    xi_interval: Floats
    modified_scale: Floats
    modified_scale_interval: Floats


@dataclass(frozen=True)
class MeanResidualLife:
    """Mean excess over each threshold, linear in the threshold with slope xi / (1 - xi) under a GPD."""

    thresholds: Floats
    n: Integers
    mean_excess: Floats
    interval: Floats  # (thresholds, 2), Student t


@dataclass(frozen=True)
class GoodnessOfFit:
    """Kolmogorov-Smirnov and Anderson-Darling statistics with parametric-bootstrap p-values."""

    ks: float
    ks_p_value: float
    ad: float
    ad_p_value: float
    bootstraps: int


@dataclass(frozen=True)
class TailCurves:
    """Points to draw: quantiles (observed against each law) and densities, all in units of the score."""

    probability: Floats  # (points,) of the excess distribution
    observed: Floats
    gpd: Floats
    exponential: Floats  # refitted, not the GPD's scale with xi = 0
    capped: Floats | None  # GPD ending at the cap; None when no cap was given
    grid: Floats  # (points,) scores at which the densities are given
    gpd_density: Floats
    exponential_density: Floats
    capped_density: Floats | None
    bin_edges: Floats  # (bins + 1,)
    bin_density: Floats  # (bins,) histogram of the observed scores


def _pick_thresholds(scores: Floats, thresholds: ArrayLike | None) -> Floats:
    if thresholds is None:
        return np.quantile(scores, np.linspace(0.90, 0.995, 20))
    return np.unique(as_scores(thresholds, "thresholds"))


def _modified_scale_interval(y: Floats, fit: GPDFit) -> Bounds:
    """Profile-likelihood interval of ``sigma - xi * threshold``."""
    if fit.boundary:
        return np.nan, np.nan
    u, top = fit.threshold, float(y.max())
    centre = fit.sigma - fit.xi * u
    floor = fit.loglik - float(chi2.ppf(fit.level, 1)) / 2.0
    reach = 4.0 * max(fit.xi_interval[1] - fit.xi_interval[0], 1e-3)

    def f(scale: float) -> float:
        low, high = max(-1.0, fit.xi - reach), fit.xi + reach
        for slope in (u, u + top):  # sigma > 0, and sigma + xi * max(y) > 0, as bounds on xi
            if slope > 0.0:
                low = max(low, -scale / slope)
            elif slope < 0.0:
                high = min(high, -scale / slope)
        if low >= high:
            return -1e300
        pad = 1e-12 * (high - low)
        search = minimize_scalar(
            lambda xi: -max(gpd_loglik(y, xi, scale + xi * u), -1e300),
            bounds=(low + pad, high - pad),
            method="bounded",
            options={"xatol": 1e-9},
        )
        return float(-search.fun) - floor

    if f(centre) <= 0.0:  # the search misses the sharp maximum of a few tied values
        return np.nan, np.nan
    step = 0.5 * (abs(u) * (fit.xi_interval[1] - fit.xi_interval[0]) + fit.sigma / np.sqrt(y.size))
    return crossing(f, centre, -step), crossing(f, centre, step)


def threshold_stability(
    x: ArrayLike, thresholds: ArrayLike | None = None, *, level: float = 0.95
) -> ThresholdStability:
    """Fit the GPD over several thresholds; xi < 0 means a bounded tail.

    Args:
        x: scores, shape (n,).
        thresholds: levels to try; the quantiles 0.90 to 0.995 when not given.
        level: coverage of the profile-likelihood intervals.

    Examples:
        >>> import numpy as np
        >>> from weince.lab.paper.pot import threshold_stability
        >>> scores = 1 - np.random.default_rng(0).random(2000) ** 0.4  # bounded by 1: xi = -0.4
        >>> found = threshold_stability(scores, [0.4, 0.5])
        >>> bool((found.xi < 0).all())
        True
    """
    scores = as_scores(x)
    levels = _pick_thresholds(scores, thresholds)
    fits, scale_intervals = [], []
    for u in levels:
        fits.append(fit_gpd(scores, float(u), level=level))
        scale_intervals.append(_modified_scale_interval(excesses_over(scores, float(u)), fits[-1]))
    return ThresholdStability(
        thresholds=levels,
        n=np.array([fit.n for fit in fits]),
        xi=np.array([fit.xi for fit in fits]),
        xi_interval=np.array([fit.xi_interval for fit in fits]),
        modified_scale=np.array([fit.sigma - fit.xi * fit.threshold for fit in fits]),
        modified_scale_interval=np.array(scale_intervals),
    )


def mean_residual_life(
    x: ArrayLike, thresholds: ArrayLike | None = None, *, level: float = 0.95
) -> MeanResidualLife:
    """Mean excess over each threshold, with Student t intervals.

    Args:
        x: scores, shape (n,).
        thresholds: levels to try; the quantiles 0.90 to 0.995 when not given.
        level: coverage of the intervals.

    Examples:
        >>> import numpy as np
        >>> from weince.lab.paper.pot import mean_residual_life
        >>> scores = 1 - np.random.default_rng(0).random(2000) ** 0.4  # bounded by 1: xi = -0.4
        >>> found = mean_residual_life(scores)
        >>> bool(found.mean_excess[0] > found.mean_excess[-1])  # it falls where the tail is bounded
        True
    """
    scores = as_scores(x)
    levels = _pick_thresholds(scores, thresholds)
    samples = [excesses_over(scores, float(u)) for u in levels]
    n = np.array([y.size for y in samples])
    mean = np.array([y.mean() for y in samples])
    half = np.array([y.std(ddof=1) for y in samples]) / np.sqrt(n)
    half *= t.ppf(0.5 + check_fraction(level, "level") / 2.0, n - 1)
    return MeanResidualLife(levels, n, mean, np.stack([mean - half, mean + half], axis=1))


def fit_exponential(x: ArrayLike, threshold: float = 0.0, *, level: float = 0.95) -> ExponentialFit:
    """Fit an exponential law (xi = 0) with its own scale, and test it against the GPD on the same excesses.

    Args:
        x: scores, shape (n,).
        threshold: the level the scores must exceed.
        level: coverage of the (exact) interval of sigma.

    Examples:
        >>> import numpy as np
        >>> from weince.lab.paper.pot import fit_exponential
        >>> scores = 1 - np.random.default_rng(0).random(2000) ** 0.4  # bounded by 1: xi = -0.4
        >>> bool(fit_exponential(scores, 0.5).p_value < 0.05)  # the tail is not exponential
        True
    """
    y = excesses_over(x, threshold)
    tail = (1.0 - check_fraction(level, "level")) / 2.0
    loglik = float(-y.size * (np.log(y.mean()) + 1.0))
    lr = max(0.0, 2.0 * (float(maximise_rows(y[None])[2][0]) - loglik))
    interval = (float(y.sum() / gamma.ppf(1.0 - tail, y.size)), float(y.sum() / gamma.ppf(tail, y.size)))
    return ExponentialFit(float(y.mean()), interval, loglik, y.size, lr, float(chi2.sf(lr, 1)))


def fit_capped(x: ArrayLike, threshold: float = 0.0, *, cap: float = 1.0, level: float = 0.95) -> CappedFit:
    """Fit a GPD that ends at a known cap: P(cap - x < d) is a power -1 / xi of d. xi < 0 always.

    Args:
        x: scores, shape (n,), all below the cap.
        threshold: the level the scores must exceed.
        cap: the known endpoint; 1 for cosines.
        level: coverage of the (exact) interval of xi.

    Examples:
        >>> import numpy as np
        >>> from weince.lab.paper.pot import fit_capped
        >>> scores = 1 - np.random.default_rng(0).random(2000) ** 0.4  # bounded by 1: xi = -0.4
        >>> found = fit_capped(scores, 0.5)
        >>> bool(found.xi_interval[0] < -0.4 < found.xi_interval[1])
        True
    """
    y = excesses_over(x, threshold)
    room = float(cap) - float(threshold)
    if y.max() >= room:
        raise ValueError(f"scores must lie below the cap {cap}; got a largest score of {threshold + y.max()}")
    tail = (1.0 - check_fraction(level, "level")) / 2.0
    total = float(-np.log1p(-y / room).sum())  # -xi times a gamma variable of shape n
    xi = -total / y.size
    loglik = gpd_loglik(y, xi, -xi * room)
    # Free fits stop at xi = -1. Below that this law is not among them, so there is no likelihood ratio.
    nested = xi > -1.0
    lr = max(0.0, 2.0 * (float(maximise_rows(y[None])[2][0]) - loglik)) if nested else np.nan
    interval = (-total / float(gamma.ppf(tail, y.size)), -total / float(gamma.ppf(1.0 - tail, y.size)))
    return CappedFit(xi, -xi * room, float(cap), interval, loglik, y.size, lr, float(chi2.sf(lr, 1)))


def _hazard(y: Floats, xi: Floats, sigma: Floats) -> Floats:
    """Minus log survival of rows of excesses (rows, n): unit exponential when the law is right."""
    shape, scaled = xi[:, None], y / sigma[:, None]
    small = np.abs(shape) < 1e-9
    # The largest value of a uniform fit lies on its endpoint, where the logarithm would be infinite.
    inside = np.maximum(shape * scaled, -1.0 + 1e-16)
    hazard: Floats = np.where(small, scaled, np.log1p(inside) / np.where(small, 1.0, shape))
    return hazard


def _fit_statistics(y: Floats, xi: Floats, sigma: Floats) -> tuple[Floats, Floats]:
    """Kolmogorov-Smirnov and Anderson-Darling statistics of each row, shapes (rows,)."""
    n = y.shape[1]
    hazard = np.sort(_hazard(y, xi, sigma), axis=1)
    u = -np.expm1(-hazard)
    rank = np.arange(1, n + 1)
    ks = np.maximum(rank / n - u, u - (rank - 1) / n).max(axis=1)
    log_u = np.log(np.maximum(u, 1e-300))
    ad = -n - ((2 * rank - 1) * (log_u - hazard[:, ::-1])).mean(axis=1)
    return ks, ad


def goodness_of_fit(
    x: ArrayLike, threshold: float = 0.0, *, bootstraps: int = 200, seed: int = 0
) -> GoodnessOfFit:
    """Test the GPD on the scores above a threshold.

    The parameters are estimated, so tabulated p-values would be too large. Instead, each p-value is the rank of
    the statistic among those of samples that are drawn from the fitted law and fitted again. Dependent scores,
    such as those of one batch, make the p-values too small.

    Args:
        x: scores, shape (n,).
        threshold: the level the scores must exceed.
        bootstraps: simulated samples.
        seed: seed of the simulation.

    Examples:
        >>> import numpy as np
        >>> from weince.lab.paper.pot import goodness_of_fit
        >>> scores = 1 - np.random.default_rng(0).random(2000) ** 0.4  # bounded by 1: xi = -0.4
        >>> found = goodness_of_fit(scores, 0.5, bootstraps=20)
        >>> bool(0 < found.ks_p_value <= 1)
        True
    """
    check_least(bootstraps=(bootstraps, 1))
    y = excesses_over(x, threshold)
    rng = np.random.default_rng(seed)
    xi, sigma, _, _ = maximise_rows(y[None])
    ks, ad = (float(a[0]) for a in _fit_statistics(y[None], xi, sigma))
    above = np.zeros(2)
    rows = max(1, min(bootstraps, _BLOCK // (64 * y.size)))  # small blocks stay in the cache
    for start in range(0, bootstraps, rows):
        count = min(rows, bootstraps - start)
        sample = sample_gpd(rng, float(xi[0]), float(sigma[0]), (count, y.size))
        new_xi, new_sigma, _, _ = maximise_rows(sample)
        new_ks, new_ad = _fit_statistics(sample, new_xi, new_sigma)
        above += (new_ks >= ks).sum(), (new_ad >= ad).sum()
    p_ks, p_ad = (above + 1.0) / (bootstraps + 1.0)
    return GoodnessOfFit(ks, float(p_ks), ad, float(p_ad), bootstraps)


def sample_gpd(rng: np.random.Generator, xi: float, sigma: float, shape: tuple[int, ...]) -> Floats:
    """Draw GPD excesses of the given shape; xi < 0 gives a bounded tail."""
    hazard = rng.standard_exponential(shape)
    return sigma * (hazard if xi == 0.0 else np.expm1(xi * hazard) / xi)


def tail_curves(x: ArrayLike, threshold: float = 0.0, *, cap: float | None = None) -> TailCurves:
    """Quantile and density points of the scores above a threshold, against three laws fitted to them.

    The laws are the GPD (xi < 0 for a bounded tail), the exponential with its own refitted scale, and, when
    a cap is given, the GPD that ends exactly there.

    Args:
        x: scores, shape (n,).
        threshold: the level the scores must exceed.
        cap: known endpoint, 1 for cosines.

    Examples:
        >>> import numpy as np
        >>> from weince.lab.paper.pot import tail_curves
        >>> scores = 1 - np.random.default_rng(0).random(2000) ** 0.4  # bounded by 1: xi = -0.4
        >>> tail_curves(scores, 0.5, cap=1.0).gpd_density.shape
        (200,)
    """
    y = excesses_over(x, threshold)
    count = min(_POINTS, y.size)
    # Ranks are spread evenly in log survival, so that all of the few largest scores are shown.
    ranks = np.unique(np.round(y.size + 1 - np.geomspace(y.size, 1, count)).astype(int))
    probability = (ranks - 0.5) / y.size
    span = max(float(y.max()), 0.0 if cap is None else cap - threshold)
    grid = np.linspace(0.0, 1.1 * span, _POINTS)
    fit = fit_gpd(x, threshold)
    laws = [genpareto(fit.xi, scale=fit.sigma), genpareto(0.0, scale=fit_exponential(x, threshold).sigma)]
    if cap is not None:
        capped = fit_capped(x, threshold, cap=cap)
        laws.append(genpareto(capped.xi, scale=capped.sigma))
    quantiles = [threshold + np.asarray(law.ppf(probability)) for law in laws]
    densities = [np.asarray(law.pdf(grid)) for law in laws]
    height, edges = np.histogram(y, bins=_BINS, range=(0.0, float(y.max())), density=True)
    return TailCurves(
        probability=probability,
        observed=threshold + np.sort(y)[ranks - 1],
        gpd=quantiles[0],
        exponential=quantiles[1],
        capped=quantiles[2] if cap is not None else None,
        grid=threshold + grid,
        gpd_density=densities[0],
        exponential_density=densities[1],
        capped_density=densities[2] if cap is not None else None,
        bin_edges=threshold + edges,
        bin_density=height,
    )
