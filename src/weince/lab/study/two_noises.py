"""Is a loss better, given few seeds and a sample of queries? Both noises count.

A figure of a loss, a seed and a query is ``loss + seed + query + noise``. A difference of two losses, paired by seed
and by query, has the variance

    V = seeds / S + queries / Q + rest / (S Q).

Its part between seeds comes from the means of the seeds, pooled over all losses as in
`weince.lab.study.differences`; it contains the rest. Its part between queries is a bootstrap over groups of queries,
one matrix product for all losses; it contains the rest too, which is therefore subtracted once. The degrees of
freedom are Satterthwaite's. A difference is called better or worse only if it is significant against both noises
together and against each of them alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit  # not scipy.stats, which takes a second to import

from weince.intervals import LEVEL
from weince.lab.study.differences import Word, holm, paired_spread

Floats = NDArray[np.float64]
DRAWS = 2000
"""Bootstrap samples; the standard error that they give is then known to 1.6 %."""

Each = Mapping[str, Mapping[int, Floats]]
"""One figure of each query, ``(queries,)``, by loss and seed."""


@dataclass(frozen=True)
class Difference:
    """A loss against the baseline, by one figure.

    Attributes:
        word: The verdict.
        why: Why the verdict is ``cannot tell``, in a few words; else empty.
        difference: Mean over the seeds that both have, and over queries.
        half: Half width of its interval from both noises; NaN with one seed.
        of_seeds: Standard error from the seeds.
        of_queries: Standard error from the queries.
        p_value: Two-sided p-value from both noises, not corrected; NaN with one seed.
        holm: The p-value corrected for all comparisons of the table.
        p_seeds: Corrected p-value if these queries were the only ones.
        p_queries: Corrected p-value if these seeds were the only ones.
        n: Number of seeds that both have.
        queries: Number of queries.
        groups: Number of groups of queries that were drawn.
    """

    word: Word
    why: str
    difference: float
    half: float
    of_seeds: float
    of_queries: float
    p_value: float
    holm: float
    p_seeds: float
    p_queries: float
    n: int
    queries: int
    groups: int


def judge_both(
    figures: Mapping[str, Each],
    *,
    baseline: str,
    level_within: float,
    groups: NDArray[np.int64] | None = None,
    draws: int = DRAWS,
) -> dict[str, dict[str, Difference]]:
    """Compare every loss with the baseline by every figure; the result is by figure and loss.

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
        >>> judge_both({"ndcg": each}, baseline="infonce", level_within=0.5)["ndcg"]["siglip"].word
        'better'
    """
    asked = [(figure, loss) for figure, each in figures.items() for loss in each if loss != baseline]
    paired = {(figure, loss): _paired(figures[figure], loss, baseline) for figure, loss in asked}
    known = [key for key, values in paired.items() if len(values)]
    if not known:
        return {figure: {loss: NOTHING for of, loss in asked if of == figure} for figure in figures}
    queries = paired[known[0]].shape[1]
    number = np.arange(queries) if groups is None else np.unique(groups, return_inverse=True)[1]
    sizes = np.bincount(number).astype(np.float64)
    sums = np.stack([np.bincount(number, paired[key].mean(0)) for key in known], 1).astype(np.float64)
    errors = dict(zip(known, bootstrap_errors(sums, sizes, draws), strict=True))
    compared = {
        (figure, loss): _compared(figures[figure], paired[figure, loss], number, errors[figure, loss])
        if (figure, loss) in errors
        else NOTHING
        for figure, loss in asked
    }
    every = {
        name: holm({key: p for key, x in compared.items() if not math.isnan(p := getattr(x, name))})
        for name in ("p_value", "p_seeds", "p_queries")
    }
    judged: dict[str, dict[str, Difference]] = {figure: {} for figure in figures}
    for key, raw in compared.items():
        p = {name: corrected.get(key, math.nan) for name, corrected in every.items()}
        full = replace(raw, holm=p["p_value"], p_seeds=p["p_seeds"], p_queries=p["p_queries"])
        word, why = _word(full, level_within)
        judged[key[0]][key[1]] = replace(full, word=word, why=why)
    return judged


_NAN = math.nan
NOTHING = Difference(
    "cannot tell", "no seed in common", _NAN, _NAN, _NAN, _NAN, _NAN, _NAN, _NAN, _NAN, 0, 0, 0
)


def _paired(each: Each, loss: str, baseline: str) -> Floats:
    """``(seeds, queries)`` differences over the seeds that both have."""
    seeds = sorted(each[loss].keys() & each.get(baseline, {}).keys())
    return np.array([each[loss][seed] - each[baseline][seed] for seed in seeds], np.float64)


def _compared(each: Each, paired: Floats, number: NDArray[np.int64], query_error: float) -> Difference:
    """A comparison whose word and corrected p-values are not set yet."""
    n, queries = paired.shape
    groups = int(number.max()) + 1
    spread = paired_spread(
        {name: {seed: float(x.mean()) for seed, x in of.items()} for name, of in each.items()}
    )
    mean = float(paired.mean())
    seed_error = math.nan if spread is None or n < 2 else spread.deviation / math.sqrt(n)
    rest = _rest(paired, number)
    # Not less than either part: the rest is estimated, too.
    both = max(seed_error**2 + query_error**2 - rest, seed_error**2, query_error**2)
    of_seeds, of_queries = math.nan if spread is None else float(spread.degrees), groups - 1.0
    terms = max(seed_error**2 - rest, 0) ** 2 / of_seeds + query_error**4 / max(of_queries, 1)
    degrees = both**2 / terms if terms > 0 else of_seeds
    half = float(stdtrit(degrees, 0.5 + LEVEL / 2)) * math.sqrt(both) if n > 1 else math.nan
    return Difference(
        "cannot tell", "", mean, half, seed_error, query_error,
        _p_value(mean, math.sqrt(both), degrees), math.nan,
        _p_value(mean, seed_error, of_seeds), _p_value(mean, query_error, of_queries),
        n, queries, groups,
    )  # fmt: skip


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


def _rest(paired: Floats, number: NDArray[np.int64]) -> float:
    """Variance of the mean by what neither the seed nor the query explains."""
    n, queries = paired.shape
    if n < 2:
        return 0.0
    left = paired - paired.mean(0) - paired.mean(1, keepdims=True) + paired.mean()
    squares = sum(float((np.bincount(number, row) ** 2).sum()) for row in left)
    return float(squares / (n * (n - 1) * queries**2))


def _p_value(difference: float, error: float, degrees: float) -> float:
    if math.isnan(error) or math.isnan(degrees):
        return math.nan
    if error == 0:
        return 1.0 if difference == 0 else math.nan
    return float(2 * stdtr(degrees, -abs(difference) / error))


def _word(judged: Difference, level_within: float) -> tuple[Word, str]:
    """The verdict and its reason. A difference too small to matter is level, even if it is significant."""
    if judged.n == 0:
        return "cannot tell", "no seed in common"
    if judged.n == 1:
        return "cannot tell", "one seed"
    if abs(judged.difference) + judged.half <= level_within:
        return "level", ""
    alone = {"too few seeds": judged.p_seeds, "too few queries": judged.p_queries}
    for why, p in alone.items():
        if not p < 1 - LEVEL:
            return "cannot tell", why
    if judged.holm < 1 - LEVEL:
        return ("better" if judged.difference > 0 else "worse"), ""
    return "cannot tell", "too few seeds or queries"
