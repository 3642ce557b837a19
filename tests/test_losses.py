"""The loss modules in use: reductions, presets, learned temperatures, autocast, compile, functorch."""

import copy
import math
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import reference
import torch
import torch.nn.functional as F
import typed
from cases import CASES, Mine, fixed, learned
from ranks import Sloped
from safetensors.torch import load_file, save_file
from torch import nn

import weince
from weince import (
    DCLLoss,
    FunctionLink,
    InfoNCELoss,
    LinkLoss,
    ShortfallLink,
    SigLIPLoss,
    SoftmaxLink,
    TailConfig,
    WeibitLoss,
    WeinceLoss,
)
from weince.engines.choose import warn_once
from weince.losses import kl_ball
from weince.losses import weince as terms
from weince.losses.temperature import TemperatureLoss
from weince.losses.weince import RELEASED_TAIL, RunningSlope
from weince.scores import unit_rows
from weince.sums import Batch

MAKERS = {
    name: lambda case=case, **options: case.make(fixed, **{"candidates": "views"} | options)
    for name, case in CASES.items()
}
ANYWHERE = [name for name, case in CASES.items() if not case.views_only]
WITH_TEMPERATURE = [name for name, case in CASES.items() if list(case.parameters) == ["temperature"]]


def pairs(n=40, d=16, dtype=torch.float32, noise=0.4):
    z_i = torch.randn(n, d, dtype=dtype)
    return z_i, z_i + noise * torch.randn(n, d, dtype=dtype)


def gradients(loss, *rows):
    leaves = [row.clone().requires_grad_() for row in rows]
    value = loss(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves)


@pytest.mark.parametrize("candidates", ["views", "cross", "clip"])
def test_without_weight_weince_is_infonce(candidates):
    z_i, z_j = pairs(dtype=torch.float64)
    never = WeinceLoss.paper(0.2, tail=TailConfig(margin=1e9), candidates=candidates)
    assert never(z_i, z_j, return_stats=True).stats.lam.max() == 0
    torch.testing.assert_close(
        gradients(never, z_i, z_j),
        gradients(InfoNCELoss(0.2, candidates=candidates), z_i, z_j),
        rtol=1e-13,
        atol=1e-15,
    )


@pytest.mark.parametrize("name", ANYWHERE)
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


def test_no_positive_at_all_gives_zero():
    z, _ = pairs(6)
    loss = WeinceLoss(candidates="labels")
    value, grads = gradients(lambda rows: loss(rows, labels=torch.arange(6)), z)
    assert value == 0
    assert grads[0].abs().max() == 0


def test_the_bare_loss_is_the_released_one():
    z_i, z_j = pairs(dtype=torch.float64)
    built = WeinceLoss(0.5, tail=RELEASED_TAIL, softmax_term=0.5, shortfall_term=0.5)
    for loss in (WeinceLoss(), WeinceLoss.released()):
        torch.testing.assert_close(gradients(loss, z_i, z_j), gradients(copy.deepcopy(built), z_i, z_j))
    assert WeinceLoss(candidates="cross", reduction="none")(z_i, z_j).shape == (40,)
    bare = WeinceLoss.released(softmax_term=0, shortfall_term=0)
    torch.testing.assert_close(bare(z_i, z_j), WeinceLoss.paper(tail=RELEASED_TAIL)(z_i, z_j))


def test_the_presets_are_what_they_say():
    assert WeinceLoss.paper().tail == TailConfig()
    assert WeinceLoss.negatives_only().tail == TailConfig(positive="softmax")
    for loss in (WeinceLoss.paper(), WeinceLoss.negatives_only()):
        assert (loss.softmax_term, loss.shortfall_term, list(loss.buffers())) == (0, 0, [])
    assert (WeinceLoss().softmax_term, WeinceLoss().shortfall_term) == (0.5, 0.5)


@pytest.mark.parametrize("make", [partial(WeinceLoss, tail=None), WeinceLoss.paper])
def test_the_released_terms_go_with_either_loss(make):
    z_i, z_j = pairs(dtype=torch.float64)
    plain, softmax, shortfall, both = (
        make(0.2, softmax_term=a, shortfall_term=b)(z_i, z_j)
        for a, b in ((0, 0), (0.4, 0), (0, 0.6), (0.4, 0.6))
    )
    torch.testing.assert_close(both - plain, (softmax - plain) + (shortfall - plain))
    assert plain < softmax < both
    assert plain < shortfall


def test_the_batch_slope_moves_in_training_only():
    z_i, z_j = pairs()
    loss = WeinceLoss()
    loss.eval()(z_i, z_j)
    (name,) = loss.state_dict()
    assert loss.state_dict()[name] == 4.0
    loss.train()(z_i, z_j)
    moved = float(loss.state_dict()[name])
    assert moved != 4.0
    again = WeinceLoss()
    again.load_state_dict(loss.state_dict())
    assert float(again.terms.slope.slope_now) == moved


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_remembered_in_float64_unless_asked(name):
    """State must not be float64 by default: such a module cannot be moved to a device without float64."""
    z_i, z_j = pairs(dtype=torch.float64)
    loss = MAKERS[name]()
    loss(z_i, z_j)
    assert {value.dtype for value in loss.state_dict().values()} <= {torch.float32}
    wide = MAKERS[name]().double()
    tolerance = 1e-6 if name == "SigLIP" else 1e-15  # its log_scale is made in float32
    torch.testing.assert_close(wide(z_i, z_j), MAKERS[name]()(z_i, z_j), rtol=tolerance, atol=0)
    assert {value.dtype for value in wide.state_dict().values()} <= {torch.float64}


def test_a_slope_saved_in_float64_is_read():
    loss = WeinceLoss()
    loss.load_state_dict({"terms.slope.slope_now": torch.tensor([5.1], dtype=torch.float64)})
    assert loss.terms.slope.slope_now.dtype == torch.float32
    assert float(loss.terms.slope.slope_now) == pytest.approx(5.1)


@pytest.mark.parametrize("name", WITH_TEMPERATURE)
def test_a_learned_temperature_is_the_modules_and_trains(name):
    """An optimizer finds and moves the temperature. ``engines/test_engines.py`` checks its gradient."""
    z_i, z_j = pairs(dtype=torch.float64)
    loss = CASES[name].make(learned, candidates="views")
    (temperature,) = loss.parameters()
    assert next(iter(loss.state_dict())) == "temperature"
    before, first = float(temperature.detach()), float(loss(z_i, z_j).detach())
    optimizer = torch.optim.SGD(loss.parameters(), 1e-4)
    for _ in range(5):
        optimizer.zero_grad()
        loss.eval()(z_i, z_j).backward()
        optimizer.step()
    assert float(temperature.detach()) != before
    assert float(loss(z_i, z_j).detach()) < first


