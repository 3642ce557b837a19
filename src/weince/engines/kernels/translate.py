"""Links and rules in the kernels: record their functions, differentiate the tape, and write it as Triton functions.

The functions of links and rules run once with stand-ins for shortfalls and columns (:class:`Traced`), which record
every operation on one tape for all sums of a pass. The tape is differentiated by the shortfall and by each learned
parameter, and lowered to the functions that the kernels call (:class:`Functions`). None of the user's source text
gets into them: the text comes from the table of :mod:`weince.engines.kernels.tape`.

A user's link is recorded again for every batch, since values that it reads, such as a schedule, may change. Numbers
are arguments of the kernels, so that only new operations make new kernels. If a function uses an operation that is
not in the table, the chunked engine computes the link.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince import pairs
from weince.engines.kernels.lower import needed
from weince.engines.kernels.tape import OPERATIONS, Line, Tape, Traced, Untranslatable, where
from weince.links import FunctionLink, Link
from weince.pairs import Rule

log = logging.getLogger("weince")


class Summand(NamedTuple):
    """One sum on the tape: places of its logit, of the shortfall, of its rules' masks, and of learned parameters."""

    kind: str
    logit: int
    shortfall: int
    rules: tuple[int, ...]
    learned: tuple[int, ...] = ()
    custom: bool = False  # whether a user wrote the link


class Recorded(NamedTuple):
    """The sums of a pass on one tape.

    ``single``: places of rules that exclude one candidate of each anchor. ``bounded``: whether scores are cosines.
    ``symmetric``: whether anchors and candidates are the same rows.
    """

    lines: tuple[Line, ...]
    sums: tuple[Summand, ...]
    single: tuple[int, ...] = ()
    bounded: bool = True
    symmetric: bool = False

    @property
    def by_value(self) -> bool:
        """Whether rules may leave out any number of an anchor's candidates."""
        return any(place not in self.single for summand in self.sums for place in summand.rules)


# Recording


class Columns:
    """Stand-in for the columns of one side, in a rule."""

    def __init__(self, tape: Tape, side: str, types: Mapping[str, str], threshold: str = "") -> None:
        self._tape, self._side, self._types, self._threshold = tape, side, types, threshold

    def __getattr__(self, name: str) -> Traced:
        if name == "threshold" and self._side == "anchor":
            return column(self._tape, self._threshold, True)
        if name == "ignore":
            return Traced(self._tape, self._tape.put(("input", "ignore", "mask")))
        if name == "position" and self._side == "candidate":
            return Traced(self._tape, self._tape.put(("input", "position", "int")))
        if name not in self._types:
            raise Untranslatable(f"it reads a column {name!r} that this batch lacks")
        if self._side == "anchor":
            return column(self._tape, name, True, self._types[name])
        return Traced(self._tape, self._tape.put(("input", "candidate", name, self._types[name])))


def column(tape: Tape, name: str, each: bool, kind: str = "float") -> Traced:
    """A value of the anchor; ``each``: every anchor has its own."""
    return Traced(tape, tape.put(("input", "anchor", name, each, kind)))


def record_rule(rule: Rule, tape: Tape, types: Sequence[Mapping[str, str]], threshold: str = "") -> int:
    """Place of a rule's mask. ``types``: those of anchors' and candidates' columns; ``threshold``: name of that
    column."""
    shortfall = Traced(tape, tape.put(("input", "compared", "float")))
    anchor, candidate = (
        Columns(tape, side, names, threshold)
        for side, names in zip(("anchor", "candidate"), types, strict=True)
    )
    result = rule.takes_part(shortfall, anchor, candidate)
    if not isinstance(result, Traced) or not result.is_mask:
        raise Untranslatable(f"the rule {rule.name!r} returns no condition")
    return result.at


Code = tuple[type[Link], tuple[tuple[str, Any], ...]]
"""A link of this library without its tensors: its class, and its other fields by name."""


