"""Do heads on frozen features rank losses as full trainings did?

For each file of features, heads are trained with the losses for which the archives (runs.jsonl below
research/results) hold full trainings on those images. The heads are compared with the linear accuracy of these
trainings in two ways: by rank agreement, with bootstrap intervals over losses, and by regret, the points of accuracy
lost by choosing the loss whose heads are best. Regret is also shown for four other rules: always InfoNCE at 0.1,
always at 0.2, InfoNCE at the trained temperature nearest to the one that `weince diagnose` names, and a random pick.
A second table uses the features and metric that agree best on the other images, so that the choice does not see the
trainings it is judged by. The last tables show whether heads collapse with the losses whose trainings collapsed.
The heads of research/trap.py, on the embeddings of an InfoNCE encoder, are read from records.jsonl and come first.
Writes NAME.md, NAME.csv and NAME.svg. Heads are kept in NAME_heads/: the same command trains those that are missing.
Files of different images whose names differ only by DATA (cifar10_a.npz, cifar100_a.npz) are features of one kind.
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from weince.lab.configure import LossConfig
from weince.lab.geometry import MOST_CROWDED
from weince.lab.predict import cores, predict
from weince.lab.predict.heads import Outcome, Probe

EXAMPLE = """\
example:
  python research/predict_study.py cifar100=cifar100_infonce.npz cifar10=cifar10_infonce.npz \\
      --results research/results/evidence/predict
"""
RESULTS = Path(__file__).parent / "results"
ARCHIVES = RESULTS / "evidence" / "runs.jsonl", RESULTS / "strong" / "runs.jsonl"
RECORDS = RESULTS / "records.jsonl"
FIRST = "positive first of a batch"
METRICS: dict[str, Callable[[Outcome], float]] = {
    FIRST: lambda o: o.first,
    "positive first of all": lambda o: o.first_of_all,
    "R@1": lambda o: o.r1,
    "vote": lambda o: o.vote,
    "uniformity": lambda o: -o.uniformity,
    "effective rank": lambda o: o.effective_rank,
}
TRAP = {
    "InfoNCE": "infonce 0.5",
    "paper": "paper 0.5",
    "paper, rho gate alone": "paper 0.5, gate rho",
    "paper, AIC gate alone": "paper 0.5, gate aic",
    "paper, gate at a shortfall of 0.02": "paper 0.5, rho0 0.02",
    "paper, gate at a shortfall of 0.05": "paper 0.5, rho0 0.05",
    "paper, gate at a shortfall of 0.1": "paper 0.5, rho0 0.1",
    "paper, beta = 3 instead of fitted": "paper 0.5, beta 3.0",
    "paper, endpoint 1.2": "paper 0.5, endpoint 1.2",
    "paper, negatives only": "paper 0.5, positive softmax",
    "released": "released 0.5",
    "released without its terms": "blend 0.5",
    "InfoNCE + both terms of released": "infonce 0.5, softmax_term 0.5, shortfall_term 0.5",
    "InfoNCE, temperature 0.2": "infonce 0.2",
    "paper, temperature 0.2": "paper 0.2",
}
"""Names in research/trap.py of the losses that were also trained in full, and their names here."""

ALWAYS = ("infonce 0.1", "infonce 0.2")
DIAGNOSED = {data: f"diagnose_{data}_losses/summary.json" for data in ("cifar100", "cifar10")}
"""Records of diagnoses. The first model of each is an encoder trained with InfoNCE at 0.5."""
DRAWS = 2000
FEWEST = 4  # the order of fewer losses means nothing


class Group(NamedTuple):
    """Trainings that differ only by their loss: images, name of their row (encoder and recipe), epochs."""

    data: str
    row: str
    epochs: int

    def __str__(self) -> str:
        return f"{self.row}, {self.epochs} epochs"


def name_of(loss: LossConfig) -> str:
    """A short name, different for different losses."""
    parts = [f"{loss.preset} {loss.temperature:g}" if loss.temperature else loss.preset]
    parts += [f"{key} {value}" for key, value in sorted((loss.tail | loss.options).items())]
    parts += [
        f"{key} {getattr(loss, key):g}" for key in ("softmax_term", "shortfall_term") if getattr(loss, key)
    ]
    return ", ".join(parts)


def _records(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _trained(record: dict[str, Any]) -> tuple[Group, LossConfig]:
    """Group and loss of a training's record. Runs that differ only by precision count as the same loss."""
    run = record["run.yaml"]
    group = Group(run["data"].partition("_")[0], record["run"].partition("/")[0], run["epochs"])
    return group, LossConfig(**{key: value for key, value in run["loss"].items() if key != "engine"})


