"""Hard negatives against a loop, their file, and that a kill while they are mined changes nothing."""

import json
import os
import signal
import time

import numpy as np
import pytest
import torch
import towers_runs
from hypothesis import given
from hypothesis import strategies as st
from programs import Program
from towers_runs import read_result, settings

from weince.cli import main
from weince.lab.tasks.towers.data import PairSet, relevance
from weince.lab.tasks.towers.formats import load
from weince.lab.tasks.towers.mining import MineConfig, mine, mine_to
from weince.lab.tasks.towers.task import TASK


@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from([None, 0.1]),
    st.sampled_from([None, 0.9]),
    st.integers(0, 2),
)
def test_negatives_are_those_of_a_loop(seed, groups, margin, relative, skip):
    rng = np.random.default_rng(seed)
    texts = [f"t{n // 2}" for n in range(16)]  # every text twice
    names = [str(n) for n in range(16)]
    train = relevance(rng.integers(0, 16, 12), rng.integers(0, 16, 12))
    pairs = PairSet("set", texts, texts, names, names, {"train": train}, groups=rng.integers(0, 6, 16))
    x, y = (
        torch.nn.functional.normalize(torch.tensor(rng.normal(size=(16, 4)), dtype=torch.float32))
        for _ in range(2)
    )
    asked = np.unique(train.query)
    mined = mine(
        pairs,
        train,
        x[asked],
        y,
        np.arange(16),
        k=3,
        margin=margin,
        relative=relative,
        skip=skip,
        groups=groups,
    )
    key = pairs.groups if groups else np.array([n // 2 for n in range(16)])
    for place, (query, _) in enumerate(zip(train.query, train.document, strict=True)):
        alike = [q for q in range(16) if texts[q] == texts[query]]
        known = {key[d] for q, d in zip(train.query, train.document, strict=True) if q in alike}
        lowest = min(
            float(x[query] @ y[d]) for q, d in zip(train.query, train.document, strict=True) if q == query
        )
        limit = (
            min(lowest - (margin or 0), lowest * relative if relative else np.inf)
            if margin or relative
            else np.inf
        )
        scores = {d: float(x[query] @ y[d]) for d in range(16) if key[d] not in known}
        wanted = [d for d in sorted(scores, key=lambda d: -scores[d]) if scores[d] < limit - 1e-6][
            skip : skip + 3
        ]
        ours = [int(d) for d in mined.document[place] if d >= 0]
        # Equal documents may come in any order, and scores at the limit may round to either side.
        near = [d for d in scores if abs(scores[d] - limit) < 1e-5]
        if not near:
            assert [round(scores[d], 5) for d in ours] == [round(scores[d], 5) for d in wanted]


def test_mined_negatives_go_into_a_training(tmp_path, capsys):
    out = tmp_path / "negatives.jsonl"
    main(
        ["mine", "--data", "docstrings", "--model", "bag", "--heldout", "0.2", "--k", "3", "--out", str(out)]
    )
    assert capsys.readouterr().out.strip() == str(out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 476
    assert list(lines[0]) == ["query", "positive", "negative_1", "negative_2", "negative_3", "scores"]
    assert lines[0]["scores"][1:] == sorted(lines[0]["scores"][1:], reverse=True)
    pairs = load("docstrings", heldout=0.2, negatives=out)
    train = pairs.splits["train"]
    by_query = {line["query"]: line for line in lines}
    for query, rows in zip(train.query, train.negatives, strict=True):
        assert pairs.documents[rows[0]] == by_query[pairs.queries[query]]["negative_1"]
    assert not list(tmp_path.glob(".*"))
    folder = TASK.train(settings(tmp_path / "run", negatives=out, hard=2), bar=False)
    assert read_result(folder)["ndcg_test"] > 0
    (tmp_path / "other.jsonl").write_text(json.dumps({"query": "q", "positive": "p", "negative": "n"}) + "\n")
    with pytest.raises(ValueError, match="was mined from another set"):
        load("docstrings", negatives=tmp_path / "other.jsonl")


def test_bad_mining(tmp_path):
    for changes, message in {
        "k": ({"k": 0}, "k must be at least 1; got 0"),
        "margin": ({"margin": 9.0}, r"margin must lie in \[0, 2\]"),
        "relative": ({"relative": 0.0}, "relative must be a share"),
    }.values():
        with pytest.raises(ValueError, match=message):
            MineConfig("docstrings", "bag", **changes)
    with pytest.raises(ValueError, match="no negative was left for the 476 pairs"):
        mine_to(MineConfig("docstrings", "bag", margin=2.0, heldout=0.2, device="cpu"), tmp_path / "x.jsonl")
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.posix
def test_three_kills_while_mining_change_nothing(tmp_path, monkeypatch):
    """The module of the killed program makes small parts, so that there is something to lose."""
    slow = tmp_path / "slow_encoder.py"
    slow.write_text(
        "import time, torch\nfrom torch import nn\n\n"
        "class Slow(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        torch.manual_seed(0)\n"
        "        self.linear = nn.Linear(64, 8)\n"
        "    def tokenize(self, texts):\n"
        "        rows = [[t.count(chr(48 + n)) for n in range(64)] for t in texts]\n"
        "        return {'counts': torch.tensor(rows, dtype=torch.float32)}\n"
        "    def forward(self, inputs):\n        time.sleep(0.02)\n        return self.linear(inputs['counts'])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weince.lab.tasks.towers.exact_search.SHARD", 64)
    config = MineConfig("docstrings", "slow_encoder:Slow", heldout=0.2, device="cpu")
    whole = mine_to(config, tmp_path / "whole.jsonl")
    out, kills = tmp_path / "killed" / "negatives.jsonl", 0
    parts = out.parent / f".{out.name}.parts"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for wanted in (2, 6, 12):
        program = Program(
            towers_runs.__file__, "mine", out, "slow_encoder:Slow", env=environment, cwd=tmp_path
        )
        deadline = time.monotonic() + 60
        while program.poll() is None and time.monotonic() < deadline:
            if len(list(parts.glob("*.safetensors"))) >= wanted:
                program.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        program.wait()
    assert kills >= 2
    assert not out.exists()
    mine_to(config, out)
    assert out.read_text() == whole.read_text()
    assert not parts.exists()
