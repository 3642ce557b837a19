"""Triton kernels of the fused engine. Import them through :mod:`weince.engines.fused`, which works without Triton."""
