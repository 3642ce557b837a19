"""The page in a real browser: it loads and executes nothing, hides nothing, and fits the screen."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from markupsafe import escape
from scipy import stats

from diagnose.browser import sound_page
from diagnose.synthetic import crowd, small, views
from weince.diagnose.cells import between, by_model, num
from weince.diagnose.diagnosis_settings import QUICK
from weince.diagnose.reading import load_pairs, make_pairs
from weince.diagnose.report import write_diagnosis
from weince.diagnose.report_page import TERMS, linked
from weince.diagnose.style import plain, shorten
from weince.evt import fit_gpd
from weince.lab.paper.supplement import PAPER

FAST = replace(QUICK, bootstraps=50, null_draws=20, tail_bootstraps=20, points=5, temperature=0.5)
HOSTILE = '<img src=x onerror=alert(1)>&"$x^2$'


@pytest.fixture(scope="module")
def report(made_once):
    return made_once("diagnosis", write_report) / "out"


def write_report(folder):
    """Three models: one from a file with a hostile name, a perfectly separated one, and one with a long name."""
    z_i, z_j = views()
    np.savez(folder / f"{HOSTILE}.npz", z_i=z_i, z_j=z_j)
    hostile = load_pairs([folder / f"{HOSTILE}.npz"])
    assert hostile[0].name == HOSTILE
    long = "a_" + "very_" * 12 + "long_name"  # like a run's folder: no place for a line break
    long_one = replace(small(long, seed=3), notes=(f"Embedded by {long}.",))
    models = [*hostile, make_pairs("same", z_i, z_i + 1e-7), long_one]
    options = {"average": True, "command": f"weince {HOSTILE}", "progress": False, "supplement": PAPER}
    index = write_diagnosis(models, folder / "out", FAST, **options)
    assert index == folder / "out" / "index.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(report, browser, width, scheme):
    with sound_page(browser, report, width, scheme) as page:
        assert page.locator("figure").count() > 40
        verdict = page.locator("#verdict").inner_text()
        assert "nats per anchor" in verdict
        assert "What to change" in verdict
        assert "No answer: every positive that was fitted wins." in verdict
        assert "The 400 pairs do not fill 16 batches of 256: 12 batches of 32 were used." in verdict
        assert "is not what trains best" in verdict
        assert "at least 0.02 nats per anchor" in verdict
        # The hostile name appears as text in the page, the figures and the footer, and creates no element.
        assert HOSTILE in verdict
        labels = page.locator("figure text").all_text_contents()
        assert shorten(HOSTILE) in labels
        assert {"mean of 2 seeds", "mean of 3 seeds"} <= set(labels)
        assert HOSTILE in page.locator("footer").inner_text()


def test_every_term_leads_to_its_entry_of_the_glossary(report, browser):
    page = browser.new_page()
    page.goto((report / "index.html").as_uri())
    targets = set(page.locator("a.term").evaluate_all("all => all.map(a => a.getAttribute('href'))"))
    assert {"#term-nat", "#term-lam", "#term-temperature"} <= targets <= {f"#term-{key}" for key in TERMS}
    for key in TERMS:
        assert page.locator(f".glossary dt#term-{key}").count() == 1, key


def test_terms_are_linked_once_and_the_rest_is_escaped():
    found = linked('0.2 nats, <b>λ</b> & λ, nats, "shortfall"')
    assert found.count("#term-nat") == found.count("#term-lam") == found.count("#term-shortfall") == 1
    assert "&lt;b&gt;" in found
    assert "&amp;" in found
    assert re.sub(r"<a class=.*?>|</a>", "", found) == str(
        escape('0.2 nats, <b>λ</b> & λ, nats, "shortfall"')
    )


def test_the_glossary_knows_where_the_law_of_random_directions_ends():
    entry = (files("weince.diagnose") / "templates" / "page.html").read_text(encoding="utf-8")
    entry = entry.partition('id="term-endpoint"')[2].partition("</dd>")[0]
    said = re.findall(r"at ([\d.]+) in (\d+)", entry)
    assert [dim for _, dim in said] == ["16", "64", "512"]
    for end, dim in said:
        # (1 + s) / 2 has this beta law if s is the cosine of two random directions; it reaches 1.
        law = stats.beta((int(dim) - 1) / 2, (int(dim) - 1) / 2, loc=-1, scale=2)
        fit = fit_gpd(law.isf(0.01 * (np.arange(4000) + 0.5) / 4000), law.isf(0.01))
        assert fit.endpoint == pytest.approx(float(end), abs=0.01)


def test_what_comes_after_the_link_test_is_folded(report, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((report / "index.html").as_uri())
    assert page.locator("#link figure").first.is_visible()
    for slug in ("link-paper", "pot", "thresholds", "frechet", "ablations", "risk", "anchors"):
        assert page.locator(f"#{slug} summary").is_visible()
        assert not page.locator(f"#{slug} figure").first.is_visible()
    page.locator("#pot summary").click()
    assert page.locator("#pot figure").first.is_visible()
    assert page.locator("#noise-floor, #top1").count() == 0  # these do not concern the embeddings
    # The command to copy comes before any statistics.
    article = page.locator("article").first.inner_text()
    assert article.index("weince train --data mine.npz --loss.preset") < article.index("nats per anchor")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_table_that_is_too_wide_scrolls_to_its_last_column(report, browser, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((report / "index.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    tables = page.locator(".numbers")
    for k in range(tables.count()):
        one = tables.nth(k)
        one.evaluate("e => { e.scrollLeft = e.scrollWidth; }")
        edge = one.evaluate("e => e.getBoundingClientRect().right")
        last = one.locator("th").last.evaluate("e => e.closest('table').getBoundingClientRect().right")
        assert last <= edge + 1
        assert edge <= width


@pytest.mark.parametrize("most", [5, 12, 22])
def test_a_long_name_keeps_both_ends(most):
    names = [f"InfoNCE with the softmax term, seed {seed}" for seed in (7, 21, 63)]
    found = [shorten(name, most) for name in names]
    assert len(set(found)) == 3
    assert all(len(name) == most and "…" in name and name[0] == "I" for name in found)
    assert shorten("a" * most, most) == "a" * most


def test_names_that_differ_in_the_middle_stay_apart():
    names = [
        "blend, fitted beta, temperature 0.2",
        "blend, fitted beta, negatives only, temperature 0.2",
        "blend",
    ]
    assert shorten(names[0]) == shorten(names[1])
    found = [shorten(name, among=names) for name in names]
    assert len(set(found)) == 3
    assert found[2] == "blend"
    assert max(map(len, found)) < 35
    assert shorten(names[1], among=[names[1]] * 2) == shorten(names[1])  # equal names need no distinction


def test_the_page_prints(report, browser):
    page = browser.new_page(viewport={"width": 720, "height": 1000})  # A4 without margins
    page.goto((report / "index.html").as_uri())
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 720
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert not page.locator("nav").is_visible()
    assert page.pdf().startswith(b"%PDF")


def test_what_stands_beside_the_page(report):
    assert {path.name for path in report.iterdir()} == {"index.html", "figures", "tables", "summary.json"}
    figures = list(report.glob("figures/*"))
    assert len(figures) > 40
    for path in figures:
        ET.parse(path)
    text = (report / "index.html").read_text(encoding="utf-8")
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/", "")
    summary = json.loads((report / "summary.json").read_text(encoding="utf-8"))
    first, second, _ = summary["models"]
    assert first["name"] == HOSTILE
    assert first["link_test"]["gain"] == pytest.approx(np.mean(first["link_test"]["gain_by_batch"]))
    assert second["verdict"]["kind"] == "separated"
    assert second["link_test"]["lam"] is None
    values = [model["tail"]["xi"] for model in summary["models"]]
    mean = summary["mean_over_seeds"]["xi"]
    assert mean["mean"] == pytest.approx(np.mean(values))
    assert mean["interval"] == pytest.approx(stats.t.interval(0.95, 2, np.mean(values), stats.sem(values)))
    assert (mean["n"], mean["omitted"]) == (3, [])
    lam = summary["mean_over_seeds"]["lam"]
    assert (lam["n"], lam["omitted"]) == (2, ["same"])
    assert 0.0 <= lam["interval"][0] <= lam["interval"][1] <= 1.0
    assert "Not in every mean, for want of a finite fit: same." in text
    (forest,) = report.glob("figures/*forest-lam.svg")
    assert "mean of 2 seeds" in forest.read_text(encoding="utf-8")
    rows = (report / "tables" / "link.csv").read_text(encoding="utf-8").splitlines()
    assert rows[1].startswith("held-out gain (nats per anchor),")
    assert float(rows[1].split(",")[1]) == first["link_test"]["gain"]
    # Each ablation has a control drawn from one blend, unless no blend could be fitted.
    for name in ("hard_negatives", "pool"):
        sizes = [[(p["kept"], p["pool"]) for p in first["paper"][key]] for key in (name, f"{name}_drawn")]
        assert sizes[0] == sizes[1]
        assert second["paper"][f"{name}_drawn"] == []
    table = (report / "tables" / "pool-1.csv").read_text(encoding="utf-8").splitlines()
    assert float(table[1].split(",")[-1]) == first["paper"]["pool_drawn"][0]["gain"]["gain"]


def test_a_separated_model_has_no_table_of_dashes(report):
    """The CSV files leave out its column too, and a note says so."""
    assert {path.stem for path in report.glob("tables/pool-*.csv")} == {"pool-1", "pool-3"}
    for name in ("link", "rivals", "frechet"):
        header = (report / "tables" / f"{name}.csv").read_text(encoding="utf-8").splitlines()[0]
        assert "same" not in header
        assert header.count(",") == 2
    page = (report / "index.html").read_text(encoding="utf-8")
    assert (
        page.count("Not in the table, for want of a finite fit (every positive that was fitted wins): same.")
        == 5
    )
    assert "same" in (report / "tables" / "pot.csv").read_text(encoding="utf-8").splitlines()[0]


def test_one_separated_model_has_a_page_without_those_tables(tmp_path):
    z_i, _ = views(pairs=200)
    index = write_diagnosis([make_pairs("same", z_i, z_i + 1e-7)], tmp_path / "out", FAST, progress=False)
    written = {path.stem for path in index.parent.glob("tables/*.csv")}
    assert written == {"tail", "duplicates", "false-negatives"}
    page = index.read_text(encoding="utf-8")
    assert "No answer: every positive that was fitted wins." in page
    assert page.count("—</td>") <= 2


def test_the_rivals_stand_in_the_page_and_beside_it(report):
    summary = json.loads((report / "summary.json").read_text(encoding="utf-8"))
    first, second, _ = summary["models"]
    assert second["rivals"] is None
    rows = (report / "tables" / "rivals.csv").read_text(encoding="utf-8").splitlines()
    assert rows[1].startswith("another link (the blend),")
    assert float(rows[1].split(",")[1]) == first["rivals"]["blend"]["gain"] == first["link_test"]["gain"]
    assert len(list(report.glob("figures/*link-rivals-*.svg"))) == 2
    page = (report / "index.html").read_text(encoding="utf-8")
    assert "What explains it" in page
    assert "Different difficulty" in page  # in the glossary


def test_the_page_says_the_same_of_a_crowd_everywhere(tmp_path):
    models = [make_pairs("crowd", *crowd(0.2, pairs=160)), small("fine", pairs=160)]
    index = write_diagnosis(models, tmp_path / "out", FAST, progress=False)
    page = index.read_text(encoding="utf-8")
    summary = json.loads((index.parent / "summary.json").read_text(encoding="utf-8"))
    crowded, fine = (model["verdict"] for model in summary["models"])
    assert crowded["kind"] == "crowded"
    assert fine["kind"] != "crowded"
    assert fine["crowded"] <= summary["thresholds"]["crowded"] < crowded["crowded"]
    assert '<article class="verdict crowded">' in page
    assert ".verdict.crowded" in page  # it has a style
    rows = (index.parent / "tables" / "tail.csv").read_text(encoding="utf-8").splitlines()
    (row,) = [row.split(",") for row in rows if row.startswith("crowded")]
    assert [float(cell) for cell in row[1:]] == [crowded["crowded"], fine["crowded"]]
    shown = f"{100 * crowded['crowded']:.1f} %"
    assert f"<h3>Look at the embeddings first: {shown} of them all but coincide" in page
    assert f">{shown}</td>" in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.001, "0.001"), (1e-5, "1e-5"), (0.5, "0.5"), (4000, "4,000"), (4e6, "4e6"), (10, "10")],
)
def test_tick_labels(value, shown):
    assert plain(value).replace("\N{MINUS SIGN}", "-") == shown


def test_no_cell_of_a_csv_is_a_formula(tmp_path):
    """The names of models come from files of others. Numbers stay numbers."""
    by_model("t", "T", ["=1+1", "-x"], [("@label", [num(-0.5), between((-1.0, 2.0))])]).write_csv(tmp_path)
    assert (tmp_path / "t.csv").read_text().splitlines() == [",'=1+1,'-x", "'@label,-0.5,-1.0..2.0"]
