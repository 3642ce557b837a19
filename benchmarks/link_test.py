"""Benchmarks of the link test: speed, false alarms under softmax, coverage of its intervals, and power.

Modes:
    speed     a full test on a bank of 32 batches x 512 anchors x 511 candidates: seconds and peak memory
    grid      the exact fit against the 21 x 21 grid: likelihood on many banks, time on the full bank
    size      how often each p-value is below 5 % when softmax is true
    coverage  how often the 95 % intervals of lam and tau contain the truth
    power     how often each p-value is below 5 % as lam grows, with a figure
    rival     which of softmax, a bounded tail and a temperature that varies is named when each is true
    encoders  which of them explains the scores of real encoders, from summaries of `weince diagnose`; page of rival
    draw      draw the figure again from the table that power wrote

Each writes its table under research/results/. Except for encoders, positives are simulated from a known link, on
scores of paired Gaussian embeddings; for size also as pairs with a known link.

Examples:
    python benchmarks/link_test.py size --banks 1000 --workers 2
    weince diagnose infonce.npz paper.npz --out research/results/diagnose_rivals_cifar100
    python benchmarks/link_test.py encoders
"""

import argparse
import csv
import json
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from known_answers import softmax
from rich.progress import track

from weince.evt import LinkRivals, choice, link_rivals
from weince.evt.link_fit import fit_link, fit_pair
from weince.evt.link_rivals import VaryingLink
from weince.evt.link_test import Competing, Gain, LinkBank, link_bank, link_test
from weince.evt.link_varying import Scored, hermite_nodes, link_table, negative_law
from weince.lab.paper.cross_checks import fit_grid
from weince.lab.paper.draws import draw_positives

RESULTS = Path(__file__).parents[1] / "research" / "results"
TAU = 0.2
LAMS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0)
TAU_RANGE = (0.01, 2.0)


