"""How many different images an encoder maps onto the same point, and what that costs under each loss.

Reads pairs (z_i, z_j) of several encoders, one or more for each loss. Two images are linked if their first views lie
within a shortfall of 0.01; a group is a connected set of linked images that holds at least 1 % of all images. Losses
are computed on all embeddings, in random batches as in training. Writes NAME.md, NAME.csv and NAME.svg.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from weince import BlendLink, ContrastiveLoss, InfoNCELoss, LinkLoss, WeinceLoss
from weince.lab.training.log import read_log
from weince.scores import shortfalls

EXAMPLE = """\
example:
  python research/collapse.py InfoNCE=infonce_7.npz,infonce_21.npz paper=paper.npz \\
      --results research/results/evidence/collapse \\
      --trend InfoNCE=infonce_20.npz,infonce_40.npz paper=paper_20.npz,paper_40.npz \\
      --logs InfoNCE=runs/infonce/log.csv paper=runs/paper/log.csv
"""
NEAR, LEAST = 0.01, 0.01
LOSSES: dict[str, ContrastiveLoss] = {
    "InfoNCE, 0.5": InfoNCELoss(0.5, reduction="none"),
    "paper, 0.5": WeinceLoss.paper(0.5, reduction="none"),
    # The weights that the paper's loss finds on its own encoder, fixed, so that all encoders have one loss.
    "blend, λ = 0.19, β = 3.05": LinkLoss(BlendLink(lam=0.19, beta=3.05, temperature=0.5), reduction="none"),
}


class Weighted(NamedTuple):
    """What Algorithm 1 computes for some of an encoder's anchors: their share, their mean ``lam``, and the medians of
    ``beta`` and of ``rho``, the shortfall of the hardest negative."""

    share: float
    lam: float
    beta: float
    rho: float


class Encoder(NamedTuple):
    """Measurements of one encoder.

    Attributes:
        name: What it was trained with.
        file: Name of the file of its pairs.
        groups: Number of groups.
        grouped: Share of images in groups.
        largest: Share of images in the largest group.
        crowded: Share of images with at least `LEAST` of all images within a shortfall of `NEAR`, as in `trap.py`.
        first: Share of anchors whose positive has the highest score in their batch.
        losses: Mean of each of `LOSSES`.
        inside: The same for anchors of images in groups; NaN if there are none.
        norms: Median norm of the embeddings before they are normalised, outside groups and inside.
        high, low: Anchors whose ``lam`` is above one half, and the others.
        nearest: For every image, the shortfall of the nearest other one.
    """

    name: str
    file: str
    groups: int
    grouped: float
    largest: float
    crowded: float
    first: float
    losses: list[float]
    inside: list[float]
    norms: tuple[float, float]
    high: Weighted
    low: Weighted
    nearest: np.ndarray

    @property
    def touching(self) -> float:
        """Share of images with another one within a shortfall of 1e-4."""
        return float((self.nearest < 1e-4).mean())


def look(name: str, path: Path, batch: int) -> Encoder:
    """Measure the pairs of a file."""
    z_i, z_j = read(path)
    length = z_i.norm(dim=1)
    z_i, z_j = F.normalize(z_i), F.normalize(z_j)
    distance = shortfalls(z_i, z_i).fill_diagonal_(torch.inf)
    size = group_sizes(distance)
    grouped = size >= LEAST * len(size)
    found = [in_batches(loss, z_i, z_j, batch) for loss in LOSSES.values()]
    inside = grouped[: len(z_i) // batch * batch].repeat(2)
    return Encoder(
        name,
        path.stem,
        round(float((1 / size[grouped]).sum())),  # each member of a group of n counts 1 / n
        float(grouped.double().mean()),
        float(size.max() / len(size)),
        float(((distance <= NEAR).sum(1) >= LEAST * len(size)).double().mean()),
        positive_first(z_i, z_j, batch),
        [float(values.mean()) for values in found],
        [float(values[inside].mean()) for values in found],
        (float(length[~grouped].nanmedian()), float(length[grouped].nanmedian())),
        *weights(z_i, z_j, batch),
        distance.amin(1).numpy(),
    )


def read(path: Path) -> tuple[Tensor, Tensor]:
    """The pairs of a file in random order, since test sets may be sorted by class."""
    with np.load(path, allow_pickle=False) as file:
        order = np.random.default_rng(0).permutation(len(file["z_i"]))
        z_i, z_j = (torch.from_numpy(file[name][order]).double() for name in ("z_i", "z_j"))
    return z_i, z_j


def group_sizes(distance: Tensor) -> Tensor:
    """For every image, the number of images connected with it, itself included."""
    _, group = connected_components(csr_matrix((distance < NEAR).numpy()), directed=False)
    return torch.from_numpy(np.bincount(group)[group])


def batches(z_i: Tensor, z_j: Tensor, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Full batches; pairs that do not fill a batch are left out, as in training."""
    full = len(z_i) // batch * batch
    return list(zip(z_i[:full].split(batch), z_j[:full].split(batch), strict=True))


