"""Risk against gradient: where failures come from, and where each link puts its gradient.

An anchor is compared with random subsets of ``K`` of its negatives. It fails when the negative with the highest
score, the culprit, beats the positive. The risk distribution is that of the culprits' scores. The gradient
distribution of a link is its loss's gradient magnitude by the negatives' scores, over the same subsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from weince.evt.arrays import Floats, Integers, check_least
from weince.evt.choice import EPS, read_scores


def negatives_of(scores: Floats, positives: Integers) -> Floats:
    """Scores (anchors, candidates - 1) of all candidates but each anchor's positive, in their order."""
    keep = np.ones(scores.shape, dtype=bool)
    keep[np.arange(len(scores)), positives] = False
    return scores[keep].reshape(len(scores), -1)


def absent_last(scores: Floats) -> Floats:
    """The same rows with NaN (no candidate) moved to their end; all others keep their order."""
    order = np.argsort(np.isnan(scores), axis=1, kind="stable")
    return np.take_along_axis(scores, order, axis=1)


@dataclass(frozen=True, eq=False)
class RiskGradient:
    """Shares by bin of negative score, for one subset size; each sums to 1 (NaN if the total is 0).

    Attributes:
        k: Negatives in a subset.
        edges: ``(bins + 1,)`` edges of the bins.
        risk: ``(bins,)`` share of failures by the culprit's score; exact.
        softmax: ``(bins,)`` share of softmax's gradient magnitude; averaged over subsets.
        shortfall: The same for the shortfall link.
        blend: The same for the blend.
        failure_rate: Probability that a random subset beats a random anchor's positive; exact.
        negatives: ``(bins,)`` share of all negatives in each bin, for comparison.
    """

    k: int
    edges: Floats
    risk: Floats
    softmax: Floats
    shortfall: Floats
    blend: Floats
    failure_rate: float
    negatives: Floats


def _best_by_rank(n: int, k: int) -> Floats:
    """Chance ``C(n - r, k - 1) / C(n, k)`` that rank r = 1 .. n is the best of k drawn from n."""

    def log_binomial(top: Floats, bottom: int) -> Floats:
        return np.asarray(
            special.gammaln(top + 1.0) - special.gammaln(bottom + 1.0) - special.gammaln(top - bottom + 1.0)
        )

    rest = n - np.arange(1.0, n + 1.0)
    out = np.zeros(n)
    possible = rest >= k - 1
    out[possible] = np.exp(log_binomial(rest[possible], k - 1) - log_binomial(np.array(float(n)), k))
    return out


def _per_anchor(name: str, value: ArrayLike, anchors: int, high: float = np.inf) -> Floats:
    """A number, or one per anchor, as a column (anchors, 1)."""
    array = np.asarray(value, dtype=np.float64)
    if array.shape not in ((), (anchors,)) or not np.all((array >= 0.0) & (array <= high)):
        raise ValueError(
            f"{name} must be one number or ({anchors},), from 0 to {high}; got shape {array.shape}"
        )
    return np.broadcast_to(array, (anchors,))[:, None]


def risk_gradient(
    scores: ArrayLike,
    positives: ArrayLike,
    *,
    ks: Sequence[int] = (16, 64, 256, 1024),
    tau: float = 0.5,
    beta: ArrayLike = 1.0,
    lam: ArrayLike = 0.5,
    bins: int | Sequence[float] = 20,
    draws: int = 2,
    rng: int | np.random.Generator = 0,
) -> tuple[RiskGradient, ...]:
    """Compare where failures come from with where softmax, shortfall and blend put their gradient.

    Args:
        scores: ``(anchors, candidates)`` cosines, NaN or -inf where there is no candidate. About 1,536 anchors are
            enough, for example from `link_bank` with one batch of 768 pairs.
        positives: ``(anchors,)`` column of each anchor's positive.
        ks: Subset sizes; at most as many as the anchor with the fewest negatives has.
        tau: Temperature of softmax, and of the softmax part of the blend.
        beta: Exponent of the shortfall link, one number or one per anchor.
        lam: Weight of the shortfall in the blend, one number or one per anchor.
        bins: Number of equal bins over the negatives' range, or the edges.
        draws: Random orders of every anchor's negatives; each is cut into all disjoint subsets of size K.
        rng: Seed or generator.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import link_bank
        >>> from weince.lab.paper.risk import risk_gradient
        >>> z_i, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> bank = link_bank(z_i, z_i + noise, batch_size=32, batches=8)
        >>> [found.k for found in risk_gradient(bank.scores, bank.positives, ks=(16, 32))]
        [16, 32]
    """
    s, columns = read_scores(scores, positives)
    positive = s[np.arange(len(s)), columns]
    negatives = absent_last(negatives_of(s, columns))
    counts = np.isfinite(negatives).sum(axis=1)
    if not tau > 0.0 or draws < 1:
        raise ValueError(f"need tau > 0 and draws >= 1; got {tau} and {draws}")
    for k in ks:
        if not 1 <= k <= counts.min():
            raise ValueError(
                f"subset sizes must lie between 1 and {counts.min()}, the fewest negatives; got {k}"
            )
    per_anchor = _per_anchor("beta", beta, len(s)), _per_anchor("lam", lam, len(s), 1.0)
    edges = _edges(bins, negatives)
    generator = np.random.default_rng(rng)
    fewest, n_bins = int(counts.min()), len(edges) - 1
    totals = {k: np.zeros((3, n_bins)) for k in ks}
    for _ in range(draws):
        drawn = _random_order(negatives, generator)[:, :fewest]
        links = _links(positive, drawn, tau, *per_anchor)
        which = _bins(drawn, edges)
        for k in ks:
            totals[k] += [_gradient_mass(link, which, k, n_bins) for link in links]
    ranked = -np.sort(-negatives, axis=1)
    places = _bins(ranked, edges)
    spread = _shares(np.bincount(places[np.isfinite(ranked)], minlength=n_bins).astype(np.float64))
    out = []
    for k in ks:
        risk, rate = _risk(positive, ranked, places, counts, k, n_bins)
        softmax, shortfall, blend = (_shares(mass) for mass in totals[k])
        out.append(RiskGradient(k, edges, _shares(risk), softmax, shortfall, blend, rate, spread))
    return tuple(out)


