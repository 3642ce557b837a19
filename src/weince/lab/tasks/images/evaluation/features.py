"""Features of a frozen encoder, for a whole set of images at once."""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weince.progress import bars

Precision = Literal["fp32", "bf16"]


class LabelledFeatures(NamedTuple):
    """Features ``(n, f)`` and labels ``(n,)``, on one device."""

    features: Tensor
    labels: Tensor

    def check(self, name: str) -> None:
        """Raise a ValueError unless the features are finite and there is a label for each row."""
        if self.features.ndim != 2 or self.labels.shape != self.features.shape[:1]:
            raise ValueError(
                f"{name} features must be (n, f) with (n,) labels; got {tuple(self.features.shape)} "
                f"and {tuple(self.labels.shape)}"
            )
        if not len(self.labels):
            raise ValueError(f"{name} features must have at least one row")
        bad = int((~self.features.isfinite().all(1)).sum())
        if bad:
            raise ValueError(
                f"{name} features must be finite; got NaN or inf in {bad} of {len(self.features)} rows"
            )


@torch.no_grad()
def extract(
    encoder: nn.Module,
    images: NDArray[np.uint8],
    *,
    batch: int = 1024,
    device: str | torch.device = "cpu",
    precision: Precision = "fp32",
    name: str = "features",
    progress: bool = True,
) -> Tensor:
    """Features of every image, in order.

    Args:
        encoder: Maps ``(b, 3, height, width)`` in [0, 1] to ``(b, f)``. It is moved to `device` and runs in
            evaluation mode; its mode is restored afterwards.
        images: ``(n, height, width, 3)`` bytes; may be memory-mapped.
        batch: Images at a time; the last batch may be smaller.
        device: Where to compute, and where the features stay.
        precision: ``"bf16"`` runs the encoder under autocast; the features are float32 in any case.
        name: Label of the progress bar.
        progress: Show the bar.

    Returns:
        ``(n, f)`` float32.
    """
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8 or not len(images):
        raise ValueError(f"images must be (n, height, width, 3) uint8; got {images.dtype} {images.shape}")
    if batch < 1 or precision not in ("fp32", "bf16"):
        raise ValueError(
            f"batch must be at least 1 and precision fp32 or bf16; got {batch} and {precision!r}"
        )
    place = torch.device(device)
    layout: Any = torch.channels_last if place.type == "cuda" else torch.contiguous_format
    encoder.to(place)
    was_training = encoder.training
    encoder.eval()
    parts = []
    try:
        with bars(shown=progress) as bar:
            task = bar.add_task(name, total=len(images))
            for start in range(0, len(images), batch):
                pixels = torch.from_numpy(np.array(images[start : start + batch])).to(place)
                x = pixels.permute(0, 3, 1, 2).to(torch.float32).div_(255).contiguous(memory_format=layout)
                with torch.autocast(place.type, torch.bfloat16, enabled=precision == "bf16"):
                    h = encoder(x)
                if h.ndim != 2 or len(h) != len(x):
                    raise ValueError(
                        f"the encoder must return (n, features) for n = {len(x)} images; got {tuple(h.shape)}"
                    )
                parts.append(h.float())
                bar.advance(task, len(x))
    finally:
        encoder.train(was_training)
    return torch.cat(parts)
