"""A loss of your own: a few lines of torch, and every engine computes it.

    python examples/own_loss.py                             256 pairs, 30 steps with each loss: a few seconds
    python examples/own_loss.py --pairs 16384 --steps 1     32,768 rows against each other: minutes, in linear memory

There are two ways to write a loss. A link is a plain function of the score; the loss is the cross-entropy of the
positive under it. A subclass says what is summed over an anchor's candidates, and how the sums combine. Neither needs
the whole matrix of scores: with ``engine="chunked"``, memory is linear in the batch.

The toy problem: points on a few directions are seen twice with noise, and a linear map should tell them apart.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weince import ContrastiveLoss, LinkLoss, LogSumExp, SoftmaxLink, Summed


class Mine(ContrastiveLoss):
    """DCL with more weight on hard negatives: the mean of its values over all of them and over the ten hardest."""

    def sums(self, batch: object) -> list[LogSumExp]:
        return [LogSumExp(SoftmaxLink(0.2)), LogSumExp(SoftmaxLink(0.2), hardest=10)]

    def combine(self, every: Summed, hardest: Summed) -> Tensor:
        return (every.value + hardest.value) / 2 - every.positive


def cubic(s: Tensor) -> Tensor:
    """A link: steeper where the score is high."""
    return 4 * s + 2 * s**3


def views(pairs: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(pairs, 8, generator=generator) @ torch.randn(8, width, generator=generator)
    first, second = (directions + torch.randn(pairs, width, generator=generator) for _ in range(2))
    return first, second


def train(loss: ContrastiveLoss, inputs: tuple[Tensor, Tensor], steps: int) -> tuple[float, float]:
    """The loss of the first step and that of the last."""
    torch.manual_seed(0)
    encoder = nn.Linear(inputs[0].shape[1], 32)
    optimizer = torch.optim.Adam([*encoder.parameters(), *loss.parameters()], 0.01)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(encoder(inputs[0]), encoder(inputs[1]))
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    return values[0], values[-1]


def peak_mib() -> float | None:
    """Peak memory of this process so far, in MiB; None on Windows, which lacks the call."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train with losses of one's own.")
    parser.add_argument("--pairs", type=int, default=256, help="batch size")
    parser.add_argument("--width", type=int, default=64, help="width of the embeddings")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    options = parser.parse_args(arguments)
    losses = {"link": LinkLoss(cubic, engine="chunked"), "subclass": Mine(engine="chunked")}

    inputs = views(options.pairs, options.width)
    for loss in losses.values():
        train(loss, views(64, options.width), 2)  # load first what is not the loss's own memory
    before = peak_mib()
    for name, loss in losses.items():
        first, last = train(loss, inputs, options.steps)
        print(f"{name}: {first:.3f} at the first of {options.steps} steps, {last:.3f} at the last")
    after = peak_mib()
    if before is not None and after is not None:
        matrix = (2 * options.pairs) ** 2 * 4 / 2**20
        print(
            f"memory beyond the inputs: {after - before:.0f} MiB; the matrix of scores would be {matrix:,.0f} MiB"
        )


if __name__ == "__main__":
    main()
