"""Links: how a cosine score becomes a logit.

Every link is written in the shortfall ``d = 1 - s`` of a score ``s``, because near the cap ``d`` is known
accurately and ``s`` is not. A link has a ``logit`` and a ``slope``, the derivative of the logit with respect
to the *score*. Parameters are numbers or tensors; a tensor of shape ``(anchors,)`` holds one value per anchor
(row), a 0-dimensional one may be learned.

>>> d = torch.tensor([[0.5, 0.1]])
>>> SoftmaxLink(temperature=0.5).logit(d)
tensor([[1.0000, 1.8000]])
>>> ShortfallLink(beta=2.0).slope(d)
tensor([[ 4., 20.]])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import threshold

from weince.scores import free_to_look

if TYPE_CHECKING:
    from weince.terms import Survey

Scalar = float | Tensor


class Link:
    """A score coordinate. Subclass it with a ``logit`` (and a ``slope``, if autograd's is too slow).

    Make a subclass with parameters a frozen dataclass: its fields are how they are found and trained.
    """

    near_cap: ClassVar[bool] = True
    """Whether the logit is steep near the cap, so that small shortfalls must be computed accurately."""

    @property
    def in_kernels(self) -> bool:
        """Whether kernels that know this class of links know it as it is set; engines in plain torch know all."""
        return True

    def bind(self, survey: Survey) -> Link:
        """The link with its parameters settled for a batch. Most have nothing to settle."""
        return self

    def check_anchors(self, anchors: int) -> None:
        """Raise if a parameter holds one value per anchor, but of other anchors."""
        for name, value in self.tensors().items():
            if value.numel() not in (1, anchors):
                raise ValueError(
                    f"{name} must hold one value, or one for each of {anchors} anchors; got {value.numel()}"
                )

    def rows(self, start: int, stop: int) -> Self:
        """The link for some of the anchors."""
        own = {name: value[start:stop] for name, value in self.tensors().items() if value.numel() > 1}
        return self.with_tensors(own) if own else self

    def with_tensors(self, values: dict[str, Tensor]) -> Self:
        """The same link with other values of some parameters."""
        return replace(self, **values)  # type: ignore[type-var]

    def tensors(self) -> dict[str, Tensor]:
        """The parameters that are tensors, by name."""
        if not is_dataclass(self):
            return {}
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def logit(self, shortfall: Tensor) -> Tensor:
        """Logits of shortfalls ``(anchors, candidates)``."""
        raise NotImplementedError

    def slope(self, shortfall: Tensor) -> Tensor:
        """Derivative of the logit with respect to the score, same shape."""
        gradient: Tensor = torch.func.grad(lambda d: self.logit(d).sum())(shortfall)
        return -gradient


@dataclass(frozen=True)
class SoftmaxLink(Link):
    """``s / temperature``: the softmax of InfoNCE (Gumbel noise)."""

    temperature: Scalar = 0.5
    near_cap: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)

    def logit(self, shortfall: Tensor) -> Tensor:
        return (1 - shortfall) / _column(self.temperature)

    def slope(self, shortfall: Tensor) -> Tensor:
        return (shortfall.new_ones(()) / _column(self.temperature)).expand_as(shortfall)


@dataclass(frozen=True)
class ShortfallLink(Link):
    """``-beta * log(endpoint - s)``: the shortfall link, or Weibit (Weibull noise below an endpoint).

    ``endpoint - s`` is kept at ``eps`` or more; below that the slope is 0.
    """

    beta: Scalar = 1.0
    endpoint: float = 1.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_positive("eps", self.eps)
        check_endpoint(self.endpoint)

    def logit(self, shortfall: Tensor) -> Tensor:
        return -_column(self.beta) * self._gap(shortfall).clamp_min(self.eps).log()

    def slope(self, shortfall: Tensor) -> Tensor:
        return _inverse(self._gap(shortfall), self.eps) * _column(self.beta)

    def _gap(self, shortfall: Tensor) -> Tensor:
        return shortfall if self.endpoint == 1 else shortfall + (self.endpoint - 1)


@dataclass(frozen=True)
class PowerLink(Link):
    """``alpha * log((1 + s) / 2)``: the power link (Frechet noise), floored at ``eps``."""

    alpha: Scalar = 1.0
    eps: float = 1e-6
    near_cap: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        check_positive("eps", self.eps)

    def logit(self, shortfall: Tensor) -> Tensor:
        return _column(self.alpha) * (1 - shortfall / 2).clamp_min(self.eps).log()

    def slope(self, shortfall: Tensor) -> Tensor:
        return _inverse(1 - shortfall / 2, self.eps) * (_column(self.alpha) / 2)


@dataclass(frozen=True)
class BlendLink(Link):
    """``(1 - lam) * s / temperature - lam * beta * log(eps + max(1 - s, eps))``: the link of WEINCE.

    ``lam`` and ``beta`` are numbers or one value per anchor. With ``soft_cap=False`` the ``eps`` that
    Algorithm 1 adds inside the logarithm is left out, as in the authors' released code. An ``endpoint`` above 1 is
    added there too, less 1. ``softmax_at`` ``(anchors,)`` is the column of a candidate whose logit stays
    ``s / temperature``: an anchor's positive, where only the negatives are to be blended.
    """

    lam: Scalar
    beta: Scalar
    temperature: Scalar = 0.5
    eps: float = 1e-6
    soft_cap: bool = True
    endpoint: float = 1.0
    softmax_at: Tensor | None = None

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        check_positive("eps", self.eps)
        check_endpoint(self.endpoint)
        if not isinstance(self.lam, Tensor) and not 0 <= self.lam <= 1:
            raise ValueError(f"lam must lie in [0, 1]; got {self.lam}")
        if not isinstance(self.beta, Tensor) and not self.beta >= 0:
            raise ValueError(f"beta must be 0 or more; got {self.beta}")

    def logit(self, shortfall: Tensor) -> Tensor:
        gumbel, weibull = self._weights(shortfall)
        logits = (1 - shortfall) * gumbel - self._gap(shortfall).log() * weibull
        return self._with_softmax(logits, SoftmaxLink.logit, shortfall)

    def slope(self, shortfall: Tensor) -> Tensor:
        gumbel, weibull = self._weights(shortfall)
        slopes = _inverse(shortfall, self.eps, self._offset) * weibull + gumbel
        return self._with_softmax(slopes, SoftmaxLink.slope, shortfall)

    @property
    def in_kernels(self) -> bool:
        return self.endpoint == 1 and self.softmax_at is None

    def _with_softmax(
        self, values: Tensor, of: Callable[[SoftmaxLink, Tensor], Tensor], shortfall: Tensor
    ) -> Tensor:
        """Logits or slopes, with those of the softmax at ``softmax_at``."""
        if self.softmax_at is None:
            return values
        at = self.softmax_at.unsqueeze(1)
        return values.scatter(1, at, of(SoftmaxLink(self.temperature), shortfall.gather(1, at)))

    def _weights(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the score and of minus the logarithm, per anchor or for all."""
        one = like.new_ones(())
        lam, beta = one * _column(self.lam), one * _column(self.beta)
        return (1 - lam) / _column(self.temperature), lam * beta

    def _gap(self, shortfall: Tensor) -> Tensor:
        gap = shortfall.clamp_min(self.eps)
        return gap.add_(self._offset) if self._offset else gap

    @property
    def _offset(self) -> float:
        """What is added to a shortfall inside the logarithm."""
        return (self.eps if self.soft_cap else 0.0) + (self.endpoint - 1)


def _inverse(values: Tensor, floor: float, offset: float = 0.0) -> Tensor:
    """``1 / (values + offset)``, and 0 up to the floor, where the logarithm is flat."""
    return threshold(values, floor, torch.inf).add_(offset).reciprocal_()


def check_positive(name: str, value: Scalar) -> None:
    """Raise if a parameter is not a positive, finite number; tensors are only read where that costs no wait."""
    if isinstance(value, Tensor):
        if value.ndim > 1:
            raise ValueError(f"{name} must be one value, or one per anchor; got shape {tuple(value.shape)}")
        if free_to_look(value) and not ((value > 0) & value.isfinite()).all():
            raise ValueError(f"{name} must be positive and finite; got {value.detach()}")
    elif not is_number(value):
        raise TypeError(f"{name} must be a number or a tensor; got {type(value).__name__}")
    elif not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite; got {value}")


def is_number(value: object, kind: type = Real) -> bool:
    """Whether a value is a number of Python's or numpy's; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_endpoint(endpoint: float) -> None:
    """Raise if scores could pass the endpoint of a shortfall link."""
    check_positive("endpoint", endpoint)
    if endpoint < 1:
        raise ValueError(f"endpoint must be at least 1, the largest cosine; got {endpoint}")


def _column(parameter: Scalar) -> Scalar:
    """One value per anchor as a column beside the candidates; a single value as a scalar."""
    if not isinstance(parameter, Tensor):
        return parameter
    return parameter.reshape(()) if parameter.numel() == 1 else parameter.unsqueeze(-1)
