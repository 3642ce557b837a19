"""The work of each rank in ``test_distributed.py``, and the same work by one process on the whole batch."""

import itertools
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from cases import CASES, learned
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weince import (
    BlendLink,
    ContrastiveLoss,
    InfoNCELoss,
    LinkLoss,
    LogSumExp,
    SoftmaxLink,
    WeinceLoss,
    info_nce_loss,
)
from weince.cached import cached_step
from weince.losses import weince as terms
from weince.losses.weince import RunningSlope
from weince.scores import unit_rows

PAIRS = 24
SIZES = {
    "even": {1: (24,), 2: (12, 12), 4: (6, 6, 6, 6)},
    "uneven": {1: (24,), 2: (17, 7), 4: (11, 1, 7, 5)},
}
LAYOUTS = {
    "views": {"candidates": "views"},
    "views, ids": {"candidates": "views", "ids": True},
    "cross": {"candidates": "cross"},
    "cross, negatives": {"candidates": "cross", "negatives": True, "ids": True},
    "clip": {"candidates": "clip"},
    "labels": {"candidates": "labels", "labels": True},
}


def cases():
    """(loss, layout, engine, reduction, sizes, dtype) of all comparisons; most use uneven ranks, the harder case."""
    for engine in ("dense", "chunked", "ring"):
        for layout in LAYOUTS:
            yield "paper", layout, engine, "mean", "uneven", torch.float64
        yield "Weibit", "views", engine, "sum", "uneven", torch.float64
        yield "paper", "labels", engine, "sum", "uneven", torch.float64
        yield "paper", "clip", engine, "sum", "even", torch.float64
        yield "paper", "clip", engine, "none", "uneven", torch.float64
        yield "AlignUniform", "labels", engine, "none", "uneven", torch.float64
        yield "paper", "views", engine, "mean", "even", torch.float64
        yield "InfoNCE", "views", engine, "mean", "even", torch.float64
        yield "paper", "views", engine, "mean", "uneven", torch.float32
    # Every loss with both ways to share candidates, alternating over its layouts; views-only losses get both.
    for name, case in CASES.items():
        engines = itertools.cycle(["chunked", "ring"])
        for layout in ("views, ids", "cross, negatives", "clip", "labels"):
            lacks = (layout == "labels" and not case.labels) or (case.views_only and "views" not in layout)
            if name != "paper" and not lacks:
                for _ in range(2 if case.views_only else 1):
                    yield name, layout, next(engines), "mean", "uneven", torch.float64


class Model(nn.Module):
    """An encoder with the loss, as wrapped in DDP."""

    def __init__(self, name, layout, engine, reduction, dtype):
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Linear(10, 8)
        candidates = LAYOUTS[layout]["candidates"]
        how = {"gather": "ring"} if engine == "ring" else {"engine": engine}
        self.loss = CASES[name].make(learned, candidates=candidates, reduction=reduction, **how)
        self.to(dtype)

    def forward(self, x_i, x_j=None, negatives=None, **options):
        if negatives is not None:
            options["negatives"] = self.encoder(negatives)
        z_j = None if x_j is None else self.encoder(x_j)
        return self.loss(self.encoder(x_i), z_j, return_stats=True, **options)


