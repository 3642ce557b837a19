"""Changes to the blend that ask why it helps or hurts: another endpoint, softmax on the positive, a matched slope."""

import math

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from weince import BlendLink, LinkLoss, TailConfig, Term, WeinceLoss, functional
from weince.candidates import contests
from weince.lab.configure import LossConfig, build_loss
from weince.losses import RELEASED_TAIL, released_terms

CHANGES = {
    "endpoint": {"endpoint": 1.05},
    "negatives only": {"positive": "softmax"},
    "matched slope": {"beta": "slope"},
    "all": {"endpoint": 1.2, "positive": "softmax", "beta": "slope"},
}
BASES = {"paper": TailConfig(), "blend": RELEASED_TAIL}


def naive(z_i, z_j, tail, temperature):
    """The mean loss over both views, anchor by anchor, as the definition reads; lam and beta are numbers."""
    rows, n = torch.cat([z_i, z_j]), len(z_i)
    roles = reference.roles_views(n)
    scores = [[reference.cosine(a, c) for c in rows] for a in rows]
    negatives = [
        [1 - float(s.detach()) for s, role in zip(row, kinds, strict=True) if role == "negative"]
        for row, kinds in zip(scores, roles, strict=True)
    ]
    losses = []
    for row, kinds, found in zip(
        scores, roles, reference.tail_statistics(negatives, [True] * 2 * n, tail), strict=True
    ):
        beta = {
            "fit": found["beta"],
            "slope": (found["rho"] + tail.endpoint - 1) / float(temperature.detach()),
        }
        beta = beta.get(tail.beta, tail.beta)
        eps = tail.eps if tail.soft_cap else 0.0
        logits = []
        for s, kind in zip(row, kinds, strict=True):
            inside = tail.endpoint - s.clamp(max=1 - tail.eps) + eps
            logit = (1 - found["lam"]) * s / temperature - found["lam"] * beta * inside.log()
            if kind == "positive":
                own = s / temperature if tail.positive == "softmax" else logit
                logit = own
            if kind != "none":
                logits.append(logit)
        losses.append(torch.logsumexp(torch.stack(logits), 0) - own)
    return torch.stack(losses).mean()


def tail_of(base, change):
    return TailConfig(**{**BASES[base].__dict__, **CHANGES[change]})


