"""Compute features of two random views of training images, for `weince predict` and research/predict_study.py.

Modes:
    run      from the encoder of a run of `weince train`, before its projector
    patches  without training: convolution with whitened random patches, rectified in both directions, averaged over
             quarters of the view (Coates and Ng 2011)

Both write z_i and z_j (images, d) in 16 bits, and the labels.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weince.files import write_aside
from weince.lab.tasks.images.augment import Augment
from weince.lab.tasks.images.data import load
from weince.lab.tasks.images.runs import two_views
from weince.progress import bars

EXAMPLES = """\
examples:
  python research/two_views.py run runs/infonce_0.5 --out infonce_0.5.npz
  python research/two_views.py patches cifar100.npz --out patches_cifar100.npz
"""
SIZE, FILTERS, SHRUNK, BATCH = 6, 64, 0.25, 256


def pixels(images: np.ndarray, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(images[rows])).permute(0, 3, 1, 2)


def normalised(patches: Tensor) -> Tensor:
    """Remove the mean and the contrast of each row of patches."""
    centred = patches - patches.mean(1, keepdim=True)
    return centred / (patches.var(1, keepdim=True) + 1e-3).sqrt()


def filters(views: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Whitening ``(d, d)`` and unit patches in whitened space ``(FILTERS, d)``, from random places of views."""
    columns = F.unfold(views, SIZE).transpose(1, 2).reshape(-1, 3 * SIZE**2)
    patches = normalised(columns[torch.randperm(len(columns), generator=generator)[:50_000]])
    values, vectors = torch.linalg.eigh(torch.cov(patches.T))
    whitening = vectors @ torch.diag((values + 0.01).rsqrt()) @ vectors.T
    chosen = patches[:FILTERS] @ whitening
    return whitening, F.normalize(chosen, dim=1)


def described(views: Tensor, whitening: Tensor, bank: Tensor) -> Tensor:
    """Features ``(n, 8 FILTERS + 12)`` of views ``(n, 3, 32, 32)``."""
    columns = F.unfold(views, SIZE).transpose(1, 2)
    n, places, width = columns.shape
    response = normalised(columns.reshape(-1, width)) @ (whitening @ bank.T)
    both = torch.cat([response - SHRUNK, -response - SHRUNK], 1).relu()
    side = round(places**0.5)
    maps = both.reshape(n, side, side, -1).permute(0, 3, 1, 2)
    # Normalised patches lose the colours. These go from 1 to 2, so that no view has only features of 0.
    colours = 1 + F.adaptive_avg_pool2d(views, 2)
    return torch.cat([F.adaptive_avg_pool2d(maps, 2).flatten(1), colours.flatten(1)], 1)


@torch.no_grad()
def of_patches(data: str, images: int, seed: int) -> dict[str, np.ndarray]:
    found = load(data, size=32)
    generator, augment = torch.Generator().manual_seed(seed), Augment(32)
    chosen = np.sort(np.random.default_rng(seed).permutation(len(found.train_images))[:images])
    whitening, bank = filters(augment(pixels(found.train_images, chosen[:512]), generator), generator)
    sides: list[list[Tensor]] = [[], []]
    with bars() as bar:
        task = bar.add_task("images", total=len(chosen))
        for rows in np.array_split(chosen, max(1, len(chosen) // BATCH)):
            for side in sides:
                views = augment(pixels(found.train_images, rows), generator)
                side.append(described(views, whitening, bank))
            bar.advance(task, len(rows))
    z_i, z_j = (torch.cat(side).half().numpy() for side in sides)
    return {"z_i": z_i, "z_j": z_j, "labels": np.asarray(found.train_labels)[chosen]}


def of_run(folder: Path, images: int, seed: int) -> dict[str, np.ndarray]:
    found = two_views(folder, images=images, seed=seed, of="features", part="train")
    labels = {} if found.labels is None else {"labels": found.labels}
    return {"z_i": found.first.astype(np.float16), "z_j": found.second.astype(np.float16), **labels}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["run", "patches"])
    parser.add_argument("source", help="the folder of a run; images, as `weince train --data` takes them")
    parser.add_argument("--images", type=int, default=8192, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help=".npz file to write")
    options = parser.parse_args()
    make = of_run if options.mode == "run" else of_patches
    source = Path(options.source) if options.mode == "run" else options.source
    arrays = make(source, options.images, options.seed)  # type: ignore[operator]

    def write(part: Path) -> None:
        with part.open("wb") as file:  # savez would append .npz to a path
            np.savez(file, **arrays)

    write_aside(options.out, write, "features")
    print(options.out)


if __name__ == "__main__":
    main()
