"""DHEL: DCL with negatives from the anchor's own view only, ``-s+/t + log sum exp(s/t)``.

Koromilas et al. 2024, "Bridging Mini-Batch and Asymptotic Analysis in Contrastive Learning: From InfoNCE to
Kernel-Based Losses".
"""

from torch import Tensor

from weince.losses.functional import functional
from weince.losses.temperature import TemperatureLoss, temperatures
from weince.sums import Batch, LogSumExp, Summed


class DHELLoss(TemperatureLoss):
    """DHEL: the positive attracts the anchor, and the other rows of the anchor's view repel it.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`;
            ``candidates`` must be ``"views"``.

    Examples:
        >>> import torch
        >>> from weince import DHELLoss
        >>> DHELLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    same_view = True
    search_space = temperatures(0.1, 0.2, 0.3, 0.07, 0.5)

    def sums(self, batch: Batch) -> LogSumExp:
        return self.softmax_sum(same_view=True)

    def combine(self, lse: Summed) -> Tensor:
        return self.eased(lse).value - lse.positive


dhel_loss = functional(DHELLoss, "dhel_loss")
