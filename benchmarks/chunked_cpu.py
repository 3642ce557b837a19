"""The chunked engine against the dense one on the CPU: peak memory, and time where both fit.

    python benchmarks/chunked_cpu.py                        memory at 4,096 and 16,384 pairs, time at 4,096; minutes
    python benchmarks/chunked_cpu.py --memory 2048 --time 2048 --repeats 3
    python benchmarks/chunked_cpu.py --write research/results/chunked_cpu.md

WEINCE (Algorithm 1), forward and backward, float32. Memory is the growth of the process's peak resident set, beyond
torch and the embeddings; each number comes from a process of its own. For the time, the engines take turns, and the
median is reported.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weince import WeinceLoss
from weince.lab.bench import machine

ENGINES = ("dense", "chunked")


def step(engine: str, z_i: torch.Tensor, z_j: torch.Tensor) -> float:
    """Seconds of one forward and backward pass."""
    z_i.grad = z_j.grad = None
    start = time.perf_counter()
    WeinceLoss.paper(engine=engine)(z_i, z_j).backward()
    return time.perf_counter() - start


def embeddings(pairs: int, d: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(pairs, d).requires_grad_() for _ in range(2))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_memory(engine: str, pairs: int, d: int) -> None:
    """Print the growth in MiB and the seconds; runs in a process of its own."""
    small = embeddings(64, d)
    step(engine, *small)  # load everything that the first call loads
    z_i, z_j = embeddings(pairs, d)
    before = peak_mib()
    seconds = step(engine, z_i, z_j)
    print(json.dumps([peak_mib() - before, seconds]))


def memory_rows(sizes: list[int], d: int) -> list[tuple[str, ...]]:
    rows = []
    jobs = [(size, engine) for size in sizes for engine in ENGINES]
    for size, engine in track(jobs, description="memory"):
        command = [sys.executable, __file__, "--worker", engine, "--memory", str(size), "--d", str(d)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            rows.append((str(size), engine, f"failed ({done.returncode})", ""))
            continue
        mib, seconds = json.loads(done.stdout.splitlines()[-1])
        rows.append((str(size), engine, f"{mib:,.0f}", f"{seconds:.1f}"))
    return rows


def time_rows(sizes: list[int], d: int, repeats: int) -> list[tuple[str, ...]]:
    rows = []
    for size in sizes:
        z_i, z_j = embeddings(size, d)
        seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for repeat in track(range(repeats + 1), description=f"time, {size} pairs"):
            for engine in ENGINES:
                taken = step(engine, z_i, z_j)
                if repeat:  # the first one warms up
                    seconds[engine].append(taken)
        median = {engine: statistics.median(values) for engine, values in seconds.items()}
        rows += [
            (str(size), engine, f"{value:.2f}", f"{value / median['dense']:.2f}")
            for engine, value in median.items()
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", type=int, nargs="+", default=[4096, 16384], metavar="PAIRS")
    parser.add_argument("--time", type=int, nargs="+", default=[4096], metavar="PAIRS")
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables as Markdown")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure_memory(options.worker, options.memory[0], options.d)
        return

    tables = {
        "Peak memory beyond the embeddings": (
            ("pairs", "engine", "MiB", "s, once"),
            memory_rows(options.memory, options.d),
        ),
        "Forward + backward": (
            ("pairs", "engine", "s, median", "ratio to dense"),
            time_rows(options.time, options.d, options.repeats),
        ),
    }
    console = Console()
    for title, (headings, rows) in tables.items():
        drawn = Table(title=f"{title}, float32, d = {options.d}", caption=machine())
        for heading in headings:
            drawn.add_column(heading, justify="left" if heading == "engine" else "right")
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)
    if options.write:
        options.write.write_text(_markdown(tables, options))


def _markdown(
    tables: dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]], options: argparse.Namespace
) -> str:
    lines = [
        "# The chunked engine on the CPU",
        "",
        f"Written by `python benchmarks/chunked_cpu.py --write`: WEINCE, float32, d = {options.d}. {machine()}.",
    ]
    for title, (headings, rows) in tables.items():
        lines += ["", f"## {title}", "", "| " + " | ".join(headings) + " |", "|---:|---|---:|---:|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
