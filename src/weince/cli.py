"""The command line: parse, call one function, print.

Each command is a pair of functions: ``_add_NAME`` declares its options, ``_run_NAME`` calls the library.
``_run_NAME`` does its own imports, so that help is fast and a package is reported missing only by a command that
needs it.
"""

import _thread
import argparse
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from weince import cli_diagnose, cli_sweeps, cli_towers
from weince.errors import explained
from weince.machine import DEVICES, find_device, print_any_text, version

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 128 + signal.SIGINT, 141
"""Exit statuses of a command that did not succeed."""

EXAMPLES = """\
examples:
  weince train --help
  weince diagnose pairs.npz --out report
  weince compare infonce dcl
  weince reproduce --list
  weince completion --help                             (tab completion)
"""
COMPLETION_EXAMPLES = """\
examples:
  mkdir -p ~/.local/share/bash-completion/completions
  weince completion bash > ~/.local/share/bash-completion/completions/weince
  weince completion zsh > ~/.zfunc/_weince             (a folder of $fpath)
  weince completion tcsh > ~/.weince.csh               (and source it)
"""
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
EVALUATE_EXAMPLES = """\
examples:
  weince evaluate runs/a
  weince evaluate runs/a runs/b --device cuda
  weince evaluate runs/a --quick
  weince evaluate runs/simcse_paper/best --sts sts.tsv
"""


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    # No options here: settings.read parses them, since they are the fields of the run's settings.
    parser = commands.add_parser("train", help="train an encoder", add_help=False)
    parser.set_defaults(run=_run_train, interrupted="the same command goes on from the last checkpoint")


def _run_train(options: argparse.Namespace) -> None:
    from weince.lab import settings
    from weince.lab.configure import line_named
    from weince.lab.tasks.registry import task_of

    arguments = options.rest
    chosen, _ = settings.take_config(arguments)
    if chosen is None and not any(a.partition("=")[0] == "--data" for a in arguments):
        chosen = settings.LAPTOP  # the defaults are for photographs, and would mirror digits
        arguments = ["--config", chosen, *arguments]
    task = task_of({} if chosen is None else settings.load(chosen))
    run = settings.read(task.settings, arguments, command="weince train", examples=TRAIN_EXAMPLES)
    with line_named(run.loss.preset):
        path = task.train(run)
    # Only the first process of a run prints.
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(path)


def _add_evaluate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "evaluate",
        help="judge trained encoders: linear probe and neighbours, retrieval, or STS",
        description="Judge the encoder of a run and write RUN/evaluation.json. Images: linear probes and neighbours\n"
        "on whole validation and test sets. Two towers: nDCG, recall, MRR and MAP of an exact search. With --sts,\n"
        "print how well sentence encoders rank pairs.",
        epilog=EVALUATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN",
        help="folder that weince train wrote; with --sts, a sentence encoder's folder or hub name",
    )  # fmt: skip
    parser.add_argument("--data", help="data to evaluate on: a name or a path (default: the run's)")
    parser.add_argument(
        "--device",
        default="auto",
        choices=DEVICES,
        help="device to run on; auto takes a CUDA device if there is one (default: auto)",
    )
    parser.add_argument("--quick", action="store_true", help="train the probe with one seed for ten epochs "
                        "(more if there are few images): a first look, not a result")  # fmt: skip
    parser.add_argument("--sts", type=Path, metavar="TSV", help="file with task, subset, split, score and two "
                        "sentences per line (needs weince[text])")  # fmt: skip
    parser.add_argument(
        "--published", type=float, help="published figure for STS-B test, to print beside ours; needs --sts"
    )
    parser.set_defaults(run=_run_evaluate, interrupted="what was printed before is complete")


def _run_evaluate_sts(options: argparse.Namespace) -> None:
    from weince.lab.tasks.sentences.sts import evaluate_sts, table

    device = str(find_device(options.device))
    for model in options.runs:
        scores = evaluate_sts(model, options.sts, device=device, bar=True)
        print(f"{model}\n\n{table(scores, published=options.published)}\n")


def _run_evaluate(options: argparse.Namespace) -> None:
    if options.sts is not None:
        if options.data is not None or options.quick:
            raise ValueError(
                "--data and --quick are for runs on images; got --sts too: leave one of them out"
            )
        _run_evaluate_sts(options)
        return
    if options.published is not None:
        raise ValueError("--published wants --sts FILE, whose scores it is printed beside; got no --sts")
    from rich.console import Console

    from weince.lab.tasks.images.evaluation import table
    from weince.lab.tasks.images.runs import evaluate_run, evaluation_path
    from weince.lab.tasks.towers.task import is_run

    for folder in map(Path, options.runs):
        if is_run(folder):
            cli_towers.evaluate_towers(folder, data=options.data, device=options.device)
            continue
        evaluation = evaluate_run(folder, data=options.data, device=options.device, quick=options.quick)
        Console().print(table(evaluation))
        print(evaluation_path(folder, data=options.data, quick=options.quick))


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("bench", help="time the losses on this machine")
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
        action="extend",
        nargs="+",
        help="pairs in a batch, one size or several (default: 256 1024 4096)",
    )
    loss.add_argument("--d", type=int, default=128, help="width of the embeddings (default: %(default)s)")
    loss.add_argument(
        "--device", default="auto", help="device to time on: auto, cpu, cuda or mps (default: %(default)s)"
    )
    loss.add_argument(
        "--dtype",
        default="float32",
        help="type of the embeddings: float32, bfloat16, float16 or float64 (default: %(default)s)",
    )
    loss.add_argument("--repeats", type=int, default=15, help="passes to time (default: %(default)s)")
    loss.add_argument("--no-compile", action="store_true", help="leave compiled InfoNCE out")
    loss.set_defaults(run=_run_bench_loss, parser=loss)


