"""The options of every loss: their types, what is wrong with them, and a text that tells losses apart over ranks."""

import zlib
from inspect import signature
from typing import Any, Literal, TypedDict, get_args

from torch import Tensor

from weince.distributed import Gather, check_gather
from weince.engines.choose import EngineName
from weince.layouts import TOWERS, Candidates, Limit
from weince.links import Link
from weince.pairs import Score
from weince.parameters import check_choice, is_number
from weince.tail import TailConfig

Reduction = Literal["mean", "sum", "none"]


class Options(TypedDict, total=False):
    """Options of every loss; see :class:`weince.ContrastiveLoss`."""

    candidates: Candidates
    reduction: Reduction
    engine: EngineName
    gather: Gather
    check_finite: bool | None
    graph: bool | None
    within: bool
    score: Score
    ignore_above: Limit | None
    exempt_hard: bool


class Roles(TypedDict, total=False):
    """What a call of a loss takes beside the embeddings; see :meth:`weince.ContrastiveLoss.forward`."""

    labels: Tensor | tuple[Tensor, Tensor] | None
    negatives: Tensor | None
    ids: Tensor | None
    ignore: Tensor | None
    offset: Tensor | None
    weights: Tensor | None


DEFAULTS = Options(
    candidates="views",
    reduction="mean",
    engine="auto",
    gather=True,
    check_finite=None,
    graph=None,
    within=False,
    score="cosine",
    ignore_above=None,
    exempt_hard=True,
)

HINTS = {
    "scale": ": temperature = 1 / scale, so a scale of 20 is a temperature of 0.05",
    "tau": ": it is called temperature",
    "margin": ": ignore_above leaves out negatives that score more than that above the positive",
}
"""What to do about names that other libraries use."""


def check_names(loss: type, names: Any, known: Any) -> None:
    """Raise if an option is unknown."""
    for name in names:
        if name not in known:
            takes = ", ".join(dict.fromkeys([*parameters_of(loss), *known]))
            raise TypeError(f"{loss.__name__} has no option {name!r}{HINTS.get(name, '')}; it takes {takes}")


def check_options(loss: Any) -> None:
    """Raise if an option of a loss has a wrong value, or has no meaning for this loss."""
    check_choice("candidates", loss.candidates, get_args(Candidates))
    check_choice("reduction", loss.reduction, get_args(Reduction))
    check_choice("engine", loss.engine, get_args(EngineName))
    check_choice("score", loss.score, get_args(Score))
    check_gather(loss.gather, loss.engine)
    for option in ("check_finite", "graph"):
        if getattr(loss, option) not in (None, True, False):  # "no" would be taken for True
            raise ValueError(f"{option} must be True, False or None; got {getattr(loss, option)!r}")
    for option in ("within", "exempt_hard"):
        if not isinstance(getattr(loss, option), bool):
            raise ValueError(f"{option} must be True or False; got {getattr(loss, option)!r}")
    name, candidates, above = type(loss).__name__, loss.candidates, loss.ignore_above
    if above is not None and not callable(above) and not is_number(above):
        raise TypeError(
            f"ignore_above must be a number or a function of the positive's score; got {type(above).__name__}"
        )
    if candidates == "labels" and not loss.several_positives:
        raise ValueError(f'{name} wants one positive per anchor; got candidates="labels"')
    if candidates != "views" and loss.same_view:
        raise ValueError(f'{name} contrasts within a view and wants candidates="views"; got {candidates!r}')
    if loss.within and candidates not in TOWERS:
        raise ValueError(f'within=True goes with candidates="cross" or "clip"; got {candidates!r}')
    if above is not None and candidates == "labels":
        raise ValueError('ignore_above compares with one positive; got candidates="labels"')
    if loss.score == "dot" and not loss.takes_dot:
        raise ValueError(f'{name} wants cosines, whose largest value is 1; got score="dot"')


def check_roles(loss: Any, roles: Any, rows: int) -> None:
    """Raise if something that a batch brings along is unknown, or has no meaning for this loss."""
    for name, value in roles.items():
        if name not in Roles.__annotations__:
            raise TypeError(
                f"a call of {type(loss).__name__} takes {', '.join(Roles.__annotations__)}; got {name!r}"
            )
        if name == "labels" and not loss.several_positives:
            raise ValueError(f"{type(loss).__name__} wants one positive per anchor; got labels=")
        if name == "offset" and not loss.takes_offset:
            raise ValueError(f"{type(loss).__name__} is no softmax of its logits; got offset=")
        if name == "weights" and (
            not isinstance(value, Tensor) or value.shape != (rows,) or not value.is_floating_point()
        ):
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"weights must be floating point numbers of shape ({rows},); got {got}")


def parameters_of(loss: type) -> list[str]:
    """Arguments of a loss by name, without ``self`` and its ``**options``, whatever a user's loss calls them."""
    arguments = signature(loss.__init__).parameters.values()  # type: ignore[misc]
    return [each.name for each in arguments if each.name != "self" and each.kind is not each.VAR_KEYWORD]


def in_words(value: Any) -> str:
    """A setting as text, without what differs between processes: tensor values and addresses of functions."""
    if isinstance(value, Link):
        fields = [f"{name}={in_words(getattr(value, name))}" for name in value.names]
        if value.custom:
            fields.append(_code_of(value.kind()))
        return f"{type(value).__name__}({', '.join(fields)})"
    if callable(value) and hasattr(value, "__code__"):
        return _code_of(value.__code__)
    plain = value is None or isinstance(value, int | float | str | tuple | TailConfig)
    return repr(value) if plain else type(value).__name__


def _code_of(kind: object) -> str:
    """What a function does, as a number that is the same in all processes; of other code the name of its type."""
    code = getattr(kind, "co_code", None)
    if code is None:
        return getattr(kind, "__name__", type(kind).__name__)
    constants = [value for value in kind.co_consts if value is None or isinstance(value, int | float | str)]  # type: ignore[attr-defined]
    return f"function {zlib.crc32(repr((code, constants, kind.co_names)).encode())}"  # type: ignore[attr-defined]


def shown(value: Any) -> str:
    """A setting for ``repr``."""
    if isinstance(value, Tensor):
        has_value = value.numel() == 1 and not value.is_meta
        return f"{value.item():.4g}" if has_value else f"tensor{tuple(value.shape)}"
    return repr(value)
