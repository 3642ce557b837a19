"""The kernels for small batches against the dense engine in float64: in Triton's interpreter, or on a GPU."""

import os
from contextlib import contextmanager

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

pytest.importorskip("triton", minversion="3.5")

from weince.functional import weince_loss  # noqa: E402
from weince.terms import WeinceLink  # noqa: E402

import weince.engines.small as module  # noqa: E402
from weince.engines.kernels import launch  # noqa: E402
from weince.engines.small import serves, small_loss  # noqa: E402
from weince.tail import TailConfig, fit_tail, gated  # noqa: E402

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poison():
    """Memory that nobody wrote holds NaN and the largest integers."""
    torch.use_deterministic_algorithms(DEVICE == "cpu")
    yield
    torch.use_deterministic_algorithms(False)


needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
RELEASED = TailConfig(beta=1.0, drop=0.05, soft_cap=False, gate="rho", rho0=0.3)


def views(n, d, *, noise=0.5, seed=0, dtype=torch.float32):
    """Two noisy views of clustered rows, of varying length."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, d, generator=generator)
    rows = centres[torch.randint(3, (n,), generator=generator)] + noise * torch.randn(
        n, d, generator=generator
    )
    other = rows + 0.5 * noise * torch.randn(n, d, generator=generator)
    length = torch.rand(n, 1, generator=generator) + 0.2
    return (rows * length).to(DEVICE, dtype), other.to(DEVICE, dtype)


class Spy:
    """Takes the place of the fit, and keeps the shortfalls of every anchor, the exact ones of the nearest first."""

    def __init__(self, real):
        self.real = real

    def __call__(self, tensors, *, keep):
        self.real(tensors, keep=keep)
        anchors, size, width = (self.real.numbers[at] for at in (1, 3, 5))
        bits = (tensors[0].view(torch.int64).view(anchors, width) >> 32).int()
        tails = bits.view(torch.float32).sort(1).values[:, :size]
        near = tensors[12][: anchors * launch.EXACT].view(anchors, launch.EXACT).sort(1).values[:, :size]
        self.tails = torch.cat([near, tails[:, near.shape[1] :]], 1).double()


@contextmanager
def spied():
    """Puts a spy in the place of the fit, and all launches on the longer way, which leads by it."""
    spies, real = [], module._plan

    def plan(*key):
        made = real(*key)
        spies.append(Spy(made.fit))
        fresh = (made.sum.kernel, made.sum.grid[0], made.sum.numbers, made.sum.constants)
        return made._replace(fit=spies[-1], sum=module.Launch(*fresh))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_plan", plan)
        yield spies


def both(leaves, config=TailConfig(), temperature=0.3, mean=True):
    """Loss, gradients and statistics, and those of dense in float64.

    Of the statistics, all but rho are not the dense engine's but what float64 makes of the kernels' own shortfalls.
    """
    rows = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    with spied() as spies:
        loss, stats = small_loss(*rows, WeinceLink(temperature, config), mean=mean)
    got = (loss.detach(), torch.autograd.grad(loss, rows), stats)
    rows = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output = weince_loss(
        *rows, temperature=temperature, tail=config, engine="dense", return_stats=True,
        reduction="mean" if mean else "sum",
    )  # fmt: skip
    tails = spies[0].tails
    sizes = torch.full((len(tails),), tails.shape[1], device=tails.device)
    stats = gated(tails[:, 0].clamp_min(config.eps), fit_tail(tails, sizes, config), config, None)
    stats = stats._replace(rho=output.stats.rho)
    return got, (output.loss.detach(), torch.autograd.grad(output.loss, rows), stats)


def agree(got, wanted, *, gradient=1e-4):
    assert abs(float(got[0]) - float(wanted[0])) <= 1e-5 * max(1, float(wanted[0]))
    for ours, theirs in zip(got[1], wanted[1], strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) <= gradient
    torch.testing.assert_close(got[2].rho.double(), wanted[2].rho, rtol=1e-4, atol=0)
    for field in ("beta", "daic", "lam"):
        torch.testing.assert_close(
            getattr(got[2], field).double(), getattr(wanted[2], field), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(("n", "d", "mean"), [(2, 3, True), (20, 40, False), (17, 130, True)])
def test_algorithm_1(n, d, mean):
    got, wanted = both(views(n, d, noise=1.0), mean=mean)
    agree(got, wanted)
    assert n < 17 or 0.1 < float(wanted[2].lam.mean()) < 0.9, "a blend that does nothing tests nothing"


def test_the_released_tail():
    agree(*both(views(20, 24, noise=1.0), RELEASED))


def test_the_fit_is_float64s():
    """Products of bfloat16 are exact, so the shortfalls are those of float64, and the fit has to be too."""
    rows = views(30, 16, dtype=torch.bfloat16)
    got, _ = both(rows)
    wanted = weince_loss(
        *(row.double() for row in rows), temperature=0.3, engine="dense", return_stats=True
    ).stats
    for ours, theirs in zip(got[2], wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_bfloat16_to_the_error_of_rounding_the_inputs():
    exact = views(30, 24)
    got, rounded = both([rows.bfloat16() for rows in exact])
    _, unrounded = both(exact)
    assert abs(float(got[0]) - float(rounded[0])) < 1e-4
    for ours, theirs, free in zip(got[1], rounded[1], unrounded[1], strict=True):
        assert ours.dtype == torch.bfloat16
        assert float((ours.double() - theirs).norm()) <= float((theirs - free).norm())


@pytest.mark.parametrize("shortfall", [1e-2, 1e-4, 1e-5])
def test_near_the_cap(shortfall):
    z_i, z_j = views(14, 32, noise=1.0)
    step = torch.nn.functional.normalize(torch.ones(32, device=DEVICE).cumsum(0), dim=0)
    z_j[0] = torch.nn.functional.normalize(z_i[1], dim=0) + (2 * shortfall) ** 0.5 * step
    got, wanted = both((z_i, z_j))
    assert float(wanted[2].rho.min()) < 2 * shortfall
    torch.testing.assert_close(got[2].rho.double(), wanted[2].rho, rtol=1e-4, atol=0)
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-4, atol=1e-4)


def test_ties_and_duplicates():
    z_i, z_j = (rows[torch.arange(24, device=DEVICE) % 4] for rows in views(24, 16))
    got, _ = both((z_i, z_j))
    assert got[0].isfinite()
    assert all(gradient.isfinite().all() for gradient in got[1])
    torch.testing.assert_close(got[2].rho, torch.full_like(got[2].rho, 1e-6), rtol=1e-4, atol=0)


@pytest.mark.parametrize("length", [1e-30, 1e30])
def test_rows_of_any_length_and_zero_rows(length):
    z_i, z_j = views(20, 24, noise=1.0)
    z_i[3] = 0
    z_j[5] *= length
    got, wanted = both((z_i, z_j))
    assert abs(float(got[0]) - float(wanted[0])) <= 1e-5 * max(1, float(wanted[0]))
    assert float(got[1][0][3].abs().max()) == 0
    for ours, theirs in zip(got[1], wanted[1], strict=True):
        assert ours.isfinite().all()
        keep = torch.arange(20, device=DEVICE) != 5  # its gradient is as long as the row is short
        assert float((ours.double() - theirs)[keep].norm() / theirs[keep].norm()) <= 1e-4


def test_slices_of_a_wider_tensor():
    z_i, z_j = views(20, 24, noise=1.0)
    wide = torch.cat([z_i, z_j], 1)
    agree(*both((wide[:, :24], wide[:, 24:].T.contiguous().T)))


def test_again_and_at_an_odd_address():
    """The second launch of a shape takes a shorter way, but not for rows whose address is no multiple of 16."""
    plain = views(8, 12, noise=1.0)
    shifted = tuple(torch.cat([row.new_zeros(1), row.flatten()])[1:].view(8, 12) for row in plain)
    assert all(row.data_ptr() % 16 for row in shifted)
    found = []
    for rows in (plain, plain, shifted):
        rows = [row.detach().requires_grad_() for row in rows]
        loss, stats = small_loss(*rows, WeinceLink(0.3), mean=True)
        found.append((loss.detach(), *stats, *torch.autograd.grad(loss, rows)))
    for later in found[1:]:
        torch.testing.assert_close(later, found[0], rtol=0, atol=0)


def test_two_losses_at_a_time():
    """Both passes forward first, then both backward, the first one first."""
    pairs = [[row.requires_grad_() for row in views(8, 12, noise=1.0, seed=seed)] for seed in (0, 1)]
    alone = [torch.autograd.grad(small_loss(*rows, WeinceLink(), mean=True)[0], rows) for rows in pairs]
    losses = [small_loss(*rows, WeinceLink(), mean=True)[0] for rows in pairs]
    for loss, rows, wanted in zip(losses, pairs, alone, strict=True):
        torch.testing.assert_close(torch.autograd.grad(loss * 2, rows), tuple(2 * g for g in wanted))


def test_what_it_leaves_to_others():
    z_i, z_j = views(8, 4)
    link = WeinceLink()
    assert serves(z_i, z_j, link)
    for first, second, other in [
        (z_i, None, link),
        (z_i, z_j[:5], link),
        (z_i, z_j.bfloat16(), link),
        (z_i.double(), z_j.double(), link),
        (z_i.half(), z_j.half(), link),
        (z_i[:1], z_j[:1], link),
        (z_i.repeat(100, 1), z_j.repeat(100, 1), link),
        (z_i.repeat(1, 100), z_j.repeat(1, 100), link),
        (z_i, z_j, WeinceLink(torch.tensor(0.5))),
        (z_i, z_j, WeinceLink(0.5, TailConfig(positive="softmax"))),
        (z_i, z_j, WeinceLink(0.5, TailConfig(beta="slope"))),
    ]:
        assert not serves(first, second, other)


def test_no_second_derivative():
    rows = [row.requires_grad_() for row in views(8, 4)]
    gradient = torch.autograd.grad(small_loss(*rows, WeinceLink(), mean=True)[0], rows, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="first derivative"):
        gradient.sum().backward()


def test_in_torch_func_grad():
    z_i, z_j = views(8, 4)
    loss = lambda z_i: small_loss(z_i, z_j, WeinceLink(), mean=True)[0]  # noqa: E731
    leaf = z_i.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(z_i), torch.autograd.grad(loss(leaf), leaf)[0])


def test_traced_whole():
    torch.compiler.reset()
    rows = [row.requires_grad_() for row in views(8, 16)]
    link = WeinceLink()

    def step(z_i, z_j):
        return small_loss(z_i, z_j, link, mean=True)[0]

    wanted = torch.autograd.grad(step(*rows), rows)
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(traced(*rows), rows), wanted, rtol=1e-5, atol=1e-7)


@gpu
@needs_gpu
@pytest.mark.parametrize(("n", "d"), [(256, 64), (256, 128), (300, 256), (512, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(n, d, dtype):
    got, wanted = both(views(n, d, noise=1.0, dtype=dtype), temperature=0.5)
    agree(got, wanted, gradient=1e-4 if dtype == torch.float32 else 4e-3)


@gpu
@needs_gpu
def test_the_loss_takes_it(monkeypatch):
    """The public loss goes this way, and is what the fused engine makes of the same batch by the longer one."""
    calls, real = [], module.small_loss
    monkeypatch.setattr(module, "small_loss", lambda *a, **k: calls.append(1) or real(*a, **k))
    rows = views(256, 64, noise=1.0)
    short = weince_loss(*rows, return_stats=True)
    assert calls
    longer = weince_loss(*rows, return_stats=True, reduction="none")
    torch.testing.assert_close(short.loss, longer.loss.mean(), rtol=1e-5, atol=0)
    torch.testing.assert_close(short.stats, longer.stats, rtol=1e-3, atol=1e-4)
