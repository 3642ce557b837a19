"""Launches of the kernels: buffers, grids and arguments."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince.engines.kernels import hardest, rows, sums, tiles
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
from weince.engines.kernels.translate import Recorded
from weince.engines.kernels.write import (
    Functions,
    functions_of_gradient,
    functions_of_search,
    functions_of_sums,
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


class Nearest(NamedTuple):
    """Columns and exact shortfalls of each anchor's nearest candidates, ``(anchors, 4)`` (8 with those of its
    positives by label), and the flags of groups of ``FLAGS`` anchors with a candidate near the cap."""

    cols: Tensor
    shortfalls: Tensor
    close: Tensor


class Matrix(NamedTuple):
    """The pairs of a problem, as the kernels read them.

    ``anchors``, ``candidates``: float32 rows ``(a, d)`` and ``(c, d)``. ``operands``: rows for the tensor cores and
    their inverse lengths, of the anchors and then of the candidates, unless those are the same rows. ``of_anchor``,
    ``of_candidate``: columns by name. ``cosine``: whether scores are cosines.
    """

    anchors: Tensor
    candidates: Tensor
    operands: tuple[Tensor, ...]
    of_anchor: dict[str, Tensor]
    of_candidate: dict[str, Tensor]
    cosine: bool = True

    @property
    def symmetric(self) -> bool:
        return len(self.operands) == 2

    @property
    def shape(self) -> dict[str, int]:
        """Compile-time shape of the operands. Their width tells the number of parts: one is narrower than two."""
        width = int(self.anchors.shape[1])
        parts = 1 if self.operands[0].shape[1] == operand_shape(width, 1)["DP"] else 2
        return operand_shape(width, parts)

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """Operands of the anchors, then of the candidates."""
        return (*self.operands[:2], *self.operands[-2:])

    def arguments(self, functions: Functions) -> tuple[Any, ...]:
        """What the generated functions read: columns of anchors and candidates, numbers, and ``ignore``."""
        marks = self.of_anchor.get("ignore")
        ignore = (self.operands[1], 0, 0) if marks is None else (marks, marks.stride(0), marks.stride(1))
        nothing = (self.operands[1],)
        return (
            tuple(self.of_anchor[name] for name in functions.columns) or nothing,
            tuple(self.of_candidate[name] for name in functions.by_candidate) or nothing,
            functions.numbers,
            ignore,
        )


def operand_like(source: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized operand and inverse lengths for some rows."""
    parts = 1 if source.dtype == torch.bfloat16 else 2
    total = (source.shape[0] + PAD - 1) // PAD * PAD
    # Kernels are compiled for one width: a compiler that traces it as a symbol must fix it, which int() makes it do.
    width = parts * operand_shape(int(source.shape[1]), parts)["DP"]
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    return source.new_empty((total, width), dtype=dtype), source.new_empty((total,), dtype=torch.float32)


