"""The command line: parse, call one function, print.

Each command is a pair of functions, ``_add_NAME`` (its options) and ``_run_NAME`` (the call, with its own
imports, so that help is quick and a missing package is named only when it is needed).
"""

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from weince.machine import DEVICES, find_device, version

if TYPE_CHECKING:
    from weince.diagnose.reading import Pairs

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 128 + signal.SIGINT, 141
"""Statuses that a command ends with."""

EXAMPLES = """\
examples:
  weince train --help
  weince diagnose pairs.npz --out report
  weince compare infonce dcl
  weince reproduce --list
  weince completion bash > ~/.local/share/bash-completion/completions/weince    (tab completion)
"""
COMPLETION_EXAMPLES = """\
examples:
  weince completion bash > ~/.local/share/bash-completion/completions/weince
  weince completion zsh > ~/.zfunc/_weince             (a folder of $fpath)
  weince completion tcsh > ~/.weince.csh               (and source it)
"""
DIAGNOSE = """\
Tell whether softmax is the right link for paired embeddings, and write a page to look at.

input: .npz or .safetensors with z_i and z_j of shape (pairs, dim), positives row by row (and, if you like, ids:
       pairs with equal ids never compete), or with z (rows, dim) and labels (rows,); .npy of shape
       (2, pairs, dim), or two .npy files of shape (pairs, dim), one after the other; or a folder of such files;
       or the folder of a run of `weince train`, whose held-out images are embedded (--trend: at every snapshot).
       Several inputs are several models, drawn side by side.
"""
DIAGNOSE_EXAMPLES = """\
examples:
  weince diagnose pairs.npz --temperature 0.5
  weince diagnose infonce.npz weince.npz --out report --quick
  weince diagnose seed_1.npz seed_2.npz seed_3.npz --average
  weince diagnose checkpoints/ --trend --out run
  weince diagnose my-model/ --sentences pairs.tsv      (needs weince[text])
  weince diagnose runs/cifar100 --trend                (a run of `weince train`, with its snapshots)
"""
PREDICT = """\
Train small heads on frozen features, a grid of losses and temperatures with several seeds, and judge them on
held-out items. It shows what a loss does to these features, and flags heads that collapse; it is no advice on what to
train an encoder with.

input: any file that `weince diagnose` reads, with the features of two views of the same items (z_i and z_j of shape
       (items, dim), and labels if you like), at least four batches of them; or the folder of a run of `weince train`,
       whose encoder then makes the features of two views of 8,192 training images.
"""
PREDICT_EXAMPLES = """\
examples:
  weince predict features.npz --out heads
  weince predict features.npz --losses infonce dcl --temperatures 0.05 0.1 0.2 0.5 --minutes 2
  weince predict features.npz --labels labels.npy --steps 300 --seeds 0 1
  weince predict runs/cifar100 --out heads
The same command again trains the heads that are missing.
"""
TRAIN_EXAMPLES = """\
examples:
  weince train                                          digits with a tiny encoder, on a laptop
  weince train --config cifar100_resnet18 --loss.preset infonce --loss.temperature 0.2 --seed 21 --out runs/a
  weince train --data photos/ --epochs 50 --out runs/b  a folder of images; no labels are needed
  weince train --config my.yaml --devices 4             a setting here wins over the file's
  weince train --config simcse_paper --text wiki.txt --sts sts.tsv    (needs weince[text])
The same command again resumes from the last checkpoint.
"""
EVALUATE_EXAMPLES = """\
examples:
  weince evaluate runs/a
  weince evaluate runs/a runs/b --device cuda
  weince evaluate runs/a --quick
  weince evaluate runs/simcse_paper/best --sts sts.tsv
"""
COMPARE_EXAMPLES = """\
examples:
  weince compare infonce dcl released                             digits with a tiny encoder, on a laptop
  weince compare infonce dcl hcl my_package:MyLoss --config cifar100_resnet18 --dry-run
  weince compare dcl hcl mixture --config cifar100_resnet18 --recipe strong --try-epochs 25 --budget 2h
  weince compare siglip --config cifar100_resnet18                one loss more; the others are kept
  weince compare --out compared --add theirs/runs.jsonl           what others ran, if it compares
  weince compare --out compared --table-only                      the page again, from the records
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

_EXTRAS = {
    "datasets": "text",
    "sentence_transformers": "text",
    "submitit": "slurm",
    "tensorboard": "tensorboard",
    "transformers": "text",
}  # which extra brings a package; the others come with weince[runs]


def _add_diagnose(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "diagnose",
        help="tell whether softmax is the right link for your embeddings",
        description=DIAGNOSE,
        epilog=DIAGNOSE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="files or folders, see above")
    parser.add_argument(
        "--out", type=Path, default=Path("weince-report"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--names", nargs="+", help="what to call the models (default: the files' names)")
    parser.add_argument("--temperature", type=float, help="the temperature the models were trained with")
    parser.add_argument(
        "--trend", action="store_true", help="the inputs are checkpoints of one run, in order"
    )
    parser.add_argument(
        "--average", action="store_true", help="the inputs are one recipe with several seeds: add their mean"
    )
    parser.add_argument("--sentences", type=Path, metavar="TSV", help="inputs are sentence-transformers folders; "
                        "two tab-separated sentences a line, no header")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer batches and simulations")
    amount = parser.add_argument_group("how much to compute (the defaults of --quick in brackets)")
    amount.add_argument(
        "--batch-size", type=int, help="pairs in a batch (256, or fewer if there are few pairs)"
    )
    amount.add_argument("--batches", type=int, help="the most batches (32) [16]")
    amount.add_argument("--bootstraps", type=int, help="resamplings of held-out batches (2000) [500]")
    amount.add_argument("--null-draws", type=int, help="simulations under softmax (200) [99]")
    amount.add_argument(
        "--tail-bootstraps", type=int, help="resamplings and simulations of the tail (200) [50]"
    )
    amount.add_argument("--quantile", type=float, help="level of the tail's threshold (0.99)")
    amount.add_argument("--seed", type=int, help="seed of every draw (0)")
    parser.set_defaults(run=_run_diagnose)


def _run_diagnose(options: argparse.Namespace) -> None:
    from dataclasses import replace

    from weince.diagnose import check_out, write_diagnosis
    from weince.diagnose.settings import settings_for

    asked = {
        key: getattr(options, key)
        for key in ("batch_size", "batches", "bootstraps", "null_draws", "tail_bootstraps", "quantile", "seed",
                    "temperature")
        if getattr(options, key) is not None
    }  # fmt: skip
    settings = settings_for(options.quick, **asked)
    check_out(options.out)
    pairs, temperature = _pairs_to_diagnose(options, settings.seed)
    index = write_diagnosis(
        pairs,
        options.out,
        replace(settings, temperature=temperature),
        trend=options.trend,
        average=options.average,
        command=options.command_line,
    )
    print(index)


def _pairs_to_diagnose(options: argparse.Namespace, seed: int) -> "tuple[list[Pairs], float | None]":
    """The embeddings of the inputs, whatever these are, and the temperature they were trained with, if known."""
    from weince.diagnose.reading import encode_sentences, load_pairs

    runs = [path for path in options.inputs if (path / "run.yaml").is_file()]
    if runs and runs != options.inputs:
        got = ", ".join(map(str, options.inputs))
        raise ValueError(f"want runs of weince train or embeddings, not both; got {got}")
    if runs and options.sentences is not None:
        raise ValueError(
            f"--sentences wants a model's folder (a text run's is RUN/best); got the run {runs[0]}"
        )
    if runs:
        from weince.lab.vision.runs import run_pairs, temperature_of

        pairs = run_pairs(options.inputs, names=options.names, trend=options.trend, seed=seed)
        known = temperature_of(options.inputs) if options.temperature is None else options.temperature
        return pairs, known
    if options.sentences is not None:
        pairs = encode_sentences(options.inputs, options.sentences, names=options.names)
    else:
        pairs = load_pairs(options.inputs, names=options.names, seed=seed)
    return pairs, options.temperature


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    # Its options are the fields of the run's settings, which only settings.read knows.
    parser = commands.add_parser("train", help="train an encoder", add_help=False, allow_abbrev=False)
    parser.set_defaults(run=_run_train, interrupted="the same command goes on from the last checkpoint")


def _run_train(options: argparse.Namespace) -> None:
    from weince.lab import settings

    arguments = options.rest
    chosen, _ = settings.take_config(arguments)
    if chosen is None and not any(a.partition("=")[0] == "--data" for a in arguments):
        chosen = settings.LAPTOP  # the defaults of a run are for photographs: a digit is not to be mirrored
        arguments = ["--config", chosen, *arguments]
    task = "vision" if chosen is None else settings.load(chosen).get("task", "vision")
    if task == "text":
        from weince.lab.text.train import TextRun
        from weince.lab.text.train import train as train_text

        run = settings.read(TextRun, arguments, command="weince train", examples=TRAIN_EXAMPLES)
        print(train_text(run))
        return
    from weince.lab.vision.config import VisionRun
    from weince.lab.vision.train import train

    folder = train(settings.read(VisionRun, arguments, command="weince train", examples=TRAIN_EXAMPLES))
    # Of the processes of a run, the first.
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(folder)


def _add_evaluate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "evaluate",
        help="judge trained encoders: linear probe and neighbours, or STS",
        description="Judge the frozen encoder of a run on images and write RUN/evaluation.json: linear probes and "
        "neighbours, on whole validation and test sets. With --sts, print how well sentence encoders rank pairs.",
        epilog=EVALUATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN",
        help="folder that weince train wrote; with --sts, a sentence encoder's folder or hub name",
    )  # fmt: skip
    parser.add_argument("--data", help="evaluate on other data than the run was trained on")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="(default: auto)")
    parser.add_argument("--quick", action="store_true", help="one seed, ten epochs of the probe (more if "
                        "the images are few): a look, not a result")  # fmt: skip
    parser.add_argument("--sts", type=Path, metavar="TSV", help="task, subset, split, score and two sentences a line "
                        "(needs weince[text])")  # fmt: skip
    parser.add_argument(
        "--published", type=float, help="with --sts: a figure for STS-B test to print beside ours"
    )
    parser.set_defaults(run=_run_evaluate, interrupted="what was printed before is complete")


def _run_evaluate_sts(options: argparse.Namespace) -> None:
    from weince.lab.text.sts import evaluate_sts, table

    device = str(find_device(options.device))
    for model in options.runs:
        scores = evaluate_sts(model, options.sts, device=device, bar=True)
        print(f"{model}\n\n{table(scores, published=options.published)}\n")


def _run_evaluate(options: argparse.Namespace) -> None:
    if options.sts is not None:
        if options.data is not None or options.quick:
            raise ValueError("--data and --quick are for runs on images: leave them out with --sts")
        _run_evaluate_sts(options)
        return
    if options.published is not None:
        raise ValueError("--published is printed beside the scores of --sts FILE, which is missing")
    from rich.console import Console

    from weince.lab.evaluate import table
    from weince.lab.vision.runs import evaluate_run, evaluation_path

    for folder in map(Path, options.runs):
        evaluation = evaluate_run(folder, data=options.data, device=options.device, quick=options.quick)
        Console().print(table(evaluation))
        print(evaluation_path(folder, data=options.data, quick=options.quick))


def _add_reproduce(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "reproduce",
        help="fill a table of the paper, or your own: train, evaluate, compare",
        description="Plan the runs of a table (configurations x losses x tries x seeds), carry out those that are "
        "missing, choose on validation alone, and write CSV, Markdown and a page: reported beside measured.",
        epilog=REPRODUCE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "table", nargs="?", metavar="TABLE", help="name of a table (see --list), or a YAML file"
    )
    parser.add_argument("--list", action="store_true", help="list the tables: name, runs, what it shows")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: %(default)s)")
    parser.add_argument("--data", help="where the images are: PATH, or NAME=PATH,NAME=PATH")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"{SEEDS_HELP} (default: the table's)")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="CELL",
        help="rows, cells as ROW/LOSS, tries as ROW/LOSS/TRY (see --dry-run); * is anything",
    )
    parser.add_argument(
        "--epochs", type=int, help="instead of the configurations': a trial, and said to be one"
    )
    parser.add_argument("--device", choices=DEVICES[1:], help="instead of what is there")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, start nothing")
    parser.add_argument(
        "--table-only",
        action="store_true",
        help="start nothing, write the table from the runs that are there",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="write the runs' records, without weights, into DIR/runs.jsonl",
    )
    parser.add_argument("--slurm", action="store_true", help="submit the runs to Slurm (needs weince[slurm])")
    parser.add_argument("--slurm-options", nargs="+", default=[], metavar="NAME=VALUE", help="of submitit")
    parser.set_defaults(run=_run_reproduce, interrupted="the same command goes on with what is missing")


def _run_reproduce(options: argparse.Namespace) -> None:
    from weince.lab.reproduce import print_tables, reproduce

    if options.list:
        print_tables()
        return
    if options.table is None:
        raise ValueError(
            "reproduce wants a TABLE: the name of one of weince reproduce --list, or a YAML file"
        )
    path = reproduce(
        options.table,
        out=options.out,
        jobs=options.jobs,
        slurm=options.slurm,
        slurm_options=_slurm_options(options),
        data=options.data,
        seeds=_seeds(options.seeds),
        only=options.only,
        epochs=options.epochs,
        device=options.device,
        dry_run=options.dry_run,
        table_only=options.table_only,
        keep=options.keep,
        command=options.command_line,
    )
    if not options.dry_run:
        print(path)


def _add_compare(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "compare",
        help="tell which loss to use: equal tuning, paired seeds, corrected tests, cost",
        description="Give every loss the same number of tries, choose by validation alone, train the choice with all "
        "seeds, compare with the baseline seed by seed, and write a page, CSV and JSON.",
        epilog=COMPARE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "losses", nargs="*", metavar="LOSS", help="presets of weince train, or your own, my_package:MyLoss; none: "
        "those of the comparison in --out",
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
    parser.add_argument("--tries", type=int, default=3, help="settings of each loss (default: %(default)s)")
    parser.add_argument("--try-epochs", type=int, metavar="N", help="epochs of a try (default: as a run)")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"{SEEDS_HELP} (default: 4)")
    parser.add_argument("--baseline", metavar="LOSS", help="(default: infonce; it is added if not named)")
    parser.add_argument(
        "--level-within",
        type=float,
        default=0.5,
        metavar="POINTS",
        help="the largest difference that does not matter (default: %(default)s)",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of all runs, as of weince train"
    )
    parser.add_argument("--out", type=Path, default=Path("compared"), help="folder (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="runs at once (default: one a GPU, or a core, at most 4)")
    parser.add_argument("--data", help="where the images are")
    parser.add_argument("--device", choices=DEVICES[1:], help="instead of what is there")
    parser.add_argument("--budget", metavar="TIME", help="start no run that would end later: 90s, 30m, 2h")
    parser.add_argument(
        "--reuse",
        type=Path,
        nargs="+",
        default=[],
        metavar="ARCHIVE",
        help="take matching runs from runs.jsonl",
    )
    parser.add_argument(
        "--add",
        type=Path,
        nargs="+",
        default=[],
        metavar="ARCHIVE",
        help="add what others ran (their runs.jsonl), if data, recipe and protocol are the same; start nothing",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the runs and the minutes, start nothing"
    )
    parser.add_argument(
        "--table-only", action="store_true", help="start nothing, write the page from the runs that are there"
    )
    parser.add_argument("--slurm", action="store_true", help="submit the runs to Slurm (needs weince[slurm])")
    parser.add_argument("--slurm-options", nargs="+", default=[], metavar="NAME=VALUE", help="of submitit")
    parser.set_defaults(run=_run_compare, interrupted="the same command goes on with what is missing")


def _run_compare(options: argparse.Namespace) -> None:
    import yaml

    from weince.lab.compare import compare

    given = {name: yaml.safe_load(value) for name, value in _pairs("--set", options.set).items()}
    path = compare(
        options.losses,
        config=options.config,
        recipe=options.recipe,
        tries=options.tries,
        seeds=_seeds(options.seeds),
        baseline=options.baseline,
        level_within=options.level_within,
        try_epochs=options.try_epochs,
        set=given,
        out=options.out,
        jobs=options.jobs,
        slurm=options.slurm,
        slurm_options=_slurm_options(options),
        data=options.data,
        device=options.device,
        budget=None if options.budget is None else _duration(options.budget),
        reuse=options.reuse,
        add=options.add,
        dry_run=options.dry_run,
        table_only=options.table_only,
        command=options.command_line,
    )
    if not options.dry_run:
        print(path)


def _seeds(given: list[int] | None) -> int | list[int] | None:
    """One number says how many, several say which."""
    return given[0] if given is not None and len(given) == 1 else given


def _duration(text: str) -> float:
    """Seconds of 90s, 30m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None:
        raise ValueError(f"--budget must be a number with s, m or h, such as 2h; got {text}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    wrong = [one for one in given if "=" not in one]
    if wrong:
        raise ValueError(f"{option} are NAME=VALUE, got {wrong[0]}")
    return dict(one.split("=", 1) for one in given)


def _slurm_options(options: argparse.Namespace) -> dict[str, str]:
    if options.slurm_options and not options.slurm:
        raise ValueError("--slurm-options are for --slurm, which is missing")
    return _pairs("--slurm-options", options.slurm_options)


def _add_predict(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "predict",
        help="see what losses do to a head on your features, before training an encoder",
        description=PREDICT,
        epilog=PREDICT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "features", type=Path, metavar="FEATURES", help="a file, or a run's folder, see above"
    )
    parser.add_argument(
        "--losses", nargs="+", metavar="PRESET", help="(default: infonce dcl hcl released paper)"
    )
    parser.add_argument(
        "--temperatures", type=float, nargs="+", help="(default: 0.05 0.07 0.1 0.15 0.2 0.3 0.5 0.7)"
    )
    parser.add_argument(
        "--labels", type=Path, help="file with a label for each item (default: the features')"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="(default: 0 1 2 3)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes", type=float, default=5.0, help="about how long it may take (default: %(default)g)"
    )
    length.add_argument("--steps", type=int, help="of each head (default: as many as the minutes allow)")
    parser.add_argument("--batch-size", type=int, default=256, help="items in a batch (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each core)")
    parser.add_argument(
        "--out", type=Path, default=Path("heads"), help="folder to write (default: %(default)s)"
    )
    parser.set_defaults(run=_run_predict, interrupted="the same command goes on with the missing heads")


def _run_predict(options: argparse.Namespace) -> None:
    from weince.lab.predict import LOSSES, TEMPERATURES, cores, grid, predict
    from weince.lab.predict.heads import Probe

    path = predict(
        options.features,
        options.out,
        losses=grid(options.losses or LOSSES, options.temperatures or TEMPERATURES),
        labels=options.labels,
        seeds=options.seeds,
        minutes=options.minutes,
        steps=options.steps,
        probe=Probe(batch=options.batch_size),
        jobs=cores() if options.jobs is None else options.jobs,
        command=options.command_line,
    )
    print(path.read_text(encoding="utf-8"))
    print(path)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("bench", help="time the losses on this machine, beside others")
    kinds = parser.add_subparsers(title="what to time", required=True, metavar="WHAT")
    loss = kinds.add_parser(
        "loss",
        help="forward and backward of a loss",
        description="Time our losses, torch InfoNCE, compiled InfoNCE and peers that are installed, in one run.",
        epilog="example:\n  weince bench loss --pairs 256 1024 --device cpu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    loss.add_argument(
        "--pairs",
        type=int,
        nargs="+",
        default=[256, 1024, 4096],
        help="sizes of batch (default: 256 1024 4096)",
    )
    loss.add_argument("--d", type=int, default=128, help="width of the embeddings (default: %(default)s)")
    loss.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: %(default)s)")
    loss.add_argument("--dtype", default="float32", help="of the embeddings (default: %(default)s)")
    loss.add_argument("--repeats", type=int, default=15, help="passes to time (default: %(default)s)")
    loss.add_argument("--no-compile", action="store_true", help="leave compiled InfoNCE out")
    loss.set_defaults(run=_run_bench_loss)


