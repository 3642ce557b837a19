# mypy: ignore-errors
"""The loss of every anchor by a log-sum-exp over tiles, and its gradient by computing the tiles again."""

import triton
import triton.language as tl

from weince.engines.kernels.tiles import (
    LN2,
    LOG2E,
    exact_pairs,
    fast_exp2,
    fast_inverse,
    fast_log2,
    gap,
    logit,
    negatives,
    part,
    products,
    sharpen,
    shortfall,
    tile,
    touches,
    wide_products,
)


@triton.jit
def sum_rows(
    x, y, inv_y, id_c, near_cols, near_d, rows, inv_rows, own, same, own_id, gi, wi, anchors, count, begin, end,
    offset, lowest,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    HAS_SELF: tl.constexpr, HAS_IDS: tl.constexpr, SOFT: tl.constexpr, KNOWN: tl.constexpr,
    LEARN: tl.constexpr, EXACT: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of the negatives of some rows over some columns: largest exponent, and sum relative to it.

    ``KNOWN``: the nearest negatives are known, so the largest logit is. ``LEARN``: also the weighted sums of
    scores and of logarithms, for the gradient of the link's coefficients.
    """
    inside = rows < anchors
    a = part(x, rows, 0, PARTS * DP, DB)
    a_low = a
    if PARTS == 2:
        a_low = part(x, rows, DP, PARTS * DP, DB)
    # Without known negatives start from the logit of score -1, the least there is, and rise with what comes.
    top = logit(tl.full((BM,), 2.0, tl.float32), gi, wi, offset, lowest, SOFT)
    close = False
    if KNOWN:
        nearest = tl.load(near_d + rows * EXACT, mask=inside, other=1.0)
        for k in tl.static_range(1, EXACT):
            nearest = tl.minimum(nearest, tl.load(near_d + rows * EXACT + k, mask=inside, other=1.0))
        top = tl.where(nearest <= 2, logit(tl.minimum(nearest, 2.0), gi, wi, offset, lowest, SOFT), 0.0)
        close = tl.min(nearest) < NEAR
    sum_e = tl.zeros((BM,), tl.float32)
    sum_s = tl.zeros((BM,), tl.float32)
    sum_l = tl.zeros((BM,), tl.float32)
    own_first, own_last, same_first, same_last = tl.min(own), tl.max(own), tl.min(same), tl.max(same)
    for start in range(begin, end, BN):
        cols = start + tl.arange(0, BN)
        d = tile(a, a_low, x, rows, inv_rows, y, cols, inv_y, BM, BN, DP, DB, PARTS)
        if KNOWN:  # noqa: SIM102 - known when compiled, and when run
            if close:
                d = sharpen(d, cols, near_cols, near_d, rows, anchors, False, EXACT)
        z = (gi - top)[:, None] - gi[:, None] * d
        logarithm = d
        if not SOFT:
            logarithm = fast_log2(gap(d, offset, lowest))
            z -= wi[:, None] * logarithm
        if HAS_IDS or touches(start, own_first, own_last, same_first, same_last, count, BN):
            keep = negatives(rows, cols, own, same, own_id, id_c, count, HAS_SELF, HAS_IDS)
            z = tl.where(keep, z, float("-inf"))
        if not KNOWN:
            rise = tl.maximum(tl.max(z, axis=1), 0.0)
            shrink = tl.exp2(-rise)
            sum_e, sum_s, sum_l, top = sum_e * shrink, sum_s * shrink, sum_l * shrink, top + rise
            z -= rise[:, None]
        e = fast_exp2(z)
        sum_e += tl.sum(e, axis=1)
        if LEARN:
            sum_s += tl.sum(e * (1 - d), axis=1)
            if not SOFT:
                sum_l += tl.sum(e * logarithm, axis=1)
    return top, sum_e, sum_s, sum_l


@triton.jit
def sum_kernel(
    x, inv_x, y, inv_y, g, w, positive, itself, id_a, id_c, near_cols, near_d,
    largest, total, scores, logs, anchors, count, span, offset, lowest,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    HAS_SELF: tl.constexpr, HAS_IDS: tl.constexpr, SOFT: tl.constexpr, KNOWN: tl.constexpr,
    LEARN: tl.constexpr, EXACT: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """:func:`sum_rows` over ``span`` columns for each program of the second dimension."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < anchors
    own = tl.load(positive + rows, mask=inside, other=-1).to(tl.int32)
    same = own
    if HAS_SELF:
        same = tl.load(itself + rows, mask=inside, other=-1).to(tl.int32)
    own_id = own.to(tl.int64)
    if HAS_IDS:
        own_id = tl.load(id_a + rows, mask=inside, other=0)
    gi = tl.load(g + rows, mask=inside, other=0.0) * LOG2E
    wi = gi
    if not SOFT:
        wi = tl.load(w + rows, mask=inside, other=0.0)
    begin = tl.program_id(1) * span
    top, sum_e, sum_s, sum_l = sum_rows(
        x, y, inv_y, id_c, near_cols, near_d, rows, tl.load(inv_x + rows), own, same, own_id, gi, wi,
        anchors, count, begin, tl.minimum(begin + span, count), offset, lowest,
        BM, BN, DP, DB, PARTS, HAS_SELF, HAS_IDS, SOFT, KNOWN, LEARN, EXACT, NEAR,
    )  # fmt: skip
    at = tl.program_id(1) * anchors + rows
    tl.store(largest + at, top, mask=inside)
    tl.store(total + at, sum_e, mask=inside)
    if LEARN:
        tl.store(scores + at, sum_s, mask=inside)
        tl.store(logs + at, sum_l, mask=inside)


@triton.jit
def log1p(u):
    """Of ``0 <= u <= 1``, with all digits of a small one."""
    one_more = 1 + u
    return tl.where(one_more == 1, u, tl.log(one_more) * (u / tl.where(one_more == 1, 1.0, one_more - 1)))


@triton.jit
def settle(top, sum_e, near, gi, wi, offset, lowest, SOFT: tl.constexpr):
    """Log-sum-exp of the negatives and shortfall of the positive to the loss, to ``base`` (logit of a shortfall of 0
    under a softmax, less the log-sum-exp with the positive, in bits), to ``pull`` (derivative of the loss by the
    positive's score) and to the share of the negatives."""
    ours = logit(near, gi, wi, offset, lowest, SOFT)
    behind = (top + tl.log2(sum_e) - ours) * LN2
    odds = tl.exp(-tl.abs(behind))
    value = tl.maximum(behind, 0.0) + log1p(odds)
    risk = tl.where(behind < 0, odds, 1.0) / (1 + odds)
    slope = gi * LN2
    if not SOFT:
        slope += wi * tl.where(near >= lowest, 1 / gap(near, offset, lowest), 0.0)
    return value, gi - (ours + value * LOG2E), -risk * slope, risk


@triton.jit
def finish_kernel(
    a, c, positive, g, w, largest, total, scores, logs, loss, base, pull, effect_g, effect_w,
    anchors, splits, d, stride_a, stride_c, offset, lowest,
    BR: tl.constexpr, DE: tl.constexpr, SOFT: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """Parts of the log-sum-exp to what :func:`settle` makes of them, and to the derivatives by the coefficients."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = rows < anchors
    top = tl.full((BR,), -1e30, tl.float32)
    sum_e = tl.zeros((BR,), tl.float32)
    sum_s = tl.zeros((BR,), tl.float32)
    sum_l = tl.zeros((BR,), tl.float32)
    for split in range(splits):
        at = split * anchors + rows
        here = tl.load(largest + at, mask=inside, other=0.0)
        higher = tl.maximum(top, here)
        old, new = tl.exp2(top - higher), tl.exp2(here - higher)
        sum_e = sum_e * old + tl.load(total + at, mask=inside, other=1.0) * new
        if LEARN:
            sum_s = sum_s * old + tl.load(scores + at, mask=inside, other=0.0) * new
            sum_l = sum_l * old + tl.load(logs + at, mask=inside, other=0.0) * new
        top = higher
    gi = tl.load(g + rows, mask=inside, other=0.0) * LOG2E
    wi = gi
    if not SOFT:
        wi = tl.load(w + rows, mask=inside, other=0.0)
    column = tl.load(positive + rows, mask=inside, other=0).to(tl.int32)
    near = exact_pairs(a, c, rows, column, inside, d, stride_a, stride_c, BR, DE)
    value, base_now, pull_now, risk = settle(top, sum_e, near, gi, wi, offset, lowest, SOFT)
    tl.store(loss + rows, value, mask=inside)
    tl.store(base + rows, base_now, mask=inside)
    tl.store(pull + rows, pull_now, mask=inside)
    if LEARN:
        share = risk / tl.maximum(sum_e, 1e-37)
        tl.store(effect_g + rows, sum_s * share - risk * (1 - near), mask=inside)
        log_near = risk * tl.log2(gap(near, offset, lowest))
        tl.store(effect_w + rows, (log_near - sum_l * share) * LN2, mask=inside)


@triton.jit
def pulls(d, base, g, w, factor, gap_log, gap_inverse, SOFT: tl.constexpr, SAME: tl.constexpr):
    """Derivatives of the losses by the scores of negatives; the anchors' numbers broadcast along rows or columns."""
    z = base - (g * LOG2E) * d
    slope = g
    if not SOFT:
        z -= w * gap_log
        slope = g + w * gap_inverse
    if not SAME:
        slope = slope * factor
    return fast_exp2(z) * slope


@triton.jit
def numbers(g, w, base, out, at, count, SOFT: tl.constexpr, SAME: tl.constexpr):
    """What :func:`pulls` wants of some anchors, 0 beyond the last. ``SAME``: all losses have one gradient."""
    inside = at < count
    gi = tl.load(g + at, mask=inside, other=0.0)
    wi = gi
    if not SOFT:
        wi = tl.load(w + at, mask=inside, other=0.0)
    factor = gi
    if not SAME:
        factor = tl.load(out + at, mask=inside, other=0.0)
    return tl.load(base + at, mask=inside, other=0.0), gi, wi, factor


@triton.jit
def pull_of(pull, out, at, count, SAME: tl.constexpr):
    """Derivatives of some anchors' losses by their positive's score."""
    value = tl.load(pull + at, mask=at < count, other=0.0)
    if not SAME:
        value = value * tl.load(out + at, mask=at < count, other=0.0)
    return value


@triton.jit
def gradient_rows(
    x, y, inv_y, g, w, base, pull, out, positive, itself, id_y, near_cols, near_d, close,
    rows, inv_rows, own, same, row_id, close_rows, first, rows_count, count, begin, end, offset, lowest,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    HAS_SELF: tl.constexpr, HAS_IDS: tl.constexpr, SOFT: tl.constexpr, KNOWN: tl.constexpr,
    FROM_ROWS: tl.constexpr, FROM_COLS: tl.constexpr, EXACT: tl.constexpr, FLAGS: tl.constexpr,
    SAME: tl.constexpr,
):  # fmt: skip
    """Gradient of some rows of ``x``: tiles of the derivative by scores, times ``y``.

    ``FROM_ROWS``: the rows are anchors. ``FROM_COLS``: the columns are. Both where all rows meet all rows: a tile
    then serves the pair in both roles, and a row's positive has it as its own. Rows and columns beyond the last need
    no mask: their operands or their numbers are 0. ``SAME``: all losses have one gradient, by which the caller
    multiplies.
    """
    a = part(x, rows, 0, PARTS * DP, DB)
    a_low = a
    if PARTS == 2:
        a_low = part(x, rows, DP, PARTS * DP, DB)
    if FROM_ROWS:
        base_i, g_i, w_i, factor_i = numbers(g, w, base, out, rows, rows_count, SOFT, SAME)
    own_first, own_last, same_first, same_last = tl.min(own), tl.max(own), tl.min(same), tl.max(same)
    acc = tl.zeros((BM, DB), tl.float32)
    for start in range(begin, end, BN):
        cols = start + tl.arange(0, BN)
        score = tl.zeros((BM, BN), tl.float32)
        b = part(y, cols, first, PARTS * DP, DB)
        b_low = b
        if PARTS == 2:
            b_low = part(y, cols, first + DP, PARTS * DP, DB)
        if DP == DB:
            score = products(a, a_low, b, b_low, score, PARTS)
        else:
            score = wide_products(x, rows, y, cols, score, DP, DB, PARTS)
        dist = shortfall(score, inv_rows, inv_y, cols, PARTS)
        if KNOWN and FROM_ROWS:  # noqa: SIM102
            if close_rows > 0:
                dist = sharpen(dist, cols, near_cols, near_d, rows, rows_count, False, EXACT)
        if KNOWN and FROM_COLS:  # noqa: SIM102
            if tl.load(close + start // FLAGS) > 0:
                dist = sharpen(dist, cols, near_cols, near_d, rows, count, True, EXACT)
        gap_log = dist
        gap_inverse = dist
        if not SOFT:
            wide = gap(dist, offset, lowest)
            gap_log = fast_log2(wide)
            gap_inverse = tl.where(dist >= lowest, fast_inverse(wide), 0.0)
        pulled = tl.zeros((BM, BN), tl.float32)
        if FROM_ROWS:
            pulled += pulls(
                dist, base_i[:, None], g_i[:, None], w_i[:, None], factor_i[:, None], gap_log, gap_inverse,
                SOFT, SAME,
            )  # fmt: skip
        if FROM_COLS:
            base_j, g_j, w_j, factor_j = numbers(g, w, base, out, cols, count, SOFT, SAME)
            pulled += pulls(
                dist, base_j[None, :], g_j[None, :], w_j[None, :], factor_j[None, :], gap_log, gap_inverse,
                SOFT, SAME,
            )  # fmt: skip
        if HAS_IDS:
            kin = row_id[:, None] == tl.load(id_y + cols, mask=cols < count, other=0)[None, :]
            pulled = tl.where(kin, 0.0, pulled)
        if FROM_ROWS:
            if touches(start, own_first, own_last, same_first, same_last, start + BN, BN):
                if HAS_SELF:
                    pulled = tl.where(cols[None, :] == same[:, None], 0.0, pulled)
                mine = tl.zeros((BM, BN), tl.float32) + pull_of(pull, out, rows, rows_count, SAME)[:, None]
                if FROM_COLS:
                    mine += pull_of(pull, out, cols, count, SAME)[None, :]
                pulled = tl.where(cols[None, :] == own[:, None], mine, pulled)
        else:
            theirs = tl.load(positive + cols, mask=cols < count, other=-1).to(tl.int32)
            if HAS_SELF:
                selves = tl.load(itself + cols, mask=cols < count, other=-1).to(tl.int32)
                pulled = tl.where(rows[:, None] == selves[None, :], 0.0, pulled)
            mine = tl.zeros((BM, BN), tl.float32) + pull_of(pull, out, cols, count, SAME)[None, :]
            pulled = tl.where(rows[:, None] == theirs[None, :], mine, pulled)
        if PARTS == 1:
            pulled = pulled * tl.load(inv_y + cols)[None, :]
        high = pulled.to(x.dtype.element_ty)
        acc = tl.dot(high, b, acc)
        if PARTS == 2:
            low = (pulled - high.to(tl.float32)).to(x.dtype.element_ty)
            acc = tl.dot(high, b_low, acc)
            acc = tl.dot(low, b, acc)
    return acc


@triton.jit
def gradient_kernel(
    x, inv_x, y, inv_y, g, w, base, pull, out, positive, itself, id_x, id_y, near_cols, near_d, close, gradient,
    rows_count, count, begin, end, d, offset, lowest,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    HAS_SELF: tl.constexpr, HAS_IDS: tl.constexpr, SOFT: tl.constexpr, KNOWN: tl.constexpr,
    FROM_ROWS: tl.constexpr, FROM_COLS: tl.constexpr, EXACT: tl.constexpr, FLAGS: tl.constexpr,
    ADD: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """:func:`gradient_rows` over some columns; ``ADD``: to what is there. ``SAME``: ``out`` is one number."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < rows_count
    first = tl.program_id(1) * DB
    row_id = rows.to(tl.int64)
    if HAS_IDS:
        row_id = tl.load(id_x + rows, mask=inside, other=0)
    own = rows
    same = rows
    close_rows = 0
    if FROM_ROWS:
        own = tl.load(positive + rows, mask=inside, other=-1).to(tl.int32)
        if HAS_SELF:
            same = tl.load(itself + rows, mask=inside, other=-1).to(tl.int32)
        if KNOWN:
            close_rows = tl.load(close + tl.program_id(0) * BM // FLAGS)
            if BM > FLAGS:
                close_rows += tl.load(close + tl.program_id(0) * BM // FLAGS + 1)
    acc = gradient_rows(
        x, y, inv_y, g, w, base, pull, out, positive, itself, id_y, near_cols, near_d, close,
        rows, tl.load(inv_x + rows), own, same, row_id, close_rows, first, rows_count, count, begin, end,
        offset, lowest, BM, BN, DP, DB, PARTS, HAS_SELF, HAS_IDS, SOFT, KNOWN, FROM_ROWS, FROM_COLS, EXACT, FLAGS,
        SAME,
    )  # fmt: skip
    if SAME:
        acc *= tl.load(out)
    k = first + tl.arange(0, DB)
    target = gradient + rows.to(tl.int64)[:, None] * d + k[None, :]
    fits = inside[:, None] & (k < d)[None, :]
    if ADD:
        acc += tl.load(target, mask=fits, other=0.0)
    tl.store(target, acc, mask=fits)
