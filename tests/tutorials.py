"""Running a notebook of the documentation as its tool does."""

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
    """It runs in this folder, and what is stored in it is of the cells that are there."""
    matplotlib.use("Agg")
    stored = json.loads(path.read_text(encoding="utf-8"))
    done = tool("notebooks").run(stored)

    def kinds(notebook):
        return [[output["output_type"] for output in cell.get("outputs", ())] for cell in notebook["cells"]]

    assert kinds(done) == kinds(stored)
