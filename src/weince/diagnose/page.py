"""The page: one self-contained HTML file, no script, nothing loaded from anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from weince.diagnose.html import style_sheet, templates
from weince.diagnose.measure import Measured
from weince.diagnose.sections import Group, Section
from weince.diagnose.settings import Settings
from weince.diagnose.style import Figure
from weince.diagnose.verdict import Thresholds, Verdict


@dataclass(frozen=True)
class Page:
    """All that the template shows.

    Attributes:
        title: Of the page.
        command: How to make it again, in one line.
        models: What was measured, with a verdict for each.
        compared: Figures of the models side by side, or of the run over time; may be empty.
        trend: Whether the models are checkpoints of one run.
        average: Whether they are one recipe with several seeds.
        sections: The diagnostics.
        settings: How much was computed.
        rules: When a verdict is given.
        version: Of this package.
    """

    title: str
    command: str
    models: Sequence[tuple[Measured, Verdict]]
    compared: Group | None
    trend: bool
    average: bool
    sections: Sequence[Section]
    settings: Settings
    rules: Thresholds
    version: str


def _inline(figure: Figure) -> Markup:
    """The drawing as it is: matplotlib has escaped the text in it."""
    return Markup(figure.svg)


def render(page: Page) -> str:
    """The HTML of a page. Everything but the drawings is escaped."""
    environment = templates("weince.diagnose")
    environment.filters["inline"] = _inline
    return environment.get_template("page.html").render(page=page, style=style_sheet())


def write_page(page: Page, path: Path) -> None:
    """Render a page into a file."""
    path.write_text(render(page), encoding="utf-8")
