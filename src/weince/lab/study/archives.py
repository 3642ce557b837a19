"""Import runs that were made elsewhere: recognise them by their settings, check them, add them to the archive.

Two runs are the same run if all settings that shape the weights are equal; the folder's name and the place of the
data do not matter. Figures of two runs are comparable if their data and their evaluation are the same too.
"""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from weince.lab import settings
from weince.lab.configure import LossConfig
from weince.lab.study.comparison import Comparison
from weince.lab.study.cost import RECORD
from weince.lab.study.plan import WHOLE, Run, epochs_of, flat, plan, settings_of, task_for
from weince.lab.study.provenance import NOT_RECORDED, is_done
from weince.lab.study.records import ARCHIVE, add_records, read_archive
from weince.lab.study.search_space import alone, in_words, set_in
from weince.lab.study.table import SEEDS
from weince.lab.tasks.base import Task
from weince.lab.tasks.registry import task_of

PROTOCOL = {
    "fingerprint": "data fingerprint",
    "quick": "quick evaluation",
    "probe_seeds": "seeds of the probe",
    "split_seeds": "seeds of the splits",
}
"""Keys that must be equal in two evaluations, and their names in messages."""

LARGEST = 100.001
"""Largest figure, and a little more for rounding."""

COSTS = ("loss_ms", "loss_mib", "step_ms", "step_mib", "batch", "width")
"""Numbers of a cost that a page shows."""

Files = dict[str, Any]
"""The small files of a run, by name."""


def find_runs(
    runs: Sequence[Run], archives: Iterable[Path], *, of_data: str | None, ours: Mapping[str, Any] | None
) -> dict[str, Files]:
    """Find wanted runs in archives; how many do not compare, and why, is printed to standard error.

    Args:
        runs: Runs that are wanted.
        archives: Files as ``weince reproduce --keep`` and ``weince compare`` write them.
        of_data: Fingerprint of the data here, or None if it is unknown. Records of other data are left out.
        ours: Evaluation of a finished run here, or None. Records with another protocol than its are left out. With
            None, quick evaluations are left out, and records whose protocol differs from that of the first record.
            If ``of_data`` is None too, the name of our data says which data set of the records is ours.

    Returns:
        The files of those runs, by the names that the runs have here.

    Raises:
        ValueError: No data set of the records has the name of ours, or several have.
    """
    wanted, result, task = _identities(runs), runs[0].result.name, task_for(runs[0])
    matching = [
        (archive, run, files)
        for archive in archives
        for files in _read(archive, task).values()
        if (run := wanted.get(_recorded_identity(files["run.yaml"]))) is not None
    ]
    if of_data is None and ours is None:
        of_data = _data_meant([files for _, _, files in matching], runs[0])
    taken: dict[str, Files] = {}
    refused: Counter[tuple[Path, str]] = Counter()
    for archive, run, files in matching:
        if run.name in taken:
            continue
        if why := _difference(files[result], of_data, ours):
            refused[archive, why] += 1
        else:
            taken[run.name] = _as_ours(files, run)
            ours = ours or files[result]
    for (archive, why), count in refused.items():
        print(f"{archive}: {count} {'run' if count == 1 else 'runs'} not reused, {why}", file=sys.stderr)
    return taken


def _data_meant(matching: Sequence[Files], run: Run) -> str | None:
    """The fingerprint that the records have for data of our name; None if no record has one.

    Records with the settings of our runs may be on other data, such as CIFAR-10 instead of CIFAR-100.
    """
    task = task_for(run)

    def names(content: Mapping[str, Any]) -> list[str]:
        """Names of the data in the settings of a run, wherever they lie."""
        return [Path(str(content.get(place))).stem for place in task.places]

    ours = names(settings.as_written(settings_of(run)))
    data = {files[run.result.name].get("fingerprint"): names(files["run.yaml"]) for files in matching}
    meant = [mark for mark, theirs in data.items() if theirs == ours]
    if data and len(meant) != 1:
        there = "; ".join(f"{', '.join(theirs)} (fingerprint {mark})" for mark, theirs in data.items())
        raise ValueError(
            f"which runs to reuse is unclear: the archives have such runs on {there}, and the data here, "
            f"{', '.join(ours)}, cannot be read to compare with; give their path with --data"
        )
    return meant[0] if meant else None


def _difference(
    evaluation: Mapping[str, Any], of_data: str | None, ours: Mapping[str, Any] | None
) -> str | None:
    """Why an evaluation does not compare with the data here and with ``ours``, in words; None if it does."""
    if of_data is not None and evaluation.get("fingerprint") != of_data:
        return f"their data have the fingerprint {evaluation.get('fingerprint')}, not {of_data}"
    if ours is None:
        return "their evaluation is quick" if evaluation.get("quick") else None
    for key, called in PROTOCOL.items():
        if evaluation.get(key) != ours.get(key):
            return f"their {called} is {evaluation.get(key)}, not {ours.get(key)}"
    return None


