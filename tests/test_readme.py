"""The programs that the README names print a usage example, and run."""

from pathlib import Path

import pytest
from programs import run

import weince

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "script",
    [
        "benchmarks/compare_size.py",
        "benchmarks/loss_cpu.py",
        "benchmarks/every_loss_cpu.py",
        "tools/notebooks.py",
    ],
)
def test_help_shows_an_example(script):
    done = run(script, "--help", cwd=ROOT)
    assert done.returncode == 0
    assert f"python {script}" in done.stdout


def test_the_benchmark_prints_ratios():
    done = run(ROOT / "benchmarks" / "loss_cpu.py", "--pairs", "8", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "plain InfoNCE" in done.stdout
    assert "WeinceLoss.paper" in done.stdout


def test_every_loss_is_timed():
    done = run(ROOT / "benchmarks" / "every_loss_cpu.py", "--pairs", "8", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    timed = {line.split("`")[1].split(".")[0] for line in done.stdout.splitlines() if line.startswith("| `")}
    losses = {name for name in weince.__all__ if name.endswith("Loss")}
    assert timed == losses - {"ContrastiveLoss", "LinkLoss", "SupConLoss"}  # these need a link or labels
