"""Shared by all tests: one thread each, since they run in parallel, and random numbers that repeat."""

import os
import signal

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, so before anything can import it
# Started in the background, the suite would hand this on to commands under test, which must hear it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
settings.register_profile("weince", deadline=None, print_blob=True)
settings.load_profile("weince")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> None:
    """Forget what was compiled before: one process may only compile a function so many times."""
    torch.compiler.reset()
