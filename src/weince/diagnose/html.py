"""What all pages share: templates that escape whatever they are given, and one style sheet, written into the page."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def templates(package: str) -> Environment:
    """The templates in the folder ``templates`` of a package; a name that a template does not get is an error."""
    return Environment(
        loader=PackageLoader(package, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def style_sheet() -> Markup:
    """The look of all pages, as it stands in them."""
    return Markup((Path(__file__).parent / "templates" / "style.css").read_text(encoding="utf-8"))
