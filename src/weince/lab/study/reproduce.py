"""Fill a table with one command: plan runs, carry out the missing ones, write their figures beside the paper's.

    from weince.lab.study.reproduce import reproduce

    reproduce("linear", out=Path("reproduced"), only=["cifar100_resnet18"], jobs=4)

A second call resumes where the first was interrupted; if all runs are done, it writes the table again.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weince.files import check_folder, check_writable
from weince.lab.study import execute
from weince.lab.study.aggregate import aggregate
from weince.lab.study.plan import Run, check_data, check_devices, check_losses, plan, words
from weince.lab.study.records import ARCHIVE, keep_records
from weince.lab.study.slurm import check_slurm
from weince.lab.study.sweep import (
    carry_out,
    check_given_data,
    check_same_data,
    data_named,
    print_failed,
    tell_changed_losses,
)
from weince.lab.study.table_page import Page, reading_notes, write_page
from weince.lab.study.tables import Table, check_alone, named_tables, read_table, take_seeds
from weince.lab.tasks.images.evaluation.protocol import budget

__all__ = ["named_tables", "print_tables", "reproduce"]

OVERHEAD = "Cost of the loss stage (reported on an NVIDIA L40S)"


def reproduce(
    table: str,
    *,
    out: Path = Path("reproduced"),
    jobs: int = 1,
    slurm: bool = False,
    slurm_options: Mapping[str, Any] | None = None,
    data: str | None = None,
    seeds: int | Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    epochs: int | None = None,
    device: str | None = None,
    dry_run: bool = False,
    table_only: bool = False,
    keep: Path | None = None,
    command: str = "",
) -> Path:
    """Fill a table.

    Args:
        table: Name of a table (``overhead``, or one of :func:`named_tables`) or a YAML file.
        out: Output folder: runs in ``out/runs``, the table in ``out/NAME``.
        jobs: Concurrent runs on this machine, or concurrent tasks on the cluster.
        slurm: Submit the runs to Slurm and wait for them.
        slurm_options: Options of sbatch under submitit's names, such as ``{"partition": "gpu"}``.
        data: Where the images are: a path, or ``NAME=PATH,NAME=PATH``.
        seeds: How many of the table's seeds to use, or a list of seeds; by default all of the table's.
        only: Rows, cells as ``ROW/LOSS``, or tries as ``ROW/LOSS/TRY``; ``*`` matches anything.
        epochs: Epochs instead of the configurations'. Such runs are kept apart from full ones, and the table says so.
        device: ``cpu``, ``cuda`` or ``mps`` instead of the configured device.
        dry_run: Print the plan and start nothing.
        table_only: Start nothing; write the table from the runs that are done, and print which are missing or have
            failed. A run needs only ``run.yaml`` and its result, in its folder or in the archive ``out/runs.jsonl``;
            ``made.json`` and ``log.csv`` add details.
        keep: Write the records of the table's finished runs, without weights, into the archive ``keep/runs.jsonl``;
            then ``reproduce(table, out=keep, table_only=True)`` writes the table anywhere.
        command: Command to show in the table.

    Returns:
        Path of the page; after a dry run, of the folder that it would be in.

    Raises:
        ValueError: An argument is unknown, or runs failed. If runs failed, the table is written from the others.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    if dry_run:
        check_alone({"--table-only": table_only})
    check_folder(out)
    if keep is not None:
        check_folder(keep)
    command = command or f"weince reproduce {shlex.quote(table)}"
    if table == "overhead" and table_only:
        raise ValueError(
            "overhead has no runs to make a table of, it times the losses here: leave out --table-only"
        )
    if table == "overhead":
        return _overhead(out, device, command, dry_run)
    asked = read_table(table)
    runs = plan(
        asked, out, seeds=take_seeds(seeds, asked.seeds), only=only, epochs=epochs, data=data, device=device
    )
    left = [] if table_only else [run for run in runs if not execute.is_done(run)]  # records need no images
    if not slurm:
        check_data(left)
    elif data is not None:  # data as configured may be in folders that only the nodes see
        check_given_data(left)
    tell_changed_losses(runs)
    if dry_run:
        _print_plan(asked, runs)
        return out / asked.name
    if not (slurm or table_only):
        check_devices(left)
        check_losses(left)
        check_same_data(runs)
    if slurm and left:
        check_slurm(slurm_options)
    failed = {} if table_only else carry_out(runs, out, jobs=jobs, slurm=slurm, slurm_options=slurm_options)
    records = {run.folder: execute.record(run) for run in runs if execute.is_done(run)}
    if table_only:
        missing = [run for run in runs if run.folder not in records]
        failed = execute.failures(missing)
        _print_missing(asked, [run for run in missing if run.name not in failed])
        print_failed(failed, "the same command without --table-only")
        if not records:
            raise ValueError(
                f"none of the {len(runs)} runs of {asked.name} is done in {out / 'runs'} or {out / ARCHIVE}: leave "
                "out --table-only to run them, or name the --out that has them"
            )
    made = [(run, records[run.folder]) for run in runs if run.folder in records]
    _check_data_of(made)
    path = write_page(_page(asked, runs, made, failed, epochs, command), out / asked.name, made)
    if keep is not None:
        keep_records([run for run, _ in made], keep)
    if failed and not table_only:
        first = next(iter(failed.values()))
        raise ValueError(
            f"{len(failed)} of {len(runs)} runs failed, the table without them is {path}; {first}"
        )
    return path


