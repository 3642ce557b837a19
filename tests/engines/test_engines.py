"""Every loss on every engine against its formula in float64 loops: value and gradient, on every layout."""

from contextlib import contextmanager

import pytest
import torch
from cases import CASES, LAYOUTS, by_formula, fixed, layout, learned, served
from torch.testing import assert_close

from weince.engines import chunked

ENGINES = ["dense", "chunked"]
SERVED = [(name, where) for name, case in CASES.items() for where in served(case)]


@contextmanager
def small_bands():
    """Several bands of several tiles, the last of each smaller."""
    before = chunked.CPU_BAND, chunked.BLOCK
    chunked.CPU_BAND, chunked.BLOCK = 160, 50
    try:
        yield
    finally:
        chunked.CPU_BAND, chunked.BLOCK = before


def uneven(length):
    return torch.linspace(-1, 2, length, dtype=torch.float64)


@pytest.mark.parametrize(("name", "where"), SERVED)
def test_value_and_gradient_are_those_of_the_formula(name, where):
    """Anchor by anchor, with what the loss learns; and the mean, with numbers in its place."""
    case, batch = CASES[name], layout(where)
    wanted = by_formula(case, batch)
    weights = uneven(len(wanted.each))
    leaves = [*batch.leaves, *wanted.parameters]
    each = torch.autograd.grad((wanted.each * weights).sum(), leaves, retain_graph=True)
    mean = torch.autograd.grad(wanted.mean, batch.leaves)
    for engine in ENGINES:
        options = {"candidates": batch.candidates, "engine": engine}
        with small_bands():
            loss = case.make(learned, reduction="none", **options).double()
            own = dict(loss.named_parameters())
            got = loss(**batch.arguments)
            assert_close(got, wanted.each, rtol=1e-10, atol=1e-10, msg=lambda m, e=engine: f"{e}: {m}")
            found = torch.autograd.grad(
                (got * weights).sum(), [*batch.leaves, *(own[key] for key in case.parameters)]
            )
            assert_close(found, each, rtol=1e-10, atol=1e-10, msg=lambda m, e=engine: f"{e}: {m}")
            got = case.make(fixed, **options).double()(**batch.arguments)
            assert_close(got, wanted.mean, rtol=1e-10, atol=1e-10)
            assert_close(torch.autograd.grad(got, batch.leaves), mean, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_without_meaning_is_refused(name):
    case = CASES[name]
    for where in set(LAYOUTS) - set(served(case)):
        candidates = where.split(",")[0]
        with pytest.raises(ValueError, match=r"wants (one positive per anchor|candidates=\"views\"); got"):
            case.make(fixed, candidates=candidates)
