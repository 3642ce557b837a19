"""A table whose runs take seconds: digits, the tiny encoder, small views."""

from collections.abc import Sequence
from pathlib import Path

CONFIG = """\
task: vision
data: digits
encoder: tiny
augment: {{size: 8}}
optimizer: {{lr: 0.002}}
epochs: {epochs}
batch: 256
"""
TABLE = """\
title: Two losses on <digits> | %
figures: [linear, r1]
rows: ["{config}"]
baseline: InfoNCE
seeds: {seeds}
losses:
  InfoNCE: {{set: {{loss.preset: infonce}}}}
  paper: {{set: {{loss.preset: paper}}}}
"""


def small_table(folder: Path, *, epochs: int = 1, seeds: Sequence[int] = (7, 21)) -> Path:
    """Write a configuration and a table of two losses and some seeds; returns the table's file."""
    config = folder / "digits_small.yaml"
    config.write_text(CONFIG.format(epochs=epochs))
    table = folder / "small.yaml"
    table.write_text(TABLE.format(config=config, seeds=list(seeds)))
    return table
