"""Read a run's settings: a YAML file, overridden by the command line.

A settings class is a frozen dataclass; its fields are the options (``--loss.temperature 0.2`` for a nested field).
The command line overrides the file, wherever ``--config`` appears on it.
"""

import argparse
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from weince.files import check_folder, write_text_aside
from weince.lab.configure import unknown

LAPTOP = "digits_tiny"
"""The configuration that ``weince train`` uses without ``--data`` and ``--config``."""

LARGEST = 1e30
"""Largest learning rate; numbers of float32 end at 3e38."""


def read(kind: type[Any], arguments: Sequence[str], *, command: str, examples: str) -> Any:
    """Make an instance of ``kind`` from a command line such as ``--config FILE --loss.temperature 0.2``.

    Raises:
        ValueError: A key is unknown (the message suggests the nearest one) or a value has the wrong type.
    """
    chosen, rest = take_config(arguments)
    content = {} if chosen is None else load(chosen)
    kinds = dict(_kinds(kind))
    try:
        _check(content, kinds)
    except ValueError as error:
        raise ValueError(f"{chosen}: {error}") from None
    helps = not {"-h", "--help"}.isdisjoint(rest)
    make = _parser.__wrapped__ if helps else _parser  # help changes the defaults of its parser
    parser = make(kind, command, examples)  # type: ignore[arg-type]
    try:
        asked = _checked(parser, (kind, command, examples), content)
    except argparse.ArgumentError as error:
        raise ValueError(f"{chosen}: {plainly(str(error), kinds)}") from None
    if helps:
        parser.set_defaults(content)  # help shows the values that the run would use
    try:
        # no defaults: what the file does not set has its default already
        parsed = parser.parse_args(_as_fields(rest), namespace=asked, defaults=False)
        built = parser.instantiate(parsed)
        return kind(**{item.name: built[item.name] for item in fields(kind)})
    except argparse.ArgumentError as error:
        raise ValueError(plainly(str(error), kinds)) from None
    except ValueError as error:
        if chosen is None or rest:  # the error may come from the command line
            raise
        raise ValueError(f"{chosen}: {error}") from None


def build(kind: type[Any], content: Mapping[str, Any]) -> Any:
    """Make an instance of ``kind`` from nested keys and values, as a file holds them.

    Raises:
        ValueError: A key is unknown (the message suggests the nearest one) or a value has the wrong type.
    """
    kinds = dict(_kinds(kind))
    _check(content, kinds)
    parser = _parser(kind, "weince train", "")  # type: ignore[arg-type]
    try:
        built = parser.instantiate(_checked(parser, (kind, "weince train", ""), content))
    except argparse.ArgumentError as error:
        raise ValueError(plainly(str(error), kinds)) from None
    return kind(**{item.name: built[item.name] for item in fields(kind)})


@lru_cache(maxsize=8)
def _parser(kind: type[Any], command: str, examples: str) -> Any:
    """A parser for the options of a settings class; cached: a table reads the settings of hundreds of runs."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog=command,
        exit_on_error=False,
        allow_abbrev=False,
        description="Train an encoder and write the run's folder: on images (SimCLR), or on sentences if the\n"
        "file of --config says so. The defaults below are those of the file.",
        epilog=examples,
        formatter_class=_help_formatter(),
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"YAML file, or the name of one that comes with weince; {LAPTOP} without this and without --data",
    )
    parser.add_class_arguments(kind, None, as_group=False)
    return parser


_FILES: dict[tuple[object, ...], Any] = {}


def _checked(parser: Any, of: tuple[object, ...], content: Mapping[str, Any]) -> Any:
    """A file's settings, checked and with defaults; cached: a table reads its configurations for every run.

    ``of`` names the parser. The settings are looked up by how they are written, where 1, 1.0 and True differ.
    """
    key = (*of, repr(content))
    if key not in _FILES:
        _FILES[key] = parser.parse_object(content)
    return deepcopy(_FILES[key])


def check_range(run: Any, least: Mapping[str, int], below: Mapping[str, int]) -> None:
    """Refuse settings smaller than ``least[name]``, or not below 2 to the power of ``below[name]``."""
    for name, smallest in least.items():
        if getattr(run, name) < smallest:
            raise ValueError(f"{name} must be at least {smallest}; got {getattr(run, name)}")
    for name, power in below.items():
        if getattr(run, name) >= 2**power:
            raise ValueError(f"{name} must be below 2**{power}; got {getattr(run, name)}")


def check_positive(run: Any, *names: str) -> None:
    """Refuse rates that are not above 0, or so large that an optimizer's products overflow float32."""
    for name in names:
        if not 0 < getattr(run, name) <= LARGEST:
            raise ValueError(f"{name} must be above 0 and at most {LARGEST:g}; got {getattr(run, name)}")


