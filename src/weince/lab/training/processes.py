"""Folder locks and process groups, for Windows and for other systems."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from weince.files import check_folder

PATIENCE = 30.0
"""Seconds to wait for a process to end after it was told to."""

if sys.platform == "win32":
    import msvcrt

    def try_lock(handle: int) -> bool:
        """Lock an open file; False if another process holds the lock. The lock ends with this process."""
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def own_group(lock: int) -> dict[str, Any]:
        """Popen options for a process that Ctrl-C in our terminal does not reach. Windows cannot pass on the lock."""
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}

    def end_group(process: "subprocess.Popen[bytes]") -> None:
        """Kill a process and those that it started, if it still runs. Windows cannot ask it to end."""
        if process.poll() is None:
            subprocess.run(
                ["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True, check=False
            )
            process.wait(PATIENCE)
else:
    import fcntl

    def try_lock(handle: int) -> bool:
        """Lock an open file; False if another process holds the lock.

        The lock ends with the last process that has the file open. Some network file systems have no locks: there
        no process holds one.
        """
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return not isinstance(error, BlockingIOError)
        return True

    def own_group(lock: int) -> dict[str, Any]:
        """Popen options for a process that Ctrl-C in our terminal does not reach, and that inherits the lock."""
        return {"start_new_session": True, "pass_fds": (lock,)}

    def end_group(process: "subprocess.Popen[bytes]") -> None:
        """End a process and those that it started, if it still runs: first ask, then kill."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)


def end_with_parent() -> None:
    """End this process, and those of its group, when the process that started it is gone, however it ended.

    Standard input must be a pipe that the other process holds open; if it is none, nothing happens.
    """

    def watch() -> None:
        while os.read(0, 1):  # empty once the other end is closed
            pass
        if sys.platform != "win32" and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # a run resumes from its checkpoint, whenever it is killed
        os._exit(1)

    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def waiting_lock(path: Path, pause: Callable[[], None]) -> Iterator[int]:
    """Wait for the lock on a file and hold it; yields the open file, which processes can inherit.

    Args:
        path: File to lock; it is created if it is missing, and stays.
        pause: Called while another process holds the lock, before it is asked for again; it may raise.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not try_lock(handle):
            pause()
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def training_lock(folder: Path) -> Iterator[None]:
    """Hold a run's folder while this process trains the run. A killed process lets go of it.

    The file is not ``.lock``: a sweep holds that one while its processes train.

    Raises:
        ValueError: Another process trains the run, or the path is not a folder.
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".train.lock"
    new = not path.exists()
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not try_lock(handle):
            raise ValueError(
                f"{folder}: another process trains this run; wait for it, or choose another --out"
            )
        try:
            yield
        except ValueError:  # a call that is refused leaves the folder as it was
            if new:
                with contextlib.suppress(OSError):  # Windows cannot remove an open file
                    path.unlink()
            raise
    finally:
        os.close(handle)
