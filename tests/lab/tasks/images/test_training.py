"""One step of a run on images is the loop that one would write; views, precisions, ranks and graphs."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training import SIZE, ready, small_run, write_data

from weince import TailConfig, WeinceLoss
from weince.lab.configure import LossConfig
from weince.lab.geometry import crowded as share_crowded
from weince.lab.tasks.images.augment import Augment
from weince.lab.tasks.images.data import load
from weince.lab.tasks.images.training import Pixels, collapse, measure
from weince.lab.training.capture import Step
from weince.lab.training.optimizers import OptimizerConfig, set_rate
from weince.scores import CROWD

BATCH = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def prepare(data, tmp_path):
    """Makes a run ready whose views are those of seed 3."""

    def make(**changes):
        training = ready(small_run(data, tmp_path, **({"batch": BATCH, "device": "cpu"} | changes)))
        training.generator.manual_seed(3)
        return training

    return make


def test_a_step_is_the_loop_one_would_write(prepare, data):
    training = prepare(optimizer=OptimizerConfig(lr=1e-2))
    step, images = Step(training), load(str(data), size=SIZE).pretrain_images
    by_hand = copy.deepcopy(training.model)
    loss, optimizer = WeinceLoss(), torch.optim.Adam(by_hand.parameters(), lr=1e-2)
    generator, augment = torch.Generator().manual_seed(3), Augment(SIZE)
    for rows in torch.randperm(24).split(BATCH):
        taken = step({"rows": rows})
        batch = torch.from_numpy(images[rows.numpy()]).permute(0, 3, 1, 2)
        views = [augment(batch, generator) for _ in range(2)]
        z_i, z_j = (by_hand(view.contiguous(memory_format=torch.channels_last))[1] for view in views)
        value = loss(z_i, z_j)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        assert taken.loss.item() == pytest.approx(value.item(), rel=1e-6)
    for a, b in zip(training.model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(taken.arguments["z_i"], z_i)
    assert not taken.arguments["z_i"].requires_grad


def test_cached_gradients_are_those_of_the_whole_batch(prepare):
    whole, cached = (prepare(loss=LossConfig("infonce", 0.5)) for _ in range(2))
    cached.micro_batch = 3
    for training in (whole, cached):
        taken = Step(training)({"rows": torch.arange(BATCH)})
        training.last = taken.loss, [p.grad for p in training.model.parameters()]
    torch.testing.assert_close(cached.last[0], whole.last[0], rtol=1e-5, atol=0)
    for a, b in zip(cached.last[1], whole.last[1], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()  # sums in another order


def test_batch_norm_sees_each_view_by_itself(prepare):
    training = prepare(encoder="resnet18", width=4)
    model = training.model
    by_hand = copy.deepcopy(model)
    views = [torch.rand(BATCH, 3, SIZE, SIZE) * scale for scale in (1.0, 0.1)]
    ours = [training._embed(view) for view in views]
    wanted = [by_hand(view)[1] for view in views]
    for a, b in zip(ours, wanted, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(model.encoder.bn1.running_mean, by_hand.encoder.bn1.running_mean)
    together = by_hand(torch.cat(views))[1]
    assert not torch.allclose(together, torch.cat(wanted), atol=1e-3)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.float32), ("bf16-embeddings", torch.bfloat16)]
)
def test_the_projector_stays_in_float32_unless_asked(prepare, precision, dtype):
    training = prepare(encoder="resnet18", width=4, precision=precision)
    view = torch.rand(BATCH, 3, SIZE, SIZE)
    z = training._embed(view)
    assert z.dtype == dtype
    with torch.no_grad():
        exact = training.model(view)[1]
        error = (z.detach() - exact).norm() / exact.norm()
    assert 1e-5 < error < 0.1  # shows that the encoder ran in bf16


def test_the_ranks_of_a_batch_see_the_views_of_the_whole(prepare, monkeypatch):
    rows = {"rows": torch.arange(BATCH)}
    whole = Step(prepare())(rows).arguments["z_i"]
    for part in (slice(0, 5), slice(5, 8)):
        training = prepare()
        monkeypatch.setattr(type(training), "part", part)
        torch.testing.assert_close(Step(training)(rows).arguments["z_i"], whole[part], rtol=1e-5, atol=1e-6)


def test_compiled_views_are_the_same(prepare, fresh_compiler):
    """Of crops and flips alone: ``test_augment`` compiles the whole augmentation, which takes half a minute."""
    augment = Augment(SIZE, jitter_p=0.0, grey_p=0.0)
    plain, compiled = (
        Step(prepare(compile=c, augment=augment))({"rows": torch.arange(BATCH)}).arguments["z_j"]
        for c in (False, True)
    )
    torch.testing.assert_close(plain, compiled, rtol=1e-4, atol=1e-5)


def test_images_on_disk_are_read_batch_by_batch(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (24, SIZE, SIZE, 3), np.uint8)
    np.save(tmp_path / "images.npy", images)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    rows = torch.tensor([5, 0, 5])
    for source, resident in ((images, True), (mapped, False)):
        pixels = Pixels(source, torch.device("cpu"))
        assert pixels.resident is resident
        assert torch.equal(pixels.rows(rows), torch.from_numpy(images[[5, 0, 5]]).permute(0, 3, 1, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a CUDA device captures a step as a graph")
@pytest.mark.parametrize("preset", ["infonce", "paper", "released"])
def test_a_captured_step_is_the_eager_one(prepare, preset):
    """Also if the generator is reseeded between steps and the learning rate changes."""
    finals = []
    for graph in (False, True):
        training = prepare(
            encoder="resnet18", width=4, loss=LossConfig(preset), device="cuda", compile=False, graph=graph
        )
        step, total = Step(training), 0.0
        for number in range(12):
            if number % 5 == 0:
                training.generator.manual_seed(number)
            set_rate(training.optimizer, 1e-3 / (1 + number))
            taken = step({"rows": torch.arange(number, number + BATCH, device="cuda")})
            total += taken.loss.item()
        assert (step.graph is not None) is graph
        finals.append((total, taken.arguments["z_i"].clone()))
    assert finals[0][0] == pytest.approx(finals[1][0], rel=1e-4)
    torch.testing.assert_close(finals[0][1], finals[1][1], rtol=2e-2, atol=2e-2)


def test_measured_figures_by_their_definitions():
    generator = torch.Generator().manual_seed(0)
    z_i, z_j = (torch.randn(6, 4, generator=generator) for _ in range(2))
    found = measure(z_i, z_j, TailConfig())
    rows = torch.nn.functional.normalize(torch.cat([z_i, z_j]).double()).numpy()
    n = len(z_i)
    pairs = [float(np.sum((rows[k] - rows[k + n]) ** 2)) for k in range(n)]
    others = [
        math.exp(-2 * float(np.sum((rows[a] - rows[b]) ** 2)))
        for a in range(2 * n) for b in range(a) if a - b != n
    ]  # fmt: skip
    share = np.linalg.svd(rows, compute_uv=False)
    share /= share.sum()
    assert found["alignment"] == pytest.approx(np.mean(pairs))
    assert found["uniformity"] == pytest.approx(math.log(np.mean(others)))
    assert found["effective_rank"] == pytest.approx(math.exp(-np.sum(share * np.log(share))))
    stats = WeinceLoss.paper()(z_i, z_j, return_stats=True).stats
    for name in ("rho", "beta", "daic", "lam"):
        assert found[name] == pytest.approx(float(getattr(stats, name).mean()))


def naive_crowded(z_i, z_j):
    """Share of anchors with a candidate at a cosine of at least 0.99, other than themselves and their positive."""
    rows = [[float(x) for x in row] for row in torch.cat([z_i, z_j]).double()]
    n = len(z_i)

    def shortfall(a, b):
        lengths = math.hypot(*a) * math.hypot(*b)  # a zero row has cosine 0 with every row
        return 1 - math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 1.0

    crowded = [
        any(shortfall(rows[a], rows[b]) <= 0.01 for b in range(2 * n) if b not in (a, (a + n) % (2 * n)))
        for a in range(2 * n)
    ]
    return sum(crowded) / len(crowded)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 9),
    d=st.integers(2, 6),
    places=st.integers(1, 9),
    spread=st.sampled_from([0.0, 1e-4, 0.05, 0.1, 1.0]),
    zeros=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_crowded_is_the_share_with_another_candidate_next_to_them(n, d, places, spread, zeros, dtype, seed):
    """Items cluster around a few places, with various spreads; zero rows never count as crowded."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(places, d, generator=generator)[torch.randint(places, (n,), generator=generator)]
    z_i, z_j = (
        (centres + spread * torch.randn(n, d, generator=generator)).to(dtype) * scale for scale in (1, 30)
    )
    z_i[:zeros] = 0
    z_j[:zeros] = 0
    assert measure(z_i, z_j, TailConfig())["crowded"] == naive_crowded(z_i, z_j)


