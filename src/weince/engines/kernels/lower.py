"""From a tape to Triton source: what depends on an anchor alone is computed once for each anchor, not for each pair.

A value of a pair is kept as ``c + k_1 x_1 + k_2 x_2 + ...``. The constant ``c`` and the factors ``k`` belong to the
anchor; the *terms* ``x`` are computed for each pair, each once, however many values use it. So a softmax logit takes
one multiplication and addition per pair, whatever its function says: ``(1 - d) / t`` becomes ``1 / t + (-1 / t) d``.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from weince.engines.kernels.tape import COMPARISONS, LOGIC, OPERATIONS, Line, Tape

BAKED = {0.0, 0.5, 1.0, 2.0, 3.0}
"""Sizes of numbers that are written into the source. The others are arguments of the kernel, so that a new
temperature needs no new kernel."""


class Factor(NamedTuple):
    """What belongs to an anchor: a number, times a value that is computed for each anchor if it has a name."""

    number: float
    name: str = ""

    @property
    def source(self) -> str:
        if not self.name:
            return repr(self.number) if math.isfinite(self.number) else f'float("{self.number}")'
        sign = "-" if self.number == -1 else "" if self.number == 1 else f"{self.number!r} * "
        return sign + self.name


ZERO, ONE, MINUS = Factor(0.0), Factor(1.0), Factor(-1.0)
LOG2E, LN2 = Factor(1 / math.log(2)), Factor(math.log(2))


class Value(NamedTuple):
    """``constant + sum of factor * term``; terms by name."""

    constant: Factor = ZERO
    terms: tuple[tuple[str, Factor], ...] = ()


class Mask(NamedTuple):
    """A condition by name, and whether it is one of the anchor's."""

    name: str
    of_anchor: bool


