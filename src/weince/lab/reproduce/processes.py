"""Folder locks and process groups, for Windows and for other systems."""

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

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

        The lock ends with the last process that has the file open.
        """
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
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
