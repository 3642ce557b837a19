"""Tail statistics: they turn the smallest shortfalls of an anchor's negatives into its weight ``lam``.

Nothing here carries a gradient. Shortfalls ``(anchors, k)`` are sorted in ascending order and end in ``inf`` if an
anchor has fewer than ``k`` negatives. The fits run in float64, since they subtract nearly equal logarithms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from numbers import Integral
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weince.parameters import check_endpoint, check_positive, is_number
from weince.scores import dot, wide

FLOOR = 1e-12  # lower bound of Sxx and of sums of squares
FEWEST_POINTS = 3
LARGEST = 2.0  # the largest shortfall, that of a cosine of -1


@dataclass(frozen=True)
class TailConfig:
    """How the tail is fitted and gated. The defaults are Algorithm 1 with the constants of the released code.

    Args:
        k: Size of the tail: a share of the anchor's negatives in (0, 1] as a float, or a number of them as an int.
        k_min: Smallest size if ``k`` is a share.
        k_max: Largest size; it keeps memory linear in the batch.
        rho0: Pivot: the ``rho`` at which the gate of ``rho`` is half open. By default a quantile over the batch.
        rho0_quantile: This quantile of ``rho`` over all anchors is the pivot (nearest rank).
        margin: ``m``: the difference in AIC at which the AIC gate is half open.
        kappa_rho: Steepness of the gate of ``rho``.
        kappa_aic: Steepness of the AIC gate.
        eps: Smallest shortfall.
        beta: Factor of ``-log(endpoint - s)``: ``"fit"``, the fitted slope; a number; or ``"slope"``,
            ``(rho + endpoint - 1) / temperature``, which makes the shortfall logit as steep as the softmax logit at
            the hardest negative. A learned temperature gets no gradient through this ``beta``.
        gate: The gate of ``lam``: ``"rho"``, ``"aic"``, or the product of ``"both"``.
        drop: Share of the tail that the fit leaves out, smallest shortfalls first (if positive, at least one).
        soft_cap: Add ``eps`` inside the logarithm of the logit, as Algorithm 1 does.
        endpoint: The shortfall logit uses ``endpoint - s``; the fit and the gates use ``1 - s`` in any case.
        positive: ``"blend"``: all logits are blended. ``"softmax"``: the positive's logit is ``s / temperature``, and
            only those of the negatives are blended.

    Examples:
        >>> from weince import TailConfig, WeinceLoss
        >>> TailConfig().tail_size(510)
        51
        >>> loss = WeinceLoss(tail=TailConfig(gate="rho", beta=3.0))
    """

    k: int | float = 0.1
    k_min: int = 32
    k_max: int = 1024
    rho0: float | None = None
    rho0_quantile: float = 0.2
    margin: float = 2.0
    kappa_rho: float = 10.0
    kappa_aic: float = 1.0
    eps: float = 1e-6
    beta: Literal["fit", "slope"] | float = "fit"
    gate: Literal["both", "rho", "aic"] = "both"
    drop: float = 0.0
    soft_cap: bool = True
    endpoint: float = 1.0
    positive: Literal["blend", "softmax"] = "blend"

    def __post_init__(self) -> None:
        self._check_types()
        if isinstance(self.k, float) and not 0 < self.k <= 1:
            raise ValueError(
                f"k as a share must lie in (0, 1], as a number of negatives be an int; got {self.k}"
            )
        if self.k_min < 1 or self.k_max < self.k_min:
            raise ValueError(f"wanted 1 <= k_min <= k_max; got k_min={self.k_min}, k_max={self.k_max}")
        if isinstance(self.k, int) and not 1 <= self.k <= self.k_max:
            raise ValueError(f"k as a number must lie in [1, k_max={self.k_max}]; got {self.k}")
        if self.rho0 is not None:
            check_positive("rho0", self.rho0)
        if not 0 <= self.rho0_quantile <= 1:
            raise ValueError(f"rho0_quantile must lie in [0, 1]; got {self.rho0_quantile}")
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop must be a share in [0, 1); got {self.drop}")
        known = self.beta in ("fit", "slope") if isinstance(self.beta, str) else 0 <= self.beta < float("inf")
        if not known:
            raise ValueError(f'beta must be "fit" or a number of at least 0, or "slope"; got {self.beta!r}')
        if not isfinite(self.margin):
            raise ValueError(f"margin must be finite; got {self.margin}")
        if self.gate not in ("both", "rho", "aic"):
            raise ValueError(f'gate must be "both", "rho" or "aic"; got {self.gate!r}')
        if self.positive not in ("blend", "softmax"):
            raise ValueError(f'positive must be "blend" or "softmax"; got {self.positive!r}')
        check_endpoint(self.endpoint)
        for name in ("kappa_rho", "kappa_aic", "eps"):
            check_positive(name, getattr(self, name))

    def _check_types(self) -> None:
        """Raise if a value has the wrong type, since values may come from a file."""
        for name in ("k_min", "k_max"):
            if not is_number(getattr(self, name), Integral):
                raise TypeError(f"{name} must be an int; got {getattr(self, name)!r}")
        if not is_number(self.k):
            raise TypeError(f"k must be an int or a share in (0, 1]; got {self.k!r}")
        plain = int(self.k) if isinstance(self.k, Integral) else float(self.k)  # also from numpy numbers
        object.__setattr__(self, "k", plain)
        for name in ("rho0_quantile", "margin", "drop"):
            if not is_number(getattr(self, name)):
                raise TypeError(f"{name} must be a number; got {getattr(self, name)!r}")
        if not isinstance(self.beta, str) and not is_number(self.beta):
            raise TypeError(f'beta must be "fit", a number or "slope"; got {self.beta!r}')
        if not isinstance(self.soft_cap, bool):
            raise TypeError(f"soft_cap must be True or False; got {self.soft_cap!r}")

    def tail_size(self, negatives: int) -> int:
        """``K`` for an anchor with this many negatives."""
        if isinstance(self.k, int):
            return min(self.k, negatives)
        return min(max(self.k_min, round(self.k * negatives)), self.k_max, negatives)

    def tail_sizes(self, negatives: Tensor) -> Tensor:
        """``K`` of each anchor, from its number of negatives ``(anchors,)``."""
        if isinstance(self.k, int):
            return negatives.clamp_max(self.k)
        share = (self.k * wide(negatives)).round().long()  # half to even, like Python's round
        return torch.minimum(share.clamp(self.k_min, self.k_max), negatives)


class TailStats(NamedTuple):
    """Statistics of the hardest negatives, one value per anchor, ``(anchors,)``, without gradient.

    ``rho``: smallest shortfall (``inf`` without negatives). ``beta``: slope of the Weibull fit. ``daic``: AIC
    of the Gumbel proxy minus that of the Weibull fit, as in Algorithm 1; the two lines fit different quantities,
    so its sign does not say which law fits better. ``lam``: weight of the shortfall logit. If no fit can be made,
    ``beta``, ``daic`` and ``lam`` are 0.

    Examples:
        >>> import torch
        >>> from weince import InfoNCELoss
        >>> loss, stats = InfoNCELoss()(torch.randn(32, 8), torch.randn(32, 8), return_stats=True)
        >>> stats.rho.shape
        torch.Size([64])
    """

    rho: Tensor
    beta: Tensor
    daic: Tensor
    lam: Tensor


class TailFit(NamedTuple):
    """Two straight lines fitted to each anchor's tail, ``(anchors,)`` each.

    ``beta`` and ``daic`` are those of :class:`TailStats`. ``r2``: R² of the Weibull line. ``points``: points of the
    fit. ``made``: whether a fit could be made.
    """

    beta: Tensor
    daic: Tensor
    r2: Tensor
    points: Tensor
    made: Tensor


Gathers = Callable[[Tensor], Tensor]
"""Maps one value per local anchor to the values of all ranks' anchors."""


