"""The settings of a run of two towers, as in ``run.yaml`` and in the options of ``weince train``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weince.lab import settings
from weince.lab.configure import LossConfig
from weince.lab.tasks.towers.encoders import BAG
from weince.lab.tasks.towers.evaluation import find_metric
from weince.lab.tasks.towers.formats import EMBEDDED
from weince.lab.training.optimizers import OptimizerConfig
from weince.machine import check_device

FREE_TO_CHANGE = {"out", "device", "devices", "checkpoint_every", "data", "tensorboard"}
"""Settings that may change when a run resumes: files may have moved, and another device may be free."""

Precision = Literal["fp32", "tf32", "bf16"]


@dataclass(frozen=True)
class TowersRun:
    """A run of two towers: texts, or captions and images.

    Args:
        task: Kind of run.
        data: ``docstrings`` (embedded); a BEIR folder; pairs in a .csv, .tsv, .jsonl or .parquet with the columns
            query and positive; a dataset folder; images with captions (an .npz, or a folder with captions.csv).
        model: Encoder of documents, and of queries if ``query_model`` is not set: ``bag`` (word pieces, new weights),
            a sentence-transformers model (folder or hub name) or your own, my_package:factory. For images: resnet18,
            resnet50, vit_small, tiny, timm:NAME or torchvision:NAME.
        query_model: Encoder of queries, if it is another one; of captions ``bag`` by default.
        query_prompt: Text in front of each query.
        document_prompt: Text in front of each document.
        train: ``all`` weights, or only a linear ``head`` on embeddings that are computed once. ``auto``: a head if
            the encoder is a sentence-transformers model and the device a CPU, else all.
        projection: Width of the embeddings; by default that of the encoders if they agree, else 256.
        loss: The loss; its options, such as ``loss.options.ignore_above``, are those of the class.
        candidates: ``cross`` (queries look for documents) or ``clip`` (both look for each other).
        optimizer: How weights are updated.
        loss_lr: Learning rate of what the loss learns, such as a temperature, as a multiple of ``optimizer.lr``.
        head_lr: Learning rate of a head on frozen embeddings, as a multiple of ``optimizer.lr``.
        clip: Largest norm of the gradient.
        epochs: Passes over the training pairs.
        batch: Pairs in the global batch.
        micro_batch: Texts to embed at a time, with cached gradients; null for the whole batch at once.
        hard: Hard negatives of each query in a batch.
        shared: Hard negatives are negatives of all queries; else only of their own.
        negatives: File with hard negatives, from ``weince mine``; by default the columns negative, ... of the data.
        mine_every: Epochs between two searches for hard negatives with the encoder as it is then; 0 for none.
        mine_margin: Mined negatives score at least this much below the positive; null for no limit.
        leave_out: Pairs that are no negatives: ``duplicates`` (equal texts, and known answers of the query), also
            ``groups`` (documents of a group), or ``nothing``.
        corpus: Search the documents of the ``split`` or ``all``.
        metric: A further figure, my_package:metric.
        heldout: Share of the pairs to hold out, by groups, for each of valid and test that the data lack.
        pairs: Use only this many training pairs.
        max_length: Word pieces of a text to keep; null for what the model says.
        image_size: Height and width of images.
        precision: ``fp32``, ``tf32`` or ``bf16`` (autocast) in the encoders in training; the loss is always in fp32.
        eval_every: Steps between evaluations on validation queries; 0 for the end of each epoch.
        checkpoint_every: Evaluations between checkpoints; 0 for none, and then a run that is stopped starts anew.
        seed: Seed of new weights, the order of the pairs and the dropout.
        device: ``auto`` (a CUDA device if there is one, else the CPU), ``cpu``, ``cuda``, ``cuda:1`` or ``mps``.
        devices: Processes, one per GPU; torchrun's number takes precedence.
        out: Folder of the run. A run with the same settings in it is resumed.
        tensorboard: Write TensorBoard's event files too.
    """

    task: Literal["towers"] = "towers"
    data: str = EMBEDDED
    model: str = BAG
    query_model: str | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    train: Literal["auto", "all", "head"] = "auto"
    projection: int | None = None
    loss: LossConfig = LossConfig(preset="infonce", temperature=0.03)
    candidates: Literal["cross", "clip"] = "cross"
    optimizer: OptimizerConfig = OptimizerConfig(
        name="adamw", lr=1e-4, weight_decay=0.01, schedule="cosine", warmup=0.1
    )
    loss_lr: float = 10.0
    head_lr: float = 10.0
    clip: float = 1.0
    epochs: int = 1
    batch: int = 512
    micro_batch: int | None = None
    hard: int = 0
    shared: bool = True
    negatives: Path | None = None
    mine_every: int = 0
    mine_margin: float | None = None
    leave_out: Literal["nothing", "duplicates", "groups"] = "duplicates"
    corpus: Literal["split", "all"] = "all"
    metric: str | None = None
    heldout: float = 0.1
    pairs: int | None = None
    max_length: int | None = None
    image_size: int = 64
    precision: Precision = "fp32"
    eval_every: int = 0
    checkpoint_every: int = 1
    seed: int = 0
    device: str = "auto"
    devices: int = 1
    out: Path = Path("runs/towers")
    tensorboard: bool = False

    def __post_init__(self) -> None:
        least = {"batch": 2, "epochs": 1, "devices": 1, "image_size": 8}
        least |= dict.fromkeys(("seed", "hard", "mine_every", "eval_every", "checkpoint_every"), 0)
        settings.check_range(self, least, below={"epochs": 31, "batch": 31, "hard": 16, "seed": 63})
        for name, smallest in {"projection": 1, "micro_batch": 1, "max_length": 3, "pairs": 2}.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name} must be at least {smallest}; got {value}")
        settings.check_positive(self, "clip", "loss_lr", "head_lr")
        if not 0 < self.heldout <= 0.4:
            raise ValueError(f"heldout must be above 0 and at most 0.4; got {self.heldout}")
        if self.mine_every and not self.hard:
            raise ValueError("mine_every wants hard, the number of hard negatives; got hard 0")
        if self.metric is not None:
            find_metric(self.metric)
        check_device(self.device)
