"""What the measurements of one model say, a sentence for each; `verdict` decides which advice follows.

xi < 0 means a bounded tail; the endpoint is ``threshold - sigma / xi``.
"""

import numpy as np

from weince.diagnose.cells import number, temperature
from weince.diagnose.diagnosis_settings import DiagnosisSettings
from weince.diagnose.lines import short
from weince.diagnose.measure import Measured
from weince.diagnose.rules import THRESHOLDS
from weince.evt import BatchXi
from weince.evt.link_rivals import Explanation
from weince.scores import CROWD


def span(interval: tuple[float, float]) -> str:
    """An interval for running text."""
    return f"{number(interval[0])} to {number(interval[1])}"


def tau_span(interval: tuple[float, float]) -> str:
    """An interval of temperatures for running text."""
    return f"{temperature(interval[0])} to {temperature(interval[1])}"


def p_words(p: float) -> str:
    """A p-value for running text, never shown as 0."""
    if np.isnan(p):
        return "p not defined"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def lost(m: Measured) -> float:
    """What the temperature in use costs, in nats per anchor; 0 when it is not known."""
    return 0.0 if m.curves is None or m.curves.current_loss is None else m.curves.current_loss


def tail_kind(xi: BatchXi) -> str:
    """ "bounded", "heavy" or "undecided"."""
    low, high = xi.xi_interval
    return "bounded" if high < 0.0 else "heavy" if low > 0.0 else "undecided"


def too_crowded(m: Measured) -> bool:
    """Whether more embeddings are crowded than the rules and chance allow."""
    return m.crowded - m.crowded_by_chance > THRESHOLDS.crowded


def crowd_text(m: Measured) -> str:
    """The share of crowded embeddings in percent."""
    return f"{number(100 * m.crowded, 1)} %"


def tail_sentence(m: Measured) -> str:
    """Whether the tail is bounded, with a warning if too many embeddings are crowded."""
    if not too_crowded(m):
        return _shape_sentence(m)
    return (
        f"{_shape_sentence(m)} But {crowd_text(m)} of the embeddings lie within a shortfall of {CROWD:g} of another "
        "item's (a collapse of part of the encoder, or duplicates in the data), so the tail's figures describe that "
        "crowd rather than hard negatives."
    )


def _shape_sentence(m: Measured) -> str:
    """Whether the tail is bounded, in one or two sentences."""
    xi = m.tail.xi
    numbers = f"ξ = {number(xi.fit.xi)} (95 % over batches: {span(xi.xi_interval)})"
    kind = tail_kind(xi)
    if kind == "bounded" and xi.fit.endpoint > 1.0:
        return (
            f"The hardest negatives thin out faster than an exponential tail: {numbers}. But the fitted tail "
            "would end beyond a cosine of 1, where there are none: the cap is not visible in this tail."
        )
    if kind == "bounded":
        low, high = xi.endpoint_interval
        ends = f"{number(low)} to {number(high) if high <= 1.0 else 'the cap'}"
        return (
            f"The tail of the hardest negatives looks bounded at this level: {numbers}. The fitted law ends at a "
            f"cosine of about {number(xi.fit.endpoint)} (95 %: {ends}); the geometric cap is 1."
        )
    if kind == "heavy":
        return f"The tail of the hardest negatives does not look bounded at this level: {numbers}."
    return f"Whether the tail of the hardest negatives is bounded is undecided: {numbers} covers 0."


def softmax_sentence(m: Measured) -> str:
    t = m.link
    if t.separated and m.beaten:
        return "No link can be fitted: each positive that is beaten coincides with its anchor, as does what beats it."
    if t.separated:
        return "Every fitted anchor already ranks its positive first, so no finite temperature is best."
    if t.lam == 0.0:
        return (
            "Nothing to another link: fitted to half of the batches, the blended link turns into softmax itself "
            f"(λ = 0), so the gain is exactly 0 ({p_words(t.lr_p_value)})."
        )
    times = number(t.gain_ratio, 2)
    if t.gain <= 0.0:
        return (
            "Nothing to another link: at its best temperature, softmax fits the held-out batches as well as the link "
            f"or better (gain of the link: {number(t.gain, 4)} nats per anchor; 95 %: {span(t.gain_interval)}; "
            f"{p_words(t.lr_p_value)} by likelihood ratio, {p_words(t.t_p_value)} by t over batches)."
        )
    return (
        f"At its best temperature, softmax leaves {number(t.gain)} nats per anchor on the table (held out; "
        f"95 %: {span(t.gain_interval)}; {p_words(t.lr_p_value)} by likelihood ratio, {p_words(t.t_p_value)} by "
        f"t over batches): the blended link makes the positive {times} times as likely."
    )


def link_sentence(m: Measured) -> str:
    t = m.link
    if not np.isfinite(t.tau):  # every positive wins, or higher scores do not win more often
        return "No link can be told from another here."
    return (
        f"The best blend has λ = {number(t.lam)} (95 %: {span(t.lam_interval)}) and τ = {temperature(t.tau)} "
        f"(95 %: {tau_span(t.tau_interval)}); the best plain softmax has τ₀ = {temperature(t.tau0)} "
        f"(95 %: {tau_span(t.tau0_interval)})."
    )


