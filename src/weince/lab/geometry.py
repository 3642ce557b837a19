"""Measure how embeddings lie on the sphere.

Alignment of pairs and uniformity of all rows (Wang and Isola 2020), effective rank (Roy and Vetterli 2007), crowds.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weince.scores import CROWD, shortfalls

MOST_CROWDED, LEAST_RANK = 0.05, 2.0
"""Embeddings count as collapsed above this share of crowded anchors, or below this effective rank."""


def unit_in_double(z: Tensor) -> Tensor:
    """Rows of unit length in float64; on the CPU if the device does not support float64."""
    return F.normalize((z.cpu() if z.device.type == "mps" else z).double(), dim=-1)


def pair_distances(first: Tensor, second: Tensor) -> Tensor:
    """Squared distances ``(pairs,)`` of unit vectors, ``(pairs, d)`` twice; alignment is their mean."""
    distances: Tensor = torch.linalg.vector_norm(first - second, dim=1)
    return distances.square()


def uniformity(rows: Tensor, without: Tensor | None = None) -> Tensor:
    """``log mean exp(-2 * squared distance)`` over all pairs of the unit vectors ``(rows, d)``; lower is more even.

    Args:
        rows: Unit vectors.
        without: Squared distances ``(pairs,)`` of pairs of rows to leave out, such as positives.
    """
    gaps = torch.pdist(rows).square()
    total, count = (-2 * gaps).exp().sum(), len(gaps)
    if without is not None:
        total, count = total - (-2 * without).exp().sum(), count - len(without)
    return (total / count).log()


def effective_rank(rows: Tensor) -> Tensor:
    """Exponential of the entropy of the singular values of ``(rows, d)``."""
    values = torch.linalg.svdvals(rows)
    share = values / values.sum()
    entropy: Tensor = -torch.special.xlogy(share, share).sum()
    return entropy.exp()


def crowded(rows: Tensor) -> Tensor:
    """Share of unit rows ``(2 n, d)`` that are crowded; row ``k`` is the positive of row ``k + n``."""
    n = len(rows) // 2
    near = shortfalls(rows, rows) <= CROWD
    for offset in (-n, 0, n):  # an anchor itself, and its positive on either side
        near.diagonal(offset).fill_(False)
    return near.any(1).double().mean()


def collapsed(crowd: float, rank: float) -> str | None:
    """What indicates a collapse, in words: the share of crowded anchors, the effective rank; None if neither does."""
    signs = []
    if crowd > MOST_CROWDED:
        signs.append(f"{crowd:.0%} of the anchors lie next to another item")
    if rank < LEAST_RANK:
        signs.append(f"the effective rank is {rank:.1f}")
    return " and ".join(signs) or None
