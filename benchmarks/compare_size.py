"""How often `weince compare` calls equal losses better or worse, and how often it finds a true difference.

Simulates tables like those of the command: losses x seeds x figures. They are drawn from a normal distribution with
the standard deviations and correlations of our own records, and judged by the command's own code.

    python benchmarks/compare_size.py                      500 tables a line, about a minute; writes compare_size.md
    python benchmarks/compare_size.py --tables 50 --out .
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weince.files import write_text_aside
from weince.lab.study.differences import judge, paired
from weince.progress import bars

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "research" / "results" / "evidence" / "runs.jsonl"
FIGURES = ("linear", "r1", "knn")
SETTING = "cifar100_resnet18", 100
BASE = 53.8

Array = NDArray[np.float64]


def covariance(path: Path) -> tuple[Array, int]:
    """Covariance of the figures over the seeds of a configuration, pooled over all, and its degrees of freedom."""
    groups: dict[str, list[list[float]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        row, name, _ = record["run"].split("/")
        if (row, record["run.yaml"]["epochs"]) == SETTING and "evaluation.json" in record:
            values = [record["evaluation.json"][f"{figure}_test_mean"] for figure in FIGURES]
            groups.setdefault(name, []).append(values)
    squares, degrees = np.zeros((len(FIGURES), len(FIGURES))), 0
    for values in groups.values():
        centred = np.array(values) - np.mean(values, axis=0)
        squares += centred.T @ centred
        degrees += len(values) - 1
    return squares / degrees, degrees


def words(
    rng: np.random.Generator, spread: Array, losses: int, seeds: int, gain: float
) -> dict[str, dict[str, str]]:
    """The words of one simulated table, in which the first loss beats the baseline by ``gain`` in every figure."""
    drawn = BASE + rng.multivariate_normal(np.zeros(len(spread)), spread, size=(losses + 1, seeds))
    drawn[1] += gain
    figures = {
        figure: {str(loss): dict(enumerate(drawn[loss, :, place])) for loss in range(losses + 1)}
        for place, figure in enumerate(FIGURES)
    }
    compared = {figure: paired(values, "0") for figure, values in figures.items()}
    judged = judge(compared, level_within=0.5).judged
    return {figure: {loss: one.word for loss, one in of.items()} for figure, of in judged.items()}


def line(spread: Array, losses: int, seeds: int, gain: float, tables: int, seed: int) -> list[str]:
    """A row of the report."""
    rng = np.random.default_rng([seed, losses, seeds, round(10 * gain)])
    wrong = found = level = 0
    for _ in range(tables):
        table = words(rng, spread, losses, seeds, gain)
        others = [w for of in table.values() for loss, w in of.items() if loss != "1" or gain == 0]
        wrong += any(word in ("better", "worse") for word in others)
        found += table["linear"]["1"] == "better"
        level += table["linear"]["2"] == "level"
    return [
        f"{losses}", f"{seeds}", f"{gain:g}", share(wrong, tables), share(found, tables) if gain else "—",
        share(level, tables),
    ]  # fmt: skip


def share(count: int, of: int) -> str:
    """A share in percent with twice its standard error."""
    p = count / of
    return f"{100 * p:.1f} ± {200 * math.sqrt(p * (1 - p) / of):.1f}"


def report(spread: Array, degrees: int, rows: Sequence[Sequence[str]], tables: int) -> str:
    deviations = ", ".join(f"{figure} {math.sqrt(spread[k, k]):.2f}" for k, figure in enumerate(FIGURES))
    correlation = spread[0, 1] / math.sqrt(spread[0, 0] * spread[1, 1])
    head = (
        "losses",
        "seeds",
        "true gain of one loss",
        "wrong words, %",
        "found better, %",
        "level losses called level, %",
    )
    return "\n".join(
        [
            "# The words of `weince compare`: how often they are wrong, and how often they find something",
            "",
            f"{tables} simulated tables a line, three figures each ({', '.join(FIGURES)}). Standard deviation "
            f"between seeds as in our records of {SETTING[0]}, {SETTING[1]} epochs ({degrees} degrees of freedom): "
            f"{deviations}; correlation of linear and r1 {correlation:.2f}. ± is twice the standard error. Seeds "
            "share nothing here, which is the worst case for a paired test.",
            "",
            "Wrong words: tables in which any loss that is level with the baseline is called better or worse, in any "
            "figure, after Holm's correction over losses x figures. At most 5 % is promised. Found better: tables in "
            "which the loss that is truly better is called so by linear accuracy. The last column is of one level "
            "loss by linear accuracy, d = 0.5 points.",
            "",
            "| " + " | ".join(head) + " |",
            "|" + " ---: |" * len(head),
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            "Made by `python benchmarks/compare_size.py`.",
            "",
        ]
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=500, help="a line (default: %(default)s)")
    parser.add_argument("--records", type=Path, default=RECORDS, help="an archive of runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "research" / "results", help="folder to write into"
    )
    given = parser.parse_args(arguments)
    if given.tables < 2:
        parser.error(f"--tables must be at least 2; got {given.tables}")
    spread, degrees = covariance(given.records)
    wanted = [
        (8, 4, 0.0),
        (2, 4, 0.0),
        (8, 2, 0.0),
        (8, 4, 1.0),
        (4, 4, 1.0),
        (8, 8, 1.0),
        (8, 4, 2.0),
        (8, 8, 0.5),
    ]
    with bars() as bar:
        task = bar.add_task("tables", total=len(wanted))
        rows = []
        for losses, seeds, gain in wanted:
            rows.append(line(spread, losses, seeds, gain, given.tables, given.seed))
            bar.advance(task)
    text = report(spread, degrees, rows, given.tables)
    write_text_aside(given.out / "compare_size.md", text, "report")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
