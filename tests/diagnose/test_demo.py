"""The demo: a table, a page, runs that are kept."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from programs import run as run_program

from diagnose.browser import sound_page
from weince.lab.vision.data import load

ROOT = Path(__file__).parents[2]
NAMES = ("InfoNCE, τ = 0.5", "InfoNCE, τ = 0.2", "WEINCE, paper", "WEINCE, released", "Untrained")


def run(*arguments):
    return run_program(ROOT / "examples" / "demo.py", *arguments, cwd=ROOT)


@pytest.fixture(scope="module")
def demo():
    spec = spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What the demo printed, and the folder of its page."""
    out = tmp_path_factory.mktemp("demo") / "page"
    found = run("--seeds", "0", "1", "--epochs", "1", "--out", str(out))
    assert found.returncode == 0, found.stderr
    return found.stdout, out


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page(done, browser, width, scheme):
    _, out = done
    with sound_page(browser, out, width, scheme) as page:
        assert page.locator("h2").all_inner_texts()[:3] == [
            "Results", "Training", "Which link the embeddings ask for"
        ]  # fmt: skip
        assert tuple(page.locator("#results tbody th").all_inner_texts()) == NAMES
        assert "no loss was tuned" in page.locator("#results").inner_text()
        assert page.locator("#training figure").count() == 8
        assert page.locator("article.verdict").count() == 2
        assert "embedded by infonce-0.5-seed-0" in page.locator("article.verdict").first.inner_text()


def test_the_table_stands_beside_the_page(done):
    printed, out = done
    rows = (out / "tables" / "results.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0] == ",Linear probe,50 neighbours,1 neighbour"
    assert len(rows) == 1 + len(NAMES)
    assert str(out / "index.html") in "".join(printed.split("\n"))


def test_the_numbers_that_the_page_quotes(demo):
    data = load("digits", size=16)
    notes = " ".join(demo.NOTES)
    assert f"{len(data.test_labels)} held-out digits, {100 / len(data.test_labels):.1f} points each" in notes
    assert f"{len(data.train_labels):,} training digits" in notes


def test_finished_runs_are_kept_and_cut_ones_go_on(done, demo):
    """The table is the same again, and only the run without weights is trained."""
    printed, out = done
    plans = demo.plan(out, [0, 1], 1)
    folders = [run.out for runs in plans.values() for run in runs]
    weights = [folder / "model.safetensors" for folder in folders]
    cut = weights[3]
    before, written = cut.read_bytes(), [path.stat().st_mtime_ns for path in weights]
    cut.unlink()
    again = demo.compare(plans)
    assert cut.read_bytes() == before
    changed = [path for path, then in zip(weights, written, strict=True) if path.stat().st_mtime_ns != then]
    assert changed == [cut]
    assert tuple(again) == NAMES
    for name, figures in again.items():
        line = next(line for line in printed.splitlines() if name in line)
        assert all(demo.t_interval(values).text(1) in line for values in figures.values())


def test_a_trained_encoder_is_not_the_untrained_one(done, demo):
    _, out = done
    run = demo.plan(out, [0], 1)["WEINCE, paper"][0]
    first, last = demo.untrained(run).state_dict(), demo.trained(run).state_dict()
    assert first.keys() == last.keys()
    assert any((first[name] != last[name]).any() for name in first)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seeds", "3", "3"), "--seeds must be different and at least 0; got 3 3"),
        (("--epochs", "0"), "epochs must be at least 1; got 0"),
        (("--out", "examples"), "holds other files"),
    ],
)
def test_bad_options_are_refused_in_a_line(arguments, said):
    found = run(*arguments)
    assert found.returncode != 0
    assert said in found.stderr
    assert "Traceback" not in found.stderr
