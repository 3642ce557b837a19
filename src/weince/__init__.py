"""A contrastive loss whose tail you can check: extreme-value corrections for InfoNCE.

>>> import torch
>>> from weince import WeinceLoss
>>> loss = WeinceLoss(temperature=0.5)
>>> loss(torch.randn(8, 16), torch.randn(8, 16)).ndim
0
"""

from weince import functional
from weince.cached import cached_step
from weince.functional import LossOutput
from weince.links import BlendLink, Link, PowerLink, ShortfallLink, SoftmaxLink
from weince.losses import InfoNCELoss, LinkLoss, WeibitLoss, WeinceLoss, released_terms
from weince.machine import version as _version
from weince.tail import TailConfig, TailStats
from weince.terms import BatchShortfallLink, Term, WeinceLink

__all__ = [
    "BatchShortfallLink",
    "BlendLink",
    "InfoNCELoss",
    "Link",
    "LinkLoss",
    "LossOutput",
    "PowerLink",
    "ShortfallLink",
    "SoftmaxLink",
    "TailConfig",
    "TailStats",
    "Term",
    "WeibitLoss",
    "WeinceLink",
    "WeinceLoss",
    "cached_step",
    "functional",
    "released_terms",
]

__version__ = _version()
