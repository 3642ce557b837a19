"""Labelled digits with pytorch-metric-learning: DCL in place of its SupConLoss, against a memory of earlier batches.

    python examples/metric_learning.py                 seconds on a CPU; needs pip install pytorch-metric-learning

That library's trainer trains on half of the digits. The script prints how often, within the other half, the nearest
neighbour of a digit has the same label (precision at 1), before and after.
"""

import argparse

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.trainers import MetricLossOnly
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from weince import DCLLoss
from weince.integrations.metric_learning import CrossBatchMemory, MetricLossAdapter


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    nearest = AccuracyCalculator(include=("precision_at_1",), k=1, knn_func=CustomKNN(CosineSimilarity()))

    def accuracy() -> float:
        """Precision at 1, in percent, on the digits that were not trained on."""
        with torch.no_grad():
            found = nearest.get_accuracy(encoder(images[1::2]), labels[1::2])
        return 100 * found["precision_at_1"]

    before = accuracy()
    loss = CrossBatchMemory(
        MetricLossAdapter(DCLLoss(0.1, candidates="labels")), embedding_size=16, memory_size=512
    )
    trainer = MetricLossOnly(
        models={"trunk": encoder},
        optimizers={"trunk_optimizer": torch.optim.Adam(encoder.parameters(), lr=1e-3)},
        loss_funcs={"metric_loss": loss},
        dataset=TensorDataset(images[::2], labels[::2]),
        batch_size=128,
        dataloader_num_workers=0,
    )
    trainer.train(num_epochs=options.epochs)
    print(f"nearest neighbour has the same label: {before:.1f} % before, {accuracy():.1f} % after")


if __name__ == "__main__":
    main()
