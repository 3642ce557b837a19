"""A user's link in the kernels: record the operations of its function, and translate them to Triton.

The function runs once with stand-ins for the score and the parameters (:class:`Traced`), which record every operation
on a tape. The tape is differentiated by the score and by each parameter, and all of it becomes one Triton function,
``(score, four parameters) -> (logit, slope, four derivatives by parameters)``. None of the user's source text gets
into it: the text comes from the table of :mod:`weince.engines.kernels.tape`.

A function is recorded again for every batch, since values that it reads, such as a schedule, may change. Only a new
tape is translated. If a function uses an operation that is not in the table, the chunked engine computes the link.
"""

import hashlib
import itertools
import linecache
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weince.engines.kernels import elementwise
from weince.engines.kernels.tape import OPERATIONS, Line, Tape, Traced, Untranslatable, where
from weince.links import FunctionLink

log = logging.getLogger("weince")

MOST_PARAMETERS = 4
"""Most parameters of a link: the kernels have room for four coefficients."""

MOST_VARIANTS = 8
"""Most variants of a function (same operations, other numbers) that are translated. Each takes seconds to compile."""

USES = 100
"""One more variant is allowed per this many uses. So numbers may change now and then, but not with every batch."""


class Program(NamedTuple):
    """A recorded function: the lines of its tape, the place of the result, and the number of parameters."""

    lines: tuple[Line, ...]
    result: int
    parameters: int

    def shape(self) -> "Program":
        """The program without the values of its numbers."""
        lines = tuple(line[:1] if line[0] == "number" else line for line in self.lines)
        return Program(lines, self.result, self.parameters)


def record(link: FunctionLink) -> Program:
    """Record the function of a link."""
    if len(link.parameters) > MOST_PARAMETERS:
        raise Untranslatable(f"it has {len(link.parameters)} parameters; the kernels take {MOST_PARAMETERS}")
    tape = Tape([("input", number) for number in range(1 + len(link.parameters))])
    score, *parameters = (Traced(tape, place) for place in range(len(tape.lines)))
    result = link.function(score, **dict(zip(link.parameters, parameters, strict=True)))
    if not (isinstance(result, Traced) and result.tape is tape) or result.is_mask:
        raise Untranslatable("it returns no tensor that was made of the scores")
    if 0 not in _needed(tape.lines, [result.at]):
        raise Untranslatable("what it returns does not depend on the score")
    return Program(tuple(tape.lines), result.at, len(link.parameters))


def _needed(lines: Sequence[Line], places: Sequence[int]) -> set[int]:
    """The given places and those of all lines that they depend on."""
    needed = set(places)
    for place in range(len(lines) - 1, -1, -1):
        if place in needed and lines[place][0] in OPERATIONS:
            needed.update(lines[place][1:])
    return needed


def _times(a: Any, b: Any) -> Any:
    """A product that leaves out factors of 1."""
    if isinstance(a, float) and a == 1:
        return b
    return a if isinstance(b, float) and b == 1 else a * b


def _derivative(tape: Tape, result: int, by: int) -> Any:
    """Derivative of line ``result`` by line ``by``: a number or a :class:`Traced`."""
    found: dict[int, Any] = {by: 1.0}
    for place, (name, *args) in enumerate(tape.lines[: result + 1]):
        if name not in OPERATIONS or found.keys().isdisjoint(args):
            continue
        if name == "where":  # as a choice, since the derivative of the other branch may be infinite
            found[place] = where(Traced(tape, args[0]), found.get(args[1], 0.0), found.get(args[2], 0.0))
            continue
        slopes = OPERATIONS[name].slopes(*(_value(tape, at) for at in (*args, place)))
        terms = [_times(slope, found[at]) for slope, at in zip(slopes, args, strict=False) if at in found]
        terms = [term for term in terms if isinstance(term, Traced) or term != 0]
        if terms:
            found[place] = sum(terms[1:], terms[0])
    return found.get(result, 0.0)


def _value(tape: Tape, place: int) -> Any:
    name, *rest = tape.lines[place]
    return float(rest[0]) if name == "number" else Traced(tape, place)


def differentiate(program: Program) -> tuple[Tape, list[int]]:
    """The tape of a program extended by its derivatives, and the places of the logit, of the slope, and of the
    derivatives by the parameters."""
    tape = Tape(program.lines)
    found = [_derivative(tape, program.result, by) for by in range(1 + program.parameters)]
    return tape, [program.result, *(tape.place_of(one) for one in found)]


