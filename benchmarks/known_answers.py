"""Are the verdicts of `weince diagnose` right? Pairs are drawn from known links, and its verdicts are checked.

Modes:
    verdicts  a table of truth, verdict and estimate over all cases: research/results/known_answers.md and .csv
    towers    temperatures of queries and documents against those that they were drawn with, 20 of each of two kinds:
              research/results/known_temperatures.md
    batches   a page at every batch size, full and quick: seconds, memory and verdict

A pair is drawn so that its link is known: the anchor is uniform on the sphere, and its positive has the density
exp(logit(s)) relative to the uniform law of the negatives. The chance that a candidate is the positive is then the
softmax of the logits, whatever the candidates are.

Example:
    python benchmarks/known_answers.py verdicts
"""

import argparse
import csv
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.progress import track

from weince.diagnose.decision import decide
from weince.diagnose.diagnosis_settings import DiagnosisSettings
from weince.diagnose.measure import Measured, measure
from weince.diagnose.reading import make_pairs
from weince.diagnose.temperatures import fit_temperature
from weince.evt import LinkRivals, link_bank, link_test
from weince.lab.paper.draws import draw_positives

RESULTS = Path(__file__).parents[1] / "research" / "results"
PAIRS, DIM = 8192, 16
SIZES = (32, 64, 128, 256, 300, 400, 512, 625, 1024, 2048)
Views = tuple[np.ndarray, np.ndarray]
Interval = tuple[float, float]


def unit(z: np.ndarray) -> np.ndarray:
    return z / np.linalg.norm(z, axis=1, keepdims=True)


Logit = Callable[[np.ndarray, np.ndarray], np.ndarray]


def drawn(logit: Logit, seed: int = 0, pairs: int = PAIRS, dim: int = DIM) -> Views:
    """Draw pairs from a link: anchors and positives, (pairs, dim) each.

    Args:
        logit: Function of the anchors (pairs, dim) and a grid of scores; returns (scores,), or (pairs, scores) if
            pairs differ.
        seed: Seed of all draws.
        pairs: Number of pairs.
        dim: Dimension of the embeddings.
    """
    rng = np.random.default_rng(seed)
    z, beside = unit(rng.standard_normal((pairs, dim))), rng.standard_normal((pairs, dim))
    beside = unit(beside - (beside * z).sum(axis=1, keepdims=True) * z)
    s = np.linspace(-1.0, 1.0, 4001)[1:-1]
    law = np.atleast_2d(logit(z, s)) + 0.5 * (dim - 3) * np.log1p(-(s**2))
    steps = np.cumsum(np.exp(law - law.max(axis=1, keepdims=True)), axis=1)
    steps /= steps[:, -1:]
    chance = rng.random(pairs)
    rows = np.broadcast_to(steps, (pairs, len(s)))
    score = np.array([np.interp(x, row, s) for x, row in zip(chance, rows, strict=True)])
    return z, score[:, None] * z + np.sqrt(1.0 - score**2)[:, None] * beside


def softmax(tau: float, **options: int) -> Views:
    return drawn(lambda z, s: s / tau, **options)


def blend(lam: float, tau: float) -> Views:
    return drawn(lambda z, s: ((1.0 - lam) * s - lam * np.log1p(-s)) / tau)


def by_pair(taus: np.ndarray) -> Views:
    """Pairs from softmax, each with its own temperature."""
    return drawn(lambda z, s: s / taus[:, None])


def by_place(near: float, far: float) -> Views:
    """Pairs from softmax with the temperature ``near`` on one half of the sphere and ``far`` on the other."""
    return drawn(lambda z, s: s / np.where(z[:, :1] > 0.0, near, far))


def lognormal(sd: float) -> np.ndarray:
    return 0.1 * np.exp(sd * np.random.default_rng(1).standard_normal(PAIRS))


def two_kinds(one: float, other: float) -> np.ndarray:
    return np.where(np.random.default_rng(1).random(PAIRS) < 0.5, one, other)


