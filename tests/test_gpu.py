"""Tests that need a GPU; skipped without one."""

import pytest
import torch
import torch.distributed as dist
from cases import CASES, fixed

from weince import InfoNCELoss, LogSumExp, SoftmaxLink, WeibitLoss, WeinceLoss, tail_stats
from weince.cached import cached_step
from weince.distributed import share
from weince.layouts import problems
from weince.losses.replay import BEFORE
from weince.sums import Need
from weince.tail import TailConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

MAKERS = {
    "infonce": InfoNCELoss,
    "weibit": lambda **options: WeibitLoss(2.0, **options),
    "paper": WeinceLoss.paper,
    "released": WeinceLoss.released,
}


def pairs(n=256, d=64):
    generator = torch.Generator().manual_seed(0)
    z_i = torch.randn(n, d, generator=generator)
    return z_i.cuda(), (z_i + 0.5 * torch.randn(n, d, generator=generator)).cuda()


def step(loss, z_i, z_j, **arguments):
    z_i, z_j = z_i.clone().requires_grad_(), z_j.clone().requires_grad_()
    value = loss(z_i, z_j, **arguments)
    return value.detach(), *torch.autograd.grad(value, [z_i, z_j])


def assert_near(got, wanted):
    """Check the loss to 1e-5 and the gradients to 1e-4 in norm."""
    assert abs(float(got[0]) - float(wanted[0])) <= 1e-5 * max(1, float(wanted[0]))
    for ours, theirs in zip(got[1:], wanted[1:], strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) <= 1e-4


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_same_as_float64(name, tf32):
    """Scores keep float32 precision even if the program has switched TensorFloat-32 on."""
    z_i, z_j = pairs()
    wanted = step(MAKERS[name]().cuda(), z_i.double(), z_j.double())
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        assert_near(step(MAKERS[name]().cuda(), z_i, z_j), wanted)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("name", CASES)
def test_every_loss_as_it_comes_and_replayed(name):
    """The same as float64 on the CPU, where it is compared with its formula: at the first batch, without a graph, and
    at the sixth, from its recording where it has one."""
    z_i, z_j = pairs(128, 32)
    exact = CASES[name].make(fixed, candidates="views", engine="dense").double()
    ours = CASES[name].make(fixed, candidates="views").cuda()
    for batch in range(BEFORE + 2):
        wanted = step(exact, z_i.cpu().double(), z_j.cpu().double())
        got = step(ours, z_i, z_j)
        if batch in (0, BEFORE + 1):
            assert_near([one.cpu() for one in got], wanted)


@pytest.mark.parametrize("name", CASES)
def test_nan_in_gives_nan_out(name):
    z_i, z_j = pairs(128, 32)
    z_i[5] = torch.nan
    loss = CASES[name].make(fixed, candidates="views", check_finite=False).cuda()
    assert loss(z_i, z_j).isnan()


def test_statistics_of_nan_are_nan():
    scores = torch.rand(4, 200).cuda()
    scores[1, 7], scores[2], scores[3, 3] = torch.nan, torch.nan, torch.nan  # the last is a positive
    for own in tail_stats(scores, torch.arange(4).cuda()):
        assert own.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("layout", ["views", "cross", "clip", "labels"])
