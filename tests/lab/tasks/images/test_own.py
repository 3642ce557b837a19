"""User-defined encoders and losses, and runs that report their collapse."""

import sys

import pytest
import torch
from torch import nn

from weince.lab.tasks.images import encoders
from weince.lab.tasks.images.training import collapse

MODULE = """
from torch import nn
from weince import DCLLoss

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 6))
    def forward(self, x):
        return self.net(x)

class Auxiliary(Net):  # as torchvision's googlenet
    def forward(self, x):
        return (self.net(x), None) if self.training else self.net(x)

class Mine(DCLLoss):
    pass

class Detached(nn.Module):
    def forward(self, z_i, z_j):
        return (z_i - z_j).square().mean().detach()

def wrong() -> nn.Module:
    return 3

def images() -> nn.Module:
    return nn.Identity()

def narrow() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(7, 6))

def needy(width) -> nn.Module:
    return nn.Linear(width, 6)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_things.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_things"
    sys.modules.pop("own_things", None)


def test_an_encoder_of_ones_own_is_found_in_the_working_folder(module):
    encoder = encoders.build(f"{module}:Net", size=8)
    assert encoder.features == 6
    assert encoder(torch.rand(3, 3, 8, 8)).shape == (3, 6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_things:wrong", "must make an nn.Module; got int"),
        ("own_things:images", r"must map images \(n, 3, 8, 8\) to features \(n, width\); got \(2, 3, 8, 8\)"),
        ("own_things:narrow", r"narrow fails on images \(2, 3, 8, 8\): RuntimeError: mat1 and mat2"),
        ("own_things:needy", "needy fails on images .* TypeError: .* missing 1 required"),
        ("own_things:nothing", "must define nothing"),
        ("own_things:nn", "must define nn"),
        ("no_such_package:Net", "cannot import no_such_package"),
        ("os:system", "must define system"),
    ],
)
def test_what_makes_no_encoder_is_refused(module, name, message):
    with pytest.raises(ValueError, match=message):
        encoders.build(name, size=8)


def test_a_run_with_both_of_ones_own_trains_and_is_read_again(module, tmp_path):
    from weince.cli import main

    arguments = "--encoder own_things:Net --loss.preset own_things:Mine --epochs 1 --device cpu"
    main(["train", *arguments.split(), "--config", "digits_tiny", "--out", str(tmp_path / "run")])
    from weince.lab.tasks.images.runs import load_model

    run, model = load_model(tmp_path / "run")
    assert run.loss.preset == "own_things:Mine"
    assert isinstance(model, nn.Module)


def test_a_detached_loss_ends_the_command_in_one_line_and_leaves_no_folder(module, tmp_path, capfd):
    from weince.cli import main

    out = tmp_path / "run"
    arguments = "--loss.preset own_things:Detached --loss.temperature null --epochs 1 --device cpu"
    assert main(["train", *arguments.split(), "--config", "digits_tiny", "--out", str(out)]) == 2
    said = capfd.readouterr().err
    assert said.startswith("weince: a loss must have a gradient with respect to the embeddings: leave out")
    assert said.count("\n") == 1
    assert not out.exists()


def test_an_encoder_that_returns_more_in_training_ends_the_command_in_one_line(module, tmp_path, capfd):
    from weince.cli import main

    arguments = "--encoder own_things:Auxiliary --epochs 1 --device cpu"
    assert main(["train", *arguments.split(), "--config", "digits_tiny", "--out", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err
    assert "encoder own_things:Auxiliary must return features (n, 6) in training too; got tuple" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("crowded", "rank", "said"),
    [
        (0.0, 12.0, None),
        (0.05, 2.0, None),
        (0.06, 12.0, "6% of the anchors lie next to another item in epoch 3"),
        (1.0, 1.2, "100% of the anchors lie next to another item and the effective rank is 1.2 in epoch 3"),
    ],
)
def test_a_collapse_is_said(crowded, rank, said):
    found = collapse({"epoch": 3, "crowded": crowded, "effective_rank": rank})
    assert found is None if said is None else said in found


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_that_collapses_says_so_once_while_it_trains_and_of_its_last_epoch(epochs, tmp_path, capfd):
    from weince.cli import main

    arguments = f"--optimizer.lr 1e6 --epochs {epochs} --device cpu"
    main(["train", "--config", "digits_tiny", *arguments.split(), "--out", str(tmp_path / "run")])
    lines = [
        line for line in capfd.readouterr().err.splitlines() if "the embeddings seem to collapse" in line
    ]
    assert len(lines) == epochs
    assert all(line.startswith("weince: ") for line in lines)
