"""Runs by others: reused if they match, merged if comparable, else refused with the difference."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from lab.study.made import CONFIG, compare, comparison_of, config_in, digits, files_of, fill
from training import write_data

from weince.lab.study.archives import check_protocol, find_runs
from weince.lab.study.choice_study import ChoiceStudy
from weince.lab.study.comparison import read_comparison, write_comparison
from weince.lab.study.plan import plan
from weince.lab.study.provenance import is_done
from weince.lab.study.records import add_records
from weince.lab.study.study import Execution
from weince.lab.tasks.images.data import load
from weince.lab.tasks.images.evaluation import fingerprint

COST = dict.fromkeys(("loss_ms", "loss_mib", "step_ms", "step_mib", "batch", "width"), 9.0) | {
    "hardware": "A"
}
EVIDENCE = Path(__file__).parents[3] / "research" / "results" / "evidence" / "runs.jsonl"


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Two users' folders with the same recipe: one ran dcl, the other hcl and another seed of infonce."""
    both = tmp_path_factory.mktemp("two")
    config = config_in(both)
    for name, loss, seeds in (("ours", "dcl", [7, 21]), ("theirs", "hcl", [7, 21, 63])):
        comparison = comparison_of(config, "infonce", loss, seeds=seeds)
        write_comparison(comparison, both / name / comparison.name)
        fill(comparison, both / name)
    return both


@pytest.fixture
def two(filled, tmp_path):
    """A copy of those folders and of their configuration."""
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    return tmp_path / "ours", tmp_path / "theirs"


def listing(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(folder, change):
    """Apply a change to every record of an archive."""
    path = folder / "runs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_two_users_records_are_merged(two):
    ours, theirs = two
    page = compare(out=ours, add=[theirs / "runs.jsonl"])
    found = json.loads((page.parent / "compare.json").read_text())
    assert {line["loss"] for line in found["losses"]} == {"infonce", "dcl", "hcl"}
    assert read_comparison(page.parent / "comparison.yaml").seeds == [7, 21, 63]
    seeds = {line["loss"]: line["figures"]["linear"]["seeds"] for line in found["losses"]}
    assert seeds == {"infonce": 3, "dcl": 2, "hcl": 3}
    assert found["missing"] == ["dcl, temperature 0.1: seed 63"]
    again = compare(out=ours, add=[theirs])  # a folder means its archive; no run counts twice
    assert json.loads((again.parent / "compare.json").read_text())["losses"] == found["losses"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda line: line["evaluation.json"].update(fingerprint="02"),
            "data fingerprint is 02, that of this .* 01",
        ),
        (lambda line: line["run.yaml"].update(batch=128), "another recipe: it has batch 128, not 256"),
        (lambda line: line["run.yaml"]["optimizer"].update(lr=0.1), "it has optimizer.lr 0.1, not 0.002"),
        (lambda line: line["run.yaml"].update(dropout=0.5), "it has dropout 0.5, unknown here"),
        (lambda line: line["run.yaml"]["loss"].update(margin=0.5), r"it has loss.margin 0.5, unknown here"),
        (lambda line: line["run.yaml"]["optimizer"].update(beta=0.5), "it has optimizer.beta 0.5, unknown"),
        (lambda line: line["run.yaml"].update(epochs=9), r"it has epochs 9, not 4 \(--try-epochs"),
        (
            lambda line: line.pop("evaluation.json"),
            "a record needs evaluation.json, in the run small/",
        ),
        (
            lambda line: line.update({"run.yaml": 3}),
            "run.yaml must be names with values; got 3, in the run small/",
        ),
        (lambda line: line["evaluation.json"].pop("linear_validation_mean"), "wants linear_validation_mean"),
        # These would be copied, and from then on no page of the folder could be written.
        (
            lambda line: line["evaluation.json"].update(r1_test_mean=[5]),
            r"r1_test_mean must be a number; got \[5\]",
        ),
        (
            lambda line: line["evaluation.json"].update(r1_test_mean=1e300),
            r"r1_test_mean must be from -100 to 100; got 1e\+300, in the run small/",
        ),
        (
            lambda line: line["evaluation.json"].update(linear_test_mean=-(10**400)),
            r"linear_test_mean must be from -100 to 100; got -10000",
        ),
        (
            lambda line: line["evaluation.json"].pop("data"),
            "evaluation.json wants data; got .*, in the run small/",
        ),
        (
            lambda line: line["log.csv"].update(seconds=[1.0]),
            "log.csv must be columns of numbers, equally long; got ",
        ),
        (
            lambda line: line["log.csv"].update(seconds=["soon"] * 4),
            "log.csv must be columns of numbers, .* 'soon'",
        ),
        (
            lambda line: line.update({"made.json": [1]}),
            r"made.json must be names with values; got \[1\]",
        ),
        (
            lambda line: line["log.csv"].update(seconds=[10**400] * 4),
            "log.csv must be columns of numbers, .* too large",
        ),
        (
            lambda line: line["made.json"].update(measures={"evaluation": {"commit": "1"}}),
            "made.json wants hardware; got {'commit'",
        ),
        (lambda line: line.update({"cost.json": {"loss_ms": 1.0}}), "cost.json wants loss_mib"),
        (
            lambda line: line.update({"cost.json": COST | {"epoch_seconds": "x"}}),
            "epoch_seconds must be a number; got 'x'",
        ),
        (
            lambda line: line["run.yaml"].update(loss="dcl"),
            "loss.preset must name a loss, .*; got .*the loss 'dcl'",
        ),
        (
            lambda line: line["run.yaml"]["loss"].update(preset='=1+1:"<b>'),
            "loss.preset must name a loss, .* got '=1",
        ),
    ],
)
def test_what_does_not_compare_is_refused_and_changes_nothing(two, change, said):
    ours, theirs = two
    edit(theirs, change)
    before = {path: path.read_bytes() for path in ours.rglob("*.*") if path.is_file()}
    with pytest.raises(ValueError, match=said):
        compare(out=ours, add=[theirs / "runs.jsonl"])
    assert {path: path.read_bytes() for path in ours.rglob("*.*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda line: line["evaluation.json"].update(linear_test_mean="hello"),
            "linear_test_mean must be a number; got 'hello', in the run small/dcl",
        ),
        (
            lambda line: line["log.csv"].update(seconds=["hello"] * 4),
            "log.csv must be columns of numbers, .* 'hello', in the run small/dcl",
        ),
        (
            lambda line: line.update({"evaluation.json": 3}),
            "evaluation.json must be names with values; got 3, in the run small/dcl",
        ),
    ],
)
def test_a_record_of_ours_that_no_page_can_show_is_named(two, change, said):
    """Somebody edited it; so far 'could not convert string to float' named neither the file nor the run."""
    ours, _ = two
    edit(ours, lambda line: change(line) if "dcl" in line["run"] else None)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(ours / 'runs.jsonl'))}: {said}"):
        compare(out=ours, table_only=True)


