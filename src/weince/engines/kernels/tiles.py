# mypy: ignore-errors
"""What all kernels share: operands, and a tile of shortfalls.

Operands are rows in 16 bits, padded with zeros to ``DP`` columns and a multiple of 128 rows. bfloat16 embeddings have
one part, and their products are exact; the inverse lengths are applied afterwards. Unit rows in float32 have two
parts, leading and trailing 8 bits, and their product is four products of parts, with an error of about 1e-7. (Without
the product of the trailing parts, scores of similar rows would be too small by up to 1e-6.)

Kernels take arguments in these groups, in this order:

- operands: ``x, inv_x`` of the rows of a tile, ``y, inv_y`` of its columns
- what the kernel reads, what it writes
- pairs: ``anchor_columns, candidate_columns`` (tuples of pointers), ``numbers`` (a tuple), ``ignore`` (a pointer to
  booleans and its two strides)
- sizes: ``n_rows, n_cols`` of the matrix, spans
- compile-time: tile (``BM, BN``), operands (``DP, DB, PARTS``), ``COSINE`` (False: scores are products of rows as
  they are, without a cap), generated functions (:mod:`weince.engines.kernels.translate`), then the kernel's own
  constants
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def on_grid(x):
    """Round to bfloat16 but keep float32: for the interpreter, which cannot multiply bfloat16."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def ones_in(x):
    """Number of bits that are set."""
    if INTERPRETED:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        y = (x + (x >> 8) + (x >> 16) + (x >> 24)) & 63
    else:
        y = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], tl.int32, True, 1)
    return y


@triton.jit
def places(marked, BN: tl.constexpr):
    """Place of every marked column among the marked ones of its row, from 1, and their number; ``BN`` is 32 or 64.

    A row's marks are packed into the bits of one or two words, which takes a fraction of the work of a running sum.
    """
    col = tl.arange(0, BN)
    bit = (tl.full((BN,), 1, tl.int32) << (col & 31))[None, :]
    first = tl.sum(tl.where(marked & (col < 32)[None, :], bit, 0), axis=1)
    number = ones_in(first)
    # Shift in two steps: the first serves several columns, the second is constant in a register.
    place = ones_in((first[:, None] << (7 - (col & 7))[None, :]) << (24 - (col & 24))[None, :])
    if BN == 64:
        second = tl.sum(tl.where(marked & (col >= 32)[None, :], bit, 0), axis=1)
        beyond = ones_in((second[:, None] << (7 - (col & 7))[None, :]) << (24 - (col & 24))[None, :])
        place = tl.where((col < 32)[None, :], place, number[:, None] + beyond)
        number += ones_in(second)
    return place, number


