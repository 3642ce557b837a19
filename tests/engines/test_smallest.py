import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import run

from weince.engines.smallest import WORTH_THREADS, smallest


@given(
    rows=st.integers(1, 9),
    columns=st.one_of(st.integers(1, 300), st.integers(500, 5000)),  # more than are sorted in one piece
    share=st.floats(0, 1),
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_same_as_sorting_everything(rows, columns, share, ties, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(rows, columns, generator=generator, dtype=dtype)
    if ties:
        values = (values * 5).round()
    values[values > 0.9 * values.max()] = torch.inf
    k = max(1, round(share * columns))
    assert torch.equal(smallest(values, k), values.sort(dim=1).values[:, :k])


def test_rows_whose_smallest_values_stand_together():
    """All in one run of columns that is sorted at a time, instead of spread over all runs."""
    values = torch.cat([torch.rand(3, 600), 1 + torch.rand(3, 4000)], 1)
    assert torch.equal(smallest(values, 700), values.sort(dim=1).values[:, :700])


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_threads(rows):
    values = torch.rand(rows, WORTH_THREADS)
    assert torch.equal(smallest(values, 9), values.sort(dim=1).values[:, :9])


@pytest.mark.posix
def test_a_fork_has_threads_of_its_own():
    """It inherits the pool without its threads, and would wait for them for ever."""
    program = """
import multiprocessing
import torch
from weince.engines.smallest import WORTH_THREADS, smallest

def work():
    return smallest(torch.rand(4, 1 << 16), 3)

if __name__ == "__main__":
    torch.set_num_threads(2)
    work()
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(30)
    print("ended with", child.exitcode)
    child.kill()
"""
    done = run("-c", program)
    assert done.stdout == "ended with 0\n", done.stderr


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("k", [1, 5, 17])
def test_compiled(k):
    values = torch.rand(4, 17)
    assert torch.equal(torch.compile(smallest, fullgraph=True)(values, k), smallest(values, k))


def test_the_input_is_left_alone():
    values = torch.rand(3, 64)
    before = values.clone()
    smallest(values, 4)
    assert torch.equal(values, before)
