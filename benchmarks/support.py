"""What is supported: every loss on every engine, in every layout, with every option of a batch or of a pair.

    python benchmarks/support.py                        a table for the terminal; two minutes on a CPU
    python benchmarks/support.py --write support.md

For each cell, small batches run forward and backward, and their values are compared with those of the dense engine.
``yes`` means that every feature works; otherwise the cell names the features that do not, and a note below the table
says why. A cell that is empty, or says no for a reason that ``excuse`` does not know, is an error. ``gathered`` and
``ring`` run on two ranks. Without a GPU the kernels of ``fused`` run in Triton's interpreter (TRITON_INTERPRET=1).
"""

import argparse
import importlib
import os
import sys
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
from weince.files import write_text_aside

LAYOUTS = ("views", "cross", "clip", "labels")
FEATURES = (
    "plain", "ids", "ignore", "learned", "own negatives", "shared negatives", "ignore_above", "offset", "weights",
    "labels of both", "within", "dot", "hardness", "learn_temperature",
)  # fmt: skip
ENGINES = ("dense", "chunked", "fused")
RANKED = ("gathered", "ring")
N, D = 12, 8


class Made(NamedTuple):
    """How to make a loss, and which option of it can be learned."""

    make: Callable[..., nn.Module]
    learns: str | None


