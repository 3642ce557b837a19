"""Write the table of heads: Markdown to read, CSV for programs, one figure."""

import csv
import math
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import numpy as np

from weince.files import write_aside, write_text_aside
from weince.intervals import t_interval
from weince.lab.geometry import collapsed
from weince.lab.predict.features import Prepared
from weince.lab.predict.heads import Outcome, Probe
from weince.scores import CROWD

Table = Mapping[str, Sequence[Outcome]]
"""Outcomes of all seeds, by name of the loss."""

SHARES = ("first", "first_of_all", "r1", "vote", "crowded")
NOT_ADVICE = (
    "This is what each loss does to a head on these features. It is no advice on what to train with: an encoder that "
    "is trained with a loss gives other features, and the loss with the best heads was not the best to train with. "
    "Heads that collapse are a warning; heads that do not are no proof."
)


def write_report(
    folder: Path,
    table: Table,
    seeds: Sequence[int],
    prepared: Prepared,
    steps: int,
    probe: Probe,
    command: str,
) -> Path:
    """Write ``heads.csv``, ``heads.svg`` and, last, ``heads.md``; returns the path of ``heads.md``."""
    write_text_aside(folder / "heads.csv", _csv(table, seeds), "table")
    write_aside(folder / "heads.svg", lambda part: _draw(table, part), "figure")
    path = folder / "heads.md"
    write_text_aside(path, markdown(table, prepared, steps, probe, command), "table")
    return path


def collapse_of(outcomes: Sequence[Outcome]) -> str:
    """``diverged`` if a head of a loss did, ``collapses`` if its heads do on average, else empty."""
    if any(math.isnan(o.first) for o in outcomes):
        return "diverged"
    crowd, rank = (
        float(np.mean([getattr(o, key) for o in outcomes])) for key in ("crowded", "effective_rank")
    )
    return "collapses" if collapsed(crowd, rank) else ""


def markdown(table: Table, prepared: Prepared, steps: int, probe: Probe, command: str) -> str:
    """The table with an explanation; the loss that ranks the most positives first is on top."""
    labelled = prepared.views.labels is not None
    items = len(prepared.views.first)
    columns = {
        f"positive first of {probe.batch}, %": "first",
        f"of all {items // 4:,}, %": "first_of_all",
        **({"R@1, %": "r1", "vote, %": "vote"} if labelled else {}),
        "alignment": "alignment",
        "uniformity": "uniformity",
        "rank": "effective_rank",
        "crowded, %": "crowded",
    }
    seeds, axes = len(next(iter(table.values()))), prepared.views.first.shape[1]
    apart = (
        "" if prepared.views.ids is None else " Items with equal ids, or drawn by one label, never compete."
    )
    neighbours = (
        " R@1: how often the nearest training item has the item's label. Vote: how often a weighted vote of the 50 "
        "nearest does."
        if labelled
        else ""
    )
    lines = [
        "# What losses do to a head on these features",
        "",
        NOT_ADVICE,
        "",
        f"A head has two layers, {axes} to {probe.hidden} to {probe.out}; its inputs are the {axes} axes with "
        f"{100 * prepared.kept:.1f} % of the variance of the features. It trains {steps:,} steps of {probe.batch} "
        f"items with Adam at {probe.rate:g} and noise of {probe.noise:g} on standardised features. A quarter of the "
        f"{items:,} items is held out; the figures are theirs.{apart} "
        + (f"{seeds} seeds: mean ± half the width of a 95 % t-interval." if seeds > 1 else "One seed."),
        "",
        "Positive first: how often the second view of an item scores highest among a batch of held-out items, or "
        "among all of them. Alignment: mean squared distance of the two views. Uniformity: lower is more even. Rank: "
        f"effective, at most {probe.out}. Crowded: views with another item at a cosine of {1 - CROWD:g} or more."
        + neighbours,
        *(["", prepared.remark] if prepared.remark else []),
        "",
        f"| loss | {' | '.join(columns)} | |",
        f"|---|{'---:|' * len(columns)}---|",
    ]
    for name, outcomes in sorted(table.items(), key=lambda row: _order(row[1])):
        cells = [_cell(outcomes, key) for key in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {collapse_of(outcomes)} |")
    lines += ["", "![positives first by loss](heads.svg)", "", f"Made by `{command}`."]
    return "\n".join(lines) + "\n"


def _order(outcomes: Sequence[Outcome]) -> float:
    """Sort key: the best loss first, losses that diverged last."""
    mean = float(np.mean([o.first for o in outcomes]))
    return math.inf if math.isnan(mean) else -mean


def _cell(outcomes: Sequence[Outcome], key: str) -> str:
    values = [getattr(o, key) * (100 if key in SHARES else 1) for o in outcomes]
    return "—" if any(map(math.isnan, values)) else t_interval(values).text(1 if key in SHARES else 2)


def _csv(table: Table, seeds: Sequence[int]) -> str:
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["loss", "seed", *Outcome._fields])
    for name, outcomes in table.items():
        writer.writerows([name, seed, *outcome] for seed, outcome in zip(seeds, outcomes, strict=True))
    return file.getvalue()


def _draw(table: Table, path: Path) -> None:
    """Draw the share of positives first by loss: a dot for each seed; losses whose heads collapse are red."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "weince"}):
        figure = Figure(figsize=(7.0, 0.22 * len(table) + 0.9), layout="constrained")
        axes = figure.add_subplot()
        ordered = sorted(table.items(), key=lambda row: _order(row[1]))
        for place, (_, outcomes) in enumerate(ordered):
            shares = [100 * o.first for o in outcomes]
            colour = "#d55e00" if collapse_of(outcomes) else "#0072b2"
            axes.plot(shares, [place] * len(shares), "o", color=colour, ms=4, alpha=0.7)
        axes.set_yticks(range(len(ordered)), [name for name, _ in ordered], fontsize=7, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel("positive first, % of held-out items (red: collapses or diverged)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        figure.savefig(path, format="svg", metadata={"Date": None})
