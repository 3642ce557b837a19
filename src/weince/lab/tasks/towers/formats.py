"""Read pairs: a BEIR folder, a table of pairs, a dataset folder, or images with captions. Nothing is unpickled.

Tables are read as text: no library may take the query ``null`` or ``NA`` for a missing value.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weince.lab.tasks.images.pictures import read_pictures, resize
from weince.lab.tasks.towers.data import PairSet, Relevance, check_set, relevance, with_heldout

EMBEDDED = "docstrings"
"""The set that comes with the package: this project's docstrings and the code under them."""

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
NAMES = {"train": "train", "valid": "valid", "validation": "valid", "dev": "valid", "test": "test"}
"""Names of splits in files, and here."""

Row = Mapping[str, Any]


def load(source: str, *, heldout: float = 0.1, size: int = 64, negatives: Path | None = None) -> PairSet:
    """Read a set of pairs; what it lacks of ``valid`` and ``test`` is taken from ``train`` by groups.

    Args:
        source: ``docstrings``; a BEIR folder; a table of pairs; a dataset folder; images with captions.
        heldout: Share of the pairs that is taken for each split that is missing.
        size: Height and width of images.
        negatives: A table with the columns ``query``, ``positive``, ``negative_1``, ..., as ``weince mine`` writes.

    Raises:
        OSError: A file is missing or cannot be read.
        ValueError: The content of a file is not valid.
    """
    path = Path(__file__).with_name("docstrings.jsonl") if source == EMBEDDED else Path(source)
    with unchanged(path):
        pairs = _read(path, size)
    if "train" not in pairs.splits:
        raise ValueError(f"{path} has no split train; got {', '.join(pairs.splits)}")
    check_set(pairs)
    if negatives is not None:
        with unchanged(negatives):
            pairs = with_negatives(pairs, table_rows(negatives), str(negatives))
    return with_heldout(pairs, heldout)


def _read(path: Path, size: int) -> PairSet:
    if path.suffix == ".npz":
        return read_captioned_array(path, size)
    if path.is_file() and path.suffix in TABLES:
        return from_rows(path.stem, table_rows(path))
    if (path / "corpus.jsonl").is_file():
        return read_beir(path)
    captions = next((path / f"captions{end}" for end in TABLES if (path / f"captions{end}").is_file()), None)
    if captions is not None:
        return read_captioned_folder(captions, size)
    if path.is_dir():
        return from_rows(path.name, dataset_rows(path))
    if path.exists():
        raise ValueError(
            f"{path}: pairs are read from {', '.join(TABLES)}, .npz or a folder; got {path.suffix}"
        )
    raise FileNotFoundError(
        f"no such data: {path}; want a BEIR folder, a table with the columns query and positive "
        f"({', '.join(TABLES)}), a dataset folder, an .npz of images and captions, or {EMBEDDED!r}"
    )


@contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """Raise a ValueError if a file, or one directly in a folder, changes while the block reads it."""

    def state() -> list[tuple[str, int, int]]:
        files = sorted([path, *path.glob("*"), *path.glob("qrels/*")]) if path.is_dir() else [path]
        known = [(str(file), file.stat()) for file in files if file.is_file()]
        return [(name, found.st_size, found.st_mtime_ns) for name, found in known]

    before = state()
    yield
    if state() != before:
        raise ValueError(f"{path} changed while it was read: wait until nobody writes it, and start again")


# Tables


def table_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a table with where each stands, such as ``pairs.csv, line 3``."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    if path.suffix == ".parquet":
        from pyarrow import parquet

        for number, row in enumerate(parquet.read_table(path).to_pylist(), 1):
            yield f"{path.name}, row {number}", row
    elif path.suffix == ".jsonl":
        for number, line in enumerate(_lines(path), 1):
            if line.strip():
                yield (where := f"{path.name}, line {number}"), _object(line, where)
    else:
        tabs = path.suffix == ".tsv"  # it has no quotes: they are part of the text
        reader = (
            csv.DictReader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
            if tabs
            else csv.DictReader(_lines(path))
        )
        for row in reader:
            where = f"{path.name}, line {reader.line_num}"
            if None in row or None in row.values():
                raise ValueError(
                    f"{where}: want {len(reader.fieldnames or ())} cells, as in line 1; got another number"
                )
            yield where, row


