"""Shared by all tests: one thread per process, since tests run in parallel, and a fixed random seed."""

import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from programs import IMPORTED_ONCE

from weince.machine import avoid_broken_amx

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at import, so set it first
# A suite started in the background ignores SIGINT, and child processes inherit that; tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for programs that tests start
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no worker pool: each would import torch
LEAN = Path(__file__).parent / "lean"  # hides slow imports, and saves searches for garbage
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(LEAN), os.environ.get("PYTHONPATH")]))
multiprocessing.set_forkserver_preload(IMPORTED_ONCE)  # for every fork
AMX_AVOIDED = avoid_broken_amx()  # before the first product: many tests use bf16
settings.register_profile("weince", deadline=None, print_blob=True)
settings.load_profile("weince")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Do not search what is imported and collected for garbage: all of it stays, and a search takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long tests first: the other workers would wait for one that starts last.

    ``--dist worksteal`` gives every worker an equal part of the list to begin with: each part starts with long tests.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        part = long[worker::workers]
        size = (len(items) - len(ordered)) // (workers - worker)
        ordered += part + others[: size - len(part)]
        del others[: size - len(part)]
    items[:] = ordered


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, here in (("linux", sys.platform == "linux"), ("posix", sys.platform != "win32")):
        if not here and item.get_closest_marker(marker):
            pytest.skip(f"{marker}: not on {sys.platform}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for programs that they started."""
    return (os.cpu_count() or 1) + 1


def pytest_report_header() -> str | None:
    return AMX_AVOIDED


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
                 if (path := shutil.which(name))), None)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for the tests of pages."""
    if CHROMIUM is None:
        pytest.skip(
            "pages are judged as a browser shows them: install Chromium or Chrome, neither is on PATH"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """``made_once(name, fill)``: a folder that ``fill`` has filled.

    The first test process that asks for a name fills the folder, the others wait for it.
    """
    own = tmp_path_factory.getbasetemp()
    of_all = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def folder_of(name: str, fill: Callable[[Path], None]) -> Path:
        folder = of_all / name
        ended = folder / "ended.txt"
        try:
            folder.mkdir()
        except FileExistsError:
            until = time.monotonic() + 300
            while not ended.exists():
                assert time.monotonic() < until, f"another process did not fill {name} in 300 s"
                time.sleep(0.2)
        else:
            said = "it was interrupted"
            try:
                fill(folder)
                said = ""
            except Exception as error:
                said = repr(error)
                raise
            finally:
                ended.write_text(said)
        if why := ended.read_text():
            pytest.fail(f"another process could not fill {name}: {why}")
        return folder

    return folder_of


@pytest.fixture
def fresh_compiler() -> None:
    """Forget compiled code: torch recompiles a function only a limited number of times per process."""
    torch.compiler.reset()


@pytest.fixture
def root_kept_out() -> Iterator[None]:
    """Make folder permissions apply to root too: drop CAP_DAC_OVERRIDE during the test."""
    if sys.platform == "win32":
        pytest.skip("Windows has no folders that their owner may not write to")
    if os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root puts its capabilities down on Linux alone")
    libc = ctypes.CDLL(None)
    header, before = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, before)
    without = (ctypes.c_uint32 * 6)(before[0] & ~2, *before[1:])  # clears bit 1 of the effective set
    libc.capset(header, without)
    yield
    libc.capset(header, before)
