"""The examples and the benchmark run, and report errors in one line."""

import argparse
import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from programs import ROOT, script

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers


def test_the_example_in_lightning(tmp_path, capsys):
    script("examples/lightning_simclr.py").main(["--epochs", "2", "--out", str(tmp_path)])
    assert "weight of the shortfall logit 0." in capsys.readouterr().out
    with (tmp_path / "version_0" / "metrics.csv").open() as file:
        logged = [row["step"] for row in csv.DictReader(file) if row["tail/lam_mean"]]
    assert logged == ["0", "10"]


@pytest.mark.long
def test_the_example_of_a_loss_of_ones_own(capsys):
    """Memory grows linearly: with 4,096 pairs it stays below half the size of the matrix of scores."""
    script("examples/own_loss.py").main(["--pairs", "64", "--steps", "8"])
    for line in capsys.readouterr().out.splitlines()[:2]:
        first, last = (float(part.split()[0]) for part in line.split(": ")[1].split(" steps, "))
        assert last < first
    program = [sys.executable, str(ROOT / "examples/own_loss.py"), "--pairs", "4096", "--steps", "1"]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    if sys.platform != "win32":
        assert said.endswith("the matrix of scores would be 256 MiB")
        assert float(said.split(": ")[1].split()[0]) < 128


def test_the_example_in_metric_learning(capsys):
    script("examples/metric_learning.py").main(["--epochs", "3"])
    said = capsys.readouterr().out.splitlines()[-1]
    before, after = (float(part.split()[-1]) for part in said.split(" % ")[:2])
    assert said.startswith("nearest neighbour has the same label")
    assert before < after <= 100


@pytest.mark.parametrize("options", [[], ["--cached"]])
def test_the_example_in_sentence_transformers(tiny_folder, options, capsys):
    script("examples/sentence_transformers_pairs.py").main(
        ["--model", str(tiny_folder), "--steps", "2", *options]
    )
    assert "nearest sentence is the answer: " in capsys.readouterr().out


def test_the_benchmark_prints_and_writes_a_table(tiny_folder, tmp_path, capsys):
    out = tmp_path / "table.md"
    sizes = ["--batch", "4", "--words", "3", "--rounds", "3", "--block", "2"]
    script("benchmarks/text_step.py").main(["--model", str(tiny_folder), *sizes, "--write", str(out)])
    table = out.read_text()
    assert table in capsys.readouterr().out
    assert "batches of 4 pairs of 3 words, fp32, 3 rounds of 2 steps" in table
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"
    ]
    names, ratios = [row[0] for row in cells[2:]], [float(row[2]) for row in cells[2:]]
    assert names == ["MultipleNegativesRankingLoss", "InfoNCE of weince", "WEINCE, paper", "WEINCE, released"]
    assert ratios[0] == 1
    assert all(0.05 < ratio < 50 for ratio in ratios)
    assert list(tmp_path.iterdir()) == [out]


def test_the_benchmark_compares_blocks_of_one_round():
    """A tenfold slowdown of the machine changes no ratio; a loss that takes 10 % longer has a ratio of 1.1."""
    module = script("benchmarks/text_step.py")
    slow = np.array([1.0, 1.0, 1.0, 10.0, 10.0, 10.0])
    seconds = {module.YARDSTICK: list(slow), "other": list(1.1 * slow)}
    assert module.ratios(seconds, "other") == pytest.approx((1.1, 1.1, 1.1))
    clock = module.Clock(argparse.Namespace(losses={"a": 0, "b": 1, "c": 2}, turn="a"), block=2, device="cpu")
    turns = []
    for step in range(12):
        clock.on_step_begin(None, argparse.Namespace(global_step=step), None)
        turns.append(clock.turns.turn)
        clock.on_step_end(None, argparse.Namespace(global_step=step + 1), None)
    assert turns[::2] == turns[1::2]  # blocks of two
    assert sorted(turns[::2][:3]) == sorted(turns[::2][3:]) == ["a", "b", "c"]  # each loss once per round
    assert {name: len(values) for name, values in clock.seconds.items()} == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize("path", ["benchmarks/text_step.py", "examples/sentence_transformers_pairs.py"])
def test_a_missing_model_is_said_in_one_line(path, tmp_path):
    for model, said in {
        str(tmp_path / "missing"): f"{Path(path).stem}: no model folder {tmp_path}/missing",
        "nobody/nothing": f"{Path(path).stem}: cannot load model 'nobody/nothing' from the hub's cache",
    }.items():
        with pytest.raises(SystemExit) as stopped:
            script(path).main(["--model", model])
        assert str(stopped.value).startswith(said)
        assert "\n" not in str(stopped.value)


def test_the_benchmark_refuses_what_it_cannot_do(capsys):
    main = script("benchmarks/text_step.py").main
    for arguments, said in ((["--rounds", "0"], "--rounds must be at least 1; got 0"),):
        with pytest.raises(SystemExit):
            main(arguments)
        assert said in capsys.readouterr().err
