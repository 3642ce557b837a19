# mypy: ignore-errors
"""WEINCE of a small batch of two views in four launches: at 256 pairs the launches are what costs.

The rows come as they are, and their gradient goes back through the normalisation. ``state`` holds lines of ``P``
numbers, see :data:`weince.engines.small.LINES`; ``near`` the columns of each row's nearest negatives, then flags.
"""

import triton
import triton.language as tl

from weince.engines.kernels.contrast import gradient_rows, settle, sum_rows
from weince.engines.kernels.fit import gate, lines, ranked
from weince.engines.kernels.tail import INFINITE
from weince.engines.kernels.tiles import LOG2E, exact_pairs, on_grid, shortfall, wide_products


@triton.jit
def rows_kernel(
    z_i, z_j, unit, out, state, near, n, d, stride_i, stride_j, P,
    DP: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr, GRID: tl.constexpr,
    EXACT: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Both views to unit rows, to operands, and to the inverse lengths of both. Flags and the counter to 0."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = row < 2 * n
    column = tl.arange(0, WIDE)
    mask = inside[:, None] & (column < d)[None, :]
    first = (row < n)[:, None]
    x = tl.load(z_i + row[:, None] * stride_i + column[None, :], mask=mask & first, other=0.0).to(tl.float32)
    other = z_j + (row - n)[:, None] * stride_j + column[None, :]
    x += tl.load(other, mask=mask & (row >= n)[:, None], other=0.0).to(tl.float32)
    # Scaled by a power of two, which is exact, so that no square leaves the range.
    largest = tl.max(tl.abs(x), axis=1)
    scale = tl.exp2(-tl.minimum(tl.floor(tl.log2(tl.maximum(largest, 1e-37))), 126.0))
    x = x * scale[:, None]
    real = largest > 0
    length = tl.sqrt_rn(tl.where(real, tl.maximum(tl.sum(x * x, axis=1), 1e-37), 1.0))
    one = tl.div_rn(x, tl.zeros_like(x) + length[:, None])
    tl.store(unit + row[:, None] * d + column[None, :], one, mask=mask)
    tl.store(state + 8 * P + row, tl.where(real, tl.minimum(scale / length, 8.5e37), 0.0))
    tl.store(near + P * EXACT + row // FLAGS, tl.zeros((BR,), tl.int32))
    tl.store(near + P * EXACT + P // FLAGS, 0)
    target = out + row[:, None] * (PARTS * DP) + column[None, :]
    fits = (column < DP)[None, :]
    if PARTS == 1:
        tl.store(state + 9 * P + row, tl.where(real, 1 / length, 0.0))
        tl.store(target, x.to(out.dtype.element_ty), mask=fits)
    else:
        high = one.to(out.dtype.element_ty).to(tl.float32)
        if GRID:
            high = on_grid(one)
        low = one - high
        if GRID:
            low = on_grid(low)
        tl.store(state + 9 * P + row, tl.full((BR,), 1.0, tl.float32))
        tl.store(target, high.to(out.dtype.element_ty), mask=fits)
        tl.store(target + DP, low.to(out.dtype.element_ty), mask=fits)


@triton.jit
def all_bits(
    x, state, rows, n, P,
    BM: tl.constexpr, CP: tl.constexpr, BK: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Shortfalls of some rows and all columns as their bits; infinite where a column is no negative."""
    cols = tl.arange(0, CP)
    there = tl.minimum(cols, P - 1)
    acc = wide_products(x, rows, x, there, tl.zeros((BM, CP), tl.float32), DP, BK, PARTS)
    apart = shortfall(acc, tl.load(state + 9 * P + rows), state + 9 * P, there, PARTS)
    own = (rows + n) % (2 * n)
    keep = (cols[None, :] != own[:, None]) & (cols[None, :] != rows[:, None]) & (cols < 2 * n)[None, :]
    return tl.where(keep, apart.to(tl.int32, bitcast=True), INFINITE)


@triton.jit
def tail_kernel(
    unit, x, state, near, table, n, d, P, k, drop, eps,
    BM: tl.constexpr, CP: tl.constexpr, BK: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, KP: tl.constexpr,
    DE: tl.constexpr, EXACT: tl.constexpr, NEAR: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """The K hardest of all negatives, and TailFit's lines through them."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < 2 * n
    cols = tl.arange(0, CP)
    bits = all_bits(x, state, rows, n, P, BM, CP, BK, DP, PARTS)
    ordered = -tl.topk(-bits, KP)

    rank = tl.arange(0, KP)
    before = tl.full((BM,), -1, tl.int32)
    taken = before
    nearest_0 = tl.full((BM,), float("inf"), tl.float32)
    nearest_1, nearest_2, nearest_3 = nearest_0, nearest_0, nearest_0
    for step in tl.static_range(EXACT):
        least = tl.sum(tl.where((rank == step)[None, :], ordered, 0), axis=1)
        after = tl.where(least == before, taken, -1)  # of equals, the next
        here = (bits == least[:, None]) & (cols[None, :] > after[:, None])
        col = tl.min(tl.where(here, cols[None, :], CP), axis=1)
        real = inside & (least < INFINITE)
        col = tl.where(real, col, -1)
        value = exact_pairs(unit, unit, rows, col, real, d, d, d, BM, DE)
        value = tl.where(real, value, float("inf"))
        tl.store(near + rows * EXACT + step, col, mask=inside)
        tl.store(state + 12 * P + rows * EXACT + step, value, mask=inside)
        before, taken = least, col
        # Insert into the four in order.
        upper = tl.maximum(nearest_0, value)
        nearest_0 = tl.minimum(nearest_0, value)
        value = tl.maximum(nearest_1, upper)
        nearest_1 = tl.minimum(nearest_1, upper)
        upper = tl.maximum(nearest_2, value)
        nearest_2 = tl.minimum(nearest_2, value)
        nearest_3 = tl.minimum(nearest_3, upper)
    tl.atomic_max(near + P * EXACT + rows // FLAGS, 1, mask=inside & (nearest_0 < NEAR), sem="relaxed")

    ordered = ordered.to(tl.float32, bitcast=True)
    ordered = tl.where((rank == 0)[None, :], nearest_0[:, None], ordered)
    ordered = tl.where((rank == 1)[None, :], nearest_1[:, None], ordered)
    ordered = tl.where((rank == 2)[None, :], nearest_2[:, None], ordered)
    ordered = tl.where((rank == 3)[None, :], nearest_3[:, None], ordered)
    size = tl.full((BM,), 1, tl.int32) * k
    dropped = tl.full((BM,), 1, tl.int32) * drop
    fits, slope, difference = lines(ordered, nearest_0, size, dropped, table, eps, KP, False)
    tl.store(state + rows, tl.maximum(nearest_0, eps), mask=inside)
    tl.store(state + P + rows, slope, mask=inside)
    tl.store(state + 2 * P + rows, difference, mask=inside)
    tl.store(state + 11 * P + rows, fits.to(tl.float32), mask=inside)


@triton.jit
def sum_kernel(
    unit, x, state, near, out, n, d, P, rank, pivot, kappa_rho, kappa_aic, margin, temperature, fixed_beta, offset,
    lowest, share,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr, B: tl.constexpr,
    GIVEN: tl.constexpr, FIT: tl.constexpr, GATE: tl.constexpr, DE: tl.constexpr, EXACT: tl.constexpr,
    NEAR: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """The gate, whose pivot every program finds for itself, and the loss of every anchor.

    The program that is done last writes ``share`` times their sum to ``out``.
    """
    count = 2 * n
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < count
    middle = pivot
    if not GIVEN:
        middle = ranked(state, count, rank, B)
    rho, daic = (
        tl.load(state + rows, mask=inside, other=1.0),
        tl.load(state + 2 * P + rows, mask=inside, other=0.0),
    )
    lam = gate(rho, daic, middle, kappa_rho, kappa_aic, margin, GATE)
    lam = tl.where(tl.load(state + 11 * P + rows, mask=inside, other=0.0) > 0, lam, 0.0)
    beta = tl.full((BM,), 1.0, tl.float32) * fixed_beta
    if FIT:
        beta = tl.load(state + P + rows, mask=inside, other=0.0)
    g, w = (1 - lam) / temperature, lam * beta
    own = tl.where(inside, (rows + n) % count, -1)
    top, sum_e, _, _ = sum_rows(
        x, x, state + 9 * P, near, near, state + 12 * P, rows, tl.load(state + 9 * P + rows), own, rows, rows,
        g * LOG2E, w, count, count, 0, count, offset, lowest,
        BM, BN, DP, DB, PARTS, True, False, False, True, False, EXACT, NEAR,
    )  # fmt: skip
    apart = exact_pairs(unit, unit, rows, own, inside, d, d, d, BM, DE)
    loss, base, pull, _ = settle(top, sum_e, apart, g * LOG2E, w, offset, lowest, False)
    tl.store(state + 3 * P + rows, lam, mask=inside)
    tl.store(state + 4 * P + rows, base, mask=inside)
    tl.store(state + 5 * P + rows, pull, mask=inside)
    tl.store(state + 6 * P + rows, g, mask=inside)
    tl.store(state + 7 * P + rows, w, mask=inside)
    tl.store(state + 10 * P + rows, loss, mask=inside)
    tl.debug_barrier()  # what all threads stored comes before what one of them counts
    done = tl.atomic_add(near + P * EXACT + P // FLAGS, 1, sem="acq_rel")
    if done == tl.num_programs(0) - 1:
        at = tl.arange(0, B)
        each = tl.load(state + 10 * P + at, mask=at < count, other=0.0, volatile=True)
        tl.store(out, tl.sum(each) * share)


@triton.jit
def gradient_kernel(
    unit, x, state, near, out, grad_i, grad_j, n, d, P, share, offset, lowest,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr,
    EXACT: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Gradient of ``share`` times the sum of the losses, back through the normalisation."""
    count = 2 * n
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < count
    flags = near + P * EXACT
    acc = gradient_rows(
        x, x, state + 9 * P, state + 6 * P, state + 7 * P, state + 4 * P, state + 5 * P, out, near, near, near,
        near, state + 12 * P, flags, rows, tl.load(state + 9 * P + rows), tl.where(inside, (rows + n) % count, -1),
        rows, rows, tl.load(flags + tl.program_id(0) * BM // FLAGS), 0, count, count, 0, count, offset, lowest,
        BM, BN, DP, DB, PARTS, True, False, False, True, True, True, EXACT, FLAGS, True,
    )  # fmt: skip
    acc *= tl.load(out) * share
    k = tl.arange(0, DB)
    mask = inside[:, None] & (k < d)[None, :]
    one = tl.load(unit + rows[:, None] * d + k[None, :], mask=mask, other=0.0)
    acc -= one * tl.sum(acc * one, axis=1)[:, None]
    acc *= tl.load(state + 8 * P + rows)[:, None]
    kind = grad_i.dtype.element_ty
    tl.store(grad_i + rows[:, None] * d + k[None, :], acc.to(kind), mask=mask & (rows < n)[:, None])
    tl.store(grad_j + (rows - n)[:, None] * d + k[None, :], acc.to(kind), mask=mask & (rows >= n)[:, None])
