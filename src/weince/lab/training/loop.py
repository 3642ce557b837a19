"""The training loop of all tasks; :mod:`weince.lab.tasks.base` says what a task gives it.

A run that was stopped, also by SIGKILL, resumes from its last checkpoint and ends with the same weights as an
uninterrupted one, bit for bit on a CPU.

Several processes (``devices``, or torchrun) share one global batch: each embeds its part, and contrasts its anchors
with the candidates of all processes.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weince.lab.training import checkpoint
from weince.lab.training.capture import Step, Taken, finite_weights
from weince.lab.training.fabric import first, launch
from weince.lab.training.log import Log, Row, learned, progress_bar
from weince.lab.training.optimizers import restore, set_rate
from weince.lab.training.processes import training_lock

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from weince.lab.tasks.base import Task, Training

GLANCE = 50
"""Steps between two checks that the loss is finite; each check costs a device sync."""


def train(task: "Task", run: Any, *, bar: bool = True) -> Path:
    """Train, or resume training; returns the path to tell the user."""
    fabric = launch(run)
    training = task.prepare(run, fabric)
    started_from = first(fabric, partial(_check_start, training))
    # Only now, so that a run that cannot start leaves no folder.
    with _claimed(task, run, fabric):
        with training.arithmetic():
            _train(training, started_from, bar=bar)
        return first(fabric, partial(training.finish, bar=bar)) or run.out


def _train(training: "Training", started_from: str | None, *, bar: bool) -> None:
    run, fabric, schedule = training.run, training.fabric, training.schedule
    done = _resume(training)
    columns = (*training.columns, *learned(training.loss))
    tensorboard = getattr(run, "tensorboard", False)
    log = first(fabric, partial(Log, run.out, schedule.number(done), columns, tensorboard=tensorboard))
    step, tally = Step(training), Tally(training)
    shown_here = bar and fabric.global_rank == 0
    with progress_bar(training.title, schedule, done, shown=shown_here) as progress:
        training.reseed(done)
        for number, batch in enumerate(training.batches(done), done + 1):
            set_rate(training.optimizer, training.rate(number - 1))
            tally.add(step(batch), training.count(batch), number)
            progress.advance()
            if number % GLANCE == 0:
                check_finite(training, float(tally.loss), number)
            if schedule.logs(number):
                row = tally.row(number)
                first(fabric, partial(_tell, training, log, row, number))
                progress.show(number, training.figures(row), training.warning(row))
                tally = Tally(training)
            if schedule.ends_segment(number):
                first(fabric, partial(_save, training, number, started_from))
                training.reseed(number)
    warning = training.warning(log.rows[-1]) if log is not None and log.rows else None
    if warning is not None and warning != progress.warned:
        print(f"weince: {warning}", file=sys.stderr)


class Tally:
    """What happened since the last row of the log."""

    def __init__(self, training: "Training") -> None:
        self.training = training
        self.total = torch.zeros((), device=training.device)  # sum of the losses
        self.steps = self.count = 0
        self.began = time.perf_counter()
        self.last: Taken | None = None

    @property
    def loss(self) -> Tensor:
        return self.total / self.steps

    def add(self, taken: Taken, count: int, number: int) -> None:
        """Count a step. ``count`` is the number of views, sentences or pairs of its batch."""
        if not self.steps:
            self.first = number
        self.total += taken.loss
        self.steps, self.count, self.last = self.steps + 1, self.count + count, taken

    def row(self, number: int) -> Row:
        """The row of the log after this step. All processes must call this."""
        training, schedule = self.training, self.training.schedule
        assert self.last is not None
        mean = float(training.fabric.all_reduce(self.loss, reduce_op="mean"))  # type: ignore[arg-type]
        # After the loss was read, which waits for the device to finish.
        seconds = time.perf_counter() - self.began
        check_finite(training, mean, number)
        if schedule.ends_segment(number) and not finite_weights(training.model, training.loss):
            # A checkpoint of them could not be resumed.
            raise ValueError(f"the weights are not finite {_after(training, number)}: {_advice(training)}")
        counted = (
            {"epoch": number // schedule.in_epoch}
            if schedule.counts == "epoch"
            else {"step": number, "epoch": number / schedule.in_epoch}
        )
        return {
            **counted,
            "loss": mean,
            **training.measure(self.last.arguments),
            "lr": training.rate(self.first - 1),
            f"{training.unit}_per_second": self.count / seconds,
            "seconds": seconds,
            **learned(training.loss),
        }


def check_finite(training: "Training", loss: float, number: int) -> None:
    """Stop a run whose loss is not finite."""
    if not math.isfinite(loss):
        schedule = training.schedule
        epoch = f"in epoch {math.ceil(number / schedule.in_epoch)}"
        where = epoch if schedule.counts == "epoch" else f"at step {number}"
        raise ValueError(f"the loss is {loss} {where}: {_advice(training)}")


def _after(training: "Training", number: int) -> str:
    return f"after {training.schedule.counts} {training.schedule.number(number)}"


def _advice(training: "Training") -> str:
    """It names settings, not options of a command: a run of a study shows it to users of other commands."""
    return f"set a lower {training.lr_setting}, or precision fp32; the last checkpoint is kept"


def _tell(training: "Training", log: Log | None, row: Row, number: int) -> None:
    """Judge the encoder if it is time, and write the row."""
    assert log is not None
    if training.schedule.judges(number):
        row |= training.judge(number)
    log.add(row)


def _save(training: "Training", number: int, started_from: str | None) -> None:
    """Let the task keep what it wants, and write a checkpoint if it is due."""
    due = training.schedule.saves(number)
    training.keep(number, checkpoint=due)
    if due:
        parts: dict[str, Any] = {
            "model": training.model,
            "loss": training.loss,
            "optimizer": training.optimizer,
        }
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"started_from": started_from, "task": training.state()}
        checkpoint.save(training.run.out / "checkpoints", training.schedule.number(number), state)


def _check_start(training: "Training") -> str:
    """What the run starts from: its data and encoder. Raises if the run in the folder started from something else."""
    now, out = training.fingerprint(), training.run.out
    before = checkpoint.started_with(out / "checkpoints", "started_from")
    if before not in (None, now):
        raise ValueError(
            f"{out} began with data and an encoder of fingerprint {before}; got {now}: choose another --out"
        )
    return now


def _resume(training: "Training") -> int:
    """Load the newest checkpoint, if there is one; returns the number of steps that are done."""
    folder, schedule = training.run.out / "checkpoints", training.schedule
    newest = checkpoint.newest(folder)
    if newest is None:
        return 0
    with checkpoint.fitting(folder):
        if not isinstance(newest.state, dict) or "model" not in newest.state:
            raise ValueError("another version of weince wrote them")
        training.model.load_state_dict(newest.state["model"])
        training.loss.load_state_dict(newest.state["loss"])
        restore(training.optimizer, newest.state["optimizer"])
        training.restore(newest.state.get("task", {}))
    if training.fabric.global_rank == 0:
        total = schedule.number(schedule.steps)
        print(
            f"{training.run.out}: going on after {schedule.counts} {newest.step} of {total}", file=sys.stderr
        )
    return schedule.step(newest.step)


@contextmanager
def _claimed(task: "Task", run: Any, fabric: "Fabric") -> Iterator[None]:
    """Lock the run's folder and write the settings into it, both in the first process."""

    def enter() -> None:
        held.enter_context(training_lock(run.out))
        task.claim(run)

    with ExitStack() as held:
        first(fabric, enter)
        yield
