"""Training gives the same result however it is interrupted; see also test_train_ranks.py."""

import math
import os
import random
import signal
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from programs import FORKS
from programs import run as run_program
from safetensors.torch import load_file
from training import SIZE, loss_state, ready, run, same_weights, small_run, weights, write_data

from weince import DCLLoss
from weince.lab import settings
from weince.lab.configure import LossConfig, build_loss
from weince.lab.tasks import base
from weince.lab.tasks.images import training as images_module
from weince.lab.tasks.images.augment import Augment
from weince.lab.tasks.images.config import VisionRun
from weince.lab.tasks.images.data import load
from weince.lab.tasks.images.encoders import ProjectorConfig
from weince.lab.tasks.images.runs import (
    build_model,
    claim,
    evaluate_run,
    evaluation_path,
    load_model,
    read_run,
    run_pairs,
    snapshots,
    temperature_of,
    two_views,
)
from weince.lab.tasks.registry import train
from weince.lab.training import checkpoint, loop
from weince.lab.training.capture import Step, Taken
from weince.lab.training.fabric import first, launch
from weince.lab.training.log import read_log
from weince.lab.training.optimizers import OptimizerConfig

EPOCHS = 40
KILLS = 10


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run without interruption."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(data, out, {"epochs": EPOCHS})
    return out


@contextmanager
def interrupted_after(epoch):
    """Interrupt runs right after the checkpoint of this epoch is written."""
    save = checkpoint.save

    def cut(folder, step, state):
        save(folder, step, state)
        if step == epoch:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", cut)
        yield


@pytest.mark.parametrize("candidates", ["views", "clip"])
def test_the_negatives_of_an_anchor_are_those_that_the_run_asks_for(data, tmp_path, candidates):
    wanted = small_run(data, tmp_path / "run", loss=LossConfig("dcl", temperature=0.5), candidates=candidates)
    loss, arguments = Step(ready(wanted))({"rows": torch.arange(wanted.batch)})
    z_i, z_j = arguments["z_i"], arguments["z_j"]
    values = {choice: DCLLoss(0.5, candidates=choice)(z_i, z_j).item() for choice in ("views", "clip")}
    assert loss.item() == pytest.approx(values.pop(candidates), rel=1e-6)
    assert abs(loss.item() - values.popitem()[1]) > 0.1


def test_epochs_that_no_clock_can_count_are_refused():
    with pytest.raises(ValueError, match=r"epochs must be below 2\*\*31; got 2147483648"):
        VisionRun(epochs=2**31)


def test_a_loss_that_contrasts_within_a_view_is_refused_across_views():
    with pytest.raises(ValueError, match=r"DHELLoss contrasts within a view .* got 'clip'"):
        VisionRun(loss=LossConfig("dhel"), candidates="clip")


def test_the_same_seed_gives_the_same_weights_and_another_others(data, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(data, tmp_path / name, {"epochs": 2, "seed": seed})
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert not same_weights(tmp_path / "a", tmp_path / "c")


def test_training_lowers_the_loss(whole):
    losses = [row["loss"] for row in read_log(whole / "log.csv")]
    assert len(losses) == EPOCHS
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.posix
def test_what_a_loss_learns_is_trained_and_resumed(data, tmp_path):
    changes = {"epochs": 3, "checkpoint_every": 1, "loss": LossConfig("siglip")}
    run(data, tmp_path / "whole", changes)
    start, learned = build_loss(changes["loss"]).state_dict(), loss_state(tmp_path / "whole")
    assert all(abs(float(learned[name] - start[name])) > 1e-4 for name in ("log_scale", "bias"))
    with interrupted_after(1), pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "cut", changes)
    run(data, tmp_path / "cut", changes)
    assert loss_state(tmp_path / "cut") == learned
    rows = read_log(tmp_path / "cut" / "log.csv")
    for name, value in learned.items():
        logged = [row[f"learned_{name}"] for row in rows]
        assert len(set(logged)) == 3
        assert logged[-1] == pytest.approx(float(value), rel=1e-5)


