"""From the records of runs to what a page shows: choice by validation, means over seeds, differences, cost.

A run's record already averages the seeds of its probes and splits. Here the runs of a configuration, one per seed,
give a mean and a t-interval, and losses are compared with the baseline seed by seed.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from weince.intervals import Interval, t_interval
from weince.lab.study.comparison import Comparison
from weince.lab.study.cost import RECORD, Cost
from weince.lab.study.differences import Judgement, LossDifference, judge, paired, reach
from weince.lab.study.plan import Run, epochs_of, task_for, words
from weince.lab.study.records import archive_of, has_folder, read_record
from weince.lab.study.search_space import in_words
from weince.lab.study.table import RunTable
from weince.lab.study.two_noises import MISSING, judge_both
from weince.lab.tasks.images.evaluation.protocol import PairedTest, budget, paired_test


@dataclass(frozen=True)
class Done:
    """A run that is done, and its measured figures."""

    run: Run
    record: Mapping[str, Any]

    def figure(self, name: str, kind: str = "test") -> float:
        """A ``test`` or ``validation`` figure; NaN if the record is older than it. What is no number is an error."""
        measure = self.run.measure
        key = (measure.test if kind == "test" else measure.validation).format(name)
        value = self.record.get(key) if key else None
        if not isinstance(value, int | float | None):
            where = self.run.result if has_folder(self.run) else archive_of(self.run)
            raise ValueError(f"{where}: {key} must be a number; got {value!r}, in the run {self.run.name}")
        return math.nan if value is None else float(value)

    @cached_property
    def log(self) -> list[dict[str, float]]:
        """Rows of its log; none if it has no log."""
        rows: list[dict[str, float]] = read_record(self.run, "log.csv")
        return rows

    @property
    def epochs(self) -> int:
        return epochs_of(self.run)

    @property
    def seconds(self) -> float:
        """Seconds that it trained; NaN if it has no log."""
        return sum((row.get("seconds", math.nan) for row in self.log), 0.0) if self.log else math.nan

    @property
    def crowded(self) -> float:
        """Share of crowded anchors in its last epoch; NaN if its log lacks it."""
        return self.log[-1].get("crowded", math.nan) if self.log else math.nan

    def course(self, column: str) -> list[tuple[float, float, float]]:
        """Epochs and seconds of training, and a column of the log, wherever the log has it."""
        seconds = itertools.accumulate(row.get("seconds", math.nan) for row in self.log)
        rows = zip(self.log, seconds, strict=True)
        return [(row["epoch"], until, row[column]) for row, until in rows if column in row]


DoneRuns = Mapping[str, Done]
"""The runs that are done, by name."""


def by_seed(done: Iterable[Done], figure: str, kind: str = "test") -> dict[int, float]:
    """A figure of each seed; one that is missing or not finite (a link that could not be fitted) is left out."""
    values = {result.run.seed: result.figure(figure, kind) for result in done}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def among(runs: Iterable[Run], done: DoneRuns) -> list[Done]:
    """Those of the runs that are done."""
    return [done[run.name] for run in runs if run.name in done]


def mean_of(values: Iterable[float]) -> float:
    """Mean of the finite values; NaN if there are none."""
    known = [value for value in values if math.isfinite(value)]
    return statistics.fmean(known) if known else math.nan


def choose(tries: Mapping[int, Sequence[Done]], figure: str) -> int | None:
    """Number of the try with the best mean validation figure; None if no try has a finite one.

    While a study is unfinished, tries are compared on the seeds that all started tries have, if there are any.
    """
    begun = {number: done for number, done in tries.items() if done}
    if not begun:
        return None
    shared = set.intersection(*({result.run.seed for result in done} for done in begun.values()))
    means = {
        number: mean_of(d.figure(figure, "validation") for d in done if not shared or d.run.seed in shared)
        for number, done in begun.items()
    }
    # Spearman's correlation of an encoder that collapsed is NaN.
    known = {number: mean for number, mean in means.items() if math.isfinite(mean)}
    return max(known, key=known.__getitem__) if known else None


# A fixed table.


class TableLine(NamedTuple):
    """One configuration of one loss in one row of a table, or the one chosen among several.

    Attributes:
        figure: Name of the figure.
        row: Name of the row's configuration.
        loss: Column of the table.
        tried: The settings of this try, in words.
        reported: The paper's figure; None if it reports none. Half width and count are NaN and 0 if it omits them.
        measured: Mean over the encoders with its interval; None if no run is done.
        validation: Mean of the validation figure of `RunTable.choose_by`; NaN if there is none.
        against: Comparison with the baseline, seed by seed; None for the baseline, and if they share no seed.
        planned: Number of planned runs; `measured` has the number of finished ones.
        digits: Digits after the point to show.
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
    digits: int = 2


