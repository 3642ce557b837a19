"""Summarise the records of runs for a page: figures of each loss, verdicts, gain from tuning, cost."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weince.intervals import Interval, t_interval
from weince.lab.study.advice import advise
from weince.lab.study.cost import RECORD, Cost
from weince.lab.study.grid import Comparison, in_words
from weince.lab.study.plan import Run, epochs_of
from weince.lab.study.records import read_record
from weince.lab.study.tables import MEASURES
from weince.lab.study.verdict import Judged, Verdict, judge, reach
from weince.lab.tasks.images.evaluation.protocol import budget


class Done(NamedTuple):
    """A run that is done.

    Attributes:
        run: The run; ``try_number`` is the number of its try.
        record: Its measured figures.
        epochs: Epochs that it trained.
        seconds: Seconds that it trained; NaN if it has no log.
        crowded: Share of crowded anchors in its last epoch; NaN if its log lacks it.
        course: The tracked figure during training, as far as its log has it.
        chosen: Whether it is a final run: the chosen try at full length.
    """

    run: Run
    record: Mapping[str, Any]
    epochs: int
    seconds: float
    crowded: float
    course: Sequence["Point"]
    chosen: bool

    def figure(self, name: str, kind: str = "test") -> float:
        """A figure on a scale to 100; NaN if the evaluation is older than the figure."""
        measure = MEASURES[self.run.measure]
        key = (measure.test if kind == "test" else measure.validation).format(name)
        value = self.record.get(key)
        return math.nan if value is None else float(value)


class Point(NamedTuple):
    """The tracked figure of a run, and the epochs and seconds of training before it was measured."""

    epoch: float
    seconds: float
    value: float


class Try(NamedTuple):
    """A try of a loss: its settings in words, its temperature, its run if done, and whether it was chosen."""

    loss: str
    words: str
    temperature: float | None
    done: Done | None
    chosen: bool


class Line(NamedTuple):
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
    judged: Mapping[str, Judged]
    crowded: float
    seconds: float
    cost: Cost | None


class Summary(NamedTuple):
    """Everything that the page, the CSV and the JSON file show.

    Attributes:
        lines: One line per loss, the best by the task's main figure first; losses without a final run last.
        verdict: All comparisons.
        smallest: The smallest difference that these seeds can show with 80 % power, by figure.
        tries: Tries of all losses, in their order.
        tuned: For each loss, the expected test figure of the best of k tries by validation, for k from 1.
        done: All runs that are done.
        missing: Runs that are not done, and losses of which no try can be chosen, in words.
        advice: What the reader should do, in two lines.
        budget: How many tries each loss had, in words.
    """

    lines: Sequence[Line]
    verdict: Verdict
    smallest: Mapping[str, float]
    tries: Sequence[Try]
    tuned: Mapping[str, Sequence[float]]
    done: Sequence[Done]
    missing: Sequence[str]
    advice: tuple[str, str]
    budget: str


def choose(
    comparison: Comparison, tries: Sequence[Run], records: Mapping[str, Mapping[str, Any]]
) -> dict[str, int]:
    """Number of the finished try with the best validation figure, for each loss that has a finished try.

    Args:
        comparison: What is compared.
        tries: Its tries. Those without a finite validation figure are left out.
        records: Records of the runs that are done, by name.
    """
    found = {}
    left_out = without_figure(comparison, tries, records)
    key = _choice_key(comparison)
    for loss in comparison.losses:
        figures = {
            run.try_number: records[run.name][key]
            for run in tries
            if run.loss == loss and run.name in records and run.name not in left_out
        }
        if figures:
            found[loss] = max(figures, key=figures.__getitem__)
    return found


def without_figure(
    comparison: Comparison, tries: Sequence[Run], records: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Finished tries that cannot be chosen, by name: what they have for a validation figure, in words."""
    key = _choice_key(comparison)
    values = {run.name: records[run.name].get(key) for run in tries if run.name in records}
    return {
        name: f"{key} is {value}"
        for name, value in values.items()
        if not isinstance(value, int | float) or not math.isfinite(value)
    }


def _choice_key(comparison: Comparison) -> str:
    return MEASURES[comparison.task.measure].validation.format(comparison.task.main)


