"""Means and their t-intervals, and how they and p-values are written."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # not scipy.stats, which takes a second to import

LEVEL = 0.95
"""Confidence level of every interval here."""


class Interval(NamedTuple):
    """A mean and the half width of its t-interval over ``n`` values; with one value the half width is NaN."""

    mean: float
    half: float
    n: int

    def text(self, digits: int) -> str:
        """``50.01 ± 0.19``; only the mean if the half width is NaN."""
        return f"{self.mean:.{digits}f}{half_text(self.half, digits)}"


def t_interval(values: Iterable[float]) -> Interval:
    """Mean and t-interval of independent values, such as the accuracy of each of several pretrained encoders."""
    x = np.fromiter(values, dtype=np.float64)
    if not len(x) or not np.isfinite(x).all():
        raise ValueError(f"an interval needs finite values; got {x.tolist()}")
    half = math.nan
    if len(x) > 1:
        half = float(stdtrit(len(x) - 1, 0.5 + LEVEL / 2.0) * x.std(ddof=1) / math.sqrt(len(x)))
    return Interval(float(x.mean()), half, len(x))


def p_text(p: float) -> str:
    """A p-value with three decimals, never shown as 0; a dash for NaN."""
    return "—" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def half_text(half: float, digits: int) -> str:
    return "" if math.isnan(half) else f" ± {half:.{digits}f}"
