"""Tab completion of the commands in a shell; shtab writes the script from the parser."""

import argparse
from dataclasses import fields

from weince.lab import settings
from weince.lab.configure import PRESETS
from weince.tail import TailConfig

_FILES = {"inputs", "sentences", "sts", "data", "text", "reuse", "add", "negatives"}
_FOLDERS = {"runs", "out", "keep"}


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """A shell script that completes the commands and options of a parser.

    Args:
        parser: Parser of all commands. It is changed for completion, so do not parse with it afterwards.
        shell: ``bash``, ``zsh`` or ``tcsh``.
    """
    import shtab

    from weince.lab.study.table import named_tables

    commands = _commands(parser)
    for option, values in train_options().items():
        commands["train"].add_argument(f"--{option.replace('_', '-')}", choices=values or None)
    for command in commands.values():
        for action in command._actions:
            if action.dest == "table":
                action.choices = sorted([*named_tables(), "overhead"])
            elif action.dest in ("losses", "baseline"):
                action.choices = list(PRESETS)
            elif action.dest == "config":
                action.choices = list(settings.named_configs())
            elif action.dest in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.dest in _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def train_options() -> dict[str, tuple[str, ...]]:
    """Options of ``weince train``, the settings of a run, each with its choices; () if it has none."""
    from weince.lab.tasks.registry import TASKS

    found: dict[str, tuple[str, ...]] = {"config": tuple(settings.named_configs()), "help": ()}
    for task in TASKS.values():
        found |= settings.options(task.settings)
    found["loss.preset"] = tuple(PRESETS)
    return found | {f"loss.tail.{item.name}": () for item in fields(TailConfig)}
