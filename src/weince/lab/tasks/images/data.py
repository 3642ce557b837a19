"""Images for training and evaluation, as uint8 arrays: by name, from an ``.npz``, or from a folder.

>>> data = load("digits")
>>> data.train_images.shape, data.test_images.shape, data.train_images.dtype
((1442, 32, 32, 3), (355, 32, 32, 3), dtype('uint8'))
"""

import difflib
import importlib.util
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weince.files import check_file, check_unpacked
from weince.lab.tasks.images.formats import Array
from weince.lab.tasks.images.pictures import FILES, Images, picture_size, read_pictures, resize
from weince.lab.tasks.images.sources import SOURCES, SPLITS, open_named

Labels = NDArray[np.int64]
NAMES = ("digits", *SOURCES)
TEST_SHARE = 0.2
"""Share of each class to hold out if the data have no split."""


class ImageData(NamedTuple):
    """A data set. Images are ``(n, size, size, 3)`` uint8 (memory-mapped if named), labels ``(n,)`` from 0.

    Training needs no labels. Without labels, both label arrays are None and there are no class names.
    """

    name: str
    train_images: Images
    train_labels: Labels | None
    test_images: Images
    test_labels: Labels | None
    class_names: tuple[str, ...]
    pretrain_images: Images  # for training without labels: train_images, or STL-10's unlabeled split


def load(name_or_path: str, *, cache: Path | None = None, size: int | None = None) -> ImageData:
    """Load a data set.

    Args:
        name_or_path: ``digits``, ``cifar10``, ``cifar100``, ``stl10``, ``imagenet32``, ``tiny-imagenet``; or the path
            of an official archive or of its unpacked folder; or of an ``.npz`` with ``train_images``,
            ``train_labels``, ``test_images``, ``test_labels`` (and ``class_names``), or with images only; or of a
            folder with ``train/CLASS/*.png`` and ``test/CLASS/*.png``, or with ``CLASS/*.png``, or with unlabelled
            images. Without a test set, a fifth of the images (of each class) is held out.
        cache: Folder of the archives; by default the environment variable ``WEINCE_DATA``, else the user's cache.
        size: Height and width to resize the images to; by default their own, in a folder the most common.
    """
    path = Path(name_or_path)
    if path.exists():
        check_file(path)
    if name_or_path == "digits":
        return load_digits(size or 32)
    if name_or_path in SOURCES:
        return load_named(name_or_path, cache or cache_folder(), size)
    for name, source in SOURCES.items():
        for archive in source.archives:
            if path.name in (archive.file, archive.folder) and path.exists():
                return load_named(name, path.parent, size)
    if path.is_dir():
        return load_folder(path, size)
    if path.is_file() and path.suffix == ".npz":
        return load_npz(path, size)
    if path.exists():
        raise ValueError(f"{path} is neither an .npz, nor a folder, nor an official archive")
    near = difflib.get_close_matches(name_or_path, NAMES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f"no data {name_or_path!r}{hint}: give one of {', '.join(NAMES)}, or a path that exists")


def cache_folder() -> Path:
    """Folder of the archives: ``WEINCE_DATA``, else this user's cache folder."""
    if os.environ.get("WEINCE_DATA"):
        return Path(os.environ["WEINCE_DATA"])
    import pooch

    return Path(pooch.os_cache("weince"))


def load_digits(size: int) -> ImageData:
    """The 1,797 digits of 8 x 8 pixels that come with scikit-learn, enlarged."""
    pixels, labels = read_digits()
    grey = np.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    images = resize(np.repeat(grey[..., None], 3, axis=3), size)
    return _split("digits", images, labels.astype(np.int64), [str(i) for i in range(10)])


