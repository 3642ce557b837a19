"""Unsupervised SimCSE: a sentence passes the encoder twice, with dropout as the only difference (Gao et al., 2021).

With ``pairs``, it trains on the usual alternative: pairs of sentences that mean the same.

``train(TextRun(...))`` reads top to bottom. The folder of a run holds ``run.yaml``, ``log.csv``, ``checkpoints/``,
``best/`` (the encoder that ranks STS-B's dev pairs best, for transformers and sentence-transformers) and, once it is
done, ``result.json`` with the test scores of that encoder. A run that was stopped resumes.
"""

import hashlib
import json
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from weince import files
from weince.lab import settings
from weince.lab.configure import LossConfig, build_loss, check_loss, let_nan_pass
from weince.lab.tasks.sentences.data import Drawn, SentenceFile, ahead, batches, steps_in_epoch
from weince.lab.tasks.sentences.encoder import (
    Pooling,
    SentenceEncoder,
    Tokens,
    check_model,
    load_backbone,
    save_encoder,
    tokenise,
)
from weince.lab.tasks.sentences.log import Row, append_log, progress_bar, read_rows, start_log
from weince.lab.tasks.sentences.step import Precision, Step, matmul_precision, tail_stats
from weince.lab.tasks.sentences.sts import LONGEST, Sts, StsTask, read_sts, score_encoder
from weince.lab.training import checkpoint
from weince.lab.training.capture import Embedded, finite_weights
from weince.lab.training.log import learned
from weince.lab.training.optimizers import restore, set_rate
from weince.lab.training.processes import training_lock
from weince.machine import check_device, find_device, prepare_cpu_for_bf16
from weince.tail import TailStats

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
        settings.check_range(self, least, below={"epochs": 31, "batch": 31, "max_length": 31, "seed": 63})
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be fp32, tf32 or bf16; got {self.precision!r}")
        if self.sentences is not None and self.sentences < 2:
            raise ValueError(f"sentences must be at least 2; got {self.sentences}")
        settings.check_positive(self, "lr", "clip")
        check_device(self.device)


def train(run: TextRun, *, bar: bool = True) -> Path:
    """Train, and return the folder of the encoder with the best score on STS-B's dev split.

    Raises:
        OSError: A file, a folder or a model is missing or cannot be read or written.
        ValueError: The content of a file is not valid, or ``run.out`` holds a run with other settings.
    """
    check_model(run.model)
    sts = read_sts(run.sts)
    if ("STSB", "dev") not in sts:
        raise ValueError(f"{run.sts} holds no dev split of STSB, on which the best encoder is chosen")
    if (run.out / "result.json").is_file():
        before = _finished(run.out / "result.json").get("fingerprint")
        _check_start(run, before, fingerprint(run) if run.text.is_file() else None)
        settings.claim(run, run.out, free=FREE_TO_CHANGE)
        return run.out / "best"
    if run.precision == "bf16" and find_device(run.device).type == "cpu":
        prepare_cpu_for_bf16()
    with ExitStack() as held:
        with matmul_precision(run.precision):
            job = Job(run, sts)
            before = checkpoint.started_with(run.out / "checkpoints", "fingerprint")
            _check_start(run, before, job.fingerprint)
            held.enter_context(training_lock(run.out))
            settings.claim(run, run.out, free=FREE_TO_CHANGE)
            job.resume()
            job.go(bar=bar)
        _write_result(job, sts, bar=bar)
    return run.out / "best"


