"""Which engine computes a loss: ``engine="auto"``, and what it does when memory runs out."""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from weince.candidates import Contest, check_choice
from weince.engines.chunked import chunked
from weince.engines.dense import dense
from weince.engines.rows import EngineOutput
from weince.tail import TailConfig
from weince.terms import Term

Engine = Literal["auto", "dense", "chunked", "fused"]
ENGINES = get_args(Engine)  # here: torch 2.6 cannot compile the call

CPU_FASTEST = 1 << 26
"""Bytes of the matrix up to which dense is the faster on the CPU: 2,048 pairs of views in float32."""

CPU_COMPILED = 1 << 30
"""The same in a compiled graph, in which the chunked engine is a long one."""

GPU_MATRICES = 8
"""Matrices that the dense engine has on a GPU at its peak."""

GPU_SHARE = 0.5
"""Share of a GPU's memory that ``auto`` lets the dense engine have."""

log = logging.getLogger("weince")


class Choice(NamedTuple):
    """An engine, and why it."""

    name: Literal["dense", "chunked", "fused"]
    reason: str


def choose(
    contest: Contest, terms: Sequence[Term], tail: TailConfig | None = None, *, engine: Engine = "auto"
) -> Choice:
    """The engine that serves a contest, and why.

    ``"auto"`` takes the fused kernels on CUDA where they can serve; elsewhere the dense engine while its matrix is
    small enough (on the CPU, to be the faster one; on a GPU, to fit), then the chunked one. Another name is taken
    as it is.

    Raises:
        RuntimeError: The engine asked for cannot serve; the message says why.
    """
    check_choice("engine", engine, ENGINES)
    if engine == "fused":
        hindrance = why_not_fused(contest, terms, tail)
        if hindrance is not None:
            raise RuntimeError(f'engine="fused" cannot serve: {hindrance}; engine="auto" takes another')
    if engine != "auto":
        return Choice(engine, "asked for")
    if contest.anchors.device.type != "cuda":
        return _by_size(contest, "no CUDA device")
    hindrance = why_not_fused(contest, terms, tail)
    if hindrance is None:
        return Choice("fused", "CUDA, and the kernels serve this loss")
    choice = _by_size(contest, hindrance)
    if choice.name == "chunked":
        warn_once(f"weince: {hindrance}; the chunked engine goes on")
    return choice


def run(
    contest: Contest,
    terms: Sequence[Term],
    tail: TailConfig | None,
    *,
    engine: Engine = "auto",
    same_weight: bool = False,
) -> EngineOutput:
    """Loss of every anchor by the engine that :func:`choose` names.

    Args:
        contest: Anchors, candidates and their roles.
        terms: What to sum.
        tail: How to take the tail statistics.
        engine: Which engine.
        same_weight: As in :func:`weince.engines.chunked.chunked`.
    """
    choice = choose(contest, terms, tail, engine=engine)
    if not torch.compiler.is_compiling():
        log.debug("engine %s: %s", *choice)
    if choice.name == "fused":
        from weince.engines.fused import fused  # when wanted, since Triton is an extra

        return fused(contest, terms, tail)
    if choice.name == "chunked":
        return chunked(contest, terms, tail, same_weight=same_weight)
    # Other ranks would not know that this one begins again, and wait for what it has already sent.
    if engine == "dense" or torch.compiler.is_compiling() or contest.ranks is not None:
        return dense(contest, terms, tail)
    kept = _unless_memory_runs_out(lambda: dense(contest, terms, tail), terms)
    if kept is not None:
        return kept
    # Outside the handler, so that what the dense engine held is free by now.
    warn_once("weince: out of memory in the dense engine; the chunked engine goes on")
    return chunked(contest, terms, tail, same_weight=same_weight)


def why_not_fused(contest: Contest, terms: Sequence[Term], tail: TailConfig | None) -> str | None:
    """Why the fused engine cannot serve, in one line; None where it can."""
    try:
        from weince.engines.fused import why_not
    except ImportError as error:
        return f"the fused engine cannot be imported: {error}"
    return why_not(contest, terms, tail)


def why_no_kernels(device: torch.device) -> str | None:
    """Why no kernel runs on a device, in one line; None where they do."""
    try:
        from weince.engines.fused import hindrance
    except ImportError as error:
        return f"the fused engine cannot be imported: {error}"
    return hindrance(device)


def _by_size(contest: Contest, why_not_fused: str) -> Choice:
    anchors, candidates = contest.anchors, contest.candidates
    size = len(anchors) * len(candidates) * anchors.element_size()
    limit = _matrix_limit(anchors)
    if size <= limit:
        return Choice("dense", f"{why_not_fused}; a matrix of {_mib(size)} is within {_mib(limit)}")
    return Choice("chunked", f"{why_not_fused}; a matrix of {_mib(size)} is beyond {_mib(limit)}")


def _matrix_limit(rows: Tensor) -> int:
    if rows.device.type != "cuda":
        return CPU_COMPILED if torch.compiler.is_compiling() else CPU_FASTEST
    return int(GPU_SHARE * _memory_of(rows.device) / GPU_MATRICES)


def _memory_of(device: torch.device) -> int:
    """Bytes that a GPU has; a compiled graph takes the number as it finds it."""
    return int(torch.cuda.get_device_properties(device).total_memory)


# What torch.compiler.assume_constant_result does, which would import the compiler with the losses.
_memory_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _mib(size: int) -> str:
    if torch.compiler.is_compiling():
        return "some MiB"  # nobody is told, and a number put into words would be fixed in the graph
    return f"{size / 2**20:,.0f} MiB"


def _unless_memory_runs_out(call: Callable[[], EngineOutput], terms: Sequence[Term]) -> EngineOutput | None:
    """What the call returns; None if memory ran out, and then links remember nothing of it."""
    modules = [term.link for term in terms if isinstance(term.link, nn.Module)]
    before = [[buffer.clone() for buffer in module.buffers()] for module in modules]
    try:
        return call()
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
    for module, values in zip(modules, before, strict=True):
        for buffer, value in zip(module.buffers(), values, strict=True):
            buffer.copy_(value)
    return None


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
