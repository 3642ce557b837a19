# mypy: ignore-errors
"""What an anchor's hardest negatives say: TailFit's two lines in float64, as everywhere, and the gate."""

import triton
import triton.language as tl

from weince.engines.kernels.tail import INFINITE, cut
from weince.engines.kernels.tiles import exact_pairs, fast_inverse


@triton.jit
def centred(values, used, points):
    mean = tl.sum(tl.where(used, values, 0.0), axis=1) / points
    return tl.where(used, values - mean[:, None], 0.0)


@triton.jit
def log64(x):
    """Logarithm in float64 of a positive float32: ``2 atanh((m - 1) / (m + 1))`` of its mantissa as a series.

    A third of the work of ``tl.log``; equal numbers have equal logarithms.
    """
    bits = x.to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) >> 23  # so that the mantissa lies about 1, from sqrt(1/2) to sqrt(2)
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
def lines(ordered, rho, k, dropped, table, eps, KP: tl.constexpr, HAS_IDS: tl.constexpr):
    """TailFit: whether a fit can be made, the slope of the Weibull line, and the difference in AIC.

    ``ordered``: ``(R, KP)`` shortfalls, of which the first ``k`` count but for ``dropped``; ``rho``: the first.
    """
    rank = tl.arange(0, KP)
    used = (rank[None, :] >= dropped[:, None]) & (rank[None, :] < k[:, None])
    points = tl.maximum(k - dropped, 1).to(tl.float64)
    base = log64(tl.minimum(tl.maximum(rho, eps), 2.0))
    log_d = log64(tl.minimum(tl.maximum(ordered, eps), 2.0)) - base[:, None]
    log_d = centred(log_d, used, points)
    if HAS_IDS:
        share = (rank[None, :] + 1).to(tl.float64) / (k[:, None] + 1).to(tl.float64)
        log_f = tl.log(tl.where(used, share, 0.5))
        log_minus = centred(tl.log(-log_f), used, points)
        log_f = centred(log_f, used, points)
    else:
        log_f = tl.load(table + rank[None, :], mask=used, other=0.0)
        log_minus = tl.load(table + KP + rank[None, :], mask=used, other=0.0)
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
def nearest(small, ordered, key, near_cols, row, inside, k, KP: tl.constexpr, EXACT: tl.constexpr):
    """Write the columns of the ``EXACT`` smallest of ``k``, in no order; -1 where there are fewer.

    ``ordered`` is ``small`` sorted; the columns are the lower half of ``key``.
    """
    rank = tl.arange(0, KP)
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
    tl.store(here + step, tl.full((1, EXACT), -1, tl.int32), mask=inside[:, None] & (step >= k[:, None]))


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
    last = cut(bits, k, 0)
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
    nearest(small, ordered, key, near_cols, row, inside, k, KP, EXACT)
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
    if GIVEN:  # noqa: SIM108
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
