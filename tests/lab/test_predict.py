"""Heads on frozen features: each trains as if alone, is judged correctly, and is stored."""

import json
import math
import signal
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program, run

import weince.lab.predict
import weince.progress
from weince.cli import main
from weince.diagnose.reading import InputError, make_pairs
from weince.lab.configure import LossConfig, build_loss
from weince.lab.predict import _affordable, grid, predict
from weince.lab.predict.features import prepare, read_features
from weince.lab.predict.heads import Heads, Probe, Training, judge, train_heads
from weince.lab.predict.report import collapse_of
from weince.lab.tasks.images.evaluation.features import LabelledFeatures

SMALL = Probe(batch=16, axes=6, hidden=8, out=4)
LOSSES = {
    "infonce 0.1": LossConfig("infonce", 0.1),
    "paper 0.5": LossConfig("paper", 0.5),
    "siglip": LossConfig("siglip"),
}


def two_views(items=80, dim=8, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=items)
    base = 2 * rng.standard_normal((4, dim))[labels] + rng.standard_normal((items, dim))
    return (*(base + 0.3 * rng.standard_normal((items, dim)) for _ in range(2)), labels)


@pytest.fixture
def file(tmp_path):
    z_i, z_j, labels = two_views()
    np.savez(tmp_path / "features.npz", z_i=z_i, z_j=z_j, labels=labels)
    return tmp_path / "features.npz"


@pytest.fixture(scope="module")
def views():
    z_i, z_j, labels = two_views()
    return prepare(make_pairs("toy", z_i, z_j), labels, batch=16, axes=6).views


