"""Read paired embeddings from files.

Nothing here unpickles: ``.npz`` and ``.npy`` are read with ``allow_pickle=False``, and ``.safetensors`` cannot hold
code. A file that cannot be used raises an `InputError` with a message of one line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from weince.files import check_file, check_unpacked

SUFFIXES = (".npz", ".npy", ".safetensors")
WANTED = "z_i and z_j of shape (pairs, dim), or z of shape (rows, dim) with labels of shape (rows,)"
_UNUSED = "The file's labels were not used: save them as ids if pairs with equal labels are not negatives."


class InputError(ValueError):
    """The user's input cannot be used; the message tells the user everything, so no traceback is needed."""


@dataclass(frozen=True, eq=False)
class EmbeddedPairs:
    """Paired embeddings of one model."""

    name: str  # name of the model on the page
    z_i: NDArray[Any]  # ``(pairs, dim)`` embeddings, with any norm above 0
    z_j: NDArray[Any]  # ``(pairs, dim)`` embeddings; each row is the positive of the same row of ``z_i``
    # ``(pairs,)`` integers, or None; pairs with equal ids never compete with each other
    ids: NDArray[np.int64] | None = None
    notes: tuple[str, ...] = ()  # sentences a reader of the result must see
    by_label: bool = False  # whether the pairs were drawn among rows with equal labels
    towers: bool = False  # whether the rows of ``z_i`` are queries and those of ``z_j`` documents
    texts: tuple[Sequence[str], Sequence[str]] | None = (
        None  # texts of the queries and of the documents, or None
    )
    groups: NDArray[np.int64] | None = (
        None  # ``(pairs,)`` integers, or None: the groups that the user's data names
    )

    @property
    def equal(self) -> bool:
        """Whether both views are the same array, as with an encoder that draws neither augmentation nor dropout."""
        return bool(np.array_equal(self.z_i, self.z_j))


def make_pairs(
    name: str,
    z_i: ArrayLike | torch.Tensor,
    z_j: ArrayLike | torch.Tensor,
    ids: ArrayLike | torch.Tensor | None = None,
    notes: tuple[str, ...] = (),
    *,
    towers: bool = False,
) -> EmbeddedPairs:
    """Check two arrays of embeddings and pair them row by row; see `EmbeddedPairs`."""
    one, other = ("queries", "documents") if towers else ("z_i", "z_j")
    first, second = _matrix(name, one, z_i), _matrix(name, other, z_j)
    if first.shape != second.shape:
        raise InputError(
            f"{name}: {one} and {other} must have one shape; got {first.shape} and {second.shape}"
        )
    if len(first) > 1 and _constant(first) and _constant(second):
        raise InputError(f"{name}: all embeddings point the same way, so every cosine is equal")
    if _whole(first) or _whole(second):
        notes += (
            "The embeddings are whole numbers, as after quantisation: their cosines take few values. "
            "Diagnose the embeddings as they were before, if you can.",
        )
    elif _sixteen_bits(first) or _sixteen_bits(second):
        notes += (
            "The embeddings have 16-bit precision or less: near the cap 1 - s then takes few values. "
            "Export them in 32 bits if you can.",
        )
    groups = None if ids is None else _labels(name, "ids", ids, len(first))
    if groups is not None and len(np.unique(groups)) < 2:
        raise InputError(f"{name}: all pairs have the same id, so nothing competes")
    return EmbeddedPairs(_printable(name), first, second, groups, notes, towers=towers)


