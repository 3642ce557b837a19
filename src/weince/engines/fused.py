"""The fused engine: Triton kernels for CUDA, with memory linear in the batch.

One pass finds the hardest negatives, if the loss asks for them, one computes up to eight sums, and one computes the
gradient. The passes for sums and gradient never write scores to memory. Links and rules are translated for the
kernels; a link that cannot be translated goes through the chunked engine.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince import scores
from weince.engines import chunked
from weince.engines.chunked import Near, Swept
from weince.pairs import AMONG_HARDEST, Problem
from weince.sums import NOTHING_KNOWN, Engine, Need, Part, Survey, rules_of
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
    if "chosen" in problem.of_anchor:
        return "the fused engine finds positives by their labels; got a matrix of positives"
    if problem.most_negatives < 1:
        return "the fused engine wants at least one negative"
    if need.tail is not None and need.tail.tail_size(problem.most_negatives) > LARGEST_TAIL:
        return f"the fused engine fits tails of {LARGEST_TAIL} at the most; got {need.tail}"
    return None


def survey(problem: Problem, need: Need) -> Survey:
    """Prepare the rows for the kernels, and find what is needed."""
    state = State(problem)
    numbers = tuple(number for number in need.hardest if number < LARGEST_TAIL)
    # The kernels search the cosines of candidates; the chunked engine also searches products and hard negatives.
    ours = problem.score == "cosine" and problem.hard is None
    theirs = need._replace(tail=None, hardest=tuple(set(need.hardest) - set(numbers))) if ours else need
    result = chunked.ENGINE.survey(problem, theirs._replace(counts=False)) if any(theirs[:3]) else Survey()
    if ours and (need.tail is not None or numbers):
        stats, thresholds = state.search(need.tail, numbers)
        result = result._replace(stats=stats, thresholds={**result.thresholds, **thresholds})
    counts = _count(state) if need.counts else None
    return result._replace(negatives=counts, state=state)


def _count(state: "State") -> Tensor:
    """``(a,)`` number of negatives."""
    counts = ops.sums(state.matrix, None, state.rules("negatives"), (False,), ())[0].round().long()
    return counts if state.problem.hard is None else counts + state.problem.hard_negatives()[1].sum(1)


def evaluate(problem: Problem, survey: Survey, parts: Sequence[Part]) -> list[Tensor]:
    """The value ``(a,)`` of each part, with its gradient."""
    state = survey.state if isinstance(survey.state, State) else State(problem)
    codes = [translate.code_of(part.link) for part in parts]
    ours = [
        place for place, part in enumerate(parts)
        if codes[place] is not None and (part.hardest or 0) < LARGEST_TAIL
    ]  # fmt: skip
    values: dict[int, Tensor] = {}
    for start in range(0, len(ours), MOST_SUMS):
        places = ours[start : start + MOST_SUMS]
        asked = _asked(state, survey, [(parts[place], codes[place]) for place in places])
        near = state.near([parts[place] for place in places])
        values |= dict(zip(places, ops.sums(asked.matrix, near, *asked[1:]).unbind(), strict=True))
    others = [place for place in range(len(parts)) if place not in ours]
    if others:
        sums = _by_loop(state, [parts[place] for place in others])
        values |= dict(zip(others, sums, strict=True))
    return [values[place] for place in range(len(parts))]


ENGINE = Engine("fused", survey, evaluate)


def _by_loop(state: "State", parts: Sequence[Part]) -> list[Tensor]:
    """Sums that the kernels cannot compute. The hardest are by the loop's own shortfalls: thresholds of the kernels
    differ by rounding, which splits ties."""
    numbers = tuple({part.hardest for part in parts if part.hardest is not None})
    near = None if numbers else state.near(parts)
    with torch.no_grad():
        known = chunked.ENGINE.survey(state.problem, Need(hardest=numbers)) if numbers else NOTHING_KNOWN
    swept = Swept(state.searched or bool(numbers), None if near is None else Near(*near[:2]))
    return chunked.ENGINE.evaluate(state.problem, known._replace(state=swept), parts)


class State:
    """The rows of a problem as the kernels read them, and each anchor's nearest candidates, found when they are first
    needed."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.searched = problem, False
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
        cosine = problem.score == "cosine"
        self.matrix = launch.Matrix(*rows, tuple(operands), of_anchor, of_candidate, cosine)
        self._near: launch.Nearest | None = None

    def search(
        self, tail: TailConfig | None, numbers: tuple[int, ...]
    ) -> tuple[TailStats | None, dict[int, Tensor]]:
        """Tail statistics, and thresholds for these numbers of hardest negatives."""
        settings = self.rules("negatives"), ops.fields_of(tail), numbers
        lines, has_fit, thresholds, _, *near = ops.run(*ops.call_on(self.matrix, "search", *settings))
        self._near, self.searched = launch.Nearest(*near), True
        stats = None
        if tail is not None:
            rho, beta, daic = lines
            lam = ops.gate(rho, daic, has_fit, _pivot(self.problem, rho, tail), tail)
            stats = TailStats(rho, beta, daic, lam)
        return stats, dict(zip(numbers, thresholds, strict=True))

    def near(self, parts: Sequence[Part]) -> "launch.Nearest | None":
        """Exact shortfalls of the nearest candidates, as far as they are known or these sums need them: of negatives
        if a logit is steep near the cap or a threshold may lie there, and of positives that such a sum is over."""
        near_cap = [part for part in parts if part.link.near_cap or part.hardest is not None]
        wanted = (
            1 + any(part.among == "positives" for part in near_cap) if near_cap and self.matrix.cosine else 0
        )
        known = 0 if self._near is None else self._near.cols.shape[1] // launch.EXACT
        if known < wanted:
            rules = [self.rules("negatives"), self.rules("positives")][:wanted]
            call, tensors = ops.call_on(self.matrix, "nearest", *rules)
            with torch.no_grad():
                self._near = launch.Nearest(*ops.run(call, [*tensors, *(self._near or ())]))
        return self._near

    def rules(self, among: str) -> Any:
        """The number of negatives or of positives, as a sum; it has their rules."""
        rules = (self.problem.negatives if among == "negatives" else self.problem.positives) or ()
        return self.recorded((("sum", None, (), tuple(rule.name for rule in rules)),))

    def recorded(self, asked: tuple[tuple[Any, ...], ...]) -> Any:
        """The recorded sums; in a compiled graph the request. ``asked``: fields of ``translate.Asked``."""
        types = tuple(
            tuple((name, _type_of(value)) for name, value in side.items())
            for side in (self.matrix.of_anchor, self.matrix.of_candidate)
        )
        request = (translate.REQUEST, asked, types, self.matrix.cosine, self.problem.symmetric)
        # A compiler must not trace the recording: the operator's number stands for it.
        return request if torch.compiler.is_compiling() else translate.recorded(request)


