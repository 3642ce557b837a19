"""The folder of a run: its settings, log, checkpoints and weights, and how to read them.

run.yaml                     the settings
log.csv                      a row per epoch
checkpoints/                 the last two, to resume from
snapshots/epoch_0010.safetensors   weights during training, with --snapshot-every
model.safetensors            the final weights: encoder.* and projector.*
evaluation.json              the results of `weince evaluate`
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from weince.files import check_writable, write_aside, write_text_aside
from weince.lab import settings
from weince.lab.configure import build_loss
from weince.lab.tasks.images import encoders
from weince.lab.tasks.images.config import FREE_TO_CHANGE, Precision, VisionRun
from weince.lab.tasks.images.data import load
from weince.lab.training import checkpoint
from weince.machine import find_device

if TYPE_CHECKING:
    from weince.diagnose.reading import EmbeddedPairs
    from weince.lab.tasks.images.evaluation import Evaluation


def allow_tf32(precision: Precision) -> None:
    """Allow TF32 in convolutions on a GPU unless ``precision`` is ``fp32``; matrix products are not affected."""
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def claim(run: VisionRun) -> None:
    """Write a run's settings into its folder; if the folder has a run, it must be this one.

    The images may have moved. At a constant rate without warm-up, the run may be extended; then the old weights and
    JSON files are set aside under the old number of epochs.

    Raises:
        ValueError: The folder holds another run.
    """
    path, free = run.out / "run.yaml", set(FREE_TO_CHANGE)
    before = settings.load(str(path)) if path.exists() else {}
    if _moved(before.get("data"), run.data):
        free.add("data")
    had = before.get("epochs", run.epochs)
    steady = run.optimizer.schedule == "constant" and not run.optimizer.warmup
    if steady and isinstance(had, int) and had < run.epochs:
        settings.claim(replace(run, epochs=had), run.out, free=free)  # raises if it is another run
        _set_aside(run.out, had)
        free.add("epochs")
    settings.claim(run, run.out, free=free)


def _moved(before: object, now: str) -> bool:
    """Whether the images have moved: the old path is gone, and the new one has the same name."""
    return isinstance(before, str) and Path(before).stem == Path(now).stem and not Path(before).exists()


def _set_aside(folder: Path, epochs: int) -> None:
    last, kept = folder / "model.safetensors", folder / "snapshots" / f"epoch_{epochs:04d}.safetensors"
    if last.exists():
        kept.parent.mkdir(exist_ok=True)
        last.replace(kept)
    for result in folder.glob("*.json"):
        if "_epoch_" not in result.stem:
            result.replace(result.with_stem(f"{result.stem}_epoch_{epochs:04d}"))


def read_run(folder: Path) -> VisionRun:
    """The settings of the run in a folder."""
    path = folder / "run.yaml"
    if not path.exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no run.yaml")
    task = settings.load(str(path)).get("task", "vision")
    if task != "vision":
        best = folder / "best"
        raise ValueError(
            f"{folder} is the folder of a {task} run: judge its encoder by weince evaluate {best} --sts FILE, "
            f"or by weince diagnose --model {best} --pairs FILE"
        )
    run: VisionRun = settings.read(VisionRun, ["--config", str(path)], command="weince", examples="")
    return run


def save_weights(path: Path, model: torch.nn.Module) -> None:
    """Write a model's weights as safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(part: Path) -> None:
        try:
            save_file(weights, part)
        except SafetensorError as error:  # raised for a full disk, among others
            raise OSError(str(error)) from error

    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, write, "weights")


def build_model(run: VisionRun) -> encoders.SimCLR:
    """The untrained model of a run."""
    encoder = encoders.build(run.encoder, size=run.augment.size, width=run.width)
    features = cast(int, encoder.features)
    projector = encoders.Projector(features, run.projector, out=run.projection)
    return encoders.SimCLR(encoder, projector)


def load_model(folder: Path, weights: Path | None = None) -> tuple[VisionRun, encoders.SimCLR]:
    """A run and its trained model in evaluation mode, from its final weights or from a snapshot."""
    run = read_run(folder)
    path = weights or folder / "model.safetensors"
    if not path.exists():
        raise ValueError(f"{folder} has no {path.name} yet: the run is not finished")
    model = build_model(run)
    encoders.load_weights(model, path)
    return run, model.eval()


def snapshots(folder: Path) -> list[Path]:
    """The snapshots of a run and its final weights, in order."""
    paths = sorted((folder / "snapshots").glob("epoch_*.safetensors"))
    last = folder / "model.safetensors"
    kept = paths and paths[-1].stem == f"epoch_{read_run(folder).epochs:04d}"  # equals model.safetensors
    return paths if kept or not last.exists() else [*paths, last]