def record_link(link: Link | Code, tape: Tape, parameters: Mapping[str, Traced]) -> tuple[int, int]:
    """Places of a link's logit and of its shortfall, given stand-ins for its tensors by name."""
    shortfall = Traced(tape, tape.put(("input", "d" if isinstance(link, tuple) else "bounded", "float")))
    with torch.inference_mode(False), torch.enable_grad():  # in which links do not work in place
        if isinstance(link, FunctionLink):
            result: Any = link.function(1 - shortfall, **parameters)
        else:
            kind, fields = link if isinstance(link, tuple) else (type(link), tuple(vars(link).items()))
            like = object.__new__(kind)
            for name, value in (*fields, *parameters.items()):
                object.__setattr__(like, name, value)
            result = like.logit(shortfall)  # type: ignore[arg-type]
    if not (isinstance(result, Traced) and result.tape is tape) or result.is_mask:
        raise Untranslatable("it returns no tensor that depends on the scores")
    if shortfall.at not in needed(tape.lines, [result.at]):
        raise Untranslatable("what it returns does not depend on the score")
    return result.at, shortfall.at


class Asked(NamedTuple):
    """One sum that a pass is asked for.

    ``link``: None for the number of candidates. ``parameters``: the link's tensors: name, name of the column, whether
    every anchor has its own, whether it is learned. ``rules``: their names. ``threshold``: name of the column with
    the threshold of the hardest.
    """

    kind: str
    link: Link | Code | None
    parameters: tuple[tuple[str, str, bool, bool], ...]
    rules: tuple[str, ...]
    threshold: str = ""


Types = tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]
"""Names and types of the columns of anchors and of candidates."""

RULES = {rule.name: rule for rule in vars(pairs).values() if isinstance(rule, Rule)}


def record(asked: tuple[tuple[Any, ...], ...], types: Types, bounded: bool, symmetric: bool) -> Recorded:
    """Record the sums of a pass; ``asked``: the fields of an :class:`Asked` each."""
    tape, sums, single = Tape([]), [], dict[int, None]()
    sides = [dict(names) for names in types]
    for asked_sum in (Asked(*fields) for fields in asked):
        parameters = {name: column(tape, at, each) for name, at, each, _ in asked_sum.parameters}
        if asked_sum.link is None:
            logit = shortfall = tape.place_of(1.0)
        else:
            logit, shortfall = record_link(asked_sum.link, tape, parameters)
            if "offset" in sides[1]:
                offset = Traced(tape, tape.put(("input", "candidate", "offset", "float")))
                logit = (Traced(tape, logit) + offset).at
        rules = []
        for name in asked_sum.rules:
            place = record_rule(RULES[name], tape, sides, asked_sum.threshold)
            rules.append(place)
            if RULES[name].row is not None:
                single[place] = None
        learned = tuple(parameters[name].at for name, _, _, wanted in asked_sum.parameters if wanted)
        custom = isinstance(asked_sum.link, Link)
        sums.append(Summand(asked_sum.kind, logit, shortfall, tuple(rules), learned, custom))
    return Recorded(tuple(tape.lines), tuple(sums), tuple(single), bounded, symmetric)


_recorded = functools.lru_cache(maxsize=1024)(record)
_checked: set[tuple[Line, ...]] = set()

REQUEST = "request"
"""First of a tuple that has the arguments of :func:`record` after it: of plain values, so that a compiler can take it
for a constant."""


def recorded(request: Any) -> Any:
    """Record the sums of a request, those of this library's links once; other settings are returned unchanged."""
    if not isinstance(request, tuple) or request[:1] != (REQUEST,):
        return request
    custom = any(isinstance(link, Link) for _, link, *_ in request[1])  # which may read what changes
    return (record if custom else _recorded)(*request[1:])


def code_of(link: Link) -> Link | Code | None:
    """What to record of a link; None if it cannot be translated."""
    tensors = link.tensors()
    if not link.custom and not isinstance(link, FunctionLink):
        fields = tuple((name, getattr(link, name)) for name in link.names if name not in tensors)
        return type(link), fields
    if torch.compiler.is_compiling():  # which would trace the recording of the function
        return None
    tape = Tape([])
    try:
        parameters = {name: column(tape, name, True) for name in tensors}
        logit, shortfall = record_link(link, tape, parameters)
        shape = tuple(line[:1] if line[0] == "number" else line for line in tape.lines)
        if shape not in _checked:
            check(link, tape, logit, shortfall, parameters)
            _checked.add(shape)
    except Exception as error:  # a user's function may raise anything if its argument is not a tensor
        log.debug("%r is left to the chunked engine: %s", link, error)
        return None
    return link


