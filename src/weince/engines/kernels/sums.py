# mypy: ignore-errors
# ruff: noqa: RUF005, SIM108 - Triton does not support the suggested syntax
"""Sums over the candidates of every anchor, several in one pass over the tiles. ``logits.py`` defines the sums."""

import triton
import triton.language as tl

from weince.engines.kernels.logits import (
    BY_FUNCTION,
    KIND,
    LSE,
    OF_POSITIVES,
    SAME_VIEW,
    SOFTPLUS,
    TOP_KNOWN,
    USES_V,
    USES_W,
    by_function,
    constant_of,
    link_of,
    logits,
)
from weince.engines.kernels.tiles import (
    BY_VALUE,
    LN2,
    LOG2E,
    anchor_roles,
    at_least_0,
    both_parts,
    fast_exp2,
    fast_inverse,
    fast_log2,
    gap,
    pair_roles,
    sharpen,
    span_of,
    tile,
    touches,
    view_of,
)

# Bits of ``LEARN``: the coefficients whose derivatives are wanted.
LEARN_G = tl.constexpr(1)
LEARN_B = tl.constexpr(2)
LEARN_W = tl.constexpr(4)
LEARN_V = tl.constexpr(8)

SLOTS = tl.constexpr(6)  # numbers per sum that a span of columns stores: top, total, then weighted sums


@triton.jit
def put(values, at: tl.constexpr, value, COUNT: tl.constexpr):
    """A copy of a tuple with another value at one place."""
    result = ()
    for k in tl.static_range(COUNT):
        if k == at:
            result = result + (value,)
        else:
            result = result + (values[k],)
    return result


@triton.jit
def log1p_bits(u):
    """``log2(1 + u)`` for ``0 <= u <= 1``, accurate also for small ``u``: the series of ``2 atanh(u / (2 + u))``."""
    s = u * fast_inverse(2 + u)
    z = s * s
    series = z * (1 / 13) + 1 / 11
    series = z * series + 1 / 9
    series = z * series + 1 / 7
    series = z * series + 1 / 5
    series = z * series + 1 / 3
    return (2 * s + 2 * s * z * series) * LOG2E


@triton.jit
def start_of(link, nearest, offset, lowest, floor, ONE: tl.constexpr):
    """Initial state of a sum: the constant of its logits; and top, total, and weighted sums of ``s``, of 1, and of
    both logarithms. A log-sum-exp is relative to ``top``, the largest logit so far, or of all if that is known."""
    constant = constant_of(link, ONE)
    top = tl.zeros_like(constant)
    nothing = top
    if TOP_KNOWN & ONE:
        top = constant - link[0] * nearest
        if USES_W & ONE:
            top -= link[2] * tl.log2(gap(nearest, offset, lowest))
        if USES_V & ONE:
            top += link[3] * tl.log2(tl.maximum(2 - nearest, floor))
        constant -= top
    elif KIND & ONE == LSE:
        top = nothing - 1e30
    return constant, (top, nothing, nothing, nothing, nothing, nothing)


@triton.jit
def weighed(weight, effect, ONE: tl.constexpr):
    """Contributions of a tile's pairs to the derivative of a sum by a coefficient."""
    product = weight * effect
    if BY_FUNCTION & ONE:  # effects need not be finite where a pair takes no part
        product = tl.where(weight != 0, product, 0.0)
    return product


