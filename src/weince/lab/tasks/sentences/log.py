"""Report the progress of a run: ``log.csv`` and a progress bar."""

import csv
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weince import files

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE = 30.0
"""Without a terminal, show a row of the log after this many seconds without output."""


class Row(NamedTuple):
    """A line of the log.

    Args:
        step: The last step of the line.
        epoch: Passes over the sentences so far.
        loss: Mean loss over the steps of the line.
        lam: Mean of ``lam`` over the anchors of the last batch.
        beta: Mean of ``beta`` over the anchors of the last batch.
        dev: Spearman x 100 on STS-B's dev split, if it was evaluated.
        sentences_per_second: Speed of training.
        seconds: Seconds of training since the line before, without evaluations and checkpoints.
    """

    step: int
    epoch: float
    loss: float
    lam: float
    beta: float
    dev: float | None
    sentences_per_second: float
    seconds: float


def read_rows(out: Path) -> list[dict[str, str]]:
    """The complete rows of a run's log as text, to be written again unchanged."""
    path = out / "log.csv"
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [row for row in csv.DictReader(file) if row["step"].isdigit() and None not in row.values()]
    except (ValueError, KeyError, csv.Error) as error:
        raise ValueError(f"{path} is damaged ({error!r}): remove it to go on without its rows") from None


def start_log(out: Path, rows: list[dict[str, str]], learned: Iterable[str]) -> None:
    """Write a log with these rows only; ``learned`` names further columns, after those of a `Row`."""

    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*Row._fields, *learned])
            writer.writeheader()
            writer.writerows(rows)

    files.write_aside(out / "log.csv", write)


def append_log(out: Path, row: Row, learned: Iterable[float]) -> None:
    """Append a row and the numbers that the loss learns; None is written as an empty cell."""
    with (out / "log.csv").open("a", encoding="utf-8", newline="") as file:
        csv.writer(file).writerow(["" if value is None else value for value in (*row, *learned)])


@contextmanager
def progress_bar(
    name: str, steps: int, done: int, *, in_epoch: int, shown: bool, console: "Console | None" = None
) -> Iterator[Callable[[Row], None]]:
    """A bar with the loss, the last dev score and the weight of the shortfall logit.

    Without a terminal, it prints a line for a row that has a dev score, that ends an epoch (of ``in_epoch`` steps),
    or that comes ``PATIENCE`` seconds after the last line.
    """
    if not shown:
        yield lambda row: None
        return
    from weince.progress import TrainingBar

    with TrainingBar(name, lambda at: f"step {at:.0f}/{steps}", steps, done, console=console) as bar:
        dev: list[str] = []
        spoken, epoch = time.monotonic(), done // in_epoch

        def show(row: Row) -> None:
            nonlocal dev, spoken, epoch
            dev = dev if row.dev is None else [f"dev {row.dev:.2f}"]
            figures = f"loss {row.loss:.4f}", *dev, f"lam {row.lam:.2f}"
            late = time.monotonic() - spoken >= PATIENCE
            if not bar.in_lines or row.dev is not None or row.step // in_epoch > epoch or late:
                spoken, epoch = time.monotonic(), row.step // in_epoch
                bar.show(figures, completed=row.step)

        yield show