def _check_data_of(made: Sequence[tuple[Run, Mapping[str, Any]]]) -> None:
    """Check that runs whose settings name the same data were made on the same data.

    Raises:
        ValueError: They were not, because ``--data`` changed between two calls.
    """
    first: dict[tuple[Any, ...], tuple[Run, str | None]] = {}
    for run, record in made:
        before, version = first.setdefault(data_named(run), (run, record.get("fingerprint")))
        if record.get("fingerprint") != version:
            raise ValueError(
                f"runs of a row must share their data; got the fingerprint {record.get('fingerprint')} for "
                f"{run.name} and {version} for {before.name}: choose another --out"
            )


def print_tables() -> None:
    """Print a line for each table: its name, how many runs fill it, what it shows."""
    tables = [read_table(name) for name in named_tables()]
    listed = [(table.name, f"{table.runs} runs", table.title.removesuffix(", %")) for table in tables]
    listed.append(("overhead", "no runs", OVERHEAD))
    width, count = (max(len(line[column]) for line in listed) for column in (0, 1))
    for name, runs, title in sorted(listed):
        print(f"{name:{width}}  {runs:>{count}}  {title}")


def _cell(run: Run) -> tuple[str, str, int]:
    """The row, loss and try of a run: all runs that share them differ only in their seed."""
    return run.row, run.loss, run.try_number


def _page(
    table: Table,
    runs: Sequence[Run],
    made: Sequence[tuple[Run, Mapping[str, Any]]],
    failed: Mapping[str, str],
    epochs: int | None,
    command: str,
) -> Page:
    """The page of a table. It shows the configurations that have a run that is done or failed."""
    from weince.lab.study.curves import pictures  # here, since matplotlib takes a while

    records = {run.folder: record for run, record in made}
    begun = {_cell(run) for run in runs if run.folder in records or run.name in failed}
    shown = [run for run in runs if _cell(run) in begun]
    summary = aggregate(table, shown, records)
    length = f"{epochs} epoch{'s' * (epochs != 1)}"
    warning = f"A trial of {length} instead of the configured number: no figure to report."
    return Page(
        table.title,
        table.opening,
        table.baseline,
        summary,
        _facts(table, runs, shown, made, command),
        failed=list(failed.values()),
        notes=reading_notes(summary, table.choose_by),
        pictures=pictures(table, made),
        warning=warning if epochs is not None else "",
    )


