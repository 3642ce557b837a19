"""The task of runs on sentences: what studies, commands and records ask for."""

import json
from pathlib import Path
from typing import Any

from weince.files import check_file
from weince.lab import settings
from weince.lab.configure import check_loss
from weince.lab.tasks.base import MOST_PAIRS, Measure, Shown, Task
from weince.lab.tasks.sentences.config import FREE_TO_CHANGE, TextRun
from weince.lab.tasks.sentences.encoder import check_model
from weince.lab.tasks.sentences.training import SentenceTraining, fingerprint
from weince.machine import find_device


def claim(run: TextRun) -> None:
    settings.claim(run, run.out, free=FREE_TO_CHANGE)


def finished(run: TextRun) -> Path | None:
    """The best encoder of a run that is done. Raises a ValueError if the folder holds another run."""
    path = run.out / "result.json"
    if not path.is_file():
        return None
    mend = "remove it to have it written anew"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {mend}") from None
    if not isinstance(result, dict):
        raise ValueError(f"{path} is damaged (no keys and values): {mend}")
    before, now = result.get("fingerprint"), fingerprint(run) if run.text.is_file() else None
    if None not in (before, now) and before != now:
        raise ValueError(
            f"{run.out} began with data and an encoder of fingerprint {before}; got {now}: choose another --out"
        )
    claim(run)
    return run.out / "best"


def check(run: TextRun) -> None:
    """Raise a ValueError if a file or the model of a run is missing."""
    for name, path in (("text", run.text), ("sts", run.sts)):
        if not path.exists() or path.is_dir():
            raise ValueError(f"no such file: {path}; say where it is by --data {name}=FILE")
        check_file(path)
    check_model(run.model)


def check_loss_of(run: TextRun) -> None:
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
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wanted}; got no JSON ({error}): {mend}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{wanted}; got {str(content)[:80]}: {mend}")
    width: int | None = content.get("hidden_size")
    if width is not None and (type(width) is not int or width < 1):
        raise ValueError(f"{wanted}; got hidden_size {width!r}: {mend}")
    return width


TASK = Task(
    settings=TextRun,
    prepare=SentenceTraining,
    finished=finished,
    claim=claim,
    free=frozenset(FREE_TO_CHANGE),
    places=("text", "sts", "model"),
    check=check,
    check_loss=check_loss_of,
    fingerprint=fingerprint,
    weights="best",
    measures={
        "sts": Measure(
            "result.json",
            {"stsb": "Spearman on STS-B, x 100", "sts": "Mean Spearman of the STS tasks, x 100"},
            "{}_test",
            "{}_validation",
            {"stsb_validation": "dev", "stsb_test": "tasks.STSB", "sts_test": "mean"},
        )
    },
    figures={
        "stsb": Shown("Spearman on STS-B", "STS-B"),
        "sts": Shown("mean Spearman of the STS tasks", "STS mean"),
    },
    validation="Spearman on STS-B's dev split",
    unit="x 100",
    column="dev",
    tracked=Shown("Spearman on STS-B's dev split", "STS-B dev"),
    temperatures=(0.05, 0.02, 0.1, 0.01),
)
