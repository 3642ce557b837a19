"""Locks on a folder and groups of processes, which Windows and the other systems do differently."""

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

PATIENCE = 30.0
"""Seconds that a process gets to end when it is asked to."""

if sys.platform == "win32":
    import msvcrt

    def try_lock(handle: int) -> bool:
        """Lock an open file, unless another process has; the lock ends with this process."""
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def own_group(lock: int) -> dict[str, Any]:
        """Options for a process that Ctrl-C in our terminal does not reach. Windows cannot hand the lock on."""
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}

    def end_group(process: "subprocess.Popen[bytes]") -> None:
        """End a process and those it started, if it still runs. Windows cannot ask it to."""
        if process.poll() is None:
            subprocess.run(
                ["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True, check=False
            )
            process.wait(PATIENCE)
else:
    import fcntl

    def try_lock(handle: int) -> bool:
        """Lock an open file, unless another process has; the lock ends with the last process that has it open."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def own_group(lock: int) -> dict[str, Any]:
        """Options for a process that Ctrl-C in our terminal does not reach, and that inherits the lock."""
        return {"start_new_session": True, "pass_fds": (lock,)}

    def end_group(process: "subprocess.Popen[bytes]") -> None:
        """End a process and those it started, if it still runs: ask, then kill."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
