"""Winner probabilities against simulation of every candidate and against quadrature."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import simpson
from scipy.stats import beta as beta_law
from scipy.stats import gumbel_r, invweibull, norm, pareto, weibull_min

from weince.lab.paper.top1 import normal_scale, top1_asymptotics

SCORES = np.array([0.15, 0.45, 0.70, 0.90])
EXACT = ("gumbel", "frechet", "weibull")
LIMITING = ("normal", "pareto", "beta")


def utility(noise: str, s: np.ndarray, n: int, rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Utilities drawn with scipy's distributions (tau = 0.5, alpha = beta = 2, shape = 3)."""
    if noise == "gumbel":
        return s / 0.5 + gumbel_r.rvs(size=size, random_state=rng)
    if noise == "normal":
        return s / 0.5 * normal_scale(n) + norm.rvs(size=size, random_state=rng)
    if noise == "frechet":
        return (1 + s) / 2 * invweibull.rvs(2.0, size=size, random_state=rng)
    if noise == "pareto":
        return (1 + s) / 2 * pareto.rvs(2.0, size=size, random_state=rng)
    if noise == "weibull":
        return 1 - (1 - s) * weibull_min.rvs(2.0, size=size, random_state=rng)
    return 1 - (1 - s) * beta_law.rvs(2.0, 3.0, size=size, random_state=rng)


