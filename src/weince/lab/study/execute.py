"""Carry out runs on this machine, several at once, each in its own processes.

A run is trained (training resumes by itself) and then measured. It is done when its result exists and was made with
its settings, according to ``made.json`` or else to ``run.yaml``. Weights and images are not needed any more, nor the
folder if the archive has the record.

Whoever works on a run holds a lock on its folder, which its processes inherit (not on Windows). So if a killed sweep
left a run's processes behind, the next sweep waits for them and never trains the same run at the same time.
"""

import contextlib
import json
import os
import platform
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weince.files import write_text_aside
from weince.lab.configure import code_of
from weince.lab.study.clock import Clock, epoch_seconds
from weince.lab.study.places import places_of
from weince.lab.study.plan import Run, epochs_of, flat, has_settings, settings_of, task_for
from weince.lab.study.records import read_record
from weince.lab.study.tables import MEASURES
from weince.lab.tasks.images.config import VisionRun
from weince.lab.training.log import read_log
from weince.lab.training.processes import end_group, own_group, waiting_lock
from weince.machine import find_device, version

ATTEMPTS = 3
"""How often to start a run that gets killed."""

READ = 20_000
"""Bytes at the end of a run's output in which to look for its error."""

RAISED = re.compile(r'^  File "[^\n]+\n(?: [^\n]*\n)*(\S[^\n]*)', re.MULTILINE)
"""The end of a traceback: the line after its last frame."""

NOT_RECORDED = {"hardware": "not recorded", "commit": "not recorded"}

LATE = "not started, it would not end in time"

Tell = Callable[[Run, str], None]

Then = Callable[[list[Run], Mapping[str, str]], list[Run]]
"""Called with the waiting runs, and why runs failed, by their names; returns the runs that wait now, in order."""


class Interrupted(Exception):
    """The sweep was told to stop during this run."""


class Failed(Exception):
    """A run failed; the message says why."""


def nothing_further(waiting: list[Run], failed: Mapping[str, str]) -> list[Run]:
    """All runs were given at the start."""
    return waiting


