"""Every loss in float64 loops over anchors: slow, and short enough to be checked against its paper by eye.

Embeddings are torch tensors, so autograd computes the gradient. Quantities without a gradient (tail statistics,
weights, solved temperatures) are Python numbers. An anchor without a positive has loss 0 and is left out of the mean.
An anchor without negatives has loss 0 if the formula has no value for it, but it counts in the mean.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from scipy.optimize import brentq
from scipy.special import roots_hermitenorm
from torch import Tensor
from torch.nn.functional import softplus

from weince import TailConfig

Role = str  # "positive", "negative" or "none"
Logit = Callable[[Tensor], Tensor]
ZERO = torch.zeros((), dtype=torch.float64)


# Roles: which candidates are positives and negatives of which anchors.


def roles_views(n: int, ids: list[int] | None = None) -> list[list[Role]]:
    """The rows of both views are anchors and candidates."""
    table = []
    for i in range(2 * n):
        row = []
        for j in range(2 * n):
            if i == j:
                row.append("none")
            elif abs(i - j) == n:
                row.append("positive")
            elif ids is not None and ids[i % n] == ids[j % n]:
                row.append("none")
            else:
                row.append("negative")
        table.append(row)
    return table


def roles_cross(n: int, extra: int, ids: list[int] | None = None) -> list[list[Role]]:
    """Queries against keys and further negatives; ids may cover the keys alone or the negatives too."""
    table = []
    for i in range(n):
        row = []
        for j in range(n + extra):
            if i == j:
                row.append("positive")
            elif ids is not None and j < len(ids) and ids[i] == ids[j]:
                row.append("none")
            else:
                row.append("negative")
        table.append(row)
    return table


def roles_labels(labels: list[int], ids: list[int] | None = None) -> list[list[Role]]:
    table = []
    for i, mine in enumerate(labels):
        row = []
        for j, theirs in enumerate(labels):
            if i == j:
                row.append("none")
            elif mine == theirs:
                row.append("positive")
            elif ids is not None and ids[i] == ids[j]:
                row.append("none")
            else:
                row.append("negative")
        table.append(row)
    return table


def ignoring(roles: list[list[Role]], ignore: Tensor) -> list[list[Role]]:
    return [
        ["none" if role == "negative" and ignore[i, j] else role for j, role in enumerate(row)]
        for i, row in enumerate(roles)
    ]


class Anchor(NamedTuple):
    """Scores of one anchor with its positives, its negatives, and the negatives of its own view."""

    positives: Tensor
    negatives: Tensor
    own_view: Tensor


def scored(anchors: Tensor, candidates: Tensor, roles: list[list[Role]]) -> list[Anchor]:
    """The anchors of one problem."""
    half = len(candidates) // 2
    found = []
    for i, (anchor, row) in enumerate(zip(anchors, roles, strict=True)):
        scores = candidates @ anchor / (candidates.norm(dim=1) * anchor.norm())
        positives = [j for j, role in enumerate(row) if role == "positive"]
        negatives = [j for j, role in enumerate(row) if role == "negative"]
        own_view = [j for j in negatives if (j < half) == (i < half)]
        found.append(Anchor(scores[positives], scores[negatives], scores[own_view]))
    return found


def mean(batch: list[Anchor], losses: list[Tensor]) -> Tensor:
    """Mean loss over the anchors that have a positive."""
    return torch.stack(losses).sum() / max(1, sum(len(anchor.positives) > 0 for anchor in batch))


# Losses whose formula uses only the anchor's own scores. All return one loss per anchor.


def each(batch: list[Anchor], loss: Callable[[Anchor], Tensor], *, alone: bool = False) -> list[Tensor]:
    """One loss per anchor; ``alone``: the formula has a value for anchors without negatives too."""
    return [
        loss(anchor) if len(anchor.positives) and (alone or len(anchor.negatives)) else ZERO
        for anchor in batch
    ]


def cross_entropy(
    positives: Tensor, negatives: Tensor, logit: Logit, positive_logit: Logit | None = None
) -> Tensor:
    """``-log softmax`` of a positive among all candidates; with several positives, the mean over them."""
    own = (positive_logit or logit)(positives)
    return (torch.logsumexp(torch.cat([own, logit(negatives)]), 0) - own).mean()


def with_logit(batch: list[Anchor], logit: Logit) -> list[Tensor]:
    return each(batch, lambda a: cross_entropy(a.positives, a.negatives, logit), alone=True)


def info_nce(batch: list[Anchor], temperature: Tensor) -> list[Tensor]:
    return with_logit(batch, lambda s: s / temperature)


def weibit(batch: list[Anchor], beta: Tensor, endpoint: float = 1.0) -> list[Tensor]:
    return with_logit(batch, lambda s: -beta * torch.log(endpoint - s))


def power(batch: list[Anchor], alpha: Tensor) -> list[Tensor]:
    return with_logit(batch, lambda s: alpha * torch.log((1 + s) / 2))


def temperature_free(batch: list[Anchor]) -> list[Tensor]:
    return with_logit(batch, lambda s: torch.log((1 + s) / (1 - s)))


def hardest_of(negatives: Tensor, number: int) -> Tensor:
    return negatives.sort(descending=True).values[:number]


def over_hardest(batch: list[Anchor], logit: Logit, number: int) -> list[Tensor]:
    return each(
        batch, lambda a: cross_entropy(a.positives, hardest_of(a.negatives, number), logit), alone=True
    )


def dcl(batch: list[Anchor], temperature: Tensor) -> list[Tensor]:
    return each(
        batch,
        lambda a: (-a.positives / temperature + torch.logsumexp(a.negatives / temperature, 0)).mean(),
    )


def dhel(batch: list[Anchor], temperature: Tensor) -> list[Tensor]:
    def loss(anchor: Anchor) -> Tensor:
        if not len(anchor.own_view):
            return ZERO
        return (-anchor.positives / temperature + torch.logsumexp(anchor.own_view / temperature, 0)).mean()

    return each(batch, loss)


def hcl(batch: list[Anchor], temperature: Tensor, hardness: float, false_negatives: float) -> list[Tensor]:
    def loss(anchor: Anchor) -> Tensor:
        (positive,), negative, n = anchor.positives, anchor.negatives, len(anchor.negatives)
        own = torch.exp(positive / temperature)
        weighed = torch.exp((1 + hardness) * negative / temperature).sum()
        seen = n * weighed / torch.exp(hardness * negative / temperature).sum()
        lowest = n * torch.exp(-1 / torch.as_tensor(temperature, dtype=torch.float64))
        negatives = torch.maximum((-false_negatives * n * own + seen) / (1 - false_negatives), lowest)
        return -torch.log(own / (own + negatives))

    return each(batch, loss)


def rince(batch: list[Anchor], temperature: Tensor, q: float, weight: float) -> list[Tensor]:
    def loss(anchor: Anchor) -> Tensor:
        (positive,) = anchor.positives
        own, others = torch.exp(positive / temperature), torch.exp(anchor.negatives / temperature).sum()
        return -(own**q) / q + (weight * (own + others)) ** q / q

    return each(batch, loss)


def siglip(batch: list[Anchor], log_scale: Tensor, bias: Tensor) -> list[Tensor]:
    a = log_scale.exp()

    def loss(anchor: Anchor) -> Tensor:
        yes = softplus(-(a * anchor.positives + bias), threshold=1e9).sum()
        return yes + softplus(a * anchor.negatives + bias, threshold=1e9).sum()

    return each(batch, loss, alone=True)


def mixture(batch: list[Anchor], temperature: Tensor, spread: float, nodes: int) -> list[Tensor]:
    places, weights = roots_hermitenorm(nodes)

    def loss(anchor: Anchor) -> Tensor:
        likelihood = ZERO
        for place, weight in zip(places, weights / weights.sum(), strict=True):
            t = temperature * math.exp(spread * place)
            (own,) = torch.exp(anchor.positives / t)
            likelihood = likelihood + weight * own / (own + torch.exp(anchor.negatives / t).sum())
        return -torch.log(likelihood)

    return each(batch, loss, alone=True)


def kl_ball(batch: list[Anchor], radius: float, min_temperature: float = 0.05) -> list[Tensor]:
    def loss(anchor: Anchor) -> Tensor:
        negatives = anchor.negatives.detach()

        def too_far(log_t: float) -> float:
            weights = torch.softmax(negatives / math.exp(log_t), 0)
            return float(torch.xlogy(weights, weights * len(negatives)).sum()) - radius

        if math.log(len(negatives)) <= radius:  # no softmax over so few is as far from uniform
            return (
                -anchor.positives + min_temperature * torch.logsumexp(anchor.negatives / min_temperature, 0)
            ).mean()
        t = math.exp(brentq(too_far, math.log(1e-3), math.log(1e2), xtol=1e-15, rtol=1e-14))
        t = max(t, min_temperature)
        return (-anchor.positives + t * torch.logsumexp(anchor.negatives / t, 0)).mean()

    return each(batch, loss)


def each_alone(batch: list[Anchor], temperature: Tensor) -> list[Tensor]:
    """InfoNCE with one logarithm per positive against the negatives alone."""

    def loss(anchor: Anchor) -> Tensor:
        logits = anchor.negatives / temperature
        nats = [
            torch.logsumexp(torch.cat([s[None] / temperature, logits]), 0) - s / temperature
            for s in anchor.positives
        ]
        return torch.stack(nats).mean()

    return each(batch, loss, alone=True)


def harder(batch: list[Anchor], temperature: Tensor, hardness: float) -> list[Tensor]:
    """InfoNCE where a negative's logit has a part without gradient by its score."""

    def loss(anchor: Anchor) -> Tensor:
        logits = anchor.negatives / temperature + hardness * anchor.negatives.detach()
        own = anchor.positives / temperature
        return (torch.logsumexp(torch.cat([own, logits]), 0) - own).mean()

    return each(batch, loss, alone=True)


