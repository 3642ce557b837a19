"""The exact fit against independent optimizers, the test against simulated data, and bad inputs."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from weince.evt import choice, link_null
from weince.evt.link_fit import _sandwich, fit_link, fit_pair
from weince.evt.link_test import link_bank, link_test, resampled_interval
from weince.lab.paper.cross_checks import cross_validate, fit_grid
from weince.lab.paper.draws import draw_positives


def pairs(count, dim=6, noise=0.5, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((count, dim))
    return z, z + noise * rng.standard_normal(z.shape)


def simulated(lam, tau, *, batches=8, batch_size=16, dim=6, seed=0):
    z_i, z_j = pairs(batches * batch_size, dim, seed=seed)
    bank = link_bank(z_i, z_j, batch_size=batch_size, batches=batches, rng=seed)
    return bank._replace(positives=draw_positives(bank.scores, lam, tau, rng=seed + 1))


def naive_loglik(bank, lam, tau):
    """The log-likelihood by its definition, in a loop over anchors."""
    total = 0.0
    for row, positive in zip(bank.scores, bank.positives, strict=True):
        s = row[np.isfinite(row)]
        logit = ((1 - lam) * s - lam * np.log(np.maximum(1 - s, 1e-6))) / tau
        at_positive = ((1 - lam) * row[positive] - lam * np.log(max(1 - row[positive], 1e-6))) / tau
        top = logit.max()  # scipy's logsumexp of a row takes thirty times as long
        total += at_positive - top - np.log(np.exp(logit - top).sum())
    return total


@pytest.mark.parametrize(("lam", "tau"), [(0.0, 0.2), (0.3, 0.2), (0.7, 0.5), (1.0, 0.5)])
def test_fit_is_the_maximum_of_the_definition(lam, tau):
    bank = simulated(lam, tau)
    fit = fit_link(*bank)
    assert fit.loglik == pytest.approx(naive_loglik(bank, fit.lam, fit.tau), rel=1e-10)
    assert fit.loglik0 == pytest.approx(naive_loglik(bank, 0.0, fit.tau0), rel=1e-10)
    other = optimize.minimize(
        lambda x: -naive_loglik(bank, x[0], np.exp(x[1])),
        (0.5, np.log(0.3)),
        bounds=[(0, 1), (-5, 3)],
        method="L-BFGS-B",
    )
    assert fit.loglik >= -other.fun - 1e-9
    assert fit.lam == pytest.approx(other.x[0], abs=2e-3)
    assert fit.tau == pytest.approx(np.exp(other.x[1]), rel=2e-3)
    null = optimize.minimize_scalar(lambda x: -naive_loglik(bank, 0.0, np.exp(x)), bounds=(-5, 3))
    assert fit.tau0 == pytest.approx(np.exp(null.x), rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    anchors=st.integers(4, 30),
    candidates=st.integers(2, 9),
    lam=st.floats(0, 1),
    tau=st.floats(0.05, 2),
    holes=st.booleans(),
)
# An interval without an upper end.
@example(seed=468606, anchors=4, candidates=4, lam=0.0, tau=1.0, holes=False)
def test_no_grid_point_beats_the_fit(seed, anchors, candidates, lam, tau, holes):
    rng = np.random.default_rng(seed)
    scores = np.round(rng.uniform(-1, 1, (anchors, candidates)), 2)
    if holes and candidates > 3:
        scores[rng.random(anchors) < 0.5, 0] = -np.inf
        scores[0, 1] = np.nan
    positives = draw_positives(scores, lam, tau, rng=rng)
    batches = np.arange(anchors) % 4
    fit = fit_link(scores, positives, batches)
    if fit.separated:
        assert np.isnan(fit.lam)
        top = np.nanmax(np.where(np.isneginf(scores), np.nan, scores), axis=1)
        assert np.all(scores[np.arange(anchors), positives] >= top - 1e-12)
        return
    grid = fit_grid(scores, positives, batches, lams=7, taus=9)
    assert fit.loglik >= grid.loglik - 1e-9
    assert fit.loglik0 >= grid.loglik0 - 1e-9
    assert 0.0 <= fit.lam <= 1.0
    assert fit.tau > 0.0


def test_grid_is_the_definition():
    bank = simulated(0.3, 0.2, batches=4, batch_size=4)
    grid = fit_grid(*bank, lams=3, taus=4, tau_range=(0.1, 0.8))
    naive = {(lam, tau): naive_loglik(bank, lam, tau) for lam in (0, 0.5, 1) for tau in (0.1, 0.2, 0.4, 0.8)}
    best = max(naive, key=naive.get)
    assert (grid.lam, grid.tau) == pytest.approx(best)
    assert grid.loglik == pytest.approx(naive[best])


def test_derivatives_by_differences():
    choices = choice.read_choices(*simulated(0.3, 0.2, batches=4))
    theta, h = np.array([2.0, 1.5]), 1e-5
    value, gradient, hessian = choice.partition_of(choices)(theta)
    assert value == pytest.approx(choice.log_partitions(choices, theta).sum())
    for j, e in enumerate(np.eye(2) * h):
        up, down = (choice.partition_of(choices)(theta + sign * e) for sign in (1, -1))
        assert gradient[j] == pytest.approx((up[0] - down[0]) / (2 * h), rel=1e-6)
        np.testing.assert_allclose(hessian[j], (up[1] - down[1]) / (2 * h), rtol=1e-5)


def test_shared_partition_gives_the_ratios_of_full_refits():
    """The bootstrap's interpolated ratios equal the likelihood ratios of full refits to the same positives."""
    bank = simulated(0.0, 0.2, batches=6)
    choices = choice.read_choices(*bank)
    weight = 1.0 / fit_link(*bank).tau0
    ratios = link_null.null_ratios(choices, weight, 30, np.random.default_rng(5))
    sums = link_null._drawn_sums(choices, np.array([weight, 0.0]), 30, np.random.default_rng(5))
    partition = choice.partition_of(choices)
    for ratio, target in zip(ratios, sums, strict=True):
        both = optimize.minimize(
            lambda x, t=target: (partition(x)[0] - x @ t, partition(x)[1] - t),
            (weight, 0.1),
            jac=True,
            bounds=[(0, None)] * 2,
            method="L-BFGS-B",
            options={"ftol": 1e-15, "gtol": 1e-9},
        )
        one = optimize.minimize_scalar(
            lambda a, t=target: choice.log_partitions(choices, np.array([a, 0.0])).sum() - a * t[0],
            bounds=(0, 100),
            method="bounded",
            options={"xatol": 1e-9},
        )
        assert ratio == pytest.approx(2 * (one.fun - both.fun), abs=1e-4)


