"""Augmentation against its definitions, written here as loops over images, and their distributions."""

import colorsys
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from weince.lab.tasks.images import augment as module
from weince.lab.tasks.images.augment import UNIFORMS, Augment, Draws, apply, blur_radius

# --- the definitions -------------------------------------------------------------------------------------------


def naive_crop(image: Tensor, box: list[int], flip: bool, size: int) -> Tensor:
    """Cut out the box, then resize with torch's antialiased bilinear interpolation."""
    top, left, height, width = box
    cut = image[:, top : top + height, left : left + width]
    view = F.interpolate(cut[None], (size, size), mode="bilinear", align_corners=False, antialias=True)[0]
    return view.flip(2) if flip else view


def naive_grey(image: Tensor) -> Tensor:
    return 0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2]


def naive_blend(image: Tensor, other: Tensor, factor: float) -> Tensor:
    return (factor * image + (1 - factor) * other).clamp(0, 1)


def naive_hue(image: Tensor, shift: float) -> Tensor:
    out = image.clone()
    for row in range(image.shape[1]):
        for column in range(image.shape[2]):
            h, s, v = colorsys.rgb_to_hsv(*image[:, row, column].tolist())
            out[:, row, column] = torch.tensor(colorsys.hsv_to_rgb((h + shift) % 1, s, v))
    return out


def naive_jitter(image: Tensor, factors: list[float], order: list[int]) -> Tensor:
    for op in order:
        if op == 0:
            image = naive_blend(image, torch.zeros_like(image), factors[0])
        elif op == 1:
            image = naive_blend(image, naive_grey(image).mean(), factors[1])
        elif op == 2:
            image = naive_blend(image, naive_grey(image), factors[2])
        else:
            image = naive_hue(image, factors[3])
    return image


def naive_blur(image: Tensor, sigma: float) -> Tensor:
    radius = blur_radius(image.shape[1])
    kernel = torch.tensor([math.exp(-0.5 * (x / sigma) ** 2) for x in range(-radius, radius + 1)])
    kernel = kernel / kernel.sum()
    padded = F.pad(image[None], (radius,) * 4, mode="reflect")
    weight = torch.outer(kernel, kernel).expand(3, 1, -1, -1)
    return F.conv2d(padded, weight, groups=3)[0]


def naive_apply(images: Tensor, draws: Draws, size: int) -> Tensor:
    views = []
    for i, image in enumerate(images):
        view = image.to(torch.float32) / 255 if image.dtype == torch.uint8 else image
        view = naive_crop(view, [int(x) for x in draws.box[i]], bool(draws.flip[i]), size)
        if draws.factors is not None:
            view = naive_jitter(view, draws.factors[i].tolist(), draws.order[i].tolist())
        if draws.grey is not None and draws.grey[i]:
            view = naive_grey(view).expand(3, -1, -1)
        if draws.sigma is not None and draws.sigma[i] > 0:
            view = naive_blur(view, float(draws.sigma[i]))
        views.append(view)
    return torch.stack(views)


