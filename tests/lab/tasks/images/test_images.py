"""The user's images from an npz or a folder, the embedded digits, and unknown names."""

import os
import struct
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.tasks.images.official import assert_equal, assert_well_formed, noise, one_line, save_picture
from PIL import Image

from weince.lab.tasks.images import data, sources
from weince.lab.tasks.images.data import ImageData, load, stratified_split

# --- digits -----------------------------------------------------------------------------------------------------


def test_digits():
    loaded = load("digits")
    assert_well_formed(loaded)
    assert loaded.train_images.shape == (1442, 32, 32, 3)
    assert loaded.test_images.shape == (355, 32, 32, 3)
    assert loaded.class_names == tuple("0123456789")
    assert loaded.pretrain_images is loaded.train_images
    assert (loaded.train_images[..., 0] == loaded.train_images[..., 2]).all()
    assert loaded.train_images.max() == 255
    again = load("digits")
    np.testing.assert_array_equal(again.train_images, loaded.train_images)
    small = load("digits", size=8)
    from sklearn.datasets import load_digits

    known = {image.tobytes(): label for image, label in zip(*_grey_digits(load_digits()), strict=True)}
    for image, label in zip(small.test_images, small.test_labels, strict=True):
        assert known[image[..., 0].tobytes()] == label


def _grey_digits(digits):
    return np.round(digits.images * 255 / 16).astype(np.uint8), digits.target


# --- npz --------------------------------------------------------------------------------------------------------


def arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "train_images": noise(6, 8, 8, 3),
        "train_labels": np.array([0, 1, 2, 0, 1, 2]),
        "test_images": noise(2, 8, 8, 3, seed=1),
        "test_labels": np.array([2, 0]),
        **changes,
    }


def saved(path: Path, content: dict[str, np.ndarray]) -> str:
    np.savez(path, **content)
    return str(path)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_npz(dtype, tmp_path):
    content = arrays(train_labels=np.array([0, 1, 2, 0, 1, 2], dtype))
    loaded = load(saved(tmp_path / "mine.npz", content))
    names = ("0", "1", "2")
    want = ImageData("mine", *(content[key] for key in sources.SPLITS), names, content["train_images"])
    assert_equal(loaded, want)
    named = load(saved(tmp_path / "mine.npz", {**content, "class_names": np.array(["a", "b", "c"])}))
    assert named.class_names == ("a", "b", "c")


