"""Which engine computes a loss: ``engine="auto"``, and what it does when memory runs out."""

import logging
import warnings
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from weince.candidates import Contest, check_choice
from weince.engines.base import NOTHING, Engine, Need
from weince.engines.chunked import Chunked
from weince.engines.dense import Dense
from weince.engines.ring import Ring

EngineName = Literal["auto", "dense", "chunked", "fused"]
ENGINES = get_args(EngineName)  # here: torch 2.6 cannot compile the call

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
    """The engine that was chosen, and why."""

    name: Literal["dense", "chunked", "fused", "ring"]
    reason: str


def choose(
    contest: Contest, need: Need | None = None, *, engine: EngineName = "auto", ring: bool = False
) -> Choice:
    """The engine that serves a contest, and why.

    ``"auto"`` takes the fused kernels on CUDA where they can serve; elsewhere the dense engine while its matrix is
    small enough (on the CPU, to be the faster one; on a GPU, to fit), then the chunked one. Another name is taken
    as it is.

    Args:
        contest: Anchors, candidates and their roles.
        need: What the loss asks of the survey.
        engine: Which engine.
        ring: Whether the candidates of other ranks come by in turn.

    Raises:
        RuntimeError: The engine asked for cannot serve; the message says why.

    Examples:
        >>> import torch
        >>> from weince.candidates import contests
        >>> from weince.engines import choose
        >>> (contest,) = contests("cross", torch.randn(8, 4), torch.randn(8, 4))
        >>> choose(contest, engine="chunked")
        Choice(name='chunked', reason='asked for')
    """
    check_choice("engine", engine, ENGINES)
    if ring:
        return Choice("ring", "candidates come by from rank to rank")
    if engine in ("dense", "chunked"):
        return Choice(engine, "asked for")
    hindrance = why_not_fused(contest, NOTHING if need is None else need)
    if engine == "fused" and hindrance is not None:
        raise RuntimeError(f'engine="fused" cannot serve: {hindrance}; engine="auto" takes another')
    if hindrance is None:
        return Choice("fused", "CUDA, and the kernels serve this batch")
    choice = _by_size(contest, hindrance)
    if choice.name == "chunked" and contest.anchors.device.type == "cuda":
        warn_once(f"weince: {hindrance}; the chunked engine is used instead")
    return choice


def start(contest: Contest, need: Need, choice: Choice) -> Engine:
    """The chosen engine at work on a contest: its survey is made."""
    if not torch.compiler.is_compiling():
        log.debug("engine %s: %s", *choice)
    if choice.name == "ring":
        return Ring(contest, need)
    if choice.name == "dense":
        return Dense(contest, need)
    if choice.name == "chunked":
        return Chunked(contest, need)
    from weince.engines.fused import Fused  # when wanted, since Triton is an extra

    return Fused(contest, need)


def why_not_fused(contest: Contest, need: Need) -> str | None:
    """Why the fused engine cannot serve, in one line; None where it can."""
    if contest.anchors.device.type != "cuda":
        return f"the fused engine wants tensors on a CUDA device; got {contest.anchors.device.type}"
    try:
        from weince.engines.fused import why_not
    except ImportError as error:
        return f"the fused engine cannot be imported: {error}"
    return why_not(contest, need)


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


def out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