class TableLines(NamedTuple):
    """All lines of a table: one per figure, row and loss, and one per try of these."""

    chosen: Sequence[TableLine]
    tries: Sequence[TableLine]


@cache
def reported() -> dict[str, dict[str, dict[str, Interval]]]:
    """The paper's figures, by figure, row and loss."""
    content = yaml.safe_load((Path(__file__).parent / "reported.yaml").read_text(encoding="utf-8"))
    return {
        figure: {
            row: {loss: Interval(*mean, *(math.nan, 0)[len(mean) - 1 :]) for loss, mean in losses.items()}
            for row, losses in rows.items()
        }
        for figure, rows in content.items()
    }


def fill_table(table: RunTable, runs: Sequence[Run], done: DoneRuns) -> TableLines:
    """The lines of a table from its planned runs and those that are done."""
    groups: dict[tuple[str, str], dict[int, list[Run]]] = {}
    for run in runs:
        groups.setdefault((run.row, run.loss), {}).setdefault(run.try_number, []).append(run)
    numbers = {cell: _shown_try(table, tries, done) for cell, tries in groups.items()}
    chosen, every = [], []
    for figure, ((row, loss), tries) in itertools.product(table.figures, groups.items()):
        base = groups.get((row, table.baseline)) if loss != table.baseline else None
        compared = None if base is None else among(base[numbers[row, table.baseline]], done)
        for number, of_try in tries.items():
            here = among(of_try, done)
            values = by_seed(here, figure)
            validation = (result.figure(table.choose_by, "validation") for result in here if table.choose_by)
            line = TableLine(
                figure=figure,
                row=row,
                loss=loss,
                tried=words(table.tries_of(loss)[number]),
                # The paper's figure stands beside the chosen try; in the list of tries, beside the first.
                reported=reported().get(figure, {}).get(row, {}).get(table.losses[loss].reported),
                measured=t_interval(values.values()) if values else None,
                validation=mean_of(validation),
                against=None if compared is None else _against(values, by_seed(compared, figure)),
                planned=len(of_try),
                digits=of_try[0].measure.digits,
            )
            every.append(line if number == 0 else line._replace(reported=None))
            if number == numbers[row, loss]:
                chosen.append(line)
    return TableLines(chosen, every)


def _shown_try(table: RunTable, tries: Mapping[int, Sequence[Run]], done: DoneRuns) -> int:
    """The chosen try; the first that is begun if none can be chosen, or else the first."""
    begun = {number: here for number, runs in tries.items() if (here := among(runs, done))}
    chosen = choose(begun, table.choose_by) if table.choose_by else None
    return next(iter(begun or tries)) if chosen is None else chosen


def _against(values: Mapping[int, float], base: Mapping[int, float]) -> PairedTest | None:
    shared = [seed for seed in values if seed in base]
    return paired_test([values[s] for s in shared], [base[s] for s in shared]) if shared else None


# A comparison.


class TryLine(NamedTuple):
    """A try of a loss: its settings in words, its temperature, its run if done, and whether it was chosen."""

    loss: str
    words: str
    temperature: float | None
    done: Done | None
    chosen: bool

    def figure(self, name: str, kind: str = "test") -> float:
        """A figure of its run; NaN if it is not done."""
        return self.done.figure(name, kind) if self.done else math.nan