def test_ten_kills_leave_the_weights_of_a_run_without(data, whole, tmp_path):
    """Send SIGKILL at random moments, which may fall into the writing of a checkpoint."""
    chance, out, kills = random.Random(0), tmp_path / "killed", 0
    while kills < KILLS:
        process = FORKS.Process(target=run, args=(data, out, {"epochs": EPOCHS}))
        process.start()
        wanted = _epochs_done(out) + chance.randrange(2)
        while _epochs_done(out) < wanted and process.is_alive():
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.1))
        assert process.is_alive(), "the run ended before it was killed often enough"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
    assert 0 < _epochs_done(out) < EPOCHS
    run(data, out, {"epochs": EPOCHS})
    assert same_weights(whole, out)
    assert [row["epoch"] for row in read_log(out / "log.csv")] == list(range(1, EPOCHS + 1))


def _epochs_done(out):
    return max(
        (int(path.stem.removeprefix("step_")) for path in out.glob("checkpoints/step_*.pt")), default=0
    )


@pytest.mark.posix
def test_a_second_process_leaves_the_run_alone_until_the_first_is_killed(data, tmp_path):
    first = FORKS.Process(target=run, args=(data, tmp_path, {"epochs": 6}))
    first.start()
    while not _epochs_done(tmp_path):
        assert first.is_alive()
        time.sleep(0.002)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        said = "another process trains this run; wait for it, or choose another --out"
        with pytest.raises(ValueError, match=f"{tmp_path}: {said}"):
            run(data, tmp_path, {"epochs": 6})
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    finally:
        first.kill()
        first.join()
    run(data, tmp_path, {"epochs": 6})
    assert [row["epoch"] for row in read_log(tmp_path / "log.csv")] == list(range(1, 7))


def test_a_truncated_checkpoint_falls_back_to_the_one_before(data, whole, tmp_path):
    run(data, tmp_path, {"epochs": EPOCHS})
    (tmp_path / "model.safetensors").unlink()
    newest = tmp_path / "checkpoints" / f"step_{EPOCHS:09d}.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="going back to the one before"):
        run(data, tmp_path, {"epochs": EPOCHS})
    assert same_weights(whole, tmp_path)


@pytest.mark.posix
def test_a_full_disk_says_so_and_keeps_the_last_checkpoint(data, tmp_path):
    """A limit on the file size stands in for a full disk; settings and log stay below it."""
    run(data, tmp_path / "out", {"epochs": 1})
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000));"
        "from weince.cli import main; sys.exit(main())"
    )
    settings = tmp_path / "out" / "run.yaml"
    settings.write_text(settings.read_text().replace("epochs: 1\n", "epochs: 3\n"))
    (tmp_path / "out" / "model.safetensors").unlink()
    done = run_program("-c", program, "train", "--config", settings)
    assert done.returncode == 2
    assert "weince: the checkpoint" in done.stderr
    assert "Is the disk full?" in done.stderr
    assert checkpoint.newest(tmp_path / "out" / "checkpoints").step == 1


