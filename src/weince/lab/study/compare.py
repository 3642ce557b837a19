"""Which loss should I use? Equal tuning, paired seeds, corrected tests, and what each loss costs.

    from weince.lab.study.compare import Question, compare

    compare(Question(["infonce", "dcl", "hcl"], config="cifar100_resnet18"), out=Path("compared"))

Every loss gets the same number of tries from its search space. The try with the best validation figure is trained
with all seeds and compared with the baseline seed by seed. A second call resumes where the first was interrupted; a
call with further losses adds them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weince.files import check_folder
from weince.lab.settings import LAPTOP, check_once
from weince.lab.study import archives
from weince.lab.study.choice_study import ChoiceStudy
from weince.lab.study.comparison import (
    Comparison,
    find_comparison,
    joined,
    recipe_config,
    write_comparison,
)
from weince.lab.study.records import folder_lock
from weince.lab.study.search_space import Tries, tries_of
from weince.lab.study.study import Execution, refuse_dry_run_with
from weince.lab.study.table import SEEDS, take_seeds

__all__ = ["Execution", "Question", "compare"]

BASELINE = "infonce"
TRIES = 3
LEVEL_WITHIN = 0.5

MOST_JOBS = 4
"""Default limit of concurrent runs on a machine without a GPU."""


@dataclass(frozen=True)
class Question:
    """What is to be compared. What is left out is as in the comparison in the folder, if there is one.

    Attributes:
        losses: Presets or your own losses, ``my_package:MyLoss``; if empty, those of the comparison in the folder.
        config: Configuration that all runs share: a name or a file. By default that of the comparison in the folder,
            or else digits on a laptop.
        recipe: ``paper`` for that configuration, ``strong`` for ``CONFIG_strong``. Without ``config``, the comparison
            in the folder must have that recipe.
        tries: How many settings of its search space to try for each loss; a smaller space is tried completely. By
            default as many as in the comparison in the folder, or else 3.
        seeds: How many of 7, 21, 63, 84 to use, or a list of seeds. By default those of the comparison in the folder,
            or else those of the archives that are added, or else all four.
        baseline: Loss that the others are compared with; it is added if ``losses`` lacks it. By default ``infonce``.
        level_within: Largest difference, in points, that does not matter. By default 0.5.
        try_epochs: Epochs of a try; by default those of the configuration.
        set: Settings, by dotted name, that override the configuration in all runs.
    """

    losses: Sequence[str] = ()
    config: str | None = None
    recipe: str = "paper"
    tries: int | None = None
    seeds: int | Sequence[int] | None = None
    baseline: str | None = None
    level_within: float | None = None
    try_epochs: int | None = None
    set: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tries is not None and self.tries < 1:
            raise ValueError(f"--tries must be at least 1; got {self.tries}")
        check_once("loss", self.losses)


def compare(
    question: Question,
    *,
    out: Path = Path("compared"),
    budget: float | None = None,
    track: int | None = None,
    reuse: Sequence[Path] = (),
    add: Sequence[Path] = (),
    how: Execution | None = None,
) -> Path:
    """Compare losses.

    Args:
        question: What is to be compared.
        out: Output folder: runs in ``out/runs``, their records in ``out/runs.jsonl``, the page in ``out/CONFIG``.
        budget: Time limit in seconds; a run that would end after it is not started.
        track: Epochs between two evaluations during training, for runs on images; by default as configured.
        reuse: Archives from which to take runs with the same settings.
        add: Archives of other people, to add as a whole; nothing is started then.
        how: How the runs are carried out; by default here, one per GPU, or one per core up to four.

    Returns:
        Path of the page; after a dry run, of the folder that it would be in.

    Raises:
        ValueError: An argument is unknown, runs are not comparable, or runs failed; the page is then of the others.
    """
    how = how or Execution()
    if budget is not None and how.slurm:
        raise ValueError("--budget is for runs on this machine: on Slurm give --slurm-options time=MINUTES")
    if budget is not None and budget <= 0:
        raise ValueError(f"--budget must be above 0 seconds; got {budget:g}")
    if how.dry_run and add:
        refuse_dry_run_with("--add")
    check_folder(out)
    comparison = _comparison(question, out, adds=bool(add))
    before = find_comparison(out, comparison.config)
    if add and question.seeds is None and before is None:
        comparison = replace(comparison, seeds=archives.seeds_of(comparison, add))
    study = ChoiceStudy(comparison, out, how, _tracked(comparison, track), reuse)
    if add:
        evaluations = [result.record for result in study.done(study.planned()).values()]
        comparison = archives.add(comparison, add, out, evaluations)
        study = ChoiceStudy(comparison, out, how, study.extra, reuse)
    starts = not (how.table_only or add)
    study.take_over(look=bool(how.data) or (starts and not how.slurm), write=not how.dry_run)
    jobs = how.jobs or _usual_jobs()
    if starts:
        study.check_data()
        if not (how.slurm and how.dry_run):
            study.check_machine(always=how.data is not None)
    if how.dry_run:
        study.show(jobs)
        return out / comparison.name
    if not starts:
        path = study.write(saved=False)
        # After the page, which raises if no run is done: such a call must leave nothing behind.
        _save(comparison, before, out)
        return path
    _save(comparison, before, out)
    study.carry_out(jobs, budget)
    return study.write(saved=True)


def _comparison(asked: Question, out: Path, *, adds: bool) -> Comparison:
    """The comparison that is asked for, joined with the one in the folder."""
    config = None if asked.config is None else recipe_config(asked.config, asked.recipe)
    before = find_comparison(out, config)
    if before is not None:
        if config is None:
            _check_recipe(asked.recipe, before)
        return _continued(before, asked, config or before.config)
    if not asked.losses:
        wants = "weince compare wants losses, such as infonce dcl"
        if adds:
            wants = (
                "--add wants one of the losses, and the --config and --tries that the archives were made with"
            )
        raise ValueError(f"{wants}: {out} holds no comparison yet")
    return _of_losses(asked, config or recipe_config(LAPTOP, asked.recipe), known={})


def _save(comparison: Comparison, before: Comparison | None, out: Path) -> None:
    """Save a comparison in place of the one that this call began with, unless another call has changed that one."""
    with folder_lock(out):  # else two calls that look at the same moment both write
        if find_comparison(out, comparison.config) != before:
            raise ValueError(
                f"another command has changed the comparison of {comparison.name} in {out} meanwhile: "
                "give the same command again"
            )
        write_comparison(comparison, out / comparison.name)


def _check_recipe(recipe: str, before: Comparison) -> None:
    """Refuse a recipe without a configuration, unless the comparison in the folder has that recipe."""
    if recipe != "paper" and not before.name.endswith(f"_{recipe}"):
        raise ValueError(
            f"--recipe {recipe} wants --config, unless --out holds a comparison with that recipe; "
            f"it holds that of {before.name}"
        )


def _continued(before: Comparison, asked: Question, config: str) -> Comparison:
    """The comparison in the folder, with the losses and seeds that are asked for added."""
    baseline = asked.baseline or before.baseline
    level_within = before.level_within if asked.level_within is None else asked.level_within
    added = () if asked.seeds is None else take_seeds(asked.seeds, SEEDS)
    seeds = list(dict.fromkeys([*before.seeds, *added]))
    if asked.losses:
        asked = replace(asked, baseline=baseline, level_within=level_within, seeds=seeds)
        return joined(before, _of_losses(asked, config, before.losses))
    options = {"--tries": asked.tries, "--try-epochs": asked.try_epochs, "--set": asked.set or None}
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} wants the losses that it is for, such as infonce dcl")
    if config not in (before.config, before.name):  # another file of the same name
        joined(before, replace(before, config=config))  # raises
    return replace(before, baseline=baseline, level_within=level_within, seeds=seeds)


def _of_losses(asked: Question, config: str, known: Mapping[str, Tries]) -> Comparison:
    """A comparison of the losses that are asked for and the baseline.

    ``known`` has the tries of the comparison in the folder. Unless a number of tries is asked for, a loss in it keeps
    its tries, and a further loss gets as many.
    """
    baseline = asked.baseline or BASELINE
    names = list(asked.losses) if baseline in (*asked.losses, *known) else [baseline, *asked.losses]
    most = asked.tries or max(map(len, known.values()), default=TRIES)
    losses: dict[str, Tries] = {
        name: known[name] if asked.tries is None and name in known else tries_of(name, config)[:most]
        for name in names
    }
    return Comparison(
        config=config,
        losses=losses if baseline in losses else {**losses, baseline: known[baseline]},
        baseline=baseline,
        seeds=take_seeds(asked.seeds, SEEDS),
        try_epochs=asked.try_epochs,
        set=asked.set,
        level_within=LEVEL_WITHIN if asked.level_within is None else asked.level_within,
    )


def _tracked(comparison: Comparison, track: int | None) -> dict[str, int]:
    """The setting for how often a run is evaluated during training; empty if ``track`` is None."""
    if track is None:
        return {}
    if not comparison.task.track:
        raise ValueError(f"--track is for runs on images; {comparison.name} is tracked as it is configured")
    return {comparison.task.track: track}


def _usual_jobs() -> int:
    import torch

    return torch.cuda.device_count() or min(MOST_JOBS, os.cpu_count() or 1)
