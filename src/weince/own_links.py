"""Checks of links that a user wrote: those that would get a wrong gradient are refused, with the remedy."""

from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from weince.links import Link
from weince.scores import derivatives, in_transform

_elementwise: "WeakKeyDictionary[object, set[tuple[object, ...]]]" = WeakKeyDictionary()
"""Code of links that :func:`check_elementwise` has found right, each with what it was tried with: the names of the
parameters that had one value per anchor, and what else the code reads."""


def check_learned(link: Link, like: Tensor) -> None:
    """Raise if a user's logit reads a tensor that requires a gradient and is no parameter of the link.

    The sums over candidates would give that tensor no gradient; it would get only that of the positive's logit.
    """
    if not link.custom or not torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform():
        return
    fixed = link.replace({name: value.detach().reshape(-1)[:1] for name, value in link.tensors().items()})
    if fixed.logit(like.new_full((1, 1), 0.5)).requires_grad:
        raise ValueError(
            "a link must get a learned tensor as a parameter, FunctionLink(lambda s, k: k * s, k=tensor) or a "
            f"field of its dataclass; got {link!r}, which reads one from elsewhere"
        )


def check_elementwise(link: Link, like: Tensor) -> None:
    """Raise if a user's logit depends on other scores than its own or changes what it gets, or if its slope is not
    its derivative: the gradient would be wrong.

    Reading the result costs a device sync, so each class or function is tried once with the same parameters and the
    same captured functions, objects and flags. A schedule may change captured numbers, tensors and lists in every
    batch, so those do not count.
    """
    if not link.custom or torch.compiler.is_compiling() or in_transform():
        return
    by_anchor = tuple(name for name, value in link.tensors().items() if value.numel() > 1)
    try:
        known = _elementwise.setdefault(link.kind(), set())
    except TypeError:  # an object without a hash or a weak reference: it is tried each time
        known = set()
    tried = (by_anchor, *(_mark(value) for value in link.reads()))
    if tried in known or like.is_meta or type(like) is not Tensor:
        return
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    with torch.no_grad():
        two = copied(link, {name: _of_two_anchors(value) for name, value in link.tensors().items()})
        at = like.new_tensor([[0.5, 0.3], [0.5, 0.3]])
        seen = at.clone()
        both = two.logit(seen)
        if not torch.equal(seen, at):
            raise ValueError(
                "a logit must leave the shortfalls that it gets as they are, since the slope reads them again; "
                f"got {link!r}, which changes them in place"
            )
        each = torch.cat([two.logit(like.new_tensor([[d], [d]])) for d in (0.5, 0.3)], 1)
        if each.shape != both.shape or not torch.allclose(each, both, rtol=1e-4, equal_nan=True):
            raise ValueError(
                "a link must map each score alone to its logit, and read a parameter with one value per anchor "
                "as column(self.name, shortfall), from weince.links; "
                f"got {link!r}, whose logits depend on other scores or anchors"
            )
        # __post_init__ would change a parameter in each copy once more.
        anchors = max((value.numel() for value in link.tensors().values()), default=1)
        whole = link.logit(like.new_full((anchors, 1), 0.5))
        if not torch.allclose(both[0, 0], whole[0, 0], rtol=1e-4, equal_nan=True):
            raise ValueError(f"{COPIES}; got {link!r}")
        _check_slope(two, like)
    known.add(tried)


def _check_slope(link: Link, like: Tensor) -> None:
    """Raise if a slope that a user wrote is not the derivative of the logit by the score."""
    if type(link).slope is Link.slope:
        return
    at = like.new_tensor([[0.613, 0.287], [0.613, 0.287]])  # logits seldom have a kink at such numbers
    given = torch.as_tensor(link.slope(at.clone())).to(at)  # which may work in place
    right = -derivatives(lambda values: link.logit(1.0 * values["d"]).sum(), {"d": at})["d"]
    if not torch.allclose(given, right, rtol=1e-2, atol=1e-4, equal_nan=True):
        raise ValueError(
            "slope must return the derivative of the logit by the score, which is minus that by the shortfall; "
            f"got {given[0].tolist()} at the shortfalls {at[0].tolist()}, and the derivative is {right[0].tolist()}: "
            f"mend slope in {type(link).__name__}, or leave it out"
        )


COPIES = (
    "a link must be determined by its fields, since sums work with copies made of them; put what __post_init__ "
    "computes into a field(init=False)"
)


def copied(link: Link, values: dict[str, Tensor]) -> Link:
    """``link.replace``, with an error that says what to do."""
    try:
        return link.replace(values)
    except TypeError as error:  # __init__ takes something else, such as an InitVar
        raise ValueError(f"{COPIES}; got {link!r}, and {error}") from error


def _mark(value: object) -> object:
    """What tells a captured value from others, without keeping it alive: the code of a function, an object itself,
    the value of a flag; of numbers, tensors and lists only the type."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float | Tensor):
        return type(value)
    try:
        hash(value)
        return getattr(value, "__code__", None) or ref(value)
    except TypeError:
        return type(value)


def _of_two_anchors(parameter: Tensor) -> Tensor:
    """A parameter for two anchors: one value as it is; of one per anchor, the first and another."""
    if parameter.numel() == 1:
        return parameter
    first = parameter.reshape(-1)[:1]
    return torch.cat([first, 1.5 * first + 0.1])
