"""The modules as people use them: reductions, presets, learned temperatures, autocast, compile, functorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weince
from weince import (
    BatchShortfallLink,
    InfoNCELoss,
    LinkLoss,
    ShortfallLink,
    SoftmaxLink,
    TailConfig,
    Term,
    WeibitLoss,
    WeinceLoss,
    functional,
    released_terms,
)
from weince.losses import RELEASED_TAIL

MAKERS = {
    "infonce": InfoNCELoss,
    "weibit": lambda **options: WeibitLoss(2.0, **options),
    "paper": WeinceLoss.paper,
    "released": WeinceLoss.released,
}


def pairs(n=40, d=16, dtype=torch.float32, noise=0.4):
    z_i = torch.randn(n, d, dtype=dtype)
    return z_i, z_i + noise * torch.randn(n, d, dtype=dtype)


def gradients(loss, *rows):
    leaves = [row.clone().requires_grad_() for row in rows]
    value = loss(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves)


def test_infonce_is_cross_entropy_on_the_masked_matrix():
    z_i, z_j = pairs(dtype=torch.float64)

    def plain(a, b):
        rows = F.normalize(torch.cat([a, b]))
        logits = (rows @ rows.T / 0.2).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(80).roll(40))

    ours, theirs = gradients(InfoNCELoss(0.2), z_i, z_j), gradients(plain, z_i, z_j)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_infonce_is_the_nt_xent_of_pytorch_metric_learning():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    z_i, z_j = pairs(dtype=torch.float64)

    def theirs(a, b):
        return losses.NTXentLoss(temperature=0.2)(torch.cat([a, b]), torch.arange(40).repeat(2))

    torch.testing.assert_close(
        gradients(InfoNCELoss(0.2), z_i, z_j), gradients(theirs, z_i, z_j), rtol=1e-9, atol=1e-12
    )


def test_supervised_infonce_is_the_supcon_of_pytorch_metric_learning():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    z, _ = pairs(dtype=torch.float64)
    labels = torch.arange(40) % 7

    def ours(rows):
        return InfoNCELoss(0.2, candidates="labels")(rows, labels=labels)

    def theirs(rows):
        return losses.SupConLoss(temperature=0.2)(rows, labels)

    torch.testing.assert_close(gradients(ours, z), gradients(theirs, z), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("candidates", ["views", "cross", "clip"])
def test_without_weight_weince_is_infonce(candidates):
    z_i, z_j = pairs(dtype=torch.float64)
    never = WeinceLoss(0.2, tail=TailConfig(margin=1e9), candidates=candidates)
    assert never(z_i, z_j, return_stats=True).stats.lam.max() == 0
    torch.testing.assert_close(
        gradients(never, z_i, z_j),
        gradients(InfoNCELoss(0.2, candidates=candidates), z_i, z_j),
        rtol=1e-13,
        atol=1e-15,
    )


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("candidates", ["views", "cross", "clip"])
def test_reductions_agree(name, candidates):
    z_i, z_j = pairs(dtype=torch.float64)
    values = {
        reduction: MAKERS[name](candidates=candidates, reduction=reduction)(z_i, z_j)
        for reduction in ("mean", "sum", "none")
    }
    assert values["none"].shape == ((40,) if candidates == "cross" else (80,))
    torch.testing.assert_close(values["none"].sum(), values["sum"])
    torch.testing.assert_close(values["none"].mean(), values["mean"])


def test_anchors_without_a_positive_are_left_out():
    z, _ = pairs(6, dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1, 2, 3])
    each = InfoNCELoss(candidates="labels", reduction="none")(z, labels=labels)
    mean = InfoNCELoss(candidates="labels")(z, labels=labels)
    assert each[4:].tolist() == [0, 0]
    torch.testing.assert_close(mean, each[:4].mean())


def test_no_positive_at_all_gives_zero():
    z, _ = pairs(6)
    loss = WeinceLoss(candidates="labels")
    value, grads = gradients(lambda rows: loss(rows, labels=torch.arange(6)), z)
    assert value == 0
    assert grads[0].abs().max() == 0


def test_released_is_paper_with_other_settings_and_two_terms():
    z_i, z_j = pairs(dtype=torch.float64)
    built = WeinceLoss(
        0.5,
        tail=RELEASED_TAIL,
        extra=[
            Term(SoftmaxLink(0.5), weight=0.5, hardest=50),
            Term(BatchShortfallLink(), weight=0.5, hardest=50),
        ],
    )
    torch.testing.assert_close(gradients(WeinceLoss.released(), z_i, z_j), gradients(built, z_i, z_j))
    assert WeinceLoss.released(candidates="cross", reduction="none")(z_i, z_j).shape == (40,)
    bare = WeinceLoss.released(extra=())
    torch.testing.assert_close(bare(z_i, z_j), WeinceLoss(tail=RELEASED_TAIL)(z_i, z_j))


def test_the_released_terms_go_with_any_loss():
    z_i, z_j = pairs(dtype=torch.float64)
    softmax, shortfall = released_terms(0.2)
    total = InfoNCELoss(0.2, extra=[softmax, shortfall])(z_i, z_j)
    first = InfoNCELoss(0.2, extra=[softmax])(z_i, z_j)
    assert InfoNCELoss(0.2)(z_i, z_j) < first < total


def test_the_batch_slope_moves_in_training_only():
    z_i, z_j = pairs()
    loss = WeinceLoss.released()
    loss.eval()(z_i, z_j)
    assert loss.state_dict()["extra2_link.slope_now"] == 4.0
    loss.train()(z_i, z_j)
    moved = float(loss.state_dict()["extra2_link.slope_now"])
    assert moved != 4.0
    again = WeinceLoss.released()
    again.load_state_dict(loss.state_dict())
    assert float(again.extra[1].link.slope_now) == moved


@pytest.mark.parametrize("name", ["infonce", "paper", "released"])
@pytest.mark.parametrize("candidates", ["views", "clip"])
def test_a_learned_temperature_gets_its_gradient(name, candidates):
    z_i, z_j = pairs(dtype=torch.float64)
    temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    loss = MAKERS[name](temperature=temperature, candidates=candidates).eval()
    assert [id(p) for p in loss.parameters()] == [id(temperature)]
    (grad,) = torch.autograd.grad(loss(z_i, z_j), temperature)
    h = 1e-6
    up, down = (MAKERS[name](temperature=0.3 + s, candidates=candidates).eval()(z_i, z_j) for s in (h, -h))
    assert float(grad) == pytest.approx(float(up - down) / (2 * h), rel=1e-6)


def test_learned_parameters_of_any_link_are_found_and_trained():
    z_i, z_j = pairs(dtype=torch.float64)
    beta = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    tau = nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
    loss = LinkLoss(ShortfallLink(beta), extra=[Term(SoftmaxLink(tau), 0.5, 5)])
    assert set(loss.state_dict()) == {"beta", "extra1_temperature"}

    def value(b, t):
        return LinkLoss(ShortfallLink(b), extra=[Term(SoftmaxLink(t), 0.5, 5)])(z_i, z_j)

    grads = torch.autograd.grad(loss(z_i, z_j), [beta, tau])
    h = 1e-6
    assert float(grads[0]) == pytest.approx(float(value(2 + h, 0.4) - value(2 - h, 0.4)) / (2 * h), rel=1e-6)
    assert float(grads[1]) == pytest.approx(
        float(value(2.0, 0.4 + h) - value(2.0, 0.4 - h)) / (2 * h), rel=1e-6
    )


def test_statistics_are_detached_and_there_for_every_loss():
    z_i, z_j = (z.requires_grad_() for z in pairs())
    for make in MAKERS.values():
        output = make()(z_i, z_j, return_stats=True)
        assert output.loss.requires_grad
        assert all(value.shape == (80,) and not value.requires_grad for value in output.stats)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAKERS)
def test_autocast_stays_near_float32(name, dtype):
    z_i, z_j = pairs(64, 32)
    weight = (torch.randn(32, 32) / 32**0.5).requires_grad_()

    def run(enabled):
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            return MAKERS[name]()(z_i @ weight, z_j @ weight)

    plain, cast = run(False), run(True)
    assert cast.dtype == torch.float32
    assert abs(float(cast.detach() - plain.detach())) < 1e-2
    cast.backward()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_touch_the_scores(dtype):
    """Given float32 embeddings, the loss and its gradient are the same to the last bit inside autocast."""
    z_i, z_j = pairs(64, 32)
    plain = gradients(WeinceLoss(), z_i, z_j)
    with torch.autocast("cpu", dtype=dtype):
        cast = gradients(WeinceLoss(), z_i, z_j)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", MAKERS)
def test_compiled_without_a_graph_break(name):
    z_i, z_j = pairs()
    eager = gradients(MAKERS[name](), z_i, z_j)
    compiled = gradients(torch.compile(MAKERS[name](), fullgraph=True), z_i, z_j)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["infonce", "weibit", "paper"])
def test_works_in_torch_func_grad(name):
    z_i, z_j = pairs(dtype=torch.float64)
    loss = MAKERS[name]()
    _, (wanted, _) = gradients(loss, z_i, z_j)
    torch.testing.assert_close(torch.func.grad(lambda z: loss(z, z_j))(z_i), wanted)


def test_torch_func_grad_by_the_temperature():
    z_i, z_j = pairs(dtype=torch.float64)
    got = torch.func.grad(lambda t: functional.weince_loss(z_i, z_j, temperature=t))(
        torch.tensor(0.3).double()
    )
    h = 1e-6
    up, down = (functional.weince_loss(z_i, z_j, temperature=float(torch.tensor(0.3)) + s) for s in (h, -h))
    assert float(got) == pytest.approx(float(up - down) / (2 * h), rel=1e-6)


def test_copies_are_independent_and_equal():
    z_i, z_j = pairs()
    loss = WeinceLoss.released(temperature=nn.Parameter(torch.tensor(0.3)))
    twin = copy.deepcopy(loss)
    torch.testing.assert_close(twin(z_i, z_j), loss(z_i, z_j))
    with torch.no_grad():
        twin.temperature.fill_(0.1)
    assert loss.temperature.item() == pytest.approx(0.3)
    assert twin.link.temperature.item() == pytest.approx(0.1), "the copy trains its own temperature"


def test_moving_a_module_moves_what_it_learns():
    loss = WeinceLoss(temperature=nn.Parameter(torch.tensor(0.3))).to(torch.float64)
    assert loss.link.temperature.dtype == torch.float64
    loss = WeinceLoss.released().to("meta")
    assert loss.extra[1].link.slope_now.device.type == "meta"


def test_functions_and_modules_are_the_same():
    z_i, z_j = pairs()
    torch.testing.assert_close(
        functional.info_nce_loss(z_i, z_j, temperature=0.2), InfoNCELoss(0.2)(z_i, z_j)
    )
    torch.testing.assert_close(functional.weibit_loss(z_i, z_j, beta=2.0), WeibitLoss(2.0)(z_i, z_j))
    torch.testing.assert_close(functional.weince_loss(z_i, z_j), WeinceLoss.paper()(z_i, z_j))
    torch.testing.assert_close(
        functional.power_loss(z_i, z_j, alpha=3.0), LinkLoss(weince.PowerLink(3.0))(z_i, z_j)
    )
    torch.testing.assert_close(
        functional.blend_loss(z_i, z_j, lam=0.3, beta=2.0), LinkLoss(weince.BlendLink(0.3, 2.0))(z_i, z_j)
    )


def test_a_link_of_ones_own_trains():
    class Cubic(weince.Link):
        def logit(self, shortfall):
            return 5 * (1 - shortfall) ** 3

    z_i, z_j = pairs(dtype=torch.float64)
    ours = gradients(LinkLoss(Cubic()), z_i, z_j)

    def plain(a, b):
        rows = F.normalize(torch.cat([a, b]))
        logits = (5 * (rows @ rows.T) ** 3).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(80).roll(40))

    torch.testing.assert_close(ours, gradients(plain, z_i, z_j))


def test_duplicates_with_ids_are_no_negatives():
    """The same image twice in a batch: with ids, doubling a row leaves the others' losses as they were."""
    z_i, z_j = pairs(10, dtype=torch.float64)
    ids = torch.cat([torch.arange(10), torch.tensor([3])])
    doubled = InfoNCELoss(0.2, reduction="none")(
        torch.cat([z_i, z_i[3:4]]), torch.cat([z_j, z_j[3:4]]), ids=ids
    )
    alone = InfoNCELoss(0.2, reduction="none")(z_i, z_j)
    torch.testing.assert_close(doubled[3], alone[3])
    assert doubled[4] > alone[4]


def test_the_module_says_what_it_is():
    assert "WeinceLink(temperature=0.2" in repr(WeinceLoss(0.2))
