"""The settings of a run on sentences, as in ``run.yaml`` and in the options of ``weince train``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from weince.lab.configure import LossConfig
from weince.lab.settings import check_positive, check_range
from weince.lab.tasks.sentences.encoder import Pooling
from weince.machine import check_device

Precision = Literal["fp32", "tf32", "bf16"]

FREE_TO_CHANGE = {"out", "device", "text", "sts", "model", "checkpoint_every", "graph"}
"""Settings that may change when a run resumes: files may have moved, and another device may be free."""


@dataclass(frozen=True)
class TextRun:
    """A run on sentences or on pairs of sentences; the defaults are unsupervised SimCSE's for BERT-base.

    Args:
        text: File with one sentence per line, or one pair of sentences with a tab between them.
        model: Encoder to start from: a folder, or a hub name.
        sts: Tab-separated file of STS pairs: task, subset, split, score and two sentences.
        out: Folder of the run. A run with the same settings in it is resumed.
        task: Kind of run.
        loss: The loss.
        batch: Sentences in a batch.
        lr: Learning rate of AdamW at the start; it falls linearly to 0.
        epochs: Passes over the sentences.
        max_length: Word pieces of a sentence to keep in training.
        seed: Seed of the order of sentences, the dropout and the head.
        pairs: Train on pairs of sentences instead of each sentence twice.
        pooling: Vector of a sentence: ``cls`` for that of its first token, ``mean`` for the mean over all tokens.
        head: Put a layer (linear, tanh) on top of the encoder in training only.
        clip: Largest norm of the gradient.
        eval_every: Steps between evaluations on STS-B's dev split.
        checkpoint_every: Evaluations between checkpoints; 0 for none, and then a run that is stopped starts anew.
        log_every: Steps between lines of the log.
        precision: ``fp32``, ``tf32`` or ``bf16`` (autocast) in the encoder; the loss is always in fp32.
        sentences: Use only this many sentences or pairs, from the beginning of the file.
        device: ``auto`` (a CUDA device if there is one, else the CPU), ``cpu``, ``cuda`` or ``mps``.
        graph: Run the step as a CUDA graph: faster for a small encoder. All sentences are padded to ``max_length``.
    """

    text: Path = Path("sentences.txt")
    model: str = "bert-base-uncased"
    sts: Path = Path("sts.tsv")
    out: Path = Path("runs/simcse")
    task: Literal["text"] = "text"
    loss: LossConfig = LossConfig(preset="infonce", temperature=0.05)
    batch: int = 64
    lr: float = 3e-5
    epochs: int = 1
    max_length: int = 32
    seed: int = 0
    pairs: bool = False
    pooling: Pooling = "cls"
    head: bool = True
    clip: float = 1.0
    eval_every: int = 125
    checkpoint_every: int = 1
    log_every: int = 25
    precision: Precision = "fp32"
    sentences: int | None = None
    device: str = "auto"
    graph: bool = False

    def __post_init__(self) -> None:
        least = {"batch": 2, "epochs": 1, "max_length": 3, "eval_every": 1, "log_every": 1}
        least |= {"seed": 0, "checkpoint_every": 0}
        check_range(self, least, below={"epochs": 31, "batch": 31, "max_length": 31, "seed": 63})
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be fp32, tf32 or bf16; got {self.precision!r}")
        if self.sentences is not None and self.sentences < 2:
            raise ValueError(f"sentences must be at least 2; got {self.sentences}")
        check_positive(self, "lr", "clip")
        check_device(self.device)