def test_learned_parameters_of_any_link_are_found_and_trained():
    z_i, z_j = pairs(dtype=torch.float64)
    beta, k = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (2.0, 3.0))
    loss = LinkLoss(ShortfallLink(beta))
    assert set(loss.state_dict()) == {"beta"}
    own = LinkLoss(FunctionLink(lambda s, k: k * s, k=k))
    assert set(own.state_dict()) == {"k"}
    (by_beta,), (by_k,) = (torch.autograd.grad(one(z_i, z_j), list(one.parameters())) for one in (loss, own))
    h = 1e-6
    up, down = (LinkLoss(ShortfallLink(2.0 + step))(z_i, z_j) for step in (h, -h))
    assert float(by_beta) == pytest.approx(float(up - down) / (2 * h), rel=1e-6)
    up, down = (LinkLoss(lambda s, step=step: (3.0 + step) * s)(z_i, z_j) for step in (h, -h))
    assert float(by_k) == pytest.approx(float(up - down) / (2 * h), rel=1e-6)


def test_a_temperature_that_is_computed_passes_its_gradient_on():
    """CLIP, for example, learns the logarithm of the scale."""
    z_i, z_j = pairs(dtype=torch.float64)
    log_scale = nn.Parameter(torch.tensor(1.2, dtype=torch.float64))
    (grad,) = torch.autograd.grad(DCLLoss((-log_scale).exp())(z_i, z_j), log_scale)
    h = 1e-6
    up, down = (DCLLoss(math.exp(-1.2 - step))(z_i, z_j) for step in (h, -h))
    assert float(grad) == pytest.approx(float(up - down) / (2 * h), rel=1e-6)


@pytest.mark.parametrize("name", WITH_TEMPERATURE)
def test_a_scale_that_ran_off_is_put_back(name):
    """Like openai/CLIP, clamp the parameter itself, so that its gradient can move it back."""
    z_i, z_j = pairs()
    make = type(CASES[name].make(fixed, candidates="views"))
    temperature = nn.Parameter(torch.tensor(0.001))
    loss = make(temperature, max_scale=20, candidates="views")
    got = loss(z_i, z_j)
    assert float(temperature.detach()) == pytest.approx(0.05)
    torch.testing.assert_close(got, make(0.05, candidates="views")(z_i, z_j))
    (grad,) = torch.autograd.grad(got, temperature)
    assert grad.abs() > 0
    kept = nn.Parameter(torch.tensor(0.4))
    make(kept, max_scale=20, candidates="views")(z_i, z_j)
    assert float(kept.detach()) == pytest.approx(0.4)


def test_a_bound_does_not_disturb_a_backward_pass_of_several_batches():
    z_i, z_j = pairs()
    for loss in (weince.HCLLoss(nn.Parameter(torch.tensor(0.01)), max_scale=20), SigLIPLoss(max_scale=10)):
        (loss(z_i, z_j) + loss(z_j, z_i)).backward()
        assert all(value.grad.isfinite() for value in loss.parameters())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_bound_under_what_rewrites_the_loss():
    z_i, z_j = pairs()
    wanted = gradients(InfoNCELoss(0.05), z_i, z_j)
    loss = InfoNCELoss(nn.Parameter(torch.tensor(0.001)), max_scale=20)
    got = gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"), z_i, z_j)
    torch.testing.assert_close(got, wanted)
    assert float(loss.temperature.detach()) == pytest.approx(0.05)
    loss.temperature.data.fill_(0.001)
    grad = torch.func.grad(lambda z: loss(z, z_j))(z_i)
    torch.testing.assert_close(grad, wanted[1][0])
    low = torch.func.grad(lambda t: torch.func.functional_call(loss, {"temperature": t}, (z_i, z_j)))(
        torch.tensor(0.3)
    )
    assert low.isfinite()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_learned_temperature_that_several_sums_share_compiles():
    z, labels = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    loss = weince.SupConLoss(nn.Parameter(torch.tensor(0.3)))
    found = [
        torch.autograd.grad(compute(z, labels=labels), loss.temperature)
        for compute in (loss, torch.compile(loss, fullgraph=True, backend="eager"))
    ]
    torch.testing.assert_close(*found)


def test_evaluation_bounds_the_scale_and_leaves_the_parameter():
    z_i, z_j = pairs()
    temperature = nn.Parameter(torch.tensor(0.001))
    loss = InfoNCELoss(temperature, max_scale=20).eval()
    torch.testing.assert_close(loss(z_i, z_j), InfoNCELoss(0.05)(z_i, z_j))
    assert float(temperature.detach()) == pytest.approx(0.001)


def test_the_scale_of_siglip_is_bounded_too():
    loss = SigLIPLoss(scale=10.0, max_scale=12.0)
    loss.log_scale.data.fill_(9.0)
    z_i, z_j = pairs()
    wanted = SigLIPLoss(scale=12.0)(z_i, z_j)
    torch.testing.assert_close(loss.eval()(z_i, z_j), wanted)
    assert float(loss.log_scale.detach()) == 9.0
    torch.testing.assert_close(loss.train()(z_i, z_j), wanted)
    assert float(loss.log_scale.detach()) == pytest.approx(math.log(12.0))
    assert float(loss.scale.detach()) == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: InfoNCELoss(0.1, max_scale=100),
            r"bounds a learned temperature, learn_temperature=True or nn.Parameter\(.*got a number",
        ),
        (lambda: DCLLoss(nn.Parameter(torch.tensor(0.1)), max_scale=0), "max_scale must be positive"),
        (lambda: SigLIPLoss(scale=10, max_scale=5), "max_scale must be at least the scale of 10; got 5"),
    ],
)
def test_a_bound_without_meaning_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", WITH_TEMPERATURE)
@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_ignored_pairs_do_not_poison_a_learned_temperature(name, engine):
    """In another library, a mask of -inf times the derivative of ``s / t`` gave NaN (NeMo, pull request 3850)."""
    z_i, z_j = pairs(6)
    ignore = torch.rand(12, 12) < 0.5
    ignore[0], ignore[:, 0] = True, True  # the first anchor has no negative left
    loss = CASES[name].make(learned, candidates="views", engine=engine)
    value = loss(z_i.requires_grad_(), z_j, ignore=ignore)
    value.backward()
    assert value.isfinite()
    assert loss.temperature.grad.isfinite()
    assert loss.temperature.grad.abs() > 0
    assert z_i.grad.isfinite().all()


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("name", MAKERS)
def test_statistics_are_detached_and_there_for_every_loss(name, engine):
    """A loss without a tail of its own reports the statistics of Algorithm 1; asking for them keeps its value."""
    z_i, z_j = (z.requires_grad_() for z in pairs(dtype=torch.float64))
    loss = MAKERS[name](engine=engine).double()
    output = copy.deepcopy(loss)(z_i, z_j, return_stats=True)
    assert output.loss.requires_grad
    assert all(value.shape == (80,) and not value.requires_grad for value in output.stats)
    torch.testing.assert_close(output.loss, loss(z_i, z_j))
    usual = WeinceLoss.paper(tail=loss.tail or TailConfig())(z_i, z_j, return_stats=True).stats
    torch.testing.assert_close(output.stats, usual)


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
@pytest.mark.parametrize("name", MAKERS)
def test_autocast_does_not_touch_the_scores(name, dtype):
    """Given float32 embeddings, the loss and its gradient are the same to the last bit inside autocast."""
    z_i, z_j = pairs(24, 8)
    plain = gradients(MAKERS[name](), z_i, z_j)
    with torch.autocast("cpu", dtype=dtype):
        cast = gradients(MAKERS[name](), z_i, z_j)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


