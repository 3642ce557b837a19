"""Tab completion of the commands in a shell; shtab writes the script from the commands' parsers."""

import argparse
from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from typing import Any

from weince.lab import settings
from weince.lab.configure import PRESETS
from weince.tail import TailConfig

_FILES = {"inputs", "sentences", "sts", "data", "text", "reuse", "add", "negatives"}
_FOLDERS = {"runs", "out", "keep"}


def script(commands: Mapping[str, Any], shell: str) -> str:
    """A shell script that completes commands, by name, and their options, for ``bash``, ``zsh`` or ``tcsh``."""
    import shtab

    every = argparse.ArgumentParser(prog="weince")
    groups = {"": every.add_subparsers()}
    for name, command in commands.items():
        *above, word = name.split()
        for group in above:
            if group not in groups:
                groups[group] = groups[""].add_parser(group, help=command.summary).add_subparsers()
        parser = groups[" ".join(above)].add_parser(word, help=command.summary)
        for action in command.parser._actions:
            if action.dest not in ("help", "print_shtab"):
                parser._add_action(copy(action))
        if name == "train":
            options = train_options()
            for option in options.keys() - {"help"}:
                values = options[option]
                parser.add_argument(f"--{option.replace('_', '-')}", choices=values or None)
        for action in parser._actions:
            _complete(action, shtab)
    return str(shtab.complete(every, shell))


def _complete(action: Any, shtab: Any) -> None:
    """Say what an option's values are, if they are names, files or folders."""
    from weince.lab.study.table import named_tables

    names = {
        "table": lambda: sorted([*named_tables(), "overhead"]),
        "losses": lambda: list(PRESETS),
        "baseline": lambda: list(PRESETS),
        "config": lambda: list(settings.named_configs()),
    }
    if action.dest in names:
        action.choices = names[action.dest]()
    elif action.dest in _FILES:
        action.complete = shtab.FILE
    elif action.dest in _FOLDERS:
        action.complete = shtab.DIRECTORY


def train_options() -> dict[str, tuple[str, ...]]:
    """Options of ``weince train``, the settings of a run, each with its choices; () if it has none."""
    from weince.lab.tasks.registry import TASKS

    options: dict[str, tuple[str, ...]] = {"config": tuple(settings.named_configs()), "help": ()}
    for task in TASKS.values():
        options |= settings.options(task.settings)
    options["loss.preset"] = tuple(PRESETS)
    return options | {f"loss.tail.{item.name}": () for item in fields(TailConfig)}
