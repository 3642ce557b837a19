import copy
import math

import pytest
import torch

from weince.lab.training.capture import EAGER_STEPS, run_aside
from weince.lab.training.optimizers import LARS, OptimizerConfig, build_optimizer, rate, restore, set_rate


def test_lars_is_momentum_scaled_by_the_norm_of_each_matrix():
    torch.manual_seed(0)
    matrix, vector = (torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4, 3), (3,)))
    optimizer = LARS([matrix, vector], lr=0.3, weight_decay=0.1, momentum=0.9, trust=0.01)
    w, b = matrix.detach().clone(), vector.detach().clone()
    speed_w, speed_b = torch.zeros_like(w), torch.zeros_like(b)
    for _ in range(4):
        matrix.grad, vector.grad = torch.randn_like(matrix), torch.randn_like(vector)
        slope = matrix.grad + 0.1 * w
        speed_w = 0.9 * speed_w + 0.01 * w.norm() / slope.norm() * slope
        speed_b = 0.9 * speed_b + vector.grad
        w, b = w - 0.3 * speed_w, b - 0.3 * speed_b
        optimizer.step()
    torch.testing.assert_close(matrix.detach(), w, rtol=1e-12, atol=0)
    torch.testing.assert_close(vector.detach(), b, rtol=1e-12, atol=0)


