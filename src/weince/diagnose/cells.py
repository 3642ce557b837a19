"""Tables for the page and for CSV files: a cell has a text to read and a value to compute with."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weince.files import csv_text
from weince.intervals import p_text

MINUS = "\N{MINUS SIGN}"
Value = str | int | float | tuple[float, float]


@dataclass(frozen=True)
class Cell:
    """What is shown, and what is written to the CSV file."""

    text: str
    value: Value

    @property
    def numeric(self) -> bool:
        """Whether the cell is aligned as a number."""
        return not isinstance(self.value, str)


@dataclass(frozen=True)
class NumberTable:
    """A table with a header row; the first column names the rows."""

    slug: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def write_csv(self, folder: Path) -> None:
        """Write ``slug.csv``; an interval is written as ``low..high`` in full precision."""
        with (folder / f"{self.slug}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(map(csv_text, self.header))
            writer.writerows([_raw(cell.value) for cell in row] for row in self.rows)


def _raw(value: Value) -> str:
    if isinstance(value, str):
        return csv_text(value)
    return f"{value[0]!r}..{value[1]!r}" if isinstance(value, tuple) else str(value)


def number(value: float, digits: int = 3) -> str:
    """A number to read: fixed decimals, a real minus sign, ∞ or —."""
    if np.isnan(value):
        return "—"
    if np.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    shown = f"{value:,.{digits}f}"
    if float(shown.replace(",", "")) == 0.0:
        shown = shown.replace("-", "")
    return shown.replace("-", MINUS)


def temperature(value: float, digits: int = 3) -> str:
    """A temperature to read: fixed decimals, but three significant digits below 0.01."""
    if not 0.0 < value < 0.01:
        return number(value, digits)
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def num(value: float, digits: int = 3) -> Cell:
    """A number with fixed decimals."""
    return Cell(number(float(value), digits), float(value))


def tau(value: float) -> Cell:
    """A temperature."""
    return Cell(temperature(float(value), 4), float(value))


def taus(interval: tuple[float, float]) -> Cell:
    """An interval of temperatures."""
    return between(interval, 4, temperature)


def count(value: int) -> Cell:
    """A whole number."""
    return Cell(f"{int(value):,}", int(value))


def text(value: str) -> Cell:
    """A text."""
    return Cell(value, value)


def between(
    interval: tuple[float, float], digits: int = 3, shown: Callable[[float, int], str] = number
) -> Cell:
    """An interval; ``shown`` makes text of its ends."""
    low, high = float(interval[0]), float(interval[1])
    if np.isnan(low) and np.isnan(high):
        return Cell("—", (low, high))
    return Cell(f"[{shown(low, digits)}, {shown(high, digits)}]", (low, high))


def p_value(p: float) -> Cell:
    """A p-value, never shown as 0."""
    return Cell(p_text(p), float(p))


def percent(share: float, digits: int = 1) -> Cell:
    """A share in percent."""
    shown = number(100.0 * float(share), digits)
    return Cell(shown if shown == "—" else f"{shown} %", float(share))


def by_model(
    slug: str, title: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell]]]
) -> NumberTable:
    """A table of quantities (rows) by models (columns)."""
    cells = tuple((text(label), *values) for label, values in rows)
    return NumberTable(slug, title, ("", *names), cells)
