"""SupCon: InfoNCE with labels, averaged over an anchor's positives outside the logarithm (``L_out``).

Khosla et al. 2020, "Supervised Contrastive Learning".
"""

from typing import Unpack

from weince.losses.base import Options, functional
from weince.losses.infonce import InfoNCELoss
from weince.parameters import Scalar


class SupConLoss(InfoNCELoss):
    """SupCon: all other rows with the anchor's label are positives. Call it as ``loss(z, labels=y)``.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        max_scale: Largest inverse of a learned temperature.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import SupConLoss
        >>> SupConLoss()(torch.randn(6, 4), labels=torch.tensor([0, 0, 1, 1, 2, 2])).shape
        torch.Size([])
    """

    def __init__(
        self, temperature: Scalar = 0.1, *, max_scale: float | None = None, **options: Unpack[Options]
    ) -> None:
        options.setdefault("candidates", "labels")
        super().__init__(temperature, max_scale=max_scale, **options)


supcon_loss = functional(
    SupConLoss, "supcon_loss", "torch.randn(6, 4), labels=torch.tensor([0, 0, 1, 1, 2, 2])"
)
