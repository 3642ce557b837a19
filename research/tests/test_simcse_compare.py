"""The comparison of losses on text: its runs, its tables, and that it resumes."""

import csv
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import ROOT, run, script
from scipy.stats import ttest_rel

SCRIPT = ROOT / "research" / "simcse_compare.py"
compare = script(SCRIPT)
Config, Result = compare.Config, compare.Result


def test_what_matters_most_comes_first():
    order = [tuple(one) for one in compare.configs(["infonce", "paper", "released"], [0.05, 0.02])]
    assert order == [
        ("infonce", 0.05), ("infonce", 0.02), ("paper", 0.05), ("released", 0.05),
        ("paper", 0.02), ("released", 0.02),
    ]  # fmt: skip


@given(st.lists(st.floats(0, 1), min_size=0, max_size=8))
def test_holm(p_values):
    """The definition: the smallest p times n, the next times n - 1, and so on, never decreasing, at most 1."""
    found = compare.holm(p_values)
    for place, p in enumerate(p_values):
        rank = sorted(range(len(p_values)), key=lambda i: (p_values[i], i)).index(place)
        ordered = sorted(p_values)
        expected = min(1.0, max((len(ordered) - i) * ordered[i] for i in range(rank + 1)))
        assert found[place] == pytest.approx(expected), (p, rank)


@pytest.fixture
def results():
    rng = np.random.default_rng(0)
    found = []
    for preset, base in (("infonce", 70.0), ("paper", 72.0)):
        for temperature in (0.05, 0.1):
            for seed in range(5):
                test = base + 10 * temperature + rng.normal() + seed
                dev = test + (5 if (preset, temperature) == ("paper", 0.1) else 0)
                values = {"dev": dev, "STSB": test, "mean": 60.0 + seed, "alignment": 0.2, "uniformity": -2.0}
                found.append(Result(Config(preset, temperature), seed, values))
    return found


def test_tables(results):
    order = compare.configs(["infonce", "paper"], [0.05, 0.1])
    lines = compare.table(results, order, order[0])
    assert len(lines) == 2 + 4
    a = [one.values["STSB"] for one in results if one.config == ("paper", 0.05)]
    b = [one.values["STSB"] for one in results if one.config == ("infonce", 0.05)]
    row = next(line for line in lines if line.startswith("| WEINCE paper, 0.05"))
    assert f"{np.mean(a) - np.mean(b):+.2f} ±" in row
    assert f"| {ttest_rel(a, b).pvalue:.3g} |" in row
    chosen = compare.chosen_table(results, order)
    assert [line.split("|")[1].strip() for line in chosen[2:]][
        1
    ] == "WEINCE paper, 0.1"  # chosen by dev, not by test
    assert all(line.split("|")[2].strip() == "2" for line in chosen[2:])


def test_seeds_that_only_one_has_are_left_out(results):
    fewer = [one for one in results if not (one.config == ("paper", 0.05) and one.seed > 2)]
    test = compare.compare(fewer, Config("paper", 0.05), Config("infonce", 0.05), "STSB")
    assert test.n == 3


@pytest.mark.long
def test_a_comparison_runs_goes_on_and_aggregates(toy_model, toy_text, toy_sts, tmp_path, capsys):
    out, results = tmp_path / "runs", tmp_path / "results" / "simcse"
    line = [
        "--out",
        str(out),
        "--results",
        str(results),
        "--presets",
        "infonce",
        "paper",
        "--temperatures",
        "0.05",
    ]
    line += ["--seeds", "0", "1"]
    train = ["--model", str(toy_model), "--text", str(toy_text), "--sts", str(toy_sts), "--sentences", "40"]
    train += ["--batch", "16", "--device", "cpu"]
    assert run(SCRIPT, *line, *train).returncode == 0
    with results.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    runs = [(preset, seed) for preset in ("infonce", "paper") for seed in ("0", "1")]
    assert [(row["preset"], row["seed"]) for row in rows] == runs
    result = json.loads((out / "paper_0.05_seed1" / "result.json").read_text())
    assert float(rows[3]["STSB"]) == pytest.approx(result["tasks"]["STSB"], rel=1e-5)
    assert (results.parent / "simcse_seeds.svg").read_text().startswith("<?xml")
    looks = list(csv.DictReader((results.parent / "simcse_dev.csv").open()))
    best = max(float(look["dev"]) for look in looks if look["run"] == "paper_0.05_seed1")
    assert best == pytest.approx(result["dev"], abs=0.01)
    said = results.with_suffix(".md").read_text()
    assert "Before SimCSE" in said
    assert "4 runs, 1 at once, in " in said
    assert str(tmp_path) not in said

    before = {path: path.read_bytes() for path in results.parent.iterdir()}
    compare.main([*line, *train])  # all runs are done
    compare.main([*line, "--aggregate-only"])
    assert {path: path.read_bytes() for path in results.parent.iterdir()} == before
    with pytest.raises(SystemExit):
        compare.main(line)
    assert "--model, --text and --sts are needed" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no run in"):
        compare.main(["--aggregate-only", "--out", str(tmp_path / "none")])
