"""Launches of the kernels: tile sizes, buffers and grids."""

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from weince.engines.kernels import contrast, fit, tail, tiles
from weince.engines.kernels.order import LANES, network_of
from weince.tail import TailConfig, nearest_rank

EXACT = 4
"""Nearest negatives of an anchor with exact shortfalls, as in the other engines; ``fit.four`` sorts them."""

PAD = 128
"""Operands have a multiple of this many rows, so that tiles are loaded without masks."""

ALL_KEPT = 1024
"""Up to this many candidates every shortfall is kept and nothing is sampled."""

BUFFER = 60 << 20
"""Bytes of survivors at a time, or four times those of the unit rows if that is more."""

SAMPLE = 1024
"""Candidates in the sample that gives an anchor its threshold."""

NEAR = 1e-3
"""Anchors with a negative nearer than this get exact shortfalls of their nearest in every pass."""

FLAGS = 64
"""Anchors that share a flag whether one of them has such a negative."""

SPAN = 8192
"""Columns that one launch sums into a gradient: in the tensor cores long sums shrink, by 1e-4 in 32,768 columns."""

ONE_PROGRAM = 16384
"""Up to this many anchors one program finds the pivot; beyond, torch sorts."""

INTERPRETED: bool = tiles.INTERPRETED.value

FIT_ROWS = 32 if INTERPRETED else 1
"""Anchors that one program fits."""

GATES = {"both": 0, "rho": 1, "aic": 2}


class Operand(NamedTuple):
    """Rows for the tensor cores, their inverse lengths, and the compile-time shape."""

    rows: Tensor
    inverse: Tensor
    shape: dict[str, int]


class Roles(NamedTuple):
    """Who is whose positive, itself, and kin; pointers to anything where there is none."""

    positive: Tensor
    itself: Tensor
    anchor_ids: Tensor
    candidate_ids: Tensor
    flags: dict[str, bool]


def operand_shape(d: int, parts: int) -> dict[str, int]:
    """Compile-time shape of operands: width with padding, columns multiplied at a time, parts."""
    block = 128 if d > 256 else max(16, triton.next_power_of_2(d))
    return {"DP": triton.cdiv(d, block) * block, "DB": block, "PARTS": parts}


