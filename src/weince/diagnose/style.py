"""Style of the figures: one small panel each, colours safe for the colour-blind, readable in light and dark.

A panel is drawn once and saved twice: as a plain ``.svg`` file for papers and slides, and as an SVG for the page. The
colours of the latter are CSS variables, so that it follows the reader's light or dark theme.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

INK, GRID = "#43474b", "#d5d8dc"
# Okabe and Ito's palette, in the order of use.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
_VARIABLES = {
    INK: "currentColor",
    GRID: "var(--grid)",
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    GREEN: "var(--green)",
    RED: "var(--red)",
    PURPLE: "var(--purple)",
    SKY: "var(--sky)",
}
LOOK: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "text.parse_math": False,  # a model's name may contain dollar signs
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Figure:
    """A finished panel: name of its files, caption, and the SVG to put into a page."""

    slug: str
    caption: str
    svg: str


class Gallery:
    """Draws panels and saves them in a folder."""

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda slug: None) -> None:
        self.folder, self.tell = folder, tell
        folder.mkdir(parents=True, exist_ok=True)
        self._count = 0

    @contextmanager
    def panel(self, slug: str, caption: str, *, height: float = 3.0) -> Iterator["Panel"]:
        """Draw on ``panel.ax`` inside the context; after it, ``panel.done`` is the finished figure."""
        with mpl.rc_context({**LOOK, "svg.hashsalt": slug}):
            canvas = Canvas(figsize=(4.4, height), layout="constrained")
            panel = Panel(canvas.add_subplot())
            yield panel
            panel.done = self._save(canvas, slug, caption)

    def _save(self, canvas: Canvas, slug: str, caption: str) -> Figure:
        self._count += 1
        self.tell(slug)
        name = f"{self._count:02d}-{slug}"
        with warnings.catch_warnings():
            # matplotlib's font may lack the script of a name; browsers then use another font.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            svg = as_svg(canvas)
        (self.folder / f"{name}.svg").write_text(svg, encoding="utf-8")
        return Figure(name, caption, for_page(svg, name))


class Panel:
    """The axes of a panel, and the figure once it is saved."""

    done: Figure

    def __init__(self, ax: Axes) -> None:
        self.ax = ax


def as_svg(canvas: Canvas) -> str:
    """Draw a canvas that has a layout; savefig would draw it twice, the first time only for the layout."""
    FigureCanvasSVG(canvas)  # text is measured as in the SVG
    layout = canvas.get_layout_engine()
    assert layout is not None
    layout.execute(canvas)
    canvas.set_layout_engine(None)
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def for_page(svg: str, prefix: str) -> str:
    """Prepare an SVG to be part of an HTML page: no prologue, unique ids, theme colours, the page's font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", svg, count=1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r"'DejaVu Sans'(, sans-serif)?", "var(--sans)", svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)


def shorten(text: str, most: int = 22, *, among: Iterable[str] = ()) -> str:
    """Shorten a name so that it fits beside an axis, but not so far that it equals another of the names given.

    Names often differ only at their end, so characters in the middle are left out.
    """
    others = {other for other in among if other != text}
    while _cut(text, most) in {_cut(other, most) for other in others}:
        most += 1
    return _cut(text, most)


def _cut(text: str, most: int) -> str:
    tail = most // 3 + 1
    return text if len(text) <= most else f"{text[: most - tail - 1]}…{text[-tail:]}"


def legend(ax: Axes, columns: int = 2) -> None:
    """Draw a legend above the axes, where it hides nothing."""
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        borderaxespad=0.3,
        borderpad=0.0,
        handlelength=1.6,
        columnspacing=1.2,
    )


def log_axis(ax: Axes, which: Literal["x", "y"], ticks: Sequence[float]) -> None:
    """Make an axis logarithmic, with plain numbers as labels of these ticks."""
    ax.set(**{f"{which}scale": "log"})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def plain(value: float) -> str:
    """A tick label: 0.001, 0.5, 10, 4,000, 1e6."""
    if value >= 1e6 or 0.0 < value < 1e-4:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "\N{MINUS SIGN}")
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"
