"""SimCLR from images to weights: a loop that reads from top to bottom.

All randomness of an epoch depends only on the run's seed and the epoch's number. So a resumed run ends with the same
weights as an uninterrupted one, bit for bit on a CPU. Checkpoints are written between epochs.

Several processes (``--devices N``, or torchrun) share one global batch: they draw the same views as one process
would, and contrast each anchor with the candidates of all processes.
"""

import atexit
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from weince.lab.configure import build_loss, check_loss, let_nan_pass
from weince.lab.tasks.images.config import VisionRun
from weince.lab.tasks.images.data import ImageData, load
from weince.lab.tasks.images.encoders import SimCLR
from weince.lab.tasks.images.evaluation import fingerprint
from weince.lab.tasks.images.log import DIVERGED, Log, check_finite, collapse, measure, progress_bar
from weince.lab.tasks.images.runs import build_model, claim, save_weights
from weince.lab.tasks.images.step import Pixels, Step, TwoViews, allow_tf32
from weince.lab.tasks.images.track import Tracker
from weince.lab.training import checkpoint
from weince.lab.training.capture import finite_weights
from weince.lab.training.log import learned
from weince.lab.training.optimizers import build_optimizer, rate, restore, set_rate
from weince.lab.training.processes import training_lock
from weince.losses import ContrastiveLoss
from weince.machine import find_device, prepare_cpu_for_bf16
from weince.tail import TailConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric

T = TypeVar("T")
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d
GLANCE = 50
"""Steps between two checks that the loss is finite; each check costs a device sync."""


def train(run: VisionRun, *, bar: bool = True) -> Path:
    """Train, or resume training; returns the run's folder."""
    fabric = launch(run)
    first = fabric.global_rank == 0
    read = partial(load, run.data, size=run.augment.size)
    data = _first(fabric, read) or read()  # the first downloads and converts, then the others read
    if len(data.pretrain_images) < run.batch:
        raise ValueError(
            f"a batch of {run.batch} needs as many images; got {len(data.pretrain_images)} in {data.name}"
        )

    model, loss, optimizer, step = assemble(fabric, run, data)
    generator = step.generator
    tracker = _first(fabric, partial(Tracker, run, data, fabric.device)) if run.track_every else None
    images = _first(fabric, partial(_check_images, run, data))

    # Only now, so that a run that cannot start leaves no folder.
    with _claimed(fabric, run):
        start = _resume(run, model, loss, optimizer)
        if first and start:
            print(f"{run.out}: going on after epoch {start} of {run.epochs}", file=sys.stderr)
        log = _first(fabric, partial(Log, run.out, start, tensorboard=run.tensorboard))
        steps = len(data.pretrain_images) // run.batch  # the last, smaller batch is left out
        with progress_bar(f"{data.name} {run.loss.preset}", start, run.epochs, shown=first and bar) as shown:
            for epoch in range(start, run.epochs):
                began = time.perf_counter()
                order = _begin(run.seed, epoch, len(data.pretrain_images), generator).to(fabric.device)
                step.total.zero_()
                for number in range(steps):
                    set_rate(optimizer, rate(run.optimizer, epoch + number / steps, run.epochs))
                    step(order[number * run.batch : (number + 1) * run.batch])
                    shown.advance(1 / steps)
                    if number % GLANCE == GLANCE - 1:
                        check_finite(float(step.total), epoch)
                row = _row(run, fabric, step, epoch, steps, began)
                shown.show(row)
                _first(fabric, partial(_keep, run, log, row, images, model, loss, optimizer, tracker))
        _first(fabric, partial(save_weights, run.out / "model.safetensors", model))
        warning = collapse(log.rows[-1]) if first and log is not None and log.rows else None
        if warning is not None and warning != shown.warned:
            print(f"weince: {warning}", file=sys.stderr)
    return run.out


@contextmanager
def _claimed(fabric: "Fabric", run: VisionRun) -> Iterator[None]:
    """Lock the run's folder and write the settings into it, both in the first process."""

    def enter() -> None:
        held.enter_context(training_lock(run.out))
        claim(run)

    with ExitStack() as held:
        _first(fabric, enter)
        yield


