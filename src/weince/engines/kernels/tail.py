# mypy: ignore-errors
"""Each anchor's hardest negatives without the matrix, and what they say.

A sample of the candidates gives every anchor a threshold below which somewhat more than its K hardest negatives
should lie. One pass keeps those, the *survivors*; with many candidates a first part of them tightens the threshold.
Where the guess failed, or ties overflow the buffer, the K-th shortfall is found by bisection over its bits, with the
tiles computed again. Then each anchor's survivors are cut to the K smallest, sorted and fitted, in float64 as
everywhere. Shortfalls travel as their bits, which order like the numbers.
"""

import triton
import triton.language as tl

from weince.engines.kernels.tiles import (
    INTERPRETED,
    exact_pairs,
    negatives,
    part,
    places,
    shortfall,
    tile,
    touches,
    wide_products,
)

INFINITE = tl.constexpr(0x7F800000)  # bits of inf
LARGEST = tl.constexpr(0x40400000)  # bits of 3.0, above every shortfall


@triton.jit
def cut(bits, k):
    """In each row a number with exactly ``k`` bits at or below it: the least with ``k`` or more where equals forbid
    that, the largest where there are fewer.

    By interpolation, which needs a few rounds where bisection needs one per bit; every third round bisects, so that
    no distribution makes it slow.
    """
    low = tl.min(bits, axis=1) - 1
    high = tl.maximum(tl.max(tl.where(bits < INFINITE, bits, 0), axis=1), low + 1)
    below = tl.zeros_like(low)
    upto = tl.sum((bits <= high[:, None]).to(tl.int32), axis=1)
    turn = 0
    while tl.max(((upto > k) & (high - low > 1)).to(tl.int32)) > 0:
        share = (k - below).to(tl.float32) / tl.maximum(upto - below, 1).to(tl.float32)
        share = tl.where(turn % 3 == 2, 0.5, tl.minimum(tl.maximum(share, 0.0), 1.0))
        step = ((high - low).to(tl.float32) * share).to(tl.int32)
        middle = low + tl.maximum(tl.minimum(step, high - low - 1), 1)
        number = tl.sum((bits <= middle[:, None]).to(tl.int32), axis=1)
        open_ = (upto > k) & (high - low > 1)
        enough = open_ & (number >= k)
        short = open_ & (number < k)
        high, upto = tl.where(enough, middle, high), tl.where(enough, number, upto)
        low, below = tl.where(short, middle, low), tl.where(short, number, below)
        turn += 1
    return high


