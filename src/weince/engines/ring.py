"""The ring engine: candidates travel from rank to rank, and no rank ever holds the candidates of all ranks.

Every rank keeps its anchors and meets the candidates of one rank after another, starting with its own. It receives
the next block while it works on the current one. Sums add up over the blocks. In the backward pass the gradient of a
block travels with the block and ends at its owner. Within a block, the ring engine works like the chunked one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from weince.distributed import Ranks
from weince.engines.chunked import Route, Visit, bands, evaluate_along, survey_along
from weince.engines.survey import Hardest
from weince.pairs import Problem, Rule
from weince.sums import Engine, Need


def _ranks(problem: Problem) -> Ranks:
    assert problem.ranks is not None
    return problem.ranks


def _visits(problem: Problem) -> Iterator[Visit]:
    """Every rank's candidates in turn, this rank's first; the next block arrives during a visit."""
    ranks, columns = _ranks(problem), problem.of_candidate.values()
    travellers = [problem.candidates.detach().contiguous(), *(_sendable(column) for column in columns)]
    for hop in range(ranks.count):
        owner = (ranks.rank - hop) % ranks.count
        coming = ranks.pass_on(travellers, owner) if hop + 1 < ranks.count else None
        yield Visit(_against(problem, travellers, owner), owner)
        if coming is not None:
            travellers = coming.wait()


def _sendable(column: Tensor) -> Tensor:
    return (column.byte() if column.dtype == torch.bool else column).contiguous()


def _passed(problem: Problem, by_candidate: Tensor, owner: int) -> Tensor:
    """Send the gradient after its block and receive that of the next; the last hop returns it to its owner."""
    (arrived,) = _ranks(problem).pass_on([by_candidate], owner).wait()
    return arrived


def _collect(problem: Problem, need: Need, exact: bool) -> Hardest:
    """Find every anchor's hardest negatives in one round, by merging those of each block."""
    anchors = problem.anchors
    collected = Hardest(problem, need.tail, need.hardest)
    hardest = anchors.new_full((len(anchors), collected.depth), torch.inf)
    negatives = torch.zeros(len(anchors), dtype=torch.long, device=anchors.device)
    for visit in _visits(problem):
        for band in bands(visit.problem):
            for rows, tile in band.tiles(sharp=exact):
                hidden = tile.hidden()
                both = torch.cat([hardest[rows], hidden], 1)
                hardest[rows] = both.topk(collected.depth, dim=1, largest=False).values
                negatives[rows] += hidden.isfinite().sum(1)
    has_positive = None if problem.positives is None else problem.count_positives() > 0
    if problem.uniform:
        negatives = torch.full((1,), problem.most_negatives, device=anchors.device)
    collected.add_sorted(problem, hardest, negatives, has_positive)
    return collected


ROUTE = Route(_visits, _passed, _collect)
ENGINE = Engine("ring", partial(survey_along, ROUTE), partial(evaluate_along, ROUTE))


def _against(problem: Problem, travellers: Sequence[Tensor], owner: int) -> Problem:
    """Problem of the local anchors against the candidates of a rank that have arrived."""
    candidates, *columns = travellers
    ranks = _ranks(problem)
    start, width = sum(ranks.candidates[:owner]), ranks.candidates[owner]
    of_anchor = dict(problem.of_anchor)
    if "ignore" in of_anchor:
        of_anchor["ignore"] = of_anchor["ignore"][:, start : start + width]
    # The candidates of other ranks hold no single row that a rule excludes.
    alien = () if owner == ranks.rank else ("position", "positive")

    def kept(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return tuple(rule for rule in rules if rule.row not in alien)

    of_candidate = dict(zip(problem.of_candidate, columns, strict=True))
    for name in ("exempt", "across"):
        if name in of_candidate:
            of_candidate[name] = of_candidate[name].bool()
    return replace(
        problem,
        candidates=candidates,
        of_anchor=of_anchor,
        of_candidate=of_candidate,
        negatives=kept(problem.negatives),
        positives=None if problem.positives is None else kept(problem.positives),
        raw=None,
        symmetric=False,
    )
