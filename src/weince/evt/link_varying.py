"""Links whose temperature varies: from anchor to anchor, or from pair to pair.

In both cases the inverse temperature ``k`` is log-normal: the mean of ``log k`` is the logarithm of its median, the
standard deviation is the spread ``v``. ``k`` is not observed, so the likelihood of a positive is a mean over ``k``,
computed by Gauss-Hermite quadrature.

*Anchor to anchor*: each anchor has its own ``k``, whatever its candidates are. The probability of a candidate is the
mean over ``k`` of its softmax probability. The coordinate may be a blend ``a * s + b * g(s)``.

*Pair to pair*: each pair has its own ``k``, which sets how close the positive lies to its anchor. A positive at score
``s`` then has the density ``exp(k * s - c(k))`` relative to that of a negative, where ``c(k)`` is the log-mean of
``exp(k * s)`` over negatives. A mean of densities over ``k`` is again a density, so this is one link
``h(s) = log mean exp(k * s - c(k))``, the same for all anchors. Like the blend it is convex: the highest scores come
only from pairs with a large ``k``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import special

from weince.evt import choice
from weince.evt.arrays import Floats, Integers
from weince.evt.choice import Choices

# Number of anchors in a first fit. The fit to more of them starts from its result and needs few steps.
_FEW = 1024
MOST_ANCHORS = 2048
"""The most anchors that a link is fitted to: more would change its likelihood by less than 0.001 nats per anchor."""
# Initial spread v of the first fit, and the smallest one of the second: the likelihood is flat at v = 0.
_START, _AGAIN = 0.5, 0.1
# A fitted spread below this counts as 0.
_NONE = 1e-3
MOST_SPREAD = 2.0
"""The largest spread that is fitted. Beyond it 15 nodes are no mean over k: a few of them, taken as separate
temperatures, describe wrong pairs, and the spread grows without meaning."""
# A fit stops when a step should gain less than this share of the log-likelihood, about 1e-7 nats per anchor.
_TOLERANCE = 1e-8
# Smallest effective number of negatives in a weighted mean over them.
_ENOUGH = 100.0
# Number of steps in the table of h over [-1, 1].
_STEPS = 8192


class Nodes(NamedTuple):
    """Points and weights (nodes,) of a mean over the standard normal law."""

    points: Floats
    weights: Floats


def hermite_nodes(count: int) -> Nodes:
    """Gauss-Hermite nodes of the standard normal law."""
    points, weights = special.roots_hermitenorm(count)
    return Nodes(points, weights / weights.sum())


class Moments(NamedTuple):
    """Log-likelihood (anchors,), its gradient (anchors, parameters), and the information (parameters, parameters)."""

    value: Floats
    gradient: Floats
    information: Floats


class Varying(NamedTuple):
    """A fitted link whose temperature varies: the weights of the coordinates, then the spread v."""

    theta: Floats
    value: float
    converged: bool


def _maximise(few: choice.Partition, every: choice.Partition, weights: Floats) -> Varying:
    """The best weights and spread, all at least 0, fitted to a few anchors and then to all of them."""
    nought = np.zeros(len(weights) + 1)
    first = choice.maximise(_near(few), nought, np.r_[weights, _START], tolerance=1e-6).theta
    if first[-1] > MOST_SPREAD:
        first = np.r_[weights, MOST_SPREAD]
    first[-1] = max(first[-1], _AGAIN)
    best = choice.maximise(_near(every), nought, first, tolerance=_TOLERANCE)
    if best.theta[-1] <= MOST_SPREAD:
        return Varying(best.theta, best.value, best.converged)

    def widest(theta: Floats) -> tuple[float, Floats, Floats]:
        value, gradient, hessian = every(np.r_[theta, MOST_SPREAD])
        return value, gradient[:-1], hessian[:-1, :-1]

    starts = weights, best.theta[:-1]  # there may be two maxima
    found = [choice.maximise(widest, nought[:-1], start, tolerance=_TOLERANCE) for start in starts]
    best = max(found, key=lambda one: one.value)
    return Varying(np.r_[best.theta, MOST_SPREAD], best.value, best.converged)


def _near(partition: choice.Partition) -> choice.Partition:
    """The same where the spread is at most twice the largest one; no step goes further, where ``exp`` overflows."""

    def evaluate(theta: Floats) -> tuple[float, Floats, Floats]:
        if theta[-1] > 2.0 * MOST_SPREAD:
            return np.inf, np.zeros(len(theta)), np.eye(len(theta))
        return partition(theta)

    return evaluate


def _partition(found: Moments) -> tuple[float, Floats, Floats]:
    """Input of `choice.maximise`. The likelihood is not concave, so eigenvalues count by their absolute value."""
    values, vectors = np.linalg.eigh(found.information)
    size = np.maximum(np.abs(values), 1e-9 * np.abs(values).max() + 1e-300)
    return -float(found.value.sum()), -found.gradient.sum(axis=0), np.asarray((vectors * size) @ vectors.T)


def spread_rows(anchors: int, most: int) -> Integers:
    """At most so many rows, spread evenly over all anchors."""
    return np.unique(np.linspace(0, anchors - 1, min(anchors, most)).astype(np.int64))


# The temperature varies from anchor to anchor.


def anchor_likelihoods(choices: Choices, theta: Floats, nodes: Nodes) -> Floats:
    """Log-likelihood (anchors,) of each positive when the temperature varies from anchor to anchor."""
    weights, spread = theta[:-1], float(theta[-1])
    if spread == 0.0:
        return -choice.log_partitions(choices, weights)
    each = [-choice.log_partitions(choices, np.exp(spread * x) * weights) for x in nodes.points]
    return np.asarray(special.logsumexp(np.array(each), axis=0, b=nodes.weights[:, None]))


def anchor_moments(choices: Choices, theta: Floats, nodes: Nodes) -> Moments:
    """The same log-likelihood with its derivatives."""
    parts = [_at_node(choices, theta, float(x)) for x in nodes.points]
    level = np.array([value for value, _, _ in parts]) + np.log(nodes.weights)[:, None]
    total = np.asarray(special.logsumexp(level, axis=0))
    gradient = np.zeros((choices.anchors, len(theta)))
    hessian = np.zeros((len(theta), len(theta)))
    for share, (_, slope, bend) in zip(np.exp(level - total), parts, strict=True):
        gradient += share[:, None] * slope
        hessian += np.einsum("n,nij->ij", share, bend) + np.einsum("n,ni,nj->ij", share, slope, slope)
    return Moments(total, gradient, gradient.T @ gradient - hessian)


def _at_node(choices: Choices, theta: Floats, x: float) -> tuple[Floats, Floats, Floats]:
    """Log-likelihood (anchors,) with ``log k = v * x``, its gradient and its Hessian, anchor by anchor."""
    weights, k = theta[:-1], len(theta) - 1
    scale = float(np.exp(theta[-1] * x))
    value, mean, cov = choice.moments(choices, scale * weights)
    slope, bend = np.empty((len(value), k + 1)), np.empty((len(value), k + 1, k + 1))
    slope[:, :k] = -scale * mean
    along = slope[:, :k] @ weights
    slope[:, k] = x * along
    bend[:, :k, :k] = -(scale**2) * cov
    across = bend[:, :k, :k] @ weights
    bend[:, :k, k] = bend[:, k, :k] = x * (slope[:, :k] + across)
    bend[:, k, k] = x**2 * (along + across @ weights)
    return -value, slope, bend


def fit_anchors(choices: Choices, weights: Floats, nodes: Nodes) -> Varying:
    """Fit a link whose temperature varies from anchor to anchor, starting from its ``weights`` at one temperature."""
    some = choices.rows(spread_rows(choices.anchors, _FEW))
    found = _maximise(
        lambda theta: _partition(anchor_moments(some, theta, nodes)),
        lambda theta: _partition(anchor_moments(choices, theta, nodes)),
        weights,
    )
    plain = -float(choice.log_partitions(choices, weights).sum())
    if found.theta[-1] < _NONE or found.value <= plain:
        return Varying(np.r_[weights, 0.0], plain, found.converged)
    return found


# The temperature varies from pair to pair.


class Scored(NamedTuple):
    """Scores (anchors, candidates), NaN where there is no candidate, and scores of the positives (anchors,)."""

    scores: Floats
    positive: Floats


class NegativeLaw(NamedTuple):
    """The log-mean ``c(k)`` of ``exp(k * s)`` over negatives, see `log_means`."""

    # logarithm of the share of negatives at each point of the table, (steps + 1,); -inf for a share of 0
    shares: Floats
    last: float  # the largest k at which the effective number of negatives in the mean is at least `_ENOUGH`
    level: float  # ``c(last)``
    bend: float  # the ``n`` of the spherical law that continues ``c`` beyond ``last``, see `log_means`


def negative_law(scored: Scored) -> NegativeLaw:
    """The law of the negatives of a bank."""
    counts = np.zeros(_STEPS + 1)
    for rows in choice.blocks(*scored.scores.shape):
        block = scored.scores[rows]
        counts += np.bincount(_nearest(block[~np.isnan(block)]), minlength=_STEPS + 1)
    counts -= np.bincount(_nearest(scored.positive), minlength=_STEPS + 1)
    with np.errstate(divide="ignore"):
        logs = np.log(counts)
    s = np.linspace(-1.0, 1.0, _STEPS + 1)

    def enough(k: float) -> bool:
        size = 2.0 * special.logsumexp(k * s + logs) - special.logsumexp(2.0 * k * s + logs)
        return bool(size >= np.log(_ENOUGH))

    low, high = 1e-3, 1e4
    for _ in range(40):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if enough(middle) else (low, middle)
    shares = logs - np.log(counts.sum())
    level = float(special.logsumexp(low * s + shares))
    mean = float(np.exp(low * s + shares - level) @ s)
    bend = low * (1.0 - mean**2) / (2.0 * mean) if mean > 0.0 else low
    return NegativeLaw(shares, low, level, bend)


def log_means(k: Floats, law: NegativeLaw) -> tuple[Floats, Floats]:
    """``c(k)`` and its derivative, the mean score of negatives weighted by ``exp(k * s)``; (nodes,) each.

    For large k the mean over the observed negatives depends on the few closest ones, and any closer candidate would
    look like a positive. So beyond ``law.last`` ``c`` continues as on a sphere: its derivative is the mean cosine of
    a von Mises-Fisher law, which ``k / (n + sqrt(n**2 + k**2))`` approximates to a percent. Here n stands for the
    dimension, and is set so that the derivative is continuous.
    """
    s = np.linspace(-1.0, 1.0, _STEPS + 1)
    tilted = np.minimum(k, law.last)[:, None] * s + law.shares
    level = special.logsumexp(tilted, axis=1)
    mean = np.exp(tilted - level[:, None]) @ s
    beyond, n = k > law.last, law.bend
    reach, start = np.hypot(n, k), np.hypot(n, law.last)
    more = law.level + reach - start - n * np.log((n + reach) / (n + start))
    return np.where(beyond, more, level), np.where(beyond, k / (n + reach), mean)


def _nearest(scores: Floats) -> Integers:
    return np.rint((scores + 1.0) * (_STEPS / 2)).astype(np.int64)


def link_table(theta: Floats, law: NegativeLaw, nodes: Nodes) -> Floats:
    """``h`` and its derivatives by the weight and by the spread at even steps of the score, (3, steps + 1)."""
    s = np.linspace(-1.0, 1.0, _STEPS + 1)
    weight, spread = theta
    scale = np.exp(spread * nodes.points)
    k = weight * scale
    normaliser, mean = log_means(k, law)
    level = k[:, None] * s - normaliser[:, None] + np.log(nodes.weights)[:, None]
    h = special.logsumexp(level, axis=0)
    by_k = np.exp(level - h) * (s - mean[:, None])
    return np.stack([h, scale @ by_k, (k * nodes.points) @ by_k])


def _read(table: Floats, scores: Floats) -> Floats:
    """A table interpolated linearly at any scores: (rows of the table, scores)."""
    place = (scores + 1.0) * (_STEPS / 2)
    left = np.minimum(place.astype(np.int64), _STEPS - 1)
    low = table[:, left]
    return np.asarray(low + (place - left) * (table[:, left + 1] - low))


def pair_moments(scored: Scored, theta: Floats, law: NegativeLaw, nodes: Nodes) -> Moments:
    """Log-likelihood of each positive when the temperature varies from pair to pair, and its derivatives."""
    table = link_table(theta, law, nodes)
    n = len(scored.positive)
    value, gradient = np.empty(n), np.empty((n, 2))

    def work(rows: slice) -> Floats:
        block = scored.scores[rows]
        absent = np.isnan(block)
        logit, *slopes = _read(table, np.where(absent, 0.0, block))
        logit[absent] = -np.inf
        positive_logit, *positive_slopes = _read(table, scored.positive[rows])
        top = logit.max(axis=1)
        p = np.exp(logit - top[:, None])
        total = p.sum(axis=1)
        value[rows] = positive_logit - top - np.log(total)
        p /= total[:, None]
        means = [np.einsum("rc,rc->r", p, slope) for slope in slopes]
        information = np.empty((2, 2))
        for i in range(2):
            gradient[rows, i] = positive_slopes[i] - means[i]
            for j in range(2):
                square = np.einsum("rc,rc,rc->", p, slopes[i], slopes[j])
                information[i, j] = square - means[i] @ means[j]
        return information

    return Moments(value, gradient, np.sum(choice.each_block(work, *scored.scores.shape), axis=0))


def fit_pairs(scored: Scored, weight: float, law: NegativeLaw, nodes: Nodes) -> Varying:
    """Fit softmax whose temperature varies from pair to pair, starting from its ``weight`` at one temperature."""
    rows = spread_rows(len(scored.positive), _FEW)
    some = Scored(scored.scores[rows], scored.positive[rows])
    found = _maximise(
        lambda theta: _partition(pair_moments(some, theta, law, nodes)),
        lambda theta: _partition(pair_moments(scored, theta, law, nodes)),
        np.array([weight]),
    )
    flat = np.array([weight, 0.0])
    plain = float(pair_moments(scored, flat, law, nodes).value.sum())
    if found.theta[-1] < _NONE or found.value <= plain:
        return Varying(flat, plain, found.converged)
    return found
