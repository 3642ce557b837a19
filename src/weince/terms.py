"""What an engine is asked for: terms, each a link and who takes part, and links that learn from the batch.

An engine first surveys the batch's hardest negatives (:class:`Survey`), then *binds* every link to what it
found, then computes the loss. Most links bind to themselves; WEINCE's takes its weights from the tail.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from weince.candidates import Contest
from weince.links import BlendLink, Link, Scalar, ShortfallLink, check_positive
from weince.scores import wide
from weince.tail import TailConfig, TailStats, fit_tail


class Survey(Protocol):
    """What an engine can tell of a batch's negatives before it computes the loss."""

    contest: Contest
    stats: TailStats | None

    @property
    def most_pairs(self) -> int:
        """How many pairs of an anchor and a negative there can be at the most."""
        ...

    def pairs(self) -> Tensor:
        """How many there are, 0-dimensional."""
        ...

    def smallest(self, count: int) -> Tensor:
        """``(count,)`` smallest shortfalls of all these pairs, sorted upwards, ``inf`` at the end."""
        ...


class Term(NamedTuple):
    """A cross-entropy over the positive and the negatives, or the ``hardest`` of them, times ``weight``."""

    link: Link
    weight: float = 1.0
    hardest: int | None = None


def terms_of(link: Link, extra: Iterable[Term]) -> list[Term]:
    """The terms of a loss, that of ``link`` first; raises if they cannot be summed into one."""
    if isinstance(extra, Term) or not isinstance(extra, Iterable):  # a Term is a tuple, and not one of terms
        raise TypeError(f"extra must be a list of terms, [Term(SoftmaxLink(0.5), weight=0.5)]; got {extra!r}")
    terms = [Term(link), *extra]
    for term in terms:
        if not isinstance(term, Term) or not isinstance(term.link, Link):
            raise TypeError(f"wanted terms like Term(SoftmaxLink(0.5), weight=0.5); got {term!r}")
        if term.hardest is not None and term.hardest < 1:
            raise ValueError(f"hardest must be at least 1, or None for all negatives; got {term.hardest}")
    tails = [term.link.tail for term in terms if isinstance(term.link, WeinceLink)]
    # Compared only where it must be: a graph for all batch sizes does not know the numbers in it.
    if any(tail is not tails[0] and tail != tails[0] for tail in tails):
        raise ValueError(
            f"all WeinceLinks of one loss must share a TailConfig; got {len(set(tails))} different ones"
        )
    return terms


def described(terms: Sequence[Term]) -> str:
    """What terms compute, in words that are the same in every process; no tensor is read for it."""
    return " + ".join(f"{term.weight} {_described(term.link)} over {term.hardest or 'all'}" for term in terms)


def _described(link: Link) -> str:
    if isinstance(link, nn.Module):
        return f"{type(link).__name__}(training={link.training})"
    names: list[str] = [field.name for field in fields(link)] if is_dataclass(link) else []
    values = {name: getattr(link, name) for name in names}
    known = [f"{name}={v}" for name, v in values.items() if isinstance(v, Real | str | TailConfig)]
    return f"{type(link).__name__}({', '.join(known)})"


@dataclass(frozen=True)
class WeinceLink(Link):
    """The blend of Algorithm 1, with ``lam`` and ``beta`` of each anchor from its own tail."""

    temperature: Scalar = 0.5
    tail: TailConfig = TailConfig()

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        if not isinstance(self.tail, TailConfig):
            raise TypeError(f"tail must be a TailConfig; got {type(self.tail).__name__}")

    def bind(self, survey: Survey) -> BlendLink:
        assert survey.stats is not None
        if torch.compiler.is_compiling():
            _compiling()
        tail = self.tail
        return BlendLink(
            lam=survey.stats.lam,
            beta=self._beta(survey.stats),
            temperature=self.temperature,
            eps=tail.eps,
            soft_cap=tail.soft_cap,
            endpoint=tail.endpoint,
            softmax_at=_positives(survey.contest) if tail.positive == "softmax" else None,
        )

    @property
    def in_kernels(self) -> bool:
        return self.tail.endpoint == 1 and self.tail.positive == "blend" and self.tail.beta != "slope"

    def _beta(self, stats: TailStats) -> Scalar:
        if self.tail.beta == "fit":
            return stats.beta
        if self.tail.beta != "slope":
            return self.tail.beta
        nearest = stats.rho.where(stats.rho.isfinite(), 0.0)  # without negatives lam is 0
        return (nearest + (self.tail.endpoint - 1)) / self.temperature


