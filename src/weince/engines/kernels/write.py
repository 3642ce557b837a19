"""The functions that the kernels of a pass call, written as Triton source from its tape."""

import functools
import hashlib
import linecache
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from weince.engines.kernels import elementwise
from weince.engines.kernels.lower import LOG2E, MINUS, ZERO, Body, Factor, Prologue, Value
from weince.engines.kernels.tape import OPERATIONS, Line, Tape, Untranslatable
from weince.engines.kernels.translate import Recorded, Summand, derivative

NAMES = {name: value for name, value in vars(elementwise).items() if not name.startswith("__")}


@functools.lru_cache(maxsize=1024)
def build(kind: str, arguments: str, body: str) -> Any:
    """A Triton function. Triton reads the source text from ``linecache``."""
    name = f"{kind}_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    source = f"@triton.jit\ndef {name}({arguments}):\n{body}"
    path = f"<weince {name}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    names = {**NAMES, "__name__": __name__, "triton": triton, "tl": tl}
    exec(compile(source, path, "exec"), names)
    return names[name]


PAIR = "anchor, anchors, n_anchors, candidate, candidates, n_candidates, ignore"
ACROSS = "ACROSS: tl.constexpr"


class Functions(NamedTuple):
    """What the kernels of a pass call, and what they pass.

    ``columns``, ``by_candidate``, ``numbers``: names of the anchors' and candidates' columns and the numbers, in
    order. ``anchors``: values of some anchors, as a tuple. ``candidates``: columns of some candidates. ``reach``:
    first and last candidates that rules of a single row exclude. ``touches``: whether a tile of columns may hold one,
    or ends beyond the last. ``pairs``: logits (in bits) and their derivatives by learned parameters; in a gradient,
    derivatives of the weighted sums. ``keep``: puts a value where a pair takes no part. ``kinds``: of each sum;
    ``"moment"`` for a log-sum-exp whose weights are those of the sum ``bases`` times what ``pairs`` returns.
    """

    columns: tuple[str, ...]
    by_candidate: tuple[str, ...]
    numbers: tuple[float, ...]
    anchors: Any
    candidates: Any
    reach: Any
    touches: Any
    pairs: Any
    keep: Any
    kinds: tuple[str, ...] = ()
    bases: tuple[int, ...] = ()

    def constants(self) -> dict[str, Any]:
        """Compile-time arguments of a kernel."""
        names = ("ANCHORS", "CANDIDATES", "REACH", "TOUCHES", "PAIRS", "KEEP")
        return {name: value for name, value in zip(names, self[3:9], strict=True) if value is not None}


