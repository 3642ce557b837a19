"""A one-machine Slurm cluster for a test: munged, slurmctld and slurmd in the foreground."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={d_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
# A container has neither control groups to itself nor a database for accounts.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=2
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Reason why no cluster can be started here; empty if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed: no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "slurmd wants to be root"


needs_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def cluster(folder: Path, cpus: int = 4) -> Iterator[Path]:
    """Start a cluster and yield the path of its slurm.conf; munge's socket needs a short path of `folder`."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            cpus=cpus,
            ctld_port=free_port(),
            d_port=free_port(),
        )
    )
    environment = {**os.environ, "SLURM_CONF": str(config)}
    munged = ["munged", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    with ExitStack() as running:
        for command in (
            munged,
            ["slurmctld", "-D", "-i", "-f", str(config)],
            ["slurmd", "-D", "-f", str(config)],
        ):
            output = running.enter_context((folder / f"{command[0]}.out").open("wb"))
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            running.callback(end, process)
            if command is munged:
                wait_for((folder / "munge.socket").exists, "munged")
        wait_for(lambda: "idle" in said(["sinfo", "-h", "-o", "%T"], environment), "an idle node")
        running.callback(said, ["scancel", "--me", "--signal=KILL", "--full"], environment)
        yield config


def end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(15)
    process.kill()
    process.wait()


def said(command: list[str], environment: dict[str, str] | None = None) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30).stdout.strip()


def wait_for(happened, what: str, seconds: float = 60.0):
    """Poll until the answer is true, and return it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if answer := happened():
            return answer
        time.sleep(0.1)
    raise TimeoutError(f"{what} did not come within {seconds:.0f} seconds")


@contextmanager
def temporary_cluster() -> Iterator[Path]:
    """A cluster in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="weince-slurm-", dir="/tmp"))
    try:
        with cluster(folder) as config:
            yield config
    finally:
        shutil.rmtree(folder, ignore_errors=True)
