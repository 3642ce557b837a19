"""What explains a gain over softmax: a bounded tail, or a temperature that varies?

The blend of `weince.evt.link_test` gains over softmax where the cap of the cosine matters. Anchors or pairs of
different difficulty also produce a gain, without any cap. So five links are fitted to the same batches and judged
on the same held-out batches, those of `link_test`:

=========  ===============================================================  =============
softmax    ``a * s``                                                        ``a``
blend      ``a * s + b * g(s)``, ``g(s) = -log(1 - s)``                     ``a, b``
anchors    ``k * a * s``, ``log k`` normal, drawn for every anchor          ``a, v``
pairs      ``k * a * s``, the same, drawn for every pair                    ``a, v``
both       ``k * (a * s + b * g(s))``, ``k`` drawn for every anchor         ``a, b, v``
=========  ===============================================================  =============

`weince.evt.link_varying` explains how the two kinds of variation differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from weince.evt import choice
from weince.evt.arrays import Bounds, Floats, Integers, check_fraction, check_least
from weince.evt.choice import Choices
from weince.evt.link_fit import fit_pair
from weince.evt.link_test import Gain, held_out_gain, split_batches
from weince.evt.link_varying import (
    MOST_ANCHORS,
    MOST_SPREAD,
    Moments,
    Nodes,
    Scored,
    Varying,
    anchor_likelihoods,
    anchor_moments,
    fit_anchors,
    fit_pairs,
    hermite_nodes,
    negative_law,
    pair_moments,
    spread_rows,
)

Explanation = Literal["softmax", "cap", "varying", "both", "either"]


@dataclass(frozen=True)
class VaryingLink:
    """A link whose temperature varies, fitted to the held-in batches."""

    gain: Gain  # its held-out gain over softmax
    tau: float  # median temperature
    # standard deviation of the temperature's logarithm, at most 2: a few percent of wrong pairs would make it huge
    sd: float
    sd_interval: Bounds  # its interval, from the cluster-robust covariance; NaN if ``sd`` is 0 or 2
    lam: float  # weight of the shortfall coordinate; 0 if the link has none
    converged: bool  # whether the fit reached its maximum


@dataclass(frozen=True)
class LinkRivals:
    """Result of `link_rivals`; gains are held out, in nats per anchor, and NaN if softmax has no finite fit."""

    blend: Gain  # gain of the blend over softmax, equal to that of `link_test` with the same seed
    anchors: VaryingLink  # softmax whose temperature varies from anchor to anchor
    pairs: VaryingLink  # softmax whose temperature varies from pair to pair
    both: VaryingLink  # the blend whose temperature varies from anchor to anchor
    blend_over_anchors: Gain  # gain of the blend over ``anchors``; below 0 where the rival is better
    blend_over_pairs: Gain  # gain of the blend over ``pairs``
    both_over_anchors: Gain  # gain of adding the shortfall to `anchors`
    both_over_blend: Gain  # gain of letting the temperature of the blend vary from anchor to anchor
    separated: bool  # True when every positive has the top score: then no finite fit exists

    @property
    def varying(self) -> VaryingLink:
        """The better of the two links in which only the temperature varies."""
        return self.pairs if self.pairs.gain.gain > self.anchors.gain.gain else self.anchors

    def explanation(self, worth: float = 0.0) -> Explanation:
        """What explains the positives, counting gains of at least ``worth`` nats whose interval lies above 0.

        - "softmax": neither the blend nor a temperature that varies gains over softmax.
        - "cap": the blend gains over `pairs`, the shortfall adds to `anchors`, and the reverse does not hold.
        - "varying": a temperature that varies gains over the blend, or adds to it; the shortfall does not.
        - "both": each adds to the other.
        - "either": neither adds to the other; these data cannot tell them apart.
        """

        def sure(gain: Gain) -> bool:
            return gain.gain >= worth and gain.interval[0] > 0.0

        if not any(sure(gain) for gain in (self.blend, self.anchors.gain, self.pairs.gain)):
            return "softmax"
        pairs_over_blend = Gain(-self.blend_over_pairs.gain, _turned(self.blend_over_pairs.interval), np.nan)
        cap = sure(self.both_over_anchors) and sure(self.blend_over_pairs)
        varying = sure(self.both_over_blend) or sure(pairs_over_blend)
        if cap:
            return "both" if varying else "cap"
        return "varying" if varying else "either"


def _turned(interval: Bounds) -> Bounds:
    return -interval[1], -interval[0]


def link_rivals(
    scores: ArrayLike,
    positives: ArrayLike,
    batches: ArrayLike,
    *,
    bootstraps: int = 2000,
    level: float = 0.95,
    rng: int | np.random.Generator = 0,
    choices: Choices | None = None,
) -> LinkRivals:
    """Compare the blend with softmax links whose temperature varies.

    Args:
        scores: ``(anchors, candidates)`` cosines, as in `link_test`.
        positives: ``(anchors,)`` column of each anchor's positive.
        batches: ``(anchors,)`` integer batch of each anchor.
        bootstraps: Resamplings of the held-out batches for the intervals of the gains.
        level: Level of all intervals.
        rng: Seed or generator; with the seed of a `link_test`, the split is the same.
        choices: The same scores, if `weince.evt.choice.read_choices` has read them before.

    Examples:
        >>> import numpy as np
        >>> from weince.evt import link_bank, link_rivals
        >>> z_i, noise = np.random.default_rng(0).normal(size=(2, 256, 8))
        >>> bank = link_bank(z_i, z_i + noise, batch_size=32, batches=8)
        >>> link_rivals(*bank, bootstraps=50).explanation(worth=0.02)
        'softmax'
    """
    check_fraction(level, "level")
    check_least(bootstraps=(bootstraps, 1))
    generator = np.random.default_rng(rng)
    choices = choices or choice.read_choices(scores, positives, batches)
    inside, outside = split_batches(len(choices.labels), generator)
    fitted, judged = choices.take(inside), choices.take(outside)
    pair = fit_pair(fitted)
    softmax, blend = pair.null.theta, pair.full.theta
    if pair.separated or softmax[0] == 0.0:
        return _nothing(pair.separated)
    some = spread_rows(fitted.anchors, MOST_ANCHORS)
    halves = Halves(fitted.rows(some), judged, choice.batch_means(judged, softmax), hermite_nodes(15), level)
    s, columns = choice.read_scores(scores, positives)
    mine, others = (_scored(s, columns, batches, choices.labels[which]) for which in (inside, outside))
    mine = Scored(mine.scores[some], mine.positive[some])

    def gain(values: Floats) -> Gain:
        return held_out_gain(values, bootstraps, level, generator)

    blended = choice.batch_means(judged, blend) - halves.base
    blend_gain = gain(blended)  # first, so that it uses the same random draws as `link_test`
    anchors = _anchors(halves, (0,), softmax[:1])
    pairs = _pairs(halves, mine, others, float(softmax[0]))
    both = _anchors(halves, (0, 1), blend)
    return LinkRivals(
        blend=blend_gain,
        anchors=_report(anchors, gain(anchors.gains)),
        pairs=_report(pairs, gain(pairs.gains)),
        both=_report(both, gain(both.gains)),
        blend_over_anchors=gain(blended - anchors.gains),
        blend_over_pairs=gain(blended - pairs.gains),
        both_over_anchors=gain(both.gains - anchors.gains),
        both_over_blend=gain(both.gains - blended),
        separated=False,
    )


class Halves(NamedTuple):
    """Choices to fit and to judge, log-likelihood of softmax in each judged batch, nodes, and level."""

    fitted: Choices
    judged: Choices
    base: Floats
    nodes: Nodes
    level: float

    def over_softmax(self, likelihoods: Floats) -> Floats:
        """Gains over softmax (batches,) of a link with these log-likelihoods (anchors,)."""
        return self.judged.by_batch(likelihoods) / np.bincount(self.judged.batches) - self.base


class JudgedLink(NamedTuple):
    """A fitted link, the interval of its spread, and its gains over softmax in each held-out batch."""

    found: Varying
    sd_interval: Bounds
    gains: Floats


def _anchors(halves: Halves, columns: tuple[int, ...], start: Floats) -> JudgedLink:
    """The link in some coordinates, with a temperature that varies from anchor to anchor."""
    fitted, judged = halves.fitted.using(*columns), halves.judged.using(*columns)
    found = fit_anchors(fitted, start, halves.nodes)
    ends = _sd_interval(found, anchor_moments(fitted, found.theta, halves.nodes), halves)
    return JudgedLink(found, ends, halves.over_softmax(anchor_likelihoods(judged, found.theta, halves.nodes)))


def _pairs(halves: Halves, fitted: Scored, judged: Scored, start: float) -> JudgedLink:
    """Softmax with a temperature that varies from pair to pair."""
    law = negative_law(fitted)
    found = fit_pairs(fitted, start, law, halves.nodes)
    if found.theta[-1] == 0.0:
        return JudgedLink(found, (np.nan, np.nan), np.zeros_like(halves.base))
    ends = _sd_interval(found, pair_moments(fitted, found.theta, law, halves.nodes), halves)
    return JudgedLink(
        found, ends, halves.over_softmax(pair_moments(judged, found.theta, law, halves.nodes).value)
    )


def _scored(scores: Floats, positives: Integers, batches: ArrayLike, labels: Integers) -> Scored:
    """The scores of some batches, sorted by batch as in `Choices`."""
    which = np.asarray(batches)
    rows = np.flatnonzero(np.isin(which, labels))
    rows = rows[np.argsort(which[rows], kind="stable")]
    return Scored(scores[rows], scores[rows, positives[rows]])


def _sd_interval(found: Varying, moments: Moments, halves: Halves) -> Bounds:
    """Interval of the spread that allows for dependence within a batch."""
    sd, groups = float(found.theta[-1]), len(halves.fitted.labels)
    if sd in (0.0, MOST_SPREAD):
        return np.nan, np.nan
    covariance = choice.cluster_covariance(halves.fitted, moments.gradient, moments.information)
    error = np.sqrt(covariance[-1, -1])
    half = float(special.stdtrit(groups - 1, 0.5 + halves.level / 2.0) * error)
    return max(sd - half, 0.0), sd + half


def _report(judged: JudgedLink, gain: Gain) -> VaryingLink:
    *weights, sd = judged.found.theta.tolist()
    total = sum(weights)
    lam = weights[1] / total if len(weights) > 1 and total > 0.0 else 0.0
    tau = 1.0 / total if total > 0.0 else np.inf
    return VaryingLink(gain, tau, sd, judged.sd_interval, lam, judged.found.converged)


def _nothing(separated: bool) -> LinkRivals:
    """The result when softmax has no finite best temperature."""
    gain = Gain(np.nan, (np.nan, np.nan), np.nan)
    link = VaryingLink(gain, np.nan, np.nan, (np.nan, np.nan), np.nan, False)
    return LinkRivals(gain, link, link, link, gain, gain, gain, gain, separated)
