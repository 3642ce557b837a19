# mypy: ignore-errors
"""What all kernels share: operands, a tile of shortfalls, who is a negative, and the link.

Operands are rows in 16 bits, padded with zeros to ``DP`` columns and a multiple of 128 rows. 16-bit embeddings are
one part, and their products are exact; the inverse lengths are applied afterwards. Unit rows in float32 are two
parts, leading and trailing 8 bits, and a product of them is four products of parts: its error is about 1e-7. (Without
that of the trailing parts, scores of similar rows would be too small by up to 1e-6.)
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def on_grid(x):
    """Rounded to bfloat16, kept in float32: for the interpreter, which cannot multiply bfloat16."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def fast_log2(x):
    """Of a positive number, in one instruction: good to 22 bits. (``tl.log2`` is some thirty.)"""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def fast_exp2(x):
    """In one instruction; below 2^-126 it is 0."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def fast_inverse(x):
    """Of a positive number, in one instruction: good to 23 bits."""
    if INTERPRETED:
        y = 1 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def ones_in(x):
    """Number of ones among the bits."""
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
    """Place of every marked column among those of its row, from 1, and how many there are; ``BN`` is 32 or 64.

    A row's marks are the bits of one word or two, which takes a fraction of the work of a running sum.
    """
    col = tl.arange(0, BN)
    bit = (tl.full((BN,), 1, tl.int32) << (col & 31))[None, :]
    first = tl.sum(tl.where(marked & (col < 32)[None, :], bit, 0), axis=1)
    number = ones_in(first)
    # Shifted in two steps, the second by a constant of the register, since the first serves several columns.
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
    """Rows to operands, and the inverse length of each (1 for unit rows). ``GRID``: round by hand."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = row < rows
    column = tl.arange(0, WIDE)
    fits = (column < DP)[None, :]
    where = row.to(tl.int64)[:, None]
    mask = inside[:, None] & (column < d)[None, :]
    x = tl.load(source + where * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    target = out + where * (PARTS * DP) + column[None, :]
    if PARTS == 1:
        # Scaled by a power of two, which is exact, so that no square leaves the range.
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
def products(a, a_low, b, b_low, acc, PARTS: tl.constexpr):
    """``a @ b.T`` added to ``acc``; small products first where there are two parts."""
    if PARTS == 2:
        acc = tl.dot(a_low, tl.trans(b_low), acc)
        acc = tl.dot(a_low, tl.trans(b), acc)
        acc = tl.dot(a, tl.trans(b_low), acc)
    return tl.dot(a, tl.trans(b), acc)


@triton.jit
def wide_products(x, rows, y, cols, acc, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr):
    """The same for rows too wide to keep, ``DB`` columns at a time."""
    for first in range(0, DP, DB):
        a = part(x, rows, first, PARTS * DP, DB)
        b = part(y, cols, first, PARTS * DP, DB)
        if PARTS == 2:
            a_low = part(x, rows, first + DP, PARTS * DP, DB)
            b_low = part(y, cols, first + DP, PARTS * DP, DB)
            acc = tl.dot(a_low, tl.trans(b_low), acc)
            acc = tl.dot(a_low, tl.trans(b), acc)
            acc = tl.dot(a, tl.trans(b_low), acc)
        acc = tl.dot(a, tl.trans(b), acc)
    return acc


@triton.jit
def tile(
    a, a_low, x, rows, inv_rows, y, cols, inv_y,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Shortfalls of ``BM`` rows and ``BN`` columns."""
    acc = tl.zeros((BM, BN), tl.float32)
    if DP == DB:
        b = part(y, cols, 0, PARTS * DP, DB)
        b_low = b
        if PARTS == 2:
            b_low = part(y, cols, DP, PARTS * DP, DB)
        acc = products(a, a_low, b, b_low, acc, PARTS)
    else:
        acc = wide_products(x, rows, y, cols, acc, DP, DB, PARTS)
    return shortfall(acc, inv_rows, inv_y, cols, PARTS)


@triton.jit
def shortfall(acc, inv_rows, inv_y, cols, PARTS: tl.constexpr):
    if PARTS == 1:
        acc = acc * inv_rows[:, None] * tl.load(inv_y + cols)[None, :]
    return tl.maximum(1 - acc, 0.0)


@triton.jit
def negatives(
    rows, cols, positive, itself, own_id, ids, count, HAS_SELF: tl.constexpr, HAS_IDS: tl.constexpr
):
    """Mask of the pairs that are an anchor and one of its negatives."""
    keep = (cols[None, :] != positive[:, None]) & (cols < count)[None, :]
    if HAS_SELF:
        keep = keep & (cols[None, :] != itself[:, None])
    if HAS_IDS:
        keep = keep & (own_id[:, None] != tl.load(ids + cols, mask=cols < count, other=0)[None, :])
    return keep


@triton.jit
def gap(d, offset, lowest):
    """What the logarithm of the link is taken of."""
    return offset + tl.maximum(d, lowest)


@triton.jit
def logit(d, g, w, offset, lowest, SOFT: tl.constexpr):
    """The link in bits: ``g * (1 - d) - w * log2(gap)``, with ``g`` already times log2(e)."""
    result = g * (1 - d)
    if not SOFT:
        result = result - w * tl.log2(gap(d, offset, lowest))
    return result


@triton.jit
def touches(start, own_first, own_last, same_first, same_last, count, BN: tl.constexpr):
    """Whether a tile of columns may hold something else than negatives."""
    positives = (start <= own_last) & (start + BN > own_first)
    selves = (start <= same_last) & (start + BN > same_first)
    return positives | selves | (start + BN > count)


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
    # A zero row falls half a unit short of the identity.
    zeros = tl.where(length_a > 0.5, 0.0, 1.0) + tl.where(length_c > 0.5, 0.0, 1.0)
    return (total + zeros) / 2


@triton.jit
def sharpen(d, cols, near_cols, near_d, rows, count, ACROSS: tl.constexpr, EXACT: tl.constexpr):
    """Put the exact shortfalls of each row's nearest negatives into a tile; ``ACROSS``: of each column's."""
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
