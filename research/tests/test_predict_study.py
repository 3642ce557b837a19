"""Whether heads rank losses as full trainings do: the archive, the ranks, the regrets, and the command."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run, script
from scipy import stats

from weince.lab.configure import LossConfig

study, views = script("research/predict_study.py"), script("research/two_views.py")


def test_the_archive_has_the_trainings_of_the_findings():
    reached, losses = study.outcomes(study.ARCHIVES)
    sizes = {str(group): len(by) for group, by in reached.items()}
    of_findings = {
        "cifar100_resnet18, 25 epochs": 26,
        "cifar100_resnet18, 100 epochs": 14,
        "cifar10_resnet18, 25 epochs": 4,
        "cifar10_resnet18, 100 epochs": 5,
        "cifar10_resnet18_small, 12 epochs": 7,
        "cifar100_resnet18_strong, 25 epochs": 15,
        "cifar100_resnet18_strong, 100 epochs": 4,
    }
    assert sizes.keys() == of_findings.keys()
    assert all(sizes[group] >= number for group, number in of_findings.items())  # the archive may grow
    by = reached[study.Group("cifar100", "cifar100_resnet18", 100)]
    assert by["infonce 0.2"] == pytest.approx(np.mean([53.366, 54.294, 53.784, 53.66]))
    assert losses["paper 0.5, gate aic"] == LossConfig("paper", 0.5, tail={"gate": "aic"})
    assert all(name in losses for group in reached.values() for name in group)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=9))
def test_ranks_agree_with_scipy(rows):
    x, y = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return
    found = study.agreement(x, y)
    assert found.spearman == pytest.approx(stats.spearmanr(x, y).statistic)
    assert found.kendall == pytest.approx(stats.kendalltau(x, y).statistic)
    assert -1.0 - 1e-9 <= found.spearman_interval[0] <= found.spearman_interval[1] <= 1.0 + 1e-9


def test_regrets_are_points_lost():
    reached = {"infonce 0.1": 50.0, "infonce 0.2": 52.0, "paper 0.5": 40.0, "dcl 0.1": 54.0}
    predicted = {"infonce 0.1": 0.2, "infonce 0.2": 0.9, "paper 0.5": 0.1, "dcl 0.1": 0.5}
    found = study.regrets(predicted, reached, 0.15)
    assert found == {"heads": 2.0, "infonce 0.1": 4.0, "infonce 0.2": 2.0, "diagnose": 2.0, "random": 5.0}
    del reached["infonce 0.1"]
    assert np.isnan(study.regrets(predicted, reached, 0.15)["infonce 0.1"])


def test_the_nearest_temperature_is_of_plain_infonce():
    reached = dict.fromkeys(["infonce 0.1", "infonce 0.5", "infonce 0.07, softmax_term 0.5", "dcl 0.07"], 0.0)
    assert study.nearest(reached, 0.07) == "infonce 0.1"
    assert study.nearest(reached, 0.22) == "infonce 0.1"  # by ratio: the geometric mean is 0.224
    assert study.nearest(reached, 0.23) == "infonce 0.5"


def heads(source, data, predicted, crowded=None):
    return study.Heads(source, data, predicted, crowded or {})


def test_a_choice_of_features_and_metric_does_not_see_what_it_is_judged_by():
    """A different metric agrees on each data set; features that exist for only one data set are not chosen."""
    names = ["infonce 0.1", "infonce 0.2", "dcl 0.1", "paper 0.5"]
    rising, falling = (dict(zip(names, order, strict=True)) for order in ([1, 2, 3, 4], [4, 3, 2, 1]))
    found = [
        heads("a_cifar10", "cifar10", {"first": rising, "vote": falling}),
        heads("a_cifar100", "cifar100", {"first": falling, "vote": rising}),
        heads("only_cifar100", "cifar100", {"first": rising}),
    ]
    groups = {data: study.Group(data, data, 25) for data in ("cifar10", "cifar100")}
    rows = [row for one in found for row in study.compared(one, groups[one.data], rising, 0.1)]
    assert {row.ranks.spearman for row in rows} == {1.0, -1.0}
    judged = study.left_out(rows)
    assert [(row.heads.source, row.metric) for row in judged] == [
        ("a_cifar10", "vote"),
        ("a_cifar100", "first"),
    ]
    assert all(row.ranks.spearman == pytest.approx(-1.0) for row in judged)


def test_alarms_are_counted_where_the_truth_is_known():
    trained = {"cifar100": {"paper 0.5": 0.2, "blend 0.5": 0.1, "infonce 0.5": 0.0, "infonce 0.2": 0.01}}
    crowded = {"paper 0.5": 0.3, "blend 0.5": 0.01, "infonce 0.5": 0.06, "infonce 0.2": 0.0, "dcl 0.1": 0.9}
    lines = study.collapses([heads("features", "cifar100", {}, crowded)], trained)
    assert "| features | 1 of 2 | 1 of 2 | 0.75 | 30.0 |" in lines
    assert "| dcl 0.1 |  | 90.0 |" in lines


@given(st.lists(st.integers(0, 3), min_size=1), st.lists(st.integers(0, 3), min_size=1))
def test_the_chance_is_that_of_the_rank_test(first, second):
    found = study.more_often(np.array(first), np.array(second))
    assert found == pytest.approx(stats.mannwhitneyu(first, second).statistic / (len(first) * len(second)))


def test_trainings_that_collapsed_are_in_the_archive():
    found = study.crowds(study.ARCHIVES)
    assert found["cifar100"]["paper 0.5"] == pytest.approx((0.183594 + 0.207031) / 2)  # logged by two runs
    assert found["cifar10"]["paper 0.5"] > 0.05 > found["cifar100"]["infonce 0.5"]


def test_diagnoses_of_infonce_at_a_half_are_in_the_records():
    found = study.diagnosed(study.RECORDS)
    assert found == {"cifar100": pytest.approx(0.0730, abs=1e-4), "cifar10": pytest.approx(0.0786, abs=1e-4)}


def test_heads_on_real_embeddings_agree_with_trainings_of_25_epochs():
    """At 25 epochs heads rank losses well; at 100 epochs less so, and always taking InfoNCE at 0.2 loses less."""
    heads, (reached, _) = study.trap_heads(study.RECORDS), study.outcomes(study.ARCHIVES)
    predicted = heads.predicted[study.FIRST]
    found = {}
    for epochs in (25, 100):
        by = reached[study.Group("cifar100", "cifar100_resnet18", epochs)]
        both = [name for name in by if name in predicted]
        ranks = study.agreement([predicted[n] for n in both], [by[n] for n in both])
        found[epochs] = len(both), ranks.spearman, study.regrets(predicted, by, 0.1)
    assert found[25][0] == 13
    assert found[25][1] > 0.9
    assert found[100][1] < 0.7
    assert found[100][2]["heads"] > found[100][2]["infonce 0.1"] > found[100][2]["infonce 0.2"] == 0


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        f"{part}_{what}": rng.integers(high, size=shape, dtype=np.uint8)
        for part, count in (("train", 48), ("test", 8))
        for what, high, shape in (("images", 256, (count, 32, 32, 3)), ("labels", 4, (count,)))
    }
    np.savez(tmp_path / "images.npz", **arrays)
    return tmp_path / "images.npz"


def test_patches_describe_two_different_views(images, tmp_path):
    done = run(views.__file__, "patches", images, "--images", "40", "--out", tmp_path / "features.npz")
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "features.npz", allow_pickle=False) as found:
        assert found["z_i"].shape == found["z_j"].shape == (40, 8 * views.FILTERS + 12)
        assert found["z_i"].dtype == np.float16
        assert not np.array_equal(found["z_i"], found["z_j"])
        assert found["labels"].shape == (40,)


def test_the_study_as_a_command(tmp_path, capsys):
    """Use only the few losses of the small encoder, so that the test is quick."""
    lines = study.ARCHIVES[0].read_text(encoding="utf-8").splitlines()
    (tmp_path / "runs.jsonl").write_text(
        "\n".join(line for line in lines if "_small/" in line), encoding="utf-8"
    )
    rng = np.random.default_rng(0)
    z = rng.standard_normal((1024, 6))
    np.savez(tmp_path / "features.npz", z_i=z, z_j=z + 0.3 * rng.standard_normal((1024, 6)))
    wanted = [
        f"cifar10={tmp_path / 'features.npz'}", "--archives", str(tmp_path / "runs.jsonl"), "--steps", "2", "--seeds",
        "0", "--jobs", "1", "--results", str(tmp_path / "found"),
    ]  # fmt: skip
    study.main(wanted)
    assert (tmp_path / "found.svg").read_text(encoding="utf-8").startswith("<?xml")
    text = (tmp_path / "found.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert "\n| cifar10_resnet18_small, 12 epochs | features | positive first of a batch | 7 | " in text
    assert "| R@1 |" not in text  # the features have no labels
    lines = (tmp_path / "found.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 7 * 4  # seven losses, four metrics without labels
    with pytest.raises(SystemExit):
        study.main([f"nothing={tmp_path / 'features.npz'}", "--results", str(tmp_path / "found")])
    assert "want DATA=FILE, where DATA is of cifar10, cifar100; got nothing=" in capsys.readouterr().err
