"""SimCLR's augmentation on whole batches: crop and resize, flip, colour jitter, grey, blur.

Every image gets its own random numbers, drawn on its device from a generator. :func:`apply` uses them; it is a pure
function of static shapes that compiles into one graph and never syncs with the device.

The steps are those of torchvision's transforms on float images (``RandomResizedCrop``, ``RandomHorizontalFlip``,
``ColorJitter``, ``RandomGrayscale``, ``GaussianBlur``), in SimCLR's order.

>>> import torch
>>> images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
>>> Augment(32)(images, torch.Generator().manual_seed(0)).shape
torch.Size([4, 3, 32, 32])
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weince.scores import free_to_look

CROP_TRIES = 10
UNIFORMS = 2 * CROP_TRIES + 2 + 13  # boxes, their position; flip, jitter (1 + 4 + 4), grey, blur (1 + 1)
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
Planes = tuple[Tensor, Tensor, Tensor]  # red, green, blue, each (n, height, width)


class Draws(NamedTuple):
    """The random draws for a batch of ``n`` images; ``None`` for a step that is switched off."""

    box: Tensor  # (n, 4) top, left, height, width of the crop in whole pixels
    flip: Tensor  # (n,) bool
    # (n, 4) factors of brightness, contrast and saturation (1 has no effect), and shift of the hue in turns
    factors: Tensor | None
    order: Tensor | None  # (n, 4) the order in which the four are applied
    grey: Tensor | None  # (n,) bool
    sigma: Tensor | None  # (n,) sigma of the blur in pixels; 0 for no blur


@dataclass(frozen=True)
class Augment:
    """A random view of every image of a batch.

    Args:
        size: Height and width of the views.
        crop_scale: Smallest and largest area of the crop, as a fraction of the image.
        crop_ratio: Smallest and largest ratio of width to height of the crop.
        flip: Probability of a horizontal flip.
        jitter: Strength of brightness, contrast, saturation (factors in ``[max(0, 1 - x), 1 + x]``, x at most 10)
            and hue (shift in ``[-x, x]``, at most 0.5).
        jitter_p: Probability that an image is jittered at all.
        grey_p: Probability of conversion to grey.
        blur_p: Probability of a Gaussian blur (sigma in [0.1, 2], kernel a tenth of ``size``); the paper uses none.
    """

    size: int = 32
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: tuple[float, float, float, float] = (0.8, 0.8, 0.8, 0.2)
    jitter_p: float = 0.8
    grey_p: float = 0.2
    blur_p: float = 0.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1; got {self.size}")
        for name in ("flip", "jitter_p", "grey_p", "blur_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability in [0, 1]; got {getattr(self, name)}")
        _check_range("crop_scale", self.crop_scale, most=1.0)
        _check_range("crop_ratio", self.crop_ratio, most=1000)
        most = (10, 10, 10, 0.5)  # at 10, four fifths of random pixels are set to 0 or 1
        if len(self.jitter) != 4 or not all(0 <= x <= m for x, m in zip(self.jitter, most, strict=True)):
            raise ValueError(
                "jitter is (brightness, contrast, saturation, hue), the first three from 0 to 10 and hue from 0 to "
                f"0.5; got {self.jitter}"
            )
        if self.blur_p and not blur_radius(self.size):
            raise ValueError(f"blur needs views of at least 20 px; got {self.size}: set blur_p=0")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Views of a batch.

        Args:
            images: ``(n, 3, height, width)``, uint8 or floats in [0, 1].
            generator: A generator on the device of the images.

        Returns:
            ``(n, 3, size, size)`` float32 in [0, 1].
        """
        if images.device.type != generator.device.type:
            raise ValueError(
                f"images and generator must be on one device; got {images.device} and {generator.device}"
            )
        return self.view(images, self.uniforms(len(images), generator))

    def uniforms(self, n: int, generator: torch.Generator) -> Tensor:
        """All random numbers for ``n`` images: in [0, 1), ``(n, 35)``, on the generator's device.

        ``torch.compile`` does not support generators, so a compiled step gets these numbers as input.
        """
        return torch.rand(n, UNIFORMS, generator=generator, device=generator.device)

    def view(self, images: Tensor, u: Tensor) -> Tensor:
        """Views of a batch, given the numbers of :meth:`uniforms`, ``(n, 35)``; compiles into one graph."""
        return apply(images, self.draws(images, u), size=self.size)

    def draws(self, images: Tensor, u: Tensor) -> Draws:
        """Convert the numbers ``u`` to draws for images ``(n, 3, height, width)``; only their shape is used."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be (n, 3, height, width); got {tuple(images.shape)}")
        height, width = images.shape[2:]
        crop, u = u[:, : 2 * CROP_TRIES + 2], u[:, 2 * CROP_TRIES + 2 :]
        jitter = self.jitter_p > 0 and max(self.jitter) > 0
        return Draws(
            box=self._draw_box(crop, height, width),
            flip=u[:, 0] < self.flip,
            factors=self._draw_factors(u[:, 1] < self.jitter_p, u[:, 2:6]) if jitter else None,
            order=u[:, 6:10].argsort(dim=1) if jitter else None,
            grey=u[:, 10] < self.grey_p if self.grey_p else None,
            sigma=torch.where(u[:, 11] < self.blur_p, 0.1 + 1.9 * u[:, 12], 0.0) if self.blur_p else None,
        )

    def _draw_box(self, u: Tensor, height: int, width: int) -> Tensor:
        """The first of ten boxes that fits into the image, else the largest centred one with an allowed ratio."""
        low, high = self.crop_scale
        area = height * width * (low + (high - low) * u[:, :CROP_TRIES])
        low, high = math.log(self.crop_ratio[0]), math.log(self.crop_ratio[1])
        ratio = torch.exp(low + (high - low) * u[:, CROP_TRIES : 2 * CROP_TRIES])
        w, h = torch.sqrt(area * ratio).round(), torch.sqrt(area / ratio).round()
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first = fits.to(torch.float32).argmax(dim=1, keepdim=True)
        w, h, fits = (x.gather(1, first).squeeze(1) for x in (w, h, fits))
        # u < 1, but u * k may round up to k
        top = torch.minimum((u[:, -2] * (height - h + 1)).floor(), height - h)
        left = torch.minimum((u[:, -1] * (width - w + 1)).floor(), width - w)
        spare = _middle_box(height, width, self.crop_ratio)
        box = [torch.where(fits, x, y) for x, y in zip((top, left, h, w), spare, strict=True)]
        return torch.stack(box, dim=1)

    def _draw_factors(self, chosen: Tensor, u: Tensor) -> Tensor:
        """Factors and hue shift ``(n, 4)``; they have no effect on images that were not chosen."""
        columns = []
        for op, strength in enumerate(self.jitter):
            low, high = (-strength, strength) if op == HUE else (max(0.0, 1 - strength), 1 + strength)
            columns.append(torch.where(chosen, low + (high - low) * u[:, op], 0.0 if op == HUE else 1.0))
        return torch.stack(columns, dim=1)


def apply(images: Tensor, draws: Draws, *, size: int) -> Tensor:
    """Apply the draws to a batch.

    Args:
        images: ``(n, 3, height, width)``, uint8 or floats in [0, 1].
        draws: Result of :meth:`Augment.draws`.
        size: Height and width of the views.

    Returns:
        ``(n, 3, size, size)`` float32 in [0, 1].
    """
    with torch.autocast(images.device.type, enabled=False):  # half precision would be coarser than the pixels
        pixels = images / 255 if images.dtype == torch.uint8 else images.to(torch.float32)
        pixels = crop_resize(pixels, draws.box, draws.flip, size)
        red, green, blue = pixels.unbind(1)
        if draws.factors is not None and draws.order is not None:
            red, green, blue = colour_jitter((red, green, blue), draws.factors, draws.order)
        if draws.grey is not None:
            grey = grey_of((red, green, blue))
            red, green, blue = (torch.where(_spread(draws.grey), grey, x) for x in (red, green, blue))
        views = torch.stack((red, green, blue), dim=1)
        return views if draws.sigma is None else blur(views, draws.sigma)


def crop_resize(pixels: Tensor, box: Tensor, flip: Tensor, size: int) -> Tensor:
    """Cut ``box`` out of each image, resize it to ``size``, and mirror it where ``flip`` is True.

    The resize is bilinear, antialiased when it shrinks, and reads nothing outside the box. It multiplies each image
    by one matrix for its rows and one for its columns.
    """
    n, channels, height, width = pixels.shape
    top, left, box_height, box_width = box.to(torch.float32).unbind(1)
    rows = resampling(top, box_height, torch.zeros_like(flip), height, size)
    columns = resampling(left, box_width, flip, width, size)
    pixels = torch.bmm(rows, pixels.transpose(1, 2).reshape(n, height, channels * width))
    pixels = pixels.view(n, size, channels, width).transpose(1, 2).reshape(n, channels * size, width)
    pixels = torch.bmm(pixels, columns.mT).view(n, channels, size, size)
    return pixels.clamp(0.0, 1.0)  # the weights add up to 1 only up to rounding


def resampling(start: Tensor, length: Tensor, reverse: Tensor, cells: int, size: int) -> Tensor:
    """Weights ``(n, size, cells)`` that resample pixels ``start`` to ``start + length`` of a line to ``size``."""
    target = torch.arange(size, device=start.device) + 0.5
    target = torch.where(reverse[:, None], size - target, target)
    scale = (length / size)[:, None]
    centre = (start[:, None] + target * scale)[:, :, None]
    source = torch.arange(cells, device=start.device) + 0.5
    # A triangle filter as wide as the pixels of the coarser grid.
    reach = scale.clamp(min=1.0)[:, :, None]
    weights = (1 - (source - centre).abs() / reach).clamp(min=0.0)
    end = (start + length)[:, None, None]
    weights = torch.where((source > start[:, None, None]) & (source < end), weights, 0.0)
    return weights / weights.sum(dim=2, keepdim=True)


def colour_jitter(planes: Planes, factors: Tensor, order: Tensor) -> Planes:
    """Change brightness, contrast, saturation and hue, in each image's own order.

    Each round applies one of the four to each image. The first three blend its pixels ``x`` with black, its mean grey
    or their own grey ``y``: ``f * x + (1 - f) * y``.
    """
    for turn in range(4):
        op = order[:, turn]
        factor = _spread(factors.gather(1, op[:, None]).squeeze(1))
        contrast, saturation = (_spread(op == k) for k in (CONTRAST, SATURATION))
        grey = grey_of(planes)
        mean = grey.mean(dim=(1, 2), keepdim=True)
        other = (1 - factor) * torch.where(saturation, grey, torch.where(contrast, mean, 0.0))
        red, green, blue = ((factor * x + other).clamp(0.0, 1.0) for x in planes)
        planes = _with_hue((red, green, blue), planes, op == HUE, factor)
    return planes


def _with_hue(planes: Planes, before: Planes, turns: Tensor, factor: Tensor) -> Planes:
    """The planes, except that the images in ``turns`` are those of ``before`` with the hue shifted by ``factor``."""
    if free_to_look(turns):  # hue takes most of the time, and only a quarter of the images need it
        rows = turns.nonzero().squeeze(1)
        red, green, blue = (plane[rows] for plane in before)
        for plane, shifted in zip(planes, shift_hue((red, green, blue), factor[rows]), strict=True):
            plane[rows] = shifted
        return planes
    shifts = torch.where(_spread(turns), factor, 0.0)
    red, green, blue = (
        torch.where(_spread(turns), shifted, plane)
        for plane, shifted in zip(planes, shift_hue(before, shifts), strict=True)
    )
    return red, green, blue


def grey_of(planes: Planes) -> Tensor:
    """Luma ``(n, height, width)`` with the weights that torchvision uses."""
    red, green, blue = planes
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def shift_hue(planes: Planes, shift: Tensor) -> Planes:
    """Shift the hue by ``shift`` (1 is a full turn) at the same value and saturation of the HSV model.

    With ``top`` the largest channel and ``chroma`` largest less smallest, a hue of ``h`` sixths of a turn gives red
    ``top - chroma * clamp(2 - |k - 2|, 0, 1)`` with ``k = (5 + h) mod 6``; green and blue use 3 and 1 instead of 5.
    """
    red, green, blue = planes
    top = torch.maximum(torch.maximum(red, green), blue)
    chroma = top - torch.minimum(torch.minimum(red, green), blue)
    safe = torch.where(chroma == 0, 1.0, chroma)  # a grey pixel has no hue, any value will do
    hue = torch.where(
        top == red,
        (green - blue) / safe,
        torch.where(top == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = hue + 6 * shift

    def channel(offset: int) -> Tensor:
        k = hue + offset
        k = k - 6 * torch.floor(k / 6)
        return top - chroma * (2 - (k - 2).abs()).clamp(0.0, 1.0)

    return channel(5), channel(3), channel(1)


def blur_radius(size: int) -> int:
    """Radius of the blur's kernel, whose width is odd and about a tenth of the view."""
    return size // 10 // 2


