"""Duplicates, false negatives and hubs that were planted are counted; naive loops agree."""

from dataclasses import replace

import numpy as np
import pytest

from diagnose.synthetic import views
from weince.diagnose import overlaps as module
from weince.diagnose.decision import decide
from weince.diagnose.diagnosis_settings import QUICK
from weince.diagnose.measure import measure
from weince.diagnose.overlaps import MARGINS, find_overlaps, tell_exact_twins
from weince.diagnose.reading import make_pairs
from weince.diagnose.rules import NEAR

FAST = replace(QUICK, bootstraps=20, null_draws=20, tail_bootstraps=20, points=5, candidates="cross")


def towers(pairs=1000, dim=64, noise=0.6, seed=0):
    """Queries and documents that all find each other."""
    rng = np.random.default_rng(seed)
    items = rng.standard_normal((pairs, dim))
    return tuple(items + noise * rng.standard_normal(items.shape) for _ in range(2))


def unit(z):
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def test_planted_twins_are_counted():
    """57 % of the documents are copies of another one."""
    q, d = towers()
    d[500:570] = d[:70]
    d[570:1000] = d[70:500]
    share = 1000
    found = find_overlaps(make_pairs("x", q, d, towers=True))
    assert (found.documents.exact, found.documents.repeated, found.documents.near) == (share, share, 1.0)
    q, d = towers()
    d[715:] = d[430:715]  # 285 documents occur twice: 570 of 1,000
    found = find_overlaps(make_pairs("x", q, d, towers=True))
    assert found.documents.exact == 570
    assert found.documents.near == pytest.approx(0.57)
    assert found.queries.exact == found.queries.near == 0
    verdict = decide(measure(make_pairs("x", q, d, towers=True), FAST), FAST)
    assert verdict.kind == "twins"
    said = "57 % of the documents have a twin among the 1,000, 570 of them an exact one."
    assert verdict.headline == f"Tell the duplicates apart first: {said}"
    ids = np.arange(1000)
    ids[715:] = ids[430:715]
    told = find_overlaps(make_pairs("x", q, d, ids, towers=True))
    assert (told.documents.exact, told.documents.repeated, told.documents.near) == (0, 570, 0.0)
    notes = decide(measure(make_pairs("x", q, d, ids, towers=True), FAST), FAST).notes
    assert any("Of the documents, 570 of 1,000 occur in several pairs." in note for note in notes)


def test_planted_false_negatives_are_counted_and_named():
    """For 5 % of the queries another document is better than the positive, of which it is a near copy."""
    q, d = towers(noise=0.4)
    own, other = d[:50] + 0.5 * q[:50], d[:50] + 0.002 * q[:50]
    found = find_overlaps(make_pairs("x", np.concatenate([q, own]), np.concatenate([d, other]), towers=True))
    assert (found.beaten, found.above, found.twins) == (50, 50, 50)
    assert found.ignored == (50, 0, 0)  # none scores .05 above its positive
    assert {(r.query, r.document) for r in found.rivals} <= {(k, 1000 + k) for k in range(50)}
    assert len(found.rivals) == module.SHOWN


def test_planted_hubs_are_found():
    """Each of twenty documents is what thirty queries have in common."""
    q, d = towers(dim=256, noise=2.0)
    common = np.random.default_rng(1).standard_normal((20, 256))
    q[:600] += np.repeat(common, 30, axis=0)
    d[980:] = common
    found = find_overlaps(make_pairs("x", q, d, towers=True))
    assert {hub.document for hub in found.hubs} == set(range(980, 1000))
    s = unit(q) @ unit(d).T
    best = s.argmax(axis=1)
    for hub in found.hubs:
        assert hub.wins == int(((best == hub.document) & (np.arange(1000) != hub.document)).sum())
        assert hub.wins > 25


def test_without_hubs_none_is_found():
    for seed in range(5):
        assert find_overlaps(make_pairs("x", *towers(noise=1.4, seed=seed), towers=True)).hubs == ()


@pytest.mark.parametrize("with_ids", [False, True])
def test_the_counts_are_those_of_loops(with_ids, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 700)
    q, d = views(pairs=60, dim=4)
    d[7] = d[3]
    d[11] = 1.0002 * d[5]
    ids = np.random.default_rng(0).integers(0, 30, 60) if with_ids else np.arange(60)
    pairs = make_pairs("x", q, d, ids if with_ids else None, towers=True)
    pairs = replace(pairs, groups=np.arange(60) // 10)
    found = find_overlaps(pairs)
    s, dd = unit(q) @ unit(d).T, unit(d) @ unit(d).T
    above = twins = grouped = 0
    ignored = [0] * len(MARGINS)
    losing = set()
    for k in range(60):
        for j in range(60):
            if ids[k] == ids[j]:
                continue
            if s[k, j] >= s[k, k] - 1e-6:
                losing.add(k)
                above += 1
                twins += dd[k, j] >= 1.0 - NEAR
                grouped += k // 10 == j // 10
            for m, margin in enumerate(MARGINS):
                ignored[m] += s[k, j] >= s[k, k] + margin - 1e-6
    assert (found.beaten, found.above, found.twins, found.grouped) == (len(losing), above, twins, grouped)
    assert found.ignored == tuple(ignored)
    nearest = [max(dd[k, j] for j in range(60) if ids[j] != ids[k]) for k in range(60)]
    assert found.documents.nearest == pytest.approx(np.median(nearest), abs=1e-6)
    mean = np.mean([dd[k, j] for k in range(60) for j in range(60) if k != j])
    assert found.documents.mean_cosine == pytest.approx(mean, abs=1e-6)


def test_of_a_large_file_some_queries_are_scored_against_all_documents(monkeypatch):
    monkeypatch.setattr(module, "_SCORES", 100 * 400)
    q, d = towers(pairs=400)
    d[200:] = d[:200]
    found = find_overlaps(make_pairs("x", q, d, towers=True))
    assert (found.rows, found.looked) == (400, 100)
    assert found.documents.exact == 400  # of all rows
    assert found.beaten == 100


def test_exact_twins_are_told_unless_they_join_most_of_the_pairs():
    q, d = towers(pairs=100)
    assert tell_exact_twins(make_pairs("x", q, d)) is None
    d[1], q[3] = d[0], q[1]  # 0 and 1 share a document, 1 and 3 a query
    ids = tell_exact_twins(make_pairs("x", q, d))
    assert ids[0] == ids[1] == ids[3]
    assert len(np.unique(ids)) == 98
    d[:60] = d[0]
    assert tell_exact_twins(make_pairs("x", q, d)) is None
