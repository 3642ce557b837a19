"""From records to a page: the choice, the effect of tuning, the advice, the files."""

import csv
import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.study.made import CONFIG, TEXT, compare, comparison_of, config_in, files_of, fill, value_of

from weince.lab.study.advice import Open, advise
from weince.lab.study.choice_study import ChoiceStudy
from weince.lab.study.comparison import read_comparison, write_comparison
from weince.lab.study.comparison_page import ComparisonPage
from weince.lab.study.differences import seeds_to_show, smallest_difference
from weince.lab.study.figures import time_of
from weince.lab.study.plan import plan
from weince.lab.study.provenance import record
from weince.lab.study.statistics import Done, best_of, choose_tries, summarise
from weince.lab.study.study import Execution


@given(
    st.lists(st.tuples(st.floats(0, 99), st.floats(0, 99)), min_size=1, max_size=6, unique_by=lambda t: t[0])
)
def test_the_best_of_k_tries_is_the_mean_over_all_choices_of_k(tries):
    for k, found in enumerate(best_of(tries), 1):
        picked = [max(some)[1] for some in itertools.combinations(tries, k)]
        assert found == pytest.approx(sum(picked) / len(picked), abs=1e-9)


def test_of_equal_validation_figures_the_first_is_the_best():
    assert best_of([(1.0, 10.0), (1.0, 30.0)]) == [20.0, 10.0]  # as the choice does


class Summarised:
    """The outcome of a comparison with its advice."""

    def __init__(self, comparison, outcome):
        self.comparison, self.outcome = comparison, outcome

    def __getattr__(self, name):
        return getattr(self.outcome, name)

    @property
    def advice(self):
        return advise(self.comparison, self.outcome, Open())


def summarised(
    tmp_path, *losses, gains=None, left_out=(), value=value_of, without=None, shift=None, **changes
):
    """The summary of a comparison whose records exist only here.

    ``left_out`` are seeds of losses without one; ``without`` is a loss without test figures; ``shift`` is added to
    test figures of losses.
    """
    comparison = comparison_of(config_in(tmp_path.parent), *losses, **changes)
    tries = plan(comparison.tries_table(), tmp_path)

    def records(runs):
        made = list({run.name: run for run in runs if (run.loss, run.seed) not in left_out}.values())
        found = {run.name: files_of(run, value(run, gains or {}))["evaluation.json"] for run in made}
        for run in made:
            if run.loss == without:
                found[run.name] |= {key: math.nan for key in found[run.name] if "_test_" in key}
            for figure, gain in (shift or {}).get(run.loss, {}).items():
                found[run.name][f"{figure}_test_mean"] += gain
        return {run.name: Done(run, found[run.name]) for run in made}

    chosen = choose_tries(comparison, tries, records(tries))
    seeds = [
        replace(run, try_number=chosen[run.loss]) for run in plan(comparison.seeds_table(chosen), tmp_path)
    ]
    return Summarised(comparison, summarise(comparison, tries, seeds, records([*tries, *seeds])))


def test_the_best_of_several_better_losses_is_advised(tmp_path):
    for first, second in (("dcl", "hcl"), ("hcl", "dcl")):
        found = summarised(tmp_path, "infonce", "dcl", "hcl", gains={first: 6.0, second: 3.0})
        words = [line.judged["linear"].word for line in found.lines if line.judged]
        assert words == ["better", "better"]
        assert found.advice[0].startswith(f"Use {first} ")
        assert (
            f"{first} is better in recall at 1 (+{found.lines[0].judged['r1'].mean:.2f})" in found.advice[1]
        )
        assert "worse" not in found.advice[1]


def test_what_the_advised_loss_is_worse_in_is_said(tmp_path):
    found = summarised(
        tmp_path, "infonce", "dcl", "hcl", gains={"dcl": 6.0, "hcl": 3.0}, shift={"dcl": {"map_r": -9.0}}
    )
    assert found.lines[0].judged["map_r"].word == "worse"
    lost = found.lines[0].judged["map_r"].mean
    assert found.advice[1].startswith(
        f"But dcl is worse in MAP@R ({lost:.2f}); dcl is better in recall at 1 ("
    )
    assert "; hcl is better in MAP@R (+" in found.advice[1]


