"""The command line: read a line, call its command, tell in one line what went wrong.

`weince.command_line` says how a command declares itself. A command does its own imports, so that help is fast and a
package is reported missing only by a command that needs it.
"""

import _thread
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, NoReturn

from weince.cli_diagnose import Diagnose
from weince.cli_runs import BenchLoss, Evaluate, Train
from weince.cli_sweeps import Compare, Reproduce
from weince.cli_towers import Mine
from weince.command_line import REQUIRED, Command, option
from weince.errors import explained
from weince.machine import print_any_text, version

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 128 + signal.SIGINT, 141
"""Exit statuses of a command that did not succeed."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script for tab completion.

    Print a script that makes a shell complete commands, options and their values.
    """

    shell: Literal["bash", "zsh", "tcsh"] = option(REQUIRED, "bash, zsh or tcsh", word=True)

    examples: ClassVar = """
mkdir -p ~/.local/share/bash-completion/completions
weince completion bash > ~/.local/share/bash-completion/completions/weince
weince completion zsh > ~/.zfunc/_weince             (a folder of $fpath)
weince completion tcsh > ~/.weince.csh               (and source it)
"""

    def __call__(self, typed: str) -> None:
        from weince.completion import script

        print(script(COMMANDS, self.shell))


COMMANDS = {
    name: Command(name, kind)
    for name, kind in {
        "train": Train,
        "evaluate": Evaluate,
        "mine": Mine,
        "compare": Compare,
        "reproduce": Reproduce,
        "diagnose": Diagnose,
        "bench loss": BenchLoss,
        "completion": Completion,
    }.items()
}

HELP = """\
usage: weince [-h] [--version] COMMAND ...

Choose, check and scale a contrastive loss.

commands:
{commands}

examples:
  weince train --help
  weince diagnose pairs.npz --out report
  weince compare infonce dcl
  weince reproduce --list
  weince completion --help                             (tab completion)
"""


def command_of(arguments: Sequence[str]) -> tuple[Command, list[str]]:
    """The command that a line names, and the rest of the line."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return COMMANDS[name], list(arguments[words:])
    word = arguments[0] if arguments else ""
    wanted = [name for name in COMMANDS if name.startswith(f"{word} ")] if word else list(COMMANDS)
    if wanted:
        raise ValueError(
            f"a command is missing: {', '.join(f'weince {name}' for name in wanted)}; see weince --help"
        )
    near = get_close_matches(word, COMMANDS, n=1)
    raise ValueError(
        f"unknown command {word}{f' (did you mean {near[0]}?)' if near else ''}; see weince --help"
    )


def overview() -> str:
    """The help of ``weince`` itself."""
    return HELP.format(
        commands="\n".join(f"  {name:<12} {command.summary}" for name, command in COMMANDS.items())
    )


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


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse an empty value, as an unset shell variable gives: an empty path would mean the current folder."""
    for before, argument in zip(("weince", *words), words, strict=False):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            raise ValueError(f"nothing is given after {argument.rstrip('=') or before}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 for success, 2 for bad input (one line on stderr says why), 130 if interrupted, 141 if the reader of the output
    closed the pipe.
    """
    print_any_text()
    line = list(sys.argv[1:] if arguments is None else arguments)
    if line[:1] in (["-h"], ["--help"], ["--version"]):
        print(f"weince {version()}" if line[0] == "--version" else overview().rstrip())
        return 0
    interrupted = "nothing was written"
    # Handle SIGTERM like Ctrl-C, so that unfinished files are removed.
    before, hook = signal.signal(signal.SIGTERM, _stop), sys.unraisablehook
    sys.unraisablehook = partial(_stop_later, hook)
    try:
        command, rest = command_of(line)
        interrupted = command.interrupted
        _refuse_empty(line)
        command.read(rest)(_shown(line))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"weince: interrupted, {interrupted}", file=sys.stderr)
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
