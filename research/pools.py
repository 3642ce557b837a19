"""Do hard negatives and large pools change the fitted link, or does selecting by score do that by itself?

The paper keeps more and more of an anchor's hardest negatives, or a fixed number of hard ones from larger and larger
pools, and fits the weight and the gain of the shortfall to each. This script does the same three times on the same
scores: with the real positives, and with positives drawn from the softmax and from the blend that were fitted to all
candidates. Drawn positives follow one law for all candidates, so any change in their fits comes from the selection.
Reads pairs (z_i, z_j) of encoders that differ only by their seed. Writes NAME.md, NAME.csv and NAME.svg.
"""

import argparse
import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weince import evt
from weince.evt import LinkBank
from weince.intervals import t_interval
from weince.lab.paper.ablations import AblationPoint, hard_negative_ablation, pool_ablation
from weince.lab.paper.draws import draw_positives
from weince.progress import bars

EXAMPLE = """\
example:
  python research/pools.py seed_7.npz seed_21.npz --results research/results/evidence/pools
"""
# An anchor has 510 negatives in a batch of 256 pairs: the last of KEPT is all of them.
KEPT, POOLS, HARD = (8, 16, 32, 64, 128, 256, 510), (64, 128, 256), 64
LAWS = {"measured": "C0", "drawn from the fitted softmax": "0.5", "drawn from the fitted blend": "C1"}


class Point(NamedTuple):
    """The link fitted to one selection of negatives, for one law and one encoder."""

    law: str
    encoder: int
    kept: int
    pool: int
    lam: float
    gain: float


def banks(path: Path, encoder: int) -> Iterator[tuple[str, LinkBank]]:
    """An encoder's scores, with positives from each law."""
    with np.load(path, allow_pickle=False) as file:
        bank = evt.link_bank(file["z_i"], file["z_j"])
    fit = evt.fit_link(*bank)
    if not np.isfinite([fit.lam, fit.tau, fit.tau0]).all():
        raise SystemExit(f"no link fits {path}: {' '.join(fit.notes) or 'the positives are all on top'}")
    measured, softmax, blend = LAWS
    yield measured, bank
    for law, lam, tau in ((softmax, 0.0, fit.tau0), (blend, fit.lam, fit.tau)):
        yield law, bank._replace(positives=draw_positives(bank.scores, lam, tau, rng=encoder))


def ablate(law: str, encoder: int, bank: LinkBank) -> Iterator[Point]:
    def read(points: Iterable[AblationPoint]) -> Iterator[Point]:
        return (Point(law, encoder, p.kept, p.pool, p.lam, p.gain.gain) for p in points)

    yield from read(hard_negative_ablation(*bank, kept=KEPT, bootstraps=2))
    yield from read(pool_ablation(*bank, pools=POOLS, kept=HARD, bootstraps=2))


def spread(values: Sequence[float]) -> str:
    """Mean ± half of its 95 % t-interval; a dash where a link could not be fitted."""
    if not np.isfinite(values).all():
        return "—"
    return t_interval(values).text(3)


def at(points: Sequence[Point], law: str, kept: int, pool: int) -> list[Point]:
    """The points of one law and one selection, one for each encoder."""
    return [point for point in points if (point.law, point.kept, point.pool) == (law, kept, pool)]


def table(points: Sequence[Point], sizes: Sequence[tuple[int, int]]) -> list[str]:
    lines = [
        "| kept | of | " + " | ".join(f"{law}: λ | gain" for law in LAWS) + " |",
        f"|---:|---:|{'---:|' * (2 * len(LAWS))}",
    ]
    for size in sizes:
        found = [at(points, law, *size) for law in LAWS]
        cells = [spread([getattr(p, name) for p in one]) for one in found for name in ("lam", "gain")]
        lines.append(f"| {size[0]} | {size[1]} | {' | '.join(cells)} |")
    return lines


def markdown(points: Sequence[Point], source: str, figure: str) -> str:
    encoders, whole = 1 + max(point.encoder for point in points), KEPT[-1]
    lines = [
        "# Hard negatives and pools",
        "",
        f"Of {source}; encoders: {encoders}, mean ± half of a 95 % t-interval over them. Banks of up to 32 batches "
        "of 256 pairs, half to fit and half for the gain of the blended link over softmax, in nats per anchor. "
        "Drawn: positives from the softmax, or the blend, that fits the bank with all candidates.",
        "",
        "The hardest negatives of all:",
        "",
        *table(points, [(kept, whole) for kept in KEPT]),
        "",
        f"The {HARD} hardest of random pools:",
        "",
        *table(points, [(HARD, pool) for pool in (*POOLS, whole)]),
        "",
        f"![weight and gain by negatives kept and by pool]({figure})",
        "",
        "Made by `python research/pools.py PAIRS ...`.",
    ]
    return "\n".join(lines) + "\n"


def draw(points: Sequence[Point], path: Path) -> None:
    """λ and gain, by negatives kept and by pool: a line for each law and encoder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "weince"
    figure, panels = plt.subplots(2, 2, figsize=(8, 5), layout="constrained", sharey="row")
    whole = KEPT[-1]
    for column, (axis, title) in enumerate(
        [("kept", f"hardest kept of {whole}"), ("pool", f"pool of which the {HARD} hardest are kept")]
    ):
        fixed, value = ("pool", whole) if axis == "kept" else ("kept", HARD)
        for row, figure_name in enumerate(("lam", "gain")):
            axes = panels[row, column]
            for law, encoder in sorted({(point.law, point.encoder) for point in points}):
                mine = [p for p in points if (p.law, p.encoder, getattr(p, fixed)) == (law, encoder, value)]
                x, y = np.array(sorted((getattr(p, axis), getattr(p, figure_name)) for p in mine)).T
                axes.plot(x, y, "o-", ms=3, lw=1, color=LAWS[law], label=law if encoder == 0 else None)
            axes.set_xscale("log", base=2)
            axes.spines[["top", "right"]].set_visible(False)
        panels[1, column].set_xlabel(title)
    panels[0, 0].set_ylabel("λ")
    panels[1, 0].set_ylabel("gain, nats per anchor")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), frameon=False, ncols=3, loc="outside lower center"
    )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", type=Path, nargs="+", help="z_i and z_j, (pairs, d) each, in .npz files")
    parser.add_argument("--results", type=Path, default=Path("pools"), help="name of what is written")
    parser.add_argument("--source", default="the pairs", help="what the embeddings are, in words")
    options = parser.parse_args(arguments)
    points: list[Point] = []
    with bars() as bar:
        task = bar.add_task("banks", total=len(LAWS) * len(options.pairs))
        for encoder, path in enumerate(options.pairs):
            for law, bank in banks(path, encoder):
                points += ablate(law, encoder, bank)
                bar.advance(task)

    figure = options.results.with_suffix(".svg")
    draw(points, figure)
    text = markdown(points, options.source, figure.name)
    options.results.with_suffix(".md").write_text(text, encoding="utf-8")
    with options.results.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows([f"{v:.6g}" if isinstance(v, float) else v for v in point] for point in points)
    print(text)


if __name__ == "__main__":
    main()
