"""Run the notebooks of the documentation and store what they print and draw.

    python tools/notebooks.py                               all of docs/tutorials
    python tools/notebooks.py docs/tutorials/simclr.ipynb   one of them

The cells are plain Python and run in one process, in order, in an empty folder: no kernel is needed. The tests run
them in the same way.
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
Notebook = dict[str, Any]


def run(notebook: Notebook) -> Notebook:
    """The notebook with the outputs of its cells; an error in a cell stops it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = {
                **cell,
                "execution_count": count,
                "outputs": _outputs("".join(cell["source"]), names, count),
            }
        cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What a cell prints, the value of its last line, and the figures it draws."""
    said, value = io.StringIO(), None
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(said):
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    found: list[dict[str, Any]] = []
    if said.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": _lines(said.getvalue())})
    found += [
        {"data": {"image/png": picture}, "metadata": {}, "output_type": "display_data"}
        for picture in _figures()
    ]
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        result = {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        found.append(result)
    return found


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _figures() -> Iterator[str]:
    """All open figures as PNG; they are closed afterwards."""
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        file = io.BytesIO()
        # Without matplotlib's version, the same figure always gives the same file.
        pyplot.figure(number).savefig(file, dpi=90, bbox_inches="tight", metadata={"Software": None})
        yield base64.b64encode(file.getvalue()).decode()
    pyplot.close("all")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of docs/tutorials")
    paths = parser.parse_args(arguments).notebooks or sorted(FOLDER.glob("*.ipynb"))
    matplotlib.use("Agg")
    for path in (path.absolute() for path in paths):
        print(path.name, file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            done = run(json.loads(path.read_text(encoding="utf-8")))
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.replace(path)


if __name__ == "__main__":
    main()
