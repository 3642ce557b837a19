"""Plan the runs that fill a table: rows x losses x tries x seeds.

The folder of a run depends only on its settings, so that tables share runs, and a changed setting makes another run.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

from weince.lab import settings
from weince.lab.configure import unknown
from weince.lab.study.tables import MEASURES, Table, check_seeds
from weince.lab.tasks.base import Task
from weince.lab.tasks.registry import task_of
from weince.machine import find_device

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
        config: Value of ``--config``.
        changes: Settings that override the configuration, by dotted name.
        measure: A key of `MEASURES`.
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
    measure: str
    folder: Path
    key: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run: its path below the folder of all runs."""
        return "/".join(self.folder.parts[-3:])

    @property
    def result(self) -> Path:
        """The file that the measurement writes."""
        return self.folder / MEASURES[self.measure].file

    def arguments(self) -> list[str]:
        """The options of ``weince train`` for this run."""
        given = {**self.changes, **self.extra, "seed": self.seed, "out": str(self.folder)}
        options = [part for name, value in given.items() for part in (f"--{name}", shown(value))]
        return ["--config", self.config, *options]


def shown(value: Any) -> str:
    """A setting as written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def plan(
    table: Table,
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
        data: Where the images are: a path for all rows, or ``cifar100=PATH,cifar10=PATH``; for runs on text,
            ``text=PATH,sts=PATH,model=PATH``.
        device: ``cpu``, ``cuda`` or ``mps`` instead of the configured device.
        extra: Further settings that do not change the results.

    Raises:
        ValueError: A configuration, setting or pattern is unknown.
    """
    check_seeds(seeds or ())
    kept = _asked_for(table, only)
    base = {row: flat(settings.load(row)) for row, *_ in kept}
    asked = {} if epochs is None else {"epochs": epochs}
    apart = {**({"device": device} if device else {}), **(extra or {})}
    runs = []
    for seed in seeds or table.seeds:
        for row, loss, number, tried in kept:
            changes = {**table.set, **table.losses[loss].set, **tried, **asked}
            folder, key = _place(out.absolute() / "runs", Path(row).stem, base[row], changes, seed)
            run = Run(Path(row).stem, loss, number, seed, row, changes, table.measure, folder, key, apart)
            runs.append(run)
    runs = _with_data(runs, data, base)
    for run in {run.key: run for run in runs}.values():
        _check(run)
    return runs


def _asked_for(table: Table, only: Sequence[str] | None) -> list[tuple[str, str, int, Mapping[str, Any]]]:
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
    fits = {pattern: [_fits(*name, pattern) for name in names] for pattern in only}
    for pattern, found in fits.items():
        if not any(found):
            known = ", ".join(dict.fromkeys(f"{row}/{loss}" for row, loss, _ in names))
            tries = ", ".join(dict.fromkeys(f"/{tried}" for *_, tried in names))
            raise ValueError(
                f"nothing in table {table.name} matches {pattern}; it has {known}, tried as {tries}"
            )
    return [cell for cell, *found in zip(cells, *fits.values(), strict=True) if any(found)]


def _fits(row: str, loss: str, tried: str, pattern: str) -> bool:
    """Whether a pattern matches the row, its cell or its try."""
    names = (row, f"{row}/{loss}", f"{row}/{loss}/{tried}")
    return any(fnmatch(name, pattern) for name in names)


def words(tried: Mapping[str, Any]) -> str:
    """A try in words: the last part of each setting's name, and its value."""
    return ", ".join(f"{name.split('.')[-1]} {shown(value)}" for name, value in tried.items())


def _place(
    root: Path, row: str, base: Mapping[str, Any], changes: Mapping[str, Any], seed: int
) -> tuple[Path, str]:
    """Folder and key of a run. They do not depend on which settings are in the configuration and which in the table.

    Settings that do not change the weights, and the paths given by ``--data``, are not part of them.
    """
    task = task_of(base)
    free = task.free
    # Data that a table or --set names make another run; a path given by --data does not.
    changed = {
        name: value for name, value in flat(changes).items() if name not in free or name in task.places
    }
    whole = tuple(f"{name}." for name in WHOLE if name in changes)
    kept = {name: value for name, value in base.items() if name not in free and not name.startswith(whole)}
    every = {**kept, **changed}
    every.pop("seed", None)
    key = hashlib.sha256(json.dumps(every, sort_keys=True).encode()).hexdigest()[:12]
    differs = {name: value for name, value in sorted(changed.items()) if base.get(name) != value}
    differs.pop("loss.preset", None)
    parts = [str(every.get("loss.preset", "loss"))]
    parts += [f"{name.split('.')[-1]}-{shown(value)}" for name, value in differs.items()]
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", "_".join(parts)).strip("-")[:80]
    return root / row / f"{slug}_{key[:6]}" / f"seed_{seed}", key


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= (
            flat(value, f"{prefix}{name}.")
            if isinstance(value, Mapping) and value
            else {prefix + name: value}
        )
    return found


