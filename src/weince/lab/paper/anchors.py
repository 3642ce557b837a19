"""Tail statistics of each anchor: those that the loss computes, and a valid comparison.

Shortfalls are ``d = 1 - cosine``. Sign convention: ``xi < 0`` is a bounded (Weibull) tail; scipy's
``genpareto`` has ``c = xi``; the endpoint is ``threshold - sigma / xi``.

The loss gates each anchor by dAIC, the difference of two least-squares fits whose *responses* differ
(``log F`` and ``log(-log F)``). Sums of squares of different responses cannot be compared: dAIC mostly measures
how much the two responses vary, which depends on the plotting positions F and hardly on the data. This module
has the same statistic in plain numpy, and a valid comparison: two likelihoods of the same exceedances.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from weince.evt.arrays import Floats, Integers
from weince.evt.gpd import maximise_rows

# The defaults of `weince.TailConfig`.
_SHARE, _K_MIN, _K_MAX = 0.1, 32, 1024  # size K of a tail
_RHO0_QUANTILE, _MARGIN, _KAPPA_RHO, _KAPPA_AIC = 0.2, 2.0, 10.0, 1.0  # the two gates
_EPS = 1e-6  # smallest shortfall

_FLOOR = 1e-12  # smallest Sxx and smallest sum of squared errors
_FEWEST_POINTS = 3
_FEWEST_EXCEEDANCES = 10

Positions = Literal["tail", "sample"]


@dataclass(frozen=True)
class AnchorTails:
    """What the loss computes from each anchor's tail; arrays of shape (anchors,)."""

    rho: Floats  # smallest shortfall
    beta: Floats  # slope of the Weibull line, not below 0
    daic: Floats  # AIC of the Gumbel proxy less that of the Weibull line
    lam: Floats  # weight of the shortfall logit
    k: Integers  # negatives in the fit
    rho0: float  # pivot of rho


@dataclass(frozen=True)
class AnchorComparison:
    """GPD against exponential on the exceedances of each anchor; arrays of shape (anchors,).

    An anchor that cannot be fitted has xi = NaN, lr = 0 and p = 1, and counts as not favouring the shortfall.
    """

    xi: Floats  # xi < 0: bounded tail
    lr: Floats  # 2 * (GPD loglik - exponential loglik)
    p_bounded: Floats  # one-sided p-value of a bounded tail, from the simulated null
    n: Integers  # exceedances of each anchor
    share_negative: float  # anchors with xi < 0
    share_bounded: float  # anchors with p_bounded <= alpha; about alpha if all tails are exponential
    share_aic: float  # anchors with xi < 0 and lr > 2: the GPD has the better AIC
    null_share_negative: float  # this share and the next, if every tail were exponential
    null_share_aic: float
    alpha: float


@dataclass(frozen=True)
class DaicArtefact:
    """dAIC of simulated tails under two plotting positions; arrays of shape (tails, anchors) or (tails,)."""

    tails: tuple[str, ...]
    daic_tail: Floats  # F = k / (K + 1), as in the loss
    daic_sample: Floats  # F = k / (N + 1), N the number of negatives
    share_tail: Floats  # share of anchors where daic_tail favours Weibull
    share_sample: Floats
    share_bounded: Floats  # share of anchors where the valid comparison finds a bounded tail at 5 %


def _as_shortfalls(shortfalls: ArrayLike) -> Floats:
    d = np.asarray(shortfalls, dtype=np.float64)
    if d.ndim != 2 or 0 in d.shape:
        raise ValueError(f"shortfalls must have shape (anchors, negatives); got {d.shape}")
    if np.isnan(d).any() or np.isneginf(d).any():
        raise ValueError(
            "shortfalls must be numbers, or inf for a pair that is not a negative; got NaN or -inf"
        )
    if d.min() < -1e-3:
        raise ValueError(f"shortfalls are 1 - cosine and cannot be negative; got {d.min()}")
    return np.sort(np.maximum(d, _EPS), axis=1)


def _tail_size(negatives: int) -> int:
    """K of an anchor with this many negatives."""
    return min(max(_K_MIN, round(_SHARE * negatives)), _K_MAX, negatives)


