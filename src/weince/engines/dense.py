"""The dense engine: the whole matrix of shortfalls. The reference, to be read beside Algorithm 1.

The gradient is written out, because autograd would keep a dozen matrices where one is enough. For anchor i
with logits ``l_ij`` the loss is ``-log softmax`` of the positive, so its derivative with respect to a logit is
the softmax weight, less 1 at the positive; times the slope of the link it is the derivative with respect to
the score. That matrix is called ``pull`` here: it is all that the backward pass needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weince.candidates import Contest
from weince.links import Link
from weince.scores import pair_shortfall, product, shortfalls
from weince.tail import TailConfig, TailStats, tail_stats
from weince.terms import Term

EXACT = 8
"""How many of an anchor's hardest negatives have their shortfall computed as ``|a - c|² / 2``.

``1 - s`` has an absolute error of about 1e-7 in float32, so it is good to 1e-4 for shortfalls above 1e-3. More
than a few negatives nearer than that are duplicates, or a collapsed encoder.
"""


class EngineOutput(NamedTuple):
    """Loss of each anchor, ``(anchors,)``; which of them count (None: all); statistics where asked for."""

    loss: Tensor
    counted: Tensor | None
    stats: TailStats | None


def dense(contest: Contest, terms: Sequence[Term], tail: TailConfig | None) -> EngineOutput:
    """Loss of every anchor of a contest: the weighted sum of the terms.

    Args:
        contest: Anchors, candidates and their roles.
        terms: What to sum.
        tail: How to take the tail statistics, where a link or the caller wants them.
    """
    anchors, candidates = contest.anchors, contest.candidates
    with torch.no_grad(), torch.autocast(anchors.device.type, enabled=False):
        matrix = Matrix.of(contest)
        survey = matrix.survey(terms, tail)
        links = [term.link.bind(survey) for term in terms]
        loss, pull, learned = matrix.shortfall.new_zeros(len(anchors)), None, []
        for term, link in zip(terms, links, strict=True):
            term_loss, weight = matrix.contrast(link.logit(matrix.shortfall), survey.columns, term.hardest)
            loss += term.weight * term_loss
            if _learns(link):
                learned.append((link, term.weight * weight))
            force = weight.mul_(link.slope(matrix.shortfall)).mul_(term.weight)
            pull = force if pull is None else pull.add_(force)
    loss = _Pulled.apply(loss, pull, anchors, candidates)
    for link, weight in learned:
        # The derivative of the loss with respect to the link's parameters; its value is 0.
        effect = (weight * link.logit(matrix.shortfall)).sum(1)
        loss = loss + (effect - effect.detach())
    return EngineOutput(loss, matrix.counted, survey.stats)


@dataclass(eq=False)
class Matrix:
    """Shortfalls of anchors to candidates, and their roles.

    Args:
        shortfall: ``(a, c)``. Made exact near the cap by :meth:`survey`.
        not_negative: ``(a, c)`` mask.
        positives: ``(a, c)`` mask where labels decide, else None.
        contest: Where it came from.
    """

    shortfall: Tensor
    not_negative: Tensor
    positives: Tensor | None
    contest: Contest

    @classmethod
    def of(cls, contest: Contest) -> "Matrix":
        shortfall = shortfalls(contest.anchors, contest.candidates)
        return cls(shortfall, contest.not_negative(), contest.same_label(), contest)

    @property
    def counted(self) -> Tensor | None:
        """``(a,)`` anchors that have a positive; None where all have."""
        return None if self.positives is None else self.positives.any(1)

    def survey(self, terms: Sequence[Term], tail: TailConfig | None) -> "DenseSurvey":
        """Find the hardest negatives, as many as the terms and the statistics want."""
        most = self.contest.most_negatives
        near_cap = tail is not None or any(term.link.near_cap for term in terms)
        k = max([EXACT * near_cap, tail.tail_size(most) if tail else 0, *(term.hardest or 0 for term in terms)])
        masked = self.shortfall.masked_fill(self.not_negative, torch.inf) if k else self.shortfall
        hardest, columns = masked.topk(min(k, most), dim=1, largest=False)
        if near_cap:
            self._make_exact(masked, hardest, columns)
        negatives = self.contest.count_negatives(self.not_negative)
        stats = tail_stats(hardest, negatives, tail, self.counted) if tail else None
        return DenseSurvey(stats, columns, masked, negatives)

    def _make_exact(self, masked: Tensor, hardest: Tensor, columns: Tensor) -> None:
        """Replace the smallest shortfalls, of negatives and of positives, by values that did not cancel."""
        near, found = columns[:, :EXACT], hardest[:, :EXACT]
        exact = self._shortfall_at(near)
        exact.masked_fill_(found.isinf(), torch.inf)  # an anchor with fewer negatives: these are none
        masked.scatter_(1, near, exact)
        found.copy_(exact.sort(dim=1).values)
        if self.contest.positive is not None:
            self._shortfall_at(self.contest.positive.unsqueeze(1))
        if self.positives is not None:
            nearest = self.shortfall.masked_fill(~self.positives, torch.inf)
            self._shortfall_at(nearest.topk(min(EXACT, nearest.shape[1]), dim=1, largest=False).indices)

    def _shortfall_at(self, columns: Tensor) -> Tensor:
        """Exact shortfalls of some candidates of each anchor, ``(a, m)``, put into the matrix and returned."""
        exact = pair_shortfall(self.contest.anchors.unsqueeze(1), self.contest.candidates[columns])
        self.shortfall.scatter_(1, columns, exact)
        return exact

    def contrast(self, logits: Tensor, columns: Tensor, hardest: int | None) -> tuple[Tensor, Tensor]:
        """Cross-entropy of every anchor, and its derivative with respect to the logits (which are used up).

        The loss is ``log(1 + sum over the others of exp(l_j - l_ref))``, where ``ref`` is the positive: no
        cancellation, however small it is. With several positives ``ref`` is the one with the largest logit,
        and ``l_ref`` less the mean logit of the positives is added.
        """
        left_out = self.not_negative
        if hardest is not None:
            left_out = left_out | torch.ones_like(left_out).scatter_(1, columns[:, :hardest], False)
        if self.positives is None:
            assert self.contest.positive is not None
            reference = self.contest.positive.unsqueeze(1)
        else:
            reference = logits.masked_fill(~self.positives, -torch.inf).argmax(1, keepdim=True)
            left_out = (left_out & ~self.positives).scatter(1, reference, True)
        ours = logits.gather(1, reference)
        if self.positives is not None:
            share = self.positives / self.positives.sum(1, keepdim=True).clamp_min(1)
            spread = ((ours - logits) * share).sum(1)

        odds = logits.masked_fill_(left_out, -torch.inf)
        largest = odds.amax(1, keepdim=True).clamp_min(torch.finfo(odds.dtype).min)  # finite without rivals
        odds = odds.sub_(largest).exp_()
        total = odds.sum(1, keepdim=True)
        behind = largest + total.log() - ours  # log-sum-exp of the rivals, less the logit of the positive
        loss = torch.logaddexp(behind, torch.zeros_like(behind)).squeeze(1)
        risk = behind.sigmoid()
        weight = odds.mul_(risk / total.clamp_min(torch.finfo(odds.dtype).tiny))
        weight.scatter_(1, reference, -risk)
        if self.positives is not None:
            loss += spread
            weight -= share.scatter_add(1, reference, -torch.ones_like(risk))
            alone = ~self.positives.any(1)
            loss.masked_fill_(alone, 0)
            weight.masked_fill_(alone.unsqueeze(1), 0)
        return loss, weight


@dataclass(eq=False)
class DenseSurvey:
    """The hardest negatives of a batch, see :class:`weince.terms.Survey`."""

    stats: TailStats | None
    columns: Tensor
    masked: Tensor
    negatives: Tensor

    @property
    def most_pairs(self) -> int:
        return self.masked.numel()

    def pairs(self) -> Tensor:
        return self.negatives.expand(len(self.masked)).sum()

    def smallest(self, count: int) -> Tensor:
        return self.masked.flatten().topk(count, largest=False).values


class _Pulled(torch.autograd.Function):
    """Gives the losses their gradient: ``pull`` is the derivative of each with respect to its scores."""

    @staticmethod
    def forward(loss: Tensor, pull: Tensor, anchors: Tensor, candidates: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor]:  # type: ignore[override]
        pull, anchors, candidates = ctx.saved_tensors
        grad = grad.unsqueeze(1)
        with torch.autocast(grad.device.type, enabled=False):
            return None, None, product(pull, candidates) * grad, product(pull.T, anchors * grad)


def _learns(link: Link) -> bool:
    """Whether a parameter of the link wants a gradient."""
    values = [getattr(link, field.name) for field in fields(link)] if is_dataclass(link) else []
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)
