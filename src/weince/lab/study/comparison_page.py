"""Write a comparison as files: an HTML page, ``compare.md``, ``compare.csv`` and ``compare.json``."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from weince.intervals import half_text, p_text
from weince.lab.study.advice import Open, advise
from weince.lab.study.blocks import (
    Document,
    Numbers,
    PageCell,
    PageSection,
    capital,
    drawn,
    markdown_list,
    markdown_table,
    number,
    numbers,
    plain,
    text_or_dash,
    write,
)
from weince.lab.study.comparison import Comparison
from weince.lab.study.cost import Cost
from weince.lab.study.differences import LossDifference
from weince.lab.study.exports import as_json, save_csv
from weince.lab.study.search_space import in_words
from weince.lab.study.statistics import Done, LossLine, Outcome

if TYPE_CHECKING:
    from weince.diagnose.style import Figure

COSTS = {
    "loss_ms": ("loss, ms", 2),
    "loss_mib": ("loss, peak MiB", 1),
    "step_ms": ("step, ms", 1),
    "step_mib": ("step, peak MiB", 0),
}
"""Column and digits of each figure of a cost."""


@dataclass(frozen=True)
class ComparisonPage:
    """Everything that the files of a comparison show.

    Attributes:
        comparison: What is compared.
        outcome: What its runs have shown.
        lacks: What is missing.
        failed: Why runs failed, by their names.
        command: The command that wrote the page.
    """

    comparison: Comparison
    outcome: Outcome
    lacks: Open
    failed: Mapping[str, str]
    command: str

    @cached_property
    def advice(self) -> tuple[str, str]:
        return advise(self.comparison, self.outcome, self.lacks)

    @property
    def missing(self) -> list[str]:
        return [*self.lacks.missing, *self.lacks.unchosen]

    @property
    def shown(self) -> list[str]:
        """The figures that a loss has."""
        lines = self.outcome.lines
        return [f for f in self.comparison.task.figures if any(f in line.measured for line in lines)]

    def save(self, folder: Path) -> Path:
        """Write ``compare.csv``, ``compare.json``, ``compare.md``, figures and ``index.html``; returns the last."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in (folder / "figures").glob("*.*g"):  # of an earlier call; it may not be drawn again
            old.unlink()
        from weince.lab.study.figures import draw_comparison  # here, since matplotlib takes a while

        figures = draw_comparison(self.comparison, self.outcome, folder / "figures")
        content = as_json(self.comparison, self.outcome)
        told = {"advice": self.advice, "facts": self.facts, "missing": self.missing, "failed": self.failed}
        write(folder / "compare.json", json.dumps({**content, **told}, indent=1) + "\n")
        save_csv(folder / "compare.csv", content["losses"])
        write(folder / "compare.md", self.markdown())
        write(folder / "index.html", self.document(figures).html())
        return folder / "index.html"

    @cached_property
    def facts(self) -> dict[str, str]:
        comparison, outcome = self.comparison, self.outcome
        records = [result.record for result in outcome.done]

        def of(key: str) -> str:
            return "; ".join(sorted({str(record["made"][key]) for record in records}))

        epochs = sorted({result.epochs for result in outcome.final})
        short = "" if comparison.try_epochs is None else f", each of {comparison.try_epochs} epochs"
        facts = {
            "configuration": comparison.name,
            "epochs": ", ".join(map(str, epochs)) or "nothing yet",
            "seeds": ", ".join(map(str, comparison.seeds)),
            "tuning budget": f"{outcome.budget}{short}; seed {comparison.seeds[0]}",
            "chosen by": f"{comparison.task.validation}, never by a test figure",
            "data": "; ".join(sorted({f"{record['data']} {record['fingerprint']}" for record in records})),
            "hardware": of("hardware"),
            "commit": of("commit"),
            "command": self.command,
        }
        if comparison.set:
            listed = ", ".join(f"{name} {value}" for name, value in comparison.set.items())
            facts["settings of all runs"] = listed
        return facts

    def notes(self) -> list[str]:
        """How to read the leaderboard."""
        judgement, baseline = self.outcome.judgement, self.comparison.baseline
        means = "Figures are means over encoders, one per seed, ± half the width of a 95 % t-interval."
        if not judgement.comparisons:
            shared = any(difference.n > 1 for of in judgement.judged.values() for difference in of.values())
            why = (
                "all seeds show exactly the same differences, so they give no spread to judge by"
                if shared
                else f"that takes two seeds or more that {baseline} and another loss share"
            )
            return [means, f"No difference is tested here: {why}."]
        notes = [
            means,
            f"A difference is the mean over the seeds that a loss and {baseline} share. {judgement.note}",
            f"better, worse: p is below 0.05 after Holm's correction for all {judgement.comparisons} comparisons "
            "here (losses x figures). If all losses were equal, the chance of any such word here would be at most "
            "5 %.",
            f"level: the 95 % interval of the difference lies within ± {self.comparison.level_within:g} points, a "
            "difference that does not matter. cannot tell: neither better, worse nor level.",
        ]
        reach = ", ".join(
            f"{smallest:.2f} in {self.comparison.task.figures[figure].words} "
            f"({judgement.spreads[figure].deviation:.2f})"
            for figure, smallest in self.outcome.smallest.items()
        )
        if reach:
            notes.append(
                f"In 8 of 10 cases these seeds find a true difference of {reach}; in brackets, the standard "
                "deviation of a difference. This holds at the strictest step of Holm's correction, the first."
            )
        return notes

    def document(self, figures: "Sequence[Figure]") -> Document:
        """The HTML page."""
        comparison, outcome = self.comparison, self.outcome
        lines = outcome.lines
        equally = len({line.tries for line in lines}) == 1
        tuned = "equally tuned" if equally else "tuned by unequal numbers of tries"
        opening = f"{len(lines)} losses, {tuned}, compared with {comparison.baseline} seed by seed."
        heat, judged = self._heat(), any(line.judged for line in lines)
        lacking = [*self.missing, *(f"failed: {why}" for why in self.failed.values())]
        told = Markup(
            'Point at a dot to see its run; all runs are listed <a href="#runs">below</a>. Tuning changes every '
            "loss, so compare losses at the same number of tries."
        )
        sections = [
            PageSection("leaderboard", "Leaderboard", tables=[self._leaderboard()], notes=self.notes()),
            PageSection("missing", "What is missing", notes=lacking) if lacking else None,
            PageSection("drawn", "Seeds, time and tuning", intro=told, figures=drawn(figures)),
            PageSection("temperatures", "Loss by temperature", tables=[heat]) if heat else None,
            PageSection("differences", "Every comparison", tables=[self._differences()]) if judged else None,
            self._costs(),
            PageSection("tries", "Every try", tables=[self._tries()]),
            PageSection(
                "runs", "The runs behind the dots", tables=[self._runs()], folded=f"{len(outcome.done)} runs"
            ),
            PageSection("made", "How it was made", facts=self.facts),
        ]
        title = f"Which loss? {comparison.name}"
        header = [("soft", "1 loss so far." if len(lines) == 1 else opening)]
        return Document(title, header, [part for part in sections if part], self.advice)

    def _leaderboard(self) -> Numbers:
        task, shown = self.comparison.task, self.shown
        names = [task.figures[figure].short for figure in shown]
        rows = []
        for line in self.outcome.lines:
            base = line.loss == self.comparison.baseline
            rows.append(
                [
                    Markup('{}<span class="word baseline">baseline</span>').format(line.loss)
                    if base
                    else line.loss,
                    line.words or "not chosen yet",
                    *(_mean(line, f) + (_word(line.judged[f]) if f in line.judged else "") for f in shown),
                    f"{_seeds(line)}",
                    f"{line.tries} of {len(self.comparison.losses[line.loss])}",
                ]
            )
        caption = f"Test figures, {task.unit}, the best {task.figures[task.main].words} first"
        header = ["loss", "settings chosen", *names, "seeds", "tries"]
        return numbers("Leaderboard", caption, header, rows, {*names, "seeds", "tries"})

    def _heat(self) -> Numbers | None:
        """Validation figures of tries by temperature, a row for each loss that has one; None if no loss has."""
        rows: dict[str, dict[float, tuple[float, bool]]] = {}
        task = self.comparison.task
        for tried in self.outcome.tries:
            value = tried.figure(task.main, "validation")
            if tried.temperature is not None and math.isfinite(value):
                row = rows.setdefault(tried.loss, {})
                if tried.temperature not in row or value > row[tried.temperature][0]:
                    row[tried.temperature] = value, tried.chosen
        values = [value for row in rows.values() for value, _ in row.values()]
        if not values:
            return None
        low, reach = min(values), (max(values) - min(values)) or 1.0
        temperatures = sorted({temperature for row in rows.values() for temperature in row})

        def cell(value: float, chosen: bool) -> PageCell:
            dark = f'style="--dark: {(value - low) / reach:.3f}"'
            return PageCell(f"{value:.2f}", Markup('class="chosen" ' * chosen + dark))

        empty = PageCell("·", Markup('class="empty"'))
        header = [f"{temperature:g}" for temperature in temperatures]
        cells = [
            [PageCell(loss), *(cell(*row[t]) if t in row else empty for t in temperatures)]
            for loss, row in rows.items()
        ]
        caption = (
            f"{capital(task.validation)} of the tries, {task.unit}; the choice is framed, a dot was not tried"
        )
        return Numbers("Loss by temperature", caption, ["loss", *header], cells, header, "heat")

    def _differences(self) -> Numbers:
        figures = self.comparison.task.figures
        rows = [
            [
                line.loss,
                figures[figure].words,
                _word(difference) + (f": {difference.why}" if difference.why else ""),
                _difference(difference),
                p_text(difference.p_value),
                p_text(difference.holm),
                f"{difference.n}",
            ]
            for line in self.outcome.lines
            for figure, difference in line.judged.items()
        ]
        header = ["loss", "figure", "verdict", "difference", "p", "p after Holm", "pairs"]
        caption = f"Difference from {self.comparison.baseline}, points"
        return numbers("Every comparison", caption, header, rows, header[3:])

    def _costs(self) -> PageSection:
        lines = self.outcome.lines
        timed = [line for line in lines if line.cost]
        machines = sorted({_measured_on(line.cost) for line in lines if line.cost})
        epochs = max((result.epochs for result in self.outcome.final), default=0)
        columns = [name for name, _ in COSTS.values()] if timed else []
        taken = "a run alone, s" if timed else "a run as logged, s"
        header = ["loss", *columns, taken, "crowded at the end, %"]
        numeric = set(header[1:])
        header += ["measured on"] if len(machines) > 1 else []
        rows = []
        for line in lines:
            cost = line.cost or {}
            row = [line.loss]
            row += [number(cost.get(key), digits) for key, (_, digits) in COSTS.items()] if timed else []
            row.append(number(cost.get("epoch_seconds"), 1, epochs) if timed else number(line.seconds, 1))
            row.append(number(line.crowded, 1, 100))
            row += [_measured_on(cost) if cost else "—"] if len(machines) > 1 else []
            rows.append(row)
        caption, note = (
            "Training; the losses were not timed alone",
            "The times are as logged; several runs may have shared a device",
        )
        if timed:
            caption = "Forward and backward of the loss alone; a whole training step"
            caption += f"; {machines[0]}" if len(machines) == 1 else ""
            note = (
                "Each loss was timed alone, after the runs; other programs on the machine can slow it. A run is "
                f"{epochs} epochs of the timed steps"
            )
        outro = (
            f"{note}. Crowded anchors have another item next to them in the last batch: above 5 % the embeddings "
            "collapse."
        )
        table = numbers("What each loss costs", caption, header, rows, numeric)
        return PageSection("cost", "What each loss costs", tables=[table], outro=outro)

    def _tries(self) -> Numbers:
        task = self.comparison.task
        rows = [
            [
                tried.loss,
                tried.words,
                f"{tried.done.epochs}" if tried.done else "—",
                number(tried.figure(task.main, "validation")),
                number(tried.figure(task.main)),
                "chosen" * tried.chosen,
            ]
            for tried in self.outcome.tries
        ]
        caption = f"{capital(task.figures[task.main].words)}, {task.unit}; validation chooses"
        header = ["loss", "settings", "epochs", "validation", "test", "chosen"]
        return numbers("Every try", caption, header, rows, header[2:5])

    def _runs(self) -> Numbers:
        task, shown = self.comparison.task, self.shown
        names = [task.figures[figure].short for figure in shown]
        rows = [
            [
                result.run.loss,
                self._settings(result),
                f"{result.run.seed}",
                f"{result.epochs}",
                *(number(result.figure(figure)) for figure in shown),
                number(result.figure(task.main, "validation")),
                "figures" if result.run.name in self.outcome.counted else "the choice",
                Markup("<code>{}</code>").format(result.run.name),
            ]
            for result in self.outcome.done
        ]
        header = ["loss", "settings", "seed", "epochs", *names, "validation", "used for", "record"]
        return numbers("The runs behind the dots", "", header, rows, header[2:-2])

    def _settings(self, result: Done) -> str:
        return in_words(self.comparison.losses[result.run.loss][result.run.try_number])

    def markdown(self) -> str:
        """The advice and the leaderboard in Markdown, small enough to keep beside the records."""
        figures, shown = self.comparison.task.figures, self.shown
        names = [figures[figure].short for figure in shown]
        header = [
            "loss",
            "settings",
            "seeds",
            *(part for name in names for part in (name, f"{name}, difference")),
        ]
        rows = [
            [line.loss, line.words, f"{_seeds(line)}"]
            + [cell for f in shown for cell in (_mean(line, f), self._difference_cell(line, f))]
            for line in self.outcome.lines
        ]
        parts = [f"# Which loss? {plain(self.comparison.name)}", "", *map(plain, self.advice), ""]
        parts += [*markdown_table(header, rows, {"seeds", *names}), "", *markdown_list(self.notes())]
        missing = [*self.missing, *(f"failed: {why}" for why in self.failed.values())]
        parts += ["", "## What is missing", "", *markdown_list(missing)] if missing else []
        main = self.comparison.task.main
        tries = [
            (tried.loss, tried.words, number(tried.figure(main, "validation")), "chosen" * tried.chosen)
            for tried in self.outcome.tries
        ]
        parts += ["", "## Every try", ""]
        parts += markdown_table(["loss", "settings", "validation", ""], tries, {"validation"})
        timed = [(line.loss, line.cost) for line in self.outcome.lines if line.cost]
        if timed:
            columns = [name for name, _ in COSTS.values()]
            costs = [
                [loss, *(number(cost[k], digits) for k, (_, digits) in COSTS.items()), _measured_on(cost)]
                for loss, cost in timed
            ]
            table = markdown_table(["loss", *columns, "measured on"], costs, columns)
            parts += ["", "## What each loss costs", "", *table]
        facts = [f"- {name}: {plain(value)}" for name, value in self.facts.items()]
        return "\n".join([*parts, "", "## How it was made", "", *facts]) + "\n"

    def _difference_cell(self, line: LossLine, figure: str) -> str:
        """The difference of a loss, its number of pairs if that is not its seeds, and its verdict."""
        if line.loss == self.comparison.baseline:
            return "baseline"
        if figure not in line.judged:
            return "—"
        difference = line.judged[figure]
        fewer = f" (n = {difference.n})" if difference.n != line.measured[figure].n else ""
        return f"{_difference(difference)}{fewer}, {difference.word}"


def _seeds(line: LossLine) -> int:
    return max((mean.n for mean in line.measured.values()), default=0)


def _mean(line: LossLine, figure: str) -> str:
    """A mean and its interval, and the number of seeds if the loss has more: older records may lack a figure."""
    mean = line.measured.get(figure)
    fewer = f" (n = {mean.n})" if mean is not None and mean.n != _seeds(line) else ""
    return f"{text_or_dash(mean, 2)}{fewer}"


def _word(difference: LossDifference) -> Markup:
    return Markup('<span class="word {}">{}</span>').format(
        difference.word.replace(" ", "-"), difference.word
    )


def _difference(difference: LossDifference) -> str:
    return "—" if math.isnan(difference.mean) else f"{difference.mean:+.2f}{half_text(difference.half, 2)}"


def _measured_on(cost: Cost) -> str:
    return f"{cost['hardware']}, {cost['batch']} pairs of width {cost['width']}"
