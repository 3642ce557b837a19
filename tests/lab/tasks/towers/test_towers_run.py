"""Runs of two towers: what they write, that they resume bit for bit, and that two processes are as good as one."""

import json
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import towers_runs
from programs import ROOT, Program
from safetensors.torch import load_file
from towers_runs import judged_again, read_result, settings, train

from weince.cli import main
from weince.lab.configure import LossConfig
from weince.lab.tasks.towers.encoders import MODEL
from weince.lab.tasks.towers.formats import load
from weince.lab.tasks.towers.task import TASK, evaluate_run
from weince.lab.training.log import read_log


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain") / "run")


def weights(folder):
    return {path.name: load_file(path) for path in sorted(folder.rglob("*.safetensors"))}


def assert_equal_runs(one, other):
    a, b = weights(one / MODEL), weights(other / MODEL)
    assert a.keys() == b.keys()
    for name in a:
        assert all(torch.equal(a[name][key], b[name][key]) for key in a[name])
    assert read_result(one) == read_result(other)


def test_a_run_learns_and_writes_its_figures(plain):
    rows = read_log(plain / "log.csv")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["ndcg"] > rows[0]["ndcg"]
    result, each = read_result(plain), np.load(plain / "queries.npz")
    assert result["ndcg_test"] == pytest.approx(each["ndcg"].mean(), rel=1e-5)
    assert len(each["group"]) == result["queries"]
    assert train(plain) == plain  # done: nothing is trained again
    assert judged_again(plain) == result


def test_the_saved_encoder_has_the_same_figures_in_sentence_transformers(plain):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    pairs, result = load("docstrings", heldout=0.2), read_result(plain)
    relevant = {}
    for query, document in zip(pairs.splits["test"].query, pairs.splits["test"].document, strict=True):
        relevant.setdefault(str(query), set()).add(str(document))
    queries = {name: pairs.queries[int(name)] for name in relevant}
    corpus = {str(row): text for row, text in enumerate(pairs.documents)}
    evaluator = InformationRetrievalEvaluator(
        queries, corpus, relevant, mrr_at_k=[10], ndcg_at_k=[10], precision_recall_at_k=[1, 10, 100], map_at_k=[800],
        write_csv=False, batch_size=64,
    )  # fmt: skip
    theirs = evaluator(SentenceTransformer(str(plain / MODEL), device="cpu"))
    names = {"ndcg": "ndcg@10", "mrr": "mrr@10", "map": "map@800"} | {
        f"recall_{k}": f"recall@{k}" for k in (1, 10, 100)
    }
    for ours, name in names.items():
        assert result[f"{ours}_test"] == pytest.approx(100 * theirs[f"cosine_{name}"], abs=1e-6)


def test_a_run_of_another_loss_or_of_other_data_is_refused(plain, tmp_path):
    with pytest.raises(ValueError, match="holds another run"):
        train(plain, batch=32)
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"query": f"q{n}", "positive": f"d{n}"}) + "\n" for n in range(200)))
    with pytest.raises(ValueError, match="began with data and an encoder of fingerprint"):
        train(plain, data=str(path))


