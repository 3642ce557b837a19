import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weince.engines.smallest import SAMPLE, least, smallest


@given(
    rows=st.integers(1, 9),
    columns=st.one_of(st.integers(1, 300), st.integers(500, 5000)),  # the larger sizes need several runs
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
    """A few of the sorted runs hold most of the smallest values, so cutting each run to its share would lose some."""
    values = torch.cat([torch.rand(3, 600), 1 + torch.rand(3, 4000)], 1)
    assert torch.equal(smallest(values, 700), values.sort(dim=1).values[:, :700])


@pytest.mark.parametrize("smaller", [1.0, 0.001])
@pytest.mark.parametrize("count", [10, SAMPLE])
def test_the_least_of_many(count, smaller):
    """Most values are dropped by a bound from a sample. A sample of smaller values makes it too low: then none is."""
    values = torch.rand(4 * SAMPLE)
    values[::4] *= smaller
    assert torch.equal(least(values, count), values.sort().values[:count])


@given(length=st.integers(1, 3000), share=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_the_least_of_any_number(length, share, seed):
    values = torch.rand(length, generator=torch.Generator().manual_seed(seed))
    count = round(share * length)
    assert torch.equal(least(values, count), values.sort().values[:count])


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
