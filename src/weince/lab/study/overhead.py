"""The cost of the loss stage: time the losses on this machine, without training."""

import math

from weince.intervals import Interval
from weince.lab.bench import bench_loss
from weince.lab.study.aggregate import Line, Summary, reported

ROW, PAIRS, WIDTH, REPEATS = "batch_256", 256, 64, 50
LOSSES = {
    "InfoNCE": ("weince InfoNCELoss", "InfoNCE"),
    "WEINCE paper": ("weince WeinceLoss.paper", "WEINCE"),
    "WEINCE released": ("weince WeinceLoss (released)", "WEINCE"),
    "InfoNCE, plain torch": ("torch InfoNCE", "InfoNCE"),
}


def overhead(device: str | None) -> Summary:
    """Median milliseconds of a forward and a backward pass, beside the paper's figures."""
    timings = bench_loss(pairs=[PAIRS], d=WIDTH, device=device or "auto", repeats=REPEATS, compiled=False)
    found = {timing.name: timing.ms for timing in timings}
    lines = []
    for loss, (name, paper) in LOSSES.items():
        ms = found.get(name)
        lines.append(
            Line(
                figure="loss_ms",
                row=ROW,
                loss=loss,
                tried=f"{PAIRS} pairs of width {WIDTH}, median of {REPEATS}",
                reported=reported()["loss_ms"][ROW][paper],
                measured=None if ms is None else Interval(ms, math.nan, 1),
                validation=math.nan,
                against=None,
                planned=1,
            )
        )
    return Summary(tuple(lines), tuple(lines))
