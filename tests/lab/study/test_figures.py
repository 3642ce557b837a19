"""Figures from logs: their contents, their means, and that the table's files include them."""

import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from lab.study.made import reproduce
from lab.study.tables import small_table

from weince.lab import settings
from weince.lab.study import figures
from weince.lab.study.plan import plan, settings_of
from weince.lab.study.statistics import Done
from weince.lab.study.table import read_table
from weince.lab.tasks.images.training import ImageTraining
from weince.lab.training.log import Log

COLUMNS = ImageTraining.columns

TRIES = [{"loss.temperature": 0.5}, {"loss.temperature": 0.2}]


def filled(tmp_path, *, epochs=3, without=(), **changes):
    """A small table, and its runs with figures and logs that depend on the place in the plan."""
    path = small_table(tmp_path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    table = read_table(str(path))
    runs = plan(table, tmp_path)
    for place, run in enumerate(runs):
        settings.claim(settings_of(run), run.folder, free=())
        figures = {
            f"{name}_{kind}_mean": 50.0 + place
            for name in ("linear", "r1")
            for kind in ("validation", "test")
        }
        run.result.write_text(json.dumps({**figures, "data": "digits", "fingerprint": "01"}))
        if place not in without:
            log = Log(run.folder, 0, COLUMNS)
            for epoch in range(1, epochs + 1):
                log.add(
                    {name: epoch * (1 + place) ** 2 + column for column, name in enumerate(COLUMNS)}
                    | {"epoch": epoch}
                )
    return table, runs


@pytest.fixture
def drawn(monkeypatch):
    """The matplotlib figures by name."""
    found, draw = {}, figures._on_white

    def keep(figure, name, caption, folder):
        found[name] = figure
        return draw(figure, name, caption, folder)

    monkeypatch.setattr(figures, "_on_white", keep)
    return found


def pictures(table, done, folder):
    folder.mkdir(exist_ok=True)
    return figures.draw_table(table, done, folder)


def made_of(runs):
    return [Done(run, json.loads(run.result.read_text())) for run in runs]


def test_thick_lines_are_means_and_thin_ones_seeds(tmp_path, drawn):
    table, runs = filled(tmp_path, seeds=[7, 21, 63])
    pictures(table, made_of(runs), tmp_path / "drawn")
    axes = drawn["curves"].axes
    assert [ax.get_title(loc="left") for ax in axes] == list(figures.PANELS.values())
    for ax, key in zip(axes, figures.PANELS, strict=True):
        column = COLUMNS.index(key)
        for loss in table.losses:
            places = [place for place, run in enumerate(runs) if run.loss == loss]
            values = np.array(
                [[epoch * (1 + place) ** 2 + column for epoch in (1, 2, 3)] for place in places]
            )
            (mean,) = [line for line in ax.get_lines() if line.get_label() == loss]
            np.testing.assert_allclose(mean.get_ydata(), values.mean(0), rtol=1e-5)
            assert mean.get_xdata().tolist() == [1, 2, 3]
            thin = [
                line.get_ydata().tolist()
                for line in ax.get_lines()
                if line.get_color() == mean.get_color() and line is not mean
            ]
            np.testing.assert_allclose(sorted(thin), sorted(values.tolist()), rtol=1e-5)


def forget(run, epochs):
    """Empty the column `crowded` in the first epochs of a log, as in an older log; if in all, remove the column."""
    path = run.folder / "log.csv"
    head, *rows = [line.split(",") for line in path.read_text().splitlines()]
    place = head.index("crowded")
    for row in rows[:epochs]:
        row[place] = ""
    if epochs == len(rows):
        for row in (head, *rows):
            del row[place]
    path.write_text("\n".join(",".join(row) for row in (head, *rows)) + "\n")


def test_logs_without_a_column_have_no_panel_of_it(tmp_path, drawn):
    table, runs = filled(tmp_path)
    for run in runs:
        forget(run, 3)
    pictures(table, made_of(runs), tmp_path / "drawn")
    titles = [ax.get_title(loc="left") for ax in drawn["curves"].axes]
    assert titles == [title for key, title in figures.PANELS.items() if key != "crowded"]


def test_where_a_log_lacks_a_column_its_lines_have_a_gap(tmp_path, drawn):
    """One seed of InfoNCE lacks the column in its first epoch, one seed of paper in all epochs."""
    table, runs = filled(tmp_path)
    by_loss = {loss: [run for run in runs if run.loss == loss] for loss in table.losses}
    forget(by_loss["InfoNCE"][0], 1)
    forget(by_loss["paper"][0], 3)
    (shown, _) = pictures(table, made_of(runs), tmp_path / "drawn")
    assert shown.caption.endswith("Crowded has no mean where a log is older than that column: paper.")
    (ax,) = [ax for ax in drawn["curves"].axes if ax.get_title(loc="left") == figures.PANELS["crowded"]]
    means = {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}
    assert np.isnan(means["InfoNCE"].get_ydata()).tolist() == [True, False, False]
    assert np.isnan(means["paper"].get_ydata()).all()
    thin = [
        line for line in ax.get_lines()
        if line.get_color() == means["paper"].get_color() and line is not means["paper"]
    ]  # fmt: skip
    assert sorted(int(np.isfinite(line.get_ydata()).sum()) for line in thin) == [0, 3]


def test_each_run_is_a_mark_at_its_last_epoch(tmp_path, drawn):
    table, runs = filled(tmp_path)
    pictures(table, made_of(runs), tmp_path / "drawn")
    marks = drawn["geometry"].axes[0].collections
    assert [mark.get_label() for mark in marks] == ["InfoNCE", "paper"]
    for mark in marks:
        places = [place for place, run in enumerate(runs) if run.loss == mark.get_label()]
        ends = [
            [3 * (1 + p) ** 2 + COLUMNS.index(key) for key in ("alignment", "uniformity")] for p in places
        ]
        np.testing.assert_allclose(mark.get_offsets(), ends, rtol=1e-5)
        assert mark.get_array().tolist() == [50.0 + p for p in places]
        assert mark.get_clim() == (50, 53)  # all marks share one colour scale


def test_no_two_configurations_look_the_same(tmp_path, drawn):
    for name, count in (("factorial", 12), ("gates", 13)):
        table = read_table(name)
        runs = plan(table, tmp_path, seeds=[7])
        for run in runs:
            run.folder.mkdir(parents=True, exist_ok=True)
            Log(run.folder, 0, COLUMNS).add(dict.fromkeys(COLUMNS, 1.0))
        pictures(table, [Done(run, {"linear_test_mean": 1.0}) for run in runs], tmp_path / "drawn")
        looks = {(line.get_color(), line.get_linestyle()) for line in drawn["curves"].axes[0].get_lines()}
        assert len(looks) == count
        assert all(line.get_marker() == "o" for line in drawn["curves"].axes[0].get_lines())  # one epoch


def test_tries_are_told_apart(tmp_path, drawn):
    table, runs = filled(tmp_path, tries=TRIES, choose_by="linear")
    pictures(table, made_of(runs), tmp_path / "drawn")
    thick = [line for line in drawn["curves"].axes[0].get_lines() if not line.get_label().startswith("_")]
    assert [line.get_label() for line in thick] == [
        f"{loss}, temperature {tau}" for loss in ("InfoNCE", "paper") for tau in (0.5, 0.2)
    ]
    looks = [(line.get_color(), line.get_linestyle()) for line in thick]
    assert looks[0][1] == looks[1][1] != looks[2][1] == looks[3][1]  # one style per loss
    assert looks[0][0] == looks[2][0] != looks[1][0] == looks[3][0]  # one colour per try


def test_runs_without_a_log_are_left_out_and_seeds_meet_where_the_shortest_ends(tmp_path, drawn):
    table, runs = filled(tmp_path, without={0, 1, 3})
    Log(runs[0].folder, 0, COLUMNS).add(dict.fromkeys(COLUMNS, 1.0))
    pictures(table, made_of(runs), tmp_path / "drawn")
    lines = drawn["curves"].axes[0].get_lines()
    assert [line.get_label() for line in lines if not line.get_label().startswith("_")] == ["InfoNCE"]
    assert {len(line.get_xdata()) for line in lines} == {1}
    for run in runs:
        (run.folder / "log.csv").unlink(missing_ok=True)
    assert pictures(table, made_of(runs), tmp_path / "drawn") == []


@pytest.mark.parametrize("values", [(math.nan, math.nan), (0.4, math.nan)])
def test_a_link_that_could_not_be_fitted_has_no_colour(tmp_path, drawn, values):
    table = read_table("frechet_bf16")
    runs = plan(table, tmp_path)
    for run in runs:
        run.folder.mkdir(parents=True)
        Log(run.folder, 0, COLUMNS).add(dict.fromkeys(COLUMNS, 1.0))
    made = [Done(run, {"frechet_lam_w": value}) for run, value in zip(runs, values, strict=True)]
    assert [picture.slug for picture in pictures(table, made, tmp_path / "drawn")] == ["curves", "geometry"]
    (marks,) = drawn["geometry"].axes[0].collections
    assert np.isnan(marks.get_array().filled(math.nan)).tolist() == [math.isnan(value) for value in values]


@pytest.mark.parametrize(("seeds", "said"), [(2, ""), (3, ": -1.00.")])
def test_how_accuracy_goes_with_uniformity_is_said_of_five_runs_or_more(tmp_path, seeds, said):
    table, runs = filled(tmp_path)
    of_each_loss = {run.loss: run for run in runs}.values()
    more = [
        replace(run, seed=seed, folder=tmp_path / run.loss / str(seed))
        for run in of_each_loss
        for seed in range(seeds)
    ]
    made = []
    for place, run in enumerate(more):
        run.folder.mkdir(parents=True)
        Log(run.folder, 0, COLUMNS).add(dict.fromkeys(COLUMNS, 1.0) | {"uniformity": -3.0 - place})
        made.append(Done(run, {"linear_test_mean": 50.0 + place**2}))
    caption = pictures(table, made, tmp_path / "drawn")[1].caption
    assert caption.endswith(said or "more evenly spread.")
    assert ("Rank correlation of linear with uniformity over these 6 runs" in caption) == bool(said)


def test_every_row_has_figures_of_its_own(tmp_path):
    table, runs = filled(tmp_path)
    other = [replace(one, run=replace(one.run, row="more")) for one in made_of(runs)]
    names = [picture.slug for picture in pictures(table, made_of(runs) + other, tmp_path / "drawn")]
    assert names == ["curves_digits_small", "geometry_digits_small", "curves_more", "geometry_more"]


def test_figures_reach_the_files_of_a_table(tmp_path):
    losses = {"InfoNCE": {"set": {"loss.preset": "infonce"}}, "<b>$x_1$": {"set": {"loss.preset": "paper"}}}
    filled(tmp_path, losses=losses)
    page = reproduce(str(tmp_path / "small.yaml"), out=tmp_path, table_only=True)
    folder = page.parent
    for name in ("curves.svg", "geometry.svg"):
        text = (folder / name).read_text()
        ElementTree.fromstring(text)  # it is well-formed XML
        assert "&lt;b&gt;$x_1$" in text
        assert f"\n- {name.removesuffix('.svg')}: " in (folder / "table.md").read_text()
    shown = page.read_text()
    assert shown.count("<svg") == 2
    assert "<b>" not in shown
    ids = re.findall(r'\bid="([^"]+)"', shown)
    assert len(ids) == len(set(ids))
    assert "<image" not in shown  # the page's content policy blocks images
    again = reproduce(str(tmp_path / "small.yaml"), out=tmp_path, table_only=True)
    assert again.read_text() == shown  # the same records give the same page
