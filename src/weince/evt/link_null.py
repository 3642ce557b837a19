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
    """A Chebyshev interpolant of ``A`` on a box of two coordinates; derivatives are those of the polynomial.

    The coordinates are ``x = whiten @ (theta - centre)`` and the box is ``low <= x <= high``. Around a maximum with
    the Hessian ``H = whiten.T @ whiten`` the surface is nearly round in them, so that a low degree suffices.
    """

    def __init__(
        self, choices: Choices, centre: Floats, whiten: Floats, box: tuple[Floats, Floats], degree: int
    ) -> None:
        low, high = box
        self.centre = centre
        self._scale = whiten * (2.0 / (high - low))[:, None]  # from theta to [-1, 1]
        self._middle = (low + high) / (high - low)
        nodes = chebyshev.chebpts1(degree + 1)
        back = np.linalg.inv(self._scale)
        points = [[centre + back @ (np.array([x, y]) + self._middle) for y in nodes] for x in nodes]
        values = np.array([[log_partitions(choices, theta).sum() for theta in row] for row in points])
        inverse = np.linalg.inv(chebyshev.chebvander(nodes, degree))
        self._coefficients = inverse @ values @ inverse.T
        # Column j of `slopes` holds the derivative of T_j in the basis T_0 .. T_degree.
        self._slopes = np.zeros((degree + 1, degree + 1))
        self._slopes[:-1] = chebyshev.chebder(np.eye(degree + 1))

    def place(self, theta: Floats) -> Floats:
        """The weights as a point of the square [-1, 1] x [-1, 1]."""
        return np.asarray(self._scale @ (theta - self.centre) - self._middle)

    def __call__(self, theta: Floats) -> tuple[float, Floats, Floats]:
        x = self.place(theta)
        if np.any(np.abs(x) > 1.0 + 1e-9):
            return np.inf, np.zeros(2), np.eye(2)
        angles = np.arange(len(self._slopes)) * np.arccos(np.clip(x, -1.0, 1.0))[:, None]
        flat = np.cos(angles)
        steep = flat @ self._slopes
        curved = steep @ self._slopes
        c = self._coefficients
        along = c @ flat[1], c @ steep[1], c @ curved[1]
        gradient = np.array([steep[0] @ along[0], flat[0] @ along[1]])
        mixed = steep[0] @ along[1]
        bend = np.array([[curved[0] @ along[0], mixed], [mixed, flat[0] @ along[2]]])
        return float(flat[0] @ along[0]), gradient @ self._scale, self._scale.T @ bend @ self._scale


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


def _root(hessian: Floats) -> Floats:
    """A square root (2, 2) of a Hessian; where it is flat, the root is small but can be inverted."""
    values, vectors = np.linalg.eigh(hessian)
    floored = np.maximum(values, 1e-12 * values.max() + 1e-300)
    return np.asarray(np.sqrt(floored)[:, None] * vectors.T)


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
    whiten = _root(hessian)
    alone = np.c_[(targets[:, 0] - gradient[0]) / max(hessian[0, 0], 1e-300) + weight, np.zeros(draws)]
    guesses = np.array([null + best_step(null, t - gradient, hessian) for t in targets])
    places = (np.vstack([guesses, alone, null]) - null) @ whiten.T
    margin = 0.3 * np.ptp(places, axis=0) + 1.0
    box = places.min(axis=0) - margin, places.max(axis=0) + margin
    perfect = targets[:, 0] >= choices.features[0].max(axis=1).sum() - 1e-9
    for degree in (6, 10, 16):
        surface = Interpolant(choices, null, whiten, box, degree)
        fits = [_ratio(surface, t, null) for t in targets]
        inside = [i for i in range(draws) if fits[i][2] and not perfect[i]]
        far = sorted(inside, key=lambda i: -float(np.abs(surface.place(fits[i][1])).max()))[:6]
        points = [fits[i][1] for i in far] + [null]
        if max(abs(surface(p)[0] - log_partitions(choices, p).sum()) for p in points) < 1e-5:
            break
    else:
        fits = [(np.nan, null, False)] * draws
    ratios = np.zeros(draws)
    for i, (ratio, _, good) in enumerate(fits):
        if not perfect[i]:
            # Perfectly separated draws keep a ratio of 0: both links reach a likelihood of 1.
            ratios[i] = ratio if good else _ratio(exact, targets[i], null)[0]
    return ratios
