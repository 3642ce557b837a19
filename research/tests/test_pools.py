"""The link under selected negatives, and under known distributions of positives."""

import csv

import numpy as np
import programs
import pytest

from weince import evt

script = programs.script("research/pools.py")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    rng = np.random.default_rng(0)
    z = rng.standard_normal((1100, 8))
    path = tmp_path_factory.mktemp("pools") / "pairs.npz"
    np.savez(path, z_i=z, z_j=z + 0.5 * rng.standard_normal((1100, 8)))
    return path


@pytest.fixture(scope="module")
def found(pairs):
    """Folder of the table and the figure of the same pairs twice."""
    script.main([str(pairs), str(pairs), "--results", str(pairs.parent / "found"), "--source", "noise"])
    return pairs.parent


def rows_of(found):
    with (found / "found.csv").open() as file:
        return list(csv.DictReader(file))


def test_keeping_everything_is_the_fit_to_everything(pairs, found):
    laws = {}
    for row in rows_of(found):
        if row["encoder"] == "0":
            laws.setdefault(row["law"], []).append(row)
    assert list(laws) == list(script.LAWS)
    for rows in laws.values():
        assert [(int(row["kept"]), int(row["pool"])) for row in rows] == [(k, 510) for k in script.KEPT] + [
            (script.HARD, pool) for pool in script.POOLS
        ]
    with np.load(pairs) as file:
        fit = evt.fit_link(*evt.link_bank(file["z_i"], file["z_j"]))
    for law, rows in laws.items():
        everything = next(row for row in rows if row["kept"] == "510")
        # Each fit uses half of the batches, and the simulated laws have other positives.
        assert float(everything["lam"]) == pytest.approx(0.0 if "softmax" in law else fit.lam, abs=0.12)
        assert (float(everything["gain"]) > 0.02) == ("softmax" not in law)


def test_pairs_that_no_link_fits_are_named(tmp_path):
    z = np.random.default_rng(0).standard_normal((1100, 8))
    np.savez(tmp_path / "same.npz", z_i=z, z_j=z)
    with pytest.raises(SystemExit, match=r"no link fits .*same\.npz"):
        list(script.banks(tmp_path / "same.npz", 0))


def test_a_point_without_a_link_is_a_dash():
    assert script.spread([0.5, np.nan]) == "—"


def test_a_table_and_a_figure_are_written(found):
    text, rows = (found / "found.md").read_text(), rows_of(found)
    assert "Of noise; encoders: 2" in text
    assert len(rows) == 2 * len(script.LAWS) * (len(script.KEPT) + len(script.POOLS))
    mine = [float(r["lam"]) for r in rows if (r["law"], r["kept"], r["pool"]) == ("measured", "64", "128")]
    assert mine[0] == mine[1]  # the same pairs twice
    assert f"| 64 | 128 | {mine[0]:.3f} ± 0.000 |" in text
    assert (found / "found.svg").read_text().lstrip().startswith("<?xml")
