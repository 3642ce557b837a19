"""Conditional logit with non-negative weights: the exact fit behind the link test.

An anchor ``i`` chooses one of its candidates ``k`` with probability proportional to
``exp(sum_j theta_j * f_j(s_ik))``, with ``theta >= 0``. The log-likelihood is concave in ``theta``, so a
Newton method that respects the bounds finds its global maximum.

Features are stored as differences from those of the positive. Then the log-likelihood of the positives is
``-A(theta)``, where ``A`` is the sum over anchors of ``log sum_k exp(theta . x_ik)``. If other candidates were
chosen, it is ``theta . T - A(theta)``, where ``T`` sums the features of those candidates. ``A`` is the only
expensive part and does not depend on which candidates were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weince.evt.arrays import CORES, Floats, Integers, as_integers, on_all_cores

T = TypeVar("T")
# theta (k,) -> A, its gradient (k,) and its Hessian (k, k).
Partition = Callable[[Floats], tuple[float, Floats, Floats]]

# Rows are processed in blocks of about this many scores, so that the temporaries stay in the cache.
_BLOCK = 2**17
# The most Newton steps of a fit; a fit that needs more is reported as not converged.
_STEPS = 100
# Scores may leave [-1, 1] by this much through rounding; anything further is not a cosine.
_ROUNDING = 1e-3
# Smallest shortfall 1 - s: at the cap its logarithm would be infinite.
EPS = 1e-6


def translation(scores: Floats) -> Floats:
    """The softmax (Gumbel) coordinate: the score itself."""
    return scores


def shortfall(scores: Floats) -> Floats:
    """The endpoint (Weibull) coordinate ``-log(1 - s)``, with ``1 - s`` floored at ``EPS``."""
    return np.asarray(-np.log(np.maximum(1.0 - scores, EPS)))


Coordinate = Callable[[Floats], Floats]


@dataclass(frozen=True, eq=False)
class Choices:
    """Observed choices, sorted by batch."""

    features: Floats  # ``(k, anchors, candidates)`` features, each minus that of the anchor's positive
    # ``(anchors, candidates)``, True where there is no candidate; None when all are present
    absent: NDArray[np.bool_] | None
    batches: Integers  # ``(anchors,)`` index of each anchor's batch, ascending from 0
    labels: Integers  # ``(batches,)`` the caller's name of each batch
    tops: Floats  # ``(k, anchors)`` largest feature, 0 if it is the positive's

    @property
    def beaten(self) -> NDArray[np.bool_]:
        """``(k, anchors)``, True where some candidate has a larger feature than the positive."""
        return np.asarray(self.tops > 0.0)

    @property
    def anchors(self) -> int:
        return int(self.features.shape[1])

    def rows(self, rows: Integers) -> Choices:
        """The choices of some anchors."""
        absent = None if self.absent is None else self.absent[rows]
        return Choices(self.features[:, rows], absent, self.batches[rows], self.labels, self.tops[:, rows])

    def take(self, which: Integers) -> Choices:
        """The choices of the batches ``which`` (indices, not labels)."""
        which = np.sort(which)
        some = self.rows(np.flatnonzero(np.isin(self.batches, which)))
        return replace(some, batches=np.searchsorted(which, some.batches), labels=self.labels[which])

    def using(self, *which: int) -> Choices:
        """The same choices with only some of the features."""
        keep = list(which)
        # A slice is a view, so a large bank is not copied.
        columns = self.features[: len(keep)] if keep == list(range(len(keep))) else self.features[keep]
        return Choices(columns, self.absent, self.batches, self.labels, self.tops[keep])

    def by_batch(self, values: Floats) -> Floats:
        """Sums of ``values`` (anchors, ...) over the anchors of each batch."""
        starts = np.searchsorted(self.batches, np.arange(len(self.labels)))
        return np.asarray(np.add.reduceat(values, starts, axis=0))


def read_scores(scores: ArrayLike, positives: ArrayLike) -> tuple[Floats, Integers]:
    """Check scores (NaN or -inf: no candidate there) and positives; absent scores are returned as NaN."""
    s = np.array(scores, dtype=np.float64)
    if s.ndim != 2 or s.shape[0] == 0:
        raise ValueError(f"scores must be (anchors, candidates); got shape {s.shape}")
    s[s == -np.inf] = np.nan
    columns = as_integers(positives, "positives", len(s), "anchor")
    if columns.min() < 0 or columns.max() >= s.shape[1]:
        low, high = columns.min(), columns.max()
        raise ValueError(f"positives must be columns 0 to {s.shape[1] - 1}; got values from {low} to {high}")
    absent = np.isnan(s)
    low, high = np.fmin.reduce(s, axis=None), np.fmax.reduce(s, axis=None)
    if max(-low, high) > 1.0 + _ROUNDING:
        raise ValueError(f"scores must be cosines in [-1, 1]; got up to {max(-low, high):.4g}")
    missing = absent[np.arange(len(s)), columns]
    if missing.any():
        row = int(np.argmax(missing))
        raise ValueError(
            f"every positive must have a score; got NaN or -inf, which mark no candidate, for anchor {row}"
        )
    lonely = s.shape[1] - absent.sum(axis=1) < 2
    if lonely.any():
        row = int(np.argmax(lonely))
        raise ValueError(
            f"every anchor needs its positive and another candidate; got one alone for anchor {row}"
        )
    return np.clip(s, -1.0, 1.0, out=s), columns


def read_choices(
    scores: ArrayLike,
    positives: ArrayLike,
    batches: ArrayLike,
    *,
    coordinates: Sequence[Coordinate] = (translation, shortfall),
) -> Choices:
    """Check the input and turn scores into features relative to the positive's."""
    s, columns = read_scores(scores, positives)
    labels, codes = np.unique(as_integers(batches, "batches", len(s), "anchor"), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    if np.any(np.diff(codes) < 0):
        s, columns, codes = s[order], columns[order], codes[order]
    rows = np.arange(len(s))
    positive = s[rows, columns]
    gaps = np.isnan(s)
    counts = gaps.sum(axis=1)
    # Usually every anchor lacks the same number of columns (its own): then the gaps are removed. Otherwise a
    # gap takes the positive's score, so that it changes no maximum, and its weight is zero in every sum.
    even = bool(counts.min() == counts.max())
    s = s[~gaps].reshape(len(s), -1) if even else np.where(gaps, positive[:, None], s)
    features = np.empty((len(coordinates), *s.shape))
    for j, coordinate in enumerate(coordinates):
        np.subtract(coordinate(s), coordinate(positive)[:, None], out=features[j])
    # Equal embeddings give equal cosines only up to rounding.
    if np.ptp(features[0]) < 1e-12:
        raise ValueError(
            "all candidates of every anchor have the same score: there is nothing to choose between"
        )
    return Choices(features, None if even else gaps, codes.astype(np.int64), labels, features.max(axis=2))


def candidate_weights(choices: Choices, theta: Floats, rows: slice) -> tuple[Floats, Floats]:
    """Unnormalised weights ``exp(logit - top)`` of a block, and ``top``, its rows' largest logit."""
    u = theta[0] * choices.features[0, rows]
    for weight, feature in zip(theta[1:], choices.features[1:], strict=True):
        if weight != 0.0:
            u += weight * feature[rows]
    # All coordinates rise with the score, so the candidate with the top score has the top logit.
    top = np.asarray(np.where(theta >= 0.0, theta, 0.0) @ choices.tops[:, rows])
    u -= top[:, None]
    np.exp(u, out=u)
    if choices.absent is not None:
        u[choices.absent[rows]] = 0.0
    return u, top


def blocks(anchors: int, candidates: int) -> list[slice]:
    """Slices of rows that hold about ``_BLOCK`` scores each."""
    step = max(1, _BLOCK // candidates)
    return [slice(i, min(i + step, anchors)) for i in range(0, anchors, step)]


def each_block(work: Callable[[slice], T], anchors: int, candidates: int) -> list[T]:
    """Results of ``work`` for the rows of every block, in order; each core takes every so many-th block."""
    rows = blocks(anchors, candidates)
    if len(rows) == 1:
        return [work(rows[0])]
    parts = on_all_cores(lambda part: [work(block) for block in part], [rows[k::CORES] for k in range(CORES)])
    return [parts[k % CORES][k // CORES] for k in range(len(rows))]


def log_partitions(choices: Choices, theta: Floats) -> Floats:
    """``log sum_k exp(theta . x_ik)`` of every anchor: minus its log-likelihood. Shape (anchors,)."""

    def work(rows: slice) -> Floats:
        u, top = candidate_weights(choices, theta, rows)
        return np.asarray(top + np.log(u.sum(axis=1)))

    return np.concatenate(each_block(work, *choices.features.shape[1:]))


def moments(choices: Choices, theta: Floats) -> tuple[Floats, Floats, Floats]:
    """Log-partition (anchors,), mean (anchors, k) and covariance (anchors, k, k) of the chosen features."""
    k, n, _ = choices.features.shape
    value, mean, cov = np.empty(n), np.empty((n, k)), np.empty((n, k, k))

    def work(rows: slice) -> None:
        u, top = candidate_weights(choices, theta, rows)
        total = u.sum(axis=1)
        value[rows] = top + np.log(total)
        u /= total[:, None]
        for i in range(k):
            weighted = u * choices.features[i, rows]
            mean[rows, i] = weighted.sum(axis=1)
            for j in range(i + 1):
                square = np.einsum("rc,rc->r", weighted, choices.features[j, rows])
                cov[rows, i, j] = cov[rows, j, i] = square - mean[rows, i] * mean[rows, j]

    each_block(work, *choices.features.shape[1:])
    return value, mean, cov


def partition_of(choices: Choices) -> Partition:
    """``A`` with its derivatives, summed over all anchors."""

    def evaluate(theta: Floats) -> tuple[float, Floats, Floats]:
        value, mean, cov = moments(choices, theta)
        return float(value.sum()), mean.sum(axis=0), cov.sum(axis=0)

    return evaluate


class Optimum(NamedTuple):
    """The maximum of ``theta . T - A(theta)`` over ``theta >= 0``."""

    theta: Floats
    value: float
    hessian: Floats
    converged: bool


def best_step(theta: Floats, slope: Floats, hessian: Floats) -> Floats:
    """The step that maximises the quadratic model with ``theta + step >= 0``, over all active sets."""
    k = len(theta)
    scale = np.trace(hessian) / k
    if scale <= 0.0:
        return np.zeros(k)
    ridged = hessian + 1e-13 * scale * np.eye(k)
    free_step = np.linalg.solve(ridged, slope)
    if np.all(theta + free_step >= 0.0):
        return np.asarray(free_step)
    best, best_rise = np.zeros(k), 0.0
    for free in list(product((True, False), repeat=k))[1:]:
        on = np.array(free)
        step = np.where(on, 0.0, -theta)
        if on.any():
            pull = slope[on] - ridged[np.ix_(on, ~on)] @ step[~on]
            step[on] = np.linalg.solve(ridged[np.ix_(on, on)], pull)
        rise = float(slope @ step - 0.5 * step @ ridged @ step)
        if rise > best_rise and np.all(theta + step >= -1e-15 * np.abs(theta)):
            best, best_rise = step, rise
    return best


def maximise(partition: Partition, target: Floats, start: Floats, *, tolerance: float = 1e-12) -> Optimum:
    """Newton with an exact active set and a backtracking line search, from a feasible ``start``.

    Stops when the expected gain of a step is below ``tolerance`` relative to the value; with 1e-12 the optimum is
    exact to rounding. Call it only if a maximum exists: under perfect separation ``theta`` diverges (see
    `separated`).
    """
    theta = np.asarray(start, dtype=np.float64)
    a, gradient, hessian = partition(theta)
    value = float(theta @ target) - a
    for _ in range(_STEPS):
        slope = target - gradient
        step = best_step(theta, slope, hessian)
        rise = float(slope @ step)
        if rise <= tolerance * (1.0 + abs(value)):
            return Optimum(theta, value, hessian, True)
        size = 1.0
        while True:
            trial = np.maximum(theta + size * step, 0.0)
            a, gradient, hessian = partition(trial)
            trial_value = float(trial @ target) - a
            if trial_value >= value + 1e-4 * size * rise:
                break
            size /= 2.0
            if size < 1e-9:
                # Rounding errors hide any further gain.
                small = rise <= 1e-8 * (1.0 + abs(value))
                return Optimum(theta, value, partition(theta)[2], small)
        theta, value = trial, trial_value
    return Optimum(theta, value, hessian, False)


def separated(choices: Choices, feature: int) -> bool:
    """True when no candidate has a larger feature than its anchor's positive.

    Then the likelihood increases without limit in that feature's weight, and no finite fit exists.
    """
    return not bool(choices.beaten[feature].any())


def fit(choices: Choices, start: Floats | None = None) -> Optimum:
    """The maximum-likelihood weights; all NaN, with value 0, when the positives are perfectly separated."""
    k = len(choices.features)
    if any(separated(choices, j) for j in range(k)):
        return Optimum(np.full(k, np.nan), 0.0, np.full((k, k), np.nan), False)
    start = np.r_[5.0, np.zeros(k - 1)] if start is None else start
    return maximise(partition_of(choices), np.zeros(k), start)


def cluster_covariance(choices: Choices, gradient: Floats, information: Floats) -> Floats:
    """Covariance (k, k) of fitted weights that allows for dependence within batches: the sandwich.

    Args:
        choices: What the weights were fitted to.
        gradient: ``(anchors, k)`` gradient of each anchor's log-likelihood; its sign does not matter.
        information: ``(k, k)`` minus the Hessian of the total log-likelihood.
    """
    sums = choices.by_batch(gradient)
    # On a bound the gradients do not sum to zero; only their spread over batches matters.
    sums -= sums.mean(axis=0)
    inverse = np.linalg.pinv(information, hermitian=True)
    return np.asarray(len(sums) / (len(sums) - 1) * (inverse @ (sums.T @ sums) @ inverse))


def batch_means(choices: Choices, theta: Floats) -> Floats:
    """Mean log-likelihood per anchor in each batch, shape (batches,)."""
    counts = np.bincount(choices.batches)
    return -choices.by_batch(log_partitions(choices, theta)) / counts
