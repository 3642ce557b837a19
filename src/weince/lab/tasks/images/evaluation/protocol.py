"""The protocol of every comparison: how to split data and compute intervals.

A configuration is chosen only by validation figures, every loss gets the same number of tries, and losses are
compared seed by seed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit  # importing scipy.stats takes a second

from weince.intervals import LEVEL, Interval, half_text, t_interval

Indices = NDArray[np.int64]

SEEDS = (1, 2, 3, 4, 5)  # of the linear probes, and of the splits of the neighbours


class Split(NamedTuple):
    """Rows of a labelled set to train on and to validate on, each in rising order."""

    train: Indices
    validation: Indices


class PairedTest(NamedTuple):
    """A paired t-test.

    Attributes:
        difference: Mean of ``a - b``.
        half: Half width of its t-interval; NaN for one pair.
        p_value: Two-sided p-value; NaN for one pair. If all differences are equal, it is 1 if they are 0, else NaN.
        n: Number of pairs.
    """

    difference: float
    half: float
    p_value: float
    n: int

    def text(self, digits: int) -> str:
        """``+0.42 ± 0.19``: the signed difference and its half width; only the difference if that is NaN."""
        return f"{self.difference:+.{digits}f}{half_text(self.half, digits)}"


def split(labels: ArrayLike, *, seed: int) -> Split:
    """Split a labelled set by class.

    The first fifth of the shuffled rows of each class, rounded down, is for validation. So a class of fewer than five
    rows is used only for training.

    Args:
        labels: ``(n,)`` integers.
        seed: Seed of the shuffles; classes are shuffled in ascending order of their labels.
    """
    classes = np.asarray(labels)
    if classes.ndim != 1 or not np.issubdtype(classes.dtype, np.integer):
        raise ValueError(f"labels must be (n,) integers; got {classes.dtype} of shape {classes.shape}")
    rng = np.random.default_rng(seed)
    train, validation = [], []
    for label in np.unique(classes):
        rows = rng.permutation(np.flatnonzero(classes == label))
        held_out = len(rows) // 5
        validation.append(rows[:held_out])
        train.append(rows[held_out:])
    if not sum(map(len, validation)):
        raise ValueError(
            f"nothing is left to validate on: no class of these {len(classes)} rows has 5 or more"
        )
    return Split(np.sort(np.concatenate(train)), np.sort(np.concatenate(validation)))


class Spread(NamedTuple):
    """Spread of values within configurations, assumed to be the same for all of them.

    Attributes:
        deviation: Pooled standard deviation.
        degrees: Its degrees of freedom.
    """

    deviation: float
    degrees: int

    def half(self, n: int) -> float:
        """Half width of the t-interval of a mean over ``n`` values; for a difference of two means, times sqrt(2)."""
        return float(stdtrit(self.degrees, 0.5 + LEVEL / 2.0)) * self.deviation / math.sqrt(n)


def pooled_spread(intervals: Iterable[Interval]) -> Spread | None:
    """Pooled spread, from the `t_interval` of each configuration; None if none has two values."""
    squares, degrees = 0.0, 0
    for _, half, n in intervals:
        if n > 1:
            deviation = half * math.sqrt(n) / float(stdtrit(n - 1, 0.5 + LEVEL / 2.0))
            squares += (n - 1) * deviation**2
            degrees += n - 1
    return Spread(math.sqrt(squares / degrees), degrees) if degrees else None


def paired_test(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """Compare two losses seed by seed: ``a[i]`` and ``b[i]`` have the same seed."""
    if len(a) != len(b):
        raise ValueError(f"a paired test needs as many a as b; got {len(a)} and {len(b)}")
    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    mean, half, n = t_interval(differences)
    # 0.3 - 0.1 and 0.6 - 0.4 differ in the last digit: such a spread is rounding and must not give p near 0.
    rounding = 1e-12 * max(np.abs(a).max(), np.abs(b).max())
    if n > 1 and np.abs(differences).max() <= rounding:
        p = 1.0
    else:
        spread = float(differences.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
        p = float(2.0 * stdtr(n - 1, -abs(mean) / spread)) if spread > rounding else math.nan
    return PairedTest(mean, half, p, n)


def budget(tried: Mapping[str, int]) -> str:
    """The tuning budget in words: one number if all losses had the same number of tries, else one per loss."""
    if len(set(tried.values())) == 1:
        count = next(iter(tried.values()))
        return f"{count} {'tries' if count > 1 else 'try'} of each loss"
    each = ", ".join(f"{loss} {count}" for loss, count in tried.items())
    return f"unequal numbers of tries: {each}"
