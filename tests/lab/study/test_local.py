"""Runs on this machine: their cores and GPUs, and a deadline, by which some are not started."""

import os
import time
from dataclasses import replace

import pytest
from lab.study.tables import small_table

from weince.lab.study import local
from weince.lab.study.clock import MARGIN, Clock
from weince.lab.study.local import shares, side_by_side
from weince.lab.study.plan import plan
from weince.lab.study.process import Failed
from weince.lab.study.table import read_table


def logged(run, epochs, seconds=50.0):
    run.folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{epoch},{seconds}" for epoch in range(1, epochs + 1)]
    (run.folder / "log.csv").write_text("\n".join(["epoch,seconds", *rows, ""]))


def test_no_run_is_started_that_would_not_end():
    clock = Clock(seconds=100.0, overhead=20.0, epoch=1.0)
    assert clock.fits(10, 6)
    assert not clock.fits(10, 8)
    clock.learn(took=50.0, epochs=[30.0, 1.0, 2.0, 1.5], at_once=4)  # the first epoch compiles
    assert clock.epoch == 0.5
    assert clock.overhead == 42.0
    assert clock.estimate(100, 1) == 42.0 + MARGIN * 100 * 0.5
    assert clock.fits(100, 1)
    assert not clock.fits(100, 2)


def test_a_run_with_cores_of_its_own_takes_as_long_alone_as_beside_another():
    """A run alone on one of two cores was taken to be twice as fast, and ended long after the deadline."""
    clock = Clock(seconds=100.0, overhead=0.0, epoch=6.0, side_by_side=2)
    assert clock.estimate(10, 1) == clock.estimate(10, 2) == MARGIN * 60
    assert clock.estimate(10, 4) == MARGIN * 120
    clock.learn(took=82.0, epochs=[8.0] * 10, at_once=2)
    assert clock.estimate(10, 1) == 2.0 + MARGIN * 80


# Estimates for runs of 10 epochs: 31 s alone, 42 s with two at once, 53 s with three.
@pytest.mark.parametrize(("seconds", "first"), [(1000.0, 4), (58.0, 3), (45.0, 2), (35.0, 1), (25.0, 0)])
def test_a_sweep_that_does_not_fit_starts_with_fewer_runs_or_none(tmp_path, monkeypatch, seconds, first):
    """The runs that wait are not dropped: those that have ended may show that there is time for them."""
    runs = plan(read_table(str(small_table(tmp_path, epochs=10))), tmp_path)
    done, told = [], []

    def carry_out(run, *_):
        time.sleep(0.1)
        done.append(run)

    monkeypatch.setattr(local, "carry_out_run", carry_out)
    monkeypatch.setattr(local, "read_log", lambda _: [])
    clock = Clock(seconds, overhead=20.0, epoch=1.0)
    failed = local.run_here(runs, jobs=4, tell=lambda run, what: told.append((run, what)), clock=clock)
    assert failed == {}
    assert {run.name for run in done} == {run.name for run in (runs if first else [])}
    if first:
        assert told[:first] == [(run, "started") for run in runs[:first]]
        assert first == len(runs) or told[first][1] == "done"
    else:
        assert told == [(run, local.LATE) for run in runs]


def test_a_long_run_that_is_active_keeps_others_from_slowing_it(tmp_path, monkeypatch):
    """Alone it takes 42 s of the 45, beside another 64."""
    short, long = (
        plan(read_table(str(small_table(tmp_path, epochs=10))), tmp_path, epochs=epochs)[0]
        for epochs in (5, 20)
    )
    told = []
    monkeypatch.setattr(local, "carry_out_run", lambda run, *_: time.sleep(0.3 if run is long else 0.0))
    monkeypatch.setattr(local, "read_log", lambda _: [])
    clock = Clock(45.0, overhead=20.0, epoch=1.0)
    local.run_here([long, short], jobs=2, tell=lambda run, what: told.append((run, what)), clock=clock)
    assert told == [(run, what) for run in (long, short) for what in ("started", "done")]


