"""SigLIP: a binary classification of every pair, ``softplus(-(a s+ + b)) + sum softplus(a s + b)``.

Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training".
"""

import math
from typing import Unpack

import torch
from torch import Tensor, nn

from weince.links import AffineLink
from weince.losses.base import ContrastiveLoss
from weince.losses.functional import functional
from weince.losses.options import Options
from weince.losses.temperature import keep_within
from weince.parameters import check_fixed, is_number, unrounded
from weince.sums import Batch, SoftplusSum, Sum


class SigLIPLoss(ContrastiveLoss):
    """SigLIP: a sigmoid for each pair, with a learned scale and bias.

    As in the authors' code, the parameter is the logarithm of the scale, ``log_scale``. An anchor's loss is the sum
    over its pairs.

    Args:
        scale: Initial ``a``.
        bias: Initial ``b``.
        learn: Whether both are learned.
        max_scale: Upper bound of the scale.
        **options: As in :class:`weince.ContrastiveLoss`.

    Examples:
        >>> import torch
        >>> from weince import SigLIPLoss
        >>> SigLIPLoss(candidates="clip")(torch.randn(4, 8), torch.randn(4, 8)).shape
        torch.Size([])
    """

    ours = True
    takes_offset = False
    search_space = (
        {"scale": 10.0, "bias": -10.0},
        {"scale": 5.0, "bias": -5.0},
        {"scale": 20.0, "bias": -10.0},
    )

    def __init__(
        self,
        *,
        scale: float = 10.0,
        bias: float = -10.0,
        learn: bool = True,
        max_scale: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        for name, value in (("scale", scale), ("bias", bias)):
            if isinstance(value, Tensor):
                raise TypeError(
                    f"{name} must be a number; got {type(value).__name__}: SigLIPLoss learns its own, so use the "
                    "class and give its parameters to the optimizer"
                )
        check_fixed("scale", scale)
        if not is_number(bias) or not math.isfinite(bias):
            raise ValueError(f"bias must be a finite number; got {bias!r}")
        if max_scale is not None:
            check_fixed("max_scale", max_scale)
            if max_scale < scale:
                raise ValueError(f"max_scale must be at least the scale of {scale}; got {max_scale}")
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)), requires_grad=learn)
        self.bias = nn.Parameter(torch.tensor(float(bias)), requires_grad=learn)
        self.max_scale = max_scale

    @property
    def scale(self) -> Tensor:
        """The current scale, at most ``max_scale``."""
        bounded = (
            self.log_scale if self.max_scale is None else self.log_scale.clamp_max(math.log(self.max_scale))
        )
        # In float32 or better: in bfloat16 a scale of 100 would be off by up to 0.25.
        return bounded.to(torch.promote_types(bounded.dtype, torch.float32)).exp()

    def sums(self, batch: Batch) -> list[Sum]:
        if self.max_scale is not None and self.training:
            keep_within(self.log_scale, highest=math.log(self.max_scale))
        # Once for both sums: gradients of opposite signs meet in float32, before they are rounded.
        scale, bias = self.scale, unrounded(self.bias)
        return [
            SoftplusSum(AffineLink(scale, bias)),
            SoftplusSum(AffineLink(-scale, -bias), among="positives"),
        ]

    def combine(self, negatives: Tensor, positives: Tensor) -> Tensor:
        return positives + negatives


siglip_loss = functional(SigLIPLoss, "siglip_loss")
