"""The kernels as operators of torch, so that autograd and torch.compile know them.

``weince::fused`` computes the losses and what their gradient needs, ``weince::fused_gradient`` the gradient. The
tail's configuration travels as a list of numbers, since an operator takes no objects.
"""

import functools
import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from weince.engines.kernels import launch
from weince.engines.kernels.launch import Cap, Operand, Roles
from weince.tail import TailConfig


def pack(config: TailConfig | None, beta: Literal["fit"] | float) -> list[float]:
    """A tail configuration with another ``beta``, as numbers; none of them without one."""
    if config is None:
        return []
    return [
        float(config.k),
        float(isinstance(config.k, int)),
        config.k_min,
        config.k_max,
        math.nan if config.rho0 is None else config.rho0,
        config.rho0_quantile,
        config.margin,
        config.kappa_rho,
        config.kappa_aic,
        config.eps,
        math.nan if beta == "fit" else beta,
        launch.GATES[config.gate],
        config.drop,
    ]


def unpack(numbers: Sequence[float]) -> TailConfig:
    """The configuration that :func:`pack` packed."""
    k, whole, k_min, k_max, rho0, quantile, margin, kappa_rho, kappa_aic, eps, beta, gate, drop = numbers
    config = TailConfig(
        k=int(k) if whole else k,
        k_min=int(k_min),
        k_max=int(k_max),
        rho0=None if math.isnan(rho0) else rho0,
        rho0_quantile=quantile,
        margin=margin,
        kappa_rho=kappa_rho,
        kappa_aic=kappa_aic,
        eps=eps,
        gate=list(launch.GATES)[int(gate)],  # type: ignore[arg-type]
        drop=drop,
    )
    return config if math.isnan(beta) else replace(config, beta=beta)


def _roles(
    positive: Tensor, itself: Tensor | None, anchor_ids: Tensor | None, candidate_ids: Tensor | None
) -> Roles:
    flags = {"HAS_SELF": itself is not None, "HAS_IDS": anchor_ids is not None}
    return Roles(
        positive,
        positive if itself is None else itself,
        positive if anchor_ids is None else anchor_ids,
        positive if candidate_ids is None else candidate_ids,
        flags,
    )


