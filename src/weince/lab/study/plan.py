"""Plan the runs of a table: rows x losses x tries x seeds.

The folder of a run depends only on its settings, so that tables share runs, and a changed setting makes another run.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

from weince.lab import settings
from weince.lab.configure import unknown
from weince.lab.study.table import RunTable, check_seeds
from weince.lab.tasks.base import Measure, Task
from weince.lab.tasks.registry import MEASURES, task_of

WHOLE = ("loss.options", "loss.tail")
"""Settings that hold names and values; a change replaces all of them, not only those that it names."""


@dataclass(frozen=True)
class Run:
    """One training and its measurement.

    Attributes:
        row: Name of the configuration.
        loss: Column of the table.
        try_number: Number of the try.
        seed: Seed of the run.
        config: Name or file of the configuration.
        changes: Settings that override the configuration, by dotted name.
        measured_by: A key of `MEASURES`.
        folder: Folder of the run.
        key: Hash of its settings.
        extra: Settings that do not change the result, such as the device.
    """

    row: str
    loss: str
    try_number: int
    seed: int
    config: str
    changes: Mapping[str, Any]
    measured_by: str
    folder: Path
    key: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run: its path below the folder of all runs."""
        return "/".join(self.folder.parts[-3:])

    @property
    def measure(self) -> Measure:
        """How the run is measured."""
        return MEASURES[self.measured_by]

    @property
    def result(self) -> Path:
        """The file that the measurement writes."""
        return self.folder / self.measure.file

    @property
    def command(self) -> str:
        """The command that trains the run by hand, with absolute paths shortened to file names."""
        named = {**self.changes, **self.extra, "seed": self.seed, "out": str(self.folder)}
        parts = ["--config", self.config]
        parts += [part for name, value in named.items() for part in (f"--{name}", shown(value))]
        short = (Path(part).name if Path(part).is_absolute() else part for part in parts)
        return shlex.join(["weince", "train", *short])


