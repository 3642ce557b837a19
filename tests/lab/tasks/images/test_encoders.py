"""Encoders: sizes, names and initialisation of their weights, and the computation of their layers."""

import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weince.lab.tasks.images.encoders import Projector, ProjectorConfig, SimCLR, build
from weince.lab.tasks.images.resnet import BasicBlock, Bottleneck
from weince.lab.tasks.images.vit import Attention, VisionTransformer


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --- shapes and counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "count", "features"),
    [
        ("resnet18", 96, 11_176_512, 512),  # torchvision's without fc
        ("resnet50", 224, 23_508_032, 2048),
        ("resnet18", 32, 11_176_512 - 64 * 3 * (49 - 9), 512),
        ("resnet50", 64, 23_508_032 - 64 * 3 * (49 - 9), 2048),
        ("vit_small", 224, 21_665_664, 384),  # timm's vit_small_patch16_224 without its head
        ("tiny", 32, 12_144, 64),
    ],
)
def test_number_of_weights(name, size, count, features):
    with torch.device("meta"):
        model = build(name, size=size)
    assert parameters(model) == count
    assert model.features == features


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("resnet18", 32, {"width": 8}),
        ("resnet18", 96, {"width": 8}),
        ("resnet50", 32, {"width": 4}),
        ("resnet50", 33, {"width": 4, "stem": "imagenet"}),
        ("vit_small", 32, {}),
        ("vit_small", 64, {}),
        ("tiny", 32, {}),
        ("tiny", 8, {}),
    ],
)
def test_images_to_features(name, size, options):
    model = build(name, size=size, **options)
    h = model(torch.rand(2, 3, size, size))
    assert h.shape == (2, model.features)
    assert h.dtype == torch.float32
    h.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("size", "stem", "kernel", "map_size"),
    [
        (32, None, 3, 4),
        (64, None, 3, 8),
        (96, None, 7, 3),
        (224, None, 7, 7),
        (32, "imagenet", 7, 1),
        (96, "cifar", 3, 12),
    ],
)
def test_the_stem_follows_the_size(size, stem, kernel, map_size):
    model = build("resnet18", size=size, width=4, stem=stem)
    assert model.conv1.kernel_size == (kernel, kernel)
    assert isinstance(model.maxpool, nn.MaxPool2d) == (kernel == 7)
    seen = []
    model.layer4.register_forward_hook(lambda module, inputs, output: seen.append(output))
    h = model(torch.rand(2, 3, size, size))
    assert seen[0].shape[2:] == (map_size, map_size)
    torch.testing.assert_close(h, seen[0].mean(dim=(2, 3)))


# --- names and values of a ResNet -------------------------------------------------------------------------------


def torchvision_names(depths: list[int], convs: int, first_shortcut: bool) -> set[str]:
    """The names in torchvision's state dict of a ResNet, without fc."""

    def norm(prefix: str) -> set[str]:
        kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return {f"{prefix}.{kind}" for kind in kinds}

    names = {"conv1.weight"} | norm("bn1")
    for stage, depth in enumerate(depths, 1):
        for block in range(depth):
            prefix = f"layer{stage}.{block}"
            for i in range(1, convs + 1):
                names |= {f"{prefix}.conv{i}.weight"} | norm(f"{prefix}.bn{i}")
            if block == 0 and (stage > 1 or first_shortcut):
                names |= {f"{prefix}.downsample.0.weight"} | norm(f"{prefix}.downsample.1")
    return names


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_names_are_torchvisions(stem):
    with torch.device("meta"):
        assert set(build("resnet18", size=32, stem=stem).state_dict()) == torchvision_names([2] * 4, 2, False)
        assert set(build("resnet50", size=32, stem=stem).state_dict()) == torchvision_names(
            [3, 4, 6, 3], 3, True
        )


