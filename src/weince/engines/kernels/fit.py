# mypy: ignore-errors
"""Tail statistics from an anchor's hardest negatives: TailFit's two lines, in float64 as everywhere, and the gate."""

import triton
import triton.language as tl

from weince.engines.kernels.elementwise import fast_inverse
from weince.engines.kernels.hardest import INFINITE
from weince.engines.kernels.sort import numbers_of, ranks_of, smallest
from weince.engines.kernels.tiles import exact_pairs


@triton.jit
def centred(values, used, points):
    mean = tl.sum(tl.where(used, values, 0.0), axis=1) / points
    return tl.where(used, values - mean[:, None], 0.0)


@triton.jit
def log64(x):
    """Logarithm in float64 of a positive float32: a series for ``2 atanh((m - 1) / (m + 1))`` of its mantissa ``m``.

    It takes a third of the work of ``tl.log``. Equal numbers have equal logarithms.
    """
    bits = x.to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) >> 23  # so that the mantissa lies between sqrt(1/2) and sqrt(2)
    part = (bits - (power << 23)).to(tl.float32, bitcast=True) - 1
    down = part.to(tl.float64) + 2
    inverse = fast_inverse(part + 2).to(tl.float64)
    inverse = inverse * (2 - down * inverse)
    inverse = inverse * (2 - down * inverse)
    s = part.to(tl.float64) * inverse
    z = s * s
    series = z * (2 / 19) + 2 / 17
    series = z * series + 2 / 15
    series = z * series + 2 / 13
    series = z * series + 2 / 11
    series = z * series + 2 / 9
    series = z * series + 2 / 7
    series = z * series + 2 / 5
    series = z * series + 2 / 3
    series = z * series + 2
    return power.to(tl.float64) * 0.6931471805599453 + s * series


@triton.jit
def lines(values, rank, place, rho, k, dropped, table, eps, KP: tl.constexpr, VARIES: tl.constexpr):
    """TailFit: whether a fit can be made, the slope of the Weibull line, and the difference in AIC.

    ``values``: ``(R, KP)`` shortfalls, of which the fit uses ranks ``dropped`` to ``k - 1``; ``rho``: the smallest.
    ``place``: index into the table for each rank.
    """
    used = (rank >= dropped[:, None]) & (rank < k[:, None])
    points = tl.maximum(k - dropped, 1).to(tl.float64)
    base = log64(tl.minimum(tl.maximum(rho, eps), 2.0))
    log_d = log64(tl.minimum(tl.maximum(values, eps), 2.0)) - base[:, None]
    log_d = centred(log_d, used, points)
    if VARIES:
        share = (rank + 1).to(tl.float64) / (k[:, None] + 1).to(tl.float64)
        log_f = tl.log(tl.where(used, share, 0.5))
        log_minus = centred(tl.log(-log_f), used, points)
        log_f = centred(log_f, used, points)
        square = tl.sum(log_f * log_f, axis=1)
        square_minus = tl.sum(log_minus * log_minus, axis=1)
    else:
        log_f = tl.load(table + place)
        log_minus = tl.load(table + KP + place)
        square = tl.load(table + 2 * KP)
        square_minus = tl.load(table + 2 * KP + 1)
    sxx = tl.sum(log_d * log_d, axis=1)
    safe = tl.maximum(sxx, 1e-12)
    slope = tl.sum(log_d * log_f, axis=1) / safe
    other = tl.sum(log_d * log_minus, axis=1) / safe
    # Squared errors: total less explained. In float64 the subtraction loses no digits that matter.
    weibull = tl.maximum(square - slope * slope * safe, 1e-12)
    gumbel = tl.maximum(square_minus - other * other * safe, 1e-12)
    fits = ((k - dropped) >= 3) & (sxx > 1e-12)
    difference = tl.where(fits, points * (tl.log(gumbel) - tl.log(weibull)), 0.0)
    return fits, tl.where(fits, tl.maximum(slope, 0.0), 0.0).to(tl.float32), difference.to(tl.float32)


