"""Rooms (packages): imports have no cycle, the library never imports the lab, and the drawn graph is current."""

import ast
import re
import textwrap

import pytest
from programs import ROOT, script

graph = script("tools/import_graph.py")


@pytest.fixture(scope="module")
def modules():
    return graph.module_graph()


def test_no_modules_import_each_other(modules):
    assert graph.cycle(modules) == []
    assert graph.cycle(graph.room_graph(modules)) == []


def test_the_library_imports_nothing_of_the_lab(modules):
    library = {name: used for name, used in modules.items() if graph.room(name) not in ("cli", *ROOMS)}
    assert "weince.losses.infonce" in library
    assert "weince.diagnose.report_page" in library
    found = {(name, other) for name, used in library.items() for other in used if graph.room(other) in ROOMS}
    assert found == set()


ROOMS = {"lab", *(f"lab/{name}" for name in graph.LAB)}


def test_nothing_imports_the_commands(modules):
    assert {name for name, used in modules.items() if used & graph.COMMANDS} <= graph.COMMANDS


def test_the_picture_is_up_to_date(capsys):
    assert graph.main(["--check"]) == 0, capsys.readouterr().err


def test_imports_count_wherever_they_stand(tmp_path):
    (tmp_path / "weince" / "lab").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "lab/__init__.py": "from weince import links\n",
        "links.py": """
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                import weince.tail
            def f():
                import weince.lab
        """,
        "tail.py": "from weince.links import f",
    }
    for name, text in files.items():
        (tmp_path / "weince" / name).write_text(textwrap.dedent(text))
    found = graph.module_graph(tmp_path)
    assert found["weince.links"] == {"weince.lab"}
    assert found["weince.tail"] == {"weince.links"}
    assert set(graph.cycle(found)) == {"weince.links", "weince.lab"}
    assert graph.room_graph(found)["links"] == {"lab"}


def test_arrows_that_follow_from_others_are_not_drawn():
    picture = graph.drawn({"scores": set(), "links": {"scores"}, "lab/tasks/images": {"links", "scores"}})
    arrows = [line.strip() for line in picture.splitlines() if "-->" in line]
    assert arrows == ['links --> lab_tasks_images["lab/tasks/images"]', "scores --> links"]
    page = f"before\n{graph.BEGIN}old\n{graph.END}after\n"
    assert graph.page_with(picture, page) == f"before\n{graph.BEGIN}{picture}{graph.END}after\n"
    with pytest.raises(ValueError, match="no lines"):
        graph.page_with(picture, "nothing")


WALKS = (
    (ROOT / "CONTRIBUTING.md")
    .read_text(encoding="utf-8")
    .partition("## Three walks")[2]
    .partition("\n## ")[0]
)


def names_in(path):
    """Functions and classes of a module, and its methods both as ``method`` and as ``Class.method``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def test_every_name_in_the_walks_exists():
    """Every name in backticks is defined in one of the files that its step names."""
    steps = [step for step in re.split(r"\n(?=\d+\. |\n)", WALKS) if ".py`" in step]
    assert len(steps) > 30
    for step in steps:
        quoted = re.findall(r"`([^`]+)`", step)
        files = [ROOT / "src" / "weince" / name for name in quoted if name.endswith(".py")]
        assert all(file.is_file() for file in files), step
        known = set().union(*map(names_in, files))
        named = {
            name for name in quoted if re.fullmatch(r"[A-Za-z_][\w.]*", name) and not name.endswith(".py")
        }
        assert named <= known, (step, named - known)
