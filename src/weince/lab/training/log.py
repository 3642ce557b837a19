"""Tell the progress of a run: ``log.csv``, optionally TensorBoard, and a progress bar."""

import csv
import io
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from weince.files import write_text_aside

if TYPE_CHECKING:
    from rich.console import Console

    from weince.lab.tasks.base import Schedule
    from weince.progress import TrainingBar

PATIENCE = 30.0
"""Without a terminal, show a row of the log after this many seconds without output."""

Row = dict[str, float]


def read_log(path: Path) -> list[Row]:
    """The rows of a ``log.csv``, without their empty cells; no rows if the file is missing.

    A last line that was cut while it was written is left out.

    Raises:
        ValueError: It is not a log.
    """
    if not path.exists():
        return []
    try:
        text = path.read_bytes().decode()
        cells = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))
        if any(None in row.values() for row in cells):
            raise ValueError("a row is incomplete")
        rows = [{name: float(value) for name, value in row.items() if value} for row in cells]
    except (ValueError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to go on without its rows") from None
    if any("epoch" not in row for row in rows):
        raise ValueError(f"{path} is damaged (no column epoch): remove it to go on without its rows")
    return rows


def learned(loss: nn.Module) -> Row:
    """Single numbers that a loss learns, such as a temperature; the names cannot be those of other columns."""
    return {
        f"learned_{name}": value.item()
        for name, value in loss.named_parameters()
        if value.requires_grad and value.numel() == 1
    }


class Log:
    """``log.csv`` of a run, complete after every row.

    Args:
        folder: Folder of the run.
        done: Number of the last step or epoch to keep; later rows, left by a run that was cut, are dropped.
        columns: The columns; the first counts steps or epochs. Columns of the kept rows come after them.
        tensorboard: Write event files too.
    """

    def __init__(self, folder: Path, done: int, columns: Sequence[str], *, tensorboard: bool = False) -> None:
        self.path, self.counter = folder / "log.csv", columns[0]
        self.rows = [row for row in read_log(self.path) if row.get(self.counter, math.inf) <= done]
        self.columns = list(dict.fromkeys([*columns, *(name for row in self.rows for name in row)]))
        write_text_aside(
            self.path, "".join(map(self._line, [self.columns, *map(self._cells, self.rows)])), "log"
        )
        self.writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def add(self, row: Row) -> None:
        """Append a row; it must have no column that the log has not."""
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(self._line(self._cells(row)))
        except OSError as error:
            raise OSError(f"the log {self.path} could not be written: {error}. Is the disk full?") from error
        self.rows.append(row)
        if self.writer is not None:
            for name in row.keys() - {self.counter}:
                self.writer.add_scalar(name, row[name], int(row[self.counter]))
            self.writer.flush()

    def _cells(self, row: Row) -> list[str]:
        if unknown := row.keys() - set(self.columns):
            raise AssertionError(f"columns that the log does not have: {unknown}")
        return [_written(row[name]) if name in row else "" for name in self.columns]

    @staticmethod
    def _line(cells: Sequence[str]) -> str:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        return line.getvalue()


def _written(value: float) -> str:
    """A number with six digits; a whole one, such as a step, with all of them."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.6g}"


class Bar:
    """Progress over the steps of a run, with the latest figures; silent if ``bar`` is None."""

    def __init__(self, bar: "TrainingBar | None", schedule: "Schedule", done: int) -> None:
        self.bar, self.schedule = bar, schedule
        self.shown_at, self.epoch = time.monotonic(), done // schedule.in_epoch
        self.warned: str | None = None
        """The warning during training, which comes once; the end of the run warns of the last row."""

    def advance(self) -> None:
        """One more step is done."""
        if self.bar is not None:
            self.bar.advance(self.bar.task, 1 / self.schedule.step(1))

    def show(self, step: int, figures: Sequence[str], warning: str | None) -> None:
        """Show figures after a step. Without a terminal: if the encoder was judged, an epoch ends, or it is time."""
        if self.bar is None:
            return
        epoch, late = step // self.schedule.in_epoch, time.monotonic() - self.shown_at >= PATIENCE
        if not self.bar.in_lines or self.schedule.judges(step) or epoch > self.epoch or late:
            self.shown_at, self.epoch = time.monotonic(), epoch
            # The exact count; the sum of the steps has rounding.
            self.bar.show(figures, completed=step / self.schedule.step(1))
        if warning and self.warned is None:
            self.warned = warning
            self.bar.console.print(f"weince: {warning}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(
    name: str, schedule: "Schedule", done: int, *, shown: bool, console: "Console | None" = None
) -> Iterator[Bar]:
    """A bar from step ``done`` to the end while the context lasts; without a terminal, lines."""
    if not shown:
        yield Bar(None, schedule, done)
        return
    from weince.progress import TrainingBar

    total = schedule.number(schedule.steps)

    def counted(number: float) -> str:
        return f"{schedule.counts} {number:.0f}/{total}"

    with TrainingBar(name, counted, total, schedule.number(done), console=console) as bar:
        yield Bar(bar, schedule, done)
