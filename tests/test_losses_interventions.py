"""Variants of the blend that test why it helps or hurts: endpoint, softmax on the positive, matched slope."""

import math

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from weince import BlendLink, InfoNCELoss, LinkLoss, TailConfig, WeinceLoss, tail_stats
from weince.lab.configure import LossConfig, build_loss
from weince.losses.weince import RELEASED_TAIL

CHANGES = {
    "endpoint": {"endpoint": 1.05},
    "negatives only": {"positive": "softmax"},
    "matched slope": {"beta": "slope"},
    "all": {"endpoint": 1.2, "positive": "softmax", "beta": "slope"},
}
BASES = {"paper": TailConfig(), "blend": RELEASED_TAIL}


def naive(z_i, z_j, tail, temperature):
    """Mean loss over both views by the definition; lam and beta are numbers without a gradient."""
    rows = torch.cat([z_i, z_j])
    batch = reference.scored(rows, rows, reference.roles_views(len(z_i)))
    losses, _ = reference.weince_losses(batch, temperature, tail)
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
    ours = gradients(lambda a, b, t: WeinceLoss.paper(t, tail=tail, engine=engine)(a, b), *z, tau)
    wanted = gradients(lambda a, b, t: naive(a, b, tail, t), *z, tau)
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-11)


@given(st.floats(1.0, 3.0), st.floats(0.0, 1.0), st.floats(0.0, 8.0))
def test_the_links_slope_is_the_derivative_of_its_logit(endpoint, lam, beta):
    shortfall = torch.tensor([[2.0, 1.3, 0.7, 0.2, 0.01, 1e-5]], dtype=torch.float64, requires_grad=True)
    link = BlendLink(lam, beta, 0.2, endpoint=endpoint)
    logits = link.logit(shortfall)
    (slope,) = torch.autograd.grad(logits.sum(), shortfall)
    shortfall, logits = shortfall.detach(), logits.detach()
    torch.testing.assert_close(link.slope(shortfall), -slope, rtol=1e-12, atol=1e-12)
    for d, logit in zip(shortfall[0].tolist(), logits[0].tolist(), strict=True):
        blended = (1 - lam) * (1 - d) / 0.2 - lam * beta * math.log(endpoint - 1 + 1e-6 + d)
        assert logit == pytest.approx(blended, abs=1e-9)


@pytest.mark.parametrize("endpoint", [1.0, 1.3])
def test_a_matched_slope_is_that_of_the_softmax_at_the_hardest_negative(endpoint):
    tail = TailConfig(beta="slope", soft_cap=False, endpoint=endpoint)
    rows = torch.nn.functional.normalize(torch.cat(pairs()))
    shortfall = 1 - rows @ rows.T
    left_out = torch.eye(48, dtype=torch.bool) | torch.eye(48, dtype=torch.bool).roll(24, 1)
    stats = tail_stats(1 - shortfall, left_out, tail=tail)
    beta = (stats.rho + endpoint - 1) / 0.2
    at_rho = BlendLink(stats.lam, beta, 0.2, soft_cap=False, endpoint=endpoint).slope(stats.rho.unsqueeze(1))
    torch.testing.assert_close(at_rho, torch.full_like(at_rho, 5.0))
    # WeinceLoss, which computes this link by itself, gives the same loss.
    z = pairs()
    given_link = LinkLoss(BlendLink(stats.lam, beta, 0.2, soft_cap=False, endpoint=endpoint))
    torch.testing.assert_close(WeinceLoss.paper(0.2, tail=tail)(*z), given_link(*z))


def test_anchors_without_negatives_keep_a_finite_loss():
    z = pairs(6)
    for change in ("matched slope", "negatives only", "endpoint"):
        loss = WeinceLoss.paper(tail=tail_of("paper", change), candidates="cross")
        value = loss(*z, ids=torch.zeros(6, dtype=torch.int64))
        assert float(value) == 0


@pytest.mark.parametrize("candidates", ["cross", "clip"])
def test_the_positive_is_found_in_every_layout(candidates):
    z_i, z_j = pairs()
    loss = WeinceLoss.negatives_only(
        0.3, tail=TailConfig(positive="softmax", rho0=2.0), candidates=candidates
    )
    scores = torch.nn.functional.normalize(z_i) @ torch.nn.functional.normalize(z_j).T
    sides = [scores, scores.T] if candidates == "clip" else [scores]
    wanted = []
    for side in sides:
        stats = tail_stats(side, torch.arange(24), tail=loss.tail)
        logits = BlendLink(stats.lam, stats.beta, 0.3).logit(1 - side)
        logits.diagonal().copy_(side.diagonal() / 0.3)
        wanted.append(torch.nn.functional.cross_entropy(logits, torch.arange(24)))
    torch.testing.assert_close(loss(z_i, z_j), torch.stack(wanted).mean())


def test_a_learned_temperature_gets_no_gradient_through_a_matched_slope():
    tail, tau = TailConfig(beta="slope", gate="rho"), torch.tensor(0.3, dtype=torch.float64)
    stats = WeinceLoss.paper(0.3, tail=tail)(*pairs(), return_stats=True).stats
    fixed = BlendLink(stats.lam, stats.rho / 0.3)  # only the softmax part depends on the temperature
    _, (found,) = gradients(lambda t: WeinceLoss.paper(t, tail=tail)(*pairs()), tau)
    _, (wanted,) = gradients(lambda t: LinkLoss(fixed.replace({"temperature": t}))(*pairs()), tau)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("change", CHANGES)
def test_the_two_terms_go_along(change):
    z, tail = pairs(), tail_of("blend", change)
    both = WeinceLoss(tail=tail)(*z)
    alone = WeinceLoss(0.5, tail=None)(*z) - InfoNCELoss(0.5)(*z)
    torch.testing.assert_close(both, WeinceLoss.paper(tail=tail)(*z) + alone)


@pytest.mark.parametrize("change", CHANGES)
def test_each_is_a_line_of_configuration(change):
    z = pairs()
    for preset in BASES:
        built = build_loss(LossConfig(preset, 0.2, tail=CHANGES[change]))
        torch.testing.assert_close(built(*z), WeinceLoss.paper(0.2, tail=tail_of(preset, change))(*z))
