"""Track the quality of an encoder during training: the vote of nearest neighbours on validation images."""

import numpy as np
import torch

from weince.lab.tasks.images.config import VisionRun
from weince.lab.tasks.images.data import ImageData
from weince.lab.tasks.images.encoders import SimCLR
from weince.lab.tasks.images.evaluation.features import LabelledFeatures, extract
from weince.lab.tasks.images.evaluation.knn import score
from weince.lab.tasks.images.evaluation.protocol import split
from weince.lab.tasks.images.runs import build_model
from weince.scores import unit_rows

MOST_IMAGES = 10_000
"""Labelled training images to use, a fifth of them as queries: few, so that an evaluation takes little time."""


class Tracker:
    """Evaluates a copy of a run's encoder during training, without affecting the training.

    Args:
        run: The run.
        data: Its images.
        device: Where to compute.

    Raises:
        ValueError: The images have no labels.
    """

    def __init__(self, run: VisionRun, data: ImageData, device: torch.device) -> None:
        if data.train_labels is None:
            raise ValueError(f"{data.name} has no labels, which --track-every needs: leave it out")
        rows = np.sort(np.random.default_rng(0).permutation(len(data.train_labels))[:MOST_IMAGES])
        labels = np.asarray(data.train_labels)[rows]
        self.images = np.ascontiguousarray(data.train_images[rows])
        self.labels = torch.as_tensor(labels, dtype=torch.int64, device=device)
        self.parts = [torch.from_numpy(part).to(device) for part in split(labels, seed=1)]
        self.device = device
        # A copy, since the encoder in training may be compiled, captured and wrapped for several processes.
        self.encoder = build_model(run).encoder

    def vote(self, model: SimCLR) -> float:
        """Percentage of validation images that the vote of their neighbours classifies correctly."""
        self.encoder.load_state_dict(model.encoder.state_dict())
        embedded = extract(self.encoder, self.images, device=self.device, progress=False)
        features = unit_rows(embedded)
        bank, asked = (LabelledFeatures(features[rows], self.labels[rows]) for rows in self.parts)
        return float(score(bank, asked, (1,))[0])
