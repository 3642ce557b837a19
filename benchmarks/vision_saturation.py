"""How many SimCLR runs at once saturate a GPU.

    python benchmarks/vision_saturation.py --runs 1 2 3 4 6

Starts as many processes as the largest number, each with its own captured step (ResNet-18, 32 px, 256 pairs, WEINCE).
Then, for every number, that many of them train at the same time, and their views per second are added up.
"""

import argparse
import multiprocessing
import time
from pathlib import Path

import torch
import vision_step


def work(options: argparse.Namespace, barrier, orders, counts) -> None:
    """Wait for orders: train for that many seconds, or end on None."""
    torch.backends.cudnn.benchmark = True
    step = vision_step.build_step(options, "paper", compiled=True, graph=True)
    rows = torch.randperm(50_000)[: options.batch].to("cuda")
    for _ in range(10):
        step(rows)
    torch.cuda.synchronize()
    barrier.wait()
    while (seconds := orders.get()) is not None:
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for _ in range(10):
                step(rows)
            torch.cuda.synchronize()
            done += 10
        counts.put(done / (time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=4.0, help="of measuring per number of runs")
    parser.add_argument("--note", default="", help="what to say of the machine, for example that MPS is on")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    most = max(options.runs)
    barrier, counts = context.Barrier(most + 1), context.Queue()
    orders = [context.Queue() for _ in range(most)]
    workers = [context.Process(target=work, args=(options, barrier, queue, counts)) for queue in orders]
    for worker in workers:
        worker.start()
    barrier.wait(600)
    lines = [
        f"{options.encoder}, {options.size} px, {options.batch} pairs, {options.precision}; "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}{options.note and ', ' + options.note}. "
        "Written by `python benchmarks/vision_saturation.py`.",
        "",
        "| runs at once | views/s of all | times one run |",
        "|---|---|---|",
    ]
    alone = None
    for number in options.runs:
        for queue in orders[:number]:
            queue.put(options.seconds)
        views = sum(counts.get(timeout=60) for _ in range(number)) * 2 * options.batch
        alone = alone or views
        lines.append(f"| {number} | {views:,.0f} | {views / alone:.2f} |")
        print(lines[-1], flush=True)
    for queue in orders:
        queue.put(None)
    for worker in workers:
        worker.join(30)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