def test_grey_and_oblong_npz(tmp_path):
    grey = arrays(train_images=noise(6, 8, 8), test_images=noise(2, 8, 8, 1))
    loaded = load(saved(tmp_path / "grey.npz", grey))
    assert_well_formed(loaded)
    for c in range(3):
        np.testing.assert_array_equal(loaded.train_images[..., c], grey["train_images"])
        np.testing.assert_array_equal(loaded.test_images[..., c], grey["test_images"][..., 0])
    oblong = arrays(train_images=noise(6, 8, 12, 3), test_images=noise(2, 8, 12, 3))
    loaded = load(saved(tmp_path / "oblong.npz", oblong))
    np.testing.assert_array_equal(loaded.train_images, oblong["train_images"][:, :, 2:10])
    mixed = arrays(test_images=noise(2, 9, 9, 3))
    assert load(saved(tmp_path / "mixed.npz", mixed), size=8).test_images.shape == (2, 8, 8, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": np.zeros((6, 8, 8, 3))}, "train_images must be uint8; got float64"),
        ({"train_images": noise(6, 3, 8, 8)}, r"train_images must be \(n, height, width, 3\).*got \(6, 3, 8, 8\)"),
        ({"test_images": noise(0, 8, 8, 3), "test_labels": np.array([], int)}, "test_images must be"),
        ({"test_images": noise(2, 9, 9, 3)}, "want images of one size; got .*size= brings them to one"),
        ({"train_labels": np.array([0, 1, 2])}, r"train_labels must be .* \(6,\); got int64 of \(3,\)"),
        ({"train_labels": np.array([0, 1, 2, 0, 1, 2.0])}, "train_labels must be integers"),
        ({"train_labels": np.array([0, 1, 3, 0, 1, 3])}, r"no training image of class 2 \(of 0 to 3\)"),
        (
            {"train_labels": np.array([0, 1, 2, 0, 1, 10**12])},
            "6 training images cannot show the classes 0 to 1000000000000 of train_labels: number the classes",
        ),
        ({"train_labels": np.array([-1, 0, 1, 0, 1, 2])}, "train_labels go from -1 to 2, the classes from 0 to 2"),
        ({"test_labels": np.array([0, 7])}, "test_labels go from 0 to 7, the classes from 0 to 2"),
        ({"class_names": np.array(["a", "b"])}, "train_labels go from 0 to 2, the classes from 0 to 1"),
        ({"class_names": np.array(["a", "b", "c", "d"])}, "no training image of class 3"),
    ],
)  # fmt: skip
def test_npz_with_something_wrong(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        load(saved(tmp_path / "bad.npz", arrays(**changes)))
    assert "bad.npz" in one_line(error)


def test_npz_that_is_none(tmp_path):
    content = arrays()
    del content["test_labels"]
    with pytest.raises(
        ValueError, match=r"bad.npz cannot be used: no array 'test_labels' \(it has train_images"
    ):
        load(saved(tmp_path / "bad.npz", content))
    whole = (tmp_path / "bad.npz").read_bytes()
    for fault in (b"", whole[:100], bytes(noise(500)), whole[: len(whole) // 2]):
        (tmp_path / "bad.npz").write_bytes(fault)
        with pytest.raises(ValueError, match=r"bad.npz cannot be used") as error:
            load(str(tmp_path / "bad.npz"))
        one_line(error)


def test_npz_of_an_odd_kind(tmp_path):
    """numpy and zipfile have another type of error for each of these, or none."""
    path = tmp_path / "bad.npz"
    whole = Path(saved(path, arrays())).read_bytes()
    np.save(tmp_path / "one.npy", noise(6, 8, 8, 3))
    with zipfile.ZipFile(tmp_path / "words.npz", "w") as pack:
        for key in sources.SPLITS:
            pack.writestr(f"{key}.npy", "hello")
    listed = whole.index(b"PK\x01\x02")  # where the zip lists its first member
    faults = {
        "an .npy file of one array of shape": (tmp_path / "one.npy").read_bytes(),
        "train_images is no array": (tmp_path / "words.npz").read_bytes(),
        "encrypted": with_byte(with_byte(whole, listed + 8, 1), 6, 1),
        "compression method": with_byte(whole, listed + 10, 99),
        "zip file version": with_byte(whole, listed + 6, 226),
    }
    for said, fault in faults.items():
        path.write_bytes(fault)
        with pytest.raises(ValueError, match=rf"bad.npz cannot be used.*{said}") as error:
            load(str(path))
        one_line(error)


def with_byte(content: bytes, place: int, value: int) -> bytes:
    return content[:place] + bytes([value]) + content[place + 1 :]


# --- folders ----------------------------------------------------------------------------------------------------


def write_folder(root: Path, counts: dict[str, int], suffix=".png") -> dict[str, list[np.ndarray]]:
    return {
        name: [
            save_picture(root / name / f"{i:03}{suffix}", noise(8, 8, 3, seed=100 * ord(name[0]) + i))
            for i in range(n)
        ]
        for name, n in counts.items()
    }


def test_folder_with_a_split(tmp_path):
    train = write_folder(tmp_path / "train", {"cat": 3, "ant": 2})
    test = write_folder(tmp_path / "test", {"cat": 1, "ant": 1}, suffix=".JPG")
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    loaded = load(str(tmp_path))
    images = np.stack(train["ant"] + train["cat"])
    tested = np.stack(test["ant"] + test["cat"])
    labels = np.array([0, 0, 1, 1, 1])
    assert_equal(
        loaded, ImageData(tmp_path.name, images, labels, tested, np.array([0, 1]), ("ant", "cat"), images)
    )


def test_folder_with_val_for_test(tmp_path):
    write_folder(tmp_path / "train", {"a": 2, "b": 2})
    want = write_folder(tmp_path / "val", {"a": 1, "b": 1})
    np.testing.assert_array_equal(load(str(tmp_path)).test_images, np.stack(want["a"] + want["b"]))


def test_folder_without_labels(tmp_path):
    pictures = [save_picture(tmp_path / f"{i}.png", noise(8, 8, 3, seed=i)) for i in range(11)]
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    loaded = load(str(tmp_path))
    assert (loaded.train_labels, loaded.test_labels, loaded.class_names) == (None, None, ())
    assert (len(loaded.train_images), len(loaded.test_images)) == (9, 2)  # a fifth is held out
    assert loaded.pretrain_images is loaded.train_images
    seen = [image.tobytes() for image in (*loaded.train_images, *loaded.test_images)]
    assert sorted(seen) == sorted(np.asarray(picture).tobytes() for picture in pictures)
    np.testing.assert_array_equal(load(str(tmp_path)).test_images, loaded.test_images)  # the same split
    assert load(str(tmp_path), size=4).train_images.shape == (9, 4, 4, 3)


def test_folder_with_a_split_without_labels(tmp_path):
    for split, number in (("train", 4), ("val", 1)):
        for i in range(number):
            save_picture(tmp_path / split / f"{i}.png", noise(8, 8, 3, seed=i))
    loaded = load(str(tmp_path))
    assert loaded.train_labels is None
    assert (len(loaded.train_images), len(loaded.test_images)) == (4, 1)
    (tmp_path / "val" / "cat").mkdir()
    with pytest.raises(ValueError, match="train has no folders of classes"):
        load(str(tmp_path))


def test_images_beside_the_folders_of_classes_are_left_out_and_counted(tmp_path):
    write_folder(tmp_path, {"a": 3, "b": 3})
    save_picture(tmp_path / "loose.png", noise(8, 8, 3))
    with pytest.warns(
        UserWarning, match=r"1 images beside the folders of classes are left out \(loose.png\)"
    ):
        loaded = load(str(tmp_path))
    assert loaded.class_names == ("a", "b")


def test_hidden_files_are_no_images(tmp_path):
    write_folder(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "._loose.png").write_bytes(b"\0\5\x16\7")  # macOS writes such files beside others
    (tmp_path / "a" / "._000.png").write_bytes(b"\0\5\x16\7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(str(tmp_path)).train_images) == 4


def test_npz_without_labels(tmp_path):
    content = arrays()
    split = load(saved(tmp_path / "mine.npz", {key: content[key] for key in ("train_images", "test_images")}))
    assert (split.train_labels, split.test_labels, split.class_names) == (None, None, ())
    np.testing.assert_array_equal(split.train_images, load(saved(tmp_path / "all.npz", content)).train_images)
    alone = load(saved(tmp_path / "mine.npz", {"train_images": content["train_images"]}))
    assert (len(alone.train_images), len(alone.test_images)) == (5, 1)
    with pytest.raises(ValueError, match=r"one.npz: 2 images are needed, one of them to be held out; got 1"):
        load(saved(tmp_path / "one.npz", {"train_images": content["train_images"][:1]}))
    with pytest.raises(ValueError, match=r"no array 'train_images' \(it has z\)"):
        load(saved(tmp_path / "other.npz", {"z": np.eye(3)}))
    with pytest.raises(ValueError, match="no array 'train_images'"):
        load(saved(tmp_path / "half.npz", {"test_images": content["test_images"]}))


def test_folder_without_a_split(tmp_path):
    pictures = write_folder(tmp_path, {"a": 10, "b": 7, "c": 2})
    loaded = load(str(tmp_path))
    assert_well_formed(loaded)
    assert np.bincount(loaded.test_labels).tolist() == [2, 1, 1]
    assert np.bincount(loaded.train_labels).tolist() == [8, 6, 1]
    known = {image.tobytes(): label for label, name in enumerate("abc") for image in pictures[name]}
    assert len(known) == 19
    seen = [
        (image.tobytes(), label)
        for part in ("train", "test")
        for image, label in zip(
            getattr(loaded, f"{part}_images"), getattr(loaded, f"{part}_labels"), strict=True
        )
    ]
    assert dict(seen) == known
    assert_equal(load(str(tmp_path)), loaded)


def test_folder_of_grey_odd_and_oblong_images(tmp_path):
    write_folder(tmp_path, {"a": 5, "b": 4})
    save_picture(tmp_path / "a" / "grey.png", noise(8, 8))
    save_picture(tmp_path / "b" / "large.png", np.full((30, 20, 3), 77, np.uint8))
    Image.fromarray(noise(8, 8, 4)).save(tmp_path / "b" / "alpha.png")
    Image.fromarray(noise(8, 8)).convert("P").save(tmp_path / "b" / "palette.png")
    with pytest.warns(
        UserWarning, match="1 of 13 images are not 8 x 8 px and are scaled and cut to that; size="
    ):
        loaded = load(str(tmp_path))
    assert_well_formed(loaded)
    assert loaded.train_images.shape[1:] == (8, 8, 3)
    images = np.concatenate([loaded.train_images, loaded.test_images])
    assert (images == 77).all(axis=(1, 2, 3)).sum() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(str(tmp_path), size=16).train_images.shape[1:] == (16, 16, 3)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ({"a": 2, "b": 2}, {"a": 1}, r"test has no class b, .*train has"),
        ({"a": 2}, {"a": 1, "c": 1}, r"train has no class c, .*test has"),
        ({}, {"a": 1}, "train has no folders of classes"),
        ({"a": 2, "b": 0}, {"a": 1, "b": 1}, r"b has no images \(.png, .jpg"),
    ],
)
def test_folder_with_missing_classes(train, test, message, tmp_path):
    for part, counts in (("train", train), ("test", test)):
        (tmp_path / part).mkdir()
        for name in counts:
            (tmp_path / part / name).mkdir()
        write_folder(tmp_path / part, counts)
    with pytest.raises(ValueError, match=message) as error:
        load(str(tmp_path))
    one_line(error)


def test_folder_with_other_faults(tmp_path):
    write_folder(tmp_path, {"a": 3, "b": 1, "c": 1})
    with pytest.raises(
        ValueError, match="a class needs 2 images to be split into train and test; one only: b, c"
    ):
        load(str(tmp_path))
    (tmp_path / "a" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    write_folder(tmp_path, {"b": 2, "c": 2})
    with pytest.raises(ValueError, match=r"broken.png cannot be read as an image") as error:
        load(str(tmp_path))
    one_line(error)
    (tmp_path / "a" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\3IHDR123....")
    with pytest.raises(ValueError, match=r"broken.png cannot be read as an image: Truncated IHDR"):
        load(str(tmp_path))
    (tmp_path / "a" / "broken.png").unlink()
    Image.fromarray(noise(8, 8, 3)).save(tmp_path / "a" / "huge.bmp")
    small = (tmp_path / "a" / "huge.bmp").read_bytes()
    (tmp_path / "a" / "huge.bmp").write_bytes(small[:18] + struct.pack("<2i", 99_999, 99_999) + small[26:])
    with pytest.raises(ValueError, match=r"huge.bmp cannot be read as an image: Image size .* exceeds"):
        load(str(tmp_path))
    (tmp_path / "a" / "huge.bmp").unlink()
    Image.fromarray(noise(8, 8).astype(np.uint16) * 256).save(tmp_path / "a" / "deep.png")
    with pytest.raises(
        ValueError, match=r"deep.png has more than 8 bits a channel \(mode I;16\): convert it first"
    ):
        load(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError,
        match=r"empty has neither images \(.png, .jpg, .jpeg, .bmp, .webp\) nor folders of them by class",
    ):
        load(str(tmp_path / "empty"))


def test_training_images_without_test_images_are_found_a_folder_deeper(tmp_path):
    write_folder(tmp_path / "train", {"a": 5, "b": 5})
    with pytest.raises(
        ValueError, match=r"train has no images \(.*\): if its folders a, b are the classes, give (.*)$"
    ) as error:
        load(str(tmp_path))
    load(str(error.value).rpartition("give ")[2])


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_stratified_split(labels):
    labels = np.array(labels)
    train, test = stratified_split(labels)
    assert sorted([*train, *test]) == list(range(len(labels)))
    for label in set(labels):
        n = (labels == label).sum()
        assert (labels[test] == label).sum() == max(1, n // 5)


# --- names ------------------------------------------------------------------------------------------------------


def test_unknown_names(tmp_path):
    with pytest.raises(
        ValueError, match=r"no data 'cifar-100' \(did you mean cifar100\?\): give one of digits, cifar10, "
    ):
        load("cifar-100", cache=tmp_path)
    with pytest.raises(
        ValueError, match=r"no data 'xyz': give one of digits, .*tiny-imagenet, or a path that exists"
    ):
        load("xyz", cache=tmp_path)
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(
        ValueError, match=r"data.txt is neither an .npz, nor a folder, nor an official archive"
    ):
        load(str(tmp_path / "data.txt"))


@pytest.mark.parametrize("there", [True, False])
def test_the_digits_are_scikit_learns(there, monkeypatch):
    """They are read from scikit-learn's file, or by its function if that file cannot be found."""
    from sklearn import datasets

    if not there:
        monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    wanted = datasets.load_digits()
    pixels, labels = data.read_digits()
    np.testing.assert_array_equal(pixels, wanted.data)
    np.testing.assert_array_equal(labels, wanted.target)


@pytest.mark.posix
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "images.npz")
    with pytest.raises(ValueError, match=r"images\.npz: want a file; got a pipe"):
        load(str(tmp_path / "images.npz"))


def test_an_archive_that_unpacks_to_far_more_is_refused_before_it_is_unpacked(tmp_path):
    """A zip bomb: 100 KB that would take 100 MB, found by the sizes that it declares."""
    path = tmp_path / "images.npz"
    np.savez_compressed(path, train_images=np.zeros((33_000, 32, 32, 3), np.uint8))
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError, match=r"images\.npz: unpacks from 0\.\d to 9\d MiB, as it says itself"
        ):
            load(str(path))
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
