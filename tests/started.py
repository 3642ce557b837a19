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

    @property
    def thresholds(self):
        return self.survey.thresholds

    @property
    def surveyed(self):
        return self.survey.stats

    @surveyed.setter
    def surveyed(self, stats):
        self.survey = self.survey._replace(stats=stats)


class Dense(Started):
    engine_of_class = dense.ENGINE


class Chunked(Started):
    engine_of_class = chunked.ENGINE


class Ring(Started):
    engine_of_class = ring.ENGINE


class Fused(Started):
    """What the kernels' searches have found can be read, too."""

    @property
    def engine_of_class(self):
        from weince.engines.fused import ENGINE  # needs Triton

        return ENGINE

    def __init__(self, problem: Problem, need: Need = NOTHING) -> None:
        super().__init__(problem, need)
        if self.survey.state is None:
            self.survey = self.engine.survey(problem, NOTHING)

    @property
    def near(self):
        return self.survey.state._near
