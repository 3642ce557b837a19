"""The chunked engine: exact for every link and layout, with memory linear in the batch, on any device.

The matrix of shortfalls is made a band of rows at a time and thrown away again: once to survey the negatives, if a
loss asks for that, once for the sums, and once more in the backward pass, where the sums' weights are known.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince.candidates import Contest
from weince.engines.base import Engine, learned_of, sum_slopes, to_parameter
from weince.engines.dense import BLOCK
from weince.engines.smallest import least
from weince.engines.survey import Hardest
from weince.engines.tile import NEAR, Part, PartSum, Tile
from weince.links import FunctionLink, Link
from weince.scores import first_order, free_to_look, no_autocast, product, shortfalls
from weince.tail import TailConfig

CPU_BAND = 1 << 22
"""Scores held at a time on the CPU: enough rows for the products to be efficient."""

GPU_BAND = 1 << 25


MISCOMPILED = torch.__version__ < (2, 7)  # type: ignore[operator]  # a version compares with numbers
"""Whether torch compiles the gradient of several sums wrongly, without a word."""


def check_compiled() -> None:
    """Raise in a graph that would be wrong: torch then runs the loss uncompiled, or fails with ``fullgraph=True``."""
    if MISCOMPILED and torch.compiler.is_compiling():
        raise RuntimeError(
            "the chunked engine in a compiled graph wants torch 2.7 or newer; got an older one: compile the encoder "
            "alone"
        )


class Band(NamedTuple):
    """Some rows of the matrix; worked on in tiles that stay in the cache."""

    contest: Contest
    start: int
    step: int
    matrix: Tensor

    def rows(self) -> slice:
        """Its anchors. (Not a property: of a named tuple made in a graph torch 2.8 does not compile one.)"""
        return slice(self.start, self.start + len(self.matrix))

    def tiles(self, *, sharp: bool, near: "Near | None" = None) -> Iterator[tuple[slice, Tile]]:
        """The tiles and their rows among all; ``sharp``: shortfalls exact near the cap, which ``near`` may hold."""
        for start in range(0, len(self.matrix), self.step):
            part = self.matrix[start : start + self.step]
            rows = slice(self.start + start, self.start + start + len(part))
            tile = Tile(self.contest.rows(rows.start, rows.stop), part)
            if sharp and near is not None:
                tile.put(near.columns[rows], near.shortfalls[rows])
            elif sharp:
                tile.sharpen()
            yield rows, tile


def bands(contest: Contest) -> Iterator[Band]:
    """The matrix, band by band; on the CPU each overwrites the one before."""
    anchors, width = len(contest.anchors), len(contest.candidates)
    on_cpu = contest.anchors.device.type == "cpu"
    # A compiled graph unrolls the loops, and fuses what the tiles are there to keep in the cache.
    eager = on_cpu and not torch.compiler.is_compiling()
    step = max(1, BLOCK // width) if eager else anchors
    band = max(1, (CPU_BAND if on_cpu else GPU_BAND) // width)
    band = band - band % step if band >= step else band
    # One buffer for all: small tensors that outlive a band would keep its memory from being used again.
    buffer = contest.anchors.new_empty(min(band, anchors), width) if eager else None
    for start in range(0, anchors, band):
        rows = contest.anchors[start : start + band]
        matrix = shortfalls(rows, contest.candidates, None if buffer is None else buffer[: len(rows)])
        yield Band(contest, start, min(step, band), matrix)


class Near(NamedTuple):
    """Candidates of each anchor near the cap, ``(anchors, m)`` columns, and their exact shortfalls; -1: none."""

    columns: Tensor
    shortfalls: Tensor


class Visit(NamedTuple):
    """The anchors against some of the candidates, and whose they are."""

    contest: Contest
    owner: int = 0


class Chunked(Engine):
    name = "chunked"

    def survey(self) -> None:
        self.sharp = self.need.tail is not None
        self.thresholds: dict[int, Tensor] = {}
        self.found: Hardest | None = None
        self.near: Near | None = None  # where they are known
        if self.need.tail is not None:
            self.stats = self.find(self.need.tail, self.need.hardest).stats()
            self.near = self._none_near()

    def _none_near(self) -> "Near | None":
        """That no candidate is near the cap, if the survey tells; then later sweeps need not look."""
        anchors = self.contest.anchors
        if self.stats is None or self.contest.labels is not None or not free_to_look(anchors):
            return None
        if not self.stats.rho.amin() >= NEAR:
            return None
        none = anchors.new_empty(len(anchors), 0)
        return Near(none.long(), none)

    def visits(self) -> Iterator[Visit]:
        """All candidates in turn: here, all at once."""
        yield Visit(self.contest)

    def passed(self, by_candidate: Tensor, owner: int) -> Tensor:
        """Where the gradient of the next visit's candidates is summed up, after that of an owner's."""
        return by_candidate

    def find(self, tail: TailConfig | None, numbers: tuple[int, ...]) -> Hardest:
        """Sweep for the statistics and the thresholds that are asked for."""
        self.found = Hardest(self.contest, tail, numbers)
        for band in bands(self.contest):
            for _, tile in band.tiles(sharp=False):
                self.found.add(tile.contest, tile.sharpen() if self.sharp else tile.hidden())
        self.thresholds.update(self.found.thresholds())
        return self.found

    def negatives(self) -> Tensor:
        if self.contest.uniform:
            return torch.full((1,), self.contest.most_negatives, device=self.contest.anchors.device)
        return (self.found or self.find(None, ())).negatives()

    def smallest(self, count: int) -> Tensor:
        self.sharp = True
        found = Least(self.contest.anchors, count)
        for visit in self.visits():
            for band in bands(visit.contest):
                for _, tile in band.tiles(sharp=self.sharp):
                    found.add(tile.hidden().flatten())
        here = found.sorted()
        return here if self.contest.ranks is None else self.contest.ranks.smallest(here, count)

    def evaluate(self, parts: Sequence[Part]) -> list[Tensor]:
        check_compiled()
        anchors, candidates = self.contest.anchors, self.contest.candidates
        with torch.no_grad(), no_autocast(anchors.device):
            self.sharp = self.sharp or any(part.link.near_cap for part in parts)
            asked = {part.hardest for part in parts if part.hardest is not None}
            if asked - set(self.thresholds):
                self.find(None, tuple(asked - set(self.thresholds)))
            values = self.values(parts)
        parameters = [value for _, _, value in learned_of(parts)]
        sums = _Swept.apply(  # type: ignore[no-untyped-call]
            partial(self.gradient, parts, values), len(parts), len(parameters), anchors, candidates, *values,
            *parameters, *self._given(parts),
        )  # fmt: skip
        return list(sums)

    def values(self, parts: Sequence[Part]) -> list[Tensor]:
        """Value ``(anchors,)`` of every part."""
        anchors = self.contest.anchors
        totals = [
            anchors.new_full((len(anchors),), -torch.inf if part.kind == "lse" else 0) for part in parts
        ]
        for visit in self.visits():
            for band in bands(visit.contest):
                for rows, tile in band.tiles(sharp=self.sharp, near=self.near):
                    for total, part in zip(totals, parts, strict=True):
                        value = self._sum(part, rows, tile, slopes=False).value
                        both = torch.logaddexp if part.kind == "lse" else torch.add
                        total[rows] = both(total[rows], value)
        return totals

    def gradient(
        self, parts: Sequence[Part], totals: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Gradient of the sums, each weighed by ``(anchors,)``: by anchors, by candidates, by learned parameters."""
        anchors, learned = self.contest.anchors.detach(), learned_of(parts)
        by_anchor = torch.zeros_like(anchors)
        by_candidate = torch.zeros_like(self.contest.candidates)
        by_parameter = [torch.zeros_like(weights[k]) for k, _, _ in learned]
        for visit in self.visits():
            candidates = visit.contest.candidates.detach()
            for band in bands(visit.contest):
                for rows, tile in band.tiles(sharp=self.sharp, near=self.near):
                    found = [self._sum(part, rows, tile, slopes=True) for part in parts]
                    shares = [
                        weight[rows] * _share(part, one.value, total[rows])
                        for part, one, total, weight in zip(parts, found, totals, weights, strict=True)
                    ]
                    for into, (k, name, _) in zip(by_parameter, learned, strict=True):
                        into[rows] += found[k].effects[name] * shares[k]
                    slopes = [one.slopes for one in found if one.slopes is not None]
                    columns = [one.columns for one in found]
                    tile.shortfall.copy_(sum_slopes(slopes, columns, shares, len(candidates)))
                by_anchor[band.rows()] += product(band.matrix, candidates)
                by_candidate += product(band.matrix.T, anchors[band.rows()])
            by_candidate = self.passed(by_candidate, visit.owner)
        effects = [to_parameter(own, value) for own, (_, _, value) in zip(by_parameter, learned, strict=True)]
        return by_anchor, by_candidate, effects

    def _sum(self, part: Part, rows: slice, tile: Tile, *, slopes: bool) -> PartSum:
        threshold = None if part.hardest is None else self.thresholds[part.hardest][rows]
        own = part.rows(rows.start, rows.stop)
        if worth_compiling(part.link, tile.shortfall):
            return compiled_sum(tile, own, threshold, slopes=slopes)
        return tile.sum(own, threshold, slopes=slopes)

    def _given(self, parts: Sequence[Part]) -> list[Tensor]:
        """Tensors of the caller that the sweep in the backward pass reads again."""
        if torch.compiler.is_compiling():
            return []  # a compiled graph saves what it reads
        pairs = (self.contest.labels, self.contest.ids)
        own = [self.contest.ignore, *(pair[0] for pair in pairs if pair is not None)]
        own += [value for part in parts for value in part.link.tensors().values()]
        # Torch counts no changes of tensors made in inference mode, and refuses to save them.
        return [value.detach() for value in own if value is not None and not value.is_inference()]


