"""The chunked engine: exact for every link and layout, with memory linear in the batch, on any device.

It computes the matrix of shortfalls one band of rows at a time and discards each band after use. It sweeps the matrix
once to survey the negatives (if the loss asks for that), once for the sums, and once more in the backward pass, when
the upstream gradients are known.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince.engines.base import learned_of, sum_slopes, to_parameter
from weince.engines.dense import BLOCK
from weince.engines.smallest import least
from weince.engines.survey import Hardest, least_of
from weince.engines.tile import NEAR, PartSum, Tile
from weince.links import FunctionLink, Link
from weince.pairs import Problem
from weince.scores import first_order, free_to_look, no_autocast, product, shortfalls
from weince.sums import NOTHING_KNOWN, Engine, Need, Part, Survey

CPU_BAND = 1 << 22
"""Scores held at a time on the CPU: enough rows for efficient matrix products."""

GPU_BAND = 1 << 25


class Near(NamedTuple):
    """Each anchor's candidates near the cap: columns ``(anchors, m)``, -1 for none, and exact shortfalls."""

    columns: Tensor
    shortfalls: Tensor


class Band(NamedTuple):
    """Some rows of the matrix, processed in tiles that stay in the cache."""

    problem: Problem
    start: int
    step: int
    matrix: Tensor

    def rows(self) -> slice:
        """Slice of the band's anchors. (Torch cannot compile a property of a named tuple made in a graph.)"""
        return slice(self.start, self.start + len(self.matrix))

    def tiles(self, *, sharp: bool, near: Near | None = None) -> Iterator[tuple[slice, Tile]]:
        """The tiles and their slices. ``sharp``: make shortfalls near the cap exact, from ``near`` if given."""
        for start in range(0, len(self.matrix), self.step):
            part = self.matrix[start : start + self.step]
            rows = slice(self.start + start, self.start + start + len(part))
            tile = Tile(self.problem.rows(rows.start, rows.stop), part)
            if sharp and near is not None:
                tile.put(near.columns[rows], near.shortfalls[rows])
            elif sharp:
                tile.sharpen()
            yield rows, tile


def bands(problem: Problem) -> Iterator[Band]:
    """The matrix, band by band. In eager mode on the CPU, each band overwrites the previous one."""
    anchors, width = len(problem.anchors), len(problem.candidates)
    on_cpu = problem.anchors.device.type == "cpu"
    # A compiled graph needs no tiles: it would unroll their loop, and it fuses the operations anyway.
    eager = on_cpu and not torch.compiler.is_compiling()
    step = max(1, BLOCK // width) if eager else anchors
    band = max(1, (CPU_BAND if on_cpu else GPU_BAND) // width)
    band = band - band % step if band >= step else band
    # One buffer for all bands: small tensors that outlive a band would keep its memory from being reused.
    buffer = problem.anchors.new_empty(min(band, anchors), width) if eager else None
    for start in range(0, anchors, band):
        rows = problem.anchors[start : start + band]
        matrix = shortfalls(
            rows,
            problem.candidates,
            None if buffer is None else buffer[: len(rows)],
            capped=problem.score == "cosine",
        )
        yield Band(problem, start, min(step, band), matrix)


class Visit(NamedTuple):
    """The anchors against some of the candidates, and the rank that owns those."""

    problem: Problem
    owner: int = 0


class Swept(NamedTuple):
    """What a survey knows for later sweeps: whether shortfalls near the cap are to be exact, and which are near."""

    exact: bool
    near: Near | None


class Route(NamedTuple):
    """How the candidates come by.

    ``visits``: the blocks of candidates in turn. ``passed``: gets the gradient of a block's candidates and its owner,
    and returns the tensor in which to sum that of the next block. ``collect``: finds each anchor's hardest negatives.
    """

    visits: Callable[[Problem], Iterator[Visit]]
    passed: Callable[[Problem, Tensor, int], Tensor]
    collect: Callable[[Problem, Need, bool], Hardest]


def survey_along(route: Route, problem: Problem, need: Need) -> Survey:
    """Sweep the matrix for tail statistics, thresholds and the smallest shortfalls."""
    exact = need.tail is not None or len(need.hardest) > 0
    near = None
    known = NOTHING_KNOWN
    if exact or need.counts:
        collected = route.collect(problem, need, exact)
        near = _none_near(problem, collected.nearest()) if need.tail is not None else None
        known = collected.survey()
    smallest = None
    if need.smallest:
        least = Least(problem.anchors, need.smallest)
        for visit in route.visits(problem):
            for band in bands(visit.problem):
                for _, tile in band.tiles(sharp=True, near=near):
                    least.add(tile.hidden().flatten())
        smallest = least_of(problem, least.sorted(), need.smallest)
    return known._replace(smallest=smallest, state=Swept(exact, near))


def _none_near(problem: Problem, nearest: Tensor) -> Near | None:
    """An empty ``Near`` if no negative is near the cap, which spares later sweeps the search."""
    anchors = problem.anchors
    if problem.positives is not None or not free_to_look(anchors) or not nearest.amin() >= NEAR:
        return None
    none = anchors.new_empty(len(anchors), 0)
    return Near(none.long(), none)


def _collect(problem: Problem, need: Need, exact: bool) -> Hardest:
    collected = Hardest(problem, need.tail, need.hardest)
    for band in bands(problem):
        for _, tile in band.tiles(sharp=False):
            collected.add(tile.problem, tile.sharpen() if exact else tile.hidden())
    return collected


def evaluate_along(route: Route, problem: Problem, survey: Survey, parts: Sequence[Part]) -> list[Tensor]:
    """The value ``(a,)`` of each part; the backward pass sweeps the matrix once more."""
    anchors, candidates = problem.anchors, problem.candidates
    known = survey.state if isinstance(survey.state, Swept) else Swept(False, None)
    exact = known.exact or any(part.link.near_cap for part in parts)
    sweep = _Sweep(route, problem, survey.thresholds, Swept(exact, known.near), parts)
    with torch.no_grad():
        values = sweep.values()
    parameters = [value for _, _, value in learned_of(parts)]
    # Torch cannot compile an autograd function that has nothing to differentiate.
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (anchors, candidates, *parameters))):
        return values
    sums = _Swept.apply(  # type: ignore[no-untyped-call]
        partial(sweep.gradient, values), len(parts), len(parameters), anchors, candidates, *values,
        *parameters, *_callers(problem, parts),
    )  # fmt: skip
    return list(sums)


