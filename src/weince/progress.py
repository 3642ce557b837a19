"""Progress on standard error: bars in a terminal, a line every few seconds in a file or a log.

Standard output is only for the result of a command.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

EVERY = 5.0
"""Seconds between two lines about a task."""

NAME = 24
"""Most terminal columns kept free for the name of a run; figures use the rest."""

WORTH_A_LINE = 1.0
"""A finished task gets a line if it began, or had its last line, at least this many seconds ago."""


class Cut(ProgressColumn):
    """A column with text of a task, cut with an ellipsis if the terminal is too narrow."""

    def __init__(
        self, text: Callable[[Task], str] = lambda task: task.description, table_column: Column | None = None
    ) -> None:
        self.text = text
        super().__init__(table_column)

    def render(self, task: Task) -> Text:
        return Text(self.text(task), no_wrap=True, overflow="ellipsis")


class Bars(Progress):
    """Rich's bars in a terminal. Elsewhere it prints a line about a task every few seconds, and when it is done.

    The field ``said`` of a task is text to show beside its numbers.

    Args:
        columns: Columns of the bars, as in rich.
        shown: Whether to show anything.
        transient: Remove the bars at the end, and print no line about a task that is done within ``every`` seconds.
        every: Seconds between two lines; ``EVERY`` if not given.
        console: Where to print; standard error if not given.
    """

    def __init__(
        self,
        *columns: str | ProgressColumn,
        shown: bool = True,
        transient: bool = False,
        every: float | None = None,
        console: Console | None = None,
    ) -> None:
        console = console or Console(stderr=True)
        live = console.is_interactive or console.is_jupyter
        super().__init__(*columns, console=console, transient=transient, disable=not (shown and live))
        self.in_lines = shown and not live
        self.every = EVERY if every is None else every
        self._since: dict[TaskID, float] = {}  # when a task began, or when its last line was printed
        self._spoken: set[TaskID] = set()

    def say(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def add_task(self, description: str, *args: Any, **options: Any) -> TaskID:
        task = super().add_task(description, *args, **{"said": "", **options})
        self._since[task] = time.monotonic()
        return task

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        if not self.in_lines:
            return
        now, task = time.monotonic(), next(task for task in self.tasks if task.id == task_id)
        waited = now - self._since[task_id]
        worth = not self.live.transient and waited >= WORTH_A_LINE
        if waited >= self.every or (task.finished and (worth or task_id in self._spoken)):
            self._since[task_id] = now
            self._spoken.add(task_id)
            count = "" if task.total is None else f"{int(task.completed):,} of {task.total:,.0f}"
            self.say(line_about(task, count, task.fields["said"]))
        if task.finished:
            self._spoken.discard(task_id)


def line_about(task: Task, *parts: str) -> str:
    """A line about a task: the parts that are not empty, and the remaining time."""
    left = f"{remaining(task)} left" if remaining(task) and not task.finished else ""
    return f"{task.description}: {', '.join(filter(None, [*parts, left]))}"


def remaining(task: Task) -> str:
    """The remaining time of a task, as 0:01:30; empty while it is unknown."""
    return "" if task.time_remaining is None else str(timedelta(seconds=int(task.time_remaining)))


def bars(*, shown: bool = True, transient: bool = False) -> Bars:
    """Bars with the name of a task, its count and the remaining time."""
    columns = Cut(), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Bars(*columns, shown=shown, transient=transient)


def telling_bars(*columns: ProgressColumn, shown: bool = True, every: float | None = None) -> Bars:
    """Bars with the elapsed time and the text ``said``; ``columns`` come after the bar."""
    said = Cut(lambda task: task.fields["said"])
    return Bars(Cut(), BarColumn(20), *columns, TimeElapsedColumn(), said, shown=shown, every=every)


@contextmanager
def passing_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that disappears at the end. Call the function it yields with the number of items just done."""
    with bars(transient=True) as shown:
        task = shown.add_task(description, total=total)
        yield lambda done: shown.advance(task, done)


class TrainingBar(Bars):
    """The bar of a run: its name, its progress, the remaining time and the latest figures.

    A narrow terminal cuts the name and drops the last figures; the rest stays. Without a terminal, every call of
    :meth:`show` prints a line.

    Args:
        name: Name of the run.
        counted: Maps a count to text, such as 3 to ``epoch 3/100``.
        total: Count at the end.
        done: Count at the start.
        console: Where to print; standard error if not given.
    """

    def __init__(
        self,
        name: str,
        counted: Callable[[float], str],
        total: int,
        done: int,
        *,
        console: Console | None = None,
    ) -> None:
        console = console or Console(stderr=True)
        length = max(10, min(20, console.width // 5))
        taken = min(len(name), NAME), length, len(counted(total)), len("-:--:--")
        self.room = console.width - sum(taken) - len(taken)
        self.counted = counted
        super().__init__(
            Cut(),
            BarColumn(length, table_column=Column(no_wrap=True)),
            Cut(lambda task: counted(task.completed), table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            Cut(lambda task: task.fields["said"], table_column=Column(no_wrap=True)),
            console=console,
        )
        self.task = self.add_task(name, total=total, completed=done)

    def show(self, figures: Sequence[str], **changes: Any) -> None:
        """Show the latest figures, the most important first."""
        self.update(self.task, said=fitted(figures, self.room), **changes)
        if self.in_lines:
            task = self.tasks[0]
            self.say(line_about(task, self.counted(task.completed), *figures))

    def _tell(self, task_id: TaskID) -> None:
        """Print nothing: only :meth:`show` prints lines."""


def fitted(parts: Sequence[str], room: int) -> str:
    """The first part, and as many of the next ones as fit into ``room`` columns."""
    count = len(parts)
    while count > 1 and len("  ".join(parts[:count])) > room:
        count -= 1
    return "  ".join(parts[:count])