def check_once(what: str, values: Sequence[Any]) -> None:
    """Refuse a value that is listed twice; ``what`` is the word for one of them.

    >>> check_once("seed", [7, 21, 7])
    Traceback (most recent call last):
    ...
    ValueError: every seed must be named once; got 7 twice
    """
    for number, value in enumerate(values):
        if value in values[:number]:
            raise ValueError(f"every {what} must be named once; got {value} twice")


def _as_fields(arguments: Sequence[str]) -> list[str]:
    """Arguments with options spelled like fields: ``--snapshot-every`` becomes ``--snapshot_every``."""
    parts = [
        argument.partition("=") if argument.startswith("--") else ("", "", argument) for argument in arguments
    ]
    return [name[:2] + name[2:].replace("-", "_") + equals + value for name, equals, value in parts]


def _help_formatter() -> type[argparse.HelpFormatter]:
    """A help formatter that shows defaults, keeps the layout of examples, and strips markup from docstrings."""
    from jsonargparse import DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
        def _get_type_str(self, action: argparse.Action) -> None:
            return None  # the default value shows the type

        def _expand_help(self, action: argparse.Action) -> str:
            return _unmarked(super()._expand_help(action))

        def _format_action_invocation(self, action: argparse.Action) -> str:
            return _hyphened(super()._format_action_invocation(action))

        def _format_usage(self, *arguments: Any) -> str:
            return _hyphened(super()._format_usage(*arguments))

        def start_section(self, heading: str | None) -> None:
            super().start_section(heading and _unmarked(heading))

    return Formatter


def _hyphened(text: str) -> str:
    """Text with options spelled as on the command line: ``--snapshot-every``."""
    return re.sub(r"--[\w.]+", lambda option: option[0].replace("_", "-"), text)


def _unmarked(text: str) -> str:
    """Text without reST markup: ``:class:`x``` and double backticks."""
    return re.sub(r"(?::\w+:)?(`+)(.+?)\1", r"\2", text)


def take_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of ``--config``, or None, and the arguments without it."""
    chosen, rest = [], []
    left = iter(arguments)
    for argument in left:
        if argument == "--config":
            chosen.append(next(left, ""))
        elif argument.startswith("--config="):
            chosen.append(argument.removeprefix("--config="))
        else:
            rest.append(argument)
    if "" in chosen:
        raise ValueError("--config needs a YAML file after it")
    if len(chosen) > 1:
        raise ValueError(f"--config is for one file; got {', '.join(chosen)}")
    return (chosen[0] if chosen else None), rest


def configs_folder() -> Path:
    """Folder of the configurations that come with the package."""
    here = Path(__file__).parents[1]
    places = here / "configs", here.parents[1] / "configs"  # in a wheel, in a checkout
    return next((place for place in places if place.is_dir()), places[0])


def named_configs() -> dict[str, Path]:
    """The configurations that come with the package, by name."""
    return {path.stem: path for path in sorted(configs_folder().glob("*.yaml"))}


def load(chosen: str) -> dict[str, Any]:
    """The content of a YAML file, or of a configuration that comes with the package."""
    path = Path(chosen)
    if not path.is_file():  # a folder of that name does not count
        named = named_configs()
        if path.stem not in named or path.parent != Path():
            raise ValueError(f"no such file, and {unknown('configuration', chosen, named)}")
        path = named[path.stem]
    content = read_yaml(path, chosen)
    if not isinstance(content, dict):
        raise ValueError(f"{chosen} must hold keys and values; got {type(content).__name__}")
    return content


def read_yaml(path: Path, name: str) -> Any:
    """Content of a YAML file.

    Raises:
        ValueError: It is not YAML, or has a duplicate key; the message calls the file ``name``.
    """
    try:
        return deepcopy(_parsed(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Parse YAML, cached: a table reads its configurations for every run."""
    return yaml.load(text, _Once)


