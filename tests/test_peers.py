"""Comparison with code by others: libraries if installed, else their formulas written with matrices."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from weince import (
    AlignUniformLoss,
    DCLLoss,
    DCLWLoss,
    DebiasedLoss,
    HCLLoss,
    InfoNCELoss,
    RINCELoss,
    SigLIPLoss,
    SupConLoss,
)


@pytest.fixture
def views():
    z_i = torch.randn(40, 16, dtype=torch.float64)
    return z_i, z_i + 0.4 * torch.randn(40, 16, dtype=torch.float64)


def same(ours, theirs, *rows):
    """Check that value and gradient agree."""
    found = []
    for loss in (ours, theirs):
        leaves = [row.clone().requires_grad_() for row in rows]
        value = loss(*leaves)
        found.append((value.detach(), *torch.autograd.grad(value, leaves)))
    assert_close(*found, rtol=1e-9, atol=1e-12)


def all_scores(a, b):
    rows = F.normalize(torch.cat([a, b]))
    return rows @ rows.T


def test_infonce_is_cross_entropy_on_the_masked_matrix(views):
    def theirs(a, b):
        logits = (all_scores(a, b) / 0.2).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(80).roll(40))

    same(InfoNCELoss(0.2), theirs, *views)


def test_infonce_across_is_that_of_query_and_key(views):
    """The loss of SimCSE and the package info-nce-pytorch: each query has one matching key."""

    def theirs(query, key):
        logits = F.normalize(query) @ F.normalize(key).T / 0.1
        return F.cross_entropy(logits, torch.arange(40))

    same(InfoNCELoss(0.1, candidates="cross"), theirs, *views)


def test_infonce_across_with_further_negatives(views):
    def theirs(query, key, negatives):
        logits = F.normalize(query) @ F.normalize(torch.cat([key, negatives])).T / 0.1
        return F.cross_entropy(logits, torch.arange(40))

    def ours(query, key, negatives):
        return InfoNCELoss(0.1, candidates="cross")(query, key, negatives=negatives)

    same(ours, theirs, *views, torch.randn(9, 16, dtype=torch.float64))


def test_infonce_of_moco(views):
    """Also info-nce-pytorch with ``negative_keys``: only the queue holds negatives, since all pairs have one id."""

    def theirs(query, key, queue):
        query, key = F.normalize(query), F.normalize(key)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ F.normalize(queue).T], dim=1)
        return F.cross_entropy(logits / 0.1, torch.zeros(40, dtype=torch.long))

    def ours(query, key, queue):
        one_id = torch.zeros(40, dtype=torch.long)
        return InfoNCELoss(0.1, candidates="cross")(query, key, negatives=queue, ids=one_id)

    same(ours, theirs, *views, torch.randn(9, 16, dtype=torch.float64))


def test_infonce_of_clip(views):
    """open_clip's ClipLoss: both directions, averaged."""

    def theirs(image, text):
        logits = F.normalize(image) @ F.normalize(text).T / 0.07
        right = torch.arange(40)
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2

    same(InfoNCELoss(0.07, candidates="clip"), theirs, *views)


def test_siglip_of_open_clip(views):
    """Its loss is a sum over all pairs of image and text, divided by the number of images."""

    def theirs(image, text):
        logits = 10 * F.normalize(image) @ F.normalize(text).T - 10
        signs = 2 * torch.eye(40, dtype=torch.float64) - 1
        return -F.logsigmoid(signs * logits).sum() / 40

    for candidates in ("cross", "clip"):  # clip has the same pairs from both sides
        ours = SigLIPLoss(candidates=candidates).double()
        ours.log_scale.data.fill_(math.log(10))  # it was rounded to float32
        same(ours, theirs, *views)


