"""Figures of a comparison: a dot for each seed, the course of training, the gain from tuning."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from matplotlib.axes import Axes

from weince.diagnose.style import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, Figure, Gallery, legend, shorten
from weince.lab.study.grid import Comparison, in_words
from weince.lab.study.summary import Done, Point, Summary, capital

COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
MARKERS = "osD^vP*X<>pd"
FEW_SECONDS = 120.0
"""Shorter trainings are drawn in seconds."""

FEW_LOOKS = 40
"""A line with more evaluations than this is drawn without markers."""


def draw(comparison: Comparison, summary: Summary, folder: Path) -> list[Figure]:
    """Draw the figures for which there are records, each into a file under ``folder``."""
    gallery = Gallery(folder)
    counted = [one for one in summary.done if one.chosen]
    found = [
        _dots(gallery, comparison, summary, counted, figure)
        for figure in comparison.task.figures
        if any(math.isfinite(one.figure(figure)) for one in counted)
    ]
    time_axis, time = time_of(summary)
    if any(len(one.course) > 1 for one in counted):
        found += [
            _along(gallery, comparison, counted, "epochs", "epochs", lambda one, point: point.epoch),
            _along(gallery, comparison, counted, "time", time_axis,
                   lambda one, point: time(one, point.epoch, point.seconds)),
        ]  # fmt: skip
    else:
        found += _ends(gallery, comparison, summary)
    if any(len(values) > 1 for values in summary.tuned.values()):
        found.append(_tuned(gallery, comparison, summary.tuned))
    return found


def time_of(summary: Summary) -> tuple[str, Callable[[Done, float, float], float]]:
    """Label of the time axis, and the time of a run until an epoch at which its log has so many seconds.

    It is that of the steps that were timed while nothing else ran, if all losses were timed on one machine. The logs
    do not compare losses: the more runs share a device, the longer each takes.
    """
    costs = {line.loss: line.cost or {} for line in summary.lines if line.measured}
    epoch = {loss: float(cost.get("epoch_seconds") or math.nan) for loss, cost in costs.items()}
    alone = len({str(cost.get("hardware")) for cost in costs.values()}) == 1
    alone = alone and all(map(math.isfinite, epoch.values()))

    def seconds(one: Done, epochs: float, logged: float) -> float:
        return epoch[one.run.loss] * epochs if alone else logged

    longest = max((seconds(one, one.epochs, one.seconds) for one in summary.done if one.chosen), default=0.0)
    unit, words = (1.0, "seconds") if longest < FEW_SECONDS else (60.0, "minutes")
    label = f"{words} of training, {'one run at a time' if alone else 'as logged'}"
    return label, lambda one, epochs, logged: seconds(one, epochs, logged) / unit


def _ends(gallery: Gallery, comparison: Comparison, summary: Summary) -> list[Figure]:
    """Figures of the final results, for runs that were not evaluated during training."""
    shown = {line.loss for line in summary.lines if line.measured}
    of_choice = [one for one in summary.done if _is_choice(summary, one) and one.run.loss in shown]
    time_axis, time = time_of(summary)
    taken = {one.run.name: time(one, one.epochs, one.seconds) for one in of_choice}
    found = []
    if len({one.epochs for one in of_choice}) > 1:
        found.append(_course(gallery, comparison, of_choice, "epochs", "epochs", lambda one: one.epochs))
    if any(map(math.isfinite, taken.values())):
        found.append(
            _course(gallery, comparison, of_choice, "time", time_axis, lambda one: taken[one.run.name])
        )
    return found


def _along(
    gallery: Gallery,
    comparison: Comparison,
    runs: Sequence[Done],
    slug: str,
    label: str,
    x: Callable[[Done, Point], float],
) -> Figure:
    """The tracked figure of each run, a line for each seed."""
    (words, short), unit = comparison.task.tracked, comparison.task.unit
    caption = f"{capital(words)} against {label}: a line for each seed"
    with gallery.panel(slug, caption, height=3.3) as panel:
        for loss in comparison.losses:
            colour, marker = _look(comparison, loss)
            for number, one in enumerate(one for one in runs if one.run.loss == loss and one.course):
                panel.ax.plot(
                    [x(one, point) for point in one.course], [point.value for point in one.course],
                    marker=marker if len(one.course) <= FEW_LOOKS else None, markersize=3, linewidth=1.0,
                    color=colour, alpha=0.7,
                    label=shorten(loss, 16, among=comparison.losses) if number == 0 else None,
                )  # fmt: skip
        panel.ax.set(xlabel=label, ylabel=f"{short}, {unit}")
        panel.ax.margins(0.08)
        _legend(panel.ax)
    return panel.done


def _legend(ax: Axes) -> None:
    """Draw a legend in up to three columns, as many as fit beside the labels of the y axis."""
    for columns in (3, 2, 1):
        legend(ax, columns)
        drawn = ax.get_legend()
        if drawn is None or drawn.get_window_extent().width < 0.85 * ax.figure.bbox.width:
            return


def told(comparison: Comparison, one: Done) -> str:
    """One line about a run: the tooltip of its dot."""
    words = in_words(comparison.losses[one.run.loss][one.run.try_number])
    said = ", ".join(
        f"{called.short} {value:.2f}"
        for figure, called in comparison.task.figures.items()
        if math.isfinite(value := one.figure(figure))
    )
    return f"{one.run.loss}, {words}, seed {one.run.seed}, {one.epochs} epochs: {said}. {one.run.name}"


def _is_choice(summary: Summary, one: Done) -> bool:
    """Whether a run uses the chosen try of its loss, with any number of epochs."""
    chosen = {other.run.loss: other.run.try_number for other in summary.done if other.chosen}
    return chosen.get(one.run.loss) == one.run.try_number


def _dots(
    gallery: Gallery, comparison: Comparison, summary: Summary, counted: Sequence[Done], figure: str
) -> Figure:
    lines = [line for line in summary.lines if figure in line.measured]
    names = [line.loss for line in lines]
    titles: dict[str, str] = {}
    axis = f"{comparison.task.figures[figure].words}, {comparison.task.unit}"
    caption = f"{capital(axis)}: a dot is a seed, a bar the mean"
    with gallery.panel(f"seeds-{figure}", caption, height=0.9 + 0.27 * len(lines)) as panel:
        ax = panel.ax
        for place, line in enumerate(lines):
            colour, marker = _look(comparison, line.loss)
            ax.plot(
                [line.measured[figure].mean] * 2, [place - 0.32, place + 0.32], color=colour, linewidth=2.2
            )
            of_loss = [
                one for one in counted if one.run.loss == line.loss and math.isfinite(one.figure(figure))
            ]
            for number, one in enumerate(of_loss):
                shift = 0.12 * (number - (len(of_loss) - 1) / 2)
                (dot,) = ax.plot(
                    one.figure(figure), place + shift, marker, color=colour, markersize=4.5, alpha=0.75
                )
                dot.set_gid(f"dot{len(titles)}")
                titles[f"dot{len(titles)}"] = told(comparison, one)
        ax.set_yticks(range(len(lines)), [shorten(name, 20, among=names) for name in names])
        ax.set_ylim(len(lines) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        ax.locator_params(axis="x", nbins=6)
        ax.margins(x=0.08)
        ax.set_xlabel(axis)
    return _titled(panel.done, titles)


def _titled(figure: Figure, titles: Mapping[str, str]) -> Figure:
    """The figure with a tooltip on each dot."""
    svg = figure.svg
    for gid, text in titles.items():
        opening = f'<g id="{figure.slug}-{gid}">'
        svg = svg.replace(opening, f"{opening}<title>{escape(text)}</title>")
    return replace(figure, svg=svg)


def _look(comparison: Comparison, loss: str) -> tuple[str, str]:
    """Colour and marker of a loss, the same in all figures."""
    place = list(comparison.losses).index(loss)
    return COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]


def _course(
    gallery: Gallery,
    comparison: Comparison,
    runs: Sequence[Done],
    slug: str,
    label: str,
    x: Callable[[Done], float],
) -> Figure:
    main = comparison.task.main
    called = comparison.task.figures[main].words
    caption = f"{capital(called)} against {label}: the chosen settings, a mark for each run"
    if len({one.epochs for one in runs}) > 1:
        caption += ", a line through the means"
    titles: dict[str, str] = {}
    with gallery.panel(slug, caption, height=3.3) as panel:
        for loss in comparison.losses:
            of_loss = sorted((one for one in runs if one.run.loss == loss), key=x)
            colour, marker = _look(comparison, loss)
            for number, one in enumerate(of_loss):
                (dot,) = panel.ax.plot(
                    x(one), one.figure(main), marker, color=colour, markersize=4.5, alpha=0.8,
                    label=shorten(loss, 16, among=comparison.losses) if number == 0 else None,
                )  # fmt: skip
                dot.set_gid(f"dot{len(titles)}")
                titles[f"dot{len(titles)}"] = told(comparison, one)
            _through_means(panel.ax, of_loss, x, main, colour)
        panel.ax.set(xlabel=label, ylabel=f"{called}, {comparison.task.unit}")
        panel.ax.margins(0.08)
        _legend(panel.ax)
    return _titled(panel.done, titles)


def _through_means(
    ax: Axes, runs: Sequence[Done], x: Callable[[Done], float], main: str, colour: str
) -> None:
    """Draw a line through the mean at each number of epochs, if there are several."""
    lengths: dict[int, list[Done]] = {}
    for one in runs:
        lengths.setdefault(one.epochs, []).append(one)
    if len(lengths) > 1:
        points = [
            (sum(map(x, group)) / len(group), sum(one.figure(main) for one in group) / len(group))
            for group in lengths.values()
        ]
        ax.plot(*zip(*sorted(points), strict=True), color=colour, linewidth=1.0)


def _tuned(gallery: Gallery, comparison: Comparison, tuned: Mapping[str, Sequence[float]]) -> Figure:
    caption = "What tuning gave: test figure of the best of k tries, chosen by validation, first seed"
    with gallery.panel("tuning", caption, height=3.3) as panel:
        for loss, values in tuned.items():
            colour, marker = _look(comparison, loss)
            panel.ax.plot(
                range(1, len(values) + 1), values, marker + "-", color=colour, markersize=4.5, linewidth=1.2,
                label=shorten(loss, 16, among=tuned),
            )  # fmt: skip
        called = comparison.task.figures[comparison.task.main].words
        panel.ax.set(xlabel="k, number of tries", ylabel=f"{called}, {comparison.task.unit}")
        panel.ax.set_xticks(range(1, max(map(len, tuned.values())) + 1))
        panel.ax.margins(0.08)
        _legend(panel.ax)
    return panel.done
