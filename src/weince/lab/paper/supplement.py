# ruff: noqa: RUF001  (Greek letters and minus signs are meant)
"""What ``weince diagnose --paper`` adds: `PAPER`, with a section of the page for each of the paper's diagnostics.

xi < 0 always means a bounded tail.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from weince.diagnose.cells import NumberTable, between, count, num, p_value, percent, text
from weince.diagnose.figures_link import GAIN, Quantity
from weince.diagnose.measure import Measured
from weince.diagnose.report import Supplement
from weince.diagnose.sections import Group, Row, Section, SectionWriter
from weince.diagnose.style import Figure
from weince.evt import Gain
from weince.lab.paper import panels
from weince.lab.paper.ablations import AblationPoint
from weince.lab.paper.anchors import daic_artefact
from weince.lab.paper.measurements import STAGES, measure_paper


def _link(w: SectionWriter) -> Section:
    nan = float("nan")
    rows: list[Row] = [
        ("gain by cross-validation", lambda m: num(m.more.folds.gain, 4)),
        ("its standard deviation over folds", lambda m: num(m.more.folds.sd, 4)),
        (
            "β of the pure shortfall link",
            lambda m: num(nan if m.more.blend is None else m.more.blend.beta, 2),
        ),
    ]
    read = (
        "The first figure shows what a blend with weight λ gains over softmax on held-out batches. If the curve "
        "peaks well above 0 and away from λ = 0, another link fits better. The second shows the gain of each "
        "held-out batch, the third compares the likelihood ratio with those of positives drawn from softmax."
    )

    def draw(tag: str, m: Measured) -> list[Figure]:
        if m.more.blend is None:
            return []
        return [
            panels.lam_figure(w.gallery, tag, m.link, m.more.blend),
            panels.batch_figure(w.gallery, tag, m.link),
            panels.null_figure(w.gallery, tag, m.link),
        ]

    tables = w.fitted_table("link-paper", "Cross-checks of the link test", rows)
    return Section(
        "link-paper", "Link test: weight and null", read, w.groups(draw), tables, notes=w.without_fit()
    )


def _pot(w: SectionWriter) -> Section:
    rows: list[Row] = [
        ("likelihood ratio against the refitted exponential", lambda m: num(m.more.pot.exponential.lr, 1)),
        (
            "likelihood ratio against a GPD ending at 1",
            lambda m: text("duplicates at the cap") if m.more.pot.capped is None else num(m.more.pot.capped.lr, 1),
        ),
        ("ξ of the GPD ending at 1", lambda m: num(getattr(m.more.pot.capped, "xi", float("nan")))),
        ("Kolmogorov-Smirnov p-value of the GPD", lambda m: p_value(m.more.pot.fit_test.ks_p_value)),
        ("Anderson-Darling p-value of the GPD", lambda m: p_value(m.more.pot.fit_test.ad_p_value)),
    ]  # fmt: skip
    read = (
        "In the first figure, the law whose line follows the shaded histogram describes the hardest negatives. "
        "In the second, a law fits if its points lie on the diagonal; points below it mean that the law predicts "
        "higher cosines than occur. The scores of one batch depend on each other, so the two tests of fit in the "
        "table reject too often: trust the figures."
    )
    draw = w.groups(lambda tag, m: panels.pot_figures(w.gallery, tag, m.more.pot))
    return Section("pot", "Peaks over a threshold", read, draw, (w.table("pot", "Fits of the tail", rows),))


def _thresholds(w: SectionWriter) -> Section:
    read = (
        "Where the generalised Pareto law holds, ξ and the modified scale stay level to the right of the "
        "threshold in use, within their bands. The mean excess is then a straight line, falling if the tail "
        "is bounded. (Bands treat the scores as independent.)"
    )
    rows: list[Row] = [
        ("ξ at the lowest threshold", lambda m: num(m.more.pot.stability.xi[0])),
        ("ξ at the highest threshold", lambda m: num(m.more.pot.stability.xi[-1])),
        ("smallest ξ over the thresholds", lambda m: num(m.more.pot.stability.xi.min())),
        ("largest ξ over the thresholds", lambda m: num(m.more.pot.stability.xi.max())),
        ("exceedances at the highest threshold", lambda m: count(int(m.more.pot.stability.n[-1]))),
    ]
    draw = w.groups(
        lambda tag, m: panels.threshold_figures(w.gallery, tag, m.more.pot, m.tail.xi.fit.threshold)
    )
    table = w.table("thresholds", "Stability", rows)
    return Section("thresholds", "Choice of the threshold", read, draw, (table,))


def _frechet(w: SectionWriter) -> Section:
    rows: list[Row] = [
        *_gain_rows("shortfall over softmax", lambda m: m.more.frechet.w_over_0),
        *_gain_rows("heavy tail over softmax", lambda m: m.more.frechet.f_over_0),
        *_gain_rows("heavy tail on top of shortfall", lambda m: m.more.frechet.wf_over_w),
        ("λ of the shortfall, alone", lambda m: num(m.more.frechet.lam_w)),
        ("λ of the heavy tail, alone", lambda m: num(m.more.frechet.lam_f)),
        ("λ of the shortfall, joint fit", lambda m: num(m.more.frechet.lam_w_full)),
        ("λ of the heavy tail, joint fit", lambda m: num(m.more.frechet.lam_f_full)),
    ]
    read = (
        "A third coordinate, log((1 + s)/2), stands for a heavy (Frechet) tail, which a cosine cannot have. Its "
        "gains should be 0. If they are not, a more flexible link fits better whatever its shape, and a gain of "
        "the shortfall is no evidence of a cap."
    )
    draw = w.groups(lambda tag, m: panels.frechet_figures(w.gallery, tag, m.more.frechet))
    tables = w.fitted_table("frechet", "Gains of the blends", rows)
    return Section("frechet", "Heavy-tail ablation", read, draw, tables, notes=w.without_fit())


def _ablations(w: SectionWriter) -> Section:
    def draw(tag: str, m: Measured) -> list[Figure]:
        kept = panels.ablation_figures(w.gallery, tag, m.more.hard, m.more.hard_drawn, "kept")
        return kept + panels.ablation_figures(w.gallery, tag, m.more.pool, m.more.pool_drawn, "pool")

    tables = []
    for index, m in enumerate(w.models, 1):
        if m.link.separated:
            continue
        who = f", {m.name}" if len(w.models) > 1 else ""
        kept = f"Hard negatives kept of {m.more.hard[0].pool}{who}"
        tables.append(
            _ablation_table(f"hard-negatives-{index}", kept, m.more.hard, m.more.hard_drawn, "kept")
        )
        pool = f"Pool from which {m.more.pool[0].kept} are kept{who}"
        tables.append(_ablation_table(f"pool-{index}", pool, m.more.pool, m.more.pool_drawn, "pool"))
    read = (
        "Here the link is fitted to the hardest negatives alone, then to a fixed number of the hardest from "
        "growing pools. Choosing negatives by score changes λ and the gain even if one blend holds for all "
        "candidates. The dashed line shows by how much: its positives are drawn from the fitted blend (“drawn” "
        "in the tables). The link changes towards the hardest negatives only where the bands of the two gains, "
        "95 % intervals over batches, do not overlap."
    )
    title, drawn = "Hard negatives and their pool", w.groups(draw)
    return Section("ablations", title, read, drawn, tuple(tables), notes=w.without_fit())


def _risk(w: SectionWriter) -> Section:
    def draw(tag: str, m: Measured) -> list[Figure]:
        return [] if m.more.risk is None else panels.risk_figures(w.gallery, tag, m.more.risk)

    rows = []
    for m in w.models:
        for r in m.more.risk or ():
            shares = [float(abs(r.risk - getattr(r, k)).sum()) / 2 for k in ("softmax", "shortfall", "blend")]
            fails = percent(r.failure_rate, 2)
            rows.append((text(m.name), count(r.k), fails, *(percent(x) for x in shares)))
    table = NumberTable(
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
    return Section("risk", "Risk against gradient", read, w.groups(draw), tables, notes=w.without_fit())


def _anchors(w: SectionWriter) -> Section:
    rows: list[Row] = [
        ("exceedances per anchor", lambda m: count(int(m.more.comparison.n.max()))),
        ("anchors with ΔAIC > 0 (the paper's count)", lambda m: percent((m.more.anchors.daic > 0).mean())),
        (
            "anchors with a bounded tail, valid test at 5 %",
            lambda m: percent(m.more.comparison.share_bounded),
        ),
        ("the same if every tail were exponential", lambda m: percent(m.more.comparison.alpha)),
        ("anchors with ξ < 0", lambda m: percent(m.more.comparison.share_negative)),
        ("the same if every tail were exponential", lambda m: percent(m.more.comparison.null_share_negative)),
        ("anchors with ξ < 0 and a better AIC", lambda m: percent(m.more.comparison.share_aic)),
        ("the same if every tail were exponential", lambda m: percent(m.more.comparison.null_share_aic)),
        ("median ρ", lambda m: num(float(np.median(m.more.anchors.rho)))),
        ("median β", lambda m: num(float(np.median(m.more.anchors.beta)), 2)),
        ("median ΔAIC", lambda m: num(float(np.median(m.more.anchors.daic)), 1)),
        ("mean λ of WEINCE", lambda m: num(m.more.anchors.lam.mean())),
    ]
    d = daic_artefact(seed=w.seed)
    artefact = NumberTable(
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
    draw = w.groups(lambda tag, m: panels.anchor_figures(w.gallery, tag, m.more))
    shared = Group("Simulated tails of known kind", tuple(panels.artefact_figures(w.gallery, d)))
    tables = (w.table("anchors", "Anchor by anchor", rows), artefact)
    return Section("anchors", "Anchor by anchor", read, (*draw, shared), tables)


def _gain_rows(label: str, gain: Callable[[Measured], Gain]) -> list[Row]:
    return [
        (f"{label} (nats per anchor)", lambda m: num(gain(m).gain, 4)),
        ("95 %", lambda m: between(gain(m).interval, 4)),
        ("p-value, t over batches", lambda m: p_value(gain(m).t_p_value)),
    ]


def _ablation_table(
    slug: str, title: str, points: Sequence[AblationPoint], drawn: Sequence[AblationPoint] | None, over: str
) -> NumberTable:
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
    return NumberTable(slug, title, (over, "λ", "gain, nats", "95 %", "p", *control), rows)


def sections(w: SectionWriter) -> list[Section]:
    """The paper's sections, in its order."""
    return [part(w) for part in (_link, _pot, _thresholds, _frechet, _ablations, _risk, _anchors)]


