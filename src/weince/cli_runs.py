"""The commands ``weince train``, ``evaluate`` and ``bench loss``."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from weince.command_line import REQUIRED, DeviceName, option

TRAIN_EXAMPLES = """\
examples:
  weince train                                          digits with a tiny encoder, on a laptop
  weince train --config cifar100_resnet18 --loss.preset infonce --loss.temperature 0.2 --seed 21 --out runs/a
  weince train --data photos/ --epochs 50 --out runs/b  a folder of images; no labels are needed
  weince train --config my.yaml --devices 4             a setting here overrides the file's
  weince train --config simcse_paper --text wiki.txt --sts sts.tsv    (needs weince[text])
  weince train --config retrieval --data pairs.csv --model sentence-transformers/all-MiniLM-L6-v2 --out runs/c
The same command again resumes from the last checkpoint.
"""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train an encoder."""

    # Its options are the settings of the run, of the task that the configuration names.
    run: Any

    interrupted: ClassVar = "the same command resumes from the last checkpoint"

    @classmethod
    def read(cls, arguments: list[str]) -> "Train":
        from weince.lab import settings
        from weince.lab.tasks.registry import task_of

        chosen, _ = settings.take_config(arguments)
        if chosen is None and not any(word.partition("=")[0] == "--data" for word in arguments):
            chosen = settings.LAPTOP  # the defaults are for photographs, and would mirror digits
            arguments = ["--config", chosen, *arguments]
        kind = task_of({} if chosen is None else settings.load(chosen)).settings
        return cls(run=settings.read(kind, arguments, command="weince train", examples=TRAIN_EXAMPLES))

    def __call__(self, typed: str) -> None:
        from weince.lab.configure import line_named
        from weince.lab.tasks.registry import train

        with line_named(self.run.loss.preset):
            path = train(self.run)
        # Only the first process of a run prints.
        if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
            print(path)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Judge trained encoders: linear probe and neighbours, retrieval, or STS.

    Judge the encoder of a run and write RUN/evaluation.json. Images: linear probes and neighbours
    on whole validation and test sets. Two towers: nDCG, recall, MRR and MAP of an exact search. With --sts,
    print how well sentence encoders rank pairs.
    """

    runs: list[str] = option(
        REQUIRED, "run's folder; with --sts an encoder's, or its hub name", "RUN", word=True
    )
    data: str | None = option(None, "data to evaluate on: a name or a path (default: the run's)")
    device: DeviceName = option("auto", "device to run on; auto takes a CUDA device if there is one")
    quick: bool = option(
        False, "a first look, not a result: train the probe with one seed for ten epochs or more"
    )
    sts: Path | None = option(None, "file of task, subset, split, score and two sentences a line", "TSV")
    published: float | None = option(
        None, "published figure for STS-B test, to print beside ours; needs --sts"
    )

    interrupted: ClassVar = "what was printed before is complete"
    examples: ClassVar = """
weince evaluate runs/a
weince evaluate runs/a runs/b --device cuda
weince evaluate runs/a --quick
weince evaluate runs/simcse_paper/best --sts sts.tsv
"""

    def __call__(self, typed: str) -> None:
        if self.sts is not None:
            if self.data is not None or self.quick:
                raise ValueError(
                    "--data and --quick are for runs on images, --sts is for sentences: leave one out"
                )
            self._rank_pairs(self.sts)
            return
        if self.published is not None:
            raise ValueError("--published wants --sts FILE too: it is printed beside the scores on that file")
        from rich.console import Console

        from weince.lab.tasks.registry import task_in

        for folder in map(Path, self.runs):
            report = task_in(folder).report
            if report is None:
                raise ValueError(
                    f"{folder} is the folder of a run on sentences, judged at its end: give {folder / 'best'} and "
                    "--sts FILE"
                )
            result, path = report(folder, self.data, self.device, self.quick)
            print(result) if isinstance(result, str) else Console().print(result)
            print(path)

    def _rank_pairs(self, sts: Path) -> None:
        from weince.lab.tasks.sentences.sts import evaluate_sts, table
        from weince.machine import find_device

        device = str(find_device(self.device))
        for model in self.runs:
            scores = evaluate_sts(model, sts, device=device, bar=True)
            print(f"{model}\n\n{table(scores, published=self.published)}\n")


@dataclass(frozen=True, kw_only=True)
class BenchLoss:
    """Time the losses on this machine.

    Time our losses, torch InfoNCE, compiled InfoNCE and peers that are installed, in one run.
    """

    pairs: list[int] = option([], "pairs in a batch, one size or several (default: 256 1024 4096)")
    d: int = option(128, "width of the embeddings")
    device: str = option("auto", "device to time on: auto, cpu, cuda or mps")
    dtype: str = option("float32", "type of the embeddings: float32, bfloat16, float16 or float64")
    repeats: int = option(15, "passes to time")
    no_compile: bool = option(False, "leave compiled InfoNCE out")

    examples: ClassVar = "weince bench loss --pairs 256 1024 --device cpu"

    def __call__(self, typed: str) -> None:
        from rich.console import Console

        from weince.lab.bench import bench_loss, table

        timings = bench_loss(
            pairs=self.pairs or [256, 1024, 4096],
            d=self.d,
            device=self.device,
            dtype=self.dtype,
            repeats=self.repeats,
            compiled=not self.no_compile,
        )
        Console().print(table(timings))
