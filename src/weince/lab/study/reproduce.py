"""Fill a table with one command: carry out the missing runs, write their figures beside the paper's.

    from weince.lab.study.reproduce import Execution, reproduce

    reproduce("linear", out=Path("reproduced"), only=["cifar100_resnet18"], how=Execution(jobs=4))

A second call resumes where the first was interrupted; if all runs are done, it writes the table again.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weince.files import check_folder
from weince.lab.study.overhead import TITLE as OVERHEAD
from weince.lab.study.overhead import write_overhead
from weince.lab.study.plan import Run, plan, words
from weince.lab.study.records import ARCHIVE, keep_records
from weince.lab.study.statistics import Done, DoneRuns, fill_table
from weince.lab.study.study import Execution, Study, data_named, once
from weince.lab.study.table import RunTable, named_tables, read_table, take_seeds
from weince.lab.study.table_page import TablePage, reading_notes, write_table
from weince.lab.tasks.images.evaluation.protocol import budget

__all__ = ["Execution", "named_tables", "print_tables", "reproduce"]


def reproduce(
    table: str,
    *,
    out: Path = Path("reproduced"),
    seeds: int | Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    epochs: int | None = None,
    keep: Path | None = None,
    how: Execution | None = None,
) -> Path:
    """Fill a table.

    Args:
        table: Name of a table (``overhead``, or one of :func:`named_tables`) or a YAML file.
        out: Output folder: runs in ``out/runs``, the table in ``out/NAME``.
        seeds: How many of the table's seeds to use, or a list of seeds; by default all of the table's.
        only: Rows, cells as ``ROW/LOSS``, or tries as ``ROW/LOSS/TRY``; ``*`` matches anything.
        epochs: Epochs instead of the configurations'. Such runs are kept apart from full ones, and the table says so.
        keep: Write the records of the table's finished runs, without weights, into the archive ``keep/runs.jsonl``;
            then ``reproduce(table, out=keep, how=Execution(table_only=True))`` writes the table anywhere.
        how: How the runs are carried out; by default here, one after the other.

    Returns:
        Path of the page; after a dry run, of the folder that it would be in.

    Raises:
        ValueError: An argument is unknown, or runs failed. If runs failed, the table is written from the others.
    """
    how = how or Execution()
    check_folder(out)
    if keep is not None:
        check_folder(keep)
    command = how.command or f"weince reproduce {shlex.quote(table)}"
    if table == "overhead":
        return _overhead(out / "overhead", how, command)
    asked = read_table(table)
    numbers = take_seeds(seeds, asked.seeds)
    runs = plan(asked, out, seeds=numbers, only=only, epochs=epochs, data=how.data, device=how.device)
    study = TableStudy(asked, runs, out, how)
    if not how.table_only:  # records need no images
        study.check_data()
    if how.dry_run:
        study.show()
        return out / asked.name
    if not how.table_only:
        study.check_machine()
        study.fill(runs, jobs=how.jobs or 1, total=len(once(runs)))
    path = study.write(epochs, command)
    if keep is not None:
        keep_records([run for run in runs if study.is_done(run)], keep)
    if study.failed:
        first, count = next(iter(study.failed.values())), f"{len(study.failed)} of {len(runs)} runs failed"
        raise ValueError(f"{count}, the table without them is {path}; {first}")
    return path


def _overhead(folder: Path, how: Execution, command: str) -> Path:
    if how.table_only:
        raise ValueError(
            "overhead has no runs to make a table of, it times the losses here: leave out --table-only"
        )
    if how.dry_run:
        print("overhead trains nothing: it times the losses on this machine")
        return folder
    return write_overhead(folder, how.device or "auto", command)


def print_tables() -> None:
    """Print a line for each table: its name, how many runs fill it, what it shows."""
    tables = [read_table(name) for name in named_tables()]
    listed = [(table.name, f"{table.runs} runs", table.title.removesuffix(", %")) for table in tables]
    listed.append(("overhead", "no runs", OVERHEAD))
    width, count = (max(len(line[column]) for line in listed) for column in (0, 1))
    for name, runs, title in sorted(listed):
        print(f"{name:{width}}  {runs:>{count}}  {title}")


CellOf = tuple[str, str, int]


def _cell(run: Run) -> CellOf:
    """The row, loss and try of a run: all runs that share them differ only in their seed."""
    return run.row, run.loss, run.try_number


class TableStudy(Study):
    """The runs of a table: all are planned at the start."""

    def __init__(self, table: RunTable, runs: Sequence[Run], out: Path, how: Execution) -> None:
        super().__init__(out, how)
        self.table, self.runs = table, runs

    def planned(self) -> list[Run]:
        return once(self.runs)

    def show(self) -> None:
        """Print the runs and their state."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        drawn = Table("row", "loss", "try", "seed", "state", title=escape(self.table.title))
        states = []
        for run in self.runs:
            begun = "begun" if (run.folder / "log.csv").exists() else "to do"
            states.append("done" if self.is_done(run) else begun)
            tried = words(self.table.tries_of(run.loss)[run.try_number]) or "as configured"
            drawn.add_row(*(escape(str(cell)) for cell in (run.row, run.loss, tried, run.seed, states[-1])))
        console = Console()
        console.print(drawn)
        done = f"{len(self.runs)} runs, {states.count('done')} done; {_budget(self.runs)}."
        console.print(done, highlight=False, markup=False)

    def write(self, epochs: int | None, command: str) -> Path:
        """Write the table from the runs that are done. It shows configurations with a run that is done or failed."""
        done = self.done(self.planned())
        failed = self.failed
        if self.how.table_only:
            failed = self.failures(done, "the same command without --table-only")
            self._print_missing([run for run in self.runs if run.name not in {*done, *failed}])
            if not done:
                raise ValueError(
                    f"none of the {len(self.runs)} runs of {self.table.name} is done in {self.out / 'runs'} or "
                    f"{self.out / ARCHIVE}: leave out --table-only to run them, or name the --out that has them"
                )
        _check_data_of(self.runs, done)
        from weince.lab.study.figures import draw_table  # here, since matplotlib takes a while

        begun = {_cell(run) for run in self.runs if run.name in done or run.name in failed}
        shown = [run for run in self.runs if _cell(run) in begun]
        lines = fill_table(self.table, shown, done)
        length = f"{epochs} epoch{'s' * (epochs != 1)}"
        warning = f"A trial of {length} instead of the configured number: no figure to report."
        folder = self.out / self.table.name
        # Two columns may share a run.
        finished = [Done(run, done[run.name].record) for run in self.runs if run.name in done]
        folder.mkdir(parents=True, exist_ok=True)
        page = TablePage(
            self.table.title,
            self.table.opening,
            self.table.baseline,
            lines,
            self._facts(shown, finished, command),
            failed=list(failed.values()),
            notes=reading_notes(lines, self.table.choose_by),
            figures=draw_table(self.table, finished, folder),
            warning=warning if epochs is not None else "",
        )
        return write_table(page, folder, finished)

    def _facts(self, shown: Sequence[Run], done: Sequence[Done], command: str) -> dict[str, str]:
        """Facts about the table; ``shown`` are the runs in it."""
        records = [result.record for result in done]
        seeds = dict.fromkeys(f"{result.run.seed}" for result in done)
        chosen_by = f"mean validation figure of {self.table.choose_by}"

        def of(key: str) -> str:
            return "; ".join(sorted({str(record["made"][key]) for record in records})) or "nothing yet"

        facts = {
            "runs": f"{len(records)} of {len(self.runs)} done",
            "seeds": ", ".join(seeds) or "nothing yet",
            "tuning budget": _budget(shown),
            "chosen by": chosen_by if self.table.choose_by else "nothing to choose",
            "data": "; ".join(sorted({f"{record['data']} {record['fingerprint']}" for record in records}))
            or "nothing yet",
            "hardware": of("hardware"),
            "commit": of("commit"),
            "command": command,
        }
        every = {_cell(run): run for run in self.runs}
        left_out = [run for cell, run in every.items() if cell not in {_cell(run) for run in shown}]
        if left_out:
            names = "; ".join(self._named(run) for run in left_out)
            count = f"{len(left_out)} of {len(every)} configurations, of which no run is done"
            facts["left out"] = f"{count}: {names}"
        return facts

    def _named(self, run: Run) -> str:
        """The configuration of a run in words."""
        tried = words(self.table.tries_of(run.loss)[run.try_number])
        return ", ".join(filter(None, [run.row, run.loss, tried]))

    def _print_missing(self, missing: Sequence[Run]) -> None:
        """Print the missing runs, a line for each configuration."""
        by_cell: dict[CellOf, list[Run]] = {}
        for run in missing:
            by_cell.setdefault(_cell(run), []).append(run)
        for runs in by_cell.values():
            seeds = ", ".join(str(run.seed) for run in runs)
            print(f"missing: {self._named(runs[0])}: seed {seeds}", file=sys.stderr)


def _budget(runs: Sequence[Run]) -> str:
    """Number of tries of each loss, in words; the row with the most counts."""
    tried: dict[str, int] = {}
    for (_, loss), times in Counter((row, loss) for row, loss, _ in dict.fromkeys(map(_cell, runs))).items():
        tried[loss] = max(times, tried.get(loss, 0))
    return budget(tried)


def _check_data_of(runs: Sequence[Run], done: DoneRuns) -> None:
    """Check that runs whose settings name the same data were made on the same data, with the same ``--data``."""
    first: dict[tuple[Any, ...], tuple[Run, Any]] = {}
    for run in runs:
        if run.name not in done:
            continue
        mark = done[run.name].record.get("fingerprint")
        before, version = first.setdefault(data_named(run), (run, mark))
        if mark != version:
            raise ValueError(
                f"runs of a row must share their data; got the fingerprint {mark} for {run.name} and {version} for "
                f"{before.name}: choose another --out"
            )
