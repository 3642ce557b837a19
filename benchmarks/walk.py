"""How long the way of one step is: the files and functions of this library that a forward and backward pass calls.

    python benchmarks/walk.py                 InfoNCE and WEINCE on a CPU
    python benchmarks/walk.py --list          and each function with its number of calls

Counted by ``sys.setprofile`` in the second step, when everything is imported and cached.
"""

import argparse
import sys
from collections import Counter
from typing import Any

import torch

import weince

LOSSES = {"InfoNCELoss(0.5)": weince.InfoNCELoss(0.5), "WeinceLoss()": weince.WeinceLoss()}


def calls(loss: Any) -> Counter[tuple[str, str]]:
    """Number of calls of each function, by file and name."""
    z_i, z_j = (torch.randn(64, 16).requires_grad_() for _ in range(2))
    loss(z_i, z_j).backward()
    found: Counter[tuple[str, str]] = Counter()

    def seen(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/src/weince/" in file:
            found[file.rpartition("/src/weince/")[2], frame.f_code.co_qualname] += 1

    sys.setprofile(seen)
    try:
        loss(z_i, z_j).backward()
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="also list the functions")
    options = parser.parse_args()
    for name, loss in LOSSES.items():
        found = calls(loss)
        files = {file for file, _ in found}
        print(f"{name}: {len(files)} files, {len(found)} functions, {found.total()} calls")
        for (file, function), count in found.items() if options.list else ():
            print(f"  {file:28} {function:50} {count}")


if __name__ == "__main__":
    main()
