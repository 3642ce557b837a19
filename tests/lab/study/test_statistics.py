"""From records to a table: choice by validation, intervals over encoders, paired seeds, and the files."""

import csv
import math
from html.parser import HTMLParser

import pytest
import yaml
from lab.study.tables import small_table
from scipy import stats

from weince.intervals import t_interval
from weince.lab.study import table_page as pages
from weince.lab.study.plan import plan
from weince.lab.study.statistics import Done, TableLines, fill_table
from weince.lab.study.table import read_table
from weince.lab.tasks.images.evaluation.protocol import paired_test

MADE = {"hardware": "a <machine>", "commit": "0.1", "seconds": 3.0, "command": "weince train"}


def table_of(tmp_path, **changes):
    path = small_table(tmp_path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    return read_table(str(path))


def record(validation, test, **more):
    return {
        "linear_validation_mean": validation,
        "linear_test_mean": test,
        "r1_validation_mean": validation,
        "r1_test_mean": test - 10,
        "data": "digits",
        "fingerprint": "0123",
        "made": MADE,
        **more,
    }


TUNED = {
    "tries": [{"loss.temperature": 0.5}, {"loss.temperature": 0.2}],
    "choose_by": "linear",
    "seeds": [7, 21, 63],
}
# (loss, try, seed) -> validation, test. The second try of the paper's loss wins on test and loses on validation.
PLANTED = {
    ("InfoNCE", 0, 7): (50, 51), ("InfoNCE", 0, 21): (52, 50), ("InfoNCE", 0, 63): (51, 52),
    ("InfoNCE", 1, 7): (53, 54), ("InfoNCE", 1, 21): (54, 52), ("InfoNCE", 1, 63): (52, 53),
    ("paper", 0, 7): (55, 53), ("paper", 0, 21): (54, 55), ("paper", 0, 63): (56, 54),
    ("paper", 1, 7): (50, 90), ("paper", 1, 21): (51, 91), ("paper", 1, 63): (52, 92),
}  # fmt: skip


def aggregate(table, runs, records):
    """The lines of a table whose records are here by folder."""
    done = {run.name: Done(run, records[run.folder]) for run in runs if run.folder in records}
    return fill_table(table, runs, done)


def planted(tmp_path):
    table = table_of(tmp_path, **TUNED)
    runs = plan(table, tmp_path)
    return table, runs, {run.folder: record(*PLANTED[run.loss, run.try_number, run.seed]) for run in runs}


def line_of(lines, figure, loss, tried=None):
    (found,) = [x for x in lines if (x.figure, x.loss) == (figure, loss) and tried in (None, x.tried)]
    return found


def test_the_planted_winner_on_test_is_not_chosen(tmp_path):
    summary = aggregate(*planted(tmp_path))
    chosen = {line.loss: line.tried for line in summary.chosen if line.figure == "linear"}
    assert chosen == {"InfoNCE": "temperature 0.2", "paper": "temperature 0.5"}
    assert line_of(summary.tries, "linear", "paper", "temperature 0.2").measured.mean == 91  # still listed


def test_figures_are_means_over_encoders_and_pairs_of_seeds(tmp_path):
    summary = aggregate(*planted(tmp_path))
    ours = line_of(summary.chosen, "linear", "paper")
    assert ours.measured == t_interval([53, 55, 54])
    assert ours.validation == 55
    assert ours.against == paired_test([53, 55, 54], [54, 52, 53])  # against the baseline's chosen try
    base = line_of(summary.chosen, "linear", "InfoNCE")
    assert base.measured == t_interval([54, 52, 53])
    assert base.against is None
    assert line_of(summary.chosen, "r1", "paper").measured.mean == 44  # same runs, other figure


def test_the_spread_between_seeds_is_pooled_over_configurations(tmp_path):
    summary = aggregate(*planted(tmp_path))
    opening, *notes = pages.spread_notes(summary)
    assert "pooled over the configurations with two seeds or more" in opening
    assert [note.split(",")[0] for note in notes] == ["Linear probe", "Recall at 1"]
    # Each of the four configurations has test values 1 apart: a variance of 1 with 2 degrees of freedom.
    half = stats.t.ppf(0.975, 8) / math.sqrt(3)
    assert "seeds is 1.00 (4 configurations, 8 degrees of freedom)" in notes[0]
    assert f"with 3 seeds, a mean is known to ± {half:.2f}, and a difference of two means below" in notes[0]
    assert f"below {math.sqrt(2) * half:.2f} is not significant" in notes[0]
    first, *others = summary.tries
    mixed = TableLines((), (first._replace(measured=t_interval([53, 54])), *others))
    assert "with 2 seeds, a mean" in pages.spread_notes(mixed)[1]  # for each number of seeds
    assert "with 3 seeds, a mean" in pages.spread_notes(mixed)[1]
    alone = TableLines(summary.chosen[:1], summary.tries[:1])
    assert pages.spread_notes(alone) == []  # nothing to pool
    twice = TableLines(summary.chosen, summary.tries + summary.tries)
    assert pages.spread_notes(twice) == [opening, *notes]  # shared runs count once
    still = [x._replace(measured=x.measured._replace(half=0.0)) for x in summary.tries]
    assert pages.spread_notes(TableLines((), tuple(still))) == []


def test_reported_stands_beside_the_chosen_and_beside_the_first_try(tmp_path):
    table = read_table("linear")
    runs = plan(table, tmp_path, only=["cifar100_resnet18"])
    records = {run.folder: record(50 + run.try_number, 50) for run in runs}
    summary = aggregate(table, runs, records)
    assert {line.loss: line.reported.mean for line in summary.chosen} == {
        "InfoNCE": 50.01,
        "WEINCE paper": 53.28,
        "WEINCE released": 53.28,
    }
    assert {line.tried for line in summary.chosen} == {"temperature 0.2"}
    assert {line.tried: line.reported is not None for line in summary.tries} == {
        "temperature 0.5": True,
        "temperature 0.2": False,
    }


def test_a_sweep_under_way_is_compared_on_shared_seeds(tmp_path):
    table, runs, _ = planted(tmp_path)
    # Seed 7 is hard and the second try lacks it so far, so the second try has the better mean.
    done = {
        ("paper", 0, 7): (40, 41),
        ("paper", 0, 21): (60, 61),
        ("paper", 1, 21): (55, 99),
        ("InfoNCE", 0, 21): (50, 50),
    }
    records = {r.folder: record(*done[k]) for r in runs if (k := (r.loss, r.try_number, r.seed)) in done}
    summary = aggregate(table, runs, records)
    ours = line_of(summary.chosen, "linear", "paper")
    assert ours.tried == "temperature 0.5"
    # The column shows the mean over all seeds of a try, so the page must say which seeds decided.
    assert ours.validation < line_of(summary.tries, "linear", "paper", "temperature 0.2").validation
    chosen, against = pages.reading_notes(summary, table.choose_by)[1:3]
    assert "of linear over the seeds that all of its tries have" in chosen
    assert against.startswith("Against the baseline: paired over the seeds that both have")
    assert pages.reading_notes(summary, "")[1] == against  # no note on choosing without a choice
    assert (ours.measured.n, ours.planned) == (2, 3)
    assert ours.against == paired_test([61], [50])  # 21 is the only shared seed
    assert pages.cells(ours)[5:8] == (
        "2 of 3",
        "50.00",
        "+11.00 (n = 1)",
    )  # n is 2, but one pair is shared


def chosen_of_two(tmp_path, done, **changes):
    """The try of the paper's loss that is chosen from these records."""
    table = table_of(tmp_path, **TUNED | changes)
    runs = plan(table, tmp_path)
    records = {r.folder: done[k] for r in runs if (k := (r.loss, r.try_number, r.seed)) in done}
    return line_of(aggregate(table, runs, records).chosen, "linear", "paper").tried


@pytest.mark.parametrize("validation", [50, math.nan])
def test_the_one_try_that_is_begun_is_shown(tmp_path, validation):
    assert chosen_of_two(tmp_path, {("paper", 1, 7): record(validation, 50)}) == "temperature 0.2"


def test_without_its_baseline_a_loss_is_compared_with_nothing(tmp_path):
    table = table_of(tmp_path)
    runs = plan(table, tmp_path, only=["*/paper"])
    (line, _) = aggregate(table, runs, {run.folder: record(50, 51) for run in runs}).chosen
    assert (line.loss, line.measured.n, line.against) == ("paper", 2, None)


def test_tries_that_share_no_seed_yet_are_compared_all_the_same(tmp_path):
    done = {("paper", 0, 7): record(50, 90), ("paper", 1, 21): record(51, 50)}
    assert chosen_of_two(tmp_path, done) == "temperature 0.2"


@pytest.mark.parametrize(("other", "chosen"), [(50.0, "temperature 0.2"), (math.nan, "temperature 0.5")])
def test_a_try_without_a_validation_figure_is_not_chosen(tmp_path, other, chosen):
    done = {("paper", 0, 7): record(math.nan, 50), ("paper", 1, 7): record(other, 50)}
    assert chosen_of_two(tmp_path, done) == chosen


def test_the_choice_is_by_the_figure_that_was_asked_for(tmp_path):
    done = {
        ("paper", 0, 7): record(50, 50, r1_validation_mean=30),
        ("paper", 1, 7): record(60, 60, r1_validation_mean=20),
    }
    assert chosen_of_two(tmp_path, done, choose_by="r1") == "temperature 0.5"
    assert chosen_of_two(tmp_path, done, choose_by="linear") == "temperature 0.2"


def test_nothing_done_yet(tmp_path):
    table, runs, _ = planted(tmp_path)
    summary = aggregate(table, runs, {})
    assert all(line.measured is None and line.against is None for line in summary.chosen)
    assert {pages.cells(line)[5] for line in summary.chosen} == {"0 of 3"}


def test_a_link_that_could_not_be_fitted_counts_out(tmp_path):
    table = read_table("link")
    runs = plan(table, tmp_path, only=["cifar100_resnet18"])
    values = [0.5, math.nan, 0.4, 0.6]
    records = {
        run.folder: {"link_lam": v, "link_gain": 0.2, "link_ratio": 1.2, "made": MADE}
        for run, v in zip(runs, values, strict=True)
    }
    (line,) = [line for line in aggregate(table, runs, records).chosen if line.figure == "link_lam"]
    assert line.measured == t_interval([0.5, 0.4, 0.6])
    assert pages.cells(line)[3:6] == ("0.495 ± 0.011", "0.500 ± 0.248", "3 of 4")


def test_a_figure_that_is_newer_than_a_record_counts_out(tmp_path):
    table = table_of(tmp_path, figures=["linear", "map_r"], seeds=[7, 21])
    runs = plan(table, tmp_path)
    newer = {run.folder: {"map_r_test_mean": 12.0} if run.seed == 21 else {} for run in runs}
    records = {folder: record(50, 51, **more) for folder, more in newer.items()}
    chosen = aggregate(table, runs, records).chosen
    assert line_of(chosen, "map_r", "paper").measured == t_interval([12.0])
    assert line_of(chosen, "linear", "paper").measured.n == 2


def test_a_figure_that_is_text_is_named_with_its_run(tmp_path):
    """Somebody edited the record; so far 'could not convert string to float' did not say which."""
    table = table_of(tmp_path, seeds=[7])
    runs = plan(table, tmp_path)
    records = {run.folder: record(50, 51) for run in runs}
    records[runs[1].folder]["linear_test_mean"] = "hello"
    said = rf"runs.jsonl: linear_test_mean must be a number; got 'hello', in the run {runs[1].name}$"
    with pytest.raises(ValueError, match=said):
        aggregate(table, runs, records)


class Text(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def page_of(tmp_path, **changes):
    table, runs, records = planted(tmp_path)
    facts = {
        "tuning budget": "2 tries",
        "hardware": "<script>alert(1)</script>",
        "commit": "0.1",
        "command": "w | x",
    }
    summary = aggregate(table, runs, records)
    page = pages.TablePage(
        table.title, table.opening, table.baseline, summary, facts, ["a <b>run</b> failed"]
    )
    return page, [Done(run, records[run.folder]) for run in runs]


def test_the_files_of_a_table(tmp_path):
    page, made = page_of(tmp_path)
    index = pages.write_table(page, tmp_path / "out", made)
    folder = index.parent
    assert sorted(p.name for p in folder.iterdir()) == [
        "index.html",
        "runs.csv",
        "table.csv",
        "table.md",
        "tries.csv",
    ]
    rows = list(csv.DictReader((folder / "table.csv").open(newline="")))
    ours = next(row for row in rows if (row["figure"], row["loss"]) == ("linear", "paper"))
    assert float(ours["measured"]) == 54.0
    assert float(ours["half"]) == t_interval([53, 55, 54]).half
    assert (ours["n"], ours["planned"], ours["reported"], ours["tuning_budget"]) == ("3", "3", "", "2 tries")
    assert ours["pairs"] == "3"
    assert len(list(csv.DictReader((folder / "tries.csv").open(newline="")))) == 8
    runs = list(csv.DictReader((folder / "runs.csv").open(newline="")))
    assert len(runs) == 12
    assert {row["seed"] for row in runs} == {"7", "21", "63"}
    assert {row["linear_test_mean"] for row in runs} == {str(test) for _, test in PLANTED.values()}


def test_the_papers_figures_in_the_files(tmp_path):
    table = read_table("linear")
    runs = plan(table, tmp_path, only=["cifar100_resnet18"])
    summary = aggregate(table, runs, {run.folder: record(50, 51) for run in runs})
    pages.write_table(
        pages.TablePage(table.title, table.opening, table.baseline, summary, {}), tmp_path / "out"
    )
    rows = csv.DictReader((tmp_path / "out" / "table.csv").open(newline=""))
    assert {row["loss"]: (row["reported"], row["reported_half"]) for row in rows} == {
        "InfoNCE": ("50.01", "0.19"),
        "WEINCE paper": ("53.28", "0.28"),
        "WEINCE released": ("53.28", "0.28"),
    }


def test_the_page_escapes_what_it_is_given(tmp_path):
    page, _ = page_of(tmp_path)
    shown = Text(pages.document(page).html())
    assert "script" not in shown.tags
    assert "digits" not in shown.tags
    assert any("<script>alert(1)</script>" in text for text in shown.text)
    assert any("a <b>run</b> failed" in text for text in shown.text)
    assert any("Two losses on <digits> | %" in text for text in shown.text)


def test_markdown_keeps_its_columns(tmp_path):
    page, _ = page_of(tmp_path)
    text = pages.markdown(page)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {len(pages.HEADER)}  # none reported
    assert "\\<script\\>" in text
    assert (
        "| digits\\_small | paper | temperature 0.5 | 54.00 ± 2.48 | 3 | 55.00 | +1.00 ± 4.97 | 0.478 |"
        in text
    )


def test_every_cell_is_under_its_heading(tmp_path):
    table = read_table("linear")
    runs = plan(table, tmp_path, only=["cifar100_resnet18"])
    summary = aggregate(table, runs, {run.folder: record(50, 51 + run.seed / 100) for run in runs})
    (drawn,) = pages.by_figure(summary.chosen)
    assert dict(zip(drawn.header, [cell.text for cell in drawn.rows[1]], strict=True)) == {
        "row": "cifar100_resnet18",
        "loss": "WEINCE paper",
        "settings": "temperature 0.5",
        "reported": "53.28 ± 0.28",
        "measured": "51.44 ± 0.57",
        "n": "4",
        "validation": "50.00",
        "against the baseline": "+0.00 ± 0.00",
        "p": "1.000",
    }
