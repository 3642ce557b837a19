# mypy: ignore-errors
"""Functions of numbers that Triton does not have, accurate to a few units of the last place of float32.

Exponentials of large numbers are less accurate: ``tl.exp(x)`` on a GPU is off by up to ``|x|`` units, and so is what
is made of it. :func:`power` says how accurate it is.
"""

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
def half_exp(x):
    """``exp(x) / 2``, which is finite up to 89.4; ``exp(x)`` up to 88.7 only."""
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
    size = tl.abs(x)  # of negative numbers the quotient is near -1, where log1p loses digits
    far = log1p(2 * size / (1 - size)) / 2
    return tl.where(x < 0, -far, far)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def power(x, y):
    """``x ** y`` of two tensors; of a negative base with a whole exponent only. It is accurate to about
    ``4 + 1.5 |y log2(x)|`` units of the last place, since a rounded exponent is multiplied."""
    result = tl.exp2(y * tl.log2(tl.abs(x)))
    is_odd = tl.floor(y * 0.5) * 2 != y
    of_negative = tl.where(tl.floor(y) == y, tl.where(is_odd, -result, result), float("nan"))
    return tl.where(y == 0, 1.0, tl.where(x < 0, of_negative, result))