def test_lars_moves_a_matrix_of_zeros():
    matrix = torch.nn.Parameter(torch.zeros(2, 2))
    matrix.grad = torch.ones(2, 2)
    LARS([matrix], lr=0.5).step()
    assert torch.equal(matrix.detach(), torch.full((2, 2), -0.5))


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lars"])
def test_a_restored_optimizer_goes_on_alike(name):
    def grads(model, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    config = OptimizerConfig(name, weight_decay=0.01)
    one = torch.nn.Linear(3, 2)
    first = build_optimizer(one.parameters(), config)
    for seed in range(3):
        grads(one, seed)
        first.step()
    two = copy.deepcopy(one)
    second = build_optimizer(two.parameters(), config)
    restore(second, copy.deepcopy(first.state_dict()))
    for model, optimizer in ((one, first), (two, second)):
        set_rate(optimizer, 0.05)
        grads(model, 9)
        optimizer.step()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("built", [{"fused": True}, {"foreach": True}, {"lr": torch.tensor(0.5)}])
def test_a_restored_optimizer_computes_as_it_was_built(built):
    """For example, a run with a captured step on a GPU can resume on a CPU."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    before = torch.optim.Adam([weight], lr=1.0, betas=(0.5, 0.5))
    before.step()
    state = before.state_dict()
    state["param_groups"][0] |= {"fused": False, "foreach": False, "capturable": True}
    after = torch.optim.Adam([weight], **built)
    restore(after, state)
    after.step()
    [group] = after.param_groups
    assert group["betas"] == (0.5, 0.5)  # restored from the run
    assert {key: group[key] for key in built} == built
    assert not group["capturable"]
    assert after.state[weight]["step"] == 2


def test_rates():
    constant = OptimizerConfig(lr=2.0)
    assert [rate(constant, done, 10) for done in (0, 5, 9.9)] == [2.0, 2.0, 2.0]
    cosine = OptimizerConfig(lr=2.0, schedule="cosine", warmup=0.2)
    assert rate(cosine, 0, 10) == 0
    assert rate(cosine, 0.5, 10) == 0.5
    assert rate(cosine, 2, 10) == 2.0
    assert rate(cosine, 6, 10) == pytest.approx(1.0)
    assert rate(cosine, 8, 10) == pytest.approx(1 + math.cos(0.75 * math.pi))
    assert rate(cosine, 10, 10) == pytest.approx(0)
    assert rate(cosine, 1, 20) == 0.5  # warm-up is a share of the run
    assert rate(OptimizerConfig(lr=2.0, schedule="cosine", warmup=1.0), 10, 10) == 2.0
    linear = OptimizerConfig(lr=2.0, schedule="linear", warmup=0.2)
    assert [rate(linear, done, 10) for done in (1, 2, 6, 10)] == [1.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lars"])
def test_what_a_loss_learns_has_a_rate_of_its_own_and_no_decay(name):
    model, temperature = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.tensor(0.5))
    config = OptimizerConfig(name, lr=0.1, weight_decay=0.5)
    optimizer = build_optimizer(model.parameters(), config, of_loss=[temperature], loss_lr_scale=10.0)
    set_rate(optimizer, 0.01)
    *ours, of_loss = optimizer.param_groups
    assert [group["lr"] for group in ours] == [0.01] * len(ours)
    assert (of_loss["lr"], of_loss["weight_decay"]) == (0.1, 0.0)
    temperature.grad = torch.tensor(0.0)
    optimizer.step()
    assert temperature.item() == 0.5
    restore(optimizer, copy.deepcopy(optimizer.state_dict()))
    set_rate(optimizer, 0.02)
    assert optimizer.param_groups[-1]["lr"] == 0.2


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": math.nan},
        {"lr": 1e38},
        {"weight_decay": -1.0},
        {"weight_decay": 1e38},
        {"warmup": -1.0},
        {"warmup": 10.0},
        {"momentum": 1.0},
        {"trust": 0.0},
        {"trust": math.inf},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OptimizerConfig(**wrong)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lars"])
def test_the_largest_settings_do_not_overflow_in_the_optimizer(name):
    """It raises an error then, a traceback without a word about settings; a loss of nan says what to do."""
    layer = torch.nn.Linear(3, 3)
    optimizer = build_optimizer(
        layer.parameters(), OptimizerConfig(name, lr=1e30, weight_decay=1e6, trust=1e30)
    )
    for _ in range(3):
        layer(torch.ones(4, 3)).sum().backward()
        optimizer.step()


def test_settings_reach_the_optimizer():
    layer = torch.nn.Linear(2, 2)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "lars": LARS}
    for name, kind in kinds.items():
        config = OptimizerConfig(name, lr=0.3, weight_decay=0.02, momentum=0.7, trust=0.01)
        built = build_optimizer(layer.parameters(), config)
        assert type(built) is kind
        assert [group["lr"] for group in built.param_groups] == [0.3] * len(built.param_groups)
        assert built.param_groups[0]["weight_decay"] == 0.02
        assert built.param_groups[0].get("momentum") == (0.7 if name in ("sgd", "lars") else None)
        assert built.param_groups[0].get("trust") == (0.01 if name == "lars" else None)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lars"])
def test_weight_decay_leaves_biases_and_norms_alone(name):
    """Except with Adam: as in the paper's runs, its weight decay applies to all parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model.parameters(), OptimizerConfig(name, lr=0.1, weight_decay=0.1)).step()
    moved = {key for key, parameter in model.named_parameters() if bool((parameter < 1).all())}
    assert moved == (set(dict(model.named_parameters())) if name == "adam" else {"0.weight"})


def test_sgd_is_momentum_with_weight_decay():
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    optimizer = build_optimizer([matrix], OptimizerConfig("sgd", lr=0.3, weight_decay=0.1, momentum=0.8))
    w, speed = matrix.detach().clone(), 0.0
    for _ in range(4):
        matrix.grad = torch.randn_like(matrix)
        speed = 0.8 * speed + matrix.grad + 0.1 * w
        w = w - 0.3 * speed
        optimizer.step()
    torch.testing.assert_close(matrix.detach(), w, rtol=1e-12, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a CUDA device captures a step as a graph")
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lars"])
def test_a_captured_step_reads_the_present_rate(name):
    finals = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).cuda()
        optimizer = build_optimizer(model.parameters(), OptimizerConfig(name, weight_decay=0.1, trust=0.1))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        step = optimizer.step
        for number in range(8):
            if captured and number == EAGER_STEPS:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
                step = graph.replay
            set_rate(optimizer, 0.5 / (1 + number))
            run_aside(step) if number < EAGER_STEPS else step()
        finals.append([parameter.detach().clone() for parameter in model.parameters()])
    for eager, replayed in zip(*finals, strict=True):
        torch.testing.assert_close(eager, replayed, rtol=1e-5, atol=1e-6)
