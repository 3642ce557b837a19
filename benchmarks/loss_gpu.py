"""Losses on a GPU: forward and backward, ours and others' in one run, beside our targets.

    python benchmarks/loss_gpu.py                              all sizes; 150 s on an H200, without KeOps
    python benchmarks/loss_gpu.py --pairs 256 4096             some of them
    python benchmarks/loss_gpu.py --write benchmarks/loss_gpu.md

The embeddings are random, in two views. ``eager`` is the plain call, ``loss(z_i, z_j).backward()``, in a loop with a
device sync before and after it; ``compiled`` is the same with the loss under torch.compile; ``graph`` replays a CUDA
graph of the step. The median of several loops is reported. The peak is the memory of a step beyond the embeddings.
``ratio`` is relative to torch InfoNCE, compiled, at the same size.

The others are torch InfoNCE as people write it by hand and, if they are installed, Inf-CL (``pip install inf_cl``)
and KeOps (``pip install pykeops``). In these two, an anchor is one of its own negatives.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weince import DCLLoss, InfoNCELoss, KLBallLoss, LinkLoss, SupConLoss, WeinceLoss
from weince.files import write_text_aside

Loss = Callable[..., Tensor]
TEMPERATURE = 0.5
MOST_MEBIBYTES = 600  # the target for each of ours
WARM_UP = 6  # a loss captures the fifth batch of a shape as a CUDA graph, and replays it from then on
ROUNDS, ROUND_SECONDS, SLOW_SECONDS = 7, 0.03, 0.3


def torch_info_nce(z_i: Tensor, z_j: Tensor) -> Tensor:
    """InfoNCE as people write it by hand."""
    rows = F.normalize(torch.cat([z_i, z_j]).float())
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    logits = (rows @ rows.T / TEMPERATURE).masked_fill(itself, -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(rows), device=rows.device).roll(len(z_i)))


def inf_cl() -> Loss:
    """InfoNCE without the matrix of scores; it multiplies float32 in TensorFloat-32."""
    from inf_cl import cal_flash_loss

    def loss(z_i: Tensor, z_j: Tensor) -> Tensor:
        rows = F.normalize(torch.cat([z_i, z_j]).float())
        positive = torch.arange(len(rows), device=rows.device).roll(len(z_i))
        width = min(256, rows.shape[1])
        value: Tensor = cal_flash_loss(rows, rows, positive, 1 / TEMPERATURE, head_dim=width).mean()
        return value

    return loss


def keops() -> Loss:
    """InfoNCE of a symbolic matrix. KeOps compiles kernels at run time, with a C++ compiler and CUDA's headers."""
    from pykeops.torch import LazyTensor

    def loss(z_i: Tensor, z_j: Tensor) -> Tensor:
        rows = F.normalize(torch.cat([z_i, z_j]).float())
        logits = (LazyTensor(rows[:, None, :]) | LazyTensor(rows[None, :, :])) / TEMPERATURE
        positive = (rows * rows.roll(len(z_i), 0)).sum(1) / TEMPERATURE
        value: Tensor = (logits.logsumexp(dim=1).flatten() - positive).mean()
        return value

    return loss


TORCH, INF_CL, KEOPS = "torch InfoNCE", "Inf-CL", "KeOps"
OTHERS: dict[str, Callable[[], Loss]] = {TORCH: lambda: torch_info_nce, INF_CL: inf_cl, KEOPS: keops}
OURS: dict[str, Callable[[], Loss]] = {
    "InfoNCE": lambda: InfoNCELoss(TEMPERATURE),
    "DCL": lambda: DCLLoss(TEMPERATURE),
    "paper": lambda: WeinceLoss.paper(TEMPERATURE),
    "negatives only": lambda: WeinceLoss.negatives_only(TEMPERATURE),
    "released": lambda: WeinceLoss.released(TEMPERATURE),
    "SupCon": lambda: SupConLoss(TEMPERATURE),
    "KL ball": KLBallLoss,
    "own link": lambda: LinkLoss(lambda s: 2 * s + s**3),
    "own link, graph=True": lambda: LinkLoss(lambda s: 2 * s + s**3, graph=True),
}
MAIN = ("InfoNCE", "DCL", "paper", "negatives only", "released")