def test_a_loss_with_one_try_is_not_called_tuned(tmp_path):
    def advice(*losses, tries, seeds=(7, 21, 63, 84)):
        gains = dict.fromkeys(losses[1:], 6.0)
        return summarised(tmp_path, *losses, tries=tries, seeds=list(seeds), gains=gains).advice

    assert advice("infonce", "dcl", tries=2)[0].endswith("that of infonce (temperature 0.1), both tuned.")
    assert advice("infonce", "temperature_free", tries=2)[0].endswith(
        "that of infonce (temperature 0.1); temperature_free had one try, so it is not tuned."
    )
    assert advice("infonce", "dcl", tries=1)[0].endswith("; each had one try, so neither is tuned.")
    assert advice("infonce", "dcl", tries=2, seeds=[7])[1].startswith(
        "Tuned by validation, infonce does best at"
    )
    assert advice("infonce", "dcl", tries=1, seeds=[7])[1] == (
        "infonce (temperature 0.1) had one try, so it is not tuned."
    )


def test_how_many_seeds_to_run(tmp_path):
    gains = {"dcl": 0.2}
    found = summarised(tmp_path, "infonce", "dcl", "hcl", gains=gains, left_out=[("hcl", 84), ("hcl", 63)])
    spread, comparisons = found.judgement.spreads["linear"], found.judgement.comparisons
    needed = seeds_to_show(0.5, spread, 3, comparisons)
    assert needed > 4
    assert found.advice[1] == (
        f"With 4 seeds, a true difference of {smallest_difference(spread, 4, comparisons):.2f} points in linear "
        f"accuracy is found in 8 of 10 cases; to find one of 0.5, run about {needed} seeds, "
        "named by --seeds."
    )
    for enough in ({"level_within": 5.0}, {"gains": {"dcl": 9.0, "hcl": -9.0}}):  # all is told
        assert "run about" not in summarised(tmp_path, "infonce", "dcl", "hcl", **enough).advice[1]
    # These seeds would show 1.8 points, but not the difference that there is.
    found = summarised(tmp_path, "infonce", "dcl", gains={"dcl": 0.9}, level_within=1.8)
    assert found.lines[0].judged["linear"].word == "cannot tell"
    assert found.advice[1].endswith("in 8 of 10 cases.")


@pytest.mark.parametrize(
    ("shift", "said", "word"), [(0.0, "dcl is level", "level"), (3.0, "for dcl these seeds", "cannot tell")]
)
def test_losses_that_differ_by_the_same_with_every_seed_have_no_reach(tmp_path, shift, said, word):
    def value(run, gains):
        return 50.0 + run.seed / 4 - run.try_number + shift * (run.loss == "dcl")

    found = summarised(tmp_path, "infonce", "dcl", value=value)
    assert {line.judged["linear"].word for line in found.lines if line.judged} == {word}
    assert said in found.advice[0]
    assert found.advice[1] == (
        "All seeds show exactly the same differences in linear accuracy, so they give no spread to judge by: check "
        "that each loss and each seed took effect."
    )
    assert found.smallest == {}
    outcome = found.outcome._replace(done=[])
    text = ComparisonPage(found.comparison, outcome, Open(), {}, "").markdown()
    assert "that takes two seeds" not in text
    assert ("No difference is tested here: all seeds show exactly the same differences" in text) == bool(
        shift
    )


def test_a_baseline_without_a_test_figure_is_named(tmp_path):
    found = summarised(tmp_path, "infonce", "dcl", without="infonce")
    assert found.advice == (
        "Nothing can be told yet: infonce and another loss need finished runs with the same seed.",
        "Runs of infonce have no finite linear accuracy: evaluate them again, or name another --baseline.",
    )