def in_batches(loss: ContrastiveLoss, z_i: Tensor, z_j: Tensor, batch: int) -> Tensor:
    """The loss of each anchor: all first views, then all second ones."""
    values = [loss(*pair).unflatten(0, (2, batch)) for pair in batches(z_i, z_j, batch)]
    return torch.cat(values, 1).flatten()


def weights(z_i: Tensor, z_j: Tensor, batch: int) -> tuple[Weighted, Weighted]:
    """What Algorithm 1 computes for these embeddings: for anchors with ``lam`` above one half, and for the others."""
    found = [WeinceLoss(0.5)(*pair, return_stats=True).stats for pair in batches(z_i, z_j, batch)]
    lam, beta, rho = (torch.cat([getattr(stats, name) for stats in found]) for name in ("lam", "beta", "rho"))
    high = lam > 0.5
    above, below = (
        Weighted(
            *(
                float(value)
                for value in (part.double().mean(), lam[part].mean(), beta[part].median(), rho[part].median())
            )
        )
        for part in (high, ~high)
    )
    return above, below


def positive_first(z_i: Tensor, z_j: Tensor, batch: int) -> float:
    hits = [(a @ b.T).argmax(1) == torch.arange(batch) for a, b in batches(z_i, z_j, batch)]
    return float(torch.cat(hits).double().mean())


def grouped_along(paths: Sequence[Path]) -> list[tuple[int, float]]:
    """For each file, the epoch (the number at the end of its name) and the share of images in groups."""
    found = []
    for path in paths:
        z_i = F.normalize(read(path)[0])
        size = group_sizes(shortfalls(z_i, z_i).fill_diagonal_(torch.inf))
        found.append((int(path.stem.split("_")[-1]), float((size >= LEAST * len(size)).double().mean())))
    return found


def markdown(
    rows: Sequence[Encoder], trends: dict[str, list[tuple[int, float]]], source: str, figure: str
) -> str:
    lines = [
        "# Images on the same point",
        "",
        f"Of {source}. In groups: first views within a shortfall of {NEAR} of each other, and what hangs together by "
        f"that, from {LEAST:.0%} of the images on. Length: median before the embeddings are normalised, outside of "
        "groups and inside. Crowded: those with as many others around them, directly. Positive first: of an anchor's "
        "candidates, one view of each of 256 images. The last columns are mean losses of these embeddings in random "
        "batches as in training, by three losses (and, in brackets, of the images in groups alone).",
        "",
        "| trained with | pairs | in groups | groups | largest | crowded | another within 1e-4 | length | positive "
        f"first | {' | '.join(LOSSES)} |",
        f"|---|---|{'---:|' * (7 + len(LOSSES))}",
    ]
    for one in rows:
        outside, inside = one.norms
        length = f"{outside:.1f}" + ("" if np.isnan(inside) else f", {inside:.1f}")
        values = [
            f"{mean:.2f}" + ("" if np.isnan(part) else f" ({part:.2f})")
            for mean, part in zip(one.losses, one.inside, strict=True)
        ]
        lines.append(
            f"| {one.name} | {one.file} | {one.grouped:.1%} | {one.groups} | {one.largest:.1%} | "
            f"{one.crowded:.1%} | {one.touching:.1%} | {length} | {one.first:.1%} | {' | '.join(values)} |"
        )
    for name, points in trends.items():
        said = ", ".join(f"{share:.1%} at {epoch}" for epoch, share in points)
        lines += ["", f"Along the way, by epoch, {name}: {said}."]
    lines += ["", f"![training loss, groups over epochs, nearest other image]({figure})", ""]
    lines += ["## The weights that Algorithm 1 gives to these embeddings", ""]
    lines += [
        "Of the anchors with `lam` above 1/2, and of the others: mean `lam`, median `beta` and `rho`.",
        "",
    ]
    lines += [
        "| trained with | pairs | above 1/2 | lam | beta | rho | others: lam | beta | rho |",
        f"|---|---|{'---:|' * 7}",
    ]
    for one in rows:
        values = [f"{value:.2g}" for part in (one.high, one.low) for value in part[1:]]
        lines.append(f"| {one.name} | {one.file} | {one.high.share:.1%} | {' | '.join(values)} |")
    lines += [""]
    lines += [
        "Made by `python research/collapse.py NAME=PAIRS,PAIRS --trend NAME=PAIRS,PAIRS --logs NAME=LOG,LOG`."
    ]
    return "\n".join(lines) + "\n"


