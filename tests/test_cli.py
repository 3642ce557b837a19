"""The command line: help, bad input, interruptions. Bad input ends with one line, exit code 2 and no files left."""

import argparse
import io
import json
import pickle
import re
import signal
import sys
import time

import numpy as np
import pytest
from diagnose.synthetic import views
from programs import Program, run

from weince.cli import COMMANDS, command_of, main
from weince.cli_sweeps import Compare
from weince.diagnose.report import FORMAT

FAST = ["--bootstraps", "20", "--null-draws", "20", "--tail-bootstraps", "20", "--quick"]


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def wrong_keys(folder):
    return save(folder / "x.npz", a=np.eye(3))


def one_view(folder):
    return save(folder / "x.npz", z_i=views()[0])


def wrong_labels(folder):
    return save(folder / "x.npz", z=views()[0], labels=np.zeros(3, dtype=int))


def few_pairs(folder):
    z_i, z_j = views(pairs=50)
    return save(folder / "x.npz", z_i=z_i, z_j=z_j)


def pickled_npz(folder):
    return save(folder / "x.npz", z_i=np.array([{}, []], dtype=object), z_j=np.zeros((2, 2)))


def pickled_npy(folder):
    path = folder / "x.npy"
    path.write_bytes(pickle.dumps(np.eye(3)))
    return path


def text_npz(folder):
    path = folder / "x.npz"
    path.write_text("no arrays here")
    return path


def truncated(folder):
    z_i, z_j = views()
    path = save(folder / "x.npz", z_i=z_i, z_j=z_j)
    path.write_bytes(path.read_bytes()[:-900])
    return path


def truncated_npy(folder):
    path = folder / "x.npy"
    np.save(path, np.stack(views()))
    path.write_bytes(path.read_bytes()[:5000])
    return path


def truncated_safetensors(folder):
    path = folder / "x.safetensors"
    path.write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")
    return path


def empty_folder(folder):
    (folder / "empty").mkdir()
    return folder / "empty"


def torch_file(folder):
    path = folder / "x.pt"
    path.write_bytes(b"PK")
    return path


