"""LSEPair and SumMargLH: a softplus of log-sum-exps over an anchor's negatives and over its positives.

arXiv 2602.12727. With one positive both are InfoNCE.
"""

from torch import Tensor

from weince.links import AffineLink
from weince.losses.functional import functional
from weince.losses.temperature import TemperatureLoss, temperatures
from weince.scores import log1pexp
from weince.sums import Batch, LogSumExp, Summed


class LSEPairLoss(TemperatureLoss):
    """LSEPair: ``softplus(log sum exp(s/t) + log sum exp(-s+/t))``, all pairs of a negative and a positive.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import LSEPairLoss
        >>> loss = LSEPairLoss(0.05, candidates="cross")
        >>> labels = torch.tensor([0, 0, 1, 2])
        >>> loss(torch.randn(4, 8), torch.randn(4, 8), labels=(labels, labels)).shape
        torch.Size([])
    """

    ours = True
    takes_offset = False
    search_space = temperatures(0.05, 0.02, 0.1)

    def sums(self, batch: Batch) -> LogSumExp:
        request = self.softmax_sum()
        request.positive = AffineLink(-1 / self.temperature_now())
        return request

    def combine(self, lse: Summed) -> Tensor:
        return log1pexp(self.eased(lse).value + lse.of_positives())


class SumMargLHLoss(TemperatureLoss):
    """SumMargLH: ``softplus(log sum exp(s/t) - log sum exp(s+/t))``, one softmax of all positives together.

    Args:
        temperature: A number, or an ``nn.Parameter`` to learn it.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import SumMargLHLoss
        >>> loss = SumMargLHLoss(0.05, candidates="cross")
        >>> labels = torch.tensor([0, 0, 1, 2])
        >>> loss(torch.randn(4, 8), torch.randn(4, 8), labels=(labels, labels)).shape
        torch.Size([])
    """

    ours = True
    search_space = temperatures(0.05, 0.02, 0.1)

    def sums(self, batch: Batch) -> LogSumExp:
        return self.softmax_sum()

    def combine(self, lse: Summed) -> Tensor:
        return log1pexp(self.eased(lse).value - lse.of_positives())


lse_pair_loss = functional(LSEPairLoss, "lse_pair_loss")
sum_marg_lh_loss = functional(SumMargLHLoss, "sum_marg_lh_loss")
