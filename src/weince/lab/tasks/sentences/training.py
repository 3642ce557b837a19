"""Unsupervised SimCSE: a sentence passes the encoder twice, with dropout as the only difference (Gao et al., 2021).

With ``pairs``, it trains on the usual alternative: pairs of sentences that mean the same.

The folder of a run holds ``run.yaml``, ``log.csv``, ``checkpoints/``, ``best/`` (the encoder that ranks STS-B's dev
pairs best, for transformers and sentence-transformers) and, once it is done, ``result.json`` with the test scores of
that encoder.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from weince.files import write_text_aside
from weince.lab.tasks.base import BatchOf, Schedule, Training, View, ready_loss
from weince.lab.tasks.sentences.config import Precision, TextRun
from weince.lab.tasks.sentences.data import SentenceFile, ahead, batches, steps_in_epoch
from weince.lab.tasks.sentences.encoder import (
    SentenceEncoder,
    Tokens,
    check_model,
    load_backbone,
    save_encoder,
    tokenise,
)
from weince.lab.tasks.sentences.sts import LONGEST, StsTask, read_sts, score_encoder
from weince.lab.training.optimizers import OptimizerConfig, build_optimizer
from weince.losses import InfoNCELoss
from weince.tail import TailConfig, TailStats

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class SentenceTraining(Training):
    """A run on sentences that is ready to train. Each segment of its schedule ends with STS-B's dev split."""

    columns = (
        "step", "epoch", "loss", "lam", "beta", "dev", "sentences_per_second", "seconds", "lr",
    )  # fmt: skip
    unit = "sentences"

    def __init__(self, run: TextRun, fabric: "Fabric") -> None:
        self.run, self.fabric = run, fabric
        check_model(run.model)
        self.sts = read_sts(run.sts)
        if ("STSB", "dev") not in self.sts:
            raise ValueError(f"{run.sts} holds no dev split of STSB, on which the best encoder is chosen")
        self.sentences = SentenceFile(run.text, first=run.sentences, pairs=run.pairs)
        in_epoch = steps_in_epoch(len(self.sentences), run.batch)
        self.schedule = Schedule(
            steps=run.epochs * in_epoch,
            in_epoch=in_epoch,
            segment=run.eval_every,
            log_every=run.log_every,
            judge_every=1,
            save_every=run.checkpoint_every,
        )
        backbone, self.tokenizer = load_backbone(run.model)
        self.started_from = _fingerprint(self.sentences, run.sts, backbone)
        self.dev = StsTask(self.tokenizer, self.sts["STSB", "dev"])
        torch.manual_seed(run.seed)
        # Always in float32: small updates are lost in 16-bit weights.
        encoder = SentenceEncoder(backbone, head=run.head, pooling=run.pooling)
        self.model: SentenceEncoder = encoder.to(self.device, torch.float32).train()
        self.width = int(backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.loss = ready_loss(
            run.loss, candidates="cross", pairs=run.batch, width=self.width, device=self.device, ids=None
        )
        self.clip, self.graph = run.clip, run.graph
        self.optimizing = OptimizerConfig("adamw", lr=run.lr, weight_decay=0.0, schedule="linear")
        self.optimizer = build_optimizer(
            self.model.parameters(), self.optimizing, of_loss=self.loss.parameters()
        )
        self.best, self.best_step = -math.inf, 0
        self.best_weights: dict[str, Tensor] = {}  # until they are on disk

    # A batch is the word pieces of its sentences; of pairs, first all first sentences, then all second ones.

    def batches(self, start: int) -> Iterator[BatchOf]:
        run = self.run
        numbers = batches(len(self.sentences), batch=run.batch, epochs=run.epochs, seed=run.seed, start=start)
        return ahead(numbers, self.prepare)

    def prepare(self, numbers: np.ndarray) -> BatchOf:
        """The word pieces of a step, and ids if some of its sentences are equal; called in a thread."""
        drawn = self.sentences.draw(numbers)
        tokens = tokenise(self.tokenizer, drawn.sentences, self.run.max_length, whole=self.run.graph)
        ids = {} if drawn.ids is None else {"ids": torch.from_numpy(drawn.ids)}
        return {**tokens._asdict(), **ids}

    def views(self, batch: BatchOf) -> list[View]:
        twice = 1 if self.run.pairs else 2
        tokens = Tokens(*(batch[name].repeat(twice, 1) for name in Tokens._fields))
        return [View("both", self._embed, tokens)]  # one forward pass: two smaller ones would take longer

    def _embed(self, tokens: Tokens) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.run.precision == "bf16"):
            return self.model(tokens)  # type: ignore[no-any-return]

    def arguments(self, rows: dict[str, Tensor], batch: BatchOf) -> dict[str, Any]:
        z_i, z_j = rows["both"].chunk(2)
        return {"z_i": z_i, "z_j": z_j, "ids": batch.get("ids")}

    def count(self, batch: BatchOf) -> int:
        return len(batch["input_ids"])

    def arithmetic(self) -> AbstractContextManager[None]:
        return matmul_precision(self.run.precision)

    # How the encoder is judged, and what is told and saved.

    def measure(self, arguments: dict[str, Any]) -> dict[str, float]:
        stats = tail_stats(self.loss, arguments)
        lam, beta = torch.stack([stats.lam.mean(), stats.beta.mean()]).tolist()
        return {"lam": lam, "beta": beta}

    def judge(self, step: int) -> dict[str, float]:
        """Spearman x 100 on the dev split; keeps the weights if they are the best so far.

        An encoder with equal cosines for all pairs ranks nothing: its cell of the log is empty.
        """
        with matmul_precision("fp32"):
            dev = self.dev.spearman(self.model)
        if math.isnan(dev):
            return {}
        if dev > self.best:
            self.best, self.best_step = dev, step
            self.best_weights = {name: x.clone() for name, x in self.model.backbone.state_dict().items()}
        return {"dev": dev}

    def keep(self, step: int, *, checkpoint: bool) -> None:
        """Write the best encoder: a run resumed from the checkpoint could not make it again."""
        if checkpoint:
            self._save_best()

    def _save_best(self) -> None:
        if self.best_weights:
            folder, weights = self.run.out / "best", self.best_weights
            save_encoder(self.model, self.tokenizer, folder, max_length=LONGEST, weights=weights)
            self.best_weights = {}

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step}

    def restore(self, state: dict[str, Any]) -> None:
        self.best, self.best_step = state["best"], state["best_step"]

    def finish(self, *, bar: bool) -> Path:
        """Write the best encoder, and its scores on the test splits; it was chosen on the dev split alone."""
        out = self.run.out
        if not math.isfinite(self.best):
            raise ValueError(
                f"{out}: no encoder of this run can be chosen: each gives all pairs of STS-B's dev split the same "
                "cosine, so it has collapsed; set a lower lr, or another loss"
            )
        self._save_best()
        backbone, tokenizer = load_backbone(str(out / "best"))
        encoder = SentenceEncoder(backbone, pooling=self.run.pooling).to(self.device)
        scores = score_encoder(encoder, tokenizer, self.sts, bar=bar)
        result = {
            "dev": self.best,
            "best_step": self.best_step,
            "steps": self.schedule.steps,
            "sentences": len(self.sentences),
            **scores._asdict(),
            "data": ", ".join(Path(place).name for place in (self.run.text, self.run.sts, self.run.model)),
            "fingerprint": self.started_from,
        }
        self.sentences.close()
        write_text_aside(out / "result.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
        return out / "best"  # type: ignore[no-any-return]

    def fingerprint(self) -> str:
        return self.started_from

    def figures(self, row: Any) -> tuple[str, ...]:
        dev = [f"dev {row['dev']:.2f}"] if "dev" in row else []
        return f"loss {row['loss']:.4f}", *dev, f"lam {row['lam']:.2f}"


@torch.no_grad()
def tail_stats(loss: nn.Module, arguments: dict[str, Any]) -> TailStats:
    """Tail statistics of a batch's anchors ``(n,)``, with the tail settings of the loss, or else the paper's."""
    measured = InfoNCELoss(candidates="cross", engine="dense", check_finite=False)
    measured.tail = getattr(loss, "tail", None) or TailConfig()
    return measured(**arguments, return_stats=True).stats


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Allow TF32 in float32 matrix products if ``precision`` is ``tf32``, else forbid it; restored afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def fingerprint(run: TextRun) -> str:
    """Sixteen hexadecimal digits that identify the input of a run: sentences, STS pairs and initial encoder."""
    sentences = SentenceFile(run.text, first=run.sentences, pairs=run.pairs)
    try:
        return _fingerprint(sentences, run.sts, load_backbone(run.model)[0])
    finally:
        sentences.close()


def _fingerprint(sentences: SentenceFile, sts: Path, backbone: nn.Module) -> str:
    digest = hashlib.blake2b(sentences.hashes.tobytes(), digest_size=8)
    digest.update(sts.read_bytes())
    for name, weights in sorted(backbone.state_dict().items()):
        if not name.startswith("pooler."):  # not used, and some files lack it
            digest.update(name.encode() + weights.detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()
