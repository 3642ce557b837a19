"""Hard negatives: for each query, the nearest documents that do not answer it.

sentence-transformers' ``mine_hard_negatives`` does not serve here: it embeds with a SentenceTransformer alone and not
with the tower that is being trained, knows no groups, loses all embeddings if it is killed, and finds its cached ones
by the name of the base model, so that a fine-tuned encoder would get those of the encoder before.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weince.files import check_writable, write_text_aside
from weince.lab.tasks.towers.data import Numbers, PairSet, Relevance
from weince.lab.tasks.towers.encoders import Embedder, text_body
from weince.lab.tasks.towers.exact_search import NearestDocuments, embed, key_of, nearest
from weince.lab.tasks.towers.formats import load
from weince.machine import check_device, find_device


def mine(
    pairs: PairSet,
    part: Relevance,
    queries: Tensor,
    documents: Tensor,
    searched: Numbers,
    *,
    k: int,
    margin: float | None = None,
    relative: float | None = None,
    skip: int = 0,
    groups: bool = False,
) -> NearestDocuments:
    """The hardest negatives of each pair, as rows of documents, with their scores; -1 where there are fewer.

    Known answers of the query and documents with equal texts are left out, as are, with ``groups``, those of a group
    of an answer.

    Args:
        pairs: The set.
        part: The pairs to mine for.
        queries: ``(q, d)`` embeddings of the queries of these pairs, in ascending order of their rows.
        documents: ``(m, d)`` embeddings of the documents in ``searched``.
        searched: ``(m,)`` rows of documents.
        k: Negatives for each pair.
        margin: Negatives score at least this much below the positive.
        relative: Negatives score at most this share of the positive's score, such as 0.95.
        skip: Leave out this many of the nearest.
        groups: Whether to leave out groups.
    """
    asked, first = np.unique(part.query, return_inverse=True)
    answer_key = pairs.groups if groups and pairs.groups is not None else pairs.keys[1]
    query_key, keys = pairs.keys[0][asked], answer_key[searched]
    # Queries with equal texts share their answers, those of other splits too.
    every = [np.stack([pairs.keys[0][of.query], answer_key[of.document]]) for of in pairs.splits.values()]
    known_query, known_answer = np.unique(np.concatenate(every, 1), axis=1)
    by_key = np.argsort(keys, kind="stable")
    ordered = keys[by_key]

    def leave_out(start: int, stop: int) -> tuple[Numbers, Numbers]:
        rows, columns = [], []
        for row in range(start, stop):
            low, high = np.searchsorted(known_query, [query_key[row], query_key[row] + 1])
            for key in known_answer[low:high]:
                begin, end = np.searchsorted(ordered, [key, key + 1])
                rows += [row - start] * int(end - begin)
                columns += by_key[begin:end].tolist()
        return np.array(rows, np.int64), np.array(columns, np.int64)

    below = None
    if margin is not None or relative is not None:
        # By the lowest of its positives, so that the margin holds for each pair of the query.
        column = np.searchsorted(searched, part.document)
        score = (
            (F.normalize(queries[first.tolist()], dim=1) * F.normalize(documents[column.tolist()], dim=1))
            .sum(1)
            .cpu()
            .numpy()
        )
        lowest = np.full(len(asked), np.inf, np.float32)
        np.minimum.at(lowest, first, score)
        below = (
            lowest - (margin or 0.0)
            if relative is None
            else np.minimum(lowest - (margin or 0.0), lowest * relative)
        )
    best = nearest(queries, documents, k, leave_out=leave_out, below=below, skip=skip)
    rows = np.where(best.document < 0, -1, searched[best.document])
    return NearestDocuments(rows[first], best.score[first])


@dataclass(frozen=True)
class MineConfig:
    """What ``weince mine`` is asked for; see `mine` and `weince.lab.tasks.towers.config.TowersRun`."""

    data: str
    model: str
    query_model: str | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    k: int = 4
    margin: float | None = None
    relative: float | None = None
    skip: int = 0
    groups: bool = False
    corpus: str = "all"
    heldout: float = 0.1
    max_length: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_device(self.device)
        for name, value, least in (("k", self.k, 1), ("skip", self.skip, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}")
        if self.relative is not None and not 0 < self.relative <= 1:
            raise ValueError(f"relative must be a share above 0 and at most 1; got {self.relative}")
        if self.margin is not None and not 0 <= self.margin <= 2:
            raise ValueError(f"margin must lie in [0, 2]; got {self.margin}")


def mine_to(config: MineConfig, out: Path) -> Path:
    """Mine hard negatives for the training pairs of a set and write them as lines of JSON.

    Each line has ``query``, ``positive``, ``negative_1``, ... and ``scores``, of the positive first. Embeddings are
    kept beside ``out`` until it is written, so that the same command resumes after a kill.

    Raises:
        OSError: A file or a model is missing or cannot be read or written.
        ValueError: The data are not valid, or no negative was left.
    """
    pairs = load(config.data, heldout=config.heldout)
    if isinstance(pairs.documents, np.ndarray):
        raise ValueError(f"hard negatives are for texts; got {pairs.name} with images")
    check_writable(out.parent)
    part, searched = pairs.splits["train"], pairs.searched("train", config.corpus)
    device = find_device(config.device)
    parts = out.parent / f".{out.name}.parts"
    rows = {"query": np.unique(part.query), "document": searched}
    embedded = {}
    for side, items in (("query", pairs.queries), ("document", pairs.documents)):
        body = _body(config, pairs, side).eval().to(device)
        prompt = config.query_prompt if side == "query" else config.document_prompt
        key = key_of(body.state_dict(), prompt, str(config.max_length), pairs.fingerprint, side)
        what = "queries" if side == "query" else "documents"
        embedded[side] = embed(
            body, body.store(items, device, prompt), rows[side], what=what, cache=parts, key=key
        )
    if embedded["query"].shape[1] != embedded["document"].shape[1]:
        raise ValueError(
            f"both encoders must have one width; got {embedded['query'].shape[1]} for queries and "
            f"{embedded['document'].shape[1]} for documents"
        )
    mined = mine(
        pairs, part, embedded["query"], embedded["document"], searched, k=config.k, margin=config.margin,
        relative=config.relative, skip=config.skip, groups=config.groups,
    )  # fmt: skip
    if not (mined.document >= 0).any():
        raise ValueError(
            f"no negative was left for the {len(part):,} pairs of {pairs.name}: ask for a smaller margin"
        )
    write_text_aside(out, "".join(_lines(pairs, part, mined, embedded, rows)), "negatives")
    for shard in parts.glob("*.safetensors"):
        shard.unlink()
    if parts.is_dir():
        parts.rmdir()
    return out


def _body(config: MineConfig, pairs: PairSet, side: str) -> Embedder:
    train = pairs.splits["train"]
    texts = [str(pairs.queries[row]) for row in np.unique(train.query)]
    texts += [str(pairs.documents[row]) for row in np.unique(train.document)]
    torch.manual_seed(0)  # a bag has new weights
    return text_body(
        (config.query_model or config.model) if side == "query" else config.model,
        texts=texts,
        max_length=config.max_length,
        side=side,
    )


def _lines(
    pairs: PairSet,
    part: Relevance,
    mined: NearestDocuments,
    embedded: dict[str, Tensor],
    rows: dict[str, Numbers],
) -> list[str]:
    """A line of JSON for each pair that has a negative."""
    first = np.searchsorted(rows["query"], part.query).tolist()
    column = np.searchsorted(rows["document"], part.document).tolist()
    unit = {side: F.normalize(x, dim=1) for side, x in embedded.items()}
    own = (unit["query"][first] * unit["document"][column]).sum(1).tolist()
    lines = []
    for place, (query, document) in enumerate(zip(part.query, part.document, strict=True)):
        chosen = [
            (row, score)
            for row, score in zip(mined.document[place], mined.score[place], strict=True)
            if row >= 0
        ]
        if not chosen:
            continue
        content = {"query": pairs.queries[query], "positive": pairs.documents[document]}
        content |= {f"negative_{number}": pairs.documents[row] for number, (row, _) in enumerate(chosen, 1)}
        scores = [round(float(score), 6) for score in (own[place], *(score for _, score in chosen))]
        lines.append(json.dumps({**content, "scores": scores}, ensure_ascii=False) + "\n")
    return lines
