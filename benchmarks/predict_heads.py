"""CPU time and peak memory of the heads of `weince predict`, trained together or one by one.

8,192 items of 512 features, five losses at eight temperatures, one thread. CPU time leaves out other work on the
machine. Prints the time of a step of one head, and that of 160 heads of 300 steps on two cores.

Example:
    python benchmarks/predict_heads.py
"""

import argparse
import resource
import subprocess
import sys
import time

import numpy as np
import torch

from weince.diagnose.reading import make_pairs
from weince.lab.predict import LOSSES, TEMPERATURES, TOGETHER, grid
from weince.lab.predict.features import Views, prepare
from weince.lab.predict.heads import Probe, Training

STEPS, HEADS, CORES, SERVED = 3, 160, 2, 300


def features() -> Views:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((8192, 512)) * np.linspace(3, 0.1, 512)
    z_i, z_j = (base + rng.standard_normal((8192, 512)) for _ in range(2))
    labels = rng.integers(100, size=8192)
    return prepare(make_pairs("drawn", z_i, z_j), labels, batch=256, axes=Probe().axes).views


def measured(together: int) -> None:
    """Print CPU milliseconds of a step of a head, those of evaluating it, and the peak memory in MiB."""
    torch.set_num_threads(1)
    views, losses = features(), list(grid(LOSSES, TEMPERATURES).values())
    step = judged = 0.0
    # One temperature of each loss is enough: the temperature does not change the time of a step.
    chosen = losses if together == len(losses) else losses[:: len(TEMPERATURES)]
    for start in range(0, len(chosen), together):
        training = Training(views, chosen[start : start + together], 0, Probe())
        training.step()
        begin = time.process_time()
        for _ in range(STEPS):
            training.step()
        middle = time.process_time()
        training.outcomes()
        step += (middle - begin) / STEPS / len(chosen)
        judged += (time.process_time() - middle) / len(chosen)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{1000 * step:.1f} {1000 * judged:.0f} {peak:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--together", type=int, help="only these, in this process")
    together = parser.parse_args().together
    if together is not None:
        measured(together)
        return
    print(
        f"| heads together | step of a head, CPU ms | judging it | peak, MiB | {HEADS} heads, {SERVED} steps, min |"
    )
    print("|---|---:|---:|---:|---:|")
    for count in (1, TOGETHER, len(LOSSES) * len(TEMPERATURES)):
        done = subprocess.run(
            [sys.executable, __file__, "--together", str(count)], capture_output=True, text=True, check=True
        )
        step, judged, peak = map(float, done.stdout.split())
        minutes = HEADS * (SERVED * step + judged) / 1000 / CORES / 60
        print(f"| {count} | {step:.1f} | {judged:.0f} | {peak:.0f} | {minutes:.1f} |", flush=True)


if __name__ == "__main__":
    main()
