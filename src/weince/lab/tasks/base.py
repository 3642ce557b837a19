"""What differs between tasks (images, sentences, towers), and nothing else does.

A **task** is one :class:`Task`: facts about a kind of run that studies, commands and records ask for. One of them is
``prepare``, which turns settings into a :class:`Training`: a run that is ready to train. The loop
(:mod:`weince.lab.training.loop`) is the same for all tasks and does the rest: it launches processes, resumes, sets
learning rates, takes steps (also from cached gradients, also as a CUDA graph), averages gradients over processes,
checks that numbers are finite, writes the log and checkpoints, and shows progress. In short::

    training = task.prepare(run, fabric)
    for batch in training.batches(start):
        rows = {view.name: view.encoder(view.inputs) for view in training.views(batch)}
        training.loss(**training.arguments(rows, batch)).backward()
        training.optimizer.step()
        # and at the steps that the schedule names: a row of the log, judge, keep, a checkpoint
    training.finish()

Of its **settings**, a task's dataclass, the loop reads ``task``, ``out``, ``seed``, ``epochs``, ``loss``,
``precision``, ``device``, ``batch`` (pairs of the global batch) and, if it has them, ``devices`` (processes; without
it a run has one) and ``tensorboard``.

**Randomness.** The loop calls :meth:`Training.reseed` at the start of every segment (see :class:`Schedule`), and
checkpoints fall between segments. So a resumed run draws what an uninterrupted one draws, and no state of a generator
is saved. What a task draws itself, such as the order of its data, must depend only on the seed and the step.

**Processes.** Every process has its own `Training` on its own device, with the same weights, and embeds its
:attr:`Training.part` of each global batch; weince's losses gather the embeddings. The models need no
DistributedDataParallel: the loop averages gradients after the backward pass, however many forward passes there were.
:meth:`Training.judge`, :meth:`Training.keep` and :meth:`Training.finish` run in the first process only.

A new task is a folder with ``config.py`` (settings), ``training.py`` (its `Training`) and ``task.py`` (its `Task`),
and a line in :mod:`weince.lab.tasks.registry`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weince.lab.configure import LossConfig, build_loss, check_loss, let_nan_pass
from weince.lab.training.optimizers import OptimizerConfig, rate
from weince.layouts import Candidates

if TYPE_CHECKING:
    from lightning_fabric import Fabric

MOST_PAIRS = 256
"""Largest batch on which a loss is checked before a study."""

BatchOf = dict[str, Any]
"""A global batch, or a rank's part of it: tensors by name. A captured step copies them by name."""


class Shown(NamedTuple):
    """The name of a figure in words, and a short one for columns and axes."""

    words: str
    short: str


class View(NamedTuple):
    """One forward pass of a step.

    Attributes:
        name: What its embeddings are called in :meth:`Training.arguments`: usually an argument of the loss, such as
            ``z_i``, ``z_j`` or ``negatives``.
        encoder: Maps the input to embeddings ``(rows, d)``; several views may share one.
        inputs: A tensor, or dicts, lists and tuples of tensors, rows first, on the device.
    """

    name: str
    encoder: Callable[[Any], Tensor]
    inputs: Any


@dataclass(frozen=True)
class Schedule:
    """When a run does what.

    Attributes:
        steps: All steps of the run.
        in_epoch: Steps of an epoch.
        segment: Steps between two places where a checkpoint may be; the end of the run is one too.
        log_every: Steps between rows of the log; a row is also written where the encoder is judged, and at the end.
        judge_every: Segments between evaluations of the encoder; 0 for none. The last step is judged too.
        save_every: Segments between checkpoints; 0 for none. The last step is saved too.
        counts: What the progress bar, the checkpoints and the log count.
    """

    steps: int
    in_epoch: int
    segment: int
    log_every: int
    judge_every: int = 0
    save_every: int = 1
    counts: Literal["epoch", "step"] = "step"

    def ends_segment(self, step: int) -> bool:
        """Whether a segment ends with this step; steps count from 1."""
        return step % self.segment == 0 or step == self.steps

    def logs(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.steps or self.judges(step)

    def judges(self, step: int) -> bool:
        return self._due(step, self.judge_every)

    def saves(self, step: int) -> bool:
        return self._due(step, self.save_every)

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % (every * self.segment) == 0 or step == self.steps)

    def number(self, step: int) -> int:
        """The step in what is counted."""
        return step // self.in_epoch if self.counts == "epoch" else step

    def step(self, number: int) -> int:
        """The inverse of :meth:`number`."""
        return number * self.in_epoch if self.counts == "epoch" else number