@triton.jit
def add_tile(state, z, effects, ONE: tl.constexpr, LEARN: tl.constexpr):
    """Add a tile of logits to a sum; they are ``-inf`` where a pair takes no part. ``effects``: derivatives of the
    logits by ``g, b, w, v``, up to constant factors that ``finish_kernel`` applies."""
    top, total, by_g, by_b, by_w, by_v = state
    shrink = 1.0
    if KIND & ONE == LSE:
        if not TOP_KNOWN & ONE:
            higher = tl.maximum(top, tl.max(z, axis=1))
            shrink = tl.exp2(top - higher)
            top = higher
            z -= higher[:, None]
        weight = fast_exp2(z)
        value = weight
    elif KIND & ONE == SOFTPLUS:
        odds = fast_exp2(-tl.abs(z))
        weight = tl.where(z < 0, odds, 1.0) * fast_inverse(1 + odds)
        value = tl.maximum(z, 0.0) + log1p_bits(odds)
    else:
        weight = tl.where(z != float("-inf"), 1.0, 0.0)
        value = tl.where(z != float("-inf"), z, 0.0)
    total = total * shrink + tl.sum(value, axis=1)
    if LEARN_G & LEARN:
        by_g = by_g * shrink + tl.sum(weighed(weight, effects[0], ONE), axis=1)
    if LEARN_B & LEARN:
        by_b = by_b * shrink + tl.sum(weighed(weight, effects[1], ONE), axis=1)
    if LEARN_W & LEARN:
        by_w = by_w * shrink + tl.sum(weighed(weight, effects[2], ONE), axis=1)
    if LEARN_V & LEARN:
        by_v = by_v * shrink + tl.sum(weighed(weight, effects[3], ONE), axis=1)
    return top, total, by_g, by_b, by_w, by_v


@triton.jit
def take_part(z, rows, cols, roles, view, view_c, id_c, label_c, ignore_ptr, n_rows, n_cols, stride_a, stride_c,
              limit, d, touched, ROLES: tl.constexpr, ONE: tl.constexpr):  # fmt: skip
    """Logits of a tile, ``-inf`` where a pair takes no part in a sum."""
    if touched:
        is_negative, is_positive = pair_roles(
            rows, cols, roles, id_c, label_c, ignore_ptr, n_rows, n_cols, stride_a, stride_c, ROLES, False
        )
        if OF_POSITIVES & ONE:
            is_negative = is_positive
        z = tl.where(is_negative, z, float("-inf"))
    if SAME_VIEW & ONE:
        z = tl.where(view[:, None] == view_of(view_c, cols, n_cols)[None, :], z, float("-inf"))
    if ONE >> 12 > 0:
        z = tl.where(d > limit[:, None], float("-inf"), z)  # this way round, a NaN takes part
    return z


