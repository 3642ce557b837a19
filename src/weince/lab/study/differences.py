"""Better, level, worse, or cannot tell: differences paired by seed, one spread for all losses, Holm's correction.

The model of a figure is ``loss + seed + noise``, with one standard deviation of the noise for all losses. It is
estimated from the residuals over all losses and seeds, so that few seeds suffice if there are many losses. (This is
the same as pooling the standard deviations of the paired differences over all pairs of losses.)
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import gammaincinv, ndtr, stdtr, stdtrit  # not scipy.stats, which takes a second to import

from weince.intervals import LEVEL  # tests use the significance level 1 - LEVEL
from weince.lab.tasks.images.evaluation.protocol import Spread

POWER = 0.8
MOST_SEEDS = 1000
POINTS = 2000

Word = Literal["baseline", "better", "level", "worse", "cannot tell"]
Values = Mapping[str, Mapping[int, float]]
"""One figure of each loss, by seed."""


class LossDifference(NamedTuple):
    """A loss against the baseline, by one figure.

    Attributes:
        word: The judgement.
        why: Why the verdict is ``cannot tell``, in a few words; else empty.
        mean: Mean difference over the seeds that both have; NaN if there are none.
        half: Half width of its interval; NaN with one seed.
        p_value: Two-sided p-value, not corrected; NaN with one seed.
        holm: The p-value corrected for all comparisons of the page.
        n: Number of seeds that both have.
    """

    word: Word
    why: str
    mean: float
    half: float
    p_value: float
    holm: float
    n: int


class Compared(NamedTuple):
    """One figure of all losses against the baseline, before words and Holm's correction.

    Attributes:
        differences: The difference of each loss but the baseline.
        spread: Standard deviation of a paired difference of two runs; None if it is unknown, as with one seed.
    """

    differences: Mapping[str, LossDifference]
    spread: Spread | None


class Judgement(NamedTuple):
    """All comparisons of a page.

    Attributes:
        judged: Differences from the baseline with their words, by figure and loss.
        spreads: Spread of a paired difference, by figure; empty with one seed.
        comparisons: Number of tests that Holm's correction covers.
        note: How intervals and p-values are made, for readers of the page.
    """

    judged: Mapping[str, Mapping[str, LossDifference]]
    spreads: Mapping[str, Spread]
    comparisons: int
    note: str = (
        "Its interval and p-value use one standard deviation, estimated from all losses as if it were the same for "
        "all."
    )


def paired(values: Values, baseline: str) -> Compared:
    """Compare every loss with the baseline over the seeds that both have."""
    spread = paired_spread(values)
    base = values.get(baseline, {})
    differences = {
        loss: _tested([of_loss[seed] - base[seed] for seed in sorted(of_loss.keys() & base.keys())], spread)
        for loss, of_loss in values.items()
        if loss != baseline
    }
    return Compared(differences, spread)


def judge(compared: Mapping[str, Compared], *, level_within: float) -> Judgement:
    """Correct all p-values together, and say a word about each difference; one ``level_within`` does not matter."""
    p_values = {
        (figure, loss): difference.p_value
        for figure, of in compared.items()
        for loss, difference in of.differences.items()
        if not math.isnan(difference.p_value)
    }
    corrected = holm(p_values)
    judged: dict[str, dict[str, LossDifference]] = {}
    for figure, of in compared.items():
        judged[figure] = {}
        for loss, difference in of.differences.items():
            difference = difference._replace(holm=corrected.get((figure, loss), math.nan))
            word, why = _word(difference, level_within)
            judged[figure][loss] = difference._replace(word=word, why=why)
    spreads = {figure: of.spread for figure, of in compared.items() if of.spread is not None}
    return Judgement(judged, spreads, len(corrected))


def reach(judgement: Judgement) -> dict[str, float]:
    """The smallest difference that the seeds show with 80 % power, by figure; none for a figure without a spread."""
    return {
        figure: smallest_difference(spread, n, judgement.comparisons)
        for figure, spread in judgement.spreads.items()
        if spread.deviation > 0
        and (n := max((difference.n for difference in judgement.judged[figure].values()), default=0)) > 1
    }


def paired_spread(values: Values) -> Spread | None:
    """Standard deviation of a paired difference of two losses, pooled over all losses; None with one seed.

    ``loss + seed`` is fitted by least squares; a difference has twice the variance of the residuals.
    """
    cells = [(loss, seed, value) for loss, of_loss in values.items() for seed, value in of_loss.items()]
    losses, seeds = list(values), sorted({seed for _, seed, _ in cells})
    design = np.zeros((len(cells), len(losses) + len(seeds)))
    for row, (loss, seed, _) in enumerate(cells):
        design[row, losses.index(loss)] = design[row, len(losses) + seeds.index(seed)] = 1.0
    y = np.array([value for *_, value in cells])
    if not len(y):
        return None
    centred = y - y.mean()  # loses fewer digits: figures are near 50 and differ by 1
    fitted = design @ np.linalg.lstsq(design, centred, rcond=None)[0]
    degrees = len(y) - int(np.linalg.matrix_rank(design))
    if not degrees:
        return None
    squares = float(((centred - fitted) ** 2).sum())
    rounding = (1e-12 * float(np.abs(y).max())) ** 2 * len(y)
    return Spread(0.0 if squares <= rounding else math.sqrt(2.0 * squares / degrees), degrees)


def _tested(differences: Sequence[float], spread: Spread | None) -> LossDifference:
    """A comparison whose word and corrected p-value are not set yet."""
    n = len(differences)
    mean = sum(differences) / n if n else math.nan
    half = p = math.nan
    if n > 1 and spread is not None:
        half = spread.half(n)
        error = spread.deviation / math.sqrt(n)
        if error > 0:
            p = float(2.0 * stdtr(spread.degrees, -abs(mean) / error))
        elif mean == 0:
            p = 1.0
    return LossDifference("cannot tell", "", mean, half, p, math.nan, n)


def _word(difference: LossDifference, level_within: float) -> tuple[Word, str]:
    """The verdict and its reason. A difference too small to matter is level, even if it is significant."""
    if difference.n == 0:
        return "cannot tell", "no seed in common"
    if difference.n == 1:
        return "cannot tell", "one seed"
    if abs(difference.mean) + difference.half <= level_within:
        return "level", ""
    if difference.holm < 1 - LEVEL:
        return ("better" if difference.mean > 0 else "worse"), ""
    return "cannot tell", "too few seeds" if difference.half > 0 else "no spread between seeds"


def holm(p_values: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Holm's step-down correction: below 0.05, the chance of any false rejection among all is at most 5 %."""
    order = sorted(p_values, key=lambda key: p_values[key])
    holm_values, highest = {}, 0.0
    for rank, key in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p_values[key]))
        holm_values[key] = highest
    return holm_values


