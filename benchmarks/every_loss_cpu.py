"""Every loss on the CPU: forward and backward of 1,024 pairs, as a ratio to InfoNCE in the same run.

    python benchmarks/every_loss_cpu.py                 the dense and the chunked engine; a minute
    python benchmarks/every_loss_cpu.py --pairs 256 --repeats 5

All losses take turns, so that a busy moment of the machine affects them equally; the fastest of the repeats counts.
The pages of the losses quote this table.
"""

import argparse

import torch
from loss_cpu import step
from rich.progress import track

import weince

EVERY = {
    "InfoNCELoss": weince.InfoNCELoss,
    "DCLLoss": weince.DCLLoss,
    "DCLWLoss": weince.DCLWLoss,
    "DHELLoss": weince.DHELLoss,
    "SigLIPLoss": weince.SigLIPLoss,
    "HCLLoss": weince.HCLLoss,
    "DebiasedLoss": weince.DebiasedLoss,
    "RINCELoss": weince.RINCELoss,
    "MWLoss": weince.MWLoss,
    "LSEPairLoss": weince.LSEPairLoss,
    "SumMargLHLoss": weince.SumMargLHLoss,
    "FocalLoss": weince.FocalLoss,
    "AlignUniformLoss": weince.AlignUniformLoss,
    "KLBallLoss": weince.KLBallLoss,
    "TemperatureFreeLoss": weince.TemperatureFreeLoss,
    "TemperatureMixtureLoss": weince.TemperatureMixtureLoss,
    "WeibitLoss": weince.WeibitLoss,
    "WeinceLoss": weince.WeinceLoss,
    "WeinceLoss.paper": weince.WeinceLoss.paper,
    "WeinceLoss.negatives_only": weince.WeinceLoss.negatives_only,
}


def measure(pairs: int, d: int, repeats: int) -> dict[tuple[str, str], float]:
    """Fewest milliseconds of each loss on each engine."""
    z_i, z_j = (torch.randn(pairs, d).requires_grad_() for _ in range(2))
    losses = {
        (name, engine): make(engine=engine) for name, make in EVERY.items() for engine in ("dense", "chunked")
    }
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in losses}
    for repeat in track(range(repeats + 1), description=f"{pairs} pairs"):
        for key, loss in losses.items():
            taken = step(loss, z_i, z_j)
            if repeat:  # the first one warms up
                seconds[key].append(taken)
    return {key: 1e3 * min(values) for key, values in seconds.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=1024)
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    found = measure(options.pairs, options.d, options.repeats)
    one = found["InfoNCELoss", "dense"]
    print(
        f"{options.pairs} pairs, d = {options.d}, {torch.get_num_threads()} threads, torch {torch.__version__}\n"
    )
    print("| loss | dense, ms | times InfoNCE | chunked, ms | times InfoNCE |\n|---|---:|---:|---:|---:|")
    for name in EVERY:
        dense, chunked = found[name, "dense"], found[name, "chunked"]
        print(f"| `{name}` | {dense:.0f} | {dense / one:.1f} | {chunked:.0f} | {chunked / one:.1f} |")


if __name__ == "__main__":
    main()