def test_drawn_positives_have_the_models_mean():
    choices = choice.read_choices(*simulated(0.0, 0.2, batches=4))
    theta = np.array([4.0, 0.0])
    sums = link_null._drawn_sums(choices, theta, 4000, np.random.default_rng(0))
    _, mean, cov = choice.partition_of(choices)(theta)
    error = (sums.mean(axis=0) - mean) / np.sqrt(np.diag(cov) / 4000)
    assert np.all(np.abs(error) < 4)
    np.testing.assert_allclose(np.cov(sums.T), cov, rtol=0.15)


def test_drawn_positives_follow_the_link():
    scores = np.tile([0.9, 0.5, np.nan, 0.0, -np.inf], (40_000, 1))
    positives = draw_positives(scores, 0.4, 0.5, rng=3)
    s = scores[0, [0, 1, 3]]
    expected = special.softmax((0.6 * s - 0.4 * np.log(1 - s)) / 0.5)
    counts = np.bincount(positives, minlength=5)
    assert counts[2] == counts[4] == 0
    assert stats.chisquare(counts[[0, 1, 3]], expected * len(scores)).pvalue > 1e-3


def test_bank_from_pairs_is_all_other_views():
    z_i, z_j = pairs(12, dim=3)
    bank = link_bank(z_i * 5, z_j * 0.1, batch_size=4, batches=9, rng=1)
    assert bank.scores.shape == (24, 7)
    assert bank.batches.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    unit = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in (z_i, z_j)]
    paired = np.sum(unit[0] * unit[1], axis=1)
    at_positive = bank.scores[np.arange(24), bank.positives]
    np.testing.assert_allclose(np.sort(at_positive), np.sort(np.tile(paired, 2)), atol=1e-12)
    order = np.random.default_rng(1).permutation(12)[:4]
    views = np.concatenate([unit[0][order], unit[1][order]])
    cosines = views @ views.T
    for anchor in range(8):
        np.testing.assert_allclose(bank.scores[anchor], np.delete(cosines[anchor], anchor), atol=1e-12)


