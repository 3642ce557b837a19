"""Keep the records of the studies in one file, research/results/records.jsonl: a line for each CSV or JSON file.

The tables (.md) and the figures that findings.md shows lie beside it; the lines hold the data behind them.
Runs of ``weince reproduce`` have archives of their own (``runs.jsonl``).
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

EXAMPLE = """\
examples:
  python research/keep.py research/results/evidence/trap.csv      # write a file's line, or write it again
  python research/keep.py --list
  python research/keep.py --extract evidence/trap.csv             # the file again, where it was
"""


def read_archive(results: Path) -> dict[str, Any]:
    """The content of each file, by its path below the results: the rows of a CSV file, the value of a JSON file."""
    path = results / "records.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {line["file"]: line["content"] for line in map(json.loads, lines)}


def keep(files: list[Path], results: Path) -> None:
    """Add files to the archive; a file that it holds already is replaced."""
    kept = read_archive(results) | {_name(path, results): _content(path) for path in files}
    lines = [json.dumps({"file": name, "content": kept[name]}, ensure_ascii=False) for name in sorted(kept)]
    (results / "records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def extract(names: list[str], results: Path) -> None:
    """Restore files from the archive."""
    kept = read_archive(results)
    for name in names:
        if name not in kept:
            raise SystemExit(f"no record of {name!r}: --list names those that are there")
        path = results / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                csv.writer(file).writerows(kept[name])
            else:
                json.dump(kept[name], file, indent=1)


def _name(path: Path, results: Path) -> str:
    return path.resolve().relative_to(results.resolve()).as_posix()


def _content(path: Path) -> Any:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file)) if path.suffix == ".csv" else json.load(file)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="below the results; .csv or .json"
    )
    parser.add_argument("--list", action="store_true", help="print what is there")
    parser.add_argument("--extract", nargs="+", default=[], metavar="NAME", help="write these files again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder (default: research/results)")
    options = parser.parse_args(arguments)
    if options.files:
        keep(options.files, options.results)
    extract(options.extract, options.results)
    if options.list:
        print("\n".join(sorted(read_archive(options.results))))


if __name__ == "__main__":
    main()
