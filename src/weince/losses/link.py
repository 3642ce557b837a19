"""InfoNCE with any link: for a link of your own, or for one that ``weince diagnose`` suggests."""

from typing import Any, Unpack

from torch import Tensor, nn

from weince.engines.base import Engine
from weince.links import FunctionLink, as_link
from weince.losses.base import ContrastiveLoss, Options, functional
from weince.own_links import copied
from weince.parameters import unrounded
from weince.sums import AnyLink, LogSumExp, Summed


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
        copied(self.link, self.link.tensors())  # raises if sums could not

    def sums(self, batch: Engine) -> LogSumExp:
        learned: dict[str, Any] = {name: unrounded(getattr(self, name)) for name in self._learned}
        return LogSumExp(self.link.replace(learned))

    def combine(self, lse: Summed) -> Tensor:
        return lse.cross_entropy()

    def _is_ours(self) -> bool:
        own = isinstance(self.link, FunctionLink) or type(self.link).__module__ != "weince.links"
        return super()._is_ours() and not own


link_loss = functional(
    LinkLoss, "link_loss", "torch.randn(4, 8), torch.randn(4, 8), link=lambda s: 5 * s + s**3"
)
