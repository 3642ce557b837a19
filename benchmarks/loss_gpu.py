"""The fused engine on a GPU: forward and backward, beside torch InfoNCE, Inf-CL and the dense engine in the same run.

    python benchmarks/loss_gpu.py                              the standard sizes
    python benchmarks/loss_gpu.py --sizes 256x64 4096x128      some of them
    python benchmarks/loss_gpu.py --write benchmarks/loss_gpu.md --plot benchmarks/loss_gpu.png
    python benchmarks/loss_gpu.py --read one.log two.log --write ...    what cut or several runs printed

Random rows in two views. The median of many steps counts, warm, timed with device events (L2 flushed between
steps); one warm step where it takes half a second.
The peak is what a step allocates beyond its inputs. ``graph`` replays the same step from a CUDA graph, ``compiled``
is torch.compile. A loss whose matrix would not fit is left out. Inf-CL (``pip install inf_cl``) is measured where
it is installed: InfoNCE without the matrix, its products of float32 in TensorFloat-32, an anchor among its own
negatives. The plot shows the sizes with d = 128.
"""

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from weince import WeinceLoss
from weince.engines.choose import EngineName

try:
    from inf_cl import cal_flash_loss
except ImportError:
    cal_flash_loss = None

SIZES = ["256x64", "32768x256", *(f"{2**power}x128" for power in range(8, 20))]
COMPILED, DENSE, INFO_NCE_UP_TO, GRAPH_UP_TO = (256, 4096), (256, 4096, 16384), 32768, 4096
INFO_NCE_COMPILED = (256, 1024, 4096, 16384, 32768)
INF_CL_UP_TO = 131072
Loss = Callable[[Tensor, Tensor], Tensor]


def info_nce(z_i: Tensor, z_j: Tensor) -> Tensor:
    """What people write by hand."""
    rows = F.normalize(torch.cat([z_i, z_j]).float())
    logits = rows @ rows.T / 0.5
    logits = logits.masked_fill(torch.eye(len(rows), dtype=torch.bool, device=rows.device), -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(rows), device=rows.device).roll(len(z_i)))


def inf_cl(z_i: Tensor, z_j: Tensor) -> Tensor:
    """The same by Inf-CL, but that an anchor is its own negative too."""
    rows = F.normalize(torch.cat([z_i, z_j]).float())
    positive = torch.arange(len(rows), device=rows.device).roll(len(z_i))
    loss: Tensor = cal_flash_loss(rows, rows, positive, 1 / 0.5, head_dim=min(256, rows.shape[1])).mean()
    return loss


def weince(engine: EngineName) -> Loss:
    def loss(z_i: Tensor, z_j: Tensor) -> Tensor:
        value = WeinceLoss.paper(0.5, engine=engine)(z_i, z_j)
        assert isinstance(value, Tensor)
        return value

    return loss


class Row(NamedTuple):
    pairs: int
    d: int
    dtype: str
    name: str
    milliseconds: float
    mebibytes: float


def measure(
    loss: Loss, pairs: int, d: int, dtype: torch.dtype, *, graph: bool = False
) -> tuple[float, float]:
    """Median milliseconds of a step, and mebibytes at its peak."""
    z_i, z_j = (torch.randn(pairs, d, device="cuda").to(dtype).requires_grad_() for _ in range(2))

    def step() -> None:
        z_i.grad = z_j.grad = None
        loss(z_i, z_j).backward()

    for _ in range(2):  # the first warms up
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    if taken > 0.5:
        return 1e3 * taken, peak
    timed: Callable[[], None] = step
    if graph:
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            step()
        torch.cuda.synchronize()
        z_i.grad = z_j.grad = None
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            loss(z_i, z_j).backward()
        timed = recorded.replay
    return triton.testing.do_bench(timed, warmup=20, rep=80, return_mode="median"), peak


def cases(pairs: int, dtype: torch.dtype) -> list[tuple[str, Loss, bool]]:
    """Name, loss, and whether to replay it from a graph."""
    found = [("WEINCE fused", weince("fused"), False)]
    if pairs in COMPILED and dtype == torch.float32:
        found.append(("WEINCE fused, compiled", torch.compile(weince("fused"), dynamic=False), False))
    if pairs <= GRAPH_UP_TO:
        found.append(("WEINCE fused, graph", weince("fused"), True))
    if dtype == torch.float32 and pairs <= INFO_NCE_UP_TO:
        found.append(("torch InfoNCE", info_nce, False))
    if dtype == torch.float32 and pairs in INFO_NCE_COMPILED:
        found.append(("torch InfoNCE, compiled", torch.compile(info_nce, dynamic=False), False))
    if dtype == torch.float32 and pairs <= INF_CL_UP_TO and cal_flash_loss is not None:
        found.append(("Inf-CL", inf_cl, False))
    if dtype == torch.float32 and pairs in DENSE:
        found.append(("WEINCE dense", weince("dense"), False))
    return found


