# mypy: ignore-errors
"""What a pass over the tiles sums, and how it computes logits. The kernels for sums and gradient share this.

A logit is ``g s + b - w log(offset + max(d, lowest)) + v log(max(2 - d, floor))`` of a score ``s`` and its shortfall
``d``. Each coefficient ``g, b, w, v`` is one number per anchor, or one for all anchors; ``offset``, ``lowest`` and
``floor`` are the same for all sums of a pass. Inside the kernels logits are in bits, that is, divided by ``log(2)``.

For a user's link, ``FUNCTION`` computes the logit from the score and the same four numbers, see
:mod:`weince.engines.kernels.translate`. A pass has at most one such function.

``SPEC`` describes the sums of a pass, 16 bits each:

- bits 0 and 1: ``LSE``, ``SUM`` or ``SOFTPLUS``
- ``SAME_VIEW``: among the negatives of the anchor's view; ``OF_POSITIVES``: among the positives by label
- ``USES_B, USES_W, USES_V``: which coefficients are not 0 (``g`` is always read)
- ``TOP_KNOWN``: the nearest negative has the largest logit, and it is known
- ``BY_FUNCTION``: ``FUNCTION`` gives the logits
- bits 12 to 15: row of the thresholds, from 1, above which a shortfall takes no part; 0 for none

``ANY`` is all of them or-ed together. ``SUMS``: number of sums. ``FORM``: coefficients per sum, 1 (``g`` alone) or 4.
``EACH``: every anchor has its own coefficients. ``NEAREST``: number of candidates per anchor with known exact
shortfalls, 0 for none; the first four are negatives.
"""

import triton
import triton.language as tl

from weince.engines.kernels.tiles import LOG2E, along

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
    """``g, b, w, v`` of some anchors, scaled for logits in bits (unscaled for a function), and the largest
    shortfall that takes part; 0 without a threshold."""
    inside = at < n_anchors
    g = coefficient(coefs, row, at, inside, n_anchors, EACH)
    b = tl.zeros_like(g)
    w = b
    v = b
    limit = b
    if USES_B & ONE:
        b = coefficient(coefs, row + 1, at, inside, n_anchors, EACH)
    if not BY_FUNCTION & ONE:  # w and v multiply base-2 logarithms, so they need no scaling
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
    """Logits in bits: ``constant - g d - w log2(gap) + v log2(2 - d)``."""
    z = along(constant, ACROSS) - along(link[0], ACROSS) * d
    if USES_W & ONE:
        z -= along(link[2], ACROSS) * log_gap
    if USES_V & ONE:
        z += along(link[3], ACROSS) * log_rest
    return z


@triton.jit
def by_function(constant, link, d, FUNCTION: tl.constexpr, ACROSS: tl.constexpr):
    """Logits in bits, with ``constant`` added, their slopes by the score, and their derivatives by the four
    numbers of the link. The compiler drops unused results."""
    score = tl.maximum(1 - d, -1.0, tl.PropagateNan.ALL)  # rounding may take it lower
    found = FUNCTION(
        score, along(link[0], ACROSS), along(link[1], ACROSS), along(link[2], ACROSS), along(link[3], ACROSS)
    )
    z = found[0] * LOG2E + along(constant, ACROSS)
    return z, found[1], (found[2], found[3], found[4], found[5])


@triton.jit
def constant_of(link, ONE: tl.constexpr):
    """Part of some anchors' logits that does not depend on the shortfall; 0 for a function."""
    constant = link[0] + link[1]
    if BY_FUNCTION & ONE:
        constant = tl.zeros_like(constant)
    return constant
