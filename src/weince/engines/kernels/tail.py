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

from weince.engines.kernels.tiles import exact_pairs, negatives, part, shortfall, tile, touches, wide_products

INFINITE = tl.constexpr(0x7F800000)  # bits of inf
LARGEST = tl.constexpr(0x40400000)  # bits of 3.0, above every shortfall


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
    low = tl.zeros((BM,), tl.int32)
    high = tl.full((BM,), LARGEST, tl.int32)
    for _ in range(20):  # a threshold need not be exact
        middle = (low + high) >> 1
        enough = tl.sum((bits <= middle[:, None]).to(tl.int32), axis=1) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    tl.store(threshold + local, high)
    tl.store(kept + local, tl.zeros((BM,), tl.int32))
    tl.store(loose + local, tl.zeros((BM,), tl.int32))
    if HAS_IDS:
        tl.store(seen + local, tl.zeros((BM,), tl.int32))


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
        key = (bits.to(tl.int64) << 32) | cols[None, :].to(tl.int64)
        if ALL:
            tl.store(line + cols[None, :], key, mask=(cols < width)[None, :])
        else:
            number = (bits <= limit[:, None]).to(tl.int32)
            here = tl.sum(number, axis=1)
            if SHARED:
                place = tl.atomic_add(kept + local, here)
            spot = place[:, None] + tl.cumsum(number, axis=1) - 1
            tl.store(line + spot, key, mask=(number > 0) & (spot < width))
            if not SHARED:
                place += here
    if not ALL and not SHARED:
        tl.store(kept + local, place)
    if HAS_IDS:
        tl.atomic_add(seen + local, found)


