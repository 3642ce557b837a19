"""Comparisons of text runs from their records: same verdict, page and merge as for images."""

import csv
import json
import shutil

import pytest
from diagnose.browser import sound_page
from lab.study.made import TEXT, compare, comparison_of, config_in, fill

from weince.cli import main
from weince.lab.study.comparison import write_comparison
from weince.lab.study.plan import plan
from weince.lab.study.search_space import at_temperatures, tries_of
from weince.lab.study.study import check_losses


@pytest.fixture
def config(tmp_path):
    return config_in(tmp_path, TEXT)


def made(config, out, *losses, **options):
    changes = {"seeds": [7, 21, 63, 84]} | options.pop("changes", {})
    comparison = comparison_of(config, *losses, tries=3, **changes)
    write_comparison(comparison, out / comparison.name)
    fill(comparison, out, **options)
    return comparison


def test_the_page_reports_sts_and_chooses_by_its_dev_split(tmp_path, config):
    made(config, tmp_path, "infonce", "dcl", "hcl", gains={"dcl": 4.0})
    page = compare(out=tmp_path, table_only=True)
    found = json.loads((page.parent / "compare.json").read_text())
    assert found["advice"][0].startswith("Use dcl (temperature 0.05): its Spearman on STS-B is 4.")
    assert "STS tasks" in found["advice"][1]
    assert found["figures"].keys() == {"stsb", "sts"}
    assert found["comparisons"] == 2 * 2
    assert found["facts"]["chosen by"] == "Spearman on STS-B's dev split, never by a test figure"
    assert found["facts"]["data"] == "wiki.txt, sts.tsv, bert 01"
    for run in found["runs"]:
        assert run["stsb_validation"] == pytest.approx(run["stsb_test"] + 1.0)
        assert run["sts_test"] == pytest.approx(run["stsb_test"] + 2.0)
        assert run["train_seconds"] == 4.0
    rows = list(csv.DictReader((page.parent / "compare.csv").open(newline="")))
    assert [row["figure"] for row in rows] == ["stsb", "sts"] * 3
    text = page.read_text()
    assert "linear accuracy" not in text
    assert "Spearman on STS-B&#39;s dev split against epochs" in text


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_in_a_browser(tmp_path, config, browser, width, scheme):
    made(config, tmp_path, "infonce", "dcl", "siglip")
    folder = compare(out=tmp_path, table_only=True).parent
    with sound_page(browser, folder, width, scheme) as page:
        assert page.locator("#leaderboard thead th").nth(2).inner_text() == "STS-B"
        captions = " ".join(page.locator("figcaption").all_inner_texts())
        for part in ("Spearman on STS-B, x 100: a dot is a seed", "against seconds of training", "best of k"):
            assert part in captions
        assert page.locator("#temperatures thead th").all_inner_texts() == ["loss", "0.02", "0.05", "0.1"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_temperatures_are_those_of_text(config):
    def tried(loss):
        return [one.get("loss.temperature") for one in tries_of(loss, config)]

    assert tried("infonce") == tried("dcl") == tried("paper") == [0.05, 0.02, 0.1, 0.01]
    assert tried("hcl") == 3 * [0.05, 0.02, 0.1, 0.01]  # for each of three values of hardness
    assert tried("kl_ball") == [None] * 4  # it searches radii
    assert tries_of("hcl", "cifar100_resnet18")[0]["loss.temperature"] == 0.5


def test_a_space_without_temperatures_stays():
    space = ({"beta": 2.0}, {})
    assert at_temperatures(space, [0.05]) == space


def test_what_others_ran_is_merged_if_they_started_from_the_same(tmp_path, config):
    ours, theirs, other = (tmp_path / name for name in ("ours", "theirs", "other"))
    made(config, ours, "infonce", "dcl")
    made(config, theirs, "hcl")
    made(config, other, "hcl", fingerprint="02")
    with pytest.raises(ValueError, match=r"its data fingerprint is 02, that of this comparison is 01"):
        compare(out=ours, add=[other / "runs.jsonl"])
    page = compare(out=ours, add=[theirs / "runs.jsonl"])
    assert [line["loss"] for line in json.loads((page.parent / "compare.json").read_text())["losses"]].count(
        "hcl"
    )

    longer = tmp_path / "longer"
    shutil.copytree(theirs, longer)
    kept = (longer / "runs.jsonl").read_text()
    (longer / "runs.jsonl").write_text(kept.replace('"max_length": 12', '"max_length": 32'))
    with pytest.raises(ValueError, match=r"another recipe: it has max_length 32, not 12"):
        compare(out=ours, add=[longer])


def test_runs_on_images_do_not_join_those_on_text(tmp_path, config):
    made(config, tmp_path / "text", "infonce")
    images = tmp_path / "images"
    images.mkdir()
    fill(comparison_of(config_in(images), "infonce", seeds=[7, 21]), images)
    with pytest.raises(ValueError, match=r"a record needs result\.json, in the run"):
        compare(out=tmp_path / "text", add=[images])


def test_data_that_are_missing_are_named_before_anything_starts(tmp_path, config, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "infonce", "--config", config, "--out", str(tmp_path / "out")]) == 2
    assert "no such file: sentences.txt; say where it is by --data text=FILE" in capsys.readouterr().err
    assert not (tmp_path / "out" / "runs").exists()


