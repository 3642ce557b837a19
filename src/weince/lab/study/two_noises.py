"""Is a loss better, given few seeds and a sample of queries? Both noises count.

A figure of a loss, a seed and a query is ``loss + seed + query + rest``. A difference of two losses, paired by seed
and by query, has the variance

    V = seeds / S + queries / Q + rest / (S Q).

What the means of the seeds say contains the rest; it is pooled over all losses, as in `weince.lab.study.differences`.
What a bootstrap over groups of queries says, one matrix product for all losses, contains the rest too, which is
therefore subtracted once. The degrees of freedom are Satterthwaite's. A difference is called better or worse only if
it is significant against both noises together and against each of them alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit  # not scipy.stats, which takes a second to import

from weince.intervals import LEVEL
from weince.lab.study.differences import Judgement, LossDifference, Word, holm, paired_spread
from weince.lab.tasks.images.evaluation.protocol import Spread

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
DRAWS = 2000
"""Bootstrap samples; the standard error that they give is then known to 1.6 %."""

NOTE = (
    "Its interval and p-value count two noises: between seeds (one standard deviation for all losses) and between "
    "test queries (a bootstrap by their groups). A difference that only one of them confirms is not called better."
)
MISSING = "figures of each query missing"

NOTHING = LossDifference("cannot tell", "no seed in common", math.nan, math.nan, math.nan, math.nan, 0)

Each = Mapping[str, Mapping[int, Floats]]
"""One figure of each query, ``(queries,)``, by loss and seed."""


@dataclass(frozen=True)
class Noises:
    """A difference from the baseline and its two noises.

    Attributes:
        mean: Mean over the seeds that both have, and over queries.
        of_seeds: Standard error from the seeds; NaN with one.
        of_queries: Standard error from the queries.
        both: Standard error from both.
        degrees: Degrees of freedom of each, in this order.
        n: Number of seeds that both have.
    """

    mean: float
    of_seeds: float
    of_queries: float
    both: float
    degrees: tuple[float, float, float]
    n: int

    @property
    def half(self) -> float:
        """Half width of the interval from both noises; NaN with one seed."""
        return float(stdtrit(self.degrees[2], 0.5 + LEVEL / 2)) * self.both

    @property
    def p_values(self) -> tuple[float, float, float]:
        """Two-sided p-values: from the seeds alone, the queries alone, and both; not corrected."""
        errors = self.of_seeds, self.of_queries, self.both
        values = [_p_value(self.mean, error, free) for error, free in zip(errors, self.degrees, strict=True)]
        return values[0], values[1], values[2]


def judge_both(
    figures: Mapping[str, Each],
    *,
    baseline: str,
    level_within: float,
    groups: Numbers | None = None,
    draws: int = DRAWS,
) -> Judgement:
    """Compare every loss with the baseline by every figure.

    Args:
        figures: Values of each query, by figure, loss and seed; all have the same queries.
        baseline: One of the losses.
        level_within: The largest difference that does not matter.
        groups: ``(queries,)``: queries of a group are drawn together; by default each is drawn alone.
        draws: Bootstrap samples.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> queries = rng.normal(50, 20, 2000)
        >>> each = {loss: {seed: queries + gain + rng.normal(0, 5, 2000) for seed in (7, 21, 63, 84)}
        ...         for loss, gain in (("infonce", 0.0), ("siglip", 2.0))}
        >>> judge_both({"ndcg": each}, baseline="infonce", level_within=0.5).judged["ndcg"]["siglip"].word
        'better'
    """
    noises = noises_of(figures, baseline=baseline, groups=groups, draws=draws)
    raw = {key: one.p_values for key, one in noises.items()}
    alone, together = [
        [holm({key: p[kind] for key, p in raw.items() if not math.isnan(p[kind])}) for kind in kinds]
        for kinds in ((0, 1), (2,))
    ]
    judged: dict[str, dict[str, LossDifference]] = {figure: {} for figure in figures}
    for figure, each in figures.items():
        for loss in each:
            if loss == baseline:
                continue
            key = figure, loss
            if key not in noises:
                judged[figure][loss] = NOTHING
                continue
            corrected = {
                why: p.get(key, math.nan) for why, p in zip(("seeds", "queries"), alone, strict=True)
            }
            p_both = together[0].get(key, math.nan)
            word, why = _word(noises[key], corrected, p_both, level_within)
            judged[figure][loss] = LossDifference(
                word, why, noises[key].mean, noises[key].half, raw[key][2], p_both, noises[key].n
            )
    return Judgement(judged, _spreads(noises), len(together[0]), NOTE)


def noises_of(
    figures: Mapping[str, Each], *, baseline: str, groups: Numbers | None = None, draws: int = DRAWS
) -> dict[tuple[str, str], Noises]:
    """The noises of every loss but the baseline by figure and loss, as far as they have a seed in common."""
    paired = {
        (figure, loss): rows
        for figure, each in figures.items()
        for loss in each
        if loss != baseline and len(rows := _paired(each, loss, baseline))
    }
    if not paired:
        return {}
    queries = next(iter(paired.values())).shape[1]
    number = np.arange(queries) if groups is None else np.unique(groups, return_inverse=True)[1]
    sums = np.stack([np.bincount(number, rows.mean(0)) for rows in paired.values()], 1).astype(np.float64)
    errors = bootstrap_errors(sums, np.bincount(number).astype(np.float64), draws)
    return {
        (figure, loss): _noises(figures[figure], rows, number, float(error))
        for ((figure, loss), rows), error in zip(paired.items(), errors, strict=True)
    }


def _paired(each: Each, loss: str, baseline: str) -> Floats:
    """``(seeds, queries)`` differences over the seeds that both have."""
    seeds = sorted(each[loss].keys() & each.get(baseline, {}).keys())
    return np.array([each[loss][seed] - each[baseline][seed] for seed in seeds], np.float64)


def _noises(each: Each, paired: Floats, number: Numbers, of_queries: float) -> Noises:
    n, groups = len(paired), int(number.max()) + 1
    means = {name: {seed: float(x.mean()) for seed, x in of.items()} for name, of in each.items()}
    spread = paired_spread(means)
    if spread is None or n < 2:
        return Noises(
            float(paired.mean()), math.nan, of_queries, math.nan, (math.nan, groups - 1.0, math.nan), n
        )
    of_seeds, rest = spread.deviation / math.sqrt(n), _rest(paired, number)
    # Not less than either part: the rest is estimated, too.
    both = max(of_seeds**2 + of_queries**2 - rest, of_seeds**2, of_queries**2)
    terms = max(of_seeds**2 - rest, 0) ** 2 / spread.degrees + of_queries**4 / max(groups - 1, 1)
    degrees = both**2 / terms if terms > 0 else float(spread.degrees)
    freedom = float(spread.degrees), groups - 1.0, degrees
    return Noises(float(paired.mean()), of_seeds, of_queries, math.sqrt(both), freedom, n)


def bootstrap_errors(sums: Floats, sizes: Floats, draws: int = DRAWS, seed: int = 0) -> Floats:
    """``(k,)`` standard errors of means over queries: groups are drawn with replacement, as one matrix product.

    Args:
        sums: ``(groups, k)`` sum of the values of each group.
        sizes: ``(groups,)`` number of its queries.
        draws: Bootstrap samples.
        seed: Seed of the draws.
    """
    if len(sums) < 2:
        return np.full(sums.shape[1], math.nan)
    rng = np.random.default_rng(seed)
    # Poisson counts draw each group independently; the ratio removes what the total number varies. The mean is taken
    # off first, so that the ratio is one of small numbers.
    means = sums.sum(0) / sizes.sum()
    values = np.concatenate([sums - sizes[:, None] * means, sizes[:, None]], 1).astype(np.float32)
    parts = []
    for start in range(0, draws, 256):
        counts = rng.poisson(1.0, (min(256, draws - start), len(sums))).astype(np.float32)
        parts.append(counts @ values)
    total = np.concatenate(parts).astype(np.float64)
    ratio = total[:, :-1] / np.maximum(total[:, -1:], 1)
    # With few groups, their mean varies less in the bootstrap than in truth.
    return np.asarray(ratio.std(0, ddof=1) * math.sqrt(len(sums) / (len(sums) - 1)))


def _rest(paired: Floats, number: Numbers) -> float:
    """Variance of the mean by what neither the seed nor the query explains."""
    n, queries = paired.shape
    left = paired - paired.mean(0) - paired.mean(1, keepdims=True) + paired.mean()
    squares = sum(float((np.bincount(number, row) ** 2).sum()) for row in left)
    return float(squares / (n * (n - 1) * queries**2))


def _p_value(difference: float, error: float, degrees: float) -> float:
    if math.isnan(error) or math.isnan(degrees):
        return math.nan
    if error == 0:
        return 1.0 if difference == 0 else math.nan
    return float(2 * stdtr(degrees, -abs(difference) / error))


def _spreads(noises: Mapping[tuple[str, str], Noises]) -> dict[str, Spread]:
    """Spread of a paired difference as if both noises were between seeds, by figure."""
    spreads = {}
    for figure in {figure for figure, _ in noises}:
        known = [one for (of, _), one in noises.items() if of == figure and not math.isnan(one.both)]
        if known:
            variance = sum(one.n * one.both**2 for one in known) / len(known)
            spreads[figure] = Spread(math.sqrt(variance), max(1, round(min(one.degrees[2] for one in known))))
    return spreads


def _word(noises: Noises, alone: Mapping[str, float], p_both: float, level_within: float) -> tuple[Word, str]:
    """The verdict and its reason. A difference too small to matter is level, even if it is significant."""
    if noises.n == 1:
        return "cannot tell", "one seed"
    if abs(noises.mean) + noises.half <= level_within:
        return "level", ""
    for what, p in alone.items():
        if not p < 1 - LEVEL:
            return "cannot tell", f"too few {what}"
    if p_both < 1 - LEVEL:
        return ("better" if noises.mean > 0 else "worse"), ""
    return "cannot tell", "too few seeds or queries"