def shown(value: Any) -> str:
    """A setting as written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def plan(
    table: RunTable,
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    epochs: int | None = None,
    data: str | None = None,
    device: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[Run]:
    """The runs of a table, ordered by seed, so that the first seed of every try is done first.

    Args:
        table: The table to fill.
        out: Folder of all results; the runs are in ``out/runs``.
        seeds: Seeds instead of the table's.
        only: Keep the rows (``cifar100_resnet18``), cells (``cifar100_resnet18/InfoNCE``) or tries of a cell
            (``cifar100_resnet18/InfoNCE/temperature 0.1``) that match one of these names or patterns.
        epochs: Epochs instead of the configurations', for a trial.
        data: Where the data are: a path, or ``NAME=PATH,NAME=PATH``.
        device: Device instead of the configured one.
        extra: Further settings that do not change the results.
    """
    check_seeds(seeds or ())
    wanted = _matching(table, only)
    base = {row: flat(settings.load(row)) for row, *_ in wanted}
    asked = {} if epochs is None else {"epochs": epochs}
    without_effect = {**({"device": device} if device else {}), **(extra or {})}
    runs = []
    for seed in seeds or table.seeds:
        for row, loss, number, tried in wanted:
            changes = {**table.set, **table.losses[loss].set, **tried, **asked}
            name, key = _name_and_key(Path(row).stem, base[row], changes)
            folder = out.absolute() / "runs" / name / f"seed_{seed}"
            run = Run(Path(row).stem, loss, number, seed, row, changes, table.measure, folder, key)
            runs.append(replace(run, extra=without_effect))
    runs = _with_data(runs, data, base)
    for run in {run.key: run for run in runs}.values():
        _check(run)
    return runs


def _matching(table: RunTable, only: Sequence[str] | None) -> list[tuple[str, str, int, Mapping[str, Any]]]:
    """Row, loss, number and settings of every try that matches a pattern; every pattern must match something."""
    cells = [
        (row, loss, number, tried)
        for row in table.rows
        for loss in table.losses
        for number, tried in enumerate(table.tries_of(loss))
    ]
    if only is None:
        return cells
    names = [(Path(row).stem, loss, words(tried) or "as configured") for row, loss, _, tried in cells]
    fits = {
        pattern: [any(fnmatch("/".join(name[:parts]), pattern) for parts in (1, 2, 3)) for name in names]
        for pattern in only
    }
    for pattern, matches in fits.items():
        if not any(matches):
            known = ", ".join(dict.fromkeys(f"{row}/{loss}" for row, loss, _ in names))
            tries = ", ".join(dict.fromkeys(f"/{tried}" for *_, tried in names))
            raise ValueError(
                f"nothing in table {table.name} matches {pattern}; it has {known}, tried as {tries}"
            )
    return [cell for cell, *matches in zip(cells, *fits.values(), strict=True) if any(matches)]


def words(tried: Mapping[str, Any], text: Callable[[Any], str] = shown) -> str:
    """A try in words: the last part of each setting's name, and the text of its value.

    >>> words({"loss.temperature": 0.1, "loss.options": {"spread": 1.0}, "loss.lam": None})
    'temperature 0.1, spread 1.0, lam null'
    """
    return ", ".join(f"{name.split('.')[-1]} {text(value)}" for name, value in flat(tried).items())


def _name_and_key(row: str, base: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[str, str]:
    """Name without its seed, and key of a run.

    They do not depend on which settings are in the configuration and which in the table. Settings that do not change
    the weights, and the paths given by ``--data``, are not part of them.
    """
    task = task_of(base)
    # Data that a table or --set names make another run; a path given by --data does not.
    changed = {
        name: value for name, value in flat(changes).items() if name not in task.free or name in task.places
    }
    whole = tuple(f"{name}." for name in WHOLE if name in changes)
    kept = {k: value for k, value in base.items() if k not in task.free and not k.startswith(whole)}
    every = {**kept, **changed}
    every.pop("seed", None)
    key = hashlib.sha256(json.dumps(every, sort_keys=True).encode()).hexdigest()[:12]
    differs = {name: value for name, value in sorted(changed.items()) if base.get(name) != value}
    differs.pop("loss.preset", None)
    parts = [str(every.get("loss.preset", "loss"))]
    parts += [f"{name.split('.')[-1]}-{shown(value)}" for name, value in differs.items()]
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", "_".join(parts)).strip("-")[:80]
    return f"{row}/{slug}_{key[:6]}", key


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    by_name: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            by_name |= flat(value, f"{prefix}{name}.")
        else:
            by_name[prefix + name] = value
    return by_name


def _with_data(runs: Sequence[Run], data: str | None, base: Mapping[str, Mapping[str, Any]]) -> list[Run]:
    """The same runs, with the paths of their data."""
    names = [task_of(base[run.config]).data_names({**base[run.config], **run.changes}) for run in runs]
    paths = _data_paths(data, {name for of_run in names for name in of_run.values()})
    return [
        replace(
            run, extra={**run.extra, **{key: paths[name] for key, name in of_run.items() if name in paths}}
        )
        for run, of_run in zip(runs, names, strict=True)
    ]


def _data_paths(data: str | None, names: Collection[str]) -> dict[str, str]:
    """Parse ``data`` into a path for each name."""
    if not data:
        return {}
    if "=" not in data:
        if len(names) > 1:
            listed = ", ".join(sorted(names))
            raise ValueError(f"one path for {listed}: give NAME=PATH,NAME=PATH; got {data!r}")
        return dict.fromkeys(names, _absolute(data))
    paths = {}
    for part in data.split(","):
        name, _, path = part.partition("=")
        if name not in names:
            raise ValueError(unknown("data set", name, sorted(names)))
        if not path:  # as an unset shell variable gives; it would mean the current folder
            raise ValueError(f"want NAME=PATH,NAME=PATH; got {data!r} with no path for {name}")
        paths[name] = _absolute(path)
    return paths


def _absolute(place: str) -> str:
    """An existing path as an absolute one, for jobs that start in another folder; a name stays as it is."""
    return str(Path(place).absolute()) if Path(place).exists() else place


def _check(run: Run) -> None:
    """Check the settings of a run before anything is started."""
    for name in run.changes.keys() & {"seed", "out"}:  # the run's own would silently override it
        raise ValueError(
            f"{run.row}, {run.loss}: a table cannot set {name}: its seeds and the folders of its runs do"
        )
    try:
        settings_of(run)
    except ValueError as error:
        raise ValueError(f"{run.row}, {run.loss}: {error}") from None


def task_for(run: Run) -> Task:
    """The task of a run."""
    return task_of(settings.load(run.config))


def settings_of(run: Run) -> Any:
    """All settings of a run, from its configuration and its changes: an instance of its task's settings class."""
    content = deepcopy(settings.load(run.config))
    for name, value in {**run.changes, **run.extra}.items():
        _change(content, name, value)
    wanted = _built(task_of(content).settings, json.dumps(content))  # type: ignore[arg-type]
    return replace(wanted, seed=run.seed, out=run.folder)


def _change(content: dict[str, Any], name: str, value: Any) -> None:
    """Set ``a.b.c`` in nested settings."""
    if isinstance(value, Mapping) and name not in WHOLE:
        for part, inner in value.items():
            _change(content, f"{name}.{part}", inner)
        return
    *groups, last = name.split(".")
    for group in groups:
        content = content.setdefault(group, {})
    content[last] = value


@lru_cache(maxsize=1024)
def _built(kind: type[Any], content: str) -> Any:
    """Cached settings: a table asks for them repeatedly. ``content`` renews the cache if the file has changed."""
    return settings.build(kind, json.loads(content))


def epochs_of(run: Run) -> int:
    """Number of epochs of a run."""
    return int(settings_of(run).epochs)


def has_settings(run: Run, content: Mapping[str, Any]) -> bool:
    """Whether the content of a ``run.yaml`` belongs to this run; the place of the data may differ."""
    task, wanted = task_for(run), settings.as_written(settings_of(run))
    written = settings.recorded(content, task.settings)
    return task_of(content) is task and all(
        written[name] == wanted[name] for name in wanted.keys() - task.incidental
    )