def gated(
    nearest: Tensor,
    fit: TailFit,
    config: TailConfig,
    counted: Tensor | None = None,
    gather: Gathers | None = None,
) -> TailStats:
    """Gate the fits: tail statistics of every anchor.

    Args:
        nearest: ``(anchors,)`` smallest shortfall of the negatives.
        fit: Fit of each anchor's tail.
        config: How to gate.
        counted: ``(anchors,)``, False for anchors without a positive, which the pivot leaves out; None for all.
        gather: Gathers values of all ranks, so that the pivot is the same on each; None for one process.
    """
    rho = nearest.clamp_min(config.eps)
    has_rho = rho.isfinite() if counted is None else rho.isfinite() & counted
    if config.rho0 is not None:
        pivot = torch.full_like(rho[0], config.rho0)
    elif gather is None:
        pivot = nearest_rank(rho, has_rho, config.rho0_quantile)
    else:
        every = gather(torch.where(has_rho, rho, torch.inf))
        pivot = nearest_rank(every, every.isfinite(), config.rho0_quantile)
    lam = torch.where(fit.made, gate(rho, fit.daic, pivot, config), 0.0)
    return TailStats(rho, fit.beta.to(rho.dtype), fit.daic.to(rho.dtype), lam.to(rho.dtype))


