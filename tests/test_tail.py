import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from weince import TailConfig, tail
from weince import tail_stats as stats_of_scores
from weince.tail import fit_tail, gated, nearest_rank

CONFIGS = [
    TailConfig(),
    TailConfig(k=7),
    TailConfig(k=1.0, k_min=1),
    TailConfig(k=0.5, k_max=40),
    TailConfig(drop=0.05),
    TailConfig(gate="rho"),
    TailConfig(gate="aic"),
    TailConfig(rho0=0.3),
    TailConfig(rho0_quantile=0.9, margin=-3.0, kappa_rho=2.0, kappa_aic=0.1, eps=1e-3),
]


def ragged(rows, seed=0):
    """Shortfalls of anchors with different numbers of negatives, as lists and as a padded, sorted tensor."""
    generator = torch.Generator().manual_seed(seed)
    lists = [(2 * torch.rand(n, generator=generator, dtype=torch.float64) ** 3).tolist() for n in rows]
    padded = torch.full((len(rows), max(rows)), math.inf, dtype=torch.float64)
    for row, values in zip(padded, lists, strict=True):
        row[: len(values)] = torch.tensor(sorted(values), dtype=torch.float64)
    return lists, padded


def tail_stats(hardest, negatives, config, counted=None):
    """Statistics of anchors from their sorted shortfalls, as the engines take them."""
    return gated(hardest[:, 0], fit_tail(hardest, config.tail_sizes(negatives), config), config, counted)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_statistics_match_the_loops(config):
    sizes = [0, 1, 2, 3, 5, 31, 32, 33, 60, 200]
    lists, padded = ragged(sizes)
    got = tail_stats(padded[:, : config.tail_size(200)], torch.tensor(sizes), config)
    wanted = reference.tail_statistics(lists, [True] * len(lists), config)
    for name in got._fields:
        expected = torch.tensor([anchor[name] for anchor in wanted], dtype=torch.float64)
        torch.testing.assert_close(getattr(got, name), expected, rtol=1e-10, atol=1e-12)


def test_anchors_that_do_not_count_have_no_part_in_the_pivot():
    """Neither do anchors without negatives."""
    sizes = [40, 40, 40, 40, 40, 0, 0]
    lists, padded = ragged(sizes)
    counted = [True, False, True, False, True, True, True]
    config = TailConfig(rho0_quantile=0.5)
    got = tail_stats(padded[:, :32], torch.tensor(sizes), config, torch.tensor(counted))
    wanted = reference.tail_statistics(lists, counted, config)
    torch.testing.assert_close(
        got.lam, torch.tensor([anchor["lam"] for anchor in wanted], dtype=torch.float64)
    )


def test_the_pivot_of_several_ranks_takes_one_exchange_of_numbers():
    """Torch's default compiler cannot write code for a CPU that uses a gathered mask."""
    _, hardest = ragged([60, 50, 40, 30, 0, 60], seed=3)
    negatives, counted = hardest.isfinite().sum(1), torch.tensor([True, True, False, True, True, False])
    config, here, sent = TailConfig(), slice(0, 4), []

    def gather(values):
        sent.append(values)
        return torch.cat([values, torch.tensor([math.inf, math.inf], dtype=values.dtype)])

    whole = tail_stats(hardest, negatives, config, counted)
    fit = fit_tail(hardest[here], config.tail_sizes(negatives[here]), config)
    mine = gated(hardest[here, 0], fit, config, counted[here], gather)
    for own, of_all in zip(mine, whole, strict=True):
        torch.testing.assert_close(own, of_all[here])
    assert [values.dtype for values in sent] == [torch.float64]


@given(st.integers(1, 5000), st.sampled_from([0.1, 0.05, 0.5, 1.0, 0.013]), st.integers(1, 64))
@example(90, 0.35, 1)  # 0.35 * 90 is 31.499999999999996, which float32 would round to 31.5
def test_tail_size_is_the_same_for_numbers_and_tensors(negatives, share, k_min):
    config = TailConfig(k=share, k_min=k_min)
    wanted = min(max(k_min, round(share * negatives)), 1024, negatives)
    assert config.tail_size(negatives) == wanted
    assert config.tail_sizes(torch.tensor([negatives])).tolist() == [wanted]


