"""Launches that are the same time and again, but for the addresses."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

ALIGNED = 16
"""Bytes; kernels are compiled for addresses that are multiples of it."""

Place = Tensor | int
"""Memory, as a tensor or as its address."""


class Launch:
    """A kernel for batches of one shape: everything is settled but the addresses.

    Triton looks at every argument of a launch, to find what it compiled for such arguments, which takes longer than
    the launch. Here it looks at those of the first, and what it found is called again with addresses alone.
    """

    def __init__(
        self, kernel: Any, programs: int, numbers: tuple[float, ...], constants: dict[str, Any]
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, (programs, 1, 1), numbers, constants
        self.rest = (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))
        self.again: Callable[..., None] | None = None

    def first(self, tensors: Sequence[Place], *, keep: bool) -> None:
        """Launch with tensors; ``keep``: their addresses are aligned, so that later launches may go the short way."""
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
        if keep and compiled is not None:  # the interpreter compiles nothing
            self.again = compiled[self.grid]

    def __call__(self, places: Sequence[Place], *, keep: bool) -> None:
        """Launch with addresses after a first time, else with tensors."""
        if isinstance(places[0], int):
            assert self.again is not None
            self.again(*places, *self.rest)
        else:
            self.first(places, keep=keep)


def after(place: Place, words: int) -> Place:
    """What lies some words of 32 bits further on."""
    return place + 4 * words if isinstance(place, int) else place[words:]
