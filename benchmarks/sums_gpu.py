"""Losses of the fused engine on a GPU: milliseconds of a forward and backward pass, and peak memory, a line each.

    python benchmarks/sums_gpu.py                    about 90 s on an H200
    python benchmarks/sums_gpu.py --losses infonce dcl --pairs 4096

The yardstick in the same run is InfoNCE as people write it by hand, compiled. ``graph`` is a replay of a CUDA
graph, which leaves the host out. Where a step takes long it is timed once.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weince import DCLLoss, InfoNCELoss, LinkLoss, SupConLoss, WeinceLoss

Loss = Callable[..., Tensor]


def plain(z_i: Tensor, z_j: Tensor) -> Tensor:
    """InfoNCE as people write it by hand."""
    rows = F.normalize(torch.cat([z_i, z_j]).float())
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    logits = (rows @ rows.T / 0.5).masked_fill(itself, -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(rows), device=rows.device).roll(len(z_i)))


MAKERS: dict[str, Callable[[], Loss]] = {
    "torch InfoNCE, compiled": lambda: torch.compile(plain, dynamic=False),
    "infonce": lambda: InfoNCELoss(0.5, engine="fused"),
    "dcl": lambda: DCLLoss(0.5, engine="fused"),
    "supcon": lambda: SupConLoss(0.5, engine="fused"),
    "paper": lambda: WeinceLoss.paper(engine="fused"),
    "negatives only": lambda: WeinceLoss.negatives_only(engine="fused"),
    "released": lambda: WeinceLoss(engine="fused"),
    "own link": lambda: LinkLoss(lambda s: 2 * s + s**3, engine="fused"),
}


class Case(NamedTuple):
    pairs: int
    d: int
    dtype: torch.dtype
    graph: bool
    losses: tuple[str, ...]


SMALL = ("torch InfoNCE, compiled", "infonce", "paper", "released")
CASES = (
    Case(256, 64, torch.float32, False, SMALL),
    Case(256, 64, torch.float32, True, ("paper",)),
    Case(1024, 128, torch.float32, False, SMALL),
    Case(4096, 128, torch.float32, False, (*SMALL, "own link")),
    Case(4096, 128, torch.float32, True, ("infonce", "paper")),
    Case(4096, 128, torch.bfloat16, True, ("paper",)),
    Case(8192, 128, torch.float32, False, SMALL[:3]),
    Case(16384, 128, torch.float32, False, ("infonce", "supcon", "own link")),
    Case(32768, 256, torch.bfloat16, False, ("infonce", "dcl", "paper", "negatives only")),
    Case(32768, 256, torch.float32, False, ("paper",)),
)


def measure(make: Callable[[], Loss], case: Case, *, labels: bool) -> tuple[float, float]:
    """Median milliseconds, and peak MiB beyond the embeddings and their gradients."""
    from triton.testing import do_bench

    loss = make()
    if isinstance(loss, torch.nn.Module):
        loss.cuda()
    z_i, z_j = (
        torch.randn(case.pairs, case.d, device="cuda").to(case.dtype).requires_grad_() for _ in range(2)
    )
    roles = {"labels": torch.arange(case.pairs, device="cuda") % 1000} if labels else {}

    def step() -> None:
        z_i.grad = z_j.grad = None
        loss(z_i, z_j, **roles).backward()  # type: ignore[no-untyped-call]

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    timed = captured(step) if case.graph else step
    start = time.perf_counter()
    timed()
    torch.cuda.synchronize()
    taken = time.perf_counter() - start
    ms = 1e3 * taken if taken > 0.3 else do_bench(timed, warmup=20, rep=60, return_mode="median")
    return ms, peak


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The replay of a step as a CUDA graph."""
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--pairs", type=int, nargs="+", default=sorted({case.pairs for case in CASES}))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("wanted a CUDA device; torch sees none here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| pairs, d, inputs | loss | ms | peak MiB |\n|---|---|---:|---:|")
    for case in CASES:
        if case.pairs not in options.pairs:
            continue
        for name in case.losses:
            if name not in options.losses:
                continue
            ms, peak = measure(MAKERS[name], case, labels=name == "supcon")
            kind = str(case.dtype).removeprefix("torch.") + (", graph" if case.graph else "")
            print(f"| {case.pairs}, {case.d}, {kind} | {name} | {ms:.3f} | {peak:.0f} |", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
