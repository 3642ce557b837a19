"""A study: a plan of runs, their execution here or on a cluster, and their records.

A fixed table is a study without tries to choose among (:mod:`weince.lab.study.reproduce`); a comparison is a study
with a choice (:mod:`weince.lab.study.compare`).
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weince.lab.study.clock import Clock
from weince.lab.study.local import run_here
from weince.lab.study.plan import Run, settings_of, task_for, words
from weince.lab.study.provenance import failures, is_done, loss_has_changed, record
from weince.lab.study.slurm import check_slurm, run_on_slurm
from weince.lab.study.statistics import Done
from weince.machine import find_device

if TYPE_CHECKING:
    from rich.progress import TaskID

    from weince.progress import Bars

YEAR = 365 * 24 * 3600.0


@dataclass(frozen=True)
class Execution:
    """How the runs of a study are carried out.

    Attributes:
        jobs: Concurrent runs on this machine, or concurrent tasks on the cluster; None for the study's default.
        slurm: Submit the runs to Slurm and wait for them.
        slurm_options: Options of sbatch under submitit's names, such as ``{"partition": "gpu"}``.
        data: Where the data are, if not where the configuration says: a path, or ``NAME=PATH,NAME=PATH``.
        device: ``cpu``, ``cuda`` or ``mps`` instead of the configured device.
        dry_run: Print the runs and start nothing.
        table_only: Start nothing; write the page from the runs that are done, and print which are missing or have
            failed. A run needs only ``run.yaml`` and its result, in its folder or in the archive ``out/runs.jsonl``;
            ``made.json`` and ``log.csv`` add details.
        command: Command to show on the page.
    """

    jobs: int | None = None
    slurm: bool = False
    slurm_options: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    device: str | None = None
    dry_run: bool = False
    table_only: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs must be at least 1; got {self.jobs}")
        if self.dry_run and self.table_only:
            refuse_dry_run_with("--table-only")


def refuse_dry_run_with(option: str) -> None:
    raise ValueError(f"--dry-run prints the runs and stops; wanted it alone; got it with {option}")


class Study:
    """Runs and their records, in the folder ``out``."""

    def __init__(self, out: Path, how: Execution) -> None:
        self.out, self.how = out, how
        self.failed: dict[str, str] = {}  # why runs failed in this call, by their names

    def planned(self) -> list[Run]:
        """All runs that are known so far, each once."""
        raise NotImplementedError

    def further(self, waiting: list[Run], failed: Mapping[str, str]) -> list[Run]:
        """The waiting runs, and those that can start now that others have ended; ``failed`` says why runs failed."""
        return waiting

    def is_done(self, run: Run) -> bool:
        return is_done(run)

    def done(self, runs: Iterable[Run]) -> dict[str, Done]:
        """Those of the runs that are done, by name."""
        return {run.name: Done(run, self.record(run)) for run in runs if self.is_done(run)}

    def record(self, run: Run) -> dict[str, Any]:
        """The record of a run that is done."""
        return record(run)

    def left(self) -> list[Run]:
        """The planned runs that are not done."""
        return [run for run in self.planned() if not self.is_done(run)]

    def check_data(self) -> None:
        """Check that the data of missing runs exist, and tell which losses have changed since runs were made."""
        _tell_changed_losses(self.planned())
        if not self.how.slurm:
            check_data(self.left())
        elif self.how.data is not None:  # data as configured may be in folders that only the nodes see
            try:
                check_data(self.left(), measured=False)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{error}; a path that only the nodes of a cluster have belongs in the configuration"
                ) from None

    def check_machine(self, *, always: bool = False) -> None:
        """Check that missing runs can start here, or on a cluster, and on the data of the finished ones.

        Data sets are downloaded now, once, and not by every run. With ``always``, the data of the finished runs are
        checked even if none is missing.
        """
        left = self.left()
        if self.how.slurm:
            if left:
                check_slurm(self.how.slurm_options)
            return
        for device in {str(settings_of(run).device) for run in left}:
            find_device(device)
        check_losses(left)
        check_same_data([run for run in self.planned() if is_done(run)], left, always=always)

    def fill(self, runs: Sequence[Run], *, jobs: int, total: int, clock: Clock | None = None) -> None:
        """Carry out the missing runs with a progress bar, as far as time allows.

        Args:
            runs: The runs to begin with; `further` adds others.
            jobs: Concurrent runs.
            total: Number of all runs, also of those that `further` will add.
            clock: A deadline, for runs on this machine.
        """
        runs = once(self.further(list(runs), {}))
        left = [run for run in runs if not is_done(run)]
        if not left:
            return
        (self.out / "runs").mkdir(parents=True, exist_ok=True)  # fail here once, not in every run
        from rich.progress import MofNCompleteColumn

        from weince.progress import Cut, remaining, telling_bars

        time_left = Cut(lambda task: f"{remaining(task)} left," if remaining(task) else "")
        # Without a terminal, every change is a line: the start, and each new state of a run.
        with telling_bars(MofNCompleteColumn(), time_left, every=0.0) as bar:
            task = begin(bar, "runs", total=total, done=len(runs) - len(left))

            def tell(run: Run, state: str) -> None:
                bar.update(task, advance=state in ("done", "failed"), said=f"{state} {run.name}")

            def further(waiting: list[Run], failed: Mapping[str, str]) -> list[Run]:
                now = self.further(waiting, failed)
                wanted = [run for run in now if not is_done(run)]
                if len(wanted) < len(now):
                    bar.advance(task, len(now) - len(wanted))
                return wanted

            try:
                if self.how.slurm:
                    options = self.how.slurm_options
                    failed = run_on_slurm(
                        left, out=self.out, jobs=jobs, options=options, tell=tell, further=further
                    )
                else:
                    # By the number of all runs, not of those that are left: with another number of threads an
                    # interrupted study would end with other figures, since sums would be rounded otherwise.
                    failed = run_here(left, jobs=min(jobs, total), tell=tell, clock=clock, further=further)
            except (
                KeyboardInterrupt,
                ValueError,
                OSError,
            ):  # Ctrl-C, or Slurm refuses a job or does not answer
                if self.how.slurm and (self.out / "slurm" / "jobs.json").exists():
                    bar.say("jobs that were submitted stay in the queue; the same command finds them")
                raise
        self.failed |= failed

    def failures(self, done: Mapping[str, Done], again: str) -> dict[str, str]:
        """Why runs failed, in this call or an earlier one, by their names.

        Those of an earlier call are printed, with what tries them ``again``.
        """
        open_ = [run for run in self.planned() if run.name not in done and run.name not in self.failed]
        earlier = failures(open_)
        for why in earlier.values():
            print(f"failed: {why}", file=sys.stderr)
        if earlier:
            print(f"{again} tries what failed again", file=sys.stderr)
        return {**earlier, **self.failed}


def once(runs: Iterable[Run]) -> list[Run]:
    """The runs, each once; of two with one folder the last."""
    return list({run.folder: run for run in runs}.values())


def begin(bar: "Bars", name: str, *, total: int, done: int) -> "TaskID":
    """Add the task of a study to a bar.

    The bar computes its speed from the whole study. Rich's default uses the last 30 seconds, and says "1 second left"
    when two concurrent runs, each of minutes, end together.
    """
    bar.speed_estimate_period = YEAR
    task = bar.add_task(name, total=total, completed=done)
    bar.advance(task, 0)  # the beginning, from which rich counts
    return task


def _tell_changed_losses(runs: Sequence[Run]) -> None:
    """Print which of the user's own losses have changed since runs that are done; a run is known by its settings."""
    changed = Counter(run.loss for run in runs if is_done(run) and loss_has_changed(run))
    for loss, count in changed.items():
        print(
            f"the code of {loss} has changed since {count} of its runs were made, and they are kept: to run them "
            "again, give the loss another name or choose another --out",
            file=sys.stderr,
        )


