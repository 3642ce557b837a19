"""Choice of the engine: what ``engine="auto"`` takes, and how to tell that memory ran out."""

import logging
import warnings
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch

from weince.engines import chunked, dense, ring
from weince.pairs import Problem
from weince.parameters import check_choice
from weince.sums import NOTHING, Engine, Need

EngineName = Literal["auto", "dense", "chunked", "fused"]
ENGINES = get_args(EngineName)

CPU_FASTEST = 1 << 26
"""Size of the matrix in bytes up to which dense is faster on the CPU: 2,048 pairs of views in float32."""

CPU_COMPILED = 1 << 30
"""The same in a compiled graph. The limit is higher, since the chunked engine's loops make a long graph."""

GPU_MATRICES = 8
"""Matrices of this size that the dense engine holds on a GPU at its memory peak."""

GPU_SHARE = 0.5
"""Share of a GPU's memory that ``auto`` lets the dense engine use."""

log = logging.getLogger("weince")


class Choice(NamedTuple):
    """The engine that was chosen, and why."""

    name: Literal["dense", "chunked", "fused", "ring"]
    reason: str


def choose(
    problem: Problem, need: Need | None = None, *, engine: EngineName = "auto", ring: bool = False
) -> Choice:
    """Choose the engine for a problem, and say why.

    ``"auto"`` takes the fused engine on CUDA if its kernels support the batch. Otherwise it takes the dense engine
    while the matrix is small enough (on the CPU: for dense to be faster; on a GPU: to fit in memory), and the chunked
    engine beyond that. Any other name selects that engine.

    Args:
        problem: Anchors, candidates and their roles.
        need: What the loss needs from the survey.
        engine: Name of the engine, or ``"auto"``.
        ring: Whether candidates travel from rank to rank; if so, the ring engine is chosen.

    Raises:
        RuntimeError: ``engine="fused"`` does not support this problem; the message says why.

    Examples:
        >>> import torch
        >>> from weince.layouts import problems
        >>> from weince.engines import choose
        >>> (problem,) = problems("cross", torch.randn(8, 4), torch.randn(8, 4))
        >>> choose(problem, engine="chunked")
        Choice(name='chunked', reason='asked for')
    """
    if engine not in ENGINES:
        check_choice("engine", engine, ENGINES)
    if ring:
        return Choice("ring", "candidates come by from rank to rank")
    if engine in ("dense", "chunked"):
        return Choice(engine, "asked for")
    hindrance = why_not_fused(problem, NOTHING if need is None else need)
    if engine == "fused" and hindrance is not None:
        raise RuntimeError(f'engine="fused" cannot serve: {hindrance}; engine="auto" takes another')
    if hindrance is None:
        return Choice("fused", "CUDA, and the kernels serve this batch")
    choice = _by_size(problem, hindrance)
    if choice.name == "chunked" and problem.anchors.device.type == "cuda":
        warn_once(f"weince: {hindrance}; the chunked engine is used instead")
    return choice


def fused_engine() -> Engine:
    """The engine of kernels."""
    from weince.engines.fused import ENGINE  # imported only if needed: Triton is an extra

    return ENGINE


ENGINE_OF = {engine.name: engine for engine in (dense.ENGINE, chunked.ENGINE, ring.ENGINE)}
"""The engines in plain torch."""


def why_not_fused(problem: Problem, need: Need) -> str | None:
    """Why the fused engine cannot be used, in one line; None if it can."""
    if problem.anchors.device.type != "cuda":
        return f"the fused engine wants tensors on a CUDA device; got {problem.anchors.device.type}"
    try:
        from weince.engines.fused import why_not
    except ImportError as error:
        return f"the fused engine cannot be imported: {error}"
    return why_not(problem, need)


def _by_size(problem: Problem, why_not_fused: str) -> Choice:
    anchors, candidates = problem.anchors, problem.candidates
    size = len(anchors) * len(candidates) * anchors.element_size()
    compiling = torch.compiler.is_compiling()
    limit = CPU_COMPILED if compiling else CPU_FASTEST
    if anchors.device.type == "cuda":
        limit = int(GPU_SHARE * _memory_of(anchors.device) / GPU_MATRICES)
    dense_fits = size <= limit
    # Formatting the size would make it a constant of a compiled graph, where no one reads the reason.
    words = (
        ""
        if compiling
        else f"a matrix of {size / MIB:,.0f} MiB is {BOUND[dense_fits]} {limit / MIB:,.0f} MiB"
    )
    return Choice("dense" if dense_fits else "chunked", f"{why_not_fused}; {words}")


MIB = 2**20
BOUND = {True: "within", False: "beyond"}


def _memory_of(device: torch.device) -> int:
    """Memory of a GPU in bytes. A compiled graph takes it as a constant."""
    return int(torch.cuda.get_device_properties(device).total_memory)


# What torch.compiler.assume_constant_result does; calling it would import the compiler with the losses.
_memory_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
