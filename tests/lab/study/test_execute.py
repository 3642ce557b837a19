"""Runs as processes: done, failed, killed, interrupted, locked; and a small table that is interrupted."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from lab.study.made import reproduce
from lab.study.tables import small_table
from programs import Program
from programs import run as run_program

from weince.cli import INTERRUPTED
from weince.lab import settings
from weince.lab.configure import code_of
from weince.lab.study import process, provenance, records
from weince.lab.study.local import run_here
from weince.lab.study.plan import plan, settings_of
from weince.lab.study.process import Failed, Interrupted, carry_out_run
from weince.lab.study.provenance import is_done, record
from weince.lab.study.records import add_file, add_records, keep_records, read_archive, read_record
from weince.lab.study.study import Execution, Study, begin, check_same_data, data_named
from weince.lab.study.table import read_table
from weince.lab.tasks.images.data import load
from weince.lab.tasks.images.evaluation import fingerprint
from weince.lab.training import processes
from weince.progress import telling_bars


def runs_of(tmp_path):
    return plan(read_table(str(small_table(tmp_path))), tmp_path, device="cpu")


class Fixed(Study):
    """A study of these runs, and of those that ``then`` names."""

    def __init__(self, runs, out, then=None):
        super().__init__(out, Execution())
        self.runs, self.then = runs, then

    def planned(self):
        return self.runs

    def further(self, waiting, failed):
        return self.then(waiting, failed) if self.then and waiting != self.runs else waiting


def carry_out(runs, out, *, jobs=1, total=None, then=None):
    """Why runs failed."""
    study = Fixed(runs, out, then)
    study.fill(runs, jobs=jobs, total=total or len(runs))
    return study.failed


@pytest.fixture
def script(monkeypatch):
    """Replace training and measuring by a few lines of Python, in which ``folder`` is the run's folder."""

    def use(text):
        def commands(run):
            head = f"import os, pathlib, signal, sys, time; folder = pathlib.Path({str(run.folder)!r})\n"
            return [[sys.executable, "-c", head + text]]

        monkeypatch.setattr(process, "commands", commands)

    return use


WRITE = "(folder / 'model.safetensors').touch(); (folder / 'evaluation.json').write_text('{}')\n"
COUNT = """
tries = folder / 'tries'
n = len(tries.read_text()) if tries.exists() else 0
tries.write_text('x' * (n + 1))
"""


def test_one_process_on_a_cpu_trains_and_measures(tmp_path):
    run = replace(runs_of(tmp_path)[0], folder=tmp_path / "a folder")
    start = [sys.executable, "-m", "weince.lab.study.worker", str(run.folder)]
    assert process.commands(run) == [[*start, "train", "evaluation"]]
    assert process.commands(replace(run, measured_by="link")) == [[*start, "train", "link"]]


@pytest.mark.parametrize("extra", [{"device": "cuda"}, {"device": "auto"}, {"device": "cpu", "devices": 2}])
def test_training_on_a_gpu_or_in_several_processes_is_measured_by_another_process(
    tmp_path, monkeypatch, extra
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run = replace(runs_of(tmp_path)[0], extra=extra)
    assert [steps for *_, steps in process.commands(run)] == ["train", "evaluation"]


def test_a_run_is_done_once_and_signed(tmp_path, script):
    run = runs_of(tmp_path)[0]
    script(COUNT + WRITE)
    assert not is_done(run)
    carry_out_run(run)
    assert is_done(run)
    carry_out_run(run)
    assert (run.folder / "tries").read_text() == "x"
    made = record(run)["made"]
    assert "CPU, torch" in made["hardware"]
    assert made["commit"].startswith("0.")
    assert made["command"].startswith("weince train --config ")


def test_sources_from_an_archive_know_their_commit(tmp_path):
    root, copy, unpacked = Path(__file__).parents[3], tmp_path / "copy", tmp_path / "unpacked"
    shutil.copytree(root / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / ".gitattributes", copy)
    unpacked.mkdir()

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], cwd=copy, check=True, capture_output=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    subprocess.run(["tar", "-x"], cwd=unpacked, check=True, input=git("archive", "HEAD"))
    code = (
        f"import sys; sys.path.insert(0, {str(unpacked / 'src')!r})\n"
        "from weince.lab.study.provenance import commit; print(commit())"
    )
    said = run_program("-c", code, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)})
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip().endswith(f" at {git('rev-parse', 'HEAD').decode()[:12]}")