def alone(views, config, seed, steps, probe):
    """Train one head the naive way, in float64 with torch's Adam."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(views.first), generator=generator)
    kept = order[len(order) // 4 :]
    widths = (views.first.shape[1], probe.hidden, probe.out)
    first, second = (
        ((2 * torch.rand(a, b, generator=generator) - 1) / math.sqrt(a)).double().requires_grad_()
        for a, b in pairwise(widths)
    )
    loss = build_loss(config)
    optimizer = torch.optim.Adam([first, second, *loss.parameters()], lr=probe.rate)
    for _ in range(steps):
        rows = kept[torch.randperm(len(kept), generator=generator)[: probe.batch]]
        x = torch.cat([views.first[rows], views.second[rows]])
        x = (x + probe.noise * torch.randn(x.shape, generator=generator)).double()
        optimizer.zero_grad()
        loss(*(torch.relu(x @ first) @ second).split(probe.batch)).backward()
        optimizer.step()
    return first.detach(), second.detach()


def test_a_batch_holds_no_item_twice(views):
    """An item that is drawn twice is a negative of itself, the hardest one."""
    seen = []

    class Watched(torch.nn.Module):
        def forward(self, z_i, z_j):
            seen.append(len(z_i.unique(dim=0)))
            return (z_i - z_j).square().mean()

    training = Training(views, [LOSSES["infonce 0.1"]], 0, replace(SMALL, noise=0.0))
    training.losses = torch.nn.ModuleList([Watched()])
    for _ in range(5):
        training.step()
    assert seen == [SMALL.batch] * 5


@pytest.mark.parametrize("name", LOSSES)
def test_a_head_among_others_is_the_head_alone(views, name):
    training = Training(views, list(LOSSES.values()), 3, SMALL)
    for _ in range(5):
        training.step()
    wanted = alone(views, LOSSES[name], 3, 5, SMALL)
    place = list(LOSSES).index(name)
    for found, right in zip((training.heads.first, training.heads.second), wanted, strict=True):
        # A step of Adam is at most about its rate, and float32 flips hardly any of their signs.
        assert (found[place].double() - right).abs().max() < 0.02 * 5 * SMALL.rate
        assert (found[place] - found[place - 1]).abs().max() > 0.1 * SMALL.rate  # heads differ


def test_heads_begin_alike_and_as_linear_layers_do():
    heads = Heads(3, 50, Probe(hidden=40, out=30), torch.Generator().manual_seed(0))
    x = torch.randn(7, 50)
    for own in heads(x):
        torch.testing.assert_close(own, torch.relu(x @ heads.first[0]) @ heads.second[0])
    bound = 1 / math.sqrt(50)
    assert heads.first.abs().max() <= bound
    assert float(heads.first.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


@settings(max_examples=30, deadline=None)
@given(st.integers(8, 24), st.integers(2, 5), st.integers(2, 8), st.integers(0, 2**31))
def test_judged_as_loops_would(items, dim, batch, seed):
    rng = np.random.default_rng(seed)
    z_i = rng.standard_normal((items, dim))
    z_j = z_i + 0.5 * rng.standard_normal((items, dim))
    found = judge(torch.from_numpy(z_i), torch.from_numpy(z_j), batch)
    u, v = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (z_i, z_j))

    def first(rows):
        wins = [all(u[k] @ v[k] > u[k] @ v[j] for j in rows if j != k) for k in rows]
        return np.mean(wins)

    blocks = [range(k, k + batch) for k in range(0, items - batch + 1, batch)]
    assert found.first == pytest.approx(np.mean([first(block) for block in blocks]))
    assert found.first_of_all == pytest.approx(first(range(items)))
    assert found.alignment == pytest.approx(np.mean(np.sum((u - v) ** 2, axis=1)))
    assert math.isnan(found.r1)
    assert math.isnan(found.vote)


def test_items_with_equal_ids_do_not_compete():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, 8, generator=generator)
    ids = torch.arange(4).repeat(8)
    z_i, z_j = (z[ids] + 0.01 * torch.randn(32, 8, generator=generator) for _ in range(2))
    apart, together = judge(z_i, z_j, 16, ids=ids), judge(z_i, z_j, 16)
    assert (apart.first, apart.first_of_all, apart.crowded) == (1.0, 1.0, 0.0)
    assert together.first < 0.7
    assert together.crowded == 1.0
    assert judge(z_i, z_j, 16, ids=torch.arange(32)) == pytest.approx(together, nan_ok=True)


def test_heads_are_trained_with_ids():
    z_i, z_j, labels = two_views()
    pairs = make_pairs("toy", z_i, z_j, labels)
    views = prepare(pairs, None, batch=16, axes=6).views
    assert views.ids.tolist() == labels.tolist()
    training = Training(views, [LOSSES["infonce 0.1"]], 3, SMALL)
    seen = []
    training.losses[0].register_forward_pre_hook(
        lambda _, args, named: seen.append(named["ids"]), with_kwargs=True
    )
    training.step()
    assert len(seen[0]) == 16
    assert set(seen[0].tolist()) <= set(labels.tolist())
    plain = prepare(make_pairs("toy", z_i, z_j), None, batch=16, axes=6)
    assert plain.key != prepare(pairs, None, batch=16, axes=6).key


def test_classes_do_not_collapse_when_pairs_are_drawn_by_label(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(8, size=600)
    z = (4 * rng.standard_normal((8, 16)))[labels] + rng.standard_normal((600, 16))
    np.savez(tmp_path / "z.npz", z=z, labels=labels)
    losses = {"infonce 0.1": LossConfig("infonce", 0.1)}
    path = predict(
        tmp_path / "z.npz",
        tmp_path / "out",
        losses=losses,
        seeds=[0],
        steps=60,
        probe=Probe(batch=32),
        progress=False,
    )
    (head,) = json.loads((tmp_path / "out" / "heads.json").read_text(encoding="utf-8"))["heads"]
    assert head["first"] > 0.95
    assert head["crowded"] < 0.01
    assert "never compete" in path.read_text(encoding="utf-8")


def test_labels_are_looked_up_among_the_training_items():
    z = torch.eye(4).repeat(5, 1)
    labels = torch.arange(4).repeat(5)
    bank = LabelledFeatures(3 * z, labels)
    right = judge(z, z + 0.01, 4, (bank, labels))
    wrong = judge(z, z + 0.01, 4, (bank, (labels + 1) % 4))
    assert (right.r1, right.vote) == (1.0, 1.0)
    assert (wrong.r1, wrong.vote) == (0.0, 0.0)


def test_a_head_that_diverges_says_so_and_leaves_the_others_alone(views):
    probe = Probe(batch=16, axes=6, hidden=8, out=4)
    both = Training(views, [LOSSES["infonce 0.1"]] * 2, 0, probe)
    with torch.no_grad():
        both.heads.first[1] = math.nan
    both.step()
    fine, lost = both.outcomes()
    assert math.isfinite(fine.first)
    assert math.isnan(lost.first)
    assert collapse_of([fine, lost]) == "diverged"
    assert both.heads.first[0].isfinite().all()


def test_heads_in_one_place_collapse():
    torch.manual_seed(0)
    spread, place = torch.randn(64, 8), torch.randn(1, 8) + 1e-4 * torch.randn(64, 8)
    assert collapse_of([judge(spread, spread + 0.01, 16)]) == ""
    assert collapse_of([judge(place, place + 1e-4 * torch.randn(64, 8), 16)]) == "collapses"


def test_features_are_standardised_and_rotated_alone():
    z_i, z_j, labels = two_views(200, 8)
    z_i[:, 3] = z_j[:, 3] = 5.0  # a constant column
    found = prepare(make_pairs("toy", z_i, z_j), labels, batch=16, axes=20)
    both = torch.cat([found.views.first, found.views.second]).double()
    assert both.shape == (400, 7)
    assert found.kept == pytest.approx(1.0)
    plain = np.delete(np.concatenate([z_i, z_j]), 3, axis=1)
    plain = (plain - plain.mean(0)) / plain.std(0, ddof=1)
    np.testing.assert_allclose(
        torch.cdist(both[:9], both).numpy(), np.linalg.norm(plain[:9, None] - plain, axis=2), atol=1e-4
    )
    fewer = prepare(make_pairs("toy", z_i, z_j), labels, batch=16, axes=2)
    values = np.linalg.svd(plain, compute_uv=False) ** 2
    assert fewer.kept == pytest.approx(values[:2].sum() / values.sum())


def test_the_grid_has_a_loss_without_temperature_once():
    found = grid(["infonce", "siglip", "dcl"], [0.5, 0.1, 0.5])
    assert list(found) == ["infonce 0.1", "infonce 0.5", "siglip", "dcl 0.1", "dcl 0.5"]
    assert found["dcl 0.5"] == LossConfig("dcl", 0.5)
    with pytest.raises(ValueError, match="unknown preset 'nonsense'"):
        grid(["nonsense"], [0.1])
    with pytest.raises(ValueError, match="temperature must be positive; got -1"):
        grid(["infonce"], [-1.0])


def test_a_folder_remembers_its_heads(file, tmp_path):
    options = {"steps": 4, "probe": SMALL, "progress": False}
    path = predict(file, tmp_path / "out", losses=LOSSES, seeds=[0], **options)
    text = path.read_text(encoding="utf-8")
    assert all(f"\n| {name} | " in text for name in LOSSES)
    assert "no advice" in text
    assert "R@1, %" in text
    assert "R@1: how often the nearest training item has the item's label. Vote: " in text
    kept = tmp_path / "out" / "heads.json"
    record = json.loads(kept.read_text(encoding="utf-8"))
    # Stored heads are used unchanged; missing ones are trained, with the result of the first call.
    record["heads"] = record["heads"][:2]
    record["heads"][0]["first"] = 0.125
    kept.write_text(json.dumps(record), encoding="utf-8")
    again = predict(file, tmp_path / "out", losses=LOSSES, seeds=[0], **options).read_text(encoding="utf-8")
    rows = [
        {row.split(" | ")[0]: row for row in page.splitlines() if row.startswith("| ")}
        for page in (text, again)
    ]
    assert " | 12.5 | " in rows[1]["| infonce 0.1"]
    for name in ("| paper 0.5", "| siglip"):
        assert rows[1][name] == rows[0][name]
    assert (tmp_path / "out" / "heads.svg").read_text(encoding="utf-8").startswith("<?xml")
    lines = (tmp_path / "out" / "heads.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(LOSSES)
    for seed in (0, 1):  # stored, and not
        with pytest.raises(ValueError, match="holds heads of 4 steps, not 5"):
            predict(file, tmp_path / "out", losses=LOSSES, seeds=[seed], steps=5, probe=SMALL, progress=False)
    with pytest.raises(ValueError, match="holds heads of other probe"):
        predict(
            file, tmp_path / "out", losses=LOSSES, seeds=[0], steps=4, probe=Probe(batch=17), progress=False
        )
    np.savez(file, z_i=two_views()[0], z_j=two_views()[1])
    with pytest.raises(ValueError, match="holds heads of other labels"):
        predict(file, tmp_path / "out", losses=LOSSES, seeds=[0], **options)
    np.savez(file, z_i=two_views(seed=1)[0], z_j=two_views(seed=1)[1])
    with pytest.raises(ValueError, match="holds heads of other features"):
        predict(file, tmp_path / "out", losses=LOSSES, seeds=[0], **options)
    kept.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is damaged"):
        predict(file, tmp_path / "out", losses=LOSSES, seeds=[0], **options)


def test_minutes_that_change_nothing_are_said(file, tmp_path, capsys):
    losses = {"infonce 0.1": LOSSES["infonce 0.1"]}
    predict(file, tmp_path / "out", losses=losses, seeds=[0], steps=2, probe=SMALL)
    assert "steps" not in capsys.readouterr().err.replace("heads, 2 steps each", "")
    predict(file, tmp_path / "out", losses=losses, seeds=[0, 1], minutes=3, probe=SMALL)
    assert "holds heads of 2 steps: the minutes have no effect on them" in capsys.readouterr().err


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_the_unit_of_the_features_does_not_matter(scale):
    z_i, z_j, labels = two_views()
    plain, scaled = (
        prepare(make_pairs("toy", k * z_i, k * z_j), labels, batch=16, axes=6) for k in (1.0, scale)
    )
    torch.testing.assert_close(plain.views.first.abs(), scaled.views.first.abs())


def test_the_table_names_the_seeds(file, tmp_path):
    losses = {"infonce 0.1": LOSSES["infonce 0.1"]}
    predict(file, tmp_path / "out", losses=losses, seeds=[7, 3], steps=2, probe=SMALL, progress=False)
    rows = (tmp_path / "out" / "heads.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[:2] for row in rows] == [
        ["loss", "seed"],
        ["infonce 0.1", "7"],
        ["infonce 0.1", "3"],
    ]


def test_processes_find_what_one_does(file, tmp_path):
    # Otherwise the fork server might start here, without the imports of conftest.py, and slow down later tests.
    assert run("-c", "pass").returncode == 0
    losses = {name: LOSSES[name] for name in ("infonce 0.1", "siglip")}
    options = {"losses": losses, "seeds": [0, 1], "steps": 3, "probe": SMALL, "progress": False}
    one, two = (predict(file, tmp_path / f"{jobs}", jobs=jobs, **options) for jobs in (1, 2))
    assert one.read_text(encoding="utf-8") == two.read_text(encoding="utf-8")


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_counts_steps_and_not_only_finished_heads(file, tmp_path, monkeypatch, capsys, jobs):
    assert run("-c", "pass").returncode == 0  # for the fork server, as above
    monkeypatch.setattr(weince.progress, "EVERY", 0.0)
    monkeypatch.setattr(weince.lab.predict, "ASK_EVERY", 0.02)
    losses = {name: LOSSES[name] for name in ("infonce 0.1", "siglip")}
    predict(file, tmp_path / "out", losses=losses, seeds=[0], steps=300, probe=SMALL, jobs=jobs)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("heads, 300 steps")]
    assert [line.split(", 0:")[0] for line in lines if "0 of 2" in line][2:]  # the two heads train together
    assert lines[-1] == "heads, 300 steps each: 2 of 2"


def test_the_time_sets_the_steps(views):
    with pytest.raises(
        ValueError, match=r"1000000 heads have time for \d+ steps each in 0.1 minutes, and need 100: allow"
    ):
        _affordable(views, LOSSES, SMALL, 10**6, 0.1, 1)
    assert _affordable(views, LOSSES, SMALL, 1, 1e6, 1) == 1500


def bad(tmp_path, **arrays):
    z_i, z_j, _ = two_views()
    np.savez(tmp_path / "bad.npz", **({"z_i": z_i, "z_j": z_j} | arrays))
    return [str(tmp_path / "bad.npz"), "--batch-size", "16", "--steps", "2", "--out", str(tmp_path / "out")]


def few(z):
    return {"z_i": z[:63], "z_j": z[:63] + 1}


CASES = {
    "want at least 64 items for batches of 16, a quarter of them held out; got 63": few,
    "two views that are the same": lambda z: {"z_i": z, "z_j": z},
    "z_i has NaN or infinite values in 1 of 80 rows, first in row 7": lambda z: {
        "z_i": np.where(np.arange(80)[:, None] == 7, np.nan, z)
    },
    "all embeddings point the same way": lambda z: {"z_i": np.ones_like(z), "z_j": np.ones_like(z)},
    "want 80 labels, one for each item; got (79,)": lambda z: {"labels": np.arange(79)},
    "labels must be integers or strings; got float64": lambda z: {"labels": np.arange(80.0)},
}


@pytest.mark.parametrize("said", CASES)
def test_bad_features_are_refused_in_one_line(tmp_path, capsys, said):
    z, _, _ = two_views()
    assert main(["predict", *bad(tmp_path, **CASES[said](z))]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_one_view_is_refused(tmp_path, capsys):
    np.savez(tmp_path / "one.npz", z_i=two_views()[0])
    assert main(["predict", str(tmp_path / "one.npz"), "--out", str(tmp_path / "out")]) == 2
    assert "want the keys z_i and z_j" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--minutes", "0"], "minutes must be positive; got 0"),
        (["--minutes", "1e-6", "--batch-size", "16"], "heads have time for 0 steps each in 1e-06 minutes"),
        (["--steps", "0"], "steps must be at least 1; got 0"),
        (["--seeds", "5", "3", "5"], "every seed must be named once; got 5 twice"),
        (["--steps", "9", "--seeds", str(2**63)], "a seed must be below 2**63; got 9223372036854775808"),
        (["--jobs", "0"], "jobs must be at least 1; got 0"),
        (["--batch-size", "1"], "batch must be at least 2; got 1"),
        (["--losses", "link"], "predict has no options for the lam and beta of the preset link; got link"),
        (["--losses", "infonc"], "unknown preset 'infonc' (did you mean infonce?)"),
    ],
)
def test_bad_options_are_refused_in_one_line(file, tmp_path, capsys, options, said):
    assert main(["predict", str(file), *options, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("losses", [["Detached"], ["infonce", "Detached"]], ids=" ".join)
def test_a_detached_loss_is_refused_in_one_line(file, tmp_path, monkeypatch, capsys, losses):
    (tmp_path / "detached_loss.py").write_text("""
