"""The kernels as torch operators, so that they work with autograd and torch.compile.

Operators take lists of tensors. ``operands``: rows for the tensor cores and their inverse lengths, of the anchors and
then of the candidates, unless those are the same rows. ``roles`` and ``given``: the arguments of ``launch.roles_of``.
``near``: the tensors of a ``launch.Nearest``, or none. The configuration of a tail is passed as numbers, since an
operator takes no objects.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince.engines.kernels import launch, search
from weince.engines.kernels.launch import Nearest, Pairs, Roles, Sums
from weince.engines.kernels.shapes import operand_shape
from weince.scores import first_order, in_transform
from weince.tail import TailConfig


def pack(config: TailConfig | None) -> list[float]:
    """A tail configuration as numbers, as far as the fit and the gate need it; an empty list for None."""
    if config is None:
        return []
    numbers = (
        config.k, isinstance(config.k, int), config.k_min, config.k_max,
        math.nan if config.rho0 is None else config.rho0, config.rho0_quantile, config.margin, config.kappa_rho,
        config.kappa_aic, config.eps, search.GATES[config.gate], config.drop,
    )  # fmt: skip
    return [float(number) for number in numbers]


@functools.lru_cache(maxsize=64)
def _unpack(numbers: tuple[float, ...]) -> TailConfig | None:
    """The configuration that :func:`pack` packed."""
    if not numbers:
        return None
    k, whole, k_min, k_max, rho0, quantile, margin, kappa_rho, kappa_aic, eps, gate, drop = numbers
    return TailConfig(
        k=int(k) if whole else k,
        k_min=int(k_min),
        k_max=int(k_max),
        rho0=None if math.isnan(rho0) else rho0,
        rho0_quantile=quantile,
        margin=margin,
        kappa_rho=kappa_rho,
        kappa_aic=kappa_aic,
        eps=eps,
        gate=list(search.GATES)[int(gate)],  # type: ignore[arg-type]
        drop=drop,
    )


def _pairs(operands: Sequence[Tensor], like: Tensor) -> Pairs:
    """Pairs of rows as wide as ``like``. The operand's width tells the number of parts: one is narrower than two."""
    x, width = operands[0], like.shape[1]
    parts = 1 if x.shape[1] == operand_shape(width, 1)["DP"] else 2
    return Pairs(x, operands[1], operands[-2], operands[-1], operand_shape(width, parts))


def _roles(roles: Sequence[Tensor], given: int, operands: Sequence[Tensor]) -> Roles:
    return launch.roles_of(roles, given, operands[1])


def _near(given: Sequence[Tensor]) -> Nearest | None:
    return Nearest(*given) if given else None