def power(difference: float, spread: Spread, n: int, comparisons: int) -> float:
    """Chance that ``n`` seeds show a true difference at Holm's first step, the strictest."""
    threshold = stdtrit(spread.degrees, 1 - (1 - LEVEL) / (2 * max(1, comparisons)))
    shift = difference / (spread.deviation / math.sqrt(n))
    # Scipy's noncentral t is NaN far out: average over quantiles of the estimated deviation instead.
    estimated = _deviations(spread.degrees)
    beyond = ndtr(shift - threshold * estimated) + ndtr(-shift - threshold * estimated)
    return float(beyond.mean())


@lru_cache(maxsize=64)
def _deviations(degrees: int) -> np.ndarray:
    """Quantiles of an estimated deviation whose true value is 1; cached, since a search asks for them repeatedly."""
    chance = (np.arange(POINTS) + 0.5) / POINTS
    quantiles: np.ndarray = np.sqrt(2.0 * gammaincinv(degrees / 2.0, chance) / degrees)
    return quantiles


def smallest_difference(spread: Spread, n: int, comparisons: int) -> float:
    """The difference that ``n`` seeds show with 80 % power."""
    from scipy.optimize import brentq  # here, since only the page needs it

    high = spread.deviation
    while power(high, spread, n, comparisons) < POWER:
        high *= 2.0
    return float(brentq(lambda d: power(d, spread, n, comparisons) - POWER, 0.0, high, xtol=1e-6))


def seeds_to_show(difference: float, spread: Spread, losses: int, comparisons: int) -> int | None:
    """Seeds that each of ``losses`` losses, baseline included, needs to show a difference with 80 % power.

    None if that takes more than a thousand.
    """

    def power_of(n: int) -> float:
        return power(difference, Spread(spread.deviation, (losses - 1) * (n - 1)), n, comparisons)

    numbers = range(2, MOST_SEEDS + 1)
    place = bisect_left(numbers, POWER, key=power_of)  # power grows with the number of seeds
    return numbers[place] if place < len(numbers) else None