def test_gaps_are_the_same_as_leaving_candidates_out():
    bank = simulated(0.3, 0.2, batches=4)
    wide = np.insert(bank.scores, 3, np.nan, axis=1)
    wide = np.insert(wide, 0, -np.inf, axis=1)
    moved = bank.positives + 1 + (bank.positives >= 3)
    even, plain = fit_link(wide, moved, bank.batches), fit_link(*bank)
    assert even == plain
    ragged = np.hstack([wide, np.full((len(wide), 1), np.nan)])
    ragged[0, -1] = -1.0
    extra = fit_link(ragged, moved, bank.batches)
    assert extra.loglik == pytest.approx(plain.loglik, abs=0.1)
    assert extra.loglik == pytest.approx(
        naive_loglik(bank._replace(scores=ragged, positives=moved), extra.lam, extra.tau)
    )


def test_anchors_may_come_in_any_order():
    bank = simulated(0.3, 0.2)
    order = np.random.default_rng(0).permutation(len(bank.scores))
    fit, shuffled = fit_link(*bank), fit_link(*(x[order] for x in bank))
    assert shuffled.lam == pytest.approx(fit.lam, rel=1e-8)
    assert shuffled.lam_interval == pytest.approx(fit.lam_interval, rel=1e-6)


def test_sandwich_is_the_textbook_formula():
    bank = simulated(0.3, 0.2, batches=12, batch_size=64, dim=4)
    fit = fit_link(*bank)
    assert fit.interval_method == "sandwich"
    a, b = (1 - fit.lam) / fit.tau, fit.lam / fit.tau
    information, scores = np.zeros((2, 2)), np.zeros((12, 2))
    for row, positive, batch in zip(*bank, strict=True):
        f = np.stack([row, -np.log(1 - row)])
        p = special.softmax(a * f[0] + b * f[1])
        scores[batch] += f[:, positive] - f @ p
        information += (f * p) @ f.T - np.outer(f @ p, f @ p)
    n = len(bank.scores)
    bread = np.linalg.inv(information)
    robust = 12 / 11 * (n - 1) / (n - 2) * bread @ (scores.T @ scores) @ bread
    slope = np.array([-b, a]) / (a + b) ** 2
    half = stats.t.ppf(0.975, 11) * np.sqrt(slope @ robust @ slope)
    assert fit.lam_interval == pytest.approx((fit.lam - half, fit.lam + half), rel=1e-5)


def test_the_interval_of_the_best_temperature_is_the_textbook_formula():
    bank = simulated(0.3, 0.2, batches=12)
    fit = fit_link(*bank)
    weight = 1.0 / fit.tau0
    information, scores = 0.0, np.zeros(12)
    for row, positive, batch in zip(*bank, strict=True):
        p = special.softmax(weight * row)
        scores[batch] += row[positive] - row @ p
        information += row**2 @ p - (row @ p) ** 2
    error = np.sqrt(12 / 11 * (scores @ scores)) / information
    factor = np.exp(stats.t.ppf(0.975, 11) * error / weight)
    assert fit.tau0_interval == pytest.approx((fit.tau0 / factor, fit.tau0 * factor), rel=1e-5)