def test_runs_that_would_not_end_beside_the_active_ones_wait_for_these(tmp_path, monkeypatch):
    """They were dropped: a comparison made final runs of its last losses, and none of its baseline."""
    first, second, *others = runs = plan(read_table(str(small_table(tmp_path, epochs=10))), tmp_path)
    done, named, told = [], [others], []

    def carry_out(run, *_):
        time.sleep(0.3 if run is second else 0.0)
        done.append(run)

    monkeypatch.setattr(local, "carry_out_run", carry_out)
    monkeypatch.setattr(local, "read_log", lambda _: [])
    local.run_here(
        [first, second],
        jobs=3,
        tell=lambda run, what: told.append(what),
        clock=Clock(50.0, overhead=20.0, epoch=1.0),  # time for two at once
        further=lambda waiting, failed: waiting + (named.pop() if named else []),
    )
    assert local.LATE not in told
    assert len(done) == len(runs)
    at_once, now = 0, 0
    for what in told:
        now += 1 if what == "started" else -1
        at_once = max(at_once, now)
    assert at_once == 2


def test_a_run_took_as_long_as_with_the_most_runs_at_once(tmp_path, monkeypatch):
    runs = plan(read_table(str(small_table(tmp_path, epochs=10))), tmp_path)[:2]
    learned = []
    monkeypatch.setattr(local, "carry_out_run", lambda run, *_: time.sleep(0.4 if run is runs[0] else 0.0))
    monkeypatch.setattr(local, "read_log", lambda _: [])
    monkeypatch.setattr(Clock, "learn", lambda self, took, epochs, at_once, loss: learned.append(at_once))
    local.run_here(runs, jobs=2, tell=lambda run, what: None, clock=Clock(1000.0, overhead=1.0, epoch=0.1))
    assert learned == [2, 2]


def test_a_run_that_failed_does_not_make_the_guess(tmp_path, monkeypatch):
    def fail(*_):
        raise Failed("the reason")

    (run, *_) = plan(read_table(str(small_table(tmp_path, epochs=10))), tmp_path)
    monkeypatch.setattr(local, "carry_out_run", fail)
    monkeypatch.setattr(local, "read_log", lambda _: [{"epoch": 1, "seconds": 50.0}])
    clock = Clock(100.0, overhead=1.0, epoch=0.1)
    assert local.run_here([run], jobs=1, tell=lambda run, what: None, clock=clock) == {run.name: "the reason"}
    assert (clock.overhead, clock.epoch) == (1.0, 0.1)


def test_what_has_ended_makes_the_guess(tmp_path, monkeypatch):
    """The first run takes far longer than estimated, so no other run is started."""
    runs = plan(read_table(str(small_table(tmp_path, epochs=10))), tmp_path)
    done = []

    def carry_out(run, *_):
        logged(run, 10)
        done.append(run)

    monkeypatch.setattr(local, "carry_out_run", carry_out)
    clock = Clock(100.0, overhead=1.0, epoch=0.1)
    local.run_here(runs, jobs=1, tell=lambda run, what: None, clock=clock)
    assert done == runs[:1]


def test_a_slow_loss_does_not_keep_the_runs_of_a_fast_one_from_their_time(tmp_path, monkeypatch):
    """After its run the others were dropped, each taken to be as slow; and after theirs it was begun in vain."""
    runs = plan(read_table(str(small_table(tmp_path, epochs=10))), tmp_path)
    fast, slow = ([run for run in runs if run.loss == loss] for loss in ("InfoNCE", "paper"))
    done = []

    def carry_out(run, *_):
        logged(run, 10, seconds=50.0 if run in slow else 0.1)
        done.append(run)

    monkeypatch.setattr(local, "carry_out_run", carry_out)
    clock = Clock(100.0, overhead=1.0, epoch=0.1)
    runs = [slow[0], fast[0], slow[1], fast[1]]
    local.run_here(runs, jobs=1, tell=lambda run, what: None, clock=clock)
    assert done == [slow[0]]  # nothing is known of the fast loss yet
    done.clear()
    clock = Clock(100.0, overhead=1.0, epoch=0.1)
    for folder in {run.folder for run in runs}:
        (folder / "log.csv").unlink(missing_ok=True)
    runs = [fast[0], slow[0], slow[1], fast[1]]
    local.run_here(runs, jobs=1, tell=lambda run, what: None, clock=clock)
    assert done == [fast[0], slow[0], fast[1]]


