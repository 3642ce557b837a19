"""Which loss should I use? Equal tuning, paired seeds, corrected tests, and what each loss costs.

    from weince.lab.study.compare import compare

    compare(["infonce", "dcl", "hcl"], config="cifar100_resnet18", out=Path("compared"))

Every loss gets the same number of tries from its search space. The try with the best validation figure is trained
with all seeds and compared with the baseline seed by seed. A second call resumes where the first was interrupted; a
call with further losses adds them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weince.files import check_folder
from weince.lab.settings import LAPTOP, check_once
from weince.lab.study import merge
from weince.lab.study.comparison_sweep import Sweep
from weince.lab.study.grid import (
    Comparison,
    Tries,
    find_comparison,
    joined,
    recipe_config,
    tries_of,
    write_comparison,
)
from weince.lab.study.records import folder_lock
from weince.lab.study.slurm import check_slurm
from weince.lab.study.tables import SEEDS, check_alone, take_seeds

__all__ = ["compare"]

BASELINE = "infonce"
TRIES = 3
LEVEL_WITHIN = 0.5

MOST_JOBS = 4
"""Default limit of concurrent runs on a machine without a GPU."""


def compare(
    losses: Sequence[str] = (),
    *,
    config: str | None = None,
    recipe: str = "paper",
    tries: int | None = None,
    seeds: int | Sequence[int] | None = None,
    baseline: str | None = None,
    level_within: float | None = None,
    try_epochs: int | None = None,
    set: Mapping[str, Any] | None = None,
    out: Path = Path("compared"),
    jobs: int | None = None,
    slurm: bool = False,
    slurm_options: Mapping[str, Any] | None = None,
    data: str | None = None,
    device: str | None = None,
    budget: float | None = None,
    track: int | None = None,
    reuse: Sequence[Path] = (),
    add: Sequence[Path] = (),
    dry_run: bool = False,
    table_only: bool = False,
    command: str = "",
) -> Path:
    """Compare losses.

    Args:
        losses: Presets or your own losses, ``my_package:MyLoss``; if empty, those of the comparison in ``out``.
        config: Configuration that all runs share: a name or a file. By default that of the comparison in ``out``, or
            else digits on a laptop.
        recipe: ``paper`` for that configuration, ``strong`` for ``CONFIG_strong``. Without ``config``, the comparison
            in ``out`` must have that recipe.
        tries: How many settings of its search space to try for each loss; a smaller space is tried completely. By
            default as many as in the comparison in ``out``, or else 3.
        seeds: How many of 7, 21, 63, 84 to use, or a list of seeds. By default those of the comparison in ``out``,
            or else those of the archives in ``add``, or else all four.
        baseline: Loss that the others are compared with; it is added if ``losses`` lacks it. By default that of the
            comparison in ``out``, or else ``infonce``.
        level_within: Largest difference, in points, that does not matter. By default that of the comparison in
            ``out``, or else 0.5.
        try_epochs: Epochs of a try; by default those of the configuration.
        set: Settings, by dotted name, that override the configuration in all runs.
        out: Output folder: runs in ``out/runs``, their records in ``out/runs.jsonl``, the page in ``out/CONFIG``.
        jobs: Concurrent runs; by default one per GPU, or one per core up to four.
        slurm: Submit the runs to Slurm and wait for them.
        slurm_options: Options of sbatch under submitit's names.
        data: Where the data are, if not where the configuration says.
        device: ``cpu``, ``cuda`` or ``mps`` instead of the configured device.
        budget: Time limit in seconds; a run that would end after it is not started.
        track: Epochs between two evaluations during training, for runs on images; by default as configured.
        reuse: Archives from which to take runs with the same settings.
        add: Archives of other people, to add as a whole; nothing is started then.
        dry_run: Print the runs, which of them are done, and how long the rest would take here.
        table_only: Start nothing; write the page from the runs that are done.
        command: Command to show on the page.

    Returns:
        Path of the page; after a dry run, of the folder that it would be in.

    Raises:
        ValueError: An argument is unknown, runs are not comparable, or runs failed. If runs failed, the page is
            written from the others.
    """
    if budget is not None and (slurm or budget <= 0):
        raise ValueError(
            "--budget is for runs on this machine: on Slurm give --slurm-options time=MINUTES"
            if slurm
            else f"--budget must be above 0 seconds; got {budget:g}"
        )
    if dry_run:
        check_alone({"--add": bool(add), "--table-only": table_only})
    check_folder(out)
    start_nothing = table_only or bool(add) or dry_run
    asked = _Asked(losses, config, recipe, tries, seeds, baseline, level_within, try_epochs, set)
    comparison = _comparison(asked, out, adds=bool(add))
    before = find_comparison(out, comparison.config)
    if add and seeds is None and before is None:
        comparison = replace(comparison, seeds=merge.seeds_of(comparison, add))
    extra = _tracked(comparison, track)
    sweep = Sweep(comparison, out, data, device, extra, reuse)
    if add:
        comparison = merge.add(comparison, add, out, sweep.evaluations())
        sweep = Sweep(comparison, out, data, device, extra, reuse)
    sweep.take_over(look=bool(data) or not (table_only or add or slurm), write=not dry_run)
    jobs = _jobs(jobs)
    if dry_run:
        sweep.check_start(slurm=slurm)
        sweep.show(jobs)
        return out / comparison.name
    if start_nothing:
        path = sweep.write(command or "weince compare", {})
        # After the page, which raises if no run is done: such a call must leave nothing behind.
        _save(comparison, before, out)
        return path
    sweep.check_start(slurm=slurm)
    if slurm:
        check_slurm(slurm_options)
    _save(comparison, before, out)
    options = {"jobs": jobs, "slurm": slurm, "slurm_options": slurm_options}
    failed = sweep.fill(budget, options)
    sweep.time_losses((slurm_options or {}) if slurm else None)
    return sweep.write(command or "weince compare", failed)


@dataclass(frozen=True)
class _Asked:
    """The arguments of `compare` that define a comparison."""

    losses: Sequence[str]
    config: str | None
    recipe: str
    tries: int | None
    seeds: int | Sequence[int] | None
    baseline: str | None
    level_within: float | None
    try_epochs: int | None
    set: Mapping[str, Any] | None


def _comparison(asked: _Asked, out: Path, *, adds: bool) -> Comparison:
    """The comparison that the arguments ask for, joined with the one in the folder."""
    if asked.tries is not None and asked.tries < 1:
        raise ValueError(f"--tries must be at least 1; got {asked.tries}")
    check_once("loss", asked.losses)
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
        raise ValueError(f"{wants}; got none, and no comparison in {out}")
    return _of_losses(asked, config or recipe_config(LAPTOP, asked.recipe), known={})


def _save(comparison: Comparison, before: Comparison | None, out: Path) -> None:
    """Save a comparison in place of the one that this call began with.

    Raises:
        ValueError: Another call has changed that one meanwhile; its losses would be lost.
    """
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
            f"--recipe {recipe} wants --config here, or a comparison with that recipe in --out; got no --config, "
            f"and the comparison of {before.name}"
        )


def _continued(before: Comparison, asked: _Asked, config: str) -> Comparison:
    """The comparison in the folder, with the losses and seeds that are asked for added."""
    baseline = asked.baseline or before.baseline
    level_within = before.level_within if asked.level_within is None else asked.level_within
    added = () if asked.seeds is None else take_seeds(asked.seeds, SEEDS)
    seeds = list(dict.fromkeys([*before.seeds, *added]))
    if asked.losses:
        asked = replace(asked, baseline=baseline, level_within=level_within, seeds=seeds)
        return joined(before, _of_losses(asked, config, before.losses))
    given = {"--tries": asked.tries, "--try-epochs": asked.try_epochs, "--set": asked.set or None}
    wants = [name for name, value in given.items() if value is not None]
    if wants:
        raise ValueError(f"{wants[0]} wants losses, such as infonce dcl; got none")
    if config not in (before.config, before.name):  # another file of the same name
        joined(before, replace(before, config=config))  # raises
    return replace(before, baseline=baseline, level_within=level_within, seeds=seeds)


def _of_losses(asked: _Asked, config: str, known: Mapping[str, Tries]) -> Comparison:
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
        set=asked.set or {},
        level_within=LEVEL_WITHIN if asked.level_within is None else asked.level_within,
    )


def _tracked(comparison: Comparison, track: int | None) -> dict[str, int]:
    """The setting for how often a run is evaluated during training; empty if ``track`` is None."""
    if track is None:
        return {}
    if not comparison.task.track:
        raise ValueError(f"--track is for runs on images; {comparison.name} is tracked as it is configured")
    return {comparison.task.track: track}


def _jobs(asked: int | None) -> int:
    if asked is not None:
        if asked < 1:
            raise ValueError(f"jobs must be at least 1; got {asked}")
        return asked
    import torch

    return torch.cuda.device_count() or min(MOST_JOBS, os.cpu_count() or 1)