def paired(count: int, dim: int, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((count, dim))
    return z, z + noise * rng.standard_normal(z.shape)


def small_bank(lam: float, seed: int, *, batches: int, pairs: int, dim: int) -> LinkBank:
    """New scores, with positives drawn from the link (lam, TAU)."""
    bank = link_bank(*paired(batches * pairs, dim, 0.5, seed), batch_size=pairs, batches=batches, rng=seed)
    return bank._replace(positives=draw_positives(bank.scores, lam, TAU, rng=seed + 10**6))


def full_banks() -> Iterator[tuple[str, LinkBank]]:
    bank = link_bank(*paired(8192, 16, 0.8, 0))
    yield "the pairs themselves win", bank
    yield (
        "positives from lam 0.4, tau 0.2",
        bank._replace(positives=draw_positives(bank.scores, 0.4, 0.2, rng=1)),
    )
    yield (
        "positives from softmax, tau 0.2",
        bank._replace(positives=draw_positives(bank.scores, 0.0, 0.2, rng=1)),
    )


def one_test(lam: float, seed: int) -> tuple[float, float, float, float]:
    """lam, parametric-bootstrap p, clustered-t p and gain of a bank of 12 batches x 32 anchors x 31."""
    return tested(small_bank(lam, seed, batches=12, pairs=16, dim=8), seed)


def one_test_of_pairs(candidates: Competing, seed: int) -> tuple[float, float, float, float]:
    """The same for as many pairs drawn from softmax: with "views", both anchors of a pair share its score."""
    views = softmax(TAU, seed=seed, pairs=192, dim=8)
    return tested(link_bank(*views, batch_size=16, batches=12, candidates=candidates, rng=seed), seed)


def tested(bank: LinkBank, seed: int) -> tuple[float, float, float, float]:
    result = link_test(*bank, bootstraps=200, null_draws=200, rng=seed)
    return result.lam, result.lr_p_value, result.t_p_value, result.gain


def one_interval(lam: float, pairs: int, seed: int) -> tuple[bool, bool, bool]:
    """Whether the intervals of lam and tau contain the truth, and whether they are sandwich intervals; 16 batches."""
    fit = fit_link(*small_bank(lam, seed, batches=16, pairs=pairs, dim=4))
    in_lam = fit.lam_interval[0] <= lam <= fit.lam_interval[1]
    in_tau = fit.tau_interval[0] <= TAU <= fit.tau_interval[1]
    return in_lam, in_tau, fit.interval_method == "sandwich"


def spread(job: Callable[[int], tuple[float, ...]], banks: int, workers: int, label: str) -> np.ndarray:
    """Run a job for every seed on several processes, with a progress bar."""
    with ProcessPoolExecutor(workers) as pool:
        return np.array(
            list(track(pool.map(job, range(banks), chunksize=4), label, total=banks)), dtype=float
        )


def made_by(options: argparse.Namespace) -> str:
    cores = os.cpu_count()
    words = [options.mode]
    if options.mode != "speed":
        words.append(f"--banks {options.banks}")
    if options.mode == "coverage" and options.pairs != 32:
        words.append(f"--pairs {options.pairs} --lams {' '.join(map(str, options.lams))}")
    command = f"python benchmarks/link_test.py {' '.join(words)}"
    return f"made by: {command}; {cores} {platform.machine()} cores"


def save(name: str, options: argparse.Namespace, text: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(f"<!-- {made_by(options)} -->\n\n{text}")
    print(text)


def speed(options: argparse.Namespace) -> None:
    lines = [
        "| bank of 32 x 512 x 511 | seconds | peak GiB so far | lam | gain | LR p | interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, bank in track(list(full_banks()), "full tests"):
        start = time.perf_counter()
        r = link_test(*bank, bootstraps=2000, null_draws=200)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        lines.append(
            f"| {label} | {seconds:.1f} | {peak:.2f} | {r.lam:.3f} | {r.gain:.4f} | {r.lr_p_value:.3f} "
            f"| {r.interval_method} |"
        )
    note = "\n2,000 batch bootstraps, 200 parametric bootstraps. Peak memory includes the banks.\n"
    save(
        "link_test_speed.md",
        options,
        "# Speed of the link test\n\n" + "\n".join(lines) + "\n" + note,
    )


def grid(options: argparse.Namespace) -> None:
    lines = ["| bank | exact - grid, nats | exact, s | grid, s | ratio |", "|---|---|---|---|---|"]
    worst = np.inf
    for seed in track(range(options.banks), "small banks"):
        lam = LAMS[seed % len(LAMS)]
        bank = small_bank(lam, seed, batches=8, pairs=8, dim=(3, 8, 32)[seed % 3])
        fit = fit_link(*bank)
        if not fit.separated:
            worst = min(worst, fit.loglik - fit_grid(*bank, tau_range=TAU_RANGE).loglik)
    lines.append(f"| {options.banks} banks of 8 x 16 x 15, the smallest difference | {worst:.2e} | | | |")
    for label, bank in full_banks():
        start = time.perf_counter()
        choices = choice.read_choices(*bank)
        reading = time.perf_counter() - start
        pair = fit_pair(choices)
        exact = time.perf_counter() - start - reading
        start = time.perf_counter()
        best = fit_grid(*bank, tau_range=TAU_RANGE)
        slow = time.perf_counter() - start - reading
        gap = pair.full.value - best.loglik
        lines.append(
            f"| 32 x 512 x 511, {label} | {gap:.2e} | {exact:.2f} | {slow:.1f} | {slow / exact:.0f} |"
        )
    note = (
        f"\nGrid: 21 even steps of lam in [0, 1], 21 logarithmic steps of tau in {list(TAU_RANGE)}, the\n"
        "same vectorised likelihood. Both links are fitted. Times leave out reading the scores.\n"
    )
    save(
        "link_test_grid.md",
        options,
        "# Exact fit against the grid\n\n" + "\n".join(lines) + "\n" + note,
    )


def rate(hits: np.ndarray) -> str:
    """A share in percent with twice its standard error."""
    p = hits.mean()
    return f"{100 * p:.1f} ± {200 * np.sqrt(p * (1 - p) / len(hits)):.1f}"


def size(options: argparse.Namespace) -> None:
    out = spread(partial(one_test, 0.0), options.banks, options.workers, "banks under softmax")
    none = out[:, 0] == 0.0
    nothing = (out[:, 3] == 0.0) & (out[:, 1:3] == 1.0).all(axis=1)
    text = (
        "# Size of the link test under softmax\n\n"
        + f"{options.banks} banks of 12 batches x 32 anchors x 31 candidates, softmax with tau {TAU}; "
        + "200 parametric bootstraps each.\n\n"
        + "| | percent ± 2 standard errors |\n|---|---|\n"
        + f"| parametric bootstrap p <= 0.05 (wanted: 5 ± 2) | {rate(out[:, 1] <= 0.05)} |\n"
        + f"| parametric bootstrap p <= 0.10 | {rate(out[:, 1] <= 0.10)} |\n"
        + f"| clustered t p <= 0.05 (wanted: at most 5) | {rate(out[:, 2] <= 0.05)} |\n"
        + f"| fitted lam = 0 | {rate(none)} |\n"
        + f"| lam = 0 with gain = 0 and both p = 1, among lam = 0 | {rate(nothing[none])} |\n\n"
        + "There each positive is drawn by itself. With real pairs the two anchors of a pair share its score, if all "
        + "views compete.\nAs many pairs drawn from the same softmax:\n\n"
        + "| | all views compete | only the other view |\n|---|---|---|\n"
    )
    pairs = [
        spread(partial(one_test_of_pairs, who), options.banks, options.workers, f"banks of pairs, {who}")
        for who in ("views", "cross")
    ]
    for label, column in (("parametric bootstrap", 1), ("clustered t", 2)):
        text += f"| {label} p <= 0.05 | {' | '.join(rate(found[:, column] <= 0.05) for found in pairs)} |\n"
    text += f"| both | {' | '.join(rate((found[:, 1:3] <= 0.05).all(axis=1)) for found in pairs)} |\n"
    save("link_test_size.md", options, text)


def coverage(options: argparse.Namespace) -> None:
    lines = ["| lam | lam covered, % | tau covered, % | sandwich kind, % |", "|---|---|---|---|"]
    for lam in options.lams:
        out = spread(partial(one_interval, lam, options.pairs), options.banks, options.workers, f"lam {lam}")
        lines.append(f"| {lam} | {rate(out[:, 0])} | {rate(out[:, 1])} | {100 * out[:, 2].mean():.0f} |")
    about = (
        f"{options.banks} banks each of 16 batches x {2 * options.pairs} anchors x {2 * options.pairs - 1} "
        f"candidates, tau {TAU}; "
        "percent ± 2 standard errors.\n\n"
    )
    title = "# Coverage of the 95 % intervals\n\n"
    name = "link_test_coverage.md" if options.pairs == 32 else f"link_test_coverage_{2 * options.pairs}.md"
    save(name, options, title + about + "\n".join(lines) + "\n")


def power(options: argparse.Namespace) -> None:
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "link_test_power.csv").open("w", newline="") as file:
        file.write(f"# {made_by(options)}\n")
        writer = csv.writer(file)
        writer.writerow(["lam", "banks", "lr_rejects", "t_rejects", "mean_lam", "mean_gain"])
        for lam in LAMS[:-3]:
            out = spread(partial(one_test, lam), options.banks, options.workers, f"lam {lam}")
            rejects = (out[:, 1:3] <= 0.05).mean(axis=0)
            row = [lam, options.banks, *(f"{x:.4f}" for x in (*rejects, out[:, 0].mean(), out[:, 3].mean()))]
            writer.writerow(row)
            print(row)
    draw(options)


def draw(options: argparse.Namespace) -> None:
    """Draw the power curve from its table."""
    matplotlib.use("Agg")
    table = np.genfromtxt(RESULTS / "link_test_power.csv", delimiter=",", names=True, skip_header=1)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    half = 2 / np.sqrt(table["banks"])
    kinds = (("lr_rejects", "likelihood ratio, parametric bootstrap", "#0072B2", "o"),)
    kinds += (("t_rejects", "clustered t on held-out gain", "#D55E00", "s"),)
    for name, label, colour, marker in kinds:
        error = half * np.sqrt(table[name] * (1 - table[name]))
        axes.errorbar(table["lam"], table[name], error, label=label, color=colour, marker=marker, capsize=3)
    axes.axhline(0.05, color="grey", linestyle=":", label="level of the test, 5 %")
    axes.set(
        xlabel="true weight of the shortfall feature, lam", ylabel="share of banks rejected", ylim=(0, 1.05)
    )
    axes.set_title(
        f"Power over {table['banks'][0]:.0f} banks of 12 x 32 anchors, ± 2 standard errors", fontsize=10
    )
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.08))
    figure.savefig(RESULTS / "link_test_power.svg", metadata={"Date": None})


