"""Which runs are done, and how they were made: ``made.json`` beside each result.

A run is done when its result exists and was made with its settings, according to ``made.json`` or else to
``run.yaml``. Weights and images are not needed any more, nor the folder if the archive has the record.
"""

import contextlib
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weince.files import write_text_aside
from weince.lab.configure import code_of
from weince.lab.study.plan import Run, flat, has_settings, settings_of, task_for
from weince.lab.study.records import read_record
from weince.lab.training.log import read_log
from weince.machine import version

NOT_RECORDED = {"hardware": "not recorded", "commit": "not recorded"}


def is_done(run: Run) -> bool:
    """Whether a run has a result that belongs to its settings."""
    try:
        read_record(run, run.result.name)
        signed = _made(run)
        if signed:
            return bool(signed["key"] == run.key)
        # There is no made.json. With weights, the run was cut before it was signed: measure it again. Without
        # weights, this is a kept record: compare its settings.
        weights = run.folder / task_for(run).weights
        return not weights.exists() and has_settings(run, read_record(run, "run.yaml"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def record(run: Run) -> dict[str, Any]:
    """The measured figures of a finished run; ``made`` says on which hardware, commit and command."""
    return figures_of(run, read_record(run, run.result.name), _made(run))


def figures_of(run: Run, result: Mapping[str, Any], signed: Mapping[str, Any]) -> dict[str, Any]:
    """The same from the contents of its result and of its ``made.json``."""
    by_key = flat(result)
    renamed = {name: by_key[key] for name, key in run.measure.keys.items() if key in by_key}
    where = signed.get("measures", {}).get(run.measured_by, NOT_RECORDED)
    return {**result, **renamed, "made": {**where, "command": signed.get("command", run.command)}}


def _made(run: Run) -> dict[str, Any]:
    """Content of ``made.json``; empty if the record has none."""
    try:
        content: dict[str, Any] = read_record(run, "made.json")
    except FileNotFoundError:
        return {}
    return content


def loss_has_changed(run: Run) -> bool:
    """Whether the code of a user's own loss has changed since this run, which is done, was made with it."""
    made_with = _made(run).get("loss_code")
    now = None if made_with is None else code_of(settings_of(run).loss.preset)
    return now is not None and now != made_with


def failures(runs: Sequence[Run]) -> dict[str, str]:
    """Why those runs failed that were last left with an error, by their names. The runs must not be done."""
    why = {}
    for run in runs:
        with contextlib.suppress(OSError):
            said = (run.folder / "error.txt").read_text(encoding="utf-8", errors="replace").strip()
            why[run.name] = said.partition("\n")[0] or f"{run.name} failed"
    return why


def sign(run: Run, code: str | None) -> None:
    """Write ``made.json``: which settings and command made the results, on which hardware, and in what time.

    The time is the logged training time over all resumes plus that of measuring. A second measure of the same run is
    added to the first. ``code`` is `code_of` its loss.
    """
    before: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        before = _made(run)
    before = before if before.get("key") == run.key else {}
    trained = sum(row["seconds"] for row in read_log(run.folder / "log.csv"))
    where = {
        "hardware": hardware(str(run.extra.get("device", "auto"))),
        "commit": commit(),
        "seconds": round(trained + _measuring_seconds(run), 1),
    }
    measures = {**before.get("measures", {}), run.measured_by: where}
    signed = {"key": run.key, "command": run.command, "measures": measures}
    if (made_with := before.get("loss_code", code)) is not None:
        signed["loss_code"] = made_with
    write_text_aside(run.folder / "made.json", json.dumps(signed, indent=1) + "\n", "record")


def _measuring_seconds(run: Run) -> float:
    """Seconds from the weights, which training writes at its end, to the result of measuring."""
    if run.measure.take is None:  # training measures at its end
        return 0.0
    weights = run.folder / task_for(run).weights
    return run.result.stat().st_mtime - weights.stat().st_mtime


def hardware(device: str = "auto") -> str:
    """Names of the device and of the torch version."""
    import torch

    name = ""
    if device != "cpu" and torch.cuda.is_available():
        # Asking CUDA itself would hold GPU memory for as long as the sweep runs.
        name = _output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return f"{name.splitlines()[0] if name else f'{platform.machine()} CPU'}, torch {torch.__version__}"


def commit() -> str:
    """The version of this package, with the commit if it is known.

    That is the commit of the checkout, marked if its sources have changes, or of the ``git archive`` that it was
    unpacked from.
    """
    here = Path(__file__).parents[2]
    head = _output_of(["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"])
    if head and _output_of(["git", "-C", str(here), "ls-files", "__init__.py"]):
        changed = _output_of(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no", "."])
        return f"{version()} at {head}{' with changes' if changed else ''}"
    archived = (here / "archived_commit.txt").read_text(encoding="ascii").strip()
    return version() if archived.startswith("$") else f"{version()} at {archived[:12]}"


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