def test_hcl_and_debiased_of_their_authors(views):
    """``criterion`` of joshr17/HCL and of chingyaoc/DCL, which take both views of a batch."""

    def theirs(a, b, hardness, tau_plus=0.1, temperature=0.5):
        n = len(a)
        neg = torch.exp(all_scores(a, b) / temperature)
        mask = torch.ones(2 * n, 2 * n, dtype=torch.bool)
        for i in range(n):
            mask[i, i] = mask[i, i + n] = mask[i + n, i] = mask[i + n, i + n] = False
        neg = neg.masked_select(mask).view(2 * n, -1)
        pos = torch.exp((F.normalize(a) * F.normalize(b)).sum(1) / temperature).repeat(2)
        count = 2 * n - 2
        weights = (hardness * neg.log()).exp()
        weighed = (weights * neg).sum(-1) / weights.mean(-1)
        negatives = (-tau_plus * count * pos + weighed) / (1 - tau_plus)
        negatives = torch.clamp(negatives, min=count * math.e ** (-1 / temperature))
        return (-torch.log(pos / (pos + negatives))).mean()

    same(HCLLoss(), lambda a, b: theirs(a, b, 1.0), *views)
    same(DebiasedLoss(), lambda a, b: theirs(a, b, 0.0), *views)


def test_rince_of_its_authors(views):
    """``RINCE`` of chingyaoc/RINCE: q = 0.1, lam = 0.01."""

    def theirs(a, b, q=0.1, lam=0.01, temperature=0.5):
        scores = all_scores(a, b) / temperature
        pos = torch.exp(scores.diagonal(40)).repeat(2)
        out = ~(torch.eye(80, dtype=torch.bool) | torch.eye(80, dtype=torch.bool).roll(40, 1))
        neg = (torch.exp(scores) * out).sum(1)
        return (-(pos**q) / q + (lam * (pos + neg)) ** q / q).mean()

    same(RINCELoss(), theirs, *views)


def test_align_uniform_of_its_authors(views):
    """``align_loss`` and ``uniform_loss`` of ssnl/align_uniform, on pairs of different images of both views."""

    def theirs(a, b):
        a, b = F.normalize(a), F.normalize(b)
        alignment = (a - b).norm(p=2, dim=1).pow(2).mean()
        rows = torch.cat([a, b])
        out = ~(torch.eye(80, dtype=torch.bool) | torch.eye(80, dtype=torch.bool).roll(40, 1))
        squared = (rows.unsqueeze(0) - rows.unsqueeze(1)).square().sum(2)[out]
        return alignment + squared.mul(-2).exp().mean().log()

    same(AlignUniformLoss(), theirs, *views)


def test_nt_xent_of_pytorch_metric_learning(views):
    losses = pytest.importorskip("pytorch_metric_learning.losses")

    def theirs(a, b):
        return losses.NTXentLoss(temperature=0.2)(torch.cat([a, b]), torch.arange(40).repeat(2))

    same(InfoNCELoss(0.2), theirs, *views)


def test_supcon_of_pytorch_metric_learning(views):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    labels = torch.arange(40) % 7
    theirs = losses.SupConLoss(temperature=0.2)
    same(lambda z: SupConLoss(0.2)(z, labels=labels), lambda z: theirs(z, labels), views[0])
    same(
        lambda z, y: SupConLoss(0.2)(z, y, labels=labels),
        lambda z, y: theirs(torch.cat([z, y]), labels.repeat(2)),
        *views,
    )


@pytest.mark.parametrize(
    ("name", "options", "ours"),
    [
        ("NTXentLoss", {"temperature": 0.2}, InfoNCELoss(0.2)),
        ("DCLLoss", {"temperature": 0.2}, DCLLoss(0.2)),
        ("DCLLoss", {}, DCLLoss()),
        ("DCLWLoss", {"temperature": 0.2, "sigma": 0.4}, DCLWLoss(0.2, sigma=0.4)),
        ("DCLWLoss", {}, DCLWLoss()),
    ],
)
def test_losses_of_lightly(views, name, options, ours):
    """lightly needs torchvision, so it is no development dependency; the losses agreed with lightly 1.6.0."""
    losses = pytest.importorskip("lightly.loss", exc_type=ImportError)
    same(ours, getattr(losses, name)(**options), *views)
