"""Peaks over a threshold: the generalised Pareto law of the scores above a high level.

Sign convention, here and everywhere in the project: ``xi < 0`` is a bounded (Weibull) tail, ``xi = 0`` an
exponential (Gumbel) one, ``xi > 0`` a heavy (Frechet) one. scipy's ``genpareto`` has ``c = xi``. The endpoint
is ``threshold - sigma / xi`` for ``xi < 0`` and infinite otherwise.

The likelihood is maximised along one coordinate. With ``theta = -xi / sigma`` the best shape for a given theta
is the mean of ``log(1 - theta * y)`` (Grimshaw, 1993), and ``v = log(1 - theta * max(y))`` turns the allowed
half-line of theta into the whole line, with the exponential law at ``v = 0``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import chdtri

from weince.evt.arrays import Bounds, Floats, as_scores, check_fraction

FEWEST_EXCESSES = 10
_ROUNDING = 1e-13  # equal cosines differ by less
_V_MIN = -25.0  # below this, 1 - theta * max(y) = exp(v) is lost in float64
_V_STEP = 0.5  # must divide _V_MIN, so that the grid contains 0, the exponential law


@dataclass(frozen=True)
class GPDFit:
    """A generalised Pareto fit; xi < 0 means a bounded tail. Intervals are profile-likelihood intervals."""

    xi: float
    sigma: float
    endpoint: float  # threshold - sigma / xi, infinite for xi >= 0
    xi_interval: Bounds
    endpoint_interval: Bounds
    loglik: float
    n: int
    threshold: float
    level: float
    boundary: bool  # no likelihood maximum with xi > -1: the uniform law (xi = -1) is reported


def exceed(scores: Floats, threshold: float) -> NDArray[np.bool_]:
    """Which scores lie above a threshold by more than rounding; a tie with the threshold does not exceed it."""
    above: NDArray[np.bool_] = scores - threshold > _ROUNDING * np.abs(scores).max(initial=0.0)
    return above


def excesses_over(x: ArrayLike, threshold: float) -> Floats:
    """Return ``x - threshold`` for the scores above the threshold; raise an error if they cannot be fitted."""
    scores = as_scores(x)
    y = scores[exceed(scores, threshold)] - threshold
    if y.size < FEWEST_EXCESSES:
        raise ValueError(
            f"need at least {FEWEST_EXCESSES} scores above the threshold {threshold}; got {y.size}"
        )
    if y.max() <= y.min() * (1.0 + 1e-12):
        raise ValueError(f"all {y.size} scores above the threshold {threshold} are equal: no tail to fit")
    return y


def _profile(y: Floats, top: Floats, v: Floats) -> tuple[Floats, Floats, Floats]:
    """Best xi, sigma and log-likelihood for each row of excesses (rows, n) at its own v (rows,)."""
    theta = -np.expm1(v) / top
    at_zero = theta == 0.0
    safe = np.where(at_zero, 1.0, theta)
    xi = np.where(at_zero, 0.0, np.log1p(-theta[:, None] * y).mean(axis=1))
    sigma = np.where(at_zero, y.mean(axis=1), -xi / safe)
    return xi, sigma, -y.shape[1] * (np.log(sigma) + xi + 1.0)


def maximise_rows(y: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Maximum-likelihood GPD of many samples at once, sign convention xi < 0 for a bounded tail.

    The likelihood has no maximum below xi = -1, so the highest *local* maximum with xi > -1 is taken; a row
    without one gets the edge of the family, the uniform law on (0, max).

    Args:
        y: excesses, shape (rows, n), not below 0, with a positive maximum in each row.

    Returns:
        xi, sigma, log-likelihood and v, each of shape (rows,); v is -inf at the edge.
    """
    rows, n = y.shape
    top = y.max(axis=1)
    middle = np.maximum(np.median(y, axis=1), top * 1e-12)
    # The median of a GPD is sigma (2^xi - 1) / xi, so xi = 10 peaks below `far`; beyond it steps are longer.
    far = np.ceil(float(np.log(top / middle).max())) + 8.0
    grid = np.concatenate([np.arange(_V_MIN, far, _V_STEP), np.arange(far, far + 120.0, 8.0 * _V_STEP)])
    xi_grid, loglik = np.empty((2, rows, grid.size))
    for j, v in enumerate(grid):
        xi_grid[:, j], _, loglik[:, j] = _profile(y, top, np.full(rows, v))
    loglik[xi_grid <= -1.0] = -np.inf
    inner, left, right = loglik[:, 1:-1], loglik[:, :-2], loglik[:, 2:]
    peaks = np.where((inner >= left) & (inner >= right) & np.isfinite(left), inner, -np.inf)
    best = peaks.argmax(axis=1) + 1
    exponential = -n * (np.log(y.mean(axis=1)) + 1.0)
    edge = peaks.max(axis=1) < exponential  # then the likelihood climbs all the way to xi = -1

    v = _golden(lambda u: _profile(y, top, u)[2], grid[best - 1], grid[best + 1])
    xi, sigma, loglik_at = _profile(y, top, v)
    corner = -n * np.log(top)
    edge |= xi <= -1.0
    return (
        np.where(edge, -1.0, xi),
        np.where(edge, top, sigma),
        np.where(edge, corner, loglik_at),
        np.where(edge, -np.inf, v),
    )


