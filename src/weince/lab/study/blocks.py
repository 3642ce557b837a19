"""What the pages of studies are made of: sections with tables, notes and figures; and tables as Markdown and CSV."""

import csv
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from weince.diagnose.html import templates
from weince.files import csv_text, write_aside, write_text_aside
from weince.intervals import Interval
from weince.lab.tasks.images.evaluation.protocol import PairedTest

if TYPE_CHECKING:
    from weince.diagnose.style import Figure


class PageCell(NamedTuple):
    """A cell of a table, with attributes for HTML."""

    text: str
    attributes: str = ""


@dataclass(frozen=True)
class Numbers:
    """A table of a page.

    Attributes:
        name: What it is, for screen readers.
        caption: Its caption; empty for none.
        header: Names of the columns.
        rows: The cells; the first of a row is its heading.
        numeric: Columns that are right-aligned.
        look: Class for the style sheet.
    """

    name: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[PageCell]]
    numeric: Collection[str]
    look: str = ""


def numbers(
    name: str,
    caption: str,
    header: Sequence[str],
    rows: Iterable[Iterable[str | PageCell]],
    numeric: Collection[str],
) -> Numbers:
    """A table whose cells are texts, or `PageCell`."""
    cells = [[cell if isinstance(cell, PageCell) else PageCell(cell) for cell in row] for row in rows]
    return Numbers(name, caption, header, cells, numeric)


@dataclass(frozen=True)
class PageSection:
    """A section of a page; what is empty is left out.

    Attributes:
        id: Its id, for links and styles.
        title: Its heading.
        intro: A paragraph before the tables.
        tables: Its tables.
        notes: A list after the tables.
        outro: A paragraph after the tables.
        figures: Figures, side by side, or below each other if they are ``broad``.
        facts: Names with values.
        folded: If not empty, the tables are folded behind this text.
    """

    id: str
    title: str = ""
    intro: str = ""
    tables: Sequence[Numbers] = ()
    notes: Sequence[str] = ()
    outro: str = ""
    figures: Sequence[tuple[str, str]] = ()
    broad: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)
    folded: str = ""


def drawn(figures: "Iterable[Figure]") -> list[tuple[str, str]]:
    """Figures as a page embeds them: SVG and caption."""
    return [(Markup(figure.svg), figure.caption) for figure in figures]


@dataclass(frozen=True)
class Document:
    """A page: its title, lines below the title with their classes, advice, and sections."""

    title: str
    header: Sequence[tuple[str, str]]
    sections: Sequence[PageSection]
    advice: Sequence[str] = ()

    def html(self) -> str:
        """The page: self-contained, without scripts, everything escaped."""
        return templates("weince.lab.study").get_template("study.html").render(page=self)


def write(path: Path, text: str) -> None:
    write_text_aside(path, text, "page")


def text_or_dash(mean: Interval | PairedTest | None, digits: int) -> str:
    """A mean, or a signed difference, with its interval; a dash for None."""
    return "—" if mean is None else mean.text(digits)


def number(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """A number, or a dash for NaN and None."""
    return "—" if value is None or math.isnan(value) else f"{scale * value:,.{digits}f}"


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def plain(text: str) -> str:
    """Text on one line, escaped for Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in " ".join(text.split()))


def markdown_table(
    header: Sequence[str], rows: Iterable[Iterable[str]], numeric: Collection[str]
) -> list[str]:
    """Lines of a Markdown table; the columns named in ``numeric`` are right-aligned."""
    rule = "|" + "".join(" ---: |" if name in numeric else " --- |" for name in header)
    first, *others = ("| " + " | ".join(map(plain, row)) + " |" for row in (header, *rows))
    return [first, rule, *others]


def markdown_list(lines: Iterable[str]) -> list[str]:
    return [f"- {plain(line)}" for line in lines]


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