@triton.jit
def sample_kernel(
    x, inv_x, y, inv_y, positive, itself, id_a, id_c, threshold, kept, loose, seen,
    first_row, anchors, count, wanted,
    M: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr,
    PARTS: tl.constexpr, HAS_SELF: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """Threshold of each anchor: about the ``wanted``-th smallest of ``M`` sampled shortfalls. Counters to 0."""
    local = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = first_row + local
    inside = rows < anchors
    own = tl.load(positive + rows, mask=inside, other=-1).to(tl.int32)
    same = own
    if HAS_SELF:
        same = tl.load(itself + rows, mask=inside, other=-1).to(tl.int32)
    own_id = own.to(tl.int64)
    if HAS_IDS:
        own_id = tl.load(id_a + rows, mask=inside, other=0)
    # One candidate of each stratum, which one by a hash: a plain stride could follow a period in the data.
    at = tl.arange(0, M).to(tl.int64)
    jitter = ((at * 2654435761) >> 7) & 0xFFFFFF
    cols = (at * count // M + jitter % (count // M)).to(tl.int32)
    acc = wide_products(x, rows, y, cols, tl.zeros((BM, M), tl.float32), DP, BK, PARTS)
    d = shortfall(acc, tl.load(inv_x + rows), inv_y, cols, PARTS)
    keep = negatives(rows, cols, own, same, own_id, id_c, count, HAS_SELF, HAS_IDS)
    bits = tl.where(keep, d.to(tl.int32, bitcast=True), INFINITE)
    tl.store(threshold + local, cut(bits, tl.full((BM,), 1, tl.int32) * wanted))
    tl.store(kept + local, tl.zeros((BM,), tl.int32))
    tl.store(loose + local, tl.zeros((BM,), tl.int32))
    if HAS_IDS:
        tl.store(seen + local, tl.zeros((BM,), tl.int32))


@triton.jit
def keyed(bits, cols):
    """Bits and column in one number that orders like the bits."""
    return (bits.to(tl.int64) << 32) | cols[None, :].to(tl.int64)


@triton.jit
def keep_below(line, spot, bits, cols, limit, width):
    """Store what lies at or below the limit at its spot of the line, if that is within the width.

    By hand, since ``tl.store`` would first move the tile to another layout, through shared memory.
    """
    if INTERPRETED:
        tl.store(line + spot, keyed(bits, cols), mask=(bits <= limit[:, None]) & (spot < width))
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred low, fits;
            .reg .b64 place;
            setp.le.s32 low, $2, $3;
            setp.lt.and.s32 fits, $1, $4, low;
            mad.wide.s32 place, $1, 8, $5;
            @fits st.global.v2.b32 [place], {$6, $2};
            mov.b32 $0, 0;
            }""",
            "=r,r,r,r,r,l,r",
            [spot, bits, limit[:, None], width, line.to(tl.int64), cols[None, :]],
            tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def survivors_kernel(
    x, inv_x, y, inv_y, positive, itself, id_a, id_c, threshold, kept, seen, keys,
    first_row, anchors, count, tiles, per_program, width,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    HAS_SELF: tl.constexpr, HAS_IDS: tl.constexpr, ALL: tl.constexpr, SHARED: tl.constexpr,
    PHASE: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Keep every negative at or below its anchor's threshold; ``ALL``: at its own column, whatever it is.

    ``SHARED``: several programs fill one row and take places in it by a counter. ``PHASE`` 1 takes each
    ``EVERY``-th tile of columns, 2 the others, 0 all. ``kept`` counts those that found no place too, ``seen`` all
    negatives.
    """
    local = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = first_row + local
    inside = rows < anchors
    own = tl.load(positive + rows, mask=inside, other=-1).to(tl.int32)
    same = own
    if HAS_SELF:
        same = tl.load(itself + rows, mask=inside, other=-1).to(tl.int32)
    own_id = own.to(tl.int64)
    if HAS_IDS:
        own_id = tl.load(id_a + rows, mask=inside, other=0)
    inv_rows = tl.load(inv_x + rows)
    a = part(x, rows, 0, PARTS * DP, DB)
    a_low = a
    if PARTS == 2:
        a_low = part(x, rows, DP, PARTS * DP, DB)
    limit = own
    place = tl.zeros((BM,), tl.int32)
    if not ALL:
        limit = tl.load(threshold + local)
        place = tl.load(kept + local)
    found = tl.zeros((BM,), tl.int32)
    line = keys + local.to(tl.int64)[:, None] * width
    own_first, own_last, same_first, same_last = tl.min(own), tl.max(own), tl.min(same), tl.max(same)
    begin = tl.program_id(1) * per_program
    for index in range(begin, tl.minimum(begin + per_program, tiles)):
        start = index * BN
        if PHASE == 1:
            start = index * EVERY * BN
        if PHASE == 2:
            start = (index + index // (EVERY - 1) + 1) * BN
        cols = start + tl.arange(0, BN)
        d = tile(a, a_low, x, rows, inv_rows, y, cols, inv_y, BM, BN, DP, DB, PARTS)
        bits = d.to(tl.int32, bitcast=True)
        if HAS_IDS or touches(start, own_first, own_last, same_first, same_last, count, BN):
            keep = negatives(rows, cols, own, same, own_id, id_c, count, HAS_SELF, HAS_IDS)
            bits = tl.where(keep, bits, INFINITE)
            if HAS_IDS:
                found += tl.sum(keep.to(tl.int32), axis=1)
        if ALL:
            tl.store(line + cols[None, :], keyed(bits, cols), mask=(cols < width)[None, :])
        else:
            spot, here = places(bits <= limit[:, None], BN)
            if SHARED:
                place = tl.atomic_add(kept + local, here, sem="relaxed")
            keep_below(line, spot + (place[:, None] - 1), bits, cols, limit, width)
            if not SHARED:
                place += here
    if not ALL and not SHARED:
        tl.store(kept + local, place)
    if HAS_IDS:
        tl.atomic_add(seen + local, found, sem="relaxed")


@triton.jit
def refine_kernel(threshold, kept, loose, keys, width, wanted, R: tl.constexpr, CP: tl.constexpr):
    """A lower threshold: the ``wanted``-th smallest of what an anchor has kept so far; ``loose``: those above it."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    have = tl.load(kept + row)
    at = tl.arange(0, CP)
    mask = at[None, :] < have[:, None]
    key = tl.load(
        keys + row.to(tl.int64)[:, None] * width + at[None, :], mask=mask & (at < width)[None, :], other=0
    )
    bits = tl.where(mask, (key >> 32).to(tl.int32), INFINITE)
    lower = cut(bits, tl.full((R,), 1, tl.int32) * wanted)
    works = (have >= wanted) & (have <= width)
    tl.store(threshold + row, lower, mask=works)
    tl.store(loose + row, tl.sum((mask & (bits > lower[:, None])).to(tl.int32), axis=1), mask=works)


@triton.jit
def exact_kernel(
    x, inv_x, y, inv_y, positive, itself, id_a, id_c, kept, loose, sizes, keys,
    first_row, anchors, count, size, width,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    HAS_SELF: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """The K hardest negatives of anchors whose survivors are too few or too many, by bisection over bits."""
    local = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = first_row + local
    inside = rows < anchors
    k = tl.full((BM,), 1, tl.int32) * size
    if HAS_IDS:
        k = tl.load(sizes + local)
    have = tl.load(kept + local)
    failed = inside & ((have - tl.load(loose + local) < k) | (have > width))
    if tl.max(failed.to(tl.int32)) > 0:
        own = tl.load(positive + rows, mask=inside, other=-1).to(tl.int32)
        same = own
        if HAS_SELF:
            same = tl.load(itself + rows, mask=inside, other=-1).to(tl.int32)
        own_id = own.to(tl.int64)
        if HAS_IDS:
            own_id = tl.load(id_a + rows, mask=inside, other=0)
        inv_rows = tl.load(inv_x + rows)
        a = part(x, rows, 0, PARTS * DP, DB)
        a_low = a
        if PARTS == 2:
            a_low = part(x, rows, DP, PARTS * DP, DB)
        low = tl.zeros((BM,), tl.int32)
        high = tl.full((BM,), LARGEST, tl.int32)
        place = tl.zeros((BM,), tl.int32)
        line = local.to(tl.int64)[:, None] * width
        # 31 rounds find the K-th; the next keeps what lies below it, the last fills up with its equals.
        for round in range(33):
            middle = (low + high) >> 1
            below = tl.zeros((BM,), tl.int32)
            for start in range(0, count, BN):
                cols = start + tl.arange(0, BN)
                d = tile(a, a_low, x, rows, inv_rows, y, cols, inv_y, BM, BN, DP, DB, PARTS)
                keep = negatives(rows, cols, own, same, own_id, id_c, count, HAS_SELF, HAS_IDS)
                bits = d.to(tl.int32, bitcast=True)
                if round < 31:
                    below += tl.sum((keep & (bits <= middle[:, None])).to(tl.int32), axis=1)
                else:
                    chosen = keep & tl.where(round == 31, bits < high[:, None], bits == high[:, None])
                    number = chosen.to(tl.int32)
                    spot = place[:, None] + tl.cumsum(number, axis=1) - 1
                    fits = chosen & (spot < k[:, None]) & failed[:, None]
                    key = (bits.to(tl.int64) << 32) | cols[None, :].to(tl.int64)
                    tl.store(keys + line + spot, key, mask=fits)
                    place += tl.sum(number, axis=1)
            if round < 31:
                enough = below >= k
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, tl.minimum(middle + 1, high))
        tl.store(kept + local, k, mask=failed)


@triton.jit
def centred(values, used, points):
    mean = tl.sum(tl.where(used, values, 0.0), axis=1) / points
    return tl.where(used, values - mean[:, None], 0.0)


@triton.jit
def lines(ordered, rho, k, dropped, table, eps, KP: tl.constexpr, HAS_IDS: tl.constexpr):
    """TailFit: whether a fit can be made, the slope of the Weibull line, and the difference in AIC.

    ``ordered``: ``(R, KP)`` shortfalls, of which the first ``k`` count but for ``dropped``; ``rho``: the first.
    """
    rank = tl.arange(0, KP)
    used = (rank[None, :] >= dropped[:, None]) & (rank[None, :] < k[:, None])
    points = tl.maximum(k - dropped, 1).to(tl.float64)
    base = tl.log(tl.minimum(tl.maximum(rho, eps), 2.0).to(tl.float64))
    log_d = tl.log(tl.minimum(tl.maximum(ordered, eps), 2.0).to(tl.float64)) - base[:, None]
    if HAS_IDS:
        share = (rank[None, :] + 1).to(tl.float64) / (k[:, None] + 1).to(tl.float64)
        log_f = tl.log(tl.where(used, share, 0.5))
        log_minus = tl.log(-log_f)
    else:
        log_f = tl.load(table + rank[None, :], mask=used, other=0.0)
        log_minus = tl.load(table + KP + rank[None, :], mask=used, other=0.0)
    log_d = centred(log_d, used, points)
    log_f = centred(log_f, used, points)
    log_minus = centred(log_minus, used, points)
    sxx = tl.sum(log_d * log_d, axis=1)
    safe = tl.maximum(sxx, 1e-12)
    slope = tl.sum(log_d * log_f, axis=1) / safe
    residual = log_f - slope[:, None] * log_d
    weibull = tl.maximum(tl.sum(residual * residual, axis=1), 1e-12)
    other = tl.sum(log_d * log_minus, axis=1) / safe
    residual = log_minus - other[:, None] * log_d
    gumbel = tl.maximum(tl.sum(residual * residual, axis=1), 1e-12)
    fits = ((k - dropped) >= 3) & (sxx > 1e-12)
    difference = tl.where(fits, points * (tl.log(gumbel) - tl.log(weibull)), 0.0)
    return fits, tl.where(fits, tl.maximum(slope, 0.0), 0.0).to(tl.float32), difference.to(tl.float32)


@triton.jit
def nearest(small, ordered, key, near_cols, row, inside, KP: tl.constexpr, EXACT: tl.constexpr):
    """Write the columns of the ``EXACT`` smallest, in no order; -1 where there are fewer.

    ``ordered`` is ``small`` sorted; the columns are the lower half of ``key``.
    """
    rank = tl.arange(0, KP)
    real = tl.sum((small < INFINITE).to(tl.int32), axis=1)
    last = tl.max(tl.where((rank < EXACT)[None, :], ordered, 0), axis=1)
    less = small < last[:, None]
    equal = (small == last[:, None]) & (small < INFINITE)
    # Both counted in one running sum, those less in the lower half.
    running = tl.cumsum(less.to(tl.int32) + (equal.to(tl.int32) << 16), axis=1)
    behind = tl.sum(less.to(tl.int32), axis=1)[:, None] + (running >> 16)
    spot = tl.where(less, running & 0xFFFF, behind) - 1
    here = near_cols + row[:, None] * EXACT
    col = (key & 0x7FFFFFFF).to(tl.int32)
    tl.store(here + spot, col, mask=(less | equal) & (spot < EXACT) & inside[:, None])
    step = tl.arange(0, EXACT)[None, :]
    tl.store(here + step, tl.full((1, EXACT), -1, tl.int32), mask=inside[:, None] & (step >= real[:, None]))


@triton.jit
def four(values, inside):
    """Four numbers of each row, in order."""
    a = tl.load(values, mask=inside, other=float("inf"))
    b = tl.load(values + 1, mask=inside, other=float("inf"))
    c = tl.load(values + 2, mask=inside, other=float("inf"))
    d = tl.load(values + 3, mask=inside, other=float("inf"))
    a, b = tl.minimum(a, b), tl.maximum(a, b)
    c, d = tl.minimum(c, d), tl.maximum(c, d)
    a, c = tl.minimum(a, c), tl.maximum(a, c)
    b, d = tl.minimum(b, d), tl.maximum(b, d)
    return a, tl.minimum(b, c), tl.maximum(b, c), d


@triton.jit
def fit_kernel(
    keys, halves, kept, sizes, drops, table, a, c, rho, beta, daic, made, near_cols, near_d, close,
    first_row, anchors, all_kept, size, drop, width, d, stride_a, stride_c, eps,
    R: tl.constexpr, CP: tl.constexpr, KP: tl.constexpr, DE: tl.constexpr, HAS_IDS: tl.constexpr,
    ALL: tl.constexpr, EXACT: tl.constexpr, NEAR: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Survivors of ``R`` anchors to their nearest negatives and the two lines of TailFit.

    ``halves`` are the ``keys`` again, as twice as many numbers of 32 bits: the upper ones are the bits.
    """
    local = tl.program_id(0) * R + tl.arange(0, R)
    row = first_row + local
    inside = row < anchors
    k = tl.full((R,), 1, tl.int32) * size
    dropped = tl.full((R,), 1, tl.int32) * drop
    if HAS_IDS:
        k = tl.load(sizes + local, mask=inside, other=0)
        dropped = tl.load(drops + local, mask=inside, other=0)
    have = tl.full((R,), 1, tl.int32) * all_kept
    if not ALL:
        have = tl.load(kept + local, mask=inside, other=0)
    at = tl.arange(0, CP)
    line = keys + local.to(tl.int64)[:, None] * width
    mask = inside[:, None] & (at[None, :] < have[:, None]) & (at < width)[None, :]
    upper = halves + 2 * local.to(tl.int64)[:, None] * width + 1
    bits = tl.load(upper + 2 * at[None, :], mask=mask, other=INFINITE)
    last = cut(bits, k)
    chosen = (bits <= last[:, None]) & mask
    spot = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    if tl.max(tl.sum(chosen.to(tl.int32), axis=1) - k) > 0:
        # Equals of the last: as many as there is room for, after the others.
        less = (bits < last[:, None]).to(tl.int32)
        equal = (chosen & (bits == last[:, None])).to(tl.int32)
        behind = tl.sum(less, axis=1)[:, None] + tl.cumsum(equal, axis=1) - 1
        spot = tl.where(less > 0, tl.cumsum(less, axis=1) - 1, behind)
    key = tl.load(line + at[None, :], mask=chosen, other=0)
    tl.debug_barrier()
    tl.store(line + spot, key, mask=chosen & (spot < k[:, None]))
    tl.debug_barrier()
    rank = tl.arange(0, KP)
    within = inside[:, None] & (rank[None, :] < k[:, None])
    key = tl.load(line + rank[None, :], mask=within, other=0)
    small = tl.where(within, (key >> 32).to(tl.int32), INFINITE)

    ordered = tl.sort(small, dim=1)
    nearest(small, ordered, key, near_cols, row, inside, KP, EXACT)
    tl.debug_barrier()
    # Their exact shortfalls, all of them in one go, then in order.
    at = (first_row + tl.program_id(0) * R) * EXACT + tl.arange(0, R * EXACT)
    col = tl.load(near_cols + at, mask=at < anchors * EXACT, other=-1)
    value = exact_pairs(a, c, at // EXACT, col, col >= 0, d, stride_a, stride_c, R * EXACT, DE)
    tl.store(near_d + at, tl.where(col >= 0, value, float("inf")), mask=at < anchors * EXACT)
    tl.debug_barrier()
    nearest_0, nearest_1, nearest_2, nearest_3 = four(near_d + row * EXACT, inside)
    tl.atomic_max(close + row // FLAGS, 1, mask=inside & (nearest_0 < NEAR), sem="relaxed")
    ordered = ordered.to(tl.float32, bitcast=True)
    ordered = tl.where(rank[None, :] == 0, nearest_0[:, None], ordered)
    ordered = tl.where(rank[None, :] == 1, nearest_1[:, None], ordered)
    ordered = tl.where(rank[None, :] == 2, nearest_2[:, None], ordered)
    ordered = tl.where(rank[None, :] == 3, nearest_3[:, None], ordered)

    fits, slope, difference = lines(ordered, nearest_0, k, dropped, table, eps, KP, HAS_IDS)
    tl.store(rho + row, tl.maximum(nearest_0, eps), mask=inside)
    tl.store(beta + row, slope, mask=inside)
    tl.store(daic + row, difference, mask=inside)
    tl.store(made + row, fits.to(tl.int32), mask=inside)


@triton.jit
def sigmoid(x):
    odds = tl.exp(-tl.abs(x))
    return tl.where(x < 0, odds, 1.0) / (1 + odds)


@triton.jit
def ranked(values, number, rank, B: tl.constexpr):
    """The value of a rank, from 0, among ``number`` positive ones, at most ``B``."""
    at = tl.arange(0, B)
    bits = tl.load(values + at, mask=at < number, other=float("inf")).to(tl.int32, bitcast=True)
    low = 0
    high = INFINITE
    for _ in range(31):
        middle = low + ((high - low) >> 1)
        enough = tl.sum(((bits <= middle) & (at < number)).to(tl.int32)) > rank
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    return high.to(tl.float32, bitcast=True)


@triton.jit
def gate(rho, daic, pivot, kappa_rho, kappa_aic, margin, GATE: tl.constexpr):
    """``lam`` where a fit was made; ``GATE`` 1: by rho alone, 2: by the AIC alone."""
    near = sigmoid(kappa_rho * tl.log(pivot / rho))
    weibull = sigmoid(kappa_aic * (daic - margin))
    value = near * weibull
    if GATE == 1:
        value = near
    if GATE == 2:
        value = weibull
    return value


@triton.jit
def gate_kernel(
    rho, beta, daic, made, pivot, temperature, lam, g, w,
    anchors, quantile_rank, kappa_rho, kappa_aic, margin, heat, fixed_beta,
    GIVEN: tl.constexpr, LEARNED: tl.constexpr, FIT: tl.constexpr, GATE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """``lam`` of every anchor and the coefficients of its link, by one program.

    The pivot is the value of rank ``quantile_rank`` (from 0) of all ``rho``, at most ``B``, unless it is given.
    """
    if GIVEN:
        middle_rho = tl.load(pivot)
    else:
        middle_rho = ranked(rho, anchors, quantile_rank, B)
    if LEARNED:  # noqa: SIM108
        inverse = 1 / tl.load(temperature)
    else:
        inverse = 1 / heat
    for start in range(0, anchors, B):
        at = start + tl.arange(0, B)
        inside = at < anchors
        own, difference = (
            tl.load(rho + at, mask=inside, other=1.0),
            tl.load(daic + at, mask=inside, other=0.0),
        )
        value = gate(own, difference, middle_rho, kappa_rho, kappa_aic, margin, GATE)
        value = tl.where(tl.load(made + at, mask=inside, other=0) > 0, value, 0.0)
        tl.store(lam + at, value, mask=inside)
        tl.store(g + at, (1 - value) * inverse, mask=inside)
        if FIT:
            tl.store(w + at, value * tl.load(beta + at, mask=inside, other=0.0), mask=inside)
        else:
            tl.store(w + at, value * fixed_beta, mask=inside)
