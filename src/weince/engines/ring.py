"""The ring: the loss over several processes, none of which ever holds the candidates of all.

Each rank keeps its anchors; blocks of candidates travel from rank to rank until each is back home. One round
finds the hardest negatives, a second one the log-sum-exp; in the backward pass a third one collects the gradient
of every block, which travels with it. Memory on a rank does not grow with their number, but for the tails: at
most ``k_max`` shortfalls for each local anchor.

A rank works on its own block first, so it knows the logit of a single positive before the others come. Among
several positives the one with the largest logit so far is the reference, as in :meth:`Rows.contrast`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold

from weince.candidates import Contest
from weince.engines.chunked import Band, bands
from weince.engines.dense import effects_of, learned, sum_of
from weince.engines.rows import EngineOutput, Need, Rows, bind, least
from weince.links import Link
from weince.scores import first_order, no_autocast, product
from weince.tail import TailConfig, TailStats, fit_tail, gated
from weince.terms import Term


def ring(contest: Contest, terms: Sequence[Term], tail: TailConfig | None) -> EngineOutput:
    """Loss of every local anchor against the candidates of all ranks: the weighted sum of the terms.

    Args:
        contest: Anchors and candidates of this rank, and the ranks.
        terms: What to sum.
        tail: How to take the tail statistics, where a link or the caller wants them.
    """
    with torch.no_grad(), no_autocast(contest.anchors.device):
        found = _survey(contest, terms, tail)
        links = bind(terms, found)
        job = _Job(contest, terms, links, found.columns, found.near_cap)
        tallies = job.tallies()
        loss = sum_of([term.weight * tally.loss() for term, tally in zip(terms, tallies, strict=True)])
    wanted = [parameter for link in links for parameter in learned(link).values()]
    pulled: Tensor = _Pulled.apply(loss, contest.anchors, contest.candidates, job, tallies, *wanted)  # type: ignore[no-untyped-call]
    counted = None if contest.labels is None else tallies[0].positives > 0
    return EngineOutput(pulled, counted, found.stats)


class Visit(NamedTuple):
    """The local anchors against the candidates of one rank, which start at ``offset`` among all."""

    contest: Contest
    offset: int
    owner: int


def visits(contest: Contest) -> Iterator[Visit]:
    """Every rank's candidates in turn, the own ones first; the next block comes while one is worked on."""
    ranks = contest.ranks
    assert ranks is not None
    travellers = [
        contest.candidates.contiguous(),
        *(pair[1].long().contiguous() for pair in (contest.labels, contest.ids) if pair is not None),
    ]
    for hop in range(ranks.count):
        owner = (ranks.rank - hop) % ranks.count
        coming = ranks.pass_on(travellers, owner) if hop + 1 < ranks.count else None
        yield Visit(_against(contest, travellers, hop == 0), sum(ranks.candidates[:owner]), owner)
        if coming is not None:
            travellers = coming.wait()


def _against(contest: Contest, travellers: Sequence[Tensor], own: bool) -> Contest:
    rest = list(travellers[1:])
    labels = None if contest.labels is None else (contest.labels[0], rest.pop(0))
    ids = None if contest.ids is None else (contest.ids[0], rest.pop(0))
    return replace(
        contest,
        candidates=travellers[0],
        positive=contest.positive if own else None,
        itself=contest.itself if own else None,
        labels=labels,
        ids=ids,
        raw=None,
        symmetric=False,
    )


@dataclass(eq=False)
class _Found:
    """What the first round found, see :class:`weince.terms.Survey`."""

    contest: Contest
    near_cap: bool
    columns: Tensor | None
    negatives: Tensor | None
    stats: TailStats | None = None

    @property
    def most_pairs(self) -> int:
        ranks = self.contest.ranks
        assert ranks is not None
        return sum(ranks.anchors) * self.contest.most_negatives

    def pairs(self) -> Tensor:
        assert self.contest.ranks is not None
        return self.contest.ranks.sum(self._count() if self.negatives is None else self.negatives.sum())

    def _count(self) -> Tensor:
        """Negatives of all local anchors, by a round of its own: the first one was not needed."""
        count = torch.zeros((), dtype=torch.long, device=self.contest.anchors.device)
        for visit in visits(self.contest):
            for band in bands(visit.contest):
                for rows in band.blocks():
                    count += rows.hidden().isfinite().sum()
        return count

    def smallest(self, count: int) -> Tensor:
        assert self.contest.ranks is not None
        kept = self.contest.anchors.new_full((count,), torch.inf)
        for visit in visits(self.contest):
            for band in bands(visit.contest):
                for rows in band.sharp_blocks(self.near_cap):
                    kept = least(torch.cat([kept, rows.hidden().flatten()]), count)
        return self.contest.ranks.smallest(kept, count)


