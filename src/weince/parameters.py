"""Parameters of links and losses: numbers, or tensors that may be learned."""

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