class Writer:
    """Writes the functions of a pass."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded, self.tape = recorded, Tape(recorded.lines)
        self.prologue = Prologue()
        self.prologue.rows = {line[2] for line in map(self._anchor_of, recorded.single)}

    def body(self) -> Body:
        return Body(self.tape, self.prologue, bounded=self.recorded.bounded)

    def written(self, body: Body, results: Sequence[str], extra: Sequence[str] = ()) -> str:
        """Source of a function of pairs: what it unpacks, what it computes, what it returns."""
        lines = []
        for name in body.used:
            value = f"anchor[{self.prologue.passed.index(name)}]"
            lines.append(
                f"{name} = along({value}, ACROSS)" if name in self.prologue.vectors else f"{name} = {value}"
            )
        for index in range(len(self.prologue.by_candidate)):
            lines.append(f"c{index} = along(candidate[{index}], not ACROSS)")
        return indented([*lines, *body.lines.source(), *extra, f"return ({', '.join(results)},)"])

    def constant(self, name: str, factor: Factor) -> str:
        """A value with one number for each anchor, which a kernel may shift."""
        self.prologue.lines.names[f"{factor.source} + tl.zeros(at.shape, tl.float32)  # {name}"] = name
        self.prologue.vectors.add(name)
        return self.prologue.passes(name)

    def finished(self, pairs: Any, keep: Any) -> Functions:
        prologue = self.prologue
        passed = [*prologue.passed, *(() if prologue.passed else ("at",))]
        anchors = indented(
            ["inside = at < n_anchors", *prologue.lines.source(), f"return ({', '.join(passed)},)"]
        )
        loads = [
            f"tl.load(columns[{index}] + at, mask=at < n_candidates, other=0){LOADED[kind]}"
            for index, (_, kind) in enumerate(prologue.by_candidate)
        ]
        rows = [prologue.passed.index(name) for name in self.excluded()]
        ends = [f"tl.{end}(anchor[{place}])" for place in rows for end in ("min", "max")]
        within = [f"(start <= reach[{2 * k + 1}]) & (start + BN > reach[{2 * k}])" for k in range(len(rows))]
        touched = " | ".join(["(start + BN > n_candidates)", *(f"({test})" for test in within)])
        return Functions(
            tuple(prologue.columns),
            tuple(name for name, _ in prologue.by_candidate),
            tuple(prologue.numbers) or (0.0,),
            build("anchors", "columns, numbers, values, weights, at, n_anchors", anchors),
            build("candidates", "columns, at, n_candidates", f"    return ({', '.join(loads) or 'at'},)\n"),
            build("reach", "anchor", f"    return ({', '.join(ends) or '0'},)\n"),
            build("touches", "reach, start, n_candidates, BN: tl.constexpr", f"    return {touched}\n"),
            pairs,
            keep,
        )

    def _anchor_of(self, place: int) -> Line:
        """The anchor's column in a rule that excludes a single candidate."""
        lines = [self.tape.lines[arg] for arg in self.tape.lines[place][1:]]
        return next(line for line in lines if line[:2] == ("input", "anchor"))

    def excluded(self) -> list[str]:
        """Names of the anchors' values that hold the single candidate that a rule excludes."""
        columns = [self._anchor_of(place) for place in self.recorded.single]
        return [
            self.prologue.passes(self.prologue.column(name, kind, each)) for *_, name, each, kind in columns
        ]

    def keep(self, rules: Sequence[Sequence[int] | None]) -> Any:
        """The function that overwrites values of pairs for which one of a value's rules does not hold. ``None``: it
        returns the value unchanged."""
        body, single = self.body(), self.recorded.single
        body.lines.put("along(candidates, not ACROSS)")
        body.lines.names["along(candidates, not ACROSS)"] = "position"
        always = [[body.mask(place) for place in places or () if place not in single] for places in rules]
        first = len(body.lines.names)
        extra = [f"z{k} = values[{k}]" for k in range(len(rules))]
        extra += [
            f"z{k} = tl.where({' & '.join(f'({mask})' for mask in masks)}, z{k}, FILL)"
            for k, masks in enumerate(always)
            if masks
        ]
        sometimes = [[body.mask(place) for place in places or () if place in single] for places in rules]
        inside = "along(anchors < n_anchors, ACROSS) & along(candidates < n_candidates, not ACROSS)"
        extra += ["if touched:", f"    inside = {inside}"]
        extra += [f"    {line}" for line in body.lines.source()[first:]]
        extra += [
            f"    z{k} = tl.where({' & '.join(['inside', *(f'({mask})' for mask in masks)])}, z{k}, FILL)"
            for k, masks in enumerate(sometimes)
            if rules[k] is not None
        ]
        late = body.lines.source()[first:]
        body.lines.names = {
            key: name for key, name in body.lines.names.items() if f"{name} = {key}" not in late
        }
        results = [f"z{k}" for k in range(len(rules))]
        arguments = f"values, compared, {PAIR}, touched, FILL: tl.constexpr, {ACROSS}"
        return build("keep", arguments, self.written(body, results, extra))


LOADED = {"float": ".to(tl.float32)", "int": "", "mask": ".to(tl.int32)"}


