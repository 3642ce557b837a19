"""Two processes on one global batch give the losses of one process, and restart when one of them dies."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import training
from programs import Program
from training import run, weights, write_data

from weince.lab.configure import LossConfig
from weince.lab.training import checkpoint
from weince.lab.training.log import read_log

EPOCHS = 6
LONG = 30  # long enough to be killed before its end


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The data, and a run of one process on them."""
    folder = tmp_path_factory.mktemp("alone")
    data = write_data(folder)
    run(data, folder / "run", {"epochs": EPOCHS})
    return data, folder / "run"


def start(program, data, out, epochs, devices, preset="released", **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    return Program(*program, training.__file__, data, out, epochs, devices, preset, env=environment)


def start_each(*arguments):
    """Start both processes here, with the variables that the first would give to the second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    where |= {"WORLD_SIZE": "2", "NODE_RANK": "0"}
    return [start([], *arguments, **where, LOCAL_RANK=str(rank)) for rank in range(2)]


def assert_same_run(one, other):
    a, b = (read_log(folder / "log.csv") for folder in (one, other))
    assert [row["epoch"] for row in a] == [row["epoch"] for row in b]
    # Sums over two processes round differently, and training amplifies that, most of all in rho.
    for name, within in (("loss", 2e-5), ("alignment", 2e-4), ("rho", 2e-4)):
        assert [row[name] for row in a] == pytest.approx([row[name] for row in b], rel=within)
    a, b = weights(one), weights(other)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4)


@pytest.mark.posix
def test_two_processes_have_the_losses_of_one(alone, tmp_path):
    data, one = alone
    ended = start([], data, tmp_path / "two", EPOCHS, 2).wait(300)
    assert ended.returncode == 0, ended.stderr
    assert_same_run(one, tmp_path / "two")


@pytest.mark.posix
def test_two_processes_train_the_loss_as_one_does(alone, tmp_path):
    """DDP does not see SigLIP's scale and bias. Adam's running means of their gradients would show a wrong factor."""
    data, _ = alone
    run(data, tmp_path / "one", {"epochs": 2, "loss": LossConfig("siglip")})
    for process in start_each(data, tmp_path / "two", 2, 2, "siglip"):
        ended = process.wait(300)
        assert ended.returncode == 0, ended.stderr
    assert_same_run(tmp_path / "one", tmp_path / "two")
    one, two = (checkpoint.newest(tmp_path / name / "checkpoints").state for name in ("one", "two"))
    torch.testing.assert_close(two["loss"], one["loss"])
    of_model = len(one["optimizer"]["state"]) - 2
    for number in (of_model, of_model + 1):
        mine, theirs = (state["optimizer"]["state"][number]["exp_avg"] for state in (two, one))
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.posix
def test_all_processes_refuse_the_folder_of_another_run(alone):
    """Processes that do not read the folder fail too, instead of waiting for the first."""
    data, one = alone
    ended = start([], data, one, EPOCHS - 1, 2).wait(300)
    errors = ended.stderr
    assert ended.returncode != 0
    assert f"ValueError: {one} holds another run (epochs 6 -> 5)" in errors
    assert f"ValueError: the first process failed: {one} holds another run" in errors
    assert "Connection closed" not in errors
    assert "epochs: 6\n" in (one / "run.yaml").read_text()


@pytest.mark.linux
def test_a_killed_rank_is_restarted_from_the_checkpoint(alone, tmp_path):
    data, one = alone
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                "--max-restarts", "1"]  # fmt: skip
    process = start(torchrun, data, tmp_path / "two", LONG, 1)
    checkpoints = tmp_path / "two" / "checkpoints"
    while not list(checkpoints.glob("step_00000000[2-9].pt")):
        assert process.poll() is None, process.wait()
        time.sleep(0.005)
    victim = _ranks(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    ended = process.wait(300)
    errors = ended.stderr
    assert ended.returncode == 0, errors
    found = re.search(r"going on after epoch (\d+) of 30", errors)
    assert found, errors
    assert int(found.group(1)) >= 2
    rows = read_log(tmp_path / "two" / "log.csv")
    assert [row["epoch"] for row in rows] == list(range(1, LONG + 1))
    # Losses before and after the restart equal those of a run without one.
    wanted = [row["loss"] for row in read_log(one / "log.csv")]
    assert [row["loss"] for row in rows[:EPOCHS]] == pytest.approx(wanted, rel=2e-5)


def _ranks(parent):
    """Ids of the processes that torchrun started, in order."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children]