def _edges(bins: int | Sequence[float], negatives: Floats) -> Floats:
    low, high = float(np.nanmin(negatives)), float(np.nanmax(negatives))
    if isinstance(bins, int):
        check_least(bins=(bins, 1))
        return np.histogram_bin_edges([], bins, (low, high))
    edges = np.asarray(bins, dtype=np.float64)
    if edges.ndim != 1 or len(edges) < 2 or not np.all(np.diff(edges) > 0.0):
        raise ValueError(f"bins must be a number or at least two ascending edges; got {bins!r}")
    if edges[0] > low or edges[-1] < high:
        raise ValueError(
            f"bins must cover the negatives' range {low:.4g} to {high:.4g}; got {edges[0]:.4g} to {edges[-1]:.4g}"
        )
    return edges


def _bins(s: Floats, edges: Floats) -> Integers:
    """The bin of each score. As in numpy's histograms, the last bin includes its right edge."""
    return np.clip(np.searchsorted(edges, s, side="right") - 1, 0, len(edges) - 2)


def _shares(mass: Floats) -> Floats:
    total = float(mass.sum())
    return mass / total if total > 0.0 else np.full(len(mass), np.nan)


def _random_order(negatives: Floats, rng: np.random.Generator) -> Floats:
    """Shuffle every row; NaN stay last."""
    keys = np.where(np.isnan(negatives), 2.0, rng.random(negatives.shape))
    return np.take_along_axis(negatives, np.argsort(keys, axis=1), axis=1)


class _Link(NamedTuple):
    """A link on a draw: negatives' logits and slopes (anchors, negatives), positives' logits (anchors, 1)."""

    logit: Floats
    slope: Floats
    positive: Floats


def _links(positive: Floats, s: Floats, tau: float, beta: Floats, lam: Floats) -> tuple[_Link, _Link, _Link]:
    """Softmax, shortfall and their blend."""
    short = np.maximum(1.0 - s, EPS)
    # Below the floor the shortfall's logit is flat, so its slope is zero.
    slope = np.where(1.0 - s > EPS, beta / short, 0.0)
    softmax = _Link(s / tau, np.full_like(s, 1.0 / tau), positive[:, None] / tau)
    shortfall = _Link(-beta * np.log(short), slope, -beta * np.log(np.maximum(1.0 - positive, EPS))[:, None])
    blend = _Link(*((1.0 - lam) * a + lam * b for a, b in zip(softmax, shortfall, strict=True)))
    return softmax, shortfall, blend


def _gradient_mass(link: _Link, which: Integers, k: int, bins: int) -> Floats:
    """Gradient magnitude by bin (bins,), summed over disjoint subsets of ``k`` columns."""
    used = which.shape[1] // k * k
    u = link.logit[:, :used].reshape(len(which), -1, k)
    top = np.maximum(u.max(axis=2), link.positive)
    weight = np.exp(u - top[:, :, None])
    weight /= (weight.sum(axis=2) + np.exp(link.positive - top))[:, :, None]
    pull = weight.reshape(len(which), used) * link.slope[:, :used]
    return np.asarray(np.bincount(which[:, :used].ravel(), pull.ravel(), minlength=bins), dtype=np.float64)


def _risk(
    positive: Floats, ranked: Floats, places: Integers, counts: Integers, k: int, bins: int
) -> tuple[Floats, float]:
    """Expected failures by bin of the culprit's score, and the failure rate. Tied scores fall into one bin."""
    mass = np.zeros(bins)
    for n in np.unique(counts):
        rows = counts == n
        best = ranked[rows, :n]
        weights = np.where(best > positive[rows, None], _best_by_rank(int(n), k), 0.0)
        mass += np.bincount(places[rows, :n].ravel(), weights.ravel(), minlength=bins)
    return mass, float(mass.sum()) / len(positive)
