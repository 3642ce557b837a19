"""Read and resize images with Pillow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from weince.progress import passing_bar

Images = NDArray[np.uint8]
FILES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """An image file, of which only the header is read at first; an error names the file."""
    try:
        with Image.open(path) as image:
            yield image
    except MemoryError:
        raise
    except Exception as error:  # Pillow's type depends on where the file is damaged, or if it is too large
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def open_picture(path: Path) -> Image.Image:
    """An image file as RGB; grey and palette images are converted."""
    with opened(path) as image:
        mode = image.mode
        if not mode.startswith(("I", "F")):
            return image.convert("RGB")
    raise ValueError(f"{path} has more than 8 bits a channel (mode {mode}): convert it first")


def read_picture(path: Path, size: int) -> Images:
    """An image file as ``(size, size, 3)``: scaled to fill the square, and cropped around its centre."""
    image = open_picture(path)
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image)


def picture_size(path: Path) -> tuple[int, int]:
    """Width and height, read from the file's header."""
    with opened(path) as image:
        return image.size


def read_pictures(paths: Sequence[Path], size: int, description: str) -> Images:
    """Image files as ``(n, size, size, 3)``."""
    images = np.empty((len(paths), size, size, 3), np.uint8)
    with passing_bar(description, len(paths)) as advance:
        for row, path in enumerate(paths):
            images[row] = read_picture(path, size)
            advance(1)
    return images


def resize(images: Images, size: int) -> Images:
    """Resize images ``(n, height, width, 3)`` to ``(n, size, size, 3)``, cropped around the centre if not square."""
    if images.shape[1:3] == (size, size):
        return images
    out = np.empty((len(images), size, size, 3), np.uint8)
    with passing_bar(f"resizing to {size} px", len(images)) as advance:
        for row, image in enumerate(images):
            fitted = ImageOps.fit(Image.fromarray(image), (size, size), Image.Resampling.BILINEAR)
            out[row] = np.asarray(fitted)
            advance(1)
    return out
