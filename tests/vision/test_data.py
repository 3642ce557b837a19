"""Data sets, from small files of the official formats that these tests write."""

import dataclasses
import hashlib
import http.server
import io
import multiprocessing
import resource
import shutil
import tarfile
import threading
import warnings
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from weince.vision import archives, data
from weince.vision.archives import SOURCES
from weince.vision.data import ImageData, load, stratified_split


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


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


# --- the official formats, written pixel by pixel ----------------------------------------------------------------


def planar(image: np.ndarray) -> bytes:
    """Red, green, blue, each row by row: CIFAR and ImageNet-32."""
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
    """Write an image file, and return what a reader of it should see."""
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
            image = image[..., 0] if i else image  # some are grey
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
    """Pack the folders of a data set as its archives are."""
    to.mkdir(exist_ok=True)
    for archive in SOURCES[name].archives:
        if archive.file.endswith(".zip"):
            # image-net.org's archives have no folder inside
            base = root / archive.folder if name == "imagenet32" else root
            with zipfile.ZipFile(to / archive.file, "w") as file:
                for path in sorted((root / archive.folder).rglob("*")):
                    file.write(path, path.relative_to(base))
        else:
            with tarfile.open(to / archive.file, "w:gz") as file:
                file.add(root / archive.folder, archive.folder)


def trust(monkeypatch, name: str, folder: Path, url: str = "") -> None:
    """Take the small archives in ``folder`` for the official ones."""
    trusted = tuple(
        dataclasses.replace(
            archive,
            md5=hashlib.md5((folder / archive.file).read_bytes(), usedforsecurity=False).hexdigest(),
            url=f"{url}/{archive.file}" if url else archive.url,
        )
        for archive in SOURCES[name].archives
    )
    monkeypatch.setitem(SOURCES, name, dataclasses.replace(SOURCES[name], archives=trusted))


def assert_equal(loaded: ImageData, want: ImageData) -> None:
    assert_well_formed(loaded)
    assert loaded.name == want.name
    assert loaded.class_names == want.class_names
    for field in ("train_images", "train_labels", "test_images", "test_labels", "pretrain_images"):
        np.testing.assert_array_equal(getattr(loaded, field), getattr(want, field), err_msg=field)


@pytest.mark.parametrize("name", WRITERS)
def test_from_an_unpacked_folder(name, tmp_path):
    want = WRITERS[name](tmp_path)
    assert_equal(load(name, cache=tmp_path), want)


@pytest.mark.parametrize("name", WRITERS)
def test_from_the_archive_and_then_from_the_arrays_alone(name, tmp_path, monkeypatch):
    (tmp_path / "unpacked").mkdir()
    want = WRITERS[name](tmp_path / "unpacked")
    cache = tmp_path / "cache"
    pack(tmp_path / "unpacked", name, cache)
    trust(monkeypatch, name, cache)
    loaded = load(name, cache=cache)
    assert_equal(loaded, want)
    assert isinstance(loaded.train_images, np.memmap)
    files = {archive.file for archive in SOURCES[name].archives}
    assert {path.name for path in cache.iterdir()} == {name, *files}  # nothing else is left behind
    for file in files:
        (cache / file).unlink()
    assert_equal(load(name, cache=cache), want)


def test_the_environment_names_the_cache(tmp_path, monkeypatch):
    want = write_cifar10(tmp_path)
    monkeypatch.setenv("WEINCE_DATA", str(tmp_path))
    assert_equal(load("cifar10"), want)
    monkeypatch.delenv("WEINCE_DATA")
    assert data.cache_folder().name == "weince"


def test_by_the_path_of_an_archive_or_of_its_folder(tmp_path, monkeypatch):
    want = write_cifar100(tmp_path)
    assert_equal(load(str(tmp_path / "cifar-100-binary")), want)
    pack(tmp_path, "cifar100", tmp_path / "packed")
    trust(monkeypatch, "cifar100", tmp_path / "packed")
    assert_equal(load(str(tmp_path / "packed" / "cifar-100-binary.tar.gz")), want)


