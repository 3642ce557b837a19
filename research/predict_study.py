"""Do heads on frozen features rank losses as full trainings did?

For each file of features, heads are trained with the losses for which the archive holds trainings on those images
(research/results/evidence/runs.jsonl), and compared with the linear accuracy that these reached: rank agreement with
bootstrap intervals over losses, and the regret, in points of accuracy, of training with the loss whose heads are
best, beside always InfoNCE at 0.1, always at 0.2, and a random pick. Also whether heads of losses that collapsed
crowd.
Writes NAME.md and NAME.csv. Heads are kept in NAME_heads/, and the same command trains those that are missing.
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from weince.lab.configure import LossConfig
from weince.lab.predict import cores, predict
from weince.lab.predict.heads import Outcome, Probe

EXAMPLE = """\
example:
  python research/predict_study.py cifar100=infonce_0.5.npz cifar10=infonce_0.5_cifar10.npz \\
      --results research/results/evidence/predict
"""
ARCHIVE = Path(__file__).parent / "results" / "evidence" / "runs.jsonl"
METRICS: dict[str, Callable[[Outcome], float]] = {
    "positive first of a batch": lambda o: o.first,
    "positive first of all": lambda o: o.first_of_all,
    "R@1": lambda o: o.r1,
    "vote": lambda o: o.vote,
    "uniformity": lambda o: -o.uniformity,
    "effective rank": lambda o: o.effective_rank,
}
ALWAYS = ("infonce 0.1", "infonce 0.2")
DRAWS = 2000


class Group(NamedTuple):
    """Trainings that differ by their loss alone: images, encoder, its width and epochs."""

    data: str
    width: int
    epochs: int

    def __str__(self) -> str:
        return f"{self.data}, {self.epochs} epochs" + ("" if self.width == 64 else f", width {self.width}")


def name_of(loss: LossConfig) -> str:
    """Short, and different for different losses."""
    parts = [f"{loss.preset} {loss.temperature:g}" if loss.temperature else loss.preset]
    parts += [f"{key} {value}" for key, value in sorted(loss.tail.items())]
    parts += [
        f"{key} {getattr(loss, key):g}" for key in ("softmax_term", "shortfall_term") if getattr(loss, key)
    ]
    return ", ".join(parts)


def outcomes(path: Path) -> tuple[dict[Group, dict[str, float]], dict[str, LossConfig]]:
    """Mean linear accuracy over seeds by loss, for each group; and the losses."""
    found: dict[Group, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    losses = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        run = record["run.yaml"]
        given = {key: value for key, value in run["loss"].items() if key != "engine"}
        loss = LossConfig(**given)
        # Precision is no setting of a loss; where a loss was run in two, both count.
        group = Group(run["data"].partition("_")[0], run.get("width") or 64, run["epochs"])
        losses[name_of(loss)] = loss
        found[group][name_of(loss)].append(record["evaluation.json"]["linear_test_mean"])
    means = {g: {name: float(np.mean(v)) for name, v in by.items()} for g, by in found.items()}
    return means, losses


class Agreement(NamedTuple):
    """Spearman's and Kendall's coefficients, each with a 95 % interval over resampled losses."""

    spearman: float
    spearman_interval: tuple[float, float]
    kendall: float
    kendall_interval: tuple[float, float]


def agreement(predicted: Sequence[float], reached: Sequence[float], *, seed: int = 0) -> Agreement:
    x, y = np.asarray(predicted), np.asarray(reached)
    rng = np.random.default_rng(seed)
    drawn = []
    while len(drawn) < DRAWS:
        rows = rng.integers(len(x), size=len(x))
        if np.ptp(x[rows]) > 0 and np.ptp(y[rows]) > 0:  # else there is no rank to compare
            drawn.append((_spearman(x[rows], y[rows]), stats.kendalltau(x[rows], y[rows]).statistic))
    low, high = np.quantile(np.array(drawn), [0.025, 0.975], axis=0)
    return Agreement(
        _spearman(x, y),
        (float(low[0]), float(high[0])),
        float(stats.kendalltau(x, y).statistic),
        (float(low[1]), float(high[1])),
    )


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1])


def regrets(predicted: dict[str, float], reached: dict[str, float]) -> dict[str, float]:
    """Points lost against the best loss of a group, by rule; NaN where the group lacks the loss."""
    best = max(reached.values())
    chosen = max(reached, key=lambda name: predicted[name])
    return {
        "heads": best - reached[chosen],
        **{name: best - reached.get(name, float("nan")) for name in ALWAYS},
        "random": best - float(np.mean(list(reached.values()))),
    }


def markdown(rows: list[list[str]], crowds: list[list[str]], about: str) -> str:
    def table(header: Sequence[str], lines: list[list[str]]) -> list[str]:
        rule = f"|{'---|' * len(header)}"
        return [f"| {' | '.join(header)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)]

    header = ("trainings", "losses", "heads judged by", "Spearman (95 %)", "Kendall (95 %)", "regret of heads",
              *(f"always {name}" for name in ALWAYS), "random")  # fmt: skip
    return "\n".join(
        [
            "# Do heads on frozen features rank losses as full trainings did?",
            "",
            about,
            "",
            *table(header, rows),
            "",
            "Regret: points of linear accuracy lost against the best loss of the same trainings.",
            "",
            "## Crowds",
            "",
            *table(("features", "loss", "crowded heads, %", "effective rank"), crowds),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("features", nargs="+", metavar="DATA=FILE", help="features, and of which images")
    parser.add_argument("--steps", type=int, default=300, help="of each head (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="of each head (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.3, help="on the features (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each core)")
    parser.add_argument("--archive", type=Path, default=ARCHIVE, help="trainings (default: the evidence's)")
    parser.add_argument("--source", default="the features given", help="what the features are, in words")
    parser.add_argument("--results", type=Path, default=Path("predict"), help="name of what is written")
    options = parser.parse_args(arguments)
    wrong = [item for item in options.features if "=" not in item]
    if wrong:
        parser.error(f"features are given as DATA=FILE; got {wrong[0]}")
    reached, losses = outcomes(options.archive)
    probe = Probe(rate=options.rate, noise=options.noise)
    rows, crowds, lines = [], [], []
    for item in options.features:
        data, _, file = item.partition("=")
        groups = {group: by for group, by in reached.items() if group.data == data and len(by) > 2}
        if not groups:
            parser.error(
                f"the archive has no trainings on {data}; it has {', '.join({g.data for g in reached})}"
            )
        wanted = {name: losses[name] for by in groups.values() for name in by}
        folder = options.results.with_name(f"{options.results.name}_heads") / Path(file).stem
        predict(file, folder, losses=wanted, seeds=options.seeds, steps=options.steps, probe=probe,
                jobs=options.jobs or cores(), command="research/predict_study.py")  # fmt: skip
        heads = read_heads(folder, options.seeds)
        for group, by in groups.items():
            for metric, value in METRICS.items():
                predicted = {name: float(np.mean([value(o) for o in heads[name]])) for name in by}
                if not np.isfinite(list(predicted.values())).all():
                    continue
                found = agreement([predicted[n] for n in by], list(by.values()))
                lost = regrets(predicted, by)
                rows.append([
                    str(group), str(len(by)), metric, _with(found.spearman, found.spearman_interval),
                    _with(found.kendall, found.kendall_interval), *(f"{x:.1f}" for x in lost.values()),
                ])  # fmt: skip
            for name in by:
                figures = [float(np.mean([f(o) for o in heads[name]])) for f in METRICS.values()]
                lines.append([Path(file).stem, str(group), name, by[name], *figures])
        for name in wanted:
            crowd, rank = (100 * np.mean([o.crowded for o in heads[name]]),
                           np.mean([o.effective_rank for o in heads[name]]))  # fmt: skip
            crowds.append([Path(file).stem, name, f"{crowd:.1f}", f"{rank:.1f}"])
    about = (
        f"Heads of {options.steps} steps (Adam {options.rate:g}, noise {options.noise:g}, "
        f"{len(options.seeds)} seeds) on {options.source}, against the linear accuracy of full trainings. Made by "
        "`python research/predict_study.py`."
    )
    text = markdown(rows, crowds, about)
    options.results.with_suffix(".md").write_text(text, encoding="utf-8")
    with options.results.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["features", "trainings", "loss", "linear", *METRICS])
        writer.writerows(lines)
    print(text)


def _with(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def read_heads(folder: Path, seeds: Sequence[int]) -> dict[str, list[Outcome]]:
    """Outcomes of the seeds by loss, from a folder of `weince predict`."""
    found: dict[str, dict[int, Outcome]] = defaultdict(dict)
    for head in json.loads((folder / "heads.json").read_text(encoding="utf-8"))["heads"]:
        values = [float("nan") if head[key] is None else head[key] for key in Outcome._fields]
        found[head["name"]][head["seed"]] = Outcome(*values)
    return {name: [by[seed] for seed in seeds] for name, by in found.items()}


if __name__ == "__main__":
    main()
