"""Nearest neighbours against scikit-learn, hand-computed cases, and the definition in loops."""

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from weince.lab.tasks.images.evaluation.features import LabelledFeatures
from weince.lab.tasks.images.evaluation.knn import knn, mean_average_precision, nearest
from weince.lab.tasks.images.evaluation.protocol import split

module = importlib.import_module("weince.lab.tasks.images.evaluation.knn")  # not the function of that name


def clouds(n, classes, width, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=n)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    features = centres[labels] + 1.5 * rng.normal(size=(n, width))
    return LabelledFeatures(torch.tensor(features, dtype=torch.float32), torch.tensor(labels))


@pytest.mark.parametrize(("most", "k"), [(7, 50), (2048, 50), (2048, 5), (2048, 4), (2048, 60)])
def test_figures_are_scikit_learns(most, k, monkeypatch):
    monkeypatch.setattr(module, "MOST_QUERIES", most)
    train, test = clouds(400, 6, 8, 0), clouds(150, 6, 8, 1)
    found = knn(train, test, seeds=(1, 4), k=k, progress=False)
    assert found.seeds == (1, 4)
    x, y = train.features.double().numpy(), train.labels.numpy()
    for place, seed in enumerate((1, 4)):
        bank, held_out = split(y, seed=seed)
        for queries, truth, figures in (
            (x[held_out], y[held_out], found.validation),
            (test.features.double().numpy(), test.labels.numpy(), found.test),
        ):
            vote = KNeighborsClassifier(
                n_neighbors=k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.1)
            ).fit(x[bank], y[bank])
            assert figures.vote[place] == pytest.approx(100 * vote.score(queries, truth))
            near = NearestNeighbors(n_neighbors=50, metric="cosine").fit(x[bank])
            same = y[bank][near.kneighbors(queries, return_distance=False)] == truth[:, None]
            for r in (1, 2, 5, 10, 20, 50):
                assert figures.recall[r][place] == pytest.approx(100 * same[:, :r].any(1).mean())


def map_at_r(bank, queries):
    """The definition in loops: R of the query's class, precision at each hit among the R nearest, over R."""
    found = []
    for row, truth in zip(queries.features.double(), queries.labels.tolist(), strict=True):
        r = int((bank.labels == truth).sum())
        order = np.argsort(-(bank.features.double() @ row).numpy(), kind="stable")[:r]
        hits, total = 0, 0.0
        for i, column in enumerate(order, 1):
            if bank.labels[column] == truth:
                hits += 1
                total += hits / i
        found.append(total / r if r else 0.0)
    return 100.0 * float(np.mean(found))


@pytest.mark.parametrize("most", [7, 2048])
def test_map_at_r_is_its_definition(most, monkeypatch):
    monkeypatch.setattr(module, "MOST_QUERIES", most)
    train, test = clouds(400, 6, 8, 0), clouds(150, 7, 8, 1)  # the bank lacks one class
    bank, queries = (
        LabelledFeatures(torch.nn.functional.normalize(part.features, dim=1), part.labels)
        for part in (train, test)
    )
    assert mean_average_precision(bank, queries) == pytest.approx(map_at_r(bank, queries))
    first, held_out = (
        LabelledFeatures(bank.features[rows], bank.labels[rows])
        for rows in split(train.labels.numpy(), seed=1)
    )
    found = knn(train, test, seeds=(1, 2), progress=False)
    assert found.test.map_r == pytest.approx(map_at_r(first, queries))
    assert found.validation.map_r == pytest.approx(map_at_r(first, held_out))


