"""Nearest neighbours by cosine on frozen features: recall at k, and a weighted vote."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weince.lab.evaluate.features import LabelledFeatures
from weince.lab.evaluate.protocol import split
from weince.progress import bars
from weince.scores import product, unit_rows

RECALLS = (1, 2, 5, 10, 20, 50)
MOST_SCORES = 2**27
"""Scores that are held at once, half a gigabyte."""


class Neighbours(NamedTuple):
    """Figures in percent, one for each split seed.

    Attributes:
        vote: Accuracy of the weighted vote.
        recall: For each k, how many queries have one of their own class among the k nearest.
    """

    vote: tuple[float, ...]
    recall: dict[int, tuple[float, ...]]


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
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    recalls: Sequence[int] = RECALLS,
    k: int = 50,
    temperature: float = 0.1,
    chunk: int = 2048,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> Knn:
    """Look the validation rows and the test rows up in the rest of the training set.

    Neighbours are ordered by cosine, equals by their row in the training set; features of zeros have cosine 0
    with everything. A k beyond the bank means the whole bank. A neighbour's vote weighs ``exp(s / temperature)``,
    and of classes with equal votes the first wins.

    Args:
        train: Features of the labelled training set, split anew for every seed.
        test: Features of the test set.
        seeds: Of the splits.
        recalls: The k of the recalls.
        k: Neighbours that vote.
        temperature: Of the vote.
        chunk: The most queries at a time.
        device: Where to compute.
        progress: Show a bar.
    """
    train.check("train")
    test.check("test")
    if not seeds or not recalls or min(*recalls, k, chunk) < 1 or not temperature > 0.0:
        raise ValueError(
            f"wanted seeds, every k and chunk at least 1, a positive temperature; got {list(seeds)}, "
            f"{[*recalls, k]}, {chunk}, {temperature}"
        )
    place = torch.device(device)
    features, queries = (unit_rows(part.features.to(place).float()) for part in (train, test))
    labels, answers = train.labels.to(place), test.labels.to(place)
    found: list[tuple[Tensor, Tensor]] = []
    with bars(shown=progress) as bar:
        task = bar.add_task(f"neighbours, {len(seeds)} splits", total=len(seeds))
        for seed in seeds:
            rows, held_out = (
                torch.from_numpy(i).to(place) for i in split(train.labels.cpu().numpy(), seed=seed)
            )
            bank = LabelledFeatures(features[rows], labels[rows])
            options = (recalls, k, temperature, chunk)
            asked = LabelledFeatures(features[held_out], labels[held_out]), LabelledFeatures(queries, answers)
            found.append((_score(bank, asked[0], *options), _score(bank, asked[1], *options)))
            bar.advance(task)
    validation, judged = (_neighbours(list(parts), recalls) for parts in zip(*found, strict=True))
    return Knn(tuple(seeds), validation, judged)


def _neighbours(scores: list[Tensor], recalls: Sequence[int]) -> Neighbours:
    vote, *recall = zip(*(score.tolist() for score in scores), strict=True)
    return Neighbours(vote, dict(zip(recalls, recall, strict=True)))


def _score(
    bank: LabelledFeatures,
    queries: LabelledFeatures,
    recalls: Sequence[int],
    k: int,
    temperature: float,
    chunk: int,
) -> Tensor:
    """Percent right of the vote, then each recall: ``(1 + recalls,)``."""
    classes = int(torch.maximum(bank.labels.max(), queries.labels.max())) + 1
    right = torch.zeros(1 + len(recalls), dtype=torch.int64, device=bank.labels.device)
    chunk = max(1, min(chunk, MOST_SCORES // len(bank.labels)))
    for start in range(0, len(queries.labels), chunk):
        rows, truth = (part[start : start + chunk] for part in queries)
        near, cosines = nearest(product(rows, bank.features.mT), max(*recalls, k))
        near = bank.labels[near]
        votes = torch.zeros(len(rows), classes, device=rows.device)
        # Relative to the nearest: exp(s / temperature) itself overflows at low temperatures.
        weights = ((cosines - cosines[:, :1]) / temperature).exp()
        # One neighbour after the other: sums in a fixed order, so that a GPU gives the same figure every time.
        for j in range(min(k, near.shape[1])):
            votes.scatter_add_(1, near[:, j : j + 1], weights[:, j : j + 1])
        hits = near == truth.unsqueeze(1)
        counts = [votes.argmax(1) == truth, *(hits[:, :r].any(1) for r in recalls)]
        right += torch.stack(counts).sum(1)
    return 100.0 * right.cpu().double() / len(queries.labels)


def nearest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns of the k largest scores of each row, and these scores; equal scores by rising column.

    Args:
        scores: ``(rows, columns)``.
        k: How many; all columns if there are fewer.
    """
    k = min(k, scores.shape[1])
    values, columns = scores.topk(min(k + 1, scores.shape[1]), sorted=True)
    # topk leaves open which of equal scores it takes and in what order. The order is put right by sorting ...
    top, order = columns[:, :k].sort(1)
    kept, by_score = values[:, :k].gather(1, order).sort(dim=1, descending=True, stable=True)
    columns = top.gather(1, by_score)
    # ... and rows in which the last one taken equals the first one left are sorted whole.
    if values.shape[1] > k:
        unsure = (values[:, k - 1] == values[:, k]).nonzero().squeeze(1)
        if len(unsure):
            columns[unsure] = scores[unsure].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return columns, kept
