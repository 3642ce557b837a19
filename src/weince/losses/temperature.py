"""Losses with a temperature, fixed or learned, and the state of a loss that training overwrites."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from weince.links import AffineLink, SoftmaxLink
from weince.losses.base import ContrastiveLoss
from weince.losses.options import Options
from weince.parameters import Scalar, check_positive, is_number, unrounded
from weince.sums import LogSumExp, Summed


def temperatures(*values: float) -> tuple[Mapping[str, Any], ...]:
    """A search space of temperatures only."""
    return tuple({"temperature": value} for value in values)


class LearnedOptions(Options, total=False):
    """Options of a loss whose temperature may be learned; see :class:`TemperatureLoss`."""

    max_scale: float | None
    learn_temperature: bool


class TemperatureOptions(LearnedOptions, total=False):
    """Options of a loss with a temperature; see :class:`TemperatureLoss`."""

    hardness: float


WARMEST = 2.0
"""The largest temperature of cosines; above it all softmaxes are nearly uniform, and someone meant a scale."""


class TemperatureLoss(ContrastiveLoss):
    """A loss with a temperature.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        max_scale: Largest inverse of a learned temperature; CLIP uses 100. Each training step first clamps the
            parameter to this bound, so that the optimizer does not move it ever further beyond.
        learn_temperature: Learn ``log_scale = log(1 / temperature)`` from this start, as CLIP does; ``max_scale`` is
            then 100 by default.
        hardness: ``a``: the logit of a negative is ``s / temperature + a s``, without gradient through ``a s``.
            Negatives weigh more the harder they are, and positives pull as before. 0 for none.
        **options: As in :class:`ContrastiveLoss`.
    """

    search_space = temperatures(0.1, 0.2, 0.07, 0.5, 0.15, 0.3, 0.05)
    options: ClassVar[type] = TemperatureOptions

    takes_hardness: ClassVar[bool] = True
    """Whether the loss has a softmax of negatives, so that ``hardness`` has a meaning."""

    def __init__(self, temperature: Scalar = 0.1, **options: Unpack[TemperatureOptions]) -> None:
        of_temperature = {name: options.pop(name, None) for name in OF_TEMPERATURE}  # type: ignore[misc]
        super().__init__(**options)  # type: ignore[misc]
        self.hardness = of_temperature["hardness"] or 0.0
        self.learn_temperature = of_temperature["learn_temperature"] or False
        self.max_scale = of_temperature["max_scale"]
        check_positive("temperature", temperature)
        if self.score == "cosine" and not isinstance(temperature, Tensor) and temperature > WARMEST:
            raise ValueError(
                f"temperature must be at most {WARMEST:g} for cosines; got {temperature}: a scale of {temperature:g} "
                f"is a temperature of 1 / {temperature:g} = {1 / temperature:.3g}"
            )
        self._check_hardness()
        if self.learn_temperature is True:
            if isinstance(temperature, Tensor):
                raise TypeError(
                    "learn_temperature=True makes a parameter of its own and wants a number as temperature; "
                    f"got {type(temperature).__name__}"
                )
            self.max_scale = 100.0 if self.max_scale is None else self.max_scale
            self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)))
        elif self.learn_temperature is not False:
            raise ValueError(f"learn_temperature must be True or False; got {self.learn_temperature!r}")
        if self.max_scale is not None:
            check_positive("max_scale", self.max_scale)
            if not isinstance(temperature, Tensor) and not self.learn_temperature:
                raise ValueError(
                    "max_scale bounds a learned temperature, learn_temperature=True or "
                    f"nn.Parameter(torch.tensor({temperature})); got a number"
                )
        self.temperature = temperature

    def _check_hardness(self) -> None:
        if not is_number(self.hardness) or not 0 <= self.hardness < float("inf"):
            raise ValueError(f"hardness must be a number of at least 0; got {self.hardness!r}")
        if self.hardness and not self.takes_hardness:
            raise ValueError(
                f"{type(self).__name__} has no softmax of negatives alone; got hardness={self.hardness}"
            )

    def temperature_now(self) -> Scalar:
        """The temperature; a learned one is at least ``1 / max_scale``, and in float32 or better."""
        if self.learn_temperature:
            assert self.max_scale is not None
            highest = math.log(self.max_scale)
            if self.training:
                keep_within(self.log_scale, highest=highest)
            return unrounded(self.log_scale.clamp_max(highest)).neg().exp()  # type: ignore[union-attr]
        temperature = self.temperature
        if not isinstance(temperature, Tensor):
            return temperature
        if self.max_scale is None:
            return unrounded(temperature)
        if self.training:
            keep_within(temperature, lowest=1 / self.max_scale)
        return unrounded(temperature.clamp_min(1 / self.max_scale))

    def softmax_sum(self, temperature: Scalar | None = None, *, same_view: bool = False) -> LogSumExp:
        """The log-sum-exp of the negatives' logits, those with ``hardness``; by default at the temperature now."""
        if temperature is None:
            fixed = type(self.temperature) is float and not self.learn_temperature
            temperature = self.temperature if fixed else self.temperature_now()
        if not self.hardness:
            # The link of a number is made once.
            known = type(temperature) is float and not torch.compiler.is_compiling()
            link = _link_of(temperature) if known else SoftmaxLink(temperature)
            return LogSumExp(link, same_view=same_view)
        scale = 1 / temperature + self.hardness
        if isinstance(scale, Tensor):
            # :meth:`eased` shrinks the gradient of this sum: a learned temperature gets its own back here.
            scale = scale.detach() + (scale - scale.detach()) / self._ease(temperature)
        return LogSumExp(AffineLink(scale), positive=SoftmaxLink(temperature), same_view=same_view)

    def eased(self, lse: Summed, temperature: Scalar | None = None) -> Summed:
        """A result of :meth:`softmax_sum`, where the part ``a s`` of a logit passes no gradient to the score."""
        if not self.hardness:
            return lse
        ease = self._ease(self.temperature_now() if temperature is None else temperature)
        fixed = lse.value.detach()
        return lse._replace(value=fixed + (lse.value - fixed) * ease)

    def _ease(self, temperature: Scalar) -> Scalar:
        """Share of ``s / temperature`` in the slope of a negative's logit."""
        fixed = temperature.detach() if isinstance(temperature, Tensor) else temperature
        return 1 / (1 + self.hardness * fixed)

    def settings(self) -> dict[str, Any]:
        values = super().settings()
        for name in OF_TEMPERATURE:
            if getattr(self, name):
                values[name] = getattr(self, name)
        if self.learn_temperature:
            values["temperature"] = self.temperature_now()
        return values


OF_TEMPERATURE = ("max_scale", "learn_temperature", "hardness")


_link_of = lru_cache(maxsize=64)(SoftmaxLink)


def keep_within(parameter: Tensor, lowest: float | None = None, highest: float | None = None) -> None:
    """Clamp a learned number to its bounds. Autograd does not see this, so graphs of earlier batches stay valid."""
    if parameter.is_leaf:
        with torch.no_grad():
            remember(parameter.data, parameter.data.clamp(lowest, highest))


def remember(state: Tensor, value: Tensor) -> None:
    """Overwrite a buffer or parameter of a module; this works under torch.func too."""
    _Remember.apply(state, value)  # type: ignore[no-untyped-call]


class _Remember(torch.autograd.Function):
    """Overwrites module state. torch.func allows that only inside an autograd function."""

    @staticmethod
    def forward(state: Tensor, value: Tensor) -> Tensor:
        state.copy_(value)
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None
