"""The dense engine: it holds the whole matrix of scores. It is the reference, to be read beside the formulas.

For every sum it keeps the matrix of derivatives with respect to the scores. The backward pass weights these matrices
by the upstream gradients of the sums, and multiplies the total with the candidates and with the anchors.

A single log-sum-exp of a straight line, ``log sum exp(g s + b)``, needs the matrix ``e = exp(g s - shift)`` alone:
with its row sums ``t`` the value is ``log t + shift + b``, and the derivative by the scores is ``(g / t) e``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold as cut_below

from weince.engines.base import learned_of, sum_slopes, to_parameter
from weince.engines.survey import Hardest, least_of, whole
from weince.engines.tile import PartSum, Tile, few_take_part
from weince.pairs import Problem, Rule
from weince.scores import first_order, in_transform, no_autocast, product, shortfalls
from weince.sums import Engine, Need, Part, Survey, rules_of

BLOCK = 1 << 19
"""Scores processed at a time on the CPU, so that they stay in its cache. A GPU processes all at once."""

STEEPEST = 20.0
"""Up to this scale ``exp(g (s - 1))`` of cosines is far from the smallest number: no row needs its largest logit."""


class Kept(NamedTuple):
    """The matrix of exact shortfalls, as the survey leaves it to the sums."""

    matrix: Tensor


def survey(problem: Problem, need: Need) -> Survey:
    """Find the tail statistics and thresholds of the negatives, with shortfalls that are exact near the cap."""
    matrix = scores_of(problem)
    collected = Hardest(problem, need.tail, need.hardest)
    exact = need.tail is not None or len(need.hardest) > 0 or need.smallest > 0 or need.again
    for start, stop in _spans(matrix):
        tile = Tile(problem.rows(start, stop), matrix[start:stop])
        collected.add(tile.problem, tile.sharpen() if exact else tile.hidden())
    smallest = None
    if need.smallest:
        hidden = problem.leave_out(matrix.clone(), problem.negatives, torch.inf, matrix)
        smallest = least_of(problem, hidden.flatten(), need.smallest)
    return collected.survey()._replace(smallest=smallest, state=Kept(matrix) if exact else None)


def evaluate(problem: Problem, survey: Survey, parts: Sequence[Part]) -> list[Tensor]:
    """The value ``(a,)`` of each part, with its gradient."""
    anchors, candidates = problem.anchors, problem.candidates
    if len(parts) == 1 and _is_straight(problem, parts[0]):
        value: Tensor = _StraightSum.apply(anchors, candidates, problem, parts[0])[0]  # type: ignore[no-untyped-call]
        return [value]
    learned = learned_of(parts) if torch.is_grad_enabled() else []
    wanted = torch.is_grad_enabled() and (
        anchors.requires_grad or candidates.requires_grad or len(learned) > 0
    )
    with torch.no_grad():
        partial = _summed(problem, survey, parts, slopes=wanted)
    if not wanted:
        return [part.value for part in partial]
    effects = [partial[k].effects[name] for k, name, _ in learned]
    sums = _KeptSums.apply(  # type: ignore[no-untyped-call]
        len(parts), [k for k, _, _ in learned], anchors, candidates, *(part.value for part in partial),
        *(part.slopes for part in partial), *(part.columns for part in partial), *effects,
        *(value for _, _, value in learned),
    )  # fmt: skip
    return list(sums)


ENGINE = Engine("dense", survey, evaluate)


def scores_of(problem: Problem, into: Tensor | None = None) -> Tensor:
    """``(a, c)`` shortfalls of all pairs; those of dot products may have any size and sign."""
    return shortfalls(problem.anchors, problem.candidates, into, capped=problem.score == "cosine")


def _summed(problem: Problem, survey: Survey, parts: Sequence[Part], *, slopes: bool) -> list[PartSum]:
    """All sums. Those that gather a few candidates come first, since they need no matrix of derivatives."""
    surveyed = isinstance(survey.state, Kept)
    matrix = survey.state.matrix if surveyed else scores_of(problem)
    tiles = [
        (start, stop, Tile(problem.rows(start, stop), matrix[start:stop])) for start, stop in _spans(matrix)
    ]
    if not surveyed and any(part.link.near_cap for part in parts):
        for *_, tile in tiles:
            tile.sharpen()
    every, partial = Tile(problem, matrix), {}
    rest = [k for k, part in enumerate(parts) if not few_take_part(part, matrix)]
    for k, part in enumerate(parts):
        if k not in rest:
            partial[k] = every.sum(part, _threshold(survey, part), slopes=slopes)
    for k in rest:
        # The derivatives of the last sum overwrite shortfalls that nobody else has seen.
        into = None
        if slopes:
            into = matrix if k == rest[-1] and not surveyed else torch.empty_like(matrix)
        partial[k] = _tiled(tiles, parts[k], _threshold(survey, parts[k]), into)
    return [partial[k] for k in range(len(parts))]


def _threshold(survey: Survey, part: Part) -> Tensor | None:
    return None if part.hardest is None else survey.thresholds[part.hardest]


def _tiled(
    tiles: Sequence[tuple[int, int, Tile]], part: Part, threshold: Tensor | None, into: Tensor | None
) -> PartSum:
    """One sum of all anchors, tile by tile; its derivatives are written to ``into``, if given."""
    values: list[Tensor] = []
    effects: list[dict[str, Tensor]] = []
    for start, stop, tile in tiles:
        limit = None if threshold is None else threshold[start:stop]
        partial = tile.sum(part.rows(start, stop), limit, slopes=into is not None)
        values.append(partial.value)
        effects.append(partial.effects)
        if into is not None and partial.slopes is not None:
            into[start:stop] = partial.slopes
    joined = {name: whole([each[name] for each in effects]) for name in effects[0]}
    return PartSum(whole(values), into, joined)


def _spans(matrix: Tensor) -> list[tuple[int, int]]:
    # Ints and not slices: a compiled graph would take the bounds of a slice as constants.
    anchors, candidates = matrix.shape
    if matrix.device.type != "cpu" or torch.compiler.is_compiling():  # a compiled loop would be unrolled
        return [(0, anchors)]
    step = max(1, BLOCK // candidates)
    return [(start, min(start + step, anchors)) for start in range(0, anchors, step)]


class _KeptSums(torch.autograd.Function):
    """Computes the gradient of sums from the derivatives that were kept.

    Order of the tensors: anchors, candidates, then the values, derivatives and columns of every sum, then for every
    learned parameter its effect on the sum whose index is in ``owners``, then the parameters.
    """

    @staticmethod
    def forward(count: int, owners: list[int], *tensors: Any) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in tensors[2 : 2 + count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.count, ctx.owners, anchors, candidates, *rest = inputs
        ctx.save_for_backward(anchors, candidates, *rest[ctx.count :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count, owners = ctx.count, ctx.owners
        anchors, candidates, *rest = ctx.saved_tensors
        slopes, columns, rest = rest[:count], rest[count : 2 * count], rest[2 * count :]
        effects, parameters = rest[: len(owners)], rest[len(owners) :]
        by_anchor = by_candidate = None
        with no_autocast(anchors.device):
            pull, weight = slopes[0], grads[0].unsqueeze(1)
            if count > 1 or columns[0] is not None:
                pull = sum_slopes(slopes, columns, grads, len(candidates))
                weight = torch.ones_like(weight)
            if ctx.needs_input_grad[2]:
                by_anchor = first_order(product(pull, candidates) * weight, anchors)
            if ctx.needs_input_grad[3]:
                by_candidate = first_order(product(pull.T, anchors * weight), candidates)
        by_parameter = [
            first_order(to_parameter(grads[owner] * effect, parameter), parameter)
            for owner, effect, parameter in zip(owners, effects, parameters, strict=True)
        ]
        nothing = (None,) * (3 * count + len(owners))
        return None, None, by_anchor, by_candidate, *nothing, *by_parameter


def _is_straight(problem: Problem, part: Part) -> bool:
    """Whether a sum needs no shortfalls: a log-sum-exp of a straight line, over pairs that columns alone tell."""
    return (
        part.link.straight is not None
        and part.kind == "lse"
        and part.hardest is None
        and problem.anchors.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not in_transform()
        and "limit" not in problem.of_anchor
        and len(problem.candidates) > 0
    )


class _StraightSum(torch.autograd.Function):
    """``log sum exp(g s + b)`` over the candidates for which the rules hold, ``(a,)``."""

    @staticmethod
    def forward(
        anchors: Tensor, candidates: Tensor, problem: Problem, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert part.link.straight is not None
        scale, bias = part.link.straight
        rules = problem.negatives if part.among == "negatives" else rules_of(problem, part)
        offset = problem.of_candidate.get("offset")
        bounded = offset is None and abs(scale) <= STEEPEST and problem.score == "cosine"
        start = (
            anchors.new_tensor(-abs(scale))
            if bounded
            else anchors.new_zeros(())
            if offset is None
            else offset
        )
        odds = torch.addmm(start, anchors, candidates.T, alpha=scale)
        shift = abs(scale) if bounded else None
        if odds.numel() <= BLOCK:
            value, total = _normalised(odds, problem, rules, shift)
        else:
            spans = [(problem.rows(begin, end), odds[begin:end]) for begin, end in _spans(odds)]
            pairs = [_normalised(tile, rows, rules, shift) for rows, tile in spans]
            value, total = (torch.cat(column) for column in zip(*pairs, strict=True))
        return value + bias if bias else value, odds, (scale / total).unsqueeze(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, odds, weight = output
        ctx.mark_non_differentiable(odds, weight)
        ctx.save_for_backward(inputs[0], inputs[1], odds, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        anchors, candidates, odds, weight = ctx.saved_tensors
        weight = weight * grad.unsqueeze(1)
        by_anchor = by_candidate = None
        with no_autocast(anchors.device):
            if ctx.needs_input_grad[0]:
                by_anchor = first_order((odds @ candidates) * weight, anchors)
            if ctx.needs_input_grad[1]:
                by_candidate = first_order(odds.T @ (anchors * weight), candidates)
        return by_anchor, by_candidate, None, None


def _normalised(
    odds: Tensor, problem: Problem, rules: tuple[Rule, ...], shift: float | None
) -> tuple[Tensor, Tensor]:
    """Turn logits into ``exp(logit - shift)``, in place; returns the log-sum-exp and the row sums, at least tiny.

    Args:
        odds: ``(a, c)`` logits minus ``shift``; logits if that is None.
        problem: Problem of these anchors.
        rules: Which pairs take part.
        shift: What was subtracted, a bound of the logits; None: subtract the largest of each row.
    """
    smallest = torch.finfo(odds.dtype).tiny
    if shift is not None:
        odds.exp_()
    absent = -torch.inf if shift is None else 0.0
    for rule in rules:
        if rule.row is None:
            problem.leave_out(odds, (rule,), absent)
        else:
            odds.scatter_(1, problem.of_anchor[rule.row].unsqueeze(1), absent)
    if shift is not None:
        total = odds.sum(1)
        return total.log() + shift, total.clamp_min_(smallest)
    largest = odds.amax(1, keepdim=True).clamp_min(
        torch.finfo(odds.dtype).min
    )  # finite if no pair takes part
    # Drop weights that add nothing to the sum: subnormal numbers would make the products much slower.
    odds = cut_below(odds.sub_(largest).exp_(), torch.finfo(odds.dtype).eps ** 3, 0, inplace=True)
    total = odds.sum(1)
    return largest.squeeze(1) + total.log(), total.clamp_min_(smallest)