def _golden(f: Callable[[Floats], Floats], low: Floats, high: Floats) -> Floats:
    """Maximise f row by row between low and high; 40 steps leave 4e-9 of the bracket."""
    ratio = (np.sqrt(5.0) - 1.0) / 2.0
    a, b = low.astype(np.float64), high.astype(np.float64)
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    fc, fd = f(c), f(d)
    for _ in range(40):
        shrink = fc >= fd  # the maximum lies left of d
        a, b = np.where(shrink, a, c), np.where(shrink, d, b)
        fresh = np.where(shrink, b - ratio * (b - a), a + ratio * (b - a))
        value = f(fresh)
        c, d = np.where(shrink, fresh, d), np.where(shrink, c, fresh)
        fc, fd = np.where(shrink, value, fd), np.where(shrink, fc, value)
    middle: Floats = (a + b) / 2.0
    return middle


def gpd_loglik(y: Floats, xi: float, sigma: float) -> float:
    """Log-likelihood of the excesses under a GPD; -inf where they lie beyond its endpoint."""
    if sigma <= 0.0 or sigma + xi * float(y.max()) <= 0.0:
        return -np.inf
    if abs(xi) < 1e-9:
        return float(-y.size * np.log(sigma) - y.sum() / sigma)
    return float(-y.size * np.log(sigma) - (1.0 + 1.0 / xi) * np.log1p(xi / sigma * y).sum())


def _best_sigma(y: Floats, xi: float, start: float) -> float:
    """The scale that maximises the likelihood at a fixed xi > -1.

    The likelihood equation in sigma is convex and decreasing, so Newton's method converges from the left. A step
    across the pole at -xi * max(y) is replaced by one halfway to the pole.
    """
    pole = max(0.0, -xi * float(y.max()))
    sigma = max(start, pole * (1.0 + 1e-6))
    for _ in range(200):
        inverse = 1.0 / (sigma + xi * y)
        pull = (1.0 + xi) * y * inverse
        step = (float(pull.mean()) - 1.0) / float((pull * inverse).mean())
        new = sigma + step if sigma + step > pole else (sigma + pole) / 2.0
        if abs(new - sigma) <= 1e-11 * sigma:
            return new
        sigma = new
    return sigma


def crossing(f: Callable[[float], float], start: float, step: float) -> float:
    """Walk from start, doubling the step, to where f falls below zero; infinite if it never does."""
    near = start
    for _ in range(60):
        far = near + step
        if f(far) < 0.0:
            return float(brentq(f, near, far, xtol=1e-10))
        near, step = far, 2.0 * step
    return float(np.copysign(np.inf, step))


def _xi_interval(y: Floats, xi: float, sigma: float, floor: float) -> Bounds:
    """Profile-likelihood interval of xi: where the profile is not below floor. It stops at xi = -1."""

    def f(x: float) -> float:
        return gpd_loglik(y, x, _best_sigma(y, x, sigma)) - floor

    edge = -1.0 + 1e-6
    lower = -1.0 if xi <= edge or f(edge) >= 0.0 else float(brentq(f, edge, xi, xtol=1e-10))
    return lower, crossing(f, max(xi, edge), 2.0 * max(1.0 + xi, 0.1) / np.sqrt(y.size))


def _endpoint_interval(y: Floats, threshold: float, v_hat: float, floor: float) -> Bounds:
    """Profile-likelihood interval of the endpoint, read off the same one-dimensional profile."""
    top, n = float(y.max()), y.size

    def f(v: float) -> float:
        xi, _, loglik = _profile(y[None], np.array([top]), np.array([v]))
        # A best shape below -1 is replaced by -1: the law is uniform on (0, 1 / theta).
        return float(loglik[0] if xi[0] > -1.0 else -n * np.log(top / -np.expm1(v))) - floor

    def endpoint(v: float) -> float:
        return threshold + top / float(-np.expm1(v)) if v < 0.0 else np.inf

    v_hat = max(v_hat, _V_MIN)
    touches_top = -n * np.log(top) >= floor or f(_V_MIN) >= 0.0
    lower = threshold + top if touches_top else endpoint(float(brentq(f, _V_MIN, v_hat, xtol=1e-10)))
    if v_hat >= 0.0 or f(0.0) >= 0.0:
        return lower, np.inf
    return lower, endpoint(float(brentq(f, v_hat, 0.0, xtol=1e-10)))


def fit_gpd(x: ArrayLike, threshold: float = 0.0, *, level: float = 0.95) -> GPDFit:
    """Fit a generalised Pareto law to the scores above a threshold by maximum likelihood.

    xi < 0 means a bounded tail (scipy's ``genpareto`` has ``c = xi``); the search keeps xi > -1, below which
    the likelihood is unbounded. Scores not above the threshold are left out.

    Args:
        x: scores, shape (n,).
        threshold: the level the scores must exceed.
        level: coverage of the profile-likelihood intervals.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import fit_gpd
        >>> rng = np.random.default_rng(0)
        >>> fit = fit_gpd(1.0 - rng.random(5000) ** 0.4)  # P(1 - x < d) = d^2.5: xi = -0.4, endpoint 1
        >>> bool(fit.xi_interval[0] < -0.4 < fit.xi_interval[1])
        True
    """
    drop = float(chdtri(1, 1.0 - check_fraction(level, "level"))) / 2.0
    return fit_with_drop(excesses_over(x, threshold), float(threshold), drop, level)


def fit_with_drop(y: Floats, threshold: float, drop: float, level: float) -> GPDFit:
    """Fit excesses y (n,); the intervals contain all values that lower the log-likelihood by at most drop."""
    xi, sigma, loglik, v = (float(a[0]) for a in maximise_rows(y[None]))
    return GPDFit(
        xi=xi,
        sigma=sigma,
        endpoint=threshold - sigma / xi if xi < 0.0 else np.inf,
        xi_interval=_xi_interval(y, xi, sigma, loglik - drop),
        endpoint_interval=_endpoint_interval(y, threshold, v, loglik - drop),
        loglik=loglik,
        n=y.size,
        threshold=threshold,
        level=level,
        boundary=bool(np.isneginf(v)),
    )
