"""Search for a training recipe by short runs: one change at a time, then combinations, then full length.

Reads factors and their levels from a YAML file (``recipe_search.yaml``). The first stage trains the base recipe (the
first level of each factor) and every recipe that differs from it in one level. The second trains the most promising
combinations of levels, by the sum of what each level gained alone. Later stages train the best recipes of the stage
before, for longer. Recipes are chosen only by the linear probe's validation figure.

Runs are those of ``weince reproduce``: each is trained and evaluated in its own processes, several at once, in a
folder named by its settings. The same command again continues an interrupted search. A run that would not end before
the deadline is not started. Writes under OUT: ``results.jsonl`` (a line for each finished run) and
``recipes_EPOCHS.yaml`` (a stage as a file for ``weince reproduce FILE --out OUT --table-only``, which writes its
table).
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from weince.files import write_text_aside
from weince.lab.settings import read_yaml
from weince.lab.study.clock import Clock
from weince.lab.study.local import run_here
from weince.lab.study.plan import Run, plan
from weince.lab.study.provenance import is_done, record
from weince.lab.study.table import RunTable, TableColumn

EXAMPLE = """\
example:
  python benchmarks/recipe_search.py benchmarks/recipe_search.yaml --data cifar100.npz --out recipes --jobs 6 \\
      --seconds 1000
  python benchmarks/recipe_search.py --show recipes