LOSSES: dict[str, Made] = {
    "InfoNCELoss": Made(weince.InfoNCELoss, "temperature"),
    "SupConLoss": Made(weince.SupConLoss, "temperature"),
    "MWLoss": Made(weince.MWLoss, "temperature"),
    "LSEPairLoss": Made(weince.LSEPairLoss, "temperature"),
    "SumMargLHLoss": Made(weince.SumMargLHLoss, "temperature"),
    "FocalLoss": Made(weince.FocalLoss, "temperature"),
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


OPTIONS: dict[str, dict[str, Any]] = {
    "ignore_above": {"ignore_above": 0.1},
    "within": {"within": True},
    "dot": {"score": "dot"},
    "hardness": {"hardness": 2.0},
    "learn_temperature": {"learn_temperature": True},
}
"""Options of the class that a feature stands for."""

NOTHING_TO_LEARN = "nothing to learn"
RANKS = 2
CLOSE = 1e-3
"""Largest relative difference from the dense engine: the kernels split rows into two bfloat16 parts, 16 bits."""


def excuse(loss: str, layout: str, engine: str, feature: str) -> str | None:
    """Part of the error message that an impossible combination must raise; None if the combination must work."""
    made = LOSSES[loss]
    if feature == "learned" and made.learns is None:
        return NOTHING_TO_LEARN
    example = made.make()
    if layout == "labels" and not example.several_positives:
        return "wants one positive per anchor"
    if layout != "views" and example.same_view:
        return "contrasts within a view"
    return _excuse_of_option(example, layout, feature)


def _excuse_of_option(loss: Any, layout: str, feature: str) -> str | None:
    towers = layout in ("cross", "clip")
    if feature in ("own negatives", "shared negatives") and not towers:
        return "negatives= goes with"
    if feature == "ignore_above" and layout == "labels":
        return "ignore_above compares with one positive"
    if feature == "offset" and not loss.takes_offset:
        return "is no softmax of its logits"
    if feature == "offset" and not towers:
        return "offset= goes with"
    if feature == "labels of both" and layout == "views":
        return "takes no labels" if loss.several_positives else "wants one positive per anchor"
    if feature == "labels of both" and layout == "labels":
        return "wants one tensor of labels"
    if feature == "labels of both" and not loss.several_positives:
        return "wants one positive per anchor"
    if feature == "within" and not towers:
        return "within=True goes with"
    if feature == "dot" and not loss.takes_dot:
        return "wants cosines"
    takes = {*loss.options.__annotations__, *(("hardness",) if type(loss) is weince.HCLLoss else ())}
    if feature in ("hardness", "learn_temperature") and feature not in takes:
        return "has no option"
    if feature == "hardness" and not loss.takes_hardness and type(loss) is not weince.HCLLoss:
        return "has no softmax of negatives alone"
    return None


def faults(found: dict[tuple[str, ...], str], engines: tuple[str, ...]) -> list[str]:
    """Cells that are empty, that fail without a known reason, or that work although they should be refused."""
    wrong = []
    for cell in cells(engines):
        for feature in FEATURES:
            outcome, reason = found.get((*cell, feature), ""), excuse(*cell, feature)
            as_wanted = outcome == "yes" if reason is None else reason in outcome
            if not as_wanted:
                wrong.append(f"{', '.join((*cell, feature))}: wanted {reason or 'yes'!r}; got {outcome!r}")
    return wrong


def batch(layout: str, feature: str, ranks: range) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Embeddings of some ranks, and the labels, ids or ignored pairs that the layout and feature need."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [torch.Generator().manual_seed(rank) for rank in ranks]
    z_i, z_j = (
        torch.cat([torch.randn(N, D, generator=own) for own in rows]).to(device).requires_grad_()
        for _ in range(2)
    )
    roles: dict[str, Tensor] = {}
    every = torch.arange(N, device=device).repeat(len(ranks))
    if layout == "labels":
        roles["labels"] = every % 4
    if feature == "ids":
        roles["ids"] = every % 6
    if feature == "own negatives":
        roles["negatives"] = torch.cat([torch.randn(N, 2, D, generator=own) for own in rows]).to(device)
    if feature == "shared negatives":
        roles["negatives"] = torch.cat([torch.randn(3, D, generator=own) for own in rows]).to(device)
    if feature == "offset":
        roles["offset"] = torch.cat([torch.randn(N, generator=own) for own in rows]).to(device)
    if feature == "weights":
        roles["weights"] = torch.cat([torch.rand(N, generator=own) for own in rows]).to(device)
    if feature == "labels of both":
        roles["labels"] = (every % 5, every % 4)  # type: ignore[assignment]
    if feature == "ignore":
        anchors = len(z_i) * (2 if layout in ("views", "labels") else 1)
        roles["ignore"] = torch.zeros(anchors, anchors, dtype=torch.bool, device=device)
        for start in range(0, len(z_i), N):  # a pair of each rank
            roles["ignore"][start, start + 2] = True
    return z_i, z_j, roles


def attempt(loss: str, layout: str, engine: str, feature: str) -> str:
    """Try one combination; returns ``yes``, or why it does not work."""
    made, options = LOSSES[loss], dict[str, Any](candidates=layout)
    if feature == "learned":
        if made.learns is None:
            return NOTHING_TO_LEARN
        if made.learns != "itself":
            options[made.learns] = nn.Parameter(torch.tensor(0.5))
    options |= OPTIONS.get(feature, {})
    ranked = engine in RANKED
    own = range(dist.get_rank(), dist.get_rank() + 1) if ranked else range(1)
    z_i, z_j, roles = batch(layout, feature, own)
    where = (
        {"gather": "ring" if engine == "ring" else True} if ranked else {"engine": engine, "gather": False}
    )
    try:
        made_here = made.make(**options, **where).to(z_i.device)
        value = made_here(z_i, z_j, **roles)
        value.backward()
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    learned = [parameter.grad for parameter in made_here.parameters()]
    if any(grad is None or not grad.isfinite().all() for grad in (z_i.grad, z_j.grad, *learned)):
        return "a gradient is not finite, or there is none"
    value = value.detach()
    if ranked:
        dist.all_reduce(value)
        value /= RANKS
    z_i, z_j, roles = batch(layout, feature, range(RANKS if ranked else 1))
    wanted = made.make(**options, engine="dense", gather=False).to(z_i.device)(z_i, z_j, **roles)
    close = torch.isclose(value, wanted, rtol=CLOSE, atol=1e-6)
    return (
        "yes" if close else f"the value is {float(value):.6g}, that of the dense engine {float(wanted):.6g}"
    )


def cells(engines: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    for loss in LOSSES:
        for layout in LAYOUTS:
            for engine in engines:
                yield loss, layout, engine


def _rank(rank: int, folder: str, found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for cell in cells(RANKED):
        for feature in FEATURES:
            outcome = attempt(*cell, feature)
            if rank == 0:
                found[(*cell, feature)] = outcome
    dist.destroy_process_group()


def on_two_ranks(folder: str) -> dict[tuple[str, ...], str]:
    with mp.Manager() as manager:
        found = manager.dict()
        mp.spawn(_rank, args=(folder, found), nprocs=RANKS)
        return dict(found)


def interpret_fused() -> None:
    """Without a GPU, let the dispatcher choose the kernels for tensors on the CPU."""
    if not torch.cuda.is_available():
        module = importlib.import_module("weince.engines.choose")  # `weince.engines.choose` is a function
        module.why_not_fused = lambda contest, need: None  # type: ignore[attr-defined]


def table(found: dict[tuple[str, ...], str]) -> list[str]:
    """The table as Markdown, with a numbered note for every reason."""
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
                    feature: why for feature, why in outcome.items() if why not in ("yes", NOTHING_TO_LEARN)
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
        write_text_aside(options.write, "\n".join([*head, *lines, ""]))
    wrong = faults(found, (*ENGINES, *RANKED))
    number = len(list(cells((*ENGINES, *RANKED)))) * len(FEATURES)
    sys.exit("\n".join(wrong) if wrong else print(f"\nall of {number} combinations work or have a reason"))


if __name__ == "__main__":
    main()
