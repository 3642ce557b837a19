"""The definition of a comparison: losses with their tries, one recipe, seeds. It is saved as ``comparison.yaml``.

Every loss class has a ``search_space``, an ordered list of tries; a comparison takes the same number from each.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from weince.files import write_text_aside
from weince.lab import settings
from weince.lab.configure import unknown
from weince.lab.study.search_space import Tries
from weince.lab.study.table import SEEDS, RunTable, TableColumn, check_seeds
from weince.lab.tasks.base import Task
from weince.lab.tasks.registry import task_of

KEPT = "comparison.yaml"


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how.

    Attributes:
        config: The configuration that all runs share, except for the loss: a name or a file.
        losses: The tries of each loss.
        baseline: The loss that the others are compared with, seed by seed.
        seeds: Seeds of the final runs; the tries use the first.
        try_epochs: Epochs of a try; None for as many as the final runs have.
        set: Settings that override the configuration in all runs.
        level_within: Largest difference, in points, that does not matter.
    """

    config: str
    losses: Mapping[str, Tries]
    baseline: str
    seeds: Sequence[int] = SEEDS
    try_epochs: int | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    level_within: float = 0.5

    def __post_init__(self) -> None:
        if self.baseline not in self.losses:
            raise ValueError(unknown("baseline", self.baseline, self.losses))
        if not 0 < self.level_within < math.inf:
            raise ValueError(f"--level-within must be above 0 points and finite; got {self.level_within}")
        check_seeds(self.seeds)
        if self.try_epochs is not None and self.try_epochs < 1:
            raise ValueError(f"--try-epochs must be at least 1; got {self.try_epochs}")
        owned = [name for name in self.set if name.partition(".")[0] in ("loss", "seed", "out")]
        if owned:
            raise ValueError(f"--set is for the recipe that all losses share; got {owned[0]}")

    @property
    def name(self) -> str:
        """Name of the configuration, and of the folder that holds the page."""
        return Path(self.config).stem

    @cached_property
    def task(self) -> Task:
        """The task of the configuration, which determines the figures."""
        return task_of(settings.load(self.config))

    def tries_table(self) -> RunTable:
        """The tries of all losses, with the first seed."""
        epochs = {} if self.try_epochs is None else {"epochs": self.try_epochs}
        losses = {name: TableColumn(set={}, tries=tries) for name, tries in self.losses.items()}
        return self._table(losses, self.seeds[:1], {**self.set, **epochs})

    def seeds_table(self, chosen: Mapping[str, int]) -> RunTable:
        """The chosen try of each loss that has one, with all seeds; its number in this table is 0."""
        losses = {name: TableColumn(set=self.losses[name][number]) for name, number in chosen.items()}
        return self._table(losses, self.seeds, self.set)

    def _table(
        self, losses: Mapping[str, TableColumn], seeds: Sequence[int], common: Mapping[str, Any]
    ) -> RunTable:
        baseline = self.baseline if self.baseline in losses else next(iter(losses))
        return RunTable(
            name=self.name,
            title=f"Losses on {self.name}",
            figures=tuple(self.task.figures),
            rows=[self.config],
            losses=losses,
            baseline=baseline,
            measure=self.task.measure,
            choose_by=self.task.main,
            set=common,
            seeds=seeds,
        )


def recipe_config(config: str, recipe: str) -> str:
    """The configuration of a recipe: ``NAME`` itself for ``paper``, ``NAME_strong`` for ``strong``."""
    if recipe == "paper":
        return config
    path = Path(config)
    chosen = str(path.with_stem(f"{path.stem}_{recipe}")) if path.is_file() else f"{config}_{recipe}"
    try:
        settings.load(chosen)
    except ValueError:
        raise ValueError(
            f"--recipe {recipe} wants the configuration {chosen}, which does not exist"
        ) from None
    return chosen


def joined(before: Comparison, now: Comparison) -> Comparison:
    """Merge the losses, tries and seeds of two comparisons, whose recipes must be the same."""
    for what in ("config", "set", "try_epochs"):
        had, wants = getattr(before, what), getattr(now, what)
        if had != wants:
            raise ValueError(
                f"--{what.replace('_', '-')} must be {_said(had) or 'left out'}, as in the comparison that is there; "
                f"got {_said(wants) or 'none'}: for another recipe choose another --out"
            )
    losses = {**before.losses, **now.losses}
    for name in before.losses.keys() & now.losses.keys():
        first, second = sorted((before.losses[name], now.losses[name]), key=len, reverse=True)
        losses[name] = [*first, *(tried for tried in second if tried not in first)]
    return replace(now, losses=losses, seeds=list(dict.fromkeys([*before.seeds, *now.seeds])))


def _said(value: Any) -> str:
    """The value of an option as a user gives it; empty if it was not given."""
    if isinstance(value, Mapping):
        pairs = {name: text if isinstance(text, str) else json.dumps(text) for name, text in value.items()}
        return " ".join(f"{name}={text}" for name, text in pairs.items())
    return "" if value is None else str(value)


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Save a comparison in the folder of its page."""
    content = asdict(comparison)
    content["losses"] = {name: [dict(tried) for tried in tries] for name, tries in comparison.losses.items()}
    content |= {"seeds": list(comparison.seeds), "set": dict(comparison.set)}
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)
    write_text_aside(folder / KEPT, text, "comparison")


def read_comparison(path: Path) -> Comparison:
    """Read a ``comparison.yaml``."""
    content = settings.read_yaml(path, str(path))
    names = {item.name for item in fields(Comparison)}
    if not isinstance(content, dict) or content.keys() != names:
        raise ValueError(
            f"{path} is not a comparison; wanted the keys {', '.join(sorted(names))}; "
            f"got {', '.join(map(str, content)) if isinstance(content, dict) else repr(content)}"
        )
    for name, kind in _KINDS.items():
        if not isinstance(content[name], kind):
            raise ValueError(f"{path} is not a comparison; {name} cannot be {content[name]!r}")
    try:
        return Comparison(**content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


_KINDS: dict[str, Any] = {
    "config": str,
    "losses": dict,
    "baseline": str,
    "seeds": list,
    "try_epochs": int | None,
    "set": dict,
    "level_within": int | float,
}


def find_comparison(out: Path, config: str | None) -> Comparison | None:
    """The comparison of a configuration in ``out``, or the only one if ``config`` is None; None if there is none."""
    if config is not None:
        path = out / Path(config).stem / KEPT
        return read_comparison(path) if path.is_file() else None
    paths = sorted(out.glob(f"*/{KEPT}"))
    if len(paths) > 1:
        names = ", ".join(path.parent.name for path in paths)
        raise ValueError(f"{out} has several comparisons, say which by --config: {names}")
    return read_comparison(paths[0]) if paths else None
