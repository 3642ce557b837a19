# mypy: ignore-errors
# ruff: noqa: RUF005 - Triton does not support the suggested syntax
"""Sums over the candidates of every anchor, several in one pass over the tiles.

Of the candidates that take part in a sum, with logits ``z`` that :mod:`weince.engines.kernels.translate` writes:

- ``"lse"``: ``log sum exp(z)``; its derivative by a parameter ``p`` of the link is ``sum softmax(z) dz/dp``
- ``"softplus"``: ``sum log(1 + exp(z))``; its derivative is ``sum sigmoid(z) dz/dp``
- ``"sum"``: ``sum z``; its derivative is ``sum dz/dp``

Kernels count in bits, ``z / log(2)``, since ``2^x`` is one instruction. A log-sum-exp is kept as ``top`` and
``total``: ``top + log2(total)`` with ``total = sum 2^(z - top)``.
"""

import triton
import triton.language as tl

from weince.engines.kernels.elementwise import fast_exp2, fast_inverse
from weince.engines.kernels.tiles import both_parts, sharpen, tile

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


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
def weighed(top, z, KIND: tl.constexpr, TOP_KNOWN: tl.constexpr):
    """For a tile of logits in bits, ``-inf`` where a pair takes no part: the new top, the factor of what was summed
    relative to the old one, the derivatives of the sum by the logits, and what each pair adds."""
    shrink = 1.0
    if KIND == "lse":
        if not TOP_KNOWN:
            higher = tl.maximum(top, tl.max(z, axis=1))
            shrink = tl.exp2(top - higher)
            top = higher
            z -= higher[:, None]
        weight = fast_exp2(z)
        value = weight
    elif KIND == "softplus":
        odds = fast_exp2(-tl.abs(z))
        weight = tl.where(z < 0, odds, 1.0) * fast_inverse(1 + odds)
        value = tl.maximum(z, 0.0) + log1p_bits(odds)
    else:
        weight = tl.where(z != float("-inf"), 1.0, 0.0)
        value = tl.where(z != float("-inf"), z, 0.0)
    return top, shrink, weight, value


