"""The per-anchor statistics against plain Python, scipy and simulated tails. xi < 0 means a bounded tail."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, linregress

from weince import tail_stats
from weince.evt import fit_gpd
from weince.lab.paper.anchors import anchor_tails, compare_anchor_tails, daic_artefact


def naive_anchor(d: list[float], positions: str) -> tuple[float, float, float, bool]:
    """rho, beta, dAIC and whether a fit was made, by the definition with scipy's regression."""
    d = sorted(max(x, 1e-6) for x in d if math.isfinite(x))
    n = len(d)
    k = min(max(32, round(0.1 * n)), 1024, n)
    tail = [math.log(x) for x in d[:k]]
    total = k if positions == "tail" else n
    f = [j / (total + 1) for j in range(1, k + 1)]
    if k < 3 or sum((x - sum(tail) / k) ** 2 for x in tail) <= 1e-12:
        return d[0], 0.0, 0.0, False
    aic, slopes = [], []
    for response in ([math.log(p) for p in f], [math.log(-math.log(p)) for p in f]):
        line = linregress(tail, response)
        sse = sum((y - line.intercept - line.slope * x) ** 2 for x, y in zip(tail, response, strict=True))
        aic.append(k * math.log(max(sse, 1e-12) / k) + 4)
        slopes.append(line.slope)
    return d[0], max(slopes[0], 0.0), aic[1] - aic[0], True


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