def test_shapes_are_torchvisions():
    with torch.device("meta"):
        small, large = (
            {name: tuple(x.shape) for name, x in build(name, size=224).state_dict().items()}
            for name in ("resnet18", "resnet50")
        )
    assert small["layer2.0.conv1.weight"] == (128, 64, 3, 3)
    assert small["layer4.0.downsample.0.weight"] == (512, 256, 1, 1)
    assert large["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert large["layer3.0.conv1.weight"] == (256, 512, 1, 1)
    assert large["layer3.0.conv2.weight"] == (256, 256, 3, 3)
    assert large["layer4.2.conv3.weight"] == (2048, 512, 1, 1)


def batch_norm(x, module):
    return F.batch_norm(x, None, None, module.weight, module.bias, training=True)


def test_basic_block_is_its_definition():
    block = BasicBlock(4, 8, stride=2)
    x = torch.randn(3, 4, 8, 8)
    y = torch.relu(batch_norm(F.conv2d(x, block.conv1.weight, stride=2, padding=1), block.bn1))
    y = batch_norm(F.conv2d(y, block.conv2.weight, padding=1), block.bn2)
    side = batch_norm(F.conv2d(x, block.downsample[0].weight, stride=2), block.downsample[1])
    torch.testing.assert_close(block(x), torch.relu(y + side))


def test_bottleneck_has_its_stride_in_the_middle():
    block = Bottleneck(4, 8, stride=2)
    x = torch.randn(3, 4, 8, 8)
    y = torch.relu(batch_norm(F.conv2d(x, block.conv1.weight), block.bn1))
    y = torch.relu(batch_norm(F.conv2d(y, block.conv2.weight, stride=2, padding=1), block.bn2))
    y = batch_norm(F.conv2d(y, block.conv3.weight), block.bn3)
    side = batch_norm(F.conv2d(x, block.downsample[0].weight, stride=2), block.downsample[1])
    torch.testing.assert_close(block(x), torch.relu(y + side))


def test_a_block_of_one_shape_has_no_shortcut_weights():
    block = BasicBlock(8, 8, stride=1).eval()
    assert block.downsample is None
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 8, 4, 4)
    torch.testing.assert_close(block(x), torch.relu(x))


def test_initialisation_is_torchvisions():
    model = build("resnet18", size=32)
    weight = model.layer3[0].conv2.weight  # fan out 256 * 9, gain sqrt(2)
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (256 * 9)), rel=0.01)
    weight = model.layer4[0].downsample[0].weight  # fan out 512, not fan in 256
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 512), rel=0.01)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 20
    assert all((m.weight == 1).all() and (m.bias == 0).all() for m in norms)


# --- the transformer --------------------------------------------------------------------------------------------


def test_attention_is_its_definition():
    layer = Attention(12, heads=3).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    want = torch.empty_like(x)
    for n in range(2):
        q, k, v = (x[n] @ layer.qkv.weight.T + layer.qkv.bias).split(12, dim=1)
        heads = []
        for head in range(3):
            part = slice(4 * head, 4 * head + 4)
            weights = torch.softmax(q[:, part] @ k[:, part].T / 2, dim=1)
            heads.append(weights @ v[:, part])
        want[n] = torch.cat(heads, dim=1) @ layer.proj.weight.T + layer.proj.bias
    torch.testing.assert_close(layer(x), want)


def test_transformer_reads_patches_row_by_row_and_gives_the_class_token():
    model = VisionTransformer(8, 4, dim=12, depth=0, heads=3)
    x = torch.randn(1, 3, 8, 8)
    tokens = model.patch_embed(x)[0]
    weight = model.patch_embed.proj.weight.flatten(1)
    for index, (row, column) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
        patch = x[0, :, row : row + 4, column : column + 4].flatten()
        torch.testing.assert_close(tokens[index], weight @ patch + model.patch_embed.proj.bias)
    token = (model.cls_token + model.pos_embed[:, :1])[0, 0]
    torch.testing.assert_close(model(x)[0], F.layer_norm(token, (12,), eps=1e-6))


def test_transformer_names_are_timms():
    with torch.device("meta"):
        names = set(build("vit_small", size=32).state_dict())
    block = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    layers = {f"blocks.{i}.{layer}" for i in range(12) for layer in block} | {"patch_embed.proj", "norm"}
    assert names == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")} | {
        "cls_token",
        "pos_embed",
    }


def test_transformer_depends_on_where_a_patch_is():
    model = build("vit_small", size=32).eval()
    x = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert not torch.allclose(model(x), model(x.roll(4, dims=3)), atol=1e-6)


# --- projector and SimCLR ---------------------------------------------------------------------------------------


def test_projector_is_its_definition():
    projector = Projector(6, ProjectorConfig(hidden=5), out=4)
    assert {name: tuple(x.shape) for name, x in projector.state_dict().items()} == {
        "0.weight": (5, 6),
        "2.weight": (4, 5),
    }
    h = torch.randn(3, 6)
    want = torch.relu(h @ projector[0].weight.T) @ projector[2].weight.T
    torch.testing.assert_close(projector(h), want)
    assert Projector(512)[0].weight.shape == (512, 512)
    assert Projector(512)[2].weight.shape == (64, 512)


