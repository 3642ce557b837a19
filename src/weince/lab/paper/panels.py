# ruff: noqa: RUF001  (Greek letters and minus signs are meant)
"""The paper's figures: tails, thresholds, links, ablations, risk and anchors. xi < 0 means a bounded tail."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from weince.diagnose.figures_link import GAIN, gain_rows
from weince.diagnose.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Figure,
    Gallery,
    legend,
    log_axis,
)
from weince.evt import LinkTest
from weince.evt.arrays import Floats
from weince.lab.paper.ablations import AblationPoint, FrechetAblation
from weince.lab.paper.anchors import DaicArtefact
from weince.lab.paper.measurements import BlendCurve, PaperMeasurements, PeaksOverThreshold
from weince.lab.paper.risk import RiskGradient

LAWS = {"GPD": (BLUE, "-"), "exponential, refitted": (RED, "--"), "GPD ending at 1": (GREEN, ":")}


def pot_figures(gallery: Gallery, tag: str, tail: PeaksOverThreshold) -> list[Figure]:
    """Density and quantiles of the scores above the threshold against three laws."""
    c = tail.curves
    densities = [c.gpd_density, c.exponential_density, c.capped_density]
    quantiles = [c.gpd, c.exponential, c.capped]
    out = []
    with gallery.panel(f"pot-density-{tag}", "Density of the cosines above the threshold") as panel:
        ax = panel.ax
        ax.stairs(c.bin_density, c.bin_edges, fill=True, color=SKY, alpha=0.35, label="observed")
        for (label, (colour, dash)), y in zip(LAWS.items(), densities, strict=True):
            if y is not None:
                ax.plot(c.grid, y, color=colour, linestyle=dash, label=label)
        ax.axvline(1.0, color=INK, linewidth=1.0)
        ax.annotate("cap", (1.0, 0.45), xycoords=("data", "axes fraction"), xytext=(-3, 0),
                    textcoords="offset points", ha="right", fontsize=8)  # fmt: skip
        ax.set(xlabel="cosine of a negative pair", ylabel="density", ylim=(0, 1.15 * c.bin_density.max()))
        # Just past the cap, however near the threshold is to it.
        ax.set_xlim(c.bin_edges[0], max(1.04 - 0.04 * c.bin_edges[0], c.bin_edges[-1]))
        legend(ax)

    out.append(panel.done)
    with gallery.panel(f"pot-qq-{tag}", "Observed cosines against those each law predicts") as panel:
        ax = panel.ax
        low, high = float(c.observed.min()), float(c.observed.max())
        ax.plot([low, high], [low, high], color=INK, linewidth=1.0)
        for (label, (colour, _)), x in zip(LAWS.items(), quantiles, strict=True):
            if x is not None:
                marker = {BLUE: "o", RED: "^", GREEN: "s"}[colour]
                ax.plot(x, c.observed, marker, color=colour, markersize=3.2, alpha=0.75, label=label)
        ax.set(xlabel="cosine predicted by the law", ylabel="observed cosine")
        legend(ax)
    out.append(panel.done)
    return out


def threshold_figures(gallery: Gallery, tag: str, tail: PeaksOverThreshold, used: float) -> list[Figure]:
    """Shape, modified scale and mean excess over the threshold."""
    s, life = tail.stability, tail.residual_life
    known = np.isfinite(s.modified_scale_interval).all(axis=1)
    out = []
    panels = [
        ("stability-xi", "Shape ξ", "ξ  (below 0: bounded)", BLUE, (s.thresholds, s.xi, s.xi_interval)),
        ("stability-scale", "Modified scale σ − ξu", "σ − ξu (cosine)", PURPLE,
         (s.thresholds[known], s.modified_scale[known], s.modified_scale_interval[known])),
        ("mean-residual-life", "Mean excess", "mean excess (cosine)", GREEN,
         (life.thresholds, life.mean_excess, life.interval)),
    ]  # fmt: skip
    for slug, what, label, colour, (x, y, interval) in panels:
        with gallery.panel(f"{slug}-{tag}", f"{what} over the threshold") as panel:
            ax = panel.ax
            ax.fill_between(x, interval[:, 0], interval[:, 1], color=colour, alpha=0.2, linewidth=0)
            ax.plot(x, y, color=colour, marker="o", markersize=3)
            if slug == "stability-xi":
                ax.axhline(0.0, color=INK, linewidth=1.0)
            ax.axvline(used, color=ORANGE, linestyle="--", label="threshold in use")
            ax.set(xlabel="threshold u (cosine)", ylabel=label)
            legend(ax)
        out.append(panel.done)
    return out


def _histogram(ax: Axes, values: Floats, colour: str) -> None:
    heights, edges = np.histogram(values, bins=40)
    ax.stairs(100.0 * heights / max(values.size, 1), edges, fill=True, color=colour, alpha=0.6)


def anchor_figures(gallery: Gallery, tag: str, m: PaperMeasurements) -> list[Figure]:
    """What the loss computes for each anchor, and the valid comparison."""
    a = m.anchors
    share = "share of anchors (%)"
    plain = [
        ("rho", a.rho, "ρ, smallest shortfall 1 − s", SKY, "Distance ρ from each anchor to its hardest negative"),
        ("beta", a.beta, "β, slope of the Weibull line", GREEN, "Slope β fitted to each anchor's tail"),
        ("daic", a.daic, "ΔAIC (above 0 is said to favour Weibull)", ORANGE, "The paper's ΔAIC of each anchor"),
        ("lam", a.lam, "λ, weight of the shortfall logit", BLUE, "Weight λ that WEINCE would give each anchor"),
    ]  # fmt: skip
    out = []
    for key, values, label, colour, caption in plain:
        with gallery.panel(f"anchors-{key}-{tag}", caption, height=2.6) as panel:
            _histogram(panel.ax, values, colour)
            if key == "daic":
                panel.ax.axvline(0.0, color=INK, linewidth=1.0)
            panel.ax.set(xlabel=label, ylabel=share)
        out.append(panel.done)
    xi = m.comparison.xi[np.isfinite(m.comparison.xi)]
    p = m.comparison.p_bounded
    with gallery.panel(
        f"anchors-xi-{tag}", "Shape ξ of each anchor's own tail (−1: the edge of the family)", height=2.6
    ) as panel:
        _histogram(panel.ax, np.clip(xi, -1.0, 1.0), PURPLE)
        panel.ax.axvline(0.0, color=INK, linewidth=1.0)
        panel.ax.set(xlabel="ξ of the anchor's tail (below 0: bounded)", ylabel=share)
    out.append(panel.done)
    with gallery.panel(
        f"anchors-p-{tag}", "Valid comparison: p-value of a bounded tail", height=2.6
    ) as panel:
        heights, edges = np.histogram(p, bins=20, range=(0.0, 1.0))
        panel.ax.stairs(100.0 * heights / p.size, edges, fill=True, color=BLUE, alpha=0.6)
        panel.ax.axhline(5.0, color=RED, linestyle="--", label="if every tail were exponential")
        panel.ax.set(xlabel="p-value of a bounded tail", ylabel=share)
        legend(panel.ax)
    out.append(panel.done)
    return out


def artefact_figures(gallery: Gallery, d: DaicArtefact) -> list[Figure]:
    """dAIC of tails whose kind is known, under both plotting positions."""
    out = []
    both = [("tail", d.daic_tail, "F = k/(K+1), as in the loss"), ("sample", d.daic_sample, "F = k/(N+1)")]
    for key, values, words in both:
        with gallery.panel(f"daic-artefact-{key}", f"ΔAIC of simulated tails, {words}", height=2.6) as panel:
            ax = panel.ax
            boxes = ax.boxplot(
                list(values), orientation="horizontal", widths=0.55, patch_artist=True, showfliers=False
            )
            for parts in ("whiskers", "caps", "medians", "boxes"):
                for line in boxes[parts]:
                    line.set_color(INK)
            for box, colour in zip(boxes["boxes"], (RED, ORANGE, BLUE), strict=True):
                box.set(facecolor=colour, alpha=0.7)
            ax.axvline(0.0, color=INK, linewidth=1.0)
            ax.set_yticks(range(1, len(d.tails) + 1), [f"{tail} tail" for tail in d.tails])
            ax.grid(visible=False, axis="y")
            ax.set_xlabel("ΔAIC (above 0 is said to favour Weibull)")
        out.append(panel.done)
    return out


def lam_figure(gallery: Gallery, tag: str, t: LinkTest, c: BlendCurve) -> Figure:
    """Gain over the weight of the shortfall."""
    with gallery.panel(f"link-lam-{tag}", "Held-out gain over softmax, with λ fixed and τ refitted") as panel:
        ax = panel.ax
        ax.axhline(0.0, color=INK, linewidth=1.0)
        ax.axvspan(*t.lam_interval, color=ORANGE, alpha=0.2, linewidth=0, label="95 % interval of λ")
        ax.axvline(t.lam, color=ORANGE, linestyle="--", label="fitted λ")
        ax.plot(c.lams, c.gain, color=BLUE, marker="o", markersize=3)
        ax.set(xlabel="λ  (0: softmax, 1: shortfall)", ylabel=GAIN)
        legend(ax)
    return panel.done


def batch_figure(gallery: Gallery, tag: str, t: LinkTest) -> Figure:
    """The gain of the blend in each held-out batch."""
    with gallery.panel(f"link-batches-{tag}", "Gain of each held-out batch") as panel:
        gains = np.sort(t.gain_by_batch)
        ax = panel.ax
        ax.axhspan(*t.gain_interval, color=BLUE, alpha=0.2, linewidth=0, label="95 % interval of the mean")
        ax.axhline(t.gain, color=BLUE)
        ax.axhline(0.0, color=INK, linewidth=1.0)
        ax.plot(np.arange(1, len(gains) + 1), gains, "o", color=ORANGE, markersize=4, label="batch")
        ax.set(xlabel="held-out batch, in order of its gain", ylabel=GAIN)
        ax.locator_params(axis="x", integer=True, nbins=8)
        legend(ax)
    return panel.done


def null_figure(gallery: Gallery, tag: str, t: LinkTest) -> Figure:
    """The likelihood ratio against those simulated under softmax."""
    with gallery.panel(f"link-null-{tag}", "Likelihood ratio against what softmax would give") as panel:
        ax = panel.ax
        null = np.array(t.lr_null)
        heights, edges = np.histogram(null, bins=25)
        ax.stairs(heights, edges, fill=True, color=SKY, alpha=0.6, label="simulated under softmax")
        ax.axvline(t.lr_statistic, color=RED, label="observed")
        ax.set_xscale("symlog", linthresh=10.0)
        reach = max(float(null.max()), t.lr_statistic, 10.0)
        ticks = [0.0, 5.0, *(10.0**e for e in range(1, int(np.ceil(np.log10(reach))) + 1))]
        ax.set_xlim(0.0, 1.5 * reach)
        shown = [x for x in ticks if x <= 1.5 * reach]
        ax.set_xticks(shown, [f"{x:,.0f}" for x in shown])
        ax.minorticks_off()
        ax.set(xlabel="likelihood ratio", ylabel="simulations")
        legend(ax)
    return panel.done


def frechet_figures(gallery: Gallery, tag: str, a: FrechetAblation) -> list[Figure]:
    """The three gains with their intervals."""
    if a.separated:
        return []
    gains = {
        "shortfall over softmax": a.w_over_0,
        "heavy tail over softmax": a.f_over_0,
        "heavy tail over shortfall": a.wf_over_w,
    }
    caption = "Held-out gains of the three blends"
    return [gain_rows(gallery, f"frechet-{tag}", caption, 2.2, gains, (BLUE, RED, PURPLE))]


def ablation_figures(
    gallery: Gallery,
    tag: str,
    points: Sequence[AblationPoint],
    drawn: Sequence[AblationPoint] | None,
    over: str,
) -> list[Figure]:
    """Gain and lam over the number of hard negatives ("kept") or over the pool ("pool").

    A second curve shows ``drawn``, if given: the same for positives drawn from one link. It shows the effect of
    selecting negatives by score alone.
    """
    x = np.array([getattr(p, over) for p in points], dtype=np.float64)
    gain = np.array([p.gain.gain for p in points])
    spans = np.array([p.gain.interval for p in points])
    lam = np.array([p.lam for p in points])
    if not np.isfinite(gain).any():
        return []
    words = {
        "kept": ("hard negatives kept", "hard negatives are kept"),
        "pool": ("pool they are picked from", "negatives are in the pool"),
    }
    label, caption = words[over]
    out = []
    for key, title in (("gain", "Held-out gain as more"), ("lam", "Fitted λ as more")):
        with gallery.panel(f"{over}-{key}-{tag}", f"{title} {caption}", height=2.6) as panel:
            ax = panel.ax
            if key == "gain":
                ax.axhline(0.0, color=INK, linewidth=1.0)
                ax.fill_between(x, spans[:, 0], spans[:, 1], color=BLUE, alpha=0.2, linewidth=0)
                ax.plot(x, gain, color=BLUE, marker="o", markersize=4, label="measured")
                ax.set_ylabel(GAIN)
            else:
                ax.plot(x, lam, color=ORANGE, marker="s", markersize=4, label="measured")
                ax.set(ylabel="λ", ylim=(-0.03, 1.03))
            if drawn is not None:
                y = [p.gain.gain if key == "gain" else p.lam for p in drawn]
                ax.plot(
                    x, y, color=INK, linestyle="--", linewidth=1.2, label="positives drawn from one blend"
                )
                if key == "gain":
                    low, high = np.array([p.gain.interval for p in drawn]).T
                    ax.fill_between(x, low, high, color=INK, alpha=0.12, linewidth=0)
                legend(ax)
            ax.set_xlabel(label)
            log_axis(ax, "x", [v for v in x[:-1] if v < 0.7 * x[-1]] + [float(x[-1])])
        out.append(panel.done)
    return out


def risk_figures(gallery: Gallery, tag: str, risk: Sequence[RiskGradient]) -> list[Figure]:
    """Where failures come from and where each link puts its gradient, for every subset size."""
    out = []
    links = (("softmax", RED, "--"), ("shortfall", GREEN, ":"), ("blend", BLUE, "-"))
    for r in risk:
        words = f"Subsets of {r.k:,}: a negative beats the positive in {100 * r.failure_rate:.2g} %"
        with gallery.panel(f"risk-{r.k}-{tag}", words) as panel:
            ax = panel.ax
            ax.stairs(100.0 * np.nan_to_num(r.risk), r.edges, fill=True, color=SKY, alpha=0.45, label="risk")
            middle = 0.5 * (r.edges[1:] + r.edges[:-1])
            for name, colour, dash in links:
                ax.plot(middle, 100.0 * getattr(r, name), color=colour, linestyle=dash, label=name)
            ax.set(xlabel="cosine of the negative", ylabel="share (%)")
            legend(ax)
        out.append(panel.done)
    return out