def _printable(name: str) -> str:
    """A name without unprintable characters, some of which HTML, SVG and CSV files cannot hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name) or "unnamed"


def pair_by_label(name: str, z: ArrayLike, labels: ArrayLike, *, seed: int = 0) -> EmbeddedPairs:
    """Draw pairs of rows with equal labels, each row in at most one pair; equal labels never compete.

    Args:
        name: Name of the model.
        z: ``(rows, dim)`` embeddings.
        labels: ``(rows,)`` integers or strings.
        seed: Seed of the draw.
    """
    rows = _matrix(name, "z", z)
    groups = _labels(name, "labels", labels, len(rows))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(rows))
    order = order[np.argsort(groups[order], kind="stable")]
    members = np.split(order, np.cumsum(np.bincount(groups))[:-1])
    even = [m[: len(m) // 2 * 2].reshape(-1, 2) for m in members]
    pairs = np.concatenate(even)
    if not len(pairs):
        raise InputError(f"{name}: no label occurs twice, so there are no pairs")
    left = len(rows) - pairs.size
    note = f"Pairs were drawn among rows with equal labels (seed {seed}); equal labels never compete."
    if left:
        note += f" {left} rows were left without a pair."
    pairs = rng.permutation(pairs)
    made = make_pairs(name, rows[pairs[:, 0]], rows[pairs[:, 1]], groups[pairs[:, 0]], (note,))
    return replace(made, by_label=True)


def _matrix(name: str, key: str, value: ArrayLike | torch.Tensor) -> NDArray[Any]:
    """Check embeddings and return them as an array, otherwise unchanged."""
    z = _array(value)
    if not (np.issubdtype(z.dtype, np.floating) or np.issubdtype(z.dtype, np.integer)):
        raise InputError(f"{name}: {key} must hold real numbers; got {z.dtype}")
    if z.ndim != 2 or 0 in z.shape:
        raise InputError(f"{name}: {key} must have shape (pairs, dim); got {z.shape}")
    bad = np.concatenate([~np.isfinite(block).all(axis=1) for block in _blocks(z)])
    if bad.any():
        raise InputError(
            f"{name}: {key} has NaN or infinite values in {int(bad.sum())} of {len(z)} rows, "
            f"first in row {int(bad.argmax())}"
        )
    zero = np.concatenate([~block.any(axis=1) for block in _blocks(z)])
    if zero.any():
        raise InputError(
            f"{name}: {key} has {int(zero.sum())} rows of zeros, first row {int(zero.argmax())}; "
            "a cosine needs a direction"
        )
    return z


def _blocks(z: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Rows in blocks, so that checks do not copy a large array at once."""
    return (z[start : start + 65536] for start in range(0, len(z), 65536))


def _constant(z: NDArray[Any]) -> bool:
    from weince.evt.arrays import unit_rows  # here, since weince.evt imports scipy

    first = unit_rows(z[:1])
    return all(bool(np.all(np.abs(unit_rows(block) - first) < 1e-6)) for block in _blocks(z))


def _whole(z: NDArray[Any]) -> bool:
    """Whether all values of the first rows are integers, of at most 16 bits: huge numbers have no fraction either."""
    some = z[:4096]
    return bool((some == np.round(some)).all() and np.abs(some).max() < 2**16)


def _sixteen_bits(z: NDArray[Any]) -> bool:
    """Whether bfloat16 or float16 can represent all values of the first rows exactly."""
    with np.errstate(over="ignore", under="ignore"):
        some = np.ascontiguousarray(z[:4096], dtype=np.float32)
        half = some.astype(np.float16).astype(np.float32)
    if not (some == z[:4096]).all():
        return False
    return bool((half == some).all() or not (some.view(np.uint32) & 0xFFFF).any())


def _labels(name: str, key: str, value: ArrayLike | torch.Tensor, n: int) -> NDArray[np.int64]:
    labels = _array(value)
    if labels.shape != (n,):
        raise InputError(f"{name}: {key} must have shape ({n},), one per row; got {labels.shape}")
    if labels.dtype.kind not in "iubUS":
        raise InputError(f"{name}: {key} must be integers or strings; got {labels.dtype}")
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file by key; the array of an ``.npy`` file has the empty key."""
    check_file(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        remedy = ": safetensors.torch.save_file writes tensors" if suffix in (".pt", ".pth") else ""
        raise InputError(
            f"{path.name}: want a file ending in {', '.join(SUFFIXES)}, or a folder of them; "
            f"got {suffix or 'no ending'}{remedy}"
        )
    check_unpacked(path)
    try:
        if suffix == ".safetensors":
            return _read_safetensors(path)
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded:
            return {key: loaded[key] for key in loaded.files}
    except ImportError:
        raise
    except MemoryError as error:
        raise InputError(
            f"{path.name}: is damaged, or does not fit into memory ({one_line(error)}): save fewer pairs"
        ) from error
    except Exception as error:  # the type depends on where the file is damaged
        if isinstance(error, OSError) and error.filename is not None:  # the system does not open it
            raise InputError(f"{path.name}: {error.strerror}") from error
        if "pickle" in str(error):
            pickled = "holds pickled objects, which can run code when loaded; save plain arrays"
            said = pickled if _may_be_pickled(path) else "not written by numpy, whatever its name says"
            raise InputError(f"{path.name}: {said}") from error
        raise InputError(
            f"{path.name}: cannot be read, it may be cut short or of another format ({one_line(error)})"
        ) from error


def _may_be_pickled(path: Path) -> bool:
    """Whether a file begins like one of numpy's or like a pickle; numpy takes any other content for a pickle."""
    with path.open("rb") as file:
        return file.read(6).startswith((b"\x93NUMPY", b"PK", b"\x80"))


