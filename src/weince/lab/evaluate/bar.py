"""The progress bar of the evaluation."""

from weince.progress import Bars, bars


def progress_bar(visible: bool) -> Bars:
    """A bar on stderr: what is done, how much of it, and how long it will still take."""
    return bars(shown=visible)