# Truths of the mode `rival`: name, weight of the shortfall, what the temperature varies with, sd of its log.
TRUTHS = (
    ("softmax", 0.0, "", 0.0),
    ("bounded tail, λ = 0.25", 0.25, "", 0.0),
    ("bounded tail, λ = 0.5", 0.5, "", 0.0),
    ("bounded tail, λ = 1", 1.0, "", 0.0),
    ("τ varies by anchor, sd 0.5", 0.0, "anchor", 0.5),
    ("τ varies by anchor, sd 1", 0.0, "anchor", 1.0),
    ("τ varies by pair, sd 0.5", 0.0, "pair", 0.5),
    ("τ varies by pair, sd 1", 0.0, "pair", 1.0),
    ("λ = 0.5, and τ by anchor, sd 0.7", 0.5, "anchor", 0.7),
)
LINKS = ("blend", "anchors", "pairs", "both")
SUMMARIES = tuple(f"diagnose_rivals_{data}/summary.json" for data in ("cifar100", "cifar10"))
NAMES = ("softmax", "cap", "varying", "both", "either")
WORTH = 0.02


def rival_bank(truth: int, seed: int) -> LinkBank:
    """32 batches x 128 anchors x 127 candidates, with positives drawn from one of the truths."""
    _, lam, by, sd = TRUTHS[truth]
    bank = link_bank(*paired(2048, 16, 0.8, seed), batch_size=64, batches=32, rng=seed)
    rng = np.random.default_rng(seed + 10**6)
    if by == "pair":
        scored = Scored(bank.scores, bank.scores[np.arange(len(bank.scores)), bank.positives])
        table = link_table(np.array([1.0 / TAU, sd]), negative_law(scored), hermite_nodes(41))[0]
        logits = np.interp(bank.scores, np.linspace(-1.0, 1.0, len(table)), table)
        positives = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    else:
        taus = TAU * np.exp(sd * rng.standard_normal(len(bank.scores)))
        positives = draw_positives(bank.scores, lam, taus, rng=rng)
    return bank._replace(positives=positives)


