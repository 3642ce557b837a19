"""Small data sets in the formats of the official archives, and the data that a loader should return for them."""

import dataclasses
import hashlib
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weince.lab.tasks.images.data import ImageData
from weince.lab.tasks.images.sources import SOURCES


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def planar(image: np.ndarray) -> bytes:
    """Red, then green, then blue, each row by row, as in CIFAR and ImageNet-32."""
    return bytes(int(image[y, x, c]) for c in range(3) for y in range(32) for x in range(32))


def write_cifar(folder: Path, files: dict[str, tuple], coarse: bool) -> None:
    folder.mkdir()
    for name, (images, labels) in files.items():
        head = b"\x07" if coarse else b""
        records = [head + bytes([label]) + planar(image) for image, label in zip(images, labels, strict=True)]
        (folder / name).write_bytes(b"".join(records))


def write_cifar10(root: Path) -> ImageData:
    images, labels = noise(14, 32, 32, 3), np.array([3, 1, 4, 0, 5, 9, 2, 6, 8, 7, 0, 1, 2, 3])
    files = {
        f"data_batch_{i + 1}.bin": (images[2 * i : 2 * i + 2], labels[2 * i : 2 * i + 2]) for i in range(5)
    }
    files["test_batch.bin"] = images[10:], labels[10:]
    write_cifar(root / "cifar-10-batches-bin", files, coarse=False)
    names = [f"thing{i}" for i in range(10)]
    (root / "cifar-10-batches-bin" / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    return ImageData("cifar10", images[:10], labels[:10], images[10:], labels[10:], tuple(names), images[:10])


def write_cifar100(root: Path) -> ImageData:
    images, labels = (
        noise(104, 32, 32, 3),
        np.append(np.random.default_rng(1).permutation(100), [5, 99, 0, 42]),
    )
    files = {"train.bin": (images[:100], labels[:100]), "test.bin": (images[100:], labels[100:])}
    write_cifar(root / "cifar-100-binary", files, coarse=True)
    names = [f"fine{i}" for i in range(100)]
    (root / "cifar-100-binary" / "fine_label_names.txt").write_text("\n".join(names) + "\n")
    (root / "cifar-100-binary" / "coarse_label_names.txt").write_text("not these\n")
    return ImageData(
        "cifar100", images[:100], labels[:100], images[100:], labels[100:], tuple(names), images[:100]
    )


def write_stl10(root: Path) -> ImageData:
    folder = root / "stl10_binary"
    folder.mkdir()
    images, labels = noise(16, 96, 96, 3), np.append(np.random.default_rng(1).permutation(10), [9, 0, 4])
    parts = {"train": images[:10], "test": images[10:13], "unlabeled": images[13:]}
    for name, part in parts.items():
        with (folder / f"{name}_X.bin").open("wb") as file:
            for image in part:
                for colour in range(3):
                    for x in range(96):  # column by column
                        file.write(image[:, x, colour].tobytes())
    (folder / "train_y.bin").write_bytes(bytes(int(label) + 1 for label in labels[:10]))
    (folder / "test_y.bin").write_bytes(bytes(int(label) + 1 for label in labels[10:]))
    names = tuple(f"kind{i}" for i in range(10))
    (folder / "class_names.txt").write_text("\n".join(names))
    return ImageData("stl10", images[:10], labels[:10], images[10:13], labels[10:], names, images[13:])


def write_imagenet32(root: Path) -> ImageData:
    images, labels = (
        noise(1004, 32, 32, 3),
        np.append(np.random.default_rng(1).permutation(1000), [7, 7, 0, 999]),
    )
    train, val = root / "Imagenet32_train_npz", root / "Imagenet32_val_npz"
    train.mkdir()
    val.mkdir()
    flat = images.transpose(0, 3, 1, 2).reshape(-1, 3072)
    assert flat[5].tobytes() == planar(images[5])
    for i in range(10):
        part = slice(100 * i, 100 * i + 100)
        np.savez(
            train / f"train_data_batch_{i + 1}.npz",
            data=flat[part],
            labels=labels[part] + 1,
            mean=np.zeros(3072),
        )
    np.savez(val / "val_data.npz", data=flat[1000:], labels=labels[1000:] + 1)
    names = tuple(str(i + 1) for i in range(1000))
    return ImageData(
        "imagenet32", images[:1000], labels[:1000], images[1000:], labels[1000:], names, images[:1000]
    )


def save_picture(path: Path, array: np.ndarray) -> np.ndarray:
    """Write an image file, and return the pixels that a reader should get."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, quality=95)
    return np.asarray(Image.open(path).convert("RGB"))


def write_tiny_imagenet(root: Path) -> ImageData:
    folder = root / "tiny-imagenet-200"
    wnids = ["n02", "n01", "n03"]
    seen, labels = [], []
    for label, wnid in enumerate(wnids):
        for i in range(2):
            image = noise(64, 64, 3, seed=10 * label + i)
            image = image[..., 0] if i else image  # half of them are grey
            seen.append(save_picture(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", image))
            labels.append(label)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("n02_0.JPEG\t0\t0\t63\t63\n")
    tested = [
        save_picture(folder / "val" / "images" / f"val_{i}.JPEG", noise(64, 64, 3, seed=i)) for i in range(2)
    ]
    (folder / "val" / "val_annotations.txt").write_text(
        "val_0.JPEG\tn03\t0\t32\t44\t62\nval_1.JPEG\tn02\t0\t0\t63\t63\n"
    )
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tnewt\nn09\tother\n")
    train = np.stack(seen)
    return ImageData(
        "tiny-imagenet",
        train,
        np.array(labels),
        np.stack(tested),
        np.array([2, 0]),
        ("newt", "goldfish", "n03"),
        train,
    )


WRITERS = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "stl10": write_stl10,
    "imagenet32": write_imagenet32,
    "tiny-imagenet": write_tiny_imagenet,
}


def pack(root: Path, name: str, to: Path) -> None:
    """Pack the folders of a data set in the layout of its official archives."""
    to.mkdir(exist_ok=True)
    for archive in SOURCES[name].archives:
        if archive.file.endswith(".zip"):
            # archives of image-net.org have no top folder
            base = root / archive.folder if name == "imagenet32" else root
            with zipfile.ZipFile(to / archive.file, "w") as file:
                for path in sorted((root / archive.folder).rglob("*")):
                    file.write(path, path.relative_to(base))
        else:
            with tarfile.open(to / archive.file, "w:gz") as file:
                file.add(root / archive.folder, archive.folder)


def trust(monkeypatch, name: str, folder: Path, url: str = "") -> None:
    """Accept the small archives in ``folder`` as the official ones."""
    trusted = tuple(
        dataclasses.replace(
            archive,
            md5=hashlib.md5((folder / archive.file).read_bytes(), usedforsecurity=False).hexdigest(),
            url=f"{url}/{archive.file}" if url else archive.url,
        )
        for archive in SOURCES[name].archives
    )
    monkeypatch.setitem(SOURCES, name, dataclasses.replace(SOURCES[name], archives=trusted))


def assert_well_formed(loaded: ImageData) -> None:
    for images, labels in (
        (loaded.train_images, loaded.train_labels),
        (loaded.test_images, loaded.test_labels),
        (loaded.pretrain_images, None),
    ):
        assert images.dtype == np.uint8
        assert images.ndim == 4
        assert images.shape[1] == images.shape[2]
        assert images.shape[3] == 3
        if labels is not None:
            assert labels.dtype == np.int64
            assert labels.shape == (len(images),)
            assert set(labels) <= set(range(len(loaded.class_names)))


def assert_equal(loaded: ImageData, want: ImageData) -> None:
    assert_well_formed(loaded)
    assert loaded.name == want.name
    assert loaded.class_names == want.class_names
    for field in ("train_images", "train_labels", "test_images", "test_labels", "pretrain_images"):
        np.testing.assert_array_equal(getattr(loaded, field), getattr(want, field), err_msg=field)


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)
