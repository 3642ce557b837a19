"""What is worth keeping of a run: what it was, how it went, what it reached. Some 12 kB, without its weights."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml

from weince.files import write_text_aside
from weince.lab.reproduce.plan import Run

KEPT = ("log.csv", "made.json")


def keep_records(runs: Sequence[Run], folder: Path) -> None:
    """Copy the records of finished runs to ``folder/runs``, where a table can be made of them.

    ``run.yaml`` loses the paths of this machine: images are named, and ``out`` is the run's place among the others.
    """
    for run in runs:
        place = folder / "runs" / run.name
        if place.absolute() == run.folder:
            continue  # the records are kept where the runs are
        place.mkdir(parents=True, exist_ok=True)
        for source in (run.result, *(run.folder / name for name in KEPT)):
            if source.is_file():
                shutil.copyfile(source, place / source.name)
        settings = yaml.safe_load((run.folder / "run.yaml").read_text(encoding="utf-8"))
        settings |= {"data": _named(settings["data"]), "out": f"runs/{run.name}"}
        write_text_aside(place / "run.yaml", yaml.safe_dump(settings, sort_keys=False), "record")


def _named(data: str) -> str:
    """Images by name: those of a file have its name, without its folder and ending."""
    return Path(data).stem if Path(data).is_absolute() else data
