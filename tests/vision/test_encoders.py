"""Encoders: sizes, names and initialisation of the weights, and weights from elsewhere."""

import math
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from weince.vision.encoders import Projector, SimCLR, build, load_weights
from weince.vision.resnet import BasicBlock, Bottleneck
from weince.vision.vit import Attention, VisionTransformer


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
    """The names in torchvision's state dict of a ResNet, less fc."""

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
    projector = Projector(6, 5, 4)
    assert {name: tuple(x.shape) for name, x in projector.state_dict().items()} == {
        "0.weight": (5, 6),
        "2.weight": (4, 5),
    }
    h = torch.randn(3, 6)
    want = torch.relu(h @ projector[0].weight.T) @ projector[2].weight.T
    torch.testing.assert_close(projector(h), want)
    assert Projector(512)[0].weight.shape == (512, 512)
    assert Projector(512)[2].weight.shape == (64, 512)


def test_simclr_gives_features_and_embeddings():
    model = SimCLR(build("tiny", size=32)).eval()
    x = torch.rand(4, 3, 32, 32)
    h, z = model(x)
    torch.testing.assert_close(h, model.encoder(x))
    torch.testing.assert_close(z, model.projector(h))
    other = SimCLR(build("tiny", size=32), Projector(64, 16, 8))
    assert other(x)[1].shape == (4, 8)


# --- weights from elsewhere -------------------------------------------------------------------------------------


def make(seed: int) -> SimCLR:
    torch.manual_seed(seed)
    return SimCLR(build("resnet18", size=32, width=4))


def assert_same(model: nn.Module, other: nn.Module) -> None:
    mine, others = model.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.mark.parametrize("form", ["plain", "state_dict", "model", "module", "safetensors"])
def test_whole_model(form, tmp_path):
    source, target = make(1), make(2)
    state = source.state_dict()
    if form == "module":
        state = {f"module.{name}": value for name, value in state.items()}
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form == "safetensors":
        save_file(state, path)
    else:
        torch.save({form: state} if form in ("state_dict", "model") else state, path)
    loaded = load_weights(target, path)
    assert loaded == ((), ())
    assert_same(target, source)


