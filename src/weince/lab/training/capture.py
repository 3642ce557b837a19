"""Helpers that the training steps for images and for sentences share; both steps may run as a CUDA graph."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from weince.distributed import average, is_spread

T = TypeVar("T")

EAGER_STEPS = 3
"""Eager steps before the capture: in them libraries choose algorithms and the optimizer creates its state."""


class Embedded(NamedTuple):
    """Embeddings of the two views ``(n, d)`` and their loss, all detached."""

    z_i: Tensor
    z_j: Tensor
    loss: Tensor


def run_aside(step: Callable[[], T]) -> T:
    """Run a step on a side stream, as CUDA requires for the steps before a capture."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = step()
    torch.cuda.current_stream().wait_stream(stream)
    return made


def average_gradients(loss: nn.Module) -> None:
    """Average the gradients of a loss's own parameters over all ranks, as DDP does for the model."""
    for parameter in loss.parameters():
        if parameter.grad is not None and is_spread():
            parameter.grad = average(parameter.grad)


@torch.no_grad()
def finite_weights(*parts: nn.Module) -> bool:
    """Whether all weights are finite. A step whose loss is finite may still leave NaN. Costs a device sync."""
    every = [weight.isfinite().all() for part in parts for weight in part.parameters()]
    return bool(torch.stack(every).all())
