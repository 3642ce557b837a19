"""The commands that train many models: ``weince compare`` and ``weince reproduce``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from weince.command_line import option

if TYPE_CHECKING:
    from weince.lab.study.study import Execution


@dataclass(frozen=True, kw_only=True)
class _StudyOptions:
    """Options that the commands share."""

    seeds: list[int] = option(
        [], "one number: how many of 7, 21, 63, 84; several: which (default: the study's)"
    )
    jobs: int | None = option(None, "runs at once (default: 1; of compare one per GPU or core, at most 4)")
    data: str | None = option(
        None, "where the data are: PATH, or NAME=PATH,NAME=PATH (default: as configured)"
    )
    device: Literal["cpu", "cuda", "mps"] | None = option(
        None, "device to train on (default: CUDA if it is there)"
    )
    dry_run: bool = option(False, "print the runs, start nothing")
    table_only: bool = option(False, "start nothing, write the page from the runs that are there")
    slurm: bool = option(False, "submit the runs to Slurm (needs weince[slurm])")
    slurm_options: list[str] = option(
        [], "options of submitit, such as partition=gpu time=60 (minutes)", "NAME=VALUE"
    )

    interrupted: ClassVar = "the same command again runs what is missing"

    def _seeds(self) -> int | list[int] | None:
        """A single number is how many seeds to use; several numbers are the seeds themselves."""
        return self.seeds[0] if len(self.seeds) == 1 else self.seeds or None

    def _execution(self, typed: str) -> "Execution":
        from weince.lab.study.study import Execution

        if self.slurm_options and not self.slurm:
            raise ValueError("--slurm-options wants --slurm too")
        return Execution(
            jobs=self.jobs,
            slurm=self.slurm,
            slurm_options=_pairs("--slurm-options", self.slurm_options),
            data=self.data,
            device=self.device,
            dry_run=self.dry_run,
            table_only=self.table_only,
            command=typed,
        )


@dataclass(frozen=True, kw_only=True)
class Reproduce(_StudyOptions):
    """Fill a table of the paper, or your own: train, evaluate, compare.

    Plan the runs of a table (configurations x losses x tries x seeds), run those that are
    missing, choose on validation alone, and write CSV, Markdown and a page: the paper's figures beside ours.
    """

    table: str | None = option(None, "name of a table (see --list), or a YAML file", word=True)
    out: Path = option(Path("reproduced"), "folder to write")
    only: list[str] = option([], "rows, ROW/LOSS or ROW/LOSS/TRY (see --dry-run); * is anything", "CELL")
    epochs: int | None = option(None, "epochs of every run, for a trial; the table then says so")
    keep: Path | None = option(None, "write the runs' records, without weights, into DIR/runs.jsonl", "DIR")
    list_: bool = option(False, "list the tables: name, runs, what it shows")

    examples: ClassVar = """
weince reproduce --list
weince reproduce linear --dry-run
weince reproduce digits                                        on a laptop, in minutes
weince reproduce linear --only cifar100_resnet18 --data cifar100=cifar100.npz --jobs 2
weince reproduce temperatures --seeds 7 21 --slurm --slurm-options partition=gpu gpus_per_node=1
The same command again runs what is missing.
"""

    def __call__(self, typed: str) -> None:
        from weince.lab.study.reproduce import print_tables, reproduce

        if self.list_:
            print_tables()
            return
        if self.table is None:
            raise ValueError("reproduce wants a TABLE: a name of weince reproduce --list, or a YAML file")
        path = reproduce(
            self.table,
            out=self.out,
            seeds=self._seeds(),
            only=self.only or None,
            epochs=self.epochs,
            keep=self.keep,
            how=self._execution(typed),
        )
        if not self.dry_run:
            print(path)


@dataclass(frozen=True, kw_only=True)
class Compare(_StudyOptions):
    """Tell which loss to use: equal tuning, paired seeds, corrected tests, cost.

    Give every loss the same number of tries, choose by validation alone, train the choice with
    all seeds, compare with the baseline seed by seed, and write a page, CSV and JSON.
    """

    losses: list[str] = option(
        [],
        "presets, or your own, my_package:MyLoss (default: those of the comparison in --out)",
        "LOSS",
        word=True,
    )
    config: str | None = option(None, "what all runs share: a name or a YAML file (default: digits_tiny)")
    recipe: Literal["paper", "strong"] = option("paper", "strong takes the configuration CONFIG_strong")
    tries: int | None = option(None, "settings to try for each loss (default: as in --out, else 3)")
    try_epochs: int | None = option(None, "epochs of a try (default: those of a run)", "N")
    baseline: str | None = option(None, "loss to compare the others with (default: infonce)", "LOSS")
    level_within: float | None = option(
        None, "largest difference that does not matter (default: 0.5)", "POINTS"
    )
    set: list[str] = option([], "settings of all runs, as in weince train, such as epochs=50", "NAME=VALUE")
    out: Path = option(Path("compared"), "folder to write")
    budget: str | None = option(None, "start no run that would end after this time: 90s, 30m or 2h", "TIME")
    track: int | None = option(None, "on images: draw the vote of neighbours, measured every N epochs", "N")
    reuse: list[Path] = option([], "take runs with the same settings from these runs.jsonl", "ARCHIVE")
    add: list[Path] = option([], "add what others ran (their runs.jsonl), if the rest is the same", "ARCHIVE")

    examples: ClassVar = """
weince compare infonce dcl released                             digits with a tiny encoder, on a laptop
weince compare infonce dcl hcl my_package:MyLoss --config cifar100_resnet18 --dry-run
weince compare dcl hcl mixture --config cifar100_resnet18 --recipe strong --try-epochs 25 --budget 2h
weince compare siglip --config cifar100_resnet18                adds a loss; the others are kept
weince compare infonce dcl --config simcse_infonce --data text=wiki.txt,sts=sts.tsv,model=small-bert
weince compare --out compared --add theirs/runs.jsonl           adds what others ran
weince compare --out compared --table-only                      writes the page again, from the records
The same command again runs what is missing.
"""

    def __call__(self, typed: str) -> None:
        from weince.lab.study.compare import Question, compare

        question = Question(
            self.losses,
            config=self.config,
            recipe=self.recipe,
            tries=self.tries,
            seeds=self._seeds(),
            baseline=self.baseline,
            level_within=self.level_within,
            try_epochs=self.try_epochs,
            set={name: _value(name, text) for name, text in _pairs("--set", self.set).items()},
        )
        path = compare(
            question,
            out=self.out,
            budget=None if self.budget is None else _duration(self.budget),
            track=self.track,
            reuse=self.reuse,
            add=self.add,
            how=self._execution(typed),
        )
        if not self.dry_run:
            print(path)


def _duration(text: str) -> float:
    """Seconds in a duration such as 90s, 30m or 2h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None:
        raise ValueError(f"--budget must be a number with s, m or h, such as 2h; got {text}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    from weince.lab.settings import check_once

    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise ValueError(f"{option} wants NAME=VALUE; got {wrong[0]}")
    check_once(f"NAME of {option}", [word.partition("=")[0] for word in words])
    return dict(word.split("=", 1) for word in words)


def _value(name: str, text: str) -> Any:
    """The value of a setting, as in a YAML file."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise ValueError(f"--set {name} wants a value in YAML, such as 50 or [1, 2]; got {text}") from None
