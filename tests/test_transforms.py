"""The losses under transforms: torch.compile with dynamic batch sizes, and vectorized Jacobians."""

import pytest
import torch

from weince import (
    ContrastiveLoss,
    HCLLoss,
    InfoNCELoss,
    LogSumExp,
    SigLIPLoss,
    SoftmaxLink,
    WeibitLoss,
    WeinceLoss,
)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("make", "candidates"),
    [
        (InfoNCELoss, "clip"),
        (WeibitLoss, "cross"),
        (HCLLoss, "views"),
        (SigLIPLoss, "labels"),
        (WeinceLoss.paper, "views"),
        (WeinceLoss.negatives_only, "labels"),
    ],
)
def test_one_graph_serves_all_batch_sizes(make, candidates):
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    eager = make(candidates=candidates)
    compiled = torch.compile(make(candidates=candidates), dynamic=True, fullgraph=True, backend=keep)
    for n in (40, 7, 65):
        z_i, z_j = torch.randn(2, n, 16, dtype=torch.float64)
        z_i.requires_grad_()
        groups = torch.arange(n) // 3
        options = {"labels": groups} if candidates == "labels" else {"ids": groups}
        got, wanted = compiled(z_i, z_j, **options), eager(z_i, z_j, **options)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(torch.autograd.grad(got, z_i), torch.autograd.grad(wanted, z_i))
    assert len(graphs) == 1


class HardestLoss(ContrastiveLoss):
    """Sums over the hardest negatives, for one or more numbers of them."""

    def __init__(self, *numbers):
        super().__init__(reduction="none", engine="dense")
        self.numbers = numbers

    def sums(self, batch):
        return [LogSumExp(SoftmaxLink(0.3), hardest=number) for number in self.numbers]

    def combine(self, *sums):
        return sum(one.value - one.positive for one in sums)


@pytest.mark.parametrize("numbers", [(3,), (3, 5), (3, None)])
def test_vectorized_jacobian(numbers):
    z_i, z_j = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = HardestLoss(*numbers)

    def losses(z_i):
        return loss(z_i, z_j)

    wanted = torch.autograd.functional.jacobian(losses, z_i)
    assert wanted.abs().sum() > 1
    found = torch.autograd.functional.jacobian(losses, z_i, vectorize=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