def seeds_of(comparison: Comparison, archives: Iterable[Path]) -> list[int]:
    """The seeds of archives, for a comparison that begins with them. The one with the most runs is the first.

    All tries have that seed, and the seed of the tries must be the first of a comparison.
    """
    counted = Counter(
        int(_recorded(files["run.yaml"])["seed"])
        for path in archives
        for files in _read(path, comparison.task).values()
    )
    usual = {seed: place for place, seed in enumerate(SEEDS)}
    order = sorted(counted, key=lambda seed: (-counted[seed], usual.get(seed, len(SEEDS)), seed))
    return order or list(SEEDS)


def add(
    comparison: Comparison, archives: Iterable[Path], out: Path, ours: Sequence[Mapping[str, Any]]
) -> Comparison:
    """Copy all records of other archives into ours; return the comparison with their losses, tries and seeds added.

    A run that is done here stays as it is. Of a run that several archives have, the first record is copied. ``ours``
    are the evaluations of our finished runs.

    Raises:
        ValueError: A record has other data, another recipe or another protocol, or there is no try to choose. Nothing
            is changed then.
    """
    result = comparison.task.measures[comparison.task.measure].file
    theirs = {
        f"{path}, {name}": files for path in archives for name, files in _read(path, comparison.task).items()
    }
    first = [("this comparison", evaluation) for evaluation in ours[:1]]
    check_protocol([*first, *((name, files[result]) for name, files in theirs.items())])
    recipe = settings_of(plan(comparison.tries_table(), out)[0])
    epochs = {epochs_of(run) for run in _every_run(comparison, out)}
    content = settings.load(comparison.config)
    for name, files in theirs.items():
        _check_recipe(name, files["run.yaml"], recipe, epochs)
        comparison = _with_loss(comparison, _recorded(files["run.yaml"]), content)
    runs = _identities(_every_run(comparison, out))
    new: dict[str, Files] = {}
    for files in theirs.values():
        # None: a shorter try with a seed that chooses nothing here.
        run = runs.get(_recorded_identity(files["run.yaml"]))
        if run is not None and not is_done(run):
            new.setdefault(run.name, _as_ours(files, run))
    if not ours and not any(run.name in new for run in plan(comparison.tries_table(), out)):
        seeds = sorted({_recorded_identity(files["run.yaml"])[1] for files in theirs.values()})
        raise ValueError(
            f"a comparison that begins with --add wants tries with its first seed, {comparison.seeds[0]}, to choose "
            f"by; got {f'runs with the seeds {seeds}' if seeds else 'no runs'}"
        )
    add_records(out, new)
    return comparison


