"""The page of a table in a browser: its first sentences, and tables wider than the window."""

import json

import pytest
from lab.study.made import reproduce
from lab.study.test_figures import filled

from weince.lab.study.blocks import numbers
from weince.lab.study.table_page import narrow


@pytest.fixture(scope="module")
def page_of_trial(tmp_path_factory):
    """A trial of two losses, one with a long name, with two temperatures each."""
    folder = tmp_path_factory.mktemp("page")
    long = "a loss whose name, with all that was changed in it, is as long as the names of our own tables are"
    losses = {"InfoNCE": {"set": {"loss.preset": "infonce"}}, long: {"set": {"loss.preset": "paper"}}}
    tries = [{"loss.temperature": 0.5}, {"loss.temperature": 0.2}]
    shows = "This table shows whether names may be long."
    filled(folder, losses=losses, tries=tries, choose_by="linear", set={"epochs": 3}, shows=shows)
    return reproduce(str(folder / "small.yaml"), out=folder, epochs=3, table_only=True)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_of_a_table(page_of_trial, browser, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(page_of_trial.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    opening, warning = (page.locator("header p").nth(place) for place in (0, 1))
    assert opening.inner_text() == "This table shows whether names may be long."
    assert (
        warning.inner_text() == "A trial of 3 epochs instead of the configured number: no figure to report."
    )
    assert warning.bounding_box()["y"] < page.locator("table").first.bounding_box()["y"]
    assert page.locator("#tries table").count() == 2
    assert "stands beside" not in page.locator("#tries").inner_text()  # it reports nothing here
    wide = page.locator(".numbers").first
    assert wide.get_attribute("tabindex") == "0"
    scrolls = wide.evaluate("t => t.scrollWidth > t.clientWidth")
    assert scrolls is (width == 390)
    hint = wide.locator("caption").evaluate("c => getComputedStyle(c, '::after').content")
    assert ("scroll sideways for more" in hint) is scrolls
    # A shadow at the edge shows while there is more to scroll to: the last of the four backgrounds.
    assert wide.evaluate("t => getComputedStyle(t).backgroundAttachment") == "local, local, scroll, scroll"
    if scrolls:
        edge = wide.bounding_box()
        before = page.screenshot(
            clip={"x": edge["x"] + edge["width"] - 12, "y": edge["y"], "width": 12, "height": 9}
        )
        wide.evaluate("t => t.scrollLeft = t.scrollWidth")
        after = page.screenshot(
            clip={"x": edge["x"] + edge["width"] - 12, "y": edge["y"], "width": 12, "height": 9}
        )
        assert before != after
    context.close()


def test_the_page_leaves_out_columns_that_say_the_same_of_every_line():
    header = "row", "loss", "settings", "measured"
    lines = ("a", "x", "as configured", "1"), ("a", "y", "as configured", "2")

    def shown(*rows):
        table = narrow(numbers("Vote", "Vote", header, rows, {"measured"}))
        return table.name, tuple(table.header), tuple(tuple(cell.text for cell in row) for row in table.rows)

    assert shown(*lines) == ("Vote, a", ("loss", "measured"), (("x", "1"), ("y", "2")))
    tuned = (*lines, ("b", "x", "temperature 0.2", "3"))
    assert shown(*tuned) == ("Vote", header, tuned)
    assert shown(lines[0], ("a", "x", "temperature 0.2", "3"))[1] == ("loss", "settings", "measured")


def test_a_table_without_a_sentence_of_its_own_has_one(tmp_path):
    filled(tmp_path)
    folder = reproduce(str(tmp_path / "small.yaml"), out=tmp_path, table_only=True).parent
    text = (folder / "table.md").read_text().splitlines()
    assert text[2] == "This table compares 2 losses on digits\\_small with InfoNCE, seed by seed."
    assert "trial" not in "\n".join(text)


@pytest.mark.parametrize(("seeds", "tested"), [([7, 21], True), ([7], False)])
def test_a_p_value_takes_two_seeds(tmp_path, seeds, tested):
    *_, last = filled(tmp_path, seeds=seeds)[1]
    found = json.loads(last.result.read_text())
    last.result.write_text(json.dumps(found | {"linear_test_mean": 57.0}))  # makes the differences unequal
    folder = reproduce(str(tmp_path / "small.yaml"), out=tmp_path, table_only=True).parent
    for name in ("table.md", "index.html"):
        text = (folder / name).read_text()
        assert ("p is not corrected" in text) is tested
        assert ("they allow no test" in text) is not tested
        assert "1.000" not in text