def test_other_settings_or_a_broken_result_are_not_done(tmp_path, script):
    run = runs_of(tmp_path)[0]
    script(WRITE)
    carry_out_run(run)
    assert not is_done(replace(run, key="another"))
    assert not is_done(replace(run, measured_by="link"))
    made = (run.folder / "made.json").read_text()
    for broken in ('{"command": ""}', "[3]"):
        (run.folder / "made.json").write_text(broken)
        assert not is_done(run)
    (run.folder / "made.json").write_text(made)
    run.result.write_text("{")
    assert not is_done(run)
    carry_out_run(run)
    assert is_done(run)


def test_a_second_measure_joins_the_first(tmp_path, script):
    run = runs_of(tmp_path)[0]
    link = replace(run, measured_by="link")
    script(WRITE)
    carry_out_run(run)
    script("(folder / 'link.json').write_text('{}')")
    carry_out_run(link)
    assert is_done(run)
    assert is_done(link)
    for one in (run, link):
        assert "CPU, torch" in record(one)["made"]["hardware"]
    other = replace(run, key="another")  # what was made with other settings is not signed again
    carry_out_run(other)
    assert json.loads((run.folder / "made.json").read_text())["measures"].keys() == {"evaluation"}


def test_an_error_is_told_and_not_tried_again(tmp_path, script):
    run = runs_of(tmp_path)[0]
    script(COUNT + "print('no such data'); sys.exit(2)")
    with pytest.raises(
        Failed, match=rf"{run.name} ended with status 2: no such data \(see output.txt in its folder\)$"
    ):
        carry_out_run(run)
    assert (run.folder / "tries").read_text() == "x"
    assert "no such data" in (run.folder / "error.txt").read_text()
    script(WRITE)
    carry_out_run(run)
    assert is_done(run)
    assert not (run.folder / "error.txt").exists()


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("raise RuntimeError('no room\\nTry this.')", "1: RuntimeError: no room"),
        ("raise RuntimeError", "1: RuntimeError"),
        ("sys.stderr.write(chr(10) * 2); sys.exit(3)", "3: it printed nothing"),
        ("try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError(7) from e", "1: KeyError: 7"),
        (
            "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n"
            "sys.exit('weince: no such data')",
            "1: weince: no such data",
        ),
        (  # as faulthandler prints it: no error follows; each further line doubled the time that the search took
            "print(('  File \"x.py\", line 1 in f\\n' + '    f()\\n') * 40 + '\\nmodules: x'); sys.exit(1)",
            "1: modules: x",
        ),
    ],
)
def test_the_reason_of_a_failure_is_the_first_line_of_its_error(tmp_path, script, ends, said):
    """The last line of an error of CUDA is about a variable to set; with no output it was our own line."""
    run = runs_of(tmp_path)[0]
    script(ends)
    with pytest.raises(Failed) as caught:
        carry_out_run(run)
    assert str(caught.value) == f"{run.name} ended with status {said} (see output.txt in its folder)"


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(130)"])
@pytest.mark.posix
def test_a_killed_run_is_started_again(tmp_path, script, death):
    run = runs_of(tmp_path)[0]
    script(COUNT + f"if n < 2: {death}\n" + WRITE)
    carry_out_run(run)
    assert (run.folder / "tries").read_text() == "xxx"


@pytest.mark.parametrize(
    ("death", "by"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ", by SIGKILL: is the memory full?"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", ", by SIGSEGV"),
        ("sys.exit(130)", ""),
    ],
)
@pytest.mark.posix
def test_a_run_that_is_always_killed_is_given_up(tmp_path, script, death, by):
    script(COUNT + death)
    run = runs_of(tmp_path)[0]
    with pytest.raises(Failed, match=re.escape(f"was killed 3 times{by} (see output.txt in its folder)")):
        carry_out_run(run)
    assert (run.folder / "tries").read_text() == "xxx"


def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(happened, seconds=30.0):
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)