def batch(layout, dtype, rows=slice(None)):
    """Inputs of these pairs: clustered, with ids and labels that repeat across ranks."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 10, generator=generator, dtype=torch.float64).repeat(4, 1)
    x_i, x_j, negatives = (
        x + 0.6 * torch.randn(PAIRS, 10, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    inputs = {"x_i": x_i[rows].to(dtype), "x_j": x_j[rows].to(dtype)}
    options = LAYOUTS[layout]
    if "negatives" in options:
        inputs["negatives"] = negatives[rows].to(dtype)
    if "ids" in options:
        inputs["ids"] = (torch.arange(PAIRS) % 17)[rows]
    if "labels" in options:
        inputs["labels"] = torch.tensor([0, 1, 2, 3, 4] * 4 + [5, 6, 7, 0])[rows]  # 5, 6, 7 occur once
        del inputs["x_j"]  # with a second view none would
    return inputs


def spans(sizes, world):
    starts = [sum(SIZES[sizes][world][:rank]) for rank in range(world)]
    return [slice(start, start + length) for start, length in zip(starts, SIZES[sizes][world], strict=True)]


def result(model, output):
    """Loss, gradients, statistics and buffers."""
    core = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        "loss": output.loss.detach(),
        "gradients": [p.grad for p in core.parameters()],
        "stats": output.stats._asdict(),
        "buffers": dict(core.named_buffers()),
    }


def step(case, rows, wrap):
    name, layout, engine, reduction, _, dtype = case
    model = wrap(Model(name, layout, engine, reduction, dtype))
    output = model(**batch(layout, dtype, rows))
    output.loss.sum().backward()
    return result(model, output)


def compare_all(rank, world):
    found = {case: step(case, spans(case[4], world)[rank], DistributedDataParallel) for case in cases()}
    found["cached"] = cached(rank, world)
    found["slope"] = {gather: slope(gather, spans("uneven", world)[rank]) for gather in (True, "ring")}
    found["largest"] = {gather: largest(gather, rank) for gather in (True, "ring")}
    found["transposed"] = {gather: transposed(gather, rank) for gather in (True, "ring")}
    found["hardest"] = {gather: several_numbers(gather, rank) for gather in (True, "ring")}
    found["extremes"] = {gather: extremes(gather, rank) for gather in (True, "ring")}
    found["twins"] = {g: batch_slope(*(z[rank::world] for z in twins()), gather=g) for g in (True, "ring")}
    found["errors"] = errors(rank, world)
    found["second"] = {gather: second_derivative(gather) for gather in (True, "ring")}
    found["unlike"] = {gather: unlike(gather, rank) for gather in (True, "ring")}
    found["own"] = {gather: of_ones_own(gather, rank) for gather in (True, "ring")}
    found["alone"] = alone(rank, world)
    return found


def cached(rank, world):
    """A cached step; the ranks have different numbers of micro-batches."""
    torch.manual_seed(1)
    encoder = DistributedDataParallel(nn.Linear(10, 8).double())
    inputs = batch("views", torch.float64, spans("uneven", world)[rank])
    loss = cached_step(encoder, (inputs["x_i"], inputs["x_j"]), WeinceLoss(), micro_batch=4)
    return {"loss": loss, "gradients": [p.grad for p in encoder.parameters()]}


class Sloped(ContrastiveLoss):
    """A shortfall link with a running slope, in a loss that needs neither a tail nor the hardest negatives."""

    def __init__(self, slope, **options):
        super().__init__(**options)
        self.slope = slope

    def sums(self, batch):
        return LogSumExp(self.slope.link(batch))

    def combine(self, lse):
        return lse.cross_entropy()


class Hardest(ContrastiveLoss):
    """InfoNCE over the hardest negatives, summed over several numbers of them."""

    def __init__(self, numbers, **options):
        super().__init__(**options)
        self.numbers = numbers

    def sums(self, batch):
        return [LogSumExp(SoftmaxLink(0.2), hardest=number) for number in self.numbers]

    def combine(self, *sums):
        return sum(one.cross_entropy() for one in sums)


def slope(gather, rows):
    """Loss, gradient and running slope, fitted to the pairs of all ranks."""
    inputs = batch("views, ids", torch.float64, rows)
    ids = inputs["ids"].int() if rows.start else inputs["ids"]  # integer dtypes may differ between ranks
    x_i, running = inputs["x_i"].requires_grad_(), RunningSlope(fewest=64)
    loss = Sloped(running, gather=gather)(x_i, inputs["x_j"], ids=ids)
    loss.backward()
    return {
        "loss": loss.detach(),
        "gradient": x_i.grad,
        "slope": running.slope_now,
        "sampled": sampled_slope(gather, inputs),
    }


def sampled_slope(gather, inputs):
    """The running slope from a sample of each rank's anchors, as in large batches."""
    running, most = RunningSlope(fewest=64), terms.MOST_PAIRS
    terms.MOST_PAIRS = 400
    try:
        Sloped(running, gather=gather)(inputs["x_i"], inputs["x_j"], ids=inputs["ids"])
    finally:
        terms.MOST_PAIRS = most
    return running.slope_now


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def largest(gather, rank):
    """Size of the largest tensor in a step with 40 rows of width 64 on each rank."""
    torch.manual_seed(rank)
    z_i, z_j = torch.randn(2, 20, 64).unbind()
    with Largest() as seen:
        WeinceLoss.paper(gather=gather)(z_i.requires_grad_(), z_j).backward()
    return seen.numel


def transposed(gather, rank):
    """Losses with the same keys in row-major and in column-major memory."""
    torch.manual_seed(rank)
    queries, keys = torch.randn(2, 5, 4)
    loss = InfoNCELoss(candidates="cross", gather=gather)
    return loss(queries, keys), loss(queries, keys.T.contiguous().T)


def several_numbers(gather, rank):
    """Loss and gradient of sums over different numbers of hardest negatives."""
    torch.manual_seed(rank)
    z_i, z_j = torch.randn(2, 5, 4, dtype=torch.float64)
    loss = Hardest((4, 1), gather=gather)(z_i.requires_grad_(), z_j)
    loss.backward()
    return loss.detach(), z_i.grad


def extremes(gather, rank):
    """Gradients of anchors with a tiny loss, and rho of nearly duplicate negatives."""
    torch.manual_seed(rank)
    rows = torch.eye(16, dtype=torch.float64)
    far_i, far_j = rows[4 * rank :][:4] + 0.02 * torch.rand(2, 4, 16, dtype=torch.float64)
    InfoNCELoss(0.04, gather=gather, candidates="cross")(far_i.requires_grad_(), far_j).backward()
    near_i, near_j = (rows[:4] + 1e-3 * torch.randn(2, 4, 16, dtype=torch.float64)).float()
    return far_i.grad, InfoNCELoss(gather=gather)(near_i, near_j, return_stats=True).stats.rho


