"""Sentences from a text file, one per line, read on demand.

Only an index of the file is in memory: start, length and hash of each line (24 bytes per line).
"""

import hashlib
import os
import sys
import threading
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from weince.files import check_file

Given = TypeVar("Given")
Made = TypeVar("Made")

LONGEST = 1 << 16
"""Largest number of bytes to read of a line: far more than any tokenizer keeps."""

_BOM = b"\xef\xbb\xbf"


class Drawn(NamedTuple):
    """Sentences of a batch. Anchors with equal ``ids`` are not negatives of each other; None if all are different."""

    sentences: list[str]
    ids: NDArray[np.int64] | None


class SentenceFile:
    """The sentences of a file, by number.

    Empty lines are left out. Repeated sentences are kept; a batch says which of its sentences are equal. Warnings
    give the number of both.

    Args:
        path: UTF-8 text, one sentence per line.
        first: Read only this many sentences from the beginning.
        pairs: Each line has two sentences with a tab between them.

    Raises:
        OSError: The file is missing or cannot be read.
        ValueError: A line is not UTF-8 or not the expected pair, or there are fewer than two sentences.
    """

    def __init__(self, path: Path, *, first: int | None = None, pairs: bool = False) -> None:
        self.pairs = pairs
        if not path.exists() or path.is_dir():
            raise FileNotFoundError(f"no such text file: {path}; want a file with one sentence a line")
        check_file(path)
        starts, lengths, hashes, empty = _index(path, first, pairs)
        if len(starts) < 2:
            raise ValueError(f"{path}: at least 2 sentences are needed, one a line; found {len(starts)}")
        self.starts, self.lengths, self.hashes = starts, lengths, hashes
        repeated = len(hashes) - len(np.unique(hashes))
        if empty:
            warnings.warn(f"{path}: left out {empty:,} empty lines", stacklevel=2)
        if repeated:
            what = "pairs" if pairs else "sentences"
            warnings.warn(
                f"{path}: {repeated:,} of {len(hashes):,} {what} repeat an earlier one; "
                f"equal {what} of a batch are not taken as negatives of each other",
                stacklevel=2,
            )
        self._file = path.open("rb", buffering=0)
        self._reading = threading.Lock()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> str:
        length = min(int(self.lengths[number]), LONGEST)
        line = self._read(length, int(self.starts[number]))
        return line.decode(errors="ignore").strip()  # the cut at LONGEST may split a character

    def _read(self, length: int, start: int) -> bytes:
        if sys.platform != "win32":  # Windows has no pread
            return os.pread(self._file.fileno(), length, start)
        with self._reading:
            self._file.seek(start)
            return self._file.read(length)

    def draw(self, numbers: NDArray[np.int64]) -> Drawn:
        """The sentences with these numbers; of pairs, all first sentences, then all second ones.

        Pairs that share a sentence have equal ids.
        """
        lines, ids = [self[number] for number in numbers], self.hashes[numbers]
        if self.pairs:
            first, second = zip(*(line.split("\t") for line in lines), strict=True)
            lines, ids = [*first, *second], _related(first, second)
        alike = len(np.unique(ids)) < len(ids)
        return Drawn(lines, ids if alike else None)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _index(
    path: Path, first: int | None, pairs: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Starts of the lines, their lengths in bytes, hashes of their sentences, and the number of empty lines."""
    # Arrays of int64; lists of Python ints would take four times the memory.
    starts, lengths, hashes = (array("q") for _ in range(3))
    position = empty = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if first is not None and len(starts) == first:
                break
            text = line.removeprefix(_BOM) if number == 1 else line
            try:
                sentence = text.decode().strip()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not UTF-8 (byte {text[error.start]:#04x} at place {error.start + 1}); "
                    "convert the file first, for example with iconv"
                ) from None
            if sentence and pairs:
                _check_pair(sentence, len(text), f"{path}, line {number}")
            if sentence:
                starts.append(position + len(line) - len(text))
                lengths.append(len(text))
                digest = hashlib.blake2b(sentence.encode(), digest_size=8).digest()
                hashes.append(int.from_bytes(digest, "little", signed=True))
            else:
                empty += 1
            position += len(line)
    return np.array(starts), np.array(lengths), np.array(hashes), empty


def _related(first: Sequence[str], second: Sequence[str]) -> NDArray[np.int64]:
    """A number for each pair, equal for pairs that share a sentence, directly or through other pairs."""
    from scipy.sparse import coo_array  # here, since it takes time to import and only pairs need it
    from scipy.sparse.csgraph import connected_components

    different, places = np.unique([*first, *second], return_inverse=True)
    ends = places[: len(first)], places[len(first) :]
    joined = coo_array((np.ones(len(first)), ends), shape=(len(different), len(different)))
    groups: NDArray[np.int64] = connected_components(joined, directed=False)[1].astype(np.int64)
    return groups[ends[0]]


def _check_pair(line: str, size: int, where: str) -> None:
    """Check that a line of ``size`` bytes is a pair and short enough to be read completely."""
    parts = line.split("\t")
    if len(parts) != 2 or not all(part.strip() for part in parts):
        raise ValueError(f"{where}: want two sentences with a tab between them; got {line[:80]!r}")
    if size > LONGEST:
        raise ValueError(f"{where}: a pair must have at most {LONGEST:,} bytes; got {size:,}")


def steps_in_epoch(sentences: int, batch: int) -> int:
    """Batches in an epoch. The last may be smaller; a last batch of one sentence is left out, having no negative."""
    full, rest = divmod(sentences, batch)
    return full + (rest >= 2)


def batches(
    sentences: int, *, batch: int, epochs: int, seed: int, start: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Numbers of the sentences of each step, from step ``start`` on; each epoch has its own order.

    The order depends only on the seed and the epoch, so that a run can resume where it stopped.
    """
    in_epoch = steps_in_epoch(sentences, batch)
    for epoch in range(start // in_epoch, epochs):
        order = np.random.default_rng([seed, epoch]).permutation(sentences)
        for place in range(start - epoch * in_epoch if epoch == start // in_epoch else 0, in_epoch):
            yield order[place * batch : (place + 1) * batch]


def ahead(source: Iterable[Given], make: Callable[[Given], Made], *, depth: int = 4) -> Iterator[Made]:
    """``make(item)`` of each item, in order, computed in a thread up to ``depth`` items ahead."""
    items = iter(source)
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(pool.submit(make, item) for item in islice(items, depth))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(make, item) for item in islice(items, 1))
            yield result
