"""What this machine and this installation are: a device by name, the version, bf16 on this CPU."""

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
"""The newest instructions with bf16 but without AMX."""

_CPU = Path("/proc/cpuinfo")
_PRODUCT = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import torch
a = torch.ones(64, 64, dtype=torch.bfloat16)
a @ a
"""


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


def amx_is_broken() -> bool:
    """Whether the CPU advertises AMX and a bf16 product ends the process: some hypervisors do not grant its state.

    A child process tries it, which takes the time of an import of torch. ``WEINCE_AMX`` in the environment,
    ``broken`` or ``works``, answers in its place.

    Raises:
        ValueError: ``WEINCE_AMX`` is something else.
    """
    told = os.environ.get("WEINCE_AMX")
    if told is not None:
        if told not in ("broken", "works"):
            raise ValueError(f"WEINCE_AMX must be broken or works; got {told!r}")
        return told == "broken"
    if (
        not _CPU.exists() or "amx_bf16" not in _CPU.read_text()
    ):  # other systems than Linux do not advertise it so
        return False
    return subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True).returncode < 0  # a signal


def avoid_broken_amx() -> str | None:
    """Keep torch from AMX in this process and its children if AMX is broken; call it before work in bf16 on a CPU.

    It must come before torch multiplies any matrices, in float32 too: oneDNN then reads ``ONEDNN_MAX_CPU_ISA`` for
    good. If that is set already, nothing is tried and nothing is changed.

    Returns:
        What was done, in one line, if anything was.
    """
    if ISA in os.environ or not amx_is_broken():
        return None
    os.environ[ISA] = WITHOUT_AMX
    return f"this CPU advertises AMX but cannot use it: {ISA}={WITHOUT_AMX} is set for this process"


def prepare_cpu_for_bf16() -> None:
    """What a command does before work in bf16 on a CPU: :func:`avoid_broken_amx`, said on stderr."""
    said = avoid_broken_amx()
    if said and os.environ.get("RANK", "0") == "0":
        print(f"weince: {said}", file=sys.stderr)


def prepare_cpu_for(model: "torch.nn.Module") -> None:
    """:func:`prepare_cpu_for_bf16` if a model that was loaded is in bf16 and on a CPU."""
    if any(p.device.type == "cpu" and str(p.dtype) == "torch.bfloat16" for p in model.parameters()):
        prepare_cpu_for_bf16()
