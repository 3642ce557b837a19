"""A comparison for programs, as ``compare.json`` and ``compare.csv``; docs/compare.md describes the fields."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weince.lab.study.blocks import save_rows
from weince.lab.study.comparison import Comparison
from weince.lab.study.search_space import in_words
from weince.lab.study.statistics import Done, LossLine, Outcome

SCHEMA = 1
"""Version of ``compare.json``; increased when a field is removed or changes its meaning."""

JUDGED = "word", "why", "difference", "difference_half", "p", "p_holm", "pairs"
COLUMNS = (
    "loss", "settings", "tries", "figure", "mean", "half", "seeds", "word", "difference", "difference_half", "p",
    "p_holm", "pairs", "crowded", "loss_ms", "loss_mib", "step_ms", "step_mib", "cost_hardware",
)  # fmt: skip


def as_json(comparison: Comparison, outcome: Outcome) -> dict[str, Any]:
    """The figures of a comparison: all of ``compare.json`` but its words."""
    main, judgement = comparison.task.main, outcome.judgement

    def settings(result: Done) -> str:
        return in_words(comparison.losses[result.run.loss][result.run.try_number])

    content = {
        "schema": SCHEMA,
        "advice": [],  # before the figures, for who reads the file
        "baseline": comparison.baseline,
        "level_within": comparison.level_within,
        "facts": {},
        "comparisons": judgement.comparisons,
        "figures": {
            figure: {**spread._asdict(), "smallest_difference": outcome.smallest.get(figure)}
            for figure, spread in judgement.spreads.items()
        },
        "losses": [_of_loss(line) for line in outcome.lines],
        "tries": [
            {
                "loss": tried.loss,
                "settings": tried.words,
                "chosen": tried.chosen,
                "run": tried.done.run.name if tried.done else None,
                "validation": tried.figure(main, "validation"),
                "test": tried.figure(main),
            }
            for tried in outcome.tries
        ],
        "best_of": outcome.tuned,
        "runs": [
            {
                "run": result.run.name,
                "loss": result.run.loss,
                "settings": settings(result),
                "seed": result.run.seed,
                "epochs": result.epochs,
                "counts": result.run.name in outcome.counted,
                **{f"{figure}_test": result.figure(figure) for figure in comparison.task.figures},
                f"{main}_validation": result.figure(main, "validation"),
                "crowded": result.crowded,
                "train_seconds": result.seconds,
                "hardware": result.record["made"]["hardware"],
                "commit": result.record["made"]["commit"],
            }
            for result in outcome.done
        ],
    }
    finite: dict[str, Any] = _finite(content)
    return finite


def _of_loss(line: LossLine) -> dict[str, Any]:
    figures: dict[str, dict[str, Any]] = {
        figure: {"mean": mean.mean, "half": mean.half, "seeds": mean.n}
        | (
            dict(zip(JUDGED, line.judged[figure], strict=True))
            if figure in line.judged
            else {"word": "baseline"}
        )
        for figure, mean in line.measured.items()
    }
    return {
        "loss": line.loss,
        "settings": line.words,
        "tries": line.tries,
        "crowded": line.crowded,
        "train_seconds": line.seconds,
        "cost": line.cost,
        "figures": figures,
    }


def _finite(value: Any) -> Any:
    """Content for JSON, which has no NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_csv(path: Path, losses: Iterable[Mapping[str, Any]]) -> None:
    """Write a row for each loss and figure."""
    rows = []
    for line in losses:
        cost = line["cost"] or {}
        for figure, of_figure in line["figures"].items():
            cells = {**line, **cost, "cost_hardware": cost.get("hardware"), **of_figure, "figure": figure}
            rows.append(["" if (cell := cells.get(name)) is None else cell for name in COLUMNS])
    save_rows(path, COLUMNS, rows)
