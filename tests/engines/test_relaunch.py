"""Repeated launches of a kernel. Only a GPU can run compiled kernels, so a stand-in notes what it would be given."""

import pytest
import torch

pytest.importorskip("triton", minversion="3.5")

from weince.engines.kernels import relaunch


class Kernel:
    """Compiles itself at each call, as far as the launcher can tell."""

    arg_names = ("x_ptr", "y_ptr", "n", "eps", "BM", "ROLES")

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
    usual = {"grid": (7,), "tensors": (torch.zeros(8), torch.zeros(8)), "numbers": (5, 0.5),
             "constants": {"num_warps": 4, "ROLES": 3, "BM": 64}}  # fmt: skip
    return kernel, lambda **changes: relaunch.launch(kernel, **(usual | changes))


def test_the_second_launch_takes_the_compiled_kernel(launched):
    kernel, launch = launched
    launch()
    x, y = torch.zeros(9), torch.zeros(9)
    launch(tensors=(x, y))
    assert len(kernel.compiled) == 1
    # Constants come in the order of the kernel's arguments, and options of Triton are not among them.
    assert kernel.repeated == [((7, 1, 1), (x.data_ptr(), y.data_ptr(), 5, 0.5, 64, 3))]
    launch(grid=(7, 2))
    launch(grid=(7, 2))
    assert kernel.repeated[1][0] == (7, 2, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"grid": (8,)},
        {"numbers": (6, 0.5)},
        {"numbers": (5, 0.25)},
        {"constants": {"num_warps": 4, "ROLES": 3, "BM": 32}},
        {"constants": {"num_warps": 8, "ROLES": 3, "BM": 64}},
        {"tensors": (torch.zeros(8).double(), torch.zeros(8))},
        {"tensors": (torch.zeros(8), torch.zeros(8).int())},
        {"tensors": (torch.zeros(8, device="meta"), torch.zeros(8))},
        {"tensors": (torch.zeros(8), torch.zeros(8)[1:])},
    ],
    ids=["grid", "int", "float", "constant", "option", "first dtype", "second dtype", "device", "address"],
)
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
    relaunch.launch(
        other, (7,), (torch.zeros(8), torch.zeros(8)), (5, 0.5), {"num_warps": 4, "ROLES": 3, "BM": 64}
    )
    assert len(other.compiled) == len(kernel.compiled) == 1


def test_kernels_for_other_addresses_are_not_kept(launched):
    """A kernel compiled for an address that is no multiple of 16 bytes is right for all, but slow."""
    kernel, launch = launched
    odd = (torch.zeros(8)[1:], torch.zeros(8))
    launch(tensors=odd)
    launch()
    launch(tensors=odd)
    assert len(kernel.compiled) == 3
    assert not kernel.repeated


def test_the_memory_of_launches_is_bounded(launched, monkeypatch):
    kernel, launch = launched
    monkeypatch.setattr(relaunch, "MOST", 3)
    for n in (1, 2, 3, 3, 4, 4, 1):
        launch(numbers=(n, 0.5))
    assert [arguments[2] for _, arguments, _ in kernel.compiled] == [1, 2, 3, 4, 1]
    assert [arguments[2] for _, arguments in kernel.repeated] == [3, 4]