def _survey(contest: Contest, terms: Sequence[Term], tail: TailConfig | None) -> _Found:
    """The first round: merge what each block holds of every anchor's hardest negatives."""
    ranks = contest.ranks
    assert ranks is not None
    need = Need.of(contest, terms, tail)
    if not (need.tail or need.columns):
        return _Found(contest, need.near_cap, None, None)
    anchors = contest.anchors
    hardest = anchors.new_full((len(anchors), need.tail), torch.inf)
    chosen = anchors.new_full((len(anchors), need.columns), torch.inf)
    columns = torch.zeros(chosen.shape, dtype=torch.long, device=anchors.device)
    negatives = torch.zeros(len(anchors), dtype=torch.long, device=anchors.device)
    has_positive = torch.zeros(len(anchors), dtype=torch.bool, device=anchors.device)
    for visit in visits(contest):
        for band in bands(visit.contest):
            for span, rows in band.spans(need.near_cap):
                part = slice(*span)
                hidden = rows.hidden()
                hardest[part] = _merge(hardest[part], hidden)[0]
                chosen[part], index = _merge(chosen[part], hidden)
                old = index < chosen.shape[1]
                before = columns[part].gather(1, index.where(old, 0))
                columns[part] = before.where(old, index - chosen.shape[1] + visit.offset)
                negatives[part] += hidden.isfinite().sum(1)
                if rows.counted is not None:
                    has_positive[part] |= rows.counted
    stats = None
    if tail is not None:
        counted = None if contest.labels is None else has_positive
        fit = fit_tail(hardest, tail.tail_sizes(negatives), tail)
        stats = gated(hardest[:, 0], fit, tail, counted, ranks.gather)
    return _Found(contest, need.near_cap, columns if need.columns else None, negatives, stats)


