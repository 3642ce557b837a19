"""The batched probe against probes trained one by one with nn.Linear and torch.optim.Adam."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weince.lab.tasks.images.evaluation.features import LabelledFeatures
from weince.lab.tasks.images.evaluation.linear import fit, linear_probe
from weince.lab.tasks.images.evaluation.protocol import Split, split


def blobs(n, classes, width, *, seed=0):
    """Features around one centre per class."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (n,), generator=generator)
    return LabelledFeatures(centres[labels] + torch.randn(n, width, generator=generator), labels)


def one_by_one(x, y, classes, seed, epochs, batch, lr):
    """The definition: train one layer with one optimizer over shuffled epochs."""
    torch.manual_seed(seed)
    layer = nn.Linear(x.shape[1], classes)
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=order).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(layer(x[rows]), y[rows]).backward()
            optimizer.step()
    return layer


@pytest.mark.parametrize(("n", "batch"), [(200, 64), (128, 64), (30, 64), (65, 64)])
@pytest.mark.parametrize("lr", [3e-4, 1e-2])
def test_all_seeds_together_equal_each_alone(n, batch, lr):
    x, y = blobs(n, 7, 12)
    layers = fit(x, y, 7, seeds=(1, 2, 5), epochs=6, batch=batch, lr=lr, progress=False)
    for place, seed in enumerate((1, 2, 5)):
        alone = one_by_one(x, y, 7, seed, epochs=6, batch=batch, lr=lr)
        torch.testing.assert_close(layers.weight[place], alone.weight.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(layers.bias[place, 0], alone.bias.detach(), rtol=0, atol=1e-5)


def test_the_protocols_length_of_training_stays_equal():
    x, y = blobs(600, 4, 16)
    layers = fit(x, y, 4, seeds=(1, 3), epochs=100, batch=256, lr=3e-4, progress=False)
    for place, seed in enumerate((1, 3)):
        alone = one_by_one(x, y, 4, seed, epochs=100, batch=256, lr=3e-4)
        torch.testing.assert_close(layers.weight[place], alone.weight.detach(), rtol=0, atol=1e-5)


def test_a_seed_does_not_depend_on_its_company_nor_on_the_global_generator():
    x, y = blobs(100, 3, 5)
    options = {"epochs": 2, "batch": 32, "lr": 3e-4, "progress": False}
    before = torch.random.get_rng_state()
    together = fit(x, y, 3, seeds=(1, 2), **options)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    alone = fit(x, y, 3, seeds=(2,), **options)
    torch.testing.assert_close(together.weight[1], alone.weight[0], rtol=0, atol=1e-7)


def test_accuracies_are_those_of_the_layers_on_whole_sets():
    train, test = blobs(300, 5, 8), blobs(77, 5, 8, seed=1)
    rows = split(train.labels.numpy(), seed=1)
    options = {"epochs": 5, "batch": 32, "lr": 1e-2}
    found = linear_probe(train, test, split=rows, seeds=(1, 2), progress=False, **options)
    x, y = train.features[rows.train], train.labels[rows.train]
    for place, seed in enumerate((1, 2)):
        layer = one_by_one(x, y, 5, seed, **options)
        for part, accuracy in (
            ((train.features[rows.validation], train.labels[rows.validation]), found.validation),
            (test, found.test),
        ):
            right = (layer(part[0]).argmax(1) == part[1]).float().mean()
            assert accuracy[place] == pytest.approx(100 * float(right))
    assert found.seeds == (1, 2)
    assert min(found.test) > 60  # chance is 20


def test_the_validation_rows_are_not_trained_on():
    train = blobs(100, 2, 4)
    rows = split(train.labels.numpy(), seed=1)
    features = train.features.clone()
    features[rows.validation] = 1e6 * torch.randn(len(rows.validation), 4)
    options = {"split": rows, "seeds": (1,), "epochs": 2, "progress": False}
    test = blobs(50, 2, 4, seed=1)
    spoiled = linear_probe(LabelledFeatures(features, train.labels), test, **options)
    assert spoiled.test == linear_probe(train, test, **options).test


def test_labels_that_only_the_test_set_has_count_as_wrong():
    train = LabelledFeatures(torch.eye(2).repeat(20, 1), torch.tensor([0, 1]).repeat(20))
    test = LabelledFeatures(torch.eye(2), torch.tensor([0, 9]))
    found = linear_probe(
        train, test, split=split(train.labels.numpy(), seed=1), lr=0.1, epochs=20, progress=False
    )
    assert set(found.test) == {50.0}


def test_a_set_larger_than_a_chunk_is_judged_as_a_whole():
    train = LabelledFeatures(torch.eye(2).repeat(20, 1), torch.tensor([0, 1]).repeat(20))
    truth = torch.arange(5000) % 2  # a chunk has 4096 rows
    labels = torch.where(torch.arange(5000) < 1000, 1 - truth, truth)
    found = linear_probe(
        train,
        LabelledFeatures(torch.eye(2)[truth], labels),
        split=split(train.labels.numpy(), seed=1),
        lr=0.1,
        epochs=20,
        progress=False,
    )
    assert set(found.test) == {80.0}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda x, y: (x.fill_(torch.nan), y),
            "train features must be finite; got NaN or inf in 40 of 40 rows",
        ),
        (lambda x, y: (x[0], y), r"got \(3,\) and \(40,\)"),
        (lambda x, y: (x, y[1:]), r"got \(40, 3\) and \(39,\)"),
        (lambda x, y: (x[:0], y[:0]), "train features must have at least one row"),
    ],
)
def test_unusable_features_are_named(spoil, message):
    x, y = blobs(40, 2, 3)
    rows = split(y.numpy(), seed=1)
    with pytest.raises(ValueError, match=message):
        linear_probe(LabelledFeatures(*spoil(x, y)), blobs(9, 2, 3), split=rows, progress=False)


def test_unusable_options_are_named():
    train = blobs(40, 2, 3)
    rows = split(train.labels.numpy(), seed=1)
    with pytest.raises(ValueError, match=r"got \[\], 100, 256"):
        linear_probe(train, train, split=rows, seeds=(), progress=False)
    empty = Split(rows.train, np.zeros(0, dtype=np.int64))
    with pytest.raises(ValueError, match="at least one row to be judged on"):
        linear_probe(train, train, split=empty, epochs=1, progress=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [200, 192, 30])
def test_the_graph_of_an_epoch_trains_as_the_plain_loop(n):
    x, y = blobs(n, 7, 12)
    options = {"seeds": (1, 2, 5), "epochs": 6, "batch": 64, "lr": 1e-2, "progress": False}
    plain, graph = fit(x, y, 7, **options), fit(x.cuda(), y.cuda(), 7, **options)
    assert float(graph.steps) == float(plain.steps)
    torch.testing.assert_close(graph.weight.cpu(), plain.weight, rtol=0, atol=1e-5)
    torch.testing.assert_close(graph.bias.cpu(), plain.bias, rtol=0, atol=1e-5)
