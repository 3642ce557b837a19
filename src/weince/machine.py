"""This machine and this installation: devices by name, the version, bf16 on this CPU."""

import io
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda", "mps")
ISA = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_BF16"
"""The newest instruction set with bf16 but without AMX."""

_CPU = Path("/proc/cpuinfo")
_PRODUCT = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import torch
a = torch.ones(64, 64, dtype=torch.bfloat16)
a @ a
"""


def version() -> str:
    """The version of this package; ``from source`` if it is not installed."""
    try:
        return metadata.version("weince")
    except metadata.PackageNotFoundError:
        return "from source"


def check_device(name: str) -> None:
    """Check that a name is that of a device; this machine need not have it.

    Raises:
        ValueError: The name is not ``auto``, ``cpu``, ``cuda`` or ``mps``. All but ``auto`` may have a number, as in
            ``cuda:1``.
    """
    kind, colon, number = name.partition(":")
    numbered = colon and number.isdecimal() and kind != "auto"
    if kind not in DEVICES or (colon and not numbered):
        raise ValueError(f"device must be {', '.join(DEVICES[:-1])} or {DEVICES[-1]}; got {name!r}")


def find_device(name: str) -> "torch.device":
    """The device of a name: ``auto`` (a CUDA device if there is one, else the CPU), ``cpu``, ``cuda``, one of several
    such as ``cuda:1``, or ``mps`` (the GPU of an Apple chip).

    Raises:
        ValueError: The name is none of these, or this machine has no such device.
    """
    import torch  # here, so that the command line can print the version without torch

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


def amx_is_broken() -> bool:
    """Whether the CPU advertises AMX but a bf16 product kills the process, as under some hypervisors.

    A child process tries it, which takes as long as importing torch. To skip this, set the environment variable
    ``WEINCE_AMX`` to ``broken`` or ``works``.

    Raises:
        ValueError: ``WEINCE_AMX`` has another value.
    """
    told = os.environ.get("WEINCE_AMX")
    if told is not None:
        if told not in ("broken", "works"):
            raise ValueError(f"WEINCE_AMX must be broken or works; got {told!r}")
        return told == "broken"
    if not _CPU.exists() or "amx_bf16" not in _CPU.read_text():  # only Linux has this file
        return False
    return subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True).returncode < 0  # a signal


def avoid_broken_amx() -> str | None:
    """Disable AMX in torch for this process and its children if it is broken; call it before bf16 work on a CPU.

    Call it before the first matrix product, even in float32: oneDNN reads ``ONEDNN_MAX_CPU_ISA`` then and never
    again. If that variable is already set, nothing is tested or changed.

    Returns:
        One line that says what was done; None if nothing was.
    """
    if ISA in os.environ or not amx_is_broken():
        return None
    os.environ[ISA] = WITHOUT_AMX
    return f"this CPU advertises AMX but cannot use it: {ISA}={WITHOUT_AMX} is set for this process"


def prepare_cpu_for_bf16() -> None:
    """Call :func:`avoid_broken_amx`, and on rank 0 print to stderr what it did."""
    said = avoid_broken_amx()
    if said and os.environ.get("RANK", "0") == "0":
        print(f"weince: {said}", file=sys.stderr)


def prepare_cpu_for(model: "torch.nn.Module") -> None:
    """Call :func:`prepare_cpu_for_bf16` if a model has bf16 parameters on a CPU."""
    if any(p.device.type == "cpu" and str(p.dtype) == "torch.bfloat16" for p in model.parameters()):
        prepare_cpu_for_bf16()


def print_any_text() -> None:
    """Let a terminal of another encoding show ``?`` for what it lacks: a finished command must not fail in print."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