def naive_box(rng: random.Random, height: int, width: int, scale, ratio) -> tuple[int, int, int, int]:
    """RandomResizedCrop: ten tries, then a central crop."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w
    w, h = width, height
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int, height: int = 32, width: int = 32, seed: int = 1) -> Tensor:
    """Noise with rows of grey, black, white and pure colours, where the hue is a special case."""
    images = torch.randint(0, 256, (n, 3, height, width), dtype=torch.uint8, generator=seeded(seed))
    images[:, :, 0] = images[:, :1, 0]
    images[:, :, 1] = 255 * (images[:, :, 1] > 127)
    images[:, :, 2] = 0
    images[:, :, 3] = 255
    return images


# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("height", "width", "size", "blur_p"),
    [
        (32, 32, 32, 0.0),
        (32, 32, 32, 0.5),
        (8, 8, 16, 0.0),
        (24, 40, 20, 0.5),  # enlarges some crops and shrinks others
        (40, 24, 7, 0.0),
        (5, 3, 32, 0.5),
    ],
)
def test_views_are_those_of_the_definitions(height, width, size, blur_p):
    images = pictures(24, height, width)
    augment = Augment(size, blur_p=blur_p, jitter_p=0.9, grey_p=0.3)
    draws = augment.draws(images, augment.uniforms(len(images), seeded()))
    views = apply(images, draws, size=size)
    assert views.shape == (24, 3, size, size)
    assert views.dtype == torch.float32
    torch.testing.assert_close(views, naive_apply(images, draws, size), atol=2e-5, rtol=0)


@settings(max_examples=40)
@given(
    order=st.permutations(range(4)),
    factors=st.tuples(*[st.floats(0, 2)] * 3, st.floats(-0.5, 0.5)),
    seed=st.integers(0, 1000),
)
def test_jitter_in_every_order(order, factors, seed):
    images = pictures(1, 6, 6, seed)
    whole = torch.tensor([[0.0, 0, 6, 6]])
    draws = Draws(
        whole, torch.tensor([False]), torch.tensor([factors]), torch.tensor([list(order)]), None, None
    )
    torch.testing.assert_close(apply(images, draws, size=6), naive_apply(images, draws, 6), atol=2e-5, rtol=0)


def test_each_image_has_its_own_order():
    """One batch has all 24 orders of the same image with the same factors, so that only the order differs."""
    orders = torch.tensor(
        [
            [a, b, c, 6 - a - b - c]
            for a in range(4)
            for b in range(4)
            for c in range(4)
            if len({a, b, c}) == 3
        ]
    )
    n = len(orders)
    images = pictures(1, 6, 6).expand(n, -1, -1, -1)
    draws = Draws(
        torch.tensor([[0.0, 0, 6, 6]]).expand(n, -1),
        torch.zeros(n, dtype=torch.bool),
        torch.tensor([[1.4, 0.5, 1.7, 0.13]]).expand(n, -1),
        orders,
        None,
        None,
    )
    views = apply(images, draws, size=6)
    assert n == 24
    assert len(torch.unique(views.flatten(1), dim=0)) == 24
    torch.testing.assert_close(views, naive_apply(images, draws, 6), atol=2e-5, rtol=0)


def test_without_a_look_at_the_values_the_views_are_the_same(monkeypatch):
    """On a GPU and in compiled code, values are not read: the hue of all images is computed, and most discarded."""
    images = torch.rand(20, 3, 9, 7)
    generator = torch.Generator().manual_seed(0)
    augment = Augment(size=8)
    numbers = augment.uniforms(20, generator)
    seen = augment.view(images, numbers)
    monkeypatch.setattr(module, "free_to_look", lambda values: False)
    assert torch.equal(augment.view(images, numbers), seen)


def test_nothing_switched_on_leaves_the_image():
    images = pictures(5)
    plain = Augment(32, crop_scale=(1, 1), crop_ratio=(1, 1), flip=0, jitter_p=0, grey_p=0)
    draws = plain.draws(images, plain.uniforms(len(images), seeded()))
    assert draws.factors is None
    assert draws.grey is None
    assert torch.equal(plain(images, seeded()), images / 255)


def test_an_image_that_is_not_jittered_keeps_its_colours():
    images = pictures(200)
    augment = Augment(32, crop_scale=(1, 1), crop_ratio=(1, 1), flip=0, grey_p=0)
    draws = augment.draws(images, augment.uniforms(len(images), seeded()))
    kept = (draws.factors == torch.tensor([1.0, 1, 1, 0])).all(dim=1)
    assert 20 < kept.sum() < 60  # one in five
    views = apply(images, draws, size=32)
    torch.testing.assert_close(views[kept], images[kept] / 255, atol=1e-5, rtol=0)
    changed = (views[~kept] - images[~kept] / 255).abs().amax(dim=(1, 2, 3))
    assert (changed > 1e-2).all()


def test_a_crop_reads_nothing_outside_its_box():
    images = torch.zeros(1, 3, 32, 32)
    images[:, :, 10:14, 20:25] = 1
    box = torch.tensor([[10.0, 20, 4, 5]])
    draws = Draws(box, torch.tensor([False]), None, None, None, None)
    torch.testing.assert_close(apply(images, draws, size=32), torch.ones(1, 3, 32, 32))


def test_floats_and_bytes_and_memory_formats_agree():
    images = pictures(16)
    augment = Augment(32)
    want = augment(images, seeded())
    assert torch.equal(augment(images / 255, seeded()), want)
    last = images.to(memory_format=torch.channels_last)
    torch.testing.assert_close(augment(last, seeded()), want, atol=1e-6, rtol=0)


@settings(max_examples=30)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    size=st.integers(1, 40),
    kind=st.sampled_from(["black", "white", "noise"]),
    seed=st.integers(0, 10**6),
)
def test_views_stay_in_range(height, width, size, kind, seed):
    images = {"black": 0, "white": 255}.get(kind)
    shape = (6, 3, height, width)
    if images is None:
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(seed))
    else:
        images = torch.full(shape, images, dtype=torch.uint8)
    views = Augment(size, blur_p=0.5 if size >= 20 else 0.0)(images, seeded(seed))
    assert torch.isfinite(views).all()
    assert views.min() >= 0
    assert views.max() <= 1


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_into_one_graph(autocast, fresh_compiler):
    images = pictures(8)
    augment = Augment(32, blur_p=0.5)
    u = augment.uniforms(8, seeded())
    want = augment.view(images, u)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(augment.view(images, u), want)  # autocast does not affect pixels
        got = torch.compile(augment.view, fullgraph=True)(images, u)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_the_seed_decides():
    images = pictures(16)
    augment = Augment(32)
    generator = seeded(3)
    first, second = augment(images, generator), augment(images, generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, augment(images, seeded(3)))
    assert torch.equal(first, augment.view(images, augment.uniforms(16, seeded(3))))
    assert not torch.equal(first, augment(images, seeded(4)))


def test_the_global_seed_does_not_matter():
    images = pictures(4)
    torch.manual_seed(1)
    first = Augment(32)(images, seeded())
    torch.manual_seed(2)
    assert torch.equal(first, Augment(32)(images, seeded()))


# --- distributions ---------------------------------------------------------------------------------------------

MANY = 20_000


def drawn(augment: Augment, height: int = 32, width: int = 32, n: int = MANY) -> Draws:
    images = torch.empty(1, 3, 1, 1).expand(n, 3, height, width)
    return augment.draws(images, augment.uniforms(n, seeded()))


@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"),
    [
        (32, 32, (0.08, 1.0), (3 / 4, 4 / 3)),
        (20, 90, (0.5, 1.0), (3 / 4, 4 / 3)),  # few boxes fit, most crops are central
        (90, 20, (0.5, 1.0), (3 / 4, 4 / 3)),
        (24, 32, (0.2, 1.0), (0.5, 2.0)),
        (32, 32, (0.1, 0.3), (1.5, 3.0)),  # only wide boxes
    ],
)
def test_boxes_are_distributed_as_defined(height, width, scale, ratio):
    box = drawn(Augment(32, crop_scale=scale, crop_ratio=ratio), height, width).box.numpy()
    rng = random.Random(0)
    naive = np.array([naive_box(rng, height, width, scale, ratio) for _ in range(MANY)])
    assert (box == box.round()).all()
    for column in range(4):
        assert_same_distribution(box[:, column], naive[:, column])
    assert_same_distribution(box[:, 2] * 1000 + box[:, 3], naive[:, 2] * 1000 + naive[:, 3])  # jointly
    whole = np.array([[0, height], [0, width]])
    for start, length, (low, high) in zip(box.T[:2], box.T[2:], whole, strict=True):
        assert (start >= low).all()
        assert (start + length <= high).all()


def assert_same_distribution(x: np.ndarray, y: np.ndarray) -> None:
    """Chi-square test of the counts of each value in two samples; rare values are pooled."""
    values, codes = np.unique(np.concatenate([x, y]), return_inverse=True)
    counts = np.stack([np.bincount(c, minlength=len(values)) for c in (codes[: len(x)], codes[len(x) :])])
    rare = counts.sum(0) < 20
    counts = np.concatenate([counts[:, ~rare], counts[:, rare].sum(1, keepdims=True)], axis=1)
    counts = counts[:, counts.sum(0) > 0]
    if counts.shape[1] > 1:
        assert stats.chi2_contingency(counts).pvalue > 1e-4


def test_factors_orders_and_flags_are_distributed_as_defined():
    augment = Augment(32, jitter=(0.8, 1.2, 0.3, 0.2), flip=0.3, jitter_p=0.7, grey_p=0.1, blur_p=0.4)
    draws = drawn(augment)
    on = (draws.factors != torch.tensor([1.0, 1, 1, 0])).any(dim=1)
    for flag, p in ((draws.flip, 0.3), (on, 0.7), (draws.grey, 0.1), (draws.sigma > 0, 0.4)):
        assert stats.binomtest(int(flag.sum()), MANY, p).pvalue > 1e-4
    ranges = [(0.2, 1.8), (0.0, 2.2), (0.7, 1.3), (-0.2, 0.2)]
    columns = [*(draws.factors[on].T.numpy()), draws.sigma[draws.sigma > 0].numpy()]
    for column, (low, high) in zip(columns, [*ranges, (0.1, 2.0)], strict=True):
        assert stats.kstest(column, stats.uniform(low, high - low).cdf).pvalue > 1e-4
    codes = (draws.order * torch.tensor([64, 16, 4, 1])).sum(1)
    _, counts = codes.unique(return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    assert torch.equal(draws.order.sort(dim=1).values, torch.arange(4).expand(MANY, 4))


def test_draws_are_independent_of_each_other():
    draws = drawn(Augment(32, jitter_p=0.8, blur_p=0.5))
    jittered = draws.factors[:, 0] != 1
    columns = [
        *draws.box.T,
        draws.flip,
        *draws.factors.T,
        *draws.order.T[:3],
        draws.grey,
        draws.sigma,
        jittered,
    ]
    table = np.corrcoef(np.stack([c.numpy().astype(float) for c in columns]))
    height_width = {(2, 3), (0, 2), (1, 3), (0, 3), (1, 2), (0, 1)}  # parts of one box
    orders = {(i, j) for i in (9, 10, 11) for j in (9, 10, 11)}  # parts of one permutation
    for i in range(len(columns)):
        for j in range(i + 1, len(columns)):
            if (i, j) not in height_width | orders:
                assert abs(table[i, j]) < 5 / math.sqrt(MANY), (i, j)


def test_a_box_has_a_row_and_a_column_of_its_own():
    top, left, height, width = drawn(
        Augment(32, crop_scale=(0.25, 0.25), crop_ratio=(1.0, 1.0))
    ).box.T.numpy()
    assert set(height) == set(width) == {16}
    assert abs(np.corrcoef(top, left)[0, 1]) < 5 / math.sqrt(MANY)


def test_the_largest_uniform_stays_inside_the_image():
    """u * k may round up to k in float32."""
    almost = torch.full((1, UNIFORMS), 1 - 2.0**-24)
    for height in range(1, 70):
        images = torch.zeros(1, 3, height, height)
        top, left, h, w = Augment(8, crop_scale=(0.3, 0.31)).draws(images, almost).box[0].tolist()
        assert top + h <= height
        assert left + w <= height


@pytest.mark.parametrize("ratio", [(0.01, 0.02), (100.0, 200.0)])
def test_ratios_that_leave_less_than_a_pixel_take_a_pixel(ratio):
    augment, images = Augment(16, crop_ratio=ratio), torch.full((8, 3, 16, 16), 255, dtype=torch.uint8)
    draws = drawn(augment, 16, 16)
    assert draws.box[:, 2:].min() == 1
    assert augment(images, torch.Generator().manual_seed(0)).isfinite().all()


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be at least 1; got 0"),
        ({"flip": 1.5}, r"flip is a probability in \[0, 1\]; got 1.5"),
        ({"grey_p": -0.1}, "grey_p is a probability"),
        ({"jitter_p": float("nan")}, "jitter_p is a probability"),
        ({"crop_scale": (0.0, 1.0)}, "crop_scale is .low, high. with 0 < low <= high <= 1; got"),
        ({"crop_scale": (0.5, 1.5)}, "crop_scale is"),
        ({"crop_ratio": (2.0, 1.0)}, "crop_ratio is"),
        ({"jitter": (0.8, 0.8, 0.8)}, "jitter is .brightness, contrast, saturation, hue."),
        ({"jitter": (0.8, 0.8, 0.8, 0.6)}, "hue from 0 to 0.5"),
        ({"jitter": (float("nan"), 0.8, 0.8, 0.2)}, "the first three from 0 to 10"),
        ({"jitter": (0.8, -0.1, 0.8, 0.2)}, "the first three from 0 to 10"),
        ({"jitter": (0.8, 0.8, 80, 0.2)}, "the first three from 0 to 10"),
        ({"crop_ratio": (1.0, float("inf"))}, "crop_ratio is"),
        ({"size": 16, "blur_p": 0.5}, "blur needs views of at least 20 px; got 16"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        Augment(**{"size": 32, **options})


@pytest.mark.parametrize("shape", [(4, 32, 32, 3), (3, 32, 32), (4, 1, 32, 32)])
def test_wrong_shape(shape):
    with pytest.raises(ValueError, match=r"images must be \(n, 3, height, width\); got"):
        Augment(32)(torch.zeros(shape), seeded())


def test_generator_elsewhere():
    with pytest.raises(ValueError, match="must be on one device; got meta and cpu"):
        Augment(32)(torch.zeros(2, 3, 8, 8, device="meta"), seeded())