@given(st.lists(st.floats(0, 2), min_size=3, max_size=60))
def test_sorted_shortfalls_never_have_a_slope_of_the_wrong_sign(values):
    """So the released code's penalty on such slopes needs no counterpart here."""
    d = torch.tensor(sorted(values), dtype=torch.float64).clamp_min(1e-6)
    f = torch.arange(1, len(d) + 1).double() / (len(d) + 1)
    centred = d.log() - d.log().mean()
    assert (centred * f.log()).sum() >= -1e-12
    assert (centred * (-f.log()).log()).sum() <= 1e-12


@pytest.mark.parametrize("d", [0.0, 1e-7, 0.5, 2.0])
def test_equal_shortfalls_give_plain_infonce(d):
    hardest = torch.full((3, 40), d, dtype=torch.float32)
    stats = tail_stats(hardest, torch.tensor([40]), TailConfig(k=40))
    assert stats.lam.tolist() == stats.beta.tolist() == stats.daic.tolist() == [0.0] * 3


@pytest.mark.parametrize("d", [1e-7, 0.3, 0.7, 1.9])
def test_also_on_devices_without_float64(monkeypatch, d):
    monkeypatch.setattr(tail, "wide", torch.Tensor.float)
    fit = fit_tail(torch.full((3, 37), d), torch.tensor([37]), TailConfig(k=37))
    assert not fit.made.any()


@pytest.mark.parametrize("k", [1, 2])
def test_fewer_than_three_points_give_plain_infonce(k):
    stats = tail_stats(torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([3]), TailConfig(k=k))
    assert float(stats.lam) == 0


def test_a_power_law_gives_back_its_exponent():
    """If F(d) = (d / c)^beta holds exactly at the plotting positions, the fitted slope is beta."""
    f = torch.arange(1, 101).double() / 101
    d, config = 0.7 * f ** (1 / 3.5), TailConfig(k=100)
    fit = fit_tail(d.unsqueeze(0), torch.tensor([100]), config)
    assert float(fit.beta) == pytest.approx(3.5, rel=1e-12)
    assert float(fit.daic) == pytest.approx(reference.tail_fit(d.tolist(), config)[1])  # both floor it
    assert float(fit.r2) == pytest.approx(1)


def test_the_fit_of_float32_shortfalls_runs_in_float64():
    hardest = 0.3 + 1e-5 * torch.arange(40).unsqueeze(0)
    found, wanted = (fit_tail(d, torch.tensor([40]), TailConfig(k=40)) for d in (hardest, hardest.double()))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@given(st.lists(st.floats(0.001, 2), min_size=1, max_size=40), st.floats(0, 1))
@example([0.01 * i for i in range(1, 92)], 0.35)  # 0.35 * 90 is 31.499999999999996
def test_nearest_rank(values, q):
    tensor = torch.tensor(values, dtype=torch.float64)
    got = nearest_rank(tensor, torch.ones(len(values), dtype=torch.bool), q)
    assert float(got) == sorted(values)[round(q * (len(values) - 1))]


@pytest.mark.parametrize("q", [0.0, 0.2, 1.0])
def test_the_nearest_rank_of_nothing(q):
    assert nearest_rank(torch.tensor([0.1, 0.2]), torch.tensor([False, False]), q) == math.inf


