# mypy: ignore-errors
# ruff: noqa: RUF005 - Triton does not support the suggested syntax
"""Gradient of the sums by anchors and candidates, in a second pass over the tiles; ``logits.py`` defines the sums."""

import triton
import triton.language as tl

from weince.engines.kernels.logits import (
    BY_FUNCTION,
    KIND,
    LSE,
    OF_POSITIVES,
    SAME_VIEW,
    SUM,
    USES_V,
    USES_W,
    by_function,
    constant_of,
    link_of,
    logits,
)
from weince.engines.kernels.tiles import (
    BY_VALUE,
    IGNORE,
    LN2,
    LOG2E,
    along,
    anchor_roles,
    at_least_0,
    both_parts,
    fast_exp2,
    fast_inverse,
    fast_log2,
    gap,
    pair_roles,
    products,
    sharpen,
    shortfall,
    span_of,
    touches,
    view_of,
    wide_products,
)


@triton.jit
def worth_of(link, values, weights, row, at, n_anchors, ONE: tl.constexpr):
    """For some anchors: the constant of the logits, less the value of a log-sum-exp; and ``g, w, v`` times the
    weight of the sum. If a function computes the logits, ``g`` counts as 1."""
    inside = at < n_anchors
    worth = tl.load(weights + row * n_anchors + at, mask=inside, other=0.0)
    constant = constant_of(link, ONE)
    if KIND & ONE == LSE:
        value = tl.load(values + row * n_anchors + at, mask=inside, other=0.0)
        # An anchor without candidates in the sum (-inf) gets weights of 0, whatever its logits are.
        constant -= tl.where(value != float("-inf"), value, float("inf")) * LOG2E
    by_score = link[0] * LN2 * worth
    if BY_FUNCTION & ONE:
        by_score = worth
    return constant, by_score, link[2] * worth, link[3] * worth