def test_what_an_honest_record_may_hold_is_taken(two):
    """A loss from my-losses.py, and a cost without all of its figures."""
    ours, theirs = two

    def change(line):
        if line["run.yaml"]["loss"]["preset"] == "hcl":
            line["run.yaml"]["loss"]["preset"] = "my-losses:Mine"
        line["cost.json"] = COST | {"loss_mib": None, "epoch_seconds": None}

    edit(theirs, change)
    page = compare(out=ours, add=[theirs / "runs.jsonl"])
    found = json.loads((page.parent / "compare.json").read_text())
    assert {line["loss"] for line in found["losses"]} == {"infonce", "dcl", "my-losses:Mine"}


def test_another_spelling_of_the_same_recipe_is_the_same(two, tmp_path):
    """A key hashes the text of a configuration, but runs with equal settings are the same run."""
    ours, theirs = two
    other = tmp_path / "other.yaml"
    other.write_text((tmp_path / "small.yaml").read_text() + "projection: 64\nseed: 7\n")
    shutil.rmtree(theirs)
    comparison = comparison_of(str(other), "infonce", "hcl", seeds=[7, 21])
    fill(comparison, theirs)
    edit(theirs, lambda line: line["run.yaml"]["loss"].update(engine="dense"))  # does not change the figures
    page = compare(out=ours, add=[theirs / "runs.jsonl"])
    found = json.loads((page.parent / "compare.json").read_text())
    assert {line["loss"]: line["figures"]["linear"]["seeds"] for line in found["losses"]} == {
        "infonce": 2, "dcl": 2, "hcl": 2
    }  # fmt: skip
    assert found["missing"] == []


def test_a_variant_of_a_loss_is_a_loss_of_its_own(two):
    ours, theirs = two
    edit(theirs, lambda line: line["run.yaml"]["loss"].update(softmax_term=0.5)
         if line["run.yaml"]["loss"]["preset"] == "infonce" else None)  # fmt: skip
    page = compare(out=ours, add=[theirs / "runs.jsonl"])
    names = {line["loss"] for line in json.loads((page.parent / "compare.json").read_text())["losses"]}
    assert names == {"infonce", "dcl", "hcl", "infonce, softmax_term 0.5"}


