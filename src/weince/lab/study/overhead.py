"""The table ``overhead``: time the losses on this machine, without training, beside the paper's figures."""

import math
from pathlib import Path

from weince.files import check_writable
from weince.intervals import Interval
from weince.lab.study.provenance import commit, hardware
from weince.lab.study.statistics import TableLine, TableLines, reported
from weince.lab.study.table_page import TablePage, write_table

TITLE = "Cost of the loss stage (reported on an NVIDIA L40S)"
ROW, PAIRS, WIDTH, REPEATS = "batch_256", 256, 64, 50
LOSSES = {
    "InfoNCE": ("weince InfoNCELoss", "InfoNCE"),
    "WEINCE paper": ("weince WeinceLoss.paper", "WEINCE"),
    "WEINCE released": ("weince WeinceLoss (released)", "WEINCE"),
    "InfoNCE, plain torch": ("torch InfoNCE", "InfoNCE"),
}


def write_overhead(folder: Path, device: str, command: str) -> Path:
    """Write the table; returns its page."""
    check_writable(folder)
    return write_table(
        TablePage(
            TITLE,
            "This table shows what the losses cost on this machine, beside what the paper reports.",
            "InfoNCE",
            time_losses(device),
            {"hardware": hardware(device), "commit": commit(), "command": command},
            notes=[
                "One forward and one backward pass of the loss alone, on embeddings that are there already."
            ],
        ),
        folder,
    )


def time_losses(device: str) -> TableLines:
    """Median milliseconds of a forward and a backward pass, beside the paper's figures."""
    from weince.lab.bench import bench_loss  # here, since it imports torch

    timings = bench_loss(pairs=[PAIRS], d=WIDTH, device=device, repeats=REPEATS, compiled=False)
    ms = {timing.name: timing.ms for timing in timings}
    tried = f"{PAIRS} pairs of width {WIDTH}, median of {REPEATS}"
    lines = [
        TableLine(
            figure="loss_ms",
            row=ROW,
            loss=loss,
            tried=tried,
            reported=reported()["loss_ms"][ROW][paper],
            measured=None if (median := ms.get(name)) is None else Interval(median, math.nan, 1),
            validation=math.nan,
            against=None,
            planned=1,
            digits=3,
        )
        for loss, (name, paper) in LOSSES.items()
    ]
    return TableLines(lines, lines)