def fit_tail(hardest: Tensor, sizes: Tensor, config: TailConfig) -> TailFit:
    """TailFit of Algorithm 1: regress two transforms of ``F = rank / (K + 1)`` on ``log d``.

    Args:
        hardest: ``(anchors, k)`` smallest shortfalls in ascending order.
        sizes: ``(anchors,)`` or ``(1,)``: how many of them are the anchor's tail, ``K``.
        config: How to fit.
    """
    size = wide(sizes.unsqueeze(1))
    rank = torch.arange(1, hardest.shape[1] + 1, device=hardest.device)
    dropped = (size * config.drop).floor().clamp_min(1) if config.drop else torch.zeros_like(size)
    used = (rank > dropped) & (rank <= size)
    points = wide(used.sum(1, keepdim=True).clamp_min(1))
    mask = wide(used)  # converted once, not in every product

    # Subtract the smallest, so that equal shortfalls have a variance of exactly 0; unused entries are 0.
    log_d = wide(hardest.clamp(config.eps, LARGEST)).log()
    log_d = _centred((log_d - log_d[:, :1]) * mask, mask, points)
    sxx = _dot(log_d, log_d)
    log_f = torch.where(used, rank / (size + 1), 0.5).log()
    weibull = _line(log_d, sxx, _centred(log_f, mask, points))
    gumbel = _line(log_d, sxx, _centred(log_f.neg().log(), mask, points))

    made = (points >= FEWEST_POINTS) & ~(sxx <= FLOOR)  # not sxx > FLOOR, which would make 0 of NaN
    daic = points * (gumbel.sse.log() - weibull.sse.log())  # the other terms of the AIC cancel
    return TailFit(
        beta=torch.where(made, weibull.slope.clamp_min(0), 0.0).squeeze(1),
        daic=torch.where(made, daic, 0.0).squeeze(1),
        r2=(1 - weibull.sse / weibull.syy.clamp_min(FLOOR)).squeeze(1),
        points=points.squeeze(1),
        made=made.squeeze(1),
    )


class _Line(NamedTuple):
    slope: Tensor
    sse: Tensor
    syy: Tensor


def _line(x: Tensor, sxx: Tensor, y: Tensor) -> _Line:
    """Least squares of ``y`` on ``x``, both centred, for each row; the results are ``(a, 1)``."""
    slope = _dot(x, y) / sxx.clamp_min(FLOOR)
    residual = y - slope * x
    return _Line(slope, _dot(residual, residual).clamp_min(FLOOR), _dot(y, y))


def _centred(values: Tensor, mask: Tensor, points: Tensor) -> Tensor:
    """Subtract the mean of each row, over entries where the mask is 1; other entries become 0."""
    return (values - (values * mask).sum(1, keepdim=True) / points) * mask


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return dot(a, b).unsqueeze(1)


def gate(rho: Tensor, daic: Tensor, pivot: Tensor, config: TailConfig) -> Tensor:
    """``lam``: near 1 if ``rho`` is below the pivot (near the cap) and ``daic`` is above the margin."""
    near = torch.sigmoid(config.kappa_rho * (pivot / rho).log())
    weibull = torch.sigmoid(config.kappa_aic * (daic - config.margin))
    if config.gate == "rho":
        return near
    return weibull if config.gate == "aic" else near * weibull


def nearest_rank(values: Tensor, counted: Tensor, q: float) -> Tensor:
    """The q-quantile of the counted values, ``sorted[round(q * (n - 1))]``, without a device sync."""
    ordered = torch.where(counted, values, torch.inf).sort().values
    position = (q * wide((counted.sum() - 1).clamp_min(0))).round().long()
    return ordered.gather(0, position.unsqueeze(0)).squeeze(0)


def tail_stats(scores: Tensor, positives: Tensor, *, tail: TailConfig = TailConfig()) -> TailStats:
    """Tail statistics of a matrix of cosines. Those of an anchor with NaN among its negatives are NaN.

    Args:
        scores: ``(anchors, candidates)`` cosines.
        positives: ``(anchors,)`` column of each anchor's positive, or an ``(anchors, candidates)`` mask of all
            pairs that are not negatives: positives, the anchor itself, ignored pairs.
        tail: How to fit and gate.

    Examples:
        >>> import torch
        >>> from weince import tail_stats
        >>> cosines = torch.rand(16, 100)
        >>> tail_stats(cosines, torch.zeros(16, dtype=torch.long)).lam.shape
        torch.Size([16])
    """
    shape = tuple(scores.shape)
    if scores.ndim != 2 or not scores.is_floating_point() or shape[0] < 1 or shape[1] < 2:
        raise ValueError(
            "scores must be a floating point tensor (anchors, candidates) with 1 anchor and 2 candidates or more; "
            f"got {scores.dtype} of shape {shape}"
        )
    if positives.dtype == torch.bool and tuple(positives.shape) == shape:
        left_out = positives
    elif positives.dtype in (torch.int32, torch.int64) and tuple(positives.shape) == shape[:1]:
        left_out = torch.zeros(shape, dtype=torch.bool, device=scores.device)
        left_out.scatter_(1, positives.long().unsqueeze(1), True)
    else:
        raise ValueError(
            f"positives must be integers of shape ({shape[0]},) or a boolean mask of shape {shape}; "
            f"got {positives.dtype} of shape {tuple(positives.shape)}"
        )
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    shortfall = (1 - scores.detach().to(dtype)).masked_fill(left_out, torch.inf)
    hardest = shortfall.topk(tail.tail_size(shape[1]), dim=1, largest=False).values
    # NaN sorts last, beyond the tail.
    hardest = hardest.masked_fill(shortfall.isnan().any(1, keepdim=True), torch.nan)
    fit = fit_tail(hardest, tail.tail_sizes(left_out.logical_not().sum(1)), tail)
    return gated(hardest[:, 0], fit, tail)
