"""The progress bar of the evaluation."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(visible: bool) -> Progress:
    """A bar on stderr: what is done, how much of it, and how long it will still take."""
    name = TextColumn("{task.description}", markup=False)
    columns = name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), disable=not visible)
