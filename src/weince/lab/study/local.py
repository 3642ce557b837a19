"""Carry out runs on this machine, several at once, distributed over its cores and GPUs."""

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from weince.lab.study.clock import Clock, epoch_seconds
from weince.lab.study.plan import Run, epochs_of, settings_of
from weince.lab.study.process import Failed, Tell, carry_out_run
from weince.lab.training.log import read_log
from weince.machine import find_device

LATE = "not started, it would not end in time"

Further = Callable[[list[Run], Mapping[str, str]], list[Run]]
"""Called with the waiting runs, and why runs failed, by their names; returns the runs that wait now, in order."""


def nothing_further(waiting: list[Run], failed: Mapping[str, str]) -> list[Run]:
    """All runs were given at the start."""
    return waiting


def run_here(
    runs: Sequence[Run],
    *,
    jobs: int,
    tell: Tell,
    clock: Clock | None = None,
    further: Further = nothing_further,
) -> dict[str, str]:
    """Carry out runs on this machine, the most important first; returns why runs failed, by their names.

    Args:
        runs: The runs.
        jobs: Number of concurrent runs; each gets its part of the CPUs, also when fewer are left.
        tell: Called with a run and its new state.
        clock: A deadline. A run waits while it or an active one would end after the deadline if they shared the
            device. If it would end too late even alone, it is dropped, and `tell` gets `LATE`.
        further: Called when a run has ended; it may add runs to those that wait.
    """
    stop, free = threading.Event(), queue.SimpleQueue[dict[str, str]]()
    for share in shares_of(jobs):
        free.put(share)
    waiting, failed = list(runs), dict[str, str]()
    active: dict[Future[None], _Started] = {}

    def fits() -> bool:
        """Whether the first waiting run and the active ones would end in time: they share the device."""
        together = [waiting[0], *(started.run for started in active.values())]
        return clock is None or all(clock.fits(epochs_left(run), len(together), run.loss) for run in together)

    def work(run: Run) -> None:
        share = free.get()
        try:
            carry_out_run(run, stop, share, tell)
        finally:
            free.put(share)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            while waiting or active:
                while waiting and not active and not fits():
                    tell(waiting.pop(0), LATE)
                while waiting and len(active) < jobs and fits():
                    run = waiting.pop(0)
                    tell(run, "started")
                    had = 0 if clock is None else len(epoch_seconds(_logged(run)))
                    active[pool.submit(work, run)] = _Started(run, time.monotonic(), had)
                for started in active.values():
                    started.at_once = max(started.at_once, len(active))
                # With a timeout, since an unlimited wait would block Ctrl-C.
                for future in wait(active, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    started = active.pop(future)
                    error = future.exception()
                    if error is not None and not isinstance(error, Failed | OSError):
                        raise error
                    if error is not None:
                        failed[started.run.name] = str(error)
                    elif clock is not None:
                        epochs = epoch_seconds(_logged(started.run))[started.had :]
                        clock.learn(time.monotonic() - started.at, epochs, started.at_once, started.run.loss)
                    tell(started.run, "done" if error is None else "failed")
                    waiting = further(waiting, failed)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    return failed


@dataclass
class _Started:
    """An active run: its start, the epochs of an earlier call, and the most concurrent runs so far, with itself."""

    run: Run
    at: float
    had: int
    at_once: int = 1


def epochs_left(run: Run) -> int:
    """Epochs that a run has yet to train, from its last checkpoint on if an earlier call began it."""
    every, log = settings_of(run).checkpoint_every, _logged(run)
    trained = int(log[-1]["epoch"]) if log and every else 0
    return epochs_of(run) - (trained - trained % every if trained else 0)


def _logged(run: Run) -> list[dict[str, float]]:
    """The rows of a run's log; none if it is damaged, which the run says when it starts."""
    try:
        return read_log(run.folder / "log.csv")
    except (OSError, ValueError):
        return []


def shares(jobs: int, cpus: int, gpus: int, visible: str = "") -> list[dict[str, str]]:
    """Environment variables for concurrent runs: each gets a share of the CPUs and, round-robin, one GPU.

    ``visible`` is the value of ``CUDA_VISIBLE_DEVICES``, if it is set.
    """
    names = [name.strip() for name in visible.split(",")] if visible else [str(i) for i in range(gpus)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), str(max(1, cpus // jobs)))
    return [threads | ({"CUDA_VISIBLE_DEVICES": names[i % gpus]} if gpus > 1 else {}) for i in range(jobs)]


def shares_of(jobs: int) -> list[dict[str, str]]:
    """The `shares` of this machine; variables that the user has set keep their values."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [
        {k: v for k, v in share.items() if k == "CUDA_VISIBLE_DEVICES" or k not in os.environ}
        for share in shares(jobs, os.cpu_count() or 1, torch.cuda.device_count(), visible)
    ]


def side_by_side(run: Run, jobs: int) -> int:
    """How many of ``jobs`` concurrent runs have cores or a GPU of their own; further runs share these."""
    import torch

    device = find_device(settings_of(run).device)
    usable = {"cpu": os.cpu_count() or 1, "cuda": torch.cuda.device_count() if device.index is None else 1}
    return min(jobs, usable.get(device.type, 1))
