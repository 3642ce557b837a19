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
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import DoNothingReducer
from pytorch_metric_learning.utils.distributed import get_indices_tuple
from torch import nn
from torch.utils.data import TensorDataset

import weince
from weince import TailConfig
from weince.integrations.metric_learning import CrossBatchMemory, MetricLossAdapter, SelfSupervisedLoss

PAPER = {"softmax_term": 0, "shortfall_term": 0}
CLOSED = {"tail": TailConfig(margin=1e9), **PAPER}  # the AIC gate never opens: lam = 0
OPEN = {"tail": TailConfig(k=5, kappa_rho=3.0), **PAPER}


def adapted(temperature=0.5, **options):
    return MetricLossAdapter(weince.WeinceLoss(temperature, candidates="labels", **options))


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
    ours = value_and_gradients(adapted(temperature, **CLOSED), z, y)
    torch.testing.assert_close(ours, value_and_gradients(losses.SupConLoss(temperature), z, y))


def test_without_the_correction_it_is_supcon_with_references():
    z, y, ref, ref_y = rows(9), labels(9), rows(13, 1), labels(13)
    ours = value_and_gradients(adapted(0.2, **CLOSED), z, y, ref_emb=ref, ref_labels=ref_y)
    theirs = value_and_gradients(losses.SupConLoss(0.2), z, y, ref_emb=ref, ref_labels=ref_y)
    torch.testing.assert_close(ours, theirs)


def test_labels_that_are_bools_are_labels_with_references_too():
    z, y, ref, ref_y = rows(9), labels(9) > 0, rows(13, 1), labels(13) > 0
    loss = adapted(0.2, **CLOSED)
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
    found = adapted(0.3, **OPEN, engine=engine)(z, torch.tensor(y), **others)
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
    found = value_and_gradients(adapted(0.3, **OPEN), z, y)
    core = weince.WeinceLoss(0.3, **OPEN, candidates="labels")
    torch.testing.assert_close(found, value_and_gradients(lambda z: core(z, labels=y), z))
    plain = adapted(0.3, **CLOSED)(z, y).detach()
    assert abs(float(found[0] - plain)) > 1e-3


def test_the_released_preset():
    z, y = rows(40), labels(40)
    loss = adapted(0.3)
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
        got = MetricLossAdapter(loss)(z, torch.tensor(y), **others)
        wanted = by_formula(case, Layout({}, "labels", [(z, ref, roles(y, y if same else ref_y, same))])).mean
        leaves = [z] if same else [z, ref]
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, leaves), rtol=1e-9, atol=1e-10
        )


def test_only_losses_over_labels_are_adapted():
    with pytest.raises(TypeError, match=r"loss must be a loss of weince, like DCLLoss\(\); got SupConLoss"):
        MetricLossAdapter(losses.SupConLoss())
    for options in ({}, {"candidates": "labels", "reduction": "none"}):
        with pytest.raises(
            ValueError, match='wanted a loss with candidates="labels" and reduction="mean"; got'
        ):
            MetricLossAdapter(weince.DCLLoss(**options))


def test_a_learned_temperature_and_copies():
    z, y = rows(12), labels(12)
    loss = adapted(nn.Parameter(torch.tensor(0.3)), **OPEN)
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
    value, gradient = value_and_gradients(adapted(), z, torch.tensor([3]))
    assert value == losses.SupConLoss()(z, torch.tensor([3])) == 0
    assert gradient.abs().max() == 0


def test_a_batch_of_a_single_label_has_the_loss_of_the_formula():
    """Their loss is 0, since their code skips a batch without negatives."""
    z, y = rows(5), torch.zeros(5, dtype=torch.int64)
    others = 1 - torch.eye(5, dtype=torch.float64)
    u = nn.functional.normalize(z)
    logits = (u @ u.T / 0.2).where(others.bool(), -torch.inf)
    wanted = -(logits.log_softmax(1).where(others.bool(), 0.0).sum(1) / 4).mean()
    torch.testing.assert_close(adapted(0.2, **CLOSED)(z, y), wanted)
    assert losses.SupConLoss(0.2)(z, y) == 0


@pytest.mark.parametrize(("n", "references"), [(0, None), (4, 0), (0, 3), (0, 0)])
def test_no_rows_and_a_memory_that_is_still_empty_count_nothing_as_theirs(n, references):
    z, y = rows(n), labels(n)
    ref = {} if references is None else {"ref_emb": rows(references, 1), "ref_labels": labels(references)}
    for loss in (adapted(), losses.SupConLoss()):
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
        loss_funcs={"metric_loss": adapted(0.2)},
        dataset=data,
        data_device="cpu",
        dataloader_num_workers=0,
    ).train(num_epochs=5)
    assert apart() < before - 0.2