def test_the_interval_of_the_best_temperature_covers_it():
    hits = 0
    for seed in range(100):
        low, high = fit_link(*simulated(0.0, 0.2, seed=seed, batches=12, dim=4)).tau0_interval
        hits += low <= 0.2 <= high
    assert 88 <= hits < 100


def test_sandwich_on_a_bound_is_of_the_spread_over_batches():
    """For a weight at its bound of 0, the batch scores have a nonzero mean, which must not count as variance."""
    bank = next(b for b in (simulated(0.0, 0.2, seed=s) for s in range(20)) if fit_link(*b).lam == 0.0)
    choices = choice.read_choices(*bank)
    theta = fit_pair(choices).full.theta
    robust, plain = _sandwich(choices, theta)
    scores = np.zeros((8, 2))
    for row, positive, batch in zip(*bank, strict=True):
        f = np.stack([row, -np.log(1 - row)])
        scores[batch] += f[:, positive] - f @ special.softmax(theta @ f)
    assert abs(scores.mean(axis=0)[1]) > 1e-3
    n = len(bank.scores)
    wanted = 8 * (n - 1) / (n - 2) * plain @ np.cov(scores.T) @ plain
    np.testing.assert_allclose(robust, wanted, rtol=1e-6)


def test_profile_interval_ends_where_the_likelihood_has_fallen():
    bank = simulated(0.02, 0.2, batches=8, seed=4)
    fit = fit_link(*bank)
    assert fit.interval_method == "profile"
    drops = []
    for lam in fit.lam_interval:
        best = optimize.minimize_scalar(lambda x, v=lam: -naive_loglik(bank, v, np.exp(x)), bounds=(-4, 2))
        drops.append(fit.loglik + best.fun)
    assert fit.lam_interval[0] == 0.0 or drops[0] == pytest.approx(drops[1], rel=1e-2)
    # The drop is half a squared t quantile times a variance ratio, which is near 1 for independent anchors.
    assert 0.2 < drops[1] / (0.5 * stats.t.ppf(0.975, 7) ** 2) < 5.0


def coverage(lam, tau, repeats, **size):
    lams = taus = 0
    for seed in range(repeats):
        fit = fit_link(*simulated(lam, tau, seed=1000 + seed, **size))
        lams += fit.lam_interval[0] <= lam <= fit.lam_interval[1]
        taus += fit.tau_interval[0] <= tau <= fit.tau_interval[1]
    return lams, taus


def test_intervals_cover_an_interior_truth():
    # With 95 % coverage, fewer than 88 hits or all of 100 each have a probability below 1 %.
    for hits in coverage(0.3, 0.2, 100, batches=12, batch_size=16, dim=4):
        assert 88 <= hits < 100


def test_softmax_truth_gives_zero_gain_or_no_significance():
    zeros, rejected = 0, 0
    for seed in range(40):
        result = link_test(*simulated(0.0, 0.2, seed=seed), bootstraps=50, null_draws=39)
        zeros += result.lam == 0.0
        rejected += result.lr_p_value <= 0.05
        if result.lam == 0.0:
            assert result.gain == 0.0
            assert set(result.gain_by_batch) == {0.0}
            assert result.t_p_value == result.lr_p_value == 1.0
            assert result.gain_interval == (0.0, 0.0)
    # About half of the banks; a number outside 8 to 32 has a probability below 1e-4.
    assert 8 <= zeros <= 32
    assert rejected <= 7


@pytest.mark.parametrize("batches", [2, 4, 8, 16])
def test_the_interval_of_a_gain_covers_it_with_few_batches_too(batches):
    rng = np.random.default_rng(0)
    found = [resampled_interval(rng.standard_normal(batches), 400, 0.95, rng) for _ in range(1000)]
    assert 0.92 < np.mean([low <= 0.0 <= high for low, high in found]) < 0.98  # standard error 0.007


