"""What a run says of itself: ``log.csv``, and a progress bar."""

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from weince import checkpoint


class Row(NamedTuple):
    """A line of the log; ``lam`` and ``beta`` are means over the anchors of the line's last batch."""

    step: int
    loss: float
    lam: float
    beta: float
    dev: float | None
    sentences_per_second: float


def read_log(out: Path) -> list[dict[str, str]]:
    """The lines of a run's log."""
    path = out / "log.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["step"].isdigit() and None not in row.values()]


def start_log(out: Path, rows: list[dict[str, str]]) -> None:
    """Begin a log, or begin it again with these lines of it."""

    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, Row._fields)
            writer.writeheader()
            writer.writerows(rows)

    checkpoint.write_aside(out / "log.csv", write)


def append_log(out: Path, row: Row) -> None:
    """Add a line; what has no value is left empty."""
    with (out / "log.csv").open("a", encoding="utf-8", newline="") as file:
        csv.writer(file).writerow(["" if value is None else value for value in row])


@contextmanager
def progress_bar(name: str, steps: int, done: int, *, shown: bool) -> Iterator[Callable[[Row], None]]:
    """A bar with the loss, the weight of the shortfall logit and the last dev score."""
    if not shown:
        yield lambda row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),  # the name of a folder
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:  # stdout is for the result
        dev = ""
        task = progress.add_task(name, total=steps, completed=done, said="")

        def show(row: Row) -> None:
            nonlocal dev
            dev = dev if row.dev is None else f"  dev {row.dev:.2f}"
            progress.update(task, completed=row.step, said=f"loss {row.loss:.4f}  lam {row.lam:.2f}{dev}")

        yield show
