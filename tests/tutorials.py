"""Run a notebook of the documentation in the same way as ``tools/notebooks.py``."""

import importlib.util
import json
from pathlib import Path

import matplotlib

ROOT = Path(__file__).parents[1]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(path):
    """The notebook runs in the current folder, and its cells give the same kinds of output as those stored in it."""
    matplotlib.use("Agg")
    stored = json.loads(path.read_text(encoding="utf-8"))
    done = tool("notebooks").run(stored)

    def kinds(notebook):
        return [[output["output_type"] for output in cell.get("outputs", ())] for cell in notebook["cells"]]

    assert kinds(done) == kinds(stored)
