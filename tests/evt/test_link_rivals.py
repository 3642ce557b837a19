"""Links with a varying temperature, against quadrature, finite differences and simulated data."""

import numpy as np
import pytest
from scipy import integrate, special, stats

from weince.evt import choice, link_rivals
from weince.evt.link_fit import fit_link
from weince.evt.link_rivals import LinkRivals, VaryingLink
from weince.evt.link_test import Gain, link_bank, link_test
from weince.evt.link_varying import (
    MOST_SPREAD,
    Scored,
    anchor_likelihoods,
    anchor_moments,
    fit_anchors,
    fit_pairs,
    hermite_nodes,
    link_table,
    log_means,
    negative_law,
    pair_moments,
)
from weince.lab.paper.draws import draw_positives
from weince.lab.paper.risk import negatives_of

NODES = hermite_nodes(15)


def bank_of(lam=0.0, tau=0.2, sd=0.0, *, batches=16, batch_size=32, seed=0):
    """Scores of noisy pairs, with positives drawn at a temperature that varies between anchors."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((batches * batch_size, 8))
    bank = link_bank(
        z, z + 0.6 * rng.standard_normal(z.shape), batch_size=batch_size, batches=batches, rng=seed
    )
    taus = tau * np.exp(sd * rng.standard_normal(len(bank.scores)))
    return bank._replace(positives=draw_positives(bank.scores, lam, taus, rng=rng))


def scored(bank):
    return Scored(bank.scores, bank.scores[np.arange(len(bank.scores)), bank.positives])


def paired_by_density(taus, dim=8):
    """Pairs whose positive has the density exp(s / tau) relative to the uniform distribution on the sphere."""
    rng = np.random.default_rng(0)
    z, beside = rng.standard_normal((2, len(taus), dim))
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    beside -= (beside * z).sum(axis=1, keepdims=True) * z
    beside /= np.linalg.norm(beside, axis=1, keepdims=True)
    s = np.linspace(-1, 1, 2001)[1:-1]
    law = s / taus[:, None] + 0.5 * (dim - 3) * np.log1p(-(s**2))
    steps = np.cumsum(np.exp(law - law.max(axis=1, keepdims=True)), axis=1)
    score = np.array(
        [np.interp(x * row[-1], row, s) for x, row in zip(rng.random(len(taus)), steps, strict=True)]
    )
    return z, score[:, None] * z + np.sqrt(1 - score**2)[:, None] * beside


@pytest.mark.parametrize(("weights", "spread"), [((6.0,), 0.4), ((6.0,), 1.2), ((2.0, 1.5), 0.8)])
def test_the_likelihood_of_anchors_that_differ_is_its_integral(weights, spread):
    bank = bank_of(batches=4, batch_size=4)
    choices = choice.read_choices(*bank).using(*range(len(weights)))
    found = anchor_likelihoods(choices, np.array([*weights, spread]), NODES)
    for row in range(0, 32, 5):
        s = bank.scores[row]
        logit = sum(w * f for w, f in zip(weights, (s, -np.log(1 - s)), strict=False))

        def density(x, logit=logit, row=row):
            return special.softmax(np.exp(spread * x) * logit)[bank.positives[row]] * stats.norm.pdf(x)

        wanted = integrate.quad(density, -9, 9, limit=200)[0]
        assert found[row] == pytest.approx(np.log(wanted), abs={0.4: 1e-6, 0.8: 1e-3, 1.2: 1e-2}[spread])


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("theta", [[5.0, 0.7], [2.0, 1.5, 0.4]])
def test_derivatives_of_anchors_that_differ(theta, holes):
    bank = bank_of(batches=4, batch_size=4)
    scores = bank.scores.copy()
    if holes:
        scores[np.arange(0, 32, 2), (bank.positives[::2] + 1) % 7] = np.nan
    choices = choice.read_choices(scores, *bank[1:]).using(*range(len(theta) - 1))
    theta, h = np.array(theta), 1e-5
    found = anchor_moments(choices, theta, NODES)
    np.testing.assert_allclose(found.value, anchor_likelihoods(choices, theta, NODES), atol=1e-12)
    for j, e in enumerate(np.eye(len(theta)) * h):
        up, down = (anchor_moments(choices, theta + sign * e, NODES) for sign in (1, -1))
        np.testing.assert_allclose(found.gradient[:, j], (up.value - down.value) / (2 * h), atol=1e-6)
        bend = (up.gradient.sum(axis=0) - down.gradient.sum(axis=0)) / (2 * h)
        np.testing.assert_allclose(found.information[j], -bend, rtol=1e-5, atol=1e-4)


def test_the_link_of_pairs_that_differ_is_its_definition():
    bank = bank_of(batches=4, batch_size=16)
    seen = scored(bank)
    law, (weight, spread) = negative_law(seen)._replace(last=1e6), (5.0, 0.6)
    found = pair_moments(seen, np.array([weight, spread]), law, NODES)
    negatives = negatives_of(bank.scores, bank.positives).ravel()
    k = weight * np.exp(spread * NODES.points)
    cost = np.array([special.logsumexp(x * negatives) - np.log(negatives.size) for x in k])
    h = special.logsumexp(
        k[:, None, None] * bank.scores - cost[:, None, None], axis=0, b=NODES.weights[:, None, None]
    )
    wanted = h[np.arange(len(h)), bank.positives] - special.logsumexp(h, axis=1)
    # The table has steps of 1/4096, and each negative is counted at the nearest step.
    np.testing.assert_allclose(found.value, wanted, atol=1e-3)


def test_derivatives_of_pairs_that_differ():
    bank = bank_of(batches=4, batch_size=16)
    scores = bank.scores.copy()
    scores[np.arange(0, 128, 2), (bank.positives[::2] + 1) % 31] = np.nan
    seen = Scored(scores, scored(bank).positive)
    law, theta, h = negative_law(seen), np.array([5.0, 0.6]), 1e-5
    assert np.exp(law.shares).sum() == pytest.approx(1.0)
    found = pair_moments(seen, theta, law, NODES)
    for j, e in enumerate(np.eye(2) * h):
        up, down = (pair_moments(seen, theta + sign * e, law, NODES) for sign in (1, -1))
        np.testing.assert_allclose(found.gradient[:, j], (up.value - down.value) / (2 * h), atol=1e-6)
    assert np.all(np.linalg.eigvalsh(found.information) > 0)


@pytest.mark.parametrize("dim", [4, 16, 64])
def test_means_over_negatives_go_on_as_on_a_sphere(dim):
    """Compare with the exact von Mises-Fisher mean cosine, a ratio of Bessel functions."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((600, dim))
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    scores = (z @ z.T)[~np.eye(600, dtype=bool)].reshape(600, 599)
    law = negative_law(Scored(scores, scores[:, 0]))
    k = np.array([0.5, 2.0, 0.99, 1.01, 2.0, 5.0]) * [1, 1, law.last, law.last, law.last, law.last]
    level, mean = log_means(k, law)
    exact = special.ive(dim / 2, k) / special.ive(dim / 2 - 1, k)
    np.testing.assert_allclose(mean, exact, atol=0.04)
    assert level[3] - level[2] == pytest.approx(0.02 * law.last * mean[2], rel=0.01)  # no jump at `last`
    h = 1e-4
    for x, slope in zip(k, mean, strict=True):
        up, down = (log_means(np.array([x + sign * h]), law)[0][0] for sign in (1, -1))
        assert slope == pytest.approx((up - down) / (2 * h), rel=1e-4)