def one_rival(truth: int, seed: int) -> tuple[float, ...]:
    """Held-out gains, whether each interval lies above 0, and the explanation named from 0 and from WORTH nats on."""
    found = link_rivals(*rival_bank(truth, seed), bootstraps=500, rng=seed)
    gains = [found.blend, found.anchors.gain, found.pairs.gain, found.both.gain]
    named = [NAMES.index(found.explanation(worth)) for worth in (0.0, WORTH)]
    return (*(g.gain for g in gains), *(g.interval[0] > 0.0 for g in gains), *named)


def rival(options: argparse.Namespace) -> None:
    with (RESULTS / "link_rival.csv").open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {made_by(options)}\n")
        writer = csv.writer(file)
        columns = [f"{kind}_{link}" for kind in ("gain", "counts") for link in LINKS]
        columns += [f"named_{name}_from_{worth:g}" for worth in (0.0, WORTH) for name in NAMES]
        writer.writerow(["truth", "banks", *columns])
        for truth, (name, *_) in enumerate(TRUTHS):
            out = spread(partial(one_rival, truth), options.banks, options.workers, name)
            row = [*out[:, :8].mean(axis=0)]
            row += [float((out[:, column] == i).mean()) for column in (8, 9) for i in range(len(NAMES))]
            writer.writerow([name, options.banks, *(f"{x:.5f}" for x in row)])
    encoders(options)


def recorded(name: str) -> Any:
    """The content of a file below the results, or else of its line in records.jsonl (see research/keep.py)."""
    path = RESULTS / name
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file)) if path.suffix == ".csv" else json.load(file)
    lines = (RESULTS / "records.jsonl").read_text(encoding="utf-8").splitlines()
    kept = {line["file"]: line["content"] for line in map(json.loads, lines)}
    if name not in kept:
        raise SystemExit(f"no {path} and no record of it: see --help for what makes it")
    return kept[name]


def simulated(rows: list[list[str]]) -> list[str]:
    """Parts of the page: gains and named explanations by truth, from the rows of link_rival.csv."""
    _, header, *found = rows
    truths = [dict(zip(header, row, strict=True)) for row in found]

    def named(worth: float) -> list[str]:
        lines = [f"| truth | {' | '.join(NAMES)} |", "|---|" + "---|" * len(NAMES)]
        for row in truths:
            shares = [f"{100 * float(row[f'named_{name}_from_{worth:g}']):.0f}" for name in NAMES]
            lines.append(f"| {row['truth']} | {' | '.join(shares)} |")
        return lines

    gains = [
        "| truth | bounded tail | τ by anchor | τ by pair | bounded tail, and τ by anchor |",
        "|---|---|---|---|---|",
    ]
    for row in truths:
        cells = [f"{float(row[f'gain_{x}']):.4f} ({100 * float(row[f'counts_{x}']):.0f})" for x in LINKS]
        gains.append(f"| {row['truth']} | {' | '.join(cells)} |")
    return [
        f"{truths[0]['banks']} banks of each truth: 32 batches x 128 anchors x 127 candidates, half of them to "
        f"fit, median temperature {TAU}. A gain counts if its 95 % interval lies above 0.",
        "## Held-out gains over softmax, nats per anchor, and how often they count (%)",
        "\n".join(gains),
        "## Who is named (%), counting every gain whose interval lies above 0",
        "\n".join(named(0.0)),
        f"## Who is named (%), counting gains of at least {WORTH} nats, as the page does",
        "\n".join(named(WORTH)),
        "*cap*: the bounded tail gains over τ by pair, and adds to τ by anchor. *varying*: a varying τ gains over "
        "the bounded tail, or adds to it. *both*: each adds to the other. *either*: neither does, so these positives "
        "do not tell them apart.",
    ]


