"""Algorithm 1 in float64, loop by loop: slow, and short enough to be checked against the paper by eye.

Embeddings are torch tensors, so that autograd gives the gradient of the loss; the tail statistics are plain
Python numbers, so that no gradient passes through them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from weince import TailConfig

Role = str  # "positive", "negative" or "none"
Logit = Callable[[Tensor], Tensor]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) / (a.norm() * b.norm())


def roles_views(n: int, ids: list[int] | None = None) -> list[list[Role]]:
    """Both views are anchors, and candidates."""
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


def loss_of_anchor(scores: list[Tensor], roles: list[Role], logit: Logit) -> Tensor:
    """``-log softmax`` of the positive; with several, the mean over them."""
    competing = [logit(s) for s, role in zip(scores, roles, strict=True) if role != "none"]
    positives = [logit(s) for s, role in zip(scores, roles, strict=True) if role == "positive"]
    denominator = torch.logsumexp(torch.stack(competing), 0)
    return torch.stack([denominator - own for own in positives]).mean()


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
    """Slope and difference in AIC, or None where no fit can be made."""
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


def blend(s: Tensor, lam: float, beta: float, temperature: float, config: TailConfig) -> Tensor:
    capped = s.clamp(max=1 - config.eps)
    inside = 1 - capped + (config.eps if config.soft_cap else 0.0)
    return (1 - lam) * s / temperature + lam * (-beta * torch.log(inside))


def weince(
    anchors: Tensor,
    candidates: Tensor,
    roles: list[list[Role]],
    temperature: float = 0.5,
    config: TailConfig = TailConfig(),
) -> tuple[Tensor, list[dict[str, float]]]:
    """Mean loss over the anchors that have a positive, and the statistics of all."""
    scores = [[cosine(a, c) for c in candidates] for a in anchors]
    counted = ["positive" in row for row in roles]
    shortfalls = [
        [1 - float(s.detach()) for s, role in zip(row, kinds, strict=True) if role == "negative"]
        for row, kinds in zip(scores, roles, strict=True)
    ]
    statistics = tail_statistics(shortfalls, counted, config)
    losses = []
    for row, kinds, counts, found in zip(scores, roles, counted, statistics, strict=True):
        if counts:
            beta = found["beta"] if config.beta == "fit" else config.beta
            losses.append(
                loss_of_anchor(
                    row, kinds, lambda s, f=found, b=beta: blend(s, f["lam"], b, temperature, config)
                )
            )
    return torch.stack(losses).mean(), statistics


def with_link(anchors: Tensor, candidates: Tensor, roles: list[list[Role]], logit: Logit) -> Tensor:
    """Mean loss over the anchors under one logit for all."""
    losses = [
        loss_of_anchor([cosine(a, c) for c in candidates], kinds, logit)
        for a, kinds in zip(anchors, roles, strict=True)
        if "positive" in kinds
    ]
    return torch.stack(losses).mean()
