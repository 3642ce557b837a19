# ruff: noqa: RUF001  (Greek letters and minus signs are meant)
"""Figures of the link test, and of models side by side or along a run."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from weince import evt
from weince.diagnose.diagnosis_settings import DiagnosisSettings
from weince.diagnose.measure import Curves, Measured
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
    shorten,
)
from weince.evt.arrays import Bounds, Floats
from weince.intervals import t_interval

GAIN = "gain (nats per anchor)"


def link_figures(gallery: Gallery, tag: str, m: Measured, temperature: float | None) -> list[Figure]:
    """Held-out likelihood over the temperature, and what explains them."""
    if m.curves is None:
        return []
    return [
        _loss_over_temperature(gallery, tag, m.link, m.curves, temperature),
        *([] if m.rivals is None else [_rivals(gallery, tag, m.rivals)]),
    ]


def _loss_over_temperature(
    gallery: Gallery, tag: str, t: evt.LinkTest, c: Curves, temperature: float | None
) -> Figure:
    with gallery.panel(f"link-tau-{tag}", "What softmax loses at other temperatures") as panel:
        ax = panel.ax
        ax.axvspan(*c.tau_range, color=GREEN, alpha=0.18, linewidth=0, label="good enough")
        ax.plot(c.taus, c.tau_loss, color=BLUE)
        ax.axvline(t.tau0, color=ORANGE, linestyle="--", label="fitted τ₀")
        if temperature is not None:
            ax.axvline(temperature, color=RED, linestyle=":", label="yours")
        ax.set(xlabel="temperature of softmax", ylabel="loss (nats per anchor)")
        low, high = ax.get_xlim()
        steps = [a * 10.0**e for e in range(-4, 2) for a in (1, 2, 5)]
        log_axis(ax, "x", [s for s in steps if low <= s <= high])
        legend(ax)
    return panel.done


def size_figures(gallery: Gallery, tag: str, m: Measured, settings: DiagnosisSettings) -> list[Figure]:
    """The temperature that fits over the batch size, with its interval."""
    known = [fit for fit in m.sizes if fit.known and np.isfinite(fit.interval).all()]
    if len(known) < 2:
        return []
    sizes = [fit.batch_size for fit in known]
    low, high = np.array([fit.interval for fit in known]).T
    with gallery.panel(f"batch-sizes-{tag}", "Temperature that fits, by batch size", height=2.6) as panel:
        ax = panel.ax
        ax.fill_between(sizes, low, high, color=BLUE, alpha=0.2, linewidth=0)
        ax.plot(sizes, [fit.temperature for fit in known], color=BLUE, marker="o", markersize=4)
        ax.axvline(m.batch_size, color=ORANGE, linestyle="--", label="of the link test")
        if settings.temperature is not None:
            ax.axhline(settings.temperature, color=RED, linestyle=":", label="your temperature")
        ax.set(xlabel="pairs in a batch", ylabel="τ₀")
        log_axis(ax, "x", sizes[:: len(sizes) // 6 + 1])
        legend(ax)
    return [panel.done]


def _rivals(gallery: Gallery, tag: str, r: evt.LinkRivals) -> Figure:
    gains = {
        "another link": r.blend,
        "τ varies by anchor": r.anchors.gain,
        "τ varies by pair": r.pairs.gain,
        "link, and τ by anchor": r.both.gain,
    }
    caption = "Held-out gain over softmax with one τ"
    return gain_rows(gallery, f"link-rivals-{tag}", caption, 2.4, gains, (BLUE, ORANGE, GREEN, PURPLE))


def gain_rows(
    gallery: Gallery,
    slug: str,
    caption: str,
    height: float,
    gains: Mapping[str, evt.Gain],
    colours: Sequence[str],
) -> Figure:
    """A panel with a row for each gain: its value and its interval."""
    with gallery.panel(slug, caption, height=height) as panel:
        ax = panel.ax
        ax.axvline(0.0, color=INK, linewidth=1.0)
        mid, spans = (np.array([getattr(g, key) for g in gains.values()]) for key in ("gain", "interval"))
        _rows(ax, list(gains), mid, spans, colours)
        _room(ax, spans)
        ax.set_xlabel(GAIN)
    return panel.done


def _rows(ax: Axes, names: Sequence[str], mid: Floats, intervals: Floats, colours: Sequence[str]) -> None:
    """A row for each name, the first one on top: a dot and its interval."""
    places = range(len(names))[::-1]
    for at, x, (low, high), colour in zip(places, mid, intervals, colours, strict=True):
        ax.plot([low, high], [at, at], color=colour, linewidth=2.2, solid_capstyle="butt")
        ax.plot([x], [at], "o", color=colour, markersize=6)
    ax.set_yticks(places, names)
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.grid(visible=False, axis="y")


def _room(ax: Axes, spans: Floats) -> None:
    """Set the limits of the x axis, never so narrow that rounding looks like an effect."""
    known = spans[np.isfinite(spans)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    pad = max(0.15 * (high - min(low, 0.0)), 0.002)
    ax.set_xlim(min(low, 0.0) - pad, max(high, 0.0) + pad)
    ax.locator_params(axis="x", nbins=5)


@dataclass(frozen=True)
class Quantity:
    """A number of every model, with its interval."""

    key: str
    title: str
    label: str
    by_model: Sequence[tuple[float, Bounds]]  # each value with its interval; NaN where there is none
    zero: bool = True  # whether 0 is a value to compare with
    bounds: Bounds = (-np.inf, np.inf)  # values that it can have

    @property
    def value(self) -> Floats:
        return np.array([value for value, _ in self.by_model])  # (models,)

    @property
    def interval(self) -> Floats:
        return np.array([interval for _, interval in self.by_model])  # (models, 2)


def quantities(models: Sequence[Measured]) -> list[Quantity]:
    """The quantities of the forest plots and of the trends."""
    links, tails = [m.link for m in models], [m.tail.xi for m in models]
    gains = [(t.gain, t.gain_interval) for t in links]
    best = [(t.tau0, t.tau0_interval) for t in links]
    # A weight has a meaning only at a finite temperature.
    lams = [(t.lam if np.isfinite(t.tau) else np.nan, t.lam_interval) for t in links]
    return [
        Quantity("gain", "Held-out gain of the blend over softmax (W − 0)", GAIN, gains),
        Quantity("lam", "Weight λ of the shortfall", "λ", lams, bounds=(0.0, 1.0)),
        Quantity("xi", "Shape ξ of the tail", "ξ (below 0: bounded)", [(x.fit.xi, x.xi_interval) for x in tails]),
        Quantity("tau0", "Best temperature of softmax", "τ₀", best, bounds=(0.0, np.inf), zero=False),
    ]  # fmt: skip


class MeanOver(NamedTuple):
    """A mean over models, its 95 % t-interval, and the number of models that have a value."""

    mean: float
    interval: Bounds
    n: int


def mean_over(values: Floats, bounds: Bounds = (-np.inf, np.inf)) -> MeanOver:
    """Mean over the models that have a value, its interval cut at the bounds; NaN with fewer than two."""
    known = values[np.isfinite(values)]
    if known.size < 2:
        return MeanOver(float("nan"), (float("nan"), float("nan")), known.size)
    mean, half, n = t_interval(known)
    return MeanOver(mean, (max(mean - half, bounds[0]), min(mean + half, bounds[1])), n)


def forest_figures(gallery: Gallery, models: Sequence[Measured], *, mean: bool = False) -> list[Figure]:
    """One row per model and its interval, for the gain, lam, xi and tau0; a last row for their mean."""
    out = []
    every = [m.name for m in models]
    short = [shorten(name, among=every) for name in every]
    colours = [BLUE] * len(models) + [RED] * mean
    for q in quantities(models):
        if not np.isfinite(q.value).any():
            continue
        value, spans, names = q.value, q.interval, short
        if mean:
            centre, interval, n = mean_over(q.value, q.bounds)
            value, spans = np.append(value, centre), np.vstack([spans, interval])
            names = [*short, f"mean of {n} seeds"]
        with gallery.panel(f"forest-{q.key}", q.title, height=1.2 + 0.32 * len(names)) as panel:
            ax = panel.ax
            if q.zero:
                ax.axvline(0.0, color=INK, linewidth=1.0)
            _rows(ax, names, value, spans, colours)
            ax.set_xlabel(q.label)
            ax.margins(x=0.08)
            ax.locator_params(axis="x", nbins=5)
            _spread(ax, "x", q)
        out.append(panel.done)
    return out


def _spread(ax: Axes, which: Literal["x", "y"], q: Quantity) -> None:
    """Make the axis of temperatures logarithmic if they differ much: one may be hardly determined, and so large."""
    known = q.interval[np.isfinite(q.interval) & (q.interval > 0.0)]
    if q.zero or not known.size or known.max() < 20.0 * known.min():
        return
    powers = range(int(np.floor(np.log10(known.min()))), int(np.ceil(np.log10(known.max()))) + 1)
    log_axis(ax, which, [10.0**e for e in powers[:: len(powers) // 6 + 1]])


def trend_figures(gallery: Gallery, x: Sequence[float], shown: Sequence[Quantity]) -> list[Figure]:
    """Quantities over the checkpoints of a run."""
    out = []
    colours = (BLUE, ORANGE, PURPLE, GREEN, RED, SKY)
    for q, colour in zip(shown, itertools.cycle(colours), strict=False):
        if not np.isfinite(q.value).any():
            continue
        with gallery.panel(f"trend-{q.key}", q.title, height=2.6) as panel:
            ax = panel.ax
            if q.zero:
                ax.axhline(0.0, color=INK, linewidth=1.0)
            if np.isfinite(q.interval).all():
                ax.fill_between(x, q.interval[:, 0], q.interval[:, 1], color=colour, alpha=0.2, linewidth=0)
            ax.plot(x, q.value, color=colour, marker="o", markersize=4)
            ax.set(xlabel="checkpoint", ylabel=q.label)
            _spread(ax, "y", q)
            if np.ptp(x) / min(np.diff(x)) <= 12.0:
                ax.set_xticks(x)
            else:
                ax.locator_params(axis="x", integer=True, nbins=6)
        out.append(panel.done)
    return out
