"""Show what losses do to a head on frozen features: train a grid of heads and evaluate them on held-out items.

    from weince.lab.predict import grid, predict

    predict("features.npz", "heads", losses=grid(["infonce", "dcl"], [0.1, 0.2, 0.5]))

A head trains in a second, an encoder in hours. The heads show what a loss does to the given features; an encoder that
is trained with the loss has other features. ``research/predict_study.py`` compares the two.
"""

import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weince.files import check_folder, check_writable, write_text_aside
from weince.lab.configure import LossConfig, check_loss
from weince.lab.predict.features import Prepared, Views, prepare, read_features
from weince.lab.predict.heads import Outcome, Probe, seconds, train_heads
from weince.lab.predict.report import write_report
from weince.lab.settings import check_once
from weince.machine import version
from weince.progress import bars

if TYPE_CHECKING:
    from multiprocessing.pool import IMapIterator
    from multiprocessing.sharedctypes import Synchronized

FORMAT = "weince prediction 3"
LOSSES = ("infonce", "dcl", "hcl", "released", "paper")
TEMPERATURES = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
LEAST_STEPS, MOST_STEPS = 100, 1500
TOGETHER = 5
"""Heads that are trained together: more are not faster, and an interruption would lose more."""
ASK_EVERY = 1.0
"""Seconds between two looks at what the worker processes have done."""


class Job(NamedTuple):
    """Heads to train together: the names of their losses, and their seed."""

    names: tuple[str, ...]
    seed: int


Done = tuple[Job, list[Outcome]]
Tell = Callable[[int], object]
"""Gets the number of parts of heads that were just done; a head has a part for each step and one for its figures."""


def grid(presets: Iterable[str], temperatures: Iterable[float]) -> dict[str, LossConfig]:
    """Every preset at every temperature, by name; a preset without a temperature appears once."""
    found: dict[str, LossConfig] = {}
    values = sorted(set(temperatures))
    for preset in presets:
        if preset == "link":
            raise ValueError(
                "predict has no options for the lam and beta of the preset link; got link: "
                'in Python, pass losses={"mine": LossConfig("link", temperature, lam=..., beta=...)}'
            )
        for value in values:
            try:
                found[f"{preset} {value:g}"] = LossConfig(preset, value)
            except ValueError as error:
                if "temperature has no meaning" not in str(error):
                    raise
                found[preset] = LossConfig(preset)
    return found


def predict(
    features: str | Path,
    out: str | Path,
    *,
    losses: Mapping[str, LossConfig] | None = None,
    labels: str | Path | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3),
    minutes: float = 5.0,
    steps: int | None = None,
    probe: Probe = Probe(),
    jobs: int = 1,
    progress: bool = True,
    command: str = "weince.lab.predict.predict(...)",
) -> Path:
    """Train a head with every loss and seed, and write a table of their figures.

    The folder keeps finished heads: the same call again trains those that are missing.

    Args:
        features: A file for ``weince diagnose`` with the features of two views of the same items, or a run's folder.
        out: Folder to write.
        losses: Losses by name; by default `LOSSES` at `TEMPERATURES`.
        labels: A file with a label for each item; by default the labels in the file of the features, if any.
        seeds: Seeds of the heads: each determines split, initial weights, batches and noise.
        minutes: Approximate time limit; it determines the number of steps.
        steps: Number of training steps, instead of `minutes`.
        probe: How heads are trained.
        jobs: Number of processes. With more than one, each imports the main program again, which then needs the usual
            ``if __name__ == "__main__":``.
        progress: Show a bar.
        command: Command to show below the table.

    Returns:
        Path of ``heads.md``.

    Raises:
        ValueError: The input or a loss cannot be used, the folder holds other heads, or the time is too short.
    """
    chosen = grid(LOSSES, TEMPERATURES) if losses is None else dict(losses)
    _check(chosen, seeds, minutes, steps, jobs)
    folder = Path(out)
    check_folder(folder)
    pairs, known_labels = read_features(Path(features), None if labels is None else Path(labels))
    prepared = prepare(pairs, known_labels, batch=probe.batch, axes=probe.axes)
    store = Store(folder, prepared, probe)
    wanted = [(name, seed) for seed in seeds for name in chosen]
    missing = [head for head in wanted if not store.has(*head, chosen[head[0]])]
    _check_own_losses({name: chosen[name] for name, _ in missing}, probe, with_ids=pairs.ids is not None)
    if steps is None and store.steps is not None and progress:
        print(
            f"{folder} holds heads of {store.steps:,} steps: the minutes have no effect on them, and missing heads "
            "get as many steps (choose another --out for other steps)",
            file=sys.stderr,
        )
    store.claim(steps)
    if store.steps is None:  # then no head is finished
        store.steps = _affordable(prepared.views, chosen, probe, len(missing), minutes, jobs)
    check_writable(folder)  # only now, so that a call that is refused leaves no folder
    if missing:
        task = Task(prepared.views, chosen, store.steps, probe)
        with bars(shown=progress) as bar, _workers(task, jobs) as carry_out:
            shown = bar.add_task(f"heads, {store.steps:,} steps each", total=len(missing))
            done = 0

            def tell(parts: int) -> None:
                nonlocal done
                done += parts
                bar.update(shown, completed=done / (task.steps + 1))

            for job, outcomes in carry_out(list(_packed(missing)), tell):
                store.add(job, outcomes, chosen)
    table = {name: [store.outcome(name, seed) for seed in seeds] for name in chosen}
    return write_report(folder, table, seeds, prepared, store.steps, probe, command)


