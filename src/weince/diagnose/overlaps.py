"""What the whole file holds: duplicates, false negatives, documents that win everywhere, the crowded side.

Every query is scored against every document, in blocks; of a large file some queries are drawn. With two views of one
kind, the first views stand for queries and the second ones for documents.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import pdtrc

from weince.diagnose.pair_files import connected
from weince.diagnose.reading import EmbeddedPairs
from weince.diagnose.rules import NEAR
from weince.evt.arrays import Integers, unit_rows

MARGINS = (0.0, 0.05, 0.1)
"""Values of ``ignore_above`` whose effect is counted."""
SHOWN = 30
"""The most false negatives, and the most hubs, that are listed."""

_SCORES = 2**25  # the most scores of queries and documents; beyond that, queries are drawn
_BLOCK = 2**22
_ROUNDING = 1e-6  # of cosines in float32
_FEWEST_WINS = 10  # of a hub


class Side(NamedTuple):
    """The queries, or the documents; shares and medians are over the rows that were looked at."""

    repeated: int  # rows that occur in several pairs, told by ids or not
    exact: int  # rows with an exact twin of another id: a false negative of each other
    near: float  # share of rows with a twin of another id within a shortfall of `NEAR`; exact twins count
    nearest: float  # median cosine of a row to the nearest one of another id
    mean_cosine: float  # mean cosine of two rows


class Rival(NamedTuple):
    """A negative that scores at or above the positive: rows of the pairs, and both scores."""

    query: int
    document: int
    score: float
    positive: float


class Hub(NamedTuple):
    """A document that wins for queries that it does not belong to."""

    document: int
    wins: int


@dataclass(frozen=True)
class Overlaps:
    """What `find_overlaps` finds."""

    rows: int  # pairs in the file
    looked: int  # queries that were scored against all documents
    queries: Side  # twins among the queries
    documents: Side  # twins among the documents
    beaten: int  # queries with a negative at or above their positive
    above: int  # number of such negatives
    twins: int  # how many of these are twins of the positive, so that equal ids remove them
    grouped: int | None  # how many of these are in the query's group; None without groups
    ignored: tuple[int, ...]  # how many negatives lie at or above the positive plus each of `MARGINS`
    rivals: tuple[Rival, ...]  # the best negative of the queries that lose most
    hubs: tuple[Hub, ...]  # documents that win for many queries, the worst first
    fewest_wins: int  # the number of wins that makes a hub: chance alone hardly gives a document so many

    @property
    def twin_share(self) -> float:
        """Share of rows, on the worse side, with a twin that no id tells apart."""
        return max(self.queries.near, self.documents.near)


def tell_exact_twins(pairs: EmbeddedPairs) -> NDArray[np.int64] | None:
    """The ids of the pairs, equal for exact twins too; unchanged if these would join half of the pairs."""
    n = len(pairs.z_i)
    ids = np.arange(n) if pairs.ids is None else pairs.ids
    first, second = _digests(pairs.z_i), _digests(pairs.z_j)
    if len(np.unique(first)) == len(np.unique(second)) == n:
        return pairs.ids
    joined = connected([("id", x) for x in ids], [("q", x) for x in first], [("d", x) for x in second])
    return pairs.ids if np.bincount(joined).max() >= n / 2 else joined


def _digests(z: NDArray[np.generic]) -> Integers:
    """A number for every row, equal for rows of equal bytes."""
    seen: dict[bytes, int] = {}
    rows = np.ascontiguousarray(z)
    keys = (hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows)
    return np.array([seen.setdefault(key, len(seen)) for key in keys])


def find_overlaps(pairs: EmbeddedPairs, *, seed: int = 0) -> Overlaps:
    """Score all queries against all documents and count duplicates, false negatives and hubs."""
    n = len(pairs.z_i)
    q, d = (torch.from_numpy(unit_rows(z).astype(np.float32)) for z in (pairs.z_i, pairs.z_j))
    looked = np.arange(n)
    if n * n > _SCORES:
        looked = np.sort(np.random.default_rng(seed).permutation(n)[: max(_SCORES // n, 1)])
    ids = torch.from_numpy(np.arange(n) if pairs.ids is None else pairs.ids)
    groups = None if pairs.groups is None else torch.from_numpy(pairs.groups)
    wins, nearest = torch.zeros(n, dtype=torch.long), []
    rivals: list[Rival] = []
    beaten = above = twins = grouped = 0
    ignored = [0] * len(MARGINS)
    for part in np.array_split(looked, max(1, len(looked) * n // _BLOCK)):
        rows = torch.from_numpy(part)
        same = ids[rows][:, None] == ids
        scores = q[rows] @ d.T
        positive = scores[torch.arange(len(rows)), rows]
        scores[same] = -2.0
        among_queries, among_documents = ((z[rows] @ z.T).masked_fill_(same, -2.0) for z in (q, d))
        nearest.append(torch.stack([among_queries.amax(dim=1), among_documents.amax(dim=1)]))
        best, column = scores.max(dim=1)
        lost = best >= positive - _ROUNDING
        wins += torch.bincount(column[best > positive + _ROUNDING], minlength=n)
        rivals += map(Rival, *(x[lost].tolist() for x in (rows, column, best, positive)))
        beaten += int(lost.sum())
        losing = scores[lost]  # no other query has a negative that high
        higher = losing >= positive[lost, None] - _ROUNDING
        above += int(higher.sum())
        twins += int((higher & (among_documents[lost] >= 1.0 - NEAR)).sum())
        if groups is not None:
            grouped += int((higher & (groups[rows][lost, None] == groups)).sum())
        for k, margin in enumerate(MARGINS):
            ignored[k] += int((losing >= positive[lost, None] + margin - _ROUNDING).sum())
    close = torch.cat(nearest, dim=1).numpy()
    worst = sorted(rivals, key=lambda r: r.positive - r.score)[:SHOWN]
    fewest = _hub_threshold(int(wins.sum()), n)
    hubs = [Hub(row, int(wins[row])) for row in torch.argsort(wins, descending=True, stable=True).tolist()]
    return Overlaps(
        rows=n,
        looked=len(looked),
        queries=_side(pairs.z_i, q, ids.numpy(), close[0]),
        documents=_side(pairs.z_j, d, ids.numpy(), close[1]),
        beaten=beaten,
        above=above,
        twins=twins,
        grouped=None if groups is None else grouped,
        ignored=tuple(ignored),
        rivals=tuple(worst),
        hubs=tuple(hub for hub in hubs if hub.wins >= fewest),
        fewest_wins=fewest,
    )


def _side(z: NDArray[np.generic], unit: torch.Tensor, ids: Integers, nearest: NDArray[np.float32]) -> Side:
    digests = _digests(z)
    kinds = np.unique(np.stack([digests, ids]), axis=1)[0]  # of each digest once for each of its ids
    repeated, exact = (np.bincount(x, minlength=len(z))[digests] > 1 for x in (digests, kinds))
    n, total = len(z), unit.sum(dim=0, dtype=torch.float64)
    return Side(
        repeated=int(repeated.sum()),
        exact=int(exact.sum()),
        near=float((nearest >= 1.0 - NEAR).mean()),
        nearest=float(np.median(nearest)),
        mean_cosine=float((total @ total - n) / (n * (n - 1))),
    )


def _hub_threshold(wins: int, documents: int) -> int:
    """The fewest wins that a document gets by chance in one of a hundred files."""
    fewest = _FEWEST_WINS
    while documents * pdtrc(fewest - 1, wins / documents) > 0.01:
        fewest += 1
    return fewest
