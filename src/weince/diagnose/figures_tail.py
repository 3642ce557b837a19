# ruff: noqa: RUF001  (Greek letters and minus signs are meant)
"""Figures of the tail: peaks over a threshold, thresholds, anchors. xi < 0 means a bounded tail."""

import numpy as np
from matplotlib.axes import Axes

from weince import evt
from weince.diagnose.measure import Measured, Tail
from weince.diagnose.style import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SKY, Figure, Gallery, legend
from weince.evt.arrays import Floats

LAWS = {"GPD": (BLUE, "-"), "exponential, refitted": (RED, "--"), "GPD ending at 1": (GREEN, ":")}


def pot_figures(gallery: Gallery, tag: str, tail: Tail) -> list[Figure]:
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


def threshold_figures(gallery: Gallery, tag: str, tail: Tail) -> list[Figure]:
    """Shape, modified scale and mean excess over the threshold."""
    s, life, used = tail.stability, tail.residual_life, tail.xi.fit.threshold
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


def anchor_figures(gallery: Gallery, tag: str, m: Measured) -> list[Figure]:
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


def artefact_figures(gallery: Gallery, d: evt.DaicArtefact) -> list[Figure]:
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