def test_a_folder_with_another_run_is_left_alone(data, tmp_path):
    run(data, tmp_path, {"epochs": 1})
    (tmp_path / "evaluation.json").write_text("{}")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"holds another run \(batch 32 -> 16; seed 7 -> 8\)"):
        run(data, tmp_path, {"epochs": 2, "seed": 8, "batch": 16})
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_run_at_a_constant_rate_can_be_made_longer(data, tmp_path):
    run(data, tmp_path / "straight", {"epochs": 5})
    for epochs in (2, 5):
        run(data, tmp_path / "longer", {"epochs": epochs})
        if epochs == 2:
            short = weights(tmp_path / "longer")
            for name in ("evaluation", "link", "made"):
                (tmp_path / "longer" / f"{name}.json").write_text(name)
    assert same_weights(tmp_path / "straight", tmp_path / "longer")
    logs = [read_log(tmp_path / name / "log.csv") for name in ("straight", "longer")]
    losses = [[row["loss"] for row in log] for log in logs]
    assert losses[0] == losses[1]
    assert read_run(tmp_path / "longer").epochs == 5
    # Results of the shorter run are kept, under names that do not belong to the longer run.
    assert [path.stem for path in snapshots(tmp_path / "longer")] == ["epoch_0002", "model"]
    kept = load_file(tmp_path / "longer" / "snapshots" / "epoch_0002.safetensors")
    assert all(torch.equal(kept[name], short[name]) for name in short)
    found = {path.name: path.read_text() for path in (tmp_path / "longer").glob("*.json")}
    assert found == {f"{name}_epoch_0002.json": name for name in ("evaluation", "link", "made")}
    with pytest.raises(ValueError, match=r"holds another run \(epochs 5 -> 4\)"):
        run(data, tmp_path / "longer", {"epochs": 4})


@pytest.mark.parametrize("schedule", [{"schedule": "cosine"}, {"warmup": 0.5}])
def test_a_run_whose_rates_depend_on_its_length_cannot_be_made_longer(data, tmp_path, schedule):
    changes = {"optimizer": OptimizerConfig(**schedule)}
    run(data, tmp_path, {"epochs": 1, **changes})
    with pytest.raises(ValueError, match=r"holds another run \(epochs 1 -> 2\)"):
        run(data, tmp_path, {"epochs": 2, **changes})


def test_images_may_lie_elsewhere_when_a_run_goes_on(data, tmp_path):
    there, here = tmp_path / "there" / "images.npz", tmp_path / "here" / "images.npz"
    for path in (there, here):
        path.parent.mkdir()
        path.write_bytes(data.read_bytes())
    run(there, tmp_path / "run", {"epochs": 1})
    with pytest.raises(ValueError, match=r"holds another run \(data .*there.* -> .*here"):  # both files exist
        run(here, tmp_path / "run", {"epochs": 2})
    there.unlink()
    run(here, tmp_path / "run", {"epochs": 2})
    assert read_run(tmp_path / "run").data == str(here)
    run(data, tmp_path / "straight", {"epochs": 2})
    assert same_weights(tmp_path / "run", tmp_path / "straight")
    other = here.rename(here.with_name("others.npz"))
    with pytest.raises(ValueError, match="holds another run"):
        run(other, tmp_path / "run", {"epochs": 2})


def test_other_images_of_the_same_name_do_not_go_on(data, tmp_path):
    path = tmp_path / "images.npz"
    path.write_bytes(data.read_bytes())
    run(path, tmp_path / "run", {"epochs": 1})
    with np.load(path) as arrays:
        np.savez(path, **{**arrays, "train_images": 255 - arrays["train_images"]})
    before = (tmp_path / "run" / "run.yaml").read_text()
    with pytest.raises(
        ValueError, match=r"began with data and an encoder of fingerprint \w{16}; got \w{16}: choose"
    ):
        run(path, tmp_path / "run", {"epochs": 2})
    assert (tmp_path / "run" / "run.yaml").read_text() == before


