"""The README's example runs as written, and the examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run

ROOT = Path(__file__).parent.parent


def test_the_example_runs_as_written():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    done = subprocess.run([sys.executable, "-c", blocks[0]], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["benchmarks/compare_size.py", "benchmarks/loss_cpu.py"])
def test_help_shows_an_example(script):
    done = run(script, "--help", cwd=ROOT)
    assert done.returncode == 0
    assert f"python {script}" in done.stdout


def test_the_benchmark_prints_ratios():
    done = run(ROOT / "benchmarks" / "loss_cpu.py", "--pairs", "8", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "plain InfoNCE" in done.stdout
    assert "WeinceLoss.paper" in done.stdout
