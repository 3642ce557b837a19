# ruff: noqa: RUF001  (Greek letters and minus signs are meant)
"""The sections of the page: for each diagnostic its figures, how to read them, and the numbers.

xi < 0 always means a bounded tail.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from weince.diagnose import figures_link, figures_tail
from weince.diagnose.measure import Measured
from weince.diagnose.settings import Settings
from weince.diagnose.style import Figure, Gallery
from weince.diagnose.tables import (
    Cell,
    Table,
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
from weince.evt import AblationPoint, DaicArtefact, Gain, LinkRivals, VaryingLink
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
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()

    @property
    def single(self) -> bool:
        """Whether every model has one figure: then the page shows them side by side."""
        return all(len(group.figures) == 1 for group in self.groups)


Draw = Callable[[str, Measured], list[Figure]]
Row = tuple[str, Callable[[Measured], Cell]]


class Writer:
    """Writes sections for a list of models; figures are drawn for `shown` of them, tables for all."""

    def __init__(self, gallery: Gallery, models: Sequence[Measured], shown: Sequence[Measured]) -> None:
        self.gallery, self.models, self.shown = gallery, models, shown

    def groups(self, draw: Draw) -> tuple[Group, ...]:
        """Figures of every shown model."""
        out = []
        for m in self.shown:
            found = tuple(draw(f"{self.models.index(m) + 1}", m))
            name = m.name if len(self.models) > 1 else ""
            out.append(Group(name, found, "" if found else NO_FIT))
        return tuple(out)

    def table(self, slug: str, title: str, rows: Sequence[Row]) -> Table:
        """Quantities by model."""
        return _table(slug, title, rows, self.models)

    def fitted_table(self, slug: str, title: str, rows: Sequence[Row]) -> tuple[Table, ...]:
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

    def pot(self) -> Section:
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
            ("likelihood ratio against the refitted exponential", lambda m: num(m.tail.exponential.lr, 1)),
            (
                "likelihood ratio against a GPD ending at 1",
                lambda m: text("duplicates at the cap") if m.tail.capped is None else num(m.tail.capped.lr, 1),
            ),
            ("ξ of the GPD ending at 1", lambda m: num(float("nan") if m.tail.capped is None else m.tail.capped.xi)),
            ("Kolmogorov-Smirnov p-value of the GPD", lambda m: p_value(m.tail.fit_test.ks_p_value)),
            ("Anderson-Darling p-value of the GPD", lambda m: p_value(m.tail.fit_test.ad_p_value)),
        ]  # fmt: skip
        read = (
            "In the first figure, the law whose line follows the shaded histogram describes the hardest negatives. "
            "In the second, a law fits if its points lie on the diagonal; points below it mean that the law predicts "
            "higher cosines than occur. The scores of one batch depend on each other, so the two tests of fit in the "
            "table reject too often: trust the figures."
        )
        draw = self.groups(lambda tag, m: figures_tail.pot_figures(self.gallery, tag, m.tail))
        return Section("pot", "Peaks over a threshold", read, draw, (self.table("pot", "The tail", rows),))

    def thresholds(self) -> Section:
        read = (
            "Where the generalised Pareto law holds, ξ and the modified scale stay level to the right of the "
            "threshold in use, within their bands. The mean excess is then a straight line, falling if the tail "
            "is bounded. (Bands treat the scores as independent.)"
        )
        rows: list[Row] = [
            ("ξ at the lowest threshold", lambda m: num(m.tail.stability.xi[0])),
            ("ξ at the highest threshold", lambda m: num(m.tail.stability.xi[-1])),
            ("smallest ξ over the thresholds", lambda m: num(m.tail.stability.xi.min())),
            ("largest ξ over the thresholds", lambda m: num(m.tail.stability.xi.max())),
            ("exceedances at the highest threshold", lambda m: count(int(m.tail.stability.n[-1]))),
        ]
        draw = self.groups(lambda tag, m: figures_tail.threshold_figures(self.gallery, tag, m.tail))
        table = self.table("thresholds", "Stability", rows)
        return Section("thresholds", "Choice of the threshold", read, draw, (table,))

    def link(self, settings: Settings) -> Section:
        nan = float("nan")
        rows: list[Row] = [
            ("held-out gain (nats per anchor)", lambda m: num(m.link.gain, 4)),
            ("95 %, resampled batches", lambda m: between(m.link.gain_interval, 4)),
            ("times as likely, exp(gain)", lambda m: num(m.link.gain_ratio)),
            ("p-value, likelihood ratio", lambda m: p_value(m.link.lr_p_value)),
            ("p-value, t over batches", lambda m: p_value(m.link.t_p_value)),
            ("gain by cross-validation", lambda m: num(m.link.cv_gain, 4)),
            ("its standard deviation over folds", lambda m: num(m.link.cv_gain_sd, 4)),
            ("λ", lambda m: num(m.link.lam)),
            ("95 %", lambda m: between(m.link.lam_interval)),
            ("τ of the blend", lambda m: tau(m.link.tau)),
            ("95 %", lambda m: taus(m.link.tau_interval)),
            ("τ₀ of softmax", lambda m: tau(m.link.tau0)),
            ("95 %", lambda m: taus(m.link.tau0_interval)),
            ("temperatures good enough", _good_temperatures),
            ("β of the pure shortfall link", lambda m: num(nan if m.curves is None else m.curves.beta, 2)),
            ("softmax over a random pick (nats)", lambda m: num(nan if m.curves is None else m.curves.over_chance)),
            ("anchors whose positive is on top", lambda m: percent(m.link.top1)),
            ("batches to fit / to judge", lambda m: text(f"{len(m.link.held_in)} / {len(m.link.held_out)}")),
        ]  # fmt: skip
        read = (
            "The first figure shows what a blend with weight λ gains over softmax on held-out batches. If the curve "
            "peaks well above 0 and away from λ = 0, another link fits better. The second figure shows what softmax "
            "loses at other temperatures. Compare the peak of the first with the loss at your temperature in the "
            "second: the higher one matters more. The last figure shows what else may explain a gain: τ varies "
            "because some pairs, or some anchors, are harder than others. If that gains as much as another link, the "
            "gain is no evidence of a cap."
        )
        draw = self.groups(
            lambda tag, m: figures_link.link_figures(self.gallery, tag, m, settings.temperature)
        )
        tables = self.fitted_table("link", "Softmax against the blend", rows)
        return Section("link", "Link test", read, draw, (*tables, *self.rivals()), notes=self.without_fit())

    def rivals(self) -> tuple[Table, ...]:
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

    def frechet(self) -> Section:
        rows: list[Row] = [
            *_gain_rows("shortfall over softmax", lambda m: m.frechet.w_over_0),
            *_gain_rows("heavy tail over softmax", lambda m: m.frechet.f_over_0),
            *_gain_rows("heavy tail on top of shortfall", lambda m: m.frechet.wf_over_w),
            ("λ of the shortfall, alone", lambda m: num(m.frechet.lam_w)),
            ("λ of the heavy tail, alone", lambda m: num(m.frechet.lam_f)),
            ("λ of the shortfall, joint fit", lambda m: num(m.frechet.lam_w_full)),
            ("λ of the heavy tail, joint fit", lambda m: num(m.frechet.lam_f_full)),
        ]
        read = (
            "A third coordinate, log((1 + s)/2), stands for a heavy (Frechet) tail, which a cosine cannot have. Its "
            "gains should be 0. If they are not, a more flexible link fits better whatever its shape, and a gain of "
            "the shortfall is no evidence of a cap."
        )
        draw = self.groups(lambda tag, m: figures_link.frechet_figures(self.gallery, tag, m.frechet))
        tables = self.fitted_table("frechet", "Gains of the blends", rows)
        return Section("frechet", "Heavy-tail ablation", read, draw, tables, notes=self.without_fit())

    def ablations(self) -> Section:
        def draw(tag: str, m: Measured) -> list[Figure]:
            kept = figures_link.ablation_figures(self.gallery, tag, m.hard, m.hard_drawn, "kept")
            return kept + figures_link.ablation_figures(self.gallery, tag, m.pool, m.pool_drawn, "pool")

        tables = []
        for index, m in enumerate(self.models, 1):
            if m.link.separated:
                continue
            who = f", {m.name}" if len(self.models) > 1 else ""
            kept = f"Hard negatives kept of {m.hard[0].pool}{who}"
            tables.append(_ablation_table(f"hard-negatives-{index}", kept, m.hard, m.hard_drawn, "kept"))
            pool = f"Pool from which {m.pool[0].kept} are kept{who}"
            tables.append(_ablation_table(f"pool-{index}", pool, m.pool, m.pool_drawn, "pool"))
        read = (
            "Here the link is fitted to the hardest negatives alone, then to a fixed number of the hardest from "
            "growing pools. Choosing negatives by score changes λ and the gain even if one blend holds for all "
            "candidates. The dashed line shows by how much: its positives are drawn from the fitted blend (“drawn” "
            "in the tables). The link changes towards the hardest negatives only where the bands of the two gains, "
            "95 % intervals over batches, do not overlap."
        )
        title, drawn = "Hard negatives and their pool", self.groups(draw)
        return Section("ablations", title, read, drawn, tuple(tables), notes=self.without_fit())

    def risk(self) -> Section:
        def draw(tag: str, m: Measured) -> list[Figure]:
            return [] if m.risk is None else figures_link.risk_figures(self.gallery, tag, m.risk)

        rows = []
        for m in self.models:
            for r in m.risk or ():
                shares = [
                    float(abs(r.risk - getattr(r, k)).sum()) / 2 for k in ("softmax", "shortfall", "blend")
                ]
                fails = percent(r.failure_rate, 2)
                rows.append((text(m.name), count(r.k), fails, *(percent(x) for x in shares)))
        table = Table(
            "risk",
            "How far each link's gradient is from the risk (share that would have to move)",
            ("model", "subset", "failures", "softmax", "shortfall", "blend"),
            tuple(rows),
        )
        read = (
            "A failure is a negative that beats the positive in a random subset of the candidates. The shaded steps "
            "show the cosines of these negatives. The lines show at which cosines each link, with its own fitted "
            "parameters, has its gradient. A link whose line follows the steps acts where the failures are."
        )
        tables = (table,) if rows else ()
        return Section(
            "risk", "Risk against gradient", read, self.groups(draw), tables, notes=self.without_fit()
        )

    def anchors(self, simulated: DaicArtefact) -> Section:
        rows: list[Row] = [
            ("exceedances per anchor", lambda m: count(int(m.comparison.n.max()))),
            ("anchors with ΔAIC > 0 (the paper's count)", lambda m: percent((m.anchors.daic > 0).mean())),
            ("anchors with a bounded tail, valid test at 5 %", lambda m: percent(m.comparison.share_bounded)),
            ("the same if every tail were exponential", lambda m: percent(m.comparison.alpha)),
            ("anchors with ξ < 0", lambda m: percent(m.comparison.share_negative)),
            ("the same if every tail were exponential", lambda m: percent(m.comparison.null_share_negative)),
            ("anchors with ξ < 0 and a better AIC", lambda m: percent(m.comparison.share_aic)),
            ("the same if every tail were exponential", lambda m: percent(m.comparison.null_share_aic)),
            ("median ρ", lambda m: num(float(np.median(m.anchors.rho)))),
            ("median β", lambda m: num(float(np.median(m.anchors.beta)), 2)),
            ("median ΔAIC", lambda m: num(float(np.median(m.anchors.daic)), 1)),
            ("mean λ of WEINCE", lambda m: num(m.anchors.lam.mean())),
            (f"crowded: another item within a shortfall of {CROWD:g}", lambda m: percent(m.crowded)),
            ("the same if embeddings were spread evenly", lambda m: percent(m.crowded_by_chance)),
        ]
        d = simulated
        artefact = Table(
            "daic-artefact",
            "Simulated tails: how often each rule says Weibull",
            ("true tail", "ΔAIC, F = k/(K+1)", "ΔAIC, F = k/(N+1)", "valid test at 5 %"),
            tuple(
                (text(tail), percent(a), percent(b), percent(c))
                for tail, a, b, c in zip(d.tails, d.share_tail, d.share_sample, d.share_bounded, strict=True)
            ),
        )
        read = (
            "WEINCE gates each anchor by ρ and by ΔAIC. But ΔAIC compares squared errors of two different responses. "
            "The simulation shows that it says Weibull even for exponential tails, and that its sign depends on the "
            "plotting position F. The valid test compares two likelihoods of the same exceedances: count an anchor "
            "as bounded only by this test, and compare its p-values with the dashed line."
        )
        draw = self.groups(lambda tag, m: figures_tail.anchor_figures(self.gallery, tag, m))
        shared = Group("Simulated tails of known kind", tuple(figures_tail.artefact_figures(self.gallery, d)))
        tables = (self.table("anchors", "Anchor by anchor", rows), artefact)
        return Section("anchors", "Anchor by anchor", read, (*draw, shared), tables)


def _table(slug: str, title: str, rows: Sequence[Row], models: Sequence[Measured]) -> Table:
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


def _gain_rows(label: str, gain: Callable[[Measured], Gain]) -> list[Row]:
    return [
        (f"{label} (nats per anchor)", lambda m: num(gain(m).gain, 4)),
        ("95 %", lambda m: between(gain(m).interval, 4)),
        ("p-value, t over batches", lambda m: p_value(gain(m).t_p_value)),
    ]


def _ablation_table(
    slug: str, title: str, points: Sequence[AblationPoint], drawn: Sequence[AblationPoint] | None, over: str
) -> Table:
    rows = tuple(
        (
            count(getattr(p, over)),
            num(p.lam),
            num(p.gain.gain, 4),
            between(p.gain.interval, 4),
            p_value(p.gain.t_p_value),
            *(() if drawn is None else (num(drawn[i].lam), num(drawn[i].gain.gain, 4))),
        )
        for i, p in enumerate(points)
    )
    control = () if drawn is None else ("λ, drawn", "gain, drawn")
    return Table(slug, title, (over, "λ", "gain, nats", "95 %", "p", *control), rows)


def write_sections(
    gallery: Gallery,
    models: Sequence[Measured],
    simulated: DaicArtefact,
    settings: Settings,
    *,
    shown: Sequence[Measured],
) -> list[Section]:
    """All sections in order: figures for the `shown` models, numbers for all. The page shows the first one open."""
    w = Writer(gallery, models, shown)
    return [
        w.link(settings),
        w.pot(),
        w.thresholds(),
        w.frechet(),
        w.ablations(),
        w.risk(),
        w.anchors(simulated),
    ]
