"""What a comparison advises, in words: which loss to use, and how small a difference its seeds can show."""

from collections.abc import Sequence
from typing import NamedTuple

from weince.lab.study.comparison import Comparison
from weince.lab.study.differences import seeds_to_show
from weince.lab.study.statistics import LossLine, Outcome


class Open(NamedTuple):
    """What a comparison lacks, in words.

    Attributes:
        missing: Runs that are planned but not done.
        unchosen: Losses of which no try can be chosen.
        failed: Why runs failed.
    """

    missing: Sequence[str] = ()
    unchosen: Sequence[str] = ()
    failed: Sequence[str] = ()


def advise(comparison: Comparison, outcome: Outcome, lacks: Open) -> tuple[str, str]:
    """Two lines of advice: what to do, and how small a difference these seeds can show."""
    main = comparison.task.main
    unfinished, again = "", "weince compare with the same --out"
    if lacks.failed:
        unfinished = (
            f"Unfinished: runs failed, What is missing says why; {again} tries them again. "
            "To change a setting that a reason names, give --set NAME=VALUE and another --out. "
        )
    elif lacks.missing:
        unfinished = f"Unfinished: runs are missing; {again} runs them. "
    base = next(line for line in outcome.lines if line.loss == comparison.baseline)
    others = [line for line in outcome.lines if main in line.judged]
    seeds = max((line.judged[main].n for line in others), default=0)
    if main not in base.measured or not seeds:
        return (
            f"Nothing can be told yet: {base.loss} and another loss need finished runs with the same seed.",
            (unfinished + _wanted(comparison, outcome, lacks)).strip(),
        )
    if seeds == 1:
        tuned = f"Tuned by validation, {base.loss} does best at {base.words}."
        untuned = f"{base.loss} ({base.words}) had one try, so it is not tuned."
        return (
            "Run more seeds: with one seed no difference can be told from chance.",
            unfinished + (tuned if base.tries > 1 else untuned),
        )
    return _choice(comparison, base, others), unfinished + _reach(comparison, outcome, others, seeds)


def _wanted(comparison: Comparison, outcome: Outcome, lacks: Open) -> str:
    """What a comparison without a difference wants besides its missing runs."""
    if len(outcome.lines) == 1:
        return "Name a further loss: weince compare LOSS, with the same options, adds it."
    if lacks.missing:
        return ""
    main = comparison.task.main
    lacking = [
        line.loss
        for line in outcome.lines
        if main not in line.measured or line.measured[main].n < len(comparison.seeds)
    ]
    return (
        f"Runs of {_and(lacking)} have no finite {comparison.task.figures[main].words}: evaluate them again, "
        "or name another --baseline."
    )


def _choice(comparison: Comparison, base: LossLine, others: Sequence[LossLine]) -> str:
    named, main = f"{base.loss} ({base.words})", comparison.task.main
    called = comparison.task.figures[main].words
    best = _best(others, main)
    if best is not None:
        difference = best.judged[main]
        return (
            f"Use {best.loss} ({best.words}): its {called} is {difference.mean:.2f} ± {difference.half:.2f} points "
            f"better than that of {named}{_tuning(best, base)}."
        )
    return f"Stay with {named}: no loss here is shown to be better in {called}{_others_said(others, main)}."


def _tuning(*lines: LossLine) -> str:
    """How much two losses were tuned, in words: a single try is no tuning."""
    untuned = [line.loss for line in lines if line.tries < 2]
    if not untuned:
        return ", both tuned"
    alone = f"; {untuned[0]} had one try, so it is not tuned"
    return alone if len(untuned) == 1 else "; each had one try, so neither is tuned"


def _best(others: Sequence[LossLine], figure: str) -> LossLine | None:
    """The loss that is better than the baseline in a figure by the largest difference; None if none is better."""
    better = [line for line in others if figure in line.judged and line.judged[figure].word == "better"]
    return max(better, key=lambda line: line.judged[figure].mean, default=None)


def _others_said(others: Sequence[LossLine], main: str) -> str:
    said = []
    for word in ("level", "worse", "cannot tell"):
        names = [line.loss for line in others if line.judged[main].word == word]
        if names and word == "cannot tell":
            said.append(f"for {_and(names)} these seeds cannot tell")
        elif names:
            said.append(f"{_and(names)} {'is' if len(names) == 1 else 'are'} {word}")
    return f" ({'; '.join(said)})" if said else ""


def _reach(comparison: Comparison, outcome: Outcome, others: Sequence[LossLine], seeds: int) -> str:
    main, figures = comparison.task.main, comparison.task.figures
    also = _other_figures(comparison, others)
    if main not in outcome.judgement.spreads:
        return also.strip()
    if main not in outcome.smallest:
        return (
            f"{also}All seeds show exactly the same differences in {figures[main].words}, so they give no spread to "
            "judge by: check that each loss and each seed took effect."
        )
    said = (
        f"With {seeds} seeds, a true difference of {outcome.smallest[main]:.2f} points in {figures[main].words} is "
        "found in 8 of 10 cases"
    )
    spread, comparisons = outcome.judgement.spreads[main], outcome.judgement.comparisons
    needed = seeds_to_show(comparison.level_within, spread, len(others) + 1, comparisons)
    unclear = any(line.judged[main].word == "cannot tell" for line in others)
    if unclear and comparison.task.each:
        said += "; more test queries find smaller ones, and more seeds, named by --seeds"
    elif unclear and needed and needed > seeds:
        said += f"; to find one of {comparison.level_within:g}, run about {needed} seeds, named by --seeds"
    return f"{also}{said}."


def _other_figures(comparison: Comparison, others: Sequence[LossLine]) -> str:
    """In what the advised loss is worse, and which losses are better in other figures; empty if there is nothing."""
    main, figures = comparison.task.main, comparison.task.figures

    def by(line: LossLine, figure: str) -> str:
        return f"{figures[figure].words} ({line.judged[figure].mean:+.2f})"

    gains: dict[str, list[str]] = {}
    for figure in figures:
        best = _best(others, figure)
        if figure != main and best is not None:
            gains.setdefault(best.loss, []).append(by(best, figure))
    said = [f"{loss} is better in {_and(of)}" for loss, of in gains.items()]
    advised = _best(others, main)
    if advised is not None:
        worse = [
            by(advised, figure) for figure, difference in advised.judged.items() if difference.word == "worse"
        ]
        said = [f"But {advised.loss} is worse in {_and(worse)}", *said] if worse else said
    return f"{'; '.join(said)}. " if said else ""


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
