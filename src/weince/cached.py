"""A training step for batches whose encoder activations do not fit in memory: gradients through cached embeddings.

Gradient accumulation does not replace a larger batch, since each row then has only the negatives of its
micro-batch. Here the loss sees the whole batch: embed it in micro-batches without a graph, compute the loss
and its gradient with respect to the embeddings, then embed each micro-batch again, with a graph, and backpropagate
that gradient. It costs one more forward pass, and memory for one micro-batch of activations.

>>> import torch
>>> from weince import WeinceLoss
>>> encoder = torch.nn.Linear(6, 4)
>>> views = torch.randn(32, 6), torch.randn(32, 6)
>>> cached_step(encoder, views, WeinceLoss(), micro_batch=8).ndim
0
>>> encoder.weight.grad.shape
torch.Size([4, 6])
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weince.scores import joined

Encoder = Callable[[Any], Tensor]
SETTING = str | int | float | None
"""A value in a dict that is not cut into micro-batches; sentence-transformers puts some beside its tensors."""


def cached_step(
    encoder: Encoder | Sequence[Encoder],
    views: Sequence[Any],
    loss: Callable[..., Tensor],
    *,
    micro_batch: int,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Forward and backward pass of a batch in micro-batches; like ``backward()``, it adds gradients to ``.grad``.

    The result is that of ``loss(encoder(view_1), encoder(view_2)).backward()``, if the encoder treats rows
    independently. Dropout draws the same masks in both passes. Batch normalisation sees one micro-batch at a
    time, and each twice, so its running statistics are updated twice. Some of several encoders may be
    frozen, or return detached tensors.

    Call it under the autocast context of the forward pass, if there is one. An encoder in
    ``DistributedDataParallel`` exchanges its gradients once, with the last micro-batch.

    Args:
        encoder: Maps inputs of ``rows`` rows to embeddings ``(rows, d)``; or one encoder for each view, in a list or
            an ``nn.ModuleList``.
        views: Inputs of each view: a tensor, or dicts, lists and tuples of tensors, rows first. They must not
            carry a gradient: make the module that computes them a part of the encoder. Texts, numbers and None in
            a dict go to every micro-batch as they are.
        loss: Maps the embeddings of all views, ``(rows, d)`` each, to a scalar.
        micro_batch: Rows to embed at a time.
        scaler: ``GradScaler`` for float16 mixed precision; it scales the loss before the backward pass.

    Returns:
        The loss, detached and unscaled.

    Examples:
        >>> import torch
        >>> from weince import InfoNCELoss, cached_step
        >>> encoder = torch.nn.Linear(6, 4)
        >>> views = torch.randn(32, 6), torch.randn(32, 6)
        >>> cached_step(encoder, views, InfoNCELoss(0.1), micro_batch=8).shape
        torch.Size([])
        >>> encoder.weight.grad.shape
        torch.Size([4, 6])
    """
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise ValueError(f"micro_batch must be an int of at least 1; got {micro_batch!r}")
    encoders = _one_for_each(encoder, views)
    pieces = [list(_pieces(view, micro_batch)) for view in views]
    embeddings = []
    with torch.no_grad():
        for encode, parts in zip(encoders, pieces, strict=True):
            embeddings.append(joined([part.first(encode) for part in parts]).requires_grad_())
    torch.clear_autocast_cache()  # or weights that were cast without gradient are used again
    value = loss(*embeddings)
    if not isinstance(value, Tensor) or value.ndim:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the loss must be a scalar; got {got}")
    if not value.requires_grad:
        raise ValueError(
            "the loss must have a gradient with respect to the embeddings: leave out .detach() and torch.no_grad()"
        )
    (value if scaler is None else scaler.scale(value)).backward()  # type: ignore[no-untyped-call]
    _backpropagate(
        [
            (encode, part, rows.grad[part.start : part.stop])
            for encode, parts, rows in zip(encoders, pieces, embeddings, strict=True)
            for part in parts
            if rows.grad is not None
        ]
    )
    return value.detach()


def _one_for_each(encoder: Encoder | Sequence[Encoder], views: Sequence[Any]) -> list[Encoder]:
    """An encoder for each view."""
    # A ModuleList is no Sequence to Python.
    if isinstance(encoder, Sequence | nn.ModuleList):
        encoders: list[Any] = list(encoder)
    else:
        encoders = [encoder] * len(views)
    if len(encoders) != len(views) or len(views) == 0:  # views stacked in one tensor have no truth value
        raise ValueError(
            f"wanted one encoder, or one for each view; got {len(encoders)} for {len(views)} views"
        )
    if any(getattr(encode, "static_graph", False) for encode in encoders):
        raise ValueError(
            "cached_step runs the encoder twice, which DistributedDataParallel(static_graph=True) forbids: "
            "leave that option out"
        )
    return encoders