def worth_compiling(link: Link, matrix: Tensor) -> bool:
    """Whether a sum is compiled: that of a user's own link on a GPU, where every small operation in it would read and
    write the whole matrix."""
    return (
        isinstance(link, FunctionLink) and matrix.device.type == "cuda" and not torch.compiler.is_compiling()
    )


def compiled_sum(tile: Tile, part: Part, threshold: Tensor | None, *, slopes: bool) -> PartSum:
    """``tile.sum``, compiled; as it is where torch cannot compile it."""
    if not _uncompiled:
        from torch._dynamo.exc import TorchDynamoException  # here, since it imports the compiler

        try:
            found: PartSum = _compiled()(tile, part, threshold, slopes=slopes)
            return found
        except TorchDynamoException as error:
            _uncompiled.append(str(error))
            reason = str(error).splitlines()[0]
            warnings.warn(f"weince: a link of one's own runs uncompiled, and slower: {reason}", stacklevel=2)
    return tile.sum(part, threshold, slopes=slopes)


_uncompiled: list[str] = []  # why not


@cache
def _compiled() -> Callable[..., PartSum]:
    return torch.compile(Tile.sum)


class Least:
    """The smallest of many values, taken in block by block into one buffer that is cut when it is full."""

    def __init__(self, like: Tensor, count: int) -> None:
        self.count, self.taken = count, 0
        self.look = free_to_look(like)
        self.bound: Tensor | None = None  # what is not below it would be cut off again
        # Cut rarely, since that reads all of it.
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
        """Upwards; fewer if fewer were taken in."""
        return least(self.buffer[: self.taken], self.count)


def _share(part: Part, value: Tensor, total: Tensor) -> Tensor | float:
    """What part of the whole sum's exponential is that of one visit; 1 for sums that simply add up."""
    if part.kind != "lse":
        return 1.0
    return torch.where(value == total, 1.0, (value - total).exp())  # equal, too, where both are -inf


class _Swept(torch.autograd.Function):
    """Gives sums their gradient, by another sweep.

    Tensors come as: anchors, candidates, the sums, the learned parameters, then what the sweep reads besides: that is
    saved to have torch refuse a backward pass after one of them was changed in place.
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
