"""Start the processes of a run, and agree among them: Fabric, torchrun, and what only the first process does."""

import atexit
import gc
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from weince.machine import find_device, prepare_cpu_for_bf16

if TYPE_CHECKING:
    from lightning_fabric import Fabric

T = TypeVar("T")


def import_fabric() -> None:
    """Import Fabric without torchmetrics. Only for a process of ours: Lightning would miss it.

    Fabric imports torchmetrics, if it is installed, only to compare its version, and torchmetrics imports
    transformers and half of scipy. A run needs none of it, and would start seconds later.
    """
    if sys.modules.keys() & {"lightning_fabric", "torchmetrics"}:
        return
    sys.modules["torchmetrics"] = None  # type: ignore[assignment]
    try:
        import lightning_fabric  # noqa: F401
    finally:
        del sys.modules["torchmetrics"]


def launch(run: Any) -> "Fabric":
    """Start the processes of a run, or join those that torchrun started."""
    from lightning_fabric import Fabric

    chosen = find_device(run.device)
    kind = chosen.type
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", getattr(run, "devices", 1)))
    gpus = {"cpu": devices, "cuda": torch.cuda.device_count(), "mps": 1}[kind]
    if devices > gpus:
        raise ValueError(f"devices must be at most the {gpus} GPU(s) that torch finds here; got {devices}")
    named = [chosen.index] if kind == "cuda" and chosen.index is not None else None
    if named and devices > 1:
        raise ValueError(f"devices must be 1 with device {run.device}, which names one GPU; got {devices}")
    ranks = int(os.environ.get("WORLD_SIZE", devices))
    if ranks > 1 and not hasattr(run, "devices"):
        raise ValueError(f"a run on {run.task} has one process; got {ranks}: start it without torchrun")
    if run.batch % ranks:  # here, so that no process starts in vain
        raise ValueError(f"batch must be a multiple of the number of processes, {ranks}; got {run.batch}")
    if kind == "cpu" and run.precision.startswith("bf16"):
        prepare_cpu_for_bf16()  # before the launch, so that all processes inherit it
    # The user decides whether to use srun.
    warnings.filterwarnings("ignore", message="The `srun` command is available")
    fabric = Fabric(
        accelerator=kind,
        devices=named or devices,
        num_nodes=ranks // devices,
        strategy="ddp" if devices > 1 else "auto",
    )
    _rejoin("gloo" if kind == "cpu" else "nccl")
    fabric.launch()
    if fabric.world_size > 1:
        atexit.register(_leave)
    return fabric


def first(fabric: "Fabric", work: Callable[[], T]) -> T | None:
    """Call ``work`` in the first process only; the others get None. If it fails, all processes raise."""
    result, failed = None, None
    if fabric.global_rank == 0:
        try:
            result = work()
        except Exception as error:
            failed = error
    message = fabric.broadcast("" if failed is None else str(failed) or type(failed).__name__)
    if failed is not None:
        raise failed
    if message:
        raise ValueError(f"the first process failed: {message}")
    return result


def _rejoin(backend: str) -> None:
    """Connect to the other processes after torchrun has restarted them all.

    The store of torchrun still holds the addresses of the old processes. A fast process would use these and wait
    forever. So each restart on one machine uses its own keys. (On several machines the restart counts differ; there,
    set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` to give every restart a new store.)
    """
    known = os.environ
    restart, ranks = known.get("TORCHELASTIC_RESTART_COUNT", "0"), known.get("WORLD_SIZE", "1")
    shared = known.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restart == "0" or not shared or ranks == "1" or ranks != known.get("LOCAL_WORLD_SIZE"):
        return
    from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    store = TCPStore(known["MASTER_ADDR"], int(known["MASTER_PORT"]), is_master=False)
    init_process_group(
        backend,
        store=PrefixStore(f"restart_{restart}", store),
        rank=int(known["RANK"]),
        world_size=int(ranks),
    )


def _leave() -> None:
    """Destroy the process group before the interpreter exits: its thread would abort if it freed a tensor later."""
    gc.collect()  # reference cycles hold the group
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
