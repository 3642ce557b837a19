# mypy: ignore-errors
"""The smallest numbers of two lists, in order, by one warp in registers.

``tl.sort`` moves numbers between threads in most of its steps. Here each thread holds a run of consecutive ranks, so
that most steps are between registers of one thread, at one instruction per number; steps between threads take two. It
does not matter which number Triton holds in which register: every number is returned with its place.
"""

import functools

import triton
import triton.language as tl

from weince.engines.kernels.tiles import INTERPRETED

LANES = 32


def network(each: int) -> str:
    """PTX from two lists, ``each`` numbers of either in every lane, to the smaller half of all numbers, in order.

    Operands: 64-bit results, then the first list, then the second. A result has a number in its upper half, and in
    its lower half the place ``register * 32 + lane`` of this number, whose rank is ``lane * each + register``.

    It is a bitonic sort: sort each list, the second one downwards, take the smaller of each pair, and merge those.
    The phases within a lane come first, unrolled; the others share one loop, so that the code stays in the
    instruction cache. To sort downwards, flip all bits, sort upwards, and flip again.
    """
    a, b = ([f"{name}{r}" for r in range(each)] for name in "ab")
    low = each.bit_length() - 1
    lines = [
        f".reg .s32 a<{each}>, b<{each}>, t<2>, lane, phase, bit, step, now, before, turn, way, list;",
        ".reg .pred lower, more;",
        "mov.u32 lane, %laneid;",
        *(f"mov.s32 a{r}, ${each + r};" for r in range(each)),
        *(f"mov.s32 b{r}, ${2 * each + r};" for r in range(each)),
        "mov.s32 list, 0;",
        "mov.s32 way, 0;",
        "LIST:",
    ]
    for run in range(1, low):  # each round doubles the sorted runs; every other run is descending
        for gap in reversed(range(run)):
            lines += _exchanges(a, gap, run)
    lines += ["mov.s32 phase, 0;", "mov.s32 before, 0;", "PHASE:"]
    lines += ["bfe.s32 now, lane, phase, 1;", "setp.lt.s32 more, phase, 5;", "selp.s32 now, now, way, more;"]
    lines += ["xor.b32 turn, now, before;", "mov.s32 before, now;", *_flipped(a, "turn")]
    lines += ["sub.s32 bit, phase, 1;", "setp.lt.s32 more, bit, 0;", "@more bra ALONE;", "STEP:"]
    lines += ["shl.b32 step, 1, bit;", "and.b32 t0, lane, step;", "setp.eq.s32 lower, t0, 0;"]
    for number in a:
        lines += [
            f"shfl.sync.bfly.b32 t0, {number}, step, 31, -1;",
            f"min.s32 t1, {number}, t0;",
            f"max.s32 t0, {number}, t0;",
            f"selp.s32 {number}, t1, t0, lower;",
        ]
    lines += ["sub.s32 bit, bit, 1;", "setp.ge.s32 more, bit, 0;", "@more bra STEP;", "ALONE:"]
    for gap in reversed(range(low)):
        lines += _exchanges(a, gap, low)
    lines += ["add.s32 phase, phase, 1;", "setp.lt.s32 more, phase, 6;", "@more bra PHASE;"]
    lines += [
        *_flipped(a, "before"),
        "add.s32 list, list, 1;",
        "setp.gt.s32 more, list, 2;",
        "@more bra DONE;",
    ]
    lines += ["setp.eq.s32 more, list, 2;", "@more bra MERGE;", "mov.s32 way, -1;"]
    for first, second in zip(a, b, strict=True):
        lines += [f"mov.s32 t0, {first};", f"mov.s32 {first}, {second};", f"mov.s32 {second}, t0;"]
    lines += ["bra LIST;", "MERGE:", *(f"min.s32 {x}, {x}, {y};" for x, y in zip(a, b, strict=True))]
    lines += ["mov.s32 way, 0;", "mov.s32 before, 0;", "mov.s32 phase, 5;", "bra PHASE;", "DONE:"]
    for r in range(each):
        lines += [f"add.s32 t0, lane, {LANES * r};", f"mov.b64 ${r}, {{t0, a{r}}};"]
    return "\n".join(["{", *lines, "}"])


def _flipped(numbers: list[str], mask: str) -> list[str]:
    return [f"xor.b32 {number}, {number}, {mask};" for number in numbers]


def _exchanges(numbers: list[str], gap: int, run: int) -> list[str]:
    """Sort pairs of registers ``2^gap`` apart: upwards if bit ``run`` of their index is 0, else downwards."""
    lines = []
    for at, number in enumerate(numbers):
        if at >> gap & 1:
            continue
        other = numbers[at | 1 << gap]
        low, high = ("max", "min") if at >> run & 1 else ("min", "max")
        lines += [
            f"{low}.s32 t0, {number}, {other};",
            f"{high}.s32 {other}, {number}, {other};",
            f"mov.s32 {number}, t0;",
        ]
    return lines


@functools.cache
def network_of(size: int) -> dict[str, str]:
    """Constants that :func:`smallest` needs for lists of ``size`` numbers: instructions, and operand constraints."""
    each = size // LANES
    return {"NETWORK": network(each), "KINDS": ",".join(["=l"] * each + ["r"] * (2 * each))}


@triton.jit
def smallest(a, b, KP: tl.constexpr, NETWORK: tl.constexpr, KINDS: tl.constexpr):
    """The ``KP`` smallest of two lists of ``KP`` numbers that are not negative, ``(1, KP)`` each, packed with
    their places as by :func:`network`. Only for kernels of one warp."""
    if INTERPRETED:
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * KP))
        ordered = -tl.topk(-both, KP)
        rank = tl.arange(0, KP)[None, :]
        packed = (ordered.to(tl.int64) << 32) | (rank % (KP // 32) * 32 + rank // (KP // 32)).to(tl.int64)
    else:
        packed = tl.inline_asm_elementwise(NETWORK, KINDS, [a, b], tl.int64, False, KP // 32)
    return packed


@triton.jit
def numbers_of(packed):
    """The packed numbers; :func:`ranks_of` tells their order."""
    return (packed >> 32).to(tl.int32)


@triton.jit
def ranks_of(packed, KP: tl.constexpr):
    """Ranks of the packed numbers, from 0, and their places."""
    place = (packed & 0xFFFF).to(tl.int32)
    return place % 32 * (KP // 32) + place // 32, place
