"""Train heads shaped like a projector on frozen features: many at once, each with its own loss.

The weights of all heads are two tensors. A step of all heads is two batched products, the loss of each head, and one
update. Heads of the same seed have the same batches, noise and initial weights: they differ only in their loss.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weince.lab.configure import LossConfig, build_loss, let_nan_pass, line_named
from weince.lab.geometry import crowded, effective_rank, pair_distances, uniformity, unit_in_double
from weince.lab.predict.features import Views
from weince.lab.tasks.images.evaluation.features import LabelledFeatures
from weince.lab.tasks.images.evaluation.knn import score
from weince.scores import unit_rows

WATCHED = 512
"""Number of held-out items for uniformity and effective rank."""


@dataclass(frozen=True)
class Probe:
    """How heads are trained.

    Args:
        batch: Items in a batch.
        rate: Learning rate of Adam.
        noise: Standard deviation of the noise added to the standardised features, in place of new views.
        axes: Largest number of principal axes of the features to use.
        hidden: Width of the hidden layer.
        out: Width of the embeddings.
    """

    batch: int = 256
    rate: float = 1e-3
    noise: float = 0.3
    axes: int = 128
    hidden: int = 256
    out: int = 64

    def __post_init__(self) -> None:
        for name in ("batch", "axes", "hidden", "out"):
            least = 2 if name == "batch" else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if not 0 < self.rate < math.inf or not 0 <= self.noise < math.inf:
            raise ValueError(f"rate must be positive and noise at least 0; got {self.rate} and {self.noise}")


class Outcome(NamedTuple):
    """Figures of a head on held-out items; all NaN if it diverged, `r1` and `vote` NaN without labels.

    Attributes:
        first: Share of items whose second view scores highest among the second views of a batch.
        first_of_all: The same among all held-out items.
        r1: Share of items whose nearest training item has the same label.
        vote: Share of items that a weighted vote of the 50 nearest training items classifies correctly.
        alignment: Mean squared distance of the two views.
        uniformity: Logarithm of the mean of ``exp(-2 distance^2)`` over other pairs; lower is more even.
        effective_rank: Exponential of the entropy of the singular values.
        crowded: Share of views that have another item of their batch within a shortfall of 0.01.
    """

    first: float
    first_of_all: float
    r1: float
    vote: float
    alignment: float
    uniformity: float
    effective_rank: float
    crowded: float


class Heads(nn.Module):
    """Heads of two linear layers without bias and a ReLU between them; all have the same initial weights.

    Args:
        count: Number of heads.
        inputs: Width of the features.
        probe: Widths of the layers.
        generator: Generator of the initial weights, which have torch's distribution for a linear layer.
    """

    def __init__(self, count: int, inputs: int, probe: Probe, generator: torch.Generator) -> None:
        super().__init__()
        widths = (inputs, probe.hidden, probe.out)
        first, second = (
            ((2 * torch.rand(a, b, generator=generator) - 1) / math.sqrt(a)).repeat(count, 1, 1)
            for a, b in pairwise(widths)
        )
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows ``(n, inputs)`` to embeddings ``(count, n, out)``."""
        return torch.relu(rows @ self.first) @ self.second


