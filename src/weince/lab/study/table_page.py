"""Write a table as files: CSV for programs, Markdown for a repository, one HTML page to look at."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weince.intervals import Interval, p_text
from weince.lab.study.blocks import (
    Document,
    Numbers,
    PageSection,
    drawn,
    markdown_list,
    markdown_table,
    numbers,
    plain,
    save_rows,
    text_or_dash,
    write,
)
from weince.lab.study.statistics import Done, TableLine, TableLines
from weince.lab.tasks.images.evaluation.protocol import pooled_spread
from weince.lab.tasks.registry import MEASURES

HEADINGS = {
    "loss_ms": "Loss stage, forward and backward, ms",
    **{figure: heading for measure in MEASURES.values() for figure, heading in measure.figures.items()},
}
HEADER = "row", "loss", "settings", "reported", "measured", "n", "validation", "against the baseline", "p"
NUMERIC = set(HEADER[3:])
AS_IS = "as configured"
SPREAD = (
    "Each standard deviation below is pooled over the configurations with two seeds or more, as if it were the same "
    "for all and seeds were independent. What follows from it is not corrected for the number of comparisons."
)

if TYPE_CHECKING:
    from weince.diagnose.style import Figure


@dataclass(frozen=True)
class TablePage:
    """Everything that the files of a table show.

    Attributes:
        title: Title of the table.
        opening: What it shows, in one sentence.
        baseline: The loss that the others are compared with.
        lines: The lines.
        facts: What a reader must know, by name: runs done, tuning budget, data, hardware, command, commit.
        failed: Why runs failed.
        notes: How to read the lines.
        figures: Figures, which are files already.
        warning: A warning above the first figure; empty for none.
    """

    title: str
    opening: str
    baseline: str
    lines: TableLines
    facts: Mapping[str, str]
    failed: Sequence[str] = ()
    notes: Sequence[str] = ()
    figures: "Sequence[Figure]" = ()
    warning: str = ""


def write_table(page: TablePage, folder: Path, done: Iterable[Done] = ()) -> Path:
    """Write three CSV files, ``table.md`` and ``index.html``; returns the last."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_lines(folder / "table.csv", page.lines.chosen, page.facts)
    _save_lines(folder / "tries.csv", page.lines.tries, page.facts)
    _save_runs(folder / "runs.csv", done)
    write(folder / "table.md", markdown(page))
    write(folder / "index.html", document(page).html())
    return folder / "index.html"


def cells(line: TableLine) -> tuple[str, ...]:
    """A line as text, in the order of `HEADER`."""
    n = line.measured.n if line.measured else 0
    pairs = f" (n = {line.against.n})" if line.against and line.measured and line.against.n != n else ""
    return (
        line.row,
        line.loss,
        line.tried or AS_IS,
        text_or_dash(line.reported, line.digits),
        text_or_dash(line.measured, line.digits),
        f"{n}" if n == line.planned else f"{n} of {line.planned}",
        "—" if math.isnan(line.validation) else f"{line.validation:.2f}",
        text_or_dash(line.against, line.digits) + pairs,
        "—" if line.against is None else p_text(line.against.p_value),
    )


def reading_notes(lines: TableLines, choose_by: str) -> list[str]:
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
    against = [line.against for line in lines.chosen if line.against]
    if against:
        tested = any(math.isfinite(test.p_value) for test in against)
        test = ", two-sided t-test; p is not corrected for the number of comparisons."
        notes.append(
            "Against the baseline: paired over the seeds that both have"
            + (test if tested else "; they allow no test.")
        )
    return notes + spread_notes(lines)


def spread_notes(lines: TableLines) -> list[str]:
    """Notes on the spread between seeds, pooled over configurations: one interval over few seeds is unreliable."""
    groups: dict[tuple[str, str], list[Interval]] = {}
    digits = {line.figure: line.digits for line in lines.tries}
    for line in lines.tries:
        measured = groups.setdefault((line.figure, line.row), [])
        # Two columns may share their runs; count those once.
        if line.measured is not None and line.measured.n > 1 and line.measured not in measured:
            measured.append(line.measured)
    notes = []
    for (figure, row), measured in groups.items():
        spread, d = pooled_spread(measured), digits[figure]
        if spread is None or len(measured) == 1 or spread.deviation == 0.0:
            continue
        halves = {n: spread.half(n) for n in sorted({mean.n for mean in measured})}
        known = "; ".join(
            f"with {n} seeds, a mean is known to ± {half:.{d}f}, and a difference of two means below "
            f"{math.sqrt(2) * half:.{d}f} is not significant at 5 %"
            for n, half in halves.items()
        )
        notes.append(
            f"{HEADINGS[figure]}, {row}: the standard deviation between seeds is {spread.deviation:.{d}f} "
            f"({len(measured)} configurations, {spread.degrees} degrees of freedom); {known}."
        )
    return [SPREAD, *notes] if notes else []


