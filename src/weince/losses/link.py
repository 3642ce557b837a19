"""InfoNCE with any link: for a link of your own, or for one that ``weince diagnose`` suggests."""

from typing import Any, Unpack

from torch import Tensor, nn

from weince.links import as_link
from weince.losses.base import ContrastiveLoss
from weince.losses.functional import functional
from weince.losses.options import Options
from weince.own_links import copied
from weince.parameters import unrounded
from weince.sums import AnyLink, Batch, LogSumExp, Summed


class LinkLoss(ContrastiveLoss):
    """Cross-entropy of the positive under any link.

    Args:
        link: Maps scores to logits: a :class:`weince.Link`, or a plain function of the score. A link's
            ``nn.Parameter`` becomes a parameter of this module.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import LinkLoss
        >>> LinkLoss(lambda s: 5 * s + s**3)(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    needs_negatives = False

    def __init__(self, link: AnyLink, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        self.link = as_link(link)
        self._learned = [
            name for name, value in self.link.tensors().items() if isinstance(value, nn.Parameter)
        ]
        for name in self._learned:
            if hasattr(self, name):
                raise ValueError(
                    f"a learned parameter of a link needs a name that LinkLoss does not use; got {name!r}"
                )
            self.register_parameter(name, self.link.tensors()[name])  # type: ignore[arg-type]
        if self.score == "dot" and self.link.needs_cap:
            raise ValueError(
                f'{type(self.link).__name__} wants cosines, whose largest value is 1; got score="dot"'
            )
        copied(self.link, self.link.tensors())  # raises if sums could not

    def sums(self, batch: Batch) -> LogSumExp:
        learned: dict[str, Any] = {name: unrounded(getattr(self, name)) for name in self._learned}
        return LogSumExp(self.link.replace(learned))

    def combine(self, lse: Summed) -> Tensor:
        return lse.cross_entropy()

    def repeats(self) -> bool:
        return super().repeats() and not self.link.custom


link_loss = functional(
    LinkLoss, "link_loss", "torch.randn(4, 8), torch.randn(4, 8), link=lambda s: 5 * s + s**3"
)
