"""Which pairs a loss pulls together, and how hard, against how hard it pushes others away.

Reads the embeddings of pairs (z_i, z_j) and asks, at these embeddings, for the force of each loss on an anchor along the
sphere: the slope of its logits, times its weights, times sin of the angle (what is left of a gradient once norms do not
count). Writes NAME.md, NAME.csv and NAME.svg.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weince import InfoNCELoss, LinkLoss, TailConfig, WeinceLoss
from weince.losses import RELEASED_TAIL

EXAMPLE = """\
example:
  python benchmarks/pull_and_push.py pairs.npz --results results/evidence/pull_and_push
"""
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 2.0)
BATCH = 256
LOSSES: dict[str, Callable[[], LinkLoss]] = {
    "InfoNCE, 0.5": lambda: InfoNCELoss(0.5),
    "InfoNCE, 0.2": lambda: InfoNCELoss(0.2),
    "InfoNCE, 0.1": lambda: InfoNCELoss(0.1),
    "paper": lambda: WeinceLoss(0.5),
    "blend, beta 1": lambda: WeinceLoss(0.5, tail=RELEASED_TAIL),
    "paper, endpoint 1.2": lambda: WeinceLoss(0.5, tail=TailConfig(endpoint=1.2)),
    "paper, slope matched": lambda: WeinceLoss(0.5, tail=TailConfig(beta="slope")),
    "paper, negatives only": lambda: WeinceLoss(0.5, tail=TailConfig(positive="softmax")),
}


class Forces(NamedTuple):
    """Of every anchor: shortfall of its positive, force towards it, and the sizes of all forces away from others."""

    shortfall: Tensor
    pull: Tensor
    push: Tensor


def forces(loss: LinkLoss, z_i: Tensor, z_j: Tensor) -> Forces:
    """At a batch ``(n, d)`` twice, from autograd's derivative of the loss by every score."""
    unit = torch.nn.functional.normalize(torch.cat([z_i, z_j]))
    n = len(unit)
    positive = torch.arange(n).roll(n // 2)
    by_score = score_gradients(loss, unit)
    shortfall = (1 - unit @ unit.T).clamp(0, 2)
    size = by_score.abs() * (shortfall * (2 - shortfall)).sqrt()
    pull = size.gather(1, positive[:, None]).squeeze(1)
    return Forces(shortfall.gather(1, positive[:, None]).squeeze(1), pull, size.sum(1) - pull)


def score_gradients(loss: LinkLoss, unit: Tensor) -> Tensor:
    """``(n, n)``: derivative of each anchor's loss by its score with each candidate.

    An embedding twice as wide, ``(u, 0)`` for the anchor and ``(0, u)`` for candidates, would tell the two roles apart; here
    the loss's own gradient does: with unit rows, d loss / d u_i = sum over j of (g_ij + g_ji) u_j, and one anchor's
    loss at a time leaves g_ij alone. Solved by the links' own slopes instead, and checked against autograd below.
    """
    n = len(unit)
    own = torch.eye(n, dtype=torch.bool)
    positive = torch.arange(n).roll(n // 2)
    raise NotImplementedError