def by_figure(lines: Iterable[TableLine]) -> list[Numbers]:
    """A table for each figure, without empty columns."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for line in lines:
        groups.setdefault(HEADINGS[line.figure], []).append(cells(line))
    tables = []
    for name, rows in groups.items():
        kept = [i for i in range(len(HEADER)) if any(row[i] != "—" for row in rows)]
        tables.append(_of_columns(name, HEADER, rows, kept))
    return tables


def _of_columns(
    name: str, header: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int]
) -> Numbers:
    short = [[row[i] for i in kept] for row in rows]
    return numbers(name, name, [header[i] for i in kept], short, NUMERIC)


def narrow(table: Numbers) -> Numbers:
    """A table for a small screen, without redundant columns.

    If all lines share one row, the heading names it instead. The settings are left out if every line has its loss as
    configured.
    """
    rows = [[cell.text for cell in row] for row in table.rows]
    columns = dict(zip(table.header, zip(*rows, strict=True), strict=True))
    one_row = len(set(columns["row"])) == 1
    left_out = {"row"} if one_row else set()
    if set(columns["settings"]) == {AS_IS}:
        left_out.add("settings")
    kept = [i for i, name in enumerate(table.header) if name not in left_out]
    name = f"{table.name}, {columns['row'][0]}" if one_row else table.name
    return _of_columns(name, table.header, rows, kept)


def markdown(page: TablePage) -> str:
    """The table in Markdown."""

    def table_lines(table: Numbers) -> list[str]:
        return markdown_table(table.header, ([cell.text for cell in row] for row in table.rows), NUMERIC)

    parts = [f"# {plain(page.title)}", "", plain(page.opening), ""]
    parts += [f"**{plain(page.warning)}**", ""] if page.warning else []
    for table in by_figure(page.lines.chosen):
        parts += [f"## {plain(table.name)}", "", *table_lines(table), ""]
    parts += [*map(plain, page.notes), ""]
    if page.figures:
        listed = [f"{figure.slug}: {figure.caption}" for figure in page.figures]
        parts += ["## How the runs went", "", "Drawn in index.html:", "", *markdown_list(listed), ""]
    parts += ["## How it was made", "", *(f"- {name}: {plain(value)}" for name, value in page.facts.items())]
    if page.failed:
        parts += ["", "## Runs that failed", "", *markdown_list(page.failed)]
    if page.lines.tries != page.lines.chosen:
        parts += ["", "## Every try"]
        for table in by_figure(page.lines.tries):
            parts += ["", f"### {plain(table.name)}", "", *table_lines(table)]
    return "\n".join(parts) + "\n"


def document(page: TablePage) -> Document:
    """The HTML page."""
    chosen, tries = ([narrow(t) for t in by_figure(lines)] for lines in page.lines)
    reported = any(line.reported for line in page.lines.chosen)
    baseline = f"The baseline is {page.baseline}."
    header = [
        ("", page.opening),
        ("warning", page.warning),
        ("soft", f"Reported by the paper, and measured here. {baseline}" if reported else baseline),
    ]
    beside = (
        "The paper's figure stands beside the first try of each loss, which has the paper's own settings."
    )
    several = page.lines.tries != page.lines.chosen
    intro = beside if any(line.reported for line in page.lines.tries) else ""
    sections = [
        PageSection("table", tables=chosen, notes=page.notes),
        PageSection("drawn", "How the runs went", figures=drawn(page.figures), broad=True)
        if page.figures
        else None,
        PageSection("failed", "Runs that failed", notes=page.failed) if page.failed else None,
        PageSection("made", "How it was made", facts=page.facts),
        PageSection("tries", "Every try", intro=intro, tables=tries) if several else None,
    ]
    shown = [line for line in header if line[1]]
    return Document(page.title, shown, [section for section in sections if section])


def _save_lines(path: Path, lines: Iterable[TableLine], facts: Mapping[str, str]) -> None:
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


def _save_runs(path: Path, done: Iterable[Done]) -> None:
    """Write a row per run: every measured number, and the hardware, commit and command."""
    rows = []
    for result in done:
        run, signed = result.run, result.record["made"]
        figures = {k: v for k, v in result.record.items() if isinstance(v, int | float | str)}
        rows.append(
            {"row": run.row, "loss": run.loss, "trial": run.try_number, "seed": run.seed, **figures, **signed}
        )
    header = list(dict.fromkeys(name for row in rows for name in row))
    save_rows(path, header, [[row.get(name, "") for name in header] for row in rows])