def _merge(kept: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest of both, as many as were kept, and where they stand among both."""
    both = torch.cat([kept, more], 1)
    return both.topk(kept.shape[1], dim=1, largest=False)


@dataclass(eq=False)
class _Tally:
    """What is known so far of every anchor's contest under one link, ``(anchors,)`` each.

    ``others``: log-sum-exp of the rivals. ``best``: logit of the reference, and its ``column`` among all.
    ``logits`` and ``positives``: sum of the positives' logits, and their number.
    """

    others: Tensor
    best: Tensor
    column: Tensor
    logits: Tensor
    positives: Tensor

    @classmethod
    def empty(cls, anchors: Tensor) -> "_Tally":
        nothing = anchors.new_full((len(anchors),), -torch.inf)
        column = torch.full((len(anchors),), -1, device=anchors.device)
        return cls(nothing, nothing.clone(), column, torch.zeros_like(nothing), torch.zeros_like(nothing))

    def rows(self, start: int, stop: int) -> "_Tally":
        """A view of some anchors; what is written there is written here."""
        values = (self.others, self.best, self.column, self.logits, self.positives)
        return _Tally(*(value[start:stop] for value in values))

    def add(self, logits: Tensor, odds: Tensor, rows: Rows, offset: int) -> None:
        """Take in a block: its logits, and those of them that are rivals (``-inf`` elsewhere)."""
        if rows.positives is None:
            if rows.contest.positive is not None:
                self.column.copy_(rows.contest.positive + offset)
                self.best.copy_(logits.gather(1, rows.contest.positive.unsqueeze(1)).squeeze(1))
                self.logits.copy_(self.best)
                self.positives.fill_(1)
        else:
            top, column = logits.masked_fill(~rows.positives, -torch.inf).max(1)
            better = top > self.best
            self.others.copy_(torch.logaddexp(self.others, self.best.where(better, -torch.inf)))
            hidden = odds.gather(1, column.unsqueeze(1)).where(~better.unsqueeze(1), -torch.inf)
            odds.scatter_(1, column.unsqueeze(1), hidden)
            self.best.copy_(top.where(better, self.best))
            self.column.copy_((column + offset).where(better, self.column))
            self.logits.add_(logits.where(rows.positives, 0).sum(1))
            self.positives.add_(rows.positives.sum(1))
        self.others.copy_(torch.logaddexp(self.others, odds.logsumexp(1)))

    def loss(self) -> Tensor:
        behind = self.others - self.best
        spread = self.best - self.logits / self.positives
        return (torch.logaddexp(behind, torch.zeros_like(behind)) + spread).where(self.positives > 0, 0)

    def weight(self, odds: Tensor, rows: Rows, offset: int) -> Tensor:
        """Derivative of the losses by the logits of a block."""
        total = torch.logaddexp(self.others, self.best).unsqueeze(1)
        reference = (self.column - offset).unsqueeze(1)
        here = (reference >= 0) & (reference < odds.shape[1])
        at = reference.where(here, 0)
        weight = threshold((odds - total).exp_(), torch.finfo(odds.dtype).eps ** 3, 0, inplace=True)
        risk = (self.others - self.best).sigmoid().unsqueeze(1)
        weight.scatter_(1, at, (-risk).where(here, weight.gather(1, at)))
        if rows.positives is None:
            return weight
        weight -= rows.positives / self.positives.unsqueeze(1).clamp_min(1)
        weight.scatter_add_(1, at, here.to(weight.dtype))
        return weight.masked_fill_((self.positives == 0).unsqueeze(1), 0)


class _Job(NamedTuple):
    """All that the second and third rounds need."""

    contest: Contest
    terms: Sequence[Term]
    links: Sequence[Link]
    columns: Tensor | None
    near_cap: bool

    def tallies(self) -> list[_Tally]:
        tallies = [_Tally.empty(self.contest.anchors) for _ in self.terms]
        for visit in visits(self.contest):
            for band in bands(visit.contest):
                for span, rows in band.spans(self.near_cap):
                    for index, tally in enumerate(tallies):
                        logits = self.links[index].rows(*span).logit(rows.shortfall)
                        odds = self._odds(logits, rows, index, span, visit.offset)
                        tally.rows(*span).add(logits, odds, rows, visit.offset)
        return tallies

    def _odds(self, logits: Tensor, rows: Rows, index: int, span: tuple[int, int], offset: int) -> Tensor:
        """The logits of rivals; positives that share a label are rivals too."""
        odds = logits.clone()
        few = self.terms[index].hardest
        if few is not None and self.columns is not None:
            width = logits.shape[1]
            at = self.columns[slice(*span), :few] - offset
            at = at.where((at >= 0) & (at < width), width)  # one column more, for those of other blocks
            left_out = torch.ones(len(logits), width + 1, dtype=torch.bool, device=logits.device)
            left_out = left_out.scatter_(1, at, False)[:, :width]
            if rows.positives is not None:
                left_out &= ~rows.positives
            odds.masked_fill_(left_out, -torch.inf)
        return rows.contest.hide(odds, -torch.inf, positives=False)

    def gradient(self, tallies: Sequence[_Tally], weight: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Of the weighted losses by anchors, by candidates and by learned parameters."""
        ranks = self.contest.ranks
        assert ranks is not None
        by_anchor = torch.zeros_like(self.contest.anchors)
        effects = [{name: torch.zeros_like(weight) for name in learned(link)} for link in self.links]
        by_candidate = torch.zeros_like(self.contest.candidates)
        for visit in visits(self.contest):
            for band in bands(visit.contest):
                self._pull(band, visit.offset, tallies, effects)
                part = slice(*band.span())
                scale = weight[part].unsqueeze(1)
                by_anchor[part] += product(band.matrix, visit.contest.candidates) * scale
                by_candidate += product(band.matrix.T, self.contest.anchors[part] * scale)
            # The gradient follows its block, and after the last hop it is back with the owner.
            (by_candidate,) = ranks.pass_on([by_candidate], visit.owner).wait()
        parameters = [value for link in self.links for value in learned(link).values()]
        flat = [effect * weight for each in effects for effect in each.values()]
        sums = [e.sum_to_size(p.shape).to(p.dtype) for e, p in zip(flat, parameters, strict=True)]
        return by_anchor, by_candidate, sums

    def _pull(
        self, band: Band, offset: int, tallies: Sequence[_Tally], effects: list[dict[str, Tensor]]
    ) -> None:
        """Put the derivatives by the scores in the place of a band's shortfalls."""
        for span, rows in band.spans(self.near_cap):
            pulls = []
            for index, term in enumerate(self.terms):
                link = self.links[index].rows(*span)
                odds = self._odds(link.logit(rows.shortfall), rows, index, span, offset)
                weight = term.weight * tallies[index].rows(*span).weight(odds, rows, offset)
                pulls.append(weight * link.slope(rows.shortfall))
                for name, effect in effects_of(link, rows.shortfall, weight).items():
                    effects[index][name][slice(*span)] += effect
            rows.shortfall.copy_(sum_of(pulls))


class _Pulled(torch.autograd.Function):
    """Gives the losses their gradient, by another round."""

    @staticmethod
    def forward(
        loss: Tensor,
        anchors: Tensor,
        candidates: Tensor,
        job: _Job,
        tallies: Sequence[_Tally],
        *parameters: Tensor,
    ) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.job, ctx.tallies = inputs[3], inputs[4]
        ctx.save_for_backward(inputs[1], inputs[2], *inputs[5:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), no_autocast(grad.device):
            by_anchor, by_candidate, by_parameter = ctx.job.gradient(ctx.tallies, grad)
        gradients = (by_anchor, by_candidate, *by_parameter)
        first, second, *rest = map(first_order, gradients, ctx.saved_tensors)
        return None, first, second, None, None, *rest
