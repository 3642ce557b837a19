"""Optimisers and schedules by name, all of which can run inside a CUDA graph."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights are updated.

    Args:
        name: ``adam`` (the paper's), ``adamw`` or ``lars``.
        lr: Learning rate.
        weight_decay: The paper says 1e-6, its released code passes none.
        schedule: ``constant`` (the paper's) or ``cosine`` down to 0.
        warmup: Epochs over which the rate rises from 0.
        momentum: Of ``lars``.
    """

    name: Literal["adam", "adamw", "lars"] = "adam"
    lr: float = 3e-4
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: float = 0.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive; got {self.lr}")
        for name in ("weight_decay", "warmup"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1); got {self.momentum}")


class LARS(Optimizer):
    """Momentum whose step on each matrix is in proportion to the matrix's own norm (You, Gitman, Ginsburg 2017).

    Vectors (biases and the parameters of norms) are updated by plain momentum without weight decay, as SimCLR does.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        *,
        lr: float | Tensor,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "trust": trust}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        if parameter.ndim > 1:
            grad = grad + group["weight_decay"] * parameter
            size, slope = parameter.norm(), grad.norm()
            ratio = torch.where((size > 0) & (slope > 0), group["trust"] * size / slope, 1.0)
            grad = grad * ratio
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].mul_(group["momentum"]).add_(grad)
        parameter.sub_(state["momentum"] * group["lr"])


def build_optimizer(parameters: Iterable[Parameter], config: OptimizerConfig) -> Optimizer:
    """The optimiser; on CUDA its rate is a tensor there, so that a captured step reads the present one."""
    wanted = list(parameters)
    device = wanted[0].device
    on_gpu = device.type == "cuda"
    lr = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    if config.name == "lars":
        return LARS(wanted, lr=lr, weight_decay=config.weight_decay, momentum=config.momentum)
    kind = Adam if config.name == "adam" else AdamW
    return kind(wanted, lr=lr, weight_decay=config.weight_decay, fused=on_gpu, capturable=on_gpu)


def rate(config: OptimizerConfig, done: float, epochs: int) -> float:
    """The learning rate after ``done`` epochs (a fraction counts) of a run of so many."""
    if done < config.warmup:
        return config.lr * done / config.warmup
    if config.schedule == "constant":
        return config.lr
    share = (done - config.warmup) / max(epochs - config.warmup, 1e-12)
    return config.lr * (1 + math.cos(math.pi * min(share, 1.0))) / 2
