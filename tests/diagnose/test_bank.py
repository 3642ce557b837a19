"""Batches of scores against those of the library, masks, and the choice of batch sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnose.synthetic import small, two_encoders, views
from weince import evt
from weince.diagnose import bank as module
from weince.diagnose.bank import build_bank, count_beaten, larger_sizes, plan, view_gap
from weince.diagnose.diagnosis_settings import FEWEST_BATCHES, FEWEST_PAIRS, DiagnosisSettings
from weince.diagnose.reading import EmbeddedPairs, InputError, make_pairs


def test_without_ids_the_bank_is_that_of_the_link_test():
    pairs = small(pairs=300)
    bank = build_bank(pairs, 32, 5, seed=3)
    other = evt.link_bank(pairs.z_i, pairs.z_j, batch_size=32, batches=5, rng=3)
    np.testing.assert_allclose(bank.link.scores, other.scores, atol=1e-12)
    np.testing.assert_array_equal(bank.link.positives, other.positives)
    np.testing.assert_array_equal(bank.link.batches, other.batches)


def test_across_views_the_bank_has_the_scores_of_the_other_view():
    pairs = small(pairs=96)
    bank = build_bank(pairs, 32, 3, seed=3, candidates="cross")
    other = evt.link_bank(pairs.z_i, pairs.z_j, batch_size=32, batches=3, candidates="cross", rng=3)
    for found, wanted in zip(bank.link, other, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-12)
    u, v = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (pairs.z_i, pairs.z_j))
    order = np.random.default_rng(3).permutation(96).reshape(3, 32)
    np.testing.assert_allclose(bank.link.scores, np.concatenate([u[r] @ v[r].T for r in order]), atol=1e-12)
    assert bank.link.positives.tolist() == 3 * list(range(32))
    assert bank.negatives.scores.shape == (3 * 32 * 31,)


def test_beaten_positives_are_those_that_the_link_test_fits():
    pairs = make_pairs("small", *views(pairs=256, dim=8, noise=0.35), np.arange(256) // 2)
    bank = build_bank(pairs, 32, 8, seed=3).link
    found = evt.link_test(*bank, bootstraps=1, null_draws=1, rng=3)
    wanted = [
        max(s for s in row if s == s) > row[positive]
        for row, positive, batch in zip(*(part.tolist() for part in bank), strict=True)
        if batch in found.held_in
    ]
    assert count_beaten(bank, 3) == (len(wanted), sum(wanted)) != count_beaten(bank, 4)
    assert any(f"Only {sum(wanted)} of {len(wanted)} fitted anchors" in note for note in found.notes)


def test_across_views_pairs_with_equal_ids_do_not_compete():
    z_i, z_j = views(pairs=64)
    ids = np.random.default_rng(1).integers(0, 8, 64)
    bank = build_bank(make_pairs("x", z_i, z_j, ids), 32, 2, seed=0, candidates="cross")
    for b, rows in enumerate(np.random.default_rng(0).permutation(64).reshape(2, 32)):
        same = ids[rows][:, None] == ids[rows]
        np.testing.assert_array_equal(
            np.isnan(bank.link.scores[32 * b : 32 * b + 32]), same & ~np.eye(32, dtype=bool)
        )


def test_the_gap_of_the_views_is_a_difference_of_mean_cosines():
    z_i, z_j = two_encoders(pairs=40, dim=4)
    u, v = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (z_i, z_j))
    others = ~np.eye(40, dtype=bool)
    within = ((u @ u.T)[others].mean() + (v @ v.T)[others].mean()) / 2
    assert view_gap(make_pairs("x", z_i, z_j)) == pytest.approx(within - (u @ v.T)[others].mean())
    assert view_gap(make_pairs("x", z_i, z_j)) > 0.2
    for seed in range(20):  # views of one kind, few pairs and dimensions
        assert abs(view_gap(small(pairs=128, dim=2, seed=seed))) < 0.05


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_the_length_of_rows_does_not_matter(scale):
    z_i, z_j = views(pairs=64)
    long = make_pairs("x", scale * z_i, z_j)
    assert long.notes == ()
    plain, scaled = (build_bank(pairs, 32, 2, seed=0).link for pairs in (make_pairs("x", z_i, z_j), long))
    np.testing.assert_allclose(plain.scores, scaled.scores, atol=1e-12)
    other = evt.link_bank(scale * z_i, z_j, batch_size=32, batches=2, rng=0)
    np.testing.assert_allclose(plain.scores, other.scores, atol=1e-12)
    assert view_gap(long) == pytest.approx(view_gap(make_pairs("x", z_i, z_j)))


def test_each_negative_pair_is_counted_once():
    pairs = small(pairs=96)
    bank = build_bank(pairs, 32, 3, seed=0)
    assert len(bank.negatives.scores) == 3 * (32 * 63 - 32)
    for b, rows in enumerate(np.random.default_rng(0).permutation(96).reshape(3, 32)):
        seen = [(k, z[k] / np.linalg.norm(z[k])) for z in (pairs.z_i, pairs.z_j) for k in rows]
        naive = [float(p @ q) for n, (i, p) in enumerate(seen) for j, q in seen[n + 1 :] if i != j]
        ours = np.sort(bank.negatives.scores[bank.negatives.batches == b])
        np.testing.assert_allclose(ours, np.sort(naive), atol=1e-12)


def test_pairs_with_equal_ids_do_not_compete():
    z_i, z_j = views(pairs=64)
    ids = np.random.default_rng(1).integers(0, 8, 64)
    bank = build_bank(make_pairs("x", z_i, z_j, ids), 32, 2, seed=0)
    order = np.random.default_rng(0).permutation(64).reshape(2, 32)
    for b, rows in enumerate(order):
        twice = np.tile(ids[rows], 2)
        for a in range(64):
            row = bank.link.scores[b * 64 + a]
            others = [k for k in range(64) if k != a]
            for column, k in enumerate(others):
                positive = k == (a + 32) % 64
                assert np.isnan(row[column]) == (twice[a] == twice[k] and not positive)
    assert np.isfinite(bank.negatives.scores).all()


@given(st.integers(1, 20_000), st.none() | st.integers(FEWEST_PAIRS, 600), st.integers(FEWEST_BATCHES, 64))
def test_a_plan_fits_the_data_or_is_refused(n, batch_size, batches):
    pairs = EmbeddedPairs("x", np.ones((n, 1)), np.ones((n, 1)))
    try:
        size, count, notes = plan(pairs, DiagnosisSettings(batch_size=batch_size, batches=batches))
    except InputError:
        assert n < FEWEST_BATCHES * FEWEST_PAIRS
        return
    assert size * count <= n
    assert FEWEST_BATCHES <= count <= batches
    if batch_size and n >= FEWEST_BATCHES * batch_size:
        assert size == batch_size
    assert FEWEST_PAIRS <= size <= (batch_size or 256)
    assert bool(notes) == ((size, count) != (batch_size or 256, batches))
    assert ("Fewer batches" in "".join(notes)) == (count < batches)
    assert ("Smaller batches" in "".join(notes)) == (size < (batch_size or 256))


def test_large_batches_keep_some_anchors_with_all_their_candidates(monkeypatch):
    pairs = small(pairs=256)
    whole = build_bank(pairs, 64, 4, seed=0)
    monkeypatch.setattr(module, "MOST_SCORES", 4 * 40 * 128)
    monkeypatch.setattr(module, "MOST_NEGATIVES", 4 * 1000)
    some = build_bank(pairs, 64, 4, seed=0)
    assert some.link.scores.shape == (4 * 40, 127)
    assert np.bincount(some.link.batches).tolist() == [40] * 4
    for b in range(4):
        rows = {row.tobytes(): won for row, won in zip(*whole.link[:2], strict=True)}
        here = some.link.batches == b
        assert len({row.tobytes() for row in some.link.scores[here]}) == 40
        for row, won in zip(some.link.scores[here], some.link.positives[here], strict=True):
            assert rows[row.tobytes()] == won
        assert np.isin(
            some.negatives.scores[some.negatives.batches == b],
            whole.negatives.scores[whole.negatives.batches == b],
        ).all()
    assert abs(len(some.negatives.scores) - 4000) < 300  # random: five standard deviations


@pytest.mark.parametrize(
    ("pairs", "size", "larger"),
    [(400, 32, [64, 100]), (8192, 256, [512, 1024, 2048]), (100_000, 256, [512, 1024, 2048]), (128, 32, [])],
)
def test_larger_batches_are_those_of_which_there_are_four(pairs, size, larger):
    assert larger_sizes(EmbeddedPairs("x", np.ones((pairs, 1)), np.ones((pairs, 1))), size) == larger


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batches": 1}, "at least 4 batches"),
        ({"batches": 3}, "at least 4 batches"),
        ({"batch_size": 8}, "at least 32 pairs"),
        ({"bootstraps": 0}, "bootstraps"),
        ({"quantile": 1.0}, "quantile"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"candidates": "clip"}, 'candidates must be "views" or "cross"; got \'clip\''),
    ],
)
def test_settings_are_checked(options, said):
    with pytest.raises(InputError, match=said):
        DiagnosisSettings(**options)
