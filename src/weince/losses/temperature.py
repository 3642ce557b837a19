"""Losses with a temperature, fixed or learned, and the state of a loss that training overwrites."""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from weince.losses.base import ContrastiveLoss, Options
from weince.parameters import Scalar, check_positive, unrounded


def temperatures(*values: float) -> tuple[Mapping[str, Any], ...]:
    """A search space of temperatures only."""
    return tuple({"temperature": value} for value in values)


class TemperatureLoss(ContrastiveLoss):
    """A loss with a temperature.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        max_scale: Largest inverse of a learned temperature; CLIP uses 100. Each training step first clamps the
            parameter to this bound, so that the optimizer does not move it ever further beyond.
        **options: As in :class:`ContrastiveLoss`.
    """

    search_space = temperatures(0.1, 0.2, 0.07, 0.5, 0.15, 0.3, 0.05)

    def __init__(
        self, temperature: Scalar = 0.1, *, max_scale: float | None = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        check_positive("temperature", temperature)
        if max_scale is not None:
            check_positive("max_scale", max_scale)
            if not isinstance(temperature, Tensor):
                raise ValueError(
                    f"max_scale bounds a learned temperature, nn.Parameter(torch.tensor({temperature})); got a number"
                )
        self.temperature, self.max_scale = temperature, max_scale

    def bounded_temperature(self) -> Scalar:
        """The temperature; a learned one is at least ``1 / max_scale``, and in float32 or better."""
        temperature = self.temperature
        if self.max_scale is None or not isinstance(temperature, Tensor):
            return unrounded(temperature)
        if self.training:
            keep_within(temperature, lowest=1 / self.max_scale)
        return unrounded(temperature.clamp_min(1 / self.max_scale))


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
