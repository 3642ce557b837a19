"""What a study leaves when it is killed, and what two studies at once do to each other."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lab.study.made import CONFIG, compare, comparison_of, config_in, fill, reproduce
from lab.study.tables import small_table
from programs import Program

from weince.lab.study import process
from weince.lab.study.choice_study import ChoiceStudy
from weince.lab.study.comparison import write_comparison
from weince.lab.study.plan import plan
from weince.lab.study.process import Interrupted, carry_out_run
from weince.lab.study.study import Execution
from weince.lab.study.table import read_table
from weince.lab.training.processes import waiting_lock


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(happened, seconds=60.0):
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def workers(folder):
    """Processes of runs in a folder."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "weince.lab.study.worker" in words and any(word.startswith(str(folder)) for word in words):
                found.append(int(pid))
    return found


@pytest.mark.linux
def test_the_processes_of_a_study_that_is_killed_end_with_it(tmp_path):
    """They went on training, and the next call waited for them."""
    config = config_in(tmp_path, CONFIG.replace("epochs: 4", "epochs: 400"))
    study = Program("-m", "weince", "compare", "infonce", "dcl", "--config", config, "--tries", "1", "--seeds", "1",
                    "--jobs", "2", "--device", "cpu", "--out", tmp_path / "out")  # fmt: skip
    wait_until(lambda: len(list(tmp_path.glob("out/runs/*/*/*/log.csv"))) == 2)
    pids = workers(tmp_path)
    assert len(pids) == 2
    study.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)), 10.0)


@pytest.mark.posix
def test_a_process_ends_with_those_of_its_group_when_its_starter_is_gone(tmp_path):
    code = (
        "import os, time\nfrom weince.lab.training.processes import end_with_parent\n"
        "end_with_parent()\nchild = os.fork()\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)"  # one write
    )
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    both = {int(program.stdout.readline()) for _ in range(2)}
    assert all(map(alive, both))
    program.stdin.close()  # as a killed process does
    wait_until(lambda: not any(map(alive, both)), 10.0)
    program.wait()
    program.stdout.close()


def test_who_waits_for_a_run_says_for_whom(tmp_path):
    """A second study said only that the run was started."""
    run = plan(read_table(str(small_table(tmp_path))), tmp_path, device="cpu")[0]
    run.folder.mkdir(parents=True)
    (run.folder / ".lock").write_text("process 1234 on another host")
    stop, told = threading.Event(), []

    def tell(run, state):
        told.append(state)
        stop.set()

    with waiting_lock(run.folder / ".lock", lambda: None), pytest.raises(Interrupted):
        carry_out_run(run, stop, tell=tell)
    assert told == ["waiting for process 1234 on another host, which works on"]


def test_the_lock_of_a_run_names_its_holder(tmp_path, monkeypatch):
    run = plan(read_table(str(small_table(tmp_path))), tmp_path, device="cpu")[0]
    seen = []
    monkeypatch.setattr(
        process, "commands", lambda run: seen.append((run.folder / ".lock").read_text()) or []
    )
    monkeypatch.setattr(process, "sign", lambda *_: None)
    carry_out_run(run)
    assert seen[0].startswith(f"process {os.getpid()} on ")


def test_the_page_of_a_second_call_is_not_overwritten_by_an_earlier_one_that_ends_later(tmp_path):
    """The first call compares two losses; before it ends, another adds a third and a seed."""
    config = config_in(tmp_path)
    first = comparison_of(config, "infonce", "dcl", seeds=[7])
    fill(first, tmp_path)
    write_comparison(first, tmp_path / first.name)
    earlier = ChoiceStudy(first, tmp_path, Execution())
    more = comparison_of(config, "infonce", "dcl", "hcl", seeds=[7, 21])
    fill(more, tmp_path)
    compare(["hcl"], config=config, tries=2, seeds=2, out=tmp_path, table_only=True)
    page = earlier.write(saved=True)
    found = json.loads((page.parent / "compare.json").read_text())
    assert {line["loss"] for line in found["losses"]} == {"infonce", "dcl", "hcl"}
    assert found["facts"]["seeds"] == "7, 21"
    assert found["missing"] == []


def test_data_that_cannot_be_had_are_told_once_before_the_first_run_of_a_table(tmp_path, monkeypatch, capsys):
    """Every run started, tried the download and failed."""
    monkeypatch.setenv("WEINCE_DATA", str(tmp_path / "cache"))
    table = str(small_table(tmp_path))
    with pytest.raises(ValueError, match=r"Imagenet32_train_npz\.zip is given to registered users"):
        reproduce(table, out=tmp_path / "out", data="imagenet32", device="cpu")
    assert not (tmp_path / "out").exists()
    assert "started" not in capsys.readouterr().err
