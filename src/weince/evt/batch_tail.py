"""The tail of the negatives of several batches: their cosines, and an interval of xi that allows for dependence.

Sign convention: ``xi < 0`` is a bounded (Weibull) tail; scipy's ``genpareto`` has ``c = xi``; the endpoint is
``threshold - sigma / xi``. The fits themselves are in `weince.evt.gpd`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import chi2, t

from weince.evt.gpd import (
    Floats,
    GPDFit,
    Interval,
    Progress,
    as_scores,
    check_fraction,
    excesses_over,
    fit_gpd,
    fit_with_drop,
    maximise_rows,
)


@dataclass(frozen=True)
class NegativeCosines:
    """Cosines of negative pairs, each unordered pair once."""

    scores: Floats  # (pairs,)
    batches: NDArray[np.int64]  # (pairs,) the batch each pair comes from


@dataclass(frozen=True)
class BatchXi:
    """A pooled fit whose intervals allow for dependence within batches; xi < 0 means a bounded tail."""

    fit: GPDFit  # of the pooled scores; its own intervals treat the scores as independent
    xi_interval: Interval
    endpoint_interval: Interval
    xi_resampled: Floats  # (n_boot,) xi of resampled batches
    design_effect: float  # variance of xi over resampled batches, relative to independent scores
    n_batches: int


def _unit_rows(z: ArrayLike, name: str) -> Floats:
    rows = np.asarray(z, dtype=np.float64)
    if rows.ndim != 2:
        raise ValueError(f"{name} must have shape (pairs, dim), got {rows.shape}")
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    bad = int((~(np.isfinite(norm) & (norm > 0.0))).sum())
    if bad:
        raise ValueError(f"{name} has {bad} rows that are zero or not finite; a cosine needs a direction")
    unit: Floats = rows / norm
    return unit


def unique_negative_cosines(
    z_i: ArrayLike, z_j: ArrayLike, batches: ArrayLike | None = None
) -> NegativeCosines:
    """Cosines of all negative pairs within each batch, each unordered pair counted once.

    A batch of B pairs has 2B views; its negatives are all pairs of views but the B positives:
    ``B * (2B - 1) - B`` of them. Counting (a, b) and (b, a) would double the sample without adding anything.

    Args:
        z_i: first views, shape (pairs, dim); scaled to unit length.
        z_j: second views, shape (pairs, dim), row by row the positives of z_i.
        batches: integer batch of each pair, shape (pairs,); one batch when not given.
    """
    first, second = _unit_rows(z_i, "z_i"), _unit_rows(z_j, "z_j")
    if first.shape != second.shape:
        raise ValueError(f"z_i and z_j must have the same shape, got {first.shape} and {second.shape}")
    labels = np.zeros(len(first), dtype=np.int64) if batches is None else _as_labels(batches, len(first))
    scores, origin = [], []
    for label in np.unique(labels):
        z = np.concatenate([first[labels == label], second[labels == label]])
        half = len(z) // 2
        row, column = np.triu_indices(len(z), k=1)
        keep = column - row != half
        cosine = np.clip((z @ z.T)[row[keep], column[keep]], -1.0, 1.0)
        scores.append(cosine)
        origin.append(np.full(cosine.size, label))
    return NegativeCosines(np.concatenate(scores), np.concatenate(origin))


def _as_labels(batches: ArrayLike, n: int) -> NDArray[np.int64]:
    labels = np.asarray(batches)
    if labels.shape != (n,) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"batches must be {n} integers, got shape {labels.shape} of {labels.dtype}")
    return labels.astype(np.int64)


def xi_over_batches(
    scores: ArrayLike,
    batches: ArrayLike,
    *,
    quantile: float = 0.99,
    n_boot: int = 200,
    level: float = 0.95,
    seed: int = 0,
    progress: Progress | None = None,
) -> BatchXi:
    """Fit the pooled tail and resample whole batches for the interval of xi (xi < 0: bounded tail).

    Scores of one batch share embeddings and are dependent, so intervals that treat them as independent are
    too short. Resampling whole batches gives the true variance of xi; the profile likelihood is widened by
    its ratio to the independent one, with a Student quantile for the number of batches. (Percentiles of the
    resampled xi cover too rarely: no resample reaches beyond the largest score.) The threshold, a quantile of
    the pooled scores, stays fixed.

    Args:
        scores: scores, shape (n,), see `unique_negative_cosines`.
        batches: integer batch of each score, shape (n,).
        quantile: level of the threshold.
        n_boot: number of resamples.
        level: coverage of the intervals.
        seed: seed of the resampling.
        progress: called with (done, total).
    """
    x = as_scores(scores, "scores")
    labels = np.unique(_as_labels(batches, x.size), return_inverse=True)[1]
    n_batches = int(labels.max()) + 1
    if n_batches < 2:
        raise ValueError("resampling batches needs at least 2 of them, got 1")
    if n_boot < 2:
        raise ValueError(f"n_boot must be at least 2, got {n_boot}")
    threshold = float(np.quantile(x, check_fraction(quantile, "quantile")))
    fit = fit_gpd(x, threshold, level=level)
    over = x > threshold
    groups = [x[over & (labels == b)] - threshold for b in range(n_batches)]
    rng = np.random.default_rng(seed)
    xi = np.empty(n_boot)
    for b in range(n_boot):
        y = np.concatenate([groups[g] for g in rng.integers(n_batches, size=n_batches)])
        # excesses_over says so if the batches drawn have no tail between them.
        xi[b] = maximise_rows(excesses_over(y, 0.0)[None])[0][0]
        if progress is not None:
            progress(b + 1, n_boot)
    naive_error = np.ptp(fit.xi_interval) / (2.0 * np.sqrt(chi2.ppf(level, 1)))
    effect = float(xi.var(ddof=1) / naive_error**2)
    drop = float(max(effect, 1.0) * t.ppf((1.0 + level) / 2.0, n_batches - 1) ** 2 / 2.0)
    wide = fit_with_drop(excesses_over(x, threshold), threshold, drop, level)
    return BatchXi(fit, wide.xi_interval, wide.endpoint_interval, xi, effect, n_batches)