@triton.jit
def operands_kernel(
    source, out, inverse, rows, d, stride,
    DP: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Convert rows to operands, with the inverse length of each (1 for unit rows). ``GRID``: use :func:`on_grid`."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = row < rows
    column = tl.arange(0, WIDE)
    fits = (column < DP)[None, :]
    where = row.to(tl.int64)[:, None]
    mask = inside[:, None] & (column < d)[None, :]
    x = tl.load(source + where * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    target = out + where * (PARTS * DP) + column[None, :]
    if PARTS == 1:
        # Scale by a power of two, which is exact, so that no square overflows or underflows.
        largest = tl.max(tl.abs(x), axis=1)
        scale = tl.exp2(-tl.floor(tl.log2(tl.maximum(largest, 1e-37))))
        x = x * scale[:, None]
        square = tl.sum(x * x, axis=1)
        tl.store(inverse + row, tl.where(square > 0, 1 / tl.sqrt_rn(tl.maximum(square, 1e-37)), 0.0))
        tl.store(target, x.to(out.dtype.element_ty), mask=fits)
    else:
        high = x.to(out.dtype.element_ty).to(tl.float32)
        if GRID:
            high = on_grid(x)
        tl.store(inverse + row, tl.full((BR,), 1.0, tl.float32))
        tl.store(target, high.to(out.dtype.element_ty), mask=fits)
        low = x - high
        if GRID:
            low = on_grid(low)
        tl.store(target + DP, low.to(out.dtype.element_ty), mask=fits)


@triton.jit
def part(x, rows, first, STRIDE: tl.constexpr, DB: tl.constexpr):
    """``DB`` columns of some operand rows."""
    return tl.load(x + rows.to(tl.int64)[:, None] * STRIDE + (first + tl.arange(0, DB))[None, :])


@triton.jit
def both_parts(x, rows, first, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr):
    """``DB`` columns of both parts of some operand rows; of the only part twice if there is one."""
    high = part(x, rows, first, PARTS * DP, DB)
    low = high
    if PARTS == 2:
        low = part(x, rows, first + DP, PARTS * DP, DB)
    return high, low


@triton.jit
def products(a, a_low, b, b_low, acc, PARTS: tl.constexpr):
    """Add ``a @ b.T`` to ``acc``; with two parts, the small products come first."""
    if PARTS == 2:
        acc = tl.dot(a_low, tl.trans(b_low), acc)
        acc = tl.dot(a_low, tl.trans(b), acc)
        acc = tl.dot(a, tl.trans(b_low), acc)
    return tl.dot(a, tl.trans(b), acc)


@triton.jit
def wide_products(x, rows, y, cols, acc, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr):
    """Like :func:`products` for rows too wide to keep, ``DB`` columns at a time."""
    for first in range(0, DP, DB):
        a, a_low = both_parts(x, rows, first, DP, DB, PARTS)
        b, b_low = both_parts(y, cols, first, DP, DB, PARTS)
        acc = products(a, a_low, b, b_low, acc, PARTS)
    return acc


@triton.jit
def tile(
    a, a_low, x, rows, inv_rows, y, cols, inv_y,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    COSINE: tl.constexpr,
):  # fmt: skip
    """Shortfalls of ``BM`` rows and ``BN`` columns, see :func:`shortfall`."""
    acc = tl.zeros((BM, BN), tl.float32)
    if DP == DB:
        b, b_low = both_parts(y, cols, 0, DP, DB, PARTS)
        acc = products(a, a_low, b, b_low, acc, PARTS)
    else:
        acc = wide_products(x, rows, y, cols, acc, DP, DB, PARTS)
    return shortfall(acc, inv_rows, inv_y, cols, PARTS, COSINE)


@triton.jit
def shortfall(acc, inv_rows, inv_y, cols, PARTS: tl.constexpr, COSINE: tl.constexpr):
    """``d = 1 - s`` from products of operands; of a cosine at least 0. NaN stays NaN, so that a loss of NaN
    embeddings is NaN."""
    if PARTS == 1:
        acc = acc * inv_rows[:, None] * tl.load(inv_y + cols)[None, :]
    d = 1 - acc
    if COSINE:
        d = tl.maximum(d, 0.0, tl.PropagateNan.ALL)
    return d


@triton.jit
def along(values, ACROSS: tl.constexpr):
    """Broadcast one value per row over a tile; ``ACROSS``: one value per column."""
    if ACROSS:  # noqa: SIM108
        values = values[None, :]
    else:
        values = values[:, None]
    return values


@triton.jit
def exact_pairs(a, c, row, col, inside, d, stride_a, stride_c, BR: tl.constexpr, DE: tl.constexpr):
    """``|a - c|² / 2`` of matching unit rows, ``(BR,)``; see :func:`weince.scores.pair_shortfall`."""
    total = tl.zeros((BR,), tl.float32)
    length_a = tl.zeros((BR,), tl.float32)
    length_c = tl.zeros((BR,), tl.float32)
    for first in range(0, d, DE):
        k = first + tl.arange(0, DE)
        mask = inside[:, None] & (k < d)[None, :]
        u = tl.load(a + row.to(tl.int64)[:, None] * stride_a + k[None, :], mask=mask, other=0.0)
        v = tl.load(c + col.to(tl.int64)[:, None] * stride_c + k[None, :], mask=mask, other=0.0)
        total += tl.sum((u - v) * (u - v), axis=1)
        length_a += tl.sum(u * u, axis=1)
        length_c += tl.sum(v * v, axis=1)
    # For a zero row ``|a - c|² / 2`` is half a unit less than ``1 - a.c``.
    zeros = tl.where(length_a > 0.5, 0.0, 1.0) + tl.where(length_c > 0.5, 0.0, 1.0)
    return tl.minimum((total + zeros) / 2, 2.0, tl.PropagateNan.ALL)


@triton.jit
def sharpen(d, cols, near_cols, near_d, rows, count, ACROSS: tl.constexpr, EXACT: tl.constexpr):
    """Put the exact shortfalls of each row's nearest candidates into a tile; ``ACROSS``: of each column's."""
    for k in tl.static_range(EXACT):
        if ACROSS:
            row = tl.load(near_cols + cols * EXACT + k, mask=cols < count, other=-1)
            value = tl.load(near_d + cols * EXACT + k, mask=cols < count, other=0.0)
            d = tl.where(rows[:, None] == row[None, :], value[None, :], d)
        else:
            col = tl.load(near_cols + rows * EXACT + k, mask=rows < count, other=-1)
            value = tl.load(near_d + rows * EXACT + k, mask=rows < count, other=0.0)
            d = tl.where(cols[None, :] == col[:, None], value[:, None], d)
    return d


@triton.jit
def positive_kernel(
    a, c, positive_ptr, apart, n_rows, d, stride_a, stride_c, BR: tl.constexpr, DE: tl.constexpr
):
    """Exact shortfall between every anchor and its one positive."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = rows < n_rows
    col = tl.load(positive_ptr + rows, mask=inside, other=0).to(tl.int32)
    tl.store(apart + rows, exact_pairs(a, c, rows, col, inside, d, stride_a, stride_c, BR, DE), mask=inside)


@triton.jit
def positive_gradient_kernel(
    a, c, positive_ptr, weights, by_a, by_c, n_rows, d, stride_a, stride_c,
    BR: tl.constexpr, DE: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Weighted gradient of those shortfalls: ``a - c`` for the anchor, ``c - a`` for the positive. No two anchors
    share a positive. ``SYMMETRIC``: an anchor is the positive of its positive, and all goes to ``by_a``."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = rows < n_rows
    col = tl.load(positive_ptr + rows, mask=inside, other=0).to(tl.int32)
    weight = tl.load(weights + rows, mask=inside, other=0.0)
    if SYMMETRIC:
        weight += tl.load(weights + col, mask=inside, other=0.0)
    for first in range(0, d, DE):
        k = first + tl.arange(0, DE)
        mask = inside[:, None] & (k < d)[None, :]
        u = tl.load(a + rows.to(tl.int64)[:, None] * stride_a + k[None, :], mask=mask, other=0.0)
        v = tl.load(c + col.to(tl.int64)[:, None] * stride_c + k[None, :], mask=mask, other=0.0)
        pull = (u - v) * weight[:, None]
        tl.store(by_a + rows.to(tl.int64)[:, None] * d + k[None, :], pull, mask=mask)
        if not SYMMETRIC:
            tl.store(by_c + col.to(tl.int64)[:, None] * d + k[None, :], -pull, mask=mask)
