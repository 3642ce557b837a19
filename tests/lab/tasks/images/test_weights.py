"""Weights from other sources: matching ones are loaded, others are named, and no code in a file is run."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weince.lab.tasks.images.encoders import SimCLR, build, load_weights
from weince.lab.tasks.images.vit import VisionTransformer


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
    """A state dict with a classifier and, like older ones, without num_batches_tracked."""
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
    """The load fails with all these messages, and leaves the model unchanged."""
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
