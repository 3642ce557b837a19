"""The linear probe: one linear layer on frozen features, with several seeds trained as one batched problem.

Each seed has its own initial layer and its own order of the rows, exactly as if it were trained alone with
``nn.Linear`` and ``torch.optim.Adam``; the weights of all seeds are one tensor, so that a step of all of them is
one set of operations. On a GPU a whole epoch is one CUDA graph.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weince.lab.tasks.images.evaluation.features import LabelledFeatures
from weince.lab.tasks.images.evaluation.protocol import SEEDS, Split
from weince.lab.training.capture import run_aside
from weince.progress import bars
from weince.scores import product

EPOCHS, BATCH = 100, 256
BETAS, EPS = (0.9, 0.999), 1e-8  # Adam's defaults
CHUNK = 4096  # rows to evaluate at a time


class LinearProbe(NamedTuple):
    """Accuracies in percent after the last epoch, one for each seed."""

    seeds: tuple[int, ...]
    validation: tuple[float, ...]
    test: tuple[float, ...]


class Layers(NamedTuple):
    """The layers of all seeds and the state of their Adam; every tensor is changed in place."""

    weight: Tensor  # (seeds, classes, features)
    bias: Tensor  # (seeds, 1, classes)
    # first and second moment of the weight, then of the bias
    moments: tuple[Tensor, Tensor, Tensor, Tensor]
    steps: Tensor  # ()

    def clone(self) -> "Layers":
        moments = tuple(moment.clone() for moment in self.moments)
        return Layers(self.weight.clone(), self.bias.clone(), moments, self.steps.clone())  # type: ignore[arg-type]


def linear_probe(
    train: LabelledFeatures,
    test: LabelledFeatures,
    *,
    split: Split,
    seeds: Sequence[int] = SEEDS,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    lr: float = 3e-4,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> LinearProbe:
    """Train one linear layer per seed on ``split.train``, evaluate it on ``split.validation`` and on all of `test`.

    The features are used as they are: no scaling, no weight decay.

    Args:
        train: Features of the labelled training set.
        test: Features of the test set.
        split: Rows of `train` to train and to validate on.
        seeds: Each seed draws its own initial layer and order of the rows.
        epochs: Passes over the rows.
        batch: Rows in a step; the last of an epoch may be smaller.
        lr: Adam's step size.
        device: Where to compute.
        progress: Show a bar.
    """
    train.check("train")
    test.check("test")
    place = torch.device(device)
    features, labels = (tensor.to(place) for tensor in train)
    rows, held_out = (torch.from_numpy(indices).to(place) for indices in split)
    layers = fit(
        features[rows].float(),
        labels[rows],
        int(labels.max()) + 1,
        seeds=seeds,
        epochs=epochs,
        batch=batch,
        lr=lr,
        progress=progress,
    )
    validation = _accuracy(layers, features[held_out].float(), labels[held_out])
    judged = _accuracy(layers, test.features.to(place).float(), test.labels.to(place))
    return LinearProbe(tuple(seeds), validation, judged)


def fit(
    x: Tensor,
    y: Tensor,
    classes: int,
    *,
    seeds: Sequence[int],
    epochs: int,
    batch: int,
    lr: float,
    progress: bool = True,
) -> Layers:
    """One linear layer per seed, trained on the rows ``(n, f)`` of `x` and their labels ``(n,)``."""
    if not seeds or epochs < 1 or batch < 1:
        raise ValueError(
            f"wanted seeds, and epochs and batch of at least 1; got {list(seeds)}, {epochs}, {batch}"
        )
    layers = _start(seeds, classes, x.shape[1], x.device)
    order = torch.zeros(len(seeds), len(x), dtype=torch.int64, device=x.device)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    run_epoch = _epoch(layers, x, y, order, batch, lr)
    with bars(shown=progress) as bar:
        task = bar.add_task(f"linear probe, {len(seeds)} seeds", total=epochs)
        for _ in range(epochs):
            # Drawn on the CPU, so that every device sees the same orders.
            order.copy_(torch.stack([torch.randperm(len(x), generator=g) for g in generators]))
            run_epoch()
            bar.advance(task)
    return layers


def _start(seeds: Sequence[int], classes: int, width: int, device: torch.device) -> Layers:
    """The layers that ``nn.Linear`` makes after ``torch.manual_seed(seed)``, with a fresh state of Adam."""
    weights, biases = [], []
    with torch.random.fork_rng(devices=[]):
        for seed in seeds:
            torch.manual_seed(seed)
            layer = nn.Linear(width, classes)
            weights.append(layer.weight.detach())
            biases.append(layer.bias.detach())
    weight = torch.stack(weights).to(device)
    bias = torch.stack(biases).unsqueeze(1).to(device)
    moments = tuple(torch.zeros_like(like) for like in (weight, weight, bias, bias))
    return Layers(weight, bias, moments, torch.zeros((), device=device))  # type: ignore[arg-type]


def _step(layers: Layers, x: Tensor, y: Tensor, lr: float) -> None:
    """One step of every seed on its own batch, x ``(seeds, b, features)`` and y ``(seeds, b)``."""
    classes = torch.arange(layers.weight.shape[1], device=x.device)
    logits = product(x, layers.weight.mT) + layers.bias
    # The gradient of the mean cross-entropy with respect to the logits is (softmax - target) / b.
    error = (logits.softmax(-1) - (y.unsqueeze(-1) == classes).to(x.dtype)) / x.shape[1]
    layers.steps.add_(1)
    _adam(layers.weight, product(error.mT, x), *layers.moments[:2], layers.steps, lr)
    _adam(layers.bias, error.sum(1, keepdim=True), *layers.moments[2:], layers.steps, lr)


def _adam(
    parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, steps: Tensor, lr: float
) -> None:
    first.lerp_(gradient, 1 - BETAS[0])
    second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    # 1 - beta^t, without the cancellation that float32 would suffer for beta near 1.
    of_first, of_second = (-torch.expm1(steps * math.log(beta)) for beta in BETAS)
    parameter.sub_(lr * (first / of_first) / ((second / of_second).sqrt() + EPS))


@torch.no_grad()
def _epoch(layers: Layers, x: Tensor, y: Tensor, order: Tensor, batch: int, lr: float) -> Callable[[], None]:
    """A function that trains one epoch in the order that `order` ``(seeds, n)`` holds when it is called."""

    @torch.no_grad()
    def run() -> None:
        for start in range(0, len(x), batch):
            rows = order[:, start : start + batch]
            _step(layers, x[rows], y[rows], lr)

    if not x.is_cuda:
        return run
    # CUDA libraries must not initialise themselves during a capture: run the steps on scratch layers first.
    scratch = layers.clone()

    def warm_up() -> None:
        for rows in (order[:, :batch], order[:, len(x) // batch * batch :]):
            if rows.shape[1]:
                _step(scratch, x[rows], y[rows], lr)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(x.device):
        run_aside(warm_up)
        with torch.cuda.graph(graph):
            run()
    return graph.replay


@torch.no_grad()
def _accuracy(layers: Layers, x: Tensor, y: Tensor) -> tuple[float, ...]:
    """Percentage of rows that each seed's layer classifies correctly."""
    if not len(x):
        raise ValueError("a probe needs at least one row to be judged on")
    right = torch.zeros(len(layers.weight), dtype=torch.int64, device=x.device)
    for start in range(0, len(x), CHUNK):
        logits = product(x[start : start + CHUNK], layers.weight.mT) + layers.bias
        right += (logits.argmax(-1) == y[start : start + CHUNK]).sum(1)
    return tuple(100.0 * count / len(x) for count in right.tolist())
