from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from weince.lab import settings
from weince.lab.configure import LossConfig


@dataclass(frozen=True)
class Run:
    """A run.

    Args:
        epochs: How many passes.
        loss: Which loss; ``preset`` is its name.
    """

    task: Literal["toy"] = "toy"
    epochs: int = 10
    lr: float = 0.1
    fast: bool = True
    loss: LossConfig = LossConfig()
    out: Path | None = None


def read(*arguments):
    return settings.read(Run, arguments, command="weince toy", examples="example:\n  weince toy")


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults():
    assert read() == Run()


def test_the_command_line_wins_over_the_file_wherever_it_names_it(file):
    config = file("epochs: 4\nlr: 3e-4\nloss:\n  temperature: 0.1\n")
    wanted = Run(epochs=3, lr=3e-4, loss=LossConfig(temperature=0.1))
    assert read("--config", config, "--epochs", "3") == wanted
    assert read("--epochs", "3", "--config", config) == wanted
    assert read("--epochs=3", f"--config={config}") == wanted


def test_options_of_every_type():
    run = read("--fast", "false", "--loss.preset", "blend", "--loss.tail.rho0", "0.05", "--out", "there")
    assert run == Run(fast=False, loss=LossConfig("blend", tail={"rho0": 0.05}), out=Path("there"))


def test_options_have_hyphens(capsys):
    wanted = Run(loss=LossConfig(softmax_term=0.5), out=Path("a-b"))
    assert read("--loss.softmax-term", "0.5", "--out=a-b") == wanted
    with pytest.raises(SystemExit):
        read("--help")
    assert "--loss.softmax-term" in capsys.readouterr().out


def test_what_is_dumped_reads_the_same(file):
    run = Run(epochs=2, loss=LossConfig("released", 0.2, tail={"gate": "rho"}), out=Path("there"))
    assert read("--config", file(settings.dump(run))) == run


def test_no_run_changes_what_the_next_one_reads(file):
    config = file("epochs: 4\nloss: {preset: blend, tail: {rho0: 0.05}}")
    wanted = Run(epochs=4, loss=LossConfig("blend", tail={"rho0": 0.05}))
    changed = read("--config", config, "--loss.tail.gate", "rho", "--epochs", "3")
    assert changed == Run(epochs=3, loss=LossConfig("blend", tail={"rho0": 0.05, "gate": "rho"}))
    found = read("--config", config)
    assert found == wanted
    found.loss.tail["rho0"] = 1.0
    assert read("--config", config) == wanted
    assert read("--config", file("epochs: 5")) == Run(epochs=5)


def test_nothing_is_a_value_where_it_may_be(file):
    assert read("--config", file("out: null\nloss: {softmax_term: null, preset: blend}")) == Run(
        loss=LossConfig("blend")
    )