TWO_TOWERS: dict[str, Callable[[], Loss]] = {
    "InfoNCE, cross": lambda: InfoNCELoss(TEMPERATURE, candidates="cross"),
    "own negatives": lambda: InfoNCELoss(TEMPERATURE, candidates="cross"),
    "ignore_above": lambda: InfoNCELoss(TEMPERATURE, candidates="cross", ignore_above=0.1),
    "offset": lambda: InfoNCELoss(TEMPERATURE, candidates="cross"),
    "dot": lambda: InfoNCELoss(TEMPERATURE, candidates="cross", score="dot"),
    "labels of two towers": lambda: InfoNCELoss(TEMPERATURE, candidates="cross"),
}
"""InfoNCE of queries against documents, and with what two-tower trainers need beside it."""

ONE_TOWER = tuple(OURS)
OURS |= TWO_TOWERS

Roles = dict[str, Any]
OWN_NEGATIVES, CLASSES = 4, 1000
ROLES: dict[str, Callable[[int, int, str], Roles]] = {
    "SupCon": lambda pairs, d, device: {"labels": torch.arange(pairs, device=device) % CLASSES},
    "own negatives": lambda pairs, d, device: {
        "negatives": torch.randn(pairs, OWN_NEGATIVES, d, device=device)
    },
    "offset": lambda pairs, d, device: {"offset": torch.rand(pairs, device=device)},
    "labels of two towers": lambda pairs, d, device: {
        "labels": (torch.arange(pairs, device=device) % CLASSES,) * 2
    },
}
"""What a loss is called with beside the embeddings, for a number of pairs, a width and a device."""


class Size(NamedTuple):
    """A batch, and the losses to time with it in each way; a loss that others are compared with comes before them."""

    pairs: int
    d: int
    dtype: torch.dtype
    losses: dict[str, tuple[str, ...]]

    @property
    def name(self) -> str:
        return f"{self.pairs:,} x {self.d} {str(self.dtype).removeprefix('torch.')}"


SMALL = {"compiled": (TORCH,), "eager": (TORCH, INF_CL, *MAIN), "graph": (TORCH, "InfoNCE", "paper")}
MIDDLE = {"compiled": (TORCH,), "eager": (TORCH, INF_CL, *MAIN)}
SIZES = (
    Size(256, 64, torch.float32, SMALL),
    Size(256, 128, torch.float32, SMALL),
    Size(1024, 128, torch.float32, MIDDLE),
    Size(4096, 128, torch.float32, SMALL | {"eager": (TORCH, INF_CL, *ONE_TOWER)}),
    Size(4096, 128, torch.bfloat16, {"compiled": (TORCH,), "graph": ("InfoNCE", "paper")}),
    Size(8192, 128, torch.float32, MIDDLE),
    Size(
        16384, 128, torch.float32,
        {"compiled": (TORCH,), "eager": (INF_CL, "InfoNCE", "SupCon", "KL ball", "own link", *TWO_TOWERS)},
    ),
    Size(32768, 256, torch.bfloat16, {"compiled": (TORCH,), "eager": (INF_CL, *MAIN)}),
    Size(4096, 128, torch.float32, {"eager": (KEOPS,)}),  # last, since it compiles for a while
)  # fmt: skip


class Wanted(NamedTuple):
    """Target: at most this many milliseconds, or times what the loss and way ``times`` takes at the same size."""

    most: float
    times: tuple[str, str] | None = None

    def __str__(self) -> str:
        return f"{self.most:g} ms" if self.times is None else f"{self.most:g} x {', '.join(self.times)}"


