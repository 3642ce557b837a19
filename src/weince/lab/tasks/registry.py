"""Tasks: the kinds of runs that a sweep supports, and everything that differs between them.

A configuration names its task (``task: text``; the default is images). Code that plans, evaluates or draws runs asks
the task, so that the facts about a kind of run are in one place.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weince.lab.configure import check_loss, unknown
from weince.lab.tasks.images import config as vision
from weince.lab.tasks.images.data import NAMES, load
from weince.lab.tasks.images.evaluation import fingerprint, labels_of
from weince.lab.tasks.sentences import train as text
from weince.lab.tasks.sentences.encoder import check_model
from weince.machine import find_device

MOST_PAIRS = 256
"""Largest batch on which a loss is checked before a sweep."""


class Shown(NamedTuple):
    """The name of a figure in words, and a short one for columns and axes."""

    words: str
    short: str


@dataclass(frozen=True)
class Task:
    """A kind of run.

    Attributes:
        settings: Class of the settings.
        free: Settings that do not change the figures.
        places: Settings that say where the data are; the data themselves are identified by a fingerprint.
        check: Raises a ValueError if the data of given settings are missing.
        check_loss: Raises a ValueError if the loss of given settings fails on random embeddings on their device.
        fingerprint: Returns the fingerprint of the data of given settings.
        weights: File or folder that training writes into a run's folder.
        measure: How a run is measured: a key of `weince.lab.study.tables.MEASURES`.
        figures: Figures that a comparison reports. The first one chooses tries and orders losses.
        validation: Name of the validation figure that chooses tries.
        unit: Unit of the figures.
        column: Column of the log with the quality of the encoder during training.
        tracked: Name of that quality.
        track: Setting for how often it is measured; empty if it always is.
        temperatures: Temperatures to try instead of those in the losses' search spaces, which are for images.
    """

    settings: type[Any]
    free: frozenset[str]
    places: tuple[str, ...]
    check: Callable[[Any], None]
    check_loss: Callable[[Any], None]
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
        """The figure that chooses tries (on validation data) and orders losses."""
        return next(iter(self.figures))

    @property
    def incidental(self) -> frozenset[str]:
        """Settings that may differ between two records of the same run."""
        return self.free | set(self.places)

    def data_names(self, given: Mapping[str, Any]) -> dict[str, str]:
        """The NAME of each place in ``--data NAME=PATH``: of a single place its data set, else the setting's name."""
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


def check_own_labels(run: vision.VisionRun) -> None:
    """Raise a ValueError if an encoder cannot be evaluated on the user's own images; named data sets have labels."""
    if run.data not in NAMES:
        labels_of(load(run.data, size=run.augment.size))


def _images(run: vision.VisionRun) -> str:
    return fingerprint(load(run.data, size=run.augment.size))


def _check_sentences(run: text.TextRun) -> None:
    for name, path in (("text", run.text), ("sts", run.sts)):
        if not path.is_file():
            raise ValueError(f"no such file: {path}; say where it is by --data {name}=FILE")
    check_model(run.model)


def _check_loss_of_images(run: vision.VisionRun) -> None:
    check_loss(
        run.loss,
        candidates=run.candidates,
        pairs=min(run.batch, MOST_PAIRS),
        width=run.projection,
        device=find_device(run.device),
    )


def _check_loss_of_sentences(run: text.TextRun) -> None:
    width = _width_of(run.model)
    if width is not None:
        pairs, device = min(run.batch, MOST_PAIRS), find_device(run.device)
        check_loss(run.loss, candidates="cross", pairs=pairs, width=width, device=device, ids=None)


def _width_of(model: str) -> int | None:
    """Width of a model's embeddings, which a loss may depend on; None if only the loaded model would tell."""
    check_model(model)
    path = Path(model) / "config.json"
    if not path.is_file():  # a hub name
        return None
    wanted = f"{path} must be a JSON object with a hidden_size of at least 1"
    mend = "save the model again, or name another"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wanted}; got no JSON ({error}): {mend}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{wanted}; got {str(found)[:80]}: {mend}")
    width: int | None = found.get("hidden_size")
    if width is not None and (type(width) is not int or width < 1):
        raise ValueError(f"{wanted}; got hidden_size {width!r}: {mend}")
    return width


TASKS = {
    "vision": Task(
        settings=vision.VisionRun,
        free=frozenset(vision.FREE_TO_CHANGE),
        places=("data",),
        check=_check_images,
        check_loss=_check_loss_of_images,
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
        check_loss=_check_loss_of_sentences,
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
