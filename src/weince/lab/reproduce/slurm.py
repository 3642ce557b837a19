"""Carrying runs out on a Slurm cluster: one array job through submitit, watched until every run is done.

A job that is preempted or runs out of time is put back into the queue by submitit and goes on from the run's last
checkpoint. One that is killed outright (out of memory, a lost node) leaves the queue without a result: its run is
submitted again, a few times at most. Which job works on which run is kept in ``out/slurm/jobs.json``, so that a
sweep that was interrupted finds its jobs again.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weince.files import write_text_aside
from weince.lab.configure import unknown
from weince.lab.reproduce.execute import ATTEMPTS, Tell, carry_out, is_done
from weince.lab.reproduce.plan import Run

POLL = 5.0
"""Seconds between two looks at the queue."""

SILENCE = 12
"""Looks in a row at which the queue may fail to answer, as it does while its controller restarts."""


@dataclass(frozen=True)
class Job:
    """What a job does: one run."""

    run: Run

    def __call__(self) -> None:
        _use_what_is_given()
        carry_out(self.run)

    def checkpoint(self) -> Any:
        """Called by submitit before it puts a job back into the queue; the run itself knows where it was."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class Once:
    """A job for something that is no run."""

    work: Callable[[], None]

    def __call__(self) -> None:
        _use_what_is_given()
        self.work()


def _use_what_is_given() -> None:
    """Use the cores of a job and no others."""
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))


def call_on_slurm(
    work: Callable[[], None], runs: Sequence[Run], *, out: Path, options: Mapping[str, Any] | None = None
) -> None:
    """Have some work about runs done by a job like theirs, and wait until that has left the queue.

    Whether it was done shows in what it leaves.

    Args:
        work: What to call; it is pickled.
        runs: Which it is about.
        out: Folder of the sweep, on a file system that all nodes see.
        options: Of sbatch as submitit names them.
    """
    job = _executor(out.absolute() / "slurm", runs, 1, options or {}).submit(Once(work))
    while job.job_id in _queued():
        time.sleep(POLL)


def run_on_slurm(
    runs: Sequence[Run],
    *,
    out: Path,
    jobs: int,
    options: Mapping[str, Any] | None = None,
    tell: Tell,
    idle: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Carry runs out on the cluster, at most `jobs` at once, and wait for them.

    Interrupting the wait leaves the jobs in the queue; calling again finds them.

    Args:
        runs: What to do.
        out: Folder of the sweep, on a file system that all nodes see.
        jobs: Array tasks that may run at once.
        options: Options of sbatch as submitit names them, for example ``{"partition": "gpu", "time": 600}``.
        tell: Told what happens to a run.
        idle: Called again and again while runs are under way.

    Returns:
        Why runs failed, by their names; the others are done.
    """
    folder = out.absolute() / "slurm"
    executor = _executor(folder, runs, jobs, options or {})
    queue = _read(folder / "jobs.json")
    queued = _queued(looks=1)  # nothing is lost yet if it does not answer
    new = [run for run in runs if not is_done(run) and queue.get(str(run.folder)) not in queued]
    attempts = {run.folder: 1 for run in runs}
    _submit(executor, new, queue, folder, tell)
    waiting, failed = list(runs), dict[str, str]()
    while waiting:
        queued = _queued()
        for run in list(waiting):
            job = queue.get(str(run.folder))
            if is_done(run):
                tell(run, "done")
            elif (run.folder / "error.txt").exists() and job not in queued:
                failed[run.name] = (run.folder / "error.txt").read_text(encoding="utf-8").strip()
                tell(run, "failed")
            elif job in queued:
                continue
            elif attempts[run.folder] < ATTEMPTS:
                attempts[run.folder] += 1
                tell(run, "again")
                _submit(executor, [run], queue, folder, tell)
                continue
            else:
                failed[run.name] = (
                    f"{run.name}: {ATTEMPTS} jobs left the queue without a result, see {folder}"
                )
                tell(run, "failed")
            waiting.remove(run)
        if waiting:
            idle()
            time.sleep(POLL)
    return failed


def _executor(folder: Path, runs: Sequence[Run], jobs: int, options: Mapping[str, Any]) -> Any:
    """What submits jobs, `jobs` of them at once, each with a GPU unless a run is to go without."""
    try:
        import submitit
    except ModuleNotFoundError:
        raise ValueError("--slurm needs submitit: pip install 'weince[slurm]'") from None

    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in ("srun", "sbatch", "squeue") if shutil.which(name) is None]
    if missing:
        raise ValueError(f"--slurm needs Slurm's commands here; {', '.join(missing)} not found")
    executor = submitit.SlurmExecutor(folder, max_num_timeout=100)
    usual = {"job_name": "weince", "time": 720, "cpus_per_task": 4, "array_parallelism": jobs}
    if all(run.extra.get("device") != "cpu" for run in runs):
        usual["gpus_per_node"] = 1
    executor.update_parameters(**sbatch_options(usual, options, executor._valid_parameters()))
    return executor


def sbatch_options(
    usual: Mapping[str, Any], given: Mapping[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """What sbatch is told; numbers that came from a command line as numbers.

    >>> sbatch_options({"time": 720}, {"time": "240", "partition": "gpu"}, {"time", "partition"})
    {'time': 240, 'partition': 'gpu'}
    """
    found = dict(usual)
    for name, value in given.items():
        if name not in known:
            raise ValueError(unknown("option of Slurm", name, sorted(known)))
        found[name] = int(value) if isinstance(value, str) and value.isdecimal() else value
    return found


def _submit(executor: Any, runs: Sequence[Run], queue: dict[str, str], folder: Path, tell: Tell) -> None:
    """Hand runs to the cluster as one array, and write down which job has which."""
    if not runs:
        return
    for run in runs:
        (run.folder / "error.txt").unlink(missing_ok=True)  # of an earlier sweep
    jobs = (
        [executor.submit(Job(runs[0]))]
        if len(runs) == 1
        else executor.submit_array([Job(run) for run in runs])
    )
    queue |= {str(run.folder): job.job_id for run, job in zip(runs, jobs, strict=True)}
    write_text_aside(folder / "jobs.json", json.dumps(queue, indent=1), "list of jobs")
    for run in runs:
        tell(run, "started")


def _queued(looks: int = SILENCE) -> set[str]:
    """The jobs that wait or run. The queue itself is asked: not every cluster keeps accounts."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    said = ""
    for look in range(looks):
        if look:
            time.sleep(POLL)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            said = "it takes more than a minute"
        else:
            if done.returncode == 0:
                return set(done.stdout.split())
            said = " ".join(done.stderr.split())
    raise OSError(f"--slurm needs squeue, which does not answer: {said}")


def _read(path: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
