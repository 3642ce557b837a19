"""WEINCE: InfoNCE whose logits blend the softmax with the shortfall link, ``(1 - lam) s / t - lam beta log(1 - s)``.

Each anchor has its own ``lam``, and with Algorithm 1 its own ``beta``, from the tail of its negatives.
ICML 2026, "When Softmax Fails at the Top: Extreme-Value Corrections for InfoNCE". The authors' released code adds two
terms: cross-entropies with the hardest negatives only.
"""

from collections.abc import Sequence
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from weince.links import BlendLink, ShortfallLink, SoftmaxLink
from weince.losses.functional import functional
from weince.losses.temperature import TemperatureLoss, TemperatureOptions, remember, temperatures
from weince.pairs import Problem
from weince.parameters import Scalar, is_number
from weince.scores import wide
from weince.sums import Batch, LogSumExp, Need, Sum, Summed
from weince.tail import TailConfig, fit_tail

RELEASED_TAIL = TailConfig(beta=1.0, drop=0.05, soft_cap=False)


class WeinceOptions(TemperatureOptions, total=False):
    """Options of :class:`WeinceLoss` other than the temperature."""

    tail: TailConfig | None
    softmax_term: float
    shortfall_term: float


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
        tail: How the tail is fitted and gated; None: no blend, InfoNCE with the two terms.
        softmax_term: Weight of the extra cross-entropy with softmax logits.
        shortfall_term: Weight of the extra cross-entropy with a shortfall link whose slope is fitted to the batches.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import WeinceLoss
        >>> WeinceLoss()(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    ours = True
    needs_negatives = takes_dot = takes_hardness = False
    search_space = temperatures(0.5, 0.2, 0.1, 0.07)

    def __init__(
        self,
        temperature: Scalar = 0.5,
        *,
        tail: TailConfig | None = RELEASED_TAIL,
        softmax_term: float = 0.5,
        shortfall_term: float = 0.5,
        **options: Unpack[TemperatureOptions],
    ) -> None:
        super().__init__(temperature, **options)
        if tail is not None and not isinstance(tail, TailConfig):
            raise TypeError(f"tail must be a TailConfig or None; got {type(tail).__name__}")
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

    def need(self, problem: Problem, tail: TailConfig | None) -> Need:
        return super().need(problem, tail)._replace(smallest=self.terms.smallest(problem.most_pairs))

    def sums(self, batch: Batch) -> list[Sum]:
        temperature = self.temperature_now()
        if self.tail is None:
            return [self.softmax_sum(temperature), *self.terms.sums(batch, temperature)]
        positive = SoftmaxLink(temperature) if self.tail.positive == "softmax" else None
        blend = LogSumExp(self.link(batch, temperature), positive=positive)
        return [blend, *self.terms.sums(batch, temperature)]

    def link(self, batch: Batch, temperature: Scalar) -> BlendLink:
        """The blend link, with one ``lam`` (and ``beta``) per anchor from the tail statistics."""
        stats, tail = batch.stats, self.tail
        assert tail is not None
        beta: Any = stats.beta if tail.beta == "fit" else tail.beta
        if tail.beta == "slope":
            nearest = stats.rho.where(stats.rho.isfinite(), 0.0)  # inf without negatives, where lam is 0
            fixed = temperature.detach() if isinstance(temperature, Tensor) else temperature
            beta = (nearest + (tail.endpoint - 1)) / fixed
        return BlendLink(stats.lam, beta, temperature, tail.eps, tail.soft_cap, tail.endpoint)

    def combine(self, blend: Summed, *terms: Summed) -> Tensor:
        return self.terms.add(blend.cross_entropy(), terms)


HARDEST = 50

MOST_PAIRS = 1 << 24
"""Most pairs of an anchor and a negative to search for the smallest shortfalls: all pairs up to 2,048 pairs of views.
Larger batches use evenly spaced anchors, or memory would grow with the square of the batch."""


class HardestTerms(nn.Module):
    """Cross-entropies of the positive against the hardest negatives, added to a loss.

    Args:
        softmax: Weight of the cross-entropy with softmax logits.
        shortfall: Weight of the cross-entropy with a shortfall link whose slope is fitted to the batches.
    """

    def __init__(self, softmax: float = 0.0, shortfall: float = 0.0) -> None:
        super().__init__()
        for name, weight in (("softmax_term", softmax), ("shortfall_term", shortfall)):
            if not is_number(weight) or not 0 <= weight < float("inf"):
                raise ValueError(f"{name} must be a weight of at least 0; got {weight!r}")
        self.weights = tuple(weight for weight in (softmax, shortfall) if weight)
        self.softmax = softmax
        self.slope = RunningSlope() if shortfall else None
        self.hardest = (HARDEST,) if self.weights else ()

    def smallest(self, most_pairs: int) -> int:
        """How many smallest shortfalls of all pairs the survey must find; 0 if none, or only in some of the pairs."""
        if self.slope is None or not self.training or most_pairs > MOST_PAIRS:
            return 0
        return self.slope.most_points(most_pairs)

    def sums(self, batch: Batch, temperature: Scalar) -> list[LogSumExp]:
        """The sums that the terms need."""
        links = [SoftmaxLink(temperature)] if self.softmax else []
        if self.slope is not None:
            links = [*links, self.slope.link(batch)]  # type: ignore[list-item]
        return [LogSumExp(link, hardest=HARDEST) for link in links]

    def add(self, losses: Tensor, terms: Sequence[Summed]) -> Tensor:
        """Losses ``(anchors,)`` with the terms added."""
        for weight, term in zip(self.weights, terms, strict=True):
            losses = losses + weight * term.cross_entropy()
        return losses


class RunningSlope(nn.Module):
    """The slope of a shortfall link as a running average of fits to whole batches, as in the authors' released code.

    In training, each call fits the slope to the smallest ``share`` of the shortfalls of all negatives in the batch
    (at least ``fewest`` of them; the smallest 5 % of these are dropped). Above 2,048 pairs of views, only evenly
    spaced anchors are used. A fit with a positive slope and an R² of at least ``least_r2`` is clamped to
    ``[0.5, 16]`` and enters the average; any other is ignored. (``candidates="clip"`` makes a call per direction.)
    """

    slope_now: Tensor

    def __init__(
        self,
        *,
        share: float = 0.05,
        fewest: int = 1024,
        least_r2: float = 0.85,
        momentum: float = 0.9,
        initial: float = 4.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.share, self.fewest, self.least_r2 = share, fewest, least_r2
        self.momentum, self.eps = momentum, eps
        # One element, not a scalar: torch.compile loses writes to a float64 scalar on the CPU. It is float32,
        # since not every device has float64; ``loss.double()`` makes it float64.
        self.register_buffer("slope_now", torch.tensor([initial], dtype=torch.float32))

    @torch.no_grad()
    def link(self, batch: Batch) -> ShortfallLink:
        """The shortfall link for a batch; in training, the slope is updated first."""
        device = batch.problem.anchors.device
        if self.slope_now.device != device:  # move it here: without this buffer, losses need no .to()
            with torch.inference_mode(False):  # or training could not update what a validation step has moved
                self.slope_now = self.slope_now.to(device)
        slope = self._moved(batch) if self.training else self.slope_now.clone()
        if self.training:
            remember(self.slope_now, slope)
        return ShortfallLink(slope.squeeze(0), eps=self.eps)

    def most_points(self, most_pairs: int) -> int:
        """The most shortfalls that a fit takes."""
        return min(max(self.fewest, int(self.share * most_pairs)), most_pairs)

    def _moved(self, batch: Batch) -> Tensor:
        """The running slope after this batch, without a device sync."""
        batch = batch.sample(MOST_PAIRS)
        pairs, count = batch.pairs(), self.most_points(batch.problem.most_pairs)
        size = (self.share * wide(pairs)).long().clamp_min(self.fewest).minimum(pairs)
        fit = fit_tail(
            batch.smallest(count).unsqueeze(0), size.unsqueeze(0), TailConfig(drop=0.05, eps=self.eps)
        )
        kept = (fit.r2 >= self.least_r2) & (fit.beta > 0)  # beta is 0 if no fit could be made
        fitted, before = fit.beta.clamp(0.5, 16.0), self.slope_now.to(fit.beta.dtype)
        return torch.where(kept, self.momentum * before + (1 - self.momentum) * fitted, before)


weince_loss = functional(WeinceLoss, "weince_loss")
