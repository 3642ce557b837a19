"""Measurements around the link test, the rules of the verdict, and the code it prints."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from diagnose.synthetic import crowd, small, two_encoders, views
from weince import BlendLink, InfoNCELoss, LinkLoss, WeibitLoss, evt
from weince.diagnose.bank import build_bank
from weince.diagnose.cells import MINUS, number, temperature
from weince.diagnose.decision import decide
from weince.diagnose.diagnosis_settings import QUICK
from weince.diagnose.figures_link import forest_figures, mean_over, quantities, trend_figures
from weince.diagnose.lines import link_code, link_train, softmax_code, softmax_train
from weince.diagnose.measure import measure
from weince.diagnose.reading import InputError, make_pairs, pair_by_label
from weince.diagnose.rules import THRESHOLDS
from weince.diagnose.style import Gallery
from weince.diagnose.wording import p_words, tail_kind, times
from weince.evt import Gain, LinkRivals, VaryingLink
from weince.lab.paper.measurements import measure_paper
from weince.lab.paper.panels import pot_figures

FAST = replace(QUICK, bootstraps=50, null_draws=20, tail_bootstraps=20, points=5)


@pytest.fixture(scope="module")
def measured():
    return measure(small(), FAST)


@pytest.fixture(scope="module")
def crowded():
    """Measurements of a model with a fifth of its items in one place."""
    return measure(make_pairs("crowd", *crowd(0.2)), FAST)


def run(code):
    scope = {}
    exec(code, scope)
    return scope["loss"]


@pytest.mark.parametrize(("lam", "tau"), [(0.0, 0.5), (0.25, 0.1), (0.5, 0.05), (0.9, 0.4)])
def test_the_printed_link_has_the_logits_of_the_test(lam, tau):
    loss = run(link_code(lam, tau))
    assert isinstance(loss, LinkLoss)
    assert isinstance(loss.link, BlendLink)
    s = torch.linspace(-1.0, 0.99, 200, dtype=torch.float64)
    wanted = ((1 - lam) * s - lam * torch.log(1 - s)) / tau
    # BlendLink adds 1e-6 inside the logarithm: 1e-4 of 1 - s = 0.01. beta is printed to three digits.
    torch.testing.assert_close(loss.link.logit((1 - s)[None])[0], wanted, rtol=6e-3, atol=1e-3 / tau)


def test_a_pure_shortfall_is_printed_as_weibit():
    loss = run(link_code(1.0, 0.25))
    assert isinstance(loss, WeibitLoss)
    assert loss.beta == 4.0


def test_the_printed_softmax_has_the_temperature():
    loss = run(softmax_code(0.0712))
    assert isinstance(loss, InfoNCELoss)
    assert loss.temperature == 0.0712


@pytest.mark.parametrize(("lam", "tau"), [(0.25, 0.1), (0.5, 0.0512), (1.0, 0.25)])
def test_the_printed_command_trains_with_the_printed_loss(lam, tau):
    """The lab parses the command that the library prints."""
    from weince.lab import settings
    from weince.lab.configure import build_loss
    from weince.lab.tasks.images.config import VisionRun

    for command, code in (
        (link_train(lam, tau), link_code(lam, tau)),
        (softmax_train(tau), softmax_code(tau)),
    ):
        arguments = command.removeprefix("weince train ").split()
        asked = settings.read(VisionRun, arguments, command="weince train", examples="").loss
        z_i, z_j = (torch.randn(16, 4, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
        # Numbers are printed to three digits, and the command has 1 / beta instead of beta.
        torch.testing.assert_close(build_loss(asked)(z_i, z_j), run(code)(z_i, z_j), rtol=0.02, atol=0)


def test_the_printed_command_for_two_encoders_trains_with_the_printed_loss():
    from weince.lab import settings
    from weince.lab.configure import build_loss
    from weince.lab.tasks.sentences.config import TextRun

    for command, code in (
        (link_train(0.25, 0.1, "cross"), link_code(0.25, 0.1, "cross")),
        (link_train(1.0, 0.25, "cross"), link_code(1.0, 0.25, "cross")),
        (softmax_train(0.05, "cross"), softmax_code(0.05, "cross")),
    ):
        arguments = [*command.removeprefix("weince train ").split(), "--text", "a.tsv", "--sts", "b.tsv"]
        asked = settings.read(TextRun, arguments, command="weince train", examples="").loss
        assert run(code).candidates == "cross"
        z_i, z_j = (torch.randn(16, 4, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
        right = build_loss(asked, candidates="cross")(z_i, z_j)
        torch.testing.assert_close(right, run(code)(z_i, z_j), rtol=0.02, atol=0)


def test_two_encoders_get_the_temperature_that_fits_across_views():
    pairs = make_pairs("two", *two_encoders())
    across = replace(FAST, candidates="cross")
    found = measure(pairs, across)
    bank = evt.link_bank(pairs.z_i, pairs.z_j, batch_size=32, batches=16, candidates="cross", rng=0)
    assert found.link.tau0 == pytest.approx(evt.fit_link(*bank).tau0, rel=0.2)
    verdict = decide(found, replace(across, temperature=found.link.tau0))
    assert verdict.headline.startswith("Keep your temperature")
    assert verdict.notes == ()
    assert 'candidates="cross")' in decide(found, across).code
    assert "weince train --config sentence_pairs --loss" in decide(found, across).train


def test_a_gap_between_the_views_is_a_warning(measured):
    found = measure(make_pairs("two", *two_encoders()), FAST)
    (note,) = decide(found, FAST).notes
    assert "--candidates cross" in note
    assert decide(measured, FAST).notes == ()
    far = measure(make_pairs("two", *two_encoders(gap=3.0)), FAST)
    verdict = decide(far, FAST)
    assert verdict.kind == "uninformative"
    assert verdict.advice.startswith("Use --candidates cross")
    (note,) = verdict.notes  # also where the mean cosine of all is high
    assert "--candidates cross" in note


def test_a_direction_that_all_embeddings_share_is_told():
    items, here, there = np.random.default_rng(0).standard_normal((3, 512, 32))
    z_i, z_j = items + 0.8 * here, items + 0.8 * there
    shared = 15.0 * np.eye(32)[0]
    plain = measure(make_pairs("plain", z_i, z_j), FAST)
    found = measure(make_pairs("shared", z_i + shared, z_j + shared), FAST)
    assert decide(plain, FAST).notes == ()
    u, v = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (z_i + shared, z_j + shared))
    # The mean cosine of different items is the squared length of the mean unit row.
    mean = float((np.concatenate([u, v]).mean(axis=0) ** 2).sum())
    assert found.mean_cosine == pytest.approx(mean, abs=0.005)
    verdict = decide(found, FAST)
    (note,) = verdict.notes
    assert f"the mean cosine of different items is {number(mean, 2)}." in note
    assert verdict.kind == decide(plain, FAST).kind == "nothing"
    # As the note says: the temperature is low because of the direction, and that of the rest without it.
    assert found.link.tau0 == pytest.approx((1.0 - mean) * plain.link.tau0, rel=0.1)
    apart = make_pairs("centred", *((z + shared) - (z + shared).mean(axis=0) for z in (z_i, z_j)))
    assert measure(apart, FAST).link.tau0 == pytest.approx(plain.link.tau0, rel=0.1)
    assert decide(measure(apart, FAST), FAST).notes == ()


def with_link(measured, **changes):
    """A model with a changed result of the link test, and gains that a bounded tail explains."""
    rivals = rivals_of(0.1, 0.05, 0.05, 0.1)
    return replace(measured, link=replace(measured.link, **changes), rivals=rivals)


def rivals_of(blend, anchors, pairs, both):
    """Invented gains with narrow intervals."""

    def gain(value):
        return Gain(value, (value - 0.001, value + 0.001), 0.001)

    def link(value):
        return VaryingLink(gain(value), 0.1, 0.7, (0.6, 0.8), 0.0, True)

    over = blend - anchors, blend - pairs, both - anchors, both - blend
    return LinkRivals(gain(blend), link(anchors), link(pairs), link(both), *(gain(x) for x in over), False)


SURE = {
    "gain": 0.1,
    "gain_interval": (0.05, 0.15),
    "lr_p_value": 0.005,
    "t_p_value": 0.001,
    "lam": 0.4,
    "tau": 0.2,
}


def test_a_clear_gain_asks_for_the_link(measured):
    verdict = decide(with_link(measured, **SURE), FAST)
    assert verdict.kind == "link"
    assert "BlendLink(lam=0.4, beta=5, temperature=0.2)" in verdict.code
    assert (
        verdict.headline == "Try another link: it fits these scores better than softmax at any temperature."
    )
    assert (
        verdict.worth == "It makes the positive 1.11 times as likely as softmax at its best temperature does."
    )
    command = (
        "weince train --data mine.npz --loss.preset link --loss.lam 0.4 --loss.beta 5 --loss.temperature 0.2"
    )
    assert verdict.train == command
    assert "0.100 nats" in verdict.softmax
    assert "Say which temperature you trained with" in verdict.advice


@pytest.mark.parametrize(
    ("gains", "kind", "said"),
    [
        (
            (0.1, 0.05, 0.05, 0.1),
            "link",
            "A bounded tail explains these scores better than anchors of different difficulty do.",
        ),
        (
            (0.1, 0.05, 0.099, 0.1),
            "either",
            "Pairs of different difficulty explain these scores as well as a bounded tail does.",
        ),
        ((0.1, 0.101, 0.05, 0.102), "either", "Anchors of different difficulty explain these scores as well"),
        (
            (0.1, 0.05, 0.15, 0.1),
            "varying",
            "Pairs of different difficulty explain these scores better than a bounded tail",
        ),
        (
            (0.1, 0.2, 0.12, 0.2),
            "varying",
            "Anchors of different difficulty explain these scores better than a bounded tail",
        ),
        (
            (0.1, 0.05, 0.11, 0.13),
            "varying",
            "A bounded tail does not explain all of this gain: anchors of different difficulty explain the rest.",
        ),
        (
            (0.1, 0.05, 0.06, 0.15),
            "link",
            "A bounded tail and pairs of different difficulty both have a part in it.",
        ),
    ],
)
def test_what_explains_the_gain_decides_on_the_link(measured, gains, kind, said):
    model = replace(with_link(measured, **SURE), rivals=rivals_of(*gains))
    verdict = decide(model, FAST)
    assert verdict.kind == kind
    assert verdict.rivals.startswith(said)
    assert f"gains {gains[2]:.3f} nats if it varies from pair to pair and {gains[1]:.3f} if" in verdict.rivals
    who = "pairs" if said.startswith("Pairs") else "anchors"
    about = f"{measured.link.tau0:.2g}"
    if kind == "either":
        assert verdict.headline == f"Use a temperature of about {about}."
        assert f"which easy and hard {who} explain as well as another link does" in verdict.worth
        assert (
            f"no reason to change the link: easy and hard {who}, or some wrong pairs, explain"
            in verdict.advice
        )
        assert "If you try it (LinkLoss(BlendLink(lam=0.4" in verdict.advice
        assert "InfoNCELoss" in verdict.code
        assert decide(model, replace(FAST, temperature=0.2)).kind == "either"
    if kind == "varying":
        assert verdict.headline == f"Use a temperature of about {about}."
        assert f"Some {who} are much harder than others" in verdict.worth
        assert "varies by a factor of about 2.0 either way" in verdict.advice
        assert "InfoNCELoss" in verdict.code
        known = replace(FAST, temperature=0.2)
        near = replace(model, curves=replace(model.curves, current_loss=0.001))
        kept = decide(near, known)
        assert kept.headline == "Keep your temperature of 0.2."
        assert kept.code is kept.train is None
        off = replace(model, curves=replace(model.curves, current_loss=0.3))
        verdict = decide(off, known)
        assert verdict.kind == "temperature"
        way = "Lower" if measured.link.tau0 < 0.2 else "Raise"
        assert verdict.headline == f"{way} the temperature from 0.2 to about {about}."
        assert verdict.worth.startswith(
            "On these scores, that makes the positive 1.35 times as likely as your temperature does."
        )
        assert "another link is not needed" in verdict.advice


def test_nothing_is_explained_where_nothing_gains(measured):
    quiet = {**SURE, "gain": 0.0, "gain_interval": (0.0, 0.0), "lam": 0.0}
    verdict = decide(replace(with_link(measured, **quiet), rivals=rivals_of(0.0, 0.0, 0.0, 0.0)), FAST)
    assert verdict.kind == "nothing"
    assert verdict.rivals.startswith(
        "Nothing to explain: neither the blend nor a varying temperature gains 0.02"
    )


def test_a_blend_without_gain_does_not_mean_that_one_temperature_fits(measured):
    quiet = {**SURE, "gain": 0.0, "gain_interval": (0.0, 0.0), "lam": 0.0}
    verdict = decide(replace(with_link(measured, **quiet), rivals=rivals_of(0.0, 0.3, 0.0, 0.3)), FAST)
    assert verdict.softmax.startswith("Nothing to another link: fitted to half of the batches")
    assert verdict.rivals.startswith("Anchors of different difficulty explain these scores better")


def test_wrong_pairs_are_looked_for_among_the_hard_ones():
    z_i, z_j = views(pairs=640, dim=16)
    z_j[:32] = z_j[np.roll(np.arange(32), 1)]  # 5 % of the pairs
    verdict = decide(measure(make_pairs("wrong", z_i, z_j), FAST), replace(FAST, temperature=0.1))
    assert "Some pairs are much harder than others" in verdict.worth
    assert "varies by a factor of about 7.4 or more either way" in verdict.advice
    assert "what makes the hard pairs hard: rows that do not belong together" in verdict.advice


def test_the_rivals_are_those_of_the_bank(measured):
    bank = build_bank(small(), measured.batch_size, measured.batches, FAST.seed).link
    assert measured.rivals == evt.link_rivals(*bank, bootstraps=FAST.bootstraps, rng=FAST.seed)
    assert measured.rivals.blend.gain == measured.link.gain


def test_the_best_temperature_has_an_interval(measured):
    low, high = measured.link.tau0_interval
    assert low < measured.link.tau0 < high
    said = decide(measured, FAST).link
    assert f"τ₀ = {number(measured.link.tau0)} (95 %: {number(low)} to {number(high)})." in said


def test_low_temperatures_have_significant_digits(measured):
    cold = with_link(measured, tau0=0.0017234, gain=0.0, gain_interval=(0.0, 0.0))
    cold = replace(cold, curves=replace(measured.curves, tau_range=(0.001493, 0.0019671)))
    verdict = decide(cold, FAST)
    assert verdict.worth.startswith("Any temperature from 0.00149 to 0.00197 is as good")
    assert "0.00172 is the one to try" in verdict.advice
    assert "τ₀ = 0.00172 (" in verdict.link
    shown = {value: temperature(value) for value in (0.0, 0.5, 0.01, 0.00999, 0.0000123456, np.inf)}
    assert list(shown.values()) == ["0.000", "0.500", "0.010", "0.00999", "0.0000123", "∞"]


def test_a_negative_gain_is_nothing_left_on_the_table(measured):
    verdict = decide(with_link(measured, **{**SURE, "gain": -0.0012, "gain_interval": (-0.004, 0.001)}), FAST)
    assert verdict.softmax.startswith("Nothing to another link: at its best temperature, softmax fits")
    assert f"{MINUS}0.0012 nats" in verdict.softmax
    assert "on the table" not in verdict.softmax


def test_a_huge_loss_is_not_infinite(measured):
    quiet = with_link(measured, **{**SURE, "gain": 0.0, "gain_interval": (0.0, 0.0)})
    cold = replace(quiet, curves=replace(measured.curves, current_loss=3000.0))
    verdict = decide(cold, replace(FAST, temperature=0.0001))
    assert "makes the positive more than 1,000 times as likely as your temperature does" in verdict.worth
    assert "∞" not in verdict.worth


def test_labels_that_tell_nothing_are_to_be_checked():
    z, _ = views(pairs=800)
    found = measure(pair_by_label("z", z, np.arange(800) % 200), FAST)
    verdict = decide(found, FAST)
    assert verdict.kind == "uninformative"
    assert verdict.advice.startswith("Check that the labels belong to the rows of z")


def test_the_larger_of_two_gains_comes_first(measured):
    hot = replace(FAST, temperature=1.0)
    bad = replace(with_link(measured, **SURE), curves=replace(measured.curves, current_loss=0.3))
    verdict = decide(bad, hot)
    assert verdict.kind == "both"
    assert verdict.headline == f"Lower the temperature from 1 to about {measured.link.tau0:.2g}."
    assert verdict.worth.endswith("Another link would then make it 1.11 times as likely again.")
    assert verdict.train.startswith("weince train --data mine.npz --loss.preset infonce --loss.temperature ")
    lines = verdict.code.splitlines()
    assert lines[2].startswith("loss = InfoNCELoss(")
    assert isinstance(run(verdict.code).link, BlendLink)
    smaller = replace(bad, curves=replace(measured.curves, current_loss=0.05))
    assert decide(smaller, hot).kind == "link"
    assert "Say which temperature" not in decide(smaller, hot).advice


def test_a_held_out_half_without_a_beaten_positive_does_not_favour_low_temperatures():
    """All beaten positives are in the batches that the temperature is fitted to."""
    z, _ = views(pairs=128, dim=8)
    pairs, settings = (
        make_pairs("half", z, z + 0.02 * views(pairs=128, dim=8, seed=5)[0]),
        replace(FAST, batch_size=32),
    )
    held_in = measure(pairs, replace(settings, temperature=1e-4)).link.held_in
    order = np.random.default_rng(FAST.seed).permutation(128).reshape(4, 32)
    z_j = pairs.z_j.copy()
    for batch in held_in:
        rows = order[batch][:8]
        z_j[rows] = z_j[np.roll(rows, 1)] + 0.45 * (z_j[rows] - z_j[np.roll(rows, 1)])
    found = measure(make_pairs("half", z, z_j), replace(settings, temperature=1e-4))
    assert not found.link.separated
    assert found.link.held_in == held_in
    low, high = found.curves.tau_range
    assert 0.1 * found.link.tau0 < low < found.link.tau0 < high
    assert found.curves.current_loss > 1.0


@pytest.mark.parametrize(
    "change",
    [{"gain_interval": (-0.01, 0.2)}, {"lr_p_value": 0.06}, {"t_p_value": 0.2}, {"t_p_value": float("nan")}],
)
def test_a_gain_without_evidence_is_unclear(measured, change):
    verdict = decide(with_link(measured, **{**SURE, **change}), FAST)
    assert verdict.kind == "unclear"
    assert "evidence for it is thin" in verdict.worth
    assert "BlendLink" not in verdict.code


def test_a_small_gain_keeps_softmax_however_significant(measured):
    verdict = decide(with_link(measured, **{**SURE, "gain": 0.015, "gain_interval": (0.01, 0.018)}), FAST)
    assert verdict.kind == "nothing"
    assert "No other link is needed." in verdict.worth
    assert "BlendLink" not in verdict.code
    assert "not excluded" not in verdict.advice
    wide = decide(with_link(measured, **{**SURE, "gain": 0.015, "gain_interval": (-0.01, 0.05)}), FAST)
    assert "up to 0.050 is not excluded" in wide.advice


def test_a_temperature_that_is_off_is_named(measured):
    quiet = {**SURE, "gain": 0.0, "gain_interval": (0.0, 0.0)}
    hot = replace(FAST, temperature=1.0)
    bad = replace(with_link(measured, **quiet), curves=replace(measured.curves, current_loss=0.8))
    verdict = decide(bad, hot)
    assert verdict.kind == "temperature"
    assert "loses 0.800 nats" in verdict.advice
    assert f"InfoNCELoss(temperature={measured.link.tau0:.3g})" in verdict.code
    halfway = f"{np.sqrt(measured.link.tau0):.2g}"
    assert f"train at {halfway} too, which lies between the two" in verdict.worth
    fitted, between = verdict.train.splitlines()
    assert fitted == softmax_train(measured.link.tau0)
    assert between == f"weince train --data mine.npz --loss.preset infonce --loss.temperature {halfway}"
    assert verdict.headline == f"Lower the temperature from 1 to about {measured.link.tau0:.2g}."
    cold = replace(FAST, temperature=measured.link.tau0 / 4)
    assert decide(bad, cold).headline.startswith(
        f"Raise the temperature from {cold.temperature:.3g} to about "
    )
    fine = replace(bad, curves=replace(measured.curves, current_loss=0.001))
    verdict = decide(fine, hot)
    assert verdict.kind == "nothing"
    assert verdict.code is None
    assert "Your temperature of 1 is within 0.02 nats of the best (0.001 lost)." in verdict.advice
    # Where the fitted temperature is judged, on other batches, the one in use may fit better: that loses nothing.
    better = replace(bad, curves=replace(measured.curves, current_loss=-0.03))
    assert decide(better, hot).advice.startswith(
        "Your temperature of 1 fits these scores as well as τ₀ or better."
    )


def test_a_gain_that_is_not_certain_is_not_denied(measured):
    """It said "neither gains 0.02 nats" beside the gains, all of them larger."""
    wide = (-0.02, 0.22)
    rivals = rivals_of(0.1, 0.05, 0.1, 0.1)
    anchors, pairs = (replace(x, gain=replace(x.gain, interval=wide)) for x in (rivals.anchors, rivals.pairs))
    rivals = replace(rivals, blend=replace(rivals.blend, interval=wide), anchors=anchors, pairs=pairs)
    verdict = decide(replace(with_link(measured, gain=0.1, gain_interval=wide), rivals=rivals), FAST)
    assert verdict.kind == "unclear"
    assert verdict.rivals.startswith("Not clear: no gain of 0.02 nats or more is certain.")


def test_a_large_factor_has_no_decimals():
    assert times(np.log(7.688)) == "7.69 times as likely"
    assert times(np.log(35.46)) == "35 times as likely"
    assert times(np.log(1234.0)) == "more than 1,000 times as likely"


def test_equal_views_are_named_and_no_larger_batch_is_tried():
    z, _ = views()
    equal = measure(make_pairs("equal", z, z.copy()), FAST)
    assert (equal.tried, equal.batch_size) == ((), 32)
    verdict = decide(equal, FAST)
    assert verdict.kind == "separated"
    assert verdict.headline == "No answer: z_i and z_j are equal."
    # Every negative loses to a copy: harder ones do not help.
    assert "harder negatives" not in " ".join([verdict.advice, *equal.notes])


def test_positives_beaten_by_rounding_alone_are_not_said_to_win():
    """Nearly equal views, and a few items twice: differences below the smallest shortfall do not count."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((512, 16))
    z[1:24:2] = z[:24:2]
    near = make_pairs(
        "near", z + 1e-4 * rng.standard_normal(z.shape), z + 1e-4 * rng.standard_normal(z.shape)
    )
    found = measure(near, replace(FAST, batch_size=128))
    assert 0 < found.beaten < 10
    assert found.link.separated
    verdict = decide(found, FAST)
    assert verdict.headline == "No answer: every positive that was fitted wins or coincides with its anchor."
    assert verdict.softmax == (
        "No link can be fitted: each positive that is beaten coincides with its anchor, as does what beats it."
    )
    assert found.notes[-1] == (
        f"In {found.beaten} of 512 fitted anchors a candidate beats the positive, but both lie within a shortfall of "
        "1e-06, where the blend cannot tell them apart: no finite fit exists."
    )