def test_a_blend_is_found_and_reported():
    bank = simulated(0.3, 0.2, batches=20, batch_size=32, dim=4)
    result = link_test(*bank, null_draws=99)
    # Tests above check coverage over many banks; here the interval must contain its own estimate.
    assert result.lam_interval[0] < result.lam < result.lam_interval[1]
    assert result.tau_interval[0] < result.tau < result.tau_interval[1]
    assert result.lr_p_value == pytest.approx(0.01)
    assert result.t_p_value < 0.01
    assert result.gain_interval[0] < result.gain < result.gain_interval[1]
    assert result.gain_ratio == pytest.approx(np.exp(result.gain))
    assert sorted(result.held_in + result.held_out) == list(range(20))
    assert not result.separated
    assert not result.notes
    assert result == link_test(*bank, null_draws=99)


def test_gain_is_the_definition_on_held_out_batches():
    bank = simulated(0.5, 0.2, batches=6)
    bank = bank._replace(batches=bank.batches * 10 - 7)
    kept = np.arange(len(bank.scores)) % 32 >= bank.batches // 4  # batches of different sizes
    bank = type(bank)(*(x[kept] for x in bank))
    result = link_test(*bank, null_draws=19)
    gains = []
    for label in result.held_out:
        part = type(bank)(*(x[bank.batches == label] for x in bank))
        gap = naive_loglik(part, result.lam, result.tau) - naive_loglik(part, 0.0, result.tau0)
        gains.append(gap / len(part.scores))
    np.testing.assert_allclose(result.gain_by_batch, gains, atol=1e-9)
    assert result.gain == pytest.approx(np.mean(gains))
    t = stats.ttest_1samp(gains, 0.0, alternative="greater")
    assert (result.t_statistic, result.t_p_value) == pytest.approx((t.statistic, t.pvalue), rel=1e-5)
    inside = type(bank)(*(x[np.isin(bank.batches, result.held_in)] for x in bank))
    ratio = 2 * (naive_loglik(inside, result.lam, result.tau) - naive_loglik(inside, 0.0, result.tau0))
    assert result.lr_statistic == pytest.approx(ratio, abs=1e-6)


def left_out_gain(bank, label):
    """lam fitted to all other batches, and the gain of that fit on this batch."""
    rest, part = (
        type(bank)(*(x[which] for x in bank)) for which in (bank.batches != label, bank.batches == label)
    )
    fit = fit_link(*rest)
    gap = naive_loglik(part, fit.lam, fit.tau) - naive_loglik(part, 0.0, fit.tau0)
    return fit.lam, gap / len(part.scores)


def test_cross_validation_is_the_definition():
    bank = simulated(0.5, 0.2, batches=6)
    result = cross_validate(*bank, folds=6)  # one fold per batch
    wanted = sorted(left_out_gain(bank, label) for label in range(6))
    found = sorted(zip(result.lams, result.gains, strict=True))
    # A fit stops when a step would gain less than 1e-9 nats, which is about 1e-6 in lam.
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert result.gain == pytest.approx(np.mean(result.gains))
    assert result.sd == pytest.approx(np.std(result.gains, ddof=1))


def test_a_separated_fold_does_not_keep_the_others_from_a_fit():
    bank, beaten = simulated(0.0, 0.2), 3
    positives = np.where(bank.batches == beaten, bank.positives, bank.scores.argmax(axis=1))
    bank = bank._replace(positives=positives)
    result = cross_validate(*bank, folds=8)
    wanted = [left_out_gain(bank, label)[1] for label in range(8) if label != beaten]
    found = np.sort(result.gains)
    np.testing.assert_allclose(found[:-1], np.sort(wanted), atol=1e-6)
    assert np.isnan(found[-1])  # the other batches alone are separated


def test_perfect_separation_is_said():
    bank = simulated(0.0, 0.2)
    result = link_test(bank.scores, bank.scores.argmax(axis=1), bank.batches)
    assert result.separated
    assert result.top1 == 1.0
    assert "separation" in result.notes[0]
    numbers = (result.lam, result.tau, result.tau0, result.gain, result.lr_p_value, result.t_p_value)
    assert np.isnan(numbers).all()
    assert result.interval_method == "none"