def is_done(run: Run) -> bool:
    """Whether a run has a result that belongs to its settings."""
    try:
        read_record(run, run.result.name)
        made = _made(run)
        if made:
            return bool(made["key"] == run.key)
        # There is no made.json. With weights, the run was cut before it was signed: measure it again. Without
        # weights, this is a kept record: compare its settings.
        return not (run.folder / task_for(run).weights).exists() and has_settings(
            run, read_record(run, "run.yaml")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _made(run: Run) -> dict[str, Any]:
    """Content of ``made.json``: how the results of a run were made; empty if the record has none."""
    try:
        found: dict[str, Any] = read_record(run, "made.json")
    except FileNotFoundError:
        return {}
    return found


def loss_has_changed(run: Run) -> bool:
    """Whether the code of a user's own loss has changed since this run, which is done, was made with it."""
    made_with = _made(run).get("loss_code")
    now = None if made_with is None else code_of(settings_of(run).loss.preset)
    return now is not None and now != made_with


def commands(run: Run) -> list[list[str]]:
    """The commands of a run, to be run one after the other, each as a process."""
    measure = _measure(run)
    parts = [["weince", "train", *run.arguments()], *measure]
    if measure and _in_one_process(settings_of(run)):
        parts = [["weince.lab.in_turn", *map(shlex.join, parts)]]
    return [[sys.executable, "-m", *part] for part in parts]


def _measure(run: Run) -> list[list[str]]:
    """The command that measures a run, as a module and its arguments; none if training measures at its end."""
    if run.measure == "sts":
        return []
    if run.measure != "evaluation":
        return [["weince.lab.study.tails", run.measure, str(run.folder)]]
    device = ["--device", str(run.extra["device"])] if "device" in run.extra else []
    return [["weince", "evaluate", str(run.folder), *device]]


def _in_one_process(wanted: VisionRun) -> bool:
    """Whether one process trains a run and measures it; importing torch twice would take a fifth of a small run.

    On a GPU two processes do, since training frees its memory only when its process ends. So do two if training
    starts further processes, which would measure too.
    """
    on_cpu = wanted.device == "cpu" or (wanted.device == "auto" and find_device("auto").type == "cpu")
    return on_cpu and wanted.devices == 1


def carry_out_run(
    run: Run, stop: threading.Event | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Train and measure a run, unless it is done.

    Args:
        run: The run.
        stop: Another thread sets it to end the run early.
        environment: Additional environment variables of its processes.

    Raises:
        Failed: A process ended with an error, or was killed too often; ``error.txt`` has the message too.
        Interrupted: `stop` was set.
    """
    stop = stop or threading.Event()
    run.folder.mkdir(parents=True, exist_ok=True)

    def pause() -> None:
        if stop.wait(1.0):
            raise Interrupted

    with waiting_lock(run.folder / ".lock", pause) as lock:
        if is_done(run):
            return
        (run.folder / "error.txt").unlink(missing_ok=True)
        code = code_of(settings_of(run).loss.preset)  # now: it may change before the run has ended
        try:
            for command in commands(run):
                _process(run, command, lock, stop, {**os.environ, **(environment or {})})
        except Failed as error:
            (run.folder / "error.txt").write_text(f"{error}\n", encoding="utf-8")
            raise
        _sign(run, code)


def failures(runs: Sequence[Run]) -> dict[str, str]:
    """Why those runs failed that were last left with an error, by their names. The runs must not be done."""
    found = {}
    for run in runs:
        with contextlib.suppress(OSError):
            said = (run.folder / "error.txt").read_text(encoding="utf-8", errors="replace").strip()
            found[run.name] = said.partition("\n")[0] or f"{run.name} failed"
    return found


def _process(
    run: Run, command: Sequence[str], lock: int, stop: threading.Event, environment: Mapping[str, str]
) -> None:
    """Run a process to its end, and start it again if it is killed; its output goes to ``output.txt``."""
    for _ in range(ATTEMPTS):
        with (run.folder / "output.txt").open("ab") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            begun = output.tell()
            # In its own process group: Ctrl-C in a terminal reaches only us, and we end what we started.
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **own_group(lock),
            )
            try:
                while process.poll() is None:
                    if stop.wait(0.1):
                        raise Interrupted
            finally:
                end_group(process)
        if process.returncode == 0:
            return
        if process.returncode > 0 and process.returncode != 128 + signal.SIGINT:
            raise Failed(
                f"{run.name} ended with status {process.returncode}: {_reason(run.folder / 'output.txt', begun)} "
                "(see output.txt in its folder)"
            )
    raise Failed(
        f"{run.name} was killed {ATTEMPTS} times{_by(process.returncode)} (see output.txt in its folder)"
    )


def _by(status: int) -> str:
    """The signal that killed a process, in words: it tells a lack of memory from a crash. Empty for no signal."""
    name = {int(one): one.name for one in signal.Signals}.get(-status)
    hint = ": is the memory full?" if name == "SIGKILL" else ""
    return f", by {name}{hint}" if name else ""


def _reason(path: Path, begun: int) -> str:
    """Why a process ended: its last line, or of an exception with several lines the first.

    Args:
        path: File with its output.
        begun: Bytes of the file that were there before.
    """
    text = path.read_bytes()[begun:][-READ:].decode(errors="replace").strip()
    if not text:
        return "it printed nothing"
    last = text.splitlines()[-1].strip()
    raised = RAISED.findall(text)
    return last if last.startswith("weince: ") or not raised else str(raised[-1])


def _sign(run: Run, code: str | None) -> None:
    """Write ``made.json``: which settings and command made the results, on which hardware, and in what time.

    The time is the logged training time over all resumes plus that of measuring. A second measure of the same run is
    added to the first. ``code`` is `code_of` its loss.
    """
    path, made = run.folder / "made.json", {}
    with contextlib.suppress(OSError, ValueError):
        made = _made(run)
    before = made if made.get("key") == run.key else {}
    where = {
        "hardware": hardware(str(run.extra.get("device", "auto"))),
        "commit": commit(),
        "seconds": round(
            sum(row["seconds"] for row in read_log(run.folder / "log.csv")) + _measuring_seconds(run), 1
        ),
    }
    made = {
        "key": run.key,
        "command": _repeatable(run),
        "measures": {**before.get("measures", {}), run.measure: where},
    }
    if (made_with := before.get("loss_code", code)) is not None:
        made["loss_code"] = made_with
    text = json.dumps(made, indent=1) + "\n"
    write_text_aside(path, text, "record")


def _measuring_seconds(run: Run) -> float:
    """Seconds from the weights, which training writes at its end, to the result of measuring."""
    if not _measure(run):
        return 0.0
    weights = run.folder / task_for(run).weights
    return run.result.stat().st_mtime - weights.stat().st_mtime


def _repeatable(run: Run) -> str:
    """The command that trains a run, with absolute paths shortened to file names."""
    parts = (Path(part).name if Path(part).is_absolute() else part for part in run.arguments())
    return shlex.join(["weince", "train", *parts])


def hardware(device: str = "auto") -> str:
    """Names of the device and of the torch version."""
    import torch

    name = ""
    if device != "cpu" and torch.cuda.is_available():
        # Asking CUDA itself would hold GPU memory for as long as the sweep runs.
        name = _said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return f"{name.splitlines()[0] if name else f'{platform.machine()} CPU'}, torch {torch.__version__}"


def commit() -> str:
    """The version of this package, with the commit if it is known.

    That is the commit of the checkout, marked if its sources have changes, or of the ``git archive`` that it was
    unpacked from.
    """
    here = Path(__file__).parents[2]
    head = _said(["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"])
    if head and _said(["git", "-C", str(here), "ls-files", "__init__.py"]):
        changed = _said(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no", "."])
        return f"{version()} at {head}{' with changes' if changed else ''}"
    archived = (here / "archived_commit.txt").read_text(encoding="ascii").strip()
    return version() if archived.startswith("$") else f"{version()} at {archived[:12]}"


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def run_here(
    runs: Sequence[Run],
    *,
    jobs: int,
    tell: Tell,
    clock: Clock | None = None,
    then: Then = nothing_further,
) -> dict[str, str]:
    """Carry out runs on this machine, `jobs` at once, distributed over its GPUs.

    Args:
        runs: The runs, the most important first.
        jobs: Number of concurrent runs; each gets its part of the CPUs, also when fewer are left.
        tell: Called with a run and its new state, such as ``started`` or ``done``.
        clock: A deadline. A run waits while it or an active one would end after the deadline if they shared the
            device. If it would end too late even alone, it is dropped, and `tell` gets `LATE`.
        then: Called when a run has ended; it may add runs to those that wait.

    Returns:
        Why runs failed, by their names; the others are done or late.
    """
    stop, places = threading.Event(), queue.SimpleQueue[dict[str, str]]()
    for place in places_of(jobs):
        places.put(place)
    waiting, failed = list(runs), dict[str, str]()
    active: dict[Future[None], _Started] = {}

    def fits() -> bool:
        """Whether the first waiting run and the active ones would end in time: they share the device."""
        together = [waiting[0], *(started.run for started in active.values())]
        return clock is None or all(clock.fits(epochs_left(run), len(together), run.loss) for run in together)

    def work(run: Run) -> None:
        place = places.get()
        try:
            carry_out_run(run, stop, place)
        finally:
            places.put(place)

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
                    waiting = then(waiting, failed)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    return failed


@dataclass
class _Started:
    """An active run.

    Attributes:
        run: The run.
        at: Time of its start.
        had: Epochs in its log at that time, if an earlier call began it.
        at_once: Largest number of concurrent runs so far, including itself.
    """

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


def record(run: Run) -> dict[str, Any]:
    """The measured figures of a finished run; ``made`` says on which hardware, commit and command."""
    return figures_of(run, read_record(run, run.result.name), _made(run))


def figures_of(run: Run, found: dict[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """The same from the contents of its result and of its ``made.json``."""
    by_key, keys = flat(found), MEASURES[run.measure].keys
    found = found | {name: by_key[key] for name, key in keys.items() if key in by_key}
    where = made.get("measures", {}).get(run.measure, NOT_RECORDED)
    return {**found, "made": {**where, "command": made.get("command", _repeatable(run))}}
