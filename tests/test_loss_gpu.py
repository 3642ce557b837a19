"""The GPU benchmark, as far as it runs on a CPU."""

import sys

import programs
import pytest
import torch


@pytest.fixture(scope="module")
def script():
    module = programs.script("benchmarks/loss_gpu.py")
    module.ROUNDS, module.ROUND_SECONDS = 2, 0.0
    return module


TWO_TOWERS = ("InfoNCE, cross", "own negatives", "ignore_above", "offset", "dot", "labels of two towers")


@pytest.mark.parametrize("name", ["torch InfoNCE", "InfoNCE", "released", "SupCon", "own link", *TWO_TOWERS])
def test_a_row(script, name):
    row = script.measure(name, "eager", script.Size(8, 4, torch.float32, {}), device="cpu")
    assert row.note == ""
    assert row.milliseconds > 0
    assert row.size == "8 x 4 float32"


def test_torch_info_nce_is_ours(script):
    z_i, z_j = torch.randn(8, 4), torch.randn(8, 4)
    torch.testing.assert_close(script.torch_info_nce(z_i, z_j), script.OURS["InfoNCE"]()(z_i, z_j))


def test_what_cannot_be_measured_says_why(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "pykeops.torch", None)
    row = script.measure("KeOps", "eager", script.Size(8, 4, torch.float32, {}), device="cpu")
    assert "pykeops" in row.note
    assert script.cells(row, {})[3] == row.note


def test_all_that_is_wanted_is_measured(script):
    measured = [(size.name, name, way) for name, way, size in script.jobs(script.SIZES)]
    assert len(measured) == len(set(measured))
    assert set(script.WANTED) <= set(measured)
    for (size, name, way), wanted in script.WANTED.items():
        if wanted.times is not None:
            assert measured.index((size, *wanted.times)) < measured.index((size, name, way))


@pytest.mark.parametrize(("ms", "mib", "met"), [(2.3, 8.0, "yes"), (2.5, 8.0, "no"), (2.3, 700.0, "memory")])
def test_verdicts(script, ms, mib, met):
    size = "1,024 x 128 float32"
    yardstick = script.Row(size, *script.COMPILED, 2.0, 19.0)
    row = script.Row(size, "InfoNCE", "eager", ms, mib)
    found = {(size, *script.COMPILED): yardstick}
    assert script.verdict(row, found) == (f"{ms / 2:.2f}", "1.2 x torch InfoNCE, compiled", met)
