import pytest
import torch

from weince import BatchShortfallLink, InfoNCELoss, SoftmaxLink, TailConfig, Term, WeibitLoss, WeinceLoss
from weince.lab.configure import LossConfig, build_loss, check_loss
from weince.losses import RELEASED_TAIL, released_terms


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(40, 8, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize(
    ("config", "same"),
    [
        (LossConfig("infonce", 0.2), InfoNCELoss(0.2)),
        (LossConfig("paper", 0.3), WeinceLoss.paper(0.3)),
        (LossConfig("released"), WeinceLoss.released()),
        (LossConfig("blend"), WeinceLoss(0.5, tail=RELEASED_TAIL)),
        (LossConfig("weibit", 0.25), WeibitLoss(4.0)),
        (LossConfig("paper", tail={"gate": "rho"}), WeinceLoss(0.5, tail=TailConfig(gate="rho"))),
        (LossConfig("released", softmax_term=0, shortfall_term=0.0), WeinceLoss(0.5, tail=RELEASED_TAIL)),
        (LossConfig("infonce", softmax_term=0.5, shortfall_term=0.5), InfoNCELoss(0.5, extra=released_terms(0.5))),
        (
            LossConfig("infonce", 0.2, softmax_term=0.3, shortfall_term=0.7),
            InfoNCELoss(0.2, extra=[Term(SoftmaxLink(0.2), 0.3, 50), Term(BatchShortfallLink(), 0.7, 50)]),
        ),
    ],
)  # fmt: skip
def test_a_configuration_is_the_loss_written_by_hand(config, same, batch):
    assert torch.equal(build_loss(config)(*batch), same(*batch))


def test_the_preset_keeps_its_other_tail_settings():
    link = build_loss(LossConfig("blend", tail={"gate": "aic"})).link
    assert link.tail == TailConfig(beta=1.0, drop=0.05, soft_cap=False, gate="aic")


@pytest.mark.parametrize(
    "config", [LossConfig(), LossConfig("infonce"), LossConfig("released", softmax_term=0, shortfall_term=0)]
)
def test_a_term_without_weight_is_none(config):
    assert build_loss(config).extra == ()


@pytest.mark.parametrize("preset", ["infonce", "weibit", "paper"])
def test_candidates_and_terms_reach_the_loss(preset):
    loss = build_loss(LossConfig(preset, softmax_term=0.3), candidates="cross")
    assert loss.candidates == "cross"
    assert loss.extra == (Term(SoftmaxLink(0.5), weight=0.3, hardest=50),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "papr"}, r"unknown preset 'papr' \(did you mean paper\?\); known: infonce, paper, blend"),
        ({"tail": {"roh0": 1}}, r"unknown field of tail 'roh0' \(did you mean rho0\?\)"),
        ({"tail": {"rho0": -1.0}}, "rho0"),
        ({"preset": "infonce", "tail": {"k": 8}}, "no meaning for preset 'infonce'"),
        ({"temperature": 0.0}, "temperature must be positive; got 0.0"),
        ({"preset": "infonce", "temperature": float("nan")}, "temperature must be positive; got nan"),
        ({"temperature": float("inf")}, "temperature must be positive; got inf"),
        ({"softmax_term": float("inf")}, "softmax_term must be a weight of at least 0; got inf"),
        ({"tail": {"rho0": "near"}}, "tail: rho0 must be a number"),
        ({"tail": {"margin": "a"}}, "tail: margin must be a number; got 'a'"),
        ({"softmax_term": -1.0}, "softmax_term must be a weight of at least 0; got -1"),
    ],
)
def test_a_wrong_configuration_is_refused_when_it_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**options)


def test_a_loss_that_cannot_run_here_is_refused_before_a_run_begins():
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"the loss cannot run here: .*fused.* CUDA device; got cpu"):
        check_loss(build_loss(LossConfig(engine="fused")), pairs=4, width=3, device=cpu)
    loss = build_loss(LossConfig("released"))
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    check_loss(loss, pairs=4, width=3, device=cpu)
    assert before  # what the loss remembers of its batches
    assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())


@pytest.mark.parametrize("preset", ["infonce", "weibit", "paper"])
def test_the_engine_reaches_the_loss(preset):
    assert build_loss(LossConfig(preset, engine="chunked")).engine == "chunked"
