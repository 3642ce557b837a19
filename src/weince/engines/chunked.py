"""The chunked engine: exact for every link and layout, with memory linear in the batch, on any device.

The matrix of shortfalls is made a band of rows at a time and thrown away again. A first sweep reduces each
anchor's hardest negatives to a few numbers; once the pivot of the gate is known, a second one computes the
losses and, where one is wanted, the gradient.

Where all anchors have the same weight in what is differentiated (a mean or a sum), the second sweep already
has the whole gradient. Otherwise the weights are known in the backward pass alone, which sweeps once more.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince.candidates import Contest
from weince.engines.dense import BLOCK, learned, sum_terms, with_parameter
from weince.engines.rows import EngineOutput, Look, Need, Rows, bind, joined, survey
from weince.links import Link
from weince.scores import first_order, no_autocast, product, shortfalls
from weince.tail import TailConfig
from weince.terms import Term

CPU_BAND = 1 << 22
"""Scores held at a time on the CPU: enough rows for the products to be efficient."""

GPU_BAND = 1 << 25

Span = tuple[int, int]


def chunked(
    contest: Contest, terms: Sequence[Term], tail: TailConfig | None, *, same_weight: bool = False
) -> EngineOutput:
    """Loss of every anchor of a contest: the weighted sum of the terms.

    Args:
        contest: Anchors, candidates and their roles.
        terms: What to sum.
        tail: How to take the tail statistics, where a link or the caller wants them.
        same_weight: The caller differentiates the sum of the losses, or a multiple of it, and nothing else.
            Saves a sweep; any other use of the losses then gets a wrong gradient.
    """
    anchors, candidates = contest.anchors, contest.candidates
    wanted = torch.is_grad_enabled() and (anchors.requires_grad or candidates.requires_grad)
    near_cap = Need.of(contest, terms, tail).near_cap

    def blocks() -> "Iterator[Rows]":
        return (rows for band in bands(contest) for rows in band.sharp_blocks(near_cap))

    with torch.no_grad(), no_autocast(anchors.device):
        first = (rows for band in bands(contest) for rows in band.blocks())
        found = survey(contest, first, blocks, terms, tail)
        links = bind(terms, found)
        job = _Job(contest, terms, links, found.looks, near_cap)
        swept = job.sweep(gradient=wanted and same_weight)
    if swept.gradients is not None:
        loss = _SameWeight.apply(swept.loss, *swept.gradients, anchors, candidates)  # type: ignore[no-untyped-call]
    else:
        loss = _AnyWeight.apply(swept.loss, anchors, candidates, job.pull, *job.given())  # type: ignore[no-untyped-call]
    for link, effects in zip(links, swept.effects, strict=True):
        for name, parameter in learned(link).items():
            loss = with_parameter(loss, effects[name], parameter)
    return EngineOutput(loss, swept.counted, found.stats)


class Band(NamedTuple):
    """Some rows of the matrix; worked on in blocks that stay in the cache."""

    contest: Contest
    start: int
    first_block: int
    step: int
    matrix: Tensor

    def span(self) -> Span:
        """Its anchors. (Not a property: of a named tuple made in a graph torch 2.8 does not compile one.)"""
        return self.start, self.start + len(self.matrix)

    def blocks(self) -> Iterator[Rows]:
        for start in range(0, len(self.matrix), self.step):
            part = self.matrix[start : start + self.step]
            first = self.start + start
            yield Rows(self.contest.rows(first, first + len(part)), part)

    def sharp_blocks(self, near_cap: bool) -> Iterator[Rows]:
        """Blocks whose shortfalls are as exact near the cap as the first sweep had them."""
        for rows in self.blocks():
            if near_cap:
                rows.sharpen()
            yield rows

    def spans(self, near_cap: bool) -> Iterator[tuple[Span, Rows]]:
        """The same, each with the anchors it is about."""
        start = self.start
        for rows in self.sharp_blocks(near_cap):
            stop = start + len(rows.shortfall)
            yield (start, stop), rows
            start = stop


def bands(contest: Contest) -> Iterator[Band]:
    """The matrix, band by band; no more than two are there at a time."""
    anchors, width = len(contest.anchors), len(contest.candidates)
    on_cpu = contest.anchors.device.type == "cpu"
    # A compiled graph unrolls the loops, and fuses what the blocks are there to keep in the cache.
    step = max(1, BLOCK // width) if on_cpu and not torch.compiler.is_compiling() else anchors
    band = max(1, (CPU_BAND if on_cpu else GPU_BAND) // width)
    band = band - band % step if band >= step else band
    for start in range(0, anchors, band):
        matrix = shortfalls(contest.anchors[start : start + band], contest.candidates)
        yield Band(contest, start, start // min(step, band), min(step, band), matrix)


class _Swept(NamedTuple):
    loss: Tensor
    counted: Tensor | None
    effects: list[dict[str, Tensor]]
    gradients: tuple[Tensor, Tensor] | None


class _Job(NamedTuple):
    """All that the second sweep needs, and the one in the backward pass."""

    contest: Contest
    terms: Sequence[Term]
    links: Sequence[Link]
    looks: Sequence[Look]
    near_cap: bool

    def given(self) -> list[Tensor]:
        """Tensors of the caller that the sweep in the backward pass reads again."""
        if torch.compiler.is_compiling():
            return []  # a compiled graph saves what it reads
        pairs = (self.contest.labels, self.contest.ids)
        own = [self.contest.ignore, *(pair[0] for pair in pairs if pair is not None)]
        own += [value for link in self.links for value in link.tensors().values()]
        # Torch counts no changes of tensors made in inference mode, and refuses to save them.
        return [value.detach() for value in own if value is not None and not value.is_inference()]

    def sweep(self, *, gradient: bool) -> _Swept:
        """Losses of all anchors, their derivatives by learned parameters, and the gradient of their sum."""
        losses: list[Tensor] = []
        counted: list[Tensor] = []
        effects: list[list[dict[str, Tensor]]] = []
        pulls = _Gradients(self.contest.anchors, self.contest.candidates) if gradient else None
        for band in bands(self.contest):
            for loss, rows, effect in self._blocks(band):
                losses.append(loss)
                effects.append(effect)
                if rows.counted is not None:
                    counted.append(rows.counted)
            if pulls is not None:
                pulls.add(band, None)
        merged = [
            {name: torch.cat([effect[index][name] for effect in effects]) for name in effects[0][index]}
            for index in range(len(self.links))
        ]
        return _Swept(
            torch.cat(losses),
            joined(counted),
            merged,
            None if pulls is None else (pulls.anchors, pulls.candidates),
        )

    def pull(self, anchors: Tensor, candidates: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the weighted sum of the losses by the anchors and by the candidates."""
        pulls = _Gradients(anchors, candidates)
        for band in bands(self.contest):
            for _ in self._blocks(band):
                pass
            pulls.add(band, weight)
        return pulls.anchors, pulls.candidates

    def _blocks(self, band: Band) -> Iterator[tuple[Tensor, Rows, list[dict[str, Tensor]]]]:
        """Contrast the rows of a band; its memory then holds the pull."""
        for index, (span, rows) in enumerate(band.spans(self.near_cap)):
            links = [link.rows(*span) for link in self.links]
            columns = self.looks[band.first_block + index].columns if self.looks else None
            loss, pull, effect = sum_terms(rows, self.terms, links, columns)
            rows.shortfall.copy_(pull)
            yield loss, rows, effect


