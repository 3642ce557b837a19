"""Cosine scores that stay accurate near the cap.

A score is the cosine of two rows, its shortfall is ``1 - score``. Everything here runs in float32, or in
float64 for float64 input, even under autocast: in bfloat16 the number ``1 - 1e-6`` is 1.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

CROWD = 0.01
"""An embedding is crowded if one of another item in its batch has a shortfall of at most this from it."""


def wide(values: Tensor) -> Tensor:
    """Convert to float64; to float32 on MPS, which has no float64."""
    return values.float() if values.device.type == "mps" else values.double()


def wide_enough(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores of rows of this dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def free_to_look(values: Tensor) -> bool:
    """Whether a value can be read without a device sync and without a break in a compiled graph."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


in_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
"""Whether a torch.func transform is active; True if torch cannot tell."""


def unseen() -> bool:
    """Whether neither autograd nor torch.func nor a compiler records operations, so that a fresh tensor may be
    overwritten. On a CPU this halves the time, since allocating another tensor is slow."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform())


def may_take(own: Tensor, *others: float | Tensor) -> bool:
    """Whether a fresh tensor ``own`` may be overwritten with a result of it and ``others``: nothing records
    operations, and the result has the same shape and dtype."""
    return unseen() and all(
        not isinstance(other, Tensor)
        or other.ndim == 0
        or (other.dtype == own.dtype and len(other) == len(own))
        for other in others
    )


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast: operations keep the dtype of their inputs."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def joined(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """``torch.cat``, which under autocast refuses rows in half precision other than its own."""
    with no_autocast(parts[0].device):
        return torch.cat(parts)


def unit_rows(rows: Tensor) -> Tensor:
    """Rows scaled to length 1, in float32 or float64; a zero row stays zero and gets no gradient.

    Rows of any finite length work, even if their squares overflow or underflow.

    Args:
        rows: ``(n, d)`` of any floating dtype.
    """
    unit: Tensor = _UnitRows.apply(rows)[0]  # type: ignore[no-untyped-call]
    return unit


def shortfalls(
    anchors: Tensor, candidates: Tensor, into: Tensor | None = None, *, capped: bool = True
) -> Tensor:
    """``1 - cosine`` of every pair of unit rows, ``(a, d)`` and ``(c, d)`` to ``(a, c)``.

    The absolute error is that of the product, about 1e-7 in float32. For shortfalls as small as that, use
    :func:`pair_shortfall`.

    Args:
        anchors: ``(a, d)`` unit rows.
        candidates: ``(c, d)`` unit rows.
        into: ``(a, c)`` tensor on the CPU that receives the result.
        capped: Whether the rows have length 1, so that a shortfall lies in [0, 2].
    """
    if into is not None:
        matrix = into.fill_(1).addmm_(anchors, candidates.T, alpha=-1)
    elif anchors.device.type == "cpu":  # one pass over the matrix instead of three
        matrix = torch.addmm(anchors.new_ones(()), anchors, candidates.T, alpha=-1)
    else:
        matrix = product(anchors, candidates.T).neg_().add_(1)
    return matrix.clamp_(0, 2) if capped else matrix


def row_shortfall(anchors: Tensor, candidates: Tensor, row: Tensor, symmetric: bool = False) -> Tensor:
    """``(a,)`` exact shortfall of each anchor ``(a, d)`` and the candidate ``(c, d)`` at its row ``(a,)``.

    ``symmetric``: anchors and candidates are the same rows.
    """
    kernels = None if torch.compiler.is_compiling() or anchors.dtype != torch.float32 else row_kernels
    if kernels is not None and kernels.apart is not None and kernels.serve(anchors):
        return kernels.apart(anchors, candidates, row, symmetric)
    shortfall: Tensor = _RowShortfall.apply(anchors, candidates, row)[0]  # type: ignore[no-untyped-call]
    return shortfall


class _RowShortfall(torch.autograd.Function):
    """``|a - c|² / 2``, with the gradients ``a - c`` and ``c - a``; autograd would take four times as long."""

    @staticmethod
    def forward(anchors: Tensor, candidates: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        others = candidates.index_select(0, row)
        gap = anchors - others
        score, square = torch.linalg.vecdot(anchors, others), torch.linalg.vecdot(gap, gap)
        return torch.where(score > 0.5, square / 2, (1 - score).clamp_max(2)), gap  # 1 for a zero row

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        _, candidates, row = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], candidates, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
        gap, candidates, row = ctx.saved_tensors
        pull = first_order(gap * grad.unsqueeze(1), candidates)
        return pull, torch.zeros_like(candidates).index_add(0, row, pull, alpha=-1), None


def pair_shortfall(a: Tensor, c: Tensor) -> Tensor:
    """``1 - cosine`` of matching unit rows as ``|a - c|² / 2``, which does not cancel near the cap.

    Args:
        a: ``(..., d)`` unit rows (or zero rows, whose score is 0).
        c: ``(..., d)``, broadcast against ``a``.
    """
    # For unit rows 1 - a.c = |a - c|²/2. For each zero row the right side is 1/2 too small.
    gap = a - c
    zero_rows = 2 - dot(a, a).round() - dot(c, c).round()
    return ((dot(gap, gap) + zero_rows) / 2).clamp_max(2)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot products over the last dimension."""
    result: Tensor = torch.linalg.vecdot(a, b)
    return result


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in full float32 accuracy, even if the program has enabled TensorFloat-32."""
    if a.dtype == torch.float32 and a.device.type == "cuda" and _tf32_may_be_on():
        # Three TF32 products of the leading and trailing bits: nearly float32, and no global switch changes.
        a_high, b_high = _leading_bits(a), _leading_bits(b)
        return a_high @ b_high + (a_high @ (b - b_high) + (a - a_high) @ b_high)
    return a @ b


def _tf32_may_be_on() -> bool:
    """Whether TF32 may be on. Reads the switch of torch 2.9, if any: the older one raises once the newer was set."""
    if torch.compiler.is_compiling():
        return True  # a compiled graph cannot read the switch
    own = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if own is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    everywhere = torch.backends.fp32_precision  # type: ignore[attr-defined]  # set on the module at run time
    return own == "tf32" or bool(own == "none" and everywhere == "tf32")


def log1pexp(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``. Above 40 it returns ``x``, with derivative 1, which is exact in float64."""
    return torch.nn.functional.softplus(x, threshold=40.0)


