"""The documentation: its code runs unchanged, its links resolve, and every public name has an entry."""

import importlib
import inspect
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tutorials
from programs import run, script

import weince
from weince.cli import command_of
from weince.intervals import t_interval
from weince.lab import settings
from weince.lab.tasks.images.config import VisionRun
from weince.lab.tasks.registry import task_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "research/findings.md",
    *sorted(DOCS.rglob("*.md")),
]
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))


def text(path):
    return path.read_text(encoding="utf-8")


def blocks(path):
    return [code for left_out, code in BLOCK.findall(text(path)) if not left_out]


def named(path):
    return str(path.relative_to(ROOT))


def test_one_block_is_not_run():
    assert sum(bool(left_out) for page in PAGES for left_out, _ in BLOCK.findall(text(page))) == 1


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=named)
def test_every_block_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for code in blocks(page):
        done = run("-c", code, cwd=tmp_path)
        assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_the_images_of_own_data_fill_a_batch_and_can_be_diagnosed(tmp_path):
    """The page trains, evaluates and diagnoses on the file that its block writes."""
    (code,) = blocks(DOCS / "how-to/own-data.md")
    assert run("-c", code, cwd=tmp_path).returncode == 0
    with np.load(tmp_path / "mine.npz") as images:
        assert len(images["train_images"]) >= VisionRun().batch
        assert len(images["test_images"]) >= 128  # the fewest pairs of weince diagnose


@pytest.mark.long
@pytest.mark.parametrize(("page", "block"), [("several-gpus", 0), ("several-gpus", 1), ("clip", 0)])
def test_the_scripts_for_several_gpus_end_well_under_torchrun(tmp_path, page, block):
    """Without their last lines, about one start in three aborted."""
    (tmp_path / "train.py").write_text(blocks(DOCS / f"how-to/{page}.md")[block])
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    for done in [
        run(*launch, cwd=tmp_path) for _ in range(5 if page == "several-gpus" and block == 0 else 3)
    ]:
        assert done.returncode == 0, done.stderr


def commands():
    """Every ``weince`` command in a bash block, with its page."""
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("weince "):
                    yield page, line.partition(" 2> ")[0].partition(" > ")[0]


def test_the_commands_take_what_the_pages_give_them():
    """Every option is known and its value can be parsed. Nothing is run."""
    found = list(commands())
    assert len(found) > 30
    for page, line in found:
        words = shlex.split(line, comments=True)[1:]
        try:
            if words[0] != "train":
                command, rest = command_of(words)
                command.read(rest)
                continue
            chosen, _ = settings.take_config(words[1:])
            task = settings.load(chosen).get("task", "vision") if chosen else "vision"
            kind = task_of({"task": task}).settings
            if "my_package" not in line:  # not importable here
                settings.read(kind, words[1:], command="weince train", examples="")
        except (SystemExit, ValueError) as error:
            pytest.fail(f"{named(page)}: {line}: {error}")


RUN_ELSEWHERE = {"compare-digits": "lab/study/test_compare.py"}  # also checks its output


@pytest.mark.long
@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem not in RUN_ELSEWHERE], ids=lambda path: path.stem
)
@pytest.mark.filterwarnings("ignore")  # the sentence-transformers trainer warns
def test_notebooks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tutorials.check(path)


@pytest.mark.parametrize(("name", "file"), RUN_ELSEWHERE.items())
def test_the_others_are_run_elsewhere(name, file):
    assert f"{name}.ipynb" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_there_are_six_notebooks():
    assert len(NOTEBOOKS) == 6


def texts_with_links():
    for page in PAGES:
        yield page, re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE)
    for path in NOTEBOOKS:
        cells = json.loads(text(path))["cells"]
        yield path, "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def test_links_lead_somewhere():
    found = [(page, link) for page, body in texts_with_links() for link in LINK.findall(body)]
    assert len(found) > 100
    assert [(named(page), link) for page, link in found if not (page.parent / link).exists()] == []


