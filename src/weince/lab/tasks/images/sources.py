"""The named data sets: download and verify their official archives, convert them once, then memory-map them."""

import gzip
import io
import itertools
import json
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weince.lab.tasks.images.formats import (
    Array,
    Content,
    Rows,
    read_cifar10,
    read_cifar100,
    read_imagenet32,
    read_stl10,
    read_tiny_imagenet,
)
from weince.progress import passing_bar

SPLITS = ("train_images", "train_labels", "test_images", "test_labels")
BLOCK = 1024  # rows written at a time


@dataclass(frozen=True)
class Archive:
    """One official file. A file without a reliable checksum has no ``url`` and must be downloaded by hand."""

    file: str
    folder: str  # what it unpacks to
    url: str = ""
    md5: str = ""


@dataclass(frozen=True)
class Source:
    """The archives of a data set, and a function that reads arrays from the unpacked folders."""

    archives: tuple[Archive, ...]
    read: Callable[[list[Path]], Content]


SOURCES = {
    "cifar10": Source(
        (
            Archive(
                "cifar-10-binary.tar.gz",
                "cifar-10-batches-bin",
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        read_cifar10,
    ),
    "cifar100": Source(
        (
            Archive(
                "cifar-100-binary.tar.gz",
                "cifar-100-binary",
                "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
            ),
        ),
        read_cifar100,
    ),
    "stl10": Source(
        (
            Archive(
                "stl10_binary.tar.gz",
                "stl10_binary",
                "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
                "91f7769df0f17e558f3565bffb0c7dfb",
            ),
        ),
        read_stl10,
    ),
    # image-net.org gives these only to registered users, and public copies have different checksums.
    "imagenet32": Source(
        (
            Archive("Imagenet32_train_npz.zip", "Imagenet32_train_npz"),
            Archive("Imagenet32_val_npz.zip", "Imagenet32_val_npz"),
        ),
        read_imagenet32,
    ),
    "tiny-imagenet": Source(
        (
            Archive(
                "tiny-imagenet-200.zip",
                "tiny-imagenet-200",
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "90528d7ca1a48142e341f4ef8d21d0de",
            ),
        ),
        read_tiny_imagenet,
    ),
}


Check = Callable[[dict[str, Array], list[str]], object]


def open_named(name: str, cache: Path, check: Check) -> tuple[dict[str, Array], list[str]]:
    """The arrays of a data set, memory-mapped, and its class names; converts the archives on first use.

    Args:
        name: A key of :data:`SOURCES`.
        cache: The folder with the archives, and with one folder of arrays for each data set.
        check: Called with the arrays and class names after a conversion; raises if they are not valid.
    """
    ready = cache / name
    if not ready.exists():
        cache.mkdir(parents=True, exist_ok=True)
        convert(SOURCES[name], cache, ready, check)
    try:
        return open_arrays(ready)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{ready} is damaged: remove it, and it will be made anew ({error})") from error


def open_arrays(folder: Path) -> tuple[dict[str, Array], list[str]]:
    # Copy on write: torch.from_numpy wants writable arrays, and the files must not change.
    arrays = {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in folder.glob("*.npy")}
    missing = [key for key in SPLITS if key not in arrays]
    if missing:
        raise ValueError(f"no {missing[0]}.npy")
    return arrays, json.loads((folder / "class_names.json").read_text(encoding="utf-8"))


def convert(source: Source, cache: Path, ready: Path, check: Check) -> None:
    """Write each array as ``.npy`` into the folder ``ready``, which appears only once it is complete."""
    # Windows does not remove a mapped file, and after an error the reader's arrays may still be mapped.
    with tempfile.TemporaryDirectory(
        dir=cache, prefix=f".{ready.name}-", ignore_cleanup_errors=True
    ) as scratch:
        folders = [unpacked(archive, cache, Path(scratch)) for archive in source.archives]
        converted = Path(scratch) / "made"
        converted.mkdir()
        write_content(converted, source.read(folders))
        check(*open_arrays(converted))
        try:
            converted.rename(ready)
        except OSError:
            if not ready.exists():  # otherwise another process was first
                raise


def write_content(folder: Path, content: Content) -> None:
    """Write the arrays and the class names of a data set."""
    for key, rows in content.arrays.items():
        write_rows(folder / f"{key}.npy", rows)
    (folder / "class_names.json").write_text(json.dumps(list(content.class_names)), encoding="utf-8")


def write_rows(path: Path, rows: Rows) -> None:
    """Write an array part by part. (With a memory map, a full disk would kill the process by a signal.)"""
    parts = iter(rows.parts)
    first = next(parts)
    header = {"descr": first.dtype.str, "fortran_order": False, "shape": rows.shape}
    written = 0
    try:
        with path.open("wb") as file, passing_bar(f"converting {path.stem}", rows.shape[0]) as advance:
            np.lib.format.write_array_header_1_0(file, header)
            for part in itertools.chain([first], parts):
                for start in range(0, len(part), BLOCK):
                    block = np.ascontiguousarray(part[start : start + BLOCK])
                    file.write(block.data)
                    written += len(block)
                    advance(len(block))
    except OSError as error:  # such as a full disk
        raise OSError(f"cannot write {path}: {error}") from error
    if written != rows.shape[0]:
        raise ValueError(f"{path.stem} has {written} rows where its labels promise {rows.shape[0]}")


def unpacked(archive: Archive, cache: Path, scratch: Path) -> Path:
    """The unpacked folder of an archive: the one in ``cache``, or else unpacked into ``scratch``."""
    if (cache / archive.folder).is_dir():
        return cache / archive.folder
    target = scratch / archive.folder
    unpack(fetch(archive, cache), target)
    inner = target / archive.folder
    return inner if inner.is_dir() else target


def fetch(archive: Archive, cache: Path) -> Path:
    """The archive in the cache, downloaded if it is missing; its checksum is verified."""
    import pooch
    from requests import RequestException

    path = cache / archive.file
    by_hand = f"put {archive.file}, or the folder {archive.folder} that it unpacks to, into {cache}"
    if path.exists():
        checksum = pooch.file_hash(str(path), alg="md5") if archive.md5 else ""
        if checksum != archive.md5:
            raise ValueError(
                f"{path} has the MD5 {checksum}, the official file {archive.md5}: remove it, or {by_hand}"
            )
        return path
    if not archive.url:
        raise ValueError(
            f"{archive.file} is given to registered users of image-net.org only: get it there and {by_hand}"
        )
    bar = DownloadBar(f"downloading {archive.file}")
    downloader = pooch.HTTPDownloader(progressbar=bar)
    try:
        pooch.retrieve(
            archive.url, f"md5:{archive.md5}", fname=archive.file, path=cache, downloader=downloader
        )
    except RequestException as error:
        reason = (
            f"status {error.response.status_code}" if error.response is not None else type(error).__name__
        )
        raise OSError(f"cannot download {archive.url} ({reason}): {by_hand}") from error
    except ValueError as error:  # pooch raises this for a wrong checksum
        raise ValueError(f"what {archive.url} gave is not the official file ({error}): {by_hand}") from error
    finally:
        bar.close()
    return path


class DownloadBar:
    """A progress bar with the interface that pooch expects."""

    def __init__(self, description: str) -> None:
        self.description, self.total = description, 0
        self.stack = ExitStack()
        self.advance: Callable[[int], None] | None = None

    def update(self, done: int) -> None:
        if self.advance is None:  # pooch sets the total before the first update
            self.advance = self.stack.enter_context(passing_bar(self.description, self.total))
        self.advance(done)

    def reset(self) -> None:
        """Do nothing: pooch calls this to fill its bar at the end, and ours is closed then."""

    def close(self) -> None:
        self.stack.close()


def unpack(path: Path, folder: Path) -> None:
    """Unpack a tar.gz or a zip; nothing is written outside ``folder``, whatever the member names are."""
    what = f"unpacking {path.name}"
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as pack, passing_bar(what, len(pack.namelist())) as advance:
                for member in pack.infolist():
                    pack.extract(member, folder)  # extract drops a leading slash and ".."
                    advance(1)
        else:
            with (
                passing_bar(what, path.stat().st_size) as advance,
                Counted(path, advance) as file,
                tarfile.open(fileobj=file, mode="r|gz", bufsize=2**20) as tar,
            ):
                tar.extractall(folder, filter="data")  # the filter refuses them
    # zipfile raises a RuntimeError for encrypted members, and for compressions that it does not know
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        RuntimeError,
    ) as error:
        raise ValueError(f"{path} is damaged or not what its name says: {error}") from error


class Counted(io.FileIO):
    """A file that reports to ``advance`` how many bytes were read."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        super().__init__(path)
        self.advance = advance

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.advance(len(data))
        return data