@pytest.mark.parametrize(("own", "dtype"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("candidates", ["views", "cross", "labels"])
def test_embeddings_in_another_half_precision_than_that_of_autocast(candidates, own, dtype):
    z_i, z_j, negatives = (z.to(own) for z in (*pairs(24, 8), torch.randn(5, 8)))
    given = {"views": {}, "cross": {"negatives": negatives}, "labels": {"labels": torch.arange(24) % 6}}
    loss = InfoNCELoss(candidates=candidates)
    plain = loss(z_i, z_j, **given[candidates])
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(loss(z_i, z_j, **given[candidates]), plain, rtol=0, atol=0)


def test_kl_ball_stays_at_the_temperature_that_it_found():
    """At the root, rounding put the next step outside the bracket, and its middle took the place of the root."""
    rows = torch.tensor(
        [
            [-0.11929223744292237, -1.0, -0.18467782851344494],
            [0.2767540751240255, 0.8440822111977321, -1.0],
            [1.0, -0.188375, -0.448],
        ],
        dtype=torch.float64,
    )
    z = rows[[1, 1, 1, 2, 2, 1, 1, 0, 2, 0, 2, 0]]
    labels = torch.tensor([2, 2, 1, 2, 0, 1, 3, 2, 6, 3, 5, 7])
    loss = weince.KLBallLoss(0.38857336, candidates="labels", reduction="none")
    torch.testing.assert_close(
        loss(z.float(), labels=labels).double(), loss(z, labels=labels), rtol=5e-6, atol=0
    )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["DCLW", "DHEL", "AlignUniform", "KLBall", "released", "one's own"])
def test_compiled_without_a_graph_break(name, monkeypatch):
    monkeypatch.setattr(kl_ball, "STEPS", 3)  # a graph unrolls them
    z_i, z_j = pairs()
    eager = gradients(MAKERS[name](), z_i, z_j)
    # This tests Dynamo and AOTAutograd; building code with the default backend would take long.
    backend = "inductor" if name in ("released", "DHEL") else "aot_eager"
    compiled = gradients(torch.compile(MAKERS[name](), fullgraph=True, backend=backend), z_i, z_j)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_works_in_torch_func_grad(name):
    z_i, z_j = pairs(dtype=torch.float64)
    loss, twin = MAKERS[name](), MAKERS[name]()
    _, (wanted, _) = gradients(loss, z_i, z_j)
    torch.testing.assert_close(torch.func.grad(lambda z: twin(z, z_j))(z_i), wanted)
    torch.testing.assert_close(
        twin.state_dict(), loss.state_dict(), rtol=0, atol=0
    )  # the running slope of `released` has moved


def test_torch_func_grad_by_the_temperature():
    z_i, z_j = pairs(dtype=torch.float64)
    got = torch.func.grad(lambda t: weince.weince_loss(z_i, z_j, temperature=t))(torch.tensor(0.3).double())
    h = 1e-6
    up, down = (weince.weince_loss(z_i, z_j, temperature=float(torch.tensor(0.3)) + s) for s in (h, -h))
    assert float(got) == pytest.approx(float(up - down) / (2 * h), rel=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_in_inference_mode(name):
    z_i, z_j = pairs()
    wanted = MAKERS[name]()(z_i, z_j)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            loss = CASES[name].make(learned, candidates="views")
            got = loss(z_i, z_j)
        assert not got.requires_grad
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", MAKERS)
def test_copies_are_independent_and_equal(name):
    z_i, z_j = pairs()
    loss = CASES[name].make(learned, candidates="views")
    twin = copy.deepcopy(loss)
    torch.testing.assert_close(twin(z_i, z_j), loss(z_i, z_j))
    assert not {id(value) for value in twin.parameters()} & {id(value) for value in loss.parameters()}
    before = loss.eval()(z_i, z_j).detach()
    with torch.no_grad():
        for value in twin.parameters():
            value.mul_(0.5)
    torch.testing.assert_close(loss(z_i, z_j).detach(), before, rtol=0, atol=0)
    if list(twin.parameters()):
        assert twin.eval()(z_i, z_j) != before, "the copy computes with its own parameters"
    twin.load_state_dict(loss.state_dict())
    torch.testing.assert_close(twin.eval()(z_i, z_j).detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKERS)
def test_moving_a_module_moves_what_it_learns(name):
    z_i, z_j = pairs()
    loss = CASES[name].make(learned, candidates="views").to(torch.float32)
    assert {value.dtype for value in loss.state_dict().values()} <= {torch.float32}
    value = loss(z_i, z_j)
    if list(loss.parameters()):
        assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(value, list(loss.parameters())))
    loss.to("meta")
    assert {value.device.type for value in loss.state_dict().values()} <= {"meta"}


FUNCTIONS = {
    weince.info_nce_loss: (InfoNCELoss, {"temperature": 0.2, "hardness": 0.3}),
    weince.dcl_loss: (DCLLoss, {"temperature": 0.2}),
    weince.dclw_loss: (weince.DCLWLoss, {"sigma": 0.4}),
    weince.hcl_loss: (weince.HCLLoss, {"hardness": 0.4}),
    weince.debiased_loss: (weince.DebiasedLoss, {"false_negatives": 0.2}),
    weince.dhel_loss: (weince.DHELLoss, {"temperature": 0.2}),
    weince.rince_loss: (weince.RINCELoss, {"q": 0.3}),
    weince.align_uniform_loss: (weince.AlignUniformLoss, {"weight": 0.4}),
    weince.siglip_loss: (SigLIPLoss, {"scale": 5.0}),
    weince.kl_ball_loss: (weince.KLBallLoss, {"radius": 0.4}),
    weince.temperature_free_loss: (weince.TemperatureFreeLoss, {}),
    weince.temperature_mixture_loss: (weince.TemperatureMixtureLoss, {"spread": 0.3}),
    weince.weibit_loss: (WeibitLoss, {"beta": 2.0, "endpoint": 1.3}),
    weince.weince_loss: (WeinceLoss, {"temperature": 0.2, "tail": TailConfig(k=8)}),
    weince.focal_loss: (weince.FocalLoss, {"gamma": 2.0}),
    weince.lse_pair_loss: (weince.LSEPairLoss, {"temperature": 0.3}),
    weince.sum_marg_lh_loss: (weince.SumMargLHLoss, {"temperature": 0.3}),
    weince.mw_loss: (weince.MWLoss, {"temperature": 0.3}),
    weince.link_loss: (LinkLoss, {"link": weince.PowerLink(3.0)}),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_and_modules_are_the_same(function):
    loss, options = FUNCTIONS[function]
    z_i, z_j = pairs()
    ids = torch.arange(40) % 30
    got = function(z_i, z_j, **options, ids=ids, return_stats=True)
    wanted = loss(**options)(z_i, z_j, ids=ids, return_stats=True)
    torch.testing.assert_close(got.loss, wanted.loss, rtol=0, atol=0)
    torch.testing.assert_close(got.stats, wanted.stats, rtol=0, atol=0)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_can_be_sent_to_another_process(function):
    assert pickle.loads(pickle.dumps(function)) is function
    assert FUNCTIONS[function][0].__name__ in function.__doc__


def test_every_function_is_compared():
    every = {name for name in weince.__all__ if name.endswith("_loss")}
    assert every == {function.__name__ for function in FUNCTIONS} | {"supcon_loss"}
    labels = torch.arange(40) % 7
    z, _ = pairs()
    wanted = weince.SupConLoss(0.2)(z, labels=labels)
    torch.testing.assert_close(weince.supcon_loss(z, labels=labels, temperature=0.2), wanted)
    same = InfoNCELoss(0.2, candidates="labels")(z, labels=labels)
    torch.testing.assert_close(wanted, same, rtol=0, atol=0)


@pytest.mark.parametrize("wide", [0, 1])
def test_of_two_precisions_the_wider_counts(wide):
    views = list(torch.randn(2, 6, 4))
    wanted = InfoNCELoss(candidates="clip")(*(z.double() for z in views))
    views[wide] = views[wide].double()
    torch.testing.assert_close(InfoNCELoss(candidates="clip")(*views), wanted, rtol=1e-6, atol=0)


def test_duplicates_with_ids_are_no_negatives():
    """With ids, a duplicate of an image is no negative of it; other anchors see one more negative."""
    z_i, z_j = pairs(10, dtype=torch.float64)
    ids = torch.cat([torch.arange(10), torch.tensor([3])])
    doubled = InfoNCELoss(0.2, reduction="none")(
        torch.cat([z_i, z_i[3:4]]), torch.cat([z_j, z_j[3:4]]), ids=ids
    )
    alone = InfoNCELoss(0.2, reduction="none")(z_i, z_j)
    torch.testing.assert_close(doubled[3], alone[3])
    assert doubled[4] > alone[4]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            InfoNCELoss(0.2),
            "InfoNCELoss(temperature=0.2, other_positives=True, candidates",
        ),
        (WeinceLoss(), "softmax_term=0.5, shortfall_term=0.5"),
        (WeinceLoss.paper(0.3), "WeinceLoss(temperature=0.3, tail=TailConfig(k=0.1"),
        (WeinceLoss.negatives_only(), "positive='softmax'"),
        (weince.HCLLoss(hardness=0.5), "temperature=0.5, hardness=0.5, false_negatives=0.1"),
        (weince.AlignUniformLoss(weight=0.4), "weight=0.4, spread=2.0"),
        (SigLIPLoss(scale=3.0), "scale=3, bias=-10"),
        (weince.TemperatureMixtureLoss(), "spread=0.5, nodes=5"),
        (LinkLoss(weince.BlendLink(0.5, 2.79, 0.36)), "BlendLink(lam=0.5, beta=2.79, temperature=0.36"),
        (LinkLoss(math.sin), "FunctionLink(sin)"),
        (Mine(3.0, candidates="cross"), "Mine(steepness=3.0, candidates='cross', reduction='mean')"),
        (DCLLoss(nn.Parameter(torch.tensor(0.25))), "temperature=0.25"),
        (InfoNCELoss(nn.Parameter(torch.tensor([0.07]))), "temperature=0.07,"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_module_says_all_its_terms_and_weights(loss, said):
    assert said in repr(loss).replace("\n  ", "")


def test_a_module_says_what_it_has_learned():
    loss = WeinceLoss(nn.Parameter(torch.tensor(0.3)))
    loss.temperature.data.fill_(0.1)
    assert "temperature=0.1," in repr(loss)
    link = LinkLoss(SoftmaxLink(nn.Parameter(torch.tensor(0.3))))
    link.temperature.data.fill_(0.1)
    assert "0.1000" in repr(link)


@pytest.mark.parametrize("n", [40, 300])
def test_a_temperature_of_one_element_is_a_scalar(n):
    """Above 256 pairs the dense engine works in blocks of anchors, which must not slice the temperature."""
    z_i, z_j = pairs(n)
    temperature = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
    loss = WeinceLoss(temperature)(z_i, z_j)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, WeinceLoss(0.3)(z_i, z_j))
    loss.backward()
    assert temperature.grad.shape == (1,)


def test_a_temperature_of_every_anchor():
    z_i, z_j = pairs(dtype=torch.float64)
    each = torch.linspace(0.2, 0.6, 80, dtype=torch.float64).requires_grad_()
    for make in (InfoNCELoss, DCLLoss, weince.HCLLoss, weince.TemperatureMixtureLoss):
        got = make(each, reduction="none")(z_i, z_j)
        for anchor in (0, 50):
            wanted = make(float(each[anchor]), reduction="none")(z_i, z_j)[anchor]
            torch.testing.assert_close(got[anchor], wanted)
        (grad,) = torch.autograd.grad(got.sum(), each)
        assert (grad != 0).all()
        assert make(each)(z_i.float(), z_j.float()).dtype == torch.float32


def test_swapped_parameters_are_used():
    z_i, z_j = pairs()
    loss = WeinceLoss(nn.Parameter(torch.tensor(0.3)), tail=None, shortfall_term=0)
    wanted = WeinceLoss(0.1, tail=None, shortfall_term=0)(z_i, z_j)
    new = {"temperature": torch.tensor(0.1)}
    torch.testing.assert_close(torch.func.functional_call(loss, new, (z_i, z_j)), wanted)
    loss.load_state_dict(new, assign=True)
    torch.testing.assert_close(loss(z_i, z_j), wanted)
    link = LinkLoss(SoftmaxLink(nn.Parameter(torch.tensor(0.3))))
    torch.testing.assert_close(torch.func.functional_call(link, new, (z_i, z_j)), InfoNCELoss(0.1)(z_i, z_j))


def test_a_temperature_that_terms_share_is_saved_once_and_stays_shared(tmp_path):
    """If the state held it twice, safetensors would refuse to save it, and loading with assign would split it."""
    z_i, z_j = pairs()
    loss = WeinceLoss(nn.Parameter(torch.tensor(0.3)))
    assert set(loss.state_dict()) == {"temperature", "terms.slope.slope_now"}
    save_file(loss.state_dict(), tmp_path / "loss.safetensors")
    other = WeinceLoss(nn.Parameter(torch.tensor(0.5)))
    other.load_state_dict(load_file(tmp_path / "loss.safetensors"), assign=True)
    assert len(list(other.parameters())) == 1
    other.temperature = nn.Parameter(torch.tensor(0.2))
    torch.testing.assert_close(other(z_i, z_j), WeinceLoss(0.2)(z_i, z_j))


@pytest.mark.parametrize("name", MAKERS)
def test_states_go_through_safetensors(name, tmp_path):
    z_i, z_j = pairs()
    loss = CASES[name].make(learned, candidates="views")
    loss(z_i, z_j)
    with torch.no_grad():
        for value in loss.parameters():
            value.mul_(0.9)
    save_file(loss.state_dict(), tmp_path / "loss.safetensors")
    other = CASES[name].make(learned, candidates="views")
    other.load_state_dict(load_file(tmp_path / "loss.safetensors"))
    torch.testing.assert_close(other.eval()(z_i, z_j), loss.eval()(z_i, z_j), rtol=0, atol=0)


def test_a_temperature_may_be_set_anew():
    z_i, z_j = pairs()
    loss = WeinceLoss(0.5, tail=None, shortfall_term=0)
    loss.temperature = 0.1
    torch.testing.assert_close(loss(z_i, z_j), WeinceLoss(0.1, tail=None, shortfall_term=0)(z_i, z_j))
    learns = InfoNCELoss(nn.Parameter(torch.tensor(0.5)))
    learns.temperature = nn.Parameter(torch.tensor(0.1))
    torch.testing.assert_close(learns(z_i, z_j), InfoNCELoss(0.1)(z_i, z_j))
    assert len(list(learns.parameters())) == 1


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
        ({"check_finite": "no"}, "check_finite must be True, False or None; got 'no'"),
        ({"graph": "yes"}, "graph must be True, False or None; got 'yes'"),
    ],
)
def test_a_wrong_option_is_refused_when_the_loss_is_made(options, said):
    with pytest.raises(ValueError, match=said):
        WeinceLoss(**options)