"""
FIGURE = "linear_validation_mean"
SHOWN = (FIGURE, "knn_validation_mean", "r1_validation_mean")

Recipe = tuple[str, ...]
"""A level of each factor, in the order of the factors."""


@dataclass(frozen=True)
class Search:
    """Content of a search's YAML file.

    Attributes:
        title: Title of its tables.
        config: The configuration that all recipes start from.
        factors: For each factor its levels, and the settings of each level; the first level is the base.
        stages: For each stage ``epochs``, and ``keep``: how many recipes it takes from the stage before.
        set: Settings of all runs.
        seed: Seed of all runs.
    """

    title: str
    config: str
    factors: Mapping[str, Mapping[str, Mapping[str, Any]]]
    stages: Sequence[Mapping[str, int]]
    set: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 7

    def settings(self, recipe: Recipe) -> dict[str, Any]:
        """The settings of a recipe, without its epochs."""
        found = dict(self.set)
        for level, levels in zip(recipe, self.factors.values(), strict=True):
            found |= levels[level]
        return found

    def name(self, recipe: Recipe) -> str:
        """The levels that differ from the base, in words."""
        changed = [
            f"{factor} {level}"
            for level, base, factor in zip(recipe, self.base(), self.factors, strict=True)
            if level != base
        ]
        return ", ".join(changed) or "base"

    def base(self) -> Recipe:
        return tuple(next(iter(levels)) for levels in self.factors.values())

    def single_changes(self) -> list[Recipe]:
        """The base, and every recipe that differs from it in one level."""
        base, found = self.base(), [self.base()]
        for place, levels in enumerate(self.factors.values()):
            found += [(*base[:place], level, *base[place + 1 :]) for level in list(levels)[1:]]
        return found

    def promising(self, figures: Mapping[Recipe, float], keep: int) -> list[Recipe]:
        """The combinations with the largest sum of what each level gained alone, of levels that have a figure."""
        base = self.base()
        gains = [
            {
                level: figures[recipe] - figures[base]
                for level in levels
                if (recipe := (*base[:place], level, *base[place + 1 :])) in figures
            }
            for place, levels in enumerate(self.factors.values())
        ]
        combinations = itertools.product(*gains)
        gain = {r: sum(g[level] for g, level in zip(gains, r, strict=True)) for r in combinations}
        return sorted(gain, key=lambda recipe: -gain[recipe])[:keep]


def read_search(path: Path) -> Search:
    return Search(**read_yaml(path, str(path)))


def stage_table(search: Search, recipes: Sequence[Recipe], epochs: int) -> RunTable:
    """The runs of a stage as a table of `weince reproduce`."""
    losses = {search.name(recipe): TableColumn(set=search.settings(recipe)) for recipe in recipes}
    return RunTable(
        name=f"recipes_{epochs}",
        title=f"{search.title}: {epochs} epochs, one seed, %",
        shows=f"This table shows how recipes of InfoNCE do after {epochs} epochs; the search chose among them by "
        "validation alone.",
        figures=["linear", "knn", "r1"],
        rows=[search.config],
        losses=losses,
        baseline=next(iter(losses)),
        set={"epochs": epochs},
        seeds=[search.seed],
    )


def write_table(table: RunTable, out: Path) -> None:
    """Write a table as a file that `weince reproduce` reads."""
    content = {
        "title": table.title,
        "shows": table.shows,
        "figures": table.figures,
        "rows": list(table.rows),
        "seeds": list(table.seeds),
        "set": dict(table.set),
        "baseline": table.baseline,
        "losses": {name: {"set": dict(loss.set)} for name, loss in table.losses.items()},
    }
    write_text_aside(out / f"{table.name}.yaml", yaml.safe_dump(content, sort_keys=False), "table")


def search_recipes(
    search: Search,
    out: Path,
    *,
    jobs: int,
    clock: Clock,
    data: str | None = None,
    device: str | None = None,
) -> dict[int, dict[Recipe, float]]:
    """Run the stages as far as time allows; returns the figures of each stage by its epochs."""
    out.mkdir(parents=True, exist_ok=True)
    every: dict[int, dict[Recipe, float]] = {}
    figures: dict[Recipe, float] = {}
    for number, stage in enumerate(search.stages):
        epochs = stage["epochs"]
        if number == 0:
            recipes = search.single_changes()
        elif number == 1:
            recipes = search.promising(figures, stage["keep"])
        else:
            recipes = sorted(figures, key=lambda recipe: -figures[recipe])[: stage["keep"]]
        table = stage_table(search, recipes, epochs)
        write_table(table, out)
        runs = plan(table, out, data=data, device=device)
        # Runs are short, so a checkpoint every 25 epochs is enough.
        runs = [replace(run, extra={**run.extra, "checkpoint_every": 25}) for run in runs]
        by_name = {search.name(recipe): recipe for recipe in recipes}
        _say(f"stage of {epochs} epochs: {len(runs)} runs, {clock.left():.0f} s left")
        found = carry_out_stage(runs, epochs, out, jobs=jobs, clock=clock)
        figures = {by_name[name]: figure for name, figure in found.items()}
        every[epochs] = figures
        if len(found) < len(runs):
            _say(f"{len(runs) - len(found)} of {len(runs)} runs are missing")
        if not figures or (number == 0 and search.base() not in figures):
            break
    return every


def carry_out_stage(
    runs: Sequence[Run], epochs: int, out: Path, *, jobs: int, clock: Clock
) -> dict[str, float]:
    """Train and evaluate runs; returns the figure of each finished run, by the name of its recipe."""
    waiting = [run for run in runs if not is_done(run)]
    found = {run.loss: _record(run, epochs, out, 0.0) for run in runs if run not in waiting}
    began: dict[str, float] = {}

    def tell(run: Run, what: str) -> None:
        if what == "started":
            began[run.loss] = time.monotonic()
        elif what == "done":
            took = time.monotonic() - began[run.loss]
            found[run.loss] = _record(run, epochs, out, took)
            _say(f"{found[run.loss]:.2f} in {took:.0f} s, {clock.left():.0f} s left: {run.loss}")
        else:
            _say(f"{what}: {run.loss}")

    if waiting:
        for why in run_here(waiting, jobs=jobs, tell=tell, clock=clock).values():
            _say(why)
    return found


def _record(run: Run, epochs: int, out: Path, took: float) -> float:
    """Add a finished run to the results unless they have it; returns the figure to choose by."""
    measured = record(run)
    path = out / "results.jsonl"
    if run.key not in {line["key"] for line in read_results(path)}:
        line = {
            "recipe": run.loss,
            "epochs": epochs,
            "key": run.key,
            "seconds": round(took, 1),
            **{name: measured[name] for name in SHOWN},
            "settings": dict(run.changes),
            "folder": str(run.folder.relative_to(out.absolute())),
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps(line) + "\n"
            )  # one write: only the last line can be incomplete for a reader
    return float(measured[FIGURE])


def read_results(path: Path) -> list[dict[str, Any]]:
    """The complete lines of the results; an incomplete last line is skipped."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def show(results: Iterable[Mapping[str, Any]]) -> str:
    """A Markdown table for each stage, the best recipe first."""
    parts = []
    by_epochs = sorted(results, key=lambda line: (line["epochs"], -line[FIGURE]))
    for epochs, lines in itertools.groupby(by_epochs, key=lambda line: line["epochs"]):
        parts += [
            f"\n{epochs} epochs, validation, %\n",
            "| linear | vote | R@1 | s | recipe |",
            "|---:|---:|---:|---:|---|",
        ]
        for line in lines:
            figures = " | ".join(f"{line[name]:.2f}" for name in SHOWN)
            parts.append(f"| {figures} | {line['seconds']:.0f} | {line['recipe']} |")
    return "\n".join(parts)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("search", type=Path, nargs="?", help="YAML file")
    parser.add_argument("--out", type=Path, default=Path("recipes"))
    parser.add_argument("--data", help="where the images are")
    parser.add_argument("--device", help="cpu or cuda instead of what is there")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="until the deadline")
    parser.add_argument(
        "--overhead", type=float, default=60.0, help="first guess: seconds of a run besides its epochs"
    )
    parser.add_argument(
        "--epoch", type=float, default=1.3, help="first guess: seconds of the device for an epoch"
    )
    parser.add_argument(
        "--show", type=Path, metavar="OUT", help="print the results in a folder and start nothing"
    )
    given = parser.parse_args(arguments)
    if given.show is None:
        if given.search is None:
            parser.error("a search's YAML file is wanted, or --show OUT")
        search_recipes(
            read_search(given.search),
            given.out,
            jobs=given.jobs,
            clock=Clock(given.seconds, given.overhead, given.epoch),
            data=given.data,
            device=given.device,
        )
    print(show(read_results((given.show or given.out) / "results.jsonl")))


if __name__ == "__main__":
    main(sys.argv[1:])
