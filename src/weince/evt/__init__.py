"""Statistics of score tails: arrays in, frozen dataclasses out. xi < 0 always means a bounded tail."""

from weince.evt.ablations import (
    AblationPoint,
    FrechetAblation,
    frechet_ablation,
    hard_negative_ablation,
    pool_ablation,
)
from weince.evt.anchors import (
    AnchorComparison,
    AnchorTails,
    DaicArtefact,
    anchor_tails,
    compare_anchor_tails,
    daic_artefact,
)
from weince.evt.batch_tail import BatchXi, NegativeCosines, xi_over_batches
from weince.evt.gpd import CappedFit, ExponentialFit, GPDFit, fit_capped, fit_exponential, fit_gpd
from weince.evt.link_fit import GridFit, LinkFit, fit_grid, fit_link
from weince.evt.link_rivals import LinkRivals, VaryingLink, link_rivals
from weince.evt.link_test import Gain, LinkBank, LinkTest, draw_positives, link_bank, link_test
from weince.evt.noise_floor import (
    CoordinateMismatch,
    LinkTheory,
    NoiseFloor,
    coordinate_mismatch,
    link_theory,
    noise_floor,
)
from weince.evt.pot import (
    GoodnessOfFit,
    MeanResidualLife,
    TailCurves,
    ThresholdStability,
    goodness_of_fit,
    mean_residual_life,
    tail_curves,
    threshold_stability,
)
from weince.evt.risk import RiskGradient, risk_gradient
from weince.evt.top1 import Top1, top1_asymptotics

__all__ = [
    "AblationPoint",
    "AnchorComparison",
    "AnchorTails",
    "BatchXi",
    "CappedFit",
    "CoordinateMismatch",
    "DaicArtefact",
    "ExponentialFit",
    "FrechetAblation",
    "GPDFit",
    "Gain",
    "GoodnessOfFit",
    "GridFit",
    "LinkBank",
    "LinkFit",
    "LinkRivals",
    "LinkTest",
    "LinkTheory",
    "MeanResidualLife",
    "NegativeCosines",
    "NoiseFloor",
    "RiskGradient",
    "TailCurves",
    "ThresholdStability",
    "Top1",
    "VaryingLink",
    "anchor_tails",
    "compare_anchor_tails",
    "coordinate_mismatch",
    "daic_artefact",
    "draw_positives",
    "fit_capped",
    "fit_exponential",
    "fit_gpd",
    "fit_grid",
    "fit_link",
    "frechet_ablation",
    "goodness_of_fit",
    "hard_negative_ablation",
    "link_bank",
    "link_rivals",
    "link_test",
    "link_theory",
    "mean_residual_life",
    "noise_floor",
    "pool_ablation",
    "risk_gradient",
    "tail_curves",
    "threshold_stability",
    "top1_asymptotics",
    "xi_over_batches",
]
