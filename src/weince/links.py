"""Links: how a cosine score becomes a logit.

A link takes the shortfall ``d = 1 - s`` of a score ``s``, because near the cap ``d`` has more significant digits than
``s``. A link has a ``logit`` and a ``slope``, the derivative of the logit with respect to the *score*. Its parameters
are numbers or tensors; gradients flow through the tensors. A tensor ``(anchors,)`` holds one value per anchor (row);
:func:`column` shapes it. A logit may depend on its own score only.

>>> d = torch.tensor([[0.5, 0.1]])
>>> SoftmaxLink(temperature=0.5).logit(d)
tensor([[1.0000, 1.8000]])
>>> ShortfallLink(beta=2.0).slope(d)
tensor([[ 4., 20.]])
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import get_annotations
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import threshold

from weince.parameters import Scalar, check_endpoint, check_positive, is_number
from weince.scores import derivatives, may_take


class Straight(NamedTuple):
    """A logit ``scale * s + bias`` with fixed numbers."""

    scale: float
    bias: float = 0.0


class Link:
    """A map from scores to logits. Subclass it as a frozen dataclass with a ``logit`` (and a ``slope``, its
    derivative by the score, if autograd is too slow); both get shortfalls, ``1 - s``, which are exact near the cap.
    Or pass a plain function of the score, as in :class:`FunctionLink`. A field with one value per anchor is read as
    ``column(self.field, shortfall)`` (from ``weince.links``).

    Examples:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from weince import Link, LinkLoss
        >>> @dataclass(frozen=True)
        ... class Square(Link):
        ...     def logit(self, shortfall):
        ...         return -5 * shortfall**2
        >>> LinkLoss(Square())(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    near_cap: ClassVar[bool] = True
    """Whether the logit is steep near the cap, so that small shortfalls must be computed accurately."""

    falls: ClassVar[bool] = False
    """Whether the logit never rises with the shortfall, so that the nearest negative has the largest."""

    def logit(self, shortfall: Tensor) -> Tensor:
        """Logits of shortfalls ``(anchors, candidates)``, or ``(anchors,)`` for one candidate per anchor."""
        raise NotImplementedError(f"{type(self).__name__} must define logit(shortfall); got no such method")

    def slope(self, shortfall: Tensor) -> Tensor:
        """Derivative of the logit with respect to the score, in the shape of ``shortfall``."""
        return -derivatives(lambda at: self.logit(at["d"]).sum(), {"d": shortfall})["d"]

    straight: Straight | None = None
    """Scale and bias, if the logit is a straight line of the score and both are fixed numbers."""

    names: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that the class takes;"""

    custom: ClassVar[bool] = True
    """Whether a user wrote the logit, so that it may be infinite at pairs that take no part."""

    needs_cap: ClassVar[bool] = False
    """Whether the logit has no meaning for scores above 1, as dot products may be."""

    def __init_subclass__(cls) -> None:
        cls.custom = vars(cls).get("custom", True)  # a subclass may hold other code
        if "logit" in vars(cls):  # what is inherited belongs to another logit
            cls.slope = vars(cls).get("slope", Link.slope)  # type: ignore[method-assign]
            cls.near_cap = vars(cls).get("near_cap", Link.near_cap)
            cls.falls = vars(cls).get("falls", Link.falls)
        kinds, no_field = get_annotations(cls), ("ClassVar", "InitVar", "KW_ONLY")
        own = [name for name, kind in kinds.items() if not any(word in str(kind) for word in no_field)]
        # A field(init=False) is computed by the link itself, also in a copy.
        taken = [name for name in own if getattr(vars(cls).get(name), "init", True)]
        cls.names += tuple(name for name in taken if name not in cls.names)

    def tensors(self) -> dict[str, Tensor]:
        """The parameters that are tensors, by name."""
        values = {name: getattr(self, name) for name in self.names}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def learned(self) -> dict[str, Tensor]:
        """The parameters that require a gradient, by name."""
        return {name: value for name, value in self.tensors().items() if value.requires_grad}

    def replace(self, values: dict[str, Tensor]) -> Self:
        """A copy with new values for some parameters."""
        if not values:
            return self
        return type(self)(**{name: values.get(name, getattr(self, name)) for name in self.names})

    def rows(self, start: int, stop: int) -> Self:
        """The link for the anchors from ``start`` to ``stop``."""
        return self.replace(
            {name: value[start:stop] for name, value in self.tensors().items() if value.numel() > 1}
        )

    def kind(self) -> object:
        """The code of the logit: the class, that of a function, or an object that is called."""
        return type(self)

    def reads(self) -> list[object]:
        """What the code of the logit reads besides the scores: fields, or what a function has captured."""
        return [getattr(self, name) for name in self.names]

    def check_anchors(self, anchors: int) -> None:
        """Raise unless each parameter holds one value, or one for each anchor."""
        for name, value in self.tensors().items():
            if value.numel() not in (1, anchors) or value.ndim > 1:
                raise ValueError(
                    f"{name} must hold one value, or one for each of {anchors} anchors; "
                    f"got shape {tuple(value.shape)}"
                )


class FunctionLink(Link):
    """A link made of any function of the score.

    Args:
        function: Maps scores ``(anchors, candidates)`` to logits, each score alone; it gets the parameters by name,
            one value per anchor as a column.
        **parameters: Tensors with one value, or with one per anchor; they get a gradient if they require one.

    Examples:
        >>> import torch
        >>> from weince import FunctionLink
        >>> FunctionLink(lambda s, k: k * s**3, k=torch.tensor(2.0)).logit(torch.tensor([[0.5]]))
        tensor([[0.2500]])
    """

    custom = True

    def __init__(self, function: Callable[..., Tensor], **parameters: Tensor) -> None:
        for name, value in parameters.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{name} must be a tensor, like torch.tensor(2.0), or a number inside the function; "
                    f"got {type(value).__name__}"
                )
        self.function, self.parameters = function, parameters

    def __init_subclass__(cls) -> None:
        # replace() returns a plain FunctionLink, which would drop what a subclass overrides.
        raise TypeError(f"{cls.__name__} must be a subclass of Link; got FunctionLink as its base")

    def logit(self, shortfall: Tensor) -> Tensor:
        parameters = {name: column(value, shortfall) for name, value in self.parameters.items()}
        logits = self.function(1 - shortfall, **parameters)
        if not isinstance(logits, Tensor) or logits.shape != shortfall.shape:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"a link must return a logit for each of the scores {tuple(shortfall.shape)}; got {got}"
            )
        return logits

    def tensors(self) -> dict[str, Tensor]:
        return self.parameters

    def kind(self) -> object:
        function = self.function.func if isinstance(self.function, partial) else self.function
        # An object is a kind of its own: another one of its class, say of nn.Sequential, computes something else.
        return getattr(function, "__code__", function)

    def reads(self) -> list[object]:
        function, given = self.function, []
        if isinstance(function, partial):
            given, function = [*function.args, *function.keywords.values()], function.func
        cells = getattr(function, "__closure__", None) or ()
        defaults = getattr(function, "__defaults__", None) or ()
        owner = getattr(function, "__self__", None)  # of a method
        return [*given, *defaults, owner, *(cell.cell_contents for cell in cells)]

    def replace(self, values: dict[str, Tensor]) -> Self:
        if not values:
            return self
        return FunctionLink(self.function, **{**self.parameters, **values})  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"FunctionLink({getattr(self.function, '__name__', 'function')})"


def as_link(link: Link | Callable[..., Tensor]) -> Link:
    """Return a link unchanged; wrap a plain function in a :class:`FunctionLink`."""
    if isinstance(link, Link):
        return link
    if isinstance(link, type) or not callable(link):
        raise TypeError(
            f"a link must be a Link, like SoftmaxLink(0.5), or a function of the score; got {link!r}"
        )
    return FunctionLink(link)


@dataclass(frozen=True)
class SoftmaxLink(Link):
    """``s / temperature``: the softmax of InfoNCE (Gumbel noise).

    Examples:
        >>> import torch
        >>> from weince import SoftmaxLink
        >>> SoftmaxLink(temperature=0.5).logit(torch.tensor([0.5, 0.1]))  # of shortfalls, 1 - s
        tensor([1.0000, 1.8000])
    """

    custom: ClassVar[bool] = False

    temperature: Scalar = 0.5
    near_cap: ClassVar[bool] = False
    falls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        if type(self) is SoftmaxLink and not isinstance(self.temperature, Tensor):
            object.__setattr__(self, "straight", Straight(1 / self.temperature))

    def logit(self, shortfall: Tensor) -> Tensor:
        temperature, score = column(self.temperature, shortfall), 1 - shortfall
        return score.div_(temperature) if may_take(score, temperature) else score / temperature

    def slope(self, shortfall: Tensor) -> Tensor:
        return (shortfall.new_ones(()) / column(self.temperature, shortfall)).expand_as(shortfall)


@dataclass(frozen=True)
class AffineLink(Link):
    """``scale * s + bias``: the link of SigLIP. ``scale`` may have any sign.

    Examples:
        >>> import torch
        >>> from weince import AffineLink
        >>> AffineLink(scale=10.0, bias=-10.0).logit(torch.tensor([0.5, 0.0]))  # of shortfalls, 1 - s
        tensor([-5.,  0.])
    """

    custom: ClassVar[bool] = False

    scale: Scalar
    bias: Scalar = 0.0
    near_cap: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("bias", self.bias)):
            if not isinstance(value, Tensor) and not (is_number(value) and abs(value) < float("inf")):
                raise ValueError(f"{name} must be a finite number or a tensor; got {value!r}")
        if (
            type(self) is AffineLink
            and not isinstance(self.scale, Tensor)
            and not isinstance(self.bias, Tensor)
        ):
            object.__setattr__(self, "straight", Straight(self.scale, self.bias))

    def logit(self, shortfall: Tensor) -> Tensor:
        return (1 - shortfall) * column(self.scale, shortfall) + column(self.bias, shortfall)

    def slope(self, shortfall: Tensor) -> Tensor:
        return (shortfall.new_ones(()) * column(self.scale, shortfall)).expand_as(shortfall)


@dataclass(frozen=True)
class ShortfallLink(Link):
    """``-beta * log(endpoint - s)``: the shortfall link, or Weibit (Weibull noise below an endpoint).

    ``endpoint - s`` is clamped to at least ``eps``; below that the slope is 0.

    Examples:
        >>> import torch
        >>> from weince import ShortfallLink
        >>> ShortfallLink(beta=2.0).slope(torch.tensor([0.5, 0.1]))  # steeper towards the cap
        tensor([ 4., 20.])
    """

    custom: ClassVar[bool] = False
    needs_cap: ClassVar[bool] = True

    beta: Scalar = 1.0
    endpoint: float = 1.0
    eps: float = 1e-6
    falls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_positive("eps", self.eps)
        check_endpoint(self.endpoint)

    def logit(self, shortfall: Tensor) -> Tensor:
        gap, slope = self._gap(shortfall).clamp_min(self.eps), -column(self.beta, shortfall)
        return gap.log_().mul_(slope) if may_take(gap, slope) else gap.log() * slope

    def slope(self, shortfall: Tensor) -> Tensor:
        inverse, beta = _inverse(self._gap(shortfall), self.eps), column(self.beta, shortfall)
        return inverse.mul_(beta) if may_take(inverse, beta) else inverse * beta

    def _gap(self, shortfall: Tensor) -> Tensor:
        return shortfall if self.endpoint == 1 else shortfall + (self.endpoint - 1)


@dataclass(frozen=True)
class PowerLink(Link):
    """``alpha * log((1 + s) / 2)``: the power link (Frechet noise); the argument is clamped to at least ``eps``.

    Examples:
        >>> import torch
        >>> from weince import PowerLink
        >>> PowerLink(alpha=2.0).slope(torch.tensor([0.0, 1.0]))
        tensor([1., 2.])
    """

    custom: ClassVar[bool] = False
    needs_cap: ClassVar[bool] = True

    alpha: Scalar = 1.0
    eps: float = 1e-6
    near_cap: ClassVar[bool] = False
    falls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        check_positive("eps", self.eps)

    def logit(self, shortfall: Tensor) -> Tensor:
        return column(self.alpha, shortfall) * (1 - shortfall / 2).clamp_min(self.eps).log()

    def slope(self, shortfall: Tensor) -> Tensor:
        return _inverse(1 - shortfall / 2, self.eps) * (column(self.alpha, shortfall) / 2)


@dataclass(frozen=True)
class BlendLink(Link):
    """``(1 - lam) * s / temperature - lam * beta * log(eps + max(1 - s, eps))``: the link of WEINCE.

    ``lam`` and ``beta`` are numbers, or tensors with one value per anchor. ``soft_cap=False`` omits the ``eps`` that
    Algorithm 1 adds inside the logarithm, as the authors' released code does. An ``endpoint`` above 1 adds
    ``endpoint - 1`` inside the logarithm.

    Examples:
        >>> import torch
        >>> from weince import BlendLink, LinkLoss
        >>> link = BlendLink(lam=0.4, beta=2.0, temperature=0.1)
        >>> LinkLoss(link)(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    custom: ClassVar[bool] = False
    needs_cap: ClassVar[bool] = True

    lam: Scalar
    beta: Scalar
    temperature: Scalar = 0.5
    eps: float = 1e-6
    soft_cap: bool = True
    endpoint: float = 1.0
    falls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        check_positive("eps", self.eps)
        check_endpoint(self.endpoint)
        if not isinstance(self.lam, Tensor) and not 0 <= self.lam <= 1:
            raise ValueError(f"lam must lie in [0, 1]; got {self.lam}")
        if not isinstance(self.beta, Tensor) and not 0 <= self.beta < float("inf"):
            raise ValueError(f"beta must be 0 or more, and finite; got {self.beta}")

    def logit(self, shortfall: Tensor) -> Tensor:
        gumbel, weibull = self._weights(shortfall)
        gap = self._gap(shortfall)
        if may_take(gap, gumbel, weibull):  # the same formula in place
            return gap.log_().mul_(-weibull).addcmul_(shortfall, gumbel, value=-1).add_(gumbel)
        return (1 - shortfall) * gumbel - gap.log() * weibull

    def slope(self, shortfall: Tensor) -> Tensor:
        gumbel, weibull = self._weights(shortfall)
        inverse = _inverse(shortfall, self.eps, self.offset)
        if may_take(inverse, gumbel, weibull):
            return inverse.mul_(weibull).add_(gumbel)
        return inverse * weibull + gumbel

    def _weights(self, shortfall: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the score and of the negative logarithm; a column if they differ between anchors."""
        one = shortfall.new_ones(())
        lam, beta = one * column(self.lam, shortfall), one * column(self.beta, shortfall)
        return (1 - lam) / column(self.temperature, shortfall), lam * beta

    def _gap(self, shortfall: Tensor) -> Tensor:
        return shortfall.clamp_min(self.eps).add_(self.offset)

    @property
    def offset(self) -> float:
        """The number added to a shortfall inside the logarithm."""
        return (self.eps if self.soft_cap else 0.0) + (self.endpoint - 1)


@dataclass(frozen=True)
class AtanhLink(Link):
    """``log((1 + s) / (1 - s))``: the link without a temperature. Both parts are clamped to at least ``eps``.

    Examples:
        >>> import torch
        >>> from weince import AtanhLink
        >>> AtanhLink().logit(torch.tensor([1.0]))  # a score of 0
        tensor([0.])
    """

    custom: ClassVar[bool] = False
    needs_cap: ClassVar[bool] = True

    eps: float = 1e-6
    falls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("eps", self.eps)

    def logit(self, shortfall: Tensor) -> Tensor:
        return (2 - shortfall).clamp_min(self.eps).log() - shortfall.clamp_min(self.eps).log()

    def slope(self, shortfall: Tensor) -> Tensor:
        return _inverse(2 - shortfall, self.eps) + _inverse(shortfall, self.eps)


def _inverse(values: Tensor, floor: float, offset: float = 0.0) -> Tensor:
    """``1 / (values + offset)``; 0 for values up to ``floor``, where the clamped logarithm is flat."""
    return threshold(values, floor, torch.inf).add_(offset).reciprocal_()


def column(parameter: Scalar, shortfall: Tensor) -> Scalar:
    """A parameter shaped to broadcast with shortfalls, in their dtype: a column if it has one value per anchor and
    they are 2-D."""
    if not isinstance(parameter, Tensor):
        return parameter
    if parameter.numel() == 1:
        return parameter.reshape(())
    parameter = parameter.to(shortfall.dtype)
    return parameter if shortfall.ndim == 1 else parameter.unsqueeze(-1)
