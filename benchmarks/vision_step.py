"""Views per second of a SimCLR step, and where its time goes.

    python benchmarks/vision_step.py                       ResNet-18, 32 px, 256 pairs, on the GPU
    python benchmarks/vision_step.py --encoder tiny --device cpu --batch 32 --seconds 1

All rows are measured in one run on random images that lie on the device: a plain eager loop, the same compiled, and
compiled and captured as one CUDA graph, for InfoNCE and WEINCE. A step makes both views, embeds them, and updates
the weights. The profile adds up the time of the GPU's kernels by what they do, over ten captured steps.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from weince.lab.configure import LossConfig
from weince.lab.tasks.images.augment import Augment
from weince.lab.tasks.images.config import VisionRun
from weince.lab.tasks.images.training import ImageTraining
from weince.lab.training.capture import Step
from weince.lab.training.fabric import launch

IMAGES = 50_000

KINDS = (  # a kernel belongs to the first kind that has a word in the kernel's name
    ("norms and activations", ("batch_norm",)),
    ("convolutions", ("conv", "fprop", "wgrad", "dgrad", "nchwtonhwc", "nhwctonchw")),
    ("optimizer", ("adam", "multi_tensor")),
    ("loss", ("sample_kernel", "survivors_kernel", "refine_kernel", "exact_kernel", "operands_kernel",
              "fit_kernel", "gate_kernel", "sum_kernel", "finish_kernel", "gradient_kernel")),
    ("products of the views and the projector", ("gemm", "bmm", "cutlass")),
    ("views", ("triton", "distribution", "index", "sort")),
)  # fmt: skip


def write_images(options: argparse.Namespace, folder: Path) -> Path:
    shape = (IMAGES, options.size, options.size, 3)
    path = folder / "random.npz"
    np.savez(path, train_images=np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    return path


def build_step(
    options: argparse.Namespace, images: Path, preset: str, *, compiled: bool, graph: bool
) -> Step:
    torch.compiler.reset()
    run = VisionRun(
        data=str(images),
        encoder=options.encoder,
        loss=LossConfig(preset),
        augment=Augment(options.size),
        batch=options.batch,
        precision=options.precision,
        device=options.device,
        compile=compiled,
        graph=graph,
    )
    return Step(ImageTraining(run, launch(run)))


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_step(step: Step, options: argparse.Namespace) -> float:
    """Milliseconds of a step with random rows, as in training; the median of five blocks."""
    order = torch.randint(IMAGES // 2, (50, options.batch)).to(options.device)  # a fifth is held out
    for rows in order[:6]:
        step({"rows": rows})
    wait(options.device)
    began, taken = time.perf_counter(), []
    step({"rows": order[0]})
    wait(options.device)
    steps = max(1, int(options.seconds / 5 / (time.perf_counter() - began)))
    for _ in range(5):
        began = time.perf_counter()
        for number in range(steps):
            step({"rows": order[number % len(order)]})
        wait(options.device)
        taken.append((time.perf_counter() - began) / steps)
    return 1e3 * sorted(taken)[2]


def profile(step: Step, options: argparse.Namespace) -> list[tuple[str, float]]:
    """Milliseconds per step by kind of kernel, and the longest kernels of all."""
    rows = torch.arange(options.batch, device=options.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(10):
            step({"rows": rows})
        wait(options.device)
    sums: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        taken = event.self_device_time_total / 1e4  # from microseconds of ten steps
        kind = next((k for k, words in KINDS if any(w.lower() in event.key.lower() for w in words)), "other")
        sums[kind] += taken
        names[f"`{event.key[:90]}`"] += taken
    longest = sorted(names.items(), key=lambda item: -item[1])[:12]
    return sorted(sums.items(), key=lambda item: -item[1]) + longest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring per row")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()

    hardware = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    lines = [
        f"{options.encoder}, {options.size} px, {options.batch} pairs, {options.precision}; {hardware}, torch "
        f"{torch.__version__}. Written by `python benchmarks/vision_step.py`.",
        "",
        "| step | loss | ms | views/s | times the plain loop |",
        "|---|---|---|---|---|",
    ]
    modes = {"eager": (False, False), "compiled": (True, False), "compiled, in a CUDA graph": (True, True)}
    if options.device == "cpu":
        modes = {"eager": (False, False)}
    plain, step = None, None
    with tempfile.TemporaryDirectory() as folder:
        images = write_images(options, Path(folder))
        for name, (compiled, graph) in modes.items():
            for preset in ("infonce", "paper"):
                began = time.perf_counter()
                step = build_step(options, images, preset, compiled=compiled, graph=graph)
                taken = time_step(step, options)
                plain = plain or taken
                views = 2 * options.batch / taken * 1e3
                lines.append(f"| {name} | {preset} | {taken:.2f} | {views:,.0f} | {plain / taken:.2f} |")
                print(lines[-1], f"({time.perf_counter() - began:.0f} s)", flush=True)
    if options.device == "cuda" and step is not None:
        lines += ["", "Kernels of the last row, ms per step:", "", "| kernels | ms |", "|---|---|"]
        lines += [f"| {kind} | {taken:.3f} |" for kind, taken in profile(step, options)]
        print("\n".join(lines[-20:]))
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
