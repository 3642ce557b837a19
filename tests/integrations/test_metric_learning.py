"""Without the correction equal to SupConLoss of pytorch-metric-learning, with it to the naive reference."""

import copy
import logging

import pytest
import reference
import torch
from cases import CASES, Layout, by_formula, learned
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning import losses, miners, trainers
from torch import nn
from torch.utils.data import TensorDataset

import weince
from weince import TailConfig
from weince.integrations.metric_learning import LossAdapter, WeinceLoss

PAPER = {"softmax_term": 0, "shortfall_term": 0}
CLOSED = {"tail": TailConfig(margin=1e9), **PAPER}  # the AIC gate never opens: lam = 0
OPEN = {"tail": TailConfig(k=5, kappa_rho=3.0), **PAPER}


def rows(n, seed=0, d=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).requires_grad_()


def labels(n, kinds=4):
    return torch.arange(n) % kinds


def value_and_gradients(loss, *inputs, **options):
    value = loss(*inputs, **options)
    wanted = [x for x in (*inputs, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    return value.detach(), *torch.autograd.grad(value, wanted)


@pytest.mark.parametrize("temperature", [0.5, 0.07])
def test_without_the_correction_it_is_supcon(temperature):
    z, y = rows(14), labels(14)
    ours = value_and_gradients(WeinceLoss(temperature, **CLOSED), z, y)
    torch.testing.assert_close(ours, value_and_gradients(losses.SupConLoss(temperature), z, y))


def test_without_the_correction_it_is_supcon_with_references():
    z, y, ref, ref_y = rows(9), labels(9), rows(13, 1), labels(13)
    ours = value_and_gradients(WeinceLoss(0.2, **CLOSED), z, y, ref_emb=ref, ref_labels=ref_y)
    theirs = value_and_gradients(losses.SupConLoss(0.2), z, y, ref_emb=ref, ref_labels=ref_y)
    torch.testing.assert_close(ours, theirs)


def test_labels_that_are_bools_are_labels_with_references_too():
    z, y, ref, ref_y = rows(9), labels(9) > 0, rows(13, 1), labels(13) > 0
    loss = WeinceLoss(0.2, **CLOSED)
    ours = value_and_gradients(loss, z, y, ref_emb=ref, ref_labels=ref_y)
    torch.testing.assert_close(
        ours, value_and_gradients(loss, z, y.long(), ref_emb=ref, ref_labels=ref_y.long())
    )


def roles(y, ref_y, same):
    def role(i, j):
        if same and i == j:
            return "none"
        return "positive" if y[i] == ref_y[j] else "negative"

    return [[role(i, j) for j in range(len(ref_y))] for i in range(len(y))]


@settings(max_examples=60)
@given(
    y=st.lists(st.integers(0, 3), min_size=2, max_size=12),
    ref_y=st.none() | st.lists(st.integers(0, 4), min_size=2, max_size=12),
    engine=st.sampled_from(["dense", "chunked"]),
    seed=st.integers(0, 99),
)
def test_the_correction_is_that_of_the_definition(y, ref_y, engine, seed):
    """Cases: a label that occurs once, a label that no reference has, few and many negatives."""
    same = ref_y is None
    z = rows(len(y), seed)
    ref = z if same else rows(len(ref_y), seed + 1)
    others = {} if same else {"ref_emb": ref, "ref_labels": torch.tensor(ref_y)}
    kinds = roles(y, y if same else ref_y, same)
    found = WeinceLoss(0.3, **OPEN, engine=engine)(z, torch.tensor(y), **others)
    if not any("positive" in row for row in kinds):
        assert found == 0
        return
    wanted, _ = reference.weince(z, ref, kinds, 0.3, OPEN["tail"])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    leaves = [z] if same else [z, ref]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), rtol=1e-7, atol=1e-9
    )


