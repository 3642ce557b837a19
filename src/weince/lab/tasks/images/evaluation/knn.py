"""Nearest neighbours by cosine on frozen features: recall at k, a weighted vote, and MAP@R."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weince.lab.tasks.images.evaluation.features import LabelledFeatures
from weince.lab.tasks.images.evaluation.protocol import SEEDS, split
from weince.progress import bars
from weince.scores import product, unit_rows

RECALLS = (1, 2, 5, 10, 20, 50)
VOTERS, VOTE_TEMPERATURE = 50, 0.1
"""Number of neighbours that vote, and the temperature of their weights."""
MOST_QUERIES, MOST_SCORES = 2048, 2**27
"""Largest numbers of queries at a time, and of their scores: half a gigabyte."""


class Neighbours(NamedTuple):
    """Figures in percent, one for each split seed.

    Attributes:
        vote: Accuracy of the weighted vote.
        recall: For each k, the share of queries with a row of their own class among the k nearest.
        map_r: Mean average precision at R, where R is the number of rows of the query's class in the bank (Musgrave
            et al. 2020). Only of the first split, since it sorts R neighbours of every query.
    """

    vote: tuple[float, ...]
    recall: dict[int, tuple[float, ...]]
    map_r: float


class Knn(NamedTuple):
    """Neighbours of the validation rows and of the test rows; the bank is the rest of the training set."""

    seeds: tuple[int, ...]
    validation: Neighbours
    test: Neighbours


@torch.no_grad()
def knn(
    train: LabelledFeatures,
    test: LabelledFeatures,
    *,
    seeds: Sequence[int] = SEEDS,
    recalls: Sequence[int] = RECALLS,
    k: int = VOTERS,
    temperature: float = VOTE_TEMPERATURE,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> Knn:
    """Look up the validation rows and the test rows in the rest of the training set.

    Neighbours are ordered by cosine, ties by row of the training set; a row of zeros has cosine 0 with everything. If
    k is larger than the bank, the whole bank is used. A neighbour's vote has the weight ``exp(s / temperature)``.
    Among classes with equal votes the first one is taken.

    Args:
        train: Features of the labelled training set; every seed splits it differently.
        test: Features of the test set.
        seeds: Seeds of the splits.
        recalls: The k of the recalls.
        k: Neighbours that vote.
        temperature: Temperature of the vote.
        device: Where to compute.
        progress: Show a bar.
    """
    train.check("train")
    test.check("test")
    if not seeds or not recalls or min(*recalls, k) < 1 or not temperature > 0.0:
        raise ValueError(
            f"wanted seeds, every k at least 1, a positive temperature; got {list(seeds)}, {[*recalls, k]}, "
            f"{temperature}"
        )
    place = torch.device(device)
    features, queries = (unit_rows(part.features.to(place).float()) for part in (train, test))
    labels, answers = train.labels.to(place), test.labels.to(place)
    by_split: list[list[Tensor]] = []
    precisions: list[float] = []
    with bars(shown=progress) as bar:
        task = bar.add_task(f"neighbours, {len(seeds)} splits", total=len(seeds))
        for seed in seeds:
            rows, held_out = (
                torch.from_numpy(i).to(place) for i in split(train.labels.cpu().numpy(), seed=seed)
            )
            bank = LabelledFeatures(features[rows], labels[rows])
            asked = LabelledFeatures(features[held_out], labels[held_out]), LabelledFeatures(queries, answers)
            by_split.append([score(bank, part, recalls, k, temperature) for part in asked])
            precisions = precisions or [mean_average_precision(bank, part) for part in asked]
            bar.advance(task)
    validation, judged = (
        _neighbours(list(parts), recalls, precision)
        for parts, precision in zip(zip(*by_split, strict=True), precisions, strict=True)
    )
    return Knn(tuple(seeds), validation, judged)


def _neighbours(scores: list[Tensor], recalls: Sequence[int], map_r: float) -> Neighbours:
    vote, *recall = zip(*(score.tolist() for score in scores), strict=True)
    return Neighbours(vote, dict(zip(recalls, recall, strict=True)), map_r)


def score(
    bank: LabelledFeatures,
    queries: LabelledFeatures,
    recalls: Sequence[int],
    k: int = VOTERS,
    temperature: float = VOTE_TEMPERATURE,
) -> Tensor:
    """Accuracy of the vote, then each recall, in percent: ``(1 + recalls,)``.

    Args:
        bank: Unit rows to look up in.
        queries: Unit rows to look up.
        recalls: The k of the recalls.
        k: Neighbours that vote.
        temperature: Temperature of the vote.
    """
    classes = int(torch.maximum(bank.labels.max(), queries.labels.max())) + 1
    right = torch.zeros(1 + len(recalls), dtype=torch.int64, device=bank.labels.device)
    for rows, truth in _pieces(bank, queries):
        near, cosines = nearest(product(rows, bank.features.mT), max(*recalls, k))
        near = bank.labels[near]
        votes = torch.zeros(len(rows), classes, device=rows.device)
        # Relative to the nearest: exp(s / temperature) itself overflows at low temperatures.
        weights = ((cosines - cosines[:, :1]) / temperature).exp()
        # One neighbour at a time: sums in a fixed order give the same figure every time, on a GPU too.
        for j in range(min(k, near.shape[1])):
            votes.scatter_add_(1, near[:, j : j + 1], weights[:, j : j + 1])
        hits = near == truth.unsqueeze(1)
        counts = [votes.argmax(1) == truth, *(hits[:, :r].any(1) for r in recalls)]
        right += torch.stack(counts).sum(1)
    return 100.0 * right.cpu().double() / len(queries.labels)


def mean_average_precision(bank: LabelledFeatures, queries: LabelledFeatures) -> float:
    """MAP@R in percent: the precision at each hit among the R nearest, summed and divided by R.

    A query whose class is not in the bank counts as 0.

    Args:
        bank: Unit rows to look up in.
        queries: Unit rows to look up.
    """
    known = int(torch.maximum(bank.labels.max(), queries.labels.max())) + 1
    of_class = torch.bincount(bank.labels, minlength=known)
    most = int(of_class.max())
    place = torch.arange(1, most + 1, device=bank.labels.device)
    means = []
    for rows, truth in _pieces(bank, queries):
        near, _ = nearest(product(rows, bank.features.mT), most)
        wanted = of_class[truth].unsqueeze(1)
        hits = (bank.labels[near] == truth.unsqueeze(1)) & (place <= wanted)
        precision = hits.cumsum(1).double() / place
        means.append((precision * hits).sum(1) / wanted.squeeze(1).clamp_min(1))
    return 100.0 * float(torch.cat(means).mean())


def _pieces(bank: LabelledFeatures, queries: LabelledFeatures) -> Iterable[tuple[Tensor, Tensor]]:
    """Features and labels of the queries, a piece at a time, so that the scores fit into memory."""
    size = max(1, min(MOST_QUERIES, MOST_SCORES // len(bank.labels)))
    features, labels = (part.split(size) for part in queries)  # type: ignore[no-untyped-call]
    return zip(features, labels, strict=True)


def nearest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns of the k largest scores of each row, and these scores; ties are ordered by column.

    Args:
        scores: ``(rows, columns)``.
        k: How many; all columns if there are fewer.
    """
    k = min(k, scores.shape[1])
    values, columns = scores.topk(min(k + 1, scores.shape[1]), sorted=True)
    # topk does not specify which of equal scores it takes, nor their order. Sorting fixes the order ...
    top, order = columns[:, :k].sort(1)
    kept, by_score = values[:, :k].gather(1, order).sort(dim=1, descending=True, stable=True)
    columns = top.gather(1, by_score)
    # ... and rows whose k-th and next scores are equal are sorted completely.
    if values.shape[1] > k:
        unsure = (values[:, k - 1] == values[:, k]).nonzero().squeeze(1)
        if len(unsure):
            columns[unsure] = scores[unsure].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return columns, kept
