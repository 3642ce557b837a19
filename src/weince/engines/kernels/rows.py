# mypy: ignore-errors
"""Rows scaled to length 1 in one launch, and their gradient in another. :func:`weince.scores.unit_rows` needs two
dozen small operations for it, whose launches take longer than the work in small batches."""

import torch
import triton
import triton.language as tl

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def unit_kernel(source, unit, inverse, n_rows, d, stride, BR: tl.constexpr, WIDE: tl.constexpr):
    """Compute unit rows and their inverse lengths; a zero row stays zero, with an inverse length of 0."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, WIDE)
    inside = row < n_rows
    mask = inside[:, None] & (column < d)[None, :]
    place = row.to(tl.int64)[:, None]
    x = tl.load(source + place * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), TINY)  # so that no square overflows or underflows
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], (BR, WIDE)))
    length = tl.sqrt_rn(tl.sum(x * x, axis=1))
    x = tl.div_rn(x, tl.broadcast_to(tl.maximum(length, TINY)[:, None], (BR, WIDE)))
    tl.store(unit + place * d + column[None, :], x, mask=mask)
    ones = tl.full((BR,), 1.0, tl.float32)
    whole = tl.div_rn(ones, tl.maximum(scale * length, TINY))
    tl.store(inverse + row, tl.where(length > 0, whole, 0.0), mask=inside)


@triton.jit
def unit_gradient_kernel(
    grad, unit, inverse, out, n_rows, d, stride, BR: tl.constexpr, WIDE: tl.constexpr, LARGEST: tl.constexpr
):
    """Gradient of the rows from that of the unit rows: its component orthogonal to the row, over the row's length.

    ``LARGEST``: largest number that ``out`` can hold, or 0 for no check. A row beyond it is scaled down as a whole.
    """
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, WIDE)
    inside = row < n_rows
    mask = inside[:, None] & (column < d)[None, :]
    place = row.to(tl.int64)[:, None]
    g = tl.load(grad + place * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    u = tl.load(unit + place * d + column[None, :], mask=mask, other=0.0)
    along = tl.sum(u * g, axis=1)
    result = (g - u * along[:, None]) * tl.load(inverse + row, mask=inside, other=0.0)[:, None]
    if LARGEST > 0:
        peak = tl.maximum(tl.max(tl.abs(result), axis=1), 1.0)
        result = result * tl.minimum(LARGEST / peak, 1.0)[:, None]
    tl.store(out + place * d + column[None, :], result.to(out.dtype.element_ty), mask=mask)