def test_a_closer_negative_than_any_seen_is_no_positive_by_that_alone():
    bank = bank_of(batches=4, batch_size=16)
    negatives = negatives_of(bank.scores, bank.positives)
    nearer = np.where(negatives > 0.7, np.nan, negatives)
    seen = Scored(np.column_stack([nearer, scored(bank).positive]), scored(bank).positive)
    law, theta = negative_law(seen), np.array([8.0, 1.2])
    close = Scored(np.array([[0.4, 0.72, *np.zeros(60)]]), np.array([0.4]))
    far = Scored(np.array([[0.4, 0.70, *np.zeros(60)]]), np.array([0.4]))
    drop = pair_moments(far, theta, law, NODES).value - pair_moments(close, theta, law, NODES).value
    assert 0.0 < drop < 1.0


@pytest.mark.parametrize("weight", [2.0, 20.0])
def test_without_spread_both_are_softmax(weight):
    bank = bank_of(batches=4)
    choices = choice.read_choices(*bank)
    softmax = -choice.log_partitions(choices, np.array([weight, 0.0]))
    flat = np.array([weight, 0.0])
    np.testing.assert_allclose(anchor_likelihoods(choices.using(0), flat, NODES), softmax, atol=1e-12)
    law = negative_law(scored(bank))
    np.testing.assert_allclose(pair_moments(scored(bank), flat, law, NODES).value, softmax, atol=1e-9)
    table = link_table(flat, law, NODES)
    np.testing.assert_allclose(np.diff(table[0]), weight * 2 / (table.shape[1] - 1))


