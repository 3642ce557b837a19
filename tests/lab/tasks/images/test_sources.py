"""The named data sets, from small archives in the official formats; downloads, and wrong archives."""

import dataclasses
import http.server
import io
import multiprocessing
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
from lab.tasks.images.official import (
    WRITERS,
    assert_equal,
    assert_well_formed,
    noise,
    one_line,
    pack,
    trust,
    write_cifar10,
    write_cifar100,
    write_imagenet32,
    write_stl10,
)

from weince.lab.tasks.images import data, sources
from weince.lab.tasks.images.data import load
from weince.lab.tasks.images.sources import SOURCES


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
    assert {path.name for path in cache.iterdir()} == {name, *files}  # and no temporary files
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
        warnings.simplefilter("error")  # torch warns about read-only arrays
        torch.from_numpy(loaded.train_images).zero_()
    assert_equal(load("cifar10", cache=tmp_path), want)


def test_another_size(tmp_path):
    want = write_stl10(tmp_path)
    loaded = load("stl10", cache=tmp_path, size=48)
    assert_well_formed(loaded)
    assert loaded.pretrain_images.shape == (3, 48, 48, 3)
    weights = np.zeros((48, 96))  # a triangle filter: 1, 3, 3, 1 around each pair, cut at the border
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


@pytest.mark.posix
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
    """A local web server for a folder."""
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
    # The second call needs no server.
    monkeypatch.setitem(SOURCES, "cifar10", sources.Source((), None))
    assert_equal(load("cifar10", cache=cache), want)


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


# --- wrong archives ------------------------------------------------------------------------------------------


def refuses(name: str, cache: Path, message: str) -> None:
    """The load fails with a one-line message, and leaves no partial files."""
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
    ("place", "value", "message"),
    [
        (8, 1, "is encrypted"),
        (10, 9, "compression method is not supported"),
    ],  # 9: Deflate64, as Windows writes it
)
def test_a_zip_that_python_cannot_unpack(place, value, message, tmp_path):
    path = tmp_path / "Imagenet32_train_npz.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("train.npz", "x")
    raw = bytearray(path.read_bytes())
    raw[place - 2] = raw[raw.index(b"PK\x01\x02") + place] = (
        value  # in the member's header and in the list of members
    )
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=f"{path.name} is damaged or not what its name says: .*{message}"):
        sources.unpack(path, tmp_path / "out")


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
    path.write_bytes(good)  # once repaired, it loads
    assert_equal(load(name, cache=tmp_path), want)


class Evil:
    def __reduce__(self):
        return (print, ("code from an archive ran",))


def test_nothing_is_unpickled(tmp_path, capsys):
    write_imagenet32(tmp_path)
    evil = np.array([Evil()], dtype=object)
    np.savez(tmp_path / "Imagenet32_val_npz" / "val_data.npz", data=evil, labels=evil)
    refuses("imagenet32", tmp_path, "pickled ones are not read")
    np.savez(tmp_path / "evil.npz", **dict.fromkeys(sources.SPLITS, evil))
    with pytest.raises(ValueError, match=r"evil.npz cannot be used: it holds pickled objects"):
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


@pytest.mark.posix
def test_a_disk_without_room_leaves_nothing(tmp_path):
    """A limit on the file size stands in for a full disk: both make a write fail."""
    import resource

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