COMPILED, EAGER = (TORCH, "compiled"), ("InfoNCE", "eager")
WANTED: dict[tuple[str, str, str], Wanted] = {
    ("256 x 64 float32", "paper", "eager"): Wanted(0.67),
    ("256 x 128 float32", "paper", "eager"): Wanted(0.44),
    ("256 x 64 float32", "paper", "graph"): Wanted(0.05),
    ("256 x 128 float32", "paper", "graph"): Wanted(0.06),
    ("1,024 x 128 float32", "InfoNCE", "eager"): Wanted(1.2, COMPILED),
    ("4,096 x 128 float32", "InfoNCE", "eager"): Wanted(1.2, COMPILED),
    ("8,192 x 128 float32", "InfoNCE", "eager"): Wanted(1.2, COMPILED),
    ("4,096 x 128 float32", "own link", "eager"): Wanted(3, EAGER),
    ("4,096 x 128 float32", "own link, graph=True", "eager"): Wanted(3, EAGER),
    ("4,096 x 128 float32", "paper", "graph"): Wanted(1.0),
    ("4,096 x 128 bfloat16", "paper", "graph"): Wanted(0.6),
    ("16,384 x 128 float32", "SupCon", "eager"): Wanted(1.5, EAGER),
    ("16,384 x 128 float32", "KL ball", "eager"): Wanted(3, EAGER),
    **{
        ("16,384 x 128 float32", name, "eager"): Wanted(1.25, ("InfoNCE, cross", "eager"))
        for name in TWO_TOWERS
        if name != "InfoNCE, cross"
    },
    ("16,384 x 128 float32", "own link", "eager"): Wanted(3, EAGER),
    ("32,768 x 256 bfloat16", "InfoNCE", "eager"): Wanted(28),
    ("32,768 x 256 bfloat16", "DCL", "eager"): Wanted(28),
    ("32,768 x 256 bfloat16", "paper", "eager"): Wanted(36),
    ("32,768 x 256 bfloat16", "released", "eager"): Wanted(50),
}


class Row(NamedTuple):
    """What was measured of a loss; ``note`` says why nothing was."""

    size: str
    loss: str
    way: str
    milliseconds: float = float("nan")
    mebibytes: float = float("nan")
    note: str = ""


def measure(name: str, way: str, size: Size, device: str = "cuda") -> Row:
    """Measure one loss at one size; an error becomes a note, so that the other rows are still measured."""
    try:
        return Row(size.name, name, way, *_measured(name, way, size, device))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Row(size.name, name, way, note=reason.replace("|", "/")[:120])
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _measured(name: str, way: str, size: Size, device: str) -> tuple[float, float]:
    """Milliseconds of a step, and the mebibytes that it needs beyond the embeddings."""
    z_i, z_j = (
        torch.randn(size.pairs, size.d, device=device).to(size.dtype).requires_grad_() for _ in range(2)
    )
    roles = ROLES[name](size.pairs, size.d, device) if name in ROLES else {}
    memory = Memory(device)
    loss = (OTHERS | OURS)[name]()
    if isinstance(loss, torch.nn.Module):
        loss.to(device)
    if way == "compiled":
        torch.compiler.reset()
        loss = torch.compile(loss, dynamic=False)

    def step() -> None:
        z_i.grad = z_j.grad = None
        loss(z_i, z_j, **roles).backward()  # type: ignore[no-untyped-call]

    timed = captured(step) if way == "graph" else step
    timed()  # compile what the first step runs
    timed()  # compile what only later steps run
    taken = seconds(timed, 1, device)
    if taken > SLOW_SECONDS:
        return 1e3 * taken, memory.of(step)
    taken = min(seconds(timed, 1, device) for _ in range(WARM_UP))
    peak = memory.of(step)  # for a graph too, which needs the same memory
    steps = max(1, round(ROUND_SECONDS / taken))
    return 1e3 * statistics.median(seconds(timed, steps, device) for _ in range(ROUNDS)), peak


