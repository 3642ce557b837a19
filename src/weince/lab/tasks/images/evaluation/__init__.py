"""Evaluate a frozen encoder by one protocol: compute features once, then linear probe and nearest neighbours.

    from weince.lab.tasks.images.evaluation import evaluate

    evaluation = evaluate(encoder, data, device="cuda")
    evaluation.record()["linear_test_mean"]

All figures are in percent.
"""

import hashlib
import math
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from weince.lab.tasks.images.evaluation.features import LabelledFeatures, Precision, extract
from weince.lab.tasks.images.evaluation.knn import Knn, Neighbours, knn
from weince.lab.tasks.images.evaluation.linear import BATCH, EPOCHS, LinearProbe, linear_probe
from weince.lab.tasks.images.evaluation.protocol import SEEDS, split

if TYPE_CHECKING:
    from rich.table import Table

    from weince.lab.tasks.images.data import ImageData, Labels

__all__ = ["Evaluation", "Knn", "LabelledFeatures", "LinearProbe", "evaluate", "extract", "fingerprint", "knn",
           "linear_probe", "table"]  # fmt: skip

SPLIT_SEED = 1  # of the linear probe
QUICK_EPOCHS, QUICK_STEPS = 10, 500


class Evaluation(NamedTuple):
    """Results of one encoder on one data set.

    Attributes:
        data: Name of the data set.
        fingerprint: Fingerprint of its images and labels.
        width: Width of the features.
        quick: Whether the protocol was shortened.
        linear: Results of the linear probes, one per seed.
        knn: Results of the nearest neighbours, one per split.
    """

    data: str
    fingerprint: str
    width: int
    quick: bool
    linear: LinearProbe
    knn: Knn

    def record(self) -> dict[str, Any]:
        """A flat dictionary for JSON: for each figure its mean over the seeds, and the value of each seed."""
        figures: dict[str, Any] = {
            "data": self.data,
            "fingerprint": self.fingerprint,
            "width": self.width,
            "quick": self.quick,
            "probe_seeds": list(self.linear.seeds),
            "split_seeds": list(self.knn.seeds),
        }
        for kind in ("validation", "test"):
            neighbours: Neighbours = getattr(self.knn, kind)
            values = {"linear": getattr(self.linear, kind), "knn": neighbours.vote}
            values |= {f"r{k}": recall for k, recall in neighbours.recall.items()}
            values["map_r"] = (neighbours.map_r,)
            for name, by_seed in values.items():
                figures[f"{name}_{kind}_mean"] = statistics.fmean(by_seed)
                figures[f"{name}_{kind}"] = list(by_seed)
        return figures


def labels_of(data: "ImageData") -> "tuple[Labels, Labels]":
    """Labels of the training and of the test images, by which an encoder is evaluated.

    Raises:
        ValueError: The data have no labels, or a single class.
    """
    if data.train_labels is None or data.test_labels is None:
        raise ValueError(
            f"{data.name} has no labels, which an evaluation needs: give labelled images (--data), in folders by "
            "class or as an .npz with labels; weince diagnose needs none"
        )
    if len(np.unique(data.train_labels)) < 2:
        raise ValueError(f"an evaluation needs two classes or more; got one in {data.name}")
    return data.train_labels, data.test_labels


def evaluate(
    encoder: nn.Module,
    data: "ImageData",
    *,
    device: str | torch.device = "cpu",
    precision: Precision = "fp32",
    quick: bool = False,
    progress: bool = True,
) -> Evaluation:
    """Evaluate a frozen encoder.

    The labelled training set is split 80/20 by class. The linear layer (split seed 1, probe seeds 1 to 5) and the
    bank of neighbours (split seeds 1 to 5) use the 80 %; they are evaluated on the 20 % (validation) and on the whole
    test set. Choose a configuration only by the validation figures.

    Args:
        encoder: Maps ``(b, 3, height, width)`` in [0, 1] to ``(b, f)``.
        data: The images.
        device: Where to compute.
        precision: Precision of the encoder, ``"fp32"`` or ``"bf16"``.
        quick: Use one seed of each kind, and ten probe epochs instead of 100, or more (up to 100) if that is fewer
            than 500 steps. For a first look, not for figures to report.
        progress: Show bars.
    """
    train_labels, test_labels = labels_of(data)
    train, test = (
        LabelledFeatures(
            extract(encoder, images, device=device, precision=precision, name=f"{kind} features",
                    progress=progress),
            torch.as_tensor(np.asarray(labels), dtype=torch.int64, device=device),
        )
        for kind, images, labels in (
            ("train", data.train_images, train_labels),
            ("test", data.test_images, test_labels),
        )
    )  # fmt: skip
    parts = split(train_labels, seed=SPLIT_SEED)
    seeds = SEEDS[:1] if quick else SEEDS
    probes = linear_probe(
        train,
        test,
        split=parts,
        seeds=seeds,
        epochs=quick_epochs(len(parts.train)) if quick else EPOCHS,
        device=device,
        progress=progress,
    )
    neighbours = knn(train, test, seeds=seeds, device=device, progress=progress)
    width = train.features.shape[1]
    return Evaluation(data.name, fingerprint(data), width, quick, probes, neighbours)


def quick_epochs(rows: int) -> int:
    """Epochs of a quick probe on ``rows`` rows: ten, or more if ten are too few steps to leave chance level."""
    return min(EPOCHS, max(QUICK_EPOCHS, math.ceil(QUICK_STEPS / math.ceil(rows / BATCH))))


def fingerprint(data: "ImageData") -> str:
    """Sixteen hexadecimal digits that identify a version of the data."""
    digest = hashlib.blake2b(digest_size=8)
    for array in (data.train_images, data.train_labels, data.test_images, data.test_labels):
        if array is None:
            continue
        digest.update(str(array.shape).encode())
        for start in range(0, len(array), 4096):  # memory-mapped images are read piece by piece
            digest.update(np.ascontiguousarray(array[start : start + 4096]).data)
    return digest.hexdigest()


def table(evaluation: Evaluation) -> "Table":
    """The figures as a table for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    record = evaluation.record()
    title = f"{escape(evaluation.data)}, mean over seeds, %" + (
        " (quick: a look only)" if evaluation.quick else ""
    )
    drawn = Table("", title=title)
    drawn.add_column("validation", justify="right")
    drawn.add_column("test", justify="right")
    names = {"linear": "linear probe", "knn": "vote of the 50 nearest"}
    names |= {f"r{k}": f"recall at {k}" for k in evaluation.knn.test.recall}
    names["map_r"] = "MAP@R"
    for key, name in names.items():
        drawn.add_row(name, *(f"{record[f'{key}_{kind}_mean']:.2f}" for kind in ("validation", "test")))
    return drawn
