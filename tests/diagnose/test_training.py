"""The table and the training curves that may stand before a diagnosis."""

import csv
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from diagnose.browser import sound_page
from weince.diagnose.page import Page, write_page
from weince.diagnose.settings import Settings
from weince.diagnose.style import Gallery, shorten
from weince.diagnose.training import LOOKS, SHARED, Opening, curves_section, headline, results_section
from weince.diagnose.verdict import THRESHOLDS
from weince.lab.vision.log import COLUMNS

HOSTILE = '<img src=x onerror=alert(1)>&"$x^2$'
LOSSES = (HOSTILE, "two", "three", "a " + "very " * 12 + "long name", "five", "six", "seven")


def log(epochs, seed):
    rng = np.random.default_rng(seed)
    return [{name: float(rng.random()) for name in COLUMNS} | {"epoch": e + 1.0} for e in range(epochs)]


def comparison(seeds):
    rng = np.random.default_rng(0)
    return {name: {"Probe": rng.uniform(90, 95, seeds).tolist(), HOSTILE: [50.0] * seeds} for name in LOSSES}


@pytest.fixture(scope="module", params=[(3, 4), (1, 1)], ids=["three seeds", "one seed, one epoch"])
def report(request, tmp_path_factory):
    """A page that is all opening (the demo's has a diagnosis after it), and its number of seeds."""
    seeds, epochs = request.param
    compared = comparison(seeds)
    logs = {name: [log(epochs, seed) for seed in range(seeds)] for name in LOSSES}
    logs["two"][-1] = log(epochs + 2, 9)  # a run that is longer than the others
    opening = Opening(
        f"Title {HOSTILE}",
        f"Lead {HOSTILE}",
        lambda gallery: [
            results_section(
                gallery, compared, said=f"Said {HOSTILE}", read="Read", notes=[f"Note {HOSTILE}"]
            ),
            curves_section(gallery, logs),
        ],
        diagnosis=f"Heading {HOSTILE}",
    )
    out = tmp_path_factory.mktemp("opening")
    opened = opening.sections(Gallery(out / "figures"))
    opened[0].tables[0].write_csv(out)
    page = Page(
        title=opening.title, opening=opening, opened=opened, command="", models=[], compared=None, trend=False,
        average=False, sections=[], settings=Settings(), rules=THRESHOLDS, version="",
    )  # fmt: skip
    write_page(page, out / "index.html")
    return out, seeds


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_with_an_opening(report, browser, width, scheme):
    folder, seeds = report
    with sound_page(browser, folder, width, scheme) as page:
        assert page.title() == f"Title {HOSTILE}"
        assert page.locator("header p").inner_text() == f"Lead {HOSTILE}"
        headings = page.locator("h2").all_inner_texts()
        assert headings[:3] == ["Results", "Training", f"Heading {HOSTILE}"]
        links = page.locator("nav a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        assert links[:3] == ["#results", "#training", "#verdict"]
        assert all(page.locator(link).count() == 1 for link in links)

        results = page.locator("#results")
        assert f"Said {HOSTILE}" in results.inner_text()
        assert f"Note {HOSTILE}" in results.inner_text()
        assert results.locator("tbody th").all_inner_texts() == list(LOSSES)
        assert results.locator("tbody td").nth(1).inner_text() == ("50.0 ± 0.0" if seeds > 1 else "50.0")
        tops = [results.locator(tag).first.bounding_box()["y"] for tag in ("table", "figure")]
        assert tops[0] < tops[1]
        assert results.locator("figure").count() == 2

        training = page.locator("#training")
        captions = training.locator("figcaption").all_inner_texts()
        assert captions == [f"Loss: {name}" for name in LOSSES] + [caption for caption, _ in SHARED.values()]
        legend = training.locator("figure").last.locator("text").all_text_contents()
        assert {shorten(name) for name in LOSSES} <= set(legend)


def test_the_table_as_csv(report):
    folder, seeds = report
    with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["", "Probe", HOSTILE]
    assert [row[0] for row in rows] == list(LOSSES)
    for row, figures in zip(rows, comparison(seeds).values(), strict=True):
        values = figures["Probe"]
        if seeds == 1:
            assert float(row[1]) == values[0]
        else:
            wanted = stats.t.interval(0.95, seeds - 1, np.mean(values), stats.sem(values))
            assert [float(end) for end in row[1].split("..")] == pytest.approx(wanted)


def lines_of(gallery, monkeypatch, logs):
    """The lines of each panel of the curves, by slug: (colour, style, x, y)."""
    drawn, save = {}, Gallery._save

    def spy(self, canvas, slug, caption):
        drawn[slug] = [
            (line.get_color(), line.get_linestyle(), *map(list, line.get_data()))
            for line in canvas.axes[0].lines
        ]
        return save(self, canvas, slug, caption)

    monkeypatch.setattr(Gallery, "_save", spy)
    curves_section(gallery, logs)
    return drawn


def test_the_curves_are_those_of_the_logs(tmp_path, monkeypatch):
    """Each encoder a line, then their mean over the epochs that all of them have; one colour for each loss."""
    logs = {"a": [log(3, 0), log(5, 1)], "b": [log(4, 2)]}
    drawn = lines_of(Gallery(tmp_path), monkeypatch, logs)
    assert list(drawn) == [f"training-{name}" for name in ("loss-1", "loss-2", *SHARED)]
    for key in SHARED:
        first, second, mean, *_ = lines = drawn[f"training-{key}"]
        assert len(lines) == 3 + 2
        assert first[2:] == ([1, 2, 3], [row[key] for row in logs["a"][0]])
        assert second[2:] == ([1, 2, 3], [row[key] for row in logs["a"][1][:3]])
        assert mean[3] == pytest.approx([(x + y) / 2 for x, y in zip(first[3], second[3], strict=True)])
        assert lines[3][2:] == lines[4][2:] == ([1, 2, 3, 4], [row[key] for row in logs["b"][0]])
        assert [line[0] for line in lines] == [LOOKS[0][0]] * 3 + [LOOKS[1][0]] * 2
        assert [lines[i][1] for i in (2, 4)] == [LOOKS[0][1], LOOKS[1][1]]
    assert drawn["training-loss-2"][0][3] == [row["loss"] for row in logs["b"][0]]
    assert {line[0] for line in drawn["training-loss-2"]} == {LOOKS[1][0]}


def test_the_headline_says_who_overlaps():
    high, low = [96.0, 97.0, 98.0], [90.0, 91.0, 92.0]
    assert headline({"a": {"x": low}, "b": {"x": high}}, "x") == (
        "x: b is highest, 97.0 ± 2.5 %, and no other interval reaches its own."
    )
    near = [95.0, 96.0, 97.0]
    named = {"a": {"x": near}, "b": {"x": high}, "c": {"x": low}, "d": {"x": near}, "e": {"x": near}}
    assert headline(named, "x").endswith("but its interval overlaps those of a; d and e.")
    assert headline({"a": {"x": near}, "b": {"x": high}}, "x").endswith("overlaps that of a.")
    assert "compare nothing" in headline({"a": {"x": [1.0]}, "b": {"x": [2.0]}}, "x")


accuracies = st.lists(st.floats(0, 100), min_size=2, max_size=5)


@given(st.lists(accuracies, min_size=2, max_size=5))
def test_the_headline_claims_a_winner_only_if_no_interval_overlaps(values):
    names = [f"loss{i}" for i in range(len(values))]
    said = headline({n: {"x": v} for n, v in zip(names, values, strict=True)}, "x")

    def ends(sample):
        half = stats.t.ppf(0.975, len(sample) - 1) * np.std(sample, ddof=1) / math.sqrt(len(sample))
        return np.mean(sample) - half, np.mean(sample) + half

    best = max(range(len(values)), key=lambda i: np.mean(values[i]))
    floor = ends(values[best])[0]
    gaps = [ends(v)[1] - floor for i, v in enumerate(values) if i != best]
    if all(abs(gap) > 1e-9 for gap in gaps):
        assert ("no other interval" in said) == all(gap < 0 for gap in gaps)
    assert f"x: {names[best]} is highest" in said
