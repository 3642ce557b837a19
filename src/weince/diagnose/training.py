# ruff: noqa: RUF001  (Greek letters are meant)
"""What a page shows before a diagnosis: which losses were trained, what came of them, and how they went.

A comparison is ``{loss: {figure: [one value per encoder]}}``, and its logs are ``{loss: [log of each encoder]}``,
where a log is a list of rows as ``weince.lab.vision.log.read_log`` gives them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from weince.diagnose.sections import Group, Section
from weince.diagnose.style import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SKY, Figure, Gallery, legend, shorten
from weince.diagnose.tables import Cell, Table, text
from weince.evt.intervals import t_interval

Comparison = Mapping[str, Mapping[str, Sequence[float]]]
Rows = Sequence[Mapping[str, float]]
LOOKS = ((BLUE, "-"), (SKY, "--"), (RED, "-"), (GREEN, "--"), (PURPLE, "-"), (ORANGE, "--"))
SHARED = {
    "alignment": ("Alignment: mean squared distance of a pair", "squared distance"),
    "uniformity": ("Uniformity: lower is more evenly spread", "log mean exp(−2 distance²)"),
    "lam": ("λ: mean weight WEINCE gives the shortfall", "λ"),
    "rho": ("ρ: mean shortfall of the hardest negative", "ρ"),
}


@dataclass(frozen=True)
class Opening:
    """What stands before the diagnosis of a page, and what the page is then called.

    Attributes:
        title: Of the page.
        lead: A sentence under it.
        sections: Draws what comes first.
        diagnosis: Heading of the diagnosis that follows.
    """

    title: str
    lead: str
    sections: Callable[[Gallery], Sequence[Section]]
    diagnosis: str = "Diagnosis"


def headline(comparison: Comparison, figure: str) -> str:
    """Which loss is highest, and whether the others are really below it."""
    intervals = {name: t_interval(values[figure]) for name, values in comparison.items()}
    if any(np.isnan(found.half) for found in intervals.values()):
        return "One encoder per loss has no interval: these figures compare nothing."
    best = max(intervals, key=lambda name: intervals[name].mean)
    top = intervals[best]
    near = [n for n, i in intervals.items() if n != best and i.mean + i.half >= top.mean - top.half]
    said = f"{figure}: {best} is highest, {top.text(1)} %"
    if not near:
        return f"{said}, and no other interval reaches its own."
    return f"{said}, but its interval overlaps {'those' if len(near) > 1 else 'that'} of {_listed(near)}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, ["; ".join(names[:-1]), names[-1]]))


def results_section(
    gallery: Gallery, comparison: Comparison, *, said: str, read: str, notes: Sequence[str] = ()
) -> Section:
    """The table of a comparison, and each encoder as a dot.

    Args:
        gallery: Where to draw.
        comparison: Figures in percent; every loss has the same ones.
        said: The headline.
        read: How to read the table.
        notes: How its figures were measured.
    """
    first = next(iter(comparison.values()))
    rows = tuple(
        (text(name), *(_cell(values[figure]) for figure in first)) for name, values in comparison.items()
    )
    encoders = max(len(values[figure]) for values in comparison.values() for figure in values)
    title = f"Accuracy in %, mean of {encoders} encoders ± half width of its 95 % t-interval"
    dots = [_dots(gallery, place, comparison, figure) for place, figure in enumerate(first, 1)]
    return Section(
        "results",
        "Results",
        read,
        (Group("", tuple(dots)),),
        (Table("results", title if encoders > 1 else "Accuracy in %", ("", *first), rows),),
        said=said,
        notes=tuple(notes),
        numbers_first=True,
    )


def _cell(values: Sequence[float]) -> Cell:
    found = t_interval(values)
    known = not np.isnan(found.half)
    return Cell(found.text(1), (found.mean - found.half, found.mean + found.half) if known else found.mean)


def _looks(names: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    """Name, colour and line style of each loss: the same in every figure."""
    return ((name, *look) for name, look in zip(names, cycle(LOOKS), strict=False))


def _dots(gallery: Gallery, place: int, comparison: Comparison, figure: str) -> Figure:
    caption = f"{figure}: encoders, mean, 95 % interval"
    with gallery.panel(f"results-{place}", caption, height=1.0 + 0.4 * len(comparison)) as panel:
        ax = panel.ax
        for y, (name, colour, _) in enumerate(_looks(comparison)):
            values = comparison[name][figure]
            mean, half, _ = t_interval(values)
            below = [y + 0.28] * len(values)  # where the interval does not hide them
            ax.plot(values, below, "o", color=INK, markersize=4, alpha=0.5, markeredgewidth=0)
            ax.plot([mean - half, mean + half], [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
            ax.plot([mean], [y], "D", color=colour, markersize=6)
        ax.set_yticks(range(len(comparison)), [shorten(name, among=comparison) for name in comparison])
        ax.set_ylim(len(comparison) - 0.4, -0.6)
        ax.grid(visible=False, axis="y")
        ax.margins(x=0.08)
        ax.locator_params(axis="x", nbins=6)
        ax.set_xlabel("accuracy (%)")
    return panel.done


def curves_section(gallery: Gallery, logs: Mapping[str, Sequence[Rows]]) -> Section:
    """The loss of every run on its own scale, and its embeddings on a shared one."""
    own = tuple(
        _curves(gallery, f"loss-{place}", f"Loss: {name}", "loss", {name: logs[name]}, [(name, colour, "-")])
        for place, (name, colour, _) in enumerate(_looks(logs), 1)
    )
    shared = tuple(
        _curves(gallery, key, caption, key, logs, list(_looks(logs)), label=label)
        for key, (caption, label) in SHARED.items()
    )
    read = (
        "Thin lines are encoders, thick ones their mean. The losses are different functions of the scores, so their "
        "levels do not compare: look only for a curve that falls and settles. What they do to the embeddings does "
        "compare. λ and ρ are read from the negatives whatever the loss, but only WEINCE uses them; λ follows "
        "the tail settings of the run’s loss, those of the preset paper for InfoNCE."
    )
    groups = (Group("The loss, each on its own scale", own), Group("The embeddings, on one scale", shared))
    return Section("training", "Training", read, groups, ())


def _curves(
    gallery: Gallery,
    slug: str,
    caption: str,
    key: str,
    logs: Mapping[str, Sequence[Rows]],
    looks: Sequence[tuple[str, str, str]],
    *,
    label: str | None = None,
) -> Figure:
    with gallery.panel(f"training-{slug}", caption, height=2.5 if len(looks) == 1 else 3.0) as panel:
        ax = panel.ax
        for name, colour, style in looks:
            runs = logs[name]
            epochs = [row["epoch"] for row in min(runs, key=len)]  # what all runs have
            values = np.array([[row[key] for row in run[: len(epochs)]] for run in runs])
            marker = "o" if len(epochs) == 1 else None  # a line of one point is none
            ax.plot(epochs, values.T, color=colour, linewidth=0.7, alpha=0.45, marker=marker, markersize=3)
            ax.plot(
                epochs, values.mean(0), style, color=colour, label=shorten(name, among=logs), marker=marker
            )
        ax.set(xlabel="epoch", ylabel=label or key)
        ax.locator_params(axis="x", integer=True, nbins=7)
        ax.locator_params(axis="y", nbins=6)
        if len(looks) > 1:
            legend(ax)
    return panel.done
