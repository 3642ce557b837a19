"""What a table needs: its file read and checked, and the runs that fill it.

A table is a YAML file (see ``configs/tables/``). Its runs are rows x losses x tries x seeds. Where a run's results
lie follows from its settings alone, so that tables share their runs, and a changed setting is another run.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from weince import settings
from weince.configure import unknown
from weince.evaluate.protocol import trials
from weince.vision.runs import FREE_TO_CHANGE

SEEDS = (7, 21, 63, 84)


@dataclass(frozen=True)
class Measure:
    """How a trained run is measured.

    Attributes:
        file: What the measurement leaves in the run's folder.
        test: Key of a figure that is reported, ``{}`` standing for its name.
        validation: Key of the figure that may be chosen by; empty if there is none.
    """

    file: str
    test: str = "{}"
    validation: str = ""


MEASURES = {
    "evaluation": Measure("evaluation.json", "{}_test_mean", "{}_validation_mean"),
    "link": Measure("link.json"),
    "frechet": Measure("frechet.json"),
}


@dataclass(frozen=True)
class Loss:
    """A column of a table.

    Attributes:
        set: Settings of its runs, by dotted name.
        tries: Settings to choose among; the table's own if not given.
        reported: Under which name the paper reports it; empty if it does not.
    """

    set: Mapping[str, Any]
    tries: Sequence[Mapping[str, Any]] = ()
    reported: str = ""


@dataclass(frozen=True)
class Table:
    """What a table's file says.

    Attributes:
        name: Of the file.
        title: Of the table.
        figures: What is shown of each run.
        rows: Configurations, by name or path.
        losses: The columns.
        baseline: The loss that others are compared with, seed by seed.
        measure: A key of `MEASURES`.
        choose_by: The figure whose validation value decides between tries.
        tries: Settings to choose among, the same for every loss that has none of its own. The first is what the
            paper's figure stands beside.
        set: Settings of all runs.
        seeds: Of the runs.
    """

    name: str
    title: str
    figures: Sequence[str]
    rows: Sequence[str]
    losses: Mapping[str, Loss]
    baseline: str
    measure: str = "evaluation"
    choose_by: str = ""
    tries: Sequence[Mapping[str, Any]] = ({},)
    set: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = SEEDS

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise ValueError(unknown("measure", self.measure, MEASURES))
        if self.baseline not in self.losses:
            raise ValueError(unknown("baseline", self.baseline, self.losses))
        for what in ("figures", "rows", "tries", "seeds"):
            if not getattr(self, what):
                raise ValueError(f"a table needs {what}, this one has none")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"every seed counts once, got {list(self.seeds)}")
        tuned = any(len(self.tries_of(loss)) > 1 for loss in self.losses)
        if tuned and not (self.choose_by and MEASURES[self.measure].validation):
            raise ValueError("a table with several tries needs choose_by, a figure with a validation value")

    def tries_of(self, loss: str) -> Sequence[Mapping[str, Any]]:
        """The settings to choose among for a loss."""
        return self.losses[loss].tries or self.tries

    def trials(self) -> dict[str, int]:
        """How many configurations are tried for each loss."""
        return trials(loss for loss in self.losses for _ in self.tries_of(loss))


@dataclass(frozen=True)
class Run:
    """One training and its measurement.

    Attributes:
        row: Name of the configuration.
        loss: Column of the table.
        trial: Which of the loss's tries.
        seed: Of the run.
        config: What ``--config`` gets.
        changes: Settings that differ from the configuration, by dotted name.
        measure: A key of `MEASURES`.
        folder: Of the run.
        key: Hash of its settings.
        extra: Settings that leave the result as it is, such as the device.
    """

    row: str
    loss: str
    trial: int
    seed: int
    config: str
    changes: Mapping[str, Any]
    measure: str
    folder: Path
    key: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A name to read: its place under the folder of all runs."""
        return "/".join(self.folder.parts[-3:])

    @property
    def result(self) -> Path:
        """The file that the measurement leaves."""
        return self.folder / MEASURES[self.measure].file

    def arguments(self) -> list[str]:
        """The options of ``weince train`` for this run."""
        given = {**self.changes, **self.extra, "seed": self.seed, "out": str(self.folder)}
        options = [part for name, value in given.items() for part in (f"--{name}", shown(value))]
        return ["--config", self.config, *options]


