"""Value and gradient of every loss, on every engine and layout, against its formula in float64 loops."""

import pytest
import torch
from bands import small_bands
from cases import CASES, LAYOUTS, by_formula, fixed, layout, learned, served
from torch.testing import assert_close

from weince.scores import unit_rows

ENGINES = ["dense", "chunked"]
SERVED = [(name, where) for name, case in CASES.items() for where in served(case)]


def uneven(length):
    return torch.linspace(-1, 2, length, dtype=torch.float64)


@pytest.mark.parametrize(("name", "where"), SERVED)
def test_value_and_gradient_are_those_of_the_formula(name, where):
    """Compare the loss of each anchor with learned parameters, and the mean with fixed ones."""
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


def spread_out(where, dtype):
    """Random rows for a layout, with every score at least 0.05 below the cap."""
    batch = layout(where)
    generator = torch.Generator().manual_seed(7)
    rows = {
        key: torch.randn(len(value), 24, generator=generator, dtype=torch.float64)
        for key, value in batch.arguments.items()
        if key in ("z_i", "z_j", "negatives")
    }
    if "z_j" in rows:
        rows["z_j"] = rows["z_i"] + 0.7 * rows["z_j"]
    rows = {key: value.to(dtype) for key, value in rows.items()}
    unit = unit_rows(torch.cat(list(rows.values())).double())
    assert float((unit @ unit.T).fill_diagonal_(0).max()) <= 0.95
    return rows, {key: value for key, value in batch.arguments.items() if key not in rows}


def value_and_gradient(loss, rows, roles, dtype):
    leaves = {key: value.to(dtype).requires_grad_() for key, value in rows.items()}
    value = loss(**leaves, **roles)
    return value.detach(), torch.autograd.grad(value, list(leaves.values()))


def relative(got, wanted):
    got, wanted = (torch.cat([grad.double().flatten() for grad in grads]) for grads in (got, wanted))
    return float((got - wanted).norm() / wanted.norm())


FEW = ["views, ignore", "cross, negatives, ids", "clip", "labels, two views, ids"]
NARROW = [
    *(
        (name, where, dtype)
        for name, where in SERVED
        if where in FEW
        for dtype in (torch.float32, torch.bfloat16)
    ),
    *(("paper", where, torch.float16) for where in FEW),
]


@pytest.mark.parametrize(("name", "where", "dtype"), NARROW, ids=str)
def test_narrow_inputs_cost_their_rounding_alone(name, where, dtype):
    """Compare with float64 on the same rounded inputs: the loss is as exact as in float32, and so is the gradient
    before it is rounded to the inputs' dtype."""
    rows, roles = spread_out(where, dtype)
    options = {"candidates": where.split(",")[0]}
    wide = CASES[name].make(fixed, engine="dense", **options).double()
    wanted, gradient = value_and_gradient(wide, rows, roles, torch.float64)
    stored = relative([grad.to(dtype) for grad in gradient], gradient)  # the rounding error
    for engine in ENGINES:
        with small_bands():
            loss = CASES[name].make(fixed, engine=engine, **options)
            got, found = value_and_gradient(loss, rows, roles, dtype)
        assert got.dtype == torch.float32
        assert abs(float(got) - float(wanted)) <= 1e-5 * max(1.0, abs(float(wanted)))
        assert relative(found, gradient) <= stored + 1e-4
