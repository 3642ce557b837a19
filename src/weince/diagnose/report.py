"""Measure every model and write the folder of a diagnosis, whole or not at all."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.progress import TaskID
from torch import Tensor

from weince.diagnose import figures_link
from weince.diagnose.decision import Diagnosis, decide
from weince.diagnose.diagnosis_settings import DiagnosisSettings
from weince.diagnose.figures_link import Quantity
from weince.diagnose.measure import STAGES, Measured, More, measure
from weince.diagnose.reading import EmbeddedPairs, InputError, make_pairs
from weince.diagnose.report_page import ReportPage, write_page
from weince.diagnose.rules import THRESHOLDS
from weince.diagnose.sections import Group, Section, SectionWriter, write_sections
from weince.diagnose.style import Gallery
from weince.diagnose.wording import tail_kind
from weince.files import check_folder, finished_folder, is_unfinished
from weince.machine import version
from weince.progress import Bars, telling_bars

FORMAT = "weince diagnosis 1"
WRITTEN = ("figures", "tables", "summary.json", "index.html")


def named_pairs(name: str, views: Sequence[ArrayLike | Tensor]) -> EmbeddedPairs:
    """A model from ``(z_i, z_j)`` or ``(z_i, z_j, ids)``."""
    if len(views) not in (2, 3):
        raise InputError(f"{name}: want (z_i, z_j) or (z_i, z_j, ids); got {len(views)} arrays")
    return make_pairs(name, views[0], views[1], views[2] if len(views) > 2 else None)


@dataclass(frozen=True)
class Supplement:
    """More than the verdict needs, such as the paper's figures."""

    stages: tuple[str, ...]  # names of its stages, for the progress bar
    measure: More  # measures what becomes ``m.more``
    sections: Callable[[SectionWriter], list[Section]]  # writes its sections of the page
    # what a trend draws besides the quantities of the verdict
    quantities: Callable[[Sequence[Measured]], list[Quantity]]
    summarise: Callable[[Measured], Mapping[str, Any]]  # numbers of a model for ``summary.json``


def write_diagnosis(
    pairs: Sequence[EmbeddedPairs],
    out: Path,
    settings: DiagnosisSettings,
    *,
    trend: bool = False,
    average: bool = False,
    command: str = "weince.diagnose.diagnose(...)",
    progress: bool = True,
    supplement: Supplement | None = None,
) -> Path:
    """Measure every model and write the folder; see `diagnose`.

    Args:
        pairs: The models; with `trend`, the checkpoints of one run in order.
        out: Folder to write.
        settings: How much to compute.
        trend: Show quantities over the checkpoints, and figures of the last one only.
        average: The models are one recipe with several seeds: show their mean, with a t-interval over them.
        command: What the page says it was made with.
        progress: Show progress bars and the verdicts on stderr.
        supplement: What to measure and show besides.
    """
    _check_number(len(pairs), trend, average)
    check_out(out)
    with finished_folder(out, WRITTEN) as folder, telling_bars(shown=progress) as bar:
        models, left_out = _measure_all(pairs, settings, bar, supplement)
        _check_number(len(models), trend, average, left_out)
        drawing = bar.add_task("page", total=None)
        judged = [(m, decide(m, settings)) for m in models]
        (folder / "tables").mkdir()
        gallery = Gallery(folder / "figures", lambda slug: bar.update(drawing, said=f"figure {slug}"))
        names = [p.name for p in pairs]
        steps = dict(zip(names, steps_of(names), strict=True)) if trend else None
        more = [] if supplement is None else supplement.quantities(models)
        compared = _compare(gallery, models, steps, average, more)
        shown = models[-1:] if trend else models
        writer = SectionWriter(gallery, models, shown, settings.seed)
        sections = write_sections(writer, settings)
        if supplement is not None:
            sections += supplement.sections(writer)
        for section in sections:
            for table in section.tables:
                table.write_csv(folder / "tables")
        summary = summarise(judged, settings, command) | {"left_out": left_out}
        if supplement is not None:
            for entry, m in zip(summary["models"], models, strict=True):
                entry["paper"] = _clean(supplement.summarise(m))
        if average:
            summary["mean_over_seeds"] = _means(models)
        (folder / "summary.json").write_text(
            json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
        )
        # The page is written last, so that an incomplete folder has no page.
        page = ReportPage(
            title=_title(models, trend),
            command=command,
            models=judged,
            left_out=left_out,
            compared=compared,
            trend=trend,
            average=average,
            sections=sections,
            settings=settings,
            version=version(),
        )
        write_page(page, folder / "index.html")
        bar.update(drawing, total=1, completed=1, said="done")
    if progress:
        for m, verdict in judged[-len(shown) :]:
            print(f"{m.name}:", verdict.headline, *verdict.notes, file=sys.stderr)
        for reason in left_out:
            print(f"not diagnosed: {reason}", file=sys.stderr)
    return out / "index.html"


def _check_number(models: int, trend: bool, average: bool, left_out: Sequence[str] = ()) -> None:
    """Raise an error if too few models are there for a page, a trend or a mean; it tells why others were left out."""
    why = "".join(f"; {reason}" for reason in left_out)
    if not models:
        raise InputError(why[2:] or "want at least one model")
    if trend and models < 2:
        raise InputError(f"a trend needs at least two checkpoints; got 1{why}")
    if average and (trend or models < 2):
        raise InputError(f"a mean over seeds needs two models or more, and no trend; got {models}{why}")