def test_it_is_the_core_over_labels():
    z, y = rows(40), labels(40)
    found = value_and_gradients(WeinceLoss(0.3, **OPEN), z, y)
    core = weince.WeinceLoss(0.3, **OPEN, candidates="labels")
    torch.testing.assert_close(found, value_and_gradients(lambda z: core(z, labels=y), z))
    plain = WeinceLoss(0.3, **CLOSED)(z, y).detach()
    assert abs(float(found[0] - plain)) > 1e-3


def test_the_released_preset():
    z, y = rows(40), labels(40)
    loss = WeinceLoss(0.3)
    core = weince.WeinceLoss.released(0.3, candidates="labels")
    torch.testing.assert_close(loss(z, y), core(z, labels=y))
    torch.testing.assert_close(dict(loss.loss.named_buffers()), dict(core.named_buffers()))


LABELLED = {name: case for name, case in CASES.items() if case.labels}


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("name", LABELLED)
def test_any_loss_over_labels_with_and_without_references(name, engine):
    """Compare with the formula, also for a label that occurs once and a label that no reference has."""
    case = LABELLED[name]
    y, ref_y = [0, 1, 2, 0, 1, 2, 0, 3, 4], [0, 1, 2, 0, 1, 2, 1, 4, 5, 5, 6]
    for same in (True, False):
        z = rows(len(y))
        ref = z if same else rows(len(ref_y), 1)
        others = {} if same else {"ref_emb": ref, "ref_labels": torch.tensor(ref_y)}
        loss = case.make(learned, candidates="labels", engine=engine).double()
        got = LossAdapter(loss)(z, torch.tensor(y), **others)
        wanted = by_formula(case, Layout({}, "labels", [(z, ref, roles(y, y if same else ref_y, same))])).mean
        leaves = [z] if same else [z, ref]
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves), rtol=1e-9, atol=1e-10
        )


def test_only_losses_over_labels_are_adapted():
    with pytest.raises(TypeError, match=r"loss must be a loss of weince, like DCLLoss\(\); got SupConLoss"):
        LossAdapter(losses.SupConLoss())
    for options in ({}, {"candidates": "labels", "reduction": "none"}):
        with pytest.raises(
            ValueError, match='wanted a loss with candidates="labels" and reduction="mean"; got'
        ):
            LossAdapter(weince.DCLLoss(**options))


def test_a_learned_temperature_and_copies():
    z, y = rows(12), labels(12)
    loss = WeinceLoss(nn.Parameter(torch.tensor(0.3)), **OPEN)
    twin = copy.deepcopy(loss)
    for each in (loss, twin):
        each(z, y, ref_emb=rows(9, 1), ref_labels=labels(9)).backward()
    (one,), (other,) = loss.parameters(), twin.parameters()
    assert one is not other
    assert one.grad.abs() > 0
    assert torch.equal(one.grad, other.grad)
    twin.load_state_dict(loss.state_dict())


def test_a_single_row_counts_nothing_as_theirs():
    z = rows(1)
    value, gradient = value_and_gradients(WeinceLoss(), z, torch.tensor([3]))
    assert value == losses.SupConLoss()(z, torch.tensor([3])) == 0
    assert gradient.abs().max() == 0


def test_a_batch_of_a_single_label_has_the_loss_of_the_formula():
    """Their loss is 0, since their code skips a batch without negatives."""
    z, y = rows(5), torch.zeros(5, dtype=torch.int64)
    others = 1 - torch.eye(5, dtype=torch.float64)
    u = nn.functional.normalize(z)
    logits = (u @ u.T / 0.2).where(others.bool(), -torch.inf)
    wanted = -(logits.log_softmax(1).where(others.bool(), 0.0).sum(1) / 4).mean()
    torch.testing.assert_close(WeinceLoss(0.2, **CLOSED)(z, y), wanted)
    assert losses.SupConLoss(0.2)(z, y) == 0


