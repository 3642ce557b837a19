"""A loss as configuration: every preset, user-defined losses, and invalid settings."""

import re
import sys
from dataclasses import fields

import pytest
import torch
from torch import nn

import weince
from weince import BlendLink, InfoNCELoss, LinkLoss, TailConfig, WeibitLoss, WeinceLoss
from weince.lab.configure import PRESETS, LossConfig, build_loss, check_loss, find
from weince.losses.weince import RELEASED_TAIL


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(40, 8, generator=generator, dtype=torch.float64) for _ in range(2))


BY_HAND = [
    (LossConfig(), InfoNCELoss()),
    (LossConfig("infonce", 0.2), InfoNCELoss(0.2)),
    (
        LossConfig("infonce", 0.2, softmax_term=0.3, shortfall_term=0.7),
        WeinceLoss(0.2, tail=None, softmax_term=0.3, shortfall_term=0.7),
    ),
    (LossConfig("dcl"), weince.DCLLoss()),
    (LossConfig("dcl", 0.2), weince.DCLLoss(0.2)),
    (LossConfig("dclw", options={"sigma": 0.3}), weince.DCLWLoss(sigma=0.3)),
    (LossConfig("hcl", 0.3, options={"hardness": 0.5}), weince.HCLLoss(0.3, hardness=0.5)),
    (LossConfig("debiased", options={"false_negatives": 0.2}), weince.DebiasedLoss(false_negatives=0.2)),
    (LossConfig("dhel", 0.2), weince.DHELLoss(0.2)),
    (LossConfig("rince", options={"q": 0.5, "weight": 0.02}), weince.RINCELoss(q=0.5, weight=0.02)),
    (LossConfig("align_uniform", options={"weight": 0.5}), weince.AlignUniformLoss(weight=0.5)),
    (LossConfig("siglip", options={"scale": 5.0, "bias": -3.0}), weince.SigLIPLoss(scale=5.0, bias=-3.0)),
    (LossConfig("kl_ball", options={"radius": 0.4}), weince.KLBallLoss(0.4)),
    (
        LossConfig("mixture", 0.2, options={"spread": 0.7, "nodes": 7}),
        weince.TemperatureMixtureLoss(0.2, spread=0.7, nodes=7),
    ),
    (LossConfig("mw", 0.1), weince.MWLoss(0.1)),
    (LossConfig("lse_pair", 0.1), weince.LSEPairLoss(0.1)),
    (LossConfig("sum_marg_lh", 0.1), weince.SumMargLHLoss(0.1)),
    (LossConfig("focal", 0.1, options={"gamma": 2.0}), weince.FocalLoss(0.1, gamma=2.0)),
    (LossConfig("temperature_free"), weince.TemperatureFreeLoss()),
    (LossConfig("weibit"), WeibitLoss()),
    (LossConfig("weibit", 0.25), WeibitLoss(4.0)),
    (LossConfig("weibit", beta=4.0), WeibitLoss(4.0)),
    (LossConfig("weibit", options={"endpoint": 1.5}), WeibitLoss(endpoint=1.5)),
    (LossConfig("released", options={"softmax_term": 0.3}), WeinceLoss.released(softmax_term=0.3)),
    (LossConfig("link", 0.36, lam=0.5, beta=2.79), LinkLoss(BlendLink(0.5, 2.79, 0.36))),
    (LossConfig("link", lam=0.0, beta=1.0), LinkLoss(BlendLink(0.0, 1.0, 0.5))),
    (LossConfig("released"), WeinceLoss.released()),
    (LossConfig("released", softmax_term=0, shortfall_term=0.0), WeinceLoss.paper(tail=RELEASED_TAIL)),
    (LossConfig("blend"), WeinceLoss.paper(tail=RELEASED_TAIL)),
    (LossConfig("paper", 0.3), WeinceLoss.paper(0.3)),
    (LossConfig("paper", tail={"gate": "rho"}), WeinceLoss.paper(tail=TailConfig(gate="rho"))),
    (LossConfig("paper", softmax_term=0.3), WeinceLoss.paper(softmax_term=0.3)),
    (LossConfig("negatives_only", 0.3), WeinceLoss.negatives_only(0.3)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "same"), BY_HAND, ids=lambda value: getattr(value, "preset", ""))
