"""SimCSE with InfoNCE and WEINCE, over temperatures and seeds, from one encoder: which loss ranks STS pairs better?

Trains the runs that are missing, several at once, and writes NAME.csv (a line for each run), NAME_dev.csv (a line for
each evaluation on the dev split), NAME.md (tables) and NAME_seeds.svg. All presets get the same temperatures. The dev
split of STS-B chooses the encoder within a run, and the temperature of each preset. Runs with equal seeds see the
same sentences in the same order, so tests pair them.
"""

import argparse
import csv
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weince.intervals import t_interval
from weince.lab.configure import LossConfig
from weince.lab.tasks.images.evaluation.protocol import PairedTest, paired_test
from weince.lab.tasks.registry import train
from weince.lab.tasks.sentences.config import TextRun
from weince.lab.tasks.sentences.sts import TASKS, evaluate_sts

EXAMPLE = """\
example:
  python research/simcse_compare.py --model small-bert --text wiki.txt --sts sts.tsv --sentences 100000 --jobs 8
  python research/simcse_compare.py --aggregate-only
"""
NAMES = {
    "infonce": "InfoNCE",
    "paper": "WEINCE paper",
    "released": "WEINCE released",
    "blend": "blend, beta = 1",
}


class Config(NamedTuple):
    """A preset at a temperature: a row of the table."""

    preset: str
    temperature: float

    @property
    def name(self) -> str:
        return f"{NAMES.get(self.preset, self.preset)}, {self.temperature:g}"


class Result(NamedTuple):
    """Result of a run: figures by name."""

    config: Config
    seed: int
    values: dict[str, float]


def configs(presets: Sequence[str], temperatures: Sequence[float]) -> list[Config]:
    """All presets at all temperatures; those with the first preset or temperature come first if time runs out."""
    every = [Config(preset, temperature) for preset in presets for temperature in temperatures]
    return sorted(every, key=lambda one: one.preset != presets[0] and one.temperature != temperatures[0])


def runs(options: argparse.Namespace) -> Iterator[TextRun]:
    """The runs of a comparison, the most important ones first."""
    chosen = configs(options.presets, options.temperatures)
    must = [
        one for one in chosen if one.preset == chosen[0].preset or one.temperature == chosen[0].temperature
    ]
    for part in (must, chosen[len(must) :]):
        for seed in options.seeds:
            for one in part:
                yield TextRun(
                    text=options.text,
                    model=str(options.model),
                    sts=options.sts,
                    out=options.out / f"{one.preset}_{one.temperature:g}_seed{seed}",
                    # with 64 x 64 scores no other engine has an advantage
                    loss=LossConfig(preset=one.preset, temperature=one.temperature, engine="dense"),
                    batch=options.batch,
                    lr=options.lr,
                    seed=seed,
                    precision=options.precision,
                    sentences=options.sentences,
                    eval_every=options.eval_every,
                    checkpoint_every=0,
                    device=options.device,
                    graph=options.graph,
                )


def _worker() -> None:
    import torch

    torch.set_num_threads(1)


def _before(options: argparse.Namespace) -> None:
    """Evaluate the encoder before any training."""
    import torch

    device = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device
    scores = evaluate_sts(options.model, options.sts, device="cpu" if device == "auto" else device)
    said = json.dumps({**scores.tasks, "mean": scores.mean}, indent=2) + "\n"
    (options.out / "before.json").write_text(said, encoding="utf-8")


