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

import numpy as np
import yaml

from weince.files import write_text_aside
from weince.lab import settings
from weince.lab.configure import PRESETS, LossConfig, build_loss, find, unknown
from weince.lab.study.plan import flat
from weince.lab.study.tables import SEEDS, Loss, Table, check_seeds
from weince.lab.tasks.base import Task
from weince.lab.tasks.registry import task_of

KEPT = "comparison.yaml"

Tries = Sequence[Mapping[str, Any]]
"""Settings of a loss to choose among, by dotted name, the most promising first."""


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

    def tries_table(self) -> Table:
        """The tries of all losses, with the first seed."""
        epochs = {} if self.try_epochs is None else {"epochs": self.try_epochs}
        losses = {name: Loss(set={}, tries=tries) for name, tries in self.losses.items()}
        return self._table(losses, self.seeds[:1], {**self.set, **epochs})

    def seeds_table(self, chosen: Mapping[str, int]) -> Table:
        """The chosen try of each loss that has one, with all seeds.

        The chosen try is the only one in this table, so its number here is 0; `Sweep.seeds` restores the original.
        """
        losses = {name: Loss(set=self.losses[name][number]) for name, number in chosen.items()}
        return self._table(losses, self.seeds, self.set)

    def _table(self, losses: Mapping[str, Loss], seeds: Sequence[int], common: Mapping[str, Any]) -> Table:
        baseline = self.baseline if self.baseline in losses else next(iter(losses))
        return Table(
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


def tries_of(loss: str, config: str) -> list[dict[str, Any]]:
    """The whole search space of a loss as settings of runs, in its order.

    Args:
        loss: A preset, or your own loss, ``my_package:MyLoss``. Its class may have a ``search_space`` too; without
            one, the only try is its defaults.
        config: The configuration. Settings of the loss in it are no part of a try: what a try does not set gets its
            default. The task may define temperatures to try.
    """
    if loss not in PRESETS and ":" not in loss:
        known = [name for name in PRESETS if name != "link"]  # without lam and beta it has no tries
        raise ValueError(unknown("loss", loss, known) + ", or your own, my_package:MyLoss")
    maker = PRESETS[loss] if loss in PRESETS else find(loss, "loss")
    space: Sequence[Any] = getattr(maker, "search_space", ({},))
    listed = isinstance(space, Sequence) and not isinstance(space, str)
    wrong = [tried for tried in space if not isinstance(tried, Mapping)] if listed else [space]
    if wrong or not len(space):
        got = " ".join(repr(wrong[0]).split()) if wrong else "nothing"
        raise ValueError(
            f"search_space of {loss} must list arguments by name, ({{'temperature': 0.1}},); got {got}"
        )
    content = settings.load(config)
    space = at_temperatures(space, task_of(content).temperatures)
    if loss not in PRESETS:
        _check_own(loss, space)
    return [alone(_as_settings(loss, tried), content) for tried in space]


def _check_own(loss: str, space: Tries) -> None:
    """Make a loss of the user's own with every try now, not after hours of the baseline's runs."""
    for tried in space:
        given = {name.removeprefix("loss."): value for name, value in _as_settings(loss, tried).items()}
        try:
            build_loss(LossConfig(**given))
        except ValueError as error:
            raise ValueError(f"search_space of {loss}, {dict(tried)}: {error}") from None


def at_temperatures(space: Tries, temperatures: Sequence[float]) -> Tries:
    """A search space at other temperatures: all of them with the other options of its first try, then of the next.

    Without ``temperatures``, or if no try has a temperature, the space is returned unchanged.

    >>> at_temperatures([{"temperature": 0.5}, {"temperature": 0.5, "hardness": 2.0}], [0.05, 0.1])[1:3]
    [{'temperature': 0.1}, {'hardness': 2.0, 'temperature': 0.05}]
    """
    rests = [
        {key: value for key, value in tried.items() if key != "temperature"}
        for tried in space
        if "temperature" in tried
    ]
    if not temperatures or not rests:
        return space
    different = [rest for number, rest in enumerate(rests) if rest not in rests[:number]]
    return [{**rest, "temperature": temperature} for rest in different for temperature in temperatures]


def _as_settings(loss: str, tried: Mapping[str, Any]) -> dict[str, Any]:
    """A try as settings, spelled as in a table's file: a run is identified by that spelling."""
    # Lists for tuples, as comparison.yaml has them: a try that is read back must be the same try.
    options = {name: _plain(loss, name, value) for name, value in tried.items()}
    found: dict[str, Any] = {"loss.preset": loss}
    if "temperature" in options:
        found["loss.temperature"] = options.pop("temperature")
    return found | ({"loss.options": options} if options else {})


def _plain(loss: str, name: str, value: Any) -> Any:
    """A value of a search space as JSON has it; numbers of NumPy become numbers of Python."""
    try:
        return json.loads(json.dumps(value, default=_number_of_numpy))
    except (TypeError, ValueError):
        raise ValueError(
            f"search_space of {loss}: {name} must be a number, text, a list or names with values; "
            f"got {' '.join(repr(value).split())}"
        ) from None


def _number_of_numpy(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError


def alone(tried: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """A try that sets a loss completely: what it leaves out gets its default if the configuration sets it.

    Only then, so that a run is spelled the same with and without a default in its configuration. The engine stays as
    configured, since it does not change the figures.

    Args:
        tried: Settings of the loss, by dotted name.
        content: The configuration.

    >>> alone({"loss.preset": "dcl"}, {"loss": {"preset": "hcl", "options": {"hardness": 2.0}}})
    {'loss.preset': 'dcl', 'loss.options': {}}
    """
    configured, usual = content.get("loss"), settings.as_written(LossConfig())
    if not isinstance(configured, Mapping):
        return dict(tried)
    unset = {
        f"loss.{name}": usual[name]
        for name, value in configured.items()
        if name in usual and name not in ("preset", "engine") and value != usual[name]
    }
    return {**tried, **{name: value for name, value in unset.items() if name not in tried}}


def in_words(tried: Mapping[str, Any]) -> str:
    """A try in words, without the name of its loss.

    >>> in_words({"loss.preset": "mixture", "loss.temperature": 0.1, "loss.options": {"spread": 1.0}})
    'temperature 0.1, spread 1'
    """
    named = {name: value for name, value in set_in(tried).items() if name != "loss.preset"}
    said = [f"{name.rpartition('.')[2]} {_number(value)}" for name, value in named.items()]
    return ", ".join(said) or "its defaults"


def set_in(tried: Mapping[str, Any]) -> dict[str, Any]:
    """What a try sets, by dotted name; a default that `alone` added, None or no names, counts as not set."""
    return {name: value for name, value in flat(tried).items() if value is not None and value != {}}


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def recipe_config(config: str, recipe: str) -> str:
    """The configuration of a recipe: ``NAME`` itself for ``paper``, ``NAME_strong`` for ``strong``.

    Raises:
        ValueError: There is no such configuration.
    """
    if recipe == "paper":
        return config
    path = Path(config)
    chosen = str(path.with_stem(f"{path.stem}_{recipe}")) if path.is_file() else f"{config}_{recipe}"
    try:
        settings.load(chosen)
    except ValueError:
        raise ValueError(
            f"--recipe {recipe} wants the configuration {chosen}; got none of that name"
        ) from None
    return chosen


def joined(before: Comparison, now: Comparison) -> Comparison:
    """Merge the losses, tries and seeds of two comparisons of the same recipe.

    Raises:
        ValueError: Their recipes differ.
    """
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
        pairs = {name: own if isinstance(own, str) else json.dumps(own) for name, own in value.items()}
        return " ".join(f"{name}={own}" for name, own in pairs.items())
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
    """Read a ``comparison.yaml``.

    Raises:
        ValueError: The file is not a comparison.
    """
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
    found = sorted(out.glob(f"*/{KEPT}"))
    if len(found) > 1:
        names = ", ".join(path.parent.name for path in found)
        raise ValueError(f"{out} has several comparisons, say which by --config: {names}")
    return read_comparison(found[0]) if found else None