def test_a_configuration_is_the_loss_written_by_hand(config, same, batch):
    built = build_loss(config)
    assert type(built) is type(same)
    assert torch.equal(built(*batch), same(*batch))


def test_every_preset_is_tried():
    assert {config.preset for config, _ in BY_HAND} == set(PRESETS)


def test_the_default_is_not_the_loss_that_collapses():
    assert LossConfig().preset == "infonce"


def test_the_preset_keeps_its_other_tail_settings():
    loss = build_loss(LossConfig("blend", tail={"gate": "aic"}))
    assert loss.tail == TailConfig(beta=1.0, drop=0.05, soft_cap=False, gate="aic")
    assert build_loss(LossConfig("negatives_only", tail={"k": 8})).tail == TailConfig(k=8, positive="softmax")


@pytest.mark.parametrize(
    "config", [LossConfig(), LossConfig("infonce"), LossConfig("released", softmax_term=0, shortfall_term=0)]
)
def test_a_term_without_weight_is_none(config):
    loss = build_loss(config)
    assert loss.hardest == ()
    assert list(loss.buffers()) == []


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset not in ("dhel", "link")])
def test_candidates_and_engine_reach_the_loss(preset):
    loss = build_loss(LossConfig(preset, engine="chunked"), candidates="cross")
    assert (loss.candidates, loss.engine) == ("cross", "chunked")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "papr"}, r"unknown preset 'papr' \(did you mean paper\?\)"),
        ({"preset": "InfoNCE"}, r"unknown preset 'InfoNCE' \(did you mean infonce\?\)"),
        (
            {"preset": "WEINCE"},
            r"unknown preset 'WEINCE' \(did you mean released, the loss of WEINCE's authors, or",
        ),
        (
            {"preset": "WeinceLoss"},
            r"unknown preset 'WeinceLoss' \(did you mean released, the loss of WEINCE's authors, or",
        ),
        (
            {"preset": "TemperatureMixtureLoss"},
            r"unknown preset 'TemperatureMixtureLoss' \(did you mean mixture\?\)",
        ),
        ({"preset": "SupConLoss"}, "unknown preset 'SupConLoss'; known: infonce, "),
        ({"preset": "infonce,dcl"}, r"unknown preset 'infonce,dcl' \(did you mean infonce dcl\?\)"),
        ({"preset": "paper", "tail": {"roh0": 1}}, r"unknown field of tail 'roh0' \(did you mean rho0\?\)"),
        ({"preset": "paper", "tail": {"rho0": -1.0}}, "rho0"),
        ({"preset": "infonce", "tail": {"k": 8}}, "no meaning for preset 'infonce'"),
        ({"temperature": 0.0}, "temperature must be positive; got 0.0"),
        ({"preset": "infonce", "temperature": float("nan")}, "temperature must be positive; got nan"),
        ({"temperature": float("inf")}, "temperature must be positive; got inf"),
        ({"softmax_term": float("inf")}, "softmax_term must be a weight of at least 0; got inf"),
        ({"preset": "paper", "tail": {"rho0": "near"}}, "tail: rho0 must be a number"),
        ({"preset": "paper", "tail": {"margin": "a"}}, "tail: margin must be a number; got 'a'"),
        ({"softmax_term": -1.0}, "softmax_term must be a weight of at least 0; got -1"),
        ({"preset": "link"}, "preset 'link' wants lam and beta; got lam=None, beta=None"),
        ({"preset": "link", "lam": 2.0, "beta": 1.0}, r"lam must lie in \[0, 1\]; got 2.0"),
        ({"preset": "infonce", "lam": 0.5}, "lam has no meaning for preset 'infonce'; it takes temperature"),
        ({"preset": "dcl", "beta": 0.5}, "beta has no meaning for preset 'dcl'"),
        ({"preset": "dcl", "softmax_term": 0.5}, "softmax_term has no meaning for preset 'dcl'"),
        (
            {"preset": "siglip", "temperature": 0.5},
            "temperature has no meaning for preset 'siglip'; it takes scale, .*: leave it out, or give null",
        ),
        ({"preset": "temperature_free", "temperature": 0.5}, "temperature has no meaning for preset"),
        ({"preset": "hcl", "options": {"hardnes": 1}}, "hardnes has no meaning for preset 'hcl'"),
        ({"preset": "hcl", "options": {"hardness": -1}}, "hardness must be a number of at least 0; got -1"),
        ({"preset": "kl_ball", "options": {"radius": "far"}}, "preset kl_ball: radius must be a number"),
        (
            {"preset": "hcl", "temperature": 0.2, "options": {"temperature": 0.3}},
            "temperature must be given once; got 0.2, and 0.3 in options",
        ),
        (
            {"preset": "weibit", "temperature": 0.2, "beta": 3.0},
            "'weibit' takes temperature or beta, .*got both",
        ),
        (
            {"preset": "weibit", "temperature": 0.2, "options": {"beta": 3.0}},
            "'weibit' takes temperature or beta, .*got both",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_when_it_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**options)


