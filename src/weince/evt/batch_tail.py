"""Tail of the negatives of several batches, with an interval of xi that allows for dependence within batches.

Sign convention: ``xi < 0`` is a bounded (Weibull) tail; scipy's ``genpareto`` has ``c = xi``; the endpoint is
``threshold - sigma / xi``. The fits themselves are in `weince.evt.gpd`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtri, stdtrit

from weince.evt.arrays import (
    Bounds,
    Floats,
    Integers,
    as_integers,
    as_scores,
    check_fraction,
    check_least,
    on_all_cores,
)
from weince.evt.gpd import (
    FEWEST_EXCESSES,
    GPDFit,
    exceed,
    excesses_over,
    fit_gpd,
    fit_with_drop,
    maximise_rows,
)


@dataclass(frozen=True)
class NegativeCosines:
    """Cosines of negative pairs, each unordered pair once."""

    scores: Floats  # (pairs,)
    batches: Integers  # (pairs,) the batch each pair comes from


@dataclass(frozen=True)
class BatchXi:
    """A pooled fit whose intervals allow for dependence within batches; xi < 0 means a bounded tail."""

    fit: GPDFit  # of the pooled scores; its own intervals treat the scores as independent
    xi_interval: Bounds
    endpoint_interval: Bounds
    xi_resampled: Floats  # (bootstraps,) xi of resampled batches
    design_effect: float  # variance of xi over resampled batches, relative to independent scores
    n_batches: int


def xi_over_batches(
    scores: ArrayLike,
    batches: ArrayLike,
    *,
    quantile: float = 0.99,
    bootstraps: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> BatchXi:
    """Fit the pooled tail and resample whole batches for the interval of xi (xi < 0: bounded tail).

    Scores of one batch share embeddings and are dependent, so intervals that treat them as independent are
    too short. Resampling whole batches gives the true variance of xi. The profile-likelihood interval is widened
    by the ratio of this variance to the independent one, with a Student quantile for the number of batches.
    (Percentiles of the resampled xi would cover too rarely, since no resample has a score above the largest
    one.) The threshold, a quantile of the pooled scores, stays fixed.

    Args:
        scores: scores, shape (n,), such as the cosines of negative pairs, each counted once.
        batches: integer batch of each score, shape (n,).
        quantile: level of the threshold.
        bootstraps: number of resamples.
        level: coverage of the intervals.
        seed: seed of the resampling.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import xi_over_batches
        >>> scores = 1 - np.random.default_rng(0).random(4000) ** 0.4  # bounded by 1: xi = -0.4
        >>> found = xi_over_batches(scores, np.arange(4000) % 8, quantile=0.9, bootstraps=20)
        >>> bool(found.xi_interval[0] < -0.4 < found.xi_interval[1])
        True
    """
    x = as_scores(scores, "scores")
    labels = np.unique(as_integers(batches, "batches", x.size, "score"), return_inverse=True)[1]
    n_batches = int(labels.max()) + 1
    if n_batches < 2:
        raise ValueError("resampling batches needs at least 2 of them; got 1")
    check_least(bootstraps=(bootstraps, 2))
    threshold = float(np.quantile(x, check_fraction(quantile, "quantile")))
    fit = fit_gpd(x, threshold, level=level)
    over = exceed(x, threshold)
    groups = [x[over & (labels == b)] - threshold for b in range(n_batches)]
    rng = np.random.default_rng(seed)
    drawn = rng.integers(n_batches, size=(bootstraps, n_batches))

    def resampled(batches: Integers) -> float:
        y = np.concatenate([groups[g] for g in batches])
        if y.size < FEWEST_EXCESSES:
            raise ValueError(
                f"need at least {FEWEST_EXCESSES} scores above the threshold in the drawn batches; got {y.size}"
            )
        return float(maximise_rows(y[None])[0][0])  # -1 if all are equal

    xi = np.array(on_all_cores(resampled, drawn))
    naive_error = np.ptp(fit.xi_interval) / (2.0 * np.sqrt(chdtri(1, 1.0 - level)))
    effect = float(xi.var(ddof=1) / naive_error**2)
    drop = float(max(effect, 1.0) * stdtrit(n_batches - 1, (1.0 + level) / 2.0) ** 2 / 2.0)
    wide = fit_with_drop(excesses_over(x, threshold), threshold, drop, level)
    return BatchXi(fit, wide.xi_interval, wide.endpoint_interval, xi, effect, n_batches)
