"""What is supported: every loss on every engine, in every layout, with ids, ignored pairs and a learned temperature.

    python benchmarks/support.py                        a table for the terminal; about a minute on a CPU
    python benchmarks/support.py --write support.md

Each cell is a forward and a backward pass of a small batch. ``yes`` means that every feature works; else the cell
says what does not, and a line below the table why. ``gathered`` and ``ring`` run on two ranks. Without a GPU the
kernels of ``fused`` run in Triton's interpreter (TRITON_INTERPRET=1), if Triton is installed.
"""

import argparse
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch.distributed as dist
import torch.multiprocessing as mp
from rich.progress import track
from torch import Tensor, nn

import weince

LAYOUTS = ("views", "cross", "clip", "labels")
FEATURES = ("plain", "ids", "ignore", "learned")
ENGINES = ("dense", "chunked", "fused")
RANKED = ("gathered", "ring")
N, D = 12, 8


class Made(NamedTuple):
    """How to make a loss, and what it can learn."""

    make: Callable[..., nn.Module]
    learns: str | None


LOSSES: dict[str, Made] = {
    "InfoNCELoss": Made(weince.InfoNCELoss, "temperature"),
    "SupConLoss": Made(weince.SupConLoss, "temperature"),
    "DCLLoss": Made(weince.DCLLoss, "temperature"),
    "DCLWLoss": Made(weince.DCLWLoss, "temperature"),
    "HCLLoss": Made(weince.HCLLoss, "temperature"),
    "DebiasedLoss": Made(weince.DebiasedLoss, "temperature"),
    "DHELLoss": Made(weince.DHELLoss, "temperature"),
    "RINCELoss": Made(weince.RINCELoss, "temperature"),
    "AlignUniformLoss": Made(weince.AlignUniformLoss, None),
    "SigLIPLoss": Made(weince.SigLIPLoss, "itself"),
    "KLBallLoss": Made(weince.KLBallLoss, None),
    "TemperatureMixtureLoss": Made(weince.TemperatureMixtureLoss, "temperature"),
    "TemperatureFreeLoss": Made(weince.TemperatureFreeLoss, None),
    "WeibitLoss": Made(weince.WeibitLoss, "beta"),
    "WeinceLoss": Made(weince.WeinceLoss, "temperature"),
    "WeinceLoss.paper": Made(weince.WeinceLoss.paper, "temperature"),
    "WeinceLoss.negatives_only": Made(weince.WeinceLoss.negatives_only, "temperature"),
    "LinkLoss of a function": Made(lambda **options: weince.LinkLoss(_cubic, **options), None),
}


def _cubic(s: Tensor) -> Tensor:
    return 5 * s + s**3


def attempt(loss: str, layout: str, engine: str, feature: str) -> str:
    """``yes``, or why not, of one combination."""
    made, options = LOSSES[loss], dict[str, Any](candidates=layout)
    if feature == "learned":
        if made.learns is None:
            return "nothing to learn"
        if made.learns != "itself":
            options[made.learns] = nn.Parameter(torch.tensor(0.5))
    if engine == "ring":
        options["gather"] = "ring"
    elif engine != "gathered":
        options |= {"engine": engine, "gather": False}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    z_i, z_j = (torch.randn(N, D, generator=rows).to(device).requires_grad_() for _ in range(2))
    roles: dict[str, Tensor] = {}
    anchors = 2 * N if layout in ("views", "labels") else N
    if layout == "labels":
        roles["labels"] = (torch.arange(N) % 4).to(device)
    if feature == "ids":
        roles["ids"] = (torch.arange(N) % 6).to(device)
    if feature == "ignore":
        roles["ignore"] = torch.zeros(anchors, anchors, dtype=torch.bool, device=device)
    try:
        value = made.make(**options).to(device)(z_i, z_j, **roles)
        value.backward()
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    finite = bool(value.isfinite()) and bool(z_i.grad.isfinite().all())
    return "yes" if finite else "not finite"


def cells(engines: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    for loss in LOSSES:
        for layout in LAYOUTS:
            for engine in engines:
                yield loss, layout, engine


def _rank(rank: int, folder: str, found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for cell in cells(RANKED):
        for feature in FEATURES:
            outcome = attempt(*cell, feature)
            if rank == 0:
                found[(*cell, feature)] = outcome
    dist.destroy_process_group()


def on_two_ranks(folder: str) -> dict[tuple[str, ...], str]:
    with mp.Manager() as manager:
        found = manager.dict()
        mp.spawn(_rank, args=(folder, found), nprocs=2)
        return dict(found)


def interpret_fused() -> None:
    """Without a GPU, let the dispatcher take the kernels for tensors on the CPU."""
    if not torch.cuda.is_available():
        module = importlib.import_module("weince.engines.choose")  # the function has the same name
        module.why_not_fused = lambda contest, need: None  # type: ignore[attr-defined]


def table(found: dict[tuple[str, ...], str]) -> list[str]:
    """The table as Markdown, with a note for every reason."""
    notes: dict[str, int] = {}
    lines = [
        "| loss | candidates | " + " | ".join((*ENGINES, *RANKED)) + " |",
        "|---|---|" + "---|" * (len(ENGINES) + len(RANKED)),
    ]
    for loss in LOSSES:
        for layout in LAYOUTS:
            texts = []
            for engine in (*ENGINES, *RANKED):
                outcome = {feature: found[loss, layout, engine, feature] for feature in FEATURES}
                bad = {
                    feature: why for feature, why in outcome.items() if why not in ("yes", "nothing to learn")
                }
                numbers = {feature: notes.setdefault(why, len(notes) + 1) for feature, why in bad.items()}
                if "plain" in bad:
                    texts.append(f"no [{numbers['plain']}]")
                else:
                    texts.append(
                        "yes" + "".join(f", no {name} [{number}]" for name, number in numbers.items())
                    )
            lines.append(f"| {loss} | {layout} | " + " | ".join(texts) + " |")
    return [*lines, "", *(f"{number}. {why}" for why, number in notes.items())]


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table as Markdown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = on_two_ranks(folder)
    interpret_fused()
    for cell in track(list(cells(ENGINES)), description="losses"):
        for feature in FEATURES:
            found[(*cell, feature)] = attempt(*cell, feature)
    lines = table(found)
    print("\n".join(lines))
    if options.write:
        head = [
            "# What is supported",
            "",
            "Written by `python benchmarks/support.py --write FILE`.",
            "",
        ]
        options.write.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