def test_settings_that_cannot_be_read_are_named(data, tmp_path):
    (tmp_path / "run.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"run\.yaml is not YAML"):
        run(data, tmp_path, {"epochs": 1})
    claim(small_run(data, tmp_path / "wrong"))
    path = tmp_path / "wrong" / "run.yaml"
    right = settings.load(str(path))
    for name, value in {"epochs": "three", "data": [5]}.items():
        path.write_text(yaml.safe_dump(right | {name: value}))
        with pytest.raises(ValueError, match=rf"holds another run \({name} .*{value!r}"):
            claim(small_run(data, tmp_path / "wrong"))


def test_the_run_of_another_task_is_not_read(tmp_path):
    (tmp_path / "run.yaml").write_text("task: text\ntext: a.txt\n")
    with pytest.raises(
        ValueError, match=r"is the folder of a text run: .* weince evaluate \S+/best --sts FILE"
    ):
        load_model(tmp_path)


def test_a_finished_run_is_not_trained_again(data, tmp_path):
    run(data, tmp_path, {"epochs": 1})
    before = (tmp_path / "model.safetensors").read_bytes()
    run(data, tmp_path, {"epochs": 1})
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_the_schedule_goes_on_where_it_was(data, tmp_path):
    cosine = {"epochs": 4, "optimizer": OptimizerConfig(schedule="cosine", warmup=0.25)}
    run(data, tmp_path / "whole", cosine)
    run(data, tmp_path / "cut", cosine)
    (tmp_path / "cut" / "checkpoints" / "step_000000004.pt").unlink()
    (tmp_path / "cut" / "model.safetensors").unlink()
    run(data, tmp_path / "cut", cosine)
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    assert [row["lr"] for row in read_log(tmp_path / "cut" / "log.csv")] == pytest.approx(
        [0, 3e-4, 3e-4 * 0.75, 3e-4 * 0.25]
    )


def test_snapshots_load_and_embed(data, tmp_path):
    run(data, tmp_path / "run", {"epochs": 2, "snapshot_every": 1})
    found = snapshots(tmp_path / "run")
    assert [path.stem for path in found] == ["epoch_0001", "epoch_0002"]  # the last snapshot is the model
    settings, model = load_model(tmp_path / "run", found[0])
    assert settings == small_run(data, tmp_path / "run", epochs=2, snapshot_every=1)
    assert not model.training
    z_i, z_j = two_views(tmp_path / "run", images=16)
    assert z_i.shape == z_j.shape == (16, 8)
    again, _ = two_views(tmp_path / "run", images=16)
    assert len(two_views(tmp_path / "run").first) == 20  # only 20 images are held out
    assert (again == z_i).all()
    assert (z_i != z_j).any()
    names = [pairs.name for pairs in run_pairs([tmp_path / "run"], trend=True)]
    assert names == ["run epoch_0001", "run epoch_0002"]


def test_a_run_that_ends_between_snapshots_has_its_last_weights_too(data, tmp_path):
    run(data, tmp_path, {"epochs": 3, "snapshot_every": 2})
    assert [path.stem for path in snapshots(tmp_path)] == ["epoch_0002", "model"]


def test_a_snapshot_that_a_cut_run_missed_is_taken_when_it_goes_on(data, tmp_path, monkeypatch):
    def full(path, model):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(images_module, "save_weights", full)
        with pytest.raises(OSError, match="no space"):
            run(data, tmp_path, {"epochs": 2, "snapshot_every": 1})
    run(data, tmp_path, {"epochs": 2, "snapshot_every": 1})
    assert [path.stem for path in snapshots(tmp_path)] == ["epoch_0001", "epoch_0002"]


MADE_OF_ANOTHER = """
import torch
import weince

class Loss(torch.nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.contrast = weince.InfoNCELoss(temperature)

    def forward(self, z_i, z_j):
        return self.contrast(z_i, z_j)
"""


@pytest.mark.parametrize("loss", ["infonce", "made_of_another:Loss"])
@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({1.0: 1e30, 1.5: 1e30}, "the loss is nan in epoch 2"),
        ({1.5: math.nan}, "the weights are not finite after epoch 2"),  # after the last step of the epoch
    ],
)
def test_a_diverging_run_stops_and_keeps_its_checkpoint(data, tmp_path, monkeypatch, rates, said, loss):
    (tmp_path / "made_of_another.py").write_text(MADE_OF_ANOTHER)
    monkeypatch.syspath_prepend(tmp_path)
    calm = small_run(data, tmp_path, epochs=3, checkpoint_every=1, loss=LossConfig(loss, temperature=0.5))
    with interrupted_after(1), pytest.raises(KeyboardInterrupt):
        train(calm, bar=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "rate", lambda _, done, __: rates.get(done, 1e-4))
        with pytest.raises(ValueError, match=said + r": set a lower optimizer\.lr, or"):
            train(calm, bar=False)
    assert checkpoint.newest(tmp_path / "checkpoints").step == 1


