import copy

import numpy as np
import pytest
import torch

from weince import WeinceLoss
from weince.lab.configure import LossConfig, build_loss
from weince.lab.tasks.images.augment import Augment
from weince.lab.tasks.images.encoders import Projector, SimCLR, build
from weince.lab.tasks.images.step import Pixels, Step, TwoViews
from weince.lab.training.optimizers import OptimizerConfig, build_optimizer

SIZE, BATCH = 16, 8


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (24, SIZE, SIZE, 3), np.uint8)


def small_model(encoder="tiny"):
    torch.manual_seed(0)
    built = build(encoder, size=SIZE, width=4)
    return SimCLR(built, Projector(built.features, out=8))


def make_step(model, images, *, part=slice(None), compiled=False, augment=Augment(SIZE)):
    return Step(
        TwoViews(model, "fp32"),
        build_loss(LossConfig("released")),
        build_optimizer(model.parameters(), OptimizerConfig(lr=1e-2)),
        Pixels(images, torch.device("cpu")),
        augment,
        torch.Generator().manual_seed(3),
        batch=BATCH,
        part=part,
        compiled=compiled,
        graph=False,
    )


def test_a_step_is_the_loop_one_would_write(images):
    model = small_model()
    step = make_step(model, images)
    by_hand = copy.deepcopy(model)
    loss, optimizer = WeinceLoss(), torch.optim.Adam(by_hand.parameters(), lr=1e-2)
    generator, augment = torch.Generator().manual_seed(3), Augment(SIZE)
    total = 0.0
    for rows in torch.randperm(24).split(BATCH):
        step(rows)
        batch = torch.from_numpy(images[rows.numpy()]).permute(0, 3, 1, 2)
        views = [augment(batch, generator) for _ in range(2)]
        z_i, z_j = (by_hand(view.contiguous(memory_format=torch.channels_last))[1] for view in views)
        value = loss(z_i, z_j)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        total += value.item()
    for a, b in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(a, b)
    assert float(step.total) == pytest.approx(total, rel=1e-6)
    assert torch.equal(step.last.z_i, z_i)
    assert not step.last.z_i.requires_grad


def test_batch_norm_sees_each_view_by_itself(images):
    model = small_model("resnet18")
    by_hand = copy.deepcopy(model)
    views = [torch.rand(BATCH, 3, SIZE, SIZE) * scale for scale in (1.0, 0.1)]
    found = TwoViews(model, "fp32")(*views)
    wanted = [by_hand(view)[1] for view in views]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(model.encoder.bn1.running_mean, by_hand.encoder.bn1.running_mean)
    together = by_hand(torch.cat(views))[1]
    assert not torch.allclose(together, torch.cat(wanted), atol=1e-3)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.float32), ("bf16-embeddings", torch.bfloat16)]
)
def test_the_projector_stays_in_float32_unless_asked(images, precision, dtype):
    model = small_model("resnet18")
    view = torch.rand(BATCH, 3, SIZE, SIZE)
    z, _ = TwoViews(model, precision)(view, view)
    assert z.dtype == dtype
    with torch.no_grad():
        exact = model(view)[1]
        error = (z.detach() - exact).norm() / exact.norm()
    assert 1e-5 < error < 0.1  # shows that the encoder ran in bf16


def test_the_ranks_of_a_batch_see_the_views_of_the_whole(images):
    rows = torch.arange(BATCH)
    whole = make_step(small_model(), images)
    whole(rows)
    for part in (slice(0, 5), slice(5, 8)):
        step = make_step(small_model(), images, part=part)
        step(rows)
        torch.testing.assert_close(step.last.z_i, whole.last.z_i[part], rtol=1e-5, atol=1e-6)


def test_compiled_views_are_the_same(images, fresh_compiler):
    """Of crops and flips alone: ``test_augment`` compiles the whole augmentation, which takes half a minute."""
    augment = Augment(SIZE, jitter_p=0.0, grey_p=0.0)
    plain, compiled = (make_step(small_model(), images, compiled=c, augment=augment) for c in (False, True))
    for step in (plain, compiled):
        step(torch.arange(BATCH))
    torch.testing.assert_close(plain.last.z_j, compiled.last.z_j, rtol=1e-4, atol=1e-5)


def test_images_on_disk_are_read_batch_by_batch(tmp_path, images):
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
def test_a_captured_step_is_the_eager_one(images, preset):
    """Also if the generator is reseeded between steps and the learning rate changes."""
    from weince.lab.training.optimizers import set_rate

    finals = []
    for graph in (False, True):
        model = small_model("resnet18").cuda()
        step = Step(
            TwoViews(model, "fp32"),
            build_loss(LossConfig(preset)).cuda(),
            build_optimizer(model.parameters(), OptimizerConfig(lr=1e-3)),
            Pixels(images, torch.device("cuda")),
            Augment(SIZE),
            torch.Generator("cuda"),
            batch=BATCH,
            part=slice(None),
            compiled=False,
            graph=graph,
        )
        for number in range(12):
            if number % 5 == 0:
                step.generator.manual_seed(number)
            set_rate(step.optimizer, 1e-3 / (1 + number))
            step(torch.arange(number, number + BATCH, device="cuda"))
        assert (step.graph is not None) is graph
        finals.append((step.total.item(), step.last.z_i.clone()))
    assert finals[0][0] == pytest.approx(finals[1][0], rel=1e-4)
    torch.testing.assert_close(finals[0][1], finals[1][1], rtol=2e-2, atol=2e-2)