def indented(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


@functools.lru_cache(maxsize=512)
def functions_of_sums(recorded: Recorded) -> Functions:
    """Functions of :mod:`weince.engines.kernels.sums`: logits ``z_k / log(2)`` of each sum, then derivatives of the
    logits by the learned parameters of the first sum, of the second, and so on."""
    writer = Writer(recorded)
    count = len(recorded.sums)
    writer.prologue.passed = [f"constant{k}" for k in range(count)]  # the kernel shifts the first values
    body, values, results, effects = writer.body(), list[Value](), list[str](), list[str]()
    kinds, bases = [summand.kind for summand in recorded.sums], list(range(count))
    for k, summand in enumerate(recorded.sums):
        body.fast = not summand.custom
        values.append(body.scaled(body.value(summand.logit), LOG2E))
        name = writer.constant(f"constant{k}", values[k].constant)
        expression = body.expression(values[k]._replace(constant=Factor(1.0, name)))
        power = None if summand.kind != "lse" or summand.learned else _moment_of(body, recorded, values)
        if power is not None:
            kinds[k], (bases[k], expression) = "moment", power
        elif not values[k].terms:
            expression = f"tl.zeros(d.shape, tl.float32) + {expression}"
        results.append(body.lines.put(expression))
        for by in summand.learned:
            effects.append(body.name(body.value(derivative(writer.tape, summand.logit, by))))
    source = writer.written(body, [*results, *effects])
    keep = writer.keep(
        [None if kinds[k] == "moment" else summand.rules for k, summand in enumerate(recorded.sums)]
    )
    functions = writer.finished(build("pairs", f"d, anchor, candidate, {ACROSS}", source), keep)
    return functions._replace(kinds=tuple(kinds), bases=tuple(bases))


def _moment_of(body: Body, recorded: Recorded, values: Sequence[Value]) -> tuple[int, str] | None:
    """An earlier log-sum-exp whose logits differ from the last ones by ``n log(x)``, and the source of ``x^n``. Then
    ``exp(z) x^n`` takes a multiplication in place of another exponential, and no logarithm."""
    last = len(values) - 1
    for base, summand in enumerate(recorded.sums[:last]):
        if summand.kind != "lse" or summand.rules != recorded.sums[last].rules:
            continue
        difference = body.plus(values[last], body.scaled(values[base], MINUS))
        if difference.constant != ZERO or len(difference.terms) != 1:
            continue
        ((term, factor),) = difference.terms
        source = next(source for source, name in body.lines.names.items() if name == term)
        if source.startswith("fast_log2(") and factor in (Factor(1.0), Factor(2.0)):
            name = source.removeprefix("fast_log2(").removesuffix(")")
            return base, " * ".join([name] * int(factor.number))
    return None


@functools.lru_cache(maxsize=512)
def functions_of_gradient(recorded: Recorded) -> Functions:
    """Functions of :mod:`weince.engines.kernels.gradient`; ``pairs`` returns totals, and adds up sums
    whose ``keep`` is the same.

    In a symmetric problem a tile serves each pair in both roles. ``keep`` then applies the rules that hold for both
    roles or for none, to the total of both; ``pairs`` applies the others.
    """
    writer = Writer(recorded)
    body, totals = writer.body(), dict[tuple[int, ...], list[str]]()
    for k, summand in enumerate(recorded.sums):
        common = tuple(
            place for place in summand.rules if not recorded.symmetric or is_symmetric(recorded, place)
        )
        body.fast = not summand.custom
        pull = _pull(writer, body, k, summand)
        if alone := [body.mask(place) for place in summand.rules if place not in common]:
            pull = body.lines.put(f"tl.where({' & '.join(f'({mask})' for mask in alone)}, {pull}, 0.0)")
        totals.setdefault(common, []).append(pull)
    if any("position" in line for line in body.lines.names):
        raise Untranslatable("a rule about positions that holds for one role alone")
    results = [" + ".join(pulls) for pulls in totals.values()]
    source = writer.written(body, results)
    keep = writer.keep(list(totals))
    return writer.finished(build("pairs", f"d, compared, {PAIR}, {ACROSS}", source), keep)


def _pull(writer: Writer, body: Body, k: int, summand: Summand) -> str:
    """Derivative of a weighted sum by the score of a pair, ``-dz/dd`` times the weight of the pair in the sum:
    ``exp(z - value)`` in a log-sum-exp, ``sigmoid(z)`` in a sum of softplus."""
    prologue = writer.prologue
    weight = Factor(
        1.0, prologue.put(f"tl.load(weights + {k} * n_anchors + at, mask=inside, other=0.0)", vector=True)
    )
    slope = body.value(derivative(writer.tape, summand.logit, summand.shortfall))
    slope = body.scaled(body.scaled(slope, MINUS), weight)
    if summand.kind == "sum":
        return body.name(slope) if slope.terms else f"tl.zeros(d.shape, tl.float32) + {body.name(slope)}"
    z = body.scaled(body.value(summand.logit), LOG2E)
    constant = z.constant
    if summand.kind == "lse":
        value = prologue.put(f"tl.load(values + {k} * n_anchors + at, mask=inside, other=0.0)", vector=True)
        # An anchor without candidates in the sum (-inf) gets weights of 0, whatever its logits are.
        value = prologue.put(f'tl.where({value} != float("-inf"), {value}, float("inf"))')
        constant = prologue.plus(constant, prologue.times(Factor(-1.0, value), LOG2E))
    bits = body.lines.put(body.expression(z._replace(constant=constant)))
    if summand.kind == "lse":
        return body.lines.put(f"fast_exp2({bits}) * {body.name(slope)}")
    odds = body.lines.put(f"fast_exp2(-tl.abs({bits}))")
    return body.lines.put(
        f"tl.where({bits} < 0, {odds}, 1.0) * fast_inverse(1 + {odds}) * {body.name(slope)}"
    )


def is_symmetric(recorded: Recorded, place: int) -> bool:
    """Whether a rule holds for both roles of a pair or for none. Of a symmetric problem's positives, each is the
    positive of its own."""
    return place in recorded.single or _spelled(recorded.lines, place, False) == _spelled(
        recorded.lines, place, True
    )


def _spelled(lines: Sequence[Line], place: int, swapped: bool) -> str:
    """A rule as text, with anchor and candidate swapped or not."""
    name, *args = lines[place]
    if name not in OPERATIONS:
        if name != "input" or args[0] in ("compared", "ignore", "position"):
            return f"{name}{args if name == 'number' else f'{args}{swapped}'}"
        side = {"anchor": "candidate", "candidate": "anchor"}[args[0]] if swapped else args[0]
        return f"{side}.{args[1]}"
    parts = [_spelled(lines, arg, swapped) for arg in args]
    return (
        f"{name}({', '.join(sorted(parts) if name in ('eq', 'ne', 'logical_and', 'logical_or') else parts)})"
    )


@functools.lru_cache(maxsize=512)
def functions_of_search(recorded: Recorded) -> Functions:
    """Functions of the searches: ``keep`` overwrites one value of each pair that is not the first sum's."""
    writer = Writer(recorded)
    keep = writer.keep([recorded.sums[0].rules])
    return writer.finished(None, keep)
