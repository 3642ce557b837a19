"""Tracking: the vote is measured during training, without changing the weights."""

import numpy as np
import pytest
import torch
from training import run, same_weights, small_run, write_data

from weince.lab.tasks.images.data import load
from weince.lab.tasks.images.evaluation.features import LabelledFeatures, extract
from weince.lab.tasks.images.evaluation.knn import knn
from weince.lab.tasks.images.runs import load_model
from weince.lab.tasks.registry import train
from weince.lab.training.log import read_log


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def votes(out):
    return {row["epoch"]: row["vote"] for row in read_log(out / "log.csv") if "vote" in row}


def test_the_vote_is_that_of_the_evaluation_and_leaves_the_weights_alone(data, tmp_path):
    run(data, tmp_path / "plain", {"epochs": 3})
    run(data, tmp_path / "tracked", {"epochs": 3, "track_every": 2})
    assert same_weights(tmp_path / "plain", tmp_path / "tracked")
    assert votes(tmp_path / "plain") == {}
    assert votes(tmp_path / "tracked").keys() == {2, 3}  # every second epoch, and the last

    _, model = load_model(tmp_path / "tracked")
    images = load(str(data), size=16)
    features = LabelledFeatures(
        extract(model.encoder, images.train_images, progress=False), torch.as_tensor(images.train_labels)
    )
    wanted = knn(features, features, seeds=(1,), progress=False).validation.vote[0]
    assert votes(tmp_path / "tracked")[3] == pytest.approx(wanted, rel=1e-5)


def test_what_was_tracked_stays_when_a_run_goes_on(data, tmp_path):
    run(data, tmp_path, {"epochs": 2, "track_every": 1})
    before = votes(tmp_path)
    run(data, tmp_path, {"epochs": 4, "track_every": 2})
    assert votes(tmp_path) == {**before, 4: votes(tmp_path)[4]}
    assert before.keys() == {1, 2}


def test_images_without_labels_cannot_be_tracked(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "none.npz", train_images=rng.integers(0, 256, (40, 16, 16, 3), np.uint8))
    with pytest.raises(ValueError, match=r"none has no labels, which --track-every needs"):
        train(small_run(tmp_path / "none.npz", tmp_path / "out", track_every=1), bar=False)
    assert not (tmp_path / "out").exists()