def _check(
    losses: Mapping[str, LossConfig], seeds: Sequence[int], minutes: float, steps: int | None, jobs: int
) -> None:
    if not losses or not seeds:
        raise ValueError(f"want at least one loss and one seed; got {len(losses)} and {len(seeds)}")
    check_once("seed", seeds)
    if max(map(abs, seeds)) >= 2**63:
        raise ValueError(f"a seed must be below 2**63; got {max(seeds, key=abs)}")
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be positive; got {minutes}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")


def _check_own_losses(losses: Mapping[str, LossConfig], probe: Probe, *, with_ids: bool) -> None:
    """Call the user's own losses once: a head whose loss has no gradient would keep its initial weights."""
    known = {"ids": torch.arange(probe.batch)} if with_ids else {}
    cpu = torch.device("cpu")
    for name, config in losses.items():
        if ":" not in config.preset:
            continue
        try:
            check_loss(config, candidates="views", pairs=probe.batch, width=probe.out, device=cpu, **known)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _affordable(
    views: Views, losses: Mapping[str, LossConfig], probe: Probe, heads: int, minutes: float, jobs: int
) -> int:
    """The number of steps for which there is time, estimated by timing a few steps here."""
    with _one_thread():
        # One config per preset: the temperature does not change the time of a step.
        kinds = {config.preset: config for config in losses.values()}
        times = {preset: seconds(views, [config], probe) for preset, config in kinds.items()}
    per_head = [times[config.preset] for config in losses.values()]
    step, judging = (sum(part) / len(per_head) for part in zip(*per_head, strict=True))
    steps = int((60 * minutes * jobs / heads - judging) / step)
    if steps < LEAST_STEPS:
        least = (LEAST_STEPS * step + judging) * heads / jobs / 60
        raise ValueError(
            f"{heads} heads have time for {max(0, steps)} steps each in {minutes:g} minutes, and need {LEAST_STEPS}: "
            f"allow {math.ceil(least)} minutes, or ask for fewer losses, temperatures or seeds"
        )
    return min(steps, MOST_STEPS)


def _packed(heads: Sequence[tuple[str, int]]) -> Iterator[Job]:
    """Group heads of the same seed into jobs of a few heads."""
    for seed in dict.fromkeys(seed for _, seed in heads):
        names = iter([name for name, own in heads if own == seed])
        while part := tuple(islice(names, TOGETHER)):
            yield Job(part, seed)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: heads are so small that several threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Task(NamedTuple):
    """What all jobs share."""

    views: Views
    losses: Mapping[str, LossConfig]
    steps: int
    probe: Probe

    def carry_out(self, job: Job, tell: Tell) -> Done:
        losses = [self.losses[name] for name in job.names]
        return job, train_heads(self.views, losses, job.seed, self.steps, self.probe, tell=tell)


_task: Task  # of a worker process
_parts: "Synchronized[int]"  # done by all worker processes