def mw(batch: list[Anchor], temperature: Tensor) -> list[Tensor]:
    return each(batch, lambda a: softplus((a.negatives - a.positives[0]) / temperature, threshold=1e9).mean())


def lse_pair(batch: list[Anchor], temperature: Tensor) -> list[Tensor]:
    def loss(anchor: Anchor) -> Tensor:
        gaps = (anchor.negatives[:, None] - anchor.positives) / temperature
        return torch.log(1 + gaps.exp().sum())

    return each(batch, loss)


def sum_marg_lh(batch: list[Anchor], temperature: Tensor) -> list[Tensor]:
    def loss(anchor: Anchor) -> Tensor:
        negatives, positives = (
            torch.exp(s / temperature).sum() for s in (anchor.negatives, anchor.positives)
        )
        return torch.log(1 + negatives / positives)

    return each(batch, loss)


def focal(batch: list[Anchor], temperature: Tensor, gamma: float) -> list[Tensor]:
    def loss(anchor: Anchor) -> Tensor:
        own, others = (
            torch.exp(anchor.positives[0] / temperature),
            torch.exp(anchor.negatives / temperature).sum(),
        )
        p = own / (own + others)
        return -((1 - p) ** gamma) * torch.log(p)

    return each(batch, loss)


# Losses that depend on the whole batch.


