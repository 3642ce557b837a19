# mypy: ignore-errors
"""Elementwise functions of generated kernels: fast ones in one instruction, and those that Triton lacks.

The latter are accurate to a few units in the last place of float32.
Exponentials of large numbers are less accurate: on a GPU ``tl.exp(x)`` is off by up to ``|x|`` units, and so are the
functions built on it. The docstring of :func:`power` states its accuracy.
"""

import triton
import triton.language as tl

from weince.engines.kernels.tiles import INTERPRETED, along  # noqa: F401 - generated functions broadcast with along


@triton.jit
def fast_log2(x):
    """Base-2 logarithm of a positive number in one instruction, accurate to 22 bits. (``tl.log2`` takes thirty.)"""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def fast_exp2(x):
    """``2^x`` in one instruction; a result below 2^-126 becomes 0."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def fast_inverse(x):
    """Inverse of a positive number in one instruction, accurate to 23 bits."""
    if INTERPRETED:
        y = 1 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def log1p(x):
    """``log(1 + x)``, accurate also for small ``x``: the rounding error of ``1 + x`` cancels in the quotient."""
    u = 1 + x
    rounded = tl.where(u == 1, 1.0, u - 1)
    exact = tl.log(u)
    exact = tl.where(x < 1e8, exact * (x / rounded), exact)
    return tl.where(u == 1, x, exact)


@triton.jit
def expm1(x):
    """``exp(x) - 1``, accurate also for small ``x``, by the same method."""
    u = tl.exp(x)
    rounded = tl.where(u == 1, 1.0, tl.log(u))
    exact = tl.where(u < 1e8, (u - 1) * (x / rounded), u)
    exact = tl.where(u < 1e-8, -1.0, exact)
    return tl.where(u == 1, x, exact)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def tanh(x):
    far = expm1(-2 * tl.abs(x))
    far = far / (2 + far)
    return tl.where(x < 0, far, -far)


@triton.jit
def half_exp(x):
    """``exp(x) / 2``, finite up to 89.4, where ``exp(x)`` is finite only up to 88.7."""
    root = tl.exp(x / 2)
    return root / 2 * root


@triton.jit
def sinh(x):
    size = tl.abs(x)
    far = expm1(size)
    far = tl.where(size > 80, half_exp(size), (far + far / (far + 1)) / 2)
    return tl.where(x < 0, -far, far)


@triton.jit
def cosh(x):
    size = tl.abs(x)
    far = tl.exp(size)
    return tl.where(size > 80, half_exp(size), (far + 1 / far) / 2)


@triton.jit
def atanh(x):
    size = tl.abs(x)  # for negative x the quotient can be near -1, where log1p loses digits
    far = log1p(2 * size / (1 - size)) / 2
    return tl.where(x < 0, -far, far)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def power(x, y):
    """``x ** y`` of two tensors; NaN for a negative base with a fractional exponent. It is accurate to about
    ``4 + 1.5 |y log2(x)|`` units in the last place, since the rounding error of ``y log2(x)`` grows with its size."""
    result = tl.exp2(y * tl.log2(tl.abs(x)))
    is_odd = tl.floor(y * 0.5) * 2 != y
    of_negative = tl.where(tl.floor(y) == y, tl.where(is_odd, -result, result), float("nan"))
    return tl.where(y == 0, 1.0, tl.where(x < 0, of_negative, result))
