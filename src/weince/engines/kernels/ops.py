"""The kernels as torch operators, so that they work with autograd, torch.func and torch.compile.

A :class:`Call` says what is computed, apart from the tensors. Its function runs directly where nothing traces or
transforms it; otherwise one operator, ``weince::kernels``, runs it, with the call's number.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince.engines.kernels import launch, search
from weince.engines.kernels.launch import Matrix, Nearest
from weince.engines.kernels.translate import recorded
from weince.scores import first_order, in_transform
from weince.tail import TailConfig


class Call(NamedTuple):
    """A function of :data:`FUNCTIONS`, and how its tensors are to be read; it can be hashed.

    ``operands``, ``of_anchor``, ``of_candidate``: number of operands and names of columns in a :class:`Matrix`.
    ``settings``: further arguments of the function.
    """

    function: str
    operands: int = 0
    of_anchor: tuple[str, ...] = ()
    of_candidate: tuple[str, ...] = ()
    cosine: bool = True
    settings: tuple[Any, ...] = ()

    def matrix(self, tensors: Sequence[Tensor]) -> tuple[Matrix, Sequence[Tensor]]:
        """The matrix that the first tensors make, and the other tensors."""
        first = 2 + self.operands
        second = first + len(self.of_anchor)
        third = second + len(self.of_candidate)
        of_anchor = dict(zip(self.of_anchor, tensors[first:second], strict=True))
        of_candidate = dict(zip(self.of_candidate, tensors[second:third], strict=True))
        rows = tensors[0], tensors[1], tuple(tensors[2:first])
        return Matrix(*rows, of_anchor, of_candidate, self.cosine), tensors[third:]


_calls: list[Call] = []
_numbers: dict[Call, int] = {}


def number_of(*fields: Any) -> int:
    """The number of a call, for an operator, which takes no objects; a compiler passes the fields as constants."""
    call = Call(*fields)
    if call not in _numbers:
        _numbers[call] = len(_calls)
        _calls.append(call._replace(settings=tuple(map(recorded, call.settings))))
    return _numbers[call]


# What torch.compiler.assume_constant_result does; calling it would import the compiler with the losses.
number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def call_on(matrix: Matrix, function: str, *settings: Any) -> tuple[Call, list[Tensor]]:
    """A call on a matrix, and the matrix as tensors."""
    names = tuple(matrix.of_anchor), tuple(matrix.of_candidate)
    columns = *matrix.of_anchor.values(), *matrix.of_candidate.values()
    tensors = [matrix.anchors, matrix.candidates, *matrix.operands, *columns]
    return Call(function, len(matrix.operands), *names, matrix.cosine, settings), tensors


def run(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run a call: directly, which costs less CPU time, or as an operator, if something traces or transforms it."""
    first = tensors[0]
    if torch.compiler.is_compiling() or in_transform() or type(first) is not Tensor:
        results: list[Tensor] = torch.ops.weince.kernels(list(tensors), number_of(*call))
        return results
    return _direct(call, tensors)