def _positives(contest: Contest) -> Tensor:
    """``(anchors,)`` column of each anchor's positive among the candidates of all ranks."""
    if contest.positive is None:
        raise ValueError('TailConfig(positive="softmax") wants one positive per anchor; got labels')
    if contest.ranks is not None and len(contest.candidates) < sum(contest.ranks.candidates):
        raise ValueError('TailConfig(positive="softmax") wants all candidates at hand, not gather="ring"')
    return contest.positive


class BatchShortfallLink(nn.Module, Link):
    """A shortfall link whose one slope follows the tail of the whole batch, as in the authors' released code.

    In training, each call fits the slope to the smallest ``share`` of all the batch's negative shortfalls (at
    least ``fewest`` points, the smallest 5 % of them dropped). A fit with a positive slope and R² of at least
    ``least_r2`` is clamped to ``[0.5, 16]`` and moves the running slope; any other leaves it as it stands. (With
    ``candidates="clip"`` each of the two directions is a call.)
    """

    slope_now: Tensor

    def __init__(
        self,
        *,
        share: float = 0.05,
        fewest: int = 1024,
        least_r2: float = 0.85,
        momentum: float = 0.9,
        initial: float = 4.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.share, self.fewest, self.least_r2 = share, fewest, least_r2
        self.momentum, self.eps = momentum, eps
        # One element, not a scalar: torch.compile loses what is written to a float64 scalar on the CPU. In float32,
        # since not every device has float64; a module in float64 (``loss.double()``) keeps all its digits.
        self.register_buffer("slope_now", torch.tensor([initial], dtype=torch.float32))

    def bind(self, survey: Survey) -> ShortfallLink:
        slope = self._moved(survey) if self.training else self.slope_now.clone()
        if self.training:
            _Remember.apply(self.slope_now, slope)  # type: ignore[no-untyped-call]
        return ShortfallLink(slope.squeeze(0), eps=self.eps)

    def _moved(self, survey: Survey) -> Tensor:
        """The running slope after this batch, without waiting for the device."""
        most, pairs = survey.most_pairs, survey.pairs()
        count = min(max(self.fewest, int(self.share * most)), most)
        size = (self.share * wide(pairs)).long().clamp_min(self.fewest).minimum(pairs)
        fit = fit_tail(
            survey.smallest(count).unsqueeze(0), size.unsqueeze(0), TailConfig(drop=0.05, eps=self.eps)
        )
        kept = (fit.r2 >= self.least_r2) & (fit.beta > 0)  # which is 0 where no fit can be made
        fitted, before = fit.beta.clamp(0.5, 16.0), self.slope_now.to(fit.beta.dtype)
        return torch.where(kept, self.momentum * before + (1 - self.momentum) * fitted, before)


def _compiling() -> None:
    """Say what torch 2.6 does not: in one graph it does not make the link that the tail decides."""
    if torch.__version__ < (2, 7):  # type: ignore[operator]
        warnings.warn(
            f"torch.compile makes one graph of WEINCE from torch 2.7 on, and fails with fullgraph=True before; "
            f"got torch {torch.__version__}",
            stacklevel=2,
        )


_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called while the graph is made


class _Remember(torch.autograd.Function):
    """Writes a value into what a module remembers, as a function, since torch.func lets nothing else write there."""

    @staticmethod
    def forward(state: Tensor, value: Tensor) -> Tensor:
        state.copy_(value)
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None
