"""Write a table as files: CSV for programs, Markdown for a repository, one HTML page to look at."""

import csv
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from weince.diagnose.html import templates
from weince.files import csv_text, write_aside, write_text_aside
from weince.intervals import Interval, p_text
from weince.lab.study.aggregate import Line, Summary
from weince.lab.study.plan import Run
from weince.lab.study.tables import MEASURES
from weince.lab.tasks.images.evaluation.knn import RECALLS
from weince.lab.tasks.images.evaluation.protocol import PairedTest, pooled_spread

if TYPE_CHECKING:
    from weince.lab.study.curves import Picture

NAMES = {
    "linear": "Linear probe, %",
    "knn": "Weighted vote of the 50 nearest neighbours, %",
    **{f"r{k}": f"Recall at {k}, %" for k in RECALLS},
    "map_r": "MAP@R, %",
    "stsb": "Spearman on STS-B, x 100",
    "sts": "Mean Spearman of the STS tasks, x 100",
    "link_lam": "Weight of the shortfall in the blended link",
    "link_gain": "Held-out gain of the blended link over softmax, nats an anchor",
    "link_ratio": "exp of that gain",
    "frechet_lam_w": "Weight of the shortfall",
    "frechet_gain_w": "Gain of the shortfall over softmax, nats an anchor",
    "frechet_gain_f": "Gain of the heavy-tail coordinate over softmax, nats an anchor",
    "frechet_gain_wf": "Gain of both over the shortfall alone, nats an anchor",
    "frechet_lam_f": "Weight of the heavy-tail coordinate in the joint fit",
    "loss_ms": "Loss stage, forward and backward, ms",
}
HEADER = (
    "row",
    "loss",
    "settings",
    "reported",
    "measured",
    "n",
    "validation",
    "against the baseline",
    "p",
)
NUMERIC = {"reported", "measured", "n", "validation", "against the baseline", "p"}
AS_IS = "as configured"
SPREAD = (
    "Each standard deviation below is pooled over the configurations with two seeds or more, as if it were the same "
    "for all and seeds were independent. What follows from it is not corrected for the number of comparisons."
)
PERCENT = MEASURES["evaluation"].figures


@dataclass(frozen=True)
class Page:
    """Everything that the files show.

    Attributes:
        title: Title of the table.
        opening: What it shows, in one sentence.
        baseline: The loss that the others are compared with.
        summary: The lines.
        facts: What a reader must know, by name: runs done, tuning budget, data, hardware, command, commit.
        failed: Why runs failed.
        notes: How to read the lines.
        warning: A warning above the first figure; empty for none.
        pictures: Figures, each also written as a file.
    """

    title: str
    opening: str
    baseline: str
    summary: Summary
    facts: Mapping[str, str]
    failed: Sequence[str] = ()
    notes: Sequence[str] = ()
    pictures: "Sequence[Picture]" = ()
    warning: str = ""


def write_page(page: Page, folder: Path, runs: Iterable[tuple[Run, Mapping[str, Any]]] = ()) -> Path:
    """Write three CSV files, figures, ``table.md`` and ``index.html``; returns the last."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in page.pictures:
        _write(folder / f"{picture.name}.svg", picture.svg)
    _write_csv(folder / "table.csv", page.summary.chosen, page.facts)
    _write_csv(folder / "tries.csv", page.summary.tries, page.facts)
    _write_runs(folder / "runs.csv", runs)
    _write(folder / "table.md", markdown(page))
    _write(folder / "index.html", html(page))
    return folder / "index.html"


def _write(path: Path, text: str) -> None:
    write_text_aside(path, text, "table")


def cells(line: Line) -> tuple[str, ...]:
    """A line as text, in the order of `HEADER`."""
    digits = 2 if line.figure in PERCENT else 3
    n = f"{line.measured.n if line.measured else 0}"
    return (
        line.row,
        line.loss,
        line.tried or AS_IS,
        text_or_dash(line.reported, digits),
        text_or_dash(line.measured, digits),
        n if n == str(line.planned) else f"{n} of {line.planned}",
        "—" if math.isnan(line.validation) else f"{line.validation:.2f}",
        f"{text_or_dash(line.against, digits)}{_fewer_pairs(line)}",
        p_value(line.against),
    )


def _fewer_pairs(line: Line) -> str:
    """Number of pairs of a difference, if it is not the line's number of encoders; else empty."""
    if line.against is None or line.measured is None or line.against.n == line.measured.n:
        return ""
    return f" (n = {line.against.n})"


