"""Run a notebook of the documentation in the same way as ``tools/notebooks.py``."""

import json

import matplotlib
from programs import script


def check(path):
    """The notebook runs in the current folder, and its cells give the same kinds of output as those stored in it."""
    matplotlib.use("Agg")
    stored = json.loads(path.read_text(encoding="utf-8"))
    done = script("tools/notebooks.py").run(stored)

    def kinds(notebook):
        return [[output["output_type"] for output in cell.get("outputs", ())] for cell in notebook["cells"]]

    assert kinds(done) == kinds(stored)