def _run_bench_loss(options: argparse.Namespace) -> None:
    from rich.console import Console

    from weince.lab.bench import bench_loss, table

    timings = bench_loss(
        pairs=options.pairs,
        d=options.d,
        device=options.device,
        dtype=options.dtype,
        repeats=options.repeats,
        compiled=not options.no_compile,
    )
    Console().print(table(timings))


def _add_completion(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "completion",
        help="print what makes a shell complete these commands",
        description="Print a script that makes a shell complete commands, options and their values.",
        epilog=COMPLETION_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], metavar="SHELL", help="bash, zsh or tcsh")
    parser.set_defaults(run=_run_completion)


def _run_completion(options: argparse.Namespace) -> None:
    from weince.completion import script

    print(script(build_parser(), options.shell))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="weince",
        description="A contrastive loss whose tail you can check.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"weince {version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_train,
        _add_evaluate,
        _add_compare,
        _add_reproduce,
        _add_diagnose,
        _add_predict,
        _add_bench,
        _add_completion,
    ):
        add(commands)
    return parser


def _shown(arguments: Sequence[str]) -> str:
    """The command as typed, without the folders that lead to its files."""

    def short(argument: str) -> str:
        option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
        return option + equals + (Path(value).name if "/" in value or os.sep in value else value)

    return shlex.join(["weince", *(short(a) for a in arguments)])


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _refuse_empty(given: Sequence[str]) -> None:
    """Refuse an option without a value, as of a shell's variable that is not set: as a path it would mean here."""
    for before, argument in zip(("weince", *given), given, strict=False):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            raise ValueError(f"nothing is given after {argument.rstrip('=') or before}")


