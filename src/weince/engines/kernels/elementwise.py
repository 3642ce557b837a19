# mypy: ignore-errors
"""Functions of numbers that Triton does not have, accurate to a few units of the last place of float32."""

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """``log(1 + x)`` with all digits of a small one: the error of ``1 + x`` cancels in the quotient."""
    u = 1 + x
    rounded = tl.where(u == 1, 1.0, u - 1)
    exact = tl.log(u)
    exact = tl.where(x < 1e8, exact * (x / rounded), exact)
    return tl.where(u == 1, x, exact)


@triton.jit
def expm1(x):
    """``exp(x) - 1`` with all digits of a small one, in the same way."""
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
def sinh(x):
    far = expm1(tl.abs(x))
    far = (far + far / (far + 1)) / 2
    return tl.where(x < 0, -far, far)


@triton.jit
def cosh(x):
    far = tl.exp(tl.abs(x))
    return (far + 1 / far) / 2


@triton.jit
def atanh(x):
    return log1p(2 * x / (1 - x)) / 2


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def power(x, y):
    """``x ** y`` of two tensors; of a negative base with a whole exponent only."""
    result = tl.exp2(y * tl.log2(tl.abs(x)))
    is_odd = tl.floor(y * 0.5) * 2 != y
    of_negative = tl.where(tl.floor(y) == y, tl.where(is_odd, -result, result), float("nan"))
    return tl.where(y == 0, 1.0, tl.where(x < 0, of_negative, result))
