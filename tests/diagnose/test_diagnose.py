"""The folder of a diagnosis: written completely or not at all, replaced only if it is a diagnosis; trends."""

import inspect
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diagnose.synthetic import small, two_encoders, views
from weince.cli_diagnose import Diagnose
from weince.diagnose import diagnose
from weince.diagnose.diagnosis_settings import QUICK, DiagnosisSettings
from weince.diagnose.figures_link import mean_over
from weince.diagnose.reading import InputError, make_pairs
from weince.diagnose.report import FORMAT, WRITTEN, check_out, steps_of, write_diagnosis
from weince.files import finished_folder
from weince.lab.paper.supplement import PAPER

FAST = replace(QUICK, bootstraps=20, null_draws=20, tail_bootstraps=20, points=5)


def earlier(out):
    """Write a folder that the command takes for an earlier diagnosis."""
    with finished_folder(out, WRITTEN) as folder:
        (folder / "index.html").write_text("old")
        (folder / "figures").mkdir()
        (folder / "figures" / "stale.svg").write_text("old")
        (folder / "summary.json").write_text(json.dumps({"format": FORMAT}))


def test_named_pairs_in_memory_give_a_page_that_replaces_the_last(tmp_path):
    """Numbers of numpy and torch are taken too."""
    earlier(tmp_path / "deep" / "page")
    numbers = {"temperature": torch.nn.Parameter(torch.tensor(0.5)), "seed": np.int64(3)}
    index = diagnose(
        {"one": views(pairs=200)}, str(tmp_path / "deep" / "page"), quick=True, progress=False, **numbers
    )
    assert index == tmp_path / "deep" / "page" / "index.html"
    assert "Diagnosis of one" in index.read_text(encoding="utf-8")
    summary = json.loads((index.parent / "summary.json").read_text(encoding="utf-8"))
    assert summary["models"][0]["pairs"] == 200
    assert (summary["settings"]["temperature"], summary["settings"]["seed"]) == (0.5, 3)
    assert not (index.parent / "figures" / "stale.svg").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["page"]


