"""Launches of the kernels: buffers, grids and arguments."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince.engines.kernels import hardest, rows, sums, tiles, translate
from weince.engines.kernels.gradient import gradient_kernel
from weince.engines.kernels.relaunch import launch
from weince.engines.kernels.shapes import (
    INTERPRETED,
    blocks,
    operand_shape,
    parts_of,
    power_of_2,
    shared_memory,
    splits,
)

EXACT = 4
"""Nearest negatives per anchor that get exact shortfalls, as in the other engines; ``fit.four`` sorts them."""

PAD = 128
"""Operands are padded to a multiple of this many rows, so that tiles load without masks."""

CLOSE = 1e-3
"""If an anchor has a candidate nearer than this, every pass uses the exact shortfalls of its nearest candidates."""

FLAGS = 64
"""Anchors that share one flag, which is set if any of them has a candidate nearer than ``CLOSE``."""

SPAN = 8192
"""Columns that one launch sums into a gradient: tensor cores shrink long sums, by 1e-4 for 32,768 columns."""


class Pairs(NamedTuple):
    """Operands of anchors and of candidates with their inverse lengths, and the compile-time shape of both."""

    x: Tensor
    x_inverse: Tensor
    y: Tensor
    y_inverse: Tensor
    shape: dict[str, int]

    def turned(self) -> "Pairs":
        return Pairs(self.y, self.y_inverse, self.x, self.x_inverse, self.shape)


class Roles(NamedTuple):
    """What determines the roles of pairs: ``ROLES`` of the kernels, tensors (any tensor if one is not given), and
    the strides of ``ignore``."""

    flags: int
    pointers: tuple[Tensor, ...]
    views: tuple[Tensor, Tensor]
    ignore: Tensor
    strides: tuple[int, int]

    @property
    def by_value(self) -> bool:
        return bool(self.flags & tiles.BY_VALUE.value)


GIVEN = ("positive", "itself", "id_a", "id_c", "label_a", "label_c", "view_a", "view_c", "ignore")
"""What may determine the roles of pairs: columns of the positives and of the anchors themselves; ids, labels and
views of anchors and candidates (int64); pairs to ignore."""


def roles_of(roles: Sequence[Tensor], given: int, anything: Tensor) -> Roles:
    """Roles from the tensors of :data:`GIVEN` whose bits are set in ``given``; ``anything`` stands for the others."""
    left = iter(roles)
    all_ = [next(left) if given >> bit & 1 else None for bit in range(len(GIVEN))]
    flags = 0
    for bit, place in enumerate((0, 1, 2, 4, 8)):
        flags |= (all_[place] is not None) << bit
    pointers = tuple(anything if value is None else value for value in all_)
    ignore = all_[8]
    strides = (0, 0) if ignore is None else (ignore.stride(0), ignore.stride(1))
    return Roles(flags, pointers[:6], (pointers[6], pointers[7]), pointers[8], strides)


class Nearest(NamedTuple):
    """Columns and exact shortfalls of each anchor's nearest candidates, ``(anchors, 4)`` (8 with those of its
    positives by label), and the flags of groups of ``FLAGS`` anchors with a candidate near the cap."""

    cols: Tensor
    shortfalls: Tensor
    close: Tensor


def operand_like(source: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized operand and inverse lengths for some rows."""
    parts = 1 if source.dtype == torch.bfloat16 else 2
    total = (source.shape[0] + PAD - 1) // PAD * PAD
    # Kernels are compiled for one width: a compiler that traces it as a symbol must fix it, which int() makes it do.
    width = parts * operand_shape(int(source.shape[1]), parts)["DP"]
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    return source.new_empty((total, width), dtype=dtype), source.new_empty((total,), dtype=torch.float32)