class TestAnchorTails:
    @settings(max_examples=30, deadline=None)
    @given(
        st.integers(1, 6),
        st.sampled_from([1, 2, 3, 5, 31, 33, 340]),
        st.integers(0, 999),
        st.sampled_from(["tail", "sample"]),
    )
    def test_equals_the_definition(self, anchors: int, negatives: int, seed: int, positions: str) -> None:
        rng = np.random.default_rng(seed)
        d = 2.0 * rng.random((anchors, negatives)) ** 2
        d[rng.random(d.shape) < 0.2] = np.inf
        d[:, 0] = rng.random(anchors)
        got = anchor_tails(d, positions=positions)
        naive = [naive_anchor(list(row), positions) for row in d]
        rho = sorted(row[0] for row in naive)
        rho0 = rho[round(0.2 * (anchors - 1))]
        assert got.rho0 == rho0
        for i, (r, beta, daic, made) in enumerate(naive):
            assert got.rho[i] == r
            assert got.beta[i] == pytest.approx(beta, rel=1e-9, abs=1e-9)
            assert got.daic[i] == pytest.approx(daic, rel=1e-6, abs=1e-6)
            lam = sigmoid(10 * math.log(rho0 / r)) * sigmoid(daic - 2.0) if made else 0.0
            assert got.lam[i] == pytest.approx(lam, rel=1e-5, abs=1e-12)

    @pytest.mark.parametrize("anchors", [48, 500])
    def test_agrees_with_the_statistics_of_the_loss(self, anchors: int) -> None:
        """Compare two independent implementations on cosines with ignored pairs."""
        rng = np.random.default_rng(0)
        z = rng.normal(size=(anchors, 12))
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        left_out = np.eye(anchors, dtype=bool) | (rng.random((anchors, anchors)) < 0.1)
        ours = anchor_tails(np.where(left_out, np.inf, 1.0 - z @ z.T))
        theirs = tail_stats(torch.from_numpy(z @ z.T), torch.from_numpy(left_out))
        for name in ("rho", "beta", "daic", "lam"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name).numpy(), rel=1e-9, abs=1e-12)

    def test_tail_size_rule(self) -> None:
        rng = np.random.default_rng(0)
        for negatives, wanted in [(20, 20), (100, 32), (510, 51), (505, 50), (20000, 1024)]:
            assert anchor_tails(rng.random((1, negatives))).k.tolist() == [wanted]

    def test_power_tail_gives_its_index(self) -> None:
        d = (np.arange(1, 61) / 61.0) ** (1 / 2.5)
        assert anchor_tails(d[None]).beta[0] == pytest.approx(2.5, rel=1e-9)

    def test_no_spread_is_plain_softmax(self) -> None:
        got = anchor_tails(np.full((2, 50), 0.3))
        assert got.lam.tolist() == got.beta.tolist() == got.daic.tolist() == [0.0, 0.0]

    def test_clamp(self) -> None:
        d = np.random.default_rng(0).random((4, 40))
        d[0, 0] = -1e-8  # a cosine rounded to above 1
        assert anchor_tails(d).rho[0] == 1e-6

    def test_anchor_without_negatives(self) -> None:
        d = np.random.default_rng(0).random((3, 40))
        d[1] = np.inf
        got = anchor_tails(d)
        assert got.rho[1] == np.inf
        assert got.lam[1] == 0.0
        assert got.rho0 in got.rho[[0, 2]]
        with pytest.raises(ValueError, match="no anchor"):
            anchor_tails(np.full((2, 3), np.inf))

    @pytest.mark.parametrize(
        ("d", "options", "message"),
        [
            (np.ones(5), {}, r"\(anchors, negatives\)"),
            ([[0.1, np.nan]], {}, "NaN"),
            ([[0.1, -0.5]], {}, "cannot be negative"),
            ([[0.1, 0.5]], {"positions": "median"}, "positions"),
        ],
    )
    def test_bad_input(self, d: object, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            anchor_tails(d, **options)


class TestComparison:
    def test_equals_single_fits(self) -> None:
        d = np.random.default_rng(0).random((5, 510)) ** 0.4
        got = compare_anchor_tails(d, n_null=50)
        for i, row in enumerate(np.sort(d, axis=1)):
            fit = fit_gpd(row[51] - row[:51])
            exponential = -51 * (np.log((row[51] - row[:51]).mean()) + 1.0)
            assert got.n[i] == 51
            assert got.xi[i] == pytest.approx(fit.xi, abs=1e-6)
            assert got.lr[i] == pytest.approx(2.0 * (fit.loglik - exponential), abs=1e-6)

    def test_p_values_are_uniform_for_exponential_tails(self) -> None:
        scores = 0.04 * np.random.default_rng(0).standard_exponential((1500, 400))
        got = compare_anchor_tails(1.0 - scores)
        assert kstest(got.p_bounded, "uniform").pvalue > 0.001
        assert got.share_bounded == pytest.approx(0.05, abs=0.02)
        assert got.share_negative == pytest.approx(got.null_share_negative, abs=0.05)
        assert got.share_aic == pytest.approx(got.null_share_aic, abs=0.03)

    def test_finds_bounded_tails_and_not_heavy_ones(self) -> None:
        rng = np.random.default_rng(0)
        bounded = compare_anchor_tails(rng.random((200, 510)) ** 0.5)
        assert bounded.share_bounded > 0.9
        assert bounded.p_bounded.min() == 1 / 2001  # beyond all null draws, but never 0
        heavy = compare_anchor_tails(1.0 - 0.001 * rng.pareto(2.0, (200, 510)).clip(max=900.0))
        assert heavy.share_bounded < 0.03

    def test_ties_and_small_anchors_count_as_no_evidence(self) -> None:
        d = np.random.default_rng(0).random((3, 60)) ** 0.3
        d[0] = 0.4
        d[1, 8:] = np.inf
        got = compare_anchor_tails(d, n_null=200)
        assert np.isnan(got.xi[:2]).all()
        assert got.p_bounded[:2].tolist() == [1.0, 1.0]
        assert got.lr[:2].tolist() == [0.0, 0.0]
        assert np.isfinite(got.xi[2])

    def test_all_negatives_in_the_tail_leaves_one_for_the_threshold(self) -> None:
        assert compare_anchor_tails(np.random.default_rng(0).random((2, 20)), n_null=50).n.tolist() == [
            19,
            19,
        ]

    def test_shares_are_of_anchors_whatever_their_size(self) -> None:
        d = np.random.default_rng(0).random((40, 510)) ** 0.7
        d[:30, 60:] = np.inf
        whole, *parts = (compare_anchor_tails(rows, n_null=300, alpha=0.1) for rows in (d, d[:30], d[30:]))
        ours = ("share_negative", "share_bounded", "share_aic")
        for name in (*ours, "null_share_negative", "null_share_aic"):
            small, large = (getattr(part, name) for part in parts)
            assert getattr(whole, name) == pytest.approx(0.75 * small + 0.25 * large)

    def test_seed(self) -> None:
        d = np.random.default_rng(0).random((20, 200))
        first, second = (compare_anchor_tails(d, seed=3, n_null=100).p_bounded for _ in range(2))
        assert (first == second).all()

    def test_bad_options(self) -> None:
        with pytest.raises(ValueError, match="alpha"):
            compare_anchor_tails(np.ones((2, 40)), alpha=5)


def test_daic_favours_weibull_whatever_the_tail_and_flips_with_the_plotting_positions() -> None:
    got = daic_artefact(anchors=100)
    assert got.tails == ("exponential", "normal", "bounded")
    assert (got.share_tail == 1.0).all()
    assert (got.share_sample == 0.0).all()
    # The medians differ far less between the three tails than between the two plotting positions.
    gap = np.median(got.daic_tail) - np.median(got.daic_sample)
    assert np.ptp(np.median(got.daic_tail, axis=1)) < 0.1 * gap
    assert got.share_bounded[0] < 0.12
    assert got.share_bounded[2] > got.share_bounded[0] + 0.15