def run(sizes: list[tuple[int, int]], dtypes: list[torch.dtype]) -> list[Row]:
    todo = [(n, d, dtype, *case) for n, d in sizes for dtype in dtypes for case in cases(n, dtype)]
    rows = []
    for n, d, dtype, name, loss, graph in track(todo, description="losses"):
        torch.compiler.reset()
        try:
            milliseconds, peak = measure(loss, n, d, dtype, graph=graph)
        except torch.cuda.OutOfMemoryError:
            milliseconds, peak = float("nan"), float("nan")
        rows.append(Row(n, d, str(dtype).removeprefix("torch."), name, milliseconds, peak))
        print(*rows[-1], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def ceiling() -> float:
    """Measured bf16 rate of a large product, in TFLOP/s."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / triton.testing.do_bench(lambda: a @ b, return_mode="median") / 1e9


def share(row: Row, peak: float) -> str:
    """Of the measured rate: four products over all pairs, each of four (scores) or three parts in float32."""
    if not row.name.startswith("WEINCE fused"):
        return ""
    products = 4 if row.dtype == "bfloat16" else 15
    rate = products * 2 * (2 * row.pairs) ** 2 * row.d / row.milliseconds / 1e9
    return f"{100 * rate / peak:.0f} %"


def machine() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def read_logs(paths: list[Path]) -> tuple[list[Row], float, str]:
    """The rows that runs printed, and the rate and the machine of the first."""
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    found = re.findall(
        r"^(\d+) (\d+) (float32|bfloat16) (.+) ([\d.]+|nan) ([\d.]+|nan)\s*$", text, re.MULTILINE
    )
    rows = [Row(int(n), int(d), dtype, name, float(ms), float(mib)) for n, d, dtype, name, ms, mib in found]
    rate = re.search(r"bf16 products ([\d.]+) TFLOP/s(?: on (.*))?", text)
    if not rows or rate is None:
        raise SystemExit(f"no rows of this benchmark in {', '.join(map(str, paths))}")
    return rows, float(rate[1]), rate[2] or "an unnamed GPU"


def markdown(rows: list[Row], peak: float, command: str, where: str) -> str:
    lines = [
        "# Forward and backward on a GPU",
        "",
        f"{command}, on one {where};",
        f"bf16 products measured at {peak:.0f} TFLOP/s. Median of many warm steps on random data, where they take",
        "less than half a second; peak beyond the inputs. `loss_gpu.png` shows the rows with d = 128.",
        "",
        "| pairs | d | inputs | loss | ms | MiB | share of that rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.pairs, row.d, row.dtype != "float32")):
        time_, memory = f"{row.milliseconds:.3f}", f"{row.mebibytes:.0f}"
        lines.append(
            f"| {row.pairs:,} | {row.d} | {row.dtype} | {row.name} | {time_} | {memory} | {share(row, peak)} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Time and memory against the number of pairs, d = 128."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.d == 128 and row.name != "WEINCE fused, compiled"]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for number, (name, dtype) in enumerate(sorted({(row.name, row.dtype) for row in rows})):
        own = sorted(
            (row for row in rows if (row.name, row.dtype) == (name, dtype)), key=lambda row: row.pairs
        )
        style = {"linestyle": "--"} if "WEINCE" not in name else {"linestyle": ":"} if "graph" in name else {}
        for panel, field in zip(panels, ("milliseconds", "mebibytes"), strict=True):
            if field == "mebibytes" and "graph" in name:
                continue  # the same as without
            values = [getattr(row, field) for row in own]
            panel.plot(
                [row.pairs for row in own],
                values,
                marker="o",
                markersize=3,
                color=f"C{number}",
                label=f"{name}, {dtype}",
                **style,
            )
    for panel, label in zip(
        panels, ("milliseconds, forward and backward", "peak MiB beyond the inputs"), strict=True
    ):
        panel.set_xscale("log", base=2)
        panel.set(yscale="log", xlabel="pairs (d = 128)", ylabel=label)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="PAIRSxD")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--write", type=Path, help="write the table as markdown")
    parser.add_argument("--plot", type=Path, help="draw time and memory against the pairs")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="LOG", help="measure nothing, take what was printed"
    )
    options = parser.parse_args()
    if options.read:
        rows, peak, where = read_logs(options.read)
        command = f"`python benchmarks/loss_gpu.py --read` of {len(options.read)} runs"
    elif not torch.cuda.is_available():
        parser.error("wanted a CUDA device; found none")
    else:
        sizes = [(int(n), int(d)) for n, d in (size.split("x") for size in options.sizes)]
        peak, where = statistics.median(ceiling() for _ in range(3)), machine()
        print("bf16 products", peak, "TFLOP/s on", where, flush=True)
        rows = run(sizes, [getattr(torch, name) for name in options.dtypes])
        asked = "" if set(options.sizes) == set(SIZES) else " --sizes " + " ".join(options.sizes)
        command = f"`python benchmarks/loss_gpu.py{asked}`"
    table = Table("pairs", "d", "inputs", "loss", "ms", "MiB", "share")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row), share(row, peak))
    Console().print(table)
    if options.write:
        options.write.write_text(markdown(rows, peak, command, where))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
