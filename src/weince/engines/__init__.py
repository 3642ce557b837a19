"""Engines: one loss, computed in several ways behind one contract.

``engine(contest, terms, tail) -> EngineOutput``: :mod:`~weince.engines.dense` keeps the matrix of scores,
:mod:`~weince.engines.chunked` never has it whole, :mod:`~weince.engines.ring` spreads it over ranks, ``fused`` is
kernels for CUDA, and ``small`` those for a small batch of two views.
"""

from weince.engines.choose import Choice, Engine, choose

__all__ = ["Choice", "Engine", "choose"]