def _kept(records: Path) -> dict[str, Any]:
    """The content of each file that research/keep.py keeps, by its name."""
    lines = map(json.loads, records.read_text(encoding="utf-8").splitlines())
    return {line["file"]: line["content"] for line in lines}


def outcomes(paths: Sequence[Path]) -> tuple[dict[Group, dict[str, float]], dict[str, LossConfig]]:
    """Mean linear accuracy over seeds by loss, for each group; and the losses by name."""
    found: dict[Group, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    losses = {}
    for record in _records(paths):
        group, loss = _trained(record)
        losses[name_of(loss)] = loss
        found[group][name_of(loss)].append(record["evaluation.json"]["linear_test_mean"])
    means = {
        g: {name: float(np.mean(v)) for name, v in by.items()} for g, by in found.items() if len(by) >= FEWEST
    }
    return means, losses


def crowds(paths: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Share of crowded anchors at the end of training, by images and loss: the mean over runs that logged it."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in _records(paths):
        if "crowded" in record["log.csv"]:
            group, loss = _trained(record)
            found[group.data][name_of(loss)].append(record["log.csv"]["crowded"][-1])
    return {data: {name: float(np.mean(v)) for name, v in by.items()} for data, by in found.items()}


def diagnosed(records: Path) -> dict[str, float]:
    """The temperature that `weince diagnose` names for an encoder trained with InfoNCE at 0.5, by images."""
    kept = _kept(records)
    return {data: kept[name]["models"][0]["link_test"]["tau0"] for data, name in DIAGNOSED.items()}


class Heads(NamedTuple):
    """Heads on one file of features, as means over their seeds.

    Attributes:
        source: What they were trained on, in words.
        data: The images.
        predicted: The metrics, by metric and loss; higher is better.
        crowded: Share of crowded items, by loss.
    """

    source: str
    data: str
    predicted: dict[str, dict[str, float]]
    crowded: dict[str, float]

    @property
    def kind(self) -> str:
        """The kind of features: the source without the name of the images."""
        return self.source.replace(self.data, "").strip("_")


class Agreement(NamedTuple):
    """Spearman's and Kendall's coefficients, each with a 95 % interval over resampled losses."""

    spearman: float
    spearman_interval: tuple[float, float]
    kendall: float
    kendall_interval: tuple[float, float]


def agreement(predicted: Sequence[float], reached: Sequence[float]) -> Agreement:
    """Agreement of two orders of the same losses. Resamples in which all values are equal are left out."""
    values = np.array([predicted, reached])
    rows = np.random.default_rng(0).integers(values.shape[1], size=(DRAWS, values.shape[1]))
    drawn = values[:, rows]
    x, y = drawn[:, (np.ptp(drawn, axis=2) > 0).all(axis=0)]
    whole = values[:, None]
    found = []
    for coefficient in (spearman, kendall):
        low, high = np.quantile(coefficient(x, y), [0.025, 0.975])
        found += [float(coefficient(*whole)[0]), (float(low), float(high))]
    return Agreement(*found)


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's coefficient of each row of (draws, losses)."""
    a, b = (
        ranks - ranks.mean(axis=1, keepdims=True)
        for ranks in (stats.rankdata(x, axis=1), stats.rankdata(y, axis=1))
    )
    return (a * b).sum(axis=1) / np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))


