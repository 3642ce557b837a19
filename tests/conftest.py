"""Shared by all tests: one thread each, since they run in parallel, and random numbers that repeat."""

import pytest
import torch
from hypothesis import settings

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