def check_protocol(evaluations: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Check that figures are comparable: that all come from the same data and the same protocol."""
    for name, evaluation in evaluations[1:]:
        first, wanted = evaluations[0]
        for key, called in PROTOCOL.items():
            if evaluation.get(key) != wanted.get(key):
                raise ValueError(
                    f"{name}: its {called} is {evaluation.get(key)}, that of {first} is {wanted.get(key)}: "
                    "their figures do not compare"
                )


def _check_recipe(name: str, content: Mapping[str, Any], recipe: Any, epochs: set[int]) -> None:
    recorded, wanted = _recorded(content), settings.as_written(recipe)
    free, by_key = {*task_of(wanted).incidental, "seed", "loss", "epochs"}, flat(recorded)
    differs = [
        f"{key} {by_key.get(key)!r}, not {value!r}"
        for key, value in flat({k: v for k, v in wanted.items() if k not in free}).items()
        if by_key.get(key) != value
    ]
    # A setting of a newer version may shape the weights: the run would be none of ours, and left out unseen.
    known = flat(wanted)
    differs += [
        f"{key} {value!r}, unknown here"
        for key, value in by_key.items()
        if key not in known and not key.startswith(WHOLE)
    ]
    if recorded["epochs"] not in epochs:
        wanted_epochs = " or ".join(map(str, sorted(epochs)))
        differs.append(
            f"epochs {recorded['epochs']}, not {wanted_epochs} (--try-epochs is for shorter tries)"
        )
    if differs:
        raise ValueError(f"{name}: another recipe: it has {'; '.join(differs)}")


def _with_loss(comparison: Comparison, recorded: Mapping[str, Any], content: Mapping[str, Any]) -> Comparison:
    """Add the loss, the try and the seed of a recorded run to a comparison; ``content`` is its configuration."""
    usual, loss = LossConfig(), recorded["loss"]
    tried = {
        f"loss.{item.name}": loss[item.name]
        for item in fields(LossConfig)
        if item.name in ("preset", "temperature") or loss[item.name] != getattr(usual, item.name)
    }
    tried.pop("loss.engine", None)
    searched = {"loss.preset", "loss.temperature", "loss.options"}
    variant = {key: value for key, value in tried.items() if key not in searched}
    name = tried["loss.preset"] + (f", {in_words(variant)}" if variant else "")
    tries = list(comparison.losses.get(name, ()))
    if not any(set_in(other) == set_in(tried) for other in tries):
        tries.append(alone(tried, content))
    seeds = list(dict.fromkeys([*comparison.seeds, recorded["seed"]]))
    return replace(comparison, losses={**comparison.losses, name: tries}, seeds=seeds)


def _every_run(comparison: Comparison, out: Path) -> list[Run]:
    """All tries of all losses: with the first seed at the length of a try, and with all seeds at full length."""
    tries = comparison.tries_table()
    return [*plan(tries, out), *plan(replace(tries, set=comparison.set, seeds=comparison.seeds), out)]


def _read(path: Path, task: Task) -> dict[str, Files]:
    """Read the runs of an archive; each must have the validation figure by which a comparison chooses."""
    measure = task.measures[task.measure]
    figure = measure.validation.format(task.main)
    path = path / ARCHIVE if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path}: no such archive of runs; wanted a {ARCHIVE}, or a folder with one")
    records = read_archive(path)
    for name, files in records.items():
        check_shown(path, name, files, task)
        if flat(files[measure.file]).get(measure.keys.get(figure, figure)) is None:
            raise ValueError(f"{path}: {measure.file} of the run {name} wants {figure}, to choose by")
    return records


def check_shown(path: Path, name: str, files: Mapping[str, Any], task: Task) -> None:
    """Check that a page can show the record of a run, which may have been edited by hand.

    Once a record that cannot be shown is copied, no page of the folder could be written.
    """
    try:
        _check_shown(files, task)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: {error}, in the run {name}") from None


def _check_shown(files: Mapping[str, Any], task: Task) -> None:
    measure = task.measures[task.measure]
    for file in ("run.yaml", measure.file, *files):
        if file not in files:
            raise ValueError(f"a record needs {file}")
        if not isinstance(files[file], Mapping):
            raise ValueError(f"{file} must be names with values; got {files[file]!r}")
    loss = files["run.yaml"].get("loss", {})
    preset = loss.get("preset", LossConfig().preset) if isinstance(loss, Mapping) else f"the loss {loss!r}"
    if not isinstance(preset, str) or not re.fullmatch(r"[\w.-]+(:\w+)?", preset):
        raise ValueError(f"loss.preset must name a loss, such as dcl or my_package:MyLoss; got {preset!r}")
    measures = files.get("made.json", {}).get("measures", {})
    where = measures.get(task.measure, NOT_RECORDED) if isinstance(measures, Mapping) else measures
    wanted = {measure.file: (files[measure.file], ["data"]), "made.json": (where, [*NOT_RECORDED])}
    if RECORD in files:
        wanted[RECORD] = files[RECORD], [*COSTS, "hardware"]
    for file, (content, names) in wanted.items():
        for name in names:
            if not isinstance(content, Mapping) or name not in content:
                raise ValueError(f"{file} wants {name}; got {content!r}")
    kinds = [kind.format(figure) for figure in task.figures for kind in (measure.test, measure.validation)]
    result = flat(files[measure.file])
    # A record has no figure, or None, that is newer than it.
    figures = {kind: result.get(measure.keys.get(kind, kind)) for kind in kinds}
    costs = {name: files.get(RECORD, {}).get(name) for name in (*COSTS, "epoch_seconds")}
    for name, value in {**figures, **costs}.items():
        if not isinstance(value, int | float | None):
            raise ValueError(f"{name} must be a number; got {value!r}")
        if name in figures and LARGEST < abs(value or 0.0) < math.inf:
            raise ValueError(f"{name} must be from -100 to 100; got {repr(value)[:20]}")
    try:
        for row in zip(*files.get("log.csv", {}).values(), strict=True):
            [float(cell) for cell in row if cell is not None]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"log.csv must be columns of numbers, equally long; got {error}") from None


def _as_ours(files: Files, run: Run) -> Files:
    """The record with the name and the key that the same run has here."""
    content = {**files["run.yaml"], "out": f"runs/{run.name}"}
    signed = {"made.json": {**files["made.json"], "key": run.key}} if "made.json" in files else {}
    return {**files, "run.yaml": content, **signed}


def _recorded(content: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a ``run.yaml``."""
    return settings.recorded(content, task_of(content).settings)


def _identities(runs: Sequence[Run]) -> dict[tuple[str, int], Run]:
    """Runs by identity: their settings without the seed, as text, and the seed. One key has one text."""
    texts: dict[str, str] = {}
    for run in runs:
        if run.key not in texts:
            texts[run.key] = _text(settings.as_written(settings_of(run)))
    return {(texts[run.key], run.seed): run for run in runs}


def _recorded_identity(content: Mapping[str, Any]) -> tuple[str, int]:
    recorded = _recorded(content)
    return _text(recorded), recorded["seed"]


def _text(content: Mapping[str, Any]) -> str:
    kept = {k: v for k, v in content.items() if k not in {*task_of(content).incidental, "seed"}}
    loss = {k: v for k, v in kept["loss"].items() if k != "engine"}
    return json.dumps(_numbers({**kept, "loss": loss}), sort_keys=True)


def _numbers(value: Any) -> Any:
    """Settings with whole floats as integers, so that 1 and 1.0 are equal as text."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
