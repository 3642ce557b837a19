"""Recompute, from a checkout of the authors' repository, their loss on the inputs stored in this folder.

    git clone https://github.com/hsme98/weince checkout
    git -C checkout checkout 49485f37e3698b735dd6ec38f5c8d26df2d8403e
    python tests/data/record.py checkout            # compares, writes nothing
    python tests/data/record.py checkout --write    # writes release_*.npz again

This runs the authors' code, so read that first. Everything is computed in float64 on the CPU.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
SOURCE = Path("simclr/modules/nt_xent_hard_select.py")
TERMS = {
    **{"use_weib_topm": True, "weib_lambda": 0.5, "weib_top_m": 50, "auto_weib_beta": True},
    **{"use_pl_topm": True, "pl_lambda": 0.5, "pl_top_m": 50},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "pl": {"policy": "pl"},
    "weibit_beta4": {"policy": "weibit", "weib_beta": 4.0},
    "tlambda": {"policy": "tlambda_select"},
    "tlambda_rho": {"policy": "tlambda_select_rho"},
    "tlambda_aic": {"policy": "tlambda_select_aic"},
    "released": {"policy": "tlambda_select", **TERMS},
}


def authors_class(checkout: Path) -> Any:
    """The class of the authors' loss, from a file of their checkout."""
    path = checkout / SOURCE
    if not path.is_file():
        raise SystemExit(f"{checkout} is no checkout of hsme98/weince: it has no {SOURCE}")
    spec = importlib.util.spec_from_file_location("authors_loss", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NT_Xent


def recorded(authors: Any, z_i: torch.Tensor, z_j: torch.Tensor) -> dict[str, np.ndarray]:
    """Losses, gradients and tail statistics at temperature 0.5."""
    found: dict[str, Any] = {"z_i": z_i, "z_j": z_j}
    for name, options in OPTIONS.items():
        loss = authors(len(z_i), 0.5, **options).double()
        leaves = [z.clone().requires_grad_() for z in (z_i, z_j)]
        value = loss(*leaves)
        found[f"loss_{name}"] = value.detach()
        found[f"grad_i_{name}"], found[f"grad_j_{name}"] = torch.autograd.grad(value, leaves)
    found["released_batch_beta"] = torch.tensor(loss.last_beta_t, dtype=torch.float64)
    rows = torch.cat([z_i, z_j])
    scores = torch.nn.functional.cosine_similarity(rows.unsqueeze(1), rows.unsqueeze(0), dim=2)
    _, _, beta, r2, daic, rho, rho0, used = loss._hard_select_decision(scores)
    found |= {
        "beta": beta,
        "r2": r2,
        "daic": daic,
        "rho": rho,
        "rho0": torch.tensor(rho0, dtype=torch.float64),
    }
    found["lam"] = loss._soft_select_lambda(daic, rho, rho0, mode="both")
    found["n_eff"] = torch.tensor(used)
    return {name: value.numpy() for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="folder of the authors' repository")
    parser.add_argument("--write", action="store_true", help="write the files again instead of comparing")
    given = parser.parse_args()
    authors, apart = authors_class(given.checkout), 0
    for path in sorted(HERE.glob("release_*.npz")):
        with np.load(path, allow_pickle=False) as file:
            kept = {name: file[name] for name in file.files}
        new = recorded(authors, *(torch.from_numpy(kept[name]) for name in ("z_i", "z_j")))
        if given.write:
            np.savez(path, **new)
            continue
        for name in sorted(kept.keys() | new.keys()):
            if name not in kept or name not in new:
                print(f"{path.name}: {name} is only in {'the file' if name in kept else 'the recording'}")
                apart += 1
            elif not np.allclose(kept[name], new[name], rtol=1e-9, atol=1e-9 * np.abs(kept[name]).max()):
                print(f"{path.name}: {name} differs by {np.abs(kept[name] - new[name]).max():.2e}")
                apart += 1
    print("written" if given.write else f"{apart} values differ")
    sys.exit(apart > 0)


if __name__ == "__main__":
    main()
