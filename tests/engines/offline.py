"""Compile the kernels of the fused engine for a GPU that this machine lacks, and check their shared memory.

    python tests/engines/offline.py 89 101376 8192x128 40000x256

The arguments are the compute capability, the limit in bytes, and batch sizes (pairs x d). Losses run on meta tensors,
and each launch compiles its kernel. Prints the kernel that needs most memory and all kernels above the limit, and
exits with 1 if there are any. ``--plain`` leaves out labels and several sums; ``--spills`` prints registers, spills
and instructions of every kernel; ``--loss NAME`` and ``--kernel NAME`` take one alone. It runs as its own process,
because the tests run in Triton's interpreter, which compiles nothing.
"""

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import pathlib
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from weince.engines.fused import ENGINE
from weince.engines.kernels import launch, search, shapes
from weince.engines.tile import Part
from weince.layouts import Layout, problems
from weince.links import (
    AffineLink,
    AtanhLink,
    BlendLink,
    FunctionLink,
    PowerLink,
    ShortfallLink,
    SoftmaxLink,
)
from weince.losses.kl_ball import MomentLink
from weince.sums import Batch, Need
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


def mocked(value):
    if isinstance(value, tuple):
        return tuple(map(mocked, value))
    return triton.MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value


def kinds(value):
    if isinstance(value, tuple):
        return tuple(map(kinds, value))
    return str(getattr(value, "dtype", type(value)))


class Compiles:
    """Replaces the launcher: compiles each kernel once and records its shared memory."""

    def __init__(self):
        self.batch, self.found, self.known = "", [], set()

    def __call__(self, kernel, grid, arguments, constants):
        mocks = mocked(arguments)
        if "--kernel" in sys.argv and kernel.__name__ != sys.argv[sys.argv.index("--kernel") + 1]:
            return
        key = kernel, str(constants), kinds(mocks)  # numbers change little: one compiled kernel is enough
        if key in self.known:
            return
        self.known.add(key)
        result = kernel.warmup(*mocks, grid=(1,), **constants)
        tile = [constants.get(name) for name in ("BM", "BN", "num_stages")]
        self.found.append((result.metadata.shared, kernel.__name__, self.batch, *tile))
        if "--spills" in sys.argv:
            print(*self.found[-1], *[constants[name] for name in ("FROM_ROWS", "FROM_COLS") if name in constants],
                  spills(result), flush=True)  # fmt: skip


def spills(kernel):
    """Registers and spills of a compiled kernel, and its instructions, those of its longest loop apart."""
    tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "k.ptx"
        path.write_text(kernel.asm["ptx"])
        capability = kernel.metadata.target.arch
        name = "sm_90a" if capability == 90 else f"sm_{capability}"
        binary = path.with_suffix(".cubin")
        out = subprocess.run([tools / "ptxas", "-v", f"-arch={name}", path, "-o", binary],
                             capture_output=True, text=True)  # fmt: skip
        code = subprocess.run([tools / "cuobjdump", "-sass", binary], capture_output=True, text=True).stdout
    about = re.findall(r"(\d+ bytes spill stores|Used \d+ registers)", out.stderr)
    return " ".join([*about, f"{len(lines_of(code))} instructions, {loop_of(code)} in the longest loop"])


def lines_of(code):
    return re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)


def loop_of(code):
    """Number of instructions between a jump back and its target, at the most."""
    lines = lines_of(code)
    places = {int(address, 16): place for place, (address, _) in enumerate(lines)}
    longest = 0
    for place, (_, text) in enumerate(lines):
        target = re.search(r"BRA (?:`\(.*\)|0x([0-9a-f]+))", text)
        if target and target[1] and int(target[1], 16) in places:
            longest = max(longest, place - places[int(target[1], 16)])
    return longest


def every_operation(s, k, m):
    """A user-defined link with every operation that the kernels support."""
    f, far = torch.nn.functional, 2 + s
    z = k * s**3 + m / far + far.log() + far.log2() + s.exp() + torch.exp2(s) + s.tanh() + s.sin() * s.cos()
    z = z + far.sqrt() + far.rsqrt() + torch.expm1(s) + torch.log1p(s / 2) + far**1.3 + far**m + f.softplus(s)
    z = z + f.relu(s) + s.sigmoid() + s.abs() * s.sign() + torch.sinh(s) + torch.cosh(s) + torch.atanh(s / 2)
    z = z + torch.erf(s) + torch.maximum(s, k) * torch.minimum(s, m) + s.clamp(-0.5, 0.5)
    return torch.where(((s > 0) & (s < 0.9)) | ~(s >= -0.5), z, -z)