def rival(m: Measured) -> str:
    """The better one of the two rivals, as a word."""
    assert m.rivals is not None
    return "pairs" if m.rivals.varying is m.rivals.pairs else "anchors"


def only_adds(m: Measured) -> bool:
    """Whether no rival is certain to beat the blend, so that only what varying anchors add to it is certain."""
    assert m.rivals is not None
    over_anchors, over_pairs = m.rivals.blend_over_anchors, m.rivals.blend_over_pairs
    return all(
        gain.gain > -THRESHOLDS.worth or gain.interval[1] >= 0.0 for gain in (over_anchors, over_pairs)
    )


def explained(m: Measured) -> Explanation:
    return "softmax" if m.rivals is None else m.rivals.explanation(THRESHOLDS.worth)


def rivals_sentence(m: Measured) -> str:
    r = m.rivals
    if r is None:
        return "Nothing to explain: softmax has no best temperature here."
    who = rival(m)
    differing = f"{who.capitalize()} of different difficulty explain these scores"
    said = {
        "softmax": "Nothing to explain: neither the blend nor a varying temperature gains "
        f"{THRESHOLDS.worth:g} nats.",
        "cap": f"A bounded tail explains these scores better than {who} of different difficulty do.",
        "varying": f"{differing} better than a bounded tail does.",
        "both": f"A bounded tail and {who} of different difficulty both have a part in it.",
        "either": f"{differing} as well as a bounded tail does.",
    }[explained(m)]
    if explained(m) == "softmax" and max(r.blend.gain, r.varying.gain.gain) >= THRESHOLDS.worth:
        said = f"Not clear: no gain of {THRESHOLDS.worth:g} nats or more is certain."
    if explained(m) == "varying" and only_adds(m):
        said = "A bounded tail does not explain all of this gain: anchors of different difficulty explain the rest."
    return (
        f"{said} Softmax whose temperature varies gains {number(r.pairs.gain.gain)} nats if it varies from pair "
        f"to pair and {number(r.anchors.gain.gain)} if it varies from anchor to anchor; the blend gains "
        f"{number(r.blend.gain)}, and {number(r.both.gain.gain)} if its temperature varies from anchor to anchor."
    )


def temperature_words(m: Measured, settings: DiagnosisSettings) -> tuple[str, bool]:
    """What to say about the temperature, and whether the one in use is known to be off."""
    curves = m.curves
    assert curves is not None
    around = tau_span(curves.tau_range)
    if settings.temperature is None or curves.current_loss is None:
        return (
            f"Any temperature from {around} describes these scores within {THRESHOLDS.worth:g} nats of the best; "
            f"if yours lies outside, {temperature(m.link.tau0)} is the one to try.",
            False,
        )
    used, loss = short(settings.temperature), number(curves.current_loss)
    off = curves.current_loss > THRESHOLDS.worth
    if off:
        words = f"At your temperature of {used}, softmax loses {loss} nats per anchor against its best, τ₀."
    elif curves.current_loss < 0.0:  # τ₀ was fitted to other batches
        words = f"Your temperature of {used} fits these scores as well as τ₀ or better."
    else:
        words = f"Your temperature of {used} is within {THRESHOLDS.worth:g} nats of the best ({loss} lost)."
    return words, off


def times(nats: float) -> str:
    """A gain in nats as a ratio of likelihoods, in words."""
    if nats > np.log(1000.0):
        return "more than 1,000 times as likely"
    ratio = float(np.exp(nats))
    return f"{number(ratio, 2 if ratio < 10.0 else 0)} times as likely"


def temperature_headline(m: Measured, settings: DiagnosisSettings, off: bool) -> str:
    """What to do about the temperature, in one sentence."""
    best, used = f"{m.link.tau0:.2g}", settings.temperature
    if used is None:
        return f"Use a temperature of about {best}."
    if not off:
        return f"Keep your temperature of {short(used)}."
    return f"{'Lower' if used > m.link.tau0 else 'Raise'} the temperature from {short(used)} to about {best}."


def temperature_worth(m: Measured, settings: DiagnosisSettings, off: bool) -> str:
    """What the advice about the temperature is worth."""
    assert m.curves is not None
    used, little = settings.temperature, f"{100 * np.expm1(THRESHOLDS.worth):.0f} %"
    if used is None:
        return f"Any temperature from {tau_span(m.curves.tau_range)} is as good, within {little}."
    if not off:
        return f"No other temperature makes the positive more than {little} likelier."
    return (
        f"On these scores, that makes the positive {times(lost(m))} as your temperature does. Training changes the "
        f"scores: train at {halfway(m, used)} too, which lies between the two, and let a validation set decide."
    )


def halfway(m: Measured, used: float) -> str:
    """Geometric mean of the temperature in use and the fitted one."""
    return f"{np.sqrt(used * m.link.tau0):.2g}"


