"""Search for the hardest negatives of every anchor, and the fit of the tail."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weince.engines.kernels import fit, hardest
from weince.engines.kernels.launch import CLOSE, EXACT, FLAGS, PAD, Nearest, Pairs, Roles, empty_near
from weince.engines.kernels.relaunch import launch
from weince.engines.kernels.shapes import (
    INTERPRETED,
    TailPlan,
    blocks,
    even,
    exact_tile,
    parts_of,
    plan,
    power_of_2,
    sample_tile,
    shared_memory,
    splits,
)
from weince.engines.kernels.sort import LANES, network_of
from weince.tail import TailConfig

ALL_KEPT = 1024
"""Up to this many candidates, every shortfall is kept and nothing is sampled."""

BUFFER = 60 << 20
"""Bytes for survivors at a time, or four times the size of the anchors' unit rows if that is more."""

SLACK = 2e-7
"""Shortfalls that differ by less than this count as ties: a recomputed tile may be off by half of it."""

ONE_PROGRAM = 16384
"""Up to this many anchors, one program finds the gate's pivot; beyond that, torch sorts."""

FIT_ROWS = 32 if INTERPRETED else 1
"""Anchors that one program fits."""

GATES = {"both": 0, "rho": 1, "aic": 2}


@functools.cache  # never evicted: a captured graph holds only its address
def fit_table(k: int, drop: int, padded: int, device: torch.device) -> Tensor:
    """``log F`` and ``log(-log F)`` of the ranks ``drop`` to ``k - 1``, each less its mean, and the sums of their
    squares, in float64. Ranks are in the order of places of :func:`weince.engines.kernels.sort.network`."""
    log_f = (torch.arange(1, k + 1, dtype=torch.float64) / (k + 1)).log()
    both = torch.stack([log_f, log_f.neg().log()])[:, drop:]
    table = torch.zeros((2, padded), dtype=torch.float64)
    table[:, drop:k] = both - both.mean(1, keepdim=True)
    squares = table.square().sum(1)
    table = table.view(2, LANES, padded // LANES).transpose(1, 2)
    return torch.cat([table.flatten(), squares]).to(device)


class Found(NamedTuple):
    """Results of a search for every anchor: rho, beta and daic (one row each) and whether a fit was made, if asked
    for; thresholds (one row each); number of negatives, if it varies; nearest negatives."""

    stats: Tensor
    made: Tensor
    thresholds: Tensor
    negatives: Tensor
    near: Nearest


def search(
    a: Tensor, c: Tensor, pairs: Pairs, roles: Roles, most: int, config: TailConfig | None, numbers: Sequence[int]
) -> Found:  # fmt: skip
    """Find the hardest negatives of every anchor, and fit TailFit's two lines to them.

    Args:
        a: ``(anchors, d)`` unit rows.
        c: ``(candidates, d)`` unit rows.
        pairs: The same rows as operands.
        roles: Roles of the pairs.
        most: Largest number of negatives that an anchor can have.
        config: How to fit; None for no fit.
        numbers: Numbers of hardest negatives; each gets a threshold.
    """
    anchors, count, device = len(a), len(c), a.device
    k = 0 if config is None else config.tail_size(most)
    depth = min(max(k, EXACT, *(number + 1 for number in numbers)) if numbers else max(k, EXACT), most)
    found = empty_found(a, config is not None, len(numbers), roles.by_value)
    found.near.close.zero_()
    every = count <= ALL_KEPT
    todo = TailPlan(0, 0, 0, even(count)) if every else plan(count, depth)
    limit = shared_memory(device)
    shape = blocks(anchors, pairs.shape, "tail", limit)
    fitting = max(BUFFER, 4 * a.nbytes) // (8 * todo.width) // PAD * PAD
    chunk = anchors if every else min(anchors, max(PAD, fitting))
    chunk = parts_of(parts_of(anchors, parts_of(anchors, chunk)), PAD) * PAD
    keys = torch.empty(chunk * todo.width, dtype=torch.int64, device=device)
    counters = torch.empty((4, chunk), dtype=torch.int32, device=device)
    threshold, kept, loose, seen = counters.unbind()
    tensors = (*pairs[:4], *roles.pointers, roles.ignore)
    constants = {**pairs.shape, "ROLES": roles.flags}
    drop = max(1, int(k * config.drop)) if config is not None and config.drop else 0
    sizes = drops = kept  # placeholders, unless the sizes differ between anchors
    room = fit_room(depth, count if every else 0)
    table = fit_table(k, drop, room, device) if config is not None else found.stats
    limits = functools.reduce(lambda bits, number: bits << 10 | number, reversed(numbers), 0)
    for start in range(0, anchors, chunk):
        rows = min(chunk, anchors - start)
        size = (start, anchors, count, *roles.strides)
        if not every:
            # Include all rows of the last tile: counters beyond the last anchor must be initialized too.
            grid = (parts_of(rows, PAD) * PAD // 32,)
            launch(hardest.sample_kernel, grid, (*tensors, threshold, kept, loose, seen), (*size, todo.wanted),
                   {**sample_tile(pairs.shape, limit), **constants})  # fmt: skip
        elif roles.by_value:
            seen.zero_()
        for phase in (1, 2) if todo.every else (0,):
            if phase == 2:
                launch(hardest.refine_kernel, (parts_of(rows, FIT_ROWS),), (threshold, kept, loose, keys),
                       (todo.width, todo.again),
                       {"R": FIT_ROWS, "CP": power_of_2(max(todo.width, 16)), **_warps(4)})  # fmt: skip
            tiles_in_all = parts_of(count, shape["BN"])
            first = parts_of(tiles_in_all, todo.every) if phase else 0
            part = (tiles_in_all, first, tiles_in_all - first)[phase]
            programs = parts_of(rows, shape["BM"])
            parts, span = splits(programs, part)
            launch(hardest.survivors_kernel, (programs, parts), (*tensors, threshold, kept, seen, keys),
                   (*size, part, span, todo.width),
                   {**shape, **constants, "ALL": every, "SHARED": parts > 1, "PHASE": phase,
                    "EVERY": max(todo.every, 2)})  # fmt: skip
        if roles.by_value:
            own = seen[:rows].long()
            found.negatives[start : start + rows] = own
            if config is not None:
                sizes = torch.zeros_like(seen)
                sizes[:rows] = config.tail_sizes(own)
                drops = (
                    (sizes.double() * config.drop).floor().clamp_min(1).int() if config.drop else sizes * 0
                )
        if not every:
            launch(hardest.exact_kernel, (parts_of(rows, 16),), (*tensors, kept, loose, seen, keys),
                   (*size, depth, todo.width), {**exact_tile(pairs.shape, limit), **constants})  # fmt: skip
        launch(
            fit.fit_kernel, (parts_of(rows, FIT_ROWS),),
            (keys.view(torch.int32), kept, seen, sizes, drops, table, a, c, found.stats, found.made, *found.near,
             found.thresholds),
            (start, anchors, count, depth, k, drop, todo.width, a.shape[1], a.stride(0), c.stride(0),
             1e-6 if config is None else config.eps),
            {"R": FIT_ROWS, "KP": room, "DE": min(128, power_of_2(a.shape[1])), "VARIES": roles.by_value,
             "ALL": every, "EXACT": EXACT, "CLOSE": CLOSE, "FLAGS": FLAGS, "FIT": config is not None,
             "HARDEST": limits, "LIMITS": len(numbers), "SLACK": SLACK, **network_of(room), **_warps(1)},
        )  # fmt: skip
    return found


def empty_found(a: Tensor, fitted: bool, limits: int, varies: bool) -> Found:
    """Uninitialized results of a search."""
    anchors = a.shape[0]
    return Found(
        a.new_empty((3, anchors if fitted else 0)),
        a.new_empty((anchors if fitted else 0,), dtype=torch.int32),
        a.new_empty((limits, anchors)),
        a.new_empty((anchors if varies else 0,), dtype=torch.int64),
        empty_near(a, EXACT),
    )


def fit_room(k: int, kept: int) -> int:
    """How many numbers the fit merges at a time: at least a tail, and half of those kept if known, up to 512."""
    half = power_of_2(kept) // 2
    return max(32, power_of_2(k), min(512, half))


def _warps(number: int) -> dict[str, int]:
    return {} if INTERPRETED else {"num_warps": number}


def gated(rho: Tensor, daic: Tensor, made: Tensor, pivot: Tensor | None, config: TailConfig) -> Tensor:
    """The gate of Algorithm 1: ``lam`` of every anchor. If ``pivot`` is None, it is the quantile of all ``rho``."""
    anchors, lam = len(rho), torch.empty_like(rho)
    numbers = (
        anchors,
        round(config.rho0_quantile * (anchors - 1)),
        config.kappa_rho,
        config.kappa_aic,
        config.margin,
    )
    room = 1024 if pivot is not None else power_of_2(anchors)
    launch(fit.gate_kernel, (1,), (rho, daic, made, rho if pivot is None else pivot, lam), numbers,
           {"GIVEN": pivot is not None, "GATE": GATES[config.gate], "B": room, **_warps(16)})  # fmt: skip
    return lam
