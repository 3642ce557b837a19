"""Encoders by name, the projector, and loading of weights.

>>> import torch
>>> model = SimCLR(build("tiny", size=32))
>>> h, z = model(torch.rand(4, 3, 32, 32))
>>> h.shape, z.shape
(torch.Size([4, 64]), torch.Size([4, 64]))
"""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from weince.lab.configure import find
from weince.lab.tasks.images.resnet import BasicBlock, Bottleneck, ResNet, Stem
from weince.lab.tasks.images.vit import VisionTransformer
from weince.parameters import check_choice

NAMES = ("resnet18", "resnet50", "vit_small", "tiny")
PATCHES = {32: 4, 64: 8, 224: 16}
Norm = Literal["none", "hidden", "all"]


class Tiny(nn.Module):
    """Three convolutions with group norm, 12 thousand weights: for tests and demonstrations on a CPU.

    No layer depends on the batch, so that several processes compute the same as one.
    """

    features = 64

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 16), (16, self.features)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
                nn.GroupNorm(4, outputs),
                nn.ReLU(inplace=True),
            ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(dim=(2, 3))  # type: ignore[no-any-return]


class Foreign(nn.Module):
    """A model of another library or of the user, without a classifier."""

    def __init__(self, name: str, model: nn.Module, features: int) -> None:
        super().__init__()
        self.name = name
        self.model = model
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        features = self.model(x)
        if not isinstance(features, Tensor):  # in training alone, as torchvision's googlenet
            raise ValueError(
                f"encoder {self.name} must return features (n, {self.features}) in training too; "
                f"got {type(features).__name__}: wrap it in an encoder of your own, package.module:name"
            )
        return features


def build(name: str, *, size: int, width: int = 64, stem: Stem | None = None) -> nn.Module:
    """Build an encoder with new weights: images ``(n, 3, size, size)`` to features ``(n, encoder.features)``.

    Args:
        name: ``resnet18``, ``resnet50``, ``vit_small``, ``tiny``; ``timm:NAME`` or ``torchvision:NAME`` if that
            library is installed; or your own class or function, ``package.module:name``.
        size: Height and width of the images in pixels.
        width: Channels of the first stage of a ResNet.
        stem: Stem of a ResNet: ``"cifar"`` (3 x 3, no max-pool), the default up to 64 px, or ``"imagenet"``.
    """
    if stem is not None:
        check_choice("stem", stem, get_args(Stem))
    stem = stem or ("cifar" if size <= 64 else "imagenet")
    if name == "resnet18":
        return ResNet(BasicBlock, (2, 2, 2, 2), stem=stem, width=width)
    if name == "resnet50":
        return ResNet(Bottleneck, (3, 4, 6, 3), stem=stem, width=width)
    if name == "vit_small":
        if size not in PATCHES:
            raise ValueError(f"vit_small is for images of {', '.join(map(str, PATCHES))} px; got {size}")
        return VisionTransformer(size, PATCHES[size])
    if name == "tiny":
        return Tiny()
    if name.startswith("timm:"):
        return _foreign(name, partial(_from_timm, name.removeprefix("timm:"), size), size)
    if name.startswith("torchvision:"):
        return _foreign(name, partial(_from_torchvision, name.removeprefix("torchvision:")), size)
    if ":" in name:
        return _foreign(name, find(name, "encoder"), size)
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(
        f"unknown encoder {name!r}{hint}: there are {', '.join(NAMES)}, timm:NAME, torchvision:NAME"
    )


def _foreign(name: str, make: Callable[[], nn.Module], size: int) -> Foreign:
    """An encoder of others; its output for two images gives the width of the features."""
    try:
        model = make()
        if not isinstance(model, nn.Module):
            raise ValueError(f"encoder {name} must make an nn.Module; got {type(model).__name__}")
        training = model.training
        with torch.no_grad():
            features = model.eval()(torch.zeros(2, 3, size, size))
    except ValueError:
        raise
    except Exception as error:  # whatever the code of others raises
        raise ValueError(
            f"encoder {name} fails on images (2, 3, {size}, {size}): {type(error).__name__}: {error}"
        ) from error
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(
            f"encoder {name} must map images (n, 3, {size}, {size}) to features (n, width); got {got}"
        )
    return Foreign(name, model.train(training), features.shape[1])