@pytest.mark.parametrize("candidates", ["views", "labels"])
def test_a_wrong_reduction_that_is_set_later_is_refused(candidates):
    """It ended in a bare AssertionError, and with labels it was the mean."""
    z_i, z_j = pairs()
    loss = InfoNCELoss(candidates=candidates)
    loss.reduction = "avg"
    with pytest.raises(ValueError, match="reduction must be one of mean, sum, none; got 'avg'"):
        loss(z_i, z_j, labels=torch.arange(len(z_i)) // 2 if candidates == "labels" else None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: weince.HCLLoss(hardness="1"), "hardness must be a number of at least 0; got '1'"),
        (lambda: weince.HCLLoss(false_negatives=1.0), r"must be a share in \[0, 1\); got 1.0"),
        (lambda: weince.DebiasedLoss(false_negatives=None), r"must be a share in \[0, 1\); got None"),
        (lambda: weince.RINCELoss(q="0.1"), r"q must lie in \(0, 1\]; got '0.1'"),
        (lambda: weince.TemperatureMixtureLoss(nodes=2.5), "nodes must be an int between 2 and 20; got 2.5"),
        (lambda: WeinceLoss(softmax_term=None), "softmax_term must be a weight of at least 0; got None"),
        (lambda: SigLIPLoss(scale=0.0), "scale must be positive and finite; got 0.0"),
        (lambda: SigLIPLoss(bias=math.nan), "bias must be a finite number; got nan"),
        (lambda: SigLIPLoss(bias=None), "bias must be a finite number; got None"),
    ],
)
def test_a_wrong_number_is_refused_when_the_loss_is_made(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda value: SigLIPLoss(scale=value), "scale"),
        (lambda value: SigLIPLoss(max_scale=value), "max_scale"),
        (lambda value: weince.RINCELoss(weight=value), "weight"),
        (lambda value: weince.KLBallLoss(value), "radius"),
        (lambda value: weince.KLBallLoss(min_temperature=value), "min_temperature"),
        (lambda value: weince.TemperatureMixtureLoss(spread=value), "spread"),
    ],
)
@pytest.mark.parametrize("value", [nn.Parameter(torch.tensor(50.0)), "50", True])
def test_an_option_that_is_not_learned_wants_a_number(make, name, value):
    """A parameter in its place would stay as it is, unnoticed."""
    with pytest.raises(
        TypeError, match=f"^{name} must be a number; got {type(value).__name__}(: SigLIP.*)?$"
    ):
        make(value)


