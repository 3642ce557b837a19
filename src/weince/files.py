"""Atomic writes: a file or folder is written under a temporary name and moved into place: it is complete or absent.

Also texts for CSV files.
"""

import os
import platform
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MOST_UNPACKED = 64
"""The most that an archive may grow when it is unpacked; beyond 64 MiB more is taken for a trap."""


def check_folder(folder: Path) -> None:
    """Check that a path can be a folder: neither it nor one of its parents is a file.

    Raises:
        ValueError: One of them is a file.
    """
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"want a folder; got the file {place}: choose another path")


def check_writable(folder: Path) -> None:
    """Create a folder if it is missing and check that it is writable; call this before work whose result goes there.

    Raises:
        OSError: The folder, or a file in it, cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, prefix=".weince."):
        pass


def check_file(path: Path) -> None:
    """Check that a path can be read to an end: it exists, and is no pipe and no device.

    Raises:
        ValueError: It cannot.
    """
    if not path.exists():
        raise ValueError(f"{path.name}: no such file or folder")
    if not (path.is_file() or path.is_dir()):
        raise ValueError(
            f"{path.name}: want a file; got a pipe or a device: write its content to a file first"
        )


def check_unpacked(path: Path) -> None:
    """Check that an archive, such as an .npz file, does not unpack to far more than it holds; it is not unpacked.

    Raises:
        ValueError: It says that it does.
    """
    if not path.is_file() or not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            declared, packed = sum(item.file_size for item in archive.infolist()), path.stat().st_size
    except (zipfile.BadZipFile, NotImplementedError):  # its reader says what is wrong with it
        return
    if declared > max(MOST_UNPACKED * packed, 2**26):
        raise ValueError(
            f"{path.name}: unpacks from {packed / 2**20:,.1f} to {declared / 2**20:,.0f} MiB, as it says itself, "
            f"which is more than {MOST_UNPACKED} times its size: save it without compression if that is right"
        )


_UNFINISHED = "-unfinished-"


def is_unfinished(name: str) -> bool:
    """Whether a name is that of a folder which `finished_folder` fills."""
    return name.startswith(".") and _UNFINISHED in name


@contextmanager
def finished_folder(out: Path, parts: Sequence[str]) -> Iterator[Path]:
    """A temporary folder to fill. At the end ``out`` holds its ``parts``; after an error it is as before.

    A new folder appears in one step. If ``out`` exists (it may be a mount or a link, which cannot be replaced), the
    parts are on its disk before the first of them is moved, and each is replaced in one step, in their order: whoever
    is killed meanwhile leaves each part old or new. What others left who were killed is removed.

    Raises:
        OSError: The folder cannot be written; the error names it.
    """
    place = out if out.exists() else out.absolute().parent
    place.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.resolve().name}{_UNFINISHED}{re.sub(r'[^A-Za-z0-9]', '', platform.node())}-"
    for folder in {place, out.absolute().parent}:
        _sweep(folder, prefix)
    work = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=place))
    try:
        yield work
        for path in work.rglob("*"):
            if path.is_file():  # a full disk may be told only now
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
        work.chmod(0o755)
        if place is not out:
            work.rename(out)
            return
        for name in parts:
            if (out / name).is_dir():
                (out / name).rename(work / f"old-{name}")
            if (work / name).exists():
                os.replace(work / name, out / name)
    except OSError as error:
        if error.filename is None or str(work) in str(error.filename):
            raise OSError(error.errno, error.strerror or str(error), str(out)) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sweep(folder: Path, prefix: str) -> None:
    """Remove unfinished folders of processes of this machine that are gone."""
    if os.name != "posix":
        return  # no signal asks there whether a process lives
    for path in folder.iterdir():
        number = path.name.removeprefix(prefix).partition("-")[0] if path.name.startswith(prefix) else ""
        if not number.isdecimal():
            continue
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # it lives and is another user's
            continue


def write_aside(path: Path, write: Callable[[Path], object], what: str = "file") -> None:
    """Call ``write`` with a temporary path beside ``path``, and move the result into place once it is on disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        write(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise OSError(f"the {what} {path} could not be written: {error}. Is the disk full?") from error
    finally:
        part.unlink(missing_ok=True)


def write_text_aside(path: Path, text: str, what: str = "file") -> None:
    """Write text to a file with :func:`write_aside`, completely or not at all."""
    write_aside(path, lambda part: part.write_text(text, encoding="utf-8", newline="\n"), what)


def csv_text(text: str) -> str:
    """A text as a cell that no spreadsheet takes for a formula: names and records of others may be any text."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
