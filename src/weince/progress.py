"""Progress on standard error: bars in a terminal; in a file or a log, a line now and then.

Standard output is for the result of a command.
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
"""Seconds between two lines about one task."""

NAME = 24
"""Columns that the name of a run may take before figures are left out."""

WORTH_A_LINE = 1.0
"""Seconds that a task must have taken for a line to say that it is done."""


class Cut(ProgressColumn):
    """Text of a task that ends in an ellipsis where a narrow terminal has no room for all of it."""

    def __init__(
        self, text: Callable[[Task], str] = lambda task: task.description, table_column: Column | None = None
    ) -> None:
        self.text = text
        super().__init__(table_column)

    def render(self, task: Task) -> Text:
        return Text(self.text(task), no_wrap=True, overflow="ellipsis")


class Bars(Progress):
    """Rich's bars in a terminal. Elsewhere a line about a task every few seconds, and when it is done.

    What a task has to say beside its numbers is its field ``said``.

    Args:
        columns: Columns of the bars, as rich has them.
        shown: Whether anything is shown at all.
        transient: Remove the bars in the end, and say nothing of tasks that were quick.
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
        self._since: dict[TaskID, float] = {}  # when a task began, or was last spoken of
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
            self.say(line_about(task))
        if task.finished:
            self._spoken.discard(task_id)


def line_about(task: Task) -> str:
    """A task in words: how far it is, what it says of itself, how long it will still take."""
    parts = []
    if task.total is not None:
        parts.append(f"{task.completed:,.0f} of {task.total:,.0f}")
    if task.fields.get("said"):
        parts.append(str(task.fields["said"]))
    left = remaining(task)
    if left and not task.finished:
        parts.append(f"{left} left")
    return f"{task.description}: {', '.join(parts)}"


def remaining(task: Task) -> str:
    """The time that a task will still take, as 0:01:30; empty while that is not known."""
    return "" if task.time_remaining is None else str(timedelta(seconds=int(task.time_remaining)))


def bars(*, shown: bool = True, transient: bool = False) -> Bars:
    """Bars that tell what is done, how much of it, and how long it will still take."""
    columns = Cut(), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Bars(*columns, shown=shown, transient=transient)


def telling_bars(*columns: ProgressColumn, shown: bool = True, every: float | None = None) -> Bars:
    """Bars that tell what is under way (the field ``said``) and for how long; ``columns`` come after the bar."""
    said = Cut(lambda task: task.fields["said"])
    return Bars(Cut(), BarColumn(20), *columns, TimeElapsedColumn(), said, shown=shown, every=every)


@contextmanager
def passing_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that goes away in the end; call what it gives with the number of things done."""
    with bars(transient=True) as shown:
        task = shown.add_task(description, total=total)
        yield lambda done: shown.advance(task, done)


class TrainingBar(Bars):
    """The bar of a run: its name, how far it is, the time that is left and the latest figures.

    Where the terminal is narrow the last figures are left out and the name is cut; the rest stays. Without a
    terminal every call of :meth:`show` prints a line.

    Args:
        name: Name of the run.
        counted: How far the run is, in words, such as ``epoch 3/100`` for 3.
        total: What it counts to.
        done: Where it begins.
        shown: Whether anything is shown at all.
        console: Where to print; standard error if not given.
    """

    def __init__(
        self,
        name: str,
        counted: Callable[[float], str],
        total: int,
        done: int,
        *,
        shown: bool = True,
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
            shown=shown,
            console=console,
        )
        self.task = self.add_task(name, total=total, completed=done)

    def show(self, figures: Sequence[str], **changes: Any) -> None:
        """Show the latest figures, the most important first."""
        self.update(self.task, said=fitted(figures, self.room), **changes)
        if self.in_lines:
            task = self.tasks[0]
            parts = [self.counted(task.completed), *figures]
            if (left := remaining(task)) and not task.finished:
                parts.append(f"{left} left")
            self.say(f"{task.description}: {', '.join(parts)}")

    def _tell(self, task_id: TaskID) -> None:
        """Nothing between the lines of :meth:`show`."""


def fitted(parts: Sequence[str], room: int) -> str:
    """The first part, and as many of the others in order as there is room for."""
    count = len(parts)
    while count > 1 and len("  ".join(parts[:count])) > room:
        count -= 1
    return "  ".join(parts[:count])
