"""Pairs of queries and documents: from texts that a model embeds, or from embeddings and a table of pairs."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weince.diagnose.reading import (
    EmbeddedPairs,
    InputError,
    make_pairs,
    one_line,
    read_arrays,
    rename,
)
from weince.files import check_file
from weince.machine import prepare_cpu_for

PART = 512
"""Texts to embed between two signs of progress."""

HEADERS = (("query", "positive"), ("query-id", "corpus-id"))
"""Names of the two columns: of a table of pairs, or of qrels as BEIR writes them."""


class PairTable(NamedTuple):
    """The lines of a table of pairs, and its groups if it has any: pairs of a group are alike."""

    queries: list[str]
    positives: list[str]
    groups: list[str] | None


def read_pair_table(path: Path) -> PairTable:
    """Read a .csv, .tsv or .jsonl file with the columns query and positive, and group if there is one.

    Of qrels (query-id, corpus-id, score) the lines with a score of 0 or less are left out.
    """
    check_file(path)
    try:
        rows = _read_rows(path)
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path.name}: cannot be read ({one_line(error)})") from error
    keys = list(rows[0][1]) if rows else []
    header = next((header for header in HEADERS if set(header) <= set(keys)), None)
    if header is None:
        raise InputError(
            f"{path.name}: want the columns {' and '.join(HEADERS[0])}; got {', '.join(map(str, keys)) or 'no line'}"
        )
    relevant = [(line, row) for line, row in rows if _score(row) > 0.0]
    columns: list[list[str]] = []
    for key in header:
        values = [_text(row.get(key)) for _, row in relevant]
        empty = [line for (line, _), value in zip(relevant, values, strict=True) if not value.strip()]
        if empty:
            raise InputError(
                f"{path.name}: {len(empty)} lines have nothing in the column {key}, first line {empty[0]}"
            )
        columns.append(values)
    if not relevant:
        raise InputError(f"{path.name}: no line has a score above 0, so no query has a positive")
    groups = [_text(row.get("group")) for _, row in relevant] if "group" in keys else None
    return PairTable(columns[0], columns[1], groups)


def _read_rows(path: Path) -> list[tuple[int, Mapping[str, Any]]]:
    """The rows of a table with the number of the line each ends in."""
    suffix = path.suffix.lower()
    with path.open(encoding="utf-8-sig", newline="") as file:
        if suffix == ".jsonl":
            rows = [(number, json.loads(line)) for number, line in enumerate(file, 1) if line.strip()]
            wrong = next((number for number, row in rows if not isinstance(row, dict)), None)
            if wrong is not None:
                raise ValueError(f"line {wrong} is no object with the keys query and positive")
            return rows
        if suffix not in (".csv", ".tsv"):
            raise ValueError(f"want a .csv, .tsv or .jsonl file; got {suffix or 'no ending'}")
        csv.field_size_limit(2**31 - 1)
        # A tab cannot stand in a text, so a .tsv file needs no quotes, and texts may begin with one.
        quoting: Literal[0, 3] = csv.QUOTE_NONE if suffix == ".tsv" else csv.QUOTE_MINIMAL
        delimiter = "\t" if suffix == ".tsv" else ","
        table: csv.DictReader[str] = csv.DictReader(file, delimiter=delimiter, quoting=quoting, strict=True)
        return [(table.line_num, row) for row in table]


def _score(row: Mapping[str, Any]) -> float:
    try:
        return float(row.get("score", 1.0))
    except (TypeError, ValueError):
        return 1.0


def _text(value: object) -> str:
    return "" if value is None else str(value)


def connected(*columns: Sequence[object] | NDArray[Any]) -> NDArray[np.int64]:
    """Ids (pairs,) that are equal for pairs with an equal value in some column, directly or through other pairs."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    known: dict[object, int] = {}  # not an array of strings, in which each takes the space of the longest
    pairs = len(columns[0])
    places = [[pairs + known.setdefault(value, len(known)) for value in column] for column in columns]
    rows, ends = np.tile(np.arange(pairs), len(columns)), np.concatenate([np.array(x) for x in places])
    size = pairs + len(known)
    edges = coo_array((np.ones(len(rows)), (rows, ends)), shape=(size, size))
    return np.asarray(connected_components(edges, directed=False)[1][:pairs], dtype=np.int64)


