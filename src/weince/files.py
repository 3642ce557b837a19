"""Files that are whole or not there: written aside and moved into place."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def check_folder(folder: Path) -> None:
    """See that nothing but folders is where a folder is, or is to be made.

    Raises:
        ValueError: A file is.
    """
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"want a folder; got the file {place}: choose another path")


def check_writable(folder: Path) -> None:
    """Make a folder if need be and see that a file can be made in it, before the work whose result is to go there.

    Raises:
        OSError: It cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, prefix=".weince."):
        pass


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
    """Write a text as `write_aside` does: whole or not at all."""
    write_aside(path, lambda part: part.write_text(text, encoding="utf-8", newline="\n"), what)
