"""Tab completion: what a shell offers once it has sourced the script."""

import shutil
import subprocess

import pytest

from weince.cli import main
from weince.lab import settings
from weince.lab.configure import PRESETS
from weince.lab.study.table import named_tables
from weince.lab.tasks.images.config import VisionRun
from weince.lab.tasks.sentences.config import TextRun
from weince.lab.tasks.towers.config import TowersRun

pytest.importorskip("shtab")

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_weince weince "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def offered(tmp_path_factory):
    """A function that returns bash's completions of a command line."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    script = tmp_path_factory.mktemp("completion") / "weince"
    with pytest.MonkeyPatch.context() as patch, script.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0

    def ask(*words, cwd=script.parent):
        line = ["bash", "-c", COMPLETE, "bash", str(script), "weince", *words]
        return subprocess.run(line, capture_output=True, text=True, check=True, cwd=cwd).stdout.split()

    return ask


def test_commands_tables_and_devices(offered):
    commands = ["train", "evaluate", "mine", "compare", "reproduce", "diagnose", "bench", "completion"]
    assert offered("") == commands
    assert offered("reproduce", "") == sorted([*named_tables(), "overhead"])
    assert offered("evaluate", "--device", "") == ["auto", "cpu", "cuda", "mps"]
    assert offered("bench", "loss", "--no") == ["--no-compile"]
    assert offered("completion", "z") == ["zsh"]
    assert offered("compare", "dcl", "") == list(PRESETS)
    assert offered("compare", "--config", "dig") == ["digits_tiny"]


def test_every_setting_of_a_run_is_offered(offered):
    found = offered("train", "--")
    for kind in (VisionRun, TextRun, TowersRun):
        assert {f"--{name.replace('_', '-')}" for name in settings.options(kind)} <= set(found)
    assert {"--config", "--loss.preset", "--loss.tail.gate", "--augment.size", "--max-length"} <= set(found)


def test_values_of_settings(offered):
    assert offered("train", "--loss.preset", "") == list(PRESETS)
    assert offered("train", "--graph", "t") == ["true"]
    assert offered("train", "--config", "") == list(settings.named_configs())


def test_files_and_folders(offered, tmp_path):
    (tmp_path / "pairs.npz").touch()
    (tmp_path / "plain").mkdir()
    assert sorted(offered("diagnose", "p", cwd=tmp_path)) == ["pairs.npz", "plain"]
    assert offered("evaluate", "p", cwd=tmp_path) == ["plain"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "loss.preset" in capsys.readouterr().out
