"""Checks that every page must pass in a real browser."""

from contextlib import contextmanager
from itertools import combinations

OVERLAPS = """() => [...document.querySelectorAll('figure')].map(figure => ({
    caption: figure.querySelector('figcaption').textContent,
    frame: figure.querySelector('svg').getBoundingClientRect().toJSON(),
    texts: [...figure.querySelectorAll('svg text')].map(t => {
        const b = t.getBoundingClientRect();
        return [t.textContent.trim(), b.left, b.top, b.right, b.bottom];
    })}))"""


@contextmanager
def sound_page(browser, folder, width, scheme):
    """Open the page of a folder: it loads nothing else, reports no error, and nothing overlaps or is too wide."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    trouble, requests = [], []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("dialog", lambda dialog: trouble.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    address = (folder / "index.html").as_uri()
    page.goto(address)
    assert trouble == []
    assert requests == [address]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("img, script").count() == 0

    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    figures = page.locator("figure")
    assert figures.count() == len(list((folder / "figures").glob("*.svg"))) > 0
    for box in figures.locator("svg").evaluate_all("all => all.map(s => s.getBoundingClientRect().toJSON())"):
        assert box["width"] > 280
        assert box["height"] > 100
        assert box["left"] >= 0
        assert box["right"] <= width
    assert all(figures.nth(i).is_visible() for i in range(0, figures.count(), 7))
    captions = page.locator("caption:visible")
    assert captions.evaluate_all(f"all => all.every(c => c.getBoundingClientRect().right <= {width})")
    for figure in page.evaluate(OVERLAPS):
        assert len(figure["texts"]) >= 5  # two ticks per axis and a label
        assert list(overlapping(figure["texts"])) == [], figure["caption"]
        left, right = figure["frame"]["left"] - 1, figure["frame"]["right"] + 1
        cut = [text for text, *box in figure["texts"] if box[0] < left or box[2] > right]
        assert cut == [], figure["caption"]

    ink, paper = (
        page.evaluate(f"getComputedStyle(document.body).{key}") for key in ("color", "backgroundColor")
    )
    assert contrast(ink, paper) > 10
    drawn = page.locator("figure svg text").first.evaluate("t => getComputedStyle(t).fill")
    assert contrast(drawn, paper) > 10
    yield page
    context.close()


def overlapping(texts):
    """Pairs of labels whose boxes overlap by more than a sliver."""
    for (a, *one), (b, *two) in combinations(texts, 2):
        wide = min(one[2], two[2]) - max(one[0], two[0])
        high = min(one[3], two[3]) - max(one[1], two[1])
        if a and b and wide > 1.5 and high > 0.35 * min(one[3] - one[1], two[3] - two[1]):
            yield a, b


def contrast(one, other):
    """Contrast ratio of two CSS colours as defined by the WCAG."""

    def luminance(colour):
        rgb = [int(v) / 255 for v in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)
