# ruff: noqa: RUF001  (Greek letters are meant)
"""Draw how the runs of a table went: their logs over the epochs, and the geometry of their final embeddings.

The curves come from ``log.csv``; runs without one are left out.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
    as_svg,
    for_page,
    shorten,
)
from weince.lab.study.aggregate import Record
from weince.lab.study.plan import Run, words
from weince.lab.study.records import read_record
from weince.lab.study.tables import MEASURES, Table
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


class Picture(NamedTuple):
    """A figure: name of its file, caption, SVG for the file, and SVG to embed in a page."""

    name: str
    caption: str
    svg: str
    in_page: str


class _Group(NamedTuple):
    """The runs of one configuration that have a log, with their colour and line style in all panels."""

    name: str
    colour: str
    style: Any
    logs: list[list[dict[str, float]]]
    records: list[Record]


def pictures(table: Table, made: Sequence[tuple[Run, Record]]) -> list[Picture]:
    """``curves`` and ``geometry`` of each row of a table; none for a row without logs.

    Args:
        table: The table.
        made: The runs that are done, and their records.
    """
    found = []
    rows = list(dict.fromkeys(run.row for run, _ in made))
    for row in rows:
        groups = _groups(table, [(run, record) for run, record in made if run.row == row])
        if groups and all("uniformity" in log[-1] for group in groups for log in group.logs):  # text has none
            end = f"_{row}" if len(rows) > 1 else ""
            found += [_curves(groups, f"curves{end}", row), _geometry(table, groups, f"geometry{end}", row)]
    return found


def _groups(table: Table, made: Sequence[tuple[Run, Record]]) -> list[_Group]:
    """The configurations in the order of the table.

    With several tries, each try has a colour and each loss a line style. With one try, each loss has a colour, and
    the line style changes when the colours are used up.
    """
    losses = list(table.losses)
    tuned = any(len(table.tries_of(loss)) > 1 for loss in losses)
    groups: dict[tuple[str, int], _Group] = {}
    for run, record in sorted(made, key=lambda pair: (losses.index(pair[0].loss), pair[0].try_number)):
        log = read_record(run, "log.csv")
        if not log:
            continue
        if (run.loss, run.try_number) not in groups:
            place = losses.index(run.loss)
            colour, style = (run.try_number, place) if tuned else (place, place // len(COLOURS))
            tried = words(table.tries_of(run.loss)[run.try_number]) if tuned else ""
            groups[run.loss, run.try_number] = _Group(
                ", ".join(filter(None, [run.loss, tried])),
                COLOURS[colour % len(COLOURS)],
                STYLES[style % len(STYLES)],
                [],
                [],
            )
        groups[run.loss, run.try_number].logs.append(log)
        groups[run.loss, run.try_number].records.append(record)
    return list(groups.values())


def _curves(groups: Sequence[_Group], name: str, row: str) -> Picture:
    caption = (
        f"{row}, epoch by epoch: thick lines are means over seeds, thin lines are seeds. All figures except the loss "
        "are those of an epoch's last batch. ρ, λ, β and ΔAIC are measured on the negatives of every run, with the "
        "tail settings of its loss; a loss without them, such as InfoNCE, gets those of the preset paper."
    )
    older = [group.name for group in groups if any("crowded" not in log[-1] for log in group.logs)]
    shown = _shown(groups)
    if older and "crowded" in shown:
        caption += f" Crowded has no mean where a log is older than that column: {'; '.join(older)}."
    with mpl.rc_context({**LOOK, "svg.hashsalt": name}):
        names = [group.name for group in groups]
        legend_rows = -(-len(groups) // 3)
        rows, columns = (2, 4) if len(shown) == 8 else (3, 3)
        figure = Figure(figsize=(11.0, 2.45 * rows + 0.19 * legend_rows), layout="constrained")
        axes = figure.subplots(rows, columns)
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
        figure.legend(handles, labels, loc="outside lower left", ncols=3, handlelength=2.6)
        return _drawn(figure, name, caption)


def _shown(groups: Sequence[_Group]) -> dict[str, str]:
    """The panels to draw; ``crowded`` is left out if all logs are older than that column."""
    known = any("crowded" in row for group in groups for log in group.logs for row in log)
    return {key: title for key, title in PANELS.items() if known or key != "crowded"}


def _lines(ax: Axes, group: _Group, key: str, names: Sequence[str]) -> None:
    epochs = [row["epoch"] for row in min(group.logs, key=len)]  # the epochs that all seeds have
    # A row without this column leaves a gap in its line and in the mean.
    values = np.array([[row.get(key, np.nan) for row in log[: len(epochs)]] for log in group.logs])
    marker = "o" if len(epochs) == 1 else None  # one point makes no line
    look: dict[str, Any] = {
        "color": group.colour,
        "linestyle": group.style,
        "marker": marker,
        "markersize": 3,
    }
    if len(values) > 1:
        ax.plot(epochs, values.T, linewidth=0.5, alpha=0.4, **look)
    ax.plot(epochs, values.mean(0), linewidth=1.5, label=shorten(group.name, 48, among=names), **look)


def _geometry(table: Table, groups: Sequence[_Group], name: str, row: str) -> Picture:
    measure = MEASURES[table.measure]
    figure_name = "linear" if "linear" in measure.figures else table.figures[0]
    key = measure.test.format(figure_name)
    caption = (
        f"{row}, the last epoch: a mark is a run, its shape tells the configuration, its colour {figure_name} on "
        "test. Left: pairs nearer together. Down: embeddings more evenly spread."
        f"{_rank_correlation(groups, key, figure_name)}"
    )
    with mpl.rc_context({**LOOK, "svg.hashsalt": name}):
        figure = Figure(figsize=(7.6, max(3.8, 0.6 + 0.21 * len(groups))), layout="constrained")
        ax = figure.subplots()
        every = [float(record[key]) for group in groups for record in group.records]
        known = [value for value in every if np.isfinite(value)] or [0.0, 1.0]  # NaN: a link was not fitted
        for place, group in enumerate(groups):
            last = [log[-1] for log in group.logs]
            marks = ax.scatter(
                [end["alignment"] for end in last],
                [end["uniformity"] for end in last],
                c=[float(record[key]) for record in group.records],
                vmin=min(known),
                vmax=max(known),
                cmap="viridis",
                marker=MARKERS[place % len(MARKERS)],
                s=46,
                edgecolors=INK,
                linewidths=0.6,
                label=shorten(group.name, 44, among=[one.name for one in groups]),
            )
        ax.set(
            xlabel="alignment: squared distance of a pair", ylabel="uniformity: log mean exp(−2 distance²)"
        )
        ax.margins(0.1)
        unit = " (%)" if table.measure == "evaluation" else ""
        bar = figure.colorbar(marks, ax=ax, label=figure_name + unit)
        assert bar.solids is not None
        bar.solids.set(rasterized=False, edgecolor="face")  # raster images are not shown in a page
        figure.legend(loc="outside right upper")
        for handle in figure.legends[0].legend_handles:
            if handle is not None:
                handle.set(facecolor="none")  # the legend explains only the shape
        return _drawn(figure, name, caption)


def _rank_correlation(groups: Sequence[_Group], key: str, figure_name: str) -> str:
    """Rank correlation of the figure with uniformity, in words; empty for fewer than five runs."""
    found = [
        (log[-1]["uniformity"], float(record[key]))
        for group in groups
        for log, record in zip(group.logs, group.records, strict=True)
    ]
    x, y = np.array([pair for pair in found if np.isfinite(pair).all()]).reshape(-1, 2).T
    if len(x) < 5 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return ""
    value = stats.spearmanr(x, y).statistic
    return f" Rank correlation of {figure_name} with uniformity over these {len(x)} runs: {value:+.2f}."


def _drawn(figure: Figure, name: str, caption: str) -> Picture:
    # Rounding to a hundredth of a point makes the file a quarter smaller.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), as_svg(figure))
    # The file gets a white background, since it may be shown on any; a page has its own.
    start = svg.index(">", svg.index("<svg")) + 1
    on_white = f'{svg[:start]}\n <rect width="100%" height="100%" fill="#ffffff"/>{svg[start:]}'
    return Picture(name, caption, on_white, for_page(svg, name))