def test_the_fits_are_maxima():
    bank = bank_of(sd=0.8)
    choices = choice.read_choices(*bank)
    weight = 1.0 / fit_link(*bank).tau0
    law = negative_law(scored(bank))
    fits = {
        "anchors": fit_anchors(choices.using(0), np.array([weight]), NODES),
        "pairs": fit_pairs(scored(bank), weight, law, NODES),
    }
    values = {
        "anchors": lambda theta: anchor_likelihoods(choices.using(0), theta, NODES).sum(),
        "pairs": lambda theta: pair_moments(scored(bank), theta, law, NODES).value.sum(),
    }
    for name, found in fits.items():
        assert found.converged
        assert found.value == pytest.approx(values[name](found.theta), abs=1e-6)
        for e in (*np.eye(2), -np.eye(2)[0], -np.eye(2)[1]):
            assert values[name](found.theta * (1 + 0.03 * e)) < found.value


def test_the_blend_is_that_of_the_link_test():
    bank = bank_of(lam=0.5)
    found, test = link_rivals(*bank, rng=3), link_test(*bank, null_draws=1, rng=3)
    assert found.blend.gain == test.gain
    assert found.blend.interval == test.gain_interval
    assert found.blend.t_p_value == test.t_p_value


def test_anchors_that_differ_are_named():
    found = link_rivals(*bank_of(tau=0.1, sd=1.0, batches=24))
    assert found.explanation() == found.explanation(0.02) == "varying"
    assert found.varying is found.anchors
    assert found.anchors.sd_interval[0] < 1.0 < found.anchors.sd_interval[1]
    assert found.anchors.tau == pytest.approx(0.1, rel=0.15)
    assert found.anchors.gain.gain > found.blend.gain + 0.02
    assert found.both.gain.gain == pytest.approx(found.anchors.gain.gain, abs=0.005)
    assert found.both.lam < 0.15


def test_pairs_that_differ_are_named():
    taus = np.where(np.random.default_rng(1).random(2048) < 0.5, 0.05, 0.3)
    found = link_rivals(*link_bank(*paired_by_density(taus, dim=32), batch_size=64, batches=32))
    assert found.explanation() == "varying"
    assert found.varying is found.pairs
    assert found.blend_over_pairs.interval[1] < 0.0


def test_the_spread_of_pairs_is_found():
    taus = 0.1 * np.exp(0.7 * np.random.default_rng(1).standard_normal(2048))
    found = link_rivals(*link_bank(*paired_by_density(taus), batch_size=64, batches=32))
    assert found.pairs.sd_interval[0] < 0.7 < found.pairs.sd_interval[1]
    assert found.pairs.tau == pytest.approx(0.1, rel=0.1)
    assert found.explanation(0.02) == "either"  # the blend fits such pairs equally well


def test_a_bounded_tail_needs_no_temperature_that_varies():
    found = link_rivals(*bank_of(lam=0.5, batches=24))
    assert found.both_over_anchors.interval[0] > 0.0
    assert abs(found.both_over_blend.gain) < 0.002
    assert found.both.sd < 0.3
    assert found.explanation() in ("cap", "either")


def test_softmax_is_left_alone():
    named = [link_rivals(*bank_of(seed=seed), bootstraps=200).explanation() for seed in range(12)]
    # Each of four gains is significant by chance at 2.5 % or less: useless parameters lose on held-out data.
    assert named.count("softmax") >= 10
    gains = link_rivals(*bank_of(seed=0))
    assert abs(gains.pairs.gain.gain) < 0.003
    assert abs(gains.anchors.gain.gain) < 0.003


def test_wrong_pairs_have_the_largest_spread_and_no_larger_one():
    """At a few of the 15 nodes alone the likelihood would be higher: at a spread of 6 and a temperature of 30,000."""
    z, noise = np.random.default_rng(4).standard_normal((2, 1024, 32))
    z_j = z + 0.5 * noise
    z_j[:51] = z_j[np.roll(np.arange(51), 1)]
    found = link_rivals(*link_bank(z, z_j, batch_size=64, batches=16), bootstraps=50)
    assert found.pairs.sd == MOST_SPREAD
    assert np.isnan(found.pairs.sd_interval).all()
    assert found.pairs.converged
    assert 0.01 < found.pairs.tau < 1.0
    assert found.pairs.gain.interval[0] > 0.02


