"""The list of runs of the study of two towers: settings that exist, and two of them end to end."""

import pytest
from programs import script

from weince.lab import settings
from weince.lab.tasks.towers.config import TowersRun

study = script("research/towers/runs.py")


def test_the_list_has_every_part_and_unknown_losses_are_left_out():
    jobs = study.jobs()
    assert {job.part for job in jobs} == set("abcde")
    names = [(job.part, job.name) for job in jobs]
    assert len(set(names)) == len(names)
    assert len([job for job in jobs if job.part == "a"]) == 12 * 9


def test_every_setting_of_a_run_exists():
    known = settings.options(TowersRun) | {"config": ()}
    for job in study.jobs():
        if job.command == "train":
            assert {part.removeprefix("--") for part in job.arguments[::2]} <= known.keys()


def test_commands_name_places():
    job = study.run("a", "x", "deb", negatives="MINED")
    command = study.command_of(job, study.Path("/o"), {"deb": "/d", "MINILM": "/m", "MINED": "/n"})
    assert command[3:] == [
        "train", "--config", "retrieval", "--model", "/m", "--corpus", "split", "--seed", "7", "--negatives", "/n",
        "--data", "/d", "--out", "/o/a/x",
    ]  # fmt: skip


@pytest.mark.long
def test_the_tiny_runs_end(tmp_path, capsys):
    study.main(["--tiny", "--out", str(tmp_path), "--jobs", "2"])
    assert capsys.readouterr().out.count(": done\n") == 2
    study.main(["--tiny", "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("done before") == 2
    study.main(["--tiny", "--out", str(tmp_path), "--table"])
    assert len(capsys.readouterr().out.splitlines()) == 4
