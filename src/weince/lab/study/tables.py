"""Define tables in YAML files, which are checked before anything starts.

The tables that come with the package are in ``configs/tables/``; `read_table` accepts any file of that form.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from weince.lab.configure import unknown
from weince.lab.settings import check_once, configs_folder, read_yaml
from weince.lab.tasks.images.evaluation.knn import RECALLS

SEEDS = (7, 21, 63, 84)


@dataclass(frozen=True)
class Measure:
    """How a trained run is measured.

    Attributes:
        file: File that the measurement writes into the run's folder.
        figures: Figures in that file.
        test: Key of a reported figure; ``{}`` stands for the figure's name.
        validation: Key of a figure that tries may be chosen by; empty if there is none.
        keys: Dotted keys in the file for figures that have another name there.
    """

    file: str
    figures: tuple[str, ...]
    test: str = "{}"
    validation: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)


MEASURES = {
    "evaluation": Measure(
        "evaluation.json",
        ("linear", "knn", *(f"r{k}" for k in RECALLS), "map_r"),
        "{}_test_mean",
        "{}_validation_mean",
    ),
    "sts": Measure(
        "result.json",
        ("stsb", "sts"),
        "{}_test",
        "{}_validation",
        {"stsb_validation": "dev", "stsb_test": "tasks.STSB", "sts_test": "mean"},
    ),
    "link": Measure("link.json", ("link_lam", "link_gain", "link_ratio")),
    "frechet": Measure(
        "frechet.json",
        ("frechet_lam_w", "frechet_gain_w", "frechet_gain_f", "frechet_gain_wf", "frechet_lam_f"),
    ),
}


@dataclass(frozen=True)
class Loss:
    """A column of a table.

    Attributes:
        set: Settings of its runs, by dotted name.
        tries: Settings to choose among; by default the table's.
        reported: Name under which the paper reports it; empty if the paper does not.
    """

    set: Mapping[str, Any]
    tries: Sequence[Mapping[str, Any]] = ()
    reported: str = ""


@dataclass(frozen=True)
class Table:
    """The content of a table's file.

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
    losses: Mapping[str, Loss]
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
                raise ValueError(f"a table needs {what}; got none")
        known = MEASURES[self.measure].figures
        for figure in (*self.figures, *([self.choose_by] if self.choose_by else [])):
            if figure not in known:
                raise ValueError(unknown(f"figure of measure {self.measure}", str(figure), known))
        check_seeds(self.seeds)
        check_once("row", [Path(row).stem for row in self.rows])
        _check_names("set", self.set)
        for name, loss in self.losses.items():
            _check_names(f"set of {name}", loss.set)
            _check_tries(name, self.tries_of(name))
        tuned = any(len(self.tries_of(loss)) > 1 for loss in self.losses)
        if tuned and not (self.choose_by and MEASURES[self.measure].validation):
            raise ValueError(
                "a table with several tries needs choose_by, a figure with a validation value; got none"
            )
        keys, key = MEASURES[self.measure].keys, MEASURES[self.measure].validation.format(self.choose_by)
        if self.choose_by and keys and key not in keys:
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


def check_alone(others: Mapping[str, bool]) -> None:
    """Refuse a dry run together with an option that needs more; ``others`` says which options are given."""
    for name, given in others.items():
        if given:
            raise ValueError(f"--dry-run prints the runs and stops; wanted it alone; got it with {name}")


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
    wrong = [name for name in settings if not isinstance(name, str) or not name]
    if wrong:
        raise ValueError(
            f"{what} must map names of settings to values, {{loss.temperature: 0.2}}; got {wrong[0]!r}"
        )


def _check_tries(loss: str, tries: Sequence[Any]) -> None:
    """Raise if a try is not a mapping, or is listed twice, which would inflate the tuning budget."""
    for tried in tries:
        if not isinstance(tried, Mapping):
            raise ValueError(
                f"a try must map settings to values, {{loss.temperature: 0.2}}; got {tried!r} for {loss}"
            )
        _check_names(f"a try of {loss}", tried)
    check_once(f"try of {loss}", tries)


def named_tables() -> dict[str, Path]:
    """The tables that come with the package, by name."""
    return {path.stem: path for path in sorted((configs_folder() / "tables").glob("*.yaml"))}


def read_table(chosen: str) -> Table:
    """Read a table by name, or from a YAML file.

    Raises:
        ValueError: There is no such table, or the content of the file is not valid.
    """
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


def _table(path: Path, content: Any) -> Table:
    given = _checked(Table, content, "key of a table", without={"name"})
    losses = given.get("losses")
    if not isinstance(losses, dict) or not losses:
        raise ValueError(f"losses must map each loss to its settings; got {losses!r}")
    given["losses"] = {
        str(loss): Loss(**_checked(Loss, said, f"key of loss {loss}")) for loss, said in losses.items()
    }
    # A row may be a configuration file beside the table.
    given["rows"] = [
        str((path.parent / row).absolute()) if (path.parent / str(row)).is_file() else str(row)
        for row in given.get("rows", ())
    ]
    return Table(name=path.stem, **given)


def _checked(kind: type[Any], content: Any, what: str, without: Collection[str] = ()) -> dict[str, Any]:
    """Check that ``content`` maps fields of a dataclass to values of the right kind, and lacks no required field."""
    if not isinstance(content, dict):
        raise ValueError(f"wanted keys and values for a {kind.__name__.lower()}; got {content!r}")
    known = [item for item in fields(kind) if item.name not in without]
    for key, value in content.items():
        if key not in (names := [item.name for item in known]):
            raise ValueError(unknown(what, str(key), names))
        wanted = _KINDS.get(key, str)
        if not isinstance(value, wanted):
            raise ValueError(f"{key} must be a {wanted.__name__}; got {value!r}")
    for item in known:
        if item.default is MISSING and item.default_factory is MISSING and item.name not in content:
            raise ValueError(f"a {kind.__name__.lower()} needs {item.name}; got none")
    return dict(content)


_KINDS = {"figures": list, "rows": list, "tries": list, "seeds": list, "set": dict, "losses": dict}