@pytest.mark.parametrize("name", ["scale", "bias"])
def test_a_learned_scale_or_bias_of_ones_own_is_answered_by_the_class_of_siglip(name):
    said = f"^{name} must be a number; got Tensor: SigLIPLoss learns its own, so use the class and give its param"
    with pytest.raises(TypeError, match=said):
        weince.siglip_loss(torch.randn(4, 8), torch.randn(4, 8), **{name: torch.tensor(2.0)})


class Both(TemperatureLoss):
    """InfoNCE plus WEINCE, evaluated in one pass."""

    tail = TailConfig(k=8)

    def sums(self, batch):
        blend = weince.BlendLink(batch.stats.lam, batch.stats.beta, self.temperature)
        return [weince.LogSumExp(SoftmaxLink(self.temperature)), weince.LogSumExp(blend)]

    def combine(self, softmax, blend):
        return softmax.cross_entropy() + 0.5 * blend.cross_entropy()


def test_a_loss_of_ones_own_asks_for_the_tail():
    z_i, z_j = pairs(dtype=torch.float64)
    wanted = InfoNCELoss(0.2)(z_i, z_j) + 0.5 * WeinceLoss.paper(0.2, tail=TailConfig(k=8))(z_i, z_j)
    torch.testing.assert_close(Both(0.2)(z_i, z_j), wanted)
    loss = Both(0.2)
    loss.tail = None
    with pytest.raises(ValueError, match=r"batch.stats wants tail = TailConfig\(\) in the class of the loss"):
        loss(z_i, z_j)


