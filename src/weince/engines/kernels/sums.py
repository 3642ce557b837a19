# mypy: ignore-errors
# ruff: noqa: RUF005, SIM108 - Triton knows neither of what they propose
"""Sums over the candidates of every anchor, several in one pass over the tiles, and their gradient by a second pass.

A logit is ``g s + b - w log(offset + max(d, lowest)) + v log(max(2 - d, floor))`` of a score ``s`` and its shortfall
``d``. The coefficients ``g, b, w, v`` are numbers of an anchor or of all; ``offset``, ``lowest`` and ``floor`` are
the same for all sums of a pass. Inside the kernels logits are in bits, that is, divided by ``log(2)``.

Or a logit is what ``FUNCTION`` makes of the score and of the same four numbers: a user's link, see
:mod:`weince.engines.kernels.own`. A pass has one such function at the most.

``SPEC`` says what the sums of a pass are, 16 bits for each:

- bits 0 and 1: ``LSE``, ``SUM`` or ``SOFTPLUS``
- ``SAME_VIEW``: among the negatives of the anchor's view; ``OF_POSITIVES``: among the positives by label
- ``USES_B, USES_W, USES_V``: which coefficients are not 0 (``g`` is always read)
- ``TOP_KNOWN``: the nearest negative has the largest logit, and it is known
- ``BY_FUNCTION``: ``FUNCTION`` gives the logits
- bits 12 to 15: number of the thresholds, from 1, above which a shortfall takes no part; 0 for none

``ANY`` is all of them or-ed together. ``SUMS``: how many sums there are. ``FORM``: coefficients to a sum, 1 (``g``
alone) or 4; ``EACH``: one for each anchor. ``NEAREST``: candidates of an anchor whose exact shortfalls are known, 0
for none; the first four are negatives.
"""

import triton
import triton.language as tl

from weince.engines.kernels.tiles import (
    BY_VALUE,
    IGNORE,
    LN2,
    LOG2E,
    along,
    anchor_roles,
    fast_exp2,
    fast_inverse,
    fast_log2,
    gap,
    pair_roles,
    part,
    products,
    sharpen,
    shortfall,
    span_of,
    tile,
    touches,
    view_of,
    wide_products,
)

LSE = tl.constexpr(0)
SUM = tl.constexpr(1)
SOFTPLUS = tl.constexpr(2)
KIND = tl.constexpr(3)
SAME_VIEW = tl.constexpr(4)
OF_POSITIVES = tl.constexpr(8)
USES_B = tl.constexpr(16)
USES_W = tl.constexpr(32)
USES_V = tl.constexpr(64)
TOP_KNOWN = tl.constexpr(128)
BY_FUNCTION = tl.constexpr(256)

# Bits of ``LEARN``: the coefficients whose derivatives are wanted.
LEARN_G = tl.constexpr(1)
LEARN_B = tl.constexpr(2)
LEARN_W = tl.constexpr(4)
LEARN_V = tl.constexpr(8)

SLOTS = tl.constexpr(6)  # numbers that a span of columns leaves for a sum: top, total, then weighted sums


@triton.jit
def put(values, at: tl.constexpr, value, COUNT: tl.constexpr):
    """A tuple with another value at one place."""
    result = ()
    for k in tl.static_range(COUNT):
        if k == at:
            result = result + (value,)
        else:
            result = result + (values[k],)
    return result


@triton.jit
def coefficient(coefs, row, at, inside, n_anchors, EACH: tl.constexpr):
    """One coefficient of some anchors."""
    if EACH:
        value = tl.load(coefs + row * n_anchors + at, mask=inside, other=0.0)
    else:
        value = tl.zeros(at.shape, tl.float32) + tl.load(coefs + row)
    return value


@triton.jit
def link_of(coefs, thresholds, row, at, n_anchors, ONE: tl.constexpr, EACH: tl.constexpr):
    """``g, b, w, v`` of some anchors for logits in bits, or as a function takes them, and the largest shortfall that
    takes part; 0 for none."""
    inside = at < n_anchors
    g = coefficient(coefs, row, at, inside, n_anchors, EACH)
    b = tl.zeros_like(g)
    w = b
    v = b
    limit = b
    if USES_B & ONE:
        b = coefficient(coefs, row + 1, at, inside, n_anchors, EACH)
    if not BY_FUNCTION & ONE:  # w and v are factors of logarithms to the base 2 already
        g *= LOG2E
        b *= LOG2E
    if USES_W & ONE:
        w = coefficient(coefs, row + 2, at, inside, n_anchors, EACH)
    if USES_V & ONE:
        v = coefficient(coefs, row + 3, at, inside, n_anchors, EACH)
    if ONE >> 12 > 0:
        limit = tl.load(thresholds + ((ONE >> 12) - 1) * n_anchors + at, mask=inside, other=0.0)
    return g, b, w, v, limit