def _import(library: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        top = library.split(".")[0]
        raise ValueError(f"the encoder {top}:{name} needs {top}: pip install {top}") from error


def _from_timm(name: str, size: int) -> nn.Module:
    timm = _import("timm", name)
    model: nn.Module
    try:
        try:
            model = timm.create_model(name, num_classes=0, img_size=size)  # vision transformers need it
        except TypeError:
            model = timm.create_model(name, num_classes=0)
    except RuntimeError as error:  # timm raises this for an unknown model
        raise ValueError(f"timm has no model {name!r}: {error}") from error
    return model


def _from_torchvision(name: str) -> nn.Module:
    models = _import("torchvision.models", name)
    if name not in models.list_models():
        raise ValueError(f"torchvision has no model {name!r}: see torchvision.models.list_models()")
    model: nn.Module = models.get_model(name, weights=None)
    linear = [path for path, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise ValueError(
            f"torchvision:NAME wants a model that ends in a linear layer, which is removed; got {name} without one: "
            "write an encoder of your own, package.module:name"
        )
    parent, _, child = linear[-1].rpartition(".")
    setattr(model.get_submodule(parent), child, nn.Identity())
    return model


@dataclass(frozen=True)
class ProjectorConfig:
    """The layers between an encoder's features and the embeddings; by default the paper's.

    Args:
        hidden: Width between the layers; by default that of the features.
        layers: Number of linear layers, at least 2.
        norm: Where batch norm follows a linear layer: ``none``, ``hidden`` (before each ReLU) or ``all`` (after the
            last layer too, as in SimCLR).
    """

    hidden: int | None = None
    layers: int = 2
    norm: Norm = "none"

    def __post_init__(self) -> None:
        if self.hidden is not None and self.hidden < 1:
            raise ValueError(f"hidden must be at least 1; got {self.hidden}")
        if self.layers < 2:
            raise ValueError(f"a projector has at least 2 layers; got {self.layers}")
        check_choice("norm", self.norm, get_args(Norm))


class Projector(nn.Sequential):
    """Linear layers without bias and ReLU between them: features ``(n, features)`` to embeddings ``(n, out)``."""

    def __init__(self, features: int, config: ProjectorConfig = ProjectorConfig(), *, out: int = 64) -> None:
        widths = [features, *[config.hidden or features] * (config.layers - 1), out]
        parts: list[nn.Module] = []
        for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
            parts.append(nn.Linear(inputs, outputs, bias=False))
            if config.norm == "all" or (config.norm == "hidden" and number < config.layers):
                parts.append(nn.BatchNorm1d(outputs))
            if number < config.layers:
                parts.append(nn.ReLU())
        super().__init__(*parts)


class SimCLR(nn.Module):
    """An encoder and a projector: images ``(n, 3, size, size)`` to features ``h`` and embeddings ``z``.

    Args:
        encoder: From :func:`build`, or any module with an attribute ``features``.
        projector: By default the paper's, ``Projector(encoder.features)``.
    """

    def __init__(self, encoder: nn.Module, projector: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = Projector(cast(int, encoder.features)) if projector is None else projector

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        return h, self.projector(h)


class Loaded(NamedTuple):
    """Names of weights that :func:`load_weights` left out."""

    missing: tuple[str, ...]  # in the model; they keep their values
    unexpected: tuple[str, ...]  # in the file


def load_weights(model: nn.Module, path: str | Path) -> Loaded:
    """Load weights into a model (:class:`SimCLR` or only an encoder) from a safetensors file or a torch checkpoint.

    The names may be torchvision's, or have the prefixes ``encoder.`` and ``projector.`` (and ``module.`` in front),
    at the top level or under ``state_dict`` or ``model``. A classifier (``fc``, ``head``) is left out, and so is a
    projector that only the model or only the file has. Nothing else may be missing or left over; otherwise the model
    is not changed.
    """
    wanted = model.state_dict()
    state, dropped = _renamed(_without_classifier(_read_state(Path(path))), _has(wanted, "encoder."))
    missing = tuple(name for name in wanted if name not in state and not name.endswith("num_batches_tracked"))
    unexpected = [name for name in state if name not in wanted]
    optional = not _has(state, "projector.")
    needed = [name for name in missing if not (optional and name.startswith("projector."))]
    faults = _some("missing: ", needed) + _some("unexpected: ", unexpected)
    faults += _some("", [_misfit(name, x, wanted[name]) for name, x in state.items() if name in wanted])
    if faults:
        raise ValueError(f"{path} does not fit the model: {'; '.join(faults)}")
    model.load_state_dict(state, strict=False)
    return Loaded(missing, dropped)


def _read_state(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"no weights at {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the types vary, and torch's message gives unsafe advice
        raise ValueError(
            f"{path} cannot be read as weights; want safetensors, or a torch checkpoint that holds tensors and "
            f"plain values only; got {type(error).__name__}"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no state dict of tensors")
    return {str(name): value for name, value in state.items()}


def _without_classifier(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    heads = ("fc.", "head.")  # torchvision's ResNets, timm's transformers
    return {name: x for name, x in state.items() if not name.removeprefix("encoder.").startswith(heads)}


def _renamed(state: dict[str, Tensor], prefixed: bool) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights with or without the prefix ``encoder.``, and the names of weights dropped for lack of it."""
    if prefixed == _has(state, "encoder."):
        return state, ()
    if prefixed:
        return {f"encoder.{name}": value for name, value in state.items()}, ()
    dropped = tuple(name for name in state if not name.startswith("encoder."))
    kept = {name.removeprefix("encoder."): x for name, x in state.items() if name.startswith("encoder.")}
    return kept, dropped


def _has(state: dict[str, Tensor], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in state)


def _misfit(name: str, value: Tensor, wanted: Tensor) -> str:
    """What is wrong with the shape of a weight; empty if it fits."""
    if value.shape == wanted.shape:
        return ""
    hint = " (is the other stem meant?)" if name.removeprefix("encoder.") == "conv1.weight" else ""
    return f"{name} is {tuple(value.shape)}, the model's is {tuple(wanted.shape)}{hint}"


def _some(what: str, faults: list[str]) -> list[str]:
    """The first few faults as one phrase; an empty list if there are none."""
    faults = [fault for fault in faults if fault]
    more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
    return [what + ", ".join(faults[:5]) + more] if faults else []
