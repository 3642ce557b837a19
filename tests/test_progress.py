"""Progress on standard error: bars that fit a narrow terminal, and plain lines without a terminal."""

import io
import re
from itertools import count

import pytest
from rich.console import Console

from weince import progress
from weince.lab.tasks.images import log as vision_log
from weince.lab.tasks.sentences import log as text_log

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


@pytest.mark.parametrize(
    "name", ["digits paper", "tiny-imagenet released", "holiday pictures of the last ten years"]
)
@pytest.mark.parametrize(("width", "bar", "more"), [(60, 12, False), (80, 16, False), (120, 20, True)])
def test_a_narrow_terminal_shows_bar_epoch_time_and_loss(name, width, bar, more):
    with vision_log.progress_bar(name, 0, 100, shown=True, console=terminal(width)) as shown:
        for epoch in range(1, 51):
            shown.advance(1)
            shown.show({**ROW, "epoch": epoch})
        frame = last_frame(shown.bar)
    assert frame.count("━") + frame.count("╸") + frame.count("╺") == bar
    assert " epoch 50/100 " in frame
    assert re.search(r" \d:\d\d:\d\d ", frame)
    assert " loss 5.7982" in frame
    assert frame.startswith(name[:5])
    assert ("13,539 views/s" in frame) == more
    assert "lam 0." not in frame or "lam 0.208" in frame  # a figure is never cut off


@pytest.mark.parametrize("width", [60, 80])
def test_the_bar_of_a_text_run_fits_too(width):
    console = terminal(width)
    bar = text_log.progress_bar("simcse_paper", 15625, 0, in_epoch=15625, shown=True, console=console)
    with bar as show:
        for step in (125, 250):
            show(text_log.Row(step, step / 30, 0.1234, 0.5, 3.0, 71.23, 100.0, 1.0))
    frame = console.file.getvalue().rpartition("simcse_paper")[2]  # the last frame
    for text in ("step 250/15625", "loss 0.1234"):
        assert text in frame
    assert re.search(r"\d:\d\d:\d\d", frame)
    assert ("dev 71.23" in frame) == (width == 80)


def test_without_a_terminal_a_run_prints_a_line_per_epoch():
    console = a_file()
    with vision_log.progress_bar("digits paper", 1, 3, shown=True, console=console) as shown:
        for epoch in (2, 3):
            for _ in range(5):
                shown.advance(0.2)
            shown.show({**ROW, "epoch": epoch})
    first, second = console.file.getvalue().splitlines()
    assert first.startswith("digits paper: epoch 2/3, loss 5.7982, lam 0.208, beta 3.09, 13,539 views/s")
    assert second == "digits paper: epoch 3/3, loss 5.7982, lam 0.208, beta 3.09, 13,539 views/s"


def test_a_text_run_prints_looks_at_dev_ends_of_epochs_and_after_a_silence(clock):
    console = a_file()
    with text_log.progress_bar("run", 40, 0, in_epoch=20, shown=True, console=console) as show:
        for step, dev in ((5, None), (10, 71.5), (15, None), (22, None), (25, None)):
            show(text_log.Row(step, step / 30, 0.5, 0.1, 3.0, dev, 10.0, 1.0))
        clock[0] += text_log.PATIENCE
        show(text_log.Row(30, 1.0, 0.4, 0.1, 3.0, None, 10.0, 1.0))
    lines = console.file.getvalue().splitlines()
    assert [re.match(r"run: step (\d+)/40", line).group(1) for line in lines] == ["10", "22", "30"]
    assert "loss 0.4000, dev 71.50, lam 0.10" in lines[-1]  # dev is the last known score


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
