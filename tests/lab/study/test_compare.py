"""Whole comparisons: trained, killed at three points, resumed, limited by a budget; and the page in a browser."""

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import tutorials
from diagnose.browser import sound_page
from lab.study.made import CONFIG, compare, comparison_of, config_in, digits, files_of, fill, value_of
from programs import Program

import weince.lab.study.compare as lab_compare
import weince.lab.study.study as lab_study
from weince.cli import main
from weince.lab.study import cost, process
from weince.lab.study.choice_study import ChoiceStudy
from weince.lab.study.clock import Clock
from weince.lab.study.comparison import read_comparison, write_comparison
from weince.lab.study.local import LATE
from weince.lab.study.records import add_records
from weince.lab.study.study import Execution


@pytest.fixture
def config(tmp_path):
    """A configuration with two short epochs."""
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG.replace("epochs: 4", "epochs: 2"))
    return str(path)


def command(config, out):
    return ["compare", "infonce", "dcl", "--config", config, "--tries", "2", "--seeds", "2", "--jobs", "2",
            "--device", "cpu", "--out", str(out)]  # fmt: skip


def told(folder):
    """The JSON file of a comparison, without timings and the command."""
    found = json.loads((folder / "compare.json").read_text())
    for line in found["losses"]:
        del line["cost"], line["train_seconds"]
    for run in found["runs"]:
        del run["train_seconds"]
    del found["facts"]["command"]
    return found


@pytest.mark.long
def test_the_comparison_of_the_tutorial(tmp_path, monkeypatch):
    """Four runs on digits from end to end; a copy of only their records gives the same page."""
    monkeypatch.chdir(tmp_path)
    tutorials.check(Path(__file__).parents[3] / "docs" / "tutorials" / "compare-digits.ipynb")
    out, copy = tmp_path / "compared", tmp_path / "copy"
    found = json.loads((out / "digits_tiny" / "compare.json").read_text())
    assert [run["counts"] for run in found["runs"]] == [True] * 4
    assert found["missing"] == []
    for line in found["losses"]:
        assert line["cost"]["loss_ms"] > 0
        assert line["cost"]["step_mib"] > line["cost"]["loss_mib"] > 0
        assert "CPU, torch" in line["cost"]["hardware"]
        assert line["figures"].keys() == {"linear", "r1", "knn", "map_r"}
    (copy / "digits_tiny").mkdir(parents=True)
    shutil.copy(out / "runs.jsonl", copy)
    shutil.copy(out / "digits_tiny" / "comparison.yaml", copy / "digits_tiny")
    compare(out=copy, table_only=True)
    assert told(copy / "digits_tiny") == told(out / "digits_tiny")
    assert (copy / "digits_tiny" / "compare.csv").read_text() == (
        out / "digits_tiny" / "compare.csv"
    ).read_text()


# A short process replaces training and measuring; the figures in its record depend on the run.
QUICK = """
import json, sys
sys.path.insert(0, {tests!r})
from lab.study.made import files_of, value_of
from weince.lab.study import cost
from weince.lab.study import process
from weince.lab.study.clock import Clock
def commands(run):
    files = files_of(run, value_of(run, {{}}), fingerprint={digits!r})
    texts = {{name: json.dumps(files[name]) for name in ("run.yaml", "evaluation.json")}}
    return [[sys.executable, "-S", "-c", {write!r}, str(run.folder), json.dumps(texts)]]
process.commands = commands
costs = dict(loss_ms=1.0, loss_mib=1.0, step_ms=2.0, step_mib=2.0, batch=9, width=9, hardware="a CPU")
cost.measure_costs = lambda runs: (costs for _ in runs)
from weince.cli import main
sys.exit(main(sys.argv[1:]))
"""
# It waits for a file of another run, if it is told so.
WRITE = """
import json, os, pathlib, sys, time
folder, files, waits_for = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
(folder / "begun").touch()
(folder / "model.safetensors").touch()
time.sleep(0.3)
until = time.monotonic() + 20
while waits_for and not list(folder.parents[1].glob(waits_for[0])):
    time.sleep(0.01)
    if time.monotonic() > until: sys.exit(f"{waits_for[0]} does not come")
for name, content in files.items():
    part = folder / (name + ".part")
    part.write_text(content)
    os.replace(part, folder / name)
"""


