"""Calls that cannot work: each ends with status 2 and one line that says why, and writes nothing."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from diagnose.synthetic import views
from PIL import Image

from weince.cli import main
from weince.cli_runs import Evaluate
from weince.lab import configure

SMALL = ["--device", "cpu", "--epochs", "1", "--batch", "16", "--augment.size", "16"]
TABLE = {
    "title": "title: x",
    "figures": "figures: [linear]",
    "rows": "rows: [digits_tiny]",
    "seeds": "seeds: [1]",
    "baseline": "baseline: A",
    "losses": "losses: {A: {set: {loss.preset: infonce}}}",
}


def images(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def write_images(folder):
    """Files and folders that cannot be trained on or evaluated, each for another reason."""
    for name, content in {"text.npz": "no arrays", "empty.npz": "", "notes.txt": "hello"}.items():
        (folder / name).write_text(content)
    np.savez(folder / "floats.npz", train_images=np.ones((40, 8, 8, 3)))
    np.savez(folder / "flat.npz", train_images=images(40, 8))
    np.savez(folder / "pickled.npz", train_images=np.array([{}, []], dtype=object))
    np.savez(folder / "none.npz", train_images=images(0, 8, 8, 3))
    split = {"train_images": images(60, 16, 16, 3), "test_images": images(20, 16, 16, 3)}
    np.savez(folder / "unlabelled.npz", **split)
    two = {"train_labels": np.arange(60) % 2, "test_labels": np.arange(20) % 2}
    np.savez(folder / "labelled.npz", **split, **two)
    np.savez(folder / "words.npz", **split, **{key: value.astype(str) for key, value in two.items()})
    np.savez(folder / "one_name.npz", **split, **two, class_names=np.array("cat"))
    np.savez(folder / "one_class.npz", **split, **{key: 0 * value for key, value in two.items()})
    for name in ("empty", "classes/a", "broken", "single"):
        (folder / name).mkdir(parents=True)
    (folder / "broken" / "0.png").write_text("no picture")
    Image.fromarray(images(8, 8, 3)).save(folder / "single" / "0.png")


def write_settings(folder):
    """Settings and tables that are wrong, each for another reason."""
    files = {
        "cut.yaml": "a: [1,", "list.yaml": "- 1", "many.yaml": "epochs: many", "nothing.yaml": "",
        "twice.yaml": "epochs: 1\nepochs: 2", "null.yaml": "epochs:", "group.yaml": "loss: paper",
        "task.yaml": "task: audio", "number.yaml": "loss: {preset: paper, tail: {1: 2}}",
        "date.yaml": "epochs: 2020-01-01", "deep.yaml": "[" * 5000, "maybe.yaml": "graph: 3",
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "bytes.yaml").write_bytes(bytes(range(256)))
    tables = {
        "t_title": "title: [1]", "t_rows": "rows: 3", "t_row": "rows: [nosuch]", "t_tries": "tries: [[1]]",
        "t_set": "set: {1: 2}", "t_empty": "set: {'': 2}", "t_seeds": "seeds: [[1]]", "t_loss": "losses: {A: 3}",
        "t_name": "losses: {A: {set: {1: 2}}}", "t_preset": "losses: {A: {set: {loss.preset: nosuch}}}",
        "t_try": "tries: [{1: 2}]",
    }  # fmt: skip
    for name, content in tables.items():
        lines = {**TABLE, content.partition(":")[0]: content}
        (folder / f"{name}.yaml").write_text("\n".join(lines.values()))


def write_runs(folder):
    """Runs of one epoch: intact ones, and copies with one damaged file."""
    cwd = os.getcwd()
    os.chdir(folder)
    for data, out in (("labelled", "run"), ("unlabelled", "without_labels"), ("one_class", "one_class")):
        assert main(["train", "--data", f"{data}.npz", *SMALL, "--out", out]) == 0
    os.chdir(cwd)

    def spoiled(name, path, content):
        shutil.copytree(folder / "run", folder / name)
        for file in (folder / name).glob(path):
            content(file)

    spoiled("no_weights", "model.safetensors", lambda file: file.unlink())
    spoiled("bad_weights", "model.safetensors", lambda file: file.write_bytes(b"junk"))
    spoiled("cut_log", "log.csv", lambda file: file.write_text("garbage\n1\n"))
    spoiled("word_log", "log.csv", lambda file: file.write_text("epoch,loss\nx,y\n"))
    spoiled("byte_log", "log.csv", lambda file: file.write_bytes(bytes(range(128, 256))))
    spoiled("bad_states", "checkpoints/*", lambda file: file.write_bytes(b"junk"))
    spoiled("other_states", "checkpoints/*", lambda file: torch.save({"a": 1}, file))
    spoiled("other_model", "checkpoints/*", lambda file: torch.save({"model": {"a": torch.ones(1)}}, file))
    spoiled("no_states", "checkpoints/*", lambda file: torch.save(torch.ones(3), file))
    spoiled(
        "no_images", "run.yaml", lambda f: f.write_text(f.read_text().replace("labelled.npz", "gone.npz"))
    )
    for name, content in {
        "empty_run": b"",
        "list_run": b"- 1",
        "odd_run": b"nosuch: 1",
        "byte_run": b"\xff",
    }.items():
        (folder / name).mkdir()
        (folder / name / "run.yaml").write_bytes(content)


def write_text(folder):
    (folder / "one.txt").write_text("a sentence\n")
    (folder / "two.txt").write_text("a sentence\nanother\n")
    heading = "task\tsubset\tsplit\tscore\ts1\ts2\n"
    (folder / "sts.tsv").write_text(f"{heading}STSB\tx\tdev\t1\ta\tb\nSTSB\tx\tdev\t2\tc\td\n")
    (folder / "score.tsv").write_text(f"{heading}STSB\tx\ttest\thigh\ta\tb\n")
    (folder / "heading.tsv").write_text("hello\n")
    (folder / "pairs.tsv").write_text("query\tpositive\na\tb\nc\td\n")
    for name, config in {"model": "{}", "bad_model": "no json"}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
    for name, modules in {"sentence_model": "[]", "bad_sentence_model": "no json"}.items():
        (folder / name).mkdir()
        (folder / name / "modules.json").write_text(modules)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    for write in (write_images, write_settings, write_runs, write_text):
        write(folder)
    z_i, z_j = views()
    np.savez(folder / "pairs.npz", z_i=z_i, z_j=z_j)
    return folder


def listing(folder):
    return sorted(str(path) for path in folder.rglob("*"))


TRAIN = [
    (["--config", "nosuch"], "no such file, and unknown configuration 'nosuch'; known: "),
    (["--config"], "--config needs a YAML file after it"),
    (["--config", "cut.yaml"], "cut.yaml is not YAML: "),
    (["--config", "bytes.yaml"], "bytes.yaml is not YAML: "),
    (["--config", "deep.yaml"], "deep.yaml is not YAML: maximum recursion depth exceeded"),
    (["--config", "list.yaml"], "list.yaml must hold keys and values; got list"),
    (["--config", "nothing.yaml"], "nothing.yaml must hold keys and values; got NoneType"),
    (["--config", "many.yaml"], 'many.yaml: "epochs": expected int. Got many'),
    (["--config", "date.yaml"], 'date.yaml: "epochs": expected int. Got 2020-01-01'),
    (["--config", "twice.yaml"], "twice.yaml is not YAML: 'epochs' stands twice"),
    (["--config", "null.yaml"], 'null.yaml: "epochs": expected a value. Got none'),
    (["--config", "group.yaml"], 'group.yaml: "loss": expected keys and values. Got paper'),
    (["--config", "task.yaml"], "unknown task 'audio'; known: vision, text"),
    (["--config", "number.yaml"], "number.yaml: unknown field of tail '1'; known: k, "),
    (["--config", "maybe.yaml"], 'maybe.yaml: "graph": expected bool or null. Got 3'),
    (["--graph", "maybe"], '"graph": expected bool or null. Got maybe'),
    (["--epochs", "1.5"], '"epochs": expected int. Got 1.5'),
    (["--epochs"], "argument --epochs: expected one argument"),
    (["extra"], "unrecognized arguments: extra"),
    (["--batch", "100000"], "a batch of 100000 needs as many images; got 1442 in digits"),
    (["--projection", "9" * 20], f"projection must be below 2**31; got {'9' * 20}"),
    (["--seed", "9" * 20], f"seed must be below 2**63; got {'9' * 20}"),
    (["--augment.size", "1000000"], "not enough memory for 4.79 PiB: ask for less at once"),
    (["--loss.preset", "nosuch"], "unknown preset 'nosuch'; known: infonce, "),
    (["--loss", "nosuch"], '"loss": expected keys and values, such as those of --help. Got nosuch'),
    (["--loss.engine", "nosuch"], "\"loss.engine\": expected one of ['auto', "),
    (["--loss.engine", "fused"], "the loss fails on random embeddings (256, 64): RuntimeError: "),
    (
        ["--loss.preset", "paper", "--loss.tail.k", "abc"],
        "tail: k must be an int or a share in (0, 1]; got 'abc'",
    ),
    (["--data", "nowhere"], "no data 'nowhere': give one of digits, "),
    (["--data", "notes.txt"], "notes.txt is neither an .npz, nor a folder, nor an official archive"),
    (["--data", "text.npz"], "text.npz cannot be used: it holds pickled objects, or is not an .npz"),
    (["--data", "pickled.npz"], "pickled.npz cannot be used: it holds pickled objects, or is not an .npz"),
    (["--data", "empty.npz"], "empty.npz cannot be used: No data left in file"),
    (["--data", "floats.npz"], "floats.npz: train_images must be uint8; got float64"),
    (["--data", "flat.npz"], "flat.npz: train_images must be (n, height, width, 3)"),
    (["--data", "none.npz"], "none.npz: train_images must be (n, height, width, 3)"),
    (["--data", "words.npz"], "words.npz: train_labels must be integers of shape (60,); got <U"),
    (["--data", "one_name.npz"], "one_name.npz: train_labels go from 0 to 1, the classes from 0 to 0"),
    (
        ["--data", "empty"],
        "empty has neither images (.png, .jpg, .jpeg, .bmp, .webp) nor folders of them by class",
    ),
    (["--data", "classes"], "classes/a has no images"),
    (["--data", "broken"], "broken/0.png cannot be read as an image: "),
    (["--data", "single"], "single: 2 images are needed, one of them to be held out; got 1"),
    (["--data", "unlabelled.npz"], "a batch of 256 needs as many images; got 60 in unlabelled"),
    (["--data", ""], "nothing is given after --data"),
    (["--data="], "nothing is given after --data"),
    (["--encoder", "nosuch"], "unknown encoder 'nosuch': there are resnet18, "),
    (["--device", "tpu"], "device must be auto, cpu, cuda or mps; got 'tpu'"),
    (["--graph", "true"], "graph needs one process on one GPU"),
    (["--out", "notes.txt"], "want a folder; got the file notes.txt: choose another path"),
    (["--out", ""], "nothing is given after --out"),
    (["--out", "list_run"], "list_run/run.yaml must hold keys and values; got list"),
    (["--out", "byte_run"], "byte_run/run.yaml is not YAML: "),
    (["--config", "simcse_paper", "--text", "nosuch"], "no such text file: nosuch"),
    (
        ["--config", "simcse_paper", "--sts", "heading.tsv"],
        "heading.tsv: want the columns task, subset, split",
    ),
    (
        ["--config", "simcse_paper", "--sts", "score.tsv"],
        "score.tsv, line 2: the score must be a number; got 'high'",
    ),
    (["--config", "simcse_paper", "--model", "./nosuch"], "no such model folder: ./nosuch"),
    (["--config", "simcse_paper", "--device", "tpu"], "device must be auto, cpu, cuda or mps; got 'tpu'"),
]
RESUMED = [
    ("no_weights", ["--seed", "8"], "no_weights holds another run (seed 7 -> 8): choose another --out"),
    ("bad_states", [], "none of the 1 checkpoints in bad_states/checkpoints can be read; remove them"),
    (
        "other_states",
        [],
        "the checkpoints in other_states/checkpoints do not fit this run (ValueError: another version",
    ),
    (
        "other_model",
        [],
        "the checkpoints in other_model/checkpoints do not fit this run (RuntimeError: Error(s)",
    ),
    (
        "no_states",
        [],
        "the checkpoints in no_states/checkpoints do not fit this run (ValueError: another version",
    ),
    ("cut_log", [], "cut_log/log.csv is damaged (no column epoch): remove it to go on without its rows"),
    ("word_log", [], "word_log/log.csv is damaged (could not convert string to float: 'x'): remove it"),
    ("byte_log", [], "byte_log/log.csv is damaged ('utf-8' codec can't decode byte"),
]
OTHERS = [
    (["evaluate", "empty_run"], "empty_run/run.yaml must hold keys and values; got NoneType"),
    (["evaluate", "odd_run"], "odd_run/run.yaml: unknown key 'nosuch'; known: augment, "),
    (["evaluate", "byte_run"], "byte_run/run.yaml is not YAML: "),
    (["evaluate", "notes.txt"], "notes.txt is not the folder of a run: it has no run.yaml"),
    (["evaluate", "no_weights"], "no_weights has no model.safetensors yet: the run is not finished"),
    (["evaluate", "bad_weights"], "bad_weights/model.safetensors cannot be read as weights"),
    (["evaluate", "no_images"], "no data 'gone.npz': give one of digits, "),
    (
        ["evaluate", "without_labels"],
        "unlabelled has no labels, which an evaluation needs: give labelled images",
    ),
    (["evaluate", "run", "--data", "unlabelled.npz"], "unlabelled has no labels, which an evaluation needs"),
    (["evaluate", "one_class"], "an evaluation needs two classes or more; got one in one_class"),
    (["evaluate", "run", ""], "nothing is given after run"),
    (["evaluate", "run", "--sts", "nosuch.tsv"], "no such STS file: nosuch.tsv"),
    (["evaluate", "run", "--sts", "sts.tsv"], "run is no model's folder: it holds no config.json"),
    (["reproduce"], "reproduce wants a TABLE: a name of weince reproduce --list, or a YAML file"),
    (["reproduce", "linaer"], "unknown table 'linaer' (did you mean linear?), or a YAML file"),
    (["reproduce", "nosuch.yaml"], "nosuch.yaml: no such table file"),
    (["reproduce", "cut.yaml"], "cut.yaml is not YAML: "),
    (["reproduce", "list.yaml"], "list.yaml: wanted keys and values for a table; got [1]"),
    (["reproduce", "t_title.yaml"], "t_title.yaml: title must be a str; got [1]"),
    (["reproduce", "t_rows.yaml"], "t_rows.yaml: rows must be a list; got 3"),
    (["reproduce", "t_row.yaml"], "no such file, and unknown configuration 'nosuch'"),
    (["reproduce", "t_tries.yaml"], "t_tries.yaml: a try must map settings to values"),
    (["reproduce", "t_try.yaml"], "t_try.yaml: a try of A must map names of settings to values"),
    (["reproduce", "t_set.yaml"], "t_set.yaml: set must map names of settings to values"),
    (["reproduce", "t_empty.yaml"], "t_empty.yaml: set must map names of settings to values"),
    (["reproduce", "t_name.yaml"], "t_name.yaml: set of A must map names of settings to values"),
    (["reproduce", "t_seeds.yaml"], "t_seeds.yaml: seeds must be integers; got [1]"),
    (["reproduce", "t_loss.yaml"], "t_loss.yaml: wanted keys and values for a loss; got 3"),
    (["reproduce", "t_preset.yaml"], "digits_tiny, A: unknown preset 'nosuch'; known: infonce, "),
    (["reproduce", "digits", "--jobs", "0"], "jobs must be at least 1; got 0"),
    (["reproduce", "digits", "--epochs", "0"], "digits_tiny, InfoNCE: epochs must be at least 1; got 0"),
    (["reproduce", "digits", "--data", "nowhere"], "--data nowhere: no such path, nor a data set (digits, "),
    (["reproduce", "digits", "--out", ""], "nothing is given after --out"),
    (["diagnose", "nowhere"], "nowhere: no such file or folder"),
    (["diagnose", "notes.txt"], "notes.txt: want a file ending in .npz, .npy, .safetensors"),
    (["diagnose", "no_weights"], "no_weights has no model.safetensors yet: the run is not finished"),
    (
        ["diagnose", "without_labels"],
        "without_labels: want 4 batches of 32 pairs, two to fit the link and two to judge it; got 20",
    ),
    (
        ["diagnose", "pairs.npz", "--quantile", "nan"],
        '"quantile": expected float. Got nan; see weince diagnose --help',
    ),
    (["diagnose", "pairs.npz", "--bootstraps", "0"], "every number of bootstraps must be at least 10; got 0"),
    (
        ["diagnose", "pairs.npz", "--out", "run"],
        "run: want a new folder, an empty one or an earlier diagnosis; got other files (checkpoints)",
    ),
    (
        ["diagnose", "--model", "model", "--pairs", "pairs.tsv"],
        "model: want a sentence-transformers model; got a path without modules.json",
    ),
    (
        ["diagnose", "--model", "./gone", "--pairs", "pairs.tsv"],
        "./gone: no such folder; want one of a sentence-transformers model",
    ),
    (["bench", "loss", "--d", "0"], "wanted pairs of at least 2, d and repeats of at least 1"),
    (
        ["bench", "loss", "--d", "9" * 20],
        f"pairs and d must be below 2**31; got [256, 1024, 4096], {'9' * 20}",
    ),
    (["bench", "loss", "--device", "cpu:x"], "device must be auto, cpu, cuda or mps; got 'cpu:x'"),
    (["bench", "loss", "--dtype", "int8"], "dtype must be float32, bfloat16, float16 or float64; got 'int8'"),
]


def ends_in_one_line(line, said, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    before = listing(place)
    assert main(line) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("weince: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"weince: {said}")
    assert listing(place) == before


@pytest.mark.parametrize(
    ("options", "said"), TRAIN, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_training_that_cannot_begin(options, said, place, capsys, monkeypatch):
    given = {"--device": "cpu", "--model": "model", "--sts": "sts.tsv", "--text": "two.txt"}
    if "simcse_paper" not in options:
        given = {"--device": "cpu"} if "--config" not in options else {}
    usual = [part for name, value in given.items() if name not in options for part in (name, value)]
    ends_in_one_line(["train", *usual, *options], said, place, capsys, monkeypatch)


@pytest.mark.parametrize(("run", "options", "said"), RESUMED, ids=[run for run, *_ in RESUMED])
@pytest.mark.filterwarnings("ignore:.*cannot be read", "ignore:Using a non-tuple sequence")
def test_a_run_that_cannot_be_resumed(run, options, said, place, capsys, monkeypatch):
    line = ["train", "--data", "labelled.npz", *SMALL, *options, "--out", run]
    ends_in_one_line(line, said, place, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("line", "said"), OTHERS, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_other_commands_that_cannot_begin(line, said, place, capsys, monkeypatch):
    ends_in_one_line(line, said, place, capsys, monkeypatch)


@pytest.mark.parametrize("model", ["sentence_model", "bad_sentence_model"])
def test_a_broken_sentence_encoder(model, place, capsys, monkeypatch):
    pytest.importorskip("sentence_transformers")
    line = ["diagnose", "--model", model, "--pairs", "pairs.tsv"]
    ends_in_one_line(line, f"{model}: the model cannot be loaded (", place, capsys, monkeypatch)


@pytest.mark.parametrize("model", ["model", "bad_model"])
def test_a_broken_encoder(model, place, capsys, monkeypatch):
    pytest.importorskip("transformers")
    line = ["train", "--config", "simcse_paper", "--text", "two.txt", "--sts", "sts.tsv", "--model", model]
    ends_in_one_line(line, f"cannot load model '{model}' from the folder: ", place, capsys, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["nosuch"],
        ["evaluate"],
        ["evaluate", "run", "--device", "tpu"],
        ["evaluate", "run", "--nosuch"],
        ["reproduce", "digits", "--jobs", "x"],
        ["reproduce", "digits", "--seeds"],
        ["bench"],
        ["bench", "loss", "--pairs", "x"],
        ["completion", "fish"],
    ],
    ids=" ".join,
)
def test_calls_that_cannot_be_read_end_with_one_line(line, capsys):
    assert main(line) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("weince: ")
    assert re.search(r"; see weince( \w+)* --help$", error)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "compare infonce --confg digits_tiny",
            "unknown option --confg (did you mean --config?); see weince compare",
        ),
        (
            "compare infonce --epochs 1",
            "unknown option --epochs: give a setting of all runs as --set epochs=VALUE;",
        ),
        (
            "compare dcl --optimizer.lr=1",
            "unknown option --optimizer.lr: give a setting of all runs as --set optimizer.lr=VALUE; see weince",
        ),
        ("compare infonce --loss.temperature 1", "unknown option --loss.temperature; see weince compare"),
        ("diagnose x.npz --temprature=0.5", "unknown option --temprature (did you mean --temperature?)"),
        (
            "compare infonce --seed 3 --table-only",  # one seed of weince train, a count as --seeds
            "unknown option --seed (did you mean --seeds?); see weince compare",
        ),
        ("diagnose x.npz --temp 0.5", "unknown option --temp (did you mean --temperature?)"),
        (
            "bench loss --repaets 3",
            "unknown option --repaets (did you mean --repeats?); see weince bench loss",
        ),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest_one(line, said, capsys):
    assert main(line.split()) == 2
    assert capsys.readouterr().err.startswith(f"weince: {said}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "runs/a/log.csv"), "runs/a/log.csv: No space left on device"),
        (MemoryError(), "not enough memory: ask for less at once"),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2560 bytes. Error code"
            ),
            "not enough memory for 2560 bytes: ask for less at once",
        ),
        (OverflowError("int too large\nto convert"), "int too large to convert"),
        (
            ModuleNotFoundError("x", name="tensorboard.a"),
            "tensorboard is missing: pip install 'weince[tensorboard]'",
        ),
        (ModuleNotFoundError("x", name="submitit"), "submitit is missing: pip install 'weince[slurm]'"),
        (ModuleNotFoundError("x", name="pooch"), "pooch is missing: pip install 'weince[runs]'"),
        (ImportError("encoders need pip install 'weince[text]'"), "encoders need pip install 'weince[text]'"),
    ],
)
def test_what_the_machine_cannot_do_or_lacks_is_said_in_one_line(error, said, monkeypatch, capsys):
    def fail(command, typed):
        raise error

    monkeypatch.setattr(Evaluate, "__call__", fail)
    assert main(["evaluate", "run"]) == 2
    assert capsys.readouterr().err == f"weince: {said}\n"


@pytest.mark.parametrize(
    "error",
    [*(kind("a bug") for kind in (RuntimeError, TypeError, KeyError, AssertionError)),
     ModuleNotFoundError("a bug", name="weince.gone")],
)  # fmt: skip
def test_a_fault_of_our_own_keeps_its_trace(error, monkeypatch):
    def fail(command, typed):
        raise error

    monkeypatch.setattr(Evaluate, "__call__", fail)
    with pytest.raises(type(error), match="a bug"):
        main(["evaluate", "run"])


def test_a_loss_that_runs_out_of_memory_is_not_said_to_be_unable(monkeypatch):
    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("full")

    config = configure.LossConfig()
    monkeypatch.setattr(configure.PRESETS[config.preset], "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        configure.check_loss(config, candidates="views", pairs=4, width=3, device=torch.device("cpu"))


def test_a_reader_who_has_enough_ends_a_command_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-m", "weince", "reproduce", "--list"]
    done = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
