import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weince import TailConfig, WeinceLoss
from weince.lab.geometry import crowded as share_crowded
from weince.lab.tasks.images.log import COLUMNS, Log, check_finite, collapse, measure
from weince.lab.training.log import read_log
from weince.scores import CROWD


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

    Log(tmp_path, 0, tensorboard=True).add(row(1) | {"learned_bias": 2.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {*COLUMNS[1:], "learned_bias"}


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
    stats = WeinceLoss.paper()(z_i, z_j, return_stats=True).stats
    for name in ("rho", "beta", "daic", "lam"):
        assert found[name] == pytest.approx(float(getattr(stats, name).mean()))


def naive_crowded(z_i, z_j):
    """Share of anchors with a candidate at a cosine of at least 0.99, other than themselves and their positive."""
    rows = [[float(x) for x in row] for row in torch.cat([z_i, z_j]).double()]
    n = len(z_i)

    def shortfall(a, b):
        lengths = math.hypot(*a) * math.hypot(*b)  # a zero row has cosine 0 with every row
        return 1 - math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 1.0

    crowded = [
        any(shortfall(rows[a], rows[b]) <= 0.01 for b in range(2 * n) if b not in (a, (a + n) % (2 * n)))
        for a in range(2 * n)
    ]
    return sum(crowded) / len(crowded)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 9),
    d=st.integers(2, 6),
    places=st.integers(1, 9),
    spread=st.sampled_from([0.0, 1e-4, 0.05, 0.1, 1.0]),
    zeros=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_crowded_is_the_share_with_another_candidate_next_to_them(n, d, places, spread, zeros, dtype, seed):
    """Items cluster around a few places, with various spreads; zero rows never count as crowded."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(places, d, generator=generator)[torch.randint(places, (n,), generator=generator)]
    z_i, z_j = (
        (centres + spread * torch.randn(n, d, generator=generator)).to(dtype) * scale for scale in (1, 30)
    )
    z_i[:zeros] = 0
    z_j[:zeros] = 0
    assert measure(z_i, z_j, TailConfig())["crowded"] == naive_crowded(z_i, z_j)


def test_a_positive_crowds_nobody_but_its_double_does():
    z = torch.eye(8)
    assert measure(z, z, TailConfig())["crowded"] == 0
    z[5] = z[2]
    assert measure(z, z, TailConfig())["crowded"] == 4 / 16
    assert measure(z, z, TailConfig(eps=0.5))["crowded"] == 4 / 16  # eps of the tail has no effect
    assert float(share_crowded(z[:1].repeat(2, 1))) == 0  # a single pair


@pytest.mark.parametrize(("shortfall", "crowded"), [(0.99 * CROWD, 1.0), (1.01 * CROWD, 0.0)])
def test_crowded_up_to_a_shortfall_of_a_hundredth(shortfall, crowded):
    cosine = 1 - shortfall
    z = torch.tensor([[1.0, 0.0], [cosine, math.sqrt(1 - cosine**2)]])
    assert measure(z, z, TailConfig())["crowded"] == crowded


def test_a_log_from_before_a_column_is_read_and_gone_on_with(tmp_path):
    before = [name for name in COLUMNS if name != "crowded"]
    lines = [",".join(before), ",".join("1" for _ in before), ",".join("2" for _ in before)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    old = [dict.fromkeys(before, value) for value in (1.0, 2.0)]
    assert read_log(tmp_path / "log.csv") == old
    Log(tmp_path, 2).add(row(3))
    Log(tmp_path, 3).add(row(4))  # reads the empty cells
    assert read_log(tmp_path / "log.csv") == [*old, row(3), row(4)]
    place = COLUMNS.index("crowded")
    cells = [line.split(",")[place] for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert cells == ["crowded", "", "", "3", "4"]


def test_a_log_from_before_figures_of_collapse_gives_no_warning():
    assert collapse({"epoch": 3.0, "loss": 5.0}) is None
    assert "20% of the anchors" in collapse({"epoch": 3.0, "crowded": 0.2})


def test_a_truncated_log_is_named(tmp_path):
    log = Log(tmp_path, 0)
    for epoch in (1, 2):
        log.add(row(epoch))
    text = (tmp_path / "log.csv").read_text()
    (tmp_path / "log.csv").write_text(text[:-20])
    with pytest.raises(ValueError, match=r"log\.csv is damaged \(a row is incomplete\): remove it to go on"):
        Log(tmp_path, 2)


def test_a_loss_that_is_no_number_stops_the_run():
    check_finite(1.0, 0)
    with pytest.raises(ValueError, match=r"the loss is nan in epoch 3: set a lower optimizer\.lr, or"):
        check_finite(math.nan, 2)


def test_six_digits_are_kept(tmp_path):
    Log(tmp_path, 0).add(row(1) | {"loss": 4.38251})
    assert read_log(tmp_path / "log.csv")[0]["loss"] == 4.38251


def test_what_is_logged_does_not_depend_on_how_the_logit_is_made():
    z_i, z_j = torch.randn(2, 24, 8)
    plain = measure(z_i, z_j, TailConfig(k=12))
    assert measure(z_i, z_j, TailConfig(k=12, beta="slope", endpoint=1.2, positive="softmax")) == plain