def pairs(n=24, noise=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z_i = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return z_i, z_i + noise * torch.randn(n, 6, generator=generator, dtype=torch.float64)


def gradients(loss, *leaves):
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    value = loss(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves)


@pytest.mark.parametrize("engine", ["dense", "chunked", "auto"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("change", CHANGES)
def test_value_and_gradient_are_those_of_the_definition(base, change, engine):
    tail, tau = tail_of(base, change), torch.tensor(0.3, dtype=torch.float64)
    z = pairs()
    ours = gradients(lambda a, b, t: WeinceLoss(t, tail=tail, engine=engine)(a, b), *z, tau)
    wanted = gradients(lambda a, b, t: naive(a, b, tail, t), *z, tau)
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_changes_the_loss(change):
    plain, changed = WeinceLoss()(*pairs()), WeinceLoss(tail=tail_of("paper", change))(*pairs())
    assert abs(float(plain - changed)) > 1e-3


@given(st.floats(1.0, 3.0), st.floats(0.0, 1.0), st.floats(0.0, 8.0), st.integers(0, 5))
def test_the_links_slope_is_the_derivative_of_its_logit(endpoint, lam, beta, column):
    shortfall = torch.tensor([[2.0, 1.3, 0.7, 0.2, 0.01, 1e-5]], dtype=torch.float64, requires_grad=True)
    link = BlendLink(lam, beta, 0.2, endpoint=endpoint, softmax_at=torch.tensor([column]))
    logits = link.logit(shortfall)
    (slope,) = torch.autograd.grad(logits.sum(), shortfall)
    shortfall, logits = shortfall.detach(), logits.detach()
    torch.testing.assert_close(link.slope(shortfall), -slope, rtol=1e-12, atol=1e-12)
    assert float(logits[0, column]) == pytest.approx((1 - float(shortfall[0, column])) / 0.2)
    for other in {0, 1, 2, 3, 4, 5} - {column}:
        d = float(shortfall[0, other])
        blended = (1 - lam) * (1 - d) / 0.2 - lam * beta * math.log(endpoint - 1 + 1e-6 + d)
        assert float(logits[0, other]) == pytest.approx(blended, abs=1e-9)


@pytest.mark.parametrize("endpoint", [1.0, 1.3])
def test_a_matched_slope_is_that_of_the_softmax_at_the_hardest_negative(endpoint):
    tail = TailConfig(beta="slope", soft_cap=False, endpoint=endpoint)
    rows = torch.nn.functional.normalize(torch.cat(pairs()))
    shortfall = 1 - rows @ rows.T
    left_out = torch.eye(48, dtype=torch.bool) | torch.eye(48, dtype=torch.bool).roll(24, 1)
    stats = functional.tail_stats(1 - shortfall, left_out, tail=tail)
    beta = (stats.rho + endpoint - 1) / 0.2
    at_rho = BlendLink(stats.lam, beta, 0.2, soft_cap=False, endpoint=endpoint).slope(stats.rho.unsqueeze(1))
    torch.testing.assert_close(at_rho, torch.full_like(at_rho, 5.0))
    # and the loss with that link is the one that finds it by itself
    z = pairs()
    given_link = LinkLoss(BlendLink(stats.lam, beta, 0.2, soft_cap=False, endpoint=endpoint))
    torch.testing.assert_close(WeinceLoss(0.2, tail=tail)(*z), given_link(*z))


def test_anchors_without_negatives_keep_a_finite_loss():
    z = pairs(6)
    for change in ("matched slope", "negatives only", "endpoint"):
        loss = WeinceLoss(tail=tail_of("paper", change), candidates="cross")
        value = loss(*z, ids=torch.zeros(6, dtype=torch.int64))
        assert float(value) == 0


@pytest.mark.parametrize("candidates", ["cross", "clip"])
def test_the_positive_is_found_in_every_layout(candidates):
    z_i, z_j = pairs()
    loss = WeinceLoss(0.3, tail=TailConfig(positive="softmax", rho0=2.0), candidates=candidates)
    scores = torch.nn.functional.normalize(z_i) @ torch.nn.functional.normalize(z_j).T
    sides = [scores, scores.T] if candidates == "clip" else [scores]
    wanted = []
    for side in sides:
        stats = functional.tail_stats(side, torch.arange(24), tail=loss.link.tail)
        logits = BlendLink(stats.lam, stats.beta, 0.3).logit(1 - side)
        logits.diagonal().copy_(side.diagonal() / 0.3)
        wanted.append(torch.nn.functional.cross_entropy(logits, torch.arange(24)))
    torch.testing.assert_close(loss(z_i, z_j), torch.stack(wanted).mean())


def test_several_positives_are_refused():
    loss = WeinceLoss(tail=TailConfig(positive="softmax"), candidates="labels")
    with pytest.raises(ValueError, match="wants one positive per anchor; got labels"):
        loss(pairs()[0], labels=torch.arange(24) // 2)


@pytest.mark.parametrize("change", CHANGES)
def test_the_kernels_refuse_what_they_do_not_know(change):
    pytest.importorskip("triton", minversion="3.5")
    fused = pytest.importorskip("weince.engines.fused")
    link = WeinceLoss(tail=tail_of("blend", change)).link
    (contest,) = contests("views", *(z.float() for z in pairs()))
    why = fused._refusal(contest, [Term(link)], link.tail)
    assert "no blend with another endpoint, softmax on positives or a matched slope" in why
    plain = WeinceLoss(tail=BASES["blend"]).link
    assert fused._refusal(contest, [Term(plain)], plain.tail) is None


@pytest.mark.parametrize("change", CHANGES)
def test_extra_terms_go_along(change):
    z, tail, (softmax, shortfall) = pairs(), tail_of("blend", change), released_terms()
    both = WeinceLoss(tail=tail, extra=[softmax, shortfall])(*z)
    alone = LinkLoss(softmax.link, extra=released_terms())(*z) - LinkLoss(softmax.link)(*z)
    torch.testing.assert_close(both, WeinceLoss(tail=tail)(*z) + alone)


@pytest.mark.parametrize("change", CHANGES)
def test_each_is_a_line_of_configuration(change):
    z = pairs()
    for preset in BASES:
        built = build_loss(LossConfig(preset, 0.2, tail=CHANGES[change]))
        torch.testing.assert_close(built(*z), WeinceLoss(0.2, tail=tail_of(preset, change))(*z))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": 0.9}, "endpoint must be at least 1, the largest cosine; got 0.9"),
        ({"endpoint": math.inf}, "endpoint must be positive and finite; got inf"),
        ({"positive": "none"}, 'positive must be "blend" or "softmax"; got \'none\''),
        ({"beta": "slopes"}, 'beta must be "fit" or a number of at least 0, or "slope"; got \'slopes\''),
    ],
)
def test_what_has_no_meaning_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        TailConfig(**options)
