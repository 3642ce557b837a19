"""Checkpoints that survive a crash.

Each one is written aside and moved into place, the last two are kept, and one that cannot be read is skipped. A
checkpoint is a dict of tensors, numbers, strings and containers of them, so that loading it executes no code.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weince.files import write_aside

_KEPT = 2  # checkpoints per run: if the newest is truncated, the one before is intact


class Checkpoint(NamedTuple):
    """A state, and the step after which it was saved."""

    step: int
    state: dict[str, Any]


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint and remove all but the newest two.

    Raises:
        OSError: It could not be written, for example to a full disk; the earlier checkpoints are still there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for cut in folder.glob(".step_*.part"):  # left by a kill during a write
        cut.unlink(missing_ok=True)
    path = folder / f"step_{step:09d}.pt"
    write_aside(path, lambda part: torch.save(state, part), "checkpoint")
    for old in _paths(folder)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that can be read, with a warning for each newer one that cannot; None if there is none.

    Raises:
        OSError: There are checkpoints, but none can be read: starting anew would lose them.
    """
    paths = _paths(folder)
    for path in reversed(paths):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # the type depends on where the file was truncated
            reason = str(error).partition("\n")[0] or type(error).__name__
            warnings.warn(f"{path} cannot be read ({reason}); going back to the one before", stacklevel=2)
            continue
        return Checkpoint(int(path.stem.removeprefix("step_")), state)
    if paths:
        raise OSError(
            f"none of the {len(paths)} checkpoints in {folder} can be read; remove them to start anew"
        )
    return None


def started_with(folder: Path, key: str) -> Any:
    """A value of the newest checkpoint, or None if it is missing; :func:`fitting` reports a damaged checkpoint."""
    last = newest(folder)
    return last.state.get(key) if last is not None and isinstance(last.state, dict) else None


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Turn an error while restoring a checkpoint into one line that says that it does not fit the run.

    Raises:
        ValueError: The checkpoint comes from another program, version or model.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the checkpoints in {folder} do not fit this run ({type(error).__name__}: {reason}); "
            "choose another --out, or remove them to start anew"
        ) from error


def _paths(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(folder.glob(f"step_{'[0-9]' * 9}.pt"))
