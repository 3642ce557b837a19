"""WEINCE of a small batch of two views on CUDA: few launches, few steps of Python.

At 256 pairs a GPU is done in a twentieth of a millisecond; what takes time is asking it. So here the embeddings go to
the kernels as they come, without the contest and the separate normalisation of the other engines, in three launches,
and their gradients come back in one. In a compiled graph the same is two operators.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weince.engines.kernels import launch, small
from weince.engines.kernels.ops import pack, register, unpack
from weince.scores import first_order
from weince.tail import TailConfig, TailStats
from weince.terms import WeinceLink

LARGEST_BATCH = 512
LARGEST_WIDTH = 256
LINES = 16
"""Lines of the state: rho, beta, daic, lam, base, pull, g, w, inverse length of the rows, of the operands, loss,
whether a fit was made, then the exact shortfalls of the four nearest."""


def serves(z_i: Tensor, z_j: Tensor | None, link: WeinceLink) -> bool:
    """Whether these embeddings and this link are for the kernels here; all else is for the other engines."""
    return (
        isinstance(z_j, Tensor)
        and z_i.dtype in (torch.float32, torch.bfloat16)
        and z_j.dtype == z_i.dtype
        and z_j.device == z_i.device
        and z_i.ndim == 2
        and z_j.shape == z_i.shape
        and 2 <= z_i.shape[0] <= LARGEST_BATCH
        and 1 <= z_i.shape[1] <= LARGEST_WIDTH
        and not isinstance(link.temperature, Tensor)
    )


def small_loss(
    z_i: Tensor, z_j: Tensor, link: WeinceLink, *, mean: bool, return_stats: bool = True
) -> tuple[Tensor, TailStats | None]:
    """Mean or sum of the losses of all anchors, and their statistics where asked for.

    Args:
        z_i: ``(n, d)`` embeddings.
        z_j: ``(n, d)``, positives row by row.
        link: With a number as its temperature.
        mean: Whether to divide by the number of anchors.
        return_stats: Whether the statistics are wanted.
    """
    tail, temperature = link.tail, link.temperature
    assert not isinstance(temperature, Tensor)
    offset = tail.eps if tail.soft_cap else 0.0
    if torch.compiler.is_compiling():
        loss, *_, state, _ = torch.ops.weince.small(
            z_i, z_j, float(temperature), pack(tail, tail.beta), offset, tail.eps, mean
        )
    else:
        loss, *_, state, _ = _Small.apply(z_i, z_j, float(temperature), tail, offset, tail.eps, mean)  # type: ignore[no-untyped-call]
    return loss, TailStats(*state[:4, : 2 * z_i.shape[0]]) if return_stats else None


class _Plan(NamedTuple):
    """Sizes of the buffers, and the compile-time numbers of the four kernels."""

    padded: int
    tail_size: int
    drop: int
    table_size: int
    rank: int
    rows: dict[str, int]
    tail: dict[str, int]
    sum: dict[str, int]
    gradient: dict[str, int]


@functools.lru_cache(maxsize=64)
def _plan(n: int, d: int, parts: int, config: TailConfig) -> _Plan:
    shape = launch.operand_shape(d, parts)
    wide = triton.next_power_of_2(shape["DP"])
    columns = max(64, triton.next_power_of_2(2 * n))
    size = config.tail_size(2 * n - 2)
    table_size = triton.next_power_of_2(max(size, 32))
    block = launch.blocks(2 * n, shape, "sum")
    exact = min(128, triton.next_power_of_2(d))
    warps = {} if launch.INTERPRETED else {"num_warps": max(4, columns // 64), "num_stages": 2}
    common = {"EXACT": launch.EXACT}
    return _Plan(
        padded=triton.cdiv(2 * n, launch.PAD) * launch.PAD,
        tail_size=size,
        drop=max(1, int(size * config.drop)) if config.drop else 0,
        table_size=table_size,
        rank=round(config.rho0_quantile * (2 * n - 1)),
        rows={
            "DP": shape["DP"],
            "WIDE": wide,
            "PARTS": parts,
            "BR": max(1, min(16, 2048 // wide)),
            "GRID": launch.INTERPRETED,
            "FLAGS": launch.FLAGS,
            **common,
        },
        tail={
            "BM": block["BM"],
            "CP": columns,
            "KP": table_size,
            "BK": min(64 // parts // 2, shape["DB"]),
            "DP": shape["DP"],
            "PARTS": parts,
            "DE": exact,
            "NEAR": launch.NEAR,  # type: ignore[dict-item]
            "FLAGS": launch.FLAGS,
            **common,
            **warps,
        },
        sum={
            **block,
            **shape,
            "B": columns,
            "GIVEN": config.rho0 is not None,
            "FIT": config.beta == "fit",
            "GATE": launch.GATES[config.gate],
            "DE": exact,
            "NEAR": launch.NEAR,  # type: ignore[dict-item]
            **common,
        },
        gradient={**block, **shape, "FLAGS": launch.FLAGS, **common},
    )


def _forward(
    z_i: Tensor, z_j: Tensor, temperature: float, config: TailConfig, offset: float, lowest: float, mean: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, unit rows, operands, state, and the columns of the nearest negatives with flags."""
    z_i, z_j = _lines(z_i.detach()), _lines(z_j.detach())
    n, d = z_i.shape
    plan = _plan(n, d, 1 if z_i.dtype == torch.bfloat16 else 2, config)
    unit, x, state, near = _buffers(z_i)
    P, blocks = plan.padded, triton.cdiv(2 * n, plan.tail["BM"])
    small.rows_kernel[(P // plan.rows["BR"],)](
        z_i, z_j, unit, x, state, near, n, d, z_i.stride(0), z_j.stride(0), P, **plan.rows
    )
    table = launch.fit_table(plan.tail_size, plan.drop, plan.table_size, z_i.device)
    small.tail_kernel[(blocks,)](
        unit, x, state, near, table, n, d, P, plan.tail_size, plan.drop, config.eps, **plan.tail
    )
    small.sum_kernel[(blocks,)](
        unit, x, state, near, n, d, P, plan.rank, config.rho0 or 0.0, config.kappa_rho, config.kappa_aic,
        config.margin, temperature, 0.0 if config.beta == "fit" else config.beta, offset, lowest, **plan.sum,
    )  # fmt: skip
    losses = state[10, : 2 * n]
    return losses.mean() if mean else losses.sum(), unit, x, state, near


def _lines(rows: Tensor) -> Tensor:
    """With the numbers of a row one after the other."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _buffers(z_i: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, d = z_i.shape
    parts = 1 if z_i.dtype == torch.bfloat16 else 2
    padded = (2 * n + launch.PAD - 1) // launch.PAD * launch.PAD
    return (
        z_i.new_empty((2 * n, d), dtype=torch.float32),
        z_i.new_empty(
            (padded, parts * launch.operand_shape(d, parts)["DP"]),
            dtype=torch.float32 if launch.INTERPRETED else torch.bfloat16,
        ),
        z_i.new_empty((LINES, padded), dtype=torch.float32),
        z_i.new_empty((padded * launch.EXACT + padded // launch.FLAGS,), dtype=torch.int32),
    )


def _backward(
    out: Tensor, saved: Sequence[Tensor], dtype: torch.dtype, offset: float, lowest: float, mean: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of both views, given that of the loss."""
    unit, x, state, near = saved
    n, d = unit.shape[0] // 2, unit.shape[1]
    parts = 1 if dtype == torch.bfloat16 else 2
    block = launch.blocks(2 * n, launch.operand_shape(d, parts), "gradient")
    shape = launch.operand_shape(d, parts)
    grad_i, grad_j = unit.new_empty((n, d), dtype=dtype), unit.new_empty((n, d), dtype=dtype)
    small.gradient_kernel[(triton.cdiv(2 * n, block["BM"]),)](
        unit, x, state, near, out, grad_i, grad_j, n, d, state.shape[1], 1 / (2 * n) if mean else 1.0, offset,
        lowest, **block, **shape, EXACT=launch.EXACT, FLAGS=launch.FLAGS,
    )  # fmt: skip
    return grad_i, grad_j


class _Small(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output[1:])
        ctx.rest = inputs[4:]

    @staticmethod
    def backward(ctx: Any, out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if out is None:
            return (None,) * 7
        z_i, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # as in torch.func.grad, whose tensors only operators can open
            both = torch.ops.weince.small_gradient(out, z_i, *saved, *ctx.rest)
        else:
            both = _backward(out, saved, z_i.dtype, *ctx.rest)
        return *(first_order(gradient, z_i) for gradient in both), None, None, None, None, None


def _small(
    z_i: Tensor,
    z_j: Tensor,
    temperature: float,
    config: Sequence[float],
    offset: float,
    lowest: float,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _forward(z_i, z_j, temperature, unpack(config), offset, lowest, mean)


def _small_fake(
    z_i: Tensor,
    z_j: Tensor,
    temperature: float,
    config: Sequence[float],
    offset: float,
    lowest: float,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return z_i.new_empty((), dtype=torch.float32), *_buffers(z_i)


def _small_gradient(
    out: Tensor, z_i: Tensor, unit: Tensor, x: Tensor, state: Tensor, near: Tensor, offset: float, lowest: float,
    mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _backward(out, (unit, x, state, near), z_i.dtype, offset, lowest, mean)


def _small_gradient_fake(
    out: Tensor, z_i: Tensor, unit: Tensor, x: Tensor, state: Tensor, near: Tensor, offset: float, lowest: float,
    mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return z_i.new_empty(z_i.shape), z_i.new_empty(z_i.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], *output[1:])
    ctx.rest = inputs[4:]


def _return(ctx: Any, out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if out is None:
        return (None,) * 7
    z_i, *saved = ctx.saved_tensors
    return *torch.ops.weince.small_gradient(out, z_i, *saved, *ctx.rest), None, None, None, None, None


register("small_gradient", _small_gradient, _small_gradient_fake)
torch.library.register_autograd(register("small", _small, _small_fake), _return, setup_context=_save)