from weince import DCLLoss
class Detached(DCLLoss):
    def forward(self, z_i, z_j):
        return super().forward(z_i, z_j).detach()
""")
    monkeypatch.syspath_prepend(tmp_path)
    named = [name.replace("Detached", "detached_loss:Detached") for name in losses]
    options = "--temperatures 0.1 --seeds 0 --steps 2 --batch-size 16 --jobs 1 --out"
    assert main(["predict", str(file), "--losses", *named, *options.split(), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weince: detached_loss:Detached 0.1: a loss must have a gradient")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_error_of_ones_own_loss_names_its_line(file, tmp_path, monkeypatch, capsys):
    (tmp_path / "late_loss.py").write_text("""
from weince import DCLLoss
class Late(DCLLoss):
    steps = 0
    def forward(self, z_i, z_j):
        self.steps += 1
        if self.steps == 2:
            raise ValueError("no such label")
        return super().forward(z_i, z_j)
""")
    monkeypatch.syspath_prepend(tmp_path)
    options = "--losses late_loss:Late --temperatures 0.1 --seeds 0 --steps 2 --batch-size 16 --jobs 1 --out"
    assert main(["predict", str(file), *options.split(), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith("weince: no such label (late_loss.py, line 8)\n")


def test_features_with_ids_want_a_loss_that_takes_them(tmp_path, monkeypatch):
    z_i, z_j, labels = two_views()
    np.savez(tmp_path / "with_ids.npz", z_i=z_i, z_j=z_j, ids=labels)
    (tmp_path / "losses_and_ids.py").write_text("""
