"""The tries of a loss: its class's ``search_space`` as settings of runs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weince.lab import settings
from weince.lab.configure import PRESETS, LossConfig, build_loss, find, unknown
from weince.lab.study.plan import flat, words
from weince.lab.tasks.registry import task_of

Tries = Sequence[Mapping[str, Any]]
"""Settings of a loss to choose among, by dotted name, the most promising first."""


def tries_of(loss: str, config: str) -> list[dict[str, Any]]:
    """The whole search space of a loss, a preset or ``my_package:MyLoss``, as settings of runs, in its order.

    Without a ``search_space`` in its class, the only try is its defaults. Settings of the loss in the configuration
    are no part of a try. The task may define temperatures to try, and tries of a loss.
    """
    if loss == "link":
        raise ValueError(
            "link has no tries: the weight and slope of its blend are those of one diagnosis; compare weibit, blend "
            "or paper, or a loss of your own that has them, my_package:MyLoss"
        )
    if loss not in PRESETS and ":" not in loss:
        known = [name for name in PRESETS if name != "link"]
        raise ValueError(unknown("loss", loss, known) + ", or your own, my_package:MyLoss")
    maker = PRESETS[loss] if loss in PRESETS else find(loss, "loss")
    content = settings.load(config)
    task = task_of(content)
    space: Sequence[Any] = task.search_spaces.get(loss, getattr(maker, "search_space", ({},)))
    listed = isinstance(space, Sequence) and not isinstance(space, str)
    wrong = [tried for tried in space if not isinstance(tried, Mapping)] if listed else [space]
    if wrong or not len(space):
        got = " ".join(repr(wrong[0]).split()) if wrong else "nothing"
        raise ValueError(
            f"search_space of {loss} must list arguments by name, ({{'temperature': 0.1}},); got {got}"
        )
    space = at_temperatures(space, task.temperatures)
    if loss not in PRESETS:
        _check_own(loss, space)
    return [alone(_as_settings(loss, tried), content) for tried in space]


def _check_own(loss: str, space: Tries) -> None:
    """Make a loss of the user's own with every try now, not after hours of the baseline's runs."""
    for tried in space:
        options = {name.removeprefix("loss."): value for name, value in _as_settings(loss, tried).items()}
        try:
            build_loss(LossConfig(**options))
        except ValueError as error:
            raise ValueError(f"search_space of {loss}, {dict(tried)}: {error}") from None


def at_temperatures(space: Tries, temperatures: Sequence[float]) -> Tries:
    """A search space at other temperatures: all of them with the other options of its first try, then of the next.

    Without ``temperatures``, or if no try has a temperature, the space is returned unchanged.

    >>> at_temperatures([{"temperature": 0.5}, {"temperature": 0.5, "hardness": 2.0}], [0.05, 0.1])[1:3]
    [{'temperature': 0.1}, {'hardness': 2.0, 'temperature': 0.05}]
    """
    rests = [
        {key: value for key, value in tried.items() if key != "temperature"}
        for tried in space
        if "temperature" in tried
    ]
    if not temperatures or not rests:
        return space
    different = [rest for number, rest in enumerate(rests) if rest not in rests[:number]]
    return [{**rest, "temperature": temperature} for rest in different for temperature in temperatures]


def _as_settings(loss: str, tried: Mapping[str, Any]) -> dict[str, Any]:
    """A try as settings, spelled as in a table's file: a run is identified by that spelling."""
    # Lists for tuples, as comparison.yaml has them: a try that is read back must be the same try.
    options = {name: _plain(loss, name, value) for name, value in tried.items()}
    chosen: dict[str, Any] = {"loss.preset": loss}
    if "temperature" in options:
        chosen["loss.temperature"] = options.pop("temperature")
    return chosen | ({"loss.options": options} if options else {})


def _plain(loss: str, name: str, value: Any) -> Any:
    """A value of a search space as JSON has it; numbers of NumPy become numbers of Python."""
    try:
        return json.loads(json.dumps(value, default=_number_of_numpy))
    except (TypeError, ValueError):
        raise ValueError(
            f"search_space of {loss}: {name} must be a number, text, a list or names with values; "
            f"got {' '.join(repr(value).split())}"
        ) from None


def _number_of_numpy(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError


def alone(tried: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """A try that sets a loss completely: what it leaves out gets its default if the configuration sets it.

    Only then, so that a run is spelled the same with and without a default in its configuration. The engine stays as
    configured, since it does not change the figures.

    >>> alone({"loss.preset": "dcl"}, {"loss": {"preset": "hcl", "options": {"hardness": 2.0}}})
    {'loss.preset': 'dcl', 'loss.options': {}}
    """
    configured, usual = content.get("loss"), settings.as_written(LossConfig())
    if not isinstance(configured, Mapping):
        return dict(tried)
    unset = {
        f"loss.{name}": usual[name]
        for name, value in configured.items()
        if name in usual and name not in ("preset", "engine") and value != usual[name]
    }
    return {**tried, **{name: value for name, value in unset.items() if name not in tried}}


def in_words(tried: Mapping[str, Any]) -> str:
    """A try in words, without the name of its loss.

    >>> in_words({"loss.preset": "mixture", "loss.temperature": 0.1, "loss.options": {"spread": 1.0}})
    'temperature 0.1, spread 1'
    """
    named = {name: value for name, value in set_in(tried).items() if name != "loss.preset"}
    return words(named, _short) or "its defaults"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def set_in(tried: Mapping[str, Any]) -> dict[str, Any]:
    """What a try sets, by dotted name; a default that `alone` added, None or no names, counts as not set."""
    return {name: value for name, value in flat(tried).items() if value is not None and value != {}}