def test_a_positive_crowds_nobody_but_its_double_does():
    z = torch.eye(8)
    assert measure(z, z, TailConfig())["crowded"] == 0
    z[5] = z[2]
    assert measure(z, z, TailConfig())["crowded"] == 4 / 16
    assert measure(z, z, TailConfig(eps=0.5))["crowded"] == 4 / 16  # eps of the tail has no effect
    assert float(share_crowded(z[:1].repeat(2, 1))) == 0  # a single pair


@pytest.mark.parametrize(("shortfall", "crowded"), [(0.99 * CROWD, 1.0), (1.01 * CROWD, 0.0)])
def test_crowded_up_to_a_shortfall_of_a_hundredth(shortfall, crowded):
    cosine = 1 - shortfall
    z = torch.tensor([[1.0, 0.0], [cosine, math.sqrt(1 - cosine**2)]])
    assert measure(z, z, TailConfig())["crowded"] == crowded


def test_a_log_from_before_figures_of_collapse_gives_no_warning():
    assert collapse({"epoch": 3.0, "loss": 5.0}) is None
    assert "20% of the anchors" in collapse({"epoch": 3.0, "crowded": 0.2})


def test_what_is_logged_does_not_depend_on_how_the_logit_is_made():
    z_i, z_j = torch.randn(2, 24, 8)
    plain = measure(z_i, z_j, TailConfig(k=12))
    assert measure(z_i, z_j, TailConfig(k=12, beta="slope", endpoint=1.2, positive="softmax")) == plain
