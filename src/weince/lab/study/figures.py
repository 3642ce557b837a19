# ruff: noqa: RUF001  (Greek letters are meant)
"""Figures of a study.

Of a table: logs over the epochs, and the geometry of the final embeddings. Of a comparison: a dot for each seed, the
course of training, the gain from tuning.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from scipy import stats

from weince.diagnose.style import (
    BLUE,
    GREEN,
    INK,
    LOOK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Figure,
    Gallery,
    Panel,
    as_svg,
    for_page,
    legend,
    shorten,
)
from weince.files import write_text_aside
from weince.lab.study.blocks import capital
from weince.lab.study.comparison import Comparison
from weince.lab.study.plan import words
from weince.lab.study.search_space import in_words
from weince.lab.study.statistics import Done, Outcome
from weince.lab.study.table import RunTable
from weince.scores import CROWD

PANELS = {
    "loss": "loss (levels do not compare)",
    "alignment": "alignment: squared distance of a pair",
    "uniformity": "uniformity: lower is more even",
    "effective_rank": "effective rank",
    "crowded": f"crowded: another item within {CROWD:g}",
    "rho": "ρ: shortfall of the hardest negative",
    "lam": "λ: weight of the shortfall",
    "beta": "β: fitted slope of the tail",
    "daic": "ΔAIC: above 0 for Weibull",
}
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (1, 3)), (0, (5, 4)))
MARKERS: tuple[Any, ...] = (*"osD^vP*X<>pd", (4, 1, 0), (6, 1, 0), (4, 1, 45), "h", (8, 1, 0), "8")
"""Distinguishable markers; a triple is matplotlib's (number of points, style, angle)."""

FEW_SECONDS = 120.0
"""Shorter trainings are drawn in seconds."""

FEW_LOOKS = 40
"""A line with more evaluations than this is drawn without markers."""


# Figures of a table.


class _Group(NamedTuple):
    """The runs of one configuration that have a log, with their colour and line style in all panels."""

    name: str
    colour: str
    style: Any
    runs: list[Done]


def draw_table(table: RunTable, done: Sequence[Done], folder: Path) -> list[Figure]:
    """Draw ``curves`` and ``geometry`` of each row of a table, also into files; none for a row without logs."""
    figures = []
    rows = list(dict.fromkeys(result.run.row for result in done))
    for row in rows:
        groups = _groups(table, [result for result in done if result.run.row == row])
        if groups and all(
            "uniformity" in result.log[-1] for group in groups for result in group.runs
        ):  # not text
            end = f"_{row}" if len(rows) > 1 else ""
            figures += [
                _curves(groups, f"curves{end}", row, folder),
                _geometry(table, groups, f"geometry{end}", row, folder),
            ]
    return figures