def embed_pairs(
    models: Sequence[str], path: Path, *, names: Sequence[str] | None = None
) -> list[EmbeddedPairs]:
    """Embed a table of pairs with sentence-transformers models: folders, or names on the hub."""
    table = read_pair_table(path)
    for model in models:
        if Path(model).exists() and not (Path(model) / "modules.json").is_file():
            raise InputError(f"{model}: want a sentence-transformers model; got a path without modules.json")
        if not Path(model).exists() and ("\\" in model or model.count("/") > 1 or model.startswith(".")):
            raise InputError(f"{model}: no such folder; want one of a sentence-transformers model")
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise InputError("embedding texts needs sentence-transformers: pip install 'weince[text]'") from error
    embedded = []
    for name in models:
        try:
            encoder = SentenceTransformer(name)
        except Exception as error:  # a broken folder raises different errors in different versions
            raise InputError(f"{name}: the model cannot be loaded ({one_line(error)})") from error
        prepare_cpu_for(encoder)
        short = Path(name).name
        z_i = _embed(encoder.encode_query, table.queries, f"queries with {short}")
        z_j = _embed(encoder.encode_document, table.positives, f"documents with {short}")
        ids = connected(table.queries, table.positives)
        pairs = make_pairs(short, z_i, z_j, ids, towers=True)
        embedded.append(replace(pairs, texts=(table.queries, table.positives), groups=_numbers(table.groups)))
    return rename(embedded, names)


def _embed(encode: Any, texts: Sequence[str], what: str) -> NDArray[Any]:
    """Embeddings (texts, dim); equal texts are embedded once, in parts, so that a log gets lines of progress."""
    from weince.progress import passing_bar

    known: dict[str, int] = {}
    places = [known.setdefault(text, len(known)) for text in texts]
    distinct, parts = list(known), []
    with passing_bar(f"embedding {what}", len(distinct)) as advance:
        for start in range(0, len(distinct), PART):
            part = distinct[start : start + PART]
            parts.append(encode(part, show_progress_bar=False, convert_to_numpy=True))
            advance(len(part))
    return np.concatenate(parts)[places]


def _numbers(values: Sequence[str] | None) -> NDArray[np.int64] | None:
    return None if values is None else np.unique(values, return_inverse=True)[1].astype(np.int64)


def load_towers(queries: Path, documents: Path, pairs: Path | None = None) -> EmbeddedPairs:
    """Embeddings of queries and documents: row k with row k, or as a table of pairs says.

    The table names rows by their number from 0, or by the ``ids`` in the file of the embeddings.
    """
    (q, q_names), (d, d_names) = _named_rows(queries), _named_rows(documents)
    if q.ndim == d.ndim == 2 and q.shape[1] != d.shape[1]:
        raise InputError(f"queries and documents must have one width; got {q.shape[1]} and {d.shape[1]}")
    name = queries.stem
    if pairs is None:
        if len(q) != len(d):
            raise InputError(
                f"{name}: without a table of pairs, row k of the documents belongs to row k of the queries; "
                f"got {len(q)} queries and {len(d)} documents"
            )
        return make_pairs(name, q, d, towers=True)
    table = read_pair_table(pairs)
    rows = _find(table.queries, q_names, queries, pairs)
    columns = _find(table.positives, d_names, documents, pairs)
    without = len(q) - len(set(rows))
    notes = (
        (f"Queries without a positive in {pairs.name}: {without}. They were left out.",) if without else ()
    )
    made = make_pairs(
        name, q[rows], d[columns], connected(rows, [-1 - c for c in columns]), notes, towers=True
    )
    return replace(made, texts=(table.queries, table.positives), groups=_numbers(table.groups))


def _named_rows(path: Path) -> tuple[NDArray[Any], dict[str, int]]:
    """The embeddings of a file, and the row of each id; without ids, rows are named by their number."""
    arrays = read_arrays(path)
    ids = arrays.pop("ids", None)
    if len(arrays) != 1:
        raise InputError(f"{path.name}: want one array of embeddings, and ids if you like; got {len(arrays)}")
    (z,) = arrays.values()
    if ids is None:
        return z, {str(row): row for row in range(len(z))}
    names = {str(value): row for row, value in enumerate(ids.tolist())}
    if ids.shape != (len(z),) or len(names) < len(z):
        raise InputError(
            f"{path.name}: want ids of shape ({len(z)},), each once; got {len(names)} different in {ids.shape}"
        )
    return z, names


def _find(values: Sequence[str], names: Mapping[str, int], path: Path, table: Path) -> list[int]:
    """The rows that a table names."""
    missing = next((value for value in values if value not in names), None)
    if missing is not None:
        raise InputError(f"{table.name}: names {missing!r}, which is no row of {path.name}")
    return [names[value] for value in values]
