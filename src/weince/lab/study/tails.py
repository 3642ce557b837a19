"""The link test and the Frechet ablation on a trained run: ``python -m weince.lab.study.tails link RUN_FOLDER``.

Both use up to 32 batches of 256 pairs, each two random views of a held-out image, embedded by the run's encoder and
projector. The results are written to ``link.json`` or ``frechet.json`` in the run's folder.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from weince.files import write_text_aside

PAIRS, BATCHES, SEED = 256, 32, 0


def measure(kind: str, folder: Path) -> dict[str, Any]:
    """The figures of a run, by their names in tables."""
    from weince.lab.tasks.images.data import load
    from weince.lab.tasks.images.evaluation import fingerprint
    from weince.lab.tasks.images.runs import read_run, two_views

    run = read_run(folder)
    data = load(run.data, size=run.augment.size)
    z_i, z_j = two_views(folder, images=PAIRS * BATCHES, seed=SEED)
    return {**figures(kind, z_i, z_j), "data": data.name, "fingerprint": fingerprint(data), "pairs": len(z_i)}


def figures(kind: str, z_i: np.ndarray, z_j: np.ndarray) -> dict[str, Any]:
    """The figures of embedded pairs ``(n, d)``, by their names in tables."""
    from weince.evt import link_bank, link_test
    from weince.lab.paper.ablations import frechet_ablation

    # At least four batches are needed, two to fit and two to evaluate: small test sets get smaller batches.
    bank = link_bank(z_i, z_j, batch_size=min(PAIRS, len(z_i) // 4), batches=BATCHES, rng=SEED)
    if kind == "link":
        test = link_test(*bank, rng=SEED)
        return {
            "link_lam": test.lam,
            "link_gain": test.gain,
            "link_ratio": test.gain_ratio,
            "tau": test.tau,
            "tau0": test.tau0,
            "t_p_value": test.t_p_value,
            "lr_p_value": test.lr_p_value,
            "notes": list(test.notes),
        }
    ablation = frechet_ablation(*bank, rng=SEED)
    return {
        "frechet_lam_w": ablation.lam_w,
        "frechet_gain_w": ablation.w_over_0.gain,
        "frechet_gain_f": ablation.f_over_0.gain,
        "frechet_gain_wf": ablation.wf_over_w.gain,
        "frechet_lam_f": ablation.lam_f_full,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="weince.lab.study.tails", description="Measure a run's score tail.")
    parser.add_argument("kind", choices=["link", "frechet"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    text = json.dumps(measure(options.kind, options.folder), indent=1) + "\n"
    path = options.folder / f"{options.kind}.json"
    write_text_aside(path, text, "result")


if __name__ == "__main__":
    main()
