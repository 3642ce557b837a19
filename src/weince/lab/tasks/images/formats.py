"""Read the official archives of the named data sets into arrays.

Nothing is unpickled: CIFAR and STL-10 are read from their binary versions, ImageNet-32 from its npz files.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weince.lab.tasks.images.pictures import read_picture

Array = NDArray[Any]


class Rows(NamedTuple):
    """An array that may be larger than memory: its shape, and an iterable of parts of its rows."""

    shape: tuple[int, ...]
    parts: Iterable[Array]


class Content(NamedTuple):
    """The arrays of a data set, with the names of :data:`SPLITS` and optionally ``pretrain_images``."""

    arrays: dict[str, Rows]
    class_names: Sequence[str]


def whole(array: Array) -> Rows:
    return Rows(array.shape, [array])


def existing(folder: Path, file: str) -> Path:
    path = folder / file
    if not path.is_file():
        raise ValueError(f"{folder} has no {file}")
    return path


def lines(folder: Path, file: str) -> list[str]:
    text = existing(folder, file).read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip()]


def binary_records(folder: Path, file: str, length: int) -> Array:
    """A file of records of ``length`` bytes as a memory-mapped array ``(n, length)``."""
    path = existing(folder, file)
    count, rest = divmod(path.stat().st_size, length)
    if rest or not count:
        raise ValueError(
            f"{path} is damaged: {path.stat().st_size} bytes are not a number of {length}-byte records"
        )
    return np.memmap(path, np.uint8, mode="r", shape=(count, length))


def read_cifar(
    folders: list[Path], *, train: Sequence[str], test: Sequence[str], label_bytes: int, names: str
) -> Content:
    """Read records of a label (CIFAR-100: coarse, then fine) and 32 x 32 red, then green, then blue pixels."""
    arrays = {}
    for split, files in (("train", train), ("test", test)):
        length = label_bytes + 3 * 32 * 32
        records = np.concatenate([binary_records(folders[0], file, length) for file in files])
        images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[f"{split}_images"] = whole(images)
        arrays[f"{split}_labels"] = whole(records[:, label_bytes - 1].astype(np.int64))
    return Content(arrays, lines(folders[0], names))


def read_cifar10(folders: list[Path]) -> Content:
    batches = [f"data_batch_{i}.bin" for i in range(1, 6)]
    return read_cifar(
        folders, train=batches, test=["test_batch.bin"], label_bytes=1, names="batches.meta.txt"
    )


def read_cifar100(folders: list[Path]) -> Content:
    names = "fine_label_names.txt"
    return read_cifar(folders, train=["train.bin"], test=["test.bin"], label_bytes=2, names=names)


def read_stl10(folders: list[Path]) -> Content:
    """Read 96 x 96 images, stored one colour after the other and column by column; labels start at 1."""

    def images(file: str) -> Rows:
        records = binary_records(folders[0], file, 3 * 96 * 96)
        return whole(records.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1))

    def labels(file: str) -> Rows:
        return whole(binary_records(folders[0], file, 1)[:, 0].astype(np.int64) - 1)

    arrays = {f"{split}_images": images(f"{split}_X.bin") for split in ("train", "test")}
    arrays |= {f"{split}_labels": labels(f"{split}_y.bin") for split in ("train", "test")}
    arrays["pretrain_images"] = images("unlabeled_X.bin")
    return Content(arrays, lines(folders[0], "class_names.txt"))


def read_imagenet32(folders: list[Path]) -> Content:
    """Read files with ``data`` of 3 x 32 x 32 and ``labels`` from 1; they have no class names."""
    arrays = {}
    splits = ("train", [f"train_data_batch_{i}.npz" for i in range(1, 11)]), ("test", ["val_data.npz"])
    for folder, (split, files) in zip(folders, splits, strict=True):
        paths = [existing(folder, file) for file in files]
        labels = np.concatenate([npz_array(path, "labels").astype(np.int64) - 1 for path in paths])
        arrays[f"{split}_labels"] = whole(labels)
        arrays[f"{split}_images"] = Rows((len(labels), 32, 32, 3), map(imagenet32_images, paths))
    return Content(arrays, [str(i) for i in range(1, 1001)])


def imagenet32_images(path: Path) -> Array:
    return npz_array(path, "data").reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def npz_array(path: Path, key: str) -> Array:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return np.asarray(archive[key])
    except MemoryError:
        raise
    except Exception as error:  # the type depends on where the file is damaged
        raise ValueError(
            f"{path} has no readable array {key!r} (pickled ones are not read): {error}"
        ) from error


def read_tiny_imagenet(folders: list[Path]) -> Content:
    """Read JPEGs of 64 px, some grey: training images in a folder per class, validation images from a list."""
    (root,) = folders
    classes = lines(root, "wnids.txt")
    words = dict(line.split("\t", 1) for line in lines(root, "words.txt") if "\t" in line)
    train = []
    for label, wnid in enumerate(classes):
        paths = sorted((root / "train" / wnid / "images").glob("*.JPEG"))
        if not paths:
            raise ValueError(f"{root / 'train' / wnid / 'images'} has no images")
        train += [(path, label) for path in paths]
    numbers = {wnid: label for label, wnid in enumerate(classes)}
    listed = "val/val_annotations.txt"
    annotations = [line.split("\t") for line in lines(root, listed)]
    bad = [line for line in annotations if len(line) < 2 or line[1] not in numbers]
    if bad:
        raise ValueError(f"{root / listed} has lines without a class of wnids.txt, such as {bad[0][:2]}")
    test = [(existing(root, f"val/images/{line[0]}"), numbers[line[1]]) for line in annotations]
    arrays = {}
    for split, pairs in (("train", train), ("test", test)):
        parts = (read_picture(path, 64)[None] for path, _ in pairs)
        arrays[f"{split}_images"] = Rows((len(pairs), 64, 64, 3), parts)
        arrays[f"{split}_labels"] = whole(np.array([label for _, label in pairs], np.int64))
    return Content(arrays, [words.get(wnid, wnid).split(",")[0] for wnid in classes])