def _lines(path: Path) -> Iterator[str]:
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8-sig", newline="" if path.suffix == ".csv" else None) as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 ({error.reason}): convert it first, for example with iconv"
            ) from None


def _object(line: str, where: str) -> Row:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be names with values; got {str(content)[:60]}")
    return content


def dataset_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a folder of the ``datasets`` library, or of a folder of tables that are named by their split."""
    from datasets import Dataset, load_dataset, load_from_disk

    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        content = load_from_disk(str(path)) if saved else load_dataset(str(path))
    except Exception as error:  # its types vary
        raise ValueError(
            f"{path} holds no pairs that datasets can read: {' '.join(str(error).split())[:200]}"
        ) from error
    for split, part in ({"train": content} if isinstance(content, Dataset) else content).items():
        for number, row in enumerate(part, 1):
            yield f"{path.name}, {split}, row {number}", {"split": split, **row}


def from_rows(name: str, rows: Iterator[tuple[str, Row]]) -> PairSet:
    """A set from rows with the columns ``query`` and ``positive``.

    Equal queries are one query, and equal texts one document. Optional columns: ``negative``, ``negative_1``, ...;
    ``query_id`` and ``positive_id``; ``group``, ``weight`` and ``split``. A text may also be a list of texts.
    """
    queries, documents = Texts("query"), Texts("document")
    parts: dict[str, list[tuple[int, int, float, list[int]]]] = {}
    groups: dict[int, str] = {}
    columns: set[str] = set()
    for where, row in rows:
        columns |= row.keys()
        for need in ("query", "positive"):
            if need not in row:
                raise ValueError(f"{where}: want a column {need}; got {', '.join(map(str, row))}")
        split = _split(str(row.get("split") or "train"), where)
        weight = _number(row.get("weight"), where)
        query = queries.add(row["query"], row.get("query_id"), where)
        negatives = [
            documents.add(text, None, where)
            for column in row
            if str(column).partition("_")[0] == "negative"
            for text in _several(row[column], where)
        ]
        for text in _several(row["positive"], where) or [""]:
            document = documents.add(text, row.get("positive_id"), where)
            parts.setdefault(split, []).append((query, document, weight, negatives))
            if row.get("group") is not None:
                groups[document] = str(row["group"])
    splits = {split: _relevance(lines, weighted="weight" in columns) for split, lines in parts.items()}
    if not splits:
        raise ValueError(f"{name} holds no pairs")
    return PairSet(
        name, queries.texts, documents.texts, queries.ids, documents.ids, splits,
        groups=_group_numbers([groups.get(row) for row in range(len(documents.texts))]),
    )  # fmt: skip


class Texts:
    """Different texts in the order in which they came, with an id for each."""

    def __init__(self, what: str) -> None:
        self.what, self.texts, self.ids = what, [], []  # type: ignore[var-annotated]
        self._row: dict[str, int] = {}
        self._text: dict[str, str] = {}

    def add(self, text: Any, name: Any, where: str) -> int:
        """The row of a text; a new one if it is new."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: the {self.what} is empty or no text; got {text!r}")
        row = self._row.setdefault(text, len(self.texts))
        if row == len(self.texts):
            self.texts.append(text)
            self.ids.append(str(row) if name is None else str(name))
        if name is not None and self._text.setdefault(str(name), text) != text:
            raise ValueError(
                f"{where}: the {self.what} id {name!r} stands for two texts: give each an id of its own"
            )
        return row


def _relevance(lines: Sequence[tuple[int, int, float, list[int]]], *, weighted: bool) -> Relevance:
    """The pairs of a split; of a repeated pair the first line counts, with the negatives of all."""
    content: dict[tuple[int, int], tuple[float, dict[int, None]]] = {}
    for query, document, weight, negatives in sorted(lines, key=lambda line: line[:2]):
        content.setdefault((query, document), (weight, {}))[1].update(dict.fromkeys(negatives))
    most = max(len(negatives) for _, negatives in content.values())
    table = np.full((len(content), most), -1, np.int64)
    for place, (_, wrong) in enumerate(content.values()):
        table[place, : len(wrong)] = list(wrong)
    query, document = np.array(list(content), np.int64).T
    weights = np.array([weight for weight, _ in content.values()], np.float32) if weighted else None
    return Relevance(query, document, np.ones(len(content)), weights, table if most else None)


