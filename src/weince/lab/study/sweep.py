"""Carry out the runs of a sweep that are missing, here or on a cluster, with a progress bar."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weince.lab.study import execute
from weince.lab.study.clock import Clock
from weince.lab.study.execute import Then, nothing_further
from weince.lab.study.plan import Run, check_data, settings_of, task_for
from weince.lab.study.slurm import run_on_slurm

if TYPE_CHECKING:
    from rich.progress import TaskID

    from weince.progress import Bars

YEAR = 365 * 24 * 3600.0


def data_here(run: Run) -> str | None:
    """Fingerprint of a run's data on this machine; None if they are not here."""
    try:
        return task_for(run).fingerprint(settings_of(run))
    except (OSError, ValueError):
        return None


def data_named(run: Run) -> tuple[Any, ...]:
    """What the settings of a run call its data: runs that share it must be made on the same data."""
    return run.row, *(run.changes.get(place) for place in task_for(run).places)


def check_given_data(runs: Sequence[Run]) -> None:
    """Check that the data that ``--data`` names exist here, before jobs on a cluster fail on them one by one.

    Raises:
        ValueError: Data are missing.
    """
    try:
        check_data(runs, labels=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{error}; a path that only the nodes of a cluster have belongs in the configuration"
        ) from None


def check_same_data(runs: Sequence[Run], *, always: bool = False) -> None:
    """Check that missing runs would train on the data of the finished ones; the folder of a run does not tell.

    Args:
        runs: All runs of a sweep.
        always: Check the finished runs even if none is missing.

    Raises:
        ValueError: A finished run was made on other data.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(data_named(run), []).append(run)
    for group in groups.values():
        done = [run for run in group if execute.is_done(run)]
        if not done or (len(done) == len(group) and not always):
            continue
        here = data_here(group[0])
        for run in done:
            made_on = execute.record(run).get("fingerprint")
            if here is not None and made_on != here:
                raise ValueError(
                    f"{run.name} was made on data with the fingerprint {made_on}; the data here have {here}: give "
                    "the --data of that run, or choose another --out"
                )


def tell_changed_losses(runs: Sequence[Run]) -> None:
    """Print which of the user's own losses have changed since runs that are done; a run is known by its settings."""
    changed = Counter(run.loss for run in runs if execute.is_done(run) and execute.loss_has_changed(run))
    for loss, count in changed.items():
        print(
            f"the code of {loss} has changed since {count} of its runs were made, and they are kept: to run them "
            "again, give the loss another name or choose another --out",
            file=sys.stderr,
        )


def print_failed(failed: Mapping[str, str], again: str) -> None:
    """Print why runs failed in an earlier call, a line for each, and what tries them ``again``."""
    for why in failed.values():
        print(f"failed: {why}", file=sys.stderr)
    if failed:
        print(f"{again} tries what failed again", file=sys.stderr)


def begin(bar: "Bars", name: str, *, total: int, done: int) -> "TaskID":
    """Add the task of a sweep to a bar.

    Its speed is that since the beginning. Rich's own, between the runs that ended in the last 30 seconds, says "1
    second left" when two concurrent runs of minutes end together.
    """
    bar.speed_estimate_period = YEAR
    task = bar.add_task(name, total=total, completed=done)
    bar.advance(task, 0)  # the beginning, from which rich counts
    return task


def carry_out(
    runs: Sequence[Run],
    out: Path,
    *,
    jobs: int = 1,
    slurm: bool = False,
    slurm_options: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    then: Then = nothing_further,
    total: int | None = None,
) -> dict[str, str]:
    """Carry out those runs that are not done.

    Args:
        runs: The runs; a run that appears twice is carried out once.
        out: Folder of the sweep.
        jobs: Concurrent runs on this machine, or concurrent tasks on the cluster.
        slurm: Submit the runs to Slurm and wait for them.
        slurm_options: Options of sbatch under submitit's names.
        clock: A deadline, for runs on this machine.
        then: Called when a run has ended; it may add runs to those that wait.
        total: Number of all runs, if `then` adds some of them.

    Returns:
        Why runs failed, by their names.
    """
    every = {run.folder: run for run in runs}
    left = [run for run in every.values() if not execute.is_done(run)]
    if not left:
        return {}
    (out / "runs").mkdir(parents=True, exist_ok=True)  # fail here once, not in every run
    from rich.progress import MofNCompleteColumn

    from weince.progress import Cut, remaining, telling_bars

    time_left = Cut(lambda task: f"{remaining(task)} left," if remaining(task) else "")
    # Without a terminal, every change is a line: the start, and each new state of a run.
    with telling_bars(MofNCompleteColumn(), time_left, every=0.0) as bar:
        total = total or len(every)
        task = begin(bar, "runs", total=total, done=len(every) - len(left))

        def tell(run: Run, what: str) -> None:
            bar.update(task, advance=what in ("done", "failed"), said=f"{what} {run.name}")

        def missing(waiting: list[Run], failed: Mapping[str, str]) -> list[Run]:
            now = then(waiting, failed)
            wanted = [run for run in now if not execute.is_done(run)]
            if len(wanted) < len(now):
                bar.advance(task, len(now) - len(wanted))
            return wanted

        try:
            if slurm:
                return run_on_slurm(left, out=out, jobs=jobs, options=slurm_options, tell=tell, then=missing)
            # By the number of all runs, not of those that are left: with another number of threads an interrupted
            # sweep would end with other figures, since sums would be rounded otherwise.
            return execute.run_here(left, jobs=min(jobs, total), tell=tell, clock=clock, then=missing)
        except (KeyboardInterrupt, ValueError, OSError):  # Ctrl-C, or Slurm refuses a job or does not answer
            if slurm and (out / "slurm" / "jobs.json").exists():
                bar.say("jobs that were submitted stay in the queue; the same command finds them")
            raise
