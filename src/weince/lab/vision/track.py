"""How good an encoder is while it trains: the vote of nearest neighbours on validation images."""

import numpy as np
import torch

from weince.lab.evaluate.features import LabelledFeatures, extract
from weince.lab.evaluate.knn import VOTE_TEMPERATURE, VOTERS, score
from weince.lab.evaluate.protocol import split
from weince.lab.vision.config import VisionRun
from weince.lab.vision.data import ImageData
from weince.lab.vision.encoders import SimCLR
from weince.lab.vision.runs import build_model
from weince.scores import unit_rows

MOST_IMAGES = 10_000
"""A look should take next to nothing: so many labelled training images, a fifth of them to ask about."""


class Tracker:
    """Judges the encoder of a run now and then, on a copy: training does not notice.

    Args:
        run: What is trained.
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
        # Of its own, since the one that trains may be compiled, captured and shared among processes.
        self.encoder = build_model(run).encoder

    def vote(self, model: SimCLR) -> float:
        """Percent of the validation images whose neighbours among the others vote for their class."""
        self.encoder.load_state_dict(model.encoder.state_dict())
        found = extract(self.encoder, self.images, device=self.device, progress=False)
        features = unit_rows(found)
        bank, asked = (LabelledFeatures(features[rows], self.labels[rows]) for rows in self.parts)
        return float(score(bank, asked, (1,), VOTERS, VOTE_TEMPERATURE, len(asked.labels))[0])
