"""Tasks: the kinds of runs that a sweep knows, and all that differs between them.

A configuration names its task (``task: text``; images if it names none). Whoever plans, judges or draws runs asks the
task, so that what is said of a kind of runs stands here once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weince.lab.configure import unknown
from weince.lab.evaluate import fingerprint
from weince.lab.text import train as text
from weince.lab.text.encoder import check_model
from weince.lab.vision import config as vision
from weince.lab.vision.data import NAMES, load


class Shown(NamedTuple):
    """A figure in words, and short for the head of a column or an axis."""

    words: str
    short: str


@dataclass(frozen=True)
class Task:
    """A kind of runs.

    Attributes:
        settings: Class of their settings.
        free: Settings that leave their figures as they are.
        places: Settings that say where their data are. What is there is told by a fingerprint.
        check: Raises a ValueError if the data of some settings are not there.
        fingerprint: Tells the data of some settings from others.
        weights: What training leaves in a run's folder.
        measure: How they are judged: a key of `weince.lab.reproduce.tables.MEASURES`.
        figures: What a comparison reports. By the first a try is chosen and losses are ordered.
        validation: What the first is called on the data that choose.
        unit: Of the figures.
        column: Of the log, which says how good the encoder is along the way.
        tracked: What that is called.
        track: Setting that says how often that is measured; empty if it always is.
        temperatures: To try instead of those of the losses' search spaces, which are for images.
    """

    settings: type[Any]
    free: frozenset[str]
    places: tuple[str, ...]
    check: Callable[[Any], None]
    fingerprint: Callable[[Any], str]
    weights: str
    measure: str
    figures: Mapping[str, Shown]
    validation: str
    unit: str
    column: str
    tracked: Shown
    track: str = ""
    temperatures: tuple[float, ...] = ()

    @property
    def main(self) -> str:
        """The figure that a try is chosen by, on validation, and losses are ordered by."""
        return next(iter(self.figures))

    @property
    def incidental(self) -> frozenset[str]:
        """Settings in which two runs may differ that are the same run."""
        return self.free | set(self.places)

    def data_names(self, given: Mapping[str, Any]) -> dict[str, str]:
        """What ``--data NAME=PATH`` calls each place: a single one by its data set, several by their settings."""
        if len(self.places) > 1:
            return {place: place for place in self.places}
        return {place: str(given.get(place, "")) for place in self.places}


def task_of(content: Mapping[str, Any]) -> Task:
    """The task of a configuration, or of a ``run.yaml``."""
    name = str(content.get("task", "vision"))
    if name not in TASKS:
        raise ValueError(unknown("task", name, TASKS))
    return TASKS[name]


def _check_images(run: vision.VisionRun) -> None:
    if run.data not in NAMES and not Path(run.data).exists():
        raise ValueError(f"--data {run.data}: no such path, nor a data set ({', '.join(NAMES)})")


def _images(run: vision.VisionRun) -> str:
    return fingerprint(load(run.data, size=run.augment.size))


def _check_sentences(run: text.TextRun) -> None:
    for name, path in (("text", run.text), ("sts", run.sts)):
        if not path.is_file():
            raise ValueError(f"no such file: {path}; say where it is by --data {name}=FILE")
    check_model(run.model)


TASKS = {
    "vision": Task(
        settings=vision.VisionRun,
        free=frozenset(vision.FREE_TO_CHANGE),
        places=("data",),
        check=_check_images,
        fingerprint=_images,
        weights="model.safetensors",
        measure="evaluation",
        figures={
            "linear": Shown("linear accuracy", "linear"),
            "r1": Shown("recall at 1", "R@1"),
            "knn": Shown("vote of the 50 nearest neighbours", "vote"),
            "map_r": Shown("MAP@R", "MAP@R"),
        },
        validation="validation figure of linear accuracy",
        unit="%",
        column="vote",
        tracked=Shown("vote of the 50 nearest neighbours on validation images", "vote"),
        track="track_every",
    ),
    "text": Task(
        settings=text.TextRun,
        free=frozenset(text.FREE_TO_CHANGE),
        places=("text", "sts", "model"),
        check=_check_sentences,
        fingerprint=text.fingerprint,
        weights="best",
        measure="sts",
        figures={
            "stsb": Shown("Spearman on STS-B", "STS-B"),
            "sts": Shown("mean Spearman of the STS tasks", "STS mean"),
        },
        validation="Spearman on STS-B's dev split",
        unit="x 100",
        column="dev",
        tracked=Shown("Spearman on STS-B's dev split", "STS-B dev"),
        temperatures=(0.05, 0.02, 0.1, 0.01),
    ),
}
