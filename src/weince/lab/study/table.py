"""Define tables in YAML files, which are checked before anything starts.

The tables that come with the package are in ``configs/tables/``; `read_table` accepts any file of that form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from weince.lab.configure import unknown
from weince.lab.settings import check_once, configs_folder, read_yaml
from weince.lab.tasks.registry import MEASURES

SEEDS = (7, 21, 63, 84)


@dataclass(frozen=True)
class TableColumn:
    """A loss in a table.

    Attributes:
        set: Settings of its runs, by dotted name.
        tries: Settings to choose among; by default the table's.
        reported: Name under which the paper reports it; empty if the paper does not.
    """

    set: Mapping[str, Any]
    tries: Sequence[Mapping[str, Any]] = ()
    reported: str = ""


@dataclass(frozen=True)
class RunTable:
    """Rows x losses x tries x seeds: the content of a table's file, or one stage of a comparison.

    Attributes:
        name: Name of the file.
        title: Title of the table.
        shows: What it shows, in one sentence; generated if not given.
        figures: Figures to show of each run.
        rows: Configurations, by name or path.
        losses: The columns.
        baseline: The loss that others are compared with, seed by seed.
        measure: A key of `MEASURES`.
        choose_by: The figure whose validation value decides between tries.
        tries: Settings to choose among, for every loss that has none of its own. In the list of tries, the paper's
            figure stands beside the first.
        set: Settings of all runs.
        seeds: Seeds of the runs.
    """

    name: str
    title: str
    figures: Sequence[str]
    rows: Sequence[str]
    losses: Mapping[str, TableColumn]
    baseline: str
    measure: str = "evaluation"
    choose_by: str = ""
    tries: Sequence[Mapping[str, Any]] = ({},)
    set: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = SEEDS
    shows: str = ""

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise ValueError(unknown("measure", self.measure, MEASURES))
        if self.baseline not in self.losses:
            raise ValueError(unknown("baseline", self.baseline, self.losses))
        for what in ("figures", "rows", "tries", "seeds"):
            if not getattr(self, what):
                raise ValueError(f"a table needs {what}")
        measure = MEASURES[self.measure]
        for figure in (*self.figures, *([self.choose_by] if self.choose_by else [])):
            if figure not in measure.figures:
                raise ValueError(unknown(f"figure of measure {self.measure}", str(figure), measure.figures))
        check_seeds(self.seeds)
        check_once("row", [Path(row).stem for row in self.rows])
        _check_names("set", self.set)
        for name, loss in self.losses.items():
            _check_names(f"set of {name}", loss.set)
            _check_tries(name, self.tries_of(name))
        tuned = any(len(self.tries_of(loss)) > 1 for loss in self.losses)
        if tuned and not (self.choose_by and measure.validation):
            raise ValueError("a table with several tries needs choose_by, a figure with a validation value")
        if self.choose_by and measure.keys and measure.validation.format(self.choose_by) not in measure.keys:
            raise ValueError(f"choose_by wants a figure with a validation value; got {self.choose_by}")

    @property
    def runs(self) -> int:
        """Number of runs of the table: rows x losses x tries x seeds."""
        return len(self.rows) * len(self.seeds) * sum(len(self.tries_of(loss)) for loss in self.losses)

    @property
    def opening(self) -> str:
        """One sentence that says what the table shows."""
        rows = ", ".join(Path(row).stem for row in self.rows)
        compared = f"{len(self.losses)} losses on {rows} with {self.baseline}, seed by seed"
        return self.shows or f"This table compares {compared}."

    def tries_of(self, loss: str) -> Sequence[Mapping[str, Any]]:
        """The settings to choose among for a loss."""
        return self.losses[loss].tries or self.tries


def check_seeds(seeds: Sequence[Any]) -> None:
    """Refuse a seed that no run can have, or that is listed twice.

    >>> check_seeds([7, -2])
    Traceback (most recent call last):
    ...
    ValueError: seeds must be at least 0 and below 2**63; got -2
    """
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ValueError(f"seeds must be integers; got {seed!r}")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seeds must be at least 0 and below 2**63; got {seed}")
    check_once("seed", seeds)


def take_seeds(asked: int | Sequence[int] | None, known: Sequence[int]) -> Sequence[int]:
    """The seeds to use: the first ``asked`` of the known ones if it is a number, else the listed ones, else all.

    >>> take_seeds(2, SEEDS), take_seeds([5, 6], SEEDS)
    ((7, 21), [5, 6])
    """
    if not isinstance(asked, int):
        return asked or known
    if not 1 <= asked <= len(known):
        raise ValueError(
            f"one number for --seeds is a count and must be from 1 to {len(known)}; got {asked}: give --seeds 1 for "
            f"seed {known[0]} alone, or two numbers or more to name seeds, --seeds {known[0]} 105 (in Python, "
            "seeds=[105] names one)"
        )
    return known[:asked]


def _check_names(what: str, settings: Mapping[Any, Any]) -> None:
    """Raise if a key cannot be the name of a setting."""
    for name in settings:
        if not isinstance(name, str) or not name:
            wanted = "names of settings to values, {loss.temperature: 0.2}"
            raise ValueError(f"{what} must map {wanted}; got {name!r}")


def _check_tries(loss: str, tries: Sequence[Any]) -> None:
    """Raise if a try is not a mapping, or is listed twice, which would inflate the tuning budget."""
    for tried in tries:
        if not isinstance(tried, Mapping):
            wanted = "settings to values, {loss.temperature: 0.2}"
            raise ValueError(f"a try must map {wanted}; got {tried!r} for {loss}")
        _check_names(f"a try of {loss}", tried)
    check_once(f"try of {loss}", tries)


def named_tables() -> dict[str, Path]:
    """The tables that come with the package, by name."""
    return {path.stem: path for path in sorted((configs_folder() / "tables").glob("*.yaml"))}


def read_table(chosen: str) -> RunTable:
    """Read a table by name, or from a YAML file."""
    path, named = Path(chosen), named_tables()
    if path.suffix not in (".yaml", ".yml"):
        if chosen not in named:
            raise ValueError(unknown("table", chosen, [*named, "overhead"]) + ", or a YAML file")
        path = named[chosen]
    elif not path.is_file():
        raise ValueError(
            f"{chosen}: no such table file; wanted a YAML file, or a name of weince reproduce --list"
        )
    content = read_yaml(path, chosen)
    try:
        return _table(path, content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name}: {error}") from None


def _table(path: Path, content: Any) -> RunTable:
    values = _checked(RunTable, "table", "key of a table", content)
    losses = values.get("losses")
    if not isinstance(losses, dict) or not losses:
        raise ValueError(f"losses must map each loss to its settings; got {losses!r}")
    values["losses"] = {
        str(loss): TableColumn(**_checked(TableColumn, "loss", f"key of loss {loss}", said))
        for loss, said in losses.items()
    }
    # A row may be a configuration file beside the table.
    values["rows"] = [
        str((path.parent / row).absolute()) if (path.parent / str(row)).is_file() else str(row)
        for row in values.get("rows", ())
    ]
    return RunTable(name=path.stem, **values)


def _checked(kind: type[Any], called: str, what: str, content: Any) -> dict[str, Any]:
    """Check that ``content`` maps fields of a dataclass to values of the right kind, and lacks no required field."""
    if not isinstance(content, dict):
        raise ValueError(f"wanted keys and values for a {called}; got {content!r}")
    known = {item.name: item for item in fields(kind) if item.name != "name"}
    for key, value in content.items():
        if key not in known:
            raise ValueError(unknown(what, str(key), known))
        wanted = _KINDS.get(key, str)
        if not isinstance(value, wanted):
            raise ValueError(f"{key} must be a {wanted.__name__}; got {value!r}")
    for name, item in known.items():
        if item.default is MISSING and item.default_factory is MISSING and name not in content:
            raise ValueError(f"a {called} needs {name}")
    return dict(content)


_KINDS = {"figures": list, "rows": list, "tries": list, "seeds": list, "set": dict, "losses": dict}