def fused(
    anchors: Tensor,
    candidates: Tensor,
    raw_anchors: Tensor | None,
    raw_candidates: Tensor | None,
    positive: Tensor,
    itself: Tensor | None,
    anchor_ids: Tensor | None,
    candidate_ids: Tensor | None,
    g: Tensor | None,
    w: Tensor | None,
    learned: Tensor | None,
    temperature: float,
    config: typing.Sequence[float],  # torch 2.6 does not know that of collections.abc
    offset: float,
    lowest: float,
    soft: bool,
    learn: bool,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Losses, and what the gradient needs.

    Args:
        anchors: ``(a, d)`` unit rows in float32.
        candidates: ``(c, d)`` unit rows in float32.
        raw_anchors: The anchors as they came, in bfloat16.
        raw_candidates: The candidates as they came, in bfloat16.
        positive: ``(a,)`` column of each anchor's positive.
        itself: ``(a,)`` column of each anchor.
        anchor_ids: ``(a,)`` int64.
        candidate_ids: ``(c,)`` int64.
        g: ``(a,)`` factors of the score; None where the tail decides.
        w: ``(a,)`` factors of minus the logarithm; None where there is none or the tail decides.
        learned: The temperature, where it is a tensor and the tail decides.
        temperature: The temperature otherwise.
        config: A packed tail configuration, or nothing.
        offset: Added inside the logarithm.
        lowest: Smallest shortfall inside the logarithm.
        soft: Whether there is no logarithm.
        learn: Whether the derivatives by the coefficients are wanted.
        symmetric: Whether candidates and anchors are the same rows.

    Returns:
        ``loss`` ``(a,)``; ``stats`` ``(4, a)``: rho, beta, daic, lam; ``state`` ``(6, a)``: base, pull, derivatives
        by g and by w, g, w; operands and inverse lengths of anchors, of candidates; nearest columns, their
        shortfalls, flags.
    """
    count, device = len(anchors), anchors.device
    x = launch.operand(anchors if raw_anchors is None else raw_anchors)
    y = x if symmetric else launch.operand(candidates if raw_candidates is None else raw_candidates)
    roles = _roles(positive, itself, anchor_ids, candidate_ids)
    loss = torch.empty(count, dtype=torch.float32, device=device)
    stats = torch.empty((4 if config else 0, count), dtype=torch.float32, device=device)
    state = torch.empty((6, count), dtype=torch.float32, device=device)
    near_cols = torch.empty((count if config else 0, launch.EXACT), dtype=torch.int32, device=device)
    near_d = torch.empty((count if config else 0, launch.EXACT), dtype=torch.float32, device=device)
    close = torch.zeros(count // launch.FLAGS + 2 if config else 0, dtype=torch.int32, device=device)
    if config:
        settings = unpack(config)
        most = len(candidates) - 1 - (itself is not None)
        tail_size = settings.tail_size(most)
        made, negatives = launch.hardest(
            anchors, candidates, x, y, roles, tail_size, settings, stats, near_cols, near_d, close
        )
        launch.gated(stats, made, negatives, settings, temperature, learned, state)
    near = (near_cols, near_d, close) if config else None
    g_now, w_now = (state[4] if g is None else g), (state[5] if w is None else w)
    launch.summed(
        anchors, candidates, x, y, roles, g_now, w_now, near, Cap(offset, lowest, soft), learn, loss, state
    )
    empty = (x.rows.new_empty((0,)), x.inverse.new_empty((0,)))
    other = empty if symmetric else (y.rows, y.inverse)
    return loss, stats, state, x.rows, x.inverse, *other, near_cols, near_d, close


def _fused_fake(
    anchors: Tensor,
    candidates: Tensor,
    raw_anchors: Tensor | None,
    raw_candidates: Tensor | None,
    positive: Tensor,
    itself: Tensor | None,
    anchor_ids: Tensor | None,
    candidate_ids: Tensor | None,
    g: Tensor | None,
    w: Tensor | None,
    learned: Tensor | None,
    temperature: float,
    config: typing.Sequence[float],
    offset: float,
    lowest: float,
    soft: bool,
    learn: bool,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    count = anchors.shape[0]
    kept = count if config else 0
    x, inverse = launch.operand_like(anchors if raw_anchors is None else raw_anchors)
    if symmetric:
        y, other = x.new_empty((0,)), inverse.new_empty((0,))
    else:
        y, other = launch.operand_like(candidates if raw_candidates is None else raw_candidates)
    return (
        anchors.new_empty((count,)),
        anchors.new_empty((4 if config else 0, count)),
        anchors.new_empty((6, count)),
        x,
        inverse,
        y,
        other,
        anchors.new_empty((kept, launch.EXACT), dtype=torch.int32),
        anchors.new_empty((kept, launch.EXACT)),
        anchors.new_empty((count // launch.FLAGS + 2 if config else 0,), dtype=torch.int32),
    )


def fused_gradient(
    out: Tensor,
    x: Tensor,
    x_inverse: Tensor,
    y: Tensor,
    y_inverse: Tensor,
    positive: Tensor,
    itself: Tensor | None,
    anchor_ids: Tensor | None,
    candidate_ids: Tensor | None,
    g: Tensor | None,
    w: Tensor | None,
    state: Tensor,
    near_cols: Tensor,
    near_d: Tensor,
    close: Tensor,
    offset: float,
    lowest: float,
    soft: bool,
    symmetric: bool,
    d: int,
    count: int,
    parts: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of the anchors ``(a, d)`` and the candidates ``(c, d)``; all in the first if they are the same."""
    anchors = len(out)
    roles = _roles(positive, itself, anchor_ids, candidate_ids)
    shape = launch.operand_shape(d, parts)
    ours = Operand(x, x_inverse, shape)
    theirs = ours if symmetric else Operand(y, y_inverse, shape)
    near = (near_cols, near_d, close) if len(near_d) else None
    out = out if out.stride(0) == 0 else out.contiguous()
    link = (state[4] if g is None else g, state[5] if w is None else w, state[0], state[1], out)
    cap = Cap(offset, lowest, soft)
    grad_anchors = launch.gradient(
        ours, theirs, roles, link, near, cap, (anchors, count, d), from_rows=True, from_cols=symmetric
    )
    if symmetric:
        return grad_anchors, grad_anchors.new_empty((0, d))
    grad_candidates = launch.gradient(
        theirs, ours, roles, link, near, cap, (count, anchors, d), from_rows=False, from_cols=True
    )
    return grad_anchors, grad_candidates


def _gradient_fake(
    out: Tensor,
    x: Tensor,
    x_inverse: Tensor,
    y: Tensor,
    y_inverse: Tensor,
    positive: Tensor,
    itself: Tensor | None,
    anchor_ids: Tensor | None,
    candidate_ids: Tensor | None,
    g: Tensor | None,
    w: Tensor | None,
    state: Tensor,
    near_cols: Tensor,
    near_d: Tensor,
    close: Tensor,
    offset: float,
    lowest: float,
    soft: bool,
    symmetric: bool,
    d: int,
    count: int,
    parts: int,
) -> tuple[Tensor, Tensor]:
    return out.new_empty((out.shape[0], d)), out.new_empty((0 if symmetric else count, d))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    anchors, candidates, raw, _, positive, itself, anchor_ids, candidate_ids, g, w = inputs[:10]
    _, _, state, x, x_inverse, y, y_inverse, near_cols, near_d, close = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        x,
        x_inverse,
        y,
        y_inverse,
        positive,
        itself,
        anchor_ids,
        candidate_ids,
        g,
        w,
        state,
        near_cols,
        near_d,
        close,
    )
    ctx.link = inputs[13:16]
    ctx.symmetric = inputs[17]
    ctx.sizes = anchors.shape[1], candidates.shape[0], 2 if raw is None else 1


def _backward(ctx: Any, out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 16
    if out is None:
        return None, None, *nothing
    ours, theirs = torch.ops.weince.fused_gradient(
        out, *ctx.saved_tensors, *ctx.link, ctx.symmetric, *ctx.sizes
    )
    return ours, None if ctx.symmetric else theirs, *nothing


Function = TypeVar("Function", bound=Callable[..., Any])


def on_its_device(function: Function) -> Function:
    """Run a function of tensors with the device of the first as the current one, on which Triton launches."""

    @functools.wraps(function)
    def moved(first: Tensor, *rest: Any) -> Any:
        if not first.is_cuda:
            return function(first, *rest)
        with torch.cuda.device(first.device):
            return function(first, *rest)

    return moved  # type: ignore[return-value]


def register(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Make a function an operator. (``custom_op`` would do it too, and add a millisecond of checks to every call.)"""
    name = f"weince::{name}"
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, ("cuda", "cpu"), on_its_device(function))
    torch.library.register_fake(name, fake)
    return name


register("fused_gradient", fused_gradient, _gradient_fake)
torch.library.register_autograd(register("fused", fused, _fused_fake), _backward, setup_context=_save)
