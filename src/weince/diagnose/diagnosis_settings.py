"""Settings of a diagnosis: how much it computes."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weince.diagnose.reading import InputError
from weince.evt.link_test import Competing, check_competing

FEWEST_BATCHES = 4  # two to fit the link on, two to judge it
FEWEST_PAIRS = 32  # in a batch


@dataclass(frozen=True)
class DiagnosisSettings:
    """How much to compute."""

    batch_size: int | None = None  # embeddedPairs in a batch; None for 256, or fewer when there are few pairs
    batches: int = 32  # the most batches
    seed: int = 0  # seed of every draw
    bootstraps: int = 2000  # resamplings of the held-out batches
    null_draws: int = 200  # simulations of the likelihood ratio under softmax
    tail_bootstraps: int = (
        100  # resamplings of batches for xi, and simulations for the tests of the tail's fit
    )
    quantile: float = 0.99  # quantile of the negatives' scores that is the threshold of the tail
    temperature: float | None = None  # the temperature the model was trained with, if known
    points: int = 21  # number of points of the paper's curves over lam and the threshold
    risk_pairs: int = (
        768  # the most pairs in the one batch on which the paper's risk and gradient are compared
    )
    # who competes with a positive: "views", all other rows of both views of the batch; "cross", for a row of z_i
    # only the rows of z_j. As in the loss that the model was trained with
    candidates: Competing = "views"

    @property
    def competing(self) -> str:
        """Who competes, in words."""
        return "the rows of z_j" if self.candidates == "cross" else "all other rows of both views"

    def __post_init__(self) -> None:
        if self.batches < FEWEST_BATCHES:
            raise InputError(
                f"at least {FEWEST_BATCHES} batches are needed, two to fit the link and two to judge it; "
                f"got {self.batches}"
            )
        if self.batch_size is not None and self.batch_size < FEWEST_PAIRS:
            raise InputError(f"a batch needs at least {FEWEST_PAIRS} pairs; got {self.batch_size}")
        least = min(self.bootstraps, self.null_draws, self.tail_bootstraps)
        if least < 10:
            raise InputError(f"every number of bootstraps must be at least 10; got {least}")
        if self.seed < 0:
            raise InputError(f"the seed must be at least 0; got {self.seed}")
        try:
            check_competing(self.candidates)
        except ValueError as error:
            raise InputError(str(error)) from None
        if not 0.5 <= self.quantile < 1.0:
            raise InputError(f"the threshold's quantile must lie in [0.5, 1); got {self.quantile}")
        if self.temperature is not None and not 0.0 < self.temperature < np.inf:
            raise InputError(f"the temperature must be positive; got {self.temperature}")


QUICK = DiagnosisSettings(
    batches=16, bootstraps=500, null_draws=99, tail_bootstraps=50, points=11, risk_pairs=384
)


def settings_for(quick: bool = False, **changes: Any) -> DiagnosisSettings:
    """The default settings, or those of a quick diagnosis, with some of them changed."""
    # Python's own numbers: summary.json cannot hold those of numpy or torch.
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in changes.items()}
    return replace(QUICK if quick else DiagnosisSettings(), **plain)