def started(config, out):
    tests = str(Path(__file__).parents[2])
    return Program("-c", QUICK.format(tests=tests, write=WRITE, digits=digits()), *command(config, out))


def wait_until(happened, program, seconds=120.0):
    until = time.monotonic() + seconds
    while not happened():
        assert program.poll() is None, program.wait()
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.posix
def test_killed_at_three_points_it_ends_with_the_same_page(tmp_path, config):
    """The points: while the first tries run, after the first try is done, and while a second seed runs."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = started(config, whole).wait()
    assert done.returncode == 0, done.stderr
    points = (
        lambda: any(cut.glob("runs/*/*/seed_7/begun")),
        lambda: any(cut.glob("runs/*/*/seed_7/made.json")),
        lambda: any(cut.glob("runs/*/*/seed_21/begun")),
    )
    for point, number in zip(points, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT), strict=True):
        program = started(config, cut)
        wait_until(point, program)
        program.send_signal(number)
        assert program.wait().returncode != 0
        assert not (cut / "small" / "index.html").exists()
    done = started(config, cut).wait()
    assert done.returncode == 0, done.stderr
    pages = [(folder / "small" / "index.html").read_text() for folder in (whole, cut)]
    assert pages[0].replace("--out whole", "--out cut") == pages[1]
    assert len(told(cut / "small")["runs"]) == 2 * 2 + 2  # the chosen try is also the first seed


def test_final_runs_of_a_loss_do_not_wait_for_the_tries_of_another(tmp_path, config, monkeypatch, capsys):
    """The last try of DCL waits until a second seed of InfoNCE has begun."""

    def commands(run):
        files = files_of(run, value_of(run, {}), fingerprint=digits())
        texts = {name: json.dumps(files[name]) for name in ("run.yaml", "evaluation.json")}
        last = run.loss == "dcl" and run.try_number == 1
        waits_for = ["infonce_*/seed_21/begun"] if last else []
        return [[sys.executable, "-S", "-c", WRITE, str(run.folder), json.dumps(texts), *waits_for]]

    monkeypatch.setattr(process, "commands", commands)
    monkeypatch.setattr(cost.CostJob, "__call__", lambda self: None)
    assert main(command(config, tmp_path)) == 0
    assert json.loads((tmp_path / "small" / "compare.json").read_text())["missing"] == []
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("runs: ")]
    assert lines[-1].startswith("runs: 6 of 6, done ")
    assert len(lines) == 1 + 2 * 6  # the start; each run begins and ends


def test_final_runs_wait_by_seed(tmp_path, config):
    """If time runs out, losses have runs with the same seeds."""
    comparison = comparison_of(config, "infonce", "dcl", seeds=[7, 63, 21])
    sweep, waiting = ChoiceStudy(comparison, tmp_path, Execution()), []
    for loss in comparison.losses:
        tries = [run for run in sweep.tries if run.loss == loss]
        add_records(tmp_path, {run.name: files_of(run, 50.0) for run in tries})
        waiting = sweep.further(waiting, {})
    final = [(run.seed, run.loss) for run in waiting if run.seed != 7]
    assert final == [(63, "infonce"), (63, "dcl"), (21, "infonce"), (21, "dcl")]


def test_a_comparison_that_goes_on_starts_no_run_of_a_choice_that_is_open(tmp_path, config, monkeypatch):
    """The best of the tries that are done so far need not be the best of all; and no run starts twice."""
    comparison, started = comparison_of(config, "infonce", "dcl", seeds=[7, 21]), []
    study = ChoiceStudy(comparison, tmp_path, Execution())
    open_ = next(run for run in study.tries if (run.loss, run.try_number) == ("dcl", 1))
    records = {run.name: files_of(run, 50.0 - run.try_number) for run in study.tries if run is not open_}
    add_records(tmp_path, records)
    monkeypatch.setattr(lab_study, "run_here", lambda runs, **_: started.extend(runs) or {})
    study.fill(study.tries, jobs=1, total=study.total())
    assert [(run.loss, run.seed) for run in started] == [("dcl", 7), ("infonce", 21)]
    assert started[0].name == open_.name


def test_archives_are_asked_once_for_the_tries(tmp_path, config, capsys):
    comparison = comparison_of(config, "infonce", "dcl", seeds=[7, 21])
    fill(comparison_of(config, "hcl", seeds=[7]), tmp_path / "other")
    sweep = ChoiceStudy(comparison, tmp_path, Execution(), reuse=[tmp_path / "other"])
    sweep.take_over(look=False, write=True)
    sweep.further(sweep.tries, {})
    assert capsys.readouterr().err == "0 of 4 missing runs are in the archives\n"


@pytest.mark.parametrize(("try_epochs", "total"), [(None, 6), (1, 8), (2, 6)])
def test_a_try_of_full_length_is_also_a_final_run(tmp_path, config, try_epochs, total):
    comparison = comparison_of(config, "infonce", "dcl", seeds=[7, 21], try_epochs=try_epochs)
    assert ChoiceStudy(comparison, tmp_path, Execution()).total() == total


def test_a_budget_that_is_too_small_starts_nothing_and_says_what_is_missing(tmp_path, config, capsys):
    comparison = comparison_of(config, "infonce", "dcl", seeds=[7, 21])
    write_comparison(comparison, tmp_path / comparison.name)
    fill(comparison, tmp_path, seeds=False, fingerprint=digits())
    assert main(["compare", "infonce", "dcl", "--config", config, "--tries", "2", "--seeds", "2", "--device", "cpu",
                 "--budget", "1s", "--out", str(tmp_path)]) == 0  # fmt: skip
    said = capsys.readouterr().err
    assert said.count(LATE) == 2
    assert "missing: dcl, temperature 0.1: seed 21" in said
    assert not list(tmp_path.glob("runs/*/*/*/log.csv"))
    rows = list(csv.DictReader((tmp_path / "small" / "compare.csv").open(newline="")))
    assert {row["seeds"] for row in rows} == {"1"}


def test_few_images_are_taken_to_be_evaluated_in_a_short_time(tmp_path, config):
    """20 seconds were added to every run, so a budget of 20 seconds started nothing, though a run takes 3."""
    sweep = ChoiceStudy(comparison_of(config, "infonce", seeds=[7]), tmp_path, Execution(device="cpu"))
    clock, cost = sweep.start_clock(0.0, 1)
    assert 0.0 < clock.overhead - cost["start_seconds"] < 1.0


def test_a_budget_in_which_no_run_ends_says_so(tmp_path, config, capsys):
    assert main([*command(config, tmp_path), "--budget", "1s"]) == 2
    said = "weince: no run is done, and none would end within --budget: give more time\n"
    assert capsys.readouterr().err.endswith(said)
    assert not (tmp_path / "small" / "index.html").exists()


def test_a_dry_run_prints_runs_and_time(tmp_path, config, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    comparison = comparison_of(config, "infonce", "dcl", seeds=[7, 21])
    fill(comparison_of(config, "infonce", seeds=[7, 21]), tmp_path, fingerprint=digits())
    assert main([*command(config, tmp_path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count(" done ") == len(comparison.losses["infonce"]) + 1
    assert said.count(" to do ") == 2
    assert "5 runs, and 1 seed at the choice of dcl; 3 to do." in said
    assert re.search(r"About \d+ minutes? here, 2 at once: an epoch takes", said)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(("left", "said"), [(1, "12 minutes"), (2, "12 minutes"), (3, "18 minutes")])
def test_the_time_of_a_dry_run_is_that_of_runs_beside_each_other(
    tmp_path, config, capsys, monkeypatch, left, said
):
    """Each of 2 cores takes 732 s for a run; one run was announced as if both worked on it."""
    clock = Clock(0.0, overhead=600.0, epoch=60.0, side_by_side=2)
    cost = {"epoch_seconds": 60.0, "hardware": "a CPU"}
    monkeypatch.setattr(ChoiceStudy, "start_clock", lambda *_: (clock, cost))
    sweep = ChoiceStudy(comparison_of(config, "infonce", "dcl", seeds=[7]), tmp_path, Execution(device="cpu"))
    sweep.in_archives = {run.name: {} for run in sweep.tries[left:]}
    monkeypatch.setattr(ChoiceStudy, "seeds", lambda *_: sweep.tries)
    sweep.show(2)
    assert f"About {said} here, 2 at once" in capsys.readouterr().out


COUNTING = """
from pathlib import Path
import torch
import weince

