"""Engines compute the sums of a loss in different ways behind one contract (:class:`weince.sums.Engine`).

:mod:`~weince.engines.dense` holds the whole matrix of scores, :mod:`~weince.engines.chunked` never does,
:mod:`~weince.engines.ring` spreads it over ranks, and ``fused`` runs Triton kernels on CUDA.
"""

from weince.engines.choose import Choice, EngineName, choose
from weince.sums import Need

__all__ = ["Choice", "EngineName", "Need", "choose"]
