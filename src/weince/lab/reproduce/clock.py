"""A deadline for a sweep: how long a run will take, and whether it would end in time."""

import math
import time
from collections.abc import Mapping, Sequence

MARGIN = 1.1
"""Factor on estimated epochs, since a device does less for few runs at once than for many."""


class Clock:
    """How long a run will take, from those that have ended, and whether that is before the deadline.

    Args:
        seconds: Until the deadline.
        overhead: First guess of a run's seconds besides its epochs: start, compilation, evaluation.
        epoch: First guess of the device's seconds for an epoch; runs at once share the device.
    """

    def __init__(self, seconds: float, overhead: float, epoch: float) -> None:
        self.began = time.monotonic()
        self.seconds, self.overhead, self.epoch = seconds, overhead, epoch

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.began + self.seconds - time.monotonic()

    def estimate(self, epochs: int, at_once: int) -> float:
        """Seconds that a run of so many epochs takes, if so many run at once."""
        return self.overhead + MARGIN * epochs * self.epoch * at_once

    def fits(self, epochs: int, at_once: int) -> bool:
        """Whether so many runs of so many epochs, started now and at once, would end in time."""
        return self.estimate(epochs, at_once) <= self.left()

    def learn(self, took: float, epochs: Sequence[float], at_once: int) -> None:
        """Take in a run: seconds of all of it and of each epoch, and the most runs at once, itself counted."""
        if epochs:
            usual = sorted(epochs)[len(epochs) // 2]  # the first one compiles
            self.epoch = usual / at_once
            self.overhead = max(took - usual * len(epochs), 0.0)


def epoch_seconds(log: Sequence[Mapping[str, float]]) -> list[float]:
    """Seconds of each epoch of a log, which may have several rows for one.

    >>> epoch_seconds([{"epoch": 0.5, "seconds": 2.0}, {"epoch": 1, "seconds": 3.0}, {"epoch": 2, "seconds": 4.0}])
    [5.0, 4.0]
    """
    found: dict[int, float] = {}
    for row in log:
        epoch = math.ceil(row["epoch"])
        found[epoch] = found.get(epoch, 0.0) + row["seconds"]
    return list(found.values())
