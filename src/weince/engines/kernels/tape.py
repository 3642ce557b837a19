"""A tape that records what a function does to tensors, with the Triton source and the derivatives of every operation.

The function runs with stand-ins for its arguments (:class:`Traced`). Every operator, method or function of torch that
it calls is looked up by name in :data:`CALLS`, and recorded as :data:`OPERATIONS` on a :class:`Tape`. Any other call
raises :class:`Untranslatable`, or another exception of Python.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

LARGEST_POWER = 64
"""Largest whole exponent; such a power is translated to multiplications."""


class Untranslatable(Exception):
    """The kernels cannot compute what a function does."""


Line = tuple[Any, ...]
"""An operation and the places of its arguments; ``("number", text)``; or ``("input", source, ..., type)``, where the
type is ``"float"``, ``"int"`` or ``"mask"``."""


class Tape:
    """Operations in order, without duplicates."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = list(lines)
        self.places = {line: place for place, line in enumerate(lines)}

    def put(self, line: Line) -> int:
        place = self.places.setdefault(line, len(self.lines))
        if place == len(self.lines):
            self.lines.append(line)
        return place

    def place_of(self, value: Any) -> int:
        """Place of an argument on the tape; a number is added to the tape."""
        if isinstance(value, Traced) and value.tape is self:
            return value.at
        if not isinstance(value, Real):
            raise Untranslatable(
                f"it uses a {type(value).__name__} that is no number and none of its arguments"
            )
        return self.put(("number", repr(float(value))))  # as text, since 0.0 == -0.0


def _operator(name: str, turned: bool = False) -> Callable[[Any, Any], Any]:
    if turned:
        return lambda this, other: call(name, (other, this))
    return lambda this, other: call(name, (this, other))


class Traced:
    """Stand-in for a tensor; it records the operations on it."""

    def __init__(self, tape: Tape, at: int) -> None:
        self.tape, self.at = tape, at

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call(function.__name__, args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., "Traced"]:
        in_place = name.endswith("_") and self.tape.lines[self.at][0] != "input"
        if name.removesuffix("_" * in_place) not in CALLS:
            raise AttributeError(f"the kernels have no {name}")
        if not in_place:
            return lambda *args, **kwargs: call(name, (self, *args), kwargs)
        return lambda *args, **kwargs: self._set(call(name[:-1], (self, *args), kwargs))

    def _set(self, result: "Traced") -> "Traced":
        """The effect of an operation in place."""
        self.at = result.at
        return self

    def __bool__(self) -> bool:
        raise Untranslatable("it decides by the value of a tensor")

    def __neg__(self) -> "Traced":
        return emit("neg", self)

    def __abs__(self) -> "Traced":
        return emit("abs", self)

    def __invert__(self) -> "Traced":
        return emit("logical_not", self)

    __add__, __radd__ = _operator("add"), _operator("add", turned=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", turned=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", turned=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", turned=True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", turned=True)
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __and__, __or__ = _operator("logical_and"), _operator("logical_or")
    __hash__ = object.__hash__

    @property
    def is_mask(self) -> bool:
        line = self.tape.lines[self.at]
        return line[0] in MASKS or (line[0] == "input" and line[-1] == "mask")


class Operation(NamedTuple):
    """Triton source of an operation, and its derivatives as a function of its arguments and its result."""

    source: str
    slopes: Callable[..., Sequence[Any]]


def _no_slopes(*_: Any) -> tuple[()]:
    return ()


def _kept(is_within: Any) -> tuple[Any, Any]:
    """Derivatives of a clamp by its input and by its limit."""
    return where(is_within, 1.0, 0.0), where(is_within, 0.0, 1.0)


def _larger(a: Any, b: Any) -> Any:
    """Derivative of the larger of two numbers by the first, as in torch: 0.5 if they are equal."""
    return where(a > b, 1.0, where(a == b, 0.5, 0.0))