def test_a_folder_of_images_without_labels_trains_resumes_and_is_not_evaluated(tmp_path):
    pictures = tmp_path / "photos"
    pictures.mkdir()
    for i, image in enumerate(np.random.default_rng(0).integers(0, 256, (50, SIZE, SIZE, 3), np.uint8)):
        Image.fromarray(image).save(pictures / f"{i}.png")
    run(pictures, tmp_path / "whole", {"epochs": 2})
    with interrupted_after(1), pytest.raises(KeyboardInterrupt):
        run(pictures, tmp_path / "cut", {"epochs": 2})
    run(pictures, tmp_path / "cut", {"epochs": 2})
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    with pytest.raises(
        ValueError, match=r"photos has no labels, which an evaluation needs: give labelled images"
    ):
        evaluate_run(tmp_path / "cut", device="cpu")
    z_i, z_j = two_views(tmp_path / "cut")  # needs no labels; uses the held-out fifth
    assert len(z_i) == len(z_j) == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 71}, "a batch of 71 needs as many images; got 70 in"),
        ({"batch": 1}, "batch must be at least 2 pairs"),
        ({"epochs": 0}, "epochs must be at least 1; got 0"),
        ({"seed": -1}, "seed must be at least 0; got -1"),
        ({"snapshot_every": -1}, "snapshot_every must be at least 0; got -1"),
        ({"graph": True}, "graph needs one process on one GPU"),
        ({"device": "tpu"}, "device must be auto, cpu, cuda or mps; got 'tpu'"),
        ({"device": "cuda:x"}, "device must be auto, cpu, cuda or mps; got 'cuda:x'"),
        ({"width": 16}, "width is an option of ResNets; got width 16 for tiny"),
        ({"encoder": "resnet18", "width": 0}, "width must be at least 1; got 0"),
        ({"loss": LossConfig(engine="fused")}, "the loss fails on random embeddings .* got cpu"),
        ({"encoder": "resnet81"}, r"unknown encoder 'resnet81' \(did you mean resnet18\?\)"),
    ],
)
def test_wrong_settings(data, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(small_run(data, tmp_path / "out", **changes), bar=False)
    assert not (tmp_path / "out").exists()  # so corrected settings are accepted there


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "lars"])
def test_a_cut_run_with_batch_norm_in_its_projector_ends_alike(data, tmp_path, optimizer):
    changes = {
        "epochs": 3,
        "projector": ProjectorConfig(hidden=24, layers=3, norm="all"),
        "optimizer": OptimizerConfig(optimizer, lr=0.01, weight_decay=0.01, schedule="cosine", warmup=0.3),
    }
    run(data, tmp_path / "whole", changes)
    run(data, tmp_path / "cut", changes)
    (tmp_path / "cut" / "checkpoints" / "step_000000003.pt").unlink()
    (tmp_path / "cut" / "model.safetensors").unlink()
    run(data, tmp_path / "cut", changes)
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    made = {name: tuple(x.shape) for name, x in weights(tmp_path / "cut").items() if "projector" in name}
    assert made["projector.0.weight"] == (24, 64)
    assert made["projector.3.weight"] == (24, 24)
    assert made["projector.6.weight"] == (8, 24)
    _, model = load_model(tmp_path / "cut")
    assert model(torch.rand(2, 3, 16, 16))[1].shape == (2, 8)


def test_the_width_of_a_resnet(data, tmp_path):
    run = small_run(data, tmp_path / "out", encoder="resnet18", width=4)
    encoder = build_model(run).encoder
    assert (encoder.conv1.out_channels, encoder.features) == (4, 32)


