"""A comparison on a real one-machine Slurm cluster: jobs train and time."""

import json

import pytest
from lab.compare.made import CONFIG, config_in
from lab.reproduce import slurm as local

from weince.lab.compare import compare
from weince.lab.reproduce import slurm as ours


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
