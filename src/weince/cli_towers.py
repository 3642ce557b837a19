"""The command for two towers, ``weince mine``, and how ``weince evaluate`` judges a run of them; see ``cli.py``."""

import argparse
from dataclasses import fields
from pathlib import Path

from weince.machine import DEVICES

MINE_EXAMPLES = """\
examples:
  weince mine --data pairs.csv --model sentence-transformers/all-MiniLM-L6-v2 --out negatives.jsonl
  weince mine --data beir/ --model runs/a/model --k 8 --margin 0.05 --groups --out negatives.jsonl
  weince train --config retrieval --data beir/ --negatives negatives.jsonl --hard 4
The same command again goes on where it was stopped.
"""


def add_mine(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "mine",
        help="find hard negatives for pairs of texts",
        description="Find the nearest documents of each training query that do not answer it, by exact search, and\n"
        "write them as lines of JSON: query, positive, negative_1, ..., scores. Needs weince[text].",
        epilog=MINE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data", required=True, help="pairs: a BEIR folder, a .csv, .tsv, .jsonl or .parquet, ..."
    )
    parser.add_argument("--model", required=True, help="encoder: a folder, a hub name or my_package:factory")
    parser.add_argument("--query-model", help="another encoder for queries")
    parser.add_argument("--query-prompt", default="", help="text in front of each query")
    parser.add_argument("--document-prompt", default="", help="text in front of each document")
    parser.add_argument("--k", type=int, default=4, help="negatives for each pair (default: %(default)s)")
    parser.add_argument("--margin", type=float, help="negatives score at least this much below the positive")
    parser.add_argument("--relative", type=float, metavar="SHARE", help="negatives score at most this share of the "
                        "positive's score, such as 0.95")  # fmt: skip
    parser.add_argument("--skip", type=int, default=0, help="leave out this many of the nearest (default: 0)")
    parser.add_argument(
        "--groups", action="store_true", help="leave out documents of the groups of the answers"
    )
    parser.add_argument("--corpus", choices=("all", "split"), default="all", help="search all documents (default), "
                        "or those of the training split")  # fmt: skip
    parser.add_argument("--heldout", type=float, default=0.1, help="share to hold out for each split that the data "
                        "lack, as in training (default: %(default)s)")  # fmt: skip
    parser.add_argument("--max-length", type=int, help="word pieces of a text to keep")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="device to run on (default: auto)")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.set_defaults(run=_run_mine, interrupted="the same command goes on where it was stopped")


def _run_mine(options: argparse.Namespace) -> None:
    from weince.lab.tasks.towers.mining import MineConfig, mine_to

    config = MineConfig(**{item.name: getattr(options, item.name) for item in fields(MineConfig)})
    print(mine_to(config, options.out))


def evaluate_towers(folder: Path, *, data: str | None, device: str) -> None:
    """Judge the towers of a run and print their figures."""
    from weince.lab.tasks.towers.task import evaluate_run
    from weince.lab.tasks.towers.training import RESULT, result_text

    print(result_text(evaluate_run(folder, data=data, device=device)))
    print(folder / RESULT)