def operand_like(source: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised operand and inverse lengths of some rows."""
    parts = 1 if source.dtype == torch.bfloat16 else 2
    total = (source.shape[0] + PAD - 1) // PAD * PAD
    width = parts * operand_shape(source.shape[1], parts)["DP"]
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    return source.new_empty((total, width), dtype=dtype), source.new_empty((total,), dtype=torch.float32)


def operand(source: Tensor) -> Operand:
    """Rows in 16 bits for the tensor cores: bfloat16 as they are, float32 (unit rows) in two parts."""
    rows, d = source.shape
    shape = operand_shape(d, 1 if source.dtype == torch.bfloat16 else 2)
    out, inverse = operand_like(source)
    wide = triton.next_power_of_2(shape["DP"])
    block = max(1, min(16, 4096 // wide))
    tiles.operands_kernel[(triton.cdiv(len(out), block),)](
        source, out, inverse, rows, d, source.stride(0),
        DP=shape["DP"], WIDE=wide, PARTS=shape["PARTS"], BR=block, GRID=INTERPRETED,
    )  # fmt: skip
    return Operand(out, inverse, shape)


def blocks(rows: int, shape: dict[str, int], use: str) -> dict[str, int]:
    """Tile of a pass over all pairs: small for few rows, so that every multiprocessor has one."""
    if INTERPRETED:
        return {"BM": 64, "BN": 64}
    room = shape["DB"] * shape["PARTS"]
    if (use, room) in CHOSEN:
        return CHOSEN[use, room]
    if rows <= 2048:
        return {"BM": 16, "BN": 64, "num_warps": 4, "num_stages": 2 if room > 256 else 3}
    if shape["DP"] > shape["DB"]:  # rows too wide to keep: both operands of a product come in pieces
        if use == "gradient":
            return _tile(64, 32, 4, 2) if shape["PARTS"] == 2 else _tile(64, 64, 8, 2)
        return _tile(64, 64, 4, 2)
    many = rows > 16384
    if use == "gradient":
        if shape["DB"] > 128:
            return _tile(128, 32, 8, 2)
        return _tile(64, 64, 4, 2) if many or shape["PARTS"] == 2 else _tile(64, 64, 8, 2)
    if room > 256:
        return _tile(128, 64, 8, 1)
    if room == 256:
        return _tile(128, 64, 8, 3) if many else _tile(64, 64, 4, 2)
    return _tile(128, 64, 4, 3)


def _tile(rows: int, columns: int, warps: int, stages: int) -> dict[str, int]:
    return {"BM": rows, "BN": columns, "num_warps": warps, "num_stages": stages}


CHOSEN: dict[tuple[str, int], dict[str, int]] = {}
"""Tiles to use whatever the size, by use and width of the operands; for tuning."""


def splits(programs: int, tiles: int) -> tuple[int, int]:
    """Into how many spans of column tiles a pass is cut so as to fill the device, and their length."""
    wanted = 1 if INTERPRETED else min(16, max(1, 264 // programs))
    span = triton.cdiv(tiles, wanted)
    return triton.cdiv(tiles, span), span


Near = tuple[Tensor, Tensor, Tensor] | None
"""Columns and exact shortfalls of each anchor's nearest negatives, ``(anchors, EXACT)``, and flags for those near."""


class TailPlan(NamedTuple):
    """How to find the K hardest of many candidates.

    ``wanted``: which of the sampled shortfalls is the threshold. ``every``: one tile of so many is searched first,
    and the threshold then lowered to the ``again``-th smallest of what that kept; 0: all are searched at once.
    ``width``: room for survivors.
    """

    wanted: int
    every: int
    again: int
    width: int


def plan(count: int, k: int) -> TailPlan:
    """A plan by which K is missed, or the room overrun, once in millions of anchors.

    The rank of the K-th in a sample of share f is Poisson with mean ``f K``, or narrower; ``above`` puts the
    threshold more than five standard deviations above it, and allows for as much once more in what comes below that.
    """

    def above(mean: float) -> int:
        return math.ceil(mean + 5 * math.sqrt(mean) + 5)

    share = SAMPLE / count
    wanted = above(share * k)
    every = 0 if count <= 12 * SAMPLE else 4 if count <= 256 * SAMPLE else 16
    if not every:
        return TailPlan(wanted, 0, 0, min(count, _even(above(wanted) / share)))
    again = above(k / every)
    first = above(wanted) / share / every
    return TailPlan(wanted, every, again, min(count, _even(first + above(again) * (every - 1))))


def _even(number: float) -> int:
    return math.ceil(number / 64) * 64


@functools.cache  # never forgotten: a captured graph knows no more of it than its address
def fit_table(k: int, drop: int, padded: int, device: torch.device) -> Tensor:
    """``log F`` and ``log(-log F)`` of the ranks from ``drop`` to ``k``, each less its mean, and the sums of their
    squares, float64; every rank in its place of :func:`weince.engines.kernels.order.network`."""
    log_f = (torch.arange(1, k + 1, dtype=torch.float64) / (k + 1)).log()
    both = torch.stack([log_f, log_f.neg().log()])[:, drop:]
    table = torch.zeros((2, padded), dtype=torch.float64)
    table[:, drop:k] = both - both.mean(1, keepdim=True)
    squares = table.square().sum(1)
    table = table.view(2, LANES, padded // LANES).transpose(1, 2)
    return torch.cat([table.flatten(), squares]).to(device)


def hardest(
    a: Tensor, c: Tensor, x: Operand, y: Operand, roles: Roles, k: int, config: TailConfig,
    stats: Tensor, near_cols: Tensor, near_d: Tensor, close: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The nearest negatives of every anchor, and TailFit's two lines through its K hardest.

    Fills rho, beta and daic of ``stats``; returns where a fit was made, and the number of negatives if that varies.
    """
    anchors, count, device = len(a), len(c), a.device
    made = torch.empty(anchors, dtype=torch.int32, device=device)
    has_ids = roles.flags["HAS_IDS"]
    every = count <= ALL_KEPT
    todo = TailPlan(0, 0, 0, _even(count)) if every else plan(count, k)
    shape = blocks(anchors, x.shape, "tail")
    chunk = anchors if every else min(anchors, max(BUFFER, 4 * a.nbytes) // (8 * todo.width) // PAD * PAD)
    chunk = triton.cdiv(triton.cdiv(anchors, triton.cdiv(anchors, chunk)), PAD) * PAD
    keys = torch.empty(chunk * todo.width, dtype=torch.int64, device=device)
    threshold, kept, loose, seen = torch.empty((4, chunk), dtype=torch.int32, device=device)
    negatives = torch.empty(anchors, dtype=torch.int64, device=device) if has_ids else None
    pairs = (x.rows, x.inverse, y.rows, y.inverse, *roles[:4])
    drop = max(1, int(k * config.drop)) if config.drop else 0
    sizes = drops = kept  # pointers to anything where all anchors have the same
    tail_room = fit_room(k, count if every else 0)
    table = fit_table(k, drop, tail_room, device)
    room = triton.next_power_of_2(max(todo.width, 16))
    group = {"R": FIT_ROWS}
    for start in range(0, anchors, chunk):
        rows = min(chunk, anchors - start)
        if not every:
            thin = 64 // x.shape["PARTS"] // 2
            # All rows that a tile may have: beyond the last anchor, too, counters must not be what memory holds.
            tail.sample_kernel[(triton.cdiv(rows, PAD) * PAD // 32,)](
                *pairs, threshold, kept, loose, seen, start, anchors, count, todo.wanted,
                M=SAMPLE, BM=32, BK=min(thin, x.shape["DB"]), **x.shape, **roles.flags, **_warps(16),
            )  # fmt: skip
        elif has_ids:
            seen.zero_()
        for phase in (1, 2) if todo.every else (0,):
            if phase == 2:
                tail.refine_kernel[(triton.cdiv(rows, group["R"]),)](
                    threshold, kept, loose, keys, todo.width, todo.again, CP=room, **group, **_warps(4),
                )  # fmt: skip
            tiles_in_all = triton.cdiv(count, shape["BN"])
            first = triton.cdiv(tiles_in_all, todo.every) if phase else 0
            part = (tiles_in_all, first, tiles_in_all - first)[phase]
            programs = triton.cdiv(rows, shape["BM"])
            parts, span = splits(programs, part)
            tail.survivors_kernel[(programs, parts)](
                *pairs, threshold, kept, seen, keys, start, anchors, count, part, span, todo.width,
                **shape, **x.shape, **roles.flags, ALL=every, SHARED=parts > 1, PHASE=phase, EVERY=max(todo.every, 2),
            )  # fmt: skip
        if negatives is not None:
            own = seen[:rows].long()
            negatives[start : start + rows] = own
            sizes = torch.zeros_like(seen)
            sizes[:rows] = config.tail_sizes(own)
            drops = (sizes.double() * config.drop).floor().clamp_min(1).int() if config.drop else sizes * 0
        if not every:
            tail.exact_kernel[(triton.cdiv(rows, 16),)](
                *pairs, kept, loose, sizes, keys, start, anchors, count, k, todo.width,
                BM=16, BN=64, **x.shape, **roles.flags,
            )  # fmt: skip
        fit.fit_kernel[(triton.cdiv(rows, group["R"]),)](
            keys.view(torch.int32), kept, sizes, drops, table, a, c, stats[0], stats[1], stats[2], made,
            near_cols, near_d, close, start, anchors, todo.width, k, drop, todo.width, a.shape[1],
            a.stride(0), c.stride(0), config.eps, KP=tail_room, HAS_IDS=has_ids, ALL=every,
            DE=min(128, triton.next_power_of_2(a.shape[1])), EXACT=EXACT, NEAR=NEAR, FLAGS=FLAGS,
            **network_of(tail_room), **group, **fit_options(),
        )  # fmt: skip
    return made, negatives


def fit_room(k: int, kept: int) -> int:
    """Numbers that the fit sorts into what it has at a time: at least a tail, and half of what it gets, if known."""
    half: int = triton.next_power_of_2(kept) // 2
    return max(32, int(triton.next_power_of_2(k)), min(512, half))


def fit_options() -> dict[str, int]:
    """One warp, as its sort wants, and registers for four of them on each of a multiprocessor's schedulers."""
    return {} if INTERPRETED else CHOSEN.get(("fit", 0), {"num_warps": 1})


def _warps(number: int) -> dict[str, int]:
    return {} if INTERPRETED else {"num_warps": number}


def gated(
    stats: Tensor, made: Tensor, negatives: Tensor | None, config: TailConfig, temperature: float,
    learned: Tensor | None, state: Tensor,
) -> None:  # fmt: skip
    """The gate of Algorithm 1, ``lam`` of ``stats``, and what it makes of the link, g and w of ``state``."""
    rho, beta, daic, lam = stats
    anchors = len(rho)
    pivot = None
    if config.rho0 is not None:
        pivot = torch.full((1,), config.rho0, dtype=torch.float32, device=rho.device)
    elif negatives is not None or anchors > ONE_PROGRAM:
        pivot = nearest_rank(rho, rho.isfinite(), config.rho0_quantile)
    fit.gate_kernel[(1,)](
        rho, beta, daic, made, rho if pivot is None else pivot, rho if learned is None else learned,
        lam, state[4], state[5],
        anchors, round(config.rho0_quantile * (anchors - 1)), config.kappa_rho, config.kappa_aic, config.margin,
        temperature, 0.0 if config.beta == "fit" else config.beta,
        GIVEN=pivot is not None, LEARNED=learned is not None, FIT=config.beta == "fit", GATE=GATES[config.gate],
        B=1024 if pivot is not None else triton.next_power_of_2(anchors), **_warps(16),
    )  # fmt: skip


class Cap(NamedTuple):
    """The logarithm of the link is taken of ``offset + max(shortfall, lowest)``; ``SOFT``: there is none."""

    offset: float
    lowest: float
    soft: bool


def summed(
    a: Tensor, c: Tensor, x: Operand, y: Operand, roles: Roles, g: Tensor, w: Tensor, near: Near, cap: Cap,
    learn: bool, loss: Tensor, state: Tensor,
) -> None:  # fmt: skip
    """Log-sum-exp over the negatives: ``loss``, and the first four of ``state``."""
    anchors, count, d, device = len(a), len(c), a.shape[1], a.device
    shape = blocks(anchors, x.shape, "sum")
    programs = triton.cdiv(anchors, shape["BM"])
    parts, tiles_each = splits(programs, triton.cdiv(count, shape["BN"]))
    span = tiles_each * shape["BN"]
    pieces = torch.empty((4 if learn else 2, parts, anchors), dtype=torch.float32, device=device)
    largest, total = pieces[0], pieces[1]
    scores, logs = (pieces[2], pieces[3]) if learn else (total, total)
    near_cols, near_d, _ = (roles.positive, g, g) if near is None else near
    contrast.sum_kernel[(programs, parts)](
        x.rows, x.inverse, y.rows, y.inverse, g, w, *roles[:4], near_cols, near_d,
        largest, total, scores, logs, anchors, count, span, cap.offset, cap.lowest,
        **shape, **x.shape, **roles.flags, SOFT=cap.soft, KNOWN=near is not None, LEARN=learn, EXACT=EXACT, NEAR=NEAR,
    )  # fmt: skip
    contrast.finish_kernel[(triton.cdiv(anchors, 16),)](
        a, c, roles.positive, g, w, largest, total, scores, logs, loss, *state[:4],
        anchors, parts, d, a.stride(0), c.stride(0), cap.offset, cap.lowest,
        BR=16, DE=min(128, triton.next_power_of_2(d)), SOFT=cap.soft, LEARN=learn,
    )  # fmt: skip


def gradient(
    x: Operand, y: Operand, roles: Roles, link: tuple[Tensor, ...], near: Near, cap: Cap, sizes: tuple[int, int, int],
    *, from_rows: bool, from_cols: bool,
) -> Tensor:  # fmt: skip
    """Gradient of the rows of ``x``, ``(rows, d)``; the rows, the columns or both are anchors.

    ``link``: g, w, base, pull and the gradient of the losses, ``(anchors,)`` each.
    """
    rows, columns, d = sizes
    shape = blocks(rows, x.shape, "gradient")
    result = torch.empty((rows, d), dtype=torch.float32, device=x.rows.device)
    near_cols, near_d, close = (roles.positive, link[0], roles.positive) if near is None else near
    ids = (roles.anchor_ids, roles.candidate_ids) if from_rows else (roles.candidate_ids, roles.anchor_ids)
    same = link[4].stride(0) == 0
    for begin in range(0, columns, SPAN):
        contrast.gradient_kernel[(triton.cdiv(rows, shape["BM"]), x.shape["DP"] // x.shape["DB"])](
            x.rows, x.inverse, y.rows, y.inverse, *link, roles.positive, roles.itself, *ids,
            near_cols, near_d, close, result, rows, columns, begin, min(begin + SPAN, columns), d,
            cap.offset, cap.lowest,
            **shape, **x.shape, **roles.flags, SOFT=cap.soft, KNOWN=near is not None,
            FROM_ROWS=from_rows, FROM_COLS=from_cols, EXACT=EXACT, FLAGS=FLAGS, ADD=begin > 0, SAME=same,
        )  # fmt: skip
    return result