def two_encoders(m: Measured, settings: DiagnosisSettings) -> tuple[str, ...]:
    """A warning if the views lie apart and rows of one view compete with each other."""
    if settings.candidates == "cross" or m.gap <= THRESHOLDS.gap:
        return ()
    return (
        f"The two views lie apart: the mean cosine of different items is {number(m.gap, 2)} higher within a view "
        "than across views, as with two encoders (image and text, query and document). Here all other rows of both "
        "views compete. If only rows of the other view competed in training, this verdict does not hold: use "
        '--candidates cross (in Python, candidates="cross").',
    )


def one_direction(m: Measured) -> tuple[str, ...]:
    """A warning if the mean embedding is long, so that all scores are high."""
    if m.mean_cosine <= THRESHOLDS.shared:
        return ()
    return (
        f"All embeddings share one direction: the mean cosine of different items is {number(m.mean_cosine, 2)}. So "
        "their scores differ little, and any temperature that fits is low. To see what fits without this direction, "
        "subtract the mean row from z_i and z_j and diagnose again. An untrained encoder gives such embeddings too.",
    )


def sides(m: Measured) -> tuple[str, str]:
    """What the rows of both views are called."""
    return ("queries", "documents") if m.towers else ("rows of z_i", "rows of z_j")


def layout_note(m: Measured, settings: DiagnosisSettings) -> tuple[str, ...]:
    """Which rows competed, where the input decided it."""
    if not m.towers:
        return ()
    if settings.candidates == "views":
        return ("Queries and documents all compete with each other here (candidates views).",)
    return ("Queries and documents: each query competes for the documents of its batch (candidates cross).",)


def too_many_twins(m: Measured) -> bool:
    """Whether more rows have a twin in the file than the rules and chance allow."""
    return m.overlaps.twin_share - m.near_by_chance > THRESHOLDS.crowded


def twin_words(m: Measured) -> str:
    """How many rows have a twin, on the side that has more of them."""
    o = m.overlaps
    side, name = max(zip((o.queries, o.documents), sides(m), strict=True), key=lambda pair: pair[0].near)
    exact = f", {side.exact:,} of them an exact one" if side.exact else ""
    return f"{number(100.0 * side.near, 0)} % of the {name} have a twin among the {o.rows:,}{exact}"


def file_notes(m: Measured) -> tuple[str, ...]:
    """What the whole file holds that training should know."""
    o, notes = m.overlaps, []
    for side, name in zip((o.queries, o.documents), sides(m), strict=True):
        told = side.repeated - side.exact
        if told > THRESHOLDS.crowded * o.rows:
            notes.append(
                f"Of the {name}, {told:,} of {o.rows:,} occur in several pairs. Here these never compete; give their "
                "pairs equal ids in training too."
            )
    if m.towers and o.twins:
        notes.append(
            f"Of the {o.above:,} negatives that score at or above their positive, {o.twins:,} are twins of it: false "
            "negatives, which equal ids remove."
        )
    if m.towers and o.hubs:
        notes.append(
            f"Hubs: {len(o.hubs)} documents win for at least {o.fewest_wins} queries each that they do not belong to."
        )
    return tuple(notes)


def crowded_side(m: Measured) -> str:
    """Which side lies closer together."""
    gap = m.overlaps.documents.nearest - m.overlaps.queries.nearest
    names = sides(m)
    if abs(gap) <= THRESHOLDS.gap:
        return f"Neither side is crowded more than the other: {names[0]} and {names[1]} lie equally close together."
    return f"The {names[gap > 0]} are the crowded side: they lie closer together than the {names[gap < 0]}."


def sizes_sentence(m: Measured, settings: DiagnosisSettings) -> str:
    """How the temperature changes with the batch size, and what that says of the batch size in use."""
    known = [fit for fit in m.sizes if fit.known]
    if len(known) < 2:
        return "Too few positives are beaten to follow the temperature over the batch size."
    first, last = known[0], known[-1]
    said = (
        f"From batches of {first.batch_size:,} to {last.batch_size:,} pairs the temperature that fits goes from "
        f"{temperature(first.temperature)} to {temperature(last.temperature)}."
    )
    size = settings.batch_size
    if size is None or size <= last.batch_size or len(known) < 3:
        return said
    line = np.polyfit(np.log([f.batch_size for f in known]), np.log([f.temperature for f in known]), 1)
    there = float(np.exp(np.polyval(line, np.log(size))))
    return f"{said} Continued to your batches of {size:,}, that trend gives about {temperature(there)}."


def from_all_pairs(m: Measured) -> str:
    """The temperature at the smallest batch size at which enough positives are beaten; empty if none has one."""
    fit = next((fit for fit in m.sizes if fit.known and fit.batch_size > m.batch_size), None)
    if fit is None:
        return ""
    return (
        f"In batches of {fit.batch_size:,} pairs {fit.beaten:,} of {fit.anchors:,} positives are beaten, and a "
        f"temperature of about {temperature(fit.temperature)} fits (95 %: {tau_span(fit.interval)})."
    )
