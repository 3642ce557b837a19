"""The cached step against a plain one: same loss, same gradients, same random numbers."""

import copy
import doctest
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import nn

from weince import InfoNCELoss, WeinceLoss, cached
from weince.cached import cached_step


def encoder(dropout=0.0, dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 8)).to(dtype)


def two_views(rows=22, dtype=torch.float64):
    return torch.randn(rows, 6, dtype=dtype), torch.randn(rows, 6, dtype=dtype)


def gradients(module):
    return [parameter.grad for parameter in module.parameters()]


def plain_step(model, views, loss, micro_batch):
    """Keep the graphs of all micro-batches, as the cached step avoids."""
    embedded = [torch.cat([model(part) for part in view.split(micro_batch)]) for view in views]
    value = loss(*embedded)
    value.backward()
    return value.detach()


@pytest.mark.parametrize(
    "loss", [InfoNCELoss(0.2), WeinceLoss.paper(0.3), WeinceLoss(engine="chunked").eval()]
)
@pytest.mark.parametrize("micro_batch", [1, 5, 22, 100])
def test_equals_the_step_on_the_whole_batch(loss, micro_batch):
    views, model = two_views(), encoder()
    twin = copy.deepcopy(model)
    wanted = loss(model(views[0]), model(views[1]))
    wanted.backward()
    got = cached_step(twin, views, loss, micro_batch=micro_batch)
    assert not got.requires_grad
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(twin), gradients(model), rtol=1e-11, atol=1e-13)


def test_dropout_draws_the_same_masks_twice():
    """The loss is equal to the last bit, and the generator ends in the same state as after the plain step."""
    views, model = two_views(), encoder(dropout=0.4)
    twin = copy.deepcopy(model)
    torch.manual_seed(11)
    wanted = plain_step(model, views, WeinceLoss(), 5)
    after = torch.rand(3)
    torch.manual_seed(11)
    got = cached_step(twin, views, WeinceLoss(), micro_batch=5)
    assert got == wanted
    torch.testing.assert_close(torch.rand(3), after, rtol=0, atol=0)
    torch.testing.assert_close(gradients(twin), gradients(model), rtol=1e-11, atol=1e-13)