def test_arrays_can_be_tensors_and_writing_to_them_leaves_the_files(tmp_path):
    want = write_cifar10(tmp_path)
    loaded = load("cifar10", cache=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that cannot be written to
        torch.from_numpy(loaded.train_images).zero_()
    assert_equal(load("cifar10", cache=tmp_path), want)


def test_another_size(tmp_path):
    want = write_stl10(tmp_path)
    loaded = load("stl10", cache=tmp_path, size=48)
    assert_well_formed(loaded)
    assert loaded.pretrain_images.shape == (3, 48, 48, 3)
    weights = np.zeros((48, 96))  # halving with a triangle: 1, 3, 3, 1 around each pair, cut at the border
    for row in range(48):
        for source, weight in zip(range(2 * row - 1, 2 * row + 3), (1, 3, 3, 1), strict=True):
            if 0 <= source < 96:
                weights[row, source] = weight
    weights /= weights.sum(axis=1, keepdims=True)
    halved = np.einsum("ij,njkc->nikc", weights, want.train_images.astype(float))
    halved = np.einsum("lk,nikc->nilc", weights, halved)
    assert np.abs(loaded.train_images - halved).max() <= 1


def _load_in_process(cache: Path, barrier, results) -> None:
    barrier.wait()
    results.put(int(load("cifar100", cache=cache).train_images.sum()))


def test_several_processes_may_convert_at_once(tmp_path):
    want = write_cifar100(tmp_path)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_load_in_process, args=(tmp_path, barrier, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    sums = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sums == [int(want.train_images.sum())] * 4
    assert {path.name for path in tmp_path.iterdir()} == {"cifar-100-binary", "cifar100"}


# --- downloads -----------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    """A web server of a folder on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_download(tmp_path, server, monkeypatch):
    folder, url = server
    want = write_cifar10(tmp_path)
    pack(tmp_path, "cifar10", folder)
    trust(monkeypatch, "cifar10", folder, url)
    cache = tmp_path / "new" / "cache"
    assert_equal(load("cifar10", cache=cache), want)
    assert {path.name for path in cache.iterdir()} == {"cifar10", "cifar-10-binary.tar.gz"}
    # the second time, nothing is asked of the server
    monkeypatch.setitem(SOURCES, "cifar10", archives.Source((), None))
    assert_equal(load("cifar10", cache=cache), want)


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_download_of_something_else(tmp_path, server, monkeypatch):
    folder, url = server
    write_cifar10(tmp_path)
    pack(tmp_path, "cifar10", folder)
    trust(monkeypatch, "cifar10", folder, url)
    (folder / "cifar-10-binary.tar.gz").write_bytes(b"<html>moved</html>")
    cache = tmp_path / "cache"
    with pytest.raises(
        ValueError, match=r"is not the official file .*MD5 hash.* put cifar-10-binary.tar.gz, or"
    ) as error:
        load("cifar10", cache=cache)
    one_line(error)
    assert list(cache.iterdir()) == []


def test_download_of_nothing(tmp_path, server, monkeypatch):
    _, url = server
    archive = dataclasses.replace(SOURCES["cifar10"].archives[0], url=f"{url}/gone.tar.gz")
    monkeypatch.setitem(SOURCES, "cifar10", dataclasses.replace(SOURCES["cifar10"], archives=(archive,)))
    with pytest.raises(
        OSError, match=r"cannot download http.*gone.tar.gz \(status 404\): put cifar-10"
    ) as error:
        load("cifar10", cache=tmp_path / "cache")
    one_line(error)


def test_no_network(tmp_path, monkeypatch):
    archive = dataclasses.replace(SOURCES["stl10"].archives[0], url="http://127.0.0.1:9/stl10_binary.tar.gz")
    monkeypatch.setitem(SOURCES, "stl10", dataclasses.replace(SOURCES["stl10"], archives=(archive,)))
    with pytest.raises(
        OSError, match=r"cannot download .* \(ConnectionError\): put stl10_binary.tar.gz, or the folder"
    ) as error:
        load("stl10", cache=tmp_path)
    assert str(tmp_path) in one_line(error)


def test_what_needs_a_login_is_said_to(tmp_path):
    with pytest.raises(
        ValueError, match=r"Imagenet32_train_npz.zip is given to registered users of image-net.org"
    ) as error:
        load("imagenet32", cache=tmp_path)
    assert str(tmp_path) in one_line(error)


def test_every_download_has_a_checksum():
    for source in SOURCES.values():
        for archive in source.archives:
            assert bool(archive.url) == bool(archive.md5)
            assert len(archive.md5) in (0, 32)


# --- archives that are wrong ---------------------------------------------------------------------------------


def refuses(name: str, cache: Path, message: str) -> None:
    """One line that says it, and nothing half made left behind."""
    before = {path.name for path in cache.iterdir()}
    with pytest.raises(ValueError, match=message) as error:
        load(name, cache=cache)
    one_line(error)
    assert {path.name for path in cache.iterdir()} == before


def test_a_local_archive_with_another_checksum(tmp_path):
    write_cifar10(tmp_path)
    pack(tmp_path, "cifar10", tmp_path / "cache")
    refuses(
        "cifar10",
        tmp_path / "cache",
        "has the MD5 [0-9a-f]{32}, the official file c32a1d4ab5d03f1284b67883e8d87530",
    )


@pytest.mark.parametrize("name", ["cifar10", "tiny-imagenet"])
@pytest.mark.parametrize("fault", ["cut", "noise", "empty"])
def test_a_damaged_archive(name, fault, tmp_path, monkeypatch):
    WRITERS[name](tmp_path)
    cache = tmp_path / "cache"
    pack(tmp_path, name, cache)
    path = cache / SOURCES[name].archives[0].file
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "noise": bytes(noise(5000)), "empty": b""}[fault])
    trust(monkeypatch, name, cache)
    refuses(name, cache, f"{path.name} is damaged or not what its name says")