# A process and its child, which both ignore SIGTERM.
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
(folder / f"pid_{os.getpid()}").touch()
time.sleep(600)
"""


@pytest.mark.linux
def test_stopping_ends_the_processes_even_stubborn_ones(tmp_path, script, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.5)
    run, stop = runs_of(tmp_path)[0], threading.Event()
    script(STUBBORN)

    def stop_it():
        wait_until(lambda: len(list(run.folder.glob("pid_*"))) == 2)
        stop.set()

    threading.Thread(target=stop_it).start()
    with pytest.raises(Interrupted):
        carry_out_run(run, stop)
    pids = [int(path.name.removeprefix("pid_")) for path in run.folder.glob("pid_*")]
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_two_sweeps_never_work_on_one_run_at_once(tmp_path, script):
    run = runs_of(tmp_path)[0]
    script(COUNT + "time.sleep(0.5)\n" + WRITE)
    threads = [threading.Thread(target=carry_out_run, args=(run,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (run.folder / "tries").read_text() == "x"


@pytest.mark.posix
def test_a_process_left_behind_keeps_the_lock(tmp_path, script):
    run, stop = runs_of(tmp_path)[0], threading.Event()
    script(
        "if os.fork():\n    sys.exit(3)\n(folder / 'orphan').write_text(str(os.getpid())); time.sleep(600)"
    )
    with pytest.raises(Failed):
        carry_out_run(run)
    wait_until((run.folder / "orphan").exists)
    script(WRITE)
    waiting = threading.Thread(target=carry_out_run, args=(run, stop))
    waiting.start()
    waiting.join(1.5)
    assert waiting.is_alive()  # the orphan still holds the lock
    os.kill(int((run.folder / "orphan").read_text() or 0), signal.SIGKILL)
    waiting.join(30)
    assert is_done(run)


def test_the_last_run_of_an_interrupted_sweep_has_the_threads_it_would_have_had(
    tmp_path, script, monkeypatch
):
    """Sums in another number of threads are rounded otherwise, and the run would end with other figures."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    script("(folder / 'threads').write_text(os.environ['OMP_NUM_THREADS'])\n" + WRITE)
    runs = runs_of(tmp_path)
    assert run_here(runs[1:], jobs=2, tell=lambda run, what: None) == {}
    assert carry_out(runs, tmp_path, jobs=2) == {}
    assert {(run.folder / "threads").read_text() for run in runs} == {"4"}


