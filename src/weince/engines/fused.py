"""The fused engine: Triton kernels for CUDA, with memory linear in the batch.

One pass finds the hardest negatives, if the loss asks for them, one computes up to eight sums, and one computes the
gradient. The passes for sums and gradient never write scores to memory. Links and rules are translated for the
kernels; a link that cannot be translated goes through the chunked engine.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weince import scores
from weince.engines import chunked
from weince.engines.chunked import Near, Swept
from weince.pairs import AMONG_HARDEST, SAME_VIEW, Problem
from weince.sums import NOTHING_KNOWN, Engine, Need, Part, Survey
from weince.tail import TailConfig, TailStats, nearest_rank

LARGEST_TAIL = 1024
OLDEST_TRITON = (3, 5)

MOST_SUMS = 8
"""Most sums that one pass computes."""


def unsuited(version: str, hip: str | None) -> str | None:
    """Why Triton of this version, or torch for AMD (``hip``), cannot run the kernels, in one line; None if it can."""
    if hip is not None:
        return f"the fused engine wants an NVIDIA GPU: its kernels hold PTX; got torch with ROCm {hip}"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        return f"the fused engine wants Triton 3.5 or newer, as torch brings it since 2.9; got {version}"
    return None


try:
    import triton

    _missing = unsuited(triton.__version__, torch.version.hip)
    if _missing is None:
        from weince.engines.kernels import launch, ops, search, translate

        scores.row_kernels = scores.RowKernels(ops.rows_served, ops.unit_rows, ops.unit_gradient, ops.apart)
except ImportError:
    _missing = "the fused engine wants Triton, which is not installed: pip install 'weince[gpu]'"


def why_not(problem: Problem, need: Need) -> str | None:
    """Why the fused engine cannot serve this problem, in one line; None if it can."""
    if _missing is not None:
        return _missing
    if problem.anchors.device.type != "cuda":
        return f"the fused engine wants tensors on a CUDA device; got {problem.anchors.device.type}"
    if problem.anchors.dtype != torch.float32:
        return f"the fused engine works in float32; got {problem.anchors.dtype}"
    if problem.most_negatives < 1:
        return "the fused engine wants at least one negative"
    if (need.tail is not None or need.hardest) and problem.score != "cosine":
        return "the fused engine finds the hardest negatives of cosines; got products"
    if (need.tail is not None or need.hardest) and problem.hard is not None:
        return "the fused engine finds the hardest of negatives that all anchors share; got negatives of one anchor"
    if need.tail is not None and need.tail.tail_size(problem.most_negatives) > LARGEST_TAIL:
        return f"the fused engine fits tails of {LARGEST_TAIL} at the most; got {need.tail}"
    return None


def survey(problem: Problem, need: Need) -> Survey:
    """Prepare the rows for the kernels, and find what is needed."""
    return Fused(problem).surveyed(need)


def evaluate(problem: Problem, survey: Survey, parts: Sequence[Part]) -> list[Tensor]:
    """The value ``(a,)`` of each part, with its gradient."""
    return (survey.state if isinstance(survey.state, Fused) else Fused(problem)).evaluate(parts)


ENGINE = Engine("fused", survey, evaluate)


class Fused:
    """Rows of a problem as the kernels read them, and what searches have found."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tail: TailConfig | None = None
        self.stats: TailStats | None = None
        anchors, candidates = problem.raw or (problem.anchors.detach(), problem.candidates.detach())
        operands = ops.operand(anchors)
        if not problem.symmetric:
            operands += ops.operand(candidates)
        # The kernels read columns one value after the other, whatever the strides.
        of_anchor, of_candidate = (
            {name: value if value.ndim > 1 else value.contiguous() for name, value in side.items()}
            for side in (problem.of_anchor, problem.of_candidate)
        )
        rows = problem.anchors.detach(), problem.candidates.detach()
        self.matrix = launch.Matrix(
            *rows, tuple(operands), of_anchor, of_candidate, problem.score == "cosine"
        )
        self.near: list[Tensor] = []
        self.nearest_known = False  # near holds the nearest of every anchor, also far from the cap
        self.thresholds: dict[int, Tensor] = {}

    def surveyed(self, need: Need) -> Survey:
        """What is needed. Thresholds that no search has found stand for themselves: sums find them."""
        self.tail = need.tail
        if need.tail is not None:
            self._search(need.tail, need.hardest)
        smallest = None
        if need.smallest:  # a sample is small enough to do without kernels
            smallest = chunked.ENGINE.survey(self.problem, Need(smallest=need.smallest)).smallest
        thresholds = dict.fromkeys(need.hardest, self.problem.anchors.new_empty(0)) | self.thresholds
        counts = self._count() if need.counts else None
        return Survey(self.stats, thresholds, counts, smallest, self)

    def _search(self, tail: TailConfig | None, numbers: Sequence[int]) -> None:
        """Find tail statistics, thresholds for these numbers of hardest negatives, and every anchor's nearest."""
        numbers = tuple(number for number in numbers if number < LARGEST_TAIL)
        settings = self._rules("negatives"), ops.fields_of(tail), numbers
        stats, made, thresholds, _, *near = ops.run(*ops.call_on(self.matrix, "search", *settings))
        if not self.nearest_known:
            self.near, self.nearest_known = near, True
        self.thresholds |= dict(zip(numbers, thresholds, strict=True))
        if tail is not None:
            rho, beta, daic = stats
            self.stats = TailStats(rho, beta, daic, ops.gate(rho, daic, made, self._pivot(rho, tail), tail))

    def _pivot(self, rho: Tensor, tail: TailConfig) -> Tensor | None:
        """Pivot of the gate; None if the kernel computes it."""
        problem = self.problem
        if tail.rho0 is not None:
            return torch.full((1,), tail.rho0, dtype=rho.dtype, device=rho.device)
        if problem.uniform and problem.ranks is None and len(rho) <= search.ONE_PROGRAM:
            return None
        has_rho = rho.isfinite()
        if problem.positives is not None:
            has_rho &= problem.count_positives() > 0
        if problem.ranks is not None:
            rho, has_rho = problem.ranks.gather(rho), problem.ranks.gather(has_rho)
        return nearest_rank(rho, has_rho, tail.rho0_quantile).reshape(1)

    def _count(self) -> Tensor:
        """``(a,)`` number of negatives."""
        counts = ops.sums(self.matrix, None, self._rules("negatives"), (False,), ())[0].round().long()
        return counts if self.problem.hard is None else counts + self.problem.hard_negatives()[1].sum(1)

    def evaluate(self, parts: Sequence[Part]) -> list[Tensor]:
        values: dict[int, Tensor] = {}
        codes = [translate.code_of(part.link) for part in parts]
        translated = [
            place for place, part in enumerate(parts)
            if codes[place] is not None and (part.hardest or 0) < LARGEST_TAIL
        ]  # fmt: skip
        for start in range(0, len(translated), MOST_SUMS):
            places = translated[start : start + MOST_SUMS]
            sums = self._evaluate([parts[place] for place in places], [codes[place] for place in places])
            values |= dict(zip(places, sums, strict=True))
        others = [place for place in range(len(parts)) if place not in translated]
        if others:
            own = [parts[place] for place in others]
            numbers = tuple({part.hardest for part in own if part.hardest is not None})
            known, near = NOTHING_KNOWN, None
            # The hardest are by its own shortfalls: thresholds of the kernels differ by rounding, which splits ties.
            if numbers:
                with torch.no_grad():
                    known = chunked.ENGINE.survey(self.problem, Need(hardest=numbers))
            else:
                self._prepare(own)
                near = Near(*self.near[:2]) if self.near else None
            known = known._replace(state=Swept(self.tail is not None or len(numbers) > 0, near))
            values |= dict(zip(others, chunked.ENGINE.evaluate(self.problem, known, own), strict=True))
        return [values[place] for place in range(len(parts))]

    def _evaluate(self, parts: Sequence[Part], codes: Sequence[Any]) -> list[Tensor]:
        """The sums of one pass."""
        self._prepare(parts)
        asked: list[tuple[Any, ...]] = []
        columns = dict(self.matrix.of_anchor)
        learned: list[tuple[int, str]] = []
        held: list[
            tuple[Tensor, str]
        ] = []  # tensors of the links; sums that share one share what is computed of it
        for place, (part, code) in enumerate(zip(parts, codes, strict=True)):
            parameters, threshold = [], ""
            for name, value in part.link.tensors().items():
                at = next((name for tensor, name in held if tensor is value), "")
                if not at:
                    at = f"parameter {len(held)}"
                    held.append((value, at))
                    columns[at] = value.to(self.problem.anchors.device).reshape(-1).contiguous()
                wanted = value.requires_grad and torch.is_grad_enabled()
                each = True if value.numel() > 1 else False  # noqa: SIM210 - a compiler takes no comparison for a constant
                parameters.append((name, at, each, wanted))
                learned += [(place, at)] * wanted
            if part.hardest is not None:
                threshold = f"threshold of {part.hardest}"
                columns[threshold] = self.thresholds[part.hardest]
            rules = self._names(part)
            asked.append((part.kind, code, tuple(parameters), rules, threshold))
        tops = tuple(
            self.nearest_known and part.link.falls and part.among == "negatives" and part.kind == "lse"
            and "offset" not in self.matrix.of_candidate
            for part in parts
        )  # fmt: skip
        matrix = self.matrix._replace(
            anchors=self.problem.anchors,
            candidates=self.problem.candidates,
            of_anchor=columns,
        )
        near = launch.Nearest(*self.near) if self.near else None
        return list(ops.sums(matrix, near, self._recorded(tuple(asked)), tops, tuple(learned)).unbind())

    def _names(self, part: Part) -> tuple[str, ...]:
        """Names of the rules for candidates of a sum."""
        if part.among == "positives":
            return tuple(rule.name for rule in self.problem.positives or ())
        names = tuple(rule.name for rule in self.problem.negatives)
        names += (SAME_VIEW.name,) * (part.among == "same view")
        return names + (AMONG_HARDEST.name,) * (part.hardest is not None)

    def _rules(self, among: str) -> Any:
        """The number of negatives or of positives, as a sum; it has their rules."""
        rules = (self.problem.negatives if among == "negatives" else self.problem.positives) or ()
        return self._recorded((("sum", None, (), tuple(rule.name for rule in rules)),))

    def _recorded(self, asked: tuple[tuple[Any, ...], ...]) -> Any:
        """The recorded sums; in a compiled graph the request. ``asked``: fields of ``translate.Asked``."""
        types = tuple(
            tuple((name, _type_of(value)) for name, value in side.items())
            for side in (self.matrix.of_anchor, self.matrix.of_candidate)
        )
        request = (translate.REQUEST, asked, types, self.matrix.cosine, self.problem.symmetric)
        # A compiler must not trace the recording: the operator's number stands for it.
        return request if torch.compiler.is_compiling() else translate.recorded(request)

    def _prepare(self, parts: Sequence[Part]) -> None:
        """Find the thresholds and the exact shortfalls that these sums need, unless they are known."""
        with torch.no_grad():
            missing = {part.hardest for part in parts if part.hardest is not None} - set(self.thresholds)
            if missing:
                self._search(None, sorted(missing))
            steep = {part.among == "positives" for part in parts if part.link.near_cap and self.matrix.cosine}
            known = 0 if not self.near else self.near[0].shape[1]
            wanted = 8 if True in steep else 4 if steep else 0
            if known < wanted:
                rules = [self._rules("negatives")] + [self._rules("positives")] * (wanted == 8)
                call, tensors = ops.call_on(self.matrix, "nearest", *rules)
                self.near = ops.run(call, [*tensors, *self.near])


def _type_of(column: Tensor) -> str:
    if column.dtype == torch.bool:
        return "mask"
    return "float" if column.is_floating_point() else "int"
