"""Groups of images that share a point, against a search that follows neighbours one by one."""

import csv

import numpy as np
import programs
import pytest
import torch
import torch.nn.functional as F

script = programs.script("research/collapse.py")


def sizes_by_search(z):
    """For every row, the number of rows that can be reached in steps of a shortfall below NEAR."""
    near = (1 - z @ z.T) < script.NEAR
    sizes = []
    for start in range(len(z)):
        reached, waiting = {start}, [start]
        while waiting:
            row = waiting.pop()
            for other in np.flatnonzero(near[row]):
                if other not in reached:
                    reached.add(other)
                    waiting.append(other)
        sizes.append(len(reached))
    return sizes


def pairs(path, *, planted, epoch=""):
    """Pairs of 128 images; `planted` of them share a point and have long embeddings."""
    rng = torch.Generator().manual_seed(0)
    z_i = torch.randn(128, 16, generator=rng, dtype=torch.float64)
    if planted:
        z_i[:planted] = 100 * z_i[0] + 0.1 * z_i[:planted]
    z_j = z_i + 0.3 * torch.randn(128, 16, generator=rng, dtype=torch.float64)
    place = path / f"pairs_{planted}{epoch}.npz"
    np.savez(place, z_i=z_i.numpy(), z_j=z_j.numpy())
    return place


@pytest.mark.parametrize("planted", [0, 2, 20])
def test_groups_are_what_hangs_together(tmp_path, planted):
    z = F.normalize(script.read(pairs(tmp_path, planted=planted))[0])
    distance = (1 - z @ z.T).fill_diagonal_(torch.inf)
    assert script.group_sizes(distance).tolist() == sizes_by_search(z.numpy())


def test_a_planted_group_is_found_and_its_losses_are_its_own(tmp_path):
    found = script.look("planted", pairs(tmp_path, planted=20), batch=32)
    assert found.groups == 1
    assert found.grouped == found.largest == 20 / 128
    assert found.touching == 20 / 128
    outside, inside = found.norms
    assert inside > 20 * outside
    # Twenty images at one point cannot be told apart, so their InfoNCE loss is higher.
    assert found.inside[0] > found.losses[0]
    z_i, z_j = script.read(tmp_path / "pairs_20.npz")
    by_batch = [
        script.LOSSES["InfoNCE, 0.5"](*both) for both in zip(z_i.split(32), z_j.split(32), strict=True)
    ]
    assert found.losses[0] == pytest.approx(float(torch.stack(by_batch).mean()), rel=1e-9)
    healthy = script.look("healthy", pairs(tmp_path, planted=0), batch=32)
    assert healthy.grouped == healthy.groups == healthy.touching == 0
    assert all(np.isnan(value) for value in (*healthy.inside, healthy.norms[1]))


def test_a_table_is_written(tmp_path, capsys):
    whole, part = pairs(tmp_path, planted=0), pairs(tmp_path, planted=20)
    along = [pairs(tmp_path, planted=number, epoch=f"_{epoch}") for number, epoch in ((2, 10), (20, 20))]
    trend = f"planted={along[0]},{along[1]}"
    encoders, results = [f"healthy={whole}", f"planted={part},{part}"], str(tmp_path / "found")
    script.main([*encoders, "--batch", "32", "--results", results, "--trend", trend])
    text = (tmp_path / "found.md").read_text()
    assert "| healthy | pairs_0 | 0.0% |" in text
    assert text.count("| planted | pairs_20 | 15.6% |") == 2  # one row per encoder
    assert "planted: 1.6% at 10, 15.6% at 20." in text
    assert (tmp_path / "found.svg").read_text().startswith("<?xml")
    with (tmp_path / "found.csv").open(newline="") as file:
        healthy, planted, again = csv.DictReader(file)
    assert again == planted
    assert [healthy["trained with"], planted["trained with"]] == ["healthy", "planted"]
    assert {key: float(planted[key]) for key in ("in groups", "groups", "largest", "crowded")} == {
        "in groups": 0.15625, "groups": 1, "largest": 0.15625, "crowded": 0.15625,
    }  # fmt: skip
    assert float(planted["another within 1e-4"]) == 0.15625
    assert float(planted["length in groups"]) > 20 * float(planted["length"])
    assert healthy["length in groups"] == healthy["paper, 0.5, in groups"] == ""
    found = script.look("planted", part, batch=32)
    assert float(planted["paper, 0.5"]) == pytest.approx(found.losses[1], rel=1e-5)
    assert float(planted["beta, low lam"]) == pytest.approx(found.low.beta, rel=1e-5)
    with pytest.raises(SystemExit):
        script.main(["healthy=nowhere.npz"])
    assert "not there: nowhere.npz" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["nowhere.npz"])
    assert "wanted NAME=FILE, got 'nowhere.npz'" in capsys.readouterr().err