def dclw(batch: list[Anchor], temperature: Tensor, sigma: float) -> list[Tensor]:
    own = [math.exp(float(anchor.positives.detach()[0]) / sigma) for anchor in batch]
    weights = iter([2 - len(own) * value / sum(own) for value in own])

    def loss(anchor: Anchor, weight: float) -> Tensor:
        (positive,) = anchor.positives
        return -weight * positive / temperature + torch.logsumexp(anchor.negatives / temperature, 0)

    return [
        loss(anchor, weight) if len(anchor.negatives) else ZERO
        for anchor, weight in zip(batch, weights, strict=True)
    ]


def align_uniform(batch: list[Anchor], weight: float, spread: float) -> list[Tensor]:
    apart = torch.cat([2 - 2 * anchor.negatives for anchor in batch])
    uniformity = torch.exp(-spread * apart).mean().log() if len(apart) else ZERO
    return each(batch, lambda a: (2 - 2 * a.positives).mean() + weight * uniformity, alone=True)


# WEINCE: Algorithm 1, and what the authors' released code adds.


def tail_size(negatives: int, config: TailConfig) -> int:
    if isinstance(config.k, int):
        return min(config.k, negatives)
    return min(max(config.k_min, round(config.k * negatives)), config.k_max, negatives)


def line(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Least squares with an intercept: slope, sum of squared errors, spread of x."""
    n = len(x)
    mean_x, mean_y = sum(x) / n, sum(y) / n
    sxx = sum((a - mean_x) ** 2 for a in x)
    sxy = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = sxy / max(sxx, 1e-12)
    intercept = mean_y - slope * mean_x
    sse = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return slope, max(sse, 1e-12), sxx


def aic(sse: float, n: int) -> float:
    return n * math.log(sse / n) + 4


def tail_fit(shortfalls: list[float], config: TailConfig) -> tuple[float, float] | None:
    """Slope and difference in AIC, or None if no fit is possible."""
    k = tail_size(len(shortfalls), config)
    ordered = [max(d, config.eps) for d in sorted(shortfalls)[:k]]
    dropped = max(1, int(k * config.drop)) if config.drop else 0
    ranks = range(1 + dropped, k + 1)
    if len(ranks) < 3:
        return None
    log_d = [math.log(ordered[rank - 1]) for rank in ranks]
    log_f = [math.log(rank / (k + 1)) for rank in ranks]
    slope, sse_weibull, sxx = line(log_d, log_f)
    _, sse_gumbel, _ = line(log_d, [math.log(-f) for f in log_f])
    if sxx <= 1e-12:
        return None
    n = len(ranks)
    return max(slope, 0.0), aic(sse_gumbel, n) - aic(sse_weibull, n)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def tail_statistics(
    shortfalls: list[list[float]], counted: list[bool], config: TailConfig
) -> list[dict[str, float]]:
    """rho, beta, daic and lam of every anchor, from the shortfalls of its negatives."""
    rho = [max(min(row), config.eps) if row else math.inf for row in shortfalls]
    pool = sorted(r for r, counts in zip(rho, counted, strict=True) if counts and r < math.inf)
    if config.rho0 is not None:
        pivot = config.rho0
    else:
        pivot = pool[round(config.rho0_quantile * (len(pool) - 1))] if pool else math.inf
    statistics = []
    for own_rho, row in zip(rho, shortfalls, strict=True):
        fit = tail_fit(row, config)
        if fit is None:
            statistics.append({"rho": own_rho, "beta": 0.0, "daic": 0.0, "lam": 0.0})
            continue
        beta, daic = fit
        near = sigmoid(config.kappa_rho * math.log(pivot / own_rho))
        weibull = sigmoid(config.kappa_aic * (daic - config.margin))
        lam = {"both": near * weibull, "rho": near, "aic": weibull}[config.gate]
        statistics.append({"rho": own_rho, "beta": beta, "daic": daic, "lam": lam})
    return statistics


def blend(s: Tensor, lam: float, beta: float, temperature: Tensor, config: TailConfig) -> Tensor:
    capped = s.clamp(max=1 - config.eps)
    inside = config.endpoint - capped + (config.eps if config.soft_cap else 0.0)
    return (1 - lam) * s / temperature + lam * (-beta * torch.log(inside))


def weince_losses(
    batch: list[Anchor], temperature: Tensor, config: TailConfig
) -> tuple[list[Tensor], list[dict[str, float]]]:
    """The loss of every anchor, and its statistics."""
    shortfalls = [[1 - s for s in anchor.negatives.tolist()] for anchor in batch]
    counted = [len(anchor.positives) > 0 for anchor in batch]
    statistics = tail_statistics(shortfalls, counted, config)
    losses = []
    for anchor, found in zip(batch, statistics, strict=True):
        beta: float = found["beta"] if config.beta == "fit" else config.beta  # type: ignore[assignment]
        if config.beta == "slope":
            beta = (found["rho"] + config.endpoint - 1) / float(temperature) if shortfalls else 0.0
            beta = beta if math.isfinite(beta) else 0.0

        def blended(s: Tensor, lam: float = found["lam"], beta: float = beta) -> Tensor:
            return blend(s, lam, beta, temperature, config)

        own = (lambda s: s / temperature) if config.positive == "softmax" else None
        losses += each([anchor], lambda a: cross_entropy(a.positives, a.negatives, blended, own), alone=True)  # noqa: B023
    return losses, statistics


class Released:
    """The authors' released loss; it keeps a running slope between batches."""

    slope = 4.0

    def __call__(
        self, batch: list[Anchor], temperature: Tensor, config: TailConfig, softmax: float, shortfall: float
    ) -> list[Tensor]:
        blended, _ = weince_losses(batch, temperature, config)
        return self.with_terms(batch, blended, temperature, softmax, shortfall)

    def with_terms(
        self, batch: list[Anchor], losses: list[Tensor], temperature: Tensor, softmax: float, shortfall: float
    ) -> list[Tensor]:
        """Add the two weighted cross-entropies over the positive and the 50 hardest negatives."""
        if shortfall:
            self.slope = moved_slope(self.slope, [s for a in batch for s in a.negatives.tolist()])
        first = over_hardest(batch, lambda s: s / temperature, 50)
        second = over_hardest(batch, lambda s: -self.slope * torch.log((1 - s).clamp_min(1e-6)), 50)
        return [a + softmax * b + shortfall * c for a, b, c in zip(losses, first, second, strict=True)]


def moved_slope(slope: float, scores: list[float], fewest: int = 1024) -> float:
    """The running slope after a batch; the fit uses the smallest shortfalls of all its negatives."""
    k = min(max(fewest, int(0.05 * len(scores))), len(scores))
    ordered = [max(d, 1e-6) for d in sorted(1 - s for s in scores)[:k]]
    ranks = range(1 + max(1, int(0.05 * k)), k + 1)
    if len(ranks) < 3:
        return slope
    log_d = [math.log(ordered[rank - 1]) for rank in ranks]
    log_f = [math.log(rank / (k + 1)) for rank in ranks]
    fitted, sse, sxx = line(log_d, log_f)
    mean_f = sum(log_f) / len(log_f)
    r2 = 1 - sse / max(sum((f - mean_f) ** 2 for f in log_f), 1e-12)
    if sxx <= 1e-12 or fitted <= 0 or r2 < 0.85:
        return slope
    return 0.9 * slope + 0.1 * min(max(fitted, 0.5), 16.0)


def weince(
    anchors: Tensor,
    candidates: Tensor,
    roles: list[list[Role]],
    temperature: float = 0.5,
    config: TailConfig = TailConfig(),
) -> tuple[Tensor, list[dict[str, float]]]:
    """Mean loss of Algorithm 1 over the anchors that have a positive, and the statistics of all."""
    batch = scored(anchors, candidates, roles)
    losses, statistics = weince_losses(batch, torch.as_tensor(temperature, dtype=torch.float64), config)
    return mean(batch, losses), statistics


def with_link(anchors: Tensor, candidates: Tensor, roles: list[list[Role]], logit: Logit) -> Tensor:
    """Mean loss over the anchors, with one logit function for all."""
    batch = scored(anchors, candidates, roles)
    return mean(batch, with_logit(batch, logit))