def test_an_added_try_does_not_take_the_loss_of_the_configuration(tmp_path):
    """Their configuration names infonce, ours hcl with an option: the runs are the same."""
    theirs = comparison_of(config_in(tmp_path), "infonce", "hcl", "temperature_free", seeds=[7, 21])
    fill(theirs, tmp_path / "theirs")
    loss = "{preset: hcl, options: {hardness: 2.0}}"
    config = config_in(
        tmp_path, CONFIG.replace("{preset: infonce, temperature: 0.5}", loss), "small_hcl.yaml"
    )
    page = compare(
        ["infonce"], config=config, seeds=2, tries=2, out=tmp_path / "o", add=[tmp_path / "theirs"]
    )
    found = json.loads((page.parent / "compare.json").read_text())
    assert found["missing"] == []
    assert {line["loss"]: line["figures"]["linear"]["seeds"] for line in found["losses"]} == {
        "infonce": 2, "hcl": 2, "temperature_free": 2
    }  # fmt: skip


PROTOCOL = {"fingerprint": "01", "quick": False, "probe_seeds": [1], "split_seeds": [1]}


@pytest.mark.parametrize("key", PROTOCOL)
def test_every_part_of_the_protocol_must_be_equal(key):
    older = {name: value for name, value in PROTOCOL.items() if name != key}  # does not record it
    check_protocol([("first", PROTOCOL), ("second", dict(PROTOCOL))])
    for other in (PROTOCOL | {key: "other"}, older):
        with pytest.raises(ValueError, match=r"^third: its .*, that of first is .* do not compare$"):
            check_protocol([("first", PROTOCOL), ("second", PROTOCOL), ("third", other)])


def archived(folder, *records):
    """An archive of runs with their figures and what else their evaluation says."""
    add_records(folder, {run.name: files_of(run, value, **changes) for run, value, changes in records})
    return folder


def test_of_several_archives_the_first_decides(tmp_path):
    """It gives the runs that several have, and the protocol of all."""
    one, two, three, *_ = runs = plan(
        comparison_of(config_in(tmp_path), "infonce", "dcl").tries_table(), tmp_path
    )
    first = archived(tmp_path / "first", (one, 50.0, {}))
    second = archived(
        tmp_path / "second", (one, 60.0, {}), (two, 60.0, {"probe_seeds": [2]}), (three, 60.0, {})
    )
    found = find_runs(runs, [first, second], of_data=None, ours=None)
    figures = {name: files["evaluation.json"]["linear_test_mean"] for name, files in found.items()}
    assert figures == {one.name: 50.0, three.name: 60.0}


def test_a_record_that_does_not_name_its_data_is_not_reused(tmp_path):
    (run,) = plan(comparison_of(config_in(tmp_path), "infonce", tries=1).tries_table(), tmp_path)
    theirs = archived(tmp_path / "theirs", (run, 50.0, {}))
    edit(theirs, lambda line: line["evaluation.json"].pop("fingerprint"))
    for here in ({"of_data": "01", "ours": None}, {"of_data": None, "ours": PROTOCOL}):
        assert find_runs([run], [theirs], **here) == {}


def test_a_whole_number_is_equal_with_and_without_its_point(tmp_path):
    *_, run = plan(comparison_of(config_in(tmp_path), "mixture", tries=3).tries_table(), tmp_path)
    theirs = archived(tmp_path / "theirs", (run, 50.0, {}))
    edit(theirs, lambda line: line["run.yaml"]["loss"].update(options={"spread": 1}))  # 1.0 here
    assert find_runs([run], [theirs], of_data=None, ours=None).keys() == {run.name}


def test_records_of_two_data_sets_do_not_begin_a_comparison(two, tmp_path):
    _, theirs = two
    edit(theirs, lambda line: "hcl" in line["run"] and line["evaluation.json"].update(fingerprint="02"))
    with pytest.raises(ValueError, match=r"its data fingerprint is 0.*their figures do not compare"):
        compare(["infonce"], config=str(tmp_path / "small.yaml"), out=tmp_path / "new", add=[theirs])
    assert not (tmp_path / "new").exists()


