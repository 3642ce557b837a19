"""Configure a loss from a YAML file or the command line.

>>> build_loss(LossConfig(preset="dcl", temperature=0.2))
DCLLoss(temperature=0.2, candidates='views', reduction='mean')
"""

import hashlib
import importlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import torch
from torch import nn

from weince import losses
from weince.engines.choose import EngineName
from weince.layouts import Candidates
from weince.links import BlendLink
from weince.losses.weince import PRESETS as WEINCE
from weince.tail import TailConfig

PRESETS: dict[str, type[losses.ContrastiveLoss]] = {
    "infonce": losses.InfoNCELoss,
    "dcl": losses.DCLLoss,
    "dclw": losses.DCLWLoss,
    "hcl": losses.HCLLoss,
    "debiased": losses.DebiasedLoss,
    "dhel": losses.DHELLoss,
    "rince": losses.RINCELoss,
    "align_uniform": losses.AlignUniformLoss,
    "siglip": losses.SigLIPLoss,
    "kl_ball": losses.KLBallLoss,
    "mixture": losses.TemperatureMixtureLoss,
    "mw": losses.MWLoss,
    "lse_pair": losses.LSEPairLoss,
    "sum_marg_lh": losses.SumMargLHLoss,
    "focal": losses.FocalLoss,
    "temperature_free": losses.TemperatureFreeLoss,
    "weibit": losses.WeibitLoss,
    "link": losses.LinkLoss,
    **dict.fromkeys(WEINCE, losses.WeinceLoss),
}


@dataclass(frozen=True)
class LossConfig:
    """Which loss to train with.

    Args:
        preset: ``infonce``, ``dcl``, ``dclw``, ``hcl``, ``debiased``, ``dhel``, ``rince``, ``align_uniform``,
            ``siglip``, ``kl_ball``, ``mixture``, ``mw``, ``lse_pair``, ``sum_marg_lh``, ``focal``,
            ``temperature_free``, ``weibit`` (the shortfall link alone), ``link`` (a blend of fixed weight, as
            ``weince diagnose`` reports it), ``released`` (WEINCE as in the authors' code), ``blend`` (the same
            without its two extra terms), ``paper`` (Algorithm 1), ``negatives_only``; or your own loss,
            ``my_package:MyLoss``.
        temperature: Temperature of the softmax logit; null takes the loss's own default. For ``weibit``, 1 / beta.
        lam: Weight of the shortfall logit; for ``link``, or your own loss.
        beta: Slope of the shortfall logit; for ``link``, ``weibit`` or your own loss.
        options: Further arguments of the loss by name, for example ``{hardness: 0.5}`` of ``hcl``.
        tail: Changes to the preset's tail, by name of :class:`weince.TailConfig`'s fields, for example
            ``{gate: rho, rho0: 0.05}``, ``{endpoint: 1.05}``, ``{positive: softmax}`` or ``{beta: slope}``.
        softmax_term: Weight of a further cross-entropy over the 50 hardest negatives with softmax logits; by default
            the preset's (0.5 for ``released``, else 0).
        shortfall_term: The same with a shortfall link whose slope follows the batch.
        engine: ``auto``, ``dense`` (the whole matrix), ``chunked`` (linear memory) or ``fused`` (CUDA kernels).
    """

    preset: str = "infonce"
    temperature: float | None = None
    tail: dict[str, Any] = field(default_factory=dict)
    softmax_term: float | None = None
    shortfall_term: float | None = None
    engine: EngineName = "auto"
    lam: float | None = None
    beta: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.preset not in PRESETS and ":" not in self.preset:
            raise ValueError(unknown("preset", self.preset, PRESETS))
        if self.tail and self.preset not in WEINCE:
            raise ValueError(f"tail has no meaning for preset {self.preset!r}; got {self.tail}")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be positive; got {self.temperature}")
        for name in ("softmax_term", "shortfall_term"):
            weight = getattr(self, name)
            if weight is not None and not 0 <= weight < float("inf"):
                raise ValueError(f"{name} must be a weight of at least 0; got {weight}")
        if self.preset == "link" and (self.lam is None or self.beta is None):
            raise ValueError(f"preset 'link' wants lam and beta; got lam={self.lam}, beta={self.beta}")
        if ":" not in self.preset:
            # Report errors now, not when the run starts.
            build_loss(self, candidates="cross" if self.options.get("within") else "views")