def test_a_validation_figure_of_infinity_has_no_shade(tmp_path):
    page, _ = made(tmp_path, "infonce", "dcl", seeds=[7, 21])
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    (bad,) = [line for line in lines if "dcl_temperature-0.2_" in line["run"] and "seed_7" in line["run"]]
    bad["evaluation.json"]["linear_validation_mean"] = math.inf
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    compare(out=tmp_path, table_only=True)
    shades = [float(shade) for shade in re.findall(r"--dark: ([^\"]*)", page.read_text())]
    assert (min(shades), max(shades), len(shades)) == (0.0, 1.0, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_try_without_a_finite_validation_figure_is_not_chosen(tmp_path, value):
    comparison = comparison_of(config_in(tmp_path.parent), "infonce")
    tries = first, second = plan(comparison.tries_table(), tmp_path)
    done = {run.name: Done(run, {"linear_validation_mean": v}) for run, v in ((first, value), (second, 50.0))}
    assert choose_tries(comparison, tries, done) == {"infonce": 1}
    assert choose_tries(comparison, tries, {first.name: done[first.name]}) == {}


def test_a_try_without_a_finite_test_figure_has_no_part_in_the_gain_from_tuning(tmp_path):
    comparison = comparison_of(config_in(tmp_path.parent), "infonce")
    first, second = plan(comparison.tries_table(), tmp_path)
    figures = {"linear_validation_mean": 50.0, "linear_test_mean": 49.0}
    bad = Done(first, figures | {"linear_test_mean": math.nan})
    done = {first.name: bad, second.name: Done(second, figures)}
    assert summarise(comparison, [first, second], [], done).tuned == {"infonce": [49.0]}


def made(tmp_path, *losses, gains=None, **options):
    """The page of a comparison made from records only, and its JSON file."""
    changes = {key: options.pop(key) for key in ("seeds", "try_epochs", "tries") if key in options}
    config = config_in(tmp_path.parent)  # the same path in all tests: its settings are parsed once
    comparison = comparison_of(config, *losses, **changes)
    write_comparison(comparison, tmp_path / comparison.name)
    fill(comparison, tmp_path, gains=gains, **options)
    page = compare(out=tmp_path, table_only=True)
    return page, json.loads((page.parent / "compare.json").read_text())


def test_a_better_loss_is_advised(tmp_path):
    page, found = made(
        tmp_path, "infonce", "dcl", "hcl", gains={"dcl": 3.0, "hcl": -3.0}, seeds=[7, 21, 63, 84]
    )
    assert found["advice"][0].startswith("Use dcl (temperature 0.1): its linear accuracy is 3.")
    assert [line["loss"] for line in found["losses"]] == ["dcl", "infonce", "hcl"]
    words = {line["loss"]: line["figures"]["linear"]["word"] for line in found["losses"]}
    assert words == {"dcl": "better", "infonce": "baseline", "hcl": "worse"}
    assert "3 losses, equally tuned, compared with infonce" in page.read_text()
    assert found["comparisons"] == 2 * 4
    assert found["missing"] == []
    rows = list(csv.DictReader((page.parent / "compare.csv").open(newline="")))
    assert len(rows) == 3 * 4
    assert [row["word"] for row in rows if row["figure"] == "map_r"] == ["better", "baseline", "worse"]
    assert float(rows[0]["mean"]) == found["losses"][0]["figures"]["linear"]["mean"]


def test_where_nothing_is_better_the_baseline_stays(tmp_path):
    _, found = made(tmp_path, "infonce", "dcl", "hcl", gains={"hcl": -3.0}, seeds=[7, 21, 63, 84])
    assert found["advice"][0].startswith(
        "Stay with infonce (temperature 0.1): no loss here is shown to be better in linear"
    )
    assert "hcl is worse" in found["advice"][0]
    assert "With 4 seeds, a true difference of" in found["advice"][1]


def test_one_seed_tells_nothing(tmp_path):
    page, found = made(tmp_path, "infonce", "dcl", gains={"dcl": 9.0}, seeds=[7])
    assert found["advice"][0] == "Run more seeds: with one seed no difference can be told from chance."
    (dcl,) = [line for line in found["losses"] if line["loss"] == "dcl"]
    linear = dcl["figures"]["linear"]
    assert (linear["word"], linear["why"], linear["p"], linear["half"]) == (
        "cannot tell",
        "one seed",
        None,
        None,
    )
    assert "cannot tell</span>: one seed" in page.read_text()
    for text in (page.read_text(), (page.parent / "compare.md").read_text()):
        assert "Holm&#39;s correction" not in text
        assert "Holm's correction" not in text
        assert "No difference is tested here: that takes two seeds or more that infonce and another" in text


def test_one_loss_alone_wants_another(tmp_path):
    _, found = made(tmp_path, "infonce", seeds=[7, 21])
    assert found["missing"] == []
    assert found["advice"][1] == "Name a further loss: weince compare LOSS, with the same options, adds it."


def test_a_comparison_is_not_continued_with_another_file_of_the_same_name(tmp_path):
    _, before = made(tmp_path, "infonce", "dcl", seeds=[7])
    (tmp_path / "other").mkdir()
    other = config_in(tmp_path / "other", CONFIG.replace("batch: 256", "batch: 128"))
    with pytest.raises(ValueError, match=r"config must be .*small.yaml, as in .*; got .*other.small.yaml"):
        compare(out=tmp_path, config=other, table_only=True)
    page = compare(out=tmp_path, config="small", table_only=True)  # the name of its folder
    assert json.loads((page.parent / "compare.json").read_text()) == before


def test_the_choice_is_by_validation_and_by_tries_alone(tmp_path):
    """The second try has the better test figure, the first the better validation figure."""
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl", seeds=[7, 21])
    write_comparison(comparison, tmp_path / comparison.name)
    runs = fill(comparison, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    second = {run.name for run in runs if run.try_number == 1}
    for line in lines:
        if line["run"] in second:
            line["evaluation.json"]["linear_test_mean"] = 99.0
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = compare(out=tmp_path, table_only=True)
    found = json.loads((page.parent / "compare.json").read_text())
    assert {line["settings"] for line in found["losses"]} == {"temperature 0.1"}
    assert [one["chosen"] for one in found["tries"]] == [True, False] * 2
    assert found["best_of"]["dcl"][1] < found["best_of"]["dcl"][0] < 99.0


def test_short_tries_choose_and_do_not_count(tmp_path):
    page, found = made(tmp_path, "infonce", "dcl", try_epochs=1, seeds=[7, 21])
    counted = [run for run in found["runs"] if run["counts"]]
    assert {run["epochs"] for run in counted} == {4}
    assert {run["epochs"] for run in found["runs"] if not run["counts"]} == {1}
    assert (len(counted), len(found["runs"])) == (2 * 2, 2 * 2 + 2 * 2)
    assert {run["crowded"] for run in found["runs"]} == {0.01}  # of the last epoch
    assert "each of 1 epochs" in found["facts"]["tuning budget"]
    assert "against epochs" in page.read_text()


def test_records_older_than_a_figure_have_a_dash(tmp_path):
    page, found = made(tmp_path, "infonce", "dcl", without=("map_r",), seeds=[7, 21])
    assert all("map_r" not in line["figures"] for line in found["losses"])
    assert all(run["map_r_test"] is None for run in found["runs"])
    assert "MAP@R" not in page.read_text()


def test_fewer_tries_than_asked_for_are_said(tmp_path):
    page, found = made(tmp_path, "infonce", "temperature_free", tries=3, seeds=[7, 21])
    budget = found["facts"]["tuning budget"]
    assert budget.startswith("unequal numbers of tries: temperature_free 1, infonce 3")
    assert "2 losses, tuned by unequal numbers of tries, compared with infonce" in page.read_text()


def test_what_is_missing_is_named(tmp_path, capsys):
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl", seeds=[7, 21])
    write_comparison(comparison, tmp_path / comparison.name)
    fill(replace(comparison, losses={"infonce": comparison.losses["infonce"]}), tmp_path)
    fill(
        replace(comparison, losses=comparison.losses | {"dcl": comparison.losses["dcl"][:1]}),
        tmp_path,
        seeds=False,
    )
    page = compare(out=tmp_path, table_only=True)
    said = capsys.readouterr().err
    assert "missing: try dcl, temperature 0.2: seed 7\n" in said
    assert "missing: dcl, temperature 0.1: seed 21\n" in said
    found = json.loads((page.parent / "compare.json").read_text())
    assert said.endswith(f"\n{comparison.name}: {found['advice'][0]}\n")
    assert {line["loss"]: line["tries"] for line in found["losses"]} == {"infonce": 2, "dcl": 1}
    text = page.read_text()
    # Not by the same command: --table-only starts nothing.
    assert "Unfinished: runs are missing; weince compare with the same --out runs them." in text
    assert "try dcl, temperature 0.2: seed 7" in text


def test_why_runs_failed_is_told_where_the_others_are_read(tmp_path):
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl", seeds=[7, 21])
    fill(replace(comparison, losses={"infonce": comparison.losses["infonce"]}), tmp_path)
    study = ChoiceStudy(comparison, tmp_path, Execution())
    study.failed = {"a run": "a run: the reason"}
    with pytest.raises(ValueError, match=r"^1 run failed, the page of the others is .*; a run: the reason$"):
        study.write(saved=True)
    said = (
        "Unfinished: runs failed, What is missing says why; weince compare with the same --out tries them again. "
        "To change a setting that a reason names, give --set NAME=VALUE and another --out."
    )
    for name in ("index.html", "compare.md"):
        text = (tmp_path / comparison.name / name).read_text()
        assert said in text
        assert "failed: a run: the reason" in text


def test_a_run_that_failed_in_an_earlier_call_is_not_only_missing(tmp_path, capsys):
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl", seeds=[7, 21])
    write_comparison(comparison, tmp_path / comparison.name)
    first = replace(comparison, losses=comparison.losses | {"dcl": comparison.losses["dcl"][:1]})
    fill(replace(comparison, losses={"infonce": comparison.losses["infonce"]}), tmp_path)
    fill(first, tmp_path, seeds=False)
    run = next(
        run for run in plan(comparison.tries_table(), tmp_path) if (run.loss, run.try_number) == ("dcl", 1)
    )
    run.folder.mkdir(parents=True)
    (run.folder / "error.txt").write_text(f"{run.name}: the reason\nand more\n")
    page = compare(out=tmp_path, table_only=True)
    said = capsys.readouterr().err
    assert (
        f"failed: {run.name}: the reason\nweince compare with the same --out tries what failed again\n"
        in said
    )
    assert "missing: dcl, temperature 0.1: seed 21\n" in said
    assert "missing: try dcl" not in said
    found = json.loads((page.parent / "compare.json").read_text())
    assert found["failed"] == {run.name: f"{run.name}: the reason"}
    assert found["missing"] == ["dcl, temperature 0.1: seed 21"]
    assert "Unfinished: runs failed, What is missing says why" in page.read_text()


def test_if_every_run_failed_in_an_earlier_call_the_error_says_why(tmp_path):
    comparison = comparison_of(config_in(tmp_path), "infonce", seeds=[7])
    write_comparison(comparison, tmp_path / comparison.name)
    for run in plan(comparison.tries_table(), tmp_path):
        run.folder.mkdir(parents=True)
        (run.folder / "error.txt").write_text("the reason\n")
    with pytest.raises(ValueError, match=r"^2 runs failed, and none is done; the reason$"):
        compare(out=tmp_path, table_only=True)


def test_a_difference_over_fewer_pairs_than_seeds_says_so(tmp_path):
    page, _ = made(tmp_path, "infonce", "dcl", seeds=[7, 21, 63])
    assert "(n = " not in (page.parent / "compare.md").read_text()
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    left = [line for line in lines if not ("/infonce_" in line and "seed_63" in line)]
    assert len(left) == len(lines) - 1
    left = [json.loads(line) for line in left]
    del next(line for line in left if "/dcl_" in line["run"] and "seed_21" in line["run"])["log.csv"]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in left))
    page = compare(out=tmp_path, table_only=True)
    (row,) = [
        line for line in (page.parent / "compare.md").read_text().splitlines() if "| dcl | temp" in line
    ][:1]
    assert row.startswith("| dcl | temperature 0.1 | 3 |")
    assert row.count(" (n = 2), ") == 4
    found = json.loads((page.parent / "compare.json").read_text())
    assert [line["train_seconds"] for line in found["losses"]] == [8.0, 8.0]  # of the runs with a log


