"""Statistics of score tails: arrays in, frozen dataclasses out. xi < 0 always means a bounded tail."""

from weince.evt.gpd import (
    CappedFit,
    Exceedances,
    ExponentialFit,
    GPDFit,
    fit_capped,
    fit_exponential,
    fit_gpd,
    select_exceedances,
)
from weince.evt.pot import (
    BatchXi,
    GoodnessOfFit,
    MeanResidualLife,
    NegativeCosines,
    TailCurves,
    ThresholdStability,
    goodness_of_fit,
    mean_residual_life,
    tail_curves,
    threshold_stability,
    unique_negative_cosines,
    xi_over_batches,
)

__all__ = [
    "BatchXi",
    "CappedFit",
    "Exceedances",
    "ExponentialFit",
    "GPDFit",
    "GoodnessOfFit",
    "MeanResidualLife",
    "NegativeCosines",
    "TailCurves",
    "ThresholdStability",
    "fit_capped",
    "fit_exponential",
    "fit_gpd",
    "goodness_of_fit",
    "mean_residual_life",
    "select_exceedances",
    "tail_curves",
    "threshold_stability",
    "unique_negative_cosines",
    "xi_over_batches",
]
