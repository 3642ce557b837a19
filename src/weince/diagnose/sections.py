# ruff: noqa: RUF001  (Greek letters and minus signs are meant)
"""The sections of the page: for each diagnostic its figures, how to read them, and the numbers.

xi < 0 always means a bounded tail.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from weince.diagnose import figures_link
from weince.diagnose.cells import (
    Cell,
    NumberTable,
    between,
    by_model,
    count,
    num,
    p_value,
    percent,
    tau,
    taus,
    text,
)
from weince.diagnose.diagnosis_settings import DiagnosisSettings
from weince.diagnose.measure import Measured
from weince.diagnose.overlaps import MARGINS, SHOWN
from weince.diagnose.rules import NEAR
from weince.diagnose.style import Figure, Gallery
from weince.diagnose.wording import crowded_side
from weince.evt import Gain, LinkRivals, VaryingLink
from weince.evt.link_varying import MOST_SPREAD
from weince.scores import CROWD

NO_FIT = "No finite fit exists for this model (see its verdict), so there is nothing to draw."


@dataclass(frozen=True)
class Group:
    """Figures under one heading, mostly those of one model; `name` is empty if they need no heading."""

    name: str
    figures: tuple[Figure, ...]
    empty: str = ""


@dataclass(frozen=True)
class Section:
    """A diagnostic: title, how to read it, figures by model, tables, and notes on the result."""

    slug: str
    title: str
    read: str
    groups: tuple[Group, ...]
    tables: tuple[NumberTable, ...]
    notes: tuple[str, ...] = ()

    @property
    def single(self) -> bool:
        """Whether every model has one figure: then the page shows them side by side."""
        return all(len(group.figures) == 1 for group in self.groups)


Draw = Callable[[str, Measured], list[Figure]]
Row = tuple[str, Callable[[Measured], Cell]]
Lines = Sequence[tuple[Cell, ...]]


class SectionWriter:
    """Writes sections for a list of models; figures are drawn for `shown` of them, tables for all."""

    def __init__(
        self, gallery: Gallery, models: Sequence[Measured], shown: Sequence[Measured], seed: int = 0
    ) -> None:
        self.gallery, self.models, self.shown, self.seed = gallery, models, shown, seed

    def groups(self, draw: Draw) -> tuple[Group, ...]:
        """Figures of every shown model."""
        out = []
        for m in self.shown:
            found = tuple(draw(f"{self.models.index(m) + 1}", m))
            name = m.name if len(self.models) > 1 else ""
            out.append(Group(name, found, "" if found else NO_FIT))
        return tuple(out)

    def table(self, slug: str, title: str, rows: Sequence[Row]) -> NumberTable:
        """Quantities by model."""
        return _table(slug, title, rows, self.models)

    def by_each(
        self, slug: str, title: str, header: tuple[str, ...], lines: Callable[[Measured], Lines]
    ) -> tuple[NumberTable, ...]:
        """A table of each model that has lines for it."""
        several = len(self.models) > 1
        return tuple(
            NumberTable(
                f"{slug}-{index}", f"{title}, {m.name}" if several else title, header, tuple(lines(m))
            )
            for index, m in enumerate(self.models, 1)
            if lines(m)
        )

    def fitted_table(self, slug: str, title: str, rows: Sequence[Row]) -> tuple[NumberTable, ...]:
        """Quantities of the models that have a finite fit; no table when none has."""
        fitted = [m for m in self.models if not m.link.separated]
        return (_table(slug, title, rows, fitted),) if fitted else ()

    def without_fit(self) -> tuple[str, ...]:
        """A note on the models that `fitted_table` leaves out."""
        names = [m.name for m in self.models if m.link.separated]
        if not names or len(self.models) == 1:
            return ()
        return (
            f"Not in the table, for want of a finite fit (every positive that was fitted wins): {', '.join(names)}.",
        )

    def link(self, settings: DiagnosisSettings) -> Section:
        nan = float("nan")
        rows: list[Row] = [
            ("held-out gain (nats per anchor)", lambda m: num(m.link.gain, 4)),
            ("95 %, resampled batches", lambda m: between(m.link.gain_interval, 4)),
            ("times as likely, exp(gain)", lambda m: num(m.link.gain_ratio)),
            ("p-value, likelihood ratio", lambda m: p_value(m.link.lr_p_value)),
            ("p-value, t over batches", lambda m: p_value(m.link.t_p_value)),
            ("λ", lambda m: num(m.link.lam)),
            ("95 %", lambda m: between(m.link.lam_interval)),
            ("τ of the blend", lambda m: tau(m.link.tau)),
            ("95 %", lambda m: taus(m.link.tau_interval)),
            ("τ₀ of softmax", lambda m: tau(m.link.tau0)),
            ("95 %", lambda m: taus(m.link.tau0_interval)),
            ("temperatures good enough", _good_temperatures),
            ("softmax over a random pick (nats)", lambda m: num(nan if m.curves is None else m.curves.over_chance)),
            ("anchors whose positive is on top", lambda m: percent(m.link.top1)),
            ("batches to fit / to judge", lambda m: text(f"{len(m.link.held_in)} / {len(m.link.held_out)}")),
        ]  # fmt: skip
        read = (
            "The first figure shows what softmax loses at other temperatures, the second what another link (the "
            "blend) gains over softmax on held-out batches. Compare the loss at your temperature with that gain: the "
            "higher one matters more. The other rows show what else may explain a gain: τ varies because some pairs, "
            "or some anchors, are harder than others. If that gains as much as another link, the gain is no evidence "
            "of a cap."
        )
        draw = self.groups(
            lambda tag, m: figures_link.link_figures(self.gallery, tag, m, settings.temperature)
        )
        tables = self.fitted_table("link", "Softmax against the blend", rows)
        return Section("link", "Link test", read, draw, (*tables, *self.rivals()), notes=self.without_fit())

    def rivals(self) -> tuple[NumberTable, ...]:
        found = [(m, m.rivals) for m in self.models if m.rivals is not None]
        gains: list[tuple[str, Callable[[LinkRivals], Gain]]] = [
            ("another link (the blend)", lambda r: r.blend),
            ("τ varies from anchor to anchor", lambda r: r.anchors.gain),
            ("τ varies from pair to pair", lambda r: r.pairs.gain),
            ("another link, and τ by anchor", lambda r: r.both.gain),
            ("the link over τ by pair", lambda r: r.blend_over_pairs),
            ("the link on top of τ by anchor", lambda r: r.both_over_anchors),
            ("τ by anchor on top of the link", lambda r: r.both_over_blend),
        ]
        rows: list[tuple[str, list[Cell]]] = []
        for label, gain in gains:
            rows.append((label, [num(gain(r).gain, 4) for _, r in found]))
            rows.append(("95 %", [between(gain(r).interval, 4) for _, r in found]))
        for label, link in (("pair", "pairs"), ("anchor", "anchors")):
            rows.append((f"sd of log τ by {label}", [num(getattr(r, link).sd) for _, r in found]))
            rows.append(("95 %", [_of_sd(getattr(r, link)) for _, r in found]))
        names = [m.name for m, _ in found]
        return (by_model("rivals", "What explains it: gains, nats per anchor", names, rows),) if found else ()

    def sizes(self, settings: DiagnosisSettings) -> Section:
        read = (
            "Softmax is fitted to batches of growing size, up to all pairs at once. Where the band is level, the "
            "temperature does not depend on the batch size. Sizes with too few beaten positives are left out."
        )
        header = ("batch size", "τ₀", "95 %", "positives", "beaten")

        def lines(m: Measured) -> Lines:
            fits = [f for f in m.sizes if f.beaten]
            return [
                (count(f.batch_size), tau(f.temperature), taus(f.interval), count(f.anchors), count(f.beaten))
                for f in fits
            ]

        tables = self.by_each("batch-sizes", "Temperature by batch size", header, lines)
        draw = self.groups(lambda tag, m: figures_link.size_figures(self.gallery, tag, m, settings))
        return Section("batch-sizes", "Temperature over the batch size", read, draw, tables)

    def false_negatives(self) -> Section:
        grouped = any(m.overlaps.grouped is not None for m in self.models)
        nan = float("nan")
        rows: list[Row] = [
            ("queries scored against the whole file", lambda m: count(m.overlaps.looked)),
            ("queries with a negative at or above the positive", lambda m: count(m.overlaps.beaten)),
            ("such negatives", lambda m: count(m.overlaps.above)),
            ("of these, twins of the positive: equal ids remove them", lambda m: count(m.overlaps.twins)),
        ]
        if grouped:
            own = "of these, in the group of the query: a mask of groups removes them"
            rows.append((own, lambda m: num(nan if m.overlaps.grouped is None else m.overlaps.grouped, 0)))
        for k, margin in enumerate(MARGINS):
            rows.append((f"ignore_above={margin:g} removes", partial(_ignored, k)))
        read = (
            "A negative that scores at or above the positive is a false negative, or the encoder is wrong. Read some "
            "of those in the table, which are the queries that lose most. Equal ids remove copies of the positive; "
            "ignore_above removes all negatives that far above it, and with them those from which the encoder should "
            "learn."
        )
        header = ("query", "its document", "wins instead", "its score", "score of what wins")

        def lines(m: Measured) -> Lines:
            shown = partial(_shown, m)
            return [
                (shown(0, r.query), shown(1, r.query), shown(1, r.document), num(r.positive), num(r.score))
                for r in m.overlaps.rivals
            ]

        tables = (
            self.table("false-negatives", "Negatives at or above the positive", rows),
            *self.by_each("false-negatives", "Queries that lose most", header, lines),
        )
        return Section("false-negatives", "False negatives", read, (), tables)

    def duplicates(self) -> Section:
        rows: list[Row] = []
        for k, side in enumerate(("queries", "documents")):
            rows += [
                (f"{side} in several pairs", partial(_of_side, k, "repeated", count)),
                (f"{side} with an exact twin of another id", partial(_of_side, k, "exact", count)),
                (f"{side} with a twin within a shortfall of {NEAR:g}", partial(_of_side, k, "near", percent)),
                (f"median cosine to the nearest of the {side}", partial(_of_side, k, "nearest", num)),
                (f"mean cosine of two {side}", partial(_of_side, k, "mean_cosine", num)),
            ]
        rows.append(("documents that win for many queries (hubs)", lambda m: count(len(m.overlaps.hubs))))
        read = (
            "Twins of another id are false negatives of each other; those that share an id are told apart already. "
            "A hub is a document that wins for more queries that are not its own than chance explains: look whether "
            "it is empty, very general, or a template. With two views of one kind, the first views are the queries. "
        )

        def lines(m: Measured) -> Lines:
            return [(_shown(m, 1, h.document), count(h.wins)) for h in m.overlaps.hubs[:SHOWN]]

        tables = (
            self.table("duplicates", "Rows of the whole file", rows),
            *self.by_each("hubs", "Hubs", ("document", "wins for"), lines),
        )
        notes = tuple(
            f"{m.name}: {crowded_side(m)}" if len(self.models) > 1 else crowded_side(m) for m in self.models
        )
        return Section("duplicates", "Duplicates, hubs and the crowded side", read, (), tables, notes)

    def tail(self) -> Section:
        rows: list[Row] = [
            ("negative pairs, each once", lambda m: count(m.tail.n_scores)),
            ("threshold u (cosine)", lambda m: num(m.tail.xi.fit.threshold)),
            ("exceedances", lambda m: count(m.tail.xi.fit.n)),
            ("ξ (below 0: bounded)", lambda m: num(m.tail.xi.fit.xi)),
            ("95 % over batches", lambda m: between(m.tail.xi.xi_interval)),
            ("95 % if scores were independent", lambda m: between(m.tail.xi.fit.xi_interval)),
            ("design effect of batches", lambda m: num(m.tail.xi.design_effect, 1)),
            ("scale σ (cosine)", lambda m: num(m.tail.xi.fit.sigma, 4)),
            ("endpoint u − σ/ξ (cosine)", _endpoint),
            ("95 % over batches", lambda m: _up_to_the_cap(m.tail.xi.endpoint_interval)),
            ("mean cosine of negatives", lambda m: num(m.mean_cosine)),
            (f"crowded: another item within a shortfall of {CROWD:g}", lambda m: percent(m.crowded)),
            ("the same if embeddings were spread evenly", lambda m: percent(m.crowded_by_chance)),
        ]
        read = (
            "A generalised Pareto law is fitted to the cosines of the hardest negatives, those above the threshold. "
            "If the whole interval of ξ lies below 0, the tail is bounded: it ends at the endpoint. "
            "“weince diagnose --paper” draws the fit and its checks."
        )
        return Section("tail", "The tail of the negatives", read, (), (self.table("tail", "The tail", rows),))


def _ignored(k: int, m: Measured) -> Cell:
    return count(m.overlaps.ignored[k])


def _of_side(k: int, field: str, cell: Callable[[Any], Cell], m: Measured) -> Cell:
    return cell(getattr((m.overlaps.queries, m.overlaps.documents)[k], field))


def _shown(m: Measured, side: int, row: int) -> Cell:
    """A row of the queries (side 0) or documents (1): the beginning of its text, or its number."""
    if m.texts is None:
        return text(f"row {row}")
    words = " ".join(m.texts[side][row].split())
    return text(words if len(words) <= 80 else f"{words[:79]}…")


def _table(slug: str, title: str, rows: Sequence[Row], models: Sequence[Measured]) -> NumberTable:
    cells = [(label, [cell(m) for m in models]) for label, cell in rows]
    return by_model(slug, title, [m.name for m in models], cells)


def _endpoint(m: Measured) -> Cell:
    """Where the tail ends; an endpoint beyond the cap is shown as none."""
    end = m.tail.xi.fit.endpoint
    return num(end) if end <= 1.0 else Cell("none below the cap", end)


def _up_to_the_cap(interval: tuple[float, float]) -> Cell:
    low, high = interval
    if low > 1.0:
        return Cell("beyond the cap", interval)
    return between(interval) if high <= 1.0 else Cell(f"[{num(low).text}, the cap]", interval)


def _of_sd(link: VaryingLink) -> Cell:
    words = {0.0: "does not vary", MOST_SPREAD: "the largest that is fitted"}
    return text(words[link.sd]) if link.sd in words else between(link.sd_interval)


def _good_temperatures(m: Measured) -> Cell:
    return taus((float("nan"), float("nan")) if m.curves is None else m.curves.tau_range)


def write_sections(writer: SectionWriter, settings: DiagnosisSettings) -> list[Section]:
    """The sections of the verdict in order; the page shows the first one open."""
    return [
        writer.link(settings),
        writer.sizes(settings),
        writer.false_negatives(),
        writer.duplicates(),
        writer.tail(),
    ]