def _run_bench_loss(options: argparse.Namespace) -> None:
    from rich.console import Console

    from weince.lab.bench import bench_loss, table

    timings = bench_loss(
        pairs=options.pairs or [256, 1024, 4096],
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
        help="print a script for tab completion",
        description="Print a script that makes a shell complete commands, options and their values.",
        epilog=COMPLETION_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], metavar="SHELL", help="bash, zsh or tcsh")
    parser.set_defaults(run=_run_completion)


def _run_completion(options: argparse.Namespace) -> None:
    from weince.completion import script

    print(script(build_parser(), options.shell))


class _Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong, like the commands themselves; argparse prints the usage too.

    It takes no abbreviations: ``--seed 3`` of ``weince train`` must not mean ``--seeds 3``, a count.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"weince: {message}; see {self.prog} --help\n")

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """Refuse arguments that this command does not know; suggests the nearest option."""
        given = rest[0].partition("=")[0]
        if not given.startswith("-"):
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        if "--set" in self._option_string_actions and _is_shared(given.removeprefix("--")):
            self.error(f"unknown option {given}: give a setting of all runs as --set {given[2:]}=VALUE")
        known = self._option_string_actions
        near = [name for name in known if name.startswith(given)] or get_close_matches(given, known, n=1)
        self.error(f"unknown option {given}{f' (did you mean {near[0]}?)' if near else ''}")


def _is_shared(name: str) -> bool:
    """Whether an option of ``weince train`` is a setting that all losses of a comparison share."""
    from weince.completion import train_options

    return name in train_options() and name.partition(".")[0] not in ("loss", "seed", "out")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser: argparse.ArgumentParser = _Parser(
        prog="weince",
        description="Choose, check and scale a contrastive loss.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"weince {version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_train,
        _add_evaluate,
        cli_towers.add_mine,
        cli_sweeps.add_compare,
        cli_sweeps.add_reproduce,
        cli_diagnose.add_diagnose,
        _add_bench,
        _add_completion,
    ):
        add(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _shown(arguments: Sequence[str]) -> str:
    """The command as typed, with absolute paths shortened to file names."""

    def short(argument: str) -> str:
        """Of ``--data=/a/images``, or of ``text=/a/wiki.txt,sts=/b/sts.tsv``, too."""
        if "," in argument:
            return ",".join(map(short, argument.split(",")))
        name, equals, value = ("", "", argument) if Path(argument).is_absolute() else argument.rpartition("=")
        return name + equals + (Path(value).name if Path(value).is_absolute() else value)

    # A name that is not UTF-8 cannot be written to the page.
    return shlex.join(["weince", *(short(a) for a in arguments)]).encode("utf-8", "replace").decode("utf-8")


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _stop_later(otherwise: Callable[..., Any], ignored: "sys.UnraisableHookArgs") -> None:
    """Stop again soon if Python ignored a stop, as it does in ``__del__`` and in callbacks of weak references.

    Args:
        otherwise: The hook for any other exception that Python ignores.
        ignored: What Python ignored.
    """
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        otherwise(ignored)
        return
    again = threading.Timer(0.1, _thread.interrupt_main, [signal.SIGTERM])
    again.daemon = True
    again.start()


def _refuse_empty(given: Sequence[str]) -> None:
    """Refuse an empty value, as an unset shell variable gives: an empty path would mean the current folder."""
    for before, argument in zip(("weince", *given), given, strict=False):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            raise ValueError(f"nothing is given after {argument.rstrip('=') or before}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 for success, 2 for bad input (one line on stderr says why), 130 if interrupted, 141 if the reader of the output
    closed the pipe.
    """
    print_any_text()
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    options, rest = parser.parse_known_args(given)
    options.rest = rest
    options.command_line = _shown(given)
    # Handle SIGTERM like Ctrl-C, so that unfinished files are removed.
    before, hook = signal.signal(signal.SIGTERM, _stop), sys.unraisablehook
    sys.unraisablehook = partial(_stop_later, hook)
    try:
        if rest and options.run is not _run_train:
            options.parser.refuse(rest)
        _refuse_empty(given)
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(
            f"weince: interrupted, {getattr(options, 'interrupted', 'nothing was written')}", file=sys.stderr
        )
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as in `weince reproduce --list | head -3`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return BROKEN_PIPE
    except Exception as error:
        said = explained(error)
        if said is None:
            raise
        print(f"weince: {said}", file=sys.stderr)
        return BAD_INPUT
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.unraisablehook = hook
    return 0