def _search(
    anchors: Tensor, candidates: Tensor, operands: Sequence[Tensor], roles: Sequence[Tensor], given: int, most: int,
    config: Sequence[float], numbers: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    found = search.search(
        anchors,
        candidates,
        _pairs(operands, anchors),
        _roles(roles, given, operands),
        most,
        _unpack(tuple(config)),
        numbers,
    )
    return *found[:4], *found.near


def _search_fake(
    anchors: Tensor, candidates: Tensor, operands: Sequence[Tensor], roles: Sequence[Tensor], given: int, most: int,
    config: Sequence[float], numbers: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    varies = _roles(roles, given, operands).by_value
    found = search.empty_found(anchors, len(config) > 0, len(numbers), varies)
    return *found[:4], *found.near


def _gate(rho: Tensor, daic: Tensor, made: Tensor, pivot: Tensor | None, config: Sequence[float]) -> Tensor:
    settings = _unpack(tuple(config))
    assert settings is not None
    return search.gated(rho, daic, made, pivot, settings)


def _nearest(
    anchors: Tensor, candidates: Tensor, operands: Sequence[Tensor], roles: Sequence[Tensor], given: int,
    near: Sequence[Tensor], positives: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return launch.nearest(
        anchors,
        candidates,
        _pairs(operands, anchors),
        _roles(roles, given, operands),
        _near(near),
        positives=positives,
    )


def _count(like: Tensor, roles: Sequence[Tensor], given: int, candidates: int) -> Tensor:
    return launch.counted(launch.roles_of(roles, given, like), like.shape[0], candidates)


def _sums(
    anchors: Tensor, candidates: Tensor, coefs: Tensor, thresholds: Tensor, operands: Sequence[Tensor],
    roles: Sequence[Tensor], given: int, near: Sequence[Tensor], spec: Sequence[int], cap: Sequence[float],
    learn: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sums ``(sums, anchors)``; with ``learn``, derivatives by the coefficients ``(coefficients, anchors)``."""
    asked = Sums(tuple(spec), tuple(cap), coefs.detach(), thresholds)
    return launch.summed(
        _pairs(operands, anchors),
        _roles(roles, given, operands),
        _near(near),
        asked,
        len(anchors),
        len(candidates),
        learn,
    )


def _sums_fake(
    anchors: Tensor, candidates: Tensor, coefs: Tensor, thresholds: Tensor, operands: Sequence[Tensor],
    roles: Sequence[Tensor], given: int, near: Sequence[Tensor], spec: Sequence[int], cap: Sequence[float],
    learn: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    number = anchors.shape[0]
    return anchors.new_empty((len(spec), number)), anchors.new_empty((coefs.shape[0] if learn else 0, number))


def _gradient(
    anchors: Tensor, candidates: Tensor, weights: Tensor, values: Tensor, coefs: Tensor, thresholds: Tensor,
    operands: Sequence[Tensor], roles: Sequence[Tensor], given: int, near: Sequence[Tensor], spec: Sequence[int],
    cap: Sequence[float], by_anchor: bool, by_candidate: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the anchors ``(a, d)`` and the candidates ``(c, d)``, empty if not wanted; if these are the
    same rows, all is in the first."""
    (rows, width), count = anchors.shape, len(candidates)
    pairs, symmetric = _pairs(operands, anchors), len(operands) == 2
    asked = Sums(tuple(spec), tuple(cap), coefs.detach(), thresholds)
    rest = (_roles(roles, given, operands), _near(near), asked, values, weights.contiguous())
    ours, theirs = anchors.new_empty((0, width)), anchors.new_empty((0, width))
    if by_anchor or symmetric:
        ours = launch.gradient(pairs, *rest, (rows, count, width), from_rows=True, from_cols=symmetric)
    if by_candidate and not symmetric:
        theirs = launch.gradient(pairs.turned(), *rest, (count, rows, width), from_rows=False, from_cols=True)
    return ours, theirs


def _gradient_fake(
    anchors: Tensor, candidates: Tensor, weights: Tensor, values: Tensor, coefs: Tensor, thresholds: Tensor,
    operands: Sequence[Tensor], roles: Sequence[Tensor], given: int, near: Sequence[Tensor], spec: Sequence[int],
    cap: Sequence[float], by_anchor: bool, by_candidate: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    symmetric, width = len(operands) == 2, anchors.shape[1]
    ours = anchors.shape[0] if by_anchor or symmetric else 0
    theirs = candidates.shape[0] if by_candidate and not symmetric else 0
    return anchors.new_empty((ours, width)), anchors.new_empty((theirs, width))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    anchors, candidates, coefs, thresholds, operands, roles, given, near, spec, cap, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(anchors, candidates, *output, coefs, thresholds, *operands, *roles, *near)
    ctx.lists = len(operands), len(roles), given, len(near), spec, cap


def _gradients(
    ctx: Any, weights: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of anchors, candidates and coefficients; ``weights``: upstream gradient of the sums."""
    if weights is None:
        return None, None, None
    anchors, candidates, values, effects, coefs, thresholds, *rest = ctx.saved_tensors
    first, second, given, _, spec, cap = ctx.lists
    operands, roles, near = rest[:first], rest[first : first + second], rest[first + second :]
    by_anchor, by_candidate, by_coef = wanted
    ours = theirs = learned = None
    if by_anchor or by_candidate:
        ours, theirs = run(
            "sums_gradient", anchors, candidates, weights, values, coefs, thresholds, operands, roles, given, near,
            spec, cap, by_anchor, by_candidate,
        )  # fmt: skip
        ours = first_order(ours, anchors) if by_anchor or len(operands) == 2 else None
        theirs = first_order(theirs, candidates) if by_candidate and len(operands) == 4 else None
    if by_coef:
        form = coefs.shape[0] // weights.shape[0]
        each = (effects.view(weights.shape[0], form, -1) * weights.unsqueeze(1)).flatten(0, 1)
        learned = first_order(each.sum_to_size(coefs.shape), coefs)
    return ours, theirs, learned


def _backward(ctx: Any, weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
    first, second, _, third, _, _ = ctx.lists
    nothing = (None, [None] * first, [None] * second, None, [None] * third, None, None, None)
    return *_gradients(ctx, weights, ctx.needs_input_grad[:3]), *nothing


class Lists(NamedTuple):
    """Arguments of :class:`_Sums` that are not tensors, and how many of the tensors are operands and roles."""

    operands: int
    roles: int
    given: int
    spec: list[int]
    cap: list[float]
    learn: int

    def inputs(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """All arguments in the order of the operator."""
        first, second = 4 + self.operands, 4 + self.operands + self.roles
        lists = (tensors[4:first], tensors[first:second], self.given, tensors[second:])
        return *tensors[:4], *lists, self.spec, self.cap, self.learn


class _Sums(torch.autograd.Function):
    """The operator ``sums`` outside compiled graphs: it calls the function directly, which costs less CPU time."""

    @staticmethod
    def forward(ctx: Any, lists: Lists, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        inputs = lists.inputs(tensors)
        values, effects = _FUNCTIONS["sums"](*inputs)
        _save(ctx, inputs, (values, effects))
        ctx.mark_non_differentiable(effects)
        return values, effects

    @staticmethod
    def backward(ctx: Any, weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
        return (
            None,
            *_gradients(ctx, weights, ctx.needs_input_grad[1:4]),
            # Counted without the saved tensors: under activation checkpointing they can be read only once.
            *(None,) * (len(ctx.needs_input_grad) - 4),
        )


class _Transformed(torch.autograd.Function):
    """The operator ``sums`` under torch.func, whose wrapped tensors only operators can unwrap."""

    @staticmethod
    def forward(lists: Lists, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        values, effects = torch.ops.weince.sums(*lists.inputs(tensors))
        return values, effects

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        lists, *tensors = inputs
        _save(ctx, lists.inputs(tensors), output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
        return _Sums.backward(ctx, weights)


def _apart(anchors: Tensor, candidates: Tensor, positive: Tensor, symmetric: bool) -> Tensor:
    return launch.apart(anchors.detach(), candidates.detach(), positive)


def _apart_gradient(
    weights: Tensor, anchors: Tensor, candidates: Tensor, positive: Tensor, symmetric: bool
) -> tuple[Tensor, Tensor]:
    return launch.apart_gradient(anchors, candidates, positive, weights.contiguous(), symmetric=symmetric)


def _apart_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.symmetric = inputs[3]


def _apart_backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
    anchors, candidates, positive = ctx.saved_tensors
    ours, theirs = run(
        "apart_gradient", weights, anchors.detach(), candidates.detach(), positive, ctx.symmetric
    )
    theirs = None if ctx.symmetric else first_order(theirs, candidates)
    return first_order(ours, anchors), theirs, None, None


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        result: Tensor = _FUNCTIONS["apart"](*inputs)
        _apart_save(ctx, inputs, result)
        return result

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
        return _apart_backward(ctx, weights)


def apart(anchors: Tensor, candidates: Tensor, positive: Tensor, symmetric: bool) -> Tensor | None:
    """Exact shortfall ``(a,)`` between every anchor and its one positive, with gradient; None under torch.func or
    for tensor subclasses, where the caller must use plain torch.

    Args:
        anchors: ``(a, d)`` unit rows.
        candidates: ``(c, d)`` unit rows.
        positive: ``(a,)`` column of the positive; no two anchors share one.
        symmetric: Anchors and candidates are the same rows, and an anchor is the positive of its positive.
    """
    if torch.compiler.is_compiling():
        traced: Tensor = torch.ops.weince.apart(anchors, candidates, positive, symmetric)
        return traced
    if in_transform() or type(anchors) is not Tensor:
        return None
    found: Tensor = _Apart.apply(anchors, candidates, positive, symmetric)  # type: ignore[no-untyped-call]
    return found


_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def run(name: str, first: Tensor, *rest: Any) -> Any:
    """Call an operator, or, if nothing traces or transforms it, its function, which costs less CPU time."""
    if torch.compiler.is_compiling() or in_transform() or type(first) is not Tensor:
        return getattr(torch.ops.weince, name)(first, *rest)
    return _FUNCTIONS[name](first, *rest)


def sums(
    anchors: Tensor, candidates: Tensor, coefs: Tensor, thresholds: Tensor, operands: list[Tensor],
    roles: list[Tensor], given: int, near: list[Tensor], spec: list[int], cap: list[float], learn: int,
) -> Tensor:  # fmt: skip
    """Sums ``(sums, anchors)`` with their gradient.

    Args:
        anchors: ``(a, d)`` unit rows; they get a gradient.
        candidates: ``(c, d)`` unit rows; they get a gradient.
        coefs: Coefficients of the links, see :class:`weince.engines.kernels.launch.Sums`; they get a gradient.
        thresholds: Thresholds of the hardest negatives, one row each.
        operands: Operands of anchors and candidates.
        roles: Roles of the pairs.
        given: Bits that tell which roles these are.
        near: Exact shortfalls of the nearest candidates, or an empty list.
        spec: Kind and options of each sum, see :class:`weince.engines.kernels.launch.Sums`.
        cap: ``offset``, ``lowest`` and ``floor`` of the logarithms.
        learn: Bits of the coefficients that need a gradient.
    """
    if torch.compiler.is_compiling() or (type(anchors) is not Tensor and not in_transform()):
        values: Tensor = torch.ops.weince.sums(
            anchors, candidates, coefs, thresholds, operands, roles, given, near, spec, cap, learn
        )[0]
        return values
    function = _Transformed if in_transform() else _Sums
    lists = Lists(len(operands), len(roles), given, spec, cap, learn)
    found: tuple[Tensor, Tensor] = function.apply(  # type: ignore[no-untyped-call]
        lists, anchors, candidates, coefs, thresholds, *operands, *roles, *near
    )
    return found[0]


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the device of a function's first tensor current while it runs: Triton launches on the current device."""

    @functools.wraps(function)
    def moved(first: Tensor, *rest: Any) -> Any:
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return function(first, *rest)
        with torch.cuda.device(first.device):
            return function(first, *rest)

    return moved


def _register(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register a function as an operator. (``custom_op`` would add a millisecond of checks to every call.)"""
    _FUNCTIONS[name] = function = _on_its_device(function)
    name = f"weince::{name}"
    torch.library.define(name, schema)
    torch.library.impl(name, ("cuda", "cpu"), function)
    torch.library.register_fake(name, fake)


def rows_served(source: Tensor) -> bool:
    """Whether the kernels can scale these rows to length 1."""
    return (
        type(source) is Tensor
        and source.device.type == "cuda"
        and source.dtype != torch.float64
        and source.shape[1] <= launch.WIDEST
        and not in_transform()
    )


unit_rows = _on_its_device(launch.unit_rows)
unit_gradient = _on_its_device(launch.unit_gradient)

_ROWS = "Tensor anchors, Tensor candidates"
_LISTS = "Tensor[] operands, Tensor[] roles, int given"
_SUMS = f"Tensor coefs, Tensor thresholds, {_LISTS}, Tensor[] near, int[] spec, float[] cap"

_register("operand", "(Tensor rows) -> (Tensor, Tensor)", launch.operand, launch.operand_like)
_register(
    "search",
    f"({_ROWS}, {_LISTS}, int most, float[] config, int[] numbers)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _search,
    _search_fake,
)
_register(
    "gate",
    "(Tensor rho, Tensor daic, Tensor made, Tensor? pivot, float[] config) -> Tensor",
    _gate,
    lambda rho, daic, made, pivot, config: torch.empty_like(rho),
)
_register(
    "nearest",
    f"({_ROWS}, {_LISTS}, Tensor[] near, bool positives) -> (Tensor, Tensor, Tensor)",
    _nearest,
    lambda anchors, candidates, operands, roles, given, near, positives: launch.empty_near(
        anchors, launch.EXACT * (1 + positives)
    ),
)
_register(
    "count_negatives",
    "(Tensor like, Tensor[] roles, int given, int candidates) -> Tensor",
    _count,
    lambda like, roles, given, candidates: like.new_empty((like.shape[0],), dtype=torch.int64),
)
_register("sums", f"({_ROWS}, {_SUMS}, int learn) -> (Tensor, Tensor)", _sums, _sums_fake)
_register(
    "sums_gradient",
    f"({_ROWS}, Tensor weights, Tensor values, {_SUMS}, bool by_anchor, bool by_candidate) -> (Tensor, Tensor)",
    _gradient,
    _gradient_fake,
)
torch.library.register_autograd("weince::sums", _backward, setup_context=_save)
_register(
    "apart",
    f"({_ROWS}, Tensor positive, bool symmetric) -> Tensor",
    _apart,
    lambda anchors, candidates, positive, symmetric: anchors.new_empty((anchors.shape[0],)),
)
_register(
    "apart_gradient",
    f"(Tensor weights, {_ROWS}, Tensor positive, bool symmetric) -> (Tensor, Tensor)",
    _apart_gradient,
    lambda weights, anchors, candidates, positive, symmetric: (
        anchors.new_empty(anchors.shape),
        candidates.new_empty((0 if symmetric else candidates.shape[0], candidates.shape[1])),
    ),
)
torch.library.register_autograd("weince::apart", _apart_backward, setup_context=_apart_save)
