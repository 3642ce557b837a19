"""Aggregate the records of runs into a table: average seeds, choose one try per loss, add the paper's figures.

A run's record already averages the seeds of its probes and splits. Here the encoders of a configuration (one per
seed) give a mean and a t-interval. For each loss, the configuration with the best mean validation figure is chosen.
Losses are compared with the baseline seed by seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from weince.intervals import Interval, t_interval
from weince.lab.study.plan import Run, words
from weince.lab.study.records import archive_of, has_folder
from weince.lab.study.tables import MEASURES, Table
from weince.lab.tasks.images.evaluation.protocol import PairedTest, paired_test

Record = Mapping[str, Any]


class Line(NamedTuple):
    """One configuration of one loss in one row of a table, or the one chosen among several.

    Attributes:
        figure: Name of the figure.
        row: Name of the row's configuration.
        loss: Column of the table.
        tried: The settings of this try, in words.
        reported: The paper's figure; None if it reports none. Half width and count are NaN and 0 if it omits them.
        measured: Mean over the encoders with its interval; None if no run is done.
        validation: Mean of the validation figure of `Table.choose_by`; NaN if there is none.
        against: Comparison with the baseline, seed by seed; None for the baseline, and if they share no seed.
        planned: Number of planned runs; `measured` has the number of finished ones.
    """

    figure: str
    row: str
    loss: str
    tried: str
    reported: Interval | None
    measured: Interval | None
    validation: float
    against: PairedTest | None
    planned: int


class Summary(NamedTuple):
    """All lines of a table.

    Attributes:
        chosen: One line per figure, row and loss.
        tries: One line per figure, row, loss and try.
    """

    chosen: tuple[Line, ...]
    tries: tuple[Line, ...]


@cache
def reported() -> dict[str, dict[str, dict[str, Interval]]]:
    """The paper's figures, by figure, row and loss."""
    content = yaml.safe_load((Path(__file__).parent / "reported.yaml").read_text(encoding="utf-8"))
    return {
        figure: {
            row: {loss: _interval(*given) for loss, given in losses.items()} for row, losses in rows.items()
        }
        for figure, rows in content.items()
    }


def _interval(mean: float, half: float = math.nan, n: int = 0) -> Interval:
    return Interval(mean, half, n)


def aggregate(table: Table, runs: Sequence[Run], records: Mapping[Path, Record]) -> Summary:
    """Summarise the runs that are done.

    Args:
        table: The table to fill.
        runs: Its planned runs.
        records: Records of the runs that are done, by folder.
    """
    groups: dict[tuple[str, str], dict[int, list[Run]]] = {}
    for run in runs:
        groups.setdefault((run.row, run.loss), {}).setdefault(run.try_number, []).append(run)
    chosen_tries = {cell: _choose(table, tries, records) for cell, tries in groups.items()}
    chosen, tried = [], []
    for figure in table.figures:
        for (row, loss), tries in groups.items():
            base = groups.get((row, table.baseline))
            compared = (
                None if base is None or loss == table.baseline else base[chosen_tries[row, table.baseline]]
            )
            for number, of_try in tries.items():
                # The paper's figure stands beside the chosen try; in the list of tries, beside the first.
                paper = reported().get(figure, {}).get(row, {}).get(table.losses[loss].reported)
                line = Line(
                    figure=figure,
                    row=row,
                    loss=loss,
                    tried=words(table.tries_of(loss)[number]),
                    reported=paper,
                    measured=_measured(table, figure, of_try, records),
                    validation=_validation(table, of_try, records),
                    against=None if compared is None else _against(table, figure, of_try, compared, records),
                    planned=len(of_try),
                )
                tried.append(line if number == 0 else line._replace(reported=None))
                if number == chosen_tries[row, loss]:
                    chosen.append(line)
    return Summary(tuple(chosen), tuple(tried))


def _choose(table: Table, tries: Mapping[int, Sequence[Run]], records: Mapping[Path, Record]) -> int:
    """The try with the best mean validation figure; the first if no run is done yet, or none has such a figure.

    While a sweep is unfinished, tries are compared on the seeds that all started tries have, if there are any.
    """
    begun = {number: [run for run in runs if run.folder in records] for number, runs in tries.items()}
    begun = {number: runs for number, runs in begun.items() if runs}
    if not begun:
        return next(iter(tries))
    shared = set.intersection(*({run.seed for run in runs} for runs in begun.values()))
    figures = {
        number: _validation(table, [r for r in runs if not shared or r.seed in shared], records)
        for number, runs in begun.items()
    }
    # Spearman's correlation of an encoder that collapsed is NaN.
    known = {number: figure for number, figure in figures.items() if math.isfinite(figure)}
    return max(known, key=known.__getitem__) if known else next(iter(begun))


def _values(key: str, runs: Sequence[Run], records: Mapping[Path, Record]) -> dict[int, float]:
    """A figure of each finished seed; those that are not finite (a link that could not be fitted) are left out.

    So are those that are newer than their record.
    """
    found = {}
    for run in runs:
        value = records[run.folder].get(key) if run.folder in records else None
        if not isinstance(value, int | float | None):
            where = run.result if has_folder(run) else archive_of(run)
            raise ValueError(f"{where}: {key} must be a number; got {value!r}, in the run {run.name}")
        if value is not None and math.isfinite(value):
            found[run.seed] = float(value)
    return found


def _validation(table: Table, runs: Sequence[Run], records: Mapping[Path, Record]) -> float:
    key = MEASURES[table.measure].validation
    if not key or not table.choose_by:
        return math.nan
    values = _values(key.format(table.choose_by), runs, records)
    return statistics.fmean(values.values()) if values else math.nan


def _measured(
    table: Table, figure: str, runs: Sequence[Run], records: Mapping[Path, Record]
) -> Interval | None:
    values = _values(MEASURES[table.measure].test.format(figure), runs, records)
    return t_interval(values.values()) if values else None


def _against(
    table: Table, figure: str, runs: Sequence[Run], base: Sequence[Run], records: Mapping[Path, Record]
) -> PairedTest | None:
    key = MEASURES[table.measure].test.format(figure)
    ours, theirs = _values(key, runs, records), _values(key, base, records)
    shared = [seed for seed in ours if seed in theirs]
    return paired_test([ours[s] for s in shared], [theirs[s] for s in shared]) if shared else None
