"""Ablations of the link test: add a heavy-tail coordinate, keep fewer negatives, draw them from a smaller pool.

The heavy-tail (Frechet) coordinate is ``log((1 + s) / 2)``. A link is named by the coordinates it blends with
the score: 0 (softmax alone), W (shortfall), F (heavy tail), WF (both). Gains are measured on held-out batches, in
nats per anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from weince.evt import choice
from weince.evt.arrays import Floats, check_fraction
from weince.evt.choice import Choices
from weince.evt.link_fit import fit_pair
from weince.evt.link_test import Gain, LinkBank, batch_gains, held_out_gain, split_batches
from weince.lab.paper.risk import absent_last, negatives_of


def power(scores: Floats) -> Floats:
    """The heavy-tail (Frechet) coordinate ``log((1 + s) / 2)``, with its argument floored at `choice.EPS`."""
    return np.asarray(np.log(np.maximum(0.5 * (1.0 + scores), choice.EPS)))


@dataclass(frozen=True)
class FrechetAblation:
    """Result of `frechet_ablation`. All numbers are NaN when the positives are perfectly separated.

    In the names, 0 is softmax, ``w`` the shortfall (Weibull) and ``f`` the heavy tail (Frechet).

    Attributes:
        w_over_0: Gain of the shortfall blend over softmax.
        f_over_0: Gain of the heavy-tail blend over softmax.
        wf_over_w: Gain of the blend of all three over the shortfall blend.
        lam_w: Weight of the shortfall in its blend with softmax.
        lam_f: Weight of the heavy-tail coordinate in its blend with softmax.
        lam_w_full: Weight of the shortfall in the blend of all three.
        lam_f_full: Weight of the heavy-tail coordinate in that blend.
        tau_full: Temperature of that blend.
        separated: True when no finite fit exists.
    """

    w_over_0: Gain
    f_over_0: Gain
    wf_over_w: Gain
    lam_w: float
    lam_f: float
    lam_w_full: float
    lam_f_full: float
    tau_full: float
    separated: bool


@dataclass(frozen=True)
class AblationPoint:
    """The link fitted to one kind of choice set.

    Attributes:
        kept: Number of hard negatives that compete with the positive.
        pool: Number of negatives they were picked from.
        lam: Weight of the shortfall coordinate, fitted to the held-in batches.
        tau: Temperature of the blend fitted to them.
        tau0: Temperature of softmax fitted to them.
        gain: Held-out gain of the blend over softmax.
        separated: True when no finite fit exists; the numbers are then NaN.
    """

    kept: int
    pool: int
    lam: float
    tau: float
    tau0: float
    gain: Gain
    separated: bool


def _embed(theta: Floats, columns: Sequence[int]) -> Floats:
    """Weights (3,) with ``theta`` at ``columns`` and 0 elsewhere."""
    out = np.zeros(3)
    out[list(columns)] = theta
    return out


def _fit_blend(choices: Choices, columns: tuple[int, ...], smaller: Floats) -> Floats:
    """Fit the link in ``columns``, starting from the weights ``smaller`` of a link nested in it.

    When the larger link gains nothing, the smaller one's weights (3,) are returned unchanged, so that the gain
    between the two is exactly 0.
    """
    best = choice.fit(choices.using(*columns), smaller[list(columns)])
    nested = -float(choice.log_partitions(choices, smaller).sum())
    theta = _embed(best.theta, columns)
    added = [c for c in columns if smaller[c] == 0.0]
    return smaller if best.value <= nested or not theta[added].any() else theta


def frechet_ablation(
    scores: ArrayLike,
    positives: ArrayLike,
    batches: ArrayLike,
    *,
    bootstraps: int = 2000,
    level: float = 0.95,
    rng: int | np.random.Generator = 0,
) -> FrechetAblation:
    """Measure whether a heavy-tail coordinate helps, alone or on top of the shortfall. Arguments as in `link_test`.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import link_bank
        >>> from weince.lab.paper.ablations import frechet_ablation
        >>> z_i, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> bank = link_bank(z_i, z_i + noise, batch_size=32, batches=8)
        >>> round(frechet_ablation(*bank, bootstraps=20).f_over_0.gain, 2)
        0.0
    """
    check_fraction(level, "level")
    generator = np.random.default_rng(rng)
    coordinates = (choice.translation, choice.shortfall, power)
    choices = choice.read_choices(scores, positives, batches, coordinates=coordinates)
    inside, outside = split_batches(len(choices.labels), generator)
    fitted, judged = choices.take(inside), choices.take(outside)
    separated = any(choice.separated(fitted, j) for j in range(3))
    softmax = w = f = wf = np.full(3, np.nan)
    if not separated:
        softmax = _embed(choice.fit(fitted.using(0)).theta, (0,))
        w = _fit_blend(fitted, (0, 1), softmax)
        f = _fit_blend(fitted, (0, 2), softmax)
        wf = _fit_blend(fitted, (0, 1, 2), w)
    level_0, level_w, level_f, level_wf = (choice.batch_means(judged, theta) for theta in (softmax, w, f, wf))
    total = float(wf.sum())
    return FrechetAblation(
        w_over_0=held_out_gain(level_w - level_0, bootstraps, level, generator),
        f_over_0=held_out_gain(level_f - level_0, bootstraps, level, generator),
        wf_over_w=held_out_gain(level_wf - level_w, bootstraps, level, generator),
        lam_w=_share(w, 1),
        lam_f=_share(f, 2),
        lam_w_full=_share(wf, 1),
        lam_f_full=_share(wf, 2),
        tau_full=1.0 / total if total != 0.0 else np.inf,
        separated=separated,
    )


def _share(theta: Floats, column: int) -> float:
    total = float(theta.sum())
    return 0.0 if total == 0.0 else float(theta[column]) / total


def _hard_sets(
    scores: ArrayLike,
    positives: ArrayLike,
    batches: ArrayLike,
    sizes: Sequence[tuple[int, int]],
    bootstraps: int,
    rng: int | np.random.Generator,
) -> tuple[AblationPoint, ...]:
    """Fit the link to the positive and the hardest ``kept`` of ``pool`` negatives, for each (kept, pool)."""
    generator = np.random.default_rng(rng)
    s, columns = choice.read_scores(scores, positives)
    negatives = absent_last(generator.permuted(negatives_of(s, columns), axis=1))
    available = int(np.isfinite(negatives).sum(axis=1).min())
    positive = s[np.arange(len(s)), columns][:, None]
    seed = int(generator.integers(2**63))
    points = []
    for kept, pool in sizes:
        pool = min(pool, available)
        if not 1 <= kept <= pool:
            raise ValueError(f"kept must lie between 1 and the pool of {pool} negatives; got {kept}")
        # Pools are nested, and so are the hard sets within a pool, so that points differ only by size.
        hard = -np.partition(-negatives[:, :pool], kept - 1, axis=1)[:, :kept]
        bank = LinkBank(np.hstack([positive, hard]), np.zeros(len(s), dtype=np.int64), np.asarray(batches))
        points.append(_ablation_point(bank, kept, pool, bootstraps, np.random.default_rng(seed)))
    return tuple(points)


def _ablation_point(
    bank: LinkBank, kept: int, pool: int, bootstraps: int, rng: np.random.Generator
) -> AblationPoint:
    choices = choice.read_choices(*bank)
    inside, outside = split_batches(len(choices.labels), rng)
    pair = fit_pair(choices.take(inside))
    gain = held_out_gain(batch_gains(choices.take(outside), pair), bootstraps, 0.95, rng)
    return AblationPoint(kept, pool, *pair.lam_tau, pair.tau0, gain, pair.separated)


def hard_negative_ablation(
    scores: ArrayLike,
    positives: ArrayLike,
    batches: ArrayLike,
    *,
    kept: Sequence[int] = (8, 16, 32, 64, 128, 256, 510),
    pool: int = 512,
    bootstraps: int = 2000,
    rng: int | np.random.Generator = 0,
) -> tuple[AblationPoint, ...]:
    """Fit the link to growing numbers of the hardest negatives of a fixed pool.

    Args:
        scores: ``(anchors, candidates)`` cosines, as in `link_test`.
        positives: ``(anchors,)`` column of each anchor's positive.
        batches: ``(anchors,)`` integer batch of each anchor.
        kept: Numbers of hard negatives that compete with the positive.
        pool: Number of negatives to pick them from; at most as many as the anchor with the fewest has.
        bootstraps: Resamplings of the held-out batches.
        rng: Seed or generator.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import link_bank
        >>> from weince.lab.paper.ablations import hard_negative_ablation
        >>> z_i, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> bank = link_bank(z_i, z_i + noise, batch_size=32, batches=8)
        >>> [point.kept for point in hard_negative_ablation(*bank, kept=(8, 32), bootstraps=20)]
        [8, 32]
    """
    sizes = [(k, pool) for k in kept]
    return _hard_sets(scores, positives, batches, sizes, bootstraps, rng)


def pool_ablation(
    scores: ArrayLike,
    positives: ArrayLike,
    batches: ArrayLike,
    *,
    pools: Sequence[int] = (64, 128, 256, 510),
    kept: int = 64,
    bootstraps: int = 2000,
    rng: int | np.random.Generator = 0,
) -> tuple[AblationPoint, ...]:
    """Fit the link to a fixed number of hard negatives from larger and larger random pools.

    Args:
        scores: ``(anchors, candidates)`` cosines, as in `link_test`.
        positives: ``(anchors,)`` column of each anchor's positive.
        batches: ``(anchors,)`` integer batch of each anchor.
        pools: Numbers of negatives to pick from; each pool contains the smaller ones.
        kept: Number of hard negatives that compete with the positive.
        bootstraps: Resamplings of the held-out batches.
        rng: Seed or generator.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import link_bank
        >>> from weince.lab.paper.ablations import pool_ablation
        >>> z_i, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> bank = link_bank(z_i, z_i + noise, batch_size=32, batches=8)
        >>> [point.pool for point in pool_ablation(*bank, pools=(16, 32), kept=8, bootstraps=20)]
        [16, 32]
    """
    sizes = [(kept, p) for p in pools]
    return _hard_sets(scores, positives, batches, sizes, bootstraps, rng)