def run_missing(options: argparse.Namespace) -> None:
    """Train the runs that have no result yet; a run that fails is reported, and the others continue."""
    import torch
    import transformers
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    missing = [run for run in runs(options) if not (run.out / "result.json").is_file()]
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"RAYON_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"}
    began = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with (
        ProcessPoolExecutor(options.jobs, mp_context=spawn, initializer=_worker) as pool,
        Progress(*columns) as bar,
    ):
        task = bar.add_task("runs", total=len(missing))
        waiting = {pool.submit(train, run, bar=False): run for run in missing}
        known = (options.out / "before.json").is_file()
        before = None if known else pool.submit(_before, options)
        for done in as_completed(waiting):
            name = waiting[done].out.name
            error = done.exception()
            if error is not None:
                bar.console.print(f"{name} failed: {type(error).__name__}: {error}", markup=False)
            else:
                result = json.loads((waiting[done].out / "result.json").read_text(encoding="utf-8"))
                said = (
                    f"{name}: dev {result['dev']:.2f}, STS-B {result['tasks'].get('STSB', float('nan')):.2f}"
                )
                bar.console.print(f"{said}, {time.perf_counter() - began:.0f} s", markup=False)
            bar.advance(task)
        if before is not None and (error := before.exception()) is not None:
            bar.console.print(f"the encoder before training failed: {error}", markup=False)
    if missing:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        made = {
            "machine": gpu,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "jobs": options.jobs,
            "runs": len(missing),
            "seconds": round(time.perf_counter() - began),
        }
        path = options.out / "made.json"
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        path.write_text(json.dumps([*earlier, made], indent=2) + "\n", encoding="utf-8")


def read_results(out: Path) -> list[Result]:
    """The results of the finished runs in a folder."""
    import yaml

    found = []
    for path in sorted(out.glob("*/result.json")):
        run = yaml.safe_load((path.parent / "run.yaml").read_text(encoding="utf-8"))
        result = json.loads(path.read_text(encoding="utf-8"))
        values = {name: float(value) for name, value in result.items() if isinstance(value, int | float)}
        values |= {name: float(value) for name, value in result["tasks"].items()}
        config = Config(run["loss"]["preset"], run["loss"]["temperature"])
        found.append(Result(config, run["seed"], values))
    if not found:
        raise SystemExit(f"no run in {out} is done")
    return found


def column(results: Sequence[Result], config: Config, name: str) -> dict[int, float]:
    """One figure of a configuration, by seed."""
    return {one.seed: one.values[name] for one in results if one.config == config}