def test_a_mean_over_fewer_seeds_than_the_loss_has_says_so(tmp_path):
    """The page gave four seeds and the mean of two for a figure that older records lack."""
    page, _ = made(tmp_path, "infonce", "dcl", seeds=[7, 21, 63])
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    for line in lines:
        if "/infonce_" in line["run"] and "seed_63" in line["run"]:
            del line["evaluation.json"]["map_r_test_mean"]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = compare(out=tmp_path, table_only=True)
    rows = (page.parent / "compare.md").read_text().splitlines()
    (row,) = [line for line in rows if "| infonce | temp" in line][:1]
    assert row.startswith("| infonce | temperature 0.1 | 3 |")
    assert row.endswith(" (n = 2) | baseline |")
    assert row.count("(n = ") == 1
    shown = page.read_text().partition('id="leaderboard"')[2].partition("</section>")[0]
    assert shown.count(" (n = 2)</td>") == 1


def test_losses_without_a_seed_in_common_are_not_said_to_have_one_seed(tmp_path):
    made(tmp_path, "infonce", "dcl", seeds=[7, 21, 63], try_epochs=1)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    apart = [("/infonce_temp", "seed_7"), ("/dcl_temp", "seed_21"), ("/dcl_temp", "seed_63")]
    left = [line for line in lines if not any(loss in line and seed in line for loss, seed in apart)]
    (tmp_path / "runs.jsonl").write_text("".join(left))
    page = compare(out=tmp_path, table_only=True)
    found = json.loads((page.parent / "compare.json").read_text())
    assert {line["loss"]: line["figures"]["linear"]["seeds"] for line in found["losses"]} == {
        "infonce": 2,
        "dcl": 1,
    }
    assert found["advice"][0].endswith("infonce and another loss need finished runs with the same seed.")