def _backpropagate(jobs: "Sequence[tuple[Encoder, _Piece, Tensor]]") -> None:
    """Embed each piece again, with a graph, and backpropagate the gradient of its embeddings."""
    last = {id(encode): index for index, (encode, _, _) in enumerate(jobs)}
    reached: dict[int, int] = {}  # by encoder, its last job that took a gradient
    for index, (encode, part, gradient) in enumerate(jobs):
        with _exchange(encode, last[id(encode)] == index):
            embedded = part.again(encode)
            if embedded.requires_grad:  # False for a frozen encoder
                torch.autograd.backward(embedded, gradient)
                reached[id(encode)] = index
    for own, index in reached.items():
        encode, part, gradient = jobs[index]
        if index != last[own] and hasattr(encode, "no_sync"):  # its last job was frozen and exchanged nothing
            torch.autograd.backward(part.again(encode), torch.zeros_like(gradient))
    if jobs and not reached:
        raise ValueError("no encoder takes a gradient: all are frozen, or return detached tensors")


class _Piece:
    """Some rows of a view, with the state of the random generators before they were first embedded."""

    def __init__(self, inputs: Any, start: int, stop: int) -> None:
        self.inputs, self.start, self.stop = inputs, start, stop
        self.before: _Random | None = None

    def first(self, encode: Encoder) -> Tensor:
        self.before = _Random.now()
        embedded = encode(self.inputs)
        rows = self.stop - self.start
        if not isinstance(embedded, Tensor) or embedded.ndim != 2 or len(embedded) != rows:
            got = tuple(embedded.shape) if isinstance(embedded, Tensor) else type(embedded).__name__
            raise ValueError(f"the encoder must return (rows, d) for {rows} rows; got {got}")
        return embedded

    def again(self, encode: Encoder) -> Tensor:
        assert self.before is not None
        with self.before.restored():
            return encode(self.inputs)


class _Random(NamedTuple):
    """State of the random generators of the CPU and all GPUs, since an encoder may move its inputs to any of them."""

    cpu: Tensor
    cuda: list[Tensor]
    mps: Tensor | None

    @classmethod
    def now(cls) -> "_Random":
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        return cls(torch.get_rng_state(), cuda, mps)

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state_all(self.cuda)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set these states for the block, and restore the present ones afterwards."""
        present = _Random.now()
        self.set()
        try:
            yield
        finally:
            present.set()


def _pieces(view: Any, micro_batch: int) -> Iterator[_Piece]:
    leaves = list(_leaves(view))
    lengths = {len(leaf) if leaf.ndim else 0 for leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"a view must be tensors of equally many rows, 1 or more; got {sorted(lengths) or 'no tensor'}"
        )
    if any(leaf.grad_fn is not None for leaf in leaves):
        raise ValueError(
            "a view must be an input, since each micro-batch runs a backward pass of its own; got the output of a "
            "graph: move what computes it into the encoder, or detach it"
        )
    rows = lengths.pop()
    for start in range(0, rows, micro_batch):
        stop = min(start + micro_batch, rows)
        yield _Piece(_cut(view, start, stop), start, stop)


def _leaves(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        for value in inputs.values():
            if not isinstance(value, SETTING):
                yield from _leaves(value)
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from _leaves(value)
    else:
        raise TypeError(
            f"a view must be tensors, or dicts, lists and tuples of them; got {type(inputs).__name__}"
        )


def _cut(inputs: Any, start: int, stop: int) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[start:stop]
    if isinstance(inputs, Mapping):
        return {
            name: value if isinstance(value, SETTING) else _cut(value, start, stop)
            for name, value in inputs.items()
        }
    parts = [_cut(value, start, stop) for value in inputs]
    # A named tuple takes its fields as arguments, lists and tuples take one iterable.
    return type(inputs)(*parts) if hasattr(inputs, "_fields") else type(inputs)(parts)


def _exchange(encode: Encoder, now: bool) -> AbstractContextManager[Any]:
    """Context for a distributed encoder, which exchanges gradients if ``now`` and else accumulates them locally."""
    wait = getattr(encode, "no_sync", None)
    context: AbstractContextManager[Any] = nullcontext() if wait is None or now else wait()
    return context