def shown(value: Any) -> str:
    """A setting as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def tables_folder() -> Path:
    """Where the tables are that come with the package: in it, or in the checkout around it."""
    here = Path(__file__).parents[1]
    places = (here / "configs" / "tables", here.parents[1] / "configs" / "tables")
    return next((place for place in places if place.is_dir()), places[0])


def named_tables() -> dict[str, Path]:
    """The tables that come with the package, by name."""
    return {path.stem: path for path in sorted(tables_folder().glob("*.yaml"))}


def read_table(chosen: str) -> Table:
    """A table by name, or from a YAML file.

    Raises:
        ValueError: There is none of that name, or the file says something that a table cannot.
    """
    path, named = Path(chosen), named_tables()
    if path.suffix not in (".yaml", ".yml"):
        if chosen not in named:
            raise ValueError(unknown("table", chosen, [*named, "overhead"]) + ", or a YAML file")
        path = named[chosen]
    elif not path.is_file():
        raise ValueError(f"{chosen}: no such table file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{chosen} is not YAML: {' '.join(str(error).split())}") from None
    try:
        return _table(path.stem, content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name}: {error}") from None


def _table(name: str, content: Any) -> Table:
    given = _checked(Table, content, "key of a table", without={"name"})
    losses = given.get("losses")
    if not isinstance(losses, dict) or not losses:
        raise ValueError(f"losses must map each loss to its settings, got {losses!r}")
    given["losses"] = {
        str(loss): Loss(**_checked(Loss, said, f"key of loss {loss}")) for loss, said in losses.items()
    }
    return Table(name=name, **given)


def _checked(
    kind: type[Any], content: Any, what: str, without: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    """A mapping whose keys are fields of a dataclass and whose lists and mappings are where they belong."""
    if not isinstance(content, dict):
        raise ValueError(f"wanted keys and values for a {kind.__name__.lower()}, got {content!r}")
    known = {item.name: item for item in fields(kind) if item.name not in without}
    for key, value in content.items():
        if key not in known:
            raise ValueError(unknown(what, str(key), known))
        wanted = {
            "figures": list,
            "rows": list,
            "tries": list,
            "seeds": list,
            "set": dict,
            "losses": dict,
        }.get(key, str)
        if not isinstance(value, wanted):
            raise ValueError(f"{key} must be a {wanted.__name__}, got {value!r}")
    return dict(content)


def plan(
    table: Table,
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    epochs: int | None = None,
    data: str | None = None,
    device: str | None = None,
) -> list[Run]:
    """The runs of a table, seed by seed, so that the first seed of everything is there first.

    Args:
        table: What is wanted.
        out: Folder of all results; the runs are in ``out/runs``.
        seeds: Instead of the table's.
        only: Keep the rows (``cifar100_resnet18``) or cells (``cifar100_resnet18/InfoNCE``) that match one of these
            names or patterns.
        epochs: Instead of the configurations', for a trial.
        data: Where the images are: a path for all rows, or ``cifar100=PATH,cifar10=PATH``.
        device: ``cpu`` or ``cuda`` instead of what is there.

    Raises:
        ValueError: A configuration, setting or pattern is unknown; nothing has been started then.
    """
    kept = [(row, loss) for row in table.rows for loss in table.losses if _wanted(Path(row).stem, loss, only)]
    if not kept:
        cells = [f"{Path(row).stem}/{loss}" for row in table.rows for loss in table.losses]
        raise ValueError(
            f"nothing in table {table.name} matches {', '.join(only or ())}; it has {', '.join(cells)}"
        )
    extra = {"device": device} if device else {}
    runs = []
    for seed in seeds or table.seeds:
        for row, loss in kept:
            for trial, tried in enumerate(table.tries_of(loss)):
                changes = {**table.set, **table.losses[loss].set, **tried}
                if epochs is not None:
                    changes["epochs"] = epochs
                runs.append(_run(table, row, loss, trial, seed, changes, extra, out.absolute()))
    # The key leaves the path out: the same images elsewhere are the same run.
    places = _places(data, {_data(run) for run in runs})
    if places:
        runs = [replace(r, extra={**r.extra, "data": places.get(_data(r), _data(r))}) for r in runs]
    for run in {run.key: run for run in runs}.values():
        _check(run)
    return runs


def _wanted(row: str, loss: str, only: Sequence[str] | None) -> bool:
    return only is None or any(fnmatch(name, pattern) for pattern in only for name in (row, f"{row}/{loss}"))


def _run(
    table: Table,
    config: str,
    loss: str,
    trial: int,
    seed: int,
    changes: Mapping[str, Any],
    extra: Mapping[str, Any],
    out: Path,
) -> Run:
    row = Path(config).stem
    free = {name: value for name, value in changes.items() if name in FREE_TO_CHANGE}
    binding = {name: value for name, value in changes.items() if name not in FREE_TO_CHANGE}
    base = {name: value for name, value in flat(settings.load(config)).items() if name not in FREE_TO_CHANGE}
    text = json.dumps({**base, **binding, "seed": None}, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    words = [
        shown(value) if name == "loss.preset" else f"{name.split('.')[-1]}-{shown(value)}"
        for name, value in binding.items()
    ]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(words) or "as-configured").strip("-")[:80]
    folder = out / "runs" / row / f"{slug}_{key[:6]}" / f"seed_{seed}"
    return Run(row, loss, trial, seed, config, binding, table.measure, folder, key, {**free, **extra})


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


def _places(data: str | None, names: Collection[str]) -> dict[str, str]:
    """Where the images of each data set are."""
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
        found[name] = _absolute(place)
    return found


def _absolute(place: str) -> str:
    """A path that means the same to a job that starts elsewhere; a name stays a name."""
    return str(Path(place).absolute()) if Path(place).exists() else place


def _data(run: Run) -> str:
    return str(run.changes.get("data", settings.load(run.config).get("data", "")))


def _check(run: Run) -> None:
    """See that the settings make a run, before anything is started."""
    from weince.vision.train import VisionRun

    try:
        settings.read(VisionRun, run.arguments(), command="weince train", examples="")
    except ValueError as error:
        raise ValueError(f"{run.row}, {run.loss}: {error}") from None
