"""The settings of a SimCLR run, as in ``run.yaml`` and in the options of ``weince train``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weince.lab.configure import LossConfig, build_loss
from weince.lab.settings import check_range
from weince.lab.tasks.images.augment import Augment
from weince.lab.tasks.images.encoders import ProjectorConfig
from weince.lab.training.optimizers import OptimizerConfig
from weince.machine import check_device

Precision = Literal["fp32", "tf32", "bf16", "bf16-embeddings"]

FREE_TO_CHANGE = {
    "out",
    "device",
    "devices",
    "compile",
    "graph",
    "tensorboard",
    "snapshot_every",
    "checkpoint_every",
    "track_every",
}
"""Settings that may change when a run resumes: they do not affect its weights."""


@dataclass(frozen=True)
class VisionRun:
    """A SimCLR run.

    Args:
        task: Kind of run.
        data: Name of a data set (digits, cifar10, cifar100, stl10, imagenet32, tiny-imagenet), an .npz file or a
            folder of images, by class or not.
        encoder: resnet18, resnet50, vit_small, tiny, timm:NAME, torchvision:NAME, or your own, my_package:factory.
        width: Channels of a ResNet's first stage: 64, or fewer for a small one.
        projection: Width of the embeddings.
        projector: The layers between features and embeddings.
        loss: The loss.
        candidates: Where an anchor's negatives come from: ``views`` (both views, SimCLR) or ``clip`` (the other view
            only). A loss of your own gets this value if it takes ``candidates``.
        augment: How views are made; ``size`` is their height and width.
        optimizer: How weights are updated.
        epochs: Passes over the images. At a constant rate without warm-up, a run can be extended later.
        batch: Pairs of views in the global batch.
        seed: Seed of the weights, the order of the images and the views.
        precision: ``fp32``; ``tf32`` (convolutions in TF32, torch's default on a GPU); ``bf16`` (encoder in bf16;
            projector and loss in float32); ``bf16-embeddings`` (projector in bf16 too).
        device: ``auto`` (a CUDA device if there is one, else the CPU), ``cpu``, ``cuda``, one of several such as
            ``cuda:1``, or ``mps``.
        devices: Processes, one per GPU; torchrun's number takes precedence.
        compile: Compile the encoder and the views; by default on a GPU.
        graph: Capture the step as a CUDA graph; by default on one GPU.
        out: Folder of the run. A run with the same settings in it is resumed.
        checkpoint_every: Epochs between checkpoints.
        snapshot_every: Epochs between snapshots of the weights (for ``weince diagnose --trend``); 0 for none.
        track_every: Epochs between evaluations by the vote of neighbours on validation images (``vote`` in the log);
            0 for none. The images must have labels.
        tensorboard: Write TensorBoard's event files too.
    """

    task: Literal["vision"] = "vision"
    data: str = "digits"
    encoder: str = "tiny"
    width: int = 64
    projection: int = 64
    projector: ProjectorConfig = ProjectorConfig()
    loss: LossConfig = LossConfig()
    candidates: Literal["views", "clip"] = "views"
    augment: Augment = Augment()
    optimizer: OptimizerConfig = OptimizerConfig()
    epochs: int = 100
    batch: int = 256
    seed: int = 7
    precision: Precision = "fp32"
    device: str = "auto"
    devices: int = 1
    compile: bool | None = None
    graph: bool | None = None
    out: Path = Path("runs/train")
    checkpoint_every: int = 1
    snapshot_every: int = 0
    track_every: int = 0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.width != 64 and not self.encoder.startswith("resnet"):
            raise ValueError(f"width is an option of ResNets; got width {self.width} for {self.encoder}")
        counted = dict.fromkeys(("width", "projection", "epochs", "devices", "checkpoint_every"), 1)
        check_range(
            self,
            least={**counted, "seed": 0, "snapshot_every": 0, "track_every": 0},
            below={"width": 31, "projection": 31, "epochs": 31, "batch": 31, "seed": 63},
        )
        if self.batch < 2:
            raise ValueError(f"batch must be at least 2 pairs, or there is no negative; got {self.batch}")
        check_device(self.device)
        if self.candidates != "views" and ":" not in self.loss.preset:
            build_loss(self.loss, candidates=self.candidates)  # some losses contrast within a view