def test_no_gpu_is_said(data, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="torch finds no CUDA device"):
        train(small_run(data, tmp_path, device="cuda"), bar=False)
    run(data, tmp_path, {"epochs": 1})
    with pytest.raises(ValueError, match="torch finds no CUDA device"):
        evaluate_run(tmp_path, device="cuda")


def test_a_run_trains_on_the_gpu_that_it_names(monkeypatch):
    class Asked(Exception):
        pass

    def fabric(**options):
        raise Asked(options["accelerator"], options["devices"])

    monkeypatch.setattr("lightning_fabric.Fabric", fabric)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device, asked in {"cuda": 1, "cuda:0": [0], "cuda:1": [1]}.items():
        with pytest.raises(Asked) as found:
            launch(VisionRun(device=device))
        assert found.value.args == ("cuda", asked)
    with pytest.raises(ValueError, match="devices must be 1 with device cuda:1, which names one GPU; got 2"):
        launch(VisionRun(device="cuda:1", devices=2))
    with pytest.raises(ValueError, match="torch finds 2 CUDA device"):
        launch(VisionRun(device="cuda:2"))
    with pytest.raises(
        ValueError, match="batch must be a multiple of the number of processes, 100000; got 256"
    ):
        launch(VisionRun(device="cpu", devices=100_000))  # before any process starts


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_run_is_judged_with_the_convolutions_it_was_trained_with(data, tmp_path, precision, monkeypatch):
    run(data, tmp_path, {"epochs": 1, "precision": precision})
    for use in (lambda: evaluate_run(tmp_path, quick=True), lambda: two_views(tmp_path, images=4)):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "fp32")
        use()
        assert torch.backends.cudnn.allow_tf32 is (precision == "tf32")


def test_the_time_of_an_epoch_ends_when_its_loss_is_known(data, tmp_path):
    """After the host has launched all steps, a GPU is still working; reading the loss waits for it."""

    class Slow:
        world_size, global_rank, device = 1, 0, torch.device("cpu")

        def all_reduce(self, value, reduce_op):
            time.sleep(0.2)
            return value

    training = ready(small_run(data, tmp_path))
    training.fabric = Slow()
    tally = loop.Tally(training)
    for number in (9, 10):
        tally.add(Taken(torch.tensor(3.0), {"z_i": torch.randn(8, 4), "z_j": torch.randn(8, 4)}), 64, number)
    row = tally.row(10)
    assert row["seconds"] >= 0.2
    assert row["views_per_second"] == pytest.approx(2 * 32 * 2 / row["seconds"])
    assert (row["epoch"], row["loss"]) == (5, 3.0)


def test_what_fails_on_the_first_process_fails_on_all():
    told = []
    leader = SimpleNamespace(global_rank=0, broadcast=lambda said: told.append(said) or said)
    other = SimpleNamespace(global_rank=1, broadcast=lambda said: told[-1])

    def full():
        raise OSError("the disk is full")

    with pytest.raises(OSError, match=r"^the disk is full$"):
        first(leader, full)
    with pytest.raises(ValueError, match="the first process failed: the disk is full"):
        first(other, full)
    assert first(leader, lambda: 3) == 3
    assert first(other, full) is None


@pytest.mark.parametrize(("loss", "warnings"), [("plain_loss:Plain", 1), ("dcl", 0)])
def test_a_loss_that_sees_a_part_of_the_batch_says_so(data, tmp_path, loss, warnings, recwarn, monkeypatch):
    """Only weince's losses, and those of users that inherit from them, gather the embeddings of all processes."""
    (tmp_path / "plain_loss.py").write_text(
        "import torch\nclass Plain(torch.nn.Module):\n"
        "    def forward(self, z_i, z_j):\n        return (z_i - z_j).square().mean()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fabric = SimpleNamespace(
        world_size=2, global_rank=0, device=torch.device("cpu"), broadcast=lambda said: said
    )
    images_module.ImageTraining(small_run(data, tmp_path, loss=LossConfig(loss)), fabric)
    assert sum("negatives of its own part of the batch" in str(one.message) for one in recwarn) == warnings


