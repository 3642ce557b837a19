"""Engines: one loss, computed in several ways behind one contract.

``engine(contest, terms, tail) -> EngineOutput``: :mod:`~weince.engines.dense` keeps the matrix of scores,
:mod:`~weince.engines.chunked` never has it whole, ``fused`` is kernels for CUDA.
"""

from weince.engines.choose import Choice, Engine, choose

__all__ = ["Choice", "Engine", "choose"]