def with_negatives(pairs: PairSet, rows: Iterator[tuple[str, Row]], name: str) -> PairSet:
    """The set with hard negatives for its training pairs, found by their texts."""
    from dataclasses import replace

    if isinstance(pairs.documents, np.ndarray) or isinstance(pairs.queries, np.ndarray):
        raise ValueError(f"{name}: hard negatives are for texts; got {pairs.name} with images")
    mined = from_rows(name, rows)
    row_of = {text: row for row, text in enumerate(pairs.documents)}
    missing = next((text for text in mined.documents if text not in row_of), None)
    if missing is not None:
        raise ValueError(
            f"{name} was mined from another set: {missing[:60]!r} is no document of {pairs.name}"
        )
    rows_of = np.array([row_of[text] for text in mined.documents], np.int64)
    part, train = mined.splits["train"], pairs.splits["train"]
    if part.negatives is None:
        raise ValueError(f"{name} must have a column negative or negative_1; got pairs alone")
    known = {
        (mined.queries[query], mined.documents[document]): np.where(wrong < 0, -1, rows_of[wrong])
        for query, document, wrong in zip(part.query, part.document, part.negatives, strict=True)
    }
    nothing = np.full(part.negatives.shape[1], -1)
    table = [
        known.get((pairs.queries[query], pairs.documents[document]), nothing)
        for query, document in zip(train.query, train.document, strict=True)
    ]
    return replace(pairs, splits={**pairs.splits, "train": replace(train, negatives=np.stack(table))})


def _several(value: Any, where: str) -> list[str]:
    """The texts of a cell: one, a list, or none."""
    if value is None or value == "":
        return []
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: want a text or a list of texts; got {str(value)[:60]!r}")
    return texts


def _number(value: Any, where: str) -> float:
    try:
        weight = 1.0 if value in (None, "") else float(value)
    except (TypeError, ValueError):
        weight = -1.0
    if not 0 <= weight < float("inf"):
        raise ValueError(f"{where}: a weight must be a number of at least 0; got {value!r}")
    return weight


