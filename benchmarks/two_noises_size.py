"""How often does a comparison over seeds and queries use a wrong word, and how often does it see a gain?

    python benchmarks/two_noises_size.py --write

Tables are simulated: five losses and a baseline, each with its seeds, on queries in groups. Figures of a query are 0
to 100, like nDCG@10; a loss has a part of its own in each group and each query (which a new sample of queries would
draw anew), each seed a part of its own, and each run noise. Level losses differ by nothing but these. A table is
wrong if it calls any of them better or worse. Gains: one loss is truly better by so many points.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weince.lab.study.two_noises import judge_both

SEEDS = (7, 21, 63, 84)
FIGURE = Path(__file__).parents[1] / "research" / "results" / "two_noises_size.md"


class World(NamedTuple):
    """Standard deviations, in points, of what makes a figure."""

    seed: float  # of a run's mean
    group: float  # of a loss in a group of queries
    query: float  # of a loss in a query
    run: float  # of a run in a query


WORLDS = {
    # Two fine-tuned encoders differ by 8.8 points in a query (standard deviation, measured on package descriptions).
    "fine-tuned encoders": World(0.05, 2.0, 5.5, 4.4),
    "seeds dominate": World(0.5, 0.5, 2.0, 2.0),
    "queries dominate": World(0.02, 8.0, 15.0, 2.0),
}


def table(
    rng: np.random.Generator, world: World, losses: int, seeds: Sequence[int], queries: int, gain: float
) -> tuple[dict[str, dict[int, np.ndarray]], np.ndarray]:
    """A simulated table, and the groups of its queries; the last loss is better by ``gain``."""
    groups = rng.integers(0, max(2, queries // 4), queries)
    base = rng.normal(70, 25, queries)
    each: dict[str, dict[int, np.ndarray]] = {}
    for number in range(losses + 1):
        own = rng.normal(0, world.group, queries)[groups] + rng.normal(0, world.query, queries)
        up = gain if number == losses else 0.0
        each[f"loss {number}"] = {
            seed: base + own + up + rng.normal(0, world.seed) + rng.normal(0, world.run, queries)
            for seed in seeds
        }
    return each, groups


def shares(
    world: World,
    *,
    tables: int,
    losses: int = 5,
    seeds: int = 4,
    queries: int = 20_000,
    gain: float = 0.0,
    draws: int = 500,
    seed: int = 0,
) -> tuple[float, float]:
    """Share of tables with a wrong word about level losses, and share that call the gain better."""
    wrong = seen = 0
    for number in range(tables):
        rng = np.random.default_rng([seed, number])
        each, groups = table(rng, world, losses, SEEDS[:seeds], queries, gain)
        judged = judge_both(
            {"ndcg": each}, baseline="loss 0", level_within=0.01, groups=groups, draws=draws
        ).judged["ndcg"]
        level = [name for name in judged if not (gain and name == f"loss {losses}")]
        wrong += any(judged[name].word in ("better", "worse") for name in level)
        seen += judged[f"loss {losses}"].word == "better"
    return wrong / tables, seen / tables


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tables", type=int, default=400, help="simulated tables a row (default: %(default)s)"
    )
    parser.add_argument("--write", action="store_true", help=f"write {FIGURE.name} in research/results")
    options = parser.parse_args()
    lines = [
        "# Words about level losses, and gains that are seen",
        "",
        f"{options.tables} simulated tables a row: five losses, a baseline, groups of four queries on average; see "
        "`benchmarks/two_noises_size.py`.",
        "",
        "| noise | seeds | queries | gain | tables with a wrong word | gain called better |",
        "|---|---|---|---|---|---|",
    ]
    for name, world in WORLDS.items():
        for seeds, queries, gain in ((4, 500, 0.0), (2, 2_000, 0.0), (4, 5_000, 0.0), (4, 5_000, 0.3)):
            lines.append(row(name, world, options.tables, seeds, queries, gain))
    lines.append(
        row(
            "fine-tuned encoders", WORLDS["fine-tuned encoders"], max(20, options.tables // 4), 4, 20_000, 0.3
        )
    )
    text = "\n".join(lines) + "\n"
    if options.write:
        FIGURE.write_text(text, encoding="utf-8")


def row(name: str, world: World, tables: int, seeds: int, queries: int, gain: float) -> str:
    wrong, seen = shares(world, tables=tables, seeds=seeds, queries=queries, gain=gain)
    line = f"| {name} | {seeds} | {queries:,} | {gain:g} | {wrong:.1%} | {f'{seen:.0%}' if gain else '—'} |"
    print(line, flush=True)
    return line


if __name__ == "__main__":
    main()
