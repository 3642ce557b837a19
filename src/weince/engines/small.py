"""WEINCE of a small batch of two views on CUDA: few launches, few steps of Python.

At 256 pairs a GPU is done in a twentieth of a millisecond; what takes time is asking it. So here the embeddings go to
the kernels as they come, without the contest and the separate normalisation of the other engines, in four launches,
and their gradients come back in one. All that the kernels keep lies in one buffer. In a compiled graph the same is
two operators.
"""

import functools
import typing
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weince.engines.fused import cap
from weince.engines.kernels import fit, launch, small
from weince.engines.kernels.again import ALIGNED, Launch, Place, after
from weince.engines.kernels.ops import on_its_device, pack, register, unpack
from weince.engines.kernels.order import network_of
from weince.scores import first_order
from weince.tail import TailConfig, TailStats
from weince.terms import WeinceLink

LARGEST_BATCH = 512
LARGEST_WIDTH = 256
LINES = 16
"""Lines of the state: rho, beta, daic, lam, base, pull, g, w, inverse length of the rows, of the operands, loss, one
that is free, then the exact shortfalls of the four nearest."""

in_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
"""Whether torch.func is at work, which wants another kind of function; without an answer that one is taken."""


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
        and link.in_kernels
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
    assert tail.beta != "slope"
    offset, lowest, _ = cap(link)
    if torch.compiler.is_compiling():
        loss, work = torch.ops.weince.small(
            z_i, z_j, float(temperature), pack(tail, tail.beta), offset, lowest, mean
        )
    else:
        function = _Transformed if in_transform() else _Small
        loss, work = function.apply(z_i, z_j, float(temperature), tail, offset, lowest, mean)  # type: ignore[no-untyped-call]
    if not return_stats:
        return loss, None
    n, d = z_i.shape
    room = _layout(n, d, _parts(z_i.dtype))
    lines = work[room.state : room.state + 4 * room.padded].detach().view(4, room.padded)
    return loss, TailStats(*lines[:, : 2 * n])


