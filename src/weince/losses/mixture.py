"""Temperature mixture: InfoNCE whose likelihood is averaged over a distribution of temperatures.

``-log sum_q w_q exp(s+/t_q) / (exp(s+/t_q) + sum exp(s/t_q))``, with temperatures ``t_q`` at the nodes of a
log-normal distribution around ``t``. This likelihood fits scores whose anchors differ in difficulty.
"""

from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from weince.losses.functional import functional
from weince.losses.temperature import TemperatureLoss, TemperatureOptions
from weince.parameters import Scalar, check_fixed, is_number
from weince.sums import Batch, LogSumExp, Summed


class TemperatureMixtureLoss(TemperatureLoss):
    """Temperature mixture: the softmax likelihood under a log-normal distribution of temperatures.

    Args:
        temperature: Median of the temperatures; a number, or an ``nn.Parameter`` to learn it.
        spread: Standard deviation of the logarithm of the temperature.
        nodes: Number of temperatures, the nodes of Gauss-Hermite quadrature.
        **options: ``max_scale``, ``learn_temperature`` and ``hardness`` as in
            :class:`~weince.losses.temperature.TemperatureLoss`, others as in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import TemperatureMixtureLoss
        >>> TemperatureMixtureLoss()(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    several_positives = False
    search_space = (
        {"temperature": 0.1},
        {"temperature": 0.2},
        {"temperature": 0.1, "spread": 1.0},
        {"temperature": 0.2, "spread": 1.0},
        {"temperature": 0.07},
    )

    def __init__(
        self,
        temperature: Scalar = 0.1,
        *,
        spread: float = 0.5,
        nodes: int = 5,
        **options: Unpack[TemperatureOptions],
    ) -> None:
        super().__init__(temperature, **options)
        check_fixed("spread", spread)
        if not is_number(nodes, int) or not 2 <= nodes <= 20:
            raise ValueError(f"nodes must be an int between 2 and 20; got {nodes!r}")
        self.spread, self.nodes = spread, nodes
        places, weights = np.polynomial.hermite_e.hermegauss(nodes)
        self.factors = tuple(float(factor) for factor in np.exp(spread * places))
        self.log_weights = tuple(float(weight) for weight in np.log(weights / weights.sum()))

    def sums(self, batch: Batch) -> list[LogSumExp]:
        temperature = self.temperature_now()
        return [self.softmax_sum(temperature * factor) for factor in self.factors]

    def combine(self, *nodes: Summed) -> Tensor:
        temperature = self.temperature_now()
        likelihoods = [
            weight - self.eased(node, temperature * factor).cross_entropy()
            for weight, factor, node in zip(self.log_weights, self.factors, nodes, strict=True)
        ]
        return -torch.logsumexp(torch.stack(likelihoods), 0)


temperature_mixture_loss = functional(TemperatureMixtureLoss, "temperature_mixture_loss")