def compare(results: Sequence[Result], one: Config, base: Config, name: str) -> PairedTest:
    """A paired test of a configuration against another, over the seeds that both have."""
    a, b = column(results, one, name), column(results, base, name)
    seeds = sorted(a.keys() & b.keys())
    return paired_test([a[seed] for seed in seeds], [b[seed] for seed in seeds])


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm, 1979)."""
    order = np.argsort(p_values)
    steps = [(len(order) - rank) * p_values[place] for rank, place in enumerate(order)]
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0) if steps else []
    return corrected.tolist()


def plus_minus(values: Sequence[float]) -> str:
    found = t_interval(values)
    return f"{found.mean:.2f} ± {found.half:.2f}"


def table(results: Sequence[Result], order: Sequence[Config], base: Config) -> list[str]:
    """Table of all configurations, each compared with ``base``."""
    others = [one for one in order if one != base]
    tests = {one: compare(results, one, base, "STSB") for one in others}
    corrected = dict(zip(others, holm([tests[one].p_value for one in others]), strict=True))
    lines = [
        f"| loss, temperature | seeds | STS-B dev | STS-B test | against {base.name} | p | p, Holm "
        f"| mean of {len(TASKS)} tasks | alignment | uniformity |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in order:
        part = {name: list(column(results, one, name).values()) for name in ("dev", "STSB", "mean")}
        spread = [np.mean(list(column(results, one, name).values())) for name in ("alignment", "uniformity")]
        test = tests.get(one)
        against = "" if test is None else f"{test.difference:+.2f} ± {test.half:.2f}"
        p, p_holm = ("", "") if test is None else (f"{test.p_value:.3g}", f"{corrected[one]:.3g}")
        cells = [one.name, str(len(part["dev"])), *(plus_minus(part[name]) for name in ("dev", "STSB"))]
        cells += [against, p, p_holm, plus_minus(part["mean"]), f"{spread[0]:.3f}", f"{spread[1]:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def chosen_table(results: Sequence[Result], order: Sequence[Config]) -> list[str]:
    """Table of the presets, each at the temperature with its best dev score, compared with the first preset."""
    best: dict[str, Config] = {}
    for one in order:
        mean = np.mean(list(column(results, one, "dev").values()))
        held = best.get(one.preset)
        if held is None or mean > np.mean(list(column(results, held, "dev").values())):
            best[one.preset] = one
    base, *others = best.values()
    lines = [
        f"| loss at its temperature | tried | STS-B test | against {base.name} | p |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in (base, *others):
        tried = sum(other.preset == one.preset for other in order)
        cells = [one.name, str(tried), plus_minus(list(column(results, one, "STSB").values()))]
        test = compare(results, one, base, "STSB")
        cells += (
            ["", ""] if one == base else [f"{test.difference:+.2f} ± {test.half:.2f}", f"{test.p_value:.3g}"]
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def figure(results: Sequence[Result], order: Sequence[Config], path: Path) -> None:
    """Draw a dot for each seed, and the mean with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    presets = list(dict.fromkeys(one.preset for one in order))
    drawn, axes = plt.subplots(figsize=(7.0, 0.6 + 0.42 * len(order)), layout="constrained")
    for place, one in enumerate(order):
        by_seed = column(results, one, "STSB")
        mean, half, _ = t_interval(by_seed.values())
        colour = f"C{presets.index(one.preset)}"
        axes.errorbar(mean, place, xerr=half, fmt="|", color=colour, capsize=4, markersize=14, lw=1.5)
        for seed, value in by_seed.items():
            axes.plot(value, place + 0.22, "o", color=colour, alpha=0.7, markersize=4.5, mew=0)
            axes.annotate(str(seed), (value, place + 0.3), ha="center", va="top", fontsize=6, color="0.4")
    axes.set_yticks(range(len(order)), [one.name for one in order])
    axes.invert_yaxis()
    axes.set_xlabel("STS-B test, Spearman x 100 (dots: seeds; bar: mean, 95 % interval)")
    axes.grid(axis="x", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    matplotlib.rcParams["svg.hashsalt"] = "weince"
    drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(drawn)


def write_csv(results: Sequence[Result], path: Path) -> None:
    names = ["dev", "best_step", "steps", "sentences", *TASKS, "mean", "alignment", "uniformity"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["preset", "temperature", "seed", *names])
        for config, seed, values in results:
            writer.writerow(
                [*config, seed, *(f"{values[name]:.6g}" if name in values else "" for name in names)]
            )


def write_dev(out: Path, path: Path) -> None:
    """Write every dev score of the finished runs, from their logs."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", "loss", "dev"])
        for log in sorted(out.glob("*/log.csv")):
            if (log.parent / "result.json").is_file():
                with log.open(encoding="utf-8", newline="") as lines:
                    looks = [line for line in csv.DictReader(lines) if line["dev"]]
                writer.writerows(
                    [log.parent.name, look["step"], f"{float(look['loss']):.4g}", f"{float(look['dev']):.2f}"]
                    for look in looks
                )


def introduction(run: dict[str, Any], values: dict[str, float], seeds: int) -> str:
    """How the runs were made, for the reader of the tables."""
    return (
        f"Unsupervised SimCSE from one encoder: {int(values['sentences']):,} sentences, {run['epochs']} epoch "
        f"({int(values['steps']):,} steps of {run['batch']}), learning rate {run['lr']:g}, {run['precision']}, "
        f"{seeds} seeds. The encoder of a run is the one that is best on STS-B's dev split, looked at every "
        f"{run['eval_every']} steps; the test split decided nothing. Spearman x 100; ± is half of a 95 % t-interval "
        "over seeds; p is of a paired t-test over seeds (equal seeds see equal batches), then corrected for the "
        "number of rows (Holm). Alignment and uniformity are those of STS-B's test split."
    )


def origin(
    options: argparse.Namespace, run: dict[str, Any], values: dict[str, float], seeds: Sequence[int]
) -> str:
    """The command and the machines; runs that were added later come from another call of the command."""
    command = (
        f"python research/simcse_compare.py --model ENCODER --text SENTENCES --sts STS "
        f"--sentences {int(values['sentences'])} --seeds {' '.join(map(str, seeds))} "
        f"--lr {run['lr']:g} --precision {run['precision']}"
        f"{' --graph' if run['graph'] else ''}"
    )
    path = options.out / "made.json"
    if not path.is_file():
        return f"Made by `{command}`."
    calls = json.loads(path.read_text(encoding="utf-8"))
    said = "; ".join(
        f"{made['runs']} runs, {made['jobs']} at once, in {made['seconds']} s on {made['machine']}, torch "
        f"{made['torch']}, transformers {made['transformers']}"
        for made in calls
    )
    return f"Made by `{command}`: {said}."


def before(out: Path) -> str:
    """What the encoder reached without SimCSE."""
    path = out / "before.json"
    if not path.is_file():
        return ""
    scores = json.loads(path.read_text(encoding="utf-8"))
    return (
        f"Before SimCSE the encoder's [CLS] reaches {scores['STSB']:.2f} on STS-B test and {scores['mean']:.2f} in "
        "the mean over tasks."
    )


def aggregate(options: argparse.Namespace) -> None:
    """Write the tables and the figure from the finished runs."""
    import yaml

    results = read_results(options.out)
    have = {one.config for one in results}
    order = [one for one in configs(options.presets, options.temperatures) if one in have]
    results = [one for one in results if one.config in order]
    run = yaml.safe_load(next(options.out.glob("*/run.yaml")).read_text(encoding="utf-8"))
    values, seeds = results[0].values, sorted({one.seed for one in results})
    options.results.parent.mkdir(parents=True, exist_ok=True)
    write_csv(results, options.results.with_suffix(".csv"))
    write_dev(options.out, options.results.with_name(options.results.name + "_dev.csv"))
    drawn = options.results.with_name(options.results.name + "_seeds.svg")
    figure(results, order, drawn)
    lines = [
        "# SimCSE: InfoNCE against WEINCE",
        "",
        introduction(run, values, len(seeds)),
        before(options.out),
        "",
    ]
    lines += table(results, order, order[0])
    lines += ["", "Each loss at the temperature that the dev split chose (by mean over seeds):", ""]
    lines += [
        *chosen_table(results, order),
        "",
        f"![seeds]({drawn.name})",
        "",
        origin(options, run, values, seeds),
    ]
    options.results.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="encoder to start from: folder or hub name")
    parser.add_argument("--text", type=Path, help="one sentence a line")
    parser.add_argument("--sts", type=Path, help="tab-separated STS pairs")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/simcse_compare"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("research/results/simcse"), help="name of what is written"
    )
    parser.add_argument("--aggregate-only", action="store_true", help="train nothing")
    parser.add_argument(
        "--presets", nargs="+", default=["infonce", "paper", "released"], help="(default: %(default)s)"
    )
    parser.add_argument(
        "--temperatures", nargs="+", type=float, default=[0.05, 0.02, 0.1], help="(default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5), help="(default: 0 to 4)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: %(default)s)")
    parser.add_argument("--sentences", type=int, help="use the first so many (default: all)")
    parser.add_argument("--batch", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-5, help="(default: %(default)s)")
    parser.add_argument("--eval-every", type=int, default=125, help="(default: %(default)s)")
    parser.add_argument("--precision", default="fp32", help="fp32, tf32 or bf16 (default: %(default)s)")
    parser.add_argument("--graph", action="store_true", help="run steps as CUDA graphs")
    parser.add_argument("--device", default="auto", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if not options.aggregate_only:
        if not (options.model and options.text and options.sts):
            parser.error("--model, --text and --sts are needed")
        run_missing(options)
    aggregate(options)


if __name__ == "__main__":
    main()
