"""The page: one self-contained HTML file without scripts or external resources."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup, escape

from weince.diagnose.decision import Diagnosis
from weince.diagnose.diagnosis_settings import DiagnosisSettings
from weince.diagnose.html import templates
from weince.diagnose.measure import Measured
from weince.diagnose.rules import THRESHOLDS
from weince.diagnose.sections import Group, Section


@dataclass(frozen=True)
class ReportPage:
    """Content of the page."""

    title: str  # title of the page
    command: str  # how to make it again, in one line
    models: Sequence[tuple[Measured, Diagnosis]]  # what was measured, with a verdict for each
    # why other models were not diagnosed, a sentence each, which begins with the model's name
    left_out: Sequence[str]
    compared: (
        Group | None
    )  # figures of the models side by side, or of the run over time; None if there is one model
    trend: bool  # whether the models are checkpoints of one run
    average: bool  # whether they are one recipe with several seeds
    sections: Sequence[Section]  # the diagnostics
    settings: DiagnosisSettings  # how much was computed
    version: str  # version of this package

    @property
    def omitted(self) -> list[str]:
        """Names of the models without a finite fit, which do not enter every mean."""
        return [m.name for m, _ in self.models if not np.isfinite(m.link.tau0)]


TERMS = {
    "nat": r"nats?\b",
    "held-out": r"[Hh]eld[- ]out",
    "link": r"(?:blended |another )?link",
    "anchor": r"anchors?\b|positives?\b",
    "beaten": r"beaten",
    "difficulty": r"different difficulty",
    "temperature": r"temperature\b|τ₀|τ",
    "lam": r"λ",
    "xi": r"ξ",
    "shortfall": r"shortfall",
    "endpoint": r"endpoint|fitted law|geometric cap|the cap\b",
}
"""The pattern that finds each entry of the glossary in a sentence."""

_TERM = re.compile("|".join(f"(?P<{key.replace('-', '_')}>{pattern})" for key, pattern in TERMS.items()))


def linked(text: str) -> Markup:
    """Escape a sentence, and link the first mention of each glossary term to its entry."""
    seen: set[str] = set()

    def link(found: re.Match[str]) -> str:
        key = str(found.lastgroup).replace("_", "-")
        if key in seen:
            return found[0]
        seen.add(key)
        return f'<a class="term" href="#term-{key}">{found[0]}</a>'

    return Markup(_TERM.sub(link, str(escape(text))))


def render(page: ReportPage) -> str:
    """The HTML of a page. Everything except the figures is escaped."""
    environment = templates("weince.diagnose")
    environment.filters["linked"] = linked
    return environment.get_template("page.html").render(page=page, rules=THRESHOLDS)


def write_page(page: ReportPage, path: Path) -> None:
    """Render a page into a file."""
    path.write_text(render(page), encoding="utf-8")