# Derivatives


def _times(a: Any, b: Any) -> Any:
    """A product that leaves out factors of 1."""
    if isinstance(a, float) and a == 1:
        return b
    return a if isinstance(b, float) and b == 1 else a * b


def derivative(tape: Tape, result: int, by: int) -> int:
    """Place of the derivative of line ``result`` by line ``by``."""
    slopes_of: dict[int, Any] = {by: 1.0}
    for place, (name, *args) in enumerate(tape.lines[: result + 1]):
        if name not in OPERATIONS or slopes_of.keys().isdisjoint(args):
            continue
        if name == "where":  # as a choice, since the derivative of the other branch may be infinite
            chosen, other = (slopes_of.get(arg, 0.0) for arg in args[1:])
            slopes_of[place] = where(Traced(tape, args[0]), chosen, other)
            continue
        slopes = OPERATIONS[name].slopes(*(_value(tape, at) for at in (*args, place)))
        terms = [
            _times(slope, slopes_of[at]) for slope, at in zip(slopes, args, strict=False) if at in slopes_of
        ]
        terms = [term for term in terms if isinstance(term, Traced) or term != 0]
        if terms:
            slopes_of[place] = sum(terms[1:], terms[0])
    return tape.place_of(slopes_of.get(result, 0.0))


def _value(tape: Tape, place: int) -> Any:
    name, *rest = tape.lines[place]
    return float(rest[0]) if name == "number" else Traced(tape, place)


def evaluate(tape: Tape, places: Sequence[int], inputs: Mapping[int, Tensor]) -> list[Tensor]:
    """The values at these places, computed in torch from those of the inputs by place."""
    like = next(iter(inputs.values()))
    values: dict[int, Tensor] = {}
    for place in sorted(needed(tape.lines, places)):
        name, *rest = tape.lines[place]
        if name == "number":
            values[place] = like.new_tensor(float(rest[0]))
        elif name == "input":
            values[place] = inputs[place]
        else:
            function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
            values[place] = function(*(values[arg] for arg in rest))
    return [values[place] for place in places]


def check(link: Link, tape: Tape, logit: int, shortfall: int, parameters: Mapping[str, Traced]) -> None:
    """Compare the tape with the link itself, and its derivatives with autograd's, at a few scores."""
    at = 1 - torch.linspace(-0.97, 0.98, 14, dtype=torch.float64, device="cpu").unsqueeze(1)
    values = {name: 0.7 + 0.13 * number + 0.05 * (1 - at) for number, name in enumerate(parameters)}

    def total(d: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if isinstance(link, FunctionLink):
            # Clones, since a function may work in place: F.relu(s, inplace=True).
            logits = link.function(1 - d, **{name: value.clone() for name, value in parameters.items()})
        else:
            logits = link.replace({name: value.squeeze(1) for name, value in parameters.items()}).logit(
                d.clone()
            )
        return logits.sum(), logits

    with torch.inference_mode(False), torch.enable_grad():
        (by_shortfall, by_parameter), value = torch.func.grad(total, (0, 1), has_aux=True)(at, values)
        tape = Tape(tape.lines)
        sources = {
            shortfall: by_shortfall,
            **{parameters[name].at: by_parameter[name] for name in parameters},
        }
        places = [logit, *(derivative(tape, logit, by) for by in sources)]
        inputs = {shortfall: at, **{parameters[name].at: values[name] for name in parameters}}
        ours = evaluate(tape, places, inputs)
    for mine, theirs in zip(ours, (value, *sources.values()), strict=True):
        # Autograd multiplies the branch not chosen by 0, which is NaN if that is infinite.
        there = theirs.isfinite()
        if not torch.allclose(mine.expand_as(theirs)[there], theirs[there], rtol=1e-5, atol=1e-5):
            raise Untranslatable("what was recorded is not what it computes")