@triton.jit
def pull_of(
    link, worth, d, log_gap, log_rest, inv_gap, inv_rest, is_view, compared,
    ONE: tl.constexpr, FUNCTION: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Derivatives of a weighted sum by the scores of a tile. The caller masks pairs by role. ``compared``: the
    shortfalls that the sum compared with its threshold."""
    slope = along(worth[1], ACROSS)
    z = d
    if BY_FUNCTION & ONE:
        z, steepness, _ = by_function(worth[0], link, d, FUNCTION, ACROSS)
        slope = slope * steepness
    else:
        if USES_W & ONE:
            slope += along(worth[2], ACROSS) * inv_gap
        if USES_V & ONE:
            slope += along(worth[3], ACROSS) * inv_rest
    pull = tl.zeros_like(d) + slope
    if KIND & ONE != SUM:
        if not BY_FUNCTION & ONE:
            z = logits(worth[0], link, d, log_gap, log_rest, ONE, ACROSS)
        if KIND & ONE == LSE:
            pull = fast_exp2(z) * slope
        else:
            odds = fast_exp2(-tl.abs(z))
            pull = tl.where(z < 0, odds, 1.0) * fast_inverse(1 + odds) * slope
    if SAME_VIEW & ONE:
        pull = tl.where(is_view, pull, 0.0)
    if ONE >> 12 > 0:
        pull = tl.where(compared > along(link[4], ACROSS), 0.0, pull)
    return pull


@triton.jit
def gradient_kernel(
    x, inv_x, y, inv_y,
    positive_ptr, self_ptr, id_a, id_c, label_a, label_c, view_a, view_c, ignore_ptr,
    near_cols, near_d, close_ptr, coefs, thresholds, values, weights, gradient,
    n_rows, n_cols, begin, end, width, stride_a, stride_c, offset, lowest, floor,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr, ROLES: tl.constexpr,
    SPEC: tl.constexpr, ANY: tl.constexpr, SUMS: tl.constexpr, FORM: tl.constexpr, EACH: tl.constexpr,
    FUNCTION: tl.constexpr, NEAREST: tl.constexpr, FLAGS: tl.constexpr, FROM_ROWS: tl.constexpr,
    FROM_COLS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Gradient of the rows of ``x``, ``(rows, width)``: tiles of derivatives by the scores, times ``y``, summed over
    columns ``begin`` to ``end``.

    ``values``, ``weights``: value and weight of every sum, for every anchor. ``FROM_ROWS``: the rows are anchors.
    ``FROM_COLS``: the columns are. Both are set if anchors and candidates are the same rows; then a tile serves each
    pair in both roles. Rows and columns beyond the last need no mask: their operands or their weights are 0. ``ADD``:
    add to the gradient that is there.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * DB
    inv_rows = tl.load(inv_x + rows)
    a, a_low = both_parts(x, rows, 0, DP, DB, PARTS)
    roles = (rows, rows, rows, rows)
    close_rows = 0
    links = ()
    worths = ()
    view = rows
    if SAME_VIEW & ANY:  # if rows have both roles, view_a and view_c are equal
        view = view_of(view_a if FROM_ROWS else view_c, rows, n_rows)
    if FROM_ROWS:
        roles = anchor_roles(rows, n_rows, positive_ptr, self_ptr, id_a, label_a, ROLES)
        if NEAREST > 0:
            close_rows = tl.load(close_ptr + tl.program_id(0) * BM // FLAGS)
            if BM > FLAGS:
                close_rows += tl.load(close_ptr + tl.program_id(0) * BM // FLAGS + 1)
        for k in tl.static_range(SUMS):
            row_link = link_of(coefs, thresholds, k * FORM, rows, n_rows, (SPEC >> (16 * k)) & 0xFFFF, EACH)
            links = links + (row_link,)
            worths = worths + (
                worth_of(row_link, values, weights, k, rows, n_rows, (SPEC >> (16 * k)) & 0xFFFF),
            )
    reach = span_of(roles)
    acc = tl.zeros((BM, DB), tl.float32)
    for start in range(begin, end, BN):
        cols = start + tl.arange(0, BN)
        score = tl.zeros((BM, BN), tl.float32)
        b, b_low = both_parts(y, cols, first, DP, DB, PARTS)
        if DP == DB:
            score = products(a, a_low, b, b_low, score, PARTS)
        else:
            score = wide_products(x, rows, y, cols, score, DP, DB, PARTS)
        d = at_least_0(shortfall(score, inv_rows, inv_y, cols, PARTS))
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
        log_gap = d
        inv_gap = d
        if USES_W & ANY:
            wide = gap(d, offset, lowest)
            log_gap = fast_log2(wide)
            inv_gap = tl.where(d > lowest, fast_inverse(wide), 0.0)
        log_rest = d
        inv_rest = d
        if USES_V & ANY:
            rest = tl.maximum(2 - d, floor)
            log_rest = fast_log2(rest)
            inv_rest = tl.where(2 - d > floor, fast_inverse(rest), 0.0)
        is_view = True
        if SAME_VIEW & ANY:
            is_view = view[:, None] == view_of(view_c if FROM_ROWS else view_a, cols, n_cols)[None, :]
        pulled = tl.zeros((BM, BN), tl.float32)
        pulled_positives = tl.zeros((BM, BN), tl.float32)
        if FROM_ROWS:
            for k in tl.static_range(SUMS):
                pull = pull_of(
                    links[k], worths[k], d, log_gap, log_rest, inv_gap, inv_rest, is_view, of_rows,
                    (SPEC >> (16 * k)) & 0xFFFF, FUNCTION, False,
                )  # fmt: skip
                if OF_POSITIVES & (SPEC >> (16 * k)):
                    pulled_positives += pull
                else:
                    pulled += pull
            if IGNORE & ROLES:  # the only role that may change when anchor and candidate are swapped
                is_negative, _ = pair_roles(
                    rows,
                    cols,
                    roles,
                    id_c,
                    label_c,
                    ignore_ptr,
                    n_rows,
                    n_cols,
                    stride_a,
                    stride_c,
                    ROLES,
                    False,
                )
                pulled = tl.where(is_negative, pulled, 0.0)
        if FROM_COLS:
            more = tl.zeros((BM, BN), tl.float32)
            for k in tl.static_range(SUMS):
                link = link_of(coefs, thresholds, k * FORM, cols, n_cols, (SPEC >> (16 * k)) & 0xFFFF, EACH)
                pull = pull_of(
                    link, worth_of(link, values, weights, k, cols, n_cols, (SPEC >> (16 * k)) & 0xFFFF),
                    d, log_gap, log_rest, inv_gap, inv_rest, is_view, of_cols,
                    (SPEC >> (16 * k)) & 0xFFFF, FUNCTION, True,
                )  # fmt: skip
                if OF_POSITIVES & (SPEC >> (16 * k)):
                    pulled_positives += pull
                else:
                    more += pull
            if IGNORE & ROLES or not FROM_ROWS:
                col_roles = anchor_roles(cols, n_cols, positive_ptr, self_ptr, id_a, label_a, ROLES)
                is_negative, is_positive = pair_roles(
                    cols,
                    rows,
                    col_roles,
                    id_c,
                    label_c,
                    ignore_ptr,
                    n_cols,
                    n_rows,
                    stride_a,
                    stride_c,
                    ROLES,
                    True,
                )
                more = tl.where(is_negative, more, 0.0)
                if OF_POSITIVES & ANY and not FROM_ROWS:
                    pulled_positives = tl.where(is_positive, pulled_positives, 0.0)
            pulled += more
        if FROM_ROWS:
            touched = True
            if (BY_VALUE & ROLES) == 0:
                touched = touches(start, reach, end, BN)
            if touched:
                is_negative, is_positive = pair_roles(
                    rows,
                    cols,
                    roles,
                    id_c,
                    label_c,
                    id_c,
                    n_rows,
                    n_cols,
                    stride_a,
                    stride_c,
                    ROLES & 15,
                    False,
                )
                pulled = tl.where(is_negative, pulled, 0.0)
                if OF_POSITIVES & ANY:
                    pulled_positives = tl.where(is_positive, pulled_positives, 0.0)
        if OF_POSITIVES & ANY:
            pulled += pulled_positives
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
