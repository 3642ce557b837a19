# mypy: ignore-errors
"""Each anchor's hardest negatives without the matrix.

A sample of the candidates gives every anchor a threshold below which somewhat more than its K hardest negatives
should lie. One pass keeps those, the *survivors*. With many candidates the pass has two phases, and the survivors of
the first one tighten the threshold. If too few survive, or more than the buffer holds, bisection over its bits finds
the K-th shortfall; this computes the tiles again. Shortfalls are compared as bits, which order like the numbers.
"""

import triton
import triton.language as tl

from weince.engines.kernels.tiles import (
    INTERPRETED,
    both_parts,
    exact_pairs,
    places,
    shortfall,
    tile,
    wide_products,
)

INFINITE = tl.constexpr(0x7F800000)  # bits of inf
LARGEST = tl.constexpr(0x40400000)  # bits of 3.0, above every shortfall


@triton.jit
def bits_of(d):
    """Bits of shortfalls. On a GPU a NaN counts as 0: no search may find fewer negatives than there are."""
    return tl.maximum(d, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def negatives(d, anchor, rows, n_rows, candidate, cols, n_cols, ignore, touched, KEEP: tl.constexpr):
    """Bits of the shortfalls of negatives; those of infinity elsewhere."""
    bits = (bits_of(d),)
    return KEEP(bits, d, anchor, rows, n_rows, candidate, cols, n_cols, ignore, touched, INFINITE, False)[0]


@triton.jit
def cut(bits, k, slack):
    """For each row, a number such that ``k`` to ``k + slack`` of its ``bits`` are at or below it. If ties prevent
    that, the smallest number with at least ``k``; if fewer than ``k`` are finite, the largest of these.

    Interpolation needs a few rounds, where bisection needs one per bit. Every third round bisects, so that no
    distribution makes it slow.
    """
    low = tl.min(bits, axis=1) - 1
    high = tl.maximum(tl.max(tl.where(bits < INFINITE, bits, 0), axis=1), low + 1)
    below = tl.zeros_like(low)
    upto = tl.sum((bits <= high[:, None]).to(tl.int32), axis=1)
    turn = 0
    while tl.max(((upto > k + slack) & (high - low > 1)).to(tl.int32)) > 0:
        share = (k - below).to(tl.float32) / tl.maximum(upto - below, 1).to(tl.float32)
        share = tl.where(turn % 3 == 2, 0.5, tl.minimum(tl.maximum(share, 0.0), 1.0))
        step = ((high - low).to(tl.float32) * share).to(tl.int32)
        middle = low + tl.maximum(tl.minimum(step, high - low - 1), 1)
        number = tl.sum((bits <= middle[:, None]).to(tl.int32), axis=1)
        open_ = (upto > k + slack) & (high - low > 1)
        enough = open_ & (number >= k)
        short = open_ & (number < k)
        high, upto = tl.where(enough, middle, high), tl.where(enough, number, upto)
        low, below = tl.where(short, middle, low), tl.where(short, number, below)
        turn += 1
    return high


@triton.jit
def sample_kernel(
    x, inv_x, y, inv_y, anchor_columns, candidate_columns, numbers, ignore,
    threshold, kept, loose, seen,
    first_row, n_rows, n_cols, wanted,
    M: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr,
    PARTS: tl.constexpr, ANCHORS: tl.constexpr, CANDIDATES: tl.constexpr, REACH: tl.constexpr, TOUCHES: tl.constexpr,
    KEEP: tl.constexpr, BY_VALUE: tl.constexpr,
):  # fmt: skip
    """Set each anchor's threshold to about the ``wanted``-th smallest of ``M`` sampled shortfalls; clear counters."""
    local = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = first_row + local
    anchor = ANCHORS(anchor_columns, numbers, 0, 0, rows, n_rows)
    # One candidate per stratum, chosen by a hash: a plain stride could match a period in the data.
    at = tl.arange(0, M).to(tl.int64)
    jitter = ((at * 2654435761) >> 7) & 0xFFFFFF
    cols = (at * n_cols // M + jitter % (n_cols // M)).to(tl.int32)
    acc = wide_products(x, rows, y, cols, tl.zeros((BM, M), tl.float32), DP, DB, PARTS)
    d = shortfall(acc, tl.load(inv_x + rows), inv_y, cols, PARTS, False)
    candidate = CANDIDATES(candidate_columns, cols, n_cols)
    bits = negatives(d, anchor, rows, n_rows, candidate, cols, n_cols, ignore, True, KEEP)
    tl.store(threshold + local, cut(bits, tl.full((BM,), 1, tl.int32) * wanted, wanted // 64))
    tl.store(kept + local, tl.zeros((BM,), tl.int32))
    tl.store(loose + local, tl.zeros((BM,), tl.int32))
    if BY_VALUE:
        tl.store(seen + local, tl.zeros((BM,), tl.int32))


@triton.jit
def keyed(bits, cols):
    """Pack bits and column into one number that orders like the bits."""
    return (bits.to(tl.int64) << 32) | cols[None, :].to(tl.int64)


@triton.jit
def keep_below(line, spot, bits, cols, limit, width):
    """Store the keys of bits at or below the limit at their spots in the line, if these are within the width.

    This is PTX, since ``tl.store`` would first convert the tile to another layout through shared memory.
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
    x, inv_x, y, inv_y, anchor_columns, candidate_columns, numbers, ignore,
    threshold, kept, seen, keys,
    first_row, n_rows, n_cols, tiles, per_program, width,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    ANCHORS: tl.constexpr, CANDIDATES: tl.constexpr, REACH: tl.constexpr, TOUCHES: tl.constexpr,
    KEEP: tl.constexpr, BY_VALUE: tl.constexpr, ALL: tl.constexpr, SHARED: tl.constexpr,
    PHASE: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Keep every negative at or below its anchor's threshold. ``ALL``: store every candidate at its own column, as
    infinite if it is not a negative.

    ``SHARED``: several programs fill one row, and reserve places in it with a counter. ``PHASE`` 1 takes every
    ``EVERY``-th tile of columns, 2 the others, 0 all. ``kept`` also counts survivors that did not fit; ``seen``
    counts all negatives.
    """
    local = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = first_row + local
    anchor = ANCHORS(anchor_columns, numbers, 0, 0, rows, n_rows)
    inv_rows = tl.load(inv_x + rows)
    a, a_low = both_parts(x, rows, 0, DP, DB, PARTS)
    limit = rows
    place = tl.zeros((BM,), tl.int32)
    if not ALL:
        limit = tl.load(threshold + local)
        place = tl.load(kept + local)
    number = tl.zeros((BM,), tl.int32)
    line = keys + local.to(tl.int64)[:, None] * width
    reach = REACH(anchor)
    begin = tl.program_id(1) * per_program
    for index in range(begin, tl.minimum(begin + per_program, tiles)):
        start = index * BN
        if PHASE == 1:
            start = index * EVERY * BN
        if PHASE == 2:
            start = (index + index // (EVERY - 1) + 1) * BN
        cols = start + tl.arange(0, BN)
        d = tile(a, a_low, x, rows, inv_rows, y, cols, inv_y, BM, BN, DP, DB, PARTS, False)
        candidate = CANDIDATES(candidate_columns, cols, n_cols)
        touched = TOUCHES(reach, start, n_cols, BN)
        bits = negatives(d, anchor, rows, n_rows, candidate, cols, n_cols, ignore, touched, KEEP)
        if BY_VALUE:
            number += tl.sum((bits < INFINITE).to(tl.int32), axis=1)
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
    if BY_VALUE:
        tl.atomic_add(seen + local, number, sem="relaxed")


@triton.jit
def refine_kernel(threshold, kept, loose, keys, width, wanted, R: tl.constexpr, CP: tl.constexpr):
    """Lower a threshold to about the ``wanted``-th smallest of those kept; ``loose`` counts those above it."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    have = tl.load(kept + row)
    at = tl.arange(0, CP)
    mask = at[None, :] < have[:, None]
    key = tl.load(
        keys + row.to(tl.int64)[:, None] * width + at[None, :], mask=mask & (at < width)[None, :], other=0
    )
    bits = tl.where(mask, (key >> 32).to(tl.int32), INFINITE)
    lower = cut(bits, tl.full((R,), 1, tl.int32) * wanted, wanted // 64)
    works = (have >= wanted) & (have <= width)
    tl.store(threshold + row, lower, mask=works)
    tl.store(loose + row, tl.sum((mask & (bits > lower[:, None])).to(tl.int32), axis=1), mask=works)


@triton.jit
def exact_kernel(
    x, inv_x, y, inv_y, anchor_columns, candidate_columns, numbers, ignore,
    kept, loose, seen, keys,
    first_row, n_rows, n_cols, size, width,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    ANCHORS: tl.constexpr, CANDIDATES: tl.constexpr, REACH: tl.constexpr, TOUCHES: tl.constexpr,
    KEEP: tl.constexpr, BY_VALUE: tl.constexpr,
):  # fmt: skip
    """Find the K hardest negatives of anchors with too few or too many survivors, by bisection over bits."""
    local = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = first_row + local
    inside = rows < n_rows
    k = tl.full((BM,), 1, tl.int32) * size
    if BY_VALUE:
        k = tl.minimum(k, tl.load(seen + local))
    have = tl.load(kept + local)
    failed = inside & ((have - tl.load(loose + local) < k) | (have > width))
    if tl.max(failed.to(tl.int32)) > 0:
        anchor = ANCHORS(anchor_columns, numbers, 0, 0, rows, n_rows)
        inv_rows = tl.load(inv_x + rows)
        a, a_low = both_parts(x, rows, 0, DP, DB, PARTS)
        low = tl.zeros((BM,), tl.int32)
        high = tl.full((BM,), LARGEST, tl.int32)
        place = tl.zeros((BM,), tl.int32)
        line = local.to(tl.int64)[:, None] * width
        # 31 rounds find the K-th shortfall; the next one keeps those below it, the last one adds its ties.
        for round in range(33):
            middle = low + ((high - low) >> 1)  # their sum can pass the largest int32
            below = tl.zeros((BM,), tl.int32)
            for start in range(0, n_cols, BN):
                cols = start + tl.arange(0, BN)
                d = tile(a, a_low, x, rows, inv_rows, y, cols, inv_y, BM, BN, DP, DB, PARTS, False)
                candidate = CANDIDATES(candidate_columns, cols, n_cols)
                bits = negatives(d, anchor, rows, n_rows, candidate, cols, n_cols, ignore, True, KEEP)
                if round < 31:
                    below += tl.sum((bits <= middle[:, None]).to(tl.int32), axis=1)
                else:
                    chosen = tl.where(round == 31, bits < high[:, None], bits == high[:, None])
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
def insert(keys, key):
    """The four smallest of four ordered numbers and one more, in order."""
    a, b, c, d = keys
    a, key = tl.minimum(a, key), tl.maximum(a, key)
    b, key = tl.minimum(b, key), tl.maximum(b, key)
    c, key = tl.minimum(c, key), tl.maximum(c, key)
    return a, b, c, tl.minimum(d, key)


@triton.jit
def near_kernel(
    x, inv_x, y, inv_y, anchor_columns, candidate_columns, numbers, ignore,
    a, c, near_cols, near_d, close_ptr,
    n_rows, n_cols, d, stride_rows, stride_cols,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    ANCHORS: tl.constexpr, CANDIDATES: tl.constexpr, REACH: tl.constexpr, TOUCHES: tl.constexpr,
    KEEP: tl.constexpr, DE: tl.constexpr, FIRST: tl.constexpr, NEAREST: tl.constexpr, CLOSE: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """Columns and exact shortfalls of every anchor's four nearest candidates that ``KEEP`` keeps, below ``CLOSE``.

    They are written to four places of ``NEAREST`` from ``FIRST`` on; -1 and infinity if there are fewer.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < n_rows
    anchor = ANCHORS(anchor_columns, numbers, 0, 0, rows, n_rows)
    inv_rows = tl.load(inv_x + rows)
    left, left_low = both_parts(x, rows, 0, DP, DB, PARTS)
    nothing = tl.full((BM,), INFINITE, tl.int64) << 32
    keys = (nothing, nothing, nothing, nothing)
    for start in range(0, n_cols, BN):
        cols = start + tl.arange(0, BN)
        apart = tile(left, left_low, x, rows, inv_rows, y, cols, inv_y, BM, BN, DP, DB, PARTS, False)
        if tl.min(apart) < CLOSE:
            candidate = CANDIDATES(candidate_columns, cols, n_cols)
            bits = negatives(apart, anchor, rows, n_rows, candidate, cols, n_cols, ignore, True, KEEP)
            bits = tl.where(apart < CLOSE, bits, INFINITE)
            key = keyed(bits, cols)
            for _ in tl.static_range(4):
                least = tl.min(key, axis=1)
                keys = insert(keys, least)
                key = tl.where(key == least[:, None], nothing[:, None], key)
    least = tl.full((BM,), 3.0, tl.float32)
    for k in tl.static_range(4):
        known = inside & (keys[k] < nothing)
        col = tl.where(known, (keys[k] & 0x7FFFFFFF).to(tl.int32), -1)
        value = exact_pairs(a, c, rows, col, known, d, stride_rows, stride_cols, BM, DE)
        tl.store(near_cols + rows * NEAREST + FIRST + k, col, mask=inside)
        tl.store(near_d + rows * NEAREST + FIRST + k, tl.where(known, value, float("inf")), mask=inside)
        least = tl.minimum(least, tl.where(known, value, 3.0))
    tl.atomic_max(close_ptr + rows // FLAGS, 1, mask=inside & (least < CLOSE), sem="relaxed")
