"""If labels, ids or ignored pairs leave nothing to contrast, the loss is 0 and one warning says why."""

import importlib
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from weince import DCLLoss, InfoNCELoss, WeinceLoss, info_nce_loss

choose = importlib.import_module("weince.engines.choose")  # weince.engines.choose itself is the function
Z = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
ONE_GROUP, GROUPS, DIFFERENT = torch.zeros(6, dtype=torch.int64), torch.arange(6) // 2, torch.arange(6)


@pytest.fixture(autouse=True)
def _warnings_anew():
    choose.warn_once.cache_clear()


@pytest.fixture
def silence():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="weince")
        yield


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("return_stats", "make"), [(False, WeinceLoss), (True, InfoNCELoss), (False, DCLLoss)]
)
@pytest.mark.parametrize(
    ("candidates", "roles", "names"),
    [
        ("labels", {"labels": DIFFERENT}, "labels"),
        ("views", {"ids": ONE_GROUP}, "ids"),
        ("clip", {"ids": ONE_GROUP}, "ids"),
        ("cross", {"ignore": ~torch.eye(6, dtype=torch.bool)}, "ignore"),
        ("cross", {"ids": GROUPS, "ignore": GROUPS.unsqueeze(1) != GROUPS}, "ids and ignore"),
    ],
)
def test_one_warning_names_what_was_given(candidates, roles, names, reduction, return_stats, make):
    rows = Z[:1] if candidates == "labels" else Z
    loss = make(candidates=candidates, reduction=reduction)
    said = f"the loss of a batch is 0; it seems that its {names} leave no anchor a positive and a negative"
    with pytest.warns(UserWarning, match=said):
        output = loss(*rows, **roles, return_stats=return_stats)
    assert not (output.loss if return_stats else output).any()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="weince")
        loss(*rows, **roles)


@pytest.mark.usefixtures("silence")
def test_no_warning_while_one_anchor_has_both():
    labels = torch.tensor([0, 0, 1, 2, 3, 4])
    assert InfoNCELoss(candidates="labels")(Z[0], labels=labels) > 0
    assert InfoNCELoss()(*Z, ids=GROUPS) > 0
    assert InfoNCELoss(candidates="labels")(*Z, labels=DIFFERENT) > 0  # the other view is a positive


@pytest.mark.usefixtures("silence")
def test_a_loss_too_small_for_float32_is_not_taken_for_one_without_negatives():
    ends = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert InfoNCELoss(0.01)(ends, ends) == 0


def test_a_function_reads_no_value(silence):
    assert info_nce_loss(*Z, ids=ONE_GROUP) == 0


def test_a_module_reads_its_first_batch_alone(silence):
    loss = InfoNCELoss()
    loss(*Z)  # without ids, labels or ignore there is no check
    with pytest.raises(UserWarning, match="its ids leave no anchor"):
        loss(*Z, ids=ONE_GROUP)
    choose.warn_once.cache_clear()
    assert loss(*Z, ids=ONE_GROUP) == 0


def test_without_values_nothing_is_read():
    loss = InfoNCELoss()
    z = torch.empty(6, 4, device="meta")
    assert loss(z, z, ids=ONE_GROUP.to("meta")).is_meta
    with pytest.warns(UserWarning, match="its ids leave no anchor"):  # this is the first batch with values
        loss(*Z, ids=ONE_GROUP)


def test_nothing_is_read_of_a_fake_tensor():
    """A fake CPU tensor must not be read. (check_finite would read values on the CPU, so it is off.)"""
    loss = InfoNCELoss(check_finite=False, engine="chunked")
    with FakeTensorMode():
        z = torch.empty(6, 4)
        assert loss(z, z, ids=torch.zeros(6, dtype=torch.int64)).shape == ()
    with pytest.warns(UserWarning, match="its ids leave no anchor"):  # this is the first batch with values
        loss(*Z, ids=ONE_GROUP)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_batch_that_was_read_compiles_nothing_again():
    loss, counter = InfoNCELoss(), CompileCounter()
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for call in (compiled, loss, compiled):
        call(*Z, ids=GROUPS)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_it_is_one_graph_without_the_warning(silence):
    loss = torch.compile(InfoNCELoss(), fullgraph=True, backend="eager")
    assert loss(*Z, ids=ONE_GROUP) == 0