def kendall(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Kendall's tau-b of each row of (draws, losses)."""
    a, b = (np.sign(z[:, :, None] - z[:, None, :]) for z in (x, y))
    return (a * b).sum(axis=(1, 2)) / np.sqrt((a**2).sum(axis=(1, 2)) * (b**2).sum(axis=(1, 2)))


def trap_heads(records: Path) -> Heads:
    """The heads of research/trap.py on the embeddings of an InfoNCE encoder, for losses also trained in full."""
    header, *rows = _kept(records)["evidence/trap.csv"]
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in (dict(zip(header, row, strict=True)) for row in rows):
        for key in ("first", "crowded"):
            if row["loss"] in TRAP:
                found[key][TRAP[row["loss"]]].append(float(row[key]))
    first, crowded = (
        {name: float(np.mean(values)) for name, values in found[key].items()} for key in ("first", "crowded")
    )
    return Heads("embeddings of InfoNCE at 0.5 (trap)", "cifar100", {FIRST: first}, crowded)


class Row(NamedTuple):
    """How heads, judged by one metric, agree with the trainings of their losses."""

    heads: Heads
    group: Group
    metric: str
    losses: int
    ranks: Agreement
    lost: dict[str, float]

    def cells(self) -> list[str]:
        ranks = self.ranks
        agreeing = (
            _with(ranks.spearman, ranks.spearman_interval),
            _with(ranks.kendall, ranks.kendall_interval),
        )
        lost = ("—" if np.isnan(x) else f"{x:.1f}" for x in self.lost.values())
        return [str(self.group), self.heads.source, self.metric, str(self.losses), *agreeing, *lost]


def compared(heads: Heads, group: Group, reached: dict[str, float], tau0: float) -> list[Row]:
    """One row for each metric; no row if too few losses were trained."""
    rows = []
    for metric, predicted in heads.predicted.items():
        both = [name for name in reached if name in predicted]
        if len(both) >= FEWEST:
            found = agreement([predicted[name] for name in both], [reached[name] for name in both])
            rows.append(Row(heads, group, metric, len(both), found, regrets(predicted, reached, tau0)))
    return rows


def regrets(predicted: dict[str, float], reached: dict[str, float], tau0: float) -> dict[str, float]:
    """Points lost against the best loss of a group, by rule; NaN if the group lacks the loss of a rule."""
    best = max(reached.values())
    chosen = max((name for name in reached if name in predicted), key=lambda name: predicted[name])
    return {
        "heads": best - reached[chosen],
        **{name: best - reached.get(name, float("nan")) for name in ALWAYS},
        "diagnose": best - reached[nearest(reached, tau0)],
        "random": best - float(np.mean(list(reached.values()))),
    }


def nearest(reached: dict[str, float], tau0: float) -> str:
    """Plain InfoNCE at the trained temperature nearest to `tau0`, by ratio."""
    temperatures = {
        name: float(name.split()[1]) for name in reached if name.startswith("infonce ") and "," not in name
    }
    return min(temperatures, key=lambda name: abs(np.log(temperatures[name] / tau0)))


def left_out(rows: Sequence[Row]) -> list[Row]:
    """For each group, the row of the features and metric that agree best with trainings on other images."""
    kinds = defaultdict(set)
    for row in rows:
        kinds[row.heads.kind].add(row.heads.data)
    usable = [row for row in rows if len(kinds[row.heads.kind]) > 1]
    found = []
    for data in dict.fromkeys(row.heads.data for row in usable):
        elsewhere = defaultdict(list)
        for row in usable:
            if row.heads.data != data:
                elsewhere[row.heads.kind, row.metric].append(row.ranks.spearman)
        best = max(elsewhere, key=lambda probe: float(np.mean(elsewhere[probe])))
        found += [row for row in usable if row.heads.data == data and (row.heads.kind, row.metric) == best]
    return found


def _table(header: Sequence[str], lines: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(line)} |" for line in lines),
    ]


HEADER = (
    "trainings", "heads on", "judged by", "losses", "Spearman (95 %)", "Kendall (95 %)", "regret of heads",
    *(f"always {name}" for name in ALWAYS), "what diagnose names", "random",
)  # fmt: skip