def no_tail(folder):
    """One dimension: every cosine is 1 or -1."""
    z = np.where(np.arange(400) % 2, 1.0, -1.0)[:, None]
    return save(folder / "x.npz", z_i=z, z_j=z)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (wrong_keys, "want the keys z_i and z_j"),
        (one_view, "got z_i"),
        (wrong_labels, "labels must have shape (400,)"),
        (few_pairs, "got 50 pairs, which fill 1"),
        (pickled_npz, "pickled objects"),
        (pickled_npy, "pickled objects"),
        (text_npz, "not written by numpy, whatever its name says"),
        (truncated, "cannot be read"),
        (truncated_npy, "cannot be read"),
        (truncated_safetensors, "cannot be read"),
        (empty_folder, "the folder holds no"),
        (torch_file, "or a folder of them; got .pt: safetensors.torch.save_file writes tensors"),
        (no_tail, "so their tail is one point"),
    ],
)
def test_bad_input_ends_in_one_line(make, said, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    path = make(tmp_path / "in")
    assert main(["diagnose", str(path), "--out", str(tmp_path / "out" / "page"), *FAST]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("weince: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert list(tmp_path.glob("out/*")) + list(tmp_path.glob("out/.*")) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch-size", "16"], "a batch needs at least 32 pairs; got 16"),
        (["--batches", "1"], "at least 4 batches"),
        (["--seed", "-1"], "the seed must be at least 0; got -1"),
        (["--trend"], "at least two checkpoints"),
        (["--names", "a", "b"], "want a name for each model, 1 in all; got 2"),
        (["--temperature", "0"], "temperature must be positive"),
    ],
)
def test_bad_options_end_in_one_line(options, said, tmp_path, capsys):
    z_i, z_j = views()
    path = save(tmp_path / "x.npz", z_i=z_i, z_j=z_j)
    assert main(["diagnose", str(path), "--out", str(tmp_path / "page"), *FAST, *options]) == 2
    assert said in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


@pytest.mark.long
def test_the_verdict_is_told_and_notes_beside_an_earlier_report_are_not_removed(tmp_path, capsys):
    z_i, z_j = views()
    path = save(tmp_path / "x.npz", z_i=z_i, z_j=z_j)
    line = ["diagnose", str(path), "--out", str(tmp_path / "page"), *FAST]
    (tmp_path / "page" / "figures").mkdir(parents=True)
    (tmp_path / "page" / "figures" / "earlier.svg").touch()
    (tmp_path / "page" / "index.html").touch()
    (tmp_path / "page" / "summary.json").write_text(json.dumps({"format": FORMAT}))
    assert main(line) == 0  # a folder that holds only a report is replaced
    assert not (tmp_path / "page" / "figures" / "earlier.svg").exists()
    assert (tmp_path / "page" / "index.html").read_text()
    said = json.loads((tmp_path / "page" / "summary.json").read_text())["models"][0]["verdict"]["headline"]
    assert f"x: {said}\n" in capsys.readouterr().err
    (tmp_path / "page" / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert main(line) == 2
    assert "got other files (notes.txt)" in capsys.readouterr().err  # and not the report itself
    assert (tmp_path / "page" / "notes.txt").read_text() == "mine"


def test_help_shows_examples(capsys):
    assert main(["--help"]) == 0
    assert "weince diagnose pairs.npz" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["diagnose", "--help"])
    assert end.value.code == 0
    assert "weince diagnose pairs.npz" in capsys.readouterr().out


def test_every_option_says_what_it_is():
    said = {
        f"{name} {action.dest}": action.help or ""
        for name, command in COMMANDS.items()
        for action in command.parser._actions
        if action.dest != "print_shtab"  # of jsonargparse, not shown
    }
    assert len(said) > 60
    assert [name for name, text in said.items() if not re.match(r"(?!of )\w", text)] == []


def test_an_option_that_is_given_twice_counts_twice():
    """``--set a=1 --set b=2`` is ``--set a=1 b=2``: by argparse's default the first would be lost without a word."""
    command, rest = command_of(["compare", "infonce", "--set", "epochs=2", "--set", "batch=8"])
    assert command.read(rest).set == ["epochs=2", "batch=8"]
    assert command.read([]).set == []
    several = [
        (action.default, action)
        for command in COMMANDS.values()
        for action in command.parser._actions
        if action.option_strings and action.nargs == "+"
    ]
    assert len(several) > 9
    for default, action in several:
        assert isinstance(action, argparse._ExtendAction), action.option_strings
        assert not default, action.option_strings  # it would be extended, not replaced


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "a command is missing: weince train, weince evaluate, "),
        (["bench"], "a command is missing: weince bench loss; see weince --help"),
        (["trian"], "unknown command trian (did you mean train?); see weince --help"),
        (["evaluate"], "the following arguments are required: runs; see weince evaluate --help"),
        (["mine", "--data", "a"], "the following arguments are required: model, out; see weince mine --help"),
        (
            ["diagnose", "a.npz", "--seed", "x"],
            '"seed": expected int. Got x; see weince diagnose',
        ),
        (
            ["completion", "fish"],
            "argument shell: invalid choice: 'fish' (choose from 'bash', 'zsh', 'tcsh')",
        ),
        (["bench", "loss", "more"], "unrecognized arguments: more; see weince bench loss --help"),
    ],
)
def test_a_line_that_no_command_takes_ends_in_one_line(line, said, capsys):
    assert main(line) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"weince: {said}")
    assert errors.count("\n") == 1


def test_the_usage_of_train_has_hyphens_as_its_options_do(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert said.count("--snapshot-every ") == 2
    assert not re.search(r"--[\w.]*_", said)


@pytest.mark.parametrize("package", ["jinja2", "matplotlib", "rich"])
def test_a_missing_package_is_named_with_its_remedy(package, tmp_path):
    z_i, z_j = views()
    save(tmp_path / "x.npz", z_i=z_i, z_j=z_j)
    code = (
        "import sys\n"
        f"found = [name for name in sys.modules if name.partition('.')[0] == {package!r}]\n"
        f"sys.modules.update(dict.fromkeys([*found, {package!r}]))\n"
        "from weince.cli import main; sys.exit(main(['diagnose', 'x.npz']))"
    )
    done = run("-c", code, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"weince: {package} is missing: pip install 'weince[runs]'\n"


def test_the_command_on_a_page_works_in_the_same_folder_and_names_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    monkeypatch.setattr(Compare, "__call__", lambda command, typed: said.append(typed))
    images = tmp_path / "images.npz"
    relative = ["compare", "infonce", "dcl", "--reuse", "strong/runs.jsonl", "--out=../tries"]
    main([*relative, "--data", str(images), f"--add={images}", "--set", f"data={images}", "epochs=2"])
    main(["compare", "dcl", "--data", f"text={images},sts=here/sts.tsv,model={tmp_path}/bert"])
    assert said == [
        "weince compare infonce dcl --reuse strong/runs.jsonl --out=../tries --data images.npz --add=images.npz "
        "--set data=images.npz epochs=2",
        "weince compare dcl --data text=images.npz,sts=here/sts.tsv,model=bert",
    ]


@pytest.mark.posix
def test_a_signal_that_python_swallows_ends_the_command_too(monkeypatch, capsys):
    class Late:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)  # an exception here is printed and ignored

    def work(command, typed):
        Late()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            time.sleep(0.01)
        pytest.fail("the command went on")

    monkeypatch.setattr(Compare, "__call__", work)
    before = sys.unraisablehook
    assert main(["compare", "infonce", "dcl"]) == 130
    assert capsys.readouterr().err == "weince: interrupted, the same command again runs what is missing\n"
    assert sys.unraisablehook is before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
@pytest.mark.posix
def test_an_interrupted_run_leaves_no_page(name, tmp_path):
    number = getattr(signal, name)
    z_i, z_j = views(pairs=2000, dim=16)
    save(tmp_path / "x.npz", z_i=z_i, z_j=z_j)
    process = Program("-m", "weince", "diagnose", "x.npz", "--out", "page", cwd=tmp_path)
    waited = time.monotonic() + 60
    while not list(tmp_path.glob(".page-unfinished-*")) and time.monotonic() < waited:
        time.sleep(0.02)
    assert list(tmp_path.glob(".page-unfinished-*"))
    time.sleep(0.5)
    process.send_signal(number)
    ended = process.wait()
    assert not (tmp_path / "page").exists()
    assert list(tmp_path.rglob("index.html")) == []
    if name != "SIGKILL":
        assert ended.returncode == 130
        assert "interrupted, nothing was written" in ended.stderr
        assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


def test_an_ascii_terminal_does_not_turn_a_finished_command_into_an_error(tmp_path, monkeypatch):
    """The path of the page has an umlaut, which the terminal cannot show."""
    z_i, noise = np.random.default_rng(0).normal(size=(2, 160, 6))
    np.savez(tmp_path / "pairs.npz", z_i=z_i, z_j=z_i + noise)
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "pairs.npz", "--quick", "--names", "modèle", "--out", "größe"]) == 0
    assert streams[0].buffer.getvalue() == b"gr??e/index.html\n"
    streams[1].flush()
    assert b"mod?le: " in streams[1].buffer.getvalue()
    assert (tmp_path / "größe" / "index.html").is_file()