def rivals_of(model: dict[str, Any]) -> LinkRivals:
    """The rivals of one model of a summary."""
    if model["rivals"] is None:
        raise SystemExit(f"no link fits the scores of {model['name']}: {model['verdict']['headline']}")

    def gain(found: dict[str, Any]) -> Gain:
        return Gain(found["gain"], tuple(found["interval"]), found["t_p_value"])

    def link(found: dict[str, Any]) -> VaryingLink:
        return VaryingLink(
            **found | {"gain": gain(found["gain"]), "sd_interval": tuple(found["sd_interval"])}
        )

    parts = {
        key: link(value)
        if key in ("anchors", "pairs", "both")
        else value
        if key == "separated"
        else gain(value)
        for key, value in model["rivals"].items()
    }
    return LinkRivals(**parts)


def with_interval(gain: Gain) -> str:
    return f"{gain.gain:.3f} ({gain.interval[0]:.3f} to {gain.interval[1]:.3f})"


def measured(summaries: list[dict[str, Any]]) -> list[str]:
    """Parts of the page: what explains the scores of encoders, from summaries of `weince diagnose`."""
    over = [
        "| encoder | ξ | crowded | τ₀ | bounded tail | τ by anchor | τ by pair | bounded tail, and τ by anchor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    between = [
        "| encoder | tail over τ by pair | tail added to τ by anchor | τ by anchor added to tail | named, any gain "
        f"| named, from {WORTH} |",
        "|---|---|---|---|---|---|",
    ]
    models = [model for summary in summaries for model in summary["models"]]
    for model in models:
        found = rivals_of(model)
        gains = [found.blend, found.anchors.gain, found.pairs.gain, found.both.gain]
        about = [
            f"{model['tail']['xi']:.2f}",
            f"{100 * model['verdict']['crowded']:.1f} %",
            f"{model['link_test']['tau0']:.3f}",
        ]
        over.append(f"| {model['name']} | {' | '.join([*about, *map(with_interval, gains)])} |")
        versus = [found.blend_over_pairs, found.both_over_anchors, found.both_over_blend]
        names = [found.explanation(worth) for worth in (0.0, WORTH)]
        between.append(f"| {model['name']} | {' | '.join([*map(with_interval, versus), *names])} |")
    first, commands = models[0], " and ".join(f"`{summary['command']}`" for summary in summaries)
    return [
        "## Encoders: held-out gains over softmax at its best temperature τ₀, nats per anchor (95 %)",
        f"{first['pairs']:,} held-out pairs of views each, in batches of {first['batch_size']}, half of the "
        f"batches to fit. Intervals resample batches. Made by {commands}.",
        "\n".join(over),
        "## Encoders: what one explanation has over the other, nats per anchor (95 %)",
        "\n".join(between),
    ]


def encoders(options: argparse.Namespace) -> None:
    """Write the page of the modes rival and encoders from the recorded results."""
    rows = recorded("link_rival.csv")
    title = "# What explains a gain over softmax: a bounded tail, or a temperature that varies?"
    parts = [title, *simulated(rows), *measured([recorded(name) for name in SUMMARIES])]
    text = f"<!-- {rows[0][0].removeprefix('# ')} -->\n\n" + "\n\n".join(parts) + "\n"
    (RESULTS / "link_rival.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = {
        "speed": speed, "grid": grid, "size": size, "coverage": coverage, "power": power, "draw": draw,
        "rival": rival, "encoders": encoders,
    }  # fmt: skip
    parser.add_argument("mode", choices=list(modes))
    parser.add_argument("--banks", type=int, default=1000, help="simulated banks (per value of lam)")
    parser.add_argument("--pairs", type=int, default=32, help="coverage: pairs in a batch")
    parser.add_argument("--lams", type=float, nargs="+", default=LAMS, help="coverage: true values of lam")
    parser.add_argument("--workers", type=int, default=2, help="processes for the simulations")
    options = parser.parse_args()
    modes[options.mode](options)


if __name__ == "__main__":
    main()