def test_a_run_that_several_have_is_ours_or_that_of_the_first_archive(two):
    ours, theirs = two
    before = {run["run"]: run["evaluation.json"] for run in map(json.loads, (ours / "runs.jsonl").open())}
    edit(theirs, lambda line: line["evaluation.json"].update(linear_test_mean=99.0))
    shutil.copytree(theirs, theirs.parent / "third")
    edit(theirs.parent / "third", lambda line: line["evaluation.json"].update(linear_test_mean=98.0))
    compare(out=ours, add=[theirs, theirs.parent / "third"])
    after = {run["run"]: run["evaluation.json"] for run in map(json.loads, (ours / "runs.jsonl").open())}
    assert {name: after[name] for name in before} == before
    assert {after[name]["linear_test_mean"] for name in after.keys() - before.keys()} == {99.0}


def test_seeds_wait_until_all_tries_of_their_loss_are_done_or_failed(tmp_path):
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl", seeds=[7, 21])
    *done, last = plan(comparison.tries_table(), tmp_path)
    archived(tmp_path, *((run, 50.0, {}) for run in done))
    sweep = ChoiceStudy(comparison, tmp_path, Execution())
    assert {run.loss for run in sweep.seeds()} == {"infonce", "dcl"}
    assert {run.loss for run in sweep.seeds(complete=True)} == {"infonce"}
    sweep.failed = {last.name: "the reason"}
    assert {run.loss for run in sweep.seeds(complete=True)} == {"infonce", "dcl"}


def test_runs_of_reproduce_are_taken_over(tmp_path):
    """Our own CIFAR-100 records in bf16 contain some of the runs of this comparison."""
    comparison = comparison_of("cifar100_resnet18", "infonce", "released", "dcl", set={"precision": "bf16"})
    runs = plan(comparison.tries_table(), tmp_path)
    found = find_runs(runs, [EVIDENCE], of_data=None, ours=None)
    taken = [run for run in runs if run.name in found]
    assert [(run.loss, run.try_number) for run in taken] == [("infonce", 0), ("infonce", 1), ("released", 0)]
    add_records(tmp_path, found)
    assert [run for run in runs if is_done(run)] == [run for run in runs if run in taken]


def test_records_of_another_data_set_are_told_apart_by_name(tmp_path):
    """Our archives have runs on CIFAR-100 and CIFAR-10 whose settings are equal."""
    both = EVIDENCE.parents[1] / "paper_recipe" / "runs.jsonl"
    taken = {}
    for config in ("cifar100_resnet18", "cifar10_resnet18"):
        comparison = comparison_of(
            config, "infonce", "dcl", tries=3, set={"precision": "bf16"}, try_epochs=25
        )
        runs = plan(comparison.tries_table(), tmp_path)
        found = find_runs(runs, [both], of_data=None, ours=None)
        assert len(found) == len(runs) == 6
        (taken[config],) = {files["evaluation.json"]["data"] for files in found.values()}
    assert taken == {"cifar100_resnet18": "cifar100", "cifar10_resnet18": "cifar10"}


@pytest.mark.parametrize("names", [("mine", "mine"), ("digits", "digits")], ids=["other", "several"])
def test_records_whose_names_do_not_say_which_data_they_have_are_refused(tmp_path, names):
    runs = plan(comparison_of(config_in(tmp_path), "infonce", tries=2).tries_table(), tmp_path)
    theirs = archived(
        tmp_path / "theirs",
        *((run, 50.0, {"fingerprint": mark}) for run, mark in zip(runs, ("01", "02"), strict=True)),
    )
    edit(theirs, lambda line: line["run.yaml"].update(data=names[0]))
    said = rf"runs on {names[0]} \(fingerprint 01\); {names[1]} \(fingerprint 02\).*digits, cannot be read.*--data"
    with pytest.raises(ValueError, match=said):
        find_runs(runs, [theirs], of_data=None, ours=None)
    assert find_runs(runs, [theirs], of_data="02", ours=None).keys() == {runs[1].name}


def test_data_that_are_named_say_which_records_to_reuse(two, tmp_path):
    """Also where nothing is started."""
    _, theirs = two
    file = write_data(tmp_path)
    edit(theirs, lambda line: line["run.yaml"].update(data="mine"))
    config = str(tmp_path / "small.yaml")
    options = {"config": config, "out": tmp_path / "new", "reuse": [theirs], "tries": 2, "table_only": True}
    with pytest.raises(ValueError, match="give their path with --data"):
        compare(["infonce", "hcl"], **options)
    with pytest.raises(ValueError, match="none of the"):  # they are on other data
        compare(["infonce", "hcl"], **options, data=str(file))
    mark = fingerprint(load(str(file), size=8))
    edit(theirs, lambda line: line["evaluation.json"].update(fingerprint=mark))
    compare(["infonce", "hcl"], **options, data=str(file))
    assert (tmp_path / "new" / "small" / "index.html").is_file()


