"""The fused engine: Triton kernels for CUDA, with memory linear in the batch.

One pass finds the hardest negatives, if the loss asks for them, one computes up to eight sums, and one computes the
gradient. The passes for sums and gradient never write scores to memory. A user's own link is translated for the
kernels; a link that cannot be translated goes through the chunked engine.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weince import scores
from weince.engines.base import Engine, Need
from weince.engines.chunked import Chunked, Near
from weince.engines.tile import Part
from weince.links import (
    SMALLEST,
    AffineLink,
    AtanhLink,
    BlendLink,
    FunctionLink,
    Link,
    MomentLink,
    PowerLink,
    ShortfallLink,
    SoftmaxLink,
)
from weince.pairs import Problem
from weince.parameters import Scalar, unrounded
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
        from weince.engines.kernels import logits, ops, search, translate

        scores.row_kernels = scores.RowKernels(ops.rows_served, ops.unit_rows, ops.unit_gradient)
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
    for name, columns in (
        ("offset", problem.of_candidate),
        ("limit", problem.of_anchor),
        ("across", problem.of_candidate),
    ):
        if name in columns:
            return f"the kernels do not read the column {name}"
    if problem.score != "cosine" or problem.hard is not None:
        return "the kernels serve cosines, and no negatives of one anchor alone"
    if need.tail is not None and need.tail.tail_size(problem.most_negatives) > LARGEST_TAIL:
        return f"the fused engine fits tails of {LARGEST_TAIL} at the most; got {need.tail}"
    return None


class Form(NamedTuple):
    """A link in the formula of the kernels: ``g s + b - w log(offset + max(d, lowest)) + v log(max(2 - d, floor))``.

    None: the link lacks this term. ``cap``: ``offset`` and ``lowest``. ``falls``: the logit never rises with the
    shortfall. ``function``: key of a function that computes the logit from score and ``g, b, w, v`` instead, or 0.
    """

    g: Scalar | None = None
    b: Scalar | None = None
    w: Scalar | None = None
    v: Scalar | None = None
    cap: tuple[float, float] | None = None
    floor: float | None = None
    falls: bool = True
    function: int = 0


def form_of(link: Link) -> Form | None:
    """The form of a link; None if the kernels do not support the link."""
    kind = type(link)  # exactly this class: a subclass may override logit
    if isinstance(link, SoftmaxLink) and kind is SoftmaxLink:
        return Form(g=1 / unrounded(link.temperature))
    if isinstance(link, AffineLink) and kind is AffineLink:
        return Form(g=link.scale, b=link.bias, falls=False)
    if isinstance(link, ShortfallLink) and kind is ShortfallLink:
        beyond = link.endpoint - 1
        return Form(w=link.beta, cap=(beyond, link.eps - beyond))
    if isinstance(link, BlendLink) and kind is BlendLink:
        lam, beta, temperature = (unrounded(value) for value in (link.lam, link.beta, link.temperature))
        return Form(g=(1 - lam) / temperature, w=lam * beta, cap=(link.offset, link.eps))
    if isinstance(link, PowerLink) and kind is PowerLink:
        return Form(b=unrounded(link.alpha) * -_LOG_2, v=link.alpha, floor=2 * link.eps)
    if isinstance(link, AtanhLink) and kind is AtanhLink:
        return Form(w=1.0, v=1.0, cap=(0.0, link.eps), floor=link.eps)
    if isinstance(link, MomentLink) and kind is MomentLink:
        # b takes the scale off again: the kernels have the score times g, and here the shortfall counts
        form = Form(g=link.scale, b=link.scale * (link.origin - 1))
        return form._replace(w=-float(link.power), cap=(0.0, SMALLEST), falls=False) if link.power else form
    # Not in a compiled graph, which would trace the recording of the function.
    if isinstance(link, FunctionLink) and kind is FunctionLink and not torch.compiler.is_compiling():
        key = translate.key_of(link)
        g, b, w, v, *_ = (*link.parameters.values(), None, None, None, None)
        return None if key is None else Form(g, b, w, v, falls=False, function=key)
    return None


_LOG_2 = 0.6931471805599453


class _Pass(NamedTuple):
    """Sums that share a pass: their indices among all sums, their parts and their forms."""

    places: list[int]
    parts: list[Part]
    forms: list[Form]

    def takes(self, form: Form) -> bool:
        """Whether a sum fits in: there is room, and ``cap``, ``floor`` and ``function`` agree with those here."""
        same = all(
            ours is None or theirs is None or ours == theirs
            for mine in self.forms
            for ours, theirs in (
                (mine.cap, form.cap),
                (mine.floor, form.floor),
                (mine.function or None, form.function or None),
            )
        )
        return same and len(self.parts) < MOST_SUMS

    @property
    def cap(self) -> list[float]:
        """``offset``, ``lowest`` and ``floor``, which all sums of the pass share."""
        cap = next((form.cap for form in self.forms if form.cap is not None), (0.0, 0.0))
        floor = next((form.floor for form in self.forms if form.floor is not None), 0.0)
        return [float(number) for number in (*cap, floor)]


class Fused(Engine):
    name = "fused"

    def survey(self) -> None:
        problem = self.problem
        anchors, candidates = problem.raw or (problem.anchors.detach(), problem.candidates.detach())
        self.rows = [problem.anchors.detach(), problem.candidates.detach()]
        self.operands = list(ops.run("operand", anchors))
        if not problem.symmetric:
            self.operands += ops.run("operand", candidates)
        self.roles, self.given = _roles(problem)
        self.near: list[Tensor] = []
        self.nearest_known = False  # near holds the nearest of every anchor, also far from the cap
        self.thresholds: dict[int, Tensor] = {}
        self._negatives: Tensor | None = None
        if self.need.tail is not None:
            self._search(self.need.tail, self.need.hardest)

    def _search(self, tail: TailConfig | None, numbers: Sequence[int]) -> None:
        """Find tail statistics, thresholds for these numbers of hardest negatives, and every anchor's nearest."""
        numbers = [number for number in numbers if number < LARGEST_TAIL]
        stats, made, thresholds, negatives, *near = ops.run(
            "search",
            *self.rows,
            self.operands,
            self.roles,
            self.given,
            self.problem.most_negatives,
            ops.pack(tail),
            numbers,
        )
        if not self.nearest_known:
            self.near, self.nearest_known = near, True
        self.thresholds |= dict(zip(numbers, thresholds, strict=True))
        self._negatives = None if self.problem.uniform else negatives
        if tail is not None:
            rho, beta, daic = stats
            lam = ops.run("gate", rho, daic, made, self._pivot(rho, tail), ops.pack(tail))
            self.surveyed = TailStats(rho, beta, daic, lam)

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

    def count_negatives(self) -> Tensor:
        if self._negatives is None:
            self._negatives = ops.run(
                "count_negatives", self.rows[0], self.roles, self.given, len(self.rows[1])
            )
        return self._negatives

    def smallest(self, count: int) -> Tensor:
        return self._chunked().smallest(count)

    def _for(self, problem: Problem) -> Engine:
        return Chunked(problem)  # a sample is small enough to do without kernels

    def _positive_shortfall(self) -> Tensor:
        problem = self.problem
        if "positive" not in problem.of_anchor:
            return super()._positive_shortfall()  # which says what is wrong
        positive = problem.of_anchor["positive"]
        found = ops.apart(problem.anchors, problem.candidates, positive, problem.symmetric)
        return super()._positive_shortfall() if found is None else found

    def _chunked(self) -> Chunked:
        """A chunked engine for the same problem; it supports every link."""
        loop = Chunked(self.problem)
        loop.sharp = self.need.tail is not None
        return loop

    def evaluate(self, parts: Sequence[Part]) -> list[Tensor]:
        values: list[Tensor | None] = [None] * len(parts)
        passes, others = _passes(parts)
        for one in passes:
            for place, value in zip(one.places, self._evaluate(one), strict=True):
                values[place] = value
        if others:
            own = [parts[place] for place in others]
            loop = self._chunked()
            # The hardest are by its own shortfalls: thresholds of the kernels differ by rounding, which splits ties.
            if all(part.hardest is None for part in own):
                self._prepare(own)
                loop.near = Near(*self.near[:2]) if self.near else None
            found = loop.evaluate(own)
            for place, value in zip(others, found, strict=True):
                values[place] = value
        return [value for value in values if value is not None]

    def _evaluate(self, one: _Pass) -> Sequence[Tensor]:
        """The sums of one pass."""
        self._prepare(one.parts)
        coefs, learn = self._coefficients(one.forms)
        numbers = list(dict.fromkeys(part.hardest for part in one.parts if part.hardest is not None))
        thresholds = [self.thresholds[number] for number in numbers]
        limits = thresholds[0].unsqueeze(0) if len(thresholds) == 1 else self.operands[1]
        if len(thresholds) > 1:
            limits = torch.stack(thresholds)
        spec = [
            self._spec(part, form, numbers.index(part.hardest) + 1 if part.hardest is not None else 0)
            for part, form in zip(one.parts, one.forms, strict=True)
        ]
        values = ops.sums(
            self.problem.anchors, self.problem.candidates, coefs, limits, self.operands, self.roles, self.given,
            self.near, spec, one.cap, learn,
        )  # fmt: skip
        return list(values.unbind())

    def _prepare(self, parts: Sequence[Part]) -> None:
        """Find the thresholds and the exact shortfalls that these sums need, unless they are known."""
        with torch.no_grad():
            missing = {part.hardest for part in parts if part.hardest is not None} - set(self.thresholds)
            if missing:
                self._search(None, sorted(missing))
            steep = {part.among == "positives" for part in parts if part.link.near_cap}
            known = 0 if not self.near else self.near[0].shape[1]
            wanted = 8 if True in steep else 4 if steep else 0
            if known < wanted:
                self.near = list(
                    ops.run(
                        "nearest", *self.rows, self.operands, self.roles, self.given, self.near, wanted == 8
                    )
                )

    def _coefficients(self, forms: Sequence[Form]) -> tuple[Tensor, int]:
        """Coefficients of all sums, one per row, ``(., 1)`` or ``(., anchors)``; and the bits of learned ones."""
        plain = all(form.b is None and form.w is None and form.v is None for form in forms)
        device, anchors = self.problem.anchors.device, len(self.problem.anchors)
        lines: list[Tensor] = []
        learn = 0
        for form in forms:
            for bit, value in enumerate((form.g, form.b, form.w, form.v)[: 1 if plain else 4]):
                number: Scalar = 0.0 if value is None else value
                if not isinstance(number, Tensor):
                    lines.append(torch.full((1,), number, dtype=torch.float32, device=device))
                    continue
                learn |= (number.requires_grad and torch.is_grad_enabled()) << bit
                lines.append(number.to(device, torch.float32).reshape(-1))
        width = anchors if any(line.shape[0] > 1 for line in lines) else 1
        if len(lines) == 1:
            return lines[0].reshape(1, -1).contiguous(), learn
        return torch.stack([line.expand(width) for line in lines]), learn

    def _spec(self, part: Part, form: Form, limit: int) -> int:
        bits = {"lse": logits.LSE, "sum": logits.SUM, "softplus": logits.SOFTPLUS}[part.kind].value
        known = self.nearest_known and form.falls and part.among == "negatives" and part.kind == "lse"
        for bit, holds in (
            (logits.SAME_VIEW, part.among == "same view"),
            (logits.OF_POSITIVES, part.among == "positives"),
            (logits.USES_B, form.b is not None),
            (logits.USES_W, form.w is not None),
            (logits.USES_V, form.v is not None),
            (logits.TOP_KNOWN, known),
            (logits.BY_FUNCTION, form.function > 0),
        ):
            bits |= bit.value * holds
        return int(bits | limit << 12 | form.function << 16)