def test_an_archive_that_reaches_outside(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    with tarfile.open(cache / "cifar-10-binary.tar.gz", "w:gz") as file:
        member = tarfile.TarInfo("../../../escaped.txt")
        member.size = 4
        file.addfile(member, io.BytesIO(b"evil"))
    trust(monkeypatch, "cifar10", cache)
    refuses("cifar10", cache, "is damaged or not what its name says: .*outside the destination")
    with zipfile.ZipFile(cache / "tiny-imagenet-200.zip", "w") as file:
        file.writestr("../../../escaped.txt", "evil")
        file.writestr("/escaped.txt", "evil")
    trust(monkeypatch, "tiny-imagenet", cache)
    refuses("tiny-imagenet", cache, "has no wnids.txt")
    assert not list(tmp_path.rglob("escaped.txt"))
    assert not Path("/escaped.txt").exists()


@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        ("cifar10", "data_batch_3.bin", None, "cifar-10-batches-bin has no data_batch_3.bin"),
        ("cifar10", "batches.meta.txt", None, "has no batches.meta.txt"),
        ("cifar10", "test_batch.bin", lambda x: x[:-1], "not a number of 3073-byte records"),
        ("cifar10", "test_batch.bin", lambda x: b"", "0 bytes are not a number of 3073-byte"),
        ("cifar10", "data_batch_1.bin", lambda x: b"\x04" + x[1:], "no training image of class 3"),
        ("cifar10", "test_batch.bin", lambda x: b"\x63" + x[1:], "test_labels go from 1 to 99"),
        ("cifar100", "train.bin", lambda x: x[:-3074], "cifar100: no training image of class"),
        ("stl10", "unlabeled_X.bin", None, "has no unlabeled_X.bin"),
        ("stl10", "train_y.bin", lambda x: x[:-1], r"train_labels must be integers of shape \(10,\)"),
        ("stl10", "test_y.bin", lambda x: b"\x00" + x[1:], "test_labels go from -1 to"),
        ("imagenet32", "train_data_batch_7.npz", None, "has no train_data_batch_7.npz"),
        ("imagenet32", "val_data.npz", lambda x: x[:99], "val_data.npz has no readable array"),
        ("tiny-imagenet", "val/images/val_1.JPEG", None, "has no val/images/val_1.JPEG"),
        ("tiny-imagenet", "train/n01/images/n01_0.JPEG", lambda x: x[:300], "n01_0.JPEG cannot be read"),
        ("tiny-imagenet", "wnids.txt", lambda x: x + b"n07\n", "n07/images has no images"),
        ("tiny-imagenet", "wnids.txt", lambda x: x[:-4], "without a class of wnids.txt, such as .*n03"),
        ("tiny-imagenet", "val/val_annotations.txt", lambda x: x + b"val_2.JPEG\n", "such as .*val_2"),
    ],
)  # fmt: skip
def test_folders_with_something_wrong(name, file, change, message, tmp_path):
    want = WRITERS[name](tmp_path)
    (path,) = (x for x in tmp_path.glob(f"*/{file}"))
    good = path.read_bytes()
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(good))
    refuses(name, tmp_path, message)
    path.write_bytes(good)  # and once it is put right, it loads
    assert_equal(load(name, cache=tmp_path), want)


class Evil:
    def __reduce__(self):
        return (print, ("code from an archive ran",))


