"""Measure what the verdict on one model's paired embeddings needs.

Sign convention: xi < 0 is a bounded (Weibull) tail; scipy's ``genpareto`` has ``c = xi``; the endpoint is
``threshold - sigma / xi``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import betainc

from weince import evt
from weince.diagnose.bank import Bank, build_bank, count_beaten, larger_sizes, plan, view_gap
from weince.diagnose.diagnosis_settings import DiagnosisSettings
from weince.diagnose.overlaps import Overlaps, find_overlaps, tell_exact_twins
from weince.diagnose.reading import EmbeddedPairs, InputError
from weince.diagnose.rules import NEAR, THRESHOLDS
from weince.diagnose.temperatures import FittedTemperature, temperature_curve
from weince.evt import choice
from weince.evt.arrays import Floats, Integers
from weince.evt.link_test import Competing
from weince.scores import CROWD

Tell = Callable[[str], None]

STAGES = ("link test", "tail", "rivals", "temperatures", "whole file")
POINTS = 15
"""Temperatures at which the curve of the loss is drawn."""


class Tail(NamedTuple):
    """The tail of the negative cosines, and how many there are; xi < 0 means bounded."""

    n_scores: int
    xi: evt.BatchXi


@dataclass(frozen=True, eq=False)
class Curves:
    """Held-out likelihood around the fit of softmax.

    Temperatures are judged on all batches if no positive of the held-out ones is beaten.
    """

    taus: Floats  # ``(points,)`` temperatures of softmax
    # ``(points,)`` what softmax loses at these compared with its fitted temperature, nats per anchor
    tau_loss: Floats
    tau_range: tuple[float, float]  # temperatures at which it loses at most `THRESHOLDS.worth`
    current_loss: float | None  # the same loss at the temperature the model was trained with, or None
    over_chance: float  # what softmax gains over picking a candidate at random, nats per anchor


@dataclass(frozen=True, eq=False)
class Measured:
    """Everything measured on one model. ``rivals`` and ``curves`` are None when no finite fit exists.

    ``tried`` lists smaller batch sizes at which too few positives were beaten, ``fitted`` and ``beaten`` count the
    positives in those that were used. ``gap`` is how far the mean cosine within views exceeds that across views,
    ``mean_cosine`` is that of the negatives. ``by_label`` and ``equal`` are those of `EmbeddedPairs`, ``crowded`` is
    that of `Bank`. ``crowded_by_chance`` is the share to expect if the rows were spread evenly over the sphere.
    ``sizes`` are the temperatures that fit at growing batch sizes, ``overlaps`` is what the whole file holds, and
    ``near_by_chance`` the share of twins in it to expect of an even spread. ``towers`` is that of `EmbeddedPairs`, as
    are ``texts``. ``more`` is what a supplement measured.
    """

    name: str
    pairs: int
    dim: int
    batch_size: int
    batches: int
    tried: tuple[int, ...]
    fitted: int
    beaten: int
    notes: tuple[str, ...]
    tail: Tail
    link: evt.LinkTest
    rivals: evt.LinkRivals | None
    curves: Curves | None
    gap: float
    mean_cosine: float
    crowded: float
    crowded_by_chance: float
    by_label: bool
    equal: bool
    sizes: tuple[FittedTemperature, ...]
    overlaps: Overlaps
    near_by_chance: float
    towers: bool
    texts: tuple[Sequence[str], Sequence[str]] | None
    more: Any = None


More = Callable[[EmbeddedPairs, Bank, Measured, DiagnosisSettings, Tell], Any]
"""What a supplement measures besides."""


def _tail(bank: Bank, settings: DiagnosisSettings) -> tuple[Tail, tuple[str, ...]]:
    x, batches = bank.negatives.scores, bank.negatives.batches
    at_cap = int((x >= 1.0 - 1e-9).sum())
    if np.quantile(x, max(highest_level(x), settings.quantile)) >= 1.0 - 1e-9:
        raise ValueError(
            f"{100.0 * at_cap / x.size:.1f} % of the negative pairs have a cosine of 1, so their tail is one point: "
            "duplicates (remove them, or give them equal ids), or items that the encoder maps onto one point"
        )
    xi = evt.xi_over_batches(
        x, batches, quantile=settings.quantile, bootstraps=settings.tail_bootstraps, seed=settings.seed
    )
    if not at_cap:
        return Tail(x.size, xi), ()
    note = (
        f"Negative pairs with a cosine of 1: {at_cap}. Duplicates in the data are false negatives: remove "
        "them, or give them equal ids. If they are different items, the encoder maps them onto one point."
    )
    return Tail(x.size, xi), (note,)


def highest_level(scores: Floats) -> float:
    """The highest quantile that is still a threshold: 30 scores lie above it."""
    return min(0.995, 1.0 - 30.0 / scores.size)


def _curves(choices: choice.Choices, link: evt.LinkTest, settings: DiagnosisSettings) -> Curves:
    judged = choices.take(np.array(link.held_out))
    # Where no held-out positive is beaten, softmax loses nothing however low its temperature: judge on all batches.
    softmax = (judged if judged.beaten[0].any() else choices).using(0)

    def held_out(weight: float) -> float:
        return float(choice.batch_means(softmax, np.array([weight])).mean())

    best = held_out(1.0 / link.tau0)

    def loss(tau: float) -> float:
        return best - held_out(1.0 / tau)

    current = settings.temperature
    # The curve includes the temperature in use, so that its cost is visible.
    ends = [0.25 * link.tau0, 4.0 * link.tau0, *([] if current is None else [current])]
    taus = np.geomspace(min(ends), max(ends), POINTS)
    return Curves(
        taus=taus,
        tau_loss=np.array([loss(tau) for tau in taus]),
        tau_range=(_edge(loss, link.tau0, 0.25), _edge(loss, link.tau0, 4.0)),
        current_loss=None if current is None else loss(current),
        over_chance=best - held_out(0.0),
    )


def _edge(loss: Callable[[float], float], tau0: float, factor: float) -> float:
    """The temperature between tau0 and factor * tau0 (or beyond) at which softmax loses what is worth a change."""
    near, far = tau0, tau0 * factor
    for _ in range(8):
        if loss(far) > THRESHOLDS.worth:
            break
        near, far = far, far * factor
    else:
        return far

    def excess(x: float) -> float:
        return loss(float(np.exp(x))) - THRESHOLDS.worth

    return float(np.exp(brentq(excess, *sorted(np.log([near, far])), xtol=1e-4)))


def _others(bank: evt.LinkBank, candidates: Competing) -> Floats:
    """Number of embeddings of other items in the batch of each anchor, in both views."""
    negatives = np.isfinite(bank.scores).sum(axis=1) - 1.0
    return np.asarray(negatives if candidates == "views" else 2.0 * negatives)


def _by_chance(others: Floats, dim: int, within: float) -> float:
    """Share of embeddings with one of so many others within a shortfall, if all were spread evenly on the sphere."""
    near = 0.5 * betainc((dim - 1) / 2.0, 0.5, 1.0 - (1.0 - within) ** 2)  # share of the sphere
    return float((1.0 - (1.0 - near) ** others).mean())


def measure(
    pairs: EmbeddedPairs,
    settings: DiagnosisSettings,
    *,
    tell: Tell = lambda stage: None,
    more: More | None = None,
) -> Measured:
    """Measure one model.

    Args:
        pairs: Its embeddings.
        settings: How much to compute.
        tell: Called with the name of each stage as it begins.
        more: Measures what becomes the field ``more`` of the result.
    """
    try:
        return _measure(pairs, settings, tell, more)
    except InputError:
        raise
    except ValueError as error:
        # Errors about degenerate scores do not name the model, so its name is added here.
        raise InputError(f"{pairs.name}: {error}") from error


class Tested(NamedTuple):
    """The link test and its batches, smaller sizes that were tried, and the counts of `count_beaten`."""

    bank: Bank
    choices: choice.Choices
    link: evt.LinkTest
    batch_size: int
    batches: int
    tried: tuple[int, ...]
    fitted: int
    beaten: int
    notes: tuple[str, ...]


def _test_link(pairs: EmbeddedPairs, told: Integers | None, settings: DiagnosisSettings) -> Tested:
    """Run the link test. If too few positives are beaten, try larger batches.

    Copies of the anchors win in batches of any size.
    """
    size, count, notes = plan(pairs, settings)
    larger = [] if pairs.equal else larger_sizes(pairs, size)
    tried: tuple[int, ...] = ()
    while True:
        bank = build_bank(pairs, size, count, settings.seed, settings.candidates, told)
        fitted, beaten = count_beaten(bank.link, settings.seed)
        if beaten >= THRESHOLDS.beaten or not larger:
            break
        tried, size = (*tried, size), larger.pop(0)
        count = min(settings.batches, len(pairs.z_i) // size)
    choices = choice.read_choices(*bank.link)
    link = evt.link_test(
        *bank.link,
        bootstraps=settings.bootstraps,
        null_draws=settings.null_draws,
        rng=settings.seed,
        choices=choices,
    )
    if tried:
        sizes = " and of ".join(f"{x:,}" for x in tried)
        notes = (
            f"In batches of {sizes} pairs fewer than {THRESHOLDS.beaten} of the fitted positives are beaten, so "
            f"{count} batches of {size:,} were used.",
        )
    kept, anchors = len(bank.link.scores) // count, size * (2 if settings.candidates == "views" else 1)
    if kept < anchors:
        notes += (
            f"Of the {anchors:,} anchors in a batch {kept:,} were drawn, each with all its candidates, so that time "
            "and memory stay bounded.",
        )
    return Tested(bank, choices, link, size, count, tried, fitted, beaten, notes)


def _measure(pairs: EmbeddedPairs, settings: DiagnosisSettings, tell: Tell, more: More | None) -> Measured:
    tell("link test")
    told = tell_exact_twins(pairs)  # they are false negatives of each other
    tested = _test_link(pairs, told, settings)
    bank, link = tested.bank, tested.link
    tell("tail")
    tail, at_cap = _tail(bank, settings)
    # There is no finite fit under perfect separation, or if the scores do not help at all.
    usable = not link.separated and np.isfinite(link.tau0) and np.isfinite(link.tau)
    tell("rivals")
    rivals = None
    if usable:
        rivals = evt.link_rivals(
            *bank.link, bootstraps=settings.bootstraps, rng=settings.seed, choices=tested.choices
        )
    tell("temperatures")
    curves = _curves(tested.choices, link, settings) if usable else None
    sizes = temperature_curve(replace(pairs, ids=told), settings.candidates, settings.seed)
    tell("whole file")
    overlaps, dim = find_overlaps(pairs, seed=settings.seed), pairs.z_i.shape[1]
    measured = Measured(
        name=pairs.name,
        pairs=len(pairs.z_i),
        dim=dim,
        batch_size=tested.batch_size,
        batches=tested.batches,
        tried=tested.tried,
        fitted=tested.fitted,
        beaten=tested.beaten,
        notes=pairs.notes + tested.notes + at_cap + link.notes,
        tail=tail,
        link=link,
        rivals=rivals,
        curves=curves,
        gap=view_gap(pairs),
        mean_cosine=float(bank.negatives.scores.mean()),
        crowded=bank.crowded,
        crowded_by_chance=_by_chance(_others(bank.link, settings.candidates), dim, CROWD),
        by_label=pairs.by_label,
        equal=pairs.equal,
        sizes=sizes,
        overlaps=overlaps,
        near_by_chance=_by_chance(np.array([len(pairs.z_i) - 1.0]), dim, NEAR),
        towers=pairs.towers,
        texts=pairs.texts,
    )
    return measured if more is None else replace(measured, more=more(pairs, bank, measured, settings, tell))
