"""Sizes of what the kernels work on: operands, tiles that fit the device, and room for the hardest negatives."""

import functools
import math
from typing import NamedTuple

import torch

from weince.engines.kernels import tiles

SAMPLE = 1024
"""Candidates in the sample that gives an anchor its threshold."""

INTERPRETED: bool = tiles.INTERPRETED.value


def parts_of(whole: int, size: int) -> int:
    """How many parts of a size make up a whole. (Triton's own function takes the host long.)"""
    return -(-whole // size)


def power_of_2(number: int) -> int:
    """The least power of 2 that is no less."""
    return 1 << max(0, number - 1).bit_length()


@functools.cache
def operand_shape(d: int, parts: int) -> dict[str, int]:
    """Compile-time shape of operands: width with padding, columns multiplied at a time, parts."""
    block = 128 if d > 256 else max(16, power_of_2(d))
    return {"DP": parts_of(d, block) * block, "DB": block, "PARTS": parts}


SHARED: int | None = None
"""Bytes of shared memory that tiles may take, instead of what the device has; for tests."""


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have: 99 KiB on an RTX 4090 or L40S, 163 on an A100, 227 on an H100."""
    return _shared_memory(device) if SHARED is None else SHARED


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 48 << 10))


class Tile(NamedTuple):
    """Rows and columns of a tile, warps that work on it, and tiles of columns that are loaded ahead."""

    rows: int
    columns: int
    warps: int
    stages: int

    def takes(self, room: int, in_pieces: bool) -> int:
        """Bytes of shared memory, at the most, for operands ``room`` wide: rows, columns, a result, scratch.

        ``in_pieces``: rows are too wide to keep, so that theirs are loaded ahead too, and the gradient's columns
        again.
        """
        loaded = self.rows + self.stages * self.columns
        if in_pieces:
            loaded = self.stages * (self.rows + self.columns) + self.columns
        return 2 * (room * loaded + self.rows * self.columns) + 4096

    def within(self, room: int, limit: int, in_pieces: bool = False) -> "Tile":
        """The tile, or a smaller one that fits."""
        rows, columns, warps, stages = self
        if self.takes(room, in_pieces) <= limit:
            return self
        if stages > 2:
            return Tile(rows, columns, warps, stages - 1).within(room, limit, in_pieces)
        if rows > 64:
            return Tile(rows // 2, columns, warps, stages).within(room, limit, in_pieces)
        if columns > 32:
            return Tile(rows, columns // 2, warps, stages).within(room, limit, in_pieces)
        if stages > 1:
            return Tile(rows, columns, warps, 1).within(room, limit, in_pieces)
        if rows > 16:
            return Tile(rows // 2, columns, 4, 1).within(room, limit, in_pieces)
        return self

    def constants(self) -> dict[str, int]:
        return {"BM": self.rows, "BN": self.columns, "num_warps": self.warps, "num_stages": self.stages}


def blocks(rows: int, shape: dict[str, int], use: str, limit: int) -> dict[str, int]:
    """Tile of a pass over all pairs that fits the shared memory: small for few rows, so that every multiprocessor has
    one. Tuned on an H200; smaller ones follow from those."""
    if INTERPRETED:
        return {"BM": 64, "BN": 64}
    in_pieces = shape["DP"] > shape["DB"]
    return tuned_tile(rows, shape, use).within(shape["DB"] * shape["PARTS"], limit, in_pieces).constants()


def tuned_tile(rows: int, shape: dict[str, int], use: str) -> Tile:
    room = shape["DB"] * shape["PARTS"]
    if rows <= 2048:
        return Tile(16, 64, 4, 2 if room > 256 else 3)
    if shape["DP"] > shape["DB"]:  # rows too wide to keep: both operands of a product come in pieces
        if use == "gradient":
            return Tile(64, 32, 4, 2) if shape["PARTS"] == 2 else Tile(64, 64, 8, 2)
        return Tile(64, 64, 4, 2)
    many = rows > 16384
    if use == "gradient":
        if shape["DB"] > 128:
            return Tile(128, 32, 8, 2)
        return Tile(64, 64, 4, 2) if many or shape["PARTS"] == 2 else Tile(64, 64, 8, 2)
    if room > 256:
        return Tile(128, 64, 8, 1)
    if room == 256:
        return Tile(128, 64, 8, 3) if many else Tile(64, 64, 4, 2)
    return Tile(128, 64, 4, 3)


def sample_tile(shape: dict[str, int], limit: int) -> dict[str, int]:
    """Tile of the kernel that takes the sample, all of which is one tile."""
    tile = {"M": SAMPLE, "BM": 32, "BK": min(64 // shape["PARTS"] // 2, shape["DB"])}
    if INTERPRETED:
        return tile
    each = 2 * (SAMPLE + 32) * tile["BK"] * shape["PARTS"]
    return {**tile, "num_warps": 16, "num_stages": max(1, min(3, (limit - (16 << 10)) // each))}


def exact_tile(shape: dict[str, int], limit: int) -> dict[str, int]:
    """Tile of the exact search."""
    if INTERPRETED:
        return {"BM": 16, "BN": 64}
    return Tile(16, 64, 4, 3).within(shape["DB"] * shape["PARTS"], limit).constants()


def splits(programs: int, tiles: int) -> tuple[int, int]:
    """Into how many spans of column tiles a pass is cut so as to fill the device, and their length."""
    wanted = 1 if INTERPRETED else min(16, max(1, 264 // programs))
    span = parts_of(tiles, wanted)
    return parts_of(tiles, span), span


class TailPlan(NamedTuple):
    """How to find the K hardest of many candidates.

    ``wanted``: which of the sampled shortfalls is the threshold. ``every``: one tile of so many is searched first,
    and the threshold then lowered to the ``again``-th smallest of what that kept; 0: all are searched at once.
    ``width``: room for survivors.
    """

    wanted: int
    every: int
    again: int
    width: int


def plan(count: int, k: int) -> TailPlan:
    """A plan by which K is missed, or the room overrun, once in millions of anchors.

    The rank of the K-th in a sample of share f is Poisson with mean ``f K``, or narrower; ``above`` puts the
    threshold more than five standard deviations above it, and allows for as much once more in what comes below that.
    """

    def above(mean: float) -> int:
        return math.ceil(mean + 5 * math.sqrt(mean) + 5)

    share = SAMPLE / count
    wanted = above(share * k)
    every = 0 if count <= 12 * SAMPLE else 4 if count <= 256 * SAMPLE else 16
    if not every:
        return TailPlan(wanted, 0, 0, min(count, even(above(wanted) / share)))
    again = above(k / every)
    first = above(wanted) / share / every
    return TailPlan(wanted, every, again, min(count, even(first + above(again) * (every - 1))))


def even(number: float) -> int:
    return math.ceil(number / 64) * 64