def learned(*shape):
    return torch.empty(shape, device="meta", requires_grad=True)


def paper(engine):
    return [Part(BlendLink(engine.stats.lam, engine.stats.beta, 0.5), "lse")]


def several(engine):
    return [
        Part(ShortfallLink(learned()), "lse"),
        Part(SoftmaxLink(learned(len(engine.problem.anchors))), "lse", "negatives", 50),
        Part(AffineLink(learned(), learned()), "softplus"),
        Part(PowerLink(2.0), "lse"),
        Part(AtanhLink(), "lse"),
    ]


def moments(engine):
    scale = torch.empty(len(engine.problem.anchors), device="meta")
    return [Part(MomentLink(scale, power, scale), "lse") for power in range(3)]


def supcon(engine):
    link = SoftmaxLink(0.5)
    return [Part(link, "lse"), Part(link, "lse", "positives"), Part(link, "sum", "positives")]


def functions(engine):
    return [
        Part(FunctionLink(lambda s, k: k * s + 2 * s**3, k=learned()), "lse"),
        Part(FunctionLink(every_operation, k=learned(), m=learned()), "lse"),
    ]


def softmax(engine):
    return [Part(SoftmaxLink(0.5), "lse")]


TAIL = Need(TailConfig())
CASES = {
    "InfoNCE": ("views", Need(), softmax),
    "paper": ("views", TAIL, paper),
    "KL ball": ("views", Need(), moments),
    "SupCon": ("labels", Need(), supcon),
    "several": ("views", Need(TailConfig(), (50,)), several),
    "cross, ids, ignore": ("cross", Need(TailConfig(), (50, 10)), several),
    "functions": ("cross", Need(), functions),
    "dot, offset, ceiling": (Layout("cross", score="dot", ignore_above=0.1), Need(), softmax),
    "labels of two towers": (Layout("clip"), Need(), supcon),
}
PLAIN = ("InfoNCE", "paper", "KL ball")


def run(name, n, d, dtype):
    """Forward and backward pass of a case: every kernel that it would launch is compiled."""
    layout, need, parts = CASES[name]
    meta = {"device": "meta"}
    z_i, z_j = (torch.empty(n, d, dtype=dtype, requires_grad=True, **meta) for _ in range(2))
    integers, roles = torch.zeros(n, dtype=torch.int64, **meta), {}
    if name == "SupCon":
        roles = {"labels": integers}
    if name == "labels of two towers":
        roles = {"labels": (integers, integers)}
    if "ids" in name:
        roles = {"ids": integers, "ignore": torch.empty(n, n, dtype=torch.bool, **meta)}
    if "offset" in name:
        roles = {"offset": torch.empty(n, **meta)}
    totals = []
    for problem in problems(layout, z_i, z_j, **roles):
        engine = Batch(problem, ENGINE, need)
        sums = engine.values(parts(engine))
        if name == "KL ball":  # its search has a condition on the device
            links = [part.link for part in parts(engine)]
            engine.log_sums_exp(links, torch.empty((), dtype=torch.bool, **meta))
        if problem.positives is None:
            sums = [*sums, 1 - engine.positive_scores()]
        if not problem.uniform:
            engine.negatives()
        totals.append(torch.stack(sums).sum())
    torch.stack(totals).sum().backward()


def main():
    capability, limit = int(sys.argv[1]), int(sys.argv[2])
    driver.set_active(Absent(capability))
    shapes.SHARED = limit
    spy = Compiles()
    launch.launch = search.launch = spy
    names = [sys.argv[sys.argv.index("--loss") + 1]] if "--loss" in sys.argv else list(CASES)
    names = [name for name in names if "--plain" not in sys.argv or name in PLAIN]
    sizes = [size.split("x") for size in sys.argv[3:] if re.fullmatch(r"\d+x\d+", size)] or [("8192", "128")]
    for n, d in ((int(n), int(d)) for n, d in sizes):
        for dtype in (torch.float32, torch.bfloat16):
            for name in names:
                spy.batch = f"{n} x {d} {dtype} {name}"
                run(name, n, d, dtype)
    worst = max(spy.found, key=lambda one: one[0])
    print("largest", *worst)
    for one in spy.found:
        if one[0] > limit:
            print("beyond", *one)
    sys.exit(worst[0] > limit)


if __name__ == "__main__":
    main()
