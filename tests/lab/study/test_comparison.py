"""The plan of a comparison: search spaces as settings, recipes, further losses, and its file."""

import math
import re
import sys
from dataclasses import replace

import pytest
import yaml
from lab.study.made import CONFIG, comparison_of, config_in

from weince.lab.configure import PRESETS
from weince.lab.study.comparison import (
    Comparison,
    find_comparison,
    joined,
    read_comparison,
    recipe_config,
    write_comparison,
)
from weince.lab.study.plan import epochs_of, plan, settings_of
from weince.lab.study.search_space import alone, in_words, tries_of

COMPARED = [preset for preset in PRESETS if preset != "link"]  # link has no defaults


@pytest.mark.parametrize("loss", COMPARED)
def test_every_search_space_makes_runs(loss, tmp_path):
    """Each try is a valid run, and no two are equal."""
    config = "cifar100_resnet18"
    tries = tries_of(loss, config)
    runs = plan(comparison_of(config, loss, tries=99).tries_table(), tmp_path)
    assert len({run.key for run in runs}) == len(tries) >= 1
    assert all(tried["loss.preset"] == loss for tried in tries)


def test_the_order_of_preference():
    config = "cifar100_resnet18"
    first = {loss: in_words(tries_of(loss, config)[0]) for loss in ("infonce", "hcl", "kl_ball", "released")}
    assert first == {
        "infonce": "temperature 0.1",
        "hcl": "temperature 0.5",
        "kl_ball": "radius 1.2",
        "released": "temperature 0.5",
    }


def test_a_run_is_spelled_as_a_table_spells_it(tmp_path):
    """Equal spelling lets a comparison find runs of `weince reproduce`."""
    assert tries_of("mixture", "cifar100_resnet18")[2] == {
        "loss.preset": "mixture",
        "loss.temperature": 0.1,
        "loss.options": {"spread": 1.0},
    }
    (run, *_) = plan(comparison_of("cifar100_resnet18", "dcl", "infonce").tries_table(), tmp_path)
    assert run.changes == {"loss.preset": "dcl", "loss.temperature": 0.1}


def test_a_loss_without_a_temperature_drops_that_of_the_configuration(tmp_path):
    assert tries_of("temperature_free", config_in(tmp_path)) == [
        {"loss.preset": "temperature_free", "loss.temperature": None}
    ]


HCL = "{preset: hcl, temperature: 0.5, options: {hardness: 2.0}}"
TERMS = "{preset: released, softmax_term: 0.0, tail: {endpoint: 1.05}, lam: null, engine: dense}"


@pytest.mark.parametrize("loss", ["infonce", "hcl", "released", "blend", "kl_ball", "temperature_free"])
@pytest.mark.parametrize("configured", [HCL, TERMS])
def test_the_loss_of_the_configuration_is_no_part_of_a_try(loss, configured, tmp_path):
    """A run is what its label says, whatever loss the configuration names."""
    plain = config_in(tmp_path)
    other = config_in(
        tmp_path, CONFIG.replace("{preset: infonce, temperature: 0.5}", configured), "other.yaml"
    )
    tries = tries_of(loss, other)
    assert [in_words(tried) for tried in tries] == [in_words(tried) for tried in tries_of(loss, plain)]
    for ours, theirs in zip(
        plan(comparison_of(plain, loss, tries=9).tries_table(), tmp_path),
        plan(comparison_of(other, loss, tries=9).tries_table(), tmp_path),
        strict=True,
    ):
        assert replace(settings_of(theirs).loss, engine="auto") == settings_of(ours).loss
    engines = {
        settings_of(run).loss.engine for run in plan(comparison_of(other, loss).tries_table(), tmp_path)
    }
    assert engines == {"dense" if configured == TERMS else "auto"}


def test_a_default_in_the_configuration_does_not_change_a_try():
    content = {"loss": {"preset": "hcl", "options": {}, "temperature": 0.5, "engine": "dense"}}
    assert alone({"loss.preset": "dcl"}, content) == {"loss.preset": "dcl", "loss.temperature": None}


