"""Pairs to train two towers on, with the documents among which each query looks for its own.

`load` reads a set; `PairSet` is what every source becomes. Equal texts share a key, so that a loss can leave out
duplicates, and no group lies on both sides of a split.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weince.lab.tasks.images.pictures import Images

Numbers = NDArray[np.int64]
Items = Sequence[str] | Images
"""Texts, or images ``(n, height, width, 3)``, or ``(n, height, width, 1)`` in grey."""

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, eq=False)
class Relevance:
    """Which documents answer which queries of a split, one line for each pair.

    Attributes:
        query: ``(p,)`` rows of queries, in ascending order.
        document: ``(p,)`` rows of documents.
        grade: ``(p,)`` how relevant, above 0.
        weight: ``(p,)`` of the pairs in the loss; None for equal weights.
        negatives: ``(p, k)`` rows of documents that do not answer the query, -1 where there are fewer than ``k``.
    """

    query: Numbers
    document: Numbers
    grade: NDArray[np.float64]
    weight: NDArray[np.float32] | None = None
    negatives: Numbers | None = None

    def __len__(self) -> int:
        return len(self.query)

    def take(self, rows: NDArray[Any]) -> "Relevance":
        """These pairs: numbers, or True for those to keep."""
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        kept: dict[str, Any] = {name: None if x is None else x[rows] for name, x in columns.items()}
        return Relevance(**kept)


@dataclass(frozen=True, eq=False)
class PairSet:
    """Queries, documents, and the pairs of each split.

    Attributes:
        name: Name to show.
        queries: All queries.
        documents: All documents.
        query_ids: Name of each query.
        document_ids: Name of each document; ties in a ranking are broken by it.
        splits: The pairs of each split; ``train``, ``valid`` and ``test`` after `load`.
        corpus: Documents that belong to a split without being the answer to a query of it, by split.
        groups: ``(documents,)``: documents of a group are not told apart with certainty, such as packages of one
            source. None if nothing is known.
    """

    name: str
    queries: Items
    documents: Items
    query_ids: Sequence[str]
    document_ids: Sequence[str]
    splits: Mapping[str, Relevance]
    corpus: Mapping[str, Numbers] = field(default_factory=dict)
    groups: Numbers | None = None

    @cached_property
    def keys(self) -> tuple[Numbers, Numbers]:
        """A number for each query and for each document; equal items of a side have equal numbers."""
        return _keys(self.queries), _keys(self.documents)

    def searched(self, split: str, corpus: str) -> Numbers:
        """Rows of the documents that queries of a split search: ``all``, or those of the ``split``."""
        if corpus == "all":
            return np.arange(len(self.documents))
        own = self.corpus.get(split, np.empty(0, np.int64))
        return np.union1d(self.splits[split].document, own)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that identify the content."""
        digest = hashlib.blake2b(digest_size=8)
        for items in (self.queries, self.documents):
            _digest(digest, items)
        for name, pairs in sorted(self.splits.items()):
            digest.update(name.encode())
            for column in (pairs.query, pairs.document, pairs.grade, pairs.weight, pairs.negatives):
                digest.update(b"-" if column is None else column.tobytes())
        digest.update(b"-" if self.groups is None else self.groups.tobytes())
        return digest.hexdigest()


def _digest(digest: Any, items: Items) -> None:
    if isinstance(items, np.ndarray):
        digest.update(np.ascontiguousarray(items).tobytes())
        return
    for text in items:
        digest.update(text.encode())
        digest.update(b"\0")


def _keys(items: Items) -> Numbers:
    if isinstance(items, np.ndarray):
        digests = b"".join(hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in items)
        return np.unique(np.frombuffer(digests, np.int64), return_inverse=True)[1].astype(np.int64)
    number: dict[str, int] = {}
    return np.array([number.setdefault(text, len(number)) for text in items], np.int64)


