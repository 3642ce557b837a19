"""The dense engine: the whole matrix of shortfalls. The reference, to be read beside Algorithm 1.

The gradient is written out, because autograd would keep a dozen matrices where one is enough. For anchor i
with logits ``l_ij`` the loss is ``-log softmax`` of the positive, so its derivative with respect to a logit is
the softmax weight, less 1 at the positive; times the slope of the link it is the derivative with respect to
the score. That matrix is called ``pull`` here: it is all that the backward pass needs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weince.candidates import Contest
from weince.engines.rows import EngineOutput, Rows, bind, joined, survey
from weince.links import Link
from weince.scores import first_order, no_autocast, product, shortfalls
from weince.tail import TailConfig
from weince.terms import Term

BLOCK = 1 << 18
"""Scores worked on at a time on the CPU, so that they stay in its cache. A GPU takes all at once."""


def dense(contest: Contest, terms: Sequence[Term], tail: TailConfig | None) -> EngineOutput:
    """Loss of every anchor of a contest: the weighted sum of the terms.

    Args:
        contest: Anchors, candidates and their roles.
        terms: What to sum.
        tail: How to take the tail statistics, where a link or the caller wants them.
    """
    anchors, candidates = contest.anchors, contest.candidates
    with torch.no_grad(), no_autocast(anchors.device):
        matrix = shortfalls(anchors, candidates)
        spans = _spans(matrix)
        blocks = [Rows(contest.rows(*span), matrix[slice(*span)]) for span in spans]
        found = survey(contest, blocks, lambda: blocks, terms, tail)
        links = bind(terms, found)
        losses, effects = [], []
        for index, (rows, span) in enumerate(zip(blocks, spans, strict=True)):
            bound = [link.rows(*span) for link in links]
            columns = found.looks[index].columns if found.looks else None
            loss, pull, effect = sum_terms(rows, terms, bound, columns)
            rows.shortfall.copy_(pull)  # these shortfalls have served; their memory now holds the pull
            losses.append(loss)
            effects.append(effect)
    loss = _Pulled.apply(torch.cat(losses), matrix, anchors, candidates)  # type: ignore[no-untyped-call]
    for index, link in enumerate(links):
        for name, parameter in learned(link).items():
            slope = torch.cat([effect[index][name] for effect in effects])
            loss = with_parameter(loss, slope, parameter)
    counted = joined([rows.counted for rows in blocks if rows.counted is not None])
    return EngineOutput(loss, counted, found.stats)


def _spans(matrix: Tensor) -> list[tuple[int, int]]:
    anchors, candidates = matrix.shape
    if matrix.device.type != "cpu" or torch.compiler.is_compiling():  # a compiled loop would be unrolled
        return [(0, anchors)]
    step = max(1, BLOCK // candidates)
    return [(start, min(start + step, anchors)) for start in range(0, anchors, step)]


def sum_terms(
    rows: Rows, terms: Sequence[Term], links: Sequence[Link], columns: Tensor | None
) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Loss ``(a,)``, pull ``(a, c)``, and for each link the derivatives ``(a,)`` of the losses by its parameters."""
    losses, pulls, effects = [], [], []
    for term, link in zip(terms, links, strict=True):
        rivals = columns[:, : term.hardest] if columns is not None and term.hardest else None
        loss, weight = rows.contrast(link, rivals)
        losses.append(term.weight * loss)
        effects.append(effects_of(link, rows.shortfall, term.weight * weight) if learned(link) else {})
        pulls.append(weight.mul_(link.slope(rows.shortfall)).mul_(term.weight))
    return sum_of(losses), sum_of(pulls), effects


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def learned(link: Link) -> dict[str, Tensor]:
    """Parameters of a link that want a gradient."""
    return {name: value for name, value in link.tensors().items() if value.requires_grad}


def effects_of(link: Link, shortfall: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Derivative of each anchor's loss by each learned parameter, given those by its logits."""
    spread = {name: value.detach().expand(len(shortfall)) for name, value in learned(link).items()}

    def weighted(parameters: "dict[str, Tensor]") -> Tensor:
        return (weight * link.with_tensors(parameters).logit(shortfall)).sum()

    effects: dict[str, Tensor] = torch.func.grad(weighted)(spread)
    return effects


class _Pulled(torch.autograd.Function):
    """Gives the losses their gradient: ``pull`` is the derivative of each with respect to its scores."""

    @staticmethod
    def forward(loss: Tensor, pull: Tensor, anchors: Tensor, candidates: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pull, anchors, candidates = ctx.saved_tensors
        grad = grad.unsqueeze(1)
        by_anchor = by_candidate = None
        with no_autocast(grad.device):
            if ctx.needs_input_grad[2]:
                by_anchor = first_order(product(pull, candidates) * grad, anchors)
            if ctx.needs_input_grad[3]:
                by_candidate = first_order(product(pull.T, anchors * grad), candidates)
        return None, None, by_anchor, by_candidate


def with_parameter(loss: Tensor, slope: Tensor, parameter: Tensor) -> Tensor:
    """The losses ``(a,)`` as they are, with the derivative ``slope`` ``(a,)`` by a link's parameter."""
    attached: Tensor = _WithParameter.apply(loss, slope, parameter)  # type: ignore[no-untyped-call]
    return attached


class _WithParameter(torch.autograd.Function):
    @staticmethod
    def forward(loss: Tensor, slope: Tensor, parameter: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        slope, parameter = ctx.saved_tensors
        by_parameter = (grad * slope).sum_to_size(parameter.shape).to(parameter.dtype)
        return grad, None, first_order(by_parameter, parameter)
