"""The link under selected negatives, and under laws that are known."""

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "pools.py"
spec = importlib.util.spec_from_file_location("pools", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.fixture
def pairs(tmp_path):
    rng = np.random.default_rng(0)
    z = rng.standard_normal((1100, 8))
    np.savez(tmp_path / "pairs.npz", z_i=z, z_j=z + 0.5 * rng.standard_normal((1100, 8)))
    return tmp_path / "pairs.npz"


def test_keeping_everything_is_the_fit_to_everything(pairs):
    found = {law: list(script.ablate(law, 0, bank)) for law, bank in script.banks(pairs, 0)}
    assert list(found) == list(script.LAWS)
    for law, points in found.items():
        assert [(p.kept, p.pool) for p in points] == [(k, 510) for k in script.KEPT] + [
            (script.HARD, pool) for pool in script.POOLS[:-1]
        ]
        assert {p.law for p in points} == {law}
    everything = next(p for p in found["drawn from the fitted softmax"] if p.kept == 510)
    assert everything.lam < 0.1
    assert abs(everything.gain) < 0.01


def test_a_table_and_a_figure_are_written(pairs, tmp_path):
    script.main([str(pairs), str(pairs), "--results", str(tmp_path / "found"), "--source", "noise"])
    text = (tmp_path / "found.md").read_text()
    assert "Of noise; encoders: 2" in text
    with (tmp_path / "found.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(script.LAWS) * (len(script.KEPT) + len(script.POOLS) - 1)
    mine = [float(r["lam"]) for r in rows if (r["law"], r["kept"], r["pool"]) == ("measured", "64", "128")]
    assert mine[0] == mine[1]  # the same pairs twice
    assert f"| 64 | 128 | {mine[0]:.3f} ± 0.000 |" in text
    assert (tmp_path / "found.svg").read_text().lstrip().startswith("<?xml")