def test_separated_and_unpaired_data_get_no_advice():
    z, _ = views()
    found = measure(make_pairs("same", z, z + 1e-7), FAST)
    same = decide(found, FAST)
    assert same.kind == "separated"
    assert same.code is None
    assert found.rivals is None
    # 400 pairs make 12 batches of 32; larger sizes are tried as long as there are four batches.
    assert (found.tried, found.batch_size, found.batches) == ((32, 64), 100, 4)
    assert "Larger batches were tried (64, 100 pairs): fewer than 10 are beaten there too." in same.advice
    assert not any("12 batches of 32" in note for note in found.notes)
    assert any(note.endswith("so 4 batches of 100 were used.") for note in found.notes)
    assert "If the model was trained on these pairs, diagnose held-out ones" in same.advice
    random = measure(make_pairs("random", z, views(seed=9)[0]), FAST)
    assert decide(random, FAST).kind == "uninformative"
    opposed = measure(make_pairs("opposed", z, -z + 0.1 * views(seed=9)[0]), FAST)
    assert opposed.curves is None
    verdict = decide(opposed, FAST)
    assert verdict.kind == "uninformative"
    assert verdict.link == "No link can be told from another here."  # not τ = ∞ (95 %: — to —)


def naive_crowded(bank):
    """Share of anchors with a cosine of at least 0.99 to a candidate other than the positive; NaN never counts."""
    found = [
        any(s >= 0.99 for column, s in enumerate(row) if column != positive)
        for row, positive in zip(bank.scores.tolist(), bank.positives.tolist(), strict=True)
    ]
    return sum(found) / len(found)


