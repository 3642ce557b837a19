"""Measure what a loss costs on this machine: time and memory of the loss alone and of a whole training step.

Runs are measured in a process of their own, so that the study holds no GPU memory. Its `main` reads a line of
standard input, a JSON list of the settings of runs, and prints a line of JSON for each: its cost, or why it could not
be measured.
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
from typing import IO, Any

from weince.lab import settings
from weince.lab.study.plan import Run, settings_of
from weince.lab.study.provenance import hardware
from weince.lab.study.records import add_file
from weince.lab.tasks.registry import task_of
from weince.lab.training.processes import end_with_parent

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
    """Measure the cost of each run here, one after the other in one process with additional environment variables."""
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
                # Not closed: when it is, the process ends.
                print(
                    json.dumps([settings.as_written(settings_of(run)) for run in runs]),
                    file=process.stdin,
                    flush=True,
                )
            for run in runs:
                line = process.stdout.readline()
                why = "" if line else f"its process ended with status {process.wait()}: {_last_line(said)}"
                cost = json.loads(line) if line else {"why": why}
                why = f"the cost of a step with {run.loss} could not be measured: {cost.get('why')}"
                yield NotMeasured(why) if "why" in cost else cost
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    return (file.read().strip().splitlines() or ["it printed nothing"])[-1]


def measure_cost(run: Run, environment: Mapping[str, str]) -> Cost:
    """The same of one run; raises `NotMeasured`."""
    (cost,) = measure_costs([run], environment)
    if isinstance(cost, NotMeasured):
        raise cost
    return cost


@dataclass(frozen=True)
class CostJob:
    """Measures the costs of runs, here or as a cluster job, and adds each cost to the record of its run.

    A run that cannot be measured is named on standard error.
    """

    runs: Sequence[Run]

    def __call__(self) -> None:
        from weince.progress import bars

        with bars() as shown:
            task = shown.add_task("losses timed", total=len(self.runs))
            for run, cost in zip(self.runs, measure_costs(self.runs), strict=True):
                if isinstance(cost, NotMeasured):
                    shown.say(str(cost))
                else:
                    add_file(run, RECORD, cost)
                shown.advance(task)


def cost_of(run: Any) -> Cost:
    """Measure one run: its loss on random embeddings of its size, and its whole step on its data."""
    import torch

    from weince.lab.configure import build_loss
    from weince.lab.training.capture import EAGER_STEPS, Step
    from weince.lab.training.fabric import launch

    began = time.perf_counter()
    torch.compiler.reset()  # for each run anew: torch recompiles a function only a few times
    run = replace(run, devices=1) if hasattr(run, "devices") else run
    training = task_of({"task": run.task}).prepare(run, launch(run))
    on_gpu = training.device.type == "cuda"
    batches = (batch for _ in itertools.count() for batch in training.batches(0))
    step = Step(training)

    def train() -> None:
        with training.arithmetic():
            step(next(batches))

    train()
    start = time.perf_counter() - began
    step_mib = _peak_mib(train, on_gpu)
    for _ in range(EAGER_STEPS if on_gpu else 1):  # until the step is captured
        train()
    seconds = _seconds(train, on_gpu)

    loss = build_loss(run.loss, candidates=training.candidates).to(training.device)
    generator, shape = torch.Generator().manual_seed(0), (run.batch, training.width)
    z_i, z_j = (
        torch.randn(*shape, generator=generator).to(training.device).requires_grad_() for _ in range(2)
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
        "epoch_seconds": seconds * training.schedule.in_epoch,
        "start_seconds": start,
        "batch": run.batch,
        "width": training.width,
        "hardware": hardware(run.device),
    }


def _seconds(work: Callable[[], None], on_gpu: bool) -> float:
    """Median seconds of a call to ``work``, which must be warmed up."""
    import torch

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
    import torch

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
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest / 2**20


def main() -> None:
    contents = json.loads(sys.stdin.readline())
    end_with_parent()
    for content in contents:
        try:
            run = settings.build(task_of(content).settings, content)
            with contextlib.redirect_stdout(sys.stderr):  # a user's loss may print
                cost = cost_of(run)
        except Exception as error:  # of one run: the others can still be measured
            cost = {"why": str(error).strip() or type(error).__name__}
        print(json.dumps(cost), flush=True)
