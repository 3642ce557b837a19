"""Which pairs a loss pulls together, how hard it pulls, and how hard it pushes the others away.

Reads the embeddings of pairs (z_i, z_j) and computes the forces of each loss on an anchor along the sphere: the
derivative of the anchor's loss by each of its scores, times the sine of the angle. (Embeddings are normalised, so
only the part of the gradient along the sphere has an effect.) Writes NAME.md, NAME.csv and NAME.svg.
"""

import argparse
import csv
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weince import ContrastiveLoss, InfoNCELoss, LogSumExp, TailConfig, WeinceLoss
from weince.engines import dense
from weince.layouts import problems
from weince.losses.weince import RELEASED_TAIL
from weince.sums import Batch, Need

EXAMPLE = """\
example:
  python research/pull_and_push.py pairs.npz --results research/results/evidence/pull_and_push
"""
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 2.0)
LOSSES: dict[str, ContrastiveLoss] = {
    "InfoNCE, 0.5": InfoNCELoss(0.5),
    "InfoNCE, 0.1": InfoNCELoss(0.1),
    "paper": WeinceLoss.paper(0.5),
    "blend, beta 1": WeinceLoss.paper(0.5, tail=RELEASED_TAIL),
    "paper, endpoint 1.2": WeinceLoss.paper(0.5, tail=TailConfig(endpoint=1.2)),
    "blend, slope matched": WeinceLoss.paper(0.5, tail=TailConfig(beta="slope", drop=0.05, soft_cap=False)),
    "paper, negatives only": WeinceLoss.paper(0.5, tail=TailConfig(positive="softmax")),
}


class Forces(NamedTuple):
    """For every anchor: shortfall of its positive, force towards it, and sum of the forces away from negatives."""

    shortfall: Tensor
    pull: Tensor
    push: Tensor


def forces(loss: ContrastiveLoss, z_i: Tensor, z_j: Tensor) -> Forces:
    """The forces of a loss on the anchors of a batch; both views are ``(n, d)``."""
    unit = F.normalize(torch.cat([z_i, z_j]))
    own = torch.eye(len(unit), dtype=torch.bool)
    positive = torch.arange(len(unit)).roll(len(z_i)).unsqueeze(1)
    shortfall = (1 - unit @ unit.T).clamp(0, 2)
    asked = settled(loss, z_i, z_j)
    logits = asked.link.logit(shortfall).masked_fill(own, -torch.inf)
    slopes = asked.link.slope(shortfall)
    if asked.positive is not asked.link:
        at_positive = asked.positive.logit(shortfall), asked.positive.slope(shortfall)
        logits = logits.scatter(1, positive, at_positive[0].gather(1, positive))
        slopes = slopes.scatter(1, positive, at_positive[1].gather(1, positive))
    value = (logits.logsumexp(1) - logits.gather(1, positive).squeeze(1)).mean()
    torch.testing.assert_close(value, loss(z_i, z_j), rtol=1e-9, atol=1e-9)

    # Size of the derivative by a score: (1 - weight) * slope for the positive, weight * slope for negatives.
    weight = logits.softmax(1)
    weight = weight.scatter(1, positive, 1 - weight.gather(1, positive))
    size = weight * slopes * (shortfall * (2 - shortfall)).sqrt()
    pull = size.gather(1, positive).squeeze(1)
    return Forces(shortfall.gather(1, positive).squeeze(1), pull, size.sum(1) - pull)


def settled(loss: ContrastiveLoss, z_i: Tensor, z_j: Tensor) -> LogSumExp:
    """The first sum that a loss requests; its links hold the weights of this batch's anchors."""
    (problem,) = problems("views", z_i, z_j)
    asked = loss.sums(Batch(problem, dense.ENGINE, Need(loss.tail)))
    first = asked[0] if isinstance(asked, Sequence) else asked
    assert isinstance(first, LogSumExp)
    return first


class Row(NamedTuple):
    """Means over anchors, and the share of all pull that goes to each range of the positive's shortfall."""

    name: str
    pull: float
    push: float
    shares: list[float]