@triton.jit
def sum_kernel(
    x, inv_x, y, inv_y, anchor_columns, candidate_columns, numbers, ignore, near_cols, near_d, pieces, unless,
    n_rows, n_cols, span,
    BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PARTS: tl.constexpr, COSINE: tl.constexpr,
    ANCHORS: tl.constexpr, CANDIDATES: tl.constexpr, REACH: tl.constexpr, TOUCHES: tl.constexpr, PAIRS: tl.constexpr,
    KEEP: tl.constexpr, KINDS: tl.constexpr, BASES: tl.constexpr, TOPS: tl.constexpr, OWNERS: tl.constexpr,
    NEAREST: tl.constexpr, CLOSE: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """Contribution of ``span`` columns to every sum and derivative, a number for every row: one line for each span of
    each sum's top, then of each sum's total, then of each derivative.

    ``KINDS``: the kind of each sum; the weights of a ``"moment"`` are those of sum ``BASES`` times a power of ``d``.
    ``TOPS``: whether the nearest negative has its largest logit and is known.
    ``OWNERS``: for each derivative, which sum it belongs to. ``NEAREST``: number of candidates per anchor with known
    exact shortfalls, 0 for none; the first four are negatives. ``CLOSE``: they are used below this shortfall.
    ``STOPS``: if ``unless`` holds, nobody needs the sums.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < n_rows
    inv_rows = tl.load(inv_x + rows)
    a, a_low = both_parts(x, rows, 0, DP, DB, PARTS)
    anchor = ANCHORS(anchor_columns, numbers, 0, 0, rows, n_rows)
    reach = REACH(anchor)
    close = False
    nearest = tl.full((BM,), 3.0, tl.float32)
    if NEAREST > 0:
        least = nearest
        for k in tl.static_range(NEAREST):
            least = tl.minimum(least, tl.load(near_d + rows * NEAREST + k, mask=inside, other=3.0))
            if k == 3:
                nearest = least
        close = tl.min(least) < CLOSE
    # The values of an anchor begin with the constants of its logits: relative to the top if that is known.
    known = PAIRS(tl.minimum(nearest, 2.0)[:, None], anchor, anchor, False)
    tops = ()
    totals = ()
    shifted = ()
    for k in tl.static_range(len(KINDS)):
        top = tl.zeros((BM,), tl.float32)
        totals = totals + (top,)
        if TOPS[k]:
            top = tl.reshape(known[k], (BM,))
        elif KINDS[k] == "lse":
            top = top - 1e30
        tops = tops + (top,)
        shifted = shifted + ((anchor[k] - top) if TOPS[k] else anchor[k],)
    for k in tl.static_range(len(KINDS), len(anchor)):
        shifted = shifted + (anchor[k],)
    derivatives = ()
    for _ in tl.static_range(len(OWNERS)):
        derivatives = derivatives + (tl.zeros((BM,), tl.float32),)
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, n_cols)
    if STOPS:
        end = tl.where(tl.load(unless).to(tl.int32) != 0, begin, end)
    for start in range(begin, end, BN):
        cols = start + tl.arange(0, BN)
        d = tile(a, a_low, x, rows, inv_rows, y, cols, inv_y, BM, BN, DP, DB, PARTS, COSINE)
        if NEAREST > 0:  # noqa: SIM102 - one is known at compile time, one at run time
            if close:
                d = sharpen(d, cols, near_cols, near_d, rows, n_rows, False, NEAREST)
        candidate = CANDIDATES(candidate_columns, cols, n_cols)
        values = PAIRS(d, shifted, candidate, False)
        touched = TOUCHES(reach, start, n_cols, BN)
        z = KEEP(
            values, d, shifted, rows, n_rows, candidate, cols, n_cols, ignore, touched, float("-inf"), False
        )
        new_tops = ()
        new_totals = ()
        shrinks = ()
        weights = ()
        for k in tl.static_range(len(KINDS)):
            if KINDS[k] == "moment":
                top, shrink = new_tops[BASES[k]], shrinks[BASES[k]]
                weight = weights[BASES[k]] * z[k]
                value = weight
            else:
                top, shrink, weight, value = weighed(tops[k], z[k], KINDS[k], TOPS[k])
            new_tops = new_tops + (top,)
            new_totals = new_totals + (totals[k] * shrink + tl.sum(value, axis=1),)
            shrinks = shrinks + (shrink,)
            weights = weights + (weight,)
        tops = new_tops
        totals = new_totals
        new = ()
        for e in tl.static_range(len(OWNERS)):
            weight = weights[OWNERS[e]]
            # A derivative need not be finite where a pair takes no part.
            product = tl.where(weight != 0, weight * values[len(KINDS) + e], 0.0)
            new = new + (derivatives[e] * shrinks[OWNERS[e]] + tl.sum(product, axis=1),)
        derivatives = new
    step = tl.num_programs(1) * n_rows
    line = pieces + tl.program_id(1) * n_rows + rows
    for k in tl.static_range(len(KINDS)):
        tl.store(line + k * step, tops[k], mask=inside)
        tl.store(line + (len(KINDS) + k) * step, totals[k], mask=inside)
    for e in tl.static_range(len(OWNERS)):
        tl.store(line + (2 * len(KINDS) + e) * step, derivatives[e], mask=inside)


@triton.jit
def finish_kernel(
    pieces, values, derivatives, n_rows, splits,
    BR: tl.constexpr, KINDS: tl.constexpr, OWNERS: tl.constexpr,
):  # fmt: skip
    """Combine the spans into sums ``(sums, rows)`` and their derivatives ``(derivatives, rows)``."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = rows < n_rows
    step = splits * n_rows
    for k in tl.static_range(len(KINDS)):
        top = tl.full((BR,), -1e30, tl.float32)
        total = tl.zeros((BR,), tl.float32)
        for split in range(splits):
            line = pieces + k * step + split * n_rows + rows
            here = tl.load(line, mask=inside, other=0.0)
            old, new = 1.0, 1.0
            if KINDS[k] == "lse":
                higher = tl.maximum(top, here)
                old, new = tl.exp2(top - higher), tl.exp2(here - higher)
                top = higher
            total = total * old + tl.load(line + len(KINDS) * step, mask=inside, other=0.0) * new
        share = tl.full((BR,), 1.0, tl.float32)
        value = total * LN2
        if KINDS[k] == "lse":
            positive = tl.maximum(total, 1e-37, tl.PropagateNan.ALL)  # a NaN must stay NaN
            value = tl.where(total == 0, float("-inf"), (top + tl.log2(positive)) * LN2)
            share = 1 / positive
        tl.store(values + k * n_rows + rows, value, mask=inside)
        for e in tl.static_range(len(OWNERS)):
            if OWNERS[e] == k:
                derivative = tl.zeros((BR,), tl.float32)
                for split in range(splits):
                    line = pieces + k * step + split * n_rows + rows
                    new = 1.0
                    if KINDS[k] == "lse":
                        new = tl.exp2(tl.load(line, mask=inside, other=0.0) - top)
                    line = line + (2 * len(KINDS) + e - k) * step
                    derivative += tl.load(line, mask=inside, other=0.0) * new
                tl.store(derivatives + e * n_rows + rows, derivative * share, mask=inside)
