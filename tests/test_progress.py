"""Progress on standard error: bars that fit a narrow terminal, and plain lines without a terminal."""

import io
import re
from itertools import count

import pytest
from rich.console import Console

from weince import progress
from weince.lab.tasks.base import Schedule
from weince.lab.tasks.images.training import ImageTraining
from weince.lab.tasks.sentences.training import SentenceTraining
from weince.lab.training.log import progress_bar

ROW = {
    "loss": 5.7982, "lam": 0.208, "beta": 3.09, "views_per_second": 13539.0, "crowded": 0.0, "effective_rank": 30.0,
}  # fmt: skip


def terminal(width):
    """A terminal whose clock advances by one second at each reading."""
    seconds = count()
    return Console(
        file=io.StringIO(), width=width, force_terminal=True, get_time=lambda: float(next(seconds))
    )


def a_file():
    return Console(file=io.StringIO(), force_terminal=False)


def last_frame(bar):
    """The line that a terminal shows for a bar. More than one line would flicker."""
    screen = Console(file=io.StringIO(), width=bar.console.width, force_terminal=True, record=True)
    screen.print(bar.get_renderable())
    lines = screen.export_text().rstrip("\n").split("\n")
    assert len(lines) == 1
    assert len(lines[0]) <= bar.console.width
    return lines[0].rstrip()


@pytest.fixture
def clock(monkeypatch):
    """Time stands still until a test moves it."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def by_epochs(epochs):
    return Schedule(epochs, in_epoch=1, segment=1, log_every=1, counts="epoch")


@pytest.mark.parametrize(
    "name", ["digits paper", "tiny-imagenet released", "holiday pictures of the last ten years"]
)
@pytest.mark.parametrize(("width", "bar", "more"), [(60, 12, False), (80, 16, False), (120, 20, True)])
def test_a_narrow_terminal_shows_bar_epoch_time_and_loss(name, width, bar, more):
    figures = ImageTraining.figures(None, ROW)
    with progress_bar(name, by_epochs(100), 0, shown=True, console=terminal(width)) as shown:
        for epoch in range(1, 51):
            shown.advance()
            shown.show(epoch, figures, None)
        frame = last_frame(shown.bar)
    assert frame.count("━") + frame.count("╸") + frame.count("╺") == bar
    assert " epoch 50/100 " in frame
    assert re.search(r" \d:\d\d:\d\d ", frame)
    assert " loss 5.7982" in frame
    assert frame.startswith(name[:5])
    assert ("13,539 views/s" in frame) == more
    assert "lam 0." not in frame or "lam 0.208" in frame  # a figure is never cut off


@pytest.mark.parametrize("width", [60, 80])
def test_the_bar_of_a_run_on_sentences_fits_too(width):
    console, schedule = terminal(width), Schedule(15625, 15625, 125, 25, judge_every=1)
    figures = SentenceTraining.figures(None, {"loss": 0.1234, "dev": 71.23, "lam": 0.5})
    with progress_bar("simcse_paper", schedule, 0, shown=True, console=console) as shown:
        for step in (125, 250):
            shown.show(step, figures, None)
    frame = console.file.getvalue().rpartition("simcse_paper")[2]  # the last frame
    for text in ("step 250/15625", "loss 0.1234"):
        assert text in frame
    assert re.search(r"\d:\d\d:\d\d", frame)
    assert ("dev 71.23" in frame) == (width == 80)


def test_without_a_terminal_a_run_prints_a_line_per_epoch():
    console, figures = a_file(), ImageTraining.figures(None, ROW)
    with progress_bar("digits paper", by_epochs(3), 1, shown=True, console=console) as shown:
        for epoch in (2, 3):
            shown.advance()
            shown.show(epoch, figures, None)
    first, second = console.file.getvalue().splitlines()
    assert first.startswith("digits paper: epoch 2/3, loss 5.7982, lam 0.208, beta 3.09, 13,539 views/s")
    assert second == "digits paper: epoch 3/3, loss 5.7982, lam 0.208, beta 3.09, 13,539 views/s"


def test_lines_come_every_few_seconds_and_when_a_long_task_is_done(clock):
    console = a_file()
    with progress.Bars(console=console) as bars:
        task = bars.add_task("features", total=6)
        for _ in range(5):
            clock[0] += 2
            bars.advance(task)
        assert [line.partition(",")[0] for line in console.file.getvalue().splitlines()] == [
            "features: 3 of 6"
        ]
        clock[0] += 2
        bars.update(task, advance=1, said="all of them")
        assert console.file.getvalue().splitlines()[-1] == "features: 6 of 6, all of them"
        quick = bars.add_task("quick", total=1)
        bars.advance(quick)
    assert "quick" not in console.file.getvalue()


def test_a_bar_that_goes_away_says_nothing_of_what_was_quick(clock):
    console = a_file()
    with progress.Bars(console=console, transient=True) as bars:
        task = bars.add_task("reading", total=2)
        clock[0] += 2
        bars.update(task, advance=2)
    assert console.file.getvalue() == ""


def test_nothing_is_printed_that_was_not_asked_for(clock):
    console = a_file()
    with progress.Bars(console=console, shown=False) as bars:
        task = bars.add_task("features", total=2)
        clock[0] += 60
        bars.advance(task, 2)
    assert console.file.getvalue() == ""


def test_long_lines_and_brackets_are_printed_as_they_are():
    console = a_file()
    name = "a [bold]name[/bold] " * 20
    progress.Bars(console=console).say(name)
    assert console.file.getvalue() == name + "\n"


def test_as_many_figures_as_there_is_room_for():
    assert progress.fitted(["loss 1", "lam 2", "beta 3"], 13) == "loss 1  lam 2"
    assert progress.fitted(["loss 1", "lam 2", "beta 3"], 12) == "loss 1"
    assert progress.fitted(["loss 1", "lam 2"], 0) == "loss 1"  # the first figure is always kept