def assemble(fabric: "Fabric", run: VisionRun, data: ImageData) -> tuple[SimCLR, nn.Module, Any, Step]:
    """Build the initial model, loss, optimizer and step of a run, on the device of this process."""
    torch.manual_seed(run.seed)
    model = build_model(run)
    loss = build_loss(run.loss, candidates=run.candidates).to(fabric.device)
    let_nan_pass(loss)
    part = _part(run.batch, fabric.global_rank, fabric.world_size)
    check_loss(
        run.loss,
        candidates=run.candidates,
        pairs=part.stop - part.start,
        width=run.projection,
        device=fabric.device,
    )
    views, optimizer = _set_up(fabric, run, model, loss)
    on_gpu = fabric.device.type == "cuda"
    pixels = Pixels(data.pretrain_images, fabric.device)
    step = Step(
        views, loss, optimizer, pixels, run.augment, torch.Generator(fabric.device),
        batch=run.batch,
        part=part,
        compiled=_asked(run.compile, on_gpu),
        graph=_graph(run, on_gpu and fabric.world_size == 1 and pixels.resident),
    )  # fmt: skip
    return model, loss, optimizer, step


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


def launch(run: VisionRun) -> "Fabric":
    """Start the processes of a run, or join those that torchrun started."""
    from lightning_fabric import Fabric

    chosen = find_device(run.device)
    kind = chosen.type
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", run.devices))
    gpus = {"cpu": devices, "cuda": torch.cuda.device_count(), "mps": 1}[kind]
    if devices > gpus:
        raise ValueError(f"devices must be at most the {gpus} GPU(s) that torch finds here; got {devices}")
    named = [chosen.index] if kind == "cuda" and chosen.index is not None else None
    if named and devices > 1:
        raise ValueError(f"devices must be 1 with device {run.device}, which names one GPU; got {devices}")
    ranks = int(os.environ.get("WORLD_SIZE", devices))
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
    allow_tf32(run.precision)
    torch.backends.cudnn.benchmark = True
    return fabric


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


def _first(fabric: "Fabric", work: Callable[[], T]) -> T | None:
    """Call ``work`` in the first process only; the others get None. If it fails, all processes raise."""
    made, failed = None, None
    if fabric.global_rank == 0:
        try:
            made = work()
        except Exception as error:
            failed = error
    said = fabric.broadcast("" if failed is None else str(failed) or type(failed).__name__)
    if failed is not None:
        raise failed
    if said:
        raise ValueError(f"the first process failed: {said}")
    return made


def _set_up(fabric: "Fabric", run: VisionRun, model: SimCLR, loss: nn.Module) -> tuple[nn.Module, Any]:
    """Move the model to its device, compile it, and wrap it for several processes.

    The optimizer also trains the parameters of the loss, such as SigLIP's scale and bias.
    """
    if fabric.device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if fabric.world_size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    elif fabric.world_size > 1 and any(isinstance(m, BATCH_NORMS) for m in model.modules()):
        warnings.warn(
            "on CPUs each process has batch norm statistics of its own part of the batch; devices=1 has those of all",
            stacklevel=2,
        )
    if fabric.world_size > 1 and not isinstance(loss, ContrastiveLoss):
        warnings.warn(
            f"{run.loss.preset} gets the embeddings of one process: unless it gathers those of all, an anchor has "
            "only the negatives of its own part of the batch; a subclass of weince.ContrastiveLoss has all",
            stacklevel=2,
        )
    model.to(fabric.device)
    if _asked(run.compile, fabric.device.type == "cuda"):
        model.encoder.compile()
    if run.optimizer.name in ("sgd", "lars") and any(own.requires_grad for own in loss.parameters()):
        raise ValueError(
            "a loss that learns wants optimizer.name adam or adamw, since its gradients are too large for the rates "
            f"of sgd and lars; got {run.optimizer.name} with {run.loss.preset}"
        )
    optimizer = build_optimizer(model.parameters(), run.optimizer, of_loss=loss.parameters())
    return fabric.setup_module(TwoViews(model, run.precision)), optimizer


def _part(batch: int, rank: int, ranks: int) -> slice:
    """The rows of a global batch that belong to a rank."""
    size = batch // ranks
    return slice(rank * size, (rank + 1) * size)