def test_fewer_runs_than_jobs_share_all_of_the_machine(tmp_path, script, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    script("(folder / 'threads').write_text(os.environ['OMP_NUM_THREADS'])\n" + WRITE)
    runs = runs_of(tmp_path)[:2]
    assert carry_out(runs, tmp_path, jobs=8) == {}
    assert {(run.folder / "threads").read_text() for run in runs} == {"4"}


def test_failures_do_not_stop_the_others(tmp_path, script):
    runs = runs_of(tmp_path)
    script("if 'seed_21' in str(folder) and 'paper' in str(folder): sys.exit('broken')\n" + WRITE)
    told = []
    failed = run_here(runs, jobs=2, tell=lambda run, what: told.append((run.name, what)))
    bad = next(run for run in runs if run.loss == "paper" and run.seed == 21)
    assert list(failed) == [bad.name]
    assert "broken" in failed[bad.name]
    assert [is_done(run) for run in runs] == [run is not bad for run in runs]
    assert sorted(what for _, what in told) == ["done"] * 3 + ["failed"] + ["started"] * 4


def test_further_runs_start_when_others_end(tmp_path, script):
    """The first run waits for the third, which is named when the second has ended; the fourth is done already."""
    first, second, third, fourth = runs_of(tmp_path)
    script(WRITE)
    carry_out_run(fourth)
    begun = str(third.folder / "begun")
    script(f"""
(folder / "begun").touch()
while folder == pathlib.Path({str(first.folder)!r}) and not pathlib.Path({begun!r}).exists():
    time.sleep(0.01)
if folder == pathlib.Path({str(second.folder)!r}): sys.exit("broken")
""" + WRITE)  # fmt: skip
    named, calls = [[third, fourth]], []

    def then(waiting, failed):
        calls.append(list(failed))
        return waiting + (named.pop() if named else [])

    failed = carry_out([first, second], tmp_path, jobs=2, then=then, total=4)
    assert list(failed) == [second.name]
    assert calls == [[second.name]] * 3
    assert all(is_done(run) for run in (first, third))
    assert not (fourth.folder / "begun").exists()


def test_a_table_with_failed_runs_is_written_and_says_so(tmp_path, script, capsys):
    table = small_table(tmp_path)
    figures = {f"{name}_{kind}_mean": 50.0 for name in ("linear", "r1") for kind in ("validation", "test")}
    text = json.dumps({**figures, "data": "digits", "fingerprint": "01"})
    script(
        f"if 'paper' in str(folder): sys.exit('broken')\n{WRITE}(folder / 'evaluation.json').write_text({text!r})"
    )
    with pytest.raises(
        ValueError, match=r"2 of 4 runs failed, the table without them is .*index.html; .*broken"
    ):
        reproduce(str(table), out=tmp_path, device="cpu")
    markdown = (tmp_path / "small" / "table.md").read_text()
    assert "| digits\\_small | InfoNCE | as configured | 50.00 ± 0.00 | 2 |" in markdown
    assert "| digits\\_small | paper | as configured | — | 0 of 2 |" in markdown
    assert markdown.count("broken") == 2
    capsys.readouterr()
    reproduce(str(table), out=tmp_path, device="cpu", table_only=True)
    said = capsys.readouterr().err
    assert len(re.findall(r"^failed: .* status 1: broken \(see output", said, re.MULTILINE)) == 2
    assert said.endswith("\nthe same command without --table-only tries what failed again\n")
    assert "missing" not in said
    assert (tmp_path / "small" / "table.md").read_text() == markdown


OWN = """
import weince

class Base(weince.DCLLoss):
    pass

class Mine(Base):
    pass
"""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("", "", False),
        ("class Mine", "def another():\n    pass\n\nclass Mine", False),
        ("class Mine(Base):\n    pass", "class Mine(Base):\n    search_space = ()", True),
        ("DCLLoss):\n    pass", "InfoNCELoss):\n    pass", True),  # a class that it inherits from
        ("class Mine", "class Other", False),  # no longer there, or on another machine
    ],
)
def test_a_loss_that_was_changed_after_its_runs_is_told(
    tmp_path, script, monkeypatch, capsys, old, new, told
):
    """A run is known by its settings: a corrected loss of the user's own kept its old runs, without a word."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_{tmp_path.name}"  # another in each test: Python imports a module once
    code = tmp_path / f"{name}.py"
    code.write_text(OWN)
    table = small_table(tmp_path)
    table.write_text(table.read_text().replace("loss.preset: paper", f'loss.preset: "{name}:Mine"'))
    script(WRITE)
    runs = plan(read_table(str(table)), tmp_path, device="cpu")
    for run in runs:
        carry_out_run(run)
    code.write_text(OWN.replace(old, new))
    sys.modules.pop(name)  # as in another process
    reproduce(str(table), out=tmp_path, dry_run=True)
    assert ("the code of paper has changed since 2 of its runs were made" in capsys.readouterr().err) is told
    for run in runs:
        assert ("loss_code" in read_record(run, "made.json")) is (run.loss == "paper")


@pytest.mark.parametrize(
    "change",
    ["class Mine(", OWN.replace("class Mine", "x = 1\n\nclass Mine(Base):\n    y = 1\n\nclass Mine")],
)
def test_a_run_is_signed_with_the_code_that_it_began_with(tmp_path, script, monkeypatch, change):
    """A file that was edited meanwhile gave the run the new code, or ended the sweep if it did not parse."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    run = next(run for run in runs_of(tmp_path) if run.loss == "paper")
    run = replace(run, changes={**run.changes, "loss.preset": f"{name}:Mine"})
    began = code_of(f"{name}:Mine")
    script(f"open({str(tmp_path / f'{name}.py')!r}, 'w').write({change!r})\n" + WRITE)
    carry_out_run(run)
    assert read_record(run, "made.json")["loss_code"] == began


def finished(tmp_path, script, table):
    """The runs of a small table, all with figures, settings and a file of weights."""
    runs = plan(read_table(str(table)), tmp_path / "full", device="cpu")
    for run in runs:
        value = 50.0 + run.seed / 10 + (run.loss == "paper")
        figures = {
            f"{name}_{kind}_mean": value for name in ("linear", "r1") for kind in ("validation", "test")
        }
        text = json.dumps({**figures, "data": "digits", "fingerprint": "01"})
        settings.claim(settings_of(run), run.folder, free=())
        script(f"{WRITE}(folder / 'evaluation.json').write_text({text!r})")
        carry_out_run(run)
    return runs


def test_missing_runs_do_not_train_on_other_data_than_the_finished_ones(tmp_path, script):
    """--data is forgotten in the second call: nothing may start."""
    table = small_table(tmp_path)
    last = finished(tmp_path, script, table)[-1]
    shutil.rmtree(last.folder)
    with pytest.raises(
        ValueError, match=r"with the fingerprint 01; the data here have \w{16}: give the --data"
    ):
        reproduce(str(table), out=tmp_path / "full", device="cpu")
    assert not last.folder.exists()


def archived(runs, out, fingerprint):
    """Records of runs without folders; ``fingerprint`` gives that of a run's data."""
    for run in runs:
        evaluation = {"data": "digits", "fingerprint": fingerprint(run)}
        add_records(out, {run.name: {"evaluation.json": evaluation, "made.json": {"key": run.key}}})


