"""The types that calls return: ``make lint`` checks them with mypy, and a test runs this file."""

from typing import assert_type

from torch import Tensor

from weince import (
    ContrastiveLoss,
    DCLLoss,
    InfoNCELoss,
    LinkLoss,
    LogSumExp,
    LossOutput,
    SoftmaxLink,
    Summed,
    TailStats,
    WeinceLoss,
)


class Mine(ContrastiveLoss):
    def sums(self, batch: object) -> LogSumExp:
        return LogSumExp(SoftmaxLink(0.2))

    def combine(self, lse: Summed) -> Tensor:
        return lse.cross_entropy()


def calls(z: Tensor, labels: Tensor) -> None:
    assert_type(InfoNCELoss(0.2)(z, z), Tensor)
    assert_type(DCLLoss()(z, z, ids=labels), Tensor)
    assert_type(WeinceLoss.paper()(z, z, return_stats=False), Tensor)
    assert_type(LinkLoss(lambda s: 3 * s, candidates="labels")(z, labels=labels), Tensor)
    assert_type(Mine()(z, z), Tensor)
    output = WeinceLoss()(z, z, return_stats=True)
    assert_type(output, LossOutput)
    assert_type(output.stats, TailStats)
    assert_type(output.loss, Tensor)
