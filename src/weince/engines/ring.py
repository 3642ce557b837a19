"""The ring engine: candidates travel from rank to rank, and no rank ever holds the candidates of all ranks.

Every rank keeps its anchors and meets the candidates of one rank after another, starting with its own. It receives
the next block while it works on the current one. Sums add up over the blocks. In the backward pass the gradient of a
block travels with the block and ends at its owner. Within a block, the ring engine works like the chunked one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weince.candidates import Contest
from weince.distributed import Ranks
from weince.engines.chunked import Chunked, Visit, bands
from weince.engines.survey import Hardest
from weince.tail import TailConfig


class Ring(Chunked):
    name = "ring"

    @property
    def ranks(self) -> Ranks:
        assert self.contest.ranks is not None
        return self.contest.ranks

    def visits(self) -> Iterator[Visit]:
        """Every rank's candidates in turn, this rank's first; the next block arrives during a visit."""
        contest, ranks = self.contest, self.ranks
        roles = [pair[1] for pair in (contest.labels, contest.ids, contest.views) if pair is not None]
        travellers = [contest.candidates.detach().contiguous(), *(own.long().contiguous() for own in roles)]
        for hop in range(ranks.count):
            owner = (ranks.rank - hop) % ranks.count
            coming = ranks.pass_on(travellers, owner) if hop + 1 < ranks.count else None
            yield Visit(_against(contest, travellers, is_own=hop == 0), owner)
            if coming is not None:
                travellers = coming.wait()

    def passed(self, by_candidate: Tensor, owner: int) -> Tensor:
        """Send the gradient after its block and receive that of the next; the last hop returns it to its owner."""
        (arrived,) = self.ranks.pass_on([by_candidate], owner).wait()
        return arrived

    def find(self, tail: TailConfig | None, numbers: tuple[int, ...]) -> Hardest:
        """Find every anchor's hardest negatives in one round, by merging those of each block."""
        contest, anchors = self.contest, self.contest.anchors
        self.found = Hardest(contest, tail, numbers)
        hardest = anchors.new_full((len(anchors), self.found.depth), torch.inf)
        negatives = torch.zeros(len(anchors), dtype=torch.long, device=anchors.device)
        for visit in self.visits():
            for band in bands(visit.contest):
                for rows, tile in band.tiles(sharp=self.sharp):
                    hidden = tile.hidden()
                    both = torch.cat([hardest[rows], hidden], 1)
                    hardest[rows] = both.topk(self.found.depth, dim=1, largest=False).values
                    negatives[rows] += hidden.isfinite().sum(1)
        has_positive = None if contest.labels is None else contest.count_positives() > 0
        self.found.add_sorted(hardest, negatives, has_positive)
        self.thresholds.update(self.found.thresholds())
        return self.found


def _against(contest: Contest, travellers: Sequence[Tensor], *, is_own: bool) -> Contest:
    """Contest of the local anchors against the candidates that have arrived."""
    candidates, *roles = travellers

    def met(values: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        return None if values is None else (values[0].long(), roles.pop(0))

    return replace(
        contest,
        candidates=candidates,
        positive=contest.positive if is_own else None,
        itself=contest.itself if is_own else None,
        labels=met(contest.labels),
        ids=met(contest.ids),
        views=met(contest.views),
        raw=None,
        symmetric=False,
    )
