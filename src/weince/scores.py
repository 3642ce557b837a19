"""Cosine scores that stay right near the cap.

A score is the cosine of two rows, its shortfall is ``1 - score``. Everything here runs in float32, or in
float64 for float64 input, whatever autocast says: in bfloat16 the number ``1 - 1e-6`` is 1.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

CROWD = 0.01
"""An anchor is crowded if a candidate other than its positive has a shortfall of no more than this."""


def wide(values: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return values.float() if values.device.type == "mps" else values.double()


def free_to_look(values: Tensor) -> bool:
    """Whether reading a value costs neither a wait for a device nor a break in a compiled graph."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


in_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
"""Whether torch.func is at work; without an answer, it may be."""


def unseen() -> bool:
    """Whether neither autograd nor torch.func nor a compiler looks on, so that a value of one's own may be
    overwritten. On a CPU that takes half the time: memory for another value is slow to come."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform())


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Keeps what runs under it in the dtype of its inputs."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def unit_rows(rows: Tensor) -> Tensor:
    """Rows scaled to length 1, in float32 or float64; a zero row stays zero and gets no gradient.

    Rows of any finite length work, also those whose squares overflow or underflow.

    Args:
        rows: ``(n, d)`` of any floating dtype.
    """
    unit: Tensor = _UnitRows.apply(rows)[0]  # type: ignore[no-untyped-call]
    return unit


def shortfalls(anchors: Tensor, candidates: Tensor, into: Tensor | None = None) -> Tensor:
    """``1 - cosine`` of every pair of unit rows, ``(a, d)`` and ``(c, d)`` to ``(a, c)``.

    The absolute error is that of the product, about 1e-7 in float32. Where the shortfall itself is that
    small, take it from :func:`pair_shortfall`.

    Args:
        anchors: ``(a, d)`` unit rows.
        candidates: ``(c, d)`` unit rows.
        into: ``(a, c)`` on the CPU, to be overwritten.
    """
    if into is not None:
        return into.fill_(1).addmm_(anchors, candidates.T, alpha=-1).clamp_(0, 2)
    if anchors.device.type == "cpu":  # one pass over the matrix instead of three
        return torch.addmm(anchors.new_ones(()), anchors, candidates.T, alpha=-1).clamp_(0, 2)
    return product(anchors, candidates.T).neg_().add_(1).clamp_(0, 2)


def pair_shortfall(a: Tensor, c: Tensor) -> Tensor:
    """``1 - cosine`` of matching unit rows as ``|a - c|² / 2``, which does not cancel near the cap.

    Args:
        a: ``(..., d)`` unit rows (or zero rows, whose score is 0).
        c: ``(..., d)``, broadcast against ``a``.
    """
    # The identity 1 - a.c = |a - c|²/2 holds for unit rows; a zero row falls half a unit short of it.
    gap = a - c
    zero_rows = 2 - dot(a, a).round() - dot(c, c).round()
    return (dot(gap, gap) + zero_rows) / 2


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Sums of products over the last dimension."""
    result: Tensor = torch.linalg.vecdot(a, b)
    return result


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` to full float32 accuracy, also where TensorFloat-32 was switched on for the program."""
    if a.dtype == torch.float32 and a.device.type == "cuda" and _tf32_may_be_on():
        # Three TF32 products of the leading and trailing bits: nearly float32, and no global switch flipped.
        a_high, b_high = _leading_bits(a), _leading_bits(b)
        return a_high @ b_high + (a_high @ (b - b_high) + (a - a_high) @ b_high)
    return a @ b


def _tf32_may_be_on() -> bool:
    """Read through the newer switch, of torch 2.9: reading the older one raises where a program used the newer."""
    if torch.compiler.is_compiling():
        return True  # a compiled graph cannot read it
    own = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if own is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    everywhere = torch.backends.fp32_precision  # type: ignore[attr-defined]  # set on the module at run time
    return own == "tf32" or bool(own == "none" and everywhere == "tf32")


def first_order(gradient: Tensor, source: Tensor) -> Tensor:
    """A gradient that cannot be differentiated again by what it came from: the written-out ones are constants."""
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


def _leading_bits(x: Tensor) -> Tensor:
    """``x`` cut to the 10 bits of mantissa that a TF32 product keeps."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


class RowKernels(NamedTuple):
    """Kernels that do what :class:`_UnitRows` does: whether they serve some rows, the rows, their gradient."""

    serve: Callable[[Tensor], bool]
    forward: Callable[[Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]


row_kernels: RowKernels | None = None
"""Set by the fused engine when it is first used; nothing here depends on it but the time that a small batch takes."""


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling() and row_kernels is not None and row_kernels.serve(rows):
            return row_kernels.forward(rows)
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        tiny = torch.finfo(dtype).tiny
        rows = rows.to(dtype)
        scale = rows.abs().amax(1, keepdim=True).clamp_min(tiny)  # so that no square leaves the range
        scaled = rows / scale
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
            # The gradient of a short row can exceed float16. Shrink the whole row, so that it keeps its direction.
            peak = result.abs().amax(1, keepdim=True).clamp_min(1)
            result = result * (torch.finfo(torch.float16).max / peak).clamp_max(1)
        narrowed: Tensor = result.to(ctx.dtype)
        return narrowed
