"""Exact search: embed items, rank the answers of each query, find the nearest documents. In blocks, on the device."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weince.files import write_aside
from weince.lab.tasks.towers.data import Numbers
from weince.lab.tasks.towers.encoders import Store
from weince.progress import passing_bar

BATCH, SHARD = 256, 2048
BLOCK = 1 << 26
"""Most scores to hold at a time."""


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Allow TF32 in matrix products of float32 if ``precision`` is ``tf32``, else forbid it; restored afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def embed(
    encode: Callable[[Any], Tensor],
    store: Store,
    rows: Numbers,
    *,
    what: str,
    cache: Path | None = None,
    key: str = "",
) -> Tensor:
    """Embeddings ``(len(rows), d)`` in float32 of these rows of a store.

    Args:
        encode: The encoder, in evaluation mode.
        store: The items.
        rows: Rows of the items.
        what: What they are, for the progress bar and for errors.
        cache: Folder that keeps parts of them, from which a killed run, or the next one, resumes.
        key: Identifies encoder and items, as `key_of` returns it.

    Raises:
        ValueError: An embedding is NaN or infinite.
    """
    place = np.empty(len(store.order), np.int64)
    place[store.order] = np.arange(len(store.order))
    order = np.argsort(place[rows], kind="stable")
    parts = []
    with passing_bar(f"embedding {what}", len(rows)) as advance:
        for start in range(0, len(rows), SHARD):
            some = rows[order[start : start + SHARD]]
            parts.append(_shard(encode, store, some, cache, key))
            advance(len(some))
    out = torch.cat(parts)
    bad = (~out.isfinite().all(1)).nonzero().flatten()
    if len(bad):
        row = int(rows[order[int(bad[0])]])
        raise ValueError(
            f"embeddings must be finite; got NaN or inf in {len(bad)} of {len(rows)} {what}, first in row {row}"
        )
    back = torch.from_numpy(np.argsort(order, kind="stable")).to(out.device)
    return out[back]


def _shard(
    encode: Callable[[Any], Tensor], store: Store, rows: Numbers, cache: Path | None, key: str
) -> Tensor:
    from safetensors.torch import load_file, save_file

    path = None
    if cache is not None:
        name = hashlib.blake2b(f"{key}\0".encode() + rows.tobytes(), digest_size=16).hexdigest()
        path = cache / f"{name}.safetensors"
        if path.is_file():
            return load_file(path)["rows"]
    made = torch.cat([encode(store.take(rows[at : at + BATCH])).float() for at in range(0, len(rows), BATCH)])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = made.cpu().contiguous()
        write_aside(path, lambda part: save_file({"rows": kept}, part), "embeddings")
    return made


def key_of(weights: Mapping[str, Tensor], *content: str) -> str:
    """Identifies an encoder by its weights, and further content such as a prompt and the fingerprint of the items."""
    digest = hashlib.blake2b(digest_size=16)
    for name, x in sorted(weights.items()):
        digest.update(name.encode() + x.detach().cpu().float().contiguous().numpy().tobytes())
    digest.update("\0".join(content).encode())
    return digest.hexdigest()


class AnswerRanks(NamedTuple):
    """The place of each answer of each query among all documents, in ascending order for each query.

    Attributes:
        query: ``(p,)`` number of the query, ascending from 0 without gaps.
        rank: ``(p,)`` from 1.
        grade: ``(p,)`` how relevant the answer is.
    """

    query: Numbers
    rank: Numbers
    grade: NDArray[np.float64]


def rank_answers(
    queries: Tensor,
    documents: Tensor,
    query: Numbers,
    answer: Numbers,
    grade: NDArray[np.float64],
    order: Numbers,
) -> AnswerRanks:
    """Rank every answer of every query by exact cosines.

    Of documents with equal scores, the one with the larger ``order`` comes first, as in trec_eval, which orders them
    by name from last to first: so an encoder that maps all texts to one point gets no credit for ties.

    Args:
        queries: ``(q, d)`` embeddings.
        documents: ``(m, d)`` embeddings.
        query: ``(p,)`` number of the query of each pair, ascending.
        answer: ``(p,)`` number of the document of each pair.
        grade: ``(p,)`` how relevant it is.
        order: ``(m,)`` place of each document among their names.
    """
    rank = np.empty(len(query), np.int64)
    place = torch.from_numpy(order).to(documents.device)
    for start, stop, scores, first in _score_blocks(queries, documents, query):
        rows = torch.from_numpy(query[start:stop] - first).to(documents.device)
        columns = torch.from_numpy(answer[start:stop]).to(documents.device)
        own = scores[rows, columns][:, None]
        others = scores if len(scores) == len(rows) else scores[rows]
        before = (others > own) | ((others == own) & (place > place[columns][:, None]))
        rank[start:stop] = 1 + before.sum(1).cpu().numpy()
    by_rank = np.lexsort((rank, query))
    return AnswerRanks(query[by_rank], rank[by_rank], grade[by_rank])


def _score_blocks(
    queries: Tensor, documents: Tensor, query: Numbers
) -> Iterator[tuple[int, int, Tensor, int]]:
    """Blocks of pairs with the cosines of their queries and all documents, and the number of the first query."""
    unit, others = F.normalize(queries.float(), dim=1), F.normalize(documents.float(), dim=1)
    size = max(1, BLOCK // len(documents))
    with products_in("fp32"):
        start = 0
        while start < len(query):
            stop = min(start + size, len(query))
            first, last = int(query[start]), int(query[stop - 1])
            yield start, stop, unit[first : last + 1] @ others.T, first
            start = stop


class NearestDocuments(NamedTuple):
    """The nearest documents of each query: ``document`` and ``score`` are ``(q, k)``; -1 where there are fewer."""

    document: Numbers
    score: NDArray[np.float32]


def nearest(
    queries: Tensor,
    documents: Tensor,
    k: int,
    *,
    leave_out: Callable[[int, int], tuple[Numbers, Numbers]],
    below: NDArray[np.float32] | None = None,
    skip: int = 0,
) -> NearestDocuments:
    """The ``k`` nearest documents of each query by exact cosines.

    Args:
        queries: ``(q, d)`` embeddings.
        documents: ``(m, d)`` embeddings.
        k: How many.
        leave_out: Gets the first query of a block and the end, returns pairs (query from the first, document) that
            do not count.
        below: ``(q,)``: only documents with a smaller score count.
        skip: Leave out this many of the nearest.
    """
    unit, others = F.normalize(queries.float(), dim=1), F.normalize(documents.float(), dim=1)
    size, asked = max(1, BLOCK // len(documents)), min(k + skip, len(documents))
    chosen, score = np.full((len(queries), k), -1, np.int64), np.zeros((len(queries), k), np.float32)
    with products_in("fp32"):
        for start in range(0, len(queries), size):
            stop = min(start + size, len(queries))
            scores = unit[start:stop] @ others.T
            rows, columns = (torch.from_numpy(x).to(scores.device) for x in leave_out(start, stop))
            scores[rows, columns] = -torch.inf
            if below is not None:
                limit = torch.from_numpy(below[start:stop]).to(scores.device)[:, None]
                scores.masked_fill_(scores >= limit, -torch.inf)
            best = scores.topk(asked, dim=1)
            values, places = best.values[:, skip:].cpu().numpy(), best.indices[:, skip:].cpu().numpy()
            chosen[start:stop, : values.shape[1]] = np.where(np.isfinite(values), places, -1)
            score[start:stop, : values.shape[1]] = np.where(np.isfinite(values), values, 0)
    return NearestDocuments(chosen, score)
