"""Prepare what heads are trained on: check, standardise and rotate the features of two views of the same items."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from weince.diagnose.reading import EmbeddedPairs, InputError, load_pairs, make_pairs, read_arrays

NEARLY_ALL = 0.95
"""If a label has at least this share of the items, figures of labels say little."""


class Views(NamedTuple):
    """Features of two views of the same items, as input of the heads.

    Attributes:
        first: ``(items, axes)`` float32.
        second: ``(items, axes)`` float32, row by row the same items.
        labels: ``(items,)`` integers, or None.
        ids: ``(items,)`` integers, or None; items with equal ids never compete.
    """

    first: Tensor
    second: Tensor
    labels: Tensor | None
    ids: Tensor | None = None


class Prepared(NamedTuple):
    """Features that heads are trained on.

    Attributes:
        views: The features.
        kept: Share of the variance that their axes keep.
        key: Hash of the features, with ids.
        labels_key: Hash of the labels.
        remark: What the labels mean for R@1 and the vote, and why the views have none; empty if none were given.
    """

    views: Views
    kept: float
    key: str
    labels_key: str
    remark: str = ""


def read_features(path: Path, labels: Path | None = None) -> tuple[EmbeddedPairs, NDArray[np.int64] | None]:
    """Features from a file that ``weince diagnose`` reads, or from the folder of a run; and labels if there are any.

    Args:
        path: A file with ``z_i`` and ``z_j`` of shape (items, dim), and optional ``labels`` and ``ids``; or a run's
            folder.
        labels: An ``.npy`` file of shape (items,), or a file that holds ``labels``.
    """
    found: ArrayLike | None = None
    if (path / "run.yaml").is_file():
        from weince.lab.tasks.images.runs import two_views

        seen = two_views(path, of="features", part="train")
        pairs, found = make_pairs(path.name, seen.first, seen.second), seen.labels
    else:
        models = load_pairs([path])
        if len(models) != 1:
            raise InputError(f"{path}: heads are trained on the features of one model; got {len(models)}")
        (pairs,) = models
        arrays = read_arrays(path) if path.suffix.lower() != ".npy" and path.is_file() else {}
        found = arrays.get("labels") if "z_i" in arrays else pairs.ids
    if labels is not None:
        arrays = read_arrays(labels)
        if "" not in arrays and "labels" not in arrays:
            raise InputError(
                f"{labels.name}: want an array, or the key labels; got {', '.join(sorted(arrays))}"
            )
        found = arrays.get("", arrays.get("labels"))
    return pairs, None if found is None else _numbered(pairs, found)


def _numbered(pairs: EmbeddedPairs, labels: ArrayLike) -> NDArray[np.int64]:
    values = np.asarray(labels)
    if values.shape != (len(pairs.z_i),):
        raise InputError(f"{pairs.name}: want {len(pairs.z_i)} labels, one for each item; got {values.shape}")
    if values.dtype.kind not in "iubUS":
        raise InputError(f"{pairs.name}: labels must be integers or strings; got {values.dtype}")
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def prepare(pairs: EmbeddedPairs, labels: NDArray[np.int64] | None, *, batch: int, axes: int) -> Prepared:
    """Standardise every feature over both views and keep the principal axes.

    A rotation does not affect a head: its first layer is linear, and its initial weights prefer no direction. Leaving
    out the axes of least variance saves most of the time.

    Args:
        pairs: Features, (items, dim) twice.
        labels: (items,), or None.
        batch: Items in a batch. Four times as many are needed, since the held-out quarter must fill a batch too.
        axes: Largest number of axes to keep.
    """
    items = len(pairs.z_i)
    if items < 4 * batch:
        raise InputError(
            f"{pairs.name}: want at least {4 * batch:,} items for batches of {batch}, a quarter of them held out; "
            f"got {items:,}"
        )
    both = torch.from_numpy(np.concatenate([pairs.z_i, pairs.z_j]).astype(np.float64))
    largest = both.abs().amax(0)
    both = both / torch.where(largest > 0.0, largest, 1.0)  # so that squares neither overflow nor vanish
    spread = both.std(0)
    varies = spread > 1e-6 * both.abs().amax(0)
    if not bool(varies.any()):
        raise InputError(
            f"{pairs.name}: all {items:,} items have the same features, so that no head can tell them apart"
        )
    if torch.equal(both[:items], both[items:]):
        raise InputError(
            f"{pairs.name}: want features of two views of every item; got two views that are the same"
        )
    both = (both[:, varies] - both[:, varies].mean(0)) / spread[varies]
    variance, directions = torch.linalg.eigh(both.T @ both)
    kept = min(axes, both.shape[1])
    rotated = (both @ directions[:, -kept:].flip(1)).float()
    keys = _key(pairs.z_i, pairs.z_j, pairs.ids), _key(labels)
    most = 0 if labels is None else int(np.unique(labels, return_counts=True)[1].max())
    remark = "" if labels is None else _remark(items, most)
    known = torch.from_numpy(labels) if labels is not None and 1 < most < items else None
    ids = None if pairs.ids is None else torch.from_numpy(pairs.ids)
    share = float(variance[-kept:].sum() / variance.sum())
    return Prepared(Views(rotated[:items], rotated[items:], known, ids), share, *keys, remark)


def _remark(items: int, most: int) -> str:
    """What labels mean for R@1 and the vote, in words; ``most`` items have the most frequent label."""
    if most == items:
        return f"All {items:,} items have one label, with which every neighbour is right: no R@1 and no vote."
    if most == 1:
        return f"No label of the {items:,} items occurs twice, so no neighbour is right: no R@1 and no vote."
    guess = f"Always guessing the most frequent label is right for {100 * most / items:.1f} % of the items."
    return guess + " R@1 and vote can hardly be higher, so they say little." * (most >= NEARLY_ALL * items)


def _key(*arrays: NDArray[Any] | None) -> str:
    """A hash of the arrays that are given."""
    given = [np.ascontiguousarray(array).tobytes() for array in arrays if array is not None]
    return hashlib.sha256(b"".join(given)).hexdigest()[:12]