def test_every_finished_run_must_be_made_on_the_data_here(tmp_path):
    here, runs = fingerprint(load("digits", size=8)), runs_of(tmp_path)
    archived(runs[:3], tmp_path, lambda run: here)
    check_same_data(runs[:3], runs[3:])
    archived(runs[1:2], tmp_path, lambda run: "01")
    with pytest.raises(ValueError, match=rf"^{runs[1].name} was made on data with the fingerprint 01"):
        check_same_data(runs[:3], runs[3:])
    check_same_data(runs[:3], [])
    with pytest.raises(ValueError, match=rf"^{runs[1].name} was made on data"):
        check_same_data(runs[:3], [], always=True)


def test_losses_on_data_of_their_own_are_checked_apart(tmp_path):
    runs = [replace(run, changes={**run.changes, "data": run.loss}) for run in runs_of(tmp_path)]
    assert len({data_named(run) for run in runs}) == 2


def test_runs_of_a_row_on_different_data_make_no_table(tmp_path):
    table = small_table(tmp_path)
    runs = plan(read_table(str(table)), tmp_path / "full")
    archived(runs, tmp_path / "full", lambda run: "02" if run is runs[-1] else "01")
    with pytest.raises(ValueError, match=r"must share their data; got the fingerprint 02 for .* and 01 for"):
        reproduce(str(table), out=tmp_path / "full", table_only=True)


KEPT = {"run.yaml", "evaluation.json", "log.csv"}


@pytest.mark.parametrize("signed", [True, False])
def test_a_table_is_written_from_small_files_alone(tmp_path, script, signed, capsys):
    table = small_table(tmp_path)
    finished(tmp_path, script, table)
    reproduce(str(table), out=tmp_path / "full", device="cpu")
    script("sys.exit('nothing is to be run')")
    shutil.copytree(
        tmp_path / "full" / "runs",
        tmp_path / "copy" / "runs",
        ignore=lambda folder, names: [
            n for n in names if "." in n and n not in KEPT | ({"made.json"} if signed else set())
        ],
    )
    for path in (tmp_path / "copy").rglob("run.yaml"):  # as if from another machine
        path.write_text(path.read_text().replace("data: digits", "data: /elsewhere/digits.npz"))
    for only in (False, True):
        page = reproduce(str(table), out=tmp_path / "copy", table_only=only)
        rows = list(csv.DictReader((page.parent / "table.csv").open(newline="")))
        assert [(row["loss"], row["n"]) for row in rows] == [("InfoNCE", "2"), ("paper", "2")] * 2
        assert float(rows[1]["measured"]) == pytest.approx(52.4)
        assert rows[0]["hardware"] == (provenance.hardware("cpu") if signed else "not recorded")
    assert "missing" not in capsys.readouterr().err


def test_records_that_are_kept_make_the_table_without_weights_or_paths(tmp_path, script):
    table = small_table(tmp_path)
    runs = finished(tmp_path, script, table)
    for run in runs:
        path = run.folder / "run.yaml"
        path.write_text(path.read_text().replace("data: digits", f"data: {tmp_path}/digits.npz"))
    full, kept = tmp_path / "full", tmp_path / "kept"
    first = reproduce(str(table), out=full, table_only=True, device="cpu", keep=kept).parent
    second = reproduce(str(table), out=kept, table_only=True, device="cpu", keep=kept).parent
    assert (first / "table.csv").read_text() == (second / "table.csv").read_text()
    assert {path.name for path in kept.iterdir()} == {".runs.lock", "runs.jsonl", "small"}
    text = (kept / "runs.jsonl").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["run"] for line in lines] == sorted(run.name for run in runs)
    for line in lines:
        assert line.keys() == {"run", "run.yaml", "evaluation.json", "made.json"}
        assert (line["run.yaml"]["data"], line["run.yaml"]["out"]) == ("digits", f"runs/{line['run']}")


