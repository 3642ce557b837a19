"""Reading embeddings: every format, and the faults that a file can have."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from diagnose.synthetic import views
from weince.diagnose.reading import (
    InputError,
    load_pairs,
    make_pairs,
    pair_by_label,
    read_arrays,
)


def equal(pairs, z_i, z_j):
    np.testing.assert_array_equal(pairs.z_i, z_i)
    np.testing.assert_array_equal(pairs.z_j, z_j)


def test_every_format_gives_the_same_pairs(tmp_path):
    z_i, z_j = (z.astype(np.float32) for z in views(pairs=50))
    np.savez(tmp_path / "a.npz", z_i=z_i, z_j=z_j, other=np.zeros(3))
    np.save(tmp_path / "b.npy", np.stack([z_i, z_j]))
    np.save(tmp_path / "c_i.npy", z_i)
    np.save(tmp_path / "c_j.npy", z_j)
    save_file({"z_i": torch.tensor(z_i), "z_j": torch.tensor(z_j)}, tmp_path / "d.safetensors")
    files = ["a.npz", "b.npy", "c_i.npy", "c_j.npy", "d.safetensors"]
    found = load_pairs([tmp_path / name for name in files])
    assert [pairs.name for pairs in found] == ["a", "b", "c_i", "d"]
    for pairs in found:
        equal(pairs, z_i, z_j)
        assert pairs.notes == ()
    named = load_pairs([tmp_path / "a.npz", tmp_path / "b.npy"], names=["x", "x"])
    assert [pairs.name for pairs in named] == ["x", "x (2)"]
    five = load_pairs([tmp_path / "a.npz"] * 5, names=["x", "x", "x (2)", "x", "x (2)"])
    assert [pairs.name for pairs in five] == ["x", "x (2)", "x (2) (2)", "x (3)", "x (2) (3)"]
    with pytest.raises(InputError, match="want a name for each model, 2 in all; got 1"):
        load_pairs([tmp_path / "a.npz", tmp_path / "b.npy"], names=["x"])


def test_a_folder_is_read_in_natural_order(tmp_path):
    z_i, z_j = views(pairs=8)
    for step in (10, 2, 1):
        np.savez(tmp_path / f"step_{step}.npz", z_i=z_i, z_j=z_j)
    (tmp_path / "notes.txt").write_text("no embeddings")
    assert [pairs.name for pairs in load_pairs([tmp_path])] == ["step_1", "step_2", "step_10"]


@pytest.mark.parametrize("dtype", [np.float16, torch.bfloat16])
def test_sixteen_bits_are_noted_whatever_holds_them(tmp_path, dtype):
    z_i, z_j = views(pairs=8)
    if dtype is torch.bfloat16:
        save_file({k: torch.tensor(z).to(dtype) for k, z in zip(("z_i", "z_j"), (z_i, z_j), strict=True)},
                  tmp_path / "x.safetensors")  # fmt: skip
        (pairs,) = load_pairs([tmp_path / "x.safetensors"])
        again = make_pairs("x", pairs.z_i.astype(np.float64), pairs.z_j.astype(np.float64))
    else:
        pairs = make_pairs("x", z_i.astype(dtype), z_j.astype(dtype))
        again = make_pairs("x", z_i.astype(dtype).astype(np.float32), z_j.astype(dtype).astype(np.float32))
    assert "16-bit" in pairs.notes[0]
    assert "16-bit" in again.notes[0]
    assert make_pairs("x", z_i, z_j).notes == ()


@given(st.lists(st.integers(0, 5), min_size=2, max_size=60), st.integers(0, 5))
def test_pairs_by_label_use_each_row_once(labels, seed):
    labels = np.array(labels)
    z = np.random.default_rng(0).standard_normal((len(labels), 2))
    counts = np.unique(labels, return_counts=True)[1] // 2
    try:
        pairs = pair_by_label("x", z, labels, seed=seed)
    except InputError:
        assert (counts > 0).sum() < 2
        return
    assert len(pairs.z_i) == counts.sum()
    used = [tuple(row) for row in np.concatenate([pairs.z_i, pairs.z_j])]
    assert len(set(used)) == len(used)
    label_of = {tuple(row): label for row, label in zip(z, labels, strict=True)}
    for first, second in zip(pairs.z_i, pairs.z_j, strict=True):
        assert label_of[tuple(first)] == label_of[tuple(second)]
    rows = [label_of[tuple(row)] for row in pairs.z_i]
    np.testing.assert_array_equal(
        np.unique(rows, return_inverse=True)[1], np.unique(pairs.ids, return_inverse=True)[1]
    )


def test_labels_beside_pairs_are_said_to_be_unused(tmp_path):
    z_i, z_j = views(pairs=8)
    labels = np.arange(8) // 2
    np.savez(tmp_path / "a.npz", z_i=z_i, z_j=z_j, labels=labels)
    np.savez(tmp_path / "b.npz", z_i=z_i, z_j=z_j, labels=labels, ids=labels)
    without, used = load_pairs([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert without.ids is None
    assert "labels were not used: save them as ids" in without.notes[0]
    assert used.notes == ()


def test_labels_may_be_words():
    z = np.random.default_rng(0).standard_normal((6, 2))
    assert len(pair_by_label("x", z, np.array(["cat", "cat", "<b>", "<b>", "dog", "dog"])).z_i) == 3


def test_names_can_be_written_into_any_file():
    name = "a\x01b\ud800c\n\u202ed"
    shown = make_pairs(name, *views(pairs=4)).name
    assert shown == "a\ufffdb\ufffdc\ufffd\ufffdd"
    assert make_pairs("", *views(pairs=4)).name == "unnamed"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tensors_of_a_model_are_taken_as_they_are(dtype):
    z_i, z_j = (torch.tensor(z).to(dtype).requires_grad_() for z in views(pairs=8))
    equal(make_pairs("x", z_i, z_j), z_i.detach().double().numpy(), z_j.detach().double().numpy())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_read_and_noted(tmp_path, dtype):
    z_i, z_j = (torch.tensor(z).to(dtype) for z in views(pairs=8))
    save_file({"z_i": z_i, "z_j": z_j}, tmp_path / "x.safetensors")
    (pairs,) = load_pairs([tmp_path / "x.safetensors"])
    equal(pairs, z_i.double().numpy(), z_j.double().numpy())
    assert pairs.notes[0].startswith("The embeddings have 16-bit precision or less")


@pytest.mark.parametrize("quantise", [np.sign, lambda z: np.clip(40 * z, -127, 127).astype(np.int8)])
def test_whole_numbers_are_not_called_sixteen_bits(quantise):
    (note,) = make_pairs("x", *(quantise(z) for z in views(pairs=64))).notes
    assert note.startswith("The embeddings are whole numbers, as after quantisation")


def test_an_npz_file_does_not_follow_an_array(tmp_path):
    z_i, z_j = views(pairs=8)
    np.save(tmp_path / "a.npy", z_i)
    with (tmp_path / "b.npy").open("wb") as file:
        np.savez(file, z_i=z_i, z_j=z_j)
    with pytest.raises(InputError, match=r"b.npy: want one array .* got an .npz file with z_i, z_j$"):
        load_pairs([tmp_path / "a.npy", tmp_path / "b.npy"])


@pytest.mark.parametrize(
    ("z_i", "z_j", "said"),
    [
        (np.ones((4, 3)), np.ones((4, 3)), "point the same way"),
        (np.arange(1, 5)[:, None] * np.ones((4, 3)), np.ones((4, 3)), "point the same way"),
        (np.ones(4), np.ones(4), r"shape \(pairs, dim\); got \(4,\)"),
        (np.ones((4, 3)), np.ones((5, 3)), r"one shape; got \(4, 3\) and \(5, 3\)"),
        (np.ones((0, 3)), np.ones((0, 3)), r"got \(0, 3\)"),
        (np.eye(3), np.eye(3) * [1, 1, 0], "rows of zeros, first row 2"),
        (np.eye(3), np.eye(3) * [1, np.nan, 1], "NaN or infinite values in 3 of 3 rows"),
        (np.eye(3) * 1j, np.eye(3), "real numbers; got complex128"),
        (np.array([["a", "b"]]), np.eye(2), "real numbers"),
    ],
)
def test_arrays_that_cannot_be_used(z_i, z_j, said):
    with pytest.raises(InputError, match=said):
        make_pairs("x", z_i, z_j)


def test_one_view_of_one_direction_or_a_nearly_collapsed_model_is_taken():
    z_i, z_j = views(pairs=40)
    same = np.ones_like(z_i)
    for first, second in ((same, z_j), (z_i, same), (same + 1e-3 * z_i, same + 1e-3 * z_j)):
        equal(make_pairs("x", first, second), first, second)
    with pytest.raises(InputError, match="all embeddings point the same way"):
        make_pairs("x", same, 2 * same)


def test_sixteen_bits_of_one_view_are_noted_and_other_short_numbers_are_not():
    z_i, z_j = views(pairs=8)
    half = z_i.astype(np.float16)
    assert "16-bit" in make_pairs("x", half, z_j).notes[0]
    assert "16-bit" in make_pairs("x", z_j, half).notes[0]
    twenty = (z_i.astype(np.float32).view(np.uint32) & 0xFFFFF000).view(np.float32)
    assert make_pairs("x", twenty, twenty).notes == ()


def test_ids_must_let_some_pairs_compete_and_be_no_measurements():
    z_i, z_j = views(pairs=8)
    with pytest.raises(InputError, match="all pairs have the same id, so nothing competes"):
        make_pairs("x", z_i, z_j, np.full(8, 3))
    with pytest.raises(InputError, match="ids must be integers or strings; got float64"):
        make_pairs("x", z_i, z_j, np.linspace(0, 1, 8))


def test_pairs_by_label_are_drawn_and_shuffled():
    """Rows of a file are often sorted; neither the pairs nor their batches may follow that order."""
    z, labels = np.stack([np.arange(400.0), np.ones(400)], 1), np.repeat(np.arange(4), 100)
    one, other = (pair_by_label("x", z, labels, seed=seed) for seed in (0, 1))
    equal(pair_by_label("x", z, labels, seed=0), one.z_i, one.z_j)
    assert not np.array_equal(one.z_i, other.z_i)
    assert np.median(np.abs(one.z_i[:, 0] - one.z_j[:, 0])) > 10  # neighbours would differ by 1
    assert all(len(np.unique(one.ids[start : start + 50])) == 4 for start in range(0, 200, 50))


def test_every_row_of_a_large_file_is_checked():
    z = np.ones((70_000, 1), np.float32)
    z[65_536] = np.nan
    with pytest.raises(InputError, match="NaN or infinite values in 1 of 70000 rows, first in row 65536"):
        make_pairs("x", z, z)


@pytest.mark.parametrize(
    ("shape", "follows"), [((3, 8, 2), "b.npy"), ((8, 2), "b.npz"), ((8, 2), None), ((2, 2, 8, 2), "b.npy")]
)
def test_an_npy_file_without_its_pair_is_refused(tmp_path, shape, follows):
    z = np.random.default_rng(0).standard_normal((8, 2))
    np.save(tmp_path / "a.npy", np.random.default_rng(0).standard_normal(shape))
    np.save(tmp_path / "b.npy", z)
    np.savez(tmp_path / "b.npz", z_i=z, z_j=z)
    paths = [tmp_path / "a.npy"] + ([tmp_path / follows] if follows else [])
    with pytest.raises(
        InputError, match=r"a.npy: an .npy file must have shape \(2, pairs, dim\), or be followed"
    ):
        load_pairs(paths)


def test_a_file_that_zipfile_cannot_read_is_said_in_one_line(tmp_path):
    path = tmp_path / "pairs.npz"
    np.savez(path, z_i=np.eye(3), z_j=np.eye(3))
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"PK\x01\x02") + 10] = 99  # the method of compression
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"pairs.npz: cannot be read.*compression method"):
        load_pairs([path])


def test_a_header_of_more_than_the_memory_is_said_with_the_name_of_the_file(tmp_path):
    path, header = tmp_path / "a.npy", {"descr": "<f8", "fortran_order": False, "shape": (2, 10**12, 10**5)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(
        InputError, match=r"^a.npy: is damaged, or does not fit into memory \(.*\): save fewer pairs$"
    ):
        load_pairs([path])


def test_a_file_that_the_system_does_not_open_is_not_called_damaged(tmp_path):
    """As without the right to read it; tests may run with all rights, so here it is a folder."""
    (tmp_path / "a.npz").mkdir()
    with pytest.raises(InputError, match=r"^a.npz: (Is a directory|Permission denied)$"):
        read_arrays(tmp_path / "a.npz")