MODULES = (
    "weince",
    "weince.evt",
    "weince.engines",
    "weince.diagnose",
    "weince.integrations.lightning",
    "weince.integrations.metric_learning",
    "weince.integrations.sentence_transformers",
)
PUBLIC = [
    f"{module}.{name}"
    for module in MODULES
    for name in importlib.import_module(module).__all__
    if name != "EngineName"  # a Literal of strings
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_entry(name):
    found = inspect.getmodule(resolved(name)).__name__
    if found == name:  # a module of the same name: the entry must name the function in it
        name = f"{name}.{name.rpartition('.')[2]}"
    assert re.search(rf"^::: {re.escape(name)}$", REFERENCE, re.MULTILINE), "no page of the reference has it"
    assert f"#{name})" in text(DOCS / "reference" / "index.md"), "the list of all names does not have it"


@pytest.mark.parametrize("name", PUBLIC)
def test_an_entry_of_a_docstring_names_one_thing(name):
    """Of ``lam, tau: ...`` the site would make an entry called "lam," of the type "(tau)"."""
    entries = re.findall(r"^ {4}(\w+, .*?): ", inspect.cleandoc(resolved(name).__doc__), re.MULTILINE)
    assert entries == []


def resolved(name):
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    """Result types of ``weince.evt`` and ``choose`` need none: the example of the function shows them."""
    is_result = name == "weince.engines.Choice" or (
        name.startswith("weince.evt.") and name.rpartition(".")[2][0].isupper()
    )
    documented = resolved(name).__doc__ or ""
    assert documented
    assert is_result or ">>> " in documented


def test_every_page_is_in_the_navigation():
    navigation = text(ROOT / "mkdocs.yml").partition("\nnav:\n")[2]
    pages = [path.relative_to(DOCS).as_posix() for path in (*DOCS.rglob("*.md"), *NOTEBOOKS)]
    assert [page for page in pages if f": {page}\n" not in navigation] == []


def test_the_readme_says_what_the_records_say():
    means = {
        name: f"{np.mean(values):.1f}"
        for name, values in script("tools/docs_figures.py").accuracies().items()
    }
    rows = {
        "InfoNCE, 0.5": "| InfoNCE | 0.5 | {} ±",
        "InfoNCE, 0.2": "| InfoNCE | 0.2 | **{} ±",
        "WEINCE, the authors' code, 0.5": "| WEINCE as its authors' code trains it | 0.5 | {} ±",
        "WEINCE, Algorithm 1, 0.5": "| WEINCE, Algorithm 1 of the paper | 0.5 | {} ±",
    }
    for page in (ROOT / "README.md", DOCS / "index.md"):
        assert [row for name, row in rows.items() if row.format(means[name]) not in text(page)] == []


def test_the_readme_is_short():
    assert len(text(ROOT / "README.md").splitlines()) <= 120


def test_the_figures_of_the_strong_recipe_are_those_of_its_records():
    """Rounded from the records: 0.747 is 0.7, though the table of two decimals has 0.75."""
    found = {}
    for line in text(ROOT / "research/results/strong/runs.jsonl").splitlines():
        record = json.loads(line)
        settings_of_run = record["run.yaml"]
        loss, is_long = settings_of_run["loss"], settings_of_run["epochs"] == 100
        if is_long and settings_of_run["data"] == "cifar100" and not loss["options"]:
            found.setdefault((loss["preset"], loss["temperature"]), []).append(record["evaluation.json"])
    rows = {
        "HCL": "hcl",
        "InfoNCE": "infonce",
        "DCL": "dcl",
        "`WeinceLoss()`": "released",
        "[mixture]": "mixture",
    }
    page = text(DOCS / "which-loss.md").partition("## What another loss gave")[2].partition("![")[0]
    for name, preset in rows.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {name}")]
        temperature, linear, recall, map_r = (cell.partition(",")[0].strip() for cell in row.split("|")[2:6])
        runs = found[preset, float(temperature)]
        assert len(runs) == 4
        for said, figure in ((linear, "linear"), (recall, "r1"), (map_r, "map_r")):
            over_seeds = t_interval(run[f"{figure}_test_mean"] for run in runs)
            assert over_seeds.text(1).startswith(said), (name, figure)


def test_the_figures_of_the_papers_recipe_are_those_of_its_records():
    found = {}
    for line in text(ROOT / "research/results/paper_recipe/runs.jsonl").splitlines():
        record = json.loads(line)
        settings_of_run = record["run.yaml"]
        loss, is_long = settings_of_run["loss"], settings_of_run["epochs"] == 100
        if is_long and settings_of_run["data"] == "cifar100" and not loss.get("tail"):
            options = loss.get("options") or {"": loss["temperature"]}
            setting = " ".join(f"{name} {value:g}".strip() for name, value in list(options.items())[:1])
            found.setdefault((loss["preset"], setting), []).append(
                record["evaluation.json"]["linear_test_mean"]
            )
    presets = {
        "KL ball": "kl_ball",
        "HCL": "hcl",
        "DCL": "dcl",
        "mixture": "mixture",
        "WEINCE, negatives only": "negatives_only",
        "InfoNCE": "infonce",
        "`WeinceLoss()`": "released",
        "WEINCE, Algorithm 1": "paper",
        "SigLIP": "siglip",
    }
    page = text(DOCS / "which-loss.md").partition("In the paper's recipe")[2].partition("\n\n**If you")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in page.splitlines() if "±" in line]
    assert {name for name, _, _ in rows} == set(presets)
    for name, setting, linear in rows:
        runs = found[presets[name], setting]
        assert len(runs) == 4
        assert t_interval(runs).text(1).startswith(linear.partition(",")[0]), name


def test_the_number_of_encoders_is_that_of_the_records():
    """Archives share runs; a run of the same name on other images is another encoder."""
    archives = (ROOT / "research/results").glob("*/runs.jsonl")
    runs = [json.loads(line) for path in archives for line in text(path).splitlines()]
    encoders = {
        (run["run"], run["evaluation.json"]["fingerprint"]) for run in runs if "evaluation.json" in run
    }
    said = [
        int(number)
        for page in (ROOT / "research/findings.md", DOCS / "losses/weince.md")
        for number in re.findall(r"(\d+) (?:image )?encoders(?: to test|, with the records)", text(page))
    ]
    assert said == [len(encoders)] * 2


def test_a_loss_that_was_trained_with_is_not_said_to_be_untried():
    archives = (ROOT / "research/results").glob("*/runs.jsonl")
    runs = [json.loads(line) for path in archives for line in text(path).splitlines()]
    trained = {run["run.yaml"]["loss"]["preset"] for run in runs}
    untried = {p.stem for p in (DOCS / "losses").glob("*.md") if "We did not train with it" in text(p)}
    assert "siglip" in trained
    assert untried
    assert not {name.replace("-", "_") for name in untried} & trained


def test_the_losses_that_refuse_labels_are_named():
    options = text(DOCS / "losses.md").partition("## Options\n")[2].partition("| option")[0]
    refusing = options.partition(" refuse `")[0].partition("exceptions:")[2]
    losses = [getattr(weince, name) for name in weince.__all__ if name.endswith("Loss")]
    assert set(re.findall(r"`(\w+Loss)`", refusing)) == {
        loss.__name__ for loss in losses if not (loss.several_positives or loss.same_view)
    }
    wanting = re.findall(r"`(\w+Loss)` wants `\"views\"`", options)
    assert wanting == [loss.__name__ for loss in losses if loss.same_view]