def test_crowded_is_measured_over_the_batches(crowded):
    pairs = make_pairs("crowd", *crowd(0.2))
    bank = build_bank(pairs, crowded.batch_size, crowded.batches, FAST.seed).link
    assert crowded.crowded == naive_crowded(bank)
    assert crowded.crowded == pytest.approx(0.2, abs=0.05)


def test_duplicates_with_equal_ids_are_no_crowd():
    z_i, z_j = views(pairs=200)
    z_i[1::2], z_j[1::2] = z_i[::2], z_j[::2]  # every item twice
    settings = replace(FAST, batch_size=50)  # so that some duplicates share a batch
    assert measure(make_pairs("twice", z_i, z_j), settings).crowded > 0.1
    told = make_pairs("twice", z_i, z_j, np.arange(200) // 2)
    found = measure(told, settings)
    assert found.crowded == naive_crowded(build_bank(told, 50, 4, settings.seed).link) < 0.01


def test_copies_within_a_view_are_a_crowd_across_views():
    """Five captions of each image: those of the same image are false negatives, though no cosine across is near 1."""
    images, noise = np.random.default_rng(0).standard_normal((2, 400, 16))
    images = np.repeat(images[:80], 5, axis=0)
    views = images, images + 0.6 * noise
    settings = replace(FAST, batch_size=50, candidates="cross")
    ids = np.arange(400) // 5
    for z_i, z_j in (views, views[::-1]):
        found = measure(make_pairs("captions", z_i, z_j), settings)
        order = np.random.default_rng(settings.seed).permutation(400).reshape(-1, found.batch_size)
        twice = [sum(image == other for other in batch) > 1 for batch in ids[order] for image in batch]
        assert found.crowded == pytest.approx(np.mean(twice) / 2)  # the captions are not crowded
        assert decide(found, settings).kind == "crowded"
        told = measure(make_pairs("captions", z_i, z_j, ids), settings)
        assert told.crowded == 0.0
        assert decide(told, settings).kind != "crowded"


def test_a_crowd_is_named_before_any_link(crowded):
    percent = f"{100 * crowded.crowded:.1f} %"
    for changes in ({}, SURE):
        verdict = decide(with_link(crowded, **changes), FAST)
        assert verdict.kind == "crowded"
        assert verdict.crowded == crowded.crowded
        assert percent in verdict.headline
        assert f"{percent} of the embeddings lie within a shortfall of 0.01 of another item's" in verdict.tail
        assert "describe that crowd" in verdict.tail
        assert verdict.advice.startswith("First find out which items these are.")
        assert verdict.advice.endswith("are fitted to these items too: neither is worth a change yet.")
        assert verdict.code is None
    unfitted = replace(crowded, link=replace(crowded.link, separated=True, tau=np.nan), rivals=None)
    assert decide(unfitted, FAST).advice.endswith("Then diagnose again.")


def test_no_crowd_is_named_where_there_is_none(measured):
    verdict = decide(measured, FAST)
    assert verdict.crowded == measured.crowded < 0.01
    assert verdict.kind != "crowded"
    assert "crowd" not in verdict.headline + verdict.tail + verdict.advice


def test_the_share_above_which_a_crowd_is_named_is_a_rule(crowded):
    for excess, named in ((0.05 - 1e-9, False), (0.05 + 1e-9, True)):
        model = replace(crowded, crowded_by_chance=crowded.crowded - excess)
        assert (decide(model, FAST).kind == "crowded") == named
    assert sum("more than 5 % of the embeddings" in line for line in THRESHOLDS.lines) == 1


def test_evenly_spread_embeddings_of_few_dimensions_are_no_crowd(measured):
    """On a sphere in three dimensions, some of 62 even points lie close together."""
    found = measure(small(dim=3), FAST)
    assert found.crowded == pytest.approx(found.crowded_by_chance, abs=0.05)
    assert found.crowded_by_chance == pytest.approx(1 - (1 - 0.005) ** 62)  # the cap has 0.5 % of the sphere
    across = measure(small(dim=3), replace(FAST, candidates="cross"))  # both views count there too
    assert (across.crowded, across.crowded_by_chance) == (found.crowded, found.crowded_by_chance)
    verdict = decide(found, FAST)
    assert verdict.headline.startswith("Use a temperature of about 0.1")
    assert "coincide" not in verdict.tail
    gathered = measure(make_pairs("crowd", *crowd(0.5, dim=3)), FAST)
    assert decide(gathered, FAST).kind == "crowded"
    assert measured.crowded_by_chance < 1e-3


def test_a_few_beaten_positives_make_no_temperature():
    """Fitted to so few, a temperature is too low on average."""
    settings = replace(FAST, temperature=0.5)
    found = measure(make_pairs("easy", *views(pairs=256, dim=12, noise=0.4)), settings)
    assert (found.tried, found.batch_size) == ((32,), 64)
    assert not found.link.separated
    assert 1 < found.beaten < 10
    verdict = decide(found, settings)
    assert verdict.kind == "few"
    assert verdict.headline == f"Too few to tell: {found.beaten} of 256 positives are beaten."
    assert verdict.code is verdict.train is None
    assert "Larger batches were tried (64 pairs): fewer than 10 are beaten there too." in verdict.advice
    assert verdict.worth.startswith(
        "In batches of 256 pairs 13 of 512 positives are beaten, and a temperature of"
    )
    assert "Else train at that temperature, in batches as large" in verdict.advice
    assert decide(replace(found, beaten=1), settings).headline.endswith(": 1 of 256 positives is beaten.")
    assert decide(replace(found, beaten=10), settings).headline.startswith("Lower the temperature from 0.5")
    assert sum("fewer than 10 of the fitted positives" in line for line in THRESHOLDS.lines) == 1


def test_larger_batches_are_tried_where_few_positives_are_beaten():
    found = measure(make_pairs("easy", *views(pairs=256, dim=8, noise=0.35)), FAST)
    assert (found.tried, found.batch_size, found.batches) == ((32,), 64, 4)
    assert found.beaten >= 10
    assert decide(found, FAST).kind != "few"
    assert found.notes == (
        "In batches of 32 pairs fewer than 10 of the fitted positives are beaten, so 4 batches of 64 were used.",
    )


@pytest.mark.parametrize("dim", [24, 32])
def test_binary_codes_are_measured(dim):
    """Their cosines tie."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((300, dim))
    codes = (np.sign(part).astype(np.int8) for part in (z, z + 0.8 * rng.standard_normal(z.shape)))
    found = measure(make_pairs("codes", *codes), FAST)
    assert np.isfinite(found.tail.xi.fit.xi)


@pytest.mark.parametrize("size", [32, 164])  # 164 is about the smallest with every number of negatives
def test_any_batch_size_is_measured(size):
    found = measure(small(pairs=4 * size), replace(FAST, batch_size=size), more=measure_paper)
    assert found.batch_size == size
    assert found.more.hard[-1].kept == found.more.hard[-1].pool == 2 * size - 2
    assert np.isfinite([p.gain.gain for p in found.more.hard + found.more.pool]).all()


def test_an_endpoint_beyond_the_cap_is_none(measured):
    xi = measured.tail.xi

    def said(endpoint, interval):
        fit = replace(xi.fit, xi=-0.2, endpoint=endpoint)
        there = replace(xi, fit=fit, xi_interval=(-0.3, -0.1), endpoint_interval=interval)
        return decide(replace(measured, tail=measured.tail._replace(xi=there)), FAST).tail

    inside = said(0.93, (0.91, 0.97))
    assert "looks bounded at this level" in inside
    # Scores may go on beyond the end of the law that was fitted to them.
    assert "The fitted law ends at a cosine of about 0.930 (95 %: 0.910 to 0.970)" in inside
    assert "(95 %: 0.910 to the cap)" in said(0.93, (0.91, 1.2))
    beyond = said(1.245, (1.1, 1.4))
    assert "the cap is not visible in this tail" in beyond
    assert "1.245" not in beyond
    assert "looks bounded" not in beyond


def test_scores_next_to_the_cap_fill_the_figure_of_their_density(tmp_path):
    rng = np.random.default_rng(0)
    line = np.c_[rng.standard_normal(256), 0.02 * rng.standard_normal((256, 15))]
    near = make_pairs("near", line, line + 0.02 * rng.standard_normal(line.shape))
    found = measure(near, FAST, more=measure_paper)
    low = found.tail.xi.fit.threshold
    assert low > 0.99
    density, _ = pot_figures(Gallery(tmp_path), "1", found.more.pot)
    ticks = [float(tick) for tick in re.findall(r">([01]\.\d+)</text>", density.svg)]
    assert len(ticks) > 2
    assert all(low <= tick <= 1.0 + 0.05 * (1.0 - low) for tick in ticks)  # they went on to 1.02


def test_one_temperature_that_is_not_determined_does_not_hide_the_others(measured, tmp_path):
    link = replace(measured.link, tau0=5.6, tau0_interval=(0.35, 89.6))
    gallery = Gallery(tmp_path)
    models = [measured, replace(measured, link=link, name="random 7")]
    drawn = [
        forest_figures(gallery, models, mean=True)[-1],
        trend_figures(gallery, [1, 2], quantities(models))[3],
    ]
    for figure in drawn:
        assert figure.caption == "Best temperature of softmax"
        ticks = re.findall(r">([\d.]+)</text>", figure.svg)
        assert {"0.1", "1", "10"} <= set(ticks), ticks
    (best,) = [q for q in quantities(models) if q.key == "tau0"]
    assert mean_over(best.value, best.bounds).interval[0] == 0.0  # no temperature is negative


def test_a_weight_without_meaning_does_not_enter_the_mean(measured):
    """Where higher scores do not win more often, the temperature is infinite and no weight has an effect."""
    flat = replace(
        measured,
        link=replace(measured.link, lam=0.0, tau=np.inf, tau0=np.inf),
    )
    found = {q.key: mean_over(q.value, q.bounds) for q in quantities([measured, flat, measured])}
    assert found["lam"][::2] == (measured.link.lam, 2)
    assert found["gain"].n == 3


def test_bounded_is_said_only_when_the_interval_says_so(measured):
    xi = measured.tail.xi
    assert tail_kind(replace(xi, xi_interval=(-0.5, -0.01))) == "bounded"
    assert tail_kind(replace(xi, xi_interval=(-0.5, 0.01))) == "undecided"
    assert tail_kind(replace(xi, xi_interval=(0.01, 0.5))) == "heavy"


def held_out_loglik(bank, link, logit):
    """Mean over held-out batches of the mean log-likelihood, by its definition."""
    means = []
    for b in link.held_out:
        rows = np.flatnonzero(bank.batches == b)
        logits = logit(bank.scores[rows])
        won = logits[np.arange(len(rows)), bank.positives[rows]]
        means.append(np.mean(won - logsumexp(logits, axis=1)))
    return float(np.mean(means))


def test_the_curves_are_held_out_likelihoods(measured):
    bank = build_bank(small(), measured.batch_size, measured.batches, FAST.seed).link
    t, c = measured.link, measured.curves
    best = held_out_loglik(bank, t, lambda s: s / t.tau0)
    for tau, loss in zip(c.taus[::3], c.tau_loss[::3], strict=True):
        assert best - held_out_loglik(bank, t, lambda s, tau=tau: s / tau) == pytest.approx(loss, abs=1e-9)
    for tau in c.tau_range:
        assert best - held_out_loglik(bank, t, lambda s, tau=tau: s / tau) == pytest.approx(0.02, abs=1e-4)
    chance = -np.log(bank.scores.shape[1])
    assert best - chance == pytest.approx(c.over_chance, abs=1e-9)


def test_labels_duplicates_and_small_data_are_measured():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 12, 700)
    z = rng.standard_normal((12, 5))[labels] + 0.8 * rng.standard_normal((700, 5))
    by_label = measure(pair_by_label("labels", z, labels), FAST)
    assert np.isfinite(by_label.link.gain)
    assert any("equal labels never compete" in note for note in by_label.notes)
    z_i, z_j = views(pairs=160)
    z_i[40:50], z_j[40:50] = (z_i[40] + 1e-7 * z[40:50] for z in (z_i, z_j))
    twins = measure(make_pairs("twins", z_i, z_j), FAST)
    assert any("cosine of 1" in note for note in twins.notes)


def test_a_tail_of_duplicates_is_named():
    z_i, z_j = views(pairs=160)
    # These are a sixteenth of the negative pairs; exact twins would not compete.
    z_i[:40], z_j[:40] = (z_i[0] + 1e-7 * z[:40] for z in (z_i, z_j))
    with pytest.raises(
        InputError, match=r"crowd: \d\.\d % of the negative pairs have a cosine of 1.*duplicates"
    ):
        measure(make_pairs("crowd", z_i, z_j), FAST)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-0.5, "-0.500"),
        (-0.0001, "0.000"),
        (np.nan, "—"),
        (np.inf, "∞"),
        (-np.inf, "-∞"),
        (1234.5, "1,234.500"),
    ],
)
def test_numbers_in_text(value, shown):
    assert number(value) == shown.replace("-", "\N{MINUS SIGN}")


def test_a_p_value_is_never_zero():
    assert p_words(0.0) == "p < 0.001"
    assert p_words(float("nan")) == "p not defined"
