"""Queries and documents: tables of pairs in every format, embeddings that a table pairs, and what cannot be used."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnose.synthetic import views
from weince.diagnose.pair_files import connected, load_towers, read_pair_table
from weince.diagnose.reading import InputError

ROWS = [("what is it?", 'a "quoted" text, with a comma'), ("second\u2028query", "b"), ("third", "b")]


def test_every_format_gives_the_same_pairs(tmp_path):
    objects = [{"positive": p, "query": q, "extra": 1} for q, p in ROWS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, objects)) + "\n\n")
    (tmp_path / "a.tsv").write_text(
        "query\tpositive\n" + "".join(f"{q}\t{p}\n" for q, p in ROWS), "utf-8-sig"
    )
    quoted = "".join(f'{q},"{p.replace(chr(34), 2 * chr(34))}",g\r\n' for q, p in ROWS)
    (tmp_path / "a.csv").write_text("query,positive,group\r\n" + quoted, encoding="utf-8", newline="")
    for name in ("a.jsonl", "a.tsv", "a.csv"):
        table = read_pair_table(tmp_path / name)
        assert list(zip(table.queries, table.positives, strict=True)) == ROWS
        assert table.groups == (["g"] * 3 if name == "a.csv" else None)


def test_qrels_are_read_without_the_lines_that_are_not_relevant(tmp_path):
    (tmp_path / "q.tsv").write_text("query-id\tcorpus-id\tscore\n1\t2\t1\n1\t0\t0\n0\t1\t2\n")
    table = read_pair_table(tmp_path / "q.tsv")
    assert (table.queries, table.positives) == (["1", "0"], ["2", "1"])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "anchor,text\na,b\n", "a.csv: want the columns query and positive; got anchor, text"),
        ("a.csv", "", "a.csv: want the columns query and positive; got no line"),
        (
            "a.csv",
            "query,positive\na,b\nc\n",
            "a.csv: 1 lines have nothing in the column positive, first line 3",
        ),
        ("a.tsv", "query\tpositive\n \tb\n", "a.tsv: 1 lines have nothing in the column query, first line 2"),
        (
            "a.jsonl",
            '{"query": "a", "positive": null}',
            "1 lines have nothing in the column positive, first line 1",
        ),
        ("a.jsonl", "[1, 2]\n", "a.jsonl: cannot be read (line 1 is no object"),
        ("a.jsonl", "{", "a.jsonl: cannot be read (Expecting"),
        ("a.parquet", "x", "a.parquet: cannot be read (want a .csv, .tsv or .jsonl file; got .parquet)"),
        ("q.tsv", "query-id\tcorpus-id\tscore\n1\t2\t0\n", "q.tsv: no line has a score above 0"),
    ],
)
def test_tables_that_cannot_be_used(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as caught:
        read_pair_table(tmp_path / name)
    assert said in str(caught.value)


def naive_groups(first, second):
    groups = [{("a", a), ("b", b)} for a, b in zip(first, second, strict=True)]
    for _ in groups:
        groups = [set().union(*(other for other in groups if other & group)) for group in groups]
    return groups


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("ijklmnop")), min_size=1, max_size=8))
def test_pairs_that_share_a_text_are_connected(pairs):
    first, second = zip(*pairs, strict=True)
    ids, groups = connected(first, second), naive_groups(first, second)
    for i in range(len(pairs)):
        for j in range(len(pairs)):
            assert (ids[i] == ids[j]) == (groups[i] == groups[j])


@pytest.fixture
def files(tmp_path):
    q, d = views(pairs=12, dim=4)
    np.save(tmp_path / "q.npy", q)
    np.save(tmp_path / "d.npy", d[::-1])
    np.savez(tmp_path / "q.npz", z=q, ids=[f"q{k}" for k in range(12)])
    np.savez(tmp_path / "d.npz", z=d, ids=[f"d{k}" for k in range(12)])
    return tmp_path, q, d


def test_rows_belong_together_or_are_named(files):
    folder, q, d = files
    plain = load_towers(folder / "q.npy", folder / "d.npy")
    np.testing.assert_array_equal(plain.z_j, d[::-1])
    assert (plain.ids, plain.towers, plain.notes) == (None, True, ())
    (folder / "p.tsv").write_text("query\tpositive\n0\t11\n3\t8\n3\t0\n5\t0\n")
    named = load_towers(folder / "q.npy", folder / "d.npy", folder / "p.tsv")
    np.testing.assert_array_equal(named.z_i, q[[0, 3, 3, 5]])
    np.testing.assert_array_equal(named.z_j, d[[0, 3, 11, 11]])
    assert named.ids[1] == named.ids[2] == named.ids[3] != named.ids[0]
    assert named.notes == ("Queries without a positive in p.tsv: 9. They were left out.",)
    (folder / "i.tsv").write_text("query-id\tcorpus-id\tscore\nq2\td2\t1\nq4\td5\t1\n")
    by_id = load_towers(folder / "q.npz", folder / "d.npz", folder / "i.tsv")
    np.testing.assert_array_equal(by_id.z_j, d[[2, 5]])
    assert by_id.texts == (["q2", "q4"], ["d2", "d5"])


def test_embeddings_that_do_not_belong_together(files):
    folder, _, d = files
    np.save(folder / "wide.npy", np.ones((12, 5)))
    np.save(folder / "more.npy", np.concatenate([d, d]))
    np.savez(folder / "twice.npz", z=d, ids=["a"] * 12)
    (folder / "p.tsv").write_text("query\tpositive\n0\t12\n")
    np.save(folder / "nan.npy", np.where(np.arange(12)[:, None] == 3, np.nan, d))
    for arguments, said in {
        ("q.npy", "wide.npy"): "queries and documents must have one width; got 4 and 5",
        (
            "q.npy",
            "more.npy",
        ): "row k of the documents belongs to row k of the queries; got 12 queries and 24 doc",
        ("q.npy", "twice.npz"): "twice.npz: want ids of shape (12,), each once; got 1 different in (12,)",
        ("q.npy", "d.npy", "p.tsv"): "p.tsv: names '12', which is no row of d.npy",
        ("q.npy", "nan.npy"): "q: documents has NaN or infinite values in 1 of 12 rows, first in row 3",
        ("q.npy", "gone.npy"): "gone.npy: no such file",
    }.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            load_towers(*(folder / name for name in arguments))