def test_nothing_is_unpickled(tmp_path, capsys):
    write_imagenet32(tmp_path)
    evil = np.array([Evil()], dtype=object)
    np.savez(tmp_path / "Imagenet32_val_npz" / "val_data.npz", data=evil, labels=evil)
    refuses("imagenet32", tmp_path, "pickled ones are not read")
    np.savez(tmp_path / "evil.npz", **dict.fromkeys(archives.SPLITS, evil))
    with pytest.raises(ValueError, match=r"evil.npz cannot be used: .*allow_pickle=False"):
        load(str(tmp_path / "evil.npz"))
    assert "ran" not in capsys.readouterr().out


def test_rows_and_labels_that_disagree(tmp_path):
    write_imagenet32(tmp_path)
    labels = np.arange(1, 6)
    np.savez(tmp_path / "Imagenet32_val_npz" / "val_data.npz", data=noise(4, 3072), labels=labels)
    refuses("imagenet32", tmp_path, "test_images has 4 rows where its labels promise 5")


def test_a_damaged_conversion_says_what_to_remove(tmp_path):
    write_cifar10(tmp_path)
    load("cifar10", cache=tmp_path)
    path = tmp_path / "cifar10" / "train_images.npy"
    whole = path.read_bytes()
    for fault in (whole[:-1], whole[:20], b""):
        path.write_bytes(fault)
        refuses("cifar10", tmp_path, "cifar10 is damaged: remove it, and it will be made anew")
    path.unlink()
    refuses("cifar10", tmp_path, r"is damaged: .* \(no train_images.npy\)")
    shutil.rmtree(tmp_path / "cifar10")
    load("cifar10", cache=tmp_path)