class Training:
    """Heads of one seed, one for each loss, and the state of their training.

    Args:
        views: Features of all items.
        losses: One for each head.
        seed: Seed of the split, the initial weights, the batches and the noise.
        probe: How to train.
    """

    def __init__(self, views: Views, losses: Sequence[LossConfig], seed: int, probe: Probe) -> None:
        self.views, self.probe = views, probe
        self.generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(views.first), generator=self.generator)
        self.held, self.kept = order[: len(order) // 4], order[len(order) // 4 :]
        self.heads = Heads(len(losses), views.first.shape[1], probe, self.generator)
        self.presets = [config.preset for config in losses]
        self.losses = nn.ModuleList(build_loss(config) for config in losses)
        let_nan_pass(self.losses)  # a head that diverges must not stop the others
        parameters = [*self.heads.parameters(), *self.losses.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=probe.rate, fused=True)

    def step(self) -> None:
        """Train all heads on one batch."""
        size = self.probe.batch
        # Without replacement: an item that is drawn twice would be a negative of itself.
        rows = self.kept[torch.randperm(len(self.kept), generator=self.generator)[:size]]
        views = torch.cat([self.views.first[rows], self.views.second[rows]])
        views = views + self.probe.noise * torch.randn(views.shape, generator=self.generator)
        z = self.heads(views)
        # Each loss depends only on its own head, so the gradient of the sum gives each head its own.
        known = {} if self.views.ids is None else {"ids": self.views.ids[rows]}
        values = []
        for preset, loss, own in zip(self.presets, self.losses, z, strict=True):
            with line_named(preset):
                values.append(loss(*own.split(size), **known))
        value = torch.stack(values).sum()
        self.optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    @torch.no_grad()
    def outcomes(self) -> list[Outcome]:
        """Figures of the heads on held-out items."""
        labels = self.views.labels
        first, second = self.heads(self.views.first[self.held]), self.heads(self.views.second[self.held])
        banks = self.heads(self.views.first[self.kept]) if labels is not None else [None] * len(first)
        return [
            judge(
                a,
                b,
                self.probe.batch,
                None if labels is None else (LabelledFeatures(bank, labels[self.kept]), labels[self.held]),
                None if self.views.ids is None else self.views.ids[self.held],
            )
            for a, b, bank in zip(first, second, banks, strict=True)
        ]


def train_heads(
    views: Views,
    losses: Sequence[LossConfig],
    seed: int,
    steps: int,
    probe: Probe,
    *,
    tell: Callable[[int], object] = lambda heads: None,
) -> list[Outcome]:
    """Train a head with every loss and return its figures.

    ``tell`` gets the number of heads after each of their ``steps + 1`` parts: the steps, and the figures.
    """
    training = Training(views, losses, seed, probe)
    for _ in range(steps):
        training.step()
        tell(len(losses))
    outcomes = training.outcomes()
    tell(len(losses))
    return outcomes


def seconds(views: Views, losses: Sequence[LossConfig], probe: Probe) -> tuple[float, float]:
    """Seconds that a step of all heads takes here, and seconds that evaluating them takes."""
    training = Training(views, losses, 0, probe)
    training.step()  # the first one warms up
    times = []
    for work in (training.step, training.step, training.outcomes):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times[:2]), times[2]


def judge(
    z_i: Tensor,
    z_j: Tensor,
    batch: int,
    labelled: tuple[LabelledFeatures, Tensor] | None = None,
    ids: Tensor | None = None,
) -> Outcome:
    """Figures of a head, from the held-out embeddings ``(items, out)`` of both views.

    Args:
        z_i: Embeddings of one view.
        z_j: Embeddings of the other view, row by row.
        batch: Items in a batch.
        labelled: Training items to look up in, and the labels of the held-out ones; None without labels.
        ids: ``(items,)``, or None; items with equal ids do not compete, nor do they crowd each other.
    """
    if not bool(z_i.isfinite().all() and z_j.isfinite().all()):
        return Outcome(*[math.nan] * len(Outcome._fields))
    u, v = unit_in_double(z_i), unit_in_double(z_j)
    blocks = [slice(k, k + batch) for k in range(0, len(u) - batch + 1, batch)]
    rows, pairs = torch.cat([u[:WATCHED], v[:WATCHED]]), pair_distances(u, v)
    vote, r1 = math.nan, math.nan
    if labelled is not None:
        bank, labels = labelled
        bank = LabelledFeatures(unit_rows(bank.features), bank.labels)
        vote, r1 = (score(bank, LabelledFeatures(u.float(), labels), (1,)) / 100).tolist()
    return Outcome(
        first=float(torch.stack([_first(u[k], v[k], _part(ids, k)) for k in blocks]).mean()),
        first_of_all=float(_first(u, v, ids)),
        r1=r1,
        vote=vote,
        alignment=float(pairs.mean()),
        uniformity=float(uniformity(rows, without=pairs[:WATCHED])),
        effective_rank=float(effective_rank(rows)),
        crowded=float(torch.stack([crowded(torch.cat([u[k], v[k]]), _part(ids, k)) for k in blocks]).mean()),
    )


def _part(ids: Tensor | None, rows: slice) -> Tensor | None:
    return None if ids is None else ids[rows]


def _first(a: Tensor, b: Tensor, ids: Tensor | None) -> Tensor:
    """Share of rows whose positive scores strictly above every other candidate."""
    scores = a @ b.T
    own = scores.diagonal().clone()
    if ids is not None:
        scores[ids[:, None] == ids] = -math.inf
    return (own > scores.fill_diagonal_(-math.inf).amax(1)).double().mean()
