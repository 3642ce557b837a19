"""A deadline for a sweep: estimate how long a run takes, and whether it would end in time."""

import math
import time
from collections.abc import Mapping, Sequence

MARGIN = 1.1
"""Safety factor on the time of epochs: a device has less throughput with few concurrent runs than with many."""


class Clock:
    """Estimates the time of a run from the runs that have ended, and compares it with the deadline.

    Args:
        seconds: Seconds until the deadline.
        overhead: First guess of a run's seconds besides its epochs: start, compilation, evaluation.
        epoch: First guess of the seconds of an epoch of a run alone.
        side_by_side: Concurrent runs that have cores or a GPU of their own; more of them slow each other.
    """

    def __init__(self, seconds: float, overhead: float, epoch: float, side_by_side: int = 1) -> None:
        self.began = time.monotonic()
        self.seconds, self.overhead, self.epoch, self.side_by_side = seconds, overhead, epoch, side_by_side
        self.of: dict[str, tuple[float, float]] = {}  # overhead and epoch of each loss that had a run

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.began + self.seconds - time.monotonic()

    def estimate(self, epochs: int, at_once: int, loss: str = "") -> float:
        """Seconds that a run of ``epochs`` epochs takes while ``at_once`` runs are active.

        A loss without a run so far is taken to be as fast as that of the last run.
        """
        overhead, epoch = self.of.get(loss, (self.overhead, self.epoch))
        return overhead + MARGIN * epochs * epoch * self._slower(at_once)

    def fits(self, epochs: int, at_once: int, loss: str = "") -> bool:
        """Whether ``at_once`` runs of ``epochs`` epochs, all started now, would end in time."""
        return self.estimate(epochs, at_once, loss) <= self.left()

    def learn(self, took: float, epochs: Sequence[float], at_once: int, loss: str = "") -> None:
        """Update the estimates from a run of ``took`` seconds, those of each epoch, with at most ``at_once`` runs."""
        if epochs:
            usual = sorted(epochs)[len(epochs) // 2]  # a median, since the first epoch compiles
            self.epoch = usual / self._slower(at_once)
            self.overhead = max(took - usual * len(epochs), 0.0)
            self.of[loss] = self.overhead, self.epoch

    def _slower(self, at_once: int) -> float:
        """How many times as long an epoch takes if so many runs are active as in a run alone."""
        return max(at_once / self.side_by_side, 1.0)


def epoch_seconds(log: Sequence[Mapping[str, float]]) -> list[float]:
    """Seconds of each epoch of a log, which may have several rows per epoch.

    >>> epoch_seconds([{"epoch": 0.5, "seconds": 2.0}, {"epoch": 1, "seconds": 3.0}, {"epoch": 2, "seconds": 4.0}])
    [5.0, 4.0]
    """
    seconds: dict[int, float] = {}
    for row in log:
        epoch = math.ceil(row["epoch"])
        seconds[epoch] = seconds.get(epoch, 0.0) + row["seconds"]
    return list(seconds.values())
