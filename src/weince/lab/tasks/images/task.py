"""The task of runs on images: what studies, commands and records ask for."""

from pathlib import Path
from typing import Any

from weince.lab.configure import check_loss
from weince.lab.tasks.base import MOST_PAIRS, Measure, Shown, Task
from weince.lab.tasks.images.config import FREE_TO_CHANGE, VisionRun
from weince.lab.tasks.images.data import NAMES, load
from weince.lab.tasks.images.evaluation import fingerprint, labels_of
from weince.lab.tasks.images.evaluation.knn import RECALLS
from weince.lab.tasks.images.runs import claim, evaluate_run, evaluation_path
from weince.lab.tasks.images.score_tails import FRECHET, LINK
from weince.lab.tasks.images.training import ImageTraining
from weince.machine import find_device


def check(run: VisionRun) -> None:
    """Raise a ValueError if the images of a run are missing."""
    if run.data not in NAMES and not Path(run.data).exists():
        raise ValueError(f"--data {run.data}: no such path, nor a data set ({', '.join(NAMES)})")


def check_own_labels(run: VisionRun) -> None:
    """Raise a ValueError if an encoder cannot be evaluated on the user's own images; named data sets have labels."""
    if run.data not in NAMES:
        labels_of(load(run.data, size=run.augment.size))


def check_loss_of(run: VisionRun) -> None:
    pairs, device = min(run.batch, MOST_PAIRS), find_device(run.device)
    check_loss(run.loss, candidates=run.candidates, pairs=pairs, width=run.projection, device=device)


def fingerprint_of(run: VisionRun) -> str:
    return fingerprint(load(run.data, size=run.augment.size))


def evaluate(folder: Path, device: str) -> None:
    evaluate_run(folder, device=device)


def report(folder: Path, data: str | None, device: str, quick: bool) -> tuple[Any, Path]:
    from weince.lab.tasks.images.evaluation import table

    evaluation = evaluate_run(folder, data=data, device=device, quick=quick)
    return table(evaluation), evaluation_path(folder, data=data, quick=quick)


MEASURES = {
    "evaluation": Measure(
        "evaluation.json",
        {
            "linear": "Linear probe, %",
            "knn": "Weighted vote of the 50 nearest neighbours, %",
            **{f"r{k}": f"Recall at {k}, %" for k in RECALLS},
            "map_r": "MAP@R, %",
        },
        "{}_test_mean",
        "{}_validation_mean",
        digits=2,
        take=evaluate,
    ),
    "link": LINK,
    "frechet": FRECHET,
}

TASK = Task(
    settings=VisionRun,
    prepare=ImageTraining,
    claim=claim,
    free=frozenset(FREE_TO_CHANGE),
    places=("data",),
    check=check,
    check_measured=check_own_labels,
    report=report,
    check_loss=check_loss_of,
    fingerprint=fingerprint_of,
    weights="model.safetensors",
    measures=MEASURES,
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
)
