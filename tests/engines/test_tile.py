"""Sums over the hardest negatives: gathering the columns first gives the same result as masking the matrix."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weince.engines.tile import Tile
from weince.layouts import Layout, problems
from weince.links import FunctionLink, SoftmaxLink
from weince.scores import shortfalls
from weince.sums import Part


@given(
    pairs=st.integers(2, 9),
    number=st.integers(1, 20),
    among=st.sampled_from(["negatives", "same view"]),
    kind=st.sampled_from(["lse", "sum", "softplus"]),
    own=st.booleans(),
    ties=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_few_as_masks(pairs, number, among, kind, own, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    z_i, z_j = (torch.randn(pairs, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    if ties:
        z_i[: pairs // 2] = z_i[0]
    (problem,) = problems(Layout("views", views=True), z_i, z_j)
    matrix = shortfalls(problem.anchors, problem.candidates)
    ordered = Tile(problem, matrix).hidden().sort(dim=1).values
    threshold = ordered[:, min(number, 2 * pairs - 3) - 1]
    learned = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    link = FunctionLink(lambda s, k: s * k + s**3, k=learned) if own else SoftmaxLink(learned)
    part = Part(link, kind, among, number)

    few = Tile(problem, matrix).sum(part, threshold, slopes=True)
    wanted = Tile(problem, matrix)._sum(part, threshold, slopes=True)
    assert few.columns is not None
    slopes = torch.zeros_like(matrix).scatter_add_(1, few.columns, few.slopes)
    torch.testing.assert_close(few.value, wanted.value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slopes, wanted.slopes, rtol=1e-12, atol=1e-12)
    assert few.effects.keys() == wanted.effects.keys() != set()
    for name, effect in wanted.effects.items():
        torch.testing.assert_close(few.effects[name], effect, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hardest", [None, 3])
@pytest.mark.parametrize("kind", ["lse", "sum", "softplus"])
@pytest.mark.parametrize(
    "function",
    [
        lambda s, k: 5 * k * s.abs().sqrt(),  # the slope is infinite at 0
        lambda s, k: k * s.abs().log(),  # the logit and its derivative by k are infinite at 0
        lambda s, k: k * torch.log(1 - s),  # the same at 1, an anchor's score with itself
        lambda s, k: k * torch.where(s < 0.97, s, torch.nan),
    ],
)
def test_who_takes_no_part_has_no_infinite_slope(function, kind, hardest):
    """Candidates outside the sum add no NaN: compare with loops over the candidates inside it."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    ignore = torch.zeros(8, 8, dtype=torch.bool)
    ignore[2] = True  # an anchor without candidates
    ignore[3, 4:] = True  # an anchor with fewer negatives than `hardest` asks for
    (problem,) = problems("views", *z.split(4), ignore=ignore)
    matrix = shortfalls(problem.anchors, problem.candidates)
    hidden = Tile(problem, matrix).hidden()
    threshold = None if hardest is None else hidden.sort(dim=1).values[:, hardest - 1]
    k = torch.full((8,), 0.7, dtype=torch.float64, requires_grad=True)
    found = Tile(problem, matrix).sum(
        Part(FunctionLink(function, k=k), kind, "negatives", hardest), threshold, slopes=True
    )
    slopes = found.slopes
    if found.columns is not None:
        slopes = torch.zeros_like(matrix).scatter_add_(1, found.columns, slopes)
    for row, shortfall in enumerate(hidden):
        order = shortfall.argsort()[: shortfall.isfinite().sum()][:hardest]
        score = (1 - shortfall[order]).requires_grad_()
        logits = function(score, k[row])
        total = {
            "lse": logits.logsumexp(0),
            "sum": logits.sum(),
            "softplus": torch.nn.functional.softplus(logits).sum(),
        }[kind]
        wanted, by_k = torch.zeros_like(shortfall), torch.zeros_like(k)
        if len(order):
            by_score, by_k = torch.autograd.grad(total, [score, k])
            wanted[order] = by_score
        torch.testing.assert_close(found.value[row], total.detach())
        torch.testing.assert_close(slopes[row], wanted)
        torch.testing.assert_close(found.effects["k"][row], by_k[row])


def test_only_the_given_shortfalls_are_overwritten():
    (problem,) = problems("cross", torch.eye(3), torch.eye(3))
    tile = Tile(problem, torch.ones(3, 3))
    tile.put(torch.tensor([[0, 2], [-1, 1], [-1, -1]]), torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]))
    assert torch.equal(tile.shortfall, torch.tensor([[0.1, 1.0, 0.2], [1.0, 0.4, 1.0], [1.0, 1.0, 1.0]]))
