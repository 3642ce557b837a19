# mypy: ignore-errors
"""WEINCE of a small batch of two views in five launches: at 256 pairs the launches are what costs.

The rows come as they are, and their gradient goes back through the normalisation. Between :func:`keys_kernel` and
:func:`sum_kernel` runs the fit of the other engine. ``state`` holds lines of ``P`` numbers, see
:data:`weince.engines.small.LINES`; ``near`` the columns of each row's nearest negatives, then flags, then a counter,
then, from the next multiple of ``P``, whether a fit was made.
"""

import triton
import triton.language as tl

from weince.engines.kernels.contrast import gradient_rows, settle, sum_rows
from weince.engines.kernels.fit import gate, ranked
from weince.engines.kernels.tail import INFINITE, keyed
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
def keys_kernel(
    x, state, halves, n, P,
    BM: tl.constexpr, CP: tl.constexpr, BK: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Shortfalls of some rows and all columns, ``CP`` to a row, each a column and then bits; infinite where a column
    is no negative."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.arange(0, CP)
    there = tl.minimum(cols, P - 1)
    acc = wide_products(x, rows, x, there, tl.zeros((BM, CP), tl.float32), DP, BK, PARTS)
    apart = shortfall(acc, tl.load(state + 9 * P + rows), state + 9 * P, there, PARTS)
    own = (rows + n) % (2 * n)
    keep = (cols[None, :] != own[:, None]) & (cols[None, :] != rows[:, None]) & (cols < 2 * n)[None, :]
    bits = tl.where(keep, apart.to(tl.int32, bitcast=True), INFINITE)
    keys = halves.to(tl.pointer_type(tl.int64), bitcast=True)
    tl.store(keys + rows[:, None] * CP + cols[None, :], keyed(bits, cols), mask=(rows < 2 * n)[:, None])


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
    made = near + P * EXACT + P
    lam = tl.where(tl.load(made + rows, mask=inside, other=0) > 0, lam, 0.0)
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