def relevance(
    query: Sequence[int], document: Sequence[int], grade: Sequence[float] | None = None
) -> Relevance:
    """The pairs of a split, ordered by query and without repetitions."""
    first, second = np.asarray(query, np.int64), np.asarray(document, np.int64)
    grades = np.ones(len(first)) if grade is None else np.asarray(grade, np.float64)
    different = np.unique(np.stack([first, second]), axis=1, return_index=True)[1]
    return Relevance(first, second, grades).take(different)


def components(first: Numbers, second: Numbers) -> Numbers:
    """A number for each pair, equal for pairs that share a query or a document, directly or through others."""
    from scipy.sparse import coo_array  # here, since it takes time to import
    from scipy.sparse.csgraph import connected_components

    queries, left = np.unique(first, return_inverse=True)
    documents, right = np.unique(second, return_inverse=True)
    count = len(queries) + len(documents)
    joined = coo_array((np.ones(len(left)), (left, len(queries) + right)), shape=(count, count))
    number: Numbers = connected_components(joined, directed=False)[1].astype(np.int64)[left]
    return number


def with_heldout(pairs: PairSet, share: float) -> PairSet:
    """The set with the splits ``train``, ``valid`` and ``test``; those that are missing are taken from ``train``.

    Whole groups are taken: those of the documents if there are any, else pairs that share a query or a document. The
    choice depends only on the content, not on a seed.

    Args:
        pairs: A set with ``train``.
        share: Share of the pairs in each part that is taken.
    """
    train = pairs.splits["train"]
    missing = [name for name in ("valid", "test") if name not in pairs.splits]
    if not missing:
        return pairs
    number = components(pairs.keys[0][train.query], pairs.keys[1][train.document])
    if pairs.groups is not None:
        number = components(number, pairs.groups[train.document])
    groups, first, of, counts = np.unique(number, return_index=True, return_inverse=True, return_counts=True)
    total = len(train)
    small = np.flatnonzero(counts <= max(1, share * total))  # a larger one stays in train
    # In an order that looks random but depends on the texts alone.
    small = small[np.argsort([_hash(pairs, train, row) for row in first[small]], kind="stable")]
    before = np.cumsum(counts[small]) - counts[small]
    label = np.full(len(groups), "train", dtype="U5")
    for place, name in enumerate(missing):
        low, high = place * share * total, (place + 1) * share * total
        label[small[(before >= low) & (before < high)]] = name
    part = label[of]
    splits = dict(pairs.splits)
    for name in ("train", *missing):
        kept = part == name
        if not kept.any():
            raise ValueError(
                f"{pairs.name} has too few groups of pairs to hold out {share:.0%} for {name}; "
                f"got {len(groups)} groups in {total} pairs: give a set with splits, or change heldout"
            )
        splits[name] = train.take(kept)
    return replace(pairs, splits=splits)


def _hash(pairs: PairSet, train: Relevance, row: int) -> str:
    group = None if pairs.groups is None else pairs.groups[train.document[row]]
    query = pairs.queries[train.query[row]]
    name = query if isinstance(query, str) else pairs.query_ids[train.query[row]]
    return hashlib.blake2b(f"{group}\0{name}".encode(), digest_size=8).hexdigest()


def check_set(pairs: PairSet) -> None:
    """Raise a ValueError for what no run could use: repeated names, empty texts, pairs of unknown rows."""
    for what, ids in (("query", pairs.query_ids), ("document", pairs.document_ids)):
        if len(set(ids)) < len(ids):
            seen: set[str] = set()
            twice = next(name for name in ids if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ValueError(f"{pairs.name}: every {what} must have an id of its own; got {twice!r} twice")
    for name, part in pairs.splits.items():
        for what, items, ids, rows in (
            ("query", pairs.queries, pairs.query_ids, part.query),
            ("document", pairs.documents, pairs.document_ids, part.document),
        ):
            if isinstance(items, np.ndarray):
                continue
            empty = next((row for row in rows.tolist() if not items[row].strip()), None)
            if empty is not None:
                raise ValueError(
                    f"{pairs.name}, {name}: the {what} {ids[empty]!r} must be a text; got an empty one"
                )
    if len(pairs.documents) < 2:
        raise ValueError(f"{pairs.name}: a search wants at least 2 documents; got {len(pairs.documents)}")
