"""Small runs of two towers for the tests, also as a program that starts one."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from weince.lab.configure import LossConfig
from weince.lab.tasks.towers import exact_search
from weince.lab.tasks.towers.config import TowersRun
from weince.lab.tasks.towers.mining import MineConfig, mine_to
from weince.lab.tasks.towers.task import TASK, evaluate_run
from weince.lab.training.optimizers import OptimizerConfig

FAST = OptimizerConfig(name="adamw", lr=5e-3, weight_decay=0.01, schedule="cosine", warmup=0.1)


def settings(out, **changes):
    basis = TowersRun(
        heldout=0.2,
        batch=64,
        epochs=2,
        optimizer=FAST,
        loss=LossConfig(temperature=0.05),
        device="cpu",
        out=Path(out),
    )
    return replace(basis, **changes)


def train(out, **changes):
    return TASK.train(settings(out, **changes), bar=False)


def read_result(folder):
    return json.loads((folder / "evaluation.json").read_text())


def judged_again(folder):
    return json.loads(evaluate_run(folder).read_text())


if __name__ == "__main__":
    what, out, *arguments = sys.argv[1:]
    if what == "mine":
        exact_search.SHARD = 64
        mine_to(MineConfig("docstrings", arguments[0], heldout=0.2, device="cpu"), Path(out))
    else:
        changes = {name: eval(value) for name, value in (x.split("=", 1) for x in arguments)}
        train(out, **changes)