def check_data(runs: Sequence[Run], *, measured: bool = True) -> None:
    """Check that the data of runs exist, and if ``measured`` that the runs can be measured on them.

    Training needs no labels, for example: without this check every run would train to its end and fail then.
    """
    different = {}
    for run in runs:
        places = (run.changes.get(place) for place in task_for(run).places)
        different[run.config, *run.extra.items(), *places] = run
    for run in different.values():
        task, wanted = task_for(run), settings_of(run)
        task.check(wanted)
        if measured and run.measured_by == task.measure:
            task.check_measured(wanted)


def check_losses(runs: Sequence[Run]) -> None:
    """Call the user's own losses once with every try: they fail now, not after hours of other runs."""
    for run in {run.key: run for run in runs}.values():
        wanted = settings_of(run)
        if ":" not in wanted.loss.preset:
            continue
        try:
            task_for(run).check_loss(wanted)
        except ValueError as error:
            changes = {k: v for k, v in run.changes.items() if v not in (None, {}) and k != "loss.preset"}
            tried = words({name: value for name, value in changes.items() if name.startswith("loss.")})
            named = ", ".join(filter(None, [run.row, run.loss, tried]))
            raise ValueError(f"{named}: {error}") from error


def data_here(run: Run) -> str | None:
    """Fingerprint of a run's data on this machine; None if they are not here."""
    try:
        return task_for(run).fingerprint(settings_of(run))
    except (OSError, ValueError):
        return None


def data_named(run: Run) -> tuple[Any, ...]:
    """What the settings of a run call its data: runs that share it must be made on the same data."""
    return run.row, *(run.changes.get(place) for place in task_for(run).places)


def check_same_data(done: Sequence[Run], left: Sequence[Run], *, always: bool = False) -> None:
    """Check that the runs that are left can have their data, and that those that are done were made on them.

    The folder of a run does not tell its data. With ``always``, runs are checked even if none is left.
    """
    here: dict[tuple[Any, ...], str | None] = {}
    for run in left:
        if data_named(run) not in here:  # one download now, and one error; else every run would try
            here[data_named(run)] = task_for(run).fingerprint(settings_of(run))
    for run in done:
        if always:
            here.setdefault(data_named(run), data_here(run))
        wanted, made_on = here.get(data_named(run)), record(run).get("fingerprint")
        if wanted is not None and made_on != wanted:
            raise ValueError(
                f"{run.name} was made on data with the fingerprint {made_on}; the data here have {wanted}: give "
                "the --data of that run, or choose another --out"
            )
