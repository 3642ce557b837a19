"""Reading a run's settings: a YAML file, then what the command line says instead.

A settings class is a frozen dataclass; its fields are the options (``--loss.temperature 0.2`` for a field of a
field). The command line wins over the file, wherever on the line ``--config`` stands.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from weince.configure import unknown


def read(kind: type[Any], arguments: Sequence[str], *, command: str, examples: str) -> Any:
    """An instance of ``kind`` from a command line such as ``--config FILE --loss.temperature 0.2``.

    Raises:
        ValueError: An unknown key (with the nearest known one) or a value of the wrong type.
    """
    from jsonargparse import ArgumentParser

    chosen, rest = take_config(arguments)
    given = {} if chosen is None else load(chosen)
    known = set(keys(kind))
    for key in _given_keys(given, known):
        if key not in known:
            raise ValueError(f"{chosen}: {unknown('key', key, sorted(known))}")
    parser = ArgumentParser(
        prog=command,
        exit_on_error=False,
        allow_abbrev=False,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file, or the name of one that comes with weince"
    )
    parser.add_class_arguments(kind, None, as_group=False)
    try:
        asked = parser.parse_object(given)
    except argparse.ArgumentError as error:
        raise ValueError(f"{chosen}: {_explained(str(error), known)}") from None
    try:
        built = parser.instantiate(parser.parse_args(rest, namespace=asked))
    except argparse.ArgumentError as error:
        raise ValueError(_explained(str(error), known)) from None
    return kind(**{item.name: built[item.name] for item in fields(kind)})


def take_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """What follows ``--config``, and the arguments without it."""
    chosen, rest = None, list(arguments)
    for place, argument in enumerate(arguments):
        if argument == "--config":
            if place + 1 == len(arguments):
                raise ValueError("--config needs a YAML file after it")
            chosen = arguments[place + 1]
            del rest[place : place + 2]
            break
        if argument.startswith("--config="):
            chosen = argument.removeprefix("--config=")
            del rest[place]
            break
    return chosen, rest


def named_configs() -> dict[str, Path]:
    """The configurations that come with the package, by name."""
    here = Path(__file__).parent
    folder = next(
        (f for f in (here / "configs", here.parents[1] / "configs") if f.is_dir()), here
    )  # wheel, checkout
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load(chosen: str) -> dict[str, Any]:
    """The content of a YAML file, or of a configuration that comes with the package."""
    path = Path(chosen)
    if not path.exists():
        named = named_configs()
        if path.stem not in named or path.parent != Path():
            raise ValueError(f"no such file, and {unknown('configuration', chosen, named)}")
        path = named[path.stem]
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{chosen} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{chosen} must hold keys and values; got {type(content).__name__}")
    return content


def dump(settings: Any) -> str:
    """Settings as YAML that :func:`read` takes again."""
    return str(yaml.safe_dump(_plain(asdict(settings)), sort_keys=False))


def keys(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        yield prefix + item.name
        if is_dataclass(hints[item.name]):
            yield from keys(hints[item.name], f"{prefix}{item.name}.")


def _given_keys(given: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    """The dotted names in a file, down to where settings are plain values."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        yield key
        if isinstance(value, dict) and any(other.startswith(f"{key}.") for other in known):
            yield from _given_keys(value, known, f"{key}.")


def _explained(message: str, known: set[str]) -> str:
    """jsonargparse's message on one line, with the nearest key for one it does not know."""
    found = re.search(r"unrecognized arguments: --([\w.-]+)", message)
    if found:
        return unknown("option", found.group(1), sorted(known))
    message = message.replace("Parser key ", "").replace("typing.Literal", "one of ")
    message = re.sub(r"Expected an? (?:<class '(\w+)'>)?", r"expected \1", message)
    return " ".join(message.replace("Got value:", "Got").split())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