def test_the_bar_is_not_in_the_way_of_the_result(data, tmp_path, capsys):
    train(small_run(data, tmp_path, epochs=1), bar=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "epoch 1/1" in shown.err


def test_the_temperature_of_runs_is_told_if_they_share_it(tmp_path):
    losses = [
        LossConfig("infonce", 0.2),
        LossConfig("paper", 0.2),
        LossConfig("paper", 0.5),
        LossConfig("weibit"),
    ]
    folders = [tmp_path / str(place) for place in range(len(losses))]
    for folder, loss in zip(folders, losses, strict=True):
        settings.claim(small_run("digits", folder, loss=loss), folder, free=())
    assert temperature_of(folders[:2]) == 0.2
    assert temperature_of(folders[:3]) is None
    assert temperature_of(folders[3:]) is None


@pytest.mark.posix
def test_weights_on_a_full_disk(tmp_path):
    program = (
        "import resource, signal, sys, pathlib, torch; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from weince.lab.tasks.images.runs import save_weights;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        "save_weights(pathlib.Path(sys.argv[1]) / 'model.safetensors', torch.nn.Linear(100, 100))"
    )
    done = run_program("-c", program, tmp_path)
    assert "OSError: the weights" in done.stderr
    assert "Is the disk full?" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_rate_follows_the_steps_and_the_loss_is_looked_at(data, tmp_path, monkeypatch):
    rates, looks = [], []
    monkeypatch.setattr(loop, "set_rate", lambda _, value: rates.append(value))
    monkeypatch.setattr(loop, "GLANCE", 2)
    monkeypatch.setattr(loop, "check_finite", lambda training, loss, step: looks.append(step))
    warm = OptimizerConfig(lr=1.0, warmup=1.0)
    train(small_run(data, tmp_path, epochs=2, optimizer=warm), bar=False)
    assert rates == [0.0, 0.25, 0.5, 0.75]  # two steps per epoch
    assert looks == [2, 2, 4, 4]  # once after every second step, once for the log


def test_checkpoints_are_taken_when_they_are_due_and_at_the_end(data, tmp_path):
    run(data, tmp_path, {"epochs": 5, "checkpoint_every": 3})
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_000000003.pt", "step_000000005.pt"]


def test_what_has_no_labels_is_trained_on_where_it_is_apart(data, tmp_path, monkeypatch):
    images = load(str(data))
    run(data, tmp_path / "together", {"epochs": 1})
    apart = images._replace(train_images=images.test_images, train_labels=images.test_labels)
    monkeypatch.setattr(images_module, "load", lambda *_, **__: apart)
    run(data, tmp_path / "apart", {"epochs": 1})
    assert same_weights(tmp_path / "together", tmp_path / "apart")


def test_the_tail_is_logged_by_the_settings_of_the_loss(data, tmp_path):
    lam = {}
    for name, loss in (
        ("paper", LossConfig("paper")),
        ("shut", LossConfig("paper", tail={"rho0": 1e-6})),
        ("infonce", LossConfig("infonce")),
    ):
        run(data, tmp_path / name, {"epochs": 1, "loss": loss})
        lam[name] = read_log(tmp_path / name / "log.csv")[0]["lam"]
    assert lam["shut"] < 1e-6
    assert min(lam["paper"], lam["infonce"]) > 0.01


def test_what_is_not_said_is_as_the_paper_has_it():
    """SimCLR with batches of 256 for 100 epochs of Adam at 3e-4; no blur."""
    said = VisionRun()
    assert (said.epochs, said.batch, said.projection, said.width) == (100, 256, 64, 64)
    assert said.optimizer == OptimizerConfig(
        "adam", lr=3e-4, weight_decay=0.0, schedule="constant", warmup=0.0
    )
    assert said.projector == ProjectorConfig(hidden=None, layers=2, norm="none")
    assert said.augment == Augment(
        32,
        crop_scale=(0.08, 1.0),
        crop_ratio=(3 / 4, 4 / 3),
        flip=0.5,
        jitter=(0.8, 0.8, 0.8, 0.2),
        jitter_p=0.8,
        grey_p=0.2,
        blur_p=0.0,
    )


def test_an_epoch_has_randomness_of_its_own_that_comes_back(data, tmp_path):
    def drawn(seed, epoch):
        training = ready(small_run(data, tmp_path, seed=seed))
        start = epoch * training.schedule.in_epoch
        training.reseed(start)
        order = next(training.batches(start))["rows"]
        return order, torch.rand(5, generator=training.generator), torch.rand(5)  # images, views, dropout

    for a, b in zip(drawn(1, 2), drawn(1, 2), strict=True):
        assert torch.equal(a, b)
    for other in ((1, 3), (2, 2)):
        assert not any(torch.equal(a, b) for a, b in zip(drawn(1, 2), drawn(*other), strict=True))
    training = ready(small_run(data, tmp_path))
    rows = torch.cat([batch["rows"] for batch in training.batches(0)][:2])
    assert len(set(rows.tolist())) == 64


def test_a_quick_look_leaves_the_evaluation_alone(data, tmp_path):
    run(data, tmp_path, {"epochs": 1})
    (tmp_path / "evaluation.json").write_text("the whole one")
    found = evaluate_run(tmp_path, device="cpu", quick=True)
    assert found.width == 64  # the encoder's features, not the projector's 8
    assert (tmp_path / "evaluation.json").read_text() == "the whole one"
    assert '"quick": true' in (tmp_path / "evaluation_quick.json").read_text()
    assert evaluation_path(tmp_path, data="there/mine.npz").name == "evaluation_mine.json"


@pytest.mark.usefixtures("root_kept_out")
def test_a_folder_that_cannot_be_written_is_said_before_the_work(data, tmp_path):
    run(data, tmp_path, {"epochs": 1})
    tmp_path.chmod(0o555)
    with pytest.raises(PermissionError):
        evaluate_run(tmp_path, data="nowhere.npz", device="cpu", quick=True)


LEARNED = """
import torch
from weince import InfoNCELoss
def learned() -> InfoNCELoss:
    return InfoNCELoss(torch.nn.Parameter(torch.tensor(0.5)), max_scale=100)
"""


def test_a_learned_temperature_is_that_of_the_last_checkpoint(data, tmp_path, monkeypatch):
    (tmp_path / "mine_learned.py").write_text(LEARNED)
    monkeypatch.syspath_prepend(tmp_path)
    settings.claim(
        small_run(data, tmp_path / "new", loss=LossConfig("mine_learned:learned")), tmp_path / "new", free=()
    )
    assert temperature_of([tmp_path / "new"]) is None
    run(data, tmp_path / "done", {"loss": LossConfig("mine_learned:learned")})
    found = temperature_of([tmp_path / "done"])
    assert found == pytest.approx(float(loss_state(tmp_path / "done")["temperature"]))
    assert found != 0.5


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_a_loss_that_learns_wants_adam(data, tmp_path, name):
    changes = {"loss": LossConfig("siglip"), "optimizer": OptimizerConfig(name)}
    with pytest.raises(ValueError, match=f"wants optimizer.name adam or adamw.*got {name} with siglip"):
        run(data, tmp_path / "run", changes)
    assert not (tmp_path / "run").exists()
    run(data, tmp_path / "fixed", changes | {"loss": LossConfig("siglip", options={"learn": False})})
    assert not any(name.startswith("learned") for name in read_log(tmp_path / "fixed" / "log.csv")[0])
