"""Sentences from a file equal those of reading it whole, but the file is never held in memory."""

import os
import threading
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weince.lab.tasks.sentences.data import LONGEST, SentenceFile, ahead, batches, steps_in_epoch
from weince.lab.tasks.sentences.sts import read_sts


def _read(path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SentenceFile(path, **options)


ugly = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=12)


@given(
    st.lists(st.one_of(ugly, st.sampled_from(["a dog", "", "  ", "a dog "])), min_size=0, max_size=30),
    st.booleans(),
)
def test_the_same_as_reading_whole(tmp_path_factory, lines, ending):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes("\n".join(lines).encode() + b"\n" * ending)
    expected = [
        line.strip() for line in path.read_bytes().decode().removeprefix("\ufeff").split("\n") if line.strip()
    ]
    if len(expected) < 2:
        with pytest.raises(ValueError, match=f"at least 2 sentences .* found {len(expected)}"):
            _read(path)
        return
    file = _read(path)
    assert [file[number] for number in range(len(file))] == expected
    drawn = file.draw(np.arange(len(file)))
    assert drawn.sentences == expected
    if len(set(expected)) == len(expected):
        assert drawn.ids is None
    else:
        alike = drawn.ids[:, None] == drawn.ids
        assert (alike == np.array([[a == b for a in expected] for b in expected])).all()
    file.close()


def test_first_sentences_only(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"one\n\ntwo\nthree\n\xff\n")  # the invalid byte comes after the first two sentences
    file = _read(path, first=2)
    assert [file[0], file[1], len(file)] == ["one", "two", 2]


def test_windows_and_byte_order_mark(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    file = SentenceFile(path)
    assert [file[0], file[1]] == ["one", "two"]


def test_what_is_left_out_is_counted(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\n\n \ntwo\none\none\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SentenceFile(path).close()
    assert sorted(str(item.message).removeprefix(f"{path}: ").partition(";")[0] for item in caught) == [
        "2 of 4 sentences repeat an earlier one",
        "left out 2 empty lines",
    ]


def test_repeated_pairs_are_counted_as_pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("a\tb\na\tc\na\tb\n")
    with pytest.warns(UserWarning, match="1 of 3 pairs repeat an earlier one; equal pairs of a batch"):
        SentenceFile(path, pairs=True).close()


def test_a_clean_file_says_nothing(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SentenceFile(path).close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\ntw\xe9o\nthree\n", r"line 2: not UTF-8 \(byte 0xe9 at place 3\); convert the file first"),
        (b"", "found 0"),
        (b"\n\n\n", "found 0"),
        (b"only one\n\n", "found 1"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        SentenceFile(path)
    assert "\n" not in str(caught.value)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such text file"):
        SentenceFile(tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match="no such text file"):
        SentenceFile(tmp_path)


def test_a_very_long_line_is_cut(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("é" * LONGEST + "\nshort\n", encoding="utf-8")
    file = SentenceFile(path)
    assert file[0] == "é" * (LONGEST // 2)
    path.write_text("x" + "é" * LONGEST + "\nshort\n", encoding="utf-8")  # the cut falls inside an é
    file = SentenceFile(path)
    assert file[0] == "x" + "é" * (LONGEST // 2 - 1)
    assert file[1] == "short"


def test_the_text_is_not_in_memory(tmp_path):
    path = tmp_path / "text.txt"
    count = 20_000
    path.write_text("".join(f"{number} {'word ' * 40}\n" for number in range(count)))
    size = path.stat().st_size
    tracemalloc.start()
    file = SentenceFile(path)
    for numbers in batches(count, batch=64, epochs=1, seed=0):
        file.draw(numbers)
        break
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 2 < 3 * 2**20


@given(st.integers(2, 60), st.integers(2, 20), st.integers(1, 3), st.integers(0, 5), st.integers(0, 100))
def test_batches(sentences, batch, epochs, seed, stopped):
    all_batches = list(batches(sentences, batch=batch, epochs=epochs, seed=seed))
    in_epoch = steps_in_epoch(sentences, batch)
    assert len(all_batches) == epochs * in_epoch
    for epoch in range(epochs):
        part = all_batches[epoch * in_epoch : (epoch + 1) * in_epoch]
        assert all(len(numbers) >= 2 for numbers in part)
        used = np.concatenate(part)
        assert len(set(used)) == len(used) == sentences - (sentences % batch == 1)
    start = min(stopped, len(all_batches))
    again = list(batches(sentences, batch=batch, epochs=epochs, seed=seed, start=start))
    assert len(again) == len(all_batches) - start
    assert all((a == b).all() for a, b in zip(again, all_batches[start:], strict=True))


def test_each_epoch_and_seed_has_its_order():
    first = np.concatenate(list(batches(50, batch=10, epochs=2, seed=0)))
    assert (first[:50] != first[50:]).any()
    assert (first[:50] != np.concatenate(list(batches(50, batch=10, epochs=1, seed=1)))).any()


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_ahead_keeps_the_order(items, depth):
    assert list(ahead(items, lambda item: item + 1, depth=depth)) == [item + 1 for item in items]


def test_ahead_works_in_a_thread_and_passes_errors_on():
    assert set(ahead([1, 2], lambda _: threading.current_thread())) != {threading.current_thread()}
    made = []

    def make(item):
        made.append(item)
        return 1 / item

    with pytest.raises(ZeroDivisionError):
        list(ahead([1, 0, 2], make))
    made.clear()
    rest = ahead(range(1, 100), make, depth=3)
    next(rest)
    rest.close()
    assert len(made) <= 5  # closing it stops the thread


def test_pairs_are_drawn_in_two_halves_and_share_an_id_if_they_share_a_sentence(tmp_path):
    """Two pairs with the same second sentence would else have a negative that equals the positive."""
    path = tmp_path / "pairs.tsv"
    pairs = (
        "a dog\tone dog",
        "red sun\tthe sun",
        "a dog\ta small dog",
        "a star\tthe sun",
        "the sun\ta ball",
        "x\ty",
    )
    path.write_text("\n".join(pairs))
    file = _read(path, pairs=True)
    drawn = file.draw(np.array([2, 1, 0]))
    assert drawn.sentences == ["a dog", "red sun", "a dog", "a small dog", "the sun", "one dog"]
    assert file.draw(np.array([0, 1, 5])).ids is None
    begin, end, cross, through = [0, 2, 5], [1, 3, 5], [1, 4, 5], [0, 3, 1, 4]
    for numbers, same in ((begin, [0, 0, 1]), (end, [0, 0, 1]), (cross, [0, 0, 1]), (through, [0, 1, 1, 1])):
        ids = file.draw(np.array(numbers)).ids
        assert ((ids[:, None] == ids) == np.equal.outer(same, same)).all()
    file.close()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a dog", "line 2: want two sentences with a tab between them; got 'a dog'"),
        ("a\tb\tc", r"line 2: want two sentences with a tab between them; got 'a\\tb\\tc'"),
        ("a dog\t ", "line 2: want two sentences"),
        ("a" * LONGEST + "\tb", "line 2: a pair must have at most 65,536 bytes; got 65,539"),
    ],
)
def test_a_line_that_is_no_pair(tmp_path, line, said):
    path = tmp_path / "pairs.tsv"
    path.write_text(f"a dog\tone dog\n{line}\n")
    with pytest.raises(ValueError, match=said):
        SentenceFile(path, pairs=True)


@pytest.mark.posix
@pytest.mark.parametrize("read", [SentenceFile, read_sts])
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: want a file; got a pipe"):
        read(tmp_path / "pipe")
