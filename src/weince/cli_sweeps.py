"""The commands that train many models: ``weince compare`` and ``weince reproduce``.

As in :mod:`weince.cli`, each command is a pair of functions: one declares its options, one imports and calls.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weince.machine import DEVICES

if TYPE_CHECKING:
    from weince.lab.study.study import Execution

COMPARE_EXAMPLES = """\
examples:
  weince compare infonce dcl released                             digits with a tiny encoder, on a laptop
  weince compare infonce dcl hcl my_package:MyLoss --config cifar100_resnet18 --dry-run
  weince compare dcl hcl mixture --config cifar100_resnet18 --recipe strong --try-epochs 25 --budget 2h
  weince compare siglip --config cifar100_resnet18                adds a loss; the others are kept
  weince compare infonce dcl --config simcse_infonce --data text=wiki.txt,sts=sts.tsv,model=small-bert
  weince compare --out compared --add theirs/runs.jsonl           adds what others ran
  weince compare --out compared --table-only                      writes the page again, from the records
The same command again runs what is missing.
"""
SEEDS_HELP = "one number: how many of 7, 21, 63, 84; several: which"
REPRODUCE_EXAMPLES = """\
examples:
  weince reproduce --list
  weince reproduce linear --dry-run
  weince reproduce digits                                        on a laptop, in minutes
  weince reproduce linear --only cifar100_resnet18 --data cifar100=cifar100.npz --jobs 2
  weince reproduce temperatures --seeds 7 21 --slurm --slurm-options partition=gpu gpus_per_node=1
