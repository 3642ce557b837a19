"""Simulate the link test's likelihood ratio under softmax: draw positives from the fitted softmax, then fit again.

The ratio does not follow a chi-square law, since under softmax the second weight lies on its bound. Every draw needs
two fits. All draws share ``A``, the sum over anchors of the log-partition (see `weince.evt.choice`), so ``A`` is
interpolated once for all of them.
"""

import numpy as np
from numpy.polynomial import chebyshev

from weince.evt.arrays import Floats
from weince.evt.choice import (
    Choices,
    Partition,
    best_step,
    blocks,
    candidate_weights,
    log_partitions,
    maximise,
    partition_of,
)


class Interpolant:
    """A Chebyshev interpolant of ``A`` on a box of two weights; derivatives are those of the polynomial."""

    def __init__(self, choices: Choices, low: Floats, high: Floats, degree: int) -> None:
        self.low, self.high = low, high
        nodes = chebyshev.chebpts1(degree + 1)
        a, b = (0.5 * (lo + hi + nodes * (hi - lo)) for lo, hi in zip(low, high, strict=True))
        values = np.array([[log_partitions(choices, np.array([x, y])).sum() for y in b] for x in a])
        inverse = np.linalg.inv(chebyshev.chebvander(nodes, degree))
        self._coefficients = inverse @ values @ inverse.T
        # Column j of `slopes` holds the derivative of T_j in the basis T_0 .. T_degree.
        self._slopes = np.zeros((degree + 1, degree + 1))
        self._slopes[:-1] = chebyshev.chebder(np.eye(degree + 1))

    def __call__(self, theta: Floats) -> tuple[float, Floats, Floats]:
        width = self.high - self.low
        x = (2.0 * theta - self.low - self.high) / width
        if np.any(np.abs(x) > 1.0 + 1e-9):
            return np.inf, np.zeros(2), np.eye(2)
        angles = np.arange(len(self._slopes)) * np.arccos(np.clip(x, -1.0, 1.0))[:, None]
        flat = np.cos(angles)
        steep = flat @ self._slopes
        curved = steep @ self._slopes
        c = self._coefficients
        along = c @ flat[1], c @ steep[1], c @ curved[1]
        gradient = np.array([steep[0] @ along[0], flat[0] @ along[1]]) * (2.0 / width)
        mixed = steep[0] @ along[1]
        bend = np.array([[curved[0] @ along[0], mixed], [mixed, flat[0] @ along[2]]])
        return float(flat[0] @ along[0]), gradient, bend * np.outer(2.0 / width, 2.0 / width)


def _drawn_sums(choices: Choices, theta: Floats, draws: int, rng: np.random.Generator) -> Floats:
    """Feature sums ``T`` (draws, k) of positives drawn from the model with weights ``theta``."""
    sums = np.zeros((draws, len(choices.features)))
    for rows in blocks(*choices.features.shape[1:]):
        u, _ = candidate_weights(choices, theta, rows)
        steps = np.cumsum(u, axis=1)
        steps /= steps[:, -1:]
        # Adding the row number makes one ascending array of all rows, so that one search serves them all.
        row = np.arange(len(steps))
        ladder = (steps + row[:, None]).ravel()
        first = row * steps.shape[1]
        block = choices.features[:, rows].reshape(len(choices.features), -1)
        for r in range(draws):
            hit = np.searchsorted(ladder, rng.random(len(row)) + row, side="right")
            sums[r] += block[:, np.minimum(hit, first + steps.shape[1] - 1)].sum(axis=1)
    return sums


def _ratio(partition: Partition, target: Floats, start: Floats) -> tuple[float, Floats, bool]:
    """Likelihood ratio of both weights against the first alone; the optimum; whether both fits converged."""

    def first_only(theta: Floats) -> tuple[float, Floats, Floats]:
        a, gradient, hessian = partition(np.array([theta[0], 0.0]))
        return a, gradient[:1], hessian[:1, :1]

    null = maximise(first_only, target[:1], start[:1])
    at_null = np.array([null.theta[0], 0.0])
    full = maximise(partition, target, at_null)
    return 2.0 * max(full.value - null.value, 0.0), full.theta, null.converged and full.converged


def null_ratios(choices: Choices, weight: float, draws: int, rng: np.random.Generator) -> Floats:
    """Likelihood ratios (draws,) of two features against the first, for positives drawn with ``(weight, 0)``.

    All draws share ``A``, so it is interpolated once over the region that should contain their optima. Its error at
    the outermost optima must stay below 1e-5 nats. A draw whose optimum lies outside the region is fitted exactly;
    if the check fails, all draws are.
    """
    null = np.array([weight, 0.0])
    exact = partition_of(choices)
    targets = _drawn_sums(choices, null, draws, rng)
    _, gradient, hessian = exact(null)
    guesses = np.array([null + best_step(null, t - gradient, hessian) for t in targets])
    reach = np.ptp(np.vstack([guesses, null]), axis=0)
    margin = 0.3 * reach + np.sqrt(1.0 / np.maximum(np.diag(hessian), 1e-300))
    low = np.maximum(guesses.min(axis=0) - margin, 0.0) * [1.0, 0.0]
    high = guesses.max(axis=0) + margin
    perfect = targets[:, 0] >= choices.features[0].max(axis=1).sum() - 1e-9
    for degree in (12, 20):
        surface = Interpolant(choices, low, high, degree)
        found = [_ratio(surface, t, null) for t in targets]
        inside = [i for i in range(draws) if found[i][2] and not perfect[i]]
        far = sorted(inside, key=lambda i: -float(np.abs((found[i][1] - null) / (high - low)).max()))[:6]
        points = [found[i][1] for i in far] + [null]
        if max(abs(surface(p)[0] - log_partitions(choices, p).sum()) for p in points) < 1e-5:
            break
    else:
        found = [(np.nan, null, False)] * draws
    ratios = np.zeros(draws)
    for i, (ratio, _, good) in enumerate(found):
        if not perfect[i]:
            # Perfectly separated draws keep a ratio of 0: both links reach a likelihood of 1.
            ratios[i] = ratio if good else _ratio(exact, targets[i], null)[0]
    return ratios
