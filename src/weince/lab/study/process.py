"""Carry out one run in processes of its own: train (training resumes by itself), measure, sign.

Whoever works on a run holds a lock on its folder, which its processes inherit (not on Windows). So two studies never
train the same run at the same time: the second waits, and says for whom. The processes of a study that is killed end
with it.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weince.files import write_text_aside
from weince.lab import settings
from weince.lab.configure import code_of
from weince.lab.study.plan import Run, settings_of
from weince.lab.study.provenance import is_done, sign
from weince.lab.study.worker import ASKED
from weince.lab.training.processes import end_group, own_group, waiting_lock
from weince.machine import find_device

ATTEMPTS = 3
"""How often to start a run that gets killed."""

READ = 20_000
"""Bytes at the end of a run's output in which to look for its error."""

RAISED = re.compile(r'^  File "[^\n]+\n(?: [^\n]*\n)*(\S[^\n]*)', re.MULTILINE)
"""The end of a traceback: the line after its last frame."""

Tell = Callable[[Run, str], None]
"""Called with a run and its new state, such as ``started`` or ``done``."""


class Interrupted(Exception):
    """The study was told to stop during this run."""


class Failed(Exception):
    """A run failed; the message says why."""


def commands(run: Run) -> list[list[str]]:
    """The commands of a run, to be run one after the other, each as a process.

    On a CPU one process trains and measures: importing torch twice would take a fifth of a small run. On a GPU two
    processes do, since training frees its memory only when its process ends; so do two if training starts further
    processes, which would measure too.
    """
    wanted = settings_of(run)
    steps = ["train", *([run.measured_by] if run.measure.take else [])]
    on_cpu = find_device(wanted.device).type == "cpu" if wanted.device == "auto" else wanted.device == "cpu"
    together = on_cpu and getattr(wanted, "devices", 1) == 1
    start = [sys.executable, "-m", "weince.lab.study.worker", str(run.folder)]
    return [[*start, *steps]] if together else [[*start, step] for step in steps]


def carry_out_run(
    run: Run,
    stop: threading.Event | None = None,
    environment: Mapping[str, str] | None = None,
    tell: Tell = lambda run, state: None,
) -> None:
    """Train and measure a run, unless it is done.

    Args:
        run: The run.
        stop: Another thread sets it to end the run early, with `Interrupted`.
        environment: Additional environment variables of its processes.
        tell: Called if another process works on the run.

    Raises:
        Failed: A process ended with an error, or was killed too often; ``error.txt`` has the message too.
    """
    stop, path, said = stop or threading.Event(), run.folder / ".lock", set[str]()
    run.folder.mkdir(parents=True, exist_ok=True)

    def pause() -> None:
        if not said:
            said.add(f"waiting for {_holder(path)}, which works on")
            tell(run, *said)
        if stop.wait(1.0):
            raise Interrupted

    with waiting_lock(path, pause) as lock:
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        if is_done(run):
            return
        (run.folder / "error.txt").unlink(missing_ok=True)
        wanted = settings_of(run)
        code = code_of(wanted.loss.preset)  # now: it may change before the run has ended
        write_text_aside(run.folder / ASKED, settings.dump(wanted), "settings")
        try:
            for command in commands(run):
                _process(run, command, lock, stop, {**os.environ, **(environment or {})})
        except Failed as error:
            (run.folder / "error.txt").write_text(f"{error}\n", encoding="utf-8")
            raise
        sign(run, code)


def _holder(lock: Path) -> str:
    """Who holds a lock, in words."""
    try:
        return lock.read_text(encoding="utf-8") or "another process"
    except (OSError, ValueError):  # Windows locks the text too
        return "another process"


def _process(
    run: Run, command: Sequence[str], lock: int, stop: threading.Event, environment: Mapping[str, str]
) -> None:
    """Run a process to its end, and start it again if it is killed; its output goes to ``output.txt``."""
    for _ in range(ATTEMPTS):
        with (run.folder / "output.txt").open("ab") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            begun = output.tell()
            # In its own process group: Ctrl-C in a terminal reaches only us, and we end what we started. It ends
            # with us, since its standard input closes then.
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
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
                assert process.stdin is not None
                process.stdin.close()
        if process.returncode == 0:
            return
        if process.returncode > 0 and process.returncode != 128 + signal.SIGINT:
            reason = _reason(run.folder / "output.txt", begun)
            status = f"{run.name} ended with status {process.returncode}"
            raise Failed(f"{status}: {reason} (see output.txt in its folder)")
    times = f"{run.name} was killed {ATTEMPTS} times{_by(process.returncode)}"
    raise Failed(f"{times} (see output.txt in its folder)")


def _by(status: int) -> str:
    """The signal that killed a process, in words: it tells a lack of memory from a crash. Empty for no signal."""
    name = {int(number): number.name for number in signal.Signals}.get(-status)
    hint = ": is the memory full?" if name == "SIGKILL" else ""
    return f", by {name}{hint}" if name else ""


def _reason(path: Path, begun: int) -> str:
    """Why a process ended: its last line, or of an exception with several lines the first.

    ``begun`` is the number of bytes that the file with its output had before.
    """
    text = path.read_bytes()[begun:][-READ:].decode(errors="replace").strip()
    if not text:
        return "it printed nothing"
    last = text.splitlines()[-1].strip()
    raised = RAISED.findall(text)
    return last if last.startswith("weince: ") or not raised else str(raised[-1])
