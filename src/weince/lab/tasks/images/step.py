"""One training step: two views of a batch, their embeddings, the loss, its gradient, the update.

On one GPU the whole step is captured as a CUDA graph; the host then only sends the rows of the next images.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weince.lab.tasks.images.augment import Augment
from weince.lab.tasks.images.encoders import SimCLR
from weince.lab.training.capture import EAGER_STEPS, Embedded, average_gradients, run_aside

Precision = Literal["fp32", "tf32", "bf16", "bf16-embeddings"]

GPU_SHARE = 0.5
"""Largest share of a GPU's free memory that the images may take."""


def allow_tf32(precision: Precision) -> None:
    """Allow TF32 in convolutions on a GPU unless ``precision`` is ``fp32``; matrix products are not affected."""
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


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


class TwoViews(nn.Module):
    """Embeds two views, one after the other: batch norm sees each view separately.

    With ``bf16`` the encoder runs in bf16 and the projector in float32, since near a score of 1 bf16 is too coarse
    for the shortfalls. With ``bf16-embeddings`` the projector runs in bf16 too.
    """

    def __init__(self, model: SimCLR, precision: Precision) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self._embed(first), self._embed(second)

    def _embed(self, view: Tensor) -> Tensor:
        half = self.precision.startswith("bf16")
        with torch.autocast(view.device.type, torch.bfloat16, enabled=half):
            h = self.model.encoder(view)
            if self.precision == "bf16-embeddings":
                return self.model.projector(h)  # type: ignore[no-any-return]
        with torch.autocast(view.device.type, enabled=False):
            return self.model.projector(h.float())  # type: ignore[no-any-return]


class Step:
    """A callable that trains on one batch, given as rows of the images.

    Args:
        views: The model that embeds two views, as Fabric wrapped it.
        loss: Loss of the embeddings.
        optimizer: Optimizer of the parameters of the model and of the loss.
        pixels: All images.
        augment: The augmentation that makes views.
        generator: Generator of the views' random numbers, on the device.
        batch: Pairs in the global batch.
        part: Rows of the global batch for this rank. All ranks draw random numbers for all rows, so that several
            ranks see the same views as one.
        compiled: Compile the augmentation.
        graph: Capture the step as a CUDA graph after the first few steps.
    """

    def __init__(
        self,
        views: nn.Module,
        loss: nn.Module,
        optimizer: Optimizer,
        pixels: Pixels,
        augment: Augment,
        generator: torch.Generator,
        *,
        batch: int,
        part: slice,
        compiled: bool,
        graph: bool,
    ) -> None:
        self.views, self.loss, self.optimizer = views, loss, optimizer
        self.pixels, self.augment, self.generator = pixels, augment, generator
        self.part = part
        self.batch = batch
        self.rows = torch.zeros(len(range(batch)[part]), dtype=torch.long, device=pixels.device)
        self.total = torch.zeros((), device=pixels.device)  # sum of the losses since it was last zeroed
        self.view = torch.compile(self._view, fullgraph=True) if compiled else self._view
        self.to_capture = graph
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        self.last: Embedded | None = None

    def __call__(self, rows: Tensor) -> None:
        """Train on these rows ``(batch,)``; sets :attr:`last` and adds the loss to :attr:`total`."""
        self.rows.copy_(rows[self.part], non_blocking=True)
        if self.graph is None and self.to_capture and self.done == EAGER_STEPS:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.last = run_aside(self._run) if self.to_capture else self._run()
        self.done += 1

    def _run(self) -> Embedded:
        images = self.pixels.rows(self.rows)
        uniforms = (self.augment.uniforms(self.batch, self.generator)[self.part] for _ in range(2))
        z_i, z_j = self.views(*(self.view(images, u) for u in uniforms))
        loss = self.loss(z_i, z_j)
        assert isinstance(loss, Tensor)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(self.loss)
        self.optimizer.step()
        self.total.add_(loss.detach())
        return Embedded(z_i.detach(), z_j.detach(), loss.detach())

    def _view(self, images: Tensor, u: Tensor) -> Tensor:
        return self.augment.view(images, u).contiguous(memory_format=torch.channels_last)

    def _capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.generator)
        with torch.cuda.graph(self.graph):
            self.last = self._run()
