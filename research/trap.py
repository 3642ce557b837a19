"""What makes embeddings crowd under Algorithm 1: its gate, its fitted slope, or the positive's pull?

A small head is trained on the embeddings of a finished encoder (z_i and z_j of an .npz file), with one change to the
loss at a time. It is trained on three quarters of the pairs, with noise on both sides in place of new views, and
evaluated on the others. An item is crowded if at least 1 % of these lie within a shortfall of 0.01 of it.
Writes NAME.md, NAME.csv and NAME.svg. About 6 minutes on a CPU for each seed.
"""

import argparse
import csv
import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from weince import BlendLink, ContrastiveLoss, InfoNCELoss, LinkLoss, TailConfig, WeinceLoss
from weince.intervals import t_interval
from weince.lab.configure import LossConfig, build_loss
from weince.progress import bars
from weince.scores import CROWD, shortfalls, unit_rows

EXAMPLE = """\
example:
  python research/trap.py pairs.npz --seeds 0 1 2 3 --jobs 2 --results research/results/evidence/trap
"""
BATCH, RATE, NOISE, SHARE = 256, 1e-3, 0.3, 0.01
LOSSES: dict[str, Callable[[], ContrastiveLoss]] = {
    "InfoNCE": partial(InfoNCELoss, 0.5),
    "paper": partial(WeinceLoss.paper, 0.5),
    "paper, gate at the 0.05 quantile": partial(WeinceLoss.paper, 0.5, tail=TailConfig(rho0_quantile=0.05)),
    "paper, gate at the 0.1 quantile": partial(WeinceLoss.paper, 0.5, tail=TailConfig(rho0_quantile=0.1)),
    "paper, gate at the 0.4 quantile": partial(WeinceLoss.paper, 0.5, tail=TailConfig(rho0_quantile=0.4)),
    "paper, rho gate alone": partial(WeinceLoss.paper, 0.5, tail=TailConfig(gate="rho")),
    "paper, AIC gate alone": partial(WeinceLoss.paper, 0.5, tail=TailConfig(gate="aic")),
    # With a steepness near 0, the rho gate is half open for every anchor.
    "paper, lam = 0.5 for all": partial(WeinceLoss.paper, 0.5, tail=TailConfig(kappa_rho=1e-3)),
    "paper, gate at a shortfall of 0.02": partial(WeinceLoss.paper, 0.5, tail=TailConfig(rho0=0.02)),
    "paper, gate at a shortfall of 0.05": partial(WeinceLoss.paper, 0.5, tail=TailConfig(rho0=0.05)),
    "paper, gate at a shortfall of 0.1": partial(WeinceLoss.paper, 0.5, tail=TailConfig(rho0=0.1)),
    "paper, beta = 3 instead of fitted": partial(WeinceLoss.paper, 0.5, tail=TailConfig(beta=3.0)),
    "paper, beta = 1 instead of fitted": partial(WeinceLoss.paper, 0.5, tail=TailConfig(beta=1.0)),
    "paper, slope matched to the softmax": partial(WeinceLoss.paper, 0.5, tail=TailConfig(beta="slope")),
    "lam = 0.2 and beta = 3 for all": partial(LinkLoss, BlendLink(lam=0.2, beta=3.0, temperature=0.5)),
    "paper, endpoint 1.2": partial(WeinceLoss.paper, 0.5, tail=TailConfig(endpoint=1.2)),
    "paper, negatives only": partial(WeinceLoss.paper, 0.5, tail=TailConfig(positive="softmax")),
    "released": partial(WeinceLoss.released, 0.5),
    "released without its terms": partial(build_loss, LossConfig("blend", 0.5)),
    "InfoNCE + both terms of released": partial(WeinceLoss, 0.5, tail=None),
    "InfoNCE, temperature 0.2": partial(InfoNCELoss, 0.2),
    "paper, temperature 0.2": partial(WeinceLoss.paper, 0.2),
}


class Made(NamedTuple):
    """What all heads of a table share: number of steps, and a hash of the file of pairs."""

    steps: int
    pairs: str


class Outcome(NamedTuple):
    """Result of one training.

    Attributes:
        crowded: Share of held-out items that are crowded.
        first: Share of held-out anchors whose positive has the highest score among one view of each of 256 items.
        rise: Mean training loss over the last tenth of the steps, minus that over the lowest tenth.
        slope: Median fitted ``beta`` of the fifth of held-out anchors with the hardest negatives.
    """

    crowded: float
    first: float
    rise: float
    slope: float


