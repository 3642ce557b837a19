"""Which texts of a batch are equal, from their tokens: ids of pairs that are never negatives of each other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from weince.distributed import Ranks

Keys = NDArray[np.int64]

# Odd numbers of 64 bits, with a sign.
OF_TOKEN, OF_PLACE, LAST = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def text_keys(features: Mapping[str, Any]) -> Tensor | None:
    """A number ``(n,)`` for each text of a column, equal for equal tokens; None if the column is not of texts alone.

    Args:
        features: What a model of sentence-transformers gets for a column: tokens that are padded ``(n, length)``, or
            one after the other with the places where texts start (``offsets``, ``cu_seq_lens_q``).
    """
    tokens = features.get("input_ids")
    others = any(isinstance(value, Tensor) and value.is_floating_point() for value in features.values())
    if not isinstance(tokens, Tensor) or others or features.get("modality", "text") != "text":
        return None  # pixels and sounds come with the same tokens
    starts = features.get("offsets")
    if "cu_seq_lens_q" in features:
        starts = features["cu_seq_lens_q"][:-1]
    if starts is None:
        there = torch.ones_like(tokens) if (mask := features.get("attention_mask")) is None else mask.long()
        return (_mixed(tokens, there.cumsum(1)) * there).sum(1)
    tokens = tokens.flatten()
    place = torch.arange(len(tokens), device=tokens.device)
    text = torch.searchsorted(starts, place, right=True) - 1
    keys = torch.zeros(len(starts), dtype=torch.int64, device=tokens.device)
    return keys.index_add(0, text, _mixed(tokens, place - starts[text] + 1))


def _mixed(tokens: Tensor, places: Tensor) -> Tensor:
    """A number for each token at its place in the text, of which sums hardly ever coincide."""
    mixed = (tokens.long() + 1) * OF_TOKEN + places * OF_PLACE
    mixed = (mixed ^ (mixed >> 32)) * LAST
    return mixed ^ (mixed >> 29)


def pair_ids(columns: Sequence[Mapping[str, Any]], spread: bool, *, by_row: bool) -> Tensor | None:
    """Ids of the pairs of a batch and of further negatives; None if no two texts are equal.

    Pairs that share a text have equal ids, directly or through other pairs; so has a negative with such a text.

    Args:
        columns: Features of queries, documents and further negatives.
        spread: Whether the batch is spread over ranks: ids then mean the same on all of them.
        by_row: Order of the further negatives: row by row, or column by column.

    Returns:
        ``(n + m,)`` integers; ``(n,)`` if the further negatives are not texts.
    """
    keys = [text_keys(features) for features in columns]
    pair = [key for key in keys[:2] if key is not None]
    if not pair:
        return None
    negatives = [key for key in keys[2:] if key is not None]
    local, ends = pair[0], (pair[0], pair[-1])
    if spread:
        ends = _over_ranks(ends[0]), _over_ranks(ends[1])
    wanted = [local]
    if negatives and len(negatives) == len(keys) - 2:
        wanted.append(torch.stack(negatives, dim=1 if by_row else 0).flatten())
    queries, documents, of_rows = (part.cpu().numpy() for part in (*ends, torch.cat(wanted)))
    ids = _components(queries, documents, of_rows)
    if not spread and len(np.unique(ids)) == len(ids):
        return None
    return torch.from_numpy(ids).to(local.device)


def _components(queries: Keys, documents: Keys, wanted: Keys) -> Keys:
    """For each wanted text the smallest text that pairs link it to; itself, if it stands in no pair."""
    n = len(queries)
    texts, place = np.unique(np.concatenate([queries, documents]), return_inverse=True)
    linked = coo_matrix((np.ones(n), (place[:n], place[n:])), shape=(len(texts), len(texts)))
    _, group = connected_components(linked, directed=False)
    _, first = np.unique(group, return_index=True)
    at = np.searchsorted(texts, wanted).clip(max=len(texts) - 1)
    ids: Keys = np.where(texts[at] == wanted, texts[first[group[at]]], wanted)
    return ids


def _over_ranks(keys: Tensor) -> Tensor:
    """Keys of the texts of all ranks, which may have different numbers of rows."""
    each = Ranks(dist.get_rank(), (1,) * dist.get_world_size(), ())
    lengths = each.gather(torch.tensor([len(keys)], device=keys.device)).tolist()
    return replace(each, anchors=tuple(lengths)).gather(keys)
