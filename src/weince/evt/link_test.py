"""The link test: does another link fit the scores better than softmax at its best temperature?

H0 is the softmax link, ``logit = s / tau0``. H1 is the blended link of `weince.evt.link_fit`. Both are fitted
on half of the batches and compared on the other half, in nats per anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import special

from weince.evt import choice
from weince.evt.arrays import Bounds, Floats, Integers, check_fraction, check_least, unit_rows
from weince.evt.choice import Choices
from weince.evt.link_fit import Pair, fit_pair, link_fit
from weince.evt.link_null import null_ratios

Competing = Literal["views", "cross"]
"""Who competes with a positive: all other views of the batch, or only the rows of the other view."""

_FEWEST_ANCHORS = 32  # of a batch


class LinkBank(NamedTuple):
    """Input of the link test: scores (anchors, candidates), columns of the positives and batches (anchors,)."""

    scores: Floats
    positives: Integers
    batches: Integers


@dataclass(frozen=True)
class Gain:
    """A held-out gain: mean over batches, its interval from resampled batches, and the clustered t test."""

    gain: float  # nats per anchor
    interval: Bounds  # interval of the gain
    t_p_value: float  # one-sided p-value against a gain <= 0; 1 when the gain is identically 0


@dataclass(frozen=True)
class LinkTest:
    """Result of `link_test`; estimates and the likelihood ratio come from the held-in batches.

    Attributes:
        lam: Weight of the shortfall coordinate.
        tau: Temperature of the blended link.
        tau0: Temperature of the softmax link alone.
        lam_interval: Interval for ``lam``.
        tau_interval: Interval for ``tau``.
        tau0_interval: Interval for ``tau0``.
        interval_method: How the first two intervals were made, as in `LinkFit`.
        gain: Held-out mean of ``log p1 - log p0`` in nats per anchor (a mean of batch means).
        gain_ratio: ``exp(gain)``: how many times likelier the blend makes the positive, as a geometric mean.
        gain_interval: Interval of ``gain`` from resampling held-out batches, see `resampled_interval`.
        gain_by_batch: The gain of each held-out batch, in the order of ``held_out``.
        t_statistic: Statistic of a one-sided t test over the held-out batches, against a gain <= 0.
        t_p_value: Its p-value.
        lr_statistic: Held-in likelihood ratio.
        lr_p_value: Its p-value, by a parametric bootstrap.
        lr_null: The likelihood ratios simulated under softmax.
        held_in: Labels of the batches used to fit.
        held_out: Labels of the batches used to judge.
        top1: Share of all anchors whose positive has the top score.
        converged: Whether both fits reached their maximum.
        separated: True when every positive has the top score, as in `LinkFit`.
        notes: Sentences about what makes the result doubtful; empty when nothing does.
    """

    lam: float
    tau: float
    tau0: float
    lam_interval: Bounds
    tau_interval: Bounds
    tau0_interval: Bounds
    interval_method: str
    gain: float
    gain_ratio: float
    gain_interval: Bounds
    gain_by_batch: tuple[float, ...]
    t_statistic: float
    t_p_value: float
    lr_statistic: float
    lr_p_value: float
    lr_null: tuple[float, ...]
    held_in: tuple[int, ...]
    held_out: tuple[int, ...]
    top1: float
    converged: bool
    separated: bool
    notes: tuple[str, ...]


def link_bank(
    z_i: ArrayLike,
    z_j: ArrayLike,
    *,
    ids: Integers | None = None,
    batch_size: int = 256,
    batches: int = 32,
    candidates: Competing = "views",
    most_scores: int = 2**24,
    rng: int | np.random.Generator = 0,
) -> LinkBank:
    """Build a bank from paired embeddings, with the candidates that a loss with the same option has.

    Pairs are drawn into batches without replacement, so that batches are independent. If there are too few pairs
    for ``batches`` full batches, there are fewer batches.

    Args:
        z_i: ``(pairs, dim)`` embeddings of one view; they need not be normalised.
        z_j: ``(pairs, dim)`` embeddings of the other view, row by row.
        ids: ``(pairs,)`` integers: pairs with equal ids do not compete, their scores are NaN. None: all differ.
        batch_size: Pairs in a batch.
        batches: The most batches to draw.
        candidates: ``"views"``: each of the ``2 * batch_size`` views of a batch is an anchor, the others are its
            candidates. ``"cross"``: each row of ``z_i`` is an anchor, all rows of ``z_j`` are its candidates.
        most_scores: The most scores, about; beyond that some anchors of every batch are left out, to bound time and
            memory. Each anchor keeps all its candidates.
        rng: Seed or generator of the shuffle.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import link_bank
        >>> z_i, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> link_bank(z_i, z_i + noise, batch_size=32, batches=8).scores.shape
        (512, 63)
    """
    first, second = (np.asarray(z, dtype=np.float64) for z in (z_i, z_j))
    if first.ndim != 2 or first.shape != second.shape:
        raise ValueError(f"z_i and z_j must both be (pairs, dim); got {first.shape} and {second.shape}")
    check_competing(candidates)
    usable = np.all([np.isfinite(z).all(axis=1) & z.any(axis=1) for z in (first, second)], axis=0)
    if not usable.all():
        row = int(np.argmin(usable))
        raise ValueError(f"embeddings must be finite and not zero; got NaN, inf or zeros in pair {row}")
    if batch_size < 2 or batches < 1:
        raise ValueError(
            f"batch_size must be at least 2 and batches at least 1; got {batch_size} and {batches}"
        )
    count = min(batches, len(first) // batch_size)
    if count == 0:
        raise ValueError(
            f"wanted at least one batch of {batch_size} pairs; got {len(first)} pairs: take a smaller batch_size"
        )
    generator = np.random.default_rng(rng)
    order = generator.permutation(len(first))[: count * batch_size].reshape(count, batch_size)
    u, v = (torch.from_numpy(unit_rows(z))[order] for z in (first, second))  # (batches, rows, dim)
    items = torch.from_numpy(order if ids is None else ids[order])
    size = batch_size
    if candidates == "views":
        u = v = torch.cat([u, v], dim=1)
        items, size = torch.cat([items, items], dim=1), 2 * batch_size
    kept = min(size, max(_FEWEST_ANCHORS, most_scores // (count * size)))
    drawn = [np.arange(size) if kept == size else np.sort(generator.permutation(size)[:kept]) for _ in order]
    anchors = torch.from_numpy(np.array(drawn))
    positives = anchors if candidates == "cross" else (anchors + batch_size) % size
    # One product of many matrices: small ones, one by one, would wait for threads.
    scores = (u.gather(1, anchors[..., None].expand(-1, -1, u.shape[2])) @ v.mT).clamp_(-1.0, 1.0)
    same = items.gather(1, anchors)[..., None] == items[:, None]
    scores.masked_fill_(same.scatter_(2, positives[..., None], False), torch.nan)
    if candidates == "views":  # without the anchor's own column, the columns after it move one to the left
        scores = scores[torch.arange(size) != anchors[..., None]].reshape(count, kept, size - 1)
        positives = positives - (positives > anchors).long()
    labels = np.repeat(np.arange(count, dtype=np.int64), kept)
    return LinkBank(scores.flatten(0, 1).numpy(), positives.flatten().numpy(), labels)


def check_competing(candidates: str) -> None:
    """Raise an error unless the link test knows these candidates."""
    if candidates not in get_args(Competing):
        raise ValueError(f'candidates must be "views" or "cross"; got {candidates!r}')


def split_batches(groups: int, rng: np.random.Generator) -> tuple[Integers, Integers]:
    """Indices of the batches to fit on and to judge on: a random half each, at least two."""
    if groups < 4:
        raise ValueError(f"at least 4 batches are needed, two to fit and two to judge; got {groups}")
    count = round(groups / 2)
    order = rng.permutation(groups).astype(np.int64)
    return np.sort(order[:count]), np.sort(order[count:])


def clustered_t(gains: Floats) -> tuple[float, float]:
    """t statistic and one-sided p-value of a mean gain above 0 over batches; identical zeros give (0, 1)."""
    if not gains.any():
        return 0.0, 1.0
    spread = float(gains.std(ddof=1)) / float(np.sqrt(len(gains)))
    # Gains that are all equal have no standard error.
    t = float(gains.mean()) / spread if spread > 0.0 else np.nan
    return t, float(special.stdtr(len(gains) - 1, -t))


def resampled_interval(gains: Floats, draws: int, level: float, rng: np.random.Generator) -> Bounds:
    """Interval of the mean gain, from percentiles of the means of resampled batches.

    With few batches plain percentiles cover too little: the variance over n batches is too small by a factor of
    ``(n - 1) / n``, and is itself only an estimate. So their distance from the mean is widened, as Student's t does.
    """
    n, upper = len(gains), 0.5 + level / 2.0
    means = gains[rng.integers(n, size=(draws, n))].mean(axis=1)
    wider = special.stdtrit(n - 1, upper) / special.ndtri(upper) * np.sqrt(n / (n - 1))
    low, high = gains.mean() + wider * (np.quantile(means, [1.0 - upper, upper]) - gains.mean())
    return float(low), float(high)


def held_out_gain(values: Floats, bootstraps: int, level: float, rng: np.random.Generator) -> Gain:
    """Mean of the gains (batches,) of the held-out batches, with its interval and p-value."""
    interval = resampled_interval(values, bootstraps, level, rng)
    return Gain(float(values.mean()), interval, clustered_t(values)[1])


def batch_gains(choices: Choices, pair: Pair) -> Floats:
    """Mean gain of the blend over softmax in each batch, nats per anchor, shape (batches,)."""
    return choice.batch_means(choices, pair.full.theta) - choice.batch_means(choices, pair.null.theta)


def _bootstrap(
    fitted: Choices, pair: Pair, ratio: float, draws: int, rng: np.random.Generator
) -> tuple[Floats, float]:
    """Simulated ratios under softmax and the p-value; no ratios and NaN when no finite fit exists."""
    if pair.separated:
        return np.empty(0), np.nan
    null = null_ratios(fitted, float(pair.null.theta[0]), draws, rng)
    return null, (1.0 + float(np.sum(null >= ratio))) / (draws + 1.0)


def link_test(
    scores: ArrayLike,
    positives: ArrayLike,
    batches: ArrayLike,
    *,
    bootstraps: int = 2000,
    null_draws: int = 200,
    level: float = 0.95,
    rng: int | np.random.Generator = 0,
    choices: Choices | None = None,
) -> LinkTest:
    """Test the softmax link against the blend of softmax and shortfall.

    Args:
        scores: ``(anchors, candidates)`` cosines; NaN or -inf marks a column that does not compete.
        positives: ``(anchors,)`` column of each anchor's positive.
        batches: ``(anchors,)`` integer batch of each anchor; at least four batches.
        bootstraps: Resamplings of the held-out batches for the interval of the gain.
        null_draws: Simulations of the likelihood ratio under softmax.
        level: Level of all intervals.
        rng: Seed or generator of the split, the resampling and the simulations.
        choices: The same scores, if `weince.evt.choice.read_choices` has read them before.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import link_bank, link_test
        >>> z_i, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> bank = link_bank(z_i, z_i + noise, batch_size=32, batches=8)
        >>> found = link_test(*bank, bootstraps=50, null_draws=20)
        >>> bool(found.gain_interval[0] <= found.gain <= found.gain_interval[1])
        True
    """
    check_fraction(level, "level")
    check_least(bootstraps=(bootstraps, 1), null_draws=(null_draws, 1))
    generator = np.random.default_rng(rng)
    choices = choices or choice.read_choices(scores, positives, batches)
    inside, outside = split_batches(len(choices.labels), generator)
    fitted = choices.take(inside)
    pair = fit_pair(fitted)
    estimate = link_fit(fitted, pair, level)
    gains = batch_gains(choices.take(outside), pair)
    t, t_p = clustered_t(gains)
    interval = resampled_interval(gains, bootstraps, level, generator)
    ratio = 2.0 * (pair.full.value - pair.null.value)
    null, ratio_p = _bootstrap(fitted, pair, ratio, null_draws, generator)
    gain = float(gains.mean())
    return LinkTest(
        lam=estimate.lam,
        tau=estimate.tau,
        tau0=estimate.tau0,
        lam_interval=estimate.lam_interval,
        tau_interval=estimate.tau_interval,
        tau0_interval=estimate.tau0_interval,
        interval_method=estimate.interval_method,
        gain=gain,
        gain_ratio=float(np.exp(gain)),
        gain_interval=interval,
        gain_by_batch=tuple(gains.tolist()),
        t_statistic=t,
        t_p_value=t_p,
        lr_statistic=np.nan if estimate.separated else ratio,
        lr_p_value=ratio_p,
        lr_null=tuple(null.tolist()),
        held_in=tuple(choices.labels[inside].tolist()),
        held_out=tuple(choices.labels[outside].tolist()),
        top1=float(1.0 - choices.beaten[0].mean()),
        converged=estimate.converged,
        separated=estimate.separated,
        notes=estimate.notes,
    )
