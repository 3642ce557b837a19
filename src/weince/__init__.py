"""Choose, check and scale a contrastive loss.

>>> import torch
>>> from weince import InfoNCELoss
>>> loss = InfoNCELoss(temperature=0.2)
>>> loss(torch.randn(8, 16), torch.randn(8, 16)).ndim
0
"""

from typing import TYPE_CHECKING

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
from weince.queue import Queue
from weince.sums import Count, LogSumExp, SoftplusSum, Summed
from weince.tail import TailConfig, TailStats, tail_stats

if TYPE_CHECKING:
    from weince.diagnose.temperatures import fit_temperature

__all__ = [
    "AffineLink", "AtanhLink", "BlendLink", "Count", "FunctionLink", "Link", "LogSumExp", "PowerLink", "Queue",
    "ShortfallLink", "SoftmaxLink", "SoftplusSum", "Summed", "TailConfig", "TailStats", "cached_step",
    "fit_temperature", "tail_stats",
    *_losses,
]  # fmt: skip

__version__ = _version()


def __getattr__(name: str) -> object:
    """``weince.fit_temperature``, imported when it is used: its statistics need scipy.optimize."""
    if name != "fit_temperature":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weince.diagnose.temperatures import fit_temperature

    return fit_temperature