def unknown(what: str, got: str, known: Iterable[str]) -> str:
    """Message for an unknown name: suggests the nearest known one, and lists all if they are few or none is near."""
    names = list(known)
    last = [name for name in names if name.endswith(f".{got}")]  # lr for optimizer.lr
    several = [got.replace(",", " ")] if "," in got and set(got.split(",")) <= set(names) else []
    lower = {name.lower(): name for name in names}
    near = last or several or [lower[name] for name in get_close_matches(got.lower(), lower, n=1)]
    classes = {loss.__name__.lower(): preset for preset, loss in PRESETS.items() if preset in names}
    if "released" in names:  # rince is spelled like weince
        ours = "released, the loss of WEINCE's authors, or paper, its Algorithm 1"
        classes |= {"weince": ours, "weinceloss": ours}
    if got.lower() in classes:
        near = [classes[got.lower()]]
    hint = f" (did you mean {near[0]}?)" if near else ""
    listed = "" if near and len(names) > 15 else f"; known: {', '.join(names)}"
    return f"unknown {what} {got!r}{hint}{listed}"


def _tail(config: LossConfig) -> TailConfig:
    known = [item.name for item in fields(TailConfig)]
    for name in config.tail:
        if name not in known:
            raise ValueError(unknown("field of tail", str(name), known))
    try:
        preset = WEINCE[config.preset]["tail"]
        assert preset is not None
        return replace(preset, **config.tail)
    except TypeError as error:
        raise ValueError(f"tail: {error}") from None


def _arguments(config: LossConfig) -> dict[str, Any]:
    """Arguments for the loss class, except candidates and engine."""
    names = ("temperature", "lam", "beta", "softmax_term", "shortfall_term")
    arguments = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if config.tail:
        arguments["tail"] = _tail(config)
    for name in arguments.keys() & config.options.keys():
        raise ValueError(
            f"{name} must be given once; got {arguments[name]}, and {config.options[name]} in options"
        )
    if config.preset == "link":
        arguments["link"] = BlendLink(
            arguments.pop("lam"), arguments.pop("beta"), arguments.pop("temperature", 0.5)
        )
    if config.preset == "weibit" and "temperature" in arguments:
        if "beta" in {**arguments, **config.options}:
            raise ValueError("preset 'weibit' takes temperature or beta, which is 1 / temperature; got both")
        arguments["beta"] = 1 / arguments.pop("temperature")
    return {**WEINCE.get(config.preset, {}), **arguments, **config.options}


def check_loss(
    config: LossConfig,
    *,
    candidates: Candidates,
    pairs: int,
    width: int,
    device: torch.device,
    **options: Any,
) -> None:
    """Build a loss and call it forward and backward on random embeddings, so that it fails before a training starts.

    A training that follows is the same as without this check: it builds a loss for itself, and torch's random state
    is restored.

    Args:
        config: The loss.
        candidates: Who competes with whom.
        pairs: Number of rows of the embeddings.
        width: Width of the embeddings.
        device: Device of the embeddings.
        options: Further arguments of the call, such as ``ids``.

    Raises:
        ValueError: The loss raises an error, or its value or gradient is of no use in a training.
    """
    generator = torch.Generator().manual_seed(0)
    z_i, z_j = (torch.randn(pairs, width, generator=generator).to(device).requires_grad_() for _ in range(2))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        loss = build_loss(config, candidates=candidates).to(device)
        try:
            value = loss(z_i, z_j, **options)
            _check_value(value)
            if value.requires_grad:
                value.backward()
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a user's loss raises
            raise ValueError(
                f"the loss fails on random embeddings {(pairs, width)}: {type(error).__name__}: {error}"
                f"{_where(error, config.preset)}"
            ) from error
    _check_gradients([z.grad for z in (z_i, z_j) if z.grad is not None])