class Job:
    """A run in progress: the objects built from its settings, and the state that changes from step to step."""

    def __init__(self, run: TextRun, sts: Sts) -> None:
        self.run = run
        self.device = find_device(run.device)
        self.sentences = SentenceFile(run.text, first=run.sentences, pairs=run.pairs)
        self.steps = run.epochs * steps_in_epoch(len(self.sentences), run.batch)
        backbone, self.tokenizer = load_backbone(run.model)
        self.fingerprint = _fingerprint(self.sentences, run.sts, backbone)
        self.dev = StsTask(self.tokenizer, sts["STSB", "dev"])
        torch.manual_seed(run.seed)
        # Always in float32: small updates are lost in 16-bit weights.
        encoder = SentenceEncoder(backbone, head=run.head, pooling=run.pooling)
        self.encoder = encoder.to(self.device, torch.float32).train()
        self.loss = build_loss(run.loss, candidates="cross").to(self.device)
        let_nan_pass(self.loss)
        width = int(backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]
        check_loss(run.loss, candidates="cross", pairs=run.batch, width=width, device=self.device, ids=None)
        self.take = Step(
            self.encoder,
            self.loss,
            lr=run.lr,
            clip=run.clip,
            precision=run.precision,
            graph=((2 if run.pairs else 1) * run.batch, run.max_length) if run.graph else None,
            pairs=run.pairs,
        )
        self.step, self.best, self.best_step = 0, -math.inf, 0
        self.best_weights: dict[str, Tensor] = {}  # until they are on disk

    def resume(self) -> None:
        """Resume from the newest checkpoint, if there is one, and drop later rows of the log."""
        found = checkpoint.newest(self.run.out / "checkpoints")
        rows = (
            []
            if found is None
            else [row for row in read_rows(self.run.out) if int(row["step"]) <= found.step]
        )
        start_log(self.run.out, rows, learned(self.loss))
        if found is None:
            return
        with checkpoint.fitting(self.run.out / "checkpoints"):
            self.restore(found)

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Restore the state of a checkpoint."""
        state = found.state
        self.step, self.best, self.best_step = found.step, state["best"], state["best_step"]
        self.encoder.load_state_dict(state["encoder"])
        self.loss.load_state_dict(state["loss"])
        restore(self.take.optimizer, state["optimizer"])
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        if self.device.type == "mps" and state.get("mps_rng") is not None:
            torch.mps.set_rng_state(state["mps_rng"])

    def save_best(self) -> None:
        """Write the best encoder, unless it is already on disk."""
        if self.best_weights:
            save_encoder(
                self.encoder,
                self.tokenizer,
                self.run.out / "best",
                max_length=LONGEST,
                weights=self.best_weights,
            )
            self.best_weights = {}

    def save(self) -> None:
        """Write a checkpoint; the best encoder first, since a run resumed from here could not make it again."""
        self.save_best()
        state = {
            "encoder": self.encoder.state_dict(),
            "loss": self.loss.state_dict(),
            "optimizer": self.take.optimizer.state_dict(),
            "fingerprint": self.fingerprint,
            "best": self.best,
            "best_step": self.best_step,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "mps_rng": torch.mps.get_rng_state() if self.device.type == "mps" else None,
        }
        checkpoint.save(self.run.out / "checkpoints", self.step, state)

    def prepare(self, numbers: Any) -> tuple[Drawn, Tokens]:
        """The sentences of a step, and their tokens; called in a thread."""
        drawn = self.sentences.draw(numbers)
        return drawn, tokenise(self.tokenizer, drawn.sentences, self.run.max_length, whole=self.run.graph)

    def go(self, *, bar: bool) -> None:
        """Train for the remaining steps."""
        run = self.run
        numbers = batches(
            len(self.sentences), batch=run.batch, epochs=run.epochs, seed=run.seed, start=self.step
        )
        sums = _Sums(self.device)
        in_epoch = self.steps // run.epochs
        with progress_bar(run.out.name, self.steps, self.step, in_epoch=in_epoch, shown=bar) as show:
            for drawn, tokens in ahead(numbers, self.prepare):
                last = self.step + 1 == self.steps
                evaluate = (self.step + 1) % run.eval_every == 0 or last
                log = evaluate or (self.step + 1) % run.log_every == 0
                embedded, ids = self.take_step(drawn, tokens)
                sums.add(embedded.loss, len(drawn.sentences))
                if not log:
                    continue
                row = sums.row(self.step, self.step / in_epoch, tail_stats(self.loss, embedded, ids))
                if evaluate and not finite_weights(self.encoder, self.loss):  # they could not be resumed
                    raise ValueError(
                        f"the weights are not finite after step {self.step}: set a lower lr, or precision fp32"
                    )
                if evaluate:
                    row = row._replace(dev=self.evaluate())
                append_log(run.out, row, learned(self.loss).values())
                show(row)
                if evaluate and self.checkpoint_is_due():
                    self.save()
                sums = _Sums(self.device)
        self.save_best()

    def checkpoint_is_due(self) -> bool:
        """Whether to write a checkpoint after this evaluation."""
        evaluations = -(-self.step // self.run.eval_every)
        return self.run.checkpoint_every > 0 and evaluations % self.run.checkpoint_every == 0

    def take_step(self, drawn: Drawn, tokens: Tokens) -> tuple[Embedded, Tensor | None]:
        """Train one step; returns the embeddings with their loss, and the ids that the loss got."""
        set_rate(self.take.optimizer, self.run.lr * (1 - self.step / self.steps))
        ids = None if drawn.ids is None else torch.from_numpy(drawn.ids).to(self.device)
        embedded = self.take(tokens, ids)
        self.step += 1
        return embedded, ids

    @matmul_precision("fp32")
    def evaluate(self) -> float:
        """Spearman x 100 on the dev split; keeps the weights if they are the best so far."""
        dev = self.dev.spearman(self.encoder)
        if dev > self.best or not math.isfinite(self.best):  # none so far, or NaN: all cosines were equal
            self.best, self.best_step = dev, self.step
            self.best_weights = {name: x.clone() for name, x in self.encoder.backbone.state_dict().items()}
        return dev


class _Sums:
    """Sum of the losses and number of sentences since the last line of the log."""

    def __init__(self, device: torch.device) -> None:
        self.loss, self.steps, self.sentences = torch.zeros((), device=device), 0, 0
        self.since = time.perf_counter()

    def add(self, loss: Tensor, sentences: int) -> None:
        self.loss, self.steps, self.sentences = self.loss + loss, self.steps + 1, self.sentences + sentences

    def row(self, step: int, epoch: float, stats: TailStats) -> Row:
        """A line of the log. Between evaluations, only such lines wait for the device."""
        means = torch.stack([self.loss / self.steps, stats.lam.mean(), stats.beta.mean()])
        loss, lam, beta = means.tolist()
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} at step {step}: set a lower lr, or precision fp32")
        seconds = time.perf_counter() - self.since
        return Row(step, epoch, loss, lam, beta, None, self.sentences / seconds, seconds)


def _write_result(job: Job, sts: Sts, *, bar: bool) -> None:
    """Write the test scores of the best encoder, which was chosen only on the dev split."""
    backbone, tokenizer = load_backbone(str(job.run.out / "best"))
    encoder = SentenceEncoder(backbone, pooling=job.run.pooling).to(job.device)
    scores = score_encoder(encoder, tokenizer, sts, bar=bar)
    result = {
        "dev": job.best,
        "best_step": job.best_step,
        "steps": job.steps,
        "sentences": len(job.sentences),
        **scores._asdict(),
        "data": ", ".join(Path(place).name for place in (job.run.text, job.run.sts, job.run.model)),
        "fingerprint": job.fingerprint,
    }
    job.sentences.close()
    text = json.dumps(result, indent=2) + "\n"
    files.write_text_aside(job.run.out / "result.json", text)


def _finished(path: Path) -> dict[str, Any]:
    """The result of a run that is done."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to have it written anew") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (no keys and values): remove it to have it written anew")
    return found


def _check_start(run: TextRun, before: str | None, now: str | None) -> None:
    """Raise if the sentences, STS pairs or encoder are not those that a run began with; files may have moved."""
    if None not in (before, now) and before != now:
        raise ValueError(
            f"{run.out} began with sentences, STS pairs and an encoder of fingerprint {before}; got {now}: "
            "choose another --out"
        )


def fingerprint(run: TextRun) -> str:
    """Sixteen hexadecimal digits that identify the input of a run: sentences, STS pairs and initial encoder."""
    sentences = SentenceFile(run.text, first=run.sentences, pairs=run.pairs)
    try:
        return _fingerprint(sentences, run.sts, load_backbone(run.model)[0])
    finally:
        sentences.close()


def _fingerprint(sentences: SentenceFile, sts: Path, backbone: torch.nn.Module) -> str:
    found = hashlib.blake2b(sentences.hashes.tobytes(), digest_size=8)
    found.update(sts.read_bytes())
    for name, weights in sorted(backbone.state_dict().items()):
        if not name.startswith("pooler."):  # not used, and some files lack it
            found.update(name.encode() + weights.detach().cpu().float().contiguous().numpy().tobytes())
    return found.hexdigest()
