"""SimCLR: two views of each image, embedded by an encoder and a projector."""

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from weince.lab.geometry import collapsed, crowded, effective_rank, pair_distances, uniformity, unit_in_double
from weince.lab.tasks.base import BatchOf, Schedule, Training, View, ready_loss
from weince.lab.tasks.images.config import VisionRun
from weince.lab.tasks.images.data import ImageData, load
from weince.lab.tasks.images.encoders import SimCLR
from weince.lab.tasks.images.evaluation import fingerprint
from weince.lab.tasks.images.runs import allow_tf32, build_model, save_weights
from weince.lab.tasks.images.track import Tracker
from weince.lab.training.fabric import first
from weince.lab.training.optimizers import build_optimizer
from weince.losses import ContrastiveLoss, InfoNCELoss
from weince.tail import TailConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d

GPU_SHARE = 0.5
"""Largest share of a GPU's free memory that the images may take."""

GEOMETRY = 1024
"""Largest number of pairs of a batch to measure geometry on: all distances of a large batch would not fit."""


class Pixels:
    """Images ``(n, height, width, 3)`` as uint8, on the device if they fit.

    Memory-mapped images stay on disk, except that CUDA loads them if they fit.
    """

    def __init__(self, images: np.ndarray, device: torch.device) -> None:
        self.device = device
        # Only CUDA reports its free memory; an Apple GPU shares the memory of the CPU.
        fits = device.type != "cuda" or images.nbytes < GPU_SHARE * torch.cuda.mem_get_info(device)[0]
        self.images: np.ndarray | Tensor = images
        if fits and not isinstance(images, np.memmap):
            self.images = torch.from_numpy(np.ascontiguousarray(images)).to(device)
        elif fits and device.type == "cuda":
            self.images = torch.from_numpy(np.array(images)).to(device)

    @property
    def resident(self) -> bool:
        """Whether all images are on the device, so that a batch needs no work on the host."""
        return isinstance(self.images, Tensor)

    def rows(self, rows: Tensor) -> Tensor:
        """The images of these rows as a batch ``(n, 3, height, width)`` on the device."""
        if isinstance(self.images, Tensor):
            taken = self.images[rows]
        else:
            taken = torch.from_numpy(self.images[rows.cpu().numpy()]).to(self.device, non_blocking=True)
        return taken.permute(0, 3, 1, 2)