def test_two_different_towers_with_prompts(tmp_path):
    folder = train(
        tmp_path / "run", query_model="bag", projection=32, query_prompt="search: ", train="all", candidates="clip",
        loss=LossConfig("siglip"), epochs=1,
    )  # fmt: skip
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder / MODEL), device="cpu")
    assert model.prompts["query"] == "search: "
    assert model.encode_query(["a text"]).shape == (1, 32)
    result = read_result(folder)
    again = judged_again(folder)
    assert again["ndcg_test"] == pytest.approx(result["ndcg_test"], abs=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_hard_negatives_are_mined_again_and_cached_gradients_change_nothing(tmp_path, shared):
    """With dropout-free towers, micro-batches give the run of the whole batch."""
    options = {"hard": 2, "mine_every": 1, "shared": shared, "epochs": 2}
    whole = train(tmp_path / "whole", **options)
    parts = train(tmp_path / "parts", micro_batch=24, **options)
    a, b = read_log(whole / "log.csv"), read_log(parts / "log.csv")
    assert [row["loss"] for row in a] == pytest.approx([row["loss"] for row in b], rel=1e-4)
    without = train(tmp_path / "without", epochs=2)
    assert read_log(without / "log.csv")[0]["loss"] < a[0]["loss"]  # they make it harder


def test_options_of_the_loss_are_settings(tmp_path):
    """Each changes the run: none is dropped on the way."""
    losses = [
        read_log(train(tmp_path / str(number), epochs=1, **changes) / "log.csv")[0]["loss"]
        for number, changes in enumerate(
            (
                {},
                {"loss": LossConfig(temperature=0.05, options={"within": True})},
                {"loss": LossConfig(temperature=0.05, options={"ignore_above": -0.2})},
                {"loss": LossConfig(temperature=0.05, options={"hardness": 3.0})},
                {"candidates": "clip"},
                {"leave_out": "groups"},
                {"query_prompt": "find the function "},
            )
        )
    ]
    assert len(set(losses)) == len(losses)


def test_weights_of_pairs_reach_the_loss(tmp_path):
    rows = [json.loads(line) for line in Path(load.__code__.co_filename).with_name("docstrings.jsonl").open()]
    for name, weight in (("plain", {}), ("equal", {"weight": 1}), ("unequal", None)):
        more = [weight if weight is not None else {"weight": n % 3} for n in range(len(rows))]
        text = "".join(json.dumps({**row, **of}) + "\n" for row, of in zip(rows, more, strict=True))
        (tmp_path / f"{name}.jsonl").write_text(text)
        train(tmp_path / name, data=str(tmp_path / f"{name}.jsonl"), epochs=1)
    first = {name: read_log(tmp_path / name / "log.csv")[0]["loss"] for name in ("plain", "equal", "unequal")}
    assert first["plain"] == pytest.approx(first["equal"], rel=1e-5)
    assert first["unequal"] != pytest.approx(first["plain"], rel=1e-3)


def test_an_evaluation_on_other_data_has_its_own_file(plain, tmp_path):
    path = tmp_path / "others.jsonl"
    path.write_text("".join(json.dumps({"query": f"q{n}", "positive": f"d{n}"}) + "\n" for n in range(40)))
    before = read_result(plain)
    written = evaluate_run(plain, data=str(path))
    assert written.name == "evaluation_others.json"
    assert (plain / "queries_others.npz").is_file()
    assert read_result(plain) == before


def test_a_learned_temperature_has_its_own_rate(tmp_path):
    folder = train(
        tmp_path / "run", loss=LossConfig("infonce", options={"learn_temperature": True}), loss_lr=20.0
    )
    learned = [
        {name: value for name, value in row.items() if name.startswith("learned")}
        for row in read_log(folder / "log.csv")
    ]
    assert learned[0]
    assert learned[0] != learned[-1]


def test_a_head_on_frozen_embeddings_starts_from_the_encoder(plain, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WEINCE_DATA", str(tmp_path / "cache"))
    start = replace(settings(tmp_path / "a"), model=str(plain / MODEL), train="head", epochs=1)
    slow = replace(start, optimizer=replace(start.optimizer, lr=1e-9))
    TASK.train(slow, bar=False)
    assert "trains a linear head" in capsys.readouterr().err
    assert read_result(tmp_path / "a")["ndcg_test"] == pytest.approx(
        read_result(plain)["ndcg_test"], abs=0.01
    )
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "embeddings").iterdir()}
    folder = TASK.train(replace(start, out=tmp_path / "b", epochs=2), bar=False)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "embeddings").iterdir()} == kept
    assert judged_again(folder)["ndcg_test"] == pytest.approx(read_result(folder)["ndcg_test"], abs=1e-4)


def test_captions_and_images(tmp_path):
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 4, 160)
    images = np.zeros((160, 16, 16), np.uint8)
    for row, k in enumerate(kind):
        images[row, 4 * k : 4 * k + 4] = rng.integers(100, 255, (4, 16))
    names = np.array(["red fox", "blue whale", "green frog", "grey owl"])[kind]
    captions = np.array([f"{name} {row // 2 % 10}" for row, name in enumerate(names)])
    splits = np.array(["train"] * 120 + ["valid"] * 20 + ["test"] * 20)
    np.savez(tmp_path / "set.npz", images=images, captions=captions, splits=splits)
    folder = train(
        tmp_path / "run", data=str(tmp_path / "set.npz"), model="tiny", image_size=16, batch=40, epochs=8,
        candidates="clip", corpus="split", heldout=0.1,
    )  # fmt: skip
    result = read_result(folder)
    assert result["recall_1_test"] > 15  # by chance 5
    assert {"back", "unseen", "seen"} & result.keys() >= {"back"}
    assert judged_again(folder)["recall_10_test"] == pytest.approx(result["recall_10_test"], abs=1e-6)


OWN = """
import torch
from torch import nn

class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(26, 16)
    def tokenize(self, texts):
        rows = [[t.lower().count(chr(97 + n)) for n in range(26)] for t in texts]
        return {"letters": torch.tensor(rows, dtype=torch.float32)}
    def forward(self, inputs):
        return self.linear(inputs["letters"])

def encoder() -> nn.Module:
    return Letters()

class Bad(Letters):
    def forward(self, inputs):
        return inputs["letters"].sum()

class Nothing(nn.Module):
    pass

class Nans(Letters):
    def forward(self, inputs):
        return self.linear(inputs["letters"]) * float("nan")
"""