def test_bad_input():
    z, y = rows(8), labels(8)
    with pytest.raises(ValueError, match="a label for every row, or an indices_tuple; labels is None"):
        adapted()(z)
    with pytest.raises(ValueError, match="a label for every row, or an indices_tuple; ref_labels is None"):
        adapted()(z, y, ref_emb=rows(5))
    with pytest.raises(ValueError, match=r"the width of embeddings, \(8, 6\); got \(5, 7\)"):
        adapted()(z, y, ref_emb=rows(5, d=7), ref_labels=labels(5))
    with pytest.raises(ValueError, match="must be finite; got NaN or inf in 1 of 8 rows, first in row 2"):
        adapted()(
            z.detach().index_fill(0, torch.tensor([2]), torch.nan), y, ref_emb=rows(5), ref_labels=labels(5)
        )
    with pytest.raises(TypeError, match="labels must be an integer tensor"):
        adapted()(z, y.double(), ref_emb=rows(5), ref_labels=labels(5))


def test_options_hold_with_references_too(caplog):
    z, y, ref, ref_y = rows(8), labels(8), rows(9, 1), labels(9)
    broken = z.detach().index_fill(0, torch.tensor([2]), torch.nan)
    assert adapted(check_finite=False)(broken, y, ref_emb=ref, ref_labels=ref_y).isnan()
    with caplog.at_level(logging.DEBUG, logger="weince"):
        adapted(engine="chunked")(z, y, ref_emb=ref, ref_labels=ref_y)
    assert [record.getMessage() for record in caplog.records] == ["engine chunked: asked for"]


def test_reference_labels_of_the_same_rows_count():
    z, labels = torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 3
    other = labels.roll(1)
    theirs = losses.SupConLoss(temperature=0.1)(z, labels, ref_emb=z, ref_labels=other)
    ours = MetricLossAdapter(weince.SupConLoss(0.1))(z, labels, ref_emb=z, ref_labels=other)
    torch.testing.assert_close(ours, theirs)


def chosen_roles(n, m, pairs):
    """Roles of all pairs of an anchor and a reference, as an ``indices_tuple`` of pairs says them."""
    kinds = [["none"] * m for _ in range(n)]
    for kind, anchors, others in (("positive", *pairs[:2]), ("negative", *pairs[2:])):
        for a, other in zip(anchors.tolist(), others.tolist(), strict=True):
            kinds[a][other] = kind
    return kinds


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("name", LABELLED)
def test_any_loss_over_pairs_that_somebody_chose(name, engine):
    """Compare with the formula. Some anchors have no positive, some no negative, and labels play no part."""
    case, (n, m) = LABELLED[name], (6, 15)
    generator = torch.Generator().manual_seed(5)
    z, ref = rows(n), rows(m, 1)
    kinds = torch.randint(3, (n, m), generator=generator)
    kinds[0] = kinds[0].clamp_min(1)  # no positive
    kinds[1] = kinds[1].masked_fill(kinds[1] == 1, 2)  # no negative
    pairs = (*torch.where(kinds == 0), *torch.where(kinds == 1))
    loss = case.make(learned, candidates="labels", engine=engine).double()
    got = MetricLossAdapter(loss)(z, None, pairs, ref)
    wanted = by_formula(case, Layout({}, "labels", [(z, ref, chosen_roles(n, m, pairs))])).mean
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad(got, [z, ref]), torch.autograd.grad(wanted, [z, ref]), rtol=1e-9, atol=1e-10
    )


MINERS = {
    "pairs": miners.MultiSimilarityMiner(epsilon=-0.8),
    "triplets": miners.TripletMarginMiner(margin=0.05, type_of_triplets="semihard"),
    "hardest": miners.BatchHardMiner(),
    "far": miners.PairMarginMiner(pos_margin=0.5, neg_margin=-0.2, distance=CosineSimilarity()),
}


@pytest.mark.parametrize("name", MINERS)
@pytest.mark.parametrize("references", [False, True])
def test_miners_choose_as_for_theirs(name, references):
    """Their mean leaves out losses of 0, such as that of an anchor with one positive and no negative."""
    z, y = rows(20), labels(20)
    others = {"ref_emb": rows(25, 1), "ref_labels": labels(25)} if references else {}
    chosen = MINERS[name](z, y, **others)

    def theirs(z):
        per_anchor = losses.SupConLoss(0.2, reducer=DoNothingReducer())(z, y, chosen, **others)["loss"]
        anchors = chosen[0].unique()
        assert len(anchors) > 1
        return per_anchor["losses"].sum() / len(anchors)

    ours = value_and_gradients(lambda z: MetricLossAdapter(weince.SupConLoss(0.2))(z, y, chosen, **others), z)
    torch.testing.assert_close(ours, value_and_gradients(theirs, z))
    every = MetricLossAdapter(weince.SupConLoss(0.2))(z, y, **others).detach()
    assert abs(float(ours[0] - every)) > 1e-3  # the miner has an effect