def cells(one: Encoder) -> dict[str, str]:
    """Everything but the distances, by column."""
    found: dict[str, float] = {
        "in groups": one.grouped,
        "groups": one.groups,
        "largest": one.largest,
        "crowded": one.crowded,
        "another within 1e-4": one.touching,
        "length": one.norms[0],
        "length in groups": one.norms[1],
        "positive first": one.first,
    }
    for name, mean, part in zip(LOSSES, one.losses, one.inside, strict=True):
        found |= {name: mean, f"{name}, in groups": part}
    for side, anchors in (("high", one.high), ("low", one.low)):
        found |= {f"{key}, {side} lam": value for key, value in anchors._asdict().items()}
    return {"trained with": one.name, "pairs": one.file} | {
        key: "" if np.isnan(value) else f"{value:.6g}" for key, value in found.items()
    }


def draw(
    rows: Sequence[Encoder],
    trends: dict[str, list[tuple[int, float]]],
    logs: dict[str, list[Path]],
    path: Path,
) -> None:
    """Training loss and share of images in groups over epochs, and how near the nearest other image is."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "weince"
    figure, (loss, groups, nearest) = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
    names = list(dict.fromkeys(one.name for one in rows))
    looks = {name: {"color": f"C{i % 10}", "ls": "--" if i >= 10 else "-"} for i, name in enumerate(names)}
    for name, paths in logs.items():
        for one_log in map(read_log, paths):
            lowest = min(one_log, key=lambda row: row["loss"])
            loss.plot(
                [row["epoch"] for row in one_log], [row["loss"] for row in one_log], **looks.get(name, {})
            )
            loss.plot(lowest["epoch"], lowest["loss"], marker="o", **looks.get(name, {}))
    loss.set(xlabel="epoch", ylabel="training loss (dot: lowest)")
    for name, points in trends.items():
        groups.plot(*zip(*points, strict=True), marker="o", **looks.get(name, {}))
    groups.set(xlabel="epoch", ylabel="share of images in groups", ylim=(0, None))
    for one in rows:
        ordered = np.sort(np.maximum(one.nearest, 1e-7))
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        (line,) = nearest.plot(ordered, share, **looks[one.name])
        if one.name in names:  # only the first encoder of each loss is in the legend
            names.remove(one.name)
            line.set_label(one.name)
    nearest.axvline(NEAR, color="0.6", lw=0.8, ls=":")
    nearest.set(
        xscale="log", xlabel="shortfall of the nearest other image", ylabel="share of images", ylim=(0, 1)
    )
    figure.legend(
        *nearest.get_legend_handles_labels(),
        frameon=False,
        ncols=5,
        loc="outside lower center",
        fontsize="small",
    )
    for axes in (loss, groups, nearest):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def named(text: str) -> tuple[str, list[Path]]:
    """Parse ``NAME=PATH,PATH``."""
    name, equals, paths = text.partition("=")
    found = [Path(path) for path in paths.split(",")]
    if not equals:
        raise argparse.ArgumentTypeError(f"wanted NAME=FILE, got {text!r}")
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise argparse.ArgumentTypeError(f"not there: {', '.join(missing)}")
    return name, found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pairs", type=named, nargs="+", metavar="NAME=PAIRS,...", help="z_i and z_j in .npz files"
    )
    parser.add_argument(
        "--trend", type=named, nargs="+", default=[], help="the same along a run, epoch last in the name"
    )
    parser.add_argument(
        "--logs", type=named, nargs="+", default=[], help="log.csv of runs, for their training loss"
    )
    parser.add_argument("--batch", type=int, default=256, help="pairs of a batch (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("collapse"), help="name of what is written")
    parser.add_argument("--source", default="the pairs", help="what the embeddings are, in words")
    options = parser.parse_args(arguments)
    rows = [look(name, path, options.batch) for name, paths in options.pairs for path in paths]
    trends = {name: grouped_along(paths) for name, paths in options.trend}

    figure = options.results.with_suffix(".svg")
    text = markdown(rows, trends, options.source, figure.name)
    options.results.with_suffix(".md").write_text(text, encoding="utf-8")
    with options.results.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        table = [cells(one) for one in rows]
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    draw(rows, trends, dict(options.logs), figure)
    print(text)


if __name__ == "__main__":
    main()