class Training(ABC):
    """A run that is ready to train, in one process; made by :attr:`Task.prepare`, which writes nothing.

    A subclass sets these attributes in ``__init__`` (:func:`ready_loss` and
    :func:`weince.lab.training.optimizers.build_optimizer` help).

    Attributes:
        run: The settings.
        fabric: Fabric, with the device of this process and the collective operations.
        model: All that is trained and saved, except the loss. Both encoders, if there are two.
        loss: The loss, on the device; called with what :meth:`arguments` returns.
        optimizer: Optimizer of the model and of the loss. A group with ``lr_scale`` has its own learning rate: the
            run's times that number.
        optimizing: Its settings, with the schedule of the rate.
        schedule: When the loop does what.
        width: Width of the embeddings.
        clip: Largest norm of the model's gradient; None for no limit.
        micro_batch: Rows to embed at a time, with cached gradients (:func:`weince.cached_step`); None for all.
        graph: Whether to capture the step as a CUDA graph. Batches of another shape than the usual one run eagerly.
        generators: Generators that a captured step draws from.
    """

    candidates: Candidates = "cross"
    """Who competes with whom; the loss is built with it."""
    columns: ClassVar[tuple[str, ...]]
    """The log's columns, in order: ``epoch``, or ``step`` and ``epoch``, ``loss``, those of :meth:`measure`, ``lr``,
    ``pairs_per_second`` (see :attr:`unit`), ``seconds``, those of :meth:`judge`. The loop adds what a loss learns."""
    unit: ClassVar[str] = "pairs"
    """What the speed counts, for the column ``pairs_per_second``."""
    lr_setting: ClassVar[str] = "lr"
    """The setting that a run whose loss is not finite should lower."""

    run: Any
    fabric: "Fabric"
    model: nn.Module
    loss: nn.Module
    optimizer: Optimizer
    optimizing: OptimizerConfig
    schedule: Schedule
    width: int
    clip: float | None = None
    micro_batch: int | None = None
    graph: bool = False
    generators: tuple[torch.Generator, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    @property
    def title(self) -> str:
        """What the progress bar calls the run."""
        return f"{self.run.out.name} {self.run.loss.preset}"

    @property
    def part(self) -> slice:
        """The rows of a global batch that belong to this process."""
        size, rank = self.run.batch // self.fabric.world_size, self.fabric.global_rank
        return slice(rank * size, (rank + 1) * size)

    # What a batch is, and how it becomes the loss's arguments.

    @abstractmethod
    def batches(self, start: int) -> Iterator[BatchOf]:
        """The batches from step ``start`` (from 0) to the end of the run; may prepare them in a thread.

        Work between epochs, such as mining hard negatives anew, belongs here too.
        """

    @abstractmethod
    def views(self, batch: BatchOf) -> list[View]:
        """The forward passes of a step, of this process's part of the batch."""

    def arguments(self, rows: dict[str, Tensor], batch: BatchOf) -> dict[str, Any]:
        """The loss's arguments, from the embeddings by the names of their views; must contain ``z_i`` and ``z_j``.

        Override it to split what one forward pass embedded, to reshape hard negatives to ``(anchors, k, d)``, and to
        add ``ids``, ``weights``, ``offset``... The loop passes ``z_i`` and ``z_j`` by position, the others by name.
        """
        return dict(rows)

    @abstractmethod
    def count(self, batch: BatchOf) -> int:
        """How many of :attr:`unit` a global batch has, for the speed."""

    # Rates, randomness and arithmetic.

    def rate(self, step: int) -> float:
        """The learning rate of a step (from 0)."""
        return rate(self.optimizing, step / self.schedule.in_epoch, self.run.epochs)

    def reseed(self, step: int) -> None:
        """Seed what draws random numbers; called at the start of each segment, whose first step is given."""
        rank = self.fabric.global_rank
        torch.manual_seed(int(np.random.SeedSequence([self.run.seed, step, rank]).generate_state(1)[0]))

    def arithmetic(self) -> AbstractContextManager[Any]:
        """A context to train in, such as one that allows TF32."""
        return nullcontext()

    # How an encoder is judged, and what is told and saved.

    def measure(self, arguments: dict[str, Any]) -> dict[str, float]:
        """Columns of the log from the loss's arguments in the last batch; every process calls it."""
        return {}

    def judge(self, step: int) -> dict[str, float]:
        """Judge the encoder on validation data, remember the best one; returns columns of the log.

        ``step`` is the number of steps taken. It must not draw from torch's global generators.
        """
        return {}

    def keep(self, step: int, *, checkpoint: bool) -> None:  # noqa: B027
        """Called at the end of each segment, before the checkpoint if there is one.

        Write what a run that resumes after that checkpoint could not write again: snapshots, the best encoder.
        """

    def state(self) -> dict[str, Any]:
        """What else a checkpoint must hold: tensors, numbers, strings, and containers of them."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027
        """The inverse of :meth:`state`."""

    @abstractmethod
    def finish(self, *, bar: bool) -> Path:
        """Write what the run is for, weights or the result on test data; returns the path to tell the user."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Identifies what the run starts from, its data and initial encoder, wherever they are stored."""

    def figures(self, row: Mapping[str, float]) -> tuple[str, ...]:
        """The figures beside the progress bar, the most important first."""
        return (f"loss {row['loss']:.4f}",)

    def warning(self, row: Mapping[str, float]) -> str | None:
        """What is wrong with a row of the log, such as a collapse of the embeddings; None if nothing is."""
        return None


@dataclass(frozen=True)
class Measure:
    """How a trained run is measured.

    Attributes:
        file: File with the figures, in the run's folder.
        figures: Names of the figures, each with its heading in a table.
        test: Key of a reported figure; ``{}`` stands for the figure's name.
        validation: Key of a figure that tries may be chosen by; empty if there is none.
        keys: Dotted keys in the file for figures that have another name there.
        digits: Digits after the point that a table shows.
        take: Measures the trained run in a folder on a device and writes the file; None if training does that at its
            end.
    """

    file: str
    figures: Mapping[str, str]
    test: str = "{}"
    validation: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    digits: int = 3
    take: Callable[[Path, str], None] | None = None


@dataclass(frozen=True)
class Task:
    """A kind of run.

    Attributes:
        settings: Class of the settings.
        prepare: Makes a run ready to train in this process. It reads data and builds the model; it writes nothing.
        finished: What :meth:`Training.finish` returned if the run is done and needs no more training, else None.
            Raises a ValueError if the folder holds another run.
        claim: Writes the settings into the run's folder. Raises a ValueError if the folder holds another run.
        free: Settings that do not change the figures.
        places: Settings that say where the data are; the data themselves are identified by a fingerprint.
        check: Raises a ValueError if the data of given settings are missing.
        check_measured: Raises a ValueError if runs with these settings could be trained but not measured.
        check_loss: Raises a ValueError if the loss of given settings fails on random embeddings on their device.
        fingerprint: Returns the fingerprint of the data of given settings: `Training.fingerprint` without a training.
        weights: File or folder that training writes into a run's folder.
        measures: How runs can be measured, by name; comparisons take the first.
        each: File that training writes into a run's folder with the figures of each test query and their groups, an
            .npz; empty if seeds are the only noise of a comparison.
        figures: Figures that a comparison reports. The first one chooses tries and orders losses.
        validation: Name of the validation figure that chooses tries.
        unit: Unit of the figures.
        column: Column of the log with the quality of the encoder during training.
        tracked: Name of that quality.
        track: Setting for how often it is measured; empty if it always is.
        temperatures: Temperatures to try instead of those in the losses' search spaces, which are for images.
        search_spaces: Tries of further losses, by preset, instead of theirs.
        report: Judges the trained run in a folder for ``weince evaluate``: on data (None for the run's), on a device,
            and shortened if the last argument is true. Returns what to print, and the file with the figures.
    """

    settings: type[Any]
    prepare: Callable[[Any, "Fabric"], Training]
    claim: Callable[[Any], None]
    free: frozenset[str]
    places: tuple[str, ...]
    check: Callable[[Any], None]
    check_loss: Callable[[Any], None]
    fingerprint: Callable[[Any], str]
    weights: str
    measures: Mapping[str, Measure]
    figures: Mapping[str, Shown]
    validation: str
    unit: str
    column: str
    tracked: Shown
    track: str = ""
    temperatures: tuple[float, ...] = ()
    finished: Callable[[Any], Path | None] = lambda run: None
    check_measured: Callable[[Any], None] = lambda run: None
    each: str = ""
    search_spaces: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    report: Callable[[Path, str | None, str, bool], tuple[Any, Path]] | None = None

    def train(self, run: Any, *, bar: bool = True) -> Path:
        """Train a run, or resume it; returns the path to tell the user."""
        from weince.lab.training.loop import train

        return self.finished(run) or train(self, run, bar=bar)

    @property
    def measure(self) -> str:
        """How runs of a comparison are measured."""
        return next(iter(self.measures))

    @property
    def main(self) -> str:
        """The figure that chooses tries (on validation data) and orders losses."""
        return next(iter(self.figures))

    @property
    def incidental(self) -> frozenset[str]:
        """Settings that may differ between two records of the same run."""
        return self.free | set(self.places)

    def data_names(self, content: Mapping[str, Any]) -> dict[str, str]:
        """The NAME of each place in ``--data NAME=PATH``: of a single place its data set, else the setting's name."""
        if len(self.places) > 1:
            return {place: place for place in self.places}
        return {place: str(content.get(place, "")) for place in self.places}


def ready_loss(
    config: LossConfig,
    *,
    candidates: Candidates,
    pairs: int,
    width: int,
    device: torch.device,
    **options: Any,
) -> nn.Module:
    """The loss of a run on its device, after a check on random embeddings; the loop checks for NaN instead of it.

    Args:
        config: The loss.
        candidates: Who competes with whom.
        pairs: Pairs of this process's part of a batch.
        width: Width of the embeddings.
        device: The device.
        options: Further arguments that the loss must take, such as ``ids=None``.

    Raises:
        ValueError: The loss fails, or its value or gradient is of no use in a training.
    """
    loss = build_loss(config, candidates=candidates).to(device)
    let_nan_pass(loss)
    check_loss(config, candidates=candidates, pairs=pairs, width=width, device=device, **options)
    return loss