def operand(source: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in 16 bits for the tensor cores: bfloat16 rows in one part, float32 rows in two."""
    count, d = source.shape
    if source.stride(1) != 1:
        source = source.contiguous()
    shape = operand_shape(d, 1 if source.dtype == torch.bfloat16 else 2)
    out, inverse = operand_like(source)
    wide = power_of_2(shape["DP"])
    block = max(1, min(16, 4096 // wide))
    constants = {"DP": shape["DP"], "WIDE": wide, "PARTS": shape["PARTS"], "BR": block, "GRID": INTERPRETED}
    grid = (parts_of(len(out), block),)
    launch(tiles.operands_kernel, grid, (source, out, inverse, count, d, source.stride(0)), constants)
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
        rows.unit_kernel, (parts_of(n, shape["BR"]),), (source, unit, inverse, n, d, source.stride(0)), shape
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
    arguments, constants = (grad, unit, inverse, out, n, d, grad.stride(0)), {**shape, "LARGEST": largest}
    launch(rows.unit_gradient_kernel, (parts_of(n, shape["BR"]),), arguments, constants)
    return out


def empty_near(a: Tensor, number: int) -> Nearest:
    anchors = a.shape[0]
    return Nearest(
        a.new_empty((anchors, number), dtype=torch.int32),
        a.new_empty((anchors, number)),
        a.new_empty((anchors // FLAGS + 2,), dtype=torch.int32),
    )


def nearest(matrix: Matrix, near: Nearest | None, asked: tuple[Recorded, ...]) -> Nearest:
    """Every anchor's candidates nearer than ``CLOSE``: negatives, copied from ``near`` if known, and, if ``asked``
    has the rules of these too, positives by label."""
    a, c = matrix.anchors, matrix.candidates
    result = empty_near(a, EXACT * len(asked))
    result.close.zero_()
    if near is not None:
        result.cols[:, :EXACT], result.shortfalls[:, :EXACT] = (
            near.cols[:, :EXACT],
            near.shortfalls[:, :EXACT],
        )
        result.close.copy_(near.close)
    shape = blocks(len(a), matrix.shape, "sum", shared_memory(a.device))
    for which in range(near is not None, len(asked)):
        functions = functions_of_search(asked[which])
        launch(
            hardest.near_kernel, (parts_of(len(a), shape["BM"]),),
            (*matrix.pointers, *matrix.arguments(functions), a, c, *result, len(a), len(c), a.shape[1], a.stride(0),
             c.stride(0)),
            {**shape, **matrix.shape, **functions.constants(), "DE": min(128, power_of_2(a.shape[1])),
             "FIRST": EXACT * which, "NEAREST": result.cols.shape[1], "CLOSE": CLOSE, "FLAGS": FLAGS},
        )  # fmt: skip
    return result


def apart(a: Tensor, c: Tensor, positive: Tensor) -> Tensor:
    """Exact shortfall between every anchor and its one positive."""
    result = torch.empty(len(a), dtype=torch.float32, device=a.device)
    arguments = (a, c, positive, result, len(a), a.shape[1], a.stride(0), c.stride(0))
    constants = {"BR": 16, "DE": min(128, power_of_2(a.shape[1]))}
    launch(tiles.positive_kernel, (parts_of(len(a), 16),), arguments, constants)
    return result


def apart_gradient(
    a: Tensor, c: Tensor, positive: Tensor, weights: Tensor, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`apart` by anchors and by candidates; if these are the same rows, all is in the first."""
    ours = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    theirs = ours.new_empty((0, a.shape[1])) if symmetric else ours.new_zeros(c.shape)
    launch(tiles.positive_gradient_kernel, (parts_of(len(a), 16),),
           (a, c, positive, weights, ours, theirs, len(a), a.shape[1], a.stride(0), c.stride(0)),
           {"BR": 16, "DE": min(128, power_of_2(a.shape[1])), "SYMMETRIC": symmetric})  # fmt: skip
    return ours, theirs


def summed(
    matrix: Matrix, recorded: Recorded, near: Nearest | None, tops: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    """The sums ``(sums, anchors)`` and their derivatives by learned parameters, ``(derivatives, anchors)``.

    Args:
        matrix: The pairs.
        recorded: The sums.
        near: Exact shortfalls of the nearest candidates, if known.
        tops: For each sum, whether its largest logit is that of the nearest negative, and this is in ``near``.
    """
    anchors, count, device = len(matrix.anchors), len(matrix.candidates), matrix.anchors.device
    functions = functions_of_sums(recorded)
    kinds = functions.kinds
    owners = tuple(k for k, summand in enumerate(recorded.sums) for _ in summand.learned)
    shape = blocks(anchors, matrix.shape, "sum", shared_memory(device))
    programs = parts_of(anchors, shape["BM"])
    parts, tiles_each = splits(programs, parts_of(count, shape["BN"]))
    lines = 2 * len(kinds) + len(owners)
    pieces = torch.empty((lines, parts, anchors), dtype=torch.float32, device=device)
    values = torch.empty((len(kinds), anchors), dtype=torch.float32, device=device)
    derivatives = torch.empty((len(owners), anchors), dtype=torch.float32, device=device)
    cols, shortfalls = (values, values) if near is None else near[:2]
    unless = matrix.of_anchor.get("unless")
    tops = tuple(top and kind == "lse" for top, kind in zip(tops, kinds, strict=True))
    launch(
        sums.sum_kernel, (programs, parts),
        (*matrix.pointers, *matrix.arguments(functions), cols, shortfalls, pieces,
         values if unless is None else unless, anchors, count,
         tiles_each * shape["BN"]),
        {**shape, **matrix.shape, "COSINE": matrix.cosine, **functions.constants(), "KINDS": kinds, "OWNERS": owners,
         "BASES": functions.bases, "TOPS": tops, "STOPS": unless is not None,
         "NEAREST": 0 if near is None else near.cols.shape[1], "CLOSE": CLOSE},
    )  # fmt: skip
    launch(sums.finish_kernel, (parts_of(anchors, 128),), (pieces, values, derivatives, anchors, parts),
           {"BR": 128, "KINDS": tuple(summand.kind for summand in recorded.sums), "OWNERS": owners})  # fmt: skip
    return values, derivatives


def gradient(
    matrix: Matrix,
    recorded: Recorded,
    near: Nearest | None,
    values: Tensor,
    weights: Tensor,
    *,
    of_anchors: bool,
) -> Tensor:
    """Gradient of the anchors ``(a, d)`` or of the candidates ``(c, d)``; if these are the same rows, of both.

    Args:
        matrix: The pairs.
        recorded: The sums.
        near: Exact shortfalls of the nearest candidates, if known.
        values: The sums ``(sums, anchors)``.
        weights: Their upstream gradients.
        of_anchors: Whether the rows whose gradient is wanted are anchors.
    """
    functions = functions_of_gradient(recorded)
    source = matrix.anchors if of_anchors else matrix.candidates
    columns, (count, d) = len(matrix.candidates if of_anchors else matrix.anchors), source.shape
    shape = blocks(count, matrix.shape, "gradient", shared_memory(source.device))
    result = torch.empty((count, d), dtype=torch.float32, device=source.device)
    pointers = matrix.pointers if of_anchors else (*matrix.pointers[2:], *matrix.pointers[:2])
    near_pointers = (values,) * 3 if near is None else near
    tensors = (*pointers, *matrix.arguments(functions), *near_pointers, values, weights, result)
    constants = {
        **shape, **matrix.shape, "COSINE": matrix.cosine, **functions.constants(), "FLAGS": FLAGS,
        "NEAREST": 0 if near is None else near.cols.shape[1], "FROM_ROWS": of_anchors,
        "FROM_COLS": matrix.symmetric or not of_anchors,
    }  # fmt: skip
    grid = (parts_of(count, shape["BM"]), matrix.shape["DP"] // matrix.shape["DB"])
    for begin in range(0, columns, SPAN):
        sizes = (count, columns, begin, min(begin + SPAN, columns), d)
        launch(gradient_kernel, grid, (*tensors, *sizes), constants | {"ADD": begin > 0})
    return result