def test_a_loss_of_ones_own_may_look_at_the_whole_batch():
    """With ``per_anchor = False``, ``gather`` passes the gradient on."""

    class Hardest(weince.ContrastiveLoss):
        per_anchor = False

        def sums(self, batch):
            return weince.LogSumExp(SoftmaxLink(0.2))

        def combine(self, lse, *, gather):
            return lse.cross_entropy() - 0.1 * gather(lse.value).mean()

    z_i, z_j = pairs(dtype=torch.float64)

    def plain(a, b):
        rows = F.normalize(torch.cat([a, b]))
        logits = (rows @ rows.T / 0.2).fill_diagonal_(-torch.inf)
        pairs = torch.arange(80).roll(40)
        negatives = logits.scatter(1, pairs.unsqueeze(1), -torch.inf).logsumexp(1)
        return F.cross_entropy(logits, pairs) - 0.1 * negatives.mean()

    torch.testing.assert_close(gradients(Hardest(), z_i, z_j), gradients(plain, z_i, z_j))


@pytest.mark.parametrize("order", [1, -1])
def test_an_anchor_without_negatives_for_one_of_several_sums(order):
    """An anchor with an empty sum has loss 0, whether that sum comes first or last."""

    class Two(weince.ContrastiveLoss):
        same_view = True

        def sums(self, batch):
            every, own_view = (weince.LogSumExp(SoftmaxLink(0.5), same_view=own) for own in (False, True))
            return [every, own_view][::order]

        def combine(self, first, second):
            return first.value + second.value

    z_i, z_j = torch.randn(2, 4), torch.randn(2, 4)
    ignore = torch.zeros(4, 4, dtype=torch.bool)
    ignore[0, 1] = True  # its only negative in its own view; one in the other view remains
    losses = Two(reduction="none")(z_i, z_j, ignore=ignore)
    assert losses[0] == 0
    assert (losses[1:] != 0).all()


def test_calls_are_typed():
    """The typed calls run; mypy checks their types."""
    typed.calls(torch.randn(6, 4), torch.arange(6) % 3)


def test_a_loss_without_its_two_methods_says_so():
    class Half(weince.ContrastiveLoss):
        def sums(self, batch):
            return weince.LogSumExp(SoftmaxLink(0.2))

    with pytest.raises(NotImplementedError):
        Half()(*pairs())
    with pytest.raises(NotImplementedError):
        weince.ContrastiveLoss()(*pairs())


@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_an_anchor_without_negatives(name, engine):
    """Its loss is 0 if the formula has no value for it; it counts in the mean; no gradient is NaN."""
    z_i, z_j = (z.requires_grad_() for z in pairs(5, dtype=torch.float64))
    ignore = torch.zeros(5, 5, dtype=torch.bool)
    ignore[2] = True
    loss = CASES[name].make(learned, candidates="cross", reduction="none", engine=engine)
    each = loss(z_i, z_j, ignore=ignore)
    if name == "SigLIP":  # it also scores the positive pair on its own
        score = F.cosine_similarity(z_i[2], z_j[2], dim=0)
        torch.testing.assert_close(each[2], F.softplus(-(loss.scale.double() * score + loss.bias)))
    elif name == "AlignUniform":
        assert each[2] != 0
    else:
        assert each[2] == 0
    assert (each[[0, 1, 3, 4]] != 0).all()
    mean = CASES[name].make(learned, candidates="cross", engine=engine)(z_i, z_j, ignore=ignore)
    torch.testing.assert_close(mean, each.mean())
    for grad in torch.autograd.grad(mean, [z_i, z_j, *loss.parameters()], allow_unused=True):
        assert grad is None or grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.labels])
@pytest.mark.parametrize("engine", ["dense", "chunked"])
def test_an_anchor_without_a_positive(name, engine):
    z, _ = pairs(6, dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1, 2, 3])
    options = {"candidates": "labels", "engine": engine}
    each = CASES[name].make(learned, reduction="none", **options)(z.requires_grad_(), labels=labels)
    assert each[4:].tolist() == [0, 0]
    assert (each[:4] != 0).all()
    mean = CASES[name].make(learned, **options)(z, labels=labels)
    torch.testing.assert_close(mean, each[:4].mean())
    assert torch.autograd.grad(mean, z)[0].isfinite().all()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.labels])
def test_a_batch_without_any_pair_is_finite(name):
    """A batch without any positive, and one without any negative."""
    z, _ = pairs(5)
    for labels in (torch.arange(5), torch.zeros(5, dtype=torch.int64)):
        loss = CASES[name].make(learned, candidates="labels")
        value = loss(z.requires_grad_(), labels=labels)
        grads = torch.autograd.grad(value, [z, *loss.parameters()], allow_unused=True)
        assert value.isfinite()
        assert all(grad is None or grad.isfinite().all() for grad in grads)


class Given:
    """Stand-in for an engine with given shortfalls."""

    stats = None

    def __init__(self, shortfalls, most=None):
        self.problem = SimpleNamespace(anchors=shortfalls, most_pairs=most or len(shortfalls))
        self.shortfalls = shortfalls.sort().values

    def sample(self, most):
        return self

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
    slope = RunningSlope(share=1.0, momentum=0.0)
    link = slope.link(Given(shortfalls.double()))
    if target is None:
        assert float(slope.slope_now) == 4.0
    else:
        assert float(slope.slope_now) == pytest.approx(target, rel=0.02)
    assert float(link.beta) == pytest.approx(float(slope.slope_now))


def test_the_batch_slope_of_fewer_pairs_than_the_fewest():
    """The fit then uses all pairs, and drops as many of the smallest as with ``fewest`` at that number."""
    z, slopes = torch.randn(2, 12, 4), (RunningSlope(), RunningSlope(fewest=12 * 11))
    for slope in slopes:
        Sloped(slope, candidates="cross")(*z)
    assert slopes[0].slope_now == slopes[1].slope_now != 4


def test_a_step_of_training_does_not_change_what_was_evaluated_before():
    """The chunked engine reads the slope again in the backward pass, so a later update must not reach it."""
    z_i, z_j = torch.randn(2, 12, 4)
    loss = Sloped(RunningSlope(), engine="chunked", reduction="none").eval()
    losses = loss(z_i.requires_grad_(), z_j)
    (wanted,) = torch.autograd.grad(losses.sum(), z_i, retain_graph=True)
    loss.train()(z_i, z_j)
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), z_i), (wanted,))


def test_the_batch_slope_and_its_link_know_their_eps():
    z, slopes = torch.randn(2, 12, 2), (RunningSlope(eps=0.3), RunningSlope())
    got, _ = (Sloped(slope, candidates="cross")(*z) for slope in slopes)
    moved = float(slopes[0].slope_now)
    assert moved not in (4.0, float(slopes[1].slope_now))
    wanted = LinkLoss(ShortfallLink(moved, eps=0.3), candidates="cross")(*z)
    torch.testing.assert_close(got, wanted)