def operand(source: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in 16 bits for the tensor cores: bfloat16 rows in one part, float32 unit rows in two."""
    rows, d = source.shape
    if source.stride(1) != 1:
        source = source.contiguous()
    shape = operand_shape(d, 1 if source.dtype == torch.bfloat16 else 2)
    out, inverse = operand_like(source)
    wide = power_of_2(shape["DP"])
    block = max(1, min(16, 4096 // wide))
    constants = {"DP": shape["DP"], "WIDE": wide, "PARTS": shape["PARTS"], "BR": block, "GRID": INTERPRETED}
    grid = (parts_of(len(out), block),)
    launch(tiles.operands_kernel, grid, (source, out, inverse), (rows, d, source.stride(0)), constants)
    return out, inverse


WIDEST = 4096
"""Widest row that one program can scale to length 1."""


def _rows_at_once(d: int) -> dict[str, int]:
    wide = max(16, power_of_2(d))
    return {"BR": max(1, min(16, 4096 // wide)), "WIDE": wide}


def unit_rows(source: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows ``(n, d)`` and inverse lengths ``(n, 1)`` of rows ``(n, d)``, both in float32."""
    if source.stride(1) != 1:
        source = source.contiguous()
    n, d = source.shape
    unit = source.new_empty((n, d), dtype=torch.float32)
    inverse = source.new_empty((n, 1), dtype=torch.float32)
    shape = _rows_at_once(d)
    launch(
        rows.unit_kernel,
        (parts_of(n, shape["BR"]),),
        (source, unit, inverse),
        (n, d, source.stride(0)),
        shape,
    )
    return unit, inverse


def unit_gradient(grad: Tensor, unit: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient ``(n, d)`` of the rows, in their dtype, from that of the unit rows."""
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    n, d = grad.shape
    out = grad.new_empty((n, d), dtype=dtype)
    shape = _rows_at_once(d)
    largest = torch.finfo(dtype).max if dtype == torch.float16 else 0.0
    tensors, constants = (grad, unit, inverse, out), {**shape, "LARGEST": largest}
    launch(rows.unit_gradient_kernel, (parts_of(n, shape["BR"]),), tensors, (n, d, grad.stride(0)), constants)
    return out


def empty_near(a: Tensor, number: int) -> Nearest:
    anchors = a.shape[0]
    return Nearest(
        a.new_empty((anchors, number), dtype=torch.int32),
        a.new_empty((anchors, number)),
        a.new_empty((anchors // FLAGS + 2,), dtype=torch.int32),
    )


def nearest(
    a: Tensor, c: Tensor, pairs: Pairs, roles: Roles, near: Nearest | None, *, positives: bool
) -> Nearest:
    """Every anchor's candidates nearer than ``CLOSE``: negatives, copied from ``near`` if given, and, with
    ``positives``, positives by label."""
    result = empty_near(a, 2 * EXACT if positives else EXACT)
    result.close.zero_()
    if near is not None:
        result.cols[:, :EXACT], result.shortfalls[:, :EXACT] = (
            near.cols[:, :EXACT],
            near.shortfalls[:, :EXACT],
        )
        result.close.copy_(near.close)
    shape = blocks(len(a), pairs.shape, "sum", shared_memory(a.device))
    sizes = (len(a), len(c), *roles.strides, a.shape[1], a.stride(0), c.stride(0))
    for which in range(near is not None, 1 + positives):
        launch(
            hardest.near_kernel, (parts_of(len(a), shape["BM"]),),
            (*pairs[:4], *roles.pointers, roles.ignore, a, c, *result), sizes,
            {**shape, **pairs.shape, "ROLES": roles.flags, "OF_POSITIVES": bool(which),
             "DE": min(128, power_of_2(a.shape[1])), "FIRST": EXACT * which,
             "NEAREST": result.cols.shape[1], "CLOSE": CLOSE, "FLAGS": FLAGS},
        )  # fmt: skip
    return result


def counted(roles: Roles, anchors: int, count: int) -> Tensor:
    """Number of negatives of every anchor."""
    counts = torch.empty(anchors, dtype=torch.int64, device=roles.pointers[0].device)
    launch(hardest.count_kernel, (parts_of(anchors, 32),), (*roles.pointers, roles.ignore, counts),
           (anchors, count, *roles.strides), {"BM": 32, "BN": 128, "ROLES": roles.flags})  # fmt: skip
    return counts


def apart(a: Tensor, c: Tensor, positive: Tensor) -> Tensor:
    """Exact shortfall between every anchor and its one positive."""
    result = torch.empty(len(a), dtype=torch.float32, device=a.device)
    sizes = (len(a), a.shape[1], a.stride(0), c.stride(0))
    constants = {"BR": 16, "DE": min(128, power_of_2(a.shape[1]))}
    launch(tiles.positive_kernel, (parts_of(len(a), 16),), (a, c, positive, result), sizes, constants)
    return result


def apart_gradient(
    a: Tensor, c: Tensor, positive: Tensor, weights: Tensor, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`apart` by anchors and by candidates; if these are the same rows, all is in the first."""
    ours = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    theirs = (
        ours.new_empty((0, a.shape[1]))
        if symmetric
        else torch.zeros(c.shape, dtype=ours.dtype, device=c.device)
    )
    launch(tiles.positive_gradient_kernel, (parts_of(len(a), 16),), (a, c, positive, weights, ours, theirs),
           (len(a), a.shape[1], a.stride(0), c.stride(0)),
           {"BR": 16, "DE": min(128, power_of_2(a.shape[1])), "SYMMETRIC": symmetric})  # fmt: skip
    return ours, theirs


class Sums(NamedTuple):
    """The sums of one pass. ``spec``: ``SPEC`` of each sum (see :mod:`weince.engines.kernels.logits`), with the
    key of its function in :mod:`weince.engines.kernels.translate` from bit 16 on. ``cap``: ``offset``, ``lowest`` and
    ``floor``. ``coefs``: ``(sums * 1 or 4, 1 or anchors)``. ``thresholds``: ``(., anchors)``."""

    spec: tuple[int, ...]
    cap: tuple[float, ...]
    coefs: Tensor
    thresholds: Tensor

    @property
    def form(self) -> int:
        return self.coefs.shape[0] // len(self.spec)

    def constants(self, near: Nearest | None) -> dict[str, Any]:
        """Compile-time constants of the kernels."""
        packed = any_ = 0
        for index, one in enumerate(self.spec):
            packed |= (one & 0xFFFF) << (16 * index)
            any_ |= one & 0xFFFF
        return {
            "SPEC": packed, "ANY": any_, "SUMS": len(self.spec), "FORM": self.form,
            "EACH": self.coefs.shape[1] > 1,
            "FUNCTION": translate.function(max(one >> 16 for one in self.spec)),
            "NEAREST": 0 if near is None else near.cols.shape[1],
        }  # fmt: skip


def summed(
    pairs: Pairs, roles: Roles, near: Nearest | None, asked: Sums, anchors: int, count: int, learn: int
) -> tuple[Tensor, Tensor]:
    """The sums ``(sums, anchors)`` and, if ``learn`` has bits set, their derivatives by the coefficients."""
    device, number = pairs.x.device, len(asked.spec)
    shape = blocks(anchors, pairs.shape, "sum", shared_memory(device))
    programs = parts_of(anchors, shape["BM"])
    parts, tiles_each = splits(programs, parts_of(count, shape["BN"]))
    pieces = torch.empty((number, sums.SLOTS.value, parts, anchors), dtype=torch.float32, device=device)
    values = torch.empty((number, anchors), dtype=torch.float32, device=device)
    effects = torch.empty((number * asked.form if learn else 0, anchors), dtype=torch.float32, device=device)
    cols, shortfalls, _ = (values, values, values) if near is None else near
    constants = asked.constants(near)
    launch(
        sums.sum_kernel, (programs, parts),
        (*pairs[:4], *roles.pointers, *roles.views, roles.ignore, cols, shortfalls, asked.coefs, asked.thresholds,
         pieces),
        (anchors, count, tiles_each * shape["BN"], *roles.strides, *asked.cap),
        {**shape, **pairs.shape, "ROLES": roles.flags, **constants, "CLOSE": CLOSE, "LEARN": learn},
    )  # fmt: skip
    launch(sums.finish_kernel, (parts_of(anchors, 128),), (pieces, values, effects), (anchors, parts),
           {"BR": 128, "SPEC": constants["SPEC"], "SUMS": number, "FORM": asked.form, "LEARN": learn})  # fmt: skip
    return values, effects


def gradient(
    pairs: Pairs, roles: Roles, near: Nearest | None, asked: Sums, values: Tensor, weights: Tensor,
    sizes: tuple[int, int, int], *, from_rows: bool, from_cols: bool,
) -> Tensor:  # fmt: skip
    """Gradient of the rows of ``pairs.x``, ``(rows, d)``; the rows, the columns or both are anchors."""
    rows, columns, d = sizes
    shape = blocks(rows, pairs.shape, "gradient", shared_memory(pairs.x.device))
    result = torch.empty((rows, d), dtype=torch.float32, device=pairs.x.device)
    near_pointers = (values, values, values) if near is None else near
    tensors = (
        *pairs[:4], *roles.pointers, *roles.views, roles.ignore, *near_pointers, asked.coefs, asked.thresholds,
        values, weights, result,
    )  # fmt: skip
    constants = asked.constants(near)
    grid = (parts_of(rows, shape["BM"]), pairs.shape["DP"] // pairs.shape["DB"])
    for begin in range(0, columns, SPAN):
        launch(
            gradient_kernel, grid, tensors,
            (rows, columns, begin, min(begin + SPAN, columns), d, *roles.strides, *asked.cap),
            {**shape, **pairs.shape, "ROLES": roles.flags, **constants, "FLAGS": FLAGS, "FROM_ROWS": from_rows,
             "FROM_COLS": from_cols, "ADD": begin > 0},
        )  # fmt: skip
    return result
