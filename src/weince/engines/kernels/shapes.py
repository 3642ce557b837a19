"""Sizes for the kernels: operands, tiles that fit the device, and buffers for the hardest negatives."""

import functools
import math
from typing import NamedTuple

import torch

from weince.engines.kernels import tiles

SAMPLE = 1024
"""Candidates in the sample that gives an anchor its threshold."""

INTERPRETED: bool = tiles.INTERPRETED.value


def parts_of(whole: int, size: int) -> int:
    """How many parts of a size make up a whole. (``triton.cdiv`` costs more CPU time.)"""
    return -(-whole // size)


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


@functools.cache
def operand_shape(d: int, parts: int) -> dict[str, int]:
    """Compile-time shape of operands: padded width, columns multiplied at a time, number of parts."""
    block = 128 if d > 256 else max(16, power_of_2(d))
    return {"DP": parts_of(d, block) * block, "DB": block, "PARTS": parts}


SHARED: int | None = None
"""Bytes of shared memory that tiles may use, instead of what the device has; for tests."""


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may use: 99 KiB on an RTX 4090 or L40S, 163 on an A100, 227 on an H100."""
    return _shared_memory(device) if SHARED is None else SHARED


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 48 << 10))


class Tile(NamedTuple):
    """Rows and columns of a tile, warps that work on it, and how many tiles of columns are in flight."""

    rows: int
    columns: int
    warps: int
    stages: int

    def takes(self, room: int, in_pieces: bool) -> int:
        """Upper bound on the bytes of shared memory for operands ``room`` wide: rows, columns, a result, scratch.

        ``in_pieces``: rows too wide to keep are loaded in stages too, and the gradient loads its columns again.
        """
        loaded = self.rows + self.stages * self.columns
        if in_pieces:
            loaded = self.stages * (self.rows + self.columns) + self.columns
        return 2 * (room * loaded + self.rows * self.columns) + 4096

    def within(self, room: int, limit: int, in_pieces: bool = False) -> "Tile":
        """This tile, or a smaller one that fits the limit."""
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
    """Tile for a pass over all pairs that fits the shared memory; small for few rows, so that every multiprocessor
    has one. The tiles were tuned on an H200, and shrink on devices with less shared memory."""
    if INTERPRETED:
        return {"BM": 64, "BN": 64}
    in_pieces = shape["DP"] > shape["DB"]
    return tuned_tile(rows, shape, use).within(shape["DB"] * shape["PARTS"], limit, in_pieces).constants()


def tuned_tile(rows: int, shape: dict[str, int], use: str) -> Tile:
    room = shape["DB"] * shape["PARTS"]
    if rows <= 2048:
        return Tile(16, 64, 4, 2 if room > 256 else 3)
    if shape["DP"] > shape["DB"]:  # rows too wide to keep: both operands of a product are loaded in pieces
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
    """Tile of the sampling kernel, and operands multiplied fewer columns at a time; the whole sample is one tile."""
    tile = {"M": SAMPLE, "BM": 32, "DB": min(64 // shape["PARTS"] // 2, shape["DB"])}
    if INTERPRETED:
        return tile
    each = 2 * (SAMPLE + 32) * tile["DB"] * shape["PARTS"]
    return {**tile, "num_warps": 16, "num_stages": max(1, min(3, (limit - (16 << 10)) // each))}


def exact_tile(shape: dict[str, int], limit: int) -> dict[str, int]:
    """Tile of the exact search."""
    if INTERPRETED:
        return {"BM": 16, "BN": 64}
    return Tile(16, 64, 4, 3).within(shape["DB"] * shape["PARTS"], limit).constants()


def splits(programs: int, tiles: int) -> tuple[int, int]:
    """Number of spans into which a pass divides its column tiles to fill the device, and tiles per span."""
    wanted = 1 if INTERPRETED else min(16, max(1, 264 // programs))
    span = parts_of(tiles, wanted)
    return parts_of(tiles, span), span


class TailPlan(NamedTuple):
    """How to find the K hardest of many candidates.

    ``wanted``: rank of the sampled shortfall that becomes the threshold. ``every``: the first phase searches one in
    ``every`` tiles, then the threshold is lowered to the ``again``-th smallest shortfall kept; 0: one phase searches
    all. ``width``: room for survivors.
    """

    wanted: int
    every: int
    again: int
    width: int


def plan(count: int, k: int) -> TailPlan:
    """A plan that finds fewer than K, or overflows the buffer, once in millions of anchors.

    The rank of the K-th in a sample of share f is Poisson with mean ``f K``, or narrower. ``above`` puts the
    threshold more than five standard deviations above the mean; applied again, it bounds the number of survivors.
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
