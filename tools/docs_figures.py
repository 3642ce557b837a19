"""Draw the figures of the README, ``docs/theory.md`` and ``docs/which-loss.md`` into ``docs/assets``.

python tools/docs_figures.py            seconds
"""

import argparse
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from weince import BlendLink, PowerLink, ShortfallLink, SoftmaxLink
from weince.files import write_aside
from weince.lab.paper.noise_floor import noise_floor

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
RESULTS = Path(__file__).parents[1] / "research" / "results"
PLAIN = {"tail": {}, "softmax_term": None, "shortfall_term": None}
SHOWN = {
    "WEINCE, Algorithm 1, 0.5": {"preset": "paper", "temperature": 0.5, **PLAIN},
    "InfoNCE, 0.5": {"preset": "infonce", "temperature": 0.5, **PLAIN},
    "WEINCE, the authors' code, 0.5": {"preset": "released", "temperature": 0.5, **PLAIN},
    "InfoNCE + that code's two terms, 0.5": {
        "preset": "infonce", "temperature": 0.5, "tail": {}, "softmax_term": 0.5, "shortfall_term": 0.5,
    },
    "InfoNCE, 0.1": {"preset": "infonce", "temperature": 0.1, **PLAIN},
    "InfoNCE, 0.2": {"preset": "infonce", "temperature": 0.2, **PLAIN},
}  # fmt: skip
STRONG = {
    "InfoNCE, 0.1": {"preset": "infonce", "temperature": 0.1},
    "temperature mixture, 0.2": {"preset": "mixture", "temperature": 0.2, "options": {}},
    "WeinceLoss(), 0.2": {"preset": "released", "temperature": 0.2},
    "DCL, 0.1": {"preset": "dcl", "temperature": 0.1},
    "InfoNCE, 0.15": {"preset": "infonce", "temperature": 0.15},
    "InfoNCE, 0.2": {"preset": "infonce", "temperature": 0.2},
    "HCL, 0.5, hardness 2": {"preset": "hcl", "temperature": 0.5, "options": {"hardness": 2.0}},
    "KL ball, radius 1.2": {"preset": "kl_ball", "options": {"radius": 1.2}},
    "HCL, 0.5": {"preset": "hcl", "temperature": 0.5, "options": {}},
}
RUN = {"data": "cifar100", "encoder": "resnet18", "epochs": 100, "precision": "bf16"}


def accuracies(
    archive: str = "evidence", shown: Mapping[str, Mapping[str, Any]] = SHOWN
) -> dict[str, list[float]]:
    """Linear accuracy of every seed by the name of its loss, from the records of the runs."""
    found: dict[str, list[float]] = {name: [] for name in shown}
    for line in (RESULTS / archive / "runs.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        run = record["run.yaml"]
        if any(run[key] != value for key, value in RUN.items()):
            continue
        for name, loss in shown.items():
            if all(run["loss"][key] == value for key, value in loss.items()):
                found[name].append(record["evaluation.json"]["linear_test_mean"])
    return found


def comparison() -> Figure:
    """Losses trained with the paper's recipe."""
    return dots(accuracies(), (39, 56))


def strong() -> Figure:
    """Losses trained with the strong recipe."""
    return dots(accuracies("strong", STRONG), (57.5, 61.5))


def dots(found: Mapping[str, list[float]], limits: tuple[float, float]) -> Figure:
    """A dot for every seed, and the mean beside them."""
    figure, axes = plt.subplots(figsize=(6.8, round(0.8 + 0.3 * len(found), 1)))
    beside = (limits[1] - limits[0]) / 42.5
    for place, (name, values) in enumerate(found.items()):
        best = name == "InfoNCE, 0.2"
        axes.plot(values, [place] * len(values), "o", color="#3f51b5" if best else "#607d8b", alpha=0.7)
        axes.text(
            max(values) + beside,
            place,
            f"{np.mean(values):.1f}",
            va="center",
            weight="bold" if best else "normal",
        )
    axes.set_yticks(range(len(found)), list(found))
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.set_xlim(*limits)
    axes.set_xlabel("linear accuracy on CIFAR-100, %; a dot for each seed")
    axes.grid(axis="x", alpha=0.3)
    return figure


def links() -> Figure:
    """The logit of four links over the score, all with the same slope at a score of 0."""
    scores = np.linspace(-0.5, 0.985, 300)
    shortfalls = torch.tensor(1 - scores)
    drawn = {
        "softmax": SoftmaxLink(0.5),
        "shortfall": ShortfallLink(2.0),
        "blend of both, λ = 0.5": BlendLink(0.5, 2.0, 0.5),
        "power": PowerLink(2.0),
    }
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for (name, link), style in zip(drawn.items(), ("-", "--", "-.", ":"), strict=True):
        logits = link.logit(shortfalls)
        axes.plot(scores, logits - link.logit(torch.ones(1, dtype=torch.float64)), style, label=name)
    axes.set_xlabel("score s (a cosine, at most 1)")
    axes.set_ylabel("logit, less that of s = 0")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.legend(frameon=False)
    return figure


def floor() -> Figure:
    """Mean squared error of the log-odds by the number of observed problems."""
    found = noise_floor(replicates=4000)
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    axes.loglog(found.sizes, found.shortfall_error, "o-", label="right link (shortfall): falls for ever")
    axes.loglog(found.sizes, found.softmax_error, "s--", label="wrong link (softmax): stops at a floor")
    axes.axhline(found.softmax.bias**2, color="grey", linewidth=0.8)
    axes.set_xlabel("observed problems")
    axes.set_ylabel("mean squared error of the log-odds")
    axes.legend(frameon=False)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    matplotlib.use("Agg")
    # A fixed salt makes the same figure give the same file.
    plt.rcParams.update({"svg.hashsalt": "weince", "axes.spines.top": False, "axes.spines.right": False})
    figures = {"comparison": comparison, "strong": strong, "links": links, "noise-floor": floor}
    for name, draw in figures.items():
        figure = draw()
        figure.tight_layout()
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        text = "".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines())
        write_aside(ASSETS / f"{name}.svg", lambda path, text=text: path.write_text(text, encoding="utf-8"))
        print(f"docs/assets/{name}.svg")


if __name__ == "__main__":
    main()
