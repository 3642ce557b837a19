"""A comparison on Slurm: on a real one-machine cluster jobs train and time; a timing job that is refused."""

import json

import pytest
from lab.study import slurm as local
from lab.study.made import CONFIG, compare, comparison_of, config_in, fill

from weince.lab.study import slurm as ours
from weince.lab.study.comparison import write_comparison


@local.needs_slurm
@pytest.mark.slurm
def test_runs_and_costs_come_from_jobs(tmp_path, monkeypatch, capfd):
    config = config_in(tmp_path, CONFIG.replace("epochs: 4", "epochs: 1"))
    with local.temporary_cluster() as slurm_conf:
        monkeypatch.setenv("SLURM_CONF", str(slurm_conf))
        monkeypatch.setattr(ours, "POLL", 0.5)
        page = compare(["infonce", "dcl"], config=config, tries=1, seeds=2, jobs=2, slurm=True, device="cpu",
                       slurm_options={"cpus_per_task": "1", "time": "30"}, out=tmp_path / "out")  # fmt: skip
    found = json.loads((page.parent / "compare.json").read_text())
    assert all(line["cost"]["loss_ms"] > 0 for line in found["losses"])
    assert "not timed" not in capfd.readouterr().err
    submitted = list((tmp_path / "out" / "slurm").glob("*_submitted.pkl"))
    assert len({path.name for path in submitted}) == 5  # two runs of each loss and one timing job


@pytest.mark.posix
def test_a_timing_job_that_slurm_refuses_does_not_cost_the_page(tmp_path, monkeypatch, capsys):
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl", seeds=[7, 21])
    write_comparison(comparison, tmp_path / comparison.name)
    fill(comparison, tmp_path)
    (tmp_path / "bin").mkdir()
    refuse = "echo sbatch: error: too many jobs >&2; exit 1"
    for name, script in {"srun": "", "squeue": "", "sbatch": refuse}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    page = compare(out=tmp_path, slurm=True)
    assert "the losses were not timed alone" in page.read_text()
    said = capsys.readouterr().err
    assert "Slurm refused the job, see --slurm-options: sbatch: error: too many jobs\n" in said
    assert "not timed: dcl, infonce; the same command tries again\n" in said
