"""Bad input: one or two lines that name what was received and what is wanted."""

import math

import pytest
import torch
from cases import CASES, fixed

from weince import (
    AlignUniformLoss,
    BlendLink,
    ContrastiveLoss,
    DCLWLoss,
    DHELLoss,
    FunctionLink,
    HCLLoss,
    InfoNCELoss,
    KLBallLoss,
    LinkLoss,
    LogSumExp,
    RINCELoss,
    SigLIPLoss,
    SoftmaxLink,
    TemperatureMixtureLoss,
    WeibitLoss,
    WeinceLoss,
)

Z = torch.randn(4, 3)
NAN = torch.randn(4, 3).index_fill(0, torch.tensor([2]), math.nan)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: WeinceLoss()(Z, Z[:3]), ValueError, r"same shape.*got \(4, 3\) and \(3, 3\)"),
        (
            lambda: WeinceLoss()(Z, Z[:, :2]),
            ValueError,
            r"z_j must match z_i of shape \(4, 3\).*got \(4, 2\)",
        ),
        (lambda: WeinceLoss()(Z[0], Z[0]), ValueError, r"z_i must have shape \(rows, d\).*got \(3,\)"),
        (lambda: WeinceLoss()(Z[:, :0], Z[:, :0]), ValueError, r"d >= 1; got \(4, 0\)"),
        (lambda: WeinceLoss()(Z[:1], Z[:1]), ValueError, "at least 2 pairs.*got 1.*drop_last"),
        (lambda: WeinceLoss()(Z[:0], Z[:0]), ValueError, "at least 2 pairs.*got 0"),
        (lambda: WeinceLoss(candidates="cross")(Z[:1], Z[:1]), ValueError, r"at least 2 rows.*\(1, 3\)"),
        (lambda: WeinceLoss()(Z.long(), Z.long()), TypeError, "floating point tensor; got torch.int64"),
        (lambda: WeinceLoss()([1.0], Z), TypeError, "z_i must be a torch.Tensor; got list"),
        (lambda: WeinceLoss()(None, Z), TypeError, "z_i must be a torch.Tensor; got NoneType"),
        (lambda: WeinceLoss()(Z), TypeError, "two tensors.*got z_i alone"),
        (lambda: WeinceLoss()(NAN, Z), ValueError, "z_i must be finite.*1 of 4 rows, first in row 2"),
        (lambda: WeinceLoss()(Z, NAN / 0), ValueError, "z_j must be finite.*4 of 4 rows, first in row 0"),
        (lambda: WeinceLoss(0), ValueError, "temperature must be positive and finite; got 0"),
        (lambda: WeinceLoss(-0.5), ValueError, "got -0.5"),
        (lambda: InfoNCELoss(math.inf), ValueError, "temperature must be positive and finite; got inf"),
        (
            lambda: WeinceLoss(reduction="avg")(Z, Z),
            ValueError,
            "reduction must be one of mean, sum, none; got 'avg'",
        ),
        (lambda: WeinceLoss(candidates="pairs")(Z, Z), ValueError, "views, cross, clip, labels; got 'pairs'"),
        (lambda: WeinceLoss(candidates="labels")(Z), TypeError, "wants labels="),
        (lambda: WeinceLoss()(Z, Z, labels=torch.arange(4)), TypeError, "takes no labels"),
        (
            lambda: WeinceLoss(candidates="labels")(Z, labels=torch.arange(5)),
            ValueError,
            r"labels must have shape \(4,\); got \(5,\)",
        ),
        (
            lambda: WeinceLoss(candidates="labels")(Z, labels=torch.rand(4)),
            TypeError,
            r"labels must be an integer tensor of shape \(4,\); got torch.float32",
        ),
        (
            lambda: WeinceLoss()(Z, Z, ids=torch.arange(8)),
            ValueError,
            r"ids must have shape \(4,\); got \(8,\)",
        ),
        (lambda: WeinceLoss()(Z, Z, ids=[0, 1, 2, 3]), TypeError, "ids must be an integer tensor.*got list"),
        (
            lambda: WeinceLoss(candidates="cross")(Z, Z, negatives=Z, ids=torch.arange(5)),
            ValueError,
            r"ids must have shape \(4,\) or \(8,\); got \(5,\)",
        ),
        (
            lambda: InfoNCELoss(torch.full((8,), 0.5), candidates="cross")(Z, Z, negatives=Z),
            ValueError,
            "temperature must hold one value, or one for each of 4 anchors; got 8",
        ),
        (
            lambda: WeinceLoss(candidates="cross")(Z, Z, negatives=Z[:, :2]),
            ValueError,
            r"negatives must match z_i of shape \(4, 3\).*got \(4, 2\)",
        ),
        (lambda: WeinceLoss()(Z, Z, negatives=Z), TypeError, 'negatives= goes with candidates="cross"'),
        (
            lambda: WeinceLoss()(Z, Z, ignore=torch.zeros(4, 4, dtype=torch.bool)),
            ValueError,
            r"ignore must have shape \(8, 8\).*got \(4, 4\)",
        ),
        (
            lambda: WeinceLoss()(Z, Z, ignore=torch.zeros(8, 8)),
            TypeError,
            "boolean tensor.*got torch.float32",
        ),
    ],
)
def test_message(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert str(caught.value).count("\n") <= 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: InfoNCELoss("0.5"), TypeError, "temperature must be a number or a tensor; got str"),
        (lambda: InfoNCELoss(torch.tensor(-0.5)), ValueError, "temperature must be positive and finite"),
        (lambda: InfoNCELoss(torch.ones(2, 2)), ValueError, r"one per anchor; got shape \(2, 2\)"),
        (
            lambda: LinkLoss(0.5),
            TypeError,
            r"a link must be a Link, like SoftmaxLink\(0.5\), or a function.*got 0.5",
        ),
        (
            lambda: LinkLoss(lambda s: s.sum(1))(Z, Z),
            ValueError,
            r"a link must return a logit for each of the scores \(8, 8\); got \(8,\)",
        ),
        (lambda: LinkLoss(lambda s: 3.0)(Z, Z), ValueError, r"for each of the scores \(\d, \d\); got float"),
        (
            lambda: LinkLoss(FunctionLink(lambda s, k: k * s, k=torch.ones(5)))(Z, Z),
            ValueError,
            "k must hold one value, or one for each of 8 anchors; got 5",
        ),
        (lambda: LogSumExp(0.5), TypeError, "a link must be a Link"),
        (
            lambda: LogSumExp(SoftmaxLink(), hardest=0),
            ValueError,
            "hardest must be an int of at least 1.*got 0",
        ),
        (lambda: LogSumExp(SoftmaxLink(), hardest=2.5), ValueError, "hardest must be an int.*got 2.5"),
        (lambda: LogSumExp(SoftmaxLink(), hardest=True), ValueError, "hardest must be an int.*got True"),
        (
            lambda: InfoNCELoss(softmax_term=-1),
            ValueError,
            "softmax_term must be a weight of at least 0; got -1",
        ),
        (
            lambda: WeinceLoss(shortfall_term=math.inf),
            ValueError,
            "shortfall_term must be a weight of at least 0; got inf",
        ),
        (lambda: DCLWLoss(sigma=0), ValueError, "sigma must be positive and finite; got 0"),
        (lambda: HCLLoss(hardness=-1), ValueError, "hardness must be a number of at least 0; got -1"),
        (
            lambda: HCLLoss(false_negatives=1),
            ValueError,
            r"false_negatives must be a share in \[0, 1\); got 1",
        ),
        (lambda: RINCELoss(q=0), ValueError, r"q must lie in \(0, 1\]; got 0"),
        (lambda: RINCELoss(weight=-1), ValueError, "weight must be positive and finite; got -1"),
        (lambda: AlignUniformLoss(spread=0), ValueError, "spread must be positive and finite; got 0"),
        (lambda: SigLIPLoss(scale=-1), ValueError, "scale must be positive, and bias finite; got scale=-1"),
        (lambda: SigLIPLoss(bias=math.inf), ValueError, "bias finite; got scale=10.0, bias=inf"),
        (lambda: KLBallLoss(0), ValueError, "radius must be positive and finite; got 0"),
        (
            lambda: KLBallLoss(2.0)(Z, Z),
            ValueError,
            r"radius must be less than log\(number of negatives\) = 1.79; got 2.0",
        ),
        (lambda: TemperatureMixtureLoss(nodes=1), ValueError, "nodes must lie between 2 and 20; got 1"),
        (lambda: TemperatureMixtureLoss(spread=0), ValueError, "spread must be positive and finite; got 0"),
        (
            lambda: WeibitLoss(endpoint=0.5),
            ValueError,
            "endpoint must be at least 1, the largest cosine; got 0.5",
        ),
        (
            lambda: DHELLoss(candidates="cross"),
            ValueError,
            "DHELLoss contrasts within a view and wants candidates=\"views\"; got 'cross'",
        ),
        (
            lambda: HCLLoss(candidates="labels"),
            ValueError,
            'HCLLoss wants one positive per anchor; got candidates="labels"',
        ),
        (lambda: WeinceLoss(tail={"k": 5}), TypeError, "tail must be a TailConfig; got dict"),
        (
            lambda: InfoNCELoss(reduction="avg"),
            ValueError,
            "reduction must be one of mean, sum, none; got 'avg'",
        ),
        (lambda: InfoNCELoss(candidates="vews"), ValueError, "got 'vews'"),
        (
            lambda: InfoNCELoss(scale=20),
            TypeError,
            "^InfoNCELoss has no option 'scale'; it takes temperature, softmax_term, shortfall_term, max_scale, "
            "candidates, reduction, engine, gather, check_finite$",
        ),
        (
            lambda: WeibitLoss(tau=1),
            TypeError,
            "^WeibitLoss has no option 'tau'; it takes beta, endpoint, cand",
        ),
        (
            lambda: WeinceLoss(0.5, tails=1),
            TypeError,
            "^WeinceLoss has no .*it takes temperature, tail, softmax_term, shortfall_term, max_scale, cand",
        ),
        (
            lambda: WeinceLoss.released(scale=20),
            TypeError,
            "^WeinceLoss has no option 'scale'; it takes temp",
        ),
        (
            lambda: LinkLoss(BlendLink(torch.rand(5), 1.0))(Z, Z),
            ValueError,
            "lam must hold one value, or one for each of 8 anchors; got 5",
        ),
    ],
)
def test_message_at_construction(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_finite_check_can_be_switched_off():
    assert WeinceLoss(check_finite=False)(NAN, Z).isnan()


def test_the_finite_check_does_not_read_other_devices():
    z = torch.randn(4, 3, device="meta")
    assert InfoNCELoss()(z, z).device.type == "meta"
    with pytest.raises(Exception, match="meta"):  # asked for, it has to read
        InfoNCELoss(check_finite=True)(z, z)


@pytest.mark.parametrize("name", CASES)
def test_every_loss_names_an_unknown_option(name):
    with pytest.raises(TypeError, match=r"^\w+ has no option 'tmperature'; it takes .*candidates, reduction"):
        CASES[name].make(fixed, candidates="views", tmperature=0.5)


def test_a_loss_of_ones_own_names_its_options():
    class Mine(ContrastiveLoss):
        def __init__(self, steepness, **options):
            super().__init__(**options)

    with pytest.raises(
        TypeError, match=r"^Mine has no option 'steep'; it takes steepness, candidates, reduction"
    ):
        Mine(1.0, steep=2)