def _direct(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    with _device_of(tensors[0]):
        return FUNCTIONS[call.function].run(call, tensors)


def _device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which the tensor's device is the current one, on which Triton launches."""
    is_current = not tensor.is_cuda or tensor.device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(tensor.device)


class Function(NamedTuple):
    """What a call runs, and the same with empty results, for a compiler."""

    run: Callable[[Call, Sequence[Tensor]], list[Tensor]]
    like: Callable[[Call, Sequence[Tensor]], list[Tensor]]


# Sums and their gradient


def _summed(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    matrix, near = call.matrix(tensors)
    asked, tops, _ = call.settings
    return list(launch.summed(matrix, asked, Nearest(*near) if near else None, tops))


def _summed_like(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    anchors, sums = tensors[0], call.settings[0].sums
    learned = sum(len(summand.learned) for summand in sums)
    return [anchors.new_empty((number, anchors.shape[0])) for number in (len(sums), learned)]


def _gradient(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the anchors ``(a, d)`` and the candidates ``(c, d)``, empty if not wanted; if these are the
    same rows, all is in the first. The first tensors are those of the sums, then values and weights."""
    matrix, (*near, values, weights) = call.matrix(tensors)
    asked, by_anchor, by_candidate = call.settings
    results = []
    for wanted, of_anchors, rows in (
        (by_anchor or matrix.symmetric, True, matrix.anchors),
        (by_candidate and not matrix.symmetric, False, matrix.candidates),
    ):
        if wanted:
            known = Nearest(*near) if near else None
            results.append(
                launch.gradient(matrix, asked, known, values, weights.contiguous(), of_anchors=of_anchors)
            )
        else:
            results.append(rows.new_empty((0, rows.shape[1])))
    return results


def _gradient_like(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    matrix, _ = call.matrix(tensors)
    _, by_anchor, by_candidate = call.settings
    rows, width = (matrix.anchors.shape[0], matrix.candidates.shape[0]), matrix.anchors.shape[1]
    wanted = by_anchor or matrix.symmetric, by_candidate and not matrix.symmetric
    return [matrix.anchors.new_empty((count * want, width)) for count, want in zip(rows, wanted, strict=True)]


def _signed(function: type[torch.autograd.Function]) -> Any:
    """Keep the signature of ``forward``, which torch would work out at every call, for longer than the call takes."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


@_signed
class _Sums(torch.autograd.Function):
    """Sums ``(sums, anchors)``, and their derivatives by learned parameters, which the backward pass needs."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        values, derivatives = run(call, tensors)
        return values, derivatives

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, weights: Tensor | None, *_: Any) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if weights is None:
            return tuple(gradients)
        call: Call = ctx.call
        *tensors, values, derivatives = ctx.saved_tensors
        asked, _, learned = call.settings
        by_anchor, by_candidate = ctx.needs_input_grad[1:3]
        if by_anchor or by_candidate:
            again = Call("gradient", *call[1:5], (asked, by_anchor, by_candidate))
            ours, theirs = run(again, [*tensors, values, weights])
            symmetric = call.operands == 2
            if by_anchor or symmetric:
                gradients[1] = first_order(ours, tensors[0])
            if by_candidate and not symmetric:
                gradients[2] = first_order(theirs, tensors[1])
        for line, (owner, name) in enumerate(learned):
            place = 3 + call.operands + call.of_anchor.index(name)
            if ctx.needs_input_grad[place]:
                parameter = tensors[place - 1]
                share = (derivatives[line] * weights[owner]).sum_to_size(parameter.shape).to(parameter.dtype)
                before = gradients[place]
                gradients[place] = share if before is None else before + share
        for place in range(3 + call.operands, len(gradients)):
            gradient = gradients[place]
            if gradient is not None:
                gradients[place] = first_order(gradient, tensors[place - 1])
        return tuple(gradients)


def sums(
    matrix: Matrix,
    near: Nearest | None,
    asked: Any,
    tops: tuple[bool, ...],
    learned: tuple[tuple[int, str], ...],
) -> Tensor:
    """Sums ``(sums, anchors)`` with their gradient.

    Args:
        matrix: The pairs; anchors, candidates and learned columns get a gradient.
        near: Exact shortfalls of the nearest candidates, if known.
        asked: The sums, see :class:`weince.engines.kernels.translate.Recorded`; in a compiled graph a request.
        tops: For each sum, whether the nearest negative has its largest logit and is in ``near``.
        learned: For each derivative, which sum it belongs to, and the name of the learned column.
    """
    call, tensors = call_on(matrix, "sums", asked, tops, learned)
    if torch.compiler.is_compiling():  # torch cannot compile an autograd function that takes one tensor twice
        tensors = [tensor.view_as(tensor) for tensor in tensors]
    values, _ = _Sums.apply(call, *tensors, *(near or ()))  # type: ignore[no-untyped-call]
    result: Tensor = values
    return result


# Shortfalls of positives


def _apart(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [launch.apart(*tensors)]


def _apart_gradient(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    anchors, candidates, positive, weights = tensors
    (symmetric,) = call.settings
    return list(
        launch.apart_gradient(anchors, candidates, positive, weights.contiguous(), symmetric=symmetric)
    )


def _apart_gradient_like(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    anchors, candidates = tensors[:2]
    (symmetric,) = call.settings
    rows = 0 if symmetric else candidates.shape[0]
    return [anchors.new_empty(anchors.shape), candidates.new_empty((rows, candidates.shape[1]))]


@_signed
class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(symmetric: bool, *tensors: Tensor) -> Tensor:
        return run(Call("apart"), tensors)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.symmetric, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
        anchors, candidates, positive = ctx.saved_tensors
        call = Call("apart_gradient", settings=(ctx.symmetric,))
        ours, theirs = run(call, [anchors, candidates, positive, weights])
        return (
            None,
            first_order(ours, anchors),
            None if ctx.symmetric else first_order(theirs, candidates),
            None,
        )


def apart(anchors: Tensor, candidates: Tensor, positive: Tensor, symmetric: bool) -> Tensor:
    """Exact shortfall ``(a,)`` between every anchor and its one positive, with gradient.

    Args:
        anchors: ``(a, d)`` unit rows.
        candidates: ``(c, d)`` unit rows.
        positive: ``(a,)`` column of the positive; no two anchors share one.
        symmetric: Anchors and candidates are the same rows, and an anchor is the positive of its positive.
    """
    result: Tensor = _Apart.apply(symmetric, anchors, candidates, positive)  # type: ignore[no-untyped-call]
    return result


# Surveys


TAIL = tuple(field.name for field in dataclasses.fields(TailConfig))


def fields_of(config: TailConfig | None) -> tuple[Any, ...] | None:
    """A configuration as plain values, which a compiler can take for constants."""
    return None if config is None else tuple(getattr(config, name) for name in TAIL)


def _searched(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    matrix, _ = call.matrix(tensors)
    asked, config, numbers = call.settings
    result = search.search(matrix, asked, None if config is None else TailConfig(*config), numbers)
    return [*result[:4], *result.near]


def _searched_like(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    asked, config, numbers = call.settings
    result = search.empty_result(tensors[0], config is not None, len(numbers), asked.by_value)
    return [*result[:4], *result.near]


def _nearest(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    matrix, near = call.matrix(tensors)
    return list(launch.nearest(matrix, Nearest(*near) if near else None, call.settings))


def _gate(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    rho, daic, has_fit, *pivot = tensors
    (config,) = call.settings
    return [search.gated(rho, daic, has_fit, pivot[0] if pivot else None, TailConfig(*config))]


def operand(rows: Tensor) -> list[Tensor]:
    """Rows for the tensor cores, and their inverse lengths."""
    return run(Call("operand"), [rows])


def gate(rho: Tensor, daic: Tensor, has_fit: Tensor, pivot: Tensor | None, config: TailConfig) -> Tensor:
    """``lam`` of every anchor."""
    return run(
        Call("gate", settings=(fields_of(config),)),
        [rho, daic, has_fit, *(() if pivot is None else (pivot,))],
    )[0]


FUNCTIONS: Mapping[str, Function] = {
    "operand": Function(
        lambda _, rows: [*launch.operand(*rows)], lambda _, rows: [*launch.operand_like(*rows)]
    ),
    "search": Function(_searched, _searched_like),
    "gate": Function(_gate, lambda _, tensors: [torch.empty_like(tensors[0])]),
    "nearest": Function(
        _nearest, lambda call, tensors: [*launch.empty_near(tensors[0], launch.EXACT * len(call.settings))]
    ),
    "sums": Function(_summed, _summed_like),
    "gradient": Function(_gradient, _gradient_like),
    "apart": Function(_apart, lambda _, tensors: [tensors[0].new_empty((tensors[0].shape[0],))]),
    "apart_gradient": Function(_apart_gradient, _apart_gradient_like),
}

torch.library.define("weince::kernels", "(Tensor[] tensors, int call) -> Tensor[]")
torch.library.impl("weince::kernels", ("cuda", "cpu"), lambda tensors, call: _direct(_calls[call], tensors))
torch.library.register_fake(
    "weince::kernels", lambda tensors, call: FUNCTIONS[_calls[call].function].like(_calls[call], tensors)
)


def rows_served(source: Tensor) -> bool:
    """Whether the kernels can scale these rows to length 1."""
    return (
        type(source) is Tensor
        and source.device.type == "cuda"
        and source.dtype != torch.float64
        and source.shape[1] <= launch.WIDEST
        and not in_transform()
    )


def unit_rows(source: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows and inverse lengths, see :func:`weince.engines.kernels.launch.unit_rows`."""
    with _device_of(source):
        return launch.unit_rows(source)


def unit_gradient(grad: Tensor, unit: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the rows, see :func:`weince.engines.kernels.launch.unit_gradient`."""
    with _device_of(grad):
        return launch.unit_gradient(grad, unit, inverse, dtype)
