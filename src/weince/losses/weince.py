"""WEINCE: InfoNCE whose logits blend the softmax with the shortfall link, ``(1 - lam) s / t - lam beta log(1 - s)``.

Each anchor has its own ``lam``, and with Algorithm 1 its own ``beta``, from the tail of its negatives.
ICML 2026, "When Softmax Fails at the Top: Extreme-Value Corrections for InfoNCE".
"""

from typing import Any, Self, Unpack

from torch import Tensor

from weince.engines.base import Engine
from weince.links import BlendLink, SoftmaxLink
from weince.losses.base import Options, functional
from weince.losses.temperature import TemperatureLoss, temperatures
from weince.losses.terms import HardestTerms
from weince.parameters import Scalar
from weince.sums import LogSumExp, Sum, Summed
from weince.tail import TailConfig

RELEASED_TAIL = TailConfig(beta=1.0, drop=0.05, soft_cap=False)


class WeinceOptions(Options, total=False):
    """Options of :class:`WeinceLoss` other than the temperature."""

    tail: TailConfig
    softmax_term: float
    shortfall_term: float
    max_scale: float | None


def _bare(tail: TailConfig) -> WeinceOptions:
    """The blend without extra terms."""
    return {"tail": tail, "softmax_term": 0.0, "shortfall_term": 0.0}


PRESETS: dict[str, WeinceOptions] = {
    "released": {"tail": RELEASED_TAIL, "softmax_term": 0.5, "shortfall_term": 0.5},
    "blend": _bare(RELEASED_TAIL),
    "paper": _bare(TailConfig()),
    "negatives_only": _bare(TailConfig(positive="softmax")),
}
"""What the presets of WEINCE set."""


class WeinceLoss(TemperatureLoss):
    """WEINCE as its authors' code trains it, which reproduces the paper's result.

    The blend has ``beta = 1``. The loss adds two cross-entropies of the positive against the 50 hardest negatives,
    which the paper does not mention. In our runs (CIFAR-100, ResNet-18, 100 epochs, 4 seeds) it reaches 52.9 linear
    accuracy at temperature 0.5; InfoNCE with the same two terms reaches 52.9, and InfoNCE at temperature 0.2
    reaches 53.8.

    Args:
        temperature: Temperature of the softmax part; a number, or an ``nn.Parameter`` to learn it.
        tail: How the tail is fitted and gated.
        softmax_term: Weight of the extra cross-entropy with softmax logits.
        shortfall_term: Weight of the extra cross-entropy with a shortfall link whose slope is fitted to the batches.
        max_scale: Largest inverse of a learned temperature.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import WeinceLoss
        >>> WeinceLoss()(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    needs_negatives = False
    search_space = temperatures(0.5, 0.2, 0.1, 0.07)
    tail: TailConfig

    def __init__(
        self,
        temperature: Scalar = 0.5,
        *,
        tail: TailConfig = RELEASED_TAIL,
        softmax_term: float = 0.5,
        shortfall_term: float = 0.5,
        max_scale: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(temperature, max_scale=max_scale, **options)
        if not isinstance(tail, TailConfig):
            raise TypeError(f"tail must be a TailConfig; got {type(tail).__name__}")
        self.tail = tail
        self.terms = HardestTerms(softmax_term, shortfall_term)
        self.softmax_term, self.shortfall_term = softmax_term, shortfall_term
        self.hardest = self.terms.hardest

    @classmethod
    def released(cls, temperature: Scalar = 0.5, **options: Unpack[WeinceOptions]) -> Self:
        """The loss of the authors' released code; the same as ``WeinceLoss()``.

        (The released fit also penalises slopes of the wrong sign. Sorted shortfalls never have one, so this class
        omits the penalty.)
        """
        return cls(temperature, **options)

    @classmethod
    def paper(cls, temperature: Scalar = 0.5, **options: Unpack[WeinceOptions]) -> Self:
        """Algorithm 1 of the paper: the fitted slope, and no extra terms.

        Do not start with this one. In our runs at temperature 0.5 a fifth of the images collapse onto a few points
        after epoch 12. It ends at 40.5 linear accuracy on CIFAR-100; InfoNCE reaches 50.1 (4 seeds).
        """
        given: WeinceOptions = {**PRESETS["paper"], **options}
        return cls(temperature, **given)

    @classmethod
    def negatives_only(cls, temperature: Scalar = 0.5, **options: Unpack[WeinceOptions]) -> Self:
        """Algorithm 1 with the blend on the negatives only: the positive's logit stays ``s / temperature``.

        It does not collapse: 52.7 linear accuracy at temperature 0.5 in the same runs (2 seeds).
        """
        given: WeinceOptions = {**PRESETS["negatives_only"], **options}
        return cls(temperature, **given)

    def sums(self, batch: Engine) -> list[Sum]:
        temperature = self.bounded_temperature()
        positive = SoftmaxLink(temperature) if self.tail.positive == "softmax" else None
        blend = LogSumExp(self.link(batch, temperature), positive=positive)
        return [blend, *self.terms.sums(batch, temperature)]

    def link(self, batch: Engine, temperature: Scalar) -> BlendLink:
        """The blend link, with one ``lam`` (and ``beta``) per anchor from the tail statistics."""
        stats, tail = batch.stats, self.tail
        beta: Any = stats.beta if tail.beta == "fit" else tail.beta
        if tail.beta == "slope":
            nearest = stats.rho.where(stats.rho.isfinite(), 0.0)  # inf without negatives, where lam is 0
            fixed = temperature.detach() if isinstance(temperature, Tensor) else temperature
            beta = (nearest + (tail.endpoint - 1)) / fixed
        return BlendLink(stats.lam, beta, temperature, tail.eps, tail.soft_cap, tail.endpoint)

    def combine(self, blend: Summed, *terms: Summed) -> Tensor:
        return self.terms.add(blend.cross_entropy(), terms)


weince_loss = functional(WeinceLoss, "weince_loss")
