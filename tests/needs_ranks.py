"""The jobs of ``test_needs_ranks.py``: what people need of a loss, on several ranks and in one process."""

import torch
from torch import nn

from weince import DCLLoss, InfoNCELoss, LinkLoss, LSEPairLoss, MWLoss, Queue, WeinceLoss

N, M, K, D = 12, 6, 2, 5
SIZES = (5, 7)  # pairs of the two ranks; of the shared negatives 2 and 4
SHARED = (2, 4)


def rows(n, seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, D, generator=generator, dtype=torch.float64)


def everything():
    """The whole batch."""
    generator = torch.Generator().manual_seed(9)
    within_ranks = torch.zeros(N, N, dtype=torch.bool)
    start = 0
    for size in SIZES:
        block = torch.rand(size, size, generator=generator) < 0.4
        within_ranks[start : start + size, start : start + size] = block
        start += size
    return {
        "z_i": rows(N, 1),
        "z_j": rows(N, 2) + 0.5 * rows(N, 1),
        "shared": rows(M, 3),
        "own": rows(N, 4, K),
        "ids": torch.arange(N) % 8,
        "ids of own": torch.cat([torch.arange(N) % 8, torch.arange(N * K) % 11]),
        "labels": (torch.arange(N) % 4, torch.arange(N) % 5),
        "weights": torch.linspace(0.2, 2, N, dtype=torch.float64),
        "offset": torch.randn(N + M, generator=generator, dtype=torch.float64),
        "ignore within": within_ranks,
        "ignore": torch.rand(N, N, generator=generator) < 0.3,
    }


CROSS, CLIP = {"candidates": "cross"}, {"candidates": "clip"}
CASES = {
    "own": (InfoNCELoss, CROSS, ["own"]),
    "own, ids": (InfoNCELoss, CROSS, ["own", "ids of own"]),
    "own, clip": (DCLLoss, CLIP, ["own"]),
    "shared, clip": (InfoNCELoss, CLIP, ["shared"]),
    "above": (InfoNCELoss, CROSS | {"ignore_above": 0.1}, ["shared"]),
    "above, all": (InfoNCELoss, CROSS | {"ignore_above": lambda s: 0.9 * s, "exempt_hard": False}, ["own"]),
    "above, views": (InfoNCELoss, {"ignore_above": 0.1}, []),
    "offset": (InfoNCELoss, CROSS, ["shared", "offset"]),
    "weights": (InfoNCELoss, CLIP, ["weights"]),
    "labels": (InfoNCELoss, CROSS, ["labels"]),
    "labels, clip, apart": (InfoNCELoss, CLIP | {"other_positives": False}, ["labels", "weights"]),
    "labels, pairs": (LSEPairLoss, CROSS, ["labels", "own"]),
    "within": (InfoNCELoss, CROSS | {"within": True}, ["shared", "ids"]),
    "within, clip": (InfoNCELoss, CLIP | {"within": True, "hardness": 2.0}, []),
    "dot": (MWLoss, CROSS | {"score": "dot"}, []),
    "dot, own": (InfoNCELoss, CROSS | {"score": "dot", "ignore_above": 0.3}, ["own"]),
    "ignore of this rank": (InfoNCELoss, {"candidates": "cross"}, ["ignore within"]),
    "ignore of this rank, clip": (InfoNCELoss, CLIP, ["ignore within"]),
    "ignore of all ranks": (InfoNCELoss, CROSS, ["ignore"]),
    "tail and own": (WeinceLoss, CROSS, ["own"]),
    "learned": (InfoNCELoss, CLIP | {"learn_temperature": True}, ["own"]),
}
ROLES = {
    "own": "negatives", "shared": "negatives", "ids of own": "ids", "ignore within": "ignore",
}  # fmt: skip


def part(name, value, rank):
    """The part of a rank."""
    start = sum(SIZES[:rank])
    cut = slice(start, start + SIZES[rank])
    if name == "shared":
        return value[sum(SHARED[:rank]) : sum(SHARED[: rank + 1])]
    if name == "offset":
        return torch.cat([value[cut], value[N:][sum(SHARED[:rank]) : sum(SHARED[: rank + 1])]])
    if name == "ids of own":
        return torch.cat([value[cut], value[N:].view(N, K)[cut].flatten()])
    if name == "labels":
        return tuple(side[cut] for side in value)
    return value[cut][:, cut] if name == "ignore within" else value[cut]


def step(case, rank, **options):
    """Loss and gradients of the linear encoder, and of the learned parameters of the loss."""
    make, given, names = CASES[case]
    batch = {name: value for name, value in everything().items() if name in ("z_i", "z_j", *names)}
    if rank is not None:
        batch = {name: part(name, value, rank) for name, value in batch.items()}
    torch.manual_seed(0)
    encoder = nn.Linear(D, D, dtype=torch.float64)
    for name in ("z_i", "z_j", "shared", "own"):
        if name in batch:
            batch[name] = encoder(batch[name])
    loss = make(0.3, **given, **options).double()
    value = loss(**{ROLES.get(name, name): value for name, value in batch.items()})
    value.backward()
    learned = [parameter.grad for parameter in loss.parameters()]
    return value.detach(), [parameter.grad for parameter in encoder.parameters()] + learned


def compare(rank, world):
    found = {}
    for case in CASES:
        for where in ("dense", "chunked", "ring"):
            options = {"gather": "ring"} if where == "ring" else {"engine": where}
            found[case, where] = step(case, rank, **options)
    return {"steps": found, "errors": errors(rank)}


def errors(rank):
    """What is said of losses whose learned parameters or functions differ."""
    z = torch.randn(4, D, dtype=torch.float64)
    functions = (lambda s: 3 * s, lambda s: 4 * s)
    said = []
    for call in (
        lambda: InfoNCELoss(0.1 + 0.1 * rank, learn_temperature=True)(z, z),
        lambda: LinkLoss(functions[rank])(z, z),
    ):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    drifting = InfoNCELoss(0.1, learn_temperature=True)
    drifting(z, z).backward()
    with torch.no_grad():
        drifting.log_scale -= 0.1 * (1 + rank)  # a step without DDP
    try:
        drifting(z, z)
    except ValueError as error:
        said.append(str(error))
    return said


def queues(rank, world):
    """Rows of queues that were pushed different numbers of rows on each rank."""
    of_all, of_own = Queue(5), Queue(5, gather=False)
    for queue in (of_all, of_own):
        queue.push(torch.full((2 + rank, 1), float(rank)))
    return {"all": of_all.rows, "own": of_own.rows}
