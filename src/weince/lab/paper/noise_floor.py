"""What a wrong link costs an estimator: an error floor that no amount of data removes.

Positives are drawn from a shortfall law, ``p_i`` proportional to ``(1 - s_i)^-beta``. Two one-parameter links
are fitted to them by maximum likelihood: the shortfall link (right) and softmax (wrong). They estimate the
log-odds of the top candidate against a reference. ``docs/noise-floor.md`` derives the theoretical errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logsumexp, softmax

from weince.evt.arrays import Floats, Integers, as_scores


@dataclass(frozen=True)
class LinkTheory:
    """Large-sample error of the log-odds under one link: ``bias^2 + variance / n``."""

    parameter: float  # the true or pseudo-true slope of the logits
    log_odds: float  # top against reference under that slope
    bias: float  # log_odds minus the true one; 0 for the right link
    variance: float  # per observation, sandwich
    drift: float  # n times the finite-sample bias of the estimated log-odds, to first order

    def error(self, n: ArrayLike) -> Floats:
        """Mean squared error at sample sizes n."""
        return self.bias**2 + self.variance / np.asarray(n, dtype=np.float64)


@dataclass(frozen=True)
class NoiseFloor:
    """Simulated mean squared errors of the log-odds beside their theory; arrays of shape (sizes,)."""

    sizes: Integers
    log_odds: float  # the target: the true top-against-reference log-odds
    shortfall_error: Floats
    shortfall_se: Floats  # Monte Carlo standard error of shortfall_error
    shortfall_line: Floats  # c / n
    softmax_error: Floats
    softmax_se: Floats
    softmax_line: Floats  # bias^2 + V / n
    shortfall: LinkTheory
    softmax: LinkTheory
    undefined: Floats  # share of replicates left out: all positives have the lowest, or the highest, score


@dataclass(frozen=True)
class CoordinateMismatch:
    """Why no temperature turns one coordinate into the other: ratios of log-odds do not depend on it."""

    scores: Floats  # (3,)
    translation_ratio: float  # (T(s1) - T(s0)) / (T(s2) - T(s0)) with T(s) = s
    endpoint_ratio: float  # the same with T(s) = -log(1 - s)
    temperature: float  # softmax temperature closest (in KL) to the shortfall law with beta = 1
    divergence: float  # KL divergence left at that temperature, in nats


def _as_candidates(scores: ArrayLike) -> Floats:
    s = as_scores(scores, "scores")
    if s.max() >= 1.0 or s.max() == s.min():
        raise ValueError(
            f"scores must lie below 1 and not be all equal; got {s.size} from {s.min()} to {s.max()}"
        )
    return s


def fit_slope(feature: Floats, mean: Floats) -> Floats:
    """Maximum-likelihood slope of a conditional logit in one feature over a fixed candidate set.

    The likelihood depends on the positives only through the mean of their features, and is maximal where the
    mean under the model equals it. The slope is found by Newton steps; one that leaves the bracket is replaced by
    bisection.

    Args:
        feature: the feature of each candidate, shape (candidates,).
        mean: mean feature of the positives, any shape, strictly between the extremes of the feature.

    Returns:
        The slope, shape of `mean`; infinite where the mean equals an extreme.
    """
    target = np.atleast_1d(np.asarray(mean, dtype=np.float64))
    inside = (target > feature.min()) & (target < feature.max())
    span = float(np.ptp(feature))
    z = (feature - feature.mean()) / span
    goal = (target[inside] - feature.mean()) / span
    slope = np.zeros(goal.shape)
    low, high = np.full(goal.shape, -800.0), np.full(goal.shape, 800.0)
    for _ in range(100):
        p = softmax(slope[:, None] * z, axis=1)
        excess = p @ z - goal
        low, high = np.where(excess < 0.0, slope, low), np.where(excess > 0.0, slope, high)
        variance = np.maximum(p @ z**2 - (p @ z) ** 2, 1e-300)
        step = slope - excess / variance
        new = np.where((step > low) & (step < high), step, (low + high) / 2.0)
        done = np.abs(new - slope) <= 1e-12 * (1.0 + np.abs(slope))
        slope = new
        if done.all():
            break
    out = np.where(target >= feature.max(), np.inf, -np.inf)
    out[inside] = slope / span
    return out.reshape(np.shape(mean))


def link_theory(feature: ArrayLike, probabilities: ArrayLike) -> LinkTheory:
    """Pseudo-true slope and sandwich variance of a one-parameter link when positives follow a known law.

    The link estimates the log-odds of the last candidate (the top) against the first (the reference).

    Args:
        feature: the coordinate the link uses, shape (candidates,): ``s`` for softmax, ``-log(1 - s)`` for
            the shortfall link.
        probabilities: how likely each candidate truly is to be the positive, shape (candidates,), all above 0.

    Examples:
        >>> import numpy as np
        >>> from weince.lab.paper.noise_floor import link_theory
        >>> scores = np.array([0.15, 0.45, 0.70, 0.90])
        >>> law = (1 - scores) ** -0.8
        >>> print(f"{link_theory(scores, law / law.sum()).bias:.4f}")  # softmax, truth: shortfall
        0.2125
    """
    g, p = np.asarray(feature, dtype=np.float64), np.asarray(probabilities, dtype=np.float64)
    if g.shape != p.shape or g.ndim != 1:
        raise ValueError(
            f"feature and probabilities must have one shape (candidates,); got {g.shape} and {p.shape}"
        )
    if (p <= 0.0).any() or abs(p.sum() - 1.0) > 1e-9:
        raise ValueError(f"probabilities must be above 0 and sum to 1; got {probabilities!r}")
    slope = float(fit_slope(g, np.asarray(p @ g)))
    q = softmax(slope * g)
    centred = g - q @ g  # p has the same mean feature: this defines the pseudo-true slope
    curvature = float(q @ centred**2)  # H: variance of the feature under the link
    spread = float(p @ centred**2)  # J: variance of the feature under the truth
    skew = float(q @ centred**3)
    contrast = float(g[-1] - g[0])
    odds = slope * contrast
    return LinkTheory(
        parameter=slope,
        log_odds=odds,
        bias=odds - float(np.log(p[-1] / p[0])),
        variance=contrast**2 * spread / curvature**2,
        drift=-contrast * skew * spread / (2.0 * curvature**3),
    )


def noise_floor(
    scores: ArrayLike = (0.15, 0.45, 0.70, 0.90),
    beta: float = 0.8,
    *,
    sizes: Sequence[int] = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),
    replicates: int = 20_000,
    seed: int = 0,
) -> NoiseFloor:
    """Draw positives from a shortfall law and measure the error of the right and of the wrong link.

    The top candidate is the one with the highest score, the reference the one with the lowest.

    Args:
        scores: candidate scores, shape (candidates,), below 1.
        beta: tail index of the true law, ``p_i`` proportional to ``(1 - s_i)^-beta``.
        sizes: numbers of observed positives.
        replicates: simulated data sets for each size.
        seed: seed of the simulation.

    Examples:
        >>> from weince.lab.paper.noise_floor import noise_floor
        >>> found = noise_floor(sizes=(100, 10_000), replicates=500)
        >>> bool(found.softmax_error[-1] > 10 * found.shortfall_error[-1])
        True
    """
    s = np.sort(_as_candidates(scores))
    coordinate = -np.log1p(-s)
    counts_of = np.array(sizes, dtype=np.int64)
    if counts_of.size == 0 or counts_of.min() < 1 or replicates < 2:
        raise ValueError(f"sizes must be positive and replicates at least 2; got {sizes} and {replicates}")
    if not 0.0 < beta < np.inf:
        raise ValueError(f"beta must be a positive number; got {beta}")
    p = softmax(beta * coordinate)
    target = float(np.log(p[-1] / p[0]))
    right, wrong = link_theory(coordinate, p), link_theory(s, p)
    rng = np.random.default_rng(seed)
    error, se = np.empty((2, 2, counts_of.size))
    undefined = np.empty(counts_of.size)
    for j, n in enumerate(counts_of):
        share = rng.multinomial(n, p, size=replicates) / n
        known = (share[:, 0] < 1.0) & (share[:, -1] < 1.0)
        undefined[j] = 1.0 - known.mean()
        for i, feature in enumerate((coordinate, s)):
            odds = fit_slope(feature, share[known] @ feature) * (feature[-1] - feature[0])
            square = (odds - target) ** 2
            error[i, j], se[i, j] = square.mean(), square.std(ddof=1) / np.sqrt(square.size)
    return NoiseFloor(
        sizes=counts_of,
        log_odds=target,
        shortfall_error=error[0],
        shortfall_se=se[0],
        shortfall_line=right.error(counts_of),
        softmax_error=error[1],
        softmax_se=se[1],
        softmax_line=wrong.error(counts_of),
        shortfall=right,
        softmax=wrong,
        undefined=undefined,
    )


def coordinate_mismatch(scores: ArrayLike = (0.0, 0.5, 0.9)) -> CoordinateMismatch:
    """Show on three candidates that softmax in ``s`` equals softmax in ``-log(1 - s)`` at no temperature.

    The ratio of two log-odds does not depend on the temperature. For the default scores it is 5/9 in the score and
    log 2 / log 10 in the shortfall, so no temperature makes the two equal.

    Args:
        scores: three different scores below 1.

    Examples:
        >>> from weince.lab.paper.noise_floor import coordinate_mismatch
        >>> found = coordinate_mismatch()
        >>> print(f"{found.translation_ratio:.3f} {found.endpoint_ratio:.3f}")
        0.556 0.301
    """
    s = _as_candidates(scores)
    if s.shape != (3,) or np.unique(s).size != 3:
        raise ValueError(f"scores must be three different numbers; got {scores!r}")
    endpoint = -np.log1p(-s)
    p = softmax(endpoint)
    slope = float(fit_slope(s, np.asarray(p @ s)))
    log_q = slope * s - logsumexp(slope * s)
    return CoordinateMismatch(
        scores=s,
        translation_ratio=float((s[1] - s[0]) / (s[2] - s[0])),
        endpoint_ratio=float((endpoint[1] - endpoint[0]) / (endpoint[2] - endpoint[0])),
        temperature=1.0 / slope,
        divergence=float(p @ (np.log(p) - log_q)),
    )
