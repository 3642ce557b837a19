"""The smallest values of each row or of a tensor, sorted: the largest extra cost of WEINCE over InfoNCE on a CPU.

``torch.topk`` also moves the column indices, and compares values one at a time. NumPy sorts with vector instructions:
up to 512 values in a network without branches, more values several times slower. So each row is cut into runs of at
most 512 values, the runs are sorted, and sorted runs are merged as in Batcher's bitonic sort: the elementwise minimum
of one run and another one reversed holds the smaller half of both, and the maximum holds the larger half.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLE = 1 << 15

NETWORK = 512
"""Most values that NumPy sorts in one network."""


def smallest(values: Tensor, k: int) -> Tensor:
    """The ``(rows, k)`` smallest values of each row of ``(rows, columns)``, in ascending order."""
    if values.device.type == "cpu":
        found: Tensor = _on_cpu(values, k)
        return found
    return values.topk(k, dim=1, largest=False).values


@torch.library.custom_op("weince::smallest", mutates_args=(), device_types="cpu")
def _on_cpu(values: Tensor, k: int) -> Tensor:
    rows, columns = values.shape
    runs = 1 << max(0, (columns // k).bit_length() - 1)  # a power of two, so that runs merge in pairs
    while -(-columns // runs) > NETWORK:
        runs *= 2
    missing = -columns % runs
    array = values.numpy()
    if missing:
        array = np.pad(array, ((0, 0), (0, missing)), constant_values=np.inf)
    ordered = np.sort(array.reshape(rows, runs, -1), axis=2)
    most = 2 * k // runs + 16  # twice a run's share: hardly any run holds more of the smallest
    if most < ordered.shape[2] < k:  # runs of k or more need no cut: merging drops the rest
        likely = ordered[:, :, :most]
        found = _merged(likely, k)
        if (found[:, -1] <= likely[:, :, -1].min(axis=1)).all():
            return torch.from_numpy(np.ascontiguousarray(found))
    return torch.from_numpy(np.ascontiguousarray(_merged(ordered, k)))


def _merged(runs: "NDArray[Any]", k: int) -> "NDArray[Any]":
    """The ``(rows, k)`` smallest values of sorted runs ``(rows, runs, length)``, in ascending order."""
    while runs.shape[1] > 1:
        runs = _in_pairs(runs, k)
    return runs[:, 0, :k]


def _in_pairs(runs: "NDArray[Any]", k: int) -> "NDArray[Any]":
    """Merge sorted runs ``(rows, runs, length)`` in pairs; drop the larger half of a pair if ``length >= k``."""
    rows, count, length = runs.shape
    first, second = runs[:, : count // 2], runs[:, count // 2 :, ::-1]
    smaller = np.minimum(first, second)
    pieces = smaller if length >= k else np.stack([smaller, np.maximum(first, second)], 2)
    pieces = pieces.reshape(rows, count // 2, -1, length)
    while pieces.shape[3] > NETWORK:  # a piece is bitonic: comparing its halves gives two bitonic pieces
        half = pieces.shape[3] // 2
        left, right = pieces[..., :half], pieces[..., half:]
        pieces = np.stack([np.minimum(left, right), np.maximum(left, right)], 3)
        pieces = pieces.reshape(rows, count // 2, -1, half)
    pieces.sort(axis=3)
    return pieces.reshape(rows, count // 2, -1)


@_on_cpu.register_fake
def _(values: Tensor, k: int) -> Tensor:
    return values.new_empty(values.shape[0], k)


def least(values: Tensor, count: int, *, ordered: bool = True) -> Tensor:
    """The smallest of ``(n,)`` values, at most ``count``, in ascending order if ``ordered``."""
    count = min(count, len(values))
    if values.device.type == "cpu":
        found: Tensor = _least_on_cpu(values, count, ordered)
        return found
    return values.topk(count, largest=False, sorted=ordered).values


@torch.library.custom_op("weince::least", mutates_args=(), device_types="cpu")
def _least_on_cpu(values: Tensor, count: int, ordered: bool) -> Tensor:
    array = _thinned(values.numpy(), count)
    kept = np.partition(array, count - 1)[:count] if 0 < count < len(array) else array[:count]
    return torch.from_numpy(np.sort(kept) if ordered else kept.copy())


def _thinned(array: "NDArray[Any]", count: int) -> "NDArray[Any]":
    """Drop most values too large to be among the ``count`` smallest, by a bound taken from a sample."""
    sample = array[:: max(1, len(array) // SAMPLE)]
    rank = math.ceil(count / len(array) * len(sample) * 1.1) + 50  # well above the expected rank
    if count == 0 or rank >= len(sample) // 2:
        return array
    # In NumPy, indexing by positions is several times faster than indexing by a mask.
    kept = array[np.flatnonzero(array <= np.partition(sample, rank)[rank])]
    return kept if len(kept) >= count else array


@_least_on_cpu.register_fake
def _(values: Tensor, count: int, ordered: bool) -> Tensor:
    return values.new_empty(count)