def twins():
    """Pairs in float32, each of which has a negative at a shortfall between 1e-5 and 1e-3."""
    generator = torch.Generator().manual_seed(5)
    z_i, step = unit_rows(torch.randn(128, 32, generator=generator, dtype=torch.float64)).chunk(2)
    z_j = z_i + 1.5 * step
    distances = (2 * torch.logspace(-5, -3, 32, dtype=torch.float64)).sqrt().unsqueeze(1)
    z_i[1::2] = z_i[::2] + distances * step[::2]
    return z_i.float(), z_j.float()


def batch_slope(z_i, z_j, **options):
    """The slope fitted to the 60 smallest shortfalls of a batch, nearly all of them between twins."""
    slope = RunningSlope(share=0.0, fewest=60, momentum=0.0, least_r2=0.5).to(z_i.dtype)
    Sloped(slope, **options)(z_i, z_j)
    return slope.slope_now.double()


def errors(rank, world):
    """Errors on every rank for batches that cannot be shared."""
    rows = torch.randn(3, 4)
    said = []
    for z, options in (
        (rows[: 3 * (rank > 0)], {}),
        (rows, {"ignore": torch.zeros(6, 7, dtype=torch.bool)}),
        (rows, {"ignore": torch.zeros(6, 7, dtype=torch.bool), "gather": "ring"}),
    ):
        try:
            info_nce_loss(z, z, **options)
        except ValueError as error:
            said.append(str(error))
    return said


def second_derivative(gather):
    """The error that a second derivative raises."""
    z = torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(InfoNCELoss(gather=gather)(z, z.flip(0)), z, create_graph=True)
    try:
        grad.sum().backward()
    except NotImplementedError as error:
        return str(error)


def unlike(gather, rank):
    """Errors on every rank if the last rank differs from the others, or if all pass too few temperatures."""
    last = rank == dist.get_world_size() - 1
    z, ids = torch.randn(3, 4), torch.arange(3)

    calls = {
        "width": lambda: InfoNCELoss(gather=gather)(z[:, : 3 if last else 4], z[:, : 3 if last else 4]),
        "dtype": lambda: InfoNCELoss(gather=gather)(z.double() if last else z, z),
        "ids": lambda: InfoNCELoss(gather=gather)(z, z, ids=ids if last else None),
        "temperature": lambda: InfoNCELoss(0.1 if last else 0.5, gather=gather)(z, z),
        "statistics": lambda: InfoNCELoss(gather=gather)(z, z, return_stats=last),
        "anchors": lambda: InfoNCELoss(torch.full((5,), 0.5), gather=gather)(z, z),
        "weight": lambda: InfoNCELoss(hardness=0.5 if last else 1.0, gather=gather)(z, z),
        "hardest": lambda: Hardest((2,) if last else (1,), gather=gather)(z, z),
        "link": lambda: LinkLoss(SoftmaxLink(0.2 if last else 0.3), gather=gather)(z, z),
        "ring": lambda: InfoNCELoss(gather=True if last else gather)(z, z),
        "mode": lambda: WeinceLoss(gather=gather).train(last)(z, z),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    return said


def of_ones_own(gather, rank):
    """Links may differ between ranks in the values of their tensors, and in their functions."""
    torch.manual_seed(rank)
    z_i, z_j = torch.randn(2, 3, 4)
    LinkLoss(BlendLink(torch.rand(6), torch.rand(6)), gather=gather)(z_i, z_j)
    return LinkLoss(lambda s: 3 * s, gather=gather)(z_i, z_j)


def alone(rank, world):
    """With gather=False, each rank uses only its own rows."""
    torch.manual_seed(rank)
    z_i, z_j = torch.randn(2, 5, 4)
    return InfoNCELoss(gather=False)(z_i, z_j), z_i, z_j


def lose_a_rank(how, folder):
    def job(rank, world):
        z_i, z_j = torch.randn(2, 5, 4)
        loss = WeinceLoss()
        loss(z_i, z_j)
        if rank == 1:
            if how == "hangs":
                time.sleep(30)
            os._exit(7)
        start = time.perf_counter()
        try:
            loss(z_i, z_j)
        except RuntimeError as error:
            torch.save({"said": str(error), "seconds": time.perf_counter() - start}, folder / "0.pt")
        os._exit(0)

    return job


def _enter(rank, world, folder, job, timeout):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    work = job if callable(job) else compare_all if job == "compare" else lose_a_rank(job, folder)
    torch.save(work(rank, world), folder / f"{rank}.pt")
    dist.destroy_process_group()


def start(world, folder: Path, job, timeout=60):
    """Start a job on several ranks; returns the processes."""
    context = multiprocessing.get_context("forkserver")  # imports torch once, see conftest.py
    processes = [
        context.Process(target=_enter, args=(rank, world, folder, job, timeout), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes


def results(world, folder):
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


if __name__ == "__main__":
    sys.exit("run by test_distributed.py")