def test_the_same_records_make_the_same_files(tmp_path):
    page, _ = made(tmp_path, "infonce", "dcl", seeds=[7, 21])
    before = {path.name: path.read_bytes() for path in page.parent.rglob("*.*")}
    compare(out=tmp_path, table_only=True)
    assert {path.name: path.read_bytes() for path in page.parent.rglob("*.*")} == before


def test_a_try_without_a_finite_validation_figure_is_left_out(tmp_path, capsys):
    made(tmp_path, "infonce", "dcl", seeds=[7, 21])
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    (bad,) = [line for line in lines if "dcl_temperature-0.1_" in line["run"] and "seed_7" in line["run"]]
    bad["evaluation.json"] |= {"linear_validation_mean": math.nan, "linear_test_mean": math.nan}
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    page = compare(out=tmp_path, table_only=True)
    found = json.loads((page.parent / "compare.json").read_text(), parse_constant=pytest.fail)
    assert {line["loss"]: line["settings"] for line in found["losses"]}["dcl"] == "temperature 0.2"
    assert len(found["best_of"]["dcl"]) == 1
    assert (
        f"left out of the choice: {bad['run']}, its linear_validation_mean is nan" in capsys.readouterr().err
    )


def test_a_loss_of_which_no_try_can_be_chosen_says_why(tmp_path):
    """So far four seeds were missing "at the try to be chosen", as if the same command would run them."""
    made(tmp_path, "infonce", "dcl", "hcl", seeds=[7, 21])
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    for line in lines:
        if "/dcl_" in line["run"]:
            line["evaluation.json"]["linear_validation_mean"] = math.nan
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = compare(out=tmp_path, table_only=True)
    found = json.loads((page.parent / "compare.json").read_text())
    assert found["missing"] == [
        "dcl: no try can be chosen, since none has a finite validation figure of linear accuracy"
    ]
    assert "no try can be chosen" in page.read_text()
    assert not any("Unfinished" in line for line in found["advice"])