@pytest.mark.parametrize(("norm", "followed"), [("none", []), ("hidden", [0, 1]), ("all", [0, 1, 2])])
def test_a_deeper_projector_with_batch_norm(norm, followed):
    projector = Projector(6, ProjectorConfig(hidden=5, layers=3, norm=norm), out=4)
    h = x = torch.randn(16, 6)
    linear = [layer for layer in projector if isinstance(layer, nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in linear] == [(5, 6), (5, 5), (4, 5)]
    for number, layer in enumerate(linear):
        x = x @ layer.weight.T
        if number in followed:
            x = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
        x = x.relu() if number < 2 else x
    torch.testing.assert_close(projector(h), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden": 0}, "hidden must be at least 1; got 0"),
        ({"layers": 1}, "a projector has at least 2 layers; got 1"),
        ({"norm": "batch"}, "norm must be one of none, hidden, all; got 'batch'"),
    ],
)
def test_a_projector_that_cannot_be(wrong, said):
    with pytest.raises(ValueError, match=said):
        ProjectorConfig(**wrong)


def test_simclr_gives_features_and_embeddings():
    model = SimCLR(build("tiny", size=32)).eval()
    x = torch.rand(4, 3, 32, 32)
    h, z = model(x)
    torch.testing.assert_close(h, model.encoder(x))
    torch.testing.assert_close(z, model.projector(h))
    other = SimCLR(build("tiny", size=32), Projector(64, out=8))
    assert other(x)[1].shape == (4, 8)


# --- names ------------------------------------------------------------------------------------------------------


def test_unknown_names_list_the_known():
    with pytest.raises(
        ValueError, match=r"unknown encoder 'resnet81' \(did you mean resnet18\?\): .*vit_small, tiny"
    ):
        build("resnet81", size=32)
    with pytest.raises(ValueError, match="unknown encoder 'xyz': there are resnet18"):
        build("xyz", size=32)
    with pytest.raises(ValueError, match="stem must be one of cifar, imagenet; got 'stl'"):
        build("resnet18", size=32, stem="stl")
    with pytest.raises(ValueError, match="vit_small is for images of 32, 64, 224 px; got 96"):
        build("vit_small", size=96)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_libraries_that_are_not_there(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(
        ValueError, match=f"the encoder {library}:resnet34 needs {library}: pip install {library}"
    ):
        build(f"{library}:resnet34", size=32)


class Classifier(nn.Module):
    """Shaped like a torchvision model that ends in an MLP, whose last layer must be removed."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, num_classes))

    def forward(self, x):
        return self.classifier(self.features(x))


def test_a_torchvision_model_loses_its_last_layer(monkeypatch):
    """A stand-in replaces the library."""
    models = types.ModuleType("torchvision.models")
    made = {"vgg": Classifier(), "squeezenet": nn.Sequential(nn.Conv2d(3, 10, 1), nn.AdaptiveAvgPool2d(1))}
    models.list_models = lambda: list(made)
    models.get_model = lambda name, *, weights: made[name]
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    encoder = build("torchvision:vgg", size=32)
    x = torch.rand(2, 3, 8, 8)
    assert encoder.features == 7
    want = torch.relu(encoder.model.classifier[0](encoder.model.features(x)))
    torch.testing.assert_close(encoder(x), want)
    with pytest.raises(ValueError, match="torchvision has no model 'vggg'"):
        build("torchvision:vggg", size=32)
    with pytest.raises(ValueError, match=r"ends in a linear layer.*; got squeezenet without one"):
        build("torchvision:squeezenet", size=32)


def test_a_timm_model_is_told_the_size_if_it_asks(monkeypatch):
    """A stand-in replaces the library; its convnets do not accept ``img_size``."""

    def create_model(name, num_classes, **options):
        if name == "nothing":
            raise RuntimeError("Unknown model (nothing)")
        if name == "convnet" and options:
            raise TypeError("unexpected keyword 'img_size'")
        model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
        # Features are wider than num_features, as those of mobilenetv3 and vgg.
        model.num_features, model.given = 9, options
        if name == "broken":
            model[0].forward = lambda x: x.missing
        return model

    timm = types.ModuleType("timm")
    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert build("timm:convnet", size=32).model.given == {}
    assert build("timm:vit", size=32).model.given == {"img_size": 32}
    assert build("timm:vit", size=32).features == 12
    with pytest.raises(ValueError, match="timm has no model 'nothing'"):
        build("timm:nothing", size=32)
    with pytest.raises(
        ValueError, match=r"encoder timm:broken fails on images \(2, 3, 32, 32\): AttributeError"
    ):
        build("timm:broken", size=32)
