"""CUDA graphs of a loss: recorded once for each shape of batch, replayed for all later batches of that shape.

A loss is some sixty small operations. Up to a few thousand pairs, the CPU takes longer to launch them than the GPU to
run them. A replay launches all at once. The key of a recording is what it cannot change: shapes and dtypes of the
batch, settings of the loss, and the addresses of its parameters and buffers. Each key has its own recording, and a
recording belongs to the thread that made it.
"""

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weince import scores
from weince.engines.choose import warn_once
from weince.links import Link
from weince.scores import no_autocast

BEFORE = 4
"""Batches of a key that run without a graph first. A program that captures its whole step has done so by then."""

MOST_ROWS = 16384
"""Most embeddings of a batch to record without ``graph=True``: 8,192 pairs of views. With more, the GPU takes longer
than the CPU."""

MOST_BYTES = 1 << 27
"""Most bytes of such a batch, ``ignore`` included: a recording holds a copy of its batch."""

MOST_KEYS = 8
"""Most keys kept for a loss. A new key replaces the oldest; a replay makes its key the newest."""

log = logging.getLogger("weince")

Batch = Mapping[str, Tensor]
"""The tensors that a loss is called with, by name: embeddings, labels and so on."""


class _Kept(threading.local):
    """For each loss and key: the number of batches so far, then the recording, or None if the capture failed.

    Each thread has its own recordings. Otherwise one thread could overwrite the batch that another is replaying.
    """

    def __init__(self) -> None:
        self.by_loss: WeakKeyDictionary[nn.Module, dict[Any, int | Recording | None]] = WeakKeyDictionary()


_kept = _Kept()


def replayed(loss: nn.Module, compute: Callable[..., Tensor], batch: Batch, *, asked: bool) -> Tensor | None:
    """The loss of a batch from its recording; None if there is none, or if it is in use: then compute the loss.

    Args:
        loss: The module; its settings, parameters and buffers are part of the key.
        compute: Computes the loss of a batch.
        batch: The batch.
        asked: Whether the user set ``graph=True``: record batches of any size, and warn if that is impossible.
    """
    if not _batch_may(batch) or not (asked or _is_small(batch)):
        return None
    try:
        key = _key(loss, batch)
    except CannotFollow as error:
        if asked:
            warn_once(f"weince: graph=True has no effect on {type(loss).__name__}: {error}")
        return None
    kept = _kept.by_loss.setdefault(loss, {})
    known = kept.get(key, 0)
    if known == BEFORE:
        known = kept[key] = _recorded(loss, compute, batch)
    if isinstance(known, int):
        _count(kept, key, known)
        return None
    if known is None or known.in_use:
        return None
    kept[key] = kept.pop(key)  # now the newest
    learned = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    value: Tensor = _Replay.apply(known, *batch.values(), *learned)  # type: ignore[no-untyped-call]
    return value


def _count(kept: dict[Any, Any], key: tuple[Any, ...], before: int) -> None:
    """Count a batch of a key after ``before`` others; a new key may replace the oldest."""
    if not before and len(kept) >= MOST_KEYS:
        kept.pop(next(iter(kept)))
    kept[key] = before + 1


def _is_small(batch: Batch) -> bool:
    rows = sum(len(value) for name, value in batch.items() if name in ("z_i", "z_j", "negatives"))
    return rows <= MOST_ROWS and sum(value.nbytes for value in batch.values()) <= MOST_BYTES


def _batch_may(batch: Batch) -> bool:
    """Whether a batch is on a GPU and needs gradients, and no one else captures, transforms or checkpoints it."""
    return (
        all(type(value) in (Tensor, nn.Parameter) and value.is_cuda for value in batch.values())
        and batch["z_i"].dtype != torch.float64  # the kernels do not support it
        and scores.row_kernels is not None
        and torch.is_grad_enabled()
        and any(value.requires_grad for value in batch.values())
        and not torch.cuda.is_current_stream_capturing()
        and not scores.in_transform()
        and not torch.is_anomaly_enabled()
        and _saved_as_they_are()  # checkpointing counts the tensors that a loss saves
    )


class CannotFollow(Exception):
    """A recording would miss a change of the loss; the message says which."""


def _key(loss: nn.Module, batch: Batch) -> tuple[Any, ...]:
    """Everything that a recording cannot change."""
    # Each stream has its own recording, or two batches at a time would share its memory.
    key: list[Any] = [_stream_of(batch["z_i"].device)]
    for name, value in batch.items():
        key += name, value.shape, value.dtype, value.requires_grad, value.device
    for module in loss.modules():
        for name, setting in vars(module).items():
            if name not in _BOOKKEEPING:
                _check_setting(name, setting)
                key.append(setting)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                _check_state(name, tensor, batch["z_i"].device)
                key += tensor.data_ptr(), tensor.dtype, tensor.requires_grad
    return tuple(key)


_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"} | {"_looked", "_learned", "_compiled_call_impl"}
"""Attributes of a module that are no settings of the loss."""


def _check_setting(name: str, setting: Any) -> None:
    if isinstance(setting, Tensor) or (isinstance(setting, Link) and setting.tensors()):
        raise CannotFollow(
            f"{name} must be a number or an nn.Parameter; got a tensor, whose history may change"
        )
    try:
        hash(setting)
    except TypeError:
        raise CannotFollow(
            f"{name} must have a hash, or it may change unseen; got a {type(setting).__name__}"
        ) from None


