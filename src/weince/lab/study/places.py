"""Where concurrent runs of this machine run: cores and GPUs."""

import os

from weince.lab.study.plan import Run, settings_of
from weince.machine import find_device


def environments(jobs: int, cpus: int, gpus: int, visible: str = "") -> list[dict[str, str]]:
    """Environment variables for concurrent runs: each gets a share of the CPUs and, round-robin, one GPU.

    Args:
        jobs: Number of concurrent runs.
        cpus: Cores of the machine.
        gpus: Usable GPUs.
        visible: Value of ``CUDA_VISIBLE_DEVICES``, if it is set.
    """
    names = [name.strip() for name in visible.split(",")] if visible else [str(i) for i in range(gpus)]
    share = str(max(1, cpus // jobs))
    threads = {"OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share}
    return [threads | ({"CUDA_VISIBLE_DEVICES": names[i % gpus]} if gpus > 1 else {}) for i in range(jobs)]


def places_of(jobs: int) -> list[dict[str, str]]:
    """The `environments` for this machine; variables that the user has set keep their values."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [
        {k: v for k, v in place.items() if k == "CUDA_VISIBLE_DEVICES" or k not in os.environ}
        for place in environments(jobs, os.cpu_count() or 1, torch.cuda.device_count(), visible)
    ]


def apart(run: Run, jobs: int) -> int:
    """How many of ``jobs`` concurrent runs have cores or a GPU of their own; further runs share these."""
    import torch

    device = find_device(settings_of(run).device)
    usable = {"cpu": os.cpu_count() or 1, "cuda": torch.cuda.device_count() if device.index is None else 1}
    return min(jobs, usable.get(device.type, 1))
