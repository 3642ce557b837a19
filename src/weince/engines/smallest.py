"""The smallest values, of every row or of all, sorted: what WEINCE costs most beyond InfoNCE on a CPU.

``torch.topk`` carries the columns along and compares one by one. NumPy sorts and divides with vector instructions. Of
rows, on the CPU, each is cut into runs of about k values, the runs are sorted, and two sorted runs
are merged into the k smallest of both by one elementwise minimum of the one and the other reversed: each value
that is kept has at most k - 1 smaller ones.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLE = 1 << 15


def smallest(values: Tensor, k: int) -> Tensor:
    """``(rows, columns)`` to the ``(rows, k)`` smallest of each row, sorted upwards."""
    if values.device.type == "cpu":
        found: Tensor = _on_cpu(values, k)
        return found
    return values.topk(k, dim=1, largest=False).values


@torch.library.custom_op("weince::smallest", mutates_args=(), device_types="cpu")
def _on_cpu(values: Tensor, k: int) -> Tensor:
    rows, columns = values.shape
    runs = 1 << max(0, (columns // k).bit_length() - 1)  # a power of two, so that runs merge in pairs
    missing = -columns % runs
    array = values.numpy()
    if missing:
        array = np.pad(array, ((0, 0), (0, missing)), constant_values=np.inf)
    kept = np.sort(array.reshape(rows, runs, -1), axis=2)[:, :, :k]
    while kept.shape[1] > 1:
        half = kept.shape[1] // 2
        kept = np.minimum(kept[:, :half], kept[:, half:, ::-1])
        kept.sort(axis=2)
    return torch.from_numpy(np.ascontiguousarray(kept[:, 0]))


@_on_cpu.register_fake
def _(values: Tensor, k: int) -> Tensor:
    return values.new_empty(values.shape[0], k)


def least(values: Tensor, count: int) -> Tensor:
    """``(n,)`` to the smallest, at most ``count`` of them, sorted upwards."""
    count = min(count, len(values))
    if values.device.type == "cpu":
        found: Tensor = _least_on_cpu(values, count)
        return found
    return values.topk(count, largest=False).values


@torch.library.custom_op("weince::least", mutates_args=(), device_types="cpu")
def _least_on_cpu(values: Tensor, count: int) -> Tensor:
    array = _thinned(values.numpy(), count)
    kept = np.partition(array, count - 1)[:count] if 0 < count < len(array) else array[:count]
    return torch.from_numpy(np.sort(kept))


def _thinned(array: "NDArray[Any]", count: int) -> "NDArray[Any]":
    """Without most of what is too large to be among the ``count`` smallest, by a bound that a sample gives."""
    sample = array[:: max(1, len(array) // SAMPLE)]
    rank = math.ceil(count / len(array) * len(sample) * 1.1) + 50  # far above the rank that is expected
    if count == 0 or rank >= len(sample) // 2:
        return array
    kept = array[array <= np.partition(sample, rank)[rank]]
    return kept if len(kept) >= count else array


@_least_on_cpu.register_fake
def _(values: Tensor, count: int) -> Tensor:
    return values.new_empty(count)