@pytest.mark.parametrize("noise", EXACT + LIMITING)
@pytest.mark.parametrize("n", [4, 40])
def test_direct_simulation(noise: str, n: int) -> None:
    """Draw every candidate and let the largest win: frequencies lie within 4.5 standard errors of the exact ones."""
    contests = 20_000
    s = np.repeat(SCORES, n // 4)
    winner = utility(noise, s, n, np.random.default_rng(0), (contests, n)).argmax(axis=1)
    frequency = np.bincount(winner // (n // 4), minlength=4) / contests
    got = top1_asymptotics(noise, sizes=[n], replicates=contests)
    margin = 4.5 * np.sqrt(got.exact[0] * (1 - got.exact[0]) / contests)
    assert (np.abs(frequency - got.exact[0]) < margin).all()
    assert (np.abs(frequency - got.simulated[0]) < 1.5 * margin).all()
    if noise in EXACT:
        assert (np.abs(frequency - got.closed_form) < margin).all()


def law_of(noise: str, s: float, n: int) -> object:
    """The distribution of the utility, or of the shortfall for the last two kinds of noise."""
    return {
        "gumbel": gumbel_r(loc=s / 0.5),
        "normal": norm(loc=s / 0.5 * normal_scale(n)),
        "frechet": invweibull(2.0, scale=(1 + s) / 2),
        "pareto": pareto(2.0, scale=(1 + s) / 2),
        "weibull": weibull_min(2.0, scale=1 - s),
        "beta": beta_law(2.0, 3.0, scale=1 - s),
    }[noise]


@pytest.mark.parametrize("noise", EXACT + LIMITING)
def test_quadrature(noise: str) -> None:
    """Integrate the winner's density times the others' distribution functions on a fine Simpson grid."""
    n, each = 12, 3
    low, high = {"gumbel": (-4, 40), "normal": (-6, 9), "weibull": (0, 6), "beta": (0, 0.1)}.get(
        noise, (-3, 16)
    )
    x = np.linspace(low, high, 400_001)
    at, slope = (np.exp(x), np.exp(x)) if noise in ("frechet", "pareto") else (x, 1.0)
    if noise == "pareto":  # the maximum is at least the smallest value of the top score
        x = np.linspace(np.log(0.95), high, 400_001)
        at = slope = np.exp(x)
    laws = [law_of(noise, s, n) for s in SCORES]
    density = np.array([law.pdf(at) * slope for law in laws])
    below = np.array([law.sf(at) if noise in ("weibull", "beta") else law.cdf(at) for law in laws])
    got = top1_asymptotics(noise, sizes=[n], replicates=10).exact[0]
    for i in range(4):
        power = np.where(np.arange(4) == i, each - 1, each)[:, None]
        share = each * density[i] * (below**power).prod(axis=0)
        assert got[i] == pytest.approx(simpson(share, x=x), abs=1e-7)


@pytest.mark.parametrize("noise", EXACT)
def test_closed_form_is_exact_at_every_n(noise: str) -> None:
    got = top1_asymptotics(noise, sizes=[4, 8, 100, 10_000, 10**9], replicates=100)
    assert got.error.max() < 1e-12
    assert np.isnan(got.power_rate)


def test_closed_forms() -> None:
    for noise, weight in [
        ("gumbel", np.exp(SCORES / 0.3)),
        ("normal", np.exp(SCORES / 0.3)),
        ("frechet", ((1 + SCORES) / 2) ** 1.5),
        ("pareto", ((1 + SCORES) / 2) ** 1.5),
        ("weibull", (1 - SCORES) ** -0.8),
        ("beta", (1 - SCORES) ** -0.8),
    ]:
        got = top1_asymptotics(noise, temperature=0.3, alpha=1.5, beta=0.8, sizes=[4], replicates=10)
        assert got.closed_form == pytest.approx(weight / weight.sum())


class TestRates:
    def test_pareto_is_one_over_n(self) -> None:
        got = top1_asymptotics("pareto", replicates=100)
        assert got.power_rate == pytest.approx(-1.0, abs=0.01)
        assert (np.diff(got.error) < 0).all()

    @pytest.mark.parametrize(("beta", "rate"), [(2.0, -0.5), (4.0, -0.25), (0.5, -1.0)])
    def test_beta_is_the_slower_of_one_over_n_and_its_curvature(self, beta: float, rate: float) -> None:
        """The relative error of z^beta at z ~ n^(-1/beta) is of order n^(-1/beta)."""
        sizes = [4 * 10**k for k in range(1, 9)]
        assert top1_asymptotics("beta", beta=beta, sizes=sizes, replicates=10).power_rate == pytest.approx(
            rate, abs=0.03
        )

    def test_pure_power_noise_is_as_fast_as_pareto(self) -> None:
        assert top1_asymptotics("beta", shape=1.0, replicates=10).power_rate == pytest.approx(-1.0, abs=0.01)

    def test_normal_is_logarithmic(self) -> None:
        got = top1_asymptotics("normal", sizes=[4 * 10**k for k in range(0, 17, 2)], replicates=10)
        assert (np.diff(got.error) < 0).all()
        assert got.log_rate == pytest.approx(-1.0, abs=0.1)
        assert abs(got.power_rate) < 0.05  # no power of n: a million times more candidates halve the error
        assert got.error[-1] > 0.05 * got.error[0]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(EXACT + LIMITING),
    st.lists(st.floats(-0.95, 0.95), min_size=2, max_size=5),
    st.integers(1, 10**6),
)
def test_probabilities_are_probabilities(noise: str, scores: list[float], each: int) -> None:
    got = top1_asymptotics(noise, scores=scores, sizes=[each * len(scores)], replicates=50)
    for p in (got.closed_form, got.exact[0], got.simulated[0]):
        assert (p >= 0).all()
        assert p.sum() == pytest.approx(1.0)
    order = np.argsort(scores)
    assert (np.diff(got.exact[0][order]) > -1e-9).all()  # a higher score never wins less often


def test_normal_scale_shrinks_like_the_square_root_of_the_logarithm() -> None:
    assert normal_scale(1e12) == pytest.approx(1 / np.sqrt(2 * np.log(1e12)), rel=0.08)
    assert normal_scale(2) == pytest.approx(0.5 / norm.pdf(0.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "cauchy"}, "noise"),
        ({"noise": "normal", "sizes": [5]}, "multiples"),
        ({"noise": "normal", "sizes": [8, 4]}, "increasing"),
        ({"noise": "normal", "scores": [0.1, 1.0]}, "scores"),
        ({"noise": "beta", "beta": 0.0}, "positive"),
    ],
)
def test_bad_input(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        top1_asymptotics(**options)
