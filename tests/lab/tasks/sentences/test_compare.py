"""``weince compare`` on text from end to end: train, evaluate and time a toy BERT."""

import json
import shutil

import pytest
import yaml
from lab.study.made import TEXT, config_in, reproduce
from safetensors.torch import load_file, save_file

from weince.cli import main


@pytest.fixture
def command(tmp_path, toy_text, toy_sts, toy_model):
    places = f"text={toy_text},sts={toy_sts},model={toy_model}"
    return ["compare", "infonce", "dcl", "--config", config_in(tmp_path, TEXT), "--tries", "1", "--jobs", "2",
            "--data", places, "--device", "cpu", "--out", str(tmp_path / "out")]  # fmt: skip


@pytest.mark.long
def test_a_comparison_on_text_is_trained_and_goes_on(tmp_path, command, capsys):
    """Train one seed of two losses; asking for two seeds names the missing runs; the archive holds no local path."""
    assert main([*command, "--seeds", "1"]) == 0
    found = json.loads((tmp_path / "out" / "small" / "compare.json").read_text())
    assert found["advice"][0].startswith("Run more seeds")
    assert [line["cost"]["width"] for line in found["losses"]] == [32, 32]
    assert all(line["cost"]["step_mib"] > line["cost"]["loss_mib"] > 0 for line in found["losses"])
    assert all(run["train_seconds"] > 0 for run in found["runs"])

    results = sorted((tmp_path / "out").glob("runs/*/*/*/result.json"))
    figures = {(round(r["dev"], 6), round(r["tasks"]["STSB"], 6), round(r["mean"], 6))
               for r in (json.loads(path.read_text()) for path in results)}  # fmt: skip
    assert len(figures) == 2
    assert figures == {
        tuple(round(run[key], 6) for key in ("stsb_validation", "stsb_test", "sts_test"))
        for run in found["runs"]
    }

    lines = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        kept = line["run.yaml"]
        assert (kept["text"], kept["sts"], kept["model"]) == ("sentences", "sts", "model")
        assert str(tmp_path) not in json.dumps(line)
        assert line["log.csv"]["epoch"][-1] == 1

    capsys.readouterr()
    assert main([*command, "--seeds", "2", "--table-only"]) == 0
    missing = [line for line in capsys.readouterr().err.splitlines() if line.startswith("missing: ")]
    assert missing == [f"missing: {loss}, temperature 0.05: seed 21" for loss in ("infonce", "dcl")]


@pytest.mark.long
def test_the_encoders_of_a_table_are_trained_each(tmp_path, toy_text, toy_sts, toy_model):
    other = tmp_path / "other"
    shutil.copytree(toy_model, other)
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: value * 0.9 for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"}
    )
    table = {
        "title": "Two encoders",
        "figures": ["stsb"],
        "rows": [config_in(tmp_path, TEXT)],
        "measure": "sts",
        "choose_by": "stsb",
        "baseline": "A",
        "seeds": [7],
        "set": {"text": str(toy_text), "sts": str(toy_sts)},
        "losses": {"A": {"set": {"model": str(toy_model)}}, "B": {"set": {"model": str(other)}}},
    }
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(table))
    page = reproduce(str(tmp_path / "table.yaml"), out=tmp_path / "out", device="cpu", jobs=2)
    assert page.is_file()
    found = sorted((tmp_path / "out").glob("runs/*/*/*/result.json"))
    assert len({json.loads(path.read_text())["fingerprint"] for path in found}) == 2