def test_no_spread_is_no_gain():
    """A link whose fitted spread is 0 has a gain of exactly 0, and no interval of the spread."""
    found = link_rivals(*bank_of(tau=1.0))
    for link in (found.anchors, found.pairs):
        assert link.sd == 0.0
        assert link.gain == Gain(0.0, (0.0, 0.0), 1.0)
        assert np.isnan(link.sd_interval).all()


def test_anchors_may_come_in_any_order_and_batches_have_any_name():
    bank = bank_of(sd=0.7)
    order = np.random.default_rng(0).permutation(len(bank.scores))
    plain = link_rivals(*bank)
    shuffled = link_rivals(bank.scores[order], bank.positives[order], 10 * bank.batches[order] - 7)
    for name in ("anchors", "pairs", "both"):
        one, other = getattr(plain, name), getattr(shuffled, name)
        assert other.gain.gain == pytest.approx(one.gain.gain, abs=1e-4)
        assert other.sd == pytest.approx(one.sd, abs=1e-2)


def test_gaps_are_the_same_as_leaving_candidates_out():
    bank = bank_of(sd=0.7)
    wide = np.insert(bank.scores, 3, np.nan, axis=1)
    moved = bank.positives + (bank.positives >= 3)
    found, plain = link_rivals(wide, moved, bank.batches), link_rivals(*bank)
    assert (found.blend, found.anchors, found.both) == (plain.blend, plain.anchors, plain.both)
    assert found.pairs.gain.gain == pytest.approx(plain.pairs.gain.gain, rel=1e-9)


def test_perfect_separation_has_no_rivals():
    bank = bank_of()
    found = link_rivals(bank.scores, bank.scores.argmax(axis=1), bank.batches)
    assert found.separated
    assert np.isnan([found.blend.gain, found.anchors.gain.gain, found.pairs.sd, found.both.lam]).all()
    assert found.explanation() == "softmax"
    misled = link_rivals(bank.scores, bank.scores.argmin(axis=1), bank.batches)
    assert not misled.separated
    assert misled.explanation() == "softmax"


def made_up(blend, anchors, pairs, both, half=0.001):
    def gain(value):
        return Gain(value, (value - half, value + half), 0.0)

    def link(value):
        return VaryingLink(gain(value), 0.1, 0.5, (0.4, 0.6), 0.0, True)

    differences = blend - anchors, blend - pairs, both - anchors, both - blend
    return LinkRivals(
        gain(blend), link(anchors), link(pairs), link(both), *(gain(x) for x in differences), False
    )


@pytest.mark.parametrize(
    ("gains", "named", "named_by_worth"),
    [
        ((0.0, 0.0, 0.0, 0.0), "softmax", "softmax"),
        ((0.01, 0.0, 0.0, 0.01), "cap", "softmax"),
        ((0.144, 0.067, 0.11, 0.144), "cap", "cap"),
        ((0.144, 0.067, 0.14, 0.144), "cap", "either"),
        ((0.144, 0.067, 0.144, 0.144), "either", "either"),
        ((0.086, 0.147, 0.1, 0.147), "varying", "varying"),
        ((0.286, 0.28, 0.33, 0.3), "varying", "varying"),
        ((0.17, 0.14, 0.14, 0.2), "both", "both"),
        ((0.0587, 0.0571, 0.058, 0.0613), "varying", "either"),
    ],
)
def test_what_explains_a_gain(gains, named, named_by_worth):
    found = made_up(*gains)
    assert found.explanation() == named
    assert found.explanation(0.02) == named_by_worth


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bootstraps": 0}, "bootstraps must be at least 1"),
        ({"level": 2.0}, "level"),
        ({"batches": np.zeros(1024, dtype=int)}, "at least 4 batches"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        link_rivals(**(bank_of()._asdict() | change))


def test_one_temperature_for_each_anchor_is_drawn_from():
    scores = np.tile([0.9, 0.5, 0.0], (40_000, 1))
    taus = np.where(np.arange(40_000) % 2, 0.1, 2.0)
    positives = draw_positives(scores, 0.0, taus, rng=3)
    for part, tau in ((0, 2.0), (1, 0.1)):
        counts = np.bincount(positives[part::2], minlength=3)
        assert stats.chisquare(counts, special.softmax(scores[0] / tau) * 20_000).pvalue > 1e-3
    with pytest.raises(ValueError, match=r"of shape \(40000,\), one per anchor; got \(3,\)"):
        draw_positives(scores, 0.0, np.ones(3))