_MAX, _MIN = (f"tl.{name}({{0}}, {{1}}, tl.PropagateNan.ALL)" for name in ("maximum", "minimum"))

OPERATIONS: dict[str, Operation] = {
    "add": Operation("{0} + {1}", lambda a, b, y: (1.0, 1.0)),
    "sub": Operation("{0} - {1}", lambda a, b, y: (1.0, -1.0)),
    "mul": Operation("{0} * {1}", lambda a, b, y: (b, a)),
    "div": Operation("{0} / {1}", lambda a, b, y: (1 / b, -y / b)),
    "neg": Operation("-{0}", lambda x, y: (-1.0,)),
    "exp": Operation("tl.exp({0})", lambda x, y: (y,)),
    "exp2": Operation("tl.exp2({0})", lambda x, y: (y * math.log(2),)),
    "expm1": Operation("expm1({0})", lambda x, y: (y + 1,)),
    "log": Operation("tl.log({0})", lambda x, y: (1 / x,)),
    "log2": Operation("tl.log2({0})", lambda x, y: (1 / (x * math.log(2)),)),
    "log1p": Operation("log1p({0})", lambda x, y: (1 / (1 + x),)),
    "sqrt": Operation("tl.sqrt({0})", lambda x, y: (0.5 / y,)),
    "rsqrt": Operation("tl.rsqrt({0})", lambda x, y: (-0.5 * y * y * y,)),
    "abs": Operation("tl.abs({0})", lambda x, y: (emit("sign", x),)),
    "sign": Operation("sign({0})", lambda x, y: (0.0,)),
    "sigmoid": Operation("tl.sigmoid({0})", lambda x, y: (y * (1 - y),)),
    "softplus": Operation("softplus({0})", lambda x, y: (emit("sigmoid", x),)),
    "relu": Operation(_MAX.replace("{1}", "0.0"), lambda x, y: (where(y > 0, 1.0, 0.0),)),
    "sin": Operation("tl.sin({0})", lambda x, y: (emit("cos", x),)),
    "cos": Operation("tl.cos({0})", lambda x, y: (-emit("sin", x),)),
    "tanh": Operation("tanh({0})", lambda x, y: (1 - y * y,)),
    "sinh": Operation("sinh({0})", lambda x, y: (emit("cosh", x),)),
    "cosh": Operation("cosh({0})", lambda x, y: (emit("sinh", x),)),
    "atanh": Operation("atanh({0})", lambda x, y: (1 / (1 - x * x),)),
    "erf": Operation("tl.erf({0})", lambda x, y: (2 / math.sqrt(math.pi) * emit("exp", -x * x),)),
    "maximum": Operation(_MAX, lambda a, b, y: (_larger(a, b), _larger(b, a))),
    "minimum": Operation(_MIN, lambda a, b, y: (_larger(b, a), _larger(a, b))),
    "clamp_min": Operation(_MAX, lambda x, low, y: _kept(x >= low)),
    "clamp_max": Operation(_MIN, lambda x, high, y: _kept(x <= high)),
    # For an exponent that is a number and not whole: negative bases have no such power.
    "float_power": Operation(
        "tl.exp2({1} * tl.log2({0}))", lambda x, power, y: (power * emit("float_power", x, power - 1), 0.0)
    ),
    "pow": Operation(
        "power({0}, {1})",
        lambda x, power, y: (
            where(power == 0, 0.0, power * emit("pow", x, power - 1)),
            where((x == 0) & (power >= 0), 0.0, y * emit("log", x)),
        ),
    ),
    "where": Operation("tl.where({0}, {1}, {2})", _no_slopes),  # differentiated in translate._derivative
}

COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
LOGIC = {"logical_and": "{0} & {1}", "logical_or": "{0} | {1}", "logical_not": "{0} == 0"}
MASKS = {*COMPARISONS, *LOGIC}
OPERATIONS |= {name: Operation(f"{{0}} {sign} {{1}}", _no_slopes) for name, sign in COMPARISONS.items()}
OPERATIONS |= {name: Operation(source, _no_slopes) for name, source in LOGIC.items()}


