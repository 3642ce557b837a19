"""The runs of a comparison: plan them, take over archived ones, carry out the rest, write the page."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weince.lab.study import execute, merge
from weince.lab.study.clock import Clock
from weince.lab.study.cost import Cost, Timing, measure_cost
from weince.lab.study.grid import Comparison, in_words
from weince.lab.study.places import apart, places_of
from weince.lab.study.plan import (
    Run,
    check_data,
    check_devices,
    check_losses,
    epochs_of,
    plan,
    settings_of,
    task_for,
)
from weince.lab.study.records import (
    ARCHIVE,
    add_records,
    archive_of,
    archived,
    has_folder,
    keep_records,
    read_archive,
)
from weince.lab.study.slurm import call_on_slurm
from weince.lab.study.summary import choose, cost_of_run, summarise, without_figure
from weince.lab.study.sweep import (
    carry_out,
    check_given_data,
    check_same_data,
    data_here,
    print_failed,
    tell_changed_losses,
)
from weince.lab.study.tables import Table

EVALUATION, IMAGES = 20.0, 50_000
"""First guess of the seconds that evaluating a run takes, as for the training images of CIFAR on a GPU, and less for
fewer images; the start of a run and its epochs are timed."""


class Sweep:
    """The runs of a comparison: the tries, and the chosen tries with all seeds."""

    def __init__(
        self,
        comparison: Comparison,
        out: Path,
        data: str | None,
        device: str | None,
        extra: Mapping[str, Any],
        reuse: Sequence[Path],
    ) -> None:
        self.comparison, self.out, self.archives = comparison, out, reuse
        self.data, self.device, self.extra = data, device, extra
        self.tries = self._plan(comparison.tries_table())
        if comparison.try_epochs is not None:  # checks the settings of the final runs before anything starts
            self._plan(replace(comparison, try_epochs=None).tries_table())
        self.of_data: str | None = None  # fingerprint of the data here, if known
        self.found: dict[str, merge.Files] = {}  # runs in the archives that a dry run leaves there
        self.opened = {run.folder for run in self.tries}  # of the runs that `fill` may start by now
        self.failed: dict[str, str] = {}
        self.clock: Clock | None = None

    def _plan(self, table: Table) -> list[Run]:
        return plan(table, self.out, data=self.data, device=self.device, extra=self.extra)

    def records(self, runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
        """Records of those runs that are done, by name."""
        return {run.name: self._record(run) for run in runs if self._is_done(run)}

    def _is_done(self, run: Run) -> bool:
        return run.name in self.found or execute.is_done(run)

    def _record(self, run: Run) -> dict[str, Any]:
        if run.name not in self.found:
            if not has_folder(run):
                merge.check_shown(archive_of(run), run.name, archived(run), self.comparison.task)
            return execute.record(run)
        files = self.found[run.name]
        return execute.figures_of(run, files[run.result.name], files.get("made.json", {}))

    def evaluations(self) -> list[dict[str, Any]]:
        return list(self.records([*self.tries, *self.seeds()]).values())

    def seeds(self, *, complete: bool = False) -> list[Run]:
        """The chosen tries with all seeds; with ``complete``, only for losses whose tries are all done or failed."""
        records = self.records(self.tries)
        chosen = choose(self.comparison, self.tries, records)
        open_ = {run.loss for run in self.tries if run.name not in records and run.name not in self.failed}
        chosen = {loss: number for loss, number in chosen.items() if not (complete and loss in open_)}
        if not chosen:
            return []
        runs = self._plan(self.comparison.seeds_table(chosen))
        return [replace(run, try_number=chosen[run.loss]) for run in runs]

    def check_start(self, *, slurm: bool) -> None:
        """Check that the missing runs can start, on the data of the finished ones.

        Args:
            slurm: The runs are jobs on a cluster, whose nodes may have other devices and see other folders: check
                only that data given by ``--data`` exist.

        Raises:
            ValueError: A loss fails, a device or data are missing, or the data are not those of the finished runs.
        """
        runs = [*self.tries, *self.seeds()]
        left = [run for run in runs if not self._is_done(run)]
        tell_changed_losses(list({run.folder: run for run in runs}.values()))
        if slurm:
            if self.data is not None:
                check_given_data(left)
            return
        check_devices(left)
        check_losses(left)
        check_data(left)
        if left:  # one download now, and one error; else every run would try
            task_for(left[0]).fingerprint(settings_of(left[0]))
        check_same_data([run for run in runs if run.name not in self.found], always=self.data is not None)

    def fill(self, budget: float | None, options: Mapping[str, Any]) -> dict[str, str]:
        """Carry out the missing runs, as far as time allows; returns why runs failed, by their names.

        Tries come first. The final runs of a loss start as soon as its tries have ended.
        """
        runs = self._opened(self.tries, {})
        if budget is not None and not all(execute.is_done(run) for run in runs):
            self.clock, _ = self._clock(budget, options["jobs"])
        self.failed |= carry_out(
            runs, self.out, clock=self.clock, then=self._opened, total=self._total(), **options
        )
        return self.failed

    def _opened(self, waiting: Sequence[Run], failed: Mapping[str, str]) -> list[Run]:
        """The waiting runs, and the final runs that can start now too, since the tries of their loss have ended.

        They are ordered by seed: if time runs out, losses have runs with the same seeds.
        """
        self.failed |= failed
        new = {run.folder: run for run in self.seeds(complete=True) if run.folder not in self.opened}
        self.opened |= new.keys()
        self._reuse([*new.values()])
        return sorted([*waiting, *new.values()], key=lambda run: self.comparison.seeds.index(run.seed))

    def _total(self) -> int:
        """Number of all runs, which does not depend on the choice. A chosen try may be one of the final runs."""
        seeds = self._plan(self.comparison.seeds_table(dict.fromkeys(self.comparison.losses, 0)))
        return len({run.folder for run in (*self.tries, *seeds)})

    def take_over(self, *, look: bool, write: bool) -> None:
        """Take over runs from the archives: the tries, then the chosen tries with all seeds.

        Args:
            look: Take only runs on the same data as here. The missing runs will train on these, or the user named
                them.
            write: Copy their records into the folder.
        """
        if look and self.archives:
            self.of_data = data_here(self.tries[0])
        if self.archives:
            self._reuse(self.tries, write=write)
            self._reuse(self.seeds(), write=write)

    def _reuse(self, runs: Sequence[Run], *, write: bool = True) -> None:
        wanted = [run for run in runs if not self._is_done(run)]
        if not (self.archives and wanted):
            return
        ours = next(iter(self.evaluations()), None)
        found = merge.find_runs(wanted, self.archives, of_data=self.of_data, ours=ours)
        print(f"{len(found)} of {len(wanted)} missing runs are in the archives", file=sys.stderr)
        if not write:
            self.found |= found
        elif found:
            add_records(self.out, found)

    def _clock(self, seconds: float, jobs: int) -> tuple[Clock, Cost]:
        """A deadline that starts now, and the cost of the baseline's first try, from which it has its first guesses.

        The try is timed with the threads of a run: with those of the whole machine, a small step takes many times as
        long as soon as another program runs.
        """
        clock, jobs = Clock(seconds, 0.0, 0.0), min(jobs, self._total())
        run = next(run for run in self.tries if run.loss == self.comparison.baseline)
        print("timing a few steps of the configuration", file=sys.stderr)
        cost = measure_cost(run, places_of(jobs)[0])
        images = cost["batch"] * cost["epoch_seconds"] / (cost["step_ms"] / 1000)
        clock.overhead = cost["start_seconds"] + EVALUATION * min(images / IMAGES, 1.0)
        clock.epoch, clock.apart = cost["epoch_seconds"], apart(run, jobs)
        return clock, cost

    def missing(self, seeds: Sequence[Run], failed: Mapping[str, str]) -> list[str]:
        """Runs that are neither done nor failed, in words: a line for each loss and try."""

        def is_missing(run: Run) -> bool:
            return run.name not in failed and not execute.is_done(run)

        found = _grouped(self.comparison, [run for run in self.tries if is_missing(run)], "try ")
        found += _grouped(self.comparison, [run for run in seeds if is_missing(run)], "")
        chosen = {run.loss for run in seeds}
        open_ = {run.loss for run in self.tries if not execute.is_done(run)}
        for loss in self.comparison.losses:
            if loss not in chosen and loss in open_:
                seeds_to_run = _so_many(len(self.comparison.seeds), "seed")
                found.append(f"{loss}: {seeds_to_run} at the try to be chosen")
        return found

    def unchosen(self, seeds: Sequence[Run]) -> list[str]:
        """Losses without a choice though all their tries are done, in words: the same command runs none of them."""
        there = {run.loss for run in seeds} | {run.loss for run in self.tries if not execute.is_done(run)}
        return [
            f"{loss}: no try can be chosen, since none has a finite {self.comparison.task.validation}"
            for loss in self.comparison.losses
            if loss not in there
        ]

    def show(self, jobs: int) -> None:
        """Print the runs, their state, and how long the rest would take here."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        drawn = Table("loss", "settings", "seed", "epochs", "for", "state", title=self.comparison.name)
        seeds, epochs = self.seeds(), []
        listed = {run.folder: ("choice", run) for run in self.tries}
        listed |= {
            run.folder: ("choice, figures" if run.folder in listed else "figures", run) for run in seeds
        }
        for purpose, run in listed.values():
            done, length = self._is_done(run), epochs_of(run)
            if not done:
                epochs.append(execute.epochs_left(run))
            words = in_words(self.comparison.losses[run.loss][run.try_number])
            begun = "begun" if (run.folder / "log.csv").exists() else "to do"
            state = "in the archives" if run.name in self.found else "done" if done else begun
            drawn.add_row(*(escape(str(c)) for c in (run.loss, words, run.seed, length, purpose, state)))
        open_ = [loss for loss in self.comparison.losses if loss not in {run.loss for run in seeds}]
        further = len(self.comparison.seeds) - (self.comparison.try_epochs is None)
        full = epochs_of(plan(replace(self.comparison, try_epochs=None).tries_table(), self.out)[0])
        epochs += [full] * (further * len(open_))
        console = Console()
        console.print(drawn)
        later = f", and {_so_many(further, 'seed')} at the choice of {', '.join(open_)}"
        said = _so_many(len(listed), "run") + (later if open_ and further else "")
        console.print(f"{said}; {len(epochs)} to do.", highlight=False, markup=False)
        if epochs:
            clock, cost = self._clock(0.0, jobs)
            at_once = min(jobs, len(epochs))
            seconds = (clock.estimate(sum(epochs), at_once) + clock.overhead * (len(epochs) - 1)) / at_once
            console.print(
                f"About {in_time(seconds)} here, {jobs} at once: an epoch takes "
                f"{cost['epoch_seconds']:.1f} s on {cost['hardware']}, timed over a few steps.",
                highlight=False,
                markup=False,
            )

    def write(self, command: str, failed: Mapping[str, str]) -> Path:
        """Write the archive, the tables and the page from the runs that are done."""
        from weince.lab.study.comparison_page import write_page  # here, since matplotlib takes a while

        seeds = self.seeds()
        runs = list({run.folder: run for run in (*self.tries, *seeds)}.values())
        records = self.records(runs)
        earlier = execute.failures([run for run in runs if run.name not in (*records, *failed)])
        every = {**earlier, **failed}
        if every and not records:
            first = next(iter(every.values()))
            raise ValueError(f"{_so_many(len(every), 'run')} failed, and none is done; {first}")
        if not records and self.clock is not None:
            raise ValueError("no run is done, and none would end within --budget: give more time")
        if not records:
            raise ValueError(
                f"none of the {len(runs)} runs of {self.comparison.name} is in {self.out}; wanted one that is "
                f"finished and has these settings; got {self._there()}"
            )
        merge.check_protocol([(name, record) for name, record in records.items()])
        done = [run for run in runs if run.name in records]
        missing, unchosen = self.missing(seeds, every), self.unchosen(seeds)
        for line in [*missing, *unchosen]:
            print(f"missing: {line}", file=sys.stderr)
        print_failed(earlier, "weince compare with the same --out")
        for name, why in without_figure(self.comparison, self.tries, records).items():
            print(f"left out of the choice: {name}, its {why}; wanted a finite number", file=sys.stderr)
        keep_records(done, self.out)
        summary = summarise(
            self.comparison, self.tries, seeds, records, missing, unchosen=unchosen, failed=bool(every)
        )
        path = write_page(self.comparison, summary, self.out / self.comparison.name, every, command)
        print(f"{self.comparison.name}: {summary.advice[0]}", file=sys.stderr)
        if failed:
            first = next(iter(failed.values()))
            raise ValueError(
                f"{_so_many(len(failed), 'run')} failed, the page of the others is {path}; {first}"
            )
        return path

    def _there(self) -> str:
        """What the folder holds instead of the wanted runs, in words."""
        archive = self.out / ARCHIVE
        named = [name.partition("/")[0] for name in (read_archive(archive) if archive.is_file() else ())]
        named += [path.name for path in (self.out / "runs").glob("*") if path.is_dir()]
        return f"runs of {', '.join(sorted(set(named)))}" if named else "no runs"

    def time_losses(self, slurm_options: Mapping[str, Any] | None) -> None:
        """Time the chosen try of each loss whose cost is not recorded, if there is time left.

        Args:
            slurm_options: Options of the cluster job that does it; None to do it here.
        """
        if self.clock is not None and self.clock.left() <= 0:
            return
        seeds = self.seeds()
        records = self.records(seeds)
        firsts = {run.loss: run for run in reversed(seeds) if run.name in records}
        known = {run.loss for run in seeds if run.name in records and cost_of_run(run)}
        wanted = [run for loss, run in firsts.items() if loss not in known]
        if not wanted:
            return
        where = "" if slurm_options is None else ", in a job; meanwhile --table-only writes the page"
        print(f"timing the losses: {', '.join(run.loss for run in wanted)}{where}", file=sys.stderr)
        if slurm_options is None:
            Timing(wanted)()
        else:
            try:
                call_on_slurm(Timing(wanted), wanted, out=self.out, options=slurm_options)
            except (ValueError, OSError) as error:  # the page can do without costs
                print(error, file=sys.stderr)
        left = [run.loss for run in wanted if cost_of_run(run) is None]
        if left:
            print(f"not timed: {', '.join(left)}; the same command tries again", file=sys.stderr)


def _grouped(comparison: Comparison, runs: Sequence[Run], what: str) -> list[str]:
    groups: dict[tuple[str, int], list[int]] = {}
    for run in runs:
        groups.setdefault((run.loss, run.try_number), []).append(run.seed)
    return [
        f"{what}{loss}, {in_words(comparison.losses[loss][number])}: seed {', '.join(map(str, seeds))}"
        for (loss, number), seeds in groups.items()
    ]


def in_time(seconds: float) -> str:
    """A duration in minutes, hours or days, whichever is easiest to read.

    >>> in_time(10), in_time(89 * 60), in_time(2.5 * 3600), in_time(33_160 * 60)
    ('1 minute', '89 minutes', '2.5 hours', '23 days')
    """
    minutes = max(1, round(seconds / 60))
    if minutes < 90:
        return _so_many(minutes, "minute")
    hours = minutes / 60
    return f"{hours:.2g} hours" if hours < 71.5 else _so_many(round(hours / 24), "day")


def _so_many(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
