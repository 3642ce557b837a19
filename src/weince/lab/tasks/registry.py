"""The tasks by name: the kinds of runs, and everything that differs between them (see `weince.lab.tasks.base`).

A configuration names its task (``task: text``; the default is images).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weince.lab import settings
from weince.lab.configure import unknown
from weince.lab.tasks.base import Task
from weince.lab.tasks.images.task import TASK as IMAGES
from weince.lab.tasks.sentences.task import TASK as SENTENCES
from weince.lab.tasks.towers.task import TASK as TOWERS

TASKS = {"vision": IMAGES, "text": SENTENCES, "towers": TOWERS}

MEASURES = {name: measure for task in TASKS.values() for name, measure in task.measures.items()}
"""How runs can be measured, by the name that a table's file gives."""


def task_of(content: Mapping[str, Any]) -> Task:
    """The task of a configuration, or of a ``run.yaml``."""
    name = str(content.get("task", "vision"))
    if name not in TASKS:
        raise ValueError(unknown("task", name, TASKS))
    return TASKS[name]


def task_in(folder: Path) -> Task:
    """The task of the run in a folder."""
    path = folder / "run.yaml"
    if not path.exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no run.yaml")
    return task_of(settings.load(str(path)))


def train(run: Any, *, bar: bool = True) -> Path:
    """Train a run with these settings, or resume it; returns the path to tell the user."""
    return TASKS[run.task].train(run, bar=bar)
