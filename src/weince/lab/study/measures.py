"""How a trained run is measured: the file that holds its figures, their names, and how they are read.

The link test and the Frechet ablation are measured here, on up to 32 batches of 256 pairs, each two random views of a
held-out image, embedded by the run's encoder and projector.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weince.files import write_text_aside
from weince.lab.tasks.images.evaluation.knn import RECALLS

if TYPE_CHECKING:
    import numpy as np

PAIRS, BATCHES, SEED = 256, 32, 0


@dataclass(frozen=True)
class Measure:
    """How a trained run is measured.

    Attributes:
        file: File with the figures, in the run's folder.
        figures: Names of the figures, each with its heading in a table.
        test: Key of a reported figure; ``{}`` stands for the figure's name.
        validation: Key of a figure that tries may be chosen by; empty if there is none.
        keys: Dotted keys in the file for figures that have another name there.
        digits: Digits after the point that a table shows.
    """

    file: str
    figures: Mapping[str, str]
    test: str = "{}"
    validation: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    digits: int = 3


MEASURES = {
    "evaluation": Measure(
        "evaluation.json",
        {
            "linear": "Linear probe, %",
            "knn": "Weighted vote of the 50 nearest neighbours, %",
            **{f"r{k}": f"Recall at {k}, %" for k in RECALLS},
            "map_r": "MAP@R, %",
        },
        "{}_test_mean",
        "{}_validation_mean",
        digits=2,
    ),
    "sts": Measure(
        "result.json",
        {"stsb": "Spearman on STS-B, x 100", "sts": "Mean Spearman of the STS tasks, x 100"},
        "{}_test",
        "{}_validation",
        {"stsb_validation": "dev", "stsb_test": "tasks.STSB", "sts_test": "mean"},
    ),
    "towers": Measure(
        "evaluation.json",
        {
            "ndcg": "nDCG@10, x 100",
            **{f"recall_{k}": f"Recall at {k}, x 100" for k in (1, 10, 100)},
            "mrr": "MRR@10, x 100",
            "map": "MAP, x 100",
        },
        "{}_test",
        "{}_validation",
        digits=2,
    ),
    "link": Measure(
        "link.json",
        {
            "link_lam": "Weight of the shortfall in the blended link",
            "link_gain": "Held-out gain of the blended link over softmax, nats an anchor",
            "link_ratio": "exp of that gain",
        },
    ),
    "frechet": Measure(
        "frechet.json",
        {
            "frechet_lam_w": "Weight of the shortfall",
            "frechet_gain_w": "Gain of the shortfall over softmax, nats an anchor",
            "frechet_gain_f": "Gain of the heavy-tail coordinate over softmax, nats an anchor",
            "frechet_gain_wf": "Gain of both over the shortfall alone, nats an anchor",
            "frechet_lam_f": "Weight of the heavy-tail coordinate in the joint fit",
        },
    ),
}


def measure_tail(kind: str, folder: Path) -> None:
    """Measure ``link`` or ``frechet`` of a trained run, and write the figures into its folder."""
    from weince.lab.tasks.images.data import load
    from weince.lab.tasks.images.evaluation import fingerprint
    from weince.lab.tasks.images.runs import read_run, two_views

    run = read_run(folder)
    data = load(run.data, size=run.augment.size)
    z_i, z_j = two_views(folder, images=PAIRS * BATCHES, seed=SEED)
    told = {"data": data.name, "fingerprint": fingerprint(data), "pairs": len(z_i)}
    text = json.dumps({**tail_figures(kind, z_i, z_j), **told}, indent=1) + "\n"
    write_text_aside(folder / MEASURES[kind].file, text, "result")


def tail_figures(kind: str, z_i: "np.ndarray", z_j: "np.ndarray") -> dict[str, Any]:
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