WHOLE = Route(
    lambda problem: iter([Visit(problem)]), lambda problem, by_candidate, owner: by_candidate, _collect
)
ENGINE = Engine("chunked", partial(survey_along, WHOLE), partial(evaluate_along, WHOLE))


class _Sweep(NamedTuple):
    """All that a pass over the matrix reads."""

    route: Route
    problem: Problem
    thresholds: Mapping[int, Tensor]
    known: Swept
    parts: Sequence[Part]

    def values(self) -> list[Tensor]:
        """Value ``(anchors,)`` of every part."""
        anchors = self.problem.anchors
        totals = [
            anchors.new_full((len(anchors),), -torch.inf if part.kind == "lse" else 0) for part in self.parts
        ]
        for visit in self.route.visits(self.problem):
            for band in bands(visit.problem):
                for rows, tile in band.tiles(sharp=self.known.exact, near=self.known.near):
                    for total, part in zip(totals, self.parts, strict=True):
                        value = self._sum(part, rows, tile, slopes=False).value
                        both = torch.logaddexp if part.kind == "lse" else torch.add
                        total[rows] = both(total[rows], value)
        return totals

    def gradient(
        self, totals: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Gradients of anchors, candidates and learned parameters, given the weight ``(anchors,)`` of each sum."""
        parts = self.parts
        anchors, learned = self.problem.anchors.detach(), learned_of(parts)
        by_anchor = torch.zeros_like(anchors)
        by_candidate = torch.zeros_like(self.problem.candidates)
        by_parameter = [torch.zeros_like(weights[k]) for k, _, _ in learned]
        for visit in self.route.visits(self.problem):
            candidates = visit.problem.candidates.detach()
            for band in bands(visit.problem):
                for rows, tile in band.tiles(sharp=self.known.exact, near=self.known.near):
                    sums = [self._sum(part, rows, tile, slopes=True) for part in parts]
                    shares = [
                        weight[rows] * _share(part, each.value, total[rows])
                        for part, each, total, weight in zip(parts, sums, totals, weights, strict=True)
                    ]
                    for into, (k, name, _) in zip(by_parameter, learned, strict=True):
                        into[rows] += sums[k].effects[name] * shares[k]
                    slopes = [each.slopes for each in sums if each.slopes is not None]
                    columns = [each.columns for each in sums]
                    tile.shortfall.copy_(sum_slopes(slopes, columns, shares, len(candidates)))
                by_anchor[band.rows()] += product(band.matrix, candidates)
                by_candidate += product(band.matrix.T, anchors[band.rows()])
            by_candidate = self.route.passed(self.problem, by_candidate, visit.owner)
        effects = [
            to_parameter(each, value) for each, (_, _, value) in zip(by_parameter, learned, strict=True)
        ]
        return by_anchor, by_candidate, effects

    def _sum(self, part: Part, rows: slice, tile: Tile, *, slopes: bool) -> PartSum:
        threshold = None if part.hardest is None else self.thresholds[part.hardest][rows]
        of_rows = part.rows(rows.start, rows.stop)
        if worth_compiling(part.link, tile.shortfall):
            return compiled_sum(tile, of_rows, threshold, slopes=slopes)
        return tile.sum(of_rows, threshold, slopes=slopes)


def _callers(problem: Problem, parts: Sequence[Part]) -> list[Tensor]:
    """Tensors of the caller that the sweep in the backward pass reads again."""
    if torch.compiler.is_compiling():
        return []  # a compiled graph saves what it reads
    names = ("ignore", "chosen", "label", "id")
    read = [problem.of_anchor[name] for name in names if name in problem.of_anchor]
    read += [value for part in parts for value in part.link.tensors().values()]
    # Inference tensors have no version counter, and torch refuses to save them.
    return [value.detach() for value in read if not value.is_inference()]


def worth_compiling(link: Link, matrix: Tensor) -> bool:
    """Whether to compile a sum: yes for a user's own link on a GPU, where each of its small operations would read
    and write the whole matrix."""
    return (
        isinstance(link, FunctionLink) and matrix.device.type == "cuda" and not torch.compiler.is_compiling()
    )


def compiled_sum(tile: Tile, part: Part, threshold: Tensor | None, *, slopes: bool) -> PartSum:
    """``tile.sum``, compiled; uncompiled if torch cannot compile it."""
    if not _uncompiled:
        from torch._dynamo.exc import TorchDynamoException  # imported here, since it loads the compiler

        try:
            found: PartSum = _compiled()(tile, part, threshold, slopes=slopes)
            return found
        except TorchDynamoException as error:
            _uncompiled.append(str(error))
            reason = str(error).splitlines()[0]
            warnings.warn(f"weince: a link of one's own runs uncompiled, and slower: {reason}", stacklevel=2)
    return tile.sum(part, threshold, slopes=slopes)


_uncompiled: list[str] = []  # errors of the compiler; after the first, no sum is compiled


@cache
def _compiled() -> Callable[..., PartSum]:
    return torch.compile(Tile.sum)


class Least:
    """The smallest of many values, collected block by block in a buffer that is cut when it is full."""

    def __init__(self, like: Tensor, count: int) -> None:
        self.count, self.taken = count, 0
        self.look = free_to_look(like)
        self.bound: Tensor | None = None  # larger values cannot be among the smallest
        # Room for several blocks between cuts, since a cut reads the whole buffer.
        self.buffer = like.new_empty((2 if self.look else 5) * count)

    def add(self, values: Tensor) -> None:
        if self.look and self.bound is not None:
            values = values[values < self.bound]
        if len(values) > self.count:
            values = least(values, self.count, ordered=False)
        if self.taken + len(values) > len(self.buffer):
            kept = least(self.buffer[: self.taken], self.count, ordered=False)
            self.buffer[: len(kept)] = kept
            self.taken, self.bound = len(kept), kept.amax()
        self.buffer[self.taken : self.taken + len(values)] = values
        self.taken += len(values)

    def sorted(self) -> Tensor:
        """The smallest values in ascending order, at most ``count``."""
        return least(self.buffer[: self.taken], self.count)


def _share(part: Part, value: Tensor, total: Tensor) -> Tensor | float:
    """Share of one visit in the exponential of the whole log-sum-exp; 1 for sums that simply add up."""
    if part.kind != "lse":
        return 1.0
    return torch.where(value == total, 1.0, (value - total).exp())  # also 1 if both are -inf


class _Swept(torch.autograd.Function):
    """Computes the gradient of sums by another sweep.

    Order of the tensors: anchors, candidates, sums, learned parameters, then the other tensors that the sweep reads.
    Those are saved so that torch refuses a backward pass after one of them was changed in place.
    """

    @staticmethod
    def forward(
        gradient: Callable[..., Any], count: int, learned: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in tensors[2 : 2 + count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.gradient, ctx.count, ctx.learned, anchors, candidates, *rest = inputs
        ctx.save_for_backward(anchors, candidates, *rest[ctx.count :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        anchors, candidates, *rest = ctx.saved_tensors
        with torch.no_grad(), no_autocast(anchors.device):
            by_anchor, by_candidate, by_parameter = ctx.gradient(grads)
        return (
            None, None, None, first_order(by_anchor, anchors), first_order(by_candidate, candidates),
            *(None,) * ctx.count, *map(first_order, by_parameter, rest[: ctx.learned]),
            *(None,) * (len(rest) - ctx.learned),
        )  # fmt: skip
