"""Types of arrays, and checks of what callers pass."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

S = TypeVar("S")
T = TypeVar("T")
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bounds = tuple[float, float]
"""The lower and the upper end of an interval."""
CORES = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


def as_scores(x: ArrayLike, name: str = "x") -> Floats:
    """Return `x` as a float64 array of shape (n,); raise an error if it is empty or not finite."""
    scores = np.asarray(x, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0:
        raise ValueError(f"{name} must be a non-empty array of shape (n,); got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError(
            f"{name} must be finite; got {int((~np.isfinite(scores)).sum())} NaN or infinite values"
        )
    return scores


def as_integers(x: ArrayLike, name: str, length: int, each: str) -> Integers:
    """Return `x` as an int64 array of shape (length,); raise an error if it is not one integer per `each`."""
    integers = np.asarray(x)
    if not np.issubdtype(integers.dtype, np.integer):
        raise TypeError(f"{name} must be integers; got {integers.dtype}")
    if integers.shape != (length,):
        raise ValueError(f"{name} must be of shape ({length},), one per {each}; got {integers.shape}")
    return integers.astype(np.int64)


def unit_rows(z: NDArray[Any]) -> Floats:
    """Rows ``(n, dim)`` of unit length, in float64; the squares of very large or small rows stay in range."""
    rows = z.astype(np.float64)
    rows /= np.abs(rows).max(axis=1, keepdims=True)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def check_least(**least: tuple[int, int]) -> None:
    """Raise an error if a number is too small; each is given by name as ``bootstraps=(value, smallest)``."""
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise ValueError(f"{name} must be at least {smallest}; got {value}")


def check_fraction(value: float, name: str) -> float:
    """Return `value`; raise an error unless it lies strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} must lie strictly between 0 and 1; got {value}")
    return float(value)


def on_all_cores(work: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Results of ``work`` in order, computed in threads: numpy computes without the interpreter's lock."""
    with ThreadPoolExecutor(CORES) as pool:
        return list(pool.map(work, items))
