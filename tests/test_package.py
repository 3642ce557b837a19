"""The distribution: its contents, its installation, and that importing it is cheap."""

import doctest
import importlib
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import weince

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and a source archive, built without the network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def test_archives_hold_the_package(built):
    wheel, archive = built
    names = zipfile.ZipFile(wheel).namelist()
    assert {"weince/__init__.py", "weince/py.typed", "weince/engines/dense.py"} <= set(names)
    assert not any(name.startswith("tests") for name in names)
    with tarfile.open(archive) as source:
        files = {name.split("/", 1)[1] for name in source.getnames() if "/" in name}
    assert {"README.md", "LICENSE", "CITATION.cff", "src/weince/py.typed", "tests/reference.py"} <= files
    # Tests and pages read the records.
    assert {"research/results/records.jsonl", "research/results/strong/runs.jsonl"} <= files


def test_links_of_the_readme_work_on_a_package_index(built):
    """A relative link would lead nowhere there."""
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        links = re.findall(r"\]\((.*?)\)", wheel.read(name).decode())
    assert [link for link in links if not link.startswith("https://")] == []
    paths = [link.split("/main/")[1].split("#")[0] for link in links if "/weince/weince/" in link]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_wheel_installs_and_imports_in_an_empty_environment(built, tmp_path):
    """The environment is empty; torch, numpy and scipy come from this one through ``sys.path``."""
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(built[0])]
    subprocess.run(install, check=True, timeout=120, capture_output=True)
    code = (
        "import sys; from pathlib import Path\n"
        f"sys.path.append({str(Path(importlib.import_module('torch').__file__).parents[1])!r})\n"
        "import torch, weince\n"
        f"assert Path(weince.__file__).is_relative_to({str(tmp_path)!r}), weince.__file__\n"
        "print(float(weince.WeinceLoss()(torch.randn(8, 4), torch.randn(8, 4))))\n"
    )
    done = subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


def test_importing_loads_nothing_heavy_beyond_torch():
    """Other packages make an import slow, so the losses must not import any beyond torch."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import weince; print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["weince"]


def test_the_losses_work_without_scipy():
    code = (
        "import sys; sys.modules['scipy'] = None\n"
        "import torch, weince; print(float(weince.WeinceLoss()(torch.randn(8, 4), torch.randn(8, 4))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(done.stdout) > 0


SOURCES = ROOT / "src"
WITH_EXAMPLES = [path for path in sorted(SOURCES.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_docstring_examples(path):
    parts = path.relative_to(SOURCES).with_suffix("").parts
    found = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    failed, tried = doctest.testmod(found, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
    assert tried > 0


def test_the_public_names_exist():
    assert all(hasattr(weince, name) for name in weince.__all__)
