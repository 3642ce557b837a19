"""How a command declares itself, and how its line is read.

A command is a frozen dataclass: its fields are its options, the first line of its docstring says what it does, the
rest is shown by ``--help``, and calling it does the work::

    @dataclass(frozen=True, kw_only=True)
    class Evaluate:
        \"\"\"Judge trained encoders.

        A longer text.
        \"\"\"

        runs: list[Path] = option(REQUIRED, "folders that weince train wrote", "RUN", word=True)
        quick: bool = option(False, "a first look, not a result")

        examples: ClassVar = "weince evaluate runs/a"
        interrupted: ClassVar = "what was printed before is complete"   # what to tell who interrupted it

        def __call__(self, typed: str) -> None:
            from weince.lab... import ...   # here, so that help is fast
            print(...)

A field becomes the option ``--its-name``: a ``bool`` is a flag, a ``list`` takes several values, a ``Literal`` one of
its values. A line in `weince.cli.COMMANDS` names the command. ``typed`` is the line as typed, for a page.
"""

import argparse
import inspect
import re
import shlex
import types
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

REQUIRED = object()
DeviceName = Literal["auto", "cpu", "cuda", "mps"]


def option(default: Any, text: str, shown: str = "", *, word: bool = False) -> Any:
    """A field of a command.

    Args:
        default: Its default; `REQUIRED` if there is none. Help shows it unless it is empty or the text says it.
        text: What help says.
        shown: What help calls the value; by default the option's name.
        word: The value is given without the option's name.
    """
    metadata = {"text": text, "shown": shown, "word": word}
    if default is REQUIRED:
        return field(metadata=metadata)
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Command:
    """A command by its name, such as ``bench loss``, and the dataclass that declares it."""

    name: str
    kind: type[Any]

    @property
    def summary(self) -> str:
        """What it does, in the list of commands: the first line of its docstring."""
        return (self.kind.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def interrupted(self) -> str:
        """What to tell a user who interrupted it."""
        return str(getattr(self.kind, "interrupted", "nothing was written"))

    @cached_property
    def parser(self) -> Any:
        from jsonargparse import ArgumentParser

        parser = ArgumentParser(
            prog=f"weince {self.name}",
            exit_on_error=False,
            allow_abbrev=False,  # --seed 3, one seed of weince train, must not mean --seeds 3, a count
            description=inspect.cleandoc((self.kind.__doc__ or "").partition("\n")[2]),
            epilog=_examples(getattr(self.kind, "examples", "")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if not hasattr(self.kind, "read"):
            _declare(parser, self.kind)
        return parser

    def read(self, arguments: Sequence[str]) -> Any:
        """An instance of the dataclass, from its options.

        Raises:
            ValueError: The arguments do not fit; the message names the nearest option.
        """
        if hasattr(self.kind, "read"):  # weince train, whose options are the settings of its run
            return self.kind.read(list(arguments))
        try:
            options = self.parser.parse_args(list(arguments))
        except argparse.ArgumentError as error:
            rest = re.match(r"unrecognized arguments: (.*)", str(error))
            if rest:
                self._refuse(shlex.split(rest[1]) or [""])
            from weince.lab.settings import plainly

            self._fail(plainly(str(error), ()))
        return self.kind(**{item.name: getattr(options, item.name) for item in fields(self.kind)})

    def _refuse(self, rest: Sequence[str]) -> NoReturn:
        """Refuse arguments that this command does not know; suggests the nearest option."""
        unknown = rest[0].partition("=")[0]
        if not unknown.startswith("-"):
            self._fail(f"unrecognized arguments: {' '.join(rest)}")
        known = self.parser._option_string_actions
        if "--set" in known and _is_shared(unknown.removeprefix("--")):
            self._fail(f"unknown option {unknown}: give a setting of all runs as --set {unknown[2:]}=VALUE")
        near = [name for name in known if name.startswith(unknown)] or get_close_matches(unknown, known, n=1)
        self._fail(f"unknown option {unknown}{f' (did you mean {near[0]}?)' if near else ''}")

    def _fail(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see weince {self.name} --help")


def _is_shared(name: str) -> bool:
    """Whether an option of ``weince train`` is a setting that all losses of a comparison share."""
    from weince.completion import train_options

    return name in train_options() and name.partition(".")[0] not in ("loss", "seed", "out")


def _examples(examples: str) -> str:
    lines = examples.strip().splitlines()
    said = [f"  {line}" if line.startswith("weince") else line for line in lines]
    return "\n".join([f"example{'s' if len(lines) > 1 else ''}:", *said]) if lines else ""


def _declare(parser: Any, kind: type[Any]) -> None:
    """Add an option, or words without a name, for each field."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        name, hint = item.name.rstrip("_"), _without_none(hints[item.name])
        several = get_origin(hint) is list
        value = get_args(hint)[0] if several else hint
        options: dict[str, Any] = {"help": item.metadata["text"]}
        if value is bool:
            options["action"] = "store_true"
        elif get_origin(value) is Literal:
            options["choices"] = get_args(value)
        else:
            options |= {"type": value, "metavar": item.metadata["shown"] or name.upper()}
        required = item.default is MISSING and item.default_factory is MISSING
        if not required:
            options["default"] = item.default if item.default_factory is MISSING else item.default_factory()
            if options["default"] not in (None, False, "", []) and "(default" not in options["help"]:
                options["help"] += " (default: %(default)s)"
        if item.metadata["word"]:
            nargs = {(True, True): "+", (True, False): "*", (False, False): "?"}.get((several, required))
            parser.add_argument(item.name, **options, **({"nargs": nargs} if nargs else {}))
        else:
            if several:
                options |= {"nargs": "+", "action": "extend"}
            parser.add_argument(f"--{name.replace('_', '-')}", dest=item.name, required=required, **options)


def _without_none(hint: Any) -> Any:
    """The type of ``X | None`` without None."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint
