"""What a comparison advises, in words: which loss to use, and how small a difference its seeds can show."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weince.lab.study.grid import Comparison
from weince.lab.study.verdict import Judged, Verdict, seeds_to_show

if TYPE_CHECKING:
    from weince.lab.study.summary import Line  # which holds the advice


def advise(
    comparison: Comparison,
    lines: Sequence["Line"],
    verdict: Verdict,
    smallest: Mapping[str, float],
    missing: Sequence[str],
    *,
    failed: bool,
) -> tuple[str, str]:
    """Two lines of advice: what to do, and how small a difference these seeds can show."""
    main = comparison.task.main
    unfinished, again = "", "weince compare with the same --out"
    if failed:
        unfinished = (
            f"Unfinished: runs failed, What is missing says why; {again} tries them again. "
            "To change a setting that a reason names, give --set NAME=VALUE and another --out. "
        )
    elif missing:
        unfinished = f"Unfinished: runs are missing; {again} runs them. "
    base = next(line for line in lines if line.loss == comparison.baseline)
    others = [line for line in lines if main in line.judged]
    if main not in base.measured or not any(line.judged[main].n for line in others):
        return (
            f"Nothing can be told yet: {base.loss} and another loss need finished runs with the same seed.",
            (unfinished + _wanted(comparison, lines, missing)).strip(),
        )
    seeds = max(line.judged[main].n for line in others)
    if seeds < 2:
        return (
            "Run more seeds: with one seed no difference can be told from chance.",
            unfinished
            + (
                f"Tuned by validation, {base.loss} does best at {base.words}."
                if base.tries > 1
                else f"{base.loss} ({base.words}) had one try, so it is not tuned."
            ),
        )
    return _choice(comparison, base, others), unfinished + _reach(
        comparison, others, verdict, smallest, seeds
    )


def _wanted(comparison: Comparison, lines: Sequence["Line"], missing: Sequence[str]) -> str:
    """What a comparison without a difference wants besides its missing runs."""
    if len(lines) == 1:
        return "Name a further loss: weince compare LOSS, with the same options, adds it."
    if missing:
        return ""
    main = comparison.task.main
    lacking = [
        line.loss
        for line in lines
        if main not in line.measured or line.measured[main].n < len(comparison.seeds)
    ]
    return (
        f"Runs of {_and(lacking)} have no finite {comparison.task.figures[main].words}: evaluate them again, "
        "or name another --baseline."
    )


def _choice(comparison: Comparison, base: "Line", others: Sequence["Line"]) -> str:
    named, main = f"{base.loss} ({base.words})", comparison.task.main
    called = comparison.task.figures[main].words
    best = _best(others, main)
    if best is not None:
        one = best.judged[main]
        return (
            f"Use {best.loss} ({best.words}): its {called} is {one.difference:.2f} ± {one.half:.2f} points "
            f"better than that of {named}{_tuning(best, base)}."
        )
    return f"Stay with {named}: no loss here is shown to be better in {called}{_others_said(others, main)}."


def _tuning(*lines: "Line") -> str:
    """How much two losses were tuned, in words: a single try is no tuning."""
    untuned = [line.loss for line in lines if line.tries < 2]
    if not untuned:
        return ", both tuned"
    return (
        f"; {untuned[0]} had one try, so it is not tuned"
        if len(untuned) == 1
        else "; each had one try, so neither is tuned"
    )


def _best(others: Sequence["Line"], figure: str) -> "Line | None":
    """The loss that is better than the baseline in a figure by the largest difference; None if none is better."""
    better = [line for line in others if line.judged.get(figure, _NONE).word == "better"]
    return max(better, key=lambda line: line.judged[figure].difference, default=None)


def _others_said(others: Sequence["Line"], main: str) -> str:
    called = {
        word: [line.loss for line in others if line.judged[main].word == word]
        for word in ("level", "worse", "cannot tell")
    }
    open_ = called.pop("cannot tell")
    said = [
        f"{_and(names)} {'is' if len(names) == 1 else 'are'} {word}"
        for word, names in called.items()
        if names
    ]
    said += [f"for {_and(open_)} these seeds cannot tell"] if open_ else []
    return f" ({'; '.join(said)})" if said else ""


def _reach(
    comparison: Comparison,
    others: Sequence["Line"],
    verdict: Verdict,
    smallest: Mapping[str, float],
    seeds: int,
) -> str:
    gains: dict[str, list[str]] = {}
    main, figures = comparison.task.main, comparison.task.figures
    for figure in figures:
        best = _best(others, figure)
        if figure != main and best is not None:
            gains.setdefault(best.loss, []).append(_by(comparison, best, figure))
    said = [f"{loss} is better in {_and(of)}" for loss, of in gains.items()]
    advised = _best(others, main)
    if advised is not None:
        worse = [
            _by(comparison, advised, name) for name, one in advised.judged.items() if one.word == "worse"
        ]
        said = [f"But {advised.loss} is worse in {_and(worse)}", *said] if worse else said
    also = f"{'; '.join(said)}. " if said else ""
    if main not in smallest:
        return (
            f"{also}All seeds show exactly the same differences in {figures[main].words}, so they give no spread to "
            "judge by: check that each loss and each seed took effect."
        )
    said_of = (
        f"With {seeds} seeds, a true difference of {smallest[main]:.2f} points in {figures[main].words} is found "
        "in 8 of 10 cases"
    )
    needed = seeds_to_show(
        comparison.level_within, verdict.spreads[main], len(others) + 1, verdict.comparisons
    )
    if any(line.judged[main].word == "cannot tell" for line in others) and needed and needed > seeds:
        said_of += f"; to find one of {comparison.level_within:g}, run about {needed} seeds, named by --seeds"
    return f"{also}{said_of}."


def _by(comparison: Comparison, line: "Line", figure: str) -> str:
    return f"{comparison.task.figures[figure].words} ({line.judged[figure].difference:+.2f})"


_NONE = Judged("cannot tell", "", math.nan, math.nan, math.nan, math.nan, 0)


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
