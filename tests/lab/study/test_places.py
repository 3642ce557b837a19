import os
from dataclasses import replace

import pytest
from lab.study.tables import small_table

from weince.lab.study.local import shares, side_by_side
from weince.lab.study.plan import plan
from weince.lab.study.table import read_table


@pytest.mark.parametrize(
    ("machine", "threads", "gpus"),
    [
        ((2, 16, 0), "8", [None, None]),
        ((3, 2, 1), "1", [None, None, None]),
        ((5, 16, 2), "3", ["0", "1", "0", "1", "0"]),
        ((3, 16, 2, "4, 6"), "5", ["4", "6", "4"]),
    ],
)
def test_runs_at_once_share_a_machine(machine, threads, gpus):
    found = shares(*machine)
    assert [place.get("CUDA_VISIBLE_DEVICES") for place in found] == gpus
    assert {place["OMP_NUM_THREADS"] for place in found} == {threads}


@pytest.mark.parametrize(
    ("cpus", "gpus", "extra", "wanted"),
    [(16, 0, {}, 3), (2, 0, {}, 2), (16, 1, {}, 1), (16, 2, {}, 2), (16, 2, {"device": "cuda:1"}, 1),
     (2, 1, {"device": "cpu"}, 2)],
)  # fmt: skip
def test_runs_at_once_have_cores_or_gpus_of_their_own(tmp_path, monkeypatch, cpus, gpus, extra, wanted):
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    first, *_ = plan(read_table(str(small_table(tmp_path))), tmp_path)
    run = replace(first, extra=extra)
    assert side_by_side(run, 3) == wanted