def _split(name: str, where: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{where}: a split is one of {', '.join(NAMES)}; got {name!r}")
    return NAMES[name]


def _group_numbers(names: Sequence[str | None]) -> Any:
    """Numbers for names of groups; a document without a name is a group of its own. None if none has a name."""
    if not any(names):
        return None
    number: dict[Any, int] = {}
    keys = [("alone", row) if name is None else name for row, name in enumerate(names)]
    return np.array([number.setdefault(key, len(number)) for key in keys], np.int64)


# BEIR


def read_beir(folder: Path) -> PairSet:
    """A BEIR folder: ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/*.tsv``; a document is its title and text.

    ``metadata.group`` names a document's group, ``metadata.split`` the split whose corpus it belongs to.
    """
    documents, names = _entries(folder / "corpus.jsonl")
    queries, query_names = _entries(folder / "queries.jsonl")
    row_of = {name: row for row, name in enumerate(names)}
    query_row = {name: row for row, name in enumerate(query_names)}
    splits = {
        NAMES[path.stem]: read_qrels(path, query_row, row_of)
        for path in sorted((folder / "qrels").glob("*.tsv"))
        if path.stem in NAMES
    }
    if not splits:
        raise FileNotFoundError(f"{folder} has no qrels/train.tsv: put the pairs of each split there")
    about = [entry.get("metadata") or {} for entry in documents]
    corpus = {
        split: np.array(
            [row for row, more in enumerate(about) if NAMES.get(str(more.get("split"))) == split], np.int64
        )
        for split in splits
    }
    return PairSet(
        folder.name, [_text(entry) for entry in queries], [_text(entry) for entry in documents],
        query_names, names, splits, corpus, _group_numbers([more.get("group") for more in about]),
    )  # fmt: skip


def _entries(path: Path) -> tuple[list[Row], list[str]]:
    entries, names = [], []
    for where, row in table_rows(path):
        if not {"_id", "text"} <= row.keys():
            raise ValueError(f"{where}: want _id and text; got {', '.join(row)}")
        entries.append(row)
        names.append(str(row["_id"]))
    return entries, names


def _text(entry: Row) -> str:
    return f"{entry.get('title') or ''} {entry['text']}".strip()


def read_qrels(path: Path, queries: Mapping[str, int], documents: Mapping[str, int]) -> Relevance:
    """The pairs of a split, ``query-id, corpus-id, score``; those of score 0 are left out."""
    first, second, grades = [], [], []
    for where, row in table_rows(path):
        if not {"query-id", "corpus-id", "score"} <= row.keys():
            raise ValueError(f"{where}: want the columns query-id, corpus-id and score; got {', '.join(row)}")
        for what, name, known in (
            ("query", row["query-id"], queries),
            ("document", row["corpus-id"], documents),
        ):
            if name not in known:
                raise ValueError(
                    f"{where}: the {what} {name!r} is not among the {len(known):,} of the set: "
                    "the qrels belong to another set, or a file is incomplete"
                )
        if (grade := _number(row["score"], where)) > 0:
            first.append(queries[row["query-id"]])
            second.append(documents[row["corpus-id"]])
            grades.append(grade)
    if not first:
        raise ValueError(f"{path} holds no pair with a score above 0")
    return relevance(first, second, grades)


# Images with captions


def read_captioned_array(path: Path, size: int) -> PairSet:
    """An .npz with ``images`` (uint8, ``(n, height, width)`` or ``(n, height, width, 3)``) and ``captions`` ``(n,)``.

    Optional, ``(n,)`` each: ``splits`` and ``groups``. Images with the same caption all answer it.
    """
    with np.load(path, allow_pickle=False) as content:
        for need in ("images", "captions"):
            if need not in content:
                raise ValueError(f"{path} must hold images and captions; got {', '.join(content)}")
        images, captions = content["images"], content["captions"]
        splits = content["splits"] if "splits" in content else np.full(len(images), "train")
        groups = content.get("groups")
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(
            f"{path}: images must be uint8 of shape (n, height, width) or (n, height, width, 3); "
            f"got {images.dtype} {images.shape}"
        )
    if not len(images) == len(captions) == len(splits):
        raise ValueError(
            f"{path}: want a caption and a split for each image; got {len(images)}, {len(captions)} and {len(splits)}"
        )
    if images.ndim == 3:  # grey stays one channel, which the encoder repeats: a third of the memory
        images = (
            images[..., None] if images.shape[1:] == (size, size) else np.repeat(images[..., None], 3, axis=3)
        )
    rows = [(str(caption), str(split)) for caption, split in zip(captions, splits, strict=True)]
    return _captioned(
        path.stem,
        images if images.shape[-1] == 1 else resize(images, size),
        rows,
        None if groups is None else [str(g) for g in groups],
        path.name,
    )


def read_captioned_folder(table: Path, size: int) -> PairSet:
    """A folder with images and ``captions.csv`` (or tsv, jsonl, parquet): a file name ``image``, and ``caption``."""
    files, rows, groups = [], [], []
    for where, row in table_rows(table):
        if not {"image", "caption"} <= row.keys():
            raise ValueError(f"{where}: want the columns image and caption; got {', '.join(map(str, row))}")
        files.append(table.parent / str(row["image"]))
        rows.append((str(row["caption"]), str(row.get("split") or "train")))
        groups.append(row.get("group"))
    different = list(dict.fromkeys(files))
    place = {file: number for number, file in enumerate(different)}
    images = read_pictures(different, size, "images")
    return _captioned(table.parent.name, images, rows, groups, table.name, [place[file] for file in files])


def _captioned(
    name: str,
    images: Any,
    rows: Sequence[tuple[str, str]],
    groups: Any,
    where: str,
    image_of: Sequence[int] = (),
) -> PairSet:
    captions = Texts("caption")
    parts: dict[str, list[tuple[int, int]]] = {}
    of_image: dict[int, Any] = {}
    for number, (caption, split) in enumerate(rows):
        at = f"{where}, image {number + 1}"
        image = image_of[number] if image_of else number
        parts.setdefault(_split(split, at), []).append((captions.add(caption, None, at), image))
        of_image[image] = groups[number] if groups else None
    splits = {split: relevance(*zip(*pairs, strict=True)) for split, pairs in parts.items()}
    ids = [str(row) for row in range(len(images))]
    numbers = _group_numbers([of_image.get(row) for row in range(len(images))])
    return PairSet(name, captions.texts, images, captions.ids, ids, splits, groups=numbers)
