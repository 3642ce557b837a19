"""Batches of every layout, and the comparison of the fused engine with the dense one in float64.

Without a GPU, set ``TRITON_INTERPRET`` before importing this module.
"""

import interpreter  # noqa: F401  (makes it fast)
import torch
from started import Dense, Fused

from weince.layouts import Layout, problems
from weince.scores import shortfalls
from weince.sums import Need

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOTHING = Need()


def views(n, d, *, clusters=3, noise=0.5, seed=0, dtype=torch.float32):
    """Two noisy views of clustered rows, of varying length."""
    torch.manual_seed(seed)
    centres = torch.randn(clusters, d, device=DEVICE)
    rows = centres[torch.randint(clusters, (n,), device=DEVICE)] + noise * torch.randn(n, d, device=DEVICE)
    other = rows + 0.5 * noise * torch.randn(n, d, device=DEVICE)
    length = torch.rand(n, 1, device=DEVICE) + 0.2
    return (rows * length).to(dtype), other.to(dtype)


def named(rows):
    return dict(zip(("z_i", "z_j", "negatives"), rows, strict=False))


class Numbers:
    """Makes and remembers parameters of links: scalars, or one value per anchor, that require a gradient."""

    def __init__(self, dtype):
        self.dtype, self.made = dtype, []

    def __call__(self, value, anchors=None):
        spread = torch.tensor(value) if anchors is None else value * torch.linspace(0.7, 1.2, anchors)
        self.made.append(spread.to(DEVICE, self.dtype).requires_grad_())
        return self.made[-1]


def clear(problem, parts):
    """Which anchors of a problem have no near-tie at the last of the hardest negatives that a part sums.

    A near-tie is a gap below 2**-16 that is not 0: rows stored as two bfloat16 parts have 16 bits.
    """
    numbers = [part.hardest for part in parts if part.hardest is not None]
    hidden = problem.leave_out(shortfalls(problem.anchors, problem.candidates), problem.negatives, torch.inf)
    nearest = hidden.topk(min(max(numbers, default=0) + 1, hidden.shape[1]), dim=1, largest=False).values
    gaps = nearest.diff(dim=1)
    gaps = gaps[:, [number - 1 for number in numbers if number <= gaps.shape[1]]]
    return ~((gaps < 2**-16) & (gaps > 0)).any(1)


def evaluate(engine, dtype, leaves, layout, parts, need, options, exact=None):
    """Values of all parts, gradients of their weighted sum by embeddings and parameters, and the engines.

    ``exact``: the problems in float64, to leave out anchors with near-ties: their values count as 0.
    """
    rows = [leaf.detach().to(dtype if leaf.dtype == torch.float32 else leaf.dtype) for leaf in leaves]
    if dtype == torch.float64:
        rows = [row.double() for row in rows]
    rows = [row.requires_grad_() for row in rows]
    numbers, values, engines = Numbers(dtype), [], []
    for index, problem in enumerate(problems(layout, **named(rows), **options)):
        engines.append(engine(problem, need))
        own = parts(engines[-1], numbers)
        found = engines[-1].evaluate(own)
        judged = torch.ones_like(found[0], dtype=torch.bool) if exact is None else clear(exact[index], own)
        values += [value.where(judged, 0.0) for value in found]
    weights = 0.5 + torch.rand(len(values), len(values[0]), generator=torch.Generator().manual_seed(1)).to(
        DEVICE
    )
    found = torch.stack(values)
    total = (found.masked_fill(found == -torch.inf, 0) * weights).sum()
    leaves = [*rows, *numbers.made]
    return found.detach().double(), [g.double() for g in torch.autograd.grad(total, leaves)], engines


def agree(
    parts,
    leaves,
    layout="views",
    need=NOTHING,
    *,
    value=2e-5,
    gradient=1e-4,
    engine=Fused,
    **options,
):
    """Check an engine's values and gradients against Dense in float64; returns its engines, one per problem."""
    # Rounding decides which of two near-ties enters a sum over the hardest: leave out anchors with near-ties.
    judged = problems(layout, **named([leaf.detach().double() for leaf in leaves]), **options)
    ours, our_gradients, engines = evaluate(
        engine, torch.float32, leaves, layout, parts, need, options, judged
    )
    before = iter(engines)

    def same(engine, numbers):  # same statistics in both; other tests compare them
        own = next(before)
        if own.surveyed is not None:
            engine.surveyed = type(own.stats)(*(line.double() for line in own.stats))
        return parts(engine, numbers)

    exact, gradients, _ = evaluate(Dense, torch.float64, leaves, layout, same, need, options, judged)
    torch.testing.assert_close(ours, exact, rtol=value, atol=value)
    for mine, theirs in zip(our_gradients, gradients, strict=True):
        assert float((mine - theirs).norm()) <= gradient * max(float(theirs.norm()), 1e-3)
    return engines


def batch(layout, n=12, d=40):
    """Rows, candidates and options of a layout such as "views, ids"; its first word names the candidates."""
    name, rows, options = layout.split(",")[0], views(n, d), {}
    if "negatives" in layout:
        rows = (*rows, torch.randn(7, d, device=DEVICE))
    if "ids" in layout:
        options["ids"] = torch.arange(n, device=DEVICE) % (n - 3)
    if "labels" in layout:
        options["labels"] = torch.arange(n, device=DEVICE) % 4
    if "ignore" in layout:
        size = n if name == "clip" else 2 * n
        options["ignore"] = (torch.rand(size, size, generator=torch.Generator().manual_seed(2)) < 0.2).to(
            DEVICE
        )
    if "same" in layout:
        name = Layout(name, views=True)
    return rows, name, options