import torch
class Without(torch.nn.Module):
    def forward(self, z_i, z_j):
        return (z_i - z_j).square().mean()
class With(torch.nn.Module):
    def forward(self, z_i, z_j, ids):
        return (z_i - z_j).square().mean() + 0 * len(ids)
""")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"seeds": [0], "steps": 2, "probe": SMALL, "progress": False}

    def heads(name):
        losses = {"mine": LossConfig(f"losses_and_ids:{name}")}
        return predict(tmp_path / "with_ids.npz", tmp_path / name, losses=losses, **options)

    with pytest.raises(ValueError, match=r"mine: the loss fails on .* unexpected keyword argument 'ids'"):
        heads("Without")
    assert not (tmp_path / "Without").exists()
    assert heads("With").is_file()


def test_constant_features_are_refused():
    z = np.tile(np.arange(1.0, 9.0), (80, 1)) * np.linspace(1, 1 + 1e-9, 80)[:, None]
    turned = z.copy()
    turned[0, 0] = -1.0  # rows of one direction would be refused on reading
    with pytest.raises(InputError):
        prepare(make_pairs("toy", z, z), None, batch=16, axes=8)
    assert prepare(make_pairs("toy", turned, z), None, batch=16, axes=8).views.first.shape == (80, 1)


def test_labels_from_a_file_of_their_own(file, tmp_path):
    np.save(tmp_path / "labels.npy", np.array(["a", "b"] * 40))
    _, labels = read_features(file, tmp_path / "labels.npy")
    assert labels.tolist() == [0, 1] * 40
    np.savez(tmp_path / "other.npz", x=np.arange(80))
    with pytest.raises(InputError, match="want an array, or the key labels; got x"):
        read_features(file, tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            np.zeros(80, int),
            "All 80 items have one label, with which every neighbour is right: no R@1 and no vote.",
        ),
        (
            np.arange(80),
            "No label of the 80 items occurs twice, so no neighbour is right: no R@1 and no vote.",
        ),
    ],
    ids=["one label", "a label each"],
)
def test_labels_that_tell_no_heads_apart_are_left_out_with_a_remark(tmp_path, labels, said):
    z_i, z_j, _ = two_views()
    np.savez(tmp_path / "z.npz", z_i=z_i, z_j=z_j, labels=labels)
    out = tmp_path / "out"
    page = predict(
        tmp_path / "z.npz", out, losses=LOSSES, seeds=[0], steps=2, probe=SMALL, progress=False
    ).read_text(encoding="utf-8")
    assert said in page.splitlines()
    assert "R@1, %" not in page
    head = json.loads((out / "heads.json").read_text(encoding="utf-8"))["heads"][0]
    assert head["r1"] is None
    assert head["vote"] is None


@pytest.mark.parametrize(
    ("different", "said"),
    [
        (1, "is right for 98.8 % of the items. R@1 and vote can hardly be higher, so they say little."),
        (4, "is right for 95.0 % of the items. R@1 and vote can hardly be higher, so they say little."),
        (5, "is right for 93.8 % of the items."),
    ],
)
def test_what_guessing_the_most_frequent_label_gives_stands_above_the_table(tmp_path, different, said):
    z_i, z_j, _ = two_views()
    labels = np.where(np.arange(80) < different, 5, 3)
    np.savez(tmp_path / "z.npz", z_i=z_i, z_j=z_j, labels=labels)
    page = predict(
        tmp_path / "z.npz", tmp_path, losses=LOSSES, seeds=[0], steps=1, probe=SMALL, progress=False
    ).read_text(encoding="utf-8")
    assert f"Always guessing the most frequent label {said}" in page.splitlines()
    assert "R@1, % | vote, % |" in page


def test_train_heads_is_deterministic(views):
    found = [train_heads(views, list(LOSSES.values()), 1, 3, SMALL) for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.posix
def test_an_interruption_leaves_what_is_finished(file, tmp_path):
    grid = ["--losses", "infonce", "--temperatures", "0.1", "--seeds", *map(str, range(200))]
    length = ["--batch-size", "16", "--steps", "100", "--jobs", "2", "--out", str(tmp_path / "out")]
    process = Program("-m", "weince", "predict", file, *grid, *length)
    while not (tmp_path / "out" / "heads.json").exists():
        assert process.poll() is None, process.wait()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    ended = process.wait()
    assert ended.returncode == 130
    assert ended.stderr.endswith("weince: interrupted, the same command goes on with the missing heads\n")
    assert 1 <= len(json.loads((tmp_path / "out" / "heads.json").read_text(encoding="utf-8"))["heads"]) < 200
