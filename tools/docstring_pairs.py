"""Write the retrieval set that comes with the package: the first sentence of a docstring, and the code under it.

    python tools/docstring_pairs.py

The pairs are made from this project's own sources, so they may be shipped. The file stays as it is when the sources
change: figures on it could not be compared otherwise.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parents[1]
OUT = HERE / "src" / "weince" / "lab" / "tasks" / "towers" / "docstrings.jsonl"
PAIRS, LONGEST, WORDS = 800, 500, 5
"""Number of pairs, characters of a document, and fewest words of a query."""


def pairs_of(path: Path) -> Iterator[dict[str, str]]:
    """The pairs of a module; its name is their group."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or (said := ast.get_docstring(node)) is None:
            continue
        query = re.split(r"(?<=[.:;]) |\n\n", " ".join(said.split("\n\n")[0].split()))[0].rstrip(".:;")
        without = [statement for statement in node.body if statement is not node.body[0]]
        if not without:
            continue
        node.body = without
        code = ast.unparse(node)
        # The query must not be copied from the code by a name alone.
        if len(query.split()) >= WORDS and len(code) >= 80:
            yield {
                "query": query,
                "positive": code[:LONGEST],
                "group": ".".join(path.with_suffix("").parts[-2:]),
            }


def main() -> None:
    rows = [row for path in sorted((HERE / "src").rglob("*.py")) for row in pairs_of(path)]
    different = {row["query"]: row for row in rows}
    different = {row["positive"]: row for row in different.values()}
    chosen = sorted(different.values(), key=lambda row: hashlib.blake2b(row["query"].encode()).digest())[
        :PAIRS
    ]
    OUT.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen), encoding="utf-8")
    groups = {row["group"] for row in chosen}
    print(f"{len(chosen)} of {len(different)} pairs in {len(groups)} groups, {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
