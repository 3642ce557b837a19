import os
import textwrap

import pytest
import torch
from programs import run

from weince import files
from weince.lab.training import checkpoint
from weince.lab.training.optimizers import restore


def state(number):
    return {"weights": torch.full((100,), float(number)), "epoch": number, "losses": [0.5, 0.25]}


def test_the_newest_of_the_last_two_comes_back(tmp_path):
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, step, state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000002.pt", "step_000000010.pt"]
    found = checkpoint.newest(tmp_path)
    assert found.step == 10
    assert found.state["epoch"] == 10
    assert torch.equal(found.state["weights"], torch.full((100,), 10.0))


def test_nothing_there_is_none(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.9, 0.999])
def test_a_truncated_checkpoint_falls_back_with_a_warning(tmp_path, share):
    checkpoint.save(tmp_path, 1, state(1))
    newest = checkpoint.save(tmp_path, 2, state(2))
    whole = newest.read_bytes()
    newest.write_bytes(whole[: int(share * len(whole))])
    with pytest.warns(UserWarning, match=r"step_000000002.pt cannot be read .*going back"):
        found = checkpoint.newest(tmp_path)
    assert found.step == 1


def test_no_readable_checkpoint_is_an_error(tmp_path):
    checkpoint.save(tmp_path, 1, state(1)).write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(OSError, match="none of the 1 checkpoints"),
    ):
        checkpoint.newest(tmp_path)


def test_a_checkpoint_that_would_run_code_is_not_loaded(tmp_path):
    class Bad:
        def __reduce__(self):
            return (exec, ("raise SystemExit('ran')",))

    torch.save({"bad": Bad()}, tmp_path / "step_000000001.pt")
    with pytest.warns(UserWarning, match="cannot be read"), pytest.raises(OSError, match="none of the 1"):
        checkpoint.newest(tmp_path)


@pytest.mark.posix
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path):
    """A limit on the file size stands in for a full disk: both fail in the middle of a write."""
    program = textwrap.dedent("""
        import resource, signal, sys, pathlib, torch
        from weince.lab.training import checkpoint
        folder = pathlib.Path(sys.argv[1])
        checkpoint.save(folder, 1, {"weights": torch.zeros(100)})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            checkpoint.save(folder, 2, {"weights": torch.zeros(1_000_000)})
        except OSError as error:
            print(error)
    """)
    done = run("-c", program, tmp_path)
    assert "could not be written" in done.stdout
    assert "Is the disk full?" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000001.pt"]
    assert checkpoint.newest(tmp_path).step == 1


def test_the_state_of_another_optimizer_does_not_fit(tmp_path):
    one, two = torch.ones(1), torch.ones(2)
    saved = torch.optim.Adam([{"params": [one]}, {"params": [two]}]).state_dict()
    with (
        pytest.raises(ValueError, match=r"the checkpoints in .* do not fit this run \(ValueError: .*choose"),
        checkpoint.fitting(tmp_path),
    ):
        restore(torch.optim.Adam([one, two]), saved)


@pytest.mark.posix
def test_others_may_read_what_was_written(tmp_path):
    assert checkpoint.save(tmp_path, 1, state(1)).stat().st_mode & 0o777 == 0o644


def test_what_a_kill_left_in_the_middle_of_a_write_goes(tmp_path):
    (tmp_path / ".step_000000001.pt.abc.part").write_bytes(b"half")
    checkpoint.save(tmp_path, 2, state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000002.pt"]


def test_a_file_is_on_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    """After a power failure, no file may be empty under its final name."""
    order = []
    monkeypatch.setattr(
        files.os, "fsync", lambda handle, real=os.fsync: (order.append("fsync"), real(handle))
    )
    monkeypatch.setattr(
        files.os, "replace", lambda a, b, real=os.replace: (order.append("replace"), real(a, b))
    )
    files.write_aside(tmp_path / "x", lambda part: part.write_text("whole"))
    assert order == ["fsync", "replace"]
    assert (tmp_path / "x").read_text() == "whole"
