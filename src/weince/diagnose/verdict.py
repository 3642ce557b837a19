"""Turn numbers into advice in words; `lines` has the code and commands to copy.

xi < 0 means a bounded tail; the endpoint is ``threshold - sigma / xi``.
"""

from dataclasses import dataclass, replace

import numpy as np

from weince.diagnose.lines import both_code, link_code, link_train, short, softmax_code, softmax_train
from weince.diagnose.measure import Measured
from weince.diagnose.settings import Settings
from weince.diagnose.tables import number, temperature
from weince.evt import BatchXi
from weince.evt.link_rivals import Explanation
from weince.scores import CROWD


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the verdicts. They are conventions, not laws; the page prints them.

    Attributes:
        worth: Smallest held-out gain, in nats per anchor, that makes a change worth trying: 0.02 makes the
            positive 2 % likelier.
        alpha: Level that both p-values of the link test must reach.
        crowded: Largest share of crowded anchors at which the link test is worth reading.
        gap: Largest excess of the mean cosine within views over that across views at which rows of one view should
            compete with each other.
    """

    worth: float = 0.02
    alpha: float = 0.05
    crowded: float = 0.05
    gap: float = 0.05

    @property
    def lines(self) -> tuple[str, ...]:
        """The rules, one sentence each."""
        return (
            f"If more than {100 * self.crowded:g} % of the anchors have a candidate other than their positive within "
            f"a shortfall of {CROWD:g}, the advice is to look at these first, whatever the link test says.",
            f"Another link is advised only if its held-out gain over softmax at its best temperature is at "
            f"least {self.worth:g} nats per anchor, the 95 % interval of the gain lies above 0, and both "
            f"p-values (likelihood ratio by parametric bootstrap, clustered t) are at most {self.alpha:g}.",
            "If your temperature is known and costs more than the link would gain, the temperature comes first.",
            f"Pairs or anchors of different difficulty (softmax whose temperature varies from pair to pair, or from "
            f"anchor to anchor) explain a gain as well as a bounded tail unless the blend gains at least "
            f"{self.worth:g} nats over the former, adds as much to the latter, and both intervals lie above 0; they "
            f"explain it better if they gain over the blend, or add to it, in the same sense.",
            f"A gain of at least {self.worth:g} nats that misses one of the other conditions is called "
            f"unclear.",
            f"Another temperature is advised if softmax at the temperature you trained with (the option "
            f"temperature) loses more than {self.worth:g} nats per anchor against its best temperature.",
            f"No advice is given when softmax at its best temperature beats a random pick by less than "
            f"{self.worth:g} nats per anchor: the two rows of a pair then have nothing to do with each other.",
            f"If the mean cosine within views exceeds that of negatives across views by more than {self.gap:g}, a "
            "note says that the two views may come from two encoders, which need the option candidates.",
            "A tail is called bounded if the whole 95 % interval of ξ (over batches) lies below 0, "
            "heavy if it lies above 0, and undecided otherwise.",
        )


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Verdict:
    """What to tell the user about one model.

    Attributes:
        kind: "crowded", "link", "either" (the link, or pairs of different difficulty), "varying" (such pairs
            rather than the link), "both" (temperature first, then link), "temperature", "nothing", "unclear",
            "separated" or "uninformative".
        headline: One sentence: what to do.
        worth: What that is worth, without statistical terms; empty if there is no advice.
        softmax: How much better than softmax the blended link fits.
        link: Which link and parameters fit.
        rivals: Whether pairs or anchors of different difficulty explain the same gain.
        tail: Whether the tail is bounded, and whether it describes crowded anchors rather than hard negatives.
        crowded: Share of anchors that have another item within a shortfall of 0.01.
        notes: Sentences to read before the advice is followed.
        advice: What to change, in words.
        code: The same as Python code, or None.
        train: The same as commands, one per line, or None.
    """

    kind: str
    headline: str
    worth: str
    softmax: str
    link: str
    rivals: str
    tail: str
    crowded: float
    notes: tuple[str, ...]
    advice: str
    code: str | None = None
    train: str | None = None


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


def _lost(m: Measured) -> float:
    """What the temperature in use costs, in nats per anchor; 0 when it is not known."""
    return 0.0 if m.curves is None or m.curves.current_loss is None else m.curves.current_loss


def tail_kind(xi: BatchXi) -> str:
    """ "bounded", "heavy" or "undecided"."""
    low, high = xi.xi_interval
    return "bounded" if high < 0.0 else "heavy" if low > 0.0 else "undecided"


def crowd_text(m: Measured) -> str:
    """The share of crowded anchors in percent."""
    return f"{number(100 * m.crowded, 1)} %"


def _tail_sentence(m: Measured, rules: Thresholds) -> str:
    """Whether the tail is bounded, with a warning if too many anchors are crowded."""
    if m.crowded <= rules.crowded:
        return _shape_sentence(m)
    return (
        f"{_shape_sentence(m)} But {crowd_text(m)} of the anchors have another item within a shortfall of {CROWD:g}: "
        "part of the embeddings coincide (a collapse of part of the encoder, or duplicates in the data), and the "
        "tail's figures describe that crowd rather than hard negatives."
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
            f"The tail of the hardest negatives is bounded: {numbers}. It ends at a cosine of about "
            f"{number(xi.fit.endpoint)} (95 %: {ends}); the geometric cap is 1."
        )
    if kind == "heavy":
        return f"The tail of the hardest negatives does not look bounded at this level: {numbers}."
    return f"Whether the tail of the hardest negatives is bounded is undecided: {numbers} covers 0."


def _softmax_sentence(m: Measured) -> str:
    t = m.link
    if t.separated:
        return "Every fitted anchor already ranks its positive first, so no finite temperature is best."
    if t.lam == 0.0:
        return (
            "Nothing: fitted to half of the batches, the blended link turns into softmax itself (λ = 0), so the "
            f"gain is exactly 0 ({p_words(t.lr_p_value)})."
        )
    times = number(t.gain_ratio, 2)
    if t.gain <= 0.0:
        return (
            "Nothing: at its best temperature, softmax fits the held-out batches as well as the link or better "
            f"(gain of the link: {number(t.gain, 4)} nats per anchor; 95 %: {span(t.gain_interval)}; "
            f"{p_words(t.lr_p_value)} by likelihood ratio, {p_words(t.t_p_value)} by t over batches)."
        )
    return (
        f"At its best temperature, softmax leaves {number(t.gain)} nats per anchor on the table (held out; "
        f"95 %: {span(t.gain_interval)}; {p_words(t.lr_p_value)} by likelihood ratio, {p_words(t.t_p_value)} by "
        f"t over batches): the blended link makes the positive {times} times as likely."
    )


def _link_sentence(m: Measured) -> str:
    t = m.link
    if t.separated:
        return "No link can be told from another here."
    return (
        f"The best blend has λ = {number(t.lam)} (95 %: {span(t.lam_interval)}) and τ = {temperature(t.tau)} "
        f"(95 %: {tau_span(t.tau_interval)}); the best plain softmax has τ₀ = {temperature(t.tau0)} "
        f"(95 %: {tau_span(t.tau0_interval)})."
    )


def _rival(m: Measured) -> str:
    """The better one of the two rivals, as a word."""
    assert m.rivals is not None
    return "pairs" if m.rivals.varying is m.rivals.pairs else "anchors"


def _only_adds(m: Measured, rules: Thresholds) -> bool:
    """Whether no rival is certain to beat the blend, so that only what varying anchors add to it is certain."""
    assert m.rivals is not None
    over_anchors, over_pairs = m.rivals.blend_over_anchors, m.rivals.blend_over_pairs
    return all(gain.gain > -rules.worth or gain.interval[1] >= 0.0 for gain in (over_anchors, over_pairs))


def _explained(m: Measured, rules: Thresholds) -> Explanation:
    return "softmax" if m.rivals is None else m.rivals.explanation(rules.worth)


def _rivals_sentence(m: Measured, rules: Thresholds) -> str:
    r = m.rivals
    if r is None:
        return "Nothing to explain: softmax has no best temperature here."
    who = _rival(m)
    said = {
        "softmax": f"Nothing to explain: neither a link nor a varying temperature gains {rules.worth:g} nats.",
        "cap": f"A bounded tail explains it better than {who} of different difficulty do.",
        "varying": f"{who.capitalize()} of different difficulty explain it better than a bounded tail does.",
        "both": f"A bounded tail and {who} of different difficulty both have a part in it.",
        "either": f"{who.capitalize()} of different difficulty explain it as well as a bounded tail does.",
    }[_explained(m, rules)]
    if _explained(m, rules) == "varying" and _only_adds(m, rules):
        said = "A bounded tail explains this gain in part: anchors of different difficulty explain the rest."
    return (
        f"{said} Softmax whose temperature varies gains {number(r.pairs.gain.gain)} nats if it varies from pair "
        f"to pair and {number(r.anchors.gain.gain)} if it varies from anchor to anchor; the blend gains "
        f"{number(r.blend.gain)}, and {number(r.both.gain.gain)} if its temperature varies from anchor to anchor."
    )


def _temperature_words(m: Measured, settings: Settings, rules: Thresholds) -> tuple[str, bool]:
    """What to say about the temperature, and whether the one in use is known to be off."""
    curves = m.curves
    assert curves is not None
    around = tau_span(curves.tau_range)
    if settings.temperature is None or curves.current_loss is None:
        return (
            f"Any temperature from {around} describes these scores within {rules.worth:g} nats of the best; "
            f"if yours lies outside, {temperature(m.link.tau0)} is the one to try.",
            False,
        )
    used, loss = short(settings.temperature), number(curves.current_loss)
    off = curves.current_loss > rules.worth
    if off:
        words = f"At your temperature of {used}, softmax loses {loss} nats per anchor against its best, τ₀."
    else:
        words = f"Your temperature of {used} is within {rules.worth:g} nats of the best ({loss} lost)."
    return words, off


def _times(nats: float) -> str:
    """A gain in nats as a ratio of likelihoods, in words."""
    if nats > np.log(1000.0):
        return "more than 1,000 times as likely"
    return f"{number(float(np.exp(nats)), 2)} times as likely"


def _temperature_headline(m: Measured, settings: Settings, off: bool) -> str:
    """What to do about the temperature, in one sentence."""
    best, used = f"{m.link.tau0:.2g}", settings.temperature
    if used is None:
        return f"Use a temperature of about {best}."
    if not off:
        return f"Keep your temperature of {short(used)}."
    return f"{'Lower' if used > m.link.tau0 else 'Raise'} the temperature from {short(used)} to about {best}."


def _temperature_worth(m: Measured, settings: Settings, rules: Thresholds, off: bool) -> str:
    """What the advice about the temperature is worth."""
    assert m.curves is not None
    used, little = settings.temperature, f"{100 * np.expm1(rules.worth):.0f} %"
    if used is None:
        return f"Any temperature from {tau_span(m.curves.tau_range)} is as good, within {little}."
    if not off:
        return f"No other temperature makes the positive more than {little} likelier."
    return (
        f"On these scores, that makes the positive {_times(_lost(m))} as your temperature does. Training changes the "
        f"scores: train at {_halfway(m, used)} too, which lies between the two, and let a validation set decide."
    )


def _halfway(m: Measured, used: float) -> str:
    """Geometric mean of the temperature in use and the fitted one."""
    return f"{np.sqrt(used * m.link.tau0):.2g}"


Said = tuple[str, str, str, str, float, tuple[str, ...]]
"""Fields of a `Verdict` that do not depend on the advice: softmax, link, rivals, tail, crowded and notes."""


def _two_encoders(m: Measured, settings: Settings, rules: Thresholds) -> tuple[str, ...]:
    """A warning if the views lie apart and rows of one view compete with each other."""
    if settings.candidates == "cross" or m.gap <= rules.gap:
        return ()
    return (
        f"The two views lie apart: the mean cosine of different items is {number(m.gap, 2)} higher within a view "
        "than across views, as with two encoders (image and text, query and document). Here all other rows of both "
        "views compete. If only rows of the other view competed in training, this verdict does not hold: use "
        '--candidates cross (in Python, candidates="cross").',
    )


def decide(m: Measured, settings: Settings, rules: Thresholds = THRESHOLDS) -> Verdict:
    """The verdict on one model."""
    said = (
        _softmax_sentence(m), _link_sentence(m), _rivals_sentence(m, rules), _tail_sentence(m, rules), m.crowded,
        _two_encoders(m, settings, rules),
    )  # fmt: skip
    if m.crowded > rules.crowded:
        return _crowded(m, said)
    if m.link.separated:
        headline = "No answer: every positive that was fitted wins."
        return Verdict("separated", headline, "", *said, _harder(m, settings))
    if m.curves is None or m.curves.over_chance < rules.worth:
        advice = "Check that row k of z_i and row k of z_j belong together."
        if m.by_label:
            advice = (
                "Check that the labels belong to the rows of z, and that rows with equal labels are alike."
            )
        if said[-1]:
            advice = (
                "Use --candidates cross if only rows of the other view competed in training (see the note)."
            )
        headline = "No answer: a higher cosine does not make a positive likelier here."
        return Verdict("uninformative", headline, "", *said, advice)
    if _explained(m, rules) == "varying":
        return _varying(m, settings, rules, said)
    if m.link.gain >= rules.worth:
        return _another_link(m, settings, rules, said)
    return _keep_softmax(m, settings, rules, said)


def _about_temperature(
    kind: str,
    m: Measured,
    settings: Settings,
    rules: Thresholds,
    said: Said,
    advice: str,
    *,
    rest: str = "",
) -> Verdict:
    """A verdict whose headline is about the temperature; `rest` follows the sentence on what that is worth."""
    _, off = _temperature_words(m, settings, rules)
    worth = " ".join(filter(None, [_temperature_worth(m, settings, rules, off), rest]))
    headline, used = _temperature_headline(m, settings, off), settings.temperature
    if used is not None and not off:  # a temperature known to be good needs no code
        return Verdict(kind, headline, worth, *said, advice)
    candidates = settings.candidates
    commands = [softmax_train(m.link.tau0, candidates)]
    if used is not None:
        commands.append(softmax_train(float(_halfway(m, used)), candidates))
    code = softmax_code(m.link.tau0, candidates)
    return Verdict(kind, headline, worth, *said, advice, code, "\n".join(commands))


def _harder(m: Measured, settings: Settings) -> str:
    """What to do if every positive wins."""
    if settings.batch_size is not None:
        return (
            f"Nothing follows from batches of {m.batch_size:,} pairs. Leave out the batch size, and larger "
            "batches are tried; if the positives win there too, use a harder evaluation set."
        )
    if m.tried:
        sizes = ", ".join(f"{x:,}" for x in (*m.tried[1:], m.batch_size))
        return (
            f"Larger batches were tried ({sizes} pairs), and every positive that was fitted wins there too. Nothing "
            "follows from this: use a harder evaluation set, or more pairs."
        )
    return "Nothing follows from this: use more pairs, so that batches can be larger, or a harder evaluation set."


def _varying(m: Measured, settings: Settings, rules: Thresholds, said: Said) -> Verdict:
    """The verdict if a temperature that varies explains the scores better than the blend: keep softmax."""
    assert m.rivals is not None
    who, found = _rival(m), m.rivals.varying
    rest = (
        f"Some {who} are much harder than others: that explains these scores better than another link does."
    )
    if _only_adds(m, rules):
        who, found = "anchors", m.rivals.anchors
        rest = "Some anchors are much harder than others, and no other link than softmax explains that."
    words, off = _temperature_words(m, settings, rules)
    advice = (
        f"{words} Keep softmax: another link is not needed to explain these scores. They show {who} that differ: "
        f"from one to the next, the temperature that fits varies by a factor of about "
        f"{number(float(np.exp(found.sd)), 1)} either way (standard deviation of its logarithm: "
        f"{number(found.sd, 2)}). Find out what makes the hard {who} hard: their views, their labels, or what "
        "they show."
    )
    kind = "temperature" if off else "varying"
    return _about_temperature(kind, m, settings, rules, said, advice, rest=rest)


def _crowded(m: Measured, said: Said) -> Verdict:
    """The verdict if part of the embeddings coincide: this comes before any other change."""
    headline = (
        f"Look at the embeddings first: {crowd_text(m)} of the anchors all but coincide with another item."
    )
    advice = (
        "First find out which items these are. If they are duplicates, remove them or give them equal ids. If "
        "they differ, the encoder has hardly been trained, or part of it has collapsed: a diagnosis of earlier "
        "checkpoints tells since when, one of an encoder trained with InfoNCE whether the loss does it. Then "
        "diagnose again: the link and the temperature above are fitted to these items too, so neither is worth "
        "a change yet."
    )
    return Verdict("crowded", headline, "", *said, advice)


def _another_link(m: Measured, settings: Settings, rules: Thresholds, said: Said) -> Verdict:
    """The verdict if the blend gains enough: it depends on how certain the gain is, and on the temperature."""
    t, more = m.link, _times(m.link.gain)
    code = link_code(t.lam, t.tau, settings.candidates)
    words, off = _temperature_words(m, settings, rules)
    small_p = t.lr_p_value <= rules.alpha and t.t_p_value <= rules.alpha  # False for NaN
    if not (small_p and t.gain_interval[0] > 0.0):
        advice = f"{words} Give it more pairs before changing the link."
        rest = f"Another link might make the positive {more}, but the evidence for it is thin."
        return _about_temperature("unclear", m, settings, rules, said, advice, rest=rest)
    if _explained(m, rules) == "either":
        who = _rival(m)
        advice = (
            f"{words} These scores give no reason to change the link: easy and hard {who} explain them as well. If "
            f"you try it ({code.splitlines()[-1].removeprefix('loss = ')}), compare several seeds on a validation "
            "set."
        )
        rest = (
            f"Softmax with one temperature leaves a factor of {number(t.gain_ratio, 2)}, which easy and hard {who} "
            "explain as well as another link does."
        )
        return _about_temperature("either", m, settings, rules, said, advice, rest=rest)
    if off and _lost(m) > t.gain:
        advice = f"{words} Set it there first; the link is the smaller step, and comes second."
        rest = f"Another link would then make it {more} again."
        first = _about_temperature("both", m, settings, rules, said, advice, rest=rest)
        return replace(first, code=both_code(t.lam, t.tau, t.tau0, settings.candidates))
    advice = f"Worth a try in the next training run. {words}"
    if settings.temperature is None:
        advice += (
            " Say which temperature you trained with before you change the link: one that is off can make "
            "for a gain like this."
        )
    headline = "Try another link: it fits these scores better than softmax at any temperature."
    worth = f"It makes the positive {more} as softmax at its best temperature does."
    train = link_train(t.lam, t.tau, settings.candidates)
    return Verdict("link", headline, worth, *said, advice, code, train)


def _keep_softmax(m: Measured, settings: Settings, rules: Thresholds, said: Said) -> Verdict:
    """The verdict if the blend gains too little: keep softmax, perhaps at another temperature."""
    t = m.link
    words, off = _temperature_words(m, settings, rules)
    if off:
        return _about_temperature(
            "temperature", m, settings, rules, said, words, rest="No other link is needed."
        )
    advice = f"{words} No other link is worth the change."
    if t.gain_interval[1] >= rules.worth:
        advice += f" A gain of up to {number(t.gain_interval[1])} is not excluded; more pairs would tell."
    return _about_temperature("nothing", m, settings, rules, said, advice, rest="No other link is needed.")
