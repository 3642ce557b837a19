"""Figures of a search against trec_eval, sentence-transformers and loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weince.lab.tasks.towers.data import PairSet, Relevance, relevance
from weince.lab.tasks.towers.encoders import TensorStore
from weince.lab.tasks.towers.evaluation import figures_of, find_metric, judge, own_metric, seen_apart
from weince.lab.tasks.towers.exact_search import embed, nearest, rank_answers


def a_set(rng, queries, documents, answers, *, grades=False, twins=0):
    """Embeddings of which some are equal, and what answers what."""
    first = np.repeat(np.arange(queries), answers)
    second = np.concatenate([rng.choice(documents, answers, replace=False) for _ in range(queries)])
    part = relevance(first, second, rng.integers(1, 4, len(first)) if grades else None)
    names = [f"d{n}" for n in rng.permutation(documents)]
    texts = [str(n) for n in range(documents)]
    ids = [f"q{n}" for n in range(queries)]
    pairs = PairSet("set", ids, texts, ids, names, {"train": part, "test": part})
    x, y = rng.normal(size=(queries, 8)), rng.normal(size=(documents, 8))
    y[rng.integers(0, documents, twins)] = y[0]
    return pairs, torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def trec(pairs, queries, documents, measures):
    """The figures of each query by trec_eval."""
    pytrec_eval = pytest.importorskip("pytrec_eval")
    part, qrels, run = pairs.splits["test"], {}, {}
    for query, document, grade in zip(part.query, part.document, part.grade, strict=True):
        qrels.setdefault(pairs.query_ids[query], {})[pairs.document_ids[document]] = int(grade)
    unit, others = torch.nn.functional.normalize(queries), torch.nn.functional.normalize(documents)
    for name, row in zip(pairs.query_ids, unit @ others.T, strict=True):
        run[name] = {pairs.document_ids[n]: float(score) for n, score in enumerate(row)}
    return pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(run), run, qrels


@pytest.mark.parametrize(("answers", "grades", "twins"), [(1, False, 0), (5, False, 40), (7, True, 40)])
def test_figures_are_those_of_trec_eval_also_with_ties(answers, grades, twins):
    pairs, queries, documents = a_set(
        np.random.default_rng(answers), 60, 300, answers, grades=grades, twins=twins
    )
    judged = judge(pairs, "test", queries, documents, corpus="all")
    theirs, run, _ = trec(pairs, queries, documents, {"ndcg_cut.10", "recall.1,10,100", "map", "recip_rank"})
    names = {
        "ndcg": "ndcg_cut_10",
        "recall_1": "recall_1",
        "recall_10": "recall_10",
        "recall_100": "recall_100",
        "map": "map",
    }
    for ours, name in names.items():
        wanted = [100 * theirs[query][name] for query in pairs.query_ids]
        np.testing.assert_allclose(judged.each[ours], wanted, atol=1e-9)
    # trec_eval has no cut of the reciprocal rank; the tie broken as there puts a rank above 10 to 0.
    whole = np.array([theirs[query]["recip_rank"] for query in pairs.query_ids])
    np.testing.assert_allclose(judged.each["mrr"], 100 * np.where(whole >= 0.1 - 1e-12, whole, 0), atol=1e-9)
    if twins:  # the case is about ties
        scores = list(run["q0"].values())
        assert len(set(scores)) < len(scores)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(2, 30), st.integers(1, 4))
def test_ranks_are_those_of_a_sort(seed, queries, documents, answers):
    rng = np.random.default_rng(seed)
    answers = min(answers, documents)
    pairs, x, y = a_set(rng, queries, documents, answers, twins=documents // 2)
    part = pairs.splits["test"]
    order = rng.permutation(documents)
    ranks = rank_answers(x, y, part.query, part.document, part.grade, order)
    scores = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(y).T
    for query in range(queries):
        row = scores[query].numpy()
        ranked = sorted(range(documents), key=lambda n: (-row[n], -order[n]))
        own = sorted(ranked.index(n) + 1 for n in part.document[part.query == query])
        assert ranks.rank[ranks.query == query].tolist() == own


def test_an_encoder_that_maps_all_to_one_point_gets_no_credit():
    pairs, _, _ = a_set(np.random.default_rng(0), 400, 400, 1)
    judged = judge(pairs, "test", torch.ones(400, 4), torch.ones(400, 4), corpus="all")
    assert judged.figures["recall_1"] < 2
    assert judged.figures["recall_100"] == pytest.approx(25, abs=8)


def test_both_directions_and_seen_apart():
    part = Relevance(np.array([0, 0, 1, 2]), np.array([0, 1, 2, 3]), np.ones(4))
    train = Relevance(np.array([0]), np.array([4]), np.ones(1))
    captions, images = ["cat", "dog", "sun"], np.arange(5 * 12, dtype=np.uint8).reshape(5, 2, 2, 3)
    names = [str(n) for n in range(5)]
    pairs = PairSet("set", captions, images, names[:3], names, {"train": train, "test": part})
    queries, documents = torch.eye(3), torch.tensor([[1.0, 0, 0], [1, 0.1, 0], [0, 1, 0], [0, 1, 0.1]])
    forth = judge(pairs, "test", queries, documents, corpus="split")
    assert forth.figures["recall_1"] == pytest.approx(100 * (0.5 + 1 + 1) / 3)
    back = judge(pairs, "test", queries, documents, corpus="split", back=True)
    assert back.each["recall_1"].tolist() == [100, 100, 100, 0]
    apart = seen_apart(pairs, "test", forth)
    assert apart["seen"]["queries"] == 1
    assert apart["unseen"]["recall_1"] == 100


def test_the_nearest_leave_out_and_stay_below():
    rng = np.random.default_rng(0)
    x, y = torch.tensor(rng.normal(size=(9, 5))), torch.tensor(rng.normal(size=(30, 5)))
    scores = (torch.nn.functional.normalize(x.float()) @ torch.nn.functional.normalize(y.float()).T).numpy()
    below = np.full(9, 0.4, np.float32)

    def leave_out(start, stop):
        return np.arange(stop - start), np.arange(start, stop)

    best = nearest(x, y, 4, leave_out=leave_out, below=below, skip=1)
    for query in range(9):
        allowed = [
            n for n in np.argsort(-scores[query], kind="stable") if n != query and scores[query, n] < 0.4
        ]
        assert [n for n in best.document[query] if n >= 0] == allowed[1:5]
    few = nearest(x, y[:2], 4, leave_out=lambda a, b: (np.arange(b - a), np.zeros(b - a, int)))
    assert few.document[0].tolist() == [1, -1, -1, -1]


def test_embeddings_keep_their_order_and_must_be_finite(tmp_path):
    store = TensorStore("vectors", torch.randn(5000, 3), torch.device("cpu"))
    rows = np.random.default_rng(0).permutation(5000)[:4321]
    calls = []

    def encode(inputs):
        calls.append(len(inputs["vectors"]))
        return inputs["vectors"] * 2

    kept = [embed(encode, store, rows, what="texts", cache=tmp_path, key="k") for _ in range(2)]
    assert torch.equal(kept[0], 2 * store.rows[rows])
    assert torch.equal(*kept)
    assert sum(calls) == 4321  # the second time all were there
    embed(encode, store, rows, what="texts", cache=tmp_path, key="other weights")
    assert sum(calls) == 2 * 4321
    store.rows[17] = torch.nan
    with pytest.raises(ValueError, match=r"finite; got NaN or inf in 1 of 5000 texts, first in row 17"):
        embed(encode, store, np.arange(5000), what="texts")


def test_a_metric_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_metric.py").write_text(
        "import torch\n\n"
        "def first(queries, documents, answers) -> torch.Tensor:\n"
        "    best = (queries @ documents.T).argmax(1)\n"
        "    return torch.tensor([float(int(b) in a) for b, a in zip(best, answers)])\n\n"
        "def short(queries, documents, answers) -> torch.Tensor:\n    return torch.zeros(1)\n\n"
        "def unsaid(queries, documents, answers):\n    return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    pairs, queries, documents = a_set(np.random.default_rng(0), 20, 30, 2)
    queries, documents = (torch.nn.functional.normalize(x) for x in (queries, documents))
    judged = judge(pairs, "test", queries, documents, corpus="all", metric="my_metric:first")
    np.testing.assert_allclose(judged.each["first"], (judged.each["recall_1"] > 0).astype(float))
    with pytest.raises(ValueError, match="annotated to return a Tensor"):
        find_metric("my_metric:unsaid")
    with pytest.raises(ValueError, match="annotated to return a Tensor"):
        find_metric("os:system")
    with pytest.raises(ValueError, match="a finite number for each of 3 queries"):
        own_metric("my_metric:short", queries[:3], documents, [np.array([0])] * 3)


def test_figures_by_hand():
    from weince.lab.tasks.towers.exact_search import AnswerRanks

    found = figures_of(AnswerRanks(np.array([0, 0, 1]), np.array([2, 5, 11]), np.array([1.0, 2.0, 1.0])))
    assert found["ndcg"][0] == pytest.approx(
        100 * (1 / np.log2(3) + 2 / np.log2(6)) / (2 / 1 + 1 / np.log2(3))
    )
    assert found["map"].tolist() == pytest.approx([100 * (1 / 2 + 2 / 5) / 2, 100 / 11])
    assert found["mrr"].tolist() == [50, 0]