def _check_state(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise CannotFollow(f"{name} must be on {device}, as the batch is; got it on {tensor.device}")
    if tensor._backward_hooks:
        raise CannotFollow(f"{name} must have no hook, which would run twice; got one")


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _saved_as_they_are() -> bool:
    """Whether no hooks on saved tensors are set, as ``torch.utils.checkpoint`` sets them; False if torch cannot tell.
    (Such a torch is too old for the kernels anyway.)"""
    return _top_hooks is not None and _top_hooks(True) is None


def _stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _recorded(loss: nn.Module, compute: Callable[..., Tensor], batch: Batch) -> "Recording | None":
    try:
        recording = Recording(loss, compute, batch)
    except RuntimeError as error:
        _leave_capture(batch["z_i"].device)
        log.debug(
            "%s is computed as it comes, since CUDA makes no graph of it: %s", type(loss).__name__, error
        )
        return None
    log.debug("%s is replayed as a CUDA graph from now on", type(loss).__name__)
    return recording


def _leave_capture(device: torch.device) -> None:
    """Capture one small operation. After a failed capture, torch's random generator needs a capture that succeeds."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        number = torch.zeros((), device=device)
        with _captured(torch.cuda.graph_pool_handle()):
            number.add_(1)


WAITING = frozenset(
    {"_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select", "bincount", "repeat_interleave"}
    | {"_unique2", "unique_dim", "unique_consecutive"}
)
"""Operations that sync with the device, to read a number or the shape of their result."""


COPIES = frozenset({"_to_copy", "copy_"})


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises if an operation syncs with the device. During a capture, such an operation would fail and leave torch's
    allocator in capture mode."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        result = function(*args, **(kwargs or {}))
        held = [tensor for tensor in _tensors((args, result)) if tensor.ndim or name in COPIES]
        by_mask = name.startswith("index") and any(tensor.dtype == torch.bool for tensor in _tensors(args[1]))
        moved = len({tensor.device for tensor in held}) > 1  # between CPU and GPU
        waits = name in WAITING and any(tensor.device == self.device for tensor in _tensors(args))
        if waits or by_mask or moved:
            raise RuntimeError(f"{name} waits for the device; got it in a loss that is to be recorded")
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class _Use:
    """Marks a forward pass whose backward pass may still come. It is freed with the autograd graph."""

    done = False


class Recording:
    """Forward and backward pass of one batch as two CUDA graphs that share their memory."""

    def __init__(self, loss: nn.Module, compute: Callable[..., Tensor], batch: Batch) -> None:
        device = batch["z_i"].device
        inputs = {
            name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in batch.items()
        }
        self.inputs = list(inputs.values())
        self.parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]
        self.turn = 0
        self._use: Callable[[], _Use | None] = lambda: None
        sources = [value for value in (*self.inputs, *self.parameters) if value.requires_grad]
        before = [buffer.clone() for buffer in loss.buffers()]
        pool = torch.cuda.graph_pool_handle()
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(aside), no_autocast(device):
            with NoWaiting(device):
                value = compute(inputs)  # once without a graph: a capture cannot load kernels
                torch.autograd.grad(value.sum(), sources, allow_unused=True)
            for buffer, old in zip(loss.buffers(), before, strict=True):
                buffer.copy_(old)
            self.weight = torch.ones_like(value)
            with _captured(pool) as self.forward:
                value = compute(inputs)
            # retain_graph keeps the saved tensors during the capture, so that the backward pass does not
            # overwrite what it reads: a second backward pass needs them unchanged.
            with _captured(pool) as self.backward:
                gradients = torch.autograd.grad(
                    value, sources, self.weight, allow_unused=True, retain_graph=True
                )
        torch.cuda.current_stream(device).wait_stream(aside)
        self.value, left = value.detach(), iter(gradients)
        wanted = (source.requires_grad for source in (*self.inputs, *self.parameters))
        self.gradients = [next(left) if want else None for want in wanted]

    @property
    def in_use(self) -> bool:
        """Whether a backward pass of the last forward pass may still come and needs its memory."""
        use = self._use()
        return use is not None and not use.done

    def play(self, batch: list[Tensor]) -> tuple[Tensor, _Use]:
        """Replay the forward pass on a batch; returns the loss and its mark."""
        torch._foreach_copy_(self.inputs, batch)
        self.forward.replay()
        self.turn += 1
        use = _Use()
        self._use = ref(use)
        return self.value.clone(), use

    def play_back(self, weight: Tensor) -> list[Tensor | None]:
        """Replay the backward pass; ``weight`` is the gradient of the loss. Returns those of batch and parameters."""
        self.weight.copy_(weight)
        self.backward.replay()
        return [None if gradient is None else gradient.clone() for gradient in self.gradients]


@contextmanager
def _captured(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the block as a CUDA graph. Other threads may keep using the device."""
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()  # freeing objects may call the device, which a capture forbids
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, *tensors: Tensor) -> Tensor:
        value, ctx.use = recording.play(list(tensors[: len(recording.inputs)]))
        ctx.recording, ctx.turn = recording, recording.turn
        ctx.save_for_backward(*tensors[len(recording.inputs) :])
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.turn != ctx.recording.turn:
            raise RuntimeError(
                "a second backward pass must come before the next batch, whose CUDA graph has taken its memory; "
                "got it after that: make the loss with graph=False"
            )
        _ = ctx.saved_tensors  # raises if a parameter has changed since
        gradients = ctx.recording.play_back(weight)
        ctx.use.done = True  # from here on another batch may take the memory
        return None, *gradients