def markdown(
    rows: Sequence[Row],
    found: Sequence[Heads],
    trained: dict[str, dict[str, float]],
    about: str,
    figure: str,
) -> str:
    lines = [
        "# Do heads on frozen features rank losses as full trainings did?",
        "",
        about,
        "",
        *_table(HEADER, [row.cells() for row in rows]),
        "",
        "Regret: points of linear accuracy lost against the best loss of the same trainings. Intervals resample "
        "losses.",
        "",
        f"![heads against trainings]({figure})",
        "",
    ]
    if judged := left_out(rows):
        lines += [
            "## Leaving images out",
            "",
            "Features and metric are those that agree best, by mean Spearman, with the trainings on other images.",
            "",
            *_table(HEADER, [row.cells() for row in judged]),
            "",
        ]
    return "\n".join([*lines, *collapses(found, trained)])


def collapses(found: Sequence[Heads], trained: dict[str, dict[str, float]]) -> list[str]:
    """Lines of the page: whether heads collapse where trainings did, and the shares of crowded anchors."""
    alarms = []
    for heads in found:
        known = trained.get(heads.data, {})
        by_truth: dict[bool, list[float]] = {True: [], False: []}
        for name in known.keys() & heads.crowded.keys():
            by_truth[known[name] > MOST_CROWDED].append(heads.crowded[name])
        bad, good = (np.array(by_truth[truth]) for truth in (True, False))
        shares = [f"{int((crowds > MOST_CROWDED).sum())} of {len(crowds)}" for crowds in (bad, good)]
        shares.append(f"{more_often(bad, good):.2f}" if len(bad) and len(good) else "—")
        paper = heads.crowded.get("paper 0.5")
        alarms.append([heads.source, *shares, "—" if paper is None else _percent(paper)])
    names = sorted({name for heads in found for name in heads.crowded})
    columns = [("trained on " + data, by) for data, by in trained.items()]
    columns += [("heads on " + heads.source, heads.crowded) for heads in found]
    cells = [[name, *(_percent(by[name]) if name in by else "" for _, by in columns)] for name in names]
    return [
        "## Do heads collapse where trainings did?",
        "",
        f"A loss collapses if more than {100 * MOST_CROWDED:g} % of the anchors are crowded on average: at the end "
        "of trainings, where they logged it, and on held-out items of heads.",
        "",
        *_table(
            (
                "heads on",
                "of losses that collapsed, flagged",
                "false alarms",
                "chance that a loss that collapsed crowds heads more than one that did not",
                "`paper` at 0.5, %",
            ),
            alarms,
        ),
        "",
        "## Crowded anchors, %",
        "",
        *_table(("loss", *(title for title, _ in columns)), cells),
        "",
    ]


