"""What the engines in plain torch share: the gradient of several sums."""

from collections.abc import Sequence

import torch
from torch import Tensor

from weince.sums import Part


def sum_slopes(
    slopes: Sequence[Tensor], columns: Sequence[Tensor | None], weights: Sequence[Tensor], candidates: int
) -> Tensor:
    """Weighted total ``(a, c)`` of the derivatives of several sums with respect to the scores.

    Args:
        slopes: Derivatives of each sum, ``(a, c)``, or ``(a, m)`` for some of the candidates.
        columns: Columns ``(a, m)`` of those candidates, for each sum; None for all candidates.
        weights: Weight ``(a,)`` of each sum, such as its upstream gradient.
        candidates: Number of candidates.
    """
    total: Tensor | None = None
    for slope, column, weight in zip(slopes, columns, weights, strict=True):
        if column is None:
            each = weight.unsqueeze(1)
            total = slope * each if total is None else total.addcmul_(slope, each)
    if total is None:
        # Created from the weights: under vmap they have a batch dimension that the slopes lack.
        total = sum(weights[1:], weights[0]).new_zeros(len(slopes[0]), candidates)
    for slope, column, weight in zip(slopes, columns, weights, strict=True):
        if column is not None:
            total.scatter_add_(1, column, slope * weight.unsqueeze(1))
    return total


def learned_of(parts: Sequence[Part]) -> list[tuple[int, str, Tensor]]:
    """Learned parameters of all links, each as index of its part, name, and tensor."""
    # In a compiled graph each is a view of its own: links may share a temperature, and torch cannot compile an
    # autograd function that takes one tensor twice.
    compiling = torch.compiler.is_compiling()
    return [
        (index, name, value.view_as(value) if compiling else value)
        for index, part in enumerate(parts)
        for name, value in part.link.learned().items()
    ]


def to_parameter(by_anchor: Tensor, parameter: Tensor) -> Tensor:
    """Gradient of a parameter: the sum of the anchors' contributions ``(a,)``, in the parameter's shape and dtype."""
    return by_anchor.sum_to_size(parameter.shape).to(parameter.dtype)
