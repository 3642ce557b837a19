import math

import numpy as np
import pytest
import torch

from weince import TailConfig, WeinceLoss
from weince.vision.log import COLUMNS, Log, check_finite, measure, read_log


def row(epoch):
    return {name: float(epoch) for name in COLUMNS}


def test_rows_come_back_and_those_after_the_checkpoint_are_dropped(tmp_path):
    log = Log(tmp_path, 0)
    for epoch in (1, 2, 3):
        log.add(row(epoch))
    assert read_log(tmp_path / "log.csv") == [row(1), row(2), row(3)]
    Log(tmp_path, 2).add(row(3))
    assert [r["epoch"] for r in read_log(tmp_path / "log.csv")] == [1, 2, 3]
    assert read_log(tmp_path / "nowhere.csv") == []


def test_tensorboard_gets_every_column(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Log(tmp_path, 0, tensorboard=True).add(row(1))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(COLUMNS[1:])


def test_measured_figures_by_their_definitions():
    generator = torch.Generator().manual_seed(0)
    z_i, z_j = (torch.randn(6, 4, generator=generator) for _ in range(2))
    found = measure(z_i, z_j, TailConfig())
    rows = torch.nn.functional.normalize(torch.cat([z_i, z_j]).double()).numpy()
    n = len(z_i)
    pairs = [float(np.sum((rows[k] - rows[k + n]) ** 2)) for k in range(n)]
    others = [
        math.exp(-2 * float(np.sum((rows[a] - rows[b]) ** 2)))
        for a in range(2 * n) for b in range(a) if a - b != n
    ]  # fmt: skip
    share = np.linalg.svd(rows, compute_uv=False)
    share /= share.sum()
    assert found["alignment"] == pytest.approx(np.mean(pairs))
    assert found["uniformity"] == pytest.approx(math.log(np.mean(others)))
    assert found["effective_rank"] == pytest.approx(math.exp(-np.sum(share * np.log(share))))
    stats = WeinceLoss()(z_i, z_j, return_stats=True).stats
    for name in ("rho", "beta", "daic", "lam"):
        assert found[name] == pytest.approx(float(getattr(stats, name).mean()))


def test_a_loss_that_is_no_number_stops_the_run():
    check_finite(1.0, 0)
    with pytest.raises(ValueError, match=r"the loss is nan in epoch 3: try a lower --optimizer\.lr"):
        check_finite(math.nan, 2)


def test_six_digits_are_kept(tmp_path):
    Log(tmp_path, 0).add(row(1) | {"loss": 4.38251})
    assert read_log(tmp_path / "log.csv")[0]["loss"] == 4.38251


def test_what_is_logged_does_not_depend_on_how_the_logit_is_made():
    z_i, z_j = torch.randn(2, 24, 8)
    plain = measure(z_i, z_j, TailConfig(k=12))
    assert measure(z_i, z_j, TailConfig(k=12, beta="slope", endpoint=1.2, positive="softmax")) == plain