class Loss(weince.DCLLoss):
    def forward(self, *views):
        Path("threads").write_text(str(torch.get_num_threads()))
        return super().forward(*views)
"""


def test_steps_are_timed_with_the_threads_of_a_run(tmp_path, config, monkeypatch):
    """With those of the machine, a step takes many times as long while another program runs."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    loss = "counting:Loss"
    assert main(["compare", loss, "infonce", "--baseline", loss, "--config", config, "--device", "cpu",
                 "--jobs", str(os.cpu_count()), "--out", "out", "--dry-run"]) == 0  # fmt: skip
    assert Path("threads").read_text() == "1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "2 hours"], "--budget must be a number with s, m or h, such as 2h; got 2 hours"),
        (["--set", "precision"], "--set wants NAME=VALUE; got precision"),
        (["--slurm-options", "time=9"], "--slurm-options wants --slurm too"),
        (["--set", "presision=bf16", "--dry-run"], "unrecognized arguments|presision"),
        (["--recipe", "strong"], "--recipe strong wants the configuration"),
        (
            ["--set", "epochs=1", "--set", "epochs=2"],
            "every NAME of --set must be named once; got epochs twice",
        ),
        (["--set", "epochs=[1"], "--set epochs wants a value in YAML, such as 50 or [1, 2]; got [1"),
        (["--set", "epochs=0", "--try-epochs", "1"], "small, infonce: epochs must be at least 1; got 0"),
    ],
)
def test_bad_options_are_refused_in_a_line(tmp_path, config, options, said, capsys):
    assert main([*command(config, tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in said.split("|"))
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_device_that_is_not_here_is_refused_before_anything_starts(tmp_path, config, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for options in ({"device": "cuda"}, {"set": {"device": "cuda"}}):
        with pytest.raises(ValueError, match="device 'cuda' was asked for; torch finds no CUDA device"):
            compare(["infonce"], config=config, tries=1, seeds=1, jobs=1, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_data_set_that_cannot_be_had_is_told_before_anything_starts(tmp_path, config, monkeypatch):
    monkeypatch.setenv("WEINCE_DATA", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"Imagenet32_train_npz\.zip is given to registered users"):
        compare(["infonce"], config=config, tries=1, seeds=1, jobs=1, data="imagenet32", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_two_comparisons_that_start_at_once_in_a_folder_none_loses_its_losses(
    tmp_path, config, monkeypatch
):
    """The second replaced the list of losses, and no later call knew those of the first."""
    first, out = comparison_of(config, "infonce", "dcl"), tmp_path / "out"
    monkeypatch.setattr(
        ChoiceStudy, "check_machine", lambda *_, **__: write_comparison(first, out / first.name)
    )
    with pytest.raises(ValueError, match="another command has changed the comparison of small"):
        compare(["infonce", "hcl"], config=config, tries=2, device="cpu", out=out)
    assert list(read_comparison(out / "small" / "comparison.yaml").losses) == ["infonce", "dcl"]
    assert not (out / "runs").exists()


def test_of_two_comparisons_that_are_saved_at_the_same_moment_one_is_refused(tmp_path, config, monkeypatch):
    """Both looked, found nothing, and wrote: the losses of the first were lost."""
    looked = threading.Barrier(2)
    find = lab_compare.find_comparison

    def find_together(*where):
        found = find(*where)
        with contextlib.suppress(threading.BrokenBarrierError):
            looked.wait(0.5)
        return found

    monkeypatch.setattr(lab_compare, "find_comparison", find_together)
    both = [comparison_of(config, "infonce", loss) for loss in ("dcl", "hcl")]
    with ThreadPoolExecutor(2) as pool:
        saved = [pool.submit(lab_compare._save, one, None, tmp_path / "out") for one in both]
        errors = [one.exception() for one in saved]
    (first,) = [one for one, error in zip(both, errors, strict=True) if error is None]
    assert "another command has changed the comparison of small" in "".join(map(str, errors))
    assert find(tmp_path / "out", config).losses == first.losses


FAILING = """
import torch
import weince

class Forward(weince.DCLLoss):
    search_space = ({"temperature": 0.5}, {"temperature": 0.2})
    def forward(self, z_i, z_j):
        if self.temperature == 0.2:
            raise IndexError("no such row")
        return super().forward(z_i, z_j)

class Backward(torch.nn.Module):
    def forward(self, z_i, z_j):
        return (z_i - z_j).square().mean().detach()

class Tuple(torch.nn.Module):
    def forward(self, z_i, z_j):
        return (z_i - z_j).square().mean(), 3
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "Forward",
            ", temperature 0.2: the loss fails on random embeddings (256, 64): IndexError: no such row",
        ),
        (
            "Backward",
            ": a loss must have a gradient with respect to the embeddings: leave out",
        ),
        (
            "Tuple",
            ": a loss must return a tensor with one number",
        ),
    ],
)
@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["", "dry run"])
def test_a_loss_that_fails_is_refused_before_any_run_starts(
    tmp_path, config, monkeypatch, capsys, name, said, options
):
    (tmp_path / "failing_losses.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    loss = f"failing_losses:{name}"
    assert main(["compare", "infonce", loss, *command(config, tmp_path / "out")[3:], *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"weince: small, {loss}{said}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_if_all_runs_fail_the_error_says_why(tmp_path, config, monkeypatch):
    monkeypatch.setattr(process, "commands", lambda run: [[sys.executable, "-c", "exit('the reason')"]])
    with pytest.raises(
        ValueError, match=r"^1 run failed, and none is done; small/infonce.* status 1: the reason"
    ):
        compare(["infonce"], config=config, tries=1, seeds=1, jobs=1, device="cpu", out=tmp_path / "out")


# Names of losses that are broken into several lines.
BROKEN = """all => [...new Set(all.filter(th => {
    const range = document.createRange();
    range.selectNodeContents(th);
    return range.getClientRects().length > 1;
}).map(th => th.textContent))]"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page with many losses, short tries, a missing run and costs."""
    out = tmp_path_factory.mktemp("page")
    losses = "infonce", "dcl", "hcl", "released", "mixture", "kl_ball", "temperature_free"
    comparison = comparison_of(config_in(out), *losses, tries=3, try_epochs=2)
    write_comparison(comparison, out / comparison.name)
    fill(comparison, out, gains={"dcl": 1.5, "released": -4.0})
    lines = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    for line in lines:
        line["cost.json"] = {"loss_ms": 1.25, "loss_mib": 3.5, "step_ms": 40.0, "step_mib": 120.0, "batch": 256,
                             "width": 64, "hardware": "a CPU, torch 2"}  # fmt: skip
    kept = [line for line in lines if not ("kl_ball" in line["run"] and "seed_84" in line["run"])]
    (out / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    return compare(out=out, table_only=True).parent


def test_the_table_says_what_each_loss_costs(shown):
    written = (shown / "compare.md").read_text(encoding="utf-8").split("## What each loss costs")[1]
    assert "| loss | loss, ms | loss, peak MiB | step, ms | step, peak MiB | measured on |" in written
    assert "| dcl | 1.25 | 3.5 | 40.0 | 120 | a CPU, torch 2, 256 pairs of width 64 |" in written


def test_legends_of_long_names_stay_in_their_figures(tmp_path, browser):
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl", "hcl", "released", "mixture")
    names = "infonce", "losses:InfoNCE", "losses:FirstOfMine", "losses:SecondOfMine", "losses:ThirdOfMine"
    renamed = dict(zip(names, comparison.losses.values(), strict=True))
    comparison = replace(comparison, losses=renamed, seeds=[7, 21])
    write_comparison(comparison, tmp_path / comparison.name)
    fill(comparison, tmp_path)
    with sound_page(browser, compare(out=tmp_path, table_only=True).parent, 390, "light") as page:
        assert any("…" in text for text in page.locator("figure svg text").all_text_contents())


@pytest.mark.parametrize("width", [1280, 390])
def test_a_long_name_leaves_room_for_the_figures(tmp_path, browser, width):
    comparison = comparison_of(config_in(tmp_path), "infonce", "dcl", seeds=[7, 21])
    long = "our_research_package.losses.contrastive:TemperatureScheduledDecoupledLoss"
    renamed = dict(zip(("infonce", long), comparison.losses.values(), strict=True))
    comparison = replace(comparison, losses=renamed)
    write_comparison(comparison, tmp_path / comparison.name)
    fill(comparison, tmp_path)
    with sound_page(browser, compare(out=tmp_path, table_only=True).parent, width, "light") as page:
        figures = page.locator("#leaderboard tbody tr").first.locator("td.n")
        box = figures.nth(0 if width == 390 else 3).bounding_box()  # the first on a phone, else all four
        assert box["x"] + box["width"] <= width - 14


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_in_a_browser(shown, browser, width, scheme):
    with sound_page(browser, shown, width, scheme) as page:
        first = page.locator("#advice p")
        assert first.nth(0).inner_text().startswith("Use dcl (temperature 0.1): its linear accuracy is")
        assert "Unfinished" in first.nth(1).inner_text()
        assert first.nth(0).bounding_box()["y"] < 300  # the advice is at the top
        board = page.locator("#leaderboard tbody tr")
        assert board.count() == 7
        assert board.first.locator("th").inner_text() == "dcl"
        assert board.first.locator("td").nth(1).inner_text().split("\n")[1] == "better"
        assert "kl_ball, radius 1.2: seed 84" in page.locator("#missing").inner_text()
        captions = " ".join(page.locator("figcaption").all_inner_texts())
        for part in ("a dot is a seed", "against epochs", "against seconds", "best of k tries"):
            assert part in captions
        titles = page.locator("figure svg title").all_text_contents()
        assert any(t.startswith("dcl, temperature 0.1, seed 21, 4 epochs: linear 5") for t in titles)
        assert all(re.match(r"[a-z_]+, \w.*, seed \d+, [24] epochs: linear .*, R@1 ", t) for t in titles)
        assert page.locator("#temperatures td.chosen").count() >= 4
        assert page.locator("#cost tbody td").first.inner_text() == "1.25"
        assert "a CPU, torch 2, 256 pairs of width 64" in page.locator("#cost caption").inner_text()
        if width == 1280:
            page.set_viewport_size({"width": 718, "height": 1000})  # A4
            page.emulate_media(media="print")
            assert not {"infonce", "mixture"} & {*page.locator("#runs tbody th").evaluate_all(BROKEN)}
        page.locator("#runs summary").click()
        assert page.locator("#runs tbody tr").count() == 19 + 7 * 4 - 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        scrolls = page.locator("#leaderboard .numbers").evaluate("t => t.scrollWidth > t.clientWidth")
        assert scrolls is (width == 390)
        if width == 390:  # the name of a record does not break into many short lines
            heights = page.locator("#runs tbody tr").evaluate_all("rows => rows.map(row => row.offsetHeight)")
            assert max(heights) < 100


def test_a_loss_that_cannot_be_timed_costs_no_other_its_record(tmp_path, config, capsys, monkeypatch):
    from weince.lab.study.cost import RECORD, CostJob
    from weince.lab.study.plan import plan

    runs = plan(comparison_of(config, "infonce", "dcl").tries_table(), tmp_path)
    first, last = (next(run for run in runs if run.loss == loss) for loss in ("infonce", "dcl"))
    for run in (first, last):
        run.folder.mkdir(parents=True)
        (run.folder / "run.yaml").write_text("{}")
    without_data = replace(first, extra={"data": str(tmp_path / "none.npz")})
    (tmp_path / "deadly.py").write_text("import os\n\nos._exit(1)\n")  # ends the process that measures
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "error::RuntimeWarning")  # a module that is run twice warns
    deadly = replace(first, loss="deadly", extra={"encoder": "deadly:Encoder"})
    CostJob([without_data, last, deadly])()
    said = capsys.readouterr().err
    assert re.search(r"the cost of a step with infonce could not be measured: .*none\.npz", said)
    assert "the cost of a step with deadly could not be measured: its process ended with status 1: " in said
    assert not (first.folder / RECORD).exists()
    assert json.loads((last.folder / RECORD).read_text())["step_ms"] > 0
