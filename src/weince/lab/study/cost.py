"""Measure what a loss costs on this machine: time and memory of the loss alone and of a whole training step.

Runs are measured in a process of their own, so that the sweep holds no GPU memory. Its `main` reads a JSON list of
runs from standard input, each a list of options of ``weince train``, and prints a line of JSON for each: its cost, or
why it could not be measured.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import IO, Any, NamedTuple

import torch
from torch import nn

from weince.lab import settings
from weince.lab.configure import build_loss
from weince.lab.study.execute import hardware
from weince.lab.study.plan import Run
from weince.lab.study.records import add_file
from weince.lab.tasks.registry import task_of
from weince.lab.training.capture import EAGER_STEPS, Step
from weince.lab.training.launch import import_fabric, launch
from weince.progress import bars

RECORD = "cost.json"
REPEATS, LEAST_SECONDS, MOST_SECONDS = 20, 0.3, 3.0
"""A step or pass is timed this many times and for at least so long: a loss takes 0.2 ms on a GPU, and 20 of those are
over before the clocks are up. A slow one is timed less often."""

Cost = dict[str, Any]
"""Keys: ``loss_ms``, ``loss_mib``, ``step_ms``, ``step_mib``, ``epoch_seconds``, ``start_seconds``, ``batch``,
``width``, ``hardware``."""


class NotMeasured(ValueError):
    """The cost of a run could not be measured; the message says why."""


def measure_costs(
    runs: Sequence[Run], environment: Mapping[str, str] | None = None
) -> Iterator[Cost | NotMeasured]:
    """Measure the cost of each run on this machine, one after the other in one separate process.

    ``environment`` has additional variables of that process.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            # Not -m: this package imports this module, and python would warn that it runs it twice.
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended: the loop says why
                process.stdin.write(json.dumps([run.arguments() for run in runs]))
                process.stdin.close()
            for run in runs:
                line = process.stdout.readline()
                if line:
                    found = json.loads(line)
                else:
                    found = {"why": f"its process ended with status {process.wait()}: {_last_line(said)}"}
                why = f"the cost of a step with {run.loss} could not be measured: {found.get('why')}"
                yield NotMeasured(why) if "why" in found else found
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    return (file.read().strip().splitlines() or ["it printed nothing"])[-1]


def measure_cost(run: Run, environment: Mapping[str, str]) -> Cost:
    """The same of one run.

    Raises:
        NotMeasured: Its cost could not be measured.
    """
    (found,) = measure_costs([run], environment)
    if isinstance(found, NotMeasured):
        raise found
    return found


@dataclass(frozen=True)
class Timing:
    """Measures the costs of runs, here or as a cluster job, and adds each cost to the record of its run.

    A run that cannot be measured is named on standard error.
    """

    runs: Sequence[Run]

    def __call__(self) -> None:
        with bars() as shown:
            task = shown.add_task("losses timed", total=len(self.runs))
            for run, found in zip(self.runs, measure_costs(self.runs), strict=True):
                if isinstance(found, NotMeasured):
                    shown.say(str(found))
                else:
                    add_file(run, RECORD, found)
                shown.advance(task)


class Ready(NamedTuple):
    """A run that is ready to train, on one device.

    Attributes:
        step: Trains on one batch.
        loss: A new instance of its loss.
        device: Device that it trains on.
        width: Width of its embeddings.
        steps: Steps per epoch.
    """

    step: Callable[[], None]
    loss: nn.Module
    device: torch.device
    width: int
    steps: int


def _ready(run: Any) -> Ready:
    if getattr(run, "devices", 1) > 1:
        run = replace(run, devices=1)
    import_fabric()
    training = task_of({"task": run.task}).prepare(run, launch(run))
    take, schedule = Step(training), training.schedule
    batches = itertools.chain.from_iterable(training.batches(0) for _ in itertools.count())

    def train() -> None:
        with training.arithmetic():
            take(next(batches))

    loss = build_loss(run.loss, candidates=training.candidates)
    return Ready(train, loss, training.device, training.width, schedule.in_epoch)


def cost_of(run: Any) -> Cost:
    """Measure one run: its loss on random embeddings of its size, and its whole step on its data."""
    began = time.perf_counter()
    torch.compiler.reset()  # for each run anew: torch recompiles a function only a few times
    train, loss, device, width, steps = _ready(run)
    on_gpu = device.type == "cuda"
    train()
    start = time.perf_counter() - began
    step_mib = _peak_mib(train, on_gpu)
    for _ in range(EAGER_STEPS if on_gpu else 1):  # until the step is captured
        train()
    seconds = _seconds(train, on_gpu)

    loss.to(device)
    generator = torch.Generator().manual_seed(0)
    z_i, z_j = (
        torch.randn(run.batch, width, generator=generator).to(device).requires_grad_() for _ in range(2)
    )

    def contrast() -> None:
        loss(z_i, z_j).backward()
        z_i.grad = z_j.grad = None  # else they would count as memory allocated before

    contrast()
    loss_mib = _peak_mib(contrast, on_gpu)
    return {
        "loss_ms": 1e3 * _seconds(contrast, on_gpu),
        "loss_mib": loss_mib,
        "step_ms": 1e3 * seconds,
        "step_mib": step_mib,
        "epoch_seconds": seconds * steps,
        "start_seconds": start,
        "batch": run.batch,
        "width": width,
        "hardware": hardware(run.device),
    }


def _seconds(work: Callable[[], None], on_gpu: bool) -> float:
    """Median seconds of a call to ``work``, which must be warmed up."""
    taken: list[float] = []
    while (len(taken) < REPEATS or sum(taken) < LEAST_SECONDS) and sum(taken) < MOST_SECONDS:
        began = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken)


def _peak_mib(work: Callable[[], None], on_gpu: bool) -> float:
    """Peak memory of a call to ``work`` beyond what was allocated before it, in MiB."""
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return float((torch.cuda.max_memory_allocated() - before) / 2**20)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    assert watched.profiler is not None
    assert watched.profiler.kineto_results is not None
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest / 2**20


def main() -> None:
    for arguments in json.load(sys.stdin):
        try:
            with contextlib.redirect_stdout(sys.stderr):  # a user's loss may print
                found = cost_of(_run(arguments))
        except Exception as error:  # of one run: the others can still be measured
            found = {"why": str(error).strip() or type(error).__name__}
        print(json.dumps(found), flush=True)


def _run(arguments: Sequence[str]) -> Any:
    """Settings from the options of ``weince train``."""
    chosen, _ = settings.take_config(arguments)
    kind = task_of({} if chosen is None else settings.load(chosen)).settings
    return settings.read(kind, arguments, command="weince train", examples="")
