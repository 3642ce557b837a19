"""Decide what to advise on one model, and say it in words; `lines` has the code and commands to copy."""

from dataclasses import dataclass, replace

import numpy as np

from weince.diagnose.cells import number
from weince.diagnose.diagnosis_settings import DiagnosisSettings
from weince.diagnose.lines import both_code, ids_code, link_code, link_train, softmax_code, softmax_train
from weince.diagnose.measure import Measured
from weince.diagnose.rules import THRESHOLDS
from weince.diagnose.wording import (
    crowd_text,
    explained,
    file_notes,
    from_all_pairs,
    halfway,
    layout_note,
    link_sentence,
    lost,
    one_direction,
    only_adds,
    rival,
    rivals_sentence,
    sizes_sentence,
    softmax_sentence,
    tail_sentence,
    temperature_headline,
    temperature_words,
    temperature_worth,
    times,
    too_crowded,
    too_many_twins,
    twin_words,
    two_encoders,
)
from weince.evt.link_varying import MOST_SPREAD


@dataclass(frozen=True)
class Diagnosis:
    """What to tell the user about one model."""

    # "crowded", "link", "either" (the link, or pairs of different difficulty), "varying" (such pairs rather than
    # the link), "both" (temperature first, then link), "temperature", "nothing", "unclear", "separated", "few"
    # (beaten positives), "twins" or "uninformative"
    kind: str
    headline: str  # one sentence: what to do
    worth: str  # what that is worth, without statistical terms; empty if there is no advice
    softmax: str  # how much better than softmax the blended link fits
    link: str  # which link and parameters fit
    rivals: str  # whether pairs or anchors of different difficulty explain the same gain
    tail: str  # whether the tail is bounded, and whether it describes crowded embeddings rather than hard negatives
    sizes: str  # how the temperature changes with the batch size
    crowded: float  # share of embeddings with one of another item within a shortfall of 0.01 in their batch
    notes: tuple[str, ...]  # sentences to read before the advice is followed
    advice: str  # what to change, in words
    code: str | None = None  # the same as Python code, or None
    train: str | None = None  # the same as commands, one per line, or None


Said = tuple[str, str, str, str, str, float, tuple[str, ...]]
"""Fields of a `Diagnosis` that do not depend on the advice: softmax, link, rivals, tail, sizes, crowded and notes."""


def decide(m: Measured, settings: DiagnosisSettings) -> Diagnosis:
    """The verdict on one model."""
    said = (
        softmax_sentence(m), link_sentence(m), rivals_sentence(m), tail_sentence(m),
        sizes_sentence(m, settings), m.crowded,
        (*layout_note(m, settings), *(two_encoders(m, settings) or one_direction(m)), *file_notes(m)),
    )  # fmt: skip
    if too_crowded(m):
        return _crowded(m, said)
    if too_many_twins(m):
        return _twins(m, settings, said)
    if m.equal:
        advice = (
            "Every positive is a copy of its anchor, so it wins at any temperature. Embed two views of each item, as "
            "in training: two augmentations, two dropout masks, or the two sentences of a pair."
        )
        return Diagnosis("separated", "No answer: z_i and z_j are equal.", "", *said, advice)
    if m.link.separated:
        tie = " or coincides with its anchor" if m.beaten else ""
        headline = f"No answer: every positive that was fitted wins{tie}."
        return Diagnosis("separated", headline, from_all_pairs(m), *said, _harder(m))
    if m.beaten < THRESHOLDS.beaten:
        headline = f"Too few to tell: {m.beaten} of {m.fitted:,} positives {'is' if m.beaten == 1 else 'are'} beaten."
        advice = (
            f"A negative has a higher score than the positive for {m.beaten} of the fitted anchors, and the "
            f"temperature and the link below are fitted to these alone. {_harder(m)}"
        )
        return Diagnosis("few", headline, from_all_pairs(m), *said, advice)
    if m.curves is None or m.curves.over_chance < THRESHOLDS.worth:
        advice = "Check that row k of z_i and row k of z_j belong together."
        if m.by_label:
            advice = (
                "Check that the labels belong to the rows of z, and that rows with equal labels are alike."
            )
        if two_encoders(m, settings):
            advice = (
                "Use --candidates cross if only rows of the other view competed in training (see the note)."
            )
        headline = "No answer: a higher cosine does not make a positive likelier here."
        return Diagnosis("uninformative", headline, "", *said, advice)
    if explained(m) == "varying":
        return _varying(m, settings, said)
    if m.link.gain >= THRESHOLDS.worth:
        return _another_link(m, settings, said)
    return _keep_softmax(m, settings, said)


def _about_temperature(
    kind: str, m: Measured, settings: DiagnosisSettings, said: Said, advice: str, *, rest: str = ""
) -> Diagnosis:
    """A verdict whose headline is about the temperature; `rest` follows the sentence on what that is worth."""
    _, off = temperature_words(m, settings)
    worth = " ".join(filter(None, [temperature_worth(m, settings, off), rest]))
    headline, used = temperature_headline(m, settings, off), settings.temperature
    if used is not None and not off:  # a temperature known to be good needs no code
        return Diagnosis(kind, headline, worth, *said, advice)
    candidates = settings.candidates
    commands = [softmax_train(m.link.tau0, candidates)]
    if used is not None:
        commands.append(softmax_train(float(halfway(m, used)), candidates))
    code = softmax_code(m.link.tau0, candidates)
    return Diagnosis(kind, headline, worth, *said, advice, code, "\n".join(commands))