def _explained(error: Exception) -> str | None:
    """What an error says to the user, on one line; None for a fault of our own, whose trace is wanted."""
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        if not package:  # our own, which says what to install
            return str(error)
        if package == "weince" or not isinstance(error, ModuleNotFoundError):
            return None
        return f"{package} is missing: pip install 'weince[{_EXTRAS.get(package, 'runs')}]'"
    said = " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is imported only where it is needed
        return f"{said.partition('. GPU')[0]}: take a smaller batch, encoder or --loss.engine chunked"
    if isinstance(error, MemoryError) or "can't allocate memory" in said:  # numpy's and torch's, on a CPU
        asked = re.search(r"allocate ([\d.]+ \w+)", said)
        return f"not enough memory{f' for {asked[1]}' if asked else ''}: ask for less at once"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return said if isinstance(error, ValueError | OSError | OverflowError) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it worked, 2 with one line on stderr for bad input, 130 when interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    options, rest = parser.parse_known_args(given)
    if rest and options.run is not _run_train:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    options.command_line = _shown(given)
    # Being asked to end is an interruption too: what is unfinished gets removed.
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        _refuse_empty(given)
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(
            f"weince: interrupted, {getattr(options, 'interrupted', 'nothing was written')}", file=sys.stderr
        )
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has enough, as in `weince reproduce --list | head -3`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        return BROKEN_PIPE
    except Exception as error:
        said = _explained(error)
        if said is None:
            raise
        print(f"weince: {said}", file=sys.stderr)
        return BAD_INPUT
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0