def more_often(first: np.ndarray, second: np.ndarray) -> float:
    """The chance that a value of the first is larger than one of the second; ties count half."""
    gap = np.subtract.outer(first, second)
    return float(((gap > 0) + 0.5 * (gap == 0)).mean())


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def draw(found: Sequence[Heads], reached: dict[Group, dict[str, float]], path: Path) -> None:
    """Accuracy over positives first: a panel for each group of trainings, a colour for each kind of features."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(heads.kind for heads in found))
    panels = [
        (group, by, shown)
        for group, by in reached.items()
        if (
            shown := [
                h for h in found if h.data == group.data and len(by.keys() & h.crowded.keys()) >= FEWEST
            ]
        )
    ]
    rows = -(-len(panels) // 2)
    with mpl.rc_context({"svg.hashsalt": "weince", "font.size": 8}):
        figure = Figure(figsize=(7.5, 2.6 * rows + 0.5), layout="constrained")
        for place, (group, by, shown) in enumerate(panels, 1):
            axes = figure.add_subplot(rows, 2, place)
            for heads in shown:
                predicted = heads.predicted[FIRST]
                names = [name for name in by if name in predicted]
                edges = ["black" if name in ALWAYS else "none" for name in names]
                axes.scatter(
                    [100 * predicted[name] for name in names], [by[name] for name in names], s=18,
                    c=COLOURS[kinds.index(heads.kind)], edgecolors=edges, linewidths=0.8,
                )  # fmt: skip
            axes.set_title(str(group), fontsize=8)
            axes.set(xlabel="positive first, % of held-out items", ylabel="linear accuracy, %")
            axes.spines[["top", "right"]].set_visible(False)
        dots = [mpl.lines.Line2D([], [], ls="", marker="o", ms=4, color=c) for c in COLOURS[: len(kinds)]]
        figure.legend(dots, kinds, frameon=False, ncols=2, loc="outside lower center",
                      title="heads on (ringed: InfoNCE at 0.1 and 0.2)")  # fmt: skip
        figure.savefig(path, metadata={"Date": None})


def train(data: str, file: Path, options: argparse.Namespace, losses: dict[str, LossConfig]) -> Heads:
    """Train heads with these losses on a file of features."""
    folder = options.results.with_name(f"{options.results.name}_heads") / file.stem
    predict(file, folder, losses=losses, seeds=options.seeds, steps=options.steps, jobs=options.jobs or cores(),
            probe=Probe(rate=options.rate, noise=options.noise), command="research/predict_study.py")  # fmt: skip
    heads = read_heads(folder, options.seeds)

    def means(value: Callable[[Outcome], float]) -> dict[str, float]:
        return {name: float(np.mean([value(o) for o in heads[name]])) for name in losses}

    predicted = {metric: means(value) for metric, value in METRICS.items()}
    finite = {metric: by for metric, by in predicted.items() if np.isfinite(list(by.values())).all()}
    return Heads(file.stem, data, finite, means(lambda o: o.crowded))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("features", nargs="*", metavar="DATA=FILE", help="features, and of which images")
    parser.add_argument("--steps", type=int, default=300, help="of each head (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="of each head (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.3, help="on the features (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each core)")
    parser.add_argument(
        "--archives", type=Path, nargs="+", default=ARCHIVES, help="trainings (default: evidence and strong)"
    )
    parser.add_argument("--results", type=Path, default=Path("predict"), help="name of what is written")
    options = parser.parse_args(arguments)
    reached, losses = outcomes(options.archives)
    found = [trap_heads(RECORDS)]
    for item in options.features:
        data, equals, file = item.partition("=")
        wanted = {name: losses[name] for group, by in reached.items() if group.data == data for name in by}
        if not equals or not wanted:
            known = ", ".join(sorted({group.data for group in reached}))
            parser.error(f"want DATA=FILE, where DATA is of {known}; got {item}")
        found.append(train(data, Path(file), options, wanted))
    pairs = [
        (heads, group, by) for heads in found for group, by in reached.items() if group.data == heads.data
    ]
    named = diagnosed(RECORDS)
    rows = [row for heads, group, by in pairs for row in compared(heads, group, by, named[group.data])]
    about = (
        f"Heads of {options.steps} steps (Adam {options.rate:g}, noise {options.noise:g}, {len(options.seeds)} "
        "seeds) and those of research/trap.py, against the linear accuracy of full trainings. Made by "
        "`python research/predict_study.py`."
    )
    figure = options.results.with_suffix(".svg")
    draw(found, reached, figure)
    text = markdown(rows, found, crowds(options.archives), about, figure.name)
    options.results.with_suffix(".md").write_text(text, encoding="utf-8")
    with options.results.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["heads", "trainings", "loss", "linear", "metric", "predicted"])
        writer.writerows(
            [heads.source, group, name, by[name], metric, predicted[name]]
            for heads, group, by in pairs
            for metric, predicted in heads.predicted.items()
            for name in by
            if name in predicted
        )
    print(text)


def _with(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def read_heads(folder: Path, seeds: Sequence[int]) -> dict[str, list[Outcome]]:
    """Outcomes of these seeds by loss, from a folder of `weince predict`."""
    found: dict[str, dict[int, Outcome]] = defaultdict(dict)
    for head in json.loads((folder / "heads.json").read_text(encoding="utf-8"))["heads"]:
        values = [float("nan") if head[key] is None else head[key] for key in Outcome._fields]
        found[head["name"]][head["seed"]] = Outcome(*values)
    return {name: [by[seed] for seed in seeds] for name, by in found.items()}


if __name__ == "__main__":
    main()