@triton.jit
def logits(constant, link, d, log_gap, log_rest, ONE: tl.constexpr, ACROSS: tl.constexpr):
    """In bits, but for what ``constant`` leaves out: ``constant - g d - w log2(gap) + v log2(2 - d)``."""
    z = along(constant, ACROSS) - along(link[0], ACROSS) * d
    if USES_W & ONE:
        z -= along(link[2], ACROSS) * log_gap
    if USES_V & ONE:
        z += along(link[3], ACROSS) * log_rest
    return z


@triton.jit
def by_function(constant, link, d, FUNCTION: tl.constexpr, ACROSS: tl.constexpr):
    """Logits in bits, with ``constant`` added, their slopes by the score, and their derivatives by the four numbers
    of the link. The compiler drops what nobody uses."""
    found = FUNCTION(
        1 - d, along(link[0], ACROSS), along(link[1], ACROSS), along(link[2], ACROSS), along(link[3], ACROSS)
    )
    z = found[0] * LOG2E + along(constant, ACROSS)
    return z, found[1], (found[2], found[3], found[4], found[5])


@triton.jit
def constant_of(link, ONE: tl.constexpr):
    """What does not depend on the score in the logits of some anchors."""
    constant = link[0] + link[1]
    if BY_FUNCTION & ONE:
        constant = tl.zeros_like(constant)
    return constant


@triton.jit
def log1p_bits(u):
    """``log2(1 + u)`` of ``0 <= u <= 1`` with all digits of a small one: ``2 atanh(u / (2 + u))`` as a series."""
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
    """What a sum starts from: the constant of its logits; and top, total, and weighted sums of ``s``, of 1, and of
    both logarithms. A log-sum-exp is relative to ``top``, which rises with what comes unless it is known."""
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
    """Derivatives of a sum by a coefficient."""
    product = weight * effect
    if BY_FUNCTION & ONE:  # which need not be finite where a pair takes no part
        product = tl.where(weight > 0, product, 0.0)
    return product


@triton.jit
def add_tile(state, z, effects, ONE: tl.constexpr, LEARN: tl.constexpr):
    """A sum with one more tile of logits, ``-inf`` where a pair takes no part. ``effects``: the derivatives of the
    logits by ``g, b, w, v``."""
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
        weight = tl.where(z > float("-inf"), 1.0, 0.0)
        value = tl.where(z > float("-inf"), z, 0.0)
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
def take_part(z, rows, cols, own, view, view_c, id_c, label_c, ignore_ptr, n_rows, n_cols, stride_a, stride_c,
              limit, d, touched, ROLES: tl.constexpr, ONE: tl.constexpr):  # fmt: skip
    """Logits of a tile, ``-inf`` where a pair takes no part in a sum."""
    if touched:
        is_negative, is_positive = pair_roles(
            rows, cols, own, id_c, label_c, ignore_ptr, n_rows, n_cols, stride_a, stride_c, ROLES, False
        )
        if OF_POSITIVES & ONE:
            is_negative = is_positive
        z = tl.where(is_negative, z, float("-inf"))
    if SAME_VIEW & ONE:
        z = tl.where(view[:, None] == view_of(view_c, cols, n_cols)[None, :], z, float("-inf"))
    if ONE >> 12 > 0:
        z = tl.where(d <= limit[:, None], z, float("-inf"))
    return z