OWN = """
import numpy, torch
from torch import nn
class Plain(nn.Module):
    def __init__(self, *, temperature=0.1, margin=1.0, margins=(), flag=False): super().__init__()
    def forward(self, z_i, z_j): return (z_i * z_j).sum()
class Misspelt(Plain):
    search_space = ({"margin": 0.5}, {"margni": 1.0})
class Searched(Plain):
    search_space = ({"margin": 0.5}, {"margin": 1.0, "temperature": 0.2})
class Wrong(Plain):
    search_space = (0.1, 0.2)
class Empty(Plain):
    search_space = ()
class Generated(Plain):
    search_space = ({"margin": m} for m in (0.5, 1.0))
class Tensors(Plain):
    search_space = ({"margin": torch.zeros(9, 9)},)
class Lazy(Plain):
    search_space = ({"margins": (m for m in (0.5, 1.0))},)
class Numpy(Plain):
    search_space = [{"temperature": numpy.float32(0.5), "margins": [numpy.int64(2)], "flag": numpy.bool_(True)}]
class Tuple(Plain):
    search_space = ({"margins": (0.5, 1.0)}, {"margins": (0.1, 0.2)})
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "mine_compared.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield config_in(tmp_path)
    sys.modules.pop("mine_compared", None)


def test_a_loss_of_ones_own(own):
    assert tries_of("mine_compared:Plain", own) == [
        {"loss.preset": "mine_compared:Plain", "loss.temperature": None}
    ]
    assert [in_words(tried) for tried in tries_of("mine_compared:Searched", own)] == [
        "margin 0.5",
        "temperature 0.2, margin 1",
    ]
    refused = ("Wrong", "got 0.1"), ("Empty", "got nothing"), ("Generated", "got <generator object")
    for name, got in refused:
        with pytest.raises(ValueError, match=f"search_space of mine_compared:{name} must list .*{got}"):
            tries_of(f"mine_compared:{name}", own)
    for name, got in (
        ("Tensors", r"margin must .*got tensor\(\["),
        ("Lazy", "margins must .*got <generator"),
    ):
        with pytest.raises(ValueError, match=f"search_space of mine_compared:{name}: {got}") as refusal:
            tries_of(f"mine_compared:{name}", own)
        assert "\n" not in str(refusal.value)
    said = r"search_space of mine_compared:Misspelt, {'margni': 1.0}: .*unexpected keyword argument 'margni'"
    with pytest.raises(ValueError, match=said):
        tries_of("mine_compared:Misspelt", own)
    with pytest.raises(ValueError, match=r"unknown loss 'infonec' .did you mean infonce"):
        tries_of("infonec", own)
    with pytest.raises(ValueError, match="temperature_free, weibit, released, blend, paper"):  # not link
        tries_of("supcon", own)


def test_numbers_of_numpy_are_written_as_numbers(own, tmp_path):
    tries = tries_of("mine_compared:Numpy", own)
    (tried,) = tries
    assert tried == {
        "loss.preset": "mine_compared:Numpy",
        "loss.temperature": 0.5,
        "loss.options": {"margins": [2], "flag": True},
    }
    write_comparison(Comparison(own, {"mine_compared:Numpy": tries}, "mine_compared:Numpy"), tmp_path)
    assert read_comparison(tmp_path / "comparison.yaml").losses["mine_compared:Numpy"] == tries


def test_recipes(tmp_path):
    assert recipe_config("cifar100_resnet18", "paper") == "cifar100_resnet18"
    assert recipe_config("cifar100_resnet18", "strong") == "cifar100_resnet18_strong"
    with pytest.raises(ValueError, match="wants the configuration digits_tiny_strong, which does not exist"):
        recipe_config("digits_tiny", "strong")
    path = config_in(tmp_path)
    with pytest.raises(ValueError, match=r"small_strong.yaml, which does not exist"):
        recipe_config(path, "strong")


def test_a_comparison_is_read_as_it_was_written(tmp_path):
    made = comparison_of("cifar100_resnet18", "infonce", "mixture", "kl_ball", tries=3, try_epochs=25)
    write_comparison(made, tmp_path / made.name)
    found = find_comparison(tmp_path, None)
    assert found.losses == made.losses
    assert plan(found.tries_table(), tmp_path) == plan(made.tries_table(), tmp_path)
    assert find_comparison(tmp_path, "cifar10_resnet18") is None
    write_comparison(comparison_of("digits_tiny", "infonce", "dcl"), tmp_path / "digits_tiny")
    with pytest.raises(
        ValueError, match="several comparisons, say which by --config: cifar100_resnet18, digits"
    ):
        find_comparison(tmp_path, None)
    (tmp_path / "comparison.yaml").write_text("losses: {}\n")
    with pytest.raises(ValueError, match="is not a comparison"):
        read_comparison(tmp_path / "comparison.yaml")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seeds", 3),
        ("losses", ["infonce"]),
        ("level_within", "x"),
        ("config", 3),
        ("set", None),
        ("try_epochs", "2"),
    ],
)
def test_a_value_that_no_comparison_has_is_named(tmp_path, name, value):
    write_comparison(comparison_of("cifar100_resnet18", "infonce", "dcl"), tmp_path)
    path = tmp_path / "comparison.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=f"is not a comparison; {name} cannot be {re.escape(repr(value))}"):
        read_comparison(path)


def test_tries_have_the_first_seed_and_their_own_length(tmp_path):
    comparison = comparison_of(
        "cifar100_resnet18", "infonce", seeds=[21, 7], set={"epochs": 50}, try_epochs=5
    )
    tries, seeds = comparison.tries_table(), comparison.seeds_table({"infonce": 1})
    assert [(run.seed, epochs_of(run)) for run in plan(tries, tmp_path)] == [(21, 5)] * 2
    assert [(run.seed, epochs_of(run)) for run in plan(seeds, tmp_path)] == [(21, 50), (7, 50)]


def test_losses_tries_and_seeds_are_added():
    config = "cifar100_resnet18"
    before = comparison_of(config, "infonce", "dcl", tries=3, seeds=[7, 21])
    other = {"loss.preset": "infonce", "loss.temperature": 0.33}  # from an archive
    before = replace(before, losses={**before.losses, "infonce": [before.losses["infonce"][0], other]})
    now = comparison_of(config, "infonce", "hcl", tries=3, seeds=[7, 63], baseline="hcl", level_within=0.7)
    both = joined(before, now)
    assert list(both.losses) == ["infonce", "dcl", "hcl"]
    assert both.losses["infonce"] == [*now.losses["infonce"], other]
    assert [len(tries) for tries in both.losses.values()] == [4, 3, 3]
    assert (both.seeds, both.baseline, both.level_within) == ([7, 21, 63], "hcl", 0.7)
    for changes, said in (
        (
            {"set": {"precision": "bf16", "epochs": 3}},
            "--set must be left out, as .*; got precision=bf16 epochs=3: ",
        ),
        ({"try_epochs": 5}, "--try-epochs must be left out, as in .*; got 5"),
    ):
        with pytest.raises(ValueError, match=said):
            joined(before, comparison_of(config, "infonce", "hcl", **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"baseline": "hcl"}, "unknown baseline 'hcl'"),
        ({"level_within": 0.0}, "--level-within must be above 0 points and finite; got 0.0"),
        ({"level_within": math.inf}, "--level-within must be above 0 points and finite; got inf"),
        ({"try_epochs": 0}, "--try-epochs must be at least 1; got 0"),
        *(
            ({"set": {name: 3}}, f"--set is for the recipe that all losses share; got {name}")
            for name in ("loss.temperature", "seed", "out")
        ),
    ],
)
def test_what_cannot_be_compared(changes, said):
    with pytest.raises(ValueError, match=said):
        comparison_of("digits_tiny", "infonce", "dcl", **changes)


def test_a_try_with_a_tuple_is_the_same_when_it_is_read_again(own, tmp_path):
    tries = tries_of("mine_compared:Tuple", own)
    comparison = Comparison(own, {"mine_compared:Tuple": tries}, "mine_compared:Tuple")
    write_comparison(comparison, tmp_path)
    again = read_comparison(tmp_path / "comparison.yaml")
    assert joined(again, comparison).losses == comparison.losses