def _line_sse(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Slope and residual sum of squares of y (points,) on rows of x (rows, points), with intercept."""
    dx, dy = x - x.mean(axis=1, keepdims=True), y - y.mean()
    sxx = np.maximum((dx**2).sum(axis=1), _FLOOR)
    slope = (dx @ dy) / sxx
    residual = dy - slope[:, None] * dx
    return slope, np.maximum((residual**2).sum(axis=1), _FLOOR)


def _two_lines(d: Floats, total: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Weibull slope, dAIC and whether a fit was made, for sorted tails d (rows, K) and F = k / (total + 1)."""
    rows, k = d.shape
    if k < _FEWEST_POINTS:
        return np.zeros(rows), np.zeros(rows), np.zeros(rows, dtype=bool)
    x = np.log(d)
    log_f = np.log(np.arange(1, k + 1) / (total + 1.0))
    made = ((x - x.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) > _FLOOR
    beta, sse_weibull = _line_sse(x, log_f)
    _, sse_gumbel = _line_sse(x, np.log(-log_f))
    daic = k * np.log(sse_gumbel / sse_weibull)  # both lines have two parameters
    return np.where(made, np.maximum(beta, 0.0), 0.0), np.where(made, daic, 0.0), made


def anchor_tails(shortfalls: ArrayLike, *, positions: Positions = "tail") -> AnchorTails:
    """Tail statistics of each anchor as the blended loss computes them (Algorithm 1), in float64.

    The constants are the defaults of `weince.TailConfig`; `weince.tail_stats` takes others.

    Args:
        shortfalls: 1 - cosine, shape (anchors, negatives); inf where a pair is not a negative.
        positions: "tail" for F = k / (K + 1) as in the loss, "sample" for F = k / (N + 1) with N negatives.

    Examples:
        >>> import numpy as np
        >>> from weince.lab.paper.anchors import anchor_tails
        >>> shortfalls = np.random.default_rng(0).uniform(0.1, 1, size=(16, 200))
        >>> anchor_tails(shortfalls).rho.shape
        (16,)
    """
    if positions not in ("tail", "sample"):
        raise ValueError(f'positions must be "tail" or "sample"; got {positions!r}')
    d = _as_shortfalls(shortfalls)
    counts = np.isfinite(d).sum(axis=1)
    beta, daic = np.zeros((2, len(d)))
    made = np.zeros(len(d), dtype=bool)
    sizes = np.zeros(len(d), dtype=np.int64)
    for n in np.unique(counts[counts > 0]):
        rows = counts == n
        size = _tail_size(int(n))
        total = size if positions == "tail" else int(n)
        beta[rows], daic[rows], made[rows] = _two_lines(d[rows, :size], total)
        sizes[rows] = size
    rho = d[:, 0]
    known = np.sort(rho[counts > 0])
    if known.size == 0:
        raise ValueError("no anchor has a negative: every shortfall is inf")
    rho0 = float(known[round(_RHO0_QUANTILE * (known.size - 1))])
    near = expit(_KAPPA_RHO * (np.log(rho0) - np.log(rho)))
    lam = np.where(made, near * expit(_KAPPA_AIC * (daic - _MARGIN)), 0.0)
    return AnchorTails(rho, beta, daic, lam, sizes, rho0)


def _ratios(y: Floats) -> tuple[Floats, Floats]:
    """xi of each row of exceedances (rows, K), and the likelihood ratio of the GPD against the exponential."""
    xi, _, loglik, _ = maximise_rows(y)
    return xi, np.maximum(2.0 * (loglik + y.shape[1] * (np.log(y.mean(axis=1)) + 1.0)), 0.0)


def _likelihoods(d: Floats, size: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """xi, likelihood ratio and whether a fit was made, for sorted rows d and K = size."""
    edge = d[:, size : size + 1]
    y = edge - d[:, :size]
    fitted = y[:, 0] > 1e-12 * edge[:, 0]
    xi, lr = np.full(len(d), np.nan), np.zeros(len(d))
    if fitted.any():
        xi[fitted], lr[fitted] = _ratios(y[fitted])
    return xi, lr, fitted


def _signed_root(xi: Floats, lr: Floats) -> Floats:
    """Signed root of the likelihood ratio: positive when the fitted tail is bounded, negative when it is heavy."""
    return np.where(xi < 0.0, 1.0, -1.0) * np.sqrt(lr)


def _shares(xi: Floats, lr: Floats) -> tuple[float, float]:
    """Shares with xi < 0; with xi < 0 and the better AIC."""
    negative = xi < 0.0
    return float(negative.mean()), float((negative & (lr > 2.0)).mean())


def compare_anchor_tails(
    shortfalls: ArrayLike, *, alpha: float = 0.05, n_null: int = 2000, seed: int = 0
) -> AnchorComparison:
    """Test for each anchor whether its tail is bounded: likelihood of a GPD with free xi against an exponential.

    Both laws are fitted to the same data, the K hardest negatives above the (K + 1)-th, with K as in `anchor_tails`.
    With K of a few dozen the likelihood ratio does not follow its chi-square law, so its null law is simulated for
    each K in use.

    Args:
        shortfalls: 1 - cosine, shape (anchors, negatives); inf where a pair is not a negative.
        alpha: level of the tests.
        n_null: simulated exponential tails for each K.
        seed: seed of the simulation.

    Examples:
        >>> import numpy as np
        >>> from weince.lab.paper.anchors import compare_anchor_tails
        >>> shortfalls = np.random.default_rng(0).uniform(0.1, 1, size=(16, 200))
        >>> found = compare_anchor_tails(shortfalls, n_null=50)
        >>> bool(0 <= found.share_bounded <= 1)
        True
    """
    if not 0.0 < alpha < 1.0 or n_null < 1:
        raise ValueError(f"alpha must lie in (0, 1) and n_null be positive; got {alpha} and {n_null}")
    d = _as_shortfalls(shortfalls)
    counts = np.isfinite(d).sum(axis=1)
    n = np.array([min(_tail_size(int(c)), int(c) - 1) if c else 0 for c in counts])
    xi, lr, p = np.full(len(d), np.nan), np.zeros(len(d)), np.ones(len(d))
    null_shares = np.zeros((len(d), 2))
    sizes = np.unique(n[n >= _FEWEST_EXCEEDANCES])
    for size in sizes:
        rows = n == size
        xi[rows], lr[rows], fitted = _likelihoods(d[rows], int(size))
        rng = np.random.default_rng([seed, size])
        null_xi, null_lr = _ratios(rng.standard_exponential((n_null, size)))
        null_roots = np.sort(_signed_root(null_xi, null_lr))
        below = np.searchsorted(null_roots, _signed_root(xi[rows], lr[rows]), side="left")
        p[rows] = np.where(fitted, (n_null - below + 1.0) / (n_null + 1.0), 1.0)
        null_shares[rows] = _shares(null_xi, null_lr)
    share_negative, share_aic = _shares(xi, lr)
    null_negative, null_aic = (float(share) for share in null_shares.mean(axis=0))
    return AnchorComparison(
        xi=xi,
        lr=lr,
        p_bounded=p,
        n=n,
        share_negative=share_negative,
        share_bounded=float((p <= alpha).mean()),
        share_aic=share_aic,
        null_share_negative=null_negative,
        null_share_aic=null_aic,
        alpha=alpha,
    )


def daic_artefact(*, anchors: int = 256, negatives: int = 510, seed: int = 0) -> DaicArtefact:
    """Simulate scores with exponential, normal and bounded tails and compute dAIC under both plotting positions.

    If dAIC told the tails apart, it would be negative for the first two and positive for the last. The laws of
    the first two have no cap, so their scores are scaled to stay well below 1. (A normal tail is close to a
    bounded one at any finite level, so the valid comparison flags more than 5 % of its anchors.) The bounded tail
    has P(1 - s < d) proportional to d^4 near the cap: xi = -1/4.

    Args:
        anchors: simulated anchors for each tail.
        negatives: scores of each anchor.
        seed: seed of the simulation.

    Examples:
        >>> from weince.lab.paper.anchors import daic_artefact
        >>> found = daic_artefact(anchors=16, negatives=200)
        >>> found.tails[0], bool(found.share_tail[0] > 0.5)  # "Weibull", although this tail has no bound
        ('exponential', True)
    """
    rng = np.random.default_rng(seed)
    size = (anchors, negatives)
    shortfalls = {
        "exponential": 1.0 - 0.05 * rng.standard_exponential(size),
        "normal": 1.0 - 0.15 * rng.standard_normal(size),
        "bounded": rng.random(size) ** 0.25,
    }
    tail = np.array([anchor_tails(d).daic for d in shortfalls.values()])
    sample = np.array([anchor_tails(d, positions="sample").daic for d in shortfalls.values()])
    bounded = [compare_anchor_tails(d, seed=seed).share_bounded for d in shortfalls.values()]
    return DaicArtefact(
        tails=tuple(shortfalls),
        daic_tail=tail,
        daic_sample=sample,
        share_tail=(tail > 0.0).mean(axis=1),
        share_sample=(sample > 0.0).mean(axis=1),
        share_bounded=np.array(bounded),
    )
