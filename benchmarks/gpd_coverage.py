"""Do the 95 % intervals of `weince.evt.fit_gpd` cover the truth in 95 % of the draws?

Draws excesses from generalised Pareto laws (xi < 0: bounded tail) and counts how often the profile-likelihood
intervals of xi and of the endpoint contain the true values. Compares the fits with those of scipy, and with those of
pyextremes if --pyextremes names an interpreter that has it. Writes a table.

Example:
    python benchmarks/gpd_coverage.py --draws 2000 --pyextremes ~/envs/pyextremes/bin/python
"""

import argparse
import io
import json
import platform
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from rich.progress import Progress
from scipy.stats import genpareto

from weince.evt import GPDFit, fit_gpd, xi_over_batches
from weince.evt.gpd import gpd_loglik
from weince.lab.paper.pot import sample_gpd

SHAPES = (-0.6, -0.4, -0.2, 0.0, 0.2)

# Runs in the other interpreter: reads rows of excesses as .npy, prints [[xi, sigma], ...] as JSON.
PYEXTREMES_CODE = """
import io, json, sys
import numpy as np, pandas as pd
from pyextremes.models import get_model
out = []
for y in np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False):
    extremes = pd.Series(y, index=pd.date_range("2000", periods=len(y), freq="D"))
    model = get_model("MLE", extremes=extremes, distribution="genpareto", distribution_kwargs={"floc": 0.0})
    out.append([float(model.fit_parameters["c"]), float(model.fit_parameters["scale"])])
print(json.dumps(out))
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=2000, help="samples for each shape")
    parser.add_argument("--n", type=int, default=5000, help="excesses in a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", type=int, default=20, help="samples of each shape also fitted elsewhere")
    parser.add_argument("--batch-draws", type=int, default=200, help="samples for the intervals over batches")
    parser.add_argument("--pyextremes", help="a Python interpreter with pyextremes (it needs pandas < 3)")
    parser.add_argument("--out", type=Path, default=Path("research/results/gpd_coverage.md"))
    return parser.parse_args()


def inside(value: float, interval: tuple[float, float]) -> bool:
    return interval[0] <= value <= interval[1]


def coverage_row(xi: float, fits: list[GPDFit], seconds: float) -> str:
    """One line of the coverage table. Excesses have scale 1, so the true endpoint is -1 / xi."""
    xi_hit = np.mean([inside(xi, fit.xi_interval) for fit in fits])
    end_hit = np.mean([inside(-1.0 / xi, fit.endpoint_interval) for fit in fits]) if xi < 0 else None
    estimates = np.array([fit.xi for fit in fits])
    milliseconds = 1e3 * seconds / len(fits)
    width = np.mean([fit.xi_interval[1] - fit.xi_interval[0] for fit in fits])
    return (
        f"| {xi:+.1f} | {xi_hit:.2%} | {'—' if end_hit is None else f'{end_hit:.2%}'} "
        f"| {estimates.mean() - xi:+.4f} | {estimates.std():.4f} | {width:.4f} | {milliseconds:.1f} |"
    )


def batch_row(xi: float, draws: int, seed: int, advance: Callable[[], None]) -> str:
    """Coverage over 32 batches of 60 scores, in which each of 12 independent scores occurs five times."""
    labels = np.repeat(np.arange(32), 60)
    hits, effects = np.zeros(3), []
    for i in range(draws):
        rng = np.random.default_rng([seed, i])
        x = np.repeat(sample_gpd(rng, xi, 1.0, (32 * 12,)), 5)
        result = xi_over_batches(x, labels, quantile=1e-4, bootstraps=100, seed=i)
        end = -1.0 / xi if xi < 0 else np.inf
        held = [inside(xi, result.fit.xi_interval), inside(xi, result.xi_interval)]
        hits += [*held, inside(end, result.endpoint_interval)]
        effects.append(result.design_effect)
        advance()
    plain, wide, endpoint = hits / draws
    shown = f"{endpoint:.1%}" if xi < 0 else "—"
    return f"| {xi:+.1f} | {plain:.1%} | {wide:.1%} | {shown} | {np.mean(effects):.1f} |"


def fit_with_pyextremes(python: str, samples: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    np.save(buffer, samples)
    done = subprocess.run(
        [python, "-c", PYEXTREMES_CODE], input=buffer.getvalue(), capture_output=True, check=True
    )
    return np.array(json.loads(done.stdout))


def agreement_row(name: str, xi: float, samples: np.ndarray, ours: list[GPDFit], theirs: np.ndarray) -> str:
    """Largest differences from another library, and the smallest gain in log-likelihood over it."""
    d_xi = max(abs(a.xi - b[0]) for a, b in zip(ours, theirs, strict=True))
    d_sigma = max(abs(a.sigma - b[1]) for a, b in zip(ours, theirs, strict=True))
    gain = [a.loglik - gpd_loglik(y, b[0], b[1]) for a, b, y in zip(ours, theirs, samples, strict=True)]
    return f"| {name} | {xi:+.1f} | {len(ours)} | {d_xi:.1e} | {d_sigma:.1e} | {min(gain):+.1e} |"


def main() -> None:
    args = parse()
    coverage, agreement, batches = [], [], []
    with Progress() as bar:
        for xi in SHAPES:
            rng = np.random.default_rng([args.seed, int(10 * xi) + 100])
            task = bar.add_task(f"xi = {xi:+.1f}", total=args.draws)
            fits, kept, seconds = [], [], 0.0
            for i in range(args.draws):
                y = sample_gpd(rng, xi, 1.0, (args.n,))
                start = time.process_time()
                fits.append(fit_gpd(y))
                seconds += time.process_time() - start
                if i < args.compare:
                    kept.append(y)
                bar.advance(task)
            coverage.append(coverage_row(xi, fits, seconds))
            samples, ours = np.array(kept), fits[: len(kept)]
            if kept:
                scipy_fits = np.array([genpareto.fit(y, floc=0.0)[::2] for y in samples])
                agreement.append(agreement_row("scipy", xi, samples, ours, scipy_fits))
            if kept and args.pyextremes:
                other = fit_with_pyextremes(args.pyextremes, samples)
                agreement.append(agreement_row("pyextremes", xi, samples, ours, other))
        for xi in SHAPES if args.batch_draws else ():
            task = bar.add_task(f"batches, xi = {xi:+.1f}", total=args.batch_draws)
            batches.append(batch_row(xi, args.batch_draws, args.seed, partial(bar.advance, task)))

    command = f"python benchmarks/gpd_coverage.py --draws {args.draws} --n {args.n} --seed {args.seed}"
    command += " --pyextremes PYTHON" if args.pyextremes else ""
    text = "\n".join(
        [
            "# Coverage of the generalised Pareto intervals",
            "",
            f"Generated by `{command}` on one core of a {platform.machine()} server.",
            f"{args.draws} draws of {args.n} excesses for each shape; nominal coverage 95 %.",
            "xi < 0 is a bounded tail.",
            "",
            "| xi | covers xi | covers endpoint | bias of xi | sd of xi | mean width | CPU ms per fit |",
            "|---:|---:|---:|---:|---:|---:|---:|",
            *coverage,
            "",
            "Against other libraries on the same samples: largest absolute difference, and the least gain in",
            "log-likelihood (positive: ours is higher)."
            + ("" if args.pyextremes else " pyextremes: not compared."),
            "",
            "| library | xi | samples | in xi | in sigma | log-likelihood |",
            "|---|---:|---:|---:|---:|---:|",
            *agreement,
            "",
            f"Dependent scores ({args.batch_draws} draws of 32 batches, 12 different scores each, "
            "every one five",
            "times): how often the plain interval of xi, the one widened over batches, "
            "and the endpoint's cover.",
            "",
            "| xi | plain | over batches | endpoint over batches | design effect (5 is right) |",
            "|---:|---:|---:|---:|---:|",
            *batches,
            "",
        ]
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
