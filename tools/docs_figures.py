"""Draw the figures of ``docs/theory.md``.

    python tools/docs_figures.py            writes docs/assets/links.svg and docs/assets/noise-floor.svg; seconds
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch

from weince import BlendLink, PowerLink, ShortfallLink, SoftmaxLink
from weince.evt import noise_floor
from weince.files import write_aside

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
matplotlib.use("Agg")
# The same figure is the same file.
matplotlib.rcParams.update({"svg.hashsalt": "weince", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402


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
    """Mean squared error of the log-odds by the number of observed contests."""
    found = noise_floor(replicates=4000)
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    axes.loglog(found.sizes, found.shortfall_error, "o-", label="right link (shortfall): falls for ever")
    axes.loglog(found.sizes, found.softmax_error, "s--", label="wrong link (softmax): stops at a floor")
    axes.axhline(found.softmax.bias**2, color="grey", linewidth=0.8)
    axes.set_xlabel("observed contests")
    axes.set_ylabel("mean squared error of the log-odds")
    axes.legend(frameon=False)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    for name, draw in (("links", links), ("noise-floor", floor)):
        figure = draw()
        figure.tight_layout()
        write_aside(
            ASSETS / f"{name}.svg",
            lambda path, figure=figure: figure.savefig(path, format="svg", metadata={"Date": None}),
        )
        print(f"docs/assets/{name}.svg")


if __name__ == "__main__":
    main()
