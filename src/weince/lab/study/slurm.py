"""Carry out runs on a Slurm cluster: submit one array job through submitit and watch it until every run is done.

If a job is preempted or runs out of time, submitit requeues it, and it resumes from the run's last checkpoint. If it
is killed outright (out of memory, a lost node), it leaves the queue without a result, and its run is submitted again,
a few times at most. ``out/slurm/jobs.json`` records which job works on which run, so that an interrupted sweep finds
its jobs again.
"""

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weince.files import write_text_aside
from weince.lab.configure import unknown
from weince.lab.study.local import Further, nothing_further
from weince.lab.study.plan import Run
from weince.lab.study.process import ATTEMPTS, Tell, carry_out_run
from weince.lab.study.provenance import is_done

POLL = 5.0
"""Seconds between two queries of the queue."""

SILENCE = 12
"""Queries in a row that may fail, as they do while Slurm's controller restarts."""


@dataclass(frozen=True)
class RunJob:
    """A job that carries out one run."""

    run: Run

    def __call__(self) -> None:
        _use_own_cores()
        carry_out_run(self.run)

    def checkpoint(self) -> Any:
        """Submitit calls this before it requeues a job; the run resumes from its own checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class CallJob:
    """A job that calls a function once."""

    work: Callable[[], None]

    def __call__(self) -> None:
        _use_own_cores()
        self.work()


def _use_own_cores() -> None:
    """Use only the cores that Slurm gave to the job."""
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))


def call_on_slurm(
    work: Callable[[], None], runs: Sequence[Run], *, out: Path, options: Mapping[str, Any] | None = None
) -> None:
    """Call a function in a job, and wait until the job has left the queue; the files that it wrote tell its success.

    The function is pickled; the job gets a GPU if the runs that it is about want one.
    """
    executor = _executor(out.absolute() / "slurm", runs, 1, options or {})
    job = _accepted(lambda: executor.submit(CallJob(work)))
    while job.job_id in _queued():
        time.sleep(POLL)


def run_on_slurm(
    runs: Sequence[Run],
    *,
    out: Path,
    jobs: int,
    options: Mapping[str, Any] | None = None,
    tell: Tell,
    further: Further = nothing_further,
) -> dict[str, str]:
    """Carry out runs on the cluster, and wait for them; if the wait is interrupted, the next call finds the jobs.

    Args:
        runs: The runs.
        out: Folder of the study, on a file system that all nodes see.
        jobs: Largest number of concurrent array tasks.
        options: Options of sbatch under submitit's names, for example ``{"partition": "gpu", "time": 600}``.
        tell: Called with a run and its new state.
        further: Called when a run has ended; the runs that it adds are submitted once fewer than `jobs` are left.

    Returns:
        Why runs failed, by their names; the others are done.
    """
    folder = out.absolute() / "slurm"
    executor = _executor(folder, runs, jobs, options or {})
    queue = _read(folder / "jobs.json")
    queued = _queued()
    resubmitted: Counter[Path] = Counter()
    waiting, later, failed = list[Run](), list(runs), dict[str, str]()
    room = len(runs)  # one array: Slurm runs at most `jobs` of it at once
    while waiting or later:
        ready, later = later[:room], later[room:]
        new = [run for run in ready if not is_done(run) and queue.get(str(run.folder)) not in queued]
        _submit(executor, new, queue, folder, tell)
        waiting += ready
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
            elif resubmitted[run.folder] < ATTEMPTS - 1:
                resubmitted[run.folder] += 1
                tell(run, "again")
                _submit(executor, [run], queue, folder, tell)
                continue
            else:
                failed[run.name] = (
                    f"{run.name}: {ATTEMPTS} jobs left the queue without a result, see {folder}"
                )
                tell(run, "failed")
            waiting.remove(run)
            later = further(later, failed)
        room = max(0, jobs - len(waiting))
        if waiting:
            time.sleep(POLL)
    return failed


def check_slurm(options: Mapping[str, Any] | None) -> None:
    """Raise an error if jobs cannot be submitted from here, before anything is written."""
    try:
        import submitit
    except ModuleNotFoundError:
        raise ValueError("--slurm needs submitit: pip install 'weince[slurm]'") from None

    missing = [name for name in ("srun", "sbatch", "squeue") if shutil.which(name) is None]
    if missing:
        raise ValueError(f"--slurm needs Slurm's commands here; {', '.join(missing)} not found")
    sbatch_options({}, options or {}, submitit.SlurmExecutor._valid_parameters())
    _queued(looks=1)  # one query: nothing is submitted yet, so failing is cheap


def _executor(folder: Path, runs: Sequence[Run], jobs: int, options: Mapping[str, Any]) -> Any:
    """The submitit executor: at most `jobs` at once, each with a GPU unless a run has ``device: cpu``."""
    import submitit

    folder.mkdir(parents=True, exist_ok=True)
    executor = submitit.SlurmExecutor(folder, max_num_timeout=100)
    usual = {"job_name": "weince", "time": 720, "cpus_per_task": 4, "array_parallelism": jobs}
    if all(run.extra.get("device") != "cpu" for run in runs):
        usual["gpus_per_node"] = 1
    executor.update_parameters(**sbatch_options(usual, options, executor._valid_parameters()))
    return executor


def sbatch_options(
    usual: Mapping[str, Any], asked: Mapping[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """Options of sbatch: the usual ones, overridden by those asked for; text of digits becomes a number.

    >>> sbatch_options({"time": 720}, {"time": "240", "partition": "gpu"}, {"time", "partition"})
    {'time': 240, 'partition': 'gpu'}
    """
    options = dict(usual)
    for name, value in asked.items():
        if name not in known:
            raise ValueError(unknown("option of Slurm", name, sorted(known)))
        options[name] = int(value) if isinstance(value, str) and value.isdecimal() else value
    return options


def _submit(executor: Any, runs: Sequence[Run], queue: dict[str, str], folder: Path, tell: Tell) -> None:
    """Submit runs as one array job, and record which job has which run."""
    if not runs:
        return
    for run in runs:
        (run.folder / "error.txt").unlink(missing_ok=True)  # left by an earlier sweep
    jobs = _accepted(
        lambda: (
            [executor.submit(RunJob(runs[0]))]
            if len(runs) == 1
            else executor.submit_array([RunJob(run) for run in runs])
        )
    )
    queue |= {str(run.folder): job.job_id for run, job in zip(runs, jobs, strict=True)}
    write_text_aside(folder / "jobs.json", json.dumps(queue, indent=1), "list of jobs")
    for run in runs:
        tell(run, "started")


def _accepted(submit: Callable[[], Any]) -> Any:
    """What a submission returns; an error if sbatch refuses it, for example because there is no such partition."""
    from submitit.core.utils import FailedJobError

    try:
        return submit()
    except FailedJobError as error:
        said = " ".join(str(error).split())
        raise ValueError(f"Slurm refused the job, see --slurm-options: {said}") from None


def _queued(looks: int = SILENCE) -> set[str]:
    """Ids of our waiting and running jobs, from squeue: not every cluster has accounting (sacct)."""
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
        jobs: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return jobs
