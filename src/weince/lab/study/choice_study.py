"""A study with a choice: the tries of every loss, then the chosen tries with all seeds."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weince.lab.study import archives
from weince.lab.study.advice import Open
from weince.lab.study.clock import Clock
from weince.lab.study.comparison import Comparison, find_comparison
from weince.lab.study.comparison_page import ComparisonPage
from weince.lab.study.cost import Cost, CostJob, measure_cost
from weince.lab.study.local import epochs_left, shares_of, side_by_side
from weince.lab.study.plan import Run, epochs_of, plan
from weince.lab.study.provenance import figures_of, is_done, record
from weince.lab.study.records import (
    ARCHIVE,
    add_records,
    archive_of,
    archived,
    folder_lock,
    has_folder,
    keep_records,
    read_archive,
)
from weince.lab.study.search_space import in_words
from weince.lab.study.slurm import call_on_slurm
from weince.lab.study.statistics import choose_tries, cost_of_run, summarise, without_figure
from weince.lab.study.study import Execution, Study, data_here, once
from weince.lab.study.table import RunTable

EVALUATION, IMAGES = 20.0, 50_000
"""First guess of the seconds that evaluating a run takes, as for the training images of CIFAR on a GPU, and less for
fewer images; the start of a run and its epochs are timed."""


class ChoiceStudy(Study):
    """The runs of a comparison."""

    def __init__(
        self,
        comparison: Comparison,
        out: Path,
        how: Execution,
        extra: Mapping[str, Any] | None = None,
        reuse: Sequence[Path] = (),
    ) -> None:
        super().__init__(out, how)
        self.comparison, self.extra, self.archives = comparison, extra or {}, reuse
        self.tries = self._plan(comparison.tries_table())
        if comparison.try_epochs is not None:  # checks the settings of the final runs before anything starts
            self._plan(replace(comparison, try_epochs=None).tries_table())
        self.of_data: str | None = None  # fingerprint of the data here, if known
        self.in_archives: dict[str, archives.Files] = {}  # runs that a dry run leaves there
        self.opened = {run.folder for run in self.tries}  # of the runs that may start by now
        self.clock: Clock | None = None

    def _plan(self, table: RunTable) -> list[Run]:
        return plan(table, self.out, data=self.how.data, device=self.how.device, extra=self.extra)

    def planned(self) -> list[Run]:
        return once([*self.tries, *self.seeds()])

    def is_done(self, run: Run) -> bool:
        return run.name in self.in_archives or is_done(run)

    def record(self, run: Run) -> dict[str, Any]:
        if run.name in self.in_archives:
            files = self.in_archives[run.name]
            return figures_of(run, files[run.result.name], files.get("made.json", {}))
        if not has_folder(run):
            archives.check_shown(archive_of(run), run.name, archived(run), self.comparison.task)
        return record(run)

    def seeds(self, *, complete: bool = False) -> list[Run]:
        """The chosen tries with all seeds; with ``complete``, only for losses whose tries are all done or failed."""
        done = self.done(self.tries)
        chosen = choose_tries(self.comparison, self.tries, done)
        if complete:
            open_ = {run.loss for run in self.tries if run.name not in done and run.name not in self.failed}
            chosen = {loss: number for loss, number in chosen.items() if loss not in open_}
        if not chosen:
            return []
        runs = self._plan(self.comparison.seeds_table(chosen))
        return [replace(run, try_number=chosen[run.loss]) for run in runs]

    def further(self, waiting: list[Run], failed: Mapping[str, str]) -> list[Run]:
        """The waiting runs, and the final runs that can start now too, since the tries of their loss have ended.

        They are ordered by seed: if time runs out, losses have runs with the same seeds.
        """
        self.failed |= failed
        new = [run for run in self.seeds(complete=True) if run.folder not in self.opened]
        self.opened |= {run.folder for run in new}
        self._reuse(new)
        return sorted([*waiting, *new], key=lambda run: self.comparison.seeds.index(run.seed))

    def total(self) -> int:
        """Number of all runs, which does not depend on the choice. A chosen try may be one of the final runs."""
        seeds = self._plan(self.comparison.seeds_table(dict.fromkeys(self.comparison.losses, 0)))
        return len(once([*self.tries, *seeds]))

    def take_over(self, *, look: bool, write: bool) -> None:
        """Take over runs from the archives: the tries, then the chosen tries with all seeds.

        With ``look``, only runs on the data here, on which missing runs will train; with ``write``, their records are
        copied into the folder.
        """
        if self.archives:
            self.of_data = data_here(self.tries[0]) if look else None
            self._reuse(self.tries, write=write)
            self._reuse(self.seeds(), write=write)

    def _reuse(self, runs: Sequence[Run], *, write: bool = True) -> None:
        wanted = [run for run in runs if not self.is_done(run)]
        if not (self.archives and wanted):
            return
        ours = next((result.record for result in self.done(self.planned()).values()), None)
        files = archives.find_runs(wanted, self.archives, of_data=self.of_data, ours=ours)
        print(f"{len(files)} of {len(wanted)} missing runs are in the archives", file=sys.stderr)
        if not write:
            self.in_archives |= files
        elif files:
            add_records(self.out, files)

    def carry_out(self, jobs: int, budget: float | None) -> None:
        """Carry out the missing runs, as far as time allows, and time the losses."""
        if budget is not None and not all(is_done(run) for run in self.planned()):
            self.clock, _ = self.start_clock(budget, jobs)
        self.fill(self.tries, jobs=jobs, total=self.total(), clock=self.clock)
        if self.clock is None or self.clock.left() > 0:
            self._time_losses()

    def start_clock(self, seconds: float, jobs: int) -> tuple[Clock, Cost]:
        """A deadline that starts now, and the cost of the baseline's first try, from which it has its first guesses.

        The try is timed with the threads of a run: with those of the whole machine, a small step takes many times as
        long as soon as another program runs.
        """
        clock, jobs = Clock(seconds, 0.0, 0.0), min(jobs, self.total())
        run = next(run for run in self.tries if run.loss == self.comparison.baseline)
        print("timing a few steps of the configuration", file=sys.stderr)
        cost = measure_cost(run, shares_of(jobs)[0])
        images = cost["batch"] * cost["epoch_seconds"] / (cost["step_ms"] / 1000)
        clock.overhead = cost["start_seconds"] + EVALUATION * min(images / IMAGES, 1.0)
        clock.epoch, clock.side_by_side = cost["epoch_seconds"], side_by_side(run, jobs)
        return clock, cost

    def _time_losses(self) -> None:
        """Time the chosen try of each loss whose cost is not recorded, here or in a job."""
        done = [run for run in self.seeds() if self.is_done(run)]
        known = {run.loss for run in done if cost_of_run(run)}
        wanted = list({run.loss: run for run in reversed(done) if run.loss not in known}.values())
        if not wanted:
            return
        where = ", in a job; meanwhile --table-only writes the page" if self.how.slurm else ""
        print(f"timing the losses: {', '.join(run.loss for run in wanted)}{where}", file=sys.stderr)
        if not self.how.slurm:
            CostJob(wanted)()
        else:
            try:
                call_on_slurm(CostJob(wanted), wanted, out=self.out, options=self.how.slurm_options)
            except (ValueError, OSError) as error:  # the page can do without costs
                print(error, file=sys.stderr)
        left = [run.loss for run in wanted if cost_of_run(run) is None]
        if left:
            print(f"not timed: {', '.join(left)}; the same command tries again", file=sys.stderr)

    def show(self, jobs: int) -> None:
        """Print the runs, their state, and how long the rest would take here."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        drawn = Table("loss", "settings", "seed", "epochs", "for", "state", title=self.comparison.name)
        seeds = self.seeds()
        tried, final = ({run.folder for run in runs} for runs in (self.tries, seeds))
        runs = once([*self.tries, *seeds])
        for run in runs:
            purpose = ", ".join(["choice"] * (run.folder in tried) + ["figures"] * (run.folder in final))
            begun = "begun" if (run.folder / "log.csv").exists() else "to do"
            done = "done" if self.is_done(run) else begun
            state = "in the archives" if run.name in self.in_archives else done
            words = in_words(self.comparison.losses[run.loss][run.try_number])
            cells = run.loss, words, run.seed, epochs_of(run), purpose, state
            drawn.add_row(*(escape(str(cell)) for cell in cells))
        epochs = [epochs_left(run) for run in runs if not self.is_done(run)]
        open_ = [loss for loss in self.comparison.losses if loss not in {run.loss for run in seeds}]
        more = len(self.comparison.seeds) - (self.comparison.try_epochs is None)
        full = epochs_of(plan(replace(self.comparison, try_epochs=None).tries_table(), self.out)[0])
        epochs += [full] * (more * len(open_))
        console = Console()
        console.print(drawn)
        later = f", and {so_many(more, 'seed')} at the choice of {', '.join(open_)}" if open_ and more else ""
        count = f"{so_many(len(runs), 'run')}{later}; {len(epochs)} to do."
        console.print(count, highlight=False, markup=False)
        if epochs:
            clock, cost = self.start_clock(0.0, jobs)
            at_once = min(jobs, len(epochs))
            seconds = (clock.estimate(sum(epochs), at_once) + clock.overhead * (len(epochs) - 1)) / at_once
            console.print(
                f"About {in_time(seconds)} here, {jobs} at once: an epoch takes {cost['epoch_seconds']:.1f} s on "
                f"{cost['hardware']}, timed over a few steps.",
                highlight=False,
                markup=False,
            )

    def write(self, *, saved: bool) -> Path:
        """Write the archive, the tables and the page from the runs that are done.

        If the comparison is ``saved`` and another call has added to it meanwhile, the page shows that too.
        """
        done = self.done(self.planned())
        failed = self.failures(done, "weince compare with the same --out")
        if not done:
            raise ValueError(self._why_none(failed))
        archives.check_protocol([(name, result.record) for name, result in done.items()])
        keep_records([result.run for result in done.values()], self.out)
        folder = self.out / self.comparison.name
        with folder_lock(folder):  # two calls that end together write one after the other
            path = (self._latest() if saved else self).page(failed).save(folder)
        if self.failed:
            first, count = next(iter(self.failed.values())), so_many(len(self.failed), "run")
            raise ValueError(f"{count} failed, the page of the others is {path}; {first}")
        return path

    def _latest(self) -> "ChoiceStudy":
        """This study with the comparison that is saved now."""
        comparison = find_comparison(self.out, self.comparison.config)
        if comparison is None or comparison == self.comparison:
            return self
        return ChoiceStudy(comparison, self.out, self.how, self.extra)

    def page(self, failed: Mapping[str, str]) -> ComparisonPage:
        """The page, from the runs that are done; what is missing is printed."""
        seeds, done = self.seeds(), self.done(self.planned())
        lacks = self._lacks(seeds, {*done, *failed}, list(failed.values()))
        for line in (*lacks.missing, *lacks.unchosen):
            print(f"missing: {line}", file=sys.stderr)
        for name, why in without_figure(self.comparison, self.tries, done).items():
            print(f"left out of the choice: {name}, its {why}; wanted a finite number", file=sys.stderr)
        outcome = summarise(self.comparison, self.tries, seeds, done)
        command = self.how.command or "weince compare"
        page = ComparisonPage(self.comparison, outcome, lacks, failed, command)
        print(f"{self.comparison.name}: {page.advice[0]}", file=sys.stderr)
        return page

    def _why_none(self, failed: Mapping[str, str]) -> str:
        """Why there is nothing to write."""
        if failed:
            return f"{so_many(len(failed), 'run')} failed, and none is done; {next(iter(failed.values()))}"
        if self.clock is not None:
            return "no run is done, and none would end within --budget: give more time"
        archive = self.out / ARCHIVE
        rows = {name.partition("/")[0] for name in (read_archive(archive) if archive.is_file() else ())}
        rows |= {path.name for path in (self.out / "runs").glob("*") if path.is_dir()}
        there = f"runs of {', '.join(sorted(rows))}" if rows else "no runs"
        return (
            f"none of the {len(self.planned())} runs of {self.comparison.name} is in {self.out}; wanted one that is "
            f"finished and has these settings; got {there}"
        )

    def _lacks(self, seeds: Sequence[Run], ended: Collection[str], failed: Sequence[str]) -> Open:
        """What is missing: runs, a line for each loss and try, and choices.

        ``ended`` are runs that are done or failed, by name.
        """
        losses = self.comparison.losses
        missing = []
        for runs, what in ((self.tries, "try "), (seeds, "")):
            groups: dict[tuple[str, int], list[str]] = {}
            for run in runs:
                if run.name not in ended:
                    groups.setdefault((run.loss, run.try_number), []).append(str(run.seed))
            missing += [
                f"{what}{loss}, {in_words(losses[loss][number])}: seed {', '.join(numbers)}"
                for (loss, number), numbers in groups.items()
            ]
        chosen = {run.loss for run in seeds}
        open_ = {run.loss for run in self.tries if not is_done(run)}
        to_run = so_many(len(self.comparison.seeds), "seed")
        missing += [f"{loss}: {to_run} at the try to be chosen" for loss in losses if loss in open_ - chosen]
        # All tries are done: the same command runs none of them.
        why = f"no try can be chosen, since none has a finite {self.comparison.task.validation}"
        unchosen = [f"{loss}: {why}" for loss in losses if loss not in open_ | chosen]
        return Open(missing, unchosen, failed)


def in_time(seconds: float) -> str:
    """A duration in minutes, hours or days, whichever is easiest to read.

    >>> in_time(10), in_time(89 * 60), in_time(2.5 * 3600), in_time(33_160 * 60)
    ('1 minute', '89 minutes', '2.5 hours', '23 days')
    """
    minutes = max(1, round(seconds / 60))
    if minutes < 90:
        return so_many(minutes, "minute")
    hours = minutes / 60
    return f"{hours:.2g} hours" if hours < 71.5 else so_many(round(hours / 24), "day")


def so_many(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
