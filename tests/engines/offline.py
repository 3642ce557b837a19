"""Compile the kernels of the fused engine for a GPU that this machine lacks, and check their shared memory.

    python tests/engines/offline.py 89 101376 8192x128 40000x256

The arguments are the compute capability, the limit in bytes, and batch sizes. Prints the kernel that needs most
memory and all kernels above the limit, and exits with 1 if there are any. ``--plain`` leaves out labels and several
sums; ``--spills`` prints registers and spills of every kernel. It runs as its own process, because the tests run in
Triton's interpreter, which compiles nothing.
"""

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from weince.engines.kernels import launch, relaunch, search, shapes, translate
from weince.engines.kernels.launch import Nearest, Pairs, Sums, roles_of
from weince.engines.kernels.logits import BY_FUNCTION, LSE, OF_POSITIVES, SOFTPLUS, USES_B, USES_V, USES_W
from weince.links import FunctionLink
from weince.tail import TailConfig


class Absent:
    """Stand-in for a GPU driver: reports the target, and launches nothing."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compiled(kernel, tensors, numbers, constants):
    mocks = [triton.MockTensor(tensor.dtype) for tensor in tensors]
    return kernel.warmup(*mocks, *numbers, grid=(1,), **constants)


class Compiles:
    """Replaces the launcher: compiles each kernel and records its shared memory."""

    def __init__(self):
        self.batch, self.found = "", []

    def __call__(self, kernel, grid, tensors, numbers, constants):
        result = compiled(kernel, tensors, numbers, constants)
        tile = [constants.get(name) for name in ("BM", "BN", "num_stages")]
        self.found.append((result.metadata.shared, kernel.__name__, self.batch, *tile))
        if "--spills" in sys.argv:
            print(*self.found[-1], spills(result))


def spills(kernel):
    import pathlib
    import re
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "k.ptx"
        path.write_text(kernel.asm["ptx"])
        tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        capability = kernel.metadata.target.arch
        name = "sm_90a" if capability == 90 else f"sm_{capability}"
        out = subprocess.run([tool, "-v", f"-arch={name}", path, "-o", path.with_suffix(".o")],
                             capture_output=True, text=True)  # fmt: skip
        return " ".join(re.findall(r"(\d+ bytes spill stores|Used \d+ registers)", out.stderr))


def cubic(s, k, m):
    return k * s + m * s**3


def every_operation(s, k, m):
    """A user-defined link with every operation that the kernels support."""
    f, far = torch.nn.functional, 2 + s
    z = k * s**3 + m / far + far.log() + far.log2() + s.exp() + torch.exp2(s) + s.tanh() + s.sin() * s.cos()
    z = z + far.sqrt() + far.rsqrt() + torch.expm1(s) + torch.log1p(s / 2) + far**1.3 + far**m + f.softplus(s)
    z = z + f.relu(s) + s.sigmoid() + s.abs() * s.sign() + torch.sinh(s) + torch.cosh(s) + torch.atanh(s / 2)
    z = z + torch.erf(s) + torch.maximum(s, k) * torch.minimum(s, m) + s.clamp(-0.5, 0.5)
    return torch.where(((s > 0) & (s < 0.9)) | ~(s >= -0.5), z, -z)


def batch(n, d, dtype, *, labels=False, several=True, symmetric=True):
    """Compile every kernel that a batch of n rows would launch."""
    meta = {"device": "meta"}
    rows = torch.empty((n, d), **meta)
    x, inverse = launch.operand_like(rows.to(dtype))
    pairs = Pairs(x, inverse, x, inverse, shapes.operand_shape(d, 1 if dtype == torch.bfloat16 else 2))
    columns = torch.empty((n,), dtype=torch.int64, **meta)
    ignore = torch.empty((n, n), dtype=torch.bool, **meta)
    given = [columns] * 6 + [ignore] if labels else [columns, columns]
    roles = roles_of(given, 0b100111110 | 1 if labels else 3, inverse)
    launch.operand(rows.to(dtype))
    found = search.search(rows, rows, pairs, roles, n - 2, TailConfig(), [50] if several else [])
    search.gated(
        found.stats[0], found.stats[2], found.made, None if symmetric else found.stats[0], TailConfig()
    )
    launch.apart_gradient(rows, rows, columns, launch.apart(rows, rows, columns), symmetric=symmetric)
    near = Nearest(*found.near)
    if labels:
        launch.counted(roles, n, n)
        search.search(rows, rows, pairs, roles, n - 2, None, [50, 10])
        launch.nearest(rows, rows, pairs, roles, None, positives=False)
        near = launch.nearest(rows, rows, pairs, roles, near, positives=True)
    shortfall = LSE.value | USES_W.value
    spec = (shortfall,)
    if several:
        spec = (shortfall, LSE.value | 1 << 12, SOFTPLUS.value | USES_B.value, LSE.value | USES_V.value)
    if labels:
        spec = (*spec, OF_POSITIVES.value | shortfall, OF_POSITIVES.value | 1)
    one = torch.ones(())
    key = translate.key_of(FunctionLink(every_operation if labels else cubic, k=one, m=one))
    function = (LSE.value | USES_B.value | BY_FUNCTION.value | key << 16,)
    ways = [(True, True)] if symmetric else [(True, False), (False, True)]
    for each in (spec, function):
        asked = Sums(
            each, (1e-6, 1e-6, 1e-6), torch.empty((4 * len(each), n), **meta), torch.empty((1, n), **meta)
        )
        values, _ = launch.summed(pairs, roles, near, asked, n, n, 15 if several else 0)
        for from_rows, from_cols in ways:
            launch.gradient(
                pairs, roles, near, asked, values, values, (n, n, d), from_rows=from_rows, from_cols=from_cols
            )


def main():
    capability, limit = int(sys.argv[1]), int(sys.argv[2])
    driver.set_active(Absent(capability))
    shapes.SHARED = limit
    spy = Compiles()
    launch.launch = search.launch = relaunch.launch = spy
    sizes = [size.split("x") for size in sys.argv[3:] if "x" in size] or [("8192", "128"), ("40000", "256")]
    for n, d in ((int(n), int(d)) for n, d in sizes):
        for dtype in (torch.float32, torch.bfloat16):
            for options in ({"several": False}, {"labels": True, "symmetric": False})[
                : 2 - ("--plain" in sys.argv)
            ]:
                spy.batch = f"{n} x {d} {dtype} {options}"
                batch(n, d, dtype, **options)
    worst = max(spy.found)
    print("largest", *worst)
    for one in sorted(set(spy.found)):
        if one[0] > limit:
            print("beyond", *one)
    sys.exit(worst[0] > limit)


if __name__ == "__main__":
    main()