class _Once(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys and values that contain themselves.

    Yaml's own silently uses the last of the keys, and builds endless values.
    """

    def construct_document(self, node: yaml.Node) -> Any:
        self.deep_construct = True  # then an alias inside of what it stands for is an error
        return super().construct_document(node)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.composer.ComposerError(None, None, f"{twice[0]!r} stands twice", node.start_mark)
        return node


def dump(settings: Any) -> str:
    """Settings as YAML that :func:`read` can read."""
    return str(yaml.safe_dump(as_written(settings), sort_keys=False))


def as_written(settings: Any) -> dict[str, Any]:
    """Settings as in a ``run.yaml``: tuples as lists, paths as text."""
    content: dict[str, Any] = _plain(asdict(settings))
    return content


def _kinds(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names of all fields, and their types."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint = hints[item.name]
        yield prefix + item.name, hint
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _kinds(hint, f"{prefix}{item.name}.")


def options(kind: type[Any]) -> dict[str, tuple[str, ...]]:
    """The command-line options of a settings class, with the possible values of those that have only a few."""
    choices = {}
    for name, hint in _kinds(kind):
        if is_dataclass(hint):
            continue
        values = [value for part in (hint, *get_args(hint)) for value in _values(part)]
        choices[name] = tuple(dict.fromkeys(values))
    return choices


def _values(hint: Any) -> Sequence[str]:
    """The possible values of a type, as written on the command line, if they are few; else empty."""
    if hint is bool:
        return "true", "false"
    return [str(value) for value in get_args(hint)] if get_origin(hint) is Literal else ()


def _check(content: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str = "") -> None:
    """Check that a file's keys are known, that groups are mappings, and that no value is missing.

    The parser checks the values themselves.

    Raises:
        ValueError: A check failed.
    """
    for name, value in content.items():
        key = f"{prefix}{name}"
        if key not in kinds:
            raise ValueError(unknown("key", key, sorted(kinds)))
        if is_dataclass(kinds[key]):
            if not isinstance(value, dict):
                raise ValueError(f'"{key}": expected keys and values. Got {value}')
            _check(value, kinds, f"{key}.")
        elif value is None and type(None) not in get_args(kinds[key]):
            raise ValueError(f'"{key}": expected a value. Got none')


def plainly(message: str, known: Collection[str]) -> str:
    """A message of jsonargparse on one line; for an unknown option, with the nearest known one."""
    match = re.search(r"unrecognized arguments: --([\w.-]+)", message)
    if match:
        return unknown("option", match.group(1), sorted(known))
    match = re.search(r'"([\w.]+)":\s+Unable to load config \'(.*?)\'', message)
    if match:
        return f'"{match.group(1)}": expected keys and values, such as those of --help. Got {match.group(2)}'
    match = re.search(r'"([\w.]+)":\s+Does not validate against any of the Union subtypes', message)
    if match:
        wanted = [name for name in re.findall(r"<class '(\w+)'>", message.partition("Errors:")[0])]
        value = message.rpartition("Given value:")[2].strip()
        return f'"{match.group(1)}": expected {" or ".join(wanted).replace("NoneType", "null")}. Got {value}'
    message = message.replace("Parser key ", "").replace("typing.Literal", "one of ")
    message = re.sub(r"Expected an? (?:<class '(\w+)'>)?", r"expected \1", message)
    return " ".join(message.replace("Got value:", "Got").split())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def recorded(content: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The settings in a ``run.yaml``; a setting that is newer than the run gets its default."""
    return _filled(content, as_written(kind()))


def _filled(content: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with defaults for the missing ones, in every group."""
    both = {**defaults, **content}
    groups = [name for name in defaults if isinstance(both[name], dict) and isinstance(defaults[name], dict)]
    return both | {name: _filled(both[name], defaults[name]) for name in groups}


def _changes(name: str, before: Any, now: Any) -> list[str]:
    """Differences between two values of a setting, key by key if both have the same keys."""
    if before == now:
        return []
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        return [change for key in now for change in _changes(f"{name}.{key}", before[key], now[key])]
    return [f"{name} {before!r} -> {now!r}"]


def claim(settings: Any, folder: Path, *, free: Collection[str]) -> None:
    """Write a run's settings into its folder; if it has settings, they must be equal, except for the ``free`` ones.

    Raises:
        ValueError: The folder holds another run, or the path is not a folder.
    """
    check_folder(folder)
    path = folder / "run.yaml"
    if path.exists():
        before, now = recorded(load(str(path)), type(settings)), as_written(settings)
        changed = [
            change
            for name, value in now.items()
            if name not in free
            for change in _changes(name, before[name], value)
        ]
        changed += [f"{name} {before[name]!r} -> unknown here" for name in before if name not in now]
        if changed:
            raise ValueError(f"{folder} holds another run ({'; '.join(changed)}): choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_text_aside(path, dump(settings), "settings")
