"""The command for two towers, ``weince mine``."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from weince.command_line import REQUIRED, DeviceName, option


@dataclass(frozen=True, kw_only=True)
class Mine:
    """Find hard negatives for pairs of texts.

    Find the nearest documents of each training query that do not answer it, by exact search, and
    write them as lines of JSON: query, positive, negative_1, ..., scores. Needs weince[text].
    """

    data: str = option(REQUIRED, "pairs: a BEIR folder, a .csv, .tsv, .jsonl or .parquet")
    model: str = option(REQUIRED, "encoder: a folder, a hub name or my_package:factory")
    out: Path = option(REQUIRED, "file to write")
    query_model: str | None = option(None, "another encoder for queries")
    query_prompt: str = option("", "text in front of each query")
    document_prompt: str = option("", "text in front of each document")
    k: int = option(4, "negatives for each pair")
    margin: float | None = option(None, "negatives score at least this much below the positive")
    relative: float | None = option(
        None, "negatives score at most this share of the positive's score", "SHARE"
    )
    skip: int = option(0, "leave out this many of the nearest (default: 0)")
    groups: bool = option(False, "leave out documents of the groups of the answers")
    corpus: Literal["all", "split"] = option("all", "search all documents, or those of the training split")
    heldout: float = option(0.1, "share to hold out for each split that the data lack, as in training")
    max_length: int | None = option(None, "word pieces of a text to keep")
    device: DeviceName = option("auto", "device to run on")

    interrupted: ClassVar = "the same command resumes it"
    examples: ClassVar = """
weince mine --data pairs.csv --model sentence-transformers/all-MiniLM-L6-v2 --out negatives.jsonl
weince mine --data beir/ --model runs/a/model --k 8 --margin 0.05 --groups --out negatives.jsonl
weince train --config retrieval --data beir/ --negatives negatives.jsonl --hard 4
The same command resumes a search that was stopped.
"""

    def __call__(self, typed: str) -> None:
        from weince.lab.tasks.towers.mining import MineConfig, mine_to

        config = MineConfig(**{item.name: getattr(self, item.name) for item in fields(MineConfig)})
        print(mine_to(config, self.out))