def _groups(table: RunTable, done: Sequence[Done]) -> list[_Group]:
    """The configurations in the order of the table.

    With several tries, each try has a colour and each loss a line style. With one try, each loss has a colour, and
    the line style changes when the colours are used up.
    """
    losses = list(table.losses)
    tuned = any(len(table.tries_of(loss)) > 1 for loss in losses)
    groups: dict[tuple[str, int], _Group] = {}
    for result in sorted(done, key=lambda result: (losses.index(result.run.loss), result.run.try_number)):
        loss, number = result.run.loss, result.run.try_number
        if not result.log:
            continue
        place = losses.index(loss)
        colour, style = (number, place) if tuned else (place, place // len(COLOURS))
        tried = words(table.tries_of(loss)[number]) if tuned else ""
        name = ", ".join(filter(None, [loss, tried]))
        new = _Group(name, COLOURS[colour % len(COLOURS)], STYLES[style % len(STYLES)], [])
        groups.setdefault((loss, number), new).runs.append(result)
    return list(groups.values())


def _curves(groups: Sequence[_Group], name: str, row: str, folder: Path) -> Figure:
    caption = (
        f"{row}, epoch by epoch: thick lines are means over seeds, thin lines are seeds. All figures except the loss "
        "are those of an epoch's last batch. ρ, λ, β and ΔAIC are measured on the negatives of every run, with the "
        "tail settings of its loss; a loss without them, such as InfoNCE, gets those of the preset paper."
    )
    # Older logs have no column crowded: there is no panel if all lack it.
    known = any("crowded" in row for group in groups for result in group.runs for row in result.log)
    shown = {key: title for key, title in PANELS.items() if known or key != "crowded"}
    older = [group.name for group in groups if any("crowded" not in result.log[-1] for result in group.runs)]
    if older and known:
        caption += f" Crowded has no mean where a log is older than that column: {'; '.join(older)}."
    with mpl.rc_context({**LOOK, "svg.hashsalt": name}):
        names = [group.name for group in groups]
        legend_rows = -(-len(groups) // 3)
        rows, columns = (2, 4) if len(shown) == 8 else (3, 3)
        canvas = Canvas(figsize=(11.0, 2.45 * rows + 0.19 * legend_rows), layout="constrained")
        axes = canvas.subplots(rows, columns)
        for ax, (key, title) in zip(axes.flat, shown.items(), strict=True):
            for group in groups:
                _lines(ax, group, key, names)
            ax.set_title(title, fontsize=8.5, loc="left")
            ax.locator_params(axis="x", integer=True, nbins=6)
            ax.locator_params(axis="y", nbins=6)
            ax.tick_params(labelsize=8)
        for ax in axes[-1]:
            ax.set_xlabel("epoch")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower left", ncols=3, handlelength=2.6)
        return _on_white(canvas, name, caption, folder)


def _lines(ax: Axes, group: _Group, key: str, names: Sequence[str]) -> None:
    logs = [result.log for result in group.runs]
    epochs = [row["epoch"] for row in min(logs, key=len)]  # the epochs that all seeds have
    # A row without this column leaves a gap in its line and in the mean.
    values = np.array([[row.get(key, np.nan) for row in log[: len(epochs)]] for log in logs])
    look: dict[str, Any] = {"color": group.colour, "linestyle": group.style, "markersize": 3}
    look["marker"] = "o" if len(epochs) == 1 else None  # one point makes no line
    if len(values) > 1:
        ax.plot(epochs, values.T, linewidth=0.5, alpha=0.4, **look)
    ax.plot(epochs, values.mean(0), linewidth=1.5, label=shorten(group.name, 48, among=names), **look)


def _geometry(table: RunTable, groups: Sequence[_Group], name: str, row: str, folder: Path) -> Figure:
    measure = groups[0].runs[0].run.measure
    figure = "linear" if "linear" in measure.figures else table.figures[0]
    points = [
        (result.log[-1]["uniformity"], result.figure(figure)) for group in groups for result in group.runs
    ]
    caption = (
        f"{row}, the last epoch: a mark is a run, its shape tells the configuration, its colour {figure} on "
        f"test. Left: pairs nearer together. Down: embeddings more evenly spread.{_rank_correlation(points, figure)}"
    )
    with mpl.rc_context({**LOOK, "svg.hashsalt": name}):
        canvas = Canvas(figsize=(7.6, max(3.8, 0.6 + 0.21 * len(groups))), layout="constrained")
        ax = canvas.subplots()
        known = [value for _, value in points if np.isfinite(value)] or [
            0.0,
            1.0,
        ]  # NaN: a link was not fitted
        for place, group in enumerate(groups):
            marks = ax.scatter(
                [result.log[-1]["alignment"] for result in group.runs],
                [result.log[-1]["uniformity"] for result in group.runs],
                c=[result.figure(figure) for result in group.runs],
                vmin=min(known),
                vmax=max(known),
                cmap="viridis",
                marker=MARKERS[place % len(MARKERS)],
                s=46,
                edgecolors=INK,
                linewidths=0.6,
                label=shorten(group.name, 44, among=[other.name for other in groups]),
            )
        ax.set(
            xlabel="alignment: squared distance of a pair", ylabel="uniformity: log mean exp(−2 distance²)"
        )
        ax.margins(0.1)
        unit = " (%)" if table.measure == "evaluation" else ""
        bar = canvas.colorbar(marks, ax=ax, label=figure + unit)
        assert bar.solids is not None
        bar.solids.set(rasterized=False, edgecolor="face")  # raster images are not shown in a page
        canvas.legend(loc="outside right upper")
        for handle in canvas.legends[0].legend_handles:
            if handle is not None:
                handle.set(facecolor="none")  # the legend explains only the shape
        return _on_white(canvas, name, caption, folder)


def _rank_correlation(points: Sequence[tuple[float, float]], figure: str) -> str:
    """Rank correlation of a figure with uniformity, in words; empty for fewer than five runs."""
    x, y = np.array([pair for pair in points if np.isfinite(pair).all()]).reshape(-1, 2).T
    if len(x) < 5 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return ""
    value = stats.spearmanr(x, y).statistic
    return f" Rank correlation of {figure} with uniformity over these {len(x)} runs: {value:+.2f}."


def _on_white(canvas: Canvas, name: str, caption: str, folder: Path) -> Figure:
    # Rounding to a hundredth of a point makes the file a quarter smaller.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), as_svg(canvas))
    # The file gets a white background, since it may be shown on any; a page has its own.
    start = svg.index(">", svg.index("<svg")) + 1
    on_white = f'{svg[:start]}\n <rect width="100%" height="100%" fill="#ffffff"/>{svg[start:]}'
    write_text_aside(folder / f"{name}.svg", on_white, "figure")
    return Figure(name, caption, for_page(svg, name))


# Figures of a comparison.

Time = Callable[[Done, float, float], float]
"""The time of a run until an epoch at which its log has so many seconds."""


class _Course(NamedTuple):
    """What a figure of the course of training has on its x axis: name of its file, label, and value."""

    slug: str
    label: str
    x: Time


def draw_comparison(comparison: Comparison, outcome: Outcome, folder: Path) -> list[Figure]:
    """Draw the figures for which there are records, each into a file under ``folder``."""
    gallery = Gallery(folder)
    final = outcome.final
    figures = [
        _dots(gallery, comparison, outcome, figure)
        for figure in comparison.task.figures
        if any(math.isfinite(result.figure(figure)) for result in final)
    ]
    label, time = time_of(outcome)
    along = _Course("epochs", "epochs", lambda result, epoch, seconds: epoch), _Course("time", label, time)
    if any(len(result.course(comparison.task.column)) > 1 for result in final):
        figures += [_tracked(gallery, comparison, final, course) for course in along]
    else:  # runs that were not evaluated during training
        chosen = {result.run.loss: result.run.try_number for result in final}
        shown = {line.loss for line in outcome.lines if line.measured}
        runs = [
            result
            for result in outcome.done
            if result.run.loss in shown and chosen.get(result.run.loss) == result.run.try_number
        ]
        if len({result.epochs for result in runs}) > 1:
            figures.append(_ends(gallery, comparison, runs, along[0]))
        if any(math.isfinite(time(result, result.epochs, result.seconds)) for result in runs):
            figures.append(_ends(gallery, comparison, runs, along[1]))
    if any(len(values) > 1 for values in outcome.tuned.values()):
        figures.append(_tuning(gallery, comparison, outcome.tuned))
    return figures


def time_of(outcome: Outcome) -> tuple[str, Time]:
    """Label of the time axis, and the time of a run until an epoch.

    It is that of the steps that were timed while nothing else ran, if all losses were timed on one machine. The logs
    do not compare losses: the more runs share a device, the longer each takes.
    """
    costs = {line.loss: line.cost or {} for line in outcome.lines if line.measured}
    epoch = {loss: float(cost.get("epoch_seconds") or math.nan) for loss, cost in costs.items()}
    alone = len({str(cost.get("hardware")) for cost in costs.values()}) == 1
    alone = alone and all(map(math.isfinite, epoch.values()))

    def seconds(result: Done, epochs: float, logged: float) -> float:
        return epoch[result.run.loss] * epochs if alone else logged

    longest = max((seconds(result, result.epochs, result.seconds) for result in outcome.final), default=0.0)
    unit, named = (1.0, "seconds") if longest < FEW_SECONDS else (60.0, "minutes")
    label = f"{named} of training, {'one run at a time' if alone else 'as logged'}"
    return label, lambda result, epochs, logged: seconds(result, epochs, logged) / unit


def _look(comparison: Comparison, loss: str) -> tuple[str, str]:
    """Colour and marker of a loss, the same in all figures."""
    place = list(comparison.losses).index(loss)
    return COLOURS[place % len(COLOURS)], MARKERS[place % 12]


def _tracked(gallery: Gallery, comparison: Comparison, runs: Sequence[Done], course: _Course) -> Figure:
    """The tracked figure of each run, a line for each seed."""
    (called, short), unit = comparison.task.tracked, comparison.task.unit
    caption = f"{capital(called)} against {course.label}: a line for each seed"
    with gallery.panel(course.slug, caption, height=3.3) as panel:
        for loss in comparison.losses:
            colour, marker = _look(comparison, loss)
            tracked = [
                result for result in runs if result.run.loss == loss and result.course(comparison.task.column)
            ]
            for number, result in enumerate(tracked):
                points = result.course(comparison.task.column)
                panel.ax.plot(
                    [course.x(result, epoch, seconds) for epoch, seconds, _ in points],
                    [value for *_, value in points],
                    marker=marker if len(points) <= FEW_LOOKS else None,
                    markersize=3,
                    linewidth=1.0,
                    color=colour,
                    alpha=0.7,
                    label=None if number else shorten(loss, 16, among=comparison.losses),
                )
        _finish(panel, course.label, f"{short}, {unit}")
    return panel.done


def _finish(panel: Panel, x: str, y: str) -> None:
    """Label the axes, and draw a legend in up to three columns, as many as fit beside the labels of the y axis."""
    panel.ax.set(xlabel=x, ylabel=y)
    panel.ax.margins(0.08)
    for columns in (3, 2, 1):
        legend(panel.ax, columns)
        drawn = panel.ax.get_legend()
        if drawn is None or drawn.get_window_extent().width < 0.85 * panel.ax.figure.bbox.width:
            return


class _Dots:
    """Dots with a tooltip each, which tells the run."""

    def __init__(self, comparison: Comparison, ax: Axes) -> None:
        self.comparison, self.ax = comparison, ax
        self.told: dict[str, str] = {}

    def add(self, result: Done, x: float, y: float, *, alpha: float, label: str | None = None) -> None:
        colour, marker = _look(self.comparison, result.run.loss)
        (dot,) = self.ax.plot(x, y, marker, color=colour, markersize=4.5, alpha=alpha, label=label)
        name = f"dot{len(self.told)}"
        dot.set_gid(name)
        run = result.run
        settings = in_words(self.comparison.losses[run.loss][run.try_number])
        said = ", ".join(
            f"{called.short} {value:.2f}"
            for figure, called in self.comparison.task.figures.items()
            if math.isfinite(value := result.figure(figure))
        )
        self.told[name] = (
            f"{run.loss}, {settings}, seed {run.seed}, {result.epochs} epochs: {said}. {run.name}"
        )

    def titled(self, figure: Figure) -> Figure:
        svg = figure.svg
        for name, text in self.told.items():
            opening = f'<g id="{figure.slug}-{name}">'
            svg = svg.replace(opening, f"{opening}<title>{escape(text)}</title>")
        return replace(figure, svg=svg)


def _dots(gallery: Gallery, comparison: Comparison, outcome: Outcome, figure: str) -> Figure:
    lines = [line for line in outcome.lines if figure in line.measured]
    names = [line.loss for line in lines]
    axis = f"{comparison.task.figures[figure].words}, {comparison.task.unit}"
    caption = f"{capital(axis)}: a dot is a seed, a bar the mean"
    with gallery.panel(f"seeds-{figure}", caption, height=0.9 + 0.27 * len(lines)) as panel:
        ax, dots = panel.ax, _Dots(comparison, panel.ax)
        for place, line in enumerate(lines):
            colour, _ = _look(comparison, line.loss)
            mean = line.measured[figure].mean
            ax.plot([mean, mean], [place - 0.32, place + 0.32], color=colour, linewidth=2.2)
            of_loss = [
                result
                for result in outcome.final
                if result.run.loss == line.loss and math.isfinite(result.figure(figure))
            ]
            for number, result in enumerate(of_loss):
                shift = 0.12 * (number - (len(of_loss) - 1) / 2)
                dots.add(result, result.figure(figure), place + shift, alpha=0.75)
        ax.set_yticks(range(len(lines)), [shorten(name, 20, among=names) for name in names])
        ax.set_ylim(len(lines) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        ax.locator_params(axis="x", nbins=6)
        ax.margins(x=0.08)
        ax.set_xlabel(axis)
    return dots.titled(panel.done)


def _ends(gallery: Gallery, comparison: Comparison, runs: Sequence[Done], course: _Course) -> Figure:
    """The final figure of each run."""
    main = comparison.task.main
    called = comparison.task.figures[main].words
    several = len({result.epochs for result in runs}) > 1
    caption = f"{capital(called)} against {course.label}: the chosen settings, a mark for each run"
    caption += ", a line through the means" if several else ""

    def x(result: Done) -> float:
        return course.x(result, result.epochs, result.seconds)

    with gallery.panel(course.slug, caption, height=3.3) as panel:
        dots = _Dots(comparison, panel.ax)
        for loss in comparison.losses:
            of_loss = sorted((result for result in runs if result.run.loss == loss), key=x)
            for number, result in enumerate(of_loss):
                label = None if number else shorten(loss, 16, among=comparison.losses)
                dots.add(result, x(result), result.figure(main), alpha=0.8, label=label)
            lengths = {
                result.epochs: [other for other in of_loss if other.epochs == result.epochs]
                for result in of_loss
            }
            if len(lengths) > 1:  # a line through the mean at each number of epochs
                points = [
                    (
                        sum(map(x, group)) / len(group),
                        sum(result.figure(main) for result in group) / len(group),
                    )
                    for group in lengths.values()
                ]
                colour, _ = _look(comparison, loss)
                panel.ax.plot(*zip(*sorted(points), strict=True), color=colour, linewidth=1.0)
        _finish(panel, course.label, f"{called}, {comparison.task.unit}")
    return dots.titled(panel.done)


def _tuning(gallery: Gallery, comparison: Comparison, tuned: Mapping[str, Sequence[float]]) -> Figure:
    caption = "What tuning gave: test figure of the best of k tries, chosen by validation, first seed"
    with gallery.panel("tuning", caption, height=3.3) as panel:
        for loss, values in tuned.items():
            colour, marker = _look(comparison, loss)
            ks, name = range(1, len(values) + 1), shorten(loss, 16, among=tuned)
            panel.ax.plot(ks, values, marker + "-", color=colour, markersize=4.5, linewidth=1.2, label=name)
        panel.ax.set_xticks(range(1, max(map(len, tuned.values())) + 1))
        called = comparison.task.figures[comparison.task.main].words
        _finish(panel, "k, number of tries", f"{called}, {comparison.task.unit}")
    return panel.done
