"""The link test and the Frechet ablation of a trained run, as measures of a table.

Both take up to 32 batches of 256 pairs, each two random views of a held-out image, embedded by the run's encoder and
projector.
"""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weince.files import write_text_aside
from weince.lab.tasks.base import Measure

if TYPE_CHECKING:
    import numpy as np

PAIRS, BATCHES, SEED = 256, 32, 0


def measure_tail(kind: str, folder: Path, device: str = "auto") -> None:
    """Measure ``link`` or ``frechet`` of a trained run, and write the figures into its folder."""
    from weince.lab.tasks.images.data import load
    from weince.lab.tasks.images.evaluation import fingerprint
    from weince.lab.tasks.images.runs import read_run, two_views

    run = read_run(folder)
    data = load(run.data, size=run.augment.size)
    z_i, z_j = two_views(folder, images=PAIRS * BATCHES, seed=SEED)
    told = {"data": data.name, "fingerprint": fingerprint(data), "pairs": len(z_i)}
    text = json.dumps({**tail_figures(kind, z_i, z_j), **told}, indent=1) + "\n"
    write_text_aside(folder / f"{kind}.json", text, "result")


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


LINK = Measure(
    "link.json",
    {
        "link_lam": "Weight of the shortfall in the blended link",
        "link_gain": "Held-out gain of the blended link over softmax, nats an anchor",
        "link_ratio": "exp of that gain",
    },
    take=partial(measure_tail, "link"),
)
FRECHET = Measure(
    "frechet.json",
    {
        "frechet_lam_w": "Weight of the shortfall",
        "frechet_gain_w": "Gain of the shortfall over softmax, nats an anchor",
        "frechet_gain_f": "Gain of the heavy-tail coordinate over softmax, nats an anchor",
        "frechet_gain_wf": "Gain of both over the shortfall alone, nats an anchor",
        "frechet_lam_f": "Weight of the heavy-tail coordinate in the joint fit",
    },
    take=partial(measure_tail, "frechet"),
)