def _read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return {key: _array(tensor) for key, tensor in tensors.items()}


def _array(value: ArrayLike | torch.Tensor) -> NDArray[Any]:
    """Convert to a numpy array; a tensor may be on any device."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64):
            value = value.float()  # numpy has neither bfloat16 nor float8
    return np.asarray(value)


def one_line(error: BaseException) -> str:
    """What an error says, in at most 120 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."


def _from_keys(name: str, arrays: Mapping[str, NDArray[Any]], seed: int) -> EmbeddedPairs:
    if "z_i" in arrays and "z_j" in arrays:
        unused = "labels" in arrays and "ids" not in arrays
        return make_pairs(name, arrays["z_i"], arrays["z_j"], arrays.get("ids"), (_UNUSED,) if unused else ())
    if "z" in arrays and "labels" in arrays:
        return pair_by_label(name, arrays["z"], arrays["labels"], seed=seed)
    raise InputError(f"{name}: want the keys {WANTED}; got {_few(arrays)}")


def _few(keys: Mapping[str, object]) -> str:
    """The first keys of a file, since the weights of a model have hundreds."""
    first, others = sorted(keys)[:5], len(keys) - 5
    return ", ".join(first) + (f" and {others} more" if others > 0 else "") or "none"


def _expand(paths: Sequence[Path]) -> list[Path]:
    """Replace folders by the files in them, in natural order: step_2 before step_10."""

    def natural(path: Path) -> list[str | int]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]

    out: list[Path] = []
    for path in paths:
        if not path.is_dir():
            out.append(path)
            continue
        # Skip hidden files: macOS writes ._NAME beside NAME.
        shown = (p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
        inside = sorted(shown, key=natural)
        if not inside:
            raise InputError(f"{path.name or path}: the folder holds no {', '.join(SUFFIXES)} file")
        out += inside
    return out


def load_pairs(
    paths: Sequence[Path], *, names: Sequence[str] | None = None, seed: int = 0
) -> list[EmbeddedPairs]:
    """Read every input: one model for each file, or for two consecutive ``.npy`` files of shape (pairs, dim).

    Args:
        paths: Files, or folders of files.
        names: Names of the models; the files' names without suffix when not given.
        seed: Seed of the pairing by label.
    """
    found: list[EmbeddedPairs] = []
    queue = _expand(paths)
    while queue:
        path = queue.pop(0)
        arrays = read_arrays(path)
        if "" not in arrays:
            found.append(_from_keys(path.stem, arrays, seed))
        elif arrays[""].ndim == 3 and len(arrays[""]) == 2:
            found.append(make_pairs(path.stem, *arrays[""]))
        elif arrays[""].ndim == 2 and queue and queue[0].suffix.lower() == ".npy":
            follower = queue.pop(0)
            second = read_arrays(follower)
            if "" not in second:
                raise InputError(
                    f"{follower.name}: want one array of shape (pairs, dim), as in {path.name} before it; "
                    f"got an .npz file with {', '.join(sorted(second)) or 'nothing'}"
                )
            found.append(make_pairs(path.stem, arrays[""], second[""]))
        else:
            shape = arrays[""].shape
            raise InputError(
                f"{path.name}: an .npy file must have shape (2, pairs, dim), or be followed by a second one, "
                f"both of shape (pairs, dim); got {shape}"
            )
    return rename(found, names)


def rename(found: list[EmbeddedPairs], names: Sequence[str] | None) -> list[EmbeddedPairs]:
    """Give the models their names; a number is appended to a name that occurs before."""
    if names is not None and len(names) != len(found):
        raise InputError(f"want a name for each model, {len(found)} in all; got {len(names)}")
    out: dict[str, EmbeddedPairs] = {}
    for index, pairs in enumerate(found):
        name = given = pairs.name if names is None else _printable(names[index])
        number = 1
        while name in out:
            number += 1
            name = f"{given} ({number})"
        out[name] = replace(pairs, name=name)
    return list(out.values())