def _facts(
    table: Table,
    runs: Sequence[Run],
    shown: Sequence[Run],
    made: Sequence[tuple[Run, Mapping[str, Any]]],
    command: str,
) -> dict[str, str]:
    """Facts about a table. ``runs`` are all planned runs, ``shown`` those in the table, ``made`` those done."""
    records = [record for _, record in made]

    def of(key: str) -> str:
        return "; ".join(sorted({str(record["made"][key]) for record in records})) or "nothing yet"

    versions = sorted({f"{record['data']} {record['fingerprint']}" for record in records})
    facts = {
        "runs": f"{len(records)} of {len(runs)} done",
        "seeds": ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run, _ in made)) or "nothing yet",
        "tuning budget": _budget(shown),
        "chosen by": f"mean validation figure of {table.choose_by}"
        if table.choose_by
        else "nothing to choose",
        "data": "; ".join(versions) or "nothing yet",
        "hardware": of("hardware"),
        "commit": of("commit"),
        "command": command,
    }
    there = {_cell(run) for run in shown}
    left_out = {_cell(run): run for run in runs if _cell(run) not in there}
    if left_out:
        every = len({_cell(run) for run in runs})
        names = "; ".join(", ".join(_said(table, run)) for run in left_out.values())
        facts["left out"] = f"{len(left_out)} of {every} configurations, of which no run is done: {names}"
    return facts


def _budget(runs: Sequence[Run]) -> str:
    """Number of tries of each loss, in words; the row with the most counts."""
    tried: dict[str, int] = {}
    for (_, loss), times in Counter((row, loss) for row, loss, _ in dict.fromkeys(map(_cell, runs))).items():
        tried[loss] = max(times, tried.get(loss, 0))
    return budget(tried)


def _said(table: Table, run: Run) -> list[str]:
    """The configuration of a run in words."""
    return [run.row, run.loss, *filter(None, [words(table.tries_of(run.loss)[run.try_number])])]


def _print_missing(table: Table, missing: Sequence[Run]) -> None:
    """Print the missing runs, a line for each configuration."""
    by_cell: dict[tuple[str, str, int], list[Run]] = {}
    for run in missing:
        by_cell.setdefault(_cell(run), []).append(run)
    for runs in by_cell.values():
        seeds = ", ".join(str(run.seed) for run in runs)
        print(f"missing: {', '.join(_said(table, runs[0]))}: seed {seeds}", file=sys.stderr)


def _print_plan(table: Table, runs: Sequence[Run]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Drawn

    drawn = Drawn("row", "loss", "try", "seed", "state", title=escape(table.title))
    done = 0
    for run in runs:
        finished = execute.is_done(run)
        begun = not finished and (run.folder / "log.csv").exists()
        state = "done" if finished else "begun" if begun else "to do"
        done += finished
        tried = words(table.tries_of(run.loss)[run.try_number]) or "as configured"
        drawn.add_row(*(escape(str(cell)) for cell in (run.row, run.loss, tried, run.seed, state)))
    console = Console()
    console.print(drawn)
    console.print(f"{len(runs)} runs, {done} done; {_budget(runs)}.", highlight=False, markup=False)


def _overhead(out: Path, device: str | None, command: str, dry_run: bool) -> Path:
    from weince.lab.study.overhead import overhead  # here, since there is a module of that name

    if dry_run:
        print("overhead trains nothing: it times the losses on this machine")
        return out / "overhead"
    check_writable(out / "overhead")
    facts = {"hardware": execute.hardware(device or "auto"), "commit": execute.commit(), "command": command}
    notes = ("One forward and one backward pass of the loss alone, on embeddings that are there already.",)
    opening = "This table shows what the losses cost on this machine, beside what the paper reports."
    page = Page(OVERHEAD, opening, "InfoNCE", overhead(device), facts, notes=notes)
    return write_page(page, out / "overhead")
