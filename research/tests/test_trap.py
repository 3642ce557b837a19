"""Training heads to find out which losses make embeddings crowd."""

import csv
import math

import numpy as np
import programs
import pytest
import torch
from programs import ROOT, run
from scipy import stats

SCRIPT = ROOT / "research" / "trap.py"
script = programs.script(SCRIPT)


@pytest.fixture
def pairs(tmp_path):
    rng = np.random.default_rng(0)
    z = rng.standard_normal((1200, 8)).astype(np.float32)
    near = z + 0.2 * rng.standard_normal((1200, 8)).astype(np.float32)
    np.savez(tmp_path / "pairs.npz", z_i=z, z_j=near)
    return tmp_path / "pairs.npz"


def test_a_training_repeats(pairs):
    assert script.train("released", 0, pairs, steps=10) == script.train("released", 0, pairs, steps=10)


def test_items_on_one_place_are_crowded():
    torch.manual_seed(0)
    z = torch.randn(512, 16)
    assert script.look(z, z, 0.0).crowded == 0
    z[:64] = z[0] + 1e-3 * torch.randn(64, 16)
    found = script.look(z, z + 1e-3 * torch.randn(512, 16), 0.0)
    assert found.crowded == 64 / 512
    assert found.first == pytest.approx((192 + 256) / 512, abs=0.15)  # all 64 are in the first batch


def test_features_are_standardised(pairs):
    both = torch.cat(script.read(pairs))
    torch.testing.assert_close(both.mean(0), torch.zeros(8), rtol=0, atol=1e-5)
    torch.testing.assert_close(both.std(0), torch.ones(8), rtol=1e-4, atol=0)


def test_an_interval_is_the_t_interval():
    values = [0.1, 0.3, 0.2, 0.6]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert script.spread(values, 3) == f"{np.mean(values):.3f} ± {(high - low) / 2:.3f}"
    assert script.spread([0.5], 1, 100) == "50.0"


@pytest.mark.long
def test_every_loss_trains_a_head_and_a_table_and_a_figure_are_written(pairs, tmp_path):
    wanted = [str(pairs), "--seeds", "0", "--steps", "10", "--results", str(tmp_path / "found")]
    done = run(SCRIPT, *wanted)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "found.md").read_text()
    assert text in done.stdout
    assert all(f"\n| {name} | " in text for name in script.LOSSES)
    assert (tmp_path / "found.svg").read_text().startswith("<?xml")
    lines = (tmp_path / "found.csv").read_text().splitlines()
    assert lines[0] == "loss,seed,steps,pairs,crowded,first,rise,slope"
    assert len(lines) == 1 + len(script.LOSSES)
    rows = list(csv.DictReader(lines))
    assert [row["loss"] for row in rows] == list(script.LOSSES)
    for row in rows:
        assert all(math.isfinite(float(row[name])) for name in script.Outcome._fields), row
        assert float(row["first"]) > 0.05, row  # chance is 1 / 256
    # Known heads are used unchanged; the missing one is trained, with the same result as before.
    changed = [*lines[2].split(",")[:-1], "7.5"]
    (tmp_path / "known.csv").write_text("\n".join([*lines[:2], ",".join(changed), *lines[4:]]) + "\n")
    assert run(SCRIPT, *wanted, "--known", tmp_path / "known.csv").returncode == 0
    again = (tmp_path / "found.csv").read_text().splitlines()
    assert again == [*lines[:2], ",".join(changed), *lines[3:]]
    refused = run(SCRIPT, *wanted, "--steps", "11", "--known", tmp_path / "known.csv")
    assert refused.returncode == 1
    assert "known.csv has heads of Made(steps=10, pairs=" in refused.stderr
    assert "wanted Made(steps=11, pairs=" in refused.stderr
