"""A sweep on a real one-machine Slurm cluster completes although jobs are killed and preempted."""

import json
import threading
from types import SimpleNamespace

import pytest
from lab.study import slurm as local
from lab.study.made import compare, reproduce
from lab.study.tables import small_table

from weince.cli import main
from weince.lab.study import slurm as ours
from weince.lab.study.choice_study import ChoiceStudy
from weince.lab.study.plan import plan
from weince.lab.study.provenance import is_done
from weince.lab.study.table import read_table


@pytest.fixture
def cluster(monkeypatch):
    with local.temporary_cluster() as config:
        monkeypatch.setenv("SLURM_CONF", str(config))
        monkeypatch.setattr(ours, "POLL", 0.5)
        yield config.parent


def jobs(out):
    """Job id by folder of the run."""
    path = out / "slurm" / "jobs.json"
    return json.loads(path.read_text()) if path.exists() else {}


def trains(folder):
    """Whether a run has begun its training and not finished it."""
    return (folder / "log.csv").exists() and not (folder / "model.safetensors").exists()


def test_options_of_sbatch_are_read():
    given = {"partition": "gpu", "time": "240", "mem": "4G", "nodes": 2}
    found = ours.sbatch_options({"time": 720, "job_name": "weince"}, given, {*given, "job_name"})
    assert found == {"partition": "gpu", "time": 240, "mem": "4G", "nodes": 2, "job_name": "weince"}
    with pytest.raises(ValueError, match=r"unknown option of Slurm 'partion' \(did you mean partition\?\)"):
        ours.sbatch_options({}, {"partion": "gpu"}, {"partition", "time"})