class ImageTraining(Training):
    """A SimCLR run that is ready to train. A segment of its schedule is an epoch."""

    columns = (
        "epoch", "loss", "rho", "beta", "daic", "lam", "alignment", "uniformity", "effective_rank", "crowded", "lr",
        "views_per_second", "seconds", "vote",
    )  # fmt: skip
    unit, lr_setting = "views", "optimizer.lr"

    def __init__(self, run: VisionRun, fabric: "Fabric") -> None:
        self.run, self.fabric = run, fabric
        self.data = _read(run, fabric)
        self.candidates, self.width, self.optimizing = run.candidates, run.projection, run.optimizer
        self.pixels = Pixels(self.data.pretrain_images, self.device)
        in_epoch = len(self.data.pretrain_images) // run.batch  # the last, smaller batch is left out
        self.schedule = Schedule(
            steps=run.epochs * in_epoch,
            in_epoch=in_epoch,
            segment=in_epoch,
            log_every=in_epoch,
            judge_every=run.track_every,
            save_every=run.checkpoint_every,
            counts="epoch",
        )
        allow_tf32(run.precision)
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(run.seed)
        self.model: SimCLR = build_model(run)
        self.loss = ready_loss(
            run.loss,
            candidates=run.candidates,
            pairs=self.part.stop - self.part.start,
            width=run.projection,
            device=self.device,
        )
        on_gpu = self.device.type == "cuda"
        self._set_up_model(compiled=on_gpu if run.compile is None else run.compile)
        self.optimizer = build_optimizer(
            self.model.parameters(), run.optimizer, of_loss=self.loss.parameters()
        )
        possible = on_gpu and fabric.world_size == 1 and self.pixels.resident
        if run.graph and not possible:
            raise ValueError(
                "graph needs one process on one GPU that holds all images; this run has not: leave graph out"
            )
        self.graph = possible if run.graph is None else run.graph
        self.generator = torch.Generator(self.device)
        self.generators = (self.generator,)
        self.tracker = (
            first(fabric, partial(Tracker, run, self.data, self.device)) if run.track_every else None
        )

    @property
    def title(self) -> str:
        return f"{self.data.name} {self.run.loss.preset}"

    def _set_up_model(self, *, compiled: bool) -> None:
        """Move the model to its device, prepare it for several processes, and compile it and the augmentation."""
        several, run = self.fabric.world_size > 1, self.run
        if self.device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if several:
                self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)  # type: ignore[no-untyped-call]
        elif several and any(isinstance(module, BATCH_NORMS) for module in self.model.modules()):
            warnings.warn(
                "on CPUs each process has batch norm statistics of its own part of the batch; devices=1 has those of "
                "all",
                stacklevel=2,
            )
        if several and not isinstance(self.loss, ContrastiveLoss):
            warnings.warn(
                f"{run.loss.preset} gets the embeddings of one process: unless it gathers those of all, an anchor "
                "has only the negatives of its own part of the batch; a subclass of weince.ContrastiveLoss has all",
                stacklevel=2,
            )
        if run.optimizer.name in ("sgd", "lars") and any(p.requires_grad for p in self.loss.parameters()):
            raise ValueError(
                "a loss that learns wants optimizer.name adam or adamw, since its gradients are too large for the "
                f"rates of sgd and lars; got {run.optimizer.name} with {run.loss.preset}"
            )
        self.model.to(self.device)
        self.view = self._view
        if compiled:
            self.model.encoder.compile()
            self.view = torch.compile(self._view, fullgraph=True)

    # A batch is the rows of its images; their views are drawn on the device.

    def batches(self, start: int) -> Iterator[BatchOf]:
        in_epoch = self.schedule.in_epoch
        for epoch in range(start // in_epoch, self.run.epochs):
            order = self._order(epoch).to(self.device)
            for number in range(in_epoch):
                yield {"rows": order[number * self.run.batch : (number + 1) * self.run.batch]}

    def views(self, batch: BatchOf) -> list[View]:
        images = self.pixels.rows(batch["rows"][self.part])
        views = []
        for name in ("z_i", "z_j"):
            # All processes draw random numbers for all rows, so that they see the same views as one would.
            uniforms = self.run.augment.uniforms(len(batch["rows"]), self.generator)[self.part]
            views.append(View(name, self._embed, self.view(images, uniforms)))
        return views

    def _view(self, images: Tensor, uniforms: Tensor) -> Tensor:
        return self.run.augment.view(images, uniforms).contiguous(memory_format=torch.channels_last)  # type: ignore[no-any-return]

    def _embed(self, view: Tensor) -> Tensor:
        """Embed one view: batch norm sees each view separately.

        With ``bf16`` the encoder runs in bf16 and the projector in float32, since near a score of 1 bf16 is too
        coarse for the shortfalls. With ``bf16-embeddings`` the projector runs in bf16 too.
        """
        precision = self.run.precision
        with torch.autocast(view.device.type, torch.bfloat16, enabled=precision.startswith("bf16")):
            h = self.model.encoder(view)
            if precision == "bf16-embeddings":
                return self.model.projector(h)  # type: ignore[no-any-return]
        with torch.autocast(view.device.type, enabled=False):
            return self.model.projector(h.float())  # type: ignore[no-any-return]

    def count(self, batch: BatchOf) -> int:
        return 2 * len(batch["rows"])

    # All randomness of an epoch depends only on the run's seed and the epoch's number.

    def reseed(self, step: int) -> None:
        _, views, other = self._seeds(step // self.schedule.in_epoch)
        self.generator.manual_seed(views)
        torch.manual_seed(other)  # for dropout, in encoders that have it

    def _order(self, epoch: int) -> Tensor:
        order, *_ = self._seeds(epoch)
        return torch.randperm(len(self.data.pretrain_images), generator=torch.Generator().manual_seed(order))

    def _seeds(self, epoch: int) -> list[int]:
        """Seeds of the order of images, of the views, and of everything else."""
        return np.random.SeedSequence([self.run.seed, epoch]).generate_state(3).tolist()  # type: ignore[no-any-return]

    # What is told and saved.

    def measure(self, arguments: dict[str, Any]) -> dict[str, float]:
        tail = getattr(self.loss, "tail", None) or TailConfig()
        return measure(self._all_rows(arguments["z_i"]), self._all_rows(arguments["z_j"]), tail)

    def _all_rows(self, z: Tensor) -> Tensor:
        """The embeddings of the global batch."""
        if self.fabric.world_size == 1:
            return z
        parts = [torch.empty_like(z) for _ in range(self.fabric.world_size)]
        torch.distributed.all_gather(parts, z)
        return torch.cat(parts)

    def judge(self, step: int) -> dict[str, float]:
        assert self.tracker is not None
        return {"vote": self.tracker.vote(self.model)}

    def keep(self, step: int, *, checkpoint: bool) -> None:
        epoch, every = step // self.schedule.in_epoch, self.run.snapshot_every
        if every and epoch % every == 0:
            save_weights(self.run.out / "snapshots" / f"epoch_{epoch:04d}.safetensors", self.model)

    def finish(self, *, bar: bool) -> Path:
        save_weights(self.run.out / "model.safetensors", self.model)
        return self.run.out  # type: ignore[no-any-return]

    def fingerprint(self) -> str:
        return fingerprint(self.data)

    def figures(self, row: Any) -> tuple[str, ...]:
        speed = f"{row['views_per_second']:,.0f} views/s"
        return f"loss {row['loss']:.4f}", f"lam {row['lam']:.3f}", f"beta {row['beta']:.2f}", speed

    def warning(self, row: Any) -> str | None:
        return collapse(row)


def _read(run: VisionRun, fabric: "Fabric") -> ImageData:
    read = partial(load, run.data, size=run.augment.size)
    data = first(fabric, read) or read()  # the first process downloads and converts, then the others read
    if len(data.pretrain_images) < run.batch:
        raise ValueError(
            f"a batch of {run.batch} needs as many images; got {len(data.pretrain_images)} in {data.name}"
        )
    return data


@torch.no_grad()
def measure(z_i: Tensor, z_j: Tensor, tail: TailConfig) -> dict[str, float]:
    """Figures of a batch's embeddings ``(n, d)`` for the log: mean tail statistics of the anchors, and geometry.

    Alignment is the mean squared distance of a pair and uniformity the logarithm of the mean of
    ``exp(-2 distance^2)`` over other pairs (Wang and Isola 2020); the effective rank is the exponential of the
    entropy of the singular values (Roy and Vetterli 2007). Crowded is the share of anchors that have a candidate
    other than their positive within a shortfall of ``CROWD``; in a healthy encoder it is near 0.
    """
    measured = InfoNCELoss(gather=False)
    measured.tail = tail
    stats = measured(z_i, z_j, return_stats=True).stats
    u, v = (unit_in_double(z[:GEOMETRY]) for z in (z_i, z_j))
    rows, pairs = torch.cat([u, v]), pair_distances(u, v)
    figures = {
        **{name: getattr(stats, name).mean() for name in ("rho", "beta", "daic", "lam")},
        "alignment": pairs.mean(),
        "uniformity": uniformity(rows, without=pairs),
        "effective_rank": effective_rank(rows),
        "crowded": crowded(rows),
    }
    return {name: float(value) for name, value in figures.items()}


def collapse(row: dict[str, float]) -> str | None:
    """A warning if the embeddings of an epoch have collapsed or are about to; None if not, or without figures."""
    signs = collapsed(row.get("crowded", 0.0), row.get("effective_rank", float("inf")))
    if signs is None:
        return None
    # Not for certain: of a few easy images, those of one class may coincide and be classified well all the same.
    advice = "unless weince evaluate finds them good, try another loss or learning rate"
    return f"the embeddings seem to collapse: {signs} in epoch {row['epoch']:.0f}; {advice}"
