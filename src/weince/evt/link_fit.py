"""The blended link fitted to a bank of scores: estimates, intervals, and the grid that cross-checks them.

``logit = ((1 - lam) * s + lam * g(s)) / tau`` with ``g(s) = -log(1 - s)`` and ``lam`` in [0, 1]; ``lam = 0``
is softmax. With ``a = (1 - lam) / tau`` and ``b = lam / tau`` this is a conditional logit in the two features
``s`` and ``g(s)`` with non-negative weights, so the fit is exact (see `weince.evt.choice`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special  # not scipy.stats, which takes a second to import

from weince.evt import choice
from weince.evt.arrays import Bounds, Floats, check_fraction
from weince.evt.choice import Choices, Optimum, Partition

# Ends of intervals of tau are searched up to this far from the estimate, in log tau.
_FAR = 8.0

FEW_BEATEN = 10
"""A fit on fewer beaten anchors (a candidate has a higher score than the positive) has a note that says so."""


@dataclass(frozen=True)
class LinkFit:
    """The blended link fitted to a bank, and the softmax link beside it."""

    lam: float  # weight of the shortfall coordinate, in [0, 1]
    tau: float  # temperature of the blended link
    tau0: float  # temperature of the softmax link alone
    loglik: float  # total log-likelihood of the blended link
    loglik0: float  # total log-likelihood of the softmax link
    lam_interval: Bounds  # interval for ``lam``
    tau_interval: Bounds  # interval for ``tau``
    tau0_interval: Bounds  # interval for ``tau0``, cluster-robust, symmetric in its logarithm
    # "sandwich" (``lam`` well inside (0, 1)), "profile" (near 0 or 1) or "none". The first two are cluster-robust
    interval_method: str
    converged: bool  # whether both fits reached their maximum
    # True when every positive has the top score, up to a shortfall of 1e-6: then no finite fit of the blend exists,
    # and its numbers are NaN
    separated: bool
    notes: tuple[str, ...]  # sentences about what makes this fit doubtful; empty when nothing does


class Pair(NamedTuple):
    """Both links on the same choices; ``null.theta`` has its second weight at 0."""

    null: Optimum
    full: Optimum

    @property
    def separated(self) -> bool:
        """Whether no finite fit exists, see `weince.evt.choice.separated`."""
        return bool(np.isnan(self.full.theta).any())

    @property
    def lam_tau(self) -> tuple[float, float]:
        """(lam, tau) of the blend; NaN if no finite fit exists."""
        return (np.nan, np.nan) if self.separated else _lam_tau(self.full.theta)

    @property
    def tau0(self) -> float:
        """Temperature of softmax; NaN if no finite fit exists."""
        return np.nan if np.isnan(self.null.theta[0]) else _lam_tau(self.null.theta)[1]


def _lam_tau(theta: Floats) -> tuple[float, float]:
    """(lam, tau) of the weights (a, b). If both weights are 0, lam is 0 and tau infinite."""
    total = float(theta.sum())
    return (0.0, np.inf) if total == 0.0 else (float(theta[1]) / total, 1.0 / total)


def fit_pair(choices: Choices, start: Pair | None = None) -> Pair:
    """Fit softmax, then the blend from there. If the blend gains nothing, it takes the weights of softmax."""
    if start is not None and np.isnan(start.null.theta[0]):
        start = None  # it was fitted to separated choices and has no finite weights
    null = choice.fit(choices.using(0), None if start is None else start.null.theta[:1])
    null = null._replace(theta=np.r_[null.theta, 0.0])
    if np.isnan(null.theta[0]):
        return Pair(null, choice.fit(choices))
    warm = null.theta if start is None or np.isnan(start.full.theta).any() else start.full.theta
    full = choice.fit(choices, warm)
    if full.theta[1] == 0.0 or full.value <= null.value:
        full = full._replace(theta=null.theta, value=null.value)
    return Pair(null, full)


def _sandwich(choices: Choices, theta: Floats) -> tuple[Floats, Floats]:
    """Cluster-robust and model-based covariance of the weights, (k, k) each."""
    _, mean, cov = choice.moments(choices, theta)
    information = cov.sum(axis=0)
    small = (choices.anchors - 1) / (choices.anchors - len(theta))
    robust = small * choice.cluster_covariance(choices, mean, information)
    return robust, np.linalg.pinv(information, hermitian=True)


def _slopes(theta: Floats) -> Floats:
    """Derivatives (2, 2) of (lam, log tau) by the weights (a, b)."""
    total = theta.sum()
    return np.asarray(np.array([[-theta[1], theta[0]], [-total, -total]]) / total**2)


def _along(choices: Choices, origin: Floats, direction: Floats) -> Partition:
    """``A`` at the weights ``origin + x * direction``, with its derivatives by ``x``."""
    partition = choice.partition_of(choices)

    def evaluate(x: Floats) -> tuple[float, Floats, Floats]:
        value, gradient, hessian = partition(origin + x[0] * direction)
        return value, (gradient @ direction)[None], np.atleast_2d(direction @ hessian @ direction)

    return evaluate


def _profile_lam(choices: Choices, lam: float, start: float) -> float:
    """Best log-likelihood with ``lam`` held fixed."""
    along = _along(choices, np.zeros(2), np.array([1.0 - lam, lam]))
    return choice.maximise(along, np.zeros(1), np.array([start]), tolerance=1e-9).value


def _profile_tau(choices: Choices, tau: float, start: float) -> float:
    """Best log-likelihood with ``tau`` held fixed."""
    along = _along(choices, np.array([1.0 / tau, 0.0]), np.array([-1.0, 1.0]) / tau)
    # The likelihood is concave in lam: if it still rises at 1, the best allowed lam is 1, otherwise lower.
    value, descent, _ = along(np.ones(1))
    return (
        -value
        if descent[0] <= 0.0
        else choice.maximise(along, np.zeros(1), np.array([start]), tolerance=1e-9).value
    )


def _end(drop: Callable[[float], float], allowed: float, middle: float, step: float, bound: float) -> float:
    """Point between ``middle``, where ``drop`` is 0, and ``bound`` where it reaches ``allowed``; else ``bound``."""

    # The square root of the drop is nearly linear, so secant steps need few evaluations.
    @cache
    def excess(x: float) -> float:
        return float(np.sqrt(max(drop(x), 0.0)) - np.sqrt(allowed))

    reach = middle
    while reach != bound:
        reach = min(middle + step, bound) if bound > middle else max(middle - step, bound)
        if excess(reach) > 0.0:
            return float(optimize.brentq(excess, middle, reach, xtol=1e-4))
        step *= 2.0
    return bound


def _intervals(choices: Choices, full: Optimum, level: float) -> tuple[Bounds, Bounds, str]:
    """Intervals for lam and tau: sandwich when lam is well inside (0, 1), else by the profile likelihood.

    The profile likelihood's threshold is scaled by the ratio of the robust to the model-based variance, so
    that both kinds allow for dependence within a batch and agree where the likelihood is quadratic.
    """
    theta = full.theta
    none = (np.nan, np.nan), (np.nan, np.nan), "none"
    if len(choices.labels) < 2 or np.isnan(theta).any() or theta.sum() == 0.0:
        return none
    lam, tau = _lam_tau(theta)
    robust, plain = (_slopes(theta) @ v @ _slopes(theta).T for v in _sandwich(choices, theta))
    if np.any(np.diag(plain) <= 0.0):
        return none
    quantile = float(special.stdtrit(len(choices.labels) - 1, 0.5 + level / 2.0))
    half, log_half = quantile * np.sqrt(np.diag(robust))
    # Within four half-widths of a bound the likelihood is too skewed for a symmetric interval.
    if lam - 4.0 * half > 0.0 and lam + 4.0 * half < 1.0:
        taus = _by_factor(tau, log_half)
        return (float(lam - half), float(lam + half)), taus, "sandwich"
    allowed = 0.5 * quantile**2 * np.diag(robust) / np.diag(plain)

    def lam_drop(x: float) -> float:
        return full.value - _profile_lam(choices, x, 1.0 / tau)

    def tau_drop(x: float) -> float:
        return full.value - _profile_tau(choices, tau * float(np.exp(x)), lam)

    steps = np.maximum(1.2 * np.array([half, log_half]), 1e-3)
    lams = [_end(lam_drop, float(allowed[0]), lam, float(steps[0]), bound) for bound in (0.0, 1.0)]
    logs = [_end(tau_drop, float(allowed[1]), 0.0, float(steps[1]), bound) for bound in (-_FAR, _FAR)]
    # An end that the search does not reach is unbounded.
    taus = (
        0.0 if logs[0] == -_FAR else tau * float(np.exp(logs[0])),
        np.inf if logs[1] == _FAR else tau * float(np.exp(logs[1])),
    )
    return (lams[0], lams[1]), taus, "profile"


def softmax_interval(choices: Choices, null: Optimum, level: float) -> Bounds:
    """Cluster-robust interval for the temperature of softmax; NaN with one batch or without a finite temperature."""
    weight = float(null.theta[0])
    if len(choices.labels) < 2 or not weight > 0.0:
        return np.nan, np.nan
    robust, _ = _sandwich(choices.using(0), null.theta[:1])
    quantile = float(special.stdtrit(len(choices.labels) - 1, 0.5 + level / 2.0))
    return _by_factor(1.0 / weight, quantile * np.sqrt(robust[0, 0]) / weight)


def _by_factor(tau: float, log_half: float) -> Bounds:
    """The temperatures ``log_half`` below and above on the scale of logarithms; 0 and inf where float64 ends."""
    with np.errstate(over="ignore"):
        factor = float(np.exp(log_half))
    return tau / factor, tau * factor


def _notes(choices: Choices, pair: Pair) -> tuple[str, ...]:
    """What a reader must know before trusting this fit."""
    beaten, n = int(choices.beaten[0].sum()), choices.anchors
    if pair.separated and beaten:
        return (
            f"In {beaten} of {n} fitted anchors a candidate beats the positive, but both lie within a shortfall of "
            f"{choice.EPS:g}, where the blend cannot tell them apart: no finite fit exists.",
        )
    if pair.separated:
        return (
            f"Perfect separation: all {n} fitted anchors have their positive at the top, so the likelihood "
            "rises without end as the temperature falls to 0 and no finite fit exists.",
        )
    notes = []
    if beaten < FEW_BEATEN:
        notes.append(
            f"Only {beaten} of {n} fitted anchors have a candidate above their positive: the fit rests on those."
        )
    if pair.full.theta.sum() == 0.0:
        notes.append(
            "Higher scores do not win more often here: the temperature is infinite and lam has no meaning."
        )
    if not (pair.null.converged and pair.full.converged):
        notes.append("The fit did not converge.")
    spread = np.sqrt(np.diag(pair.full.hessian))
    correlation = pair.full.hessian[0, 1] / max(float(spread.prod()), 1e-300)
    if correlation > 1.0 - 1e-6 or spread.min() == 0.0:
        notes.append("The scores vary too little to tell the two coordinates apart: lam is not determined.")
    return tuple(notes)


def link_fit(choices: Choices, pair: Pair, level: float) -> LinkFit:
    """Estimates, intervals and notes of a pair of fits."""
    lams, taus, method = _intervals(choices, pair.full, level)
    converged = pair.null.converged and pair.full.converged
    notes = _notes(choices, pair)
    values = (np.nan, np.nan) if pair.separated else (pair.full.value, pair.null.value)
    plain = softmax_interval(choices, pair.null, level)
    return LinkFit(
        *pair.lam_tau, pair.tau0, *values, lams, taus, plain, method, converged, pair.separated, notes
    )


def fit_link(scores: ArrayLike, positives: ArrayLike, batches: ArrayLike, *, level: float = 0.95) -> LinkFit:
    """Fit the blended link and the softmax link to all anchors; intervals allow for dependence within batches.

    Args:
        scores: ``(anchors, candidates)`` cosines; NaN or -inf marks a column that does not compete.
        positives: ``(anchors,)`` column of each anchor's positive.
        batches: ``(anchors,)`` integer batch of each anchor.
        level: Level of the intervals.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import link_bank, fit_link
        >>> z_i, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> bank = link_bank(z_i, z_i + noise, batch_size=32, batches=8)
        >>> bool(0 <= fit_link(*bank).lam <= 1)
        True
    """
    check_fraction(level, "level")
    choices = choice.read_choices(scores, positives, batches)
    return link_fit(choices, fit_pair(choices), level)