def test_the_batch_slope_counts_the_pairs_that_are_there():
    """Ignored pairs are padding, and must not enter the fit."""
    shortfalls = torch.rand(8000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** (1 / 3)
    alone, padded = RunningSlope(share=0.5), RunningSlope(share=0.5)
    alone.link(Given(shortfalls))
    padded.link(Given(shortfalls, most=20000))
    torch.testing.assert_close(alone.slope_now, padded.slope_now, rtol=1e-12, atol=0)


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("same", [None, 4])
def test_the_batch_slope_is_the_same_on_both_engines(engine, same):
    z_i, z_j = pairs(dtype=torch.float64)
    ids = None if same is None else torch.arange(len(z_i)) // same
    one, other = RunningSlope(fewest=100), RunningSlope(fewest=100)
    got = Sloped(one, engine=engine)(z_i, z_j, ids=ids)
    torch.testing.assert_close(got, Sloped(other)(z_i, z_j, ids=ids))
    torch.testing.assert_close(one.slope_now, other.slope_now)
    assert one.slope_now != 4


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("same", [None, 4])
def test_the_batch_slope_of_a_large_batch_is_that_of_evenly_spaced_anchors(engine, same, monkeypatch):
    z_i, z_j = pairs(dtype=torch.float64)
    every, n = 5, len(z_i)
    ids = torch.arange(n) if same is None else torch.arange(n) // same
    slope = RunningSlope(fewest=10)
    monkeypatch.setattr(terms, "MOST_PAIRS", -(-2 * n * (2 * n - 2) // every))
    Sloped(slope, engine=engine)(z_i, z_j, ids=None if same is None else ids)
    rows = F.normalize(torch.cat([z_i, z_j]), dim=1)
    negative = ids.repeat(2).unsqueeze(1) != ids.repeat(2)
    scores = (rows @ rows.T)[::every][negative[::every]]
    wanted = reference.moved_slope(4.0, scores.tolist(), fewest=10)
    assert wanted != 4
    assert float(slope.slope_now) == pytest.approx(wanted, rel=1e-6)  # stored in float32


def test_short_float16_rows_keep_the_direction_of_their_gradient():
    """The gradient exceeds the float16 range, so it is scaled down instead of becoming inf."""
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


def test_rince_stays_accurate_as_it_comes_near_infonce():
    z_i, z_j = pairs()
    loss = weince.RINCELoss(q=1e-6)
    torch.testing.assert_close(loss(z_i, z_j).double(), loss(z_i.double(), z_j.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("steepness", "q", "weight"),
    [(2, 0.1, 0.01), (2, 0.1, 1.0), (2, 1.0, 1.0), (60, 0.1, 0.01), (60, 1.0, 0.01), (60, 1.0, 1.0)],
)
def test_rince_stays_accurate_up_to_its_lowest_temperature(steepness, q, weight):
    """A score has an error of some 1e-7, and the loss grows as ``exp(q s / temperature)``."""
    z_i, z_j = pairs(noise=0.05)  # easy pairs: with a weight of 1, both powers are nearly equal
    loss = weince.RINCELoss(q / steepness, q=q, weight=weight)
    value, found = gradients(loss, z_i, z_j)
    right, wanted = gradients(loss, z_i.double(), z_j.double())
    batch = reference.scored(*[torch.cat([z_i, z_j]).double()] * 2, reference.roles_views(len(z_i)))
    torch.testing.assert_close(
        right, torch.stack(reference.rince(batch, q / steepness, q, weight)).mean(), rtol=1e-6, atol=0
    )
    error = 1e-6 * (1 + steepness / q)  # of a logit
    assert abs(value / right - 1) < error
    for own, exact in zip(found, wanted, strict=True):
        assert (own - exact).norm() < error * exact.norm()


def test_rince_refuses_a_temperature_at_which_it_overflows():
    z_i, z_j = pairs()
    for temperature in (0.001, nn.Parameter(torch.tensor(0.001))):
        loss = weince.RINCELoss(temperature, q=0.1)
        with pytest.raises(ValueError, match=r"at least 0.00167 for q=0.1 in torch.float32, .*; got "):
            loss(z_i, z_j)
        assert loss(z_i.double(), z_j.double()).isfinite()


@pytest.mark.parametrize(
    "make",
    [
        weince.HCLLoss,
        weince.TemperatureMixtureLoss,
        lambda _: SigLIPLoss(scale=90.0),
        lambda _: SigLIPLoss(scale=10.0, bias=-8.0),
        lambda _: WeibitLoss(nn.Parameter(torch.tensor(12.0))),
        lambda t: LinkLoss(SoftmaxLink(t)),
    ],
    ids=["HCL", "mixture", "SigLIP", "SigLIP at its best bias", "Weibit", "link"],
)
def test_a_loss_in_half_precision_computes_with_its_parameters_in_full(make):
    """The gradients of the positive and of the negatives, of opposite signs, are added up in float32, too."""
    z_i = torch.randn(32, 16)
    z_j = z_i + 0.5 * torch.randn(32, 16)
    half = make(nn.Parameter(torch.tensor(0.073))).bfloat16()
    full = copy.deepcopy(half).float()
    torch.testing.assert_close(half(z_i, z_j), full(z_i, z_j))
    half(z_i, z_j).backward()
    full(z_i, z_j).backward()
    for own, same in zip(half.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(own.grad.float(), same.grad, rtol=2**-8, atol=0.0)


def test_a_validation_step_in_inference_mode_does_not_freeze_the_running_slope():
    loss, rows = WeinceLoss(), torch.randn(8, 4, device="meta")  # a device to which the slope has to move
    with torch.inference_mode():
        loss.eval()(rows, rows)
    loss.train()(rows, rows)
    assert loss.terms.slope.slope_now.device.type == "meta"


def test_a_loss_on_the_meta_device_is_shown():
    with torch.device("meta"):
        assert "scale=tensor()" in repr(SigLIPLoss())
        assert "temperature=tensor()" in repr(DCLLoss(nn.Parameter(torch.tensor(0.1))))


@pytest.mark.parametrize("engine", ["dense", "chunked"])
@pytest.mark.parametrize("name", CASES)
def test_nan_is_not_hidden(name, engine):
    """Without the check, every anchor that has a NaN among its negatives has a loss of NaN."""
    z_i, z_j = pairs(n=12)
    options = {"engine": engine, "check_finite": False, "reduction": "none"}
    if name in ANYWHERE:
        loss = MAKERS[name](candidates="cross", **options)
        losses = loss(z_i, z_j, negatives=torch.full((1, 16), math.nan))
    else:
        z_i[3] = math.nan
        losses = MAKERS[name](**options)(z_i, z_j)[:12]  # of the anchors in the view of that row
    assert losses.isnan().all()


@pytest.mark.parametrize("radius", [0.01, 0.8, 3.0])
def test_the_temperatures_of_the_kl_ball_are_found_near_the_cap(radius):
    """The variance of scores near 1, as ``E[s²] - E[s]²``, is below the rounding of 1."""
    centre = torch.randn(1, 16)
    z_i, z_j = (centre + 0.01 * torch.randn(2, 64, 16)).unbind()
    loss = weince.KLBallLoss(radius, min_temperature=1e-4)
    value, found = gradients(loss, z_i, z_j)
    right, wanted = gradients(loss, z_i.double(), z_j.double())
    torch.testing.assert_close(
        value.double(), right, rtol=1e-3, atol=0
    )  # a score has an error of 1e-7 in 1e-4
    for own, exact in zip(found, wanted, strict=True):
        assert (own - exact).norm() < 1e-3 * exact.norm()


class Temperatures(weince.KLBallLoss):
    """Returns the temperature of each anchor instead of a loss."""

    def combine(self, lse):
        return lse.link.temperature


UGLY = {
    "random": lambda: torch.randn(64, 16),
    "few dimensions": lambda: torch.randn(64, 2),
    "a few near": lambda: torch.randn(16, 16).repeat(4, 1) + 0.1 * torch.randn(64, 16),
    "duplicates": lambda: torch.randn(16, 16).repeat(4, 1),
    "one class near": lambda: torch.cat([3 * torch.ones(8, 16), torch.zeros(56, 16)]) + torch.randn(64, 16),
    "all alike": lambda: torch.ones(64, 16) + 0.01 * torch.randn(64, 16),
    "all the same": lambda: torch.ones(64, 16),
    "two opposite": lambda: (
        torch.ones(64, 16) * torch.tensor([1.0, -1.0]).repeat(32)[:, None] + 0.01 * torch.randn(64, 16)
    ),
}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_short_last_batch_has_the_smallest_temperature_of_the_kl_ball(n):
    """Rows of ``cross`` have one to three negatives, too few for the default radius."""
    warn_once.cache_clear()
    rows, most = pairs(n, dtype=torch.float64), n - 1
    with pytest.warns(
        UserWarning, match=rf"over {most} negatives is at most log\({most}\).* temperature 0.05"
    ):
        value, found = gradients(weince.KLBallLoss(candidates="cross"), *rows)
    fixed, wanted = gradients(weince.DCLLoss(0.05, candidates="cross"), *rows)
    torch.testing.assert_close(value, 0.05 * fixed)
    torch.testing.assert_close(found, tuple(0.05 * grad for grad in wanted))


def test_a_radius_out_of_reach_has_the_smallest_temperature_exactly():
    """Where the softmax stays below the radius, the steps of the search end before its bound."""
    rows = pairs(6)  # five negatives: log 5 is 1.61
    found = Temperatures(1.8, min_temperature=1e-3, candidates="cross", reduction="none")(*rows)
    torch.testing.assert_close(found, torch.full_like(found, 1e-3))


@pytest.mark.parametrize("min_temperature", [0.05, 1e-3])
@pytest.mark.parametrize("radius", [0.1, 0.4, 0.8, 1.2, 1.8, 3.0])
@pytest.mark.parametrize("kind", UGLY)
def test_the_softmax_of_the_kl_ball_is_at_its_radius(kind, radius, min_temperature):
    torch.manual_seed(0)
    z_i = UGLY[kind]().double()
    z_j = z_i + 0.1 * torch.randn_like(z_i)
    temperature = Temperatures(radius, min_temperature=min_temperature, reduction="none")(z_i, z_j)
    distance = distances(z_i, z_j, temperature)
    bounded = temperature <= min_temperature * (1 + 1e-9)
    assert torch.where(bounded, distance < radius, (distance - radius).abs() < 1e-6).all()


def distances(z_i, z_j, temperature):
    """KL divergence of each anchor's softmax from uniform, in views of 64 pairs."""
    rows = nn.functional.normalize(torch.cat([z_i, z_j]).double(), dim=1)
    here = torch.arange(128)
    negatives = torch.ones(128, 128, dtype=torch.bool)
    negatives[here, here] = negatives[here, here.roll(64)] = False
    logits = (rows @ rows.T)[negatives].reshape(128, 126) / temperature.double()[:, None]
    return math.log(126) + (logits.softmax(1) * logits.log_softmax(1)).sum(1)


def test_the_softmax_of_the_kl_ball_is_at_its_radius_in_float32():
    """Some rows are alike, others far from all: at a temperature of 0.001 their logits are 1,000 apart."""
    torch.manual_seed(0)
    z_i, z_j = torch.ones(128) + (5 * torch.randn(2, 64, 1) - 8).exp() * torch.randn(2, 64, 128)
    for radius in (0.4, 1.2, 2.5):
        temperature = Temperatures(radius, min_temperature=1e-3, reduction="none")(z_i, z_j)
        distance = distances(z_i, z_j, temperature)
        bounded = temperature <= 1e-3 * (1 + 1e-6)
        # Scores have errors of 1e-7 or so, logits of 1e-4.
        assert torch.where(bounded, distance < radius + 1e-2, (distance - radius).abs() < 1e-2).all()


def test_on_a_cpu_the_search_of_the_kl_ball_ends_when_no_anchor_moves(monkeypatch):
    """With a process group every rank takes all steps, since ranks may pass candidates on in each of them."""
    steps = []
    whole = Batch.log_sums_exp
    monkeypatch.setattr(Batch, "log_sums_exp", lambda *args: steps.append(0) or whole(*args))
    z = pairs(64, dtype=torch.float64)
    found = Temperatures(reduction="none")(*z)
    assert len(steps) < kl_ball.STEPS
    monkeypatch.setattr(kl_ball, "free_to_look", lambda values: False)
    torch.testing.assert_close(Temperatures(reduction="none")(*z), found, rtol=1e-13, atol=0)


def test_the_kl_ball_spreads_out_embeddings_that_are_all_alike():
    """Without a bound, the temperature goes to 0, only the nearest negatives push, and the embeddings contract.

    The views of an image differ by more than two images do, as at the start of training.
    """
    torch.manual_seed(0)
    images = torch.randn(1, 16) + 0.02 * torch.randn(64, 16)
    views = [(images + 0.04 * torch.randn_like(images)).requires_grad_() for _ in range(2)]
    rows = nn.functional.normalize(torch.cat(views), dim=1)
    spreads = torch.cat(torch.autograd.grad(1 - (rows @ rows.T).mean(), views))

    def step_towards_spread(loss):
        step = -torch.cat(torch.autograd.grad(loss(*views), views))
        return float(nn.functional.cosine_similarity(step.flatten(), spreads.flatten(), dim=0))

    assert step_towards_spread(weince.KLBallLoss(1.2)) > 0.05
    assert step_towards_spread(weince.KLBallLoss(1.2, min_temperature=1e-4)) < -0.05
