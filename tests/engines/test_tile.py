"""Sums over the hardest negatives: gathered first, they are what masks over the whole matrix give."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from weince.candidates import contests
from weince.engines.tile import Part, Tile
from weince.links import FunctionLink, SoftmaxLink
from weince.scores import shortfalls


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
    (contest,) = contests("views", z_i, z_j, views=True)
    matrix = shortfalls(contest.anchors, contest.candidates)
    ordered = Tile(contest, matrix).hidden().sort(dim=1).values
    threshold = ordered[:, min(number, 2 * pairs - 3) - 1]
    learned = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    link = FunctionLink(lambda s, k: s * k + s**3, k=learned) if own else SoftmaxLink(learned)
    part = Part(link, kind, among, number)

    few = Tile(contest, matrix).sum(part, threshold, slopes=True)
    wanted = Tile(contest, matrix)._sum(part, threshold, slopes=True)
    assert few.columns is not None
    slopes = torch.zeros_like(matrix).scatter_add_(1, few.columns, few.slopes)
    torch.testing.assert_close(few.value, wanted.value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slopes, wanted.slopes, rtol=1e-12, atol=1e-12)
    assert few.effects.keys() == wanted.effects.keys() != set()
    for name, effect in wanted.effects.items():
        torch.testing.assert_close(few.effects[name], effect, rtol=1e-12, atol=1e-12)
