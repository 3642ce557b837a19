"""The README's example runs as written, and the examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
        **options,
    )


def test_the_example_runs_as_written():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    done = run("-c", blocks[0])
    assert done.returncode == 0, done.stderr
    assert "weight of the shortfall logit: 0." in done.stdout


@pytest.mark.parametrize("script", ["examples/demo.py", "benchmarks/loss_cpu.py"])
def test_help_shows_an_example(script):
    done = run(script, "--help")
    assert done.returncode == 0
    assert f"python {script}" in done.stdout


def test_the_benchmark_prints_ratios():
    done = run("benchmarks/loss_cpu.py", "--pairs", "8", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "plain InfoNCE" in done.stdout
    assert "WeinceLoss.paper" in done.stdout