The same command again runs what is missing.
"""
SHARED: dict[str, dict[str, Any]] = {
    "--out": {"type": Path, "help": "folder to write (default: %(default)s)"},
    "--jobs": {"type": int},
    "--seeds": {"type": int, "action": "extend", "nargs": "+"},
    "--device": {
        "choices": DEVICES[1:],
        "help": "device to train on (default: a CUDA device if there is one, else the CPU)",
    },
    "--dry-run": {"action": "store_true"},
    "--table-only": {"action": "store_true"},
    "--slurm": {"action": "store_true", "help": "submit the runs to Slurm (needs weince[slurm])"},
    "--slurm-options": {
        "action": "extend",
        "nargs": "+",
        "default": [],
        "metavar": "NAME=VALUE",
        "help": "options of submitit's executor, such as partition=gpu time=60 (minutes)",
    },
}
"""Options that several commands share; a command may add its own default or help."""


def _add_shared(parser: argparse.ArgumentParser, name: str, **own: Any) -> None:
    parser.add_argument(name, **SHARED[name], **own)


def add_reproduce(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "reproduce",
        help="fill a table of the paper, or your own: train, evaluate, compare",
        description="Plan the runs of a table (configurations x losses x tries x seeds), run those that are\n"
        "missing, choose on validation alone, and write CSV, Markdown and a page: the paper's figures beside ours.",
        epilog=REPRODUCE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "table", nargs="?", metavar="TABLE", help="name of a table (see --list), or a YAML file"
    )
    parser.add_argument("--list", action="store_true", help="list the tables: name, runs, what it shows")
    _add_shared(parser, "--out", default=Path("reproduced"))
    _add_shared(parser, "--jobs", help="runs at once (default: 1)")
    parser.add_argument(
        "--data",
        help="where the images are: PATH, or NAME=PATH,NAME=PATH (default: as the configuration says)",
    )
    _add_shared(parser, "--seeds", help=f"{SEEDS_HELP} (default: the table's)")
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        metavar="CELL",
        help="rows, cells as ROW/LOSS, tries as ROW/LOSS/TRY (see --dry-run); * is anything",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        help="epochs of every run, for a trial; the table then says so (default: the configuration's)",
    )
    _add_shared(parser, "--device")
    _add_shared(parser, "--dry-run", help="print the plan, start nothing")
    _add_shared(parser, "--table-only", help="start nothing, write the table from the runs that are there")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="write the runs' records, without weights, into DIR/runs.jsonl",
    )
    _add_shared(parser, "--slurm")
    _add_shared(parser, "--slurm-options")
    parser.set_defaults(run=_run_reproduce, interrupted="the same command again runs what is missing")


def _run_reproduce(options: argparse.Namespace) -> None:
    from weince.lab.study.reproduce import print_tables, reproduce

    if options.list:
        print_tables()
        return
    if options.table is None:
        raise ValueError(
            "reproduce wants a TABLE, a name of weince reproduce --list or a YAML file; got none"
        )
    path = reproduce(
        options.table,
        out=options.out,
        seeds=_seeds(options.seeds),
        only=options.only,
        epochs=options.epochs,
        keep=options.keep,
        how=_execution(options),
    )
    if not options.dry_run:
        print(path)


def add_compare(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "compare",
        help="tell which loss to use: equal tuning, paired seeds, corrected tests, cost",
        description="Give every loss the same number of tries, choose by validation alone, train the choice with\n"
        "all seeds, compare with the baseline seed by seed, and write a page, CSV and JSON.",
        epilog=COMPARE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "losses", nargs="*", metavar="LOSS", help="presets of weince train, or your own, my_package:MyLoss; if none "
        "is named, the losses of the comparison in --out",
    )  # fmt: skip
    parser.add_argument(
        "--config", help="what all runs share: a name or a YAML file (default: digits_tiny, for a laptop)"
    )
    parser.add_argument(
        "--recipe",
        choices=("paper", "strong"),
        default="paper",
        help="strong: the configuration CONFIG_strong (default: %(default)s)",
    )
    parser.add_argument(
        "--tries", type=int, help="settings to try for each loss (default: as in --out, else 3)"
    )
    parser.add_argument(
        "--try-epochs", type=int, metavar="N", help="epochs of a try (default: those of a run)"
    )
    _add_shared(parser, "--seeds", help=f"{SEEDS_HELP} (default: as in --out or --add, else 4)")
    parser.add_argument(
        "--baseline",
        metavar="LOSS",
        help="loss to compare the others with; it is added if not named (default: infonce)",
    )
    parser.add_argument(
        "--level-within",
        type=float,
        metavar="POINTS",
        help="largest difference that does not matter, in points (default: 0.5)",
    )
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings of all runs, named as in weince train, such as epochs=50",
    )
    _add_shared(parser, "--out", default=Path("compared"))
    _add_shared(parser, "--jobs", help="runs at once (default: one per GPU or core, at most 4)")
    parser.add_argument(
        "--data",
        help="where the data are: a path; for sentences, text=PATH,sts=PATH,model=PATH (default: as configured)",
    )
    _add_shared(parser, "--device")
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help="start no run that would end after this time, such as 90s, 30m or 2h (default: no limit)",
    )
    parser.add_argument(
        "--track",
        type=int,
        metavar="N",
        help="on images: measure the vote of neighbours every N epochs, and draw it (default: as configured)",
    )
    parser.add_argument(
        "--reuse",
        type=Path,
        action="extend",
        nargs="+",
        default=[],
        metavar="ARCHIVE",
        help="runs.jsonl of earlier comparisons: take runs with the same settings from it",
    )
    parser.add_argument(
        "--add",
        type=Path,
        action="extend",
        nargs="+",
        default=[],
        metavar="ARCHIVE",
        help="add what others ran (their runs.jsonl), if data, recipe and protocol are the same; start nothing",
    )
    _add_shared(parser, "--dry-run", help="print the runs and the time that they take, start nothing")
    _add_shared(parser, "--table-only", help="start nothing, write the page from the runs that are there")
    _add_shared(parser, "--slurm")
    _add_shared(parser, "--slurm-options")
    parser.set_defaults(run=_run_compare, interrupted="the same command again runs what is missing")


def _run_compare(options: argparse.Namespace) -> None:
    from weince.lab.study.compare import Question, compare

    question = Question(
        options.losses,
        config=options.config,
        recipe=options.recipe,
        tries=options.tries,
        seeds=_seeds(options.seeds),
        baseline=options.baseline,
        level_within=options.level_within,
        try_epochs=options.try_epochs,
        set={name: _value(name, text) for name, text in _pairs("--set", options.set).items()},
    )
    path = compare(
        question,
        out=options.out,
        budget=None if options.budget is None else _duration(options.budget),
        track=options.track,
        reuse=options.reuse,
        add=options.add,
        how=_execution(options),
    )
    if not options.dry_run:
        print(path)


def _execution(options: argparse.Namespace) -> "Execution":
    """How the runs are carried out: options that compare and reproduce share."""
    from weince.lab.study.study import Execution

    if options.slurm_options and not options.slurm:
        raise ValueError("--slurm-options wants --slurm; got no --slurm")
    return Execution(
        jobs=options.jobs,
        slurm=options.slurm,
        slurm_options=_pairs("--slurm-options", options.slurm_options),
        data=options.data,
        device=options.device,
        dry_run=options.dry_run,
        table_only=options.table_only,
        command=options.command_line,
    )


def _seeds(given: list[int] | None) -> int | list[int] | None:
    """A single number is how many seeds to use; several numbers are the seeds themselves."""
    return given[0] if given is not None and len(given) == 1 else given


def _duration(text: str) -> float:
    """Seconds in a duration such as 90s, 30m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None:
        raise ValueError(f"--budget must be a number with s, m or h, such as 2h; got {text}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    from weince.lab.settings import check_once

    wrong = [one for one in given if "=" not in one]
    if wrong:
        raise ValueError(f"{option} wants NAME=VALUE; got {wrong[0]}")
    check_once(f"NAME of {option}", [one.partition("=")[0] for one in given])
    return dict(one.split("=", 1) for one in given)


def _value(name: str, text: str) -> Any:
    """The value of a setting, as in a YAML file."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise ValueError(f"--set {name} wants a value in YAML, such as 50 or [1, 2]; got {text}") from None