class LossLine(NamedTuple):
    """The results of one loss.

    Attributes:
        loss: Name of the loss.
        words: The chosen try in words; empty if none is chosen yet.
        tries: How many tries are done.
        measured: Each figure over the seeds; figures that no run has are left out.
        judged: Each figure against the baseline; empty for the baseline itself.
        crowded: Mean share of crowded anchors in the last epoch.
        seconds: Mean seconds of training.
        cost: Cost of the loss and of a step, if it was measured.
    """

    loss: str
    words: str
    tries: int
    measured: Mapping[str, Interval]
    judged: Mapping[str, LossDifference]
    crowded: float
    seconds: float
    cost: Cost | None


class Outcome(NamedTuple):
    """What a comparison has shown so far.

    Attributes:
        lines: One line per loss, the best by the task's main figure first; losses without a final run last.
        judgement: All differences from the baseline.
        smallest: The smallest difference that these seeds can show with 80 % power, by figure.
        tries: Tries of all losses, in their order.
        tuned: For each loss, the expected test figure of the best of k tries by validation, for k from 1.
        done: All runs that are done.
        counted: Names of the final runs among them: the chosen tries at full length.
        budget: How many tries each loss had, in words.
    """

    lines: Sequence[LossLine]
    judgement: Judgement
    smallest: Mapping[str, float]
    tries: Sequence[TryLine]
    tuned: Mapping[str, Sequence[float]]
    done: Sequence[Done]
    counted: Collection[str]
    budget: str

    @property
    def final(self) -> list[Done]:
        return [result for result in self.done if result.run.name in self.counted]


def choose_tries(comparison: Comparison, tries: Sequence[Run], done: DoneRuns) -> dict[str, int]:
    """Number of the chosen try of each loss that has a try with a finite validation figure."""
    chosen = {
        loss: choose(
            {run.try_number: among([run], done) for run in tries if run.loss == loss}, comparison.task.main
        )
        for loss in comparison.losses
    }
    return {loss: number for loss, number in chosen.items() if number is not None}


def without_figure(comparison: Comparison, tries: Sequence[Run], done: DoneRuns) -> dict[str, str]:
    """Finished tries that cannot be chosen, by name: what they have for a validation figure, in words."""
    main = comparison.task.main
    return {
        result.run.name: f"{result.run.measure.validation.format(main)} is {result.figure(main, 'validation')}"
        for result in among(tries, done)
        if not math.isfinite(result.figure(main, "validation"))
    }


def judge_by_seeds(
    figures: Sequence[str], runs: Mapping[str, Mapping[int, Done]], *, baseline: str, level_within: float
) -> Judgement:
    """Compare the final runs of each loss, by seed; the spread between seeds is the only noise."""
    compared = {}
    for figure in figures:
        values = {loss: by_seed(done.values(), figure) for loss, done in runs.items()}
        compared[figure] = paired({loss: seeds for loss, seeds in values.items() if seeds}, baseline)
    return judge(compared, level_within=level_within)


def judge_by_queries(
    figures: Sequence[str], runs: Mapping[str, Mapping[int, Done]], *, baseline: str, level_within: float
) -> Judgement:
    """Compare losses by seeds and by queries; without the figures of each query, none is called better or worse."""
    files = {
        (loss, seed): one.run.folder / task_for(one.run).each
        for loss, of in runs.items()
        for seed, one in of.items()
    }
    if not files or not all(path.is_file() for path in files.values()):
        judged = judge_by_seeds(figures, runs, baseline=baseline, level_within=level_within)
        words = {
            figure: {
                loss: one._replace(word="cannot tell", why=MISSING)
                if one.word in ("better", "worse")
                else one
                for loss, one in of.items()
            }
            for figure, of in judged.judged.items()
        }
        return judged._replace(judged=words)
    content: dict[tuple[str, int], dict[str, Any]] = {}
    for key, path in files.items():
        with np.load(path, allow_pickle=False) as arrays:
            content[key] = dict(arrays)
    groups = [arrays["group"] for arrays in content.values()]
    if any(not np.array_equal(groups[0], other) for other in groups):
        raise ValueError("runs were judged on different queries: their figures do not compare")
    each = {
        figure: {loss: {seed: content[loss, seed][figure] for seed in of} for loss, of in runs.items() if of}
        for figure in figures
    }
    return judge_both(each, baseline=baseline, level_within=level_within, groups=groups[0])