def test_a_failure_leaves_the_earlier_page_alone(tmp_path):
    """The first model is measured; the second one fails, and one model has no mean."""
    out = tmp_path / "page"
    earlier(out)
    with pytest.raises(InputError, match=r"needs two models or more.*; got 1; few: want .* two to judge it"):
        write_diagnosis([small(pairs=128), small("few", pairs=40)], out, FAST, average=True, progress=False)
    assert (out / "index.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def on_one_point(name, share=0.2, pairs=128):
    """A model that maps this share of its items onto one point, so that the tail of its negatives is one score."""
    z_i, z_j = views(pairs=pairs)
    there = round(share * pairs)  # not equal to the bit: exact twins do not compete
    z_i[:there], z_j[:there] = 1.0 + 1e-7 * z_i[:there], 1.0 + 1e-7 * z_j[:there]
    return make_pairs(name, z_i, z_j)


@pytest.mark.parametrize("trend", [False, True])
def test_a_model_that_cannot_be_measured_is_named_and_the_others_are_diagnosed(tmp_path, capsys, trend):
    models = [small("first", pairs=128), on_one_point("collapsed"), small("last", pairs=128, seed=1)]
    index = write_diagnosis(models, tmp_path / "page", FAST, trend=trend)
    summary = json.loads((index.parent / "summary.json").read_text(encoding="utf-8"))
    assert [model["name"] for model in summary["models"]] == ["first", "last"]
    (reason,) = summary["left_out"]
    assert re.match(r"collapsed: \d\.\d % of the negative pairs have a cosine of 1", reason)
    assert f"not diagnosed: {reason}" in capsys.readouterr().err
    page = index.read_text(encoding="utf-8")
    assert page.index("Not diagnosed") < page.index(reason) < page.index("What to change")


def test_the_printed_verdict_warns_of_views_that_lie_apart(tmp_path, capsys):
    """It does not hold if only rows of the other view competed, which the page alone said."""
    write_diagnosis([make_pairs("two", *two_encoders())], tmp_path / "page", FAST)
    said = capsys.readouterr().err
    assert re.search(r"^two: .+\. The two views lie apart: .+ use --candidates cross", said, re.MULTILINE)


def test_models_that_can_none_be_measured_are_refused_with_every_reason(tmp_path):
    message = r"^one: .* cosine of 1.*; two: want 4 batches"
    with pytest.raises(InputError, match=message):
        write_diagnosis(
            [on_one_point("one"), small("two", pairs=40)], tmp_path / "page", FAST, progress=False
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("way", ["link", "."])
@pytest.mark.posix
def test_a_folder_that_cannot_be_renamed_is_filled(way, again, tmp_path, monkeypatch):
    """The folder is a symbolic link or the current directory."""
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    monkeypatch.chdir(real if way == "." else tmp_path)
    if again:
        earlier(Path(way))
    with finished_folder(Path(way), WRITTEN) as folder:
        (folder / "index.html").write_text("new")
        (folder / "tables").mkdir()
        (folder / "summary.json").write_text(json.dumps({"format": FORMAT}))
    assert (real / "index.html").read_text() == "new"
    assert sorted(path.name for path in real.iterdir()) == ["index.html", "summary.json", "tables"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
    assert (tmp_path / "link").is_symlink()
    check_out(Path(way))


def interrupted(out):
    with finished_folder(out, WRITTEN) as folder:
        (folder / "index.html").write_text("half")
        raise KeyboardInterrupt


def test_an_exception_removes_what_is_unfinished(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "page")
    assert list(tmp_path.iterdir()) == []


def test_only_an_earlier_diagnosis_or_an_empty_folder_is_replaced(tmp_path):
    check_out(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_out(tmp_path / "empty")
    for content in ("not json", "[]", "{}", '{"format": "another"}'):
        (tmp_path / "empty" / "summary.json").write_text(content)
        with pytest.raises(InputError, match="other files"):
            check_out(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="want a folder; got the file"):
        check_out(tmp_path / "file")


def test_a_trend_has_a_figure_for_each_quantity(tmp_path):
    run = [small(f"step {10**i}", noise=noise, pairs=160) for i, noise in enumerate((0.9, 0.6))]
    index = write_diagnosis(run, tmp_path / "run", FAST, trend=True, progress=False, supplement=PAPER)
    names = [path.name for path in index.parent.glob("figures/*trend*.svg")]
    assert sorted(name[9:-4] for name in names) == ["f0", "gain", "lam", "lamf", "tau0", "wf", "xi"]
    # Figures show the last checkpoint only, tables all of them.
    assert not list(index.parent.glob("figures/*-pot-qq-1.svg"))
    assert list(index.parent.glob("figures/*-pot-qq-2.svg"))
    header = (index.parent / "tables" / "tail.csv").read_text(encoding="utf-8").splitlines()[0]
    assert header == ",step 1,step 10"
    assert "Over the run" in index.read_text(encoding="utf-8")


def test_models_without_a_value_do_not_enter_the_mean():
    mean, _, n = mean_over(np.array([1.0, np.nan, 3.0]))
    assert (mean, n) == (2.0, 2)
    assert np.isnan(mean_over(np.array([1.0, np.nan])).interval).all()


def test_the_interval_of_a_mean_weight_lies_in_its_bounds():
    assert mean_over(np.array([0.07, 0.24]), (0.0, 1.0)).interval == (0.0, 1.0)
    low, high = mean_over(np.array([0.07, 0.24])).interval
    assert low < 0.0 < 1.0 < high


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["epoch_1", "epoch_10", "epoch_100"], [1, 10, 100]),
        (["v2_step5", "v2_step7"], [5, 7]),
        (["b2", "a1"], [1, 2]),
        (["first", "step 3"], [1, 2]),
    ],
)
def test_steps_come_from_the_names_if_they_rise(names, steps):
    assert steps_of(names) == steps


def test_arrays_that_are_not_named_pairs_are_told_from_those_that_are(tmp_path):
    z_i, z_j = views(pairs=8)
    with pytest.raises(TypeError, match=r"must be \{name: \(z_i, z_j\)\}; got tuple"):
        diagnose((z_i, z_j), tmp_path / "page")
    with pytest.raises(InputError, match=r"one: want \(z_i, z_j\) or \(z_i, z_j, ids\); got 8 arrays"):
        diagnose({"one": z_i}, tmp_path / "page")
    with pytest.raises(InputError, match="1: all pairs have the same id"):
        diagnose({1: (z_i, z_j, np.zeros(8, int))}, tmp_path / "page")


@pytest.mark.parametrize(
    ("models", "shown", "message"),
    [
        (0, {}, "want at least one model"),
        (1, {"trend": True}, "a trend needs at least two checkpoints; got 1"),
        (1, {"average": True}, "a mean over seeds needs two models or more, and no trend; got 1"),
        (
            2,
            {"average": True, "trend": True},
            "a mean over seeds needs two models or more, and no trend; got 2",
        ),
    ],
)
def test_too_few_models_are_refused_before_anything_is_written(tmp_path, models, shown, message):
    pairs = [make_pairs("x", *views(pairs=200))] * models
    with pytest.raises(InputError, match=message):
        write_diagnosis(pairs, tmp_path / "page", FAST, progress=False, **shown)
    assert not list(tmp_path.iterdir())


def test_the_command_and_the_function_have_the_same_defaults():
    """Options that are not given take the defaults of `DiagnosisSettings`, as in Python, and the help names those."""
    options = {item.name: item for item in fields(Diagnose)}
    given = vars(Diagnose(inputs=[Path("pairs.npz")]))
    parameters = inspect.signature(diagnose).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    shared = defaults.keys() & options.keys()
    assert shared == {"out", "quick", "trend", "average"}
    assert {name: given[name] for name in shared} == {name: defaults[name] for name in shared}
    asked = {item.name for item in fields(DiagnosisSettings)} & options.keys()
    assert len(asked) == 9
    assert {given[name] for name in asked} == {None}
    helps = {name: options[name].metadata["text"] for name in asked}
    for name in asked - {"temperature", "batch_size"}:
        assert f"{getattr(DiagnosisSettings(), name)})" in helps[name]
        if getattr(QUICK, name) != getattr(DiagnosisSettings(), name):
            assert f"[{getattr(QUICK, name)}]" in helps[name]