def _where(error: Exception, preset: str) -> str:
    """The line of the file of a user's loss that raised an error, such as `` (my_package.py, line 7)``."""
    file = getattr(sys.modules.get(preset.partition(":")[0]), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if file and lines else ""


@contextmanager
def line_named(preset: str) -> Iterator[None]:
    """Add to a ``ValueError`` of a user's own loss its line: the command prints no traceback of it."""
    try:
        yield
    except ValueError as error:
        if where := _where(error, preset):
            raise ValueError(f"{error}{where}") from error
        raise


def _check_value(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.ndim:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"a loss must return a tensor with one number, of shape (); got {got}")
    if not value.isfinite():
        raise ValueError(f"a loss must be finite; got {value.item()} on random embeddings")


def _check_gradients(gradients: Sequence[torch.Tensor]) -> None:
    if not gradients:
        raise ValueError(
            "a loss must have a gradient with respect to the embeddings: leave out .detach(), .item(), "
            "torch.no_grad() and the like"
        )
    if not all(gradient.isfinite().all() for gradient in gradients):
        raise ValueError(
            "the gradient of a loss must be finite; got NaN or inf on random embeddings: keep the arguments of log "
            "and sqrt, and divisors, away from 0"
        )


def build_loss(config: LossConfig, *, candidates: Candidates = "views") -> nn.Module:
    """The loss module that a configuration describes."""
    of_all: dict[str, Any] = {"candidates": candidates, "engine": config.engine}
    if ":" in config.preset:
        maker = find(config.preset, "loss")
        try:
            module = maker(**_arguments(config), **_taken(maker, of_all))
        except ValueError:
            raise
        except TypeError as error:  # an option that it does not take
            named = [name for name in _arguments(config) if f"'{name}'" in str(error)]
            raise ValueError(f"{config.preset}: {error}{_leave_out(config, *named[:1])}") from error
        except Exception as error:
            raise ValueError(f"{config.preset}: {type(error).__name__}: {error}") from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"{config.preset} must make an nn.Module; got {type(module).__name__}")
        return module
    loss, arguments = PRESETS[config.preset], _arguments(config)
    if config.preset == "infonce" and arguments.keys() & {"softmax_term", "shortfall_term"}:
        loss, arguments = (
            losses.WeinceLoss,
            {"tail": None, "softmax_term": 0.0, "shortfall_term": 0.0, **arguments},
        )
    known = [name for name in inspect.signature(loss).parameters if name != "options"]
    known += [name for name in loss.options.__annotations__ if name not in (*of_all, "gather", "reduction")]
    for name in arguments:
        if name not in known:
            raise ValueError(
                f"{name} has no meaning for preset {config.preset!r}; it takes {', '.join(known) or 'nothing'}"
                f"{_leave_out(config, name)}"
            )
    try:
        return loss(**arguments, **of_all)
    except TypeError as error:
        raise ValueError(f"preset {config.preset}: {error}") from None


def let_nan_pass(loss: nn.Module) -> None:
    """Switch off the check of the embeddings in a loss and in those that it is made of.

    A loop checks the value instead, on every device, and says what to do.
    """
    for part in loss.modules():
        if isinstance(part, losses.ContrastiveLoss):
            part.check_finite = False


def _leave_out(config: LossConfig, name: str = "") -> str:
    """What to do about a setting that the loss does not take; nothing about one of ``options``, or about none."""
    if not name or name in config.options:
        return ""
    return f": leave it out, or give null where a file sets it (loss.{name}: null)"


def _taken(maker: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options of weince's losses that a user's class or function accepts."""
    known = inspect.signature(maker).parameters
    ours = inspect.isclass(maker) and issubclass(maker, losses.ContrastiveLoss)
    passes_on = ours and any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    return {name: value for name, value in options.items() if name in known or passes_on}


def imported(name: str, what: str) -> tuple[ModuleType, Any]:
    """Import ``package.module:name``, also from the working folder; returns the module and what it calls so, or None.

    The caller decides what it accepts: others may have written the settings that hold the name.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ValueError(f"your own {what} is written package.module:name; got {name!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises
        raise ValueError(
            f"{what} {name}: cannot import {module_name} ({type(error).__name__}: {error})"
        ) from error
    return module, getattr(module, attribute, None)


def find(name: str, what: str) -> Callable[..., Any]:
    """Import a user's class or function, ``package.module:name``, also from the working folder.

    Others may have written the settings file that names it, so not every function is accepted: only a subclass of
    ``nn.Module``, or a function that is defined in that module and annotated to return an ``nn.Module``.
    """
    module, maker = imported(name, what)
    module_name, _, attribute = name.partition(":")
    defined = inspect.isfunction(maker) and maker.__module__ == module.__name__
    try:
        accepted = _is_module(maker) or (defined and _is_module(get_type_hints(maker).get("return")))
    except NameError as error:  # imported for type checkers only
        raise ValueError(f"{what} {name}: cannot read the annotations of {attribute} ({error})") from error
    if not accepted:
        raise ValueError(
            f"{what} {name}: {module_name} must define {attribute}, an nn.Module or a function that is annotated "
            f"to return one (-> nn.Module); got {maker!r}"
        )
    return maker  # type: ignore[no-any-return]


def code_of(preset: str) -> str | None:
    """A hash of the code of a user's own loss: of its function, or of its class and those that it inherits from in
    the same package. None for a loss of ours, or where Python has no source.
    """
    if ":" not in preset:
        return None
    try:
        maker = find(preset, "loss")
        package = maker.__module__.partition(".")[0]
        parts = [
            part
            for part in getattr(maker, "__mro__", [maker])
            if part.__module__.partition(".")[0] == package
        ]
        linecache.checkcache()
        code = "".join(inspect.getsource(part) for part in parts)
    except Exception:  # there is no source, or somebody is editing it
        return None
    return hashlib.blake2b(code.encode(), digest_size=8).hexdigest()


def _is_module(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, nn.Module)