def train(name: str, seed: int, path: Path, steps: int) -> Outcome:
    """Train a head with one loss, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    z_i, z_j = read(path)
    order = torch.randperm(len(z_i))
    kept, held = order[: len(order) * 3 // 4], order[len(order) * 3 // 4 :]
    net, loss = head(z_i.shape[1]), LOSSES[name]()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    losses = []
    for _ in range(steps):
        rows = kept[torch.randint(len(kept), (BATCH,))]
        views = torch.cat([z_i[rows], z_j[rows]])
        value = loss(*net(views + NOISE * torch.randn_like(views)).split(BATCH))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    tenths = np.array(losses[: steps // 10 * 10]).reshape(10, -1).mean(1)
    with torch.no_grad():
        net.eval()
        return look(net(z_i[held]), net(z_j[held]), float(tenths[-1] - tenths.min()))


def known(path: Path, made: Made) -> dict[tuple[str, int], Outcome]:
    """Heads of an earlier run, by loss and seed; exits if their steps or pairs were different."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        there = Made(int(row.get("steps") or 0), row.get("pairs") or "")
        if there != made:
            raise SystemExit(f"{path} has heads of {there}, wanted {made}")
    return {
        (row["loss"], int(row["seed"])): Outcome(*(float(row[name]) for name in Outcome._fields))
        for row in rows
    }


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Both sides of the pairs, standardised: each feature has mean 0 and variance 1 over both sides."""
    with np.load(path, allow_pickle=False) as file:
        both = torch.from_numpy(np.concatenate([file["z_i"], file["z_j"]])).float()
    both = (both - both.mean(0)) / both.std(0)
    return both[: len(both) // 2], both[len(both) // 2 :]


def head(width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (width, 512):
        layers += [nn.Linear(size, 512), nn.BatchNorm1d(512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, width))


def look(z_i: Tensor, z_j: Tensor, rise: float) -> Outcome:
    """Measure held-out pairs."""
    unit_i, unit_j = unit_rows(z_i), unit_rows(z_j)
    near = shortfalls(unit_i, unit_i) <= CROWD
    crowded = near.fill_diagonal_(False).sum(1) >= SHARE * len(near)
    full = len(z_i) // BATCH * BATCH
    hits, stats = [], []
    for a, b in zip(unit_i[:full].split(BATCH), unit_j[:full].split(BATCH), strict=True):
        hits.append((a @ b.T).argmax(1) == torch.arange(BATCH))
        stats.append(WeinceLoss(0.5)(a, b, return_stats=True).stats)
    rho, beta = (torch.cat([getattr(part, name) for part in stats]) for name in ("rho", "beta"))
    hardest = rho <= rho.quantile(0.2)
    first = torch.cat(hits).float().mean()
    return Outcome(float(crowded.float().mean()), float(first), rise, float(beta[hardest].median()))


def spread(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """Mean ± half of its 95 % t-interval."""
    return t_interval(scale * value for value in values).text(digits)


def markdown(found: dict[str, list[Outcome]], steps: int, source: str, figure: str) -> str:
    seeds = len(next(iter(found.values())))
    lines = [
        "# What makes embeddings crowd?",
        "",
        f"A head (two hidden layers of 512, batch norm) trained for {steps:,} steps on {source}; seeds: {seeds}, "
        f"mean ± half of a 95 % t-interval. Adam {RATE:g}, {BATCH} pairs, noise of {NOISE:g} on standardised "
        "features, temperature 0.5. Crowded: held-out items with 1 % of the others or more within a shortfall of "
        "0.01. Slope: median fitted `beta` of the fifth of held-out anchors with the hardest negatives. Loss rises: "
        "mean of the last tenth of the steps less the lowest tenth. Positive first: held out, of one view of each of "
        "256 items.",
        "",
        "| loss | crowded, % | slope there | loss rises | positive first, % |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, runs in found.items():
        crowded, first, rise, slope = (list(values) for values in zip(*runs, strict=True))
        cells = (spread(crowded, 1, 100), spread(slope, 2), spread(rise, 3), spread(first, 1, 100))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"![crowded items by loss]({figure})", "", "Made by `python research/trap.py PAIRS`."]
    return "\n".join(lines) + "\n"


def draw(found: dict[str, list[Outcome]], path: Path) -> None:
    """Crowded items by loss: a dot for each seed, a bar for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "weince"
    figure, axes = plt.subplots(figsize=(7.5, 0.32 * len(found) + 0.6), layout="constrained")
    for name, runs in found.items():
        shares = [100 * run.crowded for run in runs]
        axes.barh(name, np.mean(shares), color="C0", alpha=0.35, height=0.7)
        axes.plot(shares, [name] * len(shares), "o", color="C0", ms=4)
    axes.invert_yaxis()
    axes.set_xlabel("crowded held-out items, %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", type=Path, help="z_i and z_j, (pairs, d) each, in an .npz file")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(4), help="(default: 0 to 3)")
    parser.add_argument("--steps", type=int, default=1500, help="of each training (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once (default: %(default)s)")
    parser.add_argument(
        "--known",
        type=Path,
        help="CSV of a run with the same pairs and steps; its heads are not trained again",
    )
    parser.add_argument("--results", type=Path, default=Path("trap"), help="name of what is written")
    parser.add_argument("--source", default="the pairs", help="what the embeddings are, in words")
    options = parser.parse_args(arguments)
    read(options.pairs)  # an unusable file fails here once, not in every process
    made = Made(options.steps, hashlib.sha256(options.pairs.read_bytes()).hexdigest()[:12])
    done = {} if options.known is None else known(options.known, made)
    wanted = [(name, seed) for seed in options.seeds for name in LOSSES]
    missing = [head for head in wanted if head not in done]
    names, seeds = [name for name, _ in missing], [seed for _, seed in missing]
    with ExitStack() as stack:
        carry_out: Callable[..., Iterable[Outcome]] = map
        if options.jobs > 1:
            pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
            carry_out = stack.enter_context(pool).map
        bar = stack.enter_context(bars())
        task = bar.add_task("heads", total=len(missing))
        outcomes = carry_out(train, names, seeds, repeat(options.pairs), repeat(options.steps))
        for head, outcome in zip(missing, outcomes, strict=True):
            done[head] = outcome
            bar.advance(task)
    found = {name: [done[name, seed] for seed in options.seeds] for name in LOSSES}

    figure = options.results.with_suffix(".svg")
    draw(found, figure)
    text = markdown(found, options.steps, options.source, figure.name)
    options.results.with_suffix(".md").write_text(text, encoding="utf-8")
    with options.results.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["loss", "seed", *Made._fields, *Outcome._fields])
        for name, runs in found.items():
            of_seeds = zip(options.seeds, runs, strict=True)
            writer.writerows([name, seed, *made, *(f"{v:.6g}" for v in run)] for seed, run in of_seeds)
    print(text)


if __name__ == "__main__":
    main()
