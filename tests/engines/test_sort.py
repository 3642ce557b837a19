"""The sort written in PTX: a small interpreter runs its instructions here; on a GPU they run natively."""

import os
import re

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

triton = pytest.importorskip("triton", minversion="3.5")

import interpreter  # noqa: E402, F401  (makes it fast)
import triton.language as tl  # noqa: E402

from weince.engines.kernels.sort import LANES, network, network_of, numbers_of, ranks_of, smallest  # noqa: E402

COMPARE = {"eq": torch.eq, "lt": torch.lt, "ge": torch.ge, "gt": torch.gt}
ACTIONS = {
    "mov": lambda a: a,
    "xor": torch.bitwise_xor,
    "and": torch.bitwise_and,
    "shl": torch.bitwise_left_shift,
    "min": torch.minimum,
    "max": torch.maximum,
    "add": torch.add,
    "sub": torch.sub,
    "bfe": lambda a, bit, _: -(a >> bit & 1),
    "selp": lambda a, b, where: torch.where(where, a, b),
    "shfl": lambda a, step, *_: a[torch.arange(LANES) ^ step],
}


class Warp:
    """Interpreter for the few PTX instructions that the sort uses, for 32 lanes at once."""

    def __init__(self, inputs):
        self.inputs, self.registers, self.results = inputs, {}, {}

    def value(self, name):
        if name.startswith("$"):
            return self.inputs[int(name[1:])]
        if name == "%laneid":
            return torch.arange(LANES)
        return torch.full((LANES,), int(name)) if re.fullmatch(r"-?\d+", name) else self.registers[name]

    def run(self, text):
        program = [line.strip().rstrip(";") for line in text.splitlines()]
        labels = {line[:-1]: at for at, line in enumerate(program) if line.endswith(":")}
        at = 0
        while at < len(program):
            line, at = program[at], at + 1
            jump = re.fullmatch(r"(?:@(\w+) )?bra (\w+)", line)
            if jump:
                taken = self.registers[jump[1]] if jump[1] else torch.ones(1, dtype=torch.bool)
                assert taken.all() or not taken.any(), "lanes part"
                at = labels[jump[2]] if taken.all() else at
            elif line.strip("{}") and not line.endswith(":") and not line.startswith(".reg"):
                self.step(line)
        return self.results

    def step(self, line):
        action, operands = line.split(" ", 1)
        target, *sources = re.split(r", \{?", operands.rstrip("}"))
        values = [self.value(name) for name in sources]
        kind, *rest = action.split(".")
        if action == "mov.b64":
            self.results[int(target[1:])] = values[0] | values[1] << 32
        elif kind == "setp":
            self.registers[target] = COMPARE[rest[0]](*values)
        else:
            self.registers[target] = ACTIONS[kind](*values)


def lists(size, seed, largest):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, largest, (2, size), generator=generator)


@pytest.mark.parametrize("each", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("largest", [3, 1000, 2**31 - 1])
def test_the_instructions_sort(each, largest):
    """Sort distinct and repeated numbers: each rank occurs once, and the number at each rank is the right one."""
    both = lists(each * LANES, each, largest)
    inputs = dict(enumerate(both.view(2 * each, LANES), start=each))
    results = Warp(inputs).run(network(each))
    packed = torch.cat([results[register] for register in range(each)])
    rank = (packed & 0xFFFF) % LANES * each + (packed & 0xFFFF) // LANES
    assert sorted(rank.tolist()) == list(range(each * LANES))
    assert torch.equal((packed >> 32)[rank.argsort()], both.flatten().sort().values[: each * LANES])


@triton.jit
def sort_kernel(a, b, numbers, places, KP: tl.constexpr, NETWORK: tl.constexpr, KINDS: tl.constexpr):
    at = tl.program_id(0) * KP + tl.arange(0, KP)[None, :]
    packed = smallest(tl.load(a + at), tl.load(b + at), KP, NETWORK, KINDS)
    packed = smallest(numbers_of(packed), tl.load(a + at), KP, NETWORK, KINDS)
    rank, place = ranks_of(packed, KP)
    tl.store(numbers + tl.program_id(0) * KP + rank, numbers_of(packed))
    tl.store(places + tl.program_id(0) * KP + rank, place)


@pytest.mark.parametrize("size", [32, 128] if DEVICE == "cpu" else [32, 64, 256, 1024])
@pytest.mark.parametrize("largest", [3, 2**31 - 1])
def test_in_a_kernel(size, largest):
    """Two sorts in a row: the second takes the output of the first in the register order of the first."""
    programs = 3 if DEVICE == "cpu" else 500
    rows = lists(programs * size, size, largest).int().to(DEVICE).view(2, programs, size)
    numbers, places = torch.full((2, programs, size), -1, dtype=torch.int32, device=DEVICE)
    options = {} if DEVICE == "cpu" else {"num_warps": 1}
    sort_kernel[(programs,)](*rows, numbers, places, KP=size, **network_of(size), **options)
    wanted = torch.cat([rows[0], *rows], 1).sort(1).values[:, :size]
    assert torch.equal(numbers, wanted)
    rank = torch.arange(size, device=DEVICE)
    assert torch.equal(
        places, (rank % (size // LANES) * LANES + rank // (size // LANES)).int().expand_as(places)
    )
