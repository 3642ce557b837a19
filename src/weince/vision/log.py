"""What a run says of itself: a CSV file with a row per epoch, a progress bar, TensorBoard if asked for."""

import csv
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weince.checkpoint import write_aside
from weince.functional import LossOutput, weince_loss
from weince.scores import CROWD, shortfalls
from weince.tail import TailConfig

COLUMNS = (
    "epoch", "loss", "rho", "beta", "daic", "lam", "alignment", "uniformity", "effective_rank", "crowded", "lr",
    "views_per_second", "seconds",
)  # fmt: skip


GEOMETRY = 1024
"""Pairs of a batch whose geometry is measured: all distances of all rows would not fit for a large one."""


class Log:
    """``log.csv`` of a run, complete after every epoch.

    Args:
        folder: Of the run.
        epoch: The epoch that comes next: rows of it and later ones, from a run that was cut, are dropped.
        tensorboard: Write event files too.
    """

    def __init__(self, folder: Path, epoch: int, *, tensorboard: bool = False) -> None:
        self.path = folder / "log.csv"
        self.rows = [row for row in read_log(self.path) if row["epoch"] <= epoch]
        self.writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=epoch + 1)

    def add(self, row: dict[str, float]) -> None:
        """Write the row of an epoch that is over."""
        self.rows.append(row)
        write_aside(self.path, self._write, "log")
        if self.writer is not None:
            for name in COLUMNS[1:]:
                self.writer.add_scalar(name, row[name], int(row["epoch"]))
            self.writer.flush()

    def _write(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)  # rows older than a column have an empty cell in it
            writer.writeheader()
            writer.writerows({name: f"{value:.6g}" for name, value in row.items()} for row in self.rows)


def read_log(path: Path) -> list[dict[str, float]]:
    """The rows of a ``log.csv``, without their empty cells; none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@torch.no_grad()
def measure(z_i: Tensor, z_j: Tensor, tail: TailConfig) -> dict[str, float]:
    """What is logged of a batch's embeddings ``(n, d)``: the mean tail statistics of its anchors, and its geometry.

    Alignment is the mean squared distance of a pair and uniformity the logarithm of the mean of
    ``exp(-2 distance^2)`` over other pairs (Wang and Isola 2020); the effective rank is the exponential of the
    entropy of the singular values (Roy and Vetterli 2007). Crowded is the share of anchors that have a candidate
    other than their partner within a shortfall of ``CROWD``: of a healthy encoder next to none.
    """
    # The statistics do not depend on how the logit is made of them; so every engine can take them.
    tail = replace(tail, beta="fit", endpoint=1.0, positive="blend")
    output = weince_loss(z_i, z_j, tail=tail, gather=False, return_stats=True)
    assert isinstance(output, LossOutput)
    u, v = (F.normalize(z[:GEOMETRY].double()) for z in (z_i, z_j))
    rows = torch.cat([u, v])
    gaps = torch.pdist(rows).square()
    pairs = torch.linalg.vector_norm(u - v, dim=1).square()
    others = (-2 * gaps).exp().sum() - (-2 * pairs).exp().sum()  # all pairs of rows but the positives
    values = torch.linalg.svdvals(rows)
    share = values / values.sum()
    entropy = -torch.special.xlogy(share, share).sum()
    figures = {
        "rho": output.stats.rho.mean(),
        "beta": output.stats.beta.mean(),
        "daic": output.stats.daic.mean(),
        "lam": output.stats.lam.mean(),
        "alignment": pairs.mean(),
        "uniformity": (others / (len(gaps) - len(pairs))).log(),
        "effective_rank": entropy.exp(),
        "crowded": _crowded(rows),
    }
    return {name: float(value) for name, value in figures.items()}


def _crowded(rows: Tensor) -> Tensor:
    """Share of unit rows ``(2 n, d)``, row ``k`` being the partner of row ``k + n``, that are crowded."""
    n = len(rows) // 2
    near = shortfalls(rows, rows) <= CROWD
    for own in (-n, 0, n):  # an anchor itself, and its partner on either side
        near.diagonal(own).fill_(False)
    return near.any(1).double().mean()


class Bar:
    """A progress bar over the epochs of a run, with the latest figures; silent on other ranks than the first."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress, self.task = progress, task

    def advance(self, epochs: float) -> None:
        if self.progress is not None:
            self.progress.advance(self.task, epochs)

    def show(self, row: dict[str, float]) -> None:
        if self.progress is not None:
            self.progress.update(
                self.task,
                said=f"loss {row['loss']:.4f}  lam {row['lam']:.3f}  beta {row['beta']:.2f}  "
                f"{row['views_per_second']:,.0f} views/s",
            )


@contextmanager
def progress_bar(name: str, epoch: int, epochs: int, *, shown: bool) -> Iterator[Bar]:
    """A bar from ``epoch`` to ``epochs`` while the context lasts."""
    if not shown:
        yield Bar(None, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("epoch {task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:  # stdout is for the result
        task = progress.add_task(name, total=epochs, completed=epoch, said="")
        yield Bar(progress, task)


def check_finite(loss: float, epoch: int) -> None:
    """Stop a run whose loss is no number any more."""
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss is {loss} in epoch {epoch + 1}: try a lower --optimizer.lr or --precision fp32; "
            "the last checkpoint is kept"
        )