def row(name: str, batches: Sequence[tuple[Tensor, Tensor]]) -> Row:
    """The row of a loss, over all batches."""
    found = Forces(*map(torch.cat, zip(*(forces(LOSSES[name], *batch) for batch in batches), strict=True)))
    shares = [float(found.pull[part].sum() / found.pull.sum()) for part in ranges(found.shortfall)]
    return Row(name, float(found.pull.mean()), float(found.push.mean()), shares)


def ranges(shortfall: Tensor) -> list[Tensor]:
    return [(shortfall >= low) & (shortfall < high) for low, high in pairwise(EDGES)]


def labels() -> list[str]:
    return [f"{low:g} to {high:g}" for low, high in pairwise(EDGES)]


def markdown(rows: Sequence[Row], pairs: list[float], source: str, figure: str) -> str:
    lines = [
        "# Pull and push",
        "",
        f"Of {source}, in random batches as in training. Pull: mean force of a loss on an anchor towards its "
        "positive, along the sphere; push: the sum of its forces away from all others. The last columns share out "
        "all pull among pairs by their shortfall `1 - s`: the first line says how many pairs there are of each kind.",
        "",
        f"| loss, temperature | pull | push | pull / push | {' | '.join(labels())} |",
        f"|---|{'---:|' * (3 + len(pairs))}",
        f"| pairs | | | | {' | '.join(f'{share:.0%}' for share in pairs)} |",
    ]
    for one in rows:
        shares = " | ".join(f"{share:.0%}" for share in one.shares)
        lines.append(
            f"| {one.name} | {one.pull:.2f} | {one.push:.2f} | {one.pull / one.push:.2f} | {shares} |"
        )
    lines += [
        "",
        f"![pull by shortfall]({figure})",
        "",
        "Made by `python research/pull_and_push.py PAIRS`.",
    ]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], pairs: list[float], path: Path) -> None:
    """A stacked bar for each loss: how its pull is shared out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "weince"
    figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    names = ["pairs", *(one.name for one in rows)]
    table = np.array([pairs, *(one.shares for one in rows)])
    left = np.zeros(len(names))
    for place, label in enumerate(labels()):
        colour = plt.cm.viridis(place / (len(pairs) - 1))
        axes.barh(names, table[:, place], left=left, color=colour, label=label, height=0.7)
        left += table[:, place]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of all pull, by shortfall of the pair")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="1 - s", bbox_to_anchor=(1, 1), loc="upper left", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", type=Path, help="z_i and z_j, (pairs, d) each, in an .npz file")
    parser.add_argument("--batch", type=int, default=256, help="pairs of a batch (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("pull_and_push"), help="name of what is written")
    parser.add_argument("--source", default="the pairs", help="what the embeddings are, in words")
    options = parser.parse_args(arguments)
    with np.load(options.pairs, allow_pickle=False) as file:
        order = np.random.default_rng(0).permutation(len(file["z_i"]))  # test sets may be sorted by class
        z_i, z_j = (torch.from_numpy(file[name][order]).double() for name in ("z_i", "z_j"))
    full = len(z_i) // options.batch * options.batch
    if not full:
        parser.error(f"{options.pairs} holds {len(z_i)} pairs, fewer than a batch of {options.batch}")
    batches = list(zip(z_i[:full].split(options.batch), z_j[:full].split(options.batch), strict=True))
    shortfall = 1 - F.cosine_similarity(z_i[:full], z_j[:full])
    pairs = [float(part.double().mean()) for part in ranges(shortfall)]
    rows = [row(name, batches) for name in LOSSES]

    figure = options.results.with_suffix(".svg")
    text = markdown(rows, pairs, options.source, figure.name)
    options.results.with_suffix(".md").write_text(text, encoding="utf-8")
    with options.results.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["loss", "pull", "push", *labels()])
        writer.writerow(["pairs", "", "", *(f"{share:.6g}" for share in pairs)])
        writer.writerows(
            [one.name, *(f"{value:.6g}" for value in (one.pull, one.push, *one.shares))] for one in rows
        )
    draw(rows, pairs, figure)
    print(text)


if __name__ == "__main__":
    main()