def text_or_dash(found: Interval | PairedTest | None, digits: int) -> str:
    """A mean, or a signed difference, with its interval; a dash for None."""
    return "—" if found is None else found.text(digits)


def p_value(found: PairedTest | None) -> str:
    """A p-value, never shown as 0; a dash for None."""
    return "—" if found is None else p_text(found.p_value)


def reading_notes(summary: Summary, choose_by: str) -> list[str]:
    """Notes on how to read the lines of a table; ``choose_by`` is the figure that decided between tries, if any."""
    notes = [
        "Measured: mean over encoders (one per seed) ± half width of its 95 % t-interval; n is the number of "
        "encoders."
    ]
    if choose_by:
        notes.append(
            f"The settings of each loss are those with the best mean validation figure of {choose_by} over the seeds "
            "that all of its tries have; test figures decide nothing. The column validation shows that figure in "
            "every table."
        )
    against = [line.against for line in summary.chosen if line.against]
    if against:
        tested = any(math.isfinite(one.p_value) for one in against)
        notes.append(
            "Against the baseline: paired over the seeds that both have"
            + (
                ", two-sided t-test; p is not corrected for the number of comparisons."
                if tested
                else "; they allow no test."
            )
        )
    return notes + spread_notes(summary)


def spread_notes(summary: Summary) -> list[str]:
    """Notes on the spread between seeds, pooled over configurations: one interval over few seeds is unreliable."""
    groups: dict[tuple[str, str], list[Interval]] = {}
    for line in summary.tries:
        measured = groups.setdefault((line.figure, line.row), [])
        # Two columns may share their runs; count those once.
        if line.measured is not None and line.measured.n > 1 and line.measured not in measured:
            measured.append(line.measured)
    notes = []
    for (figure, row), measured in groups.items():
        spread = pooled_spread(measured)
        if spread is None or len(measured) == 1 or spread.deviation == 0.0:
            continue
        digits = 2 if figure in PERCENT else 3
        halves = {n: spread.half(n) for n in sorted({one.n for one in measured})}
        known = "; ".join(
            f"with {n} seeds, a mean is known to ± {half:.{digits}f}, and a difference of two means below "
            f"{math.sqrt(2) * half:.{digits}f} is not significant at 5 %"
            for n, half in halves.items()
        )
        notes.append(
            f"{NAMES.get(figure, figure)}, {row}: the standard deviation between seeds is "
            f"{spread.deviation:.{digits}f} ({len(measured)} configurations, {spread.degrees} degrees of freedom); "
            f"{known}."
        )
    return [SPREAD, *notes] if notes else []