def test_an_encoder_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_encoders.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    folder = train(tmp_path / "run", model="my_encoders:encoder")
    assert read_result(folder)["recall_100_test"] > 20
    assert (folder / "document.safetensors").is_file()
    assert judged_again(folder)["ndcg_test"] == pytest.approx(read_result(folder)["ndcg_test"], abs=1e-6)
    for name, message in {
        "Bad": r"must map n texts to embeddings \(n, width\)",
        "Nothing": "must be a SentenceTransformer or have a method tokenize",
        "missing": "must define missing",
        "Nans": "NaN|nan",
    }.items():
        with pytest.raises(ValueError, match=message):
            train(tmp_path / name, model=f"my_encoders:{name}")


def test_bad_settings_and_data(tmp_path, plain):
    for changes, message in {
        "batch": ({"batch": 1000}, "a batch of 1000 needs as many training pairs; got 476"),
        "hard": ({"hard": 2}, "wants as many hard negatives of a query; got 0 in docstrings"),
        "width": ({"query_model": str(plain / MODEL), "model": "bag", "projection": None}, None),
        "model": ({"model": str(tmp_path / "nowhere")}, "no such model folder"),
        "run": ({"model": str(plain)}, "did you mean"),
    }.values():
        if message is not None:
            with pytest.raises((ValueError, OSError), match=message):
                train(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="heldout must be"):
        settings(tmp_path, heldout=0.9)
    with pytest.raises(ValueError, match="mine_every wants hard"):
        settings(tmp_path, mine_every=1)


def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    """Those on the embedded set; the comparison is run with fewer runs elsewhere."""
    page = (ROOT / "docs" / "retrieval.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("weince ") and "runs/" in line]
    tiny = ("retrieval_tiny", "docstrings", "runs/tiny")
    lines = [line for line in lines if any(name in line for name in tiny) and "compare" not in line]
    assert [line.split()[1] for line in lines] == ["train", "evaluate", "mine", "train"]
    monkeypatch.chdir(tmp_path)
    for line in lines:
        assert main(line.split()[1:]) in (0, None)
    said = capsys.readouterr().out
    assert "test: ndcg" in said
    assert read_result(tmp_path / "runs" / "harder")["queries"] == 163


# Kills and processes


def start(*arguments, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    return Program(towers_runs.__file__, *arguments, env=environment)


@pytest.mark.posix
@pytest.mark.long
def test_three_kills_change_nothing(tmp_path):
    arguments = ["epochs=8", "hard=1", "mine_every=3", "eval_every=3"]
    options = {"epochs": 8, "hard": 1, "mine_every": 3, "eval_every": 3}
    whole = train(tmp_path / "whole", **options)
    out, kills = tmp_path / "killed", 0
    for wanted in (1, 5, 11):
        program = start("train", out, *arguments)
        deadline = time.monotonic() + 120
        while program.poll() is None and time.monotonic() < deadline:
            if len(list((out / "checkpoints").glob("step_*.pt"))) and newest(out) >= 3 * wanted:
                program.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        program.wait()
    train(out, **options)
    assert kills >= 2
    assert_equal_runs(whole, out)


def newest(out):
    return max(
        (int(path.stem.removeprefix("step_")) for path in (out / "checkpoints").glob("step_*.pt")), default=0
    )


@pytest.mark.posix
def test_two_processes_are_as_good_as_one(tmp_path):
    options = {"hard": 2, "mine_every": 1, "shared": False, "epochs": 1}
    one = train(tmp_path / "one", **options)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    where |= {"WORLD_SIZE": "2", "NODE_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    arguments = [
        "train",
        tmp_path / "two",
        *(f"{name}={value!r}" for name, value in options.items()),
        "devices=2",
    ]
    programs = [start(*arguments, **where, LOCAL_RANK=str(rank), RANK=str(rank)) for rank in range(2)]
    for program in programs:
        ended = program.wait()
        assert ended.returncode == 0, ended.stderr
    a, b = read_log(one / "log.csv"), read_log(tmp_path / "two" / "log.csv")
    assert [row["loss"] for row in a] == pytest.approx([row["loss"] for row in b], rel=1e-4)
    for name, value in read_result(one).items():
        if isinstance(value, float):
            assert value == pytest.approx(
                read_result(tmp_path / "two")[name], abs=0.7
            )  # a query may change a place
    first, second = (
        next(iter(weights(folder / MODEL).values()))["embedding.weight"] for folder in (one, tmp_path / "two")
    )
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)