def _pivot(problem: Problem, rho: Tensor, tail: TailConfig) -> Tensor | None:
    """Pivot of the gate; None if the kernel computes it."""
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


class Asked(NamedTuple):
    """Arguments of ``ops.sums``."""

    matrix: Any
    recorded: Any
    tops: tuple[bool, ...]
    learned: tuple[tuple[int, str], ...]


def _asked(state: State, survey: Survey, sums: Sequence[tuple[Part, Any]]) -> Asked:
    """The sums of one pass: each part with its link as the kernels record it."""
    problem = state.problem
    columns = dict(state.matrix.of_anchor)
    asked: list[tuple[Any, ...]] = []
    tops: list[bool] = []
    learned: list[tuple[int, str]] = []
    held: list[tuple[Tensor, str]] = []  # tensors of links: sums that share one share what is computed of it
    for place, (part, code) in enumerate(sums):
        parameters, threshold = [], ""
        for name, value in part.link.tensors().items():
            at = next((name for tensor, name in held if tensor is value), "")
            if not at:
                at = f"parameter {len(held)}"
                held.append((value, at))
                columns[at] = value.to(problem.anchors.device).reshape(-1).contiguous()
            wanted = value.requires_grad and torch.is_grad_enabled()
            # A compiler takes no comparison for a constant.
            each = True if value.numel() > 1 else False  # noqa: SIM210
            parameters.append((name, at, each, wanted))
            learned += [(place, at)] * wanted
        if part.hardest is not None:
            threshold = f"threshold of {part.hardest}"
            columns[threshold] = survey.thresholds[part.hardest].contiguous()
        asked.append((part.kind, code, tuple(parameters), _names(problem, part), threshold))
        # Whether the nearest negative has the largest logit, and is known.
        falls = part.link.falls and part.kind == "lse" and part.among == "negatives"
        tops.append(state.searched and falls and "offset" not in problem.of_candidate)
    if survey.unless is not None:
        columns["unless"] = survey.unless.reshape(1)
    matrix = state.matrix._replace(anchors=problem.anchors, candidates=problem.candidates, of_anchor=columns)
    return Asked(matrix, state.recorded(tuple(asked)), tuple(tops), tuple(learned))


def _names(problem: Problem, part: Part) -> tuple[str, ...]:
    """Names of the rules for the candidates of a sum."""
    names = tuple(rule.name for rule in rules_of(problem, part))
    return names if part.hardest is None else (*names, AMONG_HARDEST.name)


def _type_of(column: Tensor) -> str:
    if column.dtype == torch.bool:
        return "mask"
    return "float" if column.is_floating_point() else "int"