def test_runs_on_other_data_are_not_taken_over(tmp_path, capsys):
    comparison = comparison_of("cifar100_resnet18", "infonce", "dcl", set={"precision": "bf16"})
    runs = plan(comparison.tries_table(), tmp_path)
    assert find_runs(runs, [EVIDENCE], of_data="0123", ours=None) == {}
    assert (
        "runs not reused, their data have the fingerprint 5e155304522f78cc, not 0123"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [({"quick": True}, "quick evaluation is True, not False"), ({"probe_seeds": [2]}, r"probe is \[2\], not \[1\]"),
     ({"fingerprint": "02"}, "data fingerprint is 02, not 01")],
)  # fmt: skip
def test_runs_by_another_protocol_are_not_reused(two, change, said, capsys):
    ours, theirs = two
    edit(theirs, lambda line: line["evaluation.json"].update(change))
    before = (ours / "runs.jsonl").read_bytes()
    compare(["hcl"], out=ours, reuse=[theirs], tries=2, table_only=True)
    error = capsys.readouterr().err
    assert re.search(f"2 runs not reused, their .*{said}", error)
    assert "0 of 2 missing runs are in the archives" in error
    assert (ours / "runs.jsonl").read_bytes() == before


def test_quick_evaluations_are_not_reused_in_a_new_folder(two, tmp_path, capsys):
    _, theirs = two
    edit(theirs, lambda line: line["evaluation.json"].update(quick=True))
    config = str(tmp_path / "small.yaml")
    with pytest.raises(ValueError, match="none of the 4 runs"):
        compare(["hcl"], config=config, out=tmp_path / "new", reuse=[theirs], tries=2, table_only=True)
    assert "4 runs not reused, their evaluation is quick" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_dry_run_leaves_reused_runs_in_their_archive(two, capsys, monkeypatch):
    ours, theirs = two
    monkeypatch.setenv("COLUMNS", "200")
    for folder in two:
        edit(folder, lambda line: line["evaluation.json"].update(fingerprint=digits()))
    before = listing(ours)
    compare(["hcl"], out=ours, reuse=[theirs], tries=2, dry_run=True)
    said = capsys.readouterr()
    assert said.out.count(" in the archives ") == 3  # two tries of hcl, and a seed of the chosen one
    assert "0 to do" in said.out
    assert listing(ours) == before
    edit(theirs, lambda line: line["evaluation.json"].update(fingerprint="02"))
    monkeypatch.setattr(ChoiceStudy, "show", lambda *_: None)
    compare(["hcl"], out=ours, reuse=[theirs], tries=2, dry_run=True, device="cpu")
    assert f"2 runs not reused, their data have the fingerprint 02, not {digits()}" in capsys.readouterr().err
    assert listing(ours) == before


def test_figures_of_two_data_sets_are_not_compared(two):
    ours, _ = two
    edit(
        ours, lambda line: line["evaluation.json"].update(fingerprint="02") if "dcl" in line["run"] else None
    )
    with pytest.raises(ValueError, match=r"data fingerprint is 0.*their figures do not compare"):
        compare(out=ours, table_only=True)


def test_an_archive_that_is_not_there(two):
    with pytest.raises(ValueError, match=r"nowhere.jsonl: no such archive of runs; wanted a runs.jsonl"):
        compare(out=two[0], add=[Path("nowhere.jsonl")])


def test_two_archives_in_a_new_folder_need_one_loss(two, tmp_path):
    ours, theirs = two
    config = {"config": str(tmp_path / "small.yaml"), "out": tmp_path / "new", "add": [ours, theirs]}
    said = "^--add wants one of the losses, and the --config and --tries .*: .* holds no comparison yet"
    with pytest.raises(ValueError, match=said):
        compare(**config)
    page = compare(["dcl"], tries=2, **config)
    found = json.loads((page.parent / "compare.json").read_text())
    assert {line["loss"] for line in found["losses"]} == {"infonce", "dcl", "hcl"}
    assert found["missing"] == ["dcl, temperature 0.1: seed 63"]


