"""The modules as people use them: reductions, presets, learned temperatures, autocast, compile, functorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
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
from weince.scores import unit_rows

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


@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_terms_over_different_numbers_of_negatives(engine):
    z = torch.randn(2, 9, 4, dtype=torch.float64)
    few, fewer = Term(SoftmaxLink(0.2), hardest=5), Term(SoftmaxLink(0.3), weight=0.5, hardest=1)
    none, one, other, both = (
        gradients(InfoNCELoss(extra=extra, engine=engine), *z) for extra in ([], [few], [fewer], [few, fewer])
    )
    torch.testing.assert_close(both[0], one[0] + other[0] - none[0])
    for total, first, second, plain in zip(both[1], one[1], other[1], none[1], strict=True):
        torch.testing.assert_close(total, first + second - plain)


def test_extra_terms_may_come_from_a_generator():
    z_i, z_j = pairs()
    terms = [Term(SoftmaxLink(t), 0.5, 5) for t in (0.1, 0.2)]
    got = InfoNCELoss(0.2, extra=(term for term in terms))(z_i, z_j)
    torch.testing.assert_close(got, InfoNCELoss(0.2, extra=terms)(z_i, z_j), rtol=0, atol=0)


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


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_remembered_in_float64_unless_asked(name):
    """Some devices have no float64, and a module that holds some cannot be moved there."""
    z_i, z_j = pairs(dtype=torch.float64)
    loss = MAKERS[name]()
    loss(z_i, z_j)
    assert {value.dtype for value in loss.state_dict().values()} <= {torch.float32}
    wide = MAKERS[name]().double()
    torch.testing.assert_close(wide(z_i, z_j), MAKERS[name]()(z_i, z_j), rtol=1e-15, atol=0)
    assert {value.dtype for value in wide.state_dict().values()} <= {torch.float64}


def test_a_slope_saved_in_float64_is_read():
    loss = WeinceLoss.released()
    loss.load_state_dict({"extra2_link.slope_now": torch.tensor([5.1], dtype=torch.float64)})
    assert loss.extra2_link.slope_now.dtype == torch.float32
    assert float(loss.extra2_link.slope_now) == pytest.approx(5.1)


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
def test_compiled_without_a_graph_break(name, request):
    if name in ("paper", "released"):
        request.getfixturevalue("weince_compiles")
    z_i, z_j = pairs()
    eager = gradients(MAKERS[name](), z_i, z_j)
    compiled = gradients(torch.compile(MAKERS[name](), fullgraph=True), z_i, z_j)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_works_in_torch_func_grad(name):
    z_i, z_j = pairs(dtype=torch.float64)
    loss, twin = MAKERS[name](), MAKERS[name]()
    _, (wanted, _) = gradients(loss, z_i, z_j)
    torch.testing.assert_close(torch.func.grad(lambda z: twin(z, z_j))(z_i), wanted)
    torch.testing.assert_close(
        twin.state_dict(), loss.state_dict(), rtol=0, atol=0
    )  # released moved its slope


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
    for beta, endpoint in ((2.0, 1.0), (2.0, 1.3)):
        wanted = LinkLoss(weince.ShortfallLink(beta, endpoint))(z_i, z_j)
        torch.testing.assert_close(functional.weibit_loss(z_i, z_j, beta=beta, endpoint=endpoint), wanted)
        torch.testing.assert_close(WeibitLoss(beta, endpoint)(z_i, z_j), wanted)
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


@pytest.mark.parametrize("wide", [0, 1])
def test_of_two_precisions_the_wider_counts(wide):
    views = list(torch.randn(2, 6, 4))
    wanted = InfoNCELoss(candidates="clip")(*(z.double() for z in views))
    views[wide] = views[wide].double()
    torch.testing.assert_close(InfoNCELoss(candidates="clip")(*views), wanted, rtol=1e-6, atol=0)


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


@pytest.mark.parametrize("n", [40, 300])
def test_a_temperature_of_one_element_is_a_scalar(n):
    """Above 256 pairs the dense engine works in blocks, which must not cut it."""
    z_i, z_j = pairs(n)
    temperature = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
    loss = WeinceLoss(temperature)(z_i, z_j)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, WeinceLoss(0.3)(z_i, z_j))
    loss.backward()
    assert temperature.grad.shape == (1,)


def test_swapped_parameters_are_used():
    z_i, z_j = pairs()
    loss = InfoNCELoss(
        nn.Parameter(torch.tensor(0.3)), extra=released_terms(nn.Parameter(torch.tensor(0.4)))[:1]
    )
    wanted = InfoNCELoss(0.1, extra=[Term(SoftmaxLink(0.2), 0.5, 50)])(z_i, z_j)
    new = {"temperature": torch.tensor(0.1), "extra1_temperature": torch.tensor(0.2)}
    torch.testing.assert_close(torch.func.functional_call(loss, new, (z_i, z_j)), wanted)
    loss.load_state_dict(new, assign=True)
    torch.testing.assert_close(loss(z_i, z_j), wanted)
    assert "tensor(0.1000" in repr(loss)
    loss.temperature.data.fill_(-0.7)
    assert "SoftmaxLink(temperature=" in repr(loss)


def test_a_temperature_that_terms_share_is_saved_once_and_stays_shared(tmp_path):
    """Twice in the state, safetensors would refuse it, and a state that is assigned would part the two."""
    z_i, z_j = pairs()
    loss = WeinceLoss.released(nn.Parameter(torch.tensor(0.3)))
    assert set(loss.state_dict()) == {"temperature", "extra2_link.slope_now"}
    save_file(loss.state_dict(), tmp_path / "loss.safetensors")
    other = WeinceLoss.released(nn.Parameter(torch.tensor(0.5)))
    other.load_state_dict(load_file(tmp_path / "loss.safetensors"), assign=True)
    assert len(list(other.parameters())) == 1
    other.temperature = nn.Parameter(torch.tensor(0.2))
    torch.testing.assert_close(other(z_i, z_j), WeinceLoss.released(0.2)(z_i, z_j))


@pytest.mark.parametrize("old", [0.5, nn.Parameter(torch.tensor(0.3)), None])
@pytest.mark.parametrize("new", [0.2, nn.Parameter(torch.tensor(0.2)), None])
def test_another_link_takes_the_place_of_the_former(old, new):
    """With what it learns or remembers; None stands for a link that remembers."""
    z_i, z_j = pairs()
    first, second = (BatchShortfallLink() if t is None else SoftmaxLink(t) for t in (old, new))
    loss, wanted = LinkLoss(first), LinkLoss(copy.deepcopy(second))
    loss.link = second
    torch.testing.assert_close(loss(z_i, z_j), wanted(z_i, z_j), rtol=0, atol=0)
    torch.testing.assert_close(loss.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    assert [id(p) for p in loss.parameters()] == [id(p) for p in (new,) if isinstance(p, nn.Parameter)]


def test_other_terms_take_the_place_of_the_former():
    z_i, z_j = pairs()
    loss = WeinceLoss.released(nn.Parameter(torch.tensor(0.5)))
    loss.extra = (term for term in [Term(SoftmaxLink(nn.Parameter(torch.tensor(0.2))), 0.5, 5)])
    assert set(loss.state_dict()) == {"temperature", "extra1_temperature"}
    wanted = WeinceLoss(tail=loss.link.tail, extra=[Term(SoftmaxLink(0.2), 0.5, 5)])
    torch.testing.assert_close(loss(z_i, z_j), wanted(z_i, z_j))
    with pytest.raises(TypeError, match="wanted terms like"):
        loss.extra = [SoftmaxLink(0.2)]
    torch.testing.assert_close(loss(z_i, z_j), wanted(z_i, z_j))


def test_a_field_of_the_link_is_not_set_beside_it():
    """The link would not hear of it, and the loss stay as it was."""
    loss = InfoNCELoss(0.5)
    with pytest.raises(
        AttributeError, match=r"temperature belongs to the link.* set link = SoftmaxLink\(temp"
    ):
        loss.temperature = 0.1
    loss.temperature = loss.link.temperature  # a subclass may keep what it was made with
    learned = InfoNCELoss(nn.Parameter(torch.tensor(0.5)))
    learned.temperature = nn.Parameter(torch.tensor(0.1))
    z_i, z_j = pairs()
    torch.testing.assert_close(learned(z_i, z_j), InfoNCELoss(0.1)(z_i, z_j))
    learned.extra = ()
    torch.testing.assert_close(learned(z_i, z_j), InfoNCELoss(0.1)(z_i, z_j))


def test_a_second_derivative_is_refused():
    z_i, z_j = (z.requires_grad_() for z in pairs(dtype=torch.float64))
    temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    loss = WeinceLoss(temperature)(z_i, z_j)
    first = torch.autograd.grad(loss, [z_i, z_j, temperature], create_graph=True)
    torch.testing.assert_close(
        first, torch.autograd.grad(WeinceLoss(temperature)(z_i, z_j), [z_i, z_j, temperature])
    )
    for gradient in first:
        with pytest.raises(NotImplementedError, match="first derivative only"):
            torch.autograd.grad(gradient.sum(), [z_i, temperature], allow_unused=True, retain_graph=True)


@pytest.mark.parametrize(
    ("engine", "reduction"), [("dense", "mean"), ("chunked", "mean"), ("chunked", "none")]
)
@pytest.mark.parametrize("which", [0, 1])
def test_a_second_derivative_by_queries_or_keys_alone(which, engine, reduction):
    views = list(pairs())
    views[which].requires_grad_()
    loss = InfoNCELoss(candidates="cross", engine=engine, reduction=reduction)(*views).sum()
    (gradient,) = torch.autograd.grad(loss, views[which], create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        gradient.square().sum().backward()


def test_keys_without_gradient_cost_none():
    z_i, z_j = pairs()
    leaf = z_i.clone().requires_grad_()
    loss = WeinceLoss(candidates="cross")(leaf, z_j)
    _, (wanted, _) = gradients(WeinceLoss(candidates="cross"), z_i, z_j)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], wanted)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "fast"}, "engine must be one of auto, dense, chunked, fused; got 'fast'"),
        ({"gather": "rign"}, "gather must be True, False or \"ring\"; got 'rign'"),
        ({"reduction": "max"}, "reduction must be one of mean, sum, none; got 'max'"),
        ({"candidates": "view"}, "candidates must be one of .*; got 'view'"),
    ],
)
def test_a_wrong_option_is_refused_when_the_loss_is_made(options, said):
    with pytest.raises(ValueError, match=said):
        WeinceLoss(**options)


def test_a_weince_link_as_an_extra_term():
    z_i, z_j = pairs(dtype=torch.float64)
    both = InfoNCELoss(extra=[Term(weince.WeinceLink(0.2), 0.5)])(z_i, z_j)
    torch.testing.assert_close(both, InfoNCELoss()(z_i, z_j) + 0.5 * WeinceLoss(0.2)(z_i, z_j))
    with pytest.raises(ValueError, match="share a TailConfig; got 2"):
        WeinceLoss(extra=[Term(weince.WeinceLink(0.2, TailConfig(k=5)))])


class Given:
    """A survey of given shortfalls, for links that learn from the batch."""

    stats = None

    def __init__(self, shortfalls, most=None):
        self.shortfalls = shortfalls.sort().values
        self.most_pairs = most or len(shortfalls)

    def pairs(self):
        return torch.tensor(len(self.shortfalls))

    def smallest(self, count):
        return torch.cat([self.shortfalls, torch.full((count,), torch.inf)])[:count]


@pytest.mark.parametrize(
    ("shortfalls", "target"),
    [
        (torch.linspace(1e-3, 1, 4000) ** (1 / 3), 3.0),  # F(d) = d³
        (torch.linspace(1e-3, 1, 4000) ** (1 / 40), 16.0),  # steeper than the clamp
        (torch.linspace(1e-3, 1, 4000) ** 5, 0.5),  # flatter than the clamp
        (torch.full((4000,), 0.3), None),  # no spread: no fit
        (torch.cat([torch.full((1500,), 1e-4), torch.full((2500,), 1.0)]), None),  # R² too low
    ],
)
def test_the_batch_slope_is_clamped_and_doubtful_fits_are_left_out(shortfalls, target):
    link = BatchShortfallLink(share=1.0, momentum=0.0)
    link.bind(Given(shortfalls.double()))
    if target is None:
        assert float(link.slope_now) == 4.0
    else:
        assert float(link.slope_now) == pytest.approx(target, rel=0.02)


def test_the_batch_slope_of_fewer_pairs_than_the_fewest():
    """It is that of all pairs: as many of the smallest are dropped."""
    z, links = torch.randn(2, 12, 4), (BatchShortfallLink(), BatchShortfallLink(fewest=12 * 11))
    for link in links:
        LinkLoss(link, candidates="cross")(*z)
    assert links[0].slope_now == links[1].slope_now != 4


def test_a_step_of_training_does_not_change_what_was_evaluated_before():
    """The chunked engine reads the slope again in the backward pass."""
    z_i, z_j = torch.randn(2, 12, 4)
    loss = LinkLoss(BatchShortfallLink(), engine="chunked", reduction="none").eval()
    losses = loss(z_i.requires_grad_(), z_j)
    (wanted,) = torch.autograd.grad(losses.sum(), z_i, retain_graph=True)
    loss.train()(z_i, z_j)
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), z_i), (wanted,))


def test_the_batch_slope_and_its_link_know_their_eps():
    z = torch.randn(2, 12, 2)
    link = BatchShortfallLink(eps=0.3)
    got = LinkLoss(link, candidates="cross")(*z)
    slope = float(link.slope_now)
    assert slope not in (4.0, _slope_of(z.clone(), eps=1e-6))
    wanted = LinkLoss(ShortfallLink(slope, eps=0.3), candidates="cross")(*z)
    torch.testing.assert_close(got, wanted)


def _slope_of(z, **options):
    link = BatchShortfallLink(**options)
    LinkLoss(link, candidates="cross")(*z)
    return float(link.slope_now)


def test_the_batch_slope_counts_the_pairs_that_are_there():
    """Ignored pairs are padding, not points of the fit."""
    shortfalls = torch.rand(8000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** (1 / 3)
    alone, padded = BatchShortfallLink(share=0.5), BatchShortfallLink(share=0.5)
    alone.bind(Given(shortfalls))
    padded.bind(Given(shortfalls, most=20000))
    torch.testing.assert_close(alone.slope_now, padded.slope_now, rtol=1e-12, atol=0)


class Gentle(BatchShortfallLink):
    """Does not ask for exact shortfalls, so that nothing is looked at before it asks how many pairs there are."""

    near_cap = False


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("same", [None, 4])
def test_a_link_may_ask_for_pairs_that_nothing_else_wants(engine, same):
    z_i, z_j = pairs(dtype=torch.float64)
    ids = None if same is None else torch.arange(len(z_i)) // same
    gentle, usual = Gentle(fewest=100), BatchShortfallLink(fewest=100)
    got = LinkLoss(gentle, engine=engine)(z_i, z_j, ids=ids)
    torch.testing.assert_close(got, LinkLoss(usual)(z_i, z_j, ids=ids))
    torch.testing.assert_close(gentle.slope_now, usual.slope_now)
    assert usual.slope_now != 4


def test_short_float16_rows_keep_the_direction_of_their_gradient():
    """Its size is beyond float16: without care it would be inf."""
    generator = torch.Generator().manual_seed(0)
    z_i = unit_rows(torch.randn(16, 8, generator=generator, dtype=torch.float64))
    z_j = z_i.roll(1, 0) + 0.02 * torch.randn(16, 8, generator=generator, dtype=torch.float64)
    z_i, z_j = (1e-3 * z_i).half(), (1e-3 * unit_rows(z_j)).half()
    loss = WeibitLoss(50.0)
    _, half = gradients(loss, z_i, z_j)
    _, double = gradients(loss, z_i.double(), z_j.double())
    assert max(float(grad.abs().max()) for grad in double) > 65504
    for got, wanted in zip(half, double, strict=True):
        assert got.isfinite().all()
        assert F.cosine_similarity(got.double(), wanted).min() > 0.99
