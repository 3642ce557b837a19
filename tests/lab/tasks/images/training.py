"""A small run for tests of training; as a program: training.py DATA OUT EPOCHS DEVICES PRESET."""

import sys
from pathlib import Path

import numpy as np

SIZE = 16


def write_data(folder):
    """An .npz of 70 images: two batches of 32 per epoch, and the rest is left out."""
    rng = np.random.default_rng(0)
    path = folder / "images.npz"
    np.savez(
        path,
        train_images=rng.integers(0, 256, (70, SIZE, SIZE, 3), np.uint8),
        train_labels=np.arange(70) % 2,
        test_images=rng.integers(0, 256, (20, SIZE, SIZE, 3), np.uint8),
        test_labels=np.arange(20) % 2,
    )
    return path


def small_run(data, out, **changes):
    from weince.lab.configure import LossConfig
    from weince.lab.tasks.images.augment import Augment
    from weince.lab.tasks.images.config import VisionRun

    settings = {"epochs": 4, "batch": 32, "projection": 8, "loss": LossConfig("released"), "device": "cpu"}
    settings["augment"] = Augment(SIZE)
    return VisionRun(data=str(data), out=Path(out), **(settings | changes))


def run(data, out, changes):
    """Train in this process."""
    import torch

    from weince.lab.tasks.registry import train

    torch.set_num_threads(1)
    train(small_run(data, out, **changes), bar=False)


def ready(wanted):
    """A run of these settings, ready to train in this process."""
    from weince.lab.tasks.images.training import ImageTraining
    from weince.lab.training.fabric import launch

    return ImageTraining(wanted, launch(wanted))


def weights(out):
    from safetensors.torch import load_file

    return load_file(Path(out) / "model.safetensors")


def loss_state(out):
    """State of the loss in the newest checkpoint."""
    from weince.lab.training import checkpoint

    return checkpoint.newest(Path(out) / "checkpoints").state["loss"]


def same_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    return all(bool((a[name] == b[name]).all()) for name in a)


if __name__ == "__main__":
    from weince.lab.configure import LossConfig

    place, out, epochs, devices, preset = sys.argv[1:]
    run(place, out, {"epochs": int(epochs), "devices": int(devices), "loss": LossConfig(preset)})