def test_records_are_added_to_what_is_named(two):
    """A comparison may start from records of others."""
    ours, theirs = two
    shutil.rmtree(ours)
    config = str(theirs.parent / "small.yaml")
    page = compare(["hcl"], config=config, tries=2, seeds=2, out=ours, add=[theirs / "runs.jsonl"])
    assert replace(read_comparison(page.parent / "comparison.yaml"), config="").baseline == "infonce"


def test_a_new_folder_has_the_seeds_of_the_archive(tmp_path):
    config = config_in(tmp_path)
    fill(comparison_of(config, "infonce", "hcl", seeds=[105, 9, 21], try_epochs=1), tmp_path / "theirs")
    new = {"config": config, "tries": 2, "try_epochs": 1, "add": [tmp_path / "theirs"]}
    page = compare(["infonce"], out=tmp_path / "new", **new)
    found = json.loads((page.parent / "compare.json").read_text())
    assert read_comparison(page.parent / "comparison.yaml").seeds == [105, 21, 9]
    assert found["missing"] == []
    with pytest.raises(
        ValueError, match=r"first seed, 7, to choose by; got runs with the seeds \[9, 21, 105\]"
    ):
        compare(["infonce"], out=tmp_path / "other", seeds=[7, 9], **new)
    assert not (tmp_path / "other").exists()


def test_a_further_loss_gets_as_many_tries_as_the_others(two):
    ours, _ = two
    compare(["dcl"], out=ours, tries=3, table_only=True)  # both losses there have two tries
    page = compare(["dcl", "mixture"], out=ours, table_only=True)
    tries = {name: len(of) for name, of in read_comparison(page.parent / "comparison.yaml").losses.items()}
    assert tries == {"infonce": 2, "dcl": 3, "mixture": 3}


def test_a_recipe_that_the_folder_does_not_have_is_refused(two, tmp_path):
    ours, _ = two
    with pytest.raises(
        ValueError, match=r"--recipe strong wants --config, unless .* it holds that of small$"
    ):
        compare(out=ours, recipe="strong", table_only=True)
    strong = comparison_of(config_in(tmp_path, name="small_strong.yaml"), "infonce", "dcl", seeds=[7, 21])
    write_comparison(strong, tmp_path / "out" / strong.name)
    fill(strong, tmp_path / "out")
    assert compare(out=tmp_path / "out", recipe="strong", table_only=True).is_file()


def test_finished_runs_on_other_data_are_refused(tmp_path):
    """The folder of a run does not depend on ``--data``."""
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl", seeds=[7, 21])
    write_comparison(comparison, tmp_path / "out" / comparison.name)
    fill(comparison, tmp_path / "out")
    before = listing(tmp_path / "out")
    said = r"made on data with the fingerprint 01; the data here have \w{16}: give the --data"
    with pytest.raises(ValueError, match=said):
        compare(out=tmp_path / "out", data=str(write_data(tmp_path)), device="cpu")
    for dry in (True, False):  # --data is forgotten, and a loss is missing
        with pytest.raises(ValueError, match=said):
            compare(["hcl"], out=tmp_path / "out", device="cpu", tries=2, dry_run=dry)
    assert listing(tmp_path / "out") == before


def test_a_run_that_was_only_begun_does_not_hide_a_finished_record(two):
    ours, theirs = two
    lines = [json.loads(line) for line in (theirs / "runs.jsonl").read_text().splitlines()]
    begun = next(line for line in lines if "hcl" in line["run"] and "seed_63" in line["run"])
    (ours / "runs" / begun["run"]).mkdir(parents=True)
    (ours / "runs" / begun["run"] / "run.yaml").write_text(json.dumps(begun["run.yaml"]))
    page = compare(out=ours, add=[theirs])
    assert json.loads((page.parent / "compare.json").read_text())["missing"] == [
        "dcl, temperature 0.1: seed 63"
    ]


def test_short_tries_with_another_first_seed_are_left_out(tmp_path):
    config = config_in(tmp_path)
    for name, seeds in (("ours", [7, 21]), ("theirs", [21, 7])):
        comparison = comparison_of(config, "infonce", "dcl", seeds=seeds, try_epochs=1)
        write_comparison(comparison, tmp_path / name / comparison.name)
        fill(comparison, tmp_path / name)
    page = compare(out=tmp_path / "ours", add=[tmp_path / "theirs"])
    assert json.loads((page.parent / "compare.json").read_text())["missing"] == []
    assert read_comparison(page.parent / "comparison.yaml").seeds == [7, 21]
