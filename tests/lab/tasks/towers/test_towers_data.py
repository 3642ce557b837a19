"""Pairs from every kind of file; what is wrong with one is said in a sentence."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from weince.lab.tasks.towers.data import PairSet, components, relevance, with_heldout
from weince.lab.tasks.towers.formats import EMBEDDED, load, unchanged
from weince.lab.tasks.towers.relations import Known

ROWS = [
    {"query": f"what is {n}?", "positive": f"number {n}", "negative_1": f"number {n + 1}"} for n in range(20)
]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            dialect = (
                {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
                if path.suffix == ".tsv"
                else {}
            )
            table = csv.DictWriter(file, list(rows[0]), **dialect)
            table.writeheader()
            table.writerows(rows)
    return str(path)


def beir(folder, *, corpus=None, queries=None, qrels=None):
    (folder / "qrels").mkdir(parents=True)
    corpus = corpus or [{"_id": f"d{n}", "title": "", "text": f"document {n}"} for n in range(9)]
    queries = queries or [{"_id": f"q{n}", "text": f"query {n}"} for n in range(9)]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = qrels or {split: [(f"q{n}", f"d{n}", 1) for n in rows]
                      for split, rows in (("train", range(5)), ("valid", (5, 6)), ("test", (7, 8)))}  # fmt: skip
    for split, of in lines.items():
        text = "".join(f"{query}\t{document}\t{score}\n" for query, document, score in of)
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + text)
    return str(folder)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_table_gives_the_same_set(tmp_path, suffix):
    pairs = load(write(tmp_path / f"pairs{suffix}", ROWS), heldout=0.2)
    assert pairs.fingerprint == load(write(tmp_path / "other.jsonl", ROWS), heldout=0.2).fingerprint
    assert {name: len(part) for name, part in pairs.splits.items()} == {"train": 12, "valid": 4, "test": 4}
    train = pairs.splits["train"]
    for query, document, (wrong,) in zip(train.query, train.document, train.negatives, strict=True):
        number = int(pairs.queries[query].split()[-1][:-1])
        assert pairs.documents[document] == f"number {number}"
        assert pairs.documents[wrong] == f"number {number + 1}"


def test_a_dataset_folder_keeps_its_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {"train": ROWS[:12], "validation": ROWS[12:16], "test": ROWS[16:]}
    folder = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    folder.save_to_disk(str(tmp_path / "saved"))
    pairs = load(str(tmp_path / "saved"))
    assert {name: len(part) for name, part in pairs.splits.items()} == {"train": 12, "valid": 4, "test": 4}


def test_texts_that_other_readers_take_for_missing_stay(tmp_path):
    rows = [
        {"query": word, "positive": f"about {word}"}
        for word in ("null", "NA", "nan", "None", "", "a, b", 'say "x"')
    ]
    rows = [row for row in rows if row["query"]]
    for suffix in (".csv", ".tsv", ".jsonl"):
        pairs = load(write(tmp_path / f"pairs{suffix}", rows), heldout=0.2)
        assert set(pairs.queries) == {row["query"] for row in rows}


def test_several_positives_weights_and_ids(tmp_path):
    rows = [
        {"query": "a", "positive": ["x", "y"], "query_id": "7", "weight": 2, "group": "g", "split": "train"},
        {"query": "a", "positive": "z", "query_id": "7", "weight": 1, "group": "h", "split": "train"},
        {"query": "b", "positive": "u", "query_id": "8", "weight": 1, "group": "g", "split": "dev"},
        {"query": "c", "positive": "w", "query_id": "9", "weight": 1, "group": "i", "split": "test"},
    ]
    pairs = load(write(tmp_path / "pairs.jsonl", rows))
    train = pairs.splits["train"]
    assert [pairs.documents[row] for row in train.document] == ["x", "y", "z"]
    assert train.weight.tolist() == [2, 2, 1]
    assert pairs.query_ids[train.query[0]] == "7"
    of = dict(zip(pairs.documents, pairs.groups, strict=True))
    assert of["x"] == of["y"] == of["u"] != of["z"]


def test_a_beir_folder(tmp_path):
    corpus = [{"_id": f"d{n}", "title": "T", "text": f"{n}", "metadata": {"split": s, "group": f"g{n // 2}"}}
              for n, s in enumerate(["train"] * 5 + ["valid"] * 2 + ["test"] * 3)]  # fmt: skip
    pairs = load(beir(tmp_path / "set", corpus=corpus))
    assert pairs.documents[3] == "T 3"
    assert pairs.searched("test", "split").tolist() == [7, 8, 9]
    assert len(pairs.searched("test", "all")) == 10
    assert pairs.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_images_with_captions(tmp_path):
    images = np.arange(6 * 8 * 8, dtype=np.uint8).reshape(6, 8, 8)
    captions = np.array(["cat", "dog", "cat", "sun", "fox", "owl"])
    splits = np.array(["train", "train", "train", "valid", "test", "test"])
    np.savez(tmp_path / "set.npz", images=images, captions=captions, splits=splits)
    pairs = load(str(tmp_path / "set.npz"), size=8)
    assert pairs.documents.shape == (6, 8, 8, 1)  # grey
    assert pairs.splits["train"].document.tolist() == [0, 2, 1]
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number}.png")
    rows = [
        {"image": f"{n}.png", "caption": c, "split": s}
        for n, (c, s) in enumerate(zip(captions, splits, strict=True))
    ]
    write(folder / "captions.csv", rows)
    again = load(str(folder), size=8)
    assert (again.documents == pairs.documents).all()
    assert again.splits["train"].document.tolist() == [0, 2, 1]


BAD = {
    "a column is missing": ([{"query": "a", "answer": "b"}], r"want a column positive; got query, answer"),
    "an empty text": (
        [*ROWS, {"query": "a", "positive": " "}],
        r"line 21: the document is empty or no text; got ' '",
    ),
    "an id for two texts": (
        [{"query": "a", "positive": "x", "query_id": 1}, {"query": "b", "positive": "y", "query_id": 1}],
        r"the query id 1 stands for two texts",
    ),
    "a weight": (
        [{"query": "a", "positive": "b", "weight": "much"}],
        r"a weight must be a number of at least 0",
    ),
    "a split": ([{"query": "a", "positive": "b", "split": "dve"}], r"a split is one of train.*; got 'dve'"),
    "too few groups": (
        [{"query": "a", "positive": p} for p in "xyz"],
        r"too few groups of pairs to hold out",
    ),
    "no train": ([{"query": "a", "positive": "b", "split": "test"}], r"has no split train; got test"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables(tmp_path, case):
    rows, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "pairs.jsonl", rows))


BAD_BEIR = {
    "an id twice": (
        {"corpus": [{"_id": "d1", "text": "x"}] * 2, "qrels": {"train": [("q1", "d1", 1)]}},
        r"'d1' twice",
    ),
    "qrels of another set": (
        {"qrels": {"train": [("q1", "d99", 1)]}},
        r"train.tsv, line 2: the document 'd99' is not among",
    ),
    "an unknown query": ({"qrels": {"train": [("q99", "d1", 1)]}}, r"the query 'q99' is not among the 9"),
    "only irrelevant": ({"qrels": {"train": [("q1", "d1", 0)]}}, r"no pair with a score above 0"),
    "an empty answer": (
        {
            "corpus": [{"_id": "d1", "text": ""}, {"_id": "d2", "text": "x"}],
            "qrels": {"train": [("q1", "d1", 1)]},
        },
        r"the document 'd1' must be a text; got an empty one",
    ),
    "no text": ({"corpus": [{"_id": "d1"}]}, r"corpus.jsonl, line 1: want _id and text; got _id"),
}


@pytest.mark.parametrize("case", BAD_BEIR)
def test_bad_beir_folders(tmp_path, case):
    content, message = BAD_BEIR[case]
    with pytest.raises(ValueError, match=message):
        load(beir(tmp_path / "set", **content))


def test_other_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such data"):
        load(str(tmp_path / "missing.csv"))
    broken = tmp_path / "pairs.csv"
    broken.write_bytes(b"query,positive\n\xff\xfe,b\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        load(str(broken))
    broken.write_text("query,positive\na\n")
    with pytest.raises(ValueError, match="line 2: want 2 cells"):
        load(str(broken))
    (tmp_path / "pairs.jsonl").write_text("{oops\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        load(str(tmp_path / "pairs.jsonl"))
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 8, 8)), captions=np.array(["a", "b"]))
    with pytest.raises(ValueError, match="images must be uint8"):
        load(str(tmp_path / "x.npz"))
    np.savez(tmp_path / "y.npz", images=np.array([{}], dtype=object), captions=np.array(["a"]))
    with pytest.raises(ValueError, match="allow_pickle"):
        load(str(tmp_path / "y.npz"))


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("query,positive\na,b\n")
    with pytest.raises(ValueError, match="changed while it was read"), unchanged(path):
        path.write_text("query,positive\na,b\nc,d\n")
    folder = tmp_path / "set"
    beir(folder)
    with pytest.raises(ValueError, match="changed while it was read"), unchanged(folder):
        (folder / "qrels" / "dev.tsv").write_text("")


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=40, max_size=60), st.integers(0, 3)
)
def test_no_text_and_no_group_lies_on_both_sides(edges, grouped):
    query, document = np.array(edges).T
    groups = np.arange(61) // grouped if grouped else None
    texts = [str(n) for n in range(61)]
    pairs = PairSet("set", texts, texts, texts, texts, {"train": relevance(query, document)}, groups=groups)
    whole = components(query, document) if groups is None else components(query, groups[document])
    counts = np.unique(whole, return_counts=True)[1]
    assume((counts <= 0.2 * counts.sum()).sum() > 12)
    split = with_heldout(pairs, 0.2)
    sides = list(split.splits.values())
    for number, part in enumerate(sides):
        for other in sides[number + 1 :]:
            assert not set(part.query) & set(other.query)
            assert not set(part.document) & set(other.document)
            if groups is not None:
                assert not set(groups[part.document]) & set(groups[other.document])
    assert sum(len(part) for part in sides) == len(pairs.splits["train"])
    again = with_heldout(pairs, 0.2)
    assert all((again.splits[name].query == split.splits[name].query).all() for name in split.splits)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=4, max_size=30), st.randoms())
def test_known_answers_are_never_negatives(edges, random):
    """Any two rows of a batch that are known to match have one id; rows that nothing joins have two."""
    texts = [str(n // 2) for n in range(13)]  # every text twice
    names = [str(n) for n in range(13)]
    train = relevance(*np.array(edges).T)
    pairs = PairSet("set", texts, texts, names, names, {"train": train})
    known = Known(pairs, train, groups=False)
    rows = np.array(random.sample(range(len(train)), min(6, len(train))))
    query, document = train.query[rows], train.document[rows]
    negatives = np.array([[random.randrange(13)] for _ in rows])
    ids = known.ids(query, document, negatives, np.zeros_like(negatives, bool))
    ids = np.arange(2 * len(rows)) if ids is None else ids
    every = np.concatenate([document, negatives[:, 0]])
    match = {(texts[q], texts[d]) for q, d in zip(train.query, train.document, strict=True)}
    for row, q in enumerate(query):
        for column, d in enumerate(every):
            if (texts[q], texts[d]) in match or texts[d] == texts[document[row]]:
                assert ids[row] == ids[column]
    whole = components(
        np.array([int(texts[q]) for q in train.query]), np.array([int(texts[d]) for d in train.document])
    )
    part = dict(zip((texts[d] for d in train.document), whole, strict=True))
    for row in range(len(rows)):
        for column in range(len(every)):
            if ids[row] == ids[column] and texts[every[column]] in part:
                assert part[texts[document[row]]] == part[texts[every[column]]]


def test_missing_hard_negatives_count_for_nobody():
    texts = [str(n) for n in range(6)]
    train = relevance([0, 1, 2], [0, 1, 2])
    known = Known(PairSet("set", texts, texts, texts, texts, {"train": train}), train, groups=False)
    wrong = np.array([[3, 0], [4, 5], [5, 2]])
    ids = known.ids(train.query, train.document, wrong, np.array([[0, 1], [0, 0], [0, 1]], bool), plain=True)
    assert ids[3 + 1] == ids[0]
    assert ids[3 + 5] == ids[2]
    assert len(np.unique(ids)) == 7


def test_the_embedded_set_is_whole():
    pairs = load(EMBEDDED, heldout=0.2)
    assert len(pairs.documents) == len(set(pairs.documents)) == 800
    assert min(len(part) for part in pairs.splits.values()) > 150
    path = Path(__file__).parents[4] / "src/weince/lab/tasks/towers/docstrings.jsonl"
    assert path.stat().st_size < 400_000
