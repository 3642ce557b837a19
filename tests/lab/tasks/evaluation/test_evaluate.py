"""Features of whole data sets, and the evaluation from images to a record."""

import json
from collections import namedtuple

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from weince.lab.tasks.images.evaluation import (
    LabelledFeatures,
    evaluate,
    extract,
    fingerprint,
    knn,
    linear_probe,
    quick_epochs,
    table,
)
from weince.lab.tasks.images.evaluation.protocol import split

Images = namedtuple(
    "Images", "name train_images train_labels test_images test_labels class_names pretrain_images"
)


def coloured(seed=0, name="colours"):
    """Three classes, each brighter in one channel: 60 training images and 31 test images of 6 x 4 pixels."""
    rng = np.random.default_rng(seed)

    def draw(n):
        labels = np.arange(n) % 3
        images = rng.integers(0, 120, size=(n, 6, 4, 3), dtype=np.uint8)
        images[np.arange(n), :, :, labels] += 120
        return images, labels.astype(np.int64)

    train, test = draw(60), draw(31)
    return Images(name, *train, *test, ("red", "green", "blue"), None)


class MeanColour(nn.Module):
    """Features (b, 6): mean and peak of each channel; records the sizes of its batches."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        x = self.norm(x)
        return torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1)


def test_features_are_those_of_each_image_alone():
    images = coloured().train_images
    encoder = MeanColour()
    with torch.no_grad():
        encoder.norm.running_mean.fill_(0.25)
    found = extract(encoder, images, batch=7, progress=False)
    assert encoder.seen == [7] * 8 + [4]  # the last, smaller batch is used too
    for image, row in zip(images, found, strict=True):
        x = ((image / 255) - 0.25) / np.sqrt(1 + 1e-5)
        np.testing.assert_allclose(row.numpy(), [*x.mean((0, 1)), *x.max((0, 1))], atol=1e-6)
    assert found.dtype == torch.float32
    assert not found.requires_grad


@pytest.mark.parametrize("training", [True, False])
def test_the_encoder_keeps_its_mode_and_its_statistics(training):
    encoder = MeanColour().train(training)
    before = encoder.norm.running_mean.clone()
    extract(encoder, coloured().train_images, progress=False)
    assert encoder.training is training
    assert torch.equal(encoder.norm.running_mean, before)


def test_bf16_features_are_float32_and_near():
    images, encoder = coloured().train_images, nn.Sequential(nn.Flatten(), nn.Linear(72, 5))
    exact, rough = (extract(encoder, images, precision=p, progress=False) for p in ("fp32", "bf16"))
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((4, 3, 6, 4), dtype=np.uint8), r"got uint8 \(4, 3, 6, 4\)"),
        (np.zeros((4, 6, 4, 3)), "got float64"),
        (np.zeros((0, 6, 4, 3), dtype=np.uint8), r"\(0, 6, 4, 3\)"),
    ],
)
def test_unusable_images_are_named(images, message):
    with pytest.raises(ValueError, match=message):
        extract(MeanColour(), images, progress=False)


def test_an_encoder_that_gives_maps_is_refused():
    with pytest.raises(
        ValueError, match=r"must return \(n, features\) for n = 60 images; got \(60, 3, 6, 4\)"
    ):
        extract(nn.Identity(), coloured().train_images, progress=False)


def test_the_record_of_an_evaluation():
    record = evaluate(MeanColour(), coloured(), progress=False).record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["data"] == "colours"
    assert record["width"] == 6
    assert record["quick"] is False
    assert record["probe_seeds"] == record["split_seeds"] == [1, 2, 3, 4, 5]
    for name in ("linear", "knn", "r1", "r2", "r5", "r10", "r20", "r50"):
        for kind in ("validation", "test"):
            values = record[f"{name}_{kind}"]
            assert len(values) == 5
            assert record[f"{name}_{kind}_mean"] == pytest.approx(np.mean(values))
    assert 0 < record["map_r_test_mean"] <= 100.0
    assert record["r1_test_mean"] == 100.0  # the classes are far apart
    assert record["r1_validation_mean"] == 100.0


def test_validation_and_test_are_judged_on_their_own_images():
    data = coloured()
    swapped = data._replace(test_labels=(data.test_labels + 1) % 3)
    record = evaluate(MeanColour(), swapped, progress=False).record()
    assert record["r1_validation_mean"] == record["knn_validation_mean"] == 100.0
    assert record["r1_test_mean"] == record["knn_test_mean"] == 0.0
    assert record["linear_test_mean"] < record["linear_validation_mean"]
    assert record["map_r_test_mean"] == 0.0 < record["map_r_validation_mean"]


@pytest.mark.parametrize("labels", ["train_labels", "test_labels"])
def test_data_without_labels_are_refused(labels):
    with pytest.raises(ValueError, match="colours has no labels, which an evaluation needs"):
        evaluate(MeanColour(), coloured()._replace(**{labels: None}), progress=False)


def test_quick_says_so_and_uses_one_seed():
    quick = evaluate(MeanColour(), coloured(), quick=True, progress=False)
    record = quick.record()
    assert record["quick"] is True
    assert record["probe_seeds"] == record["split_seeds"] == [1]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table(quick))
    assert "a look only" in shown.get()
    assert f"{record['linear_test_mean']:.2f}" in shown.get()


@pytest.mark.parametrize(
    ("rows", "epochs"),
    [
        (40_000, 10),  # CIFAR: 157 steps per epoch
        (12_800, 10),  # 50 steps per epoch, 500 in total
        (12_544, 11),  # 49 steps per epoch
        (5_000, 25),  # 20 steps per epoch
        (1_157, 100),  # digits: 5 steps per epoch, and 100 epochs are the protocol's limit
        (48, 100),
    ],
)
def test_a_quick_probe_takes_ten_epochs_or_500_steps(rows, epochs):
    assert quick_epochs(rows) == epochs


def test_a_quick_probe_of_few_rows_learns_as_much_as_the_full_one():
    quick, full = (evaluate(nn.Flatten(), coloured(), quick=q, progress=False) for q in (True, False))
    assert quick.linear.test == full.linear.test[:1]
    assert quick.linear.validation == full.linear.validation[:1]


def test_names_are_no_markup():
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table(evaluate(MeanColour(), coloured(name="[red]data"), quick=True, progress=False)))
    assert "[red]data" in shown.get()


def test_the_fingerprint_tells_versions_apart():
    data = coloured()
    assert fingerprint(data) == fingerprint(coloured())
    changed = data.test_images.copy()
    changed[3, 2, 1, 0] ^= 1
    assert fingerprint(data._replace(test_images=changed)) != fingerprint(data)
    for labels in ("train_labels", "test_labels"):
        assert fingerprint(data._replace(**{labels: getattr(data, labels)[::-1]})) != fingerprint(data)
    assert fingerprint(data._replace(train_images=data.train_images[::-1])) != fingerprint(data)
    turned = data.train_images.reshape(60, 4, 6, 3)  # the same bytes
    assert fingerprint(data._replace(train_images=turned)) != fingerprint(data)


def test_the_fingerprint_is_of_all_images():
    many = np.zeros((5000, 1, 1, 3), dtype=np.uint8)  # it reads 4096 at a time
    changed = many.copy()
    changed[-1] = 1
    one, other = (fingerprint(coloured()._replace(train_images=images)) for images in (many, changed))
    assert one != other


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_evaluation_on_a_gpu():
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(16))
    encoder(torch.zeros(1, 3, 6, 4))
    cpu, gpu = (evaluate(encoder, coloured(), device=d, progress=False).record() for d in ("cpu", "cuda"))
    assert gpu["linear_test_mean"] == pytest.approx(cpu["linear_test_mean"], abs=100 / 31)
    assert gpu["r1_test_mean"] == pytest.approx(cpu["r1_test_mean"], abs=100 / 31)


def test_the_protocol_is_the_written_one():
    """The defaults equal the protocol set by hand: five probes on the 80/20 split of seed 1, kNN on five splits."""
    data = coloured(3)
    rng = np.random.default_rng(0)  # half of the labels are noise, so any change shows
    labels = np.where(rng.random(60) < 0.5, rng.integers(0, 3, 60), data.train_labels)
    data = data._replace(train_labels=labels)
    encoder = MeanColour()
    features = [extract(encoder, images, progress=False) for images in (data.train_images, data.test_images)]
    train = LabelledFeatures(features[0], torch.from_numpy(data.train_labels))
    test = LabelledFeatures(features[1], torch.from_numpy(data.test_labels))
    found = evaluate(encoder, data, progress=False)
    rows = split(data.train_labels, seed=1)
    seeds = (1, 2, 3, 4, 5)
    by_hand = linear_probe(
        train, test, split=rows, seeds=seeds, epochs=100, batch=256, lr=3e-4, progress=False
    )
    assert found.linear == by_hand
    assert found.knn == knn(train, test, seeds=seeds, k=50, temperature=0.1, progress=False)