OWN = """
from weince import ContrastiveLoss, LogSumExp, SoftmaxLink
from os import system
import torch

class Mine(ContrastiveLoss):
    def __init__(self, temperature=0.3, steepness=1.0, **options):
        super().__init__(**options)
        self.temperature, self.steepness = temperature, steepness

    def sums(self, batch):
        return LogSumExp(SoftmaxLink(self.temperature))

    def combine(self, lse):
        return self.steepness * (lse.value - lse.positive)

def factory(temperature=0.3) -> torch.nn.Module:
    return Mine(temperature, 2.0)

def quoted(temperature=0.3, candidates="views") -> "Mine":
    return Mine(temperature, 2.0, candidates=candidates)

def unknown(temperature=0.3):
    return Mine(temperature, 2.0)

def number(temperature=None) -> torch.nn.Module:
    return 3

def lookup() -> torch.nn.Module:
    return {}["mine"]

def hinted(weight: "Nowhere" = None) -> torch.nn.Module:
    return Mine()

class Plain(torch.nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.returned, self.scale = returned, torch.nn.Parameter(torch.rand(()))

    def forward(self, z_i, z_j):
        return eval(self.returned)

class Fixed(ContrastiveLoss):
    sums = lambda self, batch: LogSumExp(lambda s: 5 * s)
    combine = lambda self, lse: lse.value - lse.positive

class Bare(torch.nn.Module):
    pass

class Typo(Fixed):
    def sums(self, batch):
        return LogSumExp(lambda s: s.power(2))

Twice = 2
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module in the working folder."""
    (tmp_path / "my_losses.py").write_text(OWN)
    (tmp_path / "typo.py").write_text("class Mine(\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "my_losses"
    sys.modules.pop("my_losses", None)


def test_a_loss_of_ones_own(own, batch):
    for config, temperature, factor in (
        (LossConfig("my_losses:Mine"), 0.3, 1),
        (LossConfig("my_losses:Mine", 0.2, options={"steepness": 3.0}), 0.2, 3),
        (LossConfig("my_losses:factory", 0.2), 0.2, 2),
        (LossConfig("my_losses:quoted", 0.2), 0.2, 2),
    ):
        torch.testing.assert_close(build_loss(config)(*batch), factor * weince.DCLLoss(temperature)(*batch))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os:system", r"os must define system, an nn.Module or a function that .*; got <built-in"),
        ("my_losses:system", "my_losses must define system, an nn.Module or a function"),  # imported from os
        ("my_losses:Twice", "must define Twice.*got 2"),
        ("my_losses:Other", "must define Other.*got None"),
        ("my_losses:torch", "must define torch.*got <module"),
        ("my_losses:number", "my_losses:number must make an nn.Module; got int"),
        ("my_losses:lookup", "my_losses:lookup: KeyError: 'mine'"),
        ("my_losses:hinted", r"cannot read the annotations of hinted \(name 'Nowhere' is not defined\)"),
        ("typo:Mine", r"loss typo:Mine: cannot import typo \(SyntaxError: .*typo.py, line 1\)"),
        ("no_such_module:Mine", "cannot import no_such_module"),
        ("my_losses:Mine.sums", r"written package.module:name; got 'my_losses:Mine.sums'"),
        (":Mine", "written package.module:name; got ':Mine'"),
        ("my_losses:", "written package.module:name"),
        ("my_losses:unknown", r"annotated to return one \(-> nn.Module\); got <function unknown"),
        ("subprocess:run", "subprocess must define run, an nn.Module or"),
        ("shutil:rmtree", "shutil must define rmtree"),
        ("builtins:eval", "builtins must define eval"),
    ],
)
def test_only_losses_are_taken_from_a_module(own, name, message):
    with pytest.raises(ValueError, match=message):
        build_loss(LossConfig(name))


