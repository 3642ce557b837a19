"""A comparison of losses on two towers: both noises are judged, and three kills change nothing."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from programs import Program

from weince.cli import main
from weince.lab.study.statistics import MISSING

ARGUMENTS = [
    "infonce",
    "dcl",
    "--config",
    "retrieval_tiny",
    "--set",
    "epochs=1",
    "--tries",
    "1",
    "--seeds",
    "7",
    "21",
]


@pytest.mark.long
@pytest.mark.posix
def test_three_kills_change_no_figure(tmp_path):
    whole, killed, kills = tmp_path / "whole", tmp_path / "killed", 0
    main(["compare", *ARGUMENTS, "--out", str(whole)])
    page = (whole / "retrieval_tiny" / "index.html").read_text()
    assert "count two noises" in page
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for wanted in (1, 2, 3):
        program = Program(
            "-m", "weince", "compare", *ARGUMENTS, "--out", killed, env=environment, cwd=Path.cwd()
        )
        deadline = time.monotonic() + 200
        while program.poll() is None and time.monotonic() < deadline:
            if len(list(killed.glob("runs/**/log.csv"))) >= wanted:
                program.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.02)
        program.wait(200)
    main(["compare", *ARGUMENTS, "--out", str(killed)])
    assert kills >= 2
    ours, theirs = (
        {path.relative_to(out): path for path in out.glob("runs/**/queries.npz")} for out in (whole, killed)
    )
    assert ours.keys() == theirs.keys()
    assert len(ours) == 4
    for name, path in ours.items():
        a, b = np.load(path), np.load(theirs[name])
        assert all(np.array_equal(a[key], b[key]) for key in a.files)
    # Without the figures of each query, seeds alone never make a loss better or worse.
    for path in theirs.values():
        path.unlink()
    main(["compare", *ARGUMENTS, "--out", str(killed), "--table-only"])
    content = (killed / "retrieval_tiny" / "compare.json").read_text()
    assert '"better"' not in content.replace(MISSING, "")