def commands(folder, monkeypatch, **scripts):
    """Set PATH so that these shell scripts are the only commands."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ({}, "srun, sbatch, squeue"),
        ({"srun": "", "sbatch": ""}, "squeue"),
        ({"srun": "", "squeue": ""}, "sbatch"),
    ],
)
@pytest.mark.posix
def test_without_slurm_there_is_one_clear_message(tmp_path, monkeypatch, there, missing):
    table = small_table(tmp_path)
    commands(tmp_path / "bin", monkeypatch, **there)
    with pytest.raises(ValueError, match=f"^--slurm needs Slurm's commands here; {missing} not found$"):
        reproduce(str(table), out=tmp_path / "out", slurm=True)
    with pytest.raises(ValueError, match=f"{missing} not found$"):
        compare(["infonce"], out=tmp_path / "out", slurm=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.posix
def test_data_that_are_not_there_are_refused_before_jobs_are_submitted(tmp_path, monkeypatch):
    table = small_table(tmp_path)
    commands(tmp_path / "bin", monkeypatch, srun="", sbatch="exit 1", squeue="")
    options = {"out": tmp_path / "out", "slurm": True, "data": "typo.npz"}
    said = "^--data typo.npz: no such path, .*; a path that only the nodes of a cluster have belongs in the config"
    with pytest.raises(ValueError, match=said):
        reproduce(str(table), **options)
    for dry_run in (False, True):
        with pytest.raises(ValueError, match=said):
            compare(["infonce"], dry_run=dry_run, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.posix
def test_a_dry_run_needs_no_cluster(tmp_path, monkeypatch):
    commands(tmp_path / "bin", monkeypatch)
    monkeypatch.setattr(ChoiceStudy, "show", lambda *_: None)
    compare(["infonce"], out=tmp_path / "out", slurm=True, dry_run=True)
    reproduce(str(small_table(tmp_path)), out=tmp_path / "out", slurm=True, dry_run=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.posix
def test_a_submission_that_slurm_refuses_is_an_error_in_a_line(tmp_path, monkeypatch, capsys):
    table = small_table(tmp_path)
    refuse = "echo sbatch: error: invalid partition specified: typo >&2; exit 1"
    commands(tmp_path / "bin", monkeypatch, srun="", sbatch=refuse, squeue="")
    assert main(["reproduce", str(table), "--out", str(tmp_path), "--device", "cpu", "--slurm"]) == 2
    said = "weince: Slurm refused the job, see --slurm-options: sbatch: error: invalid partition specified: typo\n"
    error = capsys.readouterr().err
    assert error.endswith(said)
    assert "stay in the queue" not in error
    with pytest.raises(ValueError, match=r"^Slurm refused the job"):
        ours.call_on_slurm(print, [], out=tmp_path)


@pytest.mark.posix
def test_a_submission_that_is_refused_after_others_says_where_these_are(tmp_path, monkeypatch, capsys):
    """The second job is refused, for example by a limit on the jobs of a user."""
    table = small_table(tmp_path)
    once = f"if [ -e {tmp_path}/one ]; then echo too many jobs >&2; exit 1; fi; : > {tmp_path}/one"
    commands(tmp_path / "bin", monkeypatch, srun="", sbatch=f"{once}; echo Submitted batch job 12", squeue="")
    monkeypatch.setattr(ours, "POLL", 0.0)
    assert main(["reproduce", str(table), "--out", str(tmp_path), "--device", "cpu", "--slurm"]) == 2
    said = capsys.readouterr().err
    assert "jobs that were submitted stay in the queue; the same command finds them\n" in said
    assert said.endswith("weince: Slurm refused the job, see --slurm-options: too many jobs\n")


@pytest.mark.posix
def test_a_queue_that_does_not_answer_at_the_start_is_an_error_at_once(tmp_path, monkeypatch):
    table = small_table(tmp_path)
    mute = "echo slurm_load_jobs error: >&2; echo Unable to contact slurm controller >&2; exit 1"
    commands(tmp_path / "bin", monkeypatch, srun="", sbatch="", squeue=mute)
    monkeypatch.setattr(ours, "time", None)  # a pause would fail
    said = "^--slurm needs squeue, which does not answer: slurm_load_jobs error: Unable to contact slurm controller$"
    with pytest.raises(OSError, match=said):
        reproduce(str(table), out=tmp_path / "out", slurm=True)
    with pytest.raises(OSError, match=said):
        compare(["infonce"], out=tmp_path / "out", slurm=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.posix
def test_a_queue_may_be_silent_for_a_while(tmp_path, monkeypatch):
    once = f"if [ -e {tmp_path}/asked ]; then echo 12_0; echo 12_1; else : > {tmp_path}/asked; exit 1; fi"
    commands(tmp_path / "bin", monkeypatch, squeue=once)
    monkeypatch.setattr(ours, "POLL", 0.0)
    assert ours._queued() == {"12_0", "12_1"}


@local.needs_slurm
@pytest.mark.slurm
def test_an_unknown_option_of_sbatch_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"unknown option of Slurm 'partion' \(did you mean partition\?\)"):
        reproduce(str(small_table(tmp_path)), out=tmp_path, slurm=True, slurm_options={"partion": "gpu"})


@local.needs_slurm
@pytest.mark.slurm
def test_an_array_completes_though_it_is_left_alone_and_jobs_are_killed(tmp_path, cluster, monkeypatch):
    table = small_table(tmp_path, epochs=60)
    runs = plan(read_table(str(table)), tmp_path, device="cpu")
    assert len(runs) == 4
    killed, preempted = runs[1].folder, runs[2].folder
    first: dict[str, str] = {}

    def disturb():
        local.wait_for(lambda: trains(killed), "training", 120)
        first.update(jobs(tmp_path))
        local.said(["scancel", "--signal=KILL", "--full", first[str(killed)]])
        local.wait_for(lambda: trains(preempted), "training", 120)
        local.said(["scancel", "--signal=USR2", first[str(preempted)]])
        # Slurm delays a requeued job by two minutes; start it at once.
        job = first[str(preempted)]
        local.wait_for(
            lambda: "PENDING" in local.said(["squeue", "-h", "-r", "-j", job, "-o", "%T"]), "requeue"
        )
        local.said(["scontrol", "update", f"JobId={job}", "StartTime=now"])

    def sweep():
        few = {"cpus_per_task": "1", "time": "30"}  # strings, as from the command line
        return reproduce(str(table), out=tmp_path, jobs=4, slurm=True, device="cpu", slurm_options=few)

    def leave(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ours, "time", SimpleNamespace(sleep=leave))  # Ctrl-C at the first pause
        with pytest.raises(KeyboardInterrupt):
            sweep()
    submitted = jobs(tmp_path)
    assert len(submitted) == 4
    disturber = threading.Thread(target=disturb)
    disturber.start()
    page = sweep()
    disturber.join()
    assert first == submitted  # the second call found the jobs of the first
    assert page.exists()
    assert all(is_done(run) for run in runs)
    after = jobs(tmp_path)
    assert len({job.partition("_")[0] for job in first.values()}) == 1  # one array
    again = {folder for folder in first if after[folder] != first[folder]}
    assert again == {str(killed)}  # the preempted job kept its number
    for run in runs:
        log = (run.folder / "log.csv").read_text().splitlines()
        assert [line.partition(",")[0] for line in log[1:]] == [str(epoch) for epoch in range(1, 61)]
        starts = (run.folder / "output.txt").read_text().count(" -m weince.lab.study.worker ")
        # There are more than two starts if a job restarts its killed training before it is killed itself.
        assert (starts >= 2) if run.folder in (killed, preempted) else (starts == 1)