def crowd() -> Views:
    """Pairs from softmax, with a tenth of the items moved to one place."""
    z_i, z_j = softmax(0.1)
    place = unit(np.ones((1, DIM)))
    noise = np.random.default_rng(1).standard_normal((2, PAIRS // 10, DIM))
    for z, around in zip((z_i, z_j), noise, strict=True):
        z[: PAIRS // 10] = unit(place + 0.01 * around)
    return z_i, z_j


def temperature_of(m: Measured) -> tuple[float, Interval]:
    return m.link.tau0, m.link.tau0_interval


def weight_of(m: Measured) -> tuple[float, Interval]:
    return m.link.lam, m.link.lam_interval


def slope_of(m: Measured) -> tuple[float, Interval]:
    low, high = m.link.tau_interval
    return 1.0 / m.link.tau, (1.0 / high, 1.0 / low)


def spread_of(m: Measured) -> tuple[float, Interval]:
    assert m.rivals is not None
    return m.rivals.pairs.sd, m.rivals.pairs.sd_interval


Estimate = Callable[[Measured], tuple[float, Interval]]


@dataclass(frozen=True)
class Case:
    """The truth, the verdicts that agree with it, and the estimate to compare with its value."""

    truth: str
    views: Callable[[], Views]
    right: tuple[str, ...]
    quantity: str = ""
    value: float = np.nan
    estimate: Estimate | None = None
    temperature: float | None = None


CASES = (
    Case("softmax at 0.1", lambda: softmax(0.1), ("nothing",), "τ₀", 0.1, temperature_of),
    Case("softmax at 0.05", lambda: softmax(0.05), ("nothing",), "τ₀", 0.05, temperature_of),
    Case("softmax at 0.2", lambda: softmax(0.2), ("nothing",), "τ₀", 0.2, temperature_of),
    Case("shortfall, slope 3", lambda: blend(1.0, 1 / 3), ("link", "either"), "slope", 3.0, slope_of),
    Case("blend, λ = 0.5, τ = 0.2", lambda: blend(0.5, 0.2), ("link", "either"), "λ", 0.5, weight_of),
    Case("random pairs", lambda: (softmax(0.1)[0], softmax(0.1, seed=9)[0]), ("uninformative",)),
    Case(
        "softmax at 0.1, trained at 0.5",
        lambda: softmax(0.1),
        ("temperature",),
        "τ₀",
        0.1,
        temperature_of,
        0.5,
    ),
    Case("blend, λ = 0.5, τ = 0.1", lambda: blend(0.5, 0.1), ("link", "either"), "λ", 0.5, weight_of),
    Case(
        "τ log-normal over pairs, sd 0.4",
        lambda: by_pair(lognormal(0.4)),
        ("varying", "either"),
        "sd",
        0.4,
        spread_of,
    ),
    Case(
        "τ log-normal over pairs, sd 1",
        lambda: by_pair(lognormal(1.0)),
        ("varying", "either"),
        "sd",
        1.0,
        spread_of,
    ),
    Case("half of the pairs at 0.05, half at 0.3", lambda: by_pair(two_kinds(0.05, 0.3)), ("varying",)),
    Case("τ by the anchor's place, 0.05 or 0.25", lambda: by_place(0.05, 0.25), ("varying", "either")),
    Case("softmax at 0.1, a tenth of the items in one place", crowd, ("crowded",)),
    Case("every positive equal to its anchor", lambda: (softmax(0.1)[0], softmax(0.1)[0]), ("separated",)),
)


def made_by(options: argparse.Namespace) -> str:
    return f"made by: python benchmarks/known_answers.py {options.mode}; {os.cpu_count()} {platform.machine()} cores"


def save(name: str, options: argparse.Namespace, text: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(f"<!-- {made_by(options)} -->\n\n{text}")
    print(text)


def gains_of(rivals: LinkRivals) -> list[float]:
    links = rivals.anchors, rivals.pairs, rivals.both
    return [rivals.blend.gain, *(link.gain.gain for link in links)]


COLUMNS = (
    "truth", "verdict", "headline", "right", "quantity", "true_value", "estimate", "low", "high", "gain_blend",
    "gain_anchors", "gain_pairs", "gain_both",
)  # fmt: skip


def verdict_on(case: Case) -> dict[str, str]:
    """A row of the table."""
    settings = replace(DiagnosisSettings(), temperature=case.temperature)
    found = measure(make_pairs(case.truth, *case.views()), settings)
    verdict = decide(found, settings)
    value, (low, high) = (np.nan, (np.nan, np.nan)) if case.estimate is None else case.estimate(found)
    gains = [np.nan] * 4 if found.rivals is None else gains_of(found.rivals)
    right = "yes" if verdict.kind in case.right else "NO"
    row = (
        case.truth,
        verdict.kind,
        verdict.headline,
        right,
        case.quantity,
        case.value,
        value,
        low,
        high,
        *gains,
    )
    return {
        name: cell if isinstance(cell, str) else f"{cell:.5f}"
        for name, cell in zip(COLUMNS, row, strict=True)
    }


def shown(row: dict[str, str]) -> str:
    estimate, interval = "", ""
    if row["quantity"]:
        value, low, high = (float(row[name]) for name in ("estimate", "low", "high"))
        estimate, interval = f"{row['quantity']} = {value:.3f}", f"{low:.3f} to {high:.3f}"
    cells = row["truth"], row["verdict"], row["headline"], estimate, interval, row["right"]
    return f"| {' | '.join(cells)} |"


def verdicts(options: argparse.Namespace) -> None:
    """Measure all cases. Each takes a minute, so those that are in the CSV file are not measured again."""
    path = RESULTS / "known_answers.csv"
    known: dict[str, dict[str, str]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            file.readline()  # the command that made it
            known = {row["truth"]: row for row in csv.DictReader(file)}
    for case in track(CASES, "cases"):
        if case.truth not in known:
            known[case.truth] = verdict_on(case)
            print(shown(known[case.truth]), flush=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            file.write(f"# {made_by(options)}\n")
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(known[case.truth] for case in CASES if case.truth in known)
    lines = ["| truth | verdict | headline | estimate | 95 % | right |", "|---|---|---|---|---|---|"]
    lines += [shown(known[case.truth]) for case in CASES]
    wrong = sum(known[case.truth]["right"] == "NO" for case in CASES)
    about = (
        f"{PAIRS:,} pairs each, in {DIM} dimensions where nothing else is said; the settings of `weince diagnose` as "
        f"they are. Wrong verdicts: {wrong}."
    )
    save("known_answers.md", options, f"# Known answers\n\n{about}\n\n" + "\n".join(lines) + "\n")


def page_of(data: Path, size: int, *, quick: bool) -> list[str]:
    """Seconds, CPU seconds, peak memory and verdict of a page that the command makes in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page"
        command = [
            sys.executable,
            "-m",
            "weince",
            "diagnose",
            str(data),
            "--batch-size",
            str(size),
            "--out",
            str(page),
        ]
        start = time.perf_counter()
        with subprocess.Popen(
            [*command, *(["--quick"] if quick else [])],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stderr is not None
            words = process.stderr.read().strip().splitlines()
            # wait4 gives the resources of this process alone; getrusage would add up all children.
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        said = words[-1].partition(": ")[2] if words else ""
        good = process.returncode == 0 and (page / "index.html").is_file()
        return [
            f"{seconds:.0f}",
            f"{used.ru_utime:.0f}",
            f"{used.ru_maxrss / 2**20:.1f}",
            said if good else f"FAILED: {said}",
        ]


def batches(options: argparse.Namespace) -> None:
    """Make a page at every batch size. Each takes a minute, so those that are in the CSV file are not made again."""
    path = RESULTS / "diagnose_batches.csv"
    known: dict[int, list[str]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            known = {int(size): cells for size, *cells in list(csv.reader(file))[2:]}
    head = [
        "pairs in a batch",
        *(f"{kind}{name}" for kind in ("full, ", "quick, ") for name in ("s", "CPU s", "GiB", "verdict")),
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "pairs.npz"
        z_i, z_j = softmax(0.1)
        np.savez(data, z_i=z_i.astype(np.float32), z_j=z_j.astype(np.float32))
        for size in track(SIZES, "batch sizes"):
            if size not in known:
                known[size] = [cell for quick in (False, True) for cell in page_of(data, size, quick=quick)]
                print(size, *known[size], flush=True)
            with path.open("w", newline="", encoding="utf-8") as file:
                file.write(f"# {made_by(options)}\n")
                csv.writer(file).writerows([head, *([k, *known[k]] for k in SIZES if k in known)])
    save("diagnose_batches.md", options, pages_in_words(head, known))


def drawn_pairs(seed: int) -> tuple[str, float, tuple[float, Interval]]:
    """Evenly spread queries; the temperature of `fit_temperature` beside that of the draw."""
    dim, tau = (16, 32, 64, 128)[seed % 4], (0.03, 0.05, 0.1, 0.2, 0.05)[seed % 5]
    fit = fit_temperature(*softmax(tau, seed=seed, pairs=4096, dim=dim))
    return f"even, {dim} dimensions", tau, (fit.temperature, fit.interval)


def drawn_winners(seed: int) -> tuple[str, float, tuple[float, Interval]]:
    """Clusters of documents, far from the queries; the link test's temperature beside that of the drawn winners."""
    rng = np.random.default_rng(seed)
    tau, topics = (0.03, 0.05, 0.1, 0.2)[seed % 4], rng.standard_normal((100, 64))
    of, apart = rng.integers(100, size=4096), rng.standard_normal(64)
    queries = topics[of] + rng.standard_normal((4096, 64)) + apart
    documents = topics[of] + rng.standard_normal((4096, 64)) - apart
    bank = link_bank(queries, documents, candidates="cross", batches=16, rng=seed)
    bank = bank._replace(positives=draw_positives(bank.scores, 0.0, tau, rng=seed))
    test = link_test(*bank, bootstraps=10, null_draws=10, rng=seed)
    return "clusters, two towers apart", tau, (test.tau0, test.tau0_interval)


def towers(options: argparse.Namespace) -> None:
    """Fit all banks and print how often the interval holds the temperature of the draw."""
    lines = ["| bank | drawn with | estimate | 95 % | inside |", "|---|---|---|---|---|"]
    inside = {}
    for kind in (drawn_pairs, drawn_winners):
        results = [kind(seed) for seed in track(range(20), kind.__name__)]
        hits = [low <= tau <= high for _, tau, (_, (low, high)) in results]
        inside[kind] = sum(hits)
        lines += [
            f"| {bank} | {tau} | {best:.4f} | {low:.4f} to {high:.4f} | {'yes' if hit else 'NO'} |"
            for (bank, tau, (best, (low, high))), hit in zip(results, hits, strict=True)
        ]
    about = (
        f"4,096 pairs each, batches of 256 with the layout of queries and documents. The 95 % interval holds the "
        f"temperature of the draw in {inside[drawn_pairs]} of 20 banks of `fit_temperature` and in "
        f"{inside[drawn_winners]} of 20 of the link test."
    )
    print(about)
    save("known_temperatures.md", options, f"# Known temperatures\n\n{about}\n\n" + "\n".join(lines) + "\n")


def pages_in_words(head: list[str], known: dict[int, list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {size:,} | {' | '.join(known[size])} |" for size in SIZES]
    failed = sum("FAILED" in cell for cells in known.values() for cell in cells)
    about = (
        f"One bank: {PAIRS:,} pairs of softmax at 0.1 in {DIM} dimensions. Memory is the peak of the process; "
        f"seconds are those of a machine that did other work too, beside those of its CPU. Pages that "
        f"failed: {failed}."
    )
    return f"# Pages at every batch size\n\n{about}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = {"verdicts": verdicts, "towers": towers, "batches": batches}
    parser.add_argument("mode", choices=list(modes))
    options = parser.parse_args()
    modes[options.mode](options)


if __name__ == "__main__":
    main()