def test_a_folder_counts_more_than_a_line_of_the_archive(tmp_path, script):
    table = small_table(tmp_path)
    run, other = finished(tmp_path, script, table)[:2]
    reproduce(str(table), out=tmp_path / "full", table_only=True, device="cpu", keep=tmp_path / "full")
    shutil.rmtree(other.folder)
    assert is_done(run)
    assert is_done(other)
    found = record(other)
    result = json.loads(run.result.read_text())
    run.result.write_text(json.dumps({**result, "linear_test_mean": 12.5}))
    assert record(run)["linear_test_mean"] == 12.5
    run.result.unlink()  # a folder without a result does not hide the finished record
    assert is_done(run)
    assert record(run)["linear_test_mean"] == result["linear_test_mean"]
    assert record(other) == found
    assert not is_done(replace(other, key="0" * 12))
    keep_records([other], tmp_path / "moved")  # from one archive into another
    assert (tmp_path / "moved" / "runs.jsonl").read_text() in (tmp_path / "full" / "runs.jsonl").read_text()


def test_a_log_is_the_same_from_a_folder_and_from_the_archive(tmp_path, script):
    run = finished(tmp_path, script, small_table(tmp_path))[0]
    (run.folder / "log.csv").write_text("epoch,loss,crowded\n1,0.25,\n2,nan,0.5\n3,-inf,1e-07\n")
    rows = read_record(run, "log.csv")
    keep_records([run], tmp_path / "full")
    shutil.rmtree(run.folder)
    again = read_record(run, "log.csv")
    assert str(again) == str(rows)  # NaN is not equal to itself
    assert [len(row) for row in again] == [2, 3, 3]


def test_an_archive_is_replaced_as_a_whole_and_keeps_its_other_runs(tmp_path):
    add_records(tmp_path, {"a/b/seed_7": {"x.json": 1}, "a/b/seed_21": {"x.json": 1}})
    before = (tmp_path / "runs.jsonl").read_text()
    os.link(tmp_path / "runs.jsonl", tmp_path / "before")  # changes with the file, if it is written in place
    add_records(tmp_path, {"a/b/seed_7": {"x.json": 2}, "a/b/seed_63": {}})
    assert (tmp_path / "before").read_text() == before
    assert read_archive(tmp_path / "runs.jsonl") == {
        "a/b/seed_21": {"x.json": 1},
        "a/b/seed_63": {},
        "a/b/seed_7": {"x.json": 2},
    }


def test_two_commands_that_add_records_at_once_keep_those_of_both(tmp_path, monkeypatch):
    add_records(tmp_path, {"first": {}})
    other = threading.Thread(target=add_records, args=(tmp_path, {"second": {}}))

    def meanwhile(path):
        found = read_archive(path)
        monkeypatch.setattr(records, "read_archive", read_archive)
        other.start()
        other.join(0.5)  # it waits until the first has written
        return found

    monkeypatch.setattr(records, "read_archive", meanwhile)
    add_records(tmp_path, {"third": {}})
    other.join()
    assert list(read_archive(tmp_path / "runs.jsonl")) == ["first", "second", "third"]


def test_a_file_joins_the_record_of_its_run(tmp_path):
    run = runs_of(tmp_path)[0]
    archived([run], tmp_path, lambda run: "01")
    add_file(run, "cost.json", {"loss_ms": 1.0})
    assert read_record(run, "cost.json") == {"loss_ms": 1.0}
    assert record(run)["fingerprint"] == "01"


def test_an_archive_that_is_none_is_refused_with_its_line(tmp_path, script):
    run = finished(tmp_path, script, small_table(tmp_path))[0]
    shutil.rmtree(run.folder)
    (tmp_path / "full" / "runs.jsonl").write_text('{"run": "a/b/c"}\n[]\n')
    with pytest.raises(ValueError, match=r"line 2: not the record of a run; wanted a JSON .*; got \[\]$"):
        read_record(run, "run.yaml")
    (tmp_path / "full" / "runs.jsonl").write_text('{"run": "a/b/c"}\n{"run": "a/b/d", "run.y')
    with pytest.raises(ValueError, match=r"line 2: not JSON, it may be cut short: remove this line"):
        read_record(run, "run.yaml")
    (tmp_path / "full" / "runs.jsonl").write_bytes(b'{"run": "a/b/c"}\n{"run": "a/b/\xff"}\n')
    with pytest.raises(ValueError, match=r"runs.jsonl, line 2: not JSON"):
        read_record(run, "run.yaml")


@pytest.mark.parametrize(
    ("table", "folder"), [("frechet_bf16", "evidence"), ("recipes_100.yaml", "recipe")], ids=["named", "file"]
)
def test_our_records_make_our_tables(tmp_path, table, folder):
    results = Path(__file__).parents[3] / "research" / "results" / folder
    if table.endswith(".yaml"):
        table = str(results / table)
    shutil.copy(results / "runs.jsonl", tmp_path)
    made = reproduce(table, out=tmp_path, table_only=True).parent / "table.md"
    ours = (results / made.parent.name / "table.md").read_text(encoding="utf-8")

    def without_command(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("- command: ")]

    assert without_command(made.read_text(encoding="utf-8")) == without_command(ours)


