"""SimCLR on handwritten digits in Lightning, with the tail of the negatives logged beside the loss.

    python examples/lightning_simclr.py        a minute on a CPU; needs pip install pytorch-lightning scikit-learn
    python examples/lightning_simclr.py --epochs 2 --out runs/lightning

The CSV file named at the end has columns like ``tail/lam_mean`` and ``tail/rho_p10`` for every 10th batch.
"""

import argparse
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weince import WeinceLoss
from weince.integrations.lightning import TailLogger


class SimCLR(pl.LightningModule):
    """An encoder, a projector and a loss. The loss is a submodule, so that TailLogger finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 64)
        )
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(64, 32, bias=False))
        self.loss = WeinceLoss(temperature=0.5)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (images,) = batch
        z_i, z_j = (self.projector(self.encoder(view(images))) for _ in range(2))
        loss = self.loss(z_i, z_j)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def view(images: Tensor) -> Tensor:
    """Each image turned and shifted a little, with noise."""
    turn = torch.eye(2, 3, device=images.device) + 0.2 * torch.randn(len(images), 2, 3, device=images.device)
    grid = nn.functional.affine_grid(turn, list(images.shape), align_corners=False)
    warped = nn.functional.grid_sample(images, grid, align_corners=False)
    return warped + 0.1 * torch.randn_like(warped)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"), help="folder of the CSV file")
    options = parser.parse_args(arguments)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    logger = CSVLogger(options.out, name="")
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        logger=logger,
        log_every_n_steps=10,
        enable_checkpointing=False,
        callbacks=[TailLogger(every_n_steps=10)],
    )
    trainer.fit(SimCLR(), DataLoader(TensorDataset(images), 256, shuffle=True, drop_last=True))
    seen = trainer.callback_metrics
    print(f"weight of the shortfall logit {seen['tail/lam_mean']:.2f}, slope {seen['tail/beta_p50']:.1f}")
    print(f"every 10th batch: {Path(logger.log_dir) / 'metrics.csv'}")


if __name__ == "__main__":
    main()
