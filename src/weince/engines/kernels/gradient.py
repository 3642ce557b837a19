# mypy: ignore-errors
# ruff: noqa: RUF005 - Triton does not support the suggested syntax
"""Gradient of the weighted sums by anchors and candidates, in a second pass over the tiles.

The derivative of a sum with weight ``w`` (its upstream gradient) by the score ``s = 1 - d`` of a pair is, with logits
``z`` and the value ``v`` of a log-sum-exp:

- ``"lse"``: ``w exp(z - v) dz/ds``
- ``"softplus"``: ``w sigmoid(z) dz/ds``
- ``"sum"``: ``w dz/ds``

The generated function ``PAIRS`` adds these up over the sums. With ``p_ij`` for the total of a pair, the gradient of
anchor ``i`` is ``sum_j p_ij c_j``, that of candidate ``j`` is ``sum_i p_ij a_i``.
"""

import triton
import triton.language as tl

from weince.engines.kernels.tiles import both_parts, products, sharpen, shortfall, wide_products


@triton.jit
def added(a, b):
    """Sums of matching entries of two tuples."""
    result = ()
    for k in tl.static_range(len(a)):
        result = result + (a[k] + b[k],)
    return result


@triton.jit
def gradient_kernel(
    x, inv_x, y, inv_y, anchor_columns, candidate_columns, numbers, ignore,
    near_cols, near_d, close_ptr, values, weights, gradient,
    n_rows, n_cols, begin, end, width,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr, COSINE: tl.constexpr,
    ANCHORS: tl.constexpr, CANDIDATES: tl.constexpr, REACH: tl.constexpr, TOUCHES: tl.constexpr, PAIRS: tl.constexpr,
    KEEP: tl.constexpr, NEAREST: tl.constexpr, FLAGS: tl.constexpr, FROM_ROWS: tl.constexpr, FROM_COLS: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Gradient of the rows of ``x``, ``(rows, width)``: tiles of derivatives by the scores, times ``y``, summed over
    columns ``begin`` to ``end``.

    ``values``, ``weights``: value and weight of every sum, for every anchor. ``FROM_ROWS``: the rows are anchors.
    ``FROM_COLS``: the columns are. Both are set if anchors and candidates are the same rows; then a tile serves each
    pair in both roles. ``ADD``: add to the gradient that is there.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * DB
    inv_rows = tl.load(inv_x + rows)
    a, a_low = both_parts(x, rows, 0, DP, DB, PARTS)
    close_rows = 0
    reach = (0,)
    row_anchor = (rows,)
    row_candidate = (rows,)
    if FROM_ROWS:
        row_anchor = ANCHORS(anchor_columns, numbers, values, weights, rows, n_rows)
        reach = REACH(row_anchor)
        if NEAREST > 0:
            close_rows = tl.load(close_ptr + tl.program_id(0) * BM // FLAGS)
            if BM > FLAGS:
                close_rows += tl.load(close_ptr + tl.program_id(0) * BM // FLAGS + 1)
    if FROM_COLS:
        row_candidate = CANDIDATES(candidate_columns, rows, n_rows)
    acc = tl.zeros((BM, DB), tl.float32)
    for start in range(begin, end, BN):
        cols = start + tl.arange(0, BN)
        score = tl.zeros((BM, BN), tl.float32)
        b, b_low = both_parts(y, cols, first, DP, DB, PARTS)
        if DP == DB:
            score = products(a, a_low, b, b_low, score, PARTS)
        else:
            score = wide_products(x, rows, y, cols, score, DP, DB, PARTS)
        d = shortfall(score, inv_rows, inv_y, cols, PARTS, COSINE)
        # A sum compares its threshold with shortfalls that are exact for the nearest of its own anchors alone.
        of_rows = d
        of_cols = d
        if NEAREST > 0 and FROM_ROWS:  # noqa: SIM102
            if close_rows > 0:
                d = sharpen(d, cols, near_cols, near_d, rows, n_rows, False, NEAREST)
                of_rows = d
        if NEAREST > 0 and FROM_COLS:  # noqa: SIM102
            if tl.load(close_ptr + start // FLAGS) > 0:
                d = sharpen(d, cols, near_cols, near_d, rows, n_cols, True, NEAREST)
                of_cols = sharpen(of_cols, cols, near_cols, near_d, rows, n_cols, True, NEAREST)
        if FROM_ROWS:
            candidate = CANDIDATES(candidate_columns, cols, n_cols)
            pulls = PAIRS(d, of_rows, row_anchor, rows, n_rows, candidate, cols, n_cols, ignore, False)
            if FROM_COLS:
                anchor = ANCHORS(anchor_columns, numbers, values, weights, cols, n_cols)
                more = PAIRS(d, of_cols, anchor, cols, n_cols, row_candidate, rows, n_rows, ignore, True)
                pulls = added(pulls, more)
            touched = TOUCHES(reach, start, n_cols, BN)
            pulls = KEEP(
                pulls, of_rows, row_anchor, rows, n_rows, candidate, cols, n_cols, ignore, touched, 0.0, False
            )
        else:
            anchor = ANCHORS(anchor_columns, numbers, values, weights, cols, n_cols)
            pulls = PAIRS(d, of_cols, anchor, cols, n_cols, row_candidate, rows, n_rows, ignore, True)
            pulls = KEEP(
                pulls, of_cols, anchor, cols, n_cols, row_candidate, rows, n_rows, ignore, True, 0.0, True
            )
        pulled = pulls[0]
        for k in tl.static_range(1, len(pulls)):
            pulled += pulls[k]
        if PARTS == 1:
            pulled = pulled * tl.load(inv_y + cols)[None, :]
        high = pulled.to(x.dtype.element_ty)
        acc = tl.dot(high, b, acc)
        if PARTS == 2:
            low = (pulled - high.to(tl.float32)).to(x.dtype.element_ty)
            acc = tl.dot(high, b_low, acc)
            acc = tl.dot(low, b, acc)
    k = first + tl.arange(0, DB)
    target = gradient + rows.to(tl.int64)[:, None] * width + k[None, :]
    fits = (rows < n_rows)[:, None] & (k < width)[None, :]
    if ADD:
        acc += tl.load(target, mask=fits, other=0.0)
    tl.store(target, acc, mask=fits)