def emit(name: str, *values: Any) -> Traced:
    """Record an operation. Masks count as 0 and 1 where it takes numbers."""
    if len(values) != OPERATIONS[name].source.count("{"):
        raise Untranslatable(f"{name} of {len(values)} values")
    tape = next(value.tape for value in values if isinstance(value, Traced))
    masks = len(values) if name in LOGIC else int(name == "where")
    for value in values[:masks]:
        if not (isinstance(value, Traced) and value.is_mask):
            raise Untranslatable(f"{name} of what is no comparison")
    rest = (number_of(value) for value in values[masks:])
    return Traced(tape, tape.put((name, *(tape.place_of(value) for value in (*values[:masks], *rest)))))


def number_of(value: Any) -> Any:
    return where(value, 1.0, 0.0) if isinstance(value, Traced) and value.is_mask else value


def where(condition: Any, value: Any, other: Any) -> Traced:
    return emit("where", condition, value, other)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else emit("clamp_min", x, min)
    return x if max is None else emit("clamp_max", x, max)


def _ones(x: Any, size: tuple[int, ...]) -> float:
    if size:
        raise Untranslatable(f"a tensor of shape {size}")
    return 1.0


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Above the threshold torch returns the input itself, which differs by 2e-9 at most."""
    if threshold < 20:
        raise Untranslatable(f"softplus with a threshold of {threshold}")
    return emit("softplus", x) if beta == 1 else emit("softplus", beta * x) / beta


def _power(x: Any, exponent: Any) -> Any:
    if not isinstance(exponent, Real):
        if isinstance(x, Traced):
            return emit("pow", x, exponent)
        if x <= 0:
            raise Untranslatable(f"a power of {x}")
        return emit("exp", exponent * math.log(x))
    exponent = float(exponent)
    if exponent == 0.5:
        return emit("sqrt", x)
    if not exponent.is_integer():
        return emit("float_power", x, exponent)
    if abs(exponent) > LARGEST_POWER:
        raise Untranslatable(f"a power of {exponent}")
    result = _whole_power(number_of(x), int(abs(exponent)))
    return 1 / result if exponent < 0 else result


def _whole_power(x: Any, exponent: int) -> Any:
    if exponent < 2:
        return x if exponent else 1.0
    half = _whole_power(x, exponent // 2)
    return half * half * x if exponent % 2 else half * half


CALLS: dict[str, Callable[..., Any]] = {
    **{name: partial(emit, name) for name in OPERATIONS if name != "float_power"},
    "clamp": _clamp,
    "clip": _clamp,
    "float": number_of,
    "logaddexp": lambda a, b: b + emit("softplus", a - b),
    "logsigmoid": lambda x: -emit("softplus", -x),
    "new_ones": _ones,
    "pow": _power,
    "reciprocal": lambda x: 1 / x,
    "relu": lambda x, inplace=False: emit("relu", x),
    "softplus": _softplus,
    "square": lambda x: x * x,
}
"""What a function may call, by name in torch."""

ALIASES = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg",
    "absolute": "abs", "arctanh": "atanh", "log_sigmoid": "logsigmoid", "greater": "gt", "greater_equal": "ge",
    "less": "lt", "less_equal": "le", "and": "logical_and", "or": "logical_or",
}  # fmt: skip
CALLS |= {name: CALLS[same] for name, same in ALIASES.items()}


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """Record a call of a torch operator, function or method, by name."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    if name not in CALLS:
        raise Untranslatable(f"the kernels have no {name}")
    named = {key: _plain(value) for key, value in (kwargs or {}).items()}
    return CALLS[name](*map(_plain, args), **named)


def _plain(value: Any) -> Any:
    """The number in a 0-dimensional CPU tensor, which costs no device sync to read; other values unchanged."""
    is_number = isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu"
    return value.detach().item() if is_number else value
