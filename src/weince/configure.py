"""A loss as configuration: what a line of a YAML file or of the command line can say.

>>> build_loss(LossConfig(preset="infonce", temperature=0.2))
InfoNCELoss(SoftmaxLink(temperature=0.2), candidates='views', reduction='mean')
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

import torch

from weince.candidates import Candidates
from weince.engines.choose import Engine
from weince.losses import RELEASED_TAIL, InfoNCELoss, LinkLoss, WeibitLoss, WeinceLoss, released_terms
from weince.tail import TailConfig
from weince.terms import Term

Preset = Literal["infonce", "paper", "blend", "released", "weibit"]

_TAILS = {"paper": TailConfig(), "blend": RELEASED_TAIL, "released": RELEASED_TAIL}


@dataclass(frozen=True)
class LossConfig:
    """Which loss to train with.

    Args:
        preset: ``infonce``; ``paper`` (Algorithm 1); ``released`` (what the authors' code trains with: beta = 1 and
            two extra terms); ``blend`` (the same without its extra terms); ``weibit`` (the shortfall link alone).
        temperature: Of the softmax part; of ``weibit``, whose ``beta`` is its inverse.
        tail: What differs from the preset's tail, by name of :class:`weince.TailConfig`'s fields, for example
            ``{gate: rho, rho0: 0.05}``, ``{endpoint: 1.05}``, ``{positive: softmax}`` or ``{beta: slope}``.
        softmax_term: Weight of a further cross-entropy over the 50 hardest negatives with softmax logits; the
            preset's (0.5 for ``released``, else 0) if not given.
        shortfall_term: The same with a shortfall link whose slope follows the batch.
        engine: ``auto``, ``dense``, ``chunked`` or ``fused``.
    """

    preset: Preset = "paper"
    temperature: float = 0.5
    tail: dict[str, Any] = field(default_factory=dict)
    softmax_term: float | None = None
    shortfall_term: float | None = None
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        if self.preset not in get_args(Preset):
            raise ValueError(unknown("preset", self.preset, get_args(Preset)))
        if self.tail and self.preset not in _TAILS:
            raise ValueError(f"tail has no meaning for preset {self.preset!r}; got {self.tail}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be positive; got {self.temperature}")
        for name in ("softmax_term", "shortfall_term"):
            weight = getattr(self, name)
            if weight is not None and not 0 <= weight < float("inf"):
                raise ValueError(f"{name} must be a weight of at least 0; got {weight}")
        if self.preset in _TAILS:
            _tail(self)  # says what is wrong with it here, not when the run starts


def unknown(what: str, got: str, known: Iterable[str]) -> str:
    """The message for a name that is not among the known ones: the nearest of them, and all if they are few."""
    names = list(known)
    last = [name for name in names if name.endswith(f".{got}")]  # lr for optimizer.lr
    near = last or get_close_matches(got, names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    listed = "" if near and len(names) > 15 else f"; known: {', '.join(names)}"
    return f"unknown {what} {got!r}{hint}{listed}"


def _tail(config: LossConfig) -> TailConfig:
    known = [item.name for item in fields(TailConfig)]
    for name in config.tail:
        if name not in known:
            raise ValueError(unknown("field of tail", str(name), known))
    try:
        return replace(_TAILS[config.preset], **config.tail)
    except TypeError as error:
        raise ValueError(f"tail: {error}") from None


def _extra(config: LossConfig) -> list[Term]:
    """The released code's two extra terms with the weights that are asked for, without those of weight 0."""
    terms = []
    asked = config.softmax_term, config.shortfall_term
    for term, weight in zip(released_terms(config.temperature), asked, strict=True):
        if weight is None:
            weight = term.weight if config.preset == "released" else 0.0
        if weight > 0:
            terms.append(term._replace(weight=weight))
    return terms


def check_loss(loss: LinkLoss, *, pairs: int, width: int, device: torch.device) -> None:
    """Try a loss on random embeddings ``(pairs, width)``, before a run that would fail at its first step begins.

    Raises:
        ValueError: It cannot run here, for example for want of a GPU.
    """
    generator = torch.Generator().manual_seed(0)
    z_i, z_j = (torch.randn(pairs, width, generator=generator).to(device) for _ in range(2))
    try:
        with torch.no_grad():
            deepcopy(loss)(z_i, z_j)  # a copy, since a loss may remember its batches
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(f"the loss cannot run here: {error}") from error


def build_loss(config: LossConfig, *, candidates: Candidates = "views") -> LinkLoss:
    """The loss module that a configuration describes."""
    extra = _extra(config)
    if config.preset == "infonce":
        return InfoNCELoss(config.temperature, candidates=candidates, extra=extra, engine=config.engine)
    if config.preset == "weibit":
        beta = 1 / config.temperature
        return WeibitLoss(beta, candidates=candidates, extra=extra, engine=config.engine)
    return WeinceLoss(
        config.temperature, tail=_tail(config), candidates=candidates, extra=extra, engine=config.engine
    )