def read_digits() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Pixels ``(1797, 64)`` from 0 to 16, and labels.

    Read from scikit-learn's data file if possible, since importing scikit-learn takes a second.
    """
    spec = importlib.util.find_spec("sklearn")
    file = Path(spec.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if spec else Path()
    if file.is_file():
        rows = np.loadtxt(file, delimiter=",")
        return rows[:, :-1], rows[:, -1]
    from sklearn import datasets

    digits = datasets.load_digits()
    return digits.data, digits.target


def load_named(name: str, cache: Path, size: int | None) -> ImageData:
    """A data set with official archives, which are downloaded to ``cache`` if they are missing."""
    arrays, class_names = open_named(name, cache, lambda arrays, names: _checked(name, arrays, names, None))
    return _checked(name, arrays, class_names, size)


def load_npz(path: Path, size: int | None) -> ImageData:
    """Load arrays with the names of :data:`SPLITS` and optional ``class_names``; or images only."""
    check_unpacked(path)
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError(f"it is an .npy file of one array of shape {archive.shape}")
        with archive:
            labelled = any(key.endswith("labels") for key in archive)
            images = [
                key for key in SPLITS if key == "train_images" or (key == "test_images" and key in archive)
            ]
            wanted = SPLITS if labelled else images
            missing = [key for key in wanted if key not in archive]
            if missing:
                raise ValueError(f"no array {missing[0]!r} (it has {', '.join(archive.files) or 'none'})")
            arrays = {key: archive[key] for key in wanted}
            odd = [key for key, array in arrays.items() if not isinstance(array, np.ndarray)]
            if odd:  # numpy gives the bytes of a member that is no .npy
                raise ValueError(f"{odd[0]} is no array of numpy's")
            names = None
            if "class_names" in archive:
                names = [str(name) for name in np.atleast_1d(archive["class_names"])]
    except MemoryError:
        raise
    except Exception as error:  # the type depends on where the file is damaged
        # numpy takes an unknown format for a pickle, and its message says how to load that, which is unsafe.
        pickled = "it holds pickled objects, or is not an .npz" if "pickle" in str(error) else error
        raise ValueError(f"{path} cannot be used: {pickled}") from error
    if not labelled:
        return _unlabelled(path.stem, arrays, size, where=str(path))
    return _checked(path.stem, arrays, names, size, where=str(path))


def load_folder(root: Path, size: int | None) -> ImageData:
    """Load image files, by class or without labels, with or without folders ``train`` and ``test`` (or ``val``)."""
    test = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    if not (root / "train").is_dir():
        test = None
    folders = {"train": root} if test is None else {"train": root / "train", "test": test}
    if not any(_subfolders(folder) for folder in folders.values()):
        return _unlabelled_folder(root, folders, size)
    classes = _classes(folders["train"])
    for folder, other in permutations(folders.values(), 2):
        lacking = sorted(set(_classes(folder)) - set(_classes(other)))
        if lacking:
            raise ValueError(f"{other} has no class {_some(lacking)}, {folder} has")
    listed = {split: _listed(folder, classes) for split, folder in folders.items()}
    few = [name for label, name in enumerate(classes) if (listed["train"][1] == label).sum() < 2]
    if few and test is None:
        raise ValueError(
            f"{root}: a class needs 2 images to be split into train and test; one only: {_some(few)}"
        )
    size = size or _common_size([path for paths, _ in listed.values() for path in paths])
    arrays: dict[str, Array] = {}
    for split, (paths, labels) in listed.items():
        what = f"reading {folders[split].relative_to(root.parent)}"
        arrays |= {f"{split}_images": read_pictures(paths, size, what), f"{split}_labels": labels}
    if test is None:
        return _split(root.name, arrays["train_images"], arrays["train_labels"], classes)
    return _checked(root.name, arrays, classes, size)


def _unlabelled_folder(root: Path, folders: dict[str, Path], size: int | None) -> ImageData:
    """Load image files without classes, from the folders of the splits or from one folder."""
    for folder in folders.values():
        if not any(map(_is_picture, folder.iterdir())):
            raise ValueError(f"{folder} has neither images ({', '.join(FILES)}) nor folders of them by class")
    listed = {split: _pictures(folder) for split, folder in folders.items()}
    size = size or _common_size([path for paths in listed.values() for path in paths])
    arrays: dict[str, Array] = {
        f"{split}_images": read_pictures(paths, size, f"reading {folders[split].name}")
        for split, paths in listed.items()
    }
    return _unlabelled(root.name, arrays, size)


def _unlabelled(name: str, arrays: dict[str, Array], size: int | None, where: str = "") -> ImageData:
    """Images without labels. Without test images, a fifth is held out, the same one at every load."""
    images = _same_size(arrays, size, where or name)
    if "test_images" not in images:
        every = images["train_images"]
        if len(every) < 2:
            raise ValueError(f"{where or name}: 2 images are needed, one of them to be held out; got 1")
        train, test = stratified_split(np.zeros(len(every), np.int64))
        images = {"train_images": every[train], "test_images": every[test]}
    train_images = images["train_images"]
    return ImageData(name, train_images, None, images["test_images"], None, (), train_images)


def _subfolders(folder: Path) -> list[str]:
    return sorted(x.name for x in folder.iterdir() if x.is_dir() and not x.name.startswith("."))


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in FILES and not path.name.startswith(".")


def _pictures(folder: Path) -> list[Path]:
    """The image files in a folder; at least one is required. macOS writes hidden ones, ._NAME beside NAME."""
    paths = sorted(x for x in folder.iterdir() if x.is_file() and _is_picture(x))
    if not paths:
        inside = _subfolders(folder)
        hint = f": if its folders {_some(inside)} are the classes, give {folder}" if inside else ""
        raise ValueError(f"{folder} has no images ({', '.join(FILES)}){hint}")
    return paths


def _classes(folder: Path) -> list[str]:
    names = _subfolders(folder)
    if not names:
        raise ValueError(f"{folder} has no folders of classes")
    loose = [x.name for x in folder.iterdir() if _is_picture(x)]
    if loose:
        warnings.warn(
            f"{folder}: {len(loose)} images beside the folders of classes are left out ({_some(sorted(loose))})",
            stacklevel=4,
        )
    return names


def _listed(folder: Path, classes: Sequence[str]) -> tuple[list[Path], Labels]:
    """The image files of the classes, and their labels."""
    paths, labels = [], []
    for label, name in enumerate(classes):
        inside = _pictures(folder / name)
        paths += inside
        labels += [label] * len(inside)
    return paths, np.array(labels, np.int64)


def _common_size(paths: Sequence[Path]) -> int:
    """The shorter side of the most common size; warns if not all images are squares of that size."""
    sizes = Counter(picture_size(path) for path in paths)
    size = min(sizes.most_common(1)[0][0])
    others = sum(count for shape, count in sizes.items() if shape != (size, size))
    if others:
        warnings.warn(
            f"{others} of {len(paths)} images are not {size} x {size} px and are scaled and cut to that; "
            "size= sets another size",
            stacklevel=4,
        )
    return size


def stratified_split(labels: Labels) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted rows to keep and rows to hold out: a share of each class, rounded down, but at least one row."""
    rng = np.random.default_rng(0)
    held = []
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        held.append(rows[: max(1, int(TEST_SHARE * len(rows)))])
    out = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), out), out


