"""What `weince diagnose --paper` measures besides, on small paired embeddings."""

from dataclasses import replace

import numpy as np
import pytest
from diagnose.synthetic import small, views
from scipy.special import logsumexp

from weince.diagnose.bank import build_bank
from weince.diagnose.diagnosis_settings import QUICK
from weince.diagnose.figures_link import mean_over
from weince.diagnose.measure import measure
from weince.diagnose.reading import make_pairs
from weince.lab.paper.measurements import measure_paper
from weince.lab.paper.supplement import quantities

FAST = replace(QUICK, bootstraps=20, null_draws=20, tail_bootstraps=20, points=5)


@pytest.fixture(scope="module")
def measured():
    return measure(small(), FAST, more=measure_paper)


def test_the_curve_over_the_weight_is_a_held_out_likelihood(measured):
    bank = build_bank(small(), measured.batch_size, measured.batches, FAST.seed).link
    curve, link = measured.more.blend, measured.link

    def held_out(logit):
        means = []
        for batch in link.held_out:
            rows = np.flatnonzero(bank.batches == batch)
            logits = logit(bank.scores[rows])
            won = logits[np.arange(len(rows)), bank.positives[rows]]
            means.append(np.mean(won - logsumexp(logits, axis=1)))
        return np.mean(means)

    assert curve.gain[0] == 0.0
    gain = held_out(lambda s: -curve.beta * np.log(1 - s)) - held_out(lambda s: s / link.tau0)
    assert gain == pytest.approx(curve.gain[-1], abs=1e-6)


def test_without_a_fitted_link_there_is_no_blend_and_no_risk():
    z, _ = views()
    more = measure(make_pairs("same", z, z + 1e-7), FAST, more=measure_paper).more
    assert more.blend is more.risk is more.hard_drawn is more.pool_drawn is None
    assert np.isfinite(more.pot.exponential.lr)


def test_a_tail_that_reaches_the_cap_is_not_fitted_to_end_there():
    z_i, z_j = views(pairs=160)
    z_i[40:50], z_j[40:50] = (z_i[40] + 1e-7 * z[40:50] for z in (z_i, z_j))
    assert measure(make_pairs("twins", z_i, z_j), FAST, more=measure_paper).more.pot.capped is None


def test_a_weight_without_meaning_does_not_enter_the_mean(measured):
    more = replace(measured.more, frechet=replace(measured.more.frechet, lam_f_full=0.0, tau_full=np.inf))
    models = [measured, replace(measured, more=more), measured]
    means = {q.key: mean_over(q.value, q.bounds) for q in quantities(models)}
    assert means["lamf"][::2] == (measured.more.frechet.lam_f_full, 2)
    assert means["f0"].n == 3
