"""Who wins among n random utilities: simulated and exact winner probabilities against the closed forms.

The n candidates are spread evenly over a few score levels. There are three utility models; for each, the closed
form holds at every n with one noise, and only in the limit with another:

=========================  ==========================  ===========  ==============
utility                    closed form, p_i ~          exact noise  limiting noise
=========================  ==========================  ===========  ==============
X = s a_n / tau + e        exp(s_i / tau)              gumbel       normal
X = rho(s) Z               rho(s_i)^alpha              frechet      pareto
1 - X = (1 - s) W          (1 - s_i)^-beta             weibull      beta
=========================  ==========================  ===========  ==============

``a_n`` is the scale of the maximum of n noises (1 for the Gumbel law, about ``1 / sqrt(2 log n)`` for the
normal), and ``rho(s) = (1 + s) / 2``. The scores have to shrink with ``a_n``: with normal noise and fixed
scores the winner probabilities never become a softmax. In terms of the shape, ``alpha = 1 / xi`` with xi > 0 for
a heavy tail, and ``beta = -1 / xi`` with xi < 0 for a bounded one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincinv, betaln, log_ndtr, ndtri, softmax

from weince.evt.arrays import Floats, Integers

Noise = Literal["gumbel", "normal", "frechet", "pareto", "weibull", "beta"]
_LOG_SQRT_2PI = 0.5 * np.log(2.0 * np.pi)


@dataclass(frozen=True)
class Top1:
    """Winner probabilities of the score levels, arrays of shape (sizes, levels) or (sizes,)."""

    noise: str
    sizes: Integers  # n, the number of candidates
    scores: Floats  # (levels,)
    closed_form: Floats  # (levels,) the limit, which does not depend on n
    exact: Floats  # (sizes, levels) by quadrature
    simulated: Floats  # (sizes, levels) frequencies
    error: Floats  # (sizes,) largest difference between exact and closed form
    power_rate: float  # slope of log error on log n over the larger half of the sizes; NaN if exact
    log_rate: float  # slope of log error on log log n there; about -1 for the normal
    replicates: int


@dataclass(frozen=True)
class _Model:
    """One utility model: noise, place of each level in the tail coordinate, tail index and shape parameter."""

    noise: Noise
    place: Floats  # (levels,) so that closed form ~ exp(index * place)
    index: float
    shape: float  # second parameter of the Beta noise

    def closed_form(self) -> Floats:
        return np.asarray(softmax(self.index * self.place))

    def tail(self, c: Floats, n: float) -> tuple[Floats, Floats]:
        """log F and (d/dc) log F of each level at coordinates c (points,), each (points, levels).

        The coordinate is x for translation, log x for scaling, -log(1 - x) for the shortfall.
        """
        away = c[:, None] - self.place
        if self.noise in ("gumbel", "frechet", "weibull"):
            weight = np.exp(-self.index * away)
            return -weight, self.index * weight
        if self.noise == "normal":
            x = c[:, None] - self.index * self.place * normal_scale(n)
            log_cdf = np.asarray(log_ndtr(x))
            return log_cdf, np.exp(-0.5 * x**2 - _LOG_SQRT_2PI - log_cdf)
        survival = np.exp(-self.index * np.maximum(away, 0.0))
        rate = self.index * survival
        if self.noise == "beta":
            z = np.exp(-np.maximum(away, 0.0))
            survival = betainc(self.index, self.shape, z)
            norm = betaln(self.index, self.shape)
            rest = np.log1p(-np.minimum(z, 1.0 - 1e-16))
            rate = np.exp(self.index * np.log(z) + (self.shape - 1.0) * rest - norm)
        below = np.maximum(1.0 - survival, 1e-300)
        return np.where(survival < 0.5, np.log1p(-np.minimum(survival, 0.5)), np.log(below)), rate / below

    def coordinate_range(self, n: float) -> tuple[float, float]:
        """Coordinates between which the largest of n utilities lies, except with a probability below 1e-15."""
        if self.noise == "normal":
            return -40.0, 40.0
        reach = (np.log(n) + 60.0) / self.index + 20.0
        return float(self.place.min()) - 10.0 / self.index, float(self.place.max() + reach)

    def group_maxima(self, rng: np.random.Generator, n: float, replicates: int) -> Floats:
        """The largest utility on each level, in the tail coordinate, (replicates, levels).

        The maximum of m independent draws has ``log F = -E / m`` with E exponential, so one draw gives it.
        """
        log_cdf = -rng.standard_exponential((replicates, self.place.size)) * (self.place.size / n)
        if self.noise in ("gumbel", "frechet", "weibull"):
            return np.asarray(self.place - np.log(-log_cdf) / self.index)
        survival = -np.expm1(log_cdf)
        if self.noise == "normal":
            return np.asarray(self.index * self.place * normal_scale(n) - ndtri(survival))
        if self.noise == "pareto":
            return np.asarray(self.place - np.log(survival) / self.index)
        return np.asarray(self.place - np.log(betaincinv(self.index, self.shape, survival)))


def normal_scale(n: float) -> float:
    """a_n of the normal law: ``1 / (n * density)`` at the level that one of n draws exceeds on average."""
    level = float(ndtri(1.0 / n))
    return float(np.exp(0.5 * level**2 + _LOG_SQRT_2PI) / n)


def _exact_probabilities(model: _Model, n: float) -> Floats:
    """Winner probability of each level by quadrature.

    With ``L(c) = -sum of log F`` over all candidates, which falls from infinity to 0 along the coordinate,
    the probability of a level is the mean of its share of ``-dL`` when L is a unit exponential variable.
    Over ``w = log L`` the trapezoid rule converges exponentially.
    """
    each = n / model.place.size
    w = np.arange(-36.0, 4.0, 0.05)
    low, high = (np.full(w.size, edge) for edge in model.coordinate_range(n))
    for _ in range(80):  # bisection for the coordinate where log L = w
        middle = (low + high) / 2.0
        total = -each * model.tail(middle, n)[0].sum(axis=1)
        too_low = np.log(np.maximum(total, 1e-320)) > w
        low, high = np.where(too_low, middle, low), np.where(too_low, high, middle)
    rate = model.tail((low + high) / 2.0, n)[1]
    share = rate / rate.sum(axis=1, keepdims=True)
    weight = np.exp(w - np.exp(w))
    return np.asarray(weight @ share / weight.sum())


def _slope(x: Floats, y: Floats) -> float:
    return float(np.polyfit(x, y, 1)[0])


def _rates(sizes: Integers, error: Floats) -> tuple[float, float]:
    """Slopes of log error on log n and on log log n, over the larger half of the sizes."""
    half = sizes.size // 2
    n, e = sizes[half:], error[half:]
    if n.size < 2 or e.min() < 1e-10:  # the closed form is exact: the error is only rounding
        return np.nan, np.nan
    return _slope(np.log(n), np.log(e)), _slope(np.log(np.log(n)), np.log(e))


def _build(noise: Noise, s: Floats, temperature: float, alpha: float, beta: float, shape: float) -> _Model:
    if noise in ("gumbel", "normal"):
        return _Model(noise, s, 1.0 / temperature, shape)
    if noise in ("frechet", "pareto"):
        return _Model(noise, np.log1p(s) - np.log(2.0), alpha, shape)
    return _Model(noise, -np.log1p(-s), beta, shape)


def _read_levels(scores: ArrayLike, sizes: Sequence[int]) -> tuple[Floats, Integers]:
    """Check the score levels (levels,) and the numbers of candidates (sizes,)."""
    s = np.asarray(scores, dtype=np.float64)
    if s.ndim != 1 or s.size < 2 or not (np.abs(s) < 1.0).all():
        raise ValueError(f"scores must be at least two numbers in (-1, 1); got {scores!r}")
    n = np.array(sizes, dtype=np.int64)
    if n.size == 0 or (n % s.size).any() or n.min() < s.size or (np.diff(n) <= 0).any():
        raise ValueError(f"sizes must be increasing multiples of the {s.size} score levels; got {sizes}")
    return s, n


def top1_asymptotics(
    noise: Noise,
    *,
    scores: ArrayLike = (0.15, 0.45, 0.70, 0.90),
    sizes: Sequence[int] = (4, 40, 400, 4000, 40_000, 400_000, 4_000_000),
    temperature: float = 0.5,
    alpha: float = 2.0,
    beta: float = 2.0,
    shape: float = 3.0,
    replicates: int = 20_000,
    seed: int = 0,
) -> Top1:
    """Winner probabilities of random utilities against their closed form, for growing candidate sets.

    Args:
        noise: "gumbel", "frechet", "weibull" (closed form exact at every n), or "normal", "pareto", "beta".
        scores: score levels in (-1, 1), shape (levels,).
        sizes: numbers of candidates n, multiples of the number of levels, increasing.
        temperature: tau of the translation model.
        alpha: tail index of the Frechet and Pareto noise.
        beta: tail index of the Weibull noise, and first parameter of the Beta noise.
        shape: second parameter of the Beta noise; with 1 its tail is a pure power.
        replicates: simulated contests for each n.
        seed: seed of the simulation.

    Examples:
        >>> from weince.lab.paper.top1 import top1_asymptotics
        >>> top1_asymptotics("gumbel", sizes=(4, 40), replicates=100).simulated.shape
        (2, 4)
    """
    if noise not in get_args(Noise):
        raise ValueError(f"noise must be one of {', '.join(get_args(Noise))}; got {noise!r}")
    s, n = _read_levels(scores, sizes)
    if not min(temperature, alpha, beta, shape) > 0.0 or replicates < 1:
        raise ValueError(
            "temperature, alpha, beta, shape and replicates must be positive; "
            f"got {temperature}, {alpha}, {beta}, {shape} and {replicates}"
        )
    model = _build(noise, s, temperature, alpha, beta, shape)
    closed = model.closed_form()
    rng = np.random.default_rng(seed)
    exact, simulated = np.empty((2, n.size, s.size))
    for j, size in enumerate(n):
        exact[j] = _exact_probabilities(model, float(size))
        winners = model.group_maxima(rng, float(size), replicates).argmax(axis=1)
        simulated[j] = np.bincount(winners, minlength=s.size) / replicates
    error = np.abs(exact - closed).max(axis=1)
    power_rate, log_rate = _rates(n, error)
    return Top1(
        noise=noise,
        sizes=n,
        scores=s,
        closed_form=closed,
        exact=exact,
        simulated=simulated,
        error=error,
        power_rate=power_rate,
        log_rate=log_rate,
        replicates=replicates,
    )
