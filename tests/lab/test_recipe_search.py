"""The search for a recipe: the recipes of each stage, and a small search from end to end."""

import json

import programs
import pytest
import yaml
from lab.study.made import files_of, reproduce
from lab.study.tables import CONFIG

from weince.lab.settings import load
from weince.lab.study.plan import plan
from weince.lab.study.records import add_records

script = programs.script("benchmarks/recipe_search.py")

FACTORS = {
    "rate": {"low": {"optimizer.lr": 0.002}, "high": {"optimizer.lr": 0.01}, "wild": {"optimizer.lr": 1e30}},
    "norm": {"none": {"projector.norm": "none"}, "hidden": {"projector.norm": "hidden"}},
    "batch": {"256": {"batch": 256}, "512": {"batch": 512}},
}


def make(config="digits_tiny", factors=FACTORS, **changes):
    stages = [{"epochs": 1}, {"epochs": 2, "keep": 1}]
    return script.Search(**({"title": "t", "config": config, "factors": factors, "stages": stages} | changes))


def test_the_first_stage_changes_one_level_at_a_time():
    search = make()
    names = [search.name(recipe) for recipe in search.single_changes()]
    assert names == ["base", "rate high", "rate wild", "norm hidden", "batch 512"]
    assert search.settings(("high", "none", "512")) == {
        "optimizer.lr": 0.01,
        "projector.norm": "none",
        "batch": 512,
    }


def test_combinations_are_ranked_by_the_sum_of_gains():
    search = make()
    # The wild rate failed, so it has no figure.
    figures = {
        ("low", "none", "256"): 50.0,
        ("high", "none", "256"): 51.0,
        ("low", "hidden", "256"): 53.0,
        ("low", "none", "512"): 47.5,
    }
    found = search.promising(figures, 5)
    assert found == [
        ("high", "hidden", "256"),
        ("low", "hidden", "256"),
        ("high", "hidden", "512"),
        ("high", "none", "256"),
        ("low", "hidden", "512"),
    ]
    assert len(search.promising(figures, 100)) == 2 * 2 * 2


@pytest.mark.long
def test_a_small_search(tmp_path, capsys):
    """Records of the first stage's two runs already exist, so one run is trained."""
    (tmp_path / "digits_small.yaml").write_text(CONFIG.format(epochs=1))
    content = {
        "title": "Small",
        "config": str(tmp_path / "digits_small.yaml"),
        "set": {"loss.preset": "infonce"},
        "factors": {"norm": FACTORS["norm"]},
        "stages": [{"epochs": 1}, {"epochs": 2, "keep": 1}],
    }
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    out = tmp_path / "out"
    command = [str(tmp_path / "search.yaml"), "--out", str(out), "--device", "cpu", "--jobs", "2"]
    search = script.read_search(tmp_path / "search.yaml")
    begun = plan(script.stage_table(search, search.single_changes(), 1), out, device="cpu")
    there = {run.name: files_of(run, value) for run, value in zip(begun, (40.0, 50.0), strict=True)}
    add_records(out, {name: {**files, "log.csv": {}} for name, files in there.items()})
    script.main(command)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line["epochs"] for line in lines] == [1, 1, 2]
    assert {line["recipe"]: line["linear_validation_mean"] for line in lines[:2]} == {
        "base": 41.0,
        "norm hidden": 51.0,
    }
    assert lines[2]["recipe"] == "norm hidden"
    record = json.loads((out / lines[2]["folder"] / "evaluation.json").read_text())
    assert lines[2]["linear_validation_mean"] == record["linear_validation_mean"]
    printed = capsys.readouterr().out
    assert printed.index("1 epochs") < printed.index("2 epochs")

    script.main(command)  # nothing to do, and no record is repeated
    assert len((out / "results.jsonl").read_text().splitlines()) == 3
    page = reproduce(str(out / "recipes_1.yaml"), out=out, table_only=True)
    assert "norm hidden" in page.read_text()


def test_the_search_that_comes_along_can_be_planned(tmp_path):
    search = script.read_search(programs.ROOT / "benchmarks" / "recipe_search.yaml")
    assert load(search.config)["data"] == "cifar100"
    recipes = search.single_changes()
    runs = plan(script.stage_table(search, recipes, 12), tmp_path)
    assert len({run.key for run in runs}) == len(recipes) == 17


def test_without_a_search_it_says_what_is_wanted(capsys):
    with pytest.raises(SystemExit):
        script.main([])
    assert "a search's YAML file is wanted, or --show OUT" in capsys.readouterr().err
