"""The log of a run: rows that come back, whatever cut the run, and the bar beside it."""

import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from weince.lab.tasks.base import Schedule
from weince.lab.training import log as module
from weince.lab.training.log import Log, progress_bar, read_log
from weince.lab.training.loop import check_finite

COLUMNS = ("epoch", "loss", "crowded", "lr", "seconds", "vote")


def row(epoch):
    return {name: float(epoch) for name in COLUMNS}


def test_rows_come_back_and_those_after_the_checkpoint_are_dropped(tmp_path):
    log = Log(tmp_path, 0, COLUMNS)
    for epoch in (1, 2, 3):
        log.add(row(epoch))
    assert read_log(tmp_path / "log.csv") == [row(1), row(2), row(3)]
    Log(tmp_path, 2, COLUMNS).add(row(3))
    assert [r["epoch"] for r in read_log(tmp_path / "log.csv")] == [1, 2, 3]
    assert read_log(tmp_path / "nowhere.csv") == []


def test_tensorboard_gets_every_column(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    columns = (*COLUMNS, "learned_bias")
    Log(tmp_path, 0, columns, tensorboard=True).add(row(1) | {"learned_bias": 2.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {*COLUMNS[1:], "learned_bias"}


def test_a_log_from_before_a_column_is_read_and_gone_on_with(tmp_path):
    before = [name for name in COLUMNS if name != "crowded"]
    lines = [",".join(before), ",".join("1" for _ in before), ",".join("2" for _ in before)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    old = [dict.fromkeys(before, value) for value in (1.0, 2.0)]
    assert read_log(tmp_path / "log.csv") == old
    Log(tmp_path, 2, COLUMNS).add(row(3))
    Log(tmp_path, 3, COLUMNS).add(row(4))  # reads the empty cells
    assert read_log(tmp_path / "log.csv") == [*old, row(3), row(4)]
    cells = [line.split(",")[2] for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert cells == ["crowded", "", "", "3", "4"]


def test_a_line_that_was_cut_while_it_was_written_is_left_out(tmp_path):
    log = Log(tmp_path, 0, COLUMNS)
    for epoch in (1, 2):
        log.add(row(epoch))
    path = tmp_path / "log.csv"
    whole = path.read_text()
    for cut in range(len(whole.splitlines()[0]) + 8, len(whole)):
        path.write_text(whole[:cut])
        kept = [row(1), row(2)][: whole[:cut].count("\n") - 1]
        assert read_log(path) == kept
    Log(tmp_path, 2, COLUMNS).add(row(3))
    assert [r["epoch"] for r in read_log(path)] == [1, 3]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"epoch,loss\n1\n2,3\n", "a row is incomplete"),
        (b"a,b\n1,2\n", "no column epoch"),
        (b"epoch,loss\n1,x\n", "could not convert"),
        (b"\xff\n", "codec"),
    ],
)
def test_what_is_no_log_is_named(tmp_path, content, said):
    (tmp_path / "log.csv").write_bytes(content)
    with pytest.raises(ValueError, match=rf"log\.csv is damaged \(.*{said}.*\): remove it to go on"):
        Log(tmp_path, 2, COLUMNS)


def test_numbers_keep_six_digits_and_steps_all_of_them(tmp_path):
    Log(tmp_path, 0, COLUMNS).add(
        row(1) | {"epoch": 12_345_678, "loss": 4.38251, "lr": 1e-7, "vote": math.inf}
    )
    [found] = read_log(tmp_path / "log.csv")
    assert (found["epoch"], found["loss"], found["lr"], found["vote"]) == (
        12_345_678,
        4.38251,
        1e-7,
        math.inf,
    )


@pytest.mark.posix
def test_a_full_disk_names_the_log(tmp_path, monkeypatch):
    log = Log(tmp_path, 0, COLUMNS)
    log.path = log.path.with_name("no") / "log.csv"
    with pytest.raises(OSError, match=r"the log \S+/no/log\.csv could not be written: .* Is the disk full\?"):
        log.add(row(1))


@pytest.mark.parametrize(
    ("counts", "step", "said"),
    [("epoch", 5, "in epoch 3: set a lower optimizer.lr"), ("step", 5, "at step 5: set")],
)
def test_a_loss_that_is_no_number_stops_the_run(counts, step, said):
    training = SimpleNamespace(schedule=Schedule(8, 2, 2, 2, counts=counts), lr_setting="optimizer.lr")
    check_finite(training, 1.0, step)
    with pytest.raises(ValueError, match=f"the loss is nan {said}"):
        check_finite(training, math.nan, step)


def test_without_a_terminal_a_line_comes_when_an_encoder_was_judged_an_epoch_ends_or_it_is_time(
    tmp_path, monkeypatch
):
    now, schedule = [0.0], Schedule(steps=40, in_epoch=10, segment=6, log_every=1, judge_every=1)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    out = tmp_path / "out.txt"
    with out.open("w") as file:
        console = Console(file=file, width=200)
        with progress_bar("name", schedule, 2, shown=True, console=console) as bar:
            for step in range(3, 12):
                now[0] = 31.0 if step >= 8 else 0.0
                bar.show(step, [f"loss {step}"], "odd" if step == 4 else None)
    lines = out.read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "weince: odd", *(f"name: step {step}/40" for step in (6, 8, 10))
    ]  # fmt: skip
    with progress_bar("name", schedule, 2, shown=False) as bar:
        bar.advance()
        bar.show(6, ["loss"], "odd")
        assert bar.warned is None