def log_add(value: Tensor, logits: Tensor) -> Tensor:
    """``log(exp(value) + sum exp(logits))`` of ``(a,)`` and ``(a, k)``; ``-inf`` with gradient 0 if all are."""
    every = torch.cat([value.unsqueeze(1), logits], 1)
    largest = every.detach().amax(1, keepdim=True).clamp_min(torch.finfo(every.dtype).min)
    total = (every - largest).exp().sum(1)
    some = total != 0  # NaN stays NaN
    return torch.where(some, total.where(some, 1.0).log() + largest.squeeze(1), -torch.inf)


def first_order(gradient: Tensor, source: Tensor) -> Tensor:
    """A gradient that raises if it is differentiated again; autograd would take a hand-written one for a constant."""
    if not (torch.is_grad_enabled() and source.requires_grad):
        return gradient
    marked: Tensor = _FirstOrder.apply(gradient, source)  # type: ignore[no-untyped-call]
    return marked


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(gradient: Tensor, source: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        raise NotImplementedError("weince losses have a first derivative only; this asked for a second one")


def derivatives(function: Callable[[dict[str, Tensor]], Tensor], at: dict[str, Tensor]) -> dict[str, Tensor]:
    """Derivatives of a function's one number with respect to each of its tensors.

    ``torch.func.grad`` does the same, but raises under hooks on saved tensors, as activation checkpointing sets them.
    """
    if torch.compiler.is_compiling() or in_transform():
        found: dict[str, Tensor] = torch.func.grad(function)(at)
        return found
    # Hooks of our own hide what is saved here from those around it, which count saved tensors.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
        leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
        total = function(leaves)
        if not total.requires_grad:  # a constant
            return {name: torch.zeros_like(value) for name, value in at.items()}
        own = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(at, own, strict=True))


def _unchanged(value: Tensor) -> Tensor:
    return value


def _leading_bits(x: Tensor) -> Tensor:
    """``x`` cut to the 10 bits of mantissa that a TF32 product keeps."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


class RowKernels(NamedTuple):
    """CUDA kernels of :class:`_UnitRows` and of :func:`row_shortfall`; ``serve`` tells whether they support some
    rows."""

    serve: Callable[[Tensor], bool]
    forward: Callable[[Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]
    apart: Callable[[Tensor, Tensor, Tensor, bool], Tensor] | None = None


row_kernels: RowKernels | None = None
"""Set when the fused engine is first imported. Here it changes no result, only the time of small batches."""


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling() and row_kernels is not None and row_kernels.serve(rows):
            return row_kernels.forward(rows)
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        rows = rows.to(dtype).contiguous()  # as the kernels need the unit rows
        if (
            type(rows) is Tensor
            and rows.device.type == "cpu"
            and not (torch.compiler.is_compiling() or in_transform())
        ):
            length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            shortest, longest = length.aminmax() if len(length) else (length.sum(), length.sum())
            if shortest > 1e-15 and longest < 1e15:  # no square has overflowed or lost digits
                return rows / length, length.reciprocal_()
        tiny = torch.finfo(rows.dtype).tiny
        scale = rows.abs().amax(1, keepdim=True).clamp_min(tiny)  # so that no square overflows or underflows
        # A row below the smallest normal number would get an infinite gradient: it counts as a row of length 0.
        scaled = torch.where(scale > tiny, rows, 0.0) / scale
        length = scaled.square().sum(1, keepdim=True).sqrt()
        inverse = torch.where(length > 0, 1 / (scale * length).clamp_min(tiny), 0.0)
        return scaled / length.clamp_min(tiny), inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        unit, inverse = output
        ctx.mark_non_differentiable(inverse)
        ctx.save_for_backward(unit, inverse)
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        unit, inverse = ctx.saved_tensors
        if not torch.compiler.is_compiling() and row_kernels is not None and row_kernels.serve(grad):
            return first_order(row_kernels.backward(grad, unit, inverse, ctx.dtype), grad)
        along = (unit * grad).sum(1, keepdim=True)
        result = (grad - unit * along) * inverse
        if ctx.dtype == torch.float16:
            # The gradient of a short row can exceed float16. Scale the row down; it keeps its direction.
            peak = result.abs().amax(1, keepdim=True).clamp_min(1)
            result = result * (torch.finfo(torch.float16).max / peak).clamp_max(1)
        return first_order(result.to(ctx.dtype), grad)