class _Room(NamedTuple):
    """Where the parts of the buffer begin, in words of 32 bits, and how many rows have room in them."""

    padded: int
    unit: int
    x: int
    state: int
    near: int
    words: int

    def addresses(self, base: int) -> tuple[int, int, int, int]:
        """Of unit rows, operands, state and nearest columns."""
        return base + 4 * self.unit, base + 4 * self.x, base + 4 * self.state, base + 4 * self.near

    def tensors(self, work: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same as tensors."""
        x = work[self.x : self.state]
        return (
            work[self.unit : self.x],
            x if launch.INTERPRETED else x.view(torch.bfloat16),
            work[self.state : self.near],
            work[self.near :].view(torch.int32),
        )


def _layout(n: int, d: int, parts: int) -> _Room:
    padded = triton.cdiv(2 * n, launch.PAD) * launch.PAD
    operands = padded * parts * launch.operand_shape(d, parts)["DP"]
    sizes = (
        2 * n * d,
        operands if launch.INTERPRETED else operands // 2,
        LINES * padded,
        padded * (launch.EXACT + 2),
    )
    return _Room(padded, *accumulate((triton.cdiv(size, 32) * 32 for size in sizes), initial=0))


_room = functools.lru_cache(maxsize=64)(_layout)


def _parts(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bfloat16 else 2


class _Plan(NamedTuple):
    """The launches of a forward pass, and what they share."""

    room: _Room
    rows: Launch
    keys: Launch
    fit: Launch
    sum: Launch
    table: Tensor
    columns: int


@functools.lru_cache(maxsize=64)
def _plan(
    n: int,
    d: int,
    dtype: torch.dtype,
    strides: tuple[int, int],
    device: torch.device,
    temperature: float,
    config: TailConfig,
    offset: float,
    lowest: float,
    mean: bool,
) -> _Plan:
    parts = _parts(dtype)
    room, shape = _room(n, d, parts), launch.operand_shape(d, parts)
    wide = triton.next_power_of_2(shape["DP"])
    columns = max(64, triton.next_power_of_2(2 * n))
    size = config.tail_size(2 * n - 2)
    drop = max(1, int(size * config.drop)) if config.drop else 0
    fit_room = launch.fit_room(size, 2 * n)
    block = launch.blocks(2 * n, shape, "sum")
    programs = triton.cdiv(2 * n, block["BM"])
    exact = min(128, triton.next_power_of_2(d))
    lines = max(1, min(16, 2048 // wide))
    warps = {} if launch.INTERPRETED else {"num_warps": max(4, columns // 64), "num_stages": 2}
    common = {"EXACT": launch.EXACT, "FLAGS": launch.FLAGS}
    operands = {"DP": shape["DP"], "PARTS": parts}
    rank = round(config.rho0_quantile * (2 * n - 1))
    gate = (rank, config.rho0 or 0.0, config.kappa_rho, config.kappa_aic, config.margin)
    beta = 0.0 if isinstance(config.beta, str) else config.beta
    near = {"DE": exact, "NEAR": launch.NEAR, **common}
    return _Plan(
        room=room,
        rows=Launch(
            small.rows_kernel,
            room.padded // lines,
            (n, d, *strides, room.padded),
            {**operands, "WIDE": wide, "BR": lines, "GRID": launch.INTERPRETED, **common},
        ),
        keys=Launch(
            small.keys_kernel,
            programs,
            (n, room.padded),
            {
                "BM": block["BM"],
                "CP": columns,
                "BK": min(64 // parts // 2, shape["DB"]),
                **operands,
                **warps,
            },
        ),
        fit=Launch(
            fit.fit_kernel,
            triton.cdiv(2 * n, launch.FIT_ROWS),
            (0, 2 * n, 2 * n, size, drop, columns, d, d, d, config.eps),
            {
                "R": launch.FIT_ROWS,
                "KP": fit_room,
                "HAS_IDS": False,
                "ALL": True,
                **near,
                **network_of(fit_room),
                **launch.fit_options(),
            },
        ),
        sum=Launch(
            small.sum_kernel,
            programs,
            (n, d, room.padded, *gate, temperature, beta, offset, lowest, 1 / (2 * n) if mean else 1.0),
            {
                **block,
                **shape,
                "B": columns,
                "GIVEN": config.rho0 is not None,
                "FIT": config.beta == "fit",
                "GATE": launch.GATES[config.gate],
                **near,
            },
        ),
        table=launch.fit_table(size, drop, fit_room, device),
        columns=columns,
    )


@on_its_device
def _forward(
    z_i: Tensor, z_j: Tensor, temperature: float, config: TailConfig, offset: float, lowest: float, mean: bool
) -> tuple[Tensor, Tensor]:
    """Loss, and the buffer with all that its gradient needs."""
    z_i, z_j = _lines(z_i), _lines(z_j)
    n, d = z_i.shape
    strides = (z_i.stride(0), z_j.stride(0))
    plan = _plan(n, d, z_i.dtype, strides, z_i.device, temperature, config, offset, lowest, mean)
    work = torch.empty(plan.room.words, dtype=torch.float32, device=z_i.device)
    keys = torch.empty(2 * n * plan.columns, dtype=torch.int64, device=z_i.device)
    loss = torch.empty((), dtype=torch.float32, device=z_i.device)
    aligned = not (z_i.data_ptr() | z_j.data_ptr()) % ALIGNED
    ends: tuple[Place, ...]
    if plan.sum.again is not None and aligned:
        ends = tuple(place.data_ptr() for place in (z_i, z_j, keys, plan.table, loss))
        _launch(plan, plan.room.addresses(work.data_ptr()), ends, keep=True)
    else:
        ends = (z_i.detach(), z_j.detach(), keys.view(torch.int32), plan.table, loss)
        _launch(plan, plan.room.tensors(work), ends, keep=aligned)
    return loss, work


def _launch(plan: _Plan, parts: Sequence[Place], ends: Sequence[Place], *, keep: bool) -> None:
    """All kernels of the forward pass, with tensors or with addresses."""
    unit, x, state, near = parts
    z_i, z_j, keys, table, loss = ends
    P, flags = plan.room.padded, after(near, launch.EXACT * plan.room.padded)
    plan.rows((z_i, z_j, unit, x, state, near), keep=keep)
    plan.keys((x, state, keys), keep=keep)
    places = (
        keys, near, near, near, table, unit, unit, state, after(state, P), after(state, 2 * P), after(flags, P), near,
        after(state, 12 * P), flags,
    )  # fmt: skip
    plan.fit(places, keep=keep)
    plan.sum((unit, x, state, near, loss), keep=keep)


def _lines(rows: Tensor) -> Tensor:
    """With the numbers of a row one after the other."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


@functools.lru_cache(maxsize=64)
def _gradient_launch(
    n: int, d: int, dtype: torch.dtype, device: torch.device, offset: float, lowest: float, mean: bool
) -> Launch:
    shape = launch.operand_shape(d, _parts(dtype))
    block = launch.blocks(2 * n, shape, "gradient")
    return Launch(
        small.gradient_kernel,
        triton.cdiv(2 * n, block["BM"]),
        (n, d, _room(n, d, _parts(dtype)).padded, 1 / (2 * n) if mean else 1.0, offset, lowest),
        {**block, **shape, "EXACT": launch.EXACT, "FLAGS": launch.FLAGS},
    )


@on_its_device
def _backward(
    out: Tensor, work: Tensor, like: Tensor, offset: float, lowest: float, mean: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of both views, given that of the loss."""
    (n, d), dtype, device = like.shape, like.dtype, like.device
    room = _room(n, d, _parts(dtype))
    kernel = _gradient_launch(n, d, dtype, device, offset, lowest, mean)
    grad_i = torch.empty((n, d), dtype=dtype, device=device)
    grad_j = torch.empty((n, d), dtype=dtype, device=device)
    factor = out.data_ptr()
    aligned = not factor % ALIGNED
    if kernel.again is not None and aligned:
        kernel((*room.addresses(work.data_ptr()), factor, grad_i.data_ptr(), grad_j.data_ptr()), keep=True)
    else:
        kernel((*room.tensors(work), out.detach(), grad_i, grad_j), keep=aligned)
    return grad_i, grad_j


class _Small(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_i: Tensor, z_j: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        loss, work = _forward(z_i, z_j, *settings)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(work)
        ctx.save_for_backward(z_i, work)
        ctx.rest = settings[2:]
        return loss, work

    @staticmethod
    def backward(ctx: Any, out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if out is None:
            return (None,) * 7
        z_i, work = ctx.saved_tensors
        both = _backward(out, work, z_i, *ctx.rest)
        if torch.is_grad_enabled():
            both = (first_order(both[0], z_i), first_order(both[1], z_i))
        return *both, None, None, None, None, None


class _Transformed(torch.autograd.Function):
    """The same for torch.func, whose tensors only operators can open; it takes the host twice as long."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        first, second, *rest = _return(ctx, out)
        if first is None or second is None:
            return (None,) * 7
        z_i = ctx.saved_tensors[0]
        return first_order(first, z_i), first_order(second, z_i), *rest


def _small(
    z_i: Tensor,
    z_j: Tensor,
    temperature: float,
    config: typing.Sequence[float],
    offset: float,
    lowest: float,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    return _forward(z_i, z_j, temperature, unpack(config), offset, lowest, mean)


def _small_fake(
    z_i: Tensor,
    z_j: Tensor,
    temperature: float,
    config: typing.Sequence[float],
    offset: float,
    lowest: float,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    n, d = z_i.shape
    words = _room(n, d, _parts(z_i.dtype)).words
    return z_i.new_empty((), dtype=torch.float32), z_i.new_empty((words,), dtype=torch.float32)


def _small_gradient(
    out: Tensor, work: Tensor, z_i: Tensor, offset: float, lowest: float, mean: bool
) -> tuple[Tensor, Tensor]:
    return _backward(out, work, z_i, offset, lowest, mean)


def _small_gradient_fake(
    out: Tensor, work: Tensor, z_i: Tensor, offset: float, lowest: float, mean: bool
) -> tuple[Tensor, Tensor]:
    return z_i.new_empty(z_i.shape), z_i.new_empty(z_i.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[1])
    ctx.rest = inputs[4:]


def _return(ctx: Any, out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if out is None:
        return (None,) * 7
    z_i, work = ctx.saved_tensors
    return *torch.ops.weince.small_gradient(out, work, z_i, *ctx.rest), None, None, None, None, None


register("small_gradient", _small_gradient, _small_gradient_fake)
torch.library.register_autograd(register("small", _small, _small_fake), _return, setup_context=_save)
