"""Write a comparison as files: an HTML page, ``compare.md``, ``compare.csv`` and ``compare.json``."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from weince.diagnose.html import templates
from weince.files import write_text_aside
from weince.intervals import half_text, p_text
from weince.lab.study.cost import Cost
from weince.lab.study.figures import draw
from weince.lab.study.grid import Comparison, in_words
from weince.lab.study.summary import Done, Line, Summary, capital
from weince.lab.study.table_page import markdown_table, plain, save_rows, text_or_dash
from weince.lab.study.verdict import Judged

SCHEMA = 1
"""Version of ``compare.json``; increased when a field is removed or changes its meaning."""


class Heat(NamedTuple):
    """Validation figures of tries by temperature, with a row for each loss that has a temperature.

    Attributes:
        temperatures: The columns.
        rows: A loss, and for each temperature the best figure, its shade from 0 to 1 and whether its try was chosen;
            None where no run is done.
    """

    temperatures: Sequence[float]
    rows: Sequence[tuple[str, Sequence[tuple[float, float, bool] | None]]]


def write_page(
    comparison: Comparison, summary: Summary, folder: Path, failed: Mapping[str, str], command: str
) -> Path:
    """Write ``compare.csv``, ``compare.json``, ``compare.md``, figures and ``index.html``; returns the last."""
    folder.mkdir(parents=True, exist_ok=True)
    facts, task = _facts(comparison, summary, command), comparison.task
    for old in (folder / "figures").glob("*.*g"):  # of an earlier call; it may not be drawn again
        old.unlink()
    figures = draw(comparison, summary, folder / "figures")
    _write_csv(folder / "compare.csv", summary)
    content = as_json(comparison, summary, facts, failed)
    write_text_aside(folder / "compare.json", json.dumps(content, indent=1) + "\n", "comparison")
    write_text_aside(folder / "compare.md", markdown(comparison, summary, facts, failed), "table")
    page = (
        templates("weince.lab.study")
        .get_template("compare.html")
        .render(
            comparison=comparison,
            summary=summary,
            facts=facts,
            failed=list(failed.values()),
            notes=_notes(comparison, summary),
            heat=heat(comparison, summary),
            figures=[(Markup(figure.svg), figure.caption) for figure in figures],
            shown=[f for f in task.figures if any(f in line.measured for line in summary.lines)],
            task=task,
            main=task.main,
            epochs=max((one.epochs for one in summary.done if one.chosen), default=0),
            seeds=_seeds,
            mean=_mean,
            against=_against,
            p=p_text,
            number=_number,
            capital=capital,
            costs=COSTS,
            places=sorted({_measured_on(line.cost) for line in summary.lines if line.cost}),
            measured_on=_measured_on,
            words=lambda one: in_words(comparison.losses[one.run.loss][one.run.try_number]),
        )
    )
    write_text_aside(folder / "index.html", page, "page")
    return folder / "index.html"


def _seeds(line: Line) -> int:
    return max((one.n for one in line.measured.values()), default=0)


def _mean(line: Line, figure: str) -> str:
    """A mean and its interval, and the number of seeds if the loss has more: older records may lack a figure."""
    found = line.measured.get(figure)
    fewer = f" (n = {found.n})" if found is not None and found.n != _seeds(line) else ""
    return f"{text_or_dash(found, 2)}{fewer}"


def _against(found: Judged | None) -> str:
    if found is None or math.isnan(found.difference):
        return "—"
    return f"{found.difference:+.2f}{half_text(found.half, 2)}"


def _number(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    return "—" if value is None or math.isnan(value) else f"{scale * value:,.{digits}f}"


def heat(comparison: Comparison, summary: Summary) -> Heat | None:
    """The heat map; None if no try has a temperature."""
    cells: dict[str, dict[float, tuple[float, bool]]] = {}
    for one in summary.tries:
        if one.temperature is None or one.done is None:
            continue
        value = one.done.figure(comparison.task.main, "validation")
        if not math.isfinite(value):
            continue
        row = cells.setdefault(one.loss, {})
        if one.temperature not in row or value > row[one.temperature][0]:
            row[one.temperature] = value, one.chosen
    values = [value for row in cells.values() for value, _ in row.values()]
    if not values:
        return None
    low, range_ = min(values), (max(values) - min(values)) or 1.0
    columns = sorted({temperature for row in cells.values() for temperature in row})
    rows = [
        (
            loss,
            [(row[t][0], (row[t][0] - low) / range_, row[t][1]) if t in row else None for t in columns],
        )
        for loss, row in cells.items()
    ]
    return Heat(columns, rows)


def _facts(comparison: Comparison, summary: Summary, command: str) -> dict[str, str]:
    records = [one.record for one in summary.done]

    def of(key: str) -> str:
        return "; ".join(sorted({str(record["made"][key]) for record in records}))

    length = sorted({one.epochs for one in summary.done if one.chosen})
    short = "" if comparison.try_epochs is None else f", each of {comparison.try_epochs} epochs"
    facts = {
        "configuration": comparison.name,
        "epochs": ", ".join(map(str, length)) or "nothing yet",
        "seeds": ", ".join(map(str, comparison.seeds)),
        "tuning budget": f"{summary.budget}{short}; seed {comparison.seeds[0]}",
        "chosen by": f"{comparison.task.validation}, never by a test figure",
        "data": "; ".join(sorted({f"{record['data']} {record['fingerprint']}" for record in records})),
        "hardware": of("hardware"),
        "commit": of("commit"),
        "command": command,
    }
    if comparison.set:
        facts["settings of all runs"] = ", ".join(f"{name} {value}" for name, value in comparison.set.items())
    return facts


def _notes(comparison: Comparison, summary: Summary) -> list[str]:
    verdict = summary.verdict
    means = "Figures are means over encoders, one per seed, ± half the width of a 95 % t-interval."
    if not verdict.comparisons:
        shared = any(one.n > 1 for of in verdict.judged.values() for one in of.values())
        why = (
            "all seeds show exactly the same differences, so they give no spread to judge by"
            if shared
            else f"that takes two seeds or more that {comparison.baseline} and another loss share"
        )
        return [means, f"No difference is tested here: {why}."]
    notes = [
        means,
        f"A difference is the mean over the seeds that a loss and {comparison.baseline} share. Its interval and "
        "p-value use one standard deviation, estimated from all losses as if it were the same for all.",
        f"better, worse: p is below 0.05 after Holm's correction for all {verdict.comparisons} comparisons here "
        "(losses x figures). If all losses were equal, the chance of any such word here would be at most 5 %.",
        f"level: the 95 % interval of the difference lies within ± {comparison.level_within:g} points, a difference "
        "that does not matter. cannot tell: neither better, worse nor level.",
    ]
    reach = [
        f"{smallest:.2f} in {comparison.task.figures[figure].words} ({verdict.spreads[figure].deviation:.2f})"
        for figure, smallest in summary.smallest.items()
    ]
    if reach:
        notes.append(
            f"In 8 of 10 cases these seeds find a true difference of {', '.join(reach)}; in brackets, the standard "
            "deviation of a difference. This holds at the strictest step of Holm's correction, the first."
        )
    return notes


def markdown(
    comparison: Comparison, summary: Summary, facts: Mapping[str, str], failed: Mapping[str, str]
) -> str:
    """The advice and the leaderboard in Markdown, small enough to keep beside the records."""
    figures = [f for f in comparison.task.figures if any(f in line.measured for line in summary.lines)]
    names = {figure: comparison.task.figures[figure].short for figure in figures}
    pairs = [column for figure in figures for column in (names[figure], f"{names[figure]}, difference")]
    rows = [
        [line.loss, line.words, str(_seeds(line))]
        + [cell for f in figures for cell in (_mean(line, f), _word(comparison, line, f))]
        for line in summary.lines
    ]
    parts = [f"# Which loss? {plain(comparison.name)}", "", *map(plain, summary.advice), ""]
    parts += markdown_table(["loss", "settings", "seeds", *pairs], rows, {"seeds", *names.values()})
    parts += ["", *(f"- {plain(note)}" for note in _notes(comparison, summary))]
    missing = [*summary.missing, *(f"failed: {why}" for why in failed.values())]
    parts += ["", "## What is missing", "", *(f"- {plain(line)}" for line in missing)] if missing else []
    main = comparison.task.main
    tries = [
        (
            one.loss,
            one.words,
            _number(one.done and one.done.figure(main, "validation")),
            "chosen" * one.chosen,
        )
        for one in summary.tries
    ]
    parts += ["", "## Every try", ""]
    parts += markdown_table(["loss", "settings", "validation", ""], tries, {"validation"})
    parts += _costs(summary)
    parts += ["", "## How it was made", "", *(f"- {name}: {plain(value)}" for name, value in facts.items())]
    return "\n".join(parts) + "\n"


COSTS = {
    "loss_ms": ("loss, ms", 2),
    "loss_mib": ("loss, peak MiB", 1),
    "step_ms": ("step, ms", 1),
    "step_mib": ("step, peak MiB", 0),
}
"""Column and digits of each figure of a cost."""


def _costs(summary: Summary) -> list[str]:
    """What each loss costs, in lines of Markdown; none if no loss was timed."""
    timed = [(line.loss, line.cost) for line in summary.lines if line.cost]
    if not timed:
        return []
    rows = [
        [loss] + [_number(cost[key], digits) for key, (_, digits) in COSTS.items()] + [_measured_on(cost)]
        for loss, cost in timed
    ]
    columns = [name for name, _ in COSTS.values()]
    table = markdown_table(["loss", *columns, "measured on"], rows, set(columns))
    return ["", "## What each loss costs", "", *table]


def _measured_on(cost: Cost) -> str:
    return f"{cost['hardware']}, {cost['batch']} pairs of width {cost['width']}"


def _word(comparison: Comparison, line: Line, figure: str) -> str:
    """A table cell with the difference of a loss, its number of pairs if that is not its seeds, and its verdict."""
    if line.loss == comparison.baseline:
        return "baseline"
    one = line.judged.get(figure)
    if one is None:
        return "—"
    fewer = f" (n = {one.n})" if one.n != line.measured[figure].n else ""
    return f"{_against(one)}{fewer}, {one.word}"


def as_json(
    comparison: Comparison, summary: Summary, facts: Mapping[str, str], failed: Mapping[str, str]
) -> dict[str, Any]:
    """The comparison for programs; docs/compare.md describes the fields."""
    verdict, main = summary.verdict, comparison.task.main
    return {
        "schema": SCHEMA,
        "advice": list(summary.advice),
        "baseline": comparison.baseline,
        "level_within": comparison.level_within,
        "facts": dict(facts),
        "comparisons": verdict.comparisons,
        "figures": {
            figure: {
                "deviation": spread.deviation,
                "degrees": spread.degrees,
                "smallest_difference": summary.smallest.get(figure),
            }
            for figure, spread in verdict.spreads.items()
        },
        "losses": [_line_as_json(line) for line in summary.lines],
        "tries": [
            {
                "loss": one.loss,
                "settings": one.words,
                "chosen": one.chosen,
                "run": one.done.run.name if one.done else None,
                "validation": _or_none(one.done.figure(main, "validation")) if one.done else None,
                "test": _or_none(one.done.figure(main)) if one.done else None,
            }
            for one in summary.tries
        ],
        "best_of": {loss: list(values) for loss, values in summary.tuned.items()},
        "runs": [_run_as_json(comparison, one) for one in summary.done],
        "missing": list(summary.missing),
        "failed": dict(failed),
    }


def _line_as_json(line: Line) -> dict[str, Any]:
    return {
        "loss": line.loss,
        "settings": line.words,
        "tries": line.tries,
        "crowded": _or_none(line.crowded),
        "train_seconds": _or_none(line.seconds),
        "cost": line.cost,
        "figures": {
            figure: {
                "mean": measured.mean,
                "half": _or_none(measured.half),
                "seeds": measured.n,
                **(_judged_as_json(line.judged[figure]) if figure in line.judged else {"word": "baseline"}),
            }
            for figure, measured in line.measured.items()
        },
    }


def _judged_as_json(one: Judged) -> dict[str, Any]:
    return {
        "word": one.word,
        "why": one.why,
        "difference": _or_none(one.difference),
        "difference_half": _or_none(one.half),
        "p": _or_none(one.p_value),
        "p_holm": _or_none(one.holm),
        "pairs": one.n,
    }


def _run_as_json(comparison: Comparison, one: Done) -> dict[str, Any]:
    main = comparison.task.main
    return {
        "run": one.run.name,
        "loss": one.run.loss,
        "settings": in_words(comparison.losses[one.run.loss][one.run.try_number]),
        "seed": one.run.seed,
        "epochs": one.epochs,
        "counts": one.chosen,
        **{f"{figure}_test": _or_none(one.figure(figure)) for figure in comparison.task.figures},
        f"{main}_validation": _or_none(one.figure(main, "validation")),
        "crowded": _or_none(one.crowded),
        "train_seconds": _or_none(one.seconds),
        "hardware": one.record["made"]["hardware"],
        "commit": one.record["made"]["commit"],
    }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_csv(path: Path, summary: Summary) -> None:
    """Write a row for each loss and figure."""
    header = [
        "loss", "settings", "tries", "figure", "mean", "half", "seeds", "word", "difference", "difference_half",
        "p", "p_holm", "pairs", "crowded", "loss_ms", "loss_mib", "step_ms", "step_mib", "cost_hardware",
    ]  # fmt: skip
    save_rows(path, header, _rows(summary.lines))


def _rows(lines: Iterable[Line]) -> list[list[Any]]:
    rows = []
    for line in lines:
        cost = line.cost or {}
        for figure, measured in line.measured.items():
            one = line.judged.get(figure)
            against = ["baseline", "", "", "", "", ""] if one is None else [one.word, *one[2:6], one.n]
            rows.append(
                [line.loss, line.words, line.tries, figure, *measured, *against, line.crowded]
                + [cost.get(key, "") for key in (*COSTS, "hardware")]
            )
    return rows
