"""Error messages name no command-line flag if they come from the library, and say apart what was got."""

import ast
import re
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "weince"
COMMANDS = ("lab", "cli.py", "cli_diagnose.py", "cli_sweeps.py", "cli_towers.py", "cli_runs.py", "command_line.py",
            "completion.py")  # fmt: skip


def messages():
    """File and line of every raised error, and the constant text of its message."""
    for path in sorted(SOURCES.rglob("*.py")):
        place = path.relative_to(SOURCES)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                parts = [
                    part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant) and part.value
                ]
                yield place, node.lineno, " ".join(part for part in parts if isinstance(part, str))


MESSAGES = list(messages())


def wrong(rule):
    return [f"{place}:{line}: {text}" for place, line, text in MESSAGES if rule(place, text)]


def test_the_messages_are_found():
    assert len(MESSAGES) > 300


def test_what_was_got_stands_apart():
    assert wrong(lambda place, text: ", got" in text) == []


def test_the_library_names_no_flag():
    assert wrong(lambda place, text: place.parts[0] not in COMMANDS and re.search(r"--[a-z]", text)) == []
