"""SupCon: InfoNCE with labels, averaged over an anchor's positives outside the logarithm (``L_out``).

Khosla et al. 2020, "Supervised Contrastive Learning".
"""

from typing import Unpack

from weince.losses.functional import functional
from weince.losses.infonce import InfoNCELoss
from weince.losses.temperature import TemperatureOptions
from weince.parameters import Scalar


class SupConLoss(InfoNCELoss):
    """SupCon: all other rows with the anchor's label are positives. Call it as ``loss(z, labels=y)``.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        other_positives: Whether the denominator of a positive holds the anchor's other positives.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import SupConLoss
        >>> SupConLoss()(torch.randn(6, 4), labels=torch.tensor([0, 0, 1, 1, 2, 2])).shape
        torch.Size([])
    """

    ours = True

    def __init__(
        self,
        temperature: Scalar = 0.1,
        *,
        other_positives: bool = True,
        **options: Unpack[TemperatureOptions],
    ) -> None:
        options.setdefault("candidates", "labels")
        super().__init__(temperature, other_positives=other_positives, **options)


supcon_loss = functional(
    SupConLoss, "supcon_loss", "torch.randn(6, 4), labels=torch.tensor([0, 0, 1, 1, 2, 2])"
)
