"""The commands that train and judge: help, settings, interruptions, missing packages."""

import re
import shlex
import signal
import time

import pytest
import torch
from programs import Program
from safetensors.torch import save_file

from weince.cli import main
from weince.cli_runs import TRAIN_EXAMPLES
from weince.lab import settings
from weince.lab.tasks.base import Task
from weince.lab.tasks.images import task as images_task
from weince.lab.tasks.images.config import VisionRun


@pytest.mark.parametrize(
    "command", [["train"], ["evaluate"], ["reproduce"], ["diagnose"], ["bench", "loss"]], ids=" ".join
)
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert re.search(rf"examples?:\n  weince {' '.join(command)}", text)


def test_no_option_of_train_is_required(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    usage_lines = capsys.readouterr().out.partition("options:")[0]
    assert "[--augment.size SIZE]" in usage_lines


def test_the_examples_of_train_can_be_read(tmp_path, monkeypatch):
    from weince.lab.tasks.registry import task_of

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("epochs: 3\n")
    lines = [line for line in TRAIN_EXAMPLES.splitlines() if line.startswith("  weince train")]
    assert len(lines) == 6
    for line in lines:
        arguments = shlex.split(re.split(r" {2,}", line.strip())[0])[2:]
        chosen, _ = settings.take_config(arguments)
        kind = task_of(settings.load(chosen) if chosen else {}).settings
        settings.read(kind, arguments, command="weince train", examples="")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--epoch", "3"], "weince: unknown option 'epoch' (did you mean epochs?)\n"),
        (["train", "--lr", "1"], "weince: unknown option 'lr' (did you mean optimizer.lr?)\n"),
        (["train", "--nosuch", "1"], "weince: unknown option 'nosuch'; known: augment, "),
        (["train", "--config", "cifar100_resnet81"], "did you mean cifar100_resnet18?"),
        (["train", "--data", "cifar11"], "weince: no data 'cifar11' (did you mean cifar10?)"),
        (
            ["evaluate", "nowhere", "--published", "82"],
            "weince: --published wants --sts FILE too: it is printed beside the scores on that file\n",
        ),
        (
            ["evaluate", "nowhere", "--sts", "sts.tsv", "--quick"],
            "weince: --data and --quick are for runs on images, --sts is for sentences: leave one out\n",
        ),
        (
            ["reproduce", "digits", "--slurm-options", "partition=gpu"],
            "weince: --slurm-options wants --slurm too\n",
        ),
    ],
)
def test_wrong_input_ends_in_one_line(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below"])
@pytest.mark.parametrize(
    ("line", "option"),
    [
        (["train", "--device", "cpu"], "--out"),
        (["diagnose", "pairs.npz"], "--out"),
        (["reproduce", "digits"], "--out"),
        (["reproduce", "digits"], "--keep"),
    ],
)
def test_a_file_is_not_taken_for_a_folder(place, line, option, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    assert main([*line, option, place]) == 2
    assert capsys.readouterr().err == "weince: want a folder; got the file file: choose another path\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_train_and_evaluate_print_what_they_wrote(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--config", "digits_tiny", "--epochs", "1", "--device", "cpu", "--out", "run"]
    assert main(["train", *small]) == 0
    assert capsys.readouterr().out == "run\n"
    judge = images_task.evaluate_run

    def interrupted(folder, **options):
        if folder.name == "second":
            raise KeyboardInterrupt
        return judge(folder, **options)

    monkeypatch.setattr(images_task, "evaluate_run", interrupted)
    assert main(["evaluate", "run", "--quick", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("run/evaluation_quick.json\n")
    assert (tmp_path / "run" / "evaluation_quick.json").is_file()
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "run.yaml").write_text("task: vision\n")
    assert main(["evaluate", "run", "second", "--quick", "--device", "cpu"]) == 130
    shown = capsys.readouterr()
    assert shown.out.endswith("run/evaluation_quick.json\n")
    assert shown.err.endswith("weince: interrupted, what was printed before is complete\n")
    monkeypatch.setenv("RANK", "1")  # under torchrun, only rank 0 prints
    assert main(["train", *small, "--devices", "1"]) == 0
    assert capsys.readouterr().out == ""


LATE = """
import weince

class Loss(weince.DCLLoss):
    steps = 0

    def forward(self, z_i, z_j):
        self.steps += 1
        if self.steps == 3:
            raise ValueError("no such label")
        return super().forward(z_i, z_j)
"""


def test_an_error_of_ones_own_loss_names_its_line(tmp_path, capsys, monkeypatch):
    """A ValueError ends in one line, which did not say where it came from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late.py").write_text(LATE)
    assert main(["train", "--loss.preset", "late:Loss", "--epochs", "1", "--out", "run"]) == 2
    assert capsys.readouterr().err.endswith("weince: no such label (late.py, line 10)\n")


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ([], ["--config", "digits_tiny"]),
        (["--epochs", "3"], ["--config", "digits_tiny", "--epochs", "3"]),
        (["--data", "digits"], ["--data=digits"]),  # with --data, VisionRun's defaults apply
        (["--data=digits"], []),
        (["--config", "my.yaml"], ["--epochs", "4"]),
    ],
)
def test_train_alone_is_the_digits_configuration(arguments, same, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("epochs: 4\n")
    asked = []
    monkeypatch.setattr(Task, "train", lambda task, run, bar: asked.append(run) or run.out)
    assert main(["train", *arguments]) == 0
    assert asked == [settings.read(VisionRun, same, command="weince train", examples="")]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (["run", "pairs.npz"], "want runs of weince train or embeddings, not both; got run, pairs.npz"),
        (["run", "--pairs", "pairs.tsv"], "--pairs goes with --model, or with --queries and --documents"),
        (
            ["run", "--model", "m"],
            "give one of INPUT, --queries with --documents, and --model with --pairs",
        ),
        (["--model", "m"], "--model embeds the texts of --pairs FILE: give both"),
        (["--queries", "q.npy"], "--queries and --documents go together: give both"),
        ([], "give one of INPUT, --queries with --documents, and --model with --pairs"),
        (["run", "--trend"], "run: a trend needs weights of two epochs; got 0; train with --snapshot-every"),
    ],
)
def test_runs_that_cannot_be_diagnosed_so(inputs, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text("task: vision\n")
    assert main(["diagnose", *inputs]) == 2
    assert capsys.readouterr().err == f"weince: {said}\n"


def test_a_sentence_encoder_without_sentences(tmp_path, capsys, monkeypatch):
    """Its weights were taken for embeddings, and all their names were printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    weights = {f"layer.{k}.weight": torch.zeros(2, 2) for k in range(8)}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    assert main(["diagnose", "model"]) == 2
    few = "layer.0.weight, layer.1.weight, layer.2.weight, layer.3.weight, layer.4.weight and 3 more\n"
    assert capsys.readouterr().err.endswith(f"with labels of shape (rows,); got {few}")
    (tmp_path / "model" / "modules.json").write_text("[]")
    assert main(["diagnose", "model"]) == 2
    said = "model is a sentence-transformers model: give it as --model, with --pairs FILE"
    assert capsys.readouterr().err == f"weince: {said}\n"


def test_a_gpu_without_memory_ends_in_one_line(tmp_path, capsys, monkeypatch):
    def full(error):
        def train(task, run, bar):
            raise error

        return train

    said = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 2 GiB.\nSee more"
    line = ["train", "--config", "digits_tiny", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(Task, "train", full(torch.OutOfMemoryError(said)))
    assert main(line) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("weince: CUDA out of memory. Tried to allocate 20.00 GiB: take a smaller batch")
    assert errors.count("\n") == 1
    monkeypatch.setattr(Task, "train", full(RuntimeError("another fault")))
    with pytest.raises(RuntimeError, match="another fault"):  # a bug keeps its traceback
        main(line)


@pytest.mark.posix
def test_interrupted_training_says_that_it_goes_on(tmp_path, capsys, monkeypatch):
    line = ["-m", "weince", "train", "--config", "digits_tiny", "--device", "cpu", "--out", "run"]
    process = Program(*line, cwd=tmp_path)
    waited = time.monotonic() + 120
    while not list(tmp_path.glob("run/checkpoints/step_*.pt")) and time.monotonic() < waited:
        time.sleep(0.02)
    monkeypatch.chdir(tmp_path)
    assert main(line[2:]) == 2  # the same command at the same time
    assert capsys.readouterr().err == (
        "weince: run: another process trains this run; wait for it, or choose another --out\n"
    )
    process.send_signal(signal.SIGINT)
    ended = process.wait(60)
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.endswith("weince: interrupted, the same command resumes from the last checkpoint\n")
    assert ended.stdout == ""


def test_a_run_on_sentences_is_judged_by_its_sts_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text("task: text\n")
    assert main(["evaluate", "run"]) == 2
    assert (
        "run is the folder of a run on sentences, judged at its end: give run/best" in capsys.readouterr().err
    )