def test_a_run_with_other_settings_in_its_folder_is_not_done(tmp_path, script):
    run = finished(tmp_path, script, small_table(tmp_path))[0]
    (run.folder / "made.json").unlink()
    assert not is_done(run)  # with weights but no made.json, the run was cut short
    (run.folder / "model.safetensors").unlink()
    assert is_done(run)
    path = run.folder / "run.yaml"
    path.write_text(path.read_text().replace("batch: 256", "batch: 128"))
    assert not is_done(run)
    path.unlink()
    assert not is_done(run)


def test_a_table_of_what_is_there_names_what_is_missing(tmp_path, script, capsys):
    table = small_table(tmp_path)
    with pytest.raises(ValueError, match=r"none of the 4 runs of small is done in .*full"):
        reproduce(str(table), out=tmp_path / "full", table_only=True)
    assert not (tmp_path / "full" / "small").exists()
    for run in finished(tmp_path, script, table):
        if run.loss == "paper":
            shutil.rmtree(run.folder)
    capsys.readouterr()
    page = reproduce(str(table), out=tmp_path / "full", table_only=True, device="cpu")
    assert capsys.readouterr().err == "missing: digits_small, paper: seed 7, 21\n"
    markdown = (page.parent / "table.md").read_text()
    assert "| digits\\_small | InfoNCE | as configured |" in markdown
    assert "| digits\\_small | paper |" not in markdown
    assert "- runs: 2 of 4 done" in markdown
    assert "- left out: 1 of 2 configurations, of which no run is done: digits\\_small, paper" in markdown
    with pytest.raises(ValueError, match="overhead has no runs"):
        reproduce("overhead", out=tmp_path, table_only=True)


def test_seeds_of_a_table_are_those_that_are_done(tmp_path, script):
    table = small_table(tmp_path)
    for run in finished(tmp_path, script, table):
        if run.seed == 21:
            shutil.rmtree(run.folder)
    page = reproduce(str(table), out=tmp_path / "full", table_only=True, device="cpu")
    assert "\n- seeds: 7\n" in (page.parent / "table.md").read_text()


def test_the_tuning_budget_counts_the_tries_that_were_made(tmp_path, script):
    table = small_table(tmp_path)
    text = (
        table.read_text() + "tries: [{loss.temperature: 0.5}, {loss.temperature: 0.2}]\nchoose_by: linear\n"
    )
    table.write_text(text)
    for run in finished(tmp_path, script, table):
        if run.loss == "paper" and run.try_number == 1:
            shutil.rmtree(run.folder)
    page = reproduce(str(table), out=tmp_path / "full", table_only=True, device="cpu")
    budget = "- tuning budget: unequal numbers of tries: InfoNCE 2, paper 1"
    assert budget in (page.parent / "table.md").read_text()


def test_a_run_in_two_pieces_took_as_long_as_both(tmp_path, script):
    run = runs_of(tmp_path)[0]
    run.folder.mkdir(parents=True)
    (run.folder / "log.csv").write_text("epoch,seconds\n1,100\n2,50.5\n")  # epochs of an earlier call
    script(WRITE)
    carry_out_run(run)
    assert 150.5 <= record(run)["made"]["seconds"] < 170


def test_what_a_run_says_of_itself_names_no_folder_of_this_machine(tmp_path, script):
    run = finished(tmp_path, script, small_table(tmp_path))[0]
    run = replace(run, extra={"data": str(tmp_path / "digits.npz")})
    (run.folder / "made.json").unlink()
    command = record(run)["made"]["command"]
    assert str(tmp_path) not in command
    assert "--data digits.npz" in command


def test_a_dry_run_starts_nothing(tmp_path, capsys):
    table = small_table(tmp_path)
    reproduce(str(table), out=tmp_path, dry_run=True)
    said = capsys.readouterr().out
    assert said.count("to do") == 4
    assert "4 runs, 0 done; 1 try of each loss." in said
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match="jobs must be at least 1; got 0"):
        reproduce(str(table), out=tmp_path, jobs=0)


