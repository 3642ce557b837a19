"""Tables from files and their runs: which runs are shared, which tables are refused, where results are stored."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from lab.study.tables import small_table

from weince.cli import main
from weince.lab import settings
from weince.lab.study.plan import plan, settings_of
from weince.lab.study.statistics import reported
from weince.lab.study.study import check_data
from weince.lab.study.table import named_tables, read_table
from weince.lab.tasks.images.config import VisionRun


def edited(tmp_path, **changes):
    """The small table with some keys changed; None removes a key."""
    path = small_table(tmp_path)
    content = yaml.safe_load(path.read_text()) | changes
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return str(path)


@pytest.mark.parametrize("name", named_tables())
def test_every_table_that_comes_along_can_be_planned(name, tmp_path):
    table = read_table(name)
    runs = plan(table, tmp_path)
    tries = [len(table.tries_of(loss)) for loss in table.losses]
    cells = len(table.rows) * sum(tries)
    assert len(runs) == cells * len(table.seeds)
    assert len({run.folder for run in runs}) == len(runs)
    assert len(set(tries)) == 1  # every loss has the same number of tries
    if name in ("linear", "knn", "link", "frechet"):
        assert tuple(table.seeds) == (7, 21, 63, 84)


def test_every_table_is_listed_in_a_line(capsys, tmp_path):
    assert main(["reproduce", "--list"]) == 0
    said = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in said] == sorted([*named_tables(), "overhead"])
    for name, runs, shows in said:
        if name == "overhead":
            assert (runs, shows) == ("no", "runs  Cost of the loss stage (reported on an NVIDIA L40S)")
            continue
        table = read_table(name)
        assert int(runs) == len(plan(table, tmp_path))
        assert shows == f"runs  {table.title.removesuffix(', %')}"


def test_no_table_at_all(capsys):
    assert main(["reproduce"]) == 2
    assert capsys.readouterr().err.startswith("weince: reproduce wants a TABLE")


@pytest.mark.parametrize("name", named_tables())
def test_the_page_on_tables_has_the_number_of_runs(name, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    names, runs = next((row[0], row[-1]) for row in rows if f"`{name}`" in row[0])
    if re.fullmatch(r"[\d, ]+", runs):  # otherwise it names the table whose runs these are
        said = dict(zip(re.findall(r"`(\w+)`", names), runs.split(","), strict=True))
        assert int(said[name]) == len(plan(read_table(name), tmp_path))


@pytest.mark.parametrize("name", ["linear", "knn", "link", "frechet"])
def test_every_cell_of_the_papers_tables_has_a_reported_figure(name):
    table = read_table(name)
    for figure in table.figures:
        for row in table.rows:
            for loss in table.losses.values():
                lacking = figure == "r50" and row == "tiny_imagenet_vit_small"  # not in the paper
                assert (loss.reported in reported()[figure].get(row, {})) is not lacking


@pytest.mark.parametrize("name", settings.named_configs())
def test_every_configuration_makes_a_run(name):
    if settings.load(name).get("task") == "vision":
        run = settings.read(VisionRun, ["--config", name], command="weince train", examples="")
        assert run.data in name.replace("_", "-") or run.data in name
        assert run.encoder in name


def test_a_loss_and_a_try_have_the_last_word(tmp_path):
    losses = {"InfoNCE": {"set": {"batch": 32}}, "longer": {"set": {"batch": 32}, "tries": [{"batch": 64}]}}
    path = edited(tmp_path, set={"batch": 16}, losses=losses, seeds=[7])
    runs = plan(read_table(path), tmp_path)
    assert [settings_of(run).batch for run in runs] == [32, 64]


def test_runs_on_other_data_are_other_runs(tmp_path):
    runs = [
        run
        for data in ("digits", "cifar10")
        for run in plan(read_table(edited(tmp_path, set={"data": data})), tmp_path)
    ]
    assert len({run.folder for run in runs}) == 2 * 2 * 2  # data, losses and seeds
    assert len({run.key for run in runs}) == 2 * 2  # the key leaves out the seed


def test_tables_share_their_runs(tmp_path):
    linear, knn, link = (
        {run.folder for run in plan(read_table(name), tmp_path, only=["cifar100_resnet18"])}
        for name in ("linear", "knn", "link")
    )
    assert link < knn == linear


def test_the_ablations_share_their_runs(tmp_path):
    """A configuration is trained once, even if several tables use it."""
    names = ("factorial", "temperatures", "gates", "interventions", "headline", "screen", "precision")
    runs = {name: plan(read_table(name), tmp_path, seeds=[7]) for name in names}
    folders = {name: {run.loss: run.folder for run in runs[name] if run.try_number == 0} for name in names}
    for loss in ("InfoNCE", "blend, fitted beta (paper)"):
        assert len({folders[name][loss] for name in names[:5]}) == 1
        assert folders["screen"][loss] == folders["precision"][f"{loss}, bf16"]  # 25 epochs, not 100
    assert len({folders[name]["blend, beta 1"] for name in names[:4]}) == 1
    for name in ("link_bf16", "frechet_bf16"):
        on_cifar100 = plan(read_table(name), tmp_path, seeds=[7], only=["cifar100_resnet18"])
        assert [run.folder for run in on_cifar100] == [folders["factorial"]["InfoNCE"]]
    assert {run.changes["precision"] for name in names[:6] for run in runs[name]} == {"bf16"}
    apart = {run.folder for name in names[:4] for run in runs[name]}
    assert len(apart) == sum(len(runs[name]) for name in names[:4]) - 3 * 3  # three runs are in all four
    # The other tables contain every run of the headline except one.
    (alone,) = {run.loss for run in runs["headline"]} - {
        run.loss for run in runs["headline"] if run.folder in apart
    }
    assert alone == "blend, fitted beta, negatives only, temperature 0.2"
    # These tables use the same runs with other baselines.
    for name in ("best", "terms"):
        assert {run.folder for run in plan(read_table(name), tmp_path, seeds=[7])} < apart


def test_settings_make_the_place_however_they_are_written(tmp_path):
    plain = plan(read_table(edited(tmp_path)), tmp_path)
    # Settings equal to the configuration's, those without effect on the weights, and the device do not count.
    same = plan(read_table(edited(tmp_path, set={"epochs": 1, "tensorboard": True})), tmp_path, device="cpu")
    assert [run.folder for run in same] == [run.folder for run in plain]
    assert settings_of(same[0]).tensorboard
    other = plan(read_table(edited(tmp_path, set={"batch": 128})), tmp_path)
    assert {run.folder for run in other}.isdisjoint({run.folder for run in plain})
    assert len({run.key for run in plain}) == 2  # seeds share a key, losses do not


def test_a_seed_in_the_configuration_is_no_part_of_the_key(tmp_path):
    before = plan(read_table(edited(tmp_path)), tmp_path)
    config = tmp_path / "digits_small.yaml"
    config.write_text(config.read_text() + "seed: 3\n")
    after = plan(read_table(str(tmp_path / "small.yaml")), tmp_path)
    assert [(run.key, run.seed) for run in after] == [(run.key, run.seed) for run in before]


@pytest.mark.parametrize("change", [("lr: 0.002", "lr: 0.001"), ("data: digits", "data: cifar10")])
def test_a_changed_configuration_is_another_run(tmp_path, change):
    before = plan(read_table(edited(tmp_path)), tmp_path)
    config = tmp_path / "digits_small.yaml"
    config.write_text(config.read_text().replace(*change))
    after = plan(read_table(str(tmp_path / "small.yaml")), tmp_path)
    assert {run.key for run in after}.isdisjoint({run.key for run in before})


def test_the_command_of_a_run_reads_back_as_its_settings(tmp_path):
    changes = {"epochs": 5, "loss.preset": "paper", "loss.tail": {"gate": "rho", "rho0": 0.05}}
    losses = {"InfoNCE": {"set": changes, "tries": [{"epochs": 7}]}}
    run = plan(read_table(edited(tmp_path, losses=losses)), tmp_path, epochs=3, device="cpu")[0]
    words = shlex.split(run.command.replace(" digits_small.yaml ", f" {run.config} "))
    read = settings.read(VisionRun, words[2:], command="", examples="")
    assert replace(read, out=run.folder) == settings_of(run)
    assert read.loss.tail == {"gate": "rho", "rho0": 0.05}
    assert (read.epochs, read.seed, read.device) == (3, 7, "cpu")
    assert run.folder.is_absolute()


def test_all_of_the_first_seed_comes_first(tmp_path):
    runs = plan(read_table(edited(tmp_path)), tmp_path, seeds=[3, 1])
    assert [run.seed for run in runs] == [3, 3, 1, 1]


def test_only_keeps_rows_and_cells(tmp_path):
    table = read_table("linear")
    runs = plan(table, tmp_path, only=["cifar10_*", "cifar100_resnet18/WEINCE*"], seeds=[7])
    assert {(run.row, run.loss) for run in runs} == {
        *((f"cifar10_resnet{depth}", loss) for depth in (18, 50) for loss in table.losses),
        ("cifar100_resnet18", "WEINCE paper"),
        ("cifar100_resnet18", "WEINCE released"),
    }
    with pytest.raises(
        ValueError, match=r"nothing in table linear matches cifar; it has stl10_resnet18/InfoNCE, "
    ):
        plan(table, tmp_path, only=["cifar"])


def test_only_keeps_tries(tmp_path):
    table = read_table("temperatures")
    every = plan(table, tmp_path, seeds=[7])
    (one,) = plan(table, tmp_path, seeds=[7], only=["cifar100_resnet18/InfoNCE/temperature 0.1"])
    assert one in every
    assert (one.loss, one.changes["loss.temperature"]) == ("InfoNCE", 0.1)
    low = plan(table, tmp_path, seeds=[7], only=["*/temperature 0.[12]"])
    assert {run.changes["loss.temperature"] for run in low} == {0.1, 0.2}
    assert {run.loss for run in low} == set(table.losses)
    wrong = "cifar100_resnet18/InfoNCE/temprature 0.1"
    with pytest.raises(ValueError, match=rf"matches {wrong}; it has .*, tried as /temperature 0.5, /temper"):
        plan(table, tmp_path, only=["cifar100_resnet18/InfoNCE", wrong])  # although the first pattern matches
    both_seeds = plan(read_table("factorial"), tmp_path, only=["cifar100_resnet18/InfoNCE/as configured"])
    assert {run.loss for run in both_seeds} == {"InfoNCE"}


def test_images_can_lie_elsewhere(tmp_path):
    here = tmp_path / "c.npz"
    here.touch()
    table = read_table("linear")
    plain = plan(table, tmp_path, only=["cifar100_*"])
    for data in (str(here), f"cifar100={here}"):
        runs = plan(table, tmp_path, only=["cifar100_*"], data=data)
        assert all(run.extra["data"] == str(here) for run in runs)
        assert [run.folder for run in runs] == [run.folder for run in plain]
    runs = plan(table, tmp_path, only=["cifar*"], data=f"cifar10={here}")
    assert {run.row.partition("_")[0] for run in runs if "data" in run.extra} == {"cifar10"}
    with pytest.raises(ValueError, match="one path for cifar10, cifar100"):
        plan(table, tmp_path, only=["cifar*"], data=str(here))
    with pytest.raises(ValueError, match=r"unknown data set 'cifar_10' \(did you mean cifar10\?\)"):
        plan(table, tmp_path, only=["cifar*"], data=f"cifar_10={here}")
    with pytest.raises(ValueError, match="got 'cifar10=' with no path for cifar10"):
        plan(table, tmp_path, only=["cifar*"], data="cifar10=")


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_images_that_are_nowhere_are_missed_before_a_run_is_started(options, tmp_path, capsys):
    out = tmp_path / "out"
    asked = ["reproduce", "digits", "--data", str(tmp_path / "gone.npz"), "--out", str(out), *options]
    assert main(asked) == 2
    assert "gone.npz: no such path, nor a data set (digits, cifar10" in capsys.readouterr().err
    assert not out.exists()


def test_a_data_set_may_be_named_as_the_place_of_images(tmp_path, capsys):
    assert main(["reproduce", "digits", "--data", "digits", "--out", str(tmp_path), "--dry-run"]) == 0
    assert "24 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tille": "x"}, r"unknown key of a table 'tille' \(did you mean title\?\)"),
        ({"title": None}, "a table needs title"),
        ({"title": 3}, "title must be a str; got 3"),
        ({"rows": "digits_tiny"}, "rows must be a list"),
        ({"rows": []}, "a table needs rows"),
        ({"figures": ["linaer"]}, r"unknown figure of measure evaluation 'linaer' \(did you mean linear\?\)"),
        ({"measure": "evaluate"}, r"unknown measure 'evaluate' \(did you mean evaluation\?\)"),
        (
            {"baseline": "infonce"},
            r"unknown baseline 'infonce' \(did you mean InfoNCE\?\); known: InfoNCE, paper",
        ),
        ({"seeds": [7, 7]}, "every seed must be named once; got 7 twice"),
        ({"losses": {"InfoNCE": {"sets": {}}}}, r"unknown key of loss InfoNCE 'sets' \(did you mean set\?\)"),
        ({"losses": {"InfoNCE": 3}}, "wanted keys and values for a loss; got 3"),
        ({"losses": {}}, "losses must map each loss"),
        ({"tries": [{}, {"loss.temperature": 0.2}]}, "several tries needs choose_by"),
        ({"tries": [None]}, "a try must map settings to values, .*; got None for InfoNCE"),
        (
            {"losses": {"InfoNCE": {"set": {}, "tries": [0.5]}}},
            "a try must map settings .*; got 0.5 for InfoNCE",
        ),
        (
            {"tries": [{}, {"batch": 8}, {}], "choose_by": "linear"},
            r"every try of InfoNCE must be named once; got \{\} twice",
        ),
        (
            {
                "losses": {"InfoNCE": {"set": {}, "tries": [{"batch": 8}, {"batch": 8.0}]}},
                "choose_by": "linear",
            },
            "every try of InfoNCE must be named once; got {'batch': 8.0} twice",
        ),
        (
            {"tries": [{}, {"batch": 8}], "choose_by": "link_lam"},
            "unknown figure of measure evaluation 'link_lam'",
        ),
        (
            {"measure": "sts", "figures": ["sts"], "choose_by": "sts"},
            "choose_by wants a figure with a validation value; got sts",
        ),
    ],
)
def test_what_a_table_cannot_say_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_table(edited(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"set": {"epoch": 3}}, r"digits_small, InfoNCE: unknown key 'epoch' \(did you mean epochs\?\)"),
        ({"set": {"epochs": "many"}}, "digits_small, InfoNCE: .*epochs"),
        ({"set": {"seed": 3}}, "digits_small, InfoNCE: a table cannot set seed"),
        ({"tries": [{"out": "a"}]}, "digits_small, InfoNCE: a table cannot set out"),
        ({"losses": {"InfoNCE": {"set": {"loss.preset": "infonse"}}}}, "infonce"),
        (
            {"rows": ["cifar100_resnet19"]},
            r"unknown configuration 'cifar100_resnet19' \(did you mean cifar100_resnet18",
        ),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_starts(tmp_path, changes, message):
    table = read_table(edited(tmp_path, **changes))
    with pytest.raises(ValueError, match=message):
        plan(table, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_an_unknown_table_lists_the_tables(tmp_path):
    with pytest.raises(
        ValueError, match=r"unknown table 'linera' \(did you mean linear\?\).*, or a YAML file"
    ):
        read_table("linera")
    with pytest.raises(
        ValueError, match=r"unknown table 'xyz'; known: best, cifar10, digits, .*overhead, or a YAML file"
    ):
        read_table("xyz")
    with pytest.raises(ValueError, match="no such table file"):
        read_table(str(tmp_path / "none.yaml"))
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="is not YAML"):
        read_table(str(tmp_path / "bad.yaml"))


def test_a_loss_that_stands_twice_in_a_table_is_refused(tmp_path):
    """Otherwise the second would silently replace the first."""
    path = small_table(tmp_path)
    path.write_text(path.read_text().replace("  paper:", "  InfoNCE:"))
    with pytest.raises(ValueError, match="is not YAML: 'InfoNCE' stands twice"):
        read_table(str(path))


def test_configurations_beside_a_table_are_found_from_anywhere(tmp_path, monkeypatch):
    path = Path(edited(tmp_path, rows=["digits_small.yaml"]))
    monkeypatch.chdir("/")
    assert plan(read_table(str(path)), tmp_path)[0].row == "digits_small"


def test_the_data_of_every_loss_are_checked(tmp_path):
    """Missing data are an error, whichever loss names them."""
    losses = {"there": {"set": {"data": "digits"}}, "missing": {"set": {"data": "nowhere.npz"}}}
    for order in (losses, dict(reversed(losses.items()))):
        table = read_table(edited(tmp_path, losses=order, baseline="there"))
        with pytest.raises(ValueError, match=r"nowhere\.npz: no such path"):
            check_data(plan(table, tmp_path))


def test_images_that_cannot_be_evaluated_are_refused_before_training(tmp_path, capsys):
    images = np.random.default_rng(0).integers(256, size=(20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "no_labels.npz", train_images=images)
    np.savez(
        tmp_path / "one_class.npz",
        **dict.fromkeys(("train_images", "test_images"), images),
        **dict.fromkeys(("train_labels", "test_labels"), np.zeros(20, int)),
    )
    for name, said in (
        ("no_labels", "no_labels has no labels"),
        ("one_class", "two classes or more; got one in one_class"),
    ):
        for command in (["reproduce", "digits"], ["compare", "infonce"]):
            given = ["--data", str(tmp_path / f"{name}.npz"), "--out", str(tmp_path / "out"), "--dry-run"]
            assert main([*command, *given]) == 2
            assert said in capsys.readouterr().err
    tail = edited(tmp_path, figures=["link_gain"], measure="link", choose_by="")
    check_data(plan(read_table(tail), tmp_path, data=str(tmp_path / "no_labels.npz")))


def test_options_of_a_table_replace_those_of_the_configuration(tmp_path):
    """Training replaces them too, so the key must not contain options that the run does not have."""
    keys = []
    for name, options in (("few", "{hardness: 1.0}"), ("more", "{hardness: 2.0, false_negatives: 0.1}")):
        (tmp_path / name).mkdir()
        table = edited(tmp_path / name, losses={"InfoNCE": {"set": {"loss.options": {"hardness": 3.0}}}})
        config = tmp_path / name / "digits_small.yaml"
        config.write_text(config.read_text() + f"loss: {{preset: hcl, options: {options}}}\n")
        run = plan(read_table(table), tmp_path)[0]
        assert settings_of(run).loss.options == {"hardness": 3.0}
        keys.append(run.key)
    assert keys[0] == keys[1]
