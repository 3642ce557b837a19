"""From paired embeddings to batches of scores: how much to compute, how to cut, what competes."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weince import evt
from weince.embeddings import InputError, Pairs
from weince.evt.link_test import in_batches

FEWEST_BATCHES = 4  # two to fit the link on, two to judge it
FEWEST_PAIRS = 32  # in a batch
GOOD_BATCHES = 16  # batches shrink to make this many when there are few pairs


@dataclass(frozen=True)
class Settings:
    """How much to compute.

    Attributes:
        batch_size: Pairs in a batch; None for 256, or fewer when there are few pairs.
        batches: The most batches.
        seed: Seed of every draw.
        bootstraps: Resamplings of the held-out batches.
        null_draws: Simulations of the likelihood ratio under softmax.
        tail_bootstraps: Resamplings of batches for xi, and simulations for the tests of the tail's fit.
        quantile: Level of the threshold of the tail.
        temperature: The temperature the model was trained with, if known.
        points: Points of the curves over lam, temperature and threshold.
        risk_pairs: The most pairs in the one batch that risk against gradient is measured on.
    """

    batch_size: int | None = None
    batches: int = 32
    seed: int = 0
    bootstraps: int = 2000
    null_draws: int = 200
    tail_bootstraps: int = 200
    quantile: float = 0.99
    temperature: float | None = None
    points: int = 21
    risk_pairs: int = 768

    def __post_init__(self) -> None:
        if self.batches < FEWEST_BATCHES:
            raise InputError(
                f"at least {FEWEST_BATCHES} batches are needed, two to fit the link and two to judge it; "
                f"got {self.batches}"
            )
        if self.batch_size is not None and self.batch_size < FEWEST_PAIRS:
            raise InputError(f"a batch needs at least {FEWEST_PAIRS} pairs, got {self.batch_size}")
        least = min(self.bootstraps, self.null_draws, self.tail_bootstraps)
        if least < 10:
            raise InputError(f"every number of bootstraps must be at least 10, got {least}")
        if self.seed < 0:
            raise InputError(f"the seed must be at least 0, got {self.seed}")
        if not 0.5 <= self.quantile < 1.0:
            raise InputError(f"the threshold's quantile must lie in [0.5, 1), got {self.quantile}")
        if self.temperature is not None and not 0.0 < self.temperature < np.inf:
            raise InputError(f"the temperature must be positive, got {self.temperature}")


QUICK = Settings(batches=16, bootstraps=500, null_draws=99, tail_bootstraps=50, points=11, risk_pairs=384)


class Bank(NamedTuple):
    """The scores of a model's batches: for the link (anchors, candidates), and negatives once each."""

    link: evt.LinkBank
    negatives: evt.NegativeCosines


def plan(pairs: Pairs, settings: Settings) -> tuple[int, int, tuple[str, ...]]:
    """Pairs in a batch, number of batches, and a note when the data forced a change."""
    n, wanted = len(pairs.z_i), settings.batch_size or 256
    good = min(GOOD_BATCHES, settings.batches)
    if settings.batch_size is None and n < good * wanted:
        wanted = max(FEWEST_PAIRS, n // good)
    count = min(settings.batches, n // wanted)
    if count < FEWEST_BATCHES:
        raise InputError(
            f"{pairs.name}: {n} pairs fill {count} of the {FEWEST_BATCHES} batches of {wanted} that are needed, "
            f"two to fit the link and two to judge it"
            + (f"; a smaller --batch-size may do (at least {FEWEST_PAIRS})" if wanted > FEWEST_PAIRS else "")
        )
    if (wanted, count) == (settings.batch_size or 256, settings.batches):
        return wanted, count, ()
    note = (
        f"The {n:,} pairs do not fill {settings.batches} batches of {settings.batch_size or 256}: "
        f"{count} batches of {wanted} were used. Fewer batches mean wider intervals."
    )
    return wanted, count, (note,)


def build_bank(pairs: Pairs, batch_size: int, count: int, seed: int) -> Bank:
    """Draw the batches without replacement and score them; pairs with equal ids do not compete (NaN)."""
    order = np.random.default_rng(seed).permutation(len(pairs.z_i))[: count * batch_size]
    size = 2 * batch_size
    others = ~np.eye(size, dtype=bool)
    partner = np.roll(np.eye(size, dtype=bool), batch_size, axis=1)
    once = np.triu(others) & ~partner
    scores = np.empty((count * size, size - 1))
    negatives = []
    for b, rows in enumerate(order.reshape(count, batch_size)):
        z = np.concatenate([pairs.z_i[rows], pairs.z_j[rows]]).astype(np.float64)
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        s = np.clip(z @ z.T, -1.0, 1.0)
        if pairs.ids is not None:
            twice = np.tile(pairs.ids[rows], 2)
            s[(twice[:, None] == twice) & ~partner] = np.nan
        scores[b * size : (b + 1) * size] = s[others].reshape(size, size - 1)
        competing = s[once]
        negatives.append(competing[~np.isnan(competing)])
    if not all(len(x) for x in negatives):
        raise InputError(f"{pairs.name}: in some batch all pairs have one id, so nothing competes there")
    origin = np.repeat(np.arange(count), [len(x) for x in negatives]).astype(np.int64)
    return Bank(in_batches(scores, batch_size), evt.NegativeCosines(np.concatenate(negatives), origin))
