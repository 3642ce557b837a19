"""Losses as CUDA graphs. The keys of recordings are tested everywhere, the recordings themselves on a GPU."""

import copy
import gc
import pickle
import threading

import pytest
import torch
import torch.utils.checkpoint
from cases import CASES, fixed, learned
from torch import nn

from weince import (
    ContrastiveLoss,
    DCLLoss,
    InfoNCELoss,
    LinkLoss,
    LogSumExp,
    SigLIPLoss,
    SoftmaxLink,
    TemperatureMixtureLoss,
    WeinceLoss,
)
from weince.losses import replay

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
MAKERS = {
    "infonce": lambda **options: InfoNCELoss(0.2, **options),
    "learned": lambda **options: InfoNCELoss(nn.Parameter(torch.tensor(0.2)), max_scale=100.0, **options),
    "dcl": lambda **options: DCLLoss(0.2, **options),
    "paper": WeinceLoss.paper,
    "released": WeinceLoss.released,
    "siglip": SigLIPLoss,
    "mixture": lambda **options: TemperatureMixtureLoss(0.2, **options),
}


class Own(ContrastiveLoss):
    def sums(self, batch):
        return LogSumExp(SoftmaxLink(0.1))

    def combine(self, lse):
        return lse.value - lse.positive


def pairs(seed=0, n=40, d=16, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    z_i = torch.randn(n, d, generator=generator)
    z_j = z_i + 0.5 * torch.randn(n, d, generator=generator)
    return z_i.to(device).requires_grad_(), z_j.to(device).requires_grad_()


def key(loss, **batch):
    z_i, z_j = pairs()
    return replay._key(loss, {"z_i": z_i, "z_j": z_j, **batch})


def test_a_key_holds_all_that_a_recording_has_fixed():
    loss = WeinceLoss.released(0.2)
    before = key(loss)
    assert hash(before) == hash(key(loss))
    changes = [(loss, "temperature", 0.1), (loss, "reduction", "sum"), (loss, "tail", WeinceLoss.paper().tail),
               (loss, "training", False), (loss.terms.slope, "momentum", 0.5),
               (loss.terms.slope, "slope_now", loss.terms.slope.slope_now.double())]  # fmt: skip
    for module, name, value in changes:
        old = getattr(module, name)
        setattr(module, name, value)
        assert key(loss) != before, name
        setattr(module, name, old)
        assert key(loss) == before, name
    assert key(loss, ids=torch.arange(40)) != before


@pytest.mark.parametrize("name", CASES)
def test_every_loss_can_be_recorded_unless_its_link_holds_tensors(name):
    for value in (fixed, learned):
        loss = CASES[name].make(value)
        if not (isinstance(loss, LinkLoss) and loss.link.tensors()):
            assert hash(key(loss)) == hash(key(loss))


def test_a_parameter_may_change_but_not_move():
    loss = InfoNCELoss(nn.Parameter(torch.tensor(0.2)))
    before = key(loss)
    with torch.no_grad():
        loss.temperature.mul_(2)
    assert key(loss) == before
    loss.temperature.requires_grad_(False)
    assert key(loss) != before
    loss.temperature = nn.Parameter(loss.temperature.detach().clone())
    assert key(loss) != before


def test_a_tensor_among_the_settings_is_never_recorded():
    """Such a tensor may be computed from others, and a replay would pass no gradient on to them."""
    scale = nn.Parameter(torch.tensor(0.0))
    for loss in (InfoNCELoss(scale.exp()), LinkLoss(SoftmaxLink(scale.exp()))):
        with pytest.raises(replay.CannotFollow, match="got a tensor"):
            key(loss)


def test_what_a_recording_could_not_follow():
    loss = InfoNCELoss(nn.Parameter(torch.tensor(0.2)))
    key(loss)
    loss.marks = []
    with pytest.raises(replay.CannotFollow, match=r"marks must have a hash.*got a list"):
        key(loss)
    del loss.marks
    loss.temperature.register_hook(lambda gradient: 0.1 * gradient)
    with pytest.raises(replay.CannotFollow, match="temperature must have no hook"):
        key(loss)
    with pytest.raises(replay.CannotFollow, match=r"must be on meta.*got it on cpu"):
        replay._key(InfoNCELoss(nn.Parameter(torch.tensor(0.2))), {"z_i": torch.ones(4, 2, device="meta")})


def test_large_batches_are_not_small():
    z = torch.empty(8192, 128, device="meta")
    ids = torch.empty(8192, dtype=torch.int64, device="meta")
    mask = torch.empty(16384, 16384, dtype=torch.bool, device="meta")
    assert replay._is_small({"z_i": z, "z_j": z, "ids": ids})
    assert not replay._is_small({"z_i": z, "z_j": z, "negatives": z})
    assert not replay._is_small({"z_i": z, "z_j": z, "ignore": mask})


def test_checkpointing_is_seen():
    seen = []

    def look(x):
        seen.append(replay._saved_as_they_are())
        return x * x

    torch.utils.checkpoint.checkpoint(look, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    assert seen == [False, False]
    assert replay._saved_as_they_are() == (replay._top_hooks is not None)


def test_nothing_is_recorded_on_a_cpu():
    loss = InfoNCELoss()
    for _ in range(replay.BEFORE + 2):
        loss(*pairs())
    assert loss not in replay._kept.by_loss


def test_a_new_key_takes_the_place_of_the_oldest():
    """A temperature that changes in every step must not fill the memory, and new keys must still be counted."""
    kept = {}
    for step in range(3 * replay.MOST_KEYS):
        replay._count(kept, (step,), 0)
    replay._count(kept, (step,), 1)
    assert list(kept) == [(step - back,) for back in reversed(range(replay.MOST_KEYS))]
    assert kept[(step,)] == 2


def test_a_thread_does_not_see_the_recordings_of_another():
    """Two threads with one loss and one stream have the same key."""
    loss, seen = InfoNCELoss(), []
    replay._count(replay._kept.by_loss.setdefault(loss, {}), key(loss), 0)

    def look():
        seen.append(dict(replay._kept.by_loss))

    other = threading.Thread(target=look)
    other.start()
    other.join()
    look()
    assert seen == [{}, dict(replay._kept.by_loss)]
    assert loss in seen[1]


@pytest.mark.parametrize(
    "waits",
    [
        torch.Tensor.item,
        bool,
        torch.nonzero,
        lambda x: x[x > 0],
        lambda x: x.to("meta"),
        torch.unique,
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: torch.allclose(x, x),
        lambda x: x.sum().to("meta"),
    ],
)
def test_what_waits_for_the_device_is_found_without_a_capture(waits):
    value = torch.ones(1)
    with replay.NoWaiting(torch.device("cpu")), pytest.raises(RuntimeError, match="waits for the device"):
        waits(value)


def test_what_does_not_wait_may_run():
    flags, place = torch.ones(3, dtype=torch.bool), torch.tensor([1])
    with replay.NoWaiting(torch.device("cpu")):
        flags[place] = flags[place].logical_not()
        assert torch.ones(3).masked_fill(flags, 2).where(flags, 0).sum().add(1).ndim == 0


def test_who_may_be_replayed():
    assert InfoNCELoss()._may_replay()
    assert not InfoNCELoss(graph=False)._may_replay()
    assert not InfoNCELoss(engine="dense")._may_replay()
    assert not InfoNCELoss(check_finite=True)._may_replay()
    assert not Own()._may_replay()
    assert LinkLoss(SoftmaxLink(0.1))._may_replay()
    assert not LinkLoss(lambda s: 5 * s)._may_replay()  # the function may read a changing number
    assert LinkLoss(lambda s: 5 * s, graph=True)._may_replay()
    assert Own(graph=True)._may_replay()


def on_gpu(name, **options):
    return MAKERS[name](**options).cuda()


def step(loss, seed, **arguments):
    """Loss of a batch, and gradients of the embeddings and of the loss's parameters."""
    leaves = [*pairs(seed, device="cuda"), *loss.parameters()]
    value = loss(*leaves[:2], **arguments)
    return value.detach(), *torch.autograd.grad(value.sum(), leaves)


def recordings(loss):
    return [one for one in replay._kept.by_loss.get(loss, {}).values() if isinstance(one, replay.Recording)]


def both(name, **options):
    return on_gpu(name, **options), on_gpu(name, graph=False, **options)


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("layout", ["views", "cross", "clip"])
    @pytest.mark.parametrize("name", MAKERS)
    def test_a_replay_is_the_step_that_it_replays(self, name, layout):
        """Replays are right on batches other than the recorded one, and update the buffers of the loss."""
        ours, plain = both(name, candidates=layout)
        for seed in range(replay.BEFORE + 4):
            ids = torch.arange(40).cuda() % 37
            torch.testing.assert_close(
                step(ours, seed, ids=ids), step(plain, seed, ids=ids), rtol=1e-5, atol=1e-6
            )
        assert len(recordings(ours)) == 1
        assert not recordings(plain)
        for mine, theirs in zip(ours.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)

    def test_labels(self):
        ours, plain = both("infonce", candidates="labels")
        for seed in range(replay.BEFORE + 3):
            labels = torch.randint(9, (40,), generator=torch.Generator().manual_seed(seed)).cuda()
            wanted = step(plain, seed, labels=labels)
            torch.testing.assert_close(step(ours, seed, labels=labels), wanted, rtol=1e-5, atol=1e-6)
        assert len(recordings(ours)) == 1

    @pytest.mark.parametrize("reduction", ["sum", "none"])
    def test_reductions(self, reduction):
        ours, plain = both("paper", reduction=reduction)
        for seed in range(replay.BEFORE + 2):
            torch.testing.assert_close(step(ours, seed), step(plain, seed), rtol=1e-5, atol=1e-6)

    def test_a_setting_that_changes_is_followed(self):
        ours, plain = both("infonce")
        for seed in range(3 * replay.BEFORE):
            for loss in (ours, plain):
                loss.temperature = 0.1 if seed < replay.BEFORE + 2 else 0.5
            torch.testing.assert_close(step(ours, seed), step(plain, seed), rtol=1e-5, atol=1e-6)

    def test_two_batches_before_one_backward_pass(self):
        """This happens with accumulated gradients, or with two heads that share a loss."""
        ours, plain = both("released")
        for seed in range(replay.BEFORE + 2):
            found = []
            for loss in (ours, plain):
                leaves = [*pairs(seed, device="cuda"), *pairs(seed + 50, device="cuda")]
                total = loss(*leaves[:2]) + 2 * loss(*leaves[2:])
                found.append((total.detach(), *torch.autograd.grad(total, leaves)))
            torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        assert len(recordings(ours)) == 1

    def test_a_batch_without_a_backward_pass_frees_its_recording(self):
        loss = on_gpu("infonce")
        for seed in range(replay.BEFORE + 2):
            loss(*pairs(seed, device="cuda"))
        (one,) = recordings(loss)
        assert not one.in_use

    def test_a_second_backward_pass(self):
        loss = on_gpu("paper")
        for seed in range(replay.BEFORE + 1):
            wanted = step(loss, seed)
        leaves = pairs(replay.BEFORE, device="cuda")
        value = loss(*leaves)
        for _ in range(2):
            found = torch.autograd.grad(value, leaves, retain_graph=True)
            torch.testing.assert_close((value.detach(), *found), wanted)
        step(loss, 0)
        with pytest.raises(RuntimeError, match="graph=False"):
            torch.autograd.grad(value, leaves)

    def test_gradients_are_the_users_own(self):
        """A later replay does not overwrite gradients that were returned before."""
        loss = on_gpu("infonce")
        kept = [step(loss, seed) for seed in range(replay.BEFORE + 4)]
        again = [step(loss, seed) for seed in range(replay.BEFORE + 4)]
        torch.testing.assert_close(kept, again, rtol=1e-5, atol=1e-6)

    def test_trained_by_an_optimizer(self):
        """A recording holds only the address of a learned temperature, which must train as without a recording."""
        found = []
        for loss in both("learned"):
            optimizer = torch.optim.SGD(loss.parameters(), lr=0.01)
            for seed in range(replay.BEFORE + 4):
                optimizer.zero_grad()
                loss(*pairs(seed, device="cuda")).backward()
                optimizer.step()
            found.append(float(loss.temperature.detach()))
        assert found[0] == pytest.approx(found[1], rel=1e-5)

    def test_nothing_waits_for_the_device(self):
        loss = on_gpu("released")
        for seed in range(replay.BEFORE + 1):
            step(loss, seed)
        leaves = pairs(0, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(loss(*leaves), leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_inside_a_graph_of_the_user(self):
        loss, leaves = on_gpu("infonce"), pairs(0, device="cuda")
        for _ in range(replay.BEFORE + 2):
            wanted = step(loss, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value = loss(*leaves)
            found = torch.autograd.grad(value, leaves)
        graph.replay()
        torch.testing.assert_close((value.detach(), *found), wanted, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("wait", [lambda x: float(x.detach().mean()), lambda _: torch.cuda.synchronize()])
    def test_an_own_loss_that_no_graph_can_hold(self, wait):
        """The loss waits for the device: found before or during capture, after which it runs without a graph."""

        class Waits(Own):
            def combine(self, lse):
                wait(lse.value)
                return lse.value - lse.positive

        loss = Waits(graph=True).cuda()
        wanted = step(Own(graph=False).cuda(), 0)
        for _ in range(replay.BEFORE + 3):
            torch.testing.assert_close(step(loss, 0), wanted, rtol=1e-5, atol=1e-6)
        assert not recordings(loss)
        assert (
            torch.randn(8, device="cuda").isfinite().all()
        )  # a failed capture would break the random generator

    def test_batches_without_gradients_are_not_recorded(self):
        loss = on_gpu("infonce")
        batch = [z.detach() for z in pairs(device="cuda")]
        for _ in range(replay.BEFORE + 2):
            loss(*batch)
        assert not recordings(loss)

    def test_streams_do_not_share_a_recording(self):
        loss, other = on_gpu("infonce"), torch.cuda.Stream()
        for seed in range(replay.BEFORE + 2):
            wanted = step(loss, seed)
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                found = step(loss, seed)
            torch.cuda.synchronize()
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert len(recordings(loss)) == 2

    def test_threads_do_not_share_a_recording(self):
        """Each thread uses the default stream, so that only the thread tells their recordings apart."""
        loss, plain = both("infonce")
        wanted = [step(plain, seed) for seed in range(40)]
        found, counts = {}, []

        def train(seeds):
            for seed in seeds:
                found[seed] = step(loss, seed)
            counts.append(len(recordings(loss)))

        threads = [threading.Thread(target=train, args=(range(first, 40, 2),)) for first in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert counts == [1, 1]
        for seed, right in enumerate(wanted):
            torch.testing.assert_close(found[seed], right, rtol=1e-5, atol=1e-6)

    def test_a_parameter_that_was_exchanged_gets_the_gradient(self):
        """The new parameter shares the old one's storage, so the recording stays valid."""
        loss = on_gpu("learned")
        for seed in range(replay.BEFORE + 2):
            wanted = step(loss, seed)
        loss.temperature = nn.Parameter(loss.temperature.data)
        torch.testing.assert_close(step(loss, replay.BEFORE + 1), wanted, rtol=1e-5, atol=1e-6)
        assert len(recordings(loss)) == 1

    def test_under_checkpointing(self):
        loss = on_gpu("released")
        for seed in range(replay.BEFORE + 2):
            leaves = pairs(seed, device="cuda")
            torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False).backward()
        assert not recordings(loss)

    def test_copies_and_pickles(self):
        loss = on_gpu("released")
        for seed in range(replay.BEFORE + 2):
            step(loss, seed)
        for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
            torch.testing.assert_close(step(other, 3), step(copy.deepcopy(loss), 3))

    def test_a_loss_that_is_gone_takes_its_recordings_with_it(self):
        loss = on_gpu("infonce")
        for seed in range(replay.BEFORE + 2):
            step(loss, seed)
        gc.collect()  # losses of other tests
        known = len(replay._kept.by_loss)
        del loss
        gc.collect()
        assert len(replay._kept.by_loss) == known - 1


def test_private_attributes_are_settings_too():
    loss = Own()
    loss._scale = 1.0
    before = key(loss)
    loss._scale = 2.0
    assert key(loss) != before