def _begin(task: Task, parts: "Synchronized[int]") -> None:
    global _task, _parts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends its workers
    torch.set_num_threads(1)
    _task, _parts = task, parts


def _carry_out(job: Job) -> Done:
    return _task.carry_out(job, _count)


def _count(parts: int) -> None:
    with _parts.get_lock():
        _parts.value += parts


def _context() -> BaseContext:
    """How processes start: where they can be, as forks of one that has imported torch, which takes seconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__, "torch._dynamo"])  # the second is imported by torch's optimizers
    return forks


@contextmanager
def _workers(task: Task, jobs: int) -> Iterator[Callable[[Sequence[Job], Tell], Iterable[Done]]]:
    """A function that carries out jobs, in this process or in several, and tells meanwhile what is done."""
    if jobs == 1:
        with _one_thread():
            yield lambda work, tell: (task.carry_out(job, tell) for job in work)
        return
    context = _context()
    parts = context.Value("q", 0)
    with context.Pool(jobs, _begin, (task, parts)) as pool:
        yield lambda work, tell: _told(pool.imap_unordered(_carry_out, work), parts, tell)


def _told(results: "IMapIterator[Done]", parts: "Synchronized[int]", tell: Tell) -> Iterator[Done]:
    """The results of worker processes; between two of them, ``tell`` gets what the processes have done."""
    known = 0
    while True:
        try:
            found = [results.next(ASK_EVERY)]
        except multiprocessing.TimeoutError:
            found = []
        except StopIteration:
            return
        known, before = parts.value, known
        tell(known - before)
        yield from found


class Store:
    """Finished heads in ``heads.json`` of a folder, which is complete after every job.

    Args:
        folder: Folder of the file.
        prepared: Features that the heads are trained on.
        probe: How the heads are trained.

    Raises:
        ValueError: The folder holds heads of other features, labels or of another probe.
    """

    def __init__(self, folder: Path, prepared: Prepared, probe: Probe) -> None:
        self.path = folder / "heads.json"
        self.about = {
            "format": FORMAT,
            "features": prepared.key,
            "labels": prepared.labels_key,
            "probe": asdict(probe),
        }
        self.steps: int | None = None
        self.heads: dict[tuple[str, int], tuple[dict[str, Any], Outcome]] = {}
        if not self.path.exists():
            return
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            about = {key: found.get(key) for key in self.about}
            self.steps = int(found["steps"])
            for head in found["heads"]:
                values = [math.nan if head[name] is None else float(head[name]) for name in Outcome._fields]
                self.heads[head["name"], head["seed"]] = head["loss"], Outcome(*values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is damaged ({error}): remove it to start anew") from None
        for key, value in self.about.items():
            if about[key] != value:
                raise ValueError(
                    f"{folder} holds heads of other {key} ({about[key]}, not {value}): choose another --out"
                )

    def claim(self, steps: int | None) -> None:
        """Set the number of steps, which must be that of the finished heads if there are any.

        Raises:
            ValueError: The finished heads have another number of steps.
        """
        if None not in (steps, self.steps) and steps != self.steps:
            raise ValueError(
                f"{self.path.parent} holds heads of {self.steps} steps, not {steps}: choose another --out"
            )
        self.steps = self.steps or steps

    def has(self, name: str, seed: int, config: LossConfig) -> bool:
        """Whether a head is finished and was trained with this loss."""
        return (name, seed) in self.heads and self.heads[name, seed][0] == asdict(config)

    def outcome(self, name: str, seed: int) -> Outcome:
        """The figures of a head."""
        return self.heads[name, seed][1]

    def add(self, job: Job, outcomes: Sequence[Outcome], losses: Mapping[str, LossConfig]) -> None:
        """Save the outcomes of a job."""
        for name, outcome in zip(job.names, outcomes, strict=True):
            self.heads[name, job.seed] = asdict(losses[name]), outcome
        heads = [
            {"name": name, "seed": seed, "loss": loss}
            | {key: None if math.isnan(value) else value for key, value in outcome._asdict().items()}
            for (name, seed), (loss, outcome) in self.heads.items()
        ]
        record = {**self.about, "version": version(), "steps": self.steps, "heads": heads}
        write_text_aside(self.path, json.dumps(record, indent=1, allow_nan=False) + "\n", "heads")


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
