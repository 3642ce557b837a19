"""The kernels read rows and ids by address, so inputs with any strides must give the same sums."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

pytest.importorskip("triton", minversion="3.5")

from fused_cases import DEVICE, agree, views
from started import Dense, Fused

from weince.layouts import problems
from weince.links import FunctionLink, ShortfallLink, SoftmaxLink
from weince.sums import Part


def two(engine, numbers):
    return [Part(SoftmaxLink(0.3), "lse"), Part(ShortfallLink(2.0), "lse")]


@pytest.mark.parametrize("layout", ["cross", "clip", "views"])
def test_ids_that_are_a_column_or_expanded(layout):
    """Ids may be hashes: these differ in their upper half only."""
    rows = views(12, 16)
    table = torch.randint(0, 4, (12, 3), device=rows[0].device) << 32
    agree(two, rows, layout, ids=table[:, 0])
    agree(two, rows, layout, ids=torch.cat([table[:1, 0].expand(6), table[6:, 1]]))


def test_labels_that_differ_in_their_upper_half():
    labels = torch.arange(12, device=DEVICE) % 4 << 32
    agree(
        lambda engine, numbers: [Part(SoftmaxLink(0.3), "lse", among) for among in ("negatives", "positives")],
        views(12, 16), "labels", labels=labels,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["cross", "clip", "views"])
def test_rows_that_are_transposed(layout):
    rows = [row.T.contiguous().T for row in views(12, 16)]
    agree(two, rows, layout)
    for problem in problems(layout, *rows):
        torch.testing.assert_close(Fused(problem).positive_scores(), Dense(problem).positive_scores())


@pytest.mark.parametrize("spread", ["column", "expanded"])
def test_a_parameter_that_is_a_column_or_expanded(spread):
    rows = views(12, 16)
    table = torch.rand(12, 3, device=rows[0].device) + 1
    k = table[:, 0] if spread == "column" else table[0, :1].expand(12)
    link = FunctionLink(lambda s, k: k * s, k=k)
    agree(lambda engine, numbers: [Part(link, "lse")], rows, "cross")
