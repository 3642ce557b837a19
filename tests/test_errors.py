"""Bad input: one or two lines that name what was received and what is wanted."""

import math

import pytest
import torch

from weince import BlendLink, InfoNCELoss, LinkLoss, SoftmaxLink, Term, WeibitLoss, WeinceLoss

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
        (lambda: LinkLoss(0.5), TypeError, r"wanted terms like Term\(SoftmaxLink"),
        (lambda: InfoNCELoss(extra=[SoftmaxLink()]), TypeError, "wanted terms like"),
        (lambda: InfoNCELoss(extra=0.5), TypeError, "must be a list of terms.*got 0.5"),
        (lambda: InfoNCELoss(extra=Term(SoftmaxLink())), TypeError, r"must be a list of terms.*got Term\("),
        (
            lambda: InfoNCELoss(extra=[Term(SoftmaxLink(), hardest=0)]),
            ValueError,
            "hardest must be at least 1",
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
            "^InfoNCELoss has no option 'scale'; it takes temperature, candidates, extra, reduction, engine, gather, "
            "check_finite$",
        ),
        (
            lambda: WeibitLoss(tau=1),
            TypeError,
            "^WeibitLoss has no option 'tau'; it takes beta, endpoint, cand",
        ),
        (
            lambda: WeinceLoss(0.5, tails=1),
            TypeError,
            "^WeinceLoss has no .*it takes temperature, tail, cand",
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