def blur(views: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of ``(n, 3, size, size)`` with each image's ``sigma``, mirrored at the border; 0 for no blur."""
    n, channels, size, _ = views.shape
    radius = blur_radius(size)
    offsets = torch.arange(-radius, radius + 1, device=views.device)
    safe = torch.where(sigma == 0, 1.0, sigma)[:, None]
    kernel = torch.exp(-0.5 * (offsets / safe) ** 2)
    kernel = kernel / kernel.sum(dim=1, keepdim=True)
    kernel = torch.where(sigma[:, None] == 0, (offsets == 0).to(kernel.dtype), kernel)
    lines = torch.arange(size, device=views.device)
    # (size, kernel): mirrored about the first line, then about the last.
    source = (lines[:, None] + offsets).abs()
    source = torch.where(source >= size, 2 * (size - 1) - source, source)
    hits = (source[:, :, None] == lines).to(kernel.dtype)  # (size, kernel, size)
    matrix = torch.einsum("nk,ikj->nij", kernel, hits)
    views = torch.bmm(views.reshape(n, channels * size, size), matrix.mT)
    views = views.view(n, channels, size, size).transpose(1, 2).reshape(n, size, channels * size)
    return torch.bmm(matrix, views).view(n, size, channels, size).transpose(1, 2).clamp(0.0, 1.0)


def _spread(per_image: Tensor) -> Tensor:
    return per_image[:, None, None]


def _middle_box(height: int, width: int, ratio: tuple[float, float]) -> tuple[float, float, float, float]:
    """Top, left, height and width of the largest centred box with an allowed ratio."""
    h, w = height, width
    if width / height < ratio[0]:
        h = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = max(1, round(height * ratio[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def _check_range(name: str, pair: tuple[float, float], *, most: float) -> None:
    if len(pair) != 2 or not 0 < pair[0] <= pair[1] <= most:
        raise ValueError(f"{name} is (low, high) with 0 < low <= high <= {most:g}; got {pair}")
