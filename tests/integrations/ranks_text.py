"""The work of two ranks on their parts of a batch of sentences, and of one process on the whole."""

from datetime import timedelta
from importlib.metadata import version

import torch
import torch.distributed as dist
from packaging.version import Version
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from sentence_transformers import SentenceTransformer
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from toy_text import column

from weince import InfoNCELoss, TailConfig, WeinceLoss, cached_step
from weince.integrations.metric_learning import MetricLossAdapter
from weince.integrations.sentence_transformers import CachedLossAdapter, LossAdapter

EXACT_REPLAY = Version(version("sentence-transformers")) >= Version("6.2")
SIZES = (8, 4)  # rows of each rank
STEPS = ("plain", "cached", "own", "own cached")
# Algorithm 1 with lam well above 0, on few negatives.
OPEN = {"tail": TailConfig(k=6, kappa_rho=3.0, margin=-1e9), "softmax_term": 0, "shortfall_term": 0}
# Before 6.2, the second pass of cached losses multiplies embeddings and gradients in float32.
REPLAYED = {"rtol": 1e-9, "atol": 1e-11} if EXACT_REPLAY else {"rtol": 1e-6, "atol": 1e-6}


def weince_loss(model, temperature=0.05, candidates="cross", gather=False, **options):
    return LossAdapter(model, WeinceLoss(temperature, candidates=candidates, gather=gather, **options))


def cached_weince(model, temperature=0.05, mini_batch_size=32, mini_batch_num_tokens=None, **options):
    loss = WeinceLoss(temperature, candidates="cross", **{"gather": False, **options})
    sizes = {"mini_batch_size": mini_batch_size, "mini_batch_num_tokens": mini_batch_num_tokens}
    return CachedLossAdapter(model, loss, **sizes)


def columns(model, rows):
    """Tokens of these rows, in three columns: query, positive and hard negative. Ranks share some texts."""
    queries, documents, hard = texts = [column(12, seed) for seed in range(3)]
    queries[9], documents[10], hard[11] = queries[1], documents[2], documents[0]
    return [model.preprocess(part[rows]) for part in texts]


def step(name, model, rows, wrap=lambda model: model, gather=True):
    """Value and gradients of WEINCE with shared hard negatives, or of InfoNCE with own ones and a limit."""
    # Before 6.2, all ranks must have the same number of mini-batches.
    sizes = {"mini_batch_size": 3 if EXACT_REPLAY else 8}
    if "own" in name:
        core = InfoNCELoss(0.2, candidates="clip", learn_temperature=True, ignore_above=0.05, gather=gather)
    else:
        temperature = nn.Parameter(torch.tensor(0.05, dtype=torch.float64))
        core = WeinceLoss(temperature, candidates="cross", gather=gather, **OPEN)
    hard = "own" if "own" in name else "shared"
    make, options = (CachedLossAdapter, sizes) if "cached" in name else (LossAdapter, {})
    loss = make(model, core.double(), hard_negatives=hard, **options)
    loss.model = wrap(model)  # like the trainer
    model.zero_grad()
    value = loss(columns(model, rows))
    value.backward()
    return {
        "loss": value.detach(),
        "gradients": [
            p.grad.clone() for p in (*core.parameters(), *model.parameters()) if p.grad is not None
        ],
    }


def towers_step(rows, wrap=None):
    """Gradients of two towers and a temperature, with two own hard negatives; cached if ``wrap`` is given."""
    torch.manual_seed(6)
    queries, documents, hard = (
        torch.randn(12, *shape, dtype=torch.float64) for shape in ((6,), (8,), (2, 8))
    )
    query, document = nn.Linear(6, 4).double(), nn.Linear(8, 4).double()
    loss = InfoNCELoss(0.2, candidates="clip", learn_temperature=True).double()
    if wrap is None:
        value = loss(query(queries), document(documents), negatives=document(hard))
        value.backward()
    else:
        towers, spread = (wrap(query), wrap(document)), wrap(loss)
        value = cached_step(
            [towers[0], towers[1], towers[1]],
            [queries[rows], documents[rows], hard[rows].flatten(0, 1)],
            lambda q, d, hard: spread(q, d, negatives=hard.unflatten(0, (len(q), 2))),
            micro_batch=3,
        )
    parameters = (*query.parameters(), *document.parameters(), *loss.parameters())
    return {"loss": value.detach(), "gradients": [p.grad for p in parameters]}


def labelled_step(rows, wrap=lambda loss: loss):
    """Gradient of a linear map on some of 12 labelled rows, with the loss for pytorch-metric-learning."""
    torch.manual_seed(4)
    x, net = torch.randn(12, 6, dtype=torch.float64), nn.Linear(6, 4).double()
    loss = wrap(MetricLossAdapter(WeinceLoss(0.3, candidates="labels", **OPEN)))
    loss(net(x[rows]), (torch.arange(12) % 4)[rows]).backward()
    return net.weight.grad


def _enter(rank, encoder, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=len(SIZES),
        timeout=timedelta(seconds=300),
    )
    model = SentenceTransformer(str(encoder), device="cpu").double().eval()
    for module in model.modules():  # DDP wants gradients of all parameters; the pooler gets none
        if isinstance(module, nn.Module) and type(module).__name__ == "BertPooler":
            module.requires_grad_(False)
    rows = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    found = {name: step(name, model, rows, DistributedDataParallel) for name in STEPS}
    found["towers"] = towers_step(rows, DistributedDataParallel)
    found["alone"] = float(step("plain", model, rows, gather=False)["loss"])
    found["labelled"] = labelled_step(slice(6 * rank, 6 * rank + 6), DistributedLossWrapper)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def run(world, encoder, folder):
    """Start the ranks, and return the results of each."""
    context = multiprocessing.get_context("forkserver")  # imports once, see conftest.py
    processes = [
        context.Process(target=_enter, args=(rank, encoder, folder), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * world
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]
