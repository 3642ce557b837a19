"""Engines compute the sums of a loss in different ways behind one contract (:mod:`weince.engines.base`).

:mod:`~weince.engines.dense` holds the whole matrix of scores, :mod:`~weince.engines.chunked` never does,
:mod:`~weince.engines.ring` spreads it over ranks, and ``fused`` runs Triton kernels on CUDA.
"""

from weince.engines.base import Engine, Need
from weince.engines.choose import Choice, EngineName, choose

__all__ = ["Choice", "Engine", "EngineName", "Need", "choose"]
