"""Time the losses on this machine: forward and backward, ours beside others, in one run."""

import importlib
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from weince.engines.choose import out_of_memory
from weince.losses import DCLLoss, InfoNCELoss, WeinceLoss
from weince.machine import find_device, prepare_cpu_for_bf16

if TYPE_CHECKING:
    from rich.table import Table

Loss = Callable[[Tensor, Tensor], Tensor]

YARDSTICK = "torch InfoNCE"
COMPILED = f"{YARDSTICK}, compiled"
WARM_UP = 3
ENOUGH_SECONDS = 15.0
"""A loss is not repeated any more once its passes have taken this long in total."""

PEER_BYTES = 3 << 30
"""Skip a peer that needs more memory than this; on a CPU it could take the machine down."""


@dataclass(frozen=True)
class Timing:
    """One row of the table.

    Args:
        pairs: Size of the batch.
        name: Which loss.
        ms: Median milliseconds of a forward and a backward pass; None if it was not measured.
        ratio: ``ms`` over that of plain torch InfoNCE.
        mib: Peak memory on a GPU beyond the embeddings, in MiB.
        note: Why there is no number.
    """

    pairs: int
    name: str
    ms: float | None = None
    ratio: float | None = None
    mib: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """A loss to time; ``bytes_for(pairs)`` estimates its memory if it needs a lot, and is 0 otherwise."""

    name: str
    loss: Loss
    bytes_for: Callable[[int], int] = lambda pairs: 0


def bench_loss(
    *,
    pairs: Sequence[int] = (256, 1024, 4096),
    d: int = 128,
    device: str = "auto",
    dtype: str = "float32",
    repeats: int = 15,
    compiled: bool = True,
) -> list[Timing]:
    """Time forward and backward of our losses, torch InfoNCE, compiled InfoNCE, and peers that are installed.

    The losses take turns, so that other load on the machine affects all of them alike.

    Args:
        pairs: Batch sizes to time.
        d: Width of the embeddings.
        device: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"``.
        dtype: Type of the embeddings: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        repeats: How many passes to time; the result is their median.
        compiled: Time compiled InfoNCE too; compiling takes a while.
    """
    if not pairs or min(pairs) < 2 or d < 1 or repeats < 1:
        raise ValueError(
            f"wanted pairs of at least 2, d and repeats of at least 1; got {list(pairs)}, {d}, {repeats}"
        )
    if max(*pairs, d) >= 2**31:
        raise ValueError(f"pairs and d must be below 2**31; got {list(pairs)}, {d}")
    if dtype not in ("float32", "bfloat16", "float16", "float64"):
        raise ValueError(f"dtype must be float32, bfloat16, float16 or float64; got {dtype!r}")
    chosen = find_device(device)
    if chosen.type == "cpu" and dtype == "bfloat16":
        prepare_cpu_for_bf16()
    entries = list(_entries(chosen, compiled))
    timings: list[Timing] = []
    for size in pairs:
        timings += _one_size(entries, size, d, chosen, getattr(torch, dtype), repeats)
    return timings


def table(timings: Sequence[Timing]) -> "Table":
    """The timings as a table for the terminal."""
    from rich.table import Table

    drawn = Table(title=f"Loss, forward + backward; ratio to {YARDSTICK}", caption=machine())
    for heading in ("pairs", "loss", "ms", "ratio", "peak MiB"):
        drawn.add_column(heading, justify="left" if heading == "loss" else "right", no_wrap=heading == "loss")
    for index, row in enumerate(timings):
        drawn.add_row(
            str(row.pairs),
            row.name,
            row.note if row.ms is None else f"{row.ms:.2f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.mib is None else f"{row.mib:,.0f}",
            end_section=index + 1 < len(timings) and timings[index + 1].pairs != row.pairs,
        )
    return drawn