def _passes(parts: Sequence[Part]) -> tuple[list[_Pass], list[int]]:
    """Group the parts into passes; also return the indices of parts that the kernels do not support."""
    passes: list[_Pass] = []
    others = []
    for place, part in enumerate(parts):
        form = form_of(part.link)
        if form is None or (part.hardest or 0) >= LARGEST_TAIL:
            others.append(place)
            continue
        own = next((one for one in passes if one.takes(form)), None)
        if own is None:
            passes.append(own := _Pass([], [], []))
        own.places.append(place)
        own.parts.append(part)
        own.forms.append(form)
    return passes, others


def _roles(problem: Problem) -> tuple[list[Tensor], int]:
    """Tensors that determine the roles of pairs, and bits that tell which of ``launch.GIVEN`` they are."""
    anchor, candidate = problem.of_anchor, problem.of_candidate
    found: list[Tensor | None] = [anchor.get("positive"), anchor.get("position")]
    for name in ("id", "label", "view"):
        # The kernels read them one after the other, whatever the strides.
        found += (
            [None, None] if name not in anchor else [anchor[name].contiguous(), candidate[name].contiguous()]
        )
    found.append(anchor.get("ignore"))
    given = sum((value is not None) << bit for bit, value in enumerate(found))
    return [value for value in found if value is not None], given
