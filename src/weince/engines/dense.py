"""The dense engine: the whole matrix of shortfalls. The reference, to be read beside the formulas.

For every sum it keeps the matrix of its derivatives by the scores; the backward pass weighs them by what autograd
says each sum of an anchor is worth, and multiplies the result with the candidates and with the anchors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weince.engines.base import Engine, learned_of, sum_slopes, to_parameter
from weince.engines.smallest import least
from weince.engines.survey import Hardest, whole
from weince.engines.tile import Part, Tile
from weince.scores import first_order, no_autocast, product, shortfalls
from weince.tail import TailConfig

BLOCK = 1 << 18
"""Scores worked on at a time on the CPU, so that they stay in its cache. A GPU takes all at once."""


class Dense(Engine):
    name = "dense"

    def survey(self) -> None:
        contest = self.contest
        self.matrix = shortfalls(contest.anchors, contest.candidates)
        # Numbers, since a compiled graph would fix what a slice holds.
        self.tiles = [
            (start, stop, Tile(contest.rows(start, stop), self.matrix[start:stop]))
            for start, stop in _spans(self.matrix)
        ]
        self.sharp = False
        self.thresholds: dict[int, Tensor] = {}
        if self.need.tail is not None:
            self.sharp = True
            self.stats = self._find(self.need.tail, self.need.hardest, Tile.sharpen).stats()

    def _find(
        self,
        tail: TailConfig | None,
        numbers: tuple[int, ...],
        hidden: Callable[[Tile], Tensor] = Tile.hidden,
    ) -> Hardest:
        """The statistics and the thresholds that are asked for."""
        found = Hardest(self.contest, tail, numbers)
        for *_, tile in self.tiles:
            found.add(tile.contest, hidden(tile))
        self.thresholds.update(found.thresholds())
        return found

    def negatives(self) -> Tensor:
        if self.contest.uniform:
            return torch.full((1,), self.contest.most_negatives, device=self.matrix.device)
        return whole([tile.contest.count_negatives(tile.hidden()) for *_, tile in self.tiles])

    def smallest(self, count: int) -> Tensor:
        self._sharpen()
        hidden = self.contest.hide(self.matrix.clone(), torch.inf)
        here = least(hidden.flatten(), count)
        return here if self.contest.ranks is None else self.contest.ranks.smallest(here, count)

    def evaluate(self, parts: Sequence[Part]) -> list[Tensor]:
        anchors, candidates = self.contest.anchors, self.contest.candidates
        learned = learned_of(parts) if torch.is_grad_enabled() else []
        wanted = any(x.requires_grad for x in (anchors, candidates)) or bool(learned)
        wanted = wanted and torch.is_grad_enabled()
        with torch.no_grad(), no_autocast(anchors.device):
            self._prepare(parts)
            values: list[list[Tensor]] = [[] for _ in parts]
            effects: list[list[Tensor]] = [[] for _ in learned]
            # The derivatives of the first sum go where the shortfalls were, which nobody reads after them.
            slopes = [self.matrix, *(torch.empty_like(self.matrix) for _ in parts[1:])] if wanted else []
            for start, stop, tile in self.tiles:
                found = [
                    tile.sum(part.rows(start, stop), self._threshold(part, start, stop), slopes=wanted)
                    for part in parts
                ]
                for k, one in enumerate(found):
                    values[k].append(one.value)
                    if one.slopes is not None:
                        slopes[k][start:stop] = one.slopes
                for into, (k, name, _) in zip(effects, learned, strict=True):
                    into.append(found[k].effects[name])
        if not wanted:
            return [whole(value) for value in values]
        owners = [k for k, _, _ in learned]
        sums = _Kept.apply(  # type: ignore[no-untyped-call]
            len(parts), owners, anchors, candidates, *map(whole, values), *slopes, *map(whole, effects),
            *(value for _, _, value in learned),
        )  # fmt: skip
        return list(sums)

    def _prepare(self, parts: Sequence[Part]) -> None:
        if any(part.link.near_cap for part in parts):
            self._sharpen()
        numbers = tuple({part.hardest for part in parts if part.hardest is not None} - set(self.thresholds))
        if numbers:
            self._find(None, numbers)

    def _sharpen(self) -> None:
        """Make the smallest shortfalls exact, once."""
        if not self.sharp:
            self.sharp = True
            for *_, tile in self.tiles:
                tile.sharpen()

    def _threshold(self, part: Part, start: int, stop: int) -> Tensor | None:
        return None if part.hardest is None else self.thresholds[part.hardest][start:stop]


def _spans(matrix: Tensor) -> list[tuple[int, int]]:
    anchors, candidates = matrix.shape
    if matrix.device.type != "cpu" or torch.compiler.is_compiling():  # a compiled loop would be unrolled
        return [(0, anchors)]
    step = max(1, BLOCK // candidates)
    return [(start, min(start + step, anchors)) for start in range(0, anchors, step)]


class _Kept(torch.autograd.Function):
    """Gives sums their gradient from the derivatives that were kept.

    Tensors come as: anchors, candidates, then values and derivatives of every sum, then for every learned parameter
    its effects on the sum that ``owners`` names, then the parameters.
    """

    @staticmethod
    def forward(count: int, owners: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in tensors[2 : 2 + count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.count, ctx.owners, anchors, candidates, *rest = inputs
        ctx.save_for_backward(anchors, candidates, *rest[ctx.count :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count, owners = ctx.count, ctx.owners
        anchors, candidates, *rest = ctx.saved_tensors
        slopes, effects = rest[:count], rest[count : count + len(owners)]
        parameters = rest[count + len(owners) :]
        by_anchor = by_candidate = None
        with no_autocast(anchors.device):
            pull, weight = slopes[0], grads[0].unsqueeze(1)
            if count > 1:
                pull, weight = sum_slopes([slopes[0].clone(), *slopes[1:]], grads), torch.ones_like(weight)
            if ctx.needs_input_grad[2]:
                by_anchor = first_order(product(pull, candidates) * weight, anchors)
            if ctx.needs_input_grad[3]:
                by_candidate = first_order(product(pull.T, anchors * weight), candidates)
        by_parameter = [
            first_order(to_parameter(grads[owner] * effect, parameter), parameter)
            for owner, effect, parameter in zip(owners, effects, parameters, strict=True)
        ]
        nothing = (None,) * (2 * count + len(owners))
        return None, None, by_anchor, by_candidate, *nothing, *by_parameter