def machine() -> str:
    """The hardware and the torch version, for the caption."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def plain_info_nce(z_i: Tensor, z_j: Tensor) -> Tensor:
    """InfoNCE at a temperature of 0.5 as people write it by hand."""
    rows = F.normalize(torch.cat([z_i, z_j]))
    logits = rows @ rows.T / 0.5
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    target = torch.arange(len(rows), device=rows.device).roll(len(z_i))
    return F.cross_entropy(logits.masked_fill(itself, -torch.inf), target)


def _entries(device: torch.device, compiled: bool) -> Iterator[Entry]:
    yield Entry(YARDSTICK, plain_info_nce)
    if compiled:
        yield Entry(COMPILED, torch.compile(plain_info_nce))
    yield Entry("weince InfoNCELoss", InfoNCELoss(0.5))
    yield Entry("weince DCLLoss", DCLLoss())
    yield Entry("weince WeinceLoss (released)", WeinceLoss())
    yield Entry("weince WeinceLoss.paper", WeinceLoss.paper())
    yield Entry("weince WeinceLoss.paper, chunked", WeinceLoss.paper(engine="chunked"))
    if device.type == "cuda":
        yield Entry("weince WeinceLoss.paper, dense", WeinceLoss.paper(engine="dense"))
    yield from _peers()


def _peers() -> Iterator[Entry]:
    try:
        losses = importlib.import_module("pytorch_metric_learning.losses")
    except ImportError:
        return

    def nt_xent(z_i: Tensor, z_j: Tensor) -> Tensor:
        labels = torch.arange(len(z_i), device=z_i.device).repeat(2)
        value: Tensor = losses.NTXentLoss(temperature=0.5)(torch.cat([z_i, z_j]), labels)
        return value

    # NTXentLoss compares every positive pair with every negative pair of the batch.
    yield Entry("pytorch-metric-learning NTXent", nt_xent, lambda pairs: 16 * (2 * pairs) ** 3)


def _one_size(
    entries: Sequence[Entry], pairs: int, d: int, device: torch.device, dtype: torch.dtype, repeats: int
) -> list[Timing]:
    from weince.progress import bars

    generator = torch.Generator().manual_seed(0)
    z_i, z_j = (
        torch.randn(pairs, d, generator=generator).to(device, dtype).requires_grad_() for _ in range(2)
    )
    notes = {
        entry.name: f"skipped, needs about {entry.bytes_for(pairs) / 2**30:,.0f} GiB"
        for entry in entries
        if entry.bytes_for(pairs) > PEER_BYTES
    }
    seconds: dict[str, list[float]] = {entry.name: [] for entry in entries}
    peaks: dict[str, float] = {}
    spent = dict.fromkeys(seconds, 0.0)
    with bars() as bar:
        task = bar.add_task(f"{pairs} pairs", total=(repeats + WARM_UP) * len(entries))
        for repeat, entry in itertools.product(range(repeats + WARM_UP), entries):
            bar.update(task, advance=1, said=entry.name)
            if entry.name in notes or (spent[entry.name] > ENOUGH_SECONDS and seconds[entry.name]):
                continue
            try:
                taken, peak = passed(entry.loss, z_i, z_j)
            except RuntimeError as error:
                if not out_of_memory(error) and entry.name != COMPILED:
                    raise
                notes[entry.name] = "out of memory" if out_of_memory(error) else "cannot be compiled here"
                continue
            if not repeat:
                continue  # the first call compiles, which may take a minute
            spent[entry.name] += taken
            if repeat >= WARM_UP or taken > 1:  # a pass that slow needs no warm-up
                seconds[entry.name].append(taken)
                peaks[entry.name] = peak
    return list(_rows(pairs, entries, seconds, peaks, notes, device))


def _rows(
    pairs: int,
    entries: Sequence[Entry],
    seconds: dict[str, list[float]],
    peaks: dict[str, float],
    notes: dict[str, str],
    device: torch.device,
) -> Iterator[Timing]:
    median = {name: 1e3 * statistics.median(values) for name, values in seconds.items() if values}
    yardstick = median.get(YARDSTICK)
    for entry in entries:
        if entry.name in notes or entry.name not in median:
            yield Timing(pairs, entry.name, note=notes.get(entry.name, ""))
            continue
        ms = median[entry.name]
        ratio = None if yardstick is None else ms / yardstick
        mib = peaks[entry.name] / 2**20 if device.type == "cuda" else None
        yield Timing(pairs, entry.name, ms, ratio, mib)


def passed(loss: Loss, z_i: Tensor, z_j: Tensor) -> tuple[float, float]:
    """Seconds of a forward and a backward pass, and on a GPU the bytes they took at their peak."""
    z_i.grad = z_j.grad = None
    on_gpu = z_i.is_cuda
    before = 0
    if on_gpu:
        torch.cuda.synchronize(z_i.device)
        torch.cuda.reset_peak_memory_stats(z_i.device)
        before = torch.cuda.memory_allocated(z_i.device)
    start = time.perf_counter()
    loss(z_i, z_j).backward()  # type: ignore[no-untyped-call]
    if on_gpu:
        torch.cuda.synchronize(z_i.device)
    taken = time.perf_counter() - start
    return taken, torch.cuda.max_memory_allocated(z_i.device) - before if on_gpu else 0.0