def evaluation_path(folder: Path, *, data: str | None = None, quick: bool = False) -> Path:
    """File of an evaluation; a quick one, or one on other data, has its own name."""
    other = "" if data is None else f"_{Path(data).stem}"
    return folder / f"evaluation{other}{'_quick' if quick else ''}.json"


def evaluate_run(
    folder: Path, *, data: str | None = None, device: str = "auto", quick: bool = False
) -> "Evaluation":
    """Evaluate the encoder of a run by the protocol and write the result to :func:`evaluation_path`."""
    from weince.lab.tasks.images.evaluation import evaluate

    run, model = load_model(folder)
    chosen = find_device(device)
    check_writable(folder)
    allow_tf32(run.precision)
    half = chosen.type == "cuda" and run.precision.startswith("bf16")
    evaluation = evaluate(
        model.encoder,
        load(data or run.data, size=run.augment.size),
        device=str(chosen),
        precision="bf16" if half else "fp32",
        quick=quick,
    )
    text = json.dumps(evaluation.record(), indent=1)
    write_text_aside(evaluation_path(folder, data=data, quick=quick), text, "evaluation")
    return evaluation


class ViewPairs(NamedTuple):
    """Embeddings of two random views, ``(images, d)`` each."""

    first: np.ndarray
    second: np.ndarray


@torch.no_grad()
def two_views(folder: Path, weights: Path | None = None, *, images: int = 8192, seed: int = 0) -> ViewPairs:
    """Embed two random views of some held-out images of a run.

    Batch norm uses its running statistics, so that a pair's embeddings do not depend on its batch.

    Args:
        folder: Folder of the run.
        weights: A snapshot; by default the final weights.
        images: Largest number of images.
        seed: Seed of the choice of images and of the views.
    """
    from weince.progress import bars

    run, model = load_model(folder, weights)
    device = find_device("auto")
    model.to(device)
    allow_tf32(run.precision)
    pixels = load(run.data, size=run.augment.size).test_images
    generator = torch.Generator(device).manual_seed(seed)
    chosen = np.sort(np.random.default_rng(seed).permutation(len(pixels))[:images])
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    with bars() as bar:
        task = bar.add_task(f"pairs of {folder.name}", total=len(chosen))
        for rows in np.array_split(chosen, max(1, len(chosen) // 512)):
            batch = torch.from_numpy(np.array(pixels[rows])).to(device).permute(0, 3, 1, 2)
            for side in sides:
                side.append(model(run.augment(batch, generator))[1].cpu())
            bar.advance(task, len(rows))
    return ViewPairs(*(torch.cat(side).numpy() for side in sides))


def run_pairs(
    folders: Sequence[Path], *, names: Sequence[str] | None = None, trend: bool = False, seed: int = 0
) -> "list[EmbeddedPairs]":
    """Input of ``weince diagnose`` from runs: the embeddings of each run, or with ``trend`` of each of its snapshots.

    Raises:
        ValueError: A run has too few snapshots for a trend.
    """
    from weince.diagnose.reading import (
        make_pairs,
        rename,
    )  # here, so that training does not import its figures

    pairs = []
    for folder in folders:
        paths = snapshots(folder) if trend else [folder / "model.safetensors"]
        if trend and len(paths) < 2:
            raise ValueError(
                f"{folder}: a trend needs weights of two epochs; got {len(paths)}; train with --snapshot-every"
            )
        for path in paths:
            name = f"{folder.name} {path.stem}" if trend else folder.name
            note = f"Two random views of held-out images, embedded by {name}."
            seen = two_views(folder, path, seed=seed)
            pairs.append(make_pairs(name, seen.first, seen.second, notes=(note,)))
    return rename(pairs, names)


def temperature_of(folders: Sequence[Path]) -> float | None:
    """The temperature of the runs if all have the same one, else None."""
    temperatures = {_temperature(folder) for folder in folders}
    return temperatures.pop() if len(temperatures) == 1 else None


def _temperature(folder: Path) -> float | None:
    """Temperature of a run; a learned one is that of the last checkpoint, or None without a checkpoint."""
    loss = build_loss(read_run(folder).loss)
    temperature = getattr(loss, "temperature", None)
    if not isinstance(temperature, torch.Tensor):
        return temperature
    last = checkpoint.newest(folder / "checkpoints")
    if last is None:
        return None
    loss.load_state_dict(last.state["loss"])
    return float(temperature.detach())  # the same tensor, which now holds the checkpoint's value