class _Gradients:
    """Sums of pulls over the bands."""

    def __init__(self, anchors: Tensor, candidates: Tensor) -> None:
        self._anchors, self._candidates = anchors, candidates
        self._by_band: list[Tensor] = []
        self.candidates = torch.zeros_like(candidates)

    @property
    def anchors(self) -> Tensor:
        return torch.cat(self._by_band)

    def add(self, band: Band, weight: Tensor | None) -> None:
        rows = self._anchors[slice(*band.span())]
        by_anchor = product(band.matrix, self._candidates)
        if weight is not None:
            part = weight[slice(*band.span())].unsqueeze(1)
            rows, by_anchor = rows * part, by_anchor * part
        self._by_band.append(by_anchor)
        self.candidates += product(band.matrix.T, rows)


class _SameWeight(torch.autograd.Function):
    """Gives the losses the gradient of their sum, times the weight that all of them have."""

    @staticmethod
    def forward(
        loss: Tensor, by_anchor: Tensor, by_candidate: Tensor, anchors: Tensor, candidates: Tensor
    ) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor, Tensor]:
        by_anchor, by_candidate, anchors, candidates = ctx.saved_tensors
        weight = grad[0]
        return (
            None,
            None,
            None,
            first_order(by_anchor * weight, anchors),
            first_order(by_candidate * weight, candidates),
        )


class _AnyWeight(torch.autograd.Function):
    """Gives the losses their gradient, by another sweep."""

    @staticmethod
    def forward(
        loss: Tensor, anchors: Tensor, candidates: Tensor, pull: Callable[..., Any], *given: Tensor
    ) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # Those given are saved to have torch refuse a backward pass after one of them was changed in place.
        ctx.save_for_backward(inputs[1], inputs[2], *inputs[4:])
        ctx.pull = inputs[3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        anchors, candidates, *given = ctx.saved_tensors
        with torch.no_grad(), no_autocast(grad.device):
            by_anchor, by_candidate = ctx.pull(anchors, candidates, grad)
        unknown = (None,) * len(given)
        return None, first_order(by_anchor, anchors), first_order(by_candidate, candidates), None, *unknown
