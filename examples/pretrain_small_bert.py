"""Pretrain a small BERT on plain text by masked language modelling: an encoder to start SimCSE from without a hub.

The model has 6 layers of width 384 and BERT's word pieces (22.6 M parameters). A batch holds sentences of one length,
so that nothing is padded and no attention is masked. 15 % of its word pieces are masked, chosen anew each time; only
these go through the model's head. The tokens are kept on the device (1 M sentences: 110 MB).
"""

import argparse
import csv
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weince.lab.tasks.sentences.data import ahead

WARM_UP = 0.1
MASKED = 0.15
HELD_OUT = 2048
DROPOUT = 0.1
"""Dropout of the saved model: BERT's value, and SimCSE's only augmentation. Pretraining uses none."""
LEARNED = 0.5
"""A model has learned from context if its loss is this many nats below that of word frequencies alone."""
EXAMPLE = """\
example: three minutes on one GPU, with the word pieces of a model at hand, then SimCSE from what it learned
  python examples/pretrain_small_bert.py sentences.txt --tokenizer all-MiniLM-L6-v2/ --out small-bert --minutes 3
  weince train --config simcse_infonce --model small-bert --text sentences.txt --sts sts.tsv
"""


def chunks(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    """Lists of ``size`` lines; the last one may be shorter."""
    while chunk := list(islice(lines, size)):
        yield chunk


class Corpus:
    """Sentences as word pieces on a device, one after the other, ``[CLS]`` and ``[SEP]`` included."""

    def __init__(self, text: Path, tokenizer: Any, max_length: int, device: torch.device) -> None:
        pieces = tokenizer.backend_tokenizer
        pieces.enable_truncation(max_length)
        pieces.no_padding()

        def encode(lines: list[str]) -> list[Any]:
            found: list[Any] = pieces.encode_batch_fast([line.strip() for line in lines if line.strip()])
            return found

        flat, lengths = [], []
        with text.open(encoding="utf-8") as file:
            for encoded in ahead(chunks(file, 20_000), encode):
                rows = [one.ids for one in encoded]
                flat.append(np.fromiter((piece for row in rows for piece in row), np.int32))
                lengths.append(np.fromiter(map(len, rows), np.int64))
        self.lengths = np.concatenate(lengths)
        self.tokens = torch.from_numpy(np.concatenate(flat)).to(device)
        self.starts = torch.from_numpy(np.cumsum(self.lengths) - self.lengths).to(device)

    def sentences(self, numbers: Tensor, length: int) -> Tensor:
        """``(numbers, length)`` word pieces of sentences that all have this length."""
        places = self.starts[numbers, None] + torch.arange(length, device=self.tokens.device)
        return self.tokens[places].long()

    def batches(self, numbers: np.ndarray, tokens: int, rng: np.random.Generator) -> Iterator[Tensor]:
        """All sentences of ``numbers`` once, in random batches of one length with at most ``tokens`` tokens."""
        numbers = rng.permutation(numbers)
        numbers = numbers[np.argsort(self.lengths[numbers], kind="stable")]
        edges = np.flatnonzero(np.diff(self.lengths[numbers])) + 1
        parts = []
        for group in np.split(numbers, edges):
            length = int(self.lengths[group[0]])
            if length > 2:  # some word piece between [CLS] and [SEP]
                size = max(1, tokens // length)
                parts += [(place, length) for place in np.array_split(group, -(-len(group) // size))]
        for place in rng.permutation(len(parts)):
            chosen, length = parts[place]
            yield self.sentences(torch.from_numpy(chosen).to(self.starts.device), length)


def mask(sentences: Tensor, mask_id: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mask 15 % of a batch ``(sentences, length)``: returns what the model sees, the chosen places, what was there.

    Of the chosen places 80 % become ``[MASK]``, 10 % a random word piece, and 10 % stay. ``[CLS]`` and ``[SEP]`` are
    never chosen.
    """
    chance = torch.rand(sentences.shape, device=sentences.device)
    chance[:, 0] = chance[:, -1] = -1
    inner = len(sentences) * (sentences.shape[1] - 2)
    places = chance.flatten().topk(max(1, round(MASKED * inner)), sorted=False).indices
    seen = sentences.flatten().clone()
    there = seen[places]
    fate = torch.rand(places.shape, device=places.device)
    other = torch.randint(vocabulary, places.shape, device=places.device)
    seen[places] = torch.where(fate < 0.8, mask_id, torch.where(fate < 0.9, other, there))
    return seen.view_as(sentences), places, there


def masked_loss(model: nn.Module, sentences: Tensor, mask_id: int) -> Tensor:
    """Cross-entropy of the masked word pieces."""
    seen, places, there = mask(sentences, mask_id, model.config.vocab_size)
    device = sentences.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = model.bert(input_ids=seen).last_hidden_state.flatten(0, 1)
        scores = model.cls(hidden[places])
    return F.cross_entropy(scores.float(), there)


def build(options: argparse.Namespace, tokenizer: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        intermediate_size=4 * options.hidden,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.0,  # training is too short to overfit
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def optimizer(model: nn.Module, *, fused: bool) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6, fused=fused)


def frequency_loss(tokens: Tensor) -> float:
    """The loss of a model that knows how often each word piece occurs, but not its context."""
    counts = torch.bincount(tokens).double()
    counts[tokens[0]] = counts[tokens[-1]] = 0  # [CLS] and [SEP] are never masked
    share = counts / counts.sum()
    return -float(torch.special.xlogy(share, share).sum())


def rate(progress: float) -> float:
    """Share of the peak learning rate: up in the warm-up, then down to 0."""
    return min(progress / WARM_UP, (1 - progress) / (1 - WARM_UP))


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, numbers: np.ndarray, mask_id: int) -> float:
    """Mean loss on sentences that are not trained on."""
    model.eval()
    losses = [
        masked_loss(model, part, mask_id) for part in corpus.batches(numbers, 8192, np.random.default_rng(0))
    ]
    model.train()
    return float(torch.stack(losses).mean())


def pretrain(options: argparse.Namespace) -> float:
    """Train, save, and return the loss on held-out sentences."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from transformers import AutoTokenizer

    device = torch.device(options.device)
    tokenizer = AutoTokenizer.from_pretrained(
        options.tokenizer, local_files_only=Path(options.tokenizer).is_dir()
    )
    began = time.perf_counter()
    corpus = Corpus(options.text, tokenizer, options.max_length, device)
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    order = rng.permutation(len(corpus.lengths))
    held_out, training = np.split(order, [min(HELD_OUT, len(order) // 10)])
    model = build(options, tokenizer).to(device).train()
    adam = optimizer(model, fused=device.type == "cuda")
    print(
        f"{len(order):,} sentences, {len(corpus.tokens):,} word pieces in {time.perf_counter() - began:.0f} s; "
        f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters",
        flush=True,
    )
    alone = frequency_loss(corpus.tokens)
    print(f"loss without any context, from the word pieces' frequencies alone: {alone:.3f}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)

    def forever() -> Iterator[Tensor]:
        while True:
            yield from corpus.batches(training, options.tokens, rng)

    began, done, tokens = time.perf_counter(), 0, 0
    columns = TextColumn("pretraining"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    with Progress(*columns) as bar, (options.out / "pretrain.csv").open("w", newline="") as file:
        log = csv.writer(file)
        log.writerow(["step", "seconds", "tokens", "loss", "lr"])
        task = bar.add_task("", total=1.0)
        for step, sentences in enumerate(islice(forever(), options.steps)):
            seconds = time.perf_counter() - began
            progress = step / options.steps if options.steps else seconds / (60 * options.minutes)
            if progress >= 1:
                break
            for group in adam.param_groups:
                group["lr"] = options.lr * rate(max(progress, 1e-4))
            loss = masked_loss(model, sentences, tokenizer.mask_token_id)
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            done += 1
            tokens += sentences.numel()
            if step % options.log_every == 0:  # reading the loss costs a device sync
                log.writerow(
                    [
                        step,
                        f"{seconds:.1f}",
                        tokens,
                        f"{loss.item():.4f}",
                        f"{adam.param_groups[0]['lr']:.2e}",
                    ]
                )
                said = (
                    f"step {step}, loss {loss.item():.3f}, {tokens / max(seconds, 1e-9) / 1e6:.2f} M tokens/s"
                )
                bar.update(task, completed=progress, description=said)
    reached = held_out_loss(model, corpus, held_out, tokenizer.mask_token_id)
    print(f"{done} steps, {tokens / 1e6:.0f} M tokens in {time.perf_counter() - began:.0f} s")
    print(f"loss on {len(held_out)} held-out sentences: {reached:.3f}", flush=True)
    if reached > alone - LEARNED:
        print(f"WARNING: no better than frequencies alone ({alone:.3f}): try a lower --lr, or train longer")
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = DROPOUT
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    return reached


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="one sentence a line")
    parser.add_argument("--tokenizer", required=True, help="folder or hub name with BERT's word pieces")
    parser.add_argument("--out", type=Path, default=Path("runs/small-bert"), help="(default: %(default)s)")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="train for so long, after reading the text")
    budget.add_argument("--steps", type=int, help="or for so many steps")
    parser.add_argument("--hidden", type=int, default=384, help="width (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32768, help="in a batch (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=int, default=64, help="word pieces of a sentence (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=5e-4, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=50, help="steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if not options.text.is_file():
        parser.error(f"no such text file: {options.text}")
    return options


if __name__ == "__main__":
    pretrain(parse())
