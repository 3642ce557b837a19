"""The temperature of softmax that fits best, at one batch size or at many, and `fit_temperature` for programs."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from weince.diagnose.diagnosis_settings import FEWEST_PAIRS
from weince.diagnose.overlaps import tell_exact_twins
from weince.diagnose.reading import EmbeddedPairs, make_pairs
from weince.diagnose.rules import THRESHOLDS
from weince.evt import choice
from weince.evt.arrays import Bounds
from weince.evt.link_fit import softmax_interval
from weince.evt.link_test import Competing, check_competing, link_bank

_SCORES = 2**22  # the most scores of a fit; of large batches some anchors are drawn


class FittedTemperature(NamedTuple):
    """The temperature of softmax that makes the positives of some batches likeliest.

    Attributes:
        temperature: The best one; NaN if no positive is beaten, infinite if higher scores do not win more often.
        interval: Its 95 % interval, over batches, or over anchors where there are fewer than four batches.
        batch_size: Pairs in a batch.
        anchors: Positives that were fitted.
        beaten: How many of them score below a negative.
    """

    temperature: float
    interval: Bounds
    batch_size: int
    anchors: int
    beaten: int

    @property
    def known(self) -> bool:
        """Whether enough positives are beaten for a temperature."""
        return self.beaten >= THRESHOLDS.beaten and bool(np.isfinite(self.temperature))


def fit_temperature(
    queries: ArrayLike | Tensor,
    documents: ArrayLike | Tensor,
    *,
    ids: ArrayLike | Tensor | None = None,
    batch_size: int = 256,
    candidates: Competing = "cross",
    seed: int = 0,
) -> FittedTemperature:
    """The temperature of InfoNCE that fits paired embeddings, such as those of an encoder before training.

    Exact duplicates never compete. If fewer than 10 positives are beaten (score below a negative), larger batches are
    tried, up to all pairs.

    Args:
        queries: ``(pairs, dim)`` embeddings, of any norm. Use pairs that the encoder was not trained on.
        documents: ``(pairs, dim)`` embeddings; row k is the positive of row k of the queries.
        ids: ``(pairs,)`` integers or strings: pairs with equal ids never compete.
        batch_size: Pairs in a batch of training; all pairs if there are fewer.
        candidates: ``"cross"``, rows of the documents compete for a query; ``"views"``, all other rows compete, as in
            SimCLR.
        seed: Seed of the batches.

    Raises:
        ValueError: No temperature fits: too few positives are beaten, or higher scores do not win more often.

    Examples:
        >>> import numpy as np
        >>> from weince import fit_temperature
        >>> q, noise = np.random.default_rng(0).normal(size=(2, 512, 8))
        >>> fit = fit_temperature(q, q + noise, batch_size=64)
        >>> bool(fit.interval[0] < fit.temperature < fit.interval[1])
        True
    """
    check_competing(candidates)
    pairs = make_pairs("pairs", queries, documents, ids, towers=candidates == "cross")
    pairs = replace(pairs, ids=tell_exact_twins(pairs))
    n = len(pairs.z_i)
    if batch_size < 2 or n < FEWEST_PAIRS:
        raise ValueError(
            f"want {FEWEST_PAIRS} pairs and a batch_size of 2 or more; got {n} pairs and {batch_size}"
        )
    size = min(batch_size, n)
    fit = temperature_at(pairs, size, candidates=candidates, seed=seed)
    while fit.beaten < THRESHOLDS.beaten and size < n:
        size = min(2 * size, n)
        fit = temperature_at(pairs, size, candidates=candidates, seed=seed)
    if fit.beaten < THRESHOLDS.beaten:
        raise ValueError(
            f"no temperature fits: {fit.beaten} of {fit.anchors} positives are beaten, in batches of {size} too; "
            "use pairs that the encoder was not trained on, or more of them"
        )
    if not fit.known:
        raise ValueError(
            "no temperature fits: higher scores do not win more often; do the rows belong together?"
        )
    return fit


def temperature_at(
    pairs: EmbeddedPairs,
    batch_size: int,
    *,
    candidates: Competing = "cross",
    seed: int = 0,
    scores: int = _SCORES,
) -> FittedTemperature:
    """The temperature that fits batches of one size; about so many ``scores`` are used."""
    count = len(pairs.z_i) // batch_size
    s, positives, batches = link_bank(
        pairs.z_i,
        pairs.z_j,
        ids=pairs.ids,
        batch_size=batch_size,
        batches=min(count, max(1, scores // (FEWEST_PAIRS * batch_size))),
        candidates=candidates,
        most_scores=scores,
        rng=seed,
    )
    competing = np.isfinite(s).sum(axis=1) > 1  # a batch may hold no other id
    s, positives, batches = s[competing], positives[competing], batches[competing]
    if len(s) == 0:
        return FittedTemperature(np.nan, (np.nan, np.nan), batch_size, 0, 0)
    clusters = batches if count >= 4 else np.arange(len(s))
    choices = choice.read_choices(s, positives, clusters, coordinates=(choice.translation,))
    beaten = int(choices.beaten[0].sum())
    if beaten == 0:
        return FittedTemperature(np.nan, (np.nan, np.nan), batch_size, len(s), 0)
    best = choice.fit(choices)
    with np.errstate(divide="ignore"):
        tau = float(1.0 / best.theta[0])
    return FittedTemperature(tau, softmax_interval(choices, best, 0.95), batch_size, len(s), beaten)


def temperature_curve(
    pairs: EmbeddedPairs, candidates: Competing, seed: int
) -> tuple[FittedTemperature, ...]:
    """The temperature at batch sizes from 32 to all pairs, each twice the last."""
    n = len(pairs.z_i)
    sizes = [FEWEST_PAIRS * 2**k for k in range(20) if FEWEST_PAIRS * 2**k < 0.75 * n] + [n]
    return tuple(
        temperature_at(pairs, size, candidates=candidates, seed=seed, scores=2**20) for size in sizes
    )
