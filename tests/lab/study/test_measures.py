"""Measures other than the evaluation: the link test and Frechet ablation of a run, and the overhead."""

import json
import math

import numpy as np
import pytest
from lab.study.made import reproduce
from lab.study.tables import small_table

from weince.evt import link_bank, link_test
from weince.lab import settings
from weince.lab.paper.ablations import frechet_ablation
from weince.lab.study import overhead
from weince.lab.tasks.images.config import VisionRun
from weince.lab.tasks.images.data import load
from weince.lab.tasks.images.evaluation import fingerprint
from weince.lab.tasks.images.runs import two_views
from weince.lab.tasks.images.score_tails import measure_tail, tail_figures
from weince.lab.tasks.registry import MEASURES, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    small_table(folder)
    options = ["--config", str(folder / "digits_small.yaml"), "--out", str(folder / "run"), "--device", "cpu"]
    return train(settings.read(VisionRun, options, command="", examples=""), bar=False)


def bank_of(folder):
    z_i, z_j = two_views(folder, images=8192, seed=0)
    return link_bank(z_i, z_j, batch_size=len(z_i) // 4, batches=32, rng=0)


def test_the_link_test_of_a_run(trained):
    measure_tail("link", trained)
    found = json.loads((trained / "link.json").read_text())
    test = link_test(*bank_of(trained), rng=0)
    assert (found["link_lam"], found["link_gain"]) == (test.lam, test.gain)
    assert found["link_ratio"] == pytest.approx(math.exp(test.gain))
    assert found["pairs"] == 355
    assert found["fingerprint"] == fingerprint(load("digits", size=8))
    assert set(MEASURES["link"].figures) <= set(found)


def test_every_figure_of_the_frechet_ablation_has_its_own_name():
    rng = np.random.default_rng(3)
    z = rng.normal(size=(64, 3))
    pairs = z, z + 1.5 * rng.normal(size=z.shape)
    ablation = frechet_ablation(*link_bank(*pairs, batch_size=16, batches=4, rng=0), rng=0)
    wanted = {
        "frechet_lam_w": ablation.lam_w,
        "frechet_gain_w": ablation.w_over_0.gain,
        "frechet_gain_f": ablation.f_over_0.gain,
        "frechet_gain_wf": ablation.wf_over_w.gain,
        "frechet_lam_f": ablation.lam_f_full,
    }
    assert tail_figures("frechet", *pairs) == wanted
    assert (
        len({*wanted.values(), ablation.lam_f, ablation.lam_w_full, 0.0}) == 8
    )  # all differ, so no name can be mixed up


def test_the_bank_is_of_the_papers_size(monkeypatch):
    banks = []

    def look(scores, positives, batches, rng):
        banks.append((scores.shape, np.bincount(batches).tolist()))
        return link_test(scores[:2048, :9] * 0.9, positives[:2048] % 9, batches[:2048], null_draws=1)

    monkeypatch.setattr("weince.evt.link_test", look)
    tail_figures("link", *np.random.default_rng(0).normal(size=(2, 10_000, 2)))
    assert banks == [((32 * 512, 511), [512] * 32)]


def test_the_overhead_is_timed_beside_the_papers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(overhead, "REPEATS", 2)
    monkeypatch.setattr(overhead, "PAIRS", 32)
    page = reproduce("overhead", out=tmp_path, device="cpu")
    rows = (page.parent / "table.md").read_text().splitlines()
    cells = {line.split("|")[2].strip(): line.split("|")[4:7] for line in rows if line.startswith("| batch")}
    assert {loss: reported.strip() for loss, (reported, _, _) in cells.items()} == {
        "InfoNCE": "0.650", "WEINCE paper": "2.110", "WEINCE released": "2.110", "InfoNCE, plain torch": "0.650",
    }  # fmt: skip
    assert all(0 < float(measured) < 1000 for _, measured, _ in cells.values())
    reproduce("overhead", out=tmp_path / "none", dry_run=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("root_kept_out")
def test_a_folder_that_cannot_be_written_is_said_before_anything_is_timed(tmp_path, capsys):
    tmp_path.chmod(0o555)
    with pytest.raises(PermissionError):
        reproduce("overhead", out=tmp_path / "new", device="cpu")
    assert "pairs" not in "".join(capsys.readouterr())