def source_of(tape: Tape, places: Sequence[int]) -> str:
    """Body of a Triton function of ``x0`` (the score) to ``x4`` that returns the values at these places."""

    def text(place: int) -> str:
        name, *rest = tape.lines[place]
        if name == "number":
            return str(rest[0]) if math.isfinite(float(rest[0])) else f'float("{rest[0]}")'
        return f"x{place}" if name == "input" else f"v{place}"

    needed = _needed(tape.lines, places)
    body = [
        f"    v{place} = {OPERATIONS[name].source.format(*map(text, args))}"
        for place, (name, *args) in enumerate(tape.lines)
        if place in needed and name in OPERATIONS
    ]
    results = [text(place) for place in places] + ["0.0"] * (1 + MOST_PARAMETERS + 1 - len(places))
    return "\n".join([*body, f"    return {', '.join(results)}", ""])


def evaluate(tape: Tape, places: Sequence[int], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The values at these places of the tape, computed in torch."""
    values: list[Tensor] = []
    for name, *rest in tape.lines:
        if name == "number":
            values.append(inputs[0].new_tensor(float(rest[0])))
        elif name == "input":
            values.append(inputs[rest[0]])
        else:
            function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
            values.append(function(*(values[place] for place in rest)))
    return [values[place] for place in places]


def check(link: FunctionLink, tape: Tape, places: Sequence[int]) -> None:
    """Compare the tape with the function itself, and its derivatives with autograd's, at a few scores."""

    def total(score: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        # Clones, since a function may work in place: F.relu(s, inplace=True).
        copies = {name: value.clone() for name, value in zip(link.parameters, parameters, strict=True)}
        values = link.function(score.clone(), **copies)
        return values.sum(), values

    with torch.inference_mode(False), torch.enable_grad():
        score = torch.linspace(-0.97, 0.98, 14, dtype=torch.float64, device="cpu").unsqueeze(1)
        parameters = [0.7 + 0.13 * number + 0.05 * score for number in range(len(link.parameters))]
        by = tuple(range(1 + len(parameters)))
        slopes, value = torch.func.grad(total, by, has_aux=True)(score, *parameters)
        ours = evaluate(tape, places, [score, *parameters])
    for mine, theirs in zip(ours, (value, *slopes), strict=True):
        # Autograd multiplies the branch not chosen by 0, which is NaN if that is infinite.
        there = theirs.isfinite()
        if not torch.allclose(mine.expand_as(theirs)[there], theirs[there], rtol=1e-5, atol=1e-5):
            raise Untranslatable("what was recorded is not what it computes")


FUNCTIONS = {name: value for name, value in vars(elementwise).items() if not name.startswith("__")}


def build(source: str) -> Any:
    """Make a Triton function from its body. Triton reads the source text from ``linecache``."""
    name = f"link_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    text = f"@triton.jit\ndef {name}(x0, x1, x2, x3, x4):\n{source}"
    path = f"<weince {name}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    names = {**FUNCTIONS, "__name__": __name__, "triton": triton, "tl": tl}
    exec(compile(text, path, "exec"), names)
    return names[name]


class Shape:
    """Counts the variants of a function that were translated, and the uses of all of them."""

    variants, uses = 0, 0


_known: dict[Program, tuple[int, Shape]] = {}
_shapes: dict[Program, Shape] = {}
_functions: dict[int, Any] = {0: None}
_numbers = itertools.count(1)


def function(key: int) -> Any:
    """The Triton function of a key; None for 0."""
    return _functions[key]


def key_of(link: FunctionLink) -> int | None:
    """Key of the Triton function that computes a link; None if the link cannot be translated."""
    try:
        program = record(link)
        if program not in _known:
            _known[program] = _translate(link, program)
        key, shape = _known[program]
        shape.uses += 1
        return key
    except Exception as error:  # a user's function may raise anything if its argument is not a tensor
        log.debug("%r is left to the chunked engine: %s", link, error)
        return None


def _translate(link: FunctionLink, program: Program) -> tuple[int, Shape]:
    shape = _shapes.setdefault(program.shape(), Shape())
    if shape.variants >= MOST_VARIANTS + shape.uses // USES:
        raise Untranslatable("its numbers change too often; make them parameters")
    tape, places = differentiate(program)
    check(link, tape, places)
    key = next(_numbers)
    _functions[key] = build(source_of(tape, places))
    shape.variants += 1
    return key, shape