def test_map_at_r_of_an_order_by_hand():
    angles = torch.tensor([0.1, 0.2, 0.3, 0.4])
    bank = LabelledFeatures(torch.stack([angles.cos(), angles.sin()], 1), torch.tensor([0, 1, 0, 1]))
    query = LabelledFeatures(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert mean_average_precision(bank, query) == pytest.approx(50.0)  # R = 2, one hit at rank 1
    other = LabelledFeatures(query.features, torch.tensor([1]))
    assert mean_average_precision(bank, other) == pytest.approx(25.0)  # one hit at rank 2


def test_a_large_bank_is_asked_in_smaller_chunks(monkeypatch):
    train, test = clouds(400, 6, 8, 0), clouds(150, 6, 8, 1)
    whole = knn(train, test, seeds=(1,), progress=False)
    rows = []
    bank = len(split(train.labels.numpy(), seed=1).train)
    monkeypatch.setattr(module, "MOST_SCORES", 7 * bank + 5)
    monkeypatch.setattr(module, "nearest", lambda s, k, real=nearest: rows.append(s.shape) or real(s, k))
    assert knn(train, test, seeds=(1,), progress=False) == whole
    assert max(n for n, _ in rows) == 7
    assert {columns for _, columns in rows} == {bank}


def test_a_case_by_hand():
    # Ten rows of each class lie on one axis; the two held-out rows of each find their own class first.
    train = LabelledFeatures(torch.eye(3).repeat(10, 1), torch.arange(3).repeat(10))
    # The first query is of class 1, but its 8 nearest rows are of class 0 and the next 8 of class 1.
    test = LabelledFeatures(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 5.0]]), torch.tensor([1, 2]))
    found = knn(train, test, seeds=(1,), recalls=(1, 8, 9, 50), k=50, progress=False)
    assert found.validation.vote == (100.0,)
    assert found.test.vote == (50.0,)
    assert found.test.recall == {1: (50.0,), 8: (50.0,), 9: (100.0,), 50: (100.0,)}


def test_the_vote_weighs_by_temperature():
    # Five rows of class 0 have cosine 1 with the query, fifty of class 1 have cosine .8.
    x = torch.tensor([[1.0, 0.0]] * 5 + [[0.8, 0.6]] * 50)
    train = LabelledFeatures(x, torch.tensor([0] * 5 + [1] * 50))
    query = LabelledFeatures(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    # 4 against 40 rows in the bank: 4 exp(1/t) > 40 exp(.8/t) for t < .2 / log(10) = .0869
    votes = {t: knn(train, query, seeds=(1,), temperature=t, progress=False).test.vote for t in (0.08, 0.09)}
    assert votes == {0.08: (100.0,), 0.09: (0.0,)}


def test_the_vote_of_a_low_temperature_is_the_nearest():
    # exp(.9 / .005) overflows float32: without care, both classes would have an infinite vote.
    x = torch.tensor([[1.0, 0.0]] * 5 + [[0.9, 0.19**0.5]] * 50)
    train = LabelledFeatures(x, torch.tensor([1] * 5 + [0] * 50))
    query = LabelledFeatures(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert knn(train, query, seeds=(1,), temperature=0.005, progress=False).test.vote == (100.0,)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 14), st.integers(1, 4), st.integers(0, 10_000))
def test_equal_scores_go_by_column(rows, columns, k, values, seed):
    scores = torch.from_numpy(np.random.default_rng(seed).integers(values, size=(rows, columns))).float()
    found, kept = nearest(scores, k)
    for row, chosen, top in zip(scores.tolist(), found.tolist(), kept.tolist(), strict=True):
        wanted = sorted(range(columns), key=lambda j: (-row[j], j))[:k]
        assert chosen == wanted
        assert top == [row[j] for j in wanted]


def test_features_of_zeros_do_not_break_anything():
    train = LabelledFeatures(torch.zeros(20, 4), torch.arange(2).repeat(10))
    test = LabelledFeatures(torch.zeros(3, 4), torch.tensor([0, 0, 1]))
    # All votes are equal, so the first class is taken.
    assert knn(train, test, seeds=(1,), progress=False).test.vote == (pytest.approx(200 / 3),)


def test_a_class_that_the_bank_lacks_counts_as_wrong():
    train = LabelledFeatures(torch.randn(10, 3), torch.zeros(10, dtype=torch.int64))
    test = LabelledFeatures(torch.randn(4, 3), torch.full((4,), 8))
    assert knn(train, test, seeds=(1,), progress=False).test.vote == (0.0,)


def test_unusable_input_is_named():
    train = clouds(50, 2, 3, 0)
    with pytest.raises(ValueError, match=r"a positive temperature; got .* 0.0"):
        knn(train, train, temperature=0.0, progress=False)
    with pytest.raises(ValueError, match=r"\[0, 50\]"):
        knn(train, train, recalls=(0,), progress=False)
    with pytest.raises(ValueError, match="test features must be finite; got NaN or inf in"):
        knn(train, LabelledFeatures(train.features * torch.inf, train.labels), progress=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_figures_of_the_cpu():
    train, test = clouds(400, 6, 8, 0), clouds(150, 6, 8, 1)
    ours, theirs = (knn(train, test, device=device, progress=False) for device in ("cuda", "cpu"))
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert (one.vote, one.recall) == (other.vote, other.recall)  # counts
        assert one.map_r == pytest.approx(other.map_r)  # a mean, so the order of summation matters
