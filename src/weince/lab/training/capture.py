"""A training step, and its capture as a CUDA graph.

For a small encoder, CPU launch overhead dominates. As a CUDA graph, a step only copies the next batch to the graph's
inputs and starts one replay.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from weince.cached import cached_step
from weince.distributed import average, is_spread

if TYPE_CHECKING:
    from weince.lab.tasks.base import BatchOf, Training

T = TypeVar("T")

EAGER_STEPS = 3
"""Eager steps before the capture: in them libraries choose algorithms and the optimizer creates its state."""


class Taken(NamedTuple):
    """The loss of a step and its arguments, all detached; the next step may overwrite them."""

    loss: Tensor
    arguments: dict[str, Any]


class Step:
    """A callable that trains on one batch: forward, loss, backward, average over processes, update.

    With ``training.graph`` it captures the step once it has seen `EAGER_STEPS` batches of one shape; batches of other
    shapes run eagerly.
    """

    def __init__(self, training: "Training") -> None:
        if training.graph and training.device.type != "cuda":
            raise ValueError(f"a CUDA graph needs a CUDA device; got {training.device}")
        self.training = training
        self.graph: torch.cuda.CUDAGraph | None = None
        self.seen: Counter[tuple[Any, ...]] = Counter()
        self.inputs: BatchOf = {}
        self.captured: Taken | None = None

    def __call__(self, batch: "BatchOf") -> Taken:
        if not self.training.graph:
            return self._take(moved(batch, self.training.device))
        shape = tuple((name, tuple(value.shape)) for name, value in batch.items())
        if self.graph is None and self.seen[shape] == EAGER_STEPS:
            self._capture(batch)
        if self.graph is None:
            self.seen[shape] += 1
            return run_aside(lambda: self._take(moved(batch, self.training.device)))
        if shape != tuple((name, tuple(value.shape)) for name, value in self.inputs.items()):
            return self._take(moved(batch, self.training.device))
        for name, value in batch.items():
            self.inputs[name].copy_(value, non_blocking=True)
        self.graph.replay()
        assert self.captured is not None
        return self.captured

    def _capture(self, batch: "BatchOf") -> None:
        self.inputs = {name: value.to(self.training.device).clone() for name, value in batch.items()}
        self.graph = torch.cuda.CUDAGraph()
        for generator in self.training.generators:
            self.graph.register_generator_state(generator)
        with torch.cuda.graph(self.graph):
            self.captured = self._take(self.inputs)

    def _take(self, batch: "BatchOf") -> Taken:
        training = self.training
        training.optimizer.zero_grad()
        taken = _backward(training, batch)
        average_gradients(training.model, training.loss)
        if training.clip is not None:
            nn.utils.clip_grad_norm_(training.model.parameters(), training.clip)
        training.optimizer.step()
        return taken


def _backward(training: "Training", batch: "BatchOf") -> Taken:
    """Forward and backward pass, of the whole batch or in micro-batches with cached gradients."""
    views = training.views(batch)
    arguments: dict[str, Any] = {}

    def contrast(*rows: Tensor) -> Tensor:
        named = dict(zip((view.name for view in views), rows, strict=True))
        arguments.update(training.arguments(named, batch))
        others = {name: value for name, value in arguments.items() if name not in ("z_i", "z_j")}
        value: Tensor = training.loss(arguments["z_i"], arguments["z_j"], **others)
        return value

    if training.micro_batch is None:
        loss = contrast(*(view.encoder(view.inputs) for view in views))
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        encoders, inputs = [view.encoder for view in views], [view.inputs for view in views]
        loss = cached_step(encoders, inputs, contrast, micro_batch=training.micro_batch)
    return Taken(loss.detach(), {name: _detached(value) for name, value in arguments.items()})


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device, also those inside of its dicts."""
    if isinstance(batch, dict):
        return {name: moved(value, device) for name, value in batch.items()}
    return batch.to(device, non_blocking=True) if isinstance(batch, Tensor) else batch


def run_aside(step: Callable[[], T]) -> T:
    """Run a step on a side stream, as CUDA requires for the steps before a capture."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = step()
    torch.cuda.current_stream().wait_stream(stream)
    return result


def average_gradients(*parts: nn.Module) -> None:
    """Average the gradients of all parameters over all processes, in one exchange for each type of number.

    DistributedDataParallel would exchange them during the backward pass, which saves a little time, but it allows
    only one forward pass per step, and none with cached gradients.
    """
    if not is_spread():
        return
    gradients = [weight.grad for part in parts for weight in part.parameters() if weight.grad is not None]
    for dtype in {gradient.dtype for gradient in gradients}:
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        means = average(torch.cat([gradient.flatten() for gradient in alike]))
        for gradient, mean in zip(
            alike, torch.split(means, [gradient.numel() for gradient in alike]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))


@torch.no_grad()
def finite_weights(*parts: nn.Module) -> bool:
    """Whether all weights are finite. A step whose loss is finite may still leave NaN. Costs a device sync."""
    every = [weight.isfinite().all() for part in parts for weight in part.parameters()]
    return bool(torch.stack(every).all())