def _title(models: Sequence[Measured], trend: bool) -> str:
    if trend:
        return f"Diagnosis of a run, {len(models)} checkpoints"
    return f"Diagnosis of {models[0].name}" if len(models) == 1 else f"Diagnosis of {len(models)} models"


def _measure_all(
    pairs: Sequence[EmbeddedPairs],
    settings: DiagnosisSettings,
    bar: Bars,
    supplement: Supplement | None = None,
) -> tuple[list[Measured], list[str]]:
    """The models that can be measured, and why others cannot; each reason begins with the model's name."""
    models, left_out = [], []
    stages, more = (STAGES, None) if supplement is None else (STAGES + supplement.stages, supplement.measure)
    tasks = [bar.add_task(p.name, total=len(stages), said="waiting") for p in pairs]
    for p, task in zip(pairs, tasks, strict=True):

        def tell(stage: str, task: TaskID = task) -> None:
            bar.update(task, completed=stages.index(stage), said=stage)

        try:
            models.append(measure(p, settings, tell=tell, more=more))
        except InputError as error:
            left_out.append(str(error))
            bar.update(task, completed=len(stages), said="not diagnosed")
        else:
            bar.update(task, completed=len(stages), said="done")
    return models, left_out


def _compare(
    gallery: Gallery,
    models: Sequence[Measured],
    steps: Mapping[str, float] | None,
    average: bool,
    more: Sequence[Quantity],
) -> Group | None:
    """Figures of the models side by side, or over the steps of a trend."""
    if steps is not None:
        shown = [*figures_link.quantities(models), *more]
        drawn = figures_link.trend_figures(gallery, [steps[m.name] for m in models], shown)
    elif len(models) > 1:
        drawn = figures_link.forest_figures(gallery, models, mean=average)
    else:
        return None
    return Group("", tuple(drawn))


def steps_of(names: Sequence[str]) -> list[float]:
    """The last number in each name, if all names have one and these numbers rise; 1, 2, 3 otherwise."""
    found = [re.findall(r"\d+", name) for name in names]
    if all(found):
        steps = [float(numbers[-1]) for numbers in found]
        if all(a < b for a, b in pairwise(steps)):
            return steps
    return [float(i) for i in range(1, len(names) + 1)]


def check_out(out: Path) -> None:
    """Raise an error unless `out` is new, an empty folder, or an earlier diagnosis."""
    try:
        check_folder(out)
    except ValueError as error:
        raise InputError(str(error)) from None
    if not out.exists():
        return
    found = sorted((path.name for path in out.iterdir()), key=lambda name: (name.startswith("."), name))
    if not found:
        return
    try:
        ours = json.loads((out / "summary.json").read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    known = {*WRITTEN, ".DS_Store"}  # the Finder of macOS writes one into every folder it shows
    others = [name for name in found if not is_unfinished(name) and (not ours or name not in known)]
    if others:  # a report is not mixed with other files
        raise InputError(
            f"{out}: want a new folder, an empty one or an earlier diagnosis; got other files ({others[0]})"
        )


def summarise(
    judged: Sequence[tuple[Measured, Diagnosis]], settings: DiagnosisSettings, command: str
) -> dict[str, Any]:
    """The numbers of a diagnosis in a form that JSON can hold: NaN becomes null, infinity a string."""
    return {
        "format": FORMAT,
        "version": version(),
        "command": command,
        "settings": asdict(settings),
        "thresholds": asdict(THRESHOLDS),
        "models": [_clean(_model(m, v)) for m, v in judged],
    }


def _means(models: Sequence[Measured]) -> dict[str, Any]:
    """The mean of every quantity over the models that have it, with its interval, in a form that JSON can hold."""
    found = {}
    for q in figures_link.quantities(models):
        mean = figures_link.mean_over(q.value, q.bounds)
        omitted = [m.name for m, value in zip(models, q.value, strict=True) if not np.isfinite(value)]
        found[q.key] = _clean(mean._asdict() | {"omitted": omitted})
    return found


def _model(m: Measured, v: Diagnosis) -> dict[str, Any]:
    tail = m.tail
    link = asdict(m.link)
    del link["lr_null"]
    curves = m.curves
    return {
        "name": m.name,
        "pairs": m.pairs,
        "dim": m.dim,
        "batches": m.batches,
        "batch_size": m.batch_size,
        "view_gap": m.gap,
        "temperature_by_batch_size": [fit._asdict() for fit in m.sizes],
        "whole_file": asdict(m.overlaps),
        "mean_cosine": m.mean_cosine,
        "batch_sizes_tried": m.tried,
        "notes": m.notes,
        "verdict": asdict(v),
        "link_test": link,
        "rivals": None if m.rivals is None else asdict(m.rivals),
        "temperatures_good_enough": None if curves is None else curves.tau_range,
        "loss_at_given_temperature": None if curves is None else curves.current_loss,
        "tail": {
            "kind": tail_kind(tail.xi),
            "negatives": tail.n_scores,
            "threshold": tail.xi.fit.threshold,
            "exceedances": tail.xi.fit.n,
            "xi": tail.xi.fit.xi,
            "xi_interval": tail.xi.xi_interval,
            "xi_interval_if_independent": tail.xi.fit.xi_interval,
            "sigma": tail.xi.fit.sigma,
            "endpoint": tail.xi.fit.endpoint,
            "endpoint_interval": tail.xi.endpoint_interval,
            "design_effect": tail.xi.design_effect,
        },
    }


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, float):
        if np.isnan(value):
            return None
        return float(value) if np.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    return value.item() if isinstance(value, np.generic) else value