def _asked(setting: bool | None, usual: bool) -> bool:
    return usual if setting is None else setting


def _graph(run: VisionRun, possible: bool) -> bool:
    if run.graph and not possible:
        raise ValueError(
            "graph needs one process on one GPU that holds all images; this run has not: leave graph out"
        )
    return _asked(run.graph, possible)


def _begin(seed: int, epoch: int, images: int, generator: torch.Generator) -> Tensor:
    """Seed an epoch's randomness and return the order of its images."""
    order, views, other = np.random.SeedSequence([seed, epoch]).generate_state(3).tolist()
    generator.manual_seed(views)
    torch.manual_seed(other)  # for dropout, in encoders that have it
    return torch.randperm(images, generator=torch.Generator().manual_seed(order))


def _row(
    run: VisionRun, fabric: "Fabric", step: Step, epoch: int, steps: int, began: float
) -> dict[str, float]:
    """The log row of an epoch that started at ``began``. All ranks must call this."""
    assert step.last is not None
    mean = float(fabric.all_reduce(step.total / steps, reduce_op="mean"))  # type: ignore[arg-type]
    # After the loss was read, which waits for the device to finish.
    seconds = time.perf_counter() - began
    check_finite(mean, epoch)
    if not finite_weights(step.views, step.loss):  # a checkpoint of them could not be resumed
        raise ValueError(f"the weights are not finite after epoch {epoch + 1}: {DIVERGED}")
    tail = getattr(step.loss, "tail", None) or TailConfig()
    return {
        "epoch": epoch + 1,
        "loss": mean,
        **measure(_all_rows(fabric, step.last.z_i), _all_rows(fabric, step.last.z_j), tail),
        "lr": rate(run.optimizer, epoch, run.epochs),
        "views_per_second": 2 * run.batch * steps / seconds,
        "seconds": seconds,
        **learned(step.loss),
    }


def _all_rows(fabric: "Fabric", z: Tensor) -> Tensor:
    """The embeddings of the global batch."""
    if fabric.world_size == 1:
        return z
    parts = [torch.empty_like(z) for _ in range(fabric.world_size)]
    torch.distributed.all_gather(parts, z)
    return torch.cat(parts)


def _keep(
    run: VisionRun,
    log: Log | None,
    row: dict[str, float],
    images: str | None,
    model: SimCLR,
    loss: nn.Module,
    optimizer: Any,
    tracker: Tracker | None,
) -> None:
    """Write the row of an epoch, and a snapshot and a checkpoint if they are due."""
    assert log is not None
    epoch = int(row["epoch"])
    if tracker is not None and (epoch % run.track_every == 0 or epoch == run.epochs):
        row["vote"] = tracker.vote(model)
    log.add(row)
    # The snapshot comes first: a run that is cut between the two repeats the epoch, and so writes both.
    if run.snapshot_every and epoch % run.snapshot_every == 0:
        save_weights(run.out / "snapshots" / f"epoch_{epoch:04d}.safetensors", model)
    if epoch % run.checkpoint_every == 0 or epoch == run.epochs:
        parts = {"model": model, "loss": loss, "optimizer": optimizer}
        state = {name: part.state_dict() for name, part in parts.items()}
        checkpoint.save(run.out / "checkpoints", epoch, {**state, "images": images})


def _check_images(run: VisionRun, data: ImageData) -> str:
    """The fingerprint of the data; raises if the run in the folder was trained on other data."""
    now = fingerprint(data)
    before = checkpoint.started_with(run.out / "checkpoints", "images")
    if before not in (None, now):
        raise ValueError(
            f"{run.out} was trained on images with the fingerprint {before}; got {run.data} with {now}: "
            "choose another --out"
        )
    return now


def _resume(run: VisionRun, model: nn.Module, loss: nn.Module, optimizer: Any) -> int:
    """Load the newest checkpoint, if there is one; returns the number of finished epochs."""
    found = checkpoint.newest(run.out / "checkpoints")
    if found is None:
        return 0
    with checkpoint.fitting(run.out / "checkpoints"):
        model.load_state_dict(found.state["model"])
        loss.load_state_dict(found.state["loss"])
        restore(optimizer, found.state["optimizer"])
    return found.step