def quantities(models: Sequence[Measured]) -> list[Quantity]:
    """What a trend draws of the heavy tail."""
    ablations = [m.more.frechet for m in models]
    f0, wf = [a.f_over_0 for a in ablations], [a.wf_over_w for a in ablations]
    none = (np.nan, np.nan)
    heavy = [(a.lam_f_full if np.isfinite(a.tau_full) else np.nan, none) for a in ablations]
    return [
        Quantity(
            "f0", "Gain of the heavy tail over softmax (F − 0)", GAIN, [(g.gain, g.interval) for g in f0]
        ),
        Quantity(
            "wf", "Gain of the heavy tail over the blend (WF − W)", GAIN, [(g.gain, g.interval) for g in wf]
        ),
        Quantity("lamf", "Weight λ of the heavy tail, joint fit", "λ", heavy, bounds=(0.0, 1.0)),
    ]


def summarise(m: Measured) -> dict[str, Any]:
    """The numbers of a model for ``summary.json``."""
    p = m.more
    a, c = p.anchors, p.comparison
    return {
        "cross_validation": p.folds._asdict(),
        "shortfall_beta": None if p.blend is None else p.blend.beta,
        "exponential": asdict(p.pot.exponential),
        "capped": None if p.pot.capped is None else asdict(p.pot.capped),
        "fit_test": asdict(p.pot.fit_test),
        "frechet": asdict(p.frechet),
        "hard_negatives": [asdict(point) for point in p.hard],
        "pool": [asdict(point) for point in p.pool],
        "hard_negatives_drawn": [asdict(point) for point in p.hard_drawn or ()],
        "pool_drawn": [asdict(point) for point in p.pool_drawn or ()],
        "risk": [{"k": r.k, "failure_rate": r.failure_rate} for r in p.risk or ()],
        "anchors": {
            "share_daic_positive": float((a.daic > 0).mean()),
            "share_bounded": c.share_bounded,
            "alpha": c.alpha,
            "share_xi_negative": c.share_negative,
            "null_share_xi_negative": c.null_share_negative,
            "mean_lam": float(a.lam.mean()),
            "median_rho": float(np.median(a.rho)),
            "median_beta": float(np.median(a.beta)),
        },
    }


PAPER = Supplement(STAGES, measure_paper, sections, quantities, summarise)