def _split(name: str, images: Images, labels: Labels, class_names: Sequence[str]) -> ImageData:
    train, test = stratified_split(labels)
    taken = images[train], labels[train], images[test], labels[test]
    return _checked(name, dict(zip(SPLITS, taken, strict=True)), class_names, None)


def _checked(
    name: str, arrays: dict[str, Array], class_names: Sequence[str] | None, size: int | None, where: str = ""
) -> ImageData:
    """The data set, after checking its arrays."""
    where = where or name
    images = _same_size(arrays, size, where)
    labels = {}
    for split in ("train", "test"):
        key = f"{split}_labels"
        labels[split] = _as_labels(arrays[key], len(images[f"{split}_images"]), f"{where}: {key}")
    count = len(class_names) if class_names is not None else int(labels["train"].max()) + 1
    if class_names is None and count > len(labels["train"]):  # ids, of which arange could fill the memory
        raise ValueError(
            f"{where}: {len(labels['train'])} training images cannot show the classes 0 to {count - 1} of "
            "train_labels: number the classes from 0, without gaps"
        )
    absent = np.setdiff1d(np.arange(count), labels["train"])
    if len(absent):
        raise ValueError(
            f"{where}: no training image of class {_some(absent.tolist())} (of 0 to {count - 1})"
        )
    for split, values in labels.items():
        if values.max() >= count or values.min() < 0:
            raise ValueError(
                f"{where}: {split}_labels go from {values.min()} to {values.max()}, the classes from 0 to {count - 1}"
            )
    return ImageData(
        name=name,
        train_images=images["train_images"],
        train_labels=labels["train"],
        test_images=images["test_images"],
        test_labels=labels["test"],
        class_names=tuple(class_names if class_names is not None else map(str, range(count))),
        pretrain_images=images.get("pretrain_images", images["train_images"]),
    )


def _same_size(arrays: dict[str, Array], size: int | None, where: str) -> dict[str, Images]:
    """The image arrays, checked and resized to squares of one size."""
    images = {key: _as_images(arrays[key], f"{where}: {key}") for key in arrays if key.endswith("images")}
    if size is None and len({x.shape[1:] for x in images.values()}) > 1:
        shapes = ", ".join(f"{key} {x.shape}" for key, x in images.items())
        raise ValueError(f"{where}: want images of one size; got {shapes}: size= brings them to one")
    height, width = images["train_images"].shape[1:3]
    return {key: resize(x, size or min(height, width)) for key, x in images.items()}


def _as_images(array: Array, where: str) -> Images:
    if array.dtype != np.uint8:
        raise ValueError(f"{where} must be uint8; got {array.dtype}")
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3) or not array.size:
        raise ValueError(f"{where} must be (n, height, width, 3), or grey without the 3; got {array.shape}")
    return array if array.shape[3] == 3 else np.repeat(array, 3, axis=3)


def _as_labels(array: Array, count: int, where: str) -> Labels:
    if array.dtype.kind not in "iu" or array.shape != (count,):
        raise ValueError(f"{where} must be integers of shape ({count},); got {array.dtype} of {array.shape}")
    return np.array(array, np.int64)


def _some(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
