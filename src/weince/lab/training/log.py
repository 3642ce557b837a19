"""What the logs of runs on images and on text share: reading a ``log.csv``, and what a loss learns."""

import csv
from pathlib import Path

from torch import nn


def read_log(path: Path) -> list[dict[str, float]]:
    """The rows of a ``log.csv``, without their empty cells; no rows if the file is missing.

    Raises:
        ValueError: It is not a log.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            cells = list(csv.DictReader(file))
        if any(None in row.values() for row in cells):
            raise ValueError("a row is incomplete")
        rows = [{name: float(value) for name, value in row.items() if value} for row in cells]
    except (ValueError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to go on without its rows") from None
    if any("epoch" not in row for row in rows):
        raise ValueError(f"{path} is damaged (no column epoch): remove it to go on without its rows")
    return rows


def learned(loss: nn.Module) -> dict[str, float]:
    """Single numbers that a loss learns, such as a temperature; the names cannot be those of other columns."""
    return {
        f"learned_{name}": value.item()
        for name, value in loss.named_parameters()
        if value.requires_grad and value.numel() == 1
    }
