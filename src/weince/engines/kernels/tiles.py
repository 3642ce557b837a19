# mypy: ignore-errors
"""What all kernels share: operands, a tile of shortfalls, and the roles of its pairs.

Operands are rows in 16 bits, padded with zeros to ``DP`` columns and a multiple of 128 rows. bfloat16 embeddings have
one part, and their products are exact; the inverse lengths are applied afterwards. Unit rows in float32 have two
parts, leading and trailing 8 bits, and their product is four products of parts, with an error of about 1e-7. (Without
the product of the trailing parts, scores of similar rows would be too small by up to 1e-6.)

Kernels take arguments in these groups, in this order:

- operands: ``x, inv_x`` of the rows of a tile, ``y, inv_y`` of its columns
- roles: ``positive_ptr, self_ptr`` (columns, int64), ``id_a, id_c, label_a, label_c`` of anchors and candidates
  (int64), ``view_a, view_c`` if a kernel needs them, ``ignore_ptr`` (bool); any pointer if its bit of ``ROLES`` is 0
- what the kernel reads, what it writes
- sizes: ``n_rows, n_cols`` of the matrix, spans, ``stride_a, stride_c`` of ``ignore``
- compile-time: tile (``BM, BN``), operands (``DP, DB, PARTS``), ``ROLES``, then the kernel's own constants
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Bits of ``ROLES``: what determines the roles of pairs.
POSITIVE = tl.constexpr(1)
SELF = tl.constexpr(2)
IDS = tl.constexpr(4)
LABELS = tl.constexpr(8)
IGNORE = tl.constexpr(16)
BY_VALUE = tl.constexpr(4 + 8 + 16)  # with any of these, pairs that are not negatives can be in any column


@triton.jit
def on_grid(x):
    """Round to bfloat16 but keep float32: for the interpreter, which cannot multiply bfloat16."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def fast_log2(x):
    """Base-2 logarithm of a positive number in one instruction, accurate to 22 bits. (``tl.log2`` takes thirty.)"""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def fast_exp2(x):
    """``2^x`` in one instruction; a result below 2^-126 becomes 0."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def fast_inverse(x):
    """Inverse of a positive number in one instruction, accurate to 23 bits."""
    if INTERPRETED:
        y = 1 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


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
):  # fmt: skip
    """Shortfalls of ``BM`` rows and ``BN`` columns, see :func:`shortfall`."""
    acc = tl.zeros((BM, BN), tl.float32)
    if DP == DB:
        b, b_low = both_parts(y, cols, 0, DP, DB, PARTS)
        acc = products(a, a_low, b, b_low, acc, PARTS)
    else:
        acc = wide_products(x, rows, y, cols, acc, DP, DB, PARTS)
    return shortfall(acc, inv_rows, inv_y, cols, PARTS)


@triton.jit
def shortfall(acc, inv_rows, inv_y, cols, PARTS: tl.constexpr):
    """Shortfalls from products of operands. Rounding may make them negative; see :func:`at_least_0`."""
    if PARTS == 1:
        acc = acc * inv_rows[:, None] * tl.load(inv_y + cols)[None, :]
    return 1 - acc


@triton.jit
def at_least_0(d):
    """Shortfalls without the negative ones. NaN stays NaN, so that a loss of NaN embeddings is NaN."""
    return tl.maximum(d, 0.0, tl.PropagateNan.ALL)


@triton.jit
def along(values, ACROSS: tl.constexpr):
    """Broadcast one value per row over a tile; ``ACROSS``: one value per column."""
    if ACROSS:  # noqa: SIM108
        values = values[None, :]
    else:
        values = values[:, None]
    return values


@triton.jit
def anchor_roles(at, n_anchors, positive_ptr, self_ptr, id_ptr, label_ptr, ROLES: tl.constexpr):
    """Roles of some anchors: column of the positive, column of the anchor itself, id, label; -1 if not given."""
    inside = at < n_anchors
    positive = tl.zeros_like(at) - 1
    itself = positive
    id_ = positive
    label = positive
    if POSITIVE & ROLES:
        positive = tl.load(positive_ptr + at, mask=inside, other=-1).to(tl.int32)
    if SELF & ROLES:
        itself = tl.load(self_ptr + at, mask=inside, other=-1).to(tl.int32)
    if IDS & ROLES:
        id_ = tl.load(id_ptr + at, mask=inside, other=0)
    if LABELS & ROLES:
        label = tl.load(label_ptr + at, mask=inside, other=0)
    return positive, itself, id_, label


@triton.jit
def pair_roles(
    anchors, candidates, roles, id_ptr, label_ptr, ignore_ptr, n_anchors, n_candidates, stride_a, stride_c,
    ROLES: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Masks of a tile: which pairs are an anchor and a negative, and which are an anchor and a positive by label.

    ``roles``: result of :func:`anchor_roles`. ``id_ptr``, ``label_ptr``: those of the candidates. ``ACROSS``: the
    anchors are the columns of the tile, not its rows.
    """
    there = candidates < n_candidates
    inside = along(anchors < n_anchors, ACROSS) & along(there, not ACROSS)
    is_negative = inside
    is_positive = inside
    column = along(candidates, not ACROSS)
    if SELF & ROLES:
        is_other = column != along(roles[1], ACROSS)
        is_negative = is_negative & is_other
        is_positive = is_positive & is_other
    if POSITIVE & ROLES:
        is_negative = is_negative & (column != along(roles[0], ACROSS))
    if IDS & ROLES:
        their_id = tl.load(id_ptr + candidates, mask=there, other=0)
        is_negative = is_negative & (along(roles[2], ACROSS) != along(their_id, not ACROSS))
    if LABELS & ROLES:
        their_label = tl.load(label_ptr + candidates, mask=there, other=0)
        has_label = along(roles[3], ACROSS) == along(their_label, not ACROSS)
        is_negative = is_negative & (has_label == 0)
        is_positive = is_positive & has_label
    if IGNORE & ROLES:
        place = along(anchors.to(tl.int64) * stride_a, ACROSS) + along(
            candidates.to(tl.int64) * stride_c, not ACROSS
        )
        is_negative = is_negative & (tl.load(ignore_ptr + place, mask=inside, other=1).to(tl.int32) == 0)
    return is_negative, is_positive


@triton.jit
def view_of(view_ptr, at, count):
    return tl.load(view_ptr + at, mask=at < count, other=0).to(tl.int32)


@triton.jit
def gap(d, offset, lowest):
    """Argument of the logarithm of a link."""
    return offset + tl.maximum(d, lowest)


@triton.jit
def span_of(roles):
    """First and last column of some anchors' positives, and of the anchors themselves."""
    return tl.min(roles[0]), tl.max(roles[0]), tl.min(roles[1]), tl.max(roles[1])


@triton.jit
def touches(start, span, n_cols, BN: tl.constexpr):
    """Whether a tile of columns may contain pairs that are not negatives, if roles depend on columns alone."""
    positives = (start <= span[1]) & (start + BN > span[0])
    selves = (start <= span[3]) & (start + BN > span[2])
    return positives | selves | (start + BN > n_cols)


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