def test_a_loss_is_called_as_in_training_if_the_width_of_the_model_is_known(tmp_path, config, monkeypatch):
    (tmp_path / "losses_of_text.py").write_text("""
import torch
class Plain(torch.nn.Module):
    def forward(self, z_i, z_j):
        return (z_i - z_j).square().mean()
class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(12, 3)
    def forward(self, z_i, z_j, ids=None):
        return (self.layer(z_i) - self.layer(z_j)).square().mean()
""")
    monkeypatch.syspath_prepend(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 12}')
    plain, wide = (
        plan(comparison_of(config, f"losses_of_text:{name}").tries_table(), tmp_path, data=f"model={model}")
        for name in ("Plain", "Wide")
    )
    with pytest.raises(
        ValueError, match=r"losses_of_text:Plain: the loss fails on .* TypeError: .*argument 'ids'"
    ):
        check_losses(plain)
    check_losses(wide)
    for content, got in (
        ("{", "got no JSON .*line 1"),
        (b"\xff{}", "got no JSON .*0xff"),
        ("[" * 100_000, "got no JSON"),
        ("[12]", r"got \[12\]"),
        ('{"hidden_size": "12"}', "got hidden_size '12'"),
        ('{"hidden_size": 0}', "got hidden_size 0"),
        ('{"hidden_size": true}', "got hidden_size True"),
    ):
        (model / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        said = f"config.json must be a JSON object with a hidden_size of at least 1; {got}.*: save the model again"
        with pytest.raises(ValueError, match=said):
            check_losses(wide)
    (model / "config.json").write_text('{"dim": 12}')  # DistilBERT calls its width so: only the model tells
    check_losses(plain)
    (model / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"model is no model's folder: it holds no config\.json"):
        check_losses(plain)


def test_another_encoder_makes_other_runs_and_another_place_does_not(tmp_path, config):
    """The configuration says which encoder it is, ``--data`` where it is."""
    comparison = comparison_of(config, "infonce", set={"model": "small-bert"})
    runs, moved = (plan(comparison.tries_table(), tmp_path, data=data) for data in (None, "model=elsewhere"))
    assert [run.folder for run in moved] == [run.folder for run in runs]
    other = plan(comparison_of(config, "infonce", set={"model": "large-bert"}).tries_table(), tmp_path)
    assert {run.key for run in other}.isdisjoint({run.key for run in runs})


def test_places_of_text_have_names(tmp_path, config, capsys):
    command = ["compare", "infonce", "--config", config, "--out", str(tmp_path), "--table-only", "--data"]
    assert main([*command, "wiki.txt"]) == 2
    assert "give NAME=PATH,NAME=PATH" in capsys.readouterr().err
    assert main([*command, "wiki=wiki.txt"]) == 2
    assert "unknown data set 'wiki'" in capsys.readouterr().err