def test_torchvision_weights_into_an_encoder_and_a_model(tmp_path):
    """A state dict with a classifier, and without num_batches_tracked, as the older ones are."""
    source = make(1).encoder
    state = {name: x for name, x in source.state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save({**state, "fc.weight": torch.zeros(10, 32), "fc.bias": torch.zeros(10)}, tmp_path / "tv.pth")
    encoder = make(2).encoder
    assert load_weights(encoder, tmp_path / "tv.pth") == ((), ())
    assert_same(encoder, source)
    model = make(2)
    before = {name: x.clone() for name, x in model.projector.state_dict().items()}
    loaded = load_weights(model, tmp_path / "tv.pth")
    assert loaded.missing == ("projector.0.weight", "projector.2.weight")
    assert_same(model.encoder, source)
    assert all(torch.equal(before[name], x) for name, x in model.projector.state_dict().items())


def test_timm_weights_into_a_transformer(tmp_path):
    source, target = (VisionTransformer(8, 4, dim=12, depth=1, heads=3) for _ in range(2))
    torch.save(
        {**source.state_dict(), "head.weight": torch.zeros(5, 12), "head.bias": torch.zeros(5)},
        tmp_path / "w.pth",
    )
    assert load_weights(target, tmp_path / "w.pth") == ((), ())
    assert_same(target, source)


def test_the_authors_checkpoint_into_an_encoder(tmp_path):
    source = make(1)
    torch.save({**source.state_dict(), "encoder.fc.weight": torch.zeros(2, 32)}, tmp_path / "c.tar")
    encoder = make(2).encoder
    loaded = load_weights(encoder, tmp_path / "c.tar")
    assert loaded.unexpected == ("projector.0.weight", "projector.2.weight")
    assert_same(encoder, source.encoder)


def refuses(model: nn.Module, path, *messages: str) -> None:
    """The load fails with all these words, and leaves the model as it was."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_weights(model, path)
    for message in messages:
        assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


def test_what_does_not_fit_is_named(tmp_path):
    state = make(1).state_dict()
    del state["encoder.layer2.0.conv1.weight"]
    torch.save(state, tmp_path / "short.pt")
    refuses(make(2), tmp_path / "short.pt", "missing: encoder.layer2.0.conv1.weight")
    torch.save({**make(1).state_dict(), "queue": torch.zeros(3)}, tmp_path / "long.pt")
    refuses(make(2), tmp_path / "long.pt", "unexpected: queue")
    half = {name: x for name, x in make(1).state_dict().items() if name != "projector.2.weight"}
    torch.save(half, tmp_path / "half.pt")
    refuses(make(2), tmp_path / "half.pt", "missing: projector.2.weight")
    torch.save(build("tiny", size=32).state_dict(), tmp_path / "tiny.pt")
    refuses(
        make(2), tmp_path / "tiny.pt", "missing: encoder.conv1.weight", "more", "unexpected: encoder.layers.0"
    )


def test_the_other_stem_is_suggested(tmp_path):
    torch.save(build("resnet18", size=96, width=4).state_dict(), tmp_path / "w.pt")
    refuses(
        make(1),
        tmp_path / "w.pt",
        "conv1.weight is (4, 3, 7, 7), the model's is (4, 3, 3, 3) (is the other stem",
    )


class Evil:
    def __reduce__(self):
        return (print, ("code from a checkpoint ran",))


def test_files_that_are_no_weights(tmp_path, capsys):
    refuses(make(1), tmp_path / "none.pt", "no weights at")
    (tmp_path / "noise.pt").write_bytes(b"\x00noise" * 100)
    refuses(make(1), tmp_path / "noise.pt", "cannot be read as weights")
    (tmp_path / "noise.safetensors").write_bytes(b"\x00noise" * 100)
    refuses(make(1), tmp_path / "noise.safetensors", "cannot be read as weights")
    torch.save({"state_dict": {"a": 3}}, tmp_path / "numbers.pt")
    refuses(make(1), tmp_path / "numbers.pt", "holds no state dict of tensors")
    torch.save([1, 2], tmp_path / "list.pt")
    refuses(make(1), tmp_path / "list.pt", "holds no state dict of tensors")
    torch.save({"state_dict": Evil()}, tmp_path / "evil.pt")
    refuses(make(1), tmp_path / "evil.pt", "cannot be read as weights")
    assert "ran" not in capsys.readouterr().out


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
    with pytest.raises(ValueError, match="vit_small is for images of 32, 64, 224 px, got 96"):
        build("vit_small", size=96)
    with pytest.raises(ValueError, match="multiple of the patch of 4 px is needed, got 30"):
        VisionTransformer(30, 4)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_libraries_that_are_not_there(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(
        ValueError, match=f"the encoder {library}:resnet34 needs {library}: pip install {library}"
    ):
        build(f"{library}:resnet34", size=32)


class Classifier(nn.Module):
    """Shaped as another library's model: an MLP at the end, of which the last layer is to go."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, num_classes))

    def forward(self, x):
        return self.classifier(self.features(x))


def test_a_torchvision_model_loses_its_last_layer(monkeypatch):
    """With a stand-in for the library."""
    models = types.ModuleType("torchvision.models")
    models.list_models = lambda: ["vgg"]
    models.get_model = lambda name, *, weights: Classifier()
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    encoder = build("torchvision:vgg", size=32)
    x = torch.rand(2, 3, 8, 8)
    assert encoder.features == 7
    want = torch.relu(encoder.model.classifier[0](encoder.model.features(x)))
    torch.testing.assert_close(encoder(x), want)
    with pytest.raises(ValueError, match="torchvision has no model 'vggg'"):
        build("torchvision:vggg", size=32)


def test_a_timm_model_is_told_the_size_if_it_asks(monkeypatch):
    """With a stand-in for the library, whose convnets know no ``img_size``."""

    def create_model(name, num_classes, **options):
        if name == "nothing":
            raise RuntimeError("Unknown model (nothing)")
        if name == "convnet" and options:
            raise TypeError("unexpected keyword 'img_size'")
        model = nn.Flatten()
        model.num_features, model.given = 9, options
        return model

    timm = types.ModuleType("timm")
    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert build("timm:convnet", size=32).model.given == {}
    assert build("timm:vit", size=32).model.given == {"img_size": 32}
    assert build("timm:vit", size=32).features == 9
    with pytest.raises(ValueError, match="timm has no model 'nothing'"):
        build("timm:nothing", size=32)


def test_the_examples_of_the_documentation_run():
    page = Path(__file__).parents[2] / "docs" / "vision.md"
    if not page.exists():
        pytest.skip("a source archive comes without docs")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    for (
        block
    ) in blocks:  # one after the other, as they are read; tests/vision/test_augment.py compiles for real
        exec(block.replace("fullgraph=True", 'fullgraph=True, backend="eager"'), namespace)
    assert namespace["h"].shape == (8, 64)
    assert namespace["data"].train_images.shape == (1442, 32, 32, 3)
