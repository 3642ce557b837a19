"""Losses on the CPU: forward and backward, as a ratio to a plain InfoNCE in the same run.

    python benchmarks/loss_cpu.py                      256, 1024 and 4096 pairs, d = 128; a minute or two
    python benchmarks/loss_cpu.py --pairs 1024 --repeats 50 --profile
    python benchmarks/loss_cpu.py --write benchmarks/loss_cpu.md

The yardstick is InfoNCE as people write it by hand: normalise, multiply, divide by the temperature, mask the
diagonal, ``F.cross_entropy``. All losses take turns, so that a busy moment of the machine affects them equally; the
fastest of the repeats counts. ``engine="auto"`` takes the dense engine up to 2,048 pairs, then the chunked one.
``wanted`` is the largest ratio that we accept from 1,024 pairs on.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.profiler import profile

from weince import DCLLoss, InfoNCELoss, WeibitLoss, WeinceLoss
from weince.files import write_text_aside


def plain_info_nce(z_i: Tensor, z_j: Tensor) -> Tensor:
    rows = F.normalize(torch.cat([z_i, z_j]))
    logits = rows @ rows.T / 0.5
    logits = logits.masked_fill(torch.eye(len(rows), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(rows)).roll(len(z_i)))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain InfoNCE (F.cross_entropy)": plain_info_nce,
    "InfoNCELoss": InfoNCELoss(0.5),
    "DCLLoss": DCLLoss(),
    "WeibitLoss": WeibitLoss(),
    "WeinceLoss.paper": WeinceLoss.paper(),
    "WeinceLoss.released": WeinceLoss.released(),
}
WANTED = {"DCLLoss": "0.80", "WeinceLoss.paper": "1.25", "WeinceLoss.released": "2.00"}


def step(loss: Callable[[Tensor, Tensor], Tensor], z_i: Tensor, z_j: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    z_i.grad = z_j.grad = None
    start = time.perf_counter()
    loss(z_i, z_j).backward()
    return time.perf_counter() - start


def measure(pairs: int, d: int, repeats: int) -> dict[str, float]:
    """Fewest milliseconds of each loss."""
    z_i, z_j = (torch.randn(pairs, d).requires_grad_() for _ in range(2))
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    for repeat in track(range(repeats + 2), description=f"{pairs} pairs"):
        for name, loss in LOSSES.items():
            taken = step(loss, z_i, z_j)
            if repeat >= 2:  # the first two warm up
                seconds[name].append(taken)
    return {name: 1e3 * min(values) for name, values in seconds.items()}


def where_the_time_goes(pairs: int, d: int) -> str:
    z_i, z_j = (torch.randn(pairs, d).requires_grad_() for _ in range(2))
    loss = WeinceLoss.paper(engine="dense")
    step(loss, z_i, z_j)
    with profile() as recorded:
        step(loss, z_i, z_j)
    events = sorted(recorded.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    lines = [f"WeinceLoss.paper, dense, {pairs} pairs, d = {d}: share of the time by operation"]
    lines += [f"{event.key:30} {100 * event.self_cpu_time_total / total:5.1f} %" for event in events[:10]]
    return "\n".join(lines)


def machine() -> str:
    names = [line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="also print where WEINCE spends its time")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table as Markdown")
    options = parser.parse_args()

    torch.manual_seed(0)
    console = Console()
    rows = []
    for pairs in options.pairs:
        times = measure(
            pairs,
            options.d,
            max(3, options.repeats * 256 // max(256, pairs)) if pairs > 1024 else options.repeats,
        )
        yardstick = next(iter(times.values()))
        for name, ms in times.items():
            wanted = WANTED.get(name, "") if pairs >= 1024 else ""
            rows.append((str(pairs), name, f"{ms:.2f}", f"{ms / yardstick:.2f}", wanted))
    table = Table(title=f"Forward + backward, float32, d = {options.d}", caption=machine())
    for heading in ("pairs", "loss", "ms", "ratio", "wanted"):
        table.add_column(heading, justify="left" if heading == "loss" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    profiles = where_the_time_goes(1024, options.d) if options.profile or options.write else ""
    console.print(profiles)
    if options.write:
        write_text_aside(options.write, _markdown(rows, profiles, options))


def _markdown(rows: list[tuple[str, ...]], profiles: str, options: argparse.Namespace) -> str:
    lines = [
        "# Loss on the CPU: forward + backward, float32",
        "",
        f"Written by `python benchmarks/loss_cpu.py --write`. d = {options.d}. {machine()}.",
        "",
        "| pairs | loss | ms | ratio to plain InfoNCE | wanted |",
        "|---:|---|---:|---:|---:|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "```",
        profiles,
        "```",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
