"""The support table lists all losses, layouts and engines, and a cell that fails without a reason is an error."""

import os
from typing import get_args

import programs
import pytest

import weince
from weince.engines.choose import EngineName
from weince.layouts import Candidates
from weince.losses.base import ContrastiveLoss


@pytest.fixture(scope="module")
def script():
    before = dict(os.environ)
    yield programs.script("benchmarks/support.py")
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def found(script):
    here = ("dense", "chunked")
    return {
        (*cell, feature): script.attempt(*cell, feature)
        for cell in script.cells(here)
        for feature in script.FEATURES
    }


def test_every_loss_layout_and_engine_is_there(script):
    made = {type(one.make()).__name__ for one in script.LOSSES.values()}
    public = {name for name in weince.__all__ if isinstance(getattr(weince, name), type)}
    losses = {name for name in public if issubclass(getattr(weince, name), ContrastiveLoss)}
    assert made == losses - {"ContrastiveLoss"}
    assert set(script.LAYOUTS) == set(get_args(Candidates))
    assert set(script.ENGINES) == set(get_args(EngineName)) - {"auto"}


def test_nothing_is_missing_without_a_reason(script, found):
    assert script.faults(found, ("dense", "chunked")) == []


@pytest.mark.parametrize("outcome", [None, "no", "the value is 1, that of the dense engine 2"])
def test_a_cell_without_a_reason_is_a_fault(script, found, outcome):
    cell = ("InfoNCELoss", "views", "chunked", "ids")
    changed = {key: value for key, value in found.items() if key != cell}
    if outcome is not None:
        changed[cell] = outcome
    (fault,) = script.faults(changed, ("dense", "chunked"))
    assert fault.startswith("InfoNCELoss, views, chunked, ids: wanted 'yes'; got")


def test_a_reason_that_no_longer_holds_is_a_fault(script, found):
    cell = ("DHELLoss", "clip", "dense", "plain")
    assert len(script.faults(found | {cell: "yes"}, ("dense", "chunked"))) == 1
