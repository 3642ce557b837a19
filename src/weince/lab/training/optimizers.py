"""Optimizers and schedules by name; all can run inside a CUDA graph."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from weince.lab.settings import check_positive


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights are updated.

    Args:
        name: ``adam`` (the paper's), ``adamw``, ``sgd`` or ``lars``.
        lr: Learning rate.
        weight_decay: The paper says 1e-6, its released code uses none. Only ``adam`` also applies it to biases and to
            the parameters of norms.
        schedule: ``constant`` (the paper's), or ``cosine`` or ``linear`` down to 0.
        warmup: Share of the run's epochs over which the rate rises from 0, such as 0.1.
        momentum: Momentum of ``sgd`` and ``lars``.
        trust: Norm of a step of ``lars`` at a rate of 1, as a share of the matrix's norm.
    """

    name: Literal["adam", "adamw", "sgd", "lars"] = "adam"
    lr: float = 3e-4
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: float = 0.0
    momentum: float = 0.9
    trust: float = 1e-3

    def __post_init__(self) -> None:
        check_positive(self, "lr", "trust")
        if not 0 <= self.weight_decay <= 1e6:  # times the largest rate it is still a number of float32
            raise ValueError(f"weight_decay must lie in [0, 1e6]; got {self.weight_decay}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is a share of the epochs in [0, 1]; got {self.warmup}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1); got {self.momentum}")


class LARS(Optimizer):
    """SGD with momentum whose step on each matrix is proportional to the matrix's norm (You, Gitman, Ginsburg 2017).

    Vectors (biases and the parameters of norms) get plain momentum without weight decay, as in SimCLR.
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[dict[str, Any]],
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


def build_optimizer(
    parameters: Iterable[Parameter],
    config: OptimizerConfig,
    *,
    of_loss: Iterable[Parameter] = (),
    loss_lr_scale: float = 1.0,
) -> Optimizer:
    """Build the optimizer. On CUDA its rates are tensors there, so that a captured step reads the current values.

    Args:
        parameters: Parameters of the model.
        config: How they are updated.
        of_loss: Parameters of the loss, such as a temperature. They get no weight decay.
        loss_lr_scale: Their learning rate, as a multiple of the model's.
    """
    groups = _groups(list(parameters), config)
    learned = list(of_loss)
    if learned:
        groups.append({"params": learned, "weight_decay": 0.0, "lr_scale": loss_lr_scale})
    device = groups[0]["params"][0].device
    on_gpu = device.type == "cuda"
    for group in groups:
        lr = config.lr * group.get("lr_scale", 1.0)
        group["lr"] = torch.tensor(lr, device=device) if on_gpu else lr
    if config.name == "lars":
        return LARS(groups, lr=config.lr, momentum=config.momentum, trust=config.trust)
    if config.name == "adam":
        return Adam(groups, lr=config.lr, fused=on_gpu, capturable=on_gpu)
    if config.name == "adamw":
        return AdamW(groups, lr=config.lr, fused=on_gpu, capturable=on_gpu)
    # Only the fused version reads the rate on the device; the others need a sync, which a capture forbids.
    return SGD(groups, lr=config.lr, momentum=config.momentum, fused=on_gpu)


def _groups(parameters: list[Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors (biases and the parameters of norms) without; Adam decays all alike."""
    if config.name in (
        "adam",
        "lars",
    ):  # Adam as the paper's authors use it; LARS tells vectors from matrices
        return [{"params": parameters, "weight_decay": config.weight_decay}]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = (
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


def set_rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of every group, times its ``lr_scale``.

    A tensor is changed in place, since a captured step reads it.
    """
    for group in optimizer.param_groups:
        lr = value * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state, but keep ``lr`` and the implementation flags: the device may have changed."""
    kept = ("lr", "lr_scale", "fused", "foreach", "capturable")
    groups = [
        saved | {key: built[key] for key in kept if key in built}
        for saved, built in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict(state | {"param_groups": groups})


def rate(config: OptimizerConfig, done: float, epochs: int) -> float:
    """The learning rate after ``done`` epochs (may be fractional) of a run of ``epochs`` epochs."""
    warmup = config.warmup * epochs
    if done < warmup:
        return config.lr * done / warmup
    if config.schedule == "constant":
        return config.lr
    share = (done - warmup) / max(epochs - warmup, 1e-12)
    if config.schedule == "linear":
        return config.lr * (1 - min(share, 1.0))
    return config.lr * (1 + math.cos(math.pi * min(share, 1.0))) / 2