def test_a_plan_counts_the_tries_that_were_asked_for(tmp_path, capsys):
    """Tries are counted per row: different tries in two rows count as one configuration for each loss."""
    tries = [
        f"{row}/InfoNCE/temperature 0.{n}" for row, n in (("cifar10_resnet18", 2), ("cifar100_resnet18", 5))
    ]
    reproduce("linear", out=tmp_path, only=tries, dry_run=True)
    assert "8 runs, 0 done; 1 try of each loss." in capsys.readouterr().out
    reproduce("linear", out=tmp_path, only=[tries[0], "cifar100_resnet18/InfoNCE"], dry_run=True)
    assert "12 runs, 0 done; 2 tries of each loss." in capsys.readouterr().out
    reproduce("linear", out=tmp_path, only=["cifar10_resnet18/InfoNCE", tries[1]], dry_run=True)
    assert "12 runs, 0 done; 2 tries of each loss." in capsys.readouterr().out


def test_the_remaining_time_is_that_of_runs_which_end_together():
    clock = [0.0]
    bar = telling_bars(shown=False)
    bar.get_time = lambda: clock[-1]
    task = begin(bar, "seeds", total=9, done=3)
    for seconds in (100.0, 101.0):  # two of six runs, which ran at the same time
        clock.append(seconds)
        bar.advance(task, 1)
    assert bar.tasks[0].time_remaining == math.ceil(4 * 101 / 2)


def test_without_a_terminal_each_state_of_a_sweep_is_printed_once(tmp_path, script, monkeypatch, capsys):
    monkeypatch.setattr(time, "monotonic", count(step=61).__next__)  # a minute passes at each reading
    first, second = runs_of(tmp_path)[:2]
    archived([first], tmp_path, lambda run: "01")
    script("time.sleep(0.5)\n" + WRITE)
    carry_out([first, second], tmp_path)
    assert capsys.readouterr().err.splitlines() == [
        "runs: 1 of 2",
        f"runs: 1 of 2, started {second.name}",
        f"runs: 2 of 2, done {second.name}",
    ]


@pytest.mark.posix
def test_a_table_is_filled_though_it_was_interrupted(tmp_path):
    table = small_table(tmp_path, seeds=[7])
    runs = plan(read_table(str(table)), tmp_path, device="cpu")
    sweep = Program("-m", "weince", "reproduce", table, "--out", tmp_path, "--device", "cpu")
    wait_until(lambda: any(is_done(run) for run in runs), 120)
    sweep.send_signal(signal.SIGINT)
    ended = sweep.wait()
    assert ended.returncode == INTERRUPTED
    *before, last = ended.stderr.splitlines()
    assert last == "weince: interrupted, the same command again runs what is missing"
    assert "interrupted" not in " ".join(before)
    done = {run.folder: (run.folder / "made.json").stat().st_mtime_ns for run in runs if is_done(run)}
    assert len(done) == 1

    page = reproduce(str(table), out=tmp_path, jobs=3, device="cpu")
    assert page == tmp_path / "small" / "index.html"
    assert all(is_done(run) for run in runs)
    for folder, when in done.items():
        assert (folder / "made.json").stat().st_mtime_ns == when  # finished runs are left alone
    lines = list(csv.DictReader((page.parent / "table.csv").open(newline="")))
    assert [(line["figure"], line["loss"], line["n"]) for line in lines] == [
        ("linear", "InfoNCE", "1"), ("linear", "paper", "1"), ("r1", "InfoNCE", "1"), ("r1", "paper", "1"),
    ]  # fmt: skip
    for line in lines:
        (run,) = (run for run in runs if run.loss == line["loss"])
        value = json.loads(run.result.read_text())[f"{line['figure']}_test_mean"]
        assert float(line["measured"]) == pytest.approx(value)
        assert value > 20  # better than chance
    for run in runs:
        assert "epoch 1/1" in (run.folder / "output.txt").read_text()


def test_a_trained_run_without_its_result_is_only_measured(tmp_path):
    """As after a kill during the measurement. The result is the same, though no epoch came before it."""
    run = runs_of(tmp_path)[0]
    carry_out_run(run)
    result, log = run.result.read_text(), (run.folder / "log.csv").read_text()
    trained = sum(row["seconds"] for row in read_record(run, "log.csv"))
    assert trained < record(run)["made"]["seconds"] < 120
    weights, day = run.folder / "model.safetensors", 86_400
    os.utime(weights, (time.time() - day, time.time() - day))  # measured a day later
    run.result.unlink()
    (run.folder / "made.json").unlink()
    assert not is_done(run)
    carry_out_run(run)
    assert is_done(run)
    assert run.result.read_text() == result
    assert (run.folder / "log.csv").read_text() == log
    assert record(run)["made"]["seconds"] < 120  # not the day between