def test_a_disk_without_room_leaves_nothing(tmp_path):
    """The limit on the size of a file is met in the way a full disk is, by a write that fails."""
    want = write_cifar10(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write .*train_images.npy: .*File too large") as error:
            load("cifar10", cache=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_line(error)
    assert {path.name for path in tmp_path.iterdir()} == {"cifar-10-batches-bin"}
    assert_equal(load("cifar10", cache=tmp_path), want)


# --- digits -----------------------------------------------------------------------------------------------------


def test_digits():
    loaded = load("digits")
    assert_well_formed(loaded)
    assert loaded.train_images.shape == (1442, 32, 32, 3)
    assert loaded.test_images.shape == (355, 32, 32, 3)
    assert loaded.class_names == tuple("0123456789")
    assert loaded.pretrain_images is loaded.train_images
    assert (loaded.train_images[..., 0] == loaded.train_images[..., 2]).all()
    assert loaded.train_images.max() == 255
    again = load("digits")
    np.testing.assert_array_equal(again.train_images, loaded.train_images)
    small = load("digits", size=8)
    from sklearn.datasets import load_digits

    known = {image.tobytes(): label for image, label in zip(*_grey_digits(load_digits()), strict=True)}
    for image, label in zip(small.test_images, small.test_labels, strict=True):
        assert known[image[..., 0].tobytes()] == label


def _grey_digits(digits):
    return np.round(digits.images * 255 / 16).astype(np.uint8), digits.target


# --- npz --------------------------------------------------------------------------------------------------------


def arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "train_images": noise(6, 8, 8, 3),
        "train_labels": np.array([0, 1, 2, 0, 1, 2]),
        "test_images": noise(2, 8, 8, 3, seed=1),
        "test_labels": np.array([2, 0]),
        **changes,
    }


def saved(path: Path, content: dict[str, np.ndarray]) -> str:
    np.savez(path, **content)
    return str(path)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_npz(dtype, tmp_path):
    content = arrays(train_labels=np.array([0, 1, 2, 0, 1, 2], dtype))
    loaded = load(saved(tmp_path / "mine.npz", content))
    names = ("0", "1", "2")
    want = ImageData("mine", *(content[key] for key in archives.SPLITS), names, content["train_images"])
    assert_equal(loaded, want)
    named = load(saved(tmp_path / "mine.npz", {**content, "class_names": np.array(["a", "b", "c"])}))
    assert named.class_names == ("a", "b", "c")


def test_grey_and_oblong_npz(tmp_path):
    grey = arrays(train_images=noise(6, 8, 8), test_images=noise(2, 8, 8, 1))
    loaded = load(saved(tmp_path / "grey.npz", grey))
    assert_well_formed(loaded)
    for c in range(3):
        np.testing.assert_array_equal(loaded.train_images[..., c], grey["train_images"])
        np.testing.assert_array_equal(loaded.test_images[..., c], grey["test_images"][..., 0])
    oblong = arrays(train_images=noise(6, 8, 12, 3), test_images=noise(2, 8, 12, 3))
    loaded = load(saved(tmp_path / "oblong.npz", oblong))
    np.testing.assert_array_equal(loaded.train_images, oblong["train_images"][:, :, 2:10])
    mixed = arrays(test_images=noise(2, 9, 9, 3))
    assert load(saved(tmp_path / "mixed.npz", mixed), size=8).test_images.shape == (2, 8, 8, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": np.zeros((6, 8, 8, 3))}, "train_images must be uint8, got float64"),
        ({"train_images": noise(6, 3, 8, 8)}, r"train_images must be \(n, height, width, 3\).*got \(6, 3, 8, 8\)"),
        ({"test_images": noise(0, 8, 8, 3), "test_labels": np.array([], int)}, "test_images must be"),
        ({"test_images": noise(2, 9, 9, 3)}, "images of different sizes .*size= brings them to one"),
        ({"train_labels": np.array([0, 1, 2])}, r"train_labels must be .* \(6,\), got int64 of \(3,\)"),
        ({"train_labels": np.array([0, 1, 2, 0, 1, 2.0])}, "train_labels must be integers"),
        ({"train_labels": np.array([0, 1, 3, 0, 1, 3])}, r"no training image of class 2 \(of 0 to 3\)"),
        ({"train_labels": np.array([-1, 0, 1, 0, 1, 2])}, "train_labels go from -1 to 2, the classes from 0 to 2"),
        ({"test_labels": np.array([0, 7])}, "test_labels go from 0 to 7, the classes from 0 to 2"),
        ({"class_names": np.array(["a", "b"])}, "train_labels go from 0 to 2, the classes from 0 to 1"),
        ({"class_names": np.array(["a", "b", "c", "d"])}, "no training image of class 3"),
    ],
)  # fmt: skip
def test_npz_with_something_wrong(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        load(saved(tmp_path / "bad.npz", arrays(**changes)))
    assert "bad.npz" in one_line(error)


def test_npz_that_is_none(tmp_path):
    content = arrays()
    del content["test_labels"]
    with pytest.raises(
        ValueError, match=r"bad.npz cannot be used: no array 'test_labels' \(it has train_images"
    ):
        load(saved(tmp_path / "bad.npz", content))
    whole = (tmp_path / "bad.npz").read_bytes()
    for fault in (b"", whole[:100], bytes(noise(500)), whole[: len(whole) // 2]):
        (tmp_path / "bad.npz").write_bytes(fault)
        with pytest.raises(ValueError, match=r"bad.npz cannot be used") as error:
            load(str(tmp_path / "bad.npz"))
        one_line(error)


# --- folders ----------------------------------------------------------------------------------------------------


def write_folder(
    root: Path, counts: dict[str, int], shape=(8, 8, 3), suffix=".png"
) -> dict[str, list[np.ndarray]]:
    return {
        name: [
            save_picture(root / name / f"{i:03}{suffix}", noise(*shape, seed=100 * ord(name[0]) + i))
            for i in range(n)
        ]
        for name, n in counts.items()
    }


def test_folder_with_a_split(tmp_path):
    train = write_folder(tmp_path / "train", {"cat": 3, "ant": 2})
    test = write_folder(tmp_path / "test", {"cat": 1, "ant": 1}, suffix=".JPG")
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    loaded = load(str(tmp_path))
    images = np.stack(train["ant"] + train["cat"])
    tested = np.stack(test["ant"] + test["cat"])
    labels = np.array([0, 0, 1, 1, 1])
    assert_equal(
        loaded, ImageData(tmp_path.name, images, labels, tested, np.array([0, 1]), ("ant", "cat"), images)
    )


def test_folder_with_val_for_test(tmp_path):
    write_folder(tmp_path / "train", {"a": 2, "b": 2})
    want = write_folder(tmp_path / "val", {"a": 1, "b": 1})
    np.testing.assert_array_equal(load(str(tmp_path)).test_images, np.stack(want["a"] + want["b"]))


def test_folder_without_a_split(tmp_path):
    pictures = write_folder(tmp_path, {"a": 10, "b": 7, "c": 2})
    loaded = load(str(tmp_path))
    assert_well_formed(loaded)
    assert np.bincount(loaded.test_labels).tolist() == [2, 1, 1]
    assert np.bincount(loaded.train_labels).tolist() == [8, 6, 1]
    known = {image.tobytes(): label for label, name in enumerate("abc") for image in pictures[name]}
    assert len(known) == 19
    seen = [
        (image.tobytes(), label)
        for part in ("train", "test")
        for image, label in zip(
            getattr(loaded, f"{part}_images"), getattr(loaded, f"{part}_labels"), strict=True
        )
    ]
    assert dict(seen) == known
    assert_equal(load(str(tmp_path)), loaded)


def test_folder_of_grey_odd_and_oblong_images(tmp_path):
    write_folder(tmp_path, {"a": 5, "b": 4})
    save_picture(tmp_path / "a" / "grey.png", noise(8, 8))
    save_picture(tmp_path / "b" / "large.png", np.full((30, 20, 3), 77, np.uint8))
    Image.fromarray(noise(8, 8, 4)).save(tmp_path / "b" / "alpha.png")
    Image.fromarray(noise(8, 8)).convert("P").save(tmp_path / "b" / "palette.png")
    with pytest.warns(
        UserWarning, match="1 of 13 images are not 8 x 8 px and are scaled and cut to that; size="
    ):
        loaded = load(str(tmp_path))
    assert_well_formed(loaded)
    assert loaded.train_images.shape[1:] == (8, 8, 3)
    images = np.concatenate([loaded.train_images, loaded.test_images])
    assert (images == 77).all(axis=(1, 2, 3)).sum() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(str(tmp_path), size=16).train_images.shape[1:] == (16, 16, 3)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ({"a": 2, "b": 2}, {"a": 1}, r"test has no class b, .*train has"),
        ({"a": 2}, {"a": 1, "c": 1}, r"train has no class c, .*test has"),
        ({}, {"a": 1}, "train has no folders of classes"),
        ({"a": 2, "b": 0}, {"a": 1, "b": 1}, r"b has no images \(.png, .jpg"),
    ],
)
def test_folder_with_missing_classes(train, test, message, tmp_path):
    for part, counts in (("train", train), ("test", test)):
        (tmp_path / part).mkdir()
        for name in counts:
            (tmp_path / part / name).mkdir()
        write_folder(tmp_path / part, counts)
    with pytest.raises(ValueError, match=message) as error:
        load(str(tmp_path))
    one_line(error)


def test_folder_with_other_faults(tmp_path):
    write_folder(tmp_path, {"a": 3, "b": 1, "c": 1})
    with pytest.raises(
        ValueError, match="a class needs 2 images to be split into train and test; one only: b, c"
    ):
        load(str(tmp_path))
    (tmp_path / "a" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    write_folder(tmp_path, {"b": 2, "c": 2})
    with pytest.raises(ValueError, match=r"broken.png cannot be read as an image") as error:
        load(str(tmp_path))
    one_line(error)
    (tmp_path / "a" / "broken.png").unlink()
    Image.fromarray(noise(8, 8).astype(np.uint16) * 256).save(tmp_path / "a" / "deep.png")
    with pytest.raises(
        ValueError, match=r"deep.png has more than 8 bits a channel \(mode I;16\): convert it first"
    ):
        load(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no folders of classes"):
        load(str(tmp_path / "empty"))


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=60), seed=st.integers(0, 3))
def test_stratified_split(labels, seed):
    labels = np.array(labels)
    train, test = stratified_split(labels, 0.2, seed)
    assert sorted([*train, *test]) == list(range(len(labels)))
    for label in set(labels):
        n = (labels == label).sum()
        assert (labels[test] == label).sum() == max(1, n // 5)


def test_stratified_split_is_seeded():
    labels = np.repeat([0, 1], 50)
    assert not np.array_equal(stratified_split(labels, 0.2, 0)[1], stratified_split(labels, 0.2, 1)[1])
    np.testing.assert_array_equal(stratified_split(labels, 0.2, 0)[1], stratified_split(labels, 0.2, 0)[1])


# --- names ------------------------------------------------------------------------------------------------------


def test_unknown_names(tmp_path):
    with pytest.raises(
        ValueError, match=r"no data 'cifar-100' \(did you mean cifar100\?\): give one of digits, cifar10, "
    ):
        load("cifar-100", cache=tmp_path)
    with pytest.raises(
        ValueError, match=r"no data 'xyz': give one of digits, .*tiny-imagenet, or a path that exists"
    ):
        load("xyz", cache=tmp_path)
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(
        ValueError, match=r"data.txt is neither an .npz, nor a folder, nor an official archive"
    ):
        load(str(tmp_path / "data.txt"))
