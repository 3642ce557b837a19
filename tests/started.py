"""Engines at work on one problem, as the tests of engines call them."""

from weince.engines import chunked, dense, ring
from weince.pairs import Problem
from weince.scores import no_autocast
from weince.sums import NOTHING, Batch, Need


class Started(Batch):
    """A batch on one engine."""

    def __init__(self, problem: Problem, need: Need = NOTHING) -> None:
        with no_autocast(problem.anchors.device):
            super().__init__(problem, self.engine_of_class, need)

    def evaluate(self, parts):
        return self.values(parts)


class Dense(Started):
    engine_of_class = dense.ENGINE


class Chunked(Started):
    engine_of_class = chunked.ENGINE


class Ring(Started):
    engine_of_class = ring.ENGINE


class Fused(Started):
    @property
    def engine_of_class(self):
        from weince.engines.fused import ENGINE  # needs Triton

        return ENGINE
