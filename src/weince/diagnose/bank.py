"""Cut paired embeddings into batches and score them."""

from typing import NamedTuple

import numpy as np

from weince import evt
from weince.diagnose.diagnosis_settings import FEWEST_BATCHES, FEWEST_PAIRS, DiagnosisSettings
from weince.diagnose.reading import EmbeddedPairs, InputError
from weince.evt.arrays import Integers, unit_rows
from weince.evt.link_test import Competing, split_batches
from weince.scores import CROWD

GOOD_BATCHES = 16  # batches shrink to make this many when there are few pairs
LARGEST = 2048  # the most pairs in a batch, when larger batches are tried because few positives are beaten
MOST_SCORES = 2**24  # anchors x candidates; beyond that, some anchors of every batch are left out
MOST_NEGATIVES = 2**23  # in the tail; beyond that, a random part of them is used


class Bank(NamedTuple):
    """Scores of a model's batches: (anchors, candidates) for the link test, and each negative pair once.

    ``crowded`` is the share of embeddings, of both views, that have one of another item within a shortfall of `CROWD`
    in their batch, whoever competes: copies within a view are false negatives across views.
    """

    link: evt.LinkBank
    negatives: evt.NegativeCosines
    crowded: float


def plan(pairs: EmbeddedPairs, settings: DiagnosisSettings) -> tuple[int, int, tuple[str, ...]]:
    """Pairs in a batch, number of batches, and a note if there were too few pairs for the settings."""
    n, usual = len(pairs.z_i), settings.batch_size or 256
    wanted, good = usual, min(GOOD_BATCHES, settings.batches)
    if settings.batch_size is None and n < good * wanted:
        wanted = max(FEWEST_PAIRS, n // good)
    elif n < FEWEST_BATCHES * wanted:
        wanted = max(FEWEST_PAIRS, n // FEWEST_BATCHES)
    count = min(settings.batches, n // wanted)
    if count < FEWEST_BATCHES:
        raise InputError(
            f"{pairs.name}: want {FEWEST_BATCHES} batches of {wanted} pairs, two to fit the link and two to judge it"
            f"; got {n} pairs, which fill {count}"
        )
    if (wanted, count) == (usual, settings.batches):
        return wanted, count, ()
    note = (
        f"The {n:,} pairs do not fill {settings.batches} batches of {usual}: "
        f"{count} batches of {wanted} were used."
    )
    if count < settings.batches:
        note += " Fewer batches mean wider intervals."
    if wanted < usual:
        note += " Smaller batches have fewer candidates: compare models at one batch size."
    return wanted, count, (note,)


def larger_sizes(pairs: EmbeddedPairs, batch_size: int) -> list[int]:
    """Batch sizes to try if too few positives are beaten: each doubles the last, while enough batches remain."""
    most = min(LARGEST, len(pairs.z_i) // FEWEST_BATCHES)
    sizes = []
    while batch_size < most:
        batch_size = min(2 * batch_size, most)
        sizes.append(batch_size)
    return sizes


def view_gap(pairs: EmbeddedPairs) -> float:
    """Mean cosine of different items within a view, less that across views: half the squared distance of their means.

    It is about 0 for two views of one kind. It is measured on about 8,192 pairs if there are more.
    """
    some = slice(None, None, max(1, len(pairs.z_i) // 8192))
    u, v = unit_rows(pairs.z_i[some]), unit_rows(pairs.z_j[some])
    n, a, b = len(u), u.sum(axis=0), v.sum(axis=0)
    within = (a @ a + b @ b) / 2.0 - n
    across = a @ b - (u * v).sum()
    return float((within - across) / (n * (n - 1)))


def count_beaten(bank: evt.LinkBank, seed: int) -> tuple[int, int]:
    """Number of positives that the link test fits with this seed, and how many of them a negative beats.

    The link test takes a minute where few are beaten; this count takes none.
    """
    labels = np.unique(bank.batches)
    inside, _ = split_batches(len(labels), np.random.default_rng(seed))
    fitted = np.isin(bank.batches, labels[inside])
    scores = bank.scores[fitted]
    positives = np.take_along_axis(scores, bank.positives[fitted, None], axis=1)
    return len(scores), int((scores > positives).any(axis=1).sum())  # no candidate (NaN) beats nothing


def build_bank(
    pairs: EmbeddedPairs,
    batch_size: int,
    count: int,
    seed: int,
    candidates: Competing = "views",
    told: Integers | None = None,
) -> Bank:
    """Draw the batches without replacement and score them; pairs with equal ids do not compete (NaN).

    If ``told`` is given, these ids say who competes, and those of the pairs who is crowded.
    """
    n = len(pairs.z_i)
    given = np.arange(n) if pairs.ids is None else pairs.ids
    competing = given if told is None else told
    link = evt.link_bank(
        pairs.z_i,
        pairs.z_j,
        ids=competing,
        batch_size=batch_size,
        batches=count,
        candidates=candidates,
        most_scores=MOST_SCORES,
        rng=seed,
    )
    rng = np.random.default_rng(seed)
    order = rng.permutation(n)[: count * batch_size].reshape(count, batch_size)  # as in the bank
    width = 2 * batch_size if candidates == "views" else batch_size
    share = MOST_NEGATIVES / (count * width * (width - 1) / (2 if candidates == "views" else 1))
    negatives, crowded = [], []
    for rows in order:
        z = unit_rows(np.concatenate([pairs.z_i[rows], pairs.z_j[rows]]))
        s = np.clip(z @ z.T, -1.0, 1.0)
        items, others = np.tile(given[rows], 2), np.tile(competing[rows], 2)
        crowded.append(float(((1.0 - s <= CROWD) & (items[:, None] != items)).any(axis=1).mean()))
        once = others[:, None] != others
        once, s = (
            (np.triu(once), s) if candidates == "views" else (x[:batch_size, batch_size:] for x in (once, s))
        )
        negatives.append(s[once] if share >= 1.0 else s[once][rng.random(int(once.sum())) < share])
    if not all(len(x) for x in negatives):
        raise InputError(
            f"{pairs.name}: want two ids or more in every batch; got a batch with one, where nothing competes"
        )
    origin = np.repeat(np.arange(count), [len(x) for x in negatives]).astype(np.int64)
    return Bank(link, evt.NegativeCosines(np.concatenate(negatives), origin), float(np.mean(crowded)))