def test_a_folder_does_not_hide_the_configuration_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits_tiny").mkdir()
    assert settings.load("digits_tiny")["data"] == "digits"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epoch", "3"], r"unknown option 'epoch' \(did you mean epochs\?\)"),
        (["--loss.temprature", "1"], r"unknown option 'loss.temprature' \(did you mean loss.temperature\?\)"),
        (["--nosuch", "1"], "unknown option 'nosuch'; known: epochs, fast, loss, loss.beta"),
        (["--epochs", "many"], r'"epochs": expected int. Got many'),
        (["--fast", "perhaps"], r'"fast": expected bool. Got perhaps'),
        (["--loss.preset", "papr"], r"unknown preset 'papr' \(did you mean paper\?\)"),
        (["--config", "nowhere.yaml"], "no such file, and unknown configuration 'nowhere.yaml'"),
        (["--config"], "--config needs a YAML file"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config is for one file; got a.yaml, b.yaml"),
        (["--loss", "paper"], r'"loss": expected keys and values.* Got paper'),
        (
            ["--loss.preset", "paper", "--loss.tail.rho0", "near"],
            "tail: rho0 must be a number or a tensor; got str",
        ),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_wrong_command_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        read(*arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", r"run.yaml: unknown key 'epoch' \(did you mean epochs\?\)"),
        ("loss:\n  temprature: 3", r"unknown key 'loss.temprature' \(did you mean loss.temperature\?\)"),
        ("loss:", r'run.yaml: "loss": expected keys and values. Got None'),
        ("loss: paper", r'run.yaml: "loss": expected keys and values. Got paper'),
        ("epochs:", r'run.yaml: "epochs": expected a value. Got none'),
        ("loss: {tail: null}", r'run.yaml: "loss.tail": expected a value. Got none'),
        ("epochs: 3.5", r'run.yaml: "epochs": expected int. Got 3.5'),
        ("- 1\n- 2", "must hold keys and values; got list"),
        ("a: [", "is not YAML"),
        ("epochs: 3\nlr: 0.1\nepochs: 4", "run.yaml is not YAML: 'epochs' stands twice"),
        ("loss: {preset: infonce, preset: paper}", "run.yaml is not YAML: 'preset' stands twice.* line 1"),
        ("loss: &a {tail: *a}", "run.yaml is not YAML: found unconstructable recursive node"),
        ("", "must hold keys and values; got NoneType"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
        ("loss: {preset: later}", r"run.yaml: unknown preset 'later'"),
    ],
)
def test_a_wrong_file(file, text, message):
    with pytest.raises(ValueError, match=message):
        read("--config", file(text))


def test_help_ends_with_the_example(capsys):
    with pytest.raises(SystemExit):
        read("--help")
    shown = capsys.readouterr().out
    assert "How many passes." in shown
    assert shown.rstrip().endswith("weince toy")


def shown_help(capsys, *arguments):
    with pytest.raises(SystemExit):
        read(*arguments, "--help")
    return " ".join(capsys.readouterr().out.split())


def test_help_shows_what_a_run_would_take(capsys, file):
    assert "How many passes. (default: 10)" in shown_help(capsys)
    shown = shown_help(capsys, "--config", file("epochs: 4\nloss: {temperature: 0.125}"))
    assert "How many passes. (default: 4)" in shown
    assert "For weibit, 1 / beta. (default: 0.125)" in shown
    assert "(default: infonce)" in shown


def test_help_has_no_markup(capsys):
    shown = shown_help(capsys)
    assert "`" not in shown
    assert ":class:" not in shown
    assert "Which loss; preset is its name:" in shown
    assert "by name of weince.TailConfig's fields, for example {gate: rho, rho0: 0.05}" in shown


def test_a_path_is_not_taken_for_a_name(tmp_path):
    with pytest.raises(ValueError, match="no such file, and unknown configuration"):
        settings.load(str(tmp_path / "digits_tiny"))


def test_a_folder_is_claimed_by_one_run(tmp_path):
    settings.claim(Run(epochs=2), tmp_path / "run", free={"fast"})
    assert read("--config", str(tmp_path / "run" / "run.yaml")) == Run(epochs=2)
    settings.claim(Run(epochs=2, fast=False), tmp_path / "run", free={"fast"})
    with pytest.raises(
        ValueError, match=r"holds another run \(epochs 2 -> 3; lr 0.1 -> 0.2\): choose another --out"
    ):
        settings.claim(Run(epochs=3, lr=0.2), tmp_path / "run", free={"fast"})
    assert read("--config", str(tmp_path / "run" / "run.yaml")) == Run(epochs=2, fast=False)


def test_a_file_is_no_folder_for_a_run(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ValueError, match=r"want a folder; got the file .*run: choose another path"):
        settings.claim(Run(), tmp_path / "run", free=())
    assert (tmp_path / "run").read_text() == "mine"


def test_another_run_differs_in_the_settings_that_are_named(tmp_path):
    settings.claim(Run(loss=LossConfig("paper", temperature=0.5)), tmp_path, free=())
    with pytest.raises(ValueError, match=r"holds another run \(loss.temperature 0.5 -> 0.2\)"):
        settings.claim(Run(loss=LossConfig("paper", temperature=0.2)), tmp_path, free=())
    empty = LossConfig("paper", temperature=0.5, tail={"rho0": None})  # an empty value counts as set
    with pytest.raises(ValueError, match=r"holds another run \(loss.tail {} -> {'rho0': None}\)"):
        settings.claim(Run(loss=empty), tmp_path, free=())


def test_a_setting_that_is_newer_than_a_run_had_its_default_there(tmp_path):
    settings.claim(Run(epochs=2), tmp_path, free=())
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("lr:")))
    with pytest.raises(ValueError, match=r"holds another run \(lr 0.1 -> 0.2\)"):
        settings.claim(Run(epochs=2, lr=0.2), tmp_path, free=())
    settings.claim(Run(epochs=2), tmp_path, free=())
    assert "lr: 0.1" in path.read_text()


def test_a_run_with_a_setting_that_this_version_does_not_know_is_another(tmp_path):
    settings.claim(Run(), tmp_path, free=())
    newer = (tmp_path / "run.yaml").read_text() + "later: 5\n"
    (tmp_path / "run.yaml").write_text(newer)
    with pytest.raises(ValueError, match=r"holds another run \(later 5 -> unknown here\): choose another"):
        settings.claim(Run(), tmp_path, free=())
    assert (tmp_path / "run.yaml").read_text() == newer


def test_so_had_one_of_a_group(tmp_path):
    settings.claim(Run(loss=LossConfig(temperature=0.2)), tmp_path, free=())
    path = tmp_path / "run.yaml"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("  engine:")))
    with pytest.raises(ValueError, match=r"holds another run \(loss.engine 'auto' -> 'dense'\)"):
        settings.claim(Run(loss=LossConfig(temperature=0.2, engine="dense")), tmp_path, free=())
    settings.claim(Run(loss=LossConfig(temperature=0.2)), tmp_path, free=())
    assert "  engine: auto" in path.read_text()
