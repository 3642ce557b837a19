"""Kernel launches with less CPU overhead when they repeat.

Triton inspects every argument of a launch to find the kernel that it compiled for such arguments; that takes longer
than the launch. Here a launch is cached under its whole numbers, constants and dtypes, and repeated with the
addresses of the new tensors.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

ALIGNED = 16
"""Bytes; kernels for addresses that are multiples of it are compiled apart from others, which are slower."""

MOST = 4096
"""Most cached launches, so that batches of ever new sizes do not fill the memory."""

_known: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launch a kernel.

    Args:
        kernel: A function made by ``triton.jit``.
        grid: Number of programs in each dimension.
        arguments: Tensors and numbers in the order of the kernel's arguments, or tuples of these.
        constants: Compile-time constants by name, and options of Triton like ``num_warps``.
    """
    marks: list[Any] = [kernel, grid, arguments[0].device, *constants.values()]
    plain = _plain(arguments, marks)
    key = tuple(marks)
    known = _known.get(key)
    if known is not None:
        again, rest = known
        again(*plain, *rest)
        return
    compiled = kernel[grid](*arguments, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_known) >= MOST:
            _known.clear()
        rest = tuple(constants[name] for name in kernel.arg_names if name in constants)
        _known[key] = compiled[(*grid, *(1,) * (3 - len(grid)))], rest


def _plain(arguments: tuple[Any, ...], marks: list[Any]) -> tuple[Any, ...]:
    """The arguments with addresses for tensors. What determines the compiled kernel is appended to ``marks``: dtype
    and alignment, whole numbers themselves, and that a number is none."""
    plain: list[Any] = []
    for value in arguments:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            marks += (value.dtype, address % ALIGNED == 0)
            plain.append(address)
        elif isinstance(value, tuple):
            marks.append(len(value))
            plain.append(_plain(value, marks))
        else:
            marks.append(value if isinstance(value, int) else float)
            plain.append(value)
    return tuple(plain)
