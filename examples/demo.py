"""Pretrain a small encoder on handwritten digits with InfoNCE and with WEINCE, and compare what they learned.

    python examples/demo.py                 all losses, 5 seeds, and a page: about 2 minutes on 2 cores
    python examples/demo.py --seeds 2 --epochs 10 --out runs/short

Data: the 1,797 digits of 8 x 8 pixels that come with scikit-learn. Every fifth image is held out for testing.
Each encoder is trained without labels, then frozen; a logistic regression and a vote of the 10 nearest
neighbours (by cosine) read its features. No loss was tuned on these images: the temperatures are the paper's
0.5, and 0.2 for InfoNCE as well, because a lower temperature alone explains much of what the paper reports.

At the end a page says which link the embeddings of two of the encoders ask for (``weince diagnose``).
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

from weince import InfoNCELoss, LinkLoss, WeinceLoss
from weince.diagnose import diagnose

LOSSES: dict[str, Callable[[], LinkLoss]] = {
    "InfoNCE, temperature 0.5": lambda: InfoNCELoss(0.5),
    "InfoNCE, temperature 0.2": lambda: InfoNCELoss(0.2),
    "WEINCE, preset paper": lambda: WeinceLoss.paper(0.5),
    "WEINCE, preset released": lambda: WeinceLoss.released(0.5),
}
DIAGNOSED = ("InfoNCE, temperature 0.5", "WEINCE, preset paper")
BATCH = 256


def load() -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Images in [0, 1] ``(n, 1, 8, 8)``, labels, and which of them are held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, digits.target, np.arange(len(images)) % 5 == 0


def augment(images: Tensor) -> Tensor:
    """Each image turned, scaled, sheared and shifted a little, with its own contrast and noise."""
    n = len(images)
    shape = torch.eye(2).repeat(n, 1, 1) + 0.25 * torch.randn(n, 2, 2)
    shift = 0.2 * torch.randn(n, 2, 1)
    grid = F.affine_grid(torch.cat([shape, shift], 2), list(images.shape), align_corners=False)
    warped = F.grid_sample(images, grid, align_corners=False)
    contrast = 0.5 + torch.rand(n, 1, 1, 1)
    return warped * contrast + 0.1 * torch.randn_like(warped)


def build() -> tuple[nn.Module, nn.Module]:
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 32),
    )
    projector = nn.Sequential(nn.ReLU(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    return encoder, projector


def pretrain(
    loss: LinkLoss, images: Tensor, epochs: int, seed: int, advance: Callable[[], None]
) -> nn.Module:
    torch.manual_seed(seed)
    encoder, projector = build()
    optimizer = torch.optim.Adam(
        [*encoder.parameters(), *projector.parameters(), *loss.parameters()], lr=2e-3
    )
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(BATCH)[:-1]:  # the last, smaller batch is left out
            z_i, z_j = (projector(encoder(augment(images[rows]))) for _ in range(2))
            optimizer.zero_grad()
            loss(z_i, z_j).backward()
            optimizer.step()
        advance()
    return encoder, projector


@torch.no_grad()
def evaluate(
    encoder: nn.Module, images: Tensor, labels: np.ndarray, held_out: np.ndarray
) -> tuple[float, float]:
    """Accuracy in percent on the held-out images: linear probe, nearest neighbours."""
    features = F.normalize(encoder(images)).numpy()
    probes = LogisticRegression(max_iter=2000), KNeighborsClassifier(10)
    scores = [
        probe.fit(features[~held_out], labels[~held_out]).score(features[held_out], labels[held_out])
        for probe in probes
    ]
    return 100 * scores[0], 100 * scores[1]


@torch.no_grad()
def views(encoder: nn.Module, projector: nn.Module, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of two random views of every image, where the loss acts."""
    torch.manual_seed(0)
    z_i, z_j = (projector(encoder(augment(images))).numpy() for _ in range(2))
    return z_i, z_j


def interval(values: list[float]) -> str:
    """Mean and half width of its 95 % t-interval over seeds."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{np.mean(values):.1f} ± {half:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="encoders per loss (default: 5)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the images (default: 30)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the page")
    options = parser.parse_args()

    console = Console()
    images, labels, held_out = load()
    embeddings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    table = Table(title=f"Digits, {options.epochs} epochs, mean ± 95 % interval over {options.seeds} seeds")
    table.add_column("loss")
    table.add_column("linear probe, %", justify="right")
    table.add_column("10 neighbours, %", justify="right")
    columns = TextColumn("{task.description:30}"), BarColumn(), TextColumn("{task.percentage:3.0f} %")
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for name, make in LOSSES.items():
            task = progress.add_task(name, total=options.seeds * options.epochs)
            results = []
            for seed in range(options.seeds):
                encoder, projector = pretrain(
                    make(), images[~held_out], options.epochs, seed, lambda task=task: progress.advance(task)
                )
                results.append(evaluate(encoder, images, labels, held_out))
                if seed == 0 and name in DIAGNOSED:
                    embeddings[name] = views(encoder, projector, images)
            linear, neighbours = zip(*results, strict=True)
            table.add_row(name, interval(linear), interval(neighbours))
    console.print(table)
    console.print(
        "Differences smaller than the intervals mean nothing; digits are small, and no loss was tuned."
    )
    page = diagnose(embeddings, options.out, quick=True, temperature=0.5)
    console.print(f"Which link the scores of two of these encoders ask for: {page}")


if __name__ == "__main__":
    main()