def test_statistics_of_a_similarity_matrix():
    lists, _ = ragged([50] * 6)
    scores = torch.tensor([[0.9, *(1 - d for d in row)] for row in lists], dtype=torch.float64)
    column = torch.zeros(6, dtype=torch.int64)
    mask = torch.zeros(6, 51, dtype=torch.bool)
    mask[:, 0] = True
    wanted = reference.tail_statistics(lists, [True] * 6, TailConfig())
    for positives in (column, mask):
        got = stats_of_scores(scores, positives)
        for name in got._fields:
            expected = torch.tensor([anchor[name] for anchor in wanted], dtype=torch.float64)
            torch.testing.assert_close(getattr(got, name), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", [TailConfig(k=1.0, k_min=1), TailConfig(k=50)], ids=["share", "number"])
def test_statistics_of_a_matrix_of_negatives_alone(config):
    lists, _ = ragged([7] * 4)
    scores = 1 - torch.tensor(lists, dtype=torch.float64)
    got = stats_of_scores(scores, torch.zeros(4, 7, dtype=torch.bool), tail=config)
    wanted = [anchor["beta"] for anchor in reference.tail_statistics(lists, [True] * 4, config)]
    torch.testing.assert_close(got.beta, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_statistics_of_rounded_scores_are_theirs_and_have_no_gradient():
    scores = torch.linspace(0.2, 0.99, 60).reshape(2, 30).bfloat16().requires_grad_()
    positives = torch.tensor([0, 1], dtype=torch.int32)
    got, wanted = (stats_of_scores(s, positives) for s in (scores, scores.float()))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert all(values.dtype == torch.float32 and not values.requires_grad for values in got)


def test_statistics_of_nan_are_nan():
    scores = torch.rand(4, 200, dtype=torch.float64)
    positives = torch.tensor([0, 1, 2, 3])
    wanted = stats_of_scores(scores[[0, 3]], positives[[0, 3]])
    scores[1, 7], scores[2], scores[3, 3] = math.nan, math.nan, math.nan  # the last is a positive
    got = stats_of_scores(scores, positives)
    for own, right in zip(got, wanted, strict=True):
        assert own[1:3].isnan().all()
        torch.testing.assert_close(own[[0, 3]], right, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": -1}, ValueError, r"k as a number must lie in \[1, k_max=1024\]; got -1"),
        ({"k": 0}, ValueError, "got 0"),
        ({"k": 2000}, ValueError, "got 2000"),
        ({"k": 1.5}, ValueError, r"k as a share must lie in \(0, 1\]"),
        ({"k": True}, TypeError, "k must be an int or a share"),
        ({"k": "all"}, TypeError, "k must be an int or a share.*'all'"),
        ({"k_min": 0}, ValueError, "wanted 1 <= k_min <= k_max; got k_min=0"),
        ({"k_max": 8}, ValueError, "k_max=8"),
        ({"rho0": 0.0}, ValueError, "rho0 must be positive"),
        ({"rho0_quantile": 1.1}, ValueError, "rho0_quantile"),
        ({"rho0_quantile": -0.1}, ValueError, r"rho0_quantile must lie in \[0, 1\]; got -0.1"),
        ({"drop": 1.0}, ValueError, "drop must be a share"),
        ({"drop": -0.1}, ValueError, "drop must be a share"),
        ({"endpoint": 0.9}, ValueError, "endpoint must be at least 1, the largest cosine; got 0.9"),
        ({"endpoint": math.inf}, ValueError, "endpoint must be positive and finite; got inf"),
        ({"positive": "none"}, ValueError, 'positive must be "blend" or "softmax"; got \'none\''),
        ({"beta": math.inf}, ValueError, "beta must be"),
        ({"kappa_rho": 0.0}, ValueError, "kappa_rho must be positive"),
        (
            {"beta": "fitted"},
            ValueError,
            'beta must be "fit" or a number of at least 0, or "slope"; got \'fitted\'',
        ),
        ({"beta": -1.0}, ValueError, "beta must be"),
        ({"beta": True}, TypeError, "beta must be.*got True"),
        ({"beta": None}, TypeError, "beta must be.*got None"),
        ({"k_min": "a"}, TypeError, "k_min must be an int; got 'a'"),
        ({"k_max": 64.0}, TypeError, "k_max must be an int; got 64.0"),
        ({"margin": "a"}, TypeError, "margin must be a number; got 'a'"),
        ({"margin": math.nan}, ValueError, "margin must be finite; got nan"),
        ({"drop": None}, TypeError, "drop must be a number; got None"),
        ({"soft_cap": "no"}, TypeError, "soft_cap must be True or False; got 'no'"),
        ({"gate": "none"}, ValueError, "gate must be"),
        ({"eps": 0.0}, ValueError, "eps must be positive"),
        ({"kappa_aic": math.inf}, ValueError, "kappa_aic must be positive"),
    ],
)
def test_bad_configuration_is_named(options, error, message):
    with pytest.raises(error, match=message):
        TailConfig(**options)


@pytest.mark.parametrize("options", [{"rho0_quantile": 0.0}, {"rho0_quantile": 1.0}, {"k": 1.0}, {"k": 1024}])
def test_a_range_includes_its_ends(options):
    assert TailConfig(**options) != TailConfig()


def test_numbers_may_be_numpys():
    assert TailConfig(k=np.int64(8)) == TailConfig(k=8)
    assert TailConfig(k=np.int64(8)).tail_size(100) == 8
    assert TailConfig(k=np.float32(0.25), margin=np.float64(1)).tail_size(100) == 32


@pytest.mark.parametrize(
    ("scores", "positives"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)),
        (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 4), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(3, 4), torch.zeros(3, 4)),
    ],
)
def test_bad_scores_are_named(scores, positives):
    with pytest.raises(ValueError, match="must be"):
        stats_of_scores(scores, positives)
