"""How embeddings lie on the sphere: alignment of pairs and uniformity of all rows (Wang and Isola 2020)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def unit_in_double(z: Tensor) -> Tensor:
    """Rows of unit length in float64, on the CPU if the device has none."""
    return F.normalize((z.cpu() if z.device.type == "mps" else z).double(), dim=-1)


def pair_distances(first: Tensor, second: Tensor) -> Tensor:
    """Squared distances ``(pairs,)`` of unit vectors, ``(pairs, d)`` twice; alignment is their mean."""
    distances: Tensor = torch.linalg.vector_norm(first - second, dim=1)
    return distances.square()


def uniformity(rows: Tensor, without: Tensor | None = None) -> Tensor:
    """``log mean exp(-2 * squared distance)`` over all pairs of the unit vectors ``(rows, d)``: less is more even.

    Args:
        rows: Unit vectors.
        without: Squared distances ``(pairs,)`` of pairs of rows that do not count, such as positives.
    """
    gaps = torch.pdist(rows).square()
    total, count = (-2 * gaps).exp().sum(), len(gaps)
    if without is not None:
        total, count = total - (-2 * without).exp().sum(), count - len(without)
    return (total / count).log()