@triton.jit
def sum_kernel(
    x, inv_x, y, inv_y,
    positive_ptr, self_ptr, id_a, id_c, label_a, label_c, view_a, view_c, ignore_ptr,
    near_cols, near_d, coefs, thresholds, pieces,
    n_rows, n_cols, span, stride_a, stride_c, offset, lowest, floor,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr, ROLES: tl.constexpr,
    SPEC: tl.constexpr, ANY: tl.constexpr, SUMS: tl.constexpr, FORM: tl.constexpr, EACH: tl.constexpr,
    FUNCTION: tl.constexpr, NEAREST: tl.constexpr, NEAR: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """What ``span`` columns add to every sum: for each sum, slot and span a line with a number of every row."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < n_rows
    inv_rows = tl.load(inv_x + rows)
    own = anchor_roles(rows, n_rows, positive_ptr, self_ptr, id_a, label_a, ROLES)
    reach = span_of(own)
    a = part(x, rows, 0, PARTS * DP, DB)
    a_low = a
    if PARTS == 2:
        a_low = part(x, rows, DP, PARTS * DP, DB)
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
        close = tl.min(least) < NEAR
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
        d = tile(a, a_low, x, rows, inv_rows, y, cols, inv_y, BM, BN, DP, DB, PARTS)
        if NEAREST > 0:  # noqa: SIM102 - known when compiled, and when run
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
                z, rows, cols, own, view, view_c, id_c, label_c, ignore_ptr, n_rows, n_cols, stride_a, stride_c,
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
    """What the spans left to the sums ``(SUMS, rows)`` and their derivatives by coefficients, ``FORM`` lines each."""
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
            value = tl.where(total > 0, (top + tl.log2(tl.maximum(total, 1e-37))) * LN2, float("-inf"))
            share = 1 / tl.maximum(total, 1e-37)
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


@triton.jit
def worth_of(link, values, weights, row, at, n_anchors, ONE: tl.constexpr):
    """Constant of the logits of some anchors, relative to the sum, and ``g, w, v`` times the sum's weight; where a
    function gives the logits, that weight instead of ``g``."""
    inside = at < n_anchors
    worth = tl.load(weights + row * n_anchors + at, mask=inside, other=0.0)
    constant = constant_of(link, ONE)
    if KIND & ONE == LSE:
        value = tl.load(values + row * n_anchors + at, mask=inside, other=0.0)
        # Without candidates there is nothing to weigh, whatever the logits are.
        constant -= tl.where(value > float("-inf"), value, float("inf")) * LOG2E
    by_score = link[0] * LN2 * worth
    if BY_FUNCTION & ONE:
        by_score = worth
    return constant, by_score, link[2] * worth, link[3] * worth


@triton.jit
def pull_of(
    link, worth, d, log_gap, log_rest, inv_gap, inv_rest, is_view,
    ONE: tl.constexpr, FUNCTION: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Derivatives of a weighed sum by the scores of a tile, whoever takes part by role."""
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
        pull = tl.where(d <= along(link[4], ACROSS), pull, 0.0)
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
    """Gradient of the rows of ``x``, ``(rows, width)``: tiles of the derivative by scores, times ``y``, over some
    columns.

    ``values``, ``weights``: of every sum and anchor, the sum and what it is worth. ``FROM_ROWS``: the rows are
    anchors. ``FROM_COLS``: the columns are. Both where all rows meet all rows: a tile then serves the pair in both
    roles. Rows and columns beyond the last need no mask: their operands or their weights are 0. ``ADD``: to what is
    there.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * DB
    inv_rows = tl.load(inv_x + rows)
    a = part(x, rows, 0, PARTS * DP, DB)
    a_low = a
    if PARTS == 2:
        a_low = part(x, rows, DP, PARTS * DP, DB)
    own = (rows, rows, rows, rows)
    close_rows = 0
    links = ()
    worths = ()
    view = rows
    if SAME_VIEW & ANY:  # which of the two it is says nothing: a row is of the same view in both roles
        view = view_of(view_a if FROM_ROWS else view_c, rows, n_rows)
    if FROM_ROWS:
        own = anchor_roles(rows, n_rows, positive_ptr, self_ptr, id_a, label_a, ROLES)
        if NEAREST > 0:
            close_rows = tl.load(close_ptr + tl.program_id(0) * BM // FLAGS)
            if BM > FLAGS:
                close_rows += tl.load(close_ptr + tl.program_id(0) * BM // FLAGS + 1)
        for k in tl.static_range(SUMS):
            own_link = link_of(coefs, thresholds, k * FORM, rows, n_rows, (SPEC >> (16 * k)) & 0xFFFF, EACH)
            links = links + (own_link,)
            worths = worths + (
                worth_of(own_link, values, weights, k, rows, n_rows, (SPEC >> (16 * k)) & 0xFFFF),
            )
    reach = span_of(own)
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
        d = shortfall(score, inv_rows, inv_y, cols, PARTS)
        if NEAREST > 0 and FROM_ROWS:  # noqa: SIM102
            if close_rows > 0:
                d = sharpen(d, cols, near_cols, near_d, rows, n_rows, False, NEAREST)
        if NEAREST > 0 and FROM_COLS:  # noqa: SIM102
            if tl.load(close_ptr + start // FLAGS) > 0:
                d = sharpen(d, cols, near_cols, near_d, rows, n_cols, True, NEAREST)
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
                    links[k], worths[k], d, log_gap, log_rest, inv_gap, inv_rest, is_view,
                    (SPEC >> (16 * k)) & 0xFFFF, FUNCTION, False,
                )  # fmt: skip
                if OF_POSITIVES & (SPEC >> (16 * k)):
                    pulled_positives += pull
                else:
                    pulled += pull
            if IGNORE & ROLES:  # the only role that may differ if the two are exchanged
                is_negative, _ = pair_roles(
                    rows,
                    cols,
                    own,
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
                    d, log_gap, log_rest, inv_gap, inv_rest, is_view, (SPEC >> (16 * k)) & 0xFFFF, FUNCTION, True,
                )  # fmt: skip
                if OF_POSITIVES & (SPEC >> (16 * k)):
                    pulled_positives += pull
                else:
                    more += pull
            if IGNORE & ROLES or not FROM_ROWS:
                theirs = anchor_roles(cols, n_cols, positive_ptr, self_ptr, id_a, label_a, ROLES)
                is_negative, is_positive = pair_roles(
                    cols,
                    rows,
                    theirs,
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
                    own,
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
