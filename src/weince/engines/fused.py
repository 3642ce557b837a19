"""The fused engine: Triton kernels for CUDA, memory linear in the batch.

Three passes over tiles of the score matrix, none of which is ever written: the hardest negatives, the log-sum-exp,
the gradient. It serves one term under the softmax, shortfall, blend or WEINCE link, with one positive per anchor;
:func:`why_not` says what it does not serve.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from weince.candidates import Contest
from weince.engines.rows import EngineOutput
from weince.links import BlendLink, Link, Scalar, ShortfallLink, SoftmaxLink
from weince.scores import no_autocast
from weince.tail import TailConfig, TailStats
from weince.terms import Term, WeinceLink

LARGEST_TAIL = 1024

SHARED_MEMORY = 200 << 10
"""Bytes that the largest tiles ask for, rounded up; they were tuned on an H200, and no others are there."""


def too_old(version: str) -> str | None:
    """One line why a version of Triton cannot run the kernels; None if it can."""
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 5):
        return f"the fused engine wants Triton 3.5 or newer, as torch brings it since 2.9; got {version}"
    return None


_ops: ModuleType | None = None
try:
    import triton

    _missing = too_old(triton.__version__)
    if _missing is None:
        from weince.engines.kernels import launch
        from weince.engines.kernels import ops as _ops
except ImportError:
    _missing = "the fused engine wants Triton, which is not installed: pip install 'weince[gpu]'"


def why_not(contest: Contest, terms: Sequence[Term], tail: TailConfig | None) -> str | None:
    """One line why the fused engine cannot serve this; None if it can."""
    return hindrance(contest.anchors.device) or _refusal(contest, terms, tail)


def hindrance(device: torch.device) -> str | None:
    """One line why the kernels cannot run on a device; None if they can."""
    if device.type != "cuda":
        return f"the fused engine wants tensors on a CUDA device; got {device.type}"
    if _too_small(device):
        return "the fused engine's tiles want 200 KiB of shared memory per block, as GPUs since the H100 have"
    return _missing


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _too_small(device: torch.device) -> bool:
    """Whether a GPU has no room for the tiles; a compiled graph takes the answer as it finds it."""
    return _shared_memory(device) < SHARED_MEMORY


@cache
def _shared_memory(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def _refusal(contest: Contest, terms: Sequence[Term], tail: TailConfig | None) -> str | None:
    """What it does not serve, wherever the tensors are."""
    if _missing is not None:
        return _missing
    if contest.anchors.dtype != torch.float32:
        return f"the fused engine works in float32; got {contest.anchors.dtype}"
    if contest.positive is None or contest.labels is not None:
        return "the fused engine wants one positive per anchor; got labels"
    if contest.ranks is not None:
        return "the fused engine works in one process; got candidates of several"
    if contest.ignore is not None:
        return "the fused engine takes no ignore mask"
    if len(terms) != 1 or terms[0].hardest is not None:
        return "the fused engine takes one term over all negatives; got extra terms"
    if not isinstance(terms[0].link, SoftmaxLink | ShortfallLink | BlendLink | WeinceLink):
        return f"the fused engine has no {type(terms[0].link).__name__}"
    if not terms[0].link.in_kernels:
        return "the fused engine has no blend with another endpoint, softmax on positives or a matched slope"
    if contest.most_negatives < 1:
        return "the fused engine wants at least one negative"
    if tail is not None and tail.tail_size(contest.most_negatives) > LARGEST_TAIL:
        return f"the fused engine fits tails of {LARGEST_TAIL} at the most; got {tail}"
    return None


def fused(contest: Contest, terms: Sequence[Term], tail: TailConfig | None) -> EngineOutput:
    """Loss of every anchor of a contest, as :func:`weince.engines.dense.dense` defines it.

    Args:
        contest: Anchors, candidates and their roles.
        terms: One term.
        tail: How to take the tail statistics, where a link or the caller wants them.
    """
    refusal = _refusal(contest, terms, tail) if _interpreted() else why_not(contest, terms, tail)
    if refusal is not None:
        raise ValueError(refusal)
    assert _ops is not None
    assert contest.positive is not None
    link, weight = terms[0].link, terms[0].weight
    anchors = len(contest.anchors)
    binds = isinstance(link, WeinceLink)
    learned = [value for value in link.tensors().values() if value.requires_grad]
    g = w = None
    temperature: Scalar = 1.0
    beta: Literal["fit"] | float = "fit"
    if isinstance(link, WeinceLink):
        assert tail is not None
        assert link.tail.beta != "slope"
        temperature, beta = link.temperature, link.tail.beta
    with no_autocast(contest.anchors.device):
        if not binds:
            g, w = (
                None if value is None else _spread(value, contest.anchors) for value in _coefficients(link)
            )
        ids = contest.ids or (None, None)
        raw = contest.raw or (None, None)
        loss, stats, state, *_ = torch.ops.weince.fused(
            contest.anchors,
            contest.candidates,
            *raw,
            contest.positive,
            contest.itself,
            *(None if value is None else value.long() for value in ids),
            None if g is None else g.detach(),
            None if w is None else w.detach(),
            temperature.detach().float() if isinstance(temperature, Tensor) else None,
            1.0 if isinstance(temperature, Tensor) else float(temperature),
            _ops.pack(tail, beta),
            *cap(link),
            bool(learned),
            contest.symmetric,
        )
        found = None if tail is None else TailStats(*stats.detach())
        if learned:
            if binds:
                assert found is not None
                g, w = (1 - found.lam) / temperature, None
            effects = state.detach()
            for coefficient, effect in ((g, effects[2]), (w, effects[3])):
                if coefficient is not None and coefficient.requires_grad:
                    loss = loss + effect * (coefficient - coefficient.detach()).expand(anchors)
        return EngineOutput(loss if weight == 1 else weight * loss, None, found)


def _interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, to test them."""
    return _ops is not None and bool(launch.INTERPRETED)


def _coefficients(link: Link) -> tuple[Scalar | None, Scalar | None]:
    """Factors of the score and of minus the logarithm; None: no such part."""
    if isinstance(link, SoftmaxLink):
        return 1 / link.temperature, None
    if isinstance(link, ShortfallLink):
        return 0.0, link.beta
    assert isinstance(link, BlendLink)
    return (1 - link.lam) / link.temperature, link.lam * link.beta


def cap(link: Link) -> tuple[float, float, bool]:
    """``offset`` and ``lowest`` in the logarithm of ``offset + max(shortfall, lowest)``; whether there is none."""
    if isinstance(link, ShortfallLink):
        return link.endpoint - 1, link.eps - (link.endpoint - 1), False
    if isinstance(link, BlendLink | WeinceLink):
        own = link.tail if isinstance(link, WeinceLink) else link
        return (own.eps if own.soft_cap else 0.0) + (own.endpoint - 1), own.eps, False
    return 0.0, 0.0, True


def _spread(value: Scalar, like: Tensor) -> Tensor:
    """One value per anchor, in float32."""
    if not isinstance(value, Tensor):
        return torch.full((len(like),), value, dtype=torch.float32, device=like.device)
    return value.to(like).expand(len(like)).contiguous()