@triton.jit
def counted(marks, KP: tl.constexpr):
    """Running sums that include their own entry, ``(R, KP)``, in the order of lanes: lane ``l`` holds entries
    ``l``, ``l + 32``, ... Any order would do; in this one nearly all additions stay within a lane."""
    marks = tl.reshape(marks, (marks.shape[0], KP // 32, 32))
    lane = tl.sum(marks, axis=1)
    before = tl.cumsum(lane, axis=1) - lane
    return tl.reshape(tl.cumsum(marks, axis=1) + before[:, None, :], (marks.shape[0], KP))


@triton.jit
def nearest(halves, at, have, bound, fewer, most, here, top, KP: tl.constexpr, EXACT: tl.constexpr):
    """Write the columns of the ``top`` smallest survivors to ``here``, in any order, and -1 after them.

    ``halves`` is the address of the first survivor's bits; its column is stored just before them. ``bound`` has the
    bits of the largest shortfall to write, and ``fewer`` is the number of survivors below it.
    """
    step = tl.arange(0, EXACT)[None, :]
    tl.store(here + step, tl.full((1, EXACT), -1, tl.int32), mask=step >= top[:, None])
    below = tl.zeros_like(fewer)
    for start in range(0, most, KP):
        inside = start + at < have[:, None]
        bits = tl.load(halves + 2 * (start + at), mask=inside, other=INFINITE)
        less = bits < bound[:, None]
        equal = (bits == bound[:, None]) & (bits < INFINITE)
        # One running sum counts both: less in the lower 16 bits, equal in the upper.
        running = counted(less.to(tl.int32) + (equal.to(tl.int32) << 16), KP)
        spot = tl.where(less, below[:, None] + (running & 0xFFFF), fewer[:, None] + (running >> 16)) - 1
        chosen = (less | equal) & (spot < top[:, None])
        tl.store(here + spot, tl.load(halves + 2 * (start + at) - 1, mask=chosen, other=0), mask=chosen)
        below += tl.sum(less.to(tl.int32), axis=1)
        fewer += tl.sum(equal.to(tl.int32), axis=1)


@triton.jit
def four(values, inside):
    """Load four numbers of each row, and sort them."""
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
def limit_of(values, rough, rank, number, exact, slack):
    """Midpoint between the first ``number`` values and the next, but at least ``slack`` above all of the former, also
    as they were in the search (``rough``), in case they are nearly equal; infinite if there is no next.

    ``exact``: passes are sure to have the ``values`` up to this one; copies of it may have rough ones."""
    first = rank < number
    last = tl.max(tl.where(first, values, 0.0), axis=1)
    after = tl.min(tl.where(first, float("inf"), values), axis=1)
    most = tl.max(tl.where(first, tl.maximum(values, rough), 0.0), axis=1)
    most = tl.where(last + slack < exact, last, most)
    return tl.maximum((last + after) / 2, most + slack)


@triton.jit
def fit_kernel(
    halves, kept, seen, sizes, drops, table, a, c, stats, has_fit, near_cols, near_d, close_ptr, thresholds,
    first_row, anchors, n_cols, depth, size, drop, width, d, stride_a, stride_c, eps,
    R: tl.constexpr, KP: tl.constexpr, DE: tl.constexpr, VARIES: tl.constexpr, ALL: tl.constexpr,
    EXACT: tl.constexpr, CLOSE: tl.constexpr, FLAGS: tl.constexpr, FIT: tl.constexpr, HARDEST: tl.constexpr,
    SLACK: tl.constexpr, NETWORK: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    """From the survivors of ``R`` anchors, find their nearest negatives, the thresholds of their hardest, and, with
    ``FIT``, the two lines of TailFit: ``stats`` has a row each for rho, beta and daic. ``R`` is 1, for one warp,
    except in the interpreter.

    ``halves``: the keys as 32-bit numbers, a column and then the bits of its shortfall. ``ALL``: one for each of the
    ``n_cols`` columns. The kernel keeps the ``KP`` smallest so far, and merges ``KP`` more at a time. The survivors
    are sure to include the ``depth`` smallest, of which ``size`` are fitted. ``VARIES``: the number of negatives,
    ``seen``, differs between anchors. ``HARDEST``: numbers of hardest negatives; :func:`limit_of` computes
    their thresholds.
    """
    local = tl.program_id(0) * R + tl.arange(0, R)
    row = first_row + local
    inside = row < anchors
    k = tl.full((R,), 1, tl.int32) * size
    dropped = tl.full((R,), 1, tl.int32) * drop
    there = tl.full((R,), 1, tl.int32) * depth
    if VARIES:
        there = tl.minimum(there, tl.load(seen + local, mask=inside, other=0))
        if FIT:
            k = tl.load(sizes + local, mask=inside, other=0)
            dropped = tl.load(drops + local, mask=inside, other=0)
    have = tl.full((R,), 1, tl.int32) * n_cols
    if not ALL:
        have = tl.minimum(tl.load(kept + local, mask=inside, other=0), width)
    have = tl.where(inside, have, 0)
    most = tl.max(have)
    at = tl.arange(0, KP)[None, :]
    upper = halves + 2 * local.to(tl.int64)[:, None] * width + 1
    bits = tl.load(upper + 2 * at, mask=at < have[:, None], other=INFINITE)
    more = tl.load(upper + 2 * (at + KP), mask=at + KP < have[:, None], other=INFINITE)
    packed = smallest(bits, more, KP, NETWORK, KINDS)
    for start in range(2 * KP, most, KP):
        more = tl.load(upper + 2 * (start + at), mask=start + at < have[:, None], other=INFINITE)
        packed = smallest(numbers_of(packed), more, KP, NETWORK, KINDS)
    values = numbers_of(packed)
    rank, place = ranks_of(packed, KP)

    # EXACT: nothing is written for a row beyond the last.
    top = tl.where(inside, tl.minimum(there, EXACT), EXACT)
    bound = tl.max(tl.where(rank < top[:, None], values, 0), axis=1)
    fewer = tl.sum((values < bound[:, None]).to(tl.int32), axis=1)
    here = near_cols + tl.where(inside, row, 0)[:, None] * EXACT
    nearest(upper, at, have, bound, fewer, most, here, top, KP, EXACT)
    tl.debug_barrier()
    # Compute the exact shortfalls of all of them at once, then sort them.
    step = (first_row + tl.program_id(0) * R) * EXACT + tl.arange(0, R * EXACT)
    col = tl.load(near_cols + step, mask=step < anchors * EXACT, other=-1)
    value = exact_pairs(a, c, step // EXACT, col, col >= 0, d, stride_a, stride_c, R * EXACT, DE)
    tl.store(near_d + step, tl.where(col >= 0, value, float("inf")), mask=step < anchors * EXACT)
    tl.debug_barrier()
    nearest_0, nearest_1, nearest_2, nearest_3 = four(near_d + row * EXACT, inside)
    tl.atomic_max(close_ptr + row // FLAGS, 1, mask=inside & (nearest_0 < CLOSE), sem="relaxed")
    rough = values.to(tl.float32, bitcast=True)
    values = tl.where(rank == 0, nearest_0[:, None], rough)
    values = tl.where(rank == 1, nearest_1[:, None], values)
    values = tl.where(rank == 2, nearest_2[:, None], values)
    values = tl.where(rank == 3, nearest_3[:, None], values)

    # Passes compare the exact ones with the thresholds if any anchor of a tile has a negative nearer than CLOSE.
    exact = tl.where(nearest_0 < CLOSE, nearest_3, 0.0)
    for index in tl.static_range(len(HARDEST)):
        limit = limit_of(values, rough, rank, HARDEST[index], exact, SLACK)
        tl.store(thresholds + index * anchors + row, limit, mask=inside)
    if FIT:
        fits, slope, difference = lines(values, rank, place, nearest_0, k, dropped, table, eps, KP, VARIES)
        tl.store(stats + row, tl.maximum(nearest_0, eps), mask=inside)
        tl.store(stats + anchors + row, slope, mask=inside)
        tl.store(stats + 2 * anchors + row, difference, mask=inside)
        tl.store(has_fit + row, fits.to(tl.int32), mask=inside)


@triton.jit
def sigmoid(x):
    odds = tl.exp(-tl.abs(x))
    return tl.where(x < 0, odds, 1.0) / (1 + odds)


@triton.jit
def ranked(values, number, rank, B: tl.constexpr):
    """The value of a rank, from 0, among ``number`` positive values, at most ``B``; by bisection over its bits."""
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
    """``lam`` for a tail that was fitted. ``GATE``: 0 for both gates, 1 for rho alone, 2 for the AIC alone."""
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
    rho, daic, has_fit, pivot, lam, anchors, quantile_rank, kappa_rho, kappa_aic, margin,
    GIVEN: tl.constexpr, GATE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """``lam`` of every anchor, by one program.

    Unless ``GIVEN``, the pivot is the value of rank ``quantile_rank`` (from 0) among all ``rho``, at most ``B``.
    """
    if GIVEN:  # noqa: SIM108
        middle_rho = tl.load(pivot)
    else:
        middle_rho = ranked(rho, anchors, quantile_rank, B)
    for start in range(0, anchors, B):
        at = start + tl.arange(0, B)
        inside = at < anchors
        smallest_d = tl.load(rho + at, mask=inside, other=1.0)
        difference = tl.load(daic + at, mask=inside, other=0.0)
        value = gate(smallest_d, difference, middle_rho, kappa_rho, kappa_aic, margin, GATE)
        value = tl.where(tl.load(has_fit + at, mask=inside, other=0) > 0, value, 0.0)
        tl.store(lam + at, value, mask=inside)
