"""Optimizers and schedules by name, all of which can run inside a CUDA graph."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights are updated.

    Args:
        name: ``adam`` (the paper's), ``adamw``, ``sgd`` or ``lars``.
        lr: Learning rate.
        weight_decay: The paper says 1e-6, its released code passes none. Only ``adam`` applies it to biases and to
            the parameters of norms too.
        schedule: ``constant`` (the paper's) or ``cosine`` down to 0.
        warmup: Share of the run's epochs over which the rate rises from 0, such as 0.1.
        momentum: Momentum of ``sgd`` and ``lars``.
        trust: Size of a step of ``lars`` at a rate of 1, as a share of the matrix's norm.
    """

    name: Literal["adam", "adamw", "sgd", "lars"] = "adam"
    lr: float = 3e-4
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: float = 0.0
    momentum: float = 0.9
    trust: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("lr", "trust"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0; got {self.weight_decay}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is a share of the epochs in [0, 1]; got {self.warmup}")
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
    """The optimizer; on CUDA its rate is a tensor there, so that a captured step reads the present one."""
    wanted = list(parameters)
    device = wanted[0].device
    on_gpu = device.type == "cuda"
    lr = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    if config.name == "lars":
        decay, momentum = config.weight_decay, config.momentum
        return LARS(wanted, lr=lr, weight_decay=decay, momentum=momentum, trust=config.trust)
    if config.name == "adam":  # as the paper's authors use it: on all parameters alike
        return Adam(wanted, lr=lr, weight_decay=config.weight_decay, fused=on_gpu, capturable=on_gpu)
    groups = _groups(wanted, config.weight_decay)
    if config.name == "adamw":
        return AdamW(groups, lr=lr, fused=on_gpu, capturable=on_gpu)
    # Only the fused form reads the rate on the device; the others ask the host for it, which a capture forbids.
    return SGD(groups, lr=lr, momentum=config.momentum, fused=on_gpu)


def _groups(parameters: Sequence[Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay; vectors (biases and the parameters of norms) without."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = {"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}
    return [group for group in groups if group["params"]]


def rate(config: OptimizerConfig, done: float, epochs: int) -> float:
    """The learning rate after ``done`` epochs (a fraction counts) of a run of so many."""
    warmup = config.warmup * epochs
    if done < warmup:
        return config.lr * done / warmup
    if config.schedule == "constant":
        return config.lr
    share = (done - warmup) / max(epochs - warmup, 1e-12)
    return config.lr * (1 + math.cos(math.pi * min(share, 1.0))) / 2
