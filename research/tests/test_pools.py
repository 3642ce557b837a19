"""The link under selected negatives, and under known distributions of positives."""

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from weince import evt

SCRIPT = Path(__file__).parents[1] / "pools.py"
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
            (script.HARD, pool) for pool in script.POOLS
        ]
        assert {p.law for p in points} == {law}
    with np.load(pairs) as file:
        fit = evt.fit_link(*evt.link_bank(file["z_i"], file["z_j"]))
    for law, points in found.items():
        everything = next(p for p in points if p.kept == 510)
        # Each fit uses half of the batches, and the simulated laws have other positives.
        assert everything.lam == pytest.approx(0.0 if "softmax" in law else fit.lam, abs=0.12)
        assert (everything.gain > 0.02) == ("softmax" not in law)


def test_pairs_that_no_link_fits_are_named(tmp_path):
    z = np.random.default_rng(0).standard_normal((1100, 8))
    np.savez(tmp_path / "same.npz", z_i=z, z_j=z)
    with pytest.raises(SystemExit, match=r"no link fits .*same\.npz"):
        list(script.banks(tmp_path / "same.npz", 0))


def test_a_point_without_a_link_is_a_dash():
    assert script.spread([0.5, np.nan]) == "—"


def test_a_table_and_a_figure_are_written(pairs, tmp_path):
    script.main([str(pairs), str(pairs), "--results", str(tmp_path / "found"), "--source", "noise"])
    text = (tmp_path / "found.md").read_text()
    assert "Of noise; encoders: 2" in text
    with (tmp_path / "found.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(script.LAWS) * (len(script.KEPT) + len(script.POOLS))
    mine = [float(r["lam"]) for r in rows if (r["law"], r["kept"], r["pool"]) == ("measured", "64", "128")]
    assert mine[0] == mine[1]  # the same pairs twice
    assert f"| 64 | 128 | {mine[0]:.3f} ± 0.000 |" in text
    assert (tmp_path / "found.svg").read_text().lstrip().startswith("<?xml")