def _harder(m: Measured) -> str:
    """What to do if too few positives are beaten, or none."""
    sizes = ", ".join(f"{x:,}" for x in (*m.tried[1:], m.batch_size))
    tried = (
        f"Larger batches were tried ({sizes} pairs): fewer than {THRESHOLDS.beaten} are beaten there too. "
    )
    seen = (
        "If the model was trained on these pairs, diagnose held-out ones: its own it ranks nearly all first. "
    )
    said = f"{tried if m.tried else ''}{seen}"
    if from_all_pairs(m):
        return f"{said}Else train at that temperature, in batches as large; no link can be tested there."
    return (
        f"{said}Else change neither temperature nor link yet: use harder negatives (a data set whose items are more "
        "alike), or more pairs, which allow larger batches."
    )


def _varying(m: Measured, settings: DiagnosisSettings, said: Said) -> Diagnosis:
    """The verdict if a temperature that varies explains the scores better than the blend: keep softmax."""
    assert m.rivals is not None
    who, found = rival(m), m.rivals.varying
    rest = (
        f"Some {who} are much harder than others: that explains these scores better than another link does."
    )
    if only_adds(m):
        who, found = "anchors", m.rivals.anchors
        rest = "Some anchors are much harder than others, and no other link than softmax explains that."
    words, off = temperature_words(m, settings)
    most = " or more" if found.sd == MOST_SPREAD else ""
    advice = (
        f"{words} Keep softmax: another link is not needed to explain these scores. They show {who} that differ: "
        f"from one to the next, the temperature that fits varies by a factor of about "
        f"{number(float(np.exp(found.sd)), 1)}{most} either way (standard deviation of its logarithm: "
        f"{number(found.sd, 2)}{most}). Find out what makes the hard {who} hard: rows that do not belong "
        "together, their views, or what they show."
    )
    kind = "temperature" if off else "varying"
    return _about_temperature(kind, m, settings, said, advice, rest=rest)


def _twins(m: Measured, settings: DiagnosisSettings, said: Said) -> Diagnosis:
    """The verdict if much of the file occurs twice: in training these are false negatives."""
    headline = f"Tell the duplicates apart first: {twin_words(m)}."
    fits = np.isfinite(m.link.tau0) and m.beaten >= THRESHOLDS.beaten
    advice = (
        "In training, twins are false negatives of each other. Remove them, or give them equal ids, here and in the "
        "loss. If they are different items, the encoder maps them onto one point: part of it has collapsed, or it "
        "has hardly been trained."
    )
    worth = "Exact twins did not compete in this diagnosis"
    if not fits:
        return Diagnosis("twins", headline, f"{worth}.", *said, advice)
    worth += f": without them, softmax fits best at a temperature of about {m.link.tau0:.2g}."
    return Diagnosis("twins", headline, worth, *said, advice, ids_code(m.link.tau0, settings.candidates))


def _crowded(m: Measured, said: Said) -> Diagnosis:
    """The verdict if part of the embeddings coincide: this comes before any other change."""
    headline = (
        f"Look at the embeddings first: {crowd_text(m)} of them all but coincide with that of another item."
    )
    advice = (
        "First find out which items these are. If they are duplicates, remove them or give them equal ids. If "
        "they differ, the encoder has hardly been trained, or part of it has collapsed: a diagnosis of earlier "
        "checkpoints tells since when, one of an encoder trained with InfoNCE whether the loss does it. Then "
        "diagnose again."
    )
    if np.isfinite(m.link.tau):
        advice += " The link and the temperature below are fitted to these items too: neither is worth a change yet."
    return Diagnosis("crowded", headline, "", *said, advice)


def _another_link(m: Measured, settings: DiagnosisSettings, said: Said) -> Diagnosis:
    """The verdict if the blend gains enough: it depends on how certain the gain is, and on the temperature."""
    t, more = m.link, times(m.link.gain)
    code = link_code(t.lam, t.tau, settings.candidates)
    words, off = temperature_words(m, settings)
    small_p = t.lr_p_value <= THRESHOLDS.alpha and t.t_p_value <= THRESHOLDS.alpha  # False for NaN
    if not (small_p and t.gain_interval[0] > 0.0):
        advice = f"{words} Give it more pairs before changing the link."
        rest = f"Another link might make the positive {more}, but the evidence for it is thin."
        return _about_temperature("unclear", m, settings, said, advice, rest=rest)
    if explained(m) == "either":
        who = rival(m)
        advice = (
            f"{words} These scores give no reason to change the link: easy and hard {who}, or some wrong pairs, "
            f"explain them as well. If you try it ({code.splitlines()[-1].removeprefix('loss = ')}), compare several "
            "seeds on a validation set."
        )
        rest = (
            f"Softmax with one temperature leaves a factor of {number(t.gain_ratio, 2)}, which easy and hard {who} "
            "explain as well as another link does."
        )
        return _about_temperature("either", m, settings, said, advice, rest=rest)
    if off and lost(m) > t.gain:
        advice = f"{words} Set it there first; the link is the smaller step, and comes second."
        rest = f"Another link would then make it {more} again."
        first = _about_temperature("both", m, settings, said, advice, rest=rest)
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
    return Diagnosis("link", headline, worth, *said, advice, code, train)


def _keep_softmax(m: Measured, settings: DiagnosisSettings, said: Said) -> Diagnosis:
    """The verdict if the blend gains too little: keep softmax, perhaps at another temperature."""
    t = m.link
    words, off = temperature_words(m, settings)
    if off:
        return _about_temperature("temperature", m, settings, said, words, rest="No other link is needed.")
    advice = f"{words} No other link is worth the change."
    if t.gain_interval[1] >= THRESHOLDS.worth:
        advice += f" A gain of up to {number(t.gain_interval[1])} is not excluded; more pairs would tell."
    return _about_temperature("nothing", m, settings, said, advice, rest="No other link is needed.")