class Drawn(NamedTuple):
    """The lines of one figure as text."""

    name: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def by_figure(lines: Iterable[Line]) -> list[Drawn]:
    """A table for each figure, without empty columns."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for line in lines:
        found.setdefault(NAMES.get(line.figure, line.figure), []).append(cells(line))
    drawn = []
    for name, rows in found.items():
        kept = [i for i in range(len(HEADER)) if any(row[i] != "—" for row in rows)]
        drawn.append(
            Drawn(name, tuple(HEADER[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows))
        )
    return drawn


def narrow(table: Drawn) -> Drawn:
    """A table for a small screen, without redundant columns.

    If all lines share one row, the heading names it instead. The settings are left out if every line has its loss as
    configured.
    """
    every = dict(zip(table.header, zip(*table.rows, strict=True), strict=True))
    rows, tried = set(every["row"]), set(every["settings"])
    left_out = {name for name, alone in (("row", len(rows) == 1), ("settings", tried == {AS_IS})) if alone}
    kept = [i for i, name in enumerate(table.header) if name not in left_out]
    return Drawn(
        f"{table.name}, {rows.pop()}" if len(rows) == 1 else table.name,
        tuple(table.header[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in table.rows),
    )


def markdown(page: Page) -> str:
    """The table in Markdown."""
    parts = [f"# {plain(page.title)}", "", plain(page.opening), ""]
    if page.warning:
        parts += [f"**{plain(page.warning)}**", ""]
    for table in by_figure(page.summary.chosen):
        parts += [f"## {plain(table.name)}", "", *_rows(table), ""]
    parts += [*map(plain, page.notes), ""]
    if page.pictures:
        parts += ["## How the runs went", "", "Drawn in index.html:", ""]
        parts += [f"- {plain(picture.name)}: {plain(picture.caption)}" for picture in page.pictures]
        parts += [""]
    parts += ["## How it was made", ""]
    parts += [f"- {name}: {plain(value)}" for name, value in page.facts.items()]
    if page.failed:
        parts += ["", "## Runs that failed", "", *(f"- {plain(line)}" for line in page.failed)]
    if page.summary.tries != page.summary.chosen:
        parts += ["", "## Every try"]
        for table in by_figure(page.summary.tries):
            parts += ["", f"### {plain(table.name)}", "", *_rows(table)]
    return "\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Text on one line, escaped for Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in " ".join(text.split()))


def _rows(table: Drawn) -> list[str]:
    return markdown_table(table.header, table.rows, NUMERIC)


def markdown_table(
    header: Sequence[str], rows: Iterable[Iterable[str]], numeric: Collection[str]
) -> list[str]:
    """Lines of a Markdown table; the columns named in ``numeric`` are right-aligned."""
    rule = "|" + "".join(" ---: |" if name in numeric else " --- |" for name in header)
    return [_row(header), rule, *map(_row, rows)]


def _row(row: Iterable[str]) -> str:
    return "| " + " | ".join(plain(cell) for cell in row) + " |"


def html(page: Page) -> str:
    """The HTML page: self-contained, without scripts, everything escaped."""
    return (
        templates("weince.lab.study")
        .get_template("table.html")
        .render(
            page=page,
            numeric=NUMERIC,
            chosen=[narrow(table) for table in by_figure(page.summary.chosen)],
            tries=[narrow(table) for table in by_figure(page.summary.tries)]
            if page.summary.tries != page.summary.chosen
            else (),
            drawn=[(Markup(picture.in_page), picture.caption) for picture in page.pictures],
        )
    )


def _write_csv(path: Path, lines: Iterable[Line], facts: Mapping[str, str]) -> None:
    """Write a row per line in full precision; the last columns are the facts that hold for all of them."""
    common = {
        name: facts[name] for name in ("tuning budget", "hardware", "commit", "command") if name in facts
    }
    header = [
        "figure", "row", "loss", "tried", "reported", "reported_half", "measured", "half", "n", "planned",
        "validation", "difference", "difference_half", "p_value", "pairs",
        *(name.replace(" ", "_") for name in common),
    ]  # fmt: skip
    rows = [
        [
            line.figure, line.row, line.loss, line.tried,
            *(line.reported[:2] if line.reported else ("", "")),
            *(line.measured if line.measured else ("", "", 0)),
            line.planned, line.validation,
            *(line.against if line.against else ("", "", "", "")),
            *common.values(),
        ]
        for line in lines
    ]  # fmt: skip
    save_rows(path, header, rows)


def _write_runs(path: Path, runs: Iterable[tuple[Run, Mapping[str, Any]]]) -> None:
    """Write a row per run: every measured number, and the hardware, commit and command."""
    rows = []
    for run, record in runs:
        made = record["made"]
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float | str) and k != "made"}
        rows.append(
            {"row": run.row, "loss": run.loss, "trial": run.try_number, "seed": run.seed, **numbers, **made}
        )
    header = list(dict.fromkeys(name for row in rows for name in row))
    save_rows(path, header, [[row.get(name, "") for name in header] for row in rows])


def save_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write rows as CSV, NaN as an empty cell."""

    def save(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([[_cell(value) for value in row] for row in (header, *rows)])

    write_aside(path, save, "table")


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return csv_text(value)
    return "" if value != value else value
