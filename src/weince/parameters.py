"""What links, losses and batches are given: checks of numbers, choices, and tensors that may be learned."""

from numbers import Real

import torch
from torch import Tensor

from weince.scores import free_to_look

Scalar = float | Tensor


def check_positive(name: str, value: Scalar) -> None:
    """Raise if a parameter is not positive and finite; tensors are read only if that needs no device sync."""
    if isinstance(value, Tensor):
        if value.ndim > 1:
            raise ValueError(f"{name} must be one value, or one per anchor; got shape {tuple(value.shape)}")
        if free_to_look(value) and not ((value > 0) & value.isfinite()).all():
            raise ValueError(f"{name} must be positive and finite; got {value.detach()}")
    elif not is_number(value):
        raise TypeError(f"{name} must be a number or a tensor; got {type(value).__name__}")
    elif not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite; got {value}")


def check_fixed(name: str, value: float) -> None:
    """Raise if an option is not a positive and finite number. It is not learned, so a tensor is refused."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    check_positive(name, value)


def unrounded(parameter: Scalar) -> Scalar:
    """A parameter in float32 or better: in half precision its inverse would lose digits."""
    if not isinstance(parameter, Tensor):
        return parameter
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))


def is_number(value: object, kind: type = Real) -> bool:
    """Whether a value is a Python or numpy number; a bool is not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_endpoint(endpoint: float) -> None:
    """Raise if a score could exceed the endpoint of a shortfall link."""
    check_positive("endpoint", endpoint)
    if endpoint < 1:
        raise ValueError(f"endpoint must be at least 1, the largest cosine; got {endpoint}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise if an option is not one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def check_integers(name: str, values: Tensor | None, lengths: tuple[int, ...]) -> None:
    """Raise if these are not integers, one for each row. Lengths stay dynamic in a compiled graph."""
    if values is None:
        return
    if not isinstance(values, Tensor) or values.is_floating_point() or values.is_complex():
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be an integer tensor of shape {_shapes(lengths)}; got {got}")
    if values.ndim != 1 or all(len(values) != length for length in lengths):
        raise ValueError(f"{name} must have shape {_shapes(lengths)}; got {tuple(values.shape)}")


def check_device(device: torch.device, **tensors: Tensor | None) -> None:
    for name, values in tensors.items():
        if isinstance(values, Tensor) and values.device != device:
            raise ValueError(f"{name} must be on {device}, like the embeddings; got {values.device}")


def _shapes(lengths: tuple[int, ...]) -> str:
    return " or ".join(f"({length},)" for length in dict.fromkeys(lengths))


def check_mask(ignore: Tensor, shape: tuple[int, int], alone: bool) -> None:
    """Raise unless these are booleans of this shape; over ranks, columns may be all ranks' candidates."""
    if not isinstance(ignore, Tensor) or ignore.dtype != torch.bool:
        got = ignore.dtype if isinstance(ignore, Tensor) else type(ignore).__name__
        raise TypeError(f"ignore must be a boolean tensor of shape {shape}; got {got}")
    if tuple(ignore.shape) != shape and (alone or ignore.ndim != 2 or len(ignore) != shape[0]):
        raise ValueError(
            f"ignore must have shape {shape}, anchors by candidates: (n, n + m) for n queries, their documents and m "
            f"further negatives of all; got {tuple(ignore.shape)}"
        )
