"""The sums over candidates that a loss can request, and the batch of which it requests them.

A loss names its sums, an engine computes them in one pass, and the loss combines the results in plain torch.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from weince.links import Link, as_link
from weince.own_links import check_elementwise, check_learned
from weince.pairs import SAME_VIEW, Problem, Rule
from weince.parameters import check_choice, is_number
from weince.scores import dot, log1pexp, log_add, row_shortfall
from weince.tail import TailConfig, TailStats

AnyLink = Link | Callable[..., Tensor]


class LogSumExp:
    """``log sum exp(logit)`` over an anchor's negatives.

    Args:
        link: Maps scores to logits: a :class:`weince.Link`, or a plain function of the score.
        hardest: Sum only over this many negatives with the largest scores, and over scores equal to the last of them
            (those of identical rows may differ in their last bit); None for all.
        same_view: Sum over the negatives of the anchor's own view only (``candidates="views"``).
        positive: Link of the positive; by default that of the negatives.

    Examples:
        >>> import torch
        >>> from weince import ContrastiveLoss, LogSumExp, SoftmaxLink
        >>> class Hardest(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         return LogSumExp(SoftmaxLink(0.1), hardest=10)
        ...     def combine(self, lse):
        ...         return lse.value - lse.positive
        >>> Hardest()(torch.randn(16, 8), torch.randn(16, 8)).shape
        torch.Size([])
    """

    def __init__(
        self,
        link: AnyLink,
        *,
        hardest: int | None = None,
        same_view: bool = False,
        positive: AnyLink | None = None,
    ) -> None:
        if hardest is not None and (not is_number(hardest, int) or hardest < 1):
            raise ValueError(
                f"hardest must be an int of at least 1, or None for all negatives; got {hardest!r}"
            )
        if hardest is not None and same_view:
            raise ValueError(
                f"hardest counts the negatives of both views; got hardest={hardest} with same_view=True"
            )
        self.link = link if isinstance(link, Link) else as_link(link)
        self.positive = self.link if positive is None else as_link(positive)
        self.hardest, self.same_view = hardest, same_view


class SoftplusSum:
    """``sum log(1 + exp(logit))`` over an anchor's negatives, or over its positives.

    Examples:
        >>> import torch
        >>> from weince import AffineLink, ContrastiveLoss, SoftplusSum
        >>> class Repel(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         return SoftplusSum(AffineLink(10.0, -10.0))
        ...     def combine(self, total):
        ...         return total
        >>> bool(Repel()(torch.randn(16, 8), torch.randn(16, 8)) > 0)
        True
    """

    def __init__(self, link: AnyLink, *, among: Literal["negatives", "positives"] = "negatives") -> None:
        check_choice("among", among, ("negatives", "positives"))
        self.link, self.among = as_link(link), among


class Count:
    """The number of negatives of an anchor.

    Examples:
        >>> import torch
        >>> from weince import ContrastiveLoss, Count
        >>> class Negatives(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         return Count()
        ...     def combine(self, count):
        ...         return count
        >>> Negatives()(torch.randn(16, 8), torch.randn(16, 8))  # 2 * 16 - 2
        tensor(30.)
    """


Sum = LogSumExp | SoftplusSum | Count


class Summed(NamedTuple):
    """An engine's result for one sum; each tensor holds one number per anchor, ``(anchors,)``.

    ``value``: the sum; 0 without negatives. ``positive``: the positive's logit; the mean over several positives.
    ``spread``: log-sum-exp of the positives' logits minus their mean; None with one positive. ``link``: the link of
    the negatives. ``alone``: True for anchors without negatives; None if all have some. ``positives``:
    number of positives; None with one positive.

    Examples:
        >>> import torch
        >>> from weince import ContrastiveLoss, LogSumExp, SoftmaxLink
        >>> class Mine(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         return LogSumExp(SoftmaxLink(0.1))
        ...     def combine(self, lse):  # a Summed
        ...         return lse.cross_entropy()
        >>> Mine()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    value: Tensor
    positive: Tensor
    spread: Tensor | None
    link: Link
    alone: Tensor | None = None
    positives: Tensor | None = None

    def of_positives(self) -> Tensor:
        """Log-sum-exp of the positives' logits."""
        return self.positive if self.spread is None else self.positive + self.spread

    def cross_entropy(self) -> Tensor:
        """``-log softmax`` of the positive among all candidates, averaged over the positives.

        A loss as small as 1e-14 stays accurate in float32.
        """
        of_positives = self.positive if self.spread is None else self.of_positives()
        by_negatives = log1pexp(self.value - of_positives)
        if self.alone is not None:
            by_negatives = by_negatives.masked_fill(self.alone, 0)
        return by_negatives if self.spread is None else by_negatives + self.spread


class Part(NamedTuple):
    """One sum over the candidates, as engines see it.

    ``lse``: log-sum-exp of logits. ``sum``: their sum. ``softplus``: sum of their softplus.
    """

    link: Link
    kind: Literal["lse", "sum", "softplus"]
    among: Literal["negatives", "same view", "positives"] = "negatives"
    hardest: int | None = None

    def rows(self, start: int, stop: int) -> "Part":
        """The part for some of the anchors."""
        return self._replace(link=self.link.rows(start, stop))


class Need(NamedTuple):
    """What a loss needs to know of the negatives before it names its sums.

    ``tail``: tail statistics. ``hardest``: thresholds of these numbers of hardest negatives. ``smallest``: so many of
    all pairs' shortfalls. ``counts``: numbers of negatives. ``again``: keep for a second call what sums share.

    Examples:
        >>> from weince import TailConfig
        >>> from weince.engines import Need
        >>> Need(tail=TailConfig(k=50), hardest=(10,)).hardest
        (10,)
    """

    tail: TailConfig | None = None
    hardest: tuple[int, ...] = ()
    smallest: int = 0
    counts: bool = False
    again: bool = False


NOTHING = Need()


class Survey(NamedTuple):
    """What an engine has found out about the negatives, without gradient; None for what nobody asked.

    ``stats``: tail statistics. ``thresholds``: for each number of hardest negatives, the shortfall ``(a,)`` up to
    which a negative is one of them. ``negatives``: their number, ``(a,)``, or ``(1,)`` if all have the same.
    ``smallest``: those shortfalls, over all ranks, ascending. ``state``: what ``evaluate`` of this engine can use.
    ``unless``: a condition ``()`` on the device; where it holds, the next sums may be anything.

    Examples:
        >>> import torch
        >>> from weince.engines import Need, dense
        >>> from weince.layouts import problems
        >>> (problem,) = problems("cross", torch.randn(8, 4), torch.randn(8, 4))
        >>> dense.ENGINE.survey(problem, Need(smallest=3)).smallest.shape
        torch.Size([3])
    """

    stats: TailStats | None = None
    thresholds: Mapping[int, Tensor] = MappingProxyType({})
    negatives: Tensor | None = None
    smallest: Tensor | None = None
    state: Any = None
    unless: Tensor | None = None


NOTHING_KNOWN = Survey()


class Engine(NamedTuple):
    """Two pure functions that compute the sums of a problem in their own way; each may be called again.

    ``survey(problem, need)`` finds out about the negatives. ``evaluate(problem, survey, parts)`` returns the value
    ``(a,)`` of each part, with its gradient; the survey has the thresholds of all parts. ``hard`` negatives enter the
    survey alone: :class:`Batch` adds them to the sums.

    Examples:
        >>> from weince.engines import chunked
        >>> chunked.ENGINE.name
        'chunked'
    """

    name: str
    survey: Callable[[Problem, Need], Survey]
    evaluate: Callable[[Problem, Survey, Sequence[Part]], list[Tensor]]


def rules_of(problem: Problem, part: Part) -> tuple[Rule, ...]:
    """The rules of the pairs that a sum is about; of the hardest negatives it takes those up to a threshold."""
    if part.among == "positives":
        assert problem.positives is not None
        return problem.positives
    return (*problem.negatives, SAME_VIEW) if part.among == "same view" else problem.negatives


def parts_of(request: Sum, several: bool) -> list[Part]:
    """The parts of a sum that need a pass over the candidates. A single positive needs none."""
    if isinstance(request, Count):
        return []
    if isinstance(request, SoftplusSum):
        wanted = several or request.among == "negatives"
        return [Part(request.link, "softplus", request.among)] if wanted else []
    among = Part(request.link, "lse", "same view" if request.same_view else "negatives", request.hardest)
    if not several:
        return [among]
    return [among, Part(request.positive, "lse", "positives"), Part(request.positive, "sum", "positives")]


def positive_shortfall(problem: Problem) -> Tensor:
    """``(a,)`` exact shortfall of each anchor's one positive."""
    row = problem.of_anchor["positive"]
    if problem.score == "dot":
        return 1 - dot(problem.anchors, problem.candidates[row])
    return row_shortfall(problem.anchors, problem.candidates, row, problem.symmetric)


class Batch:
    """What the ``sums`` of a loss may ask about the anchors of a batch; read-only.

    Args:
        problem: Anchors, candidates, and the rules of their pairs.
        engine: What computes the sums.
        need: What the loss needs to know before it names its sums.

    Examples:
        >>> import torch
        >>> from weince import ContrastiveLoss, LogSumExp, SoftmaxLink
        >>> class Loss(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         print(batch.negatives(), batch.positive_scores().shape)
        ...         return LogSumExp(SoftmaxLink(0.1))
        ...     def combine(self, lse):
        ...         return lse.value - lse.positive
        >>> value = Loss()(torch.randn(4, 8), torch.randn(4, 8))
        tensor([6]) torch.Size([8])
    """

    def __init__(self, problem: Problem, engine: Engine, need: Need = NOTHING) -> None:
        self.problem, self.engine = problem, engine
        with torch.no_grad():
            self.survey = NOTHING_KNOWN if need == NOTHING else engine.survey(problem, need)
        self.uniform = True
        for rule in problem.negatives:
            if rule.row is None:
                self.uniform = False
        """Whether all anchors have the same number of negatives."""
        several = problem.positives is not None
        self._shortfall = None if several else positive_shortfall(problem)
        self.positives = problem.count_positives() if several else None
        """``(anchors,)`` number of positives; None if each anchor has one."""

    @property
    def stats(self) -> TailStats:
        """Tail statistics of every anchor. The loss must ask for them: ``tail = TailConfig()`` in its class."""
        if self.survey.stats is None:
            raise ValueError(
                "batch.stats wants tail = TailConfig() in the class of the loss; got a loss without it"
            )
        return self.survey.stats

    def positive_scores(self) -> Tensor:
        """``(anchors,)`` score of each anchor's one positive, with its gradient."""
        if self._shortfall is None:
            raise ValueError("the score of the one positive was asked for; got labels, so several positives")
        return 1 - self._shortfall

    def negatives(self) -> Tensor:
        """Number of negatives of each anchor, ``(anchors,)``, or ``(1,)`` if it is the same for all."""
        problem = self.problem
        if problem.uniform:
            return torch.full((1,), problem.most_negatives, device=problem.anchors.device)
        if self.survey.negatives is None:
            self._learn(counts=True)
        assert self.survey.negatives is not None
        return self.survey.negatives

    def pairs(self) -> Tensor:
        """Number of pairs of an anchor and a negative, over all ranks; 0-dimensional."""
        numbers, ranks = self.negatives(), self.problem.ranks
        here = numbers.sum() if len(numbers) > 1 else numbers[0] * len(self.problem.anchors)
        return here if ranks is None else ranks.sum(here)

    def smallest(self, count: int) -> Tensor:
        """The ``(count,)`` smallest shortfalls over all pairs of an anchor and a negative, ascending; no gradient."""
        if self.survey.smallest is None or len(self.survey.smallest) != count:
            self._learn(smallest=count)
        assert self.survey.smallest is not None
        return self.survey.smallest

    def sample(self, most_pairs: int) -> "Batch":
        """A batch of evenly spaced anchors, with about ``most_pairs`` pairs; this one if it has no more."""
        if self.problem.most_pairs <= most_pairs:
            return self
        return Batch(self.problem.every(-(-self.problem.most_pairs // most_pairs)), self.engine)

    def gather(self, values: Tensor) -> Tensor:
        """One value per local anchor, without gradient, to those of all ranks' anchors."""
        ranks = self.problem.ranks
        return values if ranks is None else ranks.gather(values)

    def log_sums_exp(self, links: Sequence[Link], unless: Tensor | None = None) -> list[Tensor]:
        """Log-sum-exp ``(anchors,)`` of all negatives' logits under each link, without gradient.

        ``unless``: a condition ``()`` on the device; where it holds, nobody needs the values, and a kernel may stop.
        """
        with torch.no_grad():
            return self.values([Part(link, "lse") for link in links], unless)

    def sums(self, sums: Sequence[Sum]) -> list["Summed | Tensor"]:
        """Results of the sums, in order: ``Summed`` for a log-sum-exp, a tensor ``(anchors,)`` for others."""
        several = self.positives is not None
        parts: list[Part] = []
        ends = []
        for request in sums:
            parts += parts_of(request, several)
            ends.append(len(parts))
        for part in parts:
            if part.link.straight is None:  # fixed numbers need no check
                _check(part.link, self.problem.anchors)
        values, start, results = self.values(parts), 0, []
        for request, end in zip(sums, ends, strict=True):
            results.append(self._result(request, values[start:end]))
            start = end
        return results

    def values(self, parts: Sequence[Part], unless: Tensor | None = None) -> list[Tensor]:
        """The value ``(anchors,)`` of each part, with its gradient; anything where ``unless`` holds."""
        if not parts:
            return []
        missing = set()
        for part in parts:
            if part.hardest is not None and part.hardest not in self.survey.thresholds:
                missing.add(part.hardest)
        if missing:
            self._learn(hardest=tuple(sorted(missing)))
        survey = self.survey if unless is None else self.survey._replace(unless=unless)
        values = self.engine.evaluate(self.problem, survey, parts)
        if self.problem.hard is None:
            return values
        hard = self.problem.hard_negatives()
        return [self._with_hard(part, value, *hard) for part, value in zip(parts, values, strict=True)]

    def _learn(self, **need: Any) -> None:
        """Survey the negatives once more; what is known stays."""
        with torch.no_grad():
            more = self.engine.survey(self.problem, Need(**need))
        known = {name: value for name, value in more._asdict().items() if value is not None}
        known["thresholds"] = {**self.survey.thresholds, **more.thresholds}
        if self.survey.state is not None:
            known["state"] = self.survey.state
        self.survey = self.survey._replace(**known)

    def _result(self, request: Sum, values: Sequence[Tensor]) -> "Summed | Tensor":
        problem = self.problem
        if isinstance(request, Count):
            # clone, since a user's loss may change it in place
            return self.negatives().to(problem.anchors.dtype).expand(len(problem.anchors)).clone()
        if isinstance(request, SoftplusSum):
            if request.among == "positives" and self._shortfall is not None:
                return log1pexp(self._positive_logit(request.link))
            return values[0]
        value = values[0]
        alone = None if self.uniform else value == -torch.inf
        if alone is not None:
            value = torch.where(alone, 0.0, value)
        if self.positives is None:
            return Summed(value, self._positive_logit(request.positive), None, request.link, alone)
        _, together, total = values
        mean = total / self.positives.clamp_min(1)
        spread = torch.where(self.positives > 0, together, mean) - mean
        return Summed(value, mean, spread, request.link, alone, self.positives)

    def _positive_logit(self, link: Link) -> Tensor:
        """``(anchors,)`` logit of each anchor's one positive."""
        assert self._shortfall is not None
        if link.straight is None:
            logit = link.logit(self._shortfall).to(self._shortfall.dtype)
        else:
            scale, bias = link.straight
            logit = (1 - self._shortfall) * scale + bias
        offset = self.problem.of_candidate.get("offset")
        return logit if offset is None else logit + offset[self.problem.of_anchor["positive"]]

    def _with_hard(self, part: Part, value: Tensor, shortfall: Tensor, mask: Tensor) -> Tensor:
        """A sum with each anchor's own hard negatives, ``(a, k)``."""
        if part.among == "positives":
            return value
        if part.hardest is not None:
            mask = mask & ~(shortfall.detach() > self.survey.thresholds[part.hardest].unsqueeze(1))
        # A user's link need not be finite where no pair takes part.
        taken = shortfall.detach().where(mask, torch.inf).amin().nan_to_num(posinf=1.0)
        logits = part.link.logit(torch.where(mask, shortfall, taken)).to(value.dtype)
        of_hard = self.problem.of_hard or {}
        if "offset" in of_hard:
            logits = logits + of_hard["offset"]
        if part.kind == "lse":
            return log_add(value, torch.where(mask, logits, -torch.inf))
        return value + torch.where(mask, log1pexp(logits) if part.kind == "softplus" else logits, 0.0).sum(1)


def _check(link: Link, anchors: Tensor) -> None:
    """Raise if a link cannot be summed, or would get a wrong gradient."""
    link.check_anchors(len(anchors))
    check_elementwise(link, anchors)
    check_learned(link, anchors)
