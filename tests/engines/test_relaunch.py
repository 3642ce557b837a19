"""Repeated launches of a kernel. Only a GPU can run compiled kernels, so a stand-in notes what it would be given."""

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from weince.engines.kernels import relaunch


class Kernel:
    """Compiles itself at each call, as far as the launcher can tell."""

    arg_names = ("x_ptr", "pair", "n", "BM", "WIDE")

    def __init__(self):
        self.compiled, self.repeated = [], []

    def __getitem__(self, grid):
        def compile_(*arguments, **constants):
            self.compiled.append((grid, arguments, constants))
            return self

        return compile_ if len(grid) < 3 else lambda *arguments: self.repeated.append((grid, arguments))


@pytest.fixture
def launched(monkeypatch):
    """A kernel, and a function that launches it with some arguments changed."""
    monkeypatch.setattr(relaunch, "_known", {})
    kernel = Kernel()
    usual = {"grid": (7,), "arguments": (torch.zeros(8), (torch.zeros(8), 0.5), 5),
             "constants": {"num_warps": 4, "WIDE": 3, "BM": 64}}  # fmt: skip
    return kernel, lambda **changes: relaunch.launch(kernel, **(usual | changes))


def test_the_second_launch_takes_the_compiled_kernel(launched):
    kernel, launch = launched
    launch()
    x, y = torch.zeros(9), torch.zeros(9)
    launch(arguments=(x, (y, 0.25), 5))
    assert len(kernel.compiled) == 1
    # Constants come in the order of the kernel's arguments, and options of Triton are not among them. A number that
    # is not whole does not change the kernel.
    assert kernel.repeated == [((7, 1, 1), (x.data_ptr(), (y.data_ptr(), 0.25), 5, 64, 3))]
    launch(grid=(7, 2))
    launch(grid=(7, 2))
    assert kernel.repeated[1][0] == (7, 2, 1)


ZEROS = torch.zeros(8)


@pytest.mark.parametrize(
    "changes",
    [
        {"grid": (8,)},
        {"arguments": (ZEROS, (ZEROS, 0.5), 6)},
        {"arguments": (ZEROS, (ZEROS, 1), 5)},
        {"constants": {"num_warps": 4, "WIDE": 3, "BM": 32}},
        {"constants": {"num_warps": 8, "WIDE": 3, "BM": 64}},
        {"arguments": (ZEROS.double(), (ZEROS, 0.5), 5)},
        {"arguments": (ZEROS, (ZEROS.int(), 0.5), 5)},
        {"arguments": (ZEROS.to("meta"), (ZEROS, 0.5), 5)},
        {"arguments": (ZEROS, (ZEROS[1:], 0.5), 5)},
        {"arguments": (ZEROS, (ZEROS, ZEROS, 0.5), 5)},
    ],
    ids=["grid", "int", "int for float", "constant", "option", "first dtype", "second dtype", "device", "address",
         "number"],
)  # fmt: skip
def test_what_is_compiled_anew(launched, changes):
    kernel, launch = launched
    launch()
    launch(**changes)
    assert len(kernel.compiled) == 2
    launch()
    assert len(kernel.compiled) == 2
    assert len(kernel.repeated) == 1


def test_another_kernel_with_the_same_arguments(launched):
    kernel, launch = launched
    launch()
    other = Kernel()
    launch_of(other, arguments=(ZEROS, (ZEROS, 0.5), 5))
    assert len(other.compiled) == len(kernel.compiled) == 1


def launch_of(kernel, arguments):
    relaunch.launch(kernel, (7,), arguments, {"num_warps": 4, "WIDE": 3, "BM": 64})


def test_kernels_for_other_addresses_are_kept_apart(launched):
    """A kernel compiled for addresses that are multiples of 16 bytes is wrong for others."""
    kernel, launch = launched
    odd = (torch.zeros(8)[1:], (ZEROS, 0.5), 5)
    launch(arguments=odd)
    launch()
    launch(arguments=odd)
    launch()
    assert len(kernel.compiled) == len(kernel.repeated) == 2


def test_the_memory_of_launches_is_bounded(launched, monkeypatch):
    kernel, launch = launched
    monkeypatch.setattr(relaunch, "MOST", 3)
    for n in (1, 2, 3, 3, 4, 4, 1):
        launch(arguments=(ZEROS, (ZEROS, 0.5), n))
    assert [arguments[2] for _, arguments, _ in kernel.compiled] == [1, 2, 3, 4, 1]
    assert [arguments[2] for _, arguments in kernel.repeated] == [3, 4]