class Lines:
    """Assignments, each expression once."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.names = prefix, dict[str, str]()

    def put(self, expression: str) -> str:
        return self.names.setdefault(expression, f"{self.prefix}{len(self.names)}")

    def source(self) -> list[str]:
        return [f"{name} = {expression}" for expression, name in self.names.items()]


class Prologue:
    """What is computed once for each anchor, and passed to the functions of a pair as the tuple ``anchor``."""

    def __init__(self) -> None:
        self.lines = Lines("r")
        self.numbers: list[float] = []
        self.columns: list[str] = []  # of anchors, by name, in the order of the kernel's pointers
        self.rows: set[str] = set()  # columns that hold numbers of rows
        self.by_candidate: list[tuple[str, str]] = []  # those of candidates, and their types
        self.vectors: set[str] = set()  # names with one value per anchor; the others are one for all
        self.passed: list[str] = []

    def put(self, expression: str, vector: bool = False) -> str:
        name = self.lines.put(expression)
        if vector or self.vectors.intersection(re.findall(r"\w+", expression)):
            self.vectors.add(name)
        return name

    def name(self, factor: Factor) -> str:
        """The factor as a name or a number."""
        return self.put(factor.source) if factor.name and factor.number != 1 else factor.source

    def passes(self, name: str) -> str:
        if name not in self.passed:
            self.passed.append(name)
        return name

    def number(self, value: float) -> Factor:
        if abs(value) in BAKED or not math.isfinite(value):
            return Factor(value)
        if value not in self.numbers:
            self.numbers.append(value)
        return Factor(1.0, self.put(f"numbers[{self.numbers.index(value)}]"))

    def column(self, name: str, kind: str, each: bool) -> str:
        if name not in self.columns:
            self.columns.append(name)
        pointer = f"columns[{self.columns.index(name)}]"
        # Beyond the last anchor any number would do that has an inverse and a logarithm.
        load = f"tl.load({pointer} + at, mask=inside, other=1)" if each else f"tl.load({pointer})"
        converted = ".to(tl.float32)" if kind == "float" else ".to(tl.int32)" if name in self.rows else ""
        return self.put(load + converted, vector=each)

    def plus(self, a: Factor, b: Factor) -> Factor:
        if ZERO in (a, b):
            return b if a == ZERO else a
        if a.name == b.name:
            total = Factor(a.number + b.number, a.name)
            return total if total.number else ZERO
        return Factor(1.0, self.put(f"{a.source} + {b.source}"))

    def times(self, a: Factor, b: Factor) -> Factor:
        number = a.number * b.number
        if number == 0:
            return ZERO
        if math.isclose(number, round(number), rel_tol=1e-14):  # log(2) / log(2)
            number = float(round(number))
        name = self.put(" * ".join(sorted((a.name, b.name)))) if a.name and b.name else a.name or b.name
        return Factor(number, name)

    def inverse(self, a: Factor) -> Factor:
        return Factor(1 / a.number, self.put(f"1.0 / {a.name}") if a.name else "")


class Body:
    """One generated function of pairs, and the values that it computes.

    Args:
        tape: What is computed.
        prologue: What is computed for each anchor.
        bounded: Whether a score lies in [-1, 1].
    """

    fast = True
    """Whether logarithms, exponentials and inverses may be wrong in their last bits."""

    def __init__(self, tape: Tape, prologue: Prologue, *, bounded: bool) -> None:
        self.tape, self.prologue, self.bounded = tape, prologue, bounded
        self.lines = Lines("e")
        self.values: dict[int, Value | Mask] = {}
        self.used: dict[str, None] = {}  # of the prologue
        self.masks: dict[str, str] = {}  # terms that are 1 where a mask holds, else 0

    def value(self, place: int) -> Value:
        value = self.at(place)
        assert isinstance(value, Value)
        return value

    def mask(self, place: int) -> str:
        value = self.at(place)
        assert isinstance(value, Mask)
        return self.anchors(Factor(1.0, value.name)) if value.of_anchor else value.name

    def at(self, place: int) -> Value | Mask:
        for line in sorted(needed(self.tape.lines, [place])):
            if line not in self.values:
                self.values[line] = self._lower(*self.tape.lines[line])
        return self.values[place]

    # Names in the source

    def anchors(self, factor: Factor) -> str:
        """A value of the anchor, in a function of pairs."""
        name = self.prologue.name(factor)
        if factor.name:
            self.used[self.prologue.passes(name)] = None
        return name

    def name(self, value: Value) -> str:
        """The value as a name or a number."""
        if not value.terms:
            return self.anchors(value.constant)
        if value.constant == ZERO and len(value.terms) == 1 and value.terms[0][1] == ONE:
            return value.terms[0][0]
        return self.lines.put(self.expression(value))

    def expression(self, value: Value) -> str:
        parts = [] if value.constant == ZERO else [self.anchors(value.constant)]
        for term, factor in value.terms:
            sign = "-" if factor.number == -1 else "+" if parts else ""
            size = Factor(abs(factor.number), factor.name) if factor.number == -1 else factor
            parts.append(f"{sign} {term}" if size == ONE else f"{sign} {self.anchors(size)} * {term}")
        return " ".join(parts).strip() or "0.0"

    # Operations

    def scaled(self, value: Value, factor: Factor) -> Value:
        times = self.prologue.times
        terms = [(term, times(each, factor)) for term, each in value.terms]
        return Value(times(value.constant, factor), tuple(pair for pair in terms if pair[1] != ZERO))

    def plus(self, a: Value, b: Value) -> Value:
        terms: dict[str, Factor] = dict(a.terms)
        for term, factor in b.terms:
            terms[term] = self.prologue.plus(terms.get(term, ZERO), factor)
        left = tuple((term, factor) for term, factor in terms.items() if factor != ZERO)
        return Value(self.prologue.plus(a.constant, b.constant), left)

    def _product(self, a: Value, b: Value) -> Value:
        if not a.terms:
            return self.scaled(b, a.constant)
        if not b.terms:
            return self.scaled(a, b.constant)
        (a, first), (b, second) = self._factored(a), self._factored(b)
        left, right = self.name(a), self.name(b)
        if left in self.masks or right in self.masks:
            chosen, other = (left, right) if left in self.masks else (right, left)
            product = self.lines.put(f"tl.where({self.masks[chosen]}, {other}, 0.0)")
        else:
            product = self.lines.put(f"{left} * {right}")
        return Value(ZERO, ((product, self.prologue.times(first, second)),))

    def _factored(self, value: Value) -> tuple[Value, Factor]:
        """A value without the factor of its only term, and this factor."""
        if value.constant != ZERO or len(value.terms) > 1:
            return value, ONE
        ((term, factor),) = value.terms
        return Value(ZERO, ((term, ONE),)), factor

    def _quotient(self, a: Value, b: Value) -> Value:
        if not b.terms:
            return self.scaled(a, self.prologue.inverse(b.constant))
        if not self.fast:
            return self._term(f"{self.name(a)} / {self.name(b)}")
        b, factor = self._factored(b)
        inverse = Value(
            ZERO, ((self.lines.put(f"fast_inverse({self.name(b)})"), self.prologue.inverse(factor)),)
        )
        return self._product(a, inverse)

    def _term(self, expression: str, factor: Factor = ONE) -> Value:
        return Value(ZERO, ((self.lines.put(expression), factor),))

    def _lower(self, name: str, *args: Any) -> Value | Mask:
        if name == "number":
            return Value(self.prologue.number(float(args[0])))
        if name == "input":
            return self._input(*args)
        if name in COMPARISONS or name in LOGIC:
            return self._condition(name, [self.values[arg] for arg in args])
        if name == "where":
            return self._choice(*(self.values[arg] for arg in args))
        values = [self.value(arg) for arg in args]
        if name in ARITHMETIC:
            return ARITHMETIC[name](self, *values)
        if all(not value.terms for value in values):
            parts = [self.prologue.name(value.constant) for value in values]
            return Value(Factor(1.0, self.prologue.put(OPERATIONS[name].source.format(*parts))))
        if self.fast and name in FAST:
            before, source, after = FAST[name]
            return self._term(source.format(self.name(self.scaled(values[0], before))), after)
        return self._term(OPERATIONS[name].source.format(*map(self.name, values)))

    def _input(self, source: str, *about: Any) -> Value | Mask:
        """``about``: name of a column and its type, for one of anchors before that whether there is one each."""
        if source == "bounded":  # rounding may take a score below -1
            source = "d"
            if self.bounded:
                source = self.lines.put("tl.minimum(d, 2.0, tl.PropagateNan.ALL)")
        if source == "anchor":
            name, each, kind = about
            return Value(Factor(1.0, self.prologue.column(name, kind, each)))
        if source == "candidate":
            column = (about[0], about[1])
            if column not in self.prologue.by_candidate:
                self.prologue.by_candidate.append(column)
            source = f"c{self.prologue.by_candidate.index(column)}"
        if source == "ignore":
            row, col = (
                f"{side}.to(tl.int64) * ignore[{k}]" for k, side in ((1, "anchors"), (2, "candidates"))
            )
            place = f"along({row}, ACROSS) + along({col}, not ACROSS)"
            there = "along(anchors < n_anchors, ACROSS) & along(candidates < n_candidates, not ACROSS)"
            source = self.lines.put(f"tl.load(ignore[0] + {self.lines.put(place)}, mask={there}, other=1)")
        if about[-1] == "mask":
            return Mask(self.lines.put(f"{source} != 0"), of_anchor=False)
        return Value(ZERO, ((source, ONE),))

    def _condition(self, name: str, args: Sequence[Value | Mask]) -> Mask:
        source = f"{{0}} {COMPARISONS[name]} {{1}}" if name in COMPARISONS else LOGIC[name]
        if all(arg.of_anchor if isinstance(arg, Mask) else not arg.terms for arg in args):
            return Mask(self.prologue.put(source.format(*map(self._name_before, args))), of_anchor=True)
        return Mask(self.lines.put(source.format(*map(self._name_of, args))), of_anchor=False)

    def _name_of(self, arg: Value | Mask) -> str:
        if isinstance(arg, Value):
            return self.name(arg)
        return self.anchors(Factor(1.0, arg.name)) if arg.of_anchor else arg.name

    def _name_before(self, arg: Value | Mask) -> str:
        """The same among what is computed for each anchor."""
        return arg.name if isinstance(arg, Mask) else self.prologue.name(arg.constant)

    def _choice(self, mask: Any, value: Any, other: Any) -> Value:
        if mask.of_anchor and not value.terms and not other.terms:
            parts = map(self._name_before, (mask, value, other))
            return Value(Factor(1.0, self.prologue.put(f"tl.where({', '.join(parts)})")))
        term = self._term(f"tl.where({', '.join(map(self._name_of, (mask, value, other)))})")
        if value == Value(ONE) and other == Value():
            self.masks[term.terms[0][0]] = self._name_of(mask)
        return term


ARITHMETIC: dict[str, Callable[..., Value]] = {
    "add": Body.plus,
    "sub": lambda body, a, b: body.plus(a, body.scaled(b, MINUS)),
    "neg": lambda body, a: body.scaled(a, MINUS),
    "mul": Body._product,
    "div": Body._quotient,
}

FAST = {
    "log": (ONE, "fast_log2({0})", LN2),
    "log2": (ONE, "fast_log2({0})", ONE),
    "exp": (LOG2E, "fast_exp2({0})", ONE),
    "exp2": (ONE, "fast_exp2({0})", ONE),
}
"""Operations by instructions of base 2: factor of the argument, source, factor of the result."""


def needed(lines: Sequence[Line], places: Sequence[int]) -> set[int]:
    """The given places and those of all lines that they depend on."""
    all_places = set(places)
    for place in range(len(lines) - 1, -1, -1):
        if place in all_places and lines[place][0] in OPERATIONS:
            all_places.update(lines[place][1:])
    return all_places
