"""Folders that are whole after a kill, a full disk or a second run; archives and pipes that are refused."""

import os
import re
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest

from weince import files
from weince.files import check_file, check_unpacked, finished_folder

resource = pytest.importorskip("resource")  # limits of a process, which Windows does not have

PARTS = ("figures", "tables", "summary.json", "index.html")


def write(out, text):
    with finished_folder(out, PARTS) as folder:
        for name in PARTS[:2]:
            (folder / name).mkdir()
            (folder / name / "a").write_text(text)
        for name in PARTS[2:]:
            (folder / name).write_text(text)


def content(out):
    return {
        str(p.relative_to(out)): p.read_text()
        for p in out.rglob("*")
        if p.is_file() and "unfinished" not in str(p)
    }


WHOLE = ("figures/a", "tables/a", "summary.json", "index.html")


@pytest.mark.posix
@pytest.mark.parametrize("exists", [False, True])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_page(tmp_path, exists, monkeypatch):
    """The process ends at its n-th rename, without any clean-up. The next run removes what it left."""
    steps = 0
    for step in range(20):
        out = tmp_path / f"{step}" / "page"
        if exists:
            write(out, "old")
        child = os.fork()
        if child == 0:
            count = [0]

            def killed(*paths, act, step=step, count=count):
                if count[0] == step:
                    os._exit(9)
                count[0] += 1
                return act(*paths)

            for name in ("rename", "replace"):
                act = getattr(os, name)
                setattr(os, name, lambda *paths, act=act: killed(*paths, act=act))
            write(out, "new")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            assert content(out) == dict.fromkeys(WHOLE, "new")
            break
        steps += 1
        assert content(out).get("index.html") == ("old" if exists else None)
        assert [p for p in (out if exists else out.parent).iterdir() if "unfinished" in p.name]
        write(out, "third")
        assert content(out) == dict.fromkeys(WHOLE, "third")
        assert not [p for p in out.parent.rglob("*") if "unfinished" in p.name]
    assert steps == (6 if exists else 1)


@pytest.mark.posix
def test_a_folder_in_the_making_of_a_process_that_lives_is_left_alone(tmp_path):
    out = tmp_path / "page"
    with finished_folder(out, PARTS) as other:
        write(out, "new")
        assert other.is_dir()
        (other / "index.html").write_text("x")
        (tmp_path / "page").rename(tmp_path / "elsewhere")


@pytest.mark.posix
@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_leaves_the_old_page_and_is_named(tmp_path, exists):
    """The system stops a file at 4 KiB."""
    out = tmp_path / "page"
    if exists:
        write(out, "old")
    before = content(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write(out, 10_000 * "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(out)
    assert content(tmp_path) == before


@pytest.mark.posix
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"a\.npz: want a file; got a pipe or a device"):
        check_file(tmp_path / "a.npz")
    command = [sys.executable, "-m", "weince", "diagnose", str(tmp_path / "a.npz")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("weince: a.npz: want a file; got a pipe or a device")


def test_an_archive_that_unpacks_to_a_thousand_times_its_size_is_refused_unread(tmp_path):
    """5.8 MiB of zeros, packed, are 6 GB; here a tenth of it."""
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("z_i.npy", "w") as file:
        for _ in range(600):
            file.write(bytes(2**20))
    began, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"bomb\.npz: unpacks from 0\.6 to 600 MiB"):
        check_unpacked(path)
    assert time.perf_counter() - began < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**14  # KiB
    np.savez_compressed(tmp_path / "fine.npz", z=np.zeros((1000, 1000)))
    check_unpacked(tmp_path / "fine.npz")


def test_names_of_other_machines_are_not_swept(tmp_path):
    other = tmp_path / f".page{files._UNFINISHED}elsewhere-1-x"
    other.mkdir()
    write(tmp_path / "page", "new")
    assert other.is_dir()
    assert re.fullmatch(r"\.page-unfinished-\w*-\d+-.*", other.name)