def _with_data(runs: Sequence[Run], data: str | None, base: Mapping[str, Mapping[str, Any]]) -> list[Run]:
    """The runs with the places of their data added."""
    named = [task_of(base[run.config]).data_names({**base[run.config], **run.changes}) for run in runs]
    places = _places(data, {name for names in named for name in names.values()})
    return [
        replace(
            run, extra={**run.extra, **{key: places[name] for key, name in names.items() if name in places}}
        )
        for run, names in zip(runs, named, strict=True)
    ]


def _places(data: str | None, names: Collection[str]) -> dict[str, str]:
    """Parse ``data`` into a path for each name."""
    if not data:
        return {}
    if "=" not in data:
        if len(names) > 1:
            raise ValueError(
                f"one path for {', '.join(sorted(names))}: give NAME=PATH,NAME=PATH; got {data!r}"
            )
        return dict.fromkeys(names, _absolute(data))
    found = {}
    for part in data.split(","):
        name, _, place = part.partition("=")
        if name not in names:
            raise ValueError(unknown("data set", name, sorted(names)))
        if not place:  # as an unset shell variable gives; it would mean the current folder
            raise ValueError(f"want NAME=PATH,NAME=PATH; got {data!r} with no path for {name}")
        found[name] = _absolute(place)
    return found


def _absolute(place: str) -> str:
    """An existing path as an absolute one, for jobs that start in another folder; a name stays as it is."""
    return str(Path(place).absolute()) if Path(place).exists() else place


def check_data(runs: Sequence[Run], *, labels: bool = True) -> None:
    """Check that the data of runs exist, and that the runs can be measured on them.

    Args:
        runs: The runs.
        labels: Look for labels in the user's own images, if an evaluation needs them: training does not, so that
            without this check every run would train to its end and fail then. This loads the images.

    Raises:
        ValueError: Data or labels are missing.
    """
    different = {}
    for run in runs:
        places = (run.changes.get(place) for place in task_for(run).places)
        different[run.config, *run.extra.items(), *places] = run
    for run in different.values():
        task_for(run).check(settings_of(run))
        if labels and run.measure == "evaluation":
            task_for(run).check_measured(settings_of(run))


def check_devices(runs: Sequence[Run]) -> None:
    """Check that this machine has the devices of runs.

    Raises:
        ValueError: It has not.
    """
    for device in {str(settings_of(run).device) for run in {run.key: run for run in runs}.values()}:
        find_device(device)


def check_losses(runs: Sequence[Run]) -> None:
    """Call the user's own losses once with every try: they fail now, not after hours of other runs.

    Raises:
        ValueError: A loss fails.
    """
    for run in {run.key: run for run in runs}.values():
        wanted = settings_of(run)
        if ":" not in wanted.loss.preset:
            continue
        try:
            task_for(run).check_loss(wanted)
        except ValueError as error:
            named = ", ".join(filter(None, [run.row, run.loss, _tried(run)]))
            raise ValueError(f"{named}: {error}") from error


def _tried(run: Run) -> str:
    """What a run sets of its loss besides its name, in words."""
    named = {name: value for name, value in run.changes.items() if value not in (None, {})}
    return words({name: named[name] for name in named if name.startswith("loss.") and name != "loss.preset"})


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
    content = settings.load(run.config)
    arguments = tuple(replace(run, seed=0, folder=Path()).arguments())
    wanted = _read_once(task_of(content).settings, shown(content), arguments)  # type: ignore[arg-type]
    return replace(wanted, seed=run.seed, out=run.folder)


@lru_cache(maxsize=1024)
def _read_once(kind: type[Any], content: str, arguments: tuple[str, ...]) -> Any:
    """Cached settings: a table asks for them repeatedly. ``content`` renews the cache if the file has changed."""
    return settings.read(kind, arguments, command="weince train", examples="")


def epochs_of(run: Run) -> int:
    """Number of epochs of a run."""
    given = {**flat(settings.load(run.config)), **run.changes}
    return int(given.get("epochs", task_for(run).settings.epochs))


def has_settings(run: Run, content: Mapping[str, Any]) -> bool:
    """Whether the content of a ``run.yaml`` belongs to this run; the place of the data may differ."""
    task, wanted = task_for(run), settings.as_written(settings_of(run))
    found = settings.recorded(content, task.settings)
    return task_of(content) is task and all(
        found[name] == wanted[name] for name in wanted.keys() - task.incidental
    )