def test_a_miner_that_chooses_nothing_leaves_a_loss_of_0():
    z, y, nothing = rows(8), labels(8), (torch.empty(0, dtype=torch.int64),) * 4
    value, gradient = value_and_gradients(
        lambda z: MetricLossAdapter(weince.SupConLoss(0.2))(z, y, nothing), z
    )
    assert value == losses.SupConLoss(0.2)(z, y, nothing) == 0
    assert not gradient.any()


@pytest.mark.parametrize("miner", [None, "pairs", "triplets"])
def test_a_memory_of_batches_is_theirs(miner):
    """Six batches of 8 through a memory of 20: it fills, and wraps around in the middle of a batch."""
    memories = [
        make(
            loss,
            embedding_size=6,
            memory_size=20,
            miner=None if miner is None else copy.deepcopy(MINERS[miner]),
        )
        for make, loss in (
            (CrossBatchMemory, MetricLossAdapter(weince.SupConLoss(0.2))),
            (losses.CrossBatchMemory, losses.SupConLoss(0.2)),
        )
    ]
    for batch in range(6):
        z, y = rows(8, batch), labels(8, 3)
        ours, theirs = (value_and_gradients(lambda z, each=each, y=y: each(z, y), z) for each in memories)
        torch.testing.assert_close(ours, theirs)
    assert ours[0] > 0
    marked = torch.arange(8) % 2 == 0  # MoCo: half of the rows go to the memory, the others are anchors
    torch.testing.assert_close(*(each(z, y, enqueue_mask=marked) for each in memories))


def test_their_wrappers_still_take_their_own_losses_and_no_others():
    CrossBatchMemory(losses.NTXentLoss(), 6)
    SelfSupervisedLoss(losses.NTXentLoss())
    for wrapper in (SelfSupervisedLoss, lambda loss: CrossBatchMemory(loss, 6)):
        with pytest.raises(Exception, match="not supported for ProxyNCALoss"):
            wrapper(losses.ProxyNCALoss(4, 6))


@pytest.mark.parametrize("symmetric", [True, False])
def test_two_views_without_labels_are_theirs(symmetric):
    z, other = rows(9), rows(9, 1)
    ours = SelfSupervisedLoss(
        MetricLossAdapter(weince.InfoNCELoss(0.2, candidates="labels")), symmetric=symmetric
    )
    for theirs in (losses.NTXentLoss(0.2), losses.SupConLoss(0.2)):
        wanted = value_and_gradients(losses.SelfSupervisedLoss(theirs, symmetric=symmetric), z, other)
        torch.testing.assert_close(value_and_gradients(ours, z, other), wanted)
    if symmetric:
        core = value_and_gradients(weince.InfoNCELoss(0.2), z, other)
        torch.testing.assert_close(value_and_gradients(ours, z, other), core)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("memory", [None, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, memory, chosen):
    """The loss of the rounded rows in float32, whose gradient is rounded once; a memory may have another dtype."""
    z, y, loss = (
        rows(12).detach().to(dtype).requires_grad_(),
        labels(12),
        MetricLossAdapter(weince.SupConLoss(0.2)),
    )
    others = {} if memory is None else {"ref_emb": rows(9, 1).detach().to(memory), "ref_labels": labels(9)}
    exact = {name: value.double() if name == "ref_emb" else value for name, value in others.items()}
    double = z.detach().double().requires_grad_()
    indices = miners.TripletMarginMiner(margin=0.5)(double, y, **exact) if chosen else None
    value, gradient = value_and_gradients(lambda z: loss(z, y, indices, **others), z)
    wanted, slope = value_and_gradients(lambda z: loss(z, y, indices, **exact), double)
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)
    assert (gradient.double() - slope).abs().max() <= torch.finfo(dtype).eps * slope.abs().max()


def test_the_callers_loss_stays_as_it_is():
    core = weince.SupConLoss(nn.Parameter(torch.tensor(0.2)))
    before = {name: value for name, value in vars(core).items() if not name.startswith("_")}
    loss = MetricLossAdapter(core)
    loss(rows(9), labels(9), ref_emb=rows(7, 1), ref_labels=labels(7)).backward()
    assert core.temperature.grad.abs() > 0
    assert core.gather is True
    assert before == {name: value for name, value in vars(core).items() if not name.startswith("_")}


def test_the_pairs_of_their_efficient_wrapper():
    """It passes the local rows, all rows, and the pairs without those of a row with itself."""
    z, everything, y = rows(6), rows(15, 1), labels(15)
    chosen = get_indices_tuple(y[:6], y)
    theirs, ours = losses.SupConLoss(0.2), MetricLossAdapter(weince.SupConLoss(0.2))
    found, wanted = (
        value_and_gradients(lambda z, each=each: each(z, y[:6], chosen, everything, y), z)
        for each in (ours, theirs)
    )
    torch.testing.assert_close(found, wanted)
