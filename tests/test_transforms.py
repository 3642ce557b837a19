"""The losses under what rewrites them: torch.compile with open batch sizes."""

import pytest
import torch

from weince import HCLLoss, InfoNCELoss, SigLIPLoss, WeibitLoss, WeinceLoss


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
    older = torch.__version__ < (2, 7) and make in (WeinceLoss.paper, WeinceLoss.negatives_only)
    assert len(graphs) == 1 + older  # torch 2.6 takes the first size of WEINCE for a fixed one
