"""What this machine and this installation are: a device by name, the version."""

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda", "mps")


def version() -> str:
    """The version of this package, or that it runs from its sources."""
    try:
        return metadata.version("weince")
    except metadata.PackageNotFoundError:
        return "from source"


def check_device(name: str) -> None:
    """See that a name is one of a device, whether this machine has it or not.

    Raises:
        ValueError: It is ``auto``, ``cpu``, ``cuda`` or ``mps`` neither alone nor, but for ``auto``, with a number.
    """
    kind, colon, number = name.partition(":")
    numbered = colon and number.isdecimal() and kind != "auto"
    if kind not in DEVICES or (colon and not numbered):
        raise ValueError(f"device must be {', '.join(DEVICES[:-1])} or {DEVICES[-1]}; got {name!r}")


def find_device(name: str) -> "torch.device":
    """The device of a name: ``auto`` (a CUDA device if there is one, else the CPU), ``cpu``, ``cuda`` or one of
    several, ``cuda:1``, or ``mps`` (the GPU of an Apple chip).

    Raises:
        ValueError: It is none of these, or this machine has no such device.
    """
    import torch  # here, since the command line asks for the version without it

    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for; torch finds no CUDA device")
    if kind == "cuda" and number and int(number) >= torch.cuda.device_count():
        raise ValueError(
            f"device {name!r} was asked for; torch finds {torch.cuda.device_count()} CUDA device(s)"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        built = "finds no Apple GPU" if torch.backends.mps.is_built() else "was built without MPS"
        raise ValueError(f"device {name!r} was asked for; torch {built} here")
    return torch.device(name)
