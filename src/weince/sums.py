"""The sums over candidates that a loss can request from an engine.

A loss names its sums, an engine computes them for all anchors in one pass, and the loss combines the results, one
number per anchor, in plain torch.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weince.links import Link, as_link
from weince.parameters import check_choice, is_number

AnyLink = Link | Callable[..., Tensor]


class LogSumExp:
    """``log sum exp(logit)`` over an anchor's negatives.

    Args:
        link: Maps scores to logits: a :class:`weince.Link`, or a plain function of the score.
        hardest: Sum only over this many negatives with the largest scores, and over scores equal to the last of them
            (those of identical rows may differ in their last bit); None for all.
        same_view: Sum over the negatives of the anchor's own view only (``candidates="views"``).
        positive: Link of the positive; by default that of the negatives.

    Examples:
        >>> import torch
        >>> from weince import ContrastiveLoss, LogSumExp, SoftmaxLink
        >>> class Hardest(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         return LogSumExp(SoftmaxLink(0.1), hardest=10)
        ...     def combine(self, lse):
        ...         return lse.value - lse.positive
        >>> Hardest()(torch.randn(16, 8), torch.randn(16, 8)).shape
        torch.Size([])
    """

    def __init__(
        self,
        link: AnyLink,
        *,
        hardest: int | None = None,
        same_view: bool = False,
        positive: AnyLink | None = None,
    ) -> None:
        if hardest is not None and (not is_number(hardest, int) or hardest < 1):
            raise ValueError(
                f"hardest must be an int of at least 1, or None for all negatives; got {hardest!r}"
            )
        if hardest is not None and same_view:
            raise ValueError(
                f"hardest counts the negatives of both views; got hardest={hardest} with same_view=True"
            )
        self.link = as_link(link)
        self.positive = self.link if positive is None else as_link(positive)
        self.hardest, self.same_view = hardest, same_view


class SoftplusSum:
    """``sum log(1 + exp(logit))`` over an anchor's negatives, or over its positives.

    Examples:
        >>> import torch
        >>> from weince import AffineLink, ContrastiveLoss, SoftplusSum
        >>> class Repel(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         return SoftplusSum(AffineLink(10.0, -10.0))
        ...     def combine(self, total):
        ...         return total
        >>> bool(Repel()(torch.randn(16, 8), torch.randn(16, 8)) > 0)
        True
    """

    def __init__(self, link: AnyLink, *, among: Literal["negatives", "positives"] = "negatives") -> None:
        check_choice("among", among, ("negatives", "positives"))
        self.link, self.among = as_link(link), among


class Count:
    """The number of negatives of an anchor.

    Examples:
        >>> import torch
        >>> from weince import ContrastiveLoss, Count
        >>> class Negatives(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         return Count()
        ...     def combine(self, count):
        ...         return count
        >>> Negatives()(torch.randn(16, 8), torch.randn(16, 8))  # 2 * 16 - 2
        tensor(30.)
    """


Sum = LogSumExp | SoftplusSum | Count


class Summed(NamedTuple):
    """An engine's result for one sum; each tensor holds one number per anchor, ``(anchors,)``.

    ``value``: the sum; 0 without negatives. ``positive``: the positive's logit; the mean over several positives.
    ``spread``: log-sum-exp of the positives' logits minus their mean; None with one positive. ``link``: the link of
    the negatives. ``alone``: True for anchors without negatives; None if all have some.

    Examples:
        >>> import torch
        >>> from weince import ContrastiveLoss, LogSumExp, SoftmaxLink
        >>> class Mine(ContrastiveLoss):
        ...     def sums(self, batch):
        ...         return LogSumExp(SoftmaxLink(0.1))
        ...     def combine(self, lse):  # a Summed
        ...         return lse.cross_entropy()
        >>> Mine()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    value: Tensor
    positive: Tensor
    spread: Tensor | None
    link: Link
    alone: Tensor | None = None

    def cross_entropy(self) -> Tensor:
        """``-log softmax`` of the positive among all candidates, averaged over the positives.

        A loss as small as 1e-14 stays accurate in float32.
        """
        of_positives = self.positive if self.spread is None else self.positive + self.spread
        by_negatives = log1pexp(self.value - of_positives)
        if self.alone is not None:
            by_negatives = by_negatives.masked_fill(self.alone, 0)
        return by_negatives if self.spread is None else by_negatives + self.spread


def log1pexp(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``. Above 40 it returns ``x``, with derivative 1, which is exact in float64."""
    return torch.nn.functional.softplus(x, threshold=40.0)
