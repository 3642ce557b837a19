"""Choose, check and scale a contrastive loss.

>>> import torch
>>> from weince import InfoNCELoss
>>> loss = InfoNCELoss(temperature=0.2)
>>> loss(torch.randn(8, 16), torch.randn(8, 16)).ndim
0
"""

from weince.cached import cached_step
from weince.links import (
    AffineLink,
    AtanhLink,
    BlendLink,
    FunctionLink,
    Link,
    PowerLink,
    ShortfallLink,
    SoftmaxLink,
)
from weince.losses import *  # noqa: F403
from weince.losses import __all__ as _losses
from weince.machine import version as _version
from weince.sums import Count, LogSumExp, SoftplusSum, Summed
from weince.tail import TailConfig, TailStats, tail_stats

__all__ = [
    "AffineLink", "AtanhLink", "BlendLink", "Count", "FunctionLink", "Link", "LogSumExp", "PowerLink",
    "ShortfallLink", "SoftmaxLink", "SoftplusSum", "Summed", "TailConfig", "TailStats", "cached_step", "tail_stats",
    *_losses,
]  # fmt: skip

__version__ = _version()