def test_a_step_never_waits_for_the_device(name, layout):
    z_i, z_j = pairs()
    ids = (torch.arange(256) % 250).cuda()
    arguments = {"ids": ids, "labels": ids % 9} if layout == "labels" else {"ids": ids}
    loss = MAKERS[name](candidates=layout).cuda()
    step(loss, z_i, z_j, **arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(loss, z_i, z_j, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", MAKERS)
def test_compiled(name):
    z_i, z_j = pairs()
    eager = step(MAKERS[name]().cuda(), z_i, z_j)
    compiled = step(torch.compile(MAKERS[name]().cuda(), fullgraph=True), z_i, z_j)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAKERS)
def test_autocast_does_not_touch_the_scores(name, dtype):
    z_i, z_j = pairs()
    plain = step(MAKERS[name]().cuda(), z_i, z_j)
    with torch.autocast("cuda", dtype=dtype):
        cast = step(MAKERS[name]().cuda(), z_i, z_j)
    torch.testing.assert_close(cast, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["infonce", "weibit", "paper"])
def test_in_a_cuda_graph(name):
    z_i, z_j = (z.requires_grad_() for z in pairs())
    loss = MAKERS[name]().cuda()
    wanted = step(loss, z_i, z_j)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(loss(z_i, z_j), [z_i, z_j])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(z_i, z_j)
        grads = torch.autograd.grad(value, [z_i, z_j])
    graph.replay()
    assert_near((value.detach(), *grads), wanted)


@pytest.mark.parametrize("name", MAKERS)
def test_same_as_float64_with_the_newer_tf32_switch(name):
    z_i, z_j = pairs()
    wanted = step(MAKERS[name]().cuda(), z_i.double(), z_j.double())
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        eager = step(MAKERS[name](engine="dense").cuda(), z_i, z_j)
        compiled = step(torch.compile(MAKERS[name](engine="dense").cuda(), fullgraph=True), z_i, z_j)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert_near(eager, wanted)
    assert_near(compiled, wanted)


@pytest.mark.parametrize("layout", ["views", "cross", "clip", "labels"])
@pytest.mark.parametrize("name", MAKERS)
def test_chunked(name, layout):
    """The chunked engine with several blocks of rows agrees with the dense one in float64.

    ``released`` also sums over the 50 hardest negatives. Rounding decides which of two near-ties is the 50th, so
    anchors with one are left out.
    """
    from fused_cases import clear  # here, since without a GPU it wants Triton's interpreter

    z_i, z_j = (z.double() for z in pairs(1500, 32))
    labels = {"labels": (torch.arange(1500) % 700).cuda()} if layout == "labels" else {}
    hardest = [LogSumExp(SoftmaxLink(0.5), hardest=50)]
    judged = torch.cat([clear(one, hardest) for one in problems(layout, z_i=z_i, z_j=z_j, **labels)])
    assert judged.double().mean() > 0.8

    def judge(engine):
        loss = MAKERS[name](candidates=layout, engine=engine, reduction="none").cuda()
        return lambda *rows, **labels: loss(*rows, **labels)[judged].mean()

    wanted = step(judge("dense"), z_i, z_j, **labels)
    assert_near(step(judge("chunked"), z_i.float(), z_j.float(), **labels), wanted)


def test_gather_over_nccl(tmp_path):
    """With one rank, gathering over NCCL changes neither the loss nor the gradients."""
    if not dist.is_nccl_available():
        pytest.skip("no NCCL in this build of torch")
    config, found = TailConfig(), []
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for together in (False, True):
            leaves = [z.requires_grad_() for z in pairs(64, 32)]
            (problem,) = problems("cross", *leaves)
            problem = share(problem, "") if together else problem
            loss = WeinceLoss.paper(engine="dense").contrast(problem, Need(config)).losses.mean()
            found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a GPU that is not the current one: wants two GPUs")
@pytest.mark.parametrize("n", [256, 1024])
def test_tensors_of_a_gpu_that_is_not_the_current_one(n):
    """Kernels are launched on the device of the embeddings, not on the current one."""
    here = step(WeinceLoss(engine="fused"), *pairs(n))
    there = step(WeinceLoss(engine="fused"), *(z.to("cuda:1") for z in pairs(n)))
    for ours, theirs in zip(here, there, strict=True):
        torch.testing.assert_close(ours, theirs.to("cuda:0"))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_the_cached_step_draws_the_same_masks_twice(where):
    """Inputs may stay on the CPU: the encoder moves each micro-batch to the GPU."""
    views = [z.to(where) for z in pairs(24)]
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Dropout(0.4)).cuda()
    seen: list[torch.Tensor] = []

    def encode(rows):
        seen.append(model(rows.cuda()))
        return seen[-1]

    cached_step(encode, views, WeinceLoss(), micro_batch=8)
    assert len(seen) == 12
    for first, second in zip(seen[:6], seen[6:], strict=True):
        torch.testing.assert_close(second.detach(), first, rtol=0, atol=0)