def test_nothing_is_run_on_the_way(own, tmp_path):
    with pytest.raises(ValueError, match="subprocess must define call"):
        build_loss(LossConfig("subprocess:call", options={"args": ["touch", str(tmp_path / "here")]}))
    assert not (tmp_path / "here").exists()


def test_candidates_and_engine_reach_a_loss_of_ones_own(own):
    loss = build_loss(LossConfig("my_losses:Mine", engine="chunked"), candidates="cross")
    assert (loss.candidates, loss.engine) == ("cross", "chunked")
    assert build_loss(LossConfig("my_losses:quoted"), candidates="cross").candidates == "cross"
    assert isinstance(build_loss(LossConfig("torch.nn:Identity"), candidates="cross"), nn.Identity)


def test_an_option_that_a_loss_of_ones_own_does_not_take(own):
    with pytest.raises(ValueError, match=r"my_losses:factory: .*unexpected keyword argument 'steep'"):
        build_loss(LossConfig("my_losses:factory", options={"steep": 2}))
    with pytest.raises(
        ValueError, match=r"my_losses:Mine: Mine has no option 'steep'; it takes temperature, .*graph"
    ):
        build_loss(LossConfig("my_losses:Mine", options={"steep": 2}))


@pytest.mark.parametrize("loss", ["Fixed", "Bare"])
def test_a_file_that_sets_a_temperature_for_a_loss_of_ones_own_without_one(own, loss):
    message = r"'temperature'.*: leave it out, or give null where a file sets it \(loss.temperature: null\)"
    with pytest.raises(ValueError, match=f"my_losses:{loss}: .*{message}"):
        build_loss(LossConfig(f"my_losses:{loss}", temperature=0.5))
    build_loss(LossConfig(f"my_losses:{loss}"))


def test_what_is_found_may_be_any_module():
    assert find("torch.nn:Identity", "encoder") is nn.Identity


def test_every_field_is_documented():
    for field in fields(LossConfig):
        assert f"    {field.name}: " in LossConfig.__doc__, field.name


def check(config):
    check_loss(config, candidates="views", pairs=4, width=3, device=torch.device("cpu"))


def plain(returned):
    return LossConfig("my_losses:Plain", options={"returned": returned})


def test_a_loss_that_cannot_run_here_is_refused_before_a_run_begins():
    with pytest.raises(
        ValueError, match=r"fails on random embeddings \(4, 3\): RuntimeError: .*fused.* CUDA device; got cpu"
    ):
        check(LossConfig(engine="fused"))


DETACHED = "a loss must have a gradient with respect to the embeddings: leave out .detach(), .item()"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("z_i.mean() * torch.nan", "a loss must be finite; got nan on random embeddings"),
        ("z_i.sum(-1)", "a loss must return a tensor with one number, of shape (); got shape (4,)"),
        ("(z_i.mean(), 3)", "a loss must return a tensor with one number, of shape (); got tuple"),
        ("z_i.mean().item()", "a loss must return a tensor with one number, of shape (); got float"),
        ("z_i.mean().detach()", DETACHED),
        ("z_i.mean().detach() * self.scale", DETACHED),
        ("(z_i - z_i).square().sum().sqrt()", "the gradient of a loss must be finite; got NaN or inf"),
        ("z_i[4, 0]", "the loss fails on random embeddings (4, 3): IndexError: index 4 is out of bounds"),
        ("z_i.relu_().mean()", "the loss fails on random embeddings (4, 3): RuntimeError: a leaf Variable"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(own, returned, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check(plain(returned))


def test_an_error_in_a_loss_of_ones_own_names_its_line(own):
    line = OWN.splitlines().index("        return LogSumExp(lambda s: s.power(2))") + 1
    with pytest.raises(ValueError, match=rf"no attribute 'power' \(my_losses.py, line {line}\)$"):
        check(LossConfig("my_losses:Typo"))


@pytest.mark.parametrize("config", [LossConfig("released"), LossConfig("siglip"), plain("z_i.mean()")])
def test_a_loss_that_can_be_trained_passes(own, config):
    check(config)


def test_a_check_draws_none_of_the_random_numbers_of_a_training(own):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    check(plain("torch.rand(()) * z_i.mean()"))
    assert torch.equal(torch.get_rng_state(), before)