def test_a_run_that_was_begun_needs_only_the_rest_of_its_time(tmp_path, monkeypatch):
    """It was not started, however close to its end, if the time left was less than that of a whole run."""
    run, other, *_ = plan(read_table(str(small_table(tmp_path, epochs=10))), tmp_path)
    done = []
    monkeypatch.setattr(local, "carry_out_run", lambda run, *_: done.append(run))
    logged(run, 8, seconds=1.0)
    clock = Clock(25.0, overhead=20.0, epoch=1.0)
    local.run_here([run, other], jobs=1, tell=lambda run, what: None, clock=clock)
    assert done == [run]


@pytest.mark.parametrize(("every", "left"), [(1, 3), (2, 4), (5, 5), (10, 10)])
def test_the_rest_of_a_run_begins_at_its_last_checkpoint(tmp_path, every, left):
    (run, *_) = plan(
        read_table(str(small_table(tmp_path, epochs=10))), tmp_path, extra={"checkpoint_every": every}
    )
    assert local.epochs_left(run) == 10
    logged(run, 7)
    assert local.epochs_left(run) == left
    (run.folder / "log.csv").write_text("damaged,\n1")
    assert local.epochs_left(run) == 10


def test_epochs_of_an_earlier_call_are_no_part_of_the_time_of_this_one(tmp_path, monkeypatch):
    """They made the rest of a run's time, its start and its evaluation, seem to be nothing."""
    (run, *_) = plan(read_table(str(small_table(tmp_path, epochs=10))), tmp_path)
    logged(run, 8, seconds=0.01)

    def carry_out(run, *_):
        time.sleep(0.3)
        logged(run, 10, seconds=0.01)

    monkeypatch.setattr(local, "carry_out_run", carry_out)
    clock = Clock(100.0, overhead=20.0, epoch=1.0)
    local.run_here([run], jobs=1, tell=lambda run, what: None, clock=clock)
    assert clock.epoch == 0.01
    assert 0.28 <= clock.overhead < 20.0


@pytest.mark.parametrize(
    ("machine", "threads", "gpus"),
    [
        ((2, 16, 0), "8", [None, None]),
        ((3, 2, 1), "1", [None, None, None]),
        ((5, 16, 2), "3", ["0", "1", "0", "1", "0"]),
        ((3, 16, 2, "4, 6"), "5", ["4", "6", "4"]),
    ],
)
def test_runs_at_once_share_a_machine(machine, threads, gpus):
    found = shares(*machine)
    assert [place.get("CUDA_VISIBLE_DEVICES") for place in found] == gpus
    assert {place["OMP_NUM_THREADS"] for place in found} == {threads}


@pytest.mark.parametrize(
    ("cpus", "gpus", "extra", "wanted"),
    [(16, 0, {}, 3), (2, 0, {}, 2), (16, 1, {}, 1), (16, 2, {}, 2), (16, 2, {"device": "cuda:1"}, 1),
     (2, 1, {"device": "cpu"}, 2)],
)  # fmt: skip
def test_runs_at_once_have_cores_or_gpus_of_their_own(tmp_path, monkeypatch, cpus, gpus, extra, wanted):
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    first, *_ = plan(read_table(str(small_table(tmp_path))), tmp_path)
    run = replace(first, extra=extra)
    assert side_by_side(run, 3) == wanted
