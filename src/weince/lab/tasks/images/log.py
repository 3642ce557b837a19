"""Report the progress of a run: a CSV file with a row per epoch, a progress bar, and optionally TensorBoard."""

import csv
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weince.files import write_aside
from weince.lab.geometry import collapsed, crowded, effective_rank, pair_distances, uniformity, unit_in_double
from weince.lab.training.log import read_log
from weince.losses import InfoNCELoss
from weince.tail import TailConfig

if TYPE_CHECKING:
    from rich.console import Console

    from weince.progress import TrainingBar

COLUMNS = (
    "epoch", "loss", "rho", "beta", "daic", "lam", "alignment", "uniformity", "effective_rank", "crowded", "lr",
    "views_per_second", "seconds", "vote",
)  # fmt: skip

DIVERGED = "set a lower optimizer.lr, or precision fp32; the last checkpoint is kept"
"""It names settings, not options of ``weince train``: a run of a sweep shows it to users of other commands."""

GEOMETRY = 1024
"""Largest number of pairs of a batch to measure geometry on: all distances of a large batch would not fit."""


class Log:
    """``log.csv`` of a run, complete after every epoch.

    Args:
        folder: Folder of the run.
        epoch: Number of epochs that are done; rows of later epochs, left by a run that was cut, are dropped.
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
        """Write the row of a finished epoch."""
        self.rows.append(row)
        write_aside(self.path, self._write, "log")
        if self.writer is not None:
            for name in row.keys() - {"epoch"}:
                self.writer.add_scalar(name, row[name], int(row["epoch"]))
            self.writer.flush()

    def _write(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            # Rows older than a column have an empty cell in it.
            writer = csv.DictWriter(file, dict.fromkeys([*COLUMNS, *itertools.chain(*self.rows)]))
            writer.writeheader()
            writer.writerows({name: f"{value:.6g}" for name, value in row.items()} for row in self.rows)


@torch.no_grad()
def measure(z_i: Tensor, z_j: Tensor, tail: TailConfig) -> dict[str, float]:
    """Figures of a batch's embeddings ``(n, d)`` for the log: mean tail statistics of the anchors, and geometry.

    Alignment is the mean squared distance of a pair and uniformity the logarithm of the mean of
    ``exp(-2 distance^2)`` over other pairs (Wang and Isola 2020); the effective rank is the exponential of the
    entropy of the singular values (Roy and Vetterli 2007). Crowded is the share of anchors that have a candidate
    other than their positive within a shortfall of ``CROWD``; in a healthy encoder it is near 0.
    """
    measured = InfoNCELoss(gather=False)
    measured.tail = tail
    output = measured(z_i, z_j, return_stats=True)
    u, v = (unit_in_double(z[:GEOMETRY]) for z in (z_i, z_j))
    rows, pairs = torch.cat([u, v]), pair_distances(u, v)
    figures = {
        "rho": output.stats.rho.mean(),
        "beta": output.stats.beta.mean(),
        "daic": output.stats.daic.mean(),
        "lam": output.stats.lam.mean(),
        "alignment": pairs.mean(),
        "uniformity": uniformity(rows, without=pairs),
        "effective_rank": effective_rank(rows),
        "crowded": crowded(rows),
    }
    return {name: float(value) for name, value in figures.items()}


def collapse(row: dict[str, float]) -> str | None:
    """A warning if the embeddings of an epoch have collapsed or are about to; None if not, or without figures."""
    found = collapsed(row.get("crowded", 0.0), row.get("effective_rank", math.inf))
    if found is None:
        return None
    # Not for certain: of a few easy images, those of one class may coincide and be classified well all the same.
    advice = "unless weince evaluate finds them good, try another loss or learning rate"
    return f"the embeddings seem to collapse: {found} in epoch {row['epoch']:.0f}; {advice}"


class Bar:
    """Progress over the epochs of a run, with the latest figures; silent if ``bar`` is None."""

    def __init__(self, bar: "TrainingBar | None") -> None:
        self.bar = bar
        self.warned: str | None = None
        """The warning during training, which comes once; the end of the run warns of the last epoch."""

    def advance(self, epochs: float) -> None:
        if self.bar is not None:
            self.bar.advance(self.bar.task, epochs)

    def show(self, row: dict[str, float]) -> None:
        """Show the row of a finished epoch."""
        if self.bar is None:
            return
        figures = f"loss {row['loss']:.4f}", f"lam {row['lam']:.3f}", f"beta {row['beta']:.2f}"
        speed = f"{row['views_per_second']:,.0f} views/s"
        self.bar.show((*figures, speed), completed=row["epoch"])  # exact; the sum of the steps has rounding
        if (warning := collapse(row)) and self.warned is None:
            self.warned = warning
            self.bar.console.print(f"weince: {warning}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(
    name: str, epoch: int, epochs: int, *, shown: bool, console: "Console | None" = None
) -> Iterator[Bar]:
    """A bar from ``epoch`` to ``epochs`` while the context lasts; without a terminal, a line per epoch."""
    if not shown:
        yield Bar(None)
        return
    from weince.progress import TrainingBar

    with TrainingBar(name, lambda done: f"epoch {done:.0f}/{epochs}", epochs, epoch, console=console) as bar:
        yield Bar(bar)


def check_finite(loss: float, epoch: int) -> None:
    """Stop a run whose loss is not finite."""
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss} in epoch {epoch + 1}: {DIVERGED}")
