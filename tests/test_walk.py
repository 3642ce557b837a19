"""The way of one step is short: a reader of the library can follow it."""

import re
import subprocess
import sys

from programs import ROOT


def test_one_infonce_step_passes_few_files_and_functions():
    # In a process of its own: where the kernels are imported, rows ask them whether they serve.
    walk = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "walk.py"], capture_output=True, text=True, check=True
    )
    files, functions = map(
        int, re.search(r"InfoNCELoss\S*: (\d+) files, (\d+) functions", walk.stdout).groups()
    )
    assert files <= 8
    assert functions <= 45