def test_a_truncated_file_is_named(tmp_path):
    made(tmp_path, "infonce", "dcl", seeds=[7, 21])
    line = json.loads((tmp_path / "runs.jsonl").read_text().splitlines()[0])
    folder = tmp_path / "runs" / line["run"]
    folder.mkdir(parents=True)
    for name in ("run.yaml", "evaluation.json", "made.json"):
        (folder / name).write_text(json.dumps(line[name]))
    (folder / "cost.json").write_text('{"loss_ms": 1.0')
    with pytest.raises(ValueError, match=r"cost\.json is not JSON: .*; remove it"):
        compare(out=tmp_path, table_only=True)


def test_names_are_escaped(tmp_path):
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl", seeds=[7, 21])
    evil = {"=a:<script>alert(1)</script>": [{"loss.preset": "infonce", "loss.temperature": 0.33}]}
    comparison = replace(comparison, losses={**comparison.losses, **evil})
    write_comparison(comparison, tmp_path / comparison.name)
    fill(comparison, tmp_path)
    page = compare(out=tmp_path, table_only=True)
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    with (page.parent / "compare.csv").open(newline="") as file:
        names = {row["loss"] for row in csv.DictReader(file)}
    assert names == {"infonce", "dcl", "'=a:<script>alert(1)</script>"}  # no formula


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"losses": []}, "weince compare wants losses, such as infonce dcl: .* holds no comparison yet"),
        ({"losses": ["dcl", "dcl"]}, "every loss must be named once; got dcl twice"),
        ({"tries": 0}, "--tries must be at least 1; got 0"),
        ({"budget": 10.0, "slurm": True}, "--budget is for runs on this machine"),
        ({"budget": 0.0}, "--budget must be above 0 seconds"),
        ({"jobs": 0}, "jobs must be at least 1; got 0"),
        (
            {"losses": ["link"]},
            "^link has no tries: the weight and slope of its blend are those of one diagnosis",
        ),
        ({"table_only": True}, "none of the 6 runs of digits_tiny is in .*; wanted one .*; got no runs"),
        ({"table_only": True, "dry_run": True}, "--dry-run prints .* got it with --table-only"),
        ({"add": [Path("runs.jsonl")], "dry_run": True}, "--dry-run prints .* got it with --add"),
        ({"seeds": [7, 21, 7]}, "every seed must be named once; got 7 twice"),
        ({"seeds": 9}, "one number for --seeds is a count and must be from 1 to 4; got 9: give --seeds 1"),
    ],
)
def test_what_is_refused(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        compare(**({"losses": ["dcl"], "out": tmp_path} | options))
    assert not list(tmp_path.iterdir())  # a corrected call is not hindered


def test_a_loss_without_runs_is_no_baseline(tmp_path):
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl")
    fill(comparison, tmp_path, gains={"dcl": 9.0})
    write_comparison(comparison_of(comparison.config, "infonce", "dcl", "hcl"), tmp_path / "small")
    page = compare(out=tmp_path, table_only=True)
    row = next(
        line for line in (page.parent / "compare.md").read_text().splitlines() if line.startswith("| hcl")
    )
    assert "baseline" not in row
    assert row.count("—") == 8
    told = json.loads((page.parent / "compare.json").read_text())["advice"][1]
    assert re.search(r"dcl is better in recall at 1 \(\+.*\), vote .* \(\+.*\) and MAP@R \(\+.*\)\.", told)


def test_a_page_of_another_configuration_says_what_is_there(tmp_path):
    made(tmp_path, "infonce", "dcl", seeds=[7])
    with pytest.raises(ValueError, match=r"runs of digits_tiny is in .*; got runs of small$"):
        compare(["dcl"], config="digits_tiny", out=tmp_path, table_only=True)
    assert not (tmp_path / "digits_tiny").exists()


def test_the_table_of_the_strong_recipe_is_what_its_records_say(tmp_path):
    kept = Path(__file__).parents[3] / "research" / "results" / "strong"
    shutil.copy(kept / "runs.jsonl", tmp_path)
    named = {"config": "cifar100_resnet18", "recipe": "strong", "try_epochs": 25}
    losses = ["infonce", "dcl", "hcl", "mixture", "released", "kl_ball"]
    page = compare(losses, **named, out=tmp_path, table_only=True)
    now, before = (
        (folder / "cifar100_resnet18_strong" / "compare.md").read_text(encoding="utf-8").splitlines()
        for folder in (page.parents[1], kept)
    )
    assert now[:-1] == before[:-1]  # the last line is the command


def test_runs_that_were_tracked_are_drawn_along_the_way(tmp_path):
    page, _ = made(tmp_path, "infonce", "dcl", seeds=[7, 21])
    assert (
        "against seconds of training, as logged: the chosen settings, a mark for each run" in page.read_text()
    )

    def tracked(*votes):
        lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
        for line in lines[1:]:  # the first run is not tracked
            line["log.csv"]["vote"] = votes
        (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return compare(out=tmp_path, table_only=True).read_text()

    assert "a line for each seed" not in tracked(None, None, None, 40.0)  # one point makes no line
    text = tracked(None, 30.0, None, 40.0)
    words = "Vote of the 50 nearest neighbours on validation images against"
    assert f"{words} epochs: a line for each seed" in text
    assert f"{words} seconds of training, as logged: a line for each seed" in text
    assert "a mark for each run" not in text


def test_the_time_is_that_of_a_run_alone_if_all_losses_were_timed_on_one_machine(tmp_path):
    """Concurrent runs share the device: their logs do not compare losses."""
    made(tmp_path, "infonce", "dcl", seeds=[7, 21])
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]

    def shown(**costs):
        """The page, and the time of DCL's first epoch, whose log says two seconds."""
        for line in lines:
            line["cost.json"] = costs[line["run"].split("/")[1].partition("_")[0]]
        (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        comparison = read_comparison(tmp_path / "small" / "comparison.yaml")
        runs = (
            plan(comparison.tries_table(), tmp_path),
            plan(comparison.seeds_table({"infonce": 0, "dcl": 0}), tmp_path),
        )
        done = {run.name: Done(run, record(run)) for run in itertools.chain(*runs)}
        summary = summarise(comparison, *runs, done)
        one = next(one for one in summary.final if one.run.loss == "dcl")
        axis, time = time_of(summary)
        return compare(out=tmp_path, table_only=True).read_text(), axis, time(one, 1, 2.0)

    cost = dict.fromkeys(("loss_ms", "loss_mib", "step_ms", "step_mib", "batch", "width"), 9.0) | {
        "hardware": "A"
    }
    timed, dcl = {**cost, "epoch_seconds": 30.0}, {**cost, "epoch_seconds": 45.0}
    page, axis, first = shown(infonce=timed, dcl=dcl)
    assert axis == "minutes of training, one run at a time"
    assert f"against {axis}: " in page
    assert first == 0.75
    alone = re.findall(r'<td class="n">9</td>\s*<td class="n">(.*?)</td>', page)
    assert sorted(alone) == ["120.0", "180.0"]  # of four epochs
    for other in (cost, {**dcl, "hardware": "B"}):
        page, axis, first = shown(infonce=timed, dcl=other)
        assert axis == "seconds of training, as logged"
        assert f"against {axis}: " in page
        assert first == 2.0


def test_text_is_not_tracked_by_an_option(tmp_path):
    config = config_in(tmp_path, TEXT)
    with pytest.raises(
        ValueError, match=r"--track is for runs on images; small is tracked as it is configured"
    ):
        compare(["dcl"], config=config, track=2, out=tmp_path)


def test_options_without_losses_change_the_comparison_that_is_there(tmp_path):
    made(tmp_path, "infonce", "dcl", seeds=[7, 21])
    page = compare(out=tmp_path, table_only=True, seeds=[63], baseline="dcl", level_within=50.0)
    kept = read_comparison(page.parent / "comparison.yaml")
    assert (kept.baseline, kept.seeds, kept.level_within) == ("dcl", [7, 21, 63], 50.0)
    found = json.loads((page.parent / "compare.json").read_text())
    words = {line["loss"]: line["figures"]["linear"]["word"] for line in found["losses"]}
    assert words == {"dcl": "baseline", "infonce": "level"}
    assert found["advice"][0].startswith("Stay with dcl (temperature 0.1)")
    # A further loss leaves them as they are.
    page = compare(["hcl"], config=kept.config, tries=2, out=tmp_path, table_only=True)
    kept = read_comparison(page.parent / "comparison.yaml")
    assert (kept.baseline, kept.seeds, kept.level_within) == ("dcl", [7, 21, 63], 50.0)
    assert list(kept.losses) == ["infonce", "dcl", "hcl"]
    for options in ({"tries": 2}, {"try_epochs": 1}, {"set": {"batch": 128}}):
        with pytest.raises(ValueError, match="wants the losses that it is for, such as infonce dcl"):
            compare(out=tmp_path, table_only=True, **options)
