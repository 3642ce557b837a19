"""What this machine and this installation are: a device by name, the version."""

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def version() -> str:
    """The version of this package, or that it runs from its sources."""
    try:
        return metadata.version("weince")
    except metadata.PackageNotFoundError:
        return "from source"


def find_device(name: str) -> "torch.device":
    """The device of a name: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or one of several, ``cuda:1``.

    Raises:
        ValueError: It is none of these, or there is no GPU.
    """
    import torch  # here, since the command line asks for the version without it

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda; got {name!r}")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for; torch finds no CUDA device")
    return torch.device(name)