def seconds(step: Callable[[], None], steps: int, device: str) -> float:
    """Seconds per step in a loop of ``steps``, with a device sync before and after."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - start) / steps


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step as a CUDA graph and return its replay."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Memory:
    """GPU memory in use beyond that at the start; unknown on a CPU."""

    def __init__(self, device: str) -> None:
        self.known = device == "cuda"
        if self.known:
            torch.cuda.empty_cache()
            self.allocated, self.reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def of(self, step: Callable[[], Any]) -> float:
        """Mebibytes at the peak of a step, or held between steps if more: a graph never frees its memory."""
        if not self.known:
            return float("nan")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved() - self.reserved
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return max(held, torch.cuda.max_memory_allocated() - self.allocated) / 2**20


def verdict(row: Row, found: dict[tuple[str, str, str], Row]) -> tuple[str, str, str]:
    """Ratio of a row, its target, and whether the target is met, given all that was measured."""
    wanted = WANTED.get((row.size, row.loss, row.way))
    yardstick = found.get((row.size, *COMPILED))
    ratio = "" if yardstick is None or row.note else f"{row.milliseconds / yardstick.milliseconds:.2f}"
    if row.loss in OTHERS:
        return ratio, "", ""
    most = float("inf") if wanted is None else wanted.most
    if wanted is not None and wanted.times is not None:
        other = found.get((row.size, *wanted.times))
        most *= float("nan") if other is None else other.milliseconds
    too_much = row.mebibytes > MOST_MEBIBYTES
    met = "memory" if too_much else "yes" if row.milliseconds <= most else "no"
    return ratio, "" if wanted is None else str(wanted), met if wanted is not None or too_much else ""


HEADINGS = ("pairs x d, inputs", "loss", "way", "ms", "ratio", "peak MiB", "wanted", "met")


def line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def cells(row: Row, found: dict[tuple[str, str, str], Row]) -> tuple[str, ...]:
    ratio, wanted, met = verdict(row, found)
    ms = row.note or f"{row.milliseconds:.3f}"
    mebibytes = "" if row.mebibytes != row.mebibytes else f"{row.mebibytes:.0f}"
    return row.size, row.loss, row.way, ms, ratio, mebibytes, wanted, met


def markdown(lines: list[str], where: str) -> str:
    head = [
        "# Forward and backward on a GPU",
        "",
        f"Written by `python benchmarks/loss_gpu.py --write`, on {where}. What the columns mean is said there.",
        f"Wanted of each of ours besides: no more than {MOST_MEBIBYTES} MiB.",
        "",
    ]
    return "\n".join([*head, *lines, ""])


def jobs(sizes: tuple[Size, ...]) -> Iterator[tuple[str, str, Size]]:
    for size in sizes:
        for way, names in size.losses.items():
            for name in names:
                yield name, way, size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted({size.pairs for size in SIZES})
    parser.add_argument("--pairs", type=int, nargs="+", choices=known, default=known)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the table as Markdown, anew after each row"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("wanted a CUDA device; torch sees none here")
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    lines = [line(HEADINGS), line(("---", "---", "---", "---:", "---:", "---:", "---", "---"))]
    print(where, "", *lines, sep="\n", flush=True)
    found: dict[tuple[str, str, str], Row] = {}
    for name, way, size in jobs(tuple(size for size in SIZES if size.pairs in options.pairs)):
        row = measure(name, way, size)
        found[size.name, name, way] = row
        lines.append(line(cells(row, found)))
        print(lines[-1], flush=True)
        if options.write:
            write_text_aside(options.write, markdown(lines, where))
    failed = [row for row in found.values() if row.note and row.loss in OURS]
    sys.exit(f"{len(failed)} rows of ours failed; see above" if failed else 0)


if __name__ == "__main__":
    main()