@pytest.mark.parametrize(("n", "references"), [(0, None), (4, 0), (0, 3), (0, 0)])
def test_no_rows_and_a_memory_that_is_still_empty_count_nothing_as_theirs(n, references):
    z, y = rows(n), labels(n)
    ref = {} if references is None else {"ref_emb": rows(references, 1), "ref_labels": labels(references)}
    for loss in (WeinceLoss(), losses.SupConLoss()):
        z.grad = None
        value = loss(z, y, **ref)
        value.backward()
        assert value == 0
        assert z.grad.shape == z.shape
        assert not z.grad.any()


def test_in_their_trainer():
    """Training with their trainer lowers the SupCon loss."""
    torch.manual_seed(1)
    y = torch.arange(64) % 4
    data = TensorDataset(torch.randn(4, 8)[y] + torch.randn(64, 8), y)
    trunk = nn.Linear(8, 4)

    def apart():
        return losses.SupConLoss(0.2)(trunk(data.tensors[0]), y).item()

    before = apart()
    trainers.MetricLossOnly(
        models={"trunk": trunk},
        optimizers={"trunk_optimizer": torch.optim.Adam(trunk.parameters(), 0.01)},
        batch_size=32,
        loss_funcs={"metric_loss": WeinceLoss(0.2)},
        dataset=data,
        data_device="cpu",
        dataloader_num_workers=0,
    ).train(num_epochs=5)
    assert apart() < before - 0.2


def test_bad_input():
    z, y = rows(8), labels(8)
    mined = miners.MultiSimilarityMiner()(z, y)
    with pytest.raises(
        ValueError, match=r"takes no indices_tuple: it sums over all negatives of an anchor.*got 4 tensors"
    ):
        WeinceLoss()(z, y, mined)
    for wrapper in (losses.SelfSupervisedLoss, lambda loss: losses.CrossBatchMemory(loss, 6)):
        with pytest.raises(Exception, match="not supported for WeinceLoss"):  # they keep a list of names
            wrapper(WeinceLoss())
    with pytest.raises(ValueError, match="wants a label for every row; got no labels"):
        WeinceLoss()(z)
    with pytest.raises(ValueError, match="wants a label for every row; got no ref_labels"):
        WeinceLoss()(z, y, ref_emb=rows(5))
    for bad in (rows(5, d=7), rows(5).float()):
        with pytest.raises(
            ValueError, match=r"ref_emb must have the same width and dtype; got torch.float64"
        ):
            WeinceLoss()(z, y, ref_emb=bad, ref_labels=labels(5))
    with pytest.raises(ValueError, match="must be finite; got NaN or inf in 1 of 8 rows, first in row 2"):
        WeinceLoss()(
            z.detach().index_fill(0, torch.tensor([2]), torch.nan), y, ref_emb=rows(5), ref_labels=labels(5)
        )
    with pytest.raises(TypeError, match="labels must be an integer tensor"):
        WeinceLoss()(z, y.double(), ref_emb=rows(5), ref_labels=labels(5))


def test_options_hold_with_references_too(caplog):
    z, y, ref, ref_y = rows(8), labels(8), rows(9, 1), labels(9)
    broken = z.detach().index_fill(0, torch.tensor([2]), torch.nan)
    assert WeinceLoss(check_finite=False)(broken, y, ref_emb=ref, ref_labels=ref_y).isnan()
    with caplog.at_level(logging.DEBUG, logger="weince"):
        WeinceLoss(engine="chunked")(z, y, ref_emb=ref, ref_labels=ref_y)
    assert [record.getMessage() for record in caplog.records] == ["engine chunked: asked for"]


def test_reference_labels_of_the_same_rows_count():
    z, labels = torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 3
    other = labels.roll(1)
    theirs = losses.SupConLoss(temperature=0.1)(z, labels, ref_emb=z, ref_labels=other)
    ours = LossAdapter(weince.SupConLoss(0.1))(z, labels, ref_emb=z, ref_labels=other)
    torch.testing.assert_close(ours, theirs)