def test_an_encoder_may_draw_on_devices_that_its_inputs_are_not_on(monkeypatch):
    """Two generators stand in for those of two GPUs, to which the encoder moves its inputs."""
    gpus = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [gpu.get_state() for gpu in gpus])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state_all", lambda s: [gpu.set_state(x) for gpu, x in zip(gpus, s, strict=True)]
    )
    views, model = two_views(), encoder(dropout=0.4)
    twin = copy.deepcopy(model)

    def drawing(model):
        return lambda x: model(x * torch.rand(6, generator=gpus[0])) + torch.rand(8, generator=gpus[1])

    torch.manual_seed(11)
    wanted = plain_step(drawing(model), views, WeinceLoss(), 5)
    after = [torch.rand(3, generator=gpu) for gpu in gpus]
    torch.manual_seed(11)
    for seed, gpu in enumerate(gpus, 1):
        gpu.manual_seed(seed)
    got = cached_step(drawing(twin), views, WeinceLoss(), micro_batch=5)
    assert got == wanted
    torch.testing.assert_close([torch.rand(3, generator=gpu) for gpu in gpus], after, rtol=0, atol=0)
    torch.testing.assert_close(gradients(twin), gradients(model), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Autocast caches cast weights; those from the pass without a graph must not be reused in the pass with it."""
    views, model = two_views(dtype=torch.float32), encoder(dropout=0.2, dtype=torch.float32)
    twin = copy.deepcopy(model)
    torch.manual_seed(11)
    with torch.autocast("cpu", dtype=dtype):
        wanted = plain_step(model, views, InfoNCELoss(), 5)
    torch.manual_seed(11)
    with torch.autocast("cpu", dtype=dtype):
        got = cached_step(twin, views, InfoNCELoss(), micro_batch=5)
    assert got == wanted
    for ours, theirs in zip(gradients(twin), gradients(model), strict=True):
        # The plain step adds up gradients of micro-batches in half precision, the cached step in float32.
        assert float((ours - theirs).norm() / theirs.norm()) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("own", "dtype"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_embeddings_in_another_half_precision_than_that_of_autocast(own, dtype):
    views = two_views(dtype=torch.float32)
    model = nn.Linear(6, 8)

    def in_half(rows):
        with torch.autocast("cpu", enabled=False):
            return model(rows).to(own)

    wanted = InfoNCELoss()(in_half(views[0]), in_half(views[1]))
    with torch.autocast("cpu", dtype=dtype):
        assert cached_step(in_half, views, InfoNCELoss(), micro_batch=5) == wanted
    assert model.weight.grad.abs().max() > 0


def test_gradients_accumulate():
    views, model = two_views(), encoder()
    cached_step(model, views, InfoNCELoss(), micro_batch=5)
    once = [grad.clone() for grad in gradients(model)]
    cached_step(model, views, InfoNCELoss(), micro_batch=5)
    torch.testing.assert_close(gradients(model), [2 * grad for grad in once])


def test_a_view_of_sentence_transformers_may_hold_settings_beside_its_tensors():
    """Its ``preprocess`` returns ``modality`` and ``prompt_length`` too."""
    views, model, twin = two_views(), encoder(), encoder()
    wanted = plain_step(twin, views, InfoNCELoss(0.2), 5)
    settings = {"modality": "text", "prompt_length": 2, "prompt": None}
    got = cached_step(
        lambda features: model(features["rows"]) * (features["prompt_length"] == 2),
        [{"rows": view, **settings} for view in views],
        InfoNCELoss(0.2),
        micro_batch=5,
    )
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(gradients(model), gradients(twin))


def test_one_encoder_for_each_view_dicts_and_a_learned_temperature():
    temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    loss = InfoNCELoss(temperature, candidates="clip")
    image, text = encoder(), encoder()
    twins = copy.deepcopy(image), copy.deepcopy(text)
    pixels, tokens = two_views()
    mask = (torch.rand(22, 6) < 0.7).double()
    value = loss(image(pixels), text(tokens * mask))
    value.backward()
    wanted, temperature.grad = temperature.grad, None

    got = cached_step(
        [twins[0], lambda batch: twins[1](batch["tokens"] * batch["mask"][0])],
        [pixels, {"tokens": tokens, "mask": [mask]}],
        loss,
        micro_batch=4,
    )
    torch.testing.assert_close(got, value.detach())
    torch.testing.assert_close(temperature.grad, wanted)
    torch.testing.assert_close(gradients(twins[0]), gradients(image))
    torch.testing.assert_close(gradients(twins[1]), gradients(text))


def test_encoders_in_a_module_list_and_views_in_one_tensor():
    both = nn.ModuleList([encoder(), encoder()])
    twins, views = copy.deepcopy(both), torch.stack(two_views())
    InfoNCELoss()(both[0](views[0]), both[1](views[1])).backward()
    cached_step(twins, views, InfoNCELoss(), micro_batch=4)
    torch.testing.assert_close(gradients(twins), gradients(both))


class Pixels(NamedTuple):
    values: torch.Tensor
    size: list[torch.Tensor]


def test_a_view_may_be_a_named_tuple():
    views, model = two_views(), encoder()
    named = [Pixels(view, [view[:, :1]]) for view in views]
    twin = copy.deepcopy(model)
    wanted = cached_step(model, views, WeinceLoss(), micro_batch=5)
    got = cached_step(lambda view: twin(view.values + 0 * view.size[0]), named, WeinceLoss(), micro_batch=5)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    torch.testing.assert_close(gradients(twin), gradients(model), rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["parameters", "graph"])
def test_an_encoder_may_be_frozen(frozen):
    """For example a locked tower, or the momentum encoder of the keys."""
    views, model, other = two_views(), encoder(), encoder().requires_grad_(frozen == "graph")
    keys = torch.no_grad()(other) if frozen == "graph" else other
    twin = copy.deepcopy(model)
    wanted = WeinceLoss()(model(views[0]), keys(views[1]))
    wanted.backward()
    got = cached_step([twin, keys], views, WeinceLoss(), micro_batch=5)
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(twin), gradients(model), rtol=1e-11, atol=1e-13)
    assert gradients(other) == [None] * 4


def test_a_loss_may_leave_a_view_out():
    views, model = two_views(), encoder()
    cached_step(model, views, lambda a, b: a.square().mean(), micro_batch=5)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(views[0]).square().mean().backward()
    torch.testing.assert_close(gradients(model), gradients(twin), rtol=1e-11, atol=1e-13)


def test_a_scaler_scales_the_gradient_and_not_the_value():
    views, model = two_views(), encoder()
    twin = copy.deepcopy(model)
    wanted = cached_step(model, views, InfoNCELoss(), micro_batch=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    assert cached_step(twin, views, InfoNCELoss(), micro_batch=5, scaler=scaler) == wanted
    torch.testing.assert_close(gradients(twin), [256 * grad for grad in gradients(model)])


def test_activations_of_one_micro_batch_at_a_time():
    """Autograd holds the saved tensors of one micro-batch at a time, not of the whole batch."""
    held, peak = 0, 0

    def keep(tensor):
        nonlocal held, peak
        held += tensor.numel()
        peak = max(peak, held)
        return tensor

    def unpack(tensor):
        nonlocal held
        held -= tensor.numel()
        return tensor

    views, model = two_views(64), encoder()
    with torch.autograd.graph.saved_tensors_hooks(keep, unpack):
        cached_step(model, views, lambda a, b: (a * b).sum(), micro_batch=4)
        micro = peak
        held = peak = 0
        (model(views[0]) * model(views[1])).sum().backward()
    assert micro < peak / 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"micro_batch": 0}, ValueError, "micro_batch must be an int of at least 1; got 0"),
        ({"micro_batch": 2.5}, ValueError, "got 2.5"),
        ({"views": ()}, ValueError, "got 0 for 0 views"),
        ({"encoder": [encoder()]}, ValueError, "one for each view; got 1 for 2 views"),
        ({"views": ("abc", "abc")}, TypeError, "a view must be tensors.*got str"),
        ({"views": ({"text": ["a", "b"]},) * 2}, TypeError, "a view must be tensors.*got str"),
        ({"views": ({"modality": "text"},) * 2}, ValueError, "equally many rows, 1 or more; got no tensor"),
        (
            {"views": ([torch.ones(3, 6), torch.ones(4, 6)],) * 2},
            ValueError,
            r"equally many rows, 1 or more; got \[3, 4\]",
        ),
        ({"views": (torch.ones(0, 6),) * 2}, ValueError, r"equally many rows, 1 or more; got \[0\]"),
        ({"views": ([torch.ones(3, 6), torch.tensor(2)],) * 2}, ValueError, r"1 or more; got \[0, 3\]"),
        (
            {"views": ([torch.ones(22, 6), encoder()(torch.ones(22, 6).double())],) * 2, "encoder": None},
            ValueError,
            "must be an input.*; got the output of a graph: move what computes it into the encoder",
        ),
        (
            {"loss": lambda a, b: a.detach().sum()},
            ValueError,
            "a gradient with respect to the embeddings: leave out",
        ),
        ({"loss": lambda a, b: (a.sum(), b)}, ValueError, "must be a scalar; got tuple"),
        ({"encoder": lambda x: (x, x)}, ValueError, r"must return \(rows, d\) for 5 rows; got tuple"),
        ({"loss": lambda a, b: a}, ValueError, r"must be a scalar; got shape \(22, 8\)"),
        ({"encoder": lambda x: x.sum(0)}, ValueError, r"must return \(rows, d\) for 5 rows; got \(6,\)"),
        ({"encoder": lambda x: x[1:]}, ValueError, r"must return \(rows, d\) for 5 rows; got \(4, 6\)"),
        ({"encoder": encoder().requires_grad_(False)}, ValueError, "no encoder takes a gradient"),
    ],
)
def test_errors(change, error, message):
    arguments = {"encoder": encoder(), "views": two_views(), "loss": InfoNCELoss(), "micro_batch": 5} | change
    with pytest.raises(error, match=message):
        cached_step(**arguments)


def test_views_that_require_a_gradient_get_it():
    """Inputs may do so, unlike outputs of a graph."""
    views, model = [view.requires_grad_() for view in two_views()], encoder()
    wanted = torch.autograd.grad(InfoNCELoss()(*(model(view) for view in views)), views)
    cached_step(model, views, InfoNCELoss(), micro_batch=5)
    torch.testing.assert_close([view.grad for view in views], list(wanted))


def test_the_example():
    failed, tried = doctest.testmod(cached)
    assert not failed
    assert tried > 6


def test_a_static_graph_is_refused():
    encoder = torch.nn.Linear(4, 4)
    encoder.static_graph = True
    with pytest.raises(ValueError, match="leave that option out"):
        cached_step(encoder, (torch.randn(4, 4), torch.randn(4, 4)), InfoNCELoss(), micro_batch=2)


class Counted(torch.nn.Module):
    """An encoder that counts, as DDP exchanges: one backward pass outside of ``no_sync``."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3).requires_grad_(False)
        self.waits, self.exchanged = False, 0

    @contextmanager
    def no_sync(self):
        self.waits = True
        yield
        self.waits = False

    def forward(self, inputs):
        found = self.first(inputs["x"]) if "x" in inputs else self.second(inputs["y"])
        if found.requires_grad:
            found.register_hook(
                lambda gradient: setattr(self, "exchanged", self.exchanged + (not self.waits))
            )
        return found


def test_gradients_are_exchanged_if_the_last_view_is_frozen():
    encoder, x, y = Counted(), torch.randn(8, 4), torch.randn(8, 4)
    cached_step(encoder, ({"x": x}, {"y": y}), InfoNCELoss(0.5), micro_batch=4)
    assert encoder.exchanged == 1
    got = encoder.first.weight.grad.clone()
    encoder.zero_grad()
    InfoNCELoss(0.5)(encoder({"x": x}), encoder({"y": y})).backward()
    torch.testing.assert_close(got, encoder.first.weight.grad)