@triton.jit
def kth(bits, k):
    """The k-th smallest of the bits in each row, or the largest there is."""
    low = tl.min(bits, axis=1)
    high = tl.maximum(low, LARGEST)
    while tl.max(high - low) > 0:
        middle = low + ((high - low) >> 1)
        enough = tl.sum((bits <= middle[:, None]).to(tl.int32), axis=1) >= k
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
        high = tl.where(enough, middle, high)
    return high


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
    lower = kth(bits, wanted)
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
def fit_kernel(
    keys, kept, sizes, drops, table, a, c, rho, beta, daic, made, near_cols, near_d, close,
    first_row, anchors, all_kept, size, drop, width, d, stride_a, stride_c, eps,
    R: tl.constexpr, CP: tl.constexpr, KP: tl.constexpr, DE: tl.constexpr, HAS_IDS: tl.constexpr,
    ALL: tl.constexpr, EXACT: tl.constexpr, NEAR: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Survivors of ``R`` anchors to their nearest negatives and the two lines of TailFit.

    A warp to an anchor, and several anchors to a program: the code of a sort is long, and they share its fetching.
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
    key = tl.load(line + at[None, :], mask=mask, other=0)
    bits = tl.where(mask, (key >> 32).to(tl.int32), INFINITE)
    last = kth(bits, k)
    chosen = (bits <= last[:, None]) & mask
    spot = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    if tl.max(tl.sum(chosen.to(tl.int32), axis=1) - k) > 0:
        # Equals of the last: as many as there is room for, after the others.
        less = (bits < last[:, None]).to(tl.int32)
        equal = (chosen & (bits == last[:, None])).to(tl.int32)
        behind = tl.sum(less, axis=1)[:, None] + tl.cumsum(equal, axis=1) - 1
        spot = tl.where(less > 0, tl.cumsum(less, axis=1) - 1, behind)
    tl.debug_barrier()
    tl.store(line + spot, key, mask=chosen & (spot < k[:, None]))
    tl.debug_barrier()
    rank = tl.arange(0, KP)
    within = inside[:, None] & (rank[None, :] < k[:, None])
    key = tl.load(line + rank[None, :], mask=within, other=0)
    small = tl.where(within, (key >> 32).to(tl.int32), INFINITE)

    rest = small
    nearest_0 = tl.full((R,), float("inf"), tl.float32)
    nearest_1, nearest_2, nearest_3 = nearest_0, nearest_0, nearest_0
    for step in tl.static_range(EXACT):
        least = tl.min(rest, axis=1)
        place = tl.min(tl.where(rest == least[:, None], rank[None, :], KP - 1), axis=1)
        rest = tl.where(rank[None, :] == place[:, None], INFINITE, rest)
        real = inside & (least < INFINITE)
        found = tl.load(keys + local.to(tl.int64) * width + place, mask=real, other=-1)
        col = tl.where(real, (found & 0x7FFFFFFF).to(tl.int32), -1)
        value = exact_pairs(a, c, row, col, real, d, stride_a, stride_c, R, DE)
        value = tl.where(real, value, float("inf"))
        tl.store(near_cols + row * EXACT + step, col, mask=inside)
        tl.store(near_d + row * EXACT + step, value, mask=inside)
        # Insert into the four in order.
        upper = tl.maximum(nearest_0, value)
        nearest_0 = tl.minimum(nearest_0, value)
        value = tl.maximum(nearest_1, upper)
        nearest_1 = tl.minimum(nearest_1, upper)
        upper = tl.maximum(nearest_2, value)
        nearest_2 = tl.minimum(nearest_2, value)
        nearest_3 = tl.minimum(nearest_3, upper)
    tl.atomic_max(close + row // FLAGS, 1, mask=inside & (nearest_0 < NEAR))

    ordered = tl.sort(small, dim=1).to(tl.float32, bitcast=True)
    ordered = tl.where(rank[None, :] == 0, nearest_0[:, None], ordered)
    ordered = tl.where(rank[None, :] == 1, nearest_1[:, None], ordered)
    ordered = tl.where(rank[None, :] == 2, nearest_2[:, None], ordered)
    ordered = tl.where(rank[None, :] == 3, nearest_3[:, None], ordered)

    used = (rank[None, :] >= dropped[:, None]) & (rank[None, :] < k[:, None])
    points = tl.maximum(k - dropped, 1).to(tl.float64)
    base = tl.log(tl.minimum(tl.maximum(nearest_0, eps), 2.0).to(tl.float64))
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
    tl.store(rho + row, tl.maximum(nearest_0, eps), mask=inside)
    tl.store(beta + row, tl.where(fits, tl.maximum(slope, 0.0), 0.0).to(tl.float32), mask=inside)
    tl.store(daic + row, difference.to(tl.float32), mask=inside)
    tl.store(made + row, fits.to(tl.int32), mask=inside)


@triton.jit
def sigmoid(x):
    odds = tl.exp(-tl.abs(x))
    return tl.where(x < 0, odds, 1.0) / (1 + odds)


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
        at = tl.arange(0, B)
        bits = tl.load(rho + at, mask=at < anchors, other=float("inf")).to(tl.int32, bitcast=True)
        low = 0
        high = INFINITE
        for _ in range(31):
            middle = low + ((high - low) >> 1)
            enough = tl.sum(((bits <= middle) & (at < anchors)).to(tl.int32)) > quantile_rank
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, tl.minimum(middle + 1, high))
        middle_rho = high.to(tl.float32, bitcast=True)
    if LEARNED:  # noqa: SIM108
        inverse = 1 / tl.load(temperature)
    else:
        inverse = 1 / heat
    for start in range(0, anchors, B):
        at = start + tl.arange(0, B)
        inside = at < anchors
        near = sigmoid(kappa_rho * tl.log(middle_rho / tl.load(rho + at, mask=inside, other=1.0)))
        weibull = sigmoid(kappa_aic * (tl.load(daic + at, mask=inside, other=0.0) - margin))
        value = near * weibull
        if GATE == 1:
            value = near
        if GATE == 2:
            value = weibull
        value = tl.where(tl.load(made + at, mask=inside, other=0) > 0, value, 0.0)
        tl.store(lam + at, value, mask=inside)
        tl.store(g + at, (1 - value) * inverse, mask=inside)
        if FIT:
            tl.store(w + at, value * tl.load(beta + at, mask=inside, other=0.0), mask=inside)
        else:
            tl.store(w + at, value * fixed_beta, mask=inside)
