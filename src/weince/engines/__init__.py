"""Engines: the sums of a loss, computed in several ways behind one contract (:mod:`weince.engines.base`).

:mod:`~weince.engines.dense` keeps the matrix of scores, :mod:`~weince.engines.chunked` never has it whole,
:mod:`~weince.engines.ring` spreads it over ranks, ``fused`` is kernels for CUDA.
"""

from weince.engines.base import Engine, Need
from weince.engines.choose import Choice, EngineName, choose

__all__ = ["Choice", "Engine", "EngineName", "Need", "choose"]
