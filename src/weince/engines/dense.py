"""The dense engine: it holds the whole matrix of shortfalls. It is the reference, to be read beside the formulas.

For every sum it keeps the matrix of derivatives with respect to the scores. The backward pass weights these matrices
by the upstream gradients of the sums, and multiplies the total with the candidates and with the anchors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weince.engines.base import Engine, learned_of, sum_slopes, to_parameter
from weince.engines.smallest import least
from weince.engines.survey import Hardest, whole
from weince.engines.tile import Part, PartSum, Tile, few_take_part
from weince.scores import first_order, no_autocast, product, shortfalls
from weince.tail import TailConfig

BLOCK = 1 << 19
"""Scores processed at a time on the CPU, so that they stay in its cache. A GPU processes all at once."""


class Dense(Engine):
    name = "dense"

    def survey(self) -> None:
        problem = self.problem
        self.matrix = shortfalls(problem.anchors, problem.candidates)
        # Ints and not slices: a compiled graph would take the bounds of a slice as constants.
        self.tiles = [
            (start, stop, Tile(problem.rows(start, stop), self.matrix[start:stop]))
            for start, stop in _spans(self.matrix)
        ]
        self.sharp = False
        self.spent = False  # True once the matrix holds derivatives
        self.thresholds: dict[int, Tensor] = {}
        if self.need.tail is not None:
            self.sharp = True
            self.surveyed = self._find(self.need.tail, self.need.hardest, Tile.sharpen).stats()

    def _find(
        self,
        tail: TailConfig | None,
        numbers: tuple[int, ...],
        hidden: Callable[[Tile], Tensor] = Tile.hidden,
    ) -> Hardest:
        """Find the tail statistics and the thresholds of these numbers of hardest negatives."""
        found = Hardest(self.problem, tail, numbers)
        for *_, tile in self.tiles:
            found.add(tile.problem, hidden(tile))
        self.thresholds.update(found.thresholds())
        return found

    def count_negatives(self) -> Tensor:
        # Not from the shortfalls, whose place derivatives may have taken: those can be infinite.
        return whole(
            [tile.problem.mask(tile.problem.negatives, tile.shortfall).sum(1) for *_, tile in self.tiles]
        )

    def smallest(self, count: int) -> Tensor:
        self._check_unspent()
        with torch.no_grad():
            self._sharpen()
            hidden = self.problem.leave_out(self.matrix.clone(), self.problem.negatives, torch.inf)
            here = least(hidden.flatten(), count)
        return here if self.problem.ranks is None else self.problem.ranks.smallest(here, count)

    def _check_unspent(self) -> None:
        if self.spent:
            raise RuntimeError(
                "a dense engine sums with gradients once, since the derivatives take the place of its scores; "
                "got a second call; wanted all sums in the first one, or a new engine"
            )

    def evaluate(self, parts: Sequence[Part]) -> list[Tensor]:
        self._check_unspent()
        anchors, candidates = self.problem.anchors, self.problem.candidates
        learned = learned_of(parts) if torch.is_grad_enabled() else []
        # len, not bool: torch 2.6 does not compile the latter.
        wanted = any(x.requires_grad for x in (anchors, candidates)) or len(learned) > 0
        wanted = wanted and torch.is_grad_enabled()
        with torch.no_grad(), no_autocast(anchors.device):
            self._prepare(parts)
            found = self._summed(parts, slopes=wanted)
        if not wanted:
            return [one.value for one in found]
        effects = [found[k].effects[name] for k, name, _ in learned]
        sums = _Kept.apply(  # type: ignore[no-untyped-call]
            len(parts), [k for k, _, _ in learned], anchors, candidates, *(one.value for one in found),
            *(one.slopes for one in found), *(one.columns for one in found), *effects,
            *(value for _, _, value in learned),
        )  # fmt: skip
        return list(sums)

    def _summed(self, parts: Sequence[Part], *, slopes: bool) -> list[PartSum]:
        """All sums. Those that gather a few candidates come first, since they need no matrix of derivatives."""
        every, found = Tile(self.problem, self.matrix), {}
        rest = [k for k, part in enumerate(parts) if not few_take_part(part, self.matrix)]
        for k, part in enumerate(parts):
            if k not in rest:
                found[k] = every.sum(part, self._threshold(part), slopes=slopes)
        for k in rest:
            # The derivatives of the last sum overwrite the shortfalls, which nothing reads after it.
            self.spent = slopes and k == rest[-1]
            into = self.matrix if self.spent else torch.empty_like(self.matrix)
            found[k] = self._tiled(parts[k], into if slopes else None)
        return [found[k] for k in range(len(parts))]

    def _tiled(self, part: Part, into: Tensor | None) -> PartSum:
        """One sum of all anchors, tile by tile; its derivatives are written to ``into``, if given."""
        values: list[Tensor] = []
        effects: list[dict[str, Tensor]] = []
        for start, stop, tile in self.tiles:
            threshold = self._threshold(part)
            own = None if threshold is None else threshold[start:stop]
            one = tile.sum(part.rows(start, stop), own, slopes=into is not None)
            values.append(one.value)
            effects.append(one.effects)
            if into is not None and one.slopes is not None:
                into[start:stop] = one.slopes
        joined = {name: whole([own[name] for own in effects]) for name in effects[0]}
        return PartSum(whole(values), into, joined)

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

    def _threshold(self, part: Part) -> Tensor | None:
        return None if part.hardest is None else self.thresholds[part.hardest]


def _spans(matrix: Tensor) -> list[tuple[int, int]]:
    anchors, candidates = matrix.shape
    if matrix.device.type != "cpu" or torch.compiler.is_compiling():  # a compiled loop would be unrolled
        return [(0, anchors)]
    step = max(1, BLOCK // candidates)
    return [(start, min(start + step, anchors)) for start in range(0, anchors, step)]


class _Kept(torch.autograd.Function):
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
