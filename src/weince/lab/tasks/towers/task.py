"""Two towers as a task: what studies and commands ask for."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weince.lab import settings
from weince.lab.configure import check_loss
from weince.lab.tasks.base import MOST_PAIRS, Measure, Shown, Task
from weince.lab.tasks.sentences.encoder import check_model
from weince.lab.tasks.towers.config import FREE_TO_CHANGE, TowersRun
from weince.lab.tasks.towers.encoders import BAG, BAG_WIDTH, MODEL
from weince.lab.tasks.towers.exact_search import embed
from weince.lab.tasks.towers.formats import EMBEDDED, load
from weince.lab.tasks.towers.training import EACH, RESULT, TowersTraining, result_text, write_result
from weince.lab.tasks.towers.two_towers import build_towers, fingerprint_of, stores_of
from weince.machine import find_device

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def _prepare(run: TowersRun, fabric: "Fabric") -> TowersTraining:
    return TowersTraining(run, fabric)


def _claim(run: TowersRun) -> None:
    settings.claim(run, run.out, free=FREE_TO_CHANGE)


def _finished(run: TowersRun) -> Path | None:
    if not (run.out / RESULT).is_file():
        return None
    _claim(run)
    before = read_result(run.out / RESULT).get("fingerprint")
    if Path(run.data).exists() or run.data == EMBEDDED:
        now = _fingerprint(run)
        if before not in (None, now):
            raise ValueError(
                f"{run.out} began with data and an encoder of fingerprint {before}; got {now}: choose another --out"
            )
    return run.out


def _load(run: TowersRun) -> Any:
    return load(run.data, heldout=run.heldout, size=run.image_size, negatives=run.negatives)


def _check(run: TowersRun) -> None:
    _load(run)
    for name in {run.model, run.query_model or run.model} - {BAG}:
        if ":" not in name and not (Path(name) / "modules.json").is_file() and "/" in name:
            check_model(name)


def _check_loss(run: TowersRun) -> None:
    check_loss(
        run.loss, candidates=run.candidates, pairs=min(run.batch, MOST_PAIRS),
        width=run.projection or BAG_WIDTH, device=find_device(run.device),
    )  # fmt: skip


def _fingerprint(run: TowersRun) -> str:
    return fingerprint_of(run, _load(run))


def read_result(path: Path) -> dict[str, Any]:
    """The figures of a run that is done."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to have it written anew") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (no keys and values): remove it to have it written anew")
    return content


def evaluate_run(folder: Path, *, data: str | None = None, device: str = "auto") -> Path:
    """Judge the saved towers of a run anew, and write ``evaluation.json`` and ``queries.npz``; returns the first.

    Args:
        folder: Folder of the run.
        data: Data to judge on instead of the run's; the files then have its name.
        device: Device to run on.
    """
    if not (folder / "run.yaml").is_file():
        raise FileNotFoundError(f"{folder} holds no run: it has no run.yaml")
    arguments = ["--config", str(folder / "run.yaml"), "--out", str(folder)]
    run: TowersRun = settings.read(TowersRun, arguments, command="weince evaluate", examples="")
    if data is not None:
        from dataclasses import replace

        run = replace(run, data=data, negatives=None)
    if not (folder / RESULT).is_file():
        raise FileNotFoundError(f"{folder} holds no {RESULT}: train the run to its end first")
    pairs = _load(run)
    where = find_device(device)
    towers = build_towers(run, pairs, folder=folder).to(where).eval()
    stores = stores_of(run, towers, pairs, where)

    def embedded(split: str, corpus: str) -> tuple[Tensor, Tensor]:
        asked, searched = np.unique(pairs.splits[split].query), pairs.searched(split, corpus)
        return (
            embed(towers.query, stores["query"], asked, what="queries"),
            embed(towers.document, stores["document"], searched, what="documents"),
        )

    with torch.no_grad():
        before = read_result(folder / RESULT).get("fingerprint", "")
        known = before if data is None else pairs.fingerprint
        return write_result(run, pairs, embedded, fingerprint=known, other="" if data is None else pairs.name)


def _report(folder: Path, data: str | None, device: str, quick: bool) -> tuple[str, Path]:
    path = evaluate_run(folder, data=data, device=device)
    return result_text(read_result(path)), path


SHOWN = {
    "ndcg": Shown("nDCG@10", "nDCG@10"),
    "recall_1": Shown("recall at 1", "R@1"),
    "recall_10": Shown("recall at 10", "R@10"),
    "recall_100": Shown("recall at 100", "R@100"),
    "mrr": Shown("MRR@10", "MRR@10"),
    "map": Shown("MAP", "MAP"),
}

TASK = Task(
    settings=TowersRun,
    prepare=_prepare,
    claim=_claim,
    finished=_finished,
    free=frozenset(FREE_TO_CHANGE),
    places=("data",),
    check=_check,
    report=_report,
    check_loss=_check_loss,
    fingerprint=_fingerprint,
    weights=MODEL,
    measures={
        "towers": Measure(
            RESULT,
            {name: f"{shown.words}, x 100" for name, shown in SHOWN.items()},
            "{}_test",
            "{}_validation",
            digits=2,
        )
    },
    figures=SHOWN,
    validation="nDCG@10 on validation queries",
    unit="x 100",
    column="ndcg",
    tracked=Shown("nDCG@10 on validation queries", "nDCG@10"),
    each=EACH,
    temperatures=(0.03, 0.05, 0.02, 0.1, 0.01),
    search_spaces={
        "siglip": [
            {"scale": s, "bias": b} for s, b in ((30.0, -15.0), (40.0, -20.0), (20.0, -10.0), (15.0, -10.0))
        ],
        "focal": [{"temperature": 0.03, "gamma": gamma} for gamma in (0.5, 1.0)],
        "kl_ball": [{"radius": radius} for radius in (5.5, 7.0, 4.0, 3.0)],
    },
)
"""Retrieval: text to text, or captions and images."""