def summarise(
    comparison: Comparison,
    tries: Sequence[Run],
    seeds: Sequence[Run],
    records: Mapping[str, Mapping[str, Any]],
    missing: Sequence[str],
    *,
    unchosen: Sequence[str] = (),
    failed: bool = False,
) -> Summary:
    """Summarise the runs that are done.

    Args:
        comparison: What is compared.
        tries: Its tries.
        seeds: The chosen tries with all seeds; ``try_number`` is the number of the try.
        records: Records of the runs that are done, by name.
        missing: Runs that are planned but not done, in words.
        unchosen: Losses of which no try can be chosen, in words.
        failed: Whether some runs have failed.
    """
    counted = {run.name for run in seeds}
    every = {run.name: run for run in (*tries, *seeds)}
    done = {
        name: _done(comparison, run, records[name], name in counted)
        for name, run in every.items()
        if name in records
    }
    chosen = {run.loss: run.try_number for run in seeds}
    by_loss = {
        loss: [done[run.name] for run in seeds if run.loss == loss and run.name in done]
        for loss in comparison.losses
    }
    figures = {
        figure: values
        for figure in comparison.task.figures
        if len(values := {loss: of for loss, runs in by_loss.items() if (of := _by_seed(runs, figure))}) > 0
    }
    verdict = judge(figures, baseline=comparison.baseline, level_within=comparison.level_within)
    listed = _tries(comparison, tries, done, chosen)
    lines = [
        _line(comparison, loss, chosen.get(loss), runs, verdict, listed) for loss, runs in by_loss.items()
    ]
    main = comparison.task.main
    lines.sort(key=lambda line: -line.measured[main].mean if main in line.measured else math.inf)
    smallest = reach(verdict)
    return Summary(
        lines,
        verdict,
        smallest,
        listed,
        _tuned(comparison, listed),
        list(done.values()),
        [*missing, *unchosen],
        advise(comparison, lines, verdict, smallest, missing, failed=failed),
        budget({line.loss: line.tries for line in lines if line.tries}),
    )


def _done(comparison: Comparison, run: Run, record: Mapping[str, Any], chosen: bool) -> Done:
    log = read_record(run, "log.csv")
    times = list(itertools.accumulate(row.get("seconds", math.nan) for row in log))
    column = comparison.task.column
    course = [
        Point(row["epoch"], seconds, row[column])
        for row, seconds in zip(log, times, strict=True)
        if column in row
    ]
    crowded = log[-1].get("crowded", math.nan) if log else math.nan
    return Done(run, record, epochs_of(run), times[-1] if times else math.nan, crowded, course, chosen)


def _tries(
    comparison: Comparison, tries: Sequence[Run], done: Mapping[str, Done], chosen: Mapping[str, int]
) -> list[Try]:
    """The tries of all losses; ``done`` has the finished runs by name, ``chosen`` a number for each loss."""
    return [
        Try(
            run.loss,
            in_words(comparison.losses[run.loss][run.try_number]),
            comparison.losses[run.loss][run.try_number].get("loss.temperature"),
            done.get(run.name),
            chosen.get(run.loss) == run.try_number,
        )
        for loss in comparison.losses
        for run in tries
        if run.loss == loss
    ]


def _tuned(comparison: Comparison, tries: Sequence[Try]) -> dict[str, list[float]]:
    """The gain from tuning: `best_of` the finished tries of each loss."""
    main = comparison.task.main
    figures = {
        loss: [(one.done.figure(main, "validation"), one.done.figure(main)) for one in tries
               if one.loss == loss and one.done]
        for loss in comparison.losses
    }  # fmt: skip
    known = {loss: [both for both in of if all(map(math.isfinite, both))] for loss, of in figures.items()}
    return {loss: best_of(of) for loss, of in known.items() if of}


def _by_seed(runs: Sequence[Done], figure: str) -> dict[int, float]:
    return {one.run.seed: value for one in runs if math.isfinite(value := one.figure(figure))}


def _line(
    comparison: Comparison,
    loss: str,
    chosen: int | None,
    runs: Sequence[Done],
    verdict: Verdict,
    tries: Sequence[Try],
) -> Line:
    measured = {
        f: t_interval(values.values()) for f in comparison.task.figures if (values := _by_seed(runs, f))
    }
    return Line(
        loss,
        "" if chosen is None else in_words(comparison.losses[loss][chosen]),
        sum(one.done is not None for one in tries if one.loss == loss),
        measured,
        {figure: of[loss] for figure, of in verdict.judged.items() if loss in of},
        _mean([one.crowded for one in runs]),
        _mean([one.seconds for one in runs]),
        next((cost for one in runs if (cost := cost_of_run(one.run))), None),
    )


def cost_of_run(run: Run) -> Cost | None:
    """The cost in the record of a run; None if it was not measured."""
    try:
        found: Cost = read_record(run, RECORD)
    except FileNotFoundError:
        return None
    return found


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return statistics.fmean(known) if known else math.nan


def best_of(tries: Sequence[tuple[float, float]]) -> list[float]:
    """Expected test figure of the best of k random tries by validation, for k from 1 to all of them.

    Args:
        tries: Validation and test figure of each.

    >>> best_of([(1.0, 10.0), (2.0, 30.0)])
    [20.0, 30.0]
    """
    ranked = [test for _, test in sorted(tries, key=lambda one: -one[0])]
    n = len(ranked)
    # The try of rank r is the best of k if the other k - 1 are among the n - 1 - r ranked behind it.
    return [
        sum(test * math.comb(n - 1 - rank, k - 1) for rank, test in enumerate(ranked)) / math.comb(n, k)
        for k in range(1, n + 1)
    ]


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