def test_a_single_beaten_anchor_is_said():
    bank = simulated(0.0, 0.2)
    positives = bank.scores.argmax(axis=1)
    positives[0] = bank.scores[0].argsort()[-2]
    fit = fit_link(bank.scores, positives, bank.batches)
    assert not fit.separated
    assert "Only 1 of 256" in fit.notes[0]


def test_scores_that_mislead_have_no_temperature():
    bank = simulated(0.0, 0.2)
    fit = fit_link(bank.scores, bank.scores.argmin(axis=1), bank.batches)
    assert (fit.lam, fit.tau, fit.tau0) == (0.0, np.inf, np.inf)
    assert any("infinite" in note for note in fit.notes)
    assert fit.loglik == pytest.approx(-len(bank.scores) * np.log(bank.scores.shape[1]))


def test_two_levels_of_score_do_not_determine_lam():
    scores = np.tile([0.8, 0.2, 0.2], (40, 1))
    positives = np.where(np.arange(40) % 3 == 0, 1, 0)
    fit = fit_link(scores, positives, np.arange(40) // 10)
    assert any("not determined" in note for note in fit.notes)


def test_duplicates_at_the_cap_are_finite():
    z_i, z_j = pairs(64)
    z_i[1] = z_i[0]
    z_j[2] = z_i[2]
    result = link_test(*link_bank(z_i, z_j, batch_size=16), null_draws=19)
    assert np.isfinite([result.lam, result.tau, result.gain]).all()


BANK = simulated(0.3, 0.2, batches=4, batch_size=4)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"scores": BANK.scores[0]}, ValueError, r"\(anchors, candidates\)"),
        ({"scores": BANK.scores * 3}, ValueError, "cosines"),
        (
            {"scores": np.full_like(BANK.scores, np.nan)},
            ValueError,
            "positive must have a score; .* anchor 0",
        ),
        ({"scores": np.full_like(BANK.scores, 0.5)}, ValueError, "nothing to choose"),
        ({"scores": np.where(BANK.scores > 0.99, np.inf, BANK.scores) * 0 + np.inf}, ValueError, "cosines"),
        ({"positives": BANK.positives + 7}, ValueError, "columns 0 to 6"),
        ({"positives": BANK.positives[:3]}, ValueError, r"\(32,\)"),
        ({"positives": BANK.positives * 1.0}, TypeError, "integers"),
        ({"batches": BANK.batches * 1.0}, TypeError, "integers"),
        ({"batches": BANK.batches * 0}, ValueError, "at least 4 batches"),
        ({"level": 1.5}, ValueError, "level"),
        ({"null_draws": 0}, ValueError, "null_draws"),
    ],
)
def test_bad_input_is_named(change, error, words):
    with pytest.raises(error, match=words):
        link_test(**(BANK._asdict() | change))


def test_equal_embeddings_are_refused():
    same = np.tile(np.random.default_rng(0).standard_normal(7), (64, 1))
    with pytest.raises(ValueError, match="nothing to choose"):
        link_test(*link_bank(same, same * 3, batch_size=16))


def test_lower_precision_and_lists_are_read():
    bank = simulated(0.3, 0.2, batches=4)
    single = fit_link(bank.scores.astype(np.float32), bank.positives.tolist(), bank.batches.astype(np.int32))
    assert single.lam == pytest.approx(fit_link(*bank).lam, rel=1e-3)


def test_bad_banks_are_named():
    z_i, z_j = pairs(10)
    with pytest.raises(ValueError, match="both be"):
        link_bank(z_i, z_j[:5])
    with pytest.raises(ValueError, match="got 10 pairs: take a smaller"):
        link_bank(z_i, z_j, batch_size=11)
    with pytest.raises(ValueError, match="pair 4"):
        link_bank(np.where(np.arange(10)[:, None] == 4, np.nan, z_i), z_j)
    with pytest.raises(ValueError, match="at least 2"):
        link_bank(z_i, z_j, batch_size=1)
    with pytest.raises(ValueError, match="tau"):
        draw_positives(BANK.scores, 0.5, 0.0)
