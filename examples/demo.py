"""Pretrain a small encoder on handwritten digits with InfoNCE and with WEINCE, and compare what they learned.

    python examples/demo.py                 4 losses, 5 seeds, and a page: about 2 minutes on 2 cores
    python examples/demo.py --seeds 0 1 --epochs 10 --out runs/short

Data: the 1,797 digits of 8 x 8 pixels that come with scikit-learn, a fifth of them held out for testing. Each
encoder is trained without labels, then frozen and judged on the held-out digits. No loss was tuned on these images:
the temperatures are the paper's 0.5, and 0.2 for InfoNCE as well, because a lower temperature alone explains much of
what the paper reports.

The page shows the table, the training curves, and which link the embeddings of two of the encoders ask for. The
runs are kept beside it, in OUT-runs: what is finished is not trained again, what was cut goes on.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from weince.diagnose import check_out, write_diagnosis
from weince.diagnose.settings import QUICK
from weince.diagnose.training import (
    Comparison,
    Opening,
    curves_section,
    headline,
    results_section,
)
from weince.evt.intervals import t_interval
from weince.lab import settings
from weince.lab.configure import LossConfig
from weince.lab.evaluate import LabelledFeatures, extract, knn
from weince.lab.vision.config import VisionRun
from weince.lab.vision.data import ImageData, load
from weince.lab.vision.log import read_log
from weince.lab.vision.runs import FREE_TO_CHANGE, build_model, load_model, run_pairs
from weince.lab.vision.train import train
from weince.progress import bars

LOSSES = {
    "InfoNCE, τ = 0.5": LossConfig("infonce", 0.5),
    "InfoNCE, τ = 0.2": LossConfig("infonce", 0.2),
    "WEINCE, paper": LossConfig("paper", 0.5),
    "WEINCE, released": LossConfig("released", 0.5),
}
DIAGNOSED = ("InfoNCE, τ = 0.5", "WEINCE, paper")
CAUTION = (
    "Differences smaller than the intervals mean nothing; no loss was tuned, and digits are small and easy."
)
READ = (
    f"{CAUTION} The last row, encoders with their first random weights, says how easy. InfoNCE stands at two "
    "temperatures because a lower one alone explains much of what is reported for WEINCE, here at 0.5."
)
NOTES = (
    "Intervals are over pretraining seeds. All encoders are judged on the same 355 held-out digits, 0.3 points each.",
    "Linear probe: logistic regression (scikit-learn, C = 1, until it converges) on the standardised features of the "
    "1,442 training digits. The protocol of weince evaluate, 100 epochs of Adam at 0.0003, would stop long before on "
    "so few.",
    "Neighbours: by that protocol, the weighted vote of the 50 nearest by cosine and recall at 1, mean of 5 splits.",
)


def plan(out: Path, seeds: Sequence[int], epochs: int) -> dict[str, list[VisionRun]]:
    """The runs of each loss: configs/digits_tiny.yaml with another loss and seed."""
    base = settings.read(VisionRun, ["--config", "digits_tiny"], command="demo", examples="")
    folder = out.with_name(f"{out.name}-runs") / f"epochs-{epochs}"
    return {
        name: [
            replace(base, loss=loss, seed=seed, epochs=epochs, device="cpu",
                    out=folder / f"{loss.preset}-{loss.temperature:g}-seed-{seed}")
            for seed in seeds
        ]
        for name, loss in LOSSES.items()
    }  # fmt: skip


def judge(encoder: nn.Module, data: ImageData) -> dict[str, float]:
    """Accuracies of a frozen encoder on the held-out digits, in percent."""
    bank, test = (
        LabelledFeatures(extract(encoder, images, progress=False), torch.as_tensor(labels))
        for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels))
    )
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000)).fit(*map(np.asarray, bank))
    near = knn(bank, test, progress=False).test
    return {
        "Linear probe": 100 * probe.score(*map(np.asarray, test)),
        "50 neighbours": float(np.mean(near.vote)),
        "1 neighbour": float(np.mean(near.recall[1])),
    }


def trained(run: VisionRun) -> nn.Module:
    """The encoder of a run, trained now if it is not yet."""
    settings.claim(run, run.out, free=FREE_TO_CHANGE)  # refuses a folder with other settings
    if not (run.out / "model.safetensors").exists():
        train(run, bar=False)
    return load_model(run.out)[1].encoder


def untrained(run: VisionRun) -> nn.Module:
    """The encoder with which a run begins."""
    torch.manual_seed(run.seed)
    return build_model(run).encoder


def compare(plans: Mapping[str, Sequence[VisionRun]]) -> Comparison:
    """Train what is not trained yet, and judge everything: the figures of each loss, a value per seed."""
    jobs = [(name, trained, run) for name, runs in plans.items() for run in runs]
    jobs += [("Untrained", untrained, run) for run in next(iter(plans.values()))]
    data = load(jobs[0][2].data, size=jobs[0][2].augment.size)
    found: dict[str, dict[str, list[float]]] = {}
    with bars() as bar:
        task = bar.add_task("", total=len(jobs))
        for name, make, run in jobs:
            bar.update(task, description=f"{name}, seed {run.seed}")
            for figure, value in judge(make(run), data).items():
                found.setdefault(name, {}).setdefault(figure, []).append(value)
            bar.advance(task)
    return found


def print_table(console: Console, comparison: Comparison, title: str) -> None:
    table = Table("", title=title)
    for figure in next(iter(comparison.values())):
        table.add_column(figure, justify="right")
    for name, figures in comparison.items():
        table.add_row(name, *(t_interval(values).text(1) for values in figures.values()))
    console.print(table)
    console.print(CAUTION)


def demo(out: Path, seeds: Sequence[int], epochs: int) -> None:
    """Train, print the table, write the page."""
    torch.set_num_threads(1)  # the tensors are small: a second thread would mostly wait
    console = Console()
    check_out(out)
    plans = plan(out, seeds, epochs)
    comparison = compare(plans)
    print_table(
        console,
        comparison,
        f"Accuracy in %, {epochs} epochs, mean ± 95 % interval of {len(seeds)} seeds",
    )

    said = headline(comparison, "Linear probe")
    logs = {name: [read_log(run.out / "log.csv") for run in runs] for name, runs in plans.items()}
    opening = Opening(
        "Four contrastive losses on handwritten digits",
        f"Small encoders, {len(seeds)} per loss, {epochs} epochs each: what they learned, how training went, and "
        "what the embeddings of two of them say about the link.",
        lambda gallery: [
            results_section(gallery, comparison, said=said, read=READ, notes=NOTES),
            curves_section(gallery, logs),
        ],
        diagnosis="Which link the embeddings ask for",
    )
    pairs = run_pairs([plans[name][0].out for name in DIAGNOSED], names=DIAGNOSED)
    command = f"python examples/demo.py --seeds {' '.join(map(str, seeds))} --epochs {epochs} --out {out}"
    page = write_diagnosis(pairs, out, replace(QUICK, temperature=0.5), opening=opening, command=command)
    console.print(f"Table, training curves, and which link two of these encoders ask for: {page}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=range(5), help="an encoder each (default: 0 to 4)"
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: 20)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the page")
    options = parser.parse_args()
    if min(options.seeds) < 0 or len(set(options.seeds)) < len(options.seeds):
        parser.error(f"--seeds must be different and at least 0; got {' '.join(map(str, options.seeds))}")
    try:
        demo(options.out, options.seeds, options.epochs)
    except (ValueError, OSError) as error:  # its message is all there is to say
        parser.exit(1, f"demo: {error}\n")


if __name__ == "__main__":
    main()
