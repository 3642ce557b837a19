"""Records of runs: settings, log and results. About 14 kB per run of 100 epochs, without weights.

Each run has its own folder. Kept records share one archive, ``runs.jsonl``: one line per run, with the contents of
its ``run.yaml``, ``log.csv`` and JSON files under their names. If a run has both, its folder takes precedence.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

from weince.files import write_text_aside
from weince.lab.settings import load
from weince.lab.study.plan import Run
from weince.lab.tasks.registry import task_of
from weince.lab.training.log import read_log
from weince.lab.training.processes import waiting_lock

ARCHIVE = "runs.jsonl"


def read_record(run: Run, name: str) -> Any:
    """Content of one of a run's small files, from its folder or else from the archive.

    ``name`` is ``run.yaml``, a JSON file, or ``log.csv`` (rows without their empty cells; no rows if it is missing).

    Neither may have the file (FileNotFoundError), or it cannot be parsed (ValueError).
    """
    if has_folder(run):
        return _read(run.folder / name)
    kept = archived(run)
    if name == "log.csv":
        return _rows(kept.get(name, {}))
    if name not in kept:
        raise FileNotFoundError(f"{run.name} has no {name}, neither in a folder nor in {archive_of(run)}")
    return kept[name]


def has_folder(run: Run) -> bool:
    """Whether a run has a folder with files of its record, which take precedence over the archive."""
    if (run.folder / run.result.name).is_file():
        return True
    begun = any((run.folder / name).is_file() for name in ("run.yaml", "log.csv"))
    # A finished record in the archive counts more than a run that was interrupted.
    return begun and run.result.name not in archived(run)


def archive_of(run: Run) -> Path:
    """The archive that holds the record of a run without a folder."""
    return run.folder.parents[3] / ARCHIVE


def keep_records(runs: Sequence[Run], folder: Path) -> None:
    """Write the records of finished runs into the archive of a folder, which keeps its other runs.

    Paths of this machine are removed from ``run.yaml``: data are given by name, and ``out`` is relative.
    """
    add_records(folder, {run.name: _gathered(run) if has_folder(run) else archived(run) for run in runs})


def add_records(folder: Path, new: Mapping[str, Mapping[str, Any]]) -> None:
    """Add records to the archive of a folder; ``new`` maps the name of a run to its files."""
    path = folder / ARCHIVE
    with folder_lock(folder):  # no command drops what another adds meanwhile
        kept = read_archive(path) if path.is_file() else {}
        lines = [_line(name, files) for name, files in sorted({**kept, **new}.items())]
        write_text_aside(path, "".join(lines), "archive")


def folder_lock(folder: Path) -> AbstractContextManager[int]:
    """Wait for the lock on a folder of results, which is made if it is missing, and hold it."""
    folder.mkdir(parents=True, exist_ok=True)
    # Files of the folder are replaced when they change, so the lock is one that never is.
    return waiting_lock(folder / ".runs.lock", lambda: time.sleep(0.1))


def add_file(run: Run, name: str, content: Any) -> None:
    """Add a JSON file to the record of a run, in its folder or else in the archive."""
    if has_folder(run):
        write_text_aside(run.folder / name, json.dumps(content, indent=1) + "\n", "record")
    else:
        add_records(archive_of(run).parent, {run.name: {**archived(run), name: content}})


def archived(run: Run) -> Mapping[str, Any]:
    """The files of a run in the archive; empty if it has none."""
    path = archive_of(run)
    if not path.is_file():
        return {}
    return _read_once(path, path.stat().st_mtime_ns).get(run.name, {})


@lru_cache(maxsize=4)
def _read_once(path: Path, changed: int) -> dict[str, dict[str, Any]]:
    """The archive, cached by its time of change: a table reads hundreds of its lines."""
    return read_archive(path)


def read_archive(path: Path) -> dict[str, dict[str, Any]]:
    """Read the files of each run, by the run's name; a line that is no record of a run is an error."""
    records = {}
    with path.open("rb") as lines:  # bytes: if they are no text, the error names the line
        for number, line in enumerate(lines, 1):
            try:
                content = json.loads(line.decode())
            except ValueError:
                raise ValueError(
                    f"{path}, line {number}: not JSON, it may be cut short: remove this line; its run is then missing"
                ) from None
            try:
                files = dict(content)
                records[str(files.pop("run"))] = files
            except (ValueError, TypeError, KeyError):
                got = line.decode().strip()
                raise ValueError(
                    f"{path}, line {number}: not the record of a run; wanted a JSON object with the key run; "
                    f"got {got[:60] + '...' * (len(got) > 60)}"
                ) from None
    return records


def _line(name: str, files: Mapping[str, Any]) -> str:
    return json.dumps({"run": name, **files}, ensure_ascii=False) + "\n"


def _gathered(run: Run) -> dict[str, Any]:
    """The small files of a run's folder."""
    settings = _read(run.folder / "run.yaml")
    settings |= {place: _named(settings[place]) for place in task_of(settings).places}
    settings["out"] = f"runs/{run.name}"
    names = ["log.csv", *sorted(path.name for path in run.folder.glob("*.json"))]
    files = {name: _read(run.folder / name) for name in names if (run.folder / name).is_file()}
    if "log.csv" in files:
        files["log.csv"] = _columns(files["log.csv"])
    return {"run.yaml": settings, **files}


def _read(path: Path) -> Any:
    if path.suffix == ".csv":
        return read_log(path)
    if path.suffix == ".yaml":
        return load(str(path))
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; remove it to have it written again") from None


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float | str | None]]:
    """A log by column, so that each name appears once and not once per row; None for an empty cell."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_cell(row.get(name)) for row in rows] for name in names}


def _cell(value: float | None) -> float | str | None:
    """A number for JSON: whole numbers as int, NaN and infinity as text."""
    if value is None or not math.isfinite(value):
        return None if value is None else str(value)
    return int(value) if value == int(value) else value


def _rows(columns: Mapping[str, Sequence[float | str | None]]) -> list[dict[str, float]]:
    """A log by row, as `read_log` returns it."""
    cells = zip(*columns.values(), strict=True)
    return [{n: float(v) for n, v in zip(columns, row, strict=True) if v is not None} for row in cells]


def _named(data: str) -> str:
    """Data by name: an absolute path becomes the name of its file, without folder and suffix."""
    return Path(data).stem if Path(data).is_absolute() else data