@triton.jit
def sum_kernel(
    x, inv_x, y, inv_y,
    positive_ptr, self_ptr, id_a, id_c, label_a, label_c, view_a, view_c, ignore_ptr,
    near_cols, near_d, coefs, thresholds, pieces,
    n_rows, n_cols, span, stride_a, stride_c, offset, lowest, floor,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr, ROLES: tl.constexpr,
    SPEC: tl.constexpr, ANY: tl.constexpr, SUMS: tl.constexpr, FORM: tl.constexpr, EACH: tl.constexpr,
    FUNCTION: tl.constexpr, NEAREST: tl.constexpr, CLOSE: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """Contribution of ``span`` columns to every sum: one line per sum, slot and span, with a number for every row."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < n_rows
    inv_rows = tl.load(inv_x + rows)
    roles = anchor_roles(rows, n_rows, positive_ptr, self_ptr, id_a, label_a, ROLES)
    reach = span_of(roles)
    a, a_low = both_parts(x, rows, 0, DP, DB, PARTS)
    view = rows
    if SAME_VIEW & ANY:
        view = view_of(view_a, rows, n_rows)
    close = False
    nearest = tl.full((BM,), 3.0, tl.float32)
    if NEAREST > 0:
        least = nearest
        for k in tl.static_range(NEAREST):
            least = tl.minimum(least, tl.load(near_d + rows * NEAREST + k, mask=inside, other=3.0))
            if k == 3:
                nearest = least
        close = tl.min(least) < CLOSE
    nearest = tl.minimum(nearest, 2.0)
    links = ()
    constants = ()
    states = ()
    for k in tl.static_range(SUMS):
        link = link_of(coefs, thresholds, k * FORM, rows, n_rows, (SPEC >> (16 * k)) & 0xFFFF, EACH)
        constant, state = start_of(link, nearest, offset, lowest, floor, (SPEC >> (16 * k)) & 0xFFFF)
        links = links + (link,)
        constants = constants + (constant,)
        states = states + (state,)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, n_cols), BN):
        cols = start + tl.arange(0, BN)
        d = at_least_0(tile(a, a_low, x, rows, inv_rows, y, cols, inv_y, BM, BN, DP, DB, PARTS))
        if NEAREST > 0:  # noqa: SIM102 - one is known at compile time, one at run time
            if close:
                d = sharpen(d, cols, near_cols, near_d, rows, n_rows, False, NEAREST)
        log_gap = d
        log_rest = d
        if USES_W & ANY:
            log_gap = fast_log2(gap(d, offset, lowest))
        if USES_V & ANY:
            log_rest = fast_log2(tl.maximum(2 - d, floor))
        touched = True
        if (BY_VALUE & ROLES) == 0:
            touched = touches(start, reach, n_cols, BN)
        for k in tl.static_range(SUMS):
            if BY_FUNCTION & (SPEC >> (16 * k)):
                z, _, effects = by_function(constants[k], links[k], d, FUNCTION, False)
            else:
                z = logits(constants[k], links[k], d, log_gap, log_rest, (SPEC >> (16 * k)) & 0xFFFF, False)
                effects = (1 - d, 1.0, log_gap, log_rest)
            z = take_part(
                z, rows, cols, roles, view, view_c, id_c, label_c, ignore_ptr, n_rows, n_cols, stride_a, stride_c,
                links[k][4], d, touched, ROLES, (SPEC >> (16 * k)) & 0xFFFF,
            )  # fmt: skip
            more = add_tile(states[k], z, effects, (SPEC >> (16 * k)) & 0xFFFF, LEARN)
            states = put(states, k, more, SUMS)
    step = tl.num_programs(1) * n_rows
    for k in tl.static_range(SUMS):
        line = pieces + k * SLOTS * step + tl.program_id(1) * n_rows + rows
        for slot in tl.static_range(SLOTS):
            if slot < 2 or (LEARN >> (slot - 2)) & 1:
                tl.store(line + slot * step, states[k][slot], mask=inside)


@triton.jit
def finish_kernel(
    pieces, values, effects, n_rows, splits,
    BR: tl.constexpr, SPEC: tl.constexpr, SUMS: tl.constexpr, FORM: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """Combine the spans into sums ``(SUMS, rows)`` and their derivatives by coefficients, ``FORM`` lines each."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = rows < n_rows
    step = splits * n_rows
    for k in tl.static_range(SUMS):
        top = tl.full((BR,), -1e30, tl.float32)
        total = tl.zeros((BR,), tl.float32)
        by = (total, total, total, total)
        for split in range(splits):
            line = pieces + k * SLOTS * step + split * n_rows + rows
            here = tl.load(line, mask=inside, other=0.0)
            old, new = 1.0, 1.0
            if KIND & (SPEC >> (16 * k)) == LSE:
                higher = tl.maximum(top, here)
                old, new = tl.exp2(top - higher), tl.exp2(here - higher)
                top = higher
            total = total * old + tl.load(line + step, mask=inside, other=0.0) * new
            for j in tl.static_range(4):
                if (LEARN >> j) & 1:
                    more = tl.load(line + (2 + j) * step, mask=inside, other=0.0)
                    by = put(by, j, by[j] * old + more * new, 4)
        if KIND & (SPEC >> (16 * k)) == LSE:
            positive = tl.maximum(total, 1e-37, tl.PropagateNan.ALL)  # a NaN must stay NaN
            value = tl.where(total == 0, float("-inf"), (top + tl.log2(positive)) * LN2)
            share = 1 / positive
        else:
            value = total * LN2
            share = tl.full((BR,), 1.0, tl.float32)
        tl.store(values + k * n_rows + rows, value, mask=inside)
        for j in tl.static_range(FORM):
            if LEARN > 0:
                effect = by[j] * share
                if not BY_FUNCTION & (SPEC >> (16 * k)):
                    if j == 2:
                        effect = -effect
                    if j > 1:
                        effect = effect * LN2
                tl.store(effects + (k * FORM + j) * n_rows + rows, effect, mask=inside)