def summarise(comparison: Comparison, tries: Sequence[Run], seeds: Sequence[Run], done: DoneRuns) -> Outcome:
    """Summarise the runs of a comparison that are done.

    ``seeds`` are the chosen tries with all seeds; their ``try_number`` is the number of the try.
    """
    main, losses = comparison.task.main, comparison.losses
    chosen = {run.loss: run.try_number for run in seeds}
    final = {run.name: Done(run, done[run.name].record) for run in seeds if run.name in done}
    every = {**{result.run.name: result for result in among(tries, done)}, **final}
    by_loss: dict[str, dict[int, Done]] = {loss: {} for loss in losses}
    for result in final.values():
        by_loss[result.run.loss][result.run.seed] = result
    judge_runs = judge_by_queries if comparison.task.each else judge_by_seeds
    judgement = judge_runs(
        [f for f in comparison.task.figures if any(by_seed(runs.values(), f) for runs in by_loss.values())],
        by_loss,
        baseline=comparison.baseline,
        level_within=comparison.level_within,
    )
    listed = [
        TryLine(
            loss,
            in_words(losses[loss][run.try_number]),
            losses[loss][run.try_number].get("loss.temperature"),
            done.get(run.name),
            chosen.get(loss) == run.try_number,
        )
        for loss in losses
        for run in tries
        if run.loss == loss
    ]
    lines = []
    for loss, of_loss in by_loss.items():
        runs = list(of_loss.values())
        values = {figure: by_seed(runs, figure) for figure in comparison.task.figures}
        lines.append(
            LossLine(
                loss,
                in_words(losses[loss][chosen[loss]]) if loss in chosen else "",
                sum(tried.done is not None for tried in listed if tried.loss == loss),
                {figure: t_interval(of.values()) for figure, of in values.items() if of},
                {figure: of[loss] for figure, of in judgement.judged.items() if loss in of},
                mean_of(result.crowded for result in runs),
                mean_of(result.seconds for result in runs),
                next((cost for result in runs if (cost := cost_of_run(result.run))), None),
            )
        )
    lines.sort(key=lambda line: -line.measured[main].mean if main in line.measured else math.inf)
    tuned: dict[str, list[tuple[float, float]]] = {}
    for tried in listed:
        both = tried.figure(main, "validation"), tried.figure(main)
        if all(map(math.isfinite, both)):
            tuned.setdefault(tried.loss, []).append(both)
    return Outcome(
        lines,
        judgement,
        reach(judgement),
        listed,
        {loss: best_of(figures) for loss, figures in tuned.items()},
        list(every.values()),
        final.keys(),
        budget({line.loss: line.tries for line in lines if line.tries}),
    )


def cost_of_run(run: Run) -> Cost | None:
    """The cost in the record of a run; None if it was not measured."""
    try:
        cost: Cost = read_record(run, RECORD)
    except FileNotFoundError:
        return None
    return cost


def best_of(tries: Sequence[tuple[float, float]]) -> list[float]:
    """Expected test figure of the best of k random tries by validation, for k from 1 to all of them.

    Args:
        tries: Validation and test figure of each.

    >>> best_of([(1.0, 10.0), (2.0, 30.0)])
    [20.0, 30.0]
    """
    ranked = [test for _, test in sorted(tries, key=lambda figures: -figures[0])]
    n = len(ranked)
    # The try of rank r is the best of k if the other k - 1 are among the n - 1 - r ranked behind it.
    return [
        sum(test * math.comb(n - 1 - rank, k - 1) for rank, test in enumerate(ranked)) / math.comb(n, k)
        for k in range(1, n + 1)
    ]
