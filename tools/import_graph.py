"""Draw which room of the package imports which: the picture in CONTRIBUTING.md, made from the sources.

    python tools/import_graph.py            # write the picture again
    python tools/import_graph.py --check    # exit with status 1 if it is out of date, or if imports form a cycle

A room is a folder of the package, or a module that lies beside the folders. Imports inside functions count too;
imports for type checkers (``if TYPE_CHECKING``) do not. Arrows that follow from others are left out of the picture.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- import graph: python tools/import_graph.py -->\n", "<!-- end of the import graph -->\n"

Graph = Mapping[str, set[str]]

COMMANDS = {
    "weince.cli",
    "weince.cli_diagnose",
    "weince.cli_runs",
    "weince.command_line",
    "weince.cli_sweeps",
    "weince.cli_towers",
    "weince.completion",
    "weince.__main__",
}


def module_graph(source: Path = ROOT / "src") -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports, by their dotted names."""
    paths = {_dotted(path.relative_to(source)): path for path in sorted((source / "weince").rglob("*.py"))}
    return {name: paths.keys() & set(_imports(path, paths)) - {name} for name, path in paths.items()}


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in _executed(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}, line {node.lineno}: imports are absolute here; got a relative one")
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else str(node.module) for name in names)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a tree except those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _executed(child)


def room(module: str) -> str:
    """The room of a module: its folder, or the module itself if it lies beside the folders."""
    if module in COMMANDS:
        return "cli"
    parts = module.split(".")[1:]
    if not parts:
        return "weince"
    if parts[0] != "lab":
        return parts[0]
    return "/".join(parts[:2]) if parts[1:2] and parts[1] in LAB else "lab"


LAB = {path.parent.name for path in (ROOT / "src" / "weince" / "lab").glob("*/__init__.py")}


def room_graph(modules: Graph) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    rooms: dict[str, set[str]] = {}
    for module, imported in modules.items():
        rooms.setdefault(room(module), set()).update(map(room, imported))
    return {name: imported - {name} for name, imported in rooms.items()}


def cycle(graph: Graph) -> list[str]:
    """A cycle of imports; empty if there is none."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def drawn(rooms: Graph) -> str:
    """The rooms in Mermaid's language; arrows lead from the imported room to the one that imports it."""
    behind = {name: _behind(name, rooms) for name in rooms}
    arrows = [
        f"  {_node(imported)} --> {_node(name)}"
        for name in sorted(rooms)
        for imported in sorted(rooms[name])
        if not any(imported in behind[other] for other in rooms[name])
    ]
    return "\n".join(["```mermaid", "flowchart LR", *arrows, "```", ""])


def _behind(name: str, rooms: Graph) -> set[str]:
    """All rooms that a room imports, directly or through others."""
    return rooms[name].union(*(_behind(other, rooms) for other in rooms[name]))


def _node(name: str) -> str:
    return f'{name.replace("/", "_")}["{name}"]' if "/" in name else name


def page_with(picture: str, page: str) -> str:
    """A page with its picture replaced.

    Raises:
        ValueError: The page lacks the lines that enclose the picture.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}{picture}{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, say what is wrong")
    options = parser.parse_args(arguments)
    modules = module_graph()
    rooms = room_graph(modules)
    for graph in (modules, rooms):
        if circle := cycle(graph):
            print(f"imports in a circle: {' -> '.join(reversed(circle))}", file=sys.stderr)
            return 1
    page = PAGE.read_text(encoding="utf-8")
    wanted = page_with(drawn(rooms), page)
    if options.check and wanted != page:
        print(f"the picture in {PAGE.name} is out of date: python {Path(__file__).name}", file=sys.stderr)
        return 1
    if not options.check:
        PAGE.write_text(wanted, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
