"""Search for the hardest negatives of every anchor, and the fit of the tail."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince.engines.kernels import fit, hardest
from weince.engines.kernels.launch import CLOSE, EXACT, FLAGS, PAD, Matrix, Nearest, empty_near
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
from weince.engines.kernels.translate import Recorded
from weince.engines.kernels.write import functions_of_search
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


class Searched(NamedTuple):
    """Results of a search for every anchor: rho, beta and daic (one row each) and whether a fit was made, if asked
    for; thresholds (one row each); number of negatives, if it varies; nearest negatives."""

    stats: Tensor
    has_fit: Tensor
    thresholds: Tensor
    negatives: Tensor
    near: Nearest


class Job(NamedTuple):
    """The arguments of :func:`search`, and what follows from them.

    ``by_value``: whether anchors differ in their number of negatives. ``k``: size of the largest tail; 0 for no fit.
    ``depth``: number of hardest negatives to find. ``all_kept``: keep every candidate. ``plan``: how to find them
    otherwise, and the width of the buffer. ``limit``: bytes of shared memory. ``tile``: tile of the pass over all
    pairs. ``arguments``, ``constants``: the first of every kernel.
    """

    matrix: Matrix
    config: TailConfig | None
    numbers: Sequence[int]
    by_value: bool
    k: int
    depth: int
    all_kept: bool
    plan: TailPlan
    limit: int
    tile: dict[str, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def sizes(self, start: int) -> tuple[int, ...]:
        """The first sizes of every kernel of the search, for anchors from ``start`` on."""
        return start, len(self.matrix.anchors), len(self.matrix.candidates)


class Buffers(NamedTuple):
    """Buffers for a chunk of anchors: keys of the survivors; and for each anchor its threshold, the number of
    survivors, how many of these are above a lowered threshold, and the number of negatives."""

    keys: Tensor
    threshold: Tensor
    kept: Tensor
    loose: Tensor
    seen: Tensor


def search(matrix: Matrix, recorded: Recorded, config: TailConfig | None, numbers: Sequence[int]) -> Searched:
    """Find the hardest negatives of every anchor, and fit TailFit's two lines to them.

    Args:
        matrix: The pairs.
        recorded: A sum over the negatives.
        config: How to fit; None for no fit.
        numbers: Numbers of hardest negatives; each gets a threshold.
    """
    a, count = matrix.anchors, len(matrix.candidates)
    by_value, most = recorded.by_value, count - len(recorded.single)
    k = 0 if config is None else config.tail_size(most)
    depth = min(max(k, EXACT, *(number + 1 for number in numbers)), most)
    all_kept = count <= ALL_KEPT
    plan_ = TailPlan(0, 0, 0, even(count)) if all_kept else plan(count, depth)
    limit, functions = shared_memory(a.device), functions_of_search(recorded)
    job = Job(
        matrix, config, numbers, by_value, k, depth, all_kept, plan_, limit,
        tile=blocks(len(a), matrix.shape, "tail", limit),
        arguments=(*matrix.pointers, *matrix.arguments(functions)),
        constants={**matrix.shape, **functions.constants(), "BY_VALUE": by_value},
    )  # fmt: skip
    result = empty_result(a, config is not None, len(numbers), by_value)
    result.near.close.zero_()
    buffers = _buffers(job)
    chunk = len(buffers.kept)
    for start in range(0, len(a), chunk):
        rows = min(chunk, len(a) - start)
        _keep_hardest(job, buffers, start, rows)
        if by_value:
            result.negatives[start : start + rows] = buffers.seen[:rows]
        _fit(job, buffers, result, start, rows)
    return result


def _buffers(job: Job) -> Buffers:
    """Uninitialized buffers for as many anchors as fit into :data:`BUFFER`, in chunks of about equal size."""
    anchors, width = len(job.matrix.anchors), job.plan.width
    fitting = max(BUFFER, 4 * job.matrix.anchors.nbytes) // (8 * width) // PAD * PAD
    chunk = anchors if job.all_kept else min(anchors, max(PAD, fitting))
    chunk = parts_of(parts_of(anchors, parts_of(anchors, chunk)), PAD) * PAD
    keys = torch.empty(chunk * width, dtype=torch.int64, device=job.matrix.anchors.device)
    return Buffers(
        keys, *torch.empty((4, chunk), dtype=torch.int32, device=job.matrix.anchors.device).unbind()
    )


def _keep_hardest(job: Job, buffers: Buffers, start: int, rows: int) -> None:
    """Store the hardest negatives of some anchors, or all of them, in the buffers."""
    if job.all_kept:
        if job.by_value:
            buffers.seen.zero_()
        _survivors(job, buffers, start, rows, phase=0)
        return
    _sample(job, buffers, start, rows)
    if job.plan.every:
        _survivors(job, buffers, start, rows, phase=1)
        _refine(job, buffers, rows)
        _survivors(job, buffers, start, rows, phase=2)
    else:
        _survivors(job, buffers, start, rows, phase=0)
    _, _, kept, loose, seen = buffers
    launch(hardest.exact_kernel, (parts_of(rows, 16),),
           (*job.arguments, kept, loose, seen, buffers.keys, *job.sizes(start), job.depth, job.plan.width),
           {**exact_tile(job.matrix.shape, job.limit), **job.constants})  # fmt: skip


def _sample(job: Job, buffers: Buffers, start: int, rows: int) -> None:
    """Set the thresholds, and clear the counters."""
    # Include all rows of the last tile: counters beyond the last anchor must be initialized too.
    grid = (parts_of(rows, PAD) * PAD // 32,)
    launch(hardest.sample_kernel, grid, (*job.arguments, *buffers[1:], *job.sizes(start), job.plan.wanted),
           {**job.constants, **sample_tile(job.matrix.shape, job.limit)})  # fmt: skip


def _survivors(job: Job, buffers: Buffers, start: int, rows: int, *, phase: int) -> None:
    """Keep the negatives up to the threshold. ``phase`` 1: in some tiles of columns, 2: in the others, 0: in all."""
    tiles = parts_of(len(job.matrix.candidates), job.tile["BN"])
    first = parts_of(tiles, job.plan.every) if phase else 0
    part = (tiles, first, tiles - first)[phase]
    programs = parts_of(rows, job.tile["BM"])
    parts, span = splits(programs, part)
    keys, threshold, kept, _, seen = buffers
    launch(hardest.survivors_kernel, (programs, parts),
           (*job.arguments, threshold, kept, seen, keys, *job.sizes(start), part, span, job.plan.width),
           {**job.tile, **job.constants, "ALL": job.all_kept, "SHARED": parts > 1, "PHASE": phase,
            "EVERY": max(job.plan.every, 2)})  # fmt: skip


def _refine(job: Job, buffers: Buffers, rows: int) -> None:
    """Lower the thresholds after the first phase."""
    width = job.plan.width
    launch(hardest.refine_kernel, (parts_of(rows, FIT_ROWS),),
           (buffers.threshold, buffers.kept, buffers.loose, buffers.keys, width, job.plan.again),
           {"R": FIT_ROWS, "CP": power_of_2(max(width, 16)), **_warps(4)})  # fmt: skip


def _fit(job: Job, buffers: Buffers, result: Searched, start: int, rows: int) -> None:
    """Fill in the results of some anchors from their survivors."""
    a, c, config, width = job.matrix.anchors, job.matrix.candidates, job.config, job.plan.width
    drop = max(1, int(job.k * config.drop)) if config is not None and config.drop else 0
    room = fit_room(job.depth, len(c) if job.all_kept else 0)
    table = fit_table(job.k, drop, room, a.device) if config is not None else result.stats
    launch(
        fit.fit_kernel, (parts_of(rows, FIT_ROWS),),
        (buffers.keys.view(torch.int32), buffers.kept, buffers.seen, *_tail_sizes(job, buffers, rows), table, a, c,
         result.stats, result.has_fit, *result.near, result.thresholds,
         start, len(a), len(c), job.depth, job.k, drop, width, a.shape[1], a.stride(0), c.stride(0),
         1e-6 if config is None else float(config.eps)),
        {"R": FIT_ROWS, "KP": room, "DE": min(128, power_of_2(a.shape[1])), "VARIES": job.by_value,
         "ALL": job.all_kept, "EXACT": EXACT, "CLOSE": CLOSE, "FLAGS": FLAGS, "FIT": config is not None,
         "HARDEST": tuple(job.numbers), "SLACK": SLACK, **network_of(room), **_warps(1)},
    )  # fmt: skip


def _tail_sizes(job: Job, buffers: Buffers, rows: int) -> tuple[Tensor, Tensor]:
    """For each anchor, the size of its tail and how many of it the fit leaves out; any tensors if all are equal."""
    if job.config is None or not job.by_value:
        return buffers.kept, buffers.kept
    sizes = torch.zeros_like(buffers.seen)
    sizes[:rows] = job.config.tail_sizes(buffers.seen[:rows].long())
    if not job.config.drop:
        return sizes, torch.zeros_like(sizes)
    return sizes, (sizes.double() * job.config.drop).floor().clamp_min(1).int()


def empty_result(a: Tensor, fitted: bool, limits: int, varies: bool) -> Searched:
    """Uninitialized results of a search."""
    anchors = a.shape[0]
    return Searched(
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


def gated(rho: Tensor, daic: Tensor, has_fit: Tensor, pivot: Tensor | None, config: TailConfig) -> Tensor:
    """The gate of Algorithm 1: ``lam`` of every anchor. If ``pivot`` is None, it is the quantile of all ``rho``."""
    anchors, lam = len(rho), torch.empty_like(rho)
    numbers = (
        anchors,
        round(config.rho0_quantile * (anchors - 1)),
        float(config.kappa_rho),
        float(config.kappa_aic),
        float(config.margin),
    )
    room = 1024 if pivot is not None else power_of_2(anchors)
    launch(fit.gate_kernel, (1,), (rho, daic, has_fit, rho if pivot is None else pivot, lam, *numbers),
           {"GIVEN": pivot is not None, "GATE": GATES[config.gate], "B": room, **_warps(16)})  # fmt: skip
    return lam
